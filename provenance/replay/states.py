"""The process as the recorded call found it: switches and random states, restored for a block and put back after it.

A state that was kept is written back as it was. Where only a seed was kept, the seed is tried, and counts only if the
state that it makes has the digest that was recorded.
"""

import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from provenance.capture.evidence import tensor_bytes
from provenance.determinism import seeds, switches
from provenance.facts import Run
from provenance.fingerprint import flags
from provenance.fingerprint.reading import Moot
from provenance.integrity.digests import file_digest
from provenance.replay.plan import ASKED, Lost, Plan, generators, value

Write = Callable[[Any, Any], object]


def _type(torch: Any, name: Any) -> Any:
    """Return a type of torch by its name, with or without the word torch in front."""
    return getattr(torch, str(name).removeprefix("torch."))


# The switches of a process that can be set while it runs, with what sets them. Where the table of steady switches reads
# what the fingerprint reads, its own writer serves.
WRITERS: dict[str, Write] = {
    **{item.name: item.write for item in switches.TABLE if flags.SWITCHES.get(item.name) is item.read},
    "torch.num_threads": lambda torch, number: torch.set_num_threads(int(number)),
    "torch.float32_matmul_precision": lambda torch, word: torch.set_float32_matmul_precision(word),
    "torch.backends.cudnn.allow_tf32": lambda torch, on: setattr(torch.backends.cudnn, "allow_tf32", on),
    "torch.backends.cudnn.enabled": lambda torch, on: setattr(torch.backends.cudnn, "enabled", on),
    "torch.backends.mkldnn.enabled": lambda torch, on: setattr(torch.backends.mkldnn, "enabled", on),
    "torch.backends.mha.fastpath_enabled": lambda torch, on: torch.backends.mha.set_fastpath_enabled(on),
    "torch.default_dtype": lambda torch, name: torch.set_default_dtype(_type(torch, name)),
    "torch.flush_denormal": lambda torch, on: torch.set_flush_denormal(on),
}
AUTOCAST = ("cpu", "cuda")


@contextmanager
def held(run: Run, plan: Plan, own_switches: bool = False) -> Iterator[list[Lost]]:
    """Restore switches and random states of a run, and put everything back at the end. Yields what could not be.

    With ``own_switches`` the switches of this process stay as they stand: they are what is being tried.
    """
    torch = sys.modules["torch"]
    lost: list[Lost] = []
    states = seeds.states()
    with ExitStack() as stack:
        stack.callback(seeds.restore, states)
        if not own_switches:
            _switch(torch, run, stack, lost)
            _cast(torch, run, stack, lost)
        if plan.draws:
            lost += _draw(torch, run)
        yield lost


# -- switches ---------------------------------------------------------------------------------------


def _switch(torch: Any, run: Run, stack: ExitStack, lost: list[Lost]) -> None:
    """Bring every switch that has a writer to its recorded value."""
    for name, write in WRITERS.items():
        wanted = value(run, name)
        if wanted is None:
            continue
        try:
            now = flags.SWITCHES[name](torch)
            if now == wanted:
                continue
            write(torch, wanted)
            stack.callback(write, torch, now)
        except (Moot, AttributeError, RuntimeError, ValueError, TypeError) as error:
            lost.append(Lost(name, f"{wanted} cannot be set here: {error}"))


def _cast(torch: Any, run: Run, stack: ExitStack, lost: list[Lost]) -> None:
    """Enter the autocast that the call ran under, and the mode without gradients."""
    if value(run, "torch.inference_mode") is True:
        stack.enter_context(torch.inference_mode())
    elif value(run, "torch.grad_mode") is False:
        stack.enter_context(torch.no_grad())
    for device in AUTOCAST:
        name = f"torch.autocast.{device}"
        wanted = value(run, name)
        if wanted in (None, "off"):
            continue
        try:
            stack.enter_context(torch.autocast(device, dtype=_type(torch, wanted)))
        except (AttributeError, RuntimeError, ValueError, TypeError) as error:
            lost.append(Lost(name, f"{wanted} cannot be had here: {error}"))


# -- random states ----------------------------------------------------------------------------------


def _draw(torch: Any, run: Run) -> list[Lost]:
    """Restore the generators that the tokens of a run were drawn from."""
    lost = []
    wanted = set(generators(run)) | {name for name in run.states if name.startswith("rng.torch_")}
    for name in sorted(wanted):
        why = _restored(torch, name, run.states, run)
        if why:
            lost.append(Lost(f"{name}_state_sha256", why, ASKED if name in generators(run) else 0))
    return lost


def _restored(torch: Any, name: str, states: Mapping[str, bytes], run: Run) -> str:
    """Restore one generator. Return why it could not be, or nothing."""
    kind = name.removeprefix("rng.torch_")
    device = _device(torch, kind, run)
    if device is None:
        return f"the tokens were drawn on a {kind.upper()} device, and there is none here"
    if name in states:
        state = torch.frombuffer(bytearray(states[name]), dtype=torch.uint8)
        try:
            _write(torch, kind, state, device)
        except (RuntimeError, TypeError, ValueError) as error:
            return f"this torch does not take the state that was kept: {error}"
        return ""
    seed, recorded = value(run, "seed.torch_initial"), value(run, f"{name}_state_sha256")
    if not isinstance(seed, int):
        return "neither the random state nor a seed was kept"
    torch.manual_seed(seed)
    made = tensor_bytes(_read(torch, kind, device))
    if recorded is not None and file_digest(made) != recorded:
        return f"the state was not kept, and seed {seed} alone does not make it: others had drawn before"
    return ""


def _device(torch: Any, kind: str, run: Run) -> Any:
    """Return the device of a generator, or None where there is none of its kind here."""
    if kind == "cpu":
        return "cpu"
    module = getattr(torch, kind, None)
    if module is None or not module.is_available():
        return None
    place = str(value(run, "rng.device_of_sampling") or value(run, "model.device_map") or "")
    return place if place.startswith(kind) else kind


def _write(torch: Any, kind: str, state: Any, device: Any) -> None:
    if kind == "cpu":
        torch.set_rng_state(state)
    elif kind == "mps":
        torch.mps.set_rng_state(state)
    else:
        getattr(torch, kind).set_rng_state(state, device)


def _read(torch: Any, kind: str, device: Any) -> Any:
    if kind == "cpu":
        return torch.get_rng_state()
    return torch.mps.get_rng_state() if kind == "mps" else getattr(torch, kind).get_rng_state(device)
