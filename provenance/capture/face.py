"""What a program calls once: choosing settings, waiting for the store, looking at its own environment."""

import os

from provenance import recorder as recorders
from provenance.facts import Field
from provenance.fingerprint.environment import Environment


def init(
    db: str | os.PathLike[str] | None = None,
    *,
    capture: str | None = None,
    evidence: int | None = None,
    weights: str | None = None,
    writer: str | None = None,
    **more: object,
) -> None:
    """Choose where and what to record. Without it, the first recorded call uses the PROVENANCE_ variables and defaults.

    ``db`` is a path or a URL; the other arguments, and ``spool``, ``key_file``, ``identify_host`` and
    ``disabled``, are those of ``docs/settings.md``. The same again changes nothing; other settings end the
    stream and begin another.

    Raises BadSetting for a value that cannot be used. A spool that cannot be written to is one warning, and
    calls run on.
    """
    chosen = {"db": os.fspath(db) if db is not None else None, "capture": capture, "evidence": evidence,
              "weights": weights, "writer": writer, **more}  # fmt: skip
    recorders.configure(**chosen)


def flush(seconds: float = 30.0) -> bool:
    """Wait until weights are hashed and the database holds everything recorded so far.

    Returns False where that took longer than ``seconds``, where the database cannot be written to, which is said once,
    or where nothing is recorded in this process.
    Programs that end need not call it: the spool keeps everything, and whoever reads the database drains it
    first.
    """
    recorder = recorders.current()
    return recorder.flush(seconds) if recorder is not None else False


def environment() -> dict[str, Field]:
    """Return what can decide an output in this process, models apart: environment and switches, by name."""
    recorder = recorders.current()
    reader = recorder.environment if recorder is not None else Environment()
    return {**reader.environment().fields, **reader.switches().fields}
