"""Which fields go with divergence, over all runs of equal inputs: accused, confounded, and the noise floor.

Pairs of runs with equal input say, field by field, whether it differs and whether the outputs do. Fields that
always differ together are one *class*: nothing can tell them apart. A class is accused if Fisher's exact test
passes at the stated false-discovery rate; it stays accused only if it still passes where the classes accused
before it are equal. One that no longer does is named as confounded with them, in a sentence with its counts.

This is a statement about what goes together. `bisect` is the proof: it runs the call again with one field changed.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from provenance.catalogue.fields import spec
from provenance.explain.history import Counts, Mask, Observation, Table, adjusted, log_p, newcombe, wilson

SCHEMA = "provenance/blame/1"
RATE = 0.0001  # an accusation is grave, and a tenth of the usual rate costs a handful of pairs
DOUBT = 0.01  # the chance that a field which only follows the input is accused all the same
LARGE = 100.0  # the variance from which a sum of many inputs is taken as normal
ACCUSED, NOBODY, TOO_LITTLE = "accused", "nobody", "too_little"
EXIT = {NOBODY: 0, ACCUSED: 1, TOO_LITTLE: 3}


@dataclass(slots=True)
class Suspect:
    """Fields that differ in the same pairs, and what the pairs say of them."""

    names: tuple[str, ...]  # the likeliest cause first
    mask: Mask
    counts: Counts
    log: float
    rate: float = 1.0
    inputs_held: bool = False  # the inputs were run often enough to ask within each of them
    confounded: list[dict[str, Any]] = field(default_factory=list)

    @property
    def order(self) -> tuple[float, float, str]:
        """Return the strongest first: by p, then by size, then by name."""
        return (self.log, -self.counts.difference, self.names[0])


@dataclass(frozen=True, slots=True)
class Court:
    """All pairs, and the rate at which somebody may be accused by chance."""

    table: Table
    diverged: int
    rate: float

    def ask(self, suspect: Suspect, held: Iterable[Suspect]) -> Counts:
        """Count a suspect's pairs among those in which others are known and equal."""
        within = self.table.every
        for other in held:
            within &= other.mask.equal
        return self.table.count(suspect.mask, within, self.diverged)

    def passes(self, counts: Counts) -> bool:
        """Say whether one question, asked by itself, passes."""
        return log_p(counts) <= math.log(self.rate)


def blame(groups: Iterable[Iterable[Observation]], rate: float = RATE) -> dict[str, Any]:
    """Say which fields go with divergence. A group is the runs of one input. ``docs/blame.md`` has the form.

    ``rate`` is the false-discovery rate: where no field has a part in anything, it is the chance of one accusation.
    """
    table = Table()
    for group in groups:
        table.add(group)
    court = Court(table, table.diverged, rate)
    suspects = _suspects(court)
    passing = [item for item in suspects if item.rate <= rate]
    inputs = [item for item in passing if _follows_input(court, item, DOUBT / len(passing))]
    accused, rest = _chosen(court, [item for item in passing if item not in inputs])
    _confound(court, accused, rest)
    verdict, because = _verdict(court, suspects, accused)
    if inputs and not accused:
        because = f"{_many(len(inputs))} differ only where inputs diverge easily, and nothing else goes with divergence"
    parted = court.diverged.bit_count()
    return {
        "schema": SCHEMA, "verdict": verdict, "because": because, "rate": rate,
        "runs": table.runs, "inputs": table.inputs, "pairs": _share(parted, table.pairs),
        "tested": {"fields": sum(len(item.names) for item in suspects), "classes": len(suspects)},
        "accused": [_document(court, item, [other for other in accused if other is not item]) for item in accused],
        "inputs_only": [_input_only(item) for item in inputs],
        "noise": _noise(court, suspects),
        "left": _left(court, accused),
        "never_equal": sorted(
            name for item in suspects if not item.counts.equal for name in item.names
        ),
    }  # fmt: skip


def _suspects(court: Court) -> list[Suspect]:
    """Gather the classes, the strongest first, each with the false-discovery rate at which it would pass."""
    classes: dict[Mask, list[str]] = {}
    for name, mask in court.table.fields().items():
        if mask.differ:
            classes.setdefault(mask, []).append(name)
    found = []
    for mask, names in classes.items():
        counts = court.table.count(mask, court.table.every, court.diverged)
        lead = tuple(sorted(names, key=lambda name: (-spec(name).prior, name.startswith("env."), name)))
        found.append(Suspect(lead, mask, counts, log_p(counts)))
    found.sort(key=lambda item: item.order)
    for item, rate in zip(found, adjusted([item.log for item in found]), strict=True):
        item.rate = rate
    return found


