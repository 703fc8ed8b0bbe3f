"""The page that says, for each public report of runs that parted, where its deciding facts are recorded.

It is made by scripts/docs from tests/incidents (cases.jsonl, homes.tsv) and from the code that reads fields.
"""

from collections import Counter
from collections.abc import Iterable

from tests.incidents import homes
from tests.incidents.homes import Home

HEAD = """# Incidents

Public reports of inference runs that parted, each with the facts that decided it, and where this recorder keeps them. The
reports are in `tests/incidents/cases.jsonl`, the homes in `tests/incidents/homes.tsv`; who reads a field is looked up in the code.

- *read*: a reader of ours records it (the file is named), or the engine's own settings are taken over by name.
- *derived*: nobody reads it, because it follows from what is recorded: from the ids, from the logits, from the store.
- *caller*: it has a declared field that takes part in comparison, and only who runs the engine can fill it in.
- *declared, not read yet*: the field is declared and nobody reads it in this version.
- *nowhere*: it cannot be recorded here, and the reason stands beside it.

`scripts/bench-explain` makes a pair of runs of each report whose cause is known, and counts how often the cause is found.
"""


def incidents() -> str:
    """Return the page."""
    made = homes.shares()
    out = [HEAD, "## Totals\n", "| | facts | with a home | collected without the caller |", "| --- | --- | --- | --- |"]
    out += [
        f"| deciding facts | {made.facts} | {made.homed} ({made.homed / made.facts:.1%}) | {made.collected} ({made.collected / made.facts:.1%}) |",
        f"| named first in their report | {made.firsts} | {made.firsts_homed} ({made.firsts_homed / made.firsts:.1%}) | {made.firsts_collected} ({made.firsts_collected / made.firsts:.1%}) |\n",
    ]
    found = {(case.runtime, word): homes.home(word, case.runtime) for case in homes.cases() for word in case.deciding}
    ways = Counter(found[case.runtime, word].how for case in homes.cases() for word in case.deciding)
    out += ["By the way in which it is kept: " + ", ".join(f"{how} {count}" for how, count in ways.most_common()) + ".\n"]
    out += _open(found.values())
    out += ["## Reports\n"]
    for case in homes.cases():
        out += [f"### {case.id}\n", f"{case.source}, {case.runtime}, {case.dimension}, cause {case.confidence}. {case.symptom}\n"]
        out += ["| deciding fact | our field | kept | |", "| --- | --- | --- | --- |"]
        out += [_row(found[case.runtime, word]) for word in case.deciding] + [""]
    return "\n".join(out)


def _open(found: Iterable[Home]) -> list[str]:
    """List what has no home, and what has one that nobody fills."""
    out = ["## Not collected\n", "| deciding fact | our field | kept | why |", "| --- | --- | --- | --- |"]
    missing = sorted({(item.how, item.word, _row(item)) for item in found if item.how not in homes.COLLECTED})
    return [*out, *(row for _, _, row in missing), ""]


def _row(item: Home) -> str:
    place = f"`{item.field}`" if item.field else f"`{item.derived}`" if item.derived else ""
    why = "; ".join(part for part in (item.note, f"`{item.reader}`" if item.reader and item.how == "read" else "") if part)
    return f"| `{item.word}` | {place} | {item.how} | {why} |".replace("|  |", "| |")
