"""NVIDIA devices, through NVML: the driver, every device on its own, and which of them the process can see.

``gpu.N`` is the device with NVML's index N, whatever the process calls it; ``gpu.visible`` lists, in the order of the
process, what CUDA_VISIBLE_DEVICES leaves it. No CUDA context is made: what only CUDA knows (multiprocessors, caches)
is asked of torch, and only once the program itself has brought CUDA up. A driver that hangs is left behind after two
seconds.
"""

import hashlib
import os
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from provenance.facts import Field
from provenance.fingerprint.reading import Missing, Moot, Reader, read, read_all, within

SECONDS = 2.0
NAMES = ("gpu.count", "gpu.driver_version", "gpu.cuda_driver_api_version", "gpu.nvml_version")
LINKS = 18  # the most that a device has today
PROC_VERSION = "/proc/driver/nvidia/version"


def fields() -> list[Field]:
    """Read driver and devices. A machine without a driver gives one reason and no traceback."""
    return within(SECONDS, "NVML", nvidia, NAMES)


def nvidia() -> list[Field]:
    """Read driver and devices. What it raises, `within` turns into a reason."""
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError as error:
        found = [Field.unknown(name, f"NVML: {error}") for name in NAMES]
        return [_by_kernel(item) if item.name == "gpu.driver_version" else item for item in found]
    try:
        found = read_all(_system(pynvml), "nvml")
        count = found[0].value if isinstance(found[0].value, int) else 0
        handles: list[Any] = []
        for index in range(count):
            found += _device(pynvml, index, handles)
        found.append(read("gpu.visible", lambda: visible(pynvml, handles), "environment"))
        found.append(read("gpu.topology_digest", lambda: _topology(pynvml, handles), "nvml"))
        return found
    finally:
        pynvml.nvmlShutdown()


def _by_kernel(item: Field) -> Field:
    """Read the version of a loaded driver from the kernel, where NVML does not answer: that is the mismatch itself."""
    path = Path(PROC_VERSION)
    if not path.is_file():
        return item
    match = re.search(
        r"Kernel Module(?: for \S+)?\s+([0-9][0-9.]+)", path.read_text(encoding="utf-8", errors="replace")
    )
    return Field(item.name, match[1], reason=item.reason, source="kernel") if match else item


def _system(nvml: Any) -> dict[str, Reader]:
    return {
        "gpu.count": nvml.nvmlDeviceGetCount,
        "gpu.driver_version": lambda: _text(nvml.nvmlSystemGetDriverVersion()),
        "gpu.cuda_driver_api_version": lambda: _cuda(nvml.nvmlSystemGetCudaDriverVersion_v2()),
        "gpu.nvml_version": lambda: _text(nvml.nvmlSystemGetNVMLVersion()),
        "gpu.conf_compute": _supported(nvml, lambda: bool(nvml.nvmlSystemGetConfComputeState().ccFeature)),
    }


def _device(nvml: Any, index: int, handles: list[Any]) -> list[Field]:
    prefix = f"gpu.{index}"
    try:
        handle = nvml.nvmlDeviceGetHandleByIndex(index)
    except nvml.NVMLError as error:
        handles.append(None)
        return [Field.unknown(f"{prefix}.name", f"NVML: {error}")]
    handles.append(handle)
    found = [read(f"{prefix}.{name}", _supported(nvml, ask), "nvml") for name, ask in _asked(nvml, handle).items()]
    return found + [read(f"{prefix}.{name}", ask, "torch") for name, ask in _cuda_properties(nvml, handle).items()]


def _asked(nvml: Any, handle: Any) -> dict[str, Reader]:
    return {
        "name": lambda: _text(nvml.nvmlDeviceGetName(handle)),
        "compute_capability": lambda: "{}.{}".format(*nvml.nvmlDeviceGetCudaComputeCapability(handle)),
        "memory_total": lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        "vbios": lambda: _text(nvml.nvmlDeviceGetVbiosVersion(handle)),
        "mig_mode": lambda: nvml.nvmlDeviceGetMigMode(handle)[0],
        "mig_profile": lambda: _slices(nvml, handle),
        "ecc_mode": lambda: nvml.nvmlDeviceGetEccMode(handle)[0],
        "ecc_uncorrected": lambda: int(nvml.nvmlDeviceGetTotalEccErrors(handle, 1, 0)),
        "remapped_rows": lambda: list(nvml.nvmlDeviceGetRemappedRows(handle)),
        "uuid_digest": lambda: _digest(_text(nvml.nvmlDeviceGetUUID(handle))),
        "gsp_firmware": lambda: _text(nvml.nvmlDeviceGetGspFirmwareVersion(handle)),
        "persistence_mode": lambda: nvml.nvmlDeviceGetPersistenceMode(handle),
        "compute_mode": lambda: nvml.nvmlDeviceGetComputeMode(handle),
        "cores": lambda: nvml.nvmlDeviceGetNumGpuCores(handle),
        "nvlink_active": lambda: _links(nvml, handle),
        "power_limit": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle),
    }


