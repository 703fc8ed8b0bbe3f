"""Switches that can change between two calls: threads, TF32, deterministic algorithms, autocast, attention kernels.

One line a switch. They are read in the caller's thread at every call as one tuple of direct getters (autocast and grad
mode are thread-local); only a changed tuple makes a new fingerprint. What a build or a process lacks (a CUDA getter in
a CPU build, the compiler's settings before the compiler is loaded) is not asked again until something is loaded.
"""

import functools
import sys
from collections.abc import Callable
from typing import Any

from provenance.facts import Field
from provenance.fingerprint.reading import Missing, Moot, Reader, read

Getter = Callable[[Any], object]


def _path(dotted: str) -> Getter:
    """Read an attribute below torch; what can be called is called."""
    names = dotted.split(".")

    def get(torch: Any) -> object:
        value = torch
        for name in names:
            value = getattr(value, name)
        value = value() if callable(value) else value
        # Enumerations and types of torch print themselves; plain values stay what they are.
        return value if value is None or isinstance(value, (bool, int, float, str, list)) else str(value)

    return get


def _cuda(dotted: str) -> Getter:
    """Read what only a CUDA build has."""
    get = _path(dotted)

    def guarded(torch: Any) -> object:
        if torch.version.cuda is None and torch.version.hip is None:
            raise Moot("torch is built without CUDA")
        return get(torch)

    return guarded


def _inductor(name: str) -> Getter:
    """Read a setting of the compiler, only where it is loaded: to load it would take seconds."""

    def get(_: Any) -> object:
        config = sys.modules.get("torch._inductor.config")
        if config is None:
            raise Moot("the compiler is not loaded")
        value: Any = config
        for part in name.split("."):
            value = getattr(value, part)
        return value if value is None or isinstance(value, (bool, int, float, str)) else str(value)

    return get


def _autocast(device: str) -> Getter:
    return lambda torch: str(torch.get_autocast_dtype(device)) if torch.is_autocast_enabled(device) else "off"


def _flush_denormal(torch: Any) -> bool:
    """Probe: there is no getter. The state is that of the calling thread."""
    return bool((torch.tensor([1e-38]) * 1e-3).item() == 0)


def _depthwise(torch: Any) -> str:
    if torch.version.cuda is None:
        raise Moot("torch is built without CUDA")
    found = str(torch.backends.cudnn.depthwise_kernel)
    return "chosen by shape" if found == "auto" else found


def _opt_einsum(torch: Any) -> str:
    module = torch.backends.opt_einsum
    return f"{module.enabled} {module.strategy}" if module.is_available() else "not available"


def _python_native(torch: Any) -> str:
    module = torch.backends.python_native
    return str(sorted(getattr(module, "available_dsls", []) or []))


def _distributed(name: str) -> Getter:
    """Read the process group, where one was made."""

    def get(torch: Any) -> object:
        group = torch.distributed
        if not group.is_available():
            raise Moot("torch is built without torch.distributed")
        if name == "is_initialized":
            return bool(group.is_initialized())
        if not group.is_initialized():
            raise Moot("no process group was made")
        return getattr(group, name)()

    return get


_SAME = (
    "fp32_precision", "cuda.matmul.allow_tf32", "cuda.matmul.fp32_precision",
    "cuda.matmul.allow_fp16_reduced_precision_reduction", "cuda.matmul.allow_fp16_reduced_precision_reduction_split_k",
    "cuda.matmul.allow_bf16_reduced_precision_reduction", "cuda.matmul.allow_bf16_reduced_precision_reduction_split_k",
    "cuda.matmul.allow_fp16_accumulation", "cudnn.enabled", "cudnn.allow_tf32", "cudnn.fp32_precision",
    "cudnn.conv.fp32_precision", "cudnn.rnn.fp32_precision", "cudnn.benchmark", "cudnn.benchmark_limit",
    "cudnn.deterministic", "mkldnn.enabled", "mkldnn.deterministic", "mkldnn.allow_tf32",
    "mkldnn.fp32_precision", "mkldnn.matmul.fp32_precision", "mkldnn.conv.fp32_precision", "mkldnn.rnn.fp32_precision",
    "cuda.flash_sdp_enabled", "cuda.mem_efficient_sdp_enabled", "cuda.math_sdp_enabled", "cuda.cudnn_sdp_enabled",
    "cuda.fp16_bf16_reduction_math_sdp_allowed", "cuda.preferred_blas_library", "cuda.preferred_linalg_library",
    "cuda.preferred_rocm_fa_library", "quantized.engine", "miopen.immediate",
)  # fmt: skip

