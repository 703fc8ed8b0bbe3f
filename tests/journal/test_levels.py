"""The levels of durability, each held to its word: what was acknowledged at it survives what it names."""

import os
import random
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import orjson
import pytest

from provenance.errors import JournalError, NotYet
from provenance.facts import Noted
from provenance.journal import frame, levels, records, spool
from provenance.journal.levels import Ring, open_journal
from provenance.journal.recovery import open_segment
from provenance.journal.room import Keep
from provenance.journal.spool import Journal, segments
from tests.fakes.records import about


def eventually(true: Callable[[], bool], seconds: float = 20.0) -> None:
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < seconds, "it never came to be"
        time.sleep(0.01)


def read(folder: Path) -> dict[int, Any]:
    """Return every record of a spool by number; a number that comes again must bring the same bytes."""
    found: dict[int, Any] = {}
    for path in segments(folder):
        scan = open_segment(path)
        for item in scan.frames(sealed=True):
            what = records.read(item.kind, item.seq, item.payload) if item.kind == frame.GAP else item.payload
            assert found.setdefault(item.seq, what) == what
    return found


class Device:
    """A device that has what was flushed and nothing else; a flush may fail, and what it was for is then gone.

    It keeps the order of what happened: flushes with the length that they cover, and acknowledged records.
    """

    def __init__(self, failing: frozenset[int] = frozenset()) -> None:
        self.events: list[tuple[str, Any, int]] = []
        self.failing, self.flushes = failing, 0
        self.gate = threading.Lock()

    def fdatasync(self, descriptor: int) -> None:
        facts = os.fstat(descriptor)  # what comes after this may be in or not
        self.flushes += 1
        if self.flushes in self.failing:
            raise OSError(5, "Input/output error")
        os.fdatasync(descriptor)
        with self.gate:
            self.events.append(("flush", facts.st_ino, facts.st_size))

    def acknowledge(self, seq: int, thread: int) -> None:
        with self.gate:
            self.events.append(("ack", seq, thread))

    def survivors(self, folder: Path, copy: Path, moment: int) -> tuple[dict[int, Any], set[int]]:
        """Cut a copy of the spool to what the device had at a moment; return what is read and what was acknowledged."""
        lengths: dict[int, int] = {}
        acknowledged = set()
        for kind, what, value in self.events[:moment]:
            if kind == "flush":
                lengths[what] = max(lengths.get(what, 0), value)
            else:
                acknowledged.add(what)
        copy.mkdir(mode=0o700)
        for path in segments(folder):
            if path.stat().st_ino in lengths:
                (copy / path.name).write_bytes(path.read_bytes()[: lengths[path.stat().st_ino]])
        return read(copy), acknowledged


def _power(folder: Path, device: Device, monkeypatch: pytest.MonkeyPatch, each: int) -> dict[int, bytes]:
    """Let eight threads record at the level `power`, with rotations meanwhile; return every record by its number."""
    monkeypatch.setattr(spool, "fdatasync", device.fdatasync)
    journal = open_journal(folder, about(), Keep("power"))
    written: dict[int, bytes] = {}

    def work(thread: int) -> None:
        for number in range(each):
            payload = f"{thread}.{number} ".encode() * (1 + number % 40)
            try:
                seq = journal.append(frame.START, [payload])
            except NotYet as error:
                written[error.seq] = payload
            else:
                written[seq] = payload
                device.acknowledge(seq, thread)

    threads = [threading.Thread(target=work, args=(thread,)) for thread in range(8)]
    for thread in threads:
        thread.start()
    for _ in range(3):
        time.sleep(0.02)
        journal.rotate()
    for thread in threads:
        thread.join()
    journal.close()
    return written


def _lose_power(folder: Path, monkeypatch: pytest.MonkeyPatch, states: int, device: Device) -> None:
    written = _power(folder / "spool", device, monkeypatch, 40)
    chance = random.Random(5)
    acks = 0
    for state in range(states):
        moment = chance.randrange(len(device.events) + 1)
        survived, acknowledged = device.survivors(folder / "spool", folder / f"after-{state}", moment)
        assert acknowledged <= survived.keys(), acknowledged - survived.keys()
        records_ = {seq: what for seq, what in survived.items() if not isinstance(what, Noted)}
        assert all(written[seq] == payload for seq, payload in records_.items())
        acks += len(acknowledged)
    assert acks > states


def test_a_power_loss_takes_nothing_acknowledged_and_invents_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    _lose_power(tmp_path, monkeypatch, 200, Device())


@pytest.mark.parametrize("nth", [1, 2, 3, 5, 8, 13])
def test_a_flush_that_fails_is_never_trusted_again_and_loses_nothing_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, nth: int
) -> None:
    """The second flush of such a file may claim what the first one dropped: all of it is written again elsewhere."""
    device = Device(frozenset({nth, nth + 1}))
    _lose_power(tmp_path, monkeypatch, 40, device)
    assert device.flushes > nth + 1


