"""Whole runs as one JSON document, and back: what `export` writes and `diff` reads, without a database.

The form is versioned (``provenance/run/1``, ``docs/export.md``). Readers ignore keys that they do not know, and
refuse what is not a run with one sentence: a file may come from anybody (``foreign``).
"""

import base64
import math
from pathlib import Path
from typing import Any

import orjson

from provenance.catalogue.fields import VERSION as CATALOGUE
from provenance.errors import BadFile
from provenance.facts import Run, Sequence
from provenance.integrity import values
from provenance.integrity.canonical import plain
from provenance.store.foreign import SCHEMA, read

__all__ = ["BASELINE", "MAX_BYTES", "SCHEMA", "SEVERAL", "document", "dumps", "read", "read_file", "read_runs"]
SEVERAL = "provenance/runs/1"
BASELINE = "provenance/baseline/1"  # several runs whose common fields stand once: a regression set
MAX_BYTES = 512 << 20


def document(run: Run) -> dict[str, Any]:
    """Return a run as a document for JSON."""
    states = {"states": {name: base64.b64encode(data).decode() for name, data in sorted(run.states.items())}}
    return {
        "schema": SCHEMA, "catalogue": CATALOGUE, "run_id": run.run_id, "kind": run.kind, "runtime": run.runtime,
        "operation": run.operation, "status": run.status, "started_at": str(run.started_at),
        "duration_ns": None if run.duration_ns is None else str(run.duration_ns), "name": run.name,
        "tags": dict(run.tags), "error": run.error, "key_id": run.key_id, "digests": dict(run.digests),
        "fields": {name: field.document() for name, field in sorted(run.fields.items())},
        **(states if run.states else {}),
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
        **({"mask": item.mask} if item.mask is not None else {}), **({"media": item.media} if item.media else {}),
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
    return runs_of(form_of(path), path)


def form_of(path: Path) -> Any:
    """Read a file of JSON that is not too large for one of runs.

    Raises BadFile.
    """
    if path.is_dir():
        raise BadFile(f"{path} is a folder and not an exported run.")
    try:
        if path.stat().st_size > MAX_BYTES:
            raise BadFile(f"{path} is larger than {MAX_BYTES >> 20} MiB; it is not read.")
        return orjson.loads(path.read_bytes())
    except OSError as error:
        raise BadFile(f"{path} cannot be read: {error.strerror}.") from None
    except orjson.JSONDecodeError as error:
        raise BadFile(f"{path} is not JSON: {error}. `provenance export RUN > FILE` writes one.") from None


def runs_of(form: Any, path: Path) -> list[Run]:
    """Return the runs of what a file holds.

    Raises BadFile.
    """
    if not isinstance(form, dict) or form.get("schema") not in (SEVERAL, BASELINE):
        return [read(form, str(path))]
    forms = form.get("runs")
    if not isinstance(forms, list) or not forms:
        raise BadFile(f"{path} is damaged: it says that it holds several runs, and holds none; export them again.")
    shared = form.get("fields") if form["schema"] == BASELINE else None
    return [read(_whole(item, shared), f"run {number} of {path}") for number, item in enumerate(forms, 1)]


def _whole(form: Any, shared: Any) -> Any:
    """Return the document of a run with the fields that it shares with others."""
    if not shared or not isinstance(form, dict) or not isinstance(form.get("fields"), dict):
        return form
    return {**form, "fields": {**shared, **form["fields"]}} if isinstance(shared, dict) else {**form, "fields": shared}
