"""Numbers as bytes: a dtype tag, the rank, the shape, and little-endian content.

Token ids, masks and logits travel as one buffer each, from the tensor to the database. Ids are int32 where they
fit, else int64. The layout is frozen (``tests/golden/digests.json``):

    dtype u8 · rank u8 · shape u32 by rank · content
"""

import struct
import sys
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

INT32, INT64, FLOAT32, UINT8 = 1, 2, 3, 4
CODES = {INT32: "i", INT64: "q", FLOAT32: "f", UINT8: "B"}
WIDTHS = {INT32: 4, INT64: 8, FLOAT32: 4, UINT8: 1}
NAMES = {INT32: "int32", INT64: "int64", FLOAT32: "float32", UINT8: "uint8"}
LIMIT = 2**31
_VECTOR = struct.Struct("<BBI")


@dataclass(frozen=True, slots=True)
class Buffer:
    """Numbers of one type with a shape. ``content`` is little-endian, in row order."""

    dtype: int
    shape: tuple[int, ...]
    content: bytes

    def numbers(self) -> "array[int] | array[float]":
        """Return the numbers, flat."""
        numbers: array[int] | array[float] = array(CODES[self.dtype])
        numbers.frombytes(self.content)
        if sys.byteorder == "big":
            numbers.byteswap()
        return numbers


def vector(dtype: int, content: bytes) -> bytes:
    r"""Frame the bytes of a one-dimensional buffer.

    >>> vector(INT32, b"\x05\x00\x00\x00").hex()
    '01010100000005000000'
    """
    return _VECTOR.pack(dtype, 1, len(content) // WIDTHS[dtype]) + content


def ids(numbers: Sequence[int]) -> bytes:
    """Frame token ids: int32 where they all fit, else int64.

    >>> ids([1, 2]) == vector(INT32, bytes([1, 0, 0, 0, 2, 0, 0, 0]))
    True
    """
    wide = bool(numbers) and not (min(numbers) >= -LIMIT and max(numbers) < LIMIT)
    packed = array("q" if wide else "i", numbers)
    if sys.byteorder == "big":
        packed.byteswap()
    return vector(INT64 if wide else INT32, packed.tobytes())


def parse(data: bytes) -> Buffer:
    """Read a framed buffer.

    Raises ValueError where the length does not fit the shape.

    >>> list(parse(ids([7, 8, 9])).numbers())
    [7, 8, 9]
    """
    if len(data) < 2:
        raise ValueError("a buffer of fewer than two bytes")
    dtype, rank = data[0], data[1]
    if dtype not in WIDTHS or rank > 8 or len(data) < 2 + 4 * rank:
        raise ValueError(f"no buffer: type {dtype}, rank {rank}, {len(data)} bytes")
    shape = struct.unpack_from(f"<{rank}I", data, 2)
    count = 1
    for extent in shape:
        count *= extent
    content = data[2 + 4 * rank :]
    if len(content) != count * WIDTHS[dtype]:
        raise ValueError(f"a buffer of shape {shape} with {len(content)} bytes of {NAMES[dtype]}")
    return Buffer(dtype, shape, content)
