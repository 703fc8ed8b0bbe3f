"""`provenance torture`: what it counts on a sound journal is nought, and on a broken one it is not."""

import json
from pathlib import Path

import pytest

from tests.conftest import Command

# The numbers of a commit; scripts/torture does ten times these and more.
CODE = """
import random, sys
from pathlib import Path
from provenance.cli import ordeals, trials
place, chance = Path(sys.argv[1]), random.Random(7)
{sabotage}
found = {call}
print(found.done, found.records, found.lost, found.invented, found.reordered, found.twice, found.unnamed, sep=",")
"""


def count(python: Command, folder: Path, call: str, sabotage: str = "") -> list[int]:
    """Do one ordeal in a process of its own: done, records, and the five columns of what must not be."""
    done = python(CODE.format(sabotage=sabotage, call=call), str(folder))
    assert done.returncode == 0, done.stderr
    return [int(number) for number in done.stdout.split(",")]


@pytest.mark.parametrize(
    ("call", "times"),
    [("ordeals.kills(place, 100, chance)", 100), ("ordeals.full(place, 50, chance)", 50),
     ("ordeals.flips(place, 500, chance)", 500), ("ordeals.cuts(place, 800)", 800),
     ("trials.writer_kills(place, 50, chance)", 50)],
)  # fmt: skip
def test_nothing_is_lost_invented_reordered_repeated_or_unnamed(
    python: Command, tmp_path: Path, call: str, times: int
) -> None:
    done, records, *wrong = count(python, tmp_path, call)
    assert done == times
    assert records > times
    assert wrong == [0, 0, 0, 0, 0]


LOSES = """
real = ordeals.Journal._write
ordeals.Journal._write = lambda self, kind, seq, payload, crc: seq % 50 == 49 or real(self, kind, seq, payload, crc)
"""
BUFFERS = """
from provenance.journal import spool
waiting = []
def late(descriptor, data):
    waiting.append(data)
    if len(waiting) > 5:
        spool.os.write(descriptor, b"".join(waiting)); waiting.clear()
    return len(data)
spool.write = late
"""
FORGETS_GAPS = "ordeals.Journal._report_gaps = lambda self, *_, **__: self.gaps.clear()"
TRUSTS = """
from provenance.journal import recovery
recovery.checksum = lambda crc, seq, kind, flags, length: trusted
class Any_:
    def __eq__(self, other): return True
    def __ne__(self, other): return False
    __hash__ = None
trusted = Any_()
"""
STOPS = """
from provenance.journal.recovery import Scan
Scan._search = lambda self, data, place: None
"""
LOSES_ROWS = """
from provenance.store import batch
real = batch.Batch.is_new
batch.Batch.is_new = lambda self, item: real(self, item) and item.record.seq % 97 != 5
"""


@pytest.mark.parametrize(
    ("call", "sabotage", "column"),
    [("ordeals.kills(place, 8, chance)", LOSES, 0), ("ordeals.kills(place, 8, chance)", BUFFERS, 0),
     ("ordeals.full(place, 8, chance)", FORGETS_GAPS, 4), ("ordeals.flips(place, 40, chance)", TRUSTS, 1),
     ("ordeals.flips(place, 40, chance)", STOPS, 0), ("trials.writer_kills(place, 3, chance)", LOSES_ROWS, 0)],
    ids=["loses", "buffers", "forgets gaps", "trusts", "stops", "loses rows"],
)  # fmt: skip
def test_a_fault_is_found(python: Command, tmp_path: Path, call: str, sabotage: str, column: int) -> None:
    assert count(python, tmp_path, call, sabotage)[2 + column] > 0


def test_a_user_gets_a_table_of_their_own_disk_and_no_litter(command: Command, tmp_path: Path) -> None:
    done = command("torture", "--minutes", "0", "--dir", str(tmp_path / "disk"))
    assert done.returncode == 0, done.stderr
    assert "SIGKILL while recording" in done.stdout
    assert "nothing was lost" in done.stdout
    assert str(tmp_path / "disk") in done.stdout
    assert list((tmp_path / "disk").iterdir()) == []


def test_the_report_is_there_for_programs(command: Command, tmp_path: Path) -> None:
    done = command("torture", "--minutes", "0", "--dir", str(tmp_path), "--seed", "5", "--json")
    found = json.loads(done.stdout)
    assert (found["schema"], found["seed"]) == ("provenance/torture/1", 5)
    assert {item["bad"] for item in found["ordeals"].values()} == {0}
    assert found["ordeals"]["one wrong bit"]["done"] == 200


def test_a_disk_that_cannot_be_written_to_is_said_in_one_sentence(command: Command, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    done = command("torture", "--dir", str(tmp_path / "file" / "below"))
    assert done.returncode == 2
    assert len(done.stderr.splitlines()) == 1
    assert "--dir" in done.stderr
