"""How a model is put together beyond its tensors: its modules and their plain settings, hooks, attention, compilation.

All of it can change while no tensor does, between two calls of one process as between two processes. Read where the
identity of a model is read; `marks` tells in microseconds whether that has to be done again.
"""

import functools
import hashlib
import re
import sys
import types
import weakref
from collections.abc import Iterable, Iterator, Mapping
from itertools import chain
from operator import itemgetter
from typing import Any

from provenance.facts import Field
from provenance.fingerprint import code
from provenance.fingerprint.reading import Missing, Moot, Reader, read_all
from provenance.integrity.secrets import tells, withheld

SCALARS = (type(None), bool, int, float, str)
FUNCTIONS = (types.FunctionType, types.BuiltinFunctionType, types.MethodType, functools.partial)
WATCHED = {*SCALARS, *FUNCTIONS, tuple}
# Labels, what other fields hold, and what a library notes for itself.
SKIPPED = {"training", "forward", "generate", "name_or_path", "gradient_checkpointing", "max_seq_len_cached"}
MADE = {types.FunctionType, types.MethodType, functools.partial}  # what can be a product of torch.compile
SHOWN = 8
COMPILED = "_torchdynamo_orig_callable"
ATTENTION, MASKS = "ALL_ATTENTION_FUNCTIONS", "ALL_MASK_ATTENTION_FUNCTIONS"
INTERFACES = {ATTENTION: "transformers.modeling_utils", MASKS: "transformers.masking_utils"}
HOOKS = {"forward": "_forward_hooks", "forward_pre": "_forward_pre_hooks"}
EVERY = "torch.nn.modules.module"


def fields(model: Any) -> list[Field]:
    """Read how a model is put together."""
    places = list(named(model))
    compiled = functools.lru_cache(1)(lambda: _compiled(model))
    readers: dict[str, Reader] = {
        "model.structure_digest": lambda: structure(places),
        "model.forward_hooks_code": lambda: hooks(places),
        "model.attention_functions": lambda: attention(model, places, ATTENTION),
        "model.mask_functions": lambda: attention(model, places, MASKS),
        "torch.compile.active": lambda: bool(compiled()),
        "torch.compile.modules": lambda: _grouped([path for path, _ in _known(compiled())]),
        "torch.compile.mode_backend": lambda: sorted({_ways(function) for _, function in _known(compiled())}),
    }
    return read_all(readers, "model")


def named(model: Any) -> Iterator[tuple[str, Any]]:
    """Walk all modules with their names, each once; one that was compiled stands under the name that it had."""
    return ((path, part) for path, part in _walk(model) if not _optimized(part))


def _walk(model: Any) -> Iterator[tuple[str, Any]]:
    """Walk all modules with their names, each once, and what torch.compile put around one under the same name."""
    stack = [("", model)]
    seen = set()
    while stack:
        path, part = stack.pop()
        if id(part) in seen:
            continue
        seen.add(id(part))
        yield path, part
        for name, child in reversed(list(part._modules.items())):
            if child is not None:
                stack.append((path if _optimized(part) else f"{path}.{name}".lstrip("."), child))


def _optimized(part: Any) -> bool:
    return type(part).__qualname__ == "OptimizedModule" and type(part).__module__.startswith("torch._dynamo")


# -- structure ------------------------------------------------------------------------------------------


def structure(places: Iterable[tuple[str, Any]]) -> str:
    """Digest the tree of modules: names, classes, and what each holds as plain values and functions.

    Raises Missing where a function cannot be seen whole.
    """
    known = list(places)
    parts = {id(part): path for path, part in known}
    state = hashlib.sha256(b"provenance/structure/v1")
    for path, part in known:
        state.update(repr((path, type(part).__qualname__)).encode("utf-8", "surrogatepass"))
        for name, value in sorted(_plain(part.__dict__)):
            said = repr((name, _said(name, value, parts)))
            state.update(said.encode("utf-8", "surrogatepass"))
    return "sha256:" + state.hexdigest()


def _plain(slots: Mapping[str, Any]) -> list[tuple[str, Any]]:
    """List the plain values of a module, and its functions."""
    return [
        (name, value)
        for name, value in list(slots.items())
        if type(value) in WATCHED and type(name) is str and not name.startswith("_") and name not in SKIPPED
        if type(value) is not tuple or all(type(item) in SCALARS for item in value)
    ]


