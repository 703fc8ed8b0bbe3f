"""env: everything in this environment that can decide an output, as a bug report needs it; and two of them compared."""

import re
import sys
from collections.abc import Iterable
from typing import Annotated, Any

import typer

from provenance.cli import render
from provenance.cli.opened import Db, Json
from provenance.cli.sides import here, side
from provenance.determinism import lock as locks
from provenance.explain import fields as explained
from provenance.explain.fields import Blind
from provenance.explain.rules import SAME_TENSORS
from provenance.facts import Field, State

SHOWN = 6  # fields that one reason hides
env = typer.Typer(invoke_without_command=True)
Everything = Annotated[
    bool, typer.Option("--all", help="List too what differs and cannot act, and what could not be compared here.")
]
Torch = Annotated[bool, typer.Option("--torch/--no-torch", help="Load torch to read its switches.")]


@env.callback()
def show(
    context: typer.Context,
    json: Json = False,
    markdown: Annotated[bool, typer.Option("--md", help="Print Markdown for a bug report.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="List fields without a value too.")] = False,
    torch: Torch = True,
) -> None:
    """Show everything in this environment that can decide an output: machine, driver, libraries, switches, variables.

    No secret is in it: environment variables are an allow-list of exact names.
    """
    if context.invoked_subcommand is not None:
        return
    scopes = here(torch)
    if json:
        forms = {item.scope: {name: field.document() for name, field in item.fields.items()} for item in scopes}
        render.emit({"schema": "provenance/env/1", "digests": {s.scope: s.digest for s in scopes}, **forms})
        return
    fields = [field for item in scopes for field in item.fields.values()]
    shown = [field for field in fields if everything or _telling(field)]
    if markdown:
        sys.stdout.write("| field | value |\n| --- | --- |\n")
        for field in shown:
            sys.stdout.write(f"| `{field.name}` | {render.visible(field.show()).replace('|', '&#124;')} |\n")
        return
    render.table(("field", "value"), [(field.name, render.clip(field.show(), 90)) for field in shown])
    if len(shown) < len(fields):
        sys.stdout.write(f"\n{len(fields) - len(shown)} fields are unset or do not apply; --all lists them.\n")


def _telling(field: Field) -> bool:
    return field.state in (State.VALUE, State.UNKNOWN, State.REDACTED)


@env.command("diff")
def diff(
    one: Annotated[str, typer.Argument(metavar="A", help="`here`, a file of `env --json`, a lock, or a run.")],
    other: Annotated[str, typer.Argument(metavar="B", help="The same.")] = "here",
    everything: Everything = False,
    json: Json = False,
    db: Db = "",
) -> int:
    """Compare two environments: of two machines, two dates or two runs.

    What a process had not loaded because it ran no model, as `here`, is counted apart and is no difference.
    Exit code 0: nothing that can act differs; 1: something does; 3: nothing known does, and something is not known.
    """
    found = locks.diff(side(one, db), side(other, db))
    if json:
        render.emit({"schema": "provenance/env-diff/1", **document(found)})
        return found.code
    tell(found, "A", "B", everything)
    return found.code


def document(found: locks.Comparison) -> dict[str, Any]:
    """Return a comparison as a document for JSON."""

    def change(item: locks.Change) -> dict[str, Any]:
        return {"field": item.name, "effect": item.effect, "a": explained.document(item.before),
                "b": explained.document(item.now), "allowed": item.allowed}  # fmt: skip

    return {
        "code": found.code, "drift": [change(item) for item in found.changed], "equal": found.equal,
        "context": [change(item) for item in found.context], "varied": found.varied,
        "same_tensors": [change(item) for item in found.alike],
        "unknown": [{"field": gap.name, "because": gap.because} for gap in found.blind],
        "note": found.note,
        "open": [{"field": gap.name, "because": gap.because} for gap in found.open],
    }  # fmt: skip


def tell(found: locks.Comparison, one: str, other: str, everything: bool = False) -> None:
    """Print a comparison for people."""
    if found.note:
        sys.stderr.write(f"provenance: {found.note}\n")
    rows = [(item.effect + (", allowed" if item.allowed else ""), item.name, *_values(item)) for item in found.changed]
    if everything:
        rows += [("context", item.name, *_values(item)) for item in found.context]
    for item in found.alike:
        sys.stdout.write(f"{item.name}: {SAME_TENSORS}; no drift.\n")
    if rows:
        render.table(("effect", "field", one, other), rows)
    gaps = _gaps("could not tell", found.blind, one, other, everything)
    if everything:
        gaps += _gaps("could not be compared here", found.open, one, other, everything)
    render.lines([("plain", line) for line in gaps])
    many = len(found.drift)
    parts = ["1 field that can act differs" if many == 1 else f"{many or 'no'} fields that can act differ"]
    if found.blind:
        parts.append(f"{len(found.blind)} could not be compared")
    if found.open:
        parts.append(f"{len(found.open)} could not be compared here{'' if everything else ' (--all lists them)'}")
    if found.context and not everything:
        parts.append(f"{len(found.context)} differ that cannot act here")
    if found.varied:
        parts.append(f"{len(found.varied)} may vary: {', '.join(found.varied)}")
    sys.stdout.write(("\n" if rows or gaps else "") + "; ".join(parts) + f"; {found.equal} are equal.\n")


def _gaps(head: str, found: Iterable[Blind], one: str, other: str, everything: bool) -> list[str]:
    """Return a line for each reason, with the fields that it hides."""
    names: dict[str, list[str]] = {}
    for gap in found:
        names.setdefault(_where(gap.because, one, other), []).append(gap.name)
    lines = []
    for because, hidden in names.items():
        shown = hidden if everything or len(hidden) <= SHOWN else hidden[: SHOWN - 1]
        more = f" and {len(hidden) - len(shown)} more" if len(shown) < len(hidden) else ""
        lines.append(f"{head}: {', '.join(shown)}{more}, {because}")
    return lines


def _where(because: str, one: str, other: str) -> str:
    """Put the names of the columns for the sides A and B."""
    return re.sub(r"\bin ([AB])\b", lambda match: f"in {one if match[1] == 'A' else other}", because)


def _values(item: locks.Change) -> tuple[str, str]:
    return render.clip(item.before.show(), 44), render.clip(item.now.show(), 44)
