"""Ranking what is left: how often a field is the cause in practice, against what the tokens say.

A numeric cause needs a near tie or logits that moved a little; a semantic one explains logits that moved far;
where logits did not move at all only decoding settings and random state remain. A candidate that the evidence
rules out is dismissed with that sentence, never named. What was not recorded takes its share of the confidence,
so that it never adds up to certainty.
"""

from collections.abc import Sequence as Many
from dataclasses import dataclass, field
from typing import Any

from provenance.catalogue.fields import Spec, spec
from provenance.explain.fields import GROUP, Blind, Difference, document
from provenance.explain.rules import DECODING, LENGTHS, Pair, dismissal
from provenance.explain.tokens import Evidence

WEIGHT = (0.02, 0.1, 0.25, 0.5, 0.8, 1.0)  # by prior, 0 to 5
UNRECORDED = 0.08
BLIND_SHARE = 0.1
RULED_OUT = 0.05
AS_GOOD = 0.6
NO_TOGGLE = ("", "-", "none")
# How well an effect goes with what the tokens show: [kind of evidence][effect].
FIT: dict[str, dict[str, float]] = {
    "zero": {"decoding": 1.0, "model": 0.0, "numeric": 0.0, "precision": 0.0, "random": 0.0},
    "tie": {"decoding": 0.12, "model": 0.06, "numeric": 1.0, "precision": 0.2, "random": 0.0},
    "rounding": {"decoding": 1.0, "model": 0.02, "numeric": 0.02, "precision": 0.02, "random": 0.0},
    "large": {"decoding": 0.1, "model": 1.0, "numeric": 0.04, "precision": 0.8, "random": 0.0},
    "unknown": {"decoding": 0.9, "model": 1.0, "numeric": 0.6, "precision": 0.7, "random": 0.0},
    "sampled": {"decoding": 0.8, "model": 0.5, "numeric": 0.4, "precision": 0.4, "random": 1.0},
    "sampled zero": {"decoding": 0.8, "model": 0.0, "numeric": 0.0, "precision": 0.0, "random": 1.0},
    "stop": {"decoding": 0.1, "model": 0.02, "numeric": 0.02, "precision": 0.02, "random": 0.0},
}


@dataclass(slots=True)
class Cause:
    """A candidate, or a group of candidates that moved together."""

    name: str
    difference: Difference
    declared: Spec
    score: float
    together: list[str] = field(default_factory=list)


@dataclass(slots=True)
class Ranking:
    """Causes, most likely first; what was dismissed, with reasons; what could not be compared."""

    causes: list[dict[str, Any]]
    dismissed: list[dict[str, Any]]
    unknown: list[dict[str, Any]]


def rank(differing: Many[Difference], blind: Many[Blind], pair: Pair) -> Ranking:
    """Rank the differing fields of a pair whose outputs part."""
    candidates: list[Cause] = []
    dismissed: list[dict[str, Any]] = []
    for difference in differing:
        why = dismissal(difference, pair)
        declared = spec(difference.name)
        fit = _fit(declared, difference.name, pair)
        if not why and fit < RULED_OUT:
            why = _ruled_out(declared, pair.evidence)
        if why:
            dismissed.append(_entry(difference) | {"because": why})
        else:
            candidates.append(Cause(difference.name, difference, declared, WEIGHT[declared.prior] * fit))
    causes = _grouped(candidates)
    unknown = [_blind(item, pair, bool(causes)) for item in blind if _matters(item, pair)]
    missing = UNRECORDED + sum(
        BLIND_SHARE * WEIGHT[spec(item["field"]).prior] * _fit(spec(item["field"]), item["field"], pair)
        for item in unknown
    )
    total = sum(cause.score for cause in causes) + missing
    entries = [_cause(cause, causes, total, pair) for cause in causes]
    unknown.sort(key=lambda item: (not item["would_decide"], -spec(item["field"]).prior, item["field"]))
    return Ranking(entries, dismissed, unknown)


def _evidence_kind(pair: Pair) -> str:
    evidence = pair.evidence
    if evidence.prefix:
        return "stop"
    if pair.sampled:
        return "sampled zero" if evidence.kind == "zero" else "sampled"
    return "tie" if evidence.near_tie and evidence.kind == "rounding" else evidence.kind


def _class(declared: Spec) -> str:
    if declared.effect == "random":
        return "random"
    if declared.effect == "numeric":
        return "precision" if declared.name == "model.dtype" or declared.group == "weights" else "numeric"
    return "decoding" if declared.group in DECODING else "model"


def _fit(declared: Spec, name: str, pair: Pair) -> float:
    kind = _evidence_kind(pair)
    if kind == "stop" and name in LENGTHS | {
        "generation.eos_token_id",
        "generation.min_new_tokens",
        "generation.min_length",
    }:
        return 1.0
    return FIT.get(kind, FIT["unknown"])[_class(declared)]


def _ruled_out(declared: Spec, evidence: Evidence) -> str:
    if evidence.prefix:
        return "the outputs are equal up to where one of them ends"
    if declared.effect == "numeric":
        if evidence.kind == "rounding":
            return "the logits moved by rounding alone, and the margin was too wide for that to turn the choice"
        return "rounding cannot move logits this far"
    if evidence.kind in ("rounding", "zero"):
        return "another function would have moved the logits further"
    return "nothing in the tokens speaks for it"


def _grouped(candidates: list[Cause]) -> list[Cause]:
    """Fold the members of a group into the one that says it most directly: one thing is never blamed twice."""
    table = {cause.name: cause for cause in candidates}
    folded: list[Cause] = []
    for cause in candidates:
        members = [name for name in GROUP.get(cause.name, (cause.name,)) if name in table]
        if cause.name == members[0]:
            cause.together = members[1:]
            cause.score = max(table[name].score for name in members)
            folded.append(cause)
    return sorted(folded, key=lambda cause: (-cause.score, -cause.declared.prior, cause.name))


def _cause(cause: Cause, causes: list[Cause], total: float, pair: Pair) -> dict[str, Any]:
    others = [other.name for other in causes if other is not cause and other.score >= AS_GOOD * cause.score]
    return _entry(cause.difference) | {
        "effect": cause.declared.effect,
        "dimension": cause.declared.dimension,
        "confidence": round(cause.score / total, 2),
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
    if evidence.change is not None and evidence.kind != "zero":
        change = evidence.change
        moved = f"; the logits moved by {change.max_abs:.2g} ({change.ulps:.2g} ulp) before the outputs part"
    if cause.name.startswith("batch."):
        padded = (
            " and its padding"
            if any("padding" in n or n == "batch.max_length" for n in (cause.name, *cause.together))
            else ""
        )
        return f"another batch{padded} changes shapes and the order of sums{moved}"
    reason = cause.declared.help or "it differs"
    if evidence.kind == "zero":
        return f"{reason}; the logits are equal, so the choice itself was made differently"
    return f"{reason}{moved}"


def _matters(item: Blind, pair: Pair) -> bool:
    """Say whether a field that cannot be compared could have decided this divergence."""
    from provenance.explain import conditions

    declared = spec(item.name)
    if declared.effect == "none" or conditions.moot(declared.active_when, pair.a, pair.b):
        return False
    if pair.inputs_equal and declared.group in ("tokenizer", "input"):
        return False
    return _fit(declared, item.name, pair) >= RULED_OUT


def _blind(item: Blind, pair: Pair, have_causes: bool) -> dict[str, Any]:
    declared = spec(item.name)
    decides = not have_causes and declared.prior >= 3 and _fit(declared, item.name, pair) >= 0.5
    return {"field": item.name, "because": item.because, "would_decide": decides}
