"""What the record of one `generate` says: inputs unpadded, outputs, ends, settings with their sources, seeds, errors."""

import hashlib
import traceback
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import GenerationConfig, LogitsProcessor, StoppingCriteria

import provenance
from provenance import recorder as recorders
from provenance.capture import masks, transformers
from provenance.facts import ROLES, End, Field, Run, Start, State
from provenance.integrity import buffers
from tests.fakes import models

LEFT = ([0, 0, 5, 6, 7], [8, 9, 10, 11, 12], [0, 13, 14, 15, 16])
RIGHT = ([5, 6, 7, 0, 0], [8, 9, 10, 11, 12], [13, 14, 15, 16, 0])
UNPADDED = [(5, 6, 7), (8, 9, 10, 11, 12), (13, 14, 15, 16)]
pytestmark = pytest.mark.filterwarnings("ignore:Using the model-agnostic default:UserWarning")


@pytest.fixture(autouse=True)
def _no_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVENANCE_WRITER", "off")


def _mask(rows: tuple[list[int], ...]) -> Any:
    return (torch.tensor(rows) != 0).long()


def _call(db: Path, model: Any, *args: Any, **kwargs: Any) -> tuple[Any, Run]:
    """Record one call and read it back."""
    result = provenance.wrap(model).generate(*args, **kwargs)
    return result, models.last(db)


def _value(run: Run, name: str) -> object:
    found = run.fields[name]
    assert found.state is State.VALUE, found
    return found.value


def _roles(db: Path, kind: type) -> list[str]:
    """Name the payloads in the journal's records of one kind."""
    found = [record for record in models.journal(db) if isinstance(record, kind)]
    return [ROLES[item.role] for record in found for item in _payloads(record)]


def _payloads(record: Any) -> Any:
    return (record.request if isinstance(record, Start) else record.output).payloads


# -- inputs -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("rows", "given", "side", "origin"),
    [
        (LEFT, True, "left", "call"),
        (RIGHT, True, "right", "call"),
        (LEFT, False, "left", "inferred from the padding token"),
        (RIGHT, False, "right", "inferred from the padding token"),
        (([0, 5, 6, 7, 8], [8, 9, 10, 11, 0], [13, 14, 15, 16, 17]), True, "left+right", "call"),
    ],
)
def test_each_sequence_is_recorded_without_its_padding(
    rows: tuple[list[int], ...], given: bool, side: str, origin: str, db: Path
) -> None:
    more = {"attention_mask": _mask(rows)} if given else {}
    _, run = _call(db, models.llama(), models.tensor(*rows), max_new_tokens=3, **more)
    unpadded = [tuple(token for token in row if token) for row in rows]
    assert [sequence.input_ids for sequence in run.sequences] == unpadded
    assert [sequence.padding for sequence in run.sequences] == [5 - len(row) for row in unpadded]
    assert _value(run, "batch.padding_side") == side
    assert _value(run, "batch.mask_given") is given
    assert _value(run, "batch.mask_origin") == origin
    assert _value(run, "batch.size") == 3
    assert _value(run, "batch.max_length") == 5
    assert _value(run, "batch.sequence_lengths") == [len(row) for row in unpadded]


def test_a_sequence_has_one_input_key_alone_and_in_any_batch(db: Path) -> None:
    model = provenance.wrap(models.llama())
    model.generate(models.tensor([5, 6, 7]), max_new_tokens=2)
    model.generate(models.tensor(*LEFT), attention_mask=_mask(LEFT), max_new_tokens=2)
    model.generate(models.tensor(*RIGHT), max_new_tokens=2)
    alone, left, right = (run.sequences[0].input_key for run in models.runs(db))
    assert alone == left == right != ""


def test_without_padding_there_is_no_side(db: Path) -> None:
    _, run = _call(db, models.llama(), models.tensor([5, 6], [7, 8]), max_new_tokens=2)
    assert run.fields["batch.padding_side"].state is State.NOT_APPLICABLE
    assert _value(run, "batch.mask_origin") == "all ones"
    assert [sequence.padding for sequence in run.sequences] == [0, 0]


@pytest.mark.parametrize("changes", [{"pad_token_id": None}, {"pad_token_id": 5, "eos_token_id": 5}])
def test_no_mask_is_inferred_where_transformers_infers_none(changes: dict[str, Any], db: Path) -> None:
    """Without a padding token, or with one that is an end too, every position is attended to."""
    _, run = _call(db, models.llama(), models.tensor([5, 6, 7], [5, 5, 8]), max_new_tokens=2, **changes)
    assert [sequence.input_ids for sequence in run.sequences] == [(5, 6, 7), (5, 5, 8)]
    assert _value(run, "batch.mask_origin") == "all ones"


