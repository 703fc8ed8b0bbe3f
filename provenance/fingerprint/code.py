"""Code as a digest: what a function does, with what it was given by its maker. Of a stranger's code nothing is run.

Bytecode, constants, names, defaults and what a closure holds count, not where the code lies; so do the plain values,
functions and classes that it reads from its module. Code of torch and of transformers goes by its name, for their
versions are fields. What cannot be seen whole (a client, a tokenizer, a model with weights of its own) raises
`Missing`: two such functions are never called equal. Bytecode belongs to one minor version of Python.
"""

import functools
import hashlib
import sys
import types
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from provenance.fingerprint.reading import Missing
from provenance.integrity import digests, whole
from provenance.integrity.secrets import tells, withheld

MOST, DEEP, LARGE = 4000, 24, 4 << 20  # values, levels and bytes of one function
OURS = ("torch", "transformers", "builtins")
SCALARS = (type(None), bool, int, float, complex, type(...))
SLOT, HEAP = types.MemberDescriptorType, 1 << 9  # of a class: made at run time, as those written in Python are
BASES: tuple[Any, ...] = (object, list, tuple, dict, str, int, float)
PATCHED = ("torch.nn.functional", "transformers.activations", "transformers.masking_utils")


def digest(function: Any, key: bytes = b"", parts: Mapping[int, str] | None = None) -> str:
    """Digest a callable. ``key`` is the store's, for secrets; ``parts`` names the modules of the model, by id.

    Raises Missing where it cannot be seen whole, and nothing else.

    >>> one, other, same = (lambda n: n + 1), (lambda n: n + 2), (lambda n: n + 1)
    >>> digest(one) == digest(same), digest(one) == digest(other)
    (True, False)
    """
    walk = _Walk(key, parts or {})
    try:
        walk.value("it", function, DEEP)
    except Missing:
        raise
    except Exception as error:  # an object that fails where it is looked at
        raise Missing(f"its code could not be read: {type(error).__name__}") from None
    return ("hmac:" if walk.keyed else "sha256:") + walk.state.hexdigest()


def short(function: Any, parts: Mapping[int, str] | None = None) -> str:
    """Name a function for people, with the beginning of its digest."""
    found = function
    for _ in range(DEEP):
        found = found.func if type(found) is functools.partial else found
        found = found.__func__ if type(found) is types.MethodType else found
    coded = type(found) in (types.FunctionType, types.BuiltinFunctionType)
    named = f"{home(found)}.{found.__qualname__}" if coded else f"{type(found).__module__}.{type(found).__qualname__}"
    return f"{named} ({digest(function, parts=parts).partition(':')[2][:12]})"


def home(function: Any) -> str:
    """Return the module in which a function was written: not its ``__module__``, which decorators copy."""
    function = getattr(function, "__func__", function)
    table = getattr(function, "__globals__", None)
    return str(table.get("__name__", "")) if type(table) is dict else str(getattr(function, "__module__", None) or "")


