"""The answer as one HTML file, for an incident: it loads nothing, needs no script, and is read in dark and in light.

Text of others is made visible and escaped, and a policy in the page forbids it to load anything even if an escape
were missing. Only functions from the answer and the runs to text stand here.
"""

# ruff: noqa: E501 - a style sheet and markup read better in whole lines
import math
import re
from collections.abc import Iterator, Mapping
from collections.abc import Sequence as Many
from dataclasses import replace
from html import escape
from typing import Any, NamedTuple

from provenance.catalogue.fields import spec
from provenance.explain import conditions, fields, own, story
from provenance.explain.story import Text
from provenance.facts import Field, Run, Sequence, Step

BEFORE, AFTER = 24, 24  # tokens shown around the place where the outputs part
TEXT_CHARS, ROWS = 4000, 400
WIDTH, HEIGHT, LEFT, BOTTOM, TOP, RIGHT = 960, 260, 64, 34, 14, 16
FLOOR = HEIGHT - BOTTOM
POINTS, POWERS = 480, 300
LAYERS = {
    "weights": ("weights", "model"), "tokenizer": ("tokenizer",), "prompt": ("input",),
    "settings": ("generation",), "prefill and decode": (
        "batch", "hardware", "driver", "libraries", "framework_flags", "determinism_flags", "environment_variables",
        "runtime_engine"), "sampler": ("seeds_rng",), "service": ("service",), "other": ("other",),
}  # fmt: skip
LAYER = {group: layer for layer, groups in LAYERS.items() for group in groups}
COMMAND = re.compile("`([^`]*)`")
POLICY = "default-src 'none'; style-src 'unsafe-inline'; base-uri 'none'; form-action 'none'"


def page(
    answer: dict[str, Any], run_a: Run, run_b: Run, text_a: Text = lambda _: None, text_b: Text = lambda _: None
) -> str:
    """Return the page. The runs are those of the answer; ``text_a`` gives the text of a token of A."""
    a, b = (_undrawn(run, _sequence(run, answer[side])) for run, side in ((run_a, "a"), (run_b, "b")))
    parts = [_head(answer), _many(answer)]
    if answer["verdict"] != "same":
        at = answer["outputs"]["first_divergent_token"]
        parts += [_tokens(a, b, at, text_a, text_b), _texts(a, b), _plot(answer, a, b)]
    parts += [
        _causes(answer),
        _advice(answer),
        *_lists(answer),
        _by_layer(answer, fields.of_sequence(run_a, a), fields.of_sequence(run_b, b)),
    ]
    title = escape(f"{story.headline(answer)} {_short(answer['a']['run'])} and {_short(answer['b']['run'])}")
    head = (
        '<meta charset="utf-8"><meta name="viewport" content="width=device-width, initial-scale=1">'
        f'<meta http-equiv="Content-Security-Policy" content="{POLICY}">'
        f'<meta name="color-scheme" content="light dark"><title>{title}</title><style>{STYLE}</style>'
    )
    body = "\n".join(part for part in parts if part)
    return f'<!doctype html>\n<html lang="en"><head>{head}</head>\n<body><main>\n{body}\n</main></body></html>\n'


def shown(value: object) -> str:
    r"""Return text that is safe in a page: what would act is seen, what would be markup is escaped.

    >>> shown("<b>\u202e")
    '&lt;b&gt;\\u202e'
    """
    return escape(story.visible(str(value)), quote=True)


def _short(run: str) -> str:
    return story.visible(run[:18])


def _sequence(run: Run, side: dict[str, Any]) -> Sequence:
    return next(item for item in run.sequences if item.row == side["prompt"] and item.ret == side["return"])


def _section(title: str, body: str, note: str = "") -> str:
    told = f'<p class="note">{note}</p>' if note else ""
    return f"<section><h2>{title}</h2>{told}{body}</section>" if body else ""


