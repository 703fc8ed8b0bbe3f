"""doctor: reads the process, a model's folder and the store as they are, and changes nothing."""

import hashlib
import json
import os
import sqlite3
from pathlib import Path
from typing import Any

import pytest

import provenance
from tests.conftest import Command


@pytest.fixture
def recorded(db: Path) -> Path:
    """Make a store with three calls in it."""
    provenance.init(db=db, writer="off")

    @provenance.record
    def f(x: int) -> int:
        return x

    for n in range(3):
        f(n)
    assert provenance.flush()
    return db


def asked(command: Command, *arguments: str, **options: Any) -> dict[str, str]:
    """Return each finding's evidence by its name."""
    said = command("doctor", "--no-torch", "--json", *arguments, **options)
    assert said.returncode in (0, 1), said.stderr
    return {item["what"]: item["because"] for item in json.loads(said.stdout)["findings"]}


def test_a_sound_store_brings_no_warning_and_is_left_as_it_lies(command: Command, recorded: Path) -> None:
    before = hashlib.sha256(recorded.read_bytes()).hexdigest()
    said = command("doctor", "--no-torch", "--strict", "--json")
    assert said.returncode == 0, said.stdout
    assert json.loads(said.stdout)["warnings"] == 0
    assert hashlib.sha256(recorded.read_bytes()).hexdigest() == before


def test_without_a_store_that_is_said_and_none_is_made(command: Command, db: Path) -> None:
    assert f"no database at {db}" in asked(command)["nothing recorded yet"]
    assert not db.exists()


def test_what_is_missing_in_the_numbering_is_found(command: Command, recorded: Path) -> None:
    with sqlite3.connect(recorded) as connection:
        connection.execute("delete from ingested where seq = 2")
    said = command("doctor", "--no-torch", "--strict")
    assert said.returncode == 1
    assert "1 records are missing in the numbering" in said.stdout
    with sqlite3.connect(recorded) as connection:  # a gap record names it: then it is one that could not be written
        stream = connection.execute("select stream from ingested").fetchone()[0]
        connection.execute(
            "insert into events values (1, ?, 3, 'gap', 0, ?)", (stream, '{"first":2,"last":2,"reason":"full"}')
        )
    found = asked(command)
    assert "records are missing" not in found
    assert found["records that could not be written"].startswith("1 records")


def test_alarms_damage_and_our_own_errors_are_counted(command: Command, recorded: Path) -> None:
    with sqlite3.connect(recorded) as connection:
        connection.execute("insert into events values (1, 1, 0, 'alarm', 0, '{}')")
        connection.execute("insert into events values (2, 1, 0, 'damage', 0, '{}')")
        connection.execute("update runs set status = 'partial' where id = (select min(id) from runs)")
    found = asked(command)
    assert {"records that contradict each other", "damage in the journal", "errors of the recorder"} <= set(found)


def test_files_open_to_others_are_told_with_the_line_that_closes_them(command: Command, recorded: Path) -> None:
    recorded.chmod(0o644)
    said = command("doctor", "--no-torch", "--strict")
    assert said.returncode == 1
    assert f"write  chmod 0600 {recorded}" in said.stdout


def test_records_that_wait_are_counted_and_not_drained(command: Command, recorded: Path) -> None:
    provenance.init(db=recorded, writer="off", evidence=3)  # another stream

    @provenance.record
    def g() -> None:
        return None

    g()
    for path in recorded.with_name("p.db.spool").glob("*.seg*"):
        os.utime(path, (1, 1))
    for _ in range(2):
        found = asked(command)["records wait"]
        assert found.startswith("4 records wait in the spool")
        assert found.endswith("no writer is at work")


def test_a_schema_that_is_behind_names_the_command(command: Command, recorded: Path) -> None:
    with sqlite3.connect(recorded) as connection:
        connection.execute("update alembic_version set version_num = '0001'")
    said = command("doctor", "--no-torch")
    assert "the older schema 0001" in said.stdout
    assert "write  provenance db upgrade" in said.stdout


def test_a_file_that_is_no_database_is_a_finding_and_no_traceback(command: Command, db: Path) -> None:
    db.parent.mkdir()
    db.write_text("not a database at all")
    assert "is not a database" in asked(command)["the store"]


def test_a_models_folder_is_looked_at_as_data(command: Command, tmp_path: Path, recorded: Path) -> None:
    place = tmp_path / "model"
    place.mkdir()
    (place / "config.json").write_text('{"auto_map": {"AutoModel": "m.M"}}')
    (place / "generation_config.json").write_text('{"repetition_penalty": 1.1}')
    found = asked(command, "--model", str(place))
    assert "repetition_penalty = 1.1" in found["acts in greedy"]
    assert "AutoModel" in found["code that comes with the checkpoint"]
    assert command("doctor", "--no-torch", "--strict", "--model", str(place)).returncode == 1
    missing = command("doctor", "--model", str(tmp_path / "none"))
    assert missing.returncode == 2
    assert missing.stderr.count("\n") == 1


def test_advice_is_for_this_machine(command: Command, recorded: Path) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "1", "DNNL_DEFAULT_FPMATH_MODE": "BF16"}
    said = command("doctor", env=environ)
    assert said.returncode == 0, said.stderr
    assert "OMP_NUM_THREADS is not set" not in said.stdout
    assert "DNNL_DEFAULT_FPMATH_MODE = BF16" in said.stdout
    if "no GPU here" in said.stdout:
        assert "CUBLAS_WORKSPACE_CONFIG" not in said.stdout
        assert "no GPU here: 8 rules do not apply" in said.stdout
