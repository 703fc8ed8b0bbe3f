"""The files of a checkpoint: their SHA-256, and that of each tensor in them, on every core.

The SHA-256 of a file is one long sum that no second core can help with. The tensors of a safetensors file are
many short ones, so the identity that is quick to have is their manifest: names, types, shapes and digests,
whatever file each lies in. Files are read as bytes, through one descriptor that is looked at before and after;
of their content only the header of a safetensors file and the index beside it are understood, within limits.
"""

import hashlib
import math
import os
import re
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import orjson

from provenance.facts import WeightEntry, WeightsManifest
from provenance.fingerprint.cache import DIGEST, Cache, Look
from provenance.fingerprint.reading import Missing
from provenance.fingerprint.weights import Stop, Stopped

CHUNK = 1 << 20  # bytes a thread holds
HEADER_LIMIT = 100_000_000  # what safetensors itself allows
INDEX_LIMIT = 64 << 20
TENSORS = ".safetensors"
ENDINGS = (TENSORS, ".gguf", ".bin", ".pt", ".pth", ".index.json")
# What a trainer leaves beside the weights.
BESIDE = re.compile(r"(?:training_args|optimizer|scheduler|scaler|rng_state|random_states)(?:_\d+)*\.(?:bin|pt|pth)")
INDEX = "model.safetensors.index.json"
BLOB = re.compile(r"(?:^|/)blobs/([0-9a-f]{64})")
COMMIT = re.compile(r"[0-9a-f]{40}")
# How safetensors writes a type: the name that torch has for it, and its bits.
DTYPES = {
    "F64": ("float64", 64), "F32": ("float32", 32), "F16": ("float16", 16), "BF16": ("bfloat16", 16),
    "I64": ("int64", 64), "I32": ("int32", 32), "I16": ("int16", 16), "I8": ("int8", 8), "BOOL": ("bool", 8),
    "U64": ("uint64", 64), "U32": ("uint32", 32), "U16": ("uint16", 16), "U8": ("uint8", 8),
    "F8_E4M3": ("float8_e4m3fn", 8), "F8_E5M2": ("float8_e5m2", 8), "F8_E8M0": ("float8_e8m0fnu", 8),
    "F8_E4M3FNUZ": ("float8_e4m3fnuz", 8), "F8_E5M2FNUZ": ("float8_e5m2fnuz", 8), "C64": ("complex64", 64),
    "F4": ("float4", 4), "F6_E2M3": ("float6_e2m3", 6), "F6_E3M2": ("float6_e3m2", 6),
}  # fmt: skip


class Digest(NamedTuple):
    """The SHA-256 of a file, and where it is known from."""

    path: Path
    size: int
    sha256: str
    how: str  # "hashed", "cached" (it still looks as it did when it was) or "hub" (the name of its blob says so)


class Place(NamedTuple):
    """Where a tensor lies in a file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    size: int


def _never() -> bool:
    return False


def _silent(_: int) -> None:
    return None


def cores() -> int:
    """Return how many cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


