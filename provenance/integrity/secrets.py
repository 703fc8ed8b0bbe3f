"""What a secret looks like, and text without it. Nothing that fits is written, wherever it stands.

Three kinds of evidence: a form that keys have (a token of a known maker, credentials in a URL, a private key), the name
that stands beside a value (`password=`, `"api_key":`), and the value of a variable of this process whose name says that
it is secret. The last catches what has neither form nor name beside it.
"""

import base64
import functools
import os
import re
from typing import Any

from provenance.integrity.beside import redact
from provenance.integrity.media import Aside
from provenance.integrity.names import named, withheld
from provenance.integrity.pairs import GONE
from provenance.integrity.tokens import places, without
from provenance.integrity.values import encode

__all__ = ["ARGUMENTS", "GONE", "TAKEN", "UNKEPT", "holds", "known", "label", "lost", "named", "ordinary", "said",
           "scrub", "scrub_large", "tells", "unsaid", "withheld", "without_password"]  # fmt: skip

# Long runs are possessive or bounded: hostile text must cost no more than its length.
# Where a secret was taken out of what a call was given or gave: such inputs and outputs equal none.
ARGUMENTS, TAKEN = "input.arguments", "a secret was taken out of the {}"
# Where something cannot be kept at all, and equality cannot be told either.
UNKEPT = "the {} hold something of type {}, which cannot be kept"
# How the keys of known makers begin: with a sign behind it, in any case; some only where digits follow, for names of
# packages begin so too; and some as they are.
SIGNED = ("sk-", "sk_", "hf_", "gho_", "ghp_", "ghr_", "ghs_", "ghu_", "github_pat_", "glpat-", "xoxa-", "xoxb-",
          "xoxe.", "xoxp-", "xoxr-", "xoxs-", "xapp-")  # fmt: skip
MIXED = ("gsk_", "r8_", "npm_", "dop_v1_", "doo_v1_", "shpat_", "shpca_", "shppa_", "shpss_", "sk_live_", "sk_test_",
         "pk_live_", "pk_test_", "rk_live_", "rk_test_", "sbp_", "whsec_", "api_org_", "lin_api_", "hvs.", "hvb.",
         "ya29.", "pypi-", "xai-", "pplx-", "nvapi-", "tvly-", "gocspx-", "sq0atp-", "sq0csp-", "age-secret-key-",
         "tskey-")  # fmt: skip
BARE = ("AKIA", "ASIA", "AIza", "eyJ", "SG.")


def _any(starts: tuple[str, ...]) -> str:
    return "(?:" + "|".join(map(re.escape, starts)) + ")"


MAKERS = (
    rf"(?:\b|(?<=\\[nrt]))(?:{_any(SIGNED)}(?:(?<=sk-|pp-)(?:[a-z0-9]{{1,20}}-){{0,4}})?|{_any(MIXED)}(?=[A-Za-z_-]{{0,40}}\d)|(?-i:{_any(BARE)}))"
    r"[A-Za-z0-9]{12}[\w.=-]*+"
)
BLANK = r"(?:\s|\\{1,8}+(?:[nrt]|xa0|u00[aA]0)|\xc2\xa0)"
# Credentials in a URL; a path that was made of a URL has one slash less.
USER = r"[^/\s\"'\\@:?#]"
URLS = (
    r"(?:(?<=://)|(?<=:/))(?:" + USER + r"*+:[^/\s\"'\\]*(?=@)"
    r"|(?=" + USER + r"*(?-i:[0-9A-Z]))" + USER + r"{8,}+(?=@)|" + USER + r"{16,}+(?=@))"
)
# What follows the scheme of a header. Words follow most of them too: there it must mix digits or capitals in.
SCHEMES = (
    r"(?P<scheme>bearer" + BLANK + r"{1,8}(?=[^\s\"'\\]{8})"
    r"|basic" + BLANK + r"{1,8}(?=[^\s\"'\\]{0,200}(?-i:[A-Z\d=]))(?=[^\s\"'\\]{8})"
    r"|(?:digest|negotiate|ntlm|api-?key)" + BLANK + r"{1,8}(?!sha\d|md5|blake|p1:|hmac:)(?=[^\s\"'\\\d]{0,200}\d)"
    r"(?=[^\s\"'\\A-Za-z]{0,200}[A-Za-z])(?=[^\s\"'\\]{8})|token" + BLANK + r"{1,8}(?=[A-Za-z_\-]{0,200}\d)"
    r"(?=[\d_\-]{0,200}[A-Za-z])(?=[\w\-]{16}))[^\s\"'\\]++"
)
PRIVATE = r"-----BEGIN[^-]{0,80}PRIVATE KEY-----.*?(?:-----END[^-]{0,80}-----|\Z)"
# The same forms, each with as much as belongs to the secret and what it takes to look for it at all; quotes and
# escapes of JSON stay outside.
FORMS = [
    (tuple(mark.lower().encode() for mark in marks), re.compile(form.encode(), re.IGNORECASE | re.DOTALL))
    for marks, form in (
        (("@",), URLS),
        (("-----BEGIN",), PRIVATE),
        (SIGNED + MIXED + BARE, MAKERS),
        (("bearer", "basic", "digest", "negotiate", "ntlm", "api-key", "apikey", "token"), SCHEMES),
    )
]
BINARY = (b'{"$":"byte', re.compile(rb'(\{"\$":"bytes","v":"|\{"\$":"bytearray","v":")([A-Za-z0-9+/=]*+)"'))
PLACES = (b"PWD", b"OLDPWD")  # where a shell stands
LEAST = 8
DIGESTS = ("sha256:", "hmac:", "p1:sha256:")  # ours
REMEMBERED = 500
CHUNK, BEFORE, BEHIND = 1 << 20, 64, 2048
# A large text is read for secrets where one of these stands.
SIGNS = (*(start.lower().encode() for start in (*SIGNED, *MIXED, *BARE)), b"://", b"private key-", b"passw",
         b"passphrase", b"pwd", b"secret", b"credential", b"bearer ", b"basic ", b"authorization", b"cookie",
         b"api_key", b"api-key", b"apikey", b"access_key", b"accesskey", b"private_key", b"_token", b"-token",
         b"token=", b"token:", b'token"', b"token'")  # fmt: skip
