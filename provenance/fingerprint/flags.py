"""Switches that can change between two calls: threads, TF32, deterministic algorithms, autocast, attention kernels.

One line a switch. They are read in the caller's thread at every call as one tuple of direct getters (autocast
and grad mode are thread-local); only a changed tuple makes a new fingerprint.
"""

import sys
from collections.abc import Callable
from typing import Any

from provenance.facts import Field
from provenance.fingerprint.reading import Reader, read

Getter = Callable[[Any], object]


def _path(dotted: str) -> Getter:
    names = dotted.split(".")

    def get(value: Any) -> object:
        for name in names:
            value = getattr(value, name)
        return value

    return get


def _call(dotted: str) -> Getter:
    get = _path(dotted)
    return lambda torch: get(torch)()  # type: ignore[operator]


def _text(getter: Getter) -> Getter:
    return lambda torch: str(getter(torch))


SWITCHES: dict[str, Getter] = {
    "torch.num_threads": _call("get_num_threads"),
    "torch.deterministic_algorithms": _call("are_deterministic_algorithms_enabled"),
    "torch.deterministic_warn_only": _call("is_deterministic_algorithms_warn_only_enabled"),
    "torch.float32_matmul_precision": _call("get_float32_matmul_precision"),
    "torch.fp32_precision": _path("backends.fp32_precision"),
    "torch.backends.cuda.matmul.allow_tf32": _path("backends.cuda.matmul.allow_tf32"),
    "torch.backends.cuda.matmul.fp32_precision": _path("backends.cuda.matmul.fp32_precision"),
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": _path(
        "backends.cuda.matmul.allow_fp16_reduced_precision_reduction"
    ),
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": _path(
        "backends.cuda.matmul.allow_bf16_reduced_precision_reduction"
    ),
    "torch.backends.cuda.matmul.allow_fp16_accumulation": _path("backends.cuda.matmul.allow_fp16_accumulation"),
    "torch.backends.cudnn.enabled": _path("backends.cudnn.enabled"),
    "torch.backends.cudnn.allow_tf32": _path("backends.cudnn.allow_tf32"),
    "torch.backends.cudnn.conv.fp32_precision": _path("backends.cudnn.conv.fp32_precision"),
    "torch.backends.cudnn.rnn.fp32_precision": _path("backends.cudnn.rnn.fp32_precision"),
    "torch.backends.cudnn.benchmark": _path("backends.cudnn.benchmark"),
    "torch.backends.cudnn.deterministic": _path("backends.cudnn.deterministic"),
    "torch.backends.mkldnn.enabled": _path("backends.mkldnn.enabled"),
    "torch.backends.mkldnn.deterministic": _path("backends.mkldnn.deterministic"),
    "torch.backends.mkldnn.matmul.fp32_precision": _path("backends.mkldnn.matmul.fp32_precision"),
    "torch.backends.cuda.flash_sdp_enabled": _call("backends.cuda.flash_sdp_enabled"),
    "torch.backends.cuda.mem_efficient_sdp_enabled": _call("backends.cuda.mem_efficient_sdp_enabled"),
    "torch.backends.cuda.math_sdp_enabled": _call("backends.cuda.math_sdp_enabled"),
    "torch.backends.cuda.cudnn_sdp_enabled": _call("backends.cuda.cudnn_sdp_enabled"),
    "torch.default_dtype": _text(_call("get_default_dtype")),
    "torch.autocast.cpu": lambda torch: (
        str(torch.get_autocast_dtype("cpu")) if torch.is_autocast_enabled("cpu") else "off"
    ),
    "torch.autocast.cuda": lambda torch: (
        str(torch.get_autocast_dtype("cuda")) if torch.is_autocast_enabled("cuda") else "off"
    ),
    "torch.inference_mode": _call("is_inference_mode_enabled"),
    "torch.grad_mode": _call("is_grad_enabled"),
    "torch.anomaly": _call("is_anomaly_enabled"),
    "torch.fill_uninitialized_memory": _path("utils.deterministic.fill_uninitialized_memory"),
}
GETTERS = tuple(SWITCHES.values())


def snapshot() -> tuple[object, ...]:
    """Read every switch in the calling thread, raw. A getter that raises gives its exception's text."""
    torch = sys.modules.get("torch")
    if torch is None:
        return ()
    values: list[object] = []
    for getter in GETTERS:
        try:
            values.append(getter(torch))
        except Exception as error:  # mixed TF32 settings make getters raise
            values.append(f"{type(error).__name__}: {error}")
    return tuple(values)


def fields() -> list[Field]:
    """Read every switch as a field, in the calling thread."""
    torch = sys.modules.get("torch")
    if torch is None:
        return [Field.moot(name, "torch is not loaded") for name in SWITCHES]
    return [read(name, _bind(getter, torch), "torch") for name, getter in SWITCHES.items()]


def _bind(getter: Getter, torch: Any) -> Reader:
    return lambda: getter(torch)
