"""What the tokens say: the first divergent token, margins, and how far the logits moved."""

import math
from dataclasses import replace

import pytest

from provenance.explain import tokens
from provenance.facts import Sequence, Step
from tests.fakes.runs import default_steps, sequence, step


def pair(one: list[int], other: list[int], **more: object) -> tokens.Evidence:
    a = sequence(0, [1], one, default_steps(one), **more)
    b = sequence(0, [1], other, default_steps(other), **more)
    return tokens.compare(a, b, sampled=False)


def other_choice(margin: float, moved: float) -> Step:
    """The same step as ``step(6, 7, margin)``, its logits moved, and the other token chosen."""
    return replace(step(6, 7, margin, moved=moved), token=7, runner_up=6)


def test_the_first_divergent_token_is_found() -> None:
    assert pair([1, 2, 3], [1, 2, 3]).ids_equal is True
    assert pair([1, 2, 3], [1, 9, 3]).divergent_at == 1
    found = pair([1, 2, 3], [1, 2])
    assert (found.divergent_at, found.prefix) == (2, True)


def test_without_ids_the_equality_keys_decide() -> None:
    def keyed(key: str) -> Sequence:
        return Sequence(row=0, ret=0, output_key=key)

    assert tokens.compare(keyed("x"), keyed("x"), sampled=False).ids_equal is True
    found = tokens.compare(keyed("x"), keyed("y"), sampled=False)
    assert (found.ids_equal, found.kind, found.why_unknown) == (False, "unknown", "the token ids were not kept")
    assert tokens.compare(keyed(""), keyed("y"), sampled=False).ids_equal is None


@pytest.mark.parametrize(
    ("moved", "margin", "kind", "tie"),
    [
        (0.0, 1.0, "zero", False),
        (0.125, 0.125, "rounding", True),
        (0.5, 0.25, "rounding", True),
        (0.5, 3.0, "rounding", False),
        (0.75, 0.0, "large", False),
        (30.0, 6.0, "large", False),
    ],
)
def test_movement_and_margin_tell_rounding_from_another_function(
    moved: float, margin: float, kind: str, tie: bool
) -> None:
    a = sequence(0, [1], [5, 6], [step(5, 99, 3.0), step(6, 7, margin)])
    b = sequence(0, [1], [5, 7], [step(5, 99, 3.0), other_choice(margin, moved)])
    found = tokens.compare(a, b, sampled=False)
    # at 16 a bfloat16 has a spacing of 0.125, so rounding may move a logit by 0.5
    assert (found.kind, found.near_tie) == (kind, tie)


def test_float32_is_judged_by_its_own_spacing() -> None:
    def one(moved: float) -> tokens.Evidence:
        a = sequence(0, [1], [6], [step(6, 7, 1e-6)], logits_dtype="float32")
        b = sequence(0, [1], [7], [other_choice(1e-6, moved)], logits_dtype="float32")
        return tokens.compare(a, b, sampled=False)

    assert one(1e-5).kind == "rounding"
    assert one(1e-5).near_tie
    assert one(0.004).kind == "large"


def test_under_sampling_no_margin_makes_a_near_tie() -> None:
    a = sequence(0, [1], [6], [step(6, 7, 0.0)])
    b = sequence(0, [1], [7], [other_choice(0.0, 0.125)])
    assert tokens.compare(a, b, sampled=False).near_tie
    assert not tokens.compare(a, b, sampled=True).near_tie


def test_missing_evidence_says_whose_and_why() -> None:
    a = sequence(0, [1], [6], [], no_evidence="beam search has no token evidence")
    b = sequence(0, [1], [7], default_steps([7]))
    found = tokens.compare(a, b, sampled=False)
    assert found.kind == "unknown"
    assert found.why_unknown == "A has no token evidence: beam search has no token evidence"


@pytest.mark.parametrize("other", [(3.0, 2.97), (math.nan, -math.inf)])
def test_steps_without_a_common_id_are_no_evidence_where_rounding_could_do_as_much(other: tuple[float, float]) -> None:
    a = sequence(0, [1], [6], [Step(6, (1, 2), (3.0, 2.97))])
    b = sequence(0, [1], [7], [Step(7, (8, 9), other)])
    found = tokens.compare(a, b, sampled=False)
    assert found.kind == "unknown"
    assert "no common token id" in found.why_unknown


def test_best_tokens_without_a_common_id_moved_by_their_spans_at_least() -> None:
    a = sequence(0, [1], [1], [Step(1, (1, 2), (30.0, 23.0))])
    b = sequence(0, [1], [8], [Step(8, (8, 9), (28.0, 26.0))])
    found = tokens.compare(a, b, sampled=False)
    assert found.change is not None
    # token 1 stood at 30 and then at 26 at most; 8 rose to 28 from 23 at most
    assert (found.kind, found.change.max_abs, found.change.at_least) == ("large", 5.0, True)
    later = replace(b, output_ids=(1, 8), steps=(replace(a.steps[0], top_logits=(40.0, 33.0)), b.steps[0]))
    both = tokens.compare(replace(a, output_ids=(1, 1), steps=(*a.steps, *a.steps)), later, sampled=False)
    assert both.change is not None
    assert (both.change.max_abs, both.change.at_least, both.change.over_tokens) == (10.0, False, 2)


def test_infinite_logits_are_left_out() -> None:
    a = sequence(0, [1], [6], [Step(6, (6, 7), (3.0, -math.inf), None, math.inf, 7)])
    b = sequence(0, [1], [7], [Step(7, (6, 7), (3.0, 4.0), None, 1.0, 6)])
    found = tokens.compare(a, b, sampled=False)
    assert found.change is not None
    assert found.change.max_abs == 0
    assert tokens.side(a, 0)["margin"] is None


def test_surface_differences_are_told() -> None:
    a = sequence(0, [1], [5], default_steps([5]), output_text="The  answer，42")
    b = sequence(0, [1], [6], default_steps([6]), output_text="The answer,42\n")
    assert tokens.compare(a, b, sampled=False).surface_only
    c = sequence(0, [1], [6], default_steps([6]), output_text="The answer, 43")
    assert not tokens.compare(a, c, sampled=False).surface_only


def test_equal_ids_with_another_text_are_told() -> None:
    a = sequence(0, [1], [5], [], output_text="x")
    b = sequence(0, [1], [5], [], output_text="y")
    found = tokens.compare(a, b, sampled=False)
    assert (found.ids_equal, found.text_equal) == (True, False)


def test_a_side_says_token_margin_and_end() -> None:
    a = sequence(0, [1], [5, 6], [step(5, 8, 0.5), step(6, 9, 0.25)])
    assert tokens.side(a, 1) == {
        "token_id": 6, "logprob": -0.5, "runner_up_id": 9, "margin": 0.25, "margin_ulps": 2.0,
    }  # fmt: skip
    assert tokens.side(a, 2) == {"token_id": None, "text": None, "ended": "length"}
    assert tokens.side(a, None) == {}


def test_ulp_is_the_spacing_of_the_type() -> None:
    assert tokens.ulp(16.0, "bfloat16") == 0.125
    assert tokens.ulp(31.9, "bfloat16") == 0.125
    assert tokens.ulp(1.0, "float32") == 2.0**-23
    assert tokens.ulp(0.0, "float16") == 0.0
    assert tokens.ulp(math.inf, "float16") == 0.0
