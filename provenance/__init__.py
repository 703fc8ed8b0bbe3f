"""The flight recorder for model inference, and the investigator who reads it.

    import provenance
    model = provenance.wrap(model, tokenizer=tokenizer)     # one line; every generate is written down

Everything here is loaded when first used: ``import provenance`` costs milliseconds and loads neither torch nor
SQLAlchemy.
"""

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from provenance.capture.call import run
    from provenance.capture.face import environment, flush, init
    from provenance.capture.functions import record
    from provenance.capture.wrap import instrument, uninstrument, wrap

__version__ = "0.1.0"

# Exported name, and the module in which it lives.
_FACE = {
    "environment": "provenance.capture.face",
    "flush": "provenance.capture.face",
    "init": "provenance.capture.face",
    "instrument": "provenance.capture.wrap",
    "record": "provenance.capture.functions",
    "run": "provenance.capture.call",
    "uninstrument": "provenance.capture.wrap",
    "wrap": "provenance.capture.wrap",
}
__all__ = [
    "__version__",
    "environment",
    "flush",
    "init",
    "instrument",
    "record",
    "run",
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
