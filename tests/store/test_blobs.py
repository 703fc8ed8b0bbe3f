"""Large and strange payloads: past JSON and past frames, kept once, read back bit for bit, on both databases."""

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from provenance import recorder as recorders
from provenance import writer
from provenance.capture.functions import record
from provenance.errors import BadFile, MissingBlob
from provenance.facts import BLOB, BUFFER, KIND, LARGE, OCTETS, ROLE, SEALED, TRUNCATED, Payload
from provenance.integrity.secrets import GONE
from provenance.integrity.values import Cut
from provenance.journal import blobs as beside
from provenance.journal import kept, spool
from provenance.recorder import Recorder
from provenance.settings import Places, Settings
from provenance.store import blobs, codec, database, leaves, queries
from provenance.store.rows import Bulk
from tests.conftest import Command
from tests.fakes.records import KEY, drained, one, places, rows

PNG = b"\x89PNG\r\n\x1a\n" + bytes(range(256))
BYTES = random.Random(1).randbytes(3 * LARGE + 17)
TEXT = "ab\ud800é" * LARGE
REFS = """select role, part, r.encoding, r.size, codec from payload_refs r left join payloads b on b.id = r.body
    order by role, part"""


@pytest.fixture
def spots(tmp_path: Path, both: str) -> Places:
    return places(tmp_path / "store")


def recorded(spots: Places, function: Callable[..., Any], *args: Any, **settings: Any) -> None:
    """Record one call of a function into a store's spool."""
    chosen = Settings(spool=str(spots.spool), key_file=str(spots.key_file), writer="off", **settings)
    recorders._state.update(recorder=Recorder(chosen), settings=chosen, refused="")
    try:
        record(function)(*args)
    finally:
        recorders._state["recorder"].close()
        recorders._state.update(recorder=None, settings=None)


def last(spots: Places) -> Any:
    engine = database.reading(spots.url, spots.database)
    return queries.load(engine, queries.find(engine, "last")).sequences[0]


def stored(spots: Places) -> int:
    """Count the blobs of a store."""
    if spots.database is None:
        return int(one(spots, "select count(distinct sha256) from blob_chunks"))
    return len([path for path in spots.database.with_name("p.db.blobs").rglob("*") if path.is_file()])


def test_large_bytes_texts_media_and_arrays_come_back_as_they_were(spots: Places) -> None:
    array = np.arange(1 << 18, dtype="float64").reshape(512, 512)
    recorded(spots, lambda *args: {"audio": b"RIFF\0\0\0\0WAVEfmt ", "back": args[0]}, BYTES, TEXT, [PNG], array)
    (segment,) = spool.segments(spots.spool)
    assert segment.stat().st_size < 100_000, "frames hold digests alone"
    drained(spots)
    found = last(spots)
    given = found.input_value["args"]
    assert given[:3] == (BYTES, TEXT, [PNG])
    assert given[3] == Cut("numpy.<f8", "shape [512, 512]")
    assert found.output_value == {"audio": b"RIFF\0\0\0\0WAVEfmt ", "back": BYTES}
    assert stored(spots) == 3, "what was given and given back is kept once"
    refs = rows(spots, REFS)
    assert {encoding for _, _, encoding, _, _ in refs} == {2, OCTETS}
    assert [(size, number == codec.BLOB) for role, _, _, size, number in refs if role == ROLE["prompt.media"]] == [
        (len(BYTES), True), (len(TEXT.encode("utf-8", "surrogatepass")), True), (len(PNG), False), (array.nbytes, True)
    ]  # fmt: skip
    engine = database.reading(spots.url, spots.database)
    with engine.connect() as connection:
        bodies = queries._bodies(connection, 1)
    (raw,) = [b.data for b in bodies if b.role == ROLE["prompt.media"] and b.part == 3]
    assert np.array_equal(np.frombuffer(raw, "<f8").reshape(512, 512), array)


def test_the_form_says_what_was_put_aside(spots: Places) -> None:
    recorded(spots, lambda *_: None, PNG, BYTES)
    drained(spots)
    engine = database.reading(spots.url, spots.database)
    with engine.connect() as connection:
        (form,) = [json.loads(b.data) for b in queries._bodies(connection, 1) if b.role == ROLE["arguments"]]
    assert form[1]["args"]["v"] == [
        {"$": "aside", "v": 0, "media": "image/png", "size": len(PNG), "type": "bytes"},
        {"$": "aside", "v": 1, "media": "application/octet-stream", "size": len(BYTES), "type": "bytes"},
    ]


