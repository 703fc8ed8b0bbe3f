"""The answer of `drift` for people: lines with bars for a terminal, and one HTML page that loads nothing.

Only functions from the answer to text stand here. Labels are text of others: they are shown and never obeyed.
"""

# ruff: noqa: E501 - markup reads better in whole lines
from collections.abc import Iterator, Sequence
from datetime import UTC, datetime
from typing import Any

from provenance.explain.page import BOTTOM, HEIGHT, LEFT, POLICY, RIGHT, STYLE, TOP, WIDTH, shown

ROWS, BAR = 30, 30
SPARKS = "▁▂▃▄▅▆▇█"
CAME = 6
FLOOR = HEIGHT - BOTTOM
HEADLINES = {
    "measured": "Measured: {because}.", "under": "Holds: {because}.", "over": "Too much: {because}.",
    "unclear": "Could not tell: {because}.", "nothing": "Could not tell: {because}.",
}  # fmt: skip


def headline(answer: dict[str, Any]) -> str:
    """Return the one sentence that answers.

    >>> headline({"verdict": "nothing", "because": "no input was asked twice"})
    'Could not tell: no input was asked twice.'
    """
    return HEADLINES[answer["verdict"]].format(because=answer["because"])


def moment(hour: int, bucket: str) -> str:
    """Return the time at which a stretch begins, as text in UTC.

    >>> moment(490_000, "hour"), moment(490_008, "day"), moment(9_999_999_999, "day")
    ('2025-11-24 16:00', '2025-11-25', 'hour 9999999999')
    """
    try:
        when = datetime.fromtimestamp(hour * 3600, UTC)
    except (ValueError, OverflowError, OSError):
        return f"hour {hour}"
    return when.strftime("%Y-%m-%d %H:%M" if bucket == "hour" else "%Y-%m-%d")


def percent(value: float | None) -> str:
    """Return a share as text.

    >>> percent(0.0123), percent(0.0), percent(None)
    ('1.23 %', '0 %', 'none')
    """
    return "none" if value is None else f"{100 * value:.3g} %"


def told(item: dict[str, Any]) -> str:
    """Return a share with its interval as text."""
    return f"{item['differed']} of {item['pairs']} ({percent(item['share'])}, 95 %: {percent(item['low'])} to {percent(item['high'])})"


def evened(item: dict[str, Any]) -> str:
    """Return the share after normalisation as text, with what could not be told."""
    if not item["untold"]:
        return told(item)
    return (
        f"{item['differed_least']} to {item['differed_most']} of {item['pairs']} (95 %: {percent(item['low'])} to "
        f"{percent(item['high'])}; {item['untold']} pairs without their texts)"
    )


# -- the terminal -------------------------------------------------------------------------------------


def lines(answer: dict[str, Any]) -> list[tuple[str, str]]:
    """Return the answer as lines, each with a style: head, plain, cause, dim."""
    out = [("head", headline(answer))]
    if answer["missing"]:
        out.append(("plain", f"Missing: about {answer['missing']} more pairs, if the share stays what it is."))
    if not answer["raw"]["pairs"]:
        return out
    out.append(("plain", f"after normalisation ({answer['normalised']['profile']}): {evened(answer['normalised'])}"))
    for name, words in (("same_environment", "in one environment"), ("other_environment", "across two environments")):
        if answer[name]["pairs"]:
            out.append(("dim", f"{words}: {told(answer[name])}"))
    out += [("plain", ""), *bars(answer)]
    for item in answer["changes"]:
        out += [("plain", ""), *_change(item, answer["bucket"])]
    if not answer["changes"]:
        out += [("plain", ""), ("plain", "No change found.")]
    out.append(("dim", alarm(answer)))
    if answer["by"]:
        out += [("plain", ""), *_by(answer)]
    return out


