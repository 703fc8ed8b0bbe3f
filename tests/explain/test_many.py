"""Many runs: groups of equal output, the field that separates them, ties told, and what varies within a group dismissed."""

from dataclasses import replace
from typing import Any

import pytest

from provenance.errors import AmbiguousRows
from provenance.explain import compare, many, story
from provenance.facts import Field, Run, Sequence
from tests.fakes.runs import run, step, unknown


def one(number: int, second: int, fields: dict[str, Any] | None = None, **more: Any) -> Run:
    """Make a run whose second token is 6 or another, by a near tie."""
    moved = 0.0 if second == 6 else 0.125
    steps = [[step(5, 99, 3.0), replace(step(6, 7, 0.125, moved=moved), token=second, runner_up=13 - second)]]
    return run([[5, second]], steps=steps, fields=fields, run_id=f"01a0000{number}-0000-7000-8000-000000000000", **more)


def answer(*runs: Run, declared: Any = lambda _: False) -> dict[str, Any]:
    return many.compare_all([(item, None) for item in runs], declared)


def fields_of(found: dict[str, Any], kind: str) -> list[str]:
    return [item["field"] for item in found["split"][kind]]


def test_the_field_that_parts_the_runs_as_the_outputs_do_is_named_first() -> None:
    found = answer(
        one(1, 6, {"batch.size": 1, "torch.num_threads": 1}), one(2, 7, {"batch.size": 8, "torch.num_threads": 1}),
        one(3, 6, {"batch.size": 1, "torch.num_threads": 4}), one(4, 7, {"batch.size": 8, "torch.num_threads": 4}),
    )  # fmt: skip
    assert [item["group"] for item in found["runs"]] == [1, 2, 1, 2]
    assert [len(item["runs"]) for item in found["groups"]] == [2, 2]
    assert fields_of(found, "separates") == ["batch.size"]
    assert found["split"]["separates"][0]["values"] == {"1": [1], "2": [8]}
    assert found["split"]["told"] == "batch.size separates the 2 groups exactly."
    assert {"field": "torch.num_threads", "because": many.WITHIN} in found["split"]["dismissed"]
    assert found["groups"][1]["first_divergent_token"] == 1
    assert [cause["field"] for cause in found["causes"]] == ["batch.size"]
    assert found["pairs"][0]["causes"] == ["batch.size"]
    assert "batch.size as in B" in found["advice"][1]


def test_what_varies_within_a_group_is_no_cause_of_the_pair_either() -> None:
    """Of the pair alone both would be suspects; the third run clears one of them."""
    first, second = (
        one(1, 6, {"batch.size": 1, "torch.num_threads": 1}),
        one(2, 7, {"batch.size": 8, "torch.num_threads": 4}),
    )
    assert {c["field"] for c in compare.compare(first, second)["causes"]} == {"batch.size", "torch.num_threads"}
    found = answer(first, second, one(3, 6, {"batch.size": 1, "torch.num_threads": 4}))
    assert [cause["field"] for cause in found["causes"]] == ["batch.size"]
    because = {item["field"]: item["because"] for item in found["dismissed"]}
    assert because["torch.num_threads"] == many.WITHIN


def test_a_tie_is_told() -> None:
    fields_a, fields_b = {"batch.size": 1, "cpu.capability": "AVX2"}, {"batch.size": 8, "cpu.capability": "DEFAULT"}
    found = answer(one(1, 6, fields_a), one(2, 7, fields_b), one(3, 7, fields_b))
    assert set(fields_of(found, "separates")) == {"batch.size", "cpu.capability"}
    assert "These runs cannot tell them apart" in found["split"]["told"]


def test_what_moved_in_lockstep_is_told_once() -> None:
    alone = {"batch.size": 1, "batch.max_length": 4}
    batch = {"batch.size": 8, "batch.max_length": 9}
    found = answer(one(1, 6, alone), one(2, 7, batch), one(3, 6, alone))
    assert fields_of(found, "separates") == ["batch.size"]
    assert found["split"]["separates"][0]["with"] == ["batch.max_length"]
    assert "Moved together with it: batch.max_length" in text(found)


