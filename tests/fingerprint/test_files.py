"""Files of a checkpoint: hashed as bytes, on every core, once; never unpickled, and noticed when they change."""

import gc
import hashlib
import json
import os
import pickle
import threading
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from provenance.fingerprint import files, weights
from provenance.fingerprint.cache import Cache, Look
from provenance.fingerprint.files import CHUNK, Hasher
from provenance.fingerprint.reading import Missing
from tests.fakes import models


def _never() -> bool:
    return False


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let files that were just made count as settled: a ctime cannot be set."""
    monkeypatch.setattr(Look, "settled", lambda *_: True)


def _header(table: object, data: bytes = b"", length: int | None = None) -> bytes:
    head = table if isinstance(table, bytes) else json.dumps(table).encode()
    return (len(head) if length is None else length).to_bytes(8, "little") + head + data


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
        (entry,) = files.of_files(tmp_path, swap)[0].entries
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


def test_of_several_revisions_in_the_cache_none_is_guessed(home: Path) -> None:
    model = models.llama()
    model.config._name_or_path = "some/tiny"
    snapshots = home / ".cache" / "huggingface" / "hub" / "models--some--tiny" / "snapshots"
    for commit in ("a" * 40, "b" * 40):
        (snapshots / commit).mkdir(parents=True)
    (snapshots / ("a" * 40) / "model.safetensors").touch()
    assert files.checkpoint(model, {}) == snapshots / ("a" * 40)
    (snapshots / ("b" * 40) / "model.safetensors").touch()
    with pytest.raises(Missing, match="keeps no revision, and the cache holds 2 revisions of some/tiny"):
        files.checkpoint(model, {})


# -- tensors ----------------------------------------------------------------------------------------


TENSORS = {
    "a.weight": torch.arange(6.0).reshape(2, 3), "b.weight": torch.arange(7, dtype=torch.bfloat16),
    "c.empty": torch.empty(0, 4), "d.long": torch.arange(CHUNK, dtype=torch.int16), "e.flag": torch.tensor([True, False]),
    "f.eight": torch.arange(8.0).to(torch.float8_e4m3fn),
}  # fmt: skip


@pytest.mark.parametrize("workers", [1, 2, 5])
def test_every_tensor_of_a_file_has_the_digest_that_it_has_in_memory(workers: int, tmp_path: Path) -> None:
    save_file(TENSORS, tmp_path / "model.safetensors")
    found = Hasher(workers=workers).tensors(tmp_path)
    expected = [weights.entry("tensor", name, tensor, {}, _never) for name, tensor in TENSORS.items()]
    assert sorted(found.entries) == sorted(expected)


def _sharded(folder: Path, shards: dict[str, list[str]]) -> Path:
    folder.mkdir()
    for file, names in shards.items():
        save_file({name: TENSORS[name] for name in names}, folder / file)
    index = {"metadata": {}, "weight_map": {name: file for file, names in shards.items() for name in names}}
    (folder / files.INDEX).write_text(json.dumps(index))
    return folder


def test_the_root_is_the_same_in_one_file_in_shards_and_in_any_order(tmp_path: Path) -> None:
    names = list(TENSORS)
    save_file(TENSORS, tmp_path / "whole.safetensors", {"format": "pt"})
    save_file(dict(reversed(TENSORS.items())), tmp_path / "turned.safetensors")
    two = _sharded(tmp_path / "two", {"x-1.safetensors": names[:2], "x-2.safetensors": names[2:]})
    other = _sharded(tmp_path / "other", {"z.safetensors": names[1:], "y.safetensors": names[:1]})
    hasher = Hasher(workers=2)
    places = (tmp_path / "whole.safetensors", tmp_path / "turned.safetensors", two, two / files.INDEX, other)
    assert len({hasher.tensors(place).root for place in places}) == 1


def test_the_loader_s_choice_of_files_is_followed(tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "model.safetensors")
    save_file({"w": torch.zeros(2)}, tmp_path / "consolidated.safetensors")
    (tmp_path / "pytorch_model.bin").write_bytes(b"x")
    (entry,) = Hasher().tensors(tmp_path).entries
    assert entry.sha256 == hashlib.sha256(torch.ones(2).numpy().tobytes()).hexdigest()
    (tmp_path / "model.safetensors").unlink()
    (tmp_path / "consolidated.safetensors").unlink()
    (entry,) = Hasher().tensors(tmp_path).entries
    assert (entry.kind, entry.name, entry.sha256) == ("file", "pytorch_model.bin", hashlib.sha256(b"x").hexdigest())


def test_a_tensor_in_two_files_is_no_checkpoint(tmp_path: Path) -> None:
    for name in ("one", "two"):
        save_file({"w": torch.ones(2)}, tmp_path / f"{name}.safetensors")
    with pytest.raises(Missing, match=r"two files of .* hold the tensor 'w'; name one of the files"):
        Hasher().tensors(tmp_path)


W = {"dtype": "F32", "shape": [1], "data_offsets": [0, 4]}
BAD: dict[str, tuple[bytes, str]] = {
    "empty": (b"", "has no header"),
    "short": (b"\x08", "has no header"),
    "a header longer than the file": (_header({"w": W}, bytes(4), 1 << 40), "has no header"),
    "no JSON": (_header(b"\x80\x04.."), "header cannot be read"),
    "a list": (_header([1]), "header cannot be read"),
    "no offsets": (_header({"w": {"dtype": "F32", "shape": [1]}}), "header cannot be read"),
    "offsets that are text": (_header({"w": {**W, "data_offsets": ["0", "4"]}}, bytes(4)), "header cannot be read"),
    "backwards": (_header({"w": {**W, "data_offsets": [4, 0]}}, bytes(4)), "header cannot be read"),
    "below zero": (_header({"w": {**W, "shape": [-1]}}, bytes(4)), "header cannot be read"),
    "bytes that do not fit the shape": (_header({"w": {**W, "shape": [2]}}, bytes(4)), "header cannot be read"),
    "beyond the end": (_header({"w": W}, bytes(3)), "do not fill it"),
    "bytes that no tensor owns": (_header({"w": W}, bytes(5)), "do not fill it"),
    "two tensors in one place": (_header({"w": W, "v": W}, bytes(4)), "do not fill it"),
}


@pytest.mark.parametrize("name", sorted(BAD))
def test_a_file_that_is_no_safetensors_file_says_so(name: str, tmp_path: Path) -> None:
    content, reason = BAD[name]
    (tmp_path / "x.safetensors").write_bytes(content)
    with pytest.raises(Missing, match=f"^x.safetensors .*{reason}"):
        Hasher().tensors(tmp_path / "x.safetensors")


@pytest.mark.parametrize(
    ("index", "reason"),
    [
        (b"{", "cannot be used"),
        (b"[]", "cannot be used"),
        (b'{"weight_map": {"w": "../x.safetensors"}}', "no safetensors file beside it"),
        (b'{"weight_map": {"w": "x.bin"}}', "no safetensors file beside it"),
        (b'{"weight_map": {"w": "absent.safetensors"}}', "names absent.safetensors, which is not beside it"),
        (b'{"weight_map": {"v": "x.safetensors"}}', "takes 'v' from x.safetensors, which does not hold it"),
    ],
)
def test_an_index_that_cannot_be_followed_says_so(index: bytes, reason: str, tmp_path: Path) -> None:
    save_file({"w": torch.ones(2)}, tmp_path / "x.safetensors")
    (tmp_path / files.INDEX).write_bytes(index)
    with pytest.raises(Missing, match=reason):
        Hasher().tensors(tmp_path)


@pytest.mark.parametrize("workers", [1, 3])
def test_hashing_tensors_stops_and_notices_a_change(workers: int, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({name: torch.zeros(CHUNK) for name in "abcd"}, path)
    os.utime(path, (1e9, 1e9))
    with pytest.raises(weights.Stopped):
        Hasher(workers=workers, stop=lambda: True).tensors(path)

    def change(_: int) -> None:
        os.utime(path)

    with pytest.raises(Missing, match=r"model.safetensors changed while it was hashed"):
        Hasher(workers=workers, told=change).tensors(path)


def test_a_file_cut_while_it_is_hashed_is_noticed(tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file({"a": torch.zeros(CHUNK)}, path)
    with pytest.raises(Missing, match="while it was hashed"):
        Hasher(told=lambda _: os.truncate(path, 1000)).tensors(path)


def test_what_is_read_is_told_byte_by_byte_and_in_small_pieces(tmp_path: Path) -> None:
    save_file({name: torch.zeros(CHUNK) for name in "abcd"}, tmp_path / "model.safetensors")
    told: list[int] = []
    Hasher(workers=2, told=told.append).tensors(tmp_path)
    assert sum(told) == 4 * 4 * CHUNK
    assert max(told) <= CHUNK


# -- what is not read again -------------------------------------------------------------------------


class Counted(Hasher):
    """Counts what is really read."""

    read = 0

    def _digest(self, descriptor: int, start: int, size: int) -> str:
        self.read += 1
        return super()._digest(descriptor, start, size)


def test_a_file_that_looks_the_same_is_not_read_again(settled: None, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    first, second = (Counted(tmp_path / "digests", 2) for _ in range(2))
    expected = first.tensors(path).root, first.files([path])[0].sha256
    assert first.read == len(TENSORS) + 1
    (digest,) = second.files([path])
    assert (second.tensors(path).root, digest.sha256, digest.how) == (*expected, "cached")
    assert second.read == 0
    again = Counted(tmp_path / "digests", 2, trust=False)
    (digest,) = again.files([path])
    assert (again.tensors(path).root, digest.sha256, digest.how) == (*expected, "hashed")
    assert again.read == len(TENSORS) + 1


def test_a_file_that_was_just_written_is_read_every_time(tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    path.write_bytes(b"x")
    for _ in range(2):
        assert Hasher(tmp_path / "digests").files([path])[0].how == "hashed"


def test_other_bytes_of_the_same_size_and_mtime_are_read(settled: None, tmp_path: Path) -> None:
    path = tmp_path / "x.bin"
    found = []
    for content in (b"one", b"two"):
        path.write_bytes(content)
        os.utime(path, (1e9, 1e9))
        found.append(Hasher(tmp_path / "digests").files([path])[0])
    assert [item.sha256 for item in found] == [hashlib.sha256(text).hexdigest() for text in (b"one", b"two")]


def test_digests_of_another_number_of_tensors_are_not_believed(settled: None, tmp_path: Path) -> None:
    path = tmp_path / "model.safetensors"
    save_file(TENSORS, path)
    expected = Hasher().tensors(path).root
    Cache(tmp_path / "digests").put("tensors", Look.at(path.stat()), "a" * 64, 1)
    assert Hasher(tmp_path / "digests").tensors(path).root == expected


def _hub(folder: Path, name: str, content: bytes, blob: str) -> Path:
    blobs, snapshot = folder / "models--a--b" / "blobs", folder / "models--a--b" / "snapshots" / ("c" * 40)
    for place in (blobs, snapshot):
        place.mkdir(parents=True, exist_ok=True)
    (blobs / blob).write_bytes(content)
    (snapshot / name).symlink_to(f"../../blobs/{blob}")
    return snapshot / name


def test_the_hub_s_name_of_a_large_file_is_its_digest(tmp_path: Path) -> None:
    sha256 = hashlib.sha256(b"large").hexdigest()
    path = _hub(tmp_path, "x.bin", b"large", sha256)
    small = _hub(tmp_path, "model.safetensors.index.json", b"small", hashlib.sha1(b"small").hexdigest())
    hasher = Counted(workers=2)
    found = hasher.files([path, small])
    assert [(item.sha256, item.how) for item in found] == [
        (sha256, "hub"), (hashlib.sha256(b"small").hexdigest(), "hashed"),
    ]  # fmt: skip
    assert hasher.read == 1
    assert files.of_files(path.parent, _never)[1] == "hub"
    assert Hasher(trust=False).files([path])[0].how == "hashed"


def test_a_link_elsewhere_is_no_name_of_the_hub(tmp_path: Path) -> None:
    blob = tmp_path / "blobs" / ("a" * 64)
    blob.parent.mkdir()
    blob.write_bytes(b"x")
    (tmp_path / "x.bin").symlink_to(blob)
    assert files.hub_name(tmp_path / "x.bin") is None
    assert files.hub_name(blob) is None


def test_many_threads_share_one_hasher(settled: None, tmp_path: Path) -> None:
    paths = [tmp_path / f"{n}.bin" for n in range(20)]
    for path in paths:
        path.write_bytes(path.name.encode() * 1000)
    hasher = Hasher(tmp_path / "digests", 4)
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(hasher.files(paths))) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    expected = [hashlib.sha256(path.read_bytes()).hexdigest() for path in paths]
    assert [[item.sha256 for item in items] for items in found] == [expected] * 4
