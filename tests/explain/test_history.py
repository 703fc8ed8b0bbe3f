"""Pairs of equal input, counted and tested exactly: held to exact fractions, and to figures that SciPy 1.17.1 gave."""

import math
import random
from fractions import Fraction
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provenance.explain import history
from provenance.explain.history import Counts, Document, Observation, Table, adjusted, evidence, log_p, newcombe, wilson

SCIPY_FISHER = [
    ((3, 1, 1, 3), 0.24285714285714283), ((12, 0, 0, 12), 3.698011505253395e-07),
    ((40, 60, 20, 80), 0.0015959084129643817), ((5, 95, 4, 96), 0.5), ((1, 9, 9, 1), 0.9999945874558878),
    ((0, 5, 3, 4), 1.0), ((250, 2250, 200, 2300), 0.007691613259576088),
]  # fmt: skip
P = [0.0001, 0.0004, 0.0019, 0.0095, 0.0201, 0.0278, 0.0298, 0.0344, 0.0459, 0.324, 0.4262, 0.5719, 0.6528, 0.759, 1.0]
SCIPY_ADJUSTED = [
    0.0015, 0.003, 0.0095, 0.035625, 0.0603, 0.06385714285714286, 0.06385714285714286, 0.0645, 0.0765, 0.486,
    0.5811818181818181, 0.7148749999999999, 0.7532307692307693, 0.8132142857142857, 1.0,
]  # fmt: skip
SCIPY_WILSON = [
    (0, 20, 0.0, 0.16112515805281935), (20, 20, 0.8388748419471808, 1.0),
    (7, 50, 0.06950833427016292, 0.26186193710585537), (1, 3, 0.06149194472039626, 0.7923403991979523),
    (499, 1000, 0.468073488750724, 0.529934164766247),
]  # fmt: skip


def exact(counts: Counts) -> Fraction:
    """Return Fisher's one-sided p as a fraction."""
    total, k, n = sum(counts), counts.diverged, counts.differed
    ways = sum(math.comb(k, x) * math.comb(total - k, n - x) for x in range(counts.differed_diverged, min(k, n) + 1))
    return Fraction(ways, math.comb(total, n))


def log_of(number: Fraction) -> float:
    """Return the logarithm of a fraction that may be too small for a float."""
    top, bottom = number.numerator, number.denominator
    cut = max(0, bottom.bit_length() - 1000), max(0, top.bit_length() - 1000)
    return math.log(top >> cut[1]) - math.log(bottom >> cut[0]) + math.log(2) * (cut[1] - cut[0])


@pytest.mark.parametrize(("table", "p"), SCIPY_FISHER)
def test_fishers_test_gives_scipys_figures(table: tuple[int, int, int, int], p: float) -> None:
    assert math.exp(log_p(Counts(*table))) == pytest.approx(p, rel=1e-9)


@given(*[st.integers(0, 60)] * 4)
def test_fishers_test_is_exact(a: int, b: int, c: int, d: int) -> None:
    counts = Counts(a, b, c, d)
    assert log_p(counts) == pytest.approx(log_of(exact(counts)), rel=1e-9, abs=1e-9)


@pytest.mark.parametrize("table", [(900, 100, 50, 3950), (3000, 333, 60, 1607)])
def test_what_is_too_small_for_a_float_keeps_its_logarithm(table: tuple[int, int, int, int]) -> None:
    assert log_p(Counts(*table)) == pytest.approx(log_of(exact(Counts(*table))), rel=1e-9)
    assert math.exp(log_p(Counts(*table))) == 0.0


def test_the_discovery_rate_gives_scipys_figures_in_any_order() -> None:
    logs = [math.log(p) for p in P]
    assert adjusted(logs) == pytest.approx(SCIPY_ADJUSTED)
    assert adjusted(logs[::-1]) == pytest.approx(SCIPY_ADJUSTED[::-1])
    assert adjusted([]) == []


@pytest.mark.parametrize(("hits", "among", "low", "high"), SCIPY_WILSON)
def test_a_share_gives_scipys_interval(hits: int, among: int, low: float, high: float) -> None:
    assert wilson(hits, among) == pytest.approx((low, high), abs=1e-12)


def test_a_difference_gives_the_published_interval() -> None:
    """56 of 70 against 48 of 80: Newcombe's own example, his tenth method."""
    assert newcombe(Counts(56, 14, 48, 32)) == pytest.approx((0.0524, 0.3339), abs=5e-5)
    assert newcombe(Counts(1, 1, 0, 0)) == (-1.0, 1.0)
    assert Counts(1, 1, 0, 0).difference == 0.0


def test_the_best_that_the_same_numbers_could_show() -> None:
    assert Counts(1, 4, 3, 2).best == Counts(4, 1, 0, 5)
    assert Counts(1, 1, 3, 2).best == Counts(2, 0, 2, 3)


# -- pairs ----------------------------------------------------------------------------------------------


def seen(n: int, output: int = 0, **own: object) -> Observation:
    return Observation(str(int(output)), (n,), (), own)