def test_equal_content_has_equal_keys_and_the_leaf_does_not_know_where_it_lies(spots: Places) -> None:
    for _ in range(2):
        recorded(spots, lambda x: x, BYTES)
    drained(spots)
    assert one(spots, "select count(distinct input_key) from sequences") == 1
    assert one(spots, "select count(distinct output_key) from sequences") == 1
    assert stored(spots) == 1
    for (leaf,) in rows(spots, "select leaf from log_entries where kind in (1, 2)"):
        assert {item["encoding"] for item in leaves.describe(bytes(leaf))["payloads"]} <= {2, OCTETS}


def test_beyond_the_limit_the_digests_of_all_bytes_are_kept_and_a_mark(spots: Places) -> None:
    for changed in (b"", b"", b"!"):
        recorded(spots, lambda x: len(x), BYTES + changed, max_payload=2)
    drained(spots)
    refs = [row for row in rows(spots, REFS) if row[0] == ROLE["prompt.media"]]
    assert sorted((encoding, size) for _, _, encoding, size, _ in refs) == [
        (OCTETS | SEALED | TRUNCATED, len(BYTES) + n) for n in (0, 0, 1)
    ]
    assert stored(spots) == 0
    assert one(spots, "select count(distinct input_key) from sequences") == 2, "the last byte counts"
    leaf = next(
        bytes(leaf) for kind, leaf in rows(spots, "select kind, leaf from log_entries order by idx") if kind == 1
    )
    assert [item["encoding"] & TRUNCATED for item in leaves.describe(leaf)["payloads"]] == [0, TRUNCATED]
    assert last(spots).input_value["args"] == (
        Cut("application/octet-stream", f"{len(BYTES) + 1} bytes, not kept here"),
    )


