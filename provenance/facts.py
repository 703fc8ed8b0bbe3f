"""The nouns: frozen, without I/O, at the bottom of the house. Everything else is verbs on them.

A *field* is a dotted name with a value and a state; unknown is a state with a reason and equals nothing. A
*fingerprint* is the fields of one scope under one digest. A *request* and an *output* are what the observing
wing writes down of a call; a *run* is what the understanding wing reads back.

The numbers of roles, encodings, statuses and finishes stand in journals and never change.
"""

import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from enum import StrEnum
from typing import NamedTuple

from provenance.integrity.canonical import canonical, digest, plain, raw, restore
from provenance.integrity.secrets import known, lost, said


class State(StrEnum):
    """Whether a field has a value, and if not, why not."""

    VALUE = "value"
    UNSET = "unset"
    NOT_APPLICABLE = "not_applicable"
    UNKNOWN = "unknown"
    REDACTED = "redacted"


@dataclass(frozen=True, slots=True, eq=False)
class Field:
    """One fact: a value, or the reason why there is none, and who set it.

    >>> Field("gpu.count", 1) == Field("gpu.count", 1, source="nvml")
    True
    >>> unknown = Field.unknown("gpu.count", "NVML: driver not loaded")
    >>> unknown == unknown
    False
    """

    name: str
    value: object = None
    state: State = State.VALUE
    reason: str = ""
    source: str = ""

    @classmethod
    def unknown(cls, name: str, reason: str) -> "Field":
        """Make a field that could not be read, with the reason."""
        return cls(name, None, State.UNKNOWN, reason)

    @classmethod
    def secret(cls, name: str, source: str = "") -> "Field":
        """Make a field whose value is not written because it looks like a credential."""
        return cls(name, None, State.REDACTED, "the value looks like a credential", source)

    @classmethod
    def unset(cls, name: str, source: str = "") -> "Field":
        """Make a field that exists and that nobody set."""
        return cls(name, None, State.UNSET, "", source)

    @classmethod
    def moot(cls, name: str, reason: str) -> "Field":
        """Make a field that has no meaning here."""
        return cls(name, None, State.NOT_APPLICABLE, reason)

    def clean(self, among: tuple[bytes, ...] | None = None) -> "Field":
        """Return the field as it may be written. ``among`` is what `secrets.known` says, for who asks often."""
        if self.state is State.VALUE and lost(self.value, among):
            return Field.secret(self.name, self.source)
        reason = said(self.reason, among) if self.reason else ""
        return self if reason == self.reason else Field(self.name, self.value, self.state, reason, self.source)

    @property
    def known(self) -> bool:
        """Say whether two fields of this kind can be compared."""
        return self.state not in (State.UNKNOWN, State.REDACTED)

    @property
    def unloaded(self) -> bool:
        """Say whether its process had not loaded what would tell: another process of the same machine may.

        >>> Field.moot("cache.triton", "triton is not loaded").unloaded, Field.moot("x", "no CUDA").unloaded
        (True, False)
        """
        return self.state in (State.NOT_APPLICABLE, State.UNKNOWN) and self.reason.endswith(("not loaded", "not up"))

    def __eq__(self, other: object) -> bool:
        if not isinstance(other, Field):
            return NotImplemented
        return self.known and self.state == other.state and self.name == other.name and self.value == other.value

    def __hash__(self) -> int:
        return hash((self.name, self.state, repr(self.value)))

    def document(self) -> dict[str, object]:
        """Return the canonical form: only what is there."""
        form: dict[str, object] = {}
        if self.state is State.VALUE:
            form["value"] = plain(self.value)
        else:
            form["state"] = self.state.value
        if self.reason:
            form["reason"] = plain(self.reason)
        if self.source:
            form["source"] = self.source
        return form

    @classmethod
    def read(cls, name: str, form: Mapping[str, object]) -> "Field":
        """Read what ``document`` wrote."""
        reason, source = str(restore(form.get("reason", ""))), str(form.get("source", ""))
        if "value" in form:
            return cls(name, restore(form["value"]), State.VALUE, reason, source)
        return cls(name, None, State(str(form.get("state", "unknown"))), reason, source)

    def show(self) -> str:
        """Return a short text for people: the value, or the state and its reason."""
        if self.state is State.VALUE:
            return self.value if isinstance(self.value, str) else str(self.value)
        text = self.state.value.replace("_", " ")
        return f"{text}: {self.reason}" if self.reason else text