def test_two_fields_that_part_the_runs_only_together_are_found() -> None:
    found = answer(
        one(1, 6, {"batch.size": 1, "torch.num_threads": 1}), one(2, 7, {"batch.size": 8, "torch.num_threads": 1}),
        one(3, 8, {"batch.size": 8, "torch.num_threads": 4}),
    )  # fmt: skip
    assert fields_of(found, "separates") == []
    assert set(found["split"]["together"]) == {"batch.size", "torch.num_threads"}
    assert "together do" in found["split"]["told"]
    assert [group["verdict"] for group in found["groups"]] == [None, "near_tie", "near_tie"]


def test_one_field_that_parts_only_some_of_the_groups_is_partly_the_reason() -> None:
    found = answer(one(1, 6, {"batch.size": 1}), one(2, 7, {"batch.size": 8}), one(3, 8, {"batch.size": 8}))
    assert fields_of(found, "partly") == ["batch.size"]
    assert found["split"]["together"] == []
    assert found["split"]["told"] == ("No field alone separates the 3 groups: batch.size parts group 1 from 2 and 3.")


def test_a_field_whose_every_value_gave_one_output_is_possible_where_none_is_exact() -> None:
    found = answer(one(1, 6, {"batch.size": 1}), one(2, 6, {"batch.size": 2}), one(3, 7, {"batch.size": 8}))
    assert fields_of(found, "possible") == ["batch.size"]
    said = "No field separates the 2 groups exactly; batch.size may decide"
    assert found["split"]["told"] == f"{said}, though it differs in every run."
    twice = [one(1, 6, {"batch.size": 1}), one(2, 6, {"batch.size": 2}), one(3, 7, {"batch.size": 8})]
    assert answer(*twice, one(4, 6, {"batch.size": 2}))["split"]["told"] == f"{said}."
    assert [cause["field"] for cause in found["causes"]] == ["batch.size"]
    exact = [{"cpu.capability": "AVX2"}, {"cpu.capability": "AVX2"}, {"cpu.capability": "DEFAULT"}]
    sizes = [{"batch.size": size} for size in (1, 2, 8)]
    runs = [one(n, token, a | b) for n, (token, a, b) in enumerate(zip((6, 6, 7), exact, sizes, strict=True))]
    found = answer(*runs)
    assert (fields_of(found, "separates"), fields_of(found, "possible")) == (["cpu.capability"], [])
    assert {"field": "batch.size", "because": many.UNIQUE} in found["split"]["dismissed"]
    more = answer(*runs, one(4, 6, exact[0] | sizes[0]))
    assert {"field": "batch.size", "because": many.WITHIN} in more["split"]["dismissed"]


def test_three_causes_of_four_groups_are_told_with_the_groups_that_each_parts() -> None:
    """What differs in every run would fit anything: it is dismissed beside fields that part the runs."""
    varied: list[dict[str, Any]] = [{}, {}, {"batch.size": 8}, {"torch.num_threads": 7}, {"cpu.capability": "DEFAULT"}]
    plain: dict[str, Any] = {"batch.size": 1, "torch.num_threads": 2, "cpu.capability": "AVX2"}
    tokens = (6, 6, 7, 8, 9)
    runs = [
        one(n, token, plain | more | {"my.harmless": f"x{n}"})
        for n, (token, more) in enumerate(zip(tokens, varied, strict=True), 1)
    ]
    found = answer(*runs)
    assert set(fields_of(found, "partly")) == {"batch.size", "torch.num_threads", "cpu.capability"}
    assert fields_of(found, "possible") == []
    assert {"field": "my.harmless", "because": many.UNIQUE} in found["split"]["dismissed"]
    told = found["split"]["told"]
    assert told.startswith("No field alone separates the 4 groups: ")
    for said in ("batch.size parts group 2 from 1, 3 and 4", "torch.num_threads parts group 3 from 1, 2 and 4"):
        assert said in told
    assert "my.harmless" not in {cause["field"] for cause in found["causes"]}


