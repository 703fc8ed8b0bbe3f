"""The models that need no hub: one always nearly tied and never random, one that writes readable text."""

from typing import Any

import pytest
import torch

from provenance.cli import models


@pytest.fixture(scope="module")
def twins() -> Any:
    return models.twin_rows()


@pytest.fixture(scope="module")
def prompts() -> Any:
    return torch.randint(1, 512, (16, 24), generator=torch.Generator().manual_seed(7))


def answer(model: Any, ids: Any, **more: Any) -> Any:
    return model.generate(ids, attention_mask=torch.ones_like(ids), max_new_tokens=48, min_new_tokens=48, **more)[:1]


def test_a_repeat_never_turns_a_token(twins: Any, prompts: Any) -> None:
    for row in prompts:
        assert torch.equal(answer(twins, row[None]), answer(twins, row[None]))


def test_a_batch_turns_most_prompts(twins: Any, prompts: Any) -> None:
    turned = sum(
        not torch.equal(
            answer(twins, prompts[n : n + 1]), answer(twins, prompts[[n, (n + 1) % 16, (n + 2) % 16, (n + 3) % 16]])
        )
        for n in range(16)
    )
    assert turned >= 8


def test_attention_and_cache_turn_tokens_too(twins: Any, prompts: Any) -> None:
    alone = [answer(twins, row[None]) for row in prompts]
    uncached = [answer(twins, row[None], use_cache=False) for row in prompts]
    assert any(not torch.equal(one, other) for one, other in zip(alone, uncached, strict=True))
    twins.set_attn_implementation("eager")
    try:
        eager = [answer(twins, row[None]) for row in prompts]
    finally:
        twins.set_attn_implementation("sdpa")
    assert any(not torch.equal(one, other) for one, other in zip(alone, eager, strict=True))


def test_margins_are_near_a_millionth(twins: Any, prompts: Any) -> None:
    with torch.no_grad():
        best = twins(prompts).logits[:, -1].topk(2).values
    assert float((best[:, 0] - best[:, 1]).max()) < 1e-4


def test_building_it_leaves_the_random_state_alone_and_repeats() -> None:
    before = torch.get_rng_state()
    one, other = models.twin_rows(3), models.twin_rows(3)
    assert torch.equal(torch.get_rng_state(), before)
    assert torch.equal(one.lm_head.weight, other.lm_head.weight)
    assert not torch.equal(one.lm_head.weight, models.twin_rows(4).lm_head.weight)


def test_the_tiny_model_writes_readable_text() -> None:
    model, tokenizer = models.tiny()
    assert model.dtype == torch.bfloat16
    assert 700_000 < sum(p.numel() for p in model.parameters()) < 1_000_000
    inputs = tokenizer(["The for statement is used to"], return_tensors="pt")
    output = model.generate(input_ids=inputs["input_ids"], max_new_tokens=24, do_sample=False)
    text = tokenizer.decode(output[0], skip_special_tokens=True)
    assert "iterate over the elements of a sequence" in text
