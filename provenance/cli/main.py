"""The table of commands. A command's module is imported when it is chosen, so that ``--help`` stays quick.

Every error of ours ends as one sentence on standard error and an exit code: 0 same or fine, 1 differs or check
failed, 2 wrong usage or missing part, 3 could not tell, 70 internal error.
"""

import contextlib
import os
import sys
from collections.abc import Callable
from importlib import import_module
from typing import Any, NamedTuple

from provenance.errors import ProvenanceError

INTERNAL = 70


class Entry(NamedTuple):
    """One command: where it lives, and its line in the overview."""

    module: str
    name: str
    help: str
    passthrough: bool = False  # what follows belongs to another program


# This module alone may import by text: the plan of the house is checked on import statements.
COMMANDS: dict[str, Entry] = {
    "demo": Entry("demo", "demo", "See it: a real model, two runs that part, and the reason why."),
    "run": Entry("program", "run", "Record an unchanged program: provenance run -- python app.py.", passthrough=True),
    "log": Entry("runs", "log", "List recorded runs, newest first."),
    "show": Entry("runs", "show", "Show one run: what it was asked, what it answered, and what decided it."),
    "diff": Entry("diff", "diff", "Say why two runs part, or which field separates many: token, margin and cause."),
    "export": Entry("runs", "export", "Write whole runs as JSON, to be compared where there is no database."),
    "blame": Entry("blame", "blame", "Say which fields go with divergence, over all runs of equal inputs."),
    "replay": Entry("replay", "replay", "Make a recorded call again, and say whether its output held."),
    "baseline": Entry("baseline", "baseline", "Freeze runs as expected outputs; make them again after a change."),
    "drift": Entry("drift", "drift", "Say how often equal inputs gave unequal outputs, and since when."),
    "sql": Entry("store", "sql", "Ask the store in SQL, read-only."),
    "env": Entry("environment", "env", "Everything in this environment that can decide an output; env diff A B."),
    "lock": Entry("lock", "lock", "Write what outputs rest on into provenance.lock, made for git."),
    "check": Entry("lock", "check", "Compare this machine and model with provenance.lock; exit code 1 on drift."),
    "weights": Entry("weights", "weights", "The weights: which tensors differ, and the digests of files."),
    "lint": Entry("lint", "lint", "Name the traps in decoding settings: of a run, or of a model's folder."),
    "probe": Entry("probe", "probe", "Measure what holds of a model here: repeats, batches, cache, processes."),
    "doctor": Entry("doctor", "doctor", "What would matter most here: process, model and store, each with its cure."),
    "verify": Entry("verify", "verify", "Account for every record: what is there, what is missing, and why."),
    "writer": Entry(
        "service", "writer", "Move the journal into the database, in the foreground; --status says how far."
    ),
    "import": Entry("imports", "import_segments", "Bring the journal of a host that cannot reach the store."),
    "redrain": Entry("imports", "redrain", "Put segments that are still kept into a database that lost commits."),
    "torture": Entry("torture", "torture", "Kill, cut, fill and flip on your own disk, and count what was lost."),
    "db": Entry("store", "db", "The database: upgrade, current, path."),
}
OVERVIEW = """The flight recorder for model inference, and the investigator who reads it.

A run is named by a unique beginning of its id, `last`, `last~2`, `tag:NAME`, or a file that `export`
wrote; RUN:ROW names one prompt of a batch.
"""


def entry() -> None:
    """Run the command line and leave with its exit code."""
    sys.exit(main(sys.argv[1:]))


def main(arguments: list[str]) -> int:
    """Run one command and return its exit code. Never raises and never shows a traceback unless asked to."""
    if sys.stdout is None:  # a shell's >&-
        sys.stdout = open(os.devnull, "w", encoding="utf-8")  # noqa: SIM115
    try:
        code = _dispatch(arguments)
        sys.stdout.flush()
        return code
    except ProvenanceError as error:
        _complain(str(error))
        return error.exit_code
    except BrokenPipeError:  # `provenance log | head`: the reader has gone, and that is fine
        _forget_output()
        return 0
    except KeyboardInterrupt:
        return 130
    except OSError as error:
        if error.strerror is None:  # not the system's word
            return _internal(error)
        _forget_output()
        what = f"{error.filename} cannot be used" if error.filename else "the output cannot be written"
        _complain(f"{what}: {error.strerror}.")
        return 2
    except Exception as error:
        if hasattr(error, "format_message"):  # usage errors of the command-line library
            _complain(error.format_message())
            return 2
        return _internal(error)


def _dispatch(arguments: list[str]) -> int:
    completing = any(name.endswith("_COMPLETE") and "PROVENANCE" in name for name in os.environ)
    if arguments[:1] == ["--version"]:
        # The package is loaded, being our parent; to import the face from here would be a circle.
        sys.stdout.write(f"provenance {sys.modules['provenance'].__version__}\n")
        return 0
    for_shell = bool(arguments) and arguments[0].endswith("-completion")
    chosen = None if for_shell else next((item for item in arguments if not item.startswith("-")), None)
    arguments = arguments or ([] if completing else ["--help"])
    if chosen is not None and chosen not in COMMANDS and not completing:
        import difflib

        close = difflib.get_close_matches(chosen, COMMANDS, 1)
        hint = f"did you mean {close[0]!r}?" if close else f"there are {', '.join(COMMANDS)}."
        _complain(f"there is no command {chosen!r}; {hint}")
        return 2
    if chosen == "sql":
        arguments = [f" {item}" if _comment(item) else item for item in arguments]
    names = list(COMMANDS) if completing else [chosen] if chosen else []
    result = app(names)(arguments, standalone_mode=False, prog_name="provenance")
    return result if isinstance(result, int) else 0


def _comment(argument: str) -> bool:
    """Say whether an argument is SQL that begins with a comment, and no option."""
    return argument.startswith("--") and len(argument.split()) > 1 and "=" not in argument.split(maxsplit=1)[0]


def app(names: list[str]) -> Any:
    """Make the application: the chosen commands for real, all others by their line alone."""
    import typer

    made = typer.Typer(help=OVERVIEW, no_args_is_help=True, pretty_exceptions_enable=False, rich_markup_mode=None)

    @made.callback()
    def overview() -> None:
        return None

    overview.__doc__ = OVERVIEW
    for name, item in COMMANDS.items():
        if name in names:
            found = getattr(import_module(f"provenance.cli.{item.module}"), item.name)
            if isinstance(found, typer.Typer):
                made.add_typer(found, name=name, help=item.help)
            else:
                settings = {"allow_extra_args": True, "ignore_unknown_options": True} if item.passthrough else {}
                made.command(name, context_settings=settings)(found)
        else:
            made.command(name, help=item.help)(_stub())
    return made


def _stub() -> Callable[[], None]:
    def stub() -> None:
        return None

    return stub


def _forget_output() -> None:
    """Send what is still to be printed nowhere: what reads it, or the disk below it, takes no more."""
    with contextlib.suppress(OSError, ValueError):
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _complain(text: str) -> None:
    from provenance.cli.render import visible

    sys.stderr.write(f"provenance: {visible(text)}\n")


def _internal(error: Exception) -> int:
    if os.environ.get("PROVENANCE_TRACEBACK"):
        import traceback

        traceback.print_exc()
    else:
        _complain(f"internal error: {type(error).__name__}: {error}. PROVENANCE_TRACEBACK=1 shows where.")
    return INTERNAL