class Hasher:
    """Hashes files with ``workers`` threads, each of which holds one MiB.

    ``told`` hears of every piece that was read, from any thread. With ``trust`` a digest that the cache remembers or
    that the hub gave the file as its name stands for reading it.
    """

    def __init__(
        self,
        cache: Path | None = None,
        workers: int = 1,
        stop: Stop = _never,
        told: Callable[[int], None] = _silent,
        trust: bool = True,
    ) -> None:
        self.cache = Cache(cache)
        self.workers, self.stop, self.told, self.trust = max(1, workers), stop, told, trust
        self._own = threading.local()  # each thread's buffer

    # -- whole files --------------------------------------------------------------------------------

    def files(self, paths: Sequence[Path]) -> list[Digest]:
        """Hash whole files, several at once.

        Raises Missing for one that changed meanwhile, Stopped, or OSError.
        """
        found = [self.remembered(path) for path in paths]
        missed = [path for path, known in zip(paths, found, strict=True) if known is None]
        missed.sort(key=lambda path: -path.stat().st_size)
        new = dict(zip(missed, self._spread(self._file, missed), strict=True))
        return [known or new[path] for path, known in zip(paths, found, strict=True)]

    def remembered(self, path: Path) -> Digest | None:
        """Return the SHA-256 of a file without reading it, or None."""
        if not self.trust:
            return None
        look = Look.at(os.stat(path))
        known = self.cache.get("file", look)
        if known is not None and len(known) == DIGEST:
            return Digest(path, look.size, known, "cached")
        named = hub_name(path)
        return Digest(path, look.size, named, "hub") if named else None

    def _file(self, path: Path) -> Digest:
        with steady(path) as (descriptor, look, began):
            digest = self._digest(descriptor, 0, look.size)
        self.cache.put("file", look, digest, began)
        return Digest(path, look.size, digest, "hashed")

    # -- tensors ------------------------------------------------------------------------------------

    def tensors(self, path: Path) -> WeightsManifest:
        """Hash every tensor of a safetensors file or of a checkpoint's folder; what has no tensors, as whole files.

        Raises Missing for what cannot be read or changed meanwhile, Stopped, or OSError.
        """
        return joined(path, self.parts(path))

    def parts(self, path: Path) -> dict[Path, list[WeightEntry]]:
        """Do the same, file by file."""
        paths, shards = holding(path)
        whole = [part for part in paths if not part.name.endswith(TENSORS)]
        found = {
            item.path: [WeightEntry("file", item.path.name, "", (), item.size, item.sha256)]
            for item in self.files(whole)
        }
        for part in paths:
            if part not in found:
                found[part] = self.shard(part, shards.get(part.name) if shards else None)
        return found

    def shard(self, path: Path, wanted: set[str] | None = None) -> list[WeightEntry]:
        """Hash the tensors of one safetensors file; of those alone that an index takes from it, if there is one."""
        with steady(path) as (descriptor, look, began):
            places = header(descriptor, look.size, path.name)
            known = self.cache.get("tensors", look) if self.trust else None
            new = known is None or len(known) != DIGEST * len(places)
            digests = self._places(descriptor, places) if new else str(known)
        if new:
            self.cache.put("tensors", look, digests, began)
        lost = (wanted or set()) - {place.name for place in places}
        if lost:
            raise Missing(f"the index takes {min(lost)!r} from {path.name}, which does not hold it")
        return [
            WeightEntry("tensor", place.name, place.dtype, place.shape, place.size, digests[n * DIGEST :][:DIGEST])
            for n, place in enumerate(places)
            if wanted is None or place.name in wanted
        ]

    def _places(self, descriptor: int, places: list[Place]) -> str:
        """Hash every tensor, the longest first, so that no core ends the work alone with a long one."""
        order = sorted(range(len(places)), key=lambda n: -places[n].size)
        made = self._spread(lambda n: self._digest(descriptor, places[n].start, places[n].size), order)
        by_place = dict(zip(order, made, strict=True))
        return "".join(by_place[n] for n in range(len(places)))

    # -- work ---------------------------------------------------------------------------------------

    def _spread(self, work: Callable[[Any], Any], items: Sequence[Any]) -> list[Any]:
        """Do some work on every item, in as many threads as there may be; the first that fails ends it."""
        if self.workers == 1 or len(items) < 2:
            return [work(item) for item in items]
        with ThreadPoolExecutor(min(self.workers, len(items)), "provenance-hash") as pool:
            jobs = [pool.submit(work, item) for item in items]
            try:
                return [job.result() for job in jobs]
            finally:
                pool.shutdown(wait=True, cancel_futures=True)

    def _digest(self, descriptor: int, start: int, size: int) -> str:
        state = hashlib.sha256()
        view: memoryview | None = getattr(self._own, "view", None)
        if view is None:
            view = self._own.view = memoryview(bytearray(CHUNK))
        end = start + size
        while start < end:
            got = os.preadv(descriptor, [view[: end - start]], start)
            if not got:
                raise Missing("a file became shorter while it was hashed")
            state.update(view[:got])
            start += got
            self.told(got)
            if self.stop():
                raise Stopped
        return state.hexdigest()


