"""Versions: of torch and its libraries as they report themselves, of packages as they are installed.

Package versions come from the names of the metadata folders on ``sys.path`` (a third of a millisecond for all
of them; asking for each costs a hundred times that). The first folder on the path wins, as for an import.
"""

import os
import re
import sys
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import orjson

from provenance.catalogue.fields import table
from provenance.facts import Field
from provenance.fingerprint.reading import Missing, Moot, Reader, module, read_all
from provenance.integrity.digests import file_digest

# What is loaded decides which fields have values; a change here makes a new environment fingerprint.
WATCHED = ("torch", "transformers", "tokenizers", "numpy", "vllm", "sglang", "llama_cpp", "peft", "bitsandbytes",
           "accelerate", "flash_attn", "triton", "xformers", "openai", "kernels", "optimum", "onnxruntime",
           "tensorrt_llm", "mlx.core")  # fmt: skip


def loaded() -> tuple[bool, ...]:
    """Say which of the watched frameworks the process has loaded."""
    return tuple(map(sys.modules.__contains__, WATCHED))


def installed(path: Iterable[str]) -> dict[str, str]:
    """Return name and version of every installed distribution, names in their normal form."""
    found: dict[str, str] = {}
    for folder in path:
        try:
            names = os.listdir(folder or ".")
        except OSError:
            continue
        for entry in names:
            stem, _, ending = entry.rpartition(".")
            if ending in ("dist-info", "egg-info") and "-" in stem:
                name, _, version = stem.partition("-")
                found.setdefault(normal(name), version.partition("-py")[0])
    return found


def editable(path: Iterable[str]) -> list[str]:
    """List the distributions installed from a checkout: their version says little of their code."""
    found = set()
    for folder in path:
        for entry in Path(folder or ".").glob("*.dist-info/direct_url.json"):
            try:
                facts = orjson.loads(entry.read_bytes())
            except (OSError, orjson.JSONDecodeError):
                continue
            if facts.get("dir_info", {}).get("editable"):
                commit = facts.get("vcs_info", {}).get("commit_id", "")
                found.add(normal(entry.parent.name.partition("-")[0]) + (f"@{commit}" if commit else ""))
    return sorted(found)


def normal(name: str) -> str:
    """Return a distribution's name in its normal form."""
    return re.sub(r"[-_.]+", "-", name).lower()


def fields() -> list[Field]:
    """Read torch's own facts and the versions of all packages that the catalogue names."""
    packages = installed(sys.path)
    found = [*read_all(TORCH, "torch"), *read_all({"onnxruntime.providers": _providers}, "onnxruntime")]
    for name in table():
        if name.startswith("lib.") and name.endswith(".version"):
            package = name[4:-8]
            version = packages.get(normal(package))
            if version:
                found.append(Field(name, version, source="metadata"))
            else:
                found.append(Field.moot(name, f"{package} is not installed"))
    found.append(Field("lib.editable_installs", editable(sys.path), source="metadata"))
    whole = "\n".join(f"{name}=={version}" for name, version in sorted(packages.items()))
    found.append(Field("lib.all_digest", file_digest(whole.encode()), source="metadata"))
    return found


def _torch() -> Any:
    return module("torch")


def _build(pattern: str) -> str:
    match = re.search(pattern, _torch().__config__.show())
    if not match:
        raise Moot("this build of torch does not name it")
    return match.group(1).strip()


def _parallel(pattern: str) -> str:
    match = re.search(pattern, _torch().__config__.parallel_info())
    if not match:
        raise Moot("this build of torch does not name it")
    return match.group(1)


def _cuda_build() -> Any:
    torch = _torch()
    if torch.version.cuda is None:
        raise Moot("torch is built without CUDA")
    return torch


def _providers() -> list[str]:
    if "onnxruntime" not in sys.modules:
        raise Moot("onnxruntime is not loaded")
    return list(module("onnxruntime").get_available_providers())


