"""From journal to rows, once only: whatever is drained twice, cut short, killed or contradicted."""

import hashlib
import shutil
import struct
from pathlib import Path
from typing import Any

import orjson
import pytest

from provenance import privacy, writer
from provenance.errors import KeyMismatch
from provenance.facts import ROLE, Field, Fingerprint, Payload, SequenceEnd
from provenance.integrity import digests
from provenance.integrity.canonical import named, raw
from provenance.journal import frame, records, spool
from provenance.settings import Places
from provenance.store import database, leaves, queries
from provenance.store import rows as rows_of
from provenance.store.batch import Item
from provenance.store.ingest import Ingest, frame_digest
from tests.conftest import Command
from tests.fakes.records import (
    ENVIRONMENT,
    KEY,
    MODEL,
    NOTHING,
    SEED,
    SETTINGS,
    SWITCHES,
    WEIGHTS,
    Calls,
    drained,
    everything,
    framed,
    header,
    ids,
    is_one_sentence,
    one,
    output,
    places,
    request,
    rows,
    run_id,
    segment,
    stream,
    text,
    whole,
    written,
)

LEAVES = "select idx, seq, kind, leaf from log_entries order by idx"
EVERYTHING = ("streams", "runs", "run_tags", "sequences", "payload_refs", "payloads", "fingerprints", "fingerprint_fields",
              "weights", "weight_entries", "ingested", "log_entries", "equal_inputs", "equal_outputs", "events")  # fmt: skip


pytestmark = pytest.mark.usefixtures("both")


@pytest.fixture
def spots(tmp_path: Path, both: str) -> Places:
    assert both
    return places(tmp_path / "store")


def life(spots: Places, count: int = 20) -> Calls:
    """Write a process life of many calls into a spool, and end it."""
    calls = Calls(spots.spool)
    calls.prints()
    root = calls.weights()
    first = calls.journal.next_seq
    for n in range(count):
        calls.call(n, {"payloads": (ids("prompt.ids", [n % 5]), text("prompt.text", f"prompt {n % 5}"))})
    calls.binding(first, calls.journal.next_seq)
    for n in range(count, 2 * count):
        calls.call(n, {"facts": {"tags": {"n": str(n)}, "name": "late"}}, weights=root)
    calls.start(2 * count)
    calls.note("gap", NOTHING, orjson.dumps({"first": 900, "last": 901, "reason": "full"}))
    calls.close()
    return calls


def content(spots: Places) -> dict[str, Any]:
    """Return every row of every table, but for the position in the spool."""
    names = {"streams": "id, stream_id, host, pid, program, key_id, last_seq, last_seen, ended"}
    return {name: sorted(rows(spots, f"select {names.get(name, '*')} from {name}"), key=repr) for name in EVERYTHING}


def twin(spots: Places, folder: Path) -> Places:
    """Return another empty store with a copy of a spool."""
    other = places(folder)
    shutil.copytree(spots.spool, other.spool)
    return other


# -- once only ----------------------------------------------------------------------------------------


def test_a_segment_drained_twice_is_stored_once(spots: Places, tmp_path: Path) -> None:
    life(spots)
    shutil.copytree(spots.spool, tmp_path / "kept")
    before = content(drained(spots))
    assert len(before["runs"]) == 41
    assert spool.segments(spots.spool) == []
    with written(spots) as connection:  # as after a database was put back
        connection.exec_driver_sql("update streams set segment = 0, position = 0, last_seq = -1")
    for path in (tmp_path / "kept").glob("*.seg"):
        shutil.copy(path, spots.spool)
    assert content(drained(spots)) == before


def test_two_stores_of_one_spool_hold_the_same_leaves(spots: Places, tmp_path: Path) -> None:
    life(spots)
    other = twin(spots, tmp_path / "other")
    found = rows(drained(spots), LEAVES)
    assert rows(drained(other), LEAVES) == found
    assert [seq for _, seq, _, _ in found] == list(range(len(found)))


