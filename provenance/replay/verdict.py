"""What a replay says: its verdict against the original, through the explainer, and the exit code that follows."""

from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

from provenance.errors import AmbiguousRows
from provenance.explain import compare, own, reports, story
from provenance.explain.compare import INCONCLUSIVE, NOT_COMPARABLE, SAME
from provenance.facts import Run
from provenance.replay.rerun import Named, Rerun

SCHEMA = "provenance/replay/1"
FAILED = "failed"  # the call was made again, and raised


@dataclass(slots=True)
class Policy:
    """What may differ, what was meant to, and which verdicts fail (None: all but ``same``)."""

    allowed: Named = lambda _: False
    declared: Named = lambda _: False
    failing: Collection[str] | None = None


@dataclass(slots=True)
class Result:
    """One replay, judged. ``answer`` is the explainer's document, where both sides have an output."""

    rerun: Rerun
    verdict: str
    code: int
    why: str
    answer: dict[str, Any] | None = None

    @property
    def original(self) -> Run:
        """Return the run that was replayed."""
        return self.rerun.original

    def cases(self) -> list[reports.Case]:
        """Return one case for each sequence. Where nothing was compared, each shares what became of the call."""
        if self.answer is not None:
            return reports.cases(self.answer)
        sides = [{"run": self.original.run_id, "prompt": s.row, "return": s.ret} for s in self.original.sequences]
        bare = reports.Case("", {}, {}, self.verdict, self.code, allowed=False, causes=(), at=None)
        return [bare._replace(name=story.place(side), a=side, b=side) for side in sides]

    def told(self) -> list[reports.Told]:
        """Return its sequences for JUnit, named by the original."""
        if self.answer is not None:
            pairs = zip(reports.told(self.answer), self.cases(), strict=True)
            return [item._replace(name=story.place(case.a)) for item, case in pairs]
        return [reports.Told(case.name, case.code, case.verdict, self.why) for case in self.cases()]

    def document(self) -> dict[str, Any]:
        """Return it for JSON."""
        lost = [
            {"field": item.field, "because": item.because, "forbids": item in self.rerun.refused}
            for item in self.rerun.lost
        ]  # fmt: skip
        return {
            "original": self.original.run_id, "replay": self.rerun.run_id or None, "verdict": self.verdict,
            "exit": self.code, "because": self.why, "not_restored": lost, "answer": self.answer,
        }  # fmt: skip


def judge(rerun: Rerun, policy: Policy) -> Result:
    """Compare a replay with its original."""
    if rerun.refused:
        verdict = NOT_COMPARABLE if rerun.other_weights else INCONCLUSIVE
        return Result(rerun, verdict, _code(verdict, policy), _refusal(rerun))
    if rerun.error:
        return Result(rerun, FAILED, reports.FAILED, f"the call raised when it was made again: {rerun.error}")
    if rerun.run is None or not rerun.run.sequences:
        why = "the replay was not recorded in full, so there is nothing to compare"
        return Result(rerun, INCONCLUSIVE, reports.UNTOLD, why)
    try:
        answer = compare.compare(rerun.original, rerun.run, declared=policy.declared)
    except AmbiguousRows as error:
        return Result(rerun, INCONCLUSIVE, reports.UNTOLD, str(error))
    code = reports.settle(answer, policy.failing, policy.allowed)
    return Result(rerun, answer["verdict"], code, told(answer), answer)


def _code(verdict: str, policy: Policy) -> int:
    if policy.failing is not None and verdict == NOT_COMPARABLE:
        return reports.FAILED if verdict in policy.failing else 0
    return compare.EXIT[verdict]


def _refusal(rerun: Rerun) -> str:
    told = "; ".join(item.sentence for item in rerun.refused)
    needed = [item.field for item in rerun.refused if item.level == 1]
    names = dict.fromkeys("weights" if name.startswith("weights.") else name for name in needed)
    if len(needed) < len(rerun.refused):
        return f"it was not run: {told}"
    return f"it was not run: {told}; {' '.join(f'--allow {name}' for name in names)} runs it all the same"


def told(answer: dict[str, Any]) -> str:
    """Say in a sentence what an answer found: the verdict, the token, and the first cause."""
    if answer["verdict"] == SAME:
        return "the outputs are equal"
    text = reports.RULES[answer["verdict"]].lower()
    at = answer["outputs"]["first_divergent_token"]
    where = f", from token {at} on" if at is not None else ""
    blamed = own.blamed(answer["causes"])
    if not blamed:
        said = story.unblamed(answer)
        return f"{text}{where}; {said[0].lower()}{said[1:-1]}"
    first = blamed[0]
    return f"{text}{where}; likely {first['field']}: {_side(first['a'])} then, {_side(first['b'])} now"


def _side(item: object) -> str:
    text = str(item.get("state", item)) if isinstance(item, dict) else str(item)
    return text if len(text) <= 60 else text[:59] + "…"


def named(given: Collection[str], runs: Collection[Run]) -> Callable[[str], bool]:
    """Return what says whether a field is meant; ``weights`` stands for all that names them.

    Raises BadSetting for a name that no field has.
    """
    from provenance.determinism import lock

    expanded = ["weights.*" if name == "weights" else name for name in given]
    checked = lock.patterns(expanded, {name for run in runs for name in run.fields})
    return lambda name: lock.matches(name, checked)
