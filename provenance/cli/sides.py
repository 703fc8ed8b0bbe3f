"""What a comparison of environments can name: this machine, a file of `env --json`, a lock, or a recorded run."""

import importlib.util
import sys
from functools import lru_cache
from pathlib import Path

import orjson

from provenance.cli.opened import Runs, is_file
from provenance.cli.render import visible
from provenance.determinism.lock import Lock, part
from provenance.determinism.lock import read as read_lock
from provenance.errors import BadFile
from provenance.facts import Field, Fingerprint
from provenance.fingerprint.environment import Environment
from provenance.fingerprint.reading import reason

SCOPES = ("environment", "switches")


def here(torch: bool = True) -> tuple[Fingerprint, ...]:
    """Read this process: environment and switches. Torch is loaded for it, if it is installed and wanted.

    Where it cannot be, its fields are unknown for that reason, and everything else is read.
    """
    why = _load_torch() if torch else ""
    reader = Environment()
    scopes = (reader.environment(), reader.switches())
    if not why:
        return scopes
    sys.stderr.write(f"provenance: {visible(why)}; what only torch tells is not known.\n")
    return tuple(
        Fingerprint.of(scope.scope, [_excused(item, why) for item in scope.fields.values()]) for scope in scopes
    )


@lru_cache(maxsize=1)
def _load_torch() -> str:
    """Load torch where it is installed, and return why it could not be. A second try would fail for other reasons."""
    try:
        if importlib.util.find_spec("torch") is not None:
            importlib.import_module("torch")
    except Exception as error:  # anything runs in an import: a bad variable, a library that is missing
        return reason(" ".join(f"torch cannot be imported: {type(error).__name__}: {error}".split()))
    return ""


def _excused(item: Field, why: str) -> Field:
    """Return a field with the reason why torch could not tell it."""
    return Field.unknown(item.name, why) if item.unloaded and item.reason.startswith("torch ") else item


def side(reference: str, db: str, torch: bool = True) -> Lock:
    """Return the fields that a reference names. A lock says of itself that it is one: only it has ``about``.

    Raises BadFile or RunNotFound.
    """
    if reference == "here":
        return _bare({name: item for part in here(torch) for name, item in part.fields.items()})
    if reference.endswith(".lock"):
        return read_lock(Path(reference))
    if is_file(reference):
        found = _environment(Path(reference))
        if found is not None:
            return _bare(found)
    run, _ = Runs(db).find(reference)
    kept = {name: item for name, item in run.fields.items() if part(name) == "process" or name == "device.in_use"}
    return Lock(kept, around=run.fields)


def _bare(fields: dict[str, Field]) -> Lock:
    """Return a process of ours as a side: it ran no model, and the program in it is not the user's."""
    return Lock({name: item for name, item in fields.items() if not name.startswith("app.")}, ran=False)


def _environment(path: Path) -> dict[str, Field] | None:
    """Read a file of `env --json`; None for anything else."""
    if not path.is_file():
        raise BadFile(f"there is no file {path}. `provenance env --json > FILE` writes one.")
    try:
        form = orjson.loads(path.read_bytes())
        if form["schema"] != "provenance/env/1":
            return None
        return {name: Field.read(name, item) for scope in SCOPES for name, item in form[scope].items()}
    except (orjson.JSONDecodeError, UnicodeDecodeError) as error:
        raise BadFile(f"{path} is not JSON: {error}. `provenance env --json > FILE` writes one.") from error
    except (KeyError, TypeError, ValueError, AttributeError) as error:
        raise BadFile(f"{path} is neither an environment nor a run: {type(error).__name__} {error}.") from error
