"""Recording the `openai` client: chat completions, completions and responses, sync, async and streamed.

The three `create` methods of the one client that was wrapped are replaced. A stream is returned as the very object that
the client made, with its iterator seen step by step: the record ends when the stream ends, is closed or is dropped.
What a request says is written by an allow-list; the rest is one keyed digest. Keys and headers are never read, but for
the request id that the service gives. `capture.replies` reads requests and answers.
"""

import functools
import sys
import weakref
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import suppress
from typing import Any

from provenance import recorder as recorders
from provenance.capture import moment, replies, runtimes
from provenance.capture.call import ACTIVE, Call
from provenance.capture.functions import END, _awaited
from provenance.facts import Fingerprint
from provenance.recorder import START, Harmless

RUNTIME = "openai"
CLIENTS = ("OpenAI", "AsyncOpenAI")
RESOURCES = {"chat.completions": "chat", "completions": "completion", "responses": "response"}
CLOSED = "the stream was closed before its end"


def wrap_client(client: Any) -> bool:
    """Record the calls of an openai client, if it is one. Again changes nothing."""
    kind = _kind(client)
    if kind is None:
        return False
    make = _async if kind == "AsyncOpenAI" else _sync
    for path, form in RESOURCES.items():
        resource = _resource(client, path)
        if resource is not None:
            runtimes.put_on(resource, "create", functools.partial(make, f"{path}.create", form))
    return True


def take_off(client: Any = None) -> None:
    """Put back the methods of one client. Those of all go with the engines'."""
    if client is not None and _kind(client) is not None:
        for path in RESOURCES:
            resource = _resource(client, path)
            if resource is not None:
                runtimes.take_off(resource)


def _kind(client: Any) -> str | None:
    if "openai" not in sys.modules:
        return None
    for base in type(client).__mro__:
        if base.__name__ in CLIENTS and base.__module__.partition(".")[0] == "openai":
            return base.__name__
    return None


def _resource(client: Any, path: str) -> Any:
    """Follow a path in a client; None where its version has no such resource."""
    found = client
    for step in path.split("."):
        found = getattr(found, step, None)
    return found


class State:
    """What one request keeps between its two ends."""

    def __init__(self, call: Call, asked: replies.Asked) -> None:
        self.call, self.asked = call, asked

    def finish(self, document: dict[str, Any] | None, head: dict[str, Any]) -> None:
        """Write the end of a request that was answered. Without a document, the caller reads the answer itself."""
        call = self.call
        call.mark()
        try:
            found = replies.read(self.asked, document, head)
            settings = self.call.recorder.fingerprint(self.call.settings(self.asked.settings))
            call.finish(found.sequences, found.payloads, {**found.facts, "sampled": self.asked.sampled}, settings)
        except Exception:
            call.partial()
            raise

    def fail(self, error: BaseException, document: dict[str, Any] | None = None, head: Any = None) -> None:
        """Write the end of a request that failed, or of a stream that broke off, with what had come by then."""
        self.call.mark()
        head = head or {"request_id": getattr(error, "request_id", None)}
        found = replies.read(self.asked, document, head)
        settings = self.call.recorder.fingerprint(self.call.settings(self.asked.settings))
        seen = (found.sequences, found.payloads) if document is not None else ((), ())
        self.call.fail(error, found.facts, settings, seen=seen)


def _begin(resource: Any, operation: str, form: str, request: dict[str, Any]) -> State | None:
    recorder = recorders.current()
    if recorder is None:
        return None
    client = resource._client
    asked = replies.ask(form, request, recorder.key)
    call = Call(recorder, RUNTIME, operation)
    key = getattr(client, "api_key", None)
    call.secrets = (key,) if isinstance(key, str) and key else ()
    model = Fingerprint.of("model", replies.service(client, request, recorder.key))
    call.begin(asked.payloads, {**asked.facts, **moment.around()}, asked.rows, model, 0)
    return State(call, asked)


