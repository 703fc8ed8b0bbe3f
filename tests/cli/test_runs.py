"""log, show and export, on runs that were really recorded."""

import json
from pathlib import Path
from typing import Any

import pytest

import provenance
from provenance.cli import opened
from tests.conftest import Command


@pytest.fixture
def recorded(db: Path) -> list[str]:
    """Record three calls of a function, the last of which raises, and return their ids."""
    provenance.init(db=db, writer="off")

    @provenance.record(name="answer")
    def answer(question: str, temperature: float = 0.0) -> dict[str, object]:
        if not question:
            raise ValueError("an empty question")
        return {"answer": question.upper(), "temperature": temperature}

    with provenance.run(name="nightly", tags={"suite": "7"}) as block:
        answer("why")
    with provenance.run() as second:
        answer("why", temperature=0.5)
    with provenance.run() as third, pytest.raises(ValueError, match="an empty question"):
        answer("")
    return [*block.run_ids, *second.run_ids, *third.run_ids]


def test_the_log_shows_what_was_asked_and_answered(recorded: list[str], command: Command) -> None:
    said = command("log").stdout
    lines = said.splitlines()
    assert len(lines) == 4
    assert "error" in lines[1]
    assert "nightly" in lines[3]
    assert all(run[:13] in said for run in recorded)


def test_the_log_can_be_narrowed(recorded: list[str], command: Command) -> None:
    def ids(*arguments: str) -> list[str]:
        return [line["run_id"] for line in json.loads(command("log", "--json", *arguments).stdout)]

    assert ids() == recorded[::-1]
    assert ids("--name", "nightly") == recorded[:1]
    assert ids("--tag", "suite=7") == recorded[:1]
    assert ids("--tag", "suite=8") == []
    assert ids("--status", "error") == recorded[2:]
    assert ids("-n", "1") == recorded[2:]


@pytest.mark.parametrize(("reference", "index"), [("last", 2), ("last~2", 0), ("tag:nightly", 0), ("tag:suite=7", 0)])
def test_a_run_is_found_by_what_people_type(reference: str, index: int, recorded: list[str], command: Command) -> None:
    assert json.loads(command("show", reference, "--json").stdout)["run_id"] == recorded[index]


def test_a_unique_beginning_is_enough_and_an_ambiguous_one_is_refused(recorded: list[str], command: Command) -> None:
    assert json.loads(command("show", recorded[1], "--json").stdout)["run_id"] == recorded[1]
    common = recorded[0][:6]
    assert all(run.startswith(common) for run in recorded)
    found = command("show", common)
    assert found.returncode == 2
    assert "is ambiguous" in found.stderr
    assert "no run begins with 'ffff'" in command("show", "ffff").stderr
    assert "no run begins with 'last~9'" in command("show", "last~9").stderr


def test_show_tells_the_error_and_the_arguments(recorded: list[str], command: Command) -> None:
    said = command("show", recorded[2]).stdout
    assert "ValueError: an empty question" in said
    assert "status                   error" in said
    assert "'args': ('',)" in said


def test_show_can_list_every_field(recorded: list[str], command: Command) -> None:
    said = command("show", recorded[0], "--fields").stdout
    assert "cpu.model" in said
    assert "env.OMP_NUM_THREADS" in said


def test_a_reference_can_name_a_row() -> None:
    assert opened.split("9f31:2.1") == ("9f31", (2, 1))
    assert opened.split("tag:nightly") == ("tag:nightly", None)
    assert opened.split("tag:nightly:3") == ("tag:nightly", (3, None))


def test_export_writes_whole_runs(recorded: list[str], command: Command, tmp_path: Path) -> None:
    one = command("export", recorded[0]).stdout
    assert one == command("show", recorded[0], "--json").stdout
    assert json.loads(one)["run_id"] == recorded[0]
    path = tmp_path / "two.json"
    said = command("export", recorded[1], "last", "-o", str(path))
    assert (said.returncode, said.stdout) == (0, "")
    form = json.loads(path.read_text())
    assert form["schema"] == "provenance/runs/1"
    assert [item["run_id"] for item in form["runs"]] == recorded[1:]
    assert command("export", str(path), "-o", str(path)).returncode == 0
    assert json.loads(path.read_text()) == form
    refused = command("show", str(path))
    assert (refused.returncode, "holds 2 runs, and one is wanted here" in refused.stderr) == (2, True)
    assert "names no row of one" in command("diff", f"{path}:0", recorded[0]).stderr
    unwritable = command("export", "last", "-o", str(tmp_path / "none" / "a.json"))
    assert (unwritable.returncode, "cannot be written: No such file" in unwritable.stderr) == (2, True)


def test_control_characters_of_others_do_not_act(db: Path, command: Command) -> None:
    provenance.init(db=db, writer="off")

    @provenance.record
    def echo(text: str) -> str:
        return text

    echo("\x1b[31mred\x07 \u202eevil\x00")
    for arguments in (["log"], ["show"], ["sql", "select text_in, text_out from run_overview"]):
        said = command(*arguments).stdout
        assert "\x1b" not in said
        assert "\u202e" not in said
        assert "\x07" not in said


FUNCTIONS = """
import random, provenance
class Bot:
    def __init__(self, heat): self.heat, self.api_key, self.seen = heat, "sk-" + "a1b2" * 9, [object()]
    @provenance.record
    def ask(self, text): return text.upper() if self.heat < 1 else text.lower()
class Answer:
    def __init__(self, text): self.text = text
@provenance.record
def answer(text): return Answer(text + str(turn))
@provenance.record
def stream(text): return iter([text, turn])
for turn in range(2):
    Bot(turn * 2).ask("Hello"), answer("x"), stream("y")
assert provenance.flush()
"""


def test_a_recorded_function_is_compared_by_all_that_it_was_given_and_gave(command: Command, python: Command) -> None:
    done = python(FUNCTIONS)
    assert done.returncode == 0, done.stderr

    def pair(name: str) -> tuple[int, dict[str, Any]]:
        found = command(
            "sql", "--json", f"select run_id from run_overview where operation like '%{name}' order by started"
        )
        runs = [row["run_id"] for row in json.loads(found.stdout)]
        said = command("diff", *runs, "--json")
        return said.returncode, json.loads(said.stdout)

    code, said = pair("Bot.ask")
    assert (code, said["verdict"]) == (1, "divergent")
    assert said["inputs"]["equal"] is True
    assert said["causes"][0]["field"] == "self.heat", "what its object holds is a setting of the call"
    code, said = pair("answer")
    assert (code, said["verdict"]) == (1, "divergent"), "an object that holds another text is another answer"
    code, said = pair("stream")
    assert (code, said["verdict"]) == (3, "inconclusive"), "what cannot be kept equals nothing"
    log = command("log", "--equal-inputs", "--diverged")
    assert "No prompt" not in log.stdout
    shown = json.loads(command("sql", "--json", "select runs, outputs, weights_root from diverged_inputs").stdout)
    assert shown == [{"runs": 2, "outputs": 2, "weights_root": None}] * 2
