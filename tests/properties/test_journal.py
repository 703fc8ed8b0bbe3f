"""Properties of a segment: cut anywhere it is a prefix, one wrong bit costs one record, and nothing is ever invented."""

import itertools
import os
import random
import tempfile
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from provenance.errors import BadSegment
from provenance.journal import frame, records
from provenance.journal.recovery import open_segment
from tests.fakes.records import NOTHING, SEED, framed, header, output, request, segment

SALT, FOREIGN = bytes(range(16)), bytes(range(16, 32))
HEAD = len(header(SALT))
Frame = tuple[int, int, bytes]


def frames() -> list[Frame]:
    """Make a process life: starts, ends and notes of many sizes."""
    note = b"".join(records.note_payload("environment", NOTHING, b'{"v":1}'))
    made: list[Frame] = [(0, frame.FINGERPRINT, note)]
    for n in range(8):
        seq = len(made)
        start = records.start_payload(SEED, request(n, facts={"n": "x" * n}, payloads=()))
        end = records.end_payload(SEED, output(n, seq, payloads=()))
        made += [(seq, frame.START, b"".join(start)), (seq + 1, frame.END, b"".join(end))]
    return [*made, (len(made), frame.GAP, b""), (len(made) + 3, frame.CLOCK_STEP, b"\0" * 5)]


def read(path: Path, data: bytes | None = None, sealed: bool = True) -> list[Frame]:
    if data is not None:
        path.write_bytes(data)
    return [(item.seq, item.kind, item.payload) for item in open_segment(path).frames(sealed)]


def is_part(found: list[Frame], whole: list[Frame]) -> bool:
    """Say whether everything found was written, in the order in which it was."""
    rest = iter(whole)
    return all(item in rest for item in found)


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return segment(tmp_path / "spool" / "a.seg", SALT, frames())


@pytest.mark.parametrize("sealed", [False, True])
def test_a_segment_cut_at_every_byte_yields_the_records_before_the_cut(path: Path, sealed: bool) -> None:
    whole = frames()
    ends = list(itertools.accumulate((len(payload) + frame.OVERHEAD for _, _, payload in whole), initial=HEAD))
    assert ends[-1] == path.stat().st_size
    for cut in range(ends[-1], -1, -1):
        os.truncate(path, cut)
        if cut < HEAD:
            with pytest.raises(BadSegment):
                read(path, sealed=sealed)
            continue
        count = sum(end <= cut for end in ends[1:])
        assert read(path, sealed=sealed) == whole[:count], cut


def test_a_wrong_bit_loses_at_most_one_record_and_invents_none(path: Path) -> None:
    whole, data = frames(), path.read_bytes()
    chance = random.Random(20260101)
    lost = 0
    for _ in range(300):
        place, bit = chance.randrange(HEAD, len(data)), chance.randrange(8)
        found = read(path, data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :])
        assert is_part(found, whole)
        assert len(found) >= len(whole) - 1
        lost += len(whole) - len(found)
    assert lost == 300  # no bit is without meaning: each one is noticed


def test_two_sectors_swapped_invent_nothing(path: Path) -> None:
    data, chance = path.read_bytes(), random.Random(3)
    for _ in range(100):
        a, b = sorted(chance.sample(range(HEAD, len(data) - 64), 2))
        if b - a < 64:
            continue
        swapped = data[:a] + data[b : b + 64] + data[a + 64 : b] + data[a : a + 64] + data[b + 64 :]
        assert is_part(read(path, swapped), frames())


def smuggled(inner: bytes) -> list[Frame]:
    """Hide bytes in the prompt of the fourth record."""
    whole = frames()
    return [*whole[:3], (whole[3][0], whole[3][1], b"before" + inner + b"after"), *whole[4:]]


def damaged(data: bytes, place: int) -> bytes:
    return data[:place] + bytes([data[place] ^ 0x55]) + data[place + 1 :]


@pytest.mark.parametrize(
    "inner",
    [
        framed(FOREIGN, 999, frame.START, b"foreign salt"),
        framed(bytes(16), 999, frame.START, b"no salt"),
        # The marker can be guessed by whoever sees one segment, but then not the checksum of another.
        frame.marker(SALT) + framed(FOREIGN, 999, frame.START, b"right marker")[4:],
        header(SALT) + framed(FOREIGN, 999, frame.START, b"with a header"),
    ],
    ids=["foreign", "zero", "marker", "header"],
)
def test_a_frame_made_elsewhere_is_never_taken_for_a_record(path: Path, inner: bytes) -> None:
    whole = smuggled(inner)
    segment(path, SALT, whole)
    data = path.read_bytes()
    assert read(path, data) == whole
    outer = data.index(inner) - frame.HEAD.size - len(b"before")
    for place in [*range(outer, outer + frame.HEAD.size), outer + frame.HEAD.size + 2]:
        found = read(path, damaged(data, place))
        assert found == [*whole[:3], *whole[4:]], place


@pytest.mark.parametrize("copied", [0, 1, 2])
def test_a_genuine_frame_replayed_inside_a_prompt_is_never_a_record_twice(path: Path, copied: int) -> None:
    inner = framed(SALT, *frames()[copied])
    whole = smuggled(inner * 2)
    segment(path, SALT, whole)
    data = path.read_bytes()
    outer = data.index(b"before" + inner) - frame.HEAD.size
    for place in range(outer, outer + frame.HEAD.size):
        assert read(path, damaged(data, place)) == [*whole[:3], *whole[4:]], place


@settings(max_examples=200, deadline=None, database=None)
@given(st.lists(st.integers(0, 12), max_size=12))
def test_only_numbers_that_rise_are_accepted(numbers: list[int]) -> None:
    written = [(seq, frame.FINGERPRINT, bytes([place])) for place, seq in enumerate(numbers)]
    risen: list[Frame] = []
    for item in written:
        if not risen or item[0] > risen[-1][0]:
            risen.append(item)
    with tempfile.TemporaryDirectory() as folder:
        path = segment(Path(folder) / "a.seg", SALT, written)
        assert read(path, path.read_bytes()) == risen


@settings(max_examples=300, deadline=None, database=None)
@given(st.binary(max_size=200), st.integers(0, 2**16))
def test_any_bytes_between_records_cost_no_record(junk: bytes, place: int) -> None:
    whole = frames()
    pieces = [framed(SALT, *item) for item in whole]
    pieces.insert(place % (len(pieces) + 1), junk)
    with tempfile.TemporaryDirectory() as folder:
        assert read(Path(folder) / "a.seg", header(SALT) + b"".join(pieces)) == whole
