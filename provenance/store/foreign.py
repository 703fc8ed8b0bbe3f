"""Reading an exported run that may come from anybody: each part is held to its kind before anything trusts it.

What no run holds is refused in one sentence with its place in the document, the value, and what belongs there.
Keys that are not known are passed over.
"""

import base64
import binascii
import json
import re
import struct
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any, NoReturn, TypeVar

import orjson

from provenance.errors import BadFile
from provenance.facts import FINISHES, STATUSES, Field, Run, Sequence, State, Step
from provenance.integrity import values
from provenance.integrity.canonical import restore

SCHEMA = "provenance/run/1"
KINDS = ("call", "replay", "probe", "cached")
MAX_DEPTH = 64
MOST = (1 << 63) - 1
ROWS = 1 << 31
LARGEST = 7e38  # the difference of two numbers of 32 bits
RUN_ID = re.compile(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}")
KEY = re.compile(r"([0-9a-f]{64})?")
KEY_ID = re.compile(r"[0-9a-f]*")
DIGEST = re.compile(r"p[0-9]+:sha256:[0-9a-f]{64}")
NUMBER = re.compile(r"[0-9]{1,19}")
STATE_CHARS = 1 << 20
NOT_FINITE = ("inf", "-inf", "nan")
# What the decoding of a value can raise where the value is none.
UNDECODED = (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError, struct.error)
MISSING = object()
T = TypeVar("T")


class _Wrong(Exception):
    """A part of a document that no run holds."""


@dataclass(frozen=True, slots=True)
class At:
    """A part of a document, and its place in it."""

    value: Any
    place: str

    def wrong(self, wanted: str) -> NoReturn:
        """Refuse this part."""
        place = self.place if len(self.place) <= 90 else self.place[:89] + "…"
        if self.value is MISSING:
            raise _Wrong(f"{place} is missing")
        raise _Wrong(f"{place} is {shown(self.value)}, and {wanted} belongs there")

    def table(self) -> dict[str, Any]:
        """Return an object of JSON."""
        return self.value if isinstance(self.value, dict) else self.wrong("an object")

    def key(self, name: str) -> "At":
        """Return the part under a key, which may be missing."""
        return At(self.table().get(name, MISSING), f"{self.place}.{name}" if self.place else name)

    def each(self) -> list["At"]:
        """Return the parts of an array."""
        if not isinstance(self.value, (list, tuple)):
            self.wrong("an array")
        return [At(item, f"{self.place}[{n}]") for n, item in enumerate(self.value)]

    def pairs(self) -> list[tuple[str, "At"]]:
        """Return the parts of an object, which may be missing."""
        found = {} if self.value is MISSING else self.table()
        return [(name, self.key(name)) for name in found]

    def maybe(self, read: Callable[["At"], T]) -> T | None:
        """Return what a reader makes of this part, or None where there is none."""
        return None if self.value is MISSING or self.value is None else read(self)

    def text(self, default: str | None = None) -> str:
        """Return a text."""
        if self.value is MISSING and default is not None:
            return default
        return self.value if isinstance(self.value, str) else self.wrong("text")

    def like(self, pattern: re.Pattern[str], wanted: str, default: str | None = None) -> str:
        """Return a text of a form."""
        text = self.text(default)
        return text if pattern.fullmatch(text) else self.wrong(wanted)

    def word(self, words: Iterable[str], default: str | None = None) -> str:
        """Return one of some words."""
        text = self.text(default)
        return text if text in words else self.wrong(f"one of {', '.join(words)}")

    def whole(self, low: int = 0, high: int = MOST, wanted: str = "a whole number from 0") -> int:
        """Return a whole number: true is none, and neither is 1.0."""
        value = self.value
        return value if type(value) is int and low <= value <= high else self.wrong(wanted)

    def nanoseconds(self) -> int:
        """Return a time, which travels as text."""
        value = self.value
        if isinstance(value, str) and NUMBER.fullmatch(value):
            value = int(value)
        return value if type(value) is int and 0 <= value <= MOST else self.wrong("a number of nanoseconds, as text,")

    def number(self, low: float = -LARGEST, high: float = LARGEST, wanted: str = "a number of 32 bits") -> float:
        """Return a number; what is not finite is text."""
        value = self.value
        if value in NOT_FINITE if isinstance(value, str) else False:
            return float(value)
        return float(value) if type(value) in (int, float) and low <= value <= high else self.wrong(wanted)


