"""Ranking what is left: how often a field is the cause in practice, against what the tokens say, against the past.

The first layer at which two runs part bounds the causes; how far the logits moved bounds them further (`natures`). A
candidate that the evidence rules out is dismissed with that sentence, never named. What was not recorded competes like
any other candidate: where it would win, the answer is that it could not be told, and which field would decide.
"""

from collections.abc import Mapping
from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from itertools import pairwise
from typing import Any

from provenance.catalogue.fields import Spec, spec
from provenance.explain import calls, conditions, own, tokens
from provenance.explain.advice import NO_TOGGLE
from provenance.explain.fields import Blind, Difference, document, group_of
from provenance.explain.history import Evidence
from provenance.explain.natures import INPUTS, RULED_OUT, fit, nature
from provenance.explain.rules import (
    CONFIG,
    CONFIGURED,
    FILES,
    MADE,
    SIDES,
    TENSORS,
    UNLOADED,
    Pair,
    dismissal,
    past_padding,
)
from provenance.facts import Field
from provenance.integrity.secrets import ARGUMENTS

WEIGHT = (0.02, 0.1, 0.25, 0.5, 0.8, 1.0)  # by prior, 0 to 5
UNRECORDED = 0.08  # what no catalogue knows takes its share: confidence never adds up to certainty
UNDECIDED = 0.7  # a field of which it is not known whether it acts here
# A field that one run knows and the other does not competes in full; one that neither could read hardly does.
ONE_SIDED, BOTH_SIDED = 1.0, 0.12
UNMASKED = 0.3  # padding that should be masked, where logits moved further than rounding
DECISIVE = 0.2
AS_GOOD = 0.6
NOISE = 0.9  # where dropout drew numbers in both runs, whatever the tokens show
ASKED = "input.token_ids"
BENEATH = 0.3  # tensors that a cast or the like changed already: how likely something else did too
PROVEN = 1.5  # what is known to be another function, against what may have rounded otherwise
OBSERVED = 0.35  # inputs that differ, beside something that makes inputs
# The share of the first cause in all scores, and how often one with that share was true (scripts/bench-explain; kept
# lower than measured where it was perfect: no set of cases holds them all).
CALIBRATION = ((0.0, 0.0), (0.13, 0.2), (0.2, 0.75), (0.25, 0.85), (0.5, 0.91), (0.7, 0.94), (1.0, 0.97))
History = Mapping[str, Evidence]
HARMLESS, ACCUSED = 5, 0.05  # pairs that differ without harm; the false-discovery rate at which the past accuses


@dataclass(slots=True)
class Cause:
    """A candidate, or a group of candidates that moved together."""

    name: str
    difference: Difference
    declared: Spec
    score: float
    together: list[str] = field(default_factory=list)
    vague: bool = False  # a field of the caller's own, which nothing speaks for
    seen: Evidence | None = None


@dataclass(slots=True)
class Ranking:
    """Causes, most likely first; what was dismissed, with reasons; what could not be compared."""

    causes: list[dict[str, Any]]
    dismissed: list[dict[str, Any]]
    unknown: list[dict[str, Any]]
    undecided: bool = False  # what was not recorded would beat every candidate

    @property
    def blamed(self) -> list[dict[str, Any]]:
        """Return the causes that explain something: a field of which nobody knows what it does does not."""
        return own.blamed(self.causes)


def rank(differing: Many[Difference], blind: Many[Blind], pair: Pair, history: History | None = None) -> Ranking:
    """Rank the differing fields of a pair whose outputs part."""
    kind = shown(pair)
    candidates: list[Cause] = []
    dismissed: list[dict[str, Any]] = []
    for difference in differing:
        why = dismissal(difference, pair)
        declared = spec(difference.name)
        fits = _fit(kind, difference, declared, pair)
        if not why and fits < RULED_OUT:
            why = _ruled_out(kind, declared)
        if why:
            dismissed.append(_entry(difference) | {"because": why})
        else:
            score = WEIGHT[declared.prior] * fits * _acts(declared, pair) * _past(history, difference.name)
            candidates.append(_candidate(difference, declared, score, (history or {}).get(difference.name)))
    _certain(candidates, kind)
    strengths = {item.name: _strength(item, pair, kind) for item in blind}
    deciders = {ARGUMENTS if pair.function else ASKED: _unasked(pair), FILES: _beneath(candidates, pair)}
    deciders = {name: why for name, why in deciders.items() if why}
    # Whether one thing was asked, and of one model, decides before anything else can.
    blind = [*(item for item in blind if item.name not in deciders), *(Blind(*item) for item in deciders.items())]
    strengths |= {name: WEIGHT[spec(ASKED).prior] for name in deciders}
    if kind in INPUTS:
        rivals = [value for value in strengths.values() if value >= DECISIVE]
        candidates.append(_observed(pair, upstream=bool(candidates or rivals) and not pair.function))
    causes = _grouped(candidates, pair)
    # What says one thing with a candidate is no rival of it.
    named = {member for cause in causes for member in group_of(cause.name)}
    strongest = max((value for name, value in strengths.items() if name not in named), default=0.0)
    best = causes[0].score if causes else 0.0
    undecided = bool(deciders) or (strongest >= DECISIVE and strongest > best)
    unknown = _unknown(blind, strengths, best if undecided else None, deciders)
    total = sum(cause.score for cause in causes) + UNRECORDED + strongest
    vague = bool(causes) and causes[0].vague
    confidences = (own.shares if vague else _confidences)([cause.score for cause in causes], total)
    entries = [_cause(cause, causes, sure, pair) for cause, sure in zip(causes, confidences, strict=True)]
    return Ranking(entries, dismissed, unknown, undecided)


