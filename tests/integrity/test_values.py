"""The total encoding: it never raises, loses nothing that it can keep, and runs nobody's code."""

import collections
import datetime as dt
import enum
import time
from pathlib import Path
from typing import Any, NamedTuple

import orjson
import pytest

from provenance.integrity import values
from provenance.integrity.values import CONTAINERS_MOST, DEEP, Cut, Kept, decode, encode
from tests.fakes.values import (
    EDGES,
    RAN,
    Keyed,
    Loud,
    LoudDict,
    LoudInt,
    LoudList,
    LoudText,
    OddModule,
    Own,
    Raises,
    nan,
    nested,
    same,
)


class Point(NamedTuple):
    """A tuple of a type of its own."""

    x: int
    y: object


class Level(enum.IntEnum):
    """A number with a name."""

    HIGH = 3


class Colour(enum.Enum):
    """An object with a name."""

    RED = 1


HOSTILE: dict[str, Any] = {
    "object": Loud(), "raises": Raises(), "list": LoudList([1, 2]), "dict": LoudDict({"truth": 1}),
    "text": LoudText("truth"), "int": LoudInt(5), "class": Loud, "view of a dict": {1: Loud()}.values(),
    "items of a dict": {Loud(): 1}.items(), "exception": ValueError(Loud()), "slice": slice(Loud()),
    "bound method": Loud().__repr__, "static method": staticmethod(Loud().__len__), "odd module": OddModule(),
    "namespace": collections.UserDict({"a": Loud()}), "generator": (n for n in [Loud()]), "map": map(str, [Loud()]),
    "key": {Keyed([1]): 1}, "set of keys": {Keyed([1]), Keyed([2])}, "enum": Colour.RED,
    "zone": dt.datetime(2026, 1, 1, tzinfo=type("Zone", (dt.tzinfo,), {"__repr__": Loud.__repr__})()),
}  # fmt: skip


@pytest.mark.parametrize("value", EDGES.values(), ids=EDGES.keys())
def test_every_value_comes_back_bit_for_bit(value: object) -> None:
    assert same(decode(encode(value)), value)


@pytest.mark.parametrize("value", EDGES.values(), ids=EDGES.keys())
def test_the_form_is_json_that_any_reader_takes(value: object) -> None:
    version, _ = orjson.loads(encode(value))
    assert version == values.VERSION


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE.keys())
def test_no_strangers_code_is_run_and_nothing_is_raised(value: object) -> None:
    RAN.clear()
    began = time.perf_counter()
    decode(encode({"kept": [1, 2.5], "it": value}))
    assert RAN == []
    assert time.perf_counter() - began < 1


@pytest.mark.parametrize("value", HOSTILE.values(), ids=HOSTILE.keys())
def test_one_hostile_object_costs_the_rest_nothing(value: object) -> None:
    back = decode(encode({"kept": [1, 2.5, (b"x",)], "it": value}))
    assert isinstance(back, dict)
    assert same(back["kept"], [1, 2.5, (b"x",)])


def test_a_subclass_is_kept_as_its_base_holds_it_not_as_it_says() -> None:
    got = decode(encode([LoudList([1, 2]), LoudDict({"truth": 1}), LoudText("truth"), LoudInt(5), Level.HIGH]))
    assert same(got, [[1, 2], {"truth": 1}, "truth", 5, 3])
    assert decode(encode(Point(1, (2,)))) == (1, (2,))
    assert b"Point" in encode(Point(1, 2))


def test_a_cycle_is_cut_and_says_how_far_up_it_leads() -> None:
    loop: list[Any] = [1]
    loop.append({"up": loop})
    assert decode(encode(loop)) == [1, {"up": Cut("cycle", "2 levels up")}]
    own = Own(kept=1)
    own["self"] = own
    assert decode(encode([own])) == [{"kept": 1, "self": Cut("cycle", "1 levels up")}]


@pytest.mark.parametrize("make", [list, Own, collections.OrderedDict])
def test_a_cycle_below_any_depth_is_cut(make: Any) -> None:
    deep: Any = make()
    inner = deep
    for _ in range(DEEP + 20):
        below = make()
        inner.append(below) if make is list else inner.__setitem__("in", below)
        inner = below
    inner.append(deep) if make is list else inner.__setitem__("in", deep)
    inner.append(inner) if make is list else inner.__setitem__("self", inner)
    walk: Any = decode(encode(deep))
    for _ in range(DEEP + 20):
        walk = walk[0] if make is list else walk["in"]
    cuts = walk if make is list else list(walk.values())
    assert [cut.kind for cut in cuts] == ["cycle", "cycle"]


def test_the_same_part_twice_is_no_cycle() -> None:
    part = [1]
    assert decode(encode([part, part, (part,)])) == [[1], [1], ([1],)]


@pytest.mark.parametrize("levels", [40, DEEP + 40])
def test_a_value_that_unfolds_without_end_is_cut(levels: int) -> None:
    value: Any = [1]
    for _ in range(levels):
        value = [value, value]
    began = time.perf_counter()
    data = encode(value)
    assert time.perf_counter() - began < 20
    assert b"too many containers" in data
    assert len(data) < 200 * CONTAINERS_MOST


@pytest.mark.parametrize("depth", [DEEP - 1, DEEP, DEEP + 1, 200, 2000])
def test_depth_loses_nothing(depth: int) -> None:
    assert same(decode(encode(nested(depth))), nested(depth))


