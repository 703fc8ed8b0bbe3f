"""The flight recorder for model inference, and the investigator who reads it.

    import provenance
    model = provenance.wrap(model, tokenizer=tokenizer)     # one line; every generate is written down

Everything here is loaded when first used: ``import provenance`` costs milliseconds and loads neither torch nor
SQLAlchemy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from provenance.capture.cache import cached
    from provenance.capture.call import run
    from provenance.capture.face import environment, flush, init
    from provenance.capture.functions import record
    from provenance.capture.wrap import instrument, uninstrument, wrap
    from provenance.determinism.mode import deterministic
    from provenance.determinism.sampling import clean_sampling, greedy
    from provenance.determinism.seeds import seed_all, seeded
    from provenance.integrity.text import normalize

__version__ = "0.1.0"

# Exported name, and the module in which it lives.
_FACE = {
    "cached": "provenance.capture.cache",
    "clean_sampling": "provenance.determinism.sampling",
    "deterministic": "provenance.determinism.mode",
    "environment": "provenance.capture.face",
    "flush": "provenance.capture.face",
    "greedy": "provenance.determinism.sampling",
    "init": "provenance.capture.face",
    "instrument": "provenance.capture.wrap",
    "normalize": "provenance.integrity.text",
    "record": "provenance.capture.functions",
    "run": "provenance.capture.call",
    "seed_all": "provenance.determinism.seeds",
    "seeded": "provenance.determinism.seeds",
    "uninstrument": "provenance.capture.wrap",
    "wrap": "provenance.capture.wrap",
}
__all__ = [
    "__version__",
    "cached",
    "clean_sampling",
    "deterministic",
    "environment",
    "flush",
    "greedy",
    "init",
    "instrument",
    "normalize",
    "record",
    "run",
    "seed_all",
    "seeded",
    "uninstrument",
    "wrap",
]


def __getattr__(name: str) -> Any:
    if name not in _FACE:
        raise AttributeError(f"module 'provenance' has no attribute {name!r}")
    value = getattr(import_module(_FACE[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted([*globals(), *_FACE])