def test_a_field_of_three_values_is_told_with_its_groups() -> None:
    sizes = ((1, 6, 1), (2, 7, 2), (3, 8, 4), (4, 9, 4))
    told = answer(*(one(n, token, {"batch.size": size}) for n, token, size in sizes))["split"]["told"]
    assert told == "No field alone separates the 4 groups: batch.size parts groups 1, 2, and 3 and 4."


def test_what_differs_in_every_run_separates_nothing_even_where_it_fits() -> None:
    alone = [one(n, token, {"request.id": f"q{n}"}) for n, token in ((1, 6), (2, 6), (3, 7))]
    found = answer(*alone)
    assert found["split"]["told"] == "No recorded field separates the 2 groups: request.id differs in every run."
    assert not found["explained"]
    every = [one(n, n + 5, {"request.id": f"q{n}", "my.nonce": n}) for n in (1, 2, 3)]
    told = answer(*every)["split"]["told"]
    assert told == "No recorded field separates the 3 groups: my.nonce and request.id differ in every run."
    sized = [one(n, n + 5, {"request.id": f"q{n}", "batch.size": n}) for n in (1, 2, 3)]
    found = answer(*sized)
    assert found["split"]["told"] == "batch.size separates the 3 groups exactly."
    assert {"field": "request.id", "because": many.UNIQUE} in found["split"]["dismissed"]


def test_a_field_of_ones_own_that_parts_the_runs_is_named_with_what_is_not_known_of_it() -> None:
    runs = [one(n, token, {"engine.kv": kv}) for n, (token, kv) in enumerate(((6, 4), (6, 4), (7, 8)), 1)]
    found = answer(*runs)
    assert found["split"]["told"] == (
        "engine.kv separates the 2 groups exactly (a field of your own, of which it is not known whether it acts: engine.kv)."
    )
    assert not found["explained"]


def test_a_field_that_cannot_act_separates_nothing() -> None:
    found = answer(one(1, 6, {"context.call_index": 1}), one(2, 7, {"context.call_index": 2}))
    assert fields_of(found, "separates") == []
    because = {item["field"]: item["because"] for item in found["split"]["dismissed"]}
    assert because["context.call_index"] == "it is context and never acts on an output"
    assert found["split"]["told"] == "No recorded field separates the 2 groups."


def test_a_field_that_would_separate_and_was_ruled_out_is_told() -> None:
    """The logits are equal to the last bit: the number of threads parts the runs, and cannot have done it."""
    a = run([[5, 6]], fields={"torch.num_threads": 1}, run_id="a")
    b = run(
        [[5, 7]],
        steps=[[step(5, 99, 3.0), replace(step(6, 99, 3.0), token=7)]],
        fields={"torch.num_threads": 2},
        run_id="b",
    )
    found = answer(a, b, replace(b, run_id="c"))
    assert found["split"]["dismissed"][0]["fits"]
    assert (
        "that can have done it separates the 2 groups: torch.num_threads would, but the logits were equal"
        in (found["split"]["told"])
    )


def test_what_is_not_known_everywhere_is_said_with_whether_it_would_fit() -> None:
    blind = {"batch.size": unknown("batch.size")}
    found = answer(one(1, 6, {"batch.size": 1}), one(2, 7, {"batch.size": 8}), one(3, 8, blind), one(4, 6, blind))
    assert found["split"]["unknown"][0]["because"] == (
        "not known in 2 of 4 runs; it would separate the groups as far as it is known"
    )
    found = answer(one(1, 6, {"batch.size": 1}), one(2, 7, {"batch.size": 1}), one(3, 8, blind))
    assert found["split"]["unknown"][0]["because"] == "not known in 1 of 3 runs"


def test_what_is_not_known_and_could_not_matter_is_left_out() -> None:
    blind = {"context.load": unknown("context.load"), "generation.top_k": unknown("generation.top_k")}
    assert answer(one(1, 6), one(2, 7, blind), one(3, 7, blind))["split"]["unknown"] == []


