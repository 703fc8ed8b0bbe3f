"""How a body is stored: as it is, or compressed. The codec's number stands beside each body for ever.

Buffers of four-byte numbers are split into planes of their first, second, third and fourth bytes before they
are compressed: ids and logits share their high bytes, so this halves them.
"""

import sys

from provenance.facts import BUFFER, OCTETS

if sys.version_info >= (3, 14):
    from compression import zstd
else:
    from backports import zstd

RAW, ZSTD, DICTIONARY, PLANES, BLOB = range(5)
KINDS = {RAW: "raw", ZSTD: "zstd", DICTIONARY: "zstd with dictionary", PLANES: "zstd of 4 byte planes",
         BLOB: "blob by SHA-256"}  # fmt: skip
LEVEL = 3
SMALL = 64
LIMIT = 1 << 31


def compressor() -> "zstd.ZstdCompressor":
    """Return what packs many bodies: to make one takes longer than to compress a prompt with it.

    It has a lock in it, so it belongs to one batch and to no module: a process forked meanwhile must not inherit it.
    """
    return zstd.ZstdCompressor(LEVEL)


def pack(data: bytes, encoding: int, tool: "zstd.ZstdCompressor | None" = None) -> tuple[int, bytes]:
    """Return the codec chosen for a body and its stored bytes: a whole frame, whatever else ``tool`` packed before.

    >>> codec, stored = pack(b"abcd" * 500, 0)
    >>> codec, len(stored) < 40, unpack(codec, stored, 2000) == b"abcd" * 500
    (1, True, True)
    """
    if len(data) < SMALL:
        return RAW, data
    codec, plain = (PLANES, b"".join(data[i::4] for i in range(4))) if encoding in (BUFFER, OCTETS) else (ZSTD, data)
    packed = (tool or compressor()).compress(plain, zstd.ZstdCompressor.FLUSH_FRAME)
    return (codec, packed) if len(packed) < len(data) else (RAW, data)


def unpack(codec: int, stored: bytes, size: int) -> bytes:
    """Return the body. ``size`` is what it must come to; more is refused, whatever the stored bytes claim.

    Raises ValueError for a codec that this version does not know, for damaged bytes, or a body of another size.
    """
    if codec == RAW:
        data = stored
    elif codec in (ZSTD, PLANES):
        try:
            data = zstd.ZstdDecompressor().decompress(stored, max_length=min(size + 1, LIMIT))
        except zstd.ZstdError as error:
            raise ValueError(str(error)) from None
    else:
        raise ValueError(f"codec {codec} is not known to this version")
    if len(data) != size:
        raise ValueError(f"a body of {len(data)} bytes where {size} were stored")
    if codec != PLANES:
        return data
    whole = bytearray(size)
    place = 0
    for i in range(4):
        count = len(range(i, size, 4))
        whole[i::4] = data[place : place + count]
        place += count
    return bytes(whole)
