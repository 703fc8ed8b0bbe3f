"""Who goes with divergence: the planted field is found, what moves with it is named, and on noise nobody is accused."""

import math
import random
from itertools import product
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from provenance.explain import blame as blaming
from provenance.explain.blame import blame, within_inputs
from provenance.explain.history import Counts, Observation, log_p

Groups = list[list[Observation]]


def planted(
    seed: int, runs: int, inputs: int, fields: int, *, follows: float = 0.9, acts: float = 0.9, noise: float = 0.02
) -> Groups:
    """Make runs whose output is that of field f100; f101 and f102 mostly move with it."""
    draw = random.Random(seed)
    groups: dict[int, list[Observation]] = {}
    for n in range(runs):
        own: dict[str, object] = {f"f{k:03}": draw.randrange(3) for k in range(fields)}
        for name in ("f101", "f102"):
            if draw.random() < follows:
                own[name] = own["f100"]
        output = own["f100"] if draw.random() < acts else 0
        groups.setdefault(n % inputs, []).append(
            Observation(str(n) if draw.random() < noise else str(output), (n,), (), own)
        )
    return list(groups.values())


def nothing(seed: int, runs: int = 400, inputs: int = 100, fields: int = 100) -> Groups:
    """Make runs whose outputs no field has a part in."""
    draw = random.Random(seed)
    groups: dict[int, list[Observation]] = {}
    for n in range(runs):
        own: dict[str, object] = {f"f{k:03}": draw.randrange(2 + k % 4) for k in range(fields)}
        groups.setdefault(n % inputs, []).append(Observation(draw.random() < 0.2, (n,), (), own))
    return list(groups.values())


@pytest.mark.parametrize("inputs", [5000, 1000])
def test_one_planted_field_among_200_is_found_and_its_confounders_are_named(inputs: int) -> None:
    answer = blame(planted(1, 10_000, inputs, 200))
    (accused,) = answer["accused"]
    assert (answer["verdict"], accused["field"], accused["with"]) == ("accused", "f100", [])
    assert answer["tested"] == {"fields": 200, "classes": 200}
    assert {item["field"] for item in accused["confounded"]} == {"f101", "f102"}
    assert all(
        item["told_apart"] and "where f100 is equal it makes no difference" in item["because"]
        for item in accused["confounded"]
    )
    assert accused["differed"]["share"] > 0.6 > 0.25 > accused["equal"]["share"]
    assert accused["difference"]["low"] < accused["difference"]["value"] < accused["difference"]["high"]
    assert answer["left"]["share"] < 0.25


def test_on_noise_nobody_is_accused() -> None:
    assert [seed for seed in range(100) if blame(nothing(seed))["accused"]] == []


@pytest.mark.long
@pytest.mark.timeout(3600)
def test_on_noise_nobody_is_accused_in_a_thousand_trials() -> None:
    assert [seed for seed in range(1000) if blame(nothing(seed))["accused"]] == []


# -- properties -----------------------------------------------------------------------------------------


SMALL = st.builds(planted, st.integers(0, 50), st.just(160), st.sampled_from([80, 40, 16]), st.just(104))


@settings(max_examples=15, deadline=None)
@given(SMALL, st.randoms(use_true_random=False))
def test_the_order_of_inputs_and_of_runs_does_not_matter(groups: Groups, shuffler: random.Random) -> None:
    before = blame(groups)
    again = [shuffler.sample(group, len(group)) for group in groups]
    shuffler.shuffle(again)
    assert blame(again) == before


@settings(max_examples=15, deadline=None)
@given(SMALL, st.sampled_from([1, "x", None, ("unset",)]))
def test_a_field_that_never_differs_changes_nothing(groups: Groups, value: object) -> None:
    before = blame(groups)
    assert blame([[run._replace(own={**run.own, "constant": value}) for run in group] for group in groups]) == before
    shared = {"constant": value}
    assert blame([[run._replace(shared=(shared,)) for run in group] for group in groups]) == before


@settings(max_examples=15, deadline=None)
@given(SMALL)
def test_shared_and_own_fields_are_judged_alike(groups: Groups) -> None:
    shared = [[run._replace(shared=(run.own,), own={}) for run in group] for group in groups]
    assert blame(shared) == blame(groups)


# -- telling apart ----------------------------------------------------------------------------------------


Kind = tuple[int, int, dict[str, Any]]
Kinds = tuple[Kind, ...]


def pairs(*kinds: Kind) -> Groups:
    """Make inputs of two runs: for each kind, how many, how many of them diverged, and what differs."""
    groups: Groups = []
    names = sorted({name for _, _, fields in kinds for name in fields})
    for many, diverged, fields in kinds:
        for n in range(many):
            at = 2 * len(groups)
            left = {name: 0 for name in names if fields.get(name) is not None or name not in fields}
            right = {name: fields.get(name, 0) for name in left}
            groups.append([Observation(0, (at,), (), left), Observation(int(n < diverged), (at + 1,), (), right)])
    return groups


