"""probe: what holds of a model on this machine, measured on its own answers."""

import contextlib
from pathlib import Path
from typing import Annotated, Any

import typer

from provenance import recorder as recorders
from provenance.capture.face import flush
from provenance.cli import render
from provenance.cli.opened import Db, Json
from provenance.errors import ProvenanceError
from provenance.replay import arms, probes

probe = typer.Typer(help="Measure what holds of a model here.", no_args_is_help=True, rich_markup_mode=None)


@probe.callback()
def overview() -> None:
    """Measure what holds of a model on this machine, on its own answers."""


@probe.command("determinism")
def determinism(
    model: Annotated[str, typer.Argument(metavar="MODEL", help="A checkpoint's folder, or module:function.")],
    prompts: Annotated[
        Path | None, typer.Option("--prompts", help="A text file with a prompt a line, or a JSON list.")
    ] = None,
    batch: Annotated[int, typer.Option("--batch", min=2, help="Rows of a batch.")] = 8,
    tokens: Annotated[int, typer.Option("--tokens", min=1, help="New tokens a prompt.")] = 16,
    steady: Annotated[bool, typer.Option("--deterministic", help="Hold provenance.deterministic() meanwhile.")] = False,
    device: Annotated[str, typer.Option("--device", help="Where to run. Default: a GPU if there is one.")] = "",
    require: Annotated[
        str, typer.Option("--require", help="Properties that must hold, with commas between; or all.")
    ] = "",
    record: Annotated[bool, typer.Option("--record", help="Record the calls, tagged probe=determinism.")] = False,
    json: Json = False,
    db: Db = "",
) -> int:
    """Ask a model in several ways and say what holds: repeats, batches, padding, cache, attention, threads, processes.

    Tokens are compared, and logits bit for bit; no flag is believed. module:function returns a model, or a model and
    its tokenizer. PROPERTY:tokens in --require is content with the same tokens.

    Exit code 0: what is required holds; 1: it does not; 3: it was not tested. Without --require it is 0.
    """
    wanted = [item.strip() for item in require.split(",") if item.strip()]
    probes.checked(wanted)
    asked = arms.read(prompts) if prompts is not None else None
    if record:
        recorders.configure(db=db or None)
    _quiet()
    plan: dict[str, Any] = {"batch": batch, "tokens": tokens, "steady": steady, "record": record, "device": device}
    found = probes.probe(model, None, asked, **plan)
    if record and not flush(60):
        raise ProvenanceError("the database did not take the records within a minute; the spool keeps them.")
    if json:
        render.emit(found.document())
    else:
        render.lines([("plain", line) for line in str(found).splitlines()])
    return found.code(wanted)


def _quiet() -> None:
    """Keep the library's bars and remarks on settings out of what is printed here."""
    with contextlib.suppress(ImportError):
        from transformers.utils import logging as logs

        logs.set_verbosity_error()
        logs.disable_progress_bar()
