"""Values that encoders stumble over, objects that fight back, and a comparison that looks at every bit."""

import struct
from collections.abc import Iterator
from typing import Any

INF = float("inf")


def nan(bits: int) -> float:
    """Make the float with these 64 bits."""
    value: float = struct.unpack(">d", bits.to_bytes(8, "big"))[0]
    return value


def nested(depth: int) -> object:
    """Make containers of every kind, one inside the other."""
    value: Any = "core"
    for level in range(depth):
        value = [[value], {"in": value}, (value,), {level: value}][level % 4]
    return value


# Frozen with the golden files: a label may be added, none may change.
EDGES: dict[str, object] = {
    "none": None, "true": True, "false": False, "zero": 0, "minus one": -1,
    "2^53": 2**53, "2^53+1": 2**53 + 1, "-2^53-1": -(2**53) - 1, "2^64": 2**64, "-2^200": -(2**200),
    "0.1": 0.1, "-0.0": -0.0, "smallest": 5e-324, "largest": 1.7976931348623157e308, "inf": INF, "-inf": -INF,
    "nan": nan(0x7FF8000000000000), "-nan": nan(0xFFF8000000000000), "nan with payload": nan(0x7FF8DEADBEEF0001),
    "complex": complex(-0.0, nan(0x7FF8000000000001)),
    "empty text": "", "text": "héllo 𝄞", "nul": "a\0b", "lone surrogate": "a\ud800b", "pair of lone": "\udc00\ud800",
    "bytes": bytes(range(256)), "bytearray": bytearray(b"\xff\x00"),
    "empty list": [], "list": [1, 2.5, "x", None, True], "ids": [0, 1, 2**53], "mixed": [1, 1.0, True, "1"],
    "tuple": (1, (2, ()), []), "set": {3, 1, 2}, "frozenset": frozenset({"b", "a"}), "set of all": {1, "1", b"1", (1,)},
    "empty dict": {}, "dict": {"b": 1, "a": {"c": [None]}}, "int key": {1: "i", "1": "s"},
    "tag key": {"$": "f8", "v": "0"},
    "tuple key": {(1, 2): 3, None: 4, 0.5: 5, True: 6}, "surrogate key": {"\udfff": 1}, "bytes key": {b"k": {b"v"}},
    "depth 59": nested(59), "depth 60": nested(60), "depth 61": nested(61), "depth 130": nested(130),
}  # fmt: skip


def same(a: Any, b: Any) -> bool:
    """Say whether two values are equal in type, order and every bit. Not recursive: depth does not matter."""
    todo = [(a, b)]
    while todo:
        a, b = todo.pop()
        if type(a) is not type(b):
            return False
        if isinstance(a, float):
            if struct.pack(">d", a) != struct.pack(">d", b):
                return False
        elif isinstance(a, complex):
            todo += [(a.real, b.real), (a.imag, b.imag)]
        elif isinstance(a, dict):
            if len(a) != len(b):
                return False
            todo += zip(a.keys(), b.keys(), strict=True)
            todo += zip(a.values(), b.values(), strict=True)
        elif isinstance(a, (list, tuple)):
            if len(a) != len(b):
                return False
            todo += zip(a, b, strict=True)
        elif isinstance(a, (set, frozenset)):
            if sorted(map(_bits, a)) != sorted(map(_bits, b)):
                return False
        elif a != b:
            return False
    return True


def _bits(value: Any) -> str:
    """Write a hashable value so that equal texts mean equal bits: sets have no order to walk along."""
    if isinstance(value, float):
        return f"float {struct.pack('>d', value).hex()}"
    if isinstance(value, complex):
        return f"complex {_bits(value.real)} {_bits(value.imag)}"
    if isinstance(value, tuple):
        return f"tuple {[_bits(item) for item in value]}"
    if isinstance(value, frozenset):
        return f"frozenset {sorted(map(_bits, value))}"
    return f"{type(value).__name__} {value!r}"


# -- objects that fight back --------------------------------------------------------------------------

RAN: list[str] = []  # what a stranger's code writes down when it is run


class Loud:
    """Every method that an encoder could stumble into says that it was run."""

    def __repr__(self) -> str:
        RAN.append("repr")
        return "loud"

    def __str__(self) -> str:
        RAN.append("str")
        return "loud"

    def __iter__(self) -> Iterator[int]:
        RAN.append("iter")
        return iter(())

    def __len__(self) -> int:
        RAN.append("len")
        return 10**9

    def __bool__(self) -> bool:
        RAN.append("bool")
        return True

    def __getattr__(self, name: str) -> Any:
        RAN.append(name)
        raise AttributeError(name)

    def __float__(self) -> float:
        RAN.append("float")
        return 0.0

    def __index__(self) -> int:
        RAN.append("index")
        return 0


class Raises(Loud):
    """An object whose every answer is an exception."""

    def __repr__(self) -> str:
        raise RuntimeError("no")

    def __iter__(self) -> Iterator[int]:
        raise RuntimeError("no")

    def __getattr__(self, name: str) -> Any:
        raise RuntimeError("no")


class LoudList(list[Any]):
    """A list whose own iteration never ends."""

    def __iter__(self) -> Iterator[Any]:
        RAN.append("iter")
        while True:
            yield 1

    def __len__(self) -> int:
        RAN.append("len")
        return 10**9

    __repr__ = Loud.__repr__


class LoudDict(dict[Any, Any]):
    """A dict that lies about its items."""

    def items(self) -> Any:
        RAN.append("items")
        return [("lie", 1)]

    def __iter__(self) -> Iterator[Any]:
        RAN.append("iter")
        return iter(["lie"])

    def keys(self) -> Any:
        RAN.append("keys")
        return ["lie"]


class LoudText(str):
    """A text that lies about its content."""

    __slots__ = ()

    def __str__(self) -> str:
        RAN.append("str")
        return "lie"

    def encode(self, *_: Any, **__: Any) -> bytes:
        RAN.append("encode")
        return b"lie"

    def isascii(self) -> bool:
        RAN.append("isascii")
        return True


class LoudInt(int):
    """A number that lies about itself."""

    def __int__(self) -> int:
        RAN.append("int")
        return 0

    def __pos__(self) -> int:
        RAN.append("pos")
        return 0

    def __abs__(self) -> int:
        RAN.append("abs")
        return 0


class Keyed(list[Any]):
    """A list that may be a key of a dict."""

    def __hash__(self) -> int:  # type: ignore[override]
        return 1

    def __eq__(self, other: object) -> bool:
        return self is other


class OddModule:
    """A class whose module is no text."""

    __module__ = None  # type: ignore[assignment]


class Own(dict[str, Any]):
    """A dict of a type of one's own."""
