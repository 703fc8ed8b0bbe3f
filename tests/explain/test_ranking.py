"""How causes are weighed: by nature against evidence, by the past, against what was not recorded; and rules one by one."""

from dataclasses import replace
from typing import Any

import pytest

from provenance.catalogue.fields import spec, table
from provenance.errors import AmbiguousRows
from provenance.explain import causes, compare, conditions, natures, reports, rules, tokens
from provenance.explain.history import Counts, Evidence
from provenance.facts import Field, Run, Sequence
from tests.explain.test_compare import pair
from tests.explain.test_rules import judge
from tests.fakes.runs import run, step, unknown


def _first(answer: dict[str, Any]) -> str:
    return str(answer["causes"][0]["field"])


def test_every_declared_field_has_a_nature_and_every_nature_a_place() -> None:
    found = {natures.nature(item) for item in table().values()} | {natures.nature(spec("my.own"))}
    assert found == set(natures.NATURES)
    named = {nature for row in natures.FIT.values() for nature in row}
    assert named | {"stranger"} == set(natures.NATURES)
    assert all(0 <= value <= 1 for row in natures.FIT.values() for value in row.values())


@pytest.mark.parametrize(
    ("name", "nature"),
    [
        ("lib.jinja2.version", "template"), ("lib.tokenizers.version", "tokenizer"), ("lib.torchao.version", "library"),
        ("app.code_version", "code"), ("env.VLLM_PLUGINS", "function"), ("tokenizer.padding_side", "padding"),
        ("model.device_map", "placement"), ("generation.use_cache", "implementation"), ("env.PYTHONHASHSEED", "order"),
        ("vllm.sampling.temperature", "decoding"), ("vllm.cache_config.cache_dtype", "precision"),
        ("llama_cpp.n_ctx", "context"), ("llama_cpp.lora_path", "function"), ("service.request.temperature", "decoding"),
        ("service.response.system_fingerprint", "service"), ("env.HF_HUB_OFFLINE", "code"), ("my.own", "stranger"),
        ("batch.mask_given", "mask"), ("model.training", "dropout"), ("generation.max_new_tokens", "stop"),
        ("generation.cache_config", "kernel"), ("input.past_key_values_given", "kernel"), ("env.XLA_FLAGS", "kernel"),
    ],
)  # fmt: skip
def test_natures(name: str, nature: str) -> None:
    assert natures.nature(spec(name)) == nature


# -- the past -----------------------------------------------------------------------------------------


def _past(**fields: tuple[int, int, int, int]) -> dict[str, Evidence]:
    return {name.replace("__", "."): Evidence(Counts(*counts), 0.001, 0.01) for name, counts in fields.items()}


def test_the_past_turns_between_two_that_fit_alike() -> None:
    a, b = pair({"torch.num_threads": 1, "model.attn_implementation": "eager"})
    assert _first(compare.compare(a, b)) == "model.attn_implementation"
    past = _past(model__attn_implementation=(0, 9, 4, 4), torch__num_threads=(9, 1, 1, 9))
    answer = compare.compare(a, b, history=past)
    assert _first(answer) == "torch.num_threads"
    assert answer["history"]["torch.num_threads"]["differed_diverged"] == 9


def test_a_past_that_shows_nothing_changes_nothing() -> None:
    a, b = pair({"torch.num_threads": 1})
    calm = {"torch.num_threads": Evidence(Counts(1, 1, 1, 1), 0.5, 0.9)}
    one, other = compare.compare(a, b), compare.compare(a, b, history=calm)
    assert one["causes"] == other["causes"]
    assert compare.compare(a, b, history={})["history"] is None
    few = {"torch.num_threads": Evidence(Counts(0, 2, 1, 1), 0.5, 0.9)}
    assert compare.compare(a, b, history=few)["causes"] == one["causes"]


# -- what was not recorded ----------------------------------------------------------------------------


