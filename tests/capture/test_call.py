"""Fields of the caller's own: set at run time, seen by show and diff, never in the way of the run."""

from pathlib import Path
from typing import Any

import orjson
import pytest

import provenance
from provenance.errors import BadField, ProvenanceError
from provenance.facts import State
from provenance.journal.spool import segments
from tests.conftest import Command
from tests.fakes import models


@pytest.fixture(autouse=True)
def _no_writer(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PROVENANCE_WRITER", "off")


@provenance.record(name="work")
def work(change: Any = None) -> int:
    """Do something, and perhaps learn something on the way."""
    if change is not None:
        change()
    return 1


def test_a_field_of_the_callers_own_is_a_field_of_the_calls_that_follow(db: Path) -> None:
    with provenance.run() as run:
        work()
        run.set_field("engine.kv_split", 4)
        run.set_field("mine.deep", {"a": [1.5, None]})
        work()
        with provenance.run() as inner:
            inner.set_field("engine.kv_split", 8)
            work()
        work()
    work()
    before, second, nested, after, outside = models.runs(db)
    assert "engine.kv_split" not in before.fields
    field = second.fields["engine.kv_split"]
    assert (field.value, field.source, field.state) == (4, "caller", State.VALUE)
    assert second.fields["mine.deep"].value == {"a": [1.5, None]}
    assert nested.fields["engine.kv_split"].value == 8
    assert after.fields["engine.kv_split"].value == 4
    assert "engine.kv_split" not in outside.fields


def test_a_field_learned_while_the_call_runs_is_in_its_end(db: Path) -> None:
    with provenance.run() as run:
        run.set_field("engine.kv_split", 1)
        work(lambda: run.set_field("engine.kv_split", 2))
    (found,) = models.runs(db)
    assert found.fields["engine.kv_split"].value == 2


def test_show_and_diff_see_it(db: Path, command: Command) -> None:
    for value in (4, 8):
        with provenance.run() as run:
            run.set_field("engine.kv_split", value)
            work()
    assert provenance.flush()
    shown = orjson.loads(command("show", "last", "--json").stdout)
    assert shown["fields"]["engine.kv_split"] == {"value": 8, "source": "caller"}
    found = orjson.loads(command("diff", "last~1", "last", "--json").stdout)
    named = [item["field"] for item in found["causes"] + found["dismissed"]]
    assert "engine.kv_split" in named, found


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("kv split", 1, "the field 'kv split' cannot be set: a field is named group.name, in ASCII letters, digits"),
        (7, 1, "the field 7 cannot be set: a name is a text, like 'engine.kv_split'. Choose another name."),
        ("gpu.0.name", "mine", "the field 'gpu.0.name' cannot be set: it is read by provenance itself."),
        ("vllm.sampling.top_p", 1.0, "the field 'vllm.sampling.top_p' cannot be set: it is read by provenance itself."),
        ("weights.loaded_root", "x", "the field 'weights.loaded_root' cannot be set: it is read by provenance itself."),
        ("mine.thing", object(), "the field 'mine.thing' cannot hold a object: give a number, a text, None, or a list"),
        ("mine.thing", {1: 2}, "the field 'mine.thing' cannot hold a dict"),
        ("mine.large", "x" * 20000, "the field 'mine.large' cannot be set: its value takes 20002 bytes"),
    ],
)
def test_what_cannot_be_set_is_one_sentence_and_the_run_is_kept(name: Any, value: Any, message: str, db: Path) -> None:
    with provenance.run(name="kept") as run:
        work()
        with pytest.raises(BadField) as raised:
            run.set_field(name, value)
        work()
    assert str(raised.value).startswith(message)
    assert isinstance(raised.value, (ValueError, ProvenanceError))
    assert [found.status for found in models.runs(db)] == ["ok", "ok"]


def test_a_value_that_holds_itself_and_a_block_that_is_over_are_refused(db: Path) -> None:
    loop: list[Any] = []
    loop.append(loop)
    with provenance.run() as run:
        with pytest.raises(BadField, match="cannot hold a list"):
            run.set_field("mine.loop", loop)
        for number in range(64):
            run.set_field(f"mine.n{number}", number)
        with pytest.raises(BadField, match="beyond 64"):
            run.set_field("mine.more", 1)
    with pytest.raises(BadField, match="after its block ended"):
        run.set_field("mine.n1", 1)


def test_a_credential_is_redacted(db: Path) -> None:
    with provenance.run() as run:
        run.set_field("mine.address", "https://me:password@host/x")
        run.set_field("mine.nothing", None)
        work()
    (found,) = models.runs(db)
    assert found.fields["mine.address"].state is State.REDACTED
    assert found.fields["mine.nothing"].state is State.UNSET
    written = b"".join(path.read_bytes() for path in segments(db.with_name("p.db.spool")))
    assert b"mine.address" in written
    assert b"password" not in written


def test_what_the_recorder_read_itself_is_stronger(db: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.fakes import engines

    engines.load(monkeypatch, "vllm")
    llm = provenance.wrap(engines.LLM())
    with provenance.run() as run:
        run.set_field("vllm.cache_config.block_size", 99)
        run.set_field("vllm.watermark_config.algorithm", "mine")
        llm.generate("a")
    (found,) = models.runs(db)
    assert found.fields["vllm.cache_config.block_size"].value == 16
    assert found.fields["vllm.watermark_config.algorithm"].value == "mine"  # unknown to the reader