class _Walk:
    """One walk through a callable, into one digest."""

    def __init__(self, key: bytes, parts: Mapping[int, str], inside: bool = True) -> None:
        self.key, self.parts, self.inside, self.keyed = key, parts, inside, False
        self.state = hashlib.sha256(b"provenance/code/v1")
        self.open: dict[int, int] = {}  # what is being read, by id, with its place: what holds itself ends there
        self.count, self.room = 0, LARGE

    def put(self, *pieces: bytes | str) -> None:
        """Add to the digest, each piece with its length."""
        for piece in pieces:
            data = piece.encode("utf-8", "surrogatepass") if isinstance(piece, str) else piece
            self.room -= len(data)
            if self.room < 0:
                raise Missing("it holds more than is read")
            self.state.update(len(data).to_bytes(8, "little") + data)

    def value(self, name: str, value: Any, deep: int) -> None:
        """Add one value."""
        kind = type(value)
        if kind in SCALARS:
            self.put(kind.__name__, repr(value))
            return
        if kind in (str, bytes):
            self._text(name, value)
            return
        if id(value) in self.open:
            self.put("again", str(self.open[id(value)]))
            return
        self.count += 1
        if not deep or self.count > MOST:
            raise Missing("it holds more than is read")
        self.open[id(value)] = len(self.open)
        STEPS.get(kind, _Walk._other)(self, name, value, deep - 1)
        del self.open[id(value)]

    def _text(self, name: str, value: Any) -> None:
        text = value if type(value) is str else value.decode("latin-1")
        if withheld(name, text) or (len(text) < LARGE and tells(text)):
            if not self.key:
                raise Missing(f"it holds a secret ({name})")
            self.keyed = True
            self.put("secret", digests.equality(self.key, "secret", (text.encode("utf-8", "surrogatepass"),)))
        else:
            self.put(type(value).__name__, value)

    # -- by kind ------------------------------------------------------------------------------------

    def _items(self, name: str, value: Any, deep: int) -> None:
        self.put(type(value).__name__, str(len(value)))
        for item in list(value):
            self.value(name, item, deep)

    def _set(self, name: str, value: Any, deep: int) -> None:
        """Add a set in an order that is the same in every process."""
        self.put(type(value).__name__, str(len(value)))
        outer, found = self.state, []
        for item in list(value):
            self.state = hashlib.sha256()
            self.value(name, item, deep)
            found.append(self.state.digest())
        self.state = outer
        self.put(*sorted(found))

    def _dict(self, name: str, value: Any, deep: int) -> None:
        self.put(type(value).__name__, str(len(value)))
        for key, item in list(value.items()):
            self.value(name, key, deep)
            self.value(key if type(key) is str else name, item, deep)

    def function(self, name: str, value: Any, deep: int) -> None:
        """Add a function written in Python; one that was compiled as what it was made of."""
        table = value.__dict__
        if "_torchdynamo_orig_callable" in table:
            self.put("compiled")
            self.value(name, table["_torchdynamo_orig_callable"], deep)
            return
        place = home(value)
        if place.partition(".")[0] in OURS and not value.__closure__:
            self.put("named", place, value.__qualname__)
            return
        code = value.__code__
        self.put("function")
        self.code(code, deep)
        self.value("its defaults", value.__defaults__, deep)
        self.value("its defaults", value.__kwdefaults__, deep)
        for cell_name, cell in zip(code.co_freevars, value.__closure__ or (), strict=True):
            try:
                held = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            self.value(cell_name, held, deep)
        for used in sorted(names(code)):
            if used in value.__globals__:
                self._global(used, value.__globals__[used], place.partition(".")[0], deep)

    def code(self, code: types.CodeType, deep: int) -> None:
        """Add compiled code."""
        shape = (code.co_names, code.co_varnames, code.co_freevars, code.co_argcount, code.co_kwonlyargcount)
        self.put("code", code.co_code, repr(shape))
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                self.code(constant, deep)
            else:
                self.value("a constant", constant, deep)

    def _global(self, name: str, value: Any, package: str, deep: int) -> None:
        """Add what a function reads from its module: what is plain or of its package whole, the rest named."""
        kind = type(value)
        coded = kind is types.FunctionType or issubclass(kind, type)
        if kind in PLAIN or (coded and home(value).partition(".")[0] == package):
            self.put("global", name)
            self.value(name, value, deep)
        elif kind is types.ModuleType:
            self.put("module", str(vars(value).get("__name__")))
        elif coded:
            self.put("named", home(value), value.__qualname__)
        else:
            self.put("a", kind.__module__, kind.__qualname__)

    def _method(self, name: str, value: Any, deep: int) -> None:
        self.put("method")
        self.value(name, value.__func__, deep)
        self.value("its object", value.__self__, deep)

    def _partial(self, name: str, value: Any, deep: int) -> None:
        self.put("partial")
        for part in (value.func, value.args, value.keywords):
            self.value(name, part, deep)

    def _builtin(self, name: str, value: Any, deep: int) -> None:
        self.put("builtin", str(value.__module__), value.__qualname__)
        if not isinstance(value.__self__, (types.ModuleType, types.NoneType, type)):
            self.value(name, value.__self__, deep)

    def _named(self, _name: str, value: Any, _deep: int) -> None:
        self.put("module", str(vars(value).get("__name__")))

    def kind(self, value: type, deep: int) -> None:
        """Add a class: by name, and where it is the user's with the functions that it is made of."""
        for base in value.__mro__:
            self.put("class", base.__module__, base.__qualname__)
            if base.__module__.partition(".")[0] in OURS or base.__module__ in sys.stdlib_module_names:
                continue
            for name, member in sorted(vars(base).items()):
                inner = getattr(member, "__func__", member) if type(member) in (staticmethod, classmethod) else member
                if type(member) is property:
                    inner = member.fget
                if type(inner) is types.FunctionType or (type(inner) in PLAIN and not name.startswith("__")):
                    self.put(name)
                    self.value(name, inner, deep)

    def _other(self, name: str, value: Any, deep: int) -> None:
        """Add an object by its class and by what it holds; some it is known how to read, some cannot be read."""
        kind = type(value)
        if issubclass(kind, type):  # never isinstance: that asks the object for its class
            self.put("type")
            self.kind(value, deep)
            return
        if id(value) in self.parts:
            self.put("part", self.parts[id(value)])
            return
        torch = sys.modules.get("torch")
        if torch is not None:
            if issubclass(kind, torch.nn.Module):
                raise Missing(f"it holds a model or a layer ({name}), whose weights are not those of this one")
            if kind in (torch.dtype, torch.device, torch.Size):
                self.put(kind.__name__, repr(value))
                return
            if kind in (torch.Tensor, torch.nn.Parameter):
                if value.numel() * value.element_size() > LARGE:
                    raise Missing(f"it holds a large tensor ({name})")
                value = torch.Tensor.detach(value)
                kind = torch.Tensor
        if kind.__module__ in ("numpy", "torch"):
            try:
                self.put(kind.__name__, whole.encode(value))
            except whole.NotWhole as why:
                raise Missing(str(why)) from None
            return
        self._object(name, value, deep)

    def _object(self, name: str, value: Any, deep: int) -> None:
        kind = type(value)
        if not self.inside:
            self.put("object")
            self.kind(kind, deep)
            return
        table: dict[str, Any] = {}
        try:
            table = dict(object.__getattribute__(value, "__dict__"))
            opaque = any(not base.__flags__ & HEAP and base not in BASES for base in kind.__mro__)
        except AttributeError:
            opaque = not any("__slots__" in vars(base) for base in kind.__mro__)
        if opaque:
            raise Missing(f"it holds {name}, a {kind.__module__}.{kind.__qualname__}, which cannot be seen")
        for base in kind.__mro__:
            for slot, member in vars(base).items():
                if type(member) is SLOT:
                    try:
                        table[slot] = member.__get__(value)
                    except AttributeError:  # not filled
                        continue
        self.put("object")
        self.kind(kind, deep)
        for plain in BASES[1:]:
            if issubclass(kind, plain):
                self.put(plain.__name__)
                self.value(name, plain(value) if plain in (str, int, float) else _copied(plain, value), deep)
        for item_name in sorted(table, key=str):
            self.put(str(item_name))
            self.value(str(item_name), table[item_name], deep)


