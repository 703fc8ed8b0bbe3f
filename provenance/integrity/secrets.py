"""What a secret looks like, and text without it. Nothing that fits is written, wherever it stands.

Two kinds of evidence: a form that keys have (a token of a known maker, credentials in a URL, a private key), and the
value of a variable of this process whose name says that it is secret. The second catches what has no form.
"""

import os
import re
from typing import Any

GONE = b"[redacted]"
CREDENTIAL = re.compile(
    r"://[^/\s]*:[^/\s]*@|\b(?:bearer|basic)\s+\S{8}|-----BEGIN"
    r"|\b(?:sk-(?:[a-z0-9]+-)*|sk|hf|gh[opsu]|github_pat|glpat|xox[abprs]|AKIA|ASIA|AIza|eyJ)[-_]?[A-Za-z0-9]{12}",
    re.IGNORECASE,
)
# The same forms, each with as much as belongs to the secret; quotes and escapes of JSON stay outside.
FORMS = re.compile(
    rb"(?<=://)[^/\s\"'\\@]*:[^/\s\"'\\@]*(?=@)"
    rb"|(?<=bearer )[^\s\"'\\]{8,}|(?<=basic )[^\s\"'\\]{8,}"
    rb"|-----BEGIN[^-]*PRIVATE KEY-----.*?(?:-----END[^-]*-----|\Z)"
    rb"|\b(?:sk-(?:[a-z0-9]+-)*|sk|hf|gh[opsu]|github_pat|glpat|xox[abprs]|AKIA|ASIA|AIza|eyJ)[-_]?[A-Za-z0-9]{12}[\w.=-]*"
    rb"|(?<=password=)[^\s\"'\\&;,]{4,}|(?<=passwd=)[^\s\"'\\&;,]{4,}|(?<=api_key=)[^\s\"'\\&;,]{4,}"
    rb"|(?<=secret=)[^\s\"'\\&;,]{4,}|(?<=access_token=)[^\s\"'\\&;,]{4,}|(?<=[?&]token=)[^\s\"'\\&;,]{4,}",
    re.IGNORECASE | re.DOTALL,
)
NAMES = re.compile(
    rb"api_?key|_key$|_key_|token(?!iz)|secret|passw|passphrase|_pwd$|credential|auth|cookie|_dsn$|database_url|private|pat$",
    re.IGNORECASE,
)
LEAST = 8
_known: dict[int, tuple[bytes, ...]] = {}


def known() -> tuple[bytes, ...]:
    """Return the values of this process's variables whose names say that they are secret, longest first.

    A variable that changed is seen: the answer is kept by a hash of the whole environment.
    """
    data: Any = getattr(os.environ, "_data", None) or {os.fsencode(k): os.fsencode(v) for k, v in os.environ.items()}
    mark = hash(tuple(data.items()))
    found = _known.get(mark)
    if found is None:
        values = {bytes(value) for name, value in data.items() if NAMES.search(bytes(name)) and len(value) >= LEAST}
        found = tuple(sorted((value for value in values if not value.isdigit()), key=len, reverse=True))
        _known.clear()
        _known[mark] = found
    return found


def scrub(data: bytes) -> bytes:
    """Return bytes of text or JSON without what looks like a secret; the same object where nothing does.

    >>> scrub(b'{"url": "https://me:pw@host/x", "key": "hf_abcdefghijklmnop"}')
    b'{"url": "https://[redacted]@host/x", "key": "[redacted]"}'
    """
    for value in known():
        data = data.replace(value, GONE) if value in data else data
        escaped = value.replace(b"\\", b"\\\\").replace(b'"', b'\\"')
        data = data.replace(escaped, GONE) if escaped in data else data
    return FORMS.sub(GONE, data)


def holds(value: object) -> bool:
    """Say whether a value, with all that is in it, would lose something to `scrub`."""
    data = (value if isinstance(value, str) else repr(value)).encode("utf-8", "backslashreplace")
    return scrub(data) is not data


def tells(text: str) -> bool:
    """Say whether a value looks like a credential.

    >>> tells("https://me:pw@host"), tells("https://host/path")
    (True, False)
    """
    return CREDENTIAL.search(text) is not None


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
