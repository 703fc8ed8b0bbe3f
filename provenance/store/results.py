"""First results, kept to be served again: one row a question, and whoever writes it first has written it.

Read and written by the observed process itself, and by no writer: what is stored is there for the next process before
the call returns, and stays there if this one is killed. Connections are kept open, since to open one takes longer than
the question. Nothing here waits for long: a store that is away or locked is an error, and the call runs on.
"""

import threading
from collections.abc import Callable
from typing import Any, NamedTuple, TypeVar

from sqlalchemy import Connection, Engine, delete, func, select
from sqlalchemy.dialects import postgresql, sqlite

from provenance.facts import VALUE
from provenance.store import codec, database, tables

WAIT_MS = 2000
SWEEP = 64  # rows that are looked at together when there are too many
T = TypeVar("T")
results = tables.cached_results


class First(NamedTuple):
    """A stored first result: its bytes, the run that made it, and when, in nanoseconds since 1970."""

    data: bytes
    run_id: str
    at: int


class Shelf:
    """The first results of one store. Safe for threads; a forked child needs its own."""

    def __init__(self, url: str, file: Any) -> None:
        self.url, self.file = url, file
        self._lock = threading.Lock()
        self._engines: dict[str, Engine] = {}
        self._open: dict[str, Connection] = {}

    def get(self, key: bytes, oldest: int = 0) -> First | None:
        """Return what is kept for a question, unless it is older than a time."""
        query = select(results).where(results.c.key == key, results.c.at >= oldest)

        def work(connection: Connection) -> First | None:
            row = connection.execute(query).first()
            return None if row is None else First(codec.unpack(row.codec, row.data, row.whole), row.run_id, row.at)

        return self._do("read", work)

    def put(self, key: bytes, first: First, most: int, oldest: int = 0) -> First:
        """Keep a result if there is none that is young enough; return the one that stands there now.

        ``most`` is how many bytes all results may take together: the oldest go first.
        """
        kind, packed = codec.pack(first.data, VALUE)

        def work(connection: Connection) -> First:
            connection.execute(delete(results).where(results.c.key == key, results.c.at < oldest))
            into: Any = (sqlite if connection.dialect.name == "sqlite" else postgresql).insert(results)
            connection.execute(
                into.values(
                    key=key, at=first.at, size=len(packed), run_id=first.run_id, codec=kind, whole=len(first.data),
                    data=packed,
                ).on_conflict_do_nothing()
            )  # fmt: skip
            row = connection.execute(select(results).where(results.c.key == key)).one()
            _sweep(connection, most, key)
            return First(codec.unpack(row.codec, row.data, row.whole), row.run_id, row.at)

        return self._do("write", work)

    def forget(self) -> None:
        """Let go of the connections."""
        with self._lock:
            for connection in self._open.values():
                connection.close()
            for engine in self._engines.values():
                engine.dispose()
            self._open.clear()
            self._engines.clear()

    def _do(self, way: str, work: Callable[[Connection], T]) -> T:
        with self._lock:
            try:
                connection = self._open.get(way) or self._connect(way)
                with connection.begin():
                    return work(connection)
            except BaseException:  # whatever state it is in
                broken = self._open.pop(way, None)
                if broken is not None:
                    broken.close()
                raise

    def _connect(self, way: str) -> Connection:
        if "write" not in self._engines:  # a store that is not there yet is made
            engine = database.writing(self.url, self.file)
            database.check(engine, str(self.file or "the store"), writer=True)
            self._engines["write"] = engine
        if way == "read" and "read" not in self._engines:
            self._engines["read"] = database.reading(self.url, self.file)
        connection = self._engines[way].connect()
        if self.file is not None:
            database.driver(connection).execute(f"pragma busy_timeout={WAIT_MS}")
        self._open[way] = connection
        return connection


def _sweep(connection: Connection, most: int, but: bytes) -> None:
    """Delete the oldest until what is left takes no more than it may; what was just asked for stays."""
    total = int(connection.execute(select(func.coalesce(func.sum(results.c.size), 0))).scalar_one())
    while total > most:
        query = select(results.c.key, results.c.size).where(results.c.key != but).order_by(results.c.at).limit(SWEEP)
        old = connection.execute(query).all()
        if not old:
            return
        gone = []
        for row in old:
            if total <= most:
                break
            gone.append(row.key)
            total -= row.size
        connection.execute(delete(results).where(results.c.key.in_(gone)))