# Read at every call, in the caller's thread.
SWITCHES: dict[str, Getter] = {
    "torch.num_threads": _path("get_num_threads"),
    "torch.deterministic_algorithms": _path("are_deterministic_algorithms_enabled"),
    "torch.deterministic_warn_only": _path("is_deterministic_algorithms_warn_only_enabled"),
    "torch.deterministic_debug_mode": _path("get_deterministic_debug_mode"),
    "torch.fill_uninitialized_memory": _path("utils.deterministic.fill_uninitialized_memory"),
    "torch.float32_matmul_precision": _path("get_float32_matmul_precision"),
    **{f"torch.{'' if name == 'fp32_precision' else 'backends.'}{name}": _path(f"backends.{name}") for name in _SAME},
    "torch.backends.cudnn.depthwise_kernel": _depthwise,
    "torch.backends.mha.fastpath_enabled": _path("backends.mha.get_fastpath_enabled"),
    "torch.backends.opt_einsum": _opt_einsum,
    "torch.backends.python_native": _python_native,
    "torch.sdp_priority_order": _path("_C._get_sdp_priority_order"),
    "torch.overrideable_sdp_enabled": _path("_C._get_overrideable_sdp_enabled"),
    "torch.backends.nnpack.enabled": _path("_C._get_nnpack_enabled"),
    "torch.flash_attention_impl": _path("nn.attention.current_flash_attention_impl"),
    "torch.backends.cuda.cublas_workspace_size": _cuda("backends.cuda.cublas_workspace_size"),
    "torch.backends.cuda.cublaslt_workspace_size": _cuda("backends.cuda.cublaslt_workspace_size"),
    "torch.cuda.tunable": _cuda("cuda.tunable.is_enabled"),
    "torch.cuda.tunable.tuning": _cuda("cuda.tunable.tuning_is_enabled"),
    "torch.cuda.allocator_backend": _cuda("cuda.get_allocator_backend"),
    "torch.default_dtype": _path("get_default_dtype"),
    "torch.default_device": _path("get_default_device"),
    "torch.autocast.cpu": _autocast("cpu"),
    "torch.autocast.cuda": _autocast("cuda"),
    "torch.autocast.cache_enabled": _path("is_autocast_cache_enabled"),
    "torch.inference_mode": _path("is_inference_mode_enabled"),
    "torch.grad_mode": _path("is_grad_enabled"),
    "torch.anomaly": _path("is_anomaly_enabled"),
    "torch.flush_denormal": _flush_denormal,
    "distributed.initialized": _distributed("is_initialized"),
    "distributed.world_size": _distributed("get_world_size"),
    "distributed.backend": _distributed("get_backend"),
    "distributed.rank": _distributed("get_rank"),
}

_COMPILER = (
    "deterministic", "batch_invariant", "fallback_random", "emulate_precision_casts", "use_fast_math", "max_autotune",
    "max_autotune_gemm", "coordinate_descent_tuning", "freezing", "split_reductions", "shape_padding",
    "comprehensive_padding", "epilogue_fusion", "online_softmax", "apply_gumbel_max_trick", "layout_optimization",
    "fx_graph_cache", "cpp.simdlen", "cpp.enable_unsafe_math_opt_flag", "cpp.enable_floating_point_contract_flag",
    "cpp.threads", "cpp.weight_prepack", "triton.cudagraphs", "triton.cooperative_reductions",
    "triton.persistent_reductions", "triton.multi_kernel",
)  # fmt: skip
# Read whenever a fingerprint is made, and compared as one: the compiler keeps a hash of all its settings.
COMPILER: dict[str, Getter] = {f"torch.inductor.{name}": _inductor(name) for name in _COMPILER}


