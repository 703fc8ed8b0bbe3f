"""NVIDIA devices, read by the real pynvml from a library that answers as the maker's does (tests/fakes/nvml.c)."""

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from provenance.catalogue.fields import spec
from provenance.facts import Field, State
from provenance.fingerprint import environ, environment, gpu
from provenance.fingerprint.reading import Missing
from tests.conftest import Command

Fields = dict[str, Field]
Machine = Callable[..., Fields]
A, H, L = (f"GPU-{letter * 8}-0000-4000-8000-00000000000{n}" for letter, n in (("a", 1), ("b", 2), ("c", 3)))
S3, S1 = "MIG-dddddddd-0000-4000-8000-000000000004", "MIG-eeeeeeee-0000-4000-8000-000000000005"
MIG = f"device h100\nslice 0 0 3 3 60 40448 {S3}\nslice 0 2 1 1 16 9856 {S1}\n"
TWO = "device a100\ndevice l4\n"
TWINS = f"device a100\ndevice a100 {A[:-1]}9\n"
NOT_SUPPORTED, NO_PERMISSION, FUNCTION_NOT_FOUND, NOT_LOADED, LOST, MISMATCH = 3, 4, 13, 9, 15, 18
CODE = """
import json, os, sys
from provenance.fingerprint import gpu
request = json.load(sys.stdin)
gpu.SECONDS, gpu.PROC_VERSION = request["seconds"], request["kernel"]
for scenario in request["scenarios"]:
    os.environ["FAKE_NVML"] = scenario
    print(json.dumps([[item.name, item.document()] for item in gpu.fields()]))
"""
KERNEL = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57.08  Release Build\nGCC version: 12\n"


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the library, once."""
    compiler = shutil.which("gcc") or shutil.which("cc")
    if not compiler:
        pytest.fail("these tests compile a small C file, and this machine has no C compiler; install gcc")
    place = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).parents[1] / "fakes" / "nvml.c"
    target = str(place / "libnvidia-ml.so.1")
    command = [compiler, "-shared", "-fPIC", "-Wall", "-Wextra", "-Werror", "-o", target, str(source)]
    subprocess.run(command, check=True)
    return place


def _environ(library: Path, variables: dict[str, str]) -> dict[str, str]:
    kept = {key: value for key, value in os.environ.items() if not key.startswith("CUDA_")}
    return kept | {"LD_LIBRARY_PATH": str(library)} | variables


@pytest.fixture
def machines(library: Path, python: Command, tmp_path: Path) -> Callable[..., list[Fields]]:
    """Read the devices of described machines, one after the other, in a process of its own."""

    def read(*scenarios: str, seconds: float = 60.0, kernel: str = "", **variables: str) -> list[Fields]:
        files = [tmp_path / f"scenario-{number}" for number in range(len(scenarios))]
        for file, text in zip(files, scenarios, strict=True):
            file.write_text(text)
        proc = tmp_path / "version"
        proc.write_text(kernel)
        request = {"seconds": seconds, "kernel": str(proc), "scenarios": list(map(str, files))}
        done = python(CODE, input=json.dumps(request), env=_environ(library, variables))
        assert done.returncode == 0, done.stderr
        answers = [json.loads(line) for line in done.stdout.splitlines()]
        assert len(answers) == len(scenarios)
        return [{key: Field.read(key, form) for key, form in answer} for answer in answers]

    return read


@pytest.fixture
def machine(machines: Callable[..., list[Fields]]) -> Machine:
    def read(scenario: str, **options: Any) -> Fields:
        return machines(scenario, **options)[0]

    return read


def _values(found: Fields, prefix: str) -> dict[str, Any]:
    return {key: item.value for key, item in found.items() if key.startswith(prefix) and item.state is State.VALUE}


# -- whole machines ---------------------------------------------------------------------------------


def test_an_a100(machine: Machine) -> None:
    found = machine("device a100")
    assert _values(found, "gpu.0.") | {"gpu.0.uuid_digest": ""} == {
        "gpu.0.name": "NVIDIA A100-SXM4-80GB", "gpu.0.compute_capability": "8.0", "gpu.0.memory_total": 85899345920,
        "gpu.0.vbios": "92.00.45.00.03", "gpu.0.mig_mode": 0, "gpu.0.ecc_mode": 1, "gpu.0.ecc_uncorrected": 0,
        "gpu.0.remapped_rows": [1, 0, 0, 0], "gpu.0.gsp_firmware": "580.65.06", "gpu.0.persistence_mode": 1,
        "gpu.0.compute_mode": 0, "gpu.0.cores": 6912, "gpu.0.nvlink_active": 12, "gpu.0.power_limit": 400000,
        "gpu.0.uuid_digest": "",
    }  # fmt: skip
    assert (found["gpu.count"].value, found["gpu.driver_version"].value) == (1, "580.65.06")
    assert (found["gpu.cuda_driver_api_version"].value, found["gpu.nvml_version"].value) == ("13.0", "13.580.65.06")
    assert (found["gpu.conf_compute"].value, found["gpu.visible"].value) == (False, [0])
    assert found["gpu.topology_digest"].reason == "there are no two devices"
    for name in (*gpu.SLICED, "mig_layout"):
        assert found[f"gpu.0.{name}"].show() == "not applicable: the device is not divided"
    assert found["gpu.0.multi_processor_count"].reason == "only CUDA knows it, and torch is not loaded"
    assert str(found["gpu.0.uuid_digest"].value).startswith("sha256:")
    assert "aaaaaaaa" not in json.dumps([item.document() for item in found.values()])


def test_an_h100_in_slices_tells_the_slice_in_use(machine: Machine) -> None:
    found = machine(MIG, CUDA_VISIBLE_DEVICES=S1)
    assert (found["gpu.0.mig_mode"].value, found["gpu.visible"].value) == (1, ["0:2"])
    assert [found[f"gpu.0.{name}"].value for name in gpu.SLICED] == ["1g.10gb", 1, 1, 16, 9856]
    assert found["gpu.0.mig_layout"].value == ["3g.40gb", "1g.10gb"]
    assert "eeeeeeee" not in json.dumps([item.document() for item in found.values()])


def test_a_slice_that_does_not_tell_its_profile_is_named_by_its_size(machine: Machine) -> None:
    shared = f"device h100\nslice 0 0 3 1 16 40448 {S3}\nslice 0 1 2 2 32 20096 {S1}\nunnamed\n"
    found = machine(shared)
    assert found["gpu.0.mig_layout"].value == ["1c.3g.40gb", "2g.20gb"]
    assert found["gpu.visible"].value == ["0:0"]  # CUDA takes the first slice and no other


def test_two_devices_each_have_their_own_facts_and_gaps(machine: Machine) -> None:
    found = machine(TWO, CUDA_VISIBLE_DEVICES=f"{L},GPU-aaaa")
    assert (found["gpu.0.name"].value, found["gpu.1.name"].value) == ("NVIDIA A100-SXM4-80GB", "NVIDIA L4")
    assert found["gpu.visible"].value == [1, 0]
    for name in ("mig_mode", "ecc_mode", "ecc_uncorrected", "remapped_rows", "nvlink_active"):
        assert found[f"gpu.1.{name}"].show() == "not applicable: the device or its driver does not support it"
        assert found[f"gpu.0.{name}"].state is State.VALUE, name
    assert str(found["gpu.topology_digest"].value).startswith("sha256:")


@pytest.mark.parametrize(
    ("code", "reason"),
    [
        (NOT_LOADED, "NVML: Driver Not Loaded"),
        (MISMATCH, "NVML: RM has detected an NVML/RM version mismatch."),
        (NO_PERMISSION, "NVML: Insufficient Permissions"),
    ],
)
def test_a_driver_that_refuses_says_why(machine: Machine, code: int, reason: str) -> None:
    found = machine(f"device a100\nfail nvmlInitWithFlags {code}")
    assert {item.show() for item in found.values()} == {f"unknown: {reason}"}
    assert set(found) == {*gpu.NAMES, "gpu.visible"}


def test_a_mismatch_names_the_driver_that_the_kernel_runs(machine: Machine) -> None:
    broken = f"fail nvmlInitWithFlags {MISMATCH}"
    found = machine(broken, kernel=KERNEL)["gpu.driver_version"]
    assert (found.value, found.source) == ("575.57.08", "kernel")
    assert found.reason == "NVML: RM has detected an NVML/RM version mismatch."
    assert machine(broken, kernel="something else")["gpu.driver_version"].state is State.UNKNOWN


def test_a_machine_without_the_library_says_so(python: Command, tmp_path: Path) -> None:
    (tmp_path / "libnvidia-ml.so.1").write_text("no library, so that a real one further on is not found either")
    request = {"seconds": 60, "kernel": "/none", "scenarios": [""]}
    done = python(CODE, input=json.dumps(request), env=_environ(tmp_path, {}))
    found = {key: Field.read(key, form).show() for key, form in json.loads(done.stdout)}
    assert set(found.values()) == {"unknown: NVML: NVML Shared Library Not Found"}


# -- failures, one by one ---------------------------------------------------------------------------

FUNCTIONS = {
    "nvmlDeviceGetName": "name", "nvmlDeviceGetCudaComputeCapability": "compute_capability",
    "nvmlDeviceGetMemoryInfo": "memory_total", "nvmlDeviceGetVbiosVersion": "vbios",
    "nvmlDeviceGetMigMode": "mig_mode", "nvmlDeviceGetEccMode": "ecc_mode",
    "nvmlDeviceGetTotalEccErrors": "ecc_uncorrected", "nvmlDeviceGetRemappedRows": "remapped_rows",
    "nvmlDeviceGetUUID": "uuid_digest", "nvmlDeviceGetGspFirmwareVersion": "gsp_firmware",
    "nvmlDeviceGetPersistenceMode": "persistence_mode", "nvmlDeviceGetComputeMode": "compute_mode",
    "nvmlDeviceGetNumGpuCores": "cores", "nvmlDeviceGetNvLinkState": "nvlink_active",
    "nvmlDeviceGetEnforcedPowerLimit": "power_limit",
}  # fmt: skip
SYSTEM = {
    "nvmlSystemGetDriverVersion": "gpu.driver_version", "nvmlSystemGetNVMLVersion": "gpu.nvml_version",
    "nvmlSystemGetCudaDriverVersion_v2": "gpu.cuda_driver_api_version",
    "nvmlSystemGetConfComputeState": "gpu.conf_compute", "nvmlDeviceGetTopologyCommonAncestor": "gpu.topology_digest",
}  # fmt: skip
REASONS = {NO_PERMISSION: "NVML: Insufficient Permissions", FUNCTION_NOT_FOUND: "NVML: Function Not Found"}
# What NVML does not say of a device's slices leaves open what the process can use of it.
FOLLOWS = {"mig_mode": {"gpu.1.mig_layout", "gpu.visible", *(f"gpu.1.{name}" for name in gpu.SLICED),
                        *(f"gpu.1.{name}" for name in gpu.PROPERTIES)}}  # fmt: skip


def test_the_table_of_failures_is_whole() -> None:
    assert {*FUNCTIONS.values(), "mig_layout"} == set(gpu.ASKED)


@pytest.mark.parametrize("code", [NO_PERMISSION, FUNCTION_NOT_FOUND])
def test_what_a_driver_refuses_of_one_device_costs_one_field_with_its_reason(
    code: int, machines: Callable[..., list[Fields]]
) -> None:
    whole, *broken = machines(TWINS, *(f"{TWINS}fail {function} {code} 1" for function in FUNCTIONS))
    for name, found in zip(FUNCTIONS.values(), broken, strict=True):
        moved = {key for key, item in found.items() if item.document() != whole[key].document()}
        assert found.keys() == whole.keys()
        assert found[f"gpu.1.{name}"].show() == f"unknown: {REASONS[code]}"
        assert moved - FOLLOWS.get(name, set()) == {f"gpu.1.{name}"}


def test_what_a_device_lacks_has_no_meaning_there_but_a_fact_of_every_device_is_a_gap(
    machines: Callable[..., list[Fields]],
) -> None:
    broken = machines(*(f"{TWINS}fail {function} {NOT_SUPPORTED} 1" for function in FUNCTIONS))
    states = {name: found[f"gpu.1.{name}"].state for name, found in zip(FUNCTIONS.values(), broken, strict=True)}
    gaps = {name for name, state in states.items() if state is State.UNKNOWN}
    assert gaps == {"name", "compute_capability", "memory_total", "vbios", "uuid_digest", "compute_mode", "cores"}
    assert {state for name, state in states.items() if name not in gaps} == {State.NOT_APPLICABLE}


def test_what_a_driver_refuses_of_itself_costs_one_field(machines: Callable[..., list[Fields]]) -> None:
    whole, *broken = machines(TWINS, *(f"{TWINS}fail {function} {NO_PERMISSION}" for function in SYSTEM))
    for name, found in zip(SYSTEM.values(), broken, strict=True):
        assert {key for key, item in found.items() if item.document() != whole[key].document()} == {name}
        assert found[name].show() == "unknown: NVML: Insufficient Permissions"


def test_a_device_that_fell_off_the_bus_leaves_the_others(machine: Machine) -> None:
    found = machine(f"{TWO}fail nvmlDeviceGetHandleByIndex_v2 {LOST} 0")
    assert {found[f"gpu.0.{name}"].show() for name in gpu.ASKED} == {"unknown: NVML: GPU is lost"}
    assert found["gpu.1.name"].value == "NVIDIA L4"
    assert found["gpu.visible"].reason == "NVML does not tell how gpu.0 is divided"


def test_a_driver_that_hangs_at_once_is_left_behind(machine: Machine) -> None:
    found = machine("device a100\nhang nvmlInitWithFlags", seconds=0.3)
    assert {item.show() for item in found.values()} == {"unknown: NVML did not answer within 0.3 s"}
    assert set(found) == {*gpu.NAMES, "gpu.visible"}


def test_a_function_that_hangs_costs_what_had_not_been_read_by_then(machine: Machine) -> None:
    found = machine(f"{TWO}hang nvmlDeviceGetEccMode", seconds=1.0)
    late = {name for name, item in found.items() if item.show() == "unknown: NVML did not answer within 1 s"}
    asked = list(gpu.ASKED)
    first = asked[asked.index("ecc_mode") :]
    assert late == {
        *(f"gpu.0.{name}" for name in first), *(f"gpu.1.{name}" for name in asked), "gpu.topology_digest", "gpu.visible",
    }  # fmt: skip
    assert found["gpu.0.name"].value == "NVIDIA A100-SXM4-80GB"
    assert found["gpu.driver_version"].value == "580.65.06"


def test_the_deadline_is_two_seconds() -> None:
    assert gpu.SECONDS == 2.0


# -- what the process sees --------------------------------------------------------------------------


def _device(index: int, model: str, uuid: str, *slices: tuple[int, str]) -> gpu.Device:
    parts = tuple(gpu.Slice(f"{index}:{number}", name, ()) for number, name in slices)
    return gpu.Device(index, model, uuid, divided=bool(slices), slices=parts)


ALIKE = (_device(0, "A", A), _device(1, "A", H), _device(2, "A", L))
UNLIKE = (_device(0, "A", A), _device(1, "L", L))
CUT = (_device(0, "H", A), _device(1, "H", H, (0, S3), (2, S1)))


@pytest.mark.parametrize(
    ("devices", "given", "order", "seen"),
    [
        (ALIKE, None, "", [0, 1, 2]),
        (ALIKE, "2,0", "", [2, 0]),
        (ALIKE, " 1 , 2", "", [1, 2]),
        (ALIKE, "0,2,-1,1", "", [0, 2]),
        (ALIKE, "1,9,0", "", [1]),
        (ALIKE, "1,1", "", []),
        (ALIKE, "1gpu2,2ampere", "", [1, 2]),
        (ALIKE, "", "", []),
        (ALIKE, "-1", "", []),
        (ALIKE, "NoDevFiles", "", []),
        (ALIKE, f"{L},{A}", "", [2, 0]),
        (ALIKE, "GPU-cccc,GPU-aaaaaaaa-00", "", [2, 0]),
        (ALIKE, "GPU-cccc,GPU-nobody,GPU-aaaa", "", [2]),
        (ALIKE, "GPU-cccc,1", "", [2]),
        (ALIKE, "1,GPU-cccc", "", [1]),
        (ALIKE, "GPU-", "", []),
        (ALIKE, f"GPU-aaaa,{A}", "", []),
        (UNLIKE, "1,0", "PCI_BUS_ID", [1, 0]),
        (UNLIKE, None, "PCI_BUS_ID", [0, 1]),
        (UNLIKE, f"{L}", "", [1]),
        (UNLIKE, "-1", "", []),
        (CUT, None, "", ["1:0"]),
        (CUT, "0", "", [0]),
        (CUT, "0,1", "", ["1:0"]),
        (CUT, S1, "", ["1:2"]),
        (CUT, "MIG-eeee", "", ["1:2"]),
        (CUT, f"{S1},{S3}", "", ["1:2"]),
        (CUT, "MIG-nobody", "", []),
        (CUT, H, "", ["1:0"]),
        ((), None, "", []),
    ],
)
def test_what_the_process_sees(
    devices: tuple[gpu.Device, ...], given: str | None, order: str, seen: list[object]
) -> None:
    assert gpu.visible(devices, given, order) == seen


@pytest.mark.parametrize(
    ("devices", "given", "reason"),
    [
        (UNLIKE, None, "CUDA counts unlike devices fastest first"),
        (UNLIKE, "1", "CUDA counts unlike devices fastest first"),
        ((_device(0, "A", ""),), "GPU-aaaa", "devices are chosen by UUID, and NVML does not tell those of all"),
        ((gpu.Device(0, "A", A, divided=True, slices=None),), "MIG-aaaa", "devices are chosen by UUID"),
        ((gpu.Device(0, "A", A, divided=True, slices=None),), None, "NVML does not tell how gpu.0 is divided"),
        ((gpu.Device(0, "A", A, divided=None, slices=None),), "0", "NVML does not tell how gpu.0 is divided"),
    ],
)
def test_what_cannot_be_known_is_not_guessed(devices: tuple[gpu.Device, ...], given: str | None, reason: str) -> None:
    with pytest.raises(Missing, match=reason):
        gpu.visible(devices, given)


def test_the_variables_of_the_process_are_what_counts(machines: Callable[..., list[Fields]]) -> None:
    twins, unlike = machines(TWINS, TWO, CUDA_VISIBLE_DEVICES="1")
    assert (twins["gpu.visible"].value, twins["gpu.visible"].source) == ([1], "environment")
    assert unlike["gpu.visible"].state is State.UNKNOWN
    assert machines(TWO, CUDA_VISIBLE_DEVICES="1", CUDA_DEVICE_ORDER="PCI_BUS_ID")[0]["gpu.visible"].value == [1]


def test_a_uuid_in_a_variable_is_told_apart_and_not_written_down() -> None:
    one, other = (environ.field("CUDA_VISIBLE_DEVICES", f"{uuid},1") for uuid in (A, H))
    assert one != other
    assert one == environ.field("CUDA_VISIBLE_DEVICES", f"{A},1")
    assert "aaaaaaaa" not in str(one.value)
    assert str(one.value).startswith("GPU-sha256:")
    assert str(one.value).endswith(",1")
    assert "dddd" not in str(environ.field("CUDA_VISIBLE_DEVICES", S3).value)
    assert "aaaa" not in str(environ.field("CUDA_VISIBLE_DEVICES", f"MIG-{A}/1/0").value)
    assert environ.field("CUDA_VISIBLE_DEVICES", "1,0").value == "1,0"


# -- what torch knows -------------------------------------------------------------------------------


class Cuda:
    """The part of torch.cuda that is asked. Whoever asks for a device before CUDA is up fails the test."""

    def __init__(self, *uuids: str, initialized: bool = True) -> None:
        self.uuids, self.initialized = uuids, initialized

    def is_initialized(self) -> bool:
        return self.initialized

    def device_count(self) -> int:
        assert self.initialized
        return len(self.uuids)

    def get_device_properties(self, ordinal: int) -> SimpleNamespace:
        assert self.initialized
        return SimpleNamespace(
            name=f"Test {ordinal}", major=9, minor=0, uuid=self.uuids[ordinal][4:], multi_processor_count=100 + ordinal,
            L2_cache_size=50, warp_size=32, shared_memory_per_block=48, gcnArchName="gfx942",
        )  # fmt: skip


def _torch(monkeypatch: pytest.MonkeyPatch, cuda: Cuda, hip: str | None = None) -> None:
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=cuda, version=SimpleNamespace(hip=hip)))


def _read(known: gpu.Inventory) -> Fields:
    return {item.name: item for item in gpu.fields(known)}


def test_torch_tells_order_and_properties_once_cuda_is_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "0")  # changed after CUDA came up: of no effect
    _torch(monkeypatch, Cuda(L, A))
    found = _read(gpu.Inventory(devices=ALIKE))
    assert (found["gpu.visible"].value, found["gpu.visible"].source) == ([2, 0], "torch")
    counts = [found[f"gpu.{n}.multi_processor_count"] for n in range(3)]
    assert [counts[2].value, counts[0].value] == [100, 101]
    assert counts[1].show() == "not applicable: the process does not see this device"
    assert (found["gpu.2.l2_cache_size"].value, found["gpu.2.warp_size"].value) == (50, 32)


def test_where_torch_tells_no_known_uuid_the_variable_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", S1)
    _torch(monkeypatch, Cuda(H))  # of a slice some versions tell the UUID of its device
    found = _read(gpu.Inventory(devices=CUT))
    assert (found["gpu.visible"].value, found["gpu.visible"].source) == (["1:2"], "environment")
    assert found["gpu.1.multi_processor_count"].value == 100
    _torch(monkeypatch, Cuda(S3))
    assert _read(gpu.Inventory(devices=CUT))["gpu.visible"].value == ["1:0"]


def test_nothing_is_asked_of_torch_before_the_program_has_brought_cuda_up(monkeypatch: pytest.MonkeyPatch) -> None:
    _torch(monkeypatch, Cuda(A, initialized=False))
    found = _read(gpu.Inventory(devices=ALIKE))
    assert found["gpu.0.multi_processor_count"].reason == "only CUDA knows it, and it is not up"


def test_without_nvml_torch_tells_its_devices_as_the_process_numbers_them(monkeypatch: pytest.MonkeyPatch) -> None:
    _torch(monkeypatch, Cuda(A))
    found = _read(gpu.Inventory(why="NVML: NVML Shared Library Not Found"))
    assert {key: item.value for key, item in found.items() if item.known} == {
        "gpu.0.name": "Test 0", "gpu.0.compute_capability": "9.0", "gpu.0.multi_processor_count": 100,
        "gpu.0.l2_cache_size": 50, "gpu.0.warp_size": 32, "gpu.0.shared_memory_per_block": 48,
    }  # fmt: skip
    assert found["gpu.visible"].reason == "NVML: NVML Shared Library Not Found"
    _torch(monkeypatch, Cuda(A), hip="6.4")
    assert _read(gpu.Inventory(why="NVML: none"))["gpu.0.gcn_arch"].value == "gfx942"


# -- in the environment -----------------------------------------------------------------------------


def test_devices_are_read_again_when_cuda_comes_up_and_nvml_is_asked_once(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def inventory() -> gpu.Inventory:
        asked.append(1)
        return gpu.Inventory(devices=ALIKE)

    monkeypatch.setattr(gpu, "inventory", inventory)
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    reader = environment.Environment()
    assert reader.environment().fields["gpu.visible"].value == [0, 1, 2]
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "1")
    assert reader.environment().fields["gpu.visible"].value == [1]
    assert not reader.environment().fields["gpu.1.multi_processor_count"].known
    monkeypatch.setattr(gpu, "up", lambda: True)
    monkeypatch.setitem(sys.modules, "torch", SimpleNamespace(cuda=Cuda(H), version=SimpleNamespace(hip=None)))
    assert reader.environment().fields["gpu.1.multi_processor_count"].value == 100
    assert reader.environment() is reader.environment()
    # a forked child may not use its parent's CUDA, and is on the same devices
    monkeypatch.setattr(gpu, "up", lambda: False)
    child = environment.Environment(reader).environment().fields
    assert child["gpu.1.multi_processor_count"].value == 100
    assert len(asked) == 1


def test_the_command_tells_the_devices_and_every_field_is_declared(
    library: Path, command: Command, tmp_path: Path
) -> None:
    (tmp_path / "machine").write_text(MIG)
    variables = {"FAKE_NVML": str(tmp_path / "machine"), "CUDA_VISIBLE_DEVICES": S1}
    said = command("env", "--no-torch", "--json", env=_environ(library, variables))
    fields = json.loads(said.stdout)["environment"]
    assert fields["gpu.0.name"]["value"] == "NVIDIA H100 80GB HBM3"
    assert fields["gpu.0.mig_profile"]["value"] == "1g.10gb"
    assert [name for name in fields if name.startswith("gpu.") and spec(name).group == "other"] == []
    assert "eeeeeeee" not in said.stdout


# -- the script for a machine that has one ----------------------------------------------------------

CHECK = str(Path(__file__).parents[2] / "scripts" / "gpu-check")


@pytest.fixture
def check(library: Path, tmp_path: Path) -> Callable[..., "subprocess.CompletedProcess[str]"]:
    """Run scripts/gpu-check on a machine that NVML describes and CUDA cannot use."""

    def run(*arguments: str, **variables: str) -> "subprocess.CompletedProcess[str]":
        (tmp_path / "machine").write_text(MIG)
        environ = _environ(library, {"FAKE_NVML": str(tmp_path / "machine"), "CUDA_VISIBLE_DEVICES": S1, **variables})
        command = [sys.executable, CHECK, *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=240, check=False, env=environ)

    return run


def _rows(said: str) -> dict[str, list[str]]:
    return {line.split()[0]: line.split(maxsplit=2)[1:] for line in said.splitlines() if line.startswith("gpu.")}


def test_the_check_says_in_one_sentence_that_there_is_no_gpu(
    check: Callable[..., "subprocess.CompletedProcess[str]"],
) -> None:
    done = check(CUDA_VISIBLE_DEVICES="")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("gpu-check: torch ")
    assert done.stderr.endswith(" sees no GPU on this machine; nothing was checked.\n")
    assert done.stderr.count("\n") == 1


def test_the_check_names_a_python_that_cannot_be_started(
    check: Callable[..., "subprocess.CompletedProcess[str]"],
) -> None:
    done = check(PYTHON="/none/python")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr == "gpu-check: PYTHON=/none/python cannot be started: No such file or directory.\n"


def test_the_check_tables_every_field_with_its_state(check: Callable[..., "subprocess.CompletedProcess[str]"]) -> None:
    done = check("--table")
    assert (done.returncode, done.stderr) == (0, "")
    rows = _rows(done.stdout)
    assert {f"gpu.0.{name}" for name in (*gpu.ASKED, *gpu.SLICED, *gpu.PROPERTIES)} | {
        *gpu.NAMES,
        "gpu.visible",
    } == set(rows)
    assert rows["gpu.0.name"] == ["value", "NVIDIA H100 80GB HBM3"]
    assert rows["gpu.0.mig_profile"] == ["value", "1g.10gb"]
    assert rows["gpu.topology_digest"] == ["not_applicable", "there are no two devices"]
    assert rows["gpu.0.warp_size"] == ["unknown", "only CUDA knows it, and torch is not loaded"]
    assert "eeeeeeee" not in done.stdout


def test_the_check_rehearses_on_a_cpu_what_it_does_on_a_gpu(
    check: Callable[..., "subprocess.CompletedProcess[str]"],
) -> None:
    done = check("--rehearse")
    assert done.returncode == 0, done.stdout + done.stderr
    assert _rows(done.stdout)["gpu.0.mig_profile"] == ["value", "1g.10gb"]  # as the record holds it
    *_, costs, equal, verdict = done.stdout.splitlines()
    assert costs.startswith("NVML, every device: ")
    assert equal == "bit-equal with and without the recorder, one prompt and 8, torch.bfloat16: yes"
    assert verdict == "gpu-check: all held (rehearsed on the CPU, no GPU was checked)"
    assert "could not" not in done.stderr
