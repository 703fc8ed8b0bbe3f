"""Recovery is a scan: whole frames in order, a torn tail left for later, and damage that costs the damaged alone."""

from pathlib import Path
from typing import Any

import pytest

from provenance.errors import BadSegment
from provenance.journal import frame, recovery
from provenance.journal.recovery import Damage, open_segment
from provenance.journal.spool import Journal
from tests.fakes.records import about, framed, header, segment

SALT = bytes(range(16))
FRAMES = [(seq, frame.FINGERPRINT, f"payload {seq} ".encode() * (seq + 1)) for seq in range(12)]
HEAD = len(header(SALT))


def bounds() -> list[tuple[int, int]]:
    """Return where each frame of the segment starts and ends."""
    place, found = HEAD, []
    for _, _, payload in FRAMES:
        found.append((place, place + len(payload) + frame.OVERHEAD))
        place = found[-1][1]
    return found


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return segment(tmp_path / "spool" / "a.seg", SALT, FRAMES)


def read(path: Path, sealed: bool = False) -> list[tuple[int, int, bytes]]:
    return [(item.seq, item.kind, item.payload) for item in open_segment(path).frames(sealed)]


def test_whole_frames_come_back_in_order_with_the_place_where_each_ends(path: Path) -> None:
    scan = open_segment(path)
    found = list(scan.frames())
    assert [(item.seq, item.kind, item.payload) for item in found] == FRAMES
    assert [item.end for item in found] == [end for _, end in bounds()]
    assert scan.damage == []
    assert scan.position == path.stat().st_size


def test_a_scan_goes_on_where_an_earlier_one_ended(path: Path) -> None:
    for count in range(len(FRAMES)):
        ends = [item.end for item in list(open_segment(path).frames())[:count]]
        scan = open_segment(path, ends[-1] if ends else 0, FRAMES[count][0] - 1)
        assert [item.seq for item in scan.frames()] == [seq for seq, _, _ in FRAMES[count:]]


def test_a_scan_sees_what_is_appended_later(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "spool", about())
    scan = open_segment(journal.path)
    for seq in range(5):
        journal.append(frame.FINGERPRINT, [b"x" * seq])
        assert [item.seq for item in scan.frames()] == [seq]
    assert list(scan.frames()) == []
    journal.close()


def test_a_torn_tail_is_not_there_yet_and_is_damage_once_nobody_writes(path: Path) -> None:
    whole = path.read_bytes()
    start, end = bounds()[-1]
    path.write_bytes(whole[: end - 1])
    scan = open_segment(path)
    assert [item.seq for item in scan.frames()] == list(range(11))
    assert scan.damage == []
    assert scan.position == start
    path.write_bytes(whole)
    assert [item.seq for item in scan.frames()] == [11]
    path.write_bytes(whole[: end - 1])
    final = open_segment(path)
    assert [item.seq for item in final.frames(sealed=True)] == list(range(11))
    assert final.damage == [Damage(start, end - 1, 10)]


@pytest.mark.parametrize("place", range(len(FRAMES)))
def test_a_zeroed_hole_costs_the_frames_in_it_and_says_which_bytes(path: Path, place: int) -> None:
    data = bytearray(path.read_bytes())
    start, end = bounds()[place]
    data[start:end] = bytes(end - start)
    path.write_bytes(data)
    scan = open_segment(path)
    assert [item.seq for item in scan.frames(sealed=True)] == [seq for seq in range(12) if seq != place]
    assert scan.damage == [Damage(start, end, place - 1)]


def test_damage_in_the_middle_is_stepped_over_while_the_stream_is_alive(path: Path) -> None:
    data = bytearray(path.read_bytes())
    data[bounds()[4][0] + 30] ^= 1
    path.write_bytes(data)
    scan = open_segment(path)
    assert [item.seq for item in scan.frames()] == [0, 1, 2, 3, *range(5, 12)]
    assert [(hole.start, hole.end) for hole in scan.damage] == [bounds()[4]]


