"""How far a spool is ahead of its database: what waits, since when, and whether the database answers."""

import itertools
import threading
import time
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import orjson
from sqlalchemy import text
from sqlalchemy.exc import DBAPIError

from provenance.errors import BadSegment, ProvenanceError
from provenance.facts import End, Start
from provenance.journal import kept, records, spool
from provenance.journal.recovery import Scan, open_segment
from provenance.settings import Places
from provenance.store import database

LOOK_SECONDS = 5.0
FRAMES_LOOKED_AT = 32
PAIRS = "select sum(pairs), sum(differed), sum(surface), sum(untold) from pair_hours"
Positions = Mapping[bytes, tuple[int, int, int]]


@dataclass(frozen=True, slots=True)
class Backlog:
    """What is known of a spool and its database at one moment."""

    trouble: str = ""  # why the database does not answer
    writing: bool = False  # somebody holds the place of the writer
    segments: int = 0  # with anything in them that is not in the database
    bytes: int = 0
    lag: float = 0.0  # seconds since the oldest record was written that is not in the database
    kept: int = 0
    kept_bytes: int = 0
    damaged: int = 0
    free_bytes: int = 0
    dropped: int = 0  # records that recorders could not keep, as gap records in the database say
    pairs: int = 0  # of equal inputs, and those whose outputs differ: see docs/drift.md
    differed: int = 0
    surface: int = 0
    untold: int = 0

    def unwell(self, most_lag: float) -> str:
        """Say what is not as it should be, or nothing."""
        if self.trouble:
            return f"the database does not answer: {self.trouble}"
        if self.lag > most_lag:
            return f"the oldest record has waited for {self.lag:.0f} s, and {most_lag:.0f} s is the limit"
        return ""

    def form(self) -> dict[str, Any]:
        """Return it for JSON."""
        return asdict(self)


def look(spots: Places) -> Backlog:
    """Look at a spool and its database once."""
    positions, counted, trouble = _ask(spots)
    segments = size = 0
    oldest = now = time.time()
    streams: set[str] = set()
    for path in spool.segments(spots.spool):
        try:
            scan, waiting = _waiting(path, positions)
        except (BadSegment, OSError):
            continue  # its writer says so
        if waiting <= 0:
            continue
        segments, size = segments + 1, size + waiting
        if spool.stream_of(path) not in streams:  # the first one that waits holds the stream's oldest record
            streams.add(spool.stream_of(path))
            oldest = min(oldest, _written(scan, now))
    aside = [(path, _size(path)) for path in kept.kept(spots.spool)]
    calm = [bytes_ for path, bytes_ in aside if path.suffix == kept.KEPT]
    return Backlog(
        trouble, spool.alive(spots.spool / "writer.lock"), segments, size, max(0.0, now - oldest), len(calm), sum(calm),
        len(aside) - len(calm), kept.free(spots.spool) if spots.spool.exists() else 0, *counted,
    )  # fmt: skip


def _ask(spots: Places) -> tuple[Positions, tuple[int, ...], str]:
    """Ask the database how far each stream is, how much its recorders could not keep, and how many pairs differ."""
    if spots.database is not None and not spots.database.exists():
        return {}, (), ""
    try:
        engine = database.reading(spots.url, spots.database)
        try:
            positions = database.positions(engine)
            with engine.connect() as connection:
                gaps = [
                    orjson.loads(row[0])
                    for row in connection.execute(text("select detail from events where kind='gap'"))
                ]
                pairs = connection.execute(text(PAIRS)).one()
        finally:
            engine.dispose()
    except (ProvenanceError, DBAPIError) as error:
        return {}, (), (str(error).strip().splitlines() or [type(error).__name__])[0]
    dropped = sum(int(gap["last"]) - int(gap["first"]) + 1 for gap in gaps)
    return positions, (dropped, *(int(count or 0) for count in pairs)), ""


def _waiting(path: Path, positions: Positions) -> tuple[Scan, int]:
    """Return a segment where the database is in it, and how many of its bytes wait."""
    scan = open_segment(path)
    segment, offset, last = positions.get(scan.header.stream.stream_id, (0, 0, -1))
    if segment > scan.header.index:
        return scan, 0
    if segment == scan.header.index and offset:
        scan.position, scan.last_seq = offset, last
    return scan, _size(path) - scan.position


def _written(scan: Scan, now: float) -> float:
    """Return when the first record was written that waits in a segment, or now where no whole one does."""
    found = now
    for item in itertools.islice(scan.frames(), FRAMES_LOOKED_AT):
        found = min(found, scan.path.stat().st_mtime)
        try:
            record = records.read(item.kind, item.seq, item.payload)
        except BadSegment:
            continue
        if isinstance(record, Start):
            return record.request.wall_ns / 1e9
        if isinstance(record, End):
            return record.output.wall_ns / 1e9
    return found


def _size(path: Path) -> int:
    try:
        return path.stat().st_size
    except FileNotFoundError:  # drained meanwhile
        return 0


class Watch:
    """A thread that looks every few seconds, so that nobody who asks waits for a database that does not answer."""

    def __init__(self, spots: Places) -> None:
        self.spots = spots
        self.seen = Backlog("not looked at yet")
        self._over = threading.Event()
        self._thread = threading.Thread(target=self._run, name="provenance-watch", daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            try:
                self.seen = look(self.spots)
            except Exception as error:  # the writer itself must go on
                self.seen = Backlog(f"{type(error).__name__}: {error}")
            if self._over.wait(LOOK_SECONDS):
                return

    def close(self) -> None:
        """End the thread."""
        self._over.set()