def test_what_one_side_does_not_know_competes_and_what_neither_knows_hardly() -> None:
    a, b = pair({"torch.num_threads": 1}, {"model.attn_implementation": unknown("model.attn_implementation")})
    answer = compare.compare(a, b)
    assert answer["verdict"] == "inconclusive"
    assert [item["field"] for item in answer["unknown"] if item["would_decide"]] == ["model.attn_implementation"]
    both = unknown("model.attn_implementation")
    a, b = pair({"torch.num_threads": 1, "model.attn_implementation": both}, {"model.attn_implementation": both})
    answer = compare.compare(a, b)
    assert (answer["verdict"], _first(answer)) == ("near_tie", "torch.num_threads")


def test_inputs_that_differ_for_a_reason_not_recorded_are_inconclusive() -> None:
    hidden = {"tokenizer.sha256": unknown("tokenizer.sha256")}
    answer = compare.compare(run([[5]], [[1, 2]]), run([[6]], [[1, 3]], fields=hidden))
    assert answer["verdict"] == "inconclusive"
    assert answer["unknown"][0]["field"] == "tokenizer.sha256"


# -- inputs -------------------------------------------------------------------------------------------


def _text(run_: Run, text: str, out: str) -> Run:
    sequence = Sequence(0, 0, f"in{text}", f"out{out}", input_text=text, output_text=out)
    return replace(run_, sequences=(sequence,))


def test_prompts_without_ids_are_compared_as_texts() -> None:
    a, b = _text(run(), "one", "x"), _text(run(), "two", "y")
    answer = compare.compare(a, b)
    assert (answer["verdict"], _first(answer)) == ("not_comparable", "input.rendered_prompt_sha256")
    assert answer["causes"][0]["because"] == "the prompts differ"
    templates = [{"chat_template.sha256": value} for value in ("s1", "s2")]
    a, b = (_text(run(fields=fields), text, text) for fields, text in zip(templates, ("one", "two"), strict=True))
    assert _first(compare.compare(a, b)) == "chat_template.sha256"


def test_a_tokenizer_that_differs_comes_before_the_ids_that_it_made() -> None:
    a, b = run([[5]], [[1, 2]]), run([[6]], [[1, 3]], fields={"tokenizer.sha256": "sha256:" + "d" * 64})
    answer = compare.compare(a, b)
    assert [cause["field"] for cause in answer["causes"]] == ["tokenizer.sha256", "input.token_ids"]
    assert answer["causes"][1]["because"] == "the token ids that reached the model differ from token 1 on"


def test_runs_under_two_keys_are_paired_by_their_ids() -> None:
    a, b = pair({"torch.num_threads": 1})
    b = replace(b, key_id="other", sequences=(*b.sequences, replace(b.sequences[0], row=1, input_ids=(9,))))
    a = replace(a, sequences=(*a.sequences, replace(a.sequences[0], row=1, input_ids=(9,))))
    assert len(compare.compare(a, b)["pairs"]) == 2


# -- kinds of evidence --------------------------------------------------------------------------------


def test_a_choice_past_the_best_token_points_to_decoding() -> None:
    """The logits moved far, and one run passed over its best token: a processor stood between."""
    a, b = pair({"generation.repetition_penalty": 1.3}, {"weights.loaded_root": "p1:sha256:" + "2" * 64}, moved=4.0)
    worse = replace(
        b.sequences[0].steps[1], token=6, runner_up=7, top_ids=(7, 6, 90, 91), top_logits=(30.0, 12.0, 9.0, 8.0)
    )
    sequence = replace(b.sequences[0], output_ids=(5, 90), steps=(b.sequences[0].steps[0], replace(worse, token=90)))
    answer = compare.compare(a, replace(b, sequences=(sequence,)))
    assert _first(answer) == "generation.repetition_penalty"
    bare = replace(
        a.sequences[0], steps=(a.sequences[0].steps[0], replace(a.sequences[0].steps[1], top_ids=(), top_logits=()))
    )
    assert tokens.compare(bare, replace(b, sequences=(sequence,)).sequences[0], False).overruled in (True, False)


