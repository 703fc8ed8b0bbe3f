"""What is really mapped into the process, not what is installed: shared libraries, and the caches of compilers.

A library is told by its build id, which names its bytes wherever they lie; where the linker left none, by a digest over
its edges and size. Some tell their own version: they are asked through the copy that is loaded, and nothing is loaded
to ask.
"""

import ctypes
import hashlib
import os
import re
import struct
import sys
import tempfile
from collections.abc import Callable
from functools import lru_cache
from pathlib import Path

from provenance.facts import Field
from provenance.fingerprint.reading import Missing, Moot, Reader, read, short_path
from provenance.integrity.digests import file_digest

MAPS = Path("/proc/self/maps")
EDGE = 1 << 20
CACHE_ENTRIES = 5000
RTLD_NOLOAD = getattr(os, "RTLD_NOLOAD", 4)
# Name of the field, and how the file is called. The first that fits counts.
_PATTERNS = {
    "cudnn": r"libcudnn\.so", "cudnn_ops": r"libcudnn_ops\S*\.so", "cudnn_engines": r"libcudnn_engines\S*\.so",
    "cublas": r"libcublas\.so", "cublaslt": r"libcublasLt\.so", "cudart": r"libcudart\S*\.so",
    "cuda": r"libcuda\.so", "nvrtc": r"libnvrtc\.so", "nccl": r"libnccl\.so", "cusparse": r"libcusparse\.so",
    "cusparselt": r"libcusparseLt\.so", "cusolver": r"libcusolver\.so", "cufft": r"libcufft\.so",
    "mkl": r"libmkl_\w+\.so", "onednn": r"libdnnl\.so", "openmp": r"lib(gomp|iomp5|omp)\S*\.so",
    "openblas": r"lib\w*openblas\S*\.so", "flash_attn": r"flash_attn\S*\.so", "triton": r"libtriton\.so",
    "xformers": r"xformers\S*_C\S*\.so", "torch_cpu": r"libtorch_cpu\.so", "torch_cuda": r"libtorch_cuda\.so",
    "torch_python": r"libtorch_python\.so", "c10": r"libc10\.so", "rocblas": r"librocblas\.so",
    "hipblaslt": r"libhipblaslt\.so", "miopen": r"libMIOpen\.so", "ggml": r"libggml\S*\.so",
    "llama": r"libllama\.so", "tokenizers": r"tokenizers\S*\.so", "libc": r"libc\.so", "libm": r"libm\.so",
    "libstdcxx": r"libstdc\+\+\.so",
}  # fmt: skip
WATCHED = {name: re.compile(pattern) for name, pattern in _PATTERNS.items()}


def mapped() -> list[str]:
    """Return the paths of the shared libraries in this process. Raises OSError where the system does not tell."""
    found: dict[str, None] = {}
    with MAPS.open(encoding="utf-8", errors="surrogateescape") as lines:
        for line in lines:
            path = line[line.find("/") :].rstrip("\n") if "/" in line else ""
            if ".so" in path:
                found[path] = None
    return list(found)


def mapped_or_none() -> list[str]:
    """Return the paths of the shared libraries in this process, or an empty list where the system does not tell."""
    try:
        return mapped()
    except OSError:
        return []


def fields() -> list[Field]:
    """Read the libraries that can decide an output, and the caches of compilers."""
    try:
        paths = mapped()
    except OSError as error:
        return [Field.unknown(f"loaded.{name}", f"not listed by the system: {error.strerror}") for name in WATCHED]
    found: list[Field] = []
    places: dict[str, str] = {}
    for name, pattern in WATCHED.items():
        path = next((item for item in paths if pattern.match(item.rpartition("/")[2])), None)
        if path is None:
            found.append(Field.moot(f"loaded.{name}", "not loaded"))
            continue
        places[name] = path
        found.append(read(f"loaded.{name}", _bound(identity, path), "maps"))
        found.append(Field(f"loaded.{name}.path", short_path(path, os.path.expanduser("~")), source="maps"))
    found.append(read("lib.shadowed_libs_digest", lambda: _shadowed(paths), "maps"))
    found += [read(name, _bound(ask, places.get(library, "")), "library") for name, (library, ask) in VERSIONS.items()]
    return found + [read(name, reader, "files") for name, reader in CACHES.items()]


def _shadowed(paths: list[str]) -> str:
    """Digest the names of libraries that are there from two places at once: which of them is used, chance decides.

    Modules of Python are none: those of two packages may bear one name.
    """
    places: dict[str, set[str]] = {}
    for path in paths:
        places.setdefault(path.rpartition("/")[2], set()).add(path)
    twice = sorted(name for name, found in places.items() if len(found) > 1 and name.startswith("lib"))
    if not twice:
        raise Moot("no library is loaded from two places")
    return file_digest("\n".join(twice).encode("utf-8", "surrogateescape"))


