"""A total, lossless form for values of users: it never raises, and decodes bit for bit.

Arguments and results of functions hold whatever Python holds. JSON alone loses NaN, tuples, bytes and integer
keys, and raises on the rest. Here every value becomes ``[1, value]`` (1 is the version of the form), in
which whatever JSON cannot say is a tagged object ``{"$": tag, "v": ...}``:

    f8, int, complex, str, bytes, bytearray    scalars that JSON lacks or would alter
    tuple, set, frozenset, dict                containers; a dict only if its keys need it
    sub                                        a subclass: type name and the value of its base
    array                                      a small array: dtype, shape, little-endian bytes
    aside                                      large or a medium of its own: what it is; its bytes stand elsewhere
    nodes, at                                  what lies deeper than 60 levels, as a flat table
    fields                                     an object: type name and what its attributes hold
    cycle, object                              cut: a reference upward, or a type name and a safe repr

``decode(encode(x)) == x`` is held by a property test; an object decodes to a `Kept`, what was cut to a `Cut`. No code
of the value's own is run: no ``__repr__``, ``__iter__`` or ``__getattr__`` written in Python by a stranger.
"""

import base64
import ctypes
import functools
import math
import struct
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import orjson

from provenance.integrity import objects
from provenance.integrity.media import GIVEN, LARGE, MEDIUM, TENSOR, Aside, Beside, put, put_back, sized

VERSION = 1
SAFE = 2**53
DEEP = 60
ARRAY_BYTES = 65536
# A value that shares its parts may unfold without end: what lies beyond this many containers is cut.
CONTAINERS_MOST = 250_000
OBJECTS_MOST = 2_000
TOO_MANY, TOO_DEEP = "not encoded: too many containers", "not encoded: too deep"


@dataclass(frozen=True, slots=True)
class Cut:
    """What stands where a value could not be kept: its type, and a short text where that was safe."""

    kind: str
    text: str = ""


@dataclass(frozen=True, slots=True)
class Kept:
    """An object as it was kept: its type and what it held."""

    kind: str
    holds: object


def encode(value: object, aside: list[Aside] | None = None) -> bytes:
    """Encode any value; see the table above. Never raises.

    With a list for it, what is large (1 MiB of text or bytes, an array on the CPU of any size) and what is an image, a
    sound or a film by its first bytes is put ``aside`` as it is, and a place in that list stands in the value. A
    `Beside` also says what could not be kept.

    >>> encode({"a": (1, float("nan")), 2: b"x"})[:60]
    b'[1,{"$":"dict","v":[["a",{"$":"tuple","v":[1,{"$":"f8","v":"'
    """
    try:
        above = Above()
        above.aside = aside
        return orjson.dumps([VERSION, _encode(value, 0, above)])
    except Exception as error:  # a hostile object: name its type, keep the promise
        if aside:
            aside.clear()
        if isinstance(aside, Beside):
            aside.lost = objects.type_name(type(value))
        cut = {"$": "object", "type": objects.type_name(type(value)), "v": f"not encoded: {type(error).__name__}"}
        return orjson.dumps([VERSION, cut])


def decode(data: bytes, aside: Mapping[int, bytes] | None = None) -> object:
    """Decode what `encode` made; ``aside`` is what it put there, by place.

    >>> decode(encode({1: (2.5, -0.0, b"x", 2**70), "$": None}))
    {1: (2.5, -0.0, b'x', 1180591620717411303424), '$': None}
    """
    version, value = orjson.loads(data)
    if version != VERSION:
        return Cut("version", f"value form {version}; this code knows {VERSION}")
    return _decode(value if aside is None else put_back(value, aside))


# -- encoding --------------------------------------------------------------------------------------


