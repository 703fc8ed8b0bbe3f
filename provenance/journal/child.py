"""The writer's process as its parent sees it: how it is started, and what it says of itself when it cannot go on.

Both sides meet in the spool: ``target`` names the store, ``writer.log`` takes the child's streams, and
``writer.status`` holds one sentence while the store fails, for the process that records and for whoever asks.
"""

import contextlib
import logging
import os
import secrets
import subprocess
import sys
import threading
import time
from pathlib import Path

import orjson

from provenance.errors import ProvenanceError
from provenance.integrity.secrets import without_password

log = logging.getLogger("provenance")
WATCH_SECONDS = 5.0  # those that cannot go on end within this time
RETRY_SECONDS = (1.0, 5.0, 20.0, 60.0)  # before a writer that failed is started again
STATUS = "writer.status"
SOURCE = str(Path(__file__).parents[2])
# Held until they have ended: a writer outlives its recorder, and Python warns of a process that is dropped running.
_running: "list[subprocess.Popen[bytes]]" = []


def launch(folder: Path, url: str, key_file: Path, grace: float) -> "subprocess.Popen[bytes]":
    """Start the writer's process: its own session, a log for its streams, no descriptors of ours.

    The database's URL goes through a file of mode 0600 and never through arguments, which others can read; its password
    goes through the child's environment and is written nowhere.
    """
    address, password = without_password(url)
    _leave(folder / "target", orjson.dumps({"url": address, "key_file": str(key_file), "grace": grace}))
    environ = dict(os.environ)
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [SOURCE, environ.get("PYTHONPATH", "")]))
    if password:
        environ["PGPASSWORD"] = password
    environ["PROVENANCE_DISABLED"] = "1"  # the writer's own process records nothing
    flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC | os.O_NOFOLLOW
    out = os.open(folder / "writer.log", flags, 0o600)
    _running[:] = [item for item in _running if item.poll() is None]
    try:
        process = subprocess.Popen(
            [sys.executable, "-P", "-m", "provenance.writer", str(folder)],
            stdin=subprocess.DEVNULL, stdout=out, stderr=out, start_new_session=True, close_fds=True, env=environ,
            cwd="/",
        )  # fmt: skip
    finally:
        os.close(out)
    _running.append(process)
    return process


def _leave(path: Path, text: bytes) -> None:
    """Put a file where another may read it at any moment. Two who leave the same one do not meet in its draft."""
    with contextlib.suppress(FileNotFoundError):
        if path.read_bytes() == text:
            return
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, text)
    finally:
        os.close(descriptor)
    draft.replace(path)


def said(error: Exception) -> str:
    """Return an error in one line: what follows may quote the row."""
    text = (str(error).strip().splitlines() or [""])[0]
    return text if isinstance(error, ProvenanceError) else f"{type(error).__name__}: {text}"


def complain(folder: Path, text: str) -> None:
    """Leave word of why nothing is drained. Without room for it there is the log."""
    with contextlib.suppress(OSError):
        _leave(folder / STATUS, orjson.dumps({"at": time.time_ns(), "pid": os.getpid(), "error": text}))


def well(folder: Path) -> None:
    """Take the word back: the store answers."""
    with contextlib.suppress(OSError):
        (folder / STATUS).unlink(missing_ok=True)


def complaint(folder: Path) -> str:
    """Return why nothing is drained, or an empty text."""
    try:
        found = orjson.loads((folder / STATUS).read_bytes())
        return str(found["error"])
    except (OSError, ValueError, LookupError, TypeError):
        return ""


class Watch:
    """Sees whether writers that were started can go on; tells why not, once for each reason, and slows down."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.failures = 0
        self._next = 0.0
        self._said = ""

    @property
    def resting(self) -> bool:
        """Say whether a writer failed a moment ago."""
        return time.monotonic() < self._next

    def over(self, process: "subprocess.Popen[bytes]", closing: threading.Event) -> None:
        """Look at a writer for the first seconds of its life."""
        limit = time.monotonic() + WATCH_SECONDS
        while process.poll() is None:
            if time.monotonic() > limit or closing.wait(0.1):
                break
        if process.returncode:
            self.failed(complaint(self.folder) or f"the writer ended with code {process.returncode}.")
        elif process.returncode is None:
            self.failures = 0

    def failed(self, why: str) -> None:
        """Note that a writer cannot go on."""
        self._next = time.monotonic() + RETRY_SECONDS[min(self.failures, len(RETRY_SECONDS) - 1)]
        self.failures += 1
        self.say(why)

    def say(self, why: str) -> None:
        """Tell why nothing reaches the database."""
        if why and why != self._said:
            self._said = why
            log.warning("provenance writes nothing into the database now: %s The spool keeps what is recorded.", why)
