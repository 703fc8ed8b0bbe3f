"""Which differences cannot have done it, and the sentence that says so. Each rule fires where it should, and only there."""

from dataclasses import replace
from typing import Any

import pytest

from provenance.catalogue.fields import spec
from provenance.explain import causes, fields, natures, rules, tokens
from provenance.explain.fields import Difference
from provenance.facts import Field
from tests.fakes.runs import run, step, unknown


def judge(name: str, a: Any, b: Any, *, moved: float = 0.125, margin: float = 0.125, **more: Any) -> str:
    """Judge one difference between two runs that part at token 1, greedily and by rounding unless told otherwise."""
    shared = more.pop("shared", {})
    steps_a = [[step(5, 99, 3.0), step(6, 7, margin)]]
    steps_b = [[step(5, 99, 3.0), replace(step(6, 7, margin, moved=moved), token=7, runner_up=6)]]
    one = run([[5, 6]], steps=steps_a, fields={**shared, name: a if isinstance(a, Field) else Field(name, a)})
    other = run([[5, 7]], steps=steps_b, fields={**shared, name: b if isinstance(b, Field) else Field(name, b)})
    if more.pop("prefix", False):
        other = run([[5]], steps=[[step(5, 99, 3.0)]], fields=other.fields)
    sampled = bool(shared.get("generation.do_sample"))
    evidence = tokens.compare(one.sequences[0], other.sequences[0], sampled)
    differing, _ = fields.compare(one.fields, other.fields)
    names = frozenset(item.name for item in differing) | more.pop("also", set())
    case = rules.Pair(
        one, other, one.sequences[0], other.sequences[0], more.pop("inputs", True), evidence, sampled, names
    )
    return rules.dismissal(Difference(name, one.fields[name], other.fields[name]), case)


@pytest.mark.parametrize(
    "name", ["temperature", "top_k", "top_p", "min_p", "typical_p", "epsilon_cutoff", "eta_cutoff", "top_h"]
)
def test_greedy_decoding_reads_no_sampling_settings(name: str) -> None:
    assert judge(f"generation.{name}", 0.5, 0.9) == f"greedy decoding reads no {name} in transformers 5.24"


def test_the_rule_about_greedy_knows_its_versions() -> None:
    old = {"lib.transformers.version": "4.20.1"}
    assert judge("generation.top_p", 0.5, 0.9, shared=old) == ""
    assert judge("generation.top_p", 0.5, 0.9, shared={"lib.transformers.version": None}) == ""


def test_under_sampling_they_are_suspects() -> None:
    assert judge("generation.top_p", 0.5, 0.9, shared={"generation.do_sample": True}) == ""


@pytest.mark.parametrize(
    "name", ["generation.repetition_penalty", "generation.no_repeat_ngram_size", "generation.sequence_bias"]
)
def test_what_acts_in_greedy_stays_a_suspect(name: str) -> None:
    assert judge(name, 1.1, 1.3) == ""


def test_context_never_acts() -> None:
    assert "context" in judge("context.call_index", 1, 2)


def test_a_driver_without_a_gpu_in_use_is_noise() -> None:
    assert judge("gpu.driver_version", "550.1", "560.2") == "no CUDA device was in use"
    on_gpu = {"device.in_use": ["cuda"]}
    assert judge("gpu.driver_version", "550.1", "560.2", shared=on_gpu) == ""


def test_sdp_switches_act_on_the_cpu_too() -> None:
    assert judge("torch.backends.cuda.flash_sdp_enabled", True, False) == ""


def test_paths_are_noise_where_tensors_agree() -> None:
    assert "tensors in memory are equal" in judge("model.revision", "1", "2")
    other = {"weights.loaded_root": None}
    assert "context" in judge("model.name_or_path", "a/b", "c/d", shared=other)
    assert judge("model.revision", "1", "2", shared=other) == ""


def test_tokenizers_are_noise_where_ids_agree() -> None:
    assert "same token ids" in judge("tokenizer.sha256", "x", "y")
    assert "same token ids" in judge("chat_template.sha256", "x", "y") or "chat" in judge(
        "chat_template.sha256", "x", "y"
    )
    assert judge("tokenizer.sha256", "x", "y", inputs=False) == ""
    assert judge("tokenizer.sha256", "x", "y", inputs=None) == ""


