"""Putting the observer on and taking it off: one model, or every `generate` of transformers in the process.

Every patch is kept with the very object that it replaced, and `uninstrument` puts that object back. Doing it
twice changes nothing. A library that is imported later is patched as it loads: a finder in front of all others lets the
usual finders do their work and adds one step behind the execution of the modules that are waited for. Nothing is
imported by us, and the module's loader stays the object that it was.
"""

import functools
import gc
import importlib.abc
import importlib.machinery
import sys
import types
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from provenance import recorder as recorders
from provenance.capture import runtimes, services
from provenance.capture.models import MODELS
from provenance.capture.observe import recorded, seam
from provenance.errors import MissingExtra, UsageError

MIXIN = "transformers.generation.utils"
PIPELINES = "transformers.pipelines.base"

_patched: dict[tuple[type, str], Callable[..., Any]] = {}  # class and name, with what stood there
_wrapped: "weakref.WeakSet[Any]" = weakref.WeakSet()


def wrap(model: Any, tokenizer: Any = None) -> Any:
    """Record every call of one model, engine or client, and return the same object.

    ``model`` is a transformers model or pipeline; a ``vllm.LLM``, ``sglang.Engine``, ``tensorrt_llm.LLM`` or
    ``llama_cpp.Llama``; an ``openai`` client, sync or async; or what an installed package knows to observe (entry
    point ``provenance.runtimes``). ``tokenizer`` turns the ids of a transformers model into text in the record (without
    one, text is unknown). Wrapping again changes nothing but the tokenizer.

    Raises UsageError for something that cannot generate.
    """
    if runtimes.wrap_engine(model) or services.wrap_client(model):
        recorders.current()
        return model
    piped = hasattr(model, "tokenizer") and hasattr(model, "preprocess")
    inner = getattr(model, "model", None) if piped else _inside(model)
    if inner is not None:
        wrap(inner, tokenizer or (model.tokenizer if piped else None))
        return model
    if not callable(getattr(type(model), "generate", None)):
        found = runtimes.by_entry_point(model)
        if found is not None:
            return found
        raise UsageError(
            f"a {type(model).__qualname__} has no generate; wrap() takes a transformers model or pipeline, an engine "
            "or an openai client. For any other function use @provenance.record."
        )
    if "torch" not in sys.modules:
        raise MissingExtra("torch", "wrap()", "transformers")
    _install_seam()
    MODELS.know_tokenizer(model, tokenizer)
    with recorders.Harmless("the state of a model before its first call"):
        MODELS.prepare(recorders.current(), model)
    if model not in _wrapped:
        stood = vars(model).get("generate")  # of a copy of a wrapped model: our own
        observed = recorded(_plain(model))
        observed.provenance_replaced = getattr(stood, "provenance_replaced", stood)  # type: ignore[attr-defined]
        # A bound method copies and pickles with its model, and rebinds to the copy; a closure would not.
        model.generate = types.MethodType(observed, model)
        _wrapped.add(model)
    return model


def _inside(model: Any) -> Any:
    """Return what torch.compile(model) holds, or None: its `generate` is that of the model inside, which runs it."""
    torch = sys.modules.get("torch")
    if torch is None or not isinstance(model, torch.nn.Module):
        return None
    return vars(model)["_modules"].get("_orig_mod")


def _plain(model: Any) -> Callable[..., Any]:
    """Return what generates for a model, as a function of its class: somebody may have put one on the model itself."""
    inherited: Callable[..., Any] = type(model).generate
    own = vars(model).get("generate")
    if isinstance(own, types.MethodType) and own.__self__ is model:
        inherited = own.__func__
    elif own is not None:

        @functools.wraps(inherited)
        def generate(self: Any, *args: Any, **kwargs: Any) -> Any:  # noqa: ARG001 - it is bound already
            return own(*args, **kwargs)

        return generate
    plain: Callable[..., Any] = getattr(inherited, "provenance_original", inherited)
    return plain


def instrument() -> None:
    """Record every `generate` of transformers in this process, pipelines and classes with a loop of their own included.

    Where transformers is not loaded yet, it is patched as it loads. Again changes nothing.
    """
    recorders.current()
    watch(("transformers.generation.utils", "transformers.models.", "transformers.pipelines.base"), _loaded)
    for name in list(sys.modules):
        if name.startswith("transformers."):
            _loaded(name)
    _remember_tokenizers()