@contextmanager
def steady(path: Path) -> Iterator[tuple[int, Look, int]]:
    """Open a file for reading by bytes, and notice if it changed before the block ended."""
    descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    try:
        began = time.time_ns()
        look = Look.at(os.fstat(descriptor))
        yield descriptor, look, began
        if Look.at(os.fstat(descriptor)) != look:
            raise Missing(f"{path.name} changed while it was hashed")
    finally:
        os.close(descriptor)


def header(descriptor: int, size: int, name: str) -> list[Place]:
    """Read where the tensors of a safetensors file lie.

    Raises Missing for a file that is not one: tensors must fill it without holes, and their bytes fit their shapes.
    """
    length = int.from_bytes(os.pread(descriptor, 8, 0), "little")
    if size < 8 or not 2 <= length <= min(HEADER_LIMIT, size - 8):
        raise Missing(f"{name} is no safetensors file: it has no header")
    try:
        table = orjson.loads(os.pread(descriptor, length, 8))
        found = [_place(key, item, 8 + length) for key, item in table.items() if key != "__metadata__"]
    except (ValueError, TypeError, KeyError, AttributeError) as why:
        raise Missing(f"{name} is no safetensors file: its header cannot be read ({type(why).__name__})") from None
    found.sort(key=lambda place: (place.start, place.size))
    edges = [(8 + length, 0), *((place.start, place.size) for place in found), (size, 0)]
    if any(start + long != following for (start, long), (following, _) in pairwise(edges)):
        raise Missing(f"{name} is damaged: its tensors do not fill it")
    return found


def _place(name: str, item: Mapping[str, Any], base: int) -> Place:
    start, end = item["data_offsets"]
    shape = tuple(item["shape"])
    dtype, bits = DTYPES.get(item["dtype"], (str(item["dtype"]).lower(), 0))
    if not all(type(number) is int and number >= 0 for number in (start, end, *shape)) or end < start:
        raise ValueError(name)
    if bits and (end - start) * 8 != math.prod(shape) * bits:
        raise ValueError(name)
    return Place(name, dtype, shape, base + start, end - start)


# -- which files --------------------------------------------------------------------------------------


def holding(path: Path) -> tuple[list[Path], dict[str, set[str]]]:
    """Return the files that hold a checkpoint's tensors, as a loader chooses them, and what its index takes from each.

    Raises Missing where there are none, or where the index cannot be followed.
    """
    if path.is_file() and not path.name.endswith(".index.json"):
        return [path], {}
    index = path if path.is_file() else path / INDEX
    if index.is_file():
        shards = _index(index)
        absent = [name for name in shards if not (index.parent / name).is_file()]
        if absent:
            raise Missing(f"{index.name} names {absent[0]}, which is not beside it")
        return [index.parent / name for name in sorted(shards)], shards
    for pattern in ("model.safetensors", "model*.safetensors", "*.safetensors", "*.gguf", "*.bin", "*.pt", "*.pth"):
        found = sorted(item for item in path.glob(pattern) if item.is_file() and not BESIDE.fullmatch(item.name))
        if found:
            return found, {}
    raise Missing(f"{path.name or path} holds no weight files")


def _index(path: Path) -> dict[str, set[str]]:
    shards: dict[str, set[str]] = {}
    try:
        if path.stat().st_size > INDEX_LIMIT:
            raise ValueError("it is too large")
        for tensor, name in orjson.loads(path.read_bytes())["weight_map"].items():
            if not name.endswith(TENSORS) or os.path.basename(name) != name:
                raise ValueError(f"it names {name!r}, which is no safetensors file beside it")
            shards.setdefault(name, set()).add(tensor)
    except (ValueError, TypeError, KeyError, AttributeError) as why:
        raise Missing(f"the index {path.name} cannot be used: {type(why).__name__}: {why}") from None
    return shards


def joined(path: Path, parts: Mapping[Path, list[WeightEntry]]) -> WeightsManifest:
    """Put the tensors of several files together. Raises Missing where two files hold one."""
    found = [entry for entries in parts.values() for entry in entries]
    twice = [name for name, count in Counter(entry.name for entry in found).items() if count > 1]
    if twice:
        raise Missing(f"two files of {path.name} hold the tensor {twice[0]!r}; name one of the files")
    return WeightsManifest("checkpoint", tuple(found))


