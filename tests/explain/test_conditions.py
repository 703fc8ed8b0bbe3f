"""When a field can matter: conditions are true, false, or not told, and never guessed."""

import pytest

from provenance.catalogue.fields import table
from provenance.explain import conditions
from provenance.facts import Field
from tests.fakes.runs import run, unknown


@pytest.mark.parametrize(
    ("condition", "fields", "expected"),
    [
        ("always", {}, True),
        ("never", {}, False),
        ("device.cpu", {}, True),
        ("device.cuda", {}, False),
        ("device.cuda", {"device.in_use": ["cuda"]}, True),
        ("device.rocm", {"device.in_use": ["cuda"], "rocm.version": "6"}, True),
        ("device.rocm", {"device.in_use": ["cuda"]}, False),
        ("device.cuda", {"device.in_use": None}, None),
        ("bf16", {}, True),
        ("fp32", {}, False),
        ("fp32", {"model.dtype": {"float32": 2, "bfloat16": 10}}, True),
        ("fp16", {"torch.autocast.cuda": "torch.float16"}, True),
        ("fp32", {"model.dtype": None}, None),
        ("sample", {}, False),
        ("sample", {"generation.do_sample": True}, True),
        ("sample", {"generation.do_sample": None}, None),
        ("beam", {"generation.num_beams": 4}, True),
        ("beam", {}, False),
        ("batch.size>1", {"batch.size": 2}, True),
        ("batch.has_padding", {}, False),
        ("sdpa", {}, True),
        ("flash", {}, False),
        ("static_cache", {"generation.cache_implementation": "static"}, True),
        ("static_cache", {"generation.cache_implementation": Field.unset("generation.cache_implementation")}, False),
        ("static_cache", {}, None),
        ("assisted", {}, False),
        ("assisted", {"generation.prompt_lookup_num_tokens": 3}, True),
        ("assisted", {"generation.assistant_model": "some.Model"}, True),
        ("contrastive", {"generation.mode": "contrastive_search"}, True),
        ("compile", {"torch.compile.active": True}, True),
        ("training", {}, False),
        ("deterministic", {"torch.deterministic_algorithms": True}, True),
        ("autocast", {}, False),
        ("autocast", {"torch.autocast.cpu": "torch.bfloat16"}, True),
        ("quantized", {"model.quantization_config.quant_method": "awq"}, True),
        ("quantized", {"model.quantization_config.quant_method": Field.moot("model.quantization_config.quant_method", "no")}, False),
        ("quantized", {}, None),
        ("distributed", {"env.WORLD_SIZE": "8"}, True),
        ("distributed", {"env.WORLD_SIZE": Field.unset("env.WORLD_SIZE")}, False),
        ("lib.transformers", {}, True),
        ("lib.xformers", {"lib.xformers.version": Field.moot("lib.xformers.version", "not installed")}, False),
        ("engine.vllm", {}, False),
        ("engine.any", {}, False),
        ("remote", {}, False),
        ("moe", {"model.module_kinds": ["moe"]}, True),
        ("conv", {}, False),
        ("encdec", {}, False),
        ("torchscript", {}, False),
        ("einsum", {}, None),
        ("fp32&device.cuda", {}, False),
        ("device.cpu|device.cuda", {}, True),
        ("einsum|always", {}, True),
        ("einsum&never", {}, False),
        ("einsum&always", {}, None),
    ],
)  # fmt: skip
def test_a_condition_says_what_the_run_says(condition: str, fields: dict[str, object], expected: bool | None) -> None:
    assert conditions.active(condition, run(fields=fields)) is expected


def test_unknown_decides_nothing() -> None:
    assert (
        conditions.active("quantized", run(fields={"x": 1, "model.quantization_config.quant_method": unknown("m")}))
        is None
    )


def test_a_field_is_moot_only_if_it_is_in_both_runs() -> None:
    greedy, sampled = run(), run(fields={"generation.do_sample": True})
    assert conditions.moot("sample", greedy, greedy)
    assert not conditions.moot("sample", greedy, sampled)
    assert not conditions.moot("einsum", greedy, greedy)


def test_every_condition_of_the_catalogue_can_be_read() -> None:
    """A word that nobody knows would make its field a suspect for ever: each is known, or stated here as not told."""
    not_told = {"einsum", "encoder", "continuous_batching", "structured_output", "multimodal", "chat", "rag",
                "input.truncated", "input.cpu_ops"}  # fmt: skip
    for spec in table().values():
        for word in spec.active_when.replace("|", "&").split("&"):
            head = word.partition(".")[0]
            known = (
                word in conditions.WORDS or head in ("device", "engine", "lib") or word in ("always", "never", "remote")
            )
            assert known or word in not_told, (spec.name, word)


def test_the_reason_for_mootness_is_a_sentence() -> None:
    greedy = run(fields={"lib.xformers.version": Field.moot("lib.xformers.version", "not installed")})
    assert conditions.why_moot("sample", greedy, greedy) == "greedy decoding draws nothing"
    assert "xformers is not installed" in conditions.why_moot("lib.xformers", greedy, greedy)
    assert "vllm" in conditions.why_moot("engine.vllm", greedy, greedy)
    assert "context" in conditions.why_moot("never", greedy, greedy)
    assert "remote" in conditions.why_moot("remote", greedy, greedy)
    assert conditions.why_moot("einsum", greedy, greedy)
