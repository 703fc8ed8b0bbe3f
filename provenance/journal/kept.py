"""Segments that are drained and not yet deleted: what `provenance redrain` brings back where a database lost commits.

A drained segment is set aside under another suffix and deleted after its grace, the oldest first where all of them
take more room than they may. They lie in the spool, so they are as safe from others as it is.
"""

import os
import time
from pathlib import Path

from provenance.journal import blobs
from provenance.journal.spool import SUFFIX, listed

KEPT, DAMAGED = ".kept", ".damaged"
MOST_BYTES = 1 << 30
DRAFT_SECONDS = 86_400.0
SHARE_OF_FREE = 20  # and never more than a twentieth of what is free: on a full disk they are the first to go


def keep(path: Path, grace: float) -> None:
    """Let go of a drained segment: set it aside for ``grace`` seconds from now, or delete it where that is none."""
    if grace <= 0:
        path.unlink(missing_ok=True)
        blobs.drop(path)
        return
    try:
        os.utime(path)
        path.rename(path.with_suffix(KEPT))
    except FileNotFoundError:
        return


def kept(folder: Path) -> list[Path]:
    """List the drained segments that are still there, those in which bytes were damaged too, each stream's in order."""
    return listed(folder, (KEPT, DAMAGED))


def whole(folder: Path) -> list[Path]:
    """List everything in a spool that holds records, drained or not, each stream's in order."""
    return listed(folder, (SUFFIX, KEPT, DAMAGED))


def expire(folder: Path, grace: float) -> int:
    """Delete what is beyond its grace or its room, the oldest first; return how many segments went.

    Segments in which bytes were damaged stay until a person deletes them.
    """
    blobs.sweep(folder, time.time() - DRAFT_SECONDS)
    there = []
    for path in listed(folder, (KEPT,)):
        try:
            facts = path.stat()
        except FileNotFoundError:
            continue
        there.append((facts.st_mtime, facts.st_size + blobs.weight(path), path))
    if not there:
        return 0
    room = min(MOST_BYTES, free(folder) // SHARE_OF_FREE)
    oldest, size, gone = time.time() - grace, sum(item[1] for item in there), 0
    for at, bytes_, path in sorted(there):
        if at > oldest and size <= room:
            break
        path.unlink(missing_ok=True)
        blobs.drop(path)
        size, gone = size - bytes_, gone + 1
    return gone


def free(folder: Path) -> int:
    """Return how many bytes this user may still write there."""
    facts = os.statvfs(folder)
    return facts.f_bavail * facts.f_frsize
