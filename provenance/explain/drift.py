"""How often equal inputs give unequal outputs, and when that changed: from counts alone, with no store and no clock.

What comes in is counts of disjoint pairs, each run in one pair at most, by bucket of time (see ``store/pairs.py``).

A share has an exact interval (Clopper and Pearson), which holds at any count, also where nothing differed. A change
is looked for at every border between two buckets: Fisher's exact test of what came before against what came after,
whatever the share itself is. The smallest p counts as many times as there were tests, so that in traffic whose share is
constant a look reports a change with a probability of ``ALARM`` at most; a change found, both of its sides are looked
through at half of that. How long a change can stay unseen is stated: `delay` says how many pairs it takes.

SciPy has these distributions; it would cost 140 MB and a second at each start. ``tests/explain`` holds them to its
figures.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from typing import Any, NamedTuple

from provenance.catalogue.fields import spec
from provenance.explain.history import Counts, log_p
from provenance.facts import Field, State

LEVEL = 0.95
ALARM = 0.001  # of one look at traffic that is steady
POWER = 0.95  # with which a change is seen within the stated delay
GOAL = 0.01  # a share that would matter, where nobody names one
MOST_PAIRS = 1 << 30
SCHEMA = "provenance/drift/1"
EXIT = {"measured": 0, "under": 0, "over": 1, "unclear": 3, "nothing": 3}
SIZES = {1: "hour", 24: "day", 168: "week"}


class Bucket(NamedTuple):
    """The pairs of one stretch of time, or of all. ``surface`` and ``untold`` are of those that differed."""

    start: int = 0  # hours since 1970
    pairs: int = 0
    differed: int = 0
    surface: int = 0  # equal once evened out
    untold: int = 0  # no text to even out

    def __add__(self, other: "Bucket") -> "Bucket":  # type: ignore[override]
        return Bucket(self.start, *(a + b for a, b in zip(self[1:], other[1:], strict=True)))


class Change(NamedTuple):
    """A border between buckets at which the share changed, with what it parts."""

    place: int  # the first bucket after it
    log_p: float  # after counting every test
    before: Bucket
    after: Bucket


# -- exact intervals ----------------------------------------------------------------------------------


def tail(hits: int, among: int, share: float) -> float:
    """Return the chance of ``hits`` or more among so many, if each is a hit with probability ``share``.

    >>> round(tail(1, 10, 0.1), 6), tail(0, 5, 0.5), tail(6, 5, 0.5)
    (0.651322, 1.0, 0.0)
    """
    if hits <= 0:
        return 1.0
    if hits > among or share <= 0:
        return 0.0
    if share >= 1:
        return 1.0
    a, b = float(hits), float(among - hits + 1)
    front = math.lgamma(a + b) - math.lgamma(a) - math.lgamma(b) + a * math.log(share) + b * math.log1p(-share)
    if share < (a + 1) / (a + b + 2):
        return min(1.0, math.exp(front) * _fraction(a, b, share) / a)
    return max(0.0, 1 - math.exp(front) * _fraction(b, a, 1 - share) / b)


def _fraction(a: float, b: float, x: float) -> float:
    """Return the continued fraction of the incomplete beta function, by Lentz's method."""
    tiny, c = 1e-300, 1.0
    d = 1 / _off_zero(1 - (a + b) * x / (a + 1), tiny)
    found, m, step = d, 1, 0.0
    while abs(step - 1) > 1e-15:
        top = m * (b - m) * x / ((a + 2 * m - 1) * (a + 2 * m))
        d, c = 1 / _off_zero(1 + top * d, tiny), _off_zero(1 + top / c, tiny)
        found *= d * c
        top = -(a + m) * (a + b + m) * x / ((a + 2 * m) * (a + 2 * m + 1))
        d, c = 1 / _off_zero(1 + top * d, tiny), _off_zero(1 + top / c, tiny)
        step = d * c
        found *= step
        m += 1
    return found


def _off_zero(value: float, tiny: float) -> float:
    return value if abs(value) > tiny else tiny


def exact(hits: int, among: int, level: float = LEVEL) -> tuple[float, float]:
    """Return the exact two-sided interval of a share (Clopper and Pearson). All is possible where nothing was seen.

    >>> [round(x, 5) for x in exact(0, 100)], [round(x, 5) for x in exact(3, 1000)], exact(0, 0)
    ([0.0, 0.03622], [0.00062, 0.00874], (0.0, 1.0))
    """
    if not among:
        return 0.0, 1.0
    side, share = (1 - level) / 2, hits / among
    low = _root(lambda p: tail(hits, among, p) < side, 0.0, share) if hits else 0.0
    high = _root(lambda p: 1 - tail(hits + 1, among, p) > side, share, 1.0) if hits < among else 1.0
    return low, high


