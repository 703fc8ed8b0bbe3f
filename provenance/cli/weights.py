"""weights: which tensors differ between two runs, files or checkpoints, and the digests of files."""

import sys
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Annotated, Any

import typer

from provenance.cli import render
from provenance.cli.opened import Db, Json, Runs, is_file
from provenance.errors import BadFile, CouldNotTell
from provenance.explain import manifests
from provenance.facts import WeightEntry, WeightsManifest
from provenance.fingerprint.files import ENDINGS, TENSORS, Digest, Hasher, cores, holding, joined, of_files
from provenance.fingerprint.reading import Missing
from provenance.fingerprint.weights import UNREAD
from provenance.integrity.canonical import PREFIX
from provenance.settings import remembered_digests
from provenance.store import queries

Check = Annotated[
    bool, typer.Option("--check", help="Read every file, even where its digest is remembered or is its name.")
]
HOW = {
    "hashed": "",
    "cached": " (remembered; --check reads it)",
    "hub": " (its name in the cache of the hub; --check reads it)",
}
SHOWN = 20
NOT_SEEN = "an edit through `.data` after they were hashed is not seen"
weights = typer.Typer(no_args_is_help=True, rich_markup_mode=None)


# -- progress -----------------------------------------------------------------------------------------


class Progress:
    """A line on standard error about work that takes longer than half a second."""

    def __init__(self, total: int) -> None:
        self.total, self.done = total, 0
        self.began = self.told = time.monotonic()
        self.terminal = sys.stderr.isatty()
        self._lock = threading.Lock()

    def __call__(self, size: int) -> None:
        """Count some bytes, and tell of them ten times a second on a terminal, every ten seconds elsewhere."""
        with self._lock:
            self.done += size
            now = time.monotonic()
            if now - self.began < 0.5 or now - self.told < (0.1 if self.terminal else 10.0):
                return
            self.told = now
        rate = self.done / 1e9 / (now - self.began)
        text = f"hashing: {self.done / 1e9:.2f} of {self.total / 1e9:.2f} GB, {rate:.2f} GB/s"
        sys.stderr.write(f"\r{text}\x1b[K" if self.terminal else f"provenance: {text}\n")
        sys.stderr.flush()

    def end(self) -> None:
        """Take the line away."""
        if self.terminal and self.told != self.began:
            sys.stderr.write("\r\x1b[K")


def hasher(check: bool, total: int) -> tuple[Hasher, Progress]:
    """Make a hasher on every core that this process may use."""
    progress = Progress(total)
    return Hasher(remembered(), cores(), told=progress, trust=not check), progress


def remembered() -> Path:
    """Return where digests of files are remembered."""
    return remembered_digests()


def checkpoint(path: Path, check: bool) -> WeightsManifest:
    """Hash the tensors of a file or a folder. Raises BadFile."""
    try:
        work, progress = hasher(check, sum(part.stat().st_size for part in holding(path)[0]))
        try:
            return work.tensors(path)
        finally:
            progress.end()
    except (Missing, OSError) as why:
        raise BadFile(f"{path} cannot be hashed: {why}.") from None


# -- diff ---------------------------------------------------------------------------------------------


@weights.command("diff")
def diff(
    a: Annotated[str, typer.Argument(metavar="A", help="A run, a weights file, a checkpoint's folder, or a root.")],
    b: Annotated[str, typer.Argument(metavar="B", help="The other.")],
    everything: Annotated[bool, typer.Option("--all", help="List every tensor that differs.")] = False,
    check: Check = False,
    json: Json = False,
    db: Db = "",
) -> int:
    """Say which tensors differ: of two runs, safetensors files, checkpoints or manifest roots, in any mixture.

    Exit code 0: same; 1: differs; 3: could not tell, because the weights of a run were not hashed.
    """
    runs = Runs(db)
    one, other = side(a, runs, check), side(b, runs, check)
    one, other = _alike(one, other, a), _alike(other, one, b)
    why = manifests.incomparable(one, other)
    if why:
        raise CouldNotTell(f"the weights of {a} and {b} cannot be compared: {why}.")
    found = manifests.compare(one, other)
    if json:
        render.emit({"schema": "provenance/weights-diff/1", "a": _about(a, one), "b": _about(b, other), **_form(found)})
    else:
        _tell(found, one, everything)
        _caveat([reference for reference, held in ((a, one), (b, other)) if held.kind == "tensors"])
    return 0 if found.equal else 1


