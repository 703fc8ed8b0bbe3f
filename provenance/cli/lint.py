"""lint: settings that do something nobody asked for, in a recorded run or in a model's folder."""

import sys
from importlib import metadata
from pathlib import Path
from typing import Annotated

import typer

from provenance.cli import render
from provenance.cli.opened import Db, Json, Runs
from provenance.determinism import traps
from provenance.errors import UsageError


def lint(
    reference: Annotated[str, typer.Argument(metavar="[RUN]", help="A recorded run. Default: the last one.")] = "",
    model: Annotated[Path | None, typer.Option("--model", help="A model's folder instead of a run.")] = None,
    everything: Annotated[bool, typer.Option("--all", help="List what looks like a trap and is harmless too.")] = False,
    json: Json = False,
    db: Db = "",
) -> int:
    """Name the traps in decoding settings: what acts unasked, what a checkpoint supplied, what a server ignores.

    Each with the version it was shown in, the line that settles it, and what that costs. Exit code 0: no trap;
    1: at least one.
    """
    if model is not None and reference:
        raise UsageError("lint takes a run or --model, not both.")
    if model is not None:
        facts = traps.of_folder(model.expanduser(), installed())
    else:
        facts = traps.of_run(Runs(db).find(reference or "last")[0])
    found = traps.lint(facts)
    bad = [item for item in found if item.rule.kind == traps.TRAP]
    if json:
        render.emit({"schema": "provenance/lint/1", "traps": len(bad), "findings": [item.document() for item in found]})
    else:
        render.lines([line for item in (found if everything else bad) for line in _told(item)])
        quiet = 0 if everything else len(found) - len(bad)
        more = f" {quiet} set and harmless; --all lists them." if quiet else ""
        sys.stdout.write(f"{len(bad) or 'no'} trap{'s' * (len(bad) != 1)} found.{more}\n")
    return 1 if bad else 0


def _told(item: traps.Finding) -> list[tuple[str, str]]:
    by = f", set by {item.source}" if item.source else ""
    style = "cause" if item.rule.kind == traps.TRAP else "dim"
    out = [
        (style, f"{item.rule.name}: {item.hit.field} = {item.value}{by}"),
        ("plain", f"  {item.hit.because}."),
        ("plain", f"  write  {item.hit.write}"),
        ("dim", f"  costs  {item.rule.cost}"),
    ]
    return [*out, ("dim", f"  note   {item.note}"), ("plain", "")] if item.note else [*out, ("plain", "")]


def installed() -> str:
    """Return the version of transformers that is installed, or an empty text."""
    try:
        return metadata.version("transformers")
    except metadata.PackageNotFoundError:
        return ""
