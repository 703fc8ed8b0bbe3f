"""The folder of segments, and the one segment that this process appends to.

An appended record is acknowledged: one `write` has handed it to the kernel, so it survives the death of the
process by any signal. Nothing waits in memory; `levels` holds those who promise more or less. A record that could
not be written leaves a hole in ``seq`` and, as soon as writing is possible again, a gap record that names the hole;
while a disk stays full, room is made for it from a reserve.

Segments are never rewritten. Whoever appends holds a lock on the file, so that anybody can tell a live stream
from a dead one. A plain `write` and not a mapped file, because a full disk answers a write with an error and a
mapped page with a signal that kills the observed process (docs/decisions/0002-write-not-mmap.md).
"""

import contextlib
import errno
import fcntl
import hashlib
import os
import secrets
import threading
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from threading import get_ident
from zlib import crc32

import orjson

from provenance.errors import JournalError
from provenance.facts import Stream
from provenance.journal import blobs, frame, records
from provenance.journal.records import Gap
from provenance.journal.room import DRAFT, NO_LIMIT, Keep, Room, boot_id, prepare

SUFFIX = ".seg"
SEGMENT_BYTES = 64 << 20
SEGMENT_SECONDS = 600.0
# Bound once: this is the path that every call waits for.
pack_head, pack_check, pack_tail = frame.HEAD.pack, frame.CHECK.pack, frame.TAIL.pack
write = os.write  # a join and a write of 4 kB take half a microsecond less than a writev of three
fdatasync = getattr(os, "fdatasync", os.fsync)
GAP_BYTES = 1024  # a gap record takes less
WAIT_SECONDS = 0.02
_FLAGS = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW


def segments(folder: Path) -> list[Path]:
    """List the segments in a spool, each stream's in order. A folder closed to this user holds none."""
    return listed(folder, (SUFFIX,))


def listed(folder: Path, suffixes: tuple[str, ...]) -> list[Path]:
    """List the files of a spool whose names end so, each stream's in order."""
    try:
        with os.scandir(folder) as entries:
            names = [e.name for e in entries if e.name.endswith(suffixes) and e.is_file(follow_symlinks=False)]
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


