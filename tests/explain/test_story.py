"""The answer as text: every part of it in words, what acts made visible, and nothing that Markdown would obey."""

from dataclasses import replace
from typing import Any

from provenance.explain import compare, many, reports, story
from provenance.facts import Sequence
from tests.explain.test_compare import pair
from tests.fakes.runs import default_steps, run


def text(answer: dict[str, Any]) -> str:
    return "\n".join(line for _, line in story.lines(answer))


def test_all_pairs_of_two_batches_are_listed() -> None:
    said = text(compare.compare(run([[5], [6]], [[1], [2]]), run([[5], [7]], [[1], [2]])))
    assert "All 2 pairs of equal prompts" in said
    assert "  A:1 B:1  divergent at token 0" in said
    assert "  A:0 B:0  same" in said


def test_inputs_that_part_are_told_first() -> None:
    said = text(compare.compare(run([[5]], [[1, 2]]), run([[6]], [[1, 3]])))
    assert "The inputs part at token 1: 2 in A, 3 in B." in said
    assert "Not comparable: the token ids that reached the model differ." in said


def test_logits_that_were_equal_and_those_that_moved_far_are_told_apart() -> None:
    assert "equal to the last bit over 2 tokens" in text(compare.compare(*pair(moved=0.0, margin=2.0)))
    assert "beyond what rounding explains" in text(compare.compare(*pair(moved=9.0, margin=2.0)))


def test_what_has_no_evidence_says_why() -> None:
    bare = replace(run([[5]]), sequences=(replace(run([[5]]).sequences[0], steps=(), no_evidence="beam search"),))
    assert "No token evidence: A has no token evidence: beam search." in text(compare.compare(bare, run([[6]])))
    plain = replace(run(), sequences=(Sequence(0, 0, input_key="k", output_key="x"),))
    other = replace(run(), sequences=(Sequence(0, 0, input_key="k", output_key="y"),))
    assert "No token evidence: the token ids were not kept." in text(compare.compare(plain, other))


def test_an_output_that_ends_first_and_one_on_the_surface() -> None:
    said = text(compare.compare(run([[5, 6, 7]]), run([[5, 6]])))
    assert "One output is the beginning of the other; they part at token 2." in said
    assert "ended (length)" in said
    a, b = run([[5]]), run([[6]])
    a = replace(a, sequences=(replace(a.sequences[0], output_text="a b"),))
    b = replace(b, sequences=(replace(b.sequences[0], output_text="a  b"),))
    assert "on the surface only" in text(compare.compare(a, b))


def test_tokens_are_shown_with_their_text_where_it_is_at_hand() -> None:
    lines = story.lines(compare.compare(*pair()), lambda token: f"t{token}", lambda token: f"u{token}")
    said = "\n".join(line for _, line in lines)
    assert "A chose 6 't6', 0.125 (1 ulp) ahead of 7 't7'" in said
    assert "B chose 7 'u7'" in said


def test_a_step_without_a_margin_is_told_without_one() -> None:
    steps = [replace(item, margin=None, runner_up=None) for item in default_steps([5])]
    said = text(compare.compare(run([[5]], steps=[steps]), run([[6]], steps=[[replace(steps[0], token=6)]])))
    assert "  A chose 5\n" in said


def test_what_is_allowed_and_declared_is_said() -> None:
    a, b = pair({"batch.size": 1, "cpu.capability": "AVX2"}, {"batch.size": 8, "cpu.capability": "DEFAULT"})
    answer = compare.compare(a, b, declared=lambda name: name == "batch.size")
    reports.settle(answer, None, lambda name: name == "cpu.capability")
    assert ", allowed]" in text(answer)
    assert "Declared to differ, and not looked at (1)\n  batch.size: 1 / 8" in text(answer)


def test_a_declared_prompt_is_no_cause() -> None:
    answer = compare.compare(run([[5]], [[1]]), run([[6]], [[2]]), declared=lambda name: name == "input.token_ids")
    assert answer["causes"] == []


def test_markdown_shows_what_would_act() -> None:
    a, b = pair({"my.own": "\u202e\x1b[31m\n# title & <b> ~x~"}, {"my.own": 2}, moved=0.0)
    page = story.markdown(compare.compare(a, b))
    assert "\u202e" not in page
    assert "\x1b" not in page
    assert "\\u202e" in page
    assert "\n# title" not in page
    assert "\\# title \\& \\<b\\> \\~x\\~" in page


def test_causes_of_a_text_that_differs_over_equal_tokens_are_told() -> None:
    a, b = run(), run(fields={"tokenizer.sha256": "sha256:" + "d" * 64})
    a = replace(a, sequences=(replace(a.sequences[0], output_text="x"),))
    b = replace(b, sequences=(replace(b.sequences[0], output_text="y"),))
    assert "tokenizer.sha256" in text(compare.compare(a, b))


def test_long_lists_are_cut_and_counted() -> None:
    more = {f"my.f{n:02}": n for n in range(12)}
    said = text(compare.compare(run(fields=more), run(fields={name: value + 1 for name, value in more.items()})))
    assert "and 4 more (--json lists all)" in said


def test_lines_that_stand_only_where_there_is_something_to_say() -> None:
    a, b = pair({"torch.num_threads": 1, "model.attn_implementation": "eager", "generation.use_cache": True},
                {"generation.use_cache": False})  # fmt: skip
    answer = compare.compare(a, b)
    assert "As good an explanation: " in text(answer)
    assert "What to do" not in text({**answer, "advice": []})
    quiet = {key: value for key, value in answer["outputs"].items() if key != "no_evidence"}
    assert "No token evidence" not in text({**answer, "outputs": {**quiet, "logit_change": None}})
    item = {"field": "gpu.driver_version", "because": "not known", "would_decide": True}
    few, lots = text({**answer, "unknown": [item]}), text({**answer, "unknown": [item] * 12})
    assert ("and 4 more" in few, "and 4 more" in lots) == (False, True)
    assert "<- would decide" in few


def test_what_separates_many_runs_is_told_with_what_moved_beside_it() -> None:
    runs = [
        run([[5 + n]], fields={"batch.size": n}, run_id=f"01a0000{n}-0000-7000-8000-000000000000") for n in (1, 2, 3)
    ]
    answer = many.compare_all([(item, None) for item in runs])
    item = {"field": "a.b", "values": {"1": [1], "2": [2]}, "because": "it does", "with": []}
    split = {**answer["split"], "partly": [item, {**item, "with": ["c.d"]}]}
    said = text({**answer, "split": split})
    assert said.count("a.b: 1 in group 1; 2 in group 2: it does.") == 2
    assert said.count("Moved together with it: c.d.") == 1
