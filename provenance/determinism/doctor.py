"""What would matter most here: small pure rules over a process, a model's folder and a store, each with its cure.

A rule looks at what was read and says what stands there, why that matters on this machine, what the cure costs and the
line to write. Rules that ask for something this machine lacks are counted and not told. Nothing is read or changed
here: ``provenance doctor`` reads, and its ``process`` is a fresh one, as a program of the same shell would be.
"""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from provenance.determinism import traps
from provenance.determinism.mode import CUBLAS, FORBIDDEN
from provenance.facts import Field, State

SERIOUS, WARNING, NOTE = "serious", "warning", "note"
SEVERITIES = (SERIOUS, WARNING, NOTE)
# What cures cost; `docs/determinism.md` shows the same. Figures are of `scripts/bench determinism`, on two CPU cores.
COSTS: dict[str, str] = {
    "mode": "1.05 of a plain `generate` on a CPU; not measured on CUDA",
    "math": "1.23 of a plain `generate` on a CPU, float32, prompts of 64",
    "seeded": "0.26 ms a block; 1.03 of a plain `generate`, which is noise here. Threads take turns",
    "shapes": "1.3 of a prompt alone, 1.2 of full batches: 16 prompts of the tiny model, 8 rows",
    "cuda": "not measured on CUDA",
    "free": "nothing",
}


@dataclass(frozen=True, slots=True)
class Upkeep:
    """What was read of the store and the spool. A number of None was not read, with the reason in ``unread``."""

    database: str = ""
    there: bool = True  # False where nothing has been recorded yet
    mismatch: str = ""  # what is wrong with the schema
    server: bool = False
    capture: str = "full"
    disabled: bool = False
    runs: int | None = None
    partial: int = 0  # calls whose end the recorder could not read
    crashed: int = 0
    alarms: int = 0
    damaged: int = 0  # places of the journal that were no record
    gaps: int = 0  # records that could not be written, by the journal's own word
    holes: int = 0  # records that are missing with no word about them
    waiting: int = 0
    oldest: float = 0.0  # seconds since the oldest waiting segment was written to
    writer: bool = False
    complaints: tuple[str, ...] = ()  # the last lines of the writer's log
    modes: tuple[tuple[str, int, int], ...] = ()  # path, mode, the mode that it should have at most
    free: tuple[tuple[str, int, int], ...] = ()  # path, free bytes, bytes of the disk
    sqlite: str = ""
    key: str = ""  # what is wrong with the key file
    unread: str = ""


@dataclass(frozen=True, slots=True)
class Patient:
    """What was read: fields of the process, what the machine has, a model's facts, and the store's state."""

    fields: Mapping[str, Field] = field(default_factory=dict)
    model: traps.Facts | None = None
    shape: Mapping[str, Any] = field(default_factory=dict)  # the model's config.json
    upkeep: Upkeep | None = None
    locked: bool = True  # a provenance.lock lies in the working directory

    def value(self, name: str) -> Any:
        """Return a field's value, or None where it has none."""
        found = self.fields.get(name)
        return found.value if found is not None and found.state is State.VALUE else None

    def unset(self, name: str) -> bool:
        """Say whether a field is known to be unset."""
        found = self.fields.get(name)
        return found is not None and found.state is State.UNSET

    def has(self, need: str) -> bool:
        """Say whether this machine has what a rule speaks of."""
        count = self.value("gpu.count")
        checks: dict[str, Callable[[], bool]] = {
            "": lambda: True,
            "gpu": lambda: isinstance(count, int) and count > 0,
            "torch": lambda: self.value("torch.version") is not None,
            "mkl": lambda: self.value("torch.blas") == "mkl",
            "vllm": lambda: self.value("lib.vllm.version") is not None,
            "sglang": lambda: self.value("lib.sglang.version") is not None,
            "model": lambda: self.model is not None,
        }
        return checks[need]()


class Hit(NamedTuple):
    """What a rule found here: the evidence, and the line to write."""

    because: str
    write: str
    severity: str = ""  # where it is not the rule's own
    cost: str = ""
    what: str = ""


@dataclass(frozen=True, slots=True)
class Rule:
    """One thing to look for. ``weight`` orders what is equally severe: how often it is the cause, 0 to 5."""

    what: str
    area: str
    severity: str
    weight: int
    find: Callable[[Patient], Iterator[Hit]]
    cost: str
    needs: str = ""


@dataclass(frozen=True, slots=True)
class Finding:
    """What was found: ordered by severity and weight."""

    area: str
    severity: str
    weight: int
    what: str
    because: str
    cost: str
    write: str

    def document(self) -> dict[str, Any]:
        """Return the finding as a document for JSON."""
        return {"area": self.area, "severity": self.severity, "what": self.what, "because": self.because,
                "cost": self.cost, "write": self.write}  # fmt: skip


