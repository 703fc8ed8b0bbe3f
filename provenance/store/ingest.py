"""From journal records to rows, once only.

A batch is one transaction: the stream's position is locked and read, rows and the new position are committed
together. A frame that is there already becomes nothing; the same number with other bytes becomes an alarm among
the events.
"""

import hashlib
import logging
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NamedTuple

from sqlalchemy import Connection, Engine

from provenance.errors import KeyMismatch
from provenance.facts import Stream
from provenance.integrity import digests
from provenance.store import codec, database, tables
from provenance.store.batch import Batch, Item
from provenance.store.rows import Bulk

log = logging.getLogger("provenance")
ROLL_SECONDS = 86_400.0


class Position(NamedTuple):
    """How far a stream is in the store."""

    segment: int
    offset: int
    last_seq: int


class Ingest:
    """The writing end of one store."""

    def __init__(self, engine: Engine, key: bytes) -> None:
        """Take over the store. Raises KeyMismatch where it was written under another key."""
        self.engine, self.key = engine, key
        self.key_id = digests.key_id(key)
        # One connection while there is work: a new one would begin with an empty cache, and to close one moves
        # SQLite's whole log.
        self._connection: Connection | None = None
        self._roll_at = 0.0
        try:
            self._same_key()
        except BaseException:
            self.rest()
            raise

    def rest(self) -> None:
        """Let go of the database until there is work again: a SQLite file is then whole, without a log beside it."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    @contextmanager
    def _transaction(self) -> Iterator[Bulk]:
        if self._connection is None:
            self._connection = self.engine.connect()
        try:
            with self._connection.begin():
                yield Bulk(database.driver(self._connection), self.engine.dialect.name)
        except BaseException:
            self.rest()  # whatever state it is in
            raise

    def _same_key(self) -> None:
        with self._transaction() as bulk:
            bulk.alone()
            found = bulk.run("select value from store_info where name='key_id'")
            if not found:
                bulk.run("insert into store_info(name, value) values('key_id', ?)", (self.key_id,))
                bulk.insert(
                    tables.codecs, [(number, kind, None, None) for number, kind in codec.KINDS.items()], ignore=True
                )
            elif found[0][0] != self.key_id:
                raise KeyMismatch(
                    f"this store was written under key {found[0][0]} and the key file holds {self.key_id}; set "
                    "PROVENANCE_KEY_FILE to the store's key. The spool keeps everything."
                )

    def _roll(self) -> None:
        """Once a day, have a server make the parts of its tables for the months to come."""
        if self.engine.dialect.name == "sqlite" or time.monotonic() < self._roll_at:
            return
        self._roll_at = time.monotonic() + ROLL_SECONDS
        try:
            with self._transaction() as bulk:
                bulk.run("select provenance_roll()")
        except Exception as error:  # a role that may not: the rest takes what has no part
            log.warning("no parts were made for the months to come: %s", str(error).splitlines()[0])

    def position(self, stream: Stream) -> Position:
        """Return how far a stream is in, without waiting for anybody."""
        with self._transaction() as bulk:
            found = bulk.run("select segment, position, last_seq from streams where stream_id=?", (stream.stream_id,))
            return Position(*found[0]) if found else Position(0, 0, -1)

    def write(
        self, stream: Stream, segment: int, items: Sequence[Item], ended: bool = False, damage: Sequence[Any] = ()
    ) -> int:
        """Write one batch of a segment, or close its books; return how many records were new."""
        self._roll()
        with self._transaction() as bulk:
            batch = Batch(bulk, self.key, self.key_id, stream)
            batch.begin(items)
            fresh = 0
            for item in items:
                if batch.is_new(item):
                    batch.add(item)
                    fresh += 1
                else:
                    batch.again(item)
            for hole in damage:
                batch.damage(segment, hole)
            batch.finish(segment, items, ended)
            return fresh

    def refuse(self, stream: Stream, segment: int, item: Item, reason: str) -> None:
        """Step over a record that cannot be stored, and say so among the events; its segment is kept."""
        with self._transaction() as bulk:
            batch = Batch(bulk, self.key, self.key_id, stream)
            batch.begin([item])
            detail = {"segment": segment, "why": "the record cannot be stored", "reason": reason}
            batch.event("alarm", item.record.seq, detail)
            batch.finish(segment, [item], ended=False)

    def hurt(self, stream: Stream, segment: int) -> bool:
        """Say whether anything in a segment was damaged or refused, whoever drained it."""
        with self._transaction() as bulk:
            return bool(
                bulk.run(
                    "select 1 from events e join streams s on s.id = e.stream where s.stream_id=? "
                    "and e.kind in ('damage', 'alarm') and e.detail like ?",
                    (stream.stream_id, f'{{"segment":{segment},%'),
                )
            )


def frame_digest(kind: int, payload: bytes) -> bytes:
    """Return the digest under which a frame counts as ingested: 16 bytes over kind and payload."""
    state = hashlib.sha256(kind.to_bytes(2, "little"))
    state.update(payload)
    return state.digest()[:16]
