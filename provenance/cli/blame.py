"""blame: which fields go with divergence, over all runs of equal inputs in the store."""

import re
import time
from datetime import UTC, datetime
from typing import Annotated, Any

import typer
from sqlalchemy import Engine

from provenance.cli import render
from provenance.cli.opened import Db, Json, Runs, split, store
from provenance.errors import BadSetting
from provenance.explain import blame as explained
from provenance.explain.history import Observation
from provenance.store import history, queries

UNITS = {"m": 60, "h": 3600, "d": 86_400, "w": 604_800}
LIMIT = 100_000
CONFOUNDED = 8  # more are counted and not listed; --json has them all


def blame(
    reference: Annotated[str, typer.Argument(metavar="[RUN]", help="Only the inputs of this run.")] = "",
    key: Annotated[str, typer.Option("--input", help="Only this input: the beginning of its key.")] = "",
    since: Annotated[str, typer.Option("--since", help="Only runs since: 2026-01-31, or 7d, 24h, 30m ago.")] = "",
    model: Annotated[list[str] | None, typer.Option("--model", help="Only runs of this model, by its name.")] = None,
    limit: Annotated[int, typer.Option("--limit", "-n", min=2, help="The newest so many outputs.")] = LIMIT,
    rate: Annotated[float, typer.Option("--rate", help="The false-discovery rate.")] = explained.RATE,
    json: Json = False,
    db: Db = "",
) -> int:
    """Say which fields go with divergence, over all runs of equal inputs: exact tests, confounders, noise floor.

    Exit code 0: nothing is accused; 1: something is; 3: too little data.
    """
    if not 0 < rate < 1:
        raise BadSetting(f"--rate {rate:g} is no false-discovery rate; it lies between 0 and 1, as 0.001 does.")
    start = moment(since, time.time_ns()) if since else 0
    if reference and key:
        raise BadSetting("a run and --input both say which inputs to take; give one of them.")
    engine = store(db)
    inputs = _inputs(engine, db, reference, key)
    chosen = history.Chosen(inputs, model or (), start, limit)
    seen = history.groups(engine, chosen)
    answer = explained.blame(([Observation(*run) for run in group] for group in seen), rate)
    if json:
        render.emit(answer)
    else:
        render.lines(lines(answer))
    return explained.EXIT[answer["verdict"]]


def _inputs(engine: Engine, db: str, reference: str, key: str) -> list[bytes] | None:
    """Return the inputs that were asked for; None is all."""
    if key:
        return [history.input_key(engine, key)]
    if not reference:
        return None
    name, place = split(reference)
    if place is None:
        return history.inputs_of(engine, queries.find(engine, name))
    run, _ = Runs(db).find(name)
    found = [s.input_key for s in run.sequences if s.row == place[0] and place[1] in (None, s.ret)]
    if not found:
        raise BadSetting(f"run {run.run_id[:13]} has no row {place[0]}; `provenance show` lists its rows.")
    return [bytes.fromhex(item) for item in found if item]


def moment(text: str, now: int, option: str = "--since") -> int:
    """Return the time that a text means, in nanoseconds: a date in UTC, or so long ago.

    >>> moment("2026-01-31", 0), moment("2h", 7_200_000_000_001)
    (1769817600000000000, 1)
    """
    match = re.fullmatch(r"([0-9]{1,6})([mhdw])", text.strip().lower())
    if match:
        return max(0, now - int(match[1]) * UNITS[match[2]] * 1_000_000_000)
    try:
        when = datetime.fromisoformat(text.strip())
        return int((when if when.tzinfo else when.replace(tzinfo=UTC)).timestamp()) * 1_000_000_000
    except (ValueError, OverflowError):
        raise BadSetting(f"{option} {text!r} is no time; write a date as 2026-01-31, or 7d, 24h, 30m.") from None


# -- for people ---------------------------------------------------------------------------------------


def lines(answer: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the answer as styled lines."""
    pairs = answer["pairs"]
    numbers = (
        f"runs {answer['runs']}, inputs {answer['inputs']}, pairs {pairs['pairs']}, diverged {pairs['diverged']}; "
        f"fields that differ somewhere: {answer['tested']['fields']}."
    )
    out = [("head", answer["because"][:1].upper() + answer["because"][1:] + "."), ("dim", numbers)]
    for number, item in enumerate(answer["accused"], 1):
        out += [("plain", ""), *_accused(number, item)]
    for item in answer["inputs_only"][:CONFOUNDED]:
        out.append(("plain", f"not accused: {_names(item)} {item['because']}."))
    out += [("plain", ""), ("plain", f"Noise floor: {answer['noise']['because']}.")]
    left = answer["left"]
    if left is not None and left["pairs"]:
        equal = "it is" if len(answer["accused"]) == 1 else "these are"
        out.append(("plain", f"Where {equal} equal, {_share(left)} still diverge."))
    if answer["never_equal"] and not answer["noise"]["pairs"]:
        names = ", ".join(answer["never_equal"][:6]) + (" and others" if len(answer["never_equal"]) > 6 else "")
        out.append(("dim", f"Differs in every pair, so that nothing can be said of it: {names}."))
    if answer["accused"]:
        out.append(("dim", "This is what goes together; running it again with that one field changed is the proof."))
    return out


def _accused(number: int, item: dict[str, Any]) -> list[tuple[str, str]]:
    more = item["difference"]
    size = (
        f"   {_points(more['value'])} percentage points more ({_points(more['low'])} to {_points(more['high'])}), "
        f"p {_power(item['log10_p'])}"
    )
    out = [
        ("cause", f"{number}. {item['field']}  ({item['effect']})"),
        ("plain", f"   differs: {_share(item['differed'])} diverged"),
        ("plain", f"   equal:   {_share(item['equal'])} diverged"),
        ("plain", size),
    ]
    if item["with"]:
        out.append(("plain", f"   always moves with {', '.join(item['with'])}: they cannot be told apart"))
    for change in item["changes"]:
        values = f"{render.clip(change['a'], 30)} against {render.clip(change['b'], 30)}"
        out.append(("dim", f"   {values}: {change['diverged']} of {change['pairs']} diverged"))
    if not item["inputs_held"]:
        out.append(("dim", "   inputs were run too few times to rule out that it differs on those that diverge easily"))
    for other in item["confounded"][:CONFOUNDED]:
        out.append(("plain", f"   confounded: {_names(other)}, {other['because']}"))
    if len(item["confounded"]) > CONFOUNDED:
        out.append(("plain", f"   and {len(item['confounded']) - CONFOUNDED} more; --json lists them"))
    return out


def _names(item: dict[str, Any]) -> str:
    return f"{item['field']} (with {', '.join(item['with'])})" if item["with"] else str(item["field"])


def _share(item: dict[str, Any]) -> str:
    if not item["pairs"]:
        return "no pair"
    share, low, high = (_points(item[name]) for name in ("share", "low", "high"))
    return f"{item['diverged']} of {item['pairs']} ({share} %, 95 %: {low} to {high})"


def _points(value: float) -> str:
    return f"{100 * value:.3g}"


def _power(log10: float) -> str:
    return f"{10**log10:.2g}" if log10 > -4 else f"1e{log10:.0f}"


__all__ = ["blame", "lines", "moment"]