class Diagnosis(NamedTuple):
    """All findings, what would matter most first, and how many rules did not apply, by what this machine lacks."""

    findings: list[Finding]
    absent: dict[str, int]

    @property
    def bad(self) -> int:
        """Count the findings at or above a warning."""
        return sum(item.severity != NOTE for item in self.findings)


def examine(patient: Patient, more: Iterable[Rule] = ()) -> Diagnosis:
    """Ask every rule that applies here."""
    found: list[Finding] = []
    absent: dict[str, int] = {}
    for rule in (*RULES, *more):
        if not patient.has(rule.needs):
            if rule.needs != "model":
                absent[rule.needs] = absent.get(rule.needs, 0) + 1
            continue
        for hit in rule.find(patient):
            severity, cost = hit.severity or rule.severity, hit.cost or rule.cost
            found.append(Finding(rule.area, severity, rule.weight, hit.what or rule.what, hit.because, cost, hit.write))
    found.sort(key=lambda item: (SEVERITIES.index(item.severity), -item.weight))
    return Diagnosis(found, absent)


# -- the process ------------------------------------------------------------------------------------


def _is(name: str, bad: Callable[[Any], bool], because: str, write: str) -> Callable[[Patient], Iterator[Hit]]:
    """Make a rule's finder for a field with a value that is not good. ``because`` may name the {value}."""

    def find(patient: Patient) -> Iterator[Hit]:
        value = patient.value(name)
        if value is not None and bad(value):
            yield Hit(f"{name} = {value}: {because}", write)

    return find


def _unset(name: str, because: str, write: str) -> Callable[[Patient], Iterator[Hit]]:
    def find(patient: Patient) -> Iterator[Hit]:
        if patient.unset(name):
            yield Hit(f"{name.removeprefix('env.')} is not set: {because}", write)

    return find


def _workspace(patient: Patient) -> Iterator[Hit]:
    name = f"env.{CUBLAS}"
    if patient.unset(name) or (patient.value(name) or ":4096:8") not in (":4096:8", ":16:8"):
        stands = patient.value(name) or "not set"
        yield Hit(f"{CUBLAS} is {stands}: cuBLAS may add in another order where several streams share a workspace, and "
                  "it is read as cuBLAS starts", f"export {CUBLAS}=:4096:8")  # fmt: skip


def _override(patient: Patient) -> Iterator[Hit]:
    for name in FORBIDDEN:
        value = patient.value(f"env.{name}")
        if str(value or "0") not in ("", "0"):
            yield Hit(f"{name} = {value}: it turns TF32 on over every switch, and is read as torch starts",
                      f"unset {name}")  # fmt: skip


def _threads(patient: Patient) -> Iterator[Hit]:
    count, cores = patient.value("torch.num_threads"), patient.value("cpu.count_logical")
    if patient.unset("env.OMP_NUM_THREADS") and count is not None:
        gpu = patient.has("gpu")
        where = "what runs on the CPU adds" if gpu else "sums are split"
        yield Hit(f"OMP_NUM_THREADS is not set: {where} over {count} threads because this machine has {cores} cores, "
                  "and otherwise on a machine with others", f"export OMP_NUM_THREADS={count}",
                  NOTE if gpu else WARNING)  # fmt: skip


def _fpmath(patient: Patient) -> Iterator[Hit]:
    for name in ("ONEDNN_DEFAULT_FPMATH_MODE", "DNNL_DEFAULT_FPMATH_MODE"):
        value = patient.value(f"env.{name}")
        if value is not None and str(value).upper() != "STRICT":
            yield Hit(f"{name} = {value}: float32 products on the CPU are rounded to fewer digits", f"unset {name}")


def _reduced(patient: Patient) -> Iterator[Hit]:
    names = [f"torch.backends.cuda.matmul.allow_{kind}_reduced_precision_reduction" for kind in ("fp16", "bf16")]
    on = [name for name in names if patient.value(name) is True]
    if on:
        yield Hit(
            f"{on[0]} = True: partial sums of a product may be kept in half precision", "provenance.deterministic()"
        )


def _lock(patient: Patient) -> Iterator[Hit]:
    if not patient.locked:
        version = patient.value("torch.version")
        stands = f"torch {version} and" if version else ""
        yield Hit(f"no provenance.lock lies here: {stands} whatever else is installed may change unseen",
                  "provenance lock, and provenance check in CI")  # fmt: skip


# -- the model --------------------------------------------------------------------------------------


def _traps(patient: Patient) -> Iterator[Hit]:
    """Return what `lint` knows of the model's own settings."""
    assert patient.model is not None
    for item in traps.lint(patient.model):
        if item.rule.kind == traps.TRAP:
            because = f"{item.hit.field} = {item.value}: {item.hit.because}"
            yield Hit(because, item.hit.write, cost=item.rule.cost, what=item.rule.name)