def _candidate(difference: Difference, declared: Spec, score: float, seen: Evidence | None) -> Cause:
    """Make a candidate; what nobody knows stands at the end of the line until the past accuses it."""
    vague = own.is_own(difference.name) and (seen is None or seen.q > ACCUSED)
    if vague:
        score *= own.weight(difference.name, difference.a.value, difference.b.value, seen)
    return Cause(difference.name, difference, declared, score, vague=vague, seen=seen)


def _unknown(
    blind: Many[Blind], strengths: Mapping[str, float], best: float | None, deciders: Mapping[str, str]
) -> list[dict[str, Any]]:
    """List what could not be compared and could matter; what beats the best candidate would decide."""
    unknown: list[dict[str, Any]] = []
    for item in blind:
        strength = strengths[item.name]
        decides = best is not None and (strength > best or item.name in deciders)
        if strength > 0:
            unknown.append({"field": item.name, "because": item.because, "would_decide": decides})
    unknown.sort(key=lambda item: (not item["would_decide"], -strengths[str(item["field"])], str(item["field"])))
    return unknown


def _unasked(pair: Pair) -> str:
    """Return why it cannot be told whether two runs whose outputs part were asked one thing; empty where it can."""
    parts = pair.evidence.ids_equal is False or pair.evidence.text_equal is False
    if pair.inputs_equal is not None or not parts:
        return ""
    sides = (("A", pair.one), ("B", pair.other))
    lost = [side for side, row in sides if row.input_ids is None and not row.input_key]
    if taken := [(side, run) for side, run in (("A", pair.a), ("B", pair.b)) if ARGUMENTS in run.fields]:
        return f"{taken[0][1].fields[ARGUMENTS].reason} of {' and '.join(side for side, _ in taken)}"
    if lost:
        return f"the input of {' and '.join(lost)} was not kept"
    if pair.function and (kinds := calls.opaque(pair.one, pair.other)):
        return f"of the arguments of type {', '.join(kinds)} nothing but the type was kept"
    if pair.a.key_id == pair.b.key_id:
        return "the inputs were kept as keys alone, which cover more than the ids: a mask, or embeddings"
    return "the runs hold their inputs as digests under two keys"


def _beneath(candidates: Many[Cause], pair: Pair) -> str:
    """Return why it cannot be told whether more than a cast changed the tensors; empty where it can, or nothing cast.

    A digest of other bytes says nothing of what lies beneath the cast: it is a suspect, and a lesser one than the cast.
    """
    makers = [cause.score for cause in candidates if cause.name in MADE]
    tensors = [cause for cause in candidates if cause.name in TENSORS]
    for cause in tensors if makers else ():
        if pair.beneath is False:  # other weights for certain, and a cast beside them
            cause.score = max(cause.score, PROVEN * max(makers))
        else:
            cause.score = min(cause.score * BENEATH, 0.8 * min(makers))
    if pair.beneath is False or not makers or not tensors or FILES in pair.differing or pair.evidence.kind == "large":
        return ""
    how = next(how for name, how in MADE.items() if name in pair.differing)
    return f"the tensors were {how}, and whether they were equal before, their files decide, which were not recorded"


def _certain(candidates: Many[Cause], kind: str) -> None:
    """Put another configuration before what may have rounded otherwise: that it computes something else is certain."""
    if kind.startswith("tie"):
        most = max((cause.score for cause in candidates), default=0.0)
        for cause in candidates:
            if cause.name == CONFIG or (cause.name in CONFIGURED and nature(cause.declared) == "function"):
                cause.score = max(cause.score, PROVEN * most)


