"""From a run to a plan: the batch laid out as it was, settings by the hand that set each, every loss in a sentence."""

from dataclasses import replace
from typing import Any

import pytest

from provenance.errors import UsageError
from provenance.facts import Field, Run, Sequence
from provenance.replay import plan
from provenance.replay.plan import ASKED, NEEDED, TOLD
from tests.fakes.runs import run


def batch(*rows: Sequence, **fields: Any) -> Run:
    """Make a run of rows as wide as the widest."""
    width = max(len(row.input_ids or ()) + (row.padding or 0) for row in rows)
    return replace(run(fields={"batch.max_length": width, "batch.mask_given": True, **fields}), sequences=rows)


def row(number: int, ids: tuple[int, ...] | None, padding: int = 0, **more: Any) -> Sequence:
    return Sequence(number, 0, input_key="0b" * 32, input_ids=ids, output_ids=(1,), padding=padding, **more)


def said(made: plan.Plan, level: int) -> list[str]:
    return [item.sentence for item in made.lost if item.level == level]


@pytest.mark.parametrize(
    ("side", "ids", "mask"),
    [("left", (0, 0, 8), (0, 0, 1)), ("right", (8, 0, 0), (1, 0, 0))],
)
def test_a_batch_is_laid_out_as_it_was(side: str, ids: tuple[int, ...], mask: tuple[int, ...]) -> None:
    made = plan.make(batch(row(0, (5, 6, 7)), row(1, (8,), 2), **{"batch.padding_side": side}))
    assert (made.ids, made.mask) == (((5, 6, 7), ids), ((1, 1, 1), mask))


def test_returns_of_one_prompt_are_one_row() -> None:
    one = row(0, (5, 6))
    made = plan.make(batch(one, replace(one, ret=1), row(1, (7, 8))))
    assert made.ids == ((5, 6), (7, 8))


def test_no_mask_is_made_where_none_was_given() -> None:
    made = plan.make(batch(row(0, (5, 6)), **{"batch.mask_given": False}))
    assert made.mask is None


def test_a_mask_with_holes_lays_the_ids_out() -> None:
    made = plan.make(
        batch(row(0, (5, 6), 2, mask=(1, 0, 1, 0)), row(1, (1, 2, 3, 4)), **{"batch.padding_side": "holes"})
    )
    assert made.ids == ((5, 0, 6, 0), (1, 2, 3, 4))
    assert made.mask == ((1, 0, 1, 0), (1, 1, 1, 1))


@pytest.mark.parametrize(
    ("fields", "token"),
    [
        ({"tokenizer.special_ids": {"pad": 9}, "generation.pad_token_id": 3}, 9),
        ({"generation.pad_token_id": 3}, 3),
        ({"tokenizer.special_ids": {"pad": 9}, "generation.pad_token_id": 3,
          "batch.mask_origin": "inferred from the padding token"}, 3),
        ({}, 0),
    ],
)  # fmt: skip
def test_the_padding_is_filled_with_the_token_that_is_known(fields: dict[str, Any], token: int) -> None:
    made = plan.make(batch(row(0, (5, 6)), row(1, (8,), 1), **{"batch.padding_side": "left", **fields}))
    assert made.ids == ((5, 6), (token, 8))


@pytest.mark.parametrize(
    ("readers", "told"), [(["RepetitionPenaltyLogitsProcessor", "TopKLogitsWarper"], 1), (["TopKLogitsWarper"], 0)]
)
def test_it_is_told_where_the_padding_can_be_read(readers: list[str], told: int) -> None:
    made = plan.make(
        batch(
            row(0, (5, 6)), row(1, (8,), 1), **{"batch.padding_side": "left", "generation.logits_processors": readers}
        )
    )
    assert len([text for text in said(made, TOLD) if text.startswith("batch.padding_tokens: which token")]) == told


@pytest.mark.parametrize(
    ("found", "field", "text"),
    [
        (batch(row(0, None)), "input.token_ids", "recorded with capture=digest or off"),
        (batch(row(0, None, media=("pixel_values float32 (3,) sha256:0",))), "input.token_ids", "but pixel_values, of which"),
        (batch(row(0, (5, 6)), row(1, (8,), 1), **{"batch.padding_side": "left+right"}), "batch.padding_side", "different sides"),
        (batch(row(0, (5, 6)), row(1, (8,), 1, mask=(1, 1))), "batch.padding_side", "the mask of row 1 does not fit"),
        (batch(row(0, (5, 6)), **{"batch.max_length": 7}), "batch.max_length", "do not add up to 7 tokens"),
    ],
)  # fmt: skip
def test_an_input_that_is_not_whole_cannot_be_replayed(found: Run, field: str, text: str) -> None:
    lost = [item for item in plan.make(found).lost if item.level == NEEDED]
    assert [(item.field, text in item.because) for item in lost] == [(field, True)]


