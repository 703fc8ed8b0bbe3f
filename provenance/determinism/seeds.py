"""Seeds and random states: one seed for everything, a block that leaves no trace, and a seed for each call.

    provenance.seed_all(42)
    with provenance.seeded(42):                    # every generator seeded, and afterwards as it was
        model.generate(ids, do_sample=True)
    with provenance.seeded.call(42, "prompt 7"):   # the same draw for this prompt, whatever ran before it
        model.generate(ids, do_sample=True)

Only what the process has loaded is seeded. A device that is not in use yet is not woken up: its seed waits, as torch
itself lets it wait.
"""

import functools
import hashlib
import os
import random
import sys
import threading
from collections.abc import Callable
from types import TracebackType
from typing import Any, Self, TypeVar

from provenance.determinism.report import ABSENT, ALREADY, LATE, SET, Kept, Report, started_with
from provenance.errors import BadSetting

WORD = 2**32  # NumPy takes seeds below this
MOST = 2**63
LAZY = ("cuda", "xpu")
F = TypeVar("F", bound=Callable[..., Any])


def seed_all(seed: int) -> Report:
    """Seed Python, NumPy and torch on every device, as far as they are loaded, and report what was seeded.

    ``seed`` is an integer from 0 to 2^63 - 1; NumPy takes its lower 32 bits. ``PYTHONHASHSEED`` is read when Python
    starts and can only be reported: ``provenance run --seed 42 -- python app.py`` sets it in time.

    Raises BadSetting for anything else.
    """
    _checked(seed)
    report = Report()
    random.seed(seed)
    report.add("rng.python", SET, seed)
    numpy = sys.modules.get("numpy")
    if numpy is None:
        report.add("rng.numpy", ABSENT, None, "numpy is not loaded")
    else:
        numpy.random.seed(seed % WORD)
        folded = "" if seed < WORD else "numpy takes 32 bits: the lower ones"
        report.add("rng.numpy", SET, seed % WORD, folded)
    torch = sys.modules.get("torch")
    if torch is None:
        for name in ("cpu", "cuda", "mps", "xpu"):
            report.add(f"rng.torch_{name}", ABSENT, None, "torch is not loaded")
    else:
        torch.manual_seed(seed)
        report.add("rng.torch_cpu", SET, seed)
        for name in ("cuda", "mps", "xpu"):
            _tell_device(report, torch, name, seed)
    if "transformers" in sys.modules:
        report.add("rng.transformers", ALREADY, seed, "it draws from the generators above and has none of its own")
    _tell_hashing(report)
    return report


def _tell_device(report: Report, torch: Any, kind: str, seed: int) -> None:
    name = f"rng.torch_{kind}"
    builds: dict[str, Callable[[], Any]] = {
        "cuda": lambda: torch.version.cuda is not None or torch.version.hip is not None,
        "mps": lambda: torch.backends.mps.is_available(),
        "xpu": lambda: torch.xpu._is_compiled(),
    }
    try:
        there = bool(builds[kind]())
    except AttributeError:
        there = False
    if not there:
        report.add(name, ABSENT, None, f"this torch has no {kind.upper()}")
    elif kind in LAZY and not getattr(torch, kind).is_initialized():
        report.add(name, SET, seed, "the device is not in use yet: the seed takes effect when it is")
    else:
        report.add(name, SET, seed)


def _tell_hashing(report: Report) -> None:
    """Say whether the order of sets of strings is the same in every process."""
    name, stood, now = "env.PYTHONHASHSEED", started_with("PYTHONHASHSEED"), os.environ.get("PYTHONHASHSEED")
    if not sys.flags.hash_randomization:
        report.add(name, ALREADY, "0", "hashes of strings are fixed")
    elif stood and stood != "random":
        report.add(name, ALREADY, stood, "hashes of strings are fixed")
    else:
        late = "it was set after Python had started" if now else "Python reads it as it starts"
        report.add(name, LATE, None, f"{late}; `provenance run --seed N -- ...` sets it in time")


def _checked(seed: object) -> None:
    if isinstance(seed, bool) or not isinstance(seed, int) or not 0 <= seed < MOST:
        raise BadSetting(f"the seed is {seed!r}; it must be an integer from 0 to 2^63 - 1.")


# -- states -----------------------------------------------------------------------------------------


def states() -> dict[str, Any]:
    """Read the state of every generator that is loaded and in use. Wakes no device."""
    found: dict[str, Any] = {"python": random.getstate()}
    numpy, torch = sys.modules.get("numpy"), sys.modules.get("torch")
    if numpy is not None:
        found["numpy"] = numpy.random.get_state(legacy=False)
    if torch is None:
        return found
    found["cpu"] = torch.get_rng_state()
    for kind in LAZY:
        module = getattr(torch, kind, None)
        if module is None:
            continue
        if module.is_initialized():
            found[kind] = module.get_rng_state_all()
        elif hasattr(module, "_lazy_seed_tracker"):
            found[f"{kind} waiting"] = dict(vars(module._lazy_seed_tracker))
    if torch.backends.mps.is_available():
        found["mps"] = torch.mps.get_rng_state()
    return found


