"""The history of equal inputs as the store tells it: only what is comparable, each field once, in bounded memory."""

from dataclasses import replace
from itertools import pairwise
from pathlib import Path
from typing import Any

import pytest
from sqlalchemy import Engine

from provenance.errors import BadSetting
from provenance.facts import Field, Fingerprint, SequenceEnd
from provenance.settings import Places
from provenance.store import database, history, queries
from provenance.store.history import Chosen, Seen
from tests.fakes.records import NOTHING, WALL, Calls, drained, ids, is_one_sentence, places, run_id

THREADS = {n: Fingerprint.of("switches", [Field("torch.num_threads", n), Field.unset("torch.matmul")]) for n in (1, 2)}
OTHER = Fingerprint.of("model", [Field("model.class", "Other"), Field("model.name_or_path", "makers/other")])
KNOWN = "sha256:" + "00" * 32


class Story:
    """Records calls one after the other, each with its prompt, its output and what is special about it."""

    def __init__(self, folder: Path) -> None:
        self.spots = places(folder)
        self.calls = Calls(self.spots.spool)
        self.calls.prints()
        for item in (*THREADS.values(), OTHER):
            self.calls.note(item.scope, item.raw, item.document)
        self.number = 0

    def call(self, prompt: int, output: int, facts: dict[str, Any] | None = None, **changes: Any) -> int:
        self.number += 1
        begin: dict[str, Any] = {
            name: changes.pop(name) for name in ("switches", "model", "wall_ns") if name in changes
        }
        begin |= {"payloads": (ids("prompt.ids", [prompt]),), "facts": facts or {}}
        self.calls.call(self.number, begin, payloads=(ids("output.ids", [output]),), **changes)
        return self.number

    def engine(self) -> Engine:
        self.calls.close()
        spots: Places = drained(self.spots)
        return database.reading(spots.url, spots.database)


def read(engine: Engine, **chosen: Any) -> list[list[Seen]]:
    return read_chosen(engine, Chosen(**chosen))


def read_chosen(engine: Engine, chosen: Chosen) -> list[list[Seen]]:
    return list(history.groups(engine, chosen))


