"""Numbers as bytes: the layout that is frozen, the narrowest width that fits, and lengths that cannot lie."""

import struct
from array import array

import pytest

from provenance.integrity import buffers
from provenance.integrity.buffers import FLOAT32, INT32, INT64, UINT8, ids, parse, vector


def test_the_layout_is_type_rank_shape_and_little_endian_content() -> None:
    assert ids([1, -2]) == bytes([1, 1, 2, 0, 0, 0, 1, 0, 0, 0, 0xFE, 0xFF, 0xFF, 0xFF])
    assert ids([2**31]) == bytes([2, 1, 1, 0, 0, 0, 0, 0, 0, 0x80, 0, 0, 0, 0])


@pytest.mark.parametrize(
    ("numbers", "dtype"),
    [([], INT32), ([0], INT32), ([2**31 - 1, -(2**31)], INT32), ([2**31], INT64), ([-(2**31) - 1, 0], INT64),
     ([2**63 - 1, -(2**63)], INT64)],
)  # fmt: skip
def test_ids_take_32_bits_where_they_all_fit(numbers: list[int], dtype: int) -> None:
    buffer = parse(ids(numbers))
    assert (buffer.dtype, buffer.shape) == (dtype, (len(numbers),))
    assert list(buffer.numbers()) == numbers


def test_ids_beyond_64_bits_are_refused() -> None:
    with pytest.raises(OverflowError):
        ids([2**63])


def test_floats_and_bytes_come_back() -> None:
    assert list(parse(vector(FLOAT32, struct.pack("<2f", 0.5, float("-inf")))).numbers()) == [0.5, float("-inf")]
    assert list(parse(vector(UINT8, b"\x00\xff")).numbers()) == [0, 255]


def test_a_shape_of_any_rank_comes_back() -> None:
    data = struct.pack("<BBII", INT32, 2, 2, 3) + array("i", range(6)).tobytes()
    buffer = parse(data)
    assert buffer.shape == (2, 3)
    assert list(buffer.numbers()) == list(range(6))
    assert parse(struct.pack("<BB", INT64, 0) + bytes(8)).shape == ()
    assert parse(struct.pack("<BBII", FLOAT32, 2, 5, 0)).content == b""


@pytest.mark.parametrize(
    "data",
    [
        b"", b"\x01", bytes([0, 1, 0, 0, 0, 0]), bytes([9, 1, 0, 0, 0, 0]), bytes([1, 9]) + bytes(36),
        bytes([1, 1, 0, 0]), ids([1, 2])[:-1], ids([1, 2]) + b"\0", struct.pack("<BBII", 1, 2, 2**32 - 1, 2**32 - 1),
        struct.pack("<BB8I", 1, 8, *[2**32 - 1] * 8) + bytes(64),
    ],
    ids=len,
)  # fmt: skip
def test_a_length_that_does_not_fit_the_shape_is_refused(data: bytes) -> None:
    with pytest.raises(ValueError, match="buffer"):
        parse(data)


def test_a_machine_of_the_other_byte_order_writes_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    class Swapped(array):  # type: ignore[type-arg]
        """An array as it lies in the memory of a big-endian machine."""

        def tobytes(self) -> bytes:
            twin = array(self.typecode, self)
            twin.byteswap()
            return twin.tobytes()

    here = ids([1, 2**20])
    monkeypatch.setattr("sys.byteorder", "big")
    monkeypatch.setattr(buffers, "array", Swapped)
    assert ids([1, 2**20]) == here