@pytest.mark.parametrize("where", ["call", "configuration", "model"])
def test_a_mask_is_inferred_from_the_padding_token_whoever_set_it(where: str, db: Path) -> None:
    model, more = models.llama(), {}
    if where == "call":
        more = {"pad_token_id": 7}
    elif where == "configuration":
        more = {"generation_config": GenerationConfig(pad_token_id=7, eos_token_id=2)}
    else:
        model.generation_config.pad_token_id = 7
    _, run = _call(db, model, models.tensor([7, 7, 9], [8, 9, 10]), max_new_tokens=2, **more)
    assert [sequence.input_ids for sequence in run.sequences] == [(9,), (8, 9, 10)]


def test_a_mask_with_holes_is_kept_whole(db: Path) -> None:
    mask = torch.tensor([[1, 0, 1, 1, 1], [1, 1, 1, 1, 1]])
    rows = ([5, 6, 7, 8, 9], [10, 11, 12, 13, 14])
    provenance.wrap(models.llama()).generate(models.tensor(*rows), attention_mask=mask, max_new_tokens=2)
    (start,) = [record for record in models.journal(db) if isinstance(record, Start)]
    kept = [item for item in start.request.payloads if ROLES[item.role] == "prompt.mask"]
    assert [list(buffers.parse(item.data).numbers()) for item in kept] == mask.tolist()
    run = models.last(db)
    assert [sequence.input_ids for sequence in run.sequences] == list(map(tuple, rows))
    assert [sequence.padding for sequence in run.sequences] == [0, 0]
    assert _value(run, "batch.mask_holes") == [[[1, 1]], []]
    assert run.fields["batch.padding_side"].state is State.NOT_APPLICABLE


def test_a_hidden_token_that_is_no_padding_stays_in_the_prompt(db: Path) -> None:
    rows = ([0, 0, 7, 8, 9], [5, 6, 7, 8, 0])
    mask = torch.tensor([[0, 0, 0, 1, 1], [0, 1, 1, 0, 0]])
    _, run = _call(db, models.llama(), models.tensor(*rows), attention_mask=mask, max_new_tokens=2)
    assert [sequence.input_ids for sequence in run.sequences] == [(7, 8, 9), (5, 6, 7, 8)]
    assert [sequence.padding for sequence in run.sequences] == [2, 1]
    assert _value(run, "batch.mask_holes") == [[[0, 0]], [[0, 0], [3, 3]]]
    assert _value(run, "batch.padding_side") == "left+right"


def test_where_nobody_names_a_padding_token_it_is_what_all_hidden_ends_hold(db: Path) -> None:
    nameless = {"pad_token_id": None, "eos_token_id": None}
    rows, mask = ([40, 40, 7], [5, 6, 7]), torch.tensor([[0, 0, 1], [1, 1, 1]])
    for ids, kept in ((rows, (7,)), (([40, 41, 7], [5, 6, 7]), (40, 41, 7))):
        _, run = _call(db, _nameless(), models.tensor(*ids), attention_mask=mask, max_new_tokens=2, **nameless)
        assert run.sequences[0].input_ids == kept


def test_what_a_mask_of_another_shape_hides_is_not_known() -> None:
    request = {"input_ids": models.tensor([5, 6, 7]), "attention_mask": torch.ones(1, 9)}
    found = transformers.read_inputs(models.llama(), request, None).facts["batch.mask_holes"]
    assert (found.state, found.reason) == (State.UNKNOWN, "call, of another shape")


def test_of_very_many_hidden_ranges_the_number_is_kept() -> None:
    mask = torch.tensor([[n % 2 == 0 for n in range(301)]])
    (ranges,) = masks.holes(mask, None)
    assert (len(ranges), ranges[-1]) == (65, [150])


def _nameless() -> Any:
    """Build a model without special tokens."""
    model = models.llama(pad_token_id=None, eos_token_id=None, bos_token_id=None)
    model.generation_config.pad_token_id = model.generation_config.eos_token_id = None
    return model


def test_a_hole_makes_another_input_of_the_same_ids(db: Path) -> None:
    model = provenance.wrap(models.llama())
    model.generate(models.tensor([5, 9, 6, 7]), max_new_tokens=2)
    model.generate(models.tensor([5, 9, 6, 7]), attention_mask=torch.tensor([[1, 0, 1, 1]]), max_new_tokens=2)
    plain, holed = (run.sequences[0] for run in models.runs(db))
    assert plain.input_ids == holed.input_ids
    assert plain.input_key != holed.input_key


@pytest.mark.parametrize("how", ["position", "inputs", "input_ids"])
def test_ids_are_recorded_however_they_were_handed_in(how: str, db: Path) -> None:
    args, more = ((models.tensor(),), {}) if how == "position" else ((), {how: models.tensor()})
    _, run = _call(db, models.llama(), *args, max_new_tokens=2, **more)
    assert run.sequences[0].input_ids == tuple(models.PROMPT[0])


