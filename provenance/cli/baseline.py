"""baseline: runs frozen as expected outputs, and made again after a change of driver, library or model."""

import sys
from pathlib import Path
from typing import Annotated

import typer

from provenance.cli import render
from provenance.cli.opened import Db, Json, Junit, Runs, write
from provenance.cli.replay import Allow, FailOn, Model, OwnSwitches, Vary, losses, policy, progress, record_into
from provenance.errors import BadFile, BadSetting, UsageError
from provenance.explain import reports, story
from provenance.facts import Run
from provenance.replay import baseline as baselines
from provenance.replay.baseline import SUFFIX, Check
from provenance.replay.plan import value
from provenance.store import export, queries

MOST = 10_000
Name = Annotated[str, typer.Argument(metavar="NAME", help=f"The set: a name or path, of the file NAME{SUFFIX}.")]
baseline = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


@baseline.command("record")
def record(
    name: Name,
    references: Annotated[list[str] | None, typer.Argument(metavar="[RUN]...", help="Runs to freeze.")] = None,
    from_tag: Annotated[str, typer.Option("--from-tag", metavar="TAG", help="Calls with this name or tag.")] = "",
    last: Annotated[int, typer.Option("--last", min=0, max=MOST, help="The newest calls, so many.")] = 0,
    db: Db = "",
) -> int:
    """Freeze runs as expected outputs, in NAME.baseline.json: readable, made for git, and whole on any machine.

    Prompts and outputs are in it. Of calls that were made several times the newest stands. A run that could never be
    made again is refused where it was named, and else left out; either way it is said why.
    """
    if sum(map(bool, (references, from_tag, last))) != 1:
        raise typer.BadParameter("name runs, or give --from-tag TAG, or --last N.")
    path = baselines.place(name)
    _room(path)
    given, dropped = fitting(chosen(references or [], from_tag, last, db), strict=bool(references))
    kept, repeated = baselines.distinct(given)
    if not kept:
        raise UsageError("none of these runs can be replayed: " + (dropped[0] if dropped else "there are none."))
    write(path, baselines.dumps(path.name.removesuffix(SUFFIX), kept))
    for text in [*dropped, *repeated]:
        sys.stderr.write(f"provenance: {render.visible(text.rstrip('.'))}.\n")
    sequences = sum(len(run.sequences) for run in kept)
    sys.stdout.write(f"{path}: {len(kept)} runs, {sequences} sequences\n")
    return 0


def chosen(references: list[str], from_tag: str, last: int, db: str) -> list[Run]:
    """Return the runs that are meant: those named, or the newest calls, all or with a tag. Raises UsageError."""
    runs = Runs(db)
    if references:
        return [run for reference in references for run, _ in runs.all(reference)]
    found = queries.calls(runs.engine, last or MOST, from_tag)
    if not found:
        wanted = f"with the tag or name {from_tag!r}" if from_tag else "that succeeded"
        raise UsageError(f"there is no call {wanted}. `provenance log` lists the runs of this store.")
    return [queries.load(runs.engine, run_id) for run_id in found]


def fitting(runs: list[Run], strict: bool) -> tuple[list[Run], list[str]]:
    """Part the runs that can be replayed from sentences about those that cannot, and about what they will need."""
    kept, told = [], []
    for run in runs:
        why, asked = baselines.fit(run)
        if why and strict:
            raise UsageError(why)
        if why:
            told.append(f"left out: {why}")
            continue
        kept.append(run)
        told += [f"run {run.run_id[:18]} will be replayed only if this is allowed: {text}" for text in asked]
    return kept, told


def _room(path: Path) -> None:
    """Say what is wrong with a place for a baseline. Only a baseline is overwritten. Raises BadFile."""
    if not path.parent.is_dir():
        raise BadFile(f"there is no folder {path.parent}; make it, or choose another name.")
    if path.exists():
        text = path.read_bytes()[:200] if path.is_file() else b""
        if export.BASELINE.encode() not in text:
            raise BadFile(f"{path} is there already and is no baseline; move it away, or choose another name.")


# -- check ------------------------------------------------------------------------------------------


