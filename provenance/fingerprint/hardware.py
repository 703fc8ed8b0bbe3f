"""The machine: processor and system, from files and calls. No subprocess."""

import os
import platform
import sys
from functools import lru_cache
from pathlib import Path

from provenance.facts import Field
from provenance.fingerprint.reading import Missing, Moot, Reader, read_all
from provenance.integrity.digests import file_digest


@lru_cache(maxsize=1)
def _cpuinfo() -> dict[str, str]:
    """Read the first processor's block of /proc/cpuinfo."""
    facts: dict[str, str] = {}
    with Path("/proc/cpuinfo").open(encoding="utf-8", errors="replace") as lines:
        for line in lines:
            key, colon, value = line.partition(":")
            if not colon:
                break
            facts.setdefault(key.strip(), value.strip())
    return facts


def _cpu(key: str, fallback: str = "") -> str:
    try:
        value = _cpuinfo().get(key, "")
    except OSError:
        value = ""
    if not (value or fallback):
        raise Missing(f"/proc/cpuinfo has no {key!r}")
    return value or fallback


def cpu_flags() -> str:
    """Digest the sorted feature flags: hypervisors hide AVX-512 and AMX."""
    flags = _cpu("flags") if "flags" in _cpuinfo() else _cpu("Features")
    return file_digest(" ".join(sorted(flags.split())).encode())


def cpu_isa() -> list[str]:
    """List the vector extensions that kernels choose by."""
    flags = set((_cpuinfo().get("flags") or _cpuinfo().get("Features", "")).split())
    known = ("sse4_2", "avx", "avx2", "fma", "avx512f", "avx512_bf16", "avx512_vnni", "amx_tile", "amx_bf16",
             "asimd", "sve", "sve2", "bf16", "i8mm")  # fmt: skip
    return [name for name in known if name in flags]


def _quota() -> str:
    path = Path("/sys/fs/cgroup/cpu.max")
    if not path.exists():
        raise Moot("no cgroup v2")
    return path.read_text(encoding="ascii").strip()


def _psutil_cores() -> object:
    import psutil

    return psutil.cpu_count(logical=False)


def _memory() -> int:
    import psutil

    return int(psutil.virtual_memory().total)


def _affinity() -> int:
    if not hasattr(os, "sched_getaffinity"):
        raise Moot("this system has no affinity masks")
    return len(os.sched_getaffinity(0))


def _nodes() -> int:
    return sum(name.startswith("node") for name in os.listdir("/sys/devices/system/node"))


def _libc() -> str:
    try:
        return os.confstr("CS_GNU_LIBC_VERSION") or "unknown"
    except (ValueError, OSError):
        return " ".join(platform.libc_ver()).strip() or sys.platform


READERS: dict[str, Reader] = {
    "cpu.model": lambda: _cpu("model name", platform.processor()),
    "cpu.vendor": lambda: _cpu("vendor_id", platform.machine()),
    "cpu.flags_digest": cpu_flags,
    "cpu.isa": cpu_isa,
    "cpu.microcode": lambda: _cpu("microcode"),
    "cpu.arch": platform.machine,
    "cpu.count_physical": _psutil_cores,
    "cpu.count_logical": os.cpu_count,
    "cpu.affinity": _affinity,
    "cpu.cgroup_quota": _quota,
    "memory.total_bytes": _memory,
    "numa.nodes": _nodes,
    "os.kernel": platform.release,
    "os.platform": lambda: sys.platform,
    "os.libc": _libc,
    "python.version": platform.python_version,
    "python.implementation": platform.python_implementation,
    "python.hash_randomization": lambda: bool(sys.flags.hash_randomization),
    "python.optimize": lambda: sys.flags.optimize,
}


def fields() -> list[Field]:
    """Read the machine."""
    return read_all(READERS, "system")
