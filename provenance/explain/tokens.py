"""What the tokens say: where two sequences part, by which margins, and how far the logits had moved by then.

The change of the raw logits over the common prefix is what tells rounding from another function: exactly 0
points to decoding settings or random state; a few units in the last place to rounding; more to weights, inputs
or precision. The margin alone separates nothing. The thresholds are those of ``docs/margins.md``, measured.
"""

import math
from dataclasses import dataclass
from typing import Any

from provenance.explain import calls
from provenance.facts import Sequence, Step
from provenance.integrity import text

MANTISSA = {"float32": 23, "bfloat16": 7, "float16": 10, "float64": 52}
EPSILON32 = 2.0**-23
# Change of logits that rounding explains: 4 ulp in half precision; in float32, 64 x eps x the largest logit.
HALF_ULPS = 4.0
SINGLE_EPS = 64.0
# A flip is a near tie if the margin was within 2 ulp, or within what the logits moved on both sides of it.
TIE_ULPS = 2.0


@dataclass(frozen=True, slots=True)
class Change:
    """How far the raw logits moved over the common prefix, on the token ids that both runs hold."""

    max_abs: float
    at_divergence: float | None  # None where the two runs hold no common id at that step
    ulps: float
    allowed: float  # what rounding explains in this precision, in logits
    over_tokens: int
    at_least: bool = False  # a bound from below: the runs hold no common id where the logits moved furthest


@dataclass(frozen=True, slots=True)
class Evidence:
    """What two sequences with equal input show."""

    ids_equal: bool | None  # None where ids are missing and the equality keys cannot be compared
    text_equal: bool | None
    surface_only: bool
    divergent_at: int | None  # index of the first token that differs; the shorter length if one is a prefix
    prefix: bool  # one output is the beginning of the other
    change: Change | None
    kind: str  # none, zero, rounding, large, unknown
    near_tie: bool
    why_unknown: str
    overruled: bool = False  # one run chose a token that was not its best: something stood between logits and choice
    precisions: bool = False  # the two runs made their logits in different types


def ulp(value: float, dtype: str) -> float:
    """Return the spacing of numbers of a type at a value.

    >>> ulp(20.0, "bfloat16"), ulp(1.5, "float16")
    (0.125, 0.0009765625)
    """
    if value == 0 or not math.isfinite(value):
        return 0.0
    exponent = math.frexp(abs(value))[1] - 1
    return float(2.0 ** (exponent - MANTISSA.get(dtype, 23)))


def compare(a: Sequence, b: Sequence, sampled: bool, one_key: bool = True) -> Evidence:
    """Compare two outputs of one input; ``one_key`` says that the keys of both were made with one secret."""
    ids_equal, at, prefix = _first_difference(a, b, one_key)
    one, other = calls.text(a), calls.text(b)
    text_equal = None if one is None or other is None else one == other
    surface = (ids_equal is False or a.output_ids is None) and _surface(one, other)
    if ids_equal is not False:
        return Evidence(
            ids_equal, text_equal, surface_only=surface, divergent_at=None, prefix=False, change=None, kind="none",
            near_tie=False, why_unknown="",
        )  # fmt: skip
    why = _why_unknown(a, b, at)
    change = None if why or at is None else _change(a, b, at, prefix)
    kind = "unknown" if change is None else _kind(change)
    tie = kind in ("rounding", "zero") and not sampled and at is not None and not prefix and _tie(a, b, at, change)
    overruled = at is not None and not prefix and not sampled and change is not None and _overruled(a, b, at, change)
    why = why or ("" if change else _thin(at))
    precisions = bool(a.steps and b.steps) and a.logits_dtype != b.logits_dtype
    return Evidence(ids_equal, text_equal, surface, at, prefix, change, kind, tie, why, overruled, precisions)


def _overruled(a: Sequence, b: Sequence, at: int, change: Change) -> bool:
    """Say whether a run passed over its best token by more than rounding allows."""
    for sequence in (a, b):
        step = sequence.steps[at] if at < len(sequence.steps) else None
        if step is None or not step.top_logits:
            continue
        chosen = dict(zip(step.top_ids, step.top_logits, strict=True)).get(step.token, -math.inf)
        if max(step.top_logits) - chosen > change.allowed:
            return True
    return False


def coarser(one: str, other: str) -> str:
    """Return the type with the fewer digits.

    >>> coarser("float32", "bfloat16"), coarser("", "float16"), coarser("", "")
    ('bfloat16', 'float16', 'float32')
    """
    known = [name for name in (one, other) if name in MANTISSA]
    return min(known, key=lambda name: MANTISSA[name], default="float32")


def _first_difference(a: Sequence, b: Sequence, one_key: bool) -> tuple[bool | None, int | None, bool]:
    one, other = a.output_ids, b.output_ids
    if one is None or other is None:
        if a.output_key and b.output_key and one_key:
            return a.output_key == b.output_key, None, False
        return None, None, False
    if one == other:
        return True, None, False
    for index, (x, y) in enumerate(zip(one, other, strict=False)):
        if x != y:
            return False, index, False
    return False, min(len(one), len(other)), True


def parts(one: tuple[int, ...], other: tuple[int, ...]) -> tuple[int, int | None, int | None]:
    """Return where two rows of ids part, and what stands there; None past the end of one.

    >>> parts((1, 2, 3), (1, 4)), parts((1,), (1, 2))
    ((1, 2, 4), (1, None, 2))
    """
    both = enumerate(zip(one, other, strict=False))
    at = next((n for n, (x, y) in both if x != y), min(len(one), len(other)))
    return at, one[at] if at < len(one) else None, other[at] if at < len(other) else None


