"""Switches that can change between two calls: each is seen, in the thread that calls, and none can spoil the others."""

import sys
import threading
from collections.abc import Callable
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import pytest
import torch
import torch._inductor.config  # deterministic mode loads it: then before the first snapshot

from provenance.catalogue.fields import table
from provenance.facts import Field, State
from provenance.fingerprint import flags
from provenance.fingerprint.environment import Environment

Change = Callable[[], AbstractContextManager[None]]


def _set(owner: Any, name: str, value: object) -> Change:
    """Set an attribute for a while."""

    @contextmanager
    def change() -> Any:
        before = getattr(owner, name)
        setattr(owner, name, value)
        try:
            yield
        finally:
            setattr(owner, name, before)

    return change


def _call(setter: Callable[[Any], object], getter: Callable[[], Any], value: Any) -> Change:
    """Call a setter, and again with what was there before."""

    @contextmanager
    def change() -> Any:
        before = getter()
        setter(value)
        try:
            yield
        finally:
            setter(before)

    return change


GUARD = flags.Guard()
CUDA, CUDNN, MKLDNN = torch.backends.cuda, torch.backends.cudnn, torch.backends.mkldnn
CHANGES: dict[str, tuple[Change, object]] = {
    "torch.num_threads": (_call(torch.set_num_threads, torch.get_num_threads, 3), 3),
    "torch.deterministic_algorithms": (
        _call(torch.use_deterministic_algorithms, torch.are_deterministic_algorithms_enabled, True), True,
    ),
    "torch.backends.cudnn.allow_tf32": (_set(CUDNN, "allow_tf32", False), False),
    "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction": (
        _set(CUDA.matmul, "allow_fp16_reduced_precision_reduction", False), False,
    ),
    "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": (
        _set(CUDA.matmul, "allow_bf16_reduced_precision_reduction", False), False,
    ),
    "torch.backends.cudnn.enabled": (_set(CUDNN, "enabled", False), False),
    "torch.backends.cudnn.benchmark": (_set(CUDNN, "benchmark", True), True),
    "torch.backends.cudnn.deterministic": (_set(CUDNN, "deterministic", True), True),
    "torch.backends.mkldnn.enabled": (_call(lambda on: MKLDNN.set_flags(_enabled=on),
                                            lambda: torch._C._get_mkldnn_enabled(), False), False),
    "torch.backends.cuda.flash_sdp_enabled": (_call(CUDA.enable_flash_sdp, CUDA.flash_sdp_enabled, False), False),
    "torch.backends.cuda.mem_efficient_sdp_enabled": (
        _call(CUDA.enable_mem_efficient_sdp, CUDA.mem_efficient_sdp_enabled, False), False,
    ),
    "torch.backends.cuda.math_sdp_enabled": (_call(CUDA.enable_math_sdp, CUDA.math_sdp_enabled, False), False),
    "torch.backends.cuda.cudnn_sdp_enabled": (_call(CUDA.enable_cudnn_sdp, CUDA.cudnn_sdp_enabled, False), False),
    "torch.backends.cuda.matmul.allow_fp16_accumulation": (_set(CUDA.matmul, "allow_fp16_accumulation", True), True),
    "torch.backends.cuda.matmul.fp32_precision": (_set(CUDA.matmul, "fp32_precision", "tf32"), "tf32"),
    "torch.backends.cudnn.conv.fp32_precision": (_set(CUDNN.conv, "fp32_precision", "ieee"), "ieee"),
    "torch.backends.mkldnn.deterministic": (_set(MKLDNN, "deterministic", True), True),
    "torch.backends.mkldnn.matmul.fp32_precision": (_set(MKLDNN.matmul, "fp32_precision", "bf16"), "bf16"),
    "torch.backends.mha.fastpath_enabled": (
        _call(torch.backends.mha.set_fastpath_enabled, torch.backends.mha.get_fastpath_enabled, False), False,
    ),
    "torch.backends.cuda.fp16_bf16_reduction_math_sdp_allowed": (
        _call(CUDA.allow_fp16_bf16_reduction_math_sdp, CUDA.fp16_bf16_reduction_math_sdp_allowed, True), True,
    ),
    "torch.autocast.cache_enabled": (
        _call(torch.set_autocast_cache_enabled, torch.is_autocast_cache_enabled, False), False,
    ),
    "torch.default_dtype": (_call(torch.set_default_dtype, torch.get_default_dtype, torch.float64), "torch.float64"),
    "torch.autocast.cpu": (lambda: torch.autocast("cpu", dtype=torch.bfloat16), "torch.bfloat16"),
    "torch.inference_mode": (torch.inference_mode, True),
    "torch.grad_mode": (torch.no_grad, False),
    "torch.anomaly": (lambda: torch.autograd.set_detect_anomaly(True, check_nan=False), True),
    "torch.fill_uninitialized_memory": (
        _set(torch.utils.deterministic, "fill_uninitialized_memory", False), False,
    ),
}  # fmt: skip


