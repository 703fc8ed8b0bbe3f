"""diff: why two runs part, or which field separates many; on a terminal, in a file for people, or in one for CI."""

import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Annotated, Any

import typer

from provenance.cli import render
from provenance.cli.opened import FOREIGN, Db, Given, Json, Junit, Place, Runs, is_file, split, write
from provenance.errors import ProvenanceError, UsageError
from provenance.explain import compare, reports, story
from provenance.explain.history import Evidence, Observation, evidence
from provenance.facts import Run

Made = tuple[int, list[tuple[Path, str]], Callable[[], object]]
References = Annotated[
    list[str], typer.Argument(metavar="A B...", help="Runs, or RUN:ROW for one prompt, or exported files.")
]
Baseline = Annotated[
    str, typer.Option("--against-baseline", metavar="TAG", help="Compare one run with the newest of TAG on its prompt.")
]
FailOn = Annotated[
    str, typer.Option("--fail-on", metavar="VERDICTS", help="Verdicts that give exit code 1, by commas.")
]
Allow = Annotated[
    list[str] | None, typer.Option("--allow", metavar="FIELD", help="Exit code 0 if every cause that decides is one.")
]
Vary = Annotated[
    list[str] | None, typer.Option("--vary", metavar="FIELD", help="Meant to differ: listed, and no cause.")
]
Html = Annotated[Path | None, typer.Option("--html", help="Write one self-contained page.")]
Sarif = Annotated[Path | None, typer.Option("--sarif", help="Write SARIF 2.1.0, for code scanning.")]


def diff(
    references: References,
    baseline: Baseline = "",
    fail_on: FailOn = "",
    allow: Allow = None,
    vary: Vary = None,
    json: Json = False,
    markdown: Annotated[bool, typer.Option("--md", help="Print Markdown.")] = False,
    html: Html = None,
    sarif: Sarif = None,
    junit: Junit = None,
    db: Db = "",
) -> int:
    """Say why two runs part: the token, the margin and the cause; of many runs, which field separates them.

    FIELD may be a pattern such as 'gpu.*'. Verdicts are same, near_tie, divergent, not_comparable and inconclusive.
    Exit code 0: same, or allowed; 1: near tie, divergent or not comparable; 3: could not tell.
    """
    failing = reports.verdicts(fail_on) if fail_on else None
    runs = Runs(db)
    given = _given(runs, references, baseline)
    declared, allowed = _named(vary, given), _named(allow, given)
    past = _past(runs, references, given)

    def make(given: Given) -> Made:
        answer = _answer(given, declared, past)
        code = reports.settle(answer, failing, allowed)
        a, b = _sides(answer, given)
        return code, _files(answer, a, b, html, sarif, junit), _saying(answer, a, b, json, markdown)

    try:
        code, files, say = make(given)
    except ProvenanceError:
        raise
    except FOREIGN as error:
        raise runs.strange(given, make) or error from None
    for path, text in files:
        write(path, text)
    say()
    return code


def _files(
    answer: dict[str, Any], a: Run, b: Run, html: Path | None, sarif: Path | None, junit: Path | None
) -> list[tuple[Path, str]]:
    """Make the files that were asked for, before any is written."""
    files = [(html, _page(answer, a, b))] if html is not None else []
    files += [(sarif, reports.sarif(answer, sys.modules["provenance"].__version__))] if sarif is not None else []
    return files + ([(junit, reports.junit(answer))] if junit is not None else [])


def _given(runs: Runs, references: list[str], baseline: str) -> Given:
    """Find the runs that are named. Raises BadParameter where their number is not one that can be compared."""
    alone = len(references) == 1 and not baseline and not is_file(split(references[0])[0])
    given = [] if alone else [item for reference in references for item in runs.all(reference)]
    if baseline:
        if len(given) != 1:
            raise typer.BadParameter(f"--against-baseline takes one run and got {len(given)}.")
        return [_baseline(runs, baseline, *given[0]), *given]
    if len(given) < 2:
        raise typer.BadParameter("diff takes two runs or more and got 1. `provenance log` lists them.")
    return given


