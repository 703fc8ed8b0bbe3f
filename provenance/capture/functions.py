"""Recording any function: a call to an API client, a pipeline of one's own, a model of another runtime.

Arguments and result are kept in the total, lossless encoding. Sync, async and generator functions are one text:
each wrapper is a few lines around the same `Call`.
"""

import functools
import inspect
from collections.abc import AsyncGenerator, Awaitable, Callable, Generator
from contextlib import suppress
from typing import Any, NamedTuple, TypeVar, overload

from provenance import recorder as recorders
from provenance.capture.call import ACTIVE, Call
from provenance.facts import FINISHES, OCTETS, ROLE, VALUE, Field, Payload, SequenceEnd, State
from provenance.integrity import media
from provenance.integrity.objects import plain, type_name
from provenance.integrity.secrets import ARGUMENTS, GONE, TAKEN, UNKEPT, named, scrub_large, unsaid, withheld
from provenance.integrity.values import Cut, encode
from provenance.privacy import FULL
from provenance.recorder import START, Harmless

F = TypeVar("F", bound=Callable[..., Any])
RUNTIME = "function"
PARTS = 1 << 16
OWNER = "its plain attributes are fields of the call"
STATE_MOST, TEXT_MOST = 32, 200  # attributes of an object that are recorded, characters of one
RETURNED = FINISHES.index("returned")
END = "the end of a call"


@overload
def record(function: F) -> F: ...
@overload
def record(*, name: str = "") -> Callable[[F], F]: ...
def record(function: Any = None, *, name: str = "") -> Any:
    """Record every call of a function: arguments, result or exception, times, environment and switches.

    Use it bare or with a name. Coroutines and generators are recorded when they end; one that is dropped half
    way is ``abandoned``, a cancelled one ``aborted``.

    >>> @record
    ... def add(a, b):
    ...     return a + b
    >>> add.__name__
    'add'
    """
    if function is None:
        return lambda inner: record_as(inner, name)
    return record_as(function, name)


def record_as(function: Any, name: str) -> Any:
    """Choose the wrapper that fits the kind of function."""
    label = name or getattr(function, "__qualname__", type(function).__qualname__)
    places: tuple[str, ...] = ()
    with Harmless("the names of a function's parameters"):
        places = _places(function)
    # An argument by place has no name beside it that would say that it is secret.
    secret = tuple((place, name) for place, name in enumerate(places) if named(name))
    operation = Operation(label, secret, bound=places[:1] in (("self",), ("cls",)))
    if inspect.isasyncgenfunction(function):
        return _async_generator(function, operation)
    if inspect.isgeneratorfunction(function):
        return _generator(function, operation)
    if inspect.iscoroutinefunction(function):
        return _coroutine(function, operation)
    return _plain(function, operation)


class Operation(NamedTuple):
    """A recorded function: its name, and which of its arguments are secret by the names of its parameters."""

    name: str
    secret: tuple[tuple[int, str], ...]
    bound: bool = False  # the first argument is the object whose method it is


def _places(function: Any) -> tuple[str, ...]:
    """Return the names of the parameters that take an argument by place."""
    try:
        kinds = (inspect.Parameter.POSITIONAL_ONLY, inspect.Parameter.POSITIONAL_OR_KEYWORD)
        return tuple(item.name for item in inspect.signature(function).parameters.values() if item.kind in kinds)
    except (TypeError, ValueError):  # built in: it tells no names
        return ()


def _open(args: tuple[Any, ...], secret: tuple[tuple[int, str], ...]) -> tuple[Any, ...]:
    """Return arguments by place without the secret ones."""
    hidden = {place for place, name in secret if place < len(args) and withheld(name, args[place])}
    return tuple(GONE.decode() if place in hidden else item for place, item in enumerate(args)) if hidden else args