@pytest.mark.parametrize(
    ("name", "item", "text"),
    [
        ("generation.stop_strings", Field.secret("generation.stop_strings"), "withheld when it was recorded"),
        ("generation.stop_strings", Field("generation.stop_strings", "hmac:00"), "only a keyed digest of it"),
        ("generation.watermarking_config", Field("generation.watermarking_config", {"type": "WatermarkingConfig", "bias": 1}),
         "it was an object (WatermarkingConfig)"),
        ("generation.stopping_criteria", Field("generation.stopping_criteria", ["a.B"]), "the stopping criteria of the caller's own"),
        ("generation.user_set_fields", Field("generation.user_set_fields", ["pixel_scale"]), "the argument pixel_scale was given"),
        ("batch.mask_origin", Field("batch.mask_origin", "call, of another shape"), "a mask of another shape"),
    ],
)  # fmt: skip
def test_what_is_not_kept_is_asked_about(name: str, item: Field, text: str) -> None:
    lost = said(plan.make(batch(row(0, (5, 6)), **{name: item})), ASKED)
    assert [text in line for line in lost] == [True], lost


@pytest.mark.parametrize(("name", "value"), [("generation.max_time", 3.0), ("batch.concurrent_threads", 4)])
def test_what_time_and_company_decide_is_told(name: str, value: object) -> None:
    assert [line.partition(":")[0] for line in said(plan.make(batch(row(0, (5, 6)), **{name: value})), TOLD)] == [name]


def test_settings_stand_under_the_hand_that_set_them() -> None:
    fields = {
        "generation.temperature": Field("generation.temperature", 0.5, source="call"),
        "generation.top_p": Field("generation.top_p", 0.9, source="call.generation_config"),
        "generation.top_k": Field("generation.top_k", 7, source="model"),
        "generation.min_p": Field.unset("generation.min_p", "call"),
        "generation.typical_p": Field("generation.typical_p", 1.0, source="library"),
        "generation.max_length": Field.moot("generation.max_length", "max_new_tokens leads"),
        "generation.max_new_tokens": Field(
            "generation.max_new_tokens", 20, reason="default max_length", source="library"
        ),
        "generation.sequence_bias": Field("generation.sequence_bias", {"(5, 6)": -1.0}, source="call"),
    }
    made = plan.make(batch(row(0, (5, 6)), **fields))
    assert made.call == {"temperature": 0.5, "min_p": None, "sequence_bias": {(5, 6): -1.0}}
    assert (made.config, made.own, made.length) == ({"top_p": 0.9}, {"top_k": 7}, 20)
    assert made.library["typical_p"] == 1.0
    assert not {"max_length", "mode", "logits_processors", "user_set_fields"} & made.library.keys()


def test_a_draw_without_state_or_seed_is_asked_about() -> None:
    fields = {"generation.do_sample": True, "rng.device_of_sampling": "cuda:1", "seed.torch_initial": None}
    made = plan.make(batch(row(0, (5, 6)), **fields))
    assert made.draws
    assert said(made, ASKED) == ["rng.torch_cuda_state_sha256: neither the random state nor a seed was kept"]
    kept = replace(batch(row(0, (5, 6)), **fields), states={"rng.torch_cuda": b"x"})
    assert said(plan.make(kept), ASKED) == []


def test_greedy_decoding_needs_no_random_state() -> None:
    assert not plan.make(batch(row(0, (5, 6)))).draws


@pytest.mark.parametrize(
    ("changes", "text"),
    [
        ({"runtime": "vllm", "operation": "chat"}, "is a call of vllm chat; only `generate` of transformers"),
        ({"status": "error"}, "ended as 'error'"),
        ({"sequences": ()}, "it has no output"),
    ],
)
def test_another_call_is_refused(changes: dict[str, Any], text: str) -> None:
    with pytest.raises(UsageError, match=text):
        plan.make(replace(run(), **changes))