def _fields() -> dict[str, Field]:
    return {item.name: item for item in flags.fields()}


@pytest.mark.filterwarnings("ignore:Anomaly Detection has been enabled:UserWarning")
@pytest.mark.parametrize("name", sorted(CHANGES))
def test_a_switch_that_is_thrown_is_seen_and_makes_a_new_fingerprint(name: str) -> None:
    change, value = CHANGES[name]
    environment = Environment()
    before, snapshot = environment.switches(), GUARD.snapshot()
    assert environment.switches() is before
    with change():
        assert GUARD.snapshot() != snapshot
        during = environment.switches()
        assert during.digest != before.digest
        assert during.fields[name].value == value
        assert before.fields[name].value != value
    # the compiler's note of who set what may stay; the values may not
    assert GUARD.snapshot()[:-1] == snapshot[:-1]
    assert environment.switches().digest == before.digest


def test_every_switch_has_a_value_in_the_torch_of_the_tests() -> None:
    """A getter that a new torch renames must not silently become unknown for ever."""
    without = {name: item.state for name, item in _fields().items() if item.state is not State.VALUE}
    unset = {"torch.backends.cudnn.benchmark_limit", "torch.backends.mkldnn.allow_tf32", "torch.flash_attention_impl",
             "torch.inductor.cpp.simdlen"}  # fmt: skip
    assert {name for name, state in without.items() if state is State.UNSET} <= unset
    assert {name for name, state in without.items() if state is State.UNKNOWN} == set()
    moot = {name for name, state in without.items() if state is State.NOT_APPLICABLE}
    assert all(
        name.startswith(
            (
                "torch.inductor.",
                "torch.cuda.",
                "torch.backends.cuda.cublas",
                "distributed.",
                "torch.backends.cudnn.depthwise",
            )
        )
        for name in moot
    )


def test_every_switch_of_the_catalogue_is_read() -> None:
    """Declared and not read would be a promise that nobody keeps."""
    elsewhere = {"torch.backends.cuda.is_flash_attention_available", "torch.backends.kleidiai", "torch.num_interop_threads",
                 "torch.backends.mkldnn.acl", "torch.compile.active", "torch.compile.mode_backend", "torch.compile.modules", "mkl.num_threads",
                 "torch.compile.recompiled", "torch.jit.profiling", "torch.compile.graphs_before",
                 "torch.compile.graphs_after", "torch.autocast"}  # fmt: skip
    declared = {name for name, spec in table().items() if spec.group in ("framework_flags", "determinism_flags")}
    declared |= {name for name in table() if name.startswith("distributed.")}
    assert declared - elsewhere == {*flags.SWITCHES, *flags.COMPILER}


