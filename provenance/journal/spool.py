"""The folder of segments, and the one segment that this process appends to.

An appended record is acknowledged: one `write` has handed it to the kernel, so it survives the death of the
process by any signal. Nothing waits in memory. A record that could not be written leaves a hole in ``seq`` and,
as soon as writing is possible again, a gap record that names the hole.

Segments are never rewritten. Whoever appends holds a lock on the file, so that anybody can tell a live stream
from a dead one. A plain `write` and not a mapped file, because a full disk answers a write with an error and a
mapped page with a signal that kills the observed process (docs/decisions/0002-write-not-mmap.md).
"""

import fcntl
import hashlib
import os
import secrets
import stat
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from threading import get_ident
from zlib import crc32

import orjson

from provenance.errors import JournalError, SpoolRefused
from provenance.facts import Stream
from provenance.journal import blobs, frame, records

SUFFIX = ".seg"
SEGMENT_BYTES = 64 << 20
SEGMENT_SECONDS = 600.0
# Bound once: this is the path that every call waits for.
pack_head, pack_check, pack_tail = frame.HEAD.pack, frame.CHECK.pack, frame.TAIL.pack
write = os.write  # a join and a write of 4 kB take half a microsecond less than a writev of three
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW


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


def segments(folder: Path) -> list[Path]:
    """List the segments in a spool, each stream's in order. A folder closed to this user holds none."""
    try:
        with os.scandir(folder) as entries:
            names = [e.name for e in entries if e.name.endswith(SUFFIX) and e.is_file(follow_symlinks=False)]
    except (FileNotFoundError, PermissionError):
        return []
    return [folder / name for name in sorted(names)]


def segment_path(folder: Path, stream: bytes, index: int) -> Path:
    """Return where a segment of a stream lies."""
    return folder / f"{stream.hex()}-{index:06d}{SUFFIX}"


def stream_of(path: Path) -> str:
    """Return the stream of a segment in hexadecimal, as its name says."""
    return path.name.partition("-")[0]