def side(reference: str, runs: Runs, check: bool) -> WeightsManifest:
    """Return the manifest that a reference means. Raises BadFile, RunNotFound or CouldNotTell."""
    if reference.startswith(PREFIX):
        return _stored(reference, runs, BadFile)
    path = _path(reference)
    if path is not None and (path.is_dir() or not reference.endswith(".json") or reference.endswith(".index.json")):
        return checkpoint(path, check)
    if reference.endswith(ENDINGS) or (is_file(reference) and not reference.endswith(".json")):
        raise BadFile(f"there is no file or folder {reference}.")
    run, _ = runs.find(reference)
    root = run.fields.get("weights.loaded_root")
    hidden = root is not None and UNREAD in root.reason  # in memory there is more than the files say
    for name in ("weights.loaded_root", "weights.files_root")[: 1 if hidden else 2]:
        known = run.fields.get(name)
        if known is not None and known.known and isinstance(known.value, str):
            return _stored(known.value, runs, CouldNotTell)
    why = (root.reason if root is not None else "") or "the call ran on no model whose tensors can be seen"
    raise CouldNotTell(f"the weights of run {reference} are not known: {why}.")


def _path(reference: str) -> Path | None:
    """Return the file or folder that a reference names, or None where there is none."""
    try:
        path = Path(reference).expanduser()
        return path if path.exists() else None
    except (RuntimeError, OSError):  # a user that does not exist, a name that is too long
        return None


def _stored(root: str, runs: Runs, error: type[BadFile | CouldNotTell]) -> WeightsManifest:
    found = queries.manifests(runs.engine, root)
    if len(found) != 1:
        held = "holds no manifest" if not found else "holds more than one manifest"
        raise error(f"this store {held} whose root begins {root}.")
    return WeightsManifest.read(found[0])


def _alike(mine: WeightsManifest, other: WeightsManifest, reference: str) -> WeightsManifest:
    """Hash whole files where the other side is known by whole files alone."""
    if other.kind == "files" and mine.kind == "checkpoint" and Path(reference).expanduser().exists():
        return of_files(Path(reference).expanduser(), lambda: False, remembered_digests())[0]
    return mine


def _caveat(loaded: list[str]) -> None:
    """Say what the digests of tensors in memory stand for: the moment at which a load was hashed."""
    if loaded:
        whose = " and ".join(dict.fromkeys(loaded))
        render.lines([("dim", f"  the tensors of {whose} are those of its load, hashed once: {NOT_SEEN}")])


def _about(reference: str, manifest: WeightsManifest) -> dict[str, Any]:
    about = {"reference": reference, "kind": manifest.kind, "root": manifest.root, "entries": len(manifest.entries)}
    return {**about, "not_seen": NOT_SEEN if manifest.kind == "tensors" else None}


def _form(found: manifests.Comparison) -> dict[str, Any]:
    return {
        "equal": found.equal, "shared": found.shared,
        "differing": [{"name": one.name, "a": _entry(one), "b": _entry(other)} for one, other in found.differing],
        "dtype_changed": [one.name for one, _ in found.dtypes], "shape_changed": [one.name for one, _ in found.shapes],
        "only_a": found.only_a, "only_b": found.only_b, "not_in_files": found.spared,
    }  # fmt: skip


def _entry(entry: WeightEntry) -> dict[str, Any]:
    return {"dtype": entry.dtype, "shape": entry.shape, "bytes": entry.size, "sha256": entry.sha256}


