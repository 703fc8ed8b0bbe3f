"""Printing: tables and colours on a terminal, plain text in a pipe. Text of others is shown and never obeyed."""

import json
import math
import shutil
import sys
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime
from typing import Any

import orjson

from provenance.explain import story

visible = story.visible
STYLES = {"head": "bold", "plain": "", "cause": "bold yellow", "dim": "dim"}


def terminal() -> bool:
    """Say whether a person looks at the output."""
    return sys.stdout.isatty()


def emit(document: object) -> None:
    """Print a document as JSON."""
    sys.stdout.write(dumps(document) + "\n")


def dumps(document: object) -> str:
    r"""Return a document as JSON. What the quick writer refuses, the thorough one escapes.

    >>> dumps({"a": 2**70, "b": "\ud800"})
    '{\n  "a": 1180591620717411303424,\n  "b": "\\ud800"\n}'
    """
    option = orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS
    try:
        return orjson.dumps(document, option=option, default=str).decode()
    except TypeError:  # an integer beyond 64 bits, or half a surrogate: a file of somebody else's may hold them
        return json.dumps(_finite(document), indent=2, default=str)


def _finite(value: object) -> object:
    """Write what is no number in JSON as null, as the quick writer does."""
    if isinstance(value, dict):
        return {str(key): _finite(item) for key, item in value.items()}
    if isinstance(value, (list, tuple)):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and not math.isfinite(value) else value


def lines(styled: Iterable[tuple[str, str]]) -> None:
    """Print styled lines."""
    if not terminal():
        for _, text in styled:
            sys.stdout.write(visible(text) + "\n")
        return
    from rich.console import Console
    from rich.text import Text

    console = Console(highlight=False, soft_wrap=True)
    for style, text in styled:
        console.print(Text(visible(text), style=STYLES[style]))


def table(heads: Sequence[str], rows: Iterable[Sequence[Any]]) -> None:
    """Print a table: boxed on a terminal, aligned columns in a pipe."""
    shown = [[cell(value) for value in row] for row in rows]
    if terminal():
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        grid = Table(box=box.SIMPLE_HEAD, header_style="bold", pad_edge=False)
        for head in heads:
            grid.add_column(Text(head), overflow="ellipsis", no_wrap=True)
        for row in shown:
            grid.add_row(*(Text(value) for value in row))
        Console().print(grid)
        return
    widths = [
        max(len(head), *(len(row[n]) for row in shown), 0) if shown else len(head) for n, head in enumerate(heads)
    ]
    for row in [list(heads), *shown]:
        padded = "  ".join(value.ljust(width) for value, width in zip(row, widths, strict=True))
        sys.stdout.write(padded.rstrip() + "\n")


def cell(value: Any) -> str:
    """Return one value of a table as text."""
    if value is None:
        return ""
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, float):
        return f"{value:.6g}"
    return visible(str(value))


def clip(text: str, width: int) -> str:
    """Cut a text to a width.

    >>> clip("one two three", 8)
    'one two…'
    """
    text = " ".join(text.split())
    return text if len(text) <= width else text[: width - 1] + "…"


def common(one: str, other: str) -> int:
    """Return how many characters two texts begin with in common.

    >>> common("over the hill", "over there")
    8
    """
    pairs = enumerate(zip(one, other, strict=False))
    return next((n for n, (x, y) in pairs if x != y), min(len(one), len(other)))


def columns() -> int:
    """Return the width to print for."""
    return shutil.get_terminal_size((110, 24)).columns


def moment(ns: int) -> str:
    """Return a time as text, in UTC.

    >>> moment(1_796_099_038_246_394_223)
    '2026-12-01 04:23:58'
    """
    return datetime.fromtimestamp(ns / 1e9, UTC).strftime("%Y-%m-%d %H:%M:%S")


def milliseconds(ns: int | None) -> str:
    """Return a duration as text."""
    if ns is None:
        return ""
    return f"{ns / 1e6:.0f} ms" if ns < 10_000_000_000 else f"{ns / 1e9:.1f} s"


def short_ids(run_ids: Sequence[str], least: int = 13) -> list[str]:
    """Shorten run ids as far as they stay different from one another.

    >>> short_ids(["01a22fdc-8372-7201-8010", "01a22fdc-8372-7fff-8010"])
    ['01a22fdc-8372-72', '01a22fdc-8372-7f']
    """
    length = least
    longest = max(map(len, run_ids), default=0)
    while length < longest and len({run[:length] for run in run_ids}) < len(set(run_ids)):
        length += 1
    return [run[:length].rstrip("-") for run in run_ids]
