"""What a call does that cannot be recorded: it runs and is counted, or, where that was asked for, it does not run."""

import asyncio
import gc
import logging
import shutil
import sqlite3
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest

import provenance
from provenance import recorder as recorders
from provenance.errors import NotRecorded
from provenance.journal import child, spool
from tests.conftest import ROOT, Command

ran: list[object] = []


@provenance.record
def plain(x: int) -> int:
    ran.append(x)
    return x


@provenance.record
async def later(x: int) -> int:
    ran.append(x)
    return x


@provenance.record
def pieces(x: int) -> Iterator[int]:
    ran.append(x)
    yield x


@pytest.fixture(autouse=True)
def _writer_off(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVENANCE_WRITER", "off")
    ran.clear()


def _full(*_: object) -> int:
    raise OSError(28, "No space left on device")


def test_by_default_a_call_that_cannot_be_recorded_runs_and_is_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    provenance.init()
    monkeypatch.setattr(spool, "write", _full)
    assert (plain(1), asyncio.run(later(2)), list(pieces(3))) == (1, 2, [3])
    recorder = recorders.current()
    assert recorder is not None
    assert recorder.journal.lost > 0


def test_under_raise_no_call_runs_unrecorded(monkeypatch: pytest.MonkeyPatch) -> None:
    provenance.init(on_failure="raise")
    assert plain(1) == 1
    monkeypatch.setattr(spool, "write", _full)
    for call in (lambda: plain(2), lambda: asyncio.run(later(3)), lambda: list(pieces(4))):
        with pytest.raises(NotRecorded, match="the model was not run"):
            call()
    assert ran == [1]
    monkeypatch.undo()


def test_under_raise_an_end_that_cannot_be_kept_takes_no_answer_away(monkeypatch: pytest.MonkeyPatch) -> None:
    provenance.init(on_failure="raise")

    @provenance.record
    def fills() -> int:
        monkeypatch.setattr(spool, "write", _full)
        return 5

    assert fills() == 5


def test_under_raise_a_spool_that_is_refused_stops_init_and_calls(tmp_path: Path) -> None:
    (tmp_path / "spool").write_text("mine")
    for _ in range(2):
        with pytest.raises(NotRecorded):
            provenance.init(on_failure="raise", spool=str(tmp_path / "spool"))
    with pytest.raises(NotRecorded):
        plain(1)
    assert ran == []


def test_of_500_tasks_with_a_third_cancelled_each_has_one_start_and_one_end(db: Path) -> None:
    @provenance.record
    async def task(number: int) -> int:
        await asyncio.sleep(3600 if number % 10 < 3 else 0.001)
        return number

    async def all_() -> None:
        tasks = [asyncio.create_task(task(number)) for number in range(500)]
        await asyncio.sleep(0.05)
        for number, item in enumerate(tasks):
            if number % 10 < 3:
                item.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    asyncio.run(all_())
    assert provenance.flush()
    with sqlite3.connect(db) as store:
        found = dict(store.execute("select status, count(*) from runs group by status"))
        kinds = dict(store.execute("select kind, count(*) from log_entries group by kind"))
    store.close()
    assert found == {"ok": 350, "aborted": 150}
    assert (kinds[1], kinds[2]) == (500, 500)


COMMITTED = """
import os, signal, sqlite3, sys
import provenance
@provenance.record
def f(x): return x
provenance.init(durability="database", max_block=60)
for n in range(5):
    f(n)
    with sqlite3.connect("file:" + os.environ["PROVENANCE_DB"] + "?mode=ro", uri=True) as store:
        assert store.execute("select count(*) from runs where status = 'ok'").fetchone() == (n + 1,)
print("all there", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_at_the_level_database_rows_are_there_when_the_call_returns(
    python: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PROVENANCE_WRITER", "process")
    done = python(COMMITTED)
    assert done.stdout == "all there\n", done.stderr


@pytest.mark.parametrize("kind", ["folder", "garbage"])
def test_a_database_that_cannot_be_one_is_said_once_where_it_is_recorded(
    db: Path, kind: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("PROVENANCE_WRITER", "process")
    db.parent.mkdir()
    if kind == "folder":
        db.mkdir()
    else:
        db.write_text("garbage " * 100)
    with caplog.at_level(logging.WARNING, "provenance"):
        plain(1)
        for _ in range(600):
            if caplog.records:
                break
            threading.Event().wait(0.05)
    (said,) = [record.getMessage() for record in caplog.records]
    assert "writes nothing into the database now" in said
    assert str(db) in said


def test_writers_started_at_once_do_not_meet_in_a_draft(tmp_path: Path) -> None:
    failed: list[BaseException] = []

    def leave(number: int) -> None:
        try:
            for turn in range(100):
                child._leave(tmp_path / "target", f"{number}.{turn}".encode())
        except BaseException as error:
            failed.append(error)

    threads = [threading.Thread(target=leave, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert failed == []
    assert [path.name for path in tmp_path.iterdir() if "target" in path.name] == ["target"]


def test_a_database_of_an_older_schema_does_not_end_the_program(db: Path, caplog: pytest.LogCaptureFixture) -> None:
    db.parent.mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "golden" / "store-0001.db", db)
    provenance.init()
    assert plain(1) == 1
    assert provenance.flush(2) is False
    assert provenance.flush(2) is False
    said = [record.getMessage() for record in caplog.records if "schema" in record.getMessage()]
    assert len(said) == 1
    assert "provenance db upgrade" in said[0]


def test_a_recorder_that_is_replaced_drops_no_writer_that_runs(db: Path, tmp_path: Path) -> None:
    """Python would warn of it, and a suite that turns warnings into errors would fail for us."""
    provenance.init(writer="process")
    plain(1)
    recorder = recorders.current()
    assert recorder is not None
    recorder.ensure_writer()
    assert recorder._writer is not None
    number = recorder._writer.pid
    del recorder
    provenance.init(db=tmp_path / "other.db")
    gc.collect()
    (left,) = (process for process in child._running if process.pid == number)
    for process in child._running:
        process.wait(60)
    assert left.returncode == 0
