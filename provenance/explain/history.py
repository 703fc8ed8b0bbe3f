"""What a history of runs says of each field: pairs of runs with equal input, counted and tested exactly.

All pairs of one group of runs hang together (a run that strays strays in all of its pairs), so each run stands
in one pair at most. Which runs meet is drawn, with a seed that the group itself gives: the n-th with the
(n + half)-th would meet like with like wherever configurations take turns (``docs/blame.md`` has the figures).

A pair says, of each field that both runs know, whether it differs, and whether the outputs do. Pairs are bits:
a field is two whole numbers, in which bit n stands for pair n, so that any question of the kind "where this one
is equal" is an ``&``.

The tests are Fisher's, one-sided, summed here in a few lines: SciPy has the same, and would cost 140 MB and a
second at each start for this one sum. ``tests/explain`` holds them to exact fractions and to SciPy's figures.
"""

import math
import random
import zlib
from array import array
from collections.abc import Hashable, Iterable, Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import NamedTuple

from provenance.catalogue.fields import spec

Z = 1.959963984540054  # 95 %, two-sided
CHANGES = 64  # a field with more kinds of change than this is a number of its own at each call: none is shown
Document = Mapping[str, object]
NOTHING: Document = MappingProxyType({})


class Observation(NamedTuple):
    """One run of one input: when, with which output, and its fields.

    ``at`` orders the runs of a group and is unique. ``shared`` are documents that many runs share, the very same
    object at the same place: two of them are compared once. ``own`` are fields of this run alone. A field that is
    not known is left out: it then says nothing of the pair.
    """

    output: Hashable
    at: tuple[int, ...]
    shared: tuple[Document, ...] = ()
    own: Document = NOTHING


# -- exact statistics ---------------------------------------------------------------------------------


class Counts(NamedTuple):
    """Pairs that know a field, by whether it differs and whether the outputs do."""

    differed_diverged: int
    differed_same: int
    equal_diverged: int
    equal_same: int

    @property
    def differed(self) -> int:
        """Return in how many pairs the field differs."""
        return self.differed_diverged + self.differed_same

    @property
    def equal(self) -> int:
        """Return in how many pairs the field is equal."""
        return self.equal_diverged + self.equal_same

    @property
    def diverged(self) -> int:
        """Return in how many pairs the outputs differ."""
        return self.differed_diverged + self.equal_diverged

    @property
    def best(self) -> "Counts":
        """Return what the same numbers could show at most: the field differs where the outputs do."""
        both = min(self.differed, self.diverged)
        rest = self.diverged - both
        return Counts(both, self.differed - both, rest, self.equal - rest)

    @property
    def difference(self) -> float:
        """Return how much more often outputs diverge where the field differs. 0 where one side has no pair."""
        if not self.differed or not self.equal:
            return 0.0
        return self.differed_diverged / self.differed - self.equal_diverged / self.equal


def log_p(counts: Counts) -> float:
    """Return the logarithm of the chance of so many divergences where the field differs, if it had no part in them.

    >>> round(math.exp(log_p(Counts(3, 1, 1, 3))), 12), log_p(Counts(0, 0, 2, 7))
    (0.242857142857, 0.0)
    """
    total, diverged, differed = sum(counts), counts.diverged, counts.differed
    least, most = max(0, diverged + differed - total), min(diverged, differed)
    seen = counts.differed_diverged
    if seen <= least:
        return 0.0
    if seen * total > diverged * differed:  # above the mean: terms fall from here on
        return min(0.0, _tail(seen, most, 1, (total, diverged, differed)))
    return math.log1p(-min(math.exp(_tail(seen - 1, least, -1, (total, diverged, differed))), 1 - 1e-16))


def _tail(start: int, end: int, step: int, margins: tuple[int, int, int]) -> float:
    """Sum the hypergeometric distribution from one place outwards, as a logarithm."""
    total, diverged, differed = margins
    term, found, k = 1.0, 1.0, start
    while k != end and term > found * 1e-18:
        if step > 0:
            term *= (diverged - k) * (differed - k) / ((k + 1) * (total - diverged - differed + k + 1))
        else:
            term *= k * (total - diverged - differed + k) / ((diverged - k + 1) * (differed - k + 1))
        found += term
        k += step
    first = _choose(diverged, start) + _choose(total - diverged, differed - start) - _choose(total, differed)
    return first + math.log(found)


def _choose(n: int, k: int) -> float:
    return math.lgamma(n + 1) - math.lgamma(k + 1) - math.lgamma(n - k + 1)


def adjusted(logs: Sequence[float]) -> list[float]:
    """Return each p-value, given as its logarithm, as the false-discovery rate at which it would pass.

    Benjamini and Hochberg's step up.

    >>> [round(x, 4) for x in adjusted([math.log(0.01), math.log(0.04), math.log(0.03)])]
    [0.03, 0.04, 0.04]
    """
    order = sorted(range(len(logs)), key=lambda n: logs[n], reverse=True)
    found, least = [0.0] * len(logs), 0.0
    for rank, n in zip(range(len(logs), 0, -1), order, strict=True):
        least = min(least, logs[n] + math.log(len(logs) / rank))
        found[n] = math.exp(least)
    return found


