"""A regression set: recorded runs frozen as expected outputs, and made again after a change.

The set is one file, ``NAME.baseline.json``: exported runs under a head of its own, the fields that all of them share
written once. It lies in git, goes to any machine, and `provenance diff` reads it too. It holds prompts and outputs.
"""

import json
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from provenance.errors import BadFile, UsageError
from provenance.explain.compare import INCONCLUSIVE, SAME
from provenance.explain.history import wilson
from provenance.explain.reports import FAILED, UNTOLD
from provenance.facts import Run
from provenance.integrity.digests import file_digest
from provenance.replay import load, rerun
from provenance.replay import plan as plans
from provenance.replay.plan import ASKED, NEEDED
from provenance.replay.verdict import Policy, Result, judge
from provenance.store import export

SCHEMA = "provenance/baseline-check/1"
SUFFIX = ".baseline.json"
WIDTH = 118


@dataclass(frozen=True, slots=True)
class Baseline:
    """A regression set as read."""

    name: str
    path: Path
    runs: tuple[Run, ...]
    kind: str = rerun.REPLAY  # of the runs that a check makes


# -- the file ---------------------------------------------------------------------------------------


def place(name: str) -> Path:
    """Return the file of a baseline: a name, or a path without or with its ending.

    >>> place("tests/nightly").as_posix(), place("a.baseline.json").as_posix()
    ('tests/nightly.baseline.json', 'a.baseline.json')
    """
    return Path(name if name.endswith(SUFFIX) else name + SUFFIX).expanduser()


def dumps(name: str, runs: Sequence[Run]) -> str:
    """Return runs as a baseline: readable, and equal to the byte for equal runs."""
    forms = [orjson.loads(export.dumps(run)) for run in runs]
    first = forms[0]["fields"]
    shared = {key: part for key, part in first.items() if all(form["fields"].get(key) == part for form in forms)}
    for form in forms:
        form["fields"] = {key: part for key, part in form["fields"].items() if key not in shared}
    body = {"fields": shared, "runs": forms}
    head = {"name": name, "runs": len(forms), "digest": _digest(body)}
    return _pretty({"schema": export.BASELINE, "baseline": head, **body}, 0) + "\n"


def _digest(form: dict[str, Any]) -> str:
    body = {name: form.get(name) for name in ("fields", "runs")}
    return file_digest(orjson.dumps(body, option=orjson.OPT_SORT_KEYS))


def _pretty(form: Any, depth: int) -> str:
    """Write JSON so that a part stands on one line wherever it fits: a field, or a token, is a line of a diff."""
    line = json.dumps(form, ensure_ascii=False)
    if not isinstance(form, (dict, list)) or not form or len(line) + 2 * depth <= WIDTH:
        return line
    pad = "  " * (depth + 1)
    if isinstance(form, dict):
        parts = [f"{json.dumps(key, ensure_ascii=False)}: {_part(key, part, depth + 1)}" for key, part in form.items()]
        return "{\n" + ",\n".join(pad + part for part in parts) + "\n" + "  " * depth + "}"
    if not any(isinstance(part, (dict, list)) for part in form):
        return "[\n" + _filled(list(map(json.dumps, form)), pad) + "\n" + "  " * depth + "]"
    return "[\n" + ",\n".join(pad + _pretty(part, depth + 1) for part in form) + "\n" + "  " * depth + "]"


def _part(key: str, form: Any, depth: int) -> str:
    if key != "steps" or not form:
        return _pretty(form, depth)
    pad = "  " * (depth + 1)
    return "[\n" + ",\n".join(pad + json.dumps(step) for step in form) + "\n" + "  " * depth + "]"


def _filled(words: list[str], pad: str) -> str:
    """Fill lines with the items of an array."""
    lines, line = [], pad
    for word in [*(f"{item}," for item in words[:-1]), words[-1]]:
        if len(line) + len(word) > WIDTH and line != pad:
            lines.append(line.rstrip())
            line = pad
        line += word + " "
    return "\n".join([*lines, line.rstrip()])


def read(name: str) -> Baseline:
    """Read a baseline.

    Raises BadFile where it is missing, is none, or is not as it was written.
    """
    path = place(name)
    if not path.is_file():
        raise BadFile(f"there is no baseline at {path}. `provenance baseline record NAME RUN...` writes one.")
    form = export.form_of(path)
    head = form.get("baseline") if isinstance(form, dict) else None
    if not isinstance(head, dict) or form.get("schema") != export.BASELINE:
        raise BadFile(
            f"{path} is no baseline: its schema is not {export.BASELINE!r}; `provenance baseline record` writes one."
        )
    runs = export.runs_of(form, path)
    if head.get("digest") != _digest(form):
        raise BadFile(
            f"{path} is not as it was written: its digest is not that of its runs. Take it from git as it was, or "
            "record it again; --allow and --vary let a field differ."
        )
    return Baseline(path.name.removesuffix(SUFFIX), path, tuple(runs))


