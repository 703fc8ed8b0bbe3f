"""Digests of weights: of the bytes in memory and of the bytes in files, whatever their layout, or a reason."""

import hashlib
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import nn
from transformers import LlamaForCausalLM

from provenance.facts import WeightEntry, WeightsManifest
from provenance.fingerprint import weights
from provenance.fingerprint.reading import Missing
from tests.fakes import models

FORMAT = {"format": "pt"}


def _never() -> bool:
    return False


def _entry(tensor: Any, stop: Callable[[], bool] = _never) -> WeightEntry:
    return weights.entry("tensor", "w", tensor, {}, stop)


def _sha(tensor: Any) -> str:
    """Digest a tensor another way: through a flat list of its bytes."""
    return hashlib.sha256(bytes(tensor.contiguous().reshape(-1).view(torch.uint8).tolist())).hexdigest()


LAYOUTS: dict[str, Callable[[], Any]] = {
    "float32": lambda: torch.arange(12.0).reshape(3, 4),
    "float64": lambda: torch.arange(5, dtype=torch.float64),
    "bfloat16": lambda: torch.arange(7, dtype=torch.bfloat16),
    "float16": lambda: torch.arange(7, dtype=torch.float16),
    "int8": lambda: torch.arange(-5, 5, dtype=torch.int8),
    "int64": lambda: torch.tensor([2**40, -1]),
    "bool": lambda: torch.tensor([True, False, True]),
    "float8": lambda: torch.arange(8.0).to(torch.float8_e4m3fn),
    "transposed": lambda: torch.arange(12.0).reshape(3, 4).t(),
    "every other": lambda: torch.arange(20.0)[::2],
    "from the middle": lambda: torch.arange(20.0)[5:9],
    "expanded": lambda: torch.tensor([[1.0], [2.0]]).expand(2, 3),
    "larger than a chunk": lambda: torch.arange(weights.CHUNK // 4 + 1000, dtype=torch.float32),
    "larger than a chunk, transposed": lambda: torch.arange(2_100_000, dtype=torch.float32).reshape(1050, 2000).t(),
    "a parameter": lambda: nn.Parameter(torch.arange(3.0)),
    "not a number, and zeros of both signs": lambda: torch.tensor([float("nan"), float("inf"), -0.0, 0.0]),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(LAYOUTS))
def test_the_digest_is_of_the_bytes_in_row_order_whatever_the_layout(name: str) -> None:
    tensor = LAYOUTS[name]()
    found = _entry(tensor)
    flat = tensor.detach()
    expected = (
        hashlib.sha256(flat.contiguous().numpy().tobytes()).hexdigest() if "larger" in name else _sha(flat)
    )  # fmt: skip
    assert found.sha256 == expected
    assert found.shape == tuple(tensor.shape)
    assert found.dtype == str(tensor.dtype).removeprefix("torch.")
    assert found.size == tensor.numel() * tensor.element_size()


def test_nothing_is_the_digest_of_nothing() -> None:
    assert _entry(torch.empty(0, 4)).sha256 == hashlib.sha256(b"").hexdigest()
    assert _entry(torch.tensor(2.5)).shape == ()


def test_the_sign_of_a_zero_counts() -> None:
    assert _entry(torch.tensor([0.0])).sha256 != _entry(torch.tensor([-0.0])).sha256


def test_hashing_a_tensor_leaves_it_as_it_was() -> None:
    tensor = torch.arange(12.0).reshape(3, 4).t()
    before, version, pointer = tensor.clone(), tensor._version, tensor.data_ptr()
    _entry(tensor)
    assert torch.equal(tensor, before)
    assert (tensor._version, tensor.data_ptr()) == (version, pointer)


def test_a_manifest_names_every_tensor_tied_ones_and_unsaved_buffers_included() -> None:
    model = models.gpt2()
    model.register_buffer("unsaved", torch.ones(2), persistent=False)
    found = {entry.name: entry for entry in weights.of_tensors(model).entries}
    expected = {name for name, _ in model.named_parameters(remove_duplicate=False)}
    expected |= {name for name, _ in model.named_buffers(remove_duplicate=False)}
    assert set(found) == expected
    assert found["unsaved"].kind == "buffer"
    assert found["lm_head.weight"].sha256 == found["transformer.wte.weight"].sha256
    assert found["lm_head.weight"].kind == "tensor"


def test_tied_tensors_are_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    reads: list[int] = []
    digest = weights._digest

    def counted(tensor: Any, stop: Any) -> str:
        reads.append(tensor.data_ptr())
        return digest(tensor, stop)

    monkeypatch.setattr(weights, "_digest", counted)
    model = models.gpt2()
    weights.of_tensors(model)
    assert len(reads) == len(set(reads)) < len(weights.named(model))


def test_views_that_share_an_address_are_not_taken_for_each_other() -> None:
    whole = torch.arange(16.0).reshape(4, 4)
    module = nn.Module()
    for name, tensor in (("a", whole), ("b", whole.t()), ("c", whole[:2]), ("d", whole.view(torch.int32))):
        module.register_buffer(name, tensor)
    found = {entry.name: entry for entry in weights.of_tensors(module).entries}
    assert len({entry.sha256 for entry in found.values()}) == 3  # b and c differ; d has the bytes of a
    assert found["a"].sha256 == found["d"].sha256
    assert found["b"].sha256 == _sha(whole.t())


def test_the_root_depends_on_names_types_shapes_and_bytes_and_on_no_order() -> None:
    model = models.llama()
    manifest = weights.of_tensors(model)
    assert WeightsManifest("tensors", tuple(reversed(manifest.entries))).root == manifest.root
    assert WeightsManifest.read(manifest.document()) == WeightsManifest("tensors", tuple(sorted(manifest.entries)))
    assert weights.of_tensors(models.llama()).root == manifest.root
    roots = {manifest.root}
    first = manifest.entries[0]
    for change in ({"name": "other"}, {"dtype": "int32"}, {"shape": (1, 2)}, {"sha256": "0" * 64}):
        roots.add(WeightsManifest("tensors", (first._replace(**change), *manifest.entries[1:])).root)
    roots.add(WeightsManifest("tensors", manifest.entries[1:]).root)
    assert len(roots) == 6


# -- what has no bytes ------------------------------------------------------------------------------


class Packed(torch.Tensor):  # type: ignore[misc]
    """Stands for a quantised tensor."""


@pytest.mark.parametrize(
    ("make", "reason"),
    [
        (lambda: torch.empty(2, device="meta"), "w is on the meta device: it has no bytes"),
        (lambda: torch.ones(2).as_subclass(Packed), "w is a Packed, whose bytes are not its value"),
        (lambda: nn.Parameter(torch.ones(2).as_subclass(Packed)), "whose bytes are not its value"),
    ],
)
def test_a_tensor_without_bytes_of_its_own_says_so(make: Callable[[], Any], reason: str) -> None:
    with pytest.raises(Missing, match=reason):
        _entry(make())


def test_a_tensor_whose_memory_was_taken_away_says_so() -> None:
    tensor = torch.arange(8.0)
    tensor.untyped_storage().resize_(0)  # what sharding does with weights that are not needed
    with pytest.raises(Missing, match="a tensor was released while it was hashed"):
        _entry(tensor)


def test_memory_taken_away_between_two_chunks_is_noticed() -> None:
    tensor = torch.zeros(weights.CHUNK // 2)

    def release() -> bool:
        tensor.untyped_storage().resize_(0)
        return False

    with pytest.raises(Missing, match="a tensor was released while it was hashed"):
        _entry(tensor, release)


def test_hashing_stops_between_chunks_when_it_is_told_to() -> None:
    asked = []

    def stop() -> bool:
        asked.append(True)
        return len(asked) == 2

    with pytest.raises(weights.Stopped):
        _entry(torch.zeros(weights.CHUNK), stop)
    assert len(asked) == 2


# -- what a model is by its tensors -----------------------------------------------------------------


def _root(model: Any) -> str:
    return weights.of_tensors(model).root


def _loaded(folder: Path, **options: Any) -> Any:
    return LlamaForCausalLM.from_pretrained(folder, **options)


@pytest.fixture
def saved(tmp_path: Path) -> Path:
    """Save a tiny Llama in one file."""
    models.llama().save_pretrained(tmp_path / "whole")
    return tmp_path / "whole"


def test_sharding_the_order_of_files_and_the_format_leave_the_root_alone(saved: Path, tmp_path: Path) -> None:
    model = models.llama()
    model.save_pretrained(tmp_path / "shards", max_shard_size="20KB")
    assert len(list((tmp_path / "shards").glob("*.safetensors"))) > 1
    turned = tmp_path / "turned"
    shutil.copytree(saved, turned)
    save_file(dict(reversed(load_file(saved / "model.safetensors").items())), turned / "model.safetensors", FORMAT)
    from_states = models.llama(seed=5)
    from_states.load_state_dict(dict(reversed(model.state_dict().items())))
    places = (saved, tmp_path / "shards", turned)
    assert {_root(_loaded(place)) for place in places} | {_root(from_states)} == {_root(model)}


def _ulp(model: Any) -> None:
    weight = model.model.layers[1].self_attn.k_proj.weight.detach()
    weight[3, 4] = torch.nextafter(weight[3, 4], torch.tensor(float("inf")))


def _merged(model: Any) -> None:
    """Merge an adapter of rank one by hand."""
    weight = model.model.layers[0].self_attn.q_proj.weight
    with torch.no_grad():
        weight += torch.linspace(0, 1e-3, weight.shape[0])[:, None] @ torch.ones(1, weight.shape[1])


def _narrow_buffer(model: Any) -> None:
    rotary = model.model.rotary_emb
    rotary.register_buffer("inv_freq", rotary.inv_freq.to(torch.bfloat16), persistent=False)


def _rounded_buffer(model: Any) -> None:
    rotary = model.model.rotary_emb
    rotary.inv_freq = rotary.inv_freq.to(torch.bfloat16).to(torch.float32)


OTHERS: dict[str, Callable[[Any], Any]] = {
    "one number by one unit in the last place": _ulp,
    "the type": lambda model: model.to(torch.bfloat16),
    "the type, and back": lambda model: model.to(torch.bfloat16).to(torch.float32),
    "a merged adapter": _merged,
    "the frequencies of the positions in another type": _narrow_buffer,
    "the frequencies of the positions, rounded": _rounded_buffer,
    "a tie": lambda model: setattr(model.lm_head, "weight", model.model.embed_tokens.weight),
    "another tie": lambda model: setattr(model.model.layers[0], "mlp", model.model.layers[1].mlp),
    "a tensor more": lambda model: model.register_buffer("more", torch.zeros(1), persistent=False),
}  # fmt: skip


@pytest.mark.parametrize("name", sorted(OTHERS))
def test_another_model_has_another_root(name: str, saved: Path) -> None:
    model = _loaded(saved)
    before = _root(model)
    OTHERS[name](model)
    assert _root(model) != before
    assert _root(_loaded(saved)) == before


def test_a_buffer_outside_the_state_dict_is_hashed(saved: Path) -> None:
    model = _loaded(saved)
    names = {entry.name for entry in weights.of_tensors(model).entries}
    assert {"model.rotary_emb.inv_freq", "lm_head.weight"} <= names
    assert "model.rotary_emb.inv_freq" not in model.state_dict()


def test_a_cast_at_loading_and_one_afterwards_are_told_apart_only_by_what_they_leave(saved: Path) -> None:
    loaded, cast = _loaded(saved, dtype=torch.bfloat16), _loaded(saved).to(torch.bfloat16)
    one, other = ({entry.name: entry for entry in weights.of_tensors(model).entries} for model in (loaded, cast))
    differing = {name for name in one if one[name] != other[name]}
    # loading keeps the frequencies in float32, a cast of the whole model does not
    assert differing == {"model.rotary_emb.inv_freq", "model.rotary_emb.original_inv_freq"}


def test_the_tie_in_force_counts_and_not_what_the_configuration_says(saved: Path) -> None:
    untied, asked = _loaded(saved), _loaded(saved, tie_word_embeddings=True)
    assert asked.config.tie_word_embeddings
    assert asked.lm_head.weight is not asked.model.embed_tokens.weight  # the file holds two different ones
    assert _root(asked) == _root(untied)
    tensors = load_file(saved / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, saved / "model.safetensors", FORMAT)
    tied = _loaded(saved, tie_word_embeddings=True)
    assert tied.lm_head.weight is tied.model.embed_tokens.weight
    assert _root(tied) != _root(untied)


def test_what_no_file_held_counts_as_it_was_initialised(saved: Path) -> None:
    tensors = load_file(saved / "model.safetensors")
    del tensors["lm_head.weight"]
    save_file(tensors, saved / "model.safetensors", FORMAT)
    roots = []
    for seed in (1, 2, 1):
        torch.manual_seed(seed)
        roots.append(_root(_loaded(saved)))
    assert roots[0] == roots[2] != roots[1]


# -- beneath a cast -----------------------------------------------------------------------------------


def _narrowed(model: Any, kind: str, stop: Callable[[], bool] = _never) -> str:
    entries = weights.of_tensors(model).entries
    return weights.narrowed(entries, dict(model.named_parameters(remove_duplicate=False)).__getitem__, kind, stop)


@pytest.mark.parametrize("kind", weights.HALVES)
def test_a_model_and_its_cast_share_a_digest_and_a_change_beneath_does_not(kind: str) -> None:
    dtype = getattr(torch, kind)
    plain, cast, bent = models.llama(), models.llama().to(dtype), models.llama().to(dtype)
    with torch.no_grad():
        bent.model.layers[1].mlp.down_proj.weight[0, 0] *= 1.1
    assert _narrowed(plain, kind) == _narrowed(cast, kind) == _narrowed(cast.float(), kind)
    assert _narrowed(bent, kind) != _narrowed(plain, kind)
    other = next(name for name in weights.HALVES if name != kind)
    with pytest.raises(Missing, match=f"is {kind}, which {other} does not hold"):
        _narrowed(bent, other)


def test_a_large_or_strided_tensor_is_cast_whole_and_a_tied_one_once(monkeypatch: pytest.MonkeyPatch) -> None:
    large = torch.randn(weights.CHUNK // 4 + 3 * weights.GRAIN + 5).reshape(-1, 1)
    for tensor in (large, torch.randn(30, 70).t(), torch.empty(0)):
        item = _entry(tensor.bfloat16())._replace(size=0)
        found = weights.narrowed([_entry(tensor)], {"w": tensor}.__getitem__, "bfloat16")
        assert found == WeightsManifest("parameters in bfloat16", (item,)).root
    tied = models.llama(tie_word_embeddings=True)
    seen: list[int] = []
    whole = weights._cast

    def counted(tensor: Any, kind: str, done: dict[object, str], stop: Callable[[], bool]) -> str:
        before = len(done)
        digest = whole(tensor, kind, done, stop)
        seen.append(len(done) - before)
        return digest

    monkeypatch.setattr(weights, "_cast", counted)
    _narrowed(tied, "float16")
    assert seen.count(0) == 1


def test_casting_stops_where_it_is_asked_to() -> None:
    with pytest.raises(weights.Stopped):
        _narrowed(models.llama(), "bfloat16", lambda: True)


def test_parameters_are_told_apart_from_the_tables_beside_them() -> None:
    one, other = models.llama(), models.llama()
    other.model.rotary_emb.inv_freq.mul_(2)
    first, second = weights.of_tensors(one), weights.of_tensors(other)
    assert first.root != second.root
    assert weights.parameters(first.entries) == weights.parameters(second.entries)