def told(answer: dict[str, Any]) -> dict[str, list[str]]:
    return {item["field"]: [other["field"] for other in item["confounded"]] for item in answer["accused"]}


def test_what_always_moves_together_is_one() -> None:
    answer = blame(pairs((30, 30, {"env.OMP_NUM_THREADS": 1, "torch.num_threads": 1}), (30, 0, {})))
    (accused,) = answer["accused"]
    assert (accused["field"], accused["with"]) == ("torch.num_threads", ["env.OMP_NUM_THREADS"])
    assert accused["changes"] == [{"a": "0", "b": "1", "pairs": 30, "diverged": 30}]
    assert (answer["noise"]["pairs"], answer["noise"]["diverged"], answer["left"]["pairs"]) == (30, 0, 30)
    assert answer["tested"] == {"fields": 2, "classes": 1}


def test_what_was_never_seen_alone_cannot_be_told_apart() -> None:
    answer = blame(pairs((40, 40, {"x": 1, "y": 1}), (2, 2, {"x": 1}), (40, 0, {})))
    (other,) = answer["accused"][0]["confounded"]
    assert told(answer) == {"x": ["y"]}
    assert not other["told_apart"]
    assert other["because"] == "never seen to differ without x: the two cannot be told apart by these runs"


def test_what_matters_without_the_other_is_the_one() -> None:
    answer = blame(pairs((40, 40, {"x": 1, "y": 1}), (30, 30, {"x": 1}), (60, 0, {})))
    (other,) = answer["accused"][0]["confounded"]
    assert (told(answer), other["because"]) == (
        {"x": ["y"]},
        "never seen to differ without x, which matters without it too",
    )


def test_too_few_pairs_alone_are_said_to_be_too_few() -> None:
    answer = blame(pairs((40, 40, {"x": 1, "y": 1}), (20, 20, {"x": 1}), (1, 0, {"y": 1}), (60, 0, {})))
    (other,) = answer["accused"][0]["confounded"]
    assert (told(answer), other["told_apart"]) == ({"x": ["y"]}, False)
    assert other["because"] == "differs without x in only 1 pair: too few to tell the two apart"


def test_two_of_which_each_explains_the_other_cannot_be_told_apart() -> None:
    kinds: Kinds = (60, 60, {"x": 1, "y": 1}), (20, 1, {"x": 1}), (21, 1, {"y": 1}), (60, 6, {})
    (accused,) = blame(pairs(*kinds))["accused"]
    assert not accused["confounded"][0]["told_apart"]
    assert accused["confounded"][0]["because"].endswith("the two cannot be told apart by these runs")


def test_two_that_act_by_themselves_are_both_accused() -> None:
    answer = blame(pairs((40, 40, {"x": 1}), (30, 30, {"y": 1}), (100, 0, {}), (20, 0, {"z": 1})))
    assert told(answer) == {"x": [], "y": []}
    assert answer["because"].startswith("2 fields go with divergence")
    assert answer["accused"][0]["others_equal"]["differed"]["pairs"] == 40


def test_one_that_shone_only_by_the_light_of_two_others_is_dropped() -> None:
    """z differs wherever x or y does, and is the strongest until both are looked at."""
    kinds: Kinds = (
        (50, 50, {"x": 1, "z": 1}),
        (50, 50, {"y": 1, "z": 1}),
        (14, 13, {"x": 1}),
        (14, 13, {"y": 1}),
        (14, 0, {"z": 1}),
        (150, 0, {}),
    )
    assert told(blame(pairs(*kinds))) in ({"x": ["z"], "y": []}, {"x": [], "y": ["z"]})


def test_one_inside_another_stays_where_it_adds_to_it() -> None:
    """x never differs without y, and diverges far oftener than y alone: both are accused."""
    kinds: Kinds = (60, 60, {"x": 1, "y": 1}), (60, 15, {"y": 1}), (300, 6, {})
    assert told(blame(pairs(*kinds))) == {"x": [], "y": []}


def test_a_field_unknown_on_one_side_says_nothing() -> None:
    known = blame(pairs((30, 30, {"x": 1}), (30, 0, {})))
    more = blame(pairs((30, 30, {"x": 1}), (30, 0, {}), (50, 50, {"x": None})))
    assert more["accused"][0]["differed"] == known["accused"][0]["differed"]
    assert more["accused"][0]["equal"] == known["accused"][0]["equal"]
    assert (more["pairs"]["pairs"], known["pairs"]["pairs"]) == (110, 60)


# -- the input --------------------------------------------------------------------------------------------


