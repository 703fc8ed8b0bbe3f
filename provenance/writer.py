"""From the journal to the store: one elected writer drains every segment of a spool, its own process's or a dead one's.

Whoever holds the lock on ``writer.lock`` is the writer; the kernel frees it when its holder dies, so nobody
waits for a ghost. Rows and position are committed together, a segment is set aside once everything in it is
committed and nobody appends to it any more, and a crash at any point repeats nothing. Run as ``python -m
provenance.writer SPOOL`` this is the child process of a recorder: it ends when there has been nothing to do for
five seconds.
"""

import logging
import os
import sys
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import orjson

from provenance.errors import BadSegment, MissingBlob, ProvenanceError, StoreAway, StoreError
from provenance.facts import Noted, Stream
from provenance.integrity import keys
from provenance.journal import bells, blobs, child, kept, records, room, spool
from provenance.journal.recovery import Damage, Scan, open_segment
from provenance.opening import read_target
from provenance.settings import Places
from provenance.store import database
from provenance.store.batch import Item
from provenance.store.ingest import Ingest, Position, frame_digest

log = logging.getLogger("provenance.writer")
BATCH_RECORDS = 500
BATCH_BYTES = 4 << 20
POLL_SECONDS = 0.05
IDLE_SECONDS = 5.0
READER_SECONDS = 1.0
EXPIRE_SECONDS = 60.0
RETRY_SECONDS = (0.2, 1.0, 5.0, 15.0)
PATIENCE_SECONDS = 3600.0  # for a store that does not answer; then the spool waits for another writer
NICE = 10


class Taken(NamedTuple):
    """What a segment of another host brought: records, new ones, damaged places, segments missing before it."""

    path: Path
    stream: Stream
    number: int
    seen: int
    new: int
    damaged: int
    missing: int


@dataclass(slots=True)
class Progress:
    """What a writer has done since it started, for whoever watches it from another thread."""

    drained: int = 0
    elected: bool = False
    errors: int = 0
    committed_at: float = 0.0
    trouble: str = ""  # why the store takes nothing now


