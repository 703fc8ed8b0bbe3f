"""What a recorded call needs to be made again: its inputs and its settings, and what of them cannot be had.

Pure: from a run to a plan, without torch. Whatever was not kept, or is code of the caller's own, is told field by
field in one sentence; nothing is left out in silence.
"""

import ast
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from provenance.errors import UsageError
from provenance.explain import conditions
from provenance.facts import Field, Run, Sequence, State

# How much a loss weighs: it is told; the call is made only if the field is allowed to differ; it cannot be made.
TOLD, ASKED, NEEDED = range(3)
Ids = tuple[int, ...]

PREFIX = "generation."
CALL, CONFIG, MODEL = "call", "call.generation_config", "model"
DERIVED = {"mode", "logits_processors", "user_set_fields", "transformers_version"}
CODE = {
    "logits_processor": "the processors", "stopping_criteria": "the stopping criteria",
    "prefix_allowed_tokens_fn": "the function that allows tokens", "custom_generate": "the decoding loop",
    "assistant_model": "the model that drafts", "negative_prompt_ids": "the negative prompt",
}  # fmt: skip
INSIDE = {f"{name}_{part}" for name in (*CODE, "constraints") for part in ("values", "code")}  # told with the code
IDLE = {"streamer", "synced_gpus"}  # they watch, or wait for others: no token depends on them
HARMLESS = {"use_model_defaults", "trust_remote_code"}
BUILT = {"CompileConfig"}  # settings that are objects, and made of data alone
DEFAULT_LENGTH = "default max_length"
# Which declared field speaks of an argument that was digested and not kept.
BESIDE = {"pixel_values": "input.pixel_values_sha256", "position_ids": "batch.position_ids_sha256",
          "inputs_embeds": "input.inputs_embeds_sha256"}  # fmt: skip
ARGUMENTS = "input.extra_model_kwargs_digest"


class Lost(NamedTuple):
    """One thing that is not as it was in the original, or cannot be: the field, why, and how much it weighs."""

    field: str
    because: str
    level: int = TOLD

    @property
    def sentence(self) -> str:
        """Return it for people."""
        return f"{self.field}: {self.because}"


@dataclass(slots=True)
class Plan:
    """The call as it was: ids with their padding, mask, and settings by the hand that set each."""

    ids: tuple[Ids, ...] | None = None  # None: the call had no input and began with the model's first token
    mask: tuple[Ids, ...] | None = None  # None: none was given
    call: dict[str, Any] = field(default_factory=dict)
    config: dict[str, Any] = field(default_factory=dict)
    own: dict[str, Any] = field(default_factory=dict)
    library: dict[str, Any] = field(default_factory=dict)
    length: int | None = None  # what the library's default allowed, where nobody set a length
    draws: bool = False  # tokens were drawn, or dropout was on: the random state decides
    lost: list[Lost] = field(default_factory=list)


def make(run: Run) -> Plan:
    """Make the plan of a run.

    Raises UsageError for a run that is no finished `generate` of transformers.
    """
    name = run.run_id[:13]
    if (run.runtime, run.operation) != ("transformers", "generate"):
        raise UsageError(
            f"run {name} is a call of {run.runtime} {run.operation}; only `generate` of transformers can be replayed."
        )
    if run.status != "ok" or not run.sequences:
        raise UsageError(f"run {name} ended as {run.status!r}: it has no output that a replay could be held against.")
    made = Plan()
    _inputs(made, run)
    _beside(made, run)
    _settings(made, run)
    _randomness(made, run)
    threads = value(run, "batch.concurrent_threads")
    if isinstance(threads, int) and threads > 1:
        made.lost.append(Lost("batch.concurrent_threads", f"{threads} calls were in flight then, and one is now"))
    return made


def value(run: Run, name: str) -> Any:
    """Return the value of a field of a run, or None where it has none."""
    return conditions.value(run.fields, name)


# -- inputs -----------------------------------------------------------------------------------------


def _inputs(made: Plan, run: Run) -> None:
    rows = [item for item in sorted(run.sequences, key=lambda item: item.row) if item.ret == 0]
    if any(item.input_ids is None for item in rows):
        if value(run, "input.empty") is True and not any(item.input_key or item.media for item in rows):
            return  # no prompt at all
        made.lost.append(Lost("input.token_ids", _why_no_ids(rows), NEEDED))
        return
    width, side, token = value(run, "batch.max_length"), value(run, "batch.padding_side"), _padding(made, run, rows)
    try:
        laid = [_laid(item, side, token) for item in rows]
    except ValueError as error:
        made.lost.append(Lost("batch.padding_side", str(error), NEEDED))
        return
    if {len(ids) for ids, _ in laid} != {width}:
        made.lost.append(Lost("batch.max_length", f"the rows that were kept do not add up to {width} tokens", NEEDED))
        return
    made.ids = tuple(ids for ids, _ in laid)
    given = value(run, "batch.mask_given")
    if value(run, "batch.mask_origin") == "call, of another shape":
        made.lost.append(Lost("batch.attention_mask_sha256", "a mask of another shape was given, and not kept", ASKED))
    elif given is True or (given is None and any(item.padding for item in rows)):
        made.mask = tuple(mask for _, mask in laid)


def _why_no_ids(rows: list[Sequence]) -> str:
    media = sorted({line.split(" ")[0] for item in rows for line in item.media})
    if media:
        return f"the input was no token ids but {', '.join(media)}, of which only digests are kept"
    return "the inputs were not kept: the run was recorded with capture=digest or off, or its content was erased"