def _table(heads: Many[str], rows: Many[Many[str]]) -> str:
    top = "".join(f"<th>{head}</th>" for head in heads)
    body = "".join("<tr>" + "".join(f"<td>{cell}</td>" for cell in row) + "</tr>" for row in rows[:ROWS])
    more = f'<p class="note">and {len(rows) - ROWS} more</p>' if len(rows) > ROWS else ""
    return f'<div class="wide"><table><thead><tr>{top}</tr></thead><tbody>{body}</tbody></table></div>{more}'


# -- what happened ----------------------------------------------------------------------------------


def _head(answer: dict[str, Any]) -> str:
    outputs, change = answer["outputs"], answer["outputs"]["logit_change"]
    at = outputs["first_divergent_token"]
    facts = [("layer", answer["layer"] or "none"), ("first divergent token", "none" if at is None else at)]
    if change is not None:
        facts.append(("logits had moved by", f"{change['max_abs']:.3g} ({change['ulps']:.3g} ulp)"))
        facts.append(("rounding explains", f"{change['rounding_allows']:.3g}"))
    elif "no_evidence" in outputs:
        facts.append(("token evidence", outputs["no_evidence"]))
    cells = "".join(f"<div><dt>{shown(name)}</dt><dd>{shown(value)}</dd></div>" for name, value in facts)
    sides = "".join(
        f'<p><b class="{s}">{s.upper()}</b> <code>{shown(story.place(answer[s]))}</code></p>' for s in ("a", "b")
    )
    badge = f'<span class="badge {shown(answer["verdict"])}">{shown(answer["verdict"].replace("_", " "))}</span>'
    return f"<header>{badge}<h1>{shown(story.headline(answer))}</h1>{sides}<dl>{cells}</dl></header>"


def _many(answer: dict[str, Any]) -> str:
    if not answer["runs"]:
        return ""
    heads, *rows = story.table(answer)
    cells = [[shown(cell) for cell in row] for row in rows]
    count = len(answer["groups"])
    title = f"{len(answer['runs'])} runs, {count} output{'s' if count != 1 else ''}"
    return _section(title, _table([shown(head) for head in heads], cells), shown(answer["split"]["told"]))


def _tokens(a: Sequence, b: Sequence, at: int | None, text_a: Text, text_b: Text) -> str:
    """Show the tokens around the place where the two part, one above the other."""
    if a.output_ids is None or b.output_ids is None or at is None:
        return ""
    longest = max(len(a.output_ids), len(b.output_ids))
    start, end = max(0, at - BEFORE), min(longest, at + AFTER + 1)
    columns = [f'<span class="gap">{start} equal tokens …</span>'] if start else []
    for index in range(start, end):
        kind = "equal" if index < at else "parts" if index == at else "after"
        chips = _chip(a, index, text_a, f"{kind} of-a"), _chip(b, index, text_b, f"{kind} of-b")
        mark = f' aria-label="token {index}, where the outputs part"' if index == at else ""
        columns.append(f'<span class="column" title="token {index}"{mark}>{chips[0]}{chips[1]}</span>')
    if end < longest:
        columns.append(f'<span class="gap">… {longest - end} more</span>')
    note = 'Each column is a token: <b class="a">A</b> above, <b class="b">B</b> below, its margin to the runner-up in small.'
    return _section("Where they part", f'<div class="strip">{"".join(columns)}</div>', note)


def _chip(one: Sequence, index: int, text: Text, kind: str) -> str:
    ids = one.output_ids or ()
    if index >= len(ids):
        ended = f"ended: {shown(one.finish)}" if index == len(ids) else ""
        return f'<span class="token none">{ended}</span>'
    step = one.steps[index] if index < len(one.steps) else None
    piece = text(ids[index])
    margin = f"{step.margin:.3g}" if step is not None and step.margin is not None else ""
    label = shown(ids[index] if piece is None else piece.replace(" ", "␣"))
    return f'<span class="token {kind}">{label}<small>{margin}</small></span>'


