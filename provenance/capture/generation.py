"""The settings of one `generate` call: resolved values, and which hand set each.

Order of strength in transformers: keyword arguments of the call, the `generation_config` argument, the model's
own generation config (from its checkpoint), the library's defaults. The resolved configuration is the object
that `generate` itself made; where a runtime keeps it to itself the requested values are all there is, and the
rest is unknown.
"""

from collections.abc import Mapping
from functools import partial
from typing import Any

import orjson

from provenance import privacy
from provenance.facts import Field, Fingerprint, State
from provenance.fingerprint import code
from provenance.fingerprint.reading import read
from provenance.integrity import digests
from provenance.integrity.secrets import GONE, tells, withheld

# Values that are floats by meaning: 1 and 1.0 are one setting.
FLOATS = {"temperature", "top_p", "min_p", "top_h", "typical_p", "epsilon_cutoff", "eta_cutoff", "repetition_penalty",
          "encoder_repetition_penalty", "length_penalty", "diversity_penalty", "guidance_scale", "penalty_alpha",
          "max_time"}  # fmt: skip
# Arguments of generate that are inputs or machinery and not settings.
NOT_SETTINGS = {"inputs", "input_ids", "inputs_embeds", "attention_mask", "position_ids", "decoder_input_ids",
                "decoder_attention_mask", "generation_config", "tokenizer", "assistant_tokenizer", "cache",
                "past_key_values", "cache_params", "encoder_outputs", "token_type_ids", "cache_position"}  # fmt: skip
OBJECTS = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "assistant_model", "custom_generate",
           "negative_prompt_ids", "synced_gpus", "streamer")  # fmt: skip
VALUED = {
    "logits_processor": "generation.logits_processor_values",
    "stopping_criteria": "generation.stopping_criteria_values",
}
CODED = {
    "logits_processor": "generation.logits_processor_code",
    "stopping_criteria": "generation.stopping_criteria_code",
    "prefix_allowed_tokens_fn": "generation.prefix_allowed_tokens_fn_code",
    "constraints": "generation.constraints_code",
    "custom_generate": "generation.custom_generate_code",
}
MOST, LONGEST = 16, 200  # values that are read from one object, and characters of one
KEPT = 256
WATERMARK, SECRETS = "generation.watermarking_config", ("hashing_key", "keys")
CALL, CONFIG, MODEL, LIBRARY = "call", "call.generation_config", "model", "library"
NOTE = {CALL: "call", CONFIG: "call.generation_config"}


def settings(
    request: Mapping[str, Any], own: Any, observer: Any, key: bytes, why: str = "", mode: str = privacy.FULL
) -> Fingerprint:
    """Make the settings fingerprint of a call.

    ``request`` holds the arguments as given, ``own`` the model's generation config, ``observer`` the resolved
    one if the loop was seen, ``key`` the store's, ``why`` the reason where the loop was not seen, and ``mode``
    what is kept of content.
    """
    given = request.get("generation_config")
    mark = _mark(request, given, own, observer, (key, why, mode))
    found = _made.get(mark) if mark is not None else None
    if found is None:
        fields = [_sealed(item, key) for item in _fields(request, given, own, observer, why)]
        found = Fingerprint.of("settings", privacy.guarded(fields, mode, key))
        if mark is not None:
            if len(_made) >= KEPT:
                _made.clear()
            _made[mark] = found
    return found


