"""Evidence outlives the code: what was written once reads back the same, to the bit, with the code of today.

A golden file that no longer fits means that the code broke a promise. The code must change, never the file.
"""

import hashlib
import re
import shutil
from dataclasses import asdict
from pathlib import Path
from typing import Any

import orjson
import pytest

from provenance import writer
from provenance.errors import SchemaMismatch
from provenance.facts import Field, Fingerprint, WeightsManifest
from provenance.integrity import buffers, digests
from provenance.integrity.canonical import canonical, digest, plain
from provenance.integrity.values import decode, encode
from provenance.journal import frame, records, spool
from provenance.journal.recovery import open_segment
from provenance.settings import Places
from provenance.store import database, export, leaves, queries
from tests.fakes.records import KEY, PAYLOADS, SEQUENCES, WEIGHTS, Calls, as_json, drained, places, rows, run_id
from tests.fakes.values import EDGES, same

HERE = Path(__file__).parent
GOLDEN: dict[str, Any] = orjson.loads((HERE / "digests.json").read_bytes())
JOURNAL: dict[str, Any] = orjson.loads((HERE / "journal-v1.json").read_bytes())
# What the files themselves are: a golden file that was made anew turns this red.
SHA256: dict[str, str] = {
    "digests.json": "14131c9894d4345f035fff653379c6d17315484488f52db6321b48c3691f2f23",
    "journal-v1.json": "5b1077b34534f199e8c95635edab6a6ce6842d54572941d785044e142aa6cbfd",
    "journal-v1.seg": "c43a822b6d4d129b07ce971ba39161b3c8a29950c43e3c7be23feec0a5813cc5",
    "store-0001.db": "c94c21a0bc183700f58c9b15e26bb6682af34e2c3f0bfe87a3234ac2990749ef",
    "store-0002.db": "d1feb40e08ee91758f9a1cc54061797ba26642ee66a04a08695913d37e750816",
    "store-0003.db": "39afe97de9a1eb8007231d4059004d181d40a3cb1380ff7a8539eaecee4c46eb",
    "store-0004.db": "139fad8a96d94d75781a57a0425298dde00767a87084754d327d98e95be49b06",
    "store-0005.db": "c1df4a1257b7cd8ba74bc7026bec7a523b3375ec3df985ec94bb42c2052ec81b",
}


def test_no_golden_file_was_made_anew() -> None:
    found = {name: hashlib.sha256((HERE / name).read_bytes()).hexdigest() for name in SHA256}
    assert found == SHA256
    assert {path.name for path in HERE.iterdir() if path.suffix not in (".py", "")} == set(SHA256)


# -- digests ------------------------------------------------------------------------------------------


@pytest.mark.parametrize("case", GOLDEN["canonical"], ids=lambda case: ascii(case["document"])[:40])
def test_canonical_bytes_and_digest(case: dict[str, Any]) -> None:
    assert canonical(case["document"]).decode() == case["bytes"]
    assert digest(case["bytes"].encode()) == case["digest"]


@pytest.mark.parametrize("label", GOLDEN["plain"])
def test_the_form_of_a_fields_value(label: str) -> None:
    assert canonical(plain(EDGES[label])).decode() == GOLDEN["plain"][label]


@pytest.mark.parametrize("label", GOLDEN["values"])
def test_the_encoding_of_a_value(label: str) -> None:
    assert encode(EDGES[label]).decode() == GOLDEN["values"][label]
    assert same(decode(GOLDEN["values"][label].encode()), EDGES[label])


@pytest.mark.parametrize("scope", GOLDEN["fingerprints"])
def test_a_fingerprint(scope: str) -> None:
    stored = GOLDEN["fingerprints"][scope]
    fields = [Field.read(name, form) for name, form in GOLDEN["fields"]]
    for made in (Fingerprint.of(scope, fields), Fingerprint.read(stored["document"].encode())):
        assert (made.document.decode(), made.digest, made.value_digest) == (
            stored["document"], stored["digest"], stored["value_digest"]
        )  # fmt: skip


def test_a_weights_manifest() -> None:
    stored = GOLDEN["manifest"]
    assert WeightsManifest.read(stored["document"].encode()).root == WEIGHTS.root == stored["root"]
    assert WEIGHTS.document().decode() == stored["document"]


@pytest.mark.parametrize("case", GOLDEN["buffers"], ids=lambda case: str(case["numbers"]))
def test_a_buffer_of_ids(case: dict[str, Any]) -> None:
    assert buffers.ids(case["numbers"]).hex() == case["bytes"]
    assert list(buffers.parse(bytes.fromhex(case["bytes"])).numbers()) == case["numbers"]


