"""A checkpoint on disk as fields: one root over its weight files, and a digest of every small file that decides.

Nothing is loaded and nothing is parsed: files are hashed as bytes.
"""

import os
from pathlib import Path

from provenance.facts import Field
from provenance.fingerprint import files
from provenance.fingerprint.reading import Missing, read, short_path
from provenance.integrity.digests import file_digest

# What a model is besides its weights: configuration, decoding defaults, tokenizer, template, preprocessing, own code.
SMALL = (".json", ".jinja", ".model", ".txt", ".py", ".tiktoken")
LIMIT = 256 << 20


def fields(place: Path, cache: Path | None = None) -> list[Field]:
    """Read a checkpoint's folder, or one file of weights. ``cache`` remembers digests of files that did not change."""
    found = [
        Field("weights.path", short_path(str(place.absolute()), os.path.expanduser("~")), source="files"),
        read("weights.files_root", lambda: files.of_files(place, lambda: False, cache)[0].root, "files"),
        read("weights.tensors_root", lambda: files.tensors_root(place, lambda: False, cache, files.cores()), "files"),
    ]
    if place.is_dir():
        found += [read(f"files.{path.name}", lambda path=path: digest(path), "files") for path in small(place)]  # type: ignore[misc]
    return found


def small(folder: Path) -> list[Path]:
    """List the small files of a checkpoint, those of its weights apart."""
    return sorted(
        path
        for path in folder.iterdir()
        if path.suffix in SMALL and not path.name.endswith(files.ENDINGS) and path.is_file()
    )


def digest(path: Path) -> str:
    """Hash one small file. Raises Missing where it is too large to be one."""
    if path.stat().st_size > LIMIT:
        raise Missing(f"{path.name} is larger than {LIMIT >> 20} MiB")
    return file_digest(path.read_bytes())