def _mark(
    request: Mapping[str, Any], given: Any, own: Any, observer: Any, more: tuple[object, ...]
) -> tuple[object, ...] | None:
    """Return what two calls with one settings fingerprint have in common; None where values do not tell.

    To make the fingerprint takes a quarter of a millisecond, this a tenth of that, and most calls are like the last.
    """
    resolved = observer.config if observer is not None else None
    values = _public(resolved)
    prompt = observer.prompt_length if observer is not None else None
    if values.get("max_new_tokens") is not None:  # then the total is the prompt's and decides nothing
        values.pop("max_length", None)
        prompt = None
    if values.get("min_new_tokens") is not None:
        values.pop("min_length", None)
    try:
        parts = [values, {name: value for name, value in request.items() if name not in NOT_SETTINGS}]
        for config in (given, own):
            public = _public(config)
            # where the resolved configuration was seen, of the others only counts what they set
            parts.append(public if resolved is None else {name: value is None for name, value in public.items()})
        marked = orjson.dumps(parts, option=orjson.OPT_NON_STR_KEYS)
    except TypeError:  # a processor, a tensor, a configuration inside: made anew
        return None
    loop = (observer.mode, tuple(observer.processors)) if observer is not None else ()
    return (marked, loop, prompt, *more)


_made: dict[tuple[object, ...], Fingerprint] = {}


def _fields(request: Mapping[str, Any], given: Any, own: Any, observer: Any, why: str) -> list[Field]:
    resolved = observer.config if observer is not None else None
    if resolved is None:
        fields = _requested_only(request, given, own, why)
    else:
        fields = [_field(name, value, request, given, own) for name, value in sorted(_public(resolved).items())]
        fields = _lengths(fields, resolved, request, given, own, observer.prompt_length)
        fields += [
            Field("generation.mode", observer.mode, source="resolved"),
            Field("generation.logits_processors", observer.processors, source="resolved"),
        ]
    chosen = sorted(name for name in request if name not in NOT_SETTINGS and name not in OBJECTS)
    fields.append(Field("generation.user_set_fields", chosen, source=CALL))
    return fields + _objects(request) + (observer.held if observer is not None else [])


def _sealed(item: Field, key: bytes) -> Field:
    """Put a keyed digest for a watermark's keys: they can wash the mark off."""
    if item.name != WATERMARK or not isinstance(item.value, dict):
        return item
    value = {
        name: "hmac:" + digests.equality(key, "watermark", (repr(part).encode(),)).hex() if name in SECRETS else part
        for name, part in item.value.items()
    }
    return Field(item.name, value, item.state, item.reason, item.source)


def source(name: str, request: Mapping[str, Any], given: Any, own: Any) -> str:
    """Say who set a value."""
    if name in request:
        return CALL
    if given is not None and getattr(given, name, None) is not None:
        return CONFIG
    if own is not None and getattr(own, name, None) is not None:
        return MODEL
    return LIBRARY


def _field(name: str, value: Any, request: Mapping[str, Any], given: Any, own: Any) -> Field:
    origin = source(name, request, given, own)
    if value is None:
        return Field(f"generation.{name}", None, State.UNSET, "", origin if origin != LIBRARY else "")
    return Field(f"generation.{name}", _plain(name, value), State.VALUE, "", origin)


