"""import, redrain: segments brought in by hand, each record once, however often.

`import` takes those of a host that cannot reach the store, carried over as files; `redrain` those that this host's
spool still keeps, for a database that lost commits.
"""

import sys
from pathlib import Path
from typing import Annotated, Any

import orjson
import typer

from provenance import writer
from provenance.cli import render
from provenance.cli.opened import Db, Json, where
from provenance.errors import BadFile, BadSegment
from provenance.journal import kept, spool
from provenance.settings import Places

SUFFIXES = (spool.SUFFIX, kept.KEPT, kept.DAMAGED)


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
    return _tell(_bring(where(db), paths), json)


def redrain(json: Json = False, db: Db = "") -> int:
    """Put the segments that the spool still keeps into the database again, each record once.

    For a database that lost commits: restored from an older backup, or failed over to a copy that lagged. The writer
    keeps a drained segment for a day (the setting `grace`). What is there already is not written again. Exit code 1
    where bytes were damaged, or where older segments are needed that are not kept any more.
    """
    spots = where(db)
    paths = kept.whole(spots.spool)
    if not paths:
        sys.stderr.write(f"provenance: the spool {spots.spool} keeps no segment; there is nothing to bring back.\n")
        if json:
            render.emit([])
        return 0
    taken = _bring(spots, paths)
    code = _tell(taken, json)
    new = sum(item.new for item in taken)
    seen = sum(item.seen for item in taken)
    sys.stderr.write(f"provenance: {new} of {seen} records in {len(taken)} segments were not in the database.\n")
    return max(code, int(any(item.missing for item in taken)))


def _bring(spots: Places, paths: list[Path]) -> list[writer.Taken]:
    """Bring segments in, each stream's in order."""
    mover = writer.Drain(spots)
    taken = []
    try:
        for path, after in zip(paths, [*paths[1:], Path()], strict=True):
            last = spool.stream_of(path) != spool.stream_of(after) and not spool.alive(path)
            found = _take(mover, path, last)
            taken += [found] if found is not None else []
    finally:
        mover.close()
    return taken


def _tell(taken: list[writer.Taken], json: bool) -> int:
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
            inside = sorted(path for path in source.iterdir() if path.suffix in SUFFIXES and path.is_file())
            if not inside:
                raise BadFile(f"{source} holds no segment; name the folder that `provenance db path` calls the spool.")
            found += inside
        elif source.is_file():
            found.append(source)
        else:
            raise BadFile(f"there is no file {source}; name segments, or a folder of them.")
    return sorted(dict.fromkeys(found), key=lambda path: path.name)


def _take(mover: writer.Drain, path: Path, last: bool) -> writer.Taken | None:
    """Take one segment. One that the writer has set aside since it was listed is taken from there."""
    try:
        return mover.take(path, last)
    except BadSegment as error:
        raise BadFile(f"{error} Segments before it in the list were imported.") from None
    except FileNotFoundError:
        aside = path.with_suffix(kept.KEPT)
        return _take(mover, aside, last) if path.suffix == spool.SUFFIX and aside.exists() else None
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
