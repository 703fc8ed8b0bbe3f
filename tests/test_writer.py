"""The writer, in processes of its own: one is elected, the dead are replaced, and a crash anywhere repeats nothing."""

import fcntl
import os
import random
import shutil
import signal
import sqlite3
import stat
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from provenance import opening, writer
from provenance.errors import SpoolRefused
from provenance.journal import room, spool
from provenance.settings import Places, Settings, load, places
from tests.conftest import Command
from tests.fakes import records as fake
from tests.fakes.records import Calls, drained, is_one_sentence, one, rows

RECORD = """
import provenance
@provenance.record
def double(x): return 2 * x
provenance.init(writer="process")
for n in range(50): double(n)
"""
WRITE = """
import sys
from pathlib import Path
from provenance import writer
from tests.fakes.records import places
folder, idle, wait, told = Path(sys.argv[1]), float(sys.argv[2]), sys.argv[3] == "wait", sys.argv[4] == "told"
writer.BATCH_RECORDS = 10
spots = places(folder)
print("ready", flush=True)
if told: sys.stdin.readline()
print(writer.run(spots, idle=idle, wait=wait), flush=True)
"""


@pytest.fixture
def spots(tmp_path: Path) -> Places:
    return fake.places(tmp_path / "store")


@pytest.fixture
def spawn(spots: Places) -> Iterator[Callable[..., "subprocess.Popen[str]"]]:
    """Start a writer of the store in a process of its own, ready to go."""
    started: list[subprocess.Popen[str]] = []

    def go(idle: float = 60.0, wait: str = "", told: str = "") -> "subprocess.Popen[str]":
        assert spots.database is not None
        command = [sys.executable, "-c", WRITE, str(spots.database.parent), str(idle), wait, told]
        child = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
        started.append(child)
        assert child.stdout is not None
        assert child.stdout.readline() == "ready\n"
        return child

    yield go
    for child in started:
        child.kill()
        child.communicate()


def eventually(true: Callable[[], bool], seconds: float = 20.0) -> float:
    """Wait until something is so; return how long it took."""
    began = time.monotonic()
    while not true():
        assert time.monotonic() - began < seconds, "it never came to be"
        time.sleep(0.02)
    return time.monotonic() - began


def lock_is_free(folder: Path) -> bool:
    with room.elected(folder) as mine:
        return mine


def count(spots: Places) -> int:
    return int(one(spots, "select count(*) from ingested"))


# -- the child of a recorder --------------------------------------------------------------------------


def test_a_recorders_child_drains_what_was_recorded_and_ends_when_idle(python: Command, db: Path) -> None:
    done = python(RECORD)
    assert done.returncode == 0, done.stderr
    where = places(load({}))
    assert where.database == db
    took = eventually(lambda: spool.segments(where.spool) == [] and lock_is_free(where.spool), 30)
    assert took < 5 + 15
    assert rows(where, "select count(*), count(distinct run_id) from runs where status = 'ok'") == [(50, 50)]
    assert rows(where, "select ended from streams") == [(1,)]
    assert {stat.S_IMODE(path.stat().st_mode) for path in where.spool.iterdir()} == {0o600}
    assert (where.spool / "writer.log").read_text() == ""


def test_a_child_has_its_own_session_and_nothing_of_its_parents(spots: Places, tmp_path: Path) -> None:
    room.prepare(spots.spool)
    secret = (tmp_path / "open-in-the-parent").open("w")
    os.set_inheritable(secret.fileno(), True)
    child = opening.launch_writer(spots)
    try:
        eventually(lambda: not lock_is_free(spots.spool))
        assert os.getsid(child.pid) == child.pid
        command = Path(f"/proc/{child.pid}/cmdline").read_bytes().decode()
        assert spots.url not in command
        held = {os.readlink(path) for path in Path(f"/proc/{child.pid}/fd").iterdir() if path.is_symlink()}
        assert secret.name not in held
        assert {"/dev/null", str(spots.spool / "writer.log")} <= held
        assert os.readlink(f"/proc/{child.pid}/cwd") == "/"
    finally:
        secret.close()
        child.kill()
        child.wait()


def test_a_child_that_cannot_go_on_says_why_in_one_line_and_ends(spots: Places) -> None:
    calls = Calls(spots.spool)
    calls.call(1)
    drained(spots)
    spots.key_file.write_bytes(bytes(32))
    child = opening.launch_writer(spots)
    assert child.wait(30) == 2
    said = (spots.spool / "writer.log").read_text()
    assert "PROVENANCE_KEY_FILE" in said
    assert len(said.splitlines()) == 1
    calls.close()


# -- kills --------------------------------------------------------------------------------------------