def _sync(operation: str, form: str, original: Callable[..., Any]) -> Callable[..., Any]:
    function = getattr(original, "__func__", None)

    @functools.wraps(original)
    def create(self: Any, *args: Any, **kwargs: Any) -> Any:
        state: State | None = None
        with Harmless(START):
            state = _begin(self, operation, form, kwargs)
        go = original if function is None else functools.partial(function, self)
        if state is None:
            return go(*args, **kwargs)
        token = ACTIVE.set(state.call)
        moment.enter()
        try:
            result = go(*args, **kwargs)
        except BaseException as error:
            with Harmless(END):
                state.fail(error)
            raise
        finally:
            moment.leave()
            ACTIVE.reset(token)
        with Harmless(END):
            _answered(state, result)
        return result

    return create


def _async(operation: str, form: str, original: Callable[..., Any]) -> Callable[..., Any]:
    function = getattr(original, "__func__", None)

    @functools.wraps(original)
    async def create(self: Any, *args: Any, **kwargs: Any) -> Any:
        state: State | None = None
        with Harmless(START):
            state = _begin(self, operation, form, kwargs)
        go = original if function is None else functools.partial(function, self)
        if state is None:
            return await go(*args, **kwargs)
        moment.enter()
        try:
            result = await _awaited(go(*args, **kwargs), state.call)
        except BaseException as error:
            with Harmless(END):
                state.fail(error)
            raise
        finally:
            moment.leave()
        with Harmless(END):
            _answered(state, result)
        return result

    return create


def _answered(state: State, result: Any) -> None:
    """End the record, or follow the stream that will."""
    if hasattr(result, "_iterator") and hasattr(result, "response") and hasattr(result, "close"):
        try:
            _follow(state, result)
        except Exception:
            state.call.partial()
            raise
    elif hasattr(result, "http_response"):  # with_raw_response, with_streaming_response
        state.finish(replies.raw_document(result.http_response), replies.head_of(result.http_response, result))
    else:
        head = {"request_id": getattr(result, "_request_id", None)}
        state.finish(replies.plain(result), head)


# -- streams ----------------------------------------------------------------------------------------


def _follow(state: State, stream: Any) -> None:
    """See a stream step by step, and its closing."""
    tap = Tap(stream._iterator, Watch(state, replies.head_of(stream.response, None)))
    close, here = type(stream).close, weakref.ref(stream)  # a strong one would keep the connection of a dropped stream

    def closing() -> Any:
        tap.watch.over(GeneratorExit(CLOSED))
        found = here()
        return close(found) if found is not None else None

    async def closing_later() -> Any:
        tap.watch.over(GeneratorExit(CLOSED))
        found = here()
        return await close(found) if found is not None else None

    stream._iterator = tap
    stream.close = closing_later if hasattr(type(stream), "__anext__") else closing


class Watch:
    """What has come of a stream, and the one end of its record."""

    def __init__(self, state: State, head: dict[str, Any]) -> None:
        self.state, self.head = state, head
        self.gathered = replies.Gathered(state.asked.form)
        self.ended = False

    def saw(self, item: Any) -> None:
        """Take one piece."""
        with Harmless("a piece of a stream"):
            self.gathered.add(item)

    def over(self, error: BaseException | None) -> None:
        """End the record: complete, or broken off by an error, by closing or by being dropped."""
        if self.ended:
            return
        self.ended = True
        with Harmless(END):
            document = self.gathered.document()
            if error is None or (isinstance(error, GeneratorExit) and self.gathered.complete()):
                self.state.finish(document, self.head)
            else:
                self.state.fail(error, document, self.head)


class Tap:
    """The iterator of a stream with ours around it, for either kind of loop."""

    def __init__(self, inner: Any, watch: Watch) -> None:
        self.inner, self.watch = inner, watch

    def __iter__(self) -> Iterator[Any]:
        return self

    def __next__(self) -> Any:
        try:
            item = self.inner.__next__()
        except StopIteration:
            self.watch.over(None)
            raise
        except BaseException as error:
            self.watch.over(error)
            raise
        self.watch.saw(item)
        return item

    def __aiter__(self) -> AsyncIterator[Any]:
        return self

    async def __anext__(self) -> Any:
        try:
            item = await self.inner.__anext__()
        except StopAsyncIteration:
            self.watch.over(None)
            raise
        except BaseException as error:
            self.watch.over(error)
            raise
        self.watch.saw(item)
        return item

    def __getattr__(self, name: str) -> Any:
        return getattr(self.inner, name)

    def __del__(self) -> None:
        with suppress(Exception):  # the interpreter may be half gone
            self.watch.over(GeneratorExit())