@dataclass(frozen=True, slots=True)
class Fingerprint:
    """The fields of one scope, their canonical bytes and digest.

    ``value_digest`` leaves the sources out: two calls with equal values set by different hands share it.
    """

    scope: str
    fields: Mapping[str, Field]
    document: bytes
    digest: str
    value_digest: str
    raw: bytes  # the 32 bytes of ``digest``, as records hold it

    @classmethod
    def of(cls, scope: str, fields: Iterable[Field]) -> "Fingerprint":
        """Make the fingerprint of some fields. Here secrets leave them, whoever read them."""
        among = known()
        table = {item.name: item.clean(among) for item in sorted(fields, key=lambda item: item.name)}
        return cls._of(scope, table, {plain_name(name): item.document() for name, item in table.items()})

    @classmethod
    def _of(cls, scope: str, table: Mapping[str, Field], forms: Mapping[str, Mapping[str, object]]) -> "Fingerprint":
        document = canonical({"v": 1, "scope": scope, "fields": forms})
        bare = {name: {k: v for k, v in form.items() if k != "source"} for name, form in forms.items()}
        values = canonical({"v": 1, "scope": scope, "values": bare})
        named = digest(document)
        return cls(scope, table, document, named, digest(values), raw(named))

    @classmethod
    def read(cls, document: bytes) -> "Fingerprint":
        """Read a stored document. The digest is computed again from its bytes."""
        import orjson

        form = orjson.loads(document)
        forms = form["fields"]
        return cls._of(form["scope"], {name: Field.read(name, item) for name, item in forms.items()}, forms)


def plain_name(name: str) -> str:
    """Return a field's name in ASCII: environment variables and modules may hold anything."""
    return name if name.isascii() else name.encode("ascii", "backslashreplace").decode()


class WeightEntry(NamedTuple):
    """One tensor in memory, or one file of a checkpoint."""

    kind: str  # "tensor", "buffer" or "file"
    name: str
    dtype: str
    shape: tuple[int, ...]
    size: int  # bytes
    sha256: str


@dataclass(frozen=True, slots=True)
class WeightsManifest:
    """Digests of every tensor, in the order of their names, with one root.

    The root depends on names, types, shapes and bytes, and on nothing else: neither on files nor on sharding.
    """

    kind: str  # "tensors" or "files"
    entries: tuple[WeightEntry, ...]

    def document(self) -> bytes:
        """Return the canonical bytes whose digest is the root."""
        rows: list[object] = [
            [entry.kind, plain(entry.name), entry.dtype, list(entry.shape), entry.size, entry.sha256]
            for entry in sorted(self.entries)
        ]
        return canonical({"v": 1, "kind": self.kind, "entries": rows})

    @property
    def root(self) -> str:
        """Return the digest of all entries."""
        return digest(self.document())

    @classmethod
    def read(cls, document: bytes) -> "WeightsManifest":
        """Read a stored document."""
        import orjson

        form = orjson.loads(document)
        rows = (
            WeightEntry(kind, str(restore(name)), dtype, tuple(shape), size, sha256)
            for kind, name, dtype, shape, size, sha256 in form["entries"]
        )
        return cls(form["kind"], tuple(rows))


# -- what a call is made of -------------------------------------------------------------------------

ROLES = {
    1: "prompt.ids", 2: "prompt.text", 3: "prompt.mask", 4: "prompt.embeds", 5: "prompt.media",
    6: "prompt.messages", 7: "arguments",
    16: "output.ids", 17: "output.text", 18: "output.value", 19: "output.media",
    32: "evidence.logits", 33: "evidence.logprobs",
    40: "rng.torch_cpu", 41: "rng.torch_cuda", 42: "rng.torch_mps", 43: "rng.python", 44: "rng.numpy",
    45: "rng.torch_xpu",
    48: "error.text",
}  # fmt: skip
ROLE = {name: number for number, name in ROLES.items()}

TEXT, BUFFER, VALUE, OCTETS, DIGEST = range(5)  # UTF-8, an array, JSON, bytes as they are, a digest in words
LARGE = 1 << 20  # content beyond it goes past frames and rows
KIND = 0x0F  # the part of an encoding that says what the content is
TRUNCATED = 0x20  # beyond the setting max_payload: sealed, and said to be
BLOB = 0x40  # in a frame: digest and size of a file beside the segment stand in place of the content
SEALED = 0x80  # commitment, equality key and size stand in place of the content
NOTES = dict(enumerate(
    ("environment", "switches", "model", "settings", "weights", "binding", "gap", "erased", "clock_step"), 1
))  # fmt: skip
STATUSES = ("running", "ok", "error", "aborted", "abandoned", "partial", "crashed")
FINISHES = ("unknown", "eos", "length", "stop_string", "max_time", "criteria", "returned", "cut")


