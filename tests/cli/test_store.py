"""sql, writer and db: reading is free, writing is refused."""

import json
import os
import re
import signal
import sqlite3
import subprocess
import sys
import time
from pathlib import Path

import pytest

import provenance
from provenance.store import database
from tests.conftest import Command


@pytest.fixture
def recorded(db: Path) -> Path:
    """Record two calls, and leave them in the spool."""
    provenance.init(db=db, writer="off")

    @provenance.record
    def double(x: int) -> int:
        return 2 * x

    double(1), double(2)
    return db


def test_the_views_answer_from_a_read_only_handle(recorded: Path, command: Command) -> None:
    found = command("sql", "select * from run_overview limit 5", "--json")
    rows = json.loads(found.stdout)
    assert [row["status"] for row in rows] == ["ok", "ok"]
    assert rows[0]["operation"].endswith("double")
    fields = json.loads(command("sql", "select name, value from run_fields where name='os.platform'", "--json").stdout)
    assert fields[0] == {"name": "os.platform", "value": sys.platform}
    assert command("sql", "select count(*) from diverged_inputs").stdout.split() == ["count(*)", "0"]


WRITES = [
    "delete from runs", "insert into run_tags values (1, 'a', 'b')", "update runs set status='ok'", "drop table runs",
    "create table x(a)", "alter table runs add column x", "pragma journal_mode=delete", "pragma query_only=off",
    "attach database '/tmp/other.db' as other", "vacuum", "vacuum into '/tmp/copy.db'", "reindex", "analyze",
    "replace into run_tags values (1, 'a', 'b')", "with x as (select 1) delete from runs", "begin immediate; delete from runs",
]  # fmt: skip


@pytest.mark.parametrize("statement", WRITES)
def test_a_write_is_refused_with_one_sentence(statement: str, recorded: Path, command: Command) -> None:
    command("log")
    before = recorded.read_bytes()
    found = command("sql", statement)
    assert found.returncode == 2
    assert len(found.stderr.splitlines()) == 1
    assert "read-only" in found.stderr or "one statement" in found.stderr
    assert recorded.read_bytes() == before


def test_a_statement_that_does_not_run_is_one_sentence(recorded: Path, command: Command) -> None:
    found = command("sql", "select nonsense from nowhere")
    assert (found.returncode, "no such table" in found.stderr) == (2, True)
    assert len(found.stderr.splitlines()) == 1


@pytest.mark.parametrize(
    "statement", ["selec", "selec * from runs", "delete form runs", "/* x */ -- y\n selec", "select * frm runs"]
)
def test_a_slip_of_the_pen_is_not_called_a_write(statement: str, recorded: Path, command: Command) -> None:
    found = command("sql", statement)
    assert (found.returncode, found.stdout) == (2, "")
    assert re.fullmatch(r'provenance: the statement does not run: near "\w+": syntax error\.\n', found.stderr), (
        found.stderr
    )


@pytest.mark.parametrize("statement", ["", " ", ";", "-- nothing", "/* nothing */ ;", "-- a\n/* b\n */\n;;"])
def test_nothing_is_no_statement(statement: str, recorded: Path, command: Command) -> None:
    found = command("sql", statement)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith("provenance: there is no statement to ask; try: provenance sql 'select")


def test_long_answers_are_cut_and_say_so(recorded: Path, command: Command) -> None:
    found = command("sql", "select 1 union all select 2 union all select 3", "--limit", "2")
    assert found.stdout.split() == ["1", "1", "2"]
    assert "only the first 2 rows" in found.stderr


def test_the_schema_can_be_made_and_asked_for(db: Path, command: Command) -> None:
    made = command("db", "upgrade")
    assert f"schema none -> {database.HEAD}" in made.stdout
    assert json.loads(command("db", "current", "--json").stdout) == {
        "database": str(db),
        "schema": database.HEAD,
        "wanted": database.HEAD,
    }
    assert oct(db.stat().st_mode & 0o777) == "0o600"
    again = command("db", "upgrade")
    assert f"schema {database.HEAD} -> {database.HEAD}" in again.stdout


def test_the_writer_in_the_foreground_drains_and_stops_on_a_signal(recorded: Path) -> None:
    child = subprocess.Popen([sys.executable, "-m", "provenance", "writer"], stderr=subprocess.PIPE, text=True)
    try:
        limit = time.monotonic() + 20
        while time.monotonic() < limit and not _runs(recorded):
            time.sleep(0.1)
        assert _runs(recorded) == 2
    finally:
        child.send_signal(signal.SIGINT)
        child.communicate(timeout=60)
    assert child.returncode == 0


def _runs(db: Path) -> int:
    try:
        with sqlite3.connect(f"file:{db}?mode=ro", uri=True) as connection:
            return int(connection.execute("select count(*) from runs").fetchone()[0])
    except sqlite3.OperationalError:
        return 0
    finally:
        if "connection" in locals():
            connection.close()


def test_a_reader_without_write_access_still_reads(recorded: Path, command: Command, tmp_path: Path) -> None:
    if os.geteuid() != 0:
        pytest.skip("needs root to become another user")
    command("log")
    for path in (recorded.parent, recorded):
        path.chmod(0o755 if path.is_dir() else 0o644)
    for parent in [tmp_path, *tmp_path.parents]:
        if parent.stat().st_uid == os.geteuid() and parent != Path("/"):
            parent.chmod(parent.stat().st_mode | 0o055)
    found = subprocess.run(
        ["setpriv", "--reuid=65534", "--regid=65534", "--clear-groups", sys.executable, "-m", "provenance", "log", "--json",
         "--db", str(recorded)],
        capture_output=True, text=True, check=False, env={**os.environ, "HOME": "/nonexistent"},
    )  # fmt: skip
    assert found.returncode == 0, found.stderr
    assert len(json.loads(found.stdout)) == 2
