"""A run as one file: it reads back whole, and a file from anybody is refused in one sentence, never trusted."""

import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson
import pytest

from provenance.errors import BadFile
from provenance.facts import Field, Run, Sequence, State, Step
from provenance.store import export
from tests.fakes.records import is_one_sentence
from tests.fakes.values import INF, nan

RUN = Run(
    run_id="00000001-0000-7000-8000-000000000000", kind="call", runtime="transformers", operation="generate", status="ok",
    started_at=2**62, duration_ns=2**53 + 1, name="nightly", tags={"suite": "7"}, error="ValueError: no", key_id="ab" * 8,
    digests={"environment": "p1:sha256:" + "00" * 32}, states={"rng.torch_cpu": b"\0\xffstate"},
    fields={
        "gpu.count": Field.unknown("gpu.count", "no driver"), "a.float": Field("a.float", 0.1, source="call"),
        "a.list": Field("a.list", [1, None, "x", 2**70]), "a.unset": Field.unset("a.unset"), "a.none": Field("a.none", None),
        "a.moot": Field.moot("a.moot", "greedy"), "a.red": Field("a.red", None, State.REDACTED),
        "a.text": Field("a.text", "\ud800"),
    },
    sequences=(
        Sequence(
            0, 1, "aa" * 32, "bb" * 32, (1, 2**40, -200), (3, 4, 5), "in é", "out\0", {"args": (1, b"x", -0.0)}, nan(0x7FF8000000000001), "eos", 4,
            (Step(3, (3, 9), (INF, -INF), None, 0.0, 9), Step(4, (), (), -0.5, None, None)), "float32", "",
            (1, 0, 1, 1), ("pixel_values float32 (3, 2) sha256:00",),
        ),
        Sequence(1, 0, no_evidence="beam search"),
    ),
)  # fmt: skip
GOOD: dict[str, Any] = orjson.loads(export.dumps(RUN))


def sequence(**changes: Any) -> dict[str, Any]:
    """Return the form of the run with its first sequence changed."""
    first = {**GOOD["sequences"][0], **changes}
    return {**GOOD, "sequences": [first]}


# -- round trip ---------------------------------------------------------------------------------------


def test_a_run_reads_back_whole(tmp_path: Path) -> None:
    path = tmp_path / "run.json"
    path.write_bytes(export.dumps(RUN))
    back = export.read_file(path)
    assert export.document(back) == export.document(RUN)
    assert repr(back.sequences) == repr(RUN.sequences)
    assert back.states == RUN.states
    assert {name: (f.state, f.reason, f.source, f.value) for name, f in back.fields.items()} == {
        name: (f.state, f.reason, f.source, f.value) for name, f in RUN.fields.items()
    }
    assert (back.started_at, back.duration_ns, back.tags) == (2**62, 2**53 + 1, {"suite": "7"})


def test_numbers_that_other_readers_would_round_travel_as_text() -> None:
    assert GOOD["started_at"] == str(2**62)
    assert GOOD["duration_ns"] == str(2**53 + 1)
    assert GOOD["sequences"][0]["steps"][0][2] == ["inf", "-inf"]


def test_text_that_json_cannot_hold_is_escaped_and_the_file_is_json() -> None:
    odd = Run("r", "call", "", "", "ok", 1, None, {}, (Sequence(0, 0, input_text="a\ud800"),))
    assert orjson.loads(export.dumps(odd))["sequences"][0]["input_text"] == "a\\ud800"


def test_a_reader_ignores_what_it_does_not_know() -> None:
    later = {**GOOD, "later": {"x": 1}, "sequences": [{**item, "later": 1} for item in GOOD["sequences"]]}
    assert export.document(export.read(later, "f")) == export.document(RUN)


def test_a_file_of_the_first_writer_with_the_fewest_keys_is_a_run() -> None:
    least = {
        "schema": export.SCHEMA,
        "run_id": RUN.run_id,
        "status": "ok",
        "started_at": "1",
        "fields": {},
        "sequences": [],
    }
    run = export.read(least, "f")
    assert (run.run_id, run.kind, run.tags, run.duration_ns) == (RUN.run_id, "call", {}, None)


# -- files from anybody -------------------------------------------------------------------------------

