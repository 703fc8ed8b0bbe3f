"""sql, db: the store itself."""

import os
import re
import sqlite3
import sys
from typing import Annotated, Any

import typer
from sqlalchemy import Engine

from provenance.cli import render
from provenance.cli.opened import Db, Json, store, where
from provenance.errors import UsageError, WriteRefused
from provenance.settings import cache_home, hide
from provenance.store import database

ROWS_SHOWN = 1000
# What a reading statement may do; everything else is refused before it runs.
ALLOWED = {
    sqlite3.SQLITE_SELECT, sqlite3.SQLITE_READ, sqlite3.SQLITE_FUNCTION, getattr(sqlite3, "SQLITE_RECURSIVE", 33),
}  # fmt: skip
# What the databases say to a statement that would write; a cursor of a server knows no syntax for one.
WRITING = (
    "not authorized",
    "authorization denied",
    "prohibited",
    "readonly",
    "read-only",
    "query_only",
    "data-modifying",
)
# With these a statement begins that a server's cursor has no syntax for because it would write.
WRITERS = {"alter", "analyze", "call", "cluster", "comment", "copy", "create", "delete", "do", "drop", "grant",
           "import", "insert", "lock", "merge", "reassign", "refresh", "reindex", "replace", "revoke", "truncate",
           "update", "vacuum"}  # fmt: skip
BLANK = re.compile(r"(?:\s|;|--[^\n]*(?:\n|$)|/\*.*?(?:\*/|$))*", re.DOTALL)
TRANSACTION = {sqlite3.SQLITE_TRANSACTION, sqlite3.SQLITE_SAVEPOINT}

db = typer.Typer(help="The database: upgrade, current, path.", no_args_is_help=True, rich_markup_mode=None)


def sql(
    statement: Annotated[
        str, typer.Argument(metavar="SQL", help="A statement that reads. `docs/schema.md` lists the views.")
    ],
    json: Json = False,
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, help="At most this many rows.")] = ROWS_SHOWN,
    db: Db = "",
) -> int:
    """Ask the store in SQL, read-only. The views run_overview, run_fields and diverged_inputs are made for it."""
    heads, rows, more = query(store(db), statement, limit)
    if json:
        render.emit([dict(zip(heads, map(_json, row), strict=True)) for row in rows])
    else:
        render.table(heads, rows)
    if more:
        sys.stderr.write(f"provenance: only the first {limit} rows are shown; --limit shows more.\n")
    return 0


def _json(value: Any) -> Any:
    return value.hex() if isinstance(value, bytes) else value


def query(engine: Engine, statement: str, limit: int) -> tuple[list[str], list[tuple[Any, ...]], bool]:
    """Run one reading statement; return column names, rows, and whether there were more.

    Raises WriteRefused for a statement that would change something, UsageError for one that does not run.
    """
    if not _asked(statement):
        raise UsageError("there is no statement to ask; try: provenance sql 'select * from run_overview limit 5'")
    with engine.connect() as connection:
        raw = database.driver(connection)
        if engine.dialect.name == "sqlite":
            raw.set_authorizer(_authorize)
            cursor = raw.cursor()
        else:
            connection.begin()  # and never committed
            cursor = raw.cursor(name="asked")  # a server takes nothing for a cursor but what reads
        try:
            cursor.execute(statement)
            heads = [column[0] for column in cursor.description or ()]
            rows = cursor.fetchmany(limit + 1) if heads else []
        except Exception as error:
            raise _refusal(error, statement, engine.dialect.name != "sqlite") from None
        finally:
            cursor.close()
            if engine.dialect.name == "sqlite":
                raw.set_authorizer(None)
    return heads, [tuple(row) for row in rows[:limit]], len(rows) > limit


def _authorize(action: int, *_: object) -> int:
    return sqlite3.SQLITE_OK if action in ALLOWED | TRANSACTION else sqlite3.SQLITE_DENY


def _asked(statement: str) -> str:
    """Return a statement without the comments that it begins with."""
    blank = BLANK.match(statement)
    return statement[blank.end() :] if blank else statement


def _refusal(error: Exception, statement: str, server: bool) -> UsageError:
    word = re.match(r"\w*", _asked(statement))
    text = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
    unsaid = server and "syntax error" in text and word is not None and word[0].lower() in WRITERS
    if any(sign in text for sign in WRITING) or unsaid:
        return WriteRefused(
            "the store is opened read-only, and this statement would change it; only reading is allowed."
        )
    if "statement timeout" in text:
        return UsageError(
            f"the statement took longer than {database.STATEMENT_MS // 1000} s; narrow it, or add a limit."
        )
    if "one statement at a time" in text or "multiple commands" in text:
        return UsageError("sql takes one statement at a time.")
    return UsageError(f"the statement does not run: {text}.")


@db.command("upgrade")
def upgrade(db: Db = "") -> int:
    """Bring the schema to the newest revision, or make a fresh database."""
    spots = where(db)
    engine = database.writing(spots.url, spots.database)
    name = str(spots.database or hide(spots.url))
    before = database.schema(engine, name)
    if before not in ("", *database.REVISIONS):
        database.check(engine, name, writer=True)
    database.upgrade(engine)
    sys.stdout.write(f"{name}: schema {before or 'none'} -> {database.HEAD}\n")
    return 0


@db.command("current")
def current(db: Db = "", json: Json = False) -> int:
    """Print the schema of the database and the one that this version wants."""
    spots = where(db)
    name = str(spots.database or hide(spots.url))
    if spots.database is not None and not spots.database.exists():
        database.reading(spots.url, spots.database)  # says that there is none
    found = database.schema(database.writing(spots.url, spots.database), name)
    if json:
        render.emit({"database": name, "schema": found, "wanted": database.HEAD})
    else:
        state = "current" if found == database.HEAD else "run: provenance db upgrade"
        sys.stdout.write(f"{name}: schema {found or 'none'} (this version wants {database.HEAD}; {state})\n")
    return 0 if found == database.HEAD else 1


@db.command("path")
def path(db: Db = "", json: Json = False) -> int:
    """List every file that belongs to the store, for whoever wants to copy or delete them."""
    from provenance.journal import kept, spool

    spots = where(db)
    found: list[tuple[str, str, bool]] = []
    if spots.database is not None:
        for kind, suffix in (("database", ""), ("database", "-wal"), ("database", "-shm")):
            file = spots.database.with_name(spots.database.name + suffix)
            if not suffix or file.exists():
                found.append((kind, str(file), file.exists()))
        large = spots.database.with_name(spots.database.name + ".blobs")
        found += [("large payloads", str(large), True)] if large.exists() else []
    else:
        found.append(("database", hide(spots.url), True))
    found.append(("spool", str(spots.spool), spots.spool.exists()))
    found += [("segment", str(file), True) for file in spool.segments(spots.spool)]
    found += [("kept segment", str(file), True) for file in kept.kept(spots.spool)]
    found.append(("key", str(spots.key_file), spots.key_file.exists()))
    digests = cache_home(os.environ) / "provenance" / "digests"
    found.append(("digests", str(digests), digests.exists()))
    if json:
        render.emit([{"kind": kind, "path": text, "exists": there} for kind, text, there in found])
    else:
        render.table(
            ("what", "where", ""), [(kind, text, "" if there else "not made yet") for kind, text, there in found]
        )
    return 0