# The C function behind a public getter, for the guard: the public path goes through properties of modules that cost ten
# times as much. Each is used only where this torch has it.
DIRECT: dict[str, tuple[str, ...]] = {
    "torch.deterministic_algorithms": ("_get_deterministic_algorithms",),
    "torch.deterministic_warn_only": ("_get_deterministic_algorithms_warn_only",),
    "torch.fill_uninitialized_memory": ("_get_deterministic_fill_uninitialized_memory",),
    "torch.float32_matmul_precision": ("_get_float32_matmul_precision",),
    "torch.fp32_precision": ("_get_fp32_precision_getter", "generic", "all"),
    "torch.backends.cuda.matmul.allow_tf32": ("_get_cublas_allow_tf32",),
    "torch.backends.cuda.matmul.fp32_precision": ("_get_fp32_precision_getter", "cuda", "matmul"),
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": (
        "_get_cublas_allow_fp16_reduced_precision_reduction",
    ),
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": (
        "_get_cublas_allow_bf16_reduced_precision_reduction",
    ),
    "torch.backends.cuda.matmul.allow_fp16_accumulation": ("_get_cublas_allow_fp16_accumulation",),
    "torch.backends.cudnn.enabled": ("_get_cudnn_enabled",),
    "torch.backends.cudnn.allow_tf32": ("_get_cudnn_allow_tf32",),
    "torch.backends.cudnn.fp32_precision": ("_get_fp32_precision_getter", "cuda", "all"),
    "torch.backends.cudnn.conv.fp32_precision": ("_get_fp32_precision_getter", "cuda", "conv"),
    "torch.backends.cudnn.rnn.fp32_precision": ("_get_fp32_precision_getter", "cuda", "rnn"),
    "torch.backends.cudnn.benchmark": ("_get_cudnn_benchmark",),
    "torch.backends.cudnn.deterministic": ("_get_cudnn_deterministic",),
    "torch.backends.mkldnn.enabled": ("_get_mkldnn_enabled",),
    "torch.backends.mkldnn.deterministic": ("_get_mkldnn_deterministic",),
    "torch.backends.mkldnn.allow_tf32": ("_get_onednn_allow_tf32",),
    "torch.backends.mkldnn.fp32_precision": ("_get_fp32_precision_getter", "mkldnn", "all"),
    "torch.backends.mkldnn.matmul.fp32_precision": ("_get_fp32_precision_getter", "mkldnn", "matmul"),
    "torch.backends.mkldnn.conv.fp32_precision": ("_get_fp32_precision_getter", "mkldnn", "conv"),
    "torch.backends.mkldnn.rnn.fp32_precision": ("_get_fp32_precision_getter", "mkldnn", "rnn"),
    "torch.backends.cuda.flash_sdp_enabled": ("_get_flash_sdp_enabled",),
    "torch.backends.cuda.mem_efficient_sdp_enabled": ("_get_mem_efficient_sdp_enabled",),
    "torch.backends.cuda.math_sdp_enabled": ("_get_math_sdp_enabled",),
    "torch.backends.cuda.cudnn_sdp_enabled": ("_get_cudnn_sdp_enabled",),
    "torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed": ("_get_math_sdp_allow_fp16_bf16_reduction",),
    "torch.backends.cuda.preferred_blas_library": ("_get_blas_preferred_backend",),
    "torch.backends.cuda.preferred_linalg_library": ("_get_linalg_preferred_backend",),
    "torch.backends.cuda.preferred_rocm_fa_library": ("_get_rocm_fa_preferred_backend",),
    "torch.backends.quantized.engine": ("_get_qengine",),
    "torch.sdp_priority_order": ("_get_sdp_priority_order",),
    "torch.overrideable_sdp_enabled": ("_get_overrideable_sdp_enabled",),
    "torch.backends.nnpack.enabled": ("_get_nnpack_enabled",),
}
# Not compared at every call: said by others (the debug mode, the process group), the same
# getter twice (split-k, miopen), or a probe.
UNGUARDED = {
    "torch.deterministic_debug_mode", "torch.flush_denormal", "torch.backends.miopen.immediate",
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction_split_k",
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction_split_k", "torch.backends.python_native",
    "distributed.world_size", "distributed.backend", "distributed.rank",
}  # fmt: skip