def _surface(one: str | None, other: str | None) -> bool:
    """Say whether two texts differ only in white space, punctuation of another width, or Unicode form."""
    return one is not None and other is not None and one != other and text.differs_by(one, other) is not None


def _why_unknown(a: Sequence, b: Sequence, at: int | None) -> str:
    if at is None:
        return "the token ids were not kept"
    for side, sequence in (("A", a), ("B", b)):
        if not sequence.steps:
            return f"{side} has no token evidence: {sequence.no_evidence or 'not recorded'}"
    return ""


def _thin(at: int | None) -> str:
    return f"the two runs hold no common token id up to token {at}"


def _change(a: Sequence, b: Sequence, at: int, prefix: bool) -> Change | None:
    """Measure how far the logits moved up to and including the step at which the outputs part."""
    last = at if prefix else at + 1
    largest = max((abs(x) for x in a.steps[0].top_logits + b.steps[0].top_logits), default=0.0)
    dtype = coarser(a.logits_dtype, b.logits_dtype)
    unit = ulp(largest, dtype)
    allowed = SINGLE_EPS * EPSILON32 * max(largest, 1.0) if dtype in ("float32", "float64") else HALF_ULPS * unit
    worst, seen, here, bound = 0.0, 0, None, False
    for index in range(min(last, len(a.steps), len(b.steps))):
        moved = _moved(a.steps[index], b.steps[index])
        apart = _apart(a.steps[index], b.steps[index]) if moved is None else 0.0
        if moved is None and apart <= allowed:
            continue  # a bound that rounding could reach tells nothing
        seen += 1
        if max(moved or 0.0, apart) > worst:
            worst, bound = max(moved or 0.0, apart), moved is None
        if index == at:
            here = moved
    return Change(worst, here, worst / unit if unit else 0.0, allowed, seen, bound) if seen else None


def _moved(one: Step, other: Step) -> float | None:
    here, there = (dict(zip(step.top_ids, step.top_logits, strict=True)) for step in (one, other))
    moves = [abs(x - there[i]) for i, x in here.items() if i in there and math.isfinite(x) and math.isfinite(there[i])]
    if not moves:
        return None
    return max(*moves, _fell(here, there), _fell(there, here))


def _apart(one: Step, other: Step) -> float:
    """Return by how much some logit moved at least where the best tokens of two steps have none in common.

    The best of each side stood below the last of the other's best, so the gap between the two turned by both spans.
    """
    here, there = ([x for x in step.top_logits if math.isfinite(x)] for step in (one, other))
    if not here or not there:
        return 0.0
    spans = (max(here) - min(here) + max(there) - min(there)) / 2
    return max(spans, max(here) - min(there), max(there) - min(here))


def _fell(here: dict[int, float], there: dict[int, float]) -> float:
    """Return by how much a token fell at least that stands among the best of one side alone: below the other's last."""
    last = min(there.values())
    return max((x - last for i, x in here.items() if i not in there and math.isfinite(x - last)), default=0.0)


def _kind(change: Change) -> str:
    if change.max_abs == 0:
        return "zero"
    return "rounding" if change.max_abs <= change.allowed else "large"


def _tie(a: Sequence, b: Sequence, at: int, change: Change | None) -> bool:
    """Say whether the choice hung on a margin that rounding can turn: in the run where the margin was smaller."""
    margins = [s.steps[at].margin for s in (a, b) if at < len(s.steps) and s.steps[at].margin is not None]
    if not margins or change is None:
        return False
    largest = max((abs(x) for x in a.steps[0].top_logits), default=0.0)
    dtype = coarser(a.logits_dtype, b.logits_dtype)
    moved = change.at_divergence if change.at_divergence is not None else change.max_abs
    return max(m for m in margins if m is not None) <= max(TIE_ULPS * ulp(largest, dtype), 2 * moved)


def side(sequence: Sequence, at: int | None, drawn: bool = False) -> dict[str, Any]:
    """Describe one run's token at the point where the outputs part. A drawn token has a rank, and no margin."""
    if at is None or sequence.output_ids is None:
        return {}
    if at >= len(sequence.output_ids):
        return {"token_id": None, "text": None, "ended": sequence.finish}
    found: dict[str, Any] = {"token_id": sequence.output_ids[at]}
    if at < len(sequence.steps):
        step = sequence.steps[at]
        if drawn:
            return found | {"logprob": step.logprob, "drawn": True, "rank": _rank(step), "among": len(step.top_ids)}
        largest = max((abs(x) for x in sequence.steps[0].top_logits), default=0.0)
        unit = ulp(largest, sequence.logits_dtype)
        found |= {"logprob": step.logprob, "runner_up_id": step.runner_up, "margin": _finite(step.margin)}
        found["margin_ulps"] = (
            step.margin / unit if step.margin is not None and unit and math.isfinite(step.margin) else None
        )
    return found


def _rank(step: Step) -> int | None:
    """Return how many tokens had no smaller logit than the one that was drawn; None where it is not among the best."""
    if step.token not in step.top_ids:
        return None
    own = step.top_logits[step.top_ids.index(step.token)]
    return 1 + sum(logit > own for logit in step.top_logits)


def _finite(number: float | None) -> float | None:
    return number if number is not None and math.isfinite(number) else None