def _own_code(patient: Patient) -> Iterator[Hit]:
    if patient.shape.get("auto_map"):
        parts = ", ".join(sorted(map(str, patient.shape["auto_map"])))
        yield Hit(f"config.json names code of its own for {parts}: an update of the checkpoint changes the function",
                  "revision='COMMIT' where it is loaded; provenance lock --model PATH")  # fmt: skip


def _coarse(patient: Patient) -> Iterator[Hit]:
    dtype = str(patient.shape.get("dtype") or patient.shape.get("torch_dtype") or "")
    if dtype in ("bfloat16", "float16", "half"):
        digits = 8 if dtype == "bfloat16" else 11
        yield Hit(f"the weights are {dtype}, of {digits} binary digits: two best tokens are often equal to the last of "
                  "them, and a batch turns such a choice", "provenance probe determinism PATH")  # fmt: skip


def _short(value: Any) -> bool:
    return str(value) != "highest"


STEADY = "provenance.deterministic(), or provenance run --deterministic -- ..."
RULES: tuple[Rule, ...] = (
    Rule("TF32 forced on", "process", WARNING, 5, _override, COSTS["cuda"], "gpu"),
    Rule("cuBLAS workspace", "process", WARNING, 4, _workspace, COSTS["cuda"], "gpu"),
    Rule("algorithms picked by timing", "process", WARNING, 4, _is("torch.backends.cudnn.benchmark", bool,
         "cuDNN times its algorithms, and another may win next time", STEADY), COSTS["mode"], "gpu"),
    Rule("tuning by timing", "process", WARNING, 3, _is("env.PYTORCH_TUNABLEOP_ENABLED", lambda v: str(v) == "1",
         "products are timed and chosen", "unset PYTORCH_TUNABLEOP_ENABLED"), COSTS["cuda"], "gpu"),
    Rule("TF32 in convolutions", "process", NOTE, 3, _is("torch.backends.cudnn.allow_tf32", bool,
         "torch starts with it on: 10 binary digits inside float32 convolutions", STEADY), COSTS["cuda"], "gpu"),
    Rule("half-precision sums", "process", NOTE, 3, _reduced, COSTS["cuda"], "gpu"),
    Rule("operators that add in any order", "process", NOTE, 3, _is("torch.deterministic_algorithms",
         lambda v: v is False, "scatter, index_add and others add as they come", STEADY), COSTS["mode"], "gpu"),
    Rule("TF32 in the CUDA libraries", "process", NOTE, 2, _unset("env.NVIDIA_TF32_OVERRIDE",
         "a library below torch may use TF32", "export NVIDIA_TF32_OVERRIDE=0"), COSTS["cuda"], "gpu"),
    Rule("precision of float32 products", "process", WARNING, 4, _is("torch.float32_matmul_precision", _short,
         "float32 products are rounded to fewer digits", STEADY), COSTS["mode"], "torch"),
    Rule("precision of float32 products", "process", WARNING, 3, _fpmath, COSTS["free"]),
    Rule("threads follow the cores", "process", WARNING, 3, _threads, "speed, if it is below the cores", "torch"),
    Rule("products differ by processor", "process", NOTE, 1, _unset("env.MKL_CBWR",
         "MKL chooses its code by processor, so another machine can round otherwise",
         "export MKL_CBWR=COMPATIBLE"), "speed of products; not measured here", "mkl"),
    Rule("order of sets of strings", "process", NOTE, 1, _unset("env.PYTHONHASHSEED",
         "each process orders sets of strings its own way, which matters where a prompt is made from one",
         "provenance run --seed N -- ..."), COSTS["free"]),
    Rule("the engine's own mode", "process", NOTE, 4, _unset("env.VLLM_BATCH_INVARIANT",
         "vLLM answers a prompt by its company", "export VLLM_BATCH_INVARIANT=1"), "the engine's", "vllm"),
    Rule("the engine's own mode", "process", NOTE, 4, _unset("env.SGLANG_ENABLE_DETERMINISTIC_INFERENCE",
         "SGLang answers a prompt by its company", "--enable-deterministic-inference"), "the engine's", "sglang"),
    Rule("nothing pinned", "process", NOTE, 2, _lock, COSTS["free"]),
    Rule("a trap", "model", WARNING, 4, _traps, COSTS["free"], "model"),
    Rule("code that comes with the checkpoint", "model", WARNING, 3, _own_code, COSTS["free"], "model"),
    Rule("coarse weights", "model", NOTE, 2, _coarse, f"of fixed shapes: {COSTS['shapes']}", "model"),
)  # fmt: skip
