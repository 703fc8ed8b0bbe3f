"""The answer as text: what people paste into an incident. Terminal and Markdown dress one list of lines.

Text of others is shown and never obeyed: `visible` is what every face passes it through.
"""

import unicodedata
from collections.abc import Callable
from collections.abc import Sequence as Many
from typing import Any

from provenance.explain import own

HEADLINES = {
    "same": "Same: the outputs are equal.",
    "near_tie": "Near tie: rounding turned a choice between two tokens that were as good as equal.",
    "divergent": "Divergent: the outputs differ, and not by a near tie.",
    "not_comparable": "Not comparable: {where}.",
    "inconclusive": "Could not tell: what would decide was not recorded.",
}
WHERE = {
    "weights": "the weights in memory differ", "tokenizer": "one text became other token ids",
    "prompt": "the prompts differ", "ids": "the token ids that reached the model differ",
}  # fmt: skip
BIDI = set("\u061c\u200e\u200f\u202a\u202b\u202c\u202d\u202e\u2066\u2067\u2068\u2069")
OWN = "Fields of your own that differ, of which it is not known whether they act"
DISMISSED_SHOWN = 8
COLUMNS_SHOWN = 5
VALUE_CHARS = 60
Text = Callable[[int], str | None]


def lines(
    answer: dict[str, Any], text_a: Text = lambda _: None, text_b: Text = lambda _: None
) -> list[tuple[str, str]]:
    """Return the answer as lines, each with a style: head, plain, cause, dim.

    ``text_a`` and ``text_b`` give the text of a token id, where a run's texts are at hand.
    """
    out = _many(answer) if answer["runs"] else []
    out += [("head", headline(answer)), ("plain", "")]
    out += [("plain", f"A {place(answer['a'])}"), ("plain", f"B {place(answer['b'])}")]
    if answer["endings"]["told"] and not answer["endings"]["decides"]:
        out.append(("plain", f"Note that {answer['endings']['told']}."))
    out += _outputs(answer, text_a, text_b)
    out += _causes(answer)
    out += _dismissed(answer["dismissed"])
    out += _unknown(answer["unknown"])
    out += _declared(answer.get("declared", []))
    if len(answer["pairs"]) > 1 and not answer["runs"]:
        out += _pairs(answer["pairs"])
    if answer["advice"]:
        out += [("plain", ""), ("head", "What to do")]
        out += [("plain", f"  {sentence}") for sentence in answer["advice"]]
    return out


def markdown(answer: dict[str, Any], text_a: Text = lambda _: None, text_b: Text = lambda _: None) -> str:
    """Return the answer as Markdown."""
    parts = []
    for style, line in lines(answer, text_a, text_b):
        if style == "head":
            parts.append(f"**{_escape(line)}**")
        elif line:
            parts.append(f"- {_escape(line.strip())}")
        else:
            parts.append("")
    return "\n".join(parts) + "\n"


def headline(answer: dict[str, Any]) -> str:
    """Return the verdict in a sentence."""
    where = WHERE.get(answer["layer"] or "", "inputs or models differ")
    if answer["inputs"].get("kind") == "arguments":
        where = "the arguments differ"
    ended = answer["endings"]
    if ended["decides"]:
        equal = "; what both put out is equal" if answer["outputs"]["equal"] else ""
        return f"Could not tell: {ended['told']}{equal}."
    return HEADLINES[answer["verdict"]].format(where=where)


def visible(text: str) -> str:
    r"""Return text in which controls, escapes and direction marks are seen instead of acting.

    >>> visible("a\x1b[31mb\u202ec\n")
    'a\\x1b[31mb\\u202ec\\n'
    """
    if text.isascii() and text.isprintable():
        return text
    return "".join(_visible(char) for char in text)


def _visible(char: str) -> str:
    if char in BIDI or unicodedata.category(char) in ("Cc", "Cf", "Cs", "Co", "Zl", "Zp"):
        return char.encode("unicode_escape").decode()
    return char


def _escape(text: str) -> str:
    text = visible(text)
    for mark in "\\`*_[]<>|~#&":
        text = text.replace(mark, "\\" + mark)
    return text


def place(side: dict[str, Any]) -> str:
    """Return the reference of a sequence."""
    ret = f".{side['return']}" if side["return"] else ""
    return f"{side['run']}:{side['prompt']}{ret}"


