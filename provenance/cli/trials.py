"""What a writer must bear: kills at random moments while it drains, and a disk that is full under spool and store.

The store is a SQLite file in the folder given. Its rows are compared, digest by digest, with the frames that lay in the
spool before.
"""

import os
import random
import sqlite3
import subprocess
import time
import uuid
from collections import Counter
from pathlib import Path

from provenance import writer
from provenance.cli.ordeals import Count, child
from provenance.errors import JournalError, ProvenanceError
from provenance.facts import BUFFER, ROLE, TEXT, Fingerprint, Output, Payload, Request, SequenceEnd
from provenance.integrity import buffers
from provenance.journal import frame, records, spool
from provenance.journal.recovery import open_segment
from provenance.journal.spool import Journal
from provenance.settings import Places
from provenance.store.ingest import frame_digest

FILL = 400  # calls of one life
BATCH = 20
WORK_SECONDS = 0.12  # a kill falls somewhere in this time
SMALL_DISK = "1m"
Wanted = Counter[tuple[bytes, int, bytes]]


def places(folder: Path) -> Places:
    """Return the places of a store below a folder."""
    return Places(f"sqlite:///{folder}/p.db", folder / "p.db", folder / "p.db.spool", folder / "key")


def life(spots: Places, calls: int, chance: random.Random) -> Wanted:
    """Write a process life of some calls into the spool; return what must be in the store for it."""
    journal = Journal(spots.spool, {"program": "torture"})
    print_ = Fingerprint.of("environment", [])
    journal.append(records.frame_kind("environment"), records.note_payload("environment", print_.raw, print_.document))
    try:
        for _ in range(calls):
            _call(journal, print_.raw, chance)
    except JournalError:  # a full disk: what was refused is named by a gap record
        pass
    journal.close()
    return frames(spots)


def frames(spots: Places) -> Wanted:
    """Return stream, seq and digest of every frame in a spool."""
    found: Wanted = Counter()
    for path in spool.segments(spots.spool):
        scan = open_segment(path)
        stream = scan.header.stream.stream_id
        found.update((stream, item.seq, frame_digest(item.kind, item.payload)) for item in scan.frames(sealed=True))
    return found


def _call(journal: Journal, print_: bytes, chance: random.Random) -> None:
    seed, number, now = chance.randbytes(32), chance.randbytes(16), time.time_ns()
    prompt = uuid.UUID(bytes=number).hex * chance.randrange(1, 40)
    ids = buffers.vector(buffers.INT32, chance.randbytes(400))
    request = Request(
        number, bytes(16), now, time.monotonic_ns(), print_, print_, print_, 1, 1, b'{"operation":"torture"}',
        (Payload(ROLE["prompt.ids"], BUFFER, ids), Payload(ROLE["prompt.text"], TEXT, prompt.encode())),
    )  # fmt: skip
    seq = journal.append(frame.START, records.start_payload(seed, request))
    output = Output(
        number, seq, now + 1, time.monotonic_ns(), 1, 1, print_, bytes(32), b"{}",
        (SequenceEnd(0, 0, 100, 100, 0, 2, 0.5, 0),), (Payload(ROLE["output.ids"], BUFFER, ids),),
    )  # fmt: skip
    journal.append(frame.END, records.end_payload(seed, output))


# -- SIGKILL of the writer ----------------------------------------------------------------------------


def writer_kills(folder: Path, count: int, chance: random.Random) -> Count:
    """Kill writer after writer at random moments; every record must be in the store in the end, and once."""
    found = Count("SIGKILL of the writer")
    spots = places(folder)
    wanted = life(spots, FILL, chance)
    writer.drain(spots, 60.0)  # so that no kill is spent on making the schema
    midway = 0
    for _ in range(count):
        if len(spool.segments(spots.spool)) < 2:
            wanted |= life(spots, FILL, chance)
        with child(lambda _: _drain(spots)):
            time.sleep(chance.random() * WORK_SECONDS)
        midway += bool(spool.segments(spots.spool))
        found.done += 1
    writer.drain(spots, 600.0)
    _compare(found, spots, wanted)
    found.notes = [f"{midway} of {count} kills while it had work"]
    return found


def _drain(spots: Places) -> None:
    os.setsid()
    writer.BATCH_RECORDS = BATCH
    writer.drain(spots, 60.0)


def _compare(found: Count, spots: Places, wanted: Wanted) -> None:
    """Hold the store against what lay in the spool."""
    with sqlite3.connect(f"file:{spots.database}?mode=ro", uri=True) as connection:
        rows = connection.execute(
            "select s.stream_id, i.seq, i.frame_digest from ingested i join streams s on s.id = i.stream"
        )
        there = Counter((bytes(stream), seq, bytes(digest)) for stream, seq, digest in rows)
        entries, highest = connection.execute("select count(*), max(idx) from log_entries").fetchone()
        runs, distinct = connection.execute("select count(*), count(distinct run_id) from runs").fetchone()
        halves = connection.execute("select count(*) from runs where status = 'running'").fetchone()[0]
        sound = connection.execute("pragma integrity_check").fetchone()[0] == "ok"
    connection.close()
    found.records += wanted.total()
    found.lost += (wanted - there).total() + halves + (not sound)
    found.invented += len(there.keys() - wanted.keys())
    found.twice += there.total() - len(there) + runs - distinct + entries - there.total()
    found.reordered += highest + 1 != entries
    found.unnamed += bool(spool.segments(spots.spool))


# -- a full disk under spool and store ----------------------------------------------------------------


def small_disk(folder: Path, rounds: int, chance: random.Random) -> Count | None:
    """Fill a disk of a megabyte with spool and store, make room, drain. None where no such disk may be mounted."""
    disk = folder / "small"
    disk.mkdir()
    if os.geteuid() != 0 or not _mount(disk, SMALL_DISK):
        return None
    found = Count("full disk under spool and store")
    try:
        for _ in range(rounds):
            _mount(disk, SMALL_DISK, again=True)
            place = disk / chance.randbytes(4).hex()
            place.mkdir(mode=0o700)
            _one_small_disk(found, disk, places(place), chance)
            found.done += 1
            for path in sorted(place.rglob("*"), reverse=True):
                path.rmdir() if path.is_dir() else path.unlink()
            place.rmdir()
    finally:
        subprocess.run(["umount", str(disk)], check=False, stderr=subprocess.DEVNULL)  # noqa: S607
    found.notes = ["a tmpfs of 1 MB: the writer failed there and went on when there was room"]
    return found


def _one_small_disk(found: Count, disk: Path, spots: Places, chance: random.Random) -> None:
    wanted = life(spots, 100_000, chance)  # until it is full
    try:
        writer.drain(spots, 5.0)
    except (ProvenanceError, OSError, sqlite3.Error):
        pass  # no room for the database either: everything stays in the spool
    except Exception as error:
        if "full" not in str(error) and "disk" not in str(error):
            raise
    found.unnamed += not spool.segments(spots.spool)  # the writer's failure must not have cost the spool
    _mount(disk, "64m", again=True)
    writer.drain(spots, 60.0)
    _compare(found, spots, wanted)


def _mount(disk: Path, size: str, *, again: bool = False) -> bool:
    options = f"{'remount,' if again else ''}size={size}"
    command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", str(disk)]
    try:
        return subprocess.run(command, check=False, stderr=subprocess.DEVNULL).returncode == 0
    except FileNotFoundError:
        return False