def _texts(a: Sequence, b: Sequence) -> str:
    one, other = a.output_text, b.output_text
    if one is None or other is None:
        return ""
    common = next((n for n, (x, y) in enumerate(zip(one, other, strict=False)) if x != y), min(len(one), len(other)))
    start = max(0, common - TEXT_CHARS // 4)
    cells = "".join(
        f'<div><b class="{name}">{name.upper()}</b><pre>{"… " if start else ""}{_lines(text[start:common])}'
        f"<mark>{_lines(text[common : start + TEXT_CHARS]) or '∎'}</mark>{' …' if len(text) > start + TEXT_CHARS else ''}"
        "</pre></div>"
        for name, text in (("a", one), ("b", other))
    )
    return _section("The two outputs", f'<div class="sides">{cells}</div>')


def _lines(text: str) -> str:
    return "\n".join(shown(line) for line in text.split("\n"))


# -- the plot ---------------------------------------------------------------------------------------


class Scale(NamedTuple):
    """Where a token and a margin lie in the picture: margins by powers of ten."""

    last: int
    low: int
    high: int

    def x(self, index: float) -> str:
        """Return the place of a token."""
        return f"{LEFT + (WIDTH - LEFT - RIGHT) * min(index, self.last) / self.last:.1f}"

    def y(self, value: float) -> float:
        """Return the place of a margin; none at all lies on the floor."""
        power = min(max(math.log10(value) if value > 0 else self.low, self.low), self.high)
        return round(TOP + (FLOOR - TOP) * (self.high - power) / (self.high - self.low), 1)


def _undrawn(run: Run, sequence: Sequence) -> Sequence:
    """Leave out the margins of tokens that were drawn: there they say nothing."""
    if not conditions.drew(run):
        return sequence
    return replace(sequence, steps=tuple(replace(step, margin=None) for step in sequence.steps))


def _plot(answer: dict[str, Any], a: Sequence, b: Sequence) -> str:
    """Draw the margins along the sequence, with what rounding explains beneath them."""
    lines = [("a", _margins(a.steps)), ("b", _margins(b.steps))]
    values = [value for _, line in lines for _, value in line if value > 0]
    if not values:
        return ""
    change, at = answer["outputs"]["logit_change"], answer["outputs"]["first_divergent_token"]
    allowed = change["rounding_allows"] if change is not None else 0.0
    known = [*values, allowed] if 0 < allowed < math.inf else values
    low = max(math.floor(math.log10(min(known))), -POWERS)
    high = max(min(math.ceil(math.log10(max(known))), POWERS), low + 1)
    scale = Scale(max(len(a.steps), len(b.steps), 2) - 1, low, high)
    parts = list(_frame(scale, allowed))
    if at is not None:
        parts.append(f'<line class="cut" x1="{scale.x(at)}" x2="{scale.x(at)}" y1="{TOP}" y2="{FLOOR}"/>')
    for name, line in lines:
        path = " ".join(f"{scale.x(index)},{scale.y(value)}" for index, value in line)
        parts.append(f'<polyline class="line {name}" points="{path}"/>')
        parts += [
            f'<circle class="dot {name}" cx="{scale.x(i)}" cy="{scale.y(v)}" r="4.5"/>' for i, v in line if i == at
        ]
    title = "The margin between the best two tokens, in logits, along the two outputs"
    drawn = f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-label="{title}"><title>{title}</title>{"".join(parts)}</svg>'
    return _section("How close each choice was", drawn + LEGEND, f"{title}, token by token. Low is close.")


def _frame(scale: Scale, allowed: float) -> Iterator[str]:
    """Draw what lies behind the lines: the band of rounding, powers of ten, and the numbers of tokens."""
    if allowed > 0:
        top = scale.y(min(allowed, 10.0**POWERS))
        yield f'<rect class="band" x="{LEFT}" y="{top}" width="{WIDTH - LEFT - RIGHT}" height="{round(FLOOR - top, 1)}"/>'
    for power in range(scale.low, scale.high + 1, max(1, (scale.high - scale.low) // 6)):
        at = scale.y(10.0**power)
        yield f'<line class="grid" x1="{LEFT}" x2="{WIDTH - RIGHT}" y1="{at}" y2="{at}"/>'
        yield f'<text x="{LEFT - 8}" y="{at + 4}" text-anchor="end">{10.0**power:g}</text>'
    for index in sorted({0, scale.last // 2, scale.last}):
        yield f'<text x="{scale.x(index)}" y="{HEIGHT - 10}" text-anchor="middle">{index}</text>'


LEGEND = (
    '<p class="legend"><span class="key a"></span>A <span class="key b"></span>B '
    '<span class="key cut"></span>where they part <span class="key band"></span>what rounding can turn</p>'
)


def _margins(steps: Many[Step]) -> list[tuple[int, float]]:
    """Return the margins by token; of many tokens the closest of each stretch, for it is the close ones that tell."""
    known = [(n, s.margin) for n, s in enumerate(steps) if s.margin is not None and math.isfinite(s.margin)]
    width = max(1, -(-len(known) // POINTS))
    stretches = (known[start : start + width] for start in range(0, len(known), width))
    return [min(stretch, key=lambda item: item[1]) for stretch in stretches]


# -- why, and what to do ----------------------------------------------------------------------------


def _causes(answer: dict[str, Any]) -> str:
    if answer["verdict"] == "same" or answer["endings"]["decides"]:
        return ""
    blamed = [_card(cause) for cause in own.blamed(answer["causes"])]
    vague = [_card(cause) for cause in own.vague(answer["causes"])]
    title = "Likely causes" if len(blamed) > 1 else "Likely cause"
    none = f"<p>{shown(story.unblamed(answer))}</p>"
    return _section(title, "".join(blamed) or none) + _section(story.OWN, "".join(vague))


def _card(cause: dict[str, Any]) -> str:
    share = round(100 * cause["confidence"])
    extra = [f"Moved together with it: {', '.join(cause['with'])}."] if cause["with"] else []
    extra += [f"As good an explanation: {', '.join(cause['alternatives'])}."] if cause["alternatives"] else []
    extra += ["This difference was allowed."] if cause.get("allowed") else []
    return (
        f'<article><h3><code>{shown(cause["field"])}</code><span class="tag">{shown(cause["effect"])}</span></h3>'
        f'<p class="values"><span><b class="a">A</b> {shown(story.short(cause["a"]))}</span><span><b class="b">B</b> '
        f'{shown(story.short(cause["b"]))}</span></p><div class="bar"><i style="width:{share}%"></i></div>'
        f'<p class="note">confidence {cause["confidence"]:.2f}</p><p>{shown(cause["because"][:1].upper() + cause["because"][1:])}.</p>'
        + "".join(f'<p class="note">{shown(line)}</p>' for line in extra) + "</article>"
    )  # fmt: skip


def _advice(answer: dict[str, Any]) -> str:
    told = (COMMAND.sub(r"<code>\1</code>", shown(line)) for line in answer["advice"])
    items = "".join(f"<li>{line}</li>" for line in told)
    return _section("What to do", f"<ul>{items}</ul>" if items else "")


def _lists(answer: dict[str, Any]) -> Iterator[str]:
    """List what was dismissed, declared and unknown."""
    for title, items in (
        ("Differs and cannot be the cause", answer["dismissed"]), ("Declared to differ", answer.get("declared", [])),
    ):  # fmt: skip
        rows = [
            [f"<code>{shown(item['field'])}</code>", shown(story.short(item["a"])), shown(story.short(item["b"])),
             shown(item.get("because", ""))] for item in items
        ]  # fmt: skip
        if rows:
            yield _section(f"{title} ({len(rows)})", _table(("field", "A", "B", "because"), rows))
    rows = [[f"<code>{shown(item['field'])}</code>", shown(item["because"]), "would decide" if item["would_decide"] else ""]
            for item in answer["unknown"]]  # fmt: skip
    if rows:
        yield _section(f"Could not be compared ({len(rows)})", _table(("field", "why", ""), rows))


def _by_layer(answer: dict[str, Any], one: Mapping[str, Field], other: Mapping[str, Field]) -> str:
    """List every field of both sides under the layer that it acts on, the differing ones first."""
    blamed = {name for cause in answer["causes"] for name in (cause["field"], *cause["with"])}
    by_layer: dict[str, list[list[str]]] = {layer: [] for layer in LAYERS}
    marks = {"cause": 0, "differs": 1, "unknown": 2, "equal": 3}
    counts = dict.fromkeys(LAYERS, 0)
    rows = sorted(
        ((_mark(name, one.get(name), other.get(name), blamed), name) for name in one.keys() | other.keys()),
        key=lambda item: (marks[item[0]], item[1]),
    )
    for mark, name in rows:
        layer = LAYER.get(spec(name).group, "other")
        counts[layer] += mark in ("cause", "differs")
        values = [
            "not recorded" if side is None else story.short(side.show()) for side in (one.get(name), other.get(name))
        ]
        tag = f'<span class="tag {mark}">{mark}</span>'
        by_layer[layer].append([f"<code>{shown(name)}</code>", shown(values[0]), shown(values[1]), tag])
    return _section("All fields, by layer", "".join(
        f"<details><summary>{layer} <span>{counts[layer]} of {len(table)} differ</span></summary>"
        f"{_table(('field', 'A', 'B', ''), table)}</details>"
        for layer, table in by_layer.items() if table
    ))  # fmt: skip


def _mark(name: str, one: Field | None, other: Field | None, blamed: set[str]) -> str:
    if name in blamed:
        return "cause"
    if one is None or other is None or not (one.known and other.known):
        return "unknown"
    return "equal" if one == other else "differs"


STYLE = """
:root{color-scheme:light dark;--paper:#fbfaf8;--card:#fff;--ink:#1d2127;--soft:#667080;--line:#e3e1dc;--a:#2463c4;
--b:#c2570c;--mark:#fff0c2;--cut:#b4233a;--band:#b4233a1f;--good:#1c7c4a;--tie:#9a6a00;--bad:#b4233a}
@media(prefers-color-scheme:dark){:root{--paper:#14171c;--card:#1b1f26;--ink:#e6e8ec;--soft:#98a2b0;--line:#2c323c;
--a:#7fb0ff;--b:#ffa45c;--mark:#4d3d0a;--cut:#ff7d92;--band:#ff7d9226;--good:#5fce95;--tie:#f0c25a;--bad:#ff7d92}}
*{box-sizing:border-box}body{margin:0;background:var(--paper);color:var(--ink);
font:15px/1.55 system-ui,-apple-system,"Segoe UI",Roboto,"Helvetica Neue",sans-serif}
main{max-width:1040px;margin:0 auto;padding:36px 24px 72px}h1{font-size:25px;line-height:1.25;margin:10px 0 14px}
h2{font-size:17px;margin:0 0 6px}h3{font-size:15px;margin:0 0 6px;display:flex;gap:10px;align-items:center;flex-wrap:wrap}
section{margin-top:34px}header p{margin:2px 0}code,pre,.token{font-family:ui-monospace,SFMono-Regular,Menlo,Consolas,
"DejaVu Sans Mono",monospace;font-size:13px}code{overflow-wrap:anywhere}.note{color:var(--soft);font-size:13px;margin:2px 0 10px}
.badge{display:inline-block;padding:2px 11px;border-radius:99px;font-weight:600;font-size:13px;border:1.5px solid}
.same{color:var(--good)}.near_tie,.inconclusive{color:var(--tie)}.divergent,.not_comparable{color:var(--bad)}
b.a{color:var(--a)}b.b{color:var(--b)}dl{display:flex;flex-wrap:wrap;gap:12px;margin:18px 0 0}
dl div{background:var(--card);border:1px solid var(--line);border-radius:10px;padding:8px 14px}dt{color:var(--soft);font-size:12px}
dd{margin:0;font-weight:600}.strip{display:flex;flex-wrap:wrap;gap:8px 4px;align-items:center;margin:8px 0}
.column{display:flex;flex-direction:column;gap:3px;align-items:stretch}
.token{display:flex;flex-direction:column;align-items:center;background:var(--card);border:1px solid var(--line);border-radius:6px;
padding:1px 6px;line-height:21px;min-width:30px;min-height:38px}.token.of-a{border-bottom-color:var(--a)}
.token.of-b{border-bottom-color:var(--b)}.token.none{border-style:dotted;background:none;color:var(--soft)}
.token small{color:var(--soft);font-size:10px;line-height:13px}.token.parts{background:var(--mark);border:2px solid var(--cut);
font-weight:700}.token.after{background:none;border-style:dashed}.values span{margin-right:22px}
.gap{color:var(--soft);font-size:12px;line-height:27px;
padding:0 6px}.sides{display:grid;grid-template-columns:1fr 1fr;gap:14px}
@media(max-width:720px){.sides{grid-template-columns:1fr}}
pre{white-space:pre-wrap;overflow-wrap:anywhere;background:var(--card);border:1px solid var(--line);border-radius:10px;
padding:12px 14px;margin:4px 0 0;max-height:420px;overflow:auto}mark{background:var(--mark);color:inherit;border-radius:3px}
svg{width:100%;height:auto;background:var(--card);border:1px solid var(--line);border-radius:10px;display:block}
svg text{fill:var(--soft);font-size:12px;font-family:inherit}.grid{stroke:var(--line)}.cut{stroke:var(--cut);stroke-width:1.5;
stroke-dasharray:5 4}.band{fill:var(--band)}.line{fill:none;stroke-width:1.8;stroke-linejoin:round}.line.a,.dot.a{stroke:var(--a)}
.line.b,.dot.b{stroke:var(--b)}.line.b{stroke-dasharray:6 3}.dot{fill:var(--card);stroke-width:2.2}
.legend{color:var(--soft);font-size:13px;display:flex;gap:8px;align-items:center;flex-wrap:wrap}.key{width:22px;height:0;
border-top:2.5px solid var(--a);margin-left:12px}.key.b{border-top:2.5px dashed var(--b)}.key.cut{border-top:2px dashed var(--cut)}
.key.band{height:12px;border:0;background:var(--band)}article{background:var(--card);border:1px solid var(--line);
border-radius:10px;padding:14px 16px;margin:10px 0}article p{margin:6px 0}.tag{font-size:11px;font-weight:600;color:var(--soft);
border:1px solid var(--line);border-radius:99px;padding:0 8px}.tag.cause{color:var(--bad);border-color:currentColor}
.tag.differs{color:var(--tie);border-color:currentColor}.bar{height:6px;border-radius:3px;background:var(--line);overflow:hidden}
.bar i{display:block;height:100%;background:var(--soft)}.wide{overflow-x:auto}table{border-collapse:collapse;width:100%;font-size:13px}
th{text-align:left;color:var(--soft);font-weight:600;white-space:nowrap}th,td{padding:5px 12px 5px 0;border-bottom:1px solid var(--line);
vertical-align:top;overflow-wrap:anywhere}ul{padding-left:20px;margin:6px 0}li{margin:5px 0}
details{border:1px solid var(--line);border-radius:10px;background:var(--card);padding:8px 14px;margin:8px 0}
summary{cursor:pointer;font-weight:600}summary span{color:var(--soft);font-weight:400;font-size:13px;margin-left:8px}
@media print{details{display:block}body{background:#fff}}
"""
