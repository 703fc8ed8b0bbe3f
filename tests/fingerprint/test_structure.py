"""How a model is put together: each change of it in its own field, nothing read that is a label, and what is compiled."""

import gc
import weakref
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AttentionInterface, AttentionMaskInterface
from transformers.masking_utils import sdpa_mask
from transformers.models.llama import modeling_llama

import provenance
from provenance.facts import Field, State
from provenance.fingerprint import model as readers
from provenance.fingerprint import structure
from tests.fakes import models

EAGER = {"backend": "eager"}


def _fields(model: Any) -> dict[str, Field]:
    return {item.name: item for item in structure.fields(model)}


def _read(model: Any, name: str) -> Any:
    found = _fields(model)[name]
    assert found.state is State.VALUE, found
    return found.value


# -- compilation ----------------------------------------------------------------------------------------


def _forward(model: Any) -> None:
    model.forward = torch.compile(model.forward, **EAGER)


def _layers(model: Any) -> None:
    for layer in model.model.layers:
        layer.compile(**EAGER)


def _module(model: Any) -> None:
    model.model.layers[0].mlp = torch.compile(model.model.layers[0].mlp, **EAGER)


COMPILED: dict[str, tuple[Callable[[Any], Any], list[str]]] = {
    "the forward": (_forward, ["forward"]),
    "the model in place": (lambda model: model.compile(**EAGER), ["the model"]),
    "each layer": (_layers, ["model.layers.0", "model.layers.1"]),
    "one module": (_module, ["model.layers.0.mlp"]),
}


@pytest.mark.parametrize("way", sorted(COMPILED))
def test_what_is_compiled_is_seen_wherever_it_hangs(way: str) -> None:
    model = models.llama()
    before = _fields(model)
    assert before["torch.compile.active"].value is False
    assert before["torch.compile.modules"].state is before["torch.compile.mode_backend"].state is State.NOT_APPLICABLE
    change, places = COMPILED[way]
    change(model)
    after = _fields(model)
    assert after["torch.compile.active"].value is True
    assert after["torch.compile.modules"].value == places
    assert after["torch.compile.mode_backend"].value == ["eager, dynamic=None, fullgraph=False"]
    assert after["model.structure_digest"] == before["model.structure_digest"]  # compiled, and the same model
    assert readers.fingerprint(model).fields["torch.compile.active"].value is True


@pytest.mark.filterwarnings("ignore:.torch.jit.script_method")
def test_how_it_was_compiled_is_told_and_what_is_kept_from_the_compiler_is_not_compiled() -> None:
    model = models.llama()
    model.forward = torch.compile(model.forward, mode="max-autotune-no-cudagraphs", dynamic=True)
    (said,) = _read(model, "torch.compile.mode_backend")
    assert said.startswith("inductor, dynamic=True, fullgraph=False, ")
    assert "max_autotune=True" in said
    model.forward = torch.compile(type(model).forward.__get__(model), backend=lambda graph, _: graph.forward)
    assert __name__ in _read(model, "torch.compile.mode_backend")[0]
    model.forward = torch.compiler.disable(type(model).forward.__get__(model))
    assert _read(model, "torch.compile.active") is False


def test_a_class_whose_forward_is_compiled_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    owner = modeling_llama.LlamaMLP
    monkeypatch.setattr(owner, "forward", torch.compile(owner.forward, **EAGER))
    assert _read(models.llama(), "torch.compile.modules") == [
        "model.layers.0.mlp.forward",
        "model.layers.1.mlp.forward",
    ]


def test_many_places_are_told_in_a_few_words() -> None:
    found = []
    for count in (12, 11):
        model = models.llama(num_hidden_layers=12)
        for layer in model.model.layers[:count]:
            layer.compile(**EAGER)
        found += _read(model, "torch.compile.modules")
    assert [said.rpartition(" ")[0] for said in found] == ["model.layers.* x12", "model.layers.* x11"]


# -- structure ------------------------------------------------------------------------------------------


class _Scaled(nn.Module):  # type: ignore[misc]
    def __init__(self, inner: Any, scaling: Any) -> None:
        super().__init__()
        self.inner, self.scaling = inner, scaling

    def forward(self, hidden: Any) -> Any:
        return self.inner(hidden) * self.scaling


class _Again(_Scaled):
    pass


def _headed(make: Any, held: Any) -> Any:
    model = models.llama()
    model.lm_head = make(model.lm_head, held)
    return model


def test_the_plain_values_and_the_classes_of_modules_decide() -> None:
    held = [1.0, 50.0, -1, -2, None, "a", (1, 2), (1, 3), lambda x: x, lambda x: -x]
    found = [_read(_headed(_Scaled, item), "model.structure_digest") for item in held]
    found.append(_read(_headed(_Again, 1.0), "model.structure_digest"))
    found.append(_read(models.llama(), "model.structure_digest"))
    assert len(set(found)) == len(held) + 2
    assert _read(_headed(_Scaled, 1.0), "model.structure_digest") == found[0]
    activated = models.llama()
    activated.model.layers[0].mlp.act_fn = nn.Tanh()
    assert _read(activated, "model.structure_digest") != _read(models.llama(), "model.structure_digest")


