"""What a recorder opens its journal with: who this process is, how its records are kept, who moves them."""

import os
import socket
import subprocess
import sys
from pathlib import Path

import orjson

from provenance.errors import SpoolRefused
from provenance.fingerprint.environment import program_path
from provenance.fingerprint.reading import short_path
from provenance.integrity import digests
from provenance.integrity.secrets import said
from provenance.journal import child
from provenance.journal.room import Keep, default_limit, prepare
from provenance.settings import GRACE, Places, Settings, embedded


def about(settings: Settings, key: bytes) -> dict[str, object]:
    """Return what the header of a segment says of this process. Host and user stay unnamed unless asked for."""
    host = socket.gethostname()
    keyed = "hmac:" + digests.equality(key, "host", (host.encode("utf-8", "surrogateescape"),)).hex()[:16]
    return {
        "host": host if settings.identify_host else keyed,
        "program": said(short_path(program_path(), os.path.expanduser("~"))),
        "python": sys.version.split()[0],
        "key_id": digests.key_id(key),
        "capture": settings.capture,
        "durability": settings.durability,
    }


def keeping(settings: Settings, spool: Path) -> Keep:
    """Return how the journal keeps records under these settings."""
    prepare(spool)
    return Keep(
        settings.durability,
        patience=settings.max_block if settings.on_failure == "block" else 0.0,
        commit_seconds=settings.max_block,
        limit=settings.spool_max or default_limit(spool),
        sync_seconds=settings.sync_interval if settings.durability == "process" else 0.0,
    )


def launch_writer(where: Places) -> "subprocess.Popen[bytes]":
    """Start the writer's process for these places."""
    return child.launch(where.spool, where.url, where.key_file, where.grace)


def read_target(folder: Path) -> Places:
    """Read where a spool drains to, from the file that its recorder left.

    Raises SpoolRefused where others could have written it.
    """
    path = folder / "target"
    facts = path.lstat()
    if facts.st_uid != os.geteuid() or facts.st_mode & 0o022:
        raise SpoolRefused(f"{path} can be written by others; remove it.")
    target = orjson.loads(path.read_bytes())
    grace = float(target.get("grace", GRACE))
    return Places(target["url"], embedded(target["url"]), folder, Path(target["key_file"]), grace)
