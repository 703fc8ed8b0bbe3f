"""SHA-256 of every tensor in memory, as it is: after cast, tie, merge and the initialising of what no file held.

Meant for a background thread: it holds a few MiB, releases the interpreter while it hashes, and asks between
chunks whether to stop. It keeps its normal priority: a niced thread that holds the interpreter's lock is not
scheduled on a busy machine, and the call waits for it (docs/decisions/0003-no-niced-thread.md). What cannot be
hashed says so; the manifest is then not made.
"""

import ctypes
import hashlib
from collections.abc import Callable, Iterator
from typing import Any

from provenance.facts import WeightEntry, WeightsManifest
from provenance.fingerprint.reading import Missing

CHUNK = 4 << 20
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
