"""SHA-256 of every tensor in memory, as it is: after cast, tie, merge and the initialising of what no file held.

Meant for a background thread: it holds a few MiB, releases the interpreter while it hashes, and asks between
chunks whether to stop. It keeps its normal priority: a niced thread that holds the interpreter's lock is not
scheduled on a busy machine, and the call waits for it (docs/decisions/0003-no-niced-thread.md). What cannot be
hashed says so; the manifest is then not made.
"""

import ctypes
import hashlib
import re
import sys
import weakref
from collections.abc import Callable, Iterable, Iterator
from typing import Any

from provenance.facts import WeightEntry, WeightsManifest
from provenance.fingerprint.reading import Missing

CHUNK = 4 << 20
# Types that many models are cast to, with the field of each, and those from which the cast loses nothing but what the
# type cannot hold.
HALVES = {"bfloat16": "weights.bfloat16_root", "float16": "weights.float16_root"}
WIDE, FLOATS = ("float32", "float64"), ("bfloat", "float")
PARAMETERS = ("tensor", "packed")  # kinds of entries; the others are buffers and tensors in attributes
GRAIN = 16384  # numbers cast at once: so few that torch takes no second thread of the caller's pool
Stop = Callable[[], bool]
# Tables of torch itself in a module's attributes, and what models keep there for the calls to come.
OWN = frozenset(("_parameters", "_buffers", "_modules"))
PASSING = re.compile(
    r"cache|past_key|(?:^|_)kv(?:_|$)|(?:causal|attention|attn)_?mask|original_inv_freq$", re.IGNORECASE
)
# Classes of torch whose objects can be asked for the weights that they have packed.
PACKED = re.compile(r"__torch__\.torch\.classes\.(?:quantized|rnn|sparse)\.")
PACKS = re.compile(r"(?:\._?packed_(?:params|weight)|\.param)+$")
UNREAD = "weights that cannot be read"


class Stopped(Exception):
    """Hashing was asked to stop."""


def _never() -> bool:
    return False


def named(model: Any) -> list[tuple[str, str, Any]]:
    """List every tensor with its kind and name, tied names included, buffers outside the state dict too."""
    found = [("tensor", name, item) for name, item in model.named_parameters(remove_duplicate=False)]
    found += [("buffer", name, item) for name, item in model.named_buffers(remove_duplicate=False)]
    return found


class Held:
    """Tensors and packed weights that parts of a model keep in attributes, where no walk of torch finds them.

    Told by path and name. ``passing`` are those that a call was seen to change: what changes with every call is a
    cache, and no part of what the model is. A copy of a parameter or a buffer in an attribute is none of its own.
    """

    def __init__(self, model: Any = None, passing: Iterable[str] = ()) -> None:
        self.slots: dict[str, tuple[Any, str]] = {}
        self.unread: list[str] = []  # classes of the parts whose state cannot be read
        torch = sys.modules.get("torch")
        if torch is None or not hasattr(model, "named_modules"):
            return
        own = {_key(item) for _, _, item in named(model)}
        for path, part in model.named_modules(remove_duplicate=False):
            if _extra(part, torch):
                self.unread.append(type(part).__name__)
            for name, value in list(part.__dict__.items()):
                if name in OWN or _derived(part, name) or PASSING.search(name):
                    continue
                whole = f"{path}.{name}" if path else name
                if whole not in passing and any(_key(item) not in own for _, item in _inside(value, torch)):
                    self.slots[whole] = weakref.ref(part), name

    def items(self) -> list[tuple[str, str, Any]]:
        """List what is held as `named` lists the rest: kind, name, and the tensor or the object that packs some."""
        torch, found = sys.modules.get("torch"), []
        for whole, value in self._values():
            for suffix, item in _inside(value, torch):
                kind = "packed" if type(item) is torch.ScriptObject else "attribute"  # type: ignore[union-attr]
                found.append((kind, whole + suffix, item))
        return found

    def marks(self) -> dict[str, object]:
        """Return what is equal between two calls if nobody touched what is held."""
        torch = sys.modules.get("torch")
        return {whole: tuple(_mark(item) for _, item in _inside(value, torch)) for whole, value in self._values()}

    def _values(self) -> Iterator[tuple[str, Any]]:
        for whole, (reference, name) in self.slots.items():
            part = reference()
            yield whole, part.__dict__.get(name) if part is not None else None

    def reason(self) -> str:
        """Say why the weights of this model cannot all be read, or nothing."""
        objects = [name for kind, name, item in self.items() if kind == "packed" and not _readable(item)]
        strange = [*self.unread, *objects]
        if not strange:
            return ""
        who = "1 module holds" if len(strange) == 1 else f"{len(strange)} modules hold"
        kinds = sorted(set(strange))
        return f"{who} {UNREAD}: {', '.join(kinds[:3])}{' and others' if len(kinds) > 3 else ''}"