def test_ids_beyond_32_bits_are_kept_whole(db: Path) -> None:
    class Wide(type(models.llama())):  # type: ignore[misc]
        def generate(self, input_ids: Any, **kwargs: Any) -> Any:
            return input_ids

    model = models.llama()
    model.__class__ = Wide
    _, run = _call(db, model, torch.tensor([[5, 2**40]]))
    assert run.sequences[0].input_ids == (5, 2**40)


def test_embeddings_are_digested_row_by_row_and_compare(db: Path) -> None:
    model = provenance.wrap(models.llama())
    one = model.get_input_embeddings()(models.tensor([5, 6], [7, 8])).detach()
    other = one.clone()
    other[1, 0, 0] += 1
    for given in (one, one.clone(), other):
        model.generate(inputs_embeds=given, max_new_tokens=2)
    first, again, changed = ([sequence.input_key for sequence in run.sequences] for run in models.runs(db))
    assert first == again
    assert first[0] == changed[0]
    assert first[1] != changed[1]
    assert _value(models.last(db), "batch.size") == 2


@pytest.mark.parametrize(
    ("kind", "name"), [("t5", "decoder_input_ids"), ("llama", "negative_prompt_ids"), ("llama", "attention_mask")]
)
def test_what_stands_beside_the_ids_is_part_of_the_input(kind: str, name: str, db: Path) -> None:
    """Two calls that differ in it alone must not pass for the same question with two answers."""
    model = provenance.wrap(models.MODELS[kind]())
    given: dict[str, Any] = {"input_ids": models.tensor([5, 6, 7])}
    values = [models.tensor([0, 9]), models.tensor([0, 9]), models.tensor([0, 10])]
    if name == "negative_prompt_ids":
        given["guidance_scale"] = 1.5
    if name == "attention_mask":
        given = {"inputs_embeds": model.get_input_embeddings()(models.tensor([5, 6])).detach()}
        values = [models.tensor([0, 1]), models.tensor([0, 1]), models.tensor([1, 1])]
    for value in values:
        model.generate(max_new_tokens=2, **given, **{name: value})
    model.generate(max_new_tokens=2, **given)
    same, again, other, without = (run.sequences[0].input_key for run in models.runs(db))
    assert same == again != other
    assert same != without
    assert (without == other) is (name == "attention_mask")  # a mask of ones is no mask


def test_what_the_caller_writes_into_the_ids_later_is_not_in_the_record(db: Path) -> None:
    ids, mask = models.tensor(*LEFT), _mask(LEFT)
    provenance.wrap(models.llama()).generate(ids, attention_mask=mask, max_new_tokens=2)
    ids.fill_(63)
    mask.fill_(1)
    assert [sequence.input_ids for sequence in models.last(db).sequences] == UNPADDED


def test_what_the_model_writes_into_the_ids_is_not_in_the_record(db: Path) -> None:
    class Writes(type(models.llama())):  # type: ignore[misc]
        def generate(self, input_ids: Any, **kwargs: Any) -> Any:
            return input_ids.add_(1)

    model = models.llama()
    model.__class__ = Writes
    _, run = _call(db, model, models.tensor())
    assert run.sequences[0].input_ids == tuple(models.PROMPT[0])


def test_a_call_without_input_is_recorded_as_such(db: Path) -> None:
    _, run = _call(db, models.llama(), max_new_tokens=3)
    assert _value(run, "input.empty") is True
    assert run.sequences[0].output_ids is not None


# -- outputs ----------------------------------------------------------------------------------------


def test_outputs_are_the_new_tokens_and_nothing_else(db: Path) -> None:
    result, run = _call(
        db, models.llama(), models.tensor(*LEFT), attention_mask=_mask(LEFT), max_new_tokens=6, eos_token_id=None
    )
    assert [sequence.output_ids for sequence in run.sequences] == [tuple(row) for row in result[:, 5:].tolist()]


@pytest.mark.parametrize("settings", [{"do_sample": True}, {"num_beams": 3}])
def test_several_returned_sequences_belong_to_their_prompts(settings: dict[str, Any], db: Path) -> None:
    torch.manual_seed(2)
    result, run = _call(
        db, models.llama(), models.tensor([5, 6], [7, 8]), max_new_tokens=4, num_return_sequences=3, eos_token_id=None,
        **settings,
    )  # fmt: skip
    assert [(sequence.row, sequence.ret) for sequence in run.sequences] == [(r, n) for r in range(2) for n in range(3)]
    assert [sequence.output_ids for sequence in run.sequences] == [tuple(row) for row in result[:, 2:].tolist()]
    assert [sequence.input_ids for sequence in run.sequences] == [(5, 6)] * 3 + [(7, 8)] * 3


