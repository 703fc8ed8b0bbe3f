"""replay and baseline, as people and CI use them: processes of their own, on calls that a program really recorded."""

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest

from tests.conftest import ROOT, Command
from tests.fakes import models
from tests.replay.test_rerun import another, one_ulp

PROGRAM = """
import sys, torch, provenance, transformers
from tests.fakes import models
kind = sys.argv[1]
model = models.llama() if kind == "memory" else transformers.LlamaForCausalLM.from_pretrained("ck")
provenance.init(capture="digest" if kind == "digest" else "full")
provenance.wrap(model, models.letters())
torch.manual_seed(3)
ids = torch.tensor([[0, 0, 5, 6, 7], [8, 9, 10, 11, 12]])
with provenance.run(name=kind):
    for settings in ({"do_sample": False}, {"do_sample": True, "temperature": 1.5}):
        model.generate(ids, attention_mask=(ids != 0).long(), max_new_tokens=10, **settings)
assert provenance.flush()
"""

ROLLED = (
    "import transformers\n"
    "from tests.fakes import models\n"
    "class Another(transformers.LlamaForCausalLM):\n"
    "    def forward(self, *args, **kwargs):\n"
    "        out = super().forward(*args, **kwargs)\n"
    "        out.logits = out.logits.roll(1, dims=-1)\n"
    "        return out\n"
    "def make():\n"
    "    return Another.from_pretrained('ck'), models.letters()\n"
)


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Save a checkpoint and record a few programs beside it, once for all tests here."""
    place = tmp_path_factory.mktemp("replay")
    models.llama().save_pretrained(place / "ck")
    models.letters().save_pretrained(place / "ck")
    environ = {**os.environ, **places(place)}
    for kind in ("nightly", "memory", "digest"):
        code = [sys.executable, "-c", PROGRAM, kind]
        done = subprocess.run(code, cwd=place, env=environ, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    return place


def places(place: Path) -> dict[str, str]:
    return {
        "HOME": str(place), "PROVENANCE_DB": str(place / "p.db"), "PROVENANCE_KEY_FILE": str(place / "key"),
        "PYTHONPATH": str(ROOT), "PROVENANCE_WRITER": "off",
    }  # fmt: skip


@pytest.fixture
def work(place: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Copy the folder of the recordings, and work in the copy."""
    for there in place.iterdir():
        if there.is_dir():
            shutil.copytree(there, tmp_path / there.name, dirs_exist_ok=True)
        else:
            shutil.copy(there, tmp_path / there.name)
    for name, value in places(tmp_path).items():
        monkeypatch.setenv(name, value)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def test_a_call_is_replayed_and_its_output_held(work: Path, command: Command) -> None:
    found = command("replay", "tag:nightly", "--json", "--junit", "r.xml")
    assert found.returncode == 0, found.stderr
    assert found.stderr == ""
    said = json.loads(found.stdout)
    assert (said["schema"], said["verdict"], said["exit"], said["not_restored"]) == (
        "provenance/replay/1",
        "same",
        0,
        [],
    )
    assert [pair["verdict"] for pair in said["answer"]["pairs"]] == ["same", "same"]
    suite = ET.parse(work / "r.xml").getroot()[0]
    assert (suite.get("name"), suite.get("tests"), suite.get("failures")) == ("provenance replay", "2", "0")
    shown = command("show", said["replay"])
    assert f"replay_of={said['original']}" in shown.stdout
    query = f"select kind from runs where run_id = '{said['replay']}'"
    assert "replay" in command("sql", query).stdout
    told = command("replay", said["original"])
    assert (told.returncode, told.stdout.startswith("Same: the outputs are equal.")) == (0, True)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (("tag:memory",), 2, "it was built in memory. Name a checkpoint with --model PATH, or a function"),
        (("tag:nightly", "--model", "nowhere"), 2, "there is no checkpoint at nowhere"),
        (("tag:nightly", "--model", "no.module:f"), 2, "--model no.module:f gave no model: ModuleNotFoundError"),
        (("tag:nightly:1",), 2, "a replay makes a whole batch again"),
        (("tag:nightly", "--allow", "modl.dtype"), 2, "no field is called 'modl.dtype'; did you mean 'model.dtype'"),
        (("tag:nightly", "--fail-on", "worse"), 2, "there is no verdict 'worse'"),
        (("tag:none",), 2, "no run begins with 'tag:none'"),
    ],
)  # fmt: skip
def test_a_mistake_is_one_sentence(
    arguments: tuple[str, ...], code: int, said: str, work: Path, command: Command
) -> None:
    found = command("replay", *arguments)
    assert (found.returncode, found.stdout) == (code, "")
    assert said in found.stderr
    assert "Traceback" not in found.stderr
    assert len(found.stderr.strip().splitlines()) == 1