def _laid(item: Sequence, side: object, token: int) -> tuple[Ids, Ids]:
    """Lay the ids of a row out over the width of its batch, with the mask. Raises ValueError where that is unknown."""
    ids = item.input_ids or ()
    if item.mask is not None:
        if sum(item.mask) == len(ids):
            left = iter(ids)
            return tuple(next(left) if bit else token for bit in item.mask), item.mask
        gap = len(item.mask) - len(ids)  # tokens that the mask hides were kept with the prompt, padding was not
        if gap < 0 or (gap and side not in ("left", "right")):
            raise ValueError(f"the mask of row {item.row} does not fit its {len(ids)} ids")
        beside = (token,) * gap
        return (beside + ids if side == "left" else ids + beside), item.mask
    fill = item.padding or 0
    if not fill:
        return ids, (1,) * len(ids)
    if side == "left":
        return (token,) * fill + ids, (0,) * fill + (1,) * len(ids)
    if side == "right":
        return ids + (token,) * fill, (1,) * len(ids) + (0,) * fill
    raise ValueError(f"rows are padded on different sides, and which row on which was not kept ({side})")


def _padding(made: Plan, run: Run, rows: Iterable[Sequence]) -> int:
    """Return the token that fills the padding: the one a mask was told from, else the tokenizer's."""
    special = value(run, "tokenizer.special_ids")
    known = [value(run, "generation.pad_token_id"), special.get("pad") if isinstance(special, Mapping) else None]
    if value(run, "batch.mask_origin") != "inferred from the padding token":
        known.reverse()
    found = next((item for item in known if isinstance(item, int)), 0)
    named = value(run, "generation.logits_processors")
    readers = [str(name) for name in named or () if not str(name).endswith("Warper")]  # a warper sees scores alone
    if readers and any(item.padding for item in rows):
        made.lost.append(
            Lost("batch.padding_tokens", f"which token filled the padding was not kept; {found} stands there now, and "
                 f"{', '.join(readers)} may read it")
        )  # fmt: skip
    return found


def _beside(made: Plan, run: Run) -> None:
    """Tell what stood beside the ids: it was digested, and cannot be given again."""
    names = sorted({line.split(" ")[0] for item in run.sequences for line in item.media})
    if made.ids is not None:
        made.lost += [
            Lost(BESIDE.get(name, ARGUMENTS), f"{name} was given, and only its digest is kept", ASKED) for name in names
        ]
    if value(run, "input.past_key_values_given") is True:
        made.lost.append(Lost("input.past_key_values_given", "a cache was handed in, which is not kept", ASKED))
    chosen = value(run, "generation.user_set_fields")
    for name in chosen if isinstance(chosen, list) else ():
        if f"{PREFIX}{name}" not in run.fields and name not in HARMLESS | set(names):
            made.lost.append(Lost(ARGUMENTS, f"the argument {name} was given, and its value is not kept", ASKED))


# -- settings ---------------------------------------------------------------------------------------


def _settings(made: Plan, run: Run) -> None:
    places = {CALL: made.call, CONFIG: made.config, MODEL: made.own}
    for name, item in sorted(run.fields.items()):
        key = name.removeprefix(PREFIX)
        if key == name or key in DERIVED | IDLE | INSIDE or item.state in (State.NOT_APPLICABLE, State.UNKNOWN):
            continue
        if key in CODE:
            if item.value is not None:
                why = f"{CODE[key]} of the caller's own ({item.show()}) cannot be kept"
                made.lost.append(Lost(name, why, ASKED))
            continue
        why = _sealed(item)
        if why:
            made.lost.append(Lost(name, why, ASKED))
        elif item.reason == DEFAULT_LENGTH and isinstance(item.value, int):
            made.length = item.value
        else:
            places.get(item.source, made.library)[key] = _restored(key, item.value)
    if value(run, "generation.max_time") is not None:
        made.lost.append(Lost("generation.max_time", "the clock ended this call; another machine ends it elsewhere"))


def _sealed(item: Field) -> str:
    """Say why the value of a setting cannot be had again, or nothing."""
    if item.state is State.REDACTED:
        return f"it was withheld when it was recorded ({item.reason})"
    inner = item.value.values() if isinstance(item.value, dict) else [item.value]
    if any(isinstance(part, str) and part.startswith("hmac:") for part in inner):
        return "only a keyed digest of it is kept"
    if isinstance(item.value, dict) and item.value.get("type", "CompileConfig") not in BUILT:
        return f"it was an object ({item.value['type']}), which is not kept"
    return ""


def _restored(key: str, stored: Any) -> Any:
    """Return a setting as `generate` takes it: a bias by tokens was written with its keys as text."""
    if key == "sequence_bias" and isinstance(stored, dict):
        return {_tokens(name): bias for name, bias in stored.items()}
    return stored


def _tokens(text: str) -> Any:
    try:
        return ast.literal_eval(text)
    except (ValueError, SyntaxError):
        return text


# -- randomness -------------------------------------------------------------------------------------


def _randomness(made: Plan, run: Run) -> None:
    """Tell whether the random state decides, and whether there is one."""
    sampled = conditions.drew(run) or "sample" in str(value(run, "generation.mode") or "")
    made.draws = sampled or bool(value(run, "model.training") is True and value(run, "model.dropout_active"))
    if not made.draws:
        return
    for name in generators(run):
        if name not in run.states and value(run, "seed.torch_initial") is None:
            made.lost.append(Lost(f"{name}_state_sha256", "neither the random state nor a seed was kept", ASKED))


def generators(run: Run) -> list[str]:
    """Return the generators that the tokens of a run were drawn from: that of the device where it was seen."""
    place = str(value(run, "rng.device_of_sampling") or value(run, "model.device_map") or "cpu")
    kind = next((kind for kind in ("cuda", "mps", "xpu") if place.startswith(kind)), "cpu")
    return [f"rng.torch_{kind}"]