def test_runs_of_one_input_come_together_with_all_that_can_act(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.call(1, 8, {"batch.size": 1, "context.call_index": 1, "text": "no"}, switches=THREADS[1].raw)
    story.call(2, 8)
    story.call(1, 9, {"batch.size": 2, "batch.mask_given": {"$field": {"state": "unknown", "reason": "?"}},
                      "batch.padding_side": {"$field": {"state": "not_applicable", "reason": "-"}}}, switches=THREADS[2].raw)  # fmt: skip
    ((one, other),) = read(story.engine())
    assert one.output != other.output
    assert one.at < other.at
    assert one.own == {"batch.size": 1, "batch.position": 0, "batch.padding_tokens": 0}
    assert other.own["batch.padding_side"] == ("not_applicable",)
    assert "batch.mask_given" not in other.own
    assert one.shared[0] is other.shared[0]
    assert one.shared[1] == {"torch.num_threads": 1, "torch.matmul": ("unset",)}
    assert one.shared[0] == {"os.name": "linux"}  # the number of GPUs is not known
    assert one.shared[3]["generation.temperature"] == 0.7


def test_weights_are_fields_once_they_are_known(tmp_path: Path) -> None:
    story = Story(tmp_path)
    root = story.calls.weights()
    first = story.call(1, 8)
    story.call(1, 8, weights=root)
    ((one, other),) = read(story.engine())
    assert first == 1
    assert one.shared[4] == {}
    assert list(other.shared[4]) == ["weights.loaded_root"]


def test_a_call_without_model_and_settings_has_none_of_their_fields(tmp_path: Path) -> None:
    story = Story(tmp_path)
    for _ in range(2):
        story.call(1, 8, model=NOTHING, settings=NOTHING)
    ((one, _),) = read(story.engine())
    assert one.shared[2:] == ({}, {}, {}, {})
    assert one.own == {"batch.position": 0, "batch.padding_tokens": 0}


def test_what_is_no_evidence_is_left_out(tmp_path: Path) -> None:
    story = Story(tmp_path)
    story.call(1, 8)
    story.call(1, 8, status="error")
    story.calls.start(77, payloads=(ids("prompt.ids", [1]),))
    assert read(story.engine()) == []


def test_a_sampled_run_meets_only_those_that_drew_alike(tmp_path: Path) -> None:
    story = Story(tmp_path)
    unknown = {"$field": {"state": "unknown", "reason": "no"}}
    for output, state in enumerate((KNOWN, KNOWN.replace("00", "11"), KNOWN, unknown, unknown, None, None)):
        end = {"sampled": True} | ({"rng.torch_cpu_state_sha256": state} if state is not None else {})
        seq = story.calls.start(output + 1, payloads=(ids("prompt.ids", [1]),))
        story.calls.end(output + 1, seq, facts=end, payloads=(ids("output.ids", [output]),))
    ((one, other),) = read(story.engine())
    assert (one.at[1], other.at[1]) == (1, 3)
    assert one.own["rng.torch_cpu_state_sha256"] == KNOWN


def test_where_nothing_is_sampled_the_random_state_is_no_field() -> None:
    assert not history.acts("rng.torch_cpu_state_sha256", idle=True)
    assert history.acts("rng.torch_cpu_state_sha256", idle=False)
    assert not history.acts("generation.temperature", idle=True)
    assert not history.acts("generation.output_scores", idle=False)
    assert not history.acts("not a field", idle=False)


@pytest.fixture
def engine(tmp_path: Path) -> Engine:
    story = Story(tmp_path)
    for n in range(6):
        story.call(1, n, wall_ns=WALL + 1000 * n)
        story.call(2, n, wall_ns=WALL + 1000 * n + 1, model=OTHER.raw)
    return story.engine()


def test_runs_are_chosen_by_input_model_time_and_number(engine: Engine) -> None:
    def sizes(**chosen: Any) -> list[int]:
        return sorted(len(group) for group in read(engine, **chosen))

    (key,) = history.inputs_of(engine, run_id(1))
    assert sizes() == [6, 6]
    assert sizes(inputs=[key]) == [6]
    assert sizes(inputs=[]) == []
    assert sizes(models=["other"]) == sizes(models=["Other"]) == [6]
    assert sizes(models=["makers/other", "tiny"]) == [6, 6]
    assert sizes(models=["none"]) == sizes(models=["ther"]) == sizes(models=["%"]) == sizes(models=["\0\ud800"]) == []
    assert sizes(since=WALL + 3000) == [3, 3]
    assert sizes(limit=5) == [2, 3]
    assert sizes(limit=1) == []
    assert sizes(limit=3, inputs=[key]) == [3]
    assert sizes(limit=500) == [6, 6]
    assert sizes(without=[run_id(1), run_id(3)]) == [4, 6]


def test_what_bears_on_two_runs_is_their_inputs_and_models_without_the_two(engine: Engine) -> None:
    one, three, two = (queries.load(engine, run_id(n)) for n in (1, 3, 2))
    groups = read_chosen(engine, history.around(one, three))
    assert [len(group) for group in groups] == [4]
    assert sorted(len(group) for group in read_chosen(engine, history.around(one, two))) == [5, 5]
    assert (
        read_chosen(engine, history.around(replace(one, sequences=()), replace(three, sequences=(), fields={}))) == []
    )


def test_an_input_is_found_by_the_beginning_of_its_key(engine: Engine) -> None:
    (key,) = history.inputs_of(engine, run_id(1))
    for text in (key.hex(), key.hex()[:6], key.hex()[:9].upper()):
        assert history.input_key(engine, text) == key
    missing = "0" * 12 if key.hex()[0] != "0" else "f" * 12
    for text in (missing, "xyzxyz", "12", "", "%%%%%%", "0" * 65):
        with pytest.raises(BadSetting) as caught:
            history.input_key(engine, text)
        assert is_one_sentence(str(caught.value))


def test_two_inputs_whose_keys_begin_alike_are_too_many(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "LEAST", 1)
    story = Story(tmp_path)
    for prompt in range(17):  # of 17 keys, two begin with one digit
        story.call(prompt, 8)
    engine = story.engine()
    first = [history.inputs_of(engine, run_id(n))[0].hex()[0] for n in range(1, 18)]
    twice = next(digit for digit in first if first.count(digit) > 1)
    with pytest.raises(BadSetting, match="more than one input's key begins with"):
        history.input_key(engine, twice)


def test_of_very_many_runs_evenly_spaced_ones_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(history, "MOST", 4)
    story = Story(tmp_path)
    for n in range(50):
        story.call(1, 8, wall_ns=WALL + 1000 * n)
    (group,) = read(story.engine())
    places_ = [(run.at[0] - WALL) // 1000 for run in group]
    assert 4 <= len(group) <= 8
    assert len({later - sooner for sooner, later in pairwise(places_)}) == 1
    assert places_[0] == 0
    assert places_[-1] >= 40


def test_several_returns_of_one_call_do_not_meet_each_other(tmp_path: Path) -> None:
    story = Story(tmp_path)
    both = (SequenceEnd(0, 0, 1, 1, 0, 1, 0.5, 0), SequenceEnd(0, 1, 1, 1, 0, 1, 0.5, 0))
    for _ in range(2):
        story.number += 1
        story.calls.call(
            story.number, {"payloads": (ids("prompt.ids", [1]),)}, sequences=both,
            payloads=(ids("output.ids", [8]), ids("output.ids", [9], 0, 1)),
        )  # fmt: skip
    found = read(story.engine())
    assert [len(group) for group in found] == [2, 2]
    assert all(one.output == other.output for one, other in found)