CRASH = """
import os, sys
from pathlib import Path
from provenance import writer
from provenance.journal import kept
from provenance.store import batch, ingest
from tests.fakes.records import places
point, left = sys.argv[2], int(sys.argv[3])
def bomb():
    global left
    left -= 1
    if left < 0:
        os._exit(9)
def around(owner, name, before=False):
    real = getattr(owner, name)
    def wrapped(*args, **kwargs):
        if before: bomb()
        result = real(*args, **kwargs)
        if not before: bomb()
        return result
    setattr(owner, name, wrapped)
writer.BATCH_RECORDS = 7
{"begin": lambda: around(ingest.Ingest, "write", True), "batch": lambda: around(batch.Batch, "add"),
 "commit": lambda: around(batch.Batch, "finish"), "committed": lambda: around(ingest.Ingest, "write"),
 "keep": lambda: around(kept, "keep", True), "kept": lambda: around(kept, "keep")}[point]()
writer.drain(places(Path(sys.argv[1])), 60)
"""


@pytest.mark.parametrize(
    ("point", "after"),
    [("begin", 0), ("begin", 4), ("batch", 0), ("batch", 30), ("commit", 0), ("commit", 5), ("committed", 0),
     ("committed", 6), ("committed", 12), ("keep", 0), ("kept", 0)],
)  # fmt: skip
def test_a_writer_killed_at_any_step_loses_nothing_and_repeats_nothing(
    spots: Places, tmp_path: Path, python: Command, point: str, after: int
) -> None:
    life(spots)
    clean = twin(spots, tmp_path / "clean")
    died = python(CRASH, str(spots.key_file.parent), point, str(after))
    assert died.returncode == 9, died.stderr
    assert content(drained(spots)) == content(drained(clean))
    assert whole(spots)


def test_other_bytes_under_a_known_number_raise_an_alarm_and_change_nothing(spots: Places) -> None:
    salt = bytes(16)
    note = [b"".join(records.note_payload("gap", NOTHING, b'{"first":1,"last":%d,"reason":""}' % n)) for n in range(3)]
    segment(spots.spool / "a.seg", salt, [(0, frame.GAP, note[0]), (1, frame.GAP, note[1])])
    before = content(drained(spots))
    # A virtual machine put back to an earlier moment goes on as the same stream, with other records.
    with written(spots) as connection:
        connection.exec_driver_sql("update streams set segment = 0, position = 0, last_seq = -1")
    segment(spots.spool / "a.seg", salt, [(0, frame.GAP, note[0]), (1, frame.GAP, note[2]), (2, frame.GAP, note[2])])
    after = content(drained(spots))
    assert set(before["log_entries"]) < set(after["log_entries"])
    assert len(after["log_entries"]) == 3
    kind, seq, detail = rows(spots, "select kind, seq, detail from events where kind = 'alarm'")[0]
    assert (kind, seq) == ("alarm", 1)
    assert "another record with this number" in detail
    assert hashlib.sha256(b"\4\0" + note[2]).hexdigest()[:32] in detail


# -- starts and ends ----------------------------------------------------------------------------------


def test_a_call_is_running_until_its_end_comes_and_is_then_one_run(spots: Places) -> None:
    calls = Calls(spots.spool)
    calls.prints()
    begin = {"rows": 2, "payloads": (ids("prompt.ids", [1]), text("prompt.text", "a\0b"), ids("prompt.ids", [2], 1))}
    seq = calls.start(1, **begin)
    assert rows(drained(spots), "select status, end_seq, settings from runs") == [("running", None, None)]
    first = rows(spots, "select prompt_index, input_key, output_key, input_preview from sequences order by 1")
    assert [(row[0], row[2], row[3]) for row in first] == [(0, None, "a\u2400b"), (1, None, None)]
    ends = (SequenceEnd(0, 0, 1, 1, 4, 1, 0.25, 0), SequenceEnd(0, 1, 1, 1, 4, 2, float("nan"), 0),
            SequenceEnd(1, 0, 1, 1, 0, 3, 0.5, 0))  # fmt: skip
    out = (
        ids("output.ids", [3]),
        ids("output.ids", [4], 0, 1),
        ids("output.ids", [5], 1),
        text("output.text", "yes", 1),
    )
    calls.end(1, seq, sequences=ends, payloads=out, facts={"later": 1})
    drained(spots)
    assert rows(spots, "select status, end_seq, duration_ns, ended_at - started_at from runs") == [
        ("ok", 5, 1000, 1000)
    ]
    second = rows(
        spots,
        "select prompt_index, return_index, finish, padding_tokens, min_margin, min_margin_at, input_preview, "
        "output_preview from sequences order by 1, 2",
    )
    assert second == [
        (0, 0, "eos", 4, 0.25, 0, "a\u2400b", None), (0, 1, "length", 4, None, None, "a\u2400b", None),
        (1, 0, "stop_string", 0, 0.5, 0, None, "yes"),
    ]  # fmt: skip
    keys = rows(spots, "select input_key from sequences order by prompt_index, return_index")
    assert [keys[0], keys[2]] == [(first[0][1],), (first[1][1],)]
    assert keys[1] == keys[0]  # a second output has the input of the first
    assert orjson.loads(one(spots, "select call_facts from runs"))["later"] == 1
    calls.close()