def test_of_three_groups_one_pair_may_clear_what_another_accuses() -> None:
    far = one(3, 8, {"torch.num_threads": 4})
    step_far = replace(step(6, 7, 9.0, moved=9.0), token=8, runner_up=6)
    far = replace(far, sequences=(replace(far.sequences[0], steps=(far.sequences[0].steps[0], step_far)),))
    found = answer(one(1, 6, {"torch.num_threads": 1}), one(2, 7, {"torch.num_threads": 2}), far)
    assert "torch.num_threads" in {item["field"] for item in far_dismissed(found, far)}
    assert fields_of(found, "separates") == ["torch.num_threads"]


def far_dismissed(found: dict[str, Any], far: Run) -> Any:
    first = one(1, 6, {"torch.num_threads": 1})
    assert found["pairs"][1]["b"]["run"] == far.run_id
    return compare.compare(first, far)["dismissed"]


def test_no_two_fields_are_named_together_that_do_not_part_the_runs() -> None:
    same = {"batch.size": 8, "torch.num_threads": 4}
    found = answer(one(1, 6, {"batch.size": 1, "torch.num_threads": 1}), one(2, 7, same), one(3, 8, same))
    assert set(fields_of(found, "partly")) == {"batch.size", "torch.num_threads"}
    assert found["split"]["together"] == []


def test_values_of_runs_without_a_group_are_not_told_as_a_groups() -> None:
    bare = one(3, 6, {"batch.size": 3})
    bare = replace(bare, sequences=(replace(bare.sequences[0], output_ids=None, output_key="", steps=()),))
    found = answer(one(1, 6, {"batch.size": 1}), one(2, 7, {"batch.size": 8}), bare)
    assert found["split"]["separates"][0]["values"] == {"1": [1], "2": [8]}


def test_a_declared_field_is_left_out() -> None:
    runs = one(1, 6, {"batch.size": 1}), one(2, 7, {"batch.size": 8}), one(3, 7, {"batch.size": 8})
    found = answer(*runs, declared=lambda name: name == "batch.size")
    assert (fields_of(found, "separates"), found["causes"]) == ([], [])
    assert [item["field"] for item in found["declared"]] == ["batch.size"]
    assert "The declared difference explains it: batch.size." in text(found)
    assert found["explained"]


def test_equal_outputs_are_one_group() -> None:
    found = answer(one(1, 6, {"batch.size": 1}), one(2, 6, {"batch.size": 2}), one(3, 6))
    assert (found["verdict"], len(found["groups"]), found["split"]["dismissed"]) == ("same", 1, [])
    assert found["split"]["told"] == "All outputs that can be compared are equal."
    assert "3 runs, 1 output" in text(found)
    assert "Two of them:" in text(found)


def test_an_output_that_was_not_kept_is_in_no_group() -> None:
    bare = one(3, 6)
    bare = replace(bare, sequences=(replace(bare.sequences[0], output_ids=None, output_key="", steps=()),))
    found = answer(one(1, 6, {"batch.size": 1}), one(2, 6, {"batch.size": 1}), bare)
    assert [item["group"] for item in found["runs"]] == [1, 1, None]
    assert found["verdict"] == "inconclusive"
    assert found["pairs"][0]["verdict"] == "inconclusive"
    parted = answer(one(1, 6, {"batch.size": 1}), one(2, 7, {"batch.size": 1}), bare)
    assert [pair["verdict"] for pair in parted["pairs"]] == ["divergent", "inconclusive"]
    sized = replace(bare, fields={**bare.fields, "cpu.capability": Field("cpu.capability", "AVX2")})
    some = {"cpu.capability": "DEFAULT"}
    same = answer(one(1, 6, some), one(2, 7, some), sized)
    assert {"field": "cpu.capability", "because": "it is the same in every run whose output can be compared"} in (
        same["split"]["dismissed"]
    )


