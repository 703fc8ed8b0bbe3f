"""A loaded model as fields, and the tuple that tells in microseconds whether anybody touched it."""

import copy
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from transformers import AttentionInterface

from provenance.catalogue.fields import spec
from provenance.facts import Field, State
from provenance.fingerprint import model as readers
from tests.fakes import models


def _fields(model: Any, tokenizer: Any = None) -> dict[str, Field]:
    return dict(readers.fingerprint(model, tokenizer).fields)


# -- fields -----------------------------------------------------------------------------------------


def test_what_a_model_is_stands_in_its_fields(home: Path) -> None:
    model = models.llama()
    model.config._name_or_path = str(home / "models" / "tiny")
    found = _fields(model)
    expected = {
        "model.class": "transformers.models.llama.modeling_llama.LlamaForCausalLM", "model.name_or_path": "~/models/tiny",
        "model.dtype": "float32", "model.training": False, "model.device_map": "cpu", "device.in_use": ["cpu"],
        "model.is_encoder_decoder": False, "model.tied_weights": False, "model.max_position_embeddings": 1024,
        "model.attn_implementation": model.config._attn_implementation, "torch.compile.active": False,
    }  # fmt: skip
    assert {name: found[name].value for name in expected} == expected
    assert found["adapter.names"].state is State.NOT_APPLICABLE
    assert found["model.quantization_config.quant_method"].reason == "the model is not quantized"
    assert found["tokenizer.sha256"].reason == "no tokenizer was given to wrap()"


@pytest.mark.parametrize("kind", list(models.MODELS))
def test_every_field_of_a_model_is_known_and_declared(kind: str) -> None:
    found = _fields(models.MODELS[kind](), models.letters(chat=True))
    assert [item for item in found.values() if item.state is State.UNKNOWN] == []
    assert [name for name in found if spec(name).group == "other"] == []


def test_equal_models_share_a_fingerprint_and_weights_are_not_part_of_it() -> None:
    one, other = readers.fingerprint(models.llama(1)), readers.fingerprint(models.llama(2))
    assert one.digest == other.digest
    assert readers.fingerprint(models.gpt2()).digest != one.digest


def test_values_in_force_count_and_not_what_a_configuration_says() -> None:
    model = models.llama().to(torch.bfloat16)
    model.config.dtype = "float32"
    assert _fields(model)["model.dtype"].value == "bfloat16"
    model.lm_head.to(torch.float32)
    assert _fields(model)["model.dtype"].value == {"bfloat16": 20, "float32": 1}
    model.model.layers[1].train()
    assert _fields(model)["model.training"].value is True