def test_two_holes_are_two_damages(path: Path) -> None:
    data = bytearray(path.read_bytes())
    for place in (2, 7):
        data[bounds()[place][0]] ^= 0xFF
    path.write_bytes(data)
    scan = open_segment(path)
    list(scan.frames(sealed=True))
    assert [(hole.start, hole.end, hole.after_seq) for hole in scan.damage] == [(*bounds()[2], 1), (*bounds()[7], 6)]


def test_frames_larger_than_a_chunk_are_read_whole(path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(recovery, "CHUNK", 16)
    assert read(path) == FRAMES
    data = bytearray(path.read_bytes())
    data[bounds()[3][0] + 4] ^= 1  # a length that lies, at a chunk's edge
    path.write_bytes(data)
    assert [seq for seq, _, _ in read(path, sealed=True)] == [0, 1, 2, *range(4, 12)]


@pytest.mark.parametrize("length", [2**30, 2**30 + 1, 2**32 - 1])
def test_a_frame_that_claims_more_than_there_is_costs_no_memory(path: Path, length: int) -> None:
    lying = frame.HEAD.pack(frame.marker(SALT), length, 12, frame.FINGERPRINT, 0, 0)
    path.write_bytes(path.read_bytes() + lying)
    assert read(path) == FRAMES
    path.write_bytes(path.read_bytes() + framed(SALT, 13, frame.FINGERPRINT, b"after"))
    assert read(path)[-1] == (13, frame.FINGERPRINT, b"after")


@pytest.mark.parametrize("again", [0, 5, 11])
def test_a_number_that_does_not_rise_is_refused(path: Path, again: int) -> None:
    """A genuine frame of the same segment, copied behind the others, is no record."""
    copied = framed(SALT, *FRAMES[again])
    path.write_bytes(path.read_bytes() + copied)
    scan = open_segment(path)
    assert [item.seq for item in scan.frames(sealed=True)] == list(range(12))
    assert scan.damage[-1].end - scan.damage[-1].start == len(copied)


def test_numbers_may_leave_holes(tmp_path: Path) -> None:
    path = segment(tmp_path / "spool" / "a.seg", SALT, [(3, 3, b"a"), (2**40, 3, b"b")])
    assert [seq for seq, _, _ in read(path)] == [3, 2**40]


# -- headers ------------------------------------------------------------------------------------------


def test_the_header_says_which_stream_and_which_segment(path: Path) -> None:
    found = open_segment(path).header
    assert found.stream.stream_id == bytes([1]) * 16
    assert (found.stream.pid, found.index, found.first_seq, found.salt) == (4242, 0, 0, SALT)
    assert found.size == HEAD


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda data: b"", "is not a journal segment; it is left untouched"),
        (lambda data: b"SQLite format 3\0" + data[16:], "is not a journal segment"),
        (lambda data: data[:8] + b"\x02\x00" + data[10:], "has journal format 2; this version reads 1. Upgrade"),
        (lambda data: data[: HEAD - 1], "is cut or damaged"),
        (lambda data: data[:60], "is not a journal segment"),
        (lambda data: data[:12] + b"\xff\xff\xff\x7f" + data[16:], "is cut or damaged"),
        (lambda data: data[:40] + bytes([data[40] ^ 1]) + data[41:], "its checksum does not fit"),
    ],
    ids=["empty", "foreign", "newer", "cut", "short", "size", "bit"],
)
def test_a_header_that_is_not_ours_is_refused_and_the_file_left(path: Path, change: Any, message: str) -> None:
    data = change(path.read_bytes())
    path.write_bytes(data)
    with pytest.raises(BadSegment, match=message) as caught:
        open_segment(path)
    assert "a.seg" in str(caught.value)
    assert path.read_bytes() == data


def test_every_bit_of_the_header_is_held_by_its_checksum(path: Path) -> None:
    data = path.read_bytes()
    for place in [*range(12), *range(12, HEAD, 7)]:
        for bit in (0, 7):
            path.write_bytes(data[:place] + bytes([data[place] ^ 1 << bit]) + data[place + 1 :])
            with pytest.raises(BadSegment):
                open_segment(path)


def test_a_newer_minor_version_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frame, "MINOR", 9)
    path = segment(tmp_path / "spool" / "a.seg", SALT, FRAMES[:1])
    monkeypatch.undo()
    assert read(path) == FRAMES[:1]
