"""Objects: what they hold is read without running their code, and what cannot be read is said."""

import array
import collections
import dataclasses
import enum
import fractions
import functools
import threading
import types
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch

from provenance.integrity import objects
from provenance.integrity.media import Beside
from provenance.integrity.values import DEEP, OBJECTS_MOST, Cut, Kept, decode, encode


class Plain:
    def __init__(self, text: str) -> None:
        self.text = text


class Slots:
    __slots__ = ("never", "text")

    def __init__(self, text: str) -> None:
        self.text = text


class Both(Slots):
    def __init__(self, text: str) -> None:
        super().__init__("same")
        self.more = text


@dataclasses.dataclass
class Data:
    text: str


@dataclasses.dataclass(frozen=True, slots=True)
class Tight:
    text: str


class Colour(enum.Enum):
    A = 1
    B = 2


def _extra(text: str) -> Exception:
    error = ValueError("same" * 100)
    error.extra = text  # type: ignore[attr-defined]
    return error


KINDS: dict[str, Callable[[str], Any]] = {
    "plain": Plain, "slots": Slots, "both": Both, "data": Data, "tight": Tight,
    "namespace": lambda text: types.SimpleNamespace(text=text), "in a list": lambda text: [{"a": Plain(text)}],
    "enum": lambda text: Colour.A if text == "no" else Colour.B, "deque": lambda text: collections.deque([text]),
    "array": lambda text: array.array("i", [len(text)]), "memory": lambda text: memoryview(text.encode()),
    "slice": lambda text: slice(len(text)), "proxy": lambda text: types.MappingProxyType({"a": text}),
    "partial": lambda text: functools.partial(print, text), "user dict": lambda text: collections.UserDict(a=text),
    "exception": lambda text: ValueError(text * 300), "exception's own": _extra, "fraction": lambda text: fractions.Fraction(len(text), 7),
}  # fmt: skip
UNTOLD: dict[str, Callable[[str], Any]] = {
    "lambda": lambda text: lambda: text, "iterator": lambda text: iter([text]), "lock": lambda _: threading.Lock(),
    "local type": lambda text: type("X", (), {"t": text}), "generator": lambda text: (text for _ in ""),
    "objects in an array": lambda text: np.array([text, 1], dtype=object),
    "sparse": lambda text: torch.tensor([0.0, len(text)]).to_sparse(), "module": lambda _: torch.nn.Linear(1, 1),
    "local of a thread": lambda _: threading.local(), "in an object": lambda text: Plain(iter(text)),  # type: ignore[arg-type]
}  # fmt: skip


@pytest.mark.parametrize("kind", KINDS)
def test_objects_that_hold_other_things_have_other_bytes(kind: str) -> None:
    made = KINDS[kind]
    beside = Beside()
    one = encode(made("no"), beside)
    assert one == encode(made("no"))
    assert one != encode(made("yes!"))
    assert beside.lost == ""
    assert encode(decode(one)) == one or kind not in ("plain", "slots", "both", "data", "tight", "namespace")


@pytest.mark.parametrize("kind", UNTOLD)
def test_what_cannot_be_read_is_said(kind: str) -> None:
    beside = Beside()
    encode([UNTOLD[kind]("a")], beside)
    assert beside.lost, "two of them must not be taken for equal"


def test_named_functions_and_types_are_known_by_their_names() -> None:
    beside = Beside()
    encode([len, Plain, test_what_cannot_be_read_is_said, torch.float32, print], beside)
    assert beside.lost == ""


def test_no_code_of_theirs_runs() -> None:
    class Loud:
        def __init__(self) -> None:
            object.__setattr__(self, "__dict__", {"held": 1})

        def __getattribute__(self, name: str) -> Any:
            raise AssertionError(name)

        def __iter__(self) -> Any:
            raise AssertionError("iterated")

        @property
        def shown(self) -> Any:
            raise AssertionError("asked")

    found = decode(encode(Loud()))
    assert isinstance(found, Kept)
    assert found.holds == {"held": 1}

    class Masked:
        @property
        def __dict__(self) -> Any:  # type: ignore[override]
            raise AssertionError("asked")

    assert "not kept" in repr(decode(encode(Masked()))) or objects.inside(Masked()) == {}


def test_an_object_that_holds_itself_and_one_of_any_depth_end() -> None:
    loop = Plain("x")
    loop.text = loop  # type: ignore[assignment]
    assert decode(encode(loop)) == Kept(f"{__name__}.Plain", {"text": Cut("cycle", "2 levels up")})
    deep = Plain("end")
    for _ in range(5000):
        deep = Plain(deep)  # type: ignore[arg-type]
    beside = Beside()
    assert len(encode(deep, beside)) < 200 * DEEP
    assert beside.lost == f"{__name__}.Plain"
    many = Beside()
    encode([Plain(str(n)) for n in range(2 * OBJECTS_MOST)], many)
    assert many.lost == f"{__name__}.Plain"


def test_what_was_kept_is_written_again_as_it_was() -> None:
    first = encode([Plain("x"), Colour.A, iter([1])])
    assert encode(decode(first)) == first