def _bound(function: Callable[[str], object], path: str) -> Reader:
    return lambda: function(path)


@lru_cache(maxsize=256)
def identity(path: str) -> str:
    """Name the bytes of a library: ``build-id:…``, or ``edges:…`` where it has none. OSError where it is gone."""
    with Path(path).open("rb") as file:
        head = file.read(EDGE)
        found = build_id(head)
        if found:
            return f"build-id:{found}"
        size = file.seek(0, os.SEEK_END)
        file.seek(max(0, size - EDGE))
        return f"edges:{hashlib.sha256(head + file.read(EDGE) + str(size).encode()).hexdigest()}"


def build_id(head: bytes) -> str:
    """Return the build id in the first bytes of a 64-bit ELF file, or an empty text."""
    if head[:5] != b"\x7fELF\x02":
        return ""
    order = "<" if head[5] == 1 else ">"
    try:
        (table,) = struct.unpack_from(order + "Q", head, 32)
        size, count = struct.unpack_from(order + "HH", head, 54)
        for n in range(count):
            kind, _, place, _, _, length = struct.unpack_from(order + "IIQQQQ", head, table + n * size)
            if kind == 4:  # PT_NOTE
                found = _note(head[place : place + length], order)
                if found:
                    return found
    except struct.error:
        return ""
    return ""


def _note(data: bytes, order: str) -> str:
    place = 0
    while place + 12 <= len(data):
        name_size, size, kind = struct.unpack_from(order + "III", data, place)
        name = place + 12
        body = name + (name_size + 3) // 4 * 4
        if kind == 3 and data[name : name + 3] == b"GNU":
            return data[body : body + size].hex()
        place = body + (size + 3) // 4 * 4
    return ""


# -- what libraries say of themselves -----------------------------------------------------------------


def _library(path: str) -> ctypes.CDLL:
    if not path:
        raise Moot("not loaded")
    return ctypes.CDLL(path, mode=RTLD_NOLOAD | os.RTLD_LAZY)


def _cudnn(path: str) -> str:
    function = _library(path).cudnnGetVersion
    function.restype = ctypes.c_size_t
    return str(function())


def _nccl(path: str) -> str:
    number = ctypes.c_int()
    if _library(path).ncclGetVersion(ctypes.byref(number)) != 0:
        raise Missing("NCCL does not tell")
    return str(number.value)


def _openblas(path: str) -> str:
    library = _library(path)
    for name in (
        "openblas_get_config",
        "scipy_openblas_get_config64_",
        "scipy_openblas_get_config",
        "openblas_get_config64_",
    ):
        function = getattr(library, name, None)
        if function is not None:
            function.restype = ctypes.c_char_p
            return str(function().decode("ascii", "replace"))
    raise Missing("OpenBLAS has no getter that is known here")


def _openmp(path: str) -> str:
    library = _library(path)
    return f"{Path(path).name}, at most {library.omp_get_max_threads()} threads"


# Field, the library that is asked, and how.
VERSIONS: dict[str, tuple[str, Callable[[str], object]]] = {
    "loaded.cudnn.version": ("cudnn", _cudnn),
    "loaded.nccl.version": ("nccl", _nccl),
    "openblas.version": ("openblas", _openblas),
    "loaded.openmp.runtime": ("openmp", _openmp),
}

# -- caches of compilers --------------------------------------------------------------------------------


def _folder_state(folder: Path) -> dict[str, object]:
    """Return how many files a cache holds and a digest of their names, cut at a few thousand."""
    names: list[str] = []
    for place, _, files in os.walk(folder):
        names += [os.path.relpath(os.path.join(place, name), folder) for name in files]
        if len(names) > CACHE_ENTRIES:
            break
    names.sort()
    digest = file_digest("\n".join(names[:CACHE_ENTRIES]).encode("utf-8", "surrogateescape"))
    return {"files": len(names), "names": digest, "whole": len(names) <= CACHE_ENTRIES}


def _inductor_cache() -> object:
    if "torch._inductor" not in sys.modules:
        raise Moot("the compiler is not loaded")
    import getpass

    default = os.path.join(tempfile.gettempdir(), f"torchinductor_{getpass.getuser()}")
    return _folder_state(Path(os.environ.get("TORCHINDUCTOR_CACHE_DIR") or default))


def _triton_cache() -> object:
    if "triton" not in sys.modules:
        raise Moot("triton is not loaded")
    return _folder_state(Path(os.environ.get("TRITON_CACHE_DIR") or os.path.expanduser("~/.triton/cache")))


CACHES: dict[str, Reader] = {"cache.inductor": _inductor_cache, "cache.triton": _triton_cache}
