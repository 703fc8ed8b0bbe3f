"""The first result, served again: equal input, settings, model and environment get the answer that they got first.

    model = provenance.cached(model, tokenizer=tokenizer)
    @provenance.cached
    def ask(prompt): ...

A result is stored before the call returns, in the provenance store, and stays there if the process is killed. Each time
it is served is a run of kind ``cached`` that names the run it came from. One question at a time is asked once: whoever
asks it meanwhile waits for that answer. What is served is made anew from its bytes; nobody holds another's tensors.

Whatever cannot be known to be equal is not served: weights that are not hashed, a draw without a seed, an object that
cannot be compared, a result that would not come back the same. Then the call is made, as it is where the cache itself
fails. ``docs/cache.md`` says it at length.
"""

import asyncio
import functools
import inspect
import os
import threading
import time
import types
from collections.abc import Callable
from typing import Any, TypeVar, overload

from provenance import privacy
from provenance import recorder as recorders
from provenance.capture import requests
from provenance.capture.call import run
from provenance.capture.functions import record_as
from provenance.capture.requests import Policy, Question
from provenance.capture.wrap import wrap
from provenance.determinism import seeds
from provenance.determinism.functions import Unseen, is_model
from provenance.errors import BadSetting, UsageError
from provenance.integrity import whole
from provenance.integrity.secrets import scrub
from provenance.recorder import Harmless, Recorder

F = TypeVar("F", bound=Callable[..., Any])
CALL, WAIT, SERVED = "call", "wait", "served"
POLL_SECONDS = 0.005


@overload
def cached(item: F, *, policy: Any = None, tokenizer: Any = None) -> F: ...
@overload
def cached(*, policy: Any = None) -> Callable[[F], F]: ...
def cached(item: Any = None, *, policy: Any = None, tokenizer: Any = None) -> Any:
    """Serve the first result for equal input, settings and model again: of a transformers model, or of a function.

    A model is wrapped (see `wrap`) and returned, the same object; a function, sync or async, is recorded (see `record`)
    and returned cached. ``policy`` is a dict of limits: ``age`` in seconds, ``size`` and ``entry`` in bytes,
    ``environment`` (``class``, ``exact``, ``any``), ``version`` of what cannot be seen, ``patience`` in seconds.

    Raises UsageError for something else, BadSetting for a policy or settings under which nothing can be kept.
    """
    chosen = requests.policy_of(policy)
    if item is None:
        return lambda inner: cached(inner, policy=chosen)
    _refuse(recorders._state["recorder"])
    if is_model(item) and callable(getattr(type(item), "generate", None)):
        return _model(wrap(item, tokenizer), chosen)
    if not callable(item) or isinstance(item, type) or is_model(item):
        raise UsageError(
            f"a {type(item).__qualname__} cannot be cached; cached() takes a transformers model that generates, or a "
            "function. Put the call to an engine or a client into a function."
        )
    if inspect.isgeneratorfunction(item) or inspect.isasyncgenfunction(item):
        raise UsageError(f"{item.__qualname__} yields, and only what is returned whole can be cached.")
    return _function(item, chosen)


def _refuse(recorder: Recorder | None, model: bool = False) -> None:
    """Raise BadSetting where nothing can be kept."""
    if recorder is None:
        return
    if recorder.settings.capture != privacy.FULL:
        raise BadSetting(
            f"cached() needs outputs that are kept, and capture={recorder.settings.capture} keeps none; "
            "use capture=full."
        )
    if model and recorder.settings.weights != "tensors":
        raise BadSetting(
            f"cached() needs the digest of the weights in memory, and weights={recorder.settings.weights} reads none; "
            "use weights=tensors."
        )


# -- one flight a question ----------------------------------------------------------------------------


class Flight:
    """A question that is being asked: who asks, and what came of it."""

    __slots__ = ("done", "found", "owner", "tell")

    def __init__(self, owner: object) -> None:
        self.owner, self.done = owner, threading.Event()
        self.found: Any = None  # the first result, once it is stored
        self.tell = True  # whether who waited may ask for himself in turn; else all ask at once


