"""SHA-256 of every tensor in memory, as it is: after cast, tie, merge and the initialising of what no file held.

Meant for a background thread: it holds a few MiB, releases the interpreter while it hashes, and asks between
chunks whether to stop. It keeps its normal priority: a niced thread that holds the interpreter's lock is not
scheduled on a busy machine, and the call waits for it (docs/decisions/0003-no-niced-thread.md). What cannot be
hashed says so; the manifest is then not made.
"""

import ctypes
import hashlib
import sys
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from provenance.facts import WeightEntry, WeightsManifest
from provenance.fingerprint.reading import Missing

CHUNK = 4 << 20
# Types that many models are cast to, with the field of each, and those from which the cast loses nothing but what the
# type cannot hold.
HALVES = {"bfloat16": "weights.bfloat16_root", "float16": "weights.float16_root"}
WIDE, FLOATS = ("float32", "float64"), ("bfloat", "float")
GRAIN = 16384  # numbers cast at once: so few that torch takes no second thread of the caller's pool
Stop = Callable[[], bool]


class Stopped(Exception):
    """Hashing was asked to stop."""


def _never() -> bool:
    return False


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


def parameters(entries: Iterable[WeightEntry]) -> str:
    """Return one digest over the parameters of a model, without its buffers: other settings compute other tables."""
    return WeightsManifest("parameters", tuple(item for item in entries if item.kind == "tensor")).root


def narrowed(entries: Iterable[WeightEntry], tensor: Callable[[str], Any], kind: str, stop: Stop = _never) -> str:
    """Return one digest over the parameters of a model as they would be in a type of half the width.

    A model in float32 and the same in that type share it, so that what was changed beneath a cast is seen. Raises
    Missing where another half type took part: what it rounded away the two do not share.
    """
    found = []
    done: dict[object, str] = {}
    for item in entries:
        if item.kind != "tensor":
            continue
        digest = item.sha256
        if item.dtype in WIDE:
            digest = _cast(tensor(item.name), kind, done, stop)
        elif item.dtype != kind and item.dtype.startswith(FLOATS):
            raise Missing(f"{item.name} is {item.dtype}, which {kind} does not hold")
        wide = item.dtype in WIDE
        found.append(item._replace(dtype=kind if wide else item.dtype, size=0, sha256=digest))
    return WeightsManifest(f"parameters in {kind}", tuple(found)).root


def _cast(tensor: Any, kind: str, done: dict[object, str], stop: Stop) -> str:
    key = (tensor.data_ptr(), tuple(tensor.shape), tuple(tensor.stride()))
    if key in done and tensor.numel():
        return done[key]
    state = hashlib.sha256()
    target = getattr(sys.modules["torch"], kind)
    flat = tensor.detach().reshape(-1)
    for start in range(0, flat.numel(), CHUNK // 4):
        block = flat[start : start + CHUNK // 4].to("cpu")
        for at in range(0, block.numel(), GRAIN):
            piece = block[at : at + GRAIN].to(target)
            state.update(memoryview((ctypes.c_char * (2 * piece.numel())).from_address(piece.data_ptr())))
        if stop():
            raise Stopped
    done[key] = state.hexdigest()
    return done[key]


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