def _chosen(court: Court, guilty: list[Suspect]) -> tuple[list[Suspect], list[Suspect]]:
    """Choose forward: the strongest, then the strongest of those that still pass where the chosen are equal.

    Then look back: one that matters no longer where the others are equal is not accused after all.
    """
    rest = list(guilty)
    chosen: list[Suspect] = []
    while rest:
        logs = {id(item): log_p(court.ask(item, chosen)) for item in rest}
        rates = adjusted([logs[id(item)] for item in rest])
        rest = [item for item, rate in zip(rest, rates, strict=True) if rate <= court.rate]
        if rest:
            best = min(rest, key=lambda item: (logs[id(item)], item.order))
            chosen.append(best)
            rest.remove(best)
    for item in reversed(chosen[:-1]):  # the last one was asked with all others equal
        others = [other for other in chosen if other is not item]
        if not _stands(court, item, others):
            chosen.remove(item)
    return chosen, [item for item in guilty if item not in chosen]


def _stands(court: Court, item: Suspect, others: list[Suspect]) -> bool:
    """Say whether a suspect matters by itself, where the others are equal; or, if that was never seen, beside them."""
    alone = court.ask(item, others)
    if court.passes(alone.best):
        return court.passes(alone)
    within = 0
    for other in others:
        within |= other.mask.differ
    return court.passes(court.table.count(item.mask, within, court.diverged))


# -- the input as a confounder ------------------------------------------------------------------------

Stratum = tuple[int, int, int, int]  # pairs, diverged, differed, both


def _strata(court: Court, mask: Mask) -> list[Stratum]:
    """Count a field's pairs input by input. Inputs whose pairs are all alike in something say nothing."""
    size = court.table.pairs // 8 + 1
    known, differ, parted = (bits.to_bytes(size, "little") for bits in (mask.known, mask.differ, court.diverged))
    found: dict[int, list[int]] = {}
    for n, number in enumerate(court.table.input_of):
        place, bit = n >> 3, n & 7
        if known[place] >> bit & 1:
            row = found.setdefault(number, [0, 0, 0, 0])
            d, v = differ[place] >> bit & 1, parted[place] >> bit & 1
            row[0] += 1
            row[1] += v
            row[2] += d
            row[3] += d & v
    return [(n, k, d, both) for n, k, d, both in found.values() if 0 < k < n and 0 < d < n]


def _follows_input(court: Court, item: Suspect, level: float) -> bool:
    """Say whether a field goes with divergence only because it differs more often on inputs that diverge easily.

    That is so if inputs were run often enough to tell, and within one input it makes no difference.
    """
    strata = _strata(court, item.mask)
    best = [(n, k, d, min(k, d)) for n, k, d, _ in strata]
    item.inputs_held = within_inputs(best) <= level
    return item.inputs_held and within_inputs(strata) > level


def within_inputs(strata: Iterable[Stratum]) -> float:
    """Return the chance of so many divergences where a field differs, each input taken by itself.

    The sum of one hypergeometric number an input, exactly, while the spread is small; where it is large, so that
    the sum is as good as normal, by its mean and variance.
    """
    seen, mean, variance = 0, 0.0, 0.0
    kept = list(strata)
    for n, k, d, both in kept:
        seen += both
        mean += k * d / n
        variance += k * d * (n - k) * (n - d) / (n * n * (n - 1))
    if variance > LARGE:
        return 0.5 * math.erfc((seen - 0.5 - mean) / math.sqrt(2 * variance))
    chances = [1.0]
    offset = 0
    for n, k, d, _ in kept:
        least, most = max(0, k + d - n), min(k, d)
        one = [math.comb(k, x) * math.comb(n - k, d - x) / math.comb(n, d) for x in range(least, most + 1)]
        offset += least
        summed = [0.0] * (len(chances) + len(one) - 1)
        for i, a in enumerate(chances):
            for j, b in enumerate(one):
                summed[i + j] += a * b
        chances = summed
    return min(1.0, sum(chances[max(0, seen - offset) :]))


def _input_only(item: Suspect) -> dict[str, Any]:
    return {
        "field": item.names[0], "with": list(item.names[1:]),
        "because": "differs more often on inputs that diverge easily; within one input it makes no difference",
        "differed": _share(item.counts.differed_diverged, item.counts.differed),
        "equal": _share(item.counts.equal_diverged, item.counts.equal),
    }  # fmt: skip


# -- confounders --------------------------------------------------------------------------------------


def _confound(court: Court, accused: list[Suspect], rest: list[Suspect]) -> None:
    """Put each suspect that is not accused beside the accused one that it moves with."""
    for item in rest:
        lead = max(accused, key=lambda other: (_overlap(item, other), -accused.index(other)))
        lead.confounded.append(_beside(court, item, lead, accused))


def _overlap(item: Suspect, other: Suspect) -> float:
    return (item.mask.differ & other.mask.differ).bit_count() / (item.mask.differ | other.mask.differ).bit_count()


