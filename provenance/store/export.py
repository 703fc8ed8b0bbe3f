"""Whole runs as one JSON document, and back: what `export` writes and `diff` reads, without a database.

The form is versioned (``provenance/run/1``, ``docs/export.md``). Readers ignore keys that they do not know, and
refuse what is not a run with one sentence: a file may come from anybody.
"""

import math
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import orjson

from provenance.catalogue.fields import VERSION as CATALOGUE
from provenance.errors import BadFile
from provenance.facts import Field, Run, Sequence, Step
from provenance.integrity import values
from provenance.integrity.canonical import plain

SCHEMA = "provenance/run/1"
SEVERAL = "provenance/runs/1"
MAX_BYTES = 512 << 20
MAX_DEPTH = 64
MAX_INTEGER = 1 << 63


def document(run: Run) -> dict[str, Any]:
    """Return a run as a document for JSON."""
    return {
        "schema": SCHEMA, "catalogue": CATALOGUE, "run_id": run.run_id, "kind": run.kind, "runtime": run.runtime,
        "operation": run.operation, "status": run.status, "started_at": str(run.started_at),
        "duration_ns": None if run.duration_ns is None else str(run.duration_ns), "name": run.name,
        "tags": dict(run.tags), "error": run.error, "key_id": run.key_id, "digests": dict(run.digests),
        "fields": {name: field.document() for name, field in sorted(run.fields.items())},
        "sequences": [_sequence(item) for item in run.sequences],
    }  # fmt: skip


def dumps(*runs: Run) -> bytes:
    """Return a run as JSON, indented; or several in one document."""
    forms = [document(run) for run in runs]
    form = forms[0] if len(forms) == 1 else {"schema": SEVERAL, "runs": forms}
    return orjson.dumps(form, option=orjson.OPT_INDENT_2 | orjson.OPT_NON_STR_KEYS, default=plain)


def _sequence(item: Sequence) -> dict[str, Any]:
    return {
        "row": item.row, "ret": item.ret, "input_key": item.input_key, "output_key": item.output_key,
        "input_ids": item.input_ids, "output_ids": item.output_ids, "input_text": _safe(item.input_text),
        "output_text": _safe(item.output_text), "input_value": _value(item.input_value),
        "output_value": _value(item.output_value), "finish": item.finish, "padding": item.padding,
        "logits_dtype": item.logits_dtype, "no_evidence": item.no_evidence,
        "steps": [
            [step.token, step.top_ids, [_number(x) for x in step.top_logits], _number(step.logprob),
             _number(step.margin), step.runner_up]
            for step in item.steps
        ],
    }  # fmt: skip


def _safe(text: str | None) -> str | None:
    return None if text is None else text.encode("utf-8", "backslashreplace").decode()


def _value(value: object) -> object:
    """Keep a value in the total encoding: plain JSON would lose what it cannot say."""
    return None if value is None else orjson.loads(values.encode(value))


def _number(x: float | None) -> float | str | None:
    return x if x is None or math.isfinite(x) else str(x)


def read_file(path: Path) -> Run:
    """Read an exported run.

    Raises BadFile for anything that is not one.
    """
    found = read_runs(path)
    if len(found) > 1:
        raise BadFile(f"{path} holds {len(found)} runs, and one is wanted here.")
    return found[0]


def read_runs(path: Path) -> list[Run]:
    """Read the runs of an exported file.

    Raises BadFile for anything that is not one.
    """
    if path.is_dir():
        raise BadFile(f"{path} is a folder and not an exported run.")
    try:
        if path.stat().st_size > MAX_BYTES:
            raise BadFile(f"{path} is larger than {MAX_BYTES >> 20} MiB; it is not read.")
        form = orjson.loads(path.read_bytes())
    except OSError as error:
        raise BadFile(f"{path} cannot be read: {error.strerror}.") from None
    except orjson.JSONDecodeError as error:
        raise BadFile(f"{path} is not JSON: {error}. `provenance export RUN > FILE` writes one.") from None
    if not isinstance(form, dict) or form.get("schema") != SEVERAL:
        return [read(form, str(path))]
    forms = form.get("runs")
    if not isinstance(forms, list) or not forms:
        raise BadFile(f"{path} is damaged: it says that it holds several runs, and holds none.")
    return [read(item, f"run {number} of {path}") for number, item in enumerate(forms, 1)]


