"""Which names say that the value beside them is secret: `api_key`, `clientSecret`, `--password`, `X-Auth-Token`.

A name is read as words. A *strong* one (a password) makes everything beside it secret. A *weak* one means a credential
as often as an ordinary thing (a token of a text, the key of a table): its neighbours decide, and numbers stay.
"""

import functools
import itertools
import re
from collections.abc import Sized

WEAK, STRONG = 1, 2
LONGEST = 200
WORDS = re.compile(r"[A-Z]+(?![a-z])|[A-Z]?[a-z]+|[0-9]+")
# Inside a word, because names run together: PGPASSWORD, apikey, userpassword.
ROOTS = re.compile(
    r"passw|passphrase|secret(?!ar)|credential|(?:api|access|private|secret)key|(?:auth|access|refresh|csrf|xsrf)token"
    r"|authorization|sess(?:ion)?id$"
)
ANYWHERE = frozenset({"pwd", "passwd", "pswd", "creds", "cred", "cookie", "cookies", "auth", "oauth", "otp"})
# A cookie that stands first tells what kind of thing follows: it is secret where that may hold the cookie's text.
COOKIES = frozenset({"cookie", "cookies"})
CARRY = frozenset({"auth", "content", "contents", "data", "dict", "header", "headers", "id", "jar", "key", "passwd",
                   "password", "pwd", "raw", "secret", "session", "sid", "str", "string", "text", "token", "value",
                   "values"})  # fmt: skip
LEAD_TO_KEY = frozenset({"api", "access", "private", "secret", "account", "master", "signing", "encryption", "client",
                         "ssh", "gpg", "pgp"})  # fmt: skip
# What such a name ends in where it tells about a secret and does not hold it.
ABOUT = frozenset({
    "class", "count", "dir", "dirs", "enabled", "endpoint", "env", "error", "errors", "exception", "expired",
    "expires", "expiry", "failed", "failure", "field", "fields", "file", "files", "format", "hint", "index",
    "invalid", "json", "kind", "len", "length", "level", "manager", "max", "method", "min", "missing", "mode",
    "name", "names", "param", "params", "path", "policy", "position", "provider", "py", "realm", "required",
    "scheme", "size", "sock", "timeout", "toml", "ttl", "txt", "type", "types", "uri", "url", "var",
    "version", "warning", "yaml", "yml"
})  # fmt: skip
# A last word that is weak, and the words before it that make it ordinary.
LAST = {
    "token": frozenset({
        "added", "additional", "any", "assistant", "audio", "bad", "begin", "beginning", "best", "boa", "boi",
        "bos", "bot", "class", "cls", "completion", "cross", "current", "decoder", "delimiter", "draft", "each",
        "encoder", "end", "eoa", "eoi", "eom", "eos", "eot", "every", "expected", "extra", "fake", "fim", "final",
        "first", "forced", "generated", "global", "good", "illegal", "im", "image", "input", "invalid", "lang",
        "language", "last", "mask", "max", "middle", "min", "missing", "new", "newline", "next", "num", "number",
        "one", "output", "pad", "patch", "per", "predicted", "prefix", "prev", "previous", "prompt", "register",
        "response", "return", "sampled", "sep", "separator", "single", "soft", "sot", "source", "space",
        "special", "start", "stop", "string", "sub", "suffix", "target", "text", "that", "the", "think",
        "thinking", "this", "tool", "top", "total", "two", "unexpected", "unk", "unknown", "unrecognized",
        "video", "vocab", "word"
    }),
    "key": frozenset({
        "answer", "any", "attention", "bad", "batch", "bucket", "by", "cache", "candidate", "column", "composite",
        "config", "count", "data", "dataset", "dedup", "dict", "dictionary", "duplicate", "duplicated", "each",
        "env", "error", "event", "expected", "extra", "feature", "field", "file", "first", "foreign", "group",
        "hash", "hot", "idempotency", "image", "index", "input", "invalid", "join", "json", "k", "kv", "label",
        "last", "layer", "lookup", "map", "max", "merge", "message", "metric", "min", "missing", "model",
        "module", "n", "new", "next", "no", "num", "object", "old", "on", "option", "other", "output", "param",
        "parameter", "parent", "partition", "past", "primary", "prompt", "public", "q", "query", "range",
        "registry", "required", "route", "routing", "row", "same", "setting", "shard", "shortcut", "sort",
        "split", "state", "tensor", "text", "the", "this", "translation", "unexpected", "unique", "unknown", "v",
        "value", "weight", "wrong"
    }),
    "session": frozenset({
        "current", "db", "desktop", "inference", "invalid", "missing", "new", "onnx", "ort", "spark", "sql", "tf",
        "the", "this", "train", "training"
    }),
    "signature": frozenset({
        "call", "default", "file", "forward", "function", "init", "invalid", "kernel", "method", "missing",
        "model", "op", "serving", "the", "this", "type"
    }),
    "sig": frozenset({"function", "call", "method"}),
    "pass": frozenset({
        "backward", "by", "bypass", "each", "first", "forward", "full", "last", "multi", "one", "per", "second",
        "single", "the", "this", "two"
    }),
    "pat": frozenset[str](),
    "pw": frozenset({"conv", "dw"}),
    "bearer": frozenset({"the"}),
    "dsn": frozenset[str](),
    "jwt": frozenset[str](),
}  # fmt: skip
# Words that stand before a credential in sentences as well: there the value decides.
DOUBTFUL = frozenset({"bad", "invalid", "missing", "the", "this", "unknown", "unrecognized", "wrong"})
NOT_ALONE = {"key", "pass", "pat"}
PAIRS = {("session", "id"), ("session", "key"), ("connection", "string"), ("database", "url")}


