"""Which model this is beyond its name: revisions, source, patches, adapters, and what no file held.

Read once a load, in the caller's thread: nothing here reads more than a few source files. What a loader does not
leave on the model cannot be known afterwards, and says so.
"""

import hashlib
import os
import re
import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from functools import lru_cache
from pathlib import Path
from typing import Any

import orjson

from provenance.facts import Field
from provenance.fingerprint import code, files
from provenance.fingerprint.reading import Missing, Moot, Reader, read_all
from provenance.integrity.digests import file_digest

REMOTE = "transformers_modules."
NOISE = re.compile(r"drop(out|_?path|_?prob|_?rate)|layer_?drop|jitter")
# Not part of what an adapter is: where its base came from, and what a loader notes for itself.
ADAPTER_LABELS = {"base_model_name_or_path", "revision", "inference_mode", "peft_version", "auto_mapping"}
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "tokenizer.model", "vocab.json", "vocab.txt")
ADAPTER_FIELDS = ("active", "merged", "autocast_dtype", "dropout")
# Not part of what a configuration means: where it came from, who wrote it, and the type it was stored in
# (``model.dtype`` says what is in force).
LABELS = {"_name_or_path", "name_or_path", "transformers_version", "_commit_hash", "architectures", "dtype",
          "torch_dtype"}  # fmt: skip
# Numbers and names that every layer computes with: a small change moves logits by little, so each is a field.
COMPUTED = {
    "model.norm_eps": re.compile(r"\w*norm\w*_eps(ilon)?"),
    "model.rope_theta": re.compile(r"rope_theta|rotary_emb_base|rope_local_base_freq|rotary_pct|partial_rotary_factor"),
    "model.attention_scaling": re.compile(
        r"attention_multiplier|query_pre_attn_scalar|scale_attn_\w+|attn_logit_softcapping"
    ),
    "model.logit_scaling": re.compile(
        r"final_logit_softcapping|logits?_scal(e|ing)|(embedding|residual|lm_head)_multiplier"
    ),
    "model.activation": re.compile(r"hidden_act(ivation)?|activation_function|dense_act_fn|feed_forward_proj"),
}
# The rest of a configuration is without what other fields hold, and without what acts in training or on names alone.
HELD = {"rope_parameters", "sliding_window", "max_position_embeddings", "tie_word_embeddings", "is_encoder_decoder",
        "quantization_config"}  # fmt: skip
INERT = {"initializer_range", "initializer_factor", "id2label", "label2id", "problem_type", "return_dict",
         "output_hidden_states", "use_cache"}  # fmt: skip


def fields(model: Any, tokenizer: Any = None) -> list[Field]:
    """Read the identity of a loaded model and of the tokenizer beside it."""
    parts = list(model.modules())
    found = read_all(_model(model, parts), "model")
    found += _adapters(model, parts)
    if tokenizer is not None:
        found += read_all({"tokenizer.revision": lambda: _tokenizer(tokenizer)}, "tokenizer")
    return found


def _model(model: Any, parts: list[Any]) -> dict[str, Reader]:
    return {
        "model.revision": lambda: revision(model),
        "model.code_revision": lambda: _code_revision(model),
        "model.source_digest": lambda: source_digest({type(part).__module__ for part in parts}),
        "model.monkey_patched": lambda: code.patches(parts),
        "model.dropout_active": lambda: dropout(parts),
        "generation_config.revision": lambda: _generation(model),
        "weights.missing_keys": lambda: missing_keys(model),
        "weights.unexpected_keys": lambda: _unexpected(model),
        "weights.tied_keys": lambda: tied_keys(model),
    }


# -- revisions ----------------------------------------------------------------------------------------


def revision(model: Any) -> str | None:
    """Return the commit that a model was loaded from."""
    config = getattr(model, "config", None)
    return _commit(getattr(config, "_name_or_path", None), getattr(config, "_commit_hash", None), files.ENDINGS)


def _commit(name: object, kept: object, endings: tuple[str, ...]) -> str | None:
    """Return a commit: as the loader kept it, as the snapshot's folder says, or that of the one cached revision."""
    if kept:
        return str(kept)
    if not name:
        return None
    folder = Path(str(name)).expanduser()
    if folder.exists():
        for above, part in zip(folder.parts, folder.parts[1:], strict=False):
            if above == "snapshots" and files.COMMIT.fullmatch(part):
                return part
        raise Moot("it was loaded from a folder, which has no revision")
    return files.snapshot(str(name), None, os.environ, endings).name


