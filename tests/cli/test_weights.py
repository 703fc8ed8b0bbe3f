"""weights: what differs between runs, files, checkpoints and roots, and the digests of files."""

import hashlib
import json
import os
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers import LlamaForCausalLM

import provenance
from provenance.cli.weights import NOT_SEEN
from provenance.fingerprint import weights
from tests.conftest import Command
from tests.fakes import models

FORMAT = {"format": "pt"}


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Save a tiny Llama in one file."""
    models.llama().save_pretrained(tmp_path / "tiny")
    return tmp_path / "tiny"


def _edited(folder: Path, target: Path) -> Path:
    """Save it again with one number moved by one unit in the last place, and one tensor in another type."""
    tensors = load_file(folder / "model.safetensors")
    moved = tensors["model.layers.1.mlp.up_proj.weight"]
    moved[3, 5] = torch.nextafter(moved[3, 5], torch.tensor(9.0))
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.bfloat16)
    save_file(tensors, target, FORMAT)
    return target


def _say(model: Any) -> Any:
    return provenance.wrap(model).generate(models.tensor(), max_new_tokens=2)


def test_files_and_folders_are_compared_tensor_by_tensor(saved: Path, tmp_path: Path, command: Command) -> None:
    models.llama().save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    same = command("weights", "diff", str(saved), str(tmp_path / "shards"))
    assert (same.returncode, same.stdout) == (0, "21 tensors are the same.\n")
    other = _edited(saved, tmp_path / "other.safetensors")
    found = command("weights", "diff", str(saved / "model.safetensors"), str(other))
    assert found.returncode == 1
    first, *lines = found.stdout.splitlines()
    names = "model.layers.1.mlp.up_proj.weight, model.norm.weight"
    assert first == f"2 of 21 tensors differ: {names}; 1 changed dtype."
    assert lines[0].startswith("  model.layers.1.mlp.up_proj.weight: float32 [48, 32], ")
    assert lines[1] == "  model.norm.weight: float32 -> bfloat16"
    assert found.stderr == ""


def test_the_same_as_json(saved: Path, tmp_path: Path, command: Command) -> None:
    tensors = load_file(saved / "model.safetensors")
    tensors["extra"] = torch.ones(2)
    tensors["lm_head.weight"] = tensors["lm_head.weight"].reshape(32, 64)
    del tensors["model.norm.weight"]
    save_file(tensors, tmp_path / "other.safetensors")
    said = command("weights", "diff", str(saved), str(tmp_path / "other.safetensors"), "--json")
    found = json.loads(said.stdout)
    assert said.returncode == 1
    assert found["schema"] == "provenance/weights-diff/1"
    assert (found["equal"], found["shared"], found["a"]["entries"]) == (False, 20, 21)
    assert (found["only_a"], found["only_b"]) == (["model.norm.weight"], ["extra"])
    assert found["shape_changed"] == ["lm_head.weight"] == [item["name"] for item in found["differing"]]
    assert found["differing"][0]["b"]["shape"] == [32, 64]


def test_runs_roots_and_files_are_compared_in_any_mixture(saved: Path, db: Path, command: Command) -> None:
    provenance.init(writer="off")
    model = LlamaForCausalLM.from_pretrained(saved)
    _say(model)
    model.lm_head.weight.data.mul_(1.5)
    model.lm_head.weight = torch.nn.Parameter(model.lm_head.weight.detach().clone())
    _say(model)
    assert provenance.flush()
    same = command("weights", "diff", "last~1", str(saved))
    assert same.returncode == 0, same.stderr
    assert same.stdout.splitlines() == [
        "21 tensors are the same.",
        "  not counted, for no file holds them: 2 names in memory alone: buffers, or second names of tied tensors",
        f"  the tensors of last~1 are those of its load, hashed once: {NOT_SEEN}",
    ]
    told = json.loads(command("weights", "diff", "last~1", str(saved), "--json").stdout)
    assert told["a"]["not_seen"] == NOT_SEEN  # of what lay in memory
    assert told["b"]["not_seen"] is None  # a file was read now
    for pair in (("last~1", "last"), ("last", str(saved)), (weights.of_tensors(model).root, "last~1")):
        found = command("weights", "diff", *pair)
        assert found.returncode == 1, found.stderr
        assert "1 of 2" in found.stdout.splitlines()[0]
        assert "tensors differ: lm_head.weight." in found.stdout.splitlines()[0]
    assert command("weights", "diff", weights.of_tensors(model).root[:24], "last").returncode == 0


def test_a_run_whose_weights_are_not_known_says_why_and_ends_with_3(saved: Path, db: Path, command: Command) -> None:
    provenance.init(writer="off", weights="off")
    _say(models.llama())

    @provenance.record
    def answer(question: str) -> str:
        return question

    answer("why")
    provenance.flush()
    found = command("weights", "diff", "last~1", str(saved))
    assert (found.returncode, found.stdout) == (3, "")
    assert found.stderr == "provenance: the weights of run last~1 are not known: hashing is off (weights=off).\n"
    found = command("weights", "diff", "last", str(saved))
    assert found.returncode == 3
    assert "the call ran on no model whose tensors can be seen" in found.stderr


def test_a_run_known_by_its_files_alone_is_compared_by_files(saved: Path, db: Path, command: Command) -> None:
    provenance.init(writer="off", weights="files")
    _say(LlamaForCausalLM.from_pretrained(saved))
    provenance.flush()
    same = command("weights", "diff", "last", str(saved))
    assert (same.returncode, same.stdout) == (0, "1 files are the same.\n"), same.stderr
    assert command("weights", "diff", "last", "last").returncode == 0


def test_runs_known_by_other_files_with_the_same_tensors_are_told_apart_in_nothing(
    saved: Path, db: Path, tmp_path: Path, command: Command
) -> None:
    models.llama().save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    provenance.init(writer="off", weights="files")
    for place, count in ((saved, 2), (tmp_path / "shards", 4)):
        model = provenance.wrap(LlamaForCausalLM.from_pretrained(place))
        for _ in range(2):
            model.generate(models.tensor(), max_new_tokens=count, do_sample=False)
            provenance.flush()
    one, _, other, _ = models.runs(db)
    assert one.fields["weights.files_root"] != other.fields["weights.files_root"]
    found = json.loads(command("diff", "last~2", "last", "--json").stdout)
    assert "other files, the same tensors" in json.dumps(found["dismissed"])


def test_an_exported_run_needs_a_store_that_holds_its_manifest(
    saved: Path, db: Path, tmp_path: Path, command: Command
) -> None:
    provenance.init(writer="off")
    _say(models.llama())
    provenance.flush()
    exported = tmp_path / "run.json"
    exported.write_text(command("show", "last", "--json").stdout)
    assert command("weights", "diff", str(exported), str(saved)).returncode == 0
    empty = tmp_path / "empty.db"
    command("db", "upgrade", "--db", str(empty))
    found = command("weights", "diff", str(exported), str(saved), "--db", str(empty))
    assert found.returncode == 3
    assert "this store holds no manifest whose root begins p1:sha256:" in found.stderr


@pytest.mark.parametrize(
    ("reference", "reason"),
    [
        ("absent.safetensors", "there is no file or folder absent.safetensors."),
        ("./absent", "there is no file or folder ./absent."),
        ("rubbish.safetensors", "rubbish.safetensors cannot be hashed: rubbish.safetensors is no safetensors file"),
        ("empty", "empty cannot be hashed: empty holds no weight files."),
        ("p1:sha256:00", "this store holds no manifest whose root begins p1:sha256:00."),
        ("ffff", "no run begins with 'ffff'"),
    ],
)
def test_what_is_neither_run_nor_file_nor_root_says_so(
    reference: str, reason: str, saved: Path, tmp_path: Path, command: Command
) -> None:
    command("db", "upgrade")
    (tmp_path / "rubbish.safetensors").write_bytes(b"\x80\x04rubbish.")
    (tmp_path / "empty").mkdir()
    found = command("weights", "diff", str(saved), reference, cwd=tmp_path)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith(f"provenance: {reason}")
    assert found.stderr.count("\n") == 1


def test_whole_files_and_tensors_cannot_be_told(saved: Path, tmp_path: Path, command: Command) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    found = command("weights", "diff", str(tmp_path / "x.gguf"), str(saved))
    assert found.returncode == 3
    assert "cannot be compared: A is known by whole files alone and B by tensors." in found.stderr
    assert command("weights", "diff", str(tmp_path / "x.gguf"), str(tmp_path / "x.gguf")).returncode == 0


def test_many_differences_are_cut_and_listed_on_request(saved: Path, tmp_path: Path, command: Command) -> None:
    tensors = {name: tensor + 1 for name, tensor in load_file(saved / "model.safetensors").items()}
    save_file(tensors, tmp_path / "other.safetensors")
    pair = (str(saved), str(tmp_path / "other.safetensors"))
    assert "  and 1 more; --all lists them" in command("weights", "diff", *pair).stdout
    said = command("weights", "diff", *pair, "--all").stdout
    assert said.count("\n") == 22
    assert "--all" not in said


# -- hash -------------------------------------------------------------------------------------------


def test_a_checkpoint_is_hashed_file_by_file_under_one_root(saved: Path, tmp_path: Path, command: Command) -> None:
    models.llama().save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    whole, shards = (
        json.loads(command("weights", "hash", str(p), "--json").stdout) for p in (saved, tmp_path / "shards")
    )
    assert whole["root"] == shards["root"]
    assert whole["schema"] == "provenance/weights-hash/1"
    assert [item["tensors"] for item in whole["files"]] == [21]
    assert sum(item["tensors"] for item in shards["files"]) == 21
    assert {item["sha256"] for item in shards["files"]} == {None}
    said = command("weights", "hash", str(saved), "--sha256")
    sha256 = hashlib.sha256((saved / "model.safetensors").read_bytes()).hexdigest()
    assert said.returncode == 0
    assert said.stdout.splitlines()[0].startswith(whole["root"] + "  21 entries")
    assert f"  file sha256:{sha256}" in said.stdout
    assert said.stderr == ""


def test_a_file_without_tensors_is_hashed_whole(tmp_path: Path, command: Command) -> None:
    (tmp_path / "x.gguf").write_bytes(b"GGUF")
    said = command("weights", "hash", str(tmp_path / "x.gguf"))
    assert f"  file sha256:{hashlib.sha256(b'GGUF').hexdigest()}" in said.stdout


def test_what_the_hub_s_cache_names_is_marked_and_read_on_request(tmp_path: Path, command: Command) -> None:
    false = "a" * 64
    blobs, snapshot = tmp_path / "models--a--b" / "blobs", tmp_path / "models--a--b" / "snapshots" / ("c" * 40)
    blobs.mkdir(parents=True)
    snapshot.mkdir(parents=True)
    (blobs / false).write_bytes(b"other bytes than the name says")
    (snapshot / "x.bin").symlink_to(f"../../blobs/{false}")
    said = command("weights", "hash", str(snapshot))
    assert f"sha256:{false} (its name in the cache of the hub; --check reads it)" in said.stdout
    said = command("weights", "hash", str(snapshot), "--check")
    assert hashlib.sha256(b"other bytes than the name says").hexdigest() in said.stdout
    assert false not in said.stdout


@pytest.mark.skipif(not hasattr(os, "openpty"), reason="needs a terminal")
def test_long_work_shows_a_line_on_a_terminal_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from provenance.cli import weights as commands

    primary, secondary = os.openpty()
    with os.fdopen(secondary, "w") as terminal, os.fdopen(primary, "rb", buffering=0) as seen:
        monkeypatch.setattr("sys.stderr", terminal)
        progress = commands.Progress(2_000_000_000)
        progress(1000)
        progress.began -= 1.0
        progress.told = progress.began
        progress(1_000_000_000)
        assert b"hashing: 1.00 of 2.00 GB" in seen.read(4096)
        progress.end()
        assert seen.read(4096) == b"\r\x1b[K"


@pytest.mark.parametrize("path", ["absent", "rubbish.safetensors", "~nobody-of-this-name/x", "x" * 300])
def test_what_cannot_be_hashed_says_so(path: str, tmp_path: Path, command: Command) -> None:
    (tmp_path / "rubbish.safetensors").write_bytes(b"rubbish")
    found = command("weights", "hash", path, cwd=tmp_path)
    assert (found.returncode, found.stdout) == (2, "")
    assert found.stderr.startswith("provenance: ")
    assert "Traceback" not in found.stderr