_known: dict[int, tuple[bytes, ...]] = {}

# What people call things, and where things are: no secret, though a variable with a secret's name may hold it.
WORD = rb"(?:[A-Z]?[a-z]{1,14}|[A-Z]{1,14})?\d{0,3}"
NAMED = re.compile(WORD)
PLACED = re.compile(
    rb"(?:[a-z][a-z0-9+]{1,14}://)?(?:" + WORD + rb"[./~_@-]){0,40}" + WORD + rb"(?::\d{1,5})?(?:/[a-z.]{0,14}){0,4}"
)
PATH = re.compile(rb"(?:~|\.{1,2})?(?:/[\w.@+-]{0,64}){1,40}")
DRAWN = re.compile(rb"(?=[^/]*[a-z])(?=[^/]*[A-Z])(?=[^/]*\d)[^/]{16}")
COMPOSED = 20
URL_PASSWORD = re.compile(rb"://[^/\s:@]*+:([^/\s@]{8,}+)@")
PARTS = re.compile(rb"[^\s,;\"'{}\[\]]{16,}+")


def known() -> tuple[bytes, ...]:
    """Return the secret values of this process's variables, longest first: by their names, and passwords in URLs.

    A variable that changed is seen: the answer is kept by a hash of the whole environment.
    """
    data: Any = getattr(os.environ, "_data", None) or {os.fsencode(k): os.fsencode(v) for k, v in os.environ.items()}
    mark = hash(tuple(data.items()))
    found = _known.get(mark)
    if found is None:
        values: set[bytes] = set()
        for name, value in data.items():
            if len(value) >= LEAST and _secret(bytes(name)):
                values |= {value, value.strip(), *PARTS.findall(value)}
            if b"@" in value:
                values.update(URL_PASSWORD.findall(value))
        kept = {bytes(value) for value in values if len(value) >= LEAST and not ordinary(bytes(value))}
        kept |= {form for value in kept for form in _escaped(value)}
        found = tuple(sorted(kept, key=len, reverse=True))
        _known.clear()
        _known[mark] = found
    return found


def _secret(name: bytes) -> bool:
    return name not in PLACES and named(name.decode("utf-8", "replace"))


def _escaped(value: bytes) -> set[bytes]:
    """Return a value as it stands in JSON and in URLs."""
    from urllib.parse import quote, quote_plus

    urls = {quote(value, safe="").encode(), quote_plus(value, safe="/").encode()} if len(value) <= 500 else set()
    return {value.replace(b"\\", b"\\\\").replace(b'"', b'\\"'), *urls}


