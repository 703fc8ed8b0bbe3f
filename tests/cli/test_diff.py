"""diff, on calls that were really recorded: many runs, a baseline, what is allowed, files for CI, and no database."""

import json
import sqlite3
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
import torch

import provenance
from provenance.cli.opened import Given, Runs
from provenance.store import export
from tests.conftest import Command
from tests.fakes import models
from tests.fakes.runs import run


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Give the calls of this file one store: they are recorded once, and only read afterwards."""
    return tmp_path_factory.mktemp("diff")


@pytest.fixture(autouse=True)
def _key(home: Path, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVENANCE_KEY_FILE", str(place / "key"))


@pytest.fixture(scope="module")
def recorded(place: Path) -> list[str]:
    """Record a model called alone and with penalties, with dropout left on, and beside another prompt."""
    with pytest.MonkeyPatch.context() as patch:
        for name, value in {
            "HOME": place,
            "PROVENANCE_KEY_FILE": place / "key",
            "PROVENANCE_DB": place / "p.db",
            "PROVENANCE_WRITER": "off",
        }.items():
            patch.setenv(name, str(value))
        model = models.llama(attention_dropout=0.5)
        provenance.init(db=place / "p.db", writer="off")
        provenance.wrap(model)
        for name, settings, training in (
            ("steady", {}, False), ("steady", {}, False), ("penal", {"repetition_penalty": 9.0}, False),
            ("penal", {"repetition_penalty": 9.0}, False), ("noisy", {}, True),
        ):  # fmt: skip
            model.train(training)
            torch.manual_seed(3)
            with provenance.run(name=name):
                model.generate(models.tensor(), max_new_tokens=12, do_sample=False, **settings)
        found = [run.run_id for run in models.runs(place / "p.db")]
        provenance.uninstrument()
        from provenance import recorder
        from tests.conftest import _reset

        _reset(recorder)
    return found


@pytest.fixture
def diff(recorded: list[str], place: Path, command: Command) -> Command:
    return lambda *arguments: command("diff", *arguments, "--db", str(place / "p.db"))


def test_of_many_runs_it_names_the_field_that_separates_them(diff: Command, recorded: list[str]) -> None:
    steady, again, penal, too, _ = recorded
    found = diff(steady, penal, again, too)
    assert found.returncode == 1, found.stderr
    assert "4 runs, 2 different outputs" in found.stdout
    assert "generation.repetition_penalty separates the 2 groups exactly." in found.stdout
    answer = json.loads(diff(steady, penal, again, too, "--json").stdout)
    assert [run["group"] for run in answer["runs"]] == [1, 2, 1, 2]
    assert [run["fields"]["generation.repetition_penalty"] for run in answer["runs"]] == [1.0, 9.0, 1.0, 9.0]
    assert answer["causes"][0]["field"] == "generation.repetition_penalty"
    assert diff(steady, again, steady).returncode == 0


def test_a_difference_can_be_allowed_declared_and_counted_otherwise(diff: Command, recorded: list[str]) -> None:
    steady, _, penal, _, _ = recorded
    assert diff(steady, penal).returncode == 1
    allowed = diff(steady, penal, "--allow", "generation.rep*")
    assert (allowed.returncode, ", allowed]" in allowed.stdout) == (0, True)
    assert diff(steady, penal, "--allow", "batch.size").returncode == 1
    declared = diff(steady, penal, "--vary", "generation.repetition_penalty", "--vary", "generation.logits_processors")
    assert "Declared to differ" in declared.stdout
    assert declared.returncode == 1
    assert "The declared difference explains it: generation.repetition_penalty." in declared.stdout
    assert diff(steady, penal, "--allow", "*").returncode == 0
    assert diff(steady, penal, "--fail-on", "near_tie,not_comparable").returncode == 0
    assert diff(steady, penal, "--fail-on", "divergent").returncode == 1
    for arguments, message in (
        (("--fail-on", "worse"), "there is no verdict 'worse'"), (("--allow", "batch.sice"), "did you mean 'batch.size'"),
    ):  # fmt: skip
        refused = diff(steady, penal, *arguments)
        assert (refused.returncode, message in refused.stderr) == (2, True)


def test_a_baseline_is_the_newest_run_of_a_tag_with_the_prompt(diff: Command, recorded: list[str]) -> None:
    _, again, penal, _, noisy = recorded
    answer = json.loads(diff("--against-baseline", "steady", noisy, "--json").stdout)
    assert (answer["a"]["run"], answer["b"]["run"]) == (again, noisy)
    answer = json.loads(diff("--against-baseline", "steady", f"{penal}:0", "--json").stdout)
    assert (answer["a"]["run"], answer["b"]["run"]) == (again, penal)
    itself = json.loads(diff("--against-baseline", "steady", again, "--json").stdout)
    assert itself["a"]["run"] == recorded[0]
    for arguments, message in (
        (("--against-baseline", "none", noisy), "no run with the tag or name 'none' was asked a prompt of"),
        (("--against-baseline", "steady", noisy, penal), "takes one run and got 2"),
    ):  # fmt: skip
        refused = diff(*arguments)
        assert (refused.returncode, message in refused.stderr) == (2, True)


def test_an_exported_run_of_another_store_has_no_baseline_here(
    diff: Command, recorded: list[str], place: Path, command: Command, tmp_path: Path
) -> None:
    form = json.loads(command("export", recorded[0], "--db", str(place / "p.db")).stdout)
    path = tmp_path / "a.json"
    for change in ({"key_id": "0b"}, {"sequences": [{**form["sequences"][0], "input_key": "0b" * 32}]}):
        path.write_text(json.dumps({**form, "run_id": f"{form['run_id'][:-4]}0000", **change}))
        refused = diff("--against-baseline", "steady", str(path))
        assert (refused.returncode, "was written under another key" in refused.stderr) == (2, True)


def test_the_files_for_people_and_for_ci_are_written(diff: Command, recorded: list[str], tmp_path: Path) -> None:
    page, sarif, junit = (tmp_path / name for name in ("a.html", "a.sarif", "a.xml"))
    found = diff(recorded[0], recorded[2], "--html", str(page), "--sarif", str(sarif), "--junit", str(junit))
    assert found.returncode == 1
    assert "generation.repetition_penalty" in page.read_text(encoding="utf-8")
    log = json.loads(sarif.read_text())
    assert log["runs"][0]["tool"]["driver"]["version"] == provenance.__version__
    assert log["runs"][0]["results"][0]["level"] == "error"
    assert ET.parse(junit).getroot().get("failures") == "1"
    refused = diff(recorded[0], recorded[2], "--html", str(tmp_path))
    assert (refused.returncode, "cannot be written: Is a directory" in refused.stderr) == (2, True)


def test_markdown_and_a_wrong_row(diff: Command, recorded: list[str]) -> None:
    assert diff(recorded[0], recorded[2], "--md").stdout.startswith("**Divergent")
    wrong = diff(f"{recorded[0]}:5", recorded[2])
    assert (wrong.returncode, "has no row 5" in wrong.stderr) == (2, True)


def test_incidents_are_listed_with_the_command_that_compares_them(
    recorded: list[str], place: Path, command: Command
) -> None:
    db = str(place / "p.db")
    (incident,) = json.loads(command("log", "--equal-inputs", "--diverged", "--db", db, "--json").stdout)
    assert (incident["runs"], [output["runs"] for output in incident["outputs"]]) == (3, [2, 1])
    assert incident["outputs"][0]["reference"] == recorded[1]
    assert incident["commands"] == [f"provenance diff {recorded[1]} {recorded[4]}"]
    said = command("log", "--diverged", "--db", db).stdout
    assert "3 answers, 2 different" in said
    proposed = next(line for line in said.splitlines() if line.strip().startswith("provenance diff")).split()
    assert command(*proposed[1:]).returncode == 1
    assert len(json.loads(command("log", "--equal-inputs", "--db", db, "--json").stdout)) == 2
    assert "2 answers, all equal" in command("log", "--equal-inputs", "--db", db).stdout
    assert len(json.loads(command("log", "--equal-inputs", "--db", db, "--json", "-n", "1").stdout)) == 1
    refused = command("log", "--diverged", "--name", "steady", "--db", db)
    assert (refused.returncode, "takes no --name" in refused.stderr) == (2, True)


def test_a_store_without_incidents_says_so(db: Path, command: Command) -> None:
    assert command("db", "upgrade").returncode == 0
    assert command("log", "--diverged").stdout == "No prompt was asked again with another output.\n"
    assert command("log", "--equal-inputs").stdout == "No prompt was asked again.\n"
    assert sqlite3.connect(db).execute("select count(*) from equal_inputs").fetchone() == (0,)


# -- without a database -------------------------------------------------------------------------------

POISON = """
import sys
class Poison:
    def find_spec(self, name, path=None, target=None):
        if name.split(".")[0] in ("torch", "transformers", "sqlalchemy", "alembic", "pynvml", "psycopg", "tokenizers"):
            raise AssertionError(f"{name} is imported")