def test_what_was_not_kept_cannot_be_replayed(work: Path, command: Command) -> None:
    found = command("replay", "tag:digest")
    assert found.returncode == 3, found.stderr
    assert "Inconclusive: it was not run: input.token_ids: the inputs were not kept" in found.stdout
    assert command("replay", "tag:nightly", env={**os.environ, "PROVENANCE_DISABLED": "1"}).returncode == 2


def test_a_model_of_memory_comes_from_a_function(work: Path, command: Command) -> None:
    (work / "mine.py").write_text(
        "from tests.fakes import models\ndef make():\n    return models.llama(), models.letters()\n"
    )
    found = command("replay", "tag:memory", "--model", "mine:make")
    assert found.returncode == 0, found.stderr + found.stdout
    assert found.stdout.startswith("Same: ")


def test_threads_of_this_process_are_tried_if_asked_for(work: Path, command: Command) -> None:
    environ = {**os.environ, "OMP_NUM_THREADS": "1"}
    then = json.loads(command("show", "tag:nightly", "--json").stdout)["fields"]["torch.num_threads"]["value"]
    for option, threads in (((), then), (("--own-switches",), 1)):
        found = json.loads(command("replay", "tag:nightly", "--json", *option, env=environ).stdout)
        fields = json.loads(command("show", found["replay"], "--json").stdout)["fields"]
        assert fields["torch.num_threads"]["value"] == threads


# -- baseline ---------------------------------------------------------------------------------------


def test_a_set_is_frozen_checked_and_read(work: Path, command: Command) -> None:
    made = command("baseline", "record", "nightly", "--from-tag", "nightly")
    assert (made.returncode, made.stdout) == (0, "nightly.baseline.json: 2 runs, 4 sequences\n"), made.stderr
    found = command("baseline", "check", "nightly", "--junit", "b.xml")
    assert found.returncode == 0, found.stdout + found.stderr
    assert "0 of 4 sequences diverged: 0 % (95 % interval 0 to 49 %)." in found.stdout
    assert ET.parse(work / "b.xml").getroot().get("tests") == "4"
    assert command("baseline", "list").stdout.splitlines()[1].split() == ["nightly", "2", "4"]
    shown = json.loads(command("baseline", "show", "nightly", "--json").stdout)
    assert [(item["model"], item["mode"], item["sequences"]) for item in shown] == [
        ("ck", "greedy_search", 2),
        ("ck", "sample", 2),
    ]
    again = command("baseline", "record", "nightly", "--last", "1")
    assert (again.returncode, again.stdout) == (2, "")  # the newest was recorded with capture=digest
    assert "none of these runs can be replayed: left out: run" in again.stderr
    assert command("diff", "nightly.baseline.json").returncode == 1  # two calls with other settings


def test_another_checkpoint_in_the_same_place_is_found(work: Path, command: Command) -> None:
    assert command("baseline", "record", "nightly", "--from-tag", "nightly").returncode == 0
    one_ulp(work / "ck")
    found = command("baseline", "check", "nightly")
    assert found.returncode == 1, found.stderr
    assert found.stdout.count("weights.loaded_root: these are other weights") == 2
    assert "None of 4 sequences could be compared." in found.stdout
    another(work / "ck")
    allowed = command("baseline", "check", "nightly", "--allow", "weights", "--json", "--junit", "b.xml")
    said = json.loads(allowed.stdout)
    assert (said["told"], said["diverged"]) == (4, 4)
    assert {item["answer"]["causes"][0]["field"] for item in said["runs"]} == {"weights.loaded_root"}
    shutil.rmtree(work / "ck")
    gone = command("baseline", "check", "nightly")
    assert (gone.returncode, gone.stdout) == (2, "")
    assert "there is no checkpoint" in gone.stderr or "no model can be loaded from ck" in gone.stderr


