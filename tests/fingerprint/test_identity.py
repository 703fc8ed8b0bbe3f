"""Which model it is beyond its name: revisions, code, patches, adapters, keys, and what is on in training mode."""

import functools
import hashlib
import os
import shutil
import sys
import types
import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import AutoModelForCausalLM, LlamaForCausalLM
from transformers.models.llama.modeling_llama import LlamaAttention

import provenance
from provenance.catalogue.fields import spec
from provenance.facts import Field, State
from provenance.fingerprint import code, identity
from provenance.fingerprint import model as readers
from tests.fakes import models

COMMIT, OTHER = "a" * 40, "b" * 40


def _fields(model: Any, tokenizer: Any = None) -> dict[str, Field]:
    return {item.name: item for item in identity.fields(model, tokenizer)}


@pytest.mark.parametrize("kind", list(models.MODELS))
def test_every_field_is_declared_and_known_and_part_of_the_fingerprint(kind: str) -> None:
    model, tokenizer = models.MODELS[kind](), models.letters()
    found = _fields(model, tokenizer)
    assert [item for item in found.values() if not item.known] == []
    assert [name for name in found if spec(name).group == "other"] == []
    whole = readers.fingerprint(model, tokenizer).fields
    assert {name: whole[name] for name in found} == found


# -- revisions --------------------------------------------------------------------------------------


def _hub(home: Path, commit: str) -> Path:
    """Put a tiny model and its tokenizer into the hub's cache, as the hub does: links to blobs."""
    source = home / "source"
    models.llama().save_pretrained(source)
    models.letters().save_pretrained(source)
    repository = home / ".cache" / "huggingface" / "hub" / "models--some--tiny"
    snapshot = repository / "snapshots" / commit
    for folder in (repository / "blobs", snapshot, repository / "refs"):
        folder.mkdir(parents=True, exist_ok=True)
    (repository / "refs" / "main").write_text(commit)
    for file in source.iterdir():
        digest = hashlib.sha256(file.read_bytes()).hexdigest()
        shutil.copy(file, repository / "blobs" / digest)
        (snapshot / file.name).symlink_to(f"../../blobs/{digest}")
    return snapshot


LOAD = """
import os, sys
from transformers import AutoModelForCausalLM, AutoTokenizer
from provenance.fingerprint import identity, files
where = sys.argv[1]
model, tokenizer = AutoModelForCausalLM.from_pretrained(where), AutoTokenizer.from_pretrained(where)
found = {item.name: item.show() for item in identity.fields(model, tokenizer)}
print(found["model.revision"], found["tokenizer.revision"], found["generation_config.revision"], sep="|")
print(files.of_files(files.checkpoint(model, os.environ), lambda: False)[1])
"""


@pytest.mark.parametrize("way", ["name", "folder"])
def test_a_model_of_the_hub_has_the_commit_of_its_snapshot(way: str, home: Path, python: Callable[..., Any]) -> None:
    snapshot = _hub(home, COMMIT)
    where = "some/tiny" if way == "name" else str(snapshot)
    environ = {**os.environ, "HF_HUB_OFFLINE": "1"}
    said = python(LOAD, where, env=environ)
    first, second = said.stdout.splitlines()
    assert first.split("|")[:2] == [COMMIT, COMMIT]
    assert first.split("|")[2] in (COMMIT, "not applicable: the generation config was made from the model's own")
    assert second == "hub"


def test_of_two_cached_revisions_none_is_guessed(home: Path) -> None:
    snapshot = _hub(home, COMMIT)
    shutil.copytree(snapshot, snapshot.with_name(OTHER), symlinks=True)
    model, tokenizer = models.llama(), models.letters()
    model.config._name_or_path = tokenizer.name_or_path = "some/tiny"
    found = _fields(model, tokenizer)
    reason = "the loader keeps no revision, and the cache holds 2 revisions of some/tiny"
    assert found["model.revision"].reason == found["tokenizer.revision"].reason == reason
    model.config._commit_hash = OTHER  # as versions before 5 left it
    tokenizer.init_kwargs["_commit_hash"] = COMMIT
    found = _fields(model, tokenizer)
    assert (found["model.revision"].value, found["tokenizer.revision"].value) == (OTHER, COMMIT)


def test_a_folder_has_no_revision_and_a_model_from_nowhere_none_either(tmp_path: Path) -> None:
    model = models.llama()
    assert _fields(model)["model.revision"].state is State.UNSET
    model.config._name_or_path = str(tmp_path)
    assert _fields(model)["model.revision"].reason == "it was loaded from a folder, which has no revision"
    model.config._name_or_path = "never/seen"
    assert _fields(model)["model.revision"].reason == "the files of never/seen are not in the cache"


