"""env diff, lock and check, as people and CI use them: on this machine, a checkpoint and recorded runs."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from safetensors.torch import load_file, save_file

from provenance.determinism import lock as locks
from provenance.fingerprint import checkpoint
from tests.conftest import ROOT, Command
from tests.fakes import models

TINY = ROOT / "provenance" / "data" / "tiny"


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    place = tmp_path / "work"
    place.mkdir()
    monkeypatch.chdir(place)
    return place


def test_a_lock_holds_on_its_machine_and_names_what_moved(command: Command, folder: Path) -> None:
    assert command("lock").returncode == 0
    text = (folder / "provenance.lock").read_text()
    assert '"cpu.model" = ' in text
    assert str(folder) not in text
    held = command("check")
    assert held.returncode == 0, held.stdout
    assert re.fullmatch(r"no fields that can act differ; \d+ are equal\.\n", held.stdout), held.stdout
    moved = command("check", "--json", "--junit", "c.xml", env={**os.environ, "OMP_NUM_THREADS": "1"})
    drift = {item["field"] for item in json.loads(moved.stdout)["drift"]}
    assert moved.returncode == 1
    assert {"env.OMP_NUM_THREADS", "torch.num_threads"} <= drift <= {
        "env.OMP_NUM_THREADS", "torch.num_threads", "mkl.num_threads", "loaded.openmp.runtime", "torch.num_interop_threads",
    }  # fmt: skip
    suite = ET.parse(folder / "c.xml").getroot()[0]
    assert (suite.get("name"), suite.get("failures"), suite.get("errors")) == ("provenance check", str(len(drift)), "0")
    assert {case.get("name") for case in suite} == {*drift, "what held"}
    assert "env.OMP_NUM_THREADS was " in "".join(suite.itertext())
    allowed = command(
        "check", *(f"--allow={name}" for name in sorted(drift)), env={**os.environ, "OMP_NUM_THREADS": "1"}
    )
    assert allowed.returncode == 0
    assert "numeric, allowed" in allowed.stdout


def test_two_locks_of_one_machine_are_equal_to_the_byte(command: Command, folder: Path) -> None:
    command("lock", "--lock", "a.lock")
    command("lock", "--lock", "b.lock")
    assert (folder / "a.lock").read_bytes() == (folder / "b.lock").read_bytes()


def test_half_a_lock_is_refused(command: Command, folder: Path) -> None:
    path = folder / "provenance.lock"
    command("lock")
    text = path.read_text()
    for changed in (text[: len(text) // 2], text.replace('"cpu.', '"cpu.x', 1)):
        path.write_text(changed)
        said = command("check")
        assert (said.returncode, said.stdout) == (2, "")
        assert re.match(
            r"provenance: provenance\.lock (is not a lock, or is cut|is cut|was edited by hand): ", said.stderr
        )
    assert command("lock").returncode == 0
    assert command("check").returncode == 0


def test_a_locked_checkpoint_is_hashed_again(command: Command, folder: Path) -> None:
    model = folder / "model"
    shutil.copytree(TINY, model)
    assert command("lock", "--model", "model").returncode == 0
    assert command("check").returncode == 0
    config = model / "generation_config.json"
    config.write_text(config.read_text() + " ")
    moved = command("check")
    assert moved.returncode == 1
    assert "files.generation_config.json" in moved.stdout
    assert "weights.files_root" not in moved.stdout
    weights = model / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[-1] ^= 1
    weights.write_bytes(data)
    assert "weights.files_root" in command("check").stdout
    shutil.rmtree(model)
    gone = command("check")
    assert (gone.returncode, "is not here; name it with --model PATH" in gone.stderr) == (2, True)


def test_the_same_tensors_in_other_files_are_no_drift(command: Command, folder: Path) -> None:
    models.llama().save_pretrained(folder / "a")
    models.llama().save_pretrained(folder / "b", max_shard_size="20KB")
    models.llama().save_pretrained(folder / "c")
    for name in ("training_args.bin", "optimizer.pt", "scheduler.pt", "rng_state.pth", "rng_state_1.pth"):
        (folder / "c" / name).write_bytes(name.encode())
    models.llama().save_pretrained(folder / "d")
    place = folder / "d" / "model.safetensors"
    save_file(load_file(place), place, {"format": "pt", "note": "another header"})
    place.rename(folder / "d" / "model-renamed.safetensors")
    assert command("lock", "--model", "a").returncode == 0
    for name in ("b", "d"):
        found = command("check", "--model", name)
        assert found.returncode == 0, found.stdout
        assert found.stdout.splitlines()[0] == "weights.files_root: other files, the same tensors; no drift."
        form = json.loads(command("check", "--model", name, "--json").stdout)
        assert [item["field"] for item in form["same_tensors"]] == ["weights.files_root"]
    same = command("check", "--model", "c")
    assert (same.returncode, "other files" in same.stdout) == (0, False)


def test_other_tensors_and_what_cannot_be_looked_into_are_drift(command: Command, folder: Path) -> None:
    models.llama().save_pretrained(folder / "a")
    assert command("lock", "--model", "a").returncode == 0
    models.llama(23).save_pretrained(folder / "b", max_shard_size="20KB")
    models.llama().save_pretrained(folder / "c", max_shard_size="20KB")
    (folder / "c" / "pytorch_model.bin").write_bytes(b"who knows")
    models.llama().save_pretrained(folder / "d")
    save_file({"x": models.llama().lm_head.weight.detach().clone()}, folder / "d" / "adapter_model.safetensors")
    for name in ("b", "c", "d"):
        found = command("check", "--model", name)
        assert (found.returncode, "weights.files_root" in found.stdout) == (1, True), found.stdout
        assert "the same tensors" not in found.stdout


def test_a_lock_that_holds_no_digest_of_tensors_is_compared_by_files(folder: Path, command: Command) -> None:
    models.llama().save_pretrained(folder / "a")
    fields = {item.name: item for item in checkpoint.fields(folder / "a") if item.name != "weights.tensors_root"}
    (folder / "provenance.lock").write_text(locks.dumps(fields, {"from": "machine"}))
    assert command("check", "--model", "a").returncode == 0
    models.llama().save_pretrained(folder / "b", max_shard_size="20KB")
    moved = command("check", "--model", "b", "--json")
    assert [item["field"] for item in json.loads(moved.stdout)["drift"]] == ["weights.files_root"]


RUNS = """
import torch, provenance
from transformers import AutoModelForCausalLM, AutoTokenizer
import sys
place, tokens, kind = sys.argv[1:]
tokenizer = AutoTokenizer.from_pretrained(place)
model = AutoModelForCausalLM.from_pretrained(place, dtype=getattr(torch, kind))
provenance.wrap(model, tokenizer=tokenizer)
model.generate(**tokenizer("Once", return_tensors="pt"), max_new_tokens=int(tokens), do_sample=False, pad_token_id=0)
provenance.flush()
"""


def test_a_recorded_run_can_be_held_and_compared(command: Command, python: Command, folder: Path) -> None:
    for tokens, kind in (("3", "float32"), ("3", "float32"), ("5", "bfloat16")):
        done = python(RUNS, str(TINY), tokens, kind)
        assert done.returncode == 0, done.stderr
    assert command("lock", "--run", "last~2").returncode == 0
    assert command("check", "--run", "last~1").returncode == 0
    moved = command("check", "--run", "last", "--json")
    drift = {item["field"]: item for item in json.loads(moved.stdout)["drift"]}
    assert moved.returncode == 1
    assert {"model.dtype", "weights.loaded_root", "generation.max_new_tokens"} <= set(drift)
    assert drift["model.dtype"]["a"] == "float32"
    live = command("check")
    assert (live.returncode, "compare it with one" in live.stderr) == (2, True)
    assert command("env", "diff", "last", "last~1").returncode == 0


def test_a_run_of_this_machine_differs_in_nothing_from_here(command: Command, python: Command, folder: Path) -> None:
    """A run had loaded the compiler and a tokenizer, and the process here has not: that is no difference."""
    done = python(RUNS, str(TINY), "3", "float32")
    assert done.returncode == 0, done.stderr
    assert command("lock").returncode == 0
    assert command("lock", "--run", "last", "--lock", "run.lock").returncode == 0
    for arguments in (["env", "diff", "last", "here"], ["env", "diff", "here", "last"], ["check", "--run", "last"],
                      ["env", "diff", "run.lock", "here"]):  # fmt: skip
        found = command(*arguments)
        assert found.returncode == 0, found.stdout
        assert len(found.stdout.splitlines()) == 1, found.stdout
        assert found.stdout.startswith("no fields that can act differ; "), found.stdout
        assert "could not be compared here (--all lists them)" in found.stdout
    listed = command("env", "diff", "last", "here", "--all").stdout
    assert "torch.inductor.max_autotune" in listed
    assert "the compiler is not loaded in B" in listed
    form = json.loads(command("env", "diff", "last", "here", "--json").stdout)
    assert {"field": "device.in_use", "because": "not recorded in B"} in form["open"]
    moved = command("env", "diff", "last", "here", "--json", env={**os.environ, "OMP_NUM_THREADS": "1"})
    assert moved.returncode == 1
    assert "env.OMP_NUM_THREADS" in {item["field"] for item in json.loads(moved.stdout)["drift"]}


def test_environments_of_two_dates_are_compared(command: Command, folder: Path) -> None:
    (folder / "a.json").write_text(command("env", "--json").stdout)
    here = command("env", "diff", "a.json")
    assert here.returncode == 0, here.stdout
    other = command("env", "--json", env={**os.environ, "ATEN_CPU_CAPABILITY": "default"})
    (folder / "b.json").write_text(other.stdout)
    found = command("env", "diff", "a.json", "b.json")
    assert found.returncode == 1
    rows = {line.split()[1] for line in found.stdout.splitlines() if line.startswith("numeric")}
    assert rows == {"cpu.capability", "env.ATEN_CPU_CAPABILITY"}


def _refused(said: "subprocess.CompletedProcess[str]", sentence: str) -> None:
    """Hold a command to one sentence on standard error and nothing else."""
    assert (said.returncode, said.stdout) == (2, ""), said.stdout
    assert sentence in said.stderr
    assert len(said.stderr.strip().splitlines()) == 1


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["check"], "there is no lock at provenance.lock. `provenance lock` writes one."),
        (["lock", "--lock", "none/x.lock"], "there is no folder none"),
        (["lock", "--lock", "empty"], "empty is a folder; name the file, as in --lock empty/provenance.lock."),
        (["lock", "--lock", "broken.json"], "broken.json is there already and is no lock; move it away"),
        (["lock", "--lock", "/dev/full"], "/dev/full is there already and is no lock"),
        (["lock", "--lock", "broken.json/x"], "there is no folder broken.json"),
        (["lock", "--model", "nowhere"], "there is no checkpoint at nowhere."),
        (["lock", "--run", "last", "--model", "."], "give --run or --model"),
        (["env", "diff", "nothing.json"], "there is no file nothing.json"),
        (["env", "diff", "broken.json"], "broken.json is not JSON"),
        (["env", "diff", "list.json"], "is neither an environment nor a run"),
        (["lock", "--model", "empty"], "holds no weight files"),
    ],
)
def test_mistakes_are_one_sentence(command: Command, folder: Path, arguments: list[str], sentence: str) -> None:
    (folder / "broken.json").write_text("{")
    (folder / "list.json").write_text('{"schema": "provenance/env/1"}')
    (folder / "empty").mkdir()
    _refused(command(*arguments), sentence)


@pytest.mark.skipif(os.geteuid() != 0 or shutil.which("setpriv") is None, reason="takes a right of root away")
def test_what_may_not_be_read_or_written_is_one_sentence(folder: Path) -> None:
    for name in ("shut", "full"):
        (folder / name).mkdir()
    shutil.copytree(TINY, folder / "model")
    for name, mode in (("shut", 0), ("full", 0o555), ("model/model.safetensors", 0)):
        (folder / name).chmod(mode)
    weak = ["setpriv", "--bounding-set=-dac_override,-dac_read_search", sys.executable, "-m", "provenance"]
    for arguments, sentence in (
        (["lock", "--lock", "full/x.lock"], "full/x.lock cannot be written: Permission denied; choose another --lock."),
        (["lock", "--lock", "shut/x.lock"], "shut/x.lock cannot be used: Permission denied"),
        (["lock", "--model", "model"], "model cannot be locked: Permission denied: 'model/model.safetensors'."),
        (["lock", "--model", "shut/x"], "shut/x cannot be used: Permission denied."),
        (["check", "--lock", "shut/x.lock"], "shut/x.lock cannot be used: Permission denied."),
        (["env", "diff", "shut/x.json"], "shut/x.json cannot be used: Permission denied."),
        (["log", "--db", "shut/x.db"], "shut/x.db cannot be used: Permission denied."),
    ):
        _refused(subprocess.run([*weak, *arguments], capture_output=True, text=True, check=False), sentence)
