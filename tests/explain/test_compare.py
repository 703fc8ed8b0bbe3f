"""The answer: verdict, layer, causes and exit code, on pairs whose truth is known."""

from dataclasses import replace
from typing import Any

import pytest

from provenance.errors import AmbiguousRows
from provenance.explain import compare, story
from provenance.facts import Field, Run, Sequence, Step
from tests.fakes.runs import default_steps, run, sequence, step, unknown

A_ID, B_ID = "01a00000-0000-7000-8000-00000000000a", "01b00000-0000-7000-8000-00000000000b"


def pair(
    fields_a: dict[str, Any] | None = None,
    fields_b: dict[str, Any] | None = None,
    *,
    moved: float = 0.125,
    margin: float = 0.125,
    **more: Any,
) -> tuple[Run, Run]:
    """Make two runs of one prompt that part at token 1."""
    steps_a = [[step(5, 99, 3.0), step(6, 7, margin)]]
    steps_b = [[step(5, 99, 3.0), replace(step(6, 7, margin, moved=moved), token=7, runner_up=6)]]
    a = run([[5, 6]], steps=steps_a, fields=fields_a, run_id=A_ID, **more)
    return a, run([[5, 7]], steps=steps_b, fields=fields_b, run_id=B_ID, **more)


def test_equal_outputs_are_the_same_and_accuse_nobody() -> None:
    answer = compare.compare(run(), run(fields={"torch.num_threads": 1}))
    assert (answer["verdict"], answer["causes"], answer["layer"], answer["explained"]) == ("same", [], None, True)
    assert answer["dismissed"][0]["because"] == "the outputs are equal"
    assert compare.EXIT[answer["verdict"]] == 0


def test_batch_and_padding_are_one_cause_of_a_near_tie() -> None:
    alone = {"batch.size": 1, "batch.max_length": 4, "batch.sequence_lengths": [4]}
    batch = {
        "batch.size": 4,
        "batch.max_length": 9,
        "batch.sequence_lengths": [4, 9, 9, 9],
        "batch.padding_side": "left",
    }
    a, b = pair(alone, batch)
    b = replace(b, sequences=(replace(b.sequences[0], padding=5),))
    answer = compare.compare(a, b)
    assert answer["verdict"] == "near_tie"
    assert answer["layer"] == "decode"
    first = answer["causes"][0]
    assert first["field"] == "batch.size"
    assert {"batch.max_length", "batch.padding_tokens"} <= set(first["with"])
    assert "its padding" in first["because"]
    assert first["confidence"] > 0.8
    assert len(answer["causes"]) == 1
    assert "batch shape" in answer["advice"][0]


def test_logits_that_moved_far_are_not_blamed_on_rounding() -> None:
    answer = compare.compare(*pair({"torch.num_threads": 1}, {"torch.num_threads": 2}, moved=9.0, margin=3.0))
    assert answer["verdict"] == "divergent"
    assert answer["causes"] == []
    assert not answer["explained"]
    assert answer["dismissed"][0]["because"] == "rounding cannot move logits this far"
    assert answer["advice"][0].startswith("Unexplained: something that decides was not recorded")


def test_a_wide_margin_with_rounding_alone_is_not_blamed_on_rounding() -> None:
    answer = compare.compare(*pair({"torch.num_threads": 1}, {"torch.num_threads": 2}, margin=3.0))
    assert (answer["verdict"], answer["causes"]) == ("divergent", [])


def test_other_tensors_are_another_model_however_little_they_moved_the_logits() -> None:
    """A choice that hung on a tie does not make the output of another model as good as that of the first."""
    root = {"weights.loaded_root": "p1:sha256:" + "2" * 64}
    for fields in (root, root | {"batch.size": 4}):
        answer = compare.compare(*pair({"batch.size": 1}, {"batch.size": 1} | fields))
        assert answer["verdict"] == "not_comparable"
        assert not any("neither output is wrong" in line for line in answer["advice"])
    files = {"weights.files_root": "p1:sha256:" + "3" * 64}
    cast = compare.compare(*pair({"model.dtype": "float32"} | files, root | {"model.dtype": "bfloat16"} | files))
    assert (cast["verdict"], cast["causes"][0]["field"]) == ("near_tie", "model.dtype")


