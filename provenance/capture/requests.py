"""What a call asks, so that two calls can be told to ask the same: its key, and the run of an answer that was served.

A key is an HMAC under the store's key, over everything that decides the result: the arguments whole, the settings as
they were given and as the defaults stand, the model with its tokenizer's template and the digest of its weights as they
lie in memory now, the environment, and, where the call draws, the random states. What cannot be read whole raises; then
the call has no key and is made.
"""

import inspect
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any, NamedTuple

from provenance.capture import generation, moment
from provenance.capture.call import NOTHING, Call
from provenance.capture.evidence import Observer
from provenance.capture.functions import RETURNED
from provenance.capture.models import MODELS, Watched
from provenance.capture.transformers import read_inputs, read_outputs
from provenance.catalogue.fields import spec
from provenance.determinism import seeds
from provenance.determinism.functions import Unseen, identity, is_model
from provenance.errors import BadSetting
from provenance.facts import ROLE, VALUE, Fingerprint, Payload, SequenceEnd, State
from provenance.integrity import digests, whole
from provenance.integrity.canonical import canonical
from provenance.integrity.secrets import scrub
from provenance.integrity.values import encode
from provenance.recorder import Recorder

KIND = "provenance/cached/v1"
SERVED = "served from the cache"
ENVIRONMENTS = ("class", "exact", "any")
POLL_SECONDS = 0.005
OF_PROCESS = {"_from_model_config", "_original_object_hash"}  # of a configuration: says nothing of what it sets


@dataclass(frozen=True, slots=True)
class Policy:
    """What may be served, and how much is kept."""

    age: float | None = None  # seconds for which a first result is served; None is for ever
    size: float = 1 << 30  # bytes that all first results of the store may take: the oldest go
    entry: float = 64 << 20  # bytes that one may take
    environment: str = "class"  # class: what can decide an output is equal; exact: all of it is; any
    version: str = ""  # stands for what cannot be seen of a function: change it when that changes
    patience: float = 60.0  # seconds that a call waits for the weights to be hashed


def policy_of(given: Any) -> Policy:
    """Return a policy. Raises BadSetting for what is none.

    >>> policy_of({"age": 3600}).age
    3600
    """
    if given is None or isinstance(given, Policy):
        return given or Policy()
    names = [item.name for item in fields(Policy)]
    if not isinstance(given, Mapping) or set(given) - set(names):
        raise BadSetting(f"policy={given!r:.80} is no policy; it is a dict with some of {', '.join(names)}.")
    made = Policy(**given)
    for name in ("age", "size", "entry", "patience"):
        value = getattr(made, name)
        if not (name == "age" and value is None) and (type(value) not in (int, float) or not value > 0):
            raise BadSetting(f"policy {name}={value!r:.40} is no number above 0.")
    if made.environment not in ENVIRONMENTS:
        raise BadSetting(f"policy environment={made.environment!r:.40} is none of {', '.join(ENVIRONMENTS)}.")
    if not isinstance(made.version, str):
        raise BadSetting(f"policy version={made.version!r:.40} is no text.")
    return made


class Question(NamedTuple):
    """A call that may be answered from the shelf."""

    name: str
    key: bytes
    drawn: bool  # its key holds the random states, and serving it must leave them as the call would
    same: Callable[[], bool]  # whether the model is still the one of the key
    record: Callable[[Any, str], None]  # writes the run of an answer that was served, with the run it came from


def _question(
    recorder: Recorder,
    name: str,
    parts: list[bytes],
    policy: Policy,
    rest: tuple[Callable[[], bool], Callable[..., None]],
) -> Question:
    """Make the question of a call from what decides its result."""
    drawn = seeds.inside()
    state = seeds.digest(seeds.states()) if drawn else b""
    parts = [*parts, _environment(recorder, policy.environment), policy.version.encode(), state]
    return Question(name, digests.equality(recorder.key, KIND, tuple(parts)), drawn, *rest)


