"""What stands beside a value and not in it: large texts and bytes, arrays, and media by their first bytes.

A value keeps a place for each (``{"$": "aside", …}``) with what it is; the bytes travel raw, as payloads of their own.
"""

from collections.abc import Callable, Mapping
from typing import Any, NamedTuple

LARGE = 1 << 20
MEDIUM = 16
OCTETS, TENSOR, TEXT = "application/octet-stream", "application/x-tensor", "text/plain"
# What the first bytes of a medium are, and where they stand.
SIGNS = (
    (0, b"\x89PNG\r\n\x1a\n", "image/png"), (0, b"\xff\xd8\xff", "image/jpeg"), (0, b"GIF8", "image/gif"),
    (8, b"WEBP", "image/webp"), (0, b"II*\0", "image/tiff"), (0, b"MM\0*", "image/tiff"), (8, b"WAVE", "audio/wav"),
    (0, b"fLaC", "audio/flac"), (0, b"OggS", "audio/ogg"), (0, b"ID3", "audio/mpeg"), (4, b"ftyp", "video/mp4"),
    (0, b"\x1aE\xdf\xa3", "video/webm"), (0, b"%PDF-", "application/pdf"),
)  # fmt: skip


class Aside(NamedTuple):
    """Bytes that are kept beside a value and not in it, and what they are."""

    media: str
    data: bytes
    text: bool


class Beside(list[Aside]):
    """What was put aside, and the type of the first thing that could not be kept at all."""

    lost: str = ""


def put(aside: list[Aside], item: Aside, head: dict[str, object]) -> object:
    """Put something aside, and return what stands in the value for it."""
    aside.append(item)
    return {"$": "aside", "v": len(aside) - 1, "media": item.media, "size": len(item.data), **head}


def place(part: int) -> bytes:
    """Return how the place of something that was put aside begins, in the bytes of an encoded value."""
    return b'{"$":"aside","v":%d,' % part


def readable(item: Aside) -> bool:
    r"""Say whether something put aside is text, or bytes that are.

    >>> readable(Aside(OCTETS, b"name", text=False)), readable(Aside(OCTETS, b"\xff", text=False))
    (True, False)
    """
    if item.text or item.media != OCTETS:
        return item.text
    try:
        return bool(item.data.decode("utf-8"))
    except UnicodeDecodeError:
        return False


def medium(head: bytes) -> str:
    r"""Return the media type of bytes by their first sixteen.

    >>> medium(b"\x89PNG\r\n\x1a\n"), medium(b"RIFF\x24\0\0\0WAVEfmt "), medium(b"hello")
    ('image/png', 'audio/wav', 'application/octet-stream')
    """
    for place, sign, media in SIGNS:
        if head[place : place + len(sign)] == sign and (place != 8 or head[:4] == b"RIFF"):
            return media
    return OCTETS


def put_back(value: Any, aside: Mapping[int, bytes]) -> Any:
    """Return a form with what was put aside in its place again, in the tags that hold it in line."""
    if isinstance(value, list):
        return [put_back(item, aside) for item in value]
    if not isinstance(value, dict):
        return value
    if value.get("$") != "aside":
        return {key: put_back(item, aside) for key, item in value.items()}
    data = aside.get(value["v"])
    return value if data is None or value["type"] == "array" else {"$": "given", "v": data, "type": value["type"]}


GIVEN: dict[str, Callable[[bytes], object]] = {
    "str": lambda data: data.decode("utf-8", "surrogatepass"),
    "bytes": bytes,
    "bytearray": bytearray,
}


def sized(value: Any, scalar: Callable[[Any], object], aside: list[Aside]) -> object:
    """Put a large text, large bytes or a medium aside; encode all else."""
    kind = type(value)
    if kind is str:
        if len(value) < LARGE:
            return scalar(value)
        return put(aside, Aside(TEXT, value.encode("utf-8", "surrogatepass"), text=True), {"type": "str"})
    media = medium(bytes(value[:16]))
    if len(value) < LARGE and media == OCTETS:
        return scalar(value)
    return put(aside, Aside(media, bytes(value), text=False), {"type": kind.__name__})