def shown(value: Any) -> str:
    """Return a value in JSON, cut to what an error can carry in one line."""
    if isinstance(value, (dict, list)) and depth(value) > MAX_DEPTH:
        return "something nested very deep"
    text = " ".join(json.dumps(value).split())
    return text if len(text) <= 60 else text[:59] + "…"


def depth(form: Any) -> int:
    """Return how deep a document is nested, without going deep: a level at a time."""
    found, level = 0, [form]
    while level and found <= MAX_DEPTH:
        found += 1
        inner = [item for item in level if isinstance(item, (dict, list))]
        level = [part for item in inner for part in (item.values() if isinstance(item, dict) else item)]
    return found


def read(form: Any, name: str) -> Run:
    """Read a run from its document; ``name`` says which file it is of.

    Raises BadFile where it is not one, with what is wrong.
    """
    if not isinstance(form, dict) or form.get("schema") != SCHEMA:
        found = shown(form.get("schema")) if isinstance(form, dict) else shown(form)
        raise BadFile(
            f"{name} is not an exported run: its schema is {found} and not {SCHEMA!r}; `provenance export` writes one."
        )
    try:
        return _run(At(form, ""))
    except _Wrong as error:
        raise BadFile(f"{name} is damaged: {error}; export the run again.") from None


def _run(form: At) -> Run:
    if "catalogue" in form.table():
        form.key("catalogue").whole(1, wanted="the version of a catalogue")
    fields = {name: _field(name, part) for name, part in _there(form.key("fields")).pairs()}
    sequences = tuple(_sequence(part) for part in form.key("sequences").each())
    _agree(form.key("sequences"), sequences, fields)
    return Run(
        run_id=form.key("run_id").like(RUN_ID, "the id of a run"), kind=form.key("kind").word(KINDS, "call"),
        runtime=form.key("runtime").text(""), operation=form.key("operation").text(""),
        status=form.key("status").word(STATUSES), started_at=form.key("started_at").nanoseconds(),
        duration_ns=form.key("duration_ns").maybe(At.nanoseconds), fields=fields, sequences=sequences,
        name=form.key("name").text(""), tags={key: part.text() for key, part in form.key("tags").pairs()},
        error=form.key("error").text(""), key_id=form.key("key_id").like(KEY_ID, "the id of a key in hexadecimal", ""),
        digests={key: part.like(DIGEST, "a digest") for key, part in form.key("digests").pairs()},
        states={key: _state(part) for key, part in form.key("states").pairs()},
    )  # fmt: skip


def _state(part: At) -> bytes:
    text = part.text()
    try:
        return (
            base64.b64decode(text, validate=True)
            if len(text) <= STATE_CHARS
            else part.wrong("a state of 1 MiB at most")
        )
    except (binascii.Error, ValueError):  # which text beyond ASCII is
        part.wrong("the state of a generator in base64")


def _there(part: At) -> At:
    return part if part.value is not MISSING else part.wrong("")


def _field(name: str, form: At) -> Field:
    form.table()
    if depth(form.value) > MAX_DEPTH:
        form.wrong(f"a field nested at most {MAX_DEPTH} deep")
    source = form.key("source").text("")
    reason = form.key("reason").maybe(_reason) or ""
    part = form.key("value")
    if part.value is MISSING:
        words = [state for state in State if state is not State.VALUE]
        return Field(name, None, State(form.key("state").word(words)), reason, source)
    try:
        return Field(name, restore(part.value), State.VALUE, reason, source)
    except UNDECODED:
        part.wrong("the value of a field")


def _reason(part: At) -> str:
    """Return a reason, which may be text that is not Unicode."""
    try:
        found = restore(part.value)
    except UNDECODED:
        found = None
    return found if isinstance(found, str) else part.wrong("text")


