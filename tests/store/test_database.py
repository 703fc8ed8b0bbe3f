"""Opening the store: one schema, the right error for every wrong file, and readers that cannot write."""

import os
import sqlite3
import stat
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from alembic.autogenerate import compare_metadata
from alembic.migration import MigrationContext
from alembic.script import ScriptDirectory
from sqlalchemy import create_engine, text
from sqlalchemy.exc import DBAPIError, IntegrityError, OperationalError

from provenance.errors import BadFile, NoDatabase, ProvenanceError, SchemaMismatch
from provenance.settings import Places
from provenance.store import database, tables
from tests.fakes.records import Calls, drained, is_one_sentence, places, rows

Opened = Any


def opened(spots: Places, writer: bool) -> Opened:
    """Open a store as the writer or a reader does."""
    if not writer:
        return database.reading(spots.url, spots.database)
    engine = database.writing(spots.url, spots.database)
    database.check(engine, str(spots.database), writer=True)
    return engine


@pytest.fixture
def spots(tmp_path: Path) -> Places:
    return places(tmp_path / "store")


@pytest.fixture
def fresh(spots: Places) -> Places:
    opened(spots, writer=True)
    return spots


def shape(connection: Any) -> dict[str, Any]:
    """Describe every table as SQLite has it: columns, keys, indexes, and whether rows have numbers."""
    found: dict[str, Any] = {}
    for _, name, kind, _, without_rowid, _ in connection.exec_driver_sql("pragma table_list"):
        if kind != "table" or name.startswith("sqlite_") or name == "alembic_version":
            continue
        columns = [tuple(row)[1:] for row in connection.exec_driver_sql(f"pragma table_xinfo({name})")]
        indexes = {}
        for _, index, unique, origin, partial in connection.exec_driver_sql(f"pragma index_list({name})"):
            parts = [row[2] for row in connection.exec_driver_sql(f"pragma index_info({index})")]
            indexes[index] = (unique, origin, partial, parts)
        found[name] = (sorted(columns), indexes, without_rowid)
    return found


# -- the schema ---------------------------------------------------------------------------------------


def test_the_migrations_make_exactly_the_tables_of_the_code(fresh: Places) -> None:
    with opened(fresh, writer=False).connect() as connection:
        context = MigrationContext.configure(connection, opts={"compare_type": True, "compare_server_default": True})
        assert compare_metadata(context, tables.metadata) == []
        migrated = shape(connection)
    declared = create_engine("sqlite://")
    tables.metadata.create_all(declared)
    with declared.connect() as connection:
        assert migrated == shape(connection)
    assert len(migrated) == len(tables.metadata.tables)


def test_the_code_knows_every_migration_and_its_head() -> None:
    scripts = ScriptDirectory(str(database.scripts()))
    assert scripts.get_current_head() == database.HEAD
    assert {item.revision for item in scripts.walk_revisions()} == set(database.REVISIONS)


def test_the_views_for_people_can_be_asked(fresh: Places) -> None:
    for view in ("run_overview", "run_fields", "diverged_inputs"):
        assert rows(fresh, f"select * from {view}") == []


def test_times_are_part_of_the_keys_so_that_tables_can_be_partitioned() -> None:
    for name in ("runs", "sequences", "payload_refs"):
        assert "started_at" in {column.name for column in tables.metadata.tables[name].primary_key}


def test_what_is_hashed_is_binary() -> None:
    hashed = [("log_entries", "leaf"), ("fingerprints", "document"), ("weights", "document"), ("payloads", "data"),
              ("payload_refs", "commitment"), ("payload_refs", "salt"), ("ingested", "frame_digest")]  # fmt: skip
    for table, column in hashed:
        assert str(tables.metadata.tables[table].c[column].type).startswith(("BLOB", "BINARY"))


def test_opening_again_migrates_nothing(fresh: Places) -> None:
    before = rows(fresh, "select name, sql from sqlite_master")
    opened(fresh, writer=True)
    assert rows(fresh, "select name, sql from sqlite_master") == before


# -- what is not a store ------------------------------------------------------------------------------


def refused(spots: Places, writer: bool, kind: type[ProvenanceError], message: str) -> None:
    """Hold that opening raises this error, says it in one sentence and names the file."""
    with pytest.raises(kind, match=message) as caught:
        opened(spots, writer)
    assert type(caught.value) is kind
    assert is_one_sentence(str(caught.value))
    assert str(spots.database) in str(caught.value)