@pytest.mark.parametrize("broken", sorted(readers._model(SimpleNamespace(), None)))
def test_one_broken_reader_costs_one_field(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.llama()
    whole, table = _fields(model), readers._model

    def refuse() -> object:
        raise RuntimeError("a wrapper that refuses")

    monkeypatch.setattr(readers, "_model", lambda *arguments: {**table(*arguments), broken: refuse})
    found = _fields(model)
    assert found[broken].reason == "RuntimeError: a wrapper that refuses"
    assert {name for name in whole if name != broken and whole[name].known and found[name] != whole[name]} == set()


def test_a_model_without_a_configuration_is_read_as_far_as_it_goes() -> None:
    found = _fields(nn.Sequential(nn.Conv1d(1, 1, 1), nn.LSTM(1, 1)))
    assert found["model.class"].value == "torch.nn.modules.container.Sequential"
    assert found["model.dtype"].value == "float32"
    assert found["model.module_kinds"].value == ["conv", "rnn"]
    assert found["model.config_digest"].state is State.UNKNOWN


def test_the_digest_of_a_configuration_knows_no_labels_but_every_value() -> None:
    config = models.llama().config
    before = readers.config_digest(config)
    other = copy.deepcopy(config)
    other._name_or_path, other.architectures, other.transformers_version = "elsewhere", ["Other"], "0.0.1"
    assert readers.config_digest(other) == before
    other.rms_norm_eps = 1e-5
    assert readers.config_digest(other) != before


@pytest.mark.parametrize(
    ("name", "changed", "value"),
    [
        ("model.norm_eps", {"rms_norm_eps": 1.3e-6}, 1.3e-6),
        ("model.rope_theta", {"vision": {"rope_theta": 5e5}}, 5e5),
        ("model.attention_scaling", {"query_pre_attn_scalar": 128}, 128),
        ("model.logit_scaling", {"final_logit_softcapping": 20.0, "logit_scale": 0.5},
         {"final_logit_softcapping": 20.0, "logit_scale": 0.5}),
        ("model.activation", {"hidden_act": "gelu"}, "gelu"),
    ],
)  # fmt: skip
def test_what_every_layer_computes_with_is_a_field_of_its_own(name: str, changed: dict[str, Any], value: Any) -> None:
    plain = _fields(models.llama())
    model = models.llama()
    model.config.update(changed)
    found = _fields(model)
    assert found[name].value == value
    differ = {key for key in found if key.startswith("model.") and plain[key] != found[key] and "digest" not in key}
    assert differ == {name}
    assert found["model.config_digest"] != plain["model.config_digest"]


def test_the_rest_of_a_configuration_is_what_no_field_holds_and_what_acts() -> None:
    def rest(**changed: Any) -> Any:
        model = models.llama()
        model.config.update(changed)
        return _fields(model)["model.config_rest_digest"].value

    for held in ({"rms_norm_eps": 0.5}, {"hidden_act": "gelu"}, {"initializer_range": 0.5}, {"sliding_window": 3},
                 {"attention_dropout": 0.5}, {"_name_or_path": "x"}):  # fmt: skip
        assert rest(**held) == rest()
    for acts in ({"pretraining_tp": 2}, {"attention_bias": True}, {"layer_norm_eps": 1e-5}, {"part": {"depth": 3}}):
        assert rest(**acts) != rest()


def test_quantisation_and_adapters_are_named() -> None:
    model = models.llama()
    model.config.quantization_config = {"quant_method": "gptq", "bits": 4, "group_size": 128, "dataset": ["secret"]}
    model.peft_config = {"second": object(), "first": object()}
    found = _fields(model)
    assert found["model.quantization_config.quant_method"].value == "gptq"
    assert found["model.quantization_config.bits"].value == 4
    assert "model.quantization_config.dataset" not in found
    assert found["adapter.names"].value == ["first", "second"]


def test_a_map_of_devices_is_kept_by_name() -> None:
    model = models.llama()
    model.hf_device_map = {"model.embed_tokens": 0, "lm_head": torch.device("cpu")}
    assert _fields(model)["model.device_map"].value == {"model.embed_tokens": "0", "lm_head": "cpu"}


def test_the_types_of_buffers_are_read_apart_from_those_of_parameters() -> None:
    model = models.llama()
    before = _fields(model)
    assert set(before["model.buffer_dtypes"].value) == {"float32"}  # type: ignore[call-overload]
    model.model.rotary_emb.inv_freq = model.model.rotary_emb.inv_freq.to(torch.bfloat16)
    after = _fields(model)
    assert after["model.buffer_dtypes"] != before["model.buffer_dtypes"]
    assert after["model.dtype"] == before["model.dtype"]


def test_a_processor_is_read_in_both_its_halves() -> None:
    class FastPixels:
        size = 224

        def to_dict(self) -> dict[str, int]:
            return {"size": self.size}

    whole = SimpleNamespace(tokenizer=models.letters(), image_processor=FastPixels())
    found = readers.fingerprint(models.llama(), whole).fields
    assert found["processor.backend"].value == "FastPixels"
    assert found["tokenizer.sha256"] == _fields(models.llama(), models.letters())["tokenizer.sha256"]
    whole.image_processor.size = 336
    assert (
        readers.fingerprint(models.llama(), whole).fields["processor.config_digest"] != found["processor.config_digest"]
    )
    alone = _fields(models.llama(), models.letters())
    assert alone["processor.backend"].state is State.NOT_APPLICABLE


# -- tokenizers -------------------------------------------------------------------------------------


def test_the_digest_of_a_tokenizer_is_that_of_what_it_does() -> None:
    one, other = models.letters(), models.letters()
    assert readers.tokenizer_digest(one) == readers.tokenizer_digest(other)
    other(["a", "abc"], padding=True, truncation=True, max_length=2)  # leaves padding and truncation behind
    assert readers.tokenizer_digest(one) == readers.tokenizer_digest(other)
    other.add_tokens(["Zürich"])
    assert readers.tokenizer_digest(one) != readers.tokenizer_digest(other)


def test_a_slow_tokenizer_is_digested_by_its_vocabulary() -> None:
    one, other = (SimpleNamespace(get_vocab=lambda size=size: {"a": 0, "b": size}) for size in (1, 2))
    assert readers.tokenizer_digest(one).startswith("sha256:")
    assert readers.tokenizer_digest(one) != readers.tokenizer_digest(other)


def test_a_chat_template_is_digested_and_one_that_reads_the_clock_is_named() -> None:
    plain, chat, dated = models.letters(), models.letters(chat=True), models.letters()
    dated.chat_template = models.CHAT + "{{ strftime_now('%d') }}"
    found = [_fields(models.llama(), tokenizer) for tokenizer in (plain, chat, dated)]
    assert found[0]["chat_template.sha256"].state is State.NOT_APPLICABLE
    assert found[1]["chat_template.sha256"] != found[2]["chat_template.sha256"]
    assert [item["chat_template.uses_date"].value for item in found] == [False, False, True]
    assert found[0]["tokenizer.special_ids"].value == {"bos": 1, "eos": 2, "pad": 0, "unk": 3}
    assert found[0]["tokenizer.padding_side"].value == "left"


def test_a_tokenizer_that_cannot_be_read_costs_its_own_fields() -> None:
    class Broken:
        padding_side = "left"

        def __getattr__(self, name: str) -> Any:
            raise RuntimeError(f"no {name}")

    found = _fields(models.llama(), Broken())
    assert found["tokenizer.sha256"].state is State.UNKNOWN
    assert found["tokenizer.padding_side"].value == "left"
    assert found["model.dtype"].value == "float32"


# -- the guard --------------------------------------------------------------------------------------


def _in_place(model: Any) -> None:
    with torch.no_grad():
        model.lm_head.weight[0, 0] += 1


def _replaced(model: Any) -> None:
    model.lm_head.weight = nn.Parameter(model.lm_head.weight.detach().clone())


def _hook(model: Any) -> None:
    model.model.layers[0].register_forward_hook(lambda module, inputs, output: output)


def _rehook(model: Any) -> None:
    _hook(model)
    model.model.layers[0]._forward_hooks.popitem(False)


def _pre_hook(model: Any) -> None:
    model.model.layers[0].register_forward_pre_hook(lambda module, inputs: None)


def _attention(model: Any) -> None:
    model.set_attn_implementation("eager")


def _frozen(model: Any) -> None:
    with torch.inference_mode():
        model.lm_head.weight = nn.Parameter(torch.zeros(64, 32), requires_grad=False)


CHANGES: dict[str, Callable[[Any], Any]] = {
    "one number of one tensor": _in_place,
    "a buffer": lambda model: model.model.rotary_emb.inv_freq.add_(1),
    "a parameter replaced by an equal one": _replaced,
    "a parameter made in inference mode": _frozen,
    "the type": lambda model: model.half(),
    "the training bit of one module": lambda model: model.model.layers[1].mlp.train(),
    "a hook": _hook, "a hook before": _pre_hook, "the attention": _attention,
    "another hook in the place of one": lambda model: _rehook(model),
    "a compiled forward": lambda model: setattr(model, "forward", torch.compile(model.forward, backend="eager")),
    "a compiled layer": lambda model: model.model.layers[0].compile(backend="eager"),
    "a scaling": lambda model: setattr(model.model.layers[0].self_attn, "scaling", 50.0),
    "a setting from -1 to -2": lambda model: setattr(model.model, "padding_idx", -2),
    "an activation": lambda model: setattr(model.model.layers[0].mlp, "act_fn", nn.Tanh()),
    "an attribute more": lambda model: setattr(model.lm_head, "factor", 2.0),
    "a function under a known name": lambda _: AttentionInterface.register("eager_too", _hook),
    "a hook on every module": lambda _: nn.modules.module.register_module_forward_pre_hook(lambda *_: None),
    "a module put in the place of another": lambda model: setattr(model.model.layers[0], "mlp", models.llama(9).lm_head),
    "a module taken away": lambda model: model.model.layers.pop(1),
    "a module more": lambda model: model.add_module("extra", nn.Linear(2, 2)),
    "weights loaded into it": lambda model: model.load_state_dict(models.llama(9).state_dict()),
}  # fmt: skip


# What leaves every tensor what it was: no weights are hashed again.
KEPT = {"a scaling", "a setting from -1 to -2", "an attribute more", "a function under a known name",
        "a hook on every module"}  # fmt: skip


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_the_guard_notices(name: str) -> None:
    model = models.llama()
    model.model.padding_idx = -1
    model.model.layers[0].register_forward_hook(lambda module, inputs, output: None)
    before = readers.guard(model)
    assert readers.guard(model) == before
    try:
        CHANGES[name](model)
        assert readers.guard(model) != before
        assert (readers.load(readers.guard(model)) == readers.load(before)) == (name in KEPT)
    finally:
        AttentionInterface._global_mapping.pop("eager_too", None)
        nn.modules.module._global_forward_pre_hooks.clear()


@contextmanager
def _used(model: Any) -> Iterator[None]:
    model(models.tensor()).logits.sum().backward()
    model.zero_grad(set_to_none=True)
    model.generate(models.tensor(), max_new_tokens=3)
    model.state_dict()
    list(model.named_parameters())
    yield


def test_the_guard_keeps_still_while_a_model_is_only_used() -> None:
    model = models.llama()
    before = readers.guard(model)
    with _used(model):
        assert readers.guard(model) == before


def test_the_guard_and_the_walk_see_every_tensor_once_a_place() -> None:
    model = models.gpt2()
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    names += [name for name, _ in model.named_buffers(remove_duplicate=False)]
    assert len(list(readers.tensors(model))) == len(names)
    assert {id(item) for item in readers.modules(model)} == {id(item) for item in model.modules()}


def test_the_guard_takes_tensors_that_keep_no_version_or_have_no_address() -> None:
    with torch.inference_mode():
        frozen = nn.Linear(2, 2)
    assert readers.guard(frozen) == readers.guard(frozen)
    meta = nn.Linear(2, 2, device="meta")
    assert readers.guard(meta) == readers.guard(meta)


# -- quantised after it was loaded --------------------------------------------------------------------


@pytest.mark.filterwarnings("ignore:torch")
@pytest.mark.filterwarnings("ignore::DeprecationWarning")
@pytest.mark.parametrize(("dtype", "bits"), [(torch.qint8, 8), (torch.float16, 16)])
def test_layers_tell_that_they_are_quantized_where_no_configuration_does(dtype: Any, bits: int) -> None:
    small = torch.ao.quantization.quantize_dynamic(models.llama(), {nn.Linear}, dtype=dtype)
    found = _fields(small)
    assert "torch.ao.nn.quantized.dynamic" in str(found["model.quantization_config.quant_method"].value)
    assert found["model.quantization_config.bits"].value == bits
    assert found["model.quantization_config.group_size"].reason == "it was quantized without a configuration"


def test_layers_and_tensors_of_known_packages_tell_it_too() -> None:
    model = models.llama()
    for home, name, bits in (("bitsandbytes.nn.modules", "Linear4bit", 4), ("hqq.core.quantize", "HQQLinear", None)):
        kind = type(name, (nn.Identity,), {"__module__": home})
        model.extra = kind()
        found = _fields(model)
        assert found["model.quantization_config.quant_method"].value == home.partition(".")[0]
        assert (found["model.quantization_config.bits"].value if bits else None) == bits
    tensor = type("Int4Tensor", (nn.Parameter,), {"__module__": "torchao.quantization"})
    model.extra = nn.Module()
    model.extra._parameters["weight"] = tensor(torch.ones(2))
    assert _fields(model)["model.quantization_config.quant_method"].value == "torchao Int4Tensor"
