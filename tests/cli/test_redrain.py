"""redrain: a database that lost commits gets everything back that the spool still keeps, each record once."""

import json
import os
import re
import shutil
import time
from dataclasses import replace
from pathlib import Path

import pytest

from provenance import writer
from provenance.cli import imports
from provenance.journal import kept, spool
from provenance.settings import Places
from tests.conftest import Command
from tests.fakes.postgres import Server
from tests.fakes.records import Calls, drained, one, places, rows

LEAVES = (
    "select stream_id, seq, kind, leaf from log_entries e join streams s on s.id = e.stream order by stream_id, seq"
)
RUNS = "select run_id, status, end_seq, settings, weights, leaf from runs order by run_id"
BODIES = """select r.run_id, role, prompt_index, return_index, part, p.size, commitment, salt, b.key
    from payload_refs p join runs r on r.id = p.run join payloads b on b.id = p.body order by 1, 2, 3, 4, 5"""


def life(spots: Places, first: int, count: int) -> Calls:
    """Record a life of two segments: calls that lie across the two, and weights that are bound in the second."""
    calls = Calls(spots.spool)
    calls.prints()
    root = calls.weights()
    open_ = [calls.start(first + n) for n in range(count)]
    calls.journal.rotate()
    for n, seq in enumerate(open_):
        calls.end(first + n, seq, **({"weights": root} if n % 2 else {}))
    calls.binding(open_[0], open_[-1])
    return calls


