"""A real PostgreSQL server: taken down under the writer, in the hands of roles that may little, and asked by people."""

import os
import random
import re
import shutil
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from sqlalchemy import text as sql_text

from provenance import opening, writer
from provenance.cli import store as cli
from provenance.errors import NoDatabase, StoreAway, StoreError, UsageError, WriteRefused
from provenance.facts import SequenceEnd
from provenance.journal import spool
from provenance.settings import Places
from provenance.store import database, results, tables
from tests.conftest import ROOT, Command
from tests.fakes import records as fake
from tests.fakes.postgres import PORT, Server
from tests.fakes.records import Calls, drained, is_one_sentence, one, rows, written

WRITE = """
import sys
from pathlib import Path
from provenance import writer
from tests.fakes.records import places
writer.BATCH_RECORDS, writer.RETRY_SECONDS = 10, (0.05, 0.2)
writer.run(places(Path(sys.argv[1])), idle=600)
"""
LEAVES = "select stream, seq, kind, leaf from log_entries order by idx"
TOTALS = "select count(*), count(distinct (stream, seq)) from ingested"


@pytest.fixture
def spots(tmp_path: Path, server: Server, monkeypatch: pytest.MonkeyPatch) -> Places:
    monkeypatch.setattr(fake, "fresh_url", [server.fresh])
    return fake.places(tmp_path / "store")


def life(spots: Places, count: int) -> Calls:
    calls = Calls(spots.spool)
    calls.prints()
    for n in range(count):
        calls.call(n)
    return calls


def eventually(true: Callable[[], bool], seconds: float = 60.0) -> None:
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < seconds, "it never came to be"
        time.sleep(0.01)


# -- the server goes down -----------------------------------------------------------------------------


@pytest.fixture
def fragile(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, Places]]:
    """Return a server that the test may stop, with the safety that servers have, and a store on it."""
    made = Server()
    try:
        with monkeypatch.context() as patch:
            patch.setattr(fake, "fresh_url", [made.fresh])
            spots = fake.places(tmp_path / "fragile")
        yield made, spots
    finally:
        made.remove()


@pytest.mark.parametrize("stops", [5, pytest.param(20, marks=pytest.mark.long)])
def test_a_server_stopped_at_once_while_a_writer_drains_loses_nothing_and_holds_nothing_twice(
    fragile: tuple[Server, Places], stops: int
) -> None:
    server, spots = fragile
    calls = life(spots, 400 * stops)
    total = 4 + 800 * stops
    chance, seen = random.Random(stops), []
    child = subprocess.Popen([sys.executable, "-c", WRITE, str(spots.key_file.parent)])
    try:
        for _ in range(stops):
            before = one(spots, "select count(*) from ingested")
            eventually(lambda before=before: one(spots, "select count(*) from ingested") > before)  # type: ignore[misc]
            time.sleep(chance.random() * 0.05)
            server.stop("immediate")
            time.sleep(chance.random() * 0.2)
            server.start()
            seen.append(one(spots, "select count(*) from ingested"))
        assert seen == sorted(seen)
        assert seen[-1] < total, "the writer was done before the last stop"
        eventually(lambda: one(spots, "select count(*) from ingested") == total)
        assert child.poll() is None, "the writer outlives the outages"
    finally:
        child.kill()
        child.wait()
    calls.close()
    drained(spots)
    assert rows(spots, TOTALS) == [(total, total)]
    assert rows(spots, "select count(*), count(distinct run_id) from runs where status = 'ok'") == [(400 * stops,) * 2]
    assert rows(spots, "select count(*), max(idx) from log_entries") == [(total, total - 1)]
    assert rows(spots, "select * from events") == []
    assert spool.segments(spots.spool) == []