def _environment(recorder: Recorder, kind: str) -> bytes:
    if kind == "any":
        return b""
    found = recorder.environment.environment(), recorder.environment.switches()
    if kind == "exact":
        return b"".join(item.raw for item in found)
    return b"".join(_class(item.document) for item in found)


@lru_cache(maxsize=64)
def _class(document: bytes) -> bytes:
    """Return what can decide an output of a fingerprint: 32 bytes.

    What its process had not loaded is left out: it took no part, and may be loaded with the first call.
    """
    kept = {
        name: {key: value for key, value in item.document().items() if key != "source"}
        for name, item in Fingerprint.read(document).fields.items()
        if spec(name).effect != "none" and item.state in (State.VALUE, State.UNSET, State.UNKNOWN) and not item.unloaded
    }
    return digests.leaf_hash(canonical(kept))


def _weights(recorder: Recorder, model: Any, policy: Policy) -> Watched:
    """Return what is known of a model whose weights are hashed, waiting for that once. Raises Unseen."""
    if recorder.settings.weights != "tensors":
        raise Unseen(f"weights={recorder.settings.weights} reads no weights in memory; use weights=tensors")
    limit = time.monotonic() + policy.patience
    while True:
        known = MODELS.look(recorder, model)
        if known.root != NOTHING and known.fingerprint is not None:
            return known
        if "weights.loaded_root" in known.facts:
            raise Unseen(f"its weights are not known: {known.facts['weights.loaded_root'].reason}")
        if time.monotonic() > limit:
            raise Unseen(f"its weights were not hashed within {policy.patience:g} s")
        time.sleep(POLL_SECONDS)


def _still(recorder: Recorder, model: Any, load: int, print_: Fingerprint | None) -> bool:
    """Say whether a model is what it was: its tensors, and how it is put together."""
    known = MODELS.look(recorder, model)
    return known.load == load and known.fingerprint == print_


def _of(known: Watched) -> bytes:
    """Return a model's part of a key: what it is, its weights, and the template of its tokenizer."""
    assert known.fingerprint is not None
    template = getattr(known.tokenizer, "chat_template", None)
    return digests.equality(b"", "model", (known.fingerprint.raw, known.root, whole.encode(template)))


# -- functions ----------------------------------------------------------------------------------------


def of_function(
    recorder: Recorder, function: Any, args: tuple[Any, ...], kwargs: dict[str, Any], policy: Policy
) -> Question:
    """Return the question that a call of a function asks. Raises Unseen or NotWhole."""
    models: list[tuple[Any, int, Fingerprint | None]] = []

    def of_model(model: Any) -> bytes:
        known = _weights(recorder, model, policy)
        models.append((model, known.load, known.fingerprint))
        return _of(known)

    try:
        bound = inspect.signature(function).bind(*args, **kwargs)
    except TypeError as error:  # the call will say so itself
        raise Unseen(f"its arguments do not fit: {error}") from None
    bound.apply_defaults()
    given = [
        of_model(value) if is_model(value) else whole.encode((name, value)) for name, value in bound.arguments.items()
    ]
    parts = [identity(function, of_model, bool(policy.version)), *given]
    name = getattr(function, "__qualname__", type(function).__qualname__)

    def same() -> bool:
        return all(_still(recorder, *item) for item in models)

    def record(value: Any, original: str) -> None:
        call = Call(recorder, "function", name)
        data = encode({"args": args, "kwargs": kwargs} if kwargs else {"args": args})
        facts = {"kind": "cached", "context.cached_from": original}
        call.begin((Payload(ROLE["arguments"], VALUE, scrub(data)),), facts, 1, None, 0)
        end = SequenceEnd(0, 0, 0, 0, 0, RETURNED, float("nan"), 0)
        call.finish((end,), (Payload(ROLE["output.value"], VALUE, scrub(encode(value))),), {})

    return _question(recorder, name, parts, policy, (same, record))


# -- transformers -------------------------------------------------------------------------------------


