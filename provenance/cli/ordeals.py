"""What a journal must bear, done to it on purpose: kills, wrong bits, cuts and a full disk, on a disk of choice.

Every record's content follows from its thread and number, so that a record which was never written is told from
one that was. Each ordeal returns a `Count`; `provenance torture` prints them. Linux and macOS: it forks.
"""

import fcntl
import os
import random
import resource
import signal
import struct
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path

import orjson

from provenance.errors import BadSegment, JournalError
from provenance.facts import Noted
from provenance.journal import frame, records, spool
from provenance.journal.recovery import Frame, Scan, open_segment
from provenance.journal.spool import Journal

THREADS = 8
SIZES = (10, 10, 10, 4096, 4096, 200_000)
HEAD = struct.Struct("<IQ")  # thread, number
ACK = struct.Struct("<16sQIQ")  # stream, seq, thread, number
POOL = random.Random(2026).randbytes(1 << 19)  # noqa: S311
KILL_SECONDS = 0.03
PIPE_BYTES = 1 << 20


@dataclass
class Count:
    """What one ordeal did, and what it found wrong. All but ``done`` and ``records`` must be nought."""

    ordeal: str
    done: int = 0
    records: int = 0  # acknowledged, and looked for afterwards
    lost: int = 0
    invented: int = 0
    reordered: int = 0
    twice: int = 0
    unnamed: int = 0  # losses that nothing reports
    notes: list[str] = field(default_factory=list)

    @property
    def bad(self) -> int:
        """Count everything that must not be."""
        return self.lost + self.invented + self.reordered + self.twice + self.unnamed

    def add(self, other: "Count") -> None:
        """Add another round of the same ordeal."""
        for name in ("done", "records", "lost", "invented", "reordered", "twice", "unnamed"):
            setattr(self, name, getattr(self, name) + getattr(other, name))
        self.notes = other.notes or self.notes


def content(thread: int, number: int) -> bytes:
    """Return the record that a thread writes at a number: nobody else's content is like it."""
    chance = (thread * 2_654_435_761 + number * 40_503 + 12_345) & 0xFFFFFFFF
    size = SIZES[chance % len(SIZES)] if number % 16 == 0 else SIZES[chance % 5]
    place = chance % (len(POOL) - 200_000)
    return HEAD.pack(thread, number) + POOL[place : place + size]


@contextmanager
def child(work: Callable[[int], None]) -> Iterator[tuple[int, int]]:
    """Fork a process that does some work with a pipe's end, and yield its id and our end; it is killed at the end."""
    ours, theirs = os.pipe()
    pid = os.fork()
    if pid == 0:
        try:
            os.close(ours)
            work(theirs)
        finally:
            os._exit(0)  # nothing of the parent's is cleaned up twice
    os.close(theirs)
    try:
        yield pid, ours
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)
        os.close(ours)


# -- SIGKILL while recording --------------------------------------------------------------------------