def alive(path: Path) -> bool:
    """Say whether a process still appends to this segment."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(descriptor, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(descriptor)
    return False


@contextmanager
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


@dataclass(slots=True)
class Gap:
    """Records that could not be written: which, how many, and why first."""

    first: int
    last: int
    reason: str


class Journal:
    """The appending end of one stream. Safe for threads; a forked child must open its own."""

    def __init__(self, folder: Path, about: dict[str, object]) -> None:
        """Open the first segment of a new stream.

        Raises SpoolRefused or OSError: at the start, errors are loud.
        """
        prepare(folder)
        self.folder = folder
        self.stream = Stream(
            secrets.token_bytes(16), boot_id(), os.getpid(), time.time_ns(), time.monotonic_ns(), orjson.dumps(about)
        )
        self.next_seq = 0
        self.gaps: list[Gap] = []
        self.lost = 0
        self._lock = threading.Lock()
        self._holder = 0
        self._rotation = threading.Lock()
        self._open(0, bytes(32))

    # -- appending --------------------------------------------------------------------------------

    def append(self, kind: int, pieces: list[bytes]) -> int:
        """Append one record and return its seq. When this returns, the kernel has it.

        Raises JournalError where it could not be kept; the hole is remembered and reported.
        """
        payload = b"".join(pieces)
        salt_crc = self.salt_crc
        crc = crc32(payload, salt_crc)  # the long part, before the lock
        mine = get_ident()
        if self._holder == mine:
            self.lost += 1  # a signal handler that infers, inside our own write: to wait would be for ever
            raise JournalError("a record inside another record's write was dropped")
        with self._lock:
            self._holder = mine
            try:
                if self.gaps:
                    self._report_gaps()
                if self.salt_crc != salt_crc:  # another segment meanwhile
                    crc = crc32(payload, self.salt_crc)
                seq = self.next_seq
                self.next_seq = seq + 1
                self._write(kind, seq, payload, crc)
                return seq
            except JournalError as error:
                self._lose(seq, error)
                raise
            finally:
                self._holder = 0

    def append_beside(self, kind: int, pieces: list[bytes], drafts: Sequence[blobs.Draft]) -> int:
        """Append one record whose large payloads are blobs: they come to lie beside the segment that its frame is in.

        Raises what `append` raises, or OSError.
        """
        with self._rotation:
            blobs.settle(self.path, drafts)
            return self.append(kind, pieces)

    def _write(self, kind: int, seq: int, payload: bytes, crc: int) -> None:
        """Hand one frame to the kernel in one call; what it does not take whole is cut off again."""
        length, written = len(payload), 0
        checksum = crc32(pack_check(seq, kind, 0, length), crc)
        head = pack_head(self.marker, length, seq, kind, 0, checksum)
        try:
            written = write(self.descriptor, b"".join((head, payload, pack_tail(length))))
            if written != length + frame.OVERHEAD:
                raise OSError(28, "No space left on device")
        except OSError as error:
            self._cut(written)
            raise JournalError(f"record {seq} was not kept: {error.strerror}") from error
        self.size += written

    def _cut(self, written: int) -> None:
        """Cut off what a short write left behind."""
        try:
            # From the end of the file: a size of ours may lag behind it, and whole records must not be cut.
            os.ftruncate(self.descriptor, os.fstat(self.descriptor).st_size - written)
        except OSError:
            return  # a reader skips the torn frame by its checksum

    def _lose(self, seq: int, error: JournalError) -> None:
        """Remember the hole that a record left."""
        self.lost += 1
        if self.gaps and self.gaps[-1].last == seq - 1:
            self.gaps[-1].last = seq
        else:
            self.gaps.append(Gap(seq, seq, str(error.__cause__)))

    def _report_gaps(self) -> None:
        """Write the gap records, if writing is possible again; else leave them for the next record."""
        while self.gaps:
            gap = self.gaps[0]
            document = orjson.dumps({"first": gap.first, "last": gap.last, "reason": gap.reason})
            payload = b"".join(records.note_payload("gap", bytes(32), document))
            try:
                self._write(frame.GAP, self.next_seq, payload, crc32(payload, self.salt_crc))
            except JournalError:
                return  # its number goes to the record that follows
            self.next_seq += 1
            self.gaps.pop(0)

    # -- segments ---------------------------------------------------------------------------------

    @property
    def old(self) -> bool:
        """Say whether the segment is due for rotation."""
        return self.size > SEGMENT_BYTES or time.monotonic() - self.opened > SEGMENT_SECONDS

    def rotate(self) -> None:
        """Seal the segment and open the next, whose header holds the digest of the sealed one.

        Meant for a background thread: the long part of the digest is computed before the lock is taken.
        """
        state = hashlib.sha256()
        with self._rotation, self.path.open("rb") as file:
            # Not beyond our own size: behind it a short write may lie that is about to be cut off.
            while data := file.read(min(1 << 20, self.size - file.tell())):
                state.update(data)
            with self._lock:
                while data := file.read(1 << 20):
                    state.update(data)
                before = self.descriptor
                self._open(self.index + 1, state.digest())
                os.close(before)

    def _open(self, index: int, previous: bytes) -> None:
        salt = secrets.token_bytes(16)
        path = segment_path(self.folder, self.stream.stream_id, index)
        draft = path.with_suffix(".new")  # whoever drains must never see a segment without its lock and its header
        header = frame.write_header(frame.Header(self.stream, salt, index, self.next_seq, previous))
        descriptor = os.open(draft, _FLAGS, 0o600)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
            if os.write(descriptor, header) != len(header):
                raise OSError(28, "No space left on device")
            draft.rename(path)
        except OSError:
            os.close(descriptor)
            draft.unlink(missing_ok=True)
            raise
        self.index, self.path, self.descriptor, self.size = index, path, descriptor, len(header)
        self.opened = time.monotonic()
        self.marker, self.salt_crc = frame.marker(salt), frame.salt_crc(salt)

    def close(self) -> None:
        """Close the segment: the stream is over and says so by its free lock."""
        with self._lock:
            if self.descriptor >= 0:
                self._report_gaps()
                os.close(self.descriptor)
                self.descriptor = -1

    def forget(self) -> None:
        """Let go of a parent's segment in a forked child, without a word to the parent's stream."""
        try:
            os.close(self.descriptor)
        except OSError:
            return
        finally:
            self.descriptor = -1