def _plain(name: str, value: Any) -> Any:
    if name in FLOATS and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if value is None or isinstance(value, (bool, int, float, str)):
        return value
    if isinstance(value, Mapping):
        return {str(key): _plain("", item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [_plain("", item) for item in value]
    if hasattr(value, "tolist") and getattr(value, "numel", lambda: 1 << 20)() <= 64:
        return value.tolist()
    if hasattr(value, "to_dict"):
        return {"type": type(value).__name__, **{str(k): _plain("", v) for k, v in value.to_dict().items()}}
    return {"type": f"{type(value).__module__}.{type(value).__qualname__}"}


def _lengths(
    fields: list[Field], resolved: Any, request: Mapping[str, Any], given: Any, own: Any, prompt: int | None
) -> list[Field]:
    """Put the length settings as they were decided: `generate` overwrites max_length with the prompt's length added.

    The derived total differs from prompt to prompt and is no setting; left in, no two prompts would share
    settings.
    """
    table = {item.name: item for item in fields}
    for new, total in (("max_new_tokens", "max_length"), ("min_new_tokens", "min_length")):
        kept, derived = f"generation.{new}", f"generation.{total}"
        if getattr(resolved, new, None) is not None:
            table[derived] = Field.moot(derived, f"{new} leads")
        elif source(total, request, given, own) == LIBRARY and total == "max_length" and prompt is not None:
            # Nobody set a length: transformers adds its default to the prompt.
            extra = int(resolved.max_length) - prompt
            table[kept] = Field(kept, extra, State.VALUE, "default max_length", LIBRARY)
            table[derived] = Field.moot(derived, "the library's default counts new tokens")
    return list(table.values())


def _requested_only(request: Mapping[str, Any], given: Any, own: Any, why: str) -> list[Field]:
    """Keep what was asked where the resolved configuration could not be seen."""
    fields = []
    for name, value in sorted(request.items()):
        if name not in NOT_SETTINGS and name not in OBJECTS and not _tensor(value):
            fields.append(Field(f"generation.{name}", _plain(name, value), State.VALUE, "requested", CALL))
    for config in (given, own):
        for name, value in sorted(_public(config).items()):
            key = f"generation.{name}"
            if value is not None and all(item.name != key for item in fields):
                origin = CONFIG if config is given else MODEL
                fields.append(Field(key, _plain(name, value), State.VALUE, "requested", origin))
    fields.append(Field.unknown("generation.mode", why or "the decoding loop was not seen"))
    return fields


def _objects(request: Mapping[str, Any]) -> list[Field]:
    """Name the code that the caller handed in: it can do anything, so its type at least stands here."""
    fields = []
    for name in OBJECTS:
        value = request.get(name)
        if value is None or (hasattr(value, "__len__") and not _tensor(value) and len(value) == 0):
            continue
        if isinstance(value, (list, tuple)):
            shown: Any = [f"{type(item).__module__}.{type(item).__qualname__}" for item in value]
        elif callable(value) and hasattr(value, "__qualname__"):
            shown = f"{value.__module__}.{value.__qualname__}"
        else:
            shown = f"{type(value).__module__}.{type(value).__qualname__}"
        fields.append(Field(f"generation.{name}", shown, State.VALUE, "", CALL))
    return fields


def held(request: Mapping[str, Any], key: bytes) -> list[Field]:
    """Return what the caller's code does, and holds before the call: its counters may move while it runs.

    ``key`` is the store's, for secrets that it closes over.
    """
    fields = []
    for name, field in VALUED.items():
        items = _items(request.get(name))
        if items:
            values = [_held(item) for item in items]
            fields.append(Field(field, values, State.VALUE, "", CALL))
    for name, field in CODED.items():
        items = _items(request.get(name))
        if items:
            fields.append(read(field, partial(_code, items, key), CALL))
    return fields


def _items(value: Any) -> list[Any]:
    """Return the pieces of code in an argument; a decoding loop may be a name."""
    return list(value) if isinstance(value, (list, tuple)) else [] if value is None or type(value) is str else [value]


def _code(items: list[Any], key: bytes) -> list[str]:
    return [code.digest(item, key) for item in items]


def _held(item: Any) -> dict[str, Any]:
    """Return the plain numbers and short words that an object holds, straight from where it keeps them.

    No code of its class runs: it is somebody else's.
    """
    try:
        table = object.__getattribute__(item, "__dict__")
        pairs = [pair for pair in list(table.items()) if type(pair[0]) is str and not pair[0].startswith("_")]
    except (AttributeError, TypeError, RuntimeError):  # slots, or another thread that writes to it
        return {}
    plain = [(name, value) for name, value in pairs if type(value) in (bool, int, float, str)]
    short = sorted((name, value) for name, value in plain if not isinstance(value, str) or len(value) <= LONGEST)
    return {name: _open(name, value) for name, value in short[:MOST]}


def _open(name: str, value: Any) -> Any:
    return GONE.decode() if withheld(name, value) or (isinstance(value, str) and tells(value)) else value


def _public(config: Any) -> dict[str, Any]:
    if config is None:
        return {}
    return {name: value for name, value in vars(config).items() if not name.startswith("_")}


def _tensor(value: Any) -> bool:
    return hasattr(value, "data_ptr")
