"""doctor: what would matter most here, of the process, a model's folder and the store, each with its cure."""

import json as jsons
import shutil
import sqlite3
import stat
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer
from sqlalchemy import Connection, text

from provenance import writer as mover
from provenance.cli import render
from provenance.cli.environment import Torch
from provenance.cli.lint import installed
from provenance.cli.lock import NAME
from provenance.cli.opened import Db, Json, where
from provenance.cli.sides import here
from provenance.determinism import doctor as rules
from provenance.determinism import traps, upkeep
from provenance.determinism.doctor import Diagnosis, Patient, Upkeep
from provenance.errors import NoDatabase, ProvenanceError, SchemaMismatch
from provenance.integrity import keys
from provenance.journal import spool
from provenance.settings import Places, hide, load
from provenance.store import database

LACKING = {"gpu": "no GPU here", "torch": "no torch here", "mkl": "no MKL here", "vllm": "no vLLM here",
           "sglang": "no SGLang here"}  # fmt: skip
STYLES = {rules.SERIOUS: "cause", rules.WARNING: "cause", rules.NOTE: "head"}
PRIVATE_FILE, PRIVATE_FOLDER = 0o600, 0o700
LOG_BYTES = 4096
COUNTS = {
    "runs": "select count(*) from runs",
    "partial": "select count(*) from runs where status = 'partial'",
    "crashed": "select count(*) from runs where status = 'crashed'",
    "alarms": "select count(*) from events where kind = 'alarm'",
    "damaged": "select count(*) from events where kind = 'damage'",
}
NUMBERED = "select stream, count(*), max(seq) from ingested group by stream"


def doctor(
    model: Annotated[Path | None, typer.Option("--model", help="A checkpoint's folder, to be looked at too.")] = None,
    strict: Annotated[bool, typer.Option("--strict", help="Exit code 1 if there is a warning or worse.")] = False,
    torch: Torch = True,
    json: Json = False,
    db: Db = "",
) -> int:
    """Say what would matter most here: variables and switches, a model's settings, the store and its spool.

    Each finding with what stands here, what the cure costs, and the line to write. Nothing is changed, and nothing is
    told that does not apply to this machine. Exit code 0; with --strict 1 if there is a warning or worse.
    """
    facts = shape = None
    if model is not None:
        facts = traps.of_folder(model.expanduser(), installed())
        shape = _shape(model.expanduser())
    fields = {name: item for part in here(torch) for name, item in part.fields.items()}
    patient = Patient(fields, facts, shape or {}, _upkeep(db), Path(NAME).exists())
    found = rules.examine(patient, upkeep.RULES)
    if json:
        render.emit(_document(found))
    else:
        _tell(found)
    return 1 if strict and found.bad else 0


def _shape(folder: Path) -> dict[str, Any]:
    path = folder / "config.json"
    form = jsons.loads(path.read_text("utf-8")) if path.is_file() else {}  # of_folder has read it before
    return form if isinstance(form, dict) else {}


def _document(found: Diagnosis) -> dict[str, Any]:
    return {"schema": "provenance/doctor/1", "warnings": found.bad,
            "findings": [item.document() for item in found.findings], "not_applicable": found.absent}  # fmt: skip


def _tell(found: Diagnosis) -> None:
    lines: list[tuple[str, str]] = []
    for item in found.findings:
        lines += [
            (STYLES[item.severity], f"{item.severity}: {item.what} ({item.area})"),
            ("plain", f"  {item.because}."), ("plain", f"  write  {item.write}"),
            ("dim", f"  costs  {item.cost}"), ("plain", ""),
        ]  # fmt: skip
    counts = {name: sum(item.severity == name for item in found.findings) for name in rules.SEVERITIES}
    parts = [f"{count} {name}{'s' * (count != 1 and name != rules.SERIOUS)}" for name, count in counts.items() if count]
    quiet = [f"{LACKING[need]}: {count} rules do not apply" if count > 1 else f"{LACKING[need]}: 1 rule does not apply"
             for need, count in found.absent.items()]  # fmt: skip
    render.lines([*lines, ("plain", "; ".join([", ".join(parts) or "nothing found", *quiet]) + ".")])