sys.meta_path.insert(0, Poison())
from provenance.cli.main import main
sys.exit(main(sys.argv[1:]))
"""


def test_exported_runs_are_compared_without_database_torch_or_driver(
    recorded: list[str], place: Path, command: Command, python: Command, tmp_path: Path
) -> None:
    files = []
    for number in (0, 2, 3):
        files.append(tmp_path / f"{number}.json")
        assert command("export", recorded[number], "-o", str(files[-1]), "--db", str(place / "p.db")).returncode == 0
    names = [str(file) for file in files]
    found = python(POISON, "diff", *names[:2], "--json", "--html", str(tmp_path / "a.html"), "--db", "/no/such.db")
    assert found.returncode == 1, found.stderr
    assert json.loads(found.stdout)["causes"][0]["field"] == "generation.repetition_penalty"
    same = python(POISON, "diff", names[1], names[2])
    assert (same.returncode, same.stdout.splitlines()[0]) == (0, "Same: the outputs are equal.")
    several = python(POISON, "diff", *names)
    assert "generation.repetition_penalty separates the 2 groups exactly." in several.stdout
    needs = python(POISON, "diff", "last", names[0])
    assert "sqlalchemy is imported" in needs.stderr  # the poison works


def test_a_file_that_makes_no_sense_is_refused_in_a_sentence(
    recorded: list[str], place: Path, command: Command, tmp_path: Path
) -> None:
    form = json.loads(command("export", recorded[0], "--db", str(place / "p.db")).stdout)
    form["sequences"] = []
    empty = tmp_path / "empty.json"
    empty.write_text(json.dumps(form))
    found = command("diff", str(empty), str(empty))
    assert (found.returncode, "holds no sequence to compare" in found.stderr) == (2, True)
    assert "Traceback" not in found.stderr
    bundle = tmp_path / "bundle.json"
    bundle.write_text(json.dumps({"schema": "provenance/runs/1", "runs": [form]}))
    assert "takes two runs or more and got 1" in command("diff", str(bundle)).stderr


def test_a_field_that_no_run_holds_is_named_with_its_file(tmp_path: Path) -> None:
    """Where an answer fails on what a file holds, the field is found without which it does not."""
    path = tmp_path / "a.json"
    path.write_bytes(export.dumps(run(fields={"batch.size": "many", "cpu.model": "x"})))
    runs = Runs("")
    given = [*runs.all(str(path)), (run(), None)]

    def work(given: Given) -> int:
        return sum(int(run.fields["batch.size"].value) for run, _ in given if "batch.size" in run.fields)  # type: ignore[call-overload]

    found = runs.strange(given, work)
    assert str(found).endswith(
        'a.json is damaged: the field batch.size is "many", which no run holds there; export the run again.'
    )
    assert Runs("").strange(given, work) is None


def test_an_edited_export_is_refused_with_its_name(diff: Command, tmp_path: Path) -> None:
    names = [tmp_path / name for name in ("a.json", "b.json")]
    for name in names:
        name.write_bytes(export.dumps(run()))
    form = json.loads(names[0].read_text())
    form["sequences"][0]["output_ids"][1] = -5
    names[0].write_text(json.dumps(form))
    said = diff(str(names[0]), str(names[1]))
    assert (said.returncode, said.stdout) == (2, "")
    assert said.stderr == (
        f"provenance: {names[0]} is damaged: sequences[0].output_ids[1] is -5, and a token id belongs there; "
        "export the run again.\n"
    )