HOSTILE: dict[str, Any] = {
    "nothing": None, "text": "x", "number": 1, "list": [], "empty": {}, "no schema": {**GOOD, "schema": None},
    "newer schema": {**GOOD, "schema": "provenance/run/2"}, "schema of another kind": {**GOOD, "schema": {}},
    **{f"without {key}": {k: v for k, v in GOOD.items() if k != key} for key in ("run_id", "status", "started_at", "fields", "sequences")},
    **{f"{key} is a list": {**GOOD, key: [[1]]} for key in ("started_at", "fields", "tags", "digests", "sequences", "duration_ns")},
    **{f"{key} is a number": {**GOOD, key: 7} for key in ("fields", "tags", "digests", "sequences")},
    "time is no number": {**GOOD, "started_at": "soon"}, "time is huge": {**GOOD, "started_at": "9" * 5000},
    "time is infinite": {**GOOD, "started_at": INF}, "time is null": {**GOOD, "started_at": None},
    "field is a number": {**GOOD, "fields": {"a": 1}}, "field has a strange state": {**GOOD, "fields": {"a": {"state": "maybe"}}},
    "field has a strange float": {**GOOD, "fields": {"a": {"value": {"float": "x"}}}},
    "field has a strange integer": {**GOOD, "fields": {"a": {"value": {"integer": "9" * 9999}}}},
    "field has a strange text": {**GOOD, "fields": {"a": {"value": {"text": "zz"}}}},
    "field has half a surrogate": {**GOOD, "fields": {"a": {"value": {"text": "ff"}}}},
    "field has strange pairs": {**GOOD, "fields": {"a": {"value": {"pairs": [1, [2]]}}}},
    "sequence is a number": {**GOOD, "sequences": [1]}, "sequence has no row": {**GOOD, "sequences": [{"ret": 0}]},
    "row is text": sequence(row="first"), "row is infinite": sequence(row=INF), "ids are text": sequence(input_ids="x"),
    "ids hold null": sequence(output_ids=[None]), "ids are a number": sequence(output_ids=5),
    "ids are infinite": sequence(output_ids=[INF]), "padding is text": sequence(padding="x"),
    "steps are a number": sequence(steps=5), "a step is short": sequence(steps=[[1, [], []]]),
    "a step is a number": sequence(steps=[5]), "a token is null": sequence(steps=[[None, [], [], None, None, None]]),
    "a token is infinite": sequence(steps=[[INF, [], [], None, None, None]]),
    "a step has more ids than logits": sequence(steps=[[1, [1, 2], [0.5], None, None, None]]),
    "an id is beyond 64 bits": sequence(output_ids=[2**63]), "a row is half": sequence(row=0.5), "padding is huge": sequence(padding=2**70),
    "run has a number for a name": {**GOOD, "run_id": 7}, "status is a list": {**GOOD, "status": []},
    "field is nested too deep": {**GOOD, "fields": {"a": {"value": orjson.loads(b"[" * 80 + b"]" * 80)}}},
    "a logit is text": sequence(steps=[[1, [1], ["x"], None, None, None]]),
    "value is no value": sequence(input_value=5), "value is empty": sequence(input_value=[]),
    "value has three parts": sequence(input_value=[1, 2, 3]), "tag is a list": sequence(input_value=[1, {"$": []}]),
    "float is short": sequence(input_value=[1, {"$": "f8", "v": "00"}]), "float is none": sequence(input_value=[1, {"$": "f8"}]),
    "bytes are none": sequence(input_value=[1, {"$": "bytes", "v": "A"}]),
    "int is none": sequence(input_value=[1, {"$": "int", "v": "0xzz"}]), "dict is none": sequence(input_value=[1, {"$": "dict", "v": 5}]),
    "complex is none": sequence(input_value=[1, {"$": "complex", "v": [[], []]}]),
    "table is empty": sequence(input_value=[1, {"$": "nodes", "v": []}]),
    "table points at itself": sequence(input_value=[1, {"$": "nodes", "v": [{"$": "at", "v": 0}]}]),
    "table points outside": sequence(input_value=[1, {"$": "nodes", "v": [{"$": "at", "v": 9}]}]),
    "table shares a row": sequence(input_value=[1, {"$": "nodes", "v": [[{"$": "at", "v": 1}, {"$": "at", "v": 1}], []]}]),
}  # fmt: skip


@pytest.mark.parametrize("form", HOSTILE.values(), ids=HOSTILE.keys())
def test_what_is_no_run_is_refused_in_one_sentence(form: object) -> None:
    with pytest.raises(BadFile, match=r"^FILE is (not an exported run|damaged): ") as caught:
        export.read(form, "FILE")
    assert is_one_sentence(str(caught.value)[:300])