@pytest.mark.long
def test_ten_thousand_states_after_a_power_loss(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for turn in range(50):
        failing = frozenset({turn, turn + 3}) if turn % 2 else frozenset()
        (tmp_path / str(turn)).mkdir()
        _lose_power(tmp_path / str(turn), monkeypatch, 200, Device(failing))


def test_those_who_wait_at_once_share_a_flush(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    real = device.fdatasync

    def slow(descriptor: int) -> None:
        time.sleep(0.01)
        real(descriptor)

    monkeypatch.setattr(device, "fdatasync", slow)
    _power(tmp_path / "spool", device, monkeypatch, 20)
    assert device.flushes < 8 * 20 / 2


def test_the_name_of_a_segment_is_flushed_before_its_first_record_is_acknowledged(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    flushed: list[str] = []
    monkeypatch.setattr(os, "fsync", lambda descriptor: flushed.append(os.readlink(f"/proc/self/fd/{descriptor}")))
    journal = open_journal(tmp_path / "spool", about(), Keep("power"))
    assert flushed == []
    journal.append(frame.START, [b"first"])
    assert flushed == [str(tmp_path / "spool"), str(tmp_path)]
    journal.append(frame.START, [b"second"])
    journal.rotate()
    journal.append(frame.START, [b"third"])
    assert flushed == [str(tmp_path / "spool"), str(tmp_path), str(tmp_path / "spool")]
    journal.close()


def test_a_device_that_takes_nothing_is_told_record_by_record_and_loses_none(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(spool, "fdatasync", Device(frozenset(range(1, 100))).fdatasync)
    journal = open_journal(tmp_path / "spool", about(), Keep("power"))
    for number in range(5):
        with pytest.raises(NotYet, match="the device did not take it: Input/output error") as caught:
            journal.append(frame.START, [str(number).encode()])
        assert caught.value.seq == number
    assert journal.lost == 0
    monkeypatch.setattr(spool, "fdatasync", os.fdatasync)
    assert journal.append(frame.START, [b"5"]) == 5
    journal.close()
    assert read(tmp_path / "spool") == {n: str(n).encode() for n in range(6)}


# -- process ------------------------------------------------------------------------------------------


def test_at_the_level_process_a_thread_flushes_what_has_come(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = Device()
    monkeypatch.setattr(spool, "fdatasync", device.fdatasync)
    journal = open_journal(tmp_path / "spool", about(), Keep(sync_seconds=0.02))
    for number in range(3):
        seq = journal.append(frame.START, [b"x"])
        eventually(lambda seq=seq: journal.durable == seq)  # type: ignore[misc]
        assert device.flushes == number + 1
    seq = journal.append(frame.START, [b"last"])
    journal.close()
    assert journal.durable == seq


def test_at_the_level_process_a_failed_flush_names_what_is_uncertain(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    journal = Journal(tmp_path / "spool", about())
    for _ in range(3):
        journal.append(frame.START, [b"x"])
    monkeypatch.setattr(spool, "fdatasync", Device(frozenset({1})).fdatasync)
    journal.sync()
    journal.append(frame.START, [b"x"])
    journal.close()
    said = [orjson.loads(what.document) for what in read(tmp_path / "spool").values() if isinstance(what, Noted)]
    assert said == [{"first": 0, "last": 2, "reason": "flush failed: Input/output error", "uncertain": True}]
    assert journal.index == 1


# -- memory -------------------------------------------------------------------------------------------


def test_at_the_level_memory_a_thread_writes_later_and_the_end_writes_all(tmp_path: Path) -> None:
    journal = open_journal(tmp_path / "spool", about(), Keep("memory"))
    for number in range(500):
        assert journal.append(frame.START, [b"piece ", str(number).encode()]) == number
        if number == 250:
            journal.rotate()
    eventually(lambda: len(read(tmp_path / "spool")) > 0)
    journal.close()
    assert read(tmp_path / "spool") == {n: f"piece {n}".encode() for n in range(500)}
    with pytest.raises(JournalError):
        journal.append(frame.START, [b"late"])


def test_a_full_ring_drops_counts_and_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(levels, "RING_BYTES", 1000)
    journal = open_journal(tmp_path / "spool", about(), Keep("memory"))
    assert isinstance(journal, Ring)
    kept, lost = set(), set()
    with journal._lock:  # as a disk that does not answer
        for number in range(30):
            try:
                kept.add(journal.append(frame.START, [b"x" * 100]))
            except JournalError:
                lost.add(number)
    assert lost
    eventually(lambda: not journal._ring)
    kept.add(journal.append(frame.START, [b"after"]))
    journal.close()
    found = read(tmp_path / "spool")
    gaps = [orjson.loads(what.document) for what in found.values() if isinstance(what, Noted)]
    assert {n for gap in gaps for n in range(gap["first"], gap["last"] + 1)} == lost
    assert {seq for seq, what in found.items() if not isinstance(what, Noted)} == kept
    assert journal.lost == len(lost)
