"""What the reading commands share: their options, the store opened up to date, and runs found by reference.

The store is imported when it is opened: exported runs are compared where there is no database and no driver for one.
"""

import contextlib
import os
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from provenance.errors import BadFile, ProvenanceError, RunNotFound
from provenance.facts import Run
from provenance.journal import spool
from provenance.settings import Places, load, places
from provenance.store import export, foreign

if TYPE_CHECKING:
    from sqlalchemy import Engine

Db = Annotated[
    str, typer.Option("--db", help="Database: a path or a URL. Default: PROVENANCE_DB, else the user's own.")
]
Junit = Annotated[Path | None, typer.Option("--junit", help="Write JUnit XML, for CI.")]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]
Place = tuple[int, int | None] | None
Given = list[tuple[Run, Place]]
# What a run of somebody else's making can raise in code that trusts its types.
FOREIGN = (TypeError, ValueError, LookupError, ArithmeticError, AttributeError, RecursionError)
REFERENCE = re.compile(r"(.+?)(?::(\d+)(?:\.(\d+))?)?")


def where(db: str) -> Places:
    """Resolve the places for an option ``--db``."""
    return places(load({"db": db or None}))


def store(db: str) -> "Engine":
    """Open the store read-only, after draining what waits in the spool. Says so where something still waits."""
    from provenance.store import database

    spots = where(db)
    if spots.database is not None and spots.database.is_dir():
        database.reading(spots.url, spots.database)  # says what is wrong
    # Nothing waits as a rule, and what moves records is a fifth of what this takes to start.
    if spool.segments(spots.spool) and not up_to_date(spots):
        from provenance import writer

        count = writer.waiting(spots)
        if count:
            sys.stderr.write(f"provenance: {count} records are waiting to be written; ask again in a moment.\n")
    return database.reading(spots.url, spots.database)


def up_to_date(spots: Places) -> bool:
    """Drain the spool for a second at most. A reader without write access skips it."""
    from provenance import writer

    try:
        return writer.drain(spots)
    except ProvenanceError:
        raise
    except OSError:
        return False


def split(reference: str) -> tuple[str, Place]:
    """Split RUN:ROW.RETURN.

    >>> split("last~2:3.1"), split("tag:nightly"), split("9f31")
    (('last~2', (3, 1)), ('tag:nightly', None), ('9f31', None))
    """
    match = REFERENCE.fullmatch(reference)
    if match is None or match.group(2) is None:
        return reference, None
    ret = match.group(3)
    return match.group(1), (int(match.group(2)), int(ret) if ret is not None else None)


def write(path: Path, text: str) -> None:
    """Write a file that was asked for. Raises BadFile."""
    try:
        path.write_text(text, encoding="utf-8", errors="backslashreplace")
    except OSError as error:
        raise BadFile(f"{path} cannot be written: {error.strerror}.") from None


def is_file(reference: str) -> bool:
    """Say whether a reference names a file: it has a file's look, or there is one."""
    return reference.endswith(".json") or os.sep in reference or os.path.isfile(reference)


class Runs:
    """Finds runs by reference, opening the store only when a reference needs it. Knows which came from a file."""

    def __init__(self, db: str) -> None:
        self.db = db
        self.files: dict[str, str] = {}  # by run
        self._engine: Engine | None = None

    def find(self, reference: str) -> tuple[Run, Place]:
        """Return a run and the place in it that a reference names. Raises RunNotFound or BadFile."""
        found = self.all(reference)
        if len(found) > 1:
            raise BadFile(
                f"{reference} holds {len(found)} runs, and one is wanted here; `provenance diff` takes them all."
            )
        return found[0]

    def all(self, reference: str) -> list[tuple[Run, Place]]:
        """Return what a reference names: a file may hold several runs. Raises RunNotFound or BadFile."""
        name, place = split(reference)
        if is_file(name):
            runs = self._file(name)
            if place is not None and len(runs) > 1:
                raise BadFile(f"{name} holds {len(runs)} runs, so {reference} names no row of one.")
            return [(run, place) for run in runs]
        from provenance.store import queries

        return [(queries.load(self.engine, queries.find(self.engine, name)), place)]

    @property
    def engine(self) -> "Engine":
        """Return the store, opened once."""
        if self._engine is None:
            self._engine = store(self.db)
        return self._engine

    def strange(self, given: Given, work: Callable[[Given], object]) -> BadFile | None:
        """Return what is wrong with runs of files, where work on runs failed that trusts their types.

        The field is named without which the work can be done.
        """
        if not self.files:
            return None
        for n, (run, place) in enumerate(given):
            for name, item in run.fields.items() if run.run_id in self.files else ():
                less = replace(run, fields={key: other for key, other in run.fields.items() if key != name})
                with contextlib.suppress(*FOREIGN):
                    work([*given[:n], (less, place), *given[n + 1 :]])
                    value = foreign.shown(item.document().get("value"))
                    return BadFile(
                        f"{self.files[run.run_id]} is damaged: the field {name[:60]} is {value}, which no run holds "
                        "there; export the run again."
                    )
        return BadFile(f"{', '.join(sorted(set(self.files.values())))[:200]}: no run is like that; export it again.")

    def _file(self, name: str) -> list[Run]:
        path = Path(name).expanduser()
        if not path.exists():
            raise BadFile(f"there is no file {name}. A run is named by its id, last, last~2 or tag:NAME.")
        runs = export.read_runs(path)
        self.files.update({run.run_id: name for run in runs})
        return runs


__all__ = [
    "FOREIGN",
    "Db",
    "Given",
    "Json",
    "Junit",
    "Place",
    "RunNotFound",
    "Runs",
    "split",
    "store",
    "where",
    "write",
]