def test_it_makes_no_difference_whether_start_and_end_come_in_one_batch(spots: Places, tmp_path: Path) -> None:
    calls = Calls(spots.spool)
    calls.prints()
    seq = calls.start(1, facts={"kept": 1})
    drained(spots)
    calls.end(1, seq, facts={"context.error": 2})
    other = twin(spots, tmp_path / "other")
    calls.close()
    apart, together = content(drained(spots)), content(drained(other))
    for table in EVERYTHING:
        assert apart[table] == together[table], table


def test_a_call_whose_process_died_has_crashed_and_its_prompt_is_there(spots: Places) -> None:
    calls = Calls(spots.spool)
    calls.prints()
    calls.start(1, payloads=(text("prompt.text", "the last words"),))
    assert one(drained(spots), "select status from runs") == "running"
    calls.close()  # the lock is free: whoever held it is gone
    assert one(drained(spots), "select status from runs") == "crashed"
    assert one(spots, "select ended from streams") == 1
    run = queries.load(database.reading(spots.url, spots.database), run_id(1))
    assert run.sequences[0].input_text == "the last words"
    assert str(run.fields["weights.loaded_root"].reason) == "process ended"


def test_a_call_that_goes_on_across_a_rotation_has_not_crashed(spots: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """The list of segments may be read before the rotation, and the lock of the old one found free after it."""
    calls = Calls(spots.spool)
    calls.prints()
    seq = calls.start(1)
    asked = spool.alive

    def late(path: Path) -> bool:
        if calls.journal.index == 0:
            calls.journal.rotate()
        return asked(path)

    monkeypatch.setattr(spool, "alive", late)
    mover = writer.Drain(spots)
    mover.pass_once()
    assert calls.journal.index == 1
    assert rows(spots, "select status, ended from runs, streams") == [("running", 0)]
    calls.end(1, seq)
    mover.pass_once()
    mover.close()
    assert rows(spots, "select status, ended from runs, streams") == [("ok", 0)]
    assert [path.name[-10:] for path in spool.segments(spots.spool)] == ["000001.seg"]
    calls.close()


@pytest.mark.parametrize("status", ["error", "aborted", "abandoned", "partial"])
def test_how_a_call_ended_is_kept(spots: Places, status: str) -> None:
    calls = Calls(spots.spool)
    calls.prints()
    calls.call(1, status=status, facts={"error": "ValueError"}, payloads=(text("error.text", "no"),))
    calls.close()
    run = queries.load(database.reading(drained(spots).url, spots.database), run_id(1))
    assert run.status == status
    assert run.error == "ValueError: no"


def test_an_end_without_its_start_is_an_alarm_and_still_a_leaf(spots: Places) -> None:
    calls = Calls(spots.spool)
    calls.end(1, 77)
    calls.close()
    drained(spots)
    assert rows(spots, "select kind, seq from events") == [("alarm", 0)]
    assert one(spots, "select count(*) from runs") == 0
    assert leaves.describe(one(spots, "select leaf from log_entries"))["start_seq"] == 77


def test_the_leaf_of_an_end_names_that_of_its_start(spots: Places) -> None:
    calls = Calls(spots.spool)
    seq = calls.start(1)
    drained(spots)
    calls.end(1, seq)
    calls.close()
    start, end = (row[0] for row in rows(drained(spots), "select leaf from log_entries order by idx"))
    assert leaves.describe(end)["start_leaf"] == digests.leaf_hash(start).hex()
    assert one(spots, "select leaf from runs") == digests.leaf_hash(end)


# -- fingerprints and weights -------------------------------------------------------------------------


def test_a_fingerprint_is_stored_once_however_often_it_comes(spots: Places) -> None:
    for n in range(3):
        calls = Calls(spots.spool)
        calls.prints()
        calls.call(n)
        calls.close()
    drained(spots)
    assert sorted(rows(spots, "select scope, digest from fingerprints")) == sorted(
        (item.scope, item.digest) for item in (ENVIRONMENT, SWITCHES, MODEL, SETTINGS)
    )
    assert rows(spots, "select distinct environment, switches, model, settings from runs") == [(1, 2, 3, 4)]
    found = rows(
        spots, "select name, value, state, reason, source from fingerprint_fields where name like 'g%' order by 1"
    )
    assert found == [
        ("generation.do_sample", "false", "value", None, None), ("generation.temperature", "0.7", "value", None, "call"),
        ("gpu.count", None, "unknown", "no driver", None),
    ]  # fmt: skip


def test_a_reference_to_a_fingerprint_that_never_came_is_kept_and_filled_when_it_does(spots: Places) -> None:
    calls = Calls(spots.spool)
    calls.call(1)
    drained(spots)
    assert rows(spots, "select digest, scope from fingerprints where id = (select environment from runs)") == [
        (ENVIRONMENT.digest, "missing")
    ]
    calls.prints()
    drained(spots)
    assert rows(spots, "select digest, scope from fingerprints where id = (select environment from runs)") == [
        (ENVIRONMENT.digest, "environment")
    ]
    calls.close()


def test_a_fingerprint_is_stored_under_the_digest_of_its_bytes_and_not_under_the_one_it_claims(spots: Places) -> None:
    calls = Calls(spots.spool)
    for _ in range(2):
        calls.note("environment", bytes(range(32)), ENVIRONMENT.document)
    calls.call(1, {"environment": bytes(range(32))})
    calls.close()
    drained(spots)
    found = dict(rows(spots, "select digest, scope from fingerprints where scope in ('environment', 'missing')"))
    assert found[ENVIRONMENT.digest] == "environment"
    assert found[named(bytes(range(32)))] == "missing"
    assert rows(spots, "select * from events") == []


def test_text_that_no_database_takes_is_stored_beside_its_evidence(spots: Places) -> None:
    odd = Fingerprint.of("environment", [Field("x", "a\0b\ud800"), Field.unknown("y", "\udcff"), Field("n" * 300, 1),
                                         Field("n" * 300 + "2", 2)])  # fmt: skip
    calls = Calls(spots.spool)
    calls.note("environment", odd.raw, odd.document)
    calls.call(1, {"environment": odd.raw, "facts": {"name": "a\0b", "tags": {"k" * 300: "v\0"}}})
    calls.close()
    drained(spots)
    assert rows(spots, "select * from events") == []
    assert rows(spots, "select value, reason from fingerprint_fields where name in ('x', 'y')") == [
        ("a\u2400b?", None), (None, "?")
    ]  # fmt: skip
    run = queries.load(database.reading(spots.url, spots.database), run_id(1))
    assert run.fields["x"].value == "a\0b\ud800"
    assert run.digests["environment"] == odd.digest


def test_weights_bound_late_are_those_of_the_calls_they_were_hashed_for(spots: Places) -> None:
    calls = Calls(spots.spool)
    calls.prints()
    seqs = [calls.call(n, {"load": 1 + n // 2}) for n in range(4)]
    calls.weights()
    calls.binding(seqs[0], seqs[2], load=1)
    drained(spots)
    bound = rows(spots, "select run_id, weights, weights_note from runs order by id")
    assert bound == [(run_id(n), 1 if n < 2 else None, None) for n in range(4)]
    calls.binding(seqs[2], seqs[3], root="", load=2, reason="changed while hashed")
    calls.close()
    drained(spots)
    assert (
        rows(spots, "select weights, weights_note from runs where load = 2")
        == [(None, "unknown: changed while hashed")] * 2
    )
    assert one(spots, "select root from weights") == WEIGHTS.root
    assert sorted(rows(spots, "select kind, name, dtype, shape, bytes, sha256 from weight_entries")) == [
        ("buffer", "b", "int64", "[]", 8, "22" * 32), ("tensor", "w", "float32", "[2,3]", 24, "11" * 32)
    ]  # fmt: skip


@pytest.mark.parametrize("drain_between", [False, True])
def test_an_end_written_before_the_root_was_known_undoes_no_binding(spots: Places, drain_between: bool) -> None:
    """The hashing thread binds while the call is on its way to its end."""
    calls = Calls(spots.spool)
    calls.prints()
    seq = calls.start(1)
    calls.weights()
    calls.binding(seq, seq + 5)
    if drain_between:
        drained(spots)
    calls.end(1, seq, weights=NOTHING)
    calls.close()
    drained(spots)
    assert rows(spots, "select weights, weights_note from runs") == [(1, None)]
    assert rows(spots, "select runs, outputs from equal_inputs") == [(1, 1)]


def test_an_end_that_knows_the_root_needs_no_binding(spots: Places) -> None:
    calls = Calls(spots.spool)
    calls.prints()
    root = calls.weights()
    calls.call(1, weights=root)
    calls.close()
    assert rows(drained(spots), "select weights, weights_note from runs") == [(1, None)]


def test_the_files_of_a_checkpoint_are_bound_beside_the_tensors(spots: Places) -> None:
    calls = Calls(spots.spool)
    calls.prints()
    seq = calls.call(1)
    calls.weights()
    calls.binding(seq, seq, kind="files")
    calls.close()
    assert rows(drained(spots), "select weights, weight_files from runs") == [(None, 1)]


# -- keys and content ---------------------------------------------------------------------------------


def test_a_store_of_another_key_is_refused_and_the_spool_keeps_everything(spots: Places) -> None:
    life(spots, 2)
    drained(spots)
    calls = Calls(spots.spool)
    calls.call(9)
    spots.key_file.write_bytes(bytes(32))
    before = [path.read_bytes() for path in spool.segments(spots.spool)]
    with pytest.raises(
        KeyMismatch, match=r"set PROVENANCE_KEY_FILE to the store's key\. The spool keeps everything"
    ) as caught:
        drained(spots)
    assert is_one_sentence(str(caught.value).split(". ")[0])
    assert [path.read_bytes() for path in spool.segments(spots.spool)] == before
    spots.key_file.write_bytes(KEY)
    assert one(drained(spots), "select count(*) from runs") == 6
    calls.close()


def test_the_key_itself_is_in_no_byte_of_the_store(spots: Places) -> None:
    life(spots, 3)
    drained(spots)
    spilled = everything(spots)
    assert KEY not in spilled
    assert KEY.hex().encode() not in spilled


SECRET = "the prompt that nobody may read"


def calls_of(spots: Places, mode: str) -> None:
    """Record one call as the recorder would in a mode of capture."""
    begin = (text("prompt.text", SECRET), ids("prompt.ids", [11, 12]), Payload(ROLE["arguments"], 2, SECRET.encode()))
    done = (text("output.text", SECRET + "!"), ids("output.ids", [13, 14]), text("error.text", SECRET))
    calls = Calls(spots.spool)
    calls.prints()
    calls.call(
        1, {"payloads": privacy.cut(begin, mode, SEED, KEY)}, payloads=privacy.cut(done, mode, SEED, KEY)
    )  # fmt: skip
    calls.close()


def test_sealed_content_is_in_no_byte_of_store_or_spool_and_can_still_be_compared(
    spots: Places, tmp_path: Path
) -> None:
    open_ = places(tmp_path / "open")
    for where, mode in ((spots, "digest"), (open_, "full")):
        calls_of(where, mode)
    spilled = b"".join(path.read_bytes() for path in spots.spool.iterdir())
    drained(spots)
    drained(open_)
    spilled += everything(spots)
    assert SECRET.encode()[:12] not in spilled
    assert struct.pack("<2i", 13, 14) not in spilled
    assert rows(spots, "select count(*) from payloads") == [(0,)]
    assert rows(spots, "select distinct body from payload_refs") == [(None,)]
    assert rows(spots, "select input_preview, output_preview from sequences") == [(None, None)]
    for sql in (
        "select input_key, output_key, input_tokens, output_tokens, min_margin from sequences",
        "select role, prompt_index, return_index, part, size, commitment, salt from payload_refs order by 1, 2, 3, 4",
    ):
        assert rows(spots, sql) == rows(open_, sql)
    stream_of = [leaves.describe(row[0]) for row in rows(spots, "select leaf from log_entries order by idx")]
    stream_of_open = [leaves.describe(row[0]) for row in rows(open_, "select leaf from log_entries order by idx")]
    for sealed, clear in zip(stream_of, stream_of_open, strict=True):
        assert sealed.get("payloads") == clear.get("payloads")
    run = queries.load(database.reading(spots.url, spots.database), run_id(1))
    assert run.sequences[0].input_text is None
    assert run.sequences[0].output_ids is None


def test_a_body_is_stored_once_however_many_runs_refer_to_it(spots: Places) -> None:
    calls = Calls(spots.spool)
    for n in range(6):
        calls.call(n, {"payloads": (text("prompt.text", "the same system prompt " * 20),)})
        if n % 2:
            drained(spots)
    calls.close()
    drained(spots)
    assert one(spots, "select count(*) from payload_refs where role = 2") == 6
    assert one(spots, "select count(distinct body) from payload_refs where role = 2") == 1
    assert one(spots, "select count(*) from payloads") == 2  # the prompt, and the output's ids


def test_every_payload_has_a_commitment_under_its_own_salt(spots: Places) -> None:
    life(spots, 3)
    found = rows(drained(spots), "select role, prompt_index, return_index, part, commitment, salt from payload_refs")
    for role, row, ret, part, commitment, salt in found:
        assert salt == digests.salt(SEED, role, row, ret * 65536 + part)
        assert len(commitment) == 32
    assert not {row[4] for row in found} & {key for (key,) in rows(spots, "select key from payloads")}


# -- what goes wrong ----------------------------------------------------------------------------------


def test_a_gap_is_an_event(spots: Places) -> None:
    life(spots, 1)
    found = rows(drained(spots), "select kind, detail from events")
    assert [(kind, orjson.loads(detail)) for kind, detail in found] == [
        ("gap", {"first": 900, "last": 901, "reason": "full"})
    ]


def damaged_life(spots: Places) -> Path:
    """Write a life with one wrong byte in the middle of a payload."""
    life(spots, 3)
    (path,) = spool.segments(spots.spool)
    data = bytearray(path.read_bytes())
    data[len(data) // 2] ^= 0xFF
    path.write_bytes(data)
    return path


def test_a_damaged_segment_gives_its_whole_records_and_is_set_aside(spots: Places) -> None:
    path = damaged_life(spots)
    data = path.read_bytes()
    drained(spots)
    detail = one(spots, "select detail from events where kind = 'damage'")
    assert orjson.loads(detail)["segment"] == 0
    assert one(spots, "select max(seq) + 1 - count(*) from ingested") == 1
    assert path.with_suffix(".damaged").read_bytes() == data
    assert not path.exists()


@pytest.mark.parametrize(("point", "after"), [("committed", 1), ("committed", 5), ("kept", 0)])
def test_damage_seen_by_a_writer_that_was_killed_is_not_forgotten(
    spots: Places, python: Command, point: str, after: int
) -> None:
    path = damaged_life(spots)
    python(CRASH, str(spots.key_file.parent), point, str(after))
    drained(spots)
    assert one(spots, "select count(*) from events where kind = 'damage'") == 1
    assert path.with_suffix(".damaged").exists()


def test_a_record_that_cannot_be_stored_holds_up_no_other_and_is_set_aside(spots: Places) -> None:
    calls = Calls(spots.spool)
    calls.prints()
    good = [calls.call(n) for n in range(2)]
    bad = calls.note("environment", NOTHING, b"{no json")
    good += [calls.call(n) for n in range(2, 4)]
    calls.close()
    path = calls.journal.path
    drained(spots)
    assert one(spots, "select count(*) from runs where status = 'ok'") == len(good)
    kind, seq, detail = rows(spots, "select kind, seq, detail from events")[0]
    assert (kind, seq) == ("alarm", bad)
    assert "cannot be stored" in detail
    assert path.with_suffix(".damaged").exists()


def test_a_store_that_fails_takes_nothing_from_the_spool(spots: Places, monkeypatch: pytest.MonkeyPatch) -> None:
    """A full disk in the middle of a batch is the store's trouble: no record is refused for it."""
    life(spots, 3)
    before = [path.read_bytes() for path in spool.segments(spots.spool)]

    real, fails = rows_of.write, iter([True, True])

    def full(bulk: rows_of.Bulk, batch: rows_of.Rows) -> None:
        if next(fails, False):
            raise OSError(28, "database or disk is full")
        real(bulk, batch)

    with monkeypatch.context() as patch:
        patch.setattr("provenance.store.batch.write", full)
        with pytest.raises(OSError, match="disk is full"):
            writer.drain(spots, 10)
    assert [path.read_bytes() for path in spool.segments(spots.spool)] == before
    assert one(drained(spots), "select count(*) from runs") == 7
    assert rows(spots, "select kind from events") == [("gap",)]


def test_a_record_of_a_later_version_is_a_gap_with_its_reason(spots: Places) -> None:
    salt = bytes(16)
    later = struct.pack("<B32sI", 99, bytes(32), 0)
    good = b"".join(records.note_payload("gap", NOTHING, b'{"first":5,"last":5,"reason":"r"}'))
    spots.spool.mkdir(mode=0o700)
    frames = framed(salt, 0, frame.FINGERPRINT, later) + framed(salt, 1, frame.GAP, good)
    (spots.spool / "a.seg").write_bytes(header(salt) + frames)
    drained(spots)
    found = [orjson.loads(row[0])["reason"] for row in rows(spots, "select detail from events order by seq")]
    assert found == ["record 0 cannot be read: a note of kind 99, which this version does not know", "r"]


def test_a_writer_with_nothing_to_do_lets_go_of_the_store_and_goes_on_when_there_is_work(spots: Places) -> None:
    calls = Calls(spots.spool)
    mover = writer.Drain(spots)
    for n in range(3):
        calls.call(n)
        assert mover.pass_once() == 2
        assert mover.pass_once() == 0
        if spots.database is not None:  # a copy of the file is the whole store
            assert list(spots.database.parent.glob("*.db-*")) == []
    mover.close()
    calls.close()
    assert rows(drained(spots), "select count(*) from runs where status = 'ok'") == [(3,)]


def test_items_are_new_only_once_within_a_batch(spots: Places) -> None:
    engine = database.writing(spots.url, spots.database)
    database.check(engine, "p.db", writer=True)
    ingest = Ingest(engine, KEY)
    payload = b"".join(records.start_payload(SEED, request(1)))
    item = Item(records.read(frame.START, 0, payload), frame_digest(frame.START, payload), 500)
    assert ingest.write(stream(), 0, [item, item]) == 1
    assert ingest.write(stream(), 0, [item]) == 0
    end = b"".join(records.end_payload(SEED, output(1, 0)))
    ended = Item(records.read(frame.END, 1, end), frame_digest(frame.END, end), 900)
    assert ingest.write(stream(), 0, [item, ended]) == 1
    assert ingest.position(stream()) == (0, 900, 1)
    assert ingest.position(stream(2)) == (0, 0, -1)
    assert raw(ENVIRONMENT.digest) == ENVIRONMENT.raw
    ingest.rest()
    engine.dispose()