@pytest.mark.parametrize(
    ("name", "a", "b"),
    [("model.dtype", "float32", "bfloat16"), ("model.tied_weights", True, False), ("adapters.merged", [], ["x"]),
     ("model.quantization_config.quant_method", Field.moot("model.quantization_config.quant_method", "no"), "int8")],
)  # fmt: skip
def test_what_lies_beneath_a_cast_only_the_files_can_say(name: str, a: Any, b: Any) -> None:
    one, other = {name: a}, {name: b, "weights.loaded_root": "p1:sha256:" + "2" * 64}
    files = "weights.files_root"
    unsaid = compare.compare(*pair(one, other))
    assert unsaid["verdict"] == "inconclusive"
    assert unsaid["causes"][0]["field"] == name
    assert "weights.loaded_root" in {cause["field"] for cause in unsaid["causes"]}
    assert [item["field"] for item in unsaid["unknown"] if item["would_decide"]] == [files]
    assert not any("neither output is wrong" in line for line in unsaid["advice"])
    another = compare.compare(*pair(one | {files: "x"}, other | {files: "y"}))
    assert another["verdict"] == "not_comparable"
    same = compare.compare(*pair(one | {files: "x"}, other | {files: "x"}))
    assert "weights.loaded_root" in {item["field"] for item in same["dismissed"]}
    assert same["verdict"] in ("near_tie", "divergent")


@pytest.mark.parametrize(
    ("name", "a", "b"),
    [("batch.mask_given", True, False), ("model.training", False, True), ("generation.repetition_penalty", 1.0, 1.01)],
)
def test_another_function_is_never_a_near_tie_and_nobody_is_told_that_nothing_is_wrong(
    name: str, a: Any, b: Any
) -> None:
    on = {"model.dropout_active": ["Dropout.p=0.1 x2"], "model.module_kinds": []}
    answer = compare.compare(*pair({name: a}, {name: b} | on))
    assert answer["causes"][0]["field"] == name
    assert answer["verdict"] == "divergent"
    assert not any("neither output is wrong" in line for line in answer["advice"])


@pytest.mark.parametrize("name", ["model.norm_eps", "model.config_digest", "model.rope_parameters"])
@pytest.mark.parametrize(
    "more", [{}, {"batch.size": 4}, {"torch.num_threads": 1, "model.attn_implementation": "eager"}]
)
def test_another_configuration_is_no_near_tie_whatever_moved_beside_it(name: str, more: dict[str, Any]) -> None:
    """An epsilon of 1.3e-6 for 1e-6 moves logits by 1 or 2 ulp: no more than rounding, and it is another function."""
    answer = compare.compare(*pair({name: 1}, {name: 2} | more))
    assert answer["causes"][0]["field"] == name
    assert answer["causes"][0]["confidence"] >= 0.9
    assert answer["verdict"] == "divergent"
    assert {"batch.size"} & set(more) <= {cause["field"] for cause in answer["causes"]}
    assert not any("neither output is wrong" in line for line in answer["advice"])


def test_a_function_that_stands_second_is_no_near_tie_either() -> None:
    answer = compare.compare(*pair({"adapters.active": ["x"]}, {"adapters.active": ["y"], "batch.size": 4}))
    assert [cause["field"] for cause in answer["causes"]] == ["batch.size", "adapters.active"]
    assert answer["verdict"] == "divergent"


def test_a_record_from_before_a_field_of_the_configuration_is_compared_by_its_digest() -> None:
    digest = {"model.config_digest": "x"}
    answer = compare.compare(*pair(digest, digest | {"model.norm_eps": 1e-6, "batch.size": 4}))
    assert (answer["verdict"], answer["causes"][0]["field"]) == ("near_tie", "batch.size")
    assert not any(item["field"] == "model.norm_eps" for item in answer["unknown"])