def _root(below: Callable[[float], bool], low: float, high: float) -> float:
    """Halve an interval until its two ends are one float; ``below`` says that a value lies left of the root."""
    while low < (middle := (low + high) / 2) < high and high - low > 1e-12 * high:
        low, high = (middle, high) if below(middle) else (low, middle)
    return (low + high) / 2


# -- changes ------------------------------------------------------------------------------------------


def changes(buckets: Sequence[Bucket], alarm: float = ALARM) -> list[Change]:
    """Return the borders at which the share changed, in order of time.

    In traffic whose share is constant the list is empty with a probability of ``1 - alarm`` at least.
    """
    found: list[Change] = []
    open_ = [(0, len(buckets), alarm)]
    while open_:
        first, end, rate = open_.pop()
        best = _best(buckets, first, end)
        if best is not None and best.log_p <= math.log(rate):
            found.append(best)
            open_ += [(first, best.place, rate / 2), (best.place, end, rate / 2)]
    found.sort()
    borders = [0, *(item.place for item in found), len(buckets)]
    sides = [total(buckets[first:end]) for first, end in pairwise(borders)]
    return [item._replace(before=sides[n], after=sides[n + 1]) for n, item in enumerate(found)]


def _best(buckets: Sequence[Bucket], first: int, end: int) -> Change | None:
    """Return the border that parts two shares best, with a p that counts every test made."""
    whole = total(buckets[first:end])
    best: Change | None = None
    tests, before = 0, Bucket()
    for place in range(first + 1, end):
        before += buckets[place - 1]
        if not buckets[place].pairs or not before.pairs:  # the same two sides as at another border
            continue
        tests += 2
        after = Bucket(0, *(a - b for a, b in zip(whole[1:], before[1:], strict=True)))
        p = parted(before, after)
        if best is None or p < best.log_p:
            best = Change(place, p, before, after)
    return best._replace(log_p=min(0.0, best.log_p + math.log(tests))) if best is not None else None


def parted(one: Bucket, other: Bucket) -> float:
    """Return the logarithm of Fisher's p for the likelier of the two directions in which two shares can differ."""
    a, b = (one.differed, one.pairs - one.differed), (other.differed, other.pairs - other.differed)
    return log_p(Counts(*a, *b)) if a[0] * other.pairs > b[0] * one.pairs else log_p(Counts(*b, *a))


def total(buckets: Iterable[Bucket]) -> Bucket:
    """Add buckets up."""
    found = Bucket()
    for item in buckets:
        found += item
    return found


def delay(before: Bucket, to: float, borders: int, alarm: float = ALARM) -> int | None:
    """Return how many pairs at the share ``to`` a change takes to be seen, with a probability of 95 % at least.

    None where no number of pairs would do. To these comes the rest of the bucket in which the last of them falls.

    >>> delay(Bucket(0, 10_000, 0), 0.01, 20), delay(Bucket(0, 0, 0), 0.01, 20)
    (913, None)
    """
    limit = math.log(alarm) - math.log(2 * max(1, borders))

    def seen(pairs: int) -> bool:
        enough = _least(lambda hits: _told(before, hits, pairs, limit), pairs)
        return enough is not None and tail(enough, pairs, to) >= POWER

    high = 1
    while not seen(high):
        high *= 2
        if high > 4096 * max(64, before.pairs):
            return None
    return _least(seen, high)


def _told(before: Bucket, hits: int, pairs: int, limit: float) -> bool:
    higher = hits * before.pairs > before.differed * pairs
    return higher and parted(before, Bucket(0, pairs, hits)) <= limit


def _least(holds: Callable[[int], bool], most: int) -> int | None:
    """Return the least number for which something holds that goes on holding; None where it does not at the most."""
    if not holds(most):
        return None
    low, high = 0, most
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (low, middle) if holds(middle) else (middle, high)
    return high


def missing(hits: int, among: int, limit: float) -> int | None:
    """Return how many more pairs would tell on which side of a limit a share is, if it stays what it seems to be.

    None where it seems to be the limit itself: no number of pairs would tell.

    >>> missing(0, 100, 0.01), missing(0, 400, 0.01), missing(1, 100, 0.01)
    (268, 0, None)
    """
    side = (1 - LEVEL) / 2

    def told(pairs: int) -> bool:  # one end of the exact interval lies beyond the limit
        seen = round(pairs * hits / among) if among else 0
        return tail(seen, pairs, limit) < side or 1 - tail(seen + 1, pairs, limit) <= side

    most = max(1, among)
    while not told(most):
        most *= 2
        if most > MOST_PAIRS:
            return None
    found = _least(told, most)
    return max(0, (found or 0) - among)


# -- the answer ---------------------------------------------------------------------------------------


class Series(NamedTuple):
    """The buckets of one label, every stretch of time in its place, and how they part by environment."""

    label: str
    buckets: Sequence[Bucket]
    within: Bucket = Bucket()
    across: Bucket = Bucket()


