"""What a request for steadiness came to: a row a switch, and states kept for blocks that end in any order."""

import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

SET, ALREADY, LATE, ABSENT = "set", "already set", "cannot be set any more", "not available here"
OUTCOMES = (SET, ALREADY, LATE, ABSENT)
STARTED = Path("/proc/self/environ")


@dataclass(frozen=True, slots=True)
class Row:
    """One switch: its field, what became of the request, the value that stands now, and why."""

    name: str
    outcome: str
    value: object = None
    reason: str = ""

    def __str__(self) -> str:
        value = "" if self.value is None else f" = {self.value}"
        return f"{self.name}{value}" + (f": {self.reason}" if self.reason else "")


@dataclass(slots=True)
class Report:
    """All rows of one request, in the order in which they were asked for. ``print`` it."""

    rows: list[Row] = field(default_factory=list)

    def add(self, name: str, outcome: str, value: object = None, reason: str = "") -> None:
        """Add one row."""
        self.rows.append(Row(name, outcome, value, reason))

    def of(self, outcome: str) -> list[Row]:
        """Return the rows with one outcome."""
        return [row for row in self.rows if row.outcome == outcome]

    def __iter__(self) -> Iterator[Row]:
        return iter(self.rows)

    def __getitem__(self, name: str) -> Row:
        found = next((row for row in self.rows if row.name == name), None)
        if found is None:
            raise KeyError(name)
        return found

    def document(self) -> dict[str, Any]:
        """Return the report as a document for JSON."""
        shown = [{"field": r.name, "outcome": r.outcome, "value": r.value, "because": r.reason} for r in self.rows]
        return {"schema": "provenance/steady/1", "switches": shown}

    def __str__(self) -> str:
        parts = []
        for outcome in OUTCOMES:
            rows = self.of(outcome)
            if rows:
                parts.append("\n".join([f"{outcome} ({len(rows)})", *(f"  {row}" for row in rows)]))
        return "\n".join(parts)


def started_with(name: str) -> str | None:
    """Return the value that a variable had when this process started; elsewhere than on Linux, the one it has now.

    A program can put into its environment what was read at its start, and then it says what is not so.
    """
    try:
        pairs = STARTED.read_bytes().split(b"\0")
    except OSError:
        return os.environ.get(name)
    head = name.encode() + b"="
    return next((pair[len(head) :].decode("utf-8", "replace") for pair in pairs if pair.startswith(head)), None)


class Kept:
    """States to put back, of blocks that are open. Blocks of tasks and threads need not end in reverse order.

    A block that ends below another leaves its state to that one: what stood before both comes back when both are over.

    >>> kept = Kept()
    >>> one, two = kept.push("before one"), kept.push("before two")
    >>> kept.pop(one), kept.pop(two)
    (None, 'before one')
    """

    def __init__(self) -> None:
        self._open: list[list[Any]] = []

    def push(self, state: Any) -> list[Any]:
        """Open a block; what is returned closes it."""
        entry = [state]
        self._open.append(entry)
        return entry

    def pop(self, entry: list[Any]) -> Any:
        """Close a block, and return the state to put back, or None where a later block still stands on it."""
        at = next(n for n, item in enumerate(self._open) if item is entry)
        self._open.pop(at)
        if at == len(self._open):
            return entry[0]
        self._open[at][0] = entry[0]
        return None

    def __len__(self) -> int:
        return len(self._open)