def of_model(recorder: Recorder, model: Any, args: tuple[Any, ...], kwargs: dict[str, Any], policy: Policy) -> Question:
    """Return the question that a call of `generate` asks. Raises Unseen or NotWhole."""
    names = ["inputs", "generation_config", "logits_processor", "stopping_criteria"]
    if len(args) > len(names):
        raise Unseen("it is called with arguments by place that have no names here")
    request = {**dict(zip(names, args, strict=False)), **kwargs}
    own = getattr(model, "generation_config", None)
    parts = [type(model).__qualname__.encode(), *_settings(request, own)]
    known = _weights(recorder, model, policy)
    load, print_ = known.load, known.fingerprint

    def same() -> bool:
        return _still(recorder, model, load, print_)

    def record(value: Any, original: str) -> None:
        _record_generate(recorder, model, request, value, original)

    return _question(recorder, type(model).__qualname__, [_of(known), *parts], policy, (same, record))


def _settings(request: Mapping[str, Any], own: Any) -> list[bytes]:
    """Return inputs and settings whole: as the call gives them, and as the defaults stand."""
    given = request.get("generation_config")
    if _effective("do_sample", request, given, own) and not seeds.inside():
        raise Unseen("it is sampled; ask inside provenance.seeded(seed), and each draw is a question of its own")
    if _effective("max_time", request, given, own):
        raise Unseen("max_time ends it by the clock")
    asked = {name: value for name, value in request.items() if name != "generation_config" and not _none(value)}
    return [whole.encode(_plain(sorted(asked.items()))), *(_config(item) for item in (given, own))]


def _none(value: Any) -> bool:
    """Say whether an argument is as good as not given: transformers takes an empty list of processors for none."""
    return value is None or (isinstance(value, list) and not value)


def _effective(name: str, request: Mapping[str, Any], given: Any, own: Any) -> Any:
    if request.get(name) is not None:
        return request[name]
    return next((getattr(c, name) for c in (given, own) if c is not None and getattr(c, name, None) is not None), None)


def _config(config: Any) -> bytes:
    """Return a configuration whole, with what it keeps to itself: some of that decides too."""
    table = {} if config is None else {k: v for k, v in vars(config).items() if k not in OF_PROCESS}
    return whole.encode(_plain(sorted(table.items())))


def _plain(value: Any) -> Any:
    """Write configurations inside a value as their fields, and one and 1.0 of a setting as one value."""
    if isinstance(value, (list, tuple)):
        if len(value) == 2 and value[0] in generation.FLOATS and type(value[1]) is int:
            return [value[0], float(value[1])]
        return [_plain(item) for item in value]
    if hasattr(value, "to_dict") and type(value).__module__.startswith("transformers."):
        return [type(value).__qualname__, _plain(sorted(value.to_dict().items()))]
    return value


def _record_generate(recorder: Recorder, model: Any, request: Mapping[str, Any], value: Any, original: str) -> None:
    """Write the run of a call that was answered from the shelf: inputs, outputs and settings as of any other."""
    known = MODELS.look(recorder, model)
    inputs = read_inputs(model, request, known.tokenizer)
    observer = Observer(0)
    observer.reason = SERVED
    call = Call(recorder, "transformers", "generate", model)
    facts = {**inputs.facts, "context.load": known.load, **moment.around(), "kind": "cached",
             "context.cached_from": original}  # fmt: skip
    call.begin(tuple(inputs.payloads), facts, inputs.rows, known.fingerprint, known.load)
    outputs = read_outputs(model, value, inputs, observer, known.tokenizer)
    own = getattr(model, "generation_config", None)
    settings = generation.settings(request, own, observer, recorder.key, SERVED, recorder.settings.capture)
    sampled = bool(_effective("do_sample", request, request.get("generation_config"), own))
    call.finish(
        outputs.sequences, outputs.payloads, {**outputs.facts, "sampled": sampled}, recorder.fingerprint(settings),
        known.root,
    )  # fmt: skip
