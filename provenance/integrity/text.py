# ruff: noqa: RUF001, RUF002 - characters that look alike are the matter of this file
"""Texts that say the same in other characters: steps that even out, each with a name, pure and in a fixed order.

A difference that is gone after the steps of a profile is one of the surface. The profile is part of the statement: say
which one it was.
"""

import re
import unicodedata
from collections.abc import Callable, Iterable

from provenance.errors import BadSetting

Table = dict[str, str | int | None]
QUOTES: Table = {
    "‘": "'", "’": "'", "‚": "'", "‛": "'", "′": "'", "“": '"', "”": '"', "„": '"', "‟": '"', "″": '"', "«": '"',
    "»": '"', "‹": "'", "›": "'",
}  # fmt: skip
DASHES: Table = {"‐": "-", "‑": "-", "‒": "-", "–": "-", "—": "-", "−": "-"}
# Punctuation of Chinese and Japanese and its ASCII counterpart, beyond the full-width forms.
IDEOGRAPHIC: Table = {
    "。": ".", "、": ",", "「": '"', "」": '"', "『": '"', "』": '"', "【": "[", "】": "]", "〈": "<", "〉": ">",
    "《": "<", "》": ">", "〜": "~", "・": "·",
}  # fmt: skip
INVISIBLE = dict.fromkeys(map(ord, "\u200b\u2060\ufeff\u00ad"))
LINES = re.compile("\r\n?|\u0085|\u2028|\u2029")
BLANKS = re.compile(r"[^\S\n]+")


def _width(text: str) -> str:
    """Turn full-width ASCII and ideographic punctuation into ASCII; letters of other scripts stay."""
    wide: dict[int, str | int | None] = {code: code - 0xFEE0 for code in range(0xFF01, 0xFF5F)}
    return text.translate({**wide, 0x3000: " ", **str.maketrans(IDEOGRAPHIC)})


# In the order in which they are applied, whatever order they are asked for in.
STEPS: dict[str, Callable[[str], str]] = {
    "unicode": lambda text: unicodedata.normalize("NFC", text),
    "compatibility": lambda text: unicodedata.normalize("NFKC", text),  # ligatures, circled digits, superscripts
    "invisible": lambda text: text.translate(INVISIBLE),
    "lines": lambda text: LINES.sub("\n", text),
    "width": _width,
    "quotes": lambda text: text.translate(str.maketrans(QUOTES)),
    "dashes": lambda text: text.translate(str.maketrans(DASHES)),
    "trailing": lambda text: "\n".join(line.rstrip() for line in text.split("\n")).rstrip(),
    "blanks": lambda text: "\n".join(BLANKS.sub(" ", line).strip() for line in text.split("\n")),
    "whitespace": lambda text: " ".join(text.split()),
    "nospace": lambda text: "".join(text.split()),
    "case": lambda text: unicodedata.normalize("NFC", text.casefold()),
}
PROFILES: dict[str, tuple[str, ...]] = {
    "exact": (),
    "strict": ("unicode", "lines", "trailing"),  # what a file system, an editor or a form does to a text
    "surface": ("unicode", "invisible", "lines", "width", "quotes", "dashes", "trailing", "whitespace"),
    "loose": ("compatibility", "invisible", "lines", "width", "quotes", "dashes", "nospace", "case"),
}
Profile = str | Iterable[str]


def steps(profile: Profile) -> tuple[str, ...]:
    """Return the steps of a profile: its name, or names of steps, in the order of their application.

    Raises BadSetting for a name that is neither.
    """
    if isinstance(profile, str):
        if profile not in PROFILES:
            raise BadSetting(
                f"there is no profile {profile!r}; there are {', '.join(PROFILES)}, or a list of steps: "
                f"{', '.join(STEPS)}."
            )
        profile = PROFILES[profile]
    asked = set(profile)
    unknown = sorted(asked - set(STEPS))
    if unknown:
        raise BadSetting(f"there is no step {unknown[0]!r}; there are {', '.join(STEPS)}.")
    return tuple(name for name in STEPS if name in asked)


def normalize(text: str, profile: Profile = "surface") -> str:
    r"""Even out what does not matter in a text.

    ``profile`` is ``exact``, ``strict`` (Unicode form, line ends, trailing blanks), ``surface`` (and invisible
    characters, full-width forms, quotes, dashes, white space), ``loose`` (and compatibility forms, all white space,
    case), or a list of steps. Once is enough: to normalise again changes nothing.

    >>> normalize("“Yes” －  ok\r\n"), normalize("Straße\u200b", "loose"), normalize("a  b ", ["trailing"])
    ('"Yes" - ok', 'strasse', 'a  b')
    """
    names = steps(profile)
    before = None
    while text != before:  # a step can bring together what an earlier one composes
        before = text
        for name in names:
            text = STEPS[name](text)
    return text


def differs_by(one: str, other: str, profile: Profile = "surface") -> tuple[str, ...] | None:
    """Return the steps after which two texts are equal, those alone that were needed; None if they stay different.

    >>> differs_by("a “b”", 'a  "b"'), differs_by("yes", "no"), differs_by("a", "a")
    (('quotes', 'whitespace'), None, ())
    """
    needed = list(steps(profile))
    if normalize(one, needed) != normalize(other, needed):
        return None
    for name in list(needed):
        fewer = [item for item in needed if item != name]
        if normalize(one, fewer) == normalize(other, fewer):
            needed = fewer
    return tuple(needed)


def changed_by(text: str, profile: Profile = "surface") -> tuple[str, ...]:
    """Return the steps of a profile that change a text.

    >>> changed_by("“Yes” ")
    ('quotes', 'trailing')
    """
    found = []
    for name in steps(profile):
        after = STEPS[name](text)
        if after != text:
            found.append(name)
        text = after
    return tuple(found)
