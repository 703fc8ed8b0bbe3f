"""The bytes of a segment: one header, then frames, nothing else.

Header (little-endian):

    magic 8s · major u16 · minor u16 · header size u32 · stream 16s · salt 16s · boot id 16s · index u32 · pid u32 ·
    wall ns i64 · monotonic ns i64 · first seq u64 · SHA-256 of the segment before 32s · about size u32 ·
    about (JSON) · CRC-32 u32

Frame:

    marker 4s · length u32 · seq u64 · kind u16 · flags u16 · CRC-32 u32 · payload · length u32

Marker and checksum depend on a random salt of the segment, so a prompt that holds a frame cannot pass for one.
The checksum runs over salt, payload, then seq, kind, flags and length: a writer computes the long part before
it takes the lock under which seq is given. The length stands at both ends so that a reader can step backward.
``tests/golden/`` holds a segment for ever; ``recovery`` reads one.
"""

import hashlib
import struct
import zlib
from dataclasses import dataclass

from provenance.errors import BadSegment
from provenance.facts import Stream

MAGIC = b"PROVJRNL"
MAJOR, MINOR = 1, 0
HEADER = struct.Struct("<8sHHI16s16s16sIIqqQ32sI")
HEAD = struct.Struct("<4sIQHHI")
TAIL = struct.Struct("<I")
CHECK = struct.Struct("<QHHI")
OVERHEAD = HEAD.size + TAIL.size
MAX_PAYLOAD = 1 << 30
MAX_ABOUT = 1 << 20

START, END, FINGERPRINT, GAP, ERASED, CLOCK_STEP = 1, 2, 3, 4, 5, 6
KINDS = {START: "start", END: "end", FINGERPRINT: "fingerprint", GAP: "gap", ERASED: "erased", CLOCK_STEP: "clock_step"}


@dataclass(frozen=True, slots=True)
class Header:
    """What a segment says of itself."""

    stream: Stream
    salt: bytes
    index: int
    first_seq: int
    previous: bytes  # SHA-256 of the sealed segment before, or 32 zero bytes
    size: int = 0


def write_header(header: Header) -> bytes:
    """Return the bytes that open a segment."""
    stream = header.stream
    size = HEADER.size + len(stream.about) + 4
    fixed = HEADER.pack(
        MAGIC, MAJOR, MINOR, size, stream.stream_id, header.salt, stream.boot_id, header.index, stream.pid,
        stream.wall_ns, stream.mono_ns, header.first_seq, header.previous, len(stream.about),
    )  # fmt: skip
    body = fixed + stream.about
    return body + TAIL.pack(zlib.crc32(body))


def read_header(data: bytes, name: str) -> Header:
    """Read the header at the start of a segment.

    Raises BadSegment where it is foreign, newer or damaged; ``name`` is for the message.
    """
    if len(data) < HEADER.size or data[:8] != MAGIC:
        raise BadSegment(f"{name} is not a journal segment; it is left untouched.")
    (_, major, _, size, stream_id, salt, boot_id, index, pid, wall, mono, first_seq, previous, about_size) = (
        HEADER.unpack_from(data)
    )
    if major != MAJOR:
        raise BadSegment(f"{name} has journal format {major}; this version reads {MAJOR}. Upgrade provenance.")
    if about_size > MAX_ABOUT or size != HEADER.size + about_size + 4 or size > len(data):
        raise BadSegment(f"the header of {name} is cut or damaged.")
    if TAIL.unpack_from(data, size - 4)[0] != zlib.crc32(data[: size - 4]):
        raise BadSegment(f"the header of {name} is damaged: its checksum does not fit.")
    about = bytes(data[HEADER.size : HEADER.size + about_size])
    return Header(Stream(stream_id, boot_id, pid, wall, mono, about), salt, index, first_seq, previous, size)


def marker(salt: bytes) -> bytes:
    """Return the four bytes that open each frame of a segment with this salt."""
    return hashlib.sha256(b"provenance/marker/v1" + salt).digest()[:4]


def salt_crc(salt: bytes) -> int:
    """Return where the checksum of every frame of a segment starts."""
    return zlib.crc32(salt)


def checksum(payload_crc: int, seq: int, kind: int, flags: int, length: int) -> int:
    """Finish a checksum whose long part, salt and payload, is done."""
    return zlib.crc32(CHECK.pack(seq, kind, flags, length), payload_crc)
