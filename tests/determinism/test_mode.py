"""The deterministic mode: every switch is held, told and put back, in any order of blocks, threads and exceptions."""

import ast
import os
import subprocess
import sys
import threading
import types
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import provenance
from provenance.catalogue.fields import table
from provenance.determinism import mode, seeds, switches
from provenance.determinism.report import ABSENT, ALREADY, LATE, OUTCOMES, SET, Report
from provenance.errors import BadSetting, NotDeterministic
from provenance.fingerprint import flags
from provenance.fingerprint.reading import Moot

SETTERS: dict[str, Any] = {  # what a program does to the switches itself, the two interfaces of precision mixed
    "matmul word": lambda v: torch.set_float32_matmul_precision(("highest", "high", "medium")[v % 3]),
    "matmul tf32": lambda v: setattr(torch.backends.cuda.matmul, "allow_tf32", bool(v % 2)),
    "conv tf32": lambda v: setattr(torch.backends.cudnn, "allow_tf32", bool(v % 2)),
    "generic": lambda v: setattr(torch.backends, "fp32_precision", ("none", "ieee", "tf32")[v % 3]),
    "cuda": lambda v: setattr(torch.backends.cudnn, "fp32_precision", ("none", "ieee", "tf32")[v % 3]),
    "cuda matmul": lambda v: setattr(torch.backends.cuda.matmul, "fp32_precision", ("none", "ieee", "tf32")[v % 3]),
    "cuda conv": lambda v: setattr(torch.backends.cudnn.conv, "fp32_precision", ("none", "ieee", "tf32")[v % 3]),
    "mkldnn matmul": lambda v: setattr(torch.backends.mkldnn.matmul, "fp32_precision", ("none", "bf16", "tf32")[v % 3]),
    "benchmark": lambda v: setattr(torch.backends.cudnn, "benchmark", bool(v % 2)),
    "deterministic": lambda v: torch._C._set_deterministic_algorithms(bool(v % 2), warn_only=bool(v & 2)),
    "bf16": lambda v: setattr(torch.backends.cuda.matmul, "allow_bf16_reduced_precision_reduction", bool(v % 2)),
    "flash": lambda v: torch.backends.cuda.enable_flash_sdp(bool(v % 2)),
    "seed": torch.manual_seed,
}


def every() -> dict[str, Any]:
    """Every switch that the fingerprint reads, as it reads it, and what the table keeps below that."""
    read: dict[str, Any] = {}
    for name, getter in {**flags.SWITCHES, **flags.COMPILER}.items():
        try:
            read[name] = getter(torch)
        except Exception as error:
            read[name] = type(error).__name__
    return {**read, **{f"own {name}": value for name, value in switches.snapshot(torch).items()},
            "random": torch.get_rng_state().numpy().tobytes(), "env": dict(os.environ)}  # fmt: skip


@pytest.fixture(autouse=True)
def as_it_was() -> Iterator[None]:
    before, states = switches.snapshot(torch), seeds.states()
    yield
    switches.restore(torch, before)
    seeds.restore(states)
    assert len(mode._kept) == 0


def test_every_switch_of_the_table_is_a_declared_field_that_the_fingerprint_reads() -> None:
    assert len({switch.name for switch in switches.TABLE}) >= 25
    for switch in switches.TABLE:
        assert switch.name in table(), switch.name
        assert switch.name in flags.SWITCHES or switch.name in flags.COMPILER, switch.name


@pytest.mark.parametrize("name", sorted({switch.name for switch in switches.TABLE}))
def test_each_switch_can_be_spoiled_held_and_put_back(name: str) -> None:
    """Written to something else first, so that holding has something to do."""
    switch = next(item for item in switches.TABLE if item.name == name and item.asked != "warn")
    if name.startswith("torch.inductor."):
        pytest.importorskip("torch._inductor.config")
    try:
        good = switch.read(torch)
    except Moot:
        pytest.skip("not in this build")
    spoiled = {bool: not switch.steady, str: "tf32", tuple: ()}[type(good)]
    if name == "torch.float32_matmul_precision":
        spoiled = ("high", "tf32", "none")
    elif name == "torch.backends.cudnn.allow_tf32":
        spoiled = (True, "tf32", "none")
    elif isinstance(good, tuple):
        spoiled = (True, True)
    elif name.startswith("torch.backends.mkldnn") and name.count(".") > 3:
        spoiled = "bf16"
    try:
        switch.write(torch, spoiled)
        before = switch.read(torch)
        assert not switch.is_steady(before)
        with provenance.deterministic(strict=True, attention="math") as report:
            assert report[name].outcome == SET
            assert switch.is_steady(switch.read(torch))
        assert switch.read(torch) == before
    finally:
        switch.write(torch, good)


