"""The folder of a spool: whether it is safe, how much it may hold, what is set aside, and what crashes left behind.

A reserve of blocks is set aside so that word of a loss finds room on a full disk.

The limit is counted when a segment has grown by a 64th of it, not at every record: a spool that several processes
fill may pass it by as many 64ths as there are processes.
"""

import contextlib
import errno
import fcntl
import os
import stat
import sys
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from provenance.errors import SpoolRefused
from provenance.journal import blobs

MOST_BYTES = 1 << 30
LEAST_BYTES = 1 << 20
RESERVE_BYTES = 64 << 10
STEP_BYTES = 4096  # what one gap record takes from the reserve: a block
NO_LIMIT = sys.maxsize
STEPS = 64
LOOK_SECONDS = 0.05
FIRST_PAUSE = 1.0
LITTER_SECONDS = 60.0
# Endings of what a process keeps beside its segments: a segment not yet named, the reserve, the bell of its commits.
DRAFT, RESERVE, BELL = ".new", ".reserve", ".ack"


@dataclass(frozen=True, slots=True)
class Keep:
    """How a journal keeps records: at which level, how long a call may wait, how much the spool may hold."""

    durability: str = "process"
    patience: float = 0.0  # seconds a record waits for room before it is lost
    commit_seconds: float = 5.0  # that a call waits for the database at the level `database`
    limit: int = NO_LIMIT
    sync_seconds: float = 0.0  # between flushes in the background; 0: none


def boot_id() -> bytes:
    """Return the 16 bytes that name this boot of the machine, or zeros where the system does not tell."""
    try:
        text = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii")
        return bytes.fromhex(text.strip().replace("-", ""))
    except (OSError, ValueError):
        return bytes(16)


def prepare(folder: Path) -> None:
    """Make the spool, or check that an existing one is safe to write to.

    Raises SpoolRefused: prompts will lie here, so it must be a folder of this user that nobody else can enter.
    """
    try:
        folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        facts = folder.lstat()
    except OSError as error:
        raise SpoolRefused(
            f"the spool {folder} cannot be made: {error.strerror}. Set PROVENANCE_DB or PROVENANCE_SPOOL to a "
            "folder that this user can write to."
        ) from error
    if not stat.S_ISDIR(facts.st_mode):
        raise SpoolRefused(f"the spool {folder} is a link or a file; remove it, or set PROVENANCE_SPOOL to a folder.")
    if facts.st_uid != os.geteuid():
        raise SpoolRefused(f"the spool {folder} belongs to another user; set PROVENANCE_SPOOL to a folder of your own.")
    if facts.st_mode & 0o077:
        raise SpoolRefused(f"the spool {folder} can be entered by others; run: chmod 700 {folder}")
    if not os.access(folder, os.W_OK | os.X_OK):
        raise SpoolRefused(f"the spool {folder} cannot be written to; set PROVENANCE_SPOOL to another folder.")


@contextlib.contextmanager
def elected(folder: Path) -> Iterator[bool]:
    """Try to become the writer of a spool; yields whether it worked."""
    try:
        descriptor = os.open(folder / "writer.lock", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o600)
    except OSError:
        yield False
        return
    try:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
    finally:
        os.close(descriptor)