def test_an_encoder_decoder_has_its_prompt_in_the_encoder_and_its_output_after_the_start(db: Path) -> None:
    result, run = _call(
        db, models.t5(), models.tensor(*RIGHT), attention_mask=_mask(RIGHT), max_new_tokens=6, eos_token_id=None
    )
    assert [sequence.input_ids for sequence in run.sequences] == UNPADDED
    assert [sequence.output_ids for sequence in run.sequences] == [tuple(row) for row in result[:, 1:].tolist()]
    assert _value(run, "model.is_encoder_decoder") is True


def test_an_encoder_decoder_without_a_mask_attends_to_its_padding_and_the_record_says_so(db: Path) -> None:
    _, run = _call(db, models.t5(), models.tensor(*RIGHT), max_new_tokens=2)
    assert [sequence.input_ids for sequence in run.sequences] == [tuple(row) for row in RIGHT]
    assert _value(run, "batch.mask_origin") == "all ones"


@pytest.mark.parametrize("embeds", [False, True])
def test_outputs_are_found_with_and_without_ids_in_front(embeds: bool, db: Path) -> None:
    model = models.llama()
    given = {"inputs_embeds": model.get_input_embeddings()(models.tensor()).detach()}
    if not embeds:
        given = {"input_ids": models.tensor()}
    result, run = _call(db, model, max_new_tokens=5, eos_token_id=None, **given)
    assert run.sequences[0].output_ids == tuple(result[0, -5:].tolist())


def test_a_result_that_is_no_ids_is_digested_and_says_so(db: Path) -> None:
    class Sings(type(models.llama())):  # type: ignore[misc]
        def generate(self, input_ids: Any, **kwargs: Any) -> Any:
            return torch.linspace(0, 1, 100).reshape(1, 100)

    model = models.llama()
    model.__class__ = Sings
    result, run = _call(db, model, models.tensor())
    assert result.shape == (1, 100)
    assert run.status == "ok"
    assert run.sequences[0].finish == "returned"
    assert run.sequences[0].output_key != ""
    assert run.sequences[0].no_evidence == "the output is not token ids"


# -- why it ended -----------------------------------------------------------------------------------


class AfterThree(StoppingCriteria):  # type: ignore[misc]
    """Stops every row once a sequence is so long: three tokens behind the prompt of most tests."""

    def __init__(self, length: int = 8) -> None:
        self.length = length

    def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
        return torch.full((len(input_ids),), input_ids.shape[1] >= self.length)


def _free(model: Any) -> list[int]:
    """Return what the model says if nothing stops it."""
    answer: list[int] = model.generate(models.tensor(), max_new_tokens=12, eos_token_id=None)[0, 5:].tolist()
    return answer


@pytest.mark.parametrize(
    ("settings", "finish", "count"),
    [
        ({"max_new_tokens": 4}, "length", 4),
        ({"max_length": 9}, "length", 4),
        ({"max_new_tokens": 9, "stopping_criteria": [AfterThree()]}, "criteria", 3),
        ({"max_new_tokens": 9, "max_time": 1e-9}, "max_time", 1),
    ],
)
def test_the_reason_of_the_end_is_recorded(settings: dict[str, Any], finish: str, count: int, db: Path) -> None:
    _, run = _call(db, models.llama(), models.tensor(), eos_token_id=None, **settings)
    (sequence,) = run.sequences
    assert (sequence.finish, len(sequence.output_ids or ())) == (finish, count)


def test_an_end_token_ends_the_output_and_is_part_of_it(db: Path) -> None:
    model = models.llama()
    free = _free(model)
    _, run = _call(db, model, models.tensor(), max_new_tokens=12, eos_token_id=[2, free[4]])
    (sequence,) = run.sequences
    expected = free[: free.index(free[4]) + 1]
    assert (sequence.finish, sequence.output_ids) == ("eos", tuple(expected))


def test_an_end_token_at_the_very_last_place_is_an_end(db: Path) -> None:
    model = models.llama()
    first = _free(model)[0]
    _, run = _call(db, model, models.tensor(), max_new_tokens=1, eos_token_id=first)
    assert run.sequences[0].finish == "eos"


def test_a_stop_string_is_recorded(db: Path) -> None:
    model, tokenizer = models.llama(), models.letters()
    third = tokenizer.decode(_free(model)[2:3])
    _, run = _call(
        db, model, models.tensor(), max_new_tokens=12, eos_token_id=None, stop_strings=[third], tokenizer=tokenizer
    )
    (sequence,) = run.sequences
    assert sequence.finish == "stop_string"
    assert sequence.output_text is not None
    assert sequence.output_text.endswith(third)


def test_each_row_of_a_batch_has_its_own_end(db: Path) -> None:
    model = models.llama()
    free = model.generate(models.tensor(*LEFT), attention_mask=_mask(LEFT), max_new_tokens=8, eos_token_id=None)[:, 5:]
    end = int(free[1, 2])
    result, run = _call(db, model, models.tensor(*LEFT), attention_mask=_mask(LEFT), max_new_tokens=8, eos_token_id=end)
    for sequence, row in zip(run.sequences, result[:, 5:].tolist(), strict=True):
        if end in row:
            assert (sequence.finish, sequence.output_ids) == ("eos", tuple(row[: row.index(end) + 1]))
        else:
            assert (sequence.finish, sequence.output_ids) == ("length", tuple(row))
    assert run.sequences[1].finish == "eos"


