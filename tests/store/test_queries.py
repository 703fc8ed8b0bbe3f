"""Questions to the store: a run is found by what a person types, and nothing that is typed becomes SQL."""

import struct
from pathlib import Path

import pytest
from sqlalchemy import Engine

from provenance.errors import BadFile, RunNotFound
from provenance.facts import BUFFER, ROLE, VALUE, Payload, SequenceEnd, State
from provenance.integrity.values import encode
from provenance.settings import Places
from provenance.store import database, queries
from tests.fakes.records import (
    WALL,
    Calls,
    drained,
    ids,
    is_one_sentence,
    places,
    rows,
    run_id,
    schema_of,
    text,
    written,
)

INJECTIONS = [
    "%", "_", "0000%", "____", "' or 1=1 --", "0000' or '1'='1", "tag:%", "tag:_", "tag:' or 1=1 --", "tag:nightly%",
    "tag:suite=%", "last' --", "*", "0000*", "0000[0-9]", "; drop table runs", "\\", '"', "", " ", "tag:", "tag:=", "0000000g",
    "\0", "\ud800", "tag:\ud800", "tag:a\0b", "last~", "last~-1", "last~x", "last~99999999999999999999", "LAST",
]  # fmt: skip


pytestmark = pytest.mark.usefixtures("both")


@pytest.fixture
def spots(tmp_path: Path, both: str) -> Places:
    """Return a store of five runs: two begin alike, one is named, one tagged."""
    assert both
    spots = places(tmp_path / "store")
    calls = Calls(spots.spool)
    calls.prints()
    for number, facts in (
        (0x10000000, {"name": "nightly"}), (0x20000000, {}), (0x20000001, {"tags": {"suite": "7", "nightly": "no"}}),
        (0x30000000, {"name": "nightly"}), (0x40000000, {"tags": {"suite": "8"}, "name": "100%"}),
    ):  # fmt: skip
        calls.call(number, {"facts": facts, "wall_ns": WALL + number})
    calls.close()
    return drained(spots)


@pytest.fixture
def engine(spots: Places) -> Engine:
    return database.reading(spots.url, spots.database)


# -- finding ------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("reference", "number"),
    [("1000", 0x10000000), ("10000000-0000-7000", 0x10000000), ("20000001", 0x20000001), (run_id(0x20000000), 0x20000000),
     (run_id(0x20000000).upper(), 0x20000000), ("last", 0x40000000), ("last~0", 0x40000000), ("last~1", 0x30000000),
     ("last~4", 0x10000000), ("tag:nightly", 0x30000000), ("tag:suite=7", 0x20000001), ("tag:suite", 0x40000000),
     ("tag:nightly=no", 0x20000001), ("tag:100%", 0x40000000)],
)  # fmt: skip
def test_a_run_is_found_by_prefix_age_name_or_tag(engine: Engine, reference: str, number: int) -> None:
    assert queries.find(engine, reference) == run_id(number)


@pytest.mark.parametrize("reference", ["abcd", "ABCDEF", "abcdef12-0000", "ffff", "9999"])
def test_a_prefix_may_be_followed_by_any_digit(tmp_path: Path, reference: str) -> None:
    spots = places(tmp_path / "more")
    calls = Calls(spots.spool)
    for number in (0xABCDEF12, 0xFFFFFFFF, 0x99990000):
        calls.call(number)
    calls.close()
    found = queries.find(database.reading(drained(spots).url, spots.database), reference)
    assert found.startswith(reference.lower())


def test_a_prefix_of_two_runs_is_ambiguous_and_names_both(engine: Engine) -> None:
    with pytest.raises(RunNotFound) as caught:
        queries.find(engine, "2000")
    assert caught.value.candidates == (run_id(0x20000000), run_id(0x20000001))
    assert is_one_sentence(str(caught.value))
    assert "is ambiguous" in str(caught.value)


