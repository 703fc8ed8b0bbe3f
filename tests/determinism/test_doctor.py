"""Doctor's rules, as tables: what is told, what is not told where it does not apply, and in which order."""

from typing import Any

import pytest

from provenance.determinism import doctor, traps, upkeep
from provenance.determinism.doctor import COSTS, NOTE, SERIOUS, WARNING, Patient, Upkeep, examine
from provenance.facts import Field, State

GPU: dict[str, Any] = {"gpu.count": 1, "torch.version": "2.13.0+cu130", "torch.num_threads": 8, "cpu.count_logical": 8}
CPU: dict[str, Any] = {"torch.version": "2.13.0", "torch.num_threads": 2, "cpu.count_logical": 2}


def fields(values: dict[str, Any]) -> dict[str, Field]:
    """Make fields; None stands for one that is known to be unset."""
    return {
        name: Field(name, None, State.UNSET) if value is None else Field(name, value) for name, value in values.items()
    }


def told(patient: Patient) -> list[tuple[str, str]]:
    return [(item.what, item.severity) for item in examine(patient, upkeep.RULES).findings]


PROCESS: list[tuple[dict[str, Any], str, str]] = [
    ({**GPU, "env.TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "1"}, "TF32 forced on", WARNING),
    ({**GPU, "env.CUBLAS_WORKSPACE_CONFIG": None}, "cuBLAS workspace", WARNING),
    ({**GPU, "env.CUBLAS_WORKSPACE_CONFIG": ":0:0"}, "cuBLAS workspace", WARNING),
    ({**GPU, "torch.backends.cudnn.benchmark": True}, "algorithms picked by timing", WARNING),
    ({**GPU, "env.PYTORCH_TUNABLEOP_ENABLED": "1"}, "tuning by timing", WARNING),
    ({**GPU, "torch.backends.cudnn.allow_tf32": True}, "TF32 in convolutions", NOTE),
    ({**GPU, "torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction": True}, "half-precision sums", NOTE),
    ({**GPU, "torch.deterministic_algorithms": False}, "operators that add in any order", NOTE),
    ({**GPU, "env.NVIDIA_TF32_OVERRIDE": None}, "TF32 in the CUDA libraries", NOTE),
    ({**GPU, "env.OMP_NUM_THREADS": None}, "threads follow the cores", NOTE),
    ({**CPU, "env.OMP_NUM_THREADS": None}, "threads follow the cores", WARNING),
    ({**CPU, "torch.float32_matmul_precision": "high"}, "precision of float32 products", WARNING),
    ({"env.DNNL_DEFAULT_FPMATH_MODE": "BF16"}, "precision of float32 products", WARNING),
    ({**CPU, "torch.blas": "mkl", "env.MKL_CBWR": None}, "products differ by processor", NOTE),
    ({"env.PYTHONHASHSEED": None}, "order of sets of strings", NOTE),
    ({"lib.vllm.version": "0.20", "env.VLLM_BATCH_INVARIANT": None}, "the engine's own mode", NOTE),
    ({"lib.sglang.version": "0.6", "env.SGLANG_ENABLE_DETERMINISTIC_INFERENCE": None}, "the engine's own mode", NOTE),
]


@pytest.mark.parametrize(("values", "what", "severity"), PROCESS)
def test_a_rule_of_the_process_tells_what_stands_there(values: dict[str, Any], what: str, severity: str) -> None:
    found = examine(Patient(fields(values)))
    assert [(item.what, item.severity, item.area) for item in found.findings] == [(what, severity, "process")]
    (item,) = found.findings
    assert item.write
    assert item.cost
    (name,) = set(values) - set(GPU) - {"torch.blas", "lib.vllm.version", "lib.sglang.version"} or {"torch.blas"}
    assert name.removeprefix("env.") in item.because  # the evidence itself


GOOD: dict[str, Any] = {
    "env.TORCH_ALLOW_TF32_CUBLAS_OVERRIDE": "0", "env.CUBLAS_WORKSPACE_CONFIG": ":16:8",
    "torch.backends.cudnn.benchmark": False, "env.PYTORCH_TUNABLEOP_ENABLED": "0",
    "torch.backends.cudnn.allow_tf32": False, "torch.deterministic_algorithms": True,
    "env.NVIDIA_TF32_OVERRIDE": "0", "env.OMP_NUM_THREADS": "2", "torch.float32_matmul_precision": "highest",
    "env.DNNL_DEFAULT_FPMATH_MODE": "strict", "torch.blas": "mkl", "env.MKL_CBWR": "COMPATIBLE",
    "env.PYTHONHASHSEED": "0", "lib.vllm.version": "0.20", "env.VLLM_BATCH_INVARIANT": "1",
}  # fmt: skip


def test_where_all_is_well_nothing_is_told() -> None:
    assert examine(Patient(fields({**GPU, **GOOD}))).findings == []


def test_no_advice_for_a_gpu_without_one_and_the_rules_are_counted() -> None:
    bad = {
        "torch.backends.cudnn.benchmark": True,
        "env.CUBLAS_WORKSPACE_CONFIG": None,
        "torch.backends.cudnn.allow_tf32": True,
    }
    found = examine(Patient(fields({**CPU, **bad})))
    assert found.findings == []
    assert found.absent == {"gpu": 8, "mkl": 1, "vllm": 1, "sglang": 1}
    assert examine(Patient(fields(CPU | {"gpu.count": 0}))).absent["gpu"] == 8
    assert "gpu" not in examine(Patient(fields({**GPU, **bad}))).absent
    assert len(examine(Patient(fields({**GPU, **bad}))).findings) == 3


def test_what_is_not_known_is_no_finding() -> None:
    unknown = {name: Field.unknown(name, "not read") for name in GOOD}
    assert examine(Patient({**fields(GPU), **unknown})).findings == []


def test_a_models_traps_are_lints_own_and_harmless_ones_are_left_out() -> None:
    table = {f"generation.{name}": Field(f"generation.{name}", value, source="model")
             for name, value in (("repetition_penalty", 1.2), ("top_p", 0.5))}  # fmt: skip
    shape = {"auto_map": {"AutoModelForCausalLM": "modeling.Own"}, "dtype": "bfloat16"}
    found = examine(Patient({}, traps.Facts(table, "transformers"), shape))
    assert [(item.what, item.severity) for item in found.findings] == [
        ("acts in greedy", WARNING), ("code that comes with the checkpoint", WARNING), ("coarse weights", NOTE)
    ]  # fmt: skip
    assert "repetition_penalty = 1.2" in found.findings[0].because
    assert found.findings[0].write == "repetition_penalty=1.0"
    assert found.bad == 2


def test_an_absent_lock_is_a_note() -> None:
    assert told(Patient(fields(CPU), locked=False)) == [("nothing pinned", NOTE), ("content is kept", NOTE)]


QUIET: dict[str, Any] = {"capture": "digest", "sqlite": "3.53.0"}
STORE: list[tuple[dict[str, Any], str, str, str]] = [
    ({"alarms": 2}, "records that contradict each other", SERIOUS, "2 alarms"),
    ({"holes": 3}, "records are missing", SERIOUS, "3 records"),
    ({"damaged": 1}, "damage in the journal", WARNING, "1 places"),
    ({"gaps": 4}, "records that could not be written", WARNING, "4 records"),
    ({"mismatch": "the database x has the older schema 0001."}, "the schema", SERIOUS, "0001"),
    ({"modes": (("/x", 0o644, 0o600),)}, "files that others can read", SERIOUS, "0644"),
    ({"free": (("/", 50 << 20, 1 << 40),)}, "room on the disk", SERIOUS, "50 MB"),
    ({"free": (("/", 2 << 30, 1 << 40),)}, "room on the disk", WARNING, "0.2 %"),
    ({"waiting": 5, "oldest": 3.0, "writer": True}, "records wait", NOTE, "a writer is at work"),
    ({"waiting": 5, "oldest": 300.0}, "records wait", WARNING, "no writer is at work"),
    ({"waiting": 20_000, "oldest": 1.0}, "records wait", WARNING, "20000"),
    ({"complaints": ("x", "the store failed")}, "the writer complained", NOTE, "the store failed"),
    ({"partial": 1}, "errors of the recorder", WARNING, "1 calls"),
    ({"crashed": 1}, "calls that never ended", NOTE, "1 calls"),
    ({"disabled": True}, "recording is off", WARNING, "PROVENANCE_DISABLED"),
    ({"there": False, "database": "/d"}, "nothing recorded yet", NOTE, "/d"),
    ({"unread": "no."}, "the store", SERIOUS, "no"),
    ({"key": "the key file k can be read by others; run: chmod 600 k"}, "the key", SERIOUS, "read by others"),
    ({"sqlite": "3.40.1"}, "an old SQLite", NOTE, "3.40.1"),
    ({"capture": "full", "server": True}, "content is kept", NOTE, "on the server"),
]  # fmt: skip


@pytest.mark.parametrize(("state", "what", "severity", "evidence"), STORE)
def test_a_rule_of_the_store_tells_what_was_read(
    state: dict[str, Any], what: str, severity: str, evidence: str
) -> None:
    (item,) = examine(Patient(upkeep=Upkeep(**{**QUIET, **state})), upkeep.RULES).findings
    assert (item.what, item.severity, item.area) == (what, severity, "store")
    assert evidence in item.because
    assert item.write
    assert item.cost


def test_a_store_that_is_well_is_not_spoken_of() -> None:
    state = Upkeep(**QUIET, modes=(("/x", 0o600, 0o600), ("/s", 0o700, 0o700)), free=(("/", 1 << 40, 1 << 41),))
    assert examine(Patient(upkeep=state), upkeep.RULES).findings == []


def test_what_is_worst_comes_first() -> None:
    state = Upkeep(alarms=1, gaps=1, sqlite="3.40.1")
    severities = [severity for _, severity in told(Patient(fields({**CPU, "env.OMP_NUM_THREADS": None}), upkeep=state))]
    assert severities == sorted(severities, key=doctor.SEVERITIES.index)
    assert severities[0] == SERIOUS


def test_every_rule_has_a_line_a_cost_and_a_place_in_the_order() -> None:
    for rule in (*doctor.RULES, *upkeep.RULES):
        assert rule.cost
        assert rule.severity in doctor.SEVERITIES
        assert 0 <= rule.weight <= 5
    assert all(COSTS.values())
