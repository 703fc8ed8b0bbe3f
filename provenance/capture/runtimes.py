"""Recording engines that hold their model themselves: vLLM, SGLang, TensorRT-LLM, llama.cpp.

The method of the one engine object that was wrapped is replaced, and what it returned is returned, the very object.
A result that comes in pieces is a generator with ours around it: the record ends when the last piece is out, or with
the reason why it was not. `capture.answers` reads what each runtime was given and gave back.
"""

import functools
import inspect
import types
import weakref
from collections.abc import Callable, Generator
from contextlib import suppress
from typing import Any

from provenance import recorder as recorders
from provenance.capture import answers, moment
from provenance.capture.call import ACTIVE, PLAIN, Call
from provenance.capture.functions import END, Steps
from provenance.capture.models import MODELS, Watched
from provenance.catalogue.fields import table
from provenance.facts import Field, Fingerprint
from provenance.fingerprint import engines
from provenance.fingerprint.engines import shown
from provenance.fingerprint.environment import entry_points
from provenance.fingerprint.reading import read as read_field
from provenance.recorder import START, Harmless, log

METHODS = {
    "vllm": ("generate", "chat"), "sglang": ("generate",), "tensorrt_llm": ("generate",),
    "llama_cpp": ("create_completion", "create_chat_completion"),  # calling the object goes through the first
}  # fmt: skip
GREEDY_BELOW = {"vllm": 1e-5, "sglang": 1e-6, "llama_cpp": 0.0}
NO_LOGITS = "the engine gives no logits"

# What stood on an object itself before we replaced a method of it; nothing, as a rule: its class had it.
_replaced: "weakref.WeakKeyDictionary[Any, dict[str, Any]]" = weakref.WeakKeyDictionary()
NOTHING_STOOD = object()


def wrap_engine(engine: Any) -> bool:
    """Record the calls of an engine, if it is one that is known here. Again changes nothing."""
    found = engines.runtime(engine)
    if found is None:
        return False
    for name in METHODS[found.name]:
        if callable(getattr(engine, name, None)):
            put_on(engine, name, functools.partial(observed, found, name))
    return True


def by_entry_point(model: Any) -> Any:
    """Ask the installed packages that observe runtimes of their own (``provenance.runtimes``); None where none does.

    Each entry point is a function that takes an object and returns it observed, or None for one that is not its own.
    """
    for point in entry_points("provenance.runtimes"):
        try:
            found = point.load()(model)
        except Exception as error:
            log.warning("provenance could not use the runtime %s: %s: %s", point.name, type(error).__name__, error)
            continue
        if found is not None:
            return found
    return None


def put_on(owner: Any, name: str, make: Callable[[Any], Any]) -> None:
    """Replace a method on one object by what ``make`` makes of it, a function of ``self``."""
    mine = _replaced.setdefault(owner, {})
    if name in mine:
        return
    stood = vars(owner).get(name, NOTHING_STOOD)
    # A bound method copies with its object and rebinds to the copy; a closure would not.
    setattr(owner, name, types.MethodType(make(getattr(owner, name)), owner))
    mine[name] = stood


def take_off(owner: Any = None) -> None:
    """Put back what stood on one object, or on all of them."""
    for item in list(_replaced) if owner is None else [owner]:
        for name, stood in _replaced.pop(item, {}).items():
            with suppress(AttributeError):
                delattr(item, name) if stood is NOTHING_STOOD else setattr(item, name, stood)


class State:
    """What one observed call keeps between its two ends."""

    def __init__(self, call: Call, known: Watched, asked: answers.Asked) -> None:
        self.call, self.known, self.asked = call, known, asked
        self.load = known.load

    def finish(self, engine: Any, result: Any) -> None:
        """Write the end of a call that returned, or that it could not be read."""
        call = self.call
        call.mark()
        try:
            found = answers.read(self.asked, engine, result)
            print_ = self.call.settings(settings(self.asked, engine))
            facts = {**found.facts, **self._facts(), "sampled": sampled(print_)}
            call.finish(found.sequences, found.payloads, facts, call.recorder.fingerprint(print_))
        except Exception:
            call.partial()
            raise

    def fail(self, engine: Any, error: BaseException) -> None:
        """Write the end of a call that raised or was dropped."""
        self.call.mark()
        print_ = self.call.settings(settings(self.asked, engine))
        self.call.fail(error, self._facts(), self.call.recorder.fingerprint(print_))

    def _facts(self) -> dict[str, Any]:
        weights: dict[str, Field] = self.known.facts if self.known.load == self.load else {}
        return {"evidence": NO_LOGITS, **weights}


