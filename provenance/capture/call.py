"""One inference call in flight: it begins, it ends or fails, and each of the two writes one record.

`Call` knows nothing of models. Whoever observes a runtime hands it payloads and facts; the sync and async
wrappers around it are a few lines each. Nothing here raises into the observed call: what goes wrong is counted
by the recorder.
"""

import asyncio
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field
from typing import Any

import orjson
import uuid_utils

from provenance.catalogue.fields import why_closed
from provenance.errors import BadField
from provenance.facts import ROLE, STATUSES, TEXT, Field, Fingerprint, Output, Payload, Request, SequenceEnd, State
from provenance.fingerprint.environment import plain_field
from provenance.integrity.canonical import plain
from provenance.integrity.secrets import known, label, said, scrub
from provenance.privacy import guarded
from provenance.recorder import Harmless, Recorder

NOTHING = bytes(32)
NO_RUN = bytes(16)
OK, ERROR, ABORTED, ABANDONED, PARTIAL = map(STATUSES.index, ("ok", "error", "aborted", "abandoned", "partial"))
ERROR_CHARS = 4000
FIELDS_MOST, FIELD_DEEP = 64, 20
CALLER = "caller"
PLAIN = (bool, int, float, str, type(None))

# The innermost call of this task or thread: a call inside it is its child, or is not recorded on its own.
ACTIVE: ContextVar["Call | None"] = ContextVar("provenance_call", default=None)


@dataclass(slots=True)
class Labels:
    """What `provenance.run` says of the calls inside its block, and which runs they became."""

    name: str = ""
    tags: dict[str, str] = field(default_factory=dict)
    run_ids: list[str] = field(default_factory=list)
    fields: dict[str, Field] = field(default_factory=dict)
    over: bool = False
    kind: str = ""  # "replay": a call that was made again

    def set_field(self, name: str, value: object) -> None:
        """Add a field of your own to the calls of this block, from now on: those that run, and those to come.

        ``value`` is a number, a text, None, or a list or dict of these. Calls that have ended are not altered.

        Raises BadField (a ValueError) for a name or a value that cannot be kept; nothing that is recorded is lost.

        >>> with run() as block:
        ...     block.set_field("engine.kv_split", 4)
        """
        if not isinstance(name, str) or why_closed(name):
            why = why_closed(name) if isinstance(name, str) else "a name is a text, like 'engine.kv_split'"
            raise BadField(f"the field {name!r:.80} cannot be set: {why}. Choose another name.")
        if not _is_plain(value, FIELD_DEEP):
            raise BadField(
                f"the field {name!r} cannot hold a {type(value).__qualname__}: give a number, a text, None, or a list "
                "or dict of these."
            )
        if self.over:
            raise BadField(f"the field {name!r} was set after its block ended; set it inside `with provenance.run()`.")
        if len(self.fields) >= FIELDS_MOST and name not in self.fields:
            raise BadField(f"the field {name!r} is beyond {FIELDS_MOST}; put several values into one dict.")
        if said(name) != name:
            raise BadField("the name of the field looks like a credential. Choose another name.")
        made = plain_field(Field(name, value), CALLER)
        if made.state is State.UNKNOWN:
            raise BadField(f"the field {name!r} cannot be set: {made.reason}. Keep a digest of it instead.")
        self.fields = {**self.fields, name: made}

    @property
    def run_id(self) -> str:
        """Return the last run recorded in the block, or an empty text."""
        return self.run_ids[-1] if self.run_ids else ""


LABELS: ContextVar[Labels | None] = ContextVar("provenance_labels", default=None)


def _is_plain(value: object, depth: int) -> bool:
    if type(value) in PLAIN:
        return True
    if depth and type(value) in (list, tuple):
        return all(_is_plain(item, depth - 1) for item in value)  # type: ignore[attr-defined]
    return (
        depth > 0
        and type(value) is dict
        and all(type(key) is str and _is_plain(item, depth - 1) for key, item in value.items())
    )


@contextmanager
def run(name: str = "", tags: Mapping[str, object] | None = None) -> Iterator[Labels]:
    """Name and tag every call recorded inside the block.

    Blocks nest: an inner name replaces the outer, tags add up. The block yields an object whose ``run_ids``
    lists what was recorded and whose ``set_field`` adds fields of your own to the calls that follow.

    >>> with run(name="nightly", tags={"suite": 7}) as block:
    ...     block.tags
    {'suite': '7'}
    """
    outer = LABELS.get()
    merged = dict(outer.tags) if outer else {}
    with Harmless("the tags of a block"):
        merged.update({said(str(key)): label(str(key), value) for key, value in (tags or {}).items()})
    with Harmless("the name of a block"):
        name = said(str(name))
    block = Labels(name or (outer.name if outer else ""), merged, fields=outer.fields if outer else {})
    token = LABELS.set(block)
    try:
        yield block
    finally:
        LABELS.reset(token)
        block.over = True
        if outer is not None:
            outer.run_ids.extend(block.run_ids)


