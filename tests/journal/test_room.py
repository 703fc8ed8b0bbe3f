"""A bounded spool: what comes beyond the limit is dropped, counted and named; the reserve lets word of it out."""

import os
import threading
import time
from pathlib import Path

import pytest

from provenance.errors import JournalError
from provenance.journal import frame, room, spool
from provenance.journal.room import LEAST_BYTES, RESERVE_BYTES, Keep, default_limit, tidy
from provenance.journal.spool import Journal, segments
from tests.fakes.records import about
from tests.journal.test_spool import explained

LIMIT = 1 << 20


def _overload(journal: Journal, count: int) -> tuple[set[int], set[int]]:
    kept, lost = set(), set()
    for _ in range(count):
        before = journal.next_seq
        try:
            kept.add(journal.append(frame.START, [b"x" * 5000]))
        except JournalError:
            lost |= {journal.next_seq - 1} if journal.next_seq > before else set()
    return kept, lost


def test_ten_times_too_much_is_dropped_within_the_limit_and_every_number_named(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "spool", about(), Keep(limit=LIMIT))
    kept, lost = _overload(journal, 2000)
    assert len(lost) > 1500
    assert sum(path.stat().st_size for path in segments(journal.folder)) <= LIMIT
    journal.close()
    there, named = explained(journal.folder)
    assert named == lost
    assert kept <= there
    assert journal.lost == len(lost)
    assert sum(path.stat().st_size for path in segments(journal.folder)) <= LIMIT


def test_room_made_by_the_writer_is_used_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(room, "LOOK_SECONDS", 0.0)
    journal = Journal(tmp_path / "spool", about(), Keep(limit=LIMIT))
    _overload(journal, 400)
    assert journal.full
    assert journal.old
    journal.rotate()
    segments(journal.folder)[0].unlink()  # as a writer that has it all in the store
    assert journal.append(frame.START, [b"y" * 5000]) > 0
    assert journal.append(frame.START, [b"z" * 5000]) > 0
    journal.close()


def test_a_call_that_may_wait_is_kept_once_there_is_room(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real, refuse = spool.write, [True]

    def write(descriptor: int, data: bytes) -> int:
        if refuse[0]:
            raise OSError(28, "No space left on device")
        return real(descriptor, data)

    monkeypatch.setattr(spool, "write", write)
    journal = Journal(tmp_path / "spool", about(), Keep(patience=20.0))
    asked: list[bool] = []
    journal.help = lambda: asked.append(True)
    thread = threading.Thread(target=lambda: journal.append(frame.START, [b"patient"]))
    thread.start()
    while not asked:
        time.sleep(0.005)
    refuse[0] = False
    thread.join()
    journal.close()
    assert (explained(journal.folder), journal.lost) == (({0}, set()), 0)


def test_a_call_waits_no_longer_than_it_may_and_is_then_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    journal = Journal(tmp_path / "spool", about(), Keep(patience=0.05))
    with monkeypatch.context() as patch:
        patch.setattr(spool, "write", lambda *_: 0)
        with pytest.raises(JournalError, match="record 0 was not kept"):
            journal.append(frame.START, [b"x"])
    journal.append(frame.START, [b"y"])
    journal.close()
    assert explained(journal.folder) == ({1, 2}, {0})


def test_the_reserve_lets_a_gap_record_out_while_the_disk_stays_full(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A disk that has room for what was given back from the reserve, and for nothing else."""
    journal = Journal(tmp_path / "spool", about(), Keep(limit=1 << 30))
    assert journal.room.reserve.stat().st_blocks * 512 >= RESERVE_BYTES
    used = [0]

    def write(descriptor: int, data: bytes) -> int:
        free = RESERVE_BYTES - journal.room.reserve.stat().st_size - used[0]
        if len(data) > free:
            raise OSError(28, "No space left on device")
        used[0] += len(data)
        return os.write(descriptor, data)

    monkeypatch.setattr(spool, "write", write)
    for _ in range(3):
        with pytest.raises(JournalError):
            journal.append(frame.START, [b"x" * 9000])
    assert 0 in explained(journal.folder)[1]  # before there is room: a process that is killed now has said so
    journal.close()
    assert len(explained(journal.folder)[1]) == journal.lost == 3
    assert not journal.room.reserve.exists()


def test_the_default_is_a_twentieth_of_what_is_free_and_a_gibibyte_at_most(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    free = os.statvfs(tmp_path)
    assert default_limit(tmp_path) == max(LEAST_BYTES, min(1 << 30, free.f_bavail * free.f_frsize // 20))
    assert default_limit(tmp_path / "none") == 1 << 30


def test_what_a_crash_left_is_cleared_and_what_is_young_or_alive_is_not(tmp_path: Path) -> None:
    journal = Journal(tmp_path / "spool", about(), Keep(limit=1 << 30))
    mine, dead = journal.stream.stream_id.hex(), "0" * 32
    old = [
        f"{dead}-000003.new",
        f"{dead}.reserve",
        f"{dead}.ack",
        ".target.77",
        ".target.77.ab12",
        ".writer.status.9.c",
    ]
    kept = [f"{mine}.ack", "target", "writer.log", "writer.lock", f"{dead}-000000.seg", f"{dead}-000000.damaged"]
    for name in old + kept:
        (journal.folder / name).touch()
        os.utime(journal.folder / name, (1, 1))
    young = journal.folder / f"{dead}-000004.new"
    young.touch()
    tidy(journal.folder, {mine})
    there = {path.name for path in journal.folder.iterdir()}
    assert there == {*kept, young.name, journal.path.name, f"{mine}.reserve"}
    journal.close()
