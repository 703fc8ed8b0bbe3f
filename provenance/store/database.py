"""Opening the database: for the one writer, or read-only for everybody else; and its schema.

A SQLite file is in WAL mode with one writing connection that syncs every commit, because segments are unlinked
once their rows are committed. Readers open it ``mode=ro``. Readers of a PostgreSQL database are in read-only
transactions that see one moment and have an end. Nothing is migrated inside inference: a fresh database is made, an
older one is refused with the command that upgrades it.
"""

import os
import sqlite3
import threading
from collections import Counter
from pathlib import Path
from typing import Any
from urllib.parse import quote

from sqlalchemy import Connection, Engine, create_engine, event, inspect, text
from sqlalchemy.exc import DBAPIError, OperationalError
from sqlalchemy.pool import NullPool, QueuePool

from provenance.errors import BadFile, MissingExtra, NoDatabase, SchemaMismatch, StoreAway, StoreError

HEAD = "0005"
REVISIONS = ("0001", "0002", "0003", "0004", "0005")
MAGIC = b"SQLite format 3\0"
PAGE_BYTES = 8192
CACHE_KB = 16_384  # keyed names come in no order: without room for their index every batch reads it again
WRITE_WAIT_MS = 60_000
READ_WAIT_MS = 5_000
STATEMENT_MS = 60_000  # no question to a server takes longer, or it would hold the vacuum up
CONNECT_SECONDS = 10
# Files that this process has open as databases, by device and inode, and how often. To open one of them as a plain
# file and close it again would release SQLite's locks on it (POSIX does so), and a stranger who closes the database
# then takes the log away from under a writer: its commits are gone.
_held: Counter[tuple[int, int]] = Counter()
_gate = threading.Lock()
# What a server answers whoever it will never let in; anything else may pass.
FINAL = (
    "authentication failed",
    "does not exist",
    "no pg_hba.conf entry",
    "no password supplied",
    "not permitted to log in",
)


def writing(url: str, file: Path | None) -> Engine:
    """Open the database for the writer. A SQLite file is made, readable by its owner alone, where there is none.

    Raises NoDatabase where it cannot be reached or made, BadFile where the file is something else.
    """
    if file is not None:
        _make(file)
        if _begun(file):
            # Before a pragma touches it: it may be somebody else's.
            schema(_sqlite(file, read_only=True), str(file))
        return _sqlite(file, read_only=False)
    return _server(url, read_only=False)


def reading(url: str, file: Path | None) -> Engine:
    """Open the database read-only, and check that this code knows its schema.

    Raises NoDatabase, BadFile or SchemaMismatch.
    """
    if file is not None:
        _exists(file)
        engine = _sqlite(file, read_only=True)
    else:
        engine = _server(url, read_only=True)
    check(engine, str(file or engine.url.render_as_string(hide_password=True)), writer=False)
    return engine


def _exists(file: Path) -> None:
    if file.is_dir():
        raise BadFile(f"{file} is a folder and not a database; name the file, as in --db {file / 'provenance.db'}.")
    if not file.exists():
        raise NoDatabase(
            f"there is no database at {file}. Record a run first (`provenance demo` does), or name another with "
            "--db or PROVENANCE_DB."
        )
    _begun(file)


def _begun(file: Path) -> bool:
    """Say whether there is anything in a file.

    Raises BadFile where it is no database: SQLite itself takes a short text for an empty one.
    """
    head = b"no file"
    try:
        with _gate:
            if _is_held(file):
                return True
            if file.is_file():
                with file.open("rb") as content:
                    head = content.read(len(MAGIC))
    except OSError as error:
        raise NoDatabase(f"the database {file} cannot be opened: {error.strerror}.") from error
    if head and head != MAGIC:
        raise BadFile(f"{file} is not a database; set PROVENANCE_DB to another path.")
    return bool(head)


class _Held(sqlite3.Connection):
    """A connection whose file is known to be held while it is open."""

    _file: tuple[int, int] | None = None

    def hold(self, file: Path) -> None:
        """Note which file it is, before SQLite takes its first lock on it."""
        with _gate:
            self._file = _identity(file)
            _held[self._file] += 1

    def close(self) -> None:
        """Close it; the file may be opened as a file again."""
        super().close()
        with _gate:
            if self._file is not None:
                _held[self._file] -= 1
            self._file = None


def _is_held(file: Path) -> bool:
    try:
        return _held.get(_identity(file), 0) > 0
    except FileNotFoundError:
        return False


def _identity(file: Path) -> tuple[int, int]:
    facts = file.stat()
    return facts.st_dev, facts.st_ino


def _make(file: Path) -> None:
    if file.is_dir():
        raise BadFile(f"{file} is a folder and not a database; set PROVENANCE_DB to a file in it.")
    try:
        file.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        with _gate:
            if not _is_held(file):
                os.close(os.open(file, os.O_CREAT | os.O_RDWR | os.O_CLOEXEC, 0o600))
    except OSError as error:
        raise NoDatabase(
            f"the database {file} cannot be made: {error.strerror}. Set PROVENANCE_DB to a path that can be written to."
        ) from error