class Payload(NamedTuple):
    """Content of a call: what it is, which sequence it belongs to, how it is encoded, and its bytes."""

    role: int
    encoding: int
    data: bytes
    row: int = 0  # prompt index
    ret: int = 0  # return index: beams, several return sequences
    part: int = 0  # message or media index


class Request(NamedTuple):
    """What is known of a call before it runs; ``environment``, ``switches`` and ``model`` are raw digests."""

    run_id: bytes
    parent: bytes
    wall_ns: int
    mono_ns: int
    environment: bytes
    switches: bytes
    model: bytes
    load: int
    rows: int
    facts: bytes  # JSON: name, tags, runtime, operation, batch, call serial
    payloads: tuple[Payload, ...]


class SequenceEnd(NamedTuple):
    """One output sequence, in numbers. ``margin`` is NaN where there is no evidence."""

    row: int
    ret: int
    n_input: int
    n_output: int
    padding: int
    finish: int
    margin: float
    margin_at: int


SEQUENCE = struct.Struct("<IIIIIIfI")  # a SequenceEnd in journals and leaves


class Output(NamedTuple):
    """What is known of a call once it has ended."""

    run_id: bytes
    start_seq: int
    wall_ns: int
    mono_ns: int
    duration_ns: int
    status: int
    settings: bytes
    weights: bytes  # the root in force, 32 zero bytes while it is not known
    facts: bytes
    sequences: tuple[SequenceEnd, ...]
    payloads: tuple[Payload, ...]


class Start(NamedTuple):
    """A start record as read from a journal."""

    seq: int
    seed: bytes
    request: Request


class End(NamedTuple):
    """An end record as read from a journal."""

    seq: int
    seed: bytes
    output: Output


class Noted(NamedTuple):
    """A fingerprint, a weights manifest, a binding of weights to calls, a gap or another note of the stream."""

    seq: int
    kind: str  # environment, switches, model, settings, weights, binding, gap, erased, clock_step
    digest: bytes
    document: bytes


Record = Start | End | Noted


@dataclass(frozen=True, slots=True)
class Stream:
    """One process life, from the header of its segments."""

    stream_id: bytes
    boot_id: bytes
    pid: int
    wall_ns: int
    mono_ns: int
    about: bytes  # JSON: host, program, code version, key id


# -- what is read back ------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Step:
    """What is known of one generated token: logits before any processor, and the margin of what was chosen from."""

    token: int
    top_ids: tuple[int, ...] = ()
    top_logits: tuple[float, ...] = ()
    logprob: float | None = None
    margin: float | None = None
    runner_up: int | None = None


@dataclass(frozen=True, slots=True)
class Sequence:
    """One prompt and its output inside a run."""

    row: int
    ret: int
    input_key: str = ""
    output_key: str = ""
    input_ids: tuple[int, ...] | None = None
    output_ids: tuple[int, ...] | None = None
    input_text: str | None = None
    output_text: str | None = None
    input_value: object = None
    output_value: object = None
    finish: str = "unknown"
    padding: int | None = None
    steps: tuple[Step, ...] = ()
    logits_dtype: str = ""
    no_evidence: str = ""  # why there are no steps
    mask: tuple[int, ...] | None = None  # over the whole width of the batch, where it has holes
    media: tuple[str, ...] = ()  # what stood beside the ids or in their place: name, type, shape and digest


@dataclass(frozen=True, slots=True)
class Run:
    """The record of one call, as read from a store or from an exported file."""

    run_id: str
    kind: str
    runtime: str
    operation: str
    status: str
    started_at: int  # nanoseconds since 1970, UTC
    duration_ns: int | None
    fields: Mapping[str, Field]
    sequences: tuple[Sequence, ...]
    name: str = ""
    tags: Mapping[str, str] = field(default_factory=dict)
    error: str = ""
    key_id: str = ""
    digests: Mapping[str, str] = field(default_factory=dict)  # environment, switches, model, settings, weights
    states: Mapping[str, bytes] = field(default_factory=dict)  # random states before the call, where tokens were drawn
