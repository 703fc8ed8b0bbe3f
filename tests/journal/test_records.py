"""What stands inside a frame: it reads back whole, and bytes that are not what they say are refused, never overrun."""

import math
import struct
from typing import Any

import pytest

from provenance.errors import BadSegment
from provenance.facts import NOTES, End, Noted, Payload, SequenceEnd, Start
from provenance.journal import frame, records
from tests.fakes.records import SEED, output, request

PAYLOADS = (
    Payload(1, 1, b"ids", 2, 3, 65535), Payload(255, 0x81, b"", 2**32 - 1, 2**32 - 1, 0), Payload(17, 0, bytes(range(256)))
)  # fmt: skip
SEQUENCES = (SequenceEnd(0, 0, 3, 2, 0, 1, 0.5, 1), SequenceEnd(1, 7, 2**32 - 1, 0, 5, 7, float("nan"), 0))
START = b"".join(records.start_payload(SEED, request(1, payloads=PAYLOADS, load=2**32 - 1, wall_ns=-1)))
END = b"".join(records.end_payload(SEED, output(1, 2**64 - 1, payloads=PAYLOADS, sequences=SEQUENCES)))
NOTE = b"".join(records.note_payload("gap", bytes(range(32)), b'{"first":1}'))
WHOLE = {"start": (frame.START, START), "end": (frame.END, END), "note": (frame.GAP, NOTE)}


def test_a_start_reads_back() -> None:
    record = records.read(frame.START, 9, START)
    assert record == Start(9, SEED, request(1, payloads=PAYLOADS, load=2**32 - 1, wall_ns=-1))


def test_an_end_reads_back() -> None:
    record = records.read(frame.END, 9, END)
    assert isinstance(record, End)
    assert record.seed == SEED
    assert math.isnan(record.output.sequences[1].margin)
    expected = output(1, 2**64 - 1, payloads=PAYLOADS, sequences=SEQUENCES)
    assert record.output._replace(sequences=()) == expected._replace(sequences=())
    assert record.output.sequences[0] == SEQUENCES[0]
    assert record.output.sequences[1][:6] == SEQUENCES[1][:6]


@pytest.mark.parametrize("kind", NOTES.values())
def test_every_note_reads_back_from_the_frame_of_its_kind(kind: str) -> None:
    data = b"".join(records.note_payload(kind, bytes(range(32)), b'{"a":1}'))
    assert records.read(records.frame_kind(kind), 9, data) == Noted(9, kind, bytes(range(32)), b'{"a":1}')


def test_gaps_erasures_and_clock_steps_are_frames_of_their_own() -> None:
    kinds = {kind: frame.KINDS[records.frame_kind(kind)] for kind in NOTES.values()}
    own = {"gap", "erased", "clock_step"}
    assert kinds == {kind: kind if kind in own else "fingerprint" for kind in NOTES.values()}


def test_a_call_without_payloads_and_facts_reads_back() -> None:
    data = b"".join(records.start_payload(SEED, request(1, payloads=())))
    record = records.read(frame.START, 0, data)
    assert isinstance(record, Start)
    assert record.request.payloads == ()


@pytest.mark.parametrize("name", WHOLE)
def test_a_record_cut_at_any_byte_is_refused(name: str) -> None:
    kind, data = WHOLE[name]
    records.read(kind, 0, data)
    for end in range(len(data)):
        with pytest.raises(BadSegment, match="record 7 cannot be read"):
            records.read(kind, 7, data[:end])


@pytest.mark.parametrize("name", WHOLE)
def test_a_size_that_lies_is_refused_before_anything_is_read(name: str) -> None:
    """Each four bytes of head and tables are replaced by the largest number: no read may go beyond the data."""
    kind, data = WHOLE[name]
    seen = 0
    for place in range(len(data) - 3):
        lying = data[:place] + b"\xff\xff\xff\xff" + data[place + 4 :]
        try:
            record = records.read(kind, 0, lying)
        except BadSegment:
            seen += 1
            continue
        assert _size(record) <= len(data)
    assert seen >= 4


def _size(record: Any) -> int:
    if isinstance(record, Noted):
        return len(record.document)
    body = record.request if isinstance(record, Start) else record.output
    return len(body.facts) + sum(len(payload.data) for payload in body.payloads)


def test_a_note_of_a_later_version_is_refused_and_named() -> None:
    data = struct.pack("<B32sI", 200, bytes(32), 0)
    with pytest.raises(BadSegment, match="kind 200, which this version does not know"):
        records.read(frame.FINGERPRINT, 3, data)


def test_an_empty_payload_is_refused() -> None:
    for kind in frame.KINDS:
        with pytest.raises(BadSegment):
            records.read(kind, 0, b"")