def _sqlite(file: Path, *, read_only: bool) -> Engine:
    uri = f"file:{quote(str(file))}?mode={'ro' if read_only else 'rw'}"

    def opened(uri: str) -> sqlite3.Connection:
        connection = sqlite3.connect(
            uri, uri=True, check_same_thread=False, timeout=0, isolation_level=None, factory=_Held
        )
        connection.hold(file)
        return connection

    def connect() -> sqlite3.Connection:
        connection = opened(uri)
        # A database in WAL mode wants a file beside it. Where this user may not make one and nobody writes, the
        # database as it lies is all there is, and SQLite may be told so.
        if read_only and not os.access(file.parent, os.W_OK) and _settled(file):
            connection.close()
            connection = opened(uri + "&immutable=1")
        return connection

    engine = create_engine("sqlite://", creator=connect, poolclass=NullPool)

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _: object) -> None:
        if read_only:
            connection.execute(f"pragma busy_timeout={READ_WAIT_MS}")
            connection.execute("pragma query_only=on")
            return
        connection.execute(f"pragma busy_timeout={WRITE_WAIT_MS}")
        connection.execute(f"pragma page_size={PAGE_BYTES}")
        connection.execute("pragma journal_mode=wal")
        connection.execute("pragma synchronous=full")
        connection.execute("pragma secure_delete=on")
        connection.execute(f"pragma cache_size=-{CACHE_KB}")

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        # sqlite3 begins nothing by itself here: the writer takes its lock at once, a reader its snapshot.
        connection.exec_driver_sql("begin" if read_only else "begin immediate")

    return engine


def _settled(file: Path) -> bool:
    """Say whether nothing waits in the log beside a database."""
    log = file.with_name(file.name + "-wal")
    return not log.exists() or log.stat().st_size == 0


def _server(url: str, *, read_only: bool) -> Engine:
    url = url.replace("postgres://", "postgresql://", 1).replace("postgresql://", "postgresql+psycopg://", 1)
    patience = {"connect_timeout": CONNECT_SECONDS}
    try:
        if not read_only:
            return create_engine(url, poolclass=QueuePool, pool_size=1, connect_args=patience)
        engine = create_engine(url, poolclass=NullPool, connect_args=patience)
    except ModuleNotFoundError:
        raise MissingExtra("psycopg", "a PostgreSQL database", "postgres") from None

    @event.listens_for(engine, "connect")
    def prepare(connection: Any, _: object) -> None:
        from psycopg import IsolationLevel

        connection.read_only = True
        connection.isolation_level = IsolationLevel.REPEATABLE_READ

    @event.listens_for(engine, "begin")
    def begin(connection: Connection) -> None:
        connection.exec_driver_sql(f"set local statement_timeout = {STATEMENT_MS}")

    return engine


def schema(engine: Engine, name: str) -> str:
    """Return the revision of the database's schema, or an empty text for a fresh one.

    Raises BadFile for a file that is no database of ours, NoDatabase where nobody answers.
    """
    try:
        with engine.connect() as connection:
            tables = set(inspect(connection).get_table_names())
            if "alembic_version" in tables:
                return str(connection.execute(text("select version_num from alembic_version")).scalar() or "")
    except OperationalError as error:
        reason = str(error.orig).strip().splitlines()[0]
        away = engine.dialect.name != "sqlite" and not any(word in str(error.orig) for word in FINAL)
        kind = StoreAway if away else NoDatabase
        raise kind(f"the database {name} cannot be opened: {reason}.") from error
    except DBAPIError as error:
        raise BadFile(f"{name} is not a database: {str(error.orig).splitlines()[0]}.") from error
    if tables:
        raise BadFile(f"{name} is a database of something else; set PROVENANCE_DB to another path.")
    return ""


def check(engine: Engine, name: str, *, writer: bool) -> None:
    """Refuse a schema that this code does not know.

    Raises SchemaMismatch; a fresh database is made ready for a writer and is missing for a reader.
    """
    found = schema(engine, name)
    if found == HEAD:
        return
    if not found and writer:
        upgrade(engine)
    elif not found:
        raise NoDatabase(f"the database {name} is empty: nothing has been recorded into it yet.")
    elif found in REVISIONS:
        raise SchemaMismatch(f"the database {name} has the older schema {found}. Run: provenance db upgrade")
    else:
        raise SchemaMismatch(
            f"the database {name} has schema {found}, newer than this version knows ({HEAD}). Upgrade provenance."
        )


def upgrade(engine: Engine) -> None:
    """Bring the schema to the newest revision, each step in a transaction of its own."""
    from alembic import command
    from alembic.config import Config

    config = Config()
    config.set_main_option("script_location", str(scripts()))
    config.set_main_option("path_separator", "os")
    try:
        with engine.begin() as connection:
            config.attributes["connection"] = connection
            command.upgrade(config, "head")
    except DBAPIError as error:
        raise StoreError(f"the schema cannot be upgraded: {str(error.orig).splitlines()[0]}.") from error


def positions(engine: Engine) -> dict[bytes, tuple[int, int, int]]:
    """Return how far each stream is in the store: segment, offset, last seq."""
    with engine.connect() as connection:
        rows = connection.execute(text("select stream_id, segment, position, last_seq from streams"))
        return {bytes(row[0]): (row[1], row[2], row[3]) for row in rows}


def scripts() -> Path:
    """Return the folder of the migrations: inside the installed package, or at the root of a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "_migrations"
    return inside if inside.is_dir() else package.parent / "migrations"


def failed(engine: Engine, error: Exception) -> bool:
    """Say whether an error is the store's, which may pass, and not that of the rows, which would come again."""
    made: Any = engine.dialect.loaded_dbapi
    state = getattr(error.orig if isinstance(error, DBAPIError) else error, "sqlstate", None)
    if state:  # a server's own word: 22 is data that it cannot take, 23 rows that contradict others, 54 its limits
        return state[:2] not in ("22", "23", "54")
    rows = (made.IntegrityError, made.DataError, made.ProgrammingError, made.NotSupportedError)
    cause = error.orig if isinstance(error, DBAPIError) else error
    return isinstance(cause, (OSError, MemoryError, made.Error)) and not isinstance(cause, rows)


def driver(connection: Connection) -> Any:
    """Return the driver's own connection, for the writer's bulk statements."""
    return connection.connection.driver_connection