def test_a_writer_killed_ten_times_loses_nothing_and_repeats_nothing(
    spots: Places, spawn: Callable[..., "subprocess.Popen[str]"], tmp_path: Path
) -> None:
    first = Calls(spots.spool)
    first.prints()
    first.close()
    drained(spots)  # so that no kill is spent on making the schema
    for life in range(4):
        calls = Calls(spots.spool)
        for n in range(400):
            calls.call(life << 16 | n)
        calls.close()
    clean = fake.places(tmp_path / "clean")
    shutil.copytree(spots.spool, clean.spool, ignore=shutil.ignore_patterns("writer.lock"))
    chance, seen, total = random.Random(11), [], 4 + 4 * 800
    for _ in range(10):
        child = spawn()
        before = count(spots)
        eventually(lambda before=before: before == total or count(spots) > before)  # type: ignore[misc]
        time.sleep(chance.random() * 0.06)
        child.send_signal(signal.SIGKILL)
        child.wait()
        seen.append(count(spots))
    assert seen == sorted(seen)
    assert len({number for number in seen if number < total}) >= 3, seen
    drained(spots)
    drained(clean)
    assert count(spots) == total
    assert rows(spots, "select count(*), count(distinct run_id) from runs where status = 'ok'") == [(1600, 1600)]
    assert rows(spots, "select count(*), max(idx) from log_entries") == [(total, total - 1)]
    assert {leaf for (leaf,) in rows(clean, "select leaf from log_entries")} <= {
        leaf for (leaf,) in rows(spots, "select leaf from log_entries")
    }
    assert rows(spots, "select * from events") == []
    assert one(spots, "pragma integrity_check") == "ok"
    assert spool.segments(spots.spool) == []


def test_another_takes_over_from_a_killed_writer_within_two_seconds(
    spots: Places, spawn: Callable[..., "subprocess.Popen[str]"]
) -> None:
    calls = Calls(spots.spool)
    calls.prints()
    child = spawn()
    eventually(lambda: spots.database is not None and spots.database.exists() and not lock_is_free(spots.spool))
    heir = spawn(wait="wait")
    time.sleep(0.3)
    assert heir.poll() is None
    eventually(lambda: count(spots) == 4)
    calls.call(1)
    eventually(lambda: count(spots) == 6)
    child.kill()
    child.wait()
    calls.call(2)
    assert eventually(lambda: count(spots) == 8) < 2
    calls.close()


# -- election -----------------------------------------------------------------------------------------


def test_of_two_writers_one_is_elected(spots: Places, spawn: Callable[..., "subprocess.Popen[str]"]) -> None:
    Calls(spots.spool).close()
    both = [spawn(600.0, told="told") for _ in range(2)]  # each is ready before either is told
    for child in both:
        assert child.stdin is not None
        child.stdin.write("go\n")
        child.stdin.flush()
    eventually(lambda: any(child.poll() is not None for child in both), 120)
    (loser,) = (child for child in both if child.poll() is not None)
    (winner,) = (child for child in both if child is not loser)
    assert loser.communicate()[0] == "False\n"
    assert winner.poll() is None
    assert not lock_is_free(spots.spool)
    winner.kill()
    winner.wait()
    assert lock_is_free(spots.spool)


def test_the_elected_one_keeps_its_place_until_it_lets_go(spots: Places) -> None:
    room.prepare(spots.spool)
    with room.elected(spots.spool) as first:
        assert first
        with room.elected(spots.spool) as second:
            assert not second
        assert writer.run(spots) is False
    assert lock_is_free(spots.spool)
    assert stat.S_IMODE((spots.spool / "writer.lock").stat().st_mode) == 0o600


def test_nobody_is_elected_where_there_is_no_spool_or_the_lock_is_a_link(spots: Places, tmp_path: Path) -> None:
    assert not lock_is_free(spots.spool)
    room.prepare(spots.spool)
    (tmp_path / "victim").write_text("theirs")
    (spots.spool / "writer.lock").symlink_to(tmp_path / "victim")
    assert not lock_is_free(spots.spool)


# -- readers ------------------------------------------------------------------------------------------


def test_a_reader_drains_where_no_writer_runs(spots: Places) -> None:
    calls = Calls(spots.spool)
    calls.prints()
    calls.call(1)
    assert writer.waiting(spots) == 6
    assert writer.drain(spots, 10) is True
    assert writer.waiting(spots) == 0
    assert count(spots) == 6
    assert spool.alive(calls.journal.path)
    calls.close()


def test_a_reader_waits_no_longer_than_it_was_told(spots: Places) -> None:
    calls = Calls(spots.spool)
    calls.prints()
    calls.close()
    descriptor = os.open(spots.spool / "writer.lock", os.O_RDWR | os.O_CREAT, 0o600)
    fcntl.flock(descriptor, fcntl.LOCK_EX)
    began = time.monotonic()
    assert writer.drain(spots, 0.3) is False
    assert time.monotonic() - began < 2
    assert writer.waiting(spots) == 4
    os.close(descriptor)
    assert writer.drain(spots, 10) is True


def test_a_reader_that_finds_nothing_recorded_makes_no_store(spots: Places) -> None:
    assert writer.drain(spots, 1) is True
    assert spots.database is not None
    assert not spots.database.exists()


def test_what_waits_is_counted_from_where_the_store_is(spots: Places) -> None:
    calls = Calls(spots.spool)
    calls.prints()
    drained(spots)
    calls.call(1)
    calls.journal.rotate()
    calls.call(2)
    assert writer.waiting(spots) == 4
    drained(spots)
    assert writer.waiting(spots) == 0
    calls.close()


