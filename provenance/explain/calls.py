"""Calls of recorded functions, which have arguments and a result in place of tokens; and how any call ended.

Arguments are compared by the bytes of their lossless encoding, so that 1, 1.0 and True are three values. Of an object
that could not be kept its type alone is known: two such are neither equal nor different.
"""

import math
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

from provenance.facts import Run, Sequence
from provenance.integrity.values import Cut, encode

RUNTIME = "function"
ABSENT: Any = object()
SHOWN = 20  # places that are looked for
CHARS = 200


class Parted(NamedTuple):
    """A place at which two calls were given different things."""

    path: str
    a: object
    b: object


def is_function(a: Run, b: Run) -> bool:
    """Say whether both runs are calls of recorded functions."""
    return a.runtime == b.runtime == RUNTIME


def text(sequence: Sequence) -> str | None:
    """Return the text that came out: decoded, or as a function returned it."""
    if sequence.output_text is None and isinstance(sequence.output_value, str):
        return sequence.output_value
    return sequence.output_text


def parted(one: Sequence, other: Sequence) -> list[Parted]:
    """Return where the arguments of two calls differ; nothing where they were not kept."""
    if one.input_value is None or other.input_value is None:
        return []
    found = islice(_parted("", one.input_value, other.input_value), SHOWN)
    return [Parted(path, _shown(a), _shown(b)) for path, a, b in found]


def _parted(path: str, one: Any, other: Any) -> Iterator[Parted]:
    if one is not ABSENT and other is not ABSENT and encode(one) == encode(other):
        return
    if not path:  # an argument that one call alone was given stands under its own name
        one, other = ({"args": (), "kwargs": {}} | side if isinstance(side, dict) else side for side in (one, other))
    if isinstance(one, dict) and isinstance(other, dict):
        for key in {**one, **other}:
            yield from _parted(_joined(path, key), one.get(key, ABSENT), other.get(key, ABSENT))
    elif type(one) is type(other) and isinstance(one, (list, tuple)):
        for index in range(max(len(one), len(other))):
            sides = (side[index] if index < len(side) else ABSENT for side in (one, other))
            yield from _parted(f"{path}[{index}]", *sides)
    else:
        yield Parted(path, one, other)


def _joined(path: str, key: object) -> str:
    """Return the path of a member.

    >>> _joined("", "kwargs"), _joined("kwargs", "top_p"), _joined("args[0]", "a b")
    ('kwargs', 'kwargs.top_p', "args[0]['a b']")
    """
    if not path:
        return str(key)
    return f"{path}.{key}" if isinstance(key, str) and key.isidentifier() else f"{path}[{key!r}]"


def _shown(value: object) -> object:
    """Return what an answer can hold of a value."""
    if value is ABSENT:
        return {"state": "unset"}
    plain = value is None or isinstance(value, (bool, int)) or (isinstance(value, float) and math.isfinite(value))
    return value if plain else str(value)[:CHARS]


def opaque(*sequences: Sequence) -> list[str]:
    """Return the types of the arguments of which nothing else was kept."""
    return sorted({kind for sequence in sequences for kind in _opaque(sequence.input_value)})


def _opaque(value: object) -> Iterator[str]:
    if isinstance(value, Cut) and not value.text:
        yield value.kind
    members = value.values() if isinstance(value, dict) else value if isinstance(value, (list, tuple)) else ()
    for member in members:
        yield from _opaque(member)


# -- how a call ended ---------------------------------------------------------------------------------

ENDS = {
    "running": "has not ended", "aborted": "was aborted", "abandoned": "was given up half way",
    "partial": "was recorded in part", "crashed": "was cut off when its process ended",
}  # fmt: skip
CUT = "cut"


def ended(run: Run, sequence: Sequence) -> str:
    """Say how a call ended that did not end well; nothing where it did."""
    if run.status == "error":
        said = " ".join(run.error.split())[:CHARS]
        return f"raised {said}" if said else "raised an exception of which nothing was kept"
    return ENDS.get(run.status) or ("was cut short" if sequence.finish == CUT else "")


class Endings(NamedTuple):
    """How two calls ended, and what that leaves open."""

    a: str
    b: str

    @property
    def differ(self) -> bool:
        """Say whether they ended otherwise."""
        return self.a != self.b

    def failed(self, side: str) -> bool:
        """Say whether a call did not end well."""
        return bool(getattr(self, side))

    def told(self) -> str:
        """Say how both ended, in a clause; nothing where both ended well."""
        return " and ".join(f"{side} {said}" for side, said in (("A", self.a), ("B", self.b)) if said)
