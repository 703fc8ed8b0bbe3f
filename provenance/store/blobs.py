"""Large payloads in the store: files beside a SQLite database, pieces of 1 MiB in rows on a server.

Beside SQLite a blob is ``<database>.blobs/ab/abcdef…``, named by the SHA-256 of its content; it is whole on the disk
before the transaction that refers to it is committed. A body of the table `payloads` refers to it by the digest and
holds nothing else. A blob goes when the last body that refers to it goes.
"""

import hashlib
import os
import secrets
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

from sqlalchemy import Connection, text

from provenance.store import tables
from provenance.store.rows import Bulk

PIECE = 1 << 20
AT_ONCE = 16  # pieces on their way to a server
FILE = "select file from pragma_database_list where name = 'main'"


def _home(file: str) -> Path:
    path = Path(file)
    return path.with_name(path.name + ".blobs")


def _place(home: Path, digest: bytes) -> Path:
    name = digest.hex()
    return home / name[:2] / name


def _pieces(data: Any) -> Iterator[bytes]:
    for place in range(0, len(data), PIECE):
        yield data[place : place + PIECE]


def keep(bulk: Bulk, data: Any) -> bytes:
    """Keep content that is mapped or in memory, unless it is there, and return its digest."""
    state = hashlib.sha256()
    for piece in _pieces(data):
        state.update(piece)
    digest = state.digest()
    if bulk.mark == "?":
        _file(_place(_home(bulk.run(FILE)[0][0]), digest), data)
    elif not bulk.run("select 1 from blob_chunks where sha256=? limit 1", (digest,)):
        rows: list[tuple[bytes, int, bytes]] = []
        for number, piece in enumerate(_pieces(data)):
            rows.append((digest, number, piece))
            if len(rows) == AT_ONCE:
                bulk.insert(tables.blob_chunks, rows)
                rows.clear()
        bulk.insert(tables.blob_chunks, rows)
    return digest


def _file(path: Path, data: Any) -> None:
    """Write a file that is whole on the disk when it has its name."""
    if path.exists():
        return
    path.parent.parent.mkdir(mode=0o700, exist_ok=True)
    path.parent.mkdir(mode=0o700, exist_ok=True)
    draft = path.with_name(f".{path.name}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    try:
        for piece in _pieces(data):
            view = memoryview(piece)
            while view:
                view = view[os.write(descriptor, view) :]
        os.fsync(descriptor)
        draft.rename(path)
    except OSError:
        draft.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    for folder in (path.parent, path.parent.parent, path.parent.parent.parent):
        place = os.open(folder, os.O_RDONLY | os.O_CLOEXEC)
        try:
            os.fsync(place)
        finally:
            os.close(place)


def read(connection: Connection, digest: bytes, size: int) -> bytes:
    """Return the content of a blob.

    Raises ValueError where it is missing or damaged.
    """
    if connection.dialect.name == "sqlite":
        path = _place(_home(str(connection.execute(text(FILE)).scalar())), digest)
        try:
            if path.stat().st_size != size:
                raise ValueError(f"the file {path} is not {size} bytes long")
            data = path.read_bytes()
        except OSError as error:
            raise ValueError(f"the file {path} cannot be read ({error.strerror})") from None
    else:
        whole = bytearray()
        query = text("select data from blob_chunks where sha256=:digest and part=:part")
        for part in range((size + PIECE - 1) // PIECE):
            whole += connection.execute(query, {"digest": digest, "part": part}).scalar() or b""
        data = bytes(whole)
    if hashlib.sha256(data).digest() != digest:
        raise ValueError(f"the large payload {digest.hex()} is missing or damaged")
    return data


def forget(bulk: Bulk, gone: Iterable[tuple[bytes, bytes]]) -> int:
    """Delete the blobs of bodies that were deleted, given as key and digest; one that another body holds stays."""
    count = 0
    for key, digest in gone:
        if bulk.run("select 1 from payloads where key=? limit 1", (key,)):
            continue
        count += 1
        if bulk.mark == "?":
            _place(_home(bulk.run(FILE)[0][0]), digest).unlink(missing_ok=True)
        else:
            bulk.run("delete from blob_chunks where sha256=?", (digest,))
    return count