def test_salts_commitments_keys_names_and_leaf_hashes() -> None:
    unhex = bytes.fromhex
    for case in GOLDEN["salts"]:
        assert digests.salt(unhex(case["seed"]), *case["place"]).hex() == case["salt"]
    for case in GOLDEN["commitments"]:
        assert digests.commitment(unhex(case["salt"]), unhex(case["payload"])).hex() == case["commitment"]
    for case in GOLDEN["equality"]:
        parts = tuple(map(unhex, case["parts"]))
        assert digests.equality(unhex(case["key"]), case["kind"], parts).hex() == case["equality"]
    for case in GOLDEN["body_keys"]:
        assert digests.body_key(unhex(case["key"]), unhex(case["body"])).hex() == case["name"]
    assert {key: digests.key_id(unhex(key)) for key in GOLDEN["key_ids"]} == GOLDEN["key_ids"]
    assert {x: digests.leaf_hash(unhex(x)).hex() for x in GOLDEN["leaf_hashes"]} == GOLDEN["leaf_hashes"]
    assert {x: digests.file_digest(unhex(x)) for x in GOLDEN["file_digests"]} == GOLDEN["file_digests"]
    assert {x: frame.marker(unhex(x)).hex() for x in GOLDEN["markers"]} == GOLDEN["markers"]


# -- a journal of the first format --------------------------------------------------------------------


def with_the_journal(folder: Path) -> Places:
    """Return an empty store whose spool holds the golden segment."""
    spots = places(folder, bytes.fromhex(JOURNAL["key"]))
    spots.spool.mkdir(mode=0o700)
    shutil.copy(HERE / "journal-v1.seg", spots.spool)
    return spots


def test_a_journal_of_the_first_format_reads_back_record_by_record() -> None:
    scan = open_segment(HERE / "journal-v1.seg")
    found = [
        {"seq": item.seq, "kind": item.kind, "end": item.end,
         "record": as_json(records.read(item.kind, item.seq, item.payload))}
        for item in scan.frames(sealed=True)
    ]  # fmt: skip
    assert found == JOURNAL["records"]
    assert scan.damage == []
    head = {**asdict(scan.header.stream), **asdict(scan.header)}
    assert {name: as_json(head[name]) for name in JOURNAL["header"]} == JOURNAL["header"]
    kinds = {item["record"].get("kind") or next(iter({"request", "output"} & item["record"].keys())) for item in found}
    assert kinds == {"request", "output", "environment", "switches", "model", "settings", "weights", "binding", "gap",
                     "erased", "clock_step"}  # fmt: skip


@pytest.mark.usefixtures("both")
def test_a_journal_drained_twice_gives_the_leaves_keys_and_commitments_of_then(tmp_path: Path) -> None:
    for store in ("one", "other"):
        spots = drained(with_the_journal(tmp_path / store))
        found = [leaf.hex() for (leaf,) in rows(spots, "select leaf from log_entries order by idx")]
        assert found == JOURNAL["leaves"]
        assert [list(row) for row in rows(spots, SEQUENCES)] == JOURNAL["sequences"]
        assert [list(row) for row in rows(spots, PAYLOADS)] == JOURNAL["payloads"]


def test_a_leaf_says_what_its_record_said_and_nothing_of_its_content() -> None:
    said = [leaves.describe(bytes.fromhex(leaf)) for leaf in JOURNAL["leaves"]]
    assert [item["seq"] for item in said] == [item["seq"] for item in JOURNAL["records"]]
    for item, stored in zip(said, JOURNAL["records"], strict=True):
        record = stored["record"].get("request") or stored["record"].get("output")
        if record is not None:
            assert item["run"].replace("-", "") == record["run_id"]
            assert [p["row"] for p in item["payloads"]] == [p["row"] for p in record["payloads"]]
    whole = b"".join(map(bytes.fromhex, JOURNAL["leaves"]))
    for content in (b"a prompt", b"an answer", b"the last words", bytes(range(64))):
        assert content not in whole


@pytest.mark.usefixtures("both")
def test_a_journal_of_the_first_format_becomes_the_runs_it_was(tmp_path: Path) -> None:
    _holds_the_runs(drained(with_the_journal(tmp_path / "store")))