def uninstrument(model: Any = None) -> None:
    """Take the observer off one model, or off everything, and put back the very functions that stood there."""
    runtimes.take_off(model)
    services.take_off(model)
    for item in list(_wrapped) if model is None else [getattr(model, "model", model), _inside(model), model]:
        if item in _wrapped:
            replaced = getattr(vars(item).pop("generate", None), "provenance_replaced", None)
            if replaced is not None:
                item.generate = replaced
            _wrapped.discard(item)
    if model is not None:
        return
    unwatch()
    for (owner, name), original in list(_patched.items()):
        if getattr(vars(owner).get(name), "provenance_original", None) is original:
            setattr(owner, name, original)
        del _patched[owner, name]


def _patch(owner: type, name: str, make: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
    original = vars(owner).get(name)
    if (owner, name) in _patched or not callable(original) or hasattr(original, "provenance_original"):
        return
    _patched[owner, name] = original
    setattr(owner, name, make(original))


def _install_seam() -> None:
    """Patch the method that makes the logits processors, where the loop's resolved settings can be seen."""
    module = sys.modules.get(MIXIN)
    if module is not None:
        _patch(module.GenerationMixin, "_get_logits_processor", seam)


def _loaded(name: str) -> None:
    """Patch what a module of transformers defines, once it is loaded."""
    module = sys.modules.get(name)
    if module is None:
        return
    if name == MIXIN:
        _install_seam()
    if name == PIPELINES and hasattr(module, "Pipeline"):
        _patch(module.Pipeline, "__init__", _pipeline_init)
    if name == MIXIN or name.startswith("transformers.models."):
        for owner in _generators(module):
            _patch(owner, "generate", recorded)


def _generators(module: types.ModuleType) -> Iterator[type]:
    """List the classes that a module defines and that have a `generate` of their own."""
    for value in list(vars(module).values()):
        if not isinstance(value, type) or value.__module__ != module.__name__:
            continue
        if isinstance(vars(value).get("generate"), types.FunctionType):
            yield value


def _pipeline_init(original: Callable[..., Any]) -> Callable[..., Any]:
    """Learn from a pipeline which tokenizer belongs to its model."""

    def __init__(self: Any, *args: Any, **kwargs: Any) -> None:  # noqa: N807
        original(self, *args, **kwargs)
        with recorders.Harmless("the tokenizer of a pipeline"):
            if getattr(self, "tokenizer", None) is not None:
                MODELS.know_tokenizer(self.model, self.tokenizer)

    __init__.provenance_original = original  # type: ignore[attr-defined]
    return __init__


def _remember_tokenizers() -> None:
    """Pair pipelines that exist already with their models."""
    module = sys.modules.get(PIPELINES)
    if module is None:
        return
    for item in gc.get_objects():
        # By its type: some objects run code, warn or raise when they are asked for their class.
        if issubclass(type(item), module.Pipeline) and getattr(item, "tokenizer", None) is not None:
            MODELS.know_tokenizer(item.model, item.tokenizer)


# -- libraries that are imported later ----------------------------------------------------------------


class Watcher(importlib.abc.MetaPathFinder):
    """Calls back once a module whose name fits has been executed."""

    def __init__(self, names: tuple[str, ...], loaded: Callable[[str], None]) -> None:
        self.names = names
        self.loaded = loaded

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: types.ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find nothing ourselves: hand on what the others find, with our step behind it."""
        if not any(fullname == name or (name.endswith(".") and fullname.startswith(name)) for name in self.names):
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    with recorders.Harmless("the import of a library"):
                        self._follow(spec.loader)
                return spec
        return None

    def _follow(self, loader: object) -> None:
        execute = getattr(loader, "exec_module", None)
        if execute is None or getattr(execute, "provenance_follows", False):
            return

        def exec_module(module: types.ModuleType) -> None:
            execute(module)
            try:
                self.loaded(module.__name__)
            except Exception as error:
                recorders.log.warning("provenance could not instrument %s: %s", module.__name__, error)

        exec_module.provenance_follows = True  # type: ignore[attr-defined]
        try:
            loader.exec_module = exec_module  # type: ignore[attr-defined]
        except AttributeError:  # a loader without a dictionary: its modules stay as they are
            return


_watcher: Watcher | None = None


def watch(names: tuple[str, ...], loaded: Callable[[str], None]) -> None:
    """Call ``loaded`` with the name of each module that fits, once it has been executed. Again changes nothing."""
    global _watcher
    if _watcher is None:
        _watcher = Watcher(names, loaded)
        sys.meta_path.insert(0, _watcher)


def unwatch() -> None:
    """Stop watching."""
    global _watcher
    if _watcher is not None and _watcher in sys.meta_path:
        sys.meta_path.remove(_watcher)
    _watcher = None
