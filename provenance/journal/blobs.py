"""Large payloads beside the journal: each a file of its own, in a folder of its segment, named by its SHA-256.

A frame holds the digest and the size alone. The file is written under another name first, outside every lock, and
gets its name before its frame is appended; a crash between the two leaves a file that goes with its segment. Whoever
drains reads a file through the page cache and never whole into memory.
"""

import hashlib
import mmap
import os
import secrets
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from provenance.errors import MissingBlob
from provenance.facts import BLOB, End, Payload, Record, Start

SUFFIX = ".blobs"
PIECE = 8 << 20
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


class Draft(NamedTuple):
    """A blob that has no name yet."""

    path: Path
    digest: bytes


def folder(segment: Path) -> Path:
    """Return where the blobs of a segment lie, whatever has become of it."""
    return segment.with_suffix(SUFFIX)


def draft(spool: Path, data: bytes, *, sync: bool = False) -> Draft:
    """Write a blob into the spool, without a name yet. Raises OSError, and leaves nothing behind then."""
    path = spool / f"{secrets.token_hex(8)}.draft"
    state = hashlib.sha256()
    view = memoryview(data)
    descriptor = os.open(path, _FLAGS, 0o600)
    try:
        for place in range(0, len(view), PIECE):
            piece = view[place : place + PIECE]
            state.update(piece)
            while piece:
                piece = piece[os.write(descriptor, piece) :]
        if sync:
            os.fsync(descriptor)
    except OSError:
        path.unlink(missing_ok=True)
        raise
    finally:
        os.close(descriptor)
    return Draft(path, state.digest())


def settle(segment: Path, drafts: Iterable[Draft], *, sync: bool = False) -> None:
    """Give blobs their names in the folder of a segment."""
    home = folder(segment)
    home.mkdir(mode=0o700, exist_ok=True)
    for item in drafts:
        item.path.rename(home / item.digest.hex())
    if sync:
        flush_names(home, home.parent)


def flush_names(*folders: Path) -> None:
    """Flush the names in some folders to the device: a file can outlive its name. Raises OSError."""
    for folder_ in folders:
        descriptor = os.open(folder_, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(descriptor)
        finally:
            os.close(descriptor)


def follow(before: Path, after: Path) -> None:
    """Name the blobs of a segment beside the one that takes its place too. Raises OSError."""
    if not folder(before).is_dir():
        return
    home = folder(after)
    home.mkdir(mode=0o700, exist_ok=True)
    for path in folder(before).iterdir():
        os.link(path, home / path.name)


def refer(payload: Payload, digest: bytes) -> Payload:
    """Return a payload as its frame holds it: digest and size in place of the content."""
    reference = digest + len(payload.data).to_bytes(8, "little")
    return payload._replace(encoding=payload.encoding | BLOB, data=reference)


def resolved(record: Record, segment: Path) -> Record:
    """Return a record with the content of its blobs, mapped and not read.

    Raises MissingBlob where a file is not there, or is not what its name says.
    """
    if isinstance(record, Start):
        found = _resolved(record.request.payloads, segment)
        return record if found is None else record._replace(request=record.request._replace(payloads=found))
    if isinstance(record, End):
        found = _resolved(record.output.payloads, segment)
        return record if found is None else record._replace(output=record.output._replace(payloads=found))
    return record


def _resolved(payloads: tuple[Payload, ...], segment: Path) -> tuple[Payload, ...] | None:
    if not any(item.encoding & BLOB for item in payloads):
        return None
    return tuple(_mapped(item, segment) if item.encoding & BLOB else item for item in payloads)


def _mapped(payload: Payload, segment: Path) -> Payload:
    name, size = payload.data[:32].hex(), int.from_bytes(payload.data[32:40], "little")
    path = folder(segment) / name
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError as error:
        raise MissingBlob(f"the large payload {path} of {segment.name} is not there: {error.strerror}.") from None
    try:
        if os.fstat(descriptor).st_size != size or not size:
            raise MissingBlob(f"the large payload {path} of {segment.name} is not {size} bytes long.")
        data: Any = mmap.mmap(descriptor, size, access=mmap.ACCESS_READ)
    finally:
        os.close(descriptor)
    if hashlib.sha256(data).hexdigest() != name:
        raise MissingBlob(f"the large payload {path} of {segment.name} is damaged: its SHA-256 is not its name.")
    return payload._replace(data=data)


def sweep(spool: Path, before: float) -> None:
    """Delete drafts that were never given a name, because their process died, once they are old."""
    for path in spool.glob("*.draft"):
        try:
            if path.stat().st_mtime < before:
                path.unlink()
        except OSError:
            continue


def drop(segment: Path) -> None:
    """Delete the blobs of a segment that is gone."""
    shutil.rmtree(folder(segment), ignore_errors=True)


def weight(segment: Path) -> int:
    """Return the bytes of a segment's blobs."""
    try:
        with os.scandir(folder(segment)) as entries:
            return sum(entry.stat(follow_symlinks=False).st_size for entry in entries)
    except OSError:
        return 0