# -- recording --------------------------------------------------------------------------------------


def fit(run: Run) -> tuple[str, list[str]]:
    """Say why a run cannot be a part of a baseline, or nothing; and which fields each check will have to allow."""
    try:
        plan = plans.make(run)
    except UsageError as error:
        return str(error), []
    never = [item for item in plan.lost if item.level == NEEDED]
    if never:
        return f"run {run.run_id[:13]} cannot be replayed: {'; '.join(item.sentence for item in never)}.", []
    return "", [item.sentence for item in plan.lost if item.level == ASKED]


def distinct(runs: Iterable[Run]) -> tuple[list[Run], list[str]]:
    """Return the newest run of each call, and sentences about those that are left out for it."""
    newest: dict[object, Run] = {}
    told = []
    for run in sorted(runs, key=lambda run: (run.started_at, run.run_id)):
        asked = (
            run.key_id, run.digests.get("model"), run.digests.get("settings"), tuple(sorted(run.states.items())),
            tuple((item.row, item.ret, item.input_key or item.input_ids) for item in run.sequences),
        )  # fmt: skip
        earlier = newest.pop(asked, None)
        if earlier is not None:
            outputs = [[item.output_ids for item in side.sequences] for side in (earlier, run)]
            how = "the same call" if outputs[0] == outputs[1] else "the same call with ANOTHER output"
            told.append(f"run {earlier.run_id[:18]} is {how} as {run.run_id[:18]}, and is left out for it")
        newest[asked] = run
    return list(newest.values()), told


# -- checking ---------------------------------------------------------------------------------------


@dataclass(slots=True)
class Check:
    """What became of a baseline: every replay, and the divergence rate over all sequences that could be told."""

    name: str
    results: list[Result] = field(default_factory=list)
    fail_over: float | None = None

    def counts(self) -> tuple[int, int, int, int]:
        """Return how many sequences there are, how many could be told, how many differ, and how many of them fail."""
        cases = [case for result in self.results for case in result.cases()]
        ran = [case for result in self.results if not result.rerun.refused for case in result.cases()]
        told = [case for case in ran if case.verdict != INCONCLUSIVE]
        differing = [case for case in told if case.verdict != SAME]
        return len(cases), len(told), len(differing), sum(case.code == FAILED for case in differing)

    @property
    def code(self) -> int:
        """Return the exit code: 0 holds, 1 diverged, 3 could not tell."""
        _, told, _, failing = self.counts()
        codes = {result.code for result in self.results}
        if self.fail_over is not None:
            barred = any(result.code == FAILED and result.rerun.refused for result in self.results)
            over = told > 0 and failing / told > self.fail_over
            return FAILED if barred or over else UNTOLD if UNTOLD in codes else 0
        return FAILED if FAILED in codes else UNTOLD if UNTOLD in codes else 0

    @property
    def rate(self) -> tuple[float, float, float] | None:
        """Return the share of sequences that differ, with its 95 % interval (Wilson); None where none could be told."""
        _, told, differing, _ = self.counts()
        return (differing / told, *wilson(differing, told)) if told else None

    def document(self) -> dict[str, Any]:
        """Return it for JSON."""
        every, told, differing, failing = self.counts()
        rate = self.rate
        return {
            "schema": SCHEMA, "name": self.name, "exit": self.code, "sequences": every, "told": told,
            "diverged": differing, "failing": failing, "rate": rate[0] if rate else None,
            "interval": list(rate[1:]) if rate else None, "fail_over": self.fail_over,
            "runs": [result.document() for result in self.results],
        }  # fmt: skip


def check(
    held: Baseline,
    source: str | Callable[[], Any] | None,
    policy: Policy,
    *,
    own_switches: bool = False,
    fail_over: float | None = None,
    told: Callable[[str], None] = lambda _: None,
) -> Check:
    """Make every run of a baseline again and judge it. Each model is loaded once, for all runs that share it.

    Raises UsageError, BadFile or MissingExtra where a model cannot be had at all.
    """
    groups: dict[str, list[Run]] = {}
    for run in held.runs:
        groups.setdefault(load.key(run), []).append(run)
    made: dict[str, rerun.Rerun] = {}
    for runs in groups.values():
        once = load.Once(runs[0], source)  # the one before is let go of first
        for run in runs:
            told(f"replaying {run.run_id[:18]}")
            made[run.run_id] = rerun.rerun(run, once, policy.allowed, own_switches=own_switches, kind=held.kind)
    rerun.fetch(list(made.values()))
    return Check(held.name, [judge(made[run.run_id], policy) for run in held.runs], fail_over)