def observed(found: engines.Runtime, method: str, original: Callable[..., Any]) -> Callable[..., Any]:
    """Wrap a bound method of an engine."""
    try:
        signature: inspect.Signature | None = inspect.signature(original)
    except (TypeError, ValueError):
        signature = None
    # The very function of the class, that the wrapper may outlive a copy of its object.
    function = getattr(original, "__func__", None)

    @functools.wraps(original)
    def call(self: Any, *args: Any, **kwargs: Any) -> Any:
        state: State | None = None
        with Harmless(START):
            state = _begin(found, method, signature, self, args, kwargs)
        go = original if function is None else functools.partial(function, self)
        if state is None:
            return go(*args, **kwargs)
        token = ACTIVE.set(state.call)
        moment.enter()
        try:
            result = go(*args, **kwargs)
        except BaseException as error:
            with Harmless(END):
                state.fail(self, error)
            raise
        finally:
            moment.leave()
            ACTIVE.reset(token)
        if isinstance(result, types.GeneratorType):
            return _pieces(state, self, result)
        with Harmless(END):
            state.finish(self, result)
        return result

    return call


def _begin(
    found: engines.Runtime, method: str, signature: inspect.Signature | None, engine: Any, args: Any, kwargs: Any
) -> State | None:
    outer = ACTIVE.get()
    recorder = recorders.current()
    if recorder is None or (outer is not None and outer.runtime == found.name):
        return None  # chat goes through generate: one call and not two
    given = dict(kwargs)
    defaults: dict[str, Any] = {}
    if signature is not None:
        try:
            bound = signature.bind(*args, **kwargs)
        except TypeError:
            return None  # a call that never begins: Python says so itself
        bound.apply_defaults()
        defaults = dict(bound.arguments)
        # One method of a runtime calls another with every argument by name: only what is not the default was set.
        given = {name: value for name, value in defaults.items() if not _untouched(signature, name, value)}
    known = MODELS.look_at_engine(recorder, engine, found)
    asked = answers.ask(found.name, method, given, defaults, recorder.key, engine)
    call = Call(recorder, found.name, method, engine)
    facts = {**asked.facts, "context.load": known.load, **moment.around()}
    call.begin(asked.payloads, facts, asked.rows, known.fingerprint, known.load)
    return State(call, known, asked)


def _untouched(signature: inspect.Signature, name: str, value: Any) -> bool:
    default = signature.parameters[name].default
    return value is default or (type(value) is type(default) and isinstance(value, PLAIN) and value == default)


def _pieces(state: State, engine: Any, inner: Any) -> Any:
    """Hand on a result that comes in pieces, and end its record when the last is out."""
    steps = Steps(inner, state.call)

    def pieces() -> Generator[Any, Any, Any]:
        try:
            value = yield from steps
        except BaseException as error:
            with Harmless(END):
                state.fail(engine, error)
            raise
        with Harmless(END):
            state.finish(engine, answers.Streamed(steps.seen))
        return value

    made = pieces()

    def dropped() -> None:
        with Harmless(END):
            if not state.call.ended:
                state.fail(engine, GeneratorExit())

    # A generator that was never asked for anything is not told that it is dropped.
    weakref.finalize(made, dropped).atexit = False
    return made


# -- settings ---------------------------------------------------------------------------------------


def settings(asked: answers.Asked, engine: Any) -> list[Field]:
    """Read the sampling settings in force, and which hand set each."""
    fields = SETTINGS[asked.runtime](asked, engine)
    chosen = sorted(set(asked.given) - answers.NOT_SETTINGS)
    lora = asked.given.get("lora_request")
    if lora is not None:
        fields.append(Field(f"{asked.runtime}.sampling.lora_request", _lora(lora), source="call"))
    return [*fields, *_mode(asked, fields), Field("generation.user_set_fields", chosen, source="call")]


def _lora(request: Any) -> Any:
    """Name adapters by the names that the engine knows them by."""
    if isinstance(request, (list, tuple)):
        return [_lora(item) for item in request]
    return str(getattr(request, "lora_name", getattr(request, "name", type(request).__qualname__)))


