"""Reading a segment back: the whole of recovery is a scan, there is no other state.

Frames wholly written are returned, in order; a torn tail is simply not there yet. Damage in the middle costs
the damaged frames alone: the scan looks for the next marker whose frame checks out and says which bytes it
skipped. ``seq`` must rise from frame to frame, so a genuine frame that lies inside somebody's prompt does not
count.
"""

import zlib
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

from provenance.journal.frame import HEAD, MAX_PAYLOAD, OVERHEAD, TAIL, Header, checksum, marker, read_header, salt_crc

CHUNK = 4 << 20
HEADER_READ = 1 << 21


class Frame(NamedTuple):
    """One frame as read: where it ends in the file, its seq, kind and payload."""

    end: int
    seq: int
    kind: int
    payload: bytes


@dataclass(slots=True)
class Damage:
    """Bytes that are no frame although frames follow them."""

    start: int
    end: int
    after_seq: int


@dataclass(slots=True)
class Scan:
    """An iterator over the frames of one segment, from a position on."""

    header: Header
    path: Path
    position: int
    last_seq: int
    damage: list[Damage]
    mark: bytes
    crc: int
    told: int = 0  # how much of the damage its reader has written down

    def frames(self, sealed: bool = False) -> Iterator[Frame]:
        """Yield whole frames; stop at the end, or at a tail that may still be being written.

        Where the segment is ``sealed`` nobody writes any more and a bad tail is damage.
        """
        with self.path.open("rb") as file:
            file.seek(self.position)
            data = b""
            while True:
                more = file.read(max(CHUNK, _wanted(data)))
                data += more
                used = 0
                while True:
                    frame, step = self._next(data, used, sealed and not more)
                    if step == 0:
                        break
                    used += step
                    self.position += step
                    if frame is not None:
                        yield frame
                data = data[used:]
                if not more:
                    return

    def _next(self, data: bytes, place: int, final: bool) -> tuple[Frame | None, int]:
        """Return the frame at ``place`` and how far to go; (None, 0) asks for more bytes."""
        frame = self._at(data, place)
        if frame is not None:
            self.last_seq = frame.seq
            return frame, len(frame.payload) + OVERHEAD
        found = self._search(data, place + 1)
        if found is None:
            if final and place < len(data):
                self.damage.append(Damage(self.position, self.position + len(data) - place, self.last_seq))
                return None, len(data) - place
            return None, 0
        self.damage.append(Damage(self.position, self.position + found - place, self.last_seq))
        return None, found - place

    def _at(self, data: bytes, place: int) -> Frame | None:
        """Return the frame that starts exactly here, if it is whole and genuine."""
        if place + OVERHEAD > len(data):
            return None
        mark, length, seq, kind, flags, crc = HEAD.unpack_from(data, place)
        end = place + OVERHEAD + length
        if mark != self.mark or length > MAX_PAYLOAD or end > len(data) or seq <= self.last_seq:
            return None
        payload = data[place + HEAD.size : end - TAIL.size]
        if TAIL.unpack_from(data, end - TAIL.size)[0] != length:
            return None
        if checksum(zlib.crc32(payload, self.crc), seq, kind, flags, length) != crc:
            return None
        return Frame(self.position + end - place, seq, kind, payload)

    def _search(self, data: bytes, place: int) -> int | None:
        """Find the next genuine frame behind damage."""
        while (place := data.find(self.mark, place)) >= 0:
            if self._at(data, place) is not None:
                return place
            place += 1
        return None


def open_segment(path: Path, position: int = 0, last_seq: int | None = None) -> Scan:
    """Open a segment for scanning, from its first frame or from where an earlier scan ended.

    Raises BadSegment where the header is foreign, newer or damaged.
    """
    with path.open("rb") as file:
        header = read_header(file.read(HEADER_READ), path.name)
    seen = header.first_seq - 1 if last_seq is None else last_seq
    place = max(position, header.size)
    return Scan(header, path, place, seen, [], marker(header.salt), salt_crc(header.salt))


def _wanted(data: bytes) -> int:
    """Return how many bytes would complete the frame at the head of ``data``, if it says so and is sane."""
    if len(data) < HEAD.size:
        return 0
    length: int = HEAD.unpack_from(data)[1]
    return length + OVERHEAD - len(data) if length <= MAX_PAYLOAD else 0
