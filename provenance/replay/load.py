"""The recorded model, loaded anew: from its checkpoint or from a function of the user's, in its type and on its device.

Only files of tensors are read (safetensors), no code of a checkpoint is run, and nothing is fetched from anywhere. What
came to stand in memory is then held against the record: the digest of the weights first of all.
"""

import os
import pkgutil
import sys
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from provenance.catalogue.fields import spec
from provenance.errors import BadFile, MissingExtra, UsageError
from provenance.explain import fields as explained
from provenance.facts import Run, WeightsManifest
from provenance.fingerprint import files, weights
from provenance.fingerprint import model as readers
from provenance.fingerprint.reading import Missing
from provenance.replay.plan import ASKED, Lost, value
from provenance.settings import remembered_digests

# What the caller had put on the model: code, or weights of another place. Not to be had from a checkpoint.
ATTACHED = ("model.forward_hooks", "model.monkey_patched", "adapter.names", "adapters.active", "adapters.merged",
            "model.quantization_config.quant_method")  # fmt: skip
LOADED, FILES = "weights.loaded_root", "weights.files_root"
DTYPE_SINCE = (4, 56)  # before, from_pretrained called it torch_dtype


@dataclass(slots=True)
class Loaded:
    """A model in memory, its tokenizer, and in what they are not as recorded."""

    model: Any
    tokenizer: Any = None
    path: Path | None = None
    lost: list[Lost] = field(default_factory=list)
    manifest: WeightsManifest | None = None


def key(run: Run) -> str:
    """Return what runs have in common that can be made again with one loaded model."""
    roots = [run.fields[name].document() for name in (LOADED, FILES) if name in run.fields]
    return repr((run.digests.get("model") or run.run_id, roots))


class Once:
    """Loads the model of a run when it is first wanted, and keeps it."""

    def __init__(self, run: Run, source: str | Callable[[], Any] | None = None) -> None:
        self.run, self.source = run, source
        self.loaded: Loaded | None = None

    def __call__(self) -> Loaded:
        """Return the model."""
        if self.loaded is None:
            self.loaded = load(self.run, self.source)
        return self.loaded


def load(run: Run, source: str | Callable[[], Any] | None = None) -> Loaded:
    """Load the model of a run. ``source`` is a path, ``module:function``, or something to call for a model.

    Raises UsageError, BadFile or MissingExtra with one sentence where there is none to be had.
    """
    _frameworks()
    made = _called(source) if callable(source) or _is_entry(source) else _read(run, source)
    _shape(run, made)
    _hold(run, made)
    return made


def _frameworks() -> None:
    try:
        import torch  # noqa: F401
        import transformers  # noqa: F401
    except ImportError as error:
        raise MissingExtra(str(error.name or "transformers"), "a replay", "transformers") from None


# -- a function of the user's -----------------------------------------------------------------------


def _is_entry(source: object) -> bool:
    return isinstance(source, str) and ":" in source and not os.path.exists(source)


def _called(source: str | Callable[[], Any] | None) -> Loaded:
    """Return the model that a function gives, or a pair of model and tokenizer."""
    name = source if isinstance(source, str) else getattr(source, "__qualname__", repr(source))
    try:
        if isinstance(source, str):
            if os.getcwd() not in sys.path:
                sys.path.insert(0, os.getcwd())
            source = pkgutil.resolve_name(source)
        found = source() if callable(source) else source
    except Exception as error:
        raise UsageError(f"--model {name} gave no model: {type(error).__name__}: {error}.") from error
    model, tokenizer = found if isinstance(found, tuple) and len(found) == 2 else (found, None)
    if not callable(getattr(type(model), "generate", None)):
        raise UsageError(
            f"--model {name} gave a {type(model).__qualname__}, which has no generate; return a model, or a pair of "
            "model and tokenizer."
        )
    return Loaded(model, tokenizer)


# -- a checkpoint -----------------------------------------------------------------------------------