def _of_objects(asked: answers.Asked, engine: Any) -> list[Field]:
    """Read the parameter objects of vLLM and TensorRT-LLM, as they are after their own checks."""
    given = asked.arguments.get("sampling_params")
    source, params = "call", given
    if given is None and hasattr(engine, "get_default_sampling_params"):
        source, params = "model", engine.get_default_sampling_params()
    if params is None:
        name = f"{asked.runtime}.sampling.temperature"
        return [Field.unknown(name, "no parameters were given; the engine's own defaults are not seen")]
    many = list(params) if isinstance(params, (list, tuple)) else [params]
    front = f"{asked.runtime}.sampling."
    names = list(_declared(front))
    if asked.runtime != "vllm":
        names = sorted(name for name in dir(many[0]) if not name.startswith("_") and _simple(many[0], name))
    bare = _bare(type(many[0]))
    return [_setting(asked, front + name, name, many, bare, source) for name in names if name != "lora_request"]


@functools.lru_cache(maxsize=4)
def _declared(front: str) -> tuple[str, ...]:
    return tuple(field.removeprefix(front) for field in table() if field.startswith(front) and "NAME" not in field)


def _simple(holder: Any, name: str) -> bool:
    return isinstance(getattr(holder, name, None), (bool, int, float, str, list, tuple))


def _bare(kind: type) -> Any:
    """Make the parameters that nobody touched, to tell what the caller changed; None where that cannot be."""
    try:
        return kind()
    except Exception:
        return None


def _setting(asked: answers.Asked, field: str, name: str, many: list[Any], bare: Any, source: str) -> Field:
    def reader() -> Any:
        values = [getattr(item, name) for item in many]
        if name in answers.SEALED:
            return answers.sealed(asked.key, name, [shown(value) for value in values]) if any(values) else None
        plain = [shown(value) for value in values]
        return plain[0] if all(item == plain[0] for item in plain) else plain

    untouched = bare is not None and all(_equal(item, bare, name) for item in many)
    return read_field(field, reader, "library" if untouched else source)


def _equal(one: Any, other: Any, name: str) -> bool:
    return bool(getattr(one, name, None) == getattr(other, name, None))


def _of_tables(asked: answers.Asked, engine: Any) -> list[Field]:  # noqa: ARG001 - every runtime is asked in one way
    """Read the dicts of SGLang: what was asked; the engine fills in the rest where it cannot be seen."""
    given = asked.arguments.get("sampling_params") or {}
    many = list(given) if isinstance(given, (list, tuple)) else [given]
    fields = []
    for name in sorted({str(name) for item in many for name in item}):
        values = [shown(item.get(name)) for item in many]
        value = values[0] if all(item == values[0] for item in values) else values
        value = answers.sealed(asked.key, name, values) if name in answers.SEALED else value
        fields.append(Field(f"sglang.sampling.{name}", value, reason="requested", source="call"))
    return fields


def _of_arguments(asked: answers.Asked, engine: Any) -> list[Field]:  # noqa: ARG001 - every runtime is asked in one way
    """Read the arguments of llama.cpp, with the defaults of the method that was called."""
    fields = []
    for name, value in sorted(asked.arguments.items()):
        if name in answers.NOT_SETTINGS:
            continue
        field, source = f"llama_cpp.sampling.{name}", "call" if name in asked.given else "library"
        if value is None:
            fields.append(Field.unset(field, source))
            continue
        fields.append(
            Field(
                field,
                answers.sealed(asked.key, name, shown(value)) if name in answers.SEALED else shown(value),
                source=source,
            )
        )
    return fields


SETTINGS: dict[str, Callable[[answers.Asked, Any], list[Field]]] = {
    "vllm": _of_objects, "tensorrt_llm": _of_objects, "sglang": _of_tables, "llama_cpp": _of_arguments,
}  # fmt: skip


def _mode(asked: answers.Asked, fields: list[Field]) -> list[Field]:
    """Say in the words of all runtimes whether tokens are drawn: what else can matter depends on it."""
    known = {item.name.removeprefix(f"{asked.runtime}.sampling."): item.value for item in fields}
    heat, limit = known.get("temperature"), GREEDY_BELOW.get(asked.runtime)
    if limit is None or not isinstance(heat, (int, float)):
        why = "the temperatures differ within the call" if isinstance(heat, list) else "the engine decides, unseen"
        return [Field.unknown("generation.do_sample", why), Field.unknown("generation.mode", why)]
    greedy = heat == 0 if asked.runtime == "llama_cpp" else heat < limit or known.get("top_k") == 1
    mode = "greedy_search" if greedy else "sample"
    return [
        Field("generation.do_sample", not greedy, source="derived"),
        Field("generation.mode", mode, source="derived"),
    ]


def sampled(found: Fingerprint) -> bool:
    """Say whether the tokens of a call were drawn, as far as its settings tell."""
    return found.fields["generation.do_sample"].value is True