def test_depth_of_own_types_loses_nothing() -> None:
    deep: Any = collections.OrderedDict()
    inner = deep
    for level in range(500):
        inner["n"], inner["in"] = level, collections.OrderedDict()
        inner = inner["in"]
    walk: Any = decode(encode(deep))
    for level in range(500):
        assert walk["n"] == level
        walk = walk["in"]
    assert walk == {}


def test_equal_sets_have_equal_bytes_whatever_their_order() -> None:
    assert list({0, 8}) != list({8, 0})  # equal, and yet walked in another order
    assert encode({0, 8}) == encode({8, 0})
    assert encode(frozenset([(0,), (8,), "x", b"y"])) == encode(frozenset([b"y", "x", (8,), (0,)]))


def test_the_order_of_a_dict_is_kept() -> None:
    assert list(decode(encode({"b": 1, "a": 2}))) == ["b", "a"]  # type: ignore[call-overload]
    assert list(decode(encode({2: 1, 1: 2}))) == [2, 1]  # type: ignore[call-overload]


def test_an_object_is_named_and_its_address_is_not() -> None:
    assert encode(object()) == encode(object())
    assert encode([Loud()]) == encode([Loud()])
    assert decode(encode(Loud())) == Kept("tests.fakes.values.Loud", {})
    assert decode(encode(Path("a/b"))) == Cut(f"{type(Path()).__module__}.PosixPath", "PosixPath('a/b')")
    assert b"0x" not in encode([test_the_order_of_a_dict_is_kept, object(), len])


def test_an_exception_keeps_a_text_that_is_its_own() -> None:
    assert decode(encode(ValueError("no", 3))) == Cut("builtins.ValueError", "ValueError('no', 3)")


def test_a_text_of_any_length_costs_a_short_repr() -> None:
    cut = decode(encode(KeyError("x" * 10)))
    assert isinstance(cut, Cut)
    assert decode(encode(KeyError("x" * 1000))) == Kept("builtins.KeyError", {"args": ("x" * 1000,)})


def test_a_newer_form_is_not_guessed_at() -> None:
    assert decode(b"[2,{}]") == Cut("version", "value form 2; this code knows 1")
    assert decode(b'[1,[{"$":"later","v":1},5]]') == [Cut("tag", "unknown tag 'later'"), 5]


def test_plain_ids_take_no_more_room_than_json() -> None:
    numbers = list(range(1000))
    assert encode(numbers) == orjson.dumps([1, numbers])


# -- arrays -------------------------------------------------------------------------------------------


def form(value: object) -> Any:
    return orjson.loads(encode(value))[1]


def test_a_small_numpy_array_is_kept_with_type_and_shape() -> None:
    numpy = pytest.importorskip("numpy")
    array = numpy.arange(6, dtype="<i2").reshape(2, 3)
    assert form(array) == {"$": "array", "dtype": "numpy.<i2", "shape": [2, 3], "v": "AAABAAIAAwAEAAUA"}
    assert form(array.T)["v"] == "AAADAAEABAACAAUA"
    assert form(numpy.zeros(100_000))["v"] is None
    assert form(numpy.float32(0.5)) == {"$": "object", "type": "numpy.float32", "v": "np.float32(0.5)"}


def test_an_array_of_strangers_runs_none_of_them() -> None:
    numpy = pytest.importorskip("numpy")
    RAN.clear()
    array = numpy.empty(1, dtype=object)
    array[0] = Loud()
    RAN.clear()
    assert form(array) == {"$": "object", "type": "numpy.ndarray", "v": ""}
    assert RAN == []


def test_a_small_tensor_is_kept_as_it_stands_in_row_order() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.arange(6, dtype=torch.int16).reshape(2, 3)
    assert form(tensor) == {"$": "array", "dtype": "torch.int16", "shape": [2, 3], "v": "AAABAAIAAwAEAAUA"}
    assert form(tensor.t())["v"] == "AAADAAEABAACAAUA"
    assert form(tensor[1])["v"] == "AwAEAAUA"
    assert form(torch.ones(2, dtype=torch.uint8).expand(3, 2))["v"] == "AQEBAQEB"
    assert form(torch.zeros(0))["v"] == ""
    assert form(torch.zeros(100_000))["v"] is None
    assert form(torch.zeros(3, device="meta"))["v"] is None
    leaf = torch.nn.Parameter(torch.zeros(1))
    assert form(leaf) == {"$": "array", "dtype": "torch.float32", "shape": [1], "v": "AAAAAA=="}


def test_a_conjugated_tensor_is_kept_as_it_reads() -> None:
    torch = pytest.importorskip("torch")
    tensor = torch.tensor([1 + 2j])
    assert form(tensor.conj()) == form(torch.tensor([1 - 2j]))
    assert form(tensor.conj().imag) == form(torch.tensor([-2.0]))


def test_a_slice_of_a_large_tensor_costs_what_the_slice_costs() -> None:
    torch = pytest.importorskip("torch")
    large = torch.zeros(4_000_000)
    encode(large[:2])
    began = time.perf_counter()
    assert encode(large[10:20]) == encode(torch.zeros(10))
    assert time.perf_counter() - began < 2  # reading the whole storage takes half a minute


def test_a_tensor_without_bytes_of_its_own_costs_the_rest_nothing() -> None:
    torch = pytest.importorskip("torch")
    got = form({"kept": 1, "sparse": torch.eye(2).to_sparse()})
    assert got["kept"] == 1
    assert got["sparse"]["type"] == "torch.Tensor"


def test_every_bit_of_a_nan_is_kept() -> None:
    for bits in (0x7FF8000000000001, 0xFFF8000000000000, 0x7FFFFFFFFFFFFFFF):
        assert same(decode(encode([nan(bits), 1.0])), [nan(bits), 1.0])