def test_inside_every_precision_reads_as_exact_and_no_getter_raises() -> None:
    for act, value in (("matmul word", 1), ("cuda conv", 1), ("generic", 2), ("mkldnn matmul", 1)):
        SETTERS[act](value)
    with provenance.deterministic():
        found = {name: flags.SWITCHES[name](torch) for name in flags.SWITCHES if "precision" in name or "tf32" in name}
        assert {str(value) for name, value in found.items() if name.endswith("fp32_precision")} <= {"none", "ieee"}
        assert found["torch.float32_matmul_precision"] == "highest"
        assert found["torch.backends.cuda.matmul.allow_tf32"] is found["torch.backends.cudnn.allow_tf32"] is False
        with torch.backends.cudnn.flags(enabled=True):  # reads the old switch, and raised after a mixed use
            pass


def test_a_fresh_process_is_touched_where_it_has_to_be_and_not_beyond() -> None:
    code = (
        "import torch, provenance\nfrom provenance.determinism import switches\n"
        "before = switches.snapshot(torch)\n"
        "with provenance.deterministic() as report: pass\n"
        "assert switches.snapshot(torch) == before\n"
        "assert torch.get_float32_matmul_precision() == 'highest'\n"
        "print(sorted(row.name for row in report.of('set')))\nassert 'torch._inductor.config' not in __import__('sys').modules"
    )
    made = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False)
    assert made.returncode == 0, made.stderr
    expected = [
        "env.TORCHINDUCTOR_DETERMINISTIC", "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction",
        "torch.backends.cuda.matmul.allow_fp16_reduced_precision_reduction", "torch.backends.cudnn.allow_tf32",
        "torch.backends.cudnn.deterministic", "torch.backends.mkldnn.deterministic", "torch.deterministic_algorithms",
        "torch.deterministic_warn_only",
    ]  # fmt: skip
    assert ast.literal_eval(made.stdout) == expected


def test_one_trace_stays_where_torch_has_no_way_back() -> None:
    """The default of convolutions, which nobody set, comes back as one that somebody did; the page says so."""
    code = (
        "import sys, torch, provenance\n"
        "if sys.argv[1] == 'held':\n    with provenance.deterministic(): pass\n"
        "seen = torch.backends.cudnn.conv.fp32_precision, torch.backends.cudnn.allow_tf32\n"
        "torch.backends.fp32_precision = 'ieee'\nprint(*seen, torch.backends.cudnn.conv.fp32_precision)"
    )
    said = [
        subprocess.run([sys.executable, "-c", code, which], capture_output=True, text=True, check=True).stdout.split()
        for which in ("plain", "held")
    ]
    assert said == [["tf32", "True", "ieee"], ["tf32", "True", "tf32"]]


def test_the_report_tells_all_four_outcomes_and_prints() -> None:
    with provenance.deterministic(batch_invariant=True) as report:
        assert {row.outcome for row in report} <= set(OUTCOMES)
        assert report["torch.backends.cudnn.benchmark"].outcome == ALREADY
        assert report["torch.cuda.tunable"].outcome == ABSENT
        assert report["batch_invariant_ops"].reason == "the package is not installed"
        assert "VLLM_BATCH_INVARIANT=1" in report["env.VLLM_BATCH_INVARIANT"].reason
        assert "SGLANG_ENABLE_DETERMINISTIC_INFERENCE" in report["env.SGLANG_ENABLE_DETERMINISTIC_INFERENCE"].reason
        text = str(report)
        assert all(row.name in text for row in report)
        assert {item["outcome"] for item in report.document()["switches"]} == {row.outcome for row in report}
        with pytest.raises(KeyError):
            report["no.such"]