class Silence(LogitsProcessor):  # type: ignore[misc]
    """Makes the model say the padding token from the third new token on."""

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        if input_ids.shape[1] < 7:
            return scores
        return torch.full_like(scores, -1e4).index_fill_(1, torch.tensor([models.PAD]), 0.0)


def test_padding_behind_a_row_that_criteria_ended_is_no_output(db: Path) -> None:
    class First(StoppingCriteria):  # type: ignore[misc]
        """Stops the first row after two tokens."""

        def __call__(self, input_ids: Any, scores: Any, **kwargs: Any) -> Any:
            return torch.tensor([input_ids.shape[1] >= 7, False])

    result, run = _call(
        db, models.llama(), models.tensor([5, 6, 7, 8, 9], [10, 11, 12, 13, 14]), max_new_tokens=6,
        stopping_criteria=[First()], min_new_tokens=6,
    )  # fmt: skip
    assert result[0, 7:].tolist() == [models.PAD] * 4
    assert run.sequences[0].output_ids == tuple(result[0, 5:7].tolist())
    assert run.sequences[0].finish == "criteria"
    assert run.sequences[1].output_ids == tuple(result[1, 5:].tolist())
    assert len(run.sequences[0].steps) == 2


@pytest.mark.parametrize(
    ("rows", "end", "criteria"),
    [(1, None, []), (3, None, []), (1, models.EOS, []), (3, models.EOS, []), (1, models.EOS, [AfterThree(20)])],
)
def test_padding_tokens_that_the_model_said_itself_are_output(
    rows: int, end: int | None, criteria: list[Any], db: Path
) -> None:
    result, run = _call(
        db, models.llama(), models.tensor(*models.PROMPT * rows), max_new_tokens=5, eos_token_id=end,
        logits_processor=[Silence()], stopping_criteria=criteria,
    )  # fmt: skip
    for sequence, row in zip(run.sequences, result[:, 5:].tolist(), strict=True):
        assert row[2:] == [models.PAD] * 3
        assert sequence.output_ids == tuple(row)
        assert sequence.finish == "length"


# -- settings ---------------------------------------------------------------------------------------


def _setting(run: Run, name: str) -> tuple[object, str]:
    found = run.fields[f"generation.{name}"]
    return found.value, found.source


def test_each_setting_names_the_hand_that_set_it(db: Path) -> None:
    model = models.llama()
    model.generation_config.repetition_penalty = 1.25
    _, run = _call(
        db, model, models.tensor(), generation_config=GenerationConfig(do_sample=True, temperature=0.5),
        max_new_tokens=3, top_p=0.75,
    )  # fmt: skip
    assert _setting(run, "max_new_tokens") == (3, "call")
    assert _setting(run, "top_p") == (0.75, "call")
    assert _setting(run, "temperature") == (0.5, "call.generation_config")
    assert _setting(run, "do_sample") == (True, "call.generation_config")
    assert _setting(run, "repetition_penalty") == (1.25, "model")
    assert _setting(run, "top_k") == (50, "library")
    assert _setting(run, "mode") == ("sample", "resolved")
    assert run.fields["generation.min_p"].state is State.UNSET


def test_the_same_number_as_integer_and_as_float_is_one_setting(db: Path) -> None:
    model = provenance.wrap(models.llama())
    for limit in (600, 600.0):
        model.generate(models.tensor(), max_new_tokens=2, max_time=limit)
    one, other = models.runs(db)
    assert one.digests["settings"] == other.digests["settings"]


@pytest.mark.parametrize(
    ("settings", "expected"),
    [
        ({"max_new_tokens": 4}, {"max_new_tokens": (4, "call"), "max_length": None}),
        ({"max_length": 9}, {"max_length": (9, "call"), "max_new_tokens": None}),
        ({}, {"max_new_tokens": (20, "library"), "max_length": None}),
        ({"max_new_tokens": 4, "min_new_tokens": 2},
         {"min_new_tokens": (2, "call"), "min_length": None, "max_new_tokens": (4, "call")}),
        ({"max_new_tokens": 4, "min_length": 7}, {"min_length": (7, "call")}),
    ],
)  # fmt: skip
def test_lengths_stand_as_they_were_decided(settings: dict[str, Any], expected: dict[str, Any], db: Path) -> None:
    _, run = _call(db, models.llama(), models.tensor(), **settings)
    for name, value in expected.items():
        if value is None:
            assert run.fields[f"generation.{name}"].state is not State.VALUE, name
        else:
            assert _setting(run, name) == value, name


