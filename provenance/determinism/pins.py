"""What of a call belongs to a model and to a thread, pinned: attention implementation, cache, number of threads.

    with pinned(model, attention="eager", cache=True, threads=1) as report:
        model.generate(ids)

Each of the three makes other sums of the same function, and each is chosen elsewhere than in the call: by what is
installed, by a checkpoint's generation_config.json, by the number of cores. ``deterministic()`` holds the switches of
the process and none of these. A pin makes them the same everywhere; it does not make one choice equal to another.
"""

import sys
import threading
from types import TracebackType
from typing import Any, NamedTuple, Self
from weakref import WeakKeyDictionary

from provenance.determinism.report import ABSENT, ALREADY, SET, Kept, Report
from provenance.errors import BadSetting

ATTENTION, CACHE, THREADS = "model.attn_implementation", "generation.use_cache", "torch.num_threads"
_lock = threading.RLock()
_models: "WeakKeyDictionary[Any, Kept]" = WeakKeyDictionary()
_threads = threading.local()  # the number of threads belongs to the thread that sets it


class State(NamedTuple):
    """What stood in a model: the implementation of each of its configurations, and the cache of its own settings."""

    attention: tuple[tuple[Any, Any], ...]
    cache: Any


class pinned:  # noqa: N801 - it is written as a word: `with pinned(model):`
    """Pin what is named, tell what became of it in ``report``, and put back what stood before.

    Blocks may be nested, and those of several threads may end in any order. A caller who gives ``use_cache`` to
    ``generate`` has the last word on it.
    """

    def __init__(self, model: Any, *, attention: str = "", cache: bool | None = None, threads: int = 0) -> None:
        if threads < 0:
            raise BadSetting(f"the number of threads is {threads}; give 1 or more, or 0 to leave it.")
        self.model = model
        self.attention, self.cache, self.threads = attention, cache, threads
        self.report = Report()
        self._mine: list[tuple[list[Any], list[Any]]] = []

    def __enter__(self) -> Self:
        self.report = Report()
        with _lock:
            kept = _models.setdefault(self.model, Kept())
            entry = kept.push(snapshot(self.model))
            own = _own_threads().push(_count())
            self._mine.append((entry, own))
            try:
                self._hold()
            except BaseException:
                self._close()
                raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        with _lock:
            self._close()

    def _close(self) -> None:
        entry, own = self._mine.pop()
        before = _models[self.model].pop(entry)
        if before is not None:
            restore(self.model, before)
        count = _own_threads().pop(own)
        if count is not None and count != _count():
            sys.modules["torch"].set_num_threads(count)

    def _hold(self) -> None:
        if self.attention:
            self._hold_attention()
        if self.cache is not None:
            own = getattr(self.model, "generation_config", None)
            if own is None:
                self.report.add(CACHE, ABSENT, None, "the model has no generation config")
            else:
                same = own.use_cache == self.cache
                own.use_cache = self.cache
                self.report.add(CACHE, ALREADY if same else SET, self.cache)
        if self.threads:
            same = _count() == self.threads
            if not same and "torch" in sys.modules:
                sys.modules["torch"].set_num_threads(self.threads)
            self.report.add(THREADS, ALREADY if same else SET, self.threads, "of this thread")

    def _hold_attention(self) -> None:
        stood = getattr(getattr(self.model, "config", None), "_attn_implementation", None)
        if stood == self.attention:
            self.report.add(ATTENTION, ALREADY, stood)
            return
        setter = getattr(self.model, "set_attn_implementation", None)
        if setter is None:
            self.report.add(
                ATTENTION, ABSENT, stood, "this model cannot change it; give attn_implementation as it loads"
            )
            return
        try:
            setter(self.attention)
        except (ValueError, ImportError, NotImplementedError, AttributeError) as error:
            said = (str(error).strip().splitlines() or [type(error).__name__])[0]
            self.report.add(ATTENTION, ABSENT, stood, said)
            return
        now = self.model.config._attn_implementation
        if now == self.attention:
            self.report.add(ATTENTION, SET, now)
        else:
            self.report.add(ATTENTION, ABSENT, now, f"the model did not take {self.attention!r}")


def snapshot(model: Any) -> State:
    """Read what a pin may change in a model."""
    found: dict[int, tuple[Any, Any]] = {}
    modules = model.modules() if callable(getattr(model, "modules", None)) else ()
    for part in (model, *modules):
        config = getattr(part, "config", None)
        for item in (config, *_inner(config)):
            if "_attn_implementation_internal" in getattr(item, "__dict__", {}):
                found[id(item)] = item, item._attn_implementation_internal
    own = getattr(model, "generation_config", None)
    return State(tuple(found.values()), getattr(own, "use_cache", None))


def _inner(config: Any) -> list[Any]:
    """Return the configurations inside one: of a vision tower, say."""
    names = getattr(config, "sub_configs", None) or {}
    found = [getattr(config, name, None) for name in names]
    return [part for item in found if item is not None for part in (item, *_inner(item))]


def restore(model: Any, before: State) -> None:
    """Put back what was read."""
    for config, value in before.attention:
        config._attn_implementation_internal = value
    own = getattr(model, "generation_config", None)
    if own is not None:
        own.use_cache = before.cache


def _own_threads() -> Kept:
    if not hasattr(_threads, "kept"):
        _threads.kept = Kept()
    kept: Kept = _threads.kept
    return kept


def _count() -> int:
    torch = sys.modules.get("torch")
    return int(torch.get_num_threads()) if torch is not None else 0