def test_what_was_not_seen_where_the_outputs_part_acquits_nobody() -> None:
    a, b = pair({"model.class": "x"}, {"model.class": "y"}, margin=3.0)
    blank = Step(7, (), ())
    row = replace(b.sequences[0], steps=(replace(b.sequences[0].steps[0], top_logits=(16.1, 13.1, 11.1, 10.1)), blank))
    answer = compare.compare(a, replace(b, sequences=(row,)))
    assert answer["outputs"]["logit_change"]["kind"] == "rounding"
    assert [cause["field"] for cause in answer["causes"]] == ["model.class"]


def test_rows_of_another_batch_draw_other_numbers_of_one_stream() -> None:
    drawn = {"generation.do_sample": True, "generation.temperature": 1.0}
    alone = drawn | {"batch.size": 1, "rng.batch_shape_at_sampling": [1, 1280]}
    beside = drawn | {"batch.size": 4, "rng.batch_shape_at_sampling": [4, 1280]}
    answer = compare.compare(*pair(alone, beside, moved=0.0))
    assert answer["causes"][0]["field"] == "rng.batch_shape_at_sampling"
    assert "batch.size" not in {cause["field"] for cause in answer["causes"]}
    moved = compare.compare(*pair(alone, beside))
    assert [cause["field"] for cause in moved["causes"]] == ["rng.batch_shape_at_sampling", "batch.size"]


def test_other_weights_explain_logits_that_moved_far() -> None:
    other = {"weights.loaded_root": "p1:sha256:" + "2" * 64, "torch.num_threads": 1}
    answer = compare.compare(*pair(None, other, moved=9.0, margin=1.0))
    assert answer["causes"][0]["field"] == "weights.loaded_root"
    assert (answer["verdict"], answer["layer"]) == ("not_comparable", "weights")


def test_a_penalty_is_found_where_the_logits_are_equal() -> None:
    answer = compare.compare(
        *pair(None, {"generation.repetition_penalty": 1.3, "torch.num_threads": 1}, moved=0.0, margin=2.0)
    )
    assert answer["layer"] == "settings"
    assert [cause["field"] for cause in answer["causes"]] == ["generation.repetition_penalty"]
    assert "the choice itself was made differently" in answer["causes"][0]["because"]


def test_random_state_is_the_cause_of_sampled_runs_with_equal_logits() -> None:
    drew = {"generation.do_sample": True, "rng.consumed": True}
    answer = compare.compare(
        *pair({**drew}, {**drew, "rng.torch_cpu_state_sha256": "z", "seed.torch_initial": 8}, moved=0.0, margin=2.0)
    )
    first = answer["causes"][0]
    assert (first["field"], answer["layer"]) == ("rng.torch_cpu_state_sha256", "sampler")
    assert first["with"] == ["seed.torch_initial"]


def test_one_output_that_begins_the_other_is_a_question_of_length() -> None:
    a = run([[5, 6, 7]], fields={"generation.max_new_tokens": 3})
    b = run([[5, 6]], fields={"generation.max_new_tokens": 2, "torch.num_threads": 1})
    answer = compare.compare(a, b)
    assert answer["layer"] == "stop"
    assert [cause["field"] for cause in answer["causes"]] == ["generation.max_new_tokens"]
    assert answer["outputs"]["prefix"]
    assert answer["outputs"]["b"] == {"token_id": None, "text": None, "ended": "length"}


def test_other_inputs_are_not_comparable_and_say_where() -> None:
    a = run(inputs=[[1, 2, 3]], outputs=[[5]])
    b = run(inputs=[[1, 9, 3]], outputs=[[6]])
    answer = compare.compare(a, b)
    assert answer["verdict"] == "not_comparable"
    assert answer["layer"] == "ids"
    assert answer["inputs"]["first_difference"] == {"token": 1, "a": 2, "b": 9}
    assert answer["causes"][0]["field"] == "input.token_ids"


@pytest.mark.parametrize(("text_a", "text_b", "layer"), [("hi", "hi", "tokenizer"), ("hi", "hi ", "prompt")])
def test_text_tells_a_tokenizer_from_a_prompt(text_a: str, text_b: str, layer: str) -> None:
    a = run(inputs=[[1]], outputs=[[5]])
    b = run(inputs=[[2]], outputs=[[6]])
    a = replace(a, sequences=(replace(a.sequences[0], input_text=text_a),))
    b = replace(b, sequences=(replace(b.sequences[0], input_text=text_b),))
    assert compare.compare(a, b)["layer"] == layer