def _tokenizer(tokenizer: Any) -> str | None:
    kept = getattr(tokenizer, "init_kwargs", {}).get("_commit_hash") or getattr(tokenizer, "_commit_hash", None)
    return _commit(getattr(tokenizer, "name_or_path", None), kept, TOKENIZER_FILES)


def _generation(model: Any) -> str | None:
    config = getattr(model, "generation_config", None)
    if config is None:
        raise Moot("the model has no generation config")
    kept = getattr(config, "_commit_hash", None)
    if kept or not getattr(config, "_from_model_config", False):
        return str(kept) if kept else revision(model)
    raise Moot("the generation config was made from the model's own")


def _code_revision(model: Any) -> str:
    home = next((kind.__module__ for kind in type(model).__mro__ if kind.__module__.startswith(REMOTE)), "")
    if not home:
        raise Moot("the model's code is not remote code")
    found = next((part for part in home.split(".") if files.COMMIT.fullmatch(part)), None)
    if found is None:
        raise Missing("the remote code came from a folder, which has no revision")
    return found


# -- code ---------------------------------------------------------------------------------------------


def source_digest(modules: Iterable[str]) -> str:
    """Digest the source files of the modules that the model's parts are of. Those of torch go by its version."""
    found = []
    for name in sorted(set(modules)):
        if name.partition(".")[0] == "torch":
            continue
        path = getattr(sys.modules.get(name), "__file__", None)
        if not path or not os.path.isfile(path):
            raise Missing(f"the module {name} has no source file")
        facts = os.stat(path)
        found.append([_portable(name), _source(path, facts.st_size, facts.st_mtime_ns)])
    if not found:
        raise Moot("every part of the model is torch's own")
    return file_digest(orjson.dumps(found))


@lru_cache(maxsize=512)
def _source(path: str, _size: int, _mtime: int) -> str:
    return hashlib.sha256(Path(path).read_bytes()).hexdigest()


def _portable(name: str) -> str:
    """Take the commit out of a module's name: the same code at another commit is the same code."""
    return ".".join(part for part in name.split(".") if not files.COMMIT.fullmatch(part))


# -- what acts in training mode -----------------------------------------------------------------------


def dropout(parts: Iterable[Any]) -> list[str]:
    """Name the dropout and noise that is on: in modules that are in training mode, with a rate above zero."""
    found: Counter[str] = Counter()
    for part in parts:
        if not part.training:
            continue
        kind = type(part).__name__
        for name, value in part.__dict__.items():
            named = NOISE.search(name.lower()) or (name == "p" and "dropout" in kind.lower())
            if named and isinstance(value, (int, float)) and not isinstance(value, bool) and 0 < value <= 1:
                found[f"{kind}.{name}={value:g}"] += 1
    return [f"{name} x{count}" for name, count in sorted(found.items())]


# -- keys ---------------------------------------------------------------------------------------------


def missing_keys(model: Any) -> list[str]:
    """Name the parameters that no file held. transformers marks every parameter that it loaded.

    Raises Moot for a model that was not loaded, Missing where nothing is marked.
    """
    marks = {name: hasattr(item, "_is_hf_initialized") for name, item in model.named_parameters()}
    if any(marks.values()):
        return sorted(name for name, loaded in marks.items() if not loaded)
    _loaded(model)
    raise Missing("the loader left no mark on the parameters")


def _unexpected(model: Any) -> list[str]:
    _loaded(model)
    raise Missing("the loader keeps no list of what it did not use")


def _loaded(model: Any) -> None:
    if not getattr(getattr(model, "config", None), "_name_or_path", ""):
        raise Moot("the model was not loaded from files")


def tied_keys(model: Any) -> list[list[str]]:
    """Return the names that really share memory, group by group, whatever the configuration says."""
    groups: dict[int, list[str]] = {}
    for name, item in model.named_parameters(remove_duplicate=False):
        groups.setdefault(id(item), []).append(name)
    return sorted(sorted(names) for names in groups.values() if len(names) > 1)


# -- adapters -----------------------------------------------------------------------------------------


