"""Properties of the encodings: canonical bytes are those of RFC 8785, and every value comes back bit for bit."""

import math
from typing import Any

import pytest
import rfc8785
from hypothesis import given, settings
from hypothesis import strategies as st

from provenance.integrity import buffers
from provenance.integrity.canonical import canonical, plain, restore
from provenance.integrity.values import decode, encode
from provenance.store import codec
from tests.fakes.values import nan, nested, same

many = settings(max_examples=300, deadline=None, database=None)
SAFE = 2**53 - 1  # RFC 8785's own range ends here; 2^53 itself is an example below

keys = st.text(st.characters(max_codepoint=127), max_size=8)
texts = st.text(st.characters(exclude_categories=["Cs"]), max_size=12)
subset = st.recursive(
    st.none() | st.booleans() | st.integers(-SAFE, SAFE) | texts,
    lambda inner: st.lists(inner, max_size=5) | st.dictionaries(keys, inner, max_size=5),
    max_leaves=25,
)

bits = st.integers(0, 2**64 - 1).map(nan)
any_text = st.text(st.characters(), max_size=8)  # lone surrogates and NUL among them
scalars = (
    st.none() | st.booleans() | st.integers() | st.integers(-(2**300), 2**300) | bits | any_text | st.binary(max_size=12)
    | st.sampled_from([0.0, -0.0, math.inf, -math.inf, 5e-324, "\ud800", "$", 2**53, 2**53 + 1])
    | st.builds(complex, bits, bits) | st.binary(max_size=6).map(bytearray)
)  # fmt: skip
# A set may hold equal keys of two types, and NaN is never equal: keys that Python itself confuses are left out.
plain_keys = st.none() | st.integers(2, 2**70) | any_text | st.binary(max_size=6)
hashable = st.recursive(
    plain_keys,
    lambda inner: st.lists(inner, max_size=3).map(tuple) | st.frozensets(inner, max_size=3),
    max_leaves=6,
)
anything = st.recursive(
    scalars,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.lists(inner, max_size=4).map(tuple)
        | st.dictionaries(any_text, inner, max_size=4)
        | st.dictionaries(hashable, inner, max_size=4)
        | st.sets(hashable, max_size=4)
        | st.frozensets(hashable, max_size=4)
    ),
    max_leaves=30,
)
fields = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**200), 2**200) | st.floats(allow_nan=False) | any_text,
    lambda inner: (
        st.lists(inner, max_size=4)
        | st.dictionaries(any_text, inner, max_size=4)
        | st.dictionaries(st.integers() | any_text | st.tuples(st.integers(), any_text), inner, max_size=4)
    ),
    max_leaves=20,
)


@many
@given(subset)
def test_canonical_bytes_are_those_of_a_second_implementation(document: object) -> None:
    assert canonical(document) == rfc8785.dumps(document)  # type: ignore[arg-type]


def test_the_ends_of_the_range_print_as_rfc_8785_prints_numbers() -> None:
    assert canonical([2**53, -(2**53)]) == b"[9007199254740992,-9007199254740992]"


@many
@given(anything)
def test_every_value_comes_back_bit_for_bit(value: object) -> None:
    assert same(decode(encode(value)), value)


@many
@given(anything, st.integers(0, 90))
def test_it_comes_back_from_any_depth(value: object, depth: int) -> None:
    wrapped: Any = value
    for level in range(depth):
        wrapped = (wrapped,) if level % 3 else {"in": wrapped, "and": [value]} if level % 2 else [wrapped]
    assert same(decode(encode(wrapped)), wrapped)


@pytest.mark.parametrize("depth", [500, 2000, 5000])
def test_depth_is_no_limit(depth: int) -> None:
    assert same(decode(encode(nested(depth))), nested(depth))


@many
@given(anything)
def test_equal_values_have_equal_bytes(value: object) -> None:
    assert encode(decode(encode(value))) == encode(value)


@many
@given(st.lists(st.tuples(st.integers(), anything), max_size=5))
def test_integer_keys_never_meet_the_text_that_looks_like_them(items: list[tuple[int, object]]) -> None:
    value = {key: item for number, item in items for key in (number, str(number))}
    assert same(decode(encode(value)), value)


@many
@given(fields)
def test_a_fields_value_has_canonical_bytes_and_comes_back(value: object) -> None:
    form = plain(value)
    canonical(form)
    back = restore(form)
    assert back == value
    assert canonical(plain(back)) == canonical(form)


@many
@given(st.lists(st.integers(-(2**63), 2**63 - 1), max_size=40))
def test_ids_come_back(numbers: list[int]) -> None:
    assert list(buffers.parse(buffers.ids(numbers)).numbers()) == numbers


@many
@given(st.binary(max_size=400) | st.lists(st.integers(0, 50_000), max_size=100).map(buffers.ids), st.integers(0, 4))
def test_a_body_comes_back_from_the_store(data: bytes, encoding: int) -> None:
    number, stored = codec.pack(data, encoding)
    assert codec.unpack(number, stored, len(data)) == data
    assert len(stored) <= len(data)
