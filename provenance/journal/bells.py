"""How a call waits for the database without asking it: two pipes in the spool, and nobody polls.

``writer.bell`` wakes whoever drains. ``<stream>.ack`` tells one process how far its own records are committed, eight
bytes a time: the writer tells after each batch, and again when it takes over from a dead one.
"""

import contextlib
import os
import select
import struct
import time
from pathlib import Path

from provenance.journal.room import BELL

WAKE = "writer.bell"
NUMBER = struct.Struct("<q")
_FLAGS = os.O_NONBLOCK | os.O_CLOEXEC | os.O_NOFOLLOW


def ear(path: Path) -> int:
    """Make a pipe where there is none, and return a descriptor that reads it. It never ends: we hold both ends.

    Raises OSError.
    """
    with contextlib.suppress(FileExistsError):
        os.mkfifo(path, 0o600)
    return os.open(path, os.O_RDWR | _FLAGS)


def listen(descriptor: int, seconds: float) -> bytes:
    """Wait for something to be told, for so long at most; return all of it, or nothing."""
    if not select.select([descriptor], [], [], seconds)[0]:
        return b""
    with contextlib.suppress(BlockingIOError):
        return os.read(descriptor, 1 << 16)
    return b""


def tell(path: Path, data: bytes) -> bool:
    """Tell whoever listens; say whether anybody does."""
    try:
        descriptor = os.open(path, os.O_WRONLY | _FLAGS)
    except OSError:
        return False
    try:
        return os.write(descriptor, data) == len(data)
    except OSError:
        return False
    finally:
        os.close(descriptor)


def wake(folder: Path) -> None:
    """Wake the writer of a spool."""
    tell(folder / WAKE, b"!")


def committed(folder: Path, stream: bytes, seq: int) -> bool:
    """Tell a process that its records up to ``seq`` are in the store; say whether it listens."""
    return tell(ack_path(folder, stream), NUMBER.pack(seq))


def ack_path(folder: Path, stream: bytes) -> Path:
    """Return where a stream hears of its commits."""
    return folder / f"{stream.hex()}{BELL}"


class Rest:
    """The rest of a writer without work: it ends early where somebody waits for a commit."""

    def __init__(self, folder: Path) -> None:
        self._path, self._ear = folder / WAKE, -1

    def take(self, seconds: float) -> None:
        """Rest for so long at most."""
        if self._ear < 0:
            with contextlib.suppress(OSError):
                self._ear = os.open(self._path, os.O_RDWR | _FLAGS)
        if self._ear < 0:
            time.sleep(seconds)
        else:
            listen(self._ear, seconds)

    def close(self) -> None:
        """Close the bell."""
        if self._ear >= 0:
            os.close(self._ear)
        self._ear = -1