@given(st.integers(0, 30), st.integers(0, 1000), st.randoms(use_true_random=False))
def test_each_run_stands_in_one_pair_at_most_and_order_does_not_matter(
    n: int, at: int, shuffler: random.Random
) -> None:
    runs = [seen(at + k) for k in range(n)]
    pairs = list(history.matched(runs))
    assert len(pairs) == n // 2
    assert len({run.at for pair in pairs for run in pair}) == 2 * (n // 2)
    assert all(one.at < other.at for one, other in pairs)
    again = list(runs)
    shuffler.shuffle(again)
    assert list(history.matched(again)) == pairs


def test_configurations_that_take_turns_meet() -> None:
    """The n-th with the (n + half)-th would never bring two of them together."""
    table = Table()
    for group in range(20):
        table.add([seen(100 * group + k, turn=k % 2) for k in range(8)])
    differ = table.fields()["turn"].differ.bit_count()
    assert table.pairs == 80
    assert 25 < differ < 65


def count(groups: list[list[Observation]], name: str) -> Counts:
    table = Table()
    for group in groups:
        table.add(group)
    return table.count(table.fields()[name], table.every, table.diverged)


def test_pairs_are_counted_by_difference_and_divergence() -> None:
    groups = [
        [seen(0, 1, x=1), seen(1, 2, x=2)], [seen(2, 1, x=1), seen(3, 1, x=2)],
        [seen(4, 1, x=1), seen(5, 2, x=1)], [seen(6, 1, x=1), seen(7, 1, x=1)],
        [seen(8, 1, x=1), seen(9, 2)], [seen(10, 1, x=3)], [],
    ]  # fmt: skip
    assert count(groups, "x") == Counts(1, 1, 1, 1)


def test_shared_documents_are_compared_place_by_place_and_unknown_says_nothing() -> None:
    one, other, blind = {"x": 1, "y": 1}, {"x": 2, "y": 1}, {"y": ("unset",)}

    def run(n: int, document: Document, output: int = 0) -> Observation:  # fmt: skip
        return Observation(output, (n,), (document, {}), {})

    groups = [
        [run(0, one), run(1, other, 1)], [run(2, other), run(3, one, 1)], [run(4, one), run(5, blind, 1)],
        [run(6, one), run(7, one)],
    ]  # fmt: skip
    assert count(groups, "x") == Counts(2, 0, 0, 1)
    assert count(groups, "y") == Counts(1, 0, 2, 1)
    table = Table()
    for group in groups:
        table.add(group)
    assert table.changes("x", table.diverged) == [("1", "2", 2, 2)]
    assert table.changes("y", table.diverged) == [("1", "unset", 1, 1)]


def test_many_pairs_of_the_same_documents_are_one_mask() -> None:
    a, b = {"x": 1, "context.pid": 1}, {"x": 2, "context.pid": 2}
    groups = [[Observation(0, (2 * n,), (a,), {}), Observation(n % 2, (2 * n + 1,), (b,), {})] for n in range(200)]
    groups += [
        [Observation(0, (1000 + 2 * n,), ({"x": n},), {}), Observation(0, (1001 + 2 * n,), (a,), {})] for n in range(3)
    ]
    assert count(groups, "x") == Counts(100, 102, 0, 1)


def test_what_cannot_act_and_what_never_differs_is_no_field() -> None:
    table = Table()
    table.add(
        [
            Observation(0, (0,), ({"context.pid": 1, "z": 1},), {}),
            Observation(0, (1,), ({"context.pid": 2, "z": 1},), {}),
        ]
    )
    assert table.fields() == {}


@pytest.mark.parametrize("kinds", [64, 65])
def test_a_number_of_its_own_at_each_call_has_no_commonest_change(kinds: int) -> None:
    groups = [[seen(2 * n, 0, x=-1), seen(2 * n + 1, 1, x=n % kinds)] for n in range(200)]
    table = Table()
    for group in groups:
        table.add(group)
    assert table.fields()["x"].differ.bit_count() == 200
    shown = table.changes("x", table.diverged)
    assert [item[2:] for item in shown] == ([(4, 4)] * 3 if kinds == 64 else [])


def test_evidence_for_two_runs_has_counts_and_rates_by_field() -> None:
    groups = [[seen(2 * n, 0, x=0, y=n % 2), seen(2 * n + 1, n % 3 == 0, x=n % 3 == 0, y=0)] for n in range(30)]
    found = evidence(groups)
    assert found["x"].counts == Counts(10, 0, 0, 20)
    assert found["x"].p == pytest.approx(1 / math.comb(30, 10))
    assert found["x"].q == pytest.approx(2 * found["x"].p)
    assert found["y"].counts == Counts(5, 10, 5, 10)
    assert found["y"].q > 0.5
    assert evidence([]) == {}


def test_p_falls_as_the_evidence_grows() -> None:
    logs = [log_p(Counts(n, 20 - n, 5, 15)) for n in range(21)]
    assert all(one >= other for one, other in pairwise(logs))
