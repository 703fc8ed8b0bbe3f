"""What to do: the setting, its cost and the proof, for every field of the catalogue, with commands that exist."""

import re

import pytest

from provenance.catalogue.fields import table
from provenance.cli.main import COMMANDS
from provenance.explain import advice, compare
from tests.explain.test_compare import pair
from tests.fakes.runs import run


def cause(field: str) -> dict[str, str]:
    return {"field": field}


def test_every_field_has_a_setting_a_cost_and_a_proof_and_names_only_commands_there_are() -> None:
    for name in table():
        said = advice.steps(cause(name), "01a0")
        assert len(said) == 2
        assert said[0].startswith("To remove the cause, ")
        assert " It costs " in said[0]
        assert f"with {name} as in B" in said[1]
        for command in re.findall(r"`provenance (\w+)", " ".join(said)):
            assert command in COMMANDS


def test_no_family_is_empty_and_none_hides_another() -> None:
    for item in advice.REMEDIES:
        assert any(advice.remedy(name) == (item.setting, item.cost) for name in table()), item.names


@pytest.mark.parametrize(
    ("field", "setting", "cost"),
    [
        ("batch.size", "one batch shape", "throughput"), ("torch.num_threads", "torch.set_num_threads(n)", "speed"),
        ("cpu.capability", "ATEN_CPU_CAPABILITY", "speed"), ("gpu.0.name", "one type of device", "placement"),
        ("model.dtype", "dtype=", "twice the memory"), ("weights.loaded_root", "revision=COMMIT", "updates"),
        ("generation.temperature", "pass it with every call", "nothing"), ("lib.transformers.version", "pin it", "updates"),
        ("model.forward_hooks", "handle.remove()", "there for"), ("model.monkey_patched", "does not load", "there for"),
        ("model.training", "model.eval()", "nothing"), ("tokenizer.padding_side", "pad on one side", "nothing"),
        ("batch.padding_side", "pad on one side", "nothing"), ("batch.mask_holes", "attention_mask", "nothing"),
        ("model.quantization_config.quant_method", "one quantisation", "memory"),
        ("model.rope_parameters", "one configuration", "nothing"), ("generation.logits_processor", "same code", "nothing"),
        ("rng.torch_cpu_state_sha256", "torch.manual_seed(n)", "variety"), ("my.own", "give my.own one value", "nothing"),
    ],
)  # fmt: skip
def test_the_setting_and_its_cost_fit_the_field(field: str, setting: str, cost: str) -> None:
    found = advice.remedy(field)
    assert (setting in found[0], cost in found[1]) == (True, True)


def test_the_catalogue_says_how_a_field_is_set() -> None:
    assert "(taskset)" in advice.steps(cause("cpu.affinity"), "b")[1]
    assert "as in B, all else" in advice.steps(cause("my.own"), "b")[1]


def test_an_id_that_is_none_is_no_part_of_a_command() -> None:
    assert "`provenance diff RUN last`" in advice.steps(cause("batch.size"), "a;rm -r ~")[1]


def test_every_answer_ends_with_what_to_do() -> None:
    assert compare.compare(run(), run())["advice"][0].startswith("Nothing to do. `provenance lock --run ")
    bare = run(outputs=[[]])
    parted = compare.compare(*pair({"batch.size": 1}, {"batch.size": 8}))["advice"]
    assert [line.split(",")[0] for line in parted[1:]] == ["To remove the cause", "To prove it"]
    assert compare.compare(bare, run())["advice"]
    assert advice.blank()[0].startswith("Record both")
