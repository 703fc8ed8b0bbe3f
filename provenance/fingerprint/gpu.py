"""NVIDIA devices, through NVML: the driver, every device on its own, and which of them the process can see.

``gpu.N`` is the device with NVML's index N, whatever the process calls it; ``gpu.visible`` lists, in the order of the
process, what it is left with. NVML is asked once (`inventory`); what follows from the variables and from torch is
worked out again whenever they move (`fields`). No CUDA context is made: what only CUDA knows is asked of torch, and
only once the program itself has brought CUDA up. A driver that hangs is left behind after two seconds, and what it had
answered by then is kept.
"""

import os
import re
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from operator import attrgetter
from pathlib import Path
from typing import Any

from provenance.facts import Field, State
from provenance.fingerprint.reading import Missing, Moot, Reader, read, read_all, within
from provenance.integrity.digests import file_digest

SECONDS = 2.0
NAMES = ("gpu.count", "gpu.driver_version", "gpu.cuda_driver_api_version", "gpu.nvml_version", "gpu.conf_compute",
         "gpu.topology_digest")  # fmt: skip
# Not every device has these: where NVML says "not supported" they have no meaning. Of any other fact it is a gap.
OPTIONAL = frozenset((
    "mig_mode", "mig_layout", "ecc_mode", "ecc_uncorrected", "remapped_rows", "gsp_firmware", "nvlink_active",
    "power_limit", "persistence_mode", "gpu.conf_compute", "gpu.topology_digest",
))  # fmt: skip
LINKS = 36  # the most that a device has today
PROC_VERSION = "/proc/driver/nvidia/version"


@dataclass(frozen=True, slots=True)
class Slice:
    """A part of a divided device."""

    place: str  # "0:2": NVML's index of the device, and of the slice on it
    uuid: str
    facts: tuple[Field, ...]


@dataclass(frozen=True, slots=True)
class Device:
    """What decides whether and where the process sees a device."""

    index: int
    model: str
    uuid: str  # never written down
    divided: bool | None
    slices: tuple[Slice, ...] | None


@dataclass(frozen=True, slots=True)
class Inventory:
    """What NVML answered, and why it did not."""

    fields: tuple[Field, ...] = ()
    devices: tuple[Device, ...] = ()
    why: str = ""


def inventory() -> Inventory:
    """Ask NVML, once. A machine without a driver gives one reason and no traceback."""
    reading = _Reading()
    answered = within(SECONDS, "NVML", reading.run, reading.expected)
    found = {item.name: item for item in [*answered, *list(reading.seen)]}
    why = reading.why or ("" if reading.whole else next((i.reason for i in answered if i.state is State.UNKNOWN), ""))
    if found["gpu.driver_version"].state is State.UNKNOWN:
        found["gpu.driver_version"] = _by_kernel(found["gpu.driver_version"])
    return Inventory(tuple(found.values()), () if why else tuple(reading.devices), why)


class _Reading:
    """One reading, field by field, so that a driver that stops answering costs the rest and not the whole."""

    def __init__(self) -> None:
        self.seen: list[Field] = []
        self.devices: list[Device] = []
        self.expected = list(NAMES)
        self.why, self.whole = "", False

    def run(self) -> list[Field]:
        import pynvml

        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            self.why = f"NVML: {error}"
            return [Field.unknown(name, self.why) for name in self.expected]
        try:
            self._all(pynvml)
            self.whole = True
            return self.seen
        finally:
            pynvml.nvmlShutdown()

    def _all(self, nvml: Any) -> None:
        self._read(nvml, "", _system(nvml))
        count = next((item.value for item in self.seen if item.name == "gpu.count"), 0)
        numbers = range(count if isinstance(count, int) else 0)
        self.expected += [f"gpu.{index}.{name}" for index in numbers for name in ASKED]
        known = [handle for index in numbers if (handle := self._device(nvml, index)) is not None]
        self._read(nvml, "", {"gpu.topology_digest": lambda: _topology(nvml, known)})

    def _read(self, nvml: Any, prefix: str, asked: dict[str, Reader]) -> None:
        for name, ask in asked.items():
            self.seen.append(read(prefix + name, _guarded(nvml, ask, name in OPTIONAL), "nvml"))

    def _device(self, nvml: Any, index: int) -> Any:
        prefix = f"gpu.{index}."
        try:
            handle = nvml.nvmlDeviceGetHandleByIndex(index)
        except nvml.NVMLError as error:
            self.seen += [Field.unknown(prefix + name, f"NVML: {error}") for name in ASKED]
            self.devices.append(Device(index, "", "", None, None))
            return None
        slices: list[Slice] = []
        self._read(nvml, prefix, _asked(nvml, handle) | {"mig_layout": lambda: _layout(nvml, index, handle, slices)})
        facts = {item.name: item for item in self.seen}
        mode, layout = facts[prefix + "mig_mode"], facts[prefix + "mig_layout"]
        uuid = read("uuid", lambda: _text(nvml.nvmlDeviceGetUUID(handle))).value
        divided, parts = bool(mode.value) if mode.known else None, tuple(slices) if layout.known else None
        self.devices.append(Device(index, str(facts[prefix + "name"].value or ""), str(uuid or ""), divided, parts))
        return handle