def test_a_missing_database_is_named_with_what_to_do(spots: Places) -> None:
    refused(spots, False, NoDatabase, "there is no database at .* Record a run first")
    with pytest.raises(FileNotFoundError):
        opened(spots, writer=False)
    assert spots.database is not None
    assert not spots.database.exists()


@pytest.mark.parametrize("writer", [False, True])
def test_a_folder_is_refused(spots: Places, writer: bool) -> None:
    assert spots.database is not None
    spots.database.mkdir()
    refused(spots, writer, BadFile, "is a folder and not a database")


@pytest.mark.parametrize("writer", [False, True])
@pytest.mark.parametrize("content", [b"not a database at all " * 50, b"SQLite format 3\0" + b"\xff" * 5000, b"x"])
def test_a_file_of_something_else_is_refused_and_left_as_it_is(spots: Places, writer: bool, content: bytes) -> None:
    assert spots.database is not None
    spots.database.write_bytes(content)
    refused(spots, writer, BadFile, "is not a database")
    assert spots.database.read_bytes() == content


@pytest.mark.parametrize("writer", [False, True])
def test_a_pipe_is_refused_without_waiting(spots: Places, writer: bool) -> None:
    assert spots.database is not None
    os.mkfifo(spots.database)
    refused(spots, writer, BadFile, "is not a database")


@pytest.mark.parametrize("writer", [False, True])
def test_a_database_of_something_else_is_refused_and_left_as_it_is(spots: Places, writer: bool) -> None:
    assert spots.database is not None
    connection = sqlite3.connect(spots.database)
    connection.execute("create table theirs(a)")
    connection.commit()
    connection.close()
    before = spots.database.read_bytes()
    refused(spots, writer, BadFile, "is a database of something else")
    assert spots.database.read_bytes() == before


def test_an_empty_database_is_missing_for_a_reader_and_made_ready_by_the_writer(spots: Places) -> None:
    assert spots.database is not None
    spots.database.touch()
    refused(spots, False, NoDatabase, "nothing has been recorded into it yet")
    opened(spots, writer=True)
    opened(spots, writer=False)


