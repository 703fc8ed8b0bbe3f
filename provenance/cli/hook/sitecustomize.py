"""Loaded by Python itself as it starts, because `provenance run` put this folder in front of the path.

Instruments the process and then lets the site customisation of the user's own have its turn. Whatever goes
wrong, the program runs.
"""

import importlib.machinery
import importlib.util
import os
import sys


def _instrument() -> None:
    try:
        from provenance.capture.call import LABELS, Labels
        from provenance.capture.wrap import instrument

        tags = dict(line.split("=", 1) for line in os.environ.get("PROVENANCE_RUN_TAGS", "").split("\n") if "=" in line)
        name = os.environ.get("PROVENANCE_RUN_NAME", "")
        if name or tags:
            LABELS.set(Labels(name, tags))
        instrument()
    except Exception as error:
        sys.stderr.write(f"provenance: this process is not recorded: {type(error).__name__}: {error}\n")


def _steady() -> None:
    """Hold what `provenance run --deterministic --seed N` asks for, from the first line of the program on."""
    try:
        from provenance.capture.wrap import Watcher
        from provenance.determinism.start import begin

        loaded = begin(os.environ)
        if loaded is not None:
            sys.meta_path.insert(0, Watcher(("numpy", "torch"), loaded))
    except Exception as error:
        sys.stderr.write(f"provenance: this process is not held steady: {type(error).__name__}: {error}\n")


def _next() -> None:
    """Run the sitecustomize that this one stands in front of, if there is one."""
    here = os.path.dirname(os.path.abspath(__file__))
    path = [entry for entry in sys.path if os.path.abspath(entry or ".") != here]
    spec = importlib.machinery.PathFinder.find_spec("sitecustomize", path)
    if spec is not None and spec.loader is not None:
        module = importlib.util.module_from_spec(spec)
        sys.modules["sitecustomize"] = module
        spec.loader.exec_module(module)


if os.environ.get("PROVENANCE_RUN") == "1":
    _instrument()
    if os.environ.get("PROVENANCE_DETERMINISTIC") or os.environ.get("PROVENANCE_SEED"):
        _steady()
_next()
