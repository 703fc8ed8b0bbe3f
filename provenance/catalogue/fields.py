"""The declaration of a field, and how to find the one that fits a name.

Each field is one line in a table of this room. ``effect`` says what a difference in it can do: ``semantic``
another mathematical function, ``numeric`` the same function with other rounding, ``random`` another random
stream, ``none`` nothing: context. ``prior`` (0 to 5) is how often it is the cause in practice, a judgement to
start from. ``active_when`` is the condition under which it can matter at all; `explain.conditions` evaluates
it.
"""

import re
from functools import lru_cache
from importlib import import_module
from typing import NamedTuple

VERSION = 1
NAME = re.compile(r"[a-z][a-z_]*\.[A-Za-z0-9_.]{1,120}")
# Declared, and yet for others to fill: what only the caller, or a collector of an installed package, can know.
OPEN = ("engine.", "service.provider", "service.output_normalisation", "service.response_cache_hit",
        "context.user_label", "input.retrieval_context_digest", "vllm.", "sglang.", "tensorrt_llm.", "llama_cpp.",
        "batch.running_requests", "batch.chunked_prefill_boundaries")  # fmt: skip
CLOSED = ("engine.name", "engine.environ_digest", "weights.", "context.", "collector.")
TABLES = ("hardware", "flags", "environ", "model", "call", "vllm", "engines")
EFFECTS = ("semantic", "numeric", "random", "none")


class Spec(NamedTuple):
    """One field. ``N`` in a name stands for a device index, ``NAME`` for the name of a tensor or a library."""

    name: str
    group: str
    dimension: str
    scope: str  # process, model or call
    effect: str
    prior: int
    active_when: str
    toggle: str
    help: str


# A field that somebody set at run time is a suspect like any other, at the end of the line.
STRANGER = Spec(
    "*", "other", "parameters", "call", "semantic", 1, "always", "", "a field that the catalogue does not know"
)


@lru_cache(maxsize=1)
def table() -> dict[str, Spec]:
    """Return every declared field by name. The tables are read when first asked for."""
    modules = (import_module(f"provenance.catalogue.{name}") for name in TABLES)
    return {spec.name: spec for module in modules for spec in module.FIELDS}


@lru_cache(maxsize=4096)
def spec(name: str) -> Spec:
    """Find the declaration of a field.

    >>> spec("gpu.1.name").prior, spec("generation.top_p").effect, spec("mine.own").group
    (5, 'semantic', 'other')
    """
    declared = table()
    if name in declared:
        return declared[name]
    for pattern, candidate in _patterns():
        if pattern.fullmatch(name):
            return candidate
    return STRANGER._replace(name=name)


def why_closed(name: str) -> str:
    """Say why others than the recorder itself may not fill a field, or return an empty text.

    >>> why_closed("engine.kv_split"), why_closed("mine.own"), why_closed("gpu.0.name")
    ('', '', 'it is read by provenance itself')
    >>> why_closed("Speed")
    'a field is named group.name, in ASCII letters, digits and _, like engine.kv_split'
    """
    if not NAME.fullmatch(name):
        return "a field is named group.name, in ASCII letters, digits and _, like engine.kv_split"
    if name.startswith(OPEN) and name not in CLOSED and ".sampling." not in name:
        return ""
    closed = name.startswith(CLOSED) or spec(name).group != STRANGER.group
    return "it is read by provenance itself" if closed else ""


@lru_cache(maxsize=1)
def _patterns() -> tuple[tuple[re.Pattern[str], Spec], ...]:
    found = []
    for name, candidate in table().items():
        parts = name.split(".")
        if "N" in parts or "NAME" in parts:
            pattern = r"\.".join({"N": r"[^.]+", "NAME": r".+"}.get(part, re.escape(part)) for part in parts)
            found.append((re.compile(pattern), candidate))
    return tuple(found)