def kills(folder: Path, count: int, chance: random.Random) -> Count:
    """Kill a process of eight threads at random moments; what it acknowledged must be there, whole and in order."""
    found = Count("SIGKILL while recording")
    place = folder / "kills.spool"
    for _ in range(count):
        with child(lambda pipe: _record_for_ever(place, pipe)) as (pid, pipe):
            said = os.read(pipe, ACK.size)  # at its first acknowledgement
            time.sleep(chance.random() * KILL_SECONDS)
            os.kill(pid, signal.SIGKILL)
            while data := os.read(pipe, 1 << 16):
                said += data
        _judge(found, place, said[: len(said) // ACK.size * ACK.size])
        found.done += 1
    return found


def _record_for_ever(place: Path, pipe: int) -> None:
    if hasattr(fcntl, "F_SETPIPE_SZ"):  # so that no thread waits for whoever reads what it acknowledged
        fcntl.fcntl(pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
    journal = Journal(place, {"program": "torture"})
    threads = [threading.Thread(target=_one_thread, args=(journal, n, pipe)) for n in range(THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()


def _one_thread(journal: Journal, thread: int, pipe: int) -> None:
    for number in range(1 << 40):
        seq = journal.append(frame.START, [content(thread, number)])
        os.write(pipe, ACK.pack(journal.stream.stream_id, seq, thread, number))


def _judge(found: Count, place: Path, said: bytes) -> None:
    """Compare what a dead process acknowledged with what lies in its segments, and delete those."""
    acknowledged = {(stream, seq): (thread, number) for stream, seq, thread, number in ACK.iter_unpack(said)}
    there: dict[tuple[bytes, int], tuple[int, int]] = {}
    for path in spool.segments(place):
        scan = open_segment(path)
        expected = dict.fromkeys(range(THREADS), 0)
        for item in scan.frames(sealed=True):
            thread, number = _named(item)
            found.invented += item.payload != content(thread, number)
            found.reordered += number != expected.get(thread)
            expected[thread] = number + 1
            there[scan.header.stream.stream_id, item.seq] = thread, number
        found.unnamed += len(scan.damage) > 1  # a torn tail is one
        path.unlink()
    for draft in place.glob("*.new"):  # killed before its segment had a name
        draft.unlink()
    found.records += len(acknowledged)
    found.lost += sum(there.get(key) != value for key, value in acknowledged.items())


def _named(item: Frame) -> tuple[int, int]:
    if len(item.payload) < HEAD.size:
        return -1, -1
    thread, number = HEAD.unpack_from(item.payload)
    return thread, number


# -- wrong bits and cuts ------------------------------------------------------------------------------


def sample(folder: Path, name: str, count: int) -> tuple[Path, int]:
    """Write a segment of small records with nobody appending to it; return it and where its first frame begins."""
    place = folder / name
    journal = Journal(place, {"program": "torture"})
    path, begin = journal.path, journal.size
    for number in range(count):
        journal.append(frame.START, [content(number % THREADS, number)[: 30 + number % 200]])
    journal.close()
    return path, begin


def flips(folder: Path, count: int, chance: random.Random) -> Count:
    """Turn one bit, read, turn it back: one record may be gone, it must be named, and none may appear."""
    found = Count("one wrong bit")
    path, begin = sample(folder, "flips.spool", 60)
    whole = path.read_bytes()
    good = {item.seq: item.payload for item in open_segment(path).frames(sealed=True)}
    gone = 0
    with path.open("r+b", buffering=0) as file:
        for _ in range(count):
            place = chance.randrange(begin, len(whole))
            _put(file.fileno(), place, bytes([whole[place] ^ 1 << chance.randrange(8)]))
            scan = open_segment(path)
            read = {item.seq: item.payload for item in scan.frames(sealed=True)}
            missing = len(good) - len(good.keys() & read.keys())
            gone += missing
            found.lost += max(0, missing - 1)
            found.invented += sum(good.get(seq) != payload for seq, payload in read.items())
            found.unnamed += not any(hole.start <= place < hole.end for hole in scan.damage)
            found.records += len(good)
            _put(file.fileno(), place, whole[place : place + 1])
            found.done += 1
        found.notes = [f"{gone} records damaged, every one named by its bytes"]
        for place in range(begin):
            _put(file.fileno(), place, bytes([whole[place] ^ 1 << chance.randrange(8)]))
            found.unnamed += not _refused(path)
            _put(file.fileno(), place, whole[place : place + 1])
    path.unlink()
    return found


def _put(descriptor: int, place: int, data: bytes) -> None:
    os.pwrite(descriptor, data, place)


def _refused(path: Path) -> bool:
    """Say whether a segment whose header is wrong is refused by name instead of being read wrongly."""
    try:
        open_segment(path)
    except BadSegment:
        return True
    return False


def cuts(folder: Path, count: int) -> Count:
    """Cut a segment at every byte of its last ``count``: what was whole before the cut is read, and nothing else."""
    found = Count("cut at every byte")
    path, begin = sample(folder, "cuts.spool", 60)
    whole = path.read_bytes()
    good = [(item.end, item.seq, item.payload) for item in open_segment(path).frames(sealed=True)]
    cut = path.with_suffix(".cut")
    cut.write_bytes(whole)
    for place in range(len(whole) - 1, max(begin, len(whole) - count) - 1, -1):
        os.truncate(cut, place)
        scan: Scan = open_segment(cut)
        read = [(item.end, item.seq, item.payload) for item in scan.frames()]
        before = [item for item in good if item[0] <= place]
        found.lost += sum(item not in read for item in before)
        found.invented += sum(item not in before for item in read)
        found.records += len(before)
        found.done += 1
    cut.unlink()
    path.unlink()
    return found


# -- a full disk --------------------------------------------------------------------------------------


def full(folder: Path, cycles: int, chance: random.Random) -> Count:
    """Let writes fail as on a full disk, again and again: what was acknowledged is there, every hole has its record.

    A limit on the size of files stands in for the disk: it makes the same short writes, and needs no rights.
    """
    found = Count("full disk")
    place = folder / "full.spool"
    seed = chance.getrandbits(32)
    luck = random.Random(seed)  # noqa: S311
    with child(lambda pipe: _fill(place, pipe, cycles, luck)) as (_, pipe):
        said = b""
        while data := os.read(pipe, 1 << 16):
            said += data
    acknowledged = {seq: number for _, seq, _, number in ACK.iter_unpack(said)}
    read: dict[int, int] = {}
    explained: set[int] = set()  # the holes that gap records name, and the gap records themselves
    holes = 0
    for path in spool.segments(place):
        for item in open_segment(path).frames(sealed=True):
            if item.kind == frame.GAP:
                first, last = _hole(item)
                explained |= {item.seq, *range(first, last + 1)}
                holes += last + 1 - first
                continue
            thread, number = _named(item)
            found.invented += item.payload != content(thread, number)
            read[item.seq] = number
        path.unlink()
    numbers = list(read.values())
    found.done, found.records = cycles, len(acknowledged)
    found.lost = sum(read.get(seq) != number for seq, number in acknowledged.items())
    found.reordered = sum(one >= next_ for one, next_ in pairwise(numbers))
    found.unnamed = len(set(range(max(read, default=0) + 1)) - read.keys() - explained)
    found.notes = [f"{holes} records refused while it was full, every one named by a gap record"]
    return found


def _hole(item: Frame) -> tuple[int, int]:
    record = records.read(item.kind, item.seq, item.payload)
    document = orjson.loads(record.document) if isinstance(record, Noted) else {}
    return int(document["first"]), int(document["last"])


def _fill(place: Path, pipe: int, cycles: int, chance: random.Random) -> None:
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)  # as Python does by itself; a limit is then an error like any other
    journal = Journal(place, {"program": "torture"})
    most = resource.getrlimit(resource.RLIMIT_FSIZE)
    number = 0

    def write() -> bool:
        nonlocal number
        number += 1
        try:
            seq = journal.append(frame.START, [content(0, number)])
        except JournalError:
            return False
        os.write(pipe, ACK.pack(journal.stream.stream_id, seq, 0, number))
        return True

    for _ in range(cycles):
        resource.setrlimit(resource.RLIMIT_FSIZE, (journal.size + chance.randrange(1, 30_000), most[1]))
        refused = 0
        while refused < chance.randrange(1, 6):
            refused += not write()
        resource.setrlimit(resource.RLIMIT_FSIZE, most)  # somebody made room
        write()
    journal.close()