def restore(found: dict[str, Any]) -> None:
    """Put every state back that was read. One that fails does not keep the others from coming back."""
    torch = sys.modules.get("torch")
    ways: dict[str, Callable[[Any], object]] = {
        "python": random.setstate, "numpy": lambda state: sys.modules["numpy"].random.set_state(state)
    }  # fmt: skip
    if torch is not None:
        ways |= {"cpu": torch.set_rng_state, "mps": lambda state: torch.mps.set_rng_state(state)}
        for kind in LAZY:
            ways[kind] = functools.partial(_set_all, torch, kind)
            ways[f"{kind} waiting"] = functools.partial(_unwait, torch, kind)
    failed: list[Exception] = []
    for name, state in found.items():
        try:
            ways[name](state)
        except Exception as error:
            failed.append(error)
    if failed:
        raise failed[0]


def plain(found: dict[str, Any]) -> dict[str, Any]:
    """Return the states that are numbers: without the seeds that wait for a device, which hold code."""
    return {name: value for name, value in found.items() if not name.endswith(" waiting")}


def digest(found: dict[str, Any]) -> bytes:
    """Return 32 bytes that are equal if, and only if, all states are; seeds that wait for a device are no state yet."""
    found = plain(found)
    state = hashlib.sha256()
    for name in sorted(found):
        for part in found[name] if isinstance(found[name], list) else [found[name]]:
            state.update(name.encode() + b"\0" + _bytes(part))
    return state.digest()


def _bytes(part: Any) -> bytes:
    if hasattr(part, "data_ptr"):
        return bytes(part.cpu().tolist())
    if isinstance(part, dict):  # NumPy's: a repr would leave out the middle of its numbers
        return b"\0".join(f"{key}=".encode() + _bytes(item) for key, item in part.items())
    return part.tobytes() if hasattr(part, "tobytes") else repr(part).encode()


def _set_all(torch: Any, kind: str, state: Any) -> None:
    getattr(torch, kind).set_rng_state_all(state)


def _unwait(torch: Any, kind: str, before: dict[str, Any]) -> None:
    """Put back the seeds that waited for a device. If it has come into use since, give it what it would have had."""
    module = getattr(torch, kind)
    if not module.is_initialized():
        vars(module._lazy_seed_tracker).update(before)
        return
    waiting = [item for item in before.get("call_order", ()) if item is not None]
    for call, _ in waiting:
        call()
    if not waiting:
        module.seed_all()  # as torch begins where nobody gave a seed


# -- the block --------------------------------------------------------------------------------------

# The generators are global: two threads that draw from them at once mix their draws. Blocks of threads take turns.
_turn = threading.RLock()
_kept = Kept()


def inside() -> bool:
    """Say whether the calling thread is inside a `seeded` block: what it draws there can be drawn again."""
    return _turn._is_owned()  # type: ignore[attr-defined,no-any-return]


class seeded:  # noqa: N801 - it is written as a word: `with provenance.seeded(42):`
    """A block in which every generator starts from a seed, and after which all of them are as they were.

    Also after an exception, nested, and as a decorator. Blocks of several threads wait for one another, since the
    generators belong to the process: a block must not wait for a thread that opens one. Tasks of one thread that
    overlap inside such blocks mix their draws, and the states still come back. What is imported inside the block is
    neither seeded nor restored.
    """

    def __init__(self, seed: int) -> None:
        _checked(seed)
        self.seed = seed
        self.report: Report | None = None
        self._mine: list[list[Any]] = []

    @staticmethod
    def derive(seed: int, *parts: str | int) -> int:
        """Return the seed of one call, from one seed and whatever names the call: a prompt's index, a sample's number.

        SHA-256 over a tag, the seed and the parts, cut to 31 bits and never 0: every engine takes such a seed, and
        none reads it as "choose one". The rule is a contract; golden values hold it.

        >>> seeded.derive(42, 0), seeded.derive(42, 1), seeded.derive(42, "1")
        (862082301, 1348685507, 1212939631)
        """
        _checked(seed)
        text = "\0".join(["provenance/seed/1", str(seed), *(f"{type(part).__name__}:{part}" for part in parts)])
        number = int.from_bytes(hashlib.sha256(text.encode("utf-8", "surrogatepass")).digest()[:8], "big")
        return number % (2**31 - 1) + 1

    @classmethod
    def call(cls, seed: int, *parts: str | int) -> "seeded":
        """Return the block for one call: its draws depend on the seed and the parts, and on nothing that ran before."""
        return cls(cls.derive(seed, *parts))

    def __enter__(self) -> Self:
        _turn.acquire()
        try:
            entry = _kept.push(states())
            try:
                self.report = seed_all(self.seed)
            except BaseException:
                restore(_kept.pop(entry) or {})
                raise
        except BaseException:
            _turn.release()
            raise
        self._mine.append(entry)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        try:
            restore(_kept.pop(self._mine.pop()) or {})
        finally:
            _turn.release()

    def __call__(self, function: F) -> F:
        """Run a function inside such a block, each time it is called."""

        @functools.wraps(function)
        def inside(*args: Any, **kwargs: Any) -> Any:
            with type(self)(self.seed):
                return function(*args, **kwargs)

        return inside  # type: ignore[return-value]