@baseline.command("check")
def check(
    name: Name,
    model: Model = "",
    allow: Allow = None,
    vary: Vary = None,
    fail_on: FailOn = "",
    fail_over: Annotated[
        float | None, typer.Option("--fail-over", metavar="RATE", help="Fail only if more sequences diverge: 0 to 1.")
    ] = None,
    own_switches: OwnSwitches = False,
    explain: Annotated[bool, typer.Option("--explain", help="Tell each run that diverged at length.")] = False,
    json: Json = False,
    junit: Junit = None,
    db: Db = "",
) -> int:
    """Make the runs of a set again with their models loaded anew, and hold the outputs against the frozen ones.

    Says the divergence rate, and of each run the verdict and the likeliest cause. The replays are recorded.

    Exit code 0: all held, or differ as allowed; 1: outputs diverged, or the weights are others; 2: the set or a model
    cannot be had; 3: could not tell.
    """
    if fail_over is not None and not 0 <= fail_over <= 1:
        raise BadSetting(f"--fail-over is {fail_over}; write a share from 0 to 1, as 0.01.")
    held = baselines.read(name)
    rules = policy(held.runs, allow, vary, fail_on)
    record_into(db)
    found = baselines.check(
        held, model or None, rules, own_switches=own_switches, fail_over=fail_over, told=progress
    )  # fmt: skip
    if junit is not None:
        cases = [case for result in found.results for case in result.told()]
        write(junit, reports.suite(f"provenance baseline {held.name}", f"provenance.baseline.{held.name}", cases))
    if json:
        render.emit(found.document())
    else:
        tell(found, explain)
    return found.code


def tell(found: Check, explain: bool) -> None:
    """Print a check: a line a run, what could not be restored, and the rate."""
    rows = [
        (result.verdict.replace("_", " "), result.original.run_id[:18], render.clip(_prompt(result.original), 28),
         result.why + ("; allowed" if result.code == 0 and result.verdict != "same" else ""))
        for result in found.results
    ]  # fmt: skip
    render.table(("verdict", "run", "prompt", "what"), rows)
    render.lines([("plain", ""), *losses(found.results)])
    diverged = [item.answer for item in found.results if item.answer is not None and item.verdict != "same"]
    for answer in diverged if explain else ():
        render.lines([*story.lines(answer), ("plain", "")])
    render.lines([("head", summary(found) + ("" if explain or not diverged else " --explain tells why."))])


def summary(found: Check) -> str:
    """Return the divergence rate in a sentence."""
    every, told, differing, failing = found.counts()
    if found.rate is None:
        return f"None of {every} sequences could be compared."
    share, low, high = (f"{100 * part:.3g}" for part in found.rate)
    text = f"{differing} of {told} sequences diverged: {share} % (95 % interval {low} to {high} %)"
    if found.fail_over is not None:
        text += f"; {failing} count, and at most {100 * found.fail_over:.3g} % may"
    return text + (f"; {every - told} could not be compared." if told < every else ".")


def _prompt(run: Run) -> str:
    first = run.sequences[0]
    more = f" (+{len({item.row for item in run.sequences}) - 1})" if len(run.sequences) > 1 else ""
    return (first.input_text or " ".join(map(str, first.input_ids or ()))) + more


# -- looking ----------------------------------------------------------------------------------------


@baseline.command("list")
def list_(
    folder: Annotated[Path, typer.Argument(metavar="[FOLDER]", help="Where to look.")] = Path(),
    json: Json = False,
) -> int:
    """List the sets in a folder."""
    if not folder.is_dir():
        raise BadFile(f"there is no folder {folder}.")
    found = [baselines.read(str(path)) for path in sorted(folder.glob("*" + SUFFIX))]
    rows = [(item.name, len(item.runs), sum(len(run.sequences) for run in item.runs)) for item in found]
    if json:
        render.emit([dict(zip(("name", "runs", "sequences"), row, strict=True)) for row in rows])
    else:
        render.table(("name", "runs", "sequences"), rows)
    return 0


@baseline.command("show")
def show(name: Name, json: Json = False) -> int:
    """List the runs of a set: what each was asked, how, and the output that it expects."""
    runs = baselines.read(name).runs
    rows = [
        (run.run_id, str(value(run, "model.name_or_path") or value(run, "model.class") or ""),
         str(value(run, "model.dtype") or ""), str(value(run, "generation.mode") or ""), len(run.sequences),
         _prompt(run), run.sequences[0].output_text or " ".join(map(str, run.sequences[0].output_ids or ())))
        for run in runs
    ]  # fmt: skip
    heads = ("run", "model", "dtype", "mode", "sequences", "prompt", "output")
    if json:
        render.emit([dict(zip(heads, row, strict=True)) for row in rows])
    else:
        render.table(
            heads, [(*row[:1], row[1][-24:], *row[2:5], *(render.clip(t, 30) for t in row[5:])) for row in rows]
        )
    return 0