def _observed(pair: Pair, upstream: bool) -> Cause:
    """Make the candidate that the inputs themselves are: weaker where something that makes them differs too."""
    if pair.function:
        parted = calls.parted(pair.one, pair.other)
        sides = (parted[0].a, parted[0].b) if parted else (None, None)
        difference = Difference(ARGUMENTS, *(Field(ARGUMENTS, side) for side in sides))
        return Cause(ARGUMENTS, difference, spec(ARGUMENTS)._replace(toggle="-"), 1.0)
    at, a, b = first_difference(pair)
    name = ASKED if at is not None else "input.rendered_prompt_sha256"
    difference = Difference(name, Field(name, a), Field(name, b))
    return Cause(name, difference, spec(name), OBSERVED if upstream else 1.0)


def first_difference(pair: Pair) -> tuple[int | None, object, object]:
    """Return the first token at which two inputs part, and what stands there; None where no ids were kept."""
    one, other = pair.one.input_ids, pair.other.input_ids
    if one is None or other is None:
        return None, pair.one.input_text, pair.other.input_text
    return tokens.parts(one, other)


def shown(pair: Pair) -> str:
    """Name what the tokens show, in the words of `natures.FIT`: the earliest layer that speaks."""
    evidence = pair.evidence
    if pair.inputs_equal is False:
        # Where there are ids the text was made from them, and cannot tell what made them.
        ids = pair.one.input_ids is not None and pair.other.input_ids is not None
        return "ids, no text" if ids else "prompt"
    if evidence.ids_equal:
        return "text"
    if evidence.prefix and evidence.kind != "large":
        return "stop"
    if pair.sampled:
        base = "drawn alike" if pair.same_noise else "drawn"
        return base + {"zero": ", equal logits", "rounding": ", rounding", "large": ", large"}.get(evidence.kind, "")
    if evidence.near_tie and evidence.kind == "rounding":
        return "tie, other precision" if evidence.precisions else "tie"
    if evidence.kind == "large":
        return "large, overruled" if evidence.overruled else "large, low precision" if _low(pair) else "large"
    if evidence.kind == "rounding" and evidence.change is not None and evidence.change.at_divergence is None:
        return "unknown"  # they moved little before, and what they did where the outputs part was not seen
    return "unknown" if evidence.kind == "none" else evidence.kind


def _low(pair: Pair) -> bool:
    """Say whether the model computes in so few bits, or routes, that shapes alone move logits far."""
    return any(conditions.truth(word, run) for word in ("quantized", "moe") for run in (pair.a, pair.b))


def _acts(declared: Spec, pair: Pair) -> float:
    active = [conditions.active(declared.active_when, run) for run in (pair.a, pair.b)]
    return 1.0 if True in active else UNDECIDED


def _past(history: History | None, name: str) -> float:
    """Weigh a field by other pairs of runs: what goes with divergence more, what often differed without harm less.

    Little, since in the past too several fields differ at once: at most twice, and at least a tenth.
    """
    if not history or name not in history:
        return 1.0
    seen = history[name]
    counts = seen.counts
    if counts.differed >= HARMLESS and counts.differed_diverged == 0:
        return 0.1
    return 2.0 if seen.q <= ACCUSED else 1.0


def _strength(item: Blind, pair: Pair, kind: str) -> float:
    """Say how strong a candidate a field would be that cannot be compared; 0 where it could not matter."""
    declared = spec(item.name)
    if declared.effect == "none" or conditions.moot(declared.active_when, pair.a, pair.b):
        return 0.0
    fits = fit(kind, declared)
    unloaded = all(side is not None and side.reason.endswith(UNLOADED) for side in _sides(item, pair))
    if unloaded or (pair.bare and not item.one_sided):
        return 0.0  # it took no part in either run
    if fits < RULED_OUT or dismissal(Difference(item.name, *_sides(item, pair)), pair):
        return 0.0
    share = ONE_SIDED if item.one_sided else BOTH_SIDED
    return WEIGHT[declared.prior] * fits * share * _acts(declared, pair)


def _sides(item: Blind, pair: Pair) -> tuple[Any, Any]:
    return pair.a.fields.get(item.name), pair.b.fields.get(item.name)


def _ruled_out(kind: str, declared: Spec) -> str:
    what = nature(declared)
    if kind in INPUTS:
        return "the inputs part before it can act"
    if kind == "text":
        return "the token ids that came out are equal"
    if kind == "stop":
        return "the outputs are equal up to where one of them ends"
    makers = ("kernel", "precision", "function", "mask", "input", "dropout", "implementation", "placement", "padding")
    if "equal logits" in kind or kind == "zero":
        if what in makers:
            return "the logits were equal to the last bit up to the token where the outputs part"
    elif kind == "rounding" and what in makers:
        return "the logits moved by rounding alone, and the margin was too wide for that to turn the choice"
    elif what in ("kernel", "precision"):
        return "rounding cannot move logits this far"
    return "nothing in the tokens speaks for it"


