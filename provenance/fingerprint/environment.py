"""The environment of a process and the switches in it, as fingerprints that are only made again when something moved.

The expensive half (machine, driver) is read once. Packages and torch are read again when another framework has
been loaded; variables when one has changed. Both are told by tuples that cost microseconds.
"""

import os
import sys
import threading
from pathlib import Path

from provenance.facts import Field, Fingerprint
from provenance.fingerprint import environ, flags, frameworks, hardware, loaded, platforms
from provenance.fingerprint.reading import read, short_path


class Environment:
    """The two fingerprints of a process, kept as long as they hold. Safe for threads."""

    def __init__(self, parent: "Environment | None" = None) -> None:
        self._lock = threading.Lock()
        # A forked child is on its parent's machine; to ask the driver again there may hang.
        self._machine: list[Field] | None = parent._machine if parent is not None else None
        self._packages: list[Field] = []
        self._libraries: list[Field] = []
        self._mapped: list[str] = []
        self._guard: tuple[object, ...] = ()
        self._environment: Fingerprint | None = None
        self._guards = flags.Guard()
        self._switch_guard: tuple[object, ...] | None = None
        self._switches: Fingerprint | None = None

    def environment(self) -> Fingerprint:
        """Return what is fixed for the process: machine, driver, packages, variables."""
        guard = (frameworks.loaded(), environ.snapshot())
        current = self._environment
        if current is not None and guard == self._guard:
            return current
        with self._lock:
            if self._machine is None:
                self._machine = hardware.fields() + platforms.fields() + program()
            if not self._packages or guard[0] != (self._guard or (None,))[0]:
                self._packages = frameworks.fields() + platforms.xpu()
                self._look_at_libraries()
            parts = (self._machine, self._packages, self._libraries, environ.fields())
            current = Fingerprint.of("environment", [item for part in parts for item in part])
            self._environment, self._guard = current, guard
            return current

    def look_again(self) -> None:
        """See whether more libraries have been mapped since: some come with the first call that needs them.

        A millisecond, so meant for a thread of ours, now and then.
        """
        if self._environment is None or loaded.mapped_or_none() == self._mapped:
            return
        with self._lock:
            self._look_at_libraries()
            self._environment = None

    def _look_at_libraries(self) -> None:
        self._mapped = loaded.mapped_or_none()
        self._libraries = loaded.fields()

    def switches(self) -> Fingerprint:
        """Return the mutable switches as they stand in the calling thread."""
        guard = self._guards.snapshot()
        current = self._switches
        if current is not None and guard == self._switch_guard:
            return current
        current = Fingerprint.of("switches", flags.fields())
        self._switches, self._switch_guard = current, guard
        return current


def program() -> list[Field]:
    """Read what the process runs: the program's file and the commit of its checkout."""
    script = program_path()
    return [
        Field("app.program", short_path(script, os.path.expanduser("~")), source="system"),
        read("app.code_version", lambda: frameworks.code_version(script or "./x"), "git"),
    ]


def program_path() -> str:
    """Return the path of the program's main file, or an empty text in an interactive session."""
    main = sys.modules.get("__main__")
    path = getattr(main, "__file__", None) or ""
    return str(Path(path).absolute()) if path else ""