class Above(list[int]):
    """The containers that a value lies in, by identity, and how many more may be unfolded."""

    left = CONTAINERS_MOST
    objects = OBJECTS_MOST
    aside: "list[Aside] | None" = None

    def cut(self, kind: type, text: str) -> object:
        """Return what stands for something that is not kept, and remember that there is such a thing."""
        if isinstance(self.aside, Beside) and not self.aside.lost:
            self.aside.lost = objects.type_name(kind)
        return {"$": "object", "type": objects.type_name(kind), "v": text}


def _encode(value: Any, depth: int, above: Above) -> object:
    kind = type(value)
    if value is None or kind is bool:
        return value
    scalar = SCALARS.get(kind)
    if scalar is not None:
        if kind in SIZED and above.aside is not None and len(value) >= MEDIUM:
            return sized(value, scalar, above.aside)
        return scalar(value)
    base = _base(kind)
    if base is None:
        return _other(value, depth, above)
    if id(value) in above:
        return {"$": "cycle", "v": len(above) - above.index(id(value))}
    if depth >= DEEP:
        return _flatten(value, above)
    if above.left <= 0:
        return above.cut(kind, TOO_MANY)
    above.left -= 1
    above.append(id(value))
    try:
        # The base class's own conversion: an overridden __iter__ is never run.
        content = _container(objects.as_base(value, base), lambda item: _encode(item, depth + 1, above))
    finally:
        above.pop()
    return content if kind is base else {"$": "sub", "type": objects.type_name(kind), "v": content}


def _base(kind: type) -> type | None:
    """Return the built-in container that a type is, or comes from."""
    return kind if kind in CONTAINERS else next((base for base in CONTAINERS if issubclass(kind, base)), None)


def _container(value: Any, inner: Callable[[Any], object]) -> object:
    kind = type(value)
    if kind is list:
        return _items(value, inner)
    if kind is dict:
        if all(type(key) is str for key in value) and "$" not in value and _clean("".join(value)):
            return {key: inner(item) for key, item in value.items()}
        return {"$": "dict", "v": [[inner(key), inner(item)] for key, item in value.items()]}
    if kind is tuple:
        return {"$": "tuple", "v": _items(value, inner)}
    return {"$": kind.__name__, "v": sorted((inner(item) for item in value), key=repr)}


def _items(value: Any, inner: Callable[[Any], object]) -> list[object]:
    """Encode the items of a list; thousands of plain ids go through without a loop in Python."""
    kinds = set(map(type, value))
    if kinds == {int} and min(value) >= -SAFE and max(value) <= SAFE:
        return list(value)
    if kinds == {float} and all(map(math.isfinite, value)):
        return list(value)
    if kinds == {str} and max(map(len, value)) < LARGE and _clean("".join(value)):
        return list(value)
    return [inner(item) for item in value]


def _flatten(root: Any, above: Above) -> object:
    """Encode what lies too deep for a recursive reader as a table whose first row is the root."""
    rows: list[object] = []
    queue: list[Any] = []
    parents: list[int] = []

    def place(parent: int, item: Any) -> object:
        base = _base(type(item))
        if base is None:
            return _encode(item, DEEP - 1, above)
        walk = parent
        while walk >= 0 and queue[walk] is not item:
            walk = parents[walk]
        if walk >= 0 or id(item) in above:
            return {"$": "cycle", "v": 0}
        if above.left <= 0:
            return above.cut(type(item), TOO_MANY)
        above.left -= 1
        queue.append(item)
        parents.append(parent)
        at = {"$": "at", "v": len(queue) - 1}
        return at if type(item) is base else {"$": "sub", "type": objects.type_name(type(item)), "v": at}

    first = place(-1, root)
    if not queue:
        return first
    while len(rows) < len(queue):
        item = queue[len(rows)]
        rows.append(_container(objects.as_base(item, _base(type(item))), functools.partial(place, len(rows))))
    table = {"$": "nodes", "v": rows}
    return table if type(root) in CONTAINERS else {"$": "sub", "type": objects.type_name(type(root)), "v": table}