def wilson(hits: int, among: int) -> tuple[float, float]:
    """Return the 95 % interval of a share (Wilson). All is possible where nothing was seen.

    >>> [round(x, 4) for x in wilson(0, 20)], wilson(0, 0)
    ([0.0, 0.1611], (0.0, 1.0))
    """
    if not among:
        return 0.0, 1.0
    share, square = hits / among, Z * Z / among
    middle = (share + square / 2) / (1 + square)
    half = Z * math.sqrt(share * (1 - share) / among + square / among / 4) / (1 + square)
    return (0.0 if hits == 0 else middle - half), (1.0 if hits == among else middle + half)


def newcombe(counts: Counts) -> tuple[float, float]:
    """Return the 95 % interval of the difference of the two rates (Newcombe's hybrid of two Wilson intervals)."""
    (low, high), (less, more) = wilson(counts.differed_diverged, counts.differed), wilson(
        counts.equal_diverged, counts.equal
    )  # fmt: skip
    if not counts.differed or not counts.equal:
        return -1.0, 1.0
    one, other = counts.differed_diverged / counts.differed, counts.equal_diverged / counts.equal
    return (
        one - other - math.hypot(one - low, more - other),
        one - other + math.hypot(high - one, other - less),
    )


# -- pairs --------------------------------------------------------------------------------------------


class Mask(NamedTuple):
    """One field over all pairs: where it differs, and where both runs know it."""

    differ: int
    known: int

    @property
    def equal(self) -> int:
        """Return where both runs know it and it is the same."""
        return self.known & ~self.differ


def matched(group: Iterable[Observation]) -> Iterator[tuple[Observation, Observation]]:
    """Draw disjoint pairs from the runs of one input, the earlier run first. An odd one is left over."""
    runs = sorted(group, key=lambda run: run.at)
    order = list(range(len(runs)))
    if len(runs) > 2:
        random.Random(zlib.crc32(repr(runs[0].at).encode())).shuffle(order)  # noqa: S311  a draw, not a secret
    for one, other in zip(order[::2], order[1::2], strict=False):
        yield runs[min(one, other)], runs[max(one, other)]


