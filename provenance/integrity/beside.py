"""Text and JSON without the values that stand beside a secret name: `password=…`, `"api_key": "…"`, `--token …`.

One pass from left to right. A regular expression finds a name and what separates it from its value; Python then decides
by the name and takes the value: a quoted string to its closing quote, a bracket to its closing bracket, else one word.
Every step moves on or ends the text, so that hostile text costs no more than other text of its length.
"""

import re
from functools import cached_property

import orjson

from provenance.integrity.names import DOUBTFUL, LAST, LEAD_TO_KEY, STRONG, WEAK, split, strength
from provenance.integrity.pairs import ASKED, GONE, NAMELIKE, asked, follows, told, untagged

# A text without any of these has nothing to find.
HINT = re.compile(
    rb"passw|passphrase|pwd|pswd|pw\b|secret|cred|key|auth|cookie|token|session|sessid|sig|bearer|dsn|jwt|otp|pass|pat\b"
    rb"|connection|database",
    re.IGNORECASE,
)
# White space as it is, as escapes write it, and the blanks of Unicode: those that do not break among them.
SPACE = (
    rb"(?:\s|\\{1,8}+(?:[nrtfv]|xa0|u00[aA]0|u20(?:0[0-9aAbB]|2[fF])|u3000)|\xc2\xa0|\xe2\x80[\x80-\x8b\xaf]"
    rb"|\xe2\x81[\x9f\xa0]|\xe3\x80\x80|\xef\xbb\xbf)"
)
# What parts a name from its value: signs, arrows, full-width forms, and signs as URLs, JSON and HTML escape them.
SIGN = (
    rb"(?:=>|:=|={1,3}|:|->|(?<=-)>|\xe2\x86\x92|\xe2\x87\x92|\xef\xbc\x9a|\xef\xbc\x9d|%3[dDaA]"
    rb"|\\{1,8}+u(?:003[dDaAeE]|2192|[fF]{2}1[aAdD])|&#(?:61|58);)"
)
LOOSE = re.compile(rb":|(?<!=)>|\xe2\x86\x92|\xef\xbc\x9a")  # after these a sentence may go on
FILL = rb"(?: (?i:provided|given|supplied|received|specified|used|found|sent|value|was|is|header)){0,2}+"
CLOSE = rb"(?P<close>\\{0,15}+[\"']|&quot;|&#3[49];|%2[27]|\\u002[27])"
# The quantifiers of long runs are possessive: there is nothing to win by giving back.
HEAD = re.compile(
    rb"(?<![A-Za-z0-9_.\-])(?P<name>(?P<flag>--)?[A-Za-z0-9_.\-]{2,}+)(?:" + CLOSE + rb"\]?)?"
    rb"(?:(?P<sep>" + FILL + SPACE + rb"{0,4}" + SIGN + SPACE + rb"{0,8}| (?:is|was) (?=[\"']))"
    rb"|(?P<comma>(?<=[\"'])(?:,\s{0,4}| {1,4}(?=[a-z]{1,10}=)))|(?P<space>(?(flag) {1,8}|(?!))))"
)  # fmt: skip
QUOTE = re.compile(rb"[bBrRuUfF]{0,2}(\\{0,15}+)([\"'])")
CALL = re.compile(rb"[A-Za-z_][A-Za-z0-9_.]{0,80}+\(|[\[({]")
MARKS = re.compile(rb"(?<!\\)(\\*+)([\"'()\[\]{}])")
# A word ends at a space or a quote; at `,` `;` `&` only where the next thing begins, for a password may hold them.
WORD = re.compile(rb"(?:[^\s\"'\\&;,]|[&;,](?!\s|\\|[\"']|\Z|\#|\s?[A-Za-z0-9_.\-]++\s?=))++")
SCHEMES = re.compile(
    rb"(?:basic|bearer|token|digest|api-?key|negotiate|ntlm|hmac|jwt|oauth|hawk|key|aws4-hmac-sha256) +", re.IGNORECASE
)
# Quotes of a header's parts: any; in one JSON document those that have a backslash, for the others are its own.
QUOTES = (rb"\\{0,15}+\"", rb"\\(?:\\\\){0,7}+\"")
PART = [rb"[A-Za-z\-]++=(?:" + q + rb"[^\"\\]*+" + q + rb"|[^\s\"'\\,]++)" for q in QUOTES]
PARTS = [part + rb"(?:,[ ]?" + part + rb")*+" for part in PART]
BARE = [re.compile(parts + rb"|[^\s\"'\\,]++") for parts in PARTS]
HEADER = [re.compile(parts + rb"|(?:[A-Za-z\-]++ +)?(?:" + parts + rb"|[^\s\"'\\,]++)") for parts in PARTS]
COOKIES = re.compile(rb"[^\s\"'\\;,]++(?:; ?[^\s\"'\\;,=]++=[^\s\"'\\;,]++)*+")
NUMBER = re.compile(rb"[-+.\deE]++")
NUMBERS = re.compile(rb"[\d\s,.\-+eE\[\](){}]*")
WITHHELD = (GONE, b"hmac:", b"(not read)", b"(secret)", b"***")  # by others, or by us before
LITERALS = {b"none", b"null", b"true", b"false", b"nan", b"undefined", b"nil"}
# What follows a name in sentences and signatures.
PROSE = frozenset(
    b"""
    a an and any are argument as at be bool by bytes can cannot could dict did does expired failed field flag
    float for from given has have if in incorrect instead int invalid is it list may missing must need needed
    needs no not of on option optional or parameter please provided required requires set should some str
    string that the there this to too unknown use value was were when which will with wrong you your
    """.split()
)
TYPES = re.compile(rb"(?:typing\.)?(?:Optional|Union|List|Dict|Any|SecretStr|Sequence|Mapping)\b")
Q = rb"\\{0,15}+\""
SCHEMA = re.compile(
    Q + rb"type" + Q + rb"\s?:\s?(?:" + Q + rb"(?:string|integer|number|boolean|array|object|null)|\[)"
    rb"|" + Q + rb"(?:\$ref|anyOf)" + Q + rb"\s?:"
)
OWN = (b'{"$":"object"', b'{"$":"cycle"', b'{"$":"at"')
PAIR_BEFORE = (b'"v":[', b"[[", b"],[", b"], [", b"(")
PLAIN = re.compile(rb"[a-z]+")
# What an escape before a name leaves in it: the letter of `\\n`, the digits of `%26` and of `\\u0026`.
ESCAPE = re.compile(rb"\A(?:\\u[0-9A-Fa-f]{4}|\\x[0-9A-Fa-f]{2}|\\[A-Za-z]|%[0-9A-Fa-f]{2})")
# Beside `pass` alone, which is a word of its own: what nobody would choose as a password.
PASSED = re.compile(rb"\\*[\"']?(?:[a-z]{1,13}|[A-Za-z]{1,7}|[-+.\deE]+)(?![\w.\-])")
RANDOM = re.compile(rb"[\"'\\]*+(?=[A-Za-z_.\-]*\d)(?=[\d_.\-]*[A-Za-z])[\w.\-]{8}")
NEAR = 80
ONLY = {mark: re.compile(rb"(?<!\\)(\\*+)(" + mark + rb")") for mark in (b'"', b"'")}
MARK_OR_END = re.compile(rb"(?<!\\)(\\*+)([\"'])")