@pytest.mark.parametrize(
    "reference", ["9999", "last~5", "last~999999999", "tag:none", "tag:suite=9", "tag:nightly=yes", "200"]
)
def test_what_fits_no_run_is_said(engine: Engine, reference: str) -> None:
    with pytest.raises(RunNotFound, match="no run begins with") as caught:
        queries.find(engine, reference)
    assert is_one_sentence(str(caught.value))


@pytest.mark.parametrize("reference", INJECTIONS, ids=ascii)
def test_wildcards_and_injections_find_nothing_and_change_nothing(
    spots: Places, engine: Engine, reference: str
) -> None:
    before = schema_of(spots), rows(spots, "select run_id from runs")
    with pytest.raises(RunNotFound):
        queries.find(engine, reference)
    bare = reference.removeprefix("tag:")
    assert queries.log(engine, 10, name=bare or "none") == []
    assert queries.log(engine, 10, status=bare or "none") == []
    assert queries.log(engine, 10, tag=bare or "none") == []
    assert (schema_of(spots), rows(spots, "select run_id from runs")) == before


def test_an_empty_store_has_no_last_run(tmp_path: Path) -> None:
    spots = places(tmp_path / "empty")
    Calls(spots.spool).close()
    engine = database.reading(drained(spots).url, spots.database)
    for reference in ("last", "last~1", "tag:x", "1234"):
        with pytest.raises(RunNotFound):
            queries.find(engine, reference)
    assert queries.log(engine, 5) == []
    assert queries.run_count(engine) == 0


# -- lists --------------------------------------------------------------------------------------------


def test_a_list_shows_the_newest_first_and_no_more_than_asked_for(engine: Engine) -> None:
    assert [line.run_id for line in queries.log(engine, 2)] == [run_id(0x40000000), run_id(0x30000000)]
    (line,) = queries.log(engine, 1)
    assert (line.status, line.runtime, line.operation, line.name, line.model) == (
        "ok",
        "fake",
        "generate",
        "100%",
        "tiny",
    )
    assert (line.batch_size, line.duration_ns, line.started_at, line.error) == (1, 1000, WALL + 0x40000000, "")
    assert queries.run_count(engine) == 5


def test_a_list_can_be_narrowed_by_name_status_and_tag(engine: Engine) -> None:
    def numbers(**filters: str) -> list[str]:
        return [line.run_id for line in queries.log(engine, 10, **filters)]

    assert numbers(name="nightly") == [run_id(0x30000000), run_id(0x10000000)]
    assert numbers(name="100%") == [run_id(0x40000000)]
    assert numbers(tag="suite") == [run_id(0x40000000), run_id(0x20000001)]
    assert numbers(tag="suite=7") == [run_id(0x20000001)]
    assert numbers(status="error") == []
    assert len(numbers(status="ok")) == 5
    assert numbers(status="ok", name="nightly", tag="suite") == []


# -- reading a run back -------------------------------------------------------------------------------

STEPS = struct.pack("<BBBBI", 1, 2, 0, 2, 2) + struct.pack("<4i", 8, 3, 9, 8) + struct.pack("<4f", 2, 1.5, 4, 4) + struct.pack(
    "<2f", 3, 5
)  # fmt: skip