def lines(
    spots: Places, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> list[dict[str, object]]:
    monkeypatch.setattr(imports, "where", lambda _: spots)
    assert imports.redrain(json=True) == 0
    found: list[dict[str, object]] = json.loads(capsys.readouterr().out)
    return found


class Backup:
    """A copy of a store as it is now, which can take the store's place."""

    def __init__(self, spots: Places, server: Server | None, folder: Path) -> None:
        self.spots, self.server, self.copy = spots, server, folder / "backup.db"
        if spots.database is not None:
            shutil.copy(spots.database, self.copy)
        else:
            self.name = re.search(r"store_\d+", spots.url)[0]  # type: ignore[index]
            server.execute(f"create database {self.name}_old template {self.name} strategy file_copy")  # type: ignore[union-attr]

    def restored(self) -> Places:
        """Put the copy in the place of the store."""
        if self.spots.database is not None:
            shutil.copy(self.copy, self.spots.database)
            return self.spots
        return replace(self.spots, url=self.spots.url.replace(self.name, self.name + "_old"))


@pytest.fixture
def spots(tmp_path: Path, both: str) -> Places:
    return places(tmp_path / "store")


@pytest.fixture
def backed(spots: Places, tmp_path: Path, request: pytest.FixtureRequest) -> Backup:
    """Return a backup of a store that holds the calls of a first life."""
    life(spots, 0, 3).close()
    drained(spots)
    server = request.getfixturevalue("server") if spots.database is None else None
    return Backup(spots, server, tmp_path)


def test_what_a_restored_backup_lost_is_brought_back_once(
    spots: Places, backed: Backup, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    life(spots, 10, 4).close()
    running = life(spots, 20, 4)  # goes on beyond the restore
    drained(spots)
    before = [rows(spots, query) for query in (LEAVES, RUNS, BODIES)]
    restored = backed.restored()
    assert one(restored, "select count(*) from runs") == 3
    running.call(30)
    drained(restored)  # the second segment of the running life: ends whose starts are in a kept one
    assert one(restored, "select count(*) from events where kind = 'alarm'") == 4
    found = lines(restored, capsys, monkeypatch)
    assert [item["segment"] for item in found] == [path.name for path in kept.whole(spots.spool)]
    assert (
        sum(int(str(item["new"])) for item in found)
        == len(before[0]) - one(restored, "select count(*) from log_entries where stream = 1") - 4 - 1
    )
    assert not any(item["new"] for item in lines(restored, capsys, monkeypatch)), "nothing twice"
    running.close()
    drained(restored)
    after = [rows(restored, query) for query in (LEAVES, RUNS, BODIES)]
    assert [row[:2] for row in after[1]] == [*[row[:2] for row in before[1]], after[1][-1][:2]]
    assert {row[4] for row in after[1][:-1]} == {1}, "weights are bound to calls that came late too"
    assert [row for row in after[2] if row in before[2]] == before[2], "prompts and answers, with their salts"
    assert one(restored, "select count(*) from events where kind = 'settled'") == 4
    assert one(restored, "select count(*), max(idx) from log_entries".replace(", max(idx)", "")) == len(before[0]) + 2
    assert rows(restored, "select * from early_ends where record is not null or salts is not null") == []


def test_an_older_segment_that_comes_after_a_newer_one_settles_the_alarm(spots: Places) -> None:
    """The call is as it would be had the segments come in order, but for the log, whose order is that of coming."""
    life(spots, 1, 2).close()
    first, second = spool.segments(spots.spool)
    ordered = places(spots.key_file.parent / "ordered")
    late = writer.Drain(spots)
    for path in (second, first):
        late.take(path, last=True)
        if path == second:
            assert rows(spots, "select kind, seq from events") == [("alarm", 7), ("alarm", 8)]
            assert one(spots, "select count(*) from early_ends where record is not null") == 2
    late.close()
    neat = writer.Drain(ordered)
    for path in (first, second):
        neat.take(path, last=path == second)
    neat.close()
    assert rows(spots, "select kind, seq from events where kind = 'settled'") == [("settled", 7), ("settled", 8)]
    columns = RUNS.replace(", leaf", ", input_tokens, output_tokens, hex(input_key), hex(output_key)").replace(
        "from runs", "from runs r join sequences s on s.run = r.id"
    ).replace("weights, ", "r.name, ")  # fmt: skip
    assert rows(spots, columns) == rows(ordered, columns) != []
    assert rows(spots, BODIES) == rows(ordered, BODIES)
    assert {status for _, status, *_ in rows(spots, RUNS)} == {"ok"}
    assert rows(spots, "select segment from streams") == [(1,)], "the position is never moved back"


def test_a_store_that_an_import_moved_ahead_loses_nothing_of_the_spool(spots: Places) -> None:
    life(spots, 1, 2).close()
    _, second = spool.segments(spots.spool)
    ahead = writer.Drain(spots)
    ahead.take(second, last=False)
    ahead.close()
    drained(spots)
    assert spool.segments(spots.spool) == []
    assert one(spots, "select count(*) from ingested") == 4 + 1 + 2 + 2 + 1
    assert {status for _, status, *_ in rows(spots, RUNS)} == {"ok"}


# -- how long they are kept ---------------------------------------------------------------------------


@pytest.fixture
def local(tmp_path: Path) -> Places:
    return places(tmp_path / "local")


def test_a_drained_segment_is_kept_for_its_grace_and_then_deleted(local: Places) -> None:
    life(local, 1, 1).close()
    drained(local)
    first, second = kept.kept(local.spool)
    assert {first.suffix, second.suffix} == {".kept"}
    yesterday = time.time() - local.grace - 1
    os.utime(first, (yesterday, yesterday))
    assert kept.expire(local.spool, local.grace) == 1
    assert kept.kept(local.spool) == [second]


def test_without_a_grace_nothing_is_kept(local: Places) -> None:
    life(local, 1, 1).close()
    drained(replace(local, grace=0.0))
    assert kept.whole(local.spool) == []


def test_the_oldest_go_first_where_there_is_no_room(local: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(3):
        life(local, number, 1).close()
    drained(local)
    paths = kept.kept(local.spool)
    for age, path in enumerate(paths):
        os.utime(path, (time.time() - age, time.time() - age))
    monkeypatch.setattr(kept, "MOST_BYTES", sum(path.stat().st_size for path in paths[:2]))
    assert kept.expire(local.spool, local.grace) == 4
    assert kept.kept(local.spool) == paths[:2]


def test_on_a_full_disk_they_are_the_first_to_go(local: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    life(local, 1, 1).close()
    drained(local)
    monkeypatch.setattr(kept, "free", lambda _: 0)
    assert kept.expire(local.spool, local.grace) == 2


def test_a_damaged_segment_stays_until_a_person_deletes_it(local: Places) -> None:
    (local.spool).mkdir(mode=0o700)
    path = local.spool / f"{'ab' * 16}-000000.damaged"
    path.write_bytes(b"?")
    os.utime(path, (1, 1))
    assert kept.expire(local.spool, 1.0) == 0
    assert kept.kept(local.spool) == [path]


def test_a_spool_without_segments_is_said(command: Command, db: Path) -> None:
    done = command("redrain")
    assert (done.returncode, done.stdout) == (0, "")
    assert "keeps no segment" in done.stderr
    assert not db.exists()


def test_it_is_a_command_that_says_what_was_new(command: Command, db: Path, python: Command) -> None:
    done = python("import provenance\nprovenance.init(writer='off')\nprovenance.record(lambda: 7)()")
    assert done.returncode == 0, done.stderr
    assert command("log").returncode == 0
    for file in db.parent.glob(db.name + "*"):
        if file.is_file():
            file.unlink()
    done = command("redrain")
    assert done.returncode == 0, done.stderr
    match = re.search(r"(\d+) of (\d+) records in 1 segments were not in the database", done.stderr)
    assert match
    assert match[1] == match[2] != "0"
    assert len(json.loads(command("log", "--json").stdout)) == 1