def _supported(nvml: Any, ask: Reader) -> Reader:
    """Say of what a device does not have that it has no meaning there; other errors stay reasons."""

    def asked() -> object:
        try:
            return ask()
        except nvml.NVMLError as error:
            if error.value == nvml.NVML_ERROR_NOT_SUPPORTED:
                raise Moot("the device or its driver does not support it") from None
            raise Missing(f"NVML: {error}") from None

    return asked


def _slices(nvml: Any, handle: Any) -> list[str]:
    """Return the slices of a divided device: multiprocessors and memory of each, as they decide kernels."""
    if not nvml.nvmlDeviceGetMigMode(handle)[0]:
        raise Moot("the device is not divided")
    found = []
    for index in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, index)
        except nvml.NVMLError:
            continue
        has = nvml.nvmlDeviceGetAttributes_v2(part)
        found.append(f"{has.gpuInstanceSliceCount}g.{round(has.memorySizeMB / 1024)}gb, {has.multiprocessorCount} SM")
    return found


def _links(nvml: Any, handle: Any) -> int:
    active = 0
    for link in range(LINKS):
        try:
            active += bool(nvml.nvmlDeviceGetNvLinkState(handle, link))
        except nvml.NVMLError:
            if link == 0:
                raise
            break
    return active


def _topology(nvml: Any, handles: list[Any]) -> str:
    """Digest how the devices hang together: collective sums choose their order by it."""
    known = [handle for handle in handles if handle is not None]
    if len(known) < 2:
        raise Moot("there is one device")
    rows = [[nvml.nvmlDeviceGetTopologyCommonAncestor(a, b) for b in known if b is not a] for a in known]
    return _digest(repr(rows))


# -- what the process sees --------------------------------------------------------------------------


def visible(nvml: Any, handles: list[Any]) -> list[object]:
    """Return NVML's indices of the devices that the process sees, in its order; a slice by its parent's index.

    CUDA reads the variable up to the first entry that it cannot place, and so does this. By number it counts in the
    order of CUDA_DEVICE_ORDER, fastest first unless told otherwise; NVML counts by bus, so a number is only placed
    where the order is PCI_BUS_ID or there is one device.

    Raises Missing where numbers cannot be placed.
    """
    given = os.environ.get("CUDA_VISIBLE_DEVICES")
    if given is None:
        return list(range(len(handles)))
    uuids = [_text(nvml.nvmlDeviceGetUUID(handle)) if handle is not None else "" for handle in handles]
    found: list[object] = []
    for entry in (part.strip() for part in given.split(",")):
        place = _place(nvml, entry, handles, uuids)
        if place is None or place in found:
            break
        found.append(place)
    return found


def _place(nvml: Any, entry: str, handles: list[Any], uuids: list[str]) -> object:
    if entry.isdigit():
        if len(handles) > 1 and os.environ.get("CUDA_DEVICE_ORDER") != "PCI_BUS_ID":
            raise Missing("devices are chosen by number, fastest first; set CUDA_DEVICE_ORDER=PCI_BUS_ID to name them")
        return int(entry) if int(entry) < len(handles) else None
    if entry.startswith("GPU-"):
        alike = [index for index, uuid in enumerate(uuids) if uuid.startswith(entry)]
        return alike[0] if len(alike) == 1 else None
    if entry.startswith("MIG-"):
        return _slice(nvml, entry, handles)
    return None


def _slice(nvml: Any, uuid: str, handles: list[Any]) -> object:
    for index, handle in enumerate(handles):
        for part in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle) if handle is not None else 0):
            try:
                there = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, part)
            except nvml.NVMLError:
                continue
            if _text(nvml.nvmlDeviceGetUUID(there)).startswith(uuid):
                return f"{index}:{part}"
    return None


# -- what torch knows -------------------------------------------------------------------------------

PROPERTIES = {
    "multi_processor_count": "multi_processor_count", "l2_cache_size": "L2_cache_size", "warp_size": "warp_size",
    "shared_memory_per_block": "shared_memory_per_block",
}  # fmt: skip


def _cuda_properties(nvml: Any, handle: Any) -> dict[str, Reader]:
    """Read what CUDA alone knows of a device, of the one with the same UUID among those that torch has brought up."""

    def properties() -> Any:
        torch: Any = sys.modules.get("torch")
        if torch is None or torch.version.cuda is None:
            raise Missing("only CUDA knows it, and torch is not loaded" if torch is None else "torch has no CUDA")
        if not torch.cuda.is_initialized():
            raise Missing("only CUDA knows it, and the program has not brought CUDA up")
        wanted = _text(nvml.nvmlDeviceGetUUID(handle)).removeprefix("GPU-")
        for index in range(torch.cuda.device_count()):
            found = torch.cuda.get_device_properties(index)
            if str(getattr(found, "uuid", "")) == wanted:
                return found
        raise Missing("the process does not see this device")

    def one(name: str) -> Callable[[], object]:
        return lambda: getattr(properties(), name)

    return {field: one(name) for field, name in PROPERTIES.items()}


def _digest(text: str) -> str:
    return "sha256:" + hashlib.sha256(text.encode()).hexdigest()


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)


def _cuda(version: int) -> str:
    return f"{version // 1000}.{version % 1000 // 10}"
