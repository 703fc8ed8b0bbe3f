"""The levels of durability: what an acknowledged record survives. `process` is the journal itself.

`power` returns when the device has the record: those who wait share one flush. `database` returns when the store has
committed it. `memory` promises nothing: a thread writes later what a ring holds. Notes are never waited for; the record
of the call that follows covers them.
"""

import os
import threading
import time
from collections import deque
from collections.abc import Sequence
from pathlib import Path
from zlib import crc32

from provenance.errors import JournalError, NotYet
from provenance.journal import bells, blobs, frame, records, spool
from provenance.journal.records import Gap
from provenance.journal.room import Keep
from provenance.journal.spool import Journal

HELD_BYTES = 16 << 20  # of unflushed records, kept to be written again should a flush fail
RING_BYTES = 64 << 20
RING_SECONDS = 0.05
HELP_SECONDS = 0.25


def open_journal(folder: Path, about: dict[str, object], keep: Keep) -> Journal:
    """Open the journal of a level. Raises SpoolRefused or OSError."""
    kinds: dict[str, type[Journal]] = {"power": Flushed, "database": Committed, "memory": Ring}
    return kinds.get(keep.durability, Synced)(folder, about, keep)


class Synced(Journal):
    """Level `process`: a thread flushes twice a second what has come, so a power loss costs no more than that."""

    def __init__(self, folder: Path, about: dict[str, object], keep: Keep) -> None:
        super().__init__(folder, about, keep)
        self._over = threading.Event()
        if keep.sync_seconds:
            threading.Thread(target=self._keep_synced, name="provenance-sync", daemon=True).start()

    def _keep_synced(self) -> None:
        while not self._over.wait(self.keep.sync_seconds):
            self.sync()

    def close(self) -> None:
        """End the stream."""
        self._over.set()
        super().close()


class Flushed(Journal):
    """Level `power`: a record of a call is acknowledged when the device has it."""

    def __init__(self, folder: Path, about: dict[str, object], keep: Keep) -> None:
        self._held: deque[tuple[int, int, bytes]] = deque()
        self._held_bytes = 0
        self._dropped = -1  # the last that was too much to hold before it was flushed
        self._doubted = -1  # no flush will ever tell of those up to this one
        self._spoiled, self._why = False, ""
        super().__init__(folder, about, keep)

    def append(self, kind: int, pieces: list[bytes]) -> int:
        """Append one record. Raises JournalError where it was not kept, NotYet where it was and no flush worked."""
        seq = super().append(kind, pieces)
        if kind <= frame.END:
            self._make_durable(seq)
        return seq

    def _write(self, kind: int, seq: int, payload: bytes, crc: int) -> None:
        super()._write(kind, seq, payload, crc)
        held = self._held
        held.append((seq, kind, payload))
        self._held_bytes += len(payload)
        while held and (held[0][0] <= self.durable or self._held_bytes > HELD_BYTES):
            first = held.popleft()
            self._held_bytes -= len(first[2])
            if first[0] > self.durable:
                self._dropped = first[0]

    def _make_durable(self, seq: int) -> None:
        if self.durable < seq:
            with self._flushing:  # whoever waits here shares the next flush
                if self.durable < seq:
                    self._flush()
        if self.durable < seq or seq <= self._doubted:
            raise NotYet(seq, f"record {seq} is written, but the device did not take it: {self._why}")

    def _flush(self) -> None:
        if self._spoiled:
            self._renew()
        else:
            super()._flush()

    def _poisoned(self, upto: int, error: OSError) -> None:  # noqa: ARG002 - all that is written by now is renewed
        self._why, self._spoiled = error.strerror or str(error), True
        self._renew()

    def _renew(self) -> None:
        """Write again, into a new segment, what a failed flush was for: a second flush may claim what was dropped."""
        first = self.durable + 1
        with self._lock:
            upto, before, path = self.next_seq - 1, self.descriptor, self.path
            again = [item for item in self._held if item[0] >= first]
            try:
                self._open(self.index + 1, bytes(32), first)
                blobs.follow(path, self.path)
                os.close(before)
                for seq, kind, payload in again:
                    Journal._write(self, kind, seq, payload, crc32(payload, self.salt_crc))
                spool.fdatasync(self.descriptor)
                self._enter()
            except (OSError, JournalError) as error:
                self._why = str(getattr(error, "strerror", None) or error)
                return  # the next who waits tries again
            self._spoiled, self.durable = False, upto
            if self._dropped >= first:
                self._doubted = self._dropped
                self.gaps.append(Gap(first, self._dropped, f"flush failed: {self._why}", uncertain=True))