def _outputs(answer: dict[str, Any], text_a: Text, text_b: Text) -> list[tuple[str, str]]:
    outputs = answer["outputs"]
    at = outputs["first_divergent_token"]
    found: list[tuple[str, str]] = []
    first = answer["inputs"]["first_difference"]
    if first is not None and "path" in first:
        sides = f"{short(first['a'])} in A, {short(first['b'])} in B"
        found.append(("plain", f"The arguments part at {first['path']}: {sides}."))
    elif first is not None:
        found.append(("plain", f"The inputs part at token {first['token']}: {first['a']} in A, {first['b']} in B."))
    if at is None:
        if outputs["surface_only"]:
            found.append(("plain", "The outputs part on the surface only."))
        return found + [("plain", f"No token evidence: {why}.") for why in [outputs.get("no_evidence")] if why]
    how = "one output is the beginning of the other; they part" if outputs["prefix"] else "the outputs part"
    found.append(
        (
            "plain",
            f"{how[0].upper()}{how[1:]} at token {at}" + (", on the surface only." if outputs["surface_only"] else "."),
        )
    )
    for name, side, text in (("A", outputs["a"], text_a), ("B", outputs["b"], text_b)):
        found.append(("plain", f"  {name} {_token(side, text)}"))
    change = outputs["logit_change"]
    if change is not None and change["kind"] == "zero":
        found.append(("plain", f"  The raw logits were equal to the last bit over {_count(change['over_tokens'])}."))
    elif change is not None:
        word = "within" if change["kind"] == "rounding" else "beyond"
        moved = f"{change['max_abs']:.3g} ({change['ulps']:.3g} ulp) over {_count(change['over_tokens'])}"
        allowed = f"{word} what rounding explains ({change['rounding_allows']:.3g})"
        bound = "least" if change.get("at_least") else "most"
        found.append(("plain", f"  Up to there the logits had moved by at {bound} {moved}: {allowed}."))
    elif "no_evidence" in outputs:
        found.append(("plain", f"  No token evidence: {outputs['no_evidence']}."))
    return found


def _count(tokens: int) -> str:
    return "1 token" if tokens == 1 else f"{tokens} tokens"


def _token(side: dict[str, Any], text: Text) -> str:
    if not side or side.get("token_id") is None:
        return f"ended ({side.get('ended', 'unknown')})"
    shown = text(side["token_id"])
    verb = "drew" if side.get("drawn") else "chose"
    line = f"{verb} {side['token_id']}" + (f" {shown!r}" if shown is not None else "")
    if side.get("drawn"):
        best = f"{side['among']} best" if side["among"] else "best that were kept"
        line += f", number {side['rank']} of the {best}" if side["rank"] else f", none of the {best}"
        line += f", log probability {side['logprob']:.3g}" if side["logprob"] is not None else ""
    if side.get("margin") is not None:
        ulps = f" ({side['margin_ulps']:.3g} ulp)" if side.get("margin_ulps") is not None else ""
        runner = side.get("runner_up_id")
        second = text(runner) if runner is not None else None
        line += f", {side['margin']:.3g}{ulps} ahead of {runner}" + (f" {second!r}" if second is not None else "")
    return line


def _causes(answer: dict[str, Any]) -> list[tuple[str, str]]:
    if answer["verdict"] == "same" or answer["endings"]["decides"]:
        return []
    blamed, vague = own.blamed(answer["causes"]), own.vague(answer["causes"])
    found: list[tuple[str, str]] = [("plain", "")]
    if not blamed:
        found.append(("head", unblamed(answer)))
    else:
        found.append(("head", "Likely cause" if len(blamed) == 1 else "Likely causes"))
    for number, cause in enumerate(blamed, 1):
        found += _cause(cause, f"  {number}. ")
    if vague:
        found += [("plain", ""), ("head", OWN)]
    for cause in vague:
        found += _cause(cause, "  ")
    return found


def unblamed(answer: dict[str, Any]) -> str:
    """Say that nothing recorded is known to explain it, or that what was declared does."""
    if explaining := [item["field"] for item in answer.get("declared", []) if item.get("explains")]:
        return f"The declared difference explains it: {', '.join(explaining)}."
    other = "other " if answer.get("declared") else ""
    return f"No {other}recorded difference explains it."


def _cause(cause: dict[str, Any], mark: str) -> list[tuple[str, str]]:
    values = f"{short(cause['a'])} in A, {short(cause['b'])} in B"
    effect = "effect unknown" if cause["effect"] == own.UNKNOWN else cause["effect"]
    weight = f"{effect}, confidence {cause['confidence']:.2f}" + ", allowed" * cause.get("allowed", False)
    found = [("cause", f"{mark}{cause['field']}: {values}   [{weight}]"), ("plain", f"     {cause['because']}.")]
    if cause["with"]:
        found.append(("plain", f"     Moved together with it: {', '.join(cause['with'])}."))
    if cause["alternatives"]:
        found.append(("plain", f"     As good an explanation: {', '.join(cause['alternatives'][:4])}."))
    return found


def _dismissed(items: list[dict[str, Any]]) -> list[tuple[str, str]]:
    if not items:
        return []
    found: list[tuple[str, str]] = [("plain", ""), ("head", f"Differs and cannot be the cause ({len(items)})")]
    for item in items[:DISMISSED_SHOWN]:
        found.append(("dim", f"  {item['field']}: {short(item['a'])} / {short(item['b'])}: {item['because']}."))
    if len(items) > DISMISSED_SHOWN:
        found.append(("dim", f"  and {len(items) - DISMISSED_SHOWN} more (--json lists all)"))
    return found


