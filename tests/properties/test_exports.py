"""Exported runs may come from anybody: whatever a file holds, diff answers or refuses it in one sentence, and never fails."""

import contextlib
import io
import json
import re
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from provenance.cli.main import main
from provenance.store import export
from tests.explain.test_compare import pair
from tests.fakes.records import is_one_sentence

some = settings(max_examples=150, deadline=None, database=None)
A, B = pair({"batch.size": 1}, {"batch.size": 8, "generation.repetition_penalty": 1.3})
GOOD: dict[str, Any] = json.loads(export.dumps(A))


def deep(levels: int) -> Any:
    """Return a list in a list, and so on."""
    form: Any = 1
    for _ in range(levels):
        form = [form]
    return form


DEEP = deep(100)

PYTHON = re.compile(
    r"[a-z]Error\b|object has|NoneType|<class|unhashable|subscriptable|not iterable|expected str|invalid literal for"
)

numbers = st.sampled_from([0, -1, 2**31, 2**53, 2**63, 2**64, -(2**70), 10**400, 1e308, -1e-308, 0.5, True])
words = st.sampled_from(
    ["", "inf", "nan", "-inf", "9" * 5000, "\ud800", "\u202e\x1b[2J\0", "<script>", "x", "1e400", "0x10"]
)
tagged = st.sampled_from(
    [{"float": "x"}, {"float": "nan"}, {"integer": "9" * 400}, {"pairs": [[{"a": {}}, 1], [[1], 2]]}, {"text": "ff"},
     {"state": "unknown"}, {"value": {"float": "inf"}}, {"value": [{"float": "nan"}]}, DEEP]
)  # fmt: skip
leaves = st.none() | st.booleans() | numbers | words | tagged
documents = st.recursive(
    leaves,
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=6), inner, max_size=4),
    max_leaves=12,
)


def answered(*contents: bytes, more: tuple[str, ...] = ("--json",)) -> int:
    """Run diff on files of some bytes and the good run, and hold what it says to the promise."""
    said, complained = io.StringIO(), io.StringIO()
    with tempfile.TemporaryDirectory() as folder:
        names = []
        for number, content in enumerate((*contents, export.dumps(B))):
            path = Path(folder) / f"{number}.json"
            path.write_bytes(content)
            names.append(str(path))
        page = ("--html", f"{folder}/p.html", "--sarif", f"{folder}/p.sarif", "--junit", f"{folder}/p.xml")
        with contextlib.redirect_stdout(said), contextlib.redirect_stderr(complained):
            code = main(["diff", *names, *more, *page])
    assert code in (0, 1, 2, 3), complained.getvalue()
    if code == 2:
        assert said.getvalue() == ""
        assert not PYTHON.search(complained.getvalue()), complained.getvalue()
        assert is_one_sentence(complained.getvalue().removeprefix("provenance: ").rstrip("\n")), complained.getvalue()
    elif more == ("--json",):
        json.loads(said.getvalue())
    return code


def places(form: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return the path of every part of a document."""
    yield path
    parts = form.items() if isinstance(form, dict) else enumerate(form) if isinstance(form, list) else ()
    for key, part in parts:
        yield from places(part, (*path, key))


PLACES = [path for path in places(GOOD) if path]


def changed(path: tuple[Any, ...], value: Any) -> dict[str, Any]:
    """Return the good document with one part replaced."""
    form: Any = json.loads(json.dumps(GOOD))
    inner = form
    for key in path[:-1]:
        inner = inner[key]
    inner[path[-1]] = value
    return dict(form)


@some
@given(documents)
def test_a_document_of_any_kind_is_answered_or_refused(form: Any) -> None:
    answered(json.dumps(form).encode())


@some
@given(st.sampled_from(PLACES), documents)
@example(("sequences", 0, "steps", 0, 2), [1])
@example(("sequences", 0, "output_ids", 0), 10**30)
@example(("schema",), {"integer": "9" * 400})
@example(("fields", "batch.size"), {"value": {"integer": "9" * 400}})
@example(("fields", "batch.size"), {"value": DEEP})
@example(("fields", "generation.mode"), {"value": {"text": "edb2a0"}})
def test_a_run_with_any_part_replaced_is_answered_or_refused(path: tuple[Any, ...], value: Any) -> None:
    answered(json.dumps(changed(path, value)).encode())


@some
@given(st.sampled_from([path for path in PLACES if path[0] == "fields" and len(path) == 2]), documents)
def test_a_field_of_any_value_is_answered_or_refused(path: tuple[Any, ...], value: Any) -> None:
    answered(json.dumps(changed(path, {"value": value})).encode())


@settings(some, max_examples=60)
@given(st.sampled_from(PLACES), documents, st.sampled_from([(), ("--md",)]))
def test_so_is_one_among_many_in_every_form(path: tuple[Any, ...], value: Any, more: tuple[str, ...]) -> None:
    answered(json.dumps(changed(path, value)).encode(), export.dumps(A), more=more)


@some
@given(st.integers(0, len(export.dumps(A)) - 1))
def test_a_file_that_is_cut_is_refused(length: int) -> None:
    assert answered(export.dumps(A)[:length]) == 2


@some
@given(st.binary(max_size=200))
def test_bytes_of_any_kind_are_refused(data: bytes) -> None:
    assert answered(data) == 2


@pytest.mark.parametrize("levels", [60, 63, 70, 500, 900, 1000, 1100, 50_000])
@pytest.mark.parametrize(
    "path", [("fields", "batch.size", "value"), ("sequences", 0, "input_value"), ("tags",), ("name",)]
)
def test_nesting_of_any_depth_is_answered_or_refused(path: tuple[Any, ...], levels: int) -> None:
    nested = "[" * levels + "1" + "]" * levels
    answered(json.dumps(changed(path, "HERE")).replace('"HERE"', nested).encode())


@pytest.mark.parametrize("text", ["NaN", "[NaN]", "1" * 100_000, '{"schema": "provenance/runs/1", "runs": [1]}', "[" * 100_000,
                                  '{"schema": "provenance/runs/1", "runs": []}', '{"schema": "provenance/runs/1"}'])  # fmt: skip
def test_what_is_almost_json_is_refused(text: str) -> None:
    assert answered(text.encode()) == 2