def test_equal_tokens_with_another_text_lie_in_the_text() -> None:
    a, b = run(), run()
    a = replace(a, sequences=(replace(a.sequences[0], output_text="x"),))
    b = replace(b, sequences=(replace(b.sequences[0], output_text="y"),))
    assert compare.compare(a, b)["layer"] == "text"


def test_what_would_decide_is_named_where_nothing_explains() -> None:
    a, b = pair({"weights.loaded_root": unknown("weights.loaded_root", "process ended")}, None, moved=9.0, margin=1.0)
    answer = compare.compare(a, b)
    assert answer["verdict"] == "inconclusive"
    assert compare.EXIT[answer["verdict"]] == 3
    assert answer["unknown"][0]["field"] == "weights.loaded_root"
    assert answer["unknown"][0]["would_decide"]
    assert "process ended" in answer["unknown"][0]["because"]
    assert any("weights.loaded_root" in sentence for sentence in answer["advice"])


def test_without_any_output_it_could_not_tell() -> None:
    bare = replace(run(), sequences=(Sequence(row=0, ret=0, input_key="k"),))
    assert compare.compare(bare, bare)["verdict"] == "inconclusive"


def test_under_another_key_only_ids_compare() -> None:
    def sealed(key_id: str) -> Run:
        return replace(run(key_id=key_id), sequences=(Sequence(row=0, ret=0, input_key="a", output_key="b"),))

    assert compare.compare(sealed("k"), sealed("k"))["verdict"] == "same"
    other = replace(sealed("z"), sequences=(Sequence(row=0, ret=0, input_key="c", output_key="d"),))
    answer = compare.compare(sealed("k"), other)
    assert (answer["verdict"], answer["inputs"]["equal"], answer["outputs"]["equal"]) == ("inconclusive", None, None)
    assert (answer["causes"], compare.EXIT[answer["verdict"]]) == ([], 3)
    told = replace(other, sequences=(replace(other.sequences[0], output_text="x"),))
    mine = replace(sealed("k"), sequences=(replace(sealed("k").sequences[0], output_text="y"),))
    assert compare.compare(mine, told)["verdict"] == "inconclusive"


# -- pairing ----------------------------------------------------------------------------------------


def test_rows_are_paired_by_equal_input() -> None:
    a = run(inputs=[[1], [2]], outputs=[[5], [6]])
    b = run(inputs=[[2], [1]], outputs=[[6], [7]])
    answer = compare.compare(a, b)
    assert [(item["a"]["prompt"], item["b"]["prompt"], item["verdict"]) for item in answer["pairs"]] == [
        (0, 1, "divergent"),
        (1, 0, "same"),
    ]
    assert answer["verdict"] == "divergent"


def test_the_pair_that_parts_first_stands_on_top() -> None:
    a = run(inputs=[[1], [2]], outputs=[[5, 6, 7], [5, 6, 7]])
    b = run(inputs=[[1], [2]], outputs=[[5, 6, 8], [5, 9, 7]])
    assert compare.compare(a, b)["a"]["prompt"] == 1


def test_one_prompt_held_many_times_must_be_named() -> None:
    a = run(inputs=[[1], [3]], outputs=[[5], [6]])
    b = run(inputs=[[1], [1]], outputs=[[5], [6]])
    with pytest.raises(AmbiguousRows, match="2 times"):
        compare.compare(a, b)
    assert compare.compare(a, b, (0, None), (1, None))["verdict"] == "divergent"


def test_runs_without_a_common_prompt_must_be_named() -> None:
    a = run(inputs=[[1], [2], [3]], outputs=[[5], [6], [7]])
    with pytest.raises(AmbiguousRows, match="no prompt in common"):
        compare.compare(a, run(inputs=[[8], [9]], outputs=[[5], [6]]))
    # as many of one as of the other are paired in order
    assert len(compare.compare(a, run(inputs=[[7], [8], [9]], outputs=[[5], [6], [7]]))["pairs"]) == 3