def answer(whole: Series, parts: Sequence[Series] = (), limit: float | None = None, hours: int = 24) -> dict[str, Any]:
    """Return the whole answer. ``parts`` are the labels that were asked for, ``hours`` the length of a bucket."""
    every = total(whole.buckets)
    verdict, because, more = judged(every, limit)
    found = changes(whole.buckets)
    steady = found[-1].after if found else every
    borders = max(1, sum(1 for item in whole.buckets if item.pairs))
    to = goal(steady, limit)
    return {
        "schema": SCHEMA,
        "verdict": verdict,
        "because": because,
        "limit": limit,
        "missing": more,
        "bucket": SIZES[hours],
        "raw": share(every.differed, every.pairs),
        "normalised": normalised(every),
        "same_environment": share(whole.within.differed, whole.within.pairs),
        "other_environment": share(whole.across.differed, whole.across.pairs),
        "changes": [_change(item, whole.buckets) for item in found],
        "alarm": {"rate": ALARM, "per": "look", "to": to, "delay_pairs": delay(steady, to, borders)},
        "trend": _trend(whole.buckets),
        "by": [_part(item, len(parts)) for item in parts],
    }


def judged(every: Bucket, limit: float | None) -> tuple[str, str, int | None]:
    """Return the verdict, the reason, and how many pairs are missing to a verdict."""
    low, high = exact(every.differed, every.pairs)
    if not every.pairs:
        return "nothing", "no input was asked twice under equal settings, weights and random state", None
    told = f"{every.differed} of {every.pairs} pairs of equal input differ ({_percent(low)} to {_percent(high)})"
    if limit is None:
        return "measured", told, None
    if low > limit:
        return "over", f"{told}: more than {_percent(limit)}", 0
    if high <= limit:
        return "under", f"{told}: no more than {_percent(limit)}", 0
    more = missing(every.differed, every.pairs, limit)
    return "unclear", f"{told}: that tells nothing of {_percent(limit)}", more


def goal(steady: Bucket, limit: float | None) -> float:
    """Return the share of which it is said when a change to it would be seen: one that is clearly more than now."""
    high = exact(steady.differed, steady.pairs)[1] if steady.pairs else 0.0
    asked = GOAL if limit is None else limit
    return asked if asked >= 2 * high else min(1.0, 2 * high)


def share(hits: int, among: int) -> dict[str, Any]:
    """Return a share with its interval, as the answer says it."""
    low, high = exact(hits, among)
    return {"pairs": among, "differed": hits, "share": hits / among if among else None, "low": low, "high": high}


def normalised(item: Bucket) -> dict[str, Any]:
    """Return the share after normalisation. What has no text may differ or not: both are in the interval."""
    least, most = item.differed - item.surface - item.untold, item.differed - item.surface
    low, high = exact(least, item.pairs)[0], exact(most, item.pairs)[1]
    known = most / item.pairs if item.pairs and not item.untold else None
    return {
        "profile": "surface", "pairs": item.pairs, "differed": most if not item.untold else None,
        "differed_least": least, "differed_most": most, "untold": item.untold, "share": known, "low": low, "high": high,
    }  # fmt: skip


def _percent(value: float) -> str:
    return f"{100 * value:.3g} %"


def _trend(buckets: Sequence[Bucket]) -> list[dict[str, Any]]:
    return [
        {"hour": item.start, **share(item.differed, item.pairs), "surface": item.surface, "untold": item.untold}
        for item in buckets
    ]


def _change(item: Change, buckets: Sequence[Bucket]) -> dict[str, Any]:
    return {
        "hour": buckets[item.place].start,
        "before": share(item.before.differed, item.before.pairs),
        "after": share(item.after.differed, item.after.pairs),
        "rose": item.after.differed * item.before.pairs > item.before.differed * item.after.pairs,
        "log10_p": item.log_p / math.log(10),
        "came": [],
    }


def _part(item: Series, among: int) -> dict[str, Any]:
    """Return the answer for one label. The alarms of all labels together are as rare as those of the whole."""
    every = total(item.buckets)
    return {
        "label": item.label,
        "raw": share(every.differed, every.pairs),
        "normalised": normalised(every),
        "changes": [_change(found, item.buckets) for found in changes(item.buckets, ALARM / among)],
        "trend": _trend(item.buckets),
    }


def came(before: Mapping[str, Field], after: Mapping[str, Field]) -> list[dict[str, Any]]:
    """Return the fields that can decide an output and are others in an environment that came with a change."""
    found = []
    for name in sorted(before.keys() & after.keys()):
        a, b = before[name], after[name]
        if spec(name).effect != "none" and State.VALUE in (a.state, b.state) and a.known and b.known and a != b:
            found.append({"field": name, "before": a.show(), "after": b.show(), "prior": spec(name).prior})
    return sorted(found, key=lambda item: (-item["prior"], item["field"]))