def _read(run: Run, source: object) -> Loaded:
    import transformers

    place, revision = _place(run, source)
    owner = _class(run, transformers)
    wanted = {"trust_remote_code": False, "local_files_only": True, **({"revision": revision} if revision else {})}
    lost: list[Lost] = []
    options = _options(run, transformers, lost)
    try:
        model = _from(owner, place, {**wanted, "use_safetensors": True, **options})
    except (ImportError, ValueError) as error:
        if "attn_implementation" not in options:
            raise _unloaded(place, error) from error
        kind = options.pop("attn_implementation")
        lost.append(Lost("model.attn_implementation", f"{kind} cannot be had here ({_line(error)})"))
        model = _from(owner, place, {**wanted, "use_safetensors": True, **options})
    tokenizer = None
    if value(run, "tokenizer.class") is not None:
        try:
            tokenizer = transformers.AutoTokenizer.from_pretrained(place, **wanted)
        except Exception as error:
            lost.append(Lost("tokenizer.sha256", f"no tokenizer could be loaded, so there is no text ({_line(error)})"))
    path = Path(place)
    return Loaded(model, tokenizer, path if path.is_dir() else None, lost)


def _place(run: Run, source: object) -> tuple[str, str | None]:
    """Return where the model of a run lies, and its revision if that is the cache of the hub."""
    if source is not None:
        path = Path(str(source)).expanduser()
        if not path.is_dir():
            raise BadFile(f"there is no checkpoint at {source}; --model takes its folder, or module:function.")
        return str(path), None
    name, label = value(run, "model.name_or_path"), run.run_id[:13]
    if not name:
        raise UsageError(
            f"run {label} does not say where its model came from: it was built in memory. Name a checkpoint with "
            "--model PATH, or a function that returns the model with --model module:function."
        )
    path = Path(str(name)).expanduser()
    if path.is_dir():
        return str(path), None
    if str(name).startswith(("/", "~", ".")) or str(name).count("/") > 1:
        raise BadFile(f"there is no checkpoint at {name}, where run {label} had its model; name it with --model PATH.")
    revision = value(run, "model.revision")
    return str(name), revision if isinstance(revision, str) else None


def _class(run: Run, transformers: Any) -> Any:
    """Return the class that the model was of."""
    name = str(value(run, "model.class") or "")
    module, _, last = name.rpartition(".")
    if not module.startswith("transformers."):
        raise UsageError(
            f"the model of run {run.run_id[:13]} is a {name or 'class that was not recorded'}, which transformers "
            "cannot load by itself; name a function that returns it with --model module:function."
        )
    owner = getattr(transformers, last, None)
    if owner is None:
        raise UsageError(f"transformers {transformers.__version__} has no {last}, which run {run.run_id[:13]} used.")
    return owner


def _options(run: Run, transformers: Any, lost: list[Lost]) -> dict[str, Any]:
    """Return how the model was loaded: type, attention, and its places where it lay on several devices."""
    found: dict[str, Any] = {}
    kind = value(run, "model.dtype")
    version = tuple(int(part) for part in transformers.__version__.split(".")[:2] if part.isdigit())
    name = "dtype" if version >= DTYPE_SINCE else "torch_dtype"
    found[name] = "auto"
    if isinstance(kind, str):
        found[name] = getattr(sys.modules["torch"], kind, "auto")
    else:
        lost.append(Lost("model.dtype", f"the tensors had several types ({kind}); those of the checkpoint are taken"))
    attention = value(run, "model.attn_implementation")
    if isinstance(attention, (str, dict)):
        found["attn_implementation"] = attention
    places = value(run, "model.device_map")
    if isinstance(places, Mapping):
        found["device_map"] = {part: int(at) if str(at).isdigit() else at for part, at in places.items()}
    return found


def _from(owner: Any, place: str, options: dict[str, Any]) -> Any:
    try:
        return owner.from_pretrained(place, **options)
    except (OSError, RuntimeError, KeyError, TypeError, AssertionError) as error:
        raise _unloaded(place, error) from error


