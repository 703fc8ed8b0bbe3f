"""SHA-256 of every tensor in memory, and of the files of a checkpoint. Files are hashed as bytes, never unpickled.

Meant for a background thread: it holds a few MiB, releases the interpreter while it hashes, and asks between
chunks whether to stop. It keeps its normal priority: a niced thread that holds the interpreter's lock is not
scheduled on a busy machine, and the call waits for it (docs/decisions/0003-no-niced-thread.md). What cannot be
hashed says so; the manifest is then not made.
"""

import ctypes
import hashlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from provenance.facts import WeightEntry, WeightsManifest
from provenance.fingerprint.reading import Missing

CHUNK = 4 << 20
ENDINGS = (".safetensors", ".gguf", ".bin", ".pt", ".pth", ".index.json")
Stop = Callable[[], bool]


class Stopped(Exception):
    """Hashing was asked to stop."""


def named(model: Any) -> list[tuple[str, str, Any]]:
    """List every tensor with its kind and name, tied names included, buffers outside the state dict too."""
    found = [("tensor", name, item) for name, item in model.named_parameters(remove_duplicate=False)]
    found += [("buffer", name, item) for name, item in model.named_buffers(remove_duplicate=False)]
    return found


def entry(kind: str, name: str, tensor: Any, done: dict[object, str], stop: Stop) -> WeightEntry:
    """Hash one tensor in memory, as it is: after cast, tie and merge. ``done`` remembers tied tensors, hashed once.

    Raises Missing where a tensor has no bytes of its own to hash, Stopped where ``stop`` says so.
    """
    _check(name, tensor)
    key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), str(tensor.device))
    digest = done.get(key) if tensor.numel() else None
    if digest is None:
        digest = done[key] = _digest(tensor, stop)
    size = tensor.numel() * tensor.element_size()
    return WeightEntry(kind, name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), size, digest)


def of_tensors(model: Any, stop: Stop = lambda: False) -> WeightsManifest:
    """Hash every tensor of a model, in this thread."""
    done: dict[object, str] = {}
    return WeightsManifest("tensors", tuple(entry(kind, name, item, done, stop) for kind, name, item in named(model)))


def of_files(folder: Path, stop: Stop) -> WeightsManifest:
    """Hash the files of a checkpoint.

    Raises Missing where there are none.
    """
    if folder.is_file():
        paths = [folder]
    else:
        paths = sorted(path for path in folder.iterdir() if path.name.endswith(ENDINGS) and path.is_file())
    if not paths:
        raise Missing("the checkpoint's folder holds no weight files")
    return WeightsManifest("files", tuple(_file(path, stop) for path in paths))


def checkpoint(model: Any, environ: dict[str, str]) -> Path:
    """Find the folder or file a model was loaded from, without asking a network.

    Raises Missing where it is not on this machine.
    """
    config = getattr(model, "config", None)
    return located(str(getattr(config, "_name_or_path", "") or ""), getattr(config, "_commit_hash", None), environ)


def located(name: str, commit: str | None, environ: dict[str, str]) -> Path:
    """Find the folder or file that a name stands for: a path, or a commit in the hub's cache.

    Raises Missing where it is not on this machine.
    """
    if not name:
        raise Missing("the model was not loaded from files")
    here = Path(name).expanduser()
    if here.exists():
        return here
    home = environ.get("HF_HUB_CACHE") or os.path.join(
        environ.get("HF_HOME") or os.path.expanduser("~/.cache/huggingface"), "hub"
    )
    folder = Path(home) / f"models--{name.replace('/', '--')}" / "snapshots" / str(commit)
    if commit and folder.is_dir():
        return folder
    raise Missing(f"the files of {name} are not in the cache")


def _file(path: Path, stop: Stop) -> WeightEntry:
    """Hash one file through one descriptor, and notice if it changed meanwhile."""
    state = hashlib.sha256()
    buffer = bytearray(CHUNK)
    view = memoryview(buffer)
    with path.open("rb", buffering=0) as file:
        before = _identity(os.fstat(file.fileno()))
        while size := file.readinto(view):
            state.update(view[:size])
            if stop():
                raise Stopped
        after = _identity(os.fstat(file.fileno()))
    if before != after:
        raise Missing(f"{path.name} changed while it was hashed")
    return WeightEntry("file", path.name, "", (), before[2], state.hexdigest())


def _identity(facts: os.stat_result) -> tuple[int, ...]:
    return (facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)


def _check(name: str, tensor: Any) -> None:
    if tensor.device.type == "meta":
        raise Missing(f"{name} is on the meta device: it has no bytes")
    if type(tensor).__module__.partition(".")[0] != "torch" or type(tensor).__name__ not in (
        "Tensor",
        "Parameter",
        "Buffer",
    ):
        raise Missing(f"{name} is a {type(tensor).__qualname__}, whose bytes are not its value")


def _digest(tensor: Any, stop: Stop) -> str:
    state = hashlib.sha256()
    for chunk in _chunks(tensor.detach()):
        state.update(chunk)
        if stop():
            raise Stopped
    return state.hexdigest()


def _chunks(tensor: Any) -> Iterator[memoryview]:
    """Yield the bytes of a tensor in row order, a few MiB at a time."""
    total = tensor.numel() * tensor.element_size()
    if total == 0:
        return
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        yield from _direct(tensor, total)
        return
    flat = tensor.reshape(-1) if tensor.is_contiguous() else tensor.contiguous().reshape(-1)
    step = max(1, CHUNK // tensor.element_size())
    for start in range(0, flat.numel(), step):
        piece = flat[start : start + step].to("cpu").contiguous()
        yield from _direct(piece, piece.numel() * piece.element_size())


def _direct(tensor: Any, total: int) -> Iterator[memoryview]:
    """Yield windows of a contiguous CPU tensor. Its storage is checked again for each: sharding frees them."""
    offset = tensor.storage_offset() * tensor.element_size()
    for start in range(0, total, CHUNK):
        size = min(CHUNK, total - start)
        if tensor.untyped_storage().nbytes() < offset + start + size:
            raise Missing("a tensor was released while it was hashed")
        window = (ctypes.c_char * size).from_address(tensor.data_ptr() + start)
        yield memoryview(window)
