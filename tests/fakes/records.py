"""Calls without a model: the records that a recorder would write, into a journal, a segment's bytes or a store."""

import re
import sqlite3
import uuid
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import orjson
from sqlalchemy import Connection

from provenance import writer
from provenance.facts import (
    BUFFER,
    ROLE,
    STATUSES,
    TEXT,
    Field,
    Fingerprint,
    Output,
    Payload,
    Request,
    SequenceEnd,
    Stream,
    WeightEntry,
    WeightsManifest,
)
from provenance.integrity import buffers, digests
from provenance.integrity.canonical import raw
from provenance.journal import frame, records
from provenance.journal.spool import Journal
from provenance.settings import Places
from provenance.store import database, tables

KEY, SEED = bytes(range(32)), bytes(range(100, 132))
WALL, MONO = 1_767_225_600_000_000_000, 5_000_000_000
NOTHING = bytes(32)
ENVIRONMENT = Fingerprint.of("environment", [Field("os.name", "linux"), Field.unknown("gpu.count", "no driver")])
SWITCHES = Fingerprint.of("switches", [Field("torch.num_threads", 2, source="torch")])
MODEL = Fingerprint.of("model", [Field("model.class", "TinyForCausalLM"), Field("model.name_or_path", "tiny")])
SETTINGS = Fingerprint.of(
    "settings", [Field("generation.do_sample", value=False), Field("generation.temperature", 0.7, source="call")]
)
WEIGHTS = WeightsManifest(
    "tensors",
    (
        WeightEntry("tensor", "w", "float32", (2, 3), 24, "11" * 32),
        WeightEntry("buffer", "b", "int64", (), 8, "22" * 32),
    ),
)


# What a store says of every sequence and every payload, in hexadecimal: keys, commitments, salts, names of bodies.
SEQUENCES = """select r.run_id, prompt_index, return_index, hex(input_key), hex(output_key)
    from sequences s join runs r on r.id = s.run order by 1, 2, 3"""
PAYLOADS = """select r.run_id, role, prompt_index, return_index, part, encoding, p.size, hex(commitment), hex(salt), hex(key)
    from payload_refs p join runs r on r.id = p.run left join payloads b on b.id = p.body order by 1, 2, 3, 4, 5"""


def run_id(number: int) -> str:
    """Return the id of the run with this number."""
    return str(uuid.UUID(int=number << 96 | 0x7000_8000_0000_0000_0000))


def ids(role: str, numbers: Sequence[int], row: int = 0, ret: int = 0) -> Payload:
    """Make the payload of some token ids."""
    return Payload(ROLE[role], BUFFER, buffers.ids(numbers), row, ret)


def text(role: str, content: str, row: int = 0, ret: int = 0) -> Payload:
    """Make the payload of a text."""
    return Payload(ROLE[role], TEXT, content.encode(), row, ret)


def request(number: int, **changes: Any) -> Request:
    """Make the request of a call; ``facts`` may be a dict."""
    facts = {"runtime": "fake", "operation": "generate", **changes.pop("facts", {})}
    whole = {
        "run_id": uuid.UUID(run_id(number)).bytes, "parent": bytes(16), "wall_ns": WALL + number,
        "mono_ns": MONO + number, "environment": ENVIRONMENT.raw, "switches": SWITCHES.raw, "model": MODEL.raw,
        "load": 1, "rows": 1, "facts": orjson.dumps(facts), "payloads": (ids("prompt.ids", [5, 6, 7]),),
    }  # fmt: skip
    return Request(**{**whole, **changes})


def output(number: int, start_seq: int, **changes: Any) -> Output:
    """Make the output of a call; ``facts`` may be a dict, ``status`` a word."""
    whole = {
        "run_id": uuid.UUID(run_id(number)).bytes, "start_seq": start_seq, "wall_ns": WALL + number + 1000,
        "mono_ns": MONO + number + 1000, "duration_ns": 1000, "status": "ok", "settings": SETTINGS.raw,
        "weights": NOTHING, "facts": {}, "sequences": (SequenceEnd(0, 0, 3, 2, 0, 1, 0.5, 1),),
        "payloads": (ids("output.ids", [8, 9]),),
    }  # fmt: skip
    whole |= changes
    whole["status"] = STATUSES.index(str(whole["status"]))
    whole["facts"] = orjson.dumps(whole["facts"])
    return Output(**whole)  # type: ignore[arg-type]


