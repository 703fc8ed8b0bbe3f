"""Decoding settings with nothing left open: what the library or a checkpoint would fill in stands there itself.

    config, changes = provenance.greedy(model, max_new_tokens=64)
    model.generate(**inputs, generation_config=config)
    print(changes)      # what was changed, and who had set it

`generate` fills every unset field from the model's own generation config, which came with the checkpoint, and then from
the library's defaults. So each field gets its neutral value, with which it does nothing. A few have none; where the
checkpoint sets one of those, that is said, with the line that clears it.
"""

import copy
import math
from collections.abc import Iterable
from typing import Any, NamedTuple

from provenance.errors import BadSetting

LIBRARY, MODEL, GIVEN = "the library's default", "the model's generation config", "the configuration given"

# The value with which a field does nothing. Neutral at any way of decoding:
NEUTRAL: dict[str, Any] = {
    "num_beams": 1, "num_return_sequences": 1, "early_stopping": False, "length_penalty": 1.0,
    "repetition_penalty": 1.0, "encoder_repetition_penalty": 1.0, "no_repeat_ngram_size": 0,
    "encoder_no_repeat_ngram_size": 0, "min_new_tokens": 0, "guidance_scale": 1.0, "penalty_alpha": 0.0,
    "suppress_tokens": [], "begin_suppress_tokens": [], "max_time": math.inf, "remove_invalid_values": False,
    "renormalize_logits": False, "token_healing": False, "use_cache": True,
}  # fmt: skip
# Read only where tokens are drawn. 50 is what the library puts for an unset top_k; 0 turns it off.
DRAWING: dict[str, Any] = {
    "temperature": 1.0, "top_k": 0, "top_p": 1.0, "min_p": 0.0, "typical_p": 1.0, "epsilon_cutoff": 0.0,
    "eta_cutoff": 0.0,
}  # fmt: skip
GREEDY: dict[str, Any] = {**DRAWING, "top_k": 50, "min_p": None}  # what makes no warning under do_sample=False
# Fields that act and have no neutral value: None lets the checkpoint's through.
OPEN = ("top_h", "bad_words_ids", "sequence_bias", "watermarking_config", "forced_bos_token_id", "forced_eos_token_id",
        "exponential_decay_length_penalty", "prompt_lookup_num_tokens", "dola_layers", "constraints", "force_words_ids",
        "use_mtp", "stop_strings", "cache_implementation", "prefill_chunk_size")  # fmt: skip
ONLY_DRAWN = ("min_p", "top_h")
LENGTHS = ("max_new_tokens", "max_length")


class Change(NamedTuple):
    """One field: what it was, who had set that, what it is now, and what is left to do."""

    name: str
    before: Any
    by: str
    now: Any
    note: str = ""

    def __str__(self) -> str:
        what = f"{self.name} = {self.now!r}"
        if self.before != self.now:
            what += f", was {self.before!r} by {self.by}"
        return what + (f": {self.note}" if self.note else "")


class Changes(list[Change]):
    """All fields of a cleaned configuration. ``acting`` are those that would have decoded otherwise."""

    @property
    def acting(self) -> list[Change]:
        """Return what was changed from a value that did something."""
        return [item for item in self if item.before != item.now and item.before is not None]

    @property
    def left(self) -> list[Change]:
        """Return what could not be settled here, each with the line that settles it."""
        return [item for item in self if item.note]

    def __str__(self) -> str:
        rows = [*self.acting, *(item for item in self.left if item not in self.acting)]
        same = len(self) - len(rows)
        return "\n".join([*map(str, rows), f"{same} other fields stand at the value with which they do nothing"])


class Cleaned(NamedTuple):
    """A configuration with nothing left open, and what was changed for it."""

    config: Any
    changes: Changes


def greedy(model: Any, *, keep: Iterable[str] = (), clear: bool = False, **settings: Any) -> Cleaned:
    """Return a generation config for pure greedy decoding, and what was changed for it.

    ``settings`` are fields of your own, such as ``max_new_tokens``; ``keep`` names fields that stay as the model has
    them, such as ``repetition_penalty``. The model is not touched, unless ``clear`` says so: then fields that have no
    neutral value are removed from its own generation config.

    Raises BadSetting for a model without a generation config, or a field that it does not have.
    """
    own = _own(model)
    return _clean(own, own, MODEL, {"do_sample": False, **NEUTRAL, **GREEDY}, _Wish(set(keep), clear, settings))