def test_prompts_of_any_length_share_their_settings(db: Path) -> None:
    model = provenance.wrap(models.llama())
    for rows in ([5, 6], [5, 6, 7, 8], [5] * 9):
        model.generate(models.tensor(rows), max_new_tokens=2)
        model.generate(models.tensor(rows))
    digests = [run.digests["settings"] for run in models.runs(db)]
    assert len(set(digests[0::2])) == 1
    assert len(set(digests[1::2])) == 1
    assert digests[0] != digests[1]


def test_code_that_the_caller_handed_in_is_named(db: Path) -> None:
    _, run = _call(
        db, models.llama(), models.tensor(), max_new_tokens=3, logits_processor=[Silence()],
        stopping_criteria=[AfterThree()], min_new_tokens=2,
    )  # fmt: skip
    assert _setting(run, "logits_processor") == ([f"{__name__}.Silence"], "call")
    assert _setting(run, "stopping_criteria") == ([f"{__name__}.AfterThree"], "call")
    processors, source = _setting(run, "logits_processors")
    assert source == "resolved"
    assert isinstance(processors, list)
    assert processors[-2:] == ["MinNewTokensLengthLogitsProcessor", "Silence"]


@pytest.mark.parametrize("how", ["call", "configuration"])
def test_the_key_of_a_watermark_is_compared_and_never_kept(how: str, db: Path) -> None:
    model = provenance.wrap(models.llama())
    for key in (71551700912345, 71551700912345, 71551700912346):
        mark = {"greenlist_ratio": 0.25, "bias": 2.5, "hashing_key": key}
        given = {"watermarking_config": mark}
        if how == "configuration":
            given = {"generation_config": GenerationConfig(**models.SPECIAL, **given)}
        model.generate(models.tensor(), max_new_tokens=2, **given)
    found = [run.fields["generation.watermarking_config"] for run in models.runs(db)]
    assert found[0] == found[1] != found[2]
    assert isinstance(found[0].value, dict)
    assert found[0].value["bias"] == 2.5
    everything = b"".join(path.read_bytes() for path in db.parent.rglob("*") if path.is_file())
    assert b"7155170091234" not in everything


def test_settings_that_could_not_be_resolved_are_requested_ones_and_say_so(db: Path) -> None:
    class Own(type(models.llama())):  # type: ignore[misc]
        def generate(self, input_ids: Any, **kwargs: Any) -> Any:
            return input_ids

    model = models.llama()
    model.__class__ = Own
    _, run = _call(db, model, models.tensor(), temperature=0.5)
    assert run.fields["generation.temperature"].value == 0.5
    assert run.fields["generation.temperature"].reason == "requested"
    assert run.fields["generation.mode"].state is State.UNKNOWN
    assert run.fields["generation.mode"].reason == "Own has a generate of its own"


# -- seeds and random states ------------------------------------------------------------------------


@pytest.mark.parametrize("sample", [False, True])
def test_seed_and_random_state_are_those_before_the_call(sample: bool, db: Path) -> None:
    torch.manual_seed(4321)
    torch.rand(3)
    state = torch.get_rng_state().numpy().tobytes()
    provenance.wrap(models.llama()).generate(models.tensor(), max_new_tokens=3, do_sample=sample, eos_token_id=None)
    kept = [
        item.data
        for record in models.journal(db) if isinstance(record, End)
        for item in record.output.payloads if ROLES[item.role] == "rng.torch_cpu"
    ]  # fmt: skip
    assert kept == ([state] if sample else [])
    run = models.last(db)
    assert _value(run, "seed.torch_initial") == 4321
    assert _value(run, "rng.torch_cpu_state_sha256") == "sha256:" + hashlib.sha256(state).hexdigest()
    assert _value(run, "rng.consumed") is sample


def test_a_kept_random_state_draws_the_same_tokens_again(db: Path) -> None:
    torch.manual_seed(99)
    torch.rand(17)
    model = provenance.wrap(models.llama())
    result = model.generate(models.tensor(), max_new_tokens=12, do_sample=True, eos_token_id=None)
    (state,) = [
        item.data
        for record in models.journal(db) if isinstance(record, End)
        for item in record.output.payloads if ROLES[item.role] == "rng.torch_cpu"
    ]  # fmt: skip
    torch.manual_seed(1)
    torch.set_rng_state(torch.frombuffer(bytearray(state), dtype=torch.uint8))
    again = model.generate(models.tensor(), max_new_tokens=12, do_sample=True, eos_token_id=None)
    assert torch.equal(result, again)


# -- text -------------------------------------------------------------------------------------------


