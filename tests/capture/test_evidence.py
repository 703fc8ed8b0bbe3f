"""Token evidence: what the record says of each choice is what the call itself computed, or it says why it is silent.

The judge is transformers: `output_logits` and `output_scores` of the very call that is recorded.
"""

import math
import sqlite3
import struct
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList

import provenance
from provenance import recorder as recorders
from provenance.capture.evidence import FLUSH_STEPS, Observer, observe
from provenance.facts import Sequence
from provenance.store import reading
from tests.fakes import models

DICT = {"return_dict_in_generate": True, "output_scores": True, "output_logits": True}
LEFT = ([0, 0, 5, 6, 7], [8, 9, 10, 11, 12], [0, 13, 14, 15, 16])


class Flat(LogitsProcessor):  # type: ignore[misc]
    """A processor that halves every score: the choice stays, the margin does not."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores * 0.5


class OwnList(LogitsProcessorList):  # type: ignore[misc]
    """A list that calls its processors itself."""


@pytest.fixture(autouse=True)
def _no_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVENANCE_WRITER", "off")


def _mask(rows: tuple[list[int], ...]) -> Any:
    return (torch.tensor(rows) != 0).long()


def _agree(sequence: Sequence, result: Any, index: int, start: int, k: int = 4) -> None:
    """Hold the steps of one sequence against the logits and scores that the same call returned."""
    assert sequence.output_ids is not None
    count = len(sequence.output_ids)
    assert tuple(result.sequences[index, start : start + count].tolist()) == sequence.output_ids
    assert [step.token for step in sequence.steps] == list(sequence.output_ids)
    for step, logits, scores in zip(sequence.steps, result.logits, result.scores, strict=False):
        raw, processed = logits[index], scores[index]
        top = raw.topk(k)
        assert step.top_ids == tuple(top.indices.tolist())
        assert step.top_logits == tuple(top.values.tolist())
        best = processed.topk(2)
        assert step.margin == best.values[0].item() - best.values[1].item()
        assert {step.token, step.runner_up} == set(best.indices.tolist()) or step.token not in best.indices
        if step.token in step.top_ids:
            assert step.logprob == pytest.approx(raw.log_softmax(-1)[step.token].item(), abs=1e-5)
        else:
            assert step.logprob is None


@pytest.mark.parametrize("kind", list(models.MODELS))
def test_steps_equal_the_logits_and_scores_of_the_same_call(kind: str, db: Path) -> None:
    model = provenance.wrap(models.MODELS[kind]())
    result = model.generate(models.tensor(), max_new_tokens=12, eos_token_id=None, **DICT)
    (sequence,) = models.last(db).sequences
    assert len(sequence.steps) == 12
    assert sequence.no_evidence == ""
    assert sequence.logits_dtype == "float32"
    _agree(sequence, result, 0, 1 if kind == "t5" else 5)


@pytest.mark.parametrize("kind", list(models.MODELS))
def test_steps_of_a_padded_batch_stop_where_each_row_stops(kind: str, db: Path) -> None:
    bare = models.MODELS[kind]()
    rows = {"attention_mask": _mask(LEFT), "max_new_tokens": 14}
    free = bare.generate(models.tensor(*LEFT), eos_token_id=None, **rows)
    start = 1 if kind == "t5" else 5
    end = int(free[1, start + 3])  # a token that ends one row early
    result = provenance.wrap(bare).generate(models.tensor(*LEFT), eos_token_id=end, **rows, **DICT)
    run = models.last(db)
    assert [sequence.row for sequence in run.sequences] == [0, 1, 2]
    for index, sequence in enumerate(run.sequences):
        _agree(sequence, result, index, start)
    lengths = [len(sequence.steps) for sequence in run.sequences]
    assert lengths[1] <= 4
    assert max(lengths) > lengths[1]


@pytest.mark.parametrize("settings", [{}, {"repetition_penalty": 1.4}])
def test_the_smallest_margin_and_its_place_are_those_of_the_steps(settings: dict[str, Any], db: Path) -> None:
    provenance.wrap(models.llama()).generate(models.tensor(), max_new_tokens=20, eos_token_id=None, **settings)
    (sequence,) = models.last(db).sequences
    smallest, at = min((step.margin, place) for place, step in enumerate(sequence.steps) if step.margin is not None)
    margin, place = _smallest(db)
    assert margin == pytest.approx(smallest, rel=1e-6)
    assert place == at


def _smallest(db: Path) -> tuple[float | None, int | None]:
    """Read from the store what it says of the smallest margin of its one sequence."""
    with closing(sqlite3.connect(db)) as connection:
        ((margin, at),) = connection.execute("select min_margin, min_margin_at from sequences").fetchall()
    return margin, at


def test_a_masked_end_leaves_raw_logits_raw_and_takes_the_margin_from_the_processed_scores(db: Path) -> None:
    model = models.llama()
    first = int(model.generate(models.tensor(), max_new_tokens=1)[0, -1])  # greedy wants this first
    result = provenance.wrap(model).generate(
        models.tensor(), max_new_tokens=8, min_new_tokens=5, eos_token_id=first, **DICT
    )
    (sequence,) = models.last(db).sequences
    _agree(sequence, result, 0, 5)
    step, raw = sequence.steps[0], result.logits[0][0].topk(2)
    assert step.top_ids[0] == first
    assert step.token != first
    assert step.margin != raw.values[0].item() - raw.values[1].item()
    assert step.runner_up != first


def test_processors_that_keep_the_choice_but_not_the_margin_are_seen(db: Path) -> None:
    model = models.llama()
    bare = provenance.wrap(model).generate(models.tensor(), max_new_tokens=6, eos_token_id=None)
    halved = model.generate(models.tensor(), max_new_tokens=6, eos_token_id=None, logits_processor=[Flat()])
    assert torch.equal(bare, halved)
    one, other = (run.sequences[0].steps for run in models.runs(db))
    assert [step.top_logits for step in one] == [step.top_logits for step in other]
    for step, half in zip(one, other, strict=True):
        assert step.margin is not None
        assert half.margin == pytest.approx(step.margin / 2, rel=1e-5)


def test_a_processor_that_writes_into_the_scores_does_not_write_into_the_evidence(db: Path) -> None:
    class Spoil(LogitsProcessor):  # type: ignore[misc]
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            scores.zero_()
            scores[:, 17] = 3.0
            scores[:, 19] = 1.0
            return scores

    model = models.llama()
    with torch.no_grad():
        logits = model(models.tensor()).logits[0, -1]
    provenance.wrap(model).generate(models.tensor(), max_new_tokens=1, logits_processor=[Spoil()])
    (step,) = models.last(db).sequences[0].steps
    assert (step.token, step.runner_up, step.margin) == (17, 19, 2.0)
    assert step.top_ids == tuple(logits.topk(4).indices.tolist())
    assert step.top_logits == pytest.approx(logits.topk(4).values.tolist(), rel=1e-5)


def test_in_an_exact_tie_the_choice_is_what_was_chosen(db: Path) -> None:
    model = provenance.wrap(models.twins())
    result = model.generate(models.tensor(), max_new_tokens=40, eos_token_id=None)
    (sequence,) = models.last(db).sequences
    assert sequence.output_ids == tuple(result[0, 5:].tolist())
    for step in sequence.steps:
        assert step.margin == 0.0
        assert step.runner_up == step.token ^ 1
        assert step.logprob is not None


@pytest.mark.parametrize(("token", "runner_up"), [(5, 9), (9, 5)])
@pytest.mark.parametrize("processed", [False, True])
def test_in_an_exact_tie_either_may_stand_first_in_the_evidence(token: int, runner_up: int, processed: bool) -> None:
    """A sort may name either of two equals first: whichever was chosen, the other is the runner-up."""
    observer = Observer(3)
    scores = torch.full((1, 12), -3.0)
    scores[0, 5] = scores[0, 9] = 1.5
    observer.look(torch, scores)
    if processed:
        observer.look_again(scores)
    (evidence,) = observer.collect(torch, [1], "float32")
    assert evidence.margin == 0.0
    ((step,), dtype) = reading.steps(evidence.data, (token,))
    assert dtype == "float32"
    assert (step.token, step.runner_up, step.margin) == (token, runner_up, 0.0)
    assert step.logprob == pytest.approx(scores[0].log_softmax(-1)[5].item(), abs=1e-6)


def test_what_a_drawn_token_was_drawn_from_is_kept_but_is_no_margin_of_the_run(db: Path) -> None:
    torch.manual_seed(3)
    model = provenance.wrap(models.llama())
    result = model.generate(models.tensor(), max_new_tokens=12, do_sample=True, eos_token_id=None, top_k=0, **DICT)
    (sequence,) = models.last(db).sequences
    _agree(sequence, result, 0, 5)
    assert _smallest(db) == (None, None)


def test_evidence_zero_turns_it_off_and_says_so(db: Path) -> None:
    provenance.init(evidence=0)
    provenance.wrap(models.llama()).generate(models.tensor(), max_new_tokens=4)
    (sequence,) = models.last(db).sequences
    assert sequence.output_ids is not None
    assert sequence.steps == ()
    assert sequence.no_evidence == "token evidence is off (evidence=0)"


@pytest.mark.parametrize("k", [1, 8, 32])
def test_evidence_chooses_how_many_logits_are_kept(k: int, db: Path) -> None:
    provenance.init(evidence=k)
    result = provenance.wrap(models.llama()).generate(
        models.tensor(), max_new_tokens=5, eos_token_id=None, repetition_penalty=1.3, **DICT
    )
    (sequence,) = models.last(db).sequences
    assert {len(step.top_ids) for step in sequence.steps} == {k}
    _agree(sequence, result, 0, 5, k)


def test_no_more_logits_are_kept_than_the_vocabulary_has(db: Path) -> None:
    provenance.init(evidence=32)
    result = provenance.wrap(models.llama(vocab_size=10)).generate(
        models.tensor([5, 6]), max_new_tokens=5, eos_token_id=None, **DICT
    )
    (sequence,) = models.last(db).sequences
    _agree(sequence, result, 0, 2, 10)


def _assistant() -> Any:
    return models.llama()


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"num_beams": 3}, "beam search has no token evidence"),
        ({"num_beams": 2, "do_sample": True}, "beam sample has no token evidence"),
        ({"prompt_lookup_num_tokens": 3}, "assisted generation has no token evidence"),
        ({"assistant_model": _assistant}, "assisted decoding has no token evidence"),
        (
            {"custom_generate": lambda: lambda model, input_ids, **kwargs: torch.cat([input_ids, input_ids], dim=-1)},
            "a custom decoding loop has no token evidence",
        ),
    ],
)
def test_where_there_is_no_evidence_the_reason_stands(settings: dict[str, Any], reason: str, db: Path) -> None:
    made = {name: value() if callable(value) else value for name, value in settings.items()}
    result = provenance.wrap(models.llama()).generate(models.tensor(), max_new_tokens=5, **made)
    (sequence,) = models.last(db).sequences
    assert sequence.output_ids == tuple(result[0, 5 : 5 + len(sequence.output_ids or ())].tolist())
    assert sequence.steps == ()
    assert sequence.no_evidence == reason


def test_a_list_that_calls_its_processors_itself_is_left_alone() -> None:
    own, observer = OwnList([Flat()]), Observer(4)
    assert observe(own, observer) is own
    assert observer.reason == "a OwnList of its own calls the processors"
    assert observer.processors == ["Flat"]


def test_a_generate_of_its_own_has_no_evidence_and_says_so(db: Path) -> None:
    class Own(type(models.llama())):  # type: ignore[misc]
        def generate(self, input_ids: Any, **kwargs: Any) -> Any:
            return torch.cat([input_ids, input_ids + 1], dim=-1)

    model = models.llama()
    model.__class__ = Own
    provenance.wrap(model).generate(models.tensor())
    (sequence,) = models.last(db).sequences
    assert sequence.output_ids == (6, 7, 8, 9, 10)
    assert sequence.no_evidence == "Own has a generate of its own"


@pytest.mark.parametrize("processed", [False, True])
def test_long_outputs_lose_no_step_at_a_flush(processed: bool, db: Path) -> None:
    length = 2 * FLUSH_STEPS + 40
    processors = [Flat()] if processed else []
    result = provenance.wrap(models.llama()).generate(
        models.tensor(), max_new_tokens=length, eos_token_id=None, logits_processor=processors, **DICT
    )
    (sequence,) = models.last(db).sequences
    assert len(sequence.steps) == length
    _agree(sequence, result, 0, 5)


def test_an_operator_that_fails_costs_the_evidence_and_not_the_call(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.llama()
    bare = model.generate(models.tensor(), max_new_tokens=6)

    def refuse(*arguments: Any, **options: Any) -> Any:
        raise MemoryError("no room")

    provenance.wrap(model)
    with monkeypatch.context() as patched:
        patched.setattr(torch, "logsumexp", refuse)
        result = model.generate(models.tensor(), max_new_tokens=6)
    assert torch.equal(bare, result)
    (sequence,) = models.last(db).sequences
    assert sequence.output_ids is not None
    assert sequence.no_evidence == "MemoryError while the logits were read"
    recorder = recorders.current()
    assert recorder is not None
    assert recorder.errors == 0


def test_the_type_of_the_logits_is_that_of_the_model(db: Path) -> None:
    model = models.llama().to(torch.bfloat16)
    result = provenance.wrap(model).generate(models.tensor(), max_new_tokens=4, eos_token_id=None, **DICT)
    (sequence,) = models.last(db).sequences
    assert sequence.logits_dtype == "bfloat16"
    _agree(sequence, result, 0, 5)


def test_infinite_and_missing_scores_survive_the_way_to_the_record(db: Path) -> None:
    class One(LogitsProcessor):  # type: ignore[misc]
        def __call__(self, input_ids: Any, scores: Any) -> Any:
            return torch.full_like(scores, -math.inf).index_fill_(1, torch.tensor([20]), 0.0)

    provenance.wrap(models.llama()).generate(models.tensor(), max_new_tokens=3, logits_processor=[One()])
    (sequence,) = models.last(db).sequences
    assert sequence.output_ids == (20, 20, 20)
    assert [step.margin for step in sequence.steps] == [math.inf] * 3


def test_the_buffer_is_laid_out_as_it_is_written_down() -> None:
    observer = Observer(2)
    observer.look(torch, torch.tensor([[0.0, 3.0, 1.0], [5.0, 0.0, 4.0]]))
    observer.look_again(torch.tensor([[0.0, 3.0, 2.0], [5.0, 0.0, 4.5]]))
    first, second = observer.collect(torch, [1, 0], "bfloat16")
    total = math.log(1 + math.exp(3) + math.exp(1))
    head = struct.pack("<BBBBI", 1, 2, 1, 2, 1)
    body = struct.pack("<2i2ff", 1, 2, 3.0, 1.0, total) + struct.pack("<2i2f", 1, 2, 3.0, 2.0)
    assert first.data[:8] == head
    assert first.data[8:24] == body[:16]
    assert struct.unpack("<f", first.data[24:28])[0] == pytest.approx(total, rel=1e-6)
    assert first.data[28:] == body[20:]
    assert (first.margin, first.margin_at) == (1.0, 0)
    assert second.data == struct.pack("<BBBBI", 1, 2, 1, 2, 0)
    assert math.isnan(second.margin)


def test_fewer_steps_than_tokens_are_no_evidence() -> None:
    observer = Observer(2)
    observer.look(torch, torch.zeros(1, 5))
    with pytest.raises(ValueError, match="1 steps were seen and 2 tokens came out"):
        observer.collect(torch, [2], "float32")