TWO = GOOD["sequences"]
EDITED: dict[str, tuple[dict[str, Any], str]] = {
    "a status": ({**GOOD, "status": "weird"}, r'status is "weird", and one of running, ok, '),
    "a kind": ({**GOOD, "kind": "zz"}, 'kind is "zz", and one of call, '),
    "a finish": (sequence(finish="zz"), r'sequences\[0\]\.finish is "zz", and one of unknown, eos, '),
    "a row": (sequence(row=-1), r"sequences\[0\]\.row is -1, and the number of a prompt "),
    "a return": (sequence(ret=True), r"sequences\[0\]\.ret is true, and "),
    "a run's id": ({**GOOD, "run_id": "../../x"}, r'run_id is "\.\./\.\./x", and the id of a run '),
    "a key": (sequence(output_key="zz"), r'sequences\[0\]\.output_key is "zz", and a key of 64 hexadecimal digits '),
    "a random state": ({**GOOD, "states": {"rng.torch_cpu": "no!"}}, r'states\.rng\.torch_cpu is "no!", and the state of a generator '),
    "a mask": (sequence(mask=[1, 2]), r"sequences\[0\]\.mask\[1\] is 2, and 0 or 1 "),
    "a digest": ({**GOOD, "digests": {"model": "zz"}}, r'digests\.model is "zz", and a digest '),
    "a number below 0 for an id": (sequence(output_ids=[3, -5, 5]), r"sequences\[0\]\.output_ids\[1\] is -5, and a token id "),
    "truth for an id": (sequence(output_ids=[True]), r"output_ids\[0\] is true, and a token id "),
    "a huge id": (sequence(input_ids=[2**70]), r"input_ids\[0\] is \d+, and a token id "),
    "an id that was not chosen": (sequence(output_ids=[3, 9, 5]), r"steps\[1\]\[0\] is 4, and the output id 9 of that place "),
    "more steps than ids": (sequence(output_ids=[3]), r"steps\[1\] is \[4, .*, and no step beyond the 1 output ids "),
    "a rival that was chosen": (sequence(steps=[[3, [3, 9], [2, 1], None, 0.0, 3]]), r"steps\[0\]\[5\] is 3, and another id "),
    "a margin": (sequence(steps=[[3, [3, 9], [2, 1], None, -0.5, 9]]), r"steps\[0\]\[4\] is -0.5, and a margin from 0 "),
    "a share": (sequence(steps=[[3, [3, 9], [2, 1], 7.0, 1.0, 9]]), r"steps\[0\]\[3\] is 7.0, and the logarithm of a share "),
    "a row twice": ({**GOOD, "sequences": [*TWO, TWO[0]]}, r"sequences\[2\]\.row is 0, and a row and return that sequences\[0\] has not "),
    "a row of another run": (
        {**GOOD, "fields": {"batch.size": {"value": 1}}},
        r"sequences\[1\]\.row is 1, and a row below the batch size 1 of its run ",
    ),
    "a prompt of another run": (
        {**GOOD, "sequences": [*TWO, {**TWO[0], "ret": 0, "input_key": "cc" * 32}]},
        r"sequences\[2\]\.input_key is \"cccc.*, and the prompt of the other sequences of its row ",
    ),
    "an output of another run": (
        {**GOOD, "sequences": [TWO[0], {**TWO[0], "row": 1, "output_ids": [3, 4, 6], "steps": []}]},
        r"sequences\[1\]\.output_key is \"bbbb.*, and a key that no sequence with other ids has ",
    ),
    "a field": ({**GOOD, "fields": {"a.b": {"value": {"float": "zz"}}}}, r'fields\.a\.b\.value is \{"float": "zz"\}, and the value of a field '),
    "a state": ({**GOOD, "fields": {"a.b": {"state": "zz"}}}, r'fields\.a\.b\.state is "zz", and one of unset, '),
    "a tag": ({**GOOD, "tags": {"suite": 7}}, r"tags\.suite is 7, and text "),
    "a time": ({**GOOD, "started_at": "1_0"}, 'started_at is "1_0", and a number of nanoseconds, as text, '),
    "a value": (sequence(input_value="zz"), r'input_value is "zz", and an array '),
}  # fmt: skip