@pytest.mark.parametrize("writer", [False, True])
def test_a_newer_schema_is_refused_by_both(fresh: Places, writer: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    with database.writing(fresh.url, fresh.database).begin() as connection:
        connection.execute(text("update alembic_version set version_num = '9999'"))
    refused(fresh, writer, SchemaMismatch, "has schema 9999, newer than this version knows .* Upgrade provenance")


@pytest.mark.parametrize("writer", [False, True])
def test_an_older_schema_is_refused_with_the_command_and_not_migrated(
    fresh: Places, writer: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = database.HEAD
    monkeypatch.setattr(database, "HEAD", "9999")
    monkeypatch.setattr(database, "REVISIONS", (*database.REVISIONS, "9999"))
    refused(fresh, writer, SchemaMismatch, f"has the older schema {now}. Run: provenance db upgrade")
    assert rows(fresh, "select version_num from alembic_version") == [(now,)]


@pytest.mark.parametrize("writer", [False, True])
def test_a_place_that_cannot_be_reached_is_named(tmp_path: Path, writer: bool) -> None:
    (tmp_path / "file").write_text("")
    spots = Places("", tmp_path / "file" / "p.db", tmp_path / "spool", tmp_path / "key")
    refused(spots, writer, NoDatabase, "p.db")


# -- who may do what ----------------------------------------------------------------------------------


def test_a_store_is_its_owners_alone_whatever_the_umask(spots: Places) -> None:
    before = os.umask(0)
    try:
        engine = opened(spots, writer=True)
        with engine.begin() as connection:
            connection.execute(text("insert into store_info values('a', 'b')"))
            assert spots.database is not None
            files = sorted(spots.database.parent.glob("p.db*"))
            modes = {path.name: stat.S_IMODE(path.stat().st_mode) for path in files}
    finally:
        os.umask(before)
    assert modes == {"p.db": 0o600, "p.db-shm": 0o600, "p.db-wal": 0o600}


@pytest.mark.parametrize(
    "sql",
    ["insert into store_info values('a', 'b')", "update runs set name = 'x'", "delete from streams", "drop table runs",
     "create table more(a)", "create temp view v as select 1", "pragma user_version = 5", "vacuum",
     "pragma journal_mode = delete", "insert into store_info select 'a', 'b' returning name"],
)  # fmt: skip
def test_a_reading_handle_cannot_write(fresh: Places, sql: str) -> None:
    engine = opened(fresh, writer=False)
    before = rows(fresh, "select sql from sqlite_master"), rows(fresh, "select * from store_info")
    try:
        with engine.connect() as connection:
            connection.exec_driver_sql(sql)
            connection.commit()
    except DBAPIError:
        pass
    else:
        assert sql.startswith("pragma"), "the handle took it without a word"
    assert (rows(fresh, "select sql from sqlite_master"), rows(fresh, "select * from store_info")) == before
    assert rows(fresh, "pragma user_version") == [(0,)]
    assert rows(fresh, "pragma journal_mode") == [("wal",)]


def test_a_writing_handle_forgets_deleted_bytes_and_syncs_every_commit(fresh: Places) -> None:
    with opened(fresh, writer=True).connect() as connection:
        asked = {
            name: connection.exec_driver_sql(f"pragma {name}").scalar() for name in ("synchronous", "secure_delete")
        }
    assert asked == {"synchronous": 2, "secure_delete": 1}


def test_a_reader_sees_one_moment_and_the_writer_does_not_wait(fresh: Places) -> None:
    writer, reader = opened(fresh, writer=True), opened(fresh, writer=False)
    with reader.connect() as reading:
        count = reading.execute(text("select count(*) from store_info")).scalar()
        with writer.begin() as writing:
            writing.execute(text("insert into store_info values('new', '1')"))
        assert reading.execute(text("select count(*) from store_info")).scalar() == count
    with reader.connect() as later:
        assert later.execute(text("select count(*) from store_info")).scalar() == count + 1


def test_a_path_with_marks_of_a_uri_is_a_path(tmp_path: Path) -> None:
    file = tmp_path / "a?mode=ro#%20b & c.db"
    spots = Places("", file, tmp_path / "spool", tmp_path / "key")
    opened(spots, writer=True)
    assert file.exists()
    opened(spots, writer=False)


STRANGER = """
import sqlite3, sys
connection = sqlite3.connect(sys.argv[1])
print(connection.execute("select count(*) from store_info").fetchone()[0])
connection.close()
"""


def test_a_reader_beside_the_writer_does_not_let_a_stranger_take_its_log_away(fresh: Places) -> None:
    assert fresh.database is not None
    engine = database.writing(fresh.url, fresh.database)
    seen = []
    with engine.connect() as connection:
        for name in ("a", "b"):
            with connection.begin():
                connection.execute(text(f"insert into store_info values('{name}', '')"))
            opened(fresh, writer=False).dispose()  # looks at the file, in the process that has it open
            with pytest.raises(BadFile):
                opened(Places("", Path(__file__), fresh.spool, fresh.key_file), writer=False)
            command = [sys.executable, "-c", STRANGER, str(fresh.database)]
            seen.append(subprocess.run(command, capture_output=True, text=True, check=True).stdout)
    engine.dispose()
    assert seen == ["1\n", "2\n"]


def test_a_file_that_nobody_has_open_any_more_is_looked_at_again(fresh: Places) -> None:
    assert fresh.database is not None
    opened(fresh, writer=True).dispose()
    fresh.database.write_bytes(b"no database any more, in the same file")
    refused(fresh, False, BadFile, "is not a database")


def test_positions_say_how_far_each_stream_is_in(tmp_path: Path) -> None:
    spots = places(tmp_path / "store")
    calls = Calls(spots.spool)
    calls.prints()
    calls.call(1)
    drained(spots)
    size = calls.journal.path.stat().st_size
    assert database.positions(opened(spots, writer=False)) == {calls.journal.stream.stream_id: (0, size, 5)}
    calls.close()


# -- whose trouble it is ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("error", "stores"),
    [
        (OperationalError("insert", {}, sqlite3.OperationalError("database is locked")), True),
        (sqlite3.OperationalError("database or disk is full"), True),
        (sqlite3.DatabaseError("database disk image is malformed"), True),
        (OSError(28, "No space left on device"), True),
        (MemoryError(), True),
        (IntegrityError("insert", {}, sqlite3.IntegrityError("UNIQUE constraint failed")), False),
        (sqlite3.IntegrityError("UNIQUE constraint failed"), False),
        (sqlite3.ProgrammingError("Error binding parameter"), False),
        (UnicodeEncodeError("utf-8", "\ud800", 0, 1, "surrogates not allowed"), False),
        (KeyError("fields"), False),
    ],
    ids=repr,
)
def test_the_stores_trouble_is_told_from_that_of_a_record(fresh: Places, error: Exception, stores: bool) -> None:
    assert database.failed(opened(fresh, writer=True), error) is stores