def test_a_whole_run_reads_back(tmp_path: Path) -> None:
    spots = places(tmp_path / "store")
    calls = Calls(spots.spool)
    calls.prints()
    value = {"args": (1, float("inf"), b"x")}
    begin = (
        ids("prompt.ids", [5, 2**40]),
        text("prompt.text", "in é"),
        Payload(ROLE["arguments"], VALUE, encode(value)),
    )
    done = (ids("output.ids", [8, 9]), text("output.text", "out"), Payload(ROLE["output.value"], VALUE, encode({1: -0.0})),
            Payload(ROLE["evidence.logits"], BUFFER, STEPS))  # fmt: skip
    facts = {"name": "n", "tags": {"a": "b"}, "batch.size": 1, "seed.torch_initial": 7, "odd": "no field",
             "batch.padding_side": {"$field": {"state": "not_applicable", "reason": "one row"}}}  # fmt: skip
    root = calls.weights()
    calls.call(1, {"payloads": begin, "facts": facts}, payloads=done, weights=root)
    calls.close()
    run = queries.load(database.reading(drained(spots).url, spots.database), run_id(1))
    assert (run.kind, run.runtime, run.operation, run.status, run.name, run.tags, run.error) == (
        "call", "fake", "generate", "ok", "n", {"a": "b"}, ""
    )  # fmt: skip
    (sequence,) = run.sequences
    assert (sequence.input_ids, sequence.output_ids) == ((5, 2**40), (8, 9))
    assert (sequence.input_text, sequence.output_text) == ("in é", "out")
    assert (sequence.input_value, repr(sequence.output_value)) == (value, "{1: -0.0}")
    assert (sequence.finish, sequence.padding, sequence.logits_dtype, sequence.no_evidence) == (
        "eos",
        0,
        "bfloat16",
        "",
    )
    first, second = sequence.steps
    assert (first.token, first.top_ids, first.top_logits, first.logprob) == (8, (8, 3), (2.0, 1.5), -1.0)
    assert (first.margin, first.runner_up) == (0.5, 3)
    assert (second.token, second.margin, second.runner_up) == (9, 0.0, 8)
    assert len(sequence.input_key) == len(sequence.output_key) == 64
    assert run.fields["generation.temperature"].value == 0.7
    assert run.fields["generation.temperature"].source == "call"
    assert run.fields["gpu.count"].state is State.UNKNOWN
    assert run.fields["batch.size"].value == 1
    assert run.fields["batch.padding_side"].reason == "one row"
    assert run.fields["weights.loaded_root"].value == run.digests["weights"]
    assert run.fields["context.pid"].value == calls.journal.stream.pid
    assert "odd" not in run.fields
    assert {"environment", "switches", "model", "settings", "weights"} <= run.digests.keys()


def test_what_is_not_known_yet_says_so(engine: Engine) -> None:
    run = queries.load(engine, run_id(0x10000000))
    assert run.fields["weights.loaded_root"].state is State.UNKNOWN
    assert "weights.files_root" not in run.fields
    assert run.sequences[0].steps == ()
    assert run.sequences[0].no_evidence == "not recorded"


def test_a_run_that_is_not_there_is_said(engine: Engine) -> None:
    with pytest.raises(RunNotFound):
        queries.load(engine, run_id(0x99))


def test_rows_and_returns_keep_their_order_and_their_own_payloads(tmp_path: Path) -> None:
    spots = places(tmp_path / "store")
    calls = Calls(spots.spool)
    begin = tuple(ids("prompt.ids", [row], row) for row in range(2))
    done = tuple(ids("output.ids", [10 * row + ret], row, ret) for row in range(2) for ret in range(2))
    ends = tuple(SequenceEnd(row, ret, 1, 1, 0, 1, 0.5, 0) for row in range(2) for ret in range(2))
    calls.call(1, {"payloads": begin, "rows": 2}, payloads=done, sequences=ends)
    calls.close()
    run = queries.load(database.reading(drained(spots).url, spots.database), run_id(1))
    assert [(s.row, s.ret, s.input_ids, s.output_ids) for s in run.sequences] == [
        (row, ret, (row,), (10 * row + ret,)) for row in range(2) for ret in range(2)
    ]


@pytest.mark.parametrize("damage", ["update payloads set data = x'00ff'", "update payloads set codec = 77"])
def test_a_damaged_body_is_refused_in_one_sentence(spots: Places, engine: Engine, damage: str) -> None:
    with written(spots) as connection:
        connection.exec_driver_sql(damage if spots.database else damage.replace("x'00ff'", r"'\x00ff'"))
    with pytest.raises(BadFile, match="a stored payload is damaged") as caught:
        queries.load(engine, run_id(0x10000000))
    assert is_one_sentence(str(caught.value))