class Call:
    """The state of one call between its start record and its end record."""

    __slots__ = (
        "began",
        "elapsed",
        "ended",
        "facts",
        "labels",
        "model",
        "observer",
        "operation",
        "print",
        "recorder",
        "run_id",
        "runtime",
        "secrets",
        "seq",
    )

    def __init__(self, recorder: Recorder, runtime: str, operation: str, model: Any = None) -> None:
        self.recorder = recorder
        self.runtime = runtime
        self.operation = operation
        self.model = model
        self.observer: Any = None
        self.print: Fingerprint | None = None
        self.secrets: tuple[str, ...] = ()  # what must not stand in the text of an error
        self.facts: dict[str, Any] = {}
        self.run_id = NO_RUN
        self.seq = -1
        self.began = 0
        self.elapsed = -1
        self.ended = False
        self.labels = LABELS.get()

    def settings(self, fields: Iterable[Field]) -> Fingerprint:
        """Return settings as they may be written: without secrets, and without content where that is not kept."""
        return Fingerprint.of("settings", guarded(fields, self.recorder.settings.capture, self.recorder.key))

    def begin(
        self, payloads: tuple[Payload, ...], facts: dict[str, Any], rows: int, model: Fingerprint | None, load: int
    ) -> None:
        """Write the start record, before the model runs. Raises what the recorder raises; callers guard."""
        recorder, labels = self.recorder, self.labels
        environment = recorder.fingerprint(recorder.environment.environment())
        switches = recorder.fingerprint(recorder.environment.switches())
        model_digest = recorder.fingerprint(model) if model is not None else NOTHING
        self.print = model
        facts = self.facts = {**self._given(model), **facts}
        facts["context.call_index"] = recorder.serial()
        facts["runtime"], facts["operation"] = self.runtime, self.operation
        if labels is not None:
            if labels.kind:
                facts["kind"] = labels.kind
            # Whoever set them, and however: here labels go into a record.
            if labels.name:
                facts["name"] = said(str(labels.name))
            if labels.tags:
                facts["tags"] = {said(str(key)): label(str(key), value) for key, value in labels.tags.items()}
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

    def _given(self, model: Fingerprint | None) -> dict[str, Any]:
        """Return the caller's own fields. What was read from the model itself is stronger."""
        if self.labels is None or not self.labels.fields:
            return {}
        known = model.fields if model is not None else {}
        return {name: item for name, item in self.labels.fields.items() if name not in known or not known[name].known}

    def _is_theirs(self, name: str) -> bool:
        there = self.facts.get(name)
        return there is None or (isinstance(there, Field) and there.source == CALLER)

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
        *,
        seen: tuple[tuple[SequenceEnd, ...], tuple[Payload, ...]] = ((), ()),
    ) -> None:
        """Write the end record of a call that raised, was cancelled or was dropped, with what was seen of it."""
        status = ABORTED if isinstance(error, (asyncio.CancelledError, KeyboardInterrupt)) else ERROR
        status = ABANDONED if isinstance(error, GeneratorExit) else status
        kind = f"{type(error).__module__}.{type(error).__qualname__}".removeprefix("builtins.")
        message = str(error)
        for secret in self.secrets:  # a service may quote the key it refuses
            message = message.replace(secret, "(secret)")
        # More than is kept: a secret that the end cuts in two would not be known.
        text = scrub(message[: 2 * ERROR_CHARS].encode("utf-8", "surrogatepass"))
        text = text.decode("utf-8", "surrogatepass")[:ERROR_CHARS].encode("utf-8", "surrogatepass")
        payloads = (Payload(ROLE["error.text"], TEXT, text),) if text else ()
        self._end(status, seen[0], (*seen[1], *payloads), {"error": kind, **(facts or {})}, settings, weights)

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
        late = {name: item for name, item in self._given(self.print).items() if self._is_theirs(name)}
        facts = {**late, **facts}
        self.recorder.end(
            Output(
                self.run_id, self.seq, time.time_ns(), time.monotonic_ns(), self.elapsed, status, settings, weights,
                dumps(facts), sequences, payloads,
            )
        )  # fmt: skip


def dumps(facts: dict[str, Any]) -> bytes:
    """Serialise the small document of facts. Fields stand in it with state and source, all else as it is."""
    among = known()
    clean = {name: _clean(name, item, among) for name, item in facts.items()}
    # A Field is a dataclass, which orjson would write its own way.
    return orjson.dumps(clean, default=_default, option=orjson.OPT_NON_STR_KEYS | orjson.OPT_PASSTHROUGH_DATACLASS)


def _clean(name: str, value: object, among: tuple[bytes, ...]) -> object:
    """Return one fact as it may be written. A field that is secret is withheld whole; a text keeps the rest."""
    if isinstance(value, Field):
        return value.clean(among)
    if isinstance(value, str) and "." not in name:
        return said(value, among)
    if isinstance(value, (str, list, tuple)):
        kept = Field(name, value).clean(among)
        return value if kept.state is State.VALUE else kept
    return value


def _default(value: object) -> object:
    if isinstance(value, Field):
        return {"$field": value.document()}
    return plain(value)