class Drain:
    """Moves segments of one spool into one store."""

    def __init__(self, where: Places, progress: Progress | None = None) -> None:
        """Open the store, making a fresh one ready.

        Raises ProvenanceError where it cannot be written to.
        """
        self.where, self.progress = where, progress or Progress()
        self._expire_at = 0.0
        self.strict = False  # what lies beside a segment must be there
        self.stop: Callable[[], bool] = lambda: False  # asked between batches
        engine = database.writing(where.url, where.database)
        try:
            database.check(engine, str(where.database or "named by PROVENANCE_DB"), writer=True)
            self.ingest = Ingest(engine, keys.load(where.key_file))
        except BaseException:
            engine.dispose()
            raise
        self.scans: dict[Path, Scan] = {}
        self.left_alone: set[Path] = set()
        self.told: dict[bytes, int] = {}  # of commits, to those who wait for theirs
        self.awaited = False
        room.tidy(where.spool, {spool.stream_of(path) for path in spool.segments(where.spool) if spool.alive(path)})

    def pass_once(self, until: float = float("inf")) -> int:
        """Go over the spool once, up to a monotonic time; return how many records were moved."""
        moved, self.awaited = 0, False
        paths = spool.segments(self.where.spool)
        self.scans = {path: scan for path, scan in self.scans.items() if path in paths}
        for place, path in enumerate(paths):
            if path in self.left_alone or time.monotonic() > until or self.stop():
                continue
            following = paths[place + 1] if place + 1 < len(paths) else None
            newer = following is not None and spool.stream_of(following) == spool.stream_of(path)
            try:
                moved += self._segment(path, sealed=newer, until=until)
            except BadSegment as error:
                log.warning("%s", error)
                self.left_alone.add(path)
        if not moved and not self.awaited:
            self.ingest.rest()
        if time.monotonic() >= self._expire_at:
            self._expire_at = time.monotonic() + EXPIRE_SECONDS
            kept.expire(self.where.spool, self.where.grace)
        return moved

    def _segment(self, path: Path, sealed: bool, until: float) -> int:
        dead = not spool.alive(path)  # asked before the scan: what a dead process wrote is all there
        scan = self._scan(path)
        if scan is None:
            return 0
        # The list of segments may be older than a rotation: a stream that goes on has not ended.
        stream, index = scan.header.stream.stream_id, scan.header.index
        sealed = sealed or spool.segment_path(path.parent, stream, index + 1).exists()
        before = time.monotonic()
        moved = 0
        whole = True
        for batch in _batches(scan, sealed or dead):
            moved += self._write(scan, batch)
            if time.monotonic() > until or self.stop():
                whole = False
                break
        if whole and dead:
            self._retire(path, scan, ended=not sealed)
        elif not dead:
            self._tell(stream, scan.last_seq)
        if moved:
            log.info("%d records of %s in %.3f s", moved, path.name, time.monotonic() - before)
        return moved

    def _tell(self, stream: bytes, seq: int) -> None:
        """Tell a process that waits for its commits how far they are."""
        if bells.ack_path(self.where.spool, stream).exists():
            self.awaited = True
            if self.told.get(stream) != seq and bells.committed(self.where.spool, stream, seq):
                self.told[stream] = seq

    def _scan(self, path: Path) -> Scan | None:
        """Return the scan of a segment where it was left, or None where there is nothing to do."""
        scan = self.scans.get(path)
        if scan is None:
            try:
                scan = open_segment(path)
            except FileNotFoundError:
                return None
            position = self.ingest.position(scan.header.stream)
            # A store that is further on may have got there by an import, past this segment: then it is read whole.
            if position.segment == scan.header.index and position.offset:
                scan.position, scan.last_seq = position.offset, position.last_seq
            self.scans[path] = scan
        return scan

    def _write(self, scan: Scan, batch: list[tuple[int, int, int, bytes]]) -> int:
        items = []
        for end, seq, kind, payload in batch:
            try:
                record = blobs.resolved(records.read(kind, seq, payload), scan.path)
            except BadSegment as error:
                if self.strict and isinstance(error, MissingBlob):
                    raise
                detail = orjson.dumps({"first": seq, "last": seq, "reason": str(error)})
                record = Noted(seq, "gap", bytes(32), detail)
            items.append(Item(record, frame_digest(kind, payload), end))
        told = len(scan.damage)
        try:
            moved = self.ingest.write(scan.header.stream, scan.header.index, items, damage=scan.damage[scan.told :])
        except Exception as error:
            if database.failed(self.ingest.engine, error):
                raise  # everything waits
            return sum(self._write_one(scan, item) for item in items)
        scan.told = told
        self._note(moved)
        return moved

    def _note(self, moved: int) -> None:
        """Keep the progress up to date."""
        self.progress.drained += moved
        self.progress.committed_at = time.time()

    def _write_one(self, scan: Scan, item: Item) -> int:
        """Write one record of a batch that failed: one that cannot be stored must not hold up all that follow."""
        stream, segment = scan.header.stream, scan.header.index
        try:
            moved = self.ingest.write(stream, segment, [item])
            self._note(moved)
            return moved
        except Exception as error:
            if database.failed(self.ingest.engine, error):
                raise
            log.warning("record %d cannot be stored: %s", item.record.seq, child.said(error))
            self.ingest.refuse(stream, segment, item, child.said(error))
            scan.damage.append(Damage(item.end, item.end, item.record.seq))  # so the segment is set aside, not unlinked
            return 0

    def _retire(self, path: Path, scan: Scan, ended: bool) -> None:
        """Let go of a segment that nobody appends to: keep it for its grace, and a damaged one for good."""
        stream, index = scan.header.stream, scan.header.index
        self.ingest.write(stream, index, [], ended=ended, damage=scan.damage[scan.told :])
        if scan.damage or self.ingest.hurt(stream, index):  # by an earlier writer, perhaps
            path.rename(path.with_suffix(kept.DAMAGED))
        else:
            kept.keep(path, self.where.grace)
        self.scans.pop(path, None)

    def take(self, path: Path, last: bool) -> Taken:
        """Bring a segment of another host, or a kept one, into the store, each record once, and leave the file alone.

        ``last`` says that no later segment of its stream is at hand: what still runs in it is taken for crashed, until
        a newer copy brings its end. Raises BadSegment where it is no segment.
        """
        scan, self.strict = open_segment(path), True
        stream, index = scan.header.stream, scan.header.index
        before = self.ingest.position(stream)
        missing = max(0, index - before.segment - (1 if before.offset else 0))
        seen = new = 0
        for batch in _batches(scan, sealed=not last):  # a copy of what goes on may end within a record
            seen += len(batch)
            new += self._write(scan, batch)
        self.ingest.write(stream, index, [], ended=last, damage=scan.damage[scan.told :])
        return Taken(path, stream, index, seen, new, len(scan.damage), missing)

    def close(self) -> None:
        """Close the store."""
        self.ingest.rest()
        self.ingest.engine.dispose()


def _batches(scan: Scan, sealed: bool) -> Iterator[list[tuple[int, int, int, bytes]]]:
    """Gather frames into batches of a bounded number and size."""
    batch: list[tuple[int, int, int, bytes]] = []
    size = 0
    for frame in scan.frames(sealed):
        batch.append(frame)
        size += len(frame.payload)
        if len(batch) >= BATCH_RECORDS or size >= BATCH_BYTES:
            yield batch
            batch, size = [], 0
    if batch:
        yield batch