class _Shared:
    """What this process shares: questions in flight, and the shelf of each store."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.flights: dict[bytes, Flight] = {}
        self.shelves: dict[str, Any] = {}
        self.told: set[str] = set()

    def shelf(self, recorder: Recorder) -> Any:
        """Return the shelf of the recorder's store."""
        from provenance.store.results import Shelf

        places = recorder.places
        with self.lock:
            return self.shelves.setdefault(places.url, Shelf(places.url, places.database))

    def join(self, key: bytes, owner: object) -> tuple[Flight, bool]:
        """Return the flight of a question, and whether it is ours to make the call."""
        with self.lock:
            there = self.flights.get(key)
            if there is not None:
                return there, False
            made = self.flights[key] = Flight(owner)
            return made, True

    def leave(self, key: bytes, flight: Flight) -> None:
        """End a flight: who waits looks what came of it."""
        with self.lock:
            if self.flights.get(key) is flight:
                del self.flights[key]
        flight.done.set()

    def once(self, name: str, why: str) -> None:
        """Say once of a function or model why nothing of it is served."""
        if name not in self.told:
            self.told.add(name)
            recorders.log.warning("provenance serves nothing again of %s: %s", name, why)


_shared = _Shared()
_left: list[Any] = []  # a child must not close what its parent has open


def _after_fork() -> None:
    global _shared
    _left.append(_shared)
    _shared = _Shared()


if hasattr(os, "register_at_fork"):
    os.register_at_fork(after_in_child=_after_fork)


class Ask:
    """One call on its way: `step` says whether to make it, to wait, or that it is served; `keep` ends it."""

    def __init__(self, recorder: Recorder, question: Question, policy: Policy, owner: object) -> None:
        self.recorder, self.question, self.policy, self.owner = recorder, question, policy, owner
        self.shelf = _shared.shelf(recorder)
        self.flight: Flight | None = None
        self.mine = False
        self.value: Any = None
        self.before: Any = None

    @property
    def oldest(self) -> int:
        """Return the time before which a first result is too old."""
        return 0 if self.policy.age is None else time.time_ns() - int(self.policy.age * 1e9)

    def step(self) -> str:
        """Say what to do next. Never raises."""
        try:
            return self._step()
        except Exception as error:
            self._failed(error)
            self.leave()
            return CALL

    def _step(self) -> str:
        if self.flight is not None and not self.mine:  # it has ended
            found, tell = self.flight.found, self.flight.tell
            self.flight = None
            if found is not None and self._serve(found):
                return SERVED
            if not tell:
                return CALL
        elif self._look():
            return SERVED
        self.flight, self.mine = _shared.join(self.question.key, self.owner)
        if not self.mine:
            if self.flight.owner == self.owner:  # the function asks itself
                self.flight = None
                return CALL
            return WAIT
        if self._look():  # stored by the one who was before us
            self.leave()
            return SERVED
        self.before = seeds.states()
        return CALL

    def _look(self) -> bool:
        found = self.shelf.get(self.question.key, self.oldest)
        if found is None or not self._serve(found):
            return False
        if self.mine and self.flight is not None:
            self.flight.found = found
        return True

    def _serve(self, found: Any) -> bool:
        """Make the value again and write the run; False where it cannot be made here."""
        try:
            self.value, states = whole.decode(found.data)
            if states is not None:
                seeds.restore(states)
        except Exception as error:
            self._failed(error)
            return False
        with Harmless("a result that was served again"):
            self.question.record(self.value, found.run_id)
        return True

    def keep(self, result: Any, run_id: str) -> Any:
        """Store what a call returned, and return it; or return what another process stored first. Never raises."""
        if self.flight is None:
            return result
        try:
            self.flight.tell = False
            first = self._encoded(result, run_id)
            if first is not None:
                stored = self.shelf.put(self.question.key, first, int(self.policy.size), self.oldest)
                self.flight.found = stored
                if (stored.data, stored.run_id) != (first.data, first.run_id) and self._serve(stored):
                    return self.value
        except Exception as error:
            self._failed(error)
        finally:
            self.leave()
        return result

    def _encoded(self, result: Any, run_id: str) -> Any:
        """Return the first result as it is stored, or None where it must not be."""
        from provenance.store.results import First

        after = seeds.states()
        drew = seeds.digest(self.before) != seeds.digest(after)
        why = ""
        if drew and not self.question.drawn:
            why = "it draws random numbers; ask inside provenance.seeded(seed), and each draw is a question of its own"
        elif not run_id:
            why = "its run could not be recorded"
        elif not self.question.same():
            why = "its model changed while it ran"
        data = b"" if why else whole.encode((result, seeds.plain(after) if self.question.drawn else None))
        if not why and len(data) > self.policy.entry:
            why = f"its result takes {len(data)} bytes, more than policy entry={self.policy.entry}"
        elif not why and scrub(text := whole.text(data)) is not text:
            why = "its result holds what looks like a secret"
        if why:
            _shared.once(self.question.name, why)
            return None
        return First(data, run_id, time.time_ns())

    def leave(self) -> None:
        """End our flight, if we have one."""
        if self.flight is not None and self.mine:
            _shared.leave(self.question.key, self.flight)
        self.flight, self.mine = None, False

    def _failed(self, error: Exception) -> None:
        if isinstance(error, whole.NotWhole):
            _shared.once(self.question.name, f"its result cannot be kept: {error}")
        else:
            self.recorder.failed("a first result", error)