def _fit(kind: str, difference: Difference, declared: Spec, pair: Pair) -> float:
    """Say how well a difference goes with what the tokens show."""
    if pair.noisy and nature(declared) == "random":
        return NOISE
    if difference.name in SIDES and not past_padding(difference, pair):
        # Masked, it is another shape and no more; where logits moved too far for that, it may not have been masked.
        return max(fit(kind, spec("batch.padding_tokens")), UNMASKED * kind.startswith(("large", "drawn, large")))
    return fit(kind, declared)


def _grouped(candidates: list[Cause], pair: Pair) -> list[Cause]:
    """Fold the members of a group into the one that says it most directly: one thing is never blamed twice."""
    table = {cause.name: cause for cause in candidates}
    past = {name for name in SIDES if name in table and past_padding(table[name].difference, pair)}
    folded: list[Cause] = []
    for cause in candidates:
        members = [name for name in group_of(cause.name) if name in table]
        members.sort(key=lambda name: name not in past)  # writing after padding says more than any shape
        if cause.name == members[0]:
            cause.together = members[1:]
            cause.score = max(table[name].score for name in members)
            folded.append(cause)
    return sorted(folded, key=lambda cause: (cause.vague, -cause.score, -cause.declared.prior, cause.name))


def _confidences(scores: Many[float], total: float) -> list[float]:
    """Return how sure each cause is: the first as measured for its share, the others what that leaves, by theirs.

    >>> _confidences([0.8, 0.2], 1.1)
    [0.94, 0.04]
    """
    if not scores:
        return []
    share, rest = scores[0] / total, total - scores[0]
    first = next(
        low + (high - low) * (share - left) / (right - left)
        for (left, low), (right, high) in pairwise(CALIBRATION)
        if share <= right
    )
    return [round(first, 2), *(round((1 - first) * score / rest, 2) for score in scores[1:])]


def _cause(cause: Cause, causes: list[Cause], sure: float, pair: Pair) -> dict[str, Any]:
    rivals = [other for other in causes if other is not cause and other.vague == cause.vague]
    others = [other.name for other in rivals if other.score >= AS_GOOD * cause.score]
    return _entry(cause.difference) | {
        "effect": own.UNKNOWN if cause.vague else cause.declared.effect,
        "dimension": cause.declared.dimension,
        "confidence": sure,
        "because": _because(cause, pair),
        "try": cause.declared.toggle if cause.declared.toggle not in NO_TOGGLE else None,
        "with": cause.together,
        "alternatives": others,
    }


def _entry(difference: Difference) -> dict[str, Any]:
    return {"field": difference.name, "a": document(difference.a), "b": document(difference.b)}


def _because(cause: Cause, pair: Pair) -> str:
    evidence = pair.evidence
    moved = ""
    if cause.vague:
        return own.because(cause.name, cause.difference.a.value, cause.difference.b.value, cause.seen)
    if cause.name == ARGUMENTS and pair.function:
        paths = [item.path for item in calls.parted(pair.one, pair.other)]
        return f"the arguments differ: {', '.join(paths[:4])}" if paths else "the arguments differ, by their keys"
    if cause.name == ASKED:
        at, *_ = first_difference(pair)
        return f"the token ids that reached the model differ from token {at} on"
    if cause.name == "input.rendered_prompt_sha256":
        return "the prompts differ"
    if evidence.change is not None and evidence.kind != "zero":
        change = evidence.change
        least = "at least " * change.at_least
        moved = f"; the logits moved by {least}{change.max_abs:.2g} ({change.ulps:.2g} ulp) before the outputs part"
    past = cause.name in SIDES and past_padding(cause.difference, pair)
    if cause.name in SIDES and not past and evidence.kind == "large":
        return f"padding that is not masked, or that shifts positions, is another input{moved}"
    if cause.name.startswith("batch.") and nature(cause.declared) != "mask" and not past:
        names = (cause.name, *cause.together)
        padded = " and its padding" if any("padding" in n or n == "batch.max_length" for n in names) else ""
        return f"another batch{padded} changes shapes and the order of sums{moved}"
    reason = cause.declared.help or "it differs"
    if evidence.kind == "zero":
        return f"{reason}; the logits are equal, so the choice itself was made differently"
    return f"{reason}{moved}"