def test_a_length_limit_acts_at_the_end_alone() -> None:
    assert "only end an output" in judge("generation.max_new_tokens", 20, 30)
    assert judge("generation.max_new_tokens", 20, 1, prefix=True) == ""


def test_equal_bits_acquit_everything_that_makes_logits() -> None:
    assert natures.fit("zero", spec("torch.num_threads")) < natures.RULED_OUT
    for name in ("torch.num_threads", "model.norm_eps", "model.attn_implementation", "batch.padding_side"):
        assert "equal to the last bit" in causes._ruled_out("zero", spec(name))
    assert causes._ruled_out("zero", spec("tokenizer.sha256")) == "nothing in the tokens speaks for it"
    assert judge("generation.repetition_penalty", 1.0, 1.1, moved=0.0) == ""


def test_seeds_are_noise_where_nothing_was_drawn() -> None:
    said = judge("seed.torch_initial", 1, 2)
    assert said in ("greedy decoding draws nothing", "neither run drew a random number")


def test_a_run_that_drew_against_one_that_did_not_is_one_difference() -> None:
    said = judge(
        "rng.torch_cpu_state_sha256", "a", "b", also={"generation.do_sample"}, shared={"generation.do_sample": True}
    )
    assert said == "only one of the two runs drew its tokens"


def test_digests_over_many_fields_say_nothing_of_their_own() -> None:
    assert judge("lib.all_digest", "a", "b")
    said = judge("generation.logits_processors", ["A"], ["B"], also={"generation.repetition_penalty"})
    assert "follows from the settings" in said
    assert judge("generation.logits_processors", ["A"], ["B"]) == ""
    for moved in (0.125, 5.0):  # another epsilon moves logits by as little as rounding does
        assert judge("model.config_digest", "a", "b", moved=moved) == ""


def test_a_digest_of_the_configuration_is_dismissed_only_where_every_value_that_acts_is_compared() -> None:
    digest, rest = "model.config_digest", "model.config_rest_digest"
    assert "listed by themselves" in judge(digest, "a", "b", also={"model.norm_eps"})
    assert judge(digest, "a", "b", also={"model.norm_eps", rest}) == ""
    assert judge(digest, "a", "b", shared={rest: "x"}).startswith("it differs only in what never acts")
    assert judge(digest, "a", "b", also={rest}) == ""
    assert "compared by itself" in judge("files.config.json", "x", "y", also={digest})
    assert judge("files.config.json", "x", "y") == ""
    lost = unknown("model.norm_eps", "absent")
    assert "covers it" in judge("model.norm_eps", 1e-6, lost, shared={digest: "a"})
    assert judge("model.norm_eps", 1e-6, lost) == ""
    assert judge("model.norm_eps", 1e-6, 1e-5, shared={digest: "a"}) == ""


def test_thread_counts_and_threads_stay_suspects() -> None:
    assert judge("torch.num_threads", 1, 2) == ""


def test_weights_equal_is_told_only_where_both_are_known() -> None:
    one = run()
    case = rules.Pair(
        one,
        one,
        one.sequences[0],
        one.sequences[0],
        True,
        tokens.compare(one.sequences[0], one.sequences[0], False),
        False,
    )
    assert case.weights_equal is True
    bare = run(fields={"weights.loaded_root": None})
    assert replace(case, a=bare).weights_equal is None


def test_training_mode_changes_nothing_where_nothing_in_the_model_acts_in_it() -> None:
    nothing = {"model.dropout_active": [], "model.module_kinds": ["moe"]}
    assert "no dropout is on" in judge("model.training", False, True, shared=nothing)
    for acts in (
        {"model.dropout_active": ["Dropout.p=0.1 x3"]}, {"model.module_kinds": ["norm of batches"]},
        {"model.dropout_active": unknown("model.dropout_active")}, {"model.module_kinds": unknown("model.module_kinds")},
    ):  # fmt: skip
        assert judge("model.training", False, True, shared=nothing | acts) == ""
