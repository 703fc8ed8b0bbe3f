"""Results kept whole: what comes back is equal in type and content, and what would not is refused."""

import collections
import enum
import struct
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from transformers.generation.utils import GenerateDecoderOnlyOutput
from transformers.modeling_outputs import BaseModelOutput

from provenance.integrity import whole
from provenance.integrity.whole import NotWhole, decode, encode

SCALARS = st.none() | st.booleans() | st.integers() | st.floats() | st.text() | st.binary() | st.complex_numbers()
KEYS = st.none() | st.booleans() | st.integers() | st.text() | st.binary() | st.tuples(st.integers(), st.text())
VALUES = st.recursive(
    SCALARS | st.frozensets(st.integers() | st.text(), max_size=4) | st.sets(st.binary(), max_size=4),
    lambda inner: st.lists(inner, max_size=4) | st.tuples(inner, inner) | st.dictionaries(KEYS, inner, max_size=4),
    max_leaves=12,
)


def bits(value: Any) -> Any:
    """Write a value so that equal means equal in type and in every bit."""
    if isinstance(value, float):
        return "float", struct.pack("<d", value)
    if isinstance(value, complex):
        return "complex", bits(value.real), bits(value.imag)
    if isinstance(value, (list, tuple)):
        return type(value).__name__, [bits(item) for item in value]
    if isinstance(value, dict):
        return "dict", [(bits(key), bits(item)) for key, item in value.items()]
    return type(value).__name__, value


@settings(deadline=None, max_examples=300)
@given(VALUES)
def test_plain_values_come_back_bit_for_bit_and_in_order(value: Any) -> None:
    data = encode(value)
    assert bits(decode(data)) == bits(value)
    assert encode(decode(data)) == data


@pytest.mark.parametrize(
    "dtype",
    [torch.float32, torch.float64, torch.float16, torch.bfloat16, torch.int64, torch.int32, torch.uint8, torch.bool, torch.complex64],
)  # fmt: skip
def test_tensors_come_back_as_they_lay_and_alone(dtype: torch.dtype) -> None:
    source = (torch.arange(24).reshape(4, 6) % 3).to(dtype)
    for tensor in (source, source.t(), source[1:3, ::2], source[0, 0], source[:0], source[:, :0]):
        back = decode(encode([tensor, "x"]))[0]
        assert type(back) is torch.Tensor
        assert (back.dtype, back.shape, back.device) == (tensor.dtype, tensor.shape, tensor.device)
        assert torch.equal(back, tensor)
        assert not tensor.numel() or back.data_ptr() != tensor.data_ptr()


def test_a_tensor_keeps_the_bits_of_what_is_no_number() -> None:
    tensor = torch.tensor([0x7FC00001, 0x7F800001, -1, -(2**31)], dtype=torch.int32).view(torch.float32)
    assert torch.equal(decode(encode(tensor)).view(torch.int32), tensor.view(torch.int32))


@pytest.mark.parametrize("dtype", ["<f4", ">i8", "<c16", "?", "<M8[s]", "<U3", "S2"])
def test_arrays_and_scalars_of_numpy_come_back(dtype: str) -> None:
    array = np.array([[0, 1, 2], [3, 4, 5]]).astype(dtype)
    for item in (array, array.T, array[:, ::2], array[:0]):
        back = decode(encode((item,)))[0]
        assert type(back) is np.ndarray
        assert (back.dtype, back.shape) == (item.dtype, item.shape)
        assert np.array_equal(back, item)
        back.flags.writeable = True
    scalar = decode(encode(array[1, 1]))
    assert type(scalar) is type(array[1, 1])
    assert scalar == array[1, 1]


def test_named_outputs_of_transformers_come_back_as_their_class() -> None:
    output = GenerateDecoderOnlyOutput(sequences=torch.tensor([[1, 2]]), scores=(torch.ones(2),))
    back = decode(encode({"a": output}))["a"]
    assert type(back) is GenerateDecoderOnlyOutput
    assert list(back) == ["sequences", "scores"]
    assert torch.equal(back.sequences, output.sequences)
    assert back.past_key_values is None


PAIR: Any = collections.namedtuple("PAIR", "x")  # noqa: PYI024 - of a library without types


class Mine(BaseModelOutput):  # type: ignore[misc]
    """A named output of somebody's own."""


class Colour(enum.IntEnum):
    """An integer, and not one."""

    RED = 1


@pytest.mark.parametrize(
    "value",
    [
        object(), Colour.RED, collections.OrderedDict(a=1), PAIR(1), range(3), lambda: 1,
        torch.nn.Parameter(torch.ones(1)), torch.ones(1, requires_grad=True), torch.ones(2).to_sparse(),
        torch.empty(2, device="meta"), np.array([object()]), np.ma.array([1]), np.zeros(1, "i4,i4"), Mine(torch.ones(1)),
        type("Text", (str,), {})("x"), {"deep": [{"x": ValueError("y")}]},
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_what_would_not_come_back_the_same_is_refused(value: Any) -> None:
    with pytest.raises(NotWhole, match="it holds a"):
        encode([value])


def test_what_holds_itself_is_refused() -> None:
    value: list[Any] = []
    value.append(value)
    with pytest.raises(NotWhole, match="nested more than"):
        encode(value)


def test_what_is_damaged_or_of_another_form_is_refused() -> None:
    data = encode([b"abc", np.ones(3)])
    with pytest.raises(ValueError, match="damaged"):
        decode(data[:-1])
    with pytest.raises(ValueError, match="form b'r9'"):
        decode(b"r9" + data[2:])
    with pytest.raises(ValueError, match="damaged"):
        decode(whole.HEAD.pack(b"r1", 7) + b'["x",0]')
    tree = b'["output","os","system",[]]'
    with pytest.raises(ValueError, match="no system loaded"):
        decode(whole.HEAD.pack(b"r1", len(tree)) + tree)


def test_its_text_holds_words_and_bytes_and_no_numbers_of_arrays() -> None:
    text = whole.text(encode({"key": ["word", b"octets", bytearray(b"more")], "n": np.frombuffer(b"notatext", "u1")}))
    assert all(word in text for word in (b"key", b"word", b"octets", b"more"))
    assert b"notatext" not in text
