"""Results kept whole: a value out of which the very same value can be made again, arrays and all, or a refusal.

`values` is total and cuts what it cannot hold; what is served again must not be cut. So this form takes a few types and
no others, each exactly: None, numbers, text, bytes, list, tuple, dict, set, frozenset, plain tensors of torch, arrays
and scalars of NumPy, and the named outputs of transformers. Nothing is unpickled and no code of a stranger's is run:
a named output is looked up among the classes that transformers has loaded, and nowhere else.

    r1 · size of the tree u32 · tree as JSON · the bytes of each array, in the order of the tree
"""

import ctypes
import struct
import sys
from typing import Any

import orjson

from provenance.errors import UsageError
from provenance.integrity import values

MARK = b"r1"
HEAD = struct.Struct("<2sI")
DEEP = 100
SEQUENCES: dict[str, Any] = {"list": list, "tuple": tuple, "set": set, "frozenset": frozenset}
BYTES: dict[type, str] = {bytes: "bytes", bytearray: "bytearray"}
KINDS = {**{kind: name for name, kind in SEQUENCES.items()}, **BYTES}


class NotWhole(UsageError):
    """A value that cannot be kept so that it comes back the same."""


def encode(value: object) -> bytes:
    """Encode a value. Raises NotWhole where it would not come back the same.

    >>> decode(encode({"a": (1, float("-inf"), b"x"), 2: {3}, "c": [None, True, 2**70, "ä"]}))
    {'a': (1, -inf, b'x'), 2: {3}, 'c': [None, True, 1180591620717411303424, 'ä']}
    """
    parts: list[bytes] = []
    tree = orjson.dumps(_tree(value, parts, DEEP))
    return HEAD.pack(MARK, len(tree)) + tree + b"".join(parts)


def text(data: bytes) -> bytes:
    r"""Return what is text or bytes in an encoded value: all but the numbers of arrays.

    >>> text(encode({"a": b"x"}))
    b'["dict",[[["v","a"],["bytes",1]]]]\x00x'
    """
    reader, tree = _read(data)
    reader.value(orjson.loads(tree))
    return b"\0".join([tree, *reader.texts])


def decode(data: bytes) -> Any:
    """Make the value again, new in every part. Raises ValueError for what this process cannot make."""
    reader, tree = _read(data)
    return reader.value(orjson.loads(tree))


def _read(data: bytes) -> tuple["_Reader", bytes]:
    mark, size = HEAD.unpack_from(data)
    if mark != MARK:
        raise ValueError(f"a kept value of the form {mark!r}, which this version does not know")
    return _Reader(data, HEAD.size + size), data[HEAD.size : HEAD.size + size]


# -- encoding -----------------------------------------------------------------------------------------


def _tree(value: Any, parts: list[bytes], deep: int) -> list[object]:
    kind = type(value)
    if value is None or kind is bool:
        return ["v", value]
    if kind in BYTES:
        parts.append(bytes(value))
        return [KINDS[kind], len(value)]
    if kind in values.SCALARS:
        return ["v", values.SCALARS[kind](value)]
    if not deep:
        raise NotWhole(f"it is nested more than {DEEP} deep, or holds itself")
    if kind in (list, tuple):
        return [KINDS[kind], [_tree(item, parts, deep - 1) for item in value]]
    if kind in (set, frozenset):
        return [KINDS[kind], _unordered(value, parts, deep)]
    if kind is dict:
        return ["dict", [[_tree(k, parts, deep - 1), _tree(item, parts, deep - 1)] for k, item in value.items()]]
    return _foreign(value, kind, parts, deep)


def _unordered(value: Any, parts: list[bytes], deep: int) -> list[object]:
    """Encode the items of a set in an order of their own: that of a set changes from process to process."""
    found: list[tuple[list[object], list[bytes]]] = []
    for item in value:
        mine: list[bytes] = []
        found.append((_tree(item, mine, deep - 1), mine))
    found.sort(key=repr)
    for _, mine in found:
        parts += mine
    return [tree for tree, _ in found]