class Table:
    """Pairs of runs of equal input, gathered group by group. It keeps the pairs' bits and no run."""

    def __init__(self) -> None:
        self.runs = self.inputs = self.pairs = 0
        self.input_of = array("I")  # the number of each pair's input
        self._diverged = array("I")
        self._documents: dict[int, Document] = {}  # kept, so that an id stays one document's
        self._met: dict[tuple[int, int, int], array[int]] = {}  # place, one, other: the pairs
        self._names: dict[tuple[str, ...], frozenset[str]] = {}
        self._shapes: dict[tuple[frozenset[str], frozenset[str]], array[int]] = {}
        self._masks: dict[tuple[int, int, int], int] = {}
        self._own: dict[str, dict[tuple[str, str] | None, array[int]]] = {}

    def add(self, group: Iterable[Observation]) -> None:
        """Add the runs of one input."""
        runs = list(group)
        self.runs += len(runs)
        before = self.pairs
        for one, other in matched(runs):
            self._pair(one, other)
        self.inputs += self.pairs > before

    def _pair(self, one: Observation, other: Observation) -> None:
        number = self.pairs
        self.pairs += 1
        self.input_of.append(self.inputs)
        if one.output != other.output:
            self._diverged.append(number)
        for place, (a, b) in enumerate(zip(one.shared, other.shared, strict=True)):
            key = place, id(a), id(b)
            if key not in self._met:
                self._documents[id(a)], self._documents[id(b)] = a, b
                self._met[key] = array("I")
            self._met[key].append(number)
        shape = self._shape(one.own), self._shape(other.own)
        self._shapes.setdefault(shape, array("I")).append(number)
        for name, value in one.own.items():
            if name in other.own and other.own[name] != value:
                self._differs(name, _change(value, other.own[name]), number)

    def _shape(self, own: Document) -> frozenset[str]:
        names = tuple(own)
        return self._names.setdefault(names, frozenset(names))

    def _differs(self, name: str, change: tuple[str, str], number: int) -> None:
        changes = self._own.setdefault(name, {})
        key = None if None in changes else change
        if key not in changes and len(changes) == CHANGES:
            changes[None] = array("I", [n for numbers in changes.values() for n in numbers])
            for kind in [kind for kind in changes if kind is not None]:
                del changes[kind]
            key = None
        changes.setdefault(key, array("I")).append(number)

    @property
    def every(self) -> int:
        """Return all pairs."""
        return (1 << self.pairs) - 1

    @property
    def diverged(self) -> int:
        """Return the pairs whose outputs differ."""
        return self._bits([self._diverged])

    def count(self, mask: Mask, within: int, diverged: int) -> Counts:
        """Count a field's pairs among some."""
        differ, equal = mask.differ & within, mask.equal & within
        parted, calm = (differ & diverged).bit_count(), (equal & diverged).bit_count()
        return Counts(parted, differ.bit_count() - parted, calm, equal.bit_count() - calm)

    def fields(self) -> dict[str, Mask]:
        """Return every field that can act and differs in some pair, in the order of their names."""
        differ: dict[str, list[array[int]]] = {name: list(found.values()) for name, found in self._own.items()}
        for (_, a, b), pairs in self._met.items():
            for name in _differing(self._documents[a], self._documents[b]) if a != b else ():
                differ.setdefault(name, []).append(pairs)
        unknown = self._unknown({name for name in differ if spec(name).effect != "none"})
        return {
            name: Mask(self._bits(differ[name]) & ~missing, self.every & ~missing)
            for name in sorted(unknown)
            for missing in [self._bits(unknown[name])]
        }

    def _unknown(self, wanted: set[str]) -> dict[str, list["array[int]"]]:
        """Gather the pairs that do not know a field, for each of some fields."""
        found: dict[str, list[array[int]]] = {name: [] for name in wanted}
        held: dict[int, set[str]] = {}
        for place, a, b in self._met:
            for number in (a, b):
                held.setdefault(place, set()).update(wanted & self._documents[number].keys())
        for (place, a, b), pairs in self._met.items():
            for name in held[place] - (self._documents[a].keys() & self._documents[b].keys()):
                found[name].append(pairs)
        own = wanted & self._own.keys()
        for (one, other), pairs in self._shapes.items():
            for name in own - (one & other):
                found[name].append(pairs)
        return found

    def changes(self, name: str, diverged: int, most: int = 3) -> list[tuple[str, str, int, int]]:
        """Return a field's commonest changes: the two values, how often they met, and how often outputs diverged.

        None where each call has its own value.
        """
        kinds: dict[tuple[str, str], list[array[int]]] = {}
        for change, pairs in self._own.get(name, {}).items():
            if change is None:
                return []
            kinds.setdefault(change, []).append(pairs)
        for (_, a, b), pairs in self._met.items():
            one, other = self._documents[a], self._documents[b]
            if a != b and name in one and name in other and one[name] != other[name]:
                kinds.setdefault(_change(one[name], other[name]), []).append(pairs)
        found = []
        for (a_text, b_text), lists in kinds.items():
            bits = self._bits(lists)
            found.append((a_text, b_text, bits.bit_count(), (bits & diverged).bit_count()))
        return sorted(found, key=lambda item: (-item[3], -item[2], item[:2]))[:most]

    def _bits(self, lists: Iterable["array[int]"]) -> int:
        row = bytearray(self.pairs // 8 + 1)
        found = 0
        for numbers in lists:
            if len(numbers) * 64 > self.pairs:  # there are few of these, and many fields ask for them
                found |= self._large(numbers)
                continue
            for n in numbers:
                row[n >> 3] |= 1 << (n & 7)
        return found | int.from_bytes(row, "little")

    def _large(self, numbers: "array[int]") -> int:
        key = id(numbers), len(numbers), self.pairs
        if key not in self._masks:
            row = bytearray(self.pairs // 8 + 1)
            for n in numbers:
                row[n >> 3] |= 1 << (n & 7)
            self._masks[key] = int.from_bytes(row, "little")
        return self._masks[key]


def _differing(one: Document, other: Document) -> list[str]:
    return [name for name, value in one.items() if name in other and other[name] != value]


def _change(one: object, other: object) -> tuple[str, str]:
    """Return two values as text, in one order: which run came first says nothing."""
    a, b = sorted((show(one), show(other)))
    return a, b


def show(value: object) -> str:
    """Return a value as text. A state without a value is held as a tuple of its word."""
    if isinstance(value, tuple):
        return str(value[0]).replace("_", " ")
    return str(value)


# -- for two runs -------------------------------------------------------------------------------------


class Evidence(NamedTuple):
    """What history says of one field: its counts, and how often chance alone would show as much."""

    counts: Counts
    p: float
    q: float  # the false-discovery rate at which it would pass, among all fields of this history


def evidence(groups: Iterable[Iterable[Observation]]) -> dict[str, Evidence]:
    """Return, for each field that ever differs between runs of equal input, what history says of it.

    For the explainer of two runs: ``compare(a, b, history=evidence(...))``.
    """
    table = Table()
    for group in groups:
        table.add(group)
    diverged = table.diverged
    counts = {name: table.count(mask, table.every, diverged) for name, mask in table.fields().items()}
    logs = [log_p(item) for item in counts.values()]
    rates = adjusted(logs)
    return {
        name: Evidence(item, math.exp(log), rate)
        for (name, item), log, rate in zip(counts.items(), logs, rates, strict=True)
    }
