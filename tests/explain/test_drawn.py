"""Drawn tokens: rows of one call share a random stream, and a token that was drawn has a rank and no margin."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

import provenance
from provenance.explain import compare, page, story, tokens
from provenance.facts import Step
from tests.explain.test_compare import pair
from tests.fakes import models
from tests.fakes.runs import sequence

ONE, OTHER = [5, 6, 7, 8], [9, 10, 11, 12]
SAMPLED: dict[str, Any] = {"generation.do_sample": True}


@pytest.mark.filterwarnings("ignore:Using the model-agnostic default:UserWarning")
def test_another_row_of_one_batch_draws_other_numbers(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One prompt, one seed, logits equal to the last bit: the row alone decides what is drawn."""
    monkeypatch.setenv("PROVENANCE_WRITER", "off")
    model = provenance.wrap(models.llama())
    for rows in ((ONE, OTHER), (OTHER, ONE)):
        torch.manual_seed(3)
        model.generate(models.tensor(*rows), max_new_tokens=12, do_sample=True, temperature=1.5, top_k=0)
    torch.manual_seed(3)
    model.generate(models.tensor(ONE), max_new_tokens=12, do_sample=True, top_k=0, num_return_sequences=2)
    first, second, several = models.runs(db)
    for answer in (
        compare.compare(first, second, (0, None), (1, None)),
        compare.compare(several, several, (0, 0), (0, 1)),
    ):
        assert (answer["verdict"], answer["layer"]) == ("divergent", "sampler")
        assert answer["outputs"]["logit_change"]["kind"] == "zero"
        cause = answer["causes"][0]
        assert (cause["field"], cause["effect"], cause["a"], cause["b"]) == ("rng.row_at_sampling", "random", 0, 1)
        assert "one random stream" in cause["because"]
        assert len(answer["causes"]) == 1
        said = "\n".join(line for _, line in story.lines(answer))
        assert "ahead of" not in said
        assert said.count("A drew ") == said.count("B drew ") == 1


def test_a_drawn_token_has_a_rank_and_no_margin() -> None:
    row = sequence(0, [1], [85, 7, 8], [
        Step(85, (223, 85, 81), (12.0, 5.0, 4.0), -6.9, 4.6, 223), Step(7, (6, 7), (3.0, 3.0), -0.7, 0.0, 6),
        Step(8, (1, 2), (9.0, 8.0), None, 1.0, 2),
    ])  # fmt: skip
    found = [tokens.side(row, at, drawn=True) for at in range(3)]
    assert [side["rank"] for side in found] == [2, 1, None]
    assert not any("margin" in side or "runner_up_id" in side for side in found)
    said = [story._token(side, lambda _: None) for side in found]
    assert said == [
        "drew 85, number 2 of the 3 best, log probability -6.9", "drew 7, number 1 of the 2 best, log probability -0.7",
        "drew 8, none of the 2 best",
    ]  # fmt: skip
    bare = tokens.side(replace(row, steps=(Step(85, (), ()),)), 0, drawn=True)
    assert story._token(bare, lambda _: None) == "drew 85, none of the best that were kept"


def test_a_greedy_run_beside_a_sampled_one_keeps_its_margin() -> None:
    answer = compare.compare(*pair(None, SAMPLED))
    assert answer["outputs"]["a"]["margin"] == 0.125
    assert answer["outputs"]["b"]["drawn"] is True


def test_the_page_draws_no_margins_of_drawn_tokens() -> None:
    a, b = pair(SAMPLED, SAMPLED | {"generation.temperature": 0.5}, margin=0.375)
    answer = compare.compare(a, b)
    assert "How close each choice was" not in page.page(answer, a, b)
    assert "0.375" not in page.page(answer, a, b)
    one, other = pair(margin=0.375)
    assert "How close each choice was" in page.page(compare.compare(one, other), one, other)
