"""A finished call in, one journal record out. The recorder never raises into a call and counts what it could not keep.

There is one recorder a process, opened by the first call or by `configure`. A forked child opens its own
stream. The writer that moves the journal into the database is started from a thread of ours, so the caller
waits for one `writev` and nothing else.
"""

import atexit
import contextlib
import logging
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from typing import Any

from provenance import privacy
from provenance.errors import NotRecorded, NotYet, ProvenanceError
from provenance.facts import LARGE, Fingerprint, Output, Payload, Request
from provenance.fingerprint.environment import READING, Environment
from provenance.integrity import keys
from provenance.journal import blobs, child, frame, records
from provenance.journal.levels import open_journal
from provenance.opening import about, keeping, launch_writer
from provenance.settings import Places, Settings, homeless, load, places

log = logging.getLogger("provenance")
WRITER_CHECK_SECONDS = 1.0
LOOK_SECONDS = 20.0
HELP_SECONDS = 0.05
EXIT_SECONDS = 1.0
FORK_SECONDS = 3.0
START = "the start of a call"
SEEDS = 128


class Recorder:
    """The appending end of this process: settings, one journal, and what is already written in it."""

    def __init__(self, settings: Settings, parent: Environment | None = None) -> None:
        """Open the journal. ``parent`` is what a forked child inherits.

        Raises ProvenanceError or OSError; `current` turns that into one warning.
        """
        self.settings = settings
        self.places: Places = places(settings)
        self.key = keys.need(self.places.key_file)
        self.strict = settings.on_failure == "raise"
        self.journal = open_journal(self.places.spool, about(settings, self.key), keeping(settings, self.places.spool))
        self.journal.help = self._help
        self.environment = Environment(parent)
        self.errors = 0
        self.records = 0
        self.late = 0  # kept, and not at the level asked for
        self.call_index = 0
        self.closing = threading.Event()
        self.jobs: list[threading.Thread] = []
        self._written: dict[bytes, int] = {}
        self._seeds: list[bytes] = []
        self._cut = settings.capture != privacy.FULL
        self._writer: subprocess.Popen[bytes] | None = None
        self._watch = child.Watch(self.places.spool)
        self._tending = threading.Lock()
        self._next_check = self._next_help = 0.0
        self._next_look = 0.0
        if settings.durability == "database":
            self._help()  # the first call waits for the writer: let it begin

    # -- records ----------------------------------------------------------------------------------

    def start(self, request: Request) -> int:
        """Write a start record; return its seq. Raises JournalError where it could not be kept."""
        seed = self._seeds.pop() if self._seeds else self._draw()
        if self._cut:
            request = request._replace(payloads=privacy.cut(request.payloads, self.settings.capture, seed, self.key))
        try:
            seq = self._append(frame.START, records.start_payload, seed, request)
        except NotYet as error:
            if self.strict:
                raise
            seq = self._late(error)
        self.records += 1
        return seq

    def end(self, output: Output) -> int:
        """Write an end record; return its seq. Raises JournalError where it could not be kept."""
        seed = self._seeds.pop() if self._seeds else self._draw()
        if self._cut:
            output = output._replace(payloads=privacy.cut(output.payloads, self.settings.capture, seed, self.key))
        try:
            seq = self._append(frame.END, records.end_payload, seed, output)
        except NotYet as error:
            seq = self._late(error)
        self.records += 1
        if time.monotonic() >= self._next_check:
            self._look_after()
        return seq

    def _append(self, kind: int, made: Callable[[bytes, Any], list[bytes]], seed: bytes, item: Any) -> int:
        """Append a record; what is too large for a frame goes beside the journal."""
        try:
            return self.journal.append(kind, made(seed, item))
        except records.TooLarge:
            payloads, drafts = self._aside(item.payloads, seed)
            return self.journal.append_beside(kind, made(seed, item._replace(payloads=payloads)), drafts)

    def _aside(self, payloads: tuple[Payload, ...], seed: bytes) -> tuple[tuple[Payload, ...], list[blobs.Draft]]:
        """Put large payloads beside the journal; of one beyond ``max_payload``, or the disk, keep the digests."""
        made, drafts = [], []
        for item in payloads:
            if len(item.data) > self.settings.max_payload << 20:
                item = privacy.truncate(item, seed, self.key)  # noqa: PLW2901
            elif len(item.data) > LARGE:
                try:
                    drafts.append(self.journal.draft(item.data))
                    item = blobs.refer(item, drafts[-1].digest)  # noqa: PLW2901
                except OSError as error:
                    self.failed("a large payload", error)
                    item = privacy.truncate(item, seed, self.key)  # noqa: PLW2901
            made.append(item)
        return tuple(made), drafts

    def _draw(self) -> bytes:
        """Return 32 random bytes for the salts of one frame, and draw those of the next from the system too."""
        pool = os.urandom(32 * SEEDS)
        self._seeds.extend(pool[place : place + 32] for place in range(32, 32 * SEEDS, 32))
        return pool[:32]

    def fingerprint(self, print_: Fingerprint) -> bytes:
        """Make sure that a fingerprint stands in the open segment, and return its raw digest."""
        digest, segment = print_.raw, self.journal.index
        if self._written.get(digest) != segment:
            self.note(print_.scope, digest, print_.document)
            self._written[digest] = segment
        return digest

    def note(self, kind: str, digest: bytes, document: bytes) -> int:
        """Write a fingerprint, a manifest, a binding or another note."""
        return self.journal.append(records.frame_kind(kind), records.note_payload(kind, digest, document))

    def serial(self) -> int:
        """Return the number of this call in this process, from 1: the first after a start is a class of its own."""
        self.call_index += 1
        return self.call_index

    def _late(self, error: NotYet) -> int:
        self.late += 1
        if self.late == 1:
            log.warning("provenance: %s; calls run on", error)
        return error.seq

    def failed(self, where: str, error: BaseException) -> None:
        """Count a failure of our own; tell of the first."""
        self.errors += 1
        if self.errors == 1:
            log.warning("provenance could not record %s: %s: %s; calls run on", where, type(error).__name__, error)

    # -- background -------------------------------------------------------------------------------

    def _look_after(self) -> None:
        """Once a second, see whether there is work for another thread, and only then start one."""
        self._next_check = time.monotonic() + WRITER_CHECK_SECONDS
        due = time.monotonic() >= self._next_look
        if due or self.journal.old or not self._writer_runs():
            self._help()

    def _help(self) -> None:
        """Start a thread that looks after journal and writer, unless one does. A journal without room asks for it."""
        now = time.monotonic()
        if self._tending.locked() or now < self._next_help:
            return
        self._next_help = now + HELP_SECONDS
        try:
            threading.Thread(target=self._tend, name="provenance-tend", daemon=True).start()
        except RuntimeError as error:  # no threads any more: the interpreter is ending
            self.failed("the state of its journal", error)

    def _writer_runs(self) -> bool:
        """Say whether there is nothing to start: a writer runs, or is none of our business, or failed a moment ago."""
        if self.settings.writer == "off" or self._watch.resting:
            return True
        if self.settings.writer == "thread":
            return any(job.name == "provenance-writer" and job.is_alive() for job in self.jobs)
        return self._writer is not None and self._writer.poll() is None

    def spawn(self, work: Callable[[], None], name: str) -> None:
        """Run background work in a thread that `close` waits for, a second at most."""
        thread = threading.Thread(target=work, name=f"provenance-{name}", daemon=True)
        self.jobs = [job for job in self.jobs if job.is_alive()]
        self.jobs.append(thread)
        thread.start()

    def _tend(self) -> None:
        """Rotate a full segment, see that somebody drains the spool, and say it if nobody can."""
        if not self._tending.acquire(blocking=False):
            return
        try:
            if time.monotonic() >= self._next_look:
                self._next_look = time.monotonic() + LOOK_SECONDS
                self.environment.look_again()
                self._watch.say(child.complaint(self.places.spool))
            if self.journal.old:
                self.journal.rotate()
            started = self.ensure_writer()
        except Exception as error:
            started = None
            self.failed("the state of its journal", error)
        finally:
            self._tending.release()
        if started is not None:
            self._watch.over(started, self.closing)

    def ensure_writer(self) -> "subprocess.Popen[bytes] | None":
        """Start the writer, unless it runs or somebody else was asked to write. Returns the process, if any."""
        if self._writer_runs():
            return None
        if self.settings.writer == "thread" or not sys.executable:
            self.spawn(self._write_here, "writer")
            return None
        self._writer = launch_writer(self.places)
        return self._writer

    def _write_here(self) -> None:
        try:
            with READING:  # until it is imported: a fork meanwhile would inherit the locks of the import
                from provenance import writer
            writer.run(self.places, idle=5.0, stop=self.closing.is_set)
        except Exception as error:
            self._watch.failed(str(error))

    def flush(self, seconds: float = 30.0) -> bool:
        """Wait until background hashing is done and the database holds what was recorded.

        Returns False where that took longer than ``seconds``, or the database cannot be written to: that is said once.
        """
        from provenance import writer

        limit = time.monotonic() + seconds
        for job in list(self.jobs):
            if job.name != "provenance-writer":
                job.join(max(0.0, limit - time.monotonic()))
        try:
            return writer.drain(self.places, max(0.1, limit - time.monotonic()))
        except Exception as error:  # the program that is recorded goes on
            self._watch.say(child.said(error))
            return False

    def close(self) -> None:
        """End the stream: stop background work, free the lock, leave the writer running until all is drained."""
        self.closing.set()
        limit = time.monotonic() + EXIT_SECONDS
        for job in list(self.jobs):
            job.join(max(0.0, limit - time.monotonic()))
        self.journal.close()
        if self.records and self.settings.writer == "process":
            try:
                self.ensure_writer()
            except OSError as error:
                self.failed("its end", error)


