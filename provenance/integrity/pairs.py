"""Secrets whose name is no key: rows of a table of names and values, elements of XML, and what a URL asks.

`{"name": "api_key", "value": "…"}` says in two members what `{"api_key": "…"}` says in one. The shapes here are found
beside the pass of `beside`; each looks at a bounded stretch of text, so that the work stays that of the length.
"""

import re

from provenance.integrity.names import strength

GONE = b"[redacted]"
LABELS = rb"(?i:name|key|header|field|param|parameter|var|variable|env|label|id|k|type|property|option|attribute)"
QUOTE = rb"\\{0,15}+[\"']"
INNER = rb"[^\"'\\]{0,200}+"
# The member before a quoted name; what stands between the two members; the member that holds the value.
LABEL = re.compile(rb"(?:\A|[^\w.\-])" + LABELS + rb"(?:" + QUOTE + rb")?\s?[:=]\s?" + QUOTE + rb"\Z")
PART = rb"(?:,\s{0,4}| {1,4})"
OTHER = rb"(?:" + QUOTE + rb")?[\w\-]{1,40}+(?:" + QUOTE + rb")?\s?[:=]\s{0,2}"
MEMBER = OTHER + rb"(?:" + QUOTE + INNER + QUOTE + rb"|[\w.+\-]{1,40}+)"
VALUE = rb"(?i:value|val|v|content|contents|data|default|secret|text|plaintext)"
NEXT = re.compile(
    rb"(?:" + MEMBER + PART + rb"){0,4}?(?:" + QUOTE + rb")?(?P<flag>(?!))?(?P<name>" + VALUE
    + rb")(?P<close>" + QUOTE + rb")?(?P<sep>\s?[:=]\s{0,4})(?P<comma>(?!))?(?P<space>(?!))?"
)  # fmt: skip
VALUES = frozenset({"value", "val", "v", "content", "contents", "data", "default", "text", "plaintext"})
AFTER = re.compile(
    rb"(?:\\{0,15}+\"(?:[^\"\\]|\\[^\"]){0,2000}+\\{0,15}+\"|\\{0,15}+'[^'\\]{0,2000}+\\{0,15}+'|[\w.+\-]{1,40}+)"
    + PART + rb"(?:" + MEMBER + PART + rb"){0,4}?(?:" + QUOTE + rb")?" + LABELS + rb"(?:" + QUOTE + rb")?\s?[:=]\s?"
    + QUOTE + rb"(?P<label>[\w.\-]{2,60}+)" + QUOTE
)  # fmt: skip
NAMELIKE = re.compile(rb"[A-Za-z][A-Za-z_ .\-]{0,30}")
TAG = re.compile(
    rb"(<(?:[\w\-]{1,40}:)?([A-Za-z_][\w.\-]{1,60}+)(?:\s[^<>]{0,200}+)?>(?:<!\[CDATA\[)?)([^<\"]{1,4000}+)(?=</|\]\]>)"
)
ASKED = frozenset({"key", "code", "sig", "sign", "pass", "pw", "pat", "auth", "access", "hash", "hmac"})


def follows(data: bytes, head: re.Match[bytes]) -> re.Match[bytes] | None:
    """Find the member that holds the value of a quoted name, where the name is itself a value: of `name`, of `key`."""
    close = head["close"] or b""
    opening = head.start() - len(close)
    if opening < 0 or data[opening : head.start()] != close:
        return None
    return NEXT.match(data, head.end()) if LABEL.search(data[max(0, opening - 40) : head.start()]) is not None else None


def told(data: bytes, name: str, place: int) -> str:
    """Return the secret name that a later member gives to the value at ``place``, or an empty text."""
    if name.lower() not in VALUES:
        return ""
    found = AFTER.match(data, place)
    label = found["label"].decode("ascii") if found is not None else ""
    return label if label and strength(label) else ""


def asked(data: bytes, start: int) -> bool:
    """Say whether a name stands in the query of a URL, or in a form's body."""
    return data[max(0, start - 1) : start] in (b"?", b"&") or data[max(0, start - 5) : start] == b"&amp;"


def untagged(data: bytes) -> bytes:
    """Return text without what stands between the tags of an XML element whose name is secret.

    >>> untagged(b"<a><userPassword>x y</userPassword><b>1</b></a>")
    b'<a><userPassword>[redacted]</userPassword><b>1</b></a>'
    """
    if b"</" not in data:
        return data

    def cut(found: re.Match[bytes]) -> bytes:
        content = found[3].strip()
        known = not content or content == GONE or not strength(found[2].decode("ascii"))
        return found[0] if known else found[1] + GONE

    after = TAG.sub(cut, data)
    return data if after == data else after
