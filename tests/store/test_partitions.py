"""The tables of a server are parted by month: rows find their part, old months go at once, and an older store is kept."""

import sqlite3
import time
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import psycopg
import pytest
from alembic import command as migrations
from alembic.config import Config

from provenance import writer
from provenance.settings import Places
from provenance.store import database, tables
from tests.conftest import ROOT, Command
from tests.fakes import records as fake
from tests.fakes.postgres import Server
from tests.fakes.records import Calls, drained, one, rows

GROWING = ("runs", "sequences", "payload_refs", "payloads")
HOLDS = "select tableoid::regclass::text, count(*) from {} group by 1 order by 1"


@pytest.fixture
def spots(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> Places:
    monkeypatch.setattr(fake, "fresh_url", [server.fresh])
    return fake.places(tmp_path / "store")


@pytest.fixture
def owner(spots: Places) -> Iterator[psycopg.Connection[Any]]:
    with psycopg.connect(spots.url, autocommit=True) as connection:
        yield connection


def month(ahead: int) -> datetime:
    """Return the beginning of a month, so many after this one."""
    now = datetime.now(UTC)
    number = now.year * 12 + now.month - 1 + ahead
    return datetime(number // 12, number % 12 + 1, 1, tzinfo=UTC)


def stamp(ahead: int) -> str:
    return f"{month(ahead):%Y%m}"


def a_call(calls: Calls, number: int, at: datetime) -> None:
    """Record a call that began at a time, with a text and ids that only it has."""
    began = int(at.timestamp()) * 10**9
    payloads = (fake.text("prompt.text", f"prompt {number} " * 20), fake.ids("prompt.ids", [number]))
    calls.call(number, {"wall_ns": began, "payloads": payloads, "facts": {"tags": {"n": str(number)}}})


def past_month(owner: psycopg.Connection[Any], back: int) -> None:
    """Make the parts of a month that is over, as a store that has been here for long has them."""
    low, high = (int(month(number).timestamp()) * 10**9 for number in (-back, 1 - back))
    number = month(-back).year * 12 + month(-back).month - 1
    for table in GROWING:
        ends = (number, number + 1) if table == "payloads" else (low, high)
        owner.execute(
            f"create table {table}_{stamp(-back)} partition of {table} for values from ({ends[0]}) to ({ends[1]})".encode()
        )


def test_a_fresh_store_has_parts_for_this_month_and_the_next_two(spots: Places, owner: psycopg.Connection[Any]) -> None:
    found = owner.execute("select inhrelid::regclass::text from pg_inherits i join pg_class c on c.oid = i.inhparent "
                          "where c.relkind = 'p' order by 1").fetchall()  # fmt: skip
    ends = ["rest", *(stamp(ahead) for ahead in range(3))]
    assert sorted(name for (name,) in found) == sorted(f"{table}_{end}" for table in GROWING for end in ends)
    assert owner.execute("select provenance_roll()").fetchone() == (0,)
    assert owner.execute("select provenance_roll(4)").fetchone() == (2 * len(GROWING),)


def test_rows_lie_in_the_part_of_their_month_and_those_without_one_in_the_rest(spots: Places) -> None:
    calls = Calls(spots.spool)
    calls.prints()
    for number, at in enumerate([month(0), month(1), month(1) - timedelta(seconds=1), month(-7), month(40)], 1):
        a_call(calls, number, at)
    calls.close()
    drained(spots)
    expected = {stamp(0): 2, stamp(1): 1, "rest": 2}
    for table, each in (("runs", 1), ("sequences", 1)):
        assert dict(rows(spots, HOLDS.format(table))) == {f"{table}_{end}": n * each for end, n in expected.items()}
    for table in ("payload_refs", "payloads"):
        assert {name for name, _ in rows(spots, HOLDS.format(table))} == {f"{table}_{end}" for end in expected}
    # A body lies in the month of the runs that refer to it, or it would go before them.
    assert rows(spots, "select r.tableoid::regclass::text, p.tableoid::regclass::text from payload_refs r "
                       "left join payloads p on p.id = r.body where r.body is not null and "
                       "right(r.tableoid::regclass::text, 6) <> right(p.tableoid::regclass::text, 6)") == []  # fmt: skip


def test_a_question_about_a_time_reads_its_months_alone(spots: Places, owner: psycopg.Connection[Any]) -> None:
    since = int(month(0).timestamp()) * 10**9
    plan = owner.execute("explain select * from runs where started_at >= %s and started_at < %s".replace("%s", str(since))
                         .replace(f"< {since}", f"< {since + 10**9}").encode()).fetchall()  # fmt: skip
    text = "\n".join(line for (line,) in plan)
    assert f"runs_{stamp(0)}" in text
    assert f"runs_{stamp(1)}" not in text


def test_the_writer_has_the_coming_months_made_once_a_day(
    spots: Places, owner: psycopg.Connection[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for table in GROWING:
        owner.execute(f"drop table {table}_{stamp(2)}".encode())
    calls = Calls(spots.spool)
    calls.prints()
    a_call(calls, 1, month(0))
    calls.close()
    drained(spots)
    assert owner.execute("select count(*) from pg_class where relname like %s", (f"%{stamp(2)}",)).fetchone() == (4,)


def test_a_month_of_which_the_rest_holds_rows_stays_there_and_the_others_are_made(
    spots: Places, owner: psycopg.Connection[Any]
) -> None:
    calls = Calls(spots.spool)
    calls.prints()
    a_call(calls, 1, month(3))
    calls.close()
    drained(spots)
    assert owner.execute("select provenance_roll(4)").fetchone() == (len(GROWING),)
    assert rows(spots, HOLDS.format("runs")) == [("runs_rest", 1)]
    assert one(spots, "select run_id from runs") == fake.run_id(1)


def test_who_reads_for_long_is_not_waited_for(spots: Places, owner: psycopg.Connection[Any]) -> None:
    with psycopg.connect(spots.url) as reader:
        reader.execute("select count(*) from runs")  # holds its lock until the transaction ends
        began = time.monotonic()
        owner.execute("select provenance_roll(3)")
        assert time.monotonic() - began < 30  # four waits of two seconds, and not for ever
    owner.execute("select provenance_roll(3)")
    assert owner.execute("select count(*) from pg_class where relname = %s", (f"runs_{stamp(3)}",)).fetchone() == (1,)


def test_old_months_go_at_once_and_it_is_written_down(
    spots: Places, owner: psycopg.Connection[Any], server: Server, command: Command
) -> None:
    for back in (3, 2):
        past_month(owner, back)
    calls = Calls(spots.spool)
    calls.prints()
    for number, at in enumerate([month(-3), month(-3) + timedelta(days=3), month(-2), month(0)], 1):
        a_call(calls, number, at)
    calls.close()
    drained(spots)
    leaves = rows(spots, "select count(*) from log_entries")
    before = month(-1) - timedelta(days=1)
    gone = owner.execute("select provenance_expire(%s)", (before.date(),)).fetchall()
    assert sorted(name for (name,) in gone) == sorted(f"{table}_{stamp(-3)}" for table in GROWING)
    assert [row for (row,) in rows(spots, "select run_id from runs order by id")] == [fake.run_id(3), fake.run_id(4)]
    assert rows(spots, "select key, value from run_tags order by value") == [("n", "3"), ("n", "4")]
    assert rows(spots, "select kind, detail::json ->> 'runs', detail::json ->> 'by' from events") == [
        ("expired", "2", "owner")
    ]
    assert rows(spots, "select count(*) from log_entries") == leaves
    assert owner.execute("select provenance_expire(%s)", (before.date(),)).fetchall() == []
    listed = command("log", "--json", env={"PROVENANCE_DB": spots.url})
    assert listed.returncode == 0, listed.stderr
    # The next run goes on in number and place.
    calls = Calls(spots.spool, bytes(31) + b"\1")
    calls.prints()
    a_call(calls, 5, month(0))
    calls.close()
    drained(spots)
    assert one(spots, "select max(id) from runs") == 5


def test_the_month_of_the_newest_run_stays_whatever_is_asked(spots: Places, owner: psycopg.Connection[Any]) -> None:
    past_month(owner, 2)
    calls = Calls(spots.spool)
    calls.prints()
    a_call(calls, 1, month(-2))
    calls.close()
    drained(spots)
    gone = owner.execute("select provenance_expire(%s)", (month(0).date(),)).fetchall()
    assert gone == []
    assert one(spots, "select count(*) from runs") == 1


def test_no_writer_may_expire_anything(spots: Places, server: Server) -> None:
    server.execute("create role plain login")
    try:
        with psycopg.connect(spots.url.replace("owner@", "plain@"), autocommit=True) as connection:
            for call in ("provenance_expire('2020-01-01')", "provenance_roll()"):
                with pytest.raises(psycopg.errors.InsufficientPrivilege):
                    connection.execute(f"select {call}".encode())
    finally:
        server.execute("drop role plain")


def test_a_store_of_the_first_schema_that_holds_runs_is_parted_without_a_change(
    server: Server, tmp_path: Path, command: Command
) -> None:
    url = server.empty()
    engine = database.writing(url, None)
    _to(engine, "0001")
    golden = sqlite3.connect(ROOT / "tests" / "golden" / "store-0001.db")
    with engine.begin() as connection:
        for table in tables.metadata.sorted_tables:
            names = [column.name for column in table.columns if column.name in _columns(golden, table.name)]
            held = names and golden.execute(f"select {','.join(names)} from {table.name}").fetchall()
            if held:
                connection.execute(table.insert(), [dict(zip(names, row, strict=True)) for row in held])
    there = {name: ",".join(sorted(_columns(golden, name))) for name in tables.metadata.tables}
    there = {name: columns for name, columns in there.items() if columns}  # later tables, and columns, are new
    before = {name: _content(engine, name, columns) for name, columns in there.items()}
    views = {name: _content(engine, name) for name in ("run_overview", "run_fields", "diverged_inputs")}
    assert len(before["runs"]) > 0
    database.upgrade(engine)
    assert database.schema(engine, "the server") == database.HEAD
    after = {name: _content(engine, name, columns) for name, columns in there.items()}
    assert set(after.pop("codecs")) >= set(before.pop("codecs"))  # later ones were added
    assert after == before
    assert {name: _content(engine, name) for name in views} == views
    with psycopg.connect(url, autocommit=True) as connection:
        assert connection.execute("select distinct tableoid::regclass::text from runs").fetchall() == [("runs_first",)]
    engine.dispose()
    # It is read and written on with the key that it was made with.
    key = tmp_path / "key"
    key.write_bytes(fake.KEY)
    key.chmod(0o600)
    spots = Places(url, None, tmp_path / "spool", key)
    calls = Calls(spots.spool, bytes(31) + b"\2")
    calls.prints()
    a_call(calls, 900, month(0))
    calls.close()
    assert writer.run(spots, idle=0.2)
    assert one(spots, "select count(*) from runs") == len(before["runs"]) + 1
    assert rows(spots, "select kind from events where kind = 'alarm'") == []
    said = command("log", "--json", env={"PROVENANCE_DB": url})
    assert (said.returncode, said.stderr) == (0, "")


def _to(engine: Any, revision: str) -> None:
    config = Config()
    config.set_main_option("script_location", str(database.scripts()))
    config.set_main_option("path_separator", "os")
    with engine.begin() as connection:
        config.attributes["connection"] = connection
        migrations.upgrade(config, revision)


def _columns(connection: sqlite3.Connection, table: str) -> set[str]:
    return {row[1] for row in connection.execute(f"pragma table_info({table})")}


def _content(engine: Any, name: str, columns: str = "*") -> list[str]:
    with engine.connect() as connection:
        return sorted(repr(tuple(row)) for row in connection.exec_driver_sql(f"select {columns} from {name}"))
