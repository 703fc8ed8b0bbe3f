"""Turning stored rows and bodies back into a `Sequence`, token evidence included (see `capture.evidence`)."""

import struct
import sys
from array import array
from collections.abc import Mapping
from typing import Any, NamedTuple

from provenance.facts import Sequence, Step
from provenance.integrity import buffers, values

HEAD = struct.Struct("<BBBBI")
PROCESSED = 1
DTYPES = {1: "float32", 2: "bfloat16", 3: "float16", 4: "float64"}


class Body(NamedTuple):
    """One payload as stored, unpacked."""

    role: int
    row: int
    ret: int
    part: int
    encoding: int
    data: bytes


def sequence(
    row: Mapping[str, Any], mine: Mapping[str, Body], facts: Mapping[str, Any], media: tuple[str, ...],
    aside: Mapping[tuple[str, int], bytes],
) -> Sequence:  # fmt: skip
    """Make a sequence from its row and its payloads by role. Content that was not kept is None.

    ``media`` are the digests of what stood beside the ids; ``aside`` what was put aside of values, by role and part.
    """
    output_ids = _ids(mine.get("output.ids"))
    evidence = mine.get("evidence.logits")
    found, dtype = steps(evidence.data, output_ids or ()) if evidence is not None else ((), "")
    why = "" if found else str(facts.get("evidence") or ("no output" if not output_ids else "not recorded"))
    return Sequence(
        row=row["prompt_index"], ret=row["return_index"], input_key=_hex(row["input_key"]),
        output_key=_hex(row["output_key"]), input_ids=_ids(mine.get("prompt.ids")), output_ids=output_ids,
        input_text=_text(mine.get("prompt.text")), output_text=_text(mine.get("output.text")),
        input_value=_value(mine.get("arguments"), "prompt.media", aside),
        output_value=_value(mine.get("output.value"), "output.media", aside),
        finish=row["finish"] or "unknown", padding=row["padding_tokens"], steps=found,
        logits_dtype=dtype or str(facts.get("logits.dtype", "")), no_evidence=why,
        mask=_ids(mine.get("prompt.mask")), media=media,
    )  # fmt: skip


def _hex(value: bytes | None) -> str:
    return bytes(value).hex() if value is not None else ""


def _ids(body: Body | None) -> tuple[int, ...] | None:
    return tuple(int(n) for n in buffers.parse(body.data).numbers()) if body is not None else None


def _text(body: Body | None) -> str | None:
    return body.data.decode("utf-8", "surrogatepass") if body is not None else None


def _value(body: Body | None, role: str, aside: Mapping[tuple[str, int], bytes]) -> object:
    if body is None:
        return None
    return values.decode(body.data, {part: data for (name, part), data in aside.items() if name == role} or None)


def steps(data: bytes, tokens: tuple[int, ...]) -> tuple[tuple[Step, ...], str]:
    """Return one `Step` a token, and the type in which the logits were computed. An unknown version gives none."""
    if len(data) < HEAD.size:
        return (), ""
    version, k, flags, dtype, count = HEAD.unpack_from(data)
    planes = 2 * k + 1 + (4 if flags & PROCESSED else 0)
    if version != 1 or len(data) != HEAD.size + 4 * planes * count or len(tokens) < count:
        return (), ""
    place = HEAD.size

    def plane(code: str, width: int) -> "array[int] | array[float]":
        nonlocal place
        numbers: array[int] | array[float] = array(code)
        numbers.frombytes(data[place : place + 4 * width * count])
        if sys.byteorder == "big":
            numbers.byteswap()
        place += 4 * width * count
        return numbers

    ids, logits, sums = plane("i", k), plane("f", k), plane("f", 1)
    ids2, scores2 = (plane("i", 2), plane("f", 2)) if flags & PROCESSED else (None, None)
    made = []
    for n in range(count):
        top = tuple(int(i) for i in ids[n * k : n * k + k])
        values = tuple(float(x) for x in logits[n * k : n * k + k])
        token = tokens[n]
        first = (top[:2], values[:2]) if ids2 is None or scores2 is None else (
            tuple(int(i) for i in ids2[2 * n : 2 * n + 2]), tuple(float(x) for x in scores2[2 * n : 2 * n + 2])
        )  # fmt: skip
        logprob = values[top.index(token)] - sums[n] if token in top else None
        made.append(Step(token, top, values, logprob, *_margin(token, *first)))
    return tuple(made), DTYPES.get(dtype, "")


def _margin(token: int, ids: tuple[int, ...], scores: tuple[float, ...]) -> tuple[float | None, int | None]:
    """Return the margin of the two best and the one not chosen. In a tie, topk may name either first."""
    if len(scores) < 2:
        return None, None
    runner_up = ids[1] if token == ids[0] else ids[0]
    return scores[0] - scores[1], runner_up