# -- the store --------------------------------------------------------------------------------------


def _upkeep(db: str) -> Upkeep:
    """Read the state of the store and the spool. Nothing is drained, made or waited for."""
    settings, spots = load({"db": db or None}), where(db)
    facts: dict[str, Any] = {
        "database": str(spots.database or hide(spots.url)), "server": spots.database is None,
        "capture": settings.capture, "disabled": settings.disabled, "key": _key(spots.key_file),
        "sqlite": sqlite3.sqlite_version if spots.database is not None else "", "modes": tuple(_modes(spots)),
        "free": tuple(_free(spots)), "writer": spool.alive(spots.spool / "writer.lock"),
        "complaints": _complaints(spots.spool / "writer.log"),
    }  # fmt: skip
    paths = spool.segments(spots.spool)
    if paths:
        facts["waiting"] = mover.waiting(spots)
        facts["oldest"] = max(0.0, time.time() - min(path.stat().st_mtime for path in paths))
    try:
        engine = database.reading(spots.url, spots.database)
        try:
            with engine.connect() as connection:
                facts |= _counts(connection)
        finally:
            engine.dispose()
    except SchemaMismatch as error:
        facts["mismatch"] = str(error)
    except NoDatabase as error:
        if spots.database is not None and (not spots.database.exists() or spots.database.stat().st_size == 0):
            facts["there"] = False
        else:
            facts["unread"] = str(error)
    except Exception as error:
        facts["unread"] = str(error) if isinstance(error, ProvenanceError) else f"{type(error).__name__}: {error}"[:300]
    return Upkeep(**facts)


def _counts(connection: Connection) -> dict[str, int]:
    found = {name: int(connection.execute(text(query)).scalar() or 0) for name, query in COUNTS.items()}
    gaps: dict[int, set[int]] = {}
    for stream, detail in connection.execute(text("select stream, detail from events where kind = 'gap'")):
        form = orjson.loads(detail)
        gaps.setdefault(stream, set()).update(range(int(form["first"]), int(form["last"]) + 1))
    query = text("select distinct stream from events where kind in ('damage', 'alarm')")
    hurt = {row[0] for row in connection.execute(query)}  # what is missing there has been told
    holes = 0
    for stream, count, last in connection.execute(text(NUMBERED)):
        declared = sum(seq <= last for seq in gaps.get(stream, ()))
        holes += 0 if stream in hurt else max(0, last + 1 - count - declared)
    return {**found, "gaps": sum(map(len, gaps.values())), "holes": holes}


def _key(path: Path) -> str:
    """Return what is wrong with the key file; one that is not there yet is made when it is needed."""
    if not path.exists():
        return ""
    try:
        keys.load(path)
    except ProvenanceError as error:
        return str(error)
    except OSError as error:
        return f"the key file {path} cannot be read: {error.strerror}"
    return ""


def _modes(spots: Places) -> Iterable[tuple[str, int, int]]:
    for path, most in ((spots.database, PRIVATE_FILE), (spots.spool, PRIVATE_FOLDER)):
        if path is not None and path.exists():
            yield str(path), stat.S_IMODE(path.stat().st_mode), most


def _free(spots: Places) -> Iterable[tuple[str, int, int]]:
    """Return the room on each disk that store and spool lie on, or would lie on."""
    seen: set[int] = set()
    for path in filter(None, (spots.database, spots.spool)):
        there = next(place for place in (path, *path.parents) if place.exists())
        device = there.stat().st_dev
        if device not in seen:
            seen.add(device)
            usage = shutil.disk_usage(there)
            yield str(there), usage.free, usage.total


def _complaints(path: Path) -> tuple[str, ...]:
    """Return the last lines of the writer's log, which holds warnings alone."""
    try:
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - LOG_BYTES))
            return tuple(line[:300] for line in file.read().decode("utf-8", "replace").splitlines() if line.strip())
    except OSError:
        return ()