def _adapters(model: Any, parts: list[Any]) -> list[Field]:
    """Read the adapters from the layers that compute with them, and not from what was asked for."""
    table = getattr(model, "peft_config", None)
    layers = [part for part in parts if "merged_adapters" in part.__dict__]
    if not table and not layers:
        return [Field.moot(f"adapters.{name}", "no adapter is attached") for name in ADAPTER_FIELDS]
    found = read_all(
        {
            "adapters.active": lambda: active(layers),
            "adapters.merged": lambda: sorted({str(name) for part in layers for name in part.merged_adapters}),
            "adapters.autocast_dtype": lambda: _adapter_dtypes(layers),
            "adapters.dropout": lambda: _adapter_dropout(layers),
        },
        "model",
    )
    for name, config in sorted((table or {}).items()):
        found += read_all(_adapter(name, config, layers), "model")
    return found


def _adapter(name: str, config: Any, layers: list[Any]) -> dict[str, Reader]:
    key = f"adapters.{str(name).replace('.', '_')}"
    return {
        f"{key}.scaling": lambda: _scaling(name, layers),
        f"{key}.config_digest": lambda: adapter_digest(config),
        f"{key}.revision": lambda: getattr(config, "revision", None),
    }


def active(layers: Iterable[Any]) -> list[str]:
    """Return the adapters in force, in order. Layers that are switched off have none.

    >>> active([])
    []
    """
    ways = {force(part)[0] for part in layers}
    if len(ways) == 1:
        return list(ways.pop())
    return sorted("+".join(way) or "none" for way in ways)


def force(layer: Any) -> tuple[tuple[str, ...], tuple[tuple[str, float], ...]]:
    """Return the adapters that a layer computes with, and how much of each."""
    names = () if layer.disable_adapters else tuple(map(str, layer.active_adapters))
    return names, tuple(getattr(layer, "scaling", {}).items())


def _scaling(name: str, layers: Iterable[Any]) -> object:
    values = sorted({float(part.scaling[name]) for part in layers if name in getattr(part, "scaling", {})})
    if not values:
        raise Missing("no layer holds a scaling for it")
    return values[0] if len(values) == 1 else values


def _settings(table: Mapping[str, Any], path: str = "") -> Iterator[tuple[str, str, Any]]:
    """Walk a configuration and those of its parts: path, name and value; without what other fields hold."""
    for key, value in sorted(table.items()):
        if key in LABELS or key in INERT or (not path and (key in HELD or "dropout" in key)):
            continue
        if isinstance(value, Mapping):
            yield from _settings(value, f"{path}{key}.")
        else:
            yield f"{path}{key}", key, value


def computed(config: Any, names: re.Pattern[str]) -> object:
    """Return what a configuration says of one thing that every layer computes with; by path where it says several."""
    found = {path: value for path, key, value in _settings(config.to_dict()) if names.fullmatch(key)}
    found = {path: _plain(value) for path, value in found.items() if value is not None}
    values = list(found.values())
    return values[0] if values and all(value == values[0] for value in values) else found or None


def rest_digest(config: Any) -> str:
    """Digest the configuration without the values that are fields of their own, and without what never acts."""
    rest = [
        (path, None if any(names.fullmatch(key) for names in COMPUTED.values()) else value)
        for path, key, value in _settings(config.to_dict())
    ]
    return file_digest(orjson.dumps(rest, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS, default=str))


def adapter_digest(config: Any) -> str:
    """Digest the configuration of an adapter, without labels."""
    table = config.to_dict() if hasattr(config, "to_dict") else dict(vars(config))
    kept = {key: _plain(value) for key, value in table.items() if key not in ADAPTER_LABELS}
    return file_digest(orjson.dumps(kept, option=orjson.OPT_SORT_KEYS | orjson.OPT_NON_STR_KEYS))


def _adapter_dtypes(layers: Iterable[Any]) -> list[str]:
    names = {
        str(item.dtype).removeprefix("torch.")
        for part in layers
        for slot in getattr(part, "adapter_layer_names", ())
        for item in getattr(getattr(part, slot, None), "parameters", list)()
    }
    return sorted(names)


def _adapter_dropout(layers: Iterable[Any]) -> list[str]:
    tables = ((part, getattr(part, "lora_dropout", None)) for part in layers)
    return dropout(table[name] for part, table in tables if table for name in force(part)[0] if name in table)


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, (set, frozenset)):
        return sorted(str(item) for item in value)
    if isinstance(value, (list, tuple)):
        return [_plain(item) for item in value]
    return re.sub(r" at 0x[0-9a-f]+", "", str(value))
