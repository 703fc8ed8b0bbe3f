"""Rows on their way into the tables: gathered for a batch, then written with one bulk statement a table.

A run whose start and end come in the same batch is inserted once, whole; one whose start was committed earlier
is updated.
"""

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

import orjson
from sqlalchemy import BigInteger, Double, Integer, LargeBinary, SmallInteger, Table

from provenance.facts import Field, Fingerprint, Noted, State, WeightsManifest
from provenance.integrity.canonical import named, plain, raw
from provenance.store import tables

NOTHING = bytes(32)
NAME_CHARS = 200
WRITERS = 0x70726F76  # the advisory lock of a PostgreSQL database that its writers share
# Rows of runs and sequences are filled in here, and written as they lie: in the order of the table's columns.
EMPTY_RUN: dict[str, Any] = dict.fromkeys(column.name for column in tables.runs.columns)
EMPTY_SEQUENCE: dict[str, Any] = dict.fromkeys(column.name for column in tables.sequences.columns)
CHUNK = 400  # values in one question
BODY = [column.name for column in tables.payload_refs.columns].index("body")
# What an end adds to a run, and to a sequence, whose start was committed before.
RUN_UPDATE = ("end_seq", "status", "ended_at", "duration_ns", "settings", "weights", "weight_files",
              "weights_note", "random_state", "error",
              "call_facts", "leaf")  # fmt: skip
SEQUENCE_UPDATE = ("output_key", "input_tokens", "output_tokens", "padding_tokens", "finish", "min_margin",
                   "min_margin_at", "output_preview")  # fmt: skip


@dataclass(slots=True)
class Rows:
    """The rows of one batch."""

    runs: dict[int, dict[str, Any]] = field(default_factory=dict)  # by start seq
    old_runs: dict[int, dict[str, Any]] = field(default_factory=dict)
    sequences: dict[tuple[int, int, int], dict[str, Any]] = field(default_factory=dict)  # run, row, return
    old_sequences: dict[tuple[int, int, int], dict[str, Any]] = field(default_factory=dict)
    tags: list[tuple[Any, ...]] = field(default_factory=list)
    refs: list[list[Any]] = field(default_factory=list)  # each with the key of its body, until that has its number
    inputs: dict[int, dict[tuple[int, int], tuple[Any, Any]]] = field(default_factory=dict)  # of the runs above
    ingested: list[tuple[Any, ...]] = field(default_factory=list)
    entries: list[tuple[Any, ...]] = field(default_factory=list)


def _wire(kind: Any) -> str:
    """Return PostgreSQL's name for a column's type. A small integer is an integer to SQLAlchemy too."""
    for python, name in ((SmallInteger, "int2"), (BigInteger, "int8"), (Integer, "int4"), (LargeBinary, "bytea"),
                         (Double, "float8")):  # fmt: skip
        if isinstance(kind, python):
            return name
    return "text"


