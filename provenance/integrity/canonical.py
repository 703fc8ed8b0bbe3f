"""The one byte form that is hashed.

Fingerprints and leaves are documents of a small subset of JSON: keys in ASCII,
strings without lone surrogates, booleans, null, lists, and integers within 2^53. A float is written
as ``{"float": "0.7"}``, so that no reader has to agree with another on how a number prints. In this subset
sorted-key orjson gives the bytes of RFC 8785, which a property test holds against
a second implementation.

The promise is proved by ``tests/golden/digests.json``: no commit may alter it.
"""

import hashlib
import math
from collections.abc import Mapping

import orjson

from provenance.errors import NotCanonical

PREFIX = "p1:sha256:"
SAFE_INTEGER = 2**53
TAGS = {"float", "integer", "text", "pairs"}


def canonical(document: object) -> bytes:
    """Serialise a document of the subset to the bytes that are hashed.

    This form is a contract: changing it changes every digest ever stored, so a
    change takes a new PREFIX.

    >>> canonical({"b": 1, "a": [True, None]})
    b'{"a":[true,null],"b":1}'
    >>> canonical({"a": 0.5})
    Traceback (most recent call last):
    provenance.errors.NotCanonical: 0.5 at $.a is a float; write it as plain({...}) does, as a tagged string.
    """
    _check(document, "$")
    return orjson.dumps(document, option=orjson.OPT_SORT_KEYS)


def digest(data: bytes) -> str:
    """Digest of canonical bytes, with algorithm and version in front.

    >>> digest(canonical({}))
    'p1:sha256:44136fa355b3678a1146ad16f7e8649e94fb4fc21fe77e8310c060f61caaff8a'
    """
    return PREFIX + hashlib.sha256(data).hexdigest()


def raw(text: str) -> bytes:
    """Return the 32 bytes of a digest, for binary records.

    >>> raw(PREFIX + "00" * 32) == bytes(32)
    True
    """
    return bytes.fromhex(text.rpartition(":")[2])


def named(data: bytes) -> str:
    """Return the text of a digest that a binary record holds as 32 bytes."""
    return PREFIX + data.hex()


def plain(value: object) -> object:
    """Bring a value of a field into the subset, without loss for what fields hold.

    Floats become ``{"float": repr}``, integers beyond 2^53 ``{"integer": text}``, text with lone surrogates
    ``{"text": hex of its bytes}``, tuples and sets lists. Anything else becomes its type's name: a field holds
    facts and no objects.

    >>> plain({"temperature": 0.7, "ids": (1, 2**60)})
    {'temperature': {'float': '0.7'}, 'ids': [1, {'integer': '1152921504606846976'}]}
    """
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        number = int(value)
        return number if abs(number) <= SAFE_INTEGER else {"integer": str(number)}
    if isinstance(value, float):
        return {"float": "nan" if math.isnan(value) else repr(float(value))}
    if isinstance(value, str):
        return _text(str(value))
    if isinstance(value, Mapping):
        return _mapping(value)
    if isinstance(value, (list, tuple)):
        return [plain(item) for item in value]
    if isinstance(value, (set, frozenset)):
        return sorted((plain(item) for item in value), key=repr)
    return {"type": f"{type(value).__module__}.{type(value).__qualname__}"}


def restore(value: object) -> object:
    """Turn what ``plain`` made back into Python values.

    >>> restore(plain({"a": [0.1, 2**60, "x", float("inf")]}))
    {'a': [0.1, 1152921504606846976, 'x', inf]}
    """
    if isinstance(value, list):
        return [restore(item) for item in value]
    if isinstance(value, dict):
        if len(value) == 1:
            (tag, inner), *_ = value.items()
            if tag == "float" and isinstance(inner, str):
                return float(inner)
            if tag == "integer" and isinstance(inner, str):
                return int(inner)
            if tag == "text" and isinstance(inner, str):
                return bytes.fromhex(inner).decode("utf-8", "surrogatepass")
            if tag == "pairs" and isinstance(inner, list):
                return {_frozen(restore(key)): restore(item) for key, item in inner}
        return {key: restore(item) for key, item in value.items()}
    return value


def _text(value: str) -> object:
    try:
        value.encode()
    except UnicodeEncodeError:
        return {"text": value.encode("utf-8", "surrogatepass").hex()}
    return value


def _mapping(value: Mapping[object, object]) -> object:
    """Keep a mapping as one if its keys allow it, else as pairs: 1 and "1" must not collide, nor a key with a tag."""
    if all(type(key) is str and key.isascii() for key in value) and not (len(value) == 1 and TAGS & value.keys()):
        return {str(key): plain(item) for key, item in value.items()}
    return {"pairs": sorted(([plain(key), plain(item)] for key, item in value.items()), key=repr)}


class _Key(dict[str, object]):
    """The form of an object that was a key: a key again, that has the same form."""

    def __hash__(self) -> int:  # type: ignore[override]
        return hash(repr(self))


def _frozen(key: object) -> object:
    if isinstance(key, list):
        return tuple(_frozen(item) for item in key)
    return _Key(key) if isinstance(key, dict) else key


def _check(value: object, path: str) -> None:
    """Refuse what has no canonical bytes, naming where it stands."""
    if value is None or value is True or value is False:
        return
    kind = type(value)
    if kind is int:
        if abs(value) > SAFE_INTEGER:  # type: ignore[arg-type]
            raise NotCanonical(
                f"{value} at {path} is beyond 2^53; write it as plain({{...}}) does, as a tagged string."
            )
    elif kind is str:
        _check_text(value, path)  # type: ignore[arg-type]
    elif kind is list:
        for index, item in enumerate(value):  # type: ignore[arg-type, var-annotated]
            _check(item, f"{path}[{index}]")
    elif kind is dict:
        for key, item in value.items():  # type: ignore[attr-defined]
            if type(key) is not str or not key.isascii():
                raise NotCanonical(f"the key {key!r} at {path} is not ASCII text.")
            _check(item, f"{path}.{key}")
    elif kind is float:
        raise NotCanonical(f"{value} at {path} is a float; write it as plain({{...}}) does, as a tagged string.")
    else:
        raise NotCanonical(f"a {kind.__qualname__} at {path} has no canonical bytes.")


def _check_text(value: str, path: str) -> None:
    if not value.isascii():
        try:
            value.encode()
        except UnicodeEncodeError:
            raise NotCanonical(f"the text at {path} holds a lone surrogate.") from None