def _begin(operation: Operation, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Call | None:
    recorder = recorders.current()
    if recorder is None:
        return None
    call = Call(recorder, RUNTIME, operation.name)
    shown = _open(args, operation.secret) if operation.secret else args
    facts: dict[str, Field] = {}
    if operation.bound and args:  # what it holds is a setting of the call, and no part of what it was asked
        shown = (Cut(type_name(type(args[0])), OWNER), *shown[1:])
        facts = _state(args[0], recorder.settings.capture == FULL)
    given = {"args": shown, "kwargs": kwargs} if kwargs else {"args": shown}
    payloads, why = _kept(given, ROLE["arguments"], ROLE["prompt.media"], "arguments")
    hidden = operation.secret and GONE.decode() in [item for item in shown if type(item) is str]
    if why or hidden:  # who compares must not take two such inputs for equal
        secret = hidden or why == TAKEN.format("arguments")
        state = State.REDACTED if secret else State.UNKNOWN
        facts[ARGUMENTS] = Field(ARGUMENTS, None, state, TAKEN.format("arguments") if secret else why, RUNTIME)
    call.begin(payloads, facts, 1, None, 0)
    return call


def _state(owner: Any, texts: bool) -> dict[str, Field]:
    """Return the plain attributes of the object whose method is called, as fields: texts only where content is kept."""
    found = {}
    for name, value in plain(owner, STATE_MOST).items():
        if type(value) is not str or (texts and len(value) <= TEXT_MOST):
            field = Field(f"self.{name}", value, source=RUNTIME)
            found[field.name] = Field.secret(field.name, RUNTIME) if withheld(name, value) else field
    return found


def _kept(value: Any, role: int, beside: int, what: str) -> tuple[tuple[Payload, ...], str]:
    """Return what may be written of a value, and why it cannot be told what it equals, if it cannot.

    One payload is the value; one each is what is large in it, or a medium of its own.
    """
    aside = media.Beside()
    data = unsaid(value, aside)
    lost = GONE in data and data != encode(value, [])
    payloads = [Payload(role, VALUE, data)]
    for part, item in enumerate(aside[:PARTS]):
        if media.place(part) not in data:  # what stood for it went, beside a name that says secret
            content = GONE
        else:
            content = scrub_large(item.data) if media.readable(item) else item.data
        lost = lost or content != item.data
        payloads.append(Payload(beside, OCTETS, content, part=part))
    return tuple(payloads), TAKEN.format(what) if lost else UNKEPT.format(what, aside.lost) if aside.lost else ""


def _finish(call: Call | None, value: Any) -> None:
    if call is None:
        return
    call.mark()
    end = SequenceEnd(0, 0, 0, 0, 0, RETURNED, float("nan"), 0)
    payloads, why = _kept(value, ROLE["output.value"], ROLE["output.media"], "result")
    call.finish((end,), payloads, {"output": why} if why else {})


def _fail(call: Call | None, error: BaseException) -> None:
    if call is not None:
        call.mark()
        call.fail(error)


def _plain(function: Any, operation: Operation) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Any:
        call = None
        with Harmless(START):
            call = _begin(operation, args, kwargs)
        if call is None:
            return function(*args, **kwargs)
        token = ACTIVE.set(call)
        try:
            result = function(*args, **kwargs)
        except BaseException as error:
            with Harmless(END):
                _fail(call, error)
            raise
        finally:
            ACTIVE.reset(token)
        with Harmless(END):
            _finish(call, result)
        return result

    return wrapper


def _coroutine(function: Any, operation: Operation) -> Any:
    @functools.wraps(function)
    async def wrapper(*args: Any, **kwargs: Any) -> Any:
        call = None
        with Harmless(START):
            call = _begin(operation, args, kwargs)
        if call is None:
            return await function(*args, **kwargs)
        try:
            result = await _awaited(function(*args, **kwargs), call)
        except BaseException as error:
            with Harmless(END):
                _fail(call, error)
            raise
        with Harmless(END):
            _finish(call, result)
        return result

    return wrapper


async def _awaited(step: Awaitable[Any], call: Call) -> Any:
    """Await something with its call as the innermost of the task."""
    token = ACTIVE.set(call)
    try:
        return await step
    finally:
        with suppress(ValueError):  # dropped half way: closed from another context, where nothing was set
            ACTIVE.reset(token)


def _generator(function: Any, operation: Operation) -> Any:
    @functools.wraps(function)
    def wrapper(*args: Any, **kwargs: Any) -> Generator[Any, Any, Any]:
        inner = function(*args, **kwargs)  # nothing of it has run yet
        call = None
        with Harmless(START):
            call = _begin(operation, args, kwargs)
        if call is None:
            return (yield from inner)
        steps = Steps(inner, call)
        try:
            value = yield from steps
        except BaseException as error:
            with Harmless(END):
                _fail(call, error)
            raise
        with Harmless(END):
            _finish(call, steps.seen)
        return value

    return wrapper


class Steps:
    """A generator seen step by step: `yield from` hands it every send, throw and close."""

    def __init__(self, inner: Generator[Any, Any, Any], call: Call) -> None:
        self.inner, self.call = inner, call
        self.seen: list[Any] = []

    def __iter__(self) -> "Steps":
        return self

    def __next__(self) -> Any:
        return self._step(self.inner.__next__)

    def send(self, value: Any) -> Any:
        """Hand a value in."""
        return self._step(self.inner.send, value)

    def throw(self, *error: Any) -> Any:
        """Hand an exception in."""
        return self._step(self.inner.throw, *error)

    def close(self) -> None:
        """Close the generator."""
        self.inner.close()

    def _step(self, go: Callable[..., Any], *values: Any) -> Any:
        token = ACTIVE.set(self.call)
        try:
            item = go(*values)
        finally:
            ACTIVE.reset(token)
        self.seen.append(item)
        return item


def _async_generator(function: Any, operation: Operation) -> Any:
    @functools.wraps(function)
    async def wrapper(*args: Any, **kwargs: Any) -> AsyncGenerator[Any, Any]:
        inner = function(*args, **kwargs)  # nothing of it has run yet
        call = None
        with Harmless(START):
            call = _begin(operation, args, kwargs)
        seen: list[Any] = []
        step = inner.__anext__()
        try:
            while True:
                try:
                    item = await (step if call is None else _awaited(step, call))
                except StopAsyncIteration:
                    break
                seen.append(item)
                try:
                    step = inner.asend((yield item))
                except GeneratorExit:
                    await inner.aclose()
                    raise
                except BaseException as error:  # thrown in by the caller: the generator decides
                    step = inner.athrow(error)
        except BaseException as error:
            with Harmless(END):
                _fail(call, error)
            raise
        with Harmless(END):
            _finish(call, seen)

    return wrapper