class Guard:
    """The tuple of getters that is read at every call. What cannot be read here is left out until more is loaded."""

    def __init__(self) -> None:
        self._loaded: tuple[object, ...] = ()
        self._getters: tuple[Callable[[], object], ...] = ()

    def snapshot(self) -> tuple[object, ...]:
        """Read every switch in the calling thread, raw. A getter that raises gives its exception's text."""
        torch = sys.modules.get("torch")
        if torch is None:
            return ()
        compiler = sys.modules.get("torch._inductor.config")
        if self._loaded != (id(torch), id(compiler)):
            self._choose(torch, compiler)
        values: list[object] = []
        for getter in self._getters:
            try:
                values.append(getter())
            except Exception as error:  # mixed TF32 settings make getters raise
                values.append(f"{type(error).__name__}: {error}")
        if compiler is not None:
            values.append(_compiler_mark(compiler))
        return tuple(values)

    def _choose(self, torch: Any, compiler: Any) -> None:
        """Leave out what is moot in this build; a getter that fails otherwise stays, since it may recover."""
        chosen: list[Callable[[], object]] = []
        for name, getter in SWITCHES.items():
            if name in UNGUARDED:
                continue
            direct = _direct(torch, name) or _bind(getter, torch)
            try:
                direct()
            except (Moot, AttributeError):
                continue
            except Exception as error:
                del error
            chosen.append(direct)
        self._getters, self._loaded = tuple(chosen), (id(torch), id(compiler))


def _direct(torch: Any, name: str) -> Callable[[], object] | None:
    """Return the C function behind a getter, where this torch has it."""
    if name in ("torch.autocast.cpu", "torch.autocast.cuda"):
        device = name.rpartition(".")[2]
        # the type too, and only while it is on: it is off nearly always
        return lambda: torch.is_autocast_enabled(device) and torch.get_autocast_dtype(device)
    public = {
        "torch.num_threads": "get_num_threads", "torch.default_dtype": "get_default_dtype",
        "torch.autocast.cache_enabled": "is_autocast_cache_enabled", "torch.grad_mode": "is_grad_enabled",
        "torch.inference_mode": "is_inference_mode_enabled", "torch.anomaly": "is_anomaly_enabled",
    }.get(name)  # fmt: skip
    if public is not None:
        return getattr(torch, public, None)
    function, *arguments = DIRECT.get(name, ("",))
    found = getattr(torch._C, function, None) if function else None
    return functools.partial(found, *arguments) if arguments and found is not None else found


def _compiler_mark(config: Any) -> object:
    """Return what changes when a setting of the compiler does: what users have put over its defaults."""
    try:
        entries = config._config
        return tuple(_override(entries[name].user_override) for name in _COMPILER if name in entries)
    except Exception as error:  # another version keeps them elsewhere: the fingerprint reads them one by one
        return type(error).__name__


def _override(kept: Any) -> object:
    value = kept.get(None) if hasattr(kept, "get") else kept
    return value if isinstance(value, (bool, int, float, str)) else str(type(value))


def fields() -> list[Field]:
    """Read every switch as a field, in the calling thread."""
    torch = sys.modules.get("torch")
    if torch is None:
        return [Field.moot(name, "torch is not loaded") for name in (*SWITCHES, *COMPILER)]
    return [read(name, _bind(getter, torch), "torch") for name, getter in {**SWITCHES, **COMPILER}.items()]


def _bind(getter: Getter, torch: Any) -> Reader:
    return lambda: getter(torch)


def compiled() -> dict[str, object]:
    """Return the compiler's counters, to tell whether a call compiled anew. Raises Missing where it is not loaded."""
    utils = sys.modules.get("torch._dynamo.utils")
    if utils is None:
        raise Missing("the compiler is not loaded")
    return {key: dict(value) for key, value in utils.counters.items() if key in ("stats", "frames")}