def run(
    where: Places, idle: float = IDLE_SECONDS, stop: Callable[[], bool] = lambda: False, wait: bool = False,
    progress: Progress | None = None,
) -> bool:  # fmt: skip
    """Be the writer until there has been nothing to do for ``idle`` seconds or ``stop`` says so.

    Returns False where somebody else is; with ``wait`` it waits for its turn instead. A store that fails is
    tried again with growing pauses: the spool keeps everything.
    """
    while True:
        with room.elected(where.spool) as mine:
            if mine:
                _serve(where, idle, stop, progress or Progress())
                return True
        if not wait or stop():
            return False
        time.sleep(RETRY_SECONDS[0])


def _serve(where: Places, idle: float, stop: Callable[[], bool], progress: Progress) -> None:
    drain: Drain | None = None
    progress.elected = True
    quiet_since = well_at = time.monotonic()
    failures = 0
    uneasy = True  # about what an earlier writer complained of
    rest = bells.Rest(where.spool)
    while not stop():
        try:
            drain = drain or Drain(where, progress)
            drain.stop = stop
            moved = drain.pass_once()
            progress.trouble = ""
        except Exception as error:  # a locked, full or absent database: everything stays in the spool
            failures, uneasy = failures + 1, True
            progress.errors, progress.trouble = progress.errors + 1, child.said(error)
            child.complain(where.spool, progress.trouble)
            _bear(error, failures, time.monotonic() - well_at, idle)
            if drain is not None:
                drain.close()
                drain = None
            _pause(RETRY_SECONDS[min(failures, len(RETRY_SECONDS)) - 1], stop)
            continue
        if uneasy:
            child.well(where.spool)
        now = well_at = time.monotonic()
        failures, uneasy = 0, False
        if moved or drain.awaited:
            quiet_since = now
        elif now - quiet_since > idle:
            break
        if not moved:
            rest.take(POLL_SECONDS)
    rest.close()
    if drain is not None:
        drain.stop = lambda: False
        drain.pass_once(time.monotonic() + READER_SECONDS)
        drain.close()


def _bear(error: Exception, failures: int, seconds: float, idle: float) -> None:
    """Say that the store failed, or give up: on what will not pass, or after an hour, unless this is a service."""
    if isinstance(error, ProvenanceError) and not isinstance(error, StoreAway):
        raise error
    said = child.said(error)
    if seconds > PATIENCE_SECONDS and idle != float("inf"):
        raise StoreError(f"the store failed for {seconds:.0f} s: {said}; the spool keeps everything.") from error
    if failures in (1, 11) or failures % 100 == 0:
        log.warning("the store failed: %s; the spool keeps everything", said)


def _pause(seconds: float, stop: Callable[[], bool]) -> None:
    limit = time.monotonic() + seconds
    while time.monotonic() < limit and not stop():
        time.sleep(POLL_SECONDS)


# -- for those who read -----------------------------------------------------------------------------


def drain(where: Places, seconds: float = READER_SECONDS) -> bool:
    """Bring the store up to date before it is read: by draining, or by waiting for whoever drains.

    Returns False where records are still waiting after ``seconds``, or where this user may not write.
    """
    if not spool.segments(where.spool):
        return True
    limit = time.monotonic() + seconds
    while True:
        with room.elected(where.spool) as mine:
            if mine:
                mover = Drain(where)
                try:
                    while mover.pass_once(limit) and time.monotonic() < limit:
                        pass
                finally:
                    mover.close()
                return waiting(where) == 0
        if waiting(where) == 0:
            return True
        if time.monotonic() > limit:
            return False
        time.sleep(POLL_SECONDS)


def waiting(where: Places) -> int:
    """Count the records in the spool that are not in the store yet."""
    paths = spool.segments(where.spool)
    if not paths:
        return 0
    ingest = None
    if where.database is None or where.database.exists():
        try:
            engine = database.reading(where.url, where.database)
            ingest = database.positions(engine)
            engine.dispose()
        except ProvenanceError:
            ingest = None
    count = 0
    for path in paths:
        try:
            scan = open_segment(path)
        except (BadSegment, OSError):
            continue
        there = (ingest or {}).get(scan.header.stream.stream_id)
        position = Position(*there) if there else Position(0, 0, -1)
        if position.segment > scan.header.index:
            continue
        if position.segment == scan.header.index and position.offset:
            scan.position, scan.last_seq = position.offset, position.last_seq
        count += sum(1 for _ in scan.frames())
    return count


def main() -> int:
    """Be the child process of a recorder."""
    logging.basicConfig(level=logging.WARNING, format="%(asctime)s %(message)s")
    try:
        os.nice(NICE)
    except OSError:
        log.warning("the writer runs at normal priority")
    try:
        run(read_target(Path(sys.argv[1])))
    except ProvenanceError as error:
        log.warning("%s", error)
        return error.exit_code
    return 0


if __name__ == "__main__":
    sys.exit(main())
