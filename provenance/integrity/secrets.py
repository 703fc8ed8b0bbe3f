"""What a secret looks like, and text without it. Nothing that fits is written, wherever it stands.

Three kinds of evidence: a form that keys have (a token of a known maker, credentials in a URL, a private key), the name
that stands beside a value (`password=`, `"api_key":`), and the value of a variable of this process whose name says that
it is secret. The last catches what has neither form nor name beside it.
"""

import os
import re
from typing import Any

from provenance.integrity.beside import GONE, redact
from provenance.integrity.names import named, withheld

__all__ = ["GONE", "holds", "known", "named", "scrub", "tells", "withheld", "without_password"]

# Long runs are possessive or bounded: hostile text must cost no more than its length.
MAKERS = r"(?:sk-(?:[a-z0-9]{1,20}-){0,4}|sk|hf|gh[opsu]|github_pat|glpat|xox[abprs]|AKIA|ASIA|AIza|eyJ)"
CREDENTIAL = re.compile(
    r"://[^/\s:]*+:[^/\s@]*+@|\b(?:bearer|basic)\s{1,8}\S{8}|-----BEGIN|\b" + MAKERS + r"[-_]?[A-Za-z0-9]{12}",
    re.IGNORECASE,
)
# The same forms, each with as much as belongs to the secret; quotes and escapes of JSON stay outside.
FORMS = re.compile(
    rb"(?<=://)[^/\s\"'\\@:]*+:[^/\s\"'\\@]*+(?=@)"
    rb"|(?<=bearer )[^\s\"'\\]{8,}+|(?<=basic )[^\s\"'\\]{8,}+"
    rb"|-----BEGIN[^-]{0,80}PRIVATE KEY-----.*?(?:-----END[^-]{0,80}-----|\Z)"
    rb"|\b" + MAKERS.encode() + rb"[-_]?[A-Za-z0-9]{12}[\w.=-]*+",
    re.IGNORECASE | re.DOTALL,
)
PLACES = (b"PWD", b"OLDPWD")  # where a shell stands
LEAST = 8
CHUNK, BEFORE, BEHIND = 1 << 20, 64, 2048
# A large text is read for secrets where one of these stands.
SIGNS = (b"://", b"private key-", b"passw", b"passphrase", b"secret", b"bearer ", b"authorization",
         b"cookie:", b"api_key", b"api-key", b"token=", b"_token", b"hf_", b"ghp_",
         b"sk-", b"akia", b"xoxb-", b"glpat-", b"github_pat", b"aiza", b"eyj")  # fmt: skip
_known: dict[int, tuple[bytes, ...]] = {}


def known() -> tuple[bytes, ...]:
    """Return the values of this process's variables whose names say that they are secret, longest first.

    A variable that changed is seen: the answer is kept by a hash of the whole environment.
    """
    data: Any = getattr(os.environ, "_data", None) or {os.fsencode(k): os.fsencode(v) for k, v in os.environ.items()}
    mark = hash(tuple(data.items()))
    found = _known.get(mark)
    if found is None:
        values = {bytes(value) for name, value in data.items() if len(value) >= LEAST and _secret(bytes(name))}
        found = tuple(sorted((value for value in values if not value.isdigit()), key=len, reverse=True))
        _known.clear()
        _known[mark] = found
    return found


def _secret(name: bytes) -> bool:
    return name not in PLACES and named(name.decode("utf-8", "replace"))


def scrub(data: bytes) -> bytes:
    """Return bytes of text or JSON without what looks like a secret; the same object where nothing does.

    >>> scrub(b'{"url": "https://me:pw@host/x", "key": "hf_abcdefghijklmnop"}')
    b'{"url": "https://[redacted]@host/x", "key": "[redacted]"}'
    """
    for value in known():
        data = data.replace(value, GONE) if value in data else data
        escaped = value.replace(b"\\", b"\\\\").replace(b'"', b'\\"')
        data = data.replace(escaped, GONE) if escaped in data else data
    return redact(FORMS.sub(GONE, data))


def scrub_large(data: bytes) -> bytes:
    """Scrub a text of many MiB without holding its caller up: only around the places in which a sign stands.

    >>> scrub_large(b"x" * 9 + b" password=hunter2 and more")
    b'xxxxxxxxx password=[redacted] and more'
    """
    pieces, copied = [], 0
    for begin, end in _suspect(data):
        made = scrub(data[begin:end])
        pieces += [data[copied:begin], made]
        copied = end
    return b"".join([*pieces, data[copied:]]) if pieces else data


def _suspect(data: bytes) -> list[list[int]]:
    """Return the spans of a text around every sign in it, in order and apart."""
    found: set[int] = set()
    for place in range(0, len(data), CHUNK):
        low = data[place : place + CHUNK + BEFORE].lower()
        for sign in SIGNS:
            at = low.find(sign)
            while at >= 0:
                found.add(place + at)
                at = low.find(sign, at + BEFORE)
    for value in known():
        at = data.find(value)
        while at >= 0:
            found.add(at)
            at = data.find(value, at + len(value))
    spans: list[list[int]] = []
    for at in sorted(found):
        begin = max(0, at - BEFORE)
        if spans and begin <= spans[-1][1]:
            spans[-1][1] = at + BEHIND
        else:
            spans.append([begin, at + BEHIND])
    return spans


def holds(value: object) -> bool:
    """Say whether a value, with all that is in it, would lose something to `scrub`."""
    data = (value if isinstance(value, str) else repr(value)).encode("utf-8", "backslashreplace")
    return scrub(data) is not data


def tells(text: str) -> bool:
    """Say whether a value looks like a credential.

    >>> tells("https://me:pw@host"), tells("https://host/path")
    (True, False)
    """
    if CREDENTIAL.search(text) is not None:
        return True
    data = text.encode("utf-8", "backslashreplace")
    return redact(data) is not data


def without_password(url: str) -> tuple[str, str]:
    """Split the password out of a database's URL.

    >>> without_password("postgresql+psycopg://me:p%40w@host/db?sslmode=require")
    ('postgresql+psycopg://me@host/db?sslmode=require', 'p@w')
    >>> without_password("sqlite:////home/me/p.db")
    ('sqlite:////home/me/p.db', '')
    """
    from urllib.parse import unquote

    found = re.match(r"([^:]+://[^/?#:@]*):([^/?#@]*)@", url)
    if found is not None:
        return f"{found[1]}@{url[found.end() :]}", unquote(found[2])
    query = re.search(r"([?&])password=([^&#]*)&?", url)
    if query is not None:
        return (url[: query.start()] + query[1] + url[query.end() :]).rstrip("?&"), unquote(query[2])
    return url, ""
