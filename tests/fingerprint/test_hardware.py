"""The machine and its NVIDIA devices: read once, each fact on its own; a driver that fails or hangs gives a reason."""

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import psutil
import pynvml
import pytest

from provenance.facts import Field, State
from provenance.fingerprint import gpu, hardware


class FakeNvml:
    """A driver with devices, put in place of the functions of pynvml. Each answer can be a value or an exception."""

    def __init__(self, devices: int = 2) -> None:
        self.closed = 0
        self.opened = 0
        self.answers: dict[str, Any] = {
            "nvmlInit": self._open, "nvmlShutdown": self._close, "nvmlDeviceGetCount": devices,
            "nvmlSystemGetDriverVersion": b"575.57.08", "nvmlSystemGetCudaDriverVersion_v2": 12090,
            "nvmlSystemGetNVMLVersion": "12.575.57.08", "nvmlDeviceGetHandleByIndex": lambda index: index,
            "nvmlDeviceGetName": lambda index: f"NVIDIA Test {index}",
            "nvmlDeviceGetCudaComputeCapability": (9, 0),
            "nvmlDeviceGetMemoryInfo": SimpleNamespace(total=150_000_000_000),
            "nvmlDeviceGetVbiosVersion": b"96.00.A5", "nvmlDeviceGetMigMode": [0, 0], "nvmlDeviceGetEccMode": [1, 1],
            "nvmlDeviceGetPersistenceMode": 1, "nvmlDeviceGetComputeMode": 0,
        }  # fmt: skip

    def _open(self) -> None:
        self.opened += 1

    def _close(self) -> None:
        self.closed += 1

    def install(self, monkeypatch: pytest.MonkeyPatch) -> None:
        for name, answer in self.answers.items():
            monkeypatch.setattr(pynvml, name, self._function(answer))

    def _function(self, answer: Any) -> Callable[..., Any]:
        def call(*arguments: Any) -> Any:
            if isinstance(answer, BaseException):
                raise answer
            return answer(*arguments) if callable(answer) else answer

        return call


@pytest.fixture
def nvml() -> FakeNvml:
    return FakeNvml()


def _fields() -> dict[str, Field]:
    return {item.name: item for item in hardware.fields() + gpu.fields()}


def _error(code: int) -> Any:
    return pynvml.NVMLError(code)