# -- the one of this process ------------------------------------------------------------------------

_lock = threading.RLock()
_state: dict[str, Any] = {"recorder": None, "settings": None, "parent": None, "refused": "", "strict": False}


def configure(**arguments: object) -> Recorder | None:
    """Choose settings and open the journal. The same settings again change nothing.

    Raises BadSetting for a value that cannot be used. Where the spool cannot be written to there is one
    warning, and calls run on.
    """
    with _lock:
        settings = load(arguments)
        recorder: Recorder | None = _state["recorder"]
        if recorder is not None and recorder.settings != settings:
            recorder.close()
            recorder = _state["recorder"] = None
        if recorder is None:
            _state["settings"], _state["refused"] = settings, ""
            recorder = current()
        return recorder


def current() -> Recorder | None:
    """Return this process's recorder, opening it if need be; None where recording is off or cannot be.

    Raises NotRecorded where it cannot be and no call may run unrecorded.
    """
    recorder: Recorder | None = _state["recorder"]
    if recorder is not None:
        return recorder
    if _state["refused"]:
        _unrecorded()
        return None
    with _lock:
        if _state["recorder"] is None and not _state["refused"]:
            _open()
        opened: Recorder | None = _state["recorder"]
    if opened is None:
        _unrecorded()
    return opened