def alarm(answer: dict[str, Any]) -> str:
    """Say how rare a false alarm is, and how late a real one."""
    said = answer["alarm"]
    seen = (
        f"a rise to {percent(said['to'])} is seen after {said['delay_pairs']} pairs of it, in 95 of 100 cases"
        if said["delay_pairs"] is not None
        else f"there are too few pairs to see a rise to {percent(said['to'])}"
    )
    return f"False alarms: at most {said['rate']:g} of looks at steady traffic; {seen}."


def merged(trend: Sequence[dict[str, Any]], rows: int) -> list[tuple[int, int, int]]:
    """Return hour, pairs and differing pairs of at most so many rows, by adding neighbours up.

    >>> merged([{"hour": n, "pairs": 2, "differed": n} for n in range(5)], 3)
    [(0, 4, 1), (2, 4, 5), (4, 2, 4)]
    """
    size = max(1, -(-len(trend) // rows))
    groups = (trend[place : place + size] for place in range(0, len(trend), size))
    return [(g[0]["hour"], sum(i["pairs"] for i in g), sum(i["differed"] for i in g)) for g in groups]


def bars(answer: dict[str, Any]) -> Iterator[tuple[str, str]]:
    """Draw the trend: one line a stretch of time, and a mark at each change."""
    rows = merged(answer["trend"], ROWS)
    most = max((differed / pairs for _, pairs, differed in rows if pairs), default=0.0)
    marks = [item["hour"] for item in answer["changes"]]
    for n, (hour, pairs, differed) in enumerate(rows):
        end = rows[n + 1][0] if n + 1 < len(rows) else hour + 1_000_000
        share = differed / pairs if pairs else 0.0
        bar = "█" * max(round(BAR * share / most), 1 if differed else 0) if most else ""
        mark = "  ◂ changed" if any(hour <= at < end for at in marks) else ""
        text = f"{percent(share):>8}" if pairs else f"{'no pair':>8}"
        yield "cause" if mark else "plain", f"{moment(hour, answer['bucket'])}  {pairs:>9} pairs {text}  {bar}{mark}"


def spark(trend: Sequence[dict[str, Any]], most: int = 40) -> str:
    """Draw a trend in one line; a stretch without pairs is a dot.

    >>> spark([{"hour": n, "pairs": n % 3, "differed": int(n == 4)} for n in range(6)])
    '·▁▁·█▁'
    """
    shares = [differed / pairs if pairs else None for _, pairs, differed in merged(trend, most)]
    top = max((item for item in shares if item is not None), default=0.0)
    return "".join("·" if s is None else SPARKS[round((len(SPARKS) - 1) * s / top) if top else 0] for s in shares)


def _change(item: dict[str, Any], bucket: str) -> Iterator[tuple[str, str]]:
    word = "rose" if item["rose"] else "fell"
    chance = f"p {10 ** item['log10_p']:.2g}" if item["log10_p"] > -300 else f"p 1e{item['log10_p']:.0f}"
    yield "cause", f"The share {word} at {moment(item['hour'], bucket)} ({chance}, all borders counted)"
    yield "plain", f"   before: {told(item['before'])}"
    yield "plain", f"   after:  {told(item['after'])}"
    for found in item["came"][:CAME]:
        yield "plain", f"   came with it: {found['field']}  {found['before']:.60} -> {found['after']:.60}"
    if len(item["came"]) > CAME:
        yield "dim", f"   and {len(item['came']) - CAME} more fields; --json lists them"


def _by(answer: dict[str, Any]) -> Iterator[tuple[str, str]]:
    for item in answer["by"]:
        yield "head", item["label"]
        yield "plain", f"   {told(item['raw'])}   {spark(item['trend'])}"
        for change in item["changes"]:
            word = "rose" if change["rose"] else "fell"
            yield (
                "cause",
                f"   {word} at {moment(change['hour'], answer['bucket'])}: {told(change['before'])} before, {told(change['after'])} after",
            )


# -- the page -----------------------------------------------------------------------------------------


def page(answer: dict[str, Any]) -> str:
    """Return the answer as one HTML file that loads nothing and needs no script."""
    title = shown(headline(answer))
    facts = [
        ("pairs", str(answer["raw"]["pairs"])),
        ("raw", told(answer["raw"])),
        ("after normalisation", evened(answer["normalised"])),
    ]
    cells = "".join(f"<div><dt>{shown(name)}</dt><dd>{shown(value)}</dd></div>" for name, value in facts)
    changes = "".join(
        "<article>" + "".join(f"<p>{shown(text)}</p>" for _, text in _change(item, answer["bucket"])) + "</article>"
        for item in answer["changes"]
    )
    kind = {"over": "divergent", "under": "same", "measured": "same"}.get(answer["verdict"], "inconclusive")
    parts = [
        f'<header><span class="badge {kind}">{shown(answer["verdict"])}</span><h1>{title}</h1><dl>{cells}</dl></header>',
        f"<section><h2>Share of pairs that differ, by the {shown(answer['bucket'])}</h2>{plot(answer)}</section>",
        f'<section><h2>Changes</h2>{changes or "<p>No change found.</p>"}<p class="note">{shown(alarm(answer))}</p></section>',
        *_labels(answer),
    ]
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}"><meta name="color-scheme" content="light dark">'
        f"<title>{title}</title><style>{STYLE}</style>"
    )
    return (
        f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body><main>\n'
        + "\n".join(parts)
        + "\n</main></body></html>\n"
    )


