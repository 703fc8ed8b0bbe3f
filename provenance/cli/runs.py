"""log, show, export: what was recorded, one run whole, and runs as a file."""

import shlex
import sys
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer

from provenance.cli import render
from provenance.cli.opened import Db, Json, Runs, store
from provenance.errors import BadFile
from provenance.explain import conditions
from provenance.facts import Field, Run, Sequence
from provenance.store import export as exported
from provenance.store import queries

FIELD_GROUPS = ("batch", "seed", "rng", "model", "weights", "tokenizer", "chat_template", "device", "torch", "gpu",
                "cuda", "cudnn", "cpu", "os", "python", "app", "context")  # fmt: skip


def log(
    limit: Annotated[int, typer.Option("--limit", "-n", min=1, max=10_000, help="How many runs.")] = 20,
    name: Annotated[str, typer.Option("--name", help="Only runs with this name.")] = "",
    tag: Annotated[str, typer.Option("--tag", help="Only runs with this tag: KEY or KEY=VALUE.")] = "",
    status: Annotated[str, typer.Option("--status", help="Only runs with this status: ok, error, crashed, …")] = "",
    equal: Annotated[bool, typer.Option("--equal-inputs", help="List prompts that were asked more than once.")] = False,
    diverged: Annotated[
        bool, typer.Option("--diverged", help="Only prompts with more than one output, and how to compare them.")
    ] = False,
    json: Json = False,
    db: Db = "",
) -> int:
    """List recorded runs, newest first; or incidents: equal inputs that gave more than one output.

    Inputs are equal if token ids, settings, weights and, where sampled, the random state are.
    """
    if equal or diverged:
        if name or tag or status:
            raise typer.BadParameter(
                "--equal-inputs lists prompts and not runs; it takes no --name, --tag or --status."
            )
        return _incidents(queries.incidents(store(db), limit, diverged), json, diverged, db)
    found = queries.log(store(db), limit, name, status, tag)
    if json:
        render.emit([line.__class__.__dataclass_fields__ and _line(line) for line in found])
        return 0
    ids = render.short_ids([line.run_id for line in found])
    room = max(12, (render.columns() - 74) // 2)
    rows = [
        (
            run, render.moment(line.started_at), line.status, line.name, _model(line.model), line.batch_size,
            render.milliseconds(line.duration_ns), render.clip(line.text_in, room),
            render.clip(line.text_out or line.error, room),
        )
        for run, line in zip(ids, found, strict=True)
    ]  # fmt: skip
    render.table(("run", "started (UTC)", "status", "name", "model", "batch", "took", "prompt", "output"), rows)
    return 0


def _incidents(found: list[queries.Incident], json: bool, diverged: bool, db: str) -> int:
    """Show groups of equal input, each with its outputs and the commands that say why they part."""
    if json:
        render.emit([asdict(item) | {"commands": item.commands} for item in found])
        return 0
    where = f" --db {shlex.quote(db)}" if db else ""
    for item in found:
        lines = [("head", f"{render.clip(item.text_in, 90) or '(no text of the prompt)'}")]
        seen = (
            f"{item.runs} answers, {len(item.outputs)} different"
            if len(item.outputs) > 1
            else f"{item.runs} answers, all equal"
        )
        lines.append(("plain", f"  {seen}, {render.moment(item.first_at)} to {render.moment(item.last_at)} UTC"))
        for output in item.outputs:
            text = render.clip(output.text, 70) or "(no text of the output)"
            lines.append(("plain", f"  {output.runs:>5}  {output.reference or '(erased)'}  {text}"))
        lines += [("cause", f"  {command}{where}") for command in item.commands]
        render.lines([*lines, ("plain", "")])
    if not found:
        sys.stdout.write("No prompt was asked again" + (" with another output.\n" if diverged else ".\n"))
    return 0


def _line(line: queries.Line) -> dict[str, Any]:
    return {name: getattr(line, name) for name in queries.Line.__dataclass_fields__}


def _model(name: str) -> str:
    return name.rstrip("/").rpartition("/")[2].rpartition(".")[2][:24]


def show(
    reference: Annotated[
        str, typer.Argument(metavar="RUN", help="A run, or RUN:ROW for one prompt of a batch.")
    ] = "last",
    fields: Annotated[bool, typer.Option("--fields", help="List every recorded field.")] = False,
    json: Json = False,
    db: Db = "",
) -> int:
    """Show one run: what it was asked, what it answered, and what decided it.

    With --json it prints the whole run, as `provenance export` does.
    """
    run, place = Runs(db).find(reference)
    if json:
        sys.stdout.write(exported.dumps(run).decode() + "\n")
        return 0
    _head(run)
    for sequence in run.sequences:
        if place is None or (sequence.row == place[0] and place[1] in (None, sequence.ret)):
            _sequence(run, sequence)
    _settings(run)
    if fields:
        _fields(run.fields)
    else:
        sys.stdout.write(f"\n{len(run.fields)} fields recorded; --fields lists them.\n")
    return 0


def _head(run: Run) -> None:
    label = f"  ({run.name})" if run.name else ""
    render.lines([("head", f"run {run.run_id}{label}")])
    facts: list[tuple[str, object]] = [
        ("status", run.status), ("started", render.moment(run.started_at) + " UTC"),
        ("took", render.milliseconds(run.duration_ns)), ("call", f"{run.runtime} {run.operation}"),
        ("tags", ", ".join(f"{key}={value}" for key, value in run.tags.items())), ("error", run.error),
    ]  # fmt: skip
    for name in ("model.class", "model.name_or_path", "model.dtype", "weights.loaded_root", "device.in_use",
                 "gpu.0.name", "gpu.driver_version", "cpu.model", "torch.version", "lib.transformers.version",
                 "batch.size", "seed.torch_initial"):  # fmt: skip
        if name in run.fields and run.fields[name].state.value != "unset":
            facts.append((name, run.fields[name].show()))
    render.lines([("plain", f"  {name:<24} {value}") for name, value in facts if value not in ("", None)])


def _sequence(run: Run, sequence: Sequence) -> None:
    many = len(run.sequences) > 1
    title = f"prompt {sequence.row}" + (f", return {sequence.ret}" if sequence.ret else "") if many else "prompt"
    out: list[tuple[str, str]] = [("plain", ""), ("head", title)]
    shown = _content(sequence.input_text, sequence.input_value, sequence.input_ids)
    out += [("plain", f"  {line}") for line in shown]
    out.append(("head", f"output ({sequence.finish}, {len(sequence.output_ids or ())} tokens)"))
    out += [
        ("plain", f"  {line}") for line in _content(sequence.output_text, sequence.output_value, sequence.output_ids)
    ]
    margins = [(step.margin, n) for n, step in enumerate(sequence.steps) if step.margin is not None]
    if margins and not conditions.drew(run):  # a margin says nothing of a drawn token
        smallest, at = min(margins)
        out.append(("dim", f"  smallest margin {smallest:.3g} logits at token {at}"))
    elif sequence.no_evidence:
        out.append(("dim", f"  no token evidence: {sequence.no_evidence}"))
    render.lines(out)


def _content(text: str | None, value: object, ids: tuple[int, ...] | None) -> list[str]:
    if text is not None:
        return text.split("\n")
    if value is not None:
        return [repr(value)]
    if ids:
        return [f"token ids {' '.join(map(str, ids[:40]))}{' …' if len(ids) > 40 else ''}"]
    return ["(not kept)"]


def _settings(run: Run) -> None:
    """Show the settings that somebody set, with the hand that set each."""
    chosen = [
        field for name, field in sorted(run.fields.items())
        if name.startswith("generation.") and field.source and field.source not in ("library", "resolved")
    ]  # fmt: skip
    if chosen:
        render.lines([("plain", ""), ("head", "settings that somebody set")])
        render.lines([("plain", f"  {item.name:<36} {item.show():<20} by {item.source}") for item in chosen])


def _fields(fields: Any) -> None:
    def order(item: Field) -> tuple[int, str]:
        group = item.name.partition(".")[0]
        return (FIELD_GROUPS.index(group) if group in FIELD_GROUPS else 99, item.name)

    render.lines([("plain", ""), ("head", "fields")])
    rows = [(item.name, render.clip(item.show(), 70), item.source) for item in sorted(fields.values(), key=order)]
    render.table(("field", "value", "source"), rows)


def export(
    references: Annotated[list[str], typer.Argument(metavar="RUN...", help="Runs to write, whole.")],
    out: Annotated[Path | None, typer.Option("--out", "-o", help="The file; without it the standard output.")] = None,
    db: Db = "",
) -> int:
    """Write whole runs as JSON: `provenance diff` compares them where there is no database, no torch and no GPU.

    The content is in it: prompts and outputs as they were kept.
    """
    runs = Runs(db)
    data = exported.dumps(*(run for reference in references for run, _ in runs.all(reference))) + b"\n"
    if out is None:
        sys.stdout.write(data.decode())
        return 0
    try:
        out.write_bytes(data)
    except OSError as error:
        raise BadFile(f"{out} cannot be written: {error.strerror}.") from None
    return 0
