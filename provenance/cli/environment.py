"""env: everything in this environment that can decide an output, as a bug report needs it."""

import importlib.util
import sys
from typing import Annotated

import typer

from provenance.cli import render
from provenance.cli.opened import Json
from provenance.facts import Field, State
from provenance.fingerprint.environment import Environment


def env(
    json: Json = False,
    markdown: Annotated[bool, typer.Option("--md", help="Print Markdown for a bug report.")] = False,
    everything: Annotated[bool, typer.Option("--all", help="List fields without a value too.")] = False,
    torch: Annotated[bool, typer.Option("--torch/--no-torch", help="Load torch to read its switches.")] = True,
) -> int:
    """Show everything in this environment that can decide an output: machine, driver, libraries, switches, variables.

    No secret is in it: environment variables are an allow-list of exact names.
    """
    if torch and importlib.util.find_spec("torch") is not None:
        importlib.import_module("torch")
    reader = Environment()
    scopes = (reader.environment(), reader.switches())
    if json:
        forms = {item.scope: {name: field.document() for name, field in item.fields.items()} for item in scopes}
        render.emit({"schema": "provenance/env/1", "digests": {s.scope: s.digest for s in scopes}, **forms})
        return 0
    fields = [field for item in scopes for field in item.fields.values()]
    shown = [field for field in fields if everything or _telling(field)]
    if markdown:
        sys.stdout.write("| field | value |\n| --- | --- |\n")
        for field in shown:
            sys.stdout.write(f"| `{field.name}` | {render.visible(field.show()).replace('|', '&#124;')} |\n")
        return 0
    render.table(("field", "value"), [(field.name, render.clip(field.show(), 90)) for field in shown])
    if len(shown) < len(fields):
        sys.stdout.write(f"\n{len(fields) - len(shown)} fields are unset or do not apply; --all lists them.\n")
    return 0


def _telling(field: Field) -> bool:
    return field.state in (State.VALUE, State.UNKNOWN, State.REDACTED)
