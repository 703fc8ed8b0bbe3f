"""Fields of a caller's own, which no catalogue knows: whether they act on an output, nothing here can say.

An engine's own setting may well be the cause, and a request's number is none: both look alike, a name and two values.
So they are named, at the end of the line and with little confidence, and never explain a difference alone. Only a past
in which outputs parted where such a field differed makes a suspect of it like any other.
"""

import math
import re
from collections.abc import Iterable
from collections.abc import Sequence as Many
from typing import Any

from provenance.catalogue.fields import STRANGER, spec
from provenance.explain.history import Evidence
from provenance.explain.rules import TENSORS

UNKNOWN = "unknown"  # the effect of a field that nothing speaks for
ALL = 0.3  # how much all of them together can be believed at most
IDENTIFIER = 0.2  # what is left of that for one that looks like a name of the call
EVERY = 3  # pairs that must differ, and none agree, before a field counts as one of its own in every call
NAMES = re.compile(r"(.*_)?(id|ids|uuid|guid|ulid|nonce|now|date|timestamp)")
VALUES = re.compile(
    r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f-]{22}|(?=\D*\d)[0-9a-f]{12,}|\d{6,}|\d{4}-\d\d-\d\d.*", re.IGNORECASE
)
LARGE = 1_000_000
MATTERS = 0.1  # the confidence from which on a cause beside the first counts


def is_own(name: str) -> bool:
    """Say whether no catalogue knows a field.

    >>> is_own("request.id"), is_own("engine.kv_split"), is_own("batch.size")
    (True, True, False)
    """
    return spec(name).group == STRANGER.group


def looks(name: str, a: object, b: object) -> bool:
    """Say whether a field looks like the name of a call and not like a setting.

    >>> looks("request.id", "q1", "q2"), looks("my.run", "0123456789ab", "ba9876543210"), looks("engine.kv", 4, 8)
    (True, True, False)
    """
    return bool(NAMES.fullmatch(name.rpartition(".")[2].lower())) or (_numbered(a) and _numbered(b))


def _numbered(value: object) -> bool:
    if isinstance(value, (int, float)):
        return abs(value) >= LARGE
    return isinstance(value, str) and bool(VALUES.fullmatch(value))


def unsteady(seen: Evidence | None) -> bool:
    """Say whether a field differed in every pair of runs on record: it then goes with whatever they did."""
    return seen is not None and seen.counts.equal == 0 and seen.counts.differed >= EVERY


def weight(name: str, a: object, b: object, seen: Evidence | None) -> float:
    """Return what is left of a field's score."""
    return IDENTIFIER if looks(name, a, b) or unsteady(seen) else 1.0


def because(name: str, a: object, b: object, seen: Evidence | None) -> str:
    """Say what is known of such a field: nothing, and perhaps that it looks like the name of a call."""
    said = "a field of your own: whether it acts on an output is not known"
    if unsteady(seen):
        return f"{said}, and it differed in every pair of runs on record"
    return f"{said}, and it looks like an identifier" if looks(name, a, b) else said


def shares(scores: Many[float], total: float) -> list[float]:
    """Return how far each can be believed where nothing else differs: however many they are, no further together.

    >>> shares([0.025], 0.105), shares([0.025] * 4, 0.18)
    ([0.23], [0.07, 0.07, 0.07, 0.07])
    """
    whole = max(total, sum(scores) / ALL)
    return [math.floor(100 * score / whole) / 100 for score in scores]


def blamed(causes: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the causes that explain something: those of which it is known what they do."""
    return [cause for cause in causes if cause["effect"] != UNKNOWN]


def deciding(causes: Iterable[dict[str, Any]]) -> list[str]:
    """Return the causes that must be allowed for a pair to be: the first, and those beside it that are no remainder.

    Other tensors are another model, however little they are believed to have done it.
    """
    named = blamed(causes)
    return [cause["field"] for cause in named if cause is named[0] or _matters(cause, named[0])]


def _matters(cause: dict[str, Any], first: dict[str, Any]) -> bool:
    name = cause["field"]
    return name in first["alternatives"] or name in TENSORS or cause["confidence"] >= MATTERS


def vague(causes: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return the others."""
    return [cause for cause in causes if cause["effect"] == UNKNOWN]
