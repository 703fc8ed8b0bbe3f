"""Patching a library as it loads, for programs that instrument first and import later.

A finder in front of all others lets the usual finders do their work and adds one step behind the execution of
the modules that are waited for. Nothing is imported by us, and the module's loader stays the object that it
was.
"""

import importlib.abc
import importlib.machinery
import logging
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

from provenance.recorder import Harmless

log = logging.getLogger("provenance")


class Watcher(importlib.abc.MetaPathFinder):
    """Calls back once a module whose name fits has been executed."""

    def __init__(self, names: tuple[str, ...], loaded: Callable[[str], None]) -> None:
        self.names = names
        self.loaded = loaded

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        """Find nothing ourselves: hand on what the others find, with our step behind it."""
        if not any(fullname == name or (name.endswith(".") and fullname.startswith(name)) for name in self.names):
            return None
        for finder in sys.meta_path:
            if finder is self or not hasattr(finder, "find_spec"):
                continue
            spec = finder.find_spec(fullname, path, target)
            if spec is not None:
                if spec.loader is not None:
                    with Harmless("the import of a library"):
                        self._follow(spec.loader)
                return spec
        return None

    def _follow(self, loader: object) -> None:
        execute = getattr(loader, "exec_module", None)
        if execute is None or getattr(execute, "provenance_follows", False):
            return

        def exec_module(module: ModuleType) -> None:
            execute(module)
            try:
                self.loaded(module.__name__)
            except Exception as error:
                log.warning("provenance could not instrument %s: %s", module.__name__, error)

        exec_module.provenance_follows = True  # type: ignore[attr-defined]
        try:
            loader.exec_module = exec_module  # type: ignore[attr-defined]
        except AttributeError:  # a loader without a dictionary: its modules stay as they are
            return


_watcher: Watcher | None = None


def watch(names: tuple[str, ...], loaded: Callable[[str], None]) -> None:
    """Call ``loaded`` with the name of each module that fits, once it has been executed. Again changes nothing."""
    global _watcher
    if _watcher is None:
        _watcher = Watcher(names, loaded)
        sys.meta_path.insert(0, _watcher)


def unwatch() -> None:
    """Stop watching."""
    global _watcher
    if _watcher is not None and _watcher in sys.meta_path:
        sys.meta_path.remove(_watcher)
    _watcher = None