def about(key: bytes = KEY) -> dict[str, object]:
    """Return what the header of a segment says of its process."""
    return {"host": "hmac:00", "program": "app.py", "key_id": digests.key_id(key), "capture": "full"}


class Calls:
    """A process life: appends the records of calls to a journal of its own."""

    def __init__(self, folder: Path, seed: bytes = SEED) -> None:
        self.journal = Journal(folder, about())
        self.seed = seed

    def note(self, kind: str, digest: bytes, document: bytes) -> int:
        """Append a note."""
        return self.journal.append(records.frame_kind(kind), records.note_payload(kind, digest, document))

    def prints(self) -> None:
        """Append every fingerprint that the calls refer to."""
        for item in (ENVIRONMENT, SWITCHES, MODEL, SETTINGS):
            self.note(item.scope, item.raw, item.document)

    def weights(self) -> bytes:
        """Append the manifest, and return its raw root."""
        root = raw(WEIGHTS.root)
        self.note("weights", root, WEIGHTS.document())
        return root

    def binding(self, first: int, last: int, root: str = WEIGHTS.root, load: int = 1, **more: str) -> int:
        """Append the record that binds calls to their weights."""
        document = {"load": load, "kind": "tensors", "from": first, "to": last, "root": root, **more}
        return self.note("binding", raw(root) if root else NOTHING, orjson.dumps(document))

    def start(self, number: int, **changes: Any) -> int:
        """Append a start record."""
        return self.journal.append(frame.START, records.start_payload(self.seed, request(number, **changes)))

    def end(self, number: int, start_seq: int, **changes: Any) -> int:
        """Append an end record."""
        return self.journal.append(frame.END, records.end_payload(self.seed, output(number, start_seq, **changes)))

    def call(self, number: int, begin: dict[str, Any] | None = None, **changes: Any) -> int:
        """Append start and end of a call, and return the seq of its start."""
        seq = self.start(number, **(begin or {}))
        self.end(number, seq, **changes)
        return seq

    def close(self) -> None:
        """End the process life."""
        self.journal.close()


# -- segments made by hand ----------------------------------------------------------------------------


def stream(number: int = 1) -> Stream:
    """Return a stream of fixed bytes."""
    return Stream(bytes([number]) * 16, bytes([7]) * 16, 4242, WALL, MONO, orjson.dumps(about()))


def header(salt: bytes, index: int = 0, first_seq: int = 0, number: int = 1) -> bytes:
    """Return the bytes that open a segment."""
    return frame.write_header(frame.Header(stream(number), salt, index, first_seq, bytes(32)))


def framed(salt: bytes, seq: int, kind: int, payload: bytes) -> bytes:
    """Return the bytes of one frame, as the page of the format says."""
    size = len(payload)
    crc = frame.checksum(_crc(payload, salt), seq, kind, 0, size)
    return frame.HEAD.pack(frame.marker(salt), size, seq, kind, 0, crc) + payload + frame.TAIL.pack(size)


def _crc(payload: bytes, salt: bytes) -> int:
    from zlib import crc32

    return crc32(payload, frame.salt_crc(salt))


def segment(path: Path, salt: bytes, frames: Iterable[tuple[int, int, bytes]], number: int = 1) -> Path:
    """Write a segment of frames given as (seq, kind, payload), with nobody appending to it."""
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    path.write_bytes(header(salt, number=number) + b"".join(framed(salt, *item) for item in frames))
    return path