def _foreign(value: Any, kind: type, parts: list[bytes], deep: int) -> list[object]:
    torch, numpy, outputs = (sys.modules.get(name) for name in ("torch", "numpy", "transformers.utils.generic"))
    if torch is not None and kind is torch.Tensor:
        return _tensor(torch, value, parts)
    if numpy is not None and kind is numpy.ndarray and not value.dtype.hasobject and value.dtype.names is None:
        parts.append(value.tobytes())
        return ["numpy", value.dtype.str, list(value.shape), len(parts[-1])]
    if numpy is not None and kind.__module__ == "numpy" and isinstance(value, numpy.generic) and kind is not numpy.void:
        parts.append(value.tobytes())
        return ["scalar", value.dtype.str, len(parts[-1])]
    if (
        outputs is not None
        and isinstance(value, outputs.ModelOutput)
        and _named(kind.__module__, kind.__name__) is kind
    ):
        items = [[name, _tree(item, parts, deep - 1)] for name, item in value.items()]
        return ["output", kind.__module__, kind.__name__, items]
    raise NotWhole(f"it holds a {kind.__module__}.{kind.__qualname__}, which does not come back the same")


def _tensor(torch: Any, value: Any, parts: list[bytes]) -> list[object]:
    if value.requires_grad or value.layout is not torch.strided or value.is_quantized or value.device.type == "meta":
        raise NotWhole("it holds a tensor that wants gradients, or whose values do not lie in a row")
    plain = value.detach().resolve_conj().resolve_neg().cpu().contiguous()
    # Not the storage's bytes: a slice shares the storage of the whole.
    parts.append(ctypes.string_at(plain.data_ptr(), plain.numel() * plain.element_size()) if plain.numel() else b"")
    return ["torch", str(value.dtype), list(value.shape), str(value.device), len(parts[-1])]


# -- decoding -----------------------------------------------------------------------------------------


def _named(module: str, name: str) -> Any:
    """Return a named output of transformers, if that is what the words mean."""
    base: Any = sys.modules.get("transformers.utils.generic")
    found = getattr(sys.modules.get(module), name, None) if module.startswith("transformers.") else None
    return found if base is not None and isinstance(found, type) and issubclass(found, base.ModelOutput) else None


class _Reader:
    """Makes values from a tree, and their arrays from the bytes behind it."""

    def __init__(self, data: bytes, place: int) -> None:
        self.data, self.place = data, place
        self.texts: list[bytes] = []

    def value(self, tree: list[Any]) -> Any:
        """Return the value of one node."""
        kind, *rest = tree
        if kind == "v":
            return values._decode(rest[0])
        if kind in SEQUENCES:
            return SEQUENCES[kind](self.value(item) for item in rest[0])
        if kind == "dict":
            return {self.value(key): self.value(item) for key, item in rest[0]}
        if kind == "output":
            made = _named(rest[0], rest[1])
            if made is None:
                raise ValueError(f"transformers has no {rest[1]} loaded")
            return made(**{name: self.value(item) for name, item in rest[2]})
        return self._array(kind, rest)

    def _array(self, kind: str, rest: list[Any]) -> Any:
        data = bytearray(self.data[self.place : self.place + rest[-1]])
        self.place += rest[-1]
        if len(data) != rest[-1] or kind not in ("torch", "numpy", "scalar", "bytes", "bytearray"):
            raise ValueError("a kept value that is damaged")
        if kind in ("bytes", "bytearray"):
            self.texts.append(bytes(data))
            return self.texts[-1] if kind == "bytes" else data
        module = sys.modules.get("torch" if kind == "torch" else "numpy")
        if module is None:
            raise ValueError(f"{kind} is not loaded")
        if kind == "torch":
            dtype = getattr(module, rest[0].removeprefix("torch."))
            flat = module.frombuffer(data, dtype=dtype) if data else module.empty(0, dtype=dtype)
            return flat.reshape(rest[1]).to(rest[2])
        array = module.frombuffer(data, dtype=rest[0])
        return array.reshape(rest[1]) if kind == "numpy" else array[0]