def _sequence(form: At) -> Sequence:
    output_ids = form.key("output_ids").maybe(_ids)
    steps = form.key("steps")
    found = () if steps.value is MISSING else tuple(_step(part) for part in steps.each())
    if output_ids is not None:
        _chosen(steps, found, output_ids)
    return Sequence(
        row=form.key("row").whole(high=ROWS, wanted="the number of a prompt"),
        ret=form.key("ret").whole(high=ROWS, wanted="the number of a return"),
        input_key=form.key("input_key").like(KEY, "a key of 64 hexadecimal digits", ""),
        output_key=form.key("output_key").like(KEY, "a key of 64 hexadecimal digits", ""),
        input_ids=form.key("input_ids").maybe(_prompt_ids), output_ids=output_ids,
        input_text=form.key("input_text").maybe(At.text), output_text=form.key("output_text").maybe(At.text),
        input_value=form.key("input_value").maybe(_value), output_value=form.key("output_value").maybe(_value),
        finish=form.key("finish").word(FINISHES, "unknown"),
        padding=form.key("padding").maybe(lambda part: part.whole(high=ROWS, wanted="a number of padding tokens")),
        steps=found, logits_dtype=form.key("logits_dtype").text(""), no_evidence=form.key("no_evidence").text(""),
        mask=form.key("mask").maybe(_mask),
        media=tuple(part.text() for part in (form.key("media").maybe(At.each) or [])),
    )  # fmt: skip


def _id(part: At) -> int:
    return part.whole(wanted="a token id")


def _ids(form: At) -> tuple[int, ...]:
    return tuple(_id(part) for part in form.each())


def _prompt_ids(form: At) -> tuple[int, ...]:
    """Return the ids of a prompt, where some models mark their images with numbers below 0."""
    return tuple(part.whole(-ROWS, wanted="a token id") for part in form.each())


def _mask(form: At) -> tuple[int, ...]:
    return tuple(part.whole(high=1, wanted="0 or 1") for part in form.each())


def _step(form: At) -> Step:
    parts = form.each()
    if len(parts) != 6:
        form.wrong("[token, top ids, top logits, log probability, margin, runner-up]")
    token, ids, logits, logprob, margin, runner = parts
    top, numbers = _ids(ids), tuple(part.number() for part in logits.each())
    if len(top) != len(numbers):
        logits.wrong(f"a logit for each of {len(top)} ids")
    return Step(
        _id(token), top, numbers, logprob.maybe(lambda part: part.number(high=0.5, wanted="the logarithm of a share")),
        margin.maybe(lambda part: part.number(low=0.0, wanted="a margin from 0")), runner.maybe(_id),
    )  # fmt: skip


def _chosen(form: At, steps: tuple[Step, ...], ids: tuple[int, ...]) -> None:
    """Hold the steps against the ids that they chose."""
    for n, step in enumerate(steps):
        if n >= len(ids):
            At(form.value[n], f"{form.place}[{n}]").wrong(f"no step beyond the {len(ids)} output ids")
        if step.token != ids[n]:
            At(step.token, f"{form.place}[{n}][0]").wrong(f"the output id {ids[n]} of that place")
        if step.runner_up == step.token:
            At(step.runner_up, f"{form.place}[{n}][5]").wrong("another id than the chosen one")


def _value(part: At) -> object:
    if len(part.each()) != 2:
        part.wrong("[version, value]")
    try:
        return values.decode(orjson.dumps(part.value))
    except UNDECODED:
        part.wrong("a recorded value")


def _agree(form: At, sequences: tuple[Sequence, ...], fields: dict[str, Field]) -> None:
    """Hold the sequences against one another and their run: one that is there twice, or is of another run."""
    size = fields["batch.size"].value if "batch.size" in fields else None
    seen: dict[tuple[int, int], int] = {}
    prompts: dict[int, Sequence] = {}
    outputs: dict[str, Sequence] = {}
    for n, item in enumerate(sequences):
        place = At(item.row, f"{form.place}[{n}].row")
        if (item.row, item.ret) in seen:
            place.wrong(f"a row and return that sequences[{seen[item.row, item.ret]}] has not")
        if type(size) is int and 0 < size <= item.row:
            place.wrong(f"a row below the batch size {size} of its run")
        first = prompts.setdefault(item.row, item)
        if (item.input_key, item.input_ids) != (first.input_key, first.input_ids):
            At(item.input_key, f"{form.place}[{n}].input_key").wrong("the prompt of the other sequences of its row")
        same = outputs.setdefault(item.output_key, item) if item.output_key else item
        if None not in (item.output_ids, same.output_ids) and item.output_ids != same.output_ids:
            At(item.output_key, f"{form.place}[{n}].output_key").wrong("a key that no sequence with other ids has")
        seen[item.row, item.ret] = n