def as_json(record: Any) -> Any:
    """Write a record as read from a journal in JSON: bytes in hexadecimal, NaN as a text."""
    if isinstance(record, bytes):
        return record.hex()
    if isinstance(record, float) and record != record:
        return "nan"
    if isinstance(record, tuple) and hasattr(record, "_asdict"):
        return {name: as_json(value) for name, value in record._asdict().items()}
    return [as_json(item) for item in record] if isinstance(record, tuple) else record


# -- stores -------------------------------------------------------------------------------------------


# Where set, stores are made on a server: returns the URL of an empty database. See `conftest.both`.
fresh_url: list[Callable[[], str]] = []


def places(folder: Path, key: bytes = KEY) -> Places:
    """Return a store's places below a folder, with the key in its file: the same ones for the same folder."""
    folder.mkdir(parents=True, exist_ok=True)
    key_file, file, url = folder / "key", folder / "p.db", folder / "url"
    if not key_file.exists():
        key_file.write_bytes(key)
        key_file.chmod(0o600)
        if fresh_url:
            url.write_text(fresh_url[0]())
    if url.exists():
        return Places(url.read_text(), None, folder / "p.db.spool", key_file)
    return Places(f"sqlite:///{file}", file, folder / "p.db.spool", key_file)


def drained(spots: Places) -> Places:
    """Drain a spool to the end."""
    assert writer.drain(spots, 60.0), "the spool could not be drained"
    return spots


def rows(spots: Places, sql: str, *values: Any) -> list[tuple[Any, ...]]:
    """Ask a store, through a handle that cannot write."""
    if spots.database is None:
        return _server_rows(spots.url, sql, values)
    connection = sqlite3.connect(f"file:{spots.database}?mode=ro", uri=True)
    try:
        return list(connection.execute(sql, values))
    finally:
        connection.close()


def _server_rows(url: str, sql: str, values: Sequence[Any]) -> list[tuple[Any, ...]]:
    """Ask a server what SQLite was asked: the test says it once."""
    import psycopg

    sql = re.sub(
        r"\bhex\((\w+)\)", r"coalesce(upper(encode(\1, 'hex')), '')", sql.replace("%", "%%").replace("?", "%s")
    )
    with psycopg.connect(url, options="-c default_transaction_read_only=on") as connection:
        return list(connection.execute(sql.encode(), values).fetchall())


def whole(spots: Places) -> bool:
    """Say whether the database itself finds nothing wrong: SQLite checks its pages, a server its own by reading all."""
    if spots.database is not None:
        return rows(spots, "pragma integrity_check") == [("ok",)]
    return bool(one(spots, "select count(*) from log_entries") == one(spots, "select count(*) from ingested"))


@contextmanager
def written(spots: Places) -> Iterator[Connection]:
    """Change a store by hand, as no code of ours does."""
    engine = database.writing(spots.url, spots.database)
    with engine.begin() as connection:
        yield connection
    engine.dispose()


def schema_of(spots: Places) -> list[tuple[Any, ...]]:
    """Return what the database says of its own tables."""
    if spots.database is not None:
        return rows(spots, "select sql from sqlite_master")
    return rows(spots, "select table_name, column_name, data_type from information_schema.columns order by 1, 2, 3")


def everything(spots: Places) -> bytes:
    """Return every byte of a store's files, or every value of a server's rows."""
    if spots.database is not None:
        return b"".join(path.read_bytes() for path in spots.database.parent.glob("p.db*") if path.is_file())
    found = (
        value for table in tables.metadata.tables for row in rows(spots, f"select * from {table}") for value in row
    )
    return b"\n".join(value if isinstance(value, bytes) else str(value).encode() for value in found)


def one(spots: Places, sql: str, *values: Any) -> Any:
    """Ask a store for the one value of the one row."""
    found = rows(spots, sql, *values)
    assert len(found) == 1, found
    assert len(found[0]) == 1
    return found[0][0]


def is_one_sentence(message: str) -> bool:
    """Say whether a message can be printed as it is: one line, not long, ended, and no traceback in it."""
    return "\n" not in message and len(message) < 400 and bool(message.strip()) and "Traceback" not in message