def test_a_small_change_of_a_wide_margin_acquits_another_function() -> None:
    a, b = pair({"model.class": "x"}, {"model.class": "y"}, margin=3.0)
    answer = compare.compare(a, b)
    assert answer["causes"] == []
    said = {item["field"]: item["because"] for item in answer["dismissed"]}
    assert (
        said["model.class"]
        == "the logits moved by rounding alone, and the margin was too wide for that to turn the choice"
    )


def test_where_only_the_text_differs_what_makes_logits_is_acquitted() -> None:
    a, b = run([[5, 6]], fields={"torch.num_threads": 1}), run([[5, 6]])
    a, b = (
        replace(side, sequences=(replace(side.sequences[0], output_text=text),)) for side, text in ((a, "x"), (b, "y"))
    )
    answer = compare.compare(a, b)
    said = {item["field"]: item["because"] for item in answer["dismissed"]}
    assert said["torch.num_threads"] == "the token ids that came out are equal"


# -- rules --------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "shared", "sentence"),
    [
        ("env.OMP_NUM_THREADS", {}, "it sets torch.num_threads, which is equal in both"),
        ("env.LD_LIBRARY_PATH", {"loaded.libc": "build-id:1"}, "the 1 libraries that were really loaded are equal"),
        ("lib.tokenizers.version", {}, "it prepares inputs and reads outputs"),
        ("files.tokenizer.json", {}, "both runs fed the same token ids to the model"),
        ("input.token_ids_sha256", {}, "both runs fed the same token ids to the model"),
        ("files.generation_config.json", {}, "the settings that it led to are compared one by one"),
        ("files.config.json", {"model.config_digest": "x"}, "the configuration that it led to is equal"),
        ("container.image_digest", {}, "every package that can matter is compared by its own version"),
        ("lib.safetensors.version", {}, "the tensors in memory are equal"),
        ("files.model.safetensors", {}, "the tensors in memory are equal"),
    ],
)
def test_what_leads_to_equal_things_is_dismissed(name: str, shared: dict[str, Any], sentence: str) -> None:
    assert judge(name, "x", "y", shared=shared).startswith(sentence)


@pytest.mark.parametrize(
    ("name", "shared", "also"),
    [
        ("env.OMP_NUM_THREADS", {"torch.num_threads": unknown("torch.num_threads")}, set()),
        ("env.LD_LIBRARY_PATH", {"loaded.libc": "build-id:1"}, {"loaded.cublas"}),
        ("env.LD_LIBRARY_PATH", {}, set()),
        ("processor.config_digest", {}, set()),
        ("input.past_key_values_given", {}, set()),
        ("generation.mode", {}, set()),
    ],
)
def test_and_where_that_is_not_so_it_stays_a_suspect(name: str, shared: dict[str, Any], also: set[str]) -> None:
    assert judge(name, "x", "y", shared=shared, also=also) == ""


def test_tensors_follow_from_what_made_them() -> None:
    files = {"weights.files_root": "z"}
    said = judge("weights.loaded_root", "x", "y", also={"model.dtype"}, shared=files)
    assert "cast to another type" in said
    assert judge("weights.loaded_root", "x", "y", also={"model.dtype"}) == ""
    assert judge("weights.loaded_root", "x", "y", also={"model.dtype", "weights.files_root"}) == ""
    assert judge("weights.loaded_root", "x", "y") == ""


def test_the_way_of_decoding_follows_from_what_chose_it() -> None:
    assert judge("generation.mode", "x", "y", also={"generation.num_beams"}) == "it follows from generation.num_beams"
    for name in ("generation.temperature", "generation.top_k"):
        said = judge(name, 1, 2, also={"generation.do_sample"}, shared={"generation.do_sample": True})
        assert said == "only one of the two runs draws its tokens, and that is listed by itself"
    values = judge("model.config_digest", "x", "y", also={"model.rope_parameters"}, moved=9.0)
    assert values == "the values in it that differ are listed by themselves"


