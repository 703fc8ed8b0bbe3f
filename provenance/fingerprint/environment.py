"""The environment of a process and the switches in it, as fingerprints that are only made again when something moved.

The expensive half (machine, driver) is read once. Packages and torch are read again when another framework has
been loaded; variables when one has changed; what the process sees of its devices until CUDA is up. All are told by
tuples that cost microseconds. Installed packages may add fields through the entry point ``provenance.collectors``: each
is asked once, on its own, within two seconds.
"""

import os
import sys
import threading
import time
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import orjson

from provenance.catalogue.fields import why_closed
from provenance.facts import Field, Fingerprint, State
from provenance.fingerprint import engines, environ, flags, frameworks, gpu, hardware, loaded, platforms
from provenance.fingerprint.reading import read, reason, short_path, within
from provenance.integrity.canonical import plain, restore
from provenance.integrity.secrets import holds, tells, withheld

COLLECTORS = "provenance.collectors"
SECONDS, MOST, BYTES = 2.0, 256, 16384

# Held by whoever reads for the first time, and by whoever forks: what is read imports modules and fills caches under
# locks of Python's own, and in a forked child nobody would ever let go of those of another thread.
READING = threading.RLock()


class Environment:
    """The two fingerprints of a process, kept as long as they hold. Safe for threads."""

    def __init__(self, parent: "Environment | None" = None) -> None:
        # A forked child is on its parent's machine; to ask the driver again there may hang.
        self._machine: list[Field] | None = parent._machine if parent is not None else None
        self._inventory: gpu.Inventory | None = parent._inventory if parent is not None else None
        # Once read with CUDA up, the devices hold for good, in a forked child too.
        self._devices: list[Field] = parent._devices if parent is not None else []
        self._up: bool = parent._up if parent is not None else False
        self._collected: list[Field] | None = parent._collected if parent is not None else None
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
        current = self._environment
        if current is not None and self._guards_now() == self._guard:
            return current
        with READING:
            guard = self._guards_now()
            if self._machine is None or self._inventory is None:
                self._machine = hardware.fields() + platforms.fields() + program()
                self._inventory = gpu.inventory()
            if not self._up:
                self._devices, self._up = gpu.fields(self._inventory), gpu.up()
            if not self._packages or guard[0] != (self._guard or (None,))[0]:
                self._packages = frameworks.fields() + platforms.xpu()
                self._look_at_libraries()
            if self._collected is None:
                self._collected = collected()
            # The collected come first: of two fields with one name the later stands.
            parts = (self._collected, self._machine, self._devices, self._packages, self._libraries,
                     engines.process(), environ.fields())  # fmt: skip
            current = Fingerprint.of("environment", [item for part in parts for item in part])
            self._environment, self._guard = current, guard
            return current

    def _guards_now(self) -> tuple[object, ...]:
        return (frameworks.loaded(), environ.snapshot(), engines.mlx_device(), self._up or gpu.up())

    def look_again(self) -> None:
        """See whether more libraries have been mapped since: some come with the first call that needs them.

        A millisecond, so meant for a thread of ours, now and then.
        """
        if self._environment is None or loaded.mapped_or_none() == self._mapped:
            return
        with READING:
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
        with READING:
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


# -- collectors of other packages --------------------------------------------------------------------


def entry_points(group: str) -> list[Any]:
    """List the entry points of a group, by name: the first on the path wins, as for an import."""
    from importlib import metadata

    found = {item.name: item for item in reversed(list(metadata.entry_points(group=group)))}
    return [found[name] for name in sorted(found)]


def collected() -> list[Field]:
    """Ask every installed collector, all at once. One that fails or hangs is a field that says so."""
    try:
        points = entry_points(COLLECTORS)
    except Exception as error:  # metadata that nobody can read
        return [Field.unknown("collector.all", reason(f"{type(error).__name__}: {error}"))]
    results: dict[str, list[Field]] = {}

    def ask(point: Any) -> None:
        key = f"collector.{point.name}"
        results[key] = within(SECONDS, f"the collector {point.name}", lambda: _fields(key, _answer(point)), [key])

    threads = [threading.Thread(target=ask, args=(point,), daemon=True) for point in points]
    for thread in threads:
        thread.start()
    limit = time.monotonic() + SECONDS + 0.5
    for thread in threads:
        thread.join(max(0.0, limit - time.monotonic()))
    return [item for key in sorted(results) for item in results[key]]


def _answer(point: Any) -> object:
    try:
        return point.load()()
    except (SystemExit, KeyboardInterrupt) as error:  # would end its thread without a word
        raise RuntimeError(f"it raised {type(error).__name__}") from None


def _fields(key: str, answer: object) -> list[Field]:
    """Turn what a collector returned into plain fields. Names of ours, and more than is sensible, are refused."""
    given: Iterable[Any]
    if isinstance(answer, Mapping):
        given = [Field(str(name), value) for name, value in answer.items()]
    elif isinstance(answer, (list, tuple)) and all(isinstance(item, Field) for item in answer):
        given = answer
    else:
        raise TypeError(f"it returned a {type(answer).__qualname__}, not a mapping or a list of Field")
    found: list[Field] = []
    refused: list[str] = []
    for item in given:
        why = why_closed(item.name) or ("" if len(found) < MOST else f"it is beyond {MOST} fields")
        if why:
            refused.append(f"{item.name[:60]}: {why}")
        else:
            found.append(plain_field(item, key))
    if refused:
        found.append(Field.unknown(key, reason(f"not taken: {'; '.join(refused)}")))
    return found


def plain_field(item: Field, source: str) -> Field:
    """Return a field of a stranger's with a plain value, or the reason why its value is not kept."""
    if item.state is not State.VALUE:
        return Field(item.name, None, item.state, reason(str(item.reason)), source)
    if item.value is None:
        return Field.unset(item.name, source)
    form = plain(item.value)
    data = orjson.dumps(form, option=orjson.OPT_NON_STR_KEYS)
    if len(data) > BYTES:
        return Field.unknown(item.name, f"its value takes {len(data)} bytes, more than {BYTES}")
    if withheld(item.name, item.value) or tells(data.decode()) or holds(item.value):
        return Field.secret(item.name, source)
    return Field(item.name, restore(form), State.VALUE, "", source)
