"""One inference call in flight: it begins, it ends or fails, and each of the two writes one record.

`Call` knows nothing of models. Whoever observes a runtime hands it payloads and facts; the sync and async
wrappers around it are a few lines each. Nothing here raises into the observed call: what goes wrong is counted
by the recorder.
"""

import asyncio
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import orjson
import uuid_utils

from provenance.facts import ROLE, STATUSES, TEXT, Field, Fingerprint, Output, Payload, Request, SequenceEnd
from provenance.integrity.canonical import plain
from provenance.integrity.secrets import scrub
from provenance.recorder import Recorder

NOTHING = bytes(32)
NO_RUN = bytes(16)
OK, ERROR, ABORTED, ABANDONED, PARTIAL = map(STATUSES.index, ("ok", "error", "aborted", "abandoned", "partial"))
ERROR_CHARS = 4000

# The innermost call of this task or thread: a call inside it is its child, or is not recorded on its own.
ACTIVE: ContextVar["Call | None"] = ContextVar("provenance_call", default=None)


@dataclass(slots=True)
class Labels:
    """What `provenance.run` says of the calls inside its block, and which runs they became."""

    name: str = ""
    tags: dict[str, str] = field(default_factory=dict)
    run_ids: list[str] = field(default_factory=list)

    @property
    def run_id(self) -> str:
        """Return the last run recorded in the block, or an empty text."""
        return self.run_ids[-1] if self.run_ids else ""


LABELS: ContextVar[Labels | None] = ContextVar("provenance_labels", default=None)


@contextmanager
def run(name: str = "", tags: Mapping[str, object] | None = None) -> Iterator[Labels]:
    """Name and tag every call recorded inside the block.

    Blocks nest: an inner name replaces the outer, tags add up. The block yields an object whose ``run_ids``
    lists what was recorded.

    >>> with run(name="nightly", tags={"suite": 7}) as block:
    ...     block.tags
    {'suite': '7'}
    """
    outer = LABELS.get()
    merged = dict(outer.tags) if outer else {}
    merged.update({str(key): str(value) for key, value in (tags or {}).items()})
    block = Labels(name or (outer.name if outer else ""), merged)
    token = LABELS.set(block)
    try:
        yield block
    finally:
        LABELS.reset(token)
        if outer is not None:
            outer.run_ids.extend(block.run_ids)


class Call:
    """The state of one call between its start record and its end record."""

    __slots__ = (
        "began",
        "elapsed",
        "ended",
        "ended",
        "facts",
        "labels",
        "model",
        "observer",
        "operation",
        "recorder",
        "run_id",
        "runtime",
        "seq",
    )

    def __init__(self, recorder: Recorder, runtime: str, operation: str, model: Any = None) -> None:
        self.recorder = recorder
        self.runtime = runtime
        self.operation = operation
        self.model = model
        self.observer: Any = None
        self.facts: dict[str, Any] = {}
        self.run_id = NO_RUN
        self.seq = -1
        self.began = 0
        self.elapsed = -1
        self.ended = False
        self.labels = LABELS.get()

    def begin(
        self, payloads: tuple[Payload, ...], facts: dict[str, Any], rows: int, model: Fingerprint | None, load: int
    ) -> None:
        """Write the start record, before the model runs. Raises what the recorder raises; callers guard."""
        recorder, labels = self.recorder, self.labels
        environment = recorder.fingerprint(recorder.environment.environment())
        switches = recorder.fingerprint(recorder.environment.switches())
        model_digest = recorder.fingerprint(model) if model is not None else NOTHING
        self.facts = facts
        facts["context.call_index"] = recorder.serial()
        facts["runtime"], facts["operation"] = self.runtime, self.operation
        if labels is not None:
            if labels.name:
                facts["name"] = labels.name
            if labels.tags:
                facts["tags"] = labels.tags
        parent = ACTIVE.get()
        identity = uuid_utils.uuid7()
        self.run_id = identity.bytes
        request = Request(
            self.run_id, parent.run_id if parent is not None else NO_RUN, time.time_ns(), time.monotonic_ns(),
            environment, switches, model_digest, load, rows, dumps(facts), payloads,
        )  # fmt: skip
        self.seq = recorder.start(request)
        if labels is not None:
            labels.run_ids.append(str(identity))
        self.began = time.perf_counter_ns()

    def mark(self) -> None:
        """Stop the clock: the call has returned or raised; what follows is our own work."""
        self.elapsed = time.perf_counter_ns() - self.began

    def finish(
        self,
        sequences: tuple[SequenceEnd, ...],
        payloads: tuple[Payload, ...],
        facts: dict[str, Any],
        settings: bytes = NOTHING,
        weights: bytes = NOTHING,
    ) -> None:
        """Write the end record of a call that returned."""
        self._end(OK, sequences, payloads, facts, settings, weights)

    def fail(
        self,
        error: BaseException,
        facts: dict[str, Any] | None = None,
        settings: bytes = NOTHING,
        weights: bytes = NOTHING,
    ) -> None:
        """Write the end record of a call that raised, was cancelled or was dropped."""
        status = ABORTED if isinstance(error, (asyncio.CancelledError, KeyboardInterrupt)) else ERROR
        status = ABANDONED if isinstance(error, GeneratorExit) else status
        kind = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
        text = scrub(str(error)[:ERROR_CHARS].encode("utf-8", "surrogatepass"))
        payloads = (Payload(ROLE["error.text"], TEXT, text),) if text else ()
        self._end(status, (), payloads, {"error": kind, **(facts or {})}, settings, weights)

    def partial(self) -> None:
        """Write that a call has returned whose end could not be read: else it would pass for one that crashed."""
        if not self.ended:
            self._end(PARTIAL, (), (), {"evidence": "the end of the call could not be read"}, NOTHING, NOTHING)

    def _end(
        self,
        status: int,
        sequences: tuple[SequenceEnd, ...],
        payloads: tuple[Payload, ...],
        facts: dict[str, Any],
        settings: bytes,
        weights: bytes,
    ) -> None:
        if self.elapsed < 0:
            self.mark()
        self.ended = True
        self.recorder.end(
            Output(
                self.run_id, self.seq, time.time_ns(), time.monotonic_ns(), self.elapsed, status, settings, weights,
                dumps(facts), sequences, payloads,
            )
        )  # fmt: skip


def dumps(facts: dict[str, Any]) -> bytes:
    """Serialise the small document of facts. Fields stand in it with state and source, all else as it is."""
    # A Field is a dataclass, which orjson would write its own way.
    return orjson.dumps(facts, default=_default, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_PASSTHROUGH_DATACLASS)


def _default(value: object) -> object:
    if isinstance(value, Field):
        return {"$field": value.document()}
    return plain(value)