def test_a_stream_that_nobody_drew_from_is_acquitted() -> None:
    assert judge("rng.python_state_sha256", "x", "y") == "neither run drew a random number"
    assert judge("env.PYTHONHASHSEED", "1", "2", inputs=None) == ""
    assert judge("generation.num_return_sequences", 1, 2, shared={"generation.num_beams": 3}) == ""


def test_older_versions_are_not_spoken_for() -> None:
    assert judge("generation.top_p", 0.9, 1.0, shared={"lib.transformers.version": "4.20.0"}) == ""


# -- conditions ---------------------------------------------------------------------------------------


def _holds(word: str, **fields: object) -> bool | None:
    made = {name.replace("__", "."): value for name, value in fields.items()}
    table_ = {name: value if isinstance(value, Field) else Field(name, value) for name, value in made.items()}
    return conditions.truth(word, Run("", "call", "vllm", "generate", "ok", 0, 0, table_, ()))


def test_engines_and_services_draw_by_their_temperature() -> None:
    assert _holds("sample", vllm__sampling__temperature=0.7) is True
    assert _holds("sample", llama_cpp__sampling__temperature=0) is False
    assert _holds("sample", service__request__temperature=Field.unset("service.request.temperature")) is True
    assert _holds("sample", vllm__sampling__temperature=unknown("vllm.sampling.temperature")) is None
    assert _holds("sample") is None


def test_a_process_group_or_the_launcher_says_whether_there_are_many() -> None:
    assert _holds("distributed", distributed__initialized=True) is True
    assert _holds("distributed", env__WORLD_SIZE="4") is True
    assert _holds("quantized", sglang__quantization="fp8") is True
    assert _holds("quantized", sglang__quantization=Field.unset("sglang.quantization")) is False
    assert _holds("quantized") is None


def test_no_noise_is_alike_where_no_state_is_known() -> None:
    a, b = pair()
    evidence = tokens.compare(a.sequences[0], b.sequences[0], True)
    case = rules.Pair(a, b, a.sequences[0], b.sequences[0], True, evidence, True)
    assert case.same_noise
    assert causes.shown(case) == "drawn alike, rounding"
    blank = dict.fromkeys(rules.STREAMS)
    a, b = pair(blank, blank)
    case = rules.Pair(a, b, a.sequences[0], b.sequences[0], True, evidence, True)
    assert causes.shown(case) == "drawn, rounding"
    assert step(1, 2, 0.5).token == 1


# -- what was asked -----------------------------------------------------------------------------------


def _lost(run_: Run) -> Run:
    row = replace(run_.sequences[0], input_ids=None, input_key="", input_text=None)
    return replace(run_, sequences=(row,))


def test_where_it_is_not_known_what_was_asked_nothing_is_settled() -> None:
    """A penalty that differs would explain much, and so would another prompt."""
    a, b = pair({"generation.repetition_penalty": 1.0}, {"generation.repetition_penalty": 1.3}, moved=0.0)
    for one, other, why in ((_lost(a), b, "A was not kept"), (a, _lost(b), "B was not kept"),
                            (_lost(a), _lost(b), "A and B was not kept")):  # fmt: skip
        answer = compare.compare(one, other)
        assert (answer["verdict"], answer["inputs"]["equal"]) == ("inconclusive", None)
        assert answer["unknown"][0]["field"] == "input.token_ids"
        assert answer["unknown"][0]["would_decide"]
        assert answer["unknown"][0]["because"].endswith(why)

    def keyed(item: Run, key: str) -> Run:
        return replace(item, key_id=key, sequences=(replace(_lost(item).sequences[0], input_key="1f"),))

    answer = compare.compare(keyed(a, "k"), keyed(b, "z"))
    assert answer["verdict"] == "inconclusive"
    assert "two keys" in answer["unknown"][0]["because"]