def test_a_row_that_is_not_there_is_refused() -> None:
    with pytest.raises(AmbiguousRows, match="has no row 7"):
        compare.compare(run(), run(), (7, None), None)
    with pytest.raises(AmbiguousRows, match="holds no sequence"):
        compare.compare(replace(run(), sequences=()), run())


def test_a_return_index_can_be_named() -> None:
    two = replace(
        run(), sequences=(run().sequences[0], replace(sequence(0, [1, 2, 3, 4], [9], default_steps([9])), ret=1))
    )
    assert compare.compare(run(), two, None, (0, 1))["b"]["return"] == 1


# -- the story --------------------------------------------------------------------------------------


def test_the_story_names_token_margin_and_cause() -> None:
    a, b = pair({"batch.size": 1}, {"batch.size": 4})
    text = "\n".join(line for _, line in story.lines(compare.compare(a, b), {6: " six"}.get, {7: " seven"}.get))
    assert text.startswith("Near tie")
    assert "The outputs part at token 1." in text
    assert "A chose 6 ' six', 0.125 (1 ulp) ahead of 7" in text
    assert "1. batch.size: 1 in A, 4 in B" in text


def test_the_story_tells_what_was_not_known() -> None:
    many = {f"env.X{n}": n for n in range(12)}
    a, b = pair({"weights.loaded_root": unknown("w")}, dict(many), moved=9.0)
    text = "\n".join(line for _, line in story.lines(compare.compare(a, b)))
    assert "would decide" in text
    assert "more (--json lists all)" in text


def test_markdown_cannot_be_injected_into() -> None:
    a, b = pair({"generation.repetition_penalty": "<b>|x|</b> `code`"}, {"generation.repetition_penalty": 2}, moved=0.0)
    page = story.markdown(compare.compare(a, b))
    assert "<b>" not in page
    assert "\\<b\\>" in page


def test_every_part_of_the_contract_is_there() -> None:
    answer = compare.compare(*pair({"batch.size": 1}, {"batch.size": 4}))
    assert set(answer) == {
        "schema", "a", "b", "layer", "explained", "verdict", "inputs", "outputs", "causes", "dismissed", "unknown", "pairs",
        "history", "runs", "groups", "advice", "declared", "endings",
    }  # fmt: skip
    assert set(answer["causes"][0]) == {
        "field", "a", "b", "effect", "dimension", "confidence", "because", "try", "with", "alternatives",
    }  # fmt: skip
    assert set(answer["outputs"]["logit_change"]) >= {"max_abs", "ulps", "over_tokens"}
    assert set(answer["outputs"]["a"]) == {"token_id", "logprob", "runner_up_id", "margin", "margin_ulps"}


def test_two_causes_that_would_do_name_each_other() -> None:
    fields_a = {"cpu.capability": "AVX2", "model.attn_implementation": "sdpa"}
    fields_b = {"cpu.capability": "DEFAULT", "model.attn_implementation": "eager"}
    causes = compare.compare(*pair(fields_a, fields_b))["causes"]
    assert {cause["field"] for cause in causes} == {"cpu.capability", "model.attn_implementation"}
    assert causes[0]["alternatives"] == [causes[1]["field"]]


def test_a_field_of_a_users_own_is_a_suspect_at_the_end_of_the_line() -> None:
    answer = compare.compare(
        *pair({"my.kv_split": 1}, {"my.kv_split": 4, "generation.repetition_penalty": 2.0}, moved=0.0)
    )
    assert [cause["field"] for cause in answer["causes"]] == ["generation.repetition_penalty", "my.kv_split"]
    assert Field("my.kv_split", 1) != Field("my.kv_split", 4)


def test_the_mask_is_the_cause_where_it_alone_hides_a_token() -> None:
    bare = Field.moot("batch.mask_holes", "nothing is hidden")
    answer = compare.compare(*pair({"batch.mask_holes": bare}, {"batch.mask_holes": [[[1, 2]]]}, moved=9.0, margin=3.0))
    assert (answer["verdict"], answer["inputs"]["equal"]) == ("divergent", True)
    assert [cause["field"] for cause in answer["causes"]] == ["batch.mask_holes"]
    assert "hides are not attended to" in answer["causes"][0]["because"]
    assert "attention_mask" in answer["advice"][0]