def test_a_field_that_only_follows_the_input_is_not_accused() -> None:
    """It differs on the inputs that diverge easily, and not on the others: within one input it does nothing."""
    draw = random.Random(3)
    groups = []
    for group in range(60):
        easy = group % 2
        groups.append([
            Observation(easy and draw.randrange(2), (100 * group + k,), (), {"padding": draw.randrange(3) if easy else 0})
            for k in range(20)
        ])  # fmt: skip
    answer = blame(groups)
    assert log_p(Counts(*(answer["inputs_only"][0][side][what] for side, what in (
        ("differed", "diverged"), ("differed", "pairs"), ("equal", "diverged"), ("equal", "pairs"))))) < math.log(0.001)  # fmt: skip
    assert (answer["verdict"], [item["field"] for item in answer["inputs_only"]]) == ("nobody", ["padding"])
    assert "only where inputs diverge easily" in answer["because"]


def test_one_that_acts_within_each_input_is_accused_and_it_is_said_that_inputs_were_held() -> None:
    groups = [[Observation((k % 2) * g, (100 * g + k,), (), {"x": k % 2}) for k in range(12)] for g in range(1, 30)]
    (accused,) = blame(groups)["accused"]
    assert (accused["field"], accused["inputs_held"]) == ("x", True)
    assert not blame(pairs((30, 30, {"x": 1}), (30, 0, {})))["accused"][0]["inputs_held"]


def brute(strata: list[tuple[int, int, int, int]]) -> float:
    """Return the same chance by going through every combination."""
    seen, found = sum(item[3] for item in strata), 0.0
    for parts in product(*(range(min(k, d) + 1) for _, k, d, _ in strata)):
        if sum(parts) >= seen:
            found += math.prod(
                math.comb(k, x) * math.comb(n - k, d - x) / math.comb(n, d) if d - x <= n - k else 0.0
                for (n, k, d, _), x in zip(strata, parts, strict=True)
            )
    return found


@pytest.mark.parametrize(
    "strata", [[], [(8, 4, 4, 3)], [(8, 4, 4, 3), (5, 2, 3, 2), (6, 5, 4, 3)], [(4, 3, 3, 2)] * 4, [(2, 1, 1, 0)] * 3]
)
def test_the_chance_within_inputs_is_exact(strata: list[tuple[int, int, int, int]]) -> None:
    assert within_inputs(strata) == pytest.approx(brute(strata))


def test_a_sum_of_very_many_inputs_is_as_good_as_normal(monkeypatch: pytest.MonkeyPatch) -> None:
    strata = [(10, 4, 5, 2 + (n % 5 > 2)) for n in range(170)]
    near = within_inputs(strata)
    monkeypatch.setattr(blaming, "LARGE", math.inf)
    assert near == pytest.approx(within_inputs(strata), rel=0.2)
    assert near < 1e-6


# -- what cannot be said ----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("groups", "verdict", "said"),
    [
        ([], "too_little", "no run fits the question"),
        ([[Observation(0, (0,))]], "too_little", "no input was run twice"),
        (pairs((5, 0, {"x": 1})), "nobody", "no output diverged in 5 pairs"),
        (pairs((1, 0, {})), "nobody", "no output diverged in 1 pair of"),
        (pairs((5, 2, {})), "nobody", "something that decides is not recorded"),
        (pairs((3, 3, {"x": 1}), (3, 0, {})), "too_little", "6 pairs, of which 3 diverged, are too few to accuse anybody among 1 field "),
        (pairs((30, 15, {"x": 1}), (30, 15, {}), (30, 15, {"y": 1})), "nobody", "none of 2 fields that can be told apart goes with"),
    ],
)  # fmt: skip
def test_what_cannot_be_said_is_said(groups: Groups, verdict: str, said: str) -> None:
    answer = blame(groups)
    assert (answer["verdict"], answer["accused"], answer["left"]) == (verdict, [], None)
    assert said in answer["because"]


def test_a_field_that_stands_in_two_places_differs_only_where_both_are_known() -> None:
    answer = blame([[Observation(0, (0,), ({"x": 1},), {"x": 1}), Observation(1, (1,), ({"x": 2},), {})],
                    [Observation(0, (2,), ({"x": 1},), {"x": 1}), Observation(0, (3,), ({"x": 1},), {"x": 2})]])  # fmt: skip
    assert answer["tested"] == {"fields": 1, "classes": 1}
    lone = blame([[Observation(0, (0,), ({"x": 1},), {"x": 1}), Observation(1, (1,), ({"x": 2},), {})],
                  [Observation(0, (2,), ({},), {"x": 1}), Observation(0, (3,), ({},), {"x": 2})]])  # fmt: skip
    assert lone["tested"] == {"fields": 0, "classes": 0}


def test_the_noise_floor_is_what_stays_where_nothing_differs() -> None:
    noise = blame(pairs((40, 4, {}), (10, 9, {"x": 1}), (5, 5, {"x": None})))["noise"]
    assert (noise["pairs"], noise["diverged"]) == (45, 9)
    assert noise["because"].startswith("a configuration disagrees with itself in 9 of 45 pairs (95 %: ")
    none = blame(pairs((10, 5, {"x": 1})))
    assert none["noise"]["because"].startswith("could not tell")
    assert none["never_equal"] == ["x"]