def test_text_is_decoded_with_the_tokenizer(db: Path) -> None:
    tokenizer = models.letters()
    model = provenance.wrap(models.llama(), tokenizer=tokenizer)
    model.generate(models.tensor([models.BOS, 5, 6, 7]), max_new_tokens=4, eos_token_id=None)
    (sequence,) = models.last(db).sequences
    assert sequence.input_text == "<s>bcd"
    assert sequence.output_text == tokenizer.decode(list(sequence.output_ids or ()), skip_special_tokens=True)


def test_a_tokenizer_handed_to_the_call_is_used(db: Path) -> None:
    _, run = _call(
        db, models.llama(), models.tensor(), max_new_tokens=3, tokenizer=models.letters(), stop_strings=["\n"]
    )
    assert run.sequences[0].input_text == "bcdef"
    assert _value(run, "tokenizer.class") is not None


def test_without_a_tokenizer_the_text_is_unknown_with_that_reason(db: Path) -> None:
    _, run = _call(db, models.llama(), models.tensor(), max_new_tokens=3)
    (sequence,) = run.sequences
    assert (sequence.input_text, sequence.output_text) == (None, None)
    assert run.fields["tokenizer.sha256"].state is State.UNKNOWN
    assert "no tokenizer" in run.fields["tokenizer.sha256"].reason
    assert not [role for role in _roles(db, Start) + _roles(db, End) if role.endswith(".text")]