def _build_config() -> str:
    """Digest how torch was built. What it says of the moment (``CPU capability usage``) is a field of its own."""
    lines = _torch().__config__.show().splitlines()
    return file_digest("\n".join(line for line in lines if "capability usage" not in line).encode())


def _cublas() -> str:
    _cuda_build()
    for name, version in installed(sys.path).items():
        if name.startswith("nvidia-cublas"):
            return version
    raise Missing("cuBLAS has no getter, and no nvidia-cublas package is installed")


TORCH: dict[str, Reader] = {
    "torch.version": lambda: str(_torch().__version__),
    "torch.git_version": lambda: _torch().version.git_version,
    "torch.debug_build": lambda: bool(_torch().version.debug),
    "torch.build_config_digest": _build_config,
    "mkl.version": lambda: _build(r"Math Kernel Library Version (\S+?)[- ]Product"),
    "onednn.version": lambda: _build(r"MKL-DNN v([0-9.]+)"),
    "openmp.version": lambda: _build(r"OpenMP (\S+)"),
    "cpu.capability": lambda: _torch().backends.cpu.get_cpu_capability(),
    "cuda.runtime_version": lambda: _cuda_build().version.cuda,
    "cudnn.version": lambda: _cuda_build().backends.cudnn.version(),
    "cublas.version": _cublas,
    "nccl.version": lambda: ".".join(map(str, _cuda_build().cuda.nccl.version())),
    "rocm.version": lambda: _torch().version.hip or _moot("torch is built without ROCm"),
    "xpu.runtime_version": lambda: getattr(_torch().version, "xpu", None) or _moot("torch is built without XPU"),
    "cublaslt.version": _cublas,  # one package holds both
    "cusparselt.version": lambda: _cuda_build().backends.cusparselt.version(),
    "miopen.version": lambda: _torch().backends.cudnn.version() if _torch().version.hip else _moot("no ROCm"),
    "mkl.num_threads": lambda: int(_parallel(r"mkl_get_max_threads\(\) : (\d+)")),
    "torch.parallel_backend": lambda: _parallel(r"ATen parallel backend: (.+)"),
    "torch.blas": lambda: _build(r"BLAS_INFO=(\w+)"),
    "torch.lapack": lambda: _build(r"LAPACK_INFO=(\w+)"),
    "torch.compiler": lambda: _build(r"- (?:GCC|Clang|MSVC|clang) ([0-9.]+)"),
    "torch.backends.kleidiai": lambda: _torch().backends.kleidiai.is_available(),
    "torch.jit.profiling": lambda: _torch()._C._get_graph_executor_optimize(),
    "torch.backends.cuda.is_flash_attention_available": lambda: _torch().backends.cuda.is_flash_attention_available(),
    "torch.backends.mkldnn.acl": lambda: _torch().backends.mkldnn.is_acl_available(),
    "torch.num_interop_threads": lambda: _torch().get_num_interop_threads(),
}


def _moot(why: str) -> str:
    raise Moot(why)


def code_version(program: str) -> str:
    """Return the git commit of the program's checkout, read from files. Raises Moot where there is none."""
    folder = Path(program).absolute().parent
    for place in (folder, *folder.parents):
        git = place / ".git"
        if git.is_file():  # a worktree points elsewhere
            git = Path(git.read_text(encoding="utf-8").partition(":")[2].strip())
        if (git / "HEAD").is_file():
            return _head(git)
    raise Moot("the program is not in a git checkout")


def _head(git: Path) -> str:
    head = (git / "HEAD").read_text(encoding="utf-8").strip()
    if not head.startswith("ref: "):
        return head
    name = head[5:]
    shared = git / "commondir"
    base = (git / shared.read_text(encoding="utf-8").strip()) if shared.is_file() else git
    for place in (git, base):
        if (place / name).is_file():
            return (place / name).read_text(encoding="utf-8").strip()
    packed = base / "packed-refs"
    if packed.is_file():
        for line in packed.read_text(encoding="utf-8").splitlines():
            commit, _, reference = line.partition(" ")
            if reference == name:
                return commit
    raise Missing("the checkout has no commit yet")