def _other(value: Any, depth: int, above: Above) -> object:
    kind = type(value)
    for base in (int, float, str, bytes):
        if issubclass(kind, base):
            return {"$": "sub", "type": objects.type_name(kind), "v": SCALARS[base](objects.as_base(value, base))}
    try:
        array = _array(value, above)
    except Exception as error:  # sparse, nested or on a device that is gone: the rest of the value stays
        return above.cut(kind, f"no bytes: {type(error).__name__}")
    if array is not None:
        return array
    if kind is Cut or kind is Kept:  # read from a store, and written again
        return _again(value, depth, above)
    text = objects.safe_repr(value)
    if text and objects.named(value):
        return {"$": "object", "type": objects.type_name(kind), "v": text}
    return above.cut(kind, text) if text else _object(value, depth, above)


def _again(value: "Cut | Kept", depth: int, above: Above) -> object:
    if isinstance(value, Cut):
        return {"$": "object", "type": value.kind, "v": value.text}
    return {"$": "fields", "type": value.kind, "v": _encode(value.holds, depth + 1, above)}


def _object(value: Any, depth: int, above: Above) -> object:
    kind = type(value)
    if id(value) in above:
        return {"$": "cycle", "v": len(above) - above.index(id(value))}
    held = objects.inside(value)
    if held is None or above.objects <= 0 or depth >= DEEP:
        return above.cut(kind, TOO_DEEP if depth >= DEEP else "" if held is None else TOO_MANY)
    above.objects -= 1
    above.append(id(value))
    try:
        return {"$": "fields", "type": objects.type_name(kind), "v": _encode(held, depth + 1, above)}
    finally:
        above.pop()


def _array(value: Any, above: Above) -> object:
    """Keep an array of numpy or of torch on the CPU with its bytes, aside or in place; of others say shape and type."""
    kind, aside = type(value), above.aside
    module = kind.__module__.partition(".")[0]
    if module == "torch" and kind.__name__ in ("Tensor", "Parameter"):
        head = {"$": "array", "dtype": str(value.dtype), "shape": list(value.shape)}
        size = value.numel() * value.element_size()
        if value.device.type != "cpu" or (aside is None and size > ARRAY_BYTES) or size >= 1 << 31:
            above.cut(kind, "")
            return {**head, "v": None}
        value = value.detach().resolve_conj().resolve_neg().contiguous()
        # Not the storage's bytes: a slice shares the storage of the whole, and that is read byte by byte.
        data = ctypes.string_at(value.data_ptr(), size)
        return _placed(head, data, aside)
    if module == "numpy" and kind.__name__ == "ndarray" and not value.dtype.hasobject:
        head = {"$": "array", "dtype": f"numpy.{value.dtype.str}", "shape": list(value.shape)}
        if aside is None and value.nbytes > ARRAY_BYTES:
            above.cut(kind, "")
            return {**head, "v": None}
        return _placed(head, value.tobytes(), aside)
    return None


def _placed(head: dict[str, Any], data: bytes, aside: list[Aside] | None) -> object:
    if aside is None or len(data) <= ARRAY_BYTES:
        return {**head, "v": _base64(data)}
    return put(
        aside, Aside(TENSOR, data, text=False), {"type": "array", "dtype": head["dtype"], "shape": head["shape"]}
    )


def _clean(text: str) -> bool:
    """Say whether text has no lone surrogate, which UTF-8 cannot hold."""
    if text.isascii():
        return True
    try:
        text.encode()
    except UnicodeEncodeError:
        return False
    return True


def _int(value: int) -> object:
    return value if -SAFE <= value <= SAFE else {"$": "int", "v": hex(value)}


def _float(value: float) -> object:
    return value if math.isfinite(value) else {"$": "f8", "v": struct.pack(">d", value).hex()}


def _str(value: str) -> object:
    return value if _clean(value) else {"$": "str", "v": value.encode("utf-8", "surrogatepass").hex()}


