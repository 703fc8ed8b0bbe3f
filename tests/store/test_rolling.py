"""What rolls at write time: equal inputs that gave more than one output, and no group where anything is unknown."""

from pathlib import Path
from typing import Any

import pytest

from provenance.facts import Field, Fingerprint, SequenceEnd
from tests.fakes.records import WEIGHTS, Calls, drained, ids, one, places, rows, run_id, text, written

GROUPS = "select runs, outputs from equal_inputs order by runs, outputs"


pytestmark = pytest.mark.usefixtures("both")


class Life:
    """A process life whose every call is told apart by what is given."""

    def __init__(self, folder: Path) -> None:
        self.spots = places(folder / "store")
        self.calls = Calls(self.spots.spool)
        self.calls.prints()
        self.root = self.calls.weights()
        self.number = 0

    def call(self, prompt: int = 1, answer: int = 2, **changes: Any) -> int:
        """Record one call; the root of its weights is known unless something else is said."""
        begin = {"payloads": (ids("prompt.ids", [prompt]),), **changes.pop("begin", {})}
        self.number += 1
        changes = {"weights": self.root, "payloads": (ids("output.ids", [answer]),), **changes}
        return self.calls.call(self.number, begin, **changes)

    def groups(self) -> list[tuple[Any, ...]]:
        """Drain, and return runs and outputs of each group."""
        return rows(drained(self.spots), GROUPS)


@pytest.fixture
def life(tmp_path: Path, both: str) -> Life:
    assert both
    return Life(tmp_path)


def test_equal_inputs_and_equal_outputs_are_one_group_of_one_output(life: Life) -> None:
    for _ in range(3):
        life.call()
    assert life.groups() == [(3, 1)]
    assert rows(life.spots, "select * from diverged_inputs") == []


def test_an_output_that_differs_is_counted_and_shown(life: Life) -> None:
    for answer in (2, 3, 2, 4, 3):
        life.call(answer=answer)
    life.call(prompt=9)
    assert life.groups() == [(1, 1), (5, 3)]
    found = rows(life.spots, "select runs, outputs, first_run, last_run, weights_root from diverged_inputs")
    assert found == [(5, 3, run_id(1), run_id(5), WEIGHTS.root)]
    assert rows(life.spots, "select runs from equal_outputs where grp = (select grp from equal_inputs where runs = 5) "
                            "order by runs") == [(1,), (2,), (2,)]  # fmt: skip


@pytest.mark.parametrize("between", [False, True])
def test_the_counts_do_not_depend_on_batches(life: Life, between: bool) -> None:
    for answer in (2, 3, 2):
        life.call(answer=answer)
        if between:
            life.groups()
    assert life.groups() == [(3, 2)]


def test_other_inputs_are_other_groups(life: Life) -> None:
    life.call(prompt=1)
    life.call(prompt=2)
    life.call(begin={"payloads": (ids("prompt.ids", [1]), ids("prompt.mask", [0]))})
    assert life.groups() == [(1, 1)] * 3


def test_text_beside_the_ids_makes_no_other_group(life: Life) -> None:
    life.call()
    life.call(begin={"payloads": (ids("prompt.ids", [1]), text("prompt.text", "one"))})
    assert life.groups() == [(2, 1)]


def test_settings_are_equal_by_value_whoever_set_them(life: Life) -> None:
    prints = [Fingerprint.of("settings", [Field("generation.top_p", 0.9, source=by)]) for by in ("call", "config")]
    prints.append(Fingerprint.of("settings", [Field("generation.top_p", 1.0, source="call")]))
    for item in prints:
        life.calls.note("settings", item.raw, item.document)
        life.call(settings=item.raw)
    assert life.groups() == [(1, 1), (2, 1)]


def test_settings_are_equal_by_value_for_calls_bound_late_too(life: Life) -> None:
    seqs = []
    for by in ("call", "config"):
        item = Fingerprint.of("settings", [Field("generation.top_p", 0.9, source=by)])
        life.calls.note("settings", item.raw, item.document)
        seqs.append(life.call(settings=item.raw, weights=bytes(32)))
    assert life.groups() == []
    life.calls.binding(seqs[0], seqs[1])
    assert life.groups() == [(2, 1)]


def test_where_a_draw_decides_the_random_state_is_part_of_the_group(life: Life) -> None:
    for state in ("a", "a", "b"):
        life.call(facts={"sampled": True, "rng.torch_cpu_sha256": state})
    assert life.groups() == [(1, 1), (2, 1)]


def test_where_no_draw_decides_the_random_state_does_not_count(life: Life) -> None:
    for state in ("a", "b"):
        life.call(facts={"rng.torch_cpu_sha256": state})
    assert life.groups() == [(2, 1)]


