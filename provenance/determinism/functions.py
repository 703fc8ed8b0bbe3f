"""What decides what a function returns, as far as it can be seen: its code, and whatever that code refers to.

A result may be served again only if nothing that made it has changed. Of a function that is its code, defaults and
closure, the globals that it names, and, of functions of the same package, the same again. A model among them counts
with its weights. What cannot be seen (a client, an open file, an object with a state of its own) is `Unseen`: unknown
is never equal, unless the caller vouches for it with a version.
"""

import hashlib
import inspect
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

from provenance.errors import UsageError
from provenance.fingerprint.code import names
from provenance.integrity import whole

Of = Callable[[Any], bytes]  # a model's part of a key
MOST = 500


class Unseen(UsageError):
    """Something takes part in a result of which it cannot be seen whether it has changed."""


def is_model(value: object) -> bool:
    """Say whether a value is a module of torch."""
    torch = sys.modules.get("torch")
    return torch is not None and isinstance(value, torch.nn.Module)


def identity(function: Any, of_model: Of, vouched: bool = False) -> bytes:
    """Return 32 bytes that are equal as long as nothing that can be seen of a function has changed. Raises Unseen.

    ``vouched`` leaves out what cannot be seen, for the caller answers for it.

    >>> one, other = (lambda n: n + 1), (lambda n: n + 2)
    >>> identity(one, len) == identity(one, len), identity(one, len) == identity(other, len)
    (True, False)
    """
    state = hashlib.sha256(b"provenance/function/v1")
    for part in _Walk(of_model, vouched).function(inspect.unwrap(function)):
        state.update(len(part).to_bytes(8, "little") + part)
    return state.digest()


class _Walk:
    """One walk through what a function refers to, each function once."""

    def __init__(self, of_model: Of, vouched: bool) -> None:
        self.of_model, self.vouched = of_model, vouched
        self.seen: set[int] = set()

    def function(self, function: Any) -> Iterator[bytes]:
        """Walk a function written in Python."""
        code = getattr(function, "__code__", None)
        if code is None or len(self.seen) > MOST:
            yield self._unseen(getattr(function, "__qualname__", "it"), function)
            return
        if id(function) in self.seen:
            return
        self.seen.add(id(function))
        yield f"{function.__module__} {function.__qualname__} {sys.version_info[:2]}".encode()
        yield from self.code(code)
        yield from self.value("its defaults", function.__defaults__)
        yield from self.value("its defaults", function.__kwdefaults__)
        package = function.__module__.partition(".")[0]
        for name, cell in zip(code.co_freevars, function.__closure__ or (), strict=True):
            yield name.encode()
            try:
                held = cell.cell_contents
            except ValueError:  # not filled yet
                continue
            yield from self.refers(name, held, package)
        for name in sorted(names(code)):
            if name in function.__globals__:
                yield name.encode()
                yield from self.refers(name, function.__globals__[name], package)

    def code(self, code: types.CodeType) -> Iterator[bytes]:
        """Walk compiled code: what it does, by which names, with which constants."""
        yield code.co_code
        yield repr((code.co_names, code.co_varnames, code.co_freevars, code.co_argcount, code.co_flags)).encode()
        for constant in code.co_consts:
            if isinstance(constant, types.CodeType):
                yield from self.code(constant)
            elif constant is ...:
                yield b"..."
            else:
                yield whole.encode(constant)

    def refers(self, name: str, value: Any, package: str) -> Iterator[bytes]:
        """Walk what stands behind a name of the code."""
        if isinstance(value, types.ModuleType):
            yield f"module {value.__name__} {getattr(value, '__version__', '')}".encode()
        elif isinstance(value, types.FunctionType):
            inner = inspect.unwrap(value)
            mine = getattr(inner, "__module__", None) or ""
            if isinstance(inner, types.FunctionType) and mine.partition(".")[0] == package:
                yield from self.function(inner)
            else:  # of a library, whose version is part of the environment
                yield f"function {mine}.{getattr(inner, '__qualname__', '')}".encode()
        elif isinstance(value, type):
            yield f"class {value.__module__}.{value.__qualname__}".encode()
            if value.__module__.partition(".")[0] == package and id(value) not in self.seen:
                self.seen.add(id(value))
                for member in vars(value).values():
                    inner = getattr(member, "__func__", member)
                    if isinstance(inner, types.FunctionType):
                        yield from self.function(inner)
        elif isinstance(value, types.BuiltinFunctionType) and isinstance(
            value.__self__, (types.ModuleType, type(None))
        ):
            yield f"builtin {value.__module__}.{value.__qualname__}".encode()
        else:
            yield from self.value(name, value)

    def value(self, name: str, value: Any) -> Iterator[bytes]:
        """Yield a value that a function refers to."""
        if is_model(value):
            yield self.of_model(value)
            return
        try:
            yield whole.encode(value)
        except whole.NotWhole:
            yield self._unseen(name, value)

    def _unseen(self, name: str, value: object) -> bytes:
        if not self.vouched:
            kind = type(value)
            raise Unseen(
                f"it depends on {name}, a {kind.__module__}.{kind.__qualname__}, of which it cannot be seen whether "
                'it changes; if you know that it does not, say so with policy={"version": "1"}, and change that when '
                "it does"
            )
        return f"vouched {name}".encode()
