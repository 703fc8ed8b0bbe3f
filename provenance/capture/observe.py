"""The wrapper around one `generate`: begin, run the original, finish. What it returned is returned, the very object."""

import functools
import inspect
import math
import sys
from collections.abc import Callable, Mapping
from typing import Any

from provenance import recorder as recorders
from provenance.capture import generation, moment
from provenance.capture.call import ACTIVE, NOTHING, Call
from provenance.capture.evidence import Observer, observe
from provenance.capture.models import MODELS, Watched
from provenance.capture.transformers import Inputs, read_inputs, read_outputs
from provenance.recorder import START, Harmless, Recorder

RUNTIME = "transformers"
LOOPS = ("greedy_search", "sample")


class State:
    """What one observed call keeps between its two ends."""

    __slots__ = ("call", "inputs", "known", "load", "observer", "request", "rng")

    def __init__(self, call: Call, known: Watched, inputs: Inputs, request: dict[str, Any], observer: Observer) -> None:
        self.call, self.known, self.inputs, self.request, self.observer = call, known, inputs, request, observer
        self.load = known.load
        self.rng: dict[str, Any] = {}


def recorded(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a `generate` function of a class. What goes wrong in here is counted and never raised."""
    names = _names(original)
    own = getattr(original, "__qualname__", "") != "GenerationMixin.generate"

    @functools.wraps(original)
    def generate(self: Any, *args: Any, **kwargs: Any) -> Any:
        state: State | None = None
        with Harmless(START):
            recorder = _watching()
            if recorder is not None:
                state = _begin(recorder, self, {**dict(zip(names, args, strict=False)), **kwargs}, own)
        if state is None:
            return original(self, *args, **kwargs)
        token = ACTIVE.set(state.call)
        moment.enter()
        try:
            result = original(self, *args, **kwargs)
        except BaseException as error:
            with Harmless("the end of a call"):
                _fail(state, self, error)
            raise
        finally:
            moment.leave()
            ACTIVE.reset(token)
        with Harmless("the end of a call"):
            _close(state, self, result)
        return result

    generate.provenance_original = original  # type: ignore[attr-defined]
    return generate


def _names(original: Callable[..., Any]) -> list[str]:
    """Name the positional arguments behind ``self``. A patch that takes any hands them to transformers' own."""
    found = list(inspect.signature(original).parameters.values())[1:]
    return [item.name for item in found if item.kind is item.POSITIONAL_OR_KEYWORD] or ["inputs", "generation_config"]


def seam(original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap the method in which `generate` makes its list of logits processors: there the resolved settings stand."""

    @functools.wraps(original)
    def processors(self: Any, *args: Any, **kwargs: Any) -> Any:
        made = original(self, *args, **kwargs)
        with Harmless("the settings of a call"):
            call = ACTIVE.get()
            if call is not None and call.model is self and call.observer is not None:
                return _look_on(call.observer, made, args, kwargs)
        return made

    processors.provenance_original = original  # type: ignore[attr-defined]
    return processors


def _watching() -> Recorder | None:
    """Return the recorder if this call is to be recorded: not inside another, not while being compiled."""
    outer = ACTIVE.get()
    if outer is not None and outer.runtime == RUNTIME:
        return None
    torch = sys.modules.get("torch")
    if torch is not None and getattr(torch.compiler, "is_compiling", bool)():
        return None
    return recorders.current()


def _begin(recorder: Recorder, model: Any, request: dict[str, Any], own: bool) -> State:
    known = MODELS.look(recorder, model)
    if known.tokenizer is None and request.get("tokenizer") is not None:
        MODELS.know_tokenizer(model, request["tokenizer"])
        known = MODELS.look(recorder, model)
    inputs = read_inputs(model, request, known.tokenizer)
    observer = Observer(recorder.settings.evidence)
    if own:
        observer.reason = observer.reason or f"{type(model).__name__} has a generate of its own"
    observer.held = generation.held(request, recorder.key)
    observer.criteria = bool(request.get("stopping_criteria"))
    call = Call(recorder, RUNTIME, "generate", model)
    call.observer = observer
    state = State(call, known, inputs, request, observer)
    facts = {**inputs.facts, "context.load": known.load, **moment.before(model, request, state.rng)}
    call.begin(tuple(inputs.payloads), facts, inputs.rows, known.fingerprint, known.load)
    return state


def _look_on(observer: Observer, made: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    config = kwargs.get("generation_config", args[0] if args else None)
    if observer.config is not None or config is None:
        return made  # a second loop inside one call: the first one's settings stand
    observer.config = config
    length = kwargs.get("input_ids_seq_length", args[1] if len(args) > 1 else None)
    observer.prompt_length = int(length) if length is not None else None
    observer.mode = str(getattr(config.get_generation_mode(), "value", ""))
    if observer.mode not in LOOPS and not observer.reason:
        observer.reason = f"{observer.mode.replace('_', ' ')} has no token evidence"
    return observe(made, observer)


def _finish(state: State, model: Any, result: Any) -> None:
    observer, call, known = state.observer, state.call, state.known
    call.mark()
    MODELS.settle(known, model)
    draft = state.request.get("assistant_model")
    assisted = draft is not None or state.request.get("custom_generate") is not None
    if assisted:
        observer.mode = "assisted_generation" if draft is not None else "custom_generate"
        which = "assisted decoding" if draft is not None else "a custom decoding loop"
        observer.reason = observer.reason or f"{which} has no token evidence"
    outputs = read_outputs(model, result, state.inputs, observer, known.tokenizer)
    own = getattr(model, "generation_config", None)
    kept = call.recorder.settings.capture
    settings = generation.settings(state.request, own, observer, call.recorder.key, observer.reason, kept)
    sampled = "sample" in observer.mode or bool(getattr(observer.config, "do_sample", False))
    facts = outputs.facts
    payloads = [*outputs.payloads, *moment.after(state.rng, facts, sampled)]
    facts |= {"sampled": sampled, **_weights(state), **observer.seen()}
    if draft is not None:
        facts |= MODELS.draft(call.recorder, draft)
    sequences = outputs.sequences
    if assisted:
        sequences = tuple(item._replace(margin=math.nan) for item in sequences)
    call.finish(sequences, tuple(payloads), facts, call.recorder.fingerprint(settings), _root(state))


def _close(state: State, model: Any, result: Any) -> None:
    try:
        _finish(state, model, result)
    except Exception:
        state.call.partial()
        raise


def _fail(state: State, model: Any, error: BaseException) -> None:
    state.call.mark()
    MODELS.settle(state.known, model)
    recorder, own = state.call.recorder, getattr(model, "generation_config", None)
    why = "the call failed before it decoded"
    kept = recorder.settings.capture
    settings = generation.settings(state.request, own, state.observer, recorder.key, why, kept)
    state.call.fail(error, _weights(state), recorder.fingerprint(settings), _root(state))


def _root(state: State) -> bytes:
    return state.known.root if state.known.load == state.load else NOTHING


def _weights(state: State) -> dict[str, Any]:
    return dict(state.known.facts) if state.known.load == state.load else {}
