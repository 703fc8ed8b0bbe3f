"""Weights beside parameters and buffers: packed by a quantiser, and tensors that a part keeps in an attribute."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from transformers import BertConfig, BertLMHeadModel, MixtralConfig, MixtralForCausalLM

import provenance
from provenance.fingerprint import weights
from provenance.fingerprint.reading import Missing
from tests.conftest import Command
from tests.fakes import models

# torch says that its own quantisers will go; models made by them are still run.
pytestmark = [
    pytest.mark.filterwarnings(f"ignore:{text}")
    for text in ("torch.ao.quantization is deprecated", "torch.quantize_per_tensor", "`torch.nn.utils.weight_norm`")
]


def _quantized(sign: float = 1.0, kind: Any = torch.qint8) -> Any:
    model = models.llama()
    with torch.no_grad():
        model.lm_head.weight.mul_(sign)
    return torch.ao.quantization.quantize_dynamic(model, {nn.Linear}, dtype=kind)


class Scaled(nn.Module):  # type: ignore[misc]
    """A head whose outputs are scaled by what a plain attribute holds."""

    def __init__(self, inner: Any, table: Any) -> None:
        super().__init__()
        self.inner, self.table = inner, table

    def forward(self, x: Any) -> Any:
        table = self.table
        if isinstance(table, dict):
            table = table["scale"]
        return self.inner(x) * (table[0] if isinstance(table, (list, tuple)) else table)


def _scaled(sign: float, form: Callable[[Any], Any] = lambda table: table) -> Any:
    model = models.llama()
    table = torch.linspace(0.5, 2.0, models.VOCABULARY) * sign
    model.lm_head = Scaled(model.lm_head, form(table))
    return model


class Opaque(nn.Linear):  # type: ignore[misc]
    """A layer with state that only its own code can give."""

    def get_extra_state(self) -> object:
        raise AssertionError("nobody may ask")


def _opaque() -> Any:
    model = models.llama()
    head = Opaque(32, models.VOCABULARY, bias=False)
    head.load_state_dict(model.lm_head.state_dict(), strict=False)
    model.lm_head = head
    return model


def _say(model: Any, name: str = "") -> Any:
    with provenance.run(name=name):
        out = provenance.wrap(model).generate(models.tensor(), max_new_tokens=3, do_sample=False)
    provenance.flush()
    return out


@pytest.mark.parametrize("kind", [torch.qint8, torch.float16])
def test_packed_weights_are_hashed_and_another_one_is_another_root(kind: Any) -> None:
    one, same, other = (weights.of_tensors(_quantized(sign, kind)) for sign in (1, 1, -1))
    assert one.root == same.root != other.root
    heads = [[item for item in side.entries if item.name == "lm_head.weight"] for side in (one, other)]
    assert [len(head) for head in heads] == [1, 1]
    assert heads[0][0].sha256 != heads[1][0].sha256
    assert weights.parameters(one.entries) != weights.parameters(other.entries)


def test_the_steps_of_a_quantized_tensor_count_and_not_only_their_numbers() -> None:
    steps = torch.tensor([1, 2, 3], dtype=torch.uint8)
    made = [torch._make_per_tensor_quantized_tensor(steps, scale, 0) for scale in (0.5, 0.25)]
    digests = {weights.entry("tensor", "w", item, {}, lambda: False).sha256 for item in made}
    assert len(digests) == 2


def _cells() -> Any:
    torch.manual_seed(3)
    return nn.Sequential(nn.LSTM(4, 4))


def test_packed_cells_convolutions_and_tables_are_read_too() -> None:
    def digests(edit: bool) -> list[str]:
        cells = _cells()
        torch.manual_seed(4)
        table = torch.ao.nn.quantized.Embedding(10, 4)
        layer = torch.ao.nn.quantized.Conv2d(3, 3, 3)
        scales, zeros = torch.full((10,), 0.5), torch.zeros(10)
        places = torch.quantize_per_channel(torch.ones(10, 4), scales, zeros, 0, torch.quint8)
        table.set_weight(places)
        kernel = torch.ones(3, 3, 3, 3) * (2.0 if edit else 1.0)
        layer.set_weight_bias(torch.quantize_per_tensor(kernel, 0.5, 0, torch.qint8), torch.zeros(3))
        if edit:
            with torch.no_grad():
                cells[0].weight_hh_l0.neg_()
            table.set_weight(torch.quantize_per_channel(torch.zeros(10, 4), scales, zeros, 0, torch.quint8))
        packed = torch.ao.quantization.quantize_dynamic(cells, {nn.LSTM}, dtype=torch.qint8)
        return [weights.of_tensors(model).root for model in (packed, table, layer)]

    one, same, other = digests(False), digests(False), digests(True)
    assert one == same
    assert all(a != b for a, b in zip(one, other, strict=True))


def test_a_quantized_head_negated_is_told_by_diff_and_by_check(db: Path, command: Command, tmp_path: Path) -> None:
    provenance.init(writer="off")
    for name, sign in (("a", 1.0), ("same", 1.0), ("b", -1.0)):
        _say(_quantized(sign), name)
    assert command("weights", "diff", "tag:a", "tag:same").returncode == 0
    found = command("weights", "diff", "tag:a", "tag:b")
    assert (found.returncode, found.stdout.splitlines()[0][-31:]) == (1, "tensors differ: lm_head.weight.")
    where = str(tmp_path / "l.lock")
    assert command("lock", "--run", "tag:a", "--lock", where).returncode == 0
    assert command("check", "--run", "tag:same", "--lock", where).returncode == 0
    assert command("check", "--run", "tag:b", "--lock", where).returncode == 1


def test_what_cannot_be_read_is_unknown_and_never_equal(db: Path, command: Command, tmp_path: Path) -> None:
    with pytest.raises(Missing, match="1 module holds weights that cannot be read: Opaque"):
        weights.of_tensors(_opaque())
    models.llama().save_pretrained(tmp_path / "tiny")
    provenance.init(writer="off")
    for name in ("a", "b"):
        model = _opaque()
        model.config._name_or_path = str(tmp_path / "tiny")
        _say(model, name)
    found = command("weights", "diff", "tag:a", "tag:b")
    assert (found.returncode, found.stdout) == (3, "")
    assert "1 module holds weights that cannot be read: Opaque" in found.stderr
    where = str(tmp_path / "l.lock")
    assert command("lock", "--run", "tag:a", "--lock", where).returncode == 0
    checked = command("check", "--run", "tag:b", "--lock", where)
    assert checked.returncode == 3
    assert "weights that cannot be read" in checked.stdout


FORMS: dict[str, Callable[[Any], Any]] = {
    "plain": lambda table: table,
    "in a list": lambda table: [table],
    "in a tuple": lambda table: (table,),
    "in a dict": lambda table: {"scale": table},
}


@pytest.mark.parametrize("form", sorted(FORMS))
def test_a_tensor_in_an_attribute_counts(form: str) -> None:
    one, same, other = (weights.of_tensors(_scaled(sign, FORMS[form])) for sign in (1, 1, -1))
    assert one.root == same.root != other.root
    assert [item.name.partition("table")[0] for item in one.entries if item.kind == "attribute"] == ["lm_head."]
    assert weights.parameters(one.entries) == weights.parameters(other.entries)


def test_a_table_in_an_attribute_is_told_by_diff_and_its_edit_between_calls_too(db: Path, command: Command) -> None:
    provenance.init(writer="off")
    model = _scaled(1.0)
    first, again = _say(model, "a"), _say(model, "again")
    model.lm_head.table.neg_()
    second = _say(model, "b")
    model.lm_head.table = -model.lm_head.table
    _say(model, "back")
    assert first.tolist() == again.tolist() != second.tolist()
    assert command("weights", "diff", "tag:a", "tag:again").returncode == 0
    assert command("weights", "diff", "tag:a", "tag:back").returncode == 0
    found = command("weights", "diff", "tag:a", "tag:b")
    assert (found.returncode, found.stdout.splitlines()[0]) == (1, "1 of 24 tensors differ: lm_head.table.")


class Remembering(nn.Module):  # type: ignore[misc]
    """A head that keeps tensors of its calls: a cache by name, one by place, and a table made when it is needed."""

    def __init__(self, inner: Any) -> None:
        super().__init__()
        self.inner, self.cache_k, self._last, self._made = inner, torch.zeros(4), torch.zeros(4), None

    def forward(self, x: Any) -> Any:
        if self._made is None:
            self._made = torch.ones(1) * x.shape[-1]
        self.cache_k += 1
        self._last = x.detach().clone()
        return self.inner(x)


def test_caches_in_attributes_leave_the_root_alone_once_a_call_has_shown_them(db: Path) -> None:
    provenance.init(writer="off")
    model = models.llama()
    model.lm_head = Remembering(model.lm_head)
    for _ in range(4):
        _say(model)
    runs = [run.fields for run in models.runs(db)]
    roots = [fields["weights.loaded_root"].value for fields in runs]
    assert roots[1] == roots[2] == roots[3] is not None
    assert len({fields["context.load"].value for fields in runs[1:]}) == 1  # nothing is hashed again
    model.lm_head.inner.weight.data = model.lm_head.inner.weight.data * -1
    _say(model)
    assert models.last(db).fields["weights.loaded_root"].value not in (None, roots[3])


def _mixtral() -> Any:
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4,
             "num_key_value_heads": 2, "num_local_experts": 4, "max_position_embeddings": 128}  # fmt: skip
    torch.manual_seed(5)
    return MixtralForCausalLM(MixtralConfig(vocab_size=models.VOCABULARY, **models.SPECIAL, **sizes)).eval()


def _bert() -> Any:
    torch.manual_seed(5)
    sizes = {"hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 2, "num_attention_heads": 4}
    return BertLMHeadModel(BertConfig(vocab_size=models.VOCABULARY, is_decoder=True, **models.SPECIAL, **sizes)).eval()


STOCK: dict[str, Callable[[], Any]] = {
    "llama": models.llama,
    "llama, dynamic": lambda: models.llama(rope_parameters={"rope_type": "dynamic", "factor": 2.0, "rope_theta": 1e4}),
    "gpt2": models.gpt2, "t5": models.t5, "mixtral": _mixtral, "bert": _bert,
}  # fmt: skip


@pytest.mark.parametrize("kind", sorted(STOCK))
def test_stock_models_keep_nothing_in_attributes_that_moves_their_root(kind: str, db: Path) -> None:
    provenance.init(writer="off")
    one, other = STOCK[kind](), STOCK[kind]()
    before = weights.of_tensors(one)
    assert {item.kind for item in before.entries} <= {"tensor", "buffer"}
    _say(one)
    _say(one)
    _say(other)
    roots = [run.fields["weights.loaded_root"].value for run in models.runs(db)]
    assert roots == [before.root] * 3 == [weights.of_tensors(one).root] * 3


def test_what_a_hook_computes_anew_and_copies_of_parameters_are_no_entries() -> None:
    model = nn.Sequential(torch.nn.utils.weight_norm(nn.Linear(4, 4)), nn.LSTM(4, 4), nn.Linear(4, 4))
    model[2].copy = model[2].weight
    assert {item.kind for item in weights.of_tensors(model).entries} == {"tensor"}