def _holds_the_runs(spots: Places) -> None:
    """Hold that the calls of the golden journal are in a store, whole."""
    engine = database.reading(spots.url, spots.database)
    assert [(line.run_id, line.status, line.name) for line in queries.log(engine, 10)] == [
        (run_id(4), "crashed", ""), (run_id(3), "ok", ""), (run_id(2), "error", ""), (run_id(1), "ok", "nightly")
    ]  # fmt: skip
    run = queries.load(engine, queries.find(engine, "tag:suite=7"))
    first, second = run.sequences
    assert (first.input_ids, first.input_text, first.output_ids, first.output_text) == (
        (5, 6, 7), "a prompt", (8, 9), "an answer"
    )  # fmt: skip
    assert (second.input_ids, second.output_ids, repr(second.output_value)) == ((0, 2**40), (10,), "{1: -0.0}")
    assert [step.margin for step in first.steps] == [0.5, 0.0]
    assert run.fields["weights.loaded_root"].value == WEIGHTS.root
    assert run.fields["a.text"].value == "\ud800é"
    assert run.digests["environment"] == GOLDEN["fingerprints"]["environment"]["digest"]
    assert queries.load(engine, run_id(2)).error == "ValueError: cannot parse 'a prompt'"
    sealed = queries.load(engine, run_id(3)).sequences[0]
    assert (sealed.input_text, sealed.output_ids) == (None, None)
    assert (sealed.input_key, sealed.output_key) != ("", "")
    assert queries.load(engine, run_id(4)).sequences[0].input_text == "the last words"
    assert orjson.loads(export.dumps(run))["run_id"] == run_id(1)
    assert rows(spots, "select kind from events order by kind") == [("clock_step",), ("erased",), ("gap",)]


# -- stores of every schema ---------------------------------------------------------------------------


@pytest.mark.parametrize("path", sorted(HERE.glob("store-*.db")), ids=lambda path: path.stem)
def test_a_store_of_an_earlier_schema_opens_reads_and_goes_on(path: Path, tmp_path: Path) -> None:
    spots = places(tmp_path / "store", KEY)
    assert spots.database is not None
    shutil.copy(path, spots.database)
    engine = database.writing(spots.url, spots.database)
    if database.schema(engine, path.name) != database.HEAD:
        database.upgrade(engine)
    database.check(engine, path.name, writer=True)
    _holds_the_runs(spots)
    found = [leaf.hex() for (leaf,) in rows(spots, "select leaf from log_entries order by idx")]
    assert found == JOURNAL["leaves"]
    calls = Calls(spots.spool)
    calls.prints()
    calls.call(5)
    calls.close()
    drained(spots)
    assert rows(spots, "select count(*) from runs") == [(5,)]
    assert rows(spots, "pragma integrity_check") == [("ok",)]


@pytest.mark.parametrize("path", sorted(HERE.glob("store-*.db"))[:-1], ids=lambda path: path.stem)
def test_a_store_of_an_earlier_schema_is_not_written_to_until_it_is_upgraded(path: Path, tmp_path: Path) -> None:
    spots = places(tmp_path / "store", KEY)
    assert spots.database is not None
    shutil.copy(path, spots.database)
    calls = Calls(spots.spool)
    calls.prints()
    calls.call(5)
    calls.close()
    waiting = [item.read_bytes() for item in spool.segments(spots.spool)]
    with pytest.raises(SchemaMismatch, match=r"has the older schema \d{4}. Run: provenance db upgrade"):
        writer.drain(spots, 10)
    assert [item.read_bytes() for item in spool.segments(spots.spool)] == waiting != []
    assert rows(spots, "select count(*) from runs") == [(4,)]


@pytest.mark.parametrize("path", sorted(HERE.glob("store-*.db")), ids=lambda path: path.stem)
def test_an_upgraded_store_has_the_tables_and_indexes_of_a_fresh_one(path: Path, tmp_path: Path) -> None:
    made = []
    for name in ("fresh", "old"):
        spots = places(tmp_path / name, KEY)
        assert spots.database is not None
        if name == "old":
            shutil.copy(path, spots.database)
        database.upgrade(database.writing(spots.url, spots.database))
        found = rows(spots, "select type, name, sql from sqlite_master where sql is not null order by type, name")
        made.append([(kind, name, " ".join(sql.split())) for kind, name, sql in found])
    assert made[0] == made[1]


def test_there_is_a_store_of_every_schema() -> None:
    revisions = {re.sub(r"store-(\d+)\.db", r"\1", path.name) for path in HERE.glob("store-*.db")}
    assert revisions == set(database.REVISIONS)