def test_where_no_output_was_kept_there_is_no_group() -> None:
    bare = [replace(one(n, 6), sequences=(Sequence(0, 0, input_key="k"),)) for n in range(3)]
    found = answer(*bare)
    assert (found["groups"], [item["group"] for item in found["runs"]]) == ([], [None] * 3)
    assert (found["verdict"], found["split"]["told"]) == ("inconclusive", "All outputs that can be compared are equal.")


def test_texts_tell_outputs_apart_where_ids_are_equal_and_where_there_are_none() -> None:
    def spoken(number: int, said: str, ids: tuple[int, ...] | None) -> Run:
        made = one(number, 6)
        return replace(made, sequences=(replace(made.sequences[0], output_text=said, output_ids=ids, output_key=""),))

    assert [i["group"] for i in answer(*(spoken(n, t, (5, 6)) for n, t in enumerate("xyx")))["runs"]] == [1, 2, 1]
    assert [i["group"] for i in answer(*(spoken(n, t, None) for n, t in enumerate("xyx")))["runs"]] == [1, 2, 1]


# -- which sequences ----------------------------------------------------------------------------------


def test_of_batches_the_common_prompt_with_the_most_groups_is_taken() -> None:
    first = run([[5], [6]], [[1], [2]], run_id="a")
    second = run([[5], [7]], [[1], [2]], run_id="b")
    third = run([[9], [7]], [[3], [2]], run_id="c")
    found = answer(first, second, third)
    assert [item["prompt"] for item in found["runs"]] == [1, 1, 1]
    assert [item["group"] for item in found["runs"]] == [1, 2, 2]


def test_a_single_sequence_says_which_prompt_of_the_others_is_meant() -> None:
    found = answer(
        run([[5], [6]], [[1], [2]], run_id="a"), run([[7]], [[2]], run_id="b"), run([[7]], [[2]], run_id="c")
    )
    assert [item["prompt"] for item in found["runs"]] == [1, 0, 0]


def test_prompts_that_differ_are_a_field_like_another() -> None:
    found = answer(run([[5]], [[1]], run_id="a"), run([[6]], [[2]], run_id="b"), run([[6]], [[2]], run_id="c"))
    assert fields_of(found, "separates") == ["input.token_ids"]
    assert found["verdict"] == "not_comparable"


def test_a_place_is_taken_and_a_wrong_one_refused() -> None:
    two = run([[5], [6]], [[1], [2]], run_id="a")
    assert many.compare_all([(two, (1, None)), (two, (1, 0)), (two, (0, None))])["runs"][0]["prompt"] == 1
    with pytest.raises(AmbiguousRows, match="has no row 7"):
        many.compare_all([(two, (7, None)), (two, None), (two, None)])
    with pytest.raises(AmbiguousRows, match="no prompt in common; say which to compare, as in a:0"):
        many.compare_all([(two, None), (run([[5], [6]], [[3], [4]], run_id="b"), None), (two, None)])
    with pytest.raises(AmbiguousRows, match="holds no sequence"):
        many.compare_all([(two, None), (replace(two, sequences=()), None), (two, None)])


def test_runs_of_two_keys_are_compared_by_their_ids() -> None:
    found = answer(one(1, 6), one(2, 7, key_id="other"), one(3, 6, key_id="third"))
    assert [item["group"] for item in found["runs"]] == [1, 2, 1]


# -- the text -----------------------------------------------------------------------------------------


def text(found: dict[str, Any]) -> str:
    return "\n".join(line for _, line in story.lines(found))


def test_the_story_shows_the_table_and_then_the_pair() -> None:
    many_fields = {f"my.field_{n}": n for n in range(20)}
    said = text(
        answer(one(1, 6, {"batch.size": 1}, name="alone"), one(2, 7, {"batch.size": 8} | many_fields), one(3, 7))
    )
    assert "run                                     name   group" in said
    assert "The two runs that part first:" in said
    assert "pairs of equal prompts" not in said
    assert "more (--json lists all)" in said
    assert "**3 runs" in story.markdown(answer(one(1, 6), one(2, 7), one(3, 6)))
