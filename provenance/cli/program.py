"""run: record a program that knows nothing of us."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from types import FrameType
from typing import Annotated, Any

import typer

from provenance.cli.opened import Db, where
from provenance.determinism.start import prepared
from provenance.errors import UsageError
from provenance.integrity.secrets import label, said
from provenance.settings import load

HOOK = Path(__file__).parent / "hook"
FORWARDED = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)


def run(
    context: typer.Context,
    name: Annotated[str, typer.Option("--name", help="Name for every run that the program makes.")] = "",
    tag: Annotated[list[str] | None, typer.Option("--tag", help="KEY=VALUE for every run; may be repeated.")] = None,
    capture: Annotated[str, typer.Option("--capture", help="full, digest or off.")] = "",
    steady: Annotated[
        bool, typer.Option("--deterministic", help="Hold every switch that makes repeats equal, from the start on.")
    ] = False,
    seed: Annotated[
        int | None, typer.Option("--seed", help="Seed Python, its hashes, NumPy and torch, from the start on.")
    ] = None,
    db: Db = "",
) -> int:
    """Record an unchanged program: provenance run -- python app.py.

    Every Python process below it is instrumented as it starts. The exit code is the program's own (128+n if a
    signal ended it).
    """
    command = list(context.args)
    if command[:1] == ["--"]:
        command = command[1:]
    if not command:
        raise UsageError("run takes a command, as in: provenance run -- python app.py")
    environ = prepared(_environment(name, tag or [], capture, db), steady, seed)
    try:
        child = subprocess.Popen(command, env=environ)
    except FileNotFoundError:
        raise UsageError(f"there is no program {command[0]!r}.") from None
    except OSError as error:
        raise UsageError(f"{command[0]!r} cannot be started: {error.strerror}.") from None
    code = _wait(child)
    return code if code >= 0 else 128 - code


def _environment(name: str, tags: list[str], capture: str, db: str) -> dict[str, str]:
    spots = where(db)
    load({"capture": capture or None})  # says what is wrong before anything is started
    for item in tags:
        if "=" not in item:
            raise UsageError(f"the tag {said(item)!r} is not KEY=VALUE.")
    environ = dict(os.environ)
    source = str(Path(__file__).parents[2])
    environ["PYTHONPATH"] = os.pathsep.join(filter(None, [str(HOOK), source, environ.get("PYTHONPATH", "")]))
    environ["PROVENANCE_DB"] = str(spots.database) if spots.database is not None else spots.url
    environ["PROVENANCE_RUN"] = "1"
    if name:
        environ["PROVENANCE_RUN_NAME"] = said(name)
    if tags:
        pairs = (item.split("=", 1) for item in tags)
        environ["PROVENANCE_RUN_TAGS"] = "\n".join(f"{key}={label(key, value)}" for key, value in pairs)
    if capture:
        environ["PROVENANCE_CAPTURE"] = capture
    return environ


def _wait(child: "subprocess.Popen[bytes]") -> int:
    """Wait for the program, handing on the signals that were meant for it."""

    def forward(number: int, _: FrameType | None) -> None:
        if child.poll() is None:
            child.send_signal(number)

    before: dict[int, Any] = {}
    for number in map(int, FORWARDED):
        # The terminal sends an interrupt to both of us: the program has had its own already.
        handler: Any = signal.SIG_IGN if number == signal.SIGINT and sys.stdin.isatty() else forward
        before[number] = signal.signal(number, handler)
    try:
        return child.wait()
    finally:
        for number, earlier in before.items():
            signal.signal(number, earlier)