def _unknown(items: list[dict[str, Any]]) -> list[tuple[str, str]]:
    if not items:
        return []
    found: list[tuple[str, str]] = [("plain", ""), ("head", f"Could not be compared ({len(items)})")]
    for item in items[:DISMISSED_SHOWN]:
        mark = "   <- would decide" if item["would_decide"] else ""
        found.append(("dim", f"  {item['field']}: {item['because']}{mark}"))
    if len(items) > DISMISSED_SHOWN:
        found.append(("dim", f"  and {len(items) - DISMISSED_SHOWN} more (--json lists all)"))
    return found


def _declared(items: list[dict[str, Any]]) -> list[tuple[str, str]]:
    if not items:
        return []
    found: list[tuple[str, str]] = [("plain", ""), ("head", f"Declared to differ, and not looked at ({len(items)})")]
    return found + [("dim", f"  {item['field']}: {short(item['a'])} / {short(item['b'])}") for item in items]


# -- many runs --------------------------------------------------------------------------------------


def _many(answer: dict[str, Any]) -> list[tuple[str, str]]:
    """Tell the groups, the fields by run, and what separates the groups; the pair that parts first follows."""
    split, groups = answer["split"], answer["groups"]
    outputs = "1 output" if len(groups) == 1 else f"{len(groups)} different outputs"
    out = [("head", f"{len(answer['runs'])} runs, {outputs}"), ("plain", "")]
    out += [("plain", f"  {line}") for line in grid(table(answer))]
    out += [("plain", ""), ("cause" if split["separates"] else "plain", split["told"])]
    for item in (*split["separates"], *split["partly"], *split["possible"]):
        values = "; ".join(
            f"{', '.join(map(short, values))} in group {group}" for group, values in item["values"].items()
        )
        out.append(("plain", f"  {item['field']}: {values}: {item['because']}."))
        if item["with"]:
            out.append(("plain", f"     Moved together with it: {', '.join(item['with'])}."))
    for title, items in (("Dismissed by the groups", split["dismissed"]), ("Not known in all runs", split["unknown"])):
        if items:
            out += [("plain", ""), ("head", f"{title} ({len(items)})")]
            out += [("dim", f"  {item['field']}: {item['because']}.") for item in items[:DISMISSED_SHOWN]]
            if len(items) > DISMISSED_SHOWN:
                out.append(("dim", f"  and {len(items) - DISMISSED_SHOWN} more (--json lists all)"))
    return [*out, ("plain", ""), ("plain", "The two runs that part first:" if len(groups) > 1 else "Two of them:")]


def table(answer: dict[str, Any]) -> list[list[str]]:
    """Return the fields that tell most by run, a line of heads first."""
    split = answer["split"]
    named = [item["field"] for kind in ("separates", "partly", "possible") for item in split[kind]]
    named = named or [item["field"] for item in split["dismissed"]]
    named = named[:COLUMNS_SHOWN]
    rows = [["run", "name", "group", *named]]
    for item in answer["runs"]:
        values = ["-" if item["fields"].get(name) is None else short(item["fields"][name]) for name in named]
        rows.append([place({"run": item["run"], **item}), item["name"], str(item["group"] or "?"), *values])
    return rows


def grid(rows: Many[Many[str]]) -> list[str]:
    """Align the cells of a table.

    >>> grid([["run", "group"], ["01a2", "1"]])
    ['run   group', '01a2  1']
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip() for row in rows]


def _pairs(pairs: list[dict[str, Any]]) -> list[tuple[str, str]]:
    found: list[tuple[str, str]] = [("plain", ""), ("head", f"All {len(pairs)} pairs of equal prompts")]
    for item in pairs:
        at = item["first_divergent_token"]
        where = f" at token {at}" if at is not None else ""
        found.append(("dim", f"  A:{item['a']['prompt']} B:{item['b']['prompt']}  {item['verdict']}{where}"))
    return found


def short(value: object) -> str:
    """Return a value in few characters.

    >>> short("sha256:" + "a" * 64), short({"state": "unknown", "reason": "no driver"})
    ('sha256:aaaaaaaa…', '(unknown: no driver)')
    """
    if isinstance(value, dict) and "state" in value:
        reason = f": {value['reason']}" if value.get("reason") else ""
        return f"({str(value['state']).replace('_', ' ')}{reason})"
    text = str(value)
    head, colon, tail = text.rpartition(":")
    if colon and head.endswith("sha256") and len(tail) == 64:
        return f"sha256:{tail[:8]}…"
    return text if len(text) <= VALUE_CHARS else text[: VALUE_CHARS - 1] + "…"