def _beside(court: Court, item: Suspect, lead: Suspect, accused: list[Suspect]) -> dict[str, Any]:
    """Say how far a suspect can be told apart from the accused one that it moves with."""
    alone, reverse = court.ask(item, accused), court.ask(lead, [item])
    name, other = item.names[0], lead.names[0]
    together = (item.mask.differ & lead.mask.differ).bit_count()
    if not alone.differed:
        apart, text = False, f"never seen to differ without {other}: the two cannot be told apart by these runs"
        if court.passes(reverse):
            text = f"never seen to differ without {other}, which matters without it too"
    elif not court.passes(alone.best):
        apart, text = False, f"differs without {other} in only {_pairs(alone.differed)}: too few to tell the two apart"
    else:
        apart = court.passes(reverse)
        text = (
            f"moves with {other} in {_pairs(together)}; where {other} is equal it makes no difference: outputs diverge "
            f"in {alone.differed_diverged} of {alone.differed} where it differs, in {alone.equal_diverged} of "
            f"{alone.equal} where it is equal"
        )
        if not apart:
            text += f"; nor does {other} where {name} is equal: the two cannot be told apart by these runs"
    return {
        "field": name, "with": list(item.names[1:]), "told_apart": apart, "because": text,
        "differed": _share(item.counts.differed_diverged, item.counts.differed),
        "equal": _share(item.counts.equal_diverged, item.counts.equal),
        "alone": {"differed": _share(alone.differed_diverged, alone.differed),
                  "equal": _share(alone.equal_diverged, alone.equal)},
        "reverse": {"differed": _share(reverse.differed_diverged, reverse.differed),
                    "equal": _share(reverse.equal_diverged, reverse.equal)},
    }  # fmt: skip


# -- the answer ---------------------------------------------------------------------------------------


def _document(court: Court, item: Suspect, others: list[Suspect]) -> dict[str, Any]:
    counts = item.counts
    low, high = newcombe(counts)
    alone = court.ask(item, others)
    return {
        "field": item.names[0], "with": list(item.names[1:]), "effect": spec(item.names[0]).effect,
        "differed": _share(counts.differed_diverged, counts.differed),
        "equal": _share(counts.equal_diverged, counts.equal),
        "difference": {"value": counts.difference, "low": low, "high": high},
        "p": math.exp(item.log), "log10_p": item.log / math.log(10), "q": item.rate,
        "inputs_held": item.inputs_held,
        "others_equal": {"differed": _share(alone.differed_diverged, alone.differed),
                         "equal": _share(alone.equal_diverged, alone.equal)} if others else None,
        "changes": [
            {"a": a, "b": b, "pairs": pairs, "diverged": parted}
            for a, b, pairs, parted in court.table.changes(item.names[0], court.diverged)
        ],
        "confounded": item.confounded,
    }  # fmt: skip


def _share(hits: int, among: int) -> dict[str, Any]:
    low, high = wilson(hits, among)
    return {"pairs": among, "diverged": hits, "share": hits / among if among else None, "low": low, "high": high}


def _noise(court: Court, suspects: list[Suspect]) -> dict[str, Any]:
    """Say how often a configuration disagrees with itself: the pairs in which nothing that can act differs."""
    differing = 0
    for item in suspects:
        differing |= item.mask.differ
    equal = court.table.every & ~differing
    found = _share((equal & court.diverged).bit_count(), equal.bit_count())
    if not found["pairs"]:
        text = "could not tell: no two runs of one input are equal in every field that can act"
    else:
        text = (
            f"a configuration disagrees with itself in {found['diverged']} of {_pairs(found['pairs'])} "
            f"({_percent(found['low'], found['high'])})"
        )
    return {**found, "because": text}


def _left(court: Court, accused: list[Suspect]) -> dict[str, Any] | None:
    """Return what stays where everything accused is equal."""
    if not accused:
        return None
    within = court.table.every
    for item in accused:
        within &= item.mask.equal
    return _share((within & court.diverged).bit_count(), within.bit_count())


def _verdict(court: Court, suspects: list[Suspect], accused: list[Suspect]) -> tuple[str, str]:
    pairs, parted = court.table.pairs, court.diverged.bit_count()
    if accused:
        many = "1 field goes" if len(accused) == 1 else f"{len(accused)} fields go"
        return ACCUSED, f"{many} with divergence, at a false-discovery rate of {court.rate:g}"
    if not pairs:
        return TOO_LITTLE, (
            "no input was run twice, so nothing can be compared" if court.table.runs else "no run fits the question"
        )
    if not parted:
        low, high = wilson(0, pairs)
        return NOBODY, f"no output diverged in {_pairs(pairs)} of equal input ({_percent(low, high)})"
    if not suspects:
        return NOBODY, (
            f"outputs diverged in {parted} of {_pairs(pairs)}, and no recorded field that can act ever differs: "
            "something that decides is not recorded"
        )
    best = min(log_p(item.counts.best) for item in suspects)
    if best > math.log(court.rate / len(suspects)):
        return TOO_LITTLE, (
            f"{_pairs(pairs)}, of which {parted} diverged, are too few to accuse anybody among "
            f"{_many(len(suspects))} at a false-discovery rate of {court.rate:g}, however clearly they spoke"
        )
    return NOBODY, f"none of {_many(len(suspects))} goes with the {parted} divergences in {_pairs(pairs)}"


def _pairs(number: int) -> str:
    return "1 pair" if number == 1 else f"{number} pairs"


def _many(classes: int) -> str:
    return "1 field" if classes == 1 else f"{classes} fields that can be told apart"


def _percent(low: float, high: float) -> str:
    return f"95 %: {100 * low:.3g} to {100 * high:.3g} %"