class Committed(Journal):
    """Level `database`: a record of a call is acknowledged when the store has committed it, through the writer."""

    def __init__(self, folder: Path, about: dict[str, object], keep: Keep) -> None:
        super().__init__(folder, about, keep)
        self.committed = -1
        self._turn = threading.Lock()
        self._path = bells.ack_path(folder, self.stream.stream_id)
        self._ear = bells.ear(self._path)
        os.close(bells.ear(folder / bells.WAKE))

    def append(self, kind: int, pieces: list[bytes]) -> int:
        """Append one record. Raises JournalError where it was not kept, NotYet where the store took too long."""
        seq = super().append(kind, pieces)
        if kind <= frame.END:
            self._await(seq, time.monotonic() + self.keep.commit_seconds)
        return seq

    def _await(self, seq: int, limit: float) -> None:
        """Wait for a commit. One thread listens, and what it hears counts for all that wait."""
        bells.wake(self.folder)
        while self.committed < seq:
            left = limit - time.monotonic()
            if left <= 0 or not self._turn.acquire(timeout=left):
                waited = f"after {self.keep.commit_seconds:g} s"
                raise NotYet(seq, f"record {seq} is in the spool and not in the database {waited}")
            try:
                if self.committed < seq:
                    self._listen(min(left, HELP_SECONDS))
            finally:
                self._turn.release()

    def _listen(self, seconds: float) -> None:
        heard = bells.listen(self._ear, seconds)
        if heard:
            self.committed = max(self.committed, *(number for (number,) in bells.NUMBER.iter_unpack(heard)))
        else:
            self.help()  # is there a writer?
            bells.wake(self.folder)

    def close(self) -> None:
        """End the stream."""
        super().close()
        self._path.unlink(missing_ok=True)
        self._deaf()

    def forget(self) -> None:
        """Let go of a parent's segment and of its bell in a forked child."""
        super().forget()
        self._deaf()

    def _deaf(self) -> None:
        if self._ear >= 0:
            os.close(self._ear)
        self._ear = -1


class Ring(Journal):
    """Level `memory`: a record is put into a ring, and a thread writes it. A process that is killed loses the ring."""

    def __init__(self, folder: Path, about: dict[str, object], keep: Keep) -> None:
        self._ring: deque[tuple[int, int, bytes]] = deque()
        self._ring_bytes = 0
        self._gate = threading.Lock()  # over numbers, gaps and ring; the other lock is over the file
        super().__init__(folder, about, keep)
        self._work, self._over = threading.Event(), False
        threading.Thread(target=self._drain_ring, name="provenance-ring", daemon=True).start()

    def append(self, kind: int, pieces: list[bytes]) -> int:
        """Put one record into the ring. Raises JournalError where it is full."""
        payload = b"".join(pieces)
        limit = 0.0
        while True:
            with self._gate:
                if self._ring_bytes + len(payload) <= RING_BYTES and self.descriptor >= 0:
                    self._number_gaps()
                    seq = self.next_seq
                    self._put(kind, payload)
                    break
                limit = limit or time.monotonic() + self.keep.patience
                if time.monotonic() >= limit or self.descriptor < 0:
                    seq, self.next_seq = self.next_seq, self.next_seq + 1
                    error = JournalError(f"record {seq} was not kept: the ring in memory is full")
                    self._lose(seq, error)
                    raise error
            time.sleep(RING_SECONDS)
        if not self._work.is_set():
            self._work.set()
        return seq

    def append_beside(self, kind: int, pieces: list[bytes], drafts: Sequence[blobs.Draft]) -> int:
        """Append one record with blobs, and the ring before it: the blobs lie beside the segment that is open now."""
        with self._rotation:
            blobs.settle(self.path, drafts)
            seq = self.append(kind, pieces)
            self._write_ring()
            return seq

    def _put(self, kind: int, payload: bytes) -> None:
        self._ring.append((self.next_seq, kind, payload))
        self._ring_bytes += len(payload)
        self.next_seq += 1

    def _number_gaps(self) -> None:
        """Put gap records into the ring: numbers rise in a segment, so theirs must be in turn."""
        for gap in self.gaps:
            self._put(frame.GAP, b"".join(records.note_payload("gap", bytes(32), gap.document())))
        self.gaps.clear()

    def _unwritten(self) -> int:
        with self._gate:
            return self._ring[0][0] if self._ring else self.next_seq

    def _drain_ring(self) -> None:
        while not self._over:
            self._work.wait()
            self._work.clear()
            self._write_ring()
            time.sleep(RING_SECONDS)  # gather: a thread that wakes for every record would cost the caller its turn

    def _write_ring(self) -> None:
        while self._ring:
            with self._lock:
                if self.descriptor < 0 or not self._ring:
                    return
                seq, kind, payload = self._ring[0]
                failed: JournalError | None = None
                try:
                    self._write(kind, seq, payload, crc32(payload, self.salt_crc))
                except JournalError as error:
                    failed = error
                with self._gate:
                    self._ring.popleft()
                    self._ring_bytes -= len(payload)
                    if failed is not None:
                        self._lose(seq, failed)
            if failed is not None:
                self.help()

    def close(self) -> None:
        """End the stream, with what the ring still holds."""
        self._over = True
        self._work.set()
        self._write_ring()
        super().close()