def weighty(folder: Path) -> list[Path]:
    """List the files of a folder that hold weights, or say where they lie."""
    named = (path for path in folder.iterdir() if path.name.endswith(ENDINGS) and not BESIDE.fullmatch(path.name))
    return sorted(path for path in named if path.is_file())


def tensors_root(place: Path, stop: Stop, cache: Path | None = None, workers: int = 1) -> str:
    """Return one digest over the tensors of a checkpoint, whatever files they lie in.

    Raises Missing where files of another kind hold weights too: what is in them is not known, Stopped, or OSError.
    """
    paths = holding(place)[0]
    beside = [path for path in weighty(place) if path not in paths] if place.is_dir() else []
    closed = [path.name for path in paths if not path.name.endswith(TENSORS)]
    closed += [path.name for path in beside if not path.name.endswith(".index.json")]
    if closed:
        raise Missing(f"what {closed[0]} holds is known by the whole file alone")
    return Hasher(cache, workers, stop).tensors(place).root


def of_files(folder: Path, stop: Stop, cache: Path | None = None) -> tuple[WeightsManifest, str]:
    """Hash the files of a checkpoint's weights in this thread, and say how.

    That is "hashed", or "cached" or "hub" where one was not read. Raises Missing where there are none.
    """
    paths = [folder] if folder.is_file() else weighty(folder)
    if not paths:
        raise Missing("the checkpoint's folder holds no weight files")
    found = Hasher(cache, 1, stop).files(paths)
    entries = tuple(WeightEntry("file", item.path.name, "", (), item.size, item.sha256) for item in found)
    ways = {item.how for item in found}
    return WeightsManifest("files", entries), next(how for how in ("hub", "cached", "hashed") if how in ways)


# -- the cache of the hub -----------------------------------------------------------------------------


def hub_name(path: Path) -> str | None:
    """Return the SHA-256 that the hub's cache gave a file as its name: that of large files. Others bear a SHA-1."""
    try:
        target = os.readlink(path)
    except OSError:
        return None
    found = BLOB.search(target)
    return found.group(1) if found and target.endswith(found.group(1)) and "/snapshots/" in str(path) else None


def hub_cache(environ: Mapping[str, str]) -> Path:
    """Return the folder in which the hub keeps repositories."""
    named = environ.get("HF_HUB_CACHE") or environ.get("HUGGINGFACE_HUB_CACHE")
    if named:
        return Path(named).expanduser()
    base = environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(environ.get("HF_HOME") or os.path.join(base, "huggingface")).expanduser() / "hub"


def snapshot(name: str, commit: str | None, environ: Mapping[str, str], endings: tuple[str, ...] = ENDINGS) -> Path:
    """Find the folder in the hub's cache that a repository was loaded from.

    Loaders of today keep no commit. Where the cache holds one revision alone with such files, it was that one.

    Raises Missing where it holds none, or several.
    """
    folder = hub_cache(environ) / f"models--{name.replace('/', '--')}" / "snapshots"
    if commit and (folder / commit).is_dir():
        return folder / commit
    if commit or not folder.is_dir():
        raise Missing(f"the files of {name} are not in the cache")
    found = [item for item in folder.iterdir() if any(file.name.endswith(endings) for file in item.iterdir())]
    if len(found) != 1:
        held = f"holds {len(found)} revisions of {name}" if found else f"holds no such files of {name}"
        raise Missing(f"the loader keeps no revision, and the cache {held}")
    return found[0]


def checkpoint(model: Any, environ: Mapping[str, str]) -> Path:
    """Find the folder or file a model was loaded from, without asking a network.

    Raises Missing where it is not on this machine.
    """
    config = getattr(model, "config", None)
    return located(str(getattr(config, "_name_or_path", "") or ""), getattr(config, "_commit_hash", None), environ)


def located(name: str, commit: str | None, environ: Mapping[str, str]) -> Path:
    """Find the folder or file that a name stands for: a path, or a commit in the hub's cache.

    Raises Missing where it is not on this machine.
    """
    if not name:
        raise Missing("the model was not loaded from files")
    here = Path(name).expanduser()
    return here if here.exists() else snapshot(name, commit, environ)