def ordinary(value: bytes) -> bool:
    """Say whether a value is too common to be taken out wherever it stands: a number, a word, a name, a path, a host.

    The line is drawn where a leak is worse than a gap: what mixes cases or holds many digits, a word of more than
    fourteen letters, words with blanks between them and more than twenty characters of words with dashes are secret.

    >>> [ordinary(value) for value in (b"bfloat16", b"/usr/bin", b"localhost:80")]
    [True, True, True]
    >>> [ordinary(value) for value in (b"hunter2hunter2", b"correcthorsebattery9", b"correct horse")]
    [False, False, False]
    """
    if value.isdigit() or NAMED.fullmatch(value) is not None:
        return True
    if PATH.fullmatch(value) is not None:
        return DRAWN.search(value) is None
    return (len(value) <= COMPOSED or b"." in value or b"://" in value) and PLACED.fullmatch(value) is not None


def scrub(data: bytes) -> bytes:
    """Return bytes of text or JSON without what looks like a secret; the same object where nothing does.

    >>> scrub(b'{"url": "https://me:pw@host/x", "key": "hf_abcdefghijklmnop"}')
    b'{"url": "https://[redacted]@host/x", "key": "[redacted]"}'
    """
    for value in known():
        data = data.replace(value, GONE) if value in data else data
    return redact(_formless(data))


def unsaid(value: object, aside: list[Aside] | None = None) -> bytes:
    """Encode any value as `values.encode` does, without secrets: in texts, beside names, and in bytes that are text.

    What is put ``aside`` is not looked at: see `scrub_large`.

    >>> unsaid([b"password=abc"]) == encode([b"password=[redacted]"])
    True
    """
    data = encode(value, aside)
    if BINARY[0] in data:
        data = BINARY[1].sub(_unsaid_bytes, data)
    return scrub(data)


def _unsaid_bytes(found: re.Match[bytes]) -> bytes:
    content = base64.b64decode(found[2])
    left = scrub(content)
    return found[0] if left is content else found[1] + base64.b64encode(left) + b'"'


def _formless(data: bytes) -> bytes:
    low = data.lower()
    for marks, form in FORMS:
        if any(mark in low for mark in marks) and form.search(data) is not None:
            data = form.sub(rb"\g<scheme>" + GONE if "scheme" in form.groupindex else GONE, data)
    return without(data, GONE)


def said(text: str, among: tuple[bytes, ...] | None = None) -> str:
    """Return a text as it may be written; the same where it holds no secret. What was asked before costs nothing.

    ``among`` is what `known` says, for who asks of many texts at once.
    """
    among = known() if among is None else among
    return _said(text, among) if len(text) <= REMEMBERED else _said.__wrapped__(text, among)


@functools.lru_cache(maxsize=4096)
def _said(text: str, _known: tuple[bytes, ...]) -> str:
    data = text.encode("utf-8", "surrogatepass")
    left = scrub(data)
    return text if left is data else left.decode("utf-8", "surrogatepass")


def lost(value: object, among: tuple[bytes, ...] | None = None) -> bool:
    """Say whether the value of a field would lose something as a secret. Digests and numbers cost nothing.

    >>> lost("at https://me:pw@host"), lost(["password=abc"]), lost("sha256:00ff"), lost([1, 2])
    (True, True, False, False)
    """
    if isinstance(value, str):
        return not value.startswith(DIGESTS) and said(value, among) != value
    if not isinstance(value, (list, tuple, dict)):
        return False
    items = [*value.keys(), *value.values()] if isinstance(value, dict) else value
    return not all(isinstance(item, (int, float)) for item in items) and holds(value)


def label(name: str, value: object) -> str:
    """Return the text of a label (a tag, a name), without what is secret by the label's name or by its own form.

    >>> label("api_key", "abc"), label("suite", "at https://me:pw@host"), label("suite", 7)
    ('[redacted]', 'at https://[redacted]@host', '7')
    """
    text = str(value)
    if withheld(name, value):
        return GONE.decode()
    left = said(f"{name}={text}").removeprefix(f"{name}=")
    return GONE.decode() if left.startswith(GONE.decode()) and not text.startswith(GONE.decode()) else said(text)


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
        found.update(place + at for at, *_ in places(data[place : place + CHUNK + BEFORE]))
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
    """Say whether a value, with all that is in it, would lose something to `unsaid`."""
    return unsaid(value) != encode(value)


def tells(text: str) -> bool:
    """Say whether a value looks like a credential.

    >>> tells("https://me:pw@host"), tells("https://host/path")
    (True, False)
    """
    data = text.encode("utf-8", "backslashreplace")
    return b"-----BEGIN" in data or _formless(data) is not data or redact(data) is not data


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