def test_texts_tell_what_was_asked_where_there_were_never_ids() -> None:
    a, b = (replace(_text(item, "hello", out), key_id=out) for item, out in zip(pair(), "kz", strict=True))
    assert compare.compare(a, b)["inputs"]["equal"] is True
    other = replace(_text(b, "hallo", "z"), key_id="z")
    assert compare.compare(a, other)["inputs"]["equal"] is False
    half = replace(b, sequences=(replace(b.sequences[0], input_ids=(1, 2)),))
    answer = compare.compare(a, half)
    assert (answer["inputs"]["equal"], answer["verdict"]) == (None, "inconclusive")


# -- what a stranger found ----------------------------------------------------------------------------


def test_a_token_that_left_the_best_moved_at_least_below_the_last_of_them() -> None:
    def seen(ids: tuple[int, ...], logits: tuple[float, ...]) -> Any:
        return replace(step(5, 99, 3.0), top_ids=ids, top_logits=logits)

    steady, fallen = seen((1, 2, 3), (9.0, 4.0, 3.0)), seen((2, 3, 4), (4.0, 3.0, 2.0))
    assert tokens._moved(steady, steady) == 0.0
    assert tokens._moved(steady, fallen) == tokens._moved(fallen, steady) == 7.0
    assert tokens._moved(steady, seen((7, 8), (1.0, 0.5))) is None


def test_dropout_draws_from_the_stream_and_the_seed_is_a_cause() -> None:
    drew = {"rng.consumed": True, "model.training": True, "model.dropout_active": ["Dropout.p=0.1 x2"]}
    a, b = pair(
        drew | {"rng.torch_cpu_state_sha256": "sha256:1"}, drew | {"rng.torch_cpu_state_sha256": "sha256:2"}, moved=9.0
    )
    answer = compare.compare(a, b)
    assert _first(answer) == "rng.torch_cpu_state_sha256"
    still = {**drew, "rng.consumed": False}
    a, b = pair(
        still | {"rng.torch_cpu_state_sha256": "sha256:1"},
        still | {"rng.torch_cpu_state_sha256": "sha256:2"},
        moved=9.0,
    )
    assert compare.compare(a, b)["causes"] == []


def test_embeddings_and_ids_are_not_known_to_be_other_inputs() -> None:
    a, b = pair({"input.empty": False}, {"input.empty": True})
    b = replace(b, sequences=(replace(b.sequences[0], input_ids=None, input_key="ff", input_text=None),))
    answer = compare.compare(a, b)
    assert (answer["inputs"]["equal"], answer["verdict"]) == (None, "inconclusive")
    assert "input.rendered_prompt_sha256" not in {cause["field"] for cause in answer["causes"]}


def test_what_could_not_be_told_is_not_allowed_away() -> None:
    a, b = pair({"generation.repetition_penalty": 1.0}, {"generation.repetition_penalty": 1.3}, moved=0.0)
    answer = compare.compare(_lost(a), b)
    assert [cause["field"] for cause in answer["causes"]] == ["generation.repetition_penalty"]
    assert reports.settle(answer, None, lambda _: True) == 3
    assert reports.settle(compare.compare(a, b), None, lambda _: True) == 0


def test_outputs_of_two_keys_are_not_called_equal() -> None:
    a, b = pair({"batch.size": 1}, {"batch.size": 2})
    blank: dict[str, Any] = {"output_ids": None, "output_text": None, "steps": (), "input_ids": None}
    a = replace(a, sequences=(replace(a.sequences[0], **blank, output_key="1"),))
    b = replace(b, key_id="other", sequences=(replace(b.sequences[0], **blank, output_key="2"),))
    answer = compare.compare(a, b)
    assert answer["verdict"] == "inconclusive"
    assert {item["because"] for item in answer["dismissed"]} == {"it is not known whether the outputs differ"}