def named(name: str) -> bool:
    """Say whether a name tells that the value beside it is secret.

    >>> [name for name in ("apiKey", "X-Auth-Token", "HF_TOKEN", "eos_token_id", "past_key_values") if named(name)]
    ['apiKey', 'X-Auth-Token', 'HF_TOKEN']
    """
    return strength(name) > 0


def withheld(name: str, value: object) -> bool:
    """Say whether a value must not be written because of its name. What nobody set, and switches, are no secrets.

    >>> withheld("token", "plain"), withheld("token", True), withheld("token", 12), withheld("password", 12)
    (True, False, False, True)
    """
    if value is None or isinstance(value, bool) or (isinstance(value, Sized) and len(value) == 0):
        return False
    found = strength(name)
    if found == WEAK and isinstance(value, str):
        return not (value.startswith("<") and value.endswith(">"))  # a special token of a vocabulary
    if found == WEAK and split(name)[-1] == "session":
        return isinstance(value, (bytes, bytearray))  # a conversation, a connection: not what opens it
    return found == STRONG or (found == WEAK and not isinstance(value, (int, float)))


def split(name: str) -> list[str]:
    """Split a name into words: capitals, dashes, dots and underscores part them.

    >>> split("--api-key"), split("awsSecretAccessKey"), split("APIKey")
    (['api', 'key'], ['aws', 'secret', 'access', 'key'], ['api', 'key'])
    """
    return [word.lower() for word in WORDS.findall(name)]


@functools.lru_cache(maxsize=4096)
def strength(name: str) -> int:
    """Return 0 for an ordinary name, `WEAK` or `STRONG`."""
    words = split(name[-LONGEST:])
    if tuple(words[-2:]) in PAIRS:
        return WEAK
    if not words or words[-1] in ABOUT:
        return 0
    if words[0] in COOKIES and len(words) > 1 and not any(word in CARRY for word in words[1:]):
        return 0  # a recipe, a banner
    if any(word in ANYWHERE or ROOTS.search(word) for word in words):
        return STRONG
    pairs = list(itertools.pairwise(words))
    if any(one in LEAD_TO_KEY and two in ("key", "keys") for one, two in pairs):
        return STRONG
    last = words[-1]
    before = words[-2] if len(words) > 1 else ""
    if last not in LAST or before in LAST[last] or (last in NOT_ALONE and not before):
        return 0
    return WEAK