def test_frozen_switches_are_told_as_such(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = torch.backends.ContextProp.__set__.__globals__  # the module's own: torch puts an object in its place
    monkeypatch.setitem(kept, "__allow_nonbracketed_mutation_flag", False)
    torch._C._set_cudnn_benchmark(True)
    try:
        with provenance.deterministic() as report:
            row = report["torch.backends.cudnn.benchmark"]
            assert (row.outcome, row.value) == (LATE, True)
            assert "disable_global_flags" in row.reason
    finally:
        monkeypatch.undo()
        torch._C._set_cudnn_benchmark(False)


def test_without_torch_there_is_nothing_to_hold_and_it_is_not_imported() -> None:
    code = (
        "import sys, provenance\nreport = provenance.deterministic().enable()\n"
        "assert report['torch'].outcome == 'not available here'\nsys.exit('torch' in sys.modules)"
    )
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_as_a_switch_it_holds_until_it_is_turned_off() -> None:
    before = every()
    held = provenance.deterministic()
    report = held.enable()
    assert torch.are_deterministic_algorithms_enabled()
    assert report["torch.deterministic_algorithms"].outcome == SET
    held.disable()
    held.disable()  # again changes nothing
    assert every() == before


def test_strict_raises_and_names_the_operator_and_puts_everything_back() -> None:
    before = every()
    with pytest.raises(NotDeterministic, match="put_ has") as caught:  # noqa: SIM117
        with provenance.deterministic(strict=True):
            torch.zeros(4).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
    assert caught.value.operator == "put_"
    assert every() == before
    with pytest.raises(RuntimeError, match=r"^other$"), provenance.deterministic(strict=True):
        raise RuntimeError("other")
    with warnings.catch_warnings(record=True) as said, provenance.deterministic():
        warnings.simplefilter("always")
        torch.zeros(4).put_(torch.tensor([0, 0]), torch.tensor([1.0, 2.0]))
    assert any("put_" in str(item.message) for item in said)


def test_a_block_inside_a_strict_one_stays_strict() -> None:
    with provenance.deterministic(strict=True), provenance.deterministic() as report:
        assert report["torch.deterministic_warn_only"].reason == "strict already, which is more"
        assert not torch.is_deterministic_algorithms_warn_only_enabled()


def test_attention_can_be_the_plain_kernel_alone() -> None:
    with pytest.raises(BadSetting, match="'math'"):
        provenance.deterministic(attention="flash")
    with provenance.deterministic():
        assert torch.backends.cuda.flash_sdp_enabled()
    with provenance.deterministic(attention="math"):
        assert not torch.backends.cuda.flash_sdp_enabled()
        assert torch.backends.cuda.math_sdp_enabled()


def test_batch_invariant_operators_go_in_and_out_with_the_block(monkeypatch: pytest.MonkeyPatch) -> None:
    package = types.ModuleType("batch_invariant_ops")
    on = [False]
    package.is_batch_invariant_mode_enabled = lambda: on[0]  # type: ignore[attr-defined]
    package.enable_batch_invariant_mode = lambda: on.__setitem__(0, True)  # type: ignore[attr-defined]
    package.disable_batch_invariant_mode = lambda: on.__setitem__(0, False)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "batch_invariant_ops", package)
    with provenance.deterministic():
        assert on == [False]
        with provenance.deterministic(batch_invariant=True) as outer:
            assert (outer["batch_invariant_ops"].outcome, on) == (SET, [True])
            with provenance.deterministic(batch_invariant=True) as inner:
                assert inner["batch_invariant_ops"].outcome == ALREADY
            assert on == [True]
        assert on == [False]

    def broken() -> None:
        raise OSError("no kernel")

    package.enable_batch_invariant_mode = broken  # type: ignore[attr-defined]
    with provenance.deterministic(batch_invariant=True) as report:
        assert "no kernel" in report["batch_invariant_ops"].reason