def test_keys_that_cover_a_mask_do_not_tell_whether_the_ids_differ() -> None:
    a, b = pair({}, {"batch.mask_holes": [[[1, 2]]]}, moved=9.0, margin=3.0)
    a = replace(a, sequences=(replace(a.sequences[0], input_ids=None, input_key="1"),))
    b = replace(b, sequences=(replace(b.sequences[0], input_ids=None, input_key="2"),))
    answer = compare.compare(a, b)
    assert (answer["verdict"], answer["inputs"]["equal"]) == ("inconclusive", None)
    said = {item["field"]: item["because"] for item in answer["unknown"] if item["would_decide"]}
    assert "cover more than the ids" in said["input.token_ids"]


def test_digests_beneath_a_cast_decide_whatever_the_files_say() -> None:
    root, files = {"weights.loaded_root": "p1:sha256:" + "2" * 64}, {"weights.files_root": "x"}
    one, other = {"model.dtype": "float32"}, {"model.dtype": "bfloat16"} | root

    def judged(a: str, b: str, more: dict[str, Any], moved: float = 0.125, margin: float = 0.125) -> dict[str, Any]:
        name = "weights.bfloat16_root"
        sides = one | {name: a} | more, other | {name: b} | more
        return compare.compare(*pair(*sides, moved=moved, margin=margin))

    for far in ({}, {"moved": 9.0, "margin": 3.0}):
        for more in ({}, files):
            same = judged("1", "1", more, **far)
            assert [cause["field"] for cause in same["causes"]] == ["model.dtype"]
            assert same["verdict"] == ("divergent" if far else "near_tie")
            changed = judged("1", "2", more, **far)
            assert changed["causes"][0]["field"] == "weights.loaded_root"
            assert changed["verdict"] == "not_comparable"


def test_equal_parameters_under_other_tables_are_one_model_and_untied_ones_cannot_be_told_by_a_cast() -> None:
    root, rope = {"weights.loaded_root": "p1:sha256:" + "2" * 64}, "model.rope_parameters"
    same = {"weights.parameters_root": "1"}
    answer = compare.compare(*pair({rope: 1} | same, {rope: 2} | same | root, moved=9.0, margin=3.0))
    assert ([cause["field"] for cause in answer["causes"]], answer["verdict"]) == ([rope], "divergent")
    untied = {"model.tied_weights": True, "weights.float16_root": "1"}
    other = {"model.tied_weights": False, "weights.float16_root": "2"} | root
    assert compare.compare(*pair(untied, other))["verdict"] == "inconclusive"


def test_a_model_that_was_tied_otherwise_is_another_where_the_logits_moved_far() -> None:
    files = {"weights.files_root": "x"}
    other = {"model.tied_weights": False, "weights.loaded_root": "p1:sha256:" + "2" * 64} | files
    answer = compare.compare(*pair({"model.tied_weights": True} | files, other, moved=9.0, margin=3.0))
    assert [cause["field"] for cause in answer["causes"]] == ["model.tied_weights"]
    assert answer["verdict"] == "not_comparable"


def test_quantised_layers_are_named_and_not_the_ties_that_went_with_them() -> None:
    name, width = (f"model.quantization_config.{what}" for what in ("quant_method", "bits"))
    tied, root = "weights.tied_keys", {"weights.loaded_root": "p1:sha256:" + "2" * 64}
    plain = {
        name: Field.moot(name, "the model is not quantized"),
        width: Field.moot(width, "the model is not quantized"),
    }
    one, other = plain | {tied: [["a", "b"]]}, {name: "torch.ao.nn.quantized.dynamic", width: 8, tied: [], **root}
    answer = compare.compare(*pair(one, other, moved=9.0, margin=3.0))
    assert (answer["causes"][0]["field"], answer["causes"][0]["with"]) == (name, [width])
    assert "quantised layers" in {item["field"]: item["because"] for item in answer["dismissed"]}[tied]
    assert "one quantisation" in answer["advice"][0]