def test_labels_training_and_use_do_not_count() -> None:
    model = models.llama()
    before = _read(model, "model.structure_digest")
    model.train()
    model.name_or_path = "elsewhere"
    model.activation_checkpointing_enable()
    provenance.wrap(model).generate(models.tensor(), max_new_tokens=2)
    assert _read(model, "model.structure_digest") == before


def test_a_function_that_cannot_be_seen_is_unknown() -> None:
    other = models.llama()
    found = _fields(_headed(_Scaled, lambda x: other))["model.structure_digest"]
    assert found.state is State.UNKNOWN
    assert found.reason.startswith("scaling of a module: it holds a model or a layer (other)")


def test_a_change_between_two_calls_is_in_the_second_and_no_weights_are_hashed_again(db: Path) -> None:
    model = provenance.wrap(_headed(_Scaled, 1.0))
    runs = []
    for scaling in (1.0, 50.0, 50.0):
        model.lm_head.scaling = scaling
        model.generate(models.tensor(), max_new_tokens=2)
        runs.append(models.last(db))
    found = [run.fields["model.structure_digest"].value for run in runs]
    assert found[0] != found[1] == found[2]
    assert len({run.fields["context.load"].value for run in runs}) == 1


def test_a_model_that_is_looked_at_can_still_be_freed() -> None:
    model = models.llama()
    provenance.wrap(model)
    readers.guard(model)
    gone = weakref.ref(model)
    del model
    gc.collect()
    assert gone() is None


# -- hooks ----------------------------------------------------------------------------------------------


def _bent(by: int) -> Any:
    return lambda module, inputs, output: output * by


def test_a_hook_is_told_by_its_place_and_by_what_it_does() -> None:
    found = []
    for by, place in ((1, "lm_head"), (1, "lm_head"), (2, "lm_head"), (1, "model.norm")):
        model = models.llama()
        assert _read(model, "model.forward_hooks_code") == []
        model.get_submodule(place).register_forward_hook(_bent(by))
        found += _read(model, "model.forward_hooks_code")
    assert found[0] == found[1]
    assert len(set(found)) == 3
    assert found[0].startswith(f"lm_head forward: {__name__}._bent.<locals>.<lambda> (")


def test_hooks_before_of_every_module_and_very_many_are_told(monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.llama()
    monkeypatch.setattr(nn.modules.module, "_global_forward_pre_hooks", {1: lambda module, inputs: None})
    model.register_forward_pre_hook(lambda module, inputs: None)
    first, second = _read(model, "model.forward_hooks_code")
    assert first.startswith("the model forward_pre: ")
    assert second.startswith("every module forward_pre: ")
    for part in model.modules():
        part.register_forward_hook(_bent(2))
    many = _read(model, "model.forward_hooks_code")
    assert len(many) == structure.SHOWN + 1
    assert many[-1].startswith("and ")


def test_a_hook_that_cannot_be_seen_is_unknown() -> None:
    model, other = models.llama(), models.llama()
    model.lm_head.register_forward_hook(lambda module, inputs, output: (other, output)[1])
    found = _fields(model)["model.forward_hooks_code"]
    assert found.state is State.UNKNOWN
    assert found.reason.startswith("a hook of lm_head: it holds a model or a layer (other)")


# -- attention ------------------------------------------------------------------------------------------


def test_the_functions_of_attention_are_named_and_one_put_in_their_place_is_told() -> None:
    model = models.llama(attn_implementation="sdpa")
    before = _fields(model)
    own = "transformers.integrations.sdpa_attention.sdpa_attention_forward"
    assert before["model.attention_functions"].value == {"sdpa": own}
    assert before["model.mask_functions"].value == {"sdpa": "transformers.masking_utils.sdpa_mask"}
    original = AttentionInterface._global_mapping["sdpa"]
    found = []
    try:
        for factor in (1, 2):
            AttentionInterface.register("sdpa", lambda *a, by=factor, **k: original(*a, **k))
            AttentionMaskInterface.register("sdpa", lambda *a, by=factor, **k: sdpa_mask(*a, **k))
            found.append((_read(model, "model.attention_functions"), _read(model, "model.mask_functions")))
    finally:
        AttentionInterface.register("sdpa", original)
        AttentionMaskInterface.register("sdpa", sdpa_mask)
    assert found[0][0] != found[1][0]
    assert found[0][1] != found[1][1]
    assert all(said["sdpa"].startswith(f"{__name__}.") for pair in found for said in pair)
    assert _fields(model)["model.attention_functions"] == before["model.attention_functions"]


def test_eager_attention_is_that_of_the_model_s_own_module() -> None:
    model = models.llama(attn_implementation="eager")
    name = f"{modeling_llama.__name__}.eager_attention_forward"
    assert _read(model, "model.attention_functions") == {"eager": name}


def test_sdpa_lists_what_it_can_choose_from_here() -> None:
    found = readers.fingerprint(models.llama(attn_implementation="sdpa")).fields
    assert found["model.attention_backend_resolved_sdpa"].value == ["flash", "math"]
