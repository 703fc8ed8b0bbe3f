"""The key of a store: 32 random bytes in a file of its owner alone, made on first use.

Equality keys and the names of bodies are computed under it. It lies outside the database, so that a copy of
the database tells nobody which prompts are equal to a guess. Every host of a fleet gets the same file.
"""

import os
import secrets
import stat
from pathlib import Path

from provenance.errors import BadSetting, ProvenanceError, SpoolRefused

SIZE = 32


def load(path: Path) -> bytes:
    """Read the key, making it where there is none.

    Two processes that make it at once agree: the one that links its file first wins.

    Raises SpoolRefused where others can read it, BadSetting where it is no key.
    """
    try:
        return _read(path)
    except FileNotFoundError:
        _make(path)
        return _read(path)


def need(path: Path) -> bytes:
    """Read the key for a call that is about to be recorded.

    Raises ProvenanceError, with what to do, where the system refuses the file; else as `load`.
    """
    try:
        return load(path)
    except OSError as error:
        raise ProvenanceError(
            f"the key file {path} cannot be made: {error.strerror}. Set PROVENANCE_DB and "
            "PROVENANCE_KEY_FILE to places that this user can write to."
        ) from error


def _read(path: Path) -> bytes:
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)  # a pipe must not make us wait
    try:
        facts = os.fstat(descriptor)
        if not stat.S_ISREG(facts.st_mode):
            raise BadSetting(f"the key file {path} is not a file; point PROVENANCE_KEY_FILE at another path.")
        if not _private(facts):
            raise SpoolRefused(f"the key file {path} can be read by others; run: chmod 600 {path}")
        data = os.read(descriptor, SIZE + 1)
    finally:
        os.close(descriptor)
    if len(data) != SIZE:
        raise BadSetting(
            f"the key file {path} holds {len(data)} bytes and not {SIZE}; restore it, or point "
            "PROVENANCE_KEY_FILE at another path."
        )
    return data


def _private(facts: os.stat_result) -> bool:
    """Say whether nobody else can read a file: its user alone, or the one group that a cluster hands a secret to."""
    if facts.st_uid == 0 != os.geteuid() and facts.st_gid == os.getegid():
        return not facts.st_mode & 0o037
    return not facts.st_mode & 0o077 and facts.st_uid in (os.geteuid(), 0)


def _make(path: Path) -> None:
    path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}.{secrets.token_hex(4)}")
    descriptor = os.open(draft, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.write(descriptor, secrets.token_bytes(SIZE))
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
    try:
        os.link(draft, path)  # unlike a rename, a link does not replace a key made meanwhile
    except FileExistsError:
        pass
    finally:
        draft.unlink()
