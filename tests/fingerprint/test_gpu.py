"""NVIDIA devices, read by the real pynvml from a library that answers as the maker's does (tests/fakes/nvml.c)."""

import json
import os
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from provenance.facts import Field, State
from provenance.fingerprint import gpu
from tests.conftest import Command

Machine = Callable[..., dict[str, Field]]
CODE = """
import json, sys
from provenance.fingerprint import gpu
seconds, kernel = json.loads(sys.argv[1])
gpu.SECONDS = seconds
gpu.PROC_VERSION = kernel
print(json.dumps([[item.name, item.document()] for item in gpu.fields()]))
"""
KERNEL = "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  575.57.08  Release Build\nGCC version: 12\n"


@pytest.fixture(scope="session")
def library(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Compile the library, once."""
    compiler = shutil.which("cc") or shutil.which("gcc")
    assert compiler, "these tests compile a small C file; install gcc"
    place = tmp_path_factory.mktemp("nvml")
    source = Path(__file__).parents[1] / "fakes" / "nvml.c"
    subprocess.run(
        [compiler, "-shared", "-fPIC", "-Wall", "-Werror", "-o", str(place / "libnvidia-ml.so.1"), str(source)],
        check=True,
    )
    return place


@pytest.fixture
def machine(library: Path, python: Command, tmp_path: Path) -> Machine:
    """Read the devices of a named machine in a process of its own."""

    def read(name: str, seconds: float = 20.0, kernel: str = "", **variables: str) -> dict[str, Field]:
        proc = tmp_path / "version"
        if kernel:
            proc.write_text(kernel)
        environ = {key: value for key, value in os.environ.items() if not key.startswith("CUDA_")}
        environ |= {"LD_LIBRARY_PATH": str(library), "FAKE_NVML": name, **variables}
        done = python(CODE, json.dumps([seconds, str(proc)]), env=environ)
        assert done.returncode == 0, done.stderr
        return {key: Field.read(key, form) for key, form in json.loads(done.stdout)}

    return read


def _values(found: dict[str, Field], prefix: str) -> dict[str, Any]:
    return {key: item.value for key, item in found.items() if key.startswith(prefix) and item.state is State.VALUE}


def test_an_a100(machine: Machine) -> None:
    found = machine("a100")
    assert _values(found, "gpu.0.") | {"gpu.0.uuid_digest": ""} == {
        "gpu.0.name": "NVIDIA A100-SXM4-80GB", "gpu.0.compute_capability": "8.0", "gpu.0.memory_total": 85899345920,
        "gpu.0.vbios": "92.00.45.00.03", "gpu.0.mig_mode": 0, "gpu.0.ecc_mode": 1, "gpu.0.ecc_uncorrected": 0,
        "gpu.0.remapped_rows": [1, 0, 0, 0], "gpu.0.gsp_firmware": "580.65.06", "gpu.0.persistence_mode": 1,
        "gpu.0.compute_mode": 0, "gpu.0.cores": 6912, "gpu.0.nvlink_active": 12, "gpu.0.power_limit": 400000,
        "gpu.0.uuid_digest": "",
    }  # fmt: skip
    assert (found["gpu.count"].value, found["gpu.driver_version"].value) == (1, "580.65.06")
    assert (found["gpu.cuda_driver_api_version"].value, found["gpu.nvml_version"].value) == ("13.0", "13.580.65.06")
    assert found["gpu.0.mig_profile"].reason == "the device is not divided"
    assert found["gpu.topology_digest"].reason == "there is one device"
    assert found["gpu.visible"].value == [0]
    assert found["gpu.0.multi_processor_count"].reason == "only CUDA knows it, and torch is not loaded"
    assert str(found["gpu.0.uuid_digest"].value).startswith("sha256:")
    assert "aaaaaaaa" not in json.dumps([item.document() for item in found.values()])


def test_an_h100_in_slices(machine: Machine) -> None:
    found = machine("h100-mig", CUDA_VISIBLE_DEVICES="MIG-eeeeeeee-0000-4000-8000-000000000005")
    assert found["gpu.0.mig_mode"].value == 1
    assert found["gpu.0.mig_profile"].value == ["3g.40gb, 60 SM", "1g.10gb, 16 SM"]
    assert found["gpu.visible"].value == ["0:2"]


@pytest.mark.parametrize(
    ("variables", "seen"),
    [
        ({}, [0, 1]),
        ({"CUDA_VISIBLE_DEVICES": "GPU-cccccccc-0000-4000-8000-000000000003,GPU-aaaaaaaa"}, [1, 0]),
        ({"CUDA_VISIBLE_DEVICES": "1,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, [1, 0]),
        ({"CUDA_VISIBLE_DEVICES": "1,9,0", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, [1]),
        ({"CUDA_VISIBLE_DEVICES": "1,1", "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}, [1]),
        ({"CUDA_VISIBLE_DEVICES": ""}, []),
        ({"CUDA_VISIBLE_DEVICES": "-1"}, []),
        ({"CUDA_VISIBLE_DEVICES": "NoDevFiles"}, []),
        ({"CUDA_VISIBLE_DEVICES": "GPU-none"}, []),
    ],
)
def test_what_the_process_sees_of_two_devices(machine: Machine, variables: dict[str, str], seen: list[int]) -> None:
    found = machine("two", **variables)
    assert found["gpu.visible"].value == seen
    assert (found["gpu.0.name"].value, found["gpu.1.name"].value) == ("NVIDIA A100-SXM4-80GB", "NVIDIA L4")


def test_two_devices_by_number_in_no_named_order_are_not_guessed(machine: Machine) -> None:
    found = machine("two", CUDA_VISIBLE_DEVICES="1")["gpu.visible"]
    assert (found.state, found.reason.partition(";")[0]) == (
        State.UNKNOWN, "devices are chosen by number, fastest first",
    )  # fmt: skip


def test_what_a_device_cannot_say_is_a_reason_of_its_own(machine: Machine) -> None:
    found = machine("two")
    for name in ("mig_mode", "ecc_mode", "remapped_rows", "nvlink_active"):
        assert found[f"gpu.1.{name}"].state is State.NOT_APPLICABLE, name
        assert found[f"gpu.0.{name}"].state is State.VALUE, name
    assert found["gpu.1.ecc_uncorrected"].reason == "NVML: Insufficient Permissions"
    assert str(found["gpu.topology_digest"].value).startswith("sha256:")


@pytest.mark.parametrize(
    ("name", "reason"),
    [
        ("missing-driver", "NVML: Driver Not Loaded"),
        ("mismatch", "NVML: RM has detected an NVML/RM version mismatch."),
        ("denied", "NVML: Insufficient Permissions"),
    ],
)
def test_a_driver_that_refuses_says_why(machine: Machine, name: str, reason: str) -> None:
    found = machine(name)
    assert {item.reason for item in found.values()} == {reason}
    assert set(found) == set(gpu.NAMES)


def test_a_mismatch_names_the_driver_that_the_kernel_runs(machine: Machine) -> None:
    found = machine("mismatch", kernel=KERNEL)["gpu.driver_version"]
    assert (found.value, found.source) == ("575.57.08", "kernel")
    assert found.reason == "NVML: RM has detected an NVML/RM version mismatch."
    assert machine("mismatch", kernel="something else")["gpu.driver_version"].state is State.UNKNOWN


def test_a_driver_that_hangs_is_left_behind(machine: Machine) -> None:
    found = machine("hangs", seconds=0.3)
    assert {item.reason for item in found.values()} == {"NVML did not answer within 0.3 s"}


def test_a_machine_without_the_library_says_so(python: Command) -> None:
    done = python(CODE, json.dumps([20, "/none"]), env={**os.environ, "LD_LIBRARY_PATH": ""})
    found = dict(json.loads(done.stdout))
    if "value" not in found["gpu.count"]:
        assert "NVML" in found["gpu.count"]["reason"]


def test_the_whole_environment_holds_the_devices(library: Path, command: Command) -> None:
    environ = {**os.environ, "LD_LIBRARY_PATH": str(library), "FAKE_NVML": "h100-mig"}
    fields = json.loads(command("env", "--no-torch", "--json", env=environ).stdout)["environment"]
    assert fields["gpu.0.name"]["value"] == "NVIDIA H100 80GB HBM3"
    from provenance.catalogue.fields import spec

    assert [name for name in fields if name.startswith("gpu.") and spec(name).group == "other"] == []
