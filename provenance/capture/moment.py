"""What surrounds one call and is gone after it: random states, other calls in flight, hidden history of the model.

Read before the model runs and after it has returned. These are facts of the call and no fingerprint, or no two calls
would share one.
"""

import sys
import threading
from typing import Any

from provenance.capture.evidence import tensor_bytes
from provenance.facts import OCTETS, ROLE, Field, Payload
from provenance.integrity.digests import file_digest

_lock = threading.Lock()
_flight = 0
# Code of the caller's own runs inside the loop: it may draw from these generators, which generate itself leaves alone.
STRANGERS = ("logits_processor", "stopping_criteria", "prefix_allowed_tokens_fn", "custom_generate", "assistant_model")


def enter() -> None:
    """Count a call that begins."""
    global _flight
    with _lock:
        _flight += 1


def leave() -> None:
    """Count a call that is over."""
    global _flight
    with _lock:
        _flight -= 1


def around() -> dict[str, Any]:
    """Say which thread calls, and how many calls are in flight with this one."""
    return {"batch.concurrent_threads": _flight + 1, "context.thread_id": threading.get_ident()}


def before(model: Any, request: dict[str, Any], rng: dict[str, Any]) -> dict[str, Any]:
    """Read seed, random states and history before the model runs. ``rng`` takes the states of the tensor generators."""
    torch = sys.modules["torch"]
    rng["rng.torch_cpu"] = torch.get_rng_state()
    device = getattr(model, "device", None)
    kind = getattr(device, "type", "")
    if kind == "cuda" and torch.cuda.is_initialized():
        rng["rng.torch_cuda"] = torch.cuda.get_rng_state(device)
    if kind == "mps":
        rng["rng.torch_mps"] = torch.mps.get_rng_state()
    if kind == "xpu" and torch.xpu.is_initialized():
        rng["rng.torch_xpu"] = torch.xpu.get_rng_state(device)
    facts: dict[str, Any] = {
        "seed.torch_initial": torch.initial_seed(),
        "batch.dynamic": False,
        **around(),
    }
    if any(request.get(name) is not None for name in STRANGERS):
        facts |= _other_states()
    longest = getattr(model, "_previous_max_cache_length", None)
    if longest is not None:
        facts["model.previous_max_cache_length"] = int(longest)
    compiled = _compiled()
    if compiled is not None:
        facts["torch.compile.graphs_before"] = compiled
    past = _first(request, "cache", "past_key_values", "cache_params")
    if past is not None:
        facts["batch.past_length"] = _past_length(past)
    return facts


def after(rng: dict[str, Any], facts: dict[str, Any], sampled: bool) -> list[Payload]:
    """Digest the states that were read; where tokens were drawn keep them whole. Say whether the call moved them."""
    torch = sys.modules["torch"]
    payloads = []
    for name, tensor in rng.items():
        data = tensor_bytes(tensor)
        facts[f"{name}_state_sha256"] = file_digest(data)
        if sampled and name in ROLE:
            payloads.append(Payload(ROLE[name], OCTETS, data))
    state = rng.get("rng.torch_cpu")
    if state is None:
        facts["rng.consumed"] = Field.unknown("rng.consumed", "the state was not read")
    else:
        facts["rng.consumed"] = not bool(torch.equal(state, torch.get_rng_state()))
    compiled = _compiled()
    if compiled is not None:
        facts["torch.compile.graphs_after"] = compiled
    return payloads


def _other_states() -> dict[str, Any]:
    """Digest the generators of Python and NumPy: 100 us, so only where a stranger's code could draw from them."""
    import random

    found: dict[str, Any] = {"rng.python_state_sha256": file_digest(repr(random.getstate()).encode())}
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        kind, keys, *rest = numpy.random.get_state()
        found["rng.numpy_state_sha256"] = file_digest(str(kind).encode() + keys.tobytes() + repr(rest).encode())
    return found


def _compiled() -> int | None:
    """Return how many graphs the compiler has made in this process, or None where it is not loaded."""
    utils = sys.modules.get("torch._dynamo.utils")
    return int(utils.counters["stats"].get("unique_graphs", 0)) if utils is not None else None


def _first(request: dict[str, Any], *names: str) -> Any:
    return next((request[name] for name in names if request.get(name) is not None), None)


def _past_length(cache: Any) -> object:
    try:
        return int(cache.get_seq_length())
    except Exception as error:
        return Field.unknown("batch.past_length", f"{type(error).__name__}: {error}")
