"""Fixed shapes: a prompt is answered alone as in company, counted and not claimed."""

import random
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from provenance.cli import models as bundled
from provenance.determinism import batches
from provenance.determinism.batches import Measured, Shapes
from provenance.errors import BadSetting
from tests.fakes import models

TEXT = (
    "the a list of function returns python string number loop file class method value error module import object sorted"
)


def prompts(count: int, tokenizer: Any) -> list[list[int]]:
    rng = random.Random(3)
    texts = [" ".join(rng.choices(TEXT.split(), k=rng.randint(2, 24))) for _ in range(count)]
    return [tokenizer(text)["input_ids"] for text in texts]


@given(st.lists(st.lists(st.integers(1, 60), min_size=1, max_size=20), max_size=20), st.integers(1, 5))
def test_every_prompt_is_in_exactly_one_row_of_a_full_batch(given_prompts: list[list[int]], rows: int) -> None:
    shapes = Shapes(rows, (8, 21), pad=0)
    seen = []
    for batch in shapes.batches(given_prompts):
        assert len(batch.ids) == len(batch.mask) == rows
        (length,) = {len(row) for row in (*batch.ids, *batch.mask)}
        assert length in (8, 21)
        assert all(0 in row for row in batch.mask)  # or the mask would be left out
        for index, ids, mask in zip(batch.prompts, batch.ids, batch.mask, strict=False):
            assert [token for token, there in zip(ids, mask, strict=True) if there] == given_prompts[index]
            assert mask[-1] == 1  # padded on the left
            assert length == shapes.length(len(given_prompts[index]))
            seen.append(index)
    assert sorted(seen) == list(range(len(given_prompts)))


def test_the_other_side_can_be_padded() -> None:
    (batch,) = Shapes(1, (4,), pad=9, side="right").batches([[1, 2]])
    assert (batch.ids, batch.mask) == (((1, 2, 9, 9),), ((1, 1, 0, 0),))


@pytest.mark.parametrize(
    ("act", "said"),
    [
        (lambda: Shapes(0, (8,), 0), "make no shape"),
        (lambda: Shapes(2, (), 0), "make no shape"),
        (lambda: Shapes(2, (8,), 0, "middle"), "padding side is 'middle'"),
        (lambda: list(Shapes(2, (2,), 0).batches([[1, 2, 3]])), "a prompt has 3 tokens"),
        (lambda: list(Shapes(2, (2,), 0).batches([[]])), "prompt 0 is empty"),
        (lambda: batches.generate(None, [[1]], Shapes(1, (2,), 0), do_sample=True), "greedy decoding only"),
    ],
)
def test_what_cannot_be_is_said_in_one_sentence(act: Any, said: str) -> None:
    with pytest.raises(BadSetting, match=said):
        act()


@pytest.mark.parametrize("name", ["llama", "gpt2", "t5"])
def test_answers_are_those_of_generate_and_end_with_the_end_token(name: str) -> None:
    """On models whose choices are far apart, so that padding turns none: the bookkeeping is what is tested."""
    model = models.MODELS[name]()
    asked = [[5, 6, 7], [9, 8], [11, 12, 13, 14]]
    settings: dict[str, Any] = {"max_new_tokens": 10}
    plain = [
        model.generate(models.tensor(row), do_sample=False, eos_token_id=None, **settings)[0].tolist() for row in asked
    ]
    skip = 0 if name == "t5" else None
    plain = [row[len(ids) if skip is None else skip :] for row, ids in zip(plain, asked, strict=True)]
    shapes = Shapes(4, (6,), pad=0)
    found = batches.generate(model, asked, shapes, eos_token_id=None, **settings)
    assert found == plain
    end = plain[0][3]
    cut = batches.generate(model, asked, shapes, eos_token_id=[end], **settings)
    assert cut == [row[: row.index(end) + 1] if end in row else row for row in plain]
    assert cut[0][-1] == end


def test_a_prompt_of_the_bfloat16_model_is_answered_alone_as_in_company() -> None:
    """Where padded batches turn tokens: without fixed shapes some of these prompts have two answers."""
    model, tokenizer = bundled.tiny()
    asked = prompts(24, tokenizer)[8:]
    found = batches.measure(model, asked, Shapes(8, (32,), tokenizer.pad_token_id), max_new_tokens=6)
    assert found.differ == 0
    assert found.differ_plain > 0


@pytest.mark.long
@pytest.mark.timeout(3000)
def test_none_of_two_hundred_prompts_hangs_on_its_company() -> None:
    model, tokenizer = bundled.tiny()
    shapes = Shapes(8, (16, 32), tokenizer.pad_token_id)
    found = batches.measure(model, prompts(200, tokenizer), shapes, max_new_tokens=8)
    assert (found.prompts, found.differ) == (200, 0)
    assert found.differ_plain > 0


def test_what_was_counted_is_told_with_where_it_was_counted() -> None:
    took = {"plain alone": 1.0, "fixed alone": 2.5, "plain company": 2.0, "fixed company": 3.0}
    told = str(Measured(200, 0, 27, Shapes(8, (16, 32), 0), "cpu", took))
    assert told.startswith(
        "0 of 200 prompts are answered otherwise in company than alone with fixed shapes (8 rows; padded to 16, 32), 27 without."
    )
    assert "2.5 times that of a prompt alone, 1.5 times that of full batches" in told
    assert "on this machine (cpu)" in told


def test_a_model_that_heeds_its_company_is_found_out() -> None:
    """No shape helps where a row's answer depends on its neighbours: then the count says so."""

    class Crowd:
        device = "cpu"
        generation_config = type("Own", (), {"pad_token_id": 0, "eos_token_id": None})
        config = type("Config", (), {})

        def generate(self, ids: Any, **_: Any) -> Any:
            import torch

            return torch.cat([ids, ids.sum().expand(ids.shape[0], 1)], dim=1)

    found = batches.measure(Crowd(), [[1], [2], [3]], Shapes(2, (2,), 0))
    assert found.differ == 3