def redact(data: bytes) -> bytes:
    """Return text or JSON without values beside secret names; the same object where there is none.

    >>> redact(b"login(user='ann', password='x y') --api-key abc1 tokens: 12")
    b"login(user='ann', password='[redacted]') --api-key [redacted] tokens: 12"
    """
    if HINT.search(data) is None:
        return data
    return Scan(untagged(data)).run()


class Scan:
    """One pass over one text."""

    def __init__(self, data: bytes) -> None:
        self.data = data
        self.kept: list[bytes] = []
        self.copied = 0  # up to here the text is in `kept`
        self.dead: dict[tuple[int, bytes], int] = {}  # up to where a quote of some depth has no end

    @cached_property
    def json(self) -> bool:
        """Whether the whole is one JSON document: then nothing may reach over the end of one of its strings."""
        if self.data[:1] not in (b"[", b"{"):
            return False
        try:
            orjson.loads(self.data)
        except orjson.JSONDecodeError:
            return False
        return True

    def run(self) -> bytes:
        """Return the text without the values."""
        place = 0
        while (head := HEAD.search(self.data, place)) is not None:
            place = max(self._one(head), head.end("name"))
        if not self.kept:
            return self.data
        return b"".join([*self.kept, self.data[self.copied :]])

    def _one(self, head: re.Match[bytes]) -> int:
        """Judge one name and take its value; return where to go on."""
        name, found = self._named(head)
        if not found and (label := told(self.data, name, head.end())):
            return self._value(head, split(label), strength(label))
        if not found:
            return head.end("name")
        if head["comma"] is not None and not head["flag"] and (row := follows(self.data, head)) is not None:
            return self._value(row, split(name), found)
        if (head["comma"] is not None and not self._paired(head)) or self._ordinary(head, name):
            return head.end("name")
        return self._value(head, split(name), found)

    def _named(self, head: re.Match[bytes]) -> tuple[str, int]:
        """Return a name without what an escape before it left there, and what it says."""
        start, name = head.start(), head["name"].decode("ascii")
        found = strength(name)
        if not found and (escape := ESCAPE.search(self.data[max(0, start - 1) : head.end("name")])) is not None:
            name = name[len(escape[0]) - 1 :]  # the `n` of an escaped end of line belongs to no name
            found = strength(name)
        low = name.lower()
        if low == "key" and (before := self._before(head)) in LEAD_TO_KEY:
            return f"{before}_key", STRONG  # in words, with a space
        if (found or low in ASKED) and head["sep"] == b"=" and asked(self.data, start):
            return name, STRONG
        if low == "pass" and (head["close"] is not None or head["sep"] == b"="):
            value = PASSED.match(self.data, head.end())
            return name, WEAK if value is None else 0
        return name, found

    def _before(self, head: re.Match[bytes]) -> str:
        """Return the word before a name that stands without quotes."""
        if head["close"] is not None:
            return ""
        found = re.search(rb"([A-Za-z]{1,20}) $", self.data[max(0, head.start() - 21) : head.start()])
        return found[1].decode("ascii").lower() if found is not None else ""

    def _paired(self, head: re.Match[bytes]) -> bool:
        """Say whether name and value are two items side by side: a flag of a command line, or a pair."""
        opening = head.start() - len(head["close"] or b"")
        if head["flag"]:
            return self.data[max(0, opening) : head.start()] == head["close"]
        if self.data[head.start("comma") : head.start("comma") + 1] != b",":
            return False
        apart = self.data[max(0, opening - 6) : opening].endswith(PAIR_BEFORE)
        if not apart and self.data[max(0, opening - 1) : head.start()] != b"[" + (head["close"] or b""):
            return False
        quote = self._quote(head, head.end())
        if quote is None:
            return self.data[head.end() : head.end() + 1] in (b"{", b"[") or self._bare(head) is not None
        end = self._closing(quote)
        # A list of two names is no pair: `["api_key", "query"]`.
        names = not apart and NAMELIKE.fullmatch(self.data, quote.end(), max(end, quote.end())) is not None
        return end >= 0 and not names and self.data[end + len(quote[1]) + 1 : end + len(quote[1]) + 2] in (b"]", b")")

    def _ordinary(self, head: re.Match[bytes], name: str) -> bool:
        """Say whether what stands around a name makes it no secret's: a host of a URL, a token of a text."""
        start, end = head.start(), head.end()
        if self.data[max(0, start - 2) : start] == b"//" or self.data[end : end + 1] == b":":
            return True
        last = name.lower()
        if last not in LAST:
            return False
        if before := self._before(head):
            return before in LAST[last] and (before not in DOUBTFUL or RANDOM.match(self.data, end) is None)
        near = self.data[max(0, start - NEAR) : end + NEAR]
        return last == "token" and (b"logprob" in near or b'"bytes":' in near or b"token_str" in near)

    # -- values ---------------------------------------------------------------------------------------

    def _value(self, head: re.Match[bytes], words: list[str], found: int) -> int:
        place = head.end()
        quote = self._quote(head, place)
        if quote is not None:
            return self._quoted(head, quote, found)
        bracket = CALL.match(self.data, place)
        told = head["close"] is not None or b"=" in (head["sep"] or b"")
        if bracket is not None and (told or head["comma"] is not None):
            return self._bracket(head, bracket, words, found)
        if (number := self._bare(head)) is not None:
            return self._drop(place, number.end(), b'"' + GONE + b'"') if found == STRONG else number.end()
        if head["comma"] is not None:
            return place
        if "authorization" in words and b":" in (head["sep"] or b""):
            return self._header(place)
        if words[-1] in ("cookie", "cookies") and (cookies := COOKIES.match(self.data, place)):
            return self._drop(place, cookies.end()) if cookies[0] not in PROSE else place
        return self._word(head, found)

    def _quote(self, head: re.Match[bytes], place: int) -> re.Match[bytes] | None:
        """Return the quote that opens a value, not one that ends the string of a document."""
        found = QUOTE.match(self.data, place)
        if found is None or not self.json or found[2] != b'"' or head["close"] == b'"':
            return found
        return found if len(found[1]) % 2 else None

    def _drop(self, start: int, end: int, put: bytes = GONE) -> int:
        """Put the mark in the place of a value."""
        if self.data[start:end] not in (b"", put):
            self.kept += [self.data[self.copied : start], put]
            self.copied = end
        return end

    def _quoted(self, head: re.Match[bytes], quote: re.Match[bytes], found: int) -> int:
        start, end = quote.end(), self._closing(quote)
        if end < 0:  # cut off: the rest of its line, or of the string that it stands in
            stop = self.dead[len(quote[1]), quote[2]]
            line = self.data.find(b"\n", start, stop)
            end = stop if line < 0 else line
        content = self.data[start:end]
        special = content.startswith(b"<") and content.endswith(b">")
        if not content.strip() or content.lower() in LITERALS or content.startswith(WITHHELD):
            return end
        if head["flag"] and content.startswith(b"-"):  # the next flag
            return end
        if found == WEAK and (special or NUMBERS.fullmatch(content)):
            return end
        return self._drop(start, end)

    def _closing(self, quote: re.Match[bytes]) -> int:
        """Return where the string ends that a quote opens, or -1. In JSON in JSON a quote has backslashes."""
        depth, mark, data = len(quote[1]), quote[2], self.data
        if quote.end() < self.dead.get((depth, mark), 0):
            return -1
        inside = self.json and not (depth == 0 and mark == b'"')
        for found in (MARK_OR_END if inside else ONLY[mark]).finditer(data, quote.end()):
            run = len(found[1])
            if found[2] == mark and run % (2 * depth + 2) == depth:
                return found.start() + run - depth
            if (found[2] == mark and run < depth) or (inside and found[2] == b'"' and run % 2 == 0):
                self.dead[depth, mark] = found.start()
                return -1
        self.dead[depth, mark] = len(data)
        return -1

    def _bare(self, head: re.Match[bytes]) -> re.Match[bytes] | None:
        """Return the number that stands beside a key of a JSON document."""
        return NUMBER.match(self.data, head.end()) if self.json and head["close"] == b'"' else None

    def _bracket(self, head: re.Match[bytes], bracket: re.Match[bytes], words: list[str], found: int) -> int:
        """Take a table, a list or a call whole; in a session, and in code, each name in it speaks."""
        start = bracket.start()
        weak = found == WEAK and (head["close"] is None or words[-1] == "session")
        if weak or self.data.startswith(OWN, start):
            return bracket.end()
        end = self._balanced(bracket.end() - 1, text=self.json and head["close"] != b'"')
        content = self.data[start:end]
        if SCHEMA.search(content) is not None or content in (b"[]", b"{}", b"()"):
            return bracket.end()  # a description of the value
        if found == WEAK and (NUMBERS.fullmatch(content) or b"logprob" in content):
            return end
        return self._drop(start, end, b'"' + GONE + b'"' if self.json and head["close"] == b'"' else GONE)

    def _balanced(self, place: int, text: bool) -> int:
        """Return where a bracket is closed; else the end of what it stands in: the text, or a string of a document."""
        depth, data = 0, self.data
        while (found := MARKS.search(data, place)) is not None:
            place = found.end()
            if found[2] in (b"[", b"{", b"("):
                depth += 1
            elif found[2] in (b"]", b"}", b")"):
                depth -= 1
                if depth == 0:
                    return place
            elif text and found[2] == b'"' and len(found[1]) % 2 == 0:
                return found.start()
            else:
                end = self._closing(found)
                if end < 0 and self.json:
                    return self.dead[len(found[1]), found[2]]
                place = end + len(found[0]) if end >= 0 else place
        return len(data)

    def _header(self, place: int) -> int:
        """Take what follows `Authorization:`, but for the name of a known scheme."""
        scheme = SCHEMES.match(self.data, place)
        start = scheme.end() if scheme is not None else place
        if self.data.startswith(GONE, start):
            return start + len(GONE)
        found = (HEADER if scheme is None else BARE)[self.json].match(self.data, start)
        return self._drop(start, found.end()) if found is not None else place

    def _word(self, head: re.Match[bytes], found: int) -> int:
        place, sep = head.end(), head["sep"] or b""
        match = WORD.match(self.data, place)
        if match is None or (self.json and head["close"] == b'"'):  # true, false, null
            return place
        word = match[0].rstrip(b")]}>.:!?") if not match[0].startswith(b"<") else match[0]
        end = place + len(word)
        low = word.lower()
        if not word or low in LITERALS or match[0].startswith((b"<", *WITHHELD)):
            return match.end()
        if head["name"].lower() in (b"pwd", b"oldpwd") and word.startswith(b"/"):  # the working directory of a shell
            return match.end()
        if head["space"] is not None and (word.startswith(b"-") or low in PROSE):
            return place
        if found == WEAK and (NUMBERS.fullmatch(word) or len(word) < 4):
            return match.end()
        if LOOSE.search(sep) is not None and head["close"] is None and self._sentence(word, low, head["name"].lower()):
            return place
        return self._drop(place, end)

    @staticmethod
    def _sentence(word: bytes, low: bytes, name: bytes) -> bool:
        """Say whether a word after a colon belongs to a sentence or a signature, and is no value."""
        if low in PROSE or TYPES.match(word) or len(word) < 3:
            return True
        alone = name.decode("ascii") in LAST
        return alone and (len(word) < 6 or (len(word) < 14 and PLAIN.fullmatch(word) is not None))
