"""import: segments of a host that cannot reach the store, carried over as files; each record once, however often."""

import sys
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from provenance import writer
from provenance.cli import render
from provenance.cli.opened import Db, Json, where
from provenance.errors import BadFile, BadSegment
from provenance.journal import spool

KEPT = (spool.SUFFIX, ".damaged")


def import_segments(
    sources: Annotated[
        list[Path], typer.Argument(metavar="SEGMENT...", help="Segments, or folders of them such as a copied spool.")
    ],
    json: Json = False,
    db: Db = "",
) -> int:
    """Bring the journal of another host into this store, for hosts that cannot reach it.

    Copy the files of its spool (`provenance db path` lists them there) and name them here. The files stay as they
    are. What is there already is not written again, so importing the same files twice, or a newer copy of them, is
    safe. Exit code 1 where bytes were damaged: the records in them are named in the table events.
    """
    paths = _segments(sources)
    mover = writer.Drain(where(db))
    try:
        following = [*paths[1:], Path()]
        taken = [
            _take(mover, one, spool.stream_of(one) != spool.stream_of(two))
            for one, two in zip(paths, following, strict=True)
        ]
    finally:
        mover.close()
    for item in taken:
        _warn(item)
    lines = [_line(item) for item in taken]
    if json:
        render.emit(lines)
    else:
        heads = ("segment", "host", "program", "records", "new", "damaged")
        render.table(heads, [tuple(str(line[head]) for head in heads) for line in lines])
    return 1 if any(item.damaged for item in taken) else 0


def _segments(sources: list[Path]) -> list[Path]:
    """List the segments that are meant, each stream's in order. Raises BadFile where there is none."""
    found: list[Path] = []
    for source in sources:
        if source.is_dir():
            inside = sorted(path for path in source.iterdir() if path.suffix in KEPT and path.is_file())
            if not inside:
                raise BadFile(f"{source} holds no segment; name the folder that `provenance db path` calls the spool.")
            found += inside
        elif source.is_file():
            found.append(source)
        else:
            raise BadFile(f"there is no file {source}; name segments, or a folder of them.")
    return sorted(dict.fromkeys(found), key=lambda path: path.name)


def _take(mover: writer.Drain, path: Path, last: bool) -> writer.Taken:
    try:
        return mover.take(path, last)
    except BadSegment as error:
        raise BadFile(f"{error} Segments before it in the list were imported.") from None
    except OSError as error:
        raise BadFile(f"{path} cannot be read ({error.strerror}).") from None


def _warn(item: writer.Taken) -> None:
    """Say what is not as it should be with a segment."""
    name = item.path.name
    if item.damaged:
        sys.stderr.write(f"provenance: {name} is damaged in {item.damaged} places; all other records are in.\n")
    if item.missing:
        sys.stderr.write(f"provenance: {item.missing} segments before {name} are not in the store; import them too.\n")


def _line(item: writer.Taken) -> dict[str, Any]:
    try:
        about = orjson.loads(item.stream.about)
    except orjson.JSONDecodeError:
        about = {}
    return {
        "segment": item.path.name, "host": about.get("host", ""), "program": about.get("program", ""),
        "records": item.seen, "new": item.new, "damaged": item.damaged, "stream": item.stream.stream_id.hex(),
        "index": item.number,
    }  # fmt: skip