def _baseline(runs: Runs, tag: str, run: Run, place: Place) -> tuple[Run, Place]:
    """Find the newest run of a tag that was asked one of the prompts of a run. Raises UsageError."""
    from provenance.store import queries

    keys = [item.input_key for item in run.sequences if place is None or item.row == place[0]]
    found = queries.baseline(runs.engine, tag, run.run_id, [key for key in keys if key], run.key_id)
    if found is None:
        raise UsageError(
            f"no run with the tag or name {tag!r} was asked a prompt of {run.run_id}, or the run was written under "
            "another key. `provenance log` lists the runs of this store."
        )
    other = queries.load(runs.engine, found)
    if place is None:
        return other, None
    wanted = {item.input_key for item in run.sequences if item.row == place[0]}
    return other, next((item.row, None) for item in other.sequences if item.input_key in wanted)


def _named(given: list[str] | None, runs: Given) -> Callable[[str], bool]:
    """Return what says whether a field is meant. Raises BadSetting for a name that no field has."""
    if not given:
        return lambda _: False
    from provenance.determinism import lock

    checked = lock.patterns(given, {name for run, _ in runs for name in run.fields})
    return lambda name: lock.matches(name, checked)


def _past(runs: Runs, references: list[str], given: Given) -> Mapping[str, Evidence] | None:
    """Return what other pairs of the store say of each field; of exported runs there is no past."""
    if len(given) != 2 or any(is_file(split(reference)[0]) for reference in references):
        return None
    from provenance.store import history

    found = history.groups(runs.engine, history.around(given[0][0], given[1][0]))
    return evidence([Observation(*seen) for seen in group] for group in found)


def _answer(given: Given, declared: Callable[[str], bool], past: Mapping[str, Evidence] | None) -> dict[str, Any]:
    if len(given) > 2:
        from provenance.explain import many

        return many.compare_all(given, declared)
    (a, a_place), (b, b_place) = given
    return compare.compare(a, b, a_place, b_place, declared, past)


def _page(answer: dict[str, Any], a: Run, b: Run) -> str:
    from provenance.explain import page  # most answers go to a terminal

    return page.page(answer, a, b)


def _sides(answer: dict[str, Any], given: Given) -> tuple[Run, Run]:
    """Return the two runs that the top of the answer is about."""
    if len(given) == 2:
        return given[0][0], given[1][0]
    a, b = (next(run for run, _ in given if run.run_id == answer[side]["run"]) for side in ("a", "b"))
    return a, b


def _saying(answer: dict[str, Any], a: Run, b: Run, json: bool, markdown: bool) -> Callable[[], object]:
    """Make the text, and return what prints it: an exported run can fail the making, and then nothing is printed."""
    if json:
        text = render.dumps(answer) + "\n"
    elif markdown:
        text = story.markdown(answer)
    else:
        lines = [*story.lines(answer), *outputs(answer, a, b)]
        return partial(render.lines, lines)
    return partial(sys.stdout.write, text)


def outputs(answer: dict[str, Any], a: Run, b: Run) -> list[tuple[str, str]]:
    """Show the two outputs of the pair, where their texts were kept."""
    texts = [_text(run, answer[side]) for run, side in ((a, "a"), (b, "b"))]
    if answer["verdict"] == "same" or None in texts or texts[0] == texts[1]:
        return []
    out: list[tuple[str, str]] = [("plain", ""), ("head", "The two outputs")]
    common = render.common(str(texts[0]), str(texts[1]))
    for side, text in zip("AB", texts, strict=True):
        shown = f"{str(text)[:common]}⟦{str(text)[common:]}⟧"
        out.append(("plain", f"  {side}: {shown}"))
    return out


def _text(run: Run, place: dict[str, Any]) -> str | None:
    found = next((s for s in run.sequences if s.row == place["prompt"] and s.ret == place["return"]), None)
    return found.output_text if found is not None else None