class Bulk:
    """Bulk statements on the driver's own connection, in its own parameter style."""

    def __init__(self, raw: Any, dialect: str) -> None:
        self.cursor = raw.cursor()
        self.mark = "?" if dialect == "sqlite" else "%s"

    def alone(self) -> None:
        """Wait until no other host's writer is in a transaction: ids and places in the log are given in order."""
        if self.mark == "%s":  # SQLite's own lock is taken as its transaction begins
            self.run("select pg_advisory_xact_lock(?)", (WRITERS,))

    def insert(self, table: Table, rows: Sequence[Sequence[Any]], ignore: bool = False) -> None:
        """Insert whole rows, in the order of the table's columns; ``ignore`` leaves existing rows alone."""
        if not rows:
            return
        names = ",".join(column.name for column in table.columns)
        if self.mark == "%s" and not ignore:
            self._copy(table, names, rows)
            return
        marks = ",".join([self.mark] * len(table.columns))
        ending = " on conflict do nothing" if ignore else ""
        self.cursor.executemany(f"insert into {table.name}({names}) values({marks}){ending}", rows)

    def _copy(self, table: Table, names: str, rows: Sequence[Sequence[Any]]) -> None:
        """Send rows as PostgreSQL takes them fastest; see docs/decisions/0007-copy.md."""
        with self.cursor.copy(f"copy {table.name}({names}) from stdin (format binary)") as copy:
            copy.set_types([_wire(column.type) for column in table.columns])
            for row in rows:
                copy.write_row(row)

    def update(self, table: str, columns: Iterable[str], keys: Iterable[str], rows: Sequence[Sequence[Any]]) -> None:
        """Update rows: the values of ``columns``, then those of ``keys``."""
        if not rows:
            return
        sets = ",".join(f"{name}={self.mark}" for name in columns)
        where = " and ".join(f"{name}={self.mark}" for name in keys)
        self.cursor.executemany(f"update {table} set {sets} where {where}", rows)

    def run(self, sql: str, values: Sequence[Any] = ()) -> list[tuple[Any, ...]]:
        """Run one statement written with ``?`` and return its rows, if it has any."""
        self.cursor.execute(sql.replace("?", self.mark), tuple(values))
        return list(self.cursor.fetchall()) if self.cursor.description else []

    def among(self, sql: str, values: Sequence[Any]) -> Iterator[tuple[Any, ...]]:
        """Run a statement that ends in a column's name for those rows whose column is one of some values."""
        for place in range(0, len(values), CHUNK):
            part = values[place : place + CHUNK]
            if self.mark == "%s":
                yield from self.run(f"{sql} = any(?)", (list(part),))
            else:
                yield from self.run(f"{sql} in ({','.join('?' * len(part))})", part)

    def many(self, sql: str, rows: Sequence[Sequence[Any]]) -> None:
        """Run one statement written with ``?`` for each row."""
        if rows:
            self.cursor.executemany(sql.replace("?", self.mark), rows)


def write(bulk: Bulk, rows: Rows) -> None:
    """Write a batch and empty it. References must have the numbers of their bodies by now."""
    bulk.insert(tables.runs, [list(row.values()) for row in rows.runs.values()])
    bulk.update(
        "runs", RUN_UPDATE, ("id", "started_at"),
        [[*(row.get(name) for name in RUN_UPDATE), row["id"], row["started_at"]] for row in rows.old_runs.values()],
    )  # fmt: skip
    bulk.insert(tables.sequences, [list(row.values()) for row in rows.sequences.values()])
    keys = ("run", "started_at", "prompt_index", "return_index")
    bulk.update(
        "sequences", SEQUENCE_UPDATE, keys,
        [[row.get(name) for name in (*SEQUENCE_UPDATE, *keys)] for row in rows.old_sequences.values()],
    )  # fmt: skip
    bulk.insert(tables.run_tags, rows.tags, ignore=True)
    bulk.insert(tables.payload_refs, rows.refs)
    bulk.insert(tables.ingested, rows.ingested)
    bulk.insert(tables.log_entries, rows.entries)
    for part in (rows.runs, rows.old_runs, rows.sequences, rows.old_sequences, rows.inputs):
        part.clear()
    for group in (rows.tags, rows.refs, rows.ingested, rows.entries):
        group.clear()


# -- documents that are stored once and referred to by number ----------------------------------------