def plot(answer: dict[str, Any]) -> str:
    """Draw the share of each stretch with its interval, the changes and the limit."""
    trend = [item for item in answer["trend"] if item["pairs"]]
    if not trend:
        return "<p>There is no pair to draw.</p>"
    first: int = answer["trend"][0]["hour"]
    last: int = max(answer["trend"][-1]["hour"], answer["trend"][0]["hour"] + 1)
    most: float = min(1.0, 1.2 * max(*(item["share"] for item in trend), answer["raw"]["high"], answer["limit"] or 0.0))

    def x(hour: float) -> float:
        return round(LEFT + (WIDTH - LEFT - RIGHT) * (hour - first) / (last - first), 1)

    def y(value: float) -> float:
        return round(TOP + (FLOOR - TOP) * (1 - min(value / most, 1)), 1)

    out = []
    for part in range(5):
        at = y(most * part / 4)
        out.append(f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>')
        out.append(f'<text x="{LEFT - 8}" y="{at + 4}" text-anchor="end">{percent(most * part / 4)}</text>')
    for hour, anchor in ((first, "start"), (last, "end")):
        out.append(
            f'<text x="{x(hour)}" y="{HEIGHT - 10}" text-anchor="{anchor}">{moment(hour, answer["bucket"])}</text>'
        )
    if answer["limit"] is not None:
        out.append(
            f'<line class="line b" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{y(answer["limit"])}" y2="{y(answer["limit"])}"/>'
        )
    for item in answer["changes"]:
        out.append(f'<line class="cut" x1="{x(item["hour"])}" x2="{x(item["hour"])}" y1="{TOP}" y2="{FLOOR}"/>')
    for item in trend:
        where = x(item["hour"])
        out.append(f'<line class="line a" x1="{where}" x2="{where}" y1="{y(item["low"])}" y2="{y(item["high"])}"/>')
        out.append(
            f'<circle class="dot a" cx="{where}" cy="{y(item["share"])}" r="3"><title>{moment(item["hour"], answer["bucket"])}: {told(item)}</title></circle>'
        )
    return f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="Share of pairs that differ over time">{"".join(out)}</svg>'


def _labels(answer: dict[str, Any]) -> Iterator[str]:
    if not answer["by"]:
        return
    rows = "".join(
        f"<tr><td>{shown(item['label'])}</td><td>{shown(told(item['raw']))}</td><td>{shown(evened(item['normalised']))}</td><td>{spark(item['trend'])}</td></tr>"
        for item in answer["by"]
    )
    heads = "".join(f"<th>{name}</th>" for name in ("label", "raw", "after normalisation", "trend"))
    yield f'<section><h2>By label</h2><div class="wide"><table><thead><tr>{heads}</tr></thead><tbody>{rows}</tbody></table></div></section>'
