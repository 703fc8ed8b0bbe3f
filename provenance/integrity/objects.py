"""What the objects of a program hold, read without running a line of their own code.

Attributes are read through the descriptors of Python itself, so that no property, ``__getattr__``, ``__iter__`` or
``__repr__`` of a stranger runs. An object of which not all can be read that way is said to be so: two of them are never
taken for equal.
"""

import array
import collections
import enum
import functools
import gc
import re
import sys
import types
from typing import Any

FRAMEWORKS = {"torch", "numpy", "tensorflow", "jax", "jaxlib", "cupy"}
IMMUTABLE_TYPE = 1 << 8  # of a type's flags: made in C
BYTES_MOST = 1 << 20
ITEMS_MOST = 100_000
# Types that print themselves without surprises; anybody else's __repr__ is never called. Whatever prints what it
# holds (a view of a dict, an exception, a bound method, an array of objects) is not among them.
TRUSTED = {"decimal", "enum", "fractions", "pathlib", "re", "uuid", "numpy.dtypes"}
PRINTABLE = {
    "builtins": {"builtin_function_or_method", "ellipsis", "function", "generator", "coroutine", "NotImplementedType",
                 "object", "range", "type"},
    "datetime": {"date", "datetime", "time", "timedelta", "timezone"},
    "numpy": {"bool", "bool_", "complex64", "complex128", "datetime64", "float16", "float32", "float64", "int8",
              "int16", "int32", "int64", "longdouble", "timedelta64", "uint8", "uint16", "uint32", "uint64"},
    "torch": {"device", "dtype", "layout", "memory_format", "Generator"},
}  # fmt: skip
# An address says nothing and differs from process to process.
ADDRESS = re.compile(r" at 0x[0-9a-f]+")
REPR_CHARS = 200
# Made in C, and all that they hold lies in their attributes.
BARE = {object, types.SimpleNamespace}


def inside(value: Any) -> object:
    """Return what an object holds, as a value of built-in types with its parts in it, or None where it does not tell.

    >>> inside(types.SimpleNamespace(a=1)), inside(collections.deque([1, 2], 5)), inside(iter([1]))
    ({'a': 1}, ([1, 2], 5), None)
    """
    kind = type(value)
    reader = READERS.get(kind)
    if reader is not None:
        return reader(value)
    line = type.__getattribute__(kind, "__mro__")
    if enum.Enum in line:
        return _attribute(value, line, "_name_")
    if type.__getattribute__(kind, "__module__").partition(".")[0] in FRAMEWORKS or issubclass(kind, type):
        return None
    if any(part.__module__.partition(".")[0] in FRAMEWORKS for part in line):
        return None
    if BaseException in line:
        return {"args": BaseException.__dict__["args"].__get__(value), **_attributes(value, line)}
    if any(part.__flags__ & IMMUTABLE_TYPE and part not in BARE for part in line):
        return None  # it may hold more than its attributes
    if value is not None and not any("__dict__" in vars(part) or "__slots__" in vars(part) for part in line):
        return None
    return _attributes(value, line)


def named(value: Any) -> bool:
    """Say whether the name of a function or a type leads to it: one made inside another function is one of many.

    >>> named(len), named(lambda: 1), named(iter([1]))
    (True, False, True)
    """
    if not isinstance(value, (types.FunctionType, type)):
        return not isinstance(value, (types.GeneratorType, types.CoroutineType))
    found: Any = sys.modules.get(value.__module__)
    for name in value.__qualname__.split("."):
        found = vars(found).get(name) if isinstance(found, (types.ModuleType, type)) else None
    return found is value


def _attributes(value: Any, line: tuple[type, ...]) -> dict[str, object]:
    """Return the attributes that an object's own dictionary and its slots hold."""
    found: dict[str, object] = {}
    for part in reversed(line):
        held = vars(part)
        if "__slots__" in held:
            for name, item in held.items():
                if type(item) is types.MemberDescriptorType:
                    try:
                        found[name] = item.__get__(value)
                    except AttributeError:  # never set
                        continue
        own: Any = held.get("__dict__")
        if type(own) in (types.GetSetDescriptorType, types.MemberDescriptorType):
            found.update(dict.items(own.__get__(value)))
    return found


def _attribute(value: Any, line: tuple[type, ...], name: str) -> object:
    return _attributes(value, line).get(name)


def plain(value: Any, most: int) -> dict[str, object]:
    """Return the attributes of an object that are numbers, truths or short texts, ``most`` at most, in order of name.

    >>> plain(types.SimpleNamespace(b=2, a="x", c=[1]), 9)
    {'a': 'x', 'b': 2}
    """
    held = inside(value) if type(value) not in READERS else None
    if not isinstance(held, dict):
        return {}
    kept = ((name, item) for name, item in held.items() if type(name) is str and type(item) in (bool, int, float, str))
    return dict(sorted(kept)[:most])


def _proxied(value: Any) -> object:
    """Return the dictionary that a read-only view of one shows."""
    (shown,) = gc.get_referents(value) or (None,)
    return dict(shown) if type(shown) is dict else None


def _memory(value: memoryview) -> object:
    return value.tobytes() if value.nbytes <= BYTES_MOST else None


READERS: dict[type, Any] = {
    collections.deque: lambda value: (list(collections.deque.__iter__(value)), value.maxlen),
    array.array: lambda value: (value.typecode, value.tobytes()) if len(value) <= ITEMS_MOST else None,
    memoryview: _memory,
    slice: lambda value: (value.start, value.stop, value.step),
    functools.partial: lambda value: (value.func, value.args, value.keywords),
    types.MappingProxyType: _proxied,
}


def safe_repr(value: object) -> str:
    """Return a short text of an object, if its type is known to print without running a stranger's code."""
    try:
        if not _prints_itself(value):
            return ""
        text = ADDRESS.sub("", repr(value)[: 2 * REPR_CHARS])[:REPR_CHARS]
        return text.encode("utf-8", "backslashreplace").decode()
    except Exception as error:
        return f"no repr: {type(error).__name__}"


def _prints_itself(value: object) -> bool:
    kind = type(value)
    module, name = type.__getattribute__(kind, "__module__"), type.__getattribute__(kind, "__name__")
    zone = getattr(value, "tzinfo", None) if module == "datetime" else None
    if zone is not None and type(zone).__module__ not in ("datetime", "zoneinfo"):
        return False
    if module == "builtins" and isinstance(value, BaseException):
        return all(type(x) is int or (type(x) is str and len(x) <= REPR_CHARS) for x in value.args)
    return bool({module, module.partition(".")[0]} & TRUSTED) or name in PRINTABLE.get(module, ())


def type_name(kind: type) -> str:
    """Return module and name of a type."""
    name = f"{type.__getattribute__(kind, '__module__')}.{type.__getattribute__(kind, '__qualname__')}"
    return name.encode("utf-8", "backslashreplace").decode()[:REPR_CHARS]


def as_base(value: Any, base: Any) -> object:
    """Return the value as its built-in base class holds it, through the base's own methods."""
    if type(value) is base:
        return value
    if base is dict:
        return dict(dict.items(value))
    if base in (list, tuple, set, frozenset):
        return base(base.__iter__(value))
    if base is str:
        return str.__str__(value)
    return bytes.__getitem__(value, slice(None)) if base is bytes else base.__pos__(value)