def moved(before: object, now: object) -> bool:
    """Say whether a mark changed in nothing but the device: a table that follows its input is no cache."""
    pairs = (before, now) if isinstance(before, tuple) and isinstance(now, tuple) else ((), ())
    same = len(pairs[0]) == len(pairs[1]) > 0
    return same and all(a == b or (a[3] != b[3] and a[4:] == b[4:]) for a, b in zip(*pairs, strict=True))


def _inside(value: Any, torch: Any) -> Iterator[tuple[str, Any]]:
    """Walk the tensors and packing objects that an attribute is, or that its list or table holds."""
    kinds = (torch.Tensor, torch.ScriptObject)
    if isinstance(value, torch.Tensor) or type(value) is torch.ScriptObject:
        yield "", value
    elif isinstance(value, (list, tuple)):
        yield from ((f".{n}", item) for n, item in enumerate(value) if isinstance(item, kinds))
    elif isinstance(value, dict):
        yield from ((f".{key}", item) for key, item in list(value.items()) if isinstance(item, kinds))


def _derived(part: Any, name: str) -> bool:
    """Say whether a hook of torch computes an attribute from parameters before each call: weight_norm, prune."""
    return any(f"{name}{ending}" in part._parameters for ending in ("_g", "_orig"))


def _extra(part: Any, torch: Any) -> bool:
    """Say whether a part has state of its own besides tensors: to ask for it would run somebody else's code."""
    function = getattr(type(part), "get_extra_state", None)
    scripted = str(getattr(function, "__module__", "")).startswith("torch.jit")
    return function is not None and not scripted and function is not torch.nn.Module.get_extra_state


def _readable(item: Any) -> bool:
    return PACKED.match(str(item._type().qualified_name())) is not None


def _key(item: Any) -> object:
    try:
        return (item.data_ptr(), item.dtype, tuple(item.shape), tuple(item.stride()), str(item.device))
    except (RuntimeError, AttributeError, NotImplementedError):
        return id(item)


def _mark(item: Any) -> tuple[object, ...]:
    try:
        return id(item), item._version, item.data_ptr(), str(item.device), tuple(item.shape), str(item.dtype)
    except (RuntimeError, AttributeError, NotImplementedError):
        return id(item), -1, 0, "", (), ""


def packed(name: str, item: Any, done: dict[object, str], stop: Stop) -> list[WeightEntry]:
    """Hash the tensors that an object of torch has packed, and what it keeps beside them, under the part's name.

    Raises Missing where it does not tell them.
    """
    name = PACKS.sub("", name)
    try:
        state, kind = item.__getstate__()
    except (RuntimeError, AttributeError, ValueError, TypeError) as why:
        raise Missing(f"the weights packed in {name} cannot be read: {type(why).__name__}") from None
    tensors: list[Any] = []
    form = _flat(name, state, tensors)
    plain = form in ("(tensor,tensor)", "(tensor,None)")
    names = ("weight", "bias") if plain else tuple(f"packed.{n}" for n in range(len(tensors)))
    found = [entry("packed", f"{name}.{own}", tensor, done, stop) for own, tensor in zip(names, tensors, strict=False)]
    if plain:
        return found
    about = f"{kind}: {form}".encode()
    return [*found, WeightEntry("packed", f"{name}.packed", "", (), len(about), hashlib.sha256(about).hexdigest())]


