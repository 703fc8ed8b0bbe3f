"""What lies around the processor: caches, container, interpreter, and accelerators other than NVIDIA's.

Everything is read from files, from the interpreter, or from what torch has already brought up; nothing is started.
"""

import os
import platform
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

from provenance.facts import Field
from provenance.fingerprint.reading import Missing, Moot, Reader, module, read, read_all
from provenance.integrity.digests import file_digest

CACHES = "/sys/devices/system/cpu/cpu0/cache"
IMAGE = "PROVENANCE_IMAGE_DIGEST"
# Where the kernel says which driver of a maker it has loaded.
DRIVERS = {"rocm.driver_version": ("amdgpu",), "xpu.driver_version": ("xe", "i915")}


def cpu_caches() -> dict[str, str]:
    """Return the sizes of the processor's caches: matrix kernels cut their blocks by them."""
    found = {}
    for place in sorted(Path(CACHES).glob("index*")):
        level, kind, size = ((place / name).read_text(encoding="ascii").strip() for name in ("level", "type", "size"))
        found[f"L{level}{'' if kind == 'Unified' else kind[0].lower()}"] = size
    if not found:
        raise Missing("the kernel does not list the processor's caches")
    return found


def threads_per_core() -> int:
    """Return how many logical processors share one core."""
    listed = Path("/sys/devices/system/cpu/cpu0/topology/thread_siblings_list").read_text(encoding="ascii").strip()
    return sum(
        int(part.rpartition("-")[2]) - int(part.partition("-")[0]) + 1 if "-" in part else 1
        for part in listed.split(",")
    )


def container() -> str:
    """Name the kind of container the process runs in, or say that it runs in none."""
    if Path("/.dockerenv").exists():
        return "docker"
    if Path("/run/.containerenv").exists():
        return "podman"
    if "KUBERNETES_SERVICE_HOST" in os.environ:
        return "kubernetes"
    try:
        text = Path("/proc/1/cgroup").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return "none seen"
    return next((kind for kind in ("docker", "containerd", "kubepods", "lxc") if kind in text), "none seen")


def image() -> str:
    """Return the digest of the container's image. No file inside a container holds it: the image must say it."""
    found = os.environ.get(IMAGE)
    if found:
        return found
    if container() == "none seen":
        raise Moot("the process runs in no container that could be seen")
    raise Missing(f"a container does not know its image; set {IMAGE} where it is started")


def _apple(what: str) -> Callable[[], object]:
    def reader() -> object:
        if platform.system() != "Darwin":
            raise Moot("not an Apple machine")
        mps = module("torch").backends.mps
        return getattr(mps, what)()

    return reader


def _driver(names: tuple[str, ...]) -> Callable[[], str]:
    def reader() -> str:
        for name in names:
            path = Path("/sys/module") / name / "version"
            if path.is_file():
                return path.read_text(encoding="ascii", errors="replace").strip()
            if path.parent.is_dir():
                return f"of kernel {platform.release()}"  # part of the kernel, and without a number of its own
        raise Moot(f"the kernel has not loaded {' or '.join(names)}")

    return reader


def _macos() -> str:
    if platform.system() != "Darwin":
        raise Moot("not an Apple machine")
    return platform.mac_ver()[0]


def _flags() -> list[str]:
    names = ("isolated", "ignore_environment", "no_site", "no_user_site", "safe_path", "dev_mode", "bytes_warning")
    return [name for name in names if getattr(sys.flags, name, 0)]


READERS: dict[str, Reader] = {
    "cpu.caches": cpu_caches,
    "cpu.threads_per_core": threads_per_core,
    "memory.page_size": lambda: os.sysconf("SC_PAGE_SIZE"),
    "container.kind": container,
    "container.image_digest": image,
    "os.macos_version": _macos,
    "python.compiler": platform.python_compiler,
    "python.byte_order": lambda: sys.byteorder,
    "python.utf8_mode": lambda: bool(sys.flags.utf8_mode),
    "python.flags": _flags,
    "mps.device_name": _apple("get_name"),
    "mps.core_count": _apple("get_core_count"),
    **{name: _driver(kinds) for name, kinds in DRIVERS.items()},
}


def fields() -> list[Field]:
    """Read what lies around the processor."""
    return read_all(READERS, "system")


def xpu() -> list[Field]:
    """Read Intel devices, if torch has brought them up."""
    torch: Any = sys.modules.get("torch")
    device = getattr(torch, "xpu", None)
    if device is None or not device.is_initialized():
        return []

    def properties(number: int) -> Reader:
        return lambda: file_digest(str(device.get_device_properties(number)).encode())

    return [read(f"xpu.{n}.properties_digest", properties(n), "torch") for n in range(device.device_count())]
