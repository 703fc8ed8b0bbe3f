"""Digests of files that were hashed before, in one small file that any number of processes append to.

One line a file: a checksum, then device, inode, size, mtime and ctime, and what was found. A line that was torn
by a crash or by another writer fails its checksum and is passed over, so that no lock is needed and a spoilt
file costs a few digests. A remembered digest is a claim about a file that still looks the same; a file that was
touched less than two seconds before it was read is never remembered, because the next change may bear the same
time.
"""

import contextlib
import os
import threading
import time
import zlib
from pathlib import Path
from typing import NamedTuple

import orjson

LIMIT = 16 << 20  # bytes; beyond that the older half is let go
LINE = 4 << 20
RACY_NS = 2_000_000_000
DIGEST = 64


class Look(NamedTuple):
    """What a file looks like from outside."""

    device: int
    inode: int
    size: int
    mtime: int
    ctime: int

    @classmethod
    def at(cls, facts: os.stat_result) -> "Look":
        """Take it from a stat."""
        return cls(facts.st_dev, facts.st_ino, facts.st_size, facts.st_mtime_ns, facts.st_ctime_ns)

    def settled(self, now: int) -> bool:
        """Say whether a change after ``now`` would show in the times."""
        return now - max(self.mtime, self.ctime) > RACY_NS


class Cache:
    """The digests in one file. Never raises: a cache that cannot be read or written remembers nothing."""

    def __init__(self, path: Path | None) -> None:
        self.path = path
        self._lock = threading.Lock()
        self._known: dict[tuple[str, Look], str] = {}
        self._read = (0, 0)  # inode of the file, and how far it was read

    def get(self, kind: str, look: Look) -> str | None:
        """Return the digests of a file that looks like this: 64 hexadecimal digits each, one after the other."""
        found = self._known.get((kind, look))
        if found is None and self.path is not None:
            with self._lock:
                self._load()
            found = self._known.get((kind, look))
        return found

    def put(self, kind: str, look: Look, digests: str, began: int) -> None:
        """Remember the digests of a file that was read from ``began`` on (nanoseconds since 1970)."""
        if self.path is None or not look.settled(began) or began > time.time_ns():
            return
        body = orjson.dumps([kind, *look, digests])
        if len(body) > LINE:
            return
        line = b"\n%08x %s\n" % (zlib.crc32(body), body)
        with self._lock, contextlib.suppress(OSError):
            self._append(self.path, line)
            self._known[kind, look] = digests

    # -- the file -----------------------------------------------------------------------------------

    def _append(self, path: Path, line: bytes) -> None:
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
        try:
            os.write(descriptor, line)
            size = os.fstat(descriptor).st_size
        finally:
            os.close(descriptor)
        if size > LIMIT:
            self._shrink(path)

    def _load(self) -> None:
        """Read what was appended since the last time, by whomever."""
        try:
            facts = os.stat(self.path or "", follow_symlinks=False)
            if (facts.st_ino, facts.st_size) == self._read:
                return
            descriptor = os.open(self.path or "", os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK)
        except OSError:
            return
        with contextlib.suppress(OSError), os.fdopen(descriptor, "rb") as file:
            facts = os.fstat(file.fileno())
            inode, place = self._read
            if facts.st_ino != inode or facts.st_size < place:
                place = 0
            if facts.st_size > place and facts.st_size <= 4 * LIMIT:
                file.seek(place)
                data = file.read(facts.st_size - place)
                whole = data.rfind(b"\n") + 1  # a line that is being written is read next time
                for line in data[:whole].split(b"\n"):
                    self._take(line)
                place += whole
            self._read = (facts.st_ino, place)

    def _take(self, line: bytes) -> None:
        body = line[9:]
        if not body or line[:9] != b"%08x " % zlib.crc32(body):
            return
        try:
            kind, *look, digests = orjson.loads(body)
            key = (kind, Look(*look))
        except (ValueError, TypeError):
            return
        if isinstance(digests, str) and len(digests) % DIGEST == 0:
            self._known[key] = digests

    def _shrink(self, path: Path) -> None:
        """Keep the newer half. What another process appends meanwhile may be lost: it is hashed again."""
        with path.open("rb") as old:
            old.seek(-LIMIT // 2, os.SEEK_END)
            data = old.read(LIMIT // 2)
        draft = path.with_name(f"{path.name}.{os.getpid()}.{threading.get_ident()}")
        descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
        with os.fdopen(descriptor, "wb") as file:
            file.write(data[data.find(b"\n") :])
        draft.replace(path)
