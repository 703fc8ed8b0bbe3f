"""The deterministic mode: every switch of the table held, told in a report, and put back.

    with provenance.deterministic() as report:      # a block
        model.generate(ids)
    report = provenance.deterministic(strict=True).enable()     # a switch, for the rest of the process or to disable()
    print(report)

It makes repeats of one call equal. It does not make a prompt independent of its batch: for that see
``provenance.determinism.batches``.
"""

import importlib.util
import os
import re
import sys
import threading
from types import TracebackType
from typing import Any, NamedTuple

from provenance.determinism import switches
from provenance.determinism.report import ABSENT, ALREADY, LATE, SET, Kept, Report, started_with
from provenance.errors import BadSetting, NotDeterministic
from provenance.fingerprint.reading import Moot

NO_FORM = re.compile(r"^(.+?) does not have a deterministic implementation")
CUBLAS, COMPILER = "CUBLAS_WORKSPACE_CONFIG", "TORCHINDUCTOR_DETERMINISTIC"
INVARIANT = "batch_invariant_ops"


class Variable(NamedTuple):
    """A variable of the environment that is read once, by whom, and the values that will do."""

    value: str
    accepted: tuple[str, ...]
    reader: str
    needs: str = ""  # an engine: the variable is left to whoever starts it


VARIABLES: dict[str, Variable] = {
    CUBLAS: Variable(":4096:8", (":4096:8", ":16:8"), "cuBLAS, as it starts"),
    "NVIDIA_TF32_OVERRIDE": Variable("0", ("0",), "the CUDA libraries, as they start"),
    COMPILER: Variable("1", ("1",), "the compiler, as it is loaded"),
    "VLLM_BATCH_INVARIANT": Variable("1", ("1",), "vLLM, as it starts", "vllm"),
    "SGLANG_ENABLE_DETERMINISTIC_INFERENCE": Variable(
        "1", ("1", "true", "True"), "SGLang; its argument --enable-deterministic-inference sets it", "sglang"
    ),
}
# Would undo what is held: it must not stand.
FORBIDDEN = ("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE",)


def variables(seed: int | None = None) -> dict[str, str]:
    """Return the variables that must stand before a process starts, for the one that starts it.

    >>> variables(7)["PYTHONHASHSEED"], variables()["CUBLAS_WORKSPACE_CONFIG"]
    ('7', ':4096:8')
    """
    found = {name: item.value for name, item in VARIABLES.items() if not item.needs}
    found["PYTHONHASHSEED"] = str((seed or 0) % 2**32)
    return found


# -- holding ----------------------------------------------------------------------------------------

_lock = threading.RLock()
_kept = Kept()


class deterministic:  # noqa: N801 - it is written as a word: `with provenance.deterministic():`
    """Hold every switch that makes repeats of a call equal, and put them back.

    As a block, ``with provenance.deterministic() as report:``, or as a switch, ``.enable()`` and ``.disable()``. What
    has no deterministic form warns; with ``strict`` it raises NotDeterministic, which names the operator (under
    ``enable()`` it is torch's own RuntimeError). ``attention="math"`` allows only the plain attention kernel: slower.
    ``batch_invariant=True`` also puts in the operators of the package batch_invariant_ops, where it is installed.

    Switches belong to the process. Blocks may be nested, and those of several threads may end in any order: what stood
    before the first comes back with the last. A block inside a strict one stays strict.
    """

    def __init__(self, strict: bool = False, *, attention: str = "", batch_invariant: bool = False) -> None:
        if attention not in ("", "math"):
            raise BadSetting(f"attention is {attention!r}; it can be 'math', the plain kernel, or left out.")
        self.strict = strict
        self.math = attention == "math"
        self.batch_invariant = batch_invariant
        self._mine: list[list[Any]] = []

    def enable(self) -> Report:
        """Hold the switches until ``disable()``, and report what became of each."""
        report = Report()
        with _lock:
            torch = sys.modules.get("torch")
            before = _State(torch)
            entry = _kept.push(before)
            try:
                if torch is not None:
                    for switch in switches.chosen(self.strict, self.math):
                        _hold(report, switch, torch)
                    self._operators(report)
                else:
                    report.add("torch", ABSENT, None, "torch is not loaded; import it first")
                _environment(report, torch)
            except BaseException:
                _put_back(_kept.pop(entry))
                raise
            self._mine.append(entry)
        return report

    def disable(self) -> None:
        """Put back what stood before ``enable()``. Without one it does nothing."""
        with _lock:
            if self._mine:
                _put_back(_kept.pop(self._mine.pop()))

    def __enter__(self) -> Report:
        return self.enable()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.disable()
        found = NO_FORM.match(str(error)) if self.strict and isinstance(error, RuntimeError) else None
        if found is not None and not isinstance(error, NotDeterministic):
            raise NotDeterministic(found.group(1)) from error

    def _operators(self, report: Report) -> None:
        """Put in the batch-invariant operators, if they are wanted and there."""
        if not self.batch_invariant:
            return
        if INVARIANT not in sys.modules and importlib.util.find_spec(INVARIANT) is None:
            report.add(INVARIANT, ABSENT, None, "the package is not installed")
            return
        try:
            import batch_invariant_ops as package  # type: ignore[import-not-found,unused-ignore]

            if package.is_batch_invariant_mode_enabled():
                report.add(INVARIANT, ALREADY, value=True)
                return
            package.enable_batch_invariant_mode()
        except Exception as error:
            report.add(INVARIANT, LATE, None, f"{type(error).__name__}: {error}")
            return
        report.add(INVARIANT, SET, value=True)