def clean_sampling(config: Any, *, model: Any = None, clear: bool = False, **settings: Any) -> Cleaned:
    """Return a generation config for sampling in which every field stands, and what was changed for it.

    ``config`` is a generation config, or a model, whose own is taken. What it sets is kept; everything else gets the
    value with which it does nothing, so that neither the checkpoint nor the library adds to it (the library adds
    ``top_k=50``). ``model`` is the model that it is for: its fields without a neutral value are named, and removed with
    ``clear``.

    Raises BadSetting for a configuration that is none, and for a temperature of 0.
    """
    given = config if hasattr(config, "do_sample") else _own(config)
    own = _own(model) if model is not None else given if given is not config else None
    keep = {name for name in (*NEUTRAL, *DRAWING) if getattr(given, name, None) is not None}
    keep |= {"min_length"} if getattr(given, "min_length", None) else set()
    heat = settings.get("temperature", getattr(given, "temperature", None))
    if heat == 0:
        raise BadSetting("the temperature is 0, at which nothing can be drawn; use provenance.greedy(model).")
    by = MODEL if given is not config else GIVEN
    return _clean(given, own, by, {"do_sample": True, **NEUTRAL, **DRAWING}, _Wish(keep, clear, settings))


class _Wish(NamedTuple):
    keep: set[str]
    clear: bool
    settings: dict[str, Any]


def _own(model: Any) -> Any:
    own = getattr(model, "generation_config", None)
    if own is None:
        raise BadSetting(f"a {type(model).__qualname__} has no generation config; give a transformers model.")
    return own


def _clean(given: Any, own: Any, by: str, wanted: dict[str, Any], wish: _Wish) -> Cleaned:
    config = copy.deepcopy(given)
    defaults = _defaults(given)
    unknown = sorted((wish.keep | set(wish.settings)) - set(vars(config)))
    if unknown:
        raise BadSetting(f"there is no generation setting {unknown[0]!r} in this version of transformers.")
    changes = Changes()
    for name, value in {**wanted, **wish.settings}.items():
        if name not in vars(config) or (name == "min_new_tokens" and "min_length" in wish.keep):
            continue  # of the two lengths min_new_tokens leads
        before, origin = _standing(name, given, own, defaults, by)
        now = wish.settings.get(name, before if name in wish.keep else value)
        setattr(config, name, copy.copy(now))
        moot = name in ONLY_DRAWN and now is None
        changes.append(Change(name, None if moot else before, origin, now))
    for name in OPEN:
        if name in vars(config) and name not in {*wish.keep, *wish.settings}:
            changes.append(_opened(name, config, own, by, wish.clear))
    if all(getattr(config, name, None) is None for name in LENGTHS):
        default = defaults.get("max_length", 20)
        note = f"nobody set a length, and the library stops after {default} new tokens; give max_new_tokens"
        changes.append(Change("max_new_tokens", None, LIBRARY, None, note))
    return Cleaned(config, changes)


def _standing(name: str, given: Any, own: Any, defaults: dict[str, Any], by: str) -> tuple[Any, str]:
    """Return the value that would have been in force, and who set it."""
    for config, origin in ((given, by), (own, MODEL)):
        value = getattr(config, name, None)
        if value is not None:
            return value, origin
    return defaults.get(name), LIBRARY


def _defaults(config: Any) -> dict[str, Any]:
    """Return what the library fills in last. Older versions set it on every new configuration instead."""
    read = getattr(config, "_get_default_generation_params", None)
    return dict(read()) if read is not None else {k: v for k, v in vars(type(config)()).items() if k[:1] != "_"}


def _opened(name: str, config: Any, own: Any, by: str, clear: bool) -> Change:
    """Unset a field that has no neutral value, and say what that leaves."""
    before = getattr(config, name)
    setattr(config, name, None)
    theirs = getattr(own, name, None)
    if theirs is None or (name in ONLY_DRAWN and config.do_sample is not True):
        return Change(name, before, by, None)
    if clear:
        setattr(own, name, None)
        return Change(name, theirs, MODEL, None)
    return Change(name, theirs, MODEL, theirs, f"acts still: `model.generation_config.{name} = None`, or clear=True")