def _flat(name: str, state: Any, tensors: list[Any]) -> str:
    """Write what an object says of itself, with a sign in place of each tensor, which goes into a list."""
    torch = sys.modules["torch"]
    if isinstance(state, torch.Tensor):
        tensors.append(state)
        return "tensor"
    if type(state) is torch.ScriptObject and _readable(state):
        return _flat(name, state.__getstate__(), tensors)
    if isinstance(state, (list, tuple)):
        return f"({','.join(_flat(name, item, tensors) for item in state)})"
    if isinstance(state, dict):
        return _flat(name, sorted(state.items()), tensors)
    if state is None or isinstance(state, (bool, int, float, str)):
        return repr(state)
    raise Missing(f"the weights packed in {name} cannot be read: they are a {type(state).__qualname__}")


def entries(kind: str, name: str, item: Any, done: dict[object, str], stop: Stop) -> list[WeightEntry]:
    """Hash one item of a model, as `named` or `Held.items` lists it: a tensor, or an object that packs some."""
    return packed(name, item, done, stop) if kind == "packed" else [entry(kind, name, item, done, stop)]


def entry(kind: str, name: str, tensor: Any, done: dict[object, str], stop: Stop) -> WeightEntry:
    """Hash one tensor in memory, as it is: after cast, tie and merge. ``done`` remembers tied tensors, hashed once.

    Raises Missing where a tensor has no bytes of its own to hash, Stopped where ``stop`` says so.
    """
    _check(name, tensor)
    key = (tensor.data_ptr(), tensor.dtype, tuple(tensor.shape), tuple(tensor.stride()), str(tensor.device))
    digest = (
        done.get(key) if tensor.numel() and kind != "packed" else None
    )  # what is unpacked is gone, its place is not
    if digest is None:
        digest = _digest(tensor, stop)
        if kind != "packed":
            done[key] = digest
    size = tensor.numel() * tensor.element_size()
    return WeightEntry(kind, name, str(tensor.dtype).removeprefix("torch."), tuple(tensor.shape), size, digest)


def of_tensors(model: Any, stop: Stop = lambda: False) -> WeightsManifest:
    """Hash every tensor of a model, in this thread. Raises Missing where some of its weights cannot be read."""
    done: dict[object, str] = {}
    held = Held(model)
    if held.reason():
        raise Missing(held.reason())
    items = [*named(model), *held.items()]
    return WeightsManifest("tensors", tuple(made for item in items for made in entries(*item, done, stop)))


def parameters(of: Iterable[WeightEntry]) -> str:
    """Return one digest over the parameters of a model, without its buffers: other settings compute other tables."""
    return WeightsManifest("parameters", tuple(item for item in of if item.kind in PARAMETERS)).root


def narrowed(of: Iterable[WeightEntry], tensor: Callable[[str], Any], kind: str, stop: Stop = _never) -> str:
    """Return one digest over the parameters of a model as they would be in a type of half the width.

    A model in float32 and the same in that type share it, so that what was changed beneath a cast is seen. Raises
    Missing where another half type took part: what it rounded away the two do not share.
    """
    found = []
    done: dict[object, str] = {}
    for item in of:
        if item.kind not in PARAMETERS:
            continue
        digest, wide = item.sha256, item.dtype in WIDE and item.kind == "tensor"
        if wide:
            digest = _cast(tensor(item.name), kind, done, stop)
        elif item.kind == "tensor" and item.dtype != kind and item.dtype.startswith(FLOATS):
            raise Missing(f"{item.name} is {item.dtype}, which {kind} does not hold")
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
    if tensor.is_quantized:  # its bytes are numbers of steps
        for part in _steps(tensor):
            state.update(part)
    return state.hexdigest()


def _steps(tensor: Any) -> Iterator[bytes | memoryview]:
    """Yield what the bytes of a quantised tensor count in: scale and origin, for all or for each channel."""
    scheme = str(tensor.qscheme())
    yield scheme.encode()
    if "per_tensor" in scheme:
        yield repr((tensor.q_scale(), tensor.q_zero_point())).encode()
        return
    yield str(tensor.q_per_channel_axis()).encode()
    for table in (tensor.q_per_channel_scales(), tensor.q_per_channel_zero_points()):
        yield from _chunks(table)


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