# -- code -------------------------------------------------------------------------------------------


def _module(name: str, path: Path, source: str, monkeypatch: pytest.MonkeyPatch) -> types.ModuleType:
    path.write_text(source)
    module = types.ModuleType(name)
    module.__file__ = str(path)
    monkeypatch.setitem(sys.modules, name, module)
    code = compile(source, str(path), "exec")
    types.FunctionType(code, vars(module))()
    return module


REMOTE = "import torch\nclass Remote(torch.nn.Linear):\n    def forward(self, x):\n        return super().forward(x)\n"


def test_remote_code_is_known_by_its_commit_and_by_its_source(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found: list[dict[str, Field]] = []
    for commit, source in ((COMMIT, REMOTE), (OTHER, REMOTE), (OTHER, REMOTE + "# edited\n")):
        name = f"transformers_modules.some.tiny.{commit}.modeling"
        made = _module(name, tmp_path / f"{len(found)}.py", source, monkeypatch).Remote(2, 2)
        found.append(_fields(made))
    assert [item["model.code_revision"].value for item in found] == [COMMIT, OTHER, OTHER]
    digests = [item["model.source_digest"].value for item in found]
    assert digests[0] == digests[1] != digests[2]
    assert [item["model.monkey_patched"].value for item in found] == [[], [], []]


def test_code_without_a_file_says_so(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    made = _module("typed_in", tmp_path / "x.py", REMOTE, monkeypatch).Remote(2, 2)
    (tmp_path / "x.py").unlink()
    assert _fields(made)["model.source_digest"].reason == "the module typed_in has no source file"
    assert _fields(nn.Linear(2, 2))["model.source_digest"].state is State.NOT_APPLICABLE


def _steer(self: Any, *args: Any, **kwargs: Any) -> Any:
    return type(self).forward(self, *args, **kwargs)


def _of_class(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = LlamaAttention.forward
    monkeypatch.setattr(LlamaAttention, "forward", lambda self, *a, **k: original(self, *a, **k))


def _wrapped(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    original = LlamaAttention.forward

    @functools.wraps(original)
    def forward(self: Any, *args: Any, **kwargs: Any) -> Any:
        return original(self, *args, **kwargs)

    monkeypatch.setattr(LlamaAttention, "forward", forward)


def _of_object(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    part = model.model.layers[1].self_attn
    part.forward = types.MethodType(_steer, part)


def _partial(model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    part = model.model.layers[1].self_attn
    part.forward = functools.partial(_steer, part)


@pytest.mark.parametrize("patch", [_of_class, _wrapped, _of_object, _partial])
def test_a_forward_put_in_another_s_place_is_named_and_the_guard_sees_it(
    patch: Callable[[Any, Any], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    model = models.llama()
    guard = readers.guard(model)
    patch(model, monkeypatch)
    (found,) = code.patches(model.modules())
    assert _fields(model)["model.monkey_patched"].value == [found]
    assert found.startswith("LlamaAttention.forward")
    assert __name__ in found
    assert readers.guard(model) != guard


def test_another_patch_of_the_same_name_is_another_patch(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    found = []
    for number in (1, 2):
        source = f"def forward(self, x):\n    return x + {number}\n"
        part = nn.Linear(2, 2)
        part.forward = _module("patching", tmp_path / "p.py", source, monkeypatch).forward
        found.append(code.patches([part])[0])
    assert found[0] != found[1]
    assert "Linear.forward of the object is patching.forward" in found[0]


def test_what_torch_transformers_and_we_do_is_no_patch() -> None:
    model = provenance.wrap(models.llama())
    model.generate(models.tensor(), max_new_tokens=2)
    assert code.patches(model.modules()) == []
    assert code.patches(torch.compile(models.llama(), backend="eager").modules()) == []


# -- training ---------------------------------------------------------------------------------------


def test_dropout_that_is_on_is_named_where_it_is_on() -> None:
    model = models.gpt2()
    assert _fields(model)["model.dropout_active"].value == []
    model.transformer.h[1].train()
    assert _fields(model)["model.dropout_active"].value == ["Dropout.p=0.1 x3"]
    for part in model.modules():
        if isinstance(part, nn.Dropout):
            part.p = 0.0
    assert _fields(model)["model.dropout_active"].value == []
    other = models.llama(attention_dropout=0.25).train()
    assert _fields(other)["model.dropout_active"].value == ["LlamaAttention.attention_dropout=0.25 x2"]


# -- keys -------------------------------------------------------------------------------------------


def test_what_no_file_held_is_named(tmp_path: Path) -> None:
    models.llama().save_pretrained(tmp_path)
    found = _fields(LlamaForCausalLM.from_pretrained(tmp_path))
    assert found["weights.missing_keys"].value == []
    assert found["weights.unexpected_keys"].reason == "the loader keeps no list of what it did not use"
    tensors = load_file(tmp_path / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, tmp_path / "model.safetensors", {"format": "pt"})
    model = AutoModelForCausalLM.from_pretrained(tmp_path)
    assert _fields(model)["weights.missing_keys"].value == ["lm_head.weight"]
    assert _fields(model.to(torch.bfloat16))["weights.missing_keys"].value == ["lm_head.weight"]


def test_a_tied_head_that_no_file_holds_is_not_missing(tmp_path: Path) -> None:
    models.gpt2().save_pretrained(tmp_path)
    assert "lm_head.weight" not in load_file(tmp_path / "model.safetensors")
    found = _fields(AutoModelForCausalLM.from_pretrained(tmp_path))
    assert found["weights.missing_keys"].value == []
    assert found["weights.tied_keys"].value == [["lm_head.weight", "transformer.wte.weight"]]


def test_where_the_loader_left_no_mark_the_keys_are_unknown() -> None:
    model = models.llama()
    assert _fields(model)["weights.missing_keys"].reason == "the model was not loaded from files"
    model.config._name_or_path = "somewhere"
    assert _fields(model)["weights.missing_keys"].reason == "the loader left no mark on the parameters"


# -- adapters ---------------------------------------------------------------------------------------


def _with_adapters() -> Any:
    peft = pytest.importorskip("peft")
    torch.manual_seed(3)
    options = {"target_modules": ["q_proj", "v_proj"], "init_lora_weights": False, "lora_dropout": 0.125}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # peft reads a name that transformers will drop
        model = peft.get_peft_model(models.llama(), peft.LoraConfig(r=2, lora_alpha=4, **options), "one")
        model.add_adapter("two", peft.LoraConfig(r=4, lora_alpha=4, **options))
    return model.eval()


def test_adapters_are_read_from_the_layers_that_compute_with_them() -> None:
    model = _with_adapters()
    found = _fields(model)
    assert readers.fingerprint(model).fields["adapter.names"].value == ["one", "two"]
    assert found["adapters.active"].value == ["one"]
    assert found["adapters.merged"].value == []
    assert (found["adapters.one.scaling"].value, found["adapters.two.scaling"].value) == (2.0, 1.0)
    assert found["adapters.one.config_digest"] != found["adapters.two.config_digest"]
    assert found["adapters.autocast_dtype"].value == ["float32"]
    assert found["adapters.dropout"].value == []
    assert _fields(model.train())["adapters.dropout"].value == ["Dropout.p=0.125 x4"]
    assert [name for name in found if spec(name).group == "other"] == []
    assert found["adapters.one.revision"].state is State.UNSET


CHANGES: dict[str, tuple[Callable[[Any], Any], str, Any]] = {
    "another adapter": (lambda model: model.set_adapter("two"), "adapters.active", ["two"]),
    "merged": (lambda model: model.merge_adapter(), "adapters.merged", ["one"]),
    "switched off": (lambda model: model.base_model.disable_adapter_layers(), "adapters.active", []),
    "scaled": (
        lambda model: [part.scale_layer(0.5) for part in model.modules() if hasattr(part, "scale_layer")],
        "adapters.one.scaling",
        1.0,
    ),
}


@pytest.mark.parametrize("name", sorted(CHANGES))
def test_a_change_of_adapters_is_seen_by_the_guard_and_stands_in_the_fields(name: str) -> None:
    change, field, value = CHANGES[name]
    model = _with_adapters()
    before = readers.guard(model)
    assert readers.guard(model) == before
    change(model)
    assert readers.guard(model) != before
    assert _fields(model)[field].value == value


def test_the_digest_of_an_adapter_s_configuration_knows_no_labels() -> None:
    one = SimpleNamespace(r=2, target_modules={"b", "a"}, base_model_name_or_path="x", revision="1")
    other = SimpleNamespace(r=2, target_modules={"a", "b"}, base_model_name_or_path="y", revision="2")
    assert identity.adapter_digest(one) == identity.adapter_digest(other)
    other.r = 3
    assert identity.adapter_digest(one) != identity.adapter_digest(other)
