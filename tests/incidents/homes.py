"""Where the deciding facts of public reports are recorded: the reports, the table of homes, and who reads a field.

`tests/incidents/cases.jsonl` holds the reports as facts, `homes.tsv` what each of their facts is called here. Whether a
field is really read is not written in the table: it is looked up in the code that reads.
"""

import json
import re
from functools import lru_cache
from importlib import import_module
from pathlib import Path
from typing import NamedTuple

from provenance.catalogue.fields import table
from provenance.integrity.secrets import ARGUMENTS

HERE = Path(__file__).parent
ROOT = HERE.parents[1]
READ, CALLER, DERIVED, NOWHERE, UNREAD = "read", "caller", "derived", "nowhere", "declared, not read yet"
COLLECTED = (READ, DERIVED)
ENGINES = ("vllm", "engines")  # tables of the catalogue whose fields the engines' readers take as they stand there
BY_NAME = "provenance/fingerprint/engines.py"
READERS = ("fingerprint", "capture", "store")
OBJECTS = (
    "assistant_model",
    "custom_generate",
    "logits_processor",
    "stopping_criteria",
    "prefix_allowed_tokens_fn",
    "negative_prompt_ids",
    "synced_gpus",
    "streamer",
)


class Case(NamedTuple):
    """One public report."""

    id: str
    source: str
    runtime: str
    symptom: str
    root_cause: str
    dimension: str
    deciding: tuple[str, ...]
    canonical: tuple[str, ...]
    confidence: str


class Home(NamedTuple):
    """Where one deciding fact of a report is recorded: a field, a derived thing, or nowhere."""

    word: str
    field: str  # empty where it is no field
    how: str
    derived: str
    reader: str
    note: str


@lru_cache(maxsize=8)
def cases(path: Path = HERE / "cases.jsonl") -> tuple[Case, ...]:
    """Read the reports."""
    found = []
    for line in path.read_text(encoding="utf-8").splitlines():
        form = json.loads(line)
        deciding, canonical = (tuple(form[key]) for key in ("deciding_fields", "canonical_fields"))
        found.append(
            Case(
                form["id"], form["source"], form["runtime"], form["symptom"], form["root_cause"], form["dimension"],
                deciding, canonical, form["cause_confidence"],
            )
        )  # fmt: skip
    return tuple(found)


@lru_cache(maxsize=1)
def rows() -> dict[tuple[str, str], tuple[str, str, str]]:
    """Read the table: (word, runtime) to (home, how, note)."""
    found = {}
    for line in (HERE / "homes.tsv").read_text(encoding="utf-8").splitlines():
        if line and not line.startswith("#"):
            word, runtime, home, how, note = (*line.split("\t"), "", "")[:5]
            assert (word, runtime) not in found, f"{word} stands twice"
            found[word, runtime] = (home, how, note)
    return found


def home(word: str, runtime: str) -> Home:
    """Find where a fact of a report is recorded. A word that is the name of one of our fields is its own home."""
    candidates = [(name, entry) for name, entry in rows().items() if name[0] == word and name[1] in runtime.lower()]
    if not candidates:
        package = f"lib.{word.removeprefix('package.')}.version"
        place = next((name for name in (word, package) if name in table()), "")
        if not place:
            raise KeyError(f"{word} has no line in homes.tsv")
        return _home(word, place, READ, "")
    _, (place, how, note) = max(candidates, key=lambda item: len(item[0][1]))
    return _home(word, place, how, note)


def has_home(word: str, runtime: str) -> bool:
    """Say whether a word of a report, perhaps of another set of reports, is known here."""
    try:
        home(word, runtime)
    except KeyError:
        return False
    return True


def _home(word: str, place: str, how: str, note: str) -> Home:
    place = next((name for name in place.split("|") if name in table()), place)
    if place == "-":
        return Home(word, "", NOWHERE, "", "", note)
    if place.startswith("derived:"):
        return Home(word, "", DERIVED, place.removeprefix("derived:"), "", note or how)
    reader = read_by(place)
    if how == CALLER:
        return Home(word, place, CALLER, "", reader, note)
    return Home(word, place, READ if reader else UNREAD, "", reader, note)


# -- who reads a field --------------------------------------------------------------------------------