class _State:
    """What has to be put back: switches, two variables, and whether the invariant operators were in."""

    def __init__(self, torch: Any) -> None:
        self.switches = switches.snapshot(torch) if torch is not None else {}
        self.environ = {name: os.environ.get(name) for name in (CUBLAS, COMPILER)}
        self.invariant = _invariant()


def _invariant() -> bool | None:
    package = sys.modules.get(INVARIANT)
    return bool(package.is_batch_invariant_mode_enabled()) if package is not None else None


def _put_back(before: "_State | None") -> None:
    if before is None:
        return
    if _invariant() and not before.invariant:
        sys.modules[INVARIANT].disable_batch_invariant_mode()
    for name, value in before.environ.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value
    torch = sys.modules.get("torch")
    if torch is not None:
        switches.restore(torch, before.switches)


def _hold(report: Report, switch: switches.Switch, torch: Any) -> None:
    """Bring one switch to its steady value, and say what became of it."""
    try:
        value = switch.read(torch)
    except (Moot, AttributeError) as why:
        text = str(why) if isinstance(why, Moot) else "this torch has no such switch"
        report.add(switch.name, ABSENT, None, text)
        return
    except RuntimeError as error:
        report.add(switch.name, LATE, None, f"it cannot be read: {error}")
        return
    if switch.is_steady(value):
        report.add(switch.name, ALREADY, _shown(value))
        return
    if switch.asked == "warn" and torch.are_deterministic_algorithms_enabled():
        report.add(switch.name, ALREADY, value, "strict already, which is more")
        return
    try:
        switch.write(torch, switch.steady)
    except Exception as error:  # torch.backends can be frozen
        report.add(switch.name, LATE, _shown(value), f"{type(error).__name__}: {error}")
        return
    report.add(switch.name, SET, _shown(switch.steady), switch.why)


def _shown(value: Any) -> Any:
    """Return the telling part of a value: the rest of a tuple is what has to come back with it."""
    return value[0] if isinstance(value, tuple) else value


# -- the environment --------------------------------------------------------------------------------


def _environment(report: Report, torch: Any) -> None:
    cuda = torch is not None and (torch.version.cuda is not None or torch.version.hip is not None)
    # Read by something that is not running yet: then it is in time.
    waiting = {CUBLAS: cuda and not torch.cuda.is_initialized(), COMPILER: "torch._inductor.config" not in sys.modules}
    for name, item in VARIABLES.items():
        field = f"env.{name}"
        stood = started_with(name)
        if item.needs and item.needs not in sys.modules:
            report.add(field, ABSENT, None, f"{item.needs} is not loaded; for it, set {name}={item.value} at its start")
        elif name in {CUBLAS, "NVIDIA_TF32_OVERRIDE"} and not cuda:
            report.add(field, ABSENT, None, "torch is built without CUDA" if torch is not None else "no torch")
        elif stood in item.accepted:
            report.add(field, ALREADY, stood)
        elif waiting.get(name):
            os.environ[name] = item.value
            report.add(field, SET, item.value, f"it will be read by {item.reader}")
        elif name == COMPILER:
            report.add(field, ALREADY, None, "the compiler is loaded, and torch.inductor.deterministic is held instead")
        else:
            how = "set it" if item.needs else "`provenance run --deterministic -- ...` sets it"
            report.add(field, LATE, stood, f"read by {item.reader}; {how} in time")
    for name in FORBIDDEN:
        if os.environ.get(name, "0") not in {"", "0"}:
            report.add(f"env.{name}", LATE, os.environ[name], "it turns TF32 on, and is read as torch starts: unset it")