def test_a_tokenizer_that_fails_costs_the_text_alone(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tokenizer = models.letters()
    monkeypatch.setattr(type(tokenizer), "decode", _refuse)
    model = provenance.wrap(models.llama(), tokenizer=tokenizer)
    model.generate(models.tensor(), max_new_tokens=3)
    (sequence,) = models.last(db).sequences
    assert sequence.input_ids == tuple(models.PROMPT[0])
    assert sequence.output_text is None
    assert len(sequence.steps) == 3
    recorder = recorders.current()
    assert recorder is not None
    assert recorder.errors == 0


def _refuse(*arguments: Any, **options: Any) -> Any:
    raise RuntimeError("this tokenizer cannot decode")


# -- errors -----------------------------------------------------------------------------------------


class Raises(LogitsProcessor):  # type: ignore[misc]
    """Raises what it was given, at the third token."""

    def __init__(self, error: BaseException) -> None:
        self.error = error

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        if input_ids.shape[1] == 7:
            raise self.error
        return scores


@pytest.mark.parametrize(
    ("error", "status", "kind"),
    [
        (ValueError("the third token was too much"), "error", "ValueError"),
        (torch.OutOfMemoryError("no room left"), "error", "torch.OutOfMemoryError"),
        (KeyboardInterrupt(), "aborted", "KeyboardInterrupt"),
        (SystemExit(3), "error", "SystemExit"),
    ],
    ids=lambda item: type(item).__name__ if isinstance(item, BaseException) else str(item),
)
def test_an_exception_is_recorded_with_its_prompt_and_raised_unchanged(
    error: BaseException, status: str, kind: str, db: Path
) -> None:
    model = provenance.wrap(models.llama(), tokenizer=models.letters())
    with pytest.raises(type(error)) as raised:
        model.generate(models.tensor(), max_new_tokens=8, temperature=0.5, logits_processor=[Raises(error)])
    assert raised.value is error
    assert (error.__cause__, error.__context__, getattr(error, "__notes__", [])) == (None, None, [])
    assert traceback.extract_tb(error.__traceback__)[-1].name == "__call__"
    run = models.last(db)
    assert run.status == status
    assert run.error.partition(":")[0] == kind
    assert str(error) in run.error
    (sequence,) = run.sequences
    assert (sequence.input_ids, sequence.input_text) == (tuple(models.PROMPT[0]), "bcdef")
    assert sequence.output_ids is None
    assert _setting(run, "max_new_tokens") == (8, "call")
    assert run.duration_ns is not None
    assert run.duration_ns > 0


def test_a_failed_call_leaves_nothing_behind_for_the_next(db: Path) -> None:
    model = provenance.wrap(models.llama())
    bare = models.llama().generate(models.tensor(), max_new_tokens=4)
    with pytest.raises(ValueError, match="once"):
        model.generate(models.tensor(), max_new_tokens=8, logits_processor=[Raises(ValueError("once"))])
    assert torch.equal(model.generate(models.tensor(), max_new_tokens=4), bare)
    failed, ok = models.runs(db)
    assert (failed.status, ok.status) == ("error", "ok")
    assert len(ok.sequences[0].steps) == 4


def test_fields_of_the_call_say_what_was_running(db: Path) -> None:
    _, run = _call(db, models.gpt2(), models.tensor(), max_new_tokens=2)
    assert (run.kind, run.runtime, run.operation, run.status) == ("call", "transformers", "generate", "ok")
    assert _value(run, "model.class") == "transformers.models.gpt2.modeling_gpt2.GPT2LMHeadModel"
    assert _value(run, "model.dtype") == "float32"
    assert _value(run, "device.in_use") == ["cpu"]
    assert _value(run, "context.call_index") == 1
    assert run.fields["torch.version"] == Field("torch.version", torch.__version__)


@pytest.mark.parametrize(
    ("capture", "prompt", "key"),
    [("full", tuple(models.PROMPT[0]), True), ("digest", None, True), ("off", None, False)],
)
def test_what_is_kept_is_decided_before_a_byte_leaves_the_process(
    capture: str, prompt: object, key: bool, db: Path
) -> None:
    provenance.init(capture=capture)
    model = provenance.wrap(models.llama(), tokenizer=models.letters())
    ids = [41, 42, 43, 44, 45, 46, 47, 48]
    model.generate(models.tensor(ids), max_new_tokens=2, do_sample=True)
    spool = b"".join(path.read_bytes() for path in db.parent.rglob("*.seg"))
    packed = b"".join(number.to_bytes(4, "little") for number in ids)
    text = models.letters().decode(ids).encode()
    assert (packed in spool) is (capture == "full")
    assert (text in spool) is (capture == "full")
    (sequence,) = models.last(db).sequences
    assert (sequence.input_ids == tuple(ids)) is (prompt is not None)
    assert bool(sequence.input_key) is key


# -- code of the caller's -----------------------------------------------------------------------------


class _Ban(LogitsProcessor):  # type: ignore[misc]
    def __init__(self, token: int, **more: Any) -> None:
        self.token = token
        self.seen = 0
        self.__dict__.update(more)

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        self.seen += 1
        scores = scores.clone()
        scores[:, self.token] = -1e9
        return scores

    @property
    def trap(self) -> Any:
        raise AssertionError("nobody may ask")


class _Slots:
    __slots__ = ("token",)

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores


def test_the_plain_values_of_processors_are_recorded_as_they_were_before_the_call(db: Path) -> None:
    more = {
        "api_key": "hf_abcdefghijklmnop1234",
        "_inner": 3,
        "table": [1],
        "word": "x",
        "long": "x" * 300,
        "half": 0.5,
    }
    banned = _Ban(7, **more)
    _, run = _call(db, models.llama(), models.tensor(), max_new_tokens=3, logits_processor=[banned, _Slots()])
    assert _value(run, "generation.logits_processor_values") == [
        {"api_key": "[redacted]", "half": 0.5, "seen": 0, "token": 7, "word": "x"},
        {},
    ]
    assert banned.seen == 3
    assert "generation.stopping_criteria_values" not in run.fields


SECRET = "hf_abcdefghijklmnop1234"


def _chosen(token: int) -> Any:
    return lambda ids, scores: torch.nn.functional.one_hot(torch.tensor([token]), 64).float() + scores * 0


@pytest.mark.parametrize(
    "name", ["logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "custom_generate"]
)
def test_code_of_the_caller_is_told_apart_by_what_it_does(db: Path, name: str) -> None:
    make: dict[str, Any] = {
        "logits_processor": lambda n: [_chosen(n)],
        "stopping_criteria": lambda n: [lambda ids, _: torch.tensor([ids.shape[1] > n])],
        "prefix_allowed_tokens_fn": lambda n: lambda row, ids: [n],
        "custom_generate": lambda n: lambda model, input_ids, **_: input_ids + n,
    }
    found = []
    for number in (7, 7, 8):
        _, run = _call(db, models.llama(), models.tensor(), max_new_tokens=4, **{name: make[name](number)})
        found.append(run.fields[f"generation.{name}_code"])
    assert found[0] == found[1]
    assert found[0] != found[2]
    assert found[0].state is State.VALUE
    assert found[0].source == "call"


def test_code_that_cannot_be_seen_is_unknown_and_a_secret_in_it_leaves_no_trace(db: Path) -> None:
    held = models.llama()
    unseen, sealed = (lambda ids, scores: (scores, held)[0]), (lambda ids, scores, key=SECRET: scores)
    _, run = _call(db, models.llama(), models.tensor(), max_new_tokens=2, logits_processor=[unseen])
    said = run.fields["generation.logits_processor_code"]
    assert said.state is State.UNKNOWN
    assert said.reason == "it holds a model or a layer (held), whose weights are not those of this one"
    _, run = _call(db, models.llama(), models.tensor(), max_new_tokens=2, logits_processor=[sealed])
    assert _value(run, "generation.logits_processor_code")[0].startswith("hmac:")  # type: ignore[index]
    assert all(SECRET.encode() not in path.read_bytes() for path in db.parent.rglob("*") if path.is_file())


def test_only_so_many_values_of_one_processor_are_kept(db: Path) -> None:
    many = _Ban(7, **{f"n{n:02}": n for n in range(40)})
    _, run = _call(db, models.llama(), models.tensor(), max_new_tokens=1, logits_processor=[many])
    assert [len(item) for item in _value(run, "generation.logits_processor_values")] == [16]  # type: ignore[attr-defined]
