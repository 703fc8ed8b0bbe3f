"""import: the journal of a host that cannot reach the store, as files."""

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.conftest import Command
from tests.fakes.records import Calls

AWAY = """
import sys, provenance
provenance.init(db=sys.argv[1], writer="off")
double = provenance.record(lambda x: 2 * x)
for number in range(5):
    double(number)
if sys.argv[2] == "killed":
    import os, signal
    with provenance.run():
        provenance.record(lambda: os.kill(os.getpid(), signal.SIGKILL))()
"""


def away(place: Path, how: str = "ended") -> Path:
    """Record on a host without a writer, and return a copy of its spool."""
    subprocess.run([sys.executable, "-c", AWAY, str(place / "away.db"), how], check=how == "ended")
    (spool,) = place.glob("*.spool")
    shutil.copytree(spool, place / "carried")
    shutil.rmtree(spool)
    return place / "carried"


def imported(command: Command, *arguments: str) -> list[dict[str, object]]:
    done = command("import", *arguments, "--json")
    assert done.returncode == 0, done.stderr
    found: list[dict[str, object]] = json.loads(done.stdout)
    return found


def statuses(command: Command) -> list[str]:
    return [run["status"] for run in json.loads(command("log", "--json").stdout)]


def test_what_was_recorded_elsewhere_is_here_once_however_often_it_comes(
    tmp_path: Path, db: Path, command: Command
) -> None:
    folder = away(tmp_path)
    before = {path.name: path.read_bytes() for path in folder.iterdir()}
    (first,) = imported(command, str(folder))
    assert first["new"] == first["records"] != 0
    assert statuses(command) == ["ok"] * 5
    (segment,) = folder.glob("*.seg")
    (again,) = imported(command, str(segment), str(segment))
    assert (again["new"], again["records"]) == (0, first["records"])
    assert len(statuses(command)) == 5
    assert {path.name: path.read_bytes() for path in folder.iterdir()} == before
    assert str(first["host"]).startswith("hmac:")


def test_a_call_that_ran_when_the_copy_was_made_ends_with_the_next_copy(
    tmp_path: Path, db: Path, command: Command
) -> None:
    """An old copy is the beginning of the new one: cut within the last record, and then whole."""
    folder = away(tmp_path)
    (segment,) = folder.glob("*.seg")
    whole = segment.read_bytes()
    used = len(whole.rstrip(b"\0"))
    segment.write_bytes(whole[: used - 40])
    (early,) = imported(command, str(segment))
    assert statuses(command).count("crashed") == 1
    segment.write_bytes(whole)
    (late,) = imported(command, str(segment))
    assert (late["new"], late["damaged"]) == (int(str(late["records"])) - int(str(early["records"])), 0)
    assert statuses(command) == ["ok"] * 5


def test_a_call_that_never_ended_is_crashed(tmp_path: Path, db: Path, command: Command) -> None:
    imported(command, str(away(tmp_path, "killed")))
    assert sorted(statuses(command)) == ["crashed", *["ok"] * 5]


def test_damage_is_named_and_costs_nothing_else(tmp_path: Path, db: Path, command: Command) -> None:
    (segment,) = away(tmp_path).glob("*.seg")
    data = bytearray(segment.read_bytes())
    data[len(data.rstrip(b"\0")) // 2] ^= 0xFF
    segment.write_bytes(bytes(data))
    done = command("import", str(segment))
    assert done.returncode == 1
    assert "damaged in 1 places" in done.stderr
    assert len(statuses(command)) >= 4
    kinds = json.loads(command("sql", "select kind from events", "--json").stdout)
    assert {"kind": "damage"} in kinds


@pytest.mark.parametrize(
    ("name", "content", "said"),
    [("x.seg", b"no segment at all" * 9, "is not a journal segment"), ("y.seg", b"", "not a journal segment"),
     ("absent.seg", None, "there is no file"), ("empty", "folder", "holds no segment")],
)  # fmt: skip
def test_what_is_no_segment_is_refused_in_a_sentence(
    name: str, content: object, said: str, tmp_path: Path, db: Path, command: Command
) -> None:
    path = tmp_path / name
    if content == "folder":
        path.mkdir()
    elif isinstance(content, bytes):
        path.write_bytes(content)
    done = command("import", str(path))
    assert (done.returncode, len(done.stderr.splitlines())) == (2, 1)
    assert said in done.stderr


def test_segments_that_are_missing_are_named(tmp_path: Path, db: Path, command: Command) -> None:
    """A stream of several segments, of which the first is not at hand."""
    calls = Calls(tmp_path / "spool")
    calls.prints()
    calls.call(1)
    calls.journal.rotate()
    calls.call(2)
    calls.close()
    first, second = sorted((tmp_path / "spool").glob("*.seg"))
    done = command("import", str(second))
    assert "1 segments before" in done.stderr
    done = command("import", str(first), str(second))
    assert (done.returncode, "missing" in done.stderr, "segments before" in done.stderr) == (0, False, False)
    assert statuses(command) == ["ok", "ok"]