def test_mixed_tf32_settings_make_one_getter_raise_and_cost_one_field() -> None:
    """PyTorch refuses to answer for cuDNN as a whole where convolutions and recurrent layers differ."""
    before = GUARD.snapshot()
    convolution, recurrent = CUDNN.conv.fp32_precision, CUDNN.rnn.fp32_precision
    CUDNN.conv.fp32_precision, CUDNN.rnn.fp32_precision = "tf32", "ieee"
    try:
        with pytest.raises(RuntimeError):
            _ = CUDNN.allow_tf32
        found, mixed = _fields(), GUARD.snapshot()
        environment = Environment()
        assert environment.switches() is environment.switches()
    finally:
        CUDNN.conv.fp32_precision, CUDNN.rnn.fp32_precision = convolution, recurrent
    assert mixed != before
    assert found["torch.backends.cudnn.allow_tf32"].state is State.UNKNOWN
    assert found["torch.backends.cudnn.allow_tf32"].reason.startswith("RuntimeError: ")
    unknown = {name for name, item in found.items() if not item.known}
    assert unknown == {"torch.backends.cudnn.allow_tf32"}
    assert found["torch.backends.cudnn.conv.fp32_precision"].value == "tf32"


@pytest.mark.parametrize("broken", sorted(flags.SWITCHES)[::5])
def test_a_getter_that_this_torch_lacks_is_one_unknown_field(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = _fields()

    def absent(torch: Any) -> object:
        return torch.no_such_switch

    monkeypatch.setitem(flags.SWITCHES, broken, absent)
    found = _fields()
    assert found[broken].state is State.UNKNOWN
    assert found[broken].reason.startswith("absent in this version: ")
    assert {name: item for name, item in found.items() if name != broken} == {
        name: item for name, item in whole.items() if name != broken
    }


def test_a_setting_of_the_compiler_is_noticed() -> None:
    import torch._inductor.config as compiler

    environment = Environment()
    before = environment.switches()
    assert environment.switches() is before
    with compiler.patch(max_autotune=not compiler.max_autotune):
        assert environment.switches().fields["torch.inductor.max_autotune"].value is compiler.max_autotune
        assert environment.switches().digest != before.digest
    assert environment.switches().digest == before.digest


def test_switches_are_those_of_the_calling_thread() -> None:
    """Grad mode and autocast belong to a thread: each gets its own fingerprint from one environment."""
    environment, seen = Environment(), {}
    ready, done = threading.Event(), threading.Event()

    def other() -> None:
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16):
            seen["other"] = environment.switches()
            ready.set()
            done.wait(30)
            seen["other, later"] = environment.switches()

    thread = threading.Thread(target=other)
    thread.start()
    assert ready.wait(30)
    mine = environment.switches()
    done.set()
    thread.join()
    assert mine.fields["torch.grad_mode"].value is True
    assert mine.fields["torch.autocast.cpu"].value == "off"
    assert seen["other"].fields["torch.grad_mode"].value is False
    assert seen["other"].fields["torch.autocast.cpu"].value == "torch.bfloat16"
    assert seen["other, later"].digest == seen["other"].digest != mine.digest


def test_threads_in_different_modes_never_get_each_others_switches() -> None:
    environment, wrong = Environment(), []

    def work(grad: bool) -> None:
        with torch.set_grad_enabled(grad):
            for _ in range(300):
                if environment.switches().fields["torch.grad_mode"].value is not grad:
                    wrong.append(grad)

    before = sys.getswitchinterval()
    sys.setswitchinterval(1e-5)
    try:
        threads = [threading.Thread(target=work, args=(number % 2 == 0,)) for number in range(4)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    finally:
        sys.setswitchinterval(before)
    assert wrong == []


def test_without_torch_every_switch_is_beside_the_point(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patched:
        patched.delitem(sys.modules, "torch")
        found, snapshot = flags.fields(), GUARD.snapshot()
    assert snapshot == ()
    assert {(item.state, item.reason) for item in found} == {(State.NOT_APPLICABLE, "torch is not loaded")}
    assert [item.name for item in found] == [*flags.SWITCHES, *flags.COMPILER]
