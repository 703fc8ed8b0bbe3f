"""Steadiness from the first line of a program on, as `provenance run --deterministic --seed 42` asks for it.

The variables that must stand before Python starts are set by whoever starts it; the rest is done here, in the new
process: what is loaded already at once, NumPy and torch as they are loaded.
"""

import random
import sys
from collections.abc import Callable, Mapping

from provenance.determinism.mode import FORBIDDEN, deterministic, variables
from provenance.determinism.seeds import WORD
from provenance.errors import BadSetting

MODE, SEED = "PROVENANCE_DETERMINISTIC", "PROVENANCE_SEED"


def prepared(environ: Mapping[str, str], steady: bool, seed: int | None) -> dict[str, str]:
    """Return the environment for a program that shall be steady. What its user has set to a value that will do stays.

    Raises BadSetting for a seed that cannot be used.
    """
    found = dict(environ)
    if seed is not None and not 0 <= seed < WORD:
        raise BadSetting(f"the seed is {seed}; it must be an integer from 0 to {WORD - 1}, as PYTHONHASHSEED is.")
    if seed is not None:
        found[SEED] = str(seed)
        found["PYTHONHASHSEED"] = str(seed)
    if steady:
        found[MODE] = "1"
        wanted = variables(seed)
        if found.get("CUBLAS_WORKSPACE_CONFIG") == ":16:8":  # the other value that will do
            del wanted["CUBLAS_WORKSPACE_CONFIG"]
        found |= wanted
        for name in FORBIDDEN:
            found.pop(name, None)
    return found


def begin(environ: Mapping[str, str]) -> Callable[[str], None] | None:
    """Seed Python, and return what has to be called with the name of a module once it is loaded; None for nothing."""
    text, steady = environ.get(SEED, ""), environ.get(MODE) == "1"
    seed = int(text) if text.isdecimal() else None
    if seed is None and not steady:
        return None
    if seed is not None:
        random.seed(seed)

    def loaded(name: str) -> None:
        if name == "numpy" and seed is not None:
            sys.modules["numpy"].random.seed(seed)
        if name == "torch":
            if seed is not None:
                sys.modules["torch"].manual_seed(seed)
            if steady:
                deterministic().enable()

    for name in ("numpy", "torch"):
        if name in sys.modules:
            loaded(name)
    return loaded