def test_on_a_cuda_build_the_workspace_is_set_in_time_or_told_as_late(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.version, "cuda", "12.8")
    monkeypatch.delenv("CUBLAS_WORKSPACE_CONFIG", raising=False)
    for running, outcome in ((False, SET), (True, LATE)):
        monkeypatch.setattr(torch.cuda, "is_initialized", lambda running=running: running)
        held = provenance.deterministic()
        report = Report()
        state = mode._State(torch)
        mode._environment(report, torch)
        assert report["env.CUBLAS_WORKSPACE_CONFIG"].outcome == outcome
        assert os.environ.get("CUBLAS_WORKSPACE_CONFIG") == (None if running else ":4096:8")
        mode._put_back(state)
        assert "CUBLAS_WORKSPACE_CONFIG" not in os.environ
        assert held.strict is False
    monkeypatch.setattr(mode, "started_with", lambda name: ":16:8" if name.startswith("CUBLAS") else None)
    report = Report()
    mode._environment(report, torch)
    assert report["env.CUBLAS_WORKSPACE_CONFIG"].value == ":16:8"


def test_a_variable_that_undoes_it_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCH_ALLOW_TF32_CUBLAS_OVERRIDE", "1")
    with provenance.deterministic() as report:
        assert "unset it" in report["env.TORCH_ALLOW_TF32_CUBLAS_OVERRIDE"].reason


def test_an_older_torch_has_the_older_settings_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as older:
        older.delattr(torch._C, "_get_fp32_precision_getter")
        found = switches.snapshot(torch)
    assert found["torch.float32_matmul_precision"] == ("highest",)
    assert found["torch.backends.cudnn.allow_tf32"] == (torch._C._get_cudnn_allow_tf32(),)
    assert "torch.fp32_precision" not in found


OPS = st.lists(
    st.one_of(
        st.tuples(st.just("open"), st.integers(0, 3)),
        st.tuples(st.just("close"), st.integers(0, 5)),
        st.tuples(st.just("raise"), st.just(0)),
        st.tuples(st.sampled_from(sorted(SETTERS)), st.integers(0, 5)),
    ),
    max_size=24,
)


@settings(max_examples=120, deadline=None)
@given(st.lists(st.tuples(st.sampled_from(sorted(SETTERS)), st.integers(0, 5)), max_size=6), OPS)
def test_whatever_happens_inside_everything_is_as_before(
    start: list[tuple[str, int]], script: list[tuple[str, int]]
) -> None:
    """Blocks that overlap in any order, each with seeded draws, programs that set switches themselves, exceptions."""
    states, first = seeds.states(), switches.snapshot(torch)
    try:
        for name, value in start:
            SETTERS[name](value)
        before = every()
        blocks: list[list[Any]] = []
        with provenance.deterministic(), provenance.seeded(1):
            for name, value in script:
                if name == "open":
                    made: list[Any] = [
                        provenance.deterministic(bool(value % 2), attention="math" if value & 2 else ""),
                        provenance.seeded(value),
                    ]
                    for block in made:
                        block.__enter__()
                    blocks.append(made)
                elif name == "close" and blocks:
                    for block in blocks.pop(value % len(blocks)):
                        block.__exit__(None, None, None)
                elif name == "raise":
                    inside = every()
                    with pytest.raises(KeyError), provenance.seeded(3), provenance.deterministic(strict=True):
                        raise KeyError
                    assert every() == inside
                elif name in SETTERS:
                    SETTERS[name](value)
            for made in blocks:
                for block in made:
                    block.__exit__(None, None, None)
        assert every() == before
    finally:
        switches.restore(torch, first)
        seeds.restore(states)


def test_threads_that_end_in_any_order_leave_everything_as_before() -> None:
    before = every()
    opened, closed = threading.Barrier(4), [threading.Event() for _ in range(4)]
    seen: list[bool] = []

    def work(number: int) -> None:
        with provenance.deterministic(strict=number == 2, attention="math" if number == 1 else ""):
            opened.wait(30)
            closed[number].wait(30)
            seen.append(torch.are_deterministic_algorithms_enabled())

    threads = [threading.Thread(target=work, args=(number,)) for number in range(4)]
    for thread in threads:
        thread.start()
    for number in (1, 0, 3, 2):
        closed[number].set()
        threads[number].join(30)
        assert torch.are_deterministic_algorithms_enabled() == (number != 2)  # held until the last is over
    assert seen == [True] * 4
    assert every() == before
