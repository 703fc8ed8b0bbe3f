"""lock and check: write down what outputs rest on, in a file for git, and see whether it still holds."""

import re
import sys
from pathlib import Path
from typing import Annotated

import typer

from provenance.cli import render
from provenance.cli.environment import Everything, document, tell
from provenance.cli.opened import Db, Json, Junit, Runs, write
from provenance.cli.sides import side
from provenance.determinism import lock as locks
from provenance.errors import BadFile
from provenance.explain import reports
from provenance.facts import Field
from provenance.fingerprint import checkpoint
from provenance.settings import remembered_digests

NAME = "provenance.lock"
Where = Annotated[Path, typer.Option("--lock", help="The lock's file.")]
Model = Annotated[Path | None, typer.Option("--model", help="A checkpoint's folder, or one file of weights.")]
RunOption = Annotated[str, typer.Option("--run", help="Take a recorded run: its process, model and settings.")]


def lock(where: Where = Path(NAME), model: Model = None, run: RunOption = "", db: Db = "") -> int:
    """Write what outputs rest on into provenance.lock: only what can act on an output, readable, made for git."""
    _room(where)
    fields, about = _now(model, run, db)
    try:
        where.write_text(locks.dumps(fields, about), encoding="utf-8")
    except OSError as error:
        raise BadFile(f"{where} cannot be written: {error.strerror}; choose another --lock.") from None
    kept = locks.read(where).fields
    unread = sum(not item.known for item in kept.values())
    sys.stdout.write(f"{where}: {len(kept) - unread} fields" + (f", {unread} could not be read\n" if unread else "\n"))
    return 0


def _room(where: Path) -> None:
    """Say what is wrong with a place for a lock, before anything is read for it. Only a lock is overwritten.

    Raises BadFile.
    """
    try:
        if not where.parent.is_dir():
            raise BadFile(f"there is no folder {where.parent}; make it, or choose another --lock.")
        if where.is_dir():
            raise BadFile(f"{where} is a folder; name the file, as in --lock {where / NAME}.")
        if where.exists() and not (where.is_file() and _is_lock(where)):
            raise BadFile(f"{where} is there already and is no lock; move it away, or choose another --lock.")
    except OSError as error:
        raise BadFile(f"{where} cannot be used: {error.strerror}; choose another --lock.") from None


def _is_lock(where: Path) -> bool:
    text = where.read_bytes()
    return not text or text.startswith(locks.HEAD.encode()[:40]) or b"[lock]" in text


def check(
    where: Where = Path(NAME),
    model: Model = None,
    run: RunOption = "",
    allow: Annotated[list[str] | None, typer.Option("--allow", help="Report drift here, and let it pass.")] = None,
    vary: Annotated[list[str] | None, typer.Option("--vary", help="This field may have any value.")] = None,
    everything: Everything = False,
    json: Json = False,
    junit: Junit = None,
    db: Db = "",
) -> int:
    """Compare this machine, and the locked model, with provenance.lock.

    A lock that is cut or was edited by hand is refused. FIELD may be a pattern such as 'gpu.*'.

    Exit code 0: it holds; 1: drift; 3: no drift that could be seen, and
    something locked could not be read.
    """
    held = locks.read(where)
    path = held.about.get("model")
    if model is None and not run and path:
        model = Path(str(path)).expanduser()
        if not model.exists():
            raise BadFile(f"the locked model {path} is not here; name it with --model PATH.")
    if not run and held.about.get("from") == "run":
        raise BadFile(f"{where} was made from a recorded run; compare it with one: provenance check --run last.")
    fields, _ = _now(model, run, db)
    found = locks.diff(held, locks.Lock(fields, ran=bool(run)), allow or (), vary or ())
    if junit is not None:
        write(junit, reports.suite("provenance check", "provenance.check", _cases(found)))
    if json:
        render.emit({"schema": "provenance/check/1", **document(found)})
    else:
        tell(found, "locked", "now", everything)
    return found.code


def _cases(found: locks.Comparison) -> list[reports.Told]:
    """Return a test case for each field that moved or could not be told, and one for all that held."""
    cases = []
    for item in found.changed:
        text = f"{item.name} was {item.before.show()} and is {item.now.show()} ({item.effect})"
        code = 0 if item.allowed else reports.FAILED
        cases.append(reports.Told(item.name, code, "drift", text + (", allowed" if item.allowed else "")))
    cases += [reports.Told(gap.name, reports.UNTOLD, "unknown", f"{gap.name}: {gap.because}") for gap in found.blind]
    return [*cases, reports.Told("what held", 0, "held", f"{found.equal} fields are equal")]


def _now(model: Path | None, run: str, db: str) -> tuple[dict[str, Field], dict[str, str]]:
    if run and model is not None:
        raise typer.BadParameter("--run has a model already; give --run or --model.")
    if run:
        return _of_run(run, db), {"from": "run"}
    fields = dict(side("here", db).fields)
    about = {"from": "machine"}
    if model is not None:
        if not model.exists():
            raise BadFile(f"there is no checkpoint at {model}.")
        fields |= {item.name: item for item in checkpoint.fields(model, remembered_digests())}
        if not fields["weights.files_root"].known:
            why = re.sub(r"^\w+Error: (\[Errno \d+\] )?", "", fields["weights.files_root"].reason)
            raise BadFile(f"{model} cannot be locked: {why}.")
        about["model"] = str(fields["weights.path"].value)
    return fields, about


def _of_run(reference: str, db: str) -> dict[str, Field]:
    """Return what a run says of its process, model and settings, and nothing of the one call that it was."""
    found, _ = Runs(db).find(reference)
    return {name: item for name, item in found.fields.items() if locks.lasts(name)}
