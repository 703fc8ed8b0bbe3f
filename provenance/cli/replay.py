"""replay: a recorded call made again, and whether its output held."""

import contextlib
import importlib.util
import sys
from collections.abc import Collection
from typing import Annotated, Any

import typer

from provenance import recorder as recorders
from provenance.cli import render
from provenance.cli.diff import outputs
from provenance.cli.opened import Db, Json, Junit, Runs, write
from provenance.errors import MissingExtra, UsageError
from provenance.explain import reports, story
from provenance.facts import Run
from provenance.replay import load, rerun
from provenance.replay.verdict import SCHEMA, Policy, Result, judge, named

Model = Annotated[
    str,
    typer.Option(
        "--model", help="A checkpoint's folder, or module:function that returns a model. Default: as recorded."
    ),
]
Allow = Annotated[
    list[str] | None,
    typer.Option("--allow", metavar="FIELD", help="Run though FIELD is not as it was; pass if it is the sole cause."),
]
Vary = Annotated[
    list[str] | None, typer.Option("--vary", metavar="FIELD", help="Meant to differ: listed, and no cause.")
]
FailOn = Annotated[
    str, typer.Option("--fail-on", metavar="VERDICTS", help="Verdicts that give exit code 1, by commas.")
]
OwnSwitches = Annotated[
    bool,
    typer.Option("--own-switches", help="Leave threads, TF32 and such as they are here: they are what is tried."),
]


def replay(
    reference: Annotated[str, typer.Argument(metavar="RUN", help="A recorded `generate`, or an exported file.")],
    model: Model = "",
    allow: Allow = None,
    vary: Vary = None,
    fail_on: FailOn = "",
    own_switches: OwnSwitches = False,
    json: Json = False,
    junit: Junit = None,
    db: Db = "",
) -> int:
    """Make a recorded call again: the recorded model loaded anew, settings, batch and random state restored.

    The replay is recorded too, and compared with its original. What cannot be restored is said, field by field; where
    it decides the output the call is not made, unless --allow FIELD says so ('weights' stands for all that names them).

    Exit code 0: the output held, or its sole cause is allowed; 1: it did not, or the weights are others; 3: could not
    tell.
    """
    run, place = Runs(db).find(reference)
    if place is not None:
        raise UsageError("a replay makes a whole batch again, since a row depends on its batch; name the run alone.")
    chosen = policy([run], allow, vary, fail_on)
    record_into(db)
    made = rerun.rerun(run, load.Once(run, model or None), chosen.allowed, own_switches=own_switches)
    rerun.fetch([made])
    result = judge(made, chosen)
    if junit is not None:
        write(junit, reports.suite("provenance replay", "provenance.replay", result.told()))
    if json:
        render.emit({"schema": SCHEMA, **result.document()})
    else:
        _tell(result)
    return result.code


def policy(runs: Collection[Run], allow: list[str] | None, vary: list[str] | None, fail_on: str) -> Policy:
    """Return what may differ and what fails. Raises BadSetting for a name that there is not."""
    failing = reports.verdicts(fail_on) if fail_on else None
    return Policy(named(allow or (), runs), named(vary or (), runs), failing)


def record_into(db: str) -> None:
    """Open the recorder of this process, quietly: it writes the replays.

    Raises UsageError where nothing can be recorded.
    """
    for package in ("torch", "transformers"):
        if importlib.util.find_spec(package) is None:
            raise MissingExtra(package, "a replay", "transformers")
    if recorders.configure(db=db or None, writer="off") is None:
        raise UsageError(f"a replay is a recorded run, and nothing can be recorded here: {recorders.refused()}.")
    with contextlib.suppress(ImportError, AttributeError):  # bars and hints of a library are no answer of ours
        from transformers.utils import logging

        logging.set_verbosity_error()
        logging.disable_progress_bar()


def progress(text: str) -> None:
    """Say on a terminal what is being done."""
    if sys.stderr.isatty():
        sys.stderr.write(f"provenance: {render.visible(text)}\n")


def losses(results: Collection[Result]) -> list[tuple[str, str]]:
    """Return what could not be restored as lines, each sentence once."""
    seen: dict[str, int] = {}
    for result in results:
        for item in result.rerun.lost:
            if item not in result.rerun.refused:
                seen[item.sentence] = seen.get(item.sentence, 0) + 1
    if not seen:
        return []
    lines = [(f"  {text}" + (f" ({count} runs)" if count > 1 else "")) for text, count in seen.items()]
    return [("head", "Not as in the original"), *(("plain", line) for line in lines), ("plain", "")]


def _tell(result: Result) -> None:
    lines: list[tuple[str, Any]] = losses([result])
    if result.answer is None or result.rerun.run is None:
        word = result.verdict.replace("_", " ").capitalize()
        lines += [("head", f"{word}: {result.why}.")]
    else:
        lines += [*story.lines(result.answer), *outputs(result.answer, result.original, result.rerun.run)]
    render.lines(lines)