@pytest.mark.parametrize(("form", "said"), EDITED.values(), ids=EDITED.keys())
def test_what_was_edited_is_named_with_its_place_and_what_belongs_there(form: object, said: str) -> None:
    whole = rf"^FILE is damaged: (sequences\[0\]\.)?{said}.*belongs there; export the run again\.$"
    with pytest.raises(BadFile, match=whole) as caught:
        export.read(form, "FILE")
    assert is_one_sentence(str(caught.value))


REPLACED: tuple[object, ...] = (None, True, -1, 2**70, "", "zz", [], {}, 1e308, [[]])
GONE = object()
PYTHON = re.compile(
    r"Error\b|object has|NoneType|<class|unhashable|subscript|iterable|argument|\b(str|int|dict|list|tuple)\b"
)
# Where one of the above may stand: what is text of any kind, what may be absent, and numbers of any size.
FREE = re.compile(
    r"(name|runtime|operation|error|digests(\.\w+)?|tags(\.\w+)?|key_id|kind|duration_ns|catalogue|later"
    r"|fields(\..*)?|states(\..*)?"
    r"|sequences(\.\d+(\.(input_ids(\.\d+)?|output_ids(\.2)?|(input|output)_(text|key)|(input|output)_value(\..*)?|logits_dtype|no_evidence"
    r"|mask(\.\d+)?|media(\.\d+)?|padding|finish|steps(\.\d+(\.([1-5]|2\.\d+|1\.\d+))?)?))?)?)"
)


def replaced(form: Any, path: tuple[Any, ...], value: object) -> Any:
    """Return a document with one part replaced or taken away."""
    whole = inner = orjson.loads(orjson.dumps(form))
    for key in path[:-1]:
        inner = inner[key]
    if value is GONE:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return whole


def places(form: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Return the path of every part of a document."""
    parts = form.items() if isinstance(form, dict) else enumerate(form) if isinstance(form, list) else ()
    for key, part in parts:
        yield (*path, key)
        yield from places(part, (*path, key))


@pytest.mark.parametrize("value", [*REPLACED, GONE], ids=lambda value: "gone" if value is GONE else ascii(value)[:12])
def test_each_part_replaced_is_refused_in_words_or_may_be_so(value: object) -> None:
    refused = 0
    for path in places(GOOD):
        place = ".".join(map(str, path))
        try:
            run = export.read(replaced(GOOD, path, value), "FILE")
        except BadFile as error:
            said = str(error)
            assert said.startswith("FILE is ")
            assert is_one_sentence(said), said
            ours = re.sub(r"(fields|sequences)\S* is .*, and |a\.list", "", said)  # less what the file itself says
            assert not PYTHON.search(ours), said
            refused += 1
        else:
            assert FREE.fullmatch(place), (place, value)
            export.dumps(run)
    assert refused > 5


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"\xff\xfe",
        b"[" * 5000,
        b'{"a":' * 3000 + b"1" + b"}" * 3000,
        b"PROVJRNL" + bytes(99),
        b"null",
        b'"\\ud800"',
    ],
    ids=lambda data: ascii(data[:8]),
)
def test_bytes_that_are_no_run_are_refused_in_one_sentence(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "file.json"
    path.write_bytes(data)
    with pytest.raises(BadFile, match=r"file\.json is not") as caught:
        export.read_file(path)
    assert is_one_sentence(str(caught.value))


@pytest.mark.parametrize("depth", [200, 900])
def test_a_value_of_any_depth_is_read_or_refused(depth: int) -> None:
    deep: Any = 1
    for _ in range(depth):
        deep = [deep]
    said = ""
    try:
        export.read(sequence(input_value=[1, deep]), "FILE")
    except BadFile as error:
        said = str(error)
    assert said == "" or is_one_sentence(said)


def test_what_is_no_file_is_said(tmp_path: Path) -> None:
    for path, message in ((tmp_path, "is a folder"), (tmp_path / "none", "cannot be read: No such file")):
        with pytest.raises(BadFile, match=message) as caught:
            export.read_file(path)
        assert is_one_sentence(str(caught.value))


def test_a_file_that_is_too_large_is_not_read(tmp_path: Path) -> None:
    path = tmp_path / "large.json"
    path.touch()
    os.truncate(path, export.MAX_BYTES + 1)  # a hole: it takes no room on the disk
    with pytest.raises(BadFile, match="is larger than 512 MiB; it is not read"):
        export.read_file(path)