def default_limit(folder: Path) -> int:
    """Return what a spool may hold where nobody said: a gibibyte, or a twentieth of what is free, if that is less."""
    try:
        facts = os.statvfs(folder)
    except OSError:
        return MOST_BYTES
    return max(LEAST_BYTES, min(MOST_BYTES, facts.f_bavail * facts.f_frsize // 20))


class Room:
    """The room of one journal in its spool, and its reserve: blocks of the disk that are given back when it is full."""

    def __init__(self, folder: Path, stream: str, limit: int) -> None:
        self.folder, self.limit = folder, limit
        self.reserve = folder / f"{stream}{RESERVE}"
        self.left = 0
        self._others = 0
        self._look_at = 0.0
        self._dip_at = 0.0
        self._pause = FIRST_PAUSE

    def ask(self, segment: Path, size: int, needed: int, *, afresh: bool = False) -> int:
        """Return how large a segment may grow before it must ask again. What others hold was counted a moment ago.

        Raises OSError where a record of ``needed`` bytes would fill the spool beyond its limit.
        """
        if self.limit == NO_LIMIT:
            return NO_LIMIT
        now = time.monotonic()
        if afresh or now >= self._look_at:
            self._others, self._look_at = _size(self.folder, segment.name), now + LOOK_SECONDS
        allowed = self.limit - self._others - RESERVE_BYTES
        if size + needed > allowed:
            raise OSError(errno.ENOSPC, f"the spool holds what spool_max allows, {self.limit:,} bytes")
        return min(allowed, size + max(needed, self.limit // STEPS))

    def stock(self) -> None:
        """Set the reserve aside again. Where there is no room for it, there is none."""
        if self.limit == NO_LIMIT or self.left == RESERVE_BYTES:
            return
        flags = os.O_WRONLY | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
        try:
            descriptor = os.open(self.reserve, flags, 0o600)
        except OSError:
            return
        try:
            _allocate(descriptor, RESERVE_BYTES)
            self.left = RESERVE_BYTES
            self._dip_at, self._pause = 0.0, FIRST_PAUSE
        except OSError:
            with contextlib.suppress(OSError):
                os.ftruncate(descriptor, 0)
            self.left = 0
        finally:
            os.close(descriptor)

    def dip(self, last: bool) -> bool:
        """Give a block of the reserve back to the disk, for one gap record. The last block is for the stream's end.

        Ever more rarely while the disk stays full, so that the reserve lasts.
        """
        if last:
            # Without a reserve too: whether there is a block to give or not, the end is the last time to try.
            return self._shrink(0) or self.limit != NO_LIMIT
        now = time.monotonic()
        if now < self._dip_at or self.left <= STEP_BYTES:
            return False
        self._dip_at, self._pause = now + self._pause, 2 * self._pause
        return self._shrink(self.left - STEP_BYTES)

    def _shrink(self, size: int) -> bool:
        if self.left <= size:
            return False
        try:
            os.truncate(self.reserve, size)
        except OSError:
            return False
        self.left = size
        return True

    def drop(self) -> None:
        """Give up the reserve: the stream is over."""
        if self.limit != NO_LIMIT:
            with contextlib.suppress(OSError):
                self.reserve.unlink(missing_ok=True)
        self.left = 0


def _size(folder: Path, but: str) -> int:
    """Return how many bytes all other segments of a spool hold, and what lies beside those that are not drained."""
    total = 0
    try:
        with os.scandir(folder) as entries:
            names = [entry.name for entry in entries if entry.name.endswith(".seg")]
    except OSError:
        return 0
    for name in names:
        path = folder / name
        total += blobs.weight(path)
        if name != but:
            with contextlib.suppress(OSError):  # unlinked meanwhile
                total += path.lstat().st_size
    return total


def _allocate(descriptor: int, size: int) -> None:
    if hasattr(os, "posix_fallocate"):
        os.posix_fallocate(descriptor, 0, size)
    else:
        os.pwrite(descriptor, bytes(size), 0)


def tidy(folder: Path, living: set[str]) -> None:
    """Delete what processes that crashed left beside their segments, once it is old enough not to be somebody's work.

    ``living`` names the streams, in hexadecimal, whose process still appends.
    """
    before = time.time() - LITTER_SECONDS
    try:
        with os.scandir(folder) as entries:
            found = [entry for entry in entries if _is_litter(entry.name, living)]
            for entry in found:
                with contextlib.suppress(OSError):
                    if entry.stat(follow_symlinks=False).st_mtime < before:
                        os.unlink(entry.path)
    except OSError:
        return


def _is_litter(name: str, living: set[str]) -> bool:
    if name.startswith((".target.", ".writer.status.")):
        return True
    return name.endswith((DRAFT, RESERVE, BELL)) and name[:32] not in living
