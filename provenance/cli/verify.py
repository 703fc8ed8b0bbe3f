"""verify: an account of every record that was ever numbered: what is there, what is missing, and why."""

import sys
from typing import Any

from provenance.cli import render
from provenance.cli.opened import Db, Json, store, where
from provenance.journal import child, spool
from provenance.store import gaps

UNSEEN = (
    "Not shown by this: records cut from the end of a stream together with their rows, whole streams removed, or a "
    "database put back to an older copy."
)
MEMORY = "{} of them recorded at the level memory: what their process held when it was killed left no trace."


def verify(json: Json = False, db: Db = "") -> int:
    """Account for every record: what is there, what is missing, and why.

    Records are numbered without holes by the process that makes them, so whatever was lost can be named. Exit code 1 if
    anything is missing that its process did not declare, or was damaged or refused; 3 if a process that still runs may
    yet say why.
    """
    engine = store(db)
    spots = where(db)
    living = {spool.stream_of(path) for path in spool.segments(spots.spool) if spool.alive(path)}
    found = gaps.account(engine, living)
    engine.dispose()
    pending = found.missing(gaps.PENDING)
    code = 1 if found.wrong else 3 if pending else 0
    stuck = child.complaint(spots.spool)
    if json:
        render.emit(_document(found, code, len(living), stuck))
    else:
        _tell(found, len(living), stuck)
    return code


def _document(found: gaps.Account, code: int, living: int, stuck: str) -> dict[str, Any]:
    return {
        "schema": "provenance/verify/1", "verdict": {0: "complete", 1: "incomplete", 3: "pending"}[code],
        "streams": found.streams, "living": living, "levels": found.levels, "records": found.records,
        "runs": found.runs, "missing": {kind: found.missing(kind) for kind in gaps.KINDS},
        "holes": [piece._asdict() for piece in found.pieces], "torn_tails": [piece._asdict() for piece in found.tails],
        "uncertain": found.uncertain,
        "alarms": [{"stream": stream, "seq": seq, "why": why} for stream, seq, why in found.alarms],
        "writer": stuck or None,
    }  # fmt: skip


def _tell(found: gaps.Account, living: int, stuck: str) -> None:
    runs = ", ".join(f"{count:,} {status}" for status, count in found.runs.items()) or "none"
    out = [f"{found.records:,} records of {found.streams:,} processes, {living:,} of them running; runs: {runs}."]
    if found.levels.get("memory"):
        out.append(MEMORY.format(f"{found.levels['memory']:,}"))
    if found.uncertain:
        out.append(f"{found.uncertain:,} records are here although the device failed to take them when it was asked.")
    if found.tails:
        out.append(f"{len(found.tails):,} processes died within a write; what was torn had not been acknowledged.")
    if stuck:
        out.append(f"The writer says: {stuck}")
    sys.stdout.write("\n".join(map(render.visible, out)) + "\n")
    rows = [(piece.stream[:12], _span(piece), f"{piece.size:,}", piece.kind, piece.why) for piece in found.pieces] + [
        (stream[:12], str(seq), "", "alarm", why) for stream, seq, why in found.alarms
    ]
    if rows:
        sys.stdout.write("\n")
        render.table(("process", "records", "missing", "", "why"), rows)
        sys.stdout.write("\n")
    sys.stdout.write(f"{_verdict(found)} {UNSEEN}\n")


def _span(piece: gaps.Piece) -> str:
    return str(piece.first) if piece.first == piece.last else f"{piece.first}-{piece.last}"


def _verdict(found: gaps.Account) -> str:
    counts = [f"{found.missing(kind):,} {kind}" for kind in gaps.KINDS if found.missing(kind)]
    if found.alarms:
        counts.append(f"{len(found.alarms):,} alarms")
    return f"Missing: {', '.join(counts)}." if counts else "Nothing is missing."