def test_driver_and_devices_are_read(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.install(monkeypatch)
    found = _fields()
    expected = {
        "gpu.count": 2, "gpu.driver_version": "575.57.08", "gpu.cuda_driver_api_version": "12.9",
        "gpu.nvml_version": "12.575.57.08", "gpu.0.name": "NVIDIA Test 0", "gpu.1.name": "NVIDIA Test 1",
        "gpu.0.compute_capability": "9.0", "gpu.1.memory_total": 150_000_000_000, "gpu.0.vbios": "96.00.A5",
        "gpu.0.mig_mode": 0, "gpu.0.ecc_mode": 1, "gpu.0.persistence_mode": 1, "gpu.0.compute_mode": 0,
    }  # fmt: skip
    assert {name: found[name].value for name in expected} == expected
    assert {found[name].source for name in expected} == {"nvml"}
    assert (nvml.opened, nvml.closed) == (1, 1)


def test_without_a_driver_there_is_one_reason_and_no_traceback(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.answers["nvmlInit"] = _error(pynvml.NVML_ERROR_DRIVER_NOT_LOADED)
    nvml.install(monkeypatch)
    found = _fields()
    for name in gpu.NAMES:
        assert found[name].state is State.UNKNOWN
        assert found[name].reason == "NVML: Driver Not Loaded"
    assert [name for name in found if name.startswith("gpu.0")] == []
    assert nvml.closed == 0
    assert found["cpu.arch"].known


def test_a_library_that_is_not_there_is_a_reason_too(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    nvml.answers["nvmlInit"] = OSError("libnvidia-ml.so.1: cannot open shared object file")
    nvml.install(monkeypatch)
    found = _fields()
    assert {found[name].reason for name in gpu.NAMES} == {"OSError: libnvidia-ml.so.1: cannot open shared object file"}


DEVICE = {
    "nvmlDeviceGetName": "gpu.0.name", "nvmlDeviceGetCudaComputeCapability": "gpu.0.compute_capability",
    "nvmlDeviceGetMemoryInfo": "gpu.0.memory_total", "nvmlDeviceGetVbiosVersion": "gpu.0.vbios",
    "nvmlDeviceGetMigMode": "gpu.0.mig_mode", "nvmlDeviceGetEccMode": "gpu.0.ecc_mode",
    "nvmlDeviceGetPersistenceMode": "gpu.0.persistence_mode", "nvmlDeviceGetComputeMode": "gpu.0.compute_mode",
    "nvmlSystemGetDriverVersion": "gpu.driver_version",
    "nvmlSystemGetCudaDriverVersion_v2": "gpu.cuda_driver_api_version",
    "nvmlSystemGetNVMLVersion": "gpu.nvml_version",
}  # fmt: skip


@pytest.mark.parametrize("function", sorted(DEVICE))
@pytest.mark.parametrize("how", ["not supported", "not in this version"])
def test_what_a_driver_does_not_answer_costs_one_field_a_device(
    function: str, how: str, nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    nvml.install(monkeypatch)
    whole = _fields()
    if how == "not supported":
        nvml.answers[function] = _error(pynvml.NVML_ERROR_NOT_SUPPORTED)
        nvml.install(monkeypatch)
    else:
        monkeypatch.delattr(pynvml, function)
    found = _fields()
    assert found.keys() == whole.keys()
    silent = {name for name, item in found.items() if item.state is not whole[name].state}
    name = DEVICE[function]
    expected = {name, name.replace("gpu.0", "gpu.1")} if ".0." in name else {name}
    assert silent - {"gpu.0.mig_profile", "gpu.1.mig_profile"} == expected  # slices are asked of a divided device alone
    if how == "not supported":
        assert found[name].reason.startswith("the device or its driver" if ".0." in name else "NVMLError")
    else:
        assert found[name].reason.startswith("absent in this version: ")


def test_a_device_that_fell_off_the_bus_leaves_the_others(nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch) -> None:
    def handle(index: int) -> int:
        if index == 0:
            raise _error(pynvml.NVML_ERROR_GPU_IS_LOST)
        return index

    nvml.answers["nvmlDeviceGetHandleByIndex"] = handle
    nvml.install(monkeypatch)
    found = _fields()
    assert found["gpu.0.name"].reason.startswith("NVML: GPU is lost")
    assert found["gpu.1.name"].value == "NVIDIA Test 1"


@pytest.mark.parametrize("function", ["nvmlInit", "nvmlDeviceGetCount", "nvmlDeviceGetEccMode"])
def test_a_driver_that_hangs_is_left_behind_after_the_deadline(
    function: str, nvml: FakeNvml, monkeypatch: pytest.MonkeyPatch
) -> None:
    release = threading.Event()
    nvml.answers[function] = lambda *arguments: release.wait(60)
    nvml.install(monkeypatch)
    monkeypatch.setattr(gpu, "SECONDS", 0.1)
    try:
        found = _fields()
    finally:
        release.set()
    for thread in threading.enumerate():
        if thread.name == "provenance-NVML":
            thread.join(30)
    assert {found[name].reason for name in gpu.NAMES} == {"NVML did not answer within 0.1 s"}
    assert found["cpu.arch"].known


def test_the_deadline_is_two_seconds() -> None:
    assert gpu.SECONDS == 2.0


# -- processor and system ---------------------------------------------------------------------------


@pytest.fixture
def processor(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """Give the machine another /proc/cpuinfo."""
    facts = {
        "model name": "Test 9000",
        "vendor_id": "TestVendor",
        "microcode": "0x1",
        "flags": "sse4_2 avx2 fma avx zz",
    }
    monkeypatch.setattr(hardware, "_cpuinfo", lambda: facts)
    return facts


def test_the_processor_is_read(processor: dict[str, str]) -> None:
    found = _fields()
    assert found["cpu.model"].value == "Test 9000"
    assert found["cpu.vendor"].value == "TestVendor"
    assert found["cpu.microcode"].value == "0x1"
    assert found["cpu.isa"].value == ["sse4_2", "avx", "avx2", "fma"]


def test_the_digest_of_its_flags_knows_no_order(processor: dict[str, str]) -> None:
    before = hardware.cpu_flags()
    processor["flags"] = "avx zz fma sse4_2 avx2"
    assert hardware.cpu_flags() == before
    processor["flags"] = "avx zz fma sse4_2"
    assert hardware.cpu_flags() != before


def test_a_processor_that_lists_features_instead_of_flags_is_read(processor: dict[str, str]) -> None:
    processor.pop("flags")
    processor["Features"] = "asimd sve bf16"
    assert hardware.cpu_isa() == ["asimd", "sve", "bf16"]
    assert hardware.cpu_flags().startswith("sha256:")


def test_a_processor_that_says_nothing_is_unknown_field_by_field(
    processor: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    processor.clear()
    found = _fields()
    assert found["cpu.microcode"].reason == "/proc/cpuinfo has no 'microcode'"
    assert found["cpu.flags_digest"].state is State.UNKNOWN
    assert found["cpu.arch"].known


def test_the_machine_agrees_with_psutil() -> None:
    found = _fields()
    assert found["memory.total_bytes"].value == psutil.virtual_memory().total
    assert found["cpu.count_logical"].value == psutil.cpu_count()
    assert found["cpu.affinity"].value == len(psutil.Process().cpu_affinity())


@pytest.mark.parametrize("broken", sorted(hardware.READERS))
def test_each_reader_of_the_machine_fails_alone(broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse() -> object:
        raise PermissionError("not for you")

    monkeypatch.setattr(gpu, "nvidia", list)
    whole = _fields()
    monkeypatch.setitem(hardware.READERS, broken, refuse)
    found = _fields()
    assert found[broken].reason == "PermissionError: not for you"
    assert {name: item for name, item in found.items() if name != broken and item.known} == {
        name: item for name, item in whole.items() if name != broken and item.known
    }