def test_an_output_that_diverged_is_counted_and_explained(work: Path, command: Command) -> None:
    """The library samples and scores another way: a setting that was recorded is not obeyed any more."""
    assert command("baseline", "record", "nightly", "--from-tag", "nightly").returncode == 0
    (work / "mine.py").write_text(ROLLED)
    options = ("baseline", "check", "nightly", "--model", "mine:make")
    found = command(*options, "--explain", "--junit", "b.xml")
    assert found.returncode == 1, found.stdout + found.stderr
    assert "4 of 4 sequences diverged: 100 % (95 % interval 51 to 100 %)." in found.stdout
    assert "model.class" in found.stdout
    suite = ET.parse(work / "b.xml").getroot()
    assert (suite.get("tests"), suite.get("failures")) == ("4", "4")
    assert "model.class" in (suite[0][0][0].text or "")
    assert command(*options, "--fail-on", "near_tie").returncode == 0
    assert command(*options, "--fail-over", "1").returncode == 0


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("record", "x"), "name runs, or give --from-tag TAG, or --last N."),
        (("record", "x", "tag:nightly", "--last", "2"), "name runs, or give --from-tag TAG, or --last N."),
        (("record", "x", "tag:digest"), "cannot be replayed: input.token_ids: the inputs were not kept"),
        (("record", "x", "--from-tag", "none"), "there is no call with the tag or name 'none'"),
        (("record", "no/folder/x", "tag:nightly"), "there is no folder no/folder"),
        (("record", "taken", "tag:nightly"), "taken.baseline.json is there already and is no baseline"),
        (("check", "none"), "there is no baseline at none.baseline.json"),
        (("check", "taken"), "is no baseline"),
        (("check", "none", "--fail-over", "2"), "--fail-over is 2.0; write a share from 0 to 1"),
        (("list", "nowhere"), "there is no folder nowhere"),
    ],
)  # fmt: skip
def test_a_mistake_with_a_set_is_one_sentence(
    arguments: tuple[str, ...], said: str, work: Path, command: Command
) -> None:
    (work / "taken.baseline.json").write_text("{}")
    found = command("baseline", *arguments)
    assert (found.returncode, found.stdout) == (2, ""), found
    assert said in found.stderr
    assert len(found.stderr.strip().splitlines()) == 1


def test_nothing_of_a_replay_is_loaded_before_it_is_asked_for(python: Command) -> None:
    code = (
        "import sys, provenance; from provenance.cli.main import main; main(['replay', '--help'])\n"
        "assert 'provenance.replay.rerun' in sys.modules\n"
        "sys.exit(any(name in sys.modules for name in ('torch', 'transformers')))"
    )
    assert python(code).returncode == 0
    code = "import sys, provenance.cli.diff; sys.exit('provenance.replay' in sys.modules)"
    assert python(code).returncode == 0


def test_a_probe_asks_again_and_counts_as_traffic(work: Path, command: Command) -> None:
    """Every second answer to a question makes a pair; a replay makes none."""

    def pairs() -> tuple[int, int]:
        found = json.loads(command("drift", "--json").stdout)["raw"]
        return found["pairs"], found["differed"]

    counts = [pairs()]
    assert command("replay", "last").returncode in (0, 1, 3)
    assert pairs() == counts[0]
    for _ in range(2):
        asked = command("drift", "probe", "--from-tag", "nightly", "--json")
        assert asked.returncode == 0, asked.stderr
        assert [run["verdict"] for run in json.loads(asked.stdout)["runs"]] == ["same", "same"]
        counts.append(pairs())
    assert counts[2] == (counts[0][0] + 4, 0)  # two questions of two rows
    assert json.loads(command("sql", "--json", "select count(*) n from runs where kind='probe'").stdout) == [{"n": 4}]
    assert command("drift", "probe", "nothing", "--from-tag", "nightly").returncode == 2


def test_a_probe_finds_what_moved(work: Path, command: Command) -> None:
    (work / "mine.py").write_text(ROLLED)
    asked = command("drift", "probe", "--from-tag", "nightly", "--model", "mine:make")
    assert asked.returncode == 1, asked.stdout
    assert "4 of 4 sequences diverged" in asked.stdout
    another(work / "ck")
    asked = command("drift", "probe", "--from-tag", "nightly", "--allow", "weights")
    assert asked.returncode == 0, "it is the sole cause, and allowed"
    assert "4 of 4 sequences diverged" in asked.stdout
