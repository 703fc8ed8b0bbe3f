"""`provenance verify`: every number that is missing has one explanation, and the exit code says whether it is a good one."""

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from provenance.errors import JournalError
from provenance.journal import child, frame, records, spool
from provenance.settings import Places
from tests.conftest import Command
from tests.fakes import records as fake
from tests.fakes.records import Calls, drained, is_one_sentence, written


@pytest.fixture
def spots(db: Path, monkeypatch: pytest.MonkeyPatch) -> Places:
    made = fake.places(db.parent)
    monkeypatch.setenv("PROVENANCE_KEY_FILE", str(made.key_file))
    return made


def told(command: Command) -> tuple[int, dict[str, Any]]:
    done = command("verify", "--json")
    assert done.stderr == ""
    return done.returncode, json.loads(done.stdout)


def holes(document: dict[str, Any]) -> list[tuple[int, int, str, str]]:
    return [(hole["first"], hole["last"], hole["kind"], hole["why"]) for hole in document["holes"]]


def test_a_whole_store_is_said_to_be_whole_and_counted(command: Command, spots: Places) -> None:
    calls = Calls(spots.spool)
    calls.prints()
    for number in range(3):
        calls.call(number)
    calls.start(3)
    calls.close()
    drained(spots)
    code, document = told(command)
    assert (code, document["verdict"], document["records"], document["streams"]) == (0, "complete", 11, 1)
    assert document["runs"] == {"crashed": 1, "ok": 3}
    assert (document["holes"], document["alarms"], document["living"]) == ([], [], 0)
    shown = command("verify")
    assert shown.returncode == 0
    assert "Nothing is missing." in shown.stdout
    assert "Not shown by this" in shown.stdout


def test_a_hole_that_its_process_declared_is_explained_with_its_reason(
    command: Command, spots: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls = Calls(spots.spool)
    calls.prints()
    with monkeypatch.context() as patch:
        patch.setattr(spool, "write", _full)
        for number in range(5):
            with pytest.raises(JournalError):
                calls.start(number)
    calls.call(9)
    calls.close()
    drained(spots)
    code, document = told(command)
    assert (code, document["missing"]["declared"]) == (0, 5)
    assert holes(document) == [(4, 8, "declared", "No space left on device")]
    assert "Missing: 5 declared." in command("verify").stdout


def _full(descriptor: int, data: bytes) -> int:
    raise OSError(28, "No space left on device")


def test_a_hole_that_nothing_explains_is_named_and_fails(command: Command, spots: Places) -> None:
    calls = Calls(spots.spool)
    calls.prints()
    calls.call(1)
    calls.journal.next_seq += 3
    calls.call(2)
    drained(spots)
    code, document = told(command)
    assert (code, document["verdict"]) == (3, "pending")  # it still runs
    assert holes(document) == [(6, 8, "pending", "its process runs, and may yet say why")]
    calls.close()
    drained(spots)
    code, document = told(command)
    assert (code, document["verdict"]) == (1, "incomplete")
    assert holes(document) == [(6, 8, "undeclared", "nothing says why")]


def test_rows_taken_out_of_the_store_are_missed(command: Command, spots: Places) -> None:
    calls = Calls(spots.spool)
    calls.prints()
    calls.call(1)
    calls.close()
    drained(spots)
    with written(spots) as connection:
        connection.exec_driver_sql("delete from ingested where seq in (0, 1, 4)")
    code, document = told(command)
    assert code == 1
    assert [hole[:3] for hole in holes(document)] == [(0, 1, "undeclared"), (4, 4, "undeclared")]


def test_damaged_bytes_are_named_with_their_place(command: Command, spots: Places) -> None:
    calls = Calls(spots.spool)
    calls.prints()
    before = calls.journal.size
    calls.start(1)
    calls.call(2)
    path = calls.journal.path
    calls.close()
    whole = bytearray(path.read_bytes())
    whole[before + 40] ^= 1
    path.write_bytes(whole)
    drained(spots)
    code, document = told(command)
    assert code == 1
    (first, last, kind, why), *rest = holes(document)
    assert (first, last, kind, rest) == (4, 4, "damaged", [])
    assert why.startswith(f"bytes {before}-")


def test_what_the_death_of_a_process_tore_was_never_acknowledged(command: Command, spots: Places) -> None:
    calls = Calls(spots.spool)
    calls.prints()
    calls.call(1)
    path = calls.journal.path
    calls.close()
    with path.open("ab") as file:
        file.write(path.read_bytes()[-200:-90])
    drained(spots)
    code, document = told(command)
    assert (code, document["verdict"], len(document["torn_tails"])) == (0, "complete", 1)
    assert "had not been acknowledged" in command("verify").stdout


def test_a_record_that_the_store_refused_is_named(command: Command, spots: Places) -> None:
    calls = Calls(spots.spool)
    calls.prints()
    seq = calls.start(1, facts={"name": ["no", "text"] * 3, "tags": "no table"})
    calls.call(2)
    calls.close()
    drained(spots)
    code, document = told(command)
    assert code == 1
    assert [hole[:3] for hole in holes(document)] == [(seq, seq, "refused")]


def test_a_number_used_twice_is_an_alarm(command: Command, spots: Places) -> None:
    """As a restored copy of a machine makes it: the same life goes on twice."""
    for print_ in (fake.ENVIRONMENT, fake.SWITCHES):
        note = b"".join(records.note_payload(print_.scope, print_.raw, print_.document))
        fake.segment(spots.spool / f"{'01' * 16}-000000.seg", bytes(range(16)), [(0, frame.FINGERPRINT, note)])
        drained(spots)
        with written(spots) as connection:
            connection.exec_driver_sql("update streams set segment = 0, position = 0, last_seq = -1")
    code, document = told(command)
    assert code == 1
    assert [(alarm["seq"], alarm["why"]) for alarm in document["alarms"]] == [(0, "another record with this number")]


def test_a_refused_record_that_nothing_follows_is_named_too(command: Command, spots: Places) -> None:
    fake.segment(
        spots.spool / f"{'01' * 16}-000000.seg", bytes(16),
        [(0, frame.FINGERPRINT, b"".join(records.note_payload("environment", bytes(32), b"{}")))],
    )  # fmt: skip
    drained(spots)
    code, document = told(command)
    assert code == 1
    assert [hole[:3] for hole in holes(document)] == [(0, 0, "refused")]


def test_what_the_writer_complains_of_is_passed_on(command: Command, spots: Places) -> None:
    calls = Calls(spots.spool)
    calls.prints()
    calls.close()
    drained(spots)
    child.complain(spots.spool, "the database is away.")
    assert "The writer says: the database is away." in command("verify").stdout
    assert told(command)[1]["writer"] == "the database is away."


def test_without_a_store_there_is_one_sentence(command: Command) -> None:
    done = command("verify")
    assert done.returncode == 2
    assert is_one_sentence(done.stderr.strip())


LIFE = """
import os, signal, sys
import provenance
@provenance.record
def f(x): return x
provenance.init(durability="memory", writer="off")
for n in range(200): f(n)
print("there", flush=True)
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_a_process_killed_at_the_level_memory_is_said_to_leave_no_trace(command: Command, python: Command) -> None:
    ran = python(LIFE)
    assert (ran.returncode, ran.stdout) == (-signal.SIGKILL, "there\n")
    done = command("verify")
    if "there is no database" in done.stderr or "empty" in done.stderr:
        pytest.skip("the ring had written nothing at all")
    assert done.returncode == 0, done.stderr
    assert "recorded at the level memory" in done.stdout
    assert os.environ["PROVENANCE_DB"]