def _base64(data: bytes) -> str:
    return base64.b64encode(data).decode()


SCALARS: dict[type, Callable[[Any], object]] = {
    int: _int,
    float: _float,
    str: _str,
    bytes: lambda value: {"$": "bytes", "v": _base64(value)},
    bytearray: lambda value: {"$": "bytearray", "v": _base64(value)},
    complex: lambda value: {"$": "complex", "v": [_float(value.real), _float(value.imag)]},
}
SIZED = {str, bytes, bytearray}
CONTAINERS = {list, tuple, dict, set, frozenset}

# -- decoding --------------------------------------------------------------------------------------


def _decode(value: Any) -> Any:
    if isinstance(value, list):
        return [_decode(item) for item in value]
    if not isinstance(value, dict):
        return value
    tag = value.get("$")
    if tag is None:
        return {key: _decode(item) for key, item in value.items()}
    reader = READERS.get(tag)
    return reader(value) if reader else Cut("tag", f"unknown tag {tag!r}")


def _aside_of(item: dict[str, Any]) -> Cut:
    if item["type"] == "array":
        return Cut(item["dtype"], f"shape {item['shape']}")
    return Cut(item["media"], f"{item['size']} bytes, not kept here")


def _unflatten(value: dict[str, Any]) -> Any:
    """Build the rows of a flat table from the last to the first: children stand after their parents."""
    built: dict[int, Any] = {}

    def fill(item: Any) -> Any:
        if isinstance(item, list):
            return [fill(part) for part in item]
        if isinstance(item, dict):
            tag = item.get("$")
            if tag == "at":
                return built.pop(item["v"])
            if tag in ("tuple", "set", "frozenset"):
                return MAKERS[tag]([fill(part) for part in item["v"]])
            if tag == "dict":
                return {_key(fill(key)): fill(part) for key, part in item["v"]}
            if tag == "sub":
                return fill(item["v"])
            if tag is None:
                return {key: fill(part) for key, part in item.items()}
        return _decode(item)

    rows = value["v"]
    for index in range(len(rows) - 1, -1, -1):
        built[index] = fill(rows[index])
    return built[0]


def _key(value: Any) -> Any:
    """Return a value that may be a key: a subclass of list that had a hash decodes to a list, which has none."""
    try:
        hash(value)
    except TypeError:
        return Cut(type(value).__name__, "a key of a type that has a hash of its own")
    return value


MAKERS: dict[str, Callable[[list[Any]], Any]] = {
    "tuple": tuple,
    "set": lambda items: set(map(_key, items)),
    "frozenset": lambda items: frozenset(map(_key, items)),
}

READERS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "f8": lambda item: struct.unpack(">d", bytes.fromhex(item["v"]))[0],
    "int": lambda item: int(item["v"], 16),
    "str": lambda item: bytes.fromhex(item["v"]).decode("utf-8", "surrogatepass"),
    "bytes": lambda item: base64.b64decode(item["v"]),
    "bytearray": lambda item: bytearray(base64.b64decode(item["v"])),
    "complex": lambda item: complex(_decode(item["v"][0]), _decode(item["v"][1])),
    **{tag: lambda item: MAKERS[item["$"]]([_decode(part) for part in item["v"]]) for tag in MAKERS},
    "dict": lambda item: {_key(_decode(key)): _decode(part) for key, part in item["v"]},
    "sub": lambda item: _decode(item["v"]),
    "fields": lambda item: Kept(item["type"], _decode(item["v"])),
    "array": lambda item: Cut(item["dtype"], f"shape {item['shape']}"),
    "nodes": _unflatten,
    "aside": _aside_of,
    "given": lambda item: GIVEN[item["type"]](item["v"]),
    "cycle": lambda item: Cut("cycle", f"{item['v']} levels up"),
    "object": lambda item: Cut(item["type"], item["v"]),
}