def test_a_disk_that_takes_no_blob_costs_the_content_and_not_the_record(
    spots: Places, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(beside, "draft", full)
    recorded(spots, lambda x: 7, BYTES)
    monkeypatch.undo()
    drained(spots)
    assert last(spots).output_value == 7
    assert [row[2] & TRUNCATED for row in rows(spots, REFS) if row[0] == ROLE["prompt.media"]] == [TRUNCATED]


def test_redrain_brings_blobs_back(spots: Places, server: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    recorded(spots, lambda x: x, BYTES)
    drained(spots)
    if spots.database is not None:
        shutil.rmtree(spots.database.with_name("p.db.blobs"))
        for path in spots.database.parent.glob("p.db*"):
            path.unlink() if path.is_file() else None
        lost = spots
    else:
        lost = replace(spots, url=server.fresh())
    mover = writer.Drain(lost)
    for path in kept.whole(lost.spool):
        mover.take(path, last=True)
    mover.close()
    assert last(lost).output_value == BYTES
    assert stored(lost) == 1


def test_a_blob_that_does_not_lie_beside_its_segment_is_asked_for_and_nothing_is_taken(
    spots: Places, tmp_path: Path
) -> None:
    recorded(spots, lambda x: x, BYTES)
    (segment,) = spool.segments(spots.spool)
    aside = beside.folder(segment).rename(tmp_path / "not carried")
    mover = writer.Drain(spots)
    with pytest.raises(MissingBlob, match="is not there"):
        mover.take(segment, last=True)
    assert one(spots, "select count(*) from runs") == 0
    aside.rename(beside.folder(segment))
    assert mover.take(segment, last=True).new > 0
    mover.close()
    assert last(spots).output_value == BYTES


def test_a_flipped_bit_is_named_and_costs_its_record_alone(spots: Places) -> None:
    recorded(spots, lambda x: 7, BYTES)
    (segment,) = spool.segments(spots.spool)
    (file,) = beside.folder(segment).iterdir()
    data = bytearray(file.read_bytes())
    data[len(data) // 2] ^= 1
    file.write_bytes(data)
    drained(spots)
    reasons = [
        json.loads(detail)["reason"] for (detail,) in rows(spots, "select detail from events where kind = 'gap'")
    ]
    assert len(reasons) == 1
    assert "its SHA-256 is not its name" in reasons[0]
    assert stored(spots) == 0


def test_a_damaged_blob_of_the_store_is_refused_in_a_sentence(spots: Places) -> None:
    recorded(spots, lambda x: 7, BYTES)
    drained(spots)
    if spots.database is not None:
        (file,) = [path for path in spots.database.with_name("p.db.blobs").rglob("*") if path.is_file()]
        file.write_bytes(bytes(len(BYTES)))
    else:
        from tests.fakes.records import written

        with written(spots) as connection:
            connection.exec_driver_sql("update blob_chunks set data = '\\x00' where part = 1")
    with pytest.raises(BadFile, match="a stored payload is damaged"):
        last(spots)


def test_a_blob_goes_with_the_last_body_that_refers_to_it(spots: Places) -> None:
    from tests.fakes.records import written

    recorded(spots, lambda x: 7, BYTES)
    drained(spots)
    key, digest = (bytes(value) for value in rows(spots, "select key, data from payloads where codec = 4")[0])
    engine = database.writing(spots.url, spots.database)
    with engine.begin() as connection:
        assert blobs.forget(Bulk(database.driver(connection), engine.dialect.name), [(key, digest)]) == 0
    assert stored(spots) == 1
    with written(spots) as connection:
        connection.exec_driver_sql("delete from payloads where codec = 4")
    with engine.begin() as connection:
        assert blobs.forget(Bulk(database.driver(connection), engine.dialect.name), [(key, digest)]) == 1
    engine.dispose()
    assert stored(spots) == 0


# -- the spool -----------------------------------------------------------------------------------------


@pytest.fixture
def local(tmp_path: Path) -> Places:
    return places(tmp_path / "local")


def test_blobs_go_with_their_segment_and_drafts_of_the_dead_when_old(local: Places) -> None:
    recorded(local, lambda x: 7, BYTES)
    (local.spool / "0123.draft").write_bytes(b"x")
    drained(local)
    (segment,) = kept.kept(local.spool)
    assert beside.weight(segment) == len(BYTES)
    os.utime(segment, (1, 1))
    assert kept.expire(local.spool, local.grace) == 1
    assert not beside.folder(segment).exists()
    assert (local.spool / "0123.draft").exists()
    os.utime(local.spool / "0123.draft", (1, 1))
    kept.expire(local.spool, local.grace)
    assert not (local.spool / "0123.draft").exists()
    recorded(local, lambda x: 7, BYTES)
    drained(replace(local, grace=0.0))
    assert [path.name for path in local.spool.iterdir()] == ["writer.lock"]


def test_files_are_their_owners_alone(local: Places) -> None:
    recorded(local, lambda x: 7, BYTES)
    drained(local)
    assert local.database is not None
    for top in (local.spool, local.database.with_name("p.db.blobs")):
        for path in [top, *top.rglob("*")]:
            assert path.stat().st_mode & 0o077 == 0, path


def test_without_content_a_large_one_leaves_no_byte(local: Places) -> None:
    recorded(local, lambda x: 7, BYTES, capture="digest")
    drained(local)
    assert stored(local) == 0
    assert not any(path.is_dir() for path in local.spool.iterdir())


def test_a_reference_holds_digest_and_size() -> None:
    made = beside.refer(Payload(1, BUFFER, b"abc", 2, 3, 4), bytes(32))
    assert (made.encoding & BLOB, made.encoding & KIND, made.data, made[3:]) == (
        BLOB,
        BUFFER,
        bytes(32) + (3).to_bytes(8, "little"),
        (2, 3, 4),
    )


def test_import_takes_blobs_from_beside_the_segments(local: Places, command: Command, db: Path) -> None:
    recorded(local, lambda x: x, BYTES)
    carried = local.spool.parent / "carried"
    shutil.copytree(local.spool, carried)
    key = db.parent.parent / "home" / ".config" / "provenance" / "key"
    key.parent.mkdir(parents=True)
    key.write_bytes(KEY)
    key.chmod(0o600)
    (folder,) = carried.glob("*.blobs")
    folder.rename(carried / "elsewhere")
    done = command("import", str(carried))
    assert (done.returncode, "is not there" in done.stderr, "Traceback" in done.stderr) == (2, True, False)
    (carried / "elsewhere").rename(folder)
    done = command("import", str(carried))
    assert done.returncode == 0, done.stderr
    assert len(list((db.parent / "p.db.blobs").glob("*/*"))) == 1


MEASURE = """
import resource, sys, time
import provenance
size, kind = int(sys.argv[1]), sys.argv[2]
provenance.init(writer="off", weights="off")
f = provenance.record(lambda x: None)
f(1)
import numpy
x = {"bytes": lambda: b"x" * size, "text": lambda: "x" * size, "array": lambda: numpy.ones(size, "uint8")}[kind]()
def status(key):
    return next(int(line.split()[1]) for line in open("/proc/self/status") if line.startswith(key))
open("/proc/self/clear_refs", "w").write("5")
before, began = status("VmRSS"), time.perf_counter()
f(x)
took = time.perf_counter() - began
print(took, (status("VmHWM") - before) * 1024 / size)
"""


@pytest.mark.parametrize("kind", ["bytes", "text", "array"])
def test_memory_grows_by_little_more_than_twice_the_payload(kind: str, db: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", MEASURE, str(100 << 20), kind], capture_output=True, text=True, timeout=120, check=False
    )
    assert done.returncode == 0, done.stderr
    assert float(done.stdout.split()[1]) <= 2.2


def test_a_large_text_beside_a_secret_name_is_not_kept_anywhere(spots: Places) -> None:
    """What stood for it in the value goes, so its bytes must too; the call then equals no other."""
    recorded(spots, lambda x: len(x["api_key"]), {"api_key": "k1" * LARGE, "text": "words " * LARGE})
    drained(spots)
    kept_ = [row for row in rows(spots, REFS) if row[0] == ROLE["prompt.media"]]
    assert sorted(size for _, _, _, size, _ in kept_) == [len(GONE), 6 * LARGE]
    assert one(spots, "select count(*) from sequences where input_key is null") == 1
    assert all(b"k1k1" not in path.read_bytes() for path in spots.spool.parent.rglob("*") if path.is_file())


@pytest.mark.parametrize("durability", ["process", "power", "memory"])
def test_a_large_payload_lies_beside_the_segment_of_its_frame_at_every_level(
    spots: Places, durability: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Also where a flush failed between: what goes on in another segment finds its blobs there."""
    flushed = spool.fdatasync
    calls: list[int] = []

    def second_fails(descriptor: int) -> None:
        calls.append(descriptor)
        if len(calls) == 2:
            raise OSError(5, "Input/output error")
        flushed(descriptor)

    monkeypatch.setattr(spool, "fdatasync", second_fails)
    chosen = Settings(
        spool=str(spots.spool), key_file=str(spots.key_file), writer="off", durability=durability, sync_interval=0.0
    )
    mine = Recorder(chosen)
    recorders._state.update(recorder=mine, settings=chosen, refused="")
    try:
        for n in range(3):
            assert len(record(lambda x: x)(BYTES[n:])) == len(BYTES) - n
            mine.journal.sync()
        assert (mine.journal.index > 0) == (durability != "memory" or len(calls) > 1)
    finally:
        mine.close()
        recorders._state.update(recorder=None, settings=None)
    drained(spots)
    assert stored(spots) == 3
    assert one(spots, "select count(*) from events where kind <> 'gap' or detail not like '%flush%'") == 0
    assert not [path for path in spots.spool.iterdir() if path.suffix == ".draft"]


def test_large_payloads_count_for_what_a_spool_may_hold(spots: Places) -> None:
    """Beyond it their digests are kept, and the records."""
    chosen = Settings(spool=str(spots.spool), key_file=str(spots.key_file), writer="off", spool_max=8 << 20)
    mine = Recorder(chosen)
    recorders._state.update(recorder=mine, settings=chosen, refused="")
    try:
        for n in range(6):
            record(len)(BYTES[n:])
    finally:
        mine.close()
        recorders._state.update(recorder=None, settings=None)
    assert sum(path.stat().st_size for path in spots.spool.rglob("*") if path.is_file()) <= 8 << 20
    drained(spots)
    assert one(spots, "select count(*) from runs where status = 'ok'") == 6
    assert stored(spots) == 2