class Documents:
    """Fingerprints and manifests within one transaction."""

    def __init__(self, bulk: Bulk) -> None:
        self.bulk = bulk
        self._numbers: dict[bytes, int] = {}
        self._weights: dict[bytes, int | None] = {}
        self.values: dict[int, str] = {}

    def fingerprint(self, digest: bytes) -> int | None:
        """Return the number of a fingerprint by its raw digest; None for none, or for one that never came."""
        if digest == NOTHING:
            return None
        if digest not in self._numbers:
            found = self.bulk.run("select id, value_digest from fingerprints where digest=?", (named(digest),))
            if not found:
                return self._placeholder(digest)
            self._numbers[digest], self.values[found[0][0]] = found[0][0], found[0][1]
        return self._numbers[digest]

    def _placeholder(self, digest: bytes) -> int:
        """Keep the reference to a fingerprint whose record is missing: the digest is evidence."""
        return self._insert(digest, named(digest), "missing", b"", [])

    def add_fingerprint(self, record: Noted) -> None:
        """Store a fingerprint, unless it is there. Its digest is computed again from its bytes."""
        made = Fingerprint.read(record.document)
        found = self.bulk.run("select id, scope from fingerprints where digest=?", (made.digest,))
        if found and found[0][1] != "missing":
            self._numbers[made.raw] = found[0][0]
            return
        fields = list(made.fields.values())
        if not found:
            self._insert(made.raw, made.value_digest, made.scope, made.document, fields)
            return
        number = found[0][0]  # of a placeholder, which is filled: runs refer to it
        filled = "update fingerprints set value_digest=?, scope=?, document=? where id=?"
        self.bulk.run(filled, (made.value_digest, made.scope, made.document, number))
        self._fields(number, fields)
        self._numbers[made.raw], self.values[number] = number, made.value_digest

    def _insert(self, digest: bytes, values: str, scope: str, document: bytes, fields: list[Field]) -> int:
        number = int(self.bulk.run("select coalesce(max(id), 0) + 1 from fingerprints")[0][0])
        self.bulk.insert(tables.fingerprints, [(number, named(digest), values, scope, document)])
        self._fields(number, fields)
        self._numbers[digest], self.values[number] = number, values
        return number

    def _fields(self, number: int, fields: list[Field]) -> None:
        self.bulk.insert(tables.fingerprint_fields, [_field(number, item) for item in fields], ignore=True)

    def weights(self, root: bytes) -> int | None:
        """Return the number of a manifest by its raw root; None for none."""
        if root == NOTHING:
            return None
        if root not in self._weights:
            found = self.bulk.run("select id from weights where root=?", (named(root),))
            self._weights[root] = found[0][0] if found else None
        return self._weights[root]

    def add_weights(self, record: Noted) -> None:
        """Store a manifest, unless it is there."""
        manifest = WeightsManifest.read(record.document)
        root = manifest.root
        if self.bulk.run("select id from weights where root=?", (root,)):
            return
        number = int(self.bulk.run("select coalesce(max(id), 0) + 1 from weights")[0][0])
        total = sum(entry.size for entry in manifest.entries)
        self.bulk.insert(tables.weights, [(number, root, manifest.kind, len(manifest.entries), total, record.document)])
        self.bulk.insert(
            tables.weight_entries,
            [
                (number, entry.kind[:8], clean(entry.name)[:300], entry.dtype[:24],
                 orjson.dumps(list(entry.shape)).decode(), entry.size, entry.sha256)
                for entry in manifest.entries
            ],
            ignore=True,
        )  # fmt: skip
        self._weights[raw(root)] = number


def clean(text: str) -> str:
    """Make text fit for both databases: PostgreSQL takes no NUL, neither takes lone surrogates."""
    if text.isascii() and "\0" not in text:
        return text
    return text.replace("\0", "\u2400").encode("utf-8", "replace").decode()


def _field(number: int, item: Field) -> tuple[object, ...]:
    value = clean(_text(item.value)) if item.state is State.VALUE else None
    reason, source = clean(item.reason) or None, clean(item.source) or None
    return (number, clean(item.name)[:NAME_CHARS], value, item.state.value, reason, source)


def _text(value: object) -> str:
    """Write a field's value as text for SQL: JSON, but for plain text, and for numbers that JSON cannot hold."""
    if isinstance(value, str):
        return value
    if isinstance(value, (int, float)) and not isinstance(value, bool):
        return str(value)
    return orjson.dumps(plain(value)).decode()
