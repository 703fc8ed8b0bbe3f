"""How often the explainer finds the cause of the pairs, and whether its confidence means what it says."""

import random
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from provenance.catalogue import fields as catalogue
from provenance.explain import compare
from tests.incidents import homes, pairs
from tests.incidents.homes import Case

BINS, DEALS = 5, 3


@dataclass
class Tally:
    """The answers over many pairs."""

    pairs: int = 0
    first: int = 0
    third: int = 0
    brier: float = 0.0
    bins: list[list[float]] = field(default_factory=lambda: [[0, 0, 0.0] for _ in range(BINS)])
    dimensions: dict[str, list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0, 0]))
    misses: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))

    def add(self, case: Case, place: int, top: dict[str, Any] | None) -> None:
        """Take in one answer: at which place the true one stood (0 for nowhere), and what stood first."""
        hit, confidence = place == 1, float(top["confidence"]) if top else 0.0
        self.pairs += 1
        self.first += hit
        self.third += 1 <= place <= 3
        self.brier += (confidence - hit) ** 2
        into = self.bins[min(BINS - 1, int(confidence * BINS))]
        into[0] += 1
        into[1] += hit
        into[2] += confidence
        row = self.dimensions[case.dimension]
        row[0] += 1
        row[1] += hit
        row[2] += 1 <= place <= 3
        if not hit:
            self.misses[case.id][top["field"] if top else "nothing"] += 1


def place(answer: dict[str, Any], truth: Iterable[str]) -> int:
    """Say at which place of the causes a true field stands, itself or among those that moved together with it."""
    wanted = set(truth)
    for number, cause in enumerate(answer["causes"], 1):
        if wanted & {cause["field"], *cause["with"]}:
            return number
    return 0


def explain(cases: Iterable[Case], seeds: int, *, first: bool = False, into: Tally | None = None) -> Tally:
    """Ask for the cause of every pair."""
    tally = into or Tally()
    for case in cases:
        for seed in range(seeds):
            a, b, truth = pairs.make(case, seed, first=first)
            answer = compare.compare(a, b, (0, None), (b.sequences[_row(a, b)].row, None))
            tally.add(case, place(answer, truth), answer["causes"][0] if answer["causes"] else None)
    return tally


def _row(a: Any, b: Any) -> int:
    """Find the sequence of the second run that answers the first prompt of the first."""
    wanted = a.sequences[0].input_ids
    return next((n for n, item in enumerate(b.sequences) if item.input_ids == wanted), 0)


@dataclass
class Blind:
    """What is said where the deciding fields are unknown on one side."""

    pairs: int = 0
    inconclusive: int = 0
    named: int = 0
    both: int = 0
    verdicts: dict[str, Counter[str]] = field(default_factory=lambda: defaultdict(Counter))


def blind(cases: Iterable[Case], seeds: int) -> Blind:
    """Ask again with the deciding fields unknown on one side: the answer is to be inconclusive, and to name one."""
    found = Blind()
    for case in cases:
        for seed in range(seeds):
            a, b, truth = pairs.make(case, seed)
            place_b = b.sequences[_row(a, b)].row
            side = random.Random(f"{case.id} {seed} side").random() < 0.5
            a, b = (pairs.without(a, truth), b) if side else (a, pairs.without(b, truth))
            answer = compare.compare(a, b, (0, None), (place_b, None))
            unsure = answer["verdict"] == "inconclusive"
            names = any(item["would_decide"] and item["field"] in truth for item in answer["unknown"])
            found.pairs += 1
            found.inconclusive += unsure
            found.named += names
            found.both += unsure and names
            if not (unsure and names):
                found.verdicts[case.dimension][answer["verdict"] + ("" if names else ", not named")] += 1
    return found


@contextmanager
def shuffled(seed: int = 0) -> Iterator[None]:
    """Deal the priors of the catalogue out anew, to see what the evidence alone is worth."""
    kept: Callable[[], dict[str, Any]] = catalogue.table
    names = list(kept())
    priors = [kept()[name].prior for name in names]
    random.Random(seed).shuffle(priors)
    dealt = {name: kept()[name]._replace(prior=prior) for name, prior in zip(names, priors, strict=True)}
    _use(lambda: dealt)
    try:
        yield
    finally:
        _use(kept)


def _use(table: Callable[[], dict[str, Any]]) -> None:
    catalogue.table = table  # type: ignore[assignment]
    catalogue.spec.cache_clear()
    catalogue._patterns.cache_clear()


# -- report -------------------------------------------------------------------------------------------


def report(seeds: int, path: Path = homes.HERE / "cases.jsonl", *, verbose: bool = False) -> str:
    """Return all figures as text."""
    cases = pairs.cases(path)
    every, hard = explain(cases, seeds), explain(cases, seeds, first=True)
    dealt = Tally()
    for deal in range(DEALS):
        with shuffled(deal):
            dealt = explain(cases, seeds, into=dealt)
    unknown = blind(cases, seeds)
    strange = sorted({word for case in cases for word in case.deciding if not homes.has_home(word, case.runtime)})
    out = [f"{len(cases)} cases, {seeds} seeds each; words without a home: {', '.join(strange) or 'none'}", ""]
    for name, tally in (
        ("all deciding fields differ", every),
        ("only the first differs", hard),
        ("priors shuffled", dealt),
    ):
        out.append(
            f"{name:27s} first {share(tally.first, tally.pairs)}   in three {share(tally.third, tally.pairs)}   Brier {tally.brier / tally.pairs:.3f}"
        )
    out.append(
        f"{'deciding fields removed':27s} inconclusive and named {share(unknown.both, unknown.pairs)}   "
        f"inconclusive {share(unknown.inconclusive, unknown.pairs)}   named {share(unknown.named, unknown.pairs)}"
    )
    out += ["", "confidence of the first cause against how often it was true:"]
    out += [
        f"  {n / BINS:.1f} to {(n + 1) / BINS:.1f}   pairs {int(count):4d}   said {said / count if count else 0:.2f}   true {hits / count if count else 0:.2f}"
        for n, (count, hits, said) in enumerate(every.bins)
    ]
    out += ["", f"{'dimension':26s} pairs   first   in three | only the first differs: first, in three | removed"]
    for name, (count, first, third) in sorted(every.dimensions.items()):
        of = hard.dimensions[name]
        missed = ", ".join(f"{what} {times}" for what, times in unknown.verdicts[name].most_common(3))
        out.append(
            f"{name:26s} {count:5d}  {share(first, count)} {share(third, count)}  |  {share(of[1], of[0])} {share(of[2], of[0])}  |  {missed or 'all'}"
        )
    if verbose:
        for title, tally in (("missed:", every), ("missed where only the first differs:", hard)):
            out += ["", title]
            out += [
                f"  {name:36s} {', '.join(f'{what} {n}' for what, n in what_else.most_common(4))}"
                for name, what_else in tally.misses.items()
            ]
    return "\n".join(out)


def share(part: int, whole: int) -> str:
    """Return a share in percent."""
    return f"{100 * part / whole:5.1f} %" if whole else "  none"