def _unrecorded() -> None:
    if _state["strict"]:
        raise NotRecorded(_state["refused"])


def _open() -> None:
    _state["strict"] = False
    try:
        settings = _state["settings"] or load()
        if settings.disabled:
            _state["refused"] = "disabled"
            return
        if sys.platform == "win32":
            raise ProvenanceError("capture does not work on Windows yet; reading, diff, import and sql do")
        _state["strict"] = settings.on_failure == "raise"
        if homeless():
            log.warning("HOME is %s, which is no folder: provenance uses the home of this account", os.environ["HOME"])
        _state["recorder"] = Recorder(settings, _state["parent"])
    except Exception as error:  # never into the call: say it once
        _state["refused"] = str(error)
        log.warning("provenance records nothing in this process: %s", error)


def refused() -> str:
    """Return why nothing is recorded, or an empty text."""
    return str(_state["refused"])


class Harmless:
    """A block of our own work inside the user's call: what goes wrong in it is counted and goes no further.

    >>> with Harmless("an example"):
    ...     raise LookupError
    """

    __slots__ = ("where",)

    def __init__(self, where: str) -> None:
        self.where = where

    def __enter__(self) -> None:
        return None

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> bool:
        if not isinstance(error, Exception):  # nothing, or an interrupt that is the user's
            return False
        if _state["strict"] and self.where == START:
            raise error if isinstance(error, NotRecorded) else NotRecorded(str(error)) from error
        recorder: Recorder | None = _state["recorder"]
        if recorder is not None:
            with contextlib.suppress(Exception):  # a log handler that raises
                recorder.failed(self.where, error)
        return True


_forking = threading.local()


def _before_fork() -> None:
    """Wait until no other thread opens the journal or reads the environment: the child would inherit its locks."""
    _forking.held = [lock for lock in (_lock, READING) if lock.acquire(timeout=FORK_SECONDS)]


def _forked() -> None:
    for lock in getattr(_forking, "held", ()):
        lock.release()
    _forking.held = []


def _after_fork() -> None:
    """In a forked child: let go of the parent's stream; the child's first call opens its own."""
    global _lock
    _forked()
    _lock = threading.RLock()
    recorder: Recorder | None = _state["recorder"]
    if recorder is not None:
        _state["settings"], _state["parent"] = recorder.settings, recorder.environment
        recorder.journal.forget()
        _state["recorder"] = None


def shutdown() -> None:
    """End this process's stream, if there is one."""
    recorder: Recorder | None = _state["recorder"]
    if recorder is not None:
        recorder.close()
        _state["recorder"], _state["refused"] = None, "the process is ending"


if hasattr(os, "register_at_fork"):
    os.register_at_fork(before=_before_fork, after_in_parent=_forked, after_in_child=_after_fork)
atexit.register(shutdown)