# -- the two kinds ------------------------------------------------------------------------------------


def _begin(policy: Policy, name: str, make: Callable[[Recorder], Question], owner: object) -> Ask | None:
    """Begin a call, or return None where it cannot be answered but by making it."""
    with Harmless("a call that may be served again"):
        recorder = recorders.current()
        if recorder is None:
            return None
        try:
            _refuse(recorder)
            return Ask(recorder, make(recorder), policy, owner)
        except (Unseen, whole.NotWhole, BadSetting) as why:
            _shared.once(name, str(why))
    return None


def _made(ask: Ask, inner: Callable[[], Any]) -> Any:
    """Make a call and keep its result."""
    try:
        with run() as block:
            result = inner()
    except BaseException:
        ask.leave()
        raise
    return ask.keep(result, block.run_id)


def _function(function: Any, policy: Policy) -> Any:
    name = getattr(function, "__qualname__", type(function).__qualname__)
    inner = record_as(function, "")

    def question(args: tuple[Any, ...], kwargs: dict[str, Any]) -> Callable[[Recorder], Question]:
        return lambda recorder: requests.of_function(recorder, function, args, kwargs, policy)

    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        ask = _begin(policy, name, question(args, kwargs), threading.get_ident())
        if ask is None:
            return inner(*args, **kwargs)
        while (step := ask.step()) == WAIT and ask.flight is not None:
            ask.flight.done.wait()
        return ask.value if step == SERVED else _made(ask, lambda: inner(*args, **kwargs))

    @functools.wraps(function)
    async def waiting(*args: Any, **kwargs: Any) -> Any:
        ask = _begin(policy, name, question(args, kwargs), asyncio.current_task())
        if ask is None:
            return await inner(*args, **kwargs)
        while (step := ask.step()) == WAIT and ask.flight is not None:
            while not ask.flight.done.is_set():  # noqa: ASYNC110 - it may be that of a thread, or of another loop
                await asyncio.sleep(POLL_SECONDS)
        if step == SERVED:
            return ask.value
        try:
            with run() as block:
                result = await inner(*args, **kwargs)
        except BaseException:
            ask.leave()
            raise
        return ask.keep(result, block.run_id)

    return waiting if inspect.iscoroutinefunction(function) else wrapper


def _model(model: Any, policy: Policy) -> Any:
    """Put the cache in front of a wrapped model's generate; again changes the policy alone."""
    _refuse(recorders.current(), model=True)
    observed = vars(model)["generate"].__func__
    observed = getattr(observed, "provenance_cached", observed)

    @functools.wraps(observed)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        def question(recorder: Recorder) -> Question:
            return requests.of_model(recorder, self, args, kwargs, policy)

        ask = _begin(policy, type(self).__qualname__, question, threading.get_ident())
        if ask is None:
            return observed(self, *args, **kwargs)
        while (step := ask.step()) == WAIT and ask.flight is not None:
            ask.flight.done.wait()
        return ask.value if step == SERVED else _made(ask, lambda: observed(self, *args, **kwargs))

    generate.provenance_cached = observed  # type: ignore[attr-defined]
    model.generate = types.MethodType(generate, model)
    return model
