"""Files of a checkpoint: hashed as bytes, on every core, once; never unpickled, and noticed when they change."""

import gc
import hashlib
import os
import pickle
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from provenance.fingerprint import files, weights
from provenance.fingerprint.files import CHUNK
from provenance.fingerprint.reading import Missing
from tests.fakes import models


def _never() -> bool:
    return False


def _old(*paths: Path) -> None:
    """Make files look as if nobody had touched them lately. Their ctime cannot be set: it is waited for."""
    for path in paths:
        os.utime(path, (1e9, 1e9))


# -- files ------------------------------------------------------------------------------------------


def _file_sha(path: Path) -> str:
    return hashlib.sha256(path.read_bytes()).hexdigest()


def test_files_are_hashed_as_bytes_and_others_are_left_out(tmp_path: Path) -> None:
    save_file({"w": torch.arange(6.0)}, tmp_path / "model.safetensors")
    (tmp_path / "model.safetensors.index.json").write_text("{}")
    (tmp_path / "config.json").write_text("{}")
    (tmp_path / "notes.bin.txt").write_text("not a weight")
    (tmp_path / "folder.bin").mkdir()
    manifest, how = files.of_files(tmp_path, _never)
    assert how == "hashed"
    assert manifest.kind == "files"
    assert [(entry.name, entry.sha256) for entry in manifest.entries] == [
        (name, _file_sha(tmp_path / name)) for name in ("model.safetensors", "model.safetensors.index.json")
    ]


def test_one_file_is_a_checkpoint_too(tmp_path: Path) -> None:
    path = tmp_path / "tiny.gguf"
    path.write_bytes(os.urandom(CHUNK + 17))
    (entry,) = files.of_files(path, _never)[0].entries
    assert (entry.name, entry.size, entry.sha256) == ("tiny.gguf", CHUNK + 17, _file_sha(path))


class Trap:
    """Whoever unpickles this makes a file."""

    def __init__(self, path: str) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return (open, (self.path, "w"))


def test_no_file_is_ever_unpickled(tmp_path: Path) -> None:
    sprung = tmp_path / "sprung"
    trap = pickle.dumps(Trap(str(sprung)))
    pickle.loads(trap).close()
    assert sprung.exists()
    sprung.unlink()
    folder = tmp_path / "checkpoint"
    folder.mkdir()
    for name in ("pytorch_model.bin", "model.pt", "model.pth", "x.safetensors"):
        (folder / name).write_bytes(trap)
    assert len(files.of_files(folder, _never)[0].entries) == 4
    gc.collect()
    assert not sprung.exists()


def test_a_file_that_changes_while_it_is_hashed_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(CHUNK * 2))
    os.utime(path, (1e9, 1e9))

    def change() -> bool:
        with path.open("r+b") as file:
            file.write(b"other")
        return False

    with pytest.raises(Missing, match=r"model.safetensors changed while it was hashed"):
        files.of_files(tmp_path, change)


def test_a_file_swapped_for_another_is_hashed_as_the_one_that_was_opened_or_not_at_all(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    path.write_bytes(bytes(CHUNK * 2))
    expected = _file_sha(path)

    def swap() -> bool:
        other = tmp_path / "draft"
        other.write_bytes(os.urandom(CHUNK * 2))
        other.replace(path)
        return False

    with suppress(Missing):  # where the system notes at once that the file lost its name
        (entry,) = files.of_files(tmp_path, swap).entries
        assert entry.sha256 == expected


def test_hashing_files_stops_when_it_is_told_to(tmp_path: Path) -> None:
    (tmp_path / "model.bin").write_bytes(bytes(CHUNK * 3))
    with pytest.raises(weights.Stopped):
        files.of_files(tmp_path, lambda: True)


def test_a_folder_without_weights_says_so(tmp_path: Path) -> None:
    with pytest.raises(Missing, match="the checkpoint's folder holds no weight files"):
        files.of_files(tmp_path, _never)


# -- where a model came from ------------------------------------------------------------------------


def test_the_checkpoint_is_the_folder_that_the_model_names(tmp_path: Path) -> None:
    model = models.llama()
    model.config._name_or_path = str(tmp_path)
    assert files.checkpoint(model, {}) == tmp_path


@pytest.mark.parametrize("variable", ["HF_HUB_CACHE", "HF_HOME", None])
def test_the_checkpoint_is_found_in_the_cache_of_the_hub(variable: str | None, tmp_path: Path, home: Path) -> None:
    cache = {"HF_HUB_CACHE": tmp_path, "HF_HOME": tmp_path / "hub", None: home / ".cache" / "huggingface" / "hub"}
    folder = cache[variable] / "models--some--tiny" / "snapshots" / "abc123"
    folder.mkdir(parents=True)
    model = models.llama()
    model.config._name_or_path, model.config._commit_hash = "some/tiny", "abc123"
    assert files.checkpoint(model, {variable: str(tmp_path)} if variable else {}) == folder


@pytest.mark.parametrize(
    ("name", "commit", "reason"),
    [
        ("", None, "the model was not loaded from files"),
        ("some/absent", "abc123", "the files of some/absent are not in the cache"),
        ("some/absent", None, "the files of some/absent are not in the cache"),
    ],
)
def test_a_checkpoint_that_is_not_here_says_why(name: str, commit: str | None, reason: str) -> None:
    model = models.llama()
    model.config._name_or_path, model.config._commit_hash = name, commit
    with pytest.raises(Missing, match=reason):
        files.checkpoint(model, {})