def _tell(found: manifests.Comparison, one: WeightsManifest, everything: bool) -> None:
    what = "files" if all(entry.kind == "file" for entry in one.entries) else "tensors"
    out = [("plain" if found.equal else "head", manifests.sentence(found, what) + ".")]
    limit = None if everything else SHOWN
    for a, b in found.differing[:limit]:
        out.append(("plain", f"  {a.name}: {_change(a, b)}"))
    if not everything and len(found.differing) > SHOWN:
        out.append(("dim", f"  and {len(found.differing) - SHOWN} more; --all lists them"))
    if found.spared:
        names = f"{len(found.spared)} names in memory alone: buffers, or second names of tied tensors"
        out.append(("dim", f"  not counted, for no file holds them: {names}"))
    render.lines(out)


def _change(a: WeightEntry, b: WeightEntry) -> str:
    parts = []
    if a.dtype != b.dtype:
        parts.append(f"{a.dtype} -> {b.dtype}")
    if a.shape != b.shape:
        parts.append(f"{list(a.shape)} -> {list(b.shape)}")
    return ", ".join(parts) or f"{a.dtype} {list(a.shape)}, {a.sha256[:12]} -> {b.sha256[:12]}"


# -- hash ---------------------------------------------------------------------------------------------


@weights.command("hash")
def hash_files(
    place: Annotated[str, typer.Argument(metavar="PATH", help="A weights file or a checkpoint's folder.")],
    sha256: Annotated[
        bool, typer.Option("--sha256", help="The SHA-256 of each whole file too: one core a file, a second reading.")
    ] = False,
    check: Check = False,
    json: Json = False,
) -> int:
    """Hash a checkpoint: one root over its tensors, whatever files they lie in, and a digest of each file."""
    path = _path(place)
    if path is None:
        raise BadFile(f"there is no file or folder {place}.")
    try:
        parts = holding(path)[0]
        work, progress = hasher(check, sum(part.stat().st_size for part in parts) * (2 if sha256 else 1))
        try:
            with ThreadPoolExecutor(1) as aside:  # a long sum for one core, beside the short ones for the others
                whole = aside.submit(_whole, work, parts, sha256)
                found = work.parts(path)
                digests = whole.result()
        finally:
            progress.end()
        manifest = joined(path, found)
    except (Missing, OSError) as why:
        raise BadFile(f"{path} cannot be hashed: {why}.") from None
    rows = [_row(part, entries, digests.get(part)) for part, entries in found.items()]
    total = sum(entry.size for entry in manifest.entries)
    if json:
        about = {"path": str(path), "root": manifest.root, "entries": len(manifest.entries), "bytes": total}
        render.emit({"schema": "provenance/weights-hash/1", **about, "files": rows})
        return 0
    render.lines([("head", f"{manifest.root}  {len(manifest.entries)} entries, {total / 1e9:.3f} GB")])
    for row in rows:
        render.lines([("plain", f"{row['name']}  {row['bytes'] / 1e9:.3f} GB")])
        if row["tensors"] is not None:
            render.lines([("plain", f"  {row['tensors']} tensors  {row['root']}")])
        if row["sha256"]:
            render.lines([("plain", f"  file sha256:{row['sha256']}{HOW[row['how']]}")])
    return 0


def _whole(work: Hasher, parts: list[Path], sha256: bool) -> dict[Path, Digest]:
    """Return the digests of whole files: all if they were asked for, else those that cost nothing."""
    if sha256:
        return {item.path: item for item in work.files(parts)}
    return {item.path: item for item in map(work.remembered, parts) if item is not None}


def _row(part: Path, entries: list[WeightEntry], whole: Digest | None) -> dict[str, Any]:
    """Say of one file what is known: the root of its tensors, and its own SHA-256 where that was to be had."""
    row: dict[str, Any] = {"name": part.name, "bytes": part.stat().st_size, "tensors": None, "root": None}
    if part.name.endswith(TENSORS):
        row |= {"tensors": len(entries), "root": WeightsManifest("checkpoint", tuple(entries)).root}
    elif whole is None:
        whole = Digest(part, entries[0].size, entries[0].sha256, "hashed")
    return {**row, "sha256": whole.sha256 if whole else None, "how": whole.how if whole else None}