def _said(name: str, value: Any, parts: Mapping[int, str]) -> object:
    if type(value) in FUNCTIONS:
        value = vars(value).get(COMPILED, value) if type(value) is types.FunctionType else value
        try:
            return code.digest(value, parts=parts)
        except Missing as why:
            raise Missing(f"{name} of a module: {why}") from None
    return "secret" if withheld(name, value) or (type(value) is str and tells(value)) else value


# -- hooks ----------------------------------------------------------------------------------------------


def hooks(places: Iterable[tuple[str, Any]]) -> list[str]:
    """Name the hooks that run around the forwards of a model, where each hangs and what it does, in their order.

    Raises Missing where the code of one cannot be seen whole.
    """
    known = list(places)
    parts = {id(part): path for path, part in known}
    tables = [(path or "the model", kind, getattr(part, slot)) for path, part in known for kind, slot in HOOKS.items()]
    every = vars(sys.modules[EVERY]) if EVERY in sys.modules else {}
    tables += [("every module", kind, every.get(f"_global{slot}", {})) for kind, slot in HOOKS.items()]
    found = []
    for path, kind, table in tables:
        for function in list(table.values()):
            try:
                found.append(f"{path} {kind}: {code.short(function, parts)}")
            except Missing as why:
                raise Missing(f"a hook of {path}: {why}") from None
    if len(found) <= 2 * SHOWN:
        return found
    rest = hashlib.sha256("\n".join(found).encode()).hexdigest()[:12]
    return [*found[:SHOWN], f"and {len(found) - SHOWN} more ({rest})"]


# -- attention ------------------------------------------------------------------------------------------


def attention(model: Any, places: Iterable[tuple[str, Any]], interface: str) -> dict[str, str]:
    """Name the functions that compute attention, or make its masks, by the implementation that they stand for."""
    modules = [sys.modules[name] for name in code.homes({type(part) for _, part in places})]
    found: dict[str, str] = {}
    for kind in sorted(_implementations(model)):
        for function in _resolved(modules, interface, kind):
            own = code.home(function).partition(".")[0] in ("transformers", "torch")
            said = f"{code.home(function)}.{function.__qualname__}" if own else code.short(function)
            found[kind] = f"{found[kind]}, {said}" if kind in found and said not in found[kind] else said
    if not found:
        raise Moot("no function of this kind is called by name")
    return found


def _implementations(model: Any) -> set[str]:
    config = getattr(model, "config", None)
    inner = [getattr(config, name, None) for name in getattr(config, "sub_configs", None) or {}]
    found = {getattr(item, "_attn_implementation", None) for item in (config, *inner)}
    return {item for item in found if type(item) is str}


def _resolved(modules: Iterable[Any], interface: str, kind: str) -> Iterator[Any]:
    """Yield what stands for an implementation: in a table of a module's own, in that of the library, or beside it."""
    shared = vars(sys.modules[INTERFACES[interface]]).get(interface) if INTERFACES[interface] in sys.modules else None
    tables = {id(table): table for table in (vars(module).get(interface) for module in modules) if table is not None}
    for table in list(tables.values()) or [shared]:
        for mapping in ("_local_mapping", "_global_mapping"):
            function = getattr(table, mapping, {}).get(kind)
            if function is not None:
                yield function
                break
    if kind == "eager" and interface == ATTENTION:
        yield from (
            vars(item)["eager_attention_forward"] for item in modules if "eager_attention_forward" in vars(item)
        )


# -- compilation ----------------------------------------------------------------------------------------


def _known(found: list[tuple[str, Any]]) -> list[tuple[str, Any]]:
    if not found:
        raise Moot("nothing of the model is compiled")
    return found


def _compiled(model: Any) -> list[tuple[str, Any]]:
    """List what of a model runs compiled: modules, their calls, forwards, and other functions that they hold."""
    found = []
    for path, part in _walk(model):
        held = [("forward", vars(type(part)).get("forward")), *list(part.__dict__.items())]
        for name, value in held:
            function = _product(value) if type(value) in MADE else None
            if function is not None:
                what = "" if name == "_compiled_call_impl" or _optimized(part) else f".{name}"
                found.append(((path + what).lstrip(".") or "the model", function))
    return sorted(found, key=itemgetter(0))


def _product(value: Any) -> Any:
    """Return what torch.compile made, if a value is that; decorators and bindings are looked through."""
    for _ in range(16):
        if type(value) is types.MethodType:
            value = value.__func__
        elif type(value) is functools.partial:
            value = value.func
        elif type(value) is types.FunctionType:
            if COMPILED in value.__dict__:
                return None if value.__dict__.get("_torchdynamo_disable") else value
            value = value.__dict__.get("__wrapped__")
        else:
            return None
    return None