def test_a_server_that_is_down_is_waited_for_and_readers_are_told_in_one_sentence(
    fragile: tuple[Server, Places], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    server, spots = fragile
    server.stop("immediate")
    life(spots, 5).close()
    with pytest.raises(StoreAway, match=r"cannot be opened") as caught:
        database.reading(spots.url, spots.database)
    assert is_one_sentence(str(caught.value))
    assert writer.waiting(spots) == 14
    monkeypatch.setattr(writer, "RETRY_SECONDS", (0.05,))
    thread = threading.Thread(target=writer.run, args=(spots,), kwargs={"idle": 0.2})
    thread.start()
    eventually(lambda: "the spool keeps everything" in caplog.text)
    server.start()
    thread.join(60)
    assert not thread.is_alive()
    assert rows(spots, TOTALS) == [(14, 14)]


def test_a_writer_gives_up_on_a_server_that_stays_away_and_the_spool_keeps_everything(
    fragile: tuple[Server, Places], monkeypatch: pytest.MonkeyPatch
) -> None:
    server, spots = fragile
    server.stop("immediate")
    life(spots, 1).close()
    monkeypatch.setattr(writer, "RETRY_SECONDS", (0.02,))
    monkeypatch.setattr(writer, "PATIENCE_SECONDS", 0.3)
    with pytest.raises(StoreError, match="the spool keeps everything") as caught:
        writer.run(spots, idle=5.0)
    assert is_one_sentence(str(caught.value))
    assert writer.waiting(spots) == 6
    server.start()
    assert rows(drained(spots), TOTALS) == [(6, 6)]


class Between(threading.Thread):
    """A wire to the server that is cut behind a COMMIT, before its answer comes: for a number of commits."""

    def __init__(self, folder: Path, target: Path, cuts: int) -> None:
        super().__init__(daemon=True)
        self.cuts, self.target = cuts, str(target / f".s.PGSQL.{PORT}")
        self.listener = socket.socket(socket.AF_UNIX)
        self.listener.bind(str(folder / f".s.PGSQL.{PORT}"))
        self.listener.listen(5)
        self.start()

    def run(self) -> None:
        while True:
            try:
                client, _ = self.listener.accept()
            except OSError:
                return
            with client, socket.socket(socket.AF_UNIX) as real:
                real.connect(self.target)
                back = threading.Thread(target=self.carry, args=(real, client), daemon=True)
                back.start()
                self.forth(client, real)
                for end in (real, client):
                    end.shutdown(socket.SHUT_RDWR) if end.fileno() >= 0 else None
                back.join(5)

    def forth(self, client: socket.socket, real: socket.socket) -> None:
        while data := client.recv(1 << 16):
            last = b"COMMIT" in data and self.cuts > 0
            if last:
                self.cuts -= 1
                client.shutdown(socket.SHUT_RDWR)  # before the answer can come
            real.sendall(data)
            if last:
                time.sleep(0.05)
                return

    @staticmethod
    def carry(real: socket.socket, client: socket.socket) -> None:
        try:
            while data := real.recv(1 << 16):
                client.sendall(data)
        except OSError:
            return


def test_a_commit_whose_answer_never_came_is_neither_lost_nor_repeated(
    spots: Places, server: Server, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    life(spots, 100).close()
    folder = Path(os.path.realpath(server.folder)).with_name(server.folder.name + "-wire")
    folder.mkdir()
    wire = Between(folder, server.folder, cuts=7)
    through = Places(spots.url.replace(str(server.folder), str(folder)), None, spots.spool, spots.key_file)
    monkeypatch.setattr(writer, "RETRY_SECONDS", (0.02,))
    monkeypatch.setattr(writer, "BATCH_RECORDS", 20)
    assert writer.run(through, idle=0.2)
    wire.listener.close()
    (folder / f".s.PGSQL.{PORT}").unlink()
    folder.rmdir()
    assert wire.cuts == 0
    assert "the store failed" in caplog.text
    assert rows(spots, TOTALS) == [(204, 204)]
    assert rows(spots, "select count(*), max(idx) from log_entries") == [(204, 203)]
    assert rows(spots, "select * from events") == []
    assert spool.segments(spots.spool) == []


# -- the same store -----------------------------------------------------------------------------------


def test_writers_of_two_hosts_at_once_store_each_body_once_and_leave_no_hole_in_the_log(
    spots: Places, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(writer, "BATCH_RECORDS", 7)
    hosts = [spots, Places(spots.url, None, tmp_path / "other.spool", spots.key_file)]
    for host in hosts:
        calls = Calls(host.spool)
        calls.prints()
        root = calls.weights()
        for n in range(100):
            prompt, answer = fake.text("prompt.text", f"prompt {n} " * 20), fake.ids("output.ids", [n])
            calls.call(n, {"payloads": (prompt, fake.ids("prompt.ids", [n]))}, weights=root, payloads=(answer,))
        calls.close()
    drained(Places(spots.url, None, tmp_path / "nothing", spots.key_file))
    together = [threading.Thread(target=writer.drain, args=(host, 120)) for host in hosts]
    for thread in together:
        thread.start()
    for thread in together:
        thread.join()
    assert [writer.waiting(host) for host in hosts] == [0, 0]
    assert rows(spots, "select count(*), count(distinct run_id) from runs where status = 'ok'") == [(200, 100)]
    assert rows(spots, "select count(*), count(distinct key) from payloads where size > 64") == [(100, 100)]
    assert rows(spots, "select count(*), max(idx) + 1 from log_entries") == rows(
        spots, "select count(*), count(*) from ingested"
    )
    assert rows(spots, "select runs, outputs, count(*) from equal_inputs group by runs, outputs") == [(2, 1, 100)]
    assert rows(spots, "select * from events") == []


def test_both_databases_hold_the_same_leaves_of_one_spool(spots: Places, tmp_path: Path) -> None:
    calls = life(spots, 30)
    root = calls.weights()
    first = calls.call(40, {"payloads": (fake.text("prompt.text", "a\0b"),)})
    calls.binding(first, first)
    calls.call(41, {"facts": {"runtime": "r" * 50, "kind": "k" * 20}}, weights=root)
    calls.close()
    other = Places(f"sqlite:///{tmp_path}/p.db", tmp_path / "p.db", tmp_path / "p.db.spool", spots.key_file)
    shutil.copytree(spots.spool, other.spool)
    found = rows(drained(spots), LEAVES)
    assert rows(drained(other), LEAVES) == found
    assert len(found) == 4 + 60 + 1 + 2 + 1 + 2
    assert rows(spots, "select * from events") == []
    for table in ("runs", "sequences", "payload_refs", "payloads", "equal_inputs", "equal_outputs"):
        asked = f"select * from {table} order by 1, 2, 3, 4"
        assert rows(spots, asked) == rows(other, asked), table


def test_a_server_without_a_table_gets_the_schema_of_the_code(server: Server) -> None:
    engine = database.writing(server.empty(), None)
    database.check(engine, "the server", writer=True)
    assert database.schema(engine, "the server") == database.HEAD
    from alembic.autogenerate import compare_metadata
    from alembic.migration import MigrationContext

    with engine.connect() as connection:
        parts = re.compile(r"_(\d{6}|rest)$")  # of tables that are parted by month
        whole = {"include_name": lambda name, kind, _: kind != "table" or parts.search(name) is None}
        found = compare_metadata(MigrationContext.configure(connection, opts=whole), tables.metadata)
    engine.dispose()
    assert [item for item in found if "alembic_version" not in repr(item)] == []


def test_minus_zero_infinity_and_text_with_nul_read_back(spots: Places) -> None:
    calls = Calls(spots.spool)
    calls.prints()
    ends = (SequenceEnd(0, 0, 1, 1, 0, 1, -0.0, 0), SequenceEnd(0, 1, 1, 1, 0, 1, float("inf"), 0))
    calls.call(1, {"facts": {"name": "n\0", "tags": {"k\0": "v\0"}, "x.y": -0.0}}, sequences=ends)
    calls.close()
    found = rows(drained(spots), "select min_margin from sequences order by return_index")
    assert [str(value) for (value,) in found] == ["-0.0", "inf"]
    assert rows(spots, "select name from runs") == [("n\u2400",)]
    assert '"x.y":-0.0' in one(spots, "select call_facts from runs")


# -- who may do what ----------------------------------------------------------------------------------


ROLES = ("provenance_writer", "provenance_reader", "provenance_cache")


@pytest.fixture
def roles(spots: Places, server: Server) -> Iterator[dict[str, str]]:
    """Return the URLs of the roles of docs/postgres.md, with passwords."""
    name = spots.url.split("/")[3].split("?")[0]
    page = (ROOT / "docs" / "postgres.md").read_text()
    (block,) = re.findall(r"```sql\n(.*?)```", page, re.DOTALL)
    for role in ROLES:
        server.execute(f"create role {role} login password 'p4ss-{role}'")
    for statement in filter(str.strip, block.split(";")):
        server.execute(statement, name)
    yield {role: server.url(name, role, f"p4ss-{role}") for role in ROLES}
    for role in ROLES:
        server.execute(f"drop owned by {role}", name)
        server.execute(f"drop role {role}")


def as_role(spots: Places, url: str) -> Places:
    return Places(url, None, spots.spool, spots.key_file)


def test_a_writer_needs_no_more_than_its_role_and_a_reader_only_reads(spots: Places, roles: dict[str, str]) -> None:
    calls = Calls(spots.spool)
    seq = calls.start(1)  # its fingerprints come later
    drained(as_role(spots, roles["provenance_writer"]))
    calls.prints()
    calls.end(1, seq)
    root = calls.weights()
    bound = calls.call(2)
    calls.call(3, weights=root)
    calls.binding(bound, bound)
    calls.note("gap", fake.NOTHING, b'{"first":900,"last":901,"reason":"full"}')
    calls.close()
    assert drained(as_role(spots, roles["provenance_writer"]))
    assert rows(spots, "select count(*) from runs where status = 'ok'") == [(3,)]
    assert rows(spots, "select kind from events") == [("gap",)]
    assert rows(spots, "select sum(runs) from equal_inputs")[0][0] == 2
    reader = database.reading(roles["provenance_reader"], None)
    assert cli.query(reader, "select count(*) from run_overview", 5)[1] == [(3,)]


@pytest.mark.parametrize("role", ROLES)
@pytest.mark.parametrize(
    "statement",
    ["delete from runs", "delete from payloads", "update payloads set data = ''", "update log_entries set leaf = ''",
     "update payload_refs set salt = null", "update ingested set idx = 0", "update fingerprints set digest = ''",
     "truncate events", "drop table runs", "create table more(a int)", "alter table runs add column a int",
     "update alembic_version set version_num = '9'", "delete from streams"],
)  # fmt: skip
def test_no_role_can_delete_or_alter_evidence(roles: dict[str, str], role: str, statement: str) -> None:
    engine = database.writing(roles[role], None)
    with pytest.raises(Exception, match=r"permission denied|must be owner|read-only"), engine.begin() as connection:
        connection.execute(sql_text(statement))
    engine.dispose()


def test_first_results_need_a_role_of_their_own_and_go_by_age_and_size(roles: dict[str, str]) -> None:
    shelf = results.Shelf(roles["provenance_cache"], None)
    keys = [bytes([n]) * 32 for n in range(4)]
    data = [random.Random(n).randbytes(4000) for n in range(4)]
    for n in range(3):
        first = results.First(data[n], f"run-{n}", n + 1)
        assert shelf.put(keys[n], first, most=1 << 20) == first
        assert shelf.put(keys[n], results.First(b"later", "other", n + 9), most=1 << 20) == first, (
            "the first one stands"
        )
    shelf.put(keys[3], results.First(data[3], "run-3", 9), most=9000)
    found = [shelf.get(key) for key in keys]
    assert [item and item.data for item in found] == [None, None, *data[2:]], "the oldest go"
    assert shelf.get(keys[2], oldest=5) is None
    shelf.forget()
    barred = results.Shelf(roles["provenance_writer"], None)
    with pytest.raises(Exception, match="permission denied"):
        barred.put(keys[0], results.First(b"x", "run", 1), most=1 << 20)
    barred.forget()


def test_a_writer_without_rights_holds_everything_back_and_refuses_no_record(
    spots: Places, roles: dict[str, str]
) -> None:
    life(spots, 2).close()
    with pytest.raises(Exception, match=r"permission denied|read-only"):
        writer.drain(as_role(spots, roles["provenance_reader"]), 5)
    assert writer.waiting(spots) == 8
    assert len(spool.segments(spots.spool)) == 1
    assert rows(drained(spots), "select * from events") == []


@pytest.fixture
def locked(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Server, Places, str]]:
    """Return a server that asks for a password, a store on it, and the URL with the password."""
    made = Server("fsync=off", "password_encryption=scram-sha-256")
    try:
        with monkeypatch.context() as patch:
            patch.setattr(fake, "fresh_url", [made.fresh])
            spots = fake.places(tmp_path / "locked")
        made.execute("create role app login superuser password 's3cret-of-app'")
        rules = made.data / "pg_hba.conf"
        rules.write_text("local all owner trust\nlocal all all scram-sha-256\n")
        made.execute("select pg_reload_conf()")
        time.sleep(0.2)
        url = spots.url.replace("owner@", "app:s3cret-of-app@")
        yield made, spots, url
    finally:
        made.remove()


def test_the_password_reaches_the_writer_and_no_file(locked: tuple[Server, Places, str]) -> None:
    _, spots, url = locked
    life(spots, 5).close()
    child = opening.launch_writer(as_role(spots, url))
    try:
        eventually(lambda: one(spots, "select count(*) from ingested") == 14)
        assert "s3cret" not in Path(f"/proc/{child.pid}/cmdline").read_text()
    finally:
        child.send_signal(signal.SIGTERM)
        child.wait()
    for path in spots.spool.iterdir():
        assert b"s3cret" not in path.read_bytes(), path


def test_a_wrong_password_is_said_in_one_sentence_and_ends_the_writer(
    locked: tuple[Server, Places, str], command: Command
) -> None:
    _, spots, url = locked
    life(spots, 1).close()
    wrong = as_role(spots, url.replace("s3cret", "wr0ng"))
    child = opening.launch_writer(wrong)
    assert child.wait(60) == 2
    said = (spots.spool / "writer.log").read_text()
    assert "password authentication failed" in said
    assert "wr0ng" not in said
    with pytest.raises(NoDatabase) as caught:
        database.reading(wrong.url, None)
    assert not isinstance(caught.value, StoreAway)
    assert "wr0ng" not in str(caught.value)
    done = command("log", "--db", wrong.url)
    assert done.returncode == 2
    assert "wr0ng" not in done.stderr
    assert len(done.stderr.splitlines()) == 1


# -- asked by people ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "statement",
    ["insert into store_info values('a', 'b')", "delete from runs", "drop table runs", "create table more(a int)",
     "select 1; delete from runs", "commit; delete from runs", "set transaction read write", "begin read write",
     "copy runs to '/tmp/x'", "copy runs to program 'true'", "with gone as (delete from runs returning 1) select * from gone",
     "select * into more from runs", "do $$ begin delete from runs; end $$", "vacuum", "call x()", "rollback; drop table runs",
     "select set_config('transaction_read_only', 'off', false), count(*) from runs; drop table runs",
     "", ";"],
)  # fmt: skip
def test_sql_only_reads(spots: Places, statement: str) -> None:
    life(spots, 2).close()
    drained(spots)
    before = fake.everything(spots), fake.schema_of(spots)
    with pytest.raises(UsageError) as caught:
        cli.query(database.reading(spots.url, None), statement, 10)
    assert is_one_sentence(str(caught.value))
    assert (fake.everything(spots), fake.schema_of(spots)) == before


@pytest.mark.parametrize(
    ("statement", "kind", "said"),
    [("selec", UsageError, r"the statement does not run: syntax error at or near \"selec\"\."),
     ("select * frm runs", UsageError, r"the statement does not run: syntax error at or near \"frm\"\."),
     ("explain select 1", UsageError, "the statement does not run: syntax error"),
     ("-- all of them\n delete from runs", WriteRefused, "would change it"),
     ("-- nothing", UsageError, "there is no statement to ask"), ("", UsageError, "there is no statement to ask")],
)  # fmt: skip
def test_a_slip_of_the_pen_is_not_called_a_write(
    spots: Places, statement: str, kind: type[UsageError], said: str
) -> None:
    life(spots, 1).close()
    with pytest.raises(UsageError, match=said) as caught:
        cli.query(database.reading(drained(spots).url, None), statement, 10)
    assert type(caught.value) is kind


def test_what_a_function_writes_is_rolled_back(spots: Places) -> None:
    engine = database.reading(spots.url, None)
    cli.query(engine, "select lo_create(0)", 1)
    assert rows(spots, "select count(*) from pg_largeobject_metadata") == [(0,)]


def test_sql_reads_what_people_ask(spots: Places) -> None:
    life(spots, 3).close()
    engine = database.reading(drained(spots).url, None)
    heads, found, more = cli.query(engine, "select run_id, status from run_overview order by run_id", 2)
    assert (heads, more) == (["run_id", "status"], True)
    assert found == [(fake.run_id(0), "ok"), (fake.run_id(1), "ok")]
    assert cli.query(engine, "with a as (select 1 as n) select n from a", 5)[1] == [(1,)]
    with pytest.raises(UsageError, match="does not run"):
        cli.query(engine, "select nothing from nowhere", 5)
    with pytest.raises(WriteRefused):
        cli.query(engine, "with gone as (delete from runs returning 1) select * from gone", 5)


def test_a_statement_that_takes_too_long_is_ended(spots: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(database, "STATEMENT_MS", 1000)
    engine = database.reading(spots.url, None)
    with pytest.raises(UsageError, match="took longer than 1 s"):
        cli.query(engine, "select pg_sleep(60)", 5)


# -- whose trouble it is ------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("statement", "stores"),
    [("select * from nowhere", True), ("select pg_terminate_backend(pg_backend_pid())", True),
     ("insert into store_info values(repeat('x', 50), '')", False), ("insert into store_info values('key_id', '')", False),
     ("insert into store_info values('x', null)", False), ("select 1/0", False)],
)  # fmt: skip
def test_the_stores_trouble_is_told_from_that_of_a_record(spots: Places, statement: str, stores: bool) -> None:
    life(spots, 1).close()
    drained(spots)
    engine = database.writing(spots.url, None)
    with pytest.raises(Exception) as caught, engine.begin() as connection:
        connection.exec_driver_sql(statement)
    assert database.failed(engine, caught.value) is stores
    engine.dispose()


def test_text_that_is_too_long_for_its_column_is_cut_or_refused_alone(spots: Places) -> None:
    calls = life(spots, 1)
    calls.call(7, {"facts": {"runtime": "a runtime with quite a long name indeed, too long"}})
    calls.close()
    assert rows(drained(spots), "select runtime from runs order by id") == [
        ("fake",), ("a runtime with quite a long name",)
    ]  # fmt: skip
    assert rows(spots, "select * from events") == []
    with written(spots) as connection:
        connection.exec_driver_sql("select 1")
