"""Padding on the wrong side is another function, and logits that moved too far for rounding are not blamed on shapes."""

from dataclasses import replace
from typing import Any

import pytest

from provenance.explain import compare, story
from provenance.facts import Field, Run, Step
from tests.explain.test_compare import pair

RIGHT = {"batch.size": 2, "batch.max_length": 9, "batch.padding_side": "right", "batch.sequence_lengths": [4, 9]}
SHORT = {"batch.padding_side": Field.moot("batch.padding_side", "no padding")}


def _padded(run: Run, padding: int = 5) -> Run:
    return replace(run, sequences=(replace(run.sequences[0], padding=padding),))


@pytest.mark.parametrize("dials", [{"moved": 9.0}, {"moved": 0.125}, {"moved": 0.125, "margin": 3.0}])
@pytest.mark.parametrize("before", [SHORT, RIGHT | {"batch.padding_side": "left"}])
def test_a_decoder_that_goes_on_after_padding_is_no_matter_of_shapes(
    before: dict[str, Any], dials: dict[str, float]
) -> None:
    a, b = pair(before, RIGHT, **dials)
    answer = compare.compare(_padded(a, 0 if before is SHORT else 5), _padded(b))
    first = answer["causes"][0]
    assert (first["field"], first["effect"], answer["verdict"]) == ("batch.padding_side", "semantic", "divergent")
    assert "goes on writing after the padding" in first["because"]
    assert not {"batch.size", "batch.padding_tokens"} & {cause["field"] for cause in answer["causes"]}
    assert "padding_side" in answer["advice"][0]


def test_padding_on_the_right_of_an_encoder_and_of_other_rows_is_a_matter_of_shapes() -> None:
    coder = {"model.is_encoder_decoder": True}
    a, b = pair(SHORT | coder, RIGHT | coder)
    assert compare.compare(_padded(a, 0), _padded(b))["causes"][0]["field"] == "batch.size"
    side = "tokenizer.padding_side"
    a, b = pair(RIGHT | {side: "left"}, RIGHT | {side: "right", "batch.size": 4})
    answer = compare.compare(_padded(a, 0), _padded(b, 0))
    assert answer["causes"][0]["field"] == "batch.size"
    assert answer["verdict"] == "near_tie"


def test_the_side_of_the_tokenizer_stands_for_that_of_the_batch_where_it_was_not_recorded() -> None:
    side = "tokenizer.padding_side"
    a, b = pair({side: "left", "batch.size": 2}, {side: "right", "batch.size": 2}, moved=9.0)
    answer = compare.compare(_padded(a), _padded(b))
    assert (answer["causes"][0]["field"], answer["causes"][0]["effect"]) == (side, "semantic")


@pytest.mark.parametrize(("moved", "field"), [(0.125, "batch.size"), (9.0, "batch.padding_side")])
def test_of_a_batch_that_was_padded_on_both_sides_the_tokens_say_how_this_row_was(moved: float, field: str) -> None:
    a, b = pair(SHORT, RIGHT | {"batch.padding_side": "left+right"}, moved=moved)
    assert compare.compare(_padded(a, 0), _padded(b))["causes"][0]["field"] == field


def test_padding_on_the_left_that_moved_logits_far_was_not_masked() -> None:
    a, b = pair(SHORT, RIGHT | {"batch.padding_side": "left"}, moved=9.0)
    answer = compare.compare(_padded(a, 0), _padded(b))
    assert "not masked" in answer["causes"][0]["because"]
    assert "batch.size" not in {cause["field"] for cause in answer["causes"]}


def test_outputs_that_share_no_best_token_are_not_blamed_on_shapes() -> None:
    a, b = pair({"batch.size": 1, "torch.num_threads": 1}, {"batch.size": 4, "torch.num_threads": 2})
    strange = Step(82, (82, 67), (9.0, 6.8), -0.1, 2.2, 67)
    row = replace(b.sequences[0], output_ids=(82, 7), steps=(strange, b.sequences[0].steps[1]))
    answer = compare.compare(a, replace(b, sequences=(row,)))
    assert (answer["verdict"], answer["causes"], answer["explained"]) == ("divergent", [], False)
    assert answer["outputs"]["logit_change"]["at_least"] is True
    assert "at least" in "\n".join(line for _, line in story.lines(answer))
    assert answer["advice"][0].startswith("Unexplained")