def _grouped(paths: list[str]) -> list[str]:
    """Name places; many that differ in a number alone as one, with a digest of them all."""
    if len(paths) <= SHOWN:
        return paths
    kinds: dict[str, list[str]] = {}
    for path in paths:
        kinds.setdefault(re.sub(r"\d+", "*", path), []).append(path)
    return [
        same[0] if len(same) == 1 else f"{kind} x{len(same)} ({hashlib.sha256(repr(same).encode()).hexdigest()[:8]})"
        for kind, same in sorted(kinds.items())
    ]


def _ways(function: Any) -> str:
    """Say how something was compiled: backend, options and shapes. Raises Missing where torch does not tell."""
    cells = dict(zip(function.__code__.co_freevars, function.__closure__ or (), strict=True))
    try:
        context = cells["self"].cell_contents
        backend = context.callback
        while hasattr(backend, "_torchdynamo_orig_backend"):
            backend = backend._torchdynamo_orig_backend
        said = [_backend(backend), f"dynamic={context._dynamic}", f"fullgraph={context.fullgraph}"]
    except (KeyError, AttributeError, ValueError):
        raise Missing("this version of torch does not tell how it was compiled") from None
    options = getattr(backend, "config", None) or getattr(backend, "kwargs", None) or {}
    return ", ".join([*said, *(f"{name}={value!r:.60}" for name, value in sorted(options.items()))])


def _backend(backend: Any) -> str:
    if type(backend).__name__ == "_TorchCompileInductorWrapper":
        return "inductor"
    made = getattr(backend, "compiler_fn", backend)
    name = str(getattr(backend, "compiler_name", None) or "")
    return name if name and code.home(made).partition(".")[0] == "torch" else code.short(made)


# -- between two calls ----------------------------------------------------------------------------------


class _Plan:
    """Which plain values each module of a model holds: looked up once, and again where a module gains or loses any."""

    def __init__(self, parts: list[Any], ids: list[int]) -> None:
        self.ids = ids
        self.sizes = [len(part.__dict__) for part in parts]
        getters = [_getter(part.__dict__) for part in parts]
        self.holders = [(place, getter) for place, getter in enumerate(getters) if getter is not None]
        self.homes = list(code.homes({type(part) for part in parts}))


def _getter(slots: Mapping[str, Any]) -> Any:
    names = [name for name, _ in _plain(slots)]
    return itemgetter(*names, names[0]) if names else None  # twice: one name alone would come without a tuple


_plans: "weakref.WeakKeyDictionary[Any, _Plan]" = weakref.WeakKeyDictionary()


def marks(model: Any, parts: list[Any], ids: list[int]) -> tuple[object, ...]:
    """Return what is equal between two calls if nothing changed that is read here, tensors apart.

    ``parts`` are the modules in the order of their walk, ``ids`` their ids.
    """
    plan = _plans.get(model)
    if plan is None or plan.ids != ids:
        plan = _plans[model] = _Plan(parts, ids)
    values = _values(plan, parts)
    if values is None:
        plan = _plans[model] = _Plan(parts, ids)
        values = _values(plan, parts) or ()
    homes = tuple(hash(tuple(map(id, list(vars(sys.modules[name]).values())))) for name in plan.homes)
    return hash(values), values.count(-2), homes, _registered()  # hash(-1) is hash(-2)


def _values(plan: _Plan, parts: list[Any]) -> tuple[Any, ...] | None:
    """Return the plain values that modules hold, or None where the plan is no longer right."""
    tables = [part.__dict__ for part in parts]
    if list(map(len, tables)) != plan.sizes:
        return None
    flat = tuple(chain.from_iterable([getter(tables[place]) for place, getter in plan.holders]))
    return flat if WATCHED.issuperset(map(type, flat)) else None


def _registered() -> tuple[object, ...]:
    """Return what stands in the tables that the whole process shares: functions of attention and hooks."""
    found: list[object] = []
    for name, home in INTERFACES.items():
        table = vars(sys.modules[home]).get(name) if home in sys.modules else None
        for mapping in ("_local_mapping", "_global_mapping"):
            found.append(tuple(map(id, list(getattr(table, mapping, {}).values()))))
    every = vars(sys.modules[EVERY]) if EVERY in sys.modules else {}
    return (*found, *(tuple(every.get(f"_global{slot}", ())) for slot in HOOKS.values()))
