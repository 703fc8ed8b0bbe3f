"""What an engine runs with: vLLM, SGLang, llama.cpp, TensorRT-LLM, and MLX's device.

One table an engine: the dotted path of an attribute, by the field it fills. Those of vLLM and SGLang bear the names of
the engine's own settings, so the catalogue is the table. Each path is read on its own: one that this version lacks is
unknown and costs nothing else. Nothing here imports an engine; it is handed an object, or asks ``sys.modules``.
"""

import dataclasses
import os
import sys
from collections.abc import Mapping
from enum import Enum
from functools import lru_cache
from pathlib import Path
from typing import Any, NamedTuple

from provenance.catalogue.fields import table
from provenance.facts import Field, Fingerprint, State
from provenance.fingerprint.environ import NEVER_READ
from provenance.fingerprint.reading import Missing, read, read_all, short_path
from provenance.integrity.digests import file_digest
from provenance.integrity.secrets import named, tells, withheld

TEXT_CHARS, ITEMS, DEEP = 2000, 256, 4
SCALARS = (bool, int, float, str, type(None))
REDACTED = {"sglang.watermark_config": "it holds the watermark's keys"}
LLAMA = {
    "model_path": "model_path", "n_gpu_layers": "model_params.n_gpu_layers", "split_mode": "model_params.split_mode",
    "tensor_split": "tensor_split", "main_gpu": "model_params.main_gpu", "n_ctx": "n_ctx()", "n_batch": "n_batch",
    "n_ubatch": "context_params.n_ubatch", "n_threads": "n_threads", "n_threads_batch": "n_threads_batch",
    "rope_freq_base": "context_params.rope_freq_base", "rope_freq_scale": "context_params.rope_freq_scale",
    "rope_scaling_type": "context_params.rope_scaling_type", "offload_kqv": "context_params.offload_kqv",
    "flash_attn": "context_params.flash_attn_type|context_params.flash_attn",
    "op_offload": "context_params.op_offload", "swa_full": "context_params.swa_full",
    "type_k": "context_params.type_k", "type_v": "context_params.type_v", "lora_path": "lora_path",
    "lora_scale": "lora_scale", "chat_format": "chat_format", "last_n_tokens_size": "last_n_tokens_size",
    "kv_overrides": "kv_overrides", "draft_model": "draft_model", "use_mmap": "model_params.use_mmap", "numa": "numa",
}  # fmt: skip
PATHS = ("model_path", "lora_path")


class Runtime(NamedTuple):
    """One engine: the class that is known by, where its settings stand, and where its weights came from."""

    name: str
    package: str
    classes: tuple[str, ...]
    settings: str  # path from the engine to its settings
    checkpoint: str  # path from the engine to the name or folder of its weights
    seed: str


RUNTIMES = (
    Runtime("vllm", "vllm", ("LLM",), "llm_engine.vllm_config", "llm_engine.vllm_config.model_config.model",
            "llm_engine.vllm_config.model_config.seed"),
    Runtime("sglang", "sglang", ("Engine",), "server_args", "server_args.model_path", "server_args.random_seed"),
    Runtime("llama_cpp", "llama_cpp", ("Llama",), "", "model_path", ""),
    Runtime("tensorrt_llm", "tensorrt_llm", ("BaseLLM", "LLM"), "args", "args.model", ""),
)  # fmt: skip


def runtime(engine: Any) -> Runtime | None:
    """Say which runtime an object belongs to, by the classes it comes from; None for any other."""
    for item in RUNTIMES:
        if item.package in sys.modules and _comes_from(type(engine), item):
            return item
    return None


def _comes_from(kind: type, item: Runtime) -> bool:
    return any(
        base.__name__ in item.classes and base.__module__.partition(".")[0] == item.package for base in kind.__mro__
    )


@lru_cache(maxsize=8)
def paths(name: str) -> Mapping[str, str]:
    """Return the table of one runtime: field, and the path to its value from the engine."""
    found = next(item for item in RUNTIMES if item.name == name)
    if name == "llama_cpp":
        return {f"llama_cpp.{field}": path for field, path in LLAMA.items()}
    front = found.settings
    return {
        field: f"{front}.{field.removeprefix(name + '.')}"
        for field, spec in table().items()
        if field.startswith(name + ".") and ".sampling." not in field and NEVER_READ not in spec.help
    }


def snapshot(engine: Any, found: Runtime) -> tuple[object, ...]:
    """Return what stands under every path now, unread: to see in microseconds whether anything was changed."""
    return tuple(quiet(engine, path) for path in paths(found.name).values())


def unchanged(before: tuple[object, ...], now: tuple[object, ...]) -> bool:
    """Say whether two snapshots hold the very same: scalars by value, all else by identity."""
    return len(before) == len(now) and all(map(_same, before, now))


def _same(one: object, other: object) -> bool:
    return one is other or (type(one) is type(other) and isinstance(one, SCALARS) and one == other)


def quiet(engine: Any, path: str) -> object:
    """Follow a path; where that fails, the type of the failure stands for the value."""
    try:
        return follow(engine, path)
    except Exception as error:
        return type(error)