def read(form: Any, name: str) -> Run:
    """Read a run from its document.

    Raises BadFile where it is not one, with what is wrong.
    """
    if not isinstance(form, dict) or form.get("schema") != SCHEMA:
        found = form.get("schema") if isinstance(form, dict) else type(form).__name__
        raise BadFile(f"{name} is not an exported run: its schema is {_clip(repr(found))} and not {SCHEMA!r}.")
    try:
        return Run(
            run_id=_word(form["run_id"]), kind=str(form.get("kind", "call")), runtime=str(form.get("runtime", "")),
            operation=str(form.get("operation", "")), status=_word(form["status"]), started_at=_int(form["started_at"]),
            duration_ns=_maybe(form.get("duration_ns")),
            fields={str(key): _field(str(key), item) for key, item in form["fields"].items()},
            sequences=tuple(_read_sequence(item) for item in form["sequences"]), name=str(form.get("name", "")),
            tags={str(key): str(value) for key, value in form.get("tags", {}).items()},
            error=str(form.get("error", "")), key_id=str(form.get("key_id", "")),
            digests={str(key): str(value) for key, value in form.get("digests", {}).items()},
        )  # fmt: skip
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError, RecursionError, struct.error) as error:
        raise BadFile(f"{name} is damaged: {type(error).__name__}: {_clip(str(error))}.") from None


def _clip(text: str) -> str:
    """Cut what a file says to what an error can carry in one line."""
    text = " ".join(text.split())
    return text if len(text) <= 120 else text[:119] + "…"


def _field(name: str, form: Any) -> Field:
    if not isinstance(form, Mapping):
        raise TypeError(f"the field {name} is a {type(form).__name__}")
    if _depth(form) > MAX_DEPTH:
        raise ValueError(f"the field {name} is nested more than {MAX_DEPTH} deep")
    return Field.read(name, form)


def _depth(form: Any) -> int:
    """Return how deep a document is nested, without going deep: a level at a time."""
    depth, level = 0, [form]
    while level and depth <= MAX_DEPTH:
        depth += 1
        inner = [item for item in level if isinstance(item, (dict, list))]
        level = [part for item in inner for part in (item.values() if isinstance(item, dict) else item)]
    return depth


def _word(value: Any) -> str:
    if not isinstance(value, str):
        raise TypeError(f"an identity is a {type(value).__name__} and no text")
    return value


def _int(value: Any) -> int:
    """Read an integer that other parts can hold: 64 bits, and no fraction that would be lost."""
    number = int(value)
    if not -MAX_INTEGER <= number < MAX_INTEGER or number != (value if isinstance(value, float) else number):
        raise ValueError(f"{str(value)[:40]} is no integer of 64 bits")
    return number


def _maybe(value: Any) -> int | None:
    return None if value is None else _int(value)


def _read_sequence(form: Any) -> Sequence:
    steps = tuple(_step(*step) for step in form.get("steps", ()))
    return Sequence(
        row=_int(form["row"]), ret=_int(form["ret"]), input_key=str(form.get("input_key", "")),
        output_key=str(form.get("output_key", "")), input_ids=_ids(form.get("input_ids")),
        output_ids=_ids(form.get("output_ids")), input_text=_text(form.get("input_text")),
        output_text=_text(form.get("output_text")), input_value=_read_value(form.get("input_value")),
        output_value=_read_value(form.get("output_value")), finish=str(form.get("finish", "unknown")),
        padding=_maybe(form.get("padding")), steps=steps,
        logits_dtype=str(form.get("logits_dtype", "")), no_evidence=str(form.get("no_evidence", "")),
    )  # fmt: skip


def _step(token: Any, ids: Any, logits: Any, logprob: Any, margin: Any, runner: Any) -> Step:
    if len(ids) != len(logits):
        raise ValueError(f"a step has {len(ids)} ids and {len(logits)} logits")
    return Step(
        _int(token), tuple(map(_int, ids)), tuple(map(float, logits)), None if logprob is None else float(logprob),
        None if margin is None else float(margin), _maybe(runner),
    )  # fmt: skip


def _ids(value: Any) -> tuple[int, ...] | None:
    return None if value is None else tuple(map(_int, value))


def _text(value: Any) -> str | None:
    return None if value is None else str(value)


def _read_value(value: Any) -> object:
    return None if value is None else values.decode(orjson.dumps(value))
