"""What stands inside a frame: a fixed binary head, one small JSON of facts, and payloads behind a table.

The head is fixed so that the writer inserts slices and parses next to nothing. Each payload's entry in the
table says role, encoding, part, row, return index and size; bodies follow in the same order.
"""

import struct
from collections.abc import Iterator
from dataclasses import dataclass

import orjson

from provenance.errors import BadSegment
from provenance.facts import LARGE, NOTES, SEQUENCE, End, Noted, Output, Payload, Record, Request, SequenceEnd, Start
from provenance.journal import frame

START = struct.Struct("<32s16s16sqq32s32s32sIIII")
END = struct.Struct("<32s16sQqqqI32s32sIII")
ENTRY = struct.Struct("<BBHIII")
NOTE = struct.Struct("<B32sI")
pack_start, pack_end, pack_entry, pack_sequence = START.pack, END.pack, ENTRY.pack, SEQUENCE.pack


class TooLarge(Exception):
    """A payload is too large for a frame: it goes beside the journal, and the frame refers to it."""


NOTE_CODES = {name: code for code, name in NOTES.items()}
NOTE_KINDS = {"gap": frame.GAP, "erased": frame.ERASED, "clock_step": frame.CLOCK_STEP}


@dataclass(slots=True)
class Gap:
    """Records that could not be written: which, how many, and why first."""

    first: int
    last: int
    reason: str
    uncertain: bool = False  # written, but a flush failed: a power loss may have taken them

    def document(self) -> bytes:
        """Return what the gap record says."""
        more = {"uncertain": True} if self.uncertain else {}
        return orjson.dumps({"first": self.first, "last": self.last, "reason": self.reason, **more})


def start_payload(seed: bytes, request: Request) -> list[bytes]:
    """Return the pieces of a start record, to be written one behind the other. ``seed`` is 32 random bytes."""
    facts, payloads = request[9], request[10]
    # The head of the record is the head of the request, field by field: a slice beats nine names on this path, as a
    # loop beats comprehensions.
    pieces = [pack_start(seed, *request[:9], len(payloads), len(facts)), facts]
    _append(pieces, payloads)
    return pieces


def end_payload(seed: bytes, output: Output) -> list[bytes]:
    """Return the pieces of an end record."""
    facts, sequences, payloads = output[8:]
    pieces = [pack_end(seed, *output[:8], len(sequences), len(payloads), len(facts)), facts]
    for sequence in sequences:
        pieces.append(pack_sequence(*sequence))
    _append(pieces, payloads)
    return pieces


def _append(pieces: list[bytes], payloads: tuple[Payload, ...]) -> None:
    """Append the table of some payloads, then their bodies."""
    bodies = []
    for role, encoding, data, row, ret, part in payloads:
        if len(data) > LARGE:
            raise TooLarge
        pieces.append(pack_entry(role, encoding, part, row, ret, len(data)))
        bodies.append(data)
    pieces += bodies


def note_payload(kind: str, digest: bytes, document: bytes) -> list[bytes]:
    """Return the pieces of a fingerprint, a manifest, a binding, a gap or another note."""
    return [NOTE.pack(NOTE_CODES[kind], digest, len(document)), document]


def frame_kind(note: str) -> int:
    """Return the kind of frame that carries a note."""
    return NOTE_KINDS.get(note, frame.FINGERPRINT)


def read(kind: int, seq: int, data: bytes) -> Record:
    """Read a record from the payload of a frame.

    Raises BadSegment where the payload is not what its kind says; it never reads beyond ``data``.
    """
    try:
        if kind == frame.START:
            return _read_start(seq, data)
        if kind == frame.END:
            return _read_end(seq, data)
        return _read_note(seq, data)
    except (struct.error, ValueError, IndexError) as error:
        raise BadSegment(f"record {seq} cannot be read: {error}") from None


def _read_start(seq: int, data: bytes) -> Start:
    (seed, run_id, parent, wall, mono, environment, switches, model, load, rows, count, facts_size) = START.unpack_from(
        data
    )
    place = START.size
    facts = _cut(data, place, facts_size)
    payloads = tuple(_payloads(data, place + facts_size, count))
    request = Request(run_id, parent, wall, mono, environment, switches, model, load, rows, facts, payloads)
    return Start(seq, seed, request)


def _read_end(seq: int, data: bytes) -> End:
    (seed, run_id, start_seq, wall, mono, duration, status, settings, weights, n_sequences, count, facts_size) = (
        END.unpack_from(data)
    )
    place = END.size
    facts = _cut(data, place, facts_size)
    place += facts_size
    table = _cut(data, place, SEQUENCE.size * n_sequences)
    sequences = tuple(map(SequenceEnd._make, SEQUENCE.iter_unpack(table)))
    payloads = tuple(_payloads(data, place + len(table), count))
    output = Output(run_id, start_seq, wall, mono, duration, status, settings, weights, facts, sequences, payloads)
    return End(seq, seed, output)


def _read_note(seq: int, data: bytes) -> Noted:
    code, digest, size = NOTE.unpack_from(data)
    document = _cut(data, NOTE.size, size)
    if code not in NOTES:
        raise ValueError(f"a note of kind {code}, which this version does not know")
    return Noted(seq, NOTES[code], digest, document)


def _payloads(data: bytes, place: int, count: int) -> Iterator[Payload]:
    body = place + ENTRY.size * count
    for role, encoding, part, row, ret, size in ENTRY.iter_unpack(_cut(data, place, ENTRY.size * count)):
        yield Payload(role, encoding, _cut(data, body, size), row, ret, part)
        body += size


def _cut(data: bytes, place: int, size: int) -> bytes:
    if place + size > len(data):
        raise ValueError(f"{size} bytes at {place} of {len(data)}")
    return data[place : place + size]