class Journal:
    """The appending end of one stream. Safe for threads; a forked child must open its own."""

    def __init__(self, folder: Path, about: dict[str, object], keep: Keep = Keep()) -> None:  # noqa: B008 - it is frozen
        """Open the first segment of a new stream.

        Raises SpoolRefused or OSError: at the start, errors are loud.
        """
        prepare(folder)
        self.folder, self.keep = folder, keep
        self.stream = Stream(
            secrets.token_bytes(16), boot_id(), os.getpid(), time.time_ns(), time.monotonic_ns(), orjson.dumps(about)
        )
        self.next_seq = 0
        self.durable = -1  # all records up to this one were flushed to the device
        self.gaps: list[Gap] = []
        self.lost = 0
        self.help: Callable[[], None] = _nothing  # called where there is no room: a rotation or a writer may make some
        self.room = Room(folder, self.stream.stream_id.hex(), keep.limit)
        self.full = False
        self._lock = threading.Lock()
        self._flushing = threading.Lock()  # taken before the other one
        self._holder = 0
        self._rotation = threading.Lock()  # taken before both
        self._open(0, bytes(32), 0)
        self.room.stock()

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
                    self._report_gaps(len(payload))
                if self.salt_crc != salt_crc:  # another segment meanwhile
                    crc = crc32(payload, self.salt_crc)
                seq = self.next_seq
                self.next_seq = seq + 1
                self._write(kind, seq, payload, crc)
                return seq
            except JournalError as error:
                failed = error
                if self.keep.patience:
                    self.next_seq = seq  # nobody has seen this number
                else:
                    self._lose(seq, error)
            finally:
                self._holder = 0
        self.help()
        if self.keep.patience:
            return self._wait_for_room(kind, payload)
        raise failed

    def draft(self, data: bytes) -> blobs.Draft:
        """Write a large payload into the spool, for a record that refers to it. Raises OSError without room."""
        self.room.ask(self.path, self.size, len(data), afresh=True)
        return blobs.draft(self.folder, data, sync=self.keep.durability == "power")

    def append_beside(self, kind: int, pieces: list[bytes], drafts: Sequence[blobs.Draft]) -> int:
        """Append one record whose large payloads are blobs: they come to lie beside the segment that its frame is in.

        Raises what `append` raises, or OSError.
        """
        with self._rotation:
            blobs.settle(self.path, drafts, sync=self.keep.durability == "power")
            return self.append(kind, pieces)

    def _write(self, kind: int, seq: int, payload: bytes, crc: int) -> None:
        """Hand one frame to the kernel in one call; what it does not take whole is cut off again."""
        length, written = len(payload), 0
        checksum = crc32(pack_check(seq, kind, 0, length), crc)
        head = pack_head(self.marker, length, seq, kind, 0, checksum)
        try:
            if self.size + length > self.most and kind != frame.GAP:
                self._ask(length)
            written = write(self.descriptor, b"".join((head, payload, pack_tail(length))))
            if written != length + frame.OVERHEAD:
                raise OSError(errno.ENOSPC, "No space left on device")
        except OSError as error:
            self._cut(written)
            raise JournalError(f"record {seq} was not kept: {error.strerror}") from error
        self.size += written

    def _ask(self, length: int) -> None:
        """See whether the spool has room for a record. Raises OSError where it has none."""
        try:
            self.most = self.room.ask(self.path, self.size, length + frame.OVERHEAD)
        except OSError:
            self.full = True
            raise
        self.full = False
        if self.old:
            self.help()

    def _wait_for_room(self, kind: int, payload: bytes) -> int:
        """Try again for as long as a call may wait; then the record is lost."""
        limit = time.monotonic() + self.keep.patience
        while True:
            time.sleep(WAIT_SECONDS)
            with self._lock:
                self._holder = get_ident()
                seq = self.next_seq
                try:
                    if self.gaps:
                        self._report_gaps(len(payload))
                    seq = self.next_seq
                    self._write(kind, seq, payload, crc32(payload, self.salt_crc))
                    self.next_seq = seq + 1
                    return seq
                except JournalError as error:
                    if time.monotonic() >= limit:
                        self.next_seq = seq + 1
                        self._lose(seq, error)
                        raise
                finally:
                    self._holder = 0
            self.help()

    def _cut(self, written: int) -> None:
        """Cut off what a short write left behind."""
        if not written:
            return
        try:
            # From the end of the file: a size of ours may lag behind it, and whole records must not be cut.
            os.ftruncate(self.descriptor, os.fstat(self.descriptor).st_size - written)
        except OSError:
            return  # a reader skips the torn frame by its checksum

    def _lose(self, seq: int, error: JournalError) -> None:
        """Remember the hole that a record left."""
        self.lost += 1
        if self.gaps and self.gaps[-1].last == seq - 1 and not self.gaps[-1].uncertain:
            self.gaps[-1].last = seq
        else:
            self.gaps.append(Gap(seq, seq, _reason(error)))

    def _report_gaps(self, needed: int = 0, last: bool = False) -> None:
        """Write the gap records where there is room for them and a record; else from the reserve, now and then."""
        while self.gaps:
            roomy = self._fits(needed + GAP_BYTES * len(self.gaps))
            if not roomy and not self.room.dip(last):
                return
            free = roomy and self._write_gap()
            if not free and not ((not roomy or self.room.dip(last)) and self._write_gap()):
                return  # its number goes to the record that follows
            if free and not self.gaps:
                self.room.stock()

    def _fits(self, length: int) -> bool:
        if self.size + length > self.most:
            try:
                self._ask(length)
            except OSError:
                return False
        return True

    def _write_gap(self) -> bool:
        payload = b"".join(records.note_payload("gap", bytes(32), self.gaps[0].document()))
        try:
            self._write(frame.GAP, self.next_seq, payload, crc32(payload, self.salt_crc))
        except JournalError:
            return False
        self.next_seq += 1
        self.gaps.pop(0)
        return True

    # -- flushing ---------------------------------------------------------------------------------

    def sync(self) -> None:
        """Flush what was written to the device. Whoever comes while somebody flushes shares the next flush."""
        with self._flushing:
            self._flush()

    def _flush(self) -> None:
        with self._lock:  # nobody is within a write
            upto = self._unwritten() - 1
        if upto <= self.durable or self.descriptor < 0:
            return
        try:
            fdatasync(self.descriptor)
            if not self.entered:
                self._enter()
        except OSError as error:
            self._poisoned(upto, error)
        else:
            self.durable = upto

    def _unwritten(self) -> int:
        """Return the first number that was not handed to the kernel yet."""
        return self.next_seq

    def _enter(self) -> None:
        """Flush the names of the segment and of a spool that may be new: a file can outlive its name."""
        blobs.flush_names(*(self.folder, self.folder.parent) if self.index == 0 else (self.folder,))
        self.entered = True

    def _poisoned(self, upto: int, error: OSError) -> None:
        """Leave a segment whose flush failed: a second one may claim success for pages that were dropped."""
        with self._lock:
            self.gaps.append(Gap(self.durable + 1, upto, f"flush failed: {error.strerror}", uncertain=True))
            self.durable = upto
            before, path = self.descriptor, self.path
            with contextlib.suppress(OSError):
                self._open(self.index + 1, bytes(32), self._unwritten())
                blobs.follow(path, self.path)  # a record that refers to them may be on its way
                os.close(before)

    # -- segments ---------------------------------------------------------------------------------

    @property
    def old(self) -> bool:
        """Say whether the segment is due for rotation. A full spool gets room by it, once all is in the store."""
        if self.size > min(SEGMENT_BYTES, self.keep.limit // 8) or (self.full and self.size > self.begin):
            return True
        return time.monotonic() - self.opened > SEGMENT_SECONDS

    def rotate(self) -> None:
        """Seal the segment and open the next, whose header holds the digest of the sealed one.

        Meant for a background thread: the long part of the digest is computed before the lock is taken.
        """
        state = hashlib.sha256()
        with self._rotation, self._flushing, self.path.open("rb") as file:
            if self.keep.sync_seconds or self.durable >= 0:
                self._flush()
            # Not beyond our own size: behind it a short write may lie that is about to be cut off.
            while data := file.read(min(1 << 20, self.size - file.tell())):
                state.update(data)
            with self._lock:
                while data := file.read(1 << 20):
                    state.update(data)
                before, sealed = self.descriptor, self._unwritten()
                self._open(self.index + 1, state.digest(), sealed)
            self._let_go(before, sealed)

    def _let_go(self, before: int, sealed: int) -> None:
        """Close a sealed segment, after a last flush of what was written since the one before."""
        try:
            if 0 <= self.durable < sealed - 1:
                fdatasync(before)
                self.durable = sealed - 1
        except OSError as error:
            self._poisoned(sealed - 1, error)
        finally:
            os.close(before)

    def _open(self, index: int, previous: bytes, first_seq: int) -> None:
        salt = secrets.token_bytes(16)
        path = segment_path(self.folder, self.stream.stream_id, index)
        draft = path.with_suffix(DRAFT)  # whoever drains must never see a segment without its lock and its header
        header = frame.write_header(frame.Header(self.stream, salt, index, first_seq, previous))
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
        self.begin, self.entered, self.opened = len(header), False, time.monotonic()
        self.most = NO_LIMIT if self.keep.limit == NO_LIMIT else 0  # asks at its first record
        self.marker, self.salt_crc = frame.marker(salt), frame.salt_crc(salt)

    def close(self) -> None:
        """Close the segment: the stream is over and says so by its free lock."""
        with self._flushing:
            if self.descriptor < 0:
                return
            with self._lock:
                self._report_gaps(last=True)
            if self.keep.sync_seconds or self.durable >= 0:
                self._flush()
            with self._lock:
                os.close(self.descriptor)
                self.descriptor = -1
            self.room.drop()

    def forget(self) -> None:
        """Let go of a parent's segment in a forked child, without a word to the parent's stream."""
        try:
            os.close(self.descriptor)
        except OSError:
            return
        finally:
            self.descriptor = -1


def _nothing() -> None:
    return None


def _reason(error: JournalError) -> str:
    cause = error.__cause__
    return str(getattr(cause, "strerror", None) or cause or error)