@pytest.mark.parametrize(
    "change",
    [{"weights": bytes(32)}, {"settings": bytes(32)}, {"status": "error"}, {"status": "aborted"}, {"status": "partial"},
     {"payloads": ()}, {"begin": {"payloads": ()}}, {"sequences": ()}],
    ids=str,
)  # fmt: skip
def test_where_anything_is_unknown_there_is_no_group(life: Life, change: dict[str, Any]) -> None:
    life.call(**change)
    life.call(**change)
    assert life.groups() == []


def test_weights_bound_late_count_their_calls_once(life: Life) -> None:
    first = life.call(weights=bytes(32), answer=2)
    last = life.call(weights=bytes(32), answer=3)
    known = life.call(answer=2)
    life.calls.binding(first, known)
    life.calls.binding(first, known)
    assert life.groups() == [(3, 2)]
    assert last < known


@pytest.mark.parametrize("between", [False, True])
def test_a_call_that_was_running_when_its_weights_were_bound_counts_once(life: Life, between: bool) -> None:
    seq = life.calls.start(50, payloads=(ids("prompt.ids", [1]),))
    life.calls.binding(seq, seq)
    if between:
        life.groups()
    life.calls.end(50, seq, weights=bytes(32))
    assert life.groups() == [(1, 1)]


def test_every_sequence_of_a_batch_counts_for_itself(life: Life) -> None:
    prompts = (ids("prompt.ids", [1]), ids("prompt.ids", [1], 1), ids("prompt.ids", [2], 2))
    answers = (ids("output.ids", [5]), ids("output.ids", [6], 1), ids("output.ids", [5], 2))
    ends = tuple(SequenceEnd(row, 0, 1, 1, 0, 1, 0.5, 0) for row in range(3))
    life.call(begin={"payloads": prompts, "rows": 3}, payloads=answers, sequences=ends)
    assert life.groups() == [(1, 1), (2, 2)]


@pytest.mark.parametrize("late", [False, True])
def test_answers_of_one_call_to_one_prompt_are_compared_place_by_place(life: Life, late: bool) -> None:
    ends = tuple(SequenceEnd(0, ret, 1, 1, 0, 1, 0.5, 0) for ret in range(2))
    for second in (6, 6, 7):
        answers = (ids("output.ids", [5]), ids("output.ids", [second], 0, 1))
        more: dict[str, Any] = {"weights": bytes(32)} if late else {}
        seq = life.call(payloads=answers, sequences=ends, **more)
    if late:
        life.calls.binding(0, seq)
    assert life.groups() == [(3, 1), (3, 2)]


def test_each_row_of_a_batch_draws_numbers_of_its_own(life: Life) -> None:
    ends = tuple(SequenceEnd(row, 0, 1, 1, 0, 1, 0.5, 0) for row in range(2))
    for _ in range(2):
        life.call(
            begin={"payloads": (ids("prompt.ids", [1]), ids("prompt.ids", [1], 1)), "rows": 2}, sequences=ends,
            payloads=(ids("output.ids", [5]), ids("output.ids", [6], 1)),
            facts={"sampled": True, "rng.torch_cpu_sha256": "a"},
        )  # fmt: skip
    assert life.groups() == [(2, 1), (2, 1)]


@pytest.mark.parametrize("facts", [{}, {"rng.torch_cpu_sha256": {"$field": {"state": "unknown", "reason": "off"}}}])
def test_draws_from_states_that_are_not_known_are_equal_to_no_other(life: Life, facts: dict[str, Any]) -> None:
    life.call(facts={"sampled": True, **facts})
    life.call(facts={"sampled": True, **facts}, answer=3)
    assert life.groups() == [(1, 1), (1, 1)]


def test_a_record_drained_twice_is_counted_once(life: Life, tmp_path: Path) -> None:
    life.call()
    life.call()
    kept = life.calls.journal.path.read_bytes()
    assert life.groups() == [(2, 1)]
    life.calls.close()
    drained(life.spots)
    (life.spots.spool / life.calls.journal.path.name).write_bytes(kept)
    with written(life.spots) as connection:
        connection.exec_driver_sql("update streams set segment = 0, position = 0, last_seq = -1")
    assert life.groups() == [(2, 1)]
    assert one(life.spots, "select count(*) from runs") == 2


def test_the_store_of_a_group_says_when_it_was_seen_first_and_last(life: Life) -> None:
    life.call(begin={"wall_ns": 1_000})
    life.call(begin={"wall_ns": 5_000})
    life.groups()
    assert rows(life.spots, "select first_at, last_at, first_run, last_run from equal_inputs") == [(1_000, 5_000, 1, 2)]