def follow(engine: Any, path: str) -> Any:
    """Follow a dotted path; ``()`` calls what stands there, ``|`` tries another path where the first is missing.

    Raises AttributeError where this version of the engine lacks it.

    >>> follow(Path("/a/b"), "parent.name"), follow(Path("/a/b"), "nothing|name")
    ('a', 'b')
    """
    first, bar, rest = path.partition("|")
    value = engine
    try:
        for step in first.split("."):
            if value is None:
                return None  # a part of the settings that nobody set: no speculation, no adapters
            value = getattr(value, step.removesuffix("()"))
            value = value() if step.endswith("()") else value
    except AttributeError:
        if not bar:
            raise
        return follow(engine, rest)
    return value


def fingerprint(engine: Any, found: Runtime) -> Fingerprint:
    """Read an engine: its settings in force, and a digest of the variables that steer it."""
    fields = [_field(engine, name, path) for name, path in paths(found.name).items()]
    fields += read_all(
        {
            "engine.name": lambda: found.name,
            "engine.environ_digest": lambda: environ_digest(found.package, os.environ),
            "model.class": lambda: f"{type(engine).__module__}.{type(engine).__qualname__}",
            "model.name_or_path": lambda: home(follow(engine, found.checkpoint)),
            "seed.engine": lambda: follow(engine, found.seed) if found.seed else _no_seed(),
        },
        "engine",
    )
    return Fingerprint.of("model", fields)


def _no_seed() -> object:
    raise Missing("the engine's settings name no seed")


def _field(engine: Any, name: str, path: str) -> Field:
    field = read(name, lambda: follow(engine, path), "engine")
    if name in REDACTED and field.state is State.VALUE:
        return Field(name, None, State.REDACTED, REDACTED[name], "engine")
    return field if field.state is not State.VALUE else read(name, lambda: _safe(name, field.value), "engine")


def _safe(name: str, value: object) -> object:
    value = home(value) if name.rpartition(".")[2] in PATHS else shown(value)
    if withheld(name, value) or tells(value if isinstance(value, str) else repr(value)):
        return Field.secret(name, "engine")
    return value


def home(value: object) -> str | None:
    """Return a path or a name with the user's home cut off; None for nothing."""
    return short_path(str(value), os.path.expanduser("~")) if value not in (None, "") else None


def shown(value: Any, depth: int = 0) -> Any:
    """Bring a setting to plain values: numbers, names of types and members, small tables. Code of others is named only.

    >>> import re
    >>> shown({"mode": re.IGNORECASE, "path": Path("/m"), "kind": int})
    {'mode': 'IGNORECASE', 'path': '/m', 'kind': 'builtins.int'}
    """
    if isinstance(value, Enum):
        return value.name
    if value is None or isinstance(value, (bool, int, float)):
        return value
    if isinstance(value, str):
        return value[:TEXT_CHARS]
    if isinstance(value, Path):
        return home(value)
    if isinstance(value, type) or callable(value):
        return f"{getattr(value, '__module__', '')}.{getattr(value, '__qualname__', type(value).__qualname__)}"
    if type(value).__module__ == "torch" and type(value).__name__ == "dtype":
        return str(value).removeprefix("torch.")
    if depth >= DEEP:
        return {"type": type(value).__qualname__}
    return _container(value, depth + 1)


def _container(value: Any, depth: int) -> Any:
    if dataclasses.is_dataclass(value) or hasattr(type(value), "model_fields"):
        names = list(getattr(type(value), "__dataclass_fields__", None) or type(value).model_fields)
        value = {"type": type(value).__name__, **{name: getattr(value, name, None) for name in names}}
    if isinstance(value, Mapping):
        return {
            str(key): "(not read)" if withheld(str(key), item) else shown(item, depth)
            for key, item in list(value.items())[:ITEMS]
        }
    if isinstance(value, (set, frozenset)):
        return sorted(map(str, value))[:ITEMS]
    if isinstance(value, (list, tuple)):
        return [shown(item, depth) for item in value[:ITEMS]]
    return {"type": f"{type(value).__module__}.{type(value).__qualname__}"}


def environ_digest(package: str, environ: Mapping[str, str]) -> str | None:
    """Digest every variable of an engine but secrets: it has hundreds, and one that is not listed must not pass unseen.

    >>> environ_digest("vllm", {"VLLM_API_KEY": "x", "HOME": "/"}) is None
    True
    """
    prefixes = {"llama_cpp": ("LLAMA_", "GGML_"), "tensorrt_llm": ("TRTLLM_", "TLLM_")}
    front = prefixes.get(package, (package.upper() + "_",))
    chosen = sorted(
        (name, value)
        for name, value in environ.items()
        if name.startswith(front) and not named(name) and not tells(value)
    )
    return file_digest(repr(chosen).encode("utf-8", "surrogatepass")) if chosen else None


def process() -> list[Field]:
    """Read what a runtime without an engine object decides for the whole process: MLX's device, where it is loaded."""
    if "mlx.core" not in sys.modules:
        return []
    return [read("mlx.default_device", mlx_device, "mlx")]


def mlx_device() -> str | None:
    """Return the device that MLX computes on, or None where it is not loaded."""
    mlx = sys.modules.get("mlx.core")
    return str(mlx.default_device()) if mlx is not None else None
