"""Environment variables: the allow-list of the catalogue, by exact name, and nothing else.

A prefix would leak (HF_TOKEN, VLLM_API_KEY). Even a listed variable whose value looks like a credential is
withheld. The whole list is read again at every call as one tuple, in a few microseconds, because libraries
change variables inside the process; an audit hook would tell of changes for free, but could never be taken off
again and taxes every event of the interpreter (docs/decisions/0004-environment-by-snapshot.md).
"""

import hashlib
import os
import re
from collections.abc import Sequence
from functools import lru_cache
from typing import Any

from provenance.catalogue.fields import table
from provenance.facts import Field, State
from provenance.fingerprint.reading import unnamed, users
from provenance.integrity.secrets import tells

# Values of these hold paths; equal content at another place is no difference, but the path itself is a fact.
LIMIT = 2000
# A device's UUID tells one machine from all others: its digest does for a comparison.
UUID = re.compile(r"((?:GPU|MIG)-)(?:GPU-)?[0-9A-Fa-f][0-9A-Fa-f/-]*")
NEVER_READ = "SECRET: never read"


@lru_cache(maxsize=1)
def names() -> tuple[str, ...]:
    """Return the allow-list. The catalogue names some variables only to say that they are never read."""
    return tuple(name[4:] for name, spec in table().items() if name.startswith("env.") and NEVER_READ not in spec.help)


@lru_cache(maxsize=1)
def _keys() -> tuple[object, ...]:
    encode = getattr(os.environ, "encodekey", None)
    return tuple(encode(name) if encode else name for name in names())


def snapshot() -> tuple[object, ...]:
    """Return the raw values of the list as they stand now, to be compared with an earlier snapshot."""
    data = getattr(os.environ, "_data", None)
    get: Any = data.get if data is not None else os.environ.get
    return tuple(map(get, _keys()))


def fields() -> list[Field]:
    """Read the listed variables. One that nobody set is ``unset``."""
    values = [(name, os.environ.get(name)) for name in names()]
    paths = any("/" in value for _, value in values if value)  # only those can name a user
    who = (os.path.expanduser("~"), users(os.environ)) if paths else ("", [])
    return [field(name, value, who) for name, value in values]


def field(name: str, value: str | None, who: tuple[str, Sequence[str]] = ("", ())) -> Field:
    """Make the field of one variable, without the home and the names of the user, ``who``.

    >>> field("LANG", "C.UTF-8").value, field("XLA_FLAGS", "https://me:pw@host").state.value
    ('C.UTF-8', 'redacted')
    """
    key = f"env.{name}"
    if value is None:
        return Field.unset(key, "environment")
    if tells(value):
        return Field.secret(key, "environment")
    if name.endswith("VISIBLE_DEVICES"):
        value = UUID.sub(lambda match: f"{match[1]}sha256:{hashlib.sha256(match[0].encode()).hexdigest()[:16]}", value)
    return Field(key, unnamed(value, *who)[:LIMIT], State.VALUE, "", "environment")
