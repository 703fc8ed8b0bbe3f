"""drift: how often equal inputs gave unequal outputs, since when, and whether that is too often."""

import sys
import time
from pathlib import Path
from typing import Annotated, Any

import typer
from sqlalchemy import Engine

from provenance.cli import render
from provenance.cli.blame import moment
from provenance.cli.opened import Db, Json, store
from provenance.cli.replay import Allow, Model, policy, progress, record_into
from provenance.errors import BadSetting, UsageError
from provenance.explain import drift as explained
from provenance.explain import trend
from provenance.explain.drift import Bucket, Series
from provenance.facts import Run
from provenance.store import drift as counts
from provenance.store import queries

PROBED = 20
SHOWN = 5  # inputs that diverged last
LABELS = 100


drift = typer.Typer(invoke_without_command=True, rich_markup_mode=None)


@drift.callback()
def measure(
    context: typer.Context,
    since: Annotated[str, typer.Option("--since", help="Only runs since: 2026-01-31, or 7d, 24h, 30m ago.")] = "",
    until: Annotated[str, typer.Option("--until", help="Only runs until then, in the same words.")] = "",
    by: Annotated[str, typer.Option("--by", help="Also apart by: model, host, gpu or version.")] = "",
    fail_over: Annotated[
        float | None, typer.Option("--fail-over", help="Exit 1 if more than this share of pairs differs, like 0.01.")
    ] = None,
    html: Annotated[Path | None, typer.Option("--html", help="Write a page into this file.")] = None,
    json: Json = False,
    db: Db = "",
) -> int:
    """Say how often equal inputs gave unequal outputs: share, interval, trend, and when it changed.

    Exit code 0: measured, and not over --fail-over; 1: over it, by the lower end of the interval; 3: too few pairs.
    """
    if context.invoked_subcommand is not None:
        return 0
    if by and by not in counts.BY:
        raise BadSetting(f"--by {by!r} is none of {', '.join(counts.BY)}.")
    if fail_over is not None and not 0 < fail_over < 1:
        raise BadSetting(f"--fail-over {fail_over:g} is no share; it lies between 0 and 1, as 0.01 does.")
    span = _span(since, until)
    engine = store(db)
    answer = told(engine, span, by, fail_over)
    if html is not None:
        html.write_text(trend.page(answer), encoding="utf-8")
    if json:
        render.emit(answer)
    else:
        render.lines([*trend.lines(answer), *_latest(answer)])
    return explained.EXIT[answer["verdict"]]


@drift.command("probe")
def probe(
    references: Annotated[list[str] | None, typer.Argument(metavar="[RUN]...", help="Runs to ask again.")] = None,
    from_tag: Annotated[str, typer.Option("--from-tag", metavar="TAG", help="Calls with this name or tag.")] = "",
    last: Annotated[int, typer.Option("--last", min=1, max=1000, help="So many of the newest calls.")] = PROBED,
    model: Model = "",
    allow: Allow = None,
    fail_over: Annotated[
        float | None, typer.Option("--fail-over", metavar="RATE", help="Fail only if more sequences diverge: 0 to 1.")
    ] = None,
    json: Json = False,
    db: Db = "",
) -> int:
    """Ask recorded questions again, for a service so quiet that equal inputs seldom meet, and count the answers.

    Each call is made again as `replay` does it, its model loaded anew, and recorded as a run of kind `probe`, which
    `drift` counts as traffic. Of calls that were made several times the newest stands; probes are not asked again.

    Exit code 0: all answers held; 1: some did not, or the weights are others; 3: could not tell.
    """
    from provenance.cli import baseline
    from provenance.replay import baseline as baselines
    from provenance.replay.rerun import PROBE

    if fail_over is not None and not 0 <= fail_over <= 1:
        raise BadSetting(f"--fail-over is {fail_over}; write a share from 0 to 1, as 0.01.")
    kept = _questions(references or [], from_tag, last, db)
    rules = policy(kept, allow, None, "")
    record_into(db)
    held = baselines.Baseline("drift probe", Path(), tuple(kept), PROBE)
    found = baselines.check(held, model or None, rules, fail_over=fail_over, told=progress)
    if json:
        render.emit(found.document())
    else:
        baseline.tell(found, explain=False)
    return found.code