def test_a_near_tie_is_harmless_only_where_it_is_known_what_moved_the_logits() -> None:
    apart = ({"batch.size": 1}, {"batch.size": 2})
    assert any("neither output is wrong. " in line for line in compare.compare(*pair(*apart))["advice"])
    hidden = {
        "weights.loaded_root": unknown("weights.loaded_root"),
        "weights.files_root": unknown("weights.files_root"),
    }
    a, b = pair(*({**side, **hidden} for side in apart))
    answer = compare.compare(a, b)
    assert answer["verdict"] != "near_tie" or any(
        "if both ran on the same weights" in line for line in answer["advice"]
    )


def test_logits_that_moved_where_nothing_differs_are_the_work_of_something_unseen() -> None:
    """Equal runs of a CPU give equal logits: a nonzero move is evidence, and no near tie excuses it."""
    nothing = compare.compare(*pair())
    assert (nothing["verdict"], nothing["causes"], nothing["explained"]) == ("divergent", [], False)
    said = nothing["advice"][0]
    assert said.startswith("Unexplained: something that decides was not recorded")
    assert "Equal runs give equal logits here, and these moved" in said
    assert "plain attribute" in said
    assert not any("neither output is wrong" in line for line in nothing["advice"])
    told = {"device.in_use": ["cuda"], "torch.deterministic_algorithms": True}
    assert compare.compare(*pair(told, told))["verdict"] == "divergent"


def test_kernels_that_need_not_repeat_and_what_was_meant_may_have_turned_a_tie() -> None:
    on = {"device.in_use": ["cuda"]}
    gpu = compare.compare(*pair(on, on))
    assert gpu["verdict"] == "near_tie"
    assert not any("Equal runs" in line or "neither output is wrong" in line for line in gpu["advice"])
    meant = pair({"batch.size": 1}, {"batch.size": 2})
    assert compare.compare(*meant, declared=lambda name: name == "batch.size")["verdict"] == "near_tie"


def test_what_was_recorded_from_the_outside_alone_is_named_as_what_may_hide_the_cause() -> None:
    code = {"generation.logits_processor": ["mine.Ban"], "generation.stopping_criteria": ["mine.Stop"]}
    said = compare.compare(*pair(code, code, moved=0.0, margin=2.0))["advice"][0]
    assert "the likeliest are the values inside generation.logits_processor." in said
    hooked = {"model.forward_hooks": 2, "model.monkey_patched": ["X.forward is y.z"]}
    said = compare.compare(*pair(hooked, hooked, moved=9.0, margin=3.0))["advice"][0]
    assert "what the hooks of model.forward_hooks do, what the code of model.monkey_patched does" in said
    one, other = run([[5, 6]], fields=code), run([[5]], fields=code)
    said = compare.compare(one, other)["advice"][0]
    assert "the values inside generation.stopping_criteria" in said
    gone = compare.compare(*pair({}, {"batch.mask_given": None}, moved=9.0, margin=3.0))
    assert gone["advice"][0].startswith("Unexplained: something that decides was not recorded")


def test_one_of_several_answers_is_named_so_that_it_can_be_found() -> None:
    one = run()
    row = one.sequences[0]
    three = replace(one, sequences=tuple(replace(row, ret=ret) for ret in range(3)))
    with pytest.raises(AmbiguousRows, match=r"rows 0\.0, 0\.1, 0\.2.*:0\.0\.$"):
        compare.compare(one, three)


def test_a_cast_does_not_hide_another_model_where_the_logits_moved_further_than_a_cast_moves_them() -> None:
    other = {"model.dtype": "float32", "weights.loaded_root": "p1:sha256:" + "2" * 64}
    far = compare.compare(*pair({"model.dtype": "bfloat16"}, other, moved=9.0, margin=3.0))
    assert {"model.dtype", "weights.loaded_root"} == {cause["field"] for cause in far["causes"]}
    assert far["verdict"] == "not_comparable"
    assert reports.settle(far, None, lambda name: name == "model.dtype") == 1
    files = {"weights.files_root": "z"}
    near = compare.compare(*pair({"model.dtype": "bfloat16"} | files, other | files))
    assert [cause["field"] for cause in near["causes"]] == ["model.dtype"]