# -- the spool ----------------------------------------------------------------------------------------


def test_segments_are_unlinked_once_drained_unless_somebody_appends(spots: Places) -> None:
    alive, dead = Calls(spots.spool), Calls(spots.spool)
    for calls in (alive, dead):
        calls.prints()
        calls.journal.rotate()
        calls.call(1)
    dead.close()
    drained(spots)
    assert spool.segments(spots.spool) == [alive.journal.path]
    alive.call(2)
    drained(spots)
    alive.close()
    drained(spots)
    assert spool.segments(spots.spool) == []
    assert rows(spots, "select ended, last_seq from streams order by last_seq") == [(1, 5), (1, 7)]


def test_a_file_that_is_no_segment_is_left_untouched_and_said_once(
    spots: Places, caplog: pytest.LogCaptureFixture
) -> None:
    calls = Calls(spots.spool)
    calls.prints()
    calls.close()
    (spots.spool / "foreign.seg").write_bytes(b"not ours" * 100)
    mover = writer.Drain(spots)
    for _ in range(3):
        mover.pass_once()
    mover.close()
    assert (spots.spool / "foreign.seg").read_bytes() == b"not ours" * 100
    assert count(spots) == 4
    assert [record.message for record in caplog.records] == [
        "foreign.seg is not a journal segment; it is left untouched."
    ]


def test_a_locked_store_is_waited_for(spots: Places) -> None:
    calls = Calls(spots.spool)
    calls.prints()
    drained(spots)
    assert spots.database is not None
    other = sqlite3.connect(spots.database, isolation_level=None, check_same_thread=False)
    other.execute("begin immediate")
    calls.call(1)
    release = threading.Timer(0.7, lambda: other.execute("rollback"))
    release.start()
    began = time.monotonic()
    drained(spots)
    assert time.monotonic() - began > 0.5
    assert count(spots) == 6
    release.join()
    other.close()
    calls.close()


def test_a_store_that_fails_is_tried_again_and_the_spool_keeps_everything(
    spots: Places, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    calls = Calls(spots.spool)
    calls.prints()
    calls.close()
    real, fails = writer.Drain, iter([True, True])

    def failing(where: Places, progress: writer.Progress) -> Any:
        if next(fails, False):
            raise OSError(28, "No space left on device")
        return real(where, progress)

    monkeypatch.setattr(writer, "Drain", failing)
    monkeypatch.setattr(writer, "RETRY_SECONDS", (0.05,))
    assert writer.run(spots, idle=0.1) is True
    assert count(spots) == 4
    assert "the spool keeps everything" in caplog.text


def test_a_writer_that_is_stopped_ends_at_once(spots: Places) -> None:
    calls = Calls(spots.spool)
    calls.prints()
    stop = threading.Event()
    thread = threading.Thread(target=writer.run, args=(spots,), kwargs={"idle": 600.0, "stop": stop.is_set})
    thread.start()
    eventually(lambda: spots.database is not None and spots.database.exists() and writer.waiting(spots) == 0)
    calls.call(1)
    stop.set()
    thread.join(5)
    assert not thread.is_alive()
    assert count(spots) == 6  # what was there when it was told is still written
    calls.close()


# -- where a spool drains to --------------------------------------------------------------------------


@pytest.fixture
def target(spots: Places) -> Path:
    """Return the file that a recorder leaves for its writer."""
    Calls(spots.spool).close()
    child = opening.launch_writer(spots)
    child.kill()
    child.wait()
    return spots.spool / "target"


def test_where_a_spool_drains_to_is_read_back(spots: Places, target: Path) -> None:
    assert stat.S_IMODE(target.stat().st_mode) == 0o600
    assert opening.read_target(spots.spool) == spots


@pytest.mark.parametrize("mode", [0o620, 0o602, 0o666])
def test_a_target_that_others_can_write_is_refused(spots: Places, target: Path, mode: int) -> None:
    target.chmod(mode)
    with pytest.raises(SpoolRefused, match="can be written by others; remove it") as caught:
        opening.read_target(spots.spool)
    assert is_one_sentence(str(caught.value))


def test_a_target_that_is_a_link_is_refused(spots: Places, target: Path) -> None:
    target.rename(target.with_name("elsewhere"))
    target.symlink_to(target.with_name("elsewhere"))
    with pytest.raises(SpoolRefused):
        opening.read_target(spots.spool)


@pytest.mark.skipif(os.geteuid() != 0, reason="only root can give a file away")
def test_a_target_of_another_user_is_refused(spots: Places, target: Path) -> None:
    os.chown(target, 65534, 65534)
    with pytest.raises(SpoolRefused):
        opening.read_target(spots.spool)


def test_a_second_recorder_of_a_store_leaves_its_target_as_it_is(spots: Places, target: Path) -> None:
    before = target.stat().st_ino
    again = opening.launch_writer(places(Settings(db=str(spots.database), key_file=str(spots.key_file))))
    again.kill()
    again.wait()
    assert target.stat().st_ino == before
    assert list(spots.spool.glob(".target*")) == []