def _unloaded(place: str, error: Exception) -> BadFile:
    return BadFile(
        f"no model can be loaded from {place}: {_line(error)}. Only safetensors that lie on this machine are read, "
        "without code of the checkpoint; --model module:function loads anything else."
    )


def _line(error: Exception) -> str:
    text = " ".join(str(error).split()).rstrip(".")
    return f"{type(error).__name__}: {text[:200]}{'…' if len(text) > 200 else ''}"


# -- as it was --------------------------------------------------------------------------------------


def _shape(run: Run, made: Loaded) -> None:
    """Bring the model to the recorded device, type, attention and mode, as far as they are not there yet."""
    torch, model = sys.modules["torch"], made.model
    now = readers.fingerprint(model).fields

    def wanted(name: str) -> Any:
        then = value(run, name)
        return then if name in now and then is not None and now[name].value != then else None

    device = wanted("model.device_map")
    if isinstance(device, str):
        _try(made, "model.device_map", device, lambda: model.to(device))
    kind, tables = wanted("model.dtype"), wanted("model.buffer_dtypes")
    whole = value(run, "model.dtype")
    cast = isinstance(tables, dict) and list(tables) == [whole]  # it was cast as a whole, its tables with it
    if isinstance(whole, str) and hasattr(torch, whole) and (kind is not None or cast):
        _try(made, "model.dtype", whole, lambda: model.to(getattr(torch, whole)))
    for name, method in (("attn", "set_attn_implementation"), ("experts", "set_experts_implementation")):
        word = wanted(f"model.{name}_implementation")
        if isinstance(word, str) and hasattr(model, method):
            _try(made, f"model.{name}_implementation", word, lambda m=method, w=word: getattr(model, m)(w))  # type: ignore[misc]
    training = value(run, "model.training")
    if isinstance(training, bool):
        model.train(training)


def _try(made: Loaded, name: str, wanted: object, work: Callable[[], object]) -> None:
    try:
        work()
    except Exception as error:
        if not any(item.field == name for item in made.lost):
            made.lost.append(Lost(name, f"{wanted} cannot be had here ({_line(error)})"))


def _hold(run: Run, made: Loaded) -> None:
    """Hold what was loaded against the record: weights, what was attached, and all else that can act."""
    made.lost += _weights(run, made)
    now = dict(readers.fingerprint(made.model, made.tokenizer).fields)
    then = {name: item for name, item in run.fields.items() if name in now}
    told = {item.field for item in made.lost}
    for item in explained.compare(then, now)[0]:
        if item.name in told or item.name.startswith("weights.") or spec(item.name).effect == "none":
            continue
        level = ASKED if item.name in ATTACHED else 0
        made.lost.append(Lost(item.name, f"it was {_short(item.a)}, and is {_short(item.b)} now", level))


def _short(item: Any) -> str:
    text = str(item.show())
    return text if len(text) <= 80 else text[:79] + "…"


def _weights(run: Run, made: Loaded) -> list[Lost]:
    """Compare the digest of the weights in memory with that of the record, or that of the files if it has no other."""
    then, files_then = value(run, LOADED), value(run, FILES)
    if then is not None:
        try:
            made.manifest = weights.of_tensors(made.model)
        except Missing as why:
            return [Lost(LOADED, f"the weights cannot be hashed here: {why}", ASKED)]
        return _unlike(LOADED, then, made.manifest.root)
    if files_then is not None and made.path is not None:
        try:
            found, _ = files.of_files(made.path, lambda: False, remembered_digests())
        except (Missing, OSError) as why:
            return [Lost(FILES, f"the files of the weights cannot be hashed: {why}", ASKED)]
        return _unlike(FILES, files_then, found.root)
    why_not = run.fields[LOADED].reason if LOADED in run.fields else "not recorded"
    return [Lost(LOADED, f"whether these are the weights of the original is not known: {why_not}")]


def _unlike(name: str, then: object, now: str) -> list[Lost]:
    if then == now:
        return []
    return [Lost(name, f"these are other weights: {str(then)[:26]}… was recorded, and {now[:26]}… was loaded", ASKED)]
