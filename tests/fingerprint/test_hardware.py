"""The machine: processor and system, each fact on its own, from files and calls."""

import psutil
import pytest

from provenance.facts import Field, State
from provenance.fingerprint import hardware


def _fields() -> dict[str, Field]:
    return {item.name: item for item in hardware.fields()}


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

    whole = _fields()
    monkeypatch.setitem(hardware.READERS, broken, refuse)
    found = _fields()
    assert found[broken].reason == "PermissionError: not for you"
    assert {name: item for name, item in found.items() if name != broken and item.known} == {
        name: item for name, item in whole.items() if name != broken and item.known
    }