def _by_kernel(item: Field) -> Field:
    """Read the version of a loaded driver from the kernel, where NVML does not answer: that is the mismatch itself."""
    path = Path(PROC_VERSION)
    text = path.read_text("utf-8", "replace") if path.is_file() else ""
    match = re.search(r"Kernel Module(?: for \S+)?\s+([0-9][0-9.]+)", text)
    return Field(item.name, match[1], reason=item.reason, source="kernel") if match else item


def _guarded(nvml: Any, ask: Reader, optional: bool) -> Reader:
    """Say of what a device does not have that it has no meaning there; other errors stay reasons."""

    def asked() -> object:
        try:
            return ask()
        except nvml.NVMLError as error:
            if optional and error.value == nvml.NVML_ERROR_NOT_SUPPORTED:
                raise Moot("the device or its driver does not support it") from None
            raise Missing(f"NVML: {error}") from None

    return asked


def _system(nvml: Any) -> dict[str, Reader]:
    return {
        "gpu.count": lambda: nvml.nvmlDeviceGetCount(),
        "gpu.driver_version": lambda: _text(nvml.nvmlSystemGetDriverVersion()),
        "gpu.cuda_driver_api_version": lambda: "{}.{}".format(
            *divmod(nvml.nvmlSystemGetCudaDriverVersion_v2() // 10, 100)
        ),
        "gpu.nvml_version": lambda: _text(nvml.nvmlSystemGetNVMLVersion()),
        "gpu.conf_compute": lambda: bool(nvml.nvmlSystemGetConfComputeState().ccFeature),
    }


def _asked(nvml: Any, handle: Any) -> dict[str, Reader]:
    return {
        "name": lambda: _text(nvml.nvmlDeviceGetName(handle)),
        "compute_capability": lambda: "{}.{}".format(*nvml.nvmlDeviceGetCudaComputeCapability(handle)),
        "memory_total": lambda: int(nvml.nvmlDeviceGetMemoryInfo(handle).total),
        "vbios": lambda: _text(nvml.nvmlDeviceGetVbiosVersion(handle)),
        "mig_mode": lambda: nvml.nvmlDeviceGetMigMode(handle)[0],
        "ecc_mode": lambda: nvml.nvmlDeviceGetEccMode(handle)[0],
        "ecc_uncorrected": lambda: int(nvml.nvmlDeviceGetTotalEccErrors(handle, 1, 0)),
        "remapped_rows": lambda: list(nvml.nvmlDeviceGetRemappedRows(handle)),
        "uuid_digest": lambda: file_digest(_text(nvml.nvmlDeviceGetUUID(handle)).encode()),
        "gsp_firmware": lambda: _text(nvml.nvmlDeviceGetGspFirmwareVersion(handle)),
        "persistence_mode": lambda: nvml.nvmlDeviceGetPersistenceMode(handle),
        "compute_mode": lambda: nvml.nvmlDeviceGetComputeMode(handle),
        "cores": lambda: nvml.nvmlDeviceGetNumGpuCores(handle),
        "nvlink_active": lambda: _links(nvml, handle),
        "power_limit": lambda: nvml.nvmlDeviceGetEnforcedPowerLimit(handle),
    }


ASKED = (*_asked(None, None), "mig_layout")


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
    if len(handles) < 2:
        raise Moot("there are no two devices")
    rows = [[nvml.nvmlDeviceGetTopologyCommonAncestor(a, b) for b in handles if b is not a] for a in handles]
    return file_digest(repr(rows).encode())


def _layout(nvml: Any, index: int, handle: Any, slices: list[Slice]) -> list[object]:
    """List the slices of a divided device by their profiles; ``slices`` takes what is known of each."""
    if not nvml.nvmlDeviceGetMigMode(handle)[0]:
        raise Moot("the device is not divided")
    for number in range(nvml.nvmlDeviceGetMaxMigDeviceCount(handle)):
        try:
            part = nvml.nvmlDeviceGetMigDeviceHandleByIndex(handle, number)
        except nvml.NVMLError as error:
            if error.value in (nvml.NVML_ERROR_NOT_FOUND, nvml.NVML_ERROR_INVALID_ARGUMENT):
                continue  # slices leave holes
            raise
        asked = {name: _guarded(nvml, ask, optional=False) for name, ask in _sliced(nvml, part).items()}
        facts = tuple(read_all(asked, "nvml"))
        slices.append(Slice(f"{index}:{number}", _text(nvml.nvmlDeviceGetUUID(part)), facts))
    return [item.facts[0].value for item in slices]


def _sliced(nvml: Any, part: Any) -> dict[str, Reader]:
    return {
        "mig_profile": lambda: _profile(nvml, part),
        "mig_gpu_slices": lambda: nvml.nvmlDeviceGetAttributes_v2(part).gpuInstanceSliceCount,
        "mig_compute_slices": lambda: nvml.nvmlDeviceGetAttributes_v2(part).computeInstanceSliceCount,
        "mig_multiprocessors": lambda: nvml.nvmlDeviceGetAttributes_v2(part).multiprocessorCount,
        "mig_memory_mb": lambda: nvml.nvmlDeviceGetAttributes_v2(part).memorySizeMB,
    }


SLICED = tuple(_sliced(None, None))


def _profile(nvml: Any, part: Any) -> str:
    """Name a slice as its maker does (3g.40gb, 1c.3g.40gb): from the driver's own name for it, else from its size."""
    named = _text(nvml.nvmlDeviceGetName(part)).partition(" MIG ")[2]
    if named:
        return named
    has = nvml.nvmlDeviceGetAttributes_v2(part)
    whole = f"{has.gpuInstanceSliceCount}g.{round(has.memorySizeMB / 1024)}gb"
    shared = has.computeInstanceSliceCount != has.gpuInstanceSliceCount
    return f"{has.computeInstanceSliceCount}c.{whole}" if shared else whole


def visible(devices: Sequence[Device], given: str | None, order: str = "") -> list[object]:
    """Return NVML's indices of the devices that CUDA would see, in its order; a slice as DEVICE:SLICE.

    CUDA reads the variable up to the first entry that it cannot place, takes no prefix that fits two devices, and sees
    nothing where one is named twice. By number it counts the fastest first, NVML by bus: among devices of one model
    that is the same, among others only under CUDA_DEVICE_ORDER=PCI_BUS_ID. A process uses one slice at most, and
    beside it no device.

    Raises Missing where the order or the slices cannot be known.
    """
    named = given is not None and given.startswith(("GPU-", "MIG-"))
    every = range(len(devices))
    if given is None:
        places: list[object] = list(every)
    elif named:
        places = _once([entry.strip() for entry in given.split(",")], lambda entry: _by_name(devices, entry, given[:4]))
    else:
        numbers = [re.match(r"\+?\d+", entry.strip()) for entry in given.split(",")]
        places = _once([int(match[0]) if match else -1 for match in numbers], lambda n: n if n in every else None)
    if places and not named and len({device.model for device in devices} - {""}) > 1 and order != "PCI_BUS_ID":
        raise Missing("CUDA counts unlike devices fastest first; CUDA_DEVICE_ORDER=PCI_BUS_ID or UUIDs would tell them")
    usable = [spot for place in places for spot in _usable(devices, place)]
    return next(([spot] for spot in usable if isinstance(spot, str)), usable)


def _once(entries: Sequence[Any], place: Callable[[Any], object]) -> list[object]:
    found: list[object] = []
    for entry in entries:
        if (spot := place(entry)) is None:
            break
        if spot in found:
            return []
        found.append(spot)
    return found


def _by_name(devices: Sequence[Device], entry: str, prefix: str) -> object:
    if not entry.startswith(prefix):
        return None
    if prefix == "GPU-":
        alike: list[object] = [device.index for device in devices if device.uuid.startswith(entry)]
        hidden = any(not device.uuid for device in devices)
    else:
        parts = [part for device in devices for part in device.slices or ()]
        alike = [part.place for part in parts if part.uuid.startswith(entry)]
        hidden = any(device.divided is not False and device.slices is None for device in devices)
    if not alike and hidden:
        raise Missing("devices are chosen by UUID, and NVML does not tell those of all")
    return alike[0] if len(alike) == 1 else None


def _usable(devices: Sequence[Device], place: object) -> list[object]:
    if not isinstance(place, int):
        return [place]
    device = devices[place]
    if device.divided is None or (device.divided and device.slices is None):
        raise Missing(f"NVML does not tell how gpu.{place} is divided")
    return [part.place for part in (device.slices or ())[:1]] if device.divided else [place]


PROPERTIES = {
    "multi_processor_count": "multi_processor_count", "l2_cache_size": "L2_cache_size", "warp_size": "warp_size",
    "shared_memory_per_block": "shared_memory_per_block",
}  # fmt: skip


def up() -> bool:
    """Say whether the program has brought CUDA up, without doing so. A forked child has not: it may not use it."""
    cuda: Any = getattr(sys.modules.get("torch"), "cuda", None)
    return cuda is not None and hasattr(cuda, "is_initialized") and bool(cuda.is_initialized())


def fields(known: Inventory | None = None) -> list[Field]:
    """Return driver, devices and what the process sees of them."""
    known = inventory() if known is None else known
    torch: Any = sys.modules.get("torch") if up() else None
    ordinals = None if torch is None or known.why else _ordinals(torch, known.devices)
    seen = read("gpu.visible", lambda: ordinals or _seen(known), "torch" if ordinals else "environment")
    found = [*known.fields, seen]
    for device in known.devices:
        found += _of_slice(device, seen)
        readers = {f"gpu.{device.index}.{name}": _property(seen, device.index, name) for name in PROPERTIES}
        found += read_all(readers, "torch")
    if known.why and torch is not None and not any(item.name.startswith("gpu.0.") for item in found):
        found += _by_torch(torch)
    return found


def _seen(known: Inventory) -> list[object]:
    if known.why:
        raise Missing(known.why)
    return visible(known.devices, os.environ.get("CUDA_VISIBLE_DEVICES"), os.environ.get("CUDA_DEVICE_ORDER", ""))


def _ordinals(torch: Any, devices: Sequence[Device]) -> list[object] | None:
    """Return what torch's devices are by UUID, in its order; None where it tells too little."""
    places: dict[str, object] = {part.uuid[4:]: part.place for item in devices for part in item.slices or ()}
    places |= {item.uuid[4:]: item.index for item in devices if item.divided is False}
    try:
        count = torch.cuda.device_count()
        found = [places.get(str(torch.cuda.get_device_properties(n).uuid)) for n in range(count)]
    except (AttributeError, RuntimeError):
        return None
    return None if None in found else found


def _of_slice(device: Device, seen: Field) -> list[Field]:
    names = [f"gpu.{device.index}.{name}" for name in SLICED]
    if device.divided is False:
        return [Field.moot(name, "the device is not divided") for name in names]
    if seen.state is not State.VALUE or not isinstance(seen.value, list):
        return [Field.unknown(name, seen.reason) for name in names]
    for part in device.slices or ():
        if part.place in seen.value:
            return [replace(item, name=f"gpu.{device.index}.{item.name}") for item in part.facts]
    return [Field.moot(name, "the process uses no slice of this device") for name in names]


def _property(seen: Field, index: int, name: str) -> Callable[[], object]:
    def reader() -> object:
        torch: Any = sys.modules.get("torch")
        if not up():
            raise Missing(f"only CUDA knows it, and {'torch is not loaded' if torch is None else 'it is not up'}")
        if not isinstance(seen.value, list):
            raise Missing(f"which of torch's devices this is: {seen.reason}")
        for ordinal, place in enumerate(seen.value):
            if place == index or str(place).startswith(f"{index}:"):
                return getattr(torch.cuda.get_device_properties(ordinal), PROPERTIES[name])
        raise Moot("the process does not see this device")

    return reader


def _by_torch(torch: Any) -> list[Field]:
    """Read the devices of a process that has CUDA or ROCm and no NVML, numbered as the process numbers them."""

    def of(n: int, get: Callable[[Any], object]) -> Reader:
        return lambda: get(torch.cuda.get_device_properties(n))

    asked: dict[str, Callable[[Any], object]] = {name: attrgetter(at) for name, at in PROPERTIES.items()}
    asked |= {"name": attrgetter("name"), "compute_capability": "{0.major}.{0.minor}".format}
    if torch.version.hip:
        asked["gcn_arch"] = attrgetter("gcnArchName")
    numbers = range(torch.cuda.device_count())
    return read_all({f"gpu.{n}.{name}": of(n, get) for n in numbers for name, get in asked.items()}, "torch")


def _text(value: object) -> str:
    return value.decode("utf-8", "replace") if isinstance(value, bytes) else str(value)