def _questions(references: list[str], from_tag: str, last: int, db: str) -> list[Run]:
    """Return the runs to be asked again, each question once. Raises BadSetting or UsageError."""
    from provenance.cli import baseline
    from provenance.replay import baseline as baselines

    if references and from_tag:
        raise BadSetting("name runs, or give --from-tag TAG, and not both.")
    wanted = baseline.chosen(references, from_tag, 0 if references else last, db)
    given, dropped = baseline.fitting(wanted, strict=bool(references))
    for text in dropped:
        sys.stderr.write(f"provenance: {render.visible(text.rstrip('.'))}.\n")
    kept, _ = baselines.distinct(given)
    if not kept:
        raise UsageError("none of these runs can be asked again.")
    return kept


def _span(since: str, until: str) -> counts.Span:
    now = time.time_ns()
    start, end = moment(since, now) if since else 0, moment(until, now, "--until") if until else counts.Span().until
    if start >= end:
        raise BadSetting(f"--since {since!r} is not before --until {until!r}: there is no time between them.")
    return counts.Span(start, end)


def told(engine: Engine, span: counts.Span, by: str = "", limit: float | None = None) -> dict[str, Any]:
    """Return the answer to a question to the store."""
    hours = counts.width(engine, span)
    whole = gathered(counts.counted(engine, span, hours), hours)
    parts = gathered(counts.counted(engine, span, hours, by), hours) if by else []
    parts.sort(key=lambda item: (-sum(bucket.pairs for bucket in item.buckets), item.label))
    answer = explained.answer(whole[0] if whole else Series("", ()), parts[:LABELS], limit, hours)
    for item in answer["changes"]:
        item["came"] = _came(engine, item["hour"], hours)
    first = counts.counting_since(engine)
    answer |= {
        "since": span.since // 1_000_000_000, "until": min(span.until, time.time_ns()) // 1_000_000_000,
        "labels": len(parts), "counted_since_hour": first, "diverged_inputs": counts.diverged(engine, span),
        "latest": [{"input": item.text_in, "runs": item.runs, "try": item.commands[:1]}
                   for item in queries.incidents(engine, SHOWN, diverged=True)],
    }  # fmt: skip
    return answer


def gathered(rows: Any, hours: int) -> list[Series]:
    """Put counts into one series a label, each stretch of time in its place; a stretch without pairs is empty."""
    found: dict[str, dict[int, Bucket]] = {}
    sides: dict[str, list[Bucket]] = {}
    for row in rows:
        buckets = found.setdefault(row.label, {})
        made = Bucket(row.start, row.pairs, row.differed, row.surface, row.untold)
        buckets[row.start] = buckets.get(row.start, Bucket(row.start)) + made
        side = sides.setdefault(row.label, [Bucket(), Bucket()])
        side[row.across] += made
    starts = sorted({start for buckets in found.values() for start in buckets})
    whole = range(starts[0], starts[-1] + 1, hours) if starts else ()
    return [
        Series(label, [buckets.get(start, Bucket(start)) for start in whole], *sides[label])
        for label, buckets in found.items()
    ]


def _came(engine: Engine, hour: int, hours: int) -> list[dict[str, Any]]:
    """Return what is new in the environments that were first seen where the share changed, each field once."""
    found: dict[str, dict[str, Any]] = {}
    for item in counts.arrivals(engine, hour, hours):
        for field in explained.came(item.before, item.after):
            found.setdefault(field["field"], field)
    return list(found.values())


def _latest(answer: dict[str, Any]) -> list[tuple[str, str]]:
    """Name what diverged last, with the command that explains it."""
    out: list[tuple[str, str]] = []
    if answer["raw"]["differed"]:
        out = [
            ("plain", ""),
            ("plain", f"{answer['diverged_inputs']} inputs have given more than one output. The latest:"),
        ]
        for item in answer["latest"]:
            out.append(("plain", f"   {render.clip(item['input'] or 'input not kept', 60)}  ({item['runs']} runs)"))
            out += [("dim", f"      {command}") for command in item["try"]]
    return out