@lru_cache(maxsize=1)
def _sources() -> dict[str, str]:
    files = [path for room in READERS for path in sorted((ROOT / "provenance" / room).glob("*.py"))]
    return {str(path.relative_to(ROOT)): path.read_text(encoding="utf-8") for path in files}


@lru_cache(maxsize=1)
def recorded() -> frozenset[str]:
    """Name the fields that stand with a value, or as unset or moot, in a run that was really recorded."""
    form = json.loads((HERE / "base.json").read_text(encoding="utf-8"))
    return frozenset(name for name, item in form["fields"].items() if item.get("state") != "unknown")


def read_by(name: str) -> str:
    """Return the file that reads a field, or an empty text where none does."""
    declared = table()[name]
    if declared.name.startswith("env."):
        return "provenance/fingerprint/environ.py"
    if re.fullmatch(r"lib\..*\.version", name):
        return "provenance/fingerprint/frameworks.py"
    front, _, rest = name.partition(".N.")
    parts = {"gpu": "gpu", "adapters": "identity", "xpu": "platforms"}
    if rest and front in parts:
        path = f"provenance/fingerprint/{parts[front]}.py"
        return path if f'"{rest}"' in _sources()[path] or f'}}.{rest}"' in _sources()[path] else ""
    if name.startswith("rng.torch_"):
        return "provenance/capture/moment.py" if "_state_sha256" in _sources()["provenance/capture/moment.py"] else ""
    if name in (ARGUMENTS, "self.NAME"):
        return "provenance/capture/functions.py"
    if name.startswith("draft."):
        return "provenance/capture/models.py"
    if name in ("files.NAME", "loaded.NAME.path"):
        return f"provenance/fingerprint/{'checkpoint' if name[0] == 'f' else 'loaded'}.py"
    if name.removeprefix("generation.") in OBJECTS:
        return "provenance/capture/generation.py"
    for path, text in _sources().items():
        if f'"{name}"' in text:
            return path
    if name.startswith(("loaded.", "torch.backends.", "torch.inductor.")) and name.partition(".")[0] in (
        "loaded",
        "torch",
    ):
        return _built(name)
    if name in recorded():
        return (
            "provenance/capture/generation.py" if declared.group == "generation" else "provenance/fingerprint/model.py"
        )
    return _engine(name)


def _built(name: str) -> str:
    """Find a reader whose table holds the end of a name: its beginning is put before it in code."""
    from provenance.fingerprint import flags, loaded

    if name.startswith("loaded."):
        return "provenance/fingerprint/loaded.py" if name == "loaded.NAME" or name[7:] in loaded.WATCHED else ""
    return "provenance/fingerprint/flags.py" if name in {**flags.SWITCHES, **flags.COMPILER} else ""


def _engine(name: str) -> str:
    """Find the reader of an engine's or a service's field.

    Those of vLLM, SGLang and TensorRT-LLM are read by the catalogue's own list; of the others the last part stands in a table.
    """
    modules = (import_module(f"provenance.catalogue.{item}") for item in ENGINES)
    if not any(spec.name == name for module in modules for spec in module.FIELDS):
        return ""
    if name.startswith(("vllm.", "sglang.", "tensorrt_llm.")) or BY_NAME not in _sources():
        return BY_NAME
    last = name.rpartition(".")[2]
    return next(
        (path for path, text in _sources().items() if re.search(rf'["\s]{last}["\s]', text) and not _ours(path)), ""
    )


def _ours(path: str) -> bool:
    return path.startswith("provenance/explain/")


# -- shares -------------------------------------------------------------------------------------------


class Shares(NamedTuple):
    """How many of the deciding facts have a home, and how many are collected without the caller's help."""

    facts: int
    homed: int
    collected: int
    firsts: int
    firsts_homed: int
    firsts_collected: int


def shares(found: tuple[Case, ...] | None = None) -> Shares:
    """Count over every case: all deciding facts, and those that a case names first."""
    homes = [[home(word, case.runtime) for word in case.deciding] for case in found or cases()]
    every, first = [item for part in homes for item in part], [part[0] for part in homes]
    return Shares(*(count(part) for part in (every, first) for count in (len, _homed, _collected)))


def _homed(part: list[Home]) -> int:
    return sum(item.how != NOWHERE for item in part)


def _collected(part: list[Home]) -> int:
    return sum(item.how in COLLECTED for item in part)