def _copied(plain: Any, value: Any) -> Any:
    """Copy a container of a class of its own without running code of that class."""
    return dict(dict.items(value)) if plain is dict else plain(plain.__iter__(value))


PLAIN = {*SCALARS, str, bytes, tuple, list, dict, set, frozenset, functools.partial}
STEPS: dict[type, Any] = {
    tuple: _Walk._items, list: _Walk._items, set: _Walk._set, frozenset: _Walk._set, dict: _Walk._dict,
    types.FunctionType: _Walk.function, types.MethodType: _Walk._method, functools.partial: _Walk._partial,
    types.BuiltinFunctionType: _Walk._builtin, types.ModuleType: _Walk._named,
}  # fmt: skip


def names(code: types.CodeType) -> set[str]:
    """Return the names that code refers to, with those of the code inside it."""
    found = set(code.co_names)
    for constant in code.co_consts:
        if isinstance(constant, types.CodeType):
            found |= names(constant)
    return found


# -- code that is not where it belongs ------------------------------------------------------------------


def patches(parts: Iterable[Any]) -> list[str]:
    """Name what is not the code of its own package, and the code put in its place: forwards, and functions of modules.

    The modules are those that the model is written in, and those that all models borrow from.
    """
    found = set()
    seen = set()
    for part in parts:
        kind = type(part)
        own = part.__dict__.get("forward")
        if own is not None:
            found.update(_strange(kind.__module__, own, f"{kind.__name__}.forward of the object"))
        if kind not in seen:
            seen.add(kind)
            owner = next((base for base in kind.__mro__ if "forward" in vars(base)), None)
            if owner is not None:
                found.update(_strange(owner.__module__, vars(owner)["forward"], f"{owner.__name__}.forward"))
    for name in homes(seen):
        for what, function in list(vars(sys.modules[name]).items()):
            if isinstance(function, types.FunctionType) and home(function).partition(".")[0] not in OURS:
                found.update(_strange(name, function, f"{name.rpartition('.')[2]}.{what}"))
    return sorted(found)


def homes(kinds: Iterable[type]) -> Iterator[str]:
    """List the modules whose functions a model of transformers is made with."""
    own = {kind.__module__ for kind in kinds if kind.__module__.startswith("transformers.models.")}
    yield from (name for name in sorted({*own, *PATCHED}) if name in sys.modules)


def _strange(owner: str, function: Any, what: str) -> list[str]:
    """Look through decorators, down to the code, for what is not at home: the owner's module, or a known decorator."""
    for _ in range(16):
        function = getattr(function, "__func__", None) or getattr(function, "func", function)
        code = getattr(function, "__code__", None)
        if code is None:
            kind = type(function)
            return [] if kind.__module__.startswith("torch") else [f"{what} is a {kind.__module__}.{kind.__qualname__}"]
        place = home(function)
        inner = getattr(function, "__wrapped__", None)
        package = place.partition(".")[0]
        decorator = inner is not None and package in ("transformers", owner.partition(".")[0])
        if place != owner and package != "torch" and not decorator:
            return [f"{what} is {place}.{code.co_name} ({_code(function)})"]
        if inner is None:
            break
        function = inner
    return []


def _code(function: Any) -> str:
    """Digest a patch without what objects in its closure hold: most of those count, and a count is no other patch."""
    walk = _Walk(b"", {}, inside=False)
    try:
        walk.value("it", function, DEEP)
    except Exception:  # its code still tells it from most others
        walk = _Walk(b"", {}, inside=False)
        walk.code(function.__code__, DEEP)
    return walk.state.hexdigest()[:12]
