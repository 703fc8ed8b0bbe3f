"""Code as a digest: what decides it, what does not, what cannot be digested, and that nothing of a stranger's is run."""

import functools
import logging
import subprocess
import sys
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.nn import functional
from transformers import LogitsProcessor
from transformers.models.llama import modeling_llama

from provenance.fingerprint import code
from provenance.fingerprint.reading import Missing
from tests.fakes import models

KEY = b"k" * 32
BIAS = 1
HIDDEN = "hf_abcdefghijklmnop1234"


def _closed(held: Any) -> Callable[..., Any]:
    return lambda scores: (held, scores)


def _biased(scores: Any) -> Any:
    return scores + BIAS


def _through(scores: Any) -> Any:
    return _biased(scores)


class _Shift(LogitsProcessor):  # type: ignore[misc]
    def __init__(self, held: Any) -> None:
        self.held = held

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return scores


class _Other(LogitsProcessor):  # type: ignore[misc]
    def __init__(self, held: Any) -> None:
        self.held = held

    def __call__(self, input_ids: Any, scores: Any) -> Any:
        return -scores


class _Slotted:
    __slots__ = ("held",)

    def __init__(self, held: Any) -> None:
        self.held = held

    def __call__(self, scores: Any) -> Any:
        return scores


class _Words(list[str]):
    def __iter__(self) -> Any:
        raise AssertionError("code of a stranger's was run")


class _Hostile:
    def __getattribute__(self, name: str) -> Any:
        raise AssertionError("code of a stranger's was run")

    __repr__ = __eq__ = __hash__ = __len__ = __getattribute__  # type: ignore[assignment]


VALUES: list[tuple[Any, Any]] = [
    (1, 2), (1, True), (1, 1.0), ("a", b"a"), ((1, 2), [1, 2]), ({"a": 1}, {"a": 2}), ({1, 2}, {1, 3}), (-1, -2),
    (torch.tensor([1]), torch.tensor([2])), (torch.tensor([1]), torch.tensor([1.0])), (torch.float16, torch.bfloat16),
    (len, max), (nn.Linear, nn.Conv1d), ([[1]], [[2]]), (_closed(1), _closed(2)), (None, False),
]  # fmt: skip


@pytest.mark.parametrize("make", [
    _closed, _Shift, _Slotted, lambda held: functools.partial(_biased, held),
    lambda held: types.MethodType(_biased, _Shift(held)), lambda held: torch.compile(_closed(held), backend="eager"),
], ids=["closure", "object", "slots", "partial", "method", "compiled"])  # fmt: skip
@pytest.mark.parametrize(("one", "other"), VALUES, ids=range(len(VALUES)))
def test_what_is_held_decides(make: Any, one: Any, other: Any) -> None:
    assert code.digest(make(one)) == code.digest(make(one))
    assert code.digest(make(one)) != code.digest(make(other))


def test_what_is_done_decides_and_where_it_stands_does_not() -> None:
    table: dict[str, Any] = {}
    for name, text in (("here", "lambda n: n + 1"), ("there", "\n\n\nlambda m: 1"), ("again", "\n\nlambda n: n + 1")):
        table[name] = types.FunctionType(compile(text.strip(), f"{name}.py", "eval").co_consts[0], {})
    assert code.digest(table["here"]) == code.digest(table["again"])
    assert code.digest(table["here"]) != code.digest(table["there"])
    assert code.digest(_Shift(1)) != code.digest(_Other(1))
    assert code.digest(_closed(1)) != code.digest(torch.compile(_closed(1), backend="eager"))


def test_what_it_reads_from_its_module_decides(monkeypatch: pytest.MonkeyPatch) -> None:
    before = code.digest(_through), code.digest(_biased)
    monkeypatch.setattr(sys.modules[__name__], "BIAS", 2)
    after = code.digest(_through), code.digest(_biased)
    assert before[0] != after[0]
    assert before[1] != after[1]


def test_it_is_the_same_in_every_process(tmp_path: Path) -> None:
    script = tmp_path / "mine.py"
    script.write_text(
        "from provenance.fingerprint import code\n"
        "WORDS = {'one', 'two', 'three', 'four'}\n"
        "def f(x): return x in {'a', 'b', 'c', 'd'} or x in WORDS\n"
        "print(code.digest(f))\n"
    )
    found = {
        subprocess.run([sys.executable, script], capture_output=True, check=True, text=True, cwd=Path(__file__).parents[2],
                       env={"PYTHONHASHSEED": seed, "PYTHONPATH": str(Path(__file__).parents[2])}).stdout
        for seed in ("1", "2", "3")
    }  # fmt: skip
    assert len(found) == 1


@pytest.mark.parametrize(
    ("held", "why"),
    [(models.llama(), "a model or a layer"), (logging.getLogger("x"), "cannot be seen"), (iter([1]), "cannot be seen"),
     ("x" * (5 << 20), "more than is read"), (HIDDEN, "a secret"), (torch.zeros(3 << 20), "a large tensor"),
     (torch.empty(1, device="meta"), "tensor")],
    ids=lambda item: type(item).__name__,
)  # fmt: skip
def test_what_cannot_be_seen_says_so(held: Any, why: str) -> None:
    with pytest.raises(Missing, match=why):
        code.digest(_closed(held))


def test_what_holds_itself_or_too_much_ends() -> None:
    held: list[Any] = []
    held.append(held)
    assert code.digest(_closed(held)) == code.digest(_closed(held))
    with pytest.raises(Missing, match="more than is read"):
        code.digest(_closed([[n] for n in range(5000)]))
    deep: list[Any] = []
    for _ in range(200):
        deep = [deep]
    with pytest.raises(Missing, match="more than is read"):
        code.digest(_closed(deep))


def test_nothing_of_a_stranger_s_is_run() -> None:
    assert code.digest(_closed(_Words(["a"]))) != code.digest(_closed(_Words(["b"])))
    assert code.digest(_closed(_Hostile())) == code.digest(_closed(_Hostile()))


def test_a_secret_is_digested_under_the_key_alone() -> None:
    found = code.digest(_closed(HIDDEN), KEY)
    assert found.startswith("hmac:")
    assert found != code.digest(_closed(HIDDEN), b"j" * 32)
    assert found != code.digest(_closed(HIDDEN[:-1] + "5"), KEY)
    assert code.digest(_closed("plain"), KEY) == code.digest(_closed("plain"))


def test_a_part_of_the_model_is_named_by_its_place() -> None:
    part = nn.Linear(2, 2)
    names = code.digest(_closed(part), parts={id(part): "a"}), code.digest(_closed(part), parts={id(part): "b"})
    assert names[0] != names[1]


@pytest.mark.parametrize(("owner", "name"), [(modeling_llama, "apply_rotary_pos_emb"), (functional, "silu")])
def test_a_function_put_into_a_module_s_place_is_named(owner: Any, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = models.llama()
    original = getattr(owner, name)
    assert code.patches(model.modules()) == []
    found = []
    for factor in (1, 2):
        monkeypatch.setattr(owner, name, lambda *a, by=factor, **k: (original(*a, **k), by)[0])
        found += code.patches(model.modules())
    assert len(set(found)) == 2
    assert all(f"{owner.__name__.rpartition('.')[2]}.{name} is {__name__}.<lambda>" in said for said in found)
