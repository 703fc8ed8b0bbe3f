"""torture: the promises of journal and writer, tried on the user's own disk, with a report of the counts."""

import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated, NamedTuple

import typer

from provenance.cli import ordeals, render, trials
from provenance.cli.opened import Json, where
from provenance.cli.ordeals import Count
from provenance.errors import UsageError


class Numbers(NamedTuple):
    """How often each thing is done in one round."""

    kills: int
    writer_kills: int
    flips: int
    cut_bytes: int
    cycles: int
    disks: int


ROUND = Numbers(15, 10, 200, 200, 5, 1)
FULL = Numbers(1000, 500, 5000, 8192, 50, 20)  # what is printed with every release
SECONDS = 60.0
Ordeal = Callable[[], Count | None]


def torture(
    minutes: Annotated[float, typer.Option("--minutes", min=0.0, help="For about this long; 0: one round.")] = 1.0,
    folder: Annotated[
        Path | None, typer.Option("--dir", help="A folder on the disk to try. Default: where the store would lie.")
    ] = None,
    full: Annotated[
        bool, typer.Option("--full", help="Instead: 1,000 kills, 500 kills of the writer, 5,000 wrong bits.")
    ] = False,
    seed: Annotated[int, typer.Option("--seed", help="Begin with this number, to see the same again.")] = 0,
    json: Json = False,
) -> int:
    """Kill, cut, fill and flip on your own disk, and count what was lost. Exit code 1 if anything was.

    It works in a folder of its own inside DIR and deletes it in the end.
    """
    if not hasattr(os, "fork"):
        raise UsageError("torture needs a system that can fork: Linux or macOS.")
    seed = seed or random.SystemRandom().randrange(1, 1 << 32)
    place = _place(folder)
    began = time.monotonic()
    chance = random.Random(seed)  # noqa: S311
    try:
        found = _rounds(place, chance, FULL if full else ROUND, 0 if full else minutes * SECONDS)
    finally:
        shutil.rmtree(place, ignore_errors=True)
    took = time.monotonic() - began
    if json:
        document = {item.ordeal: {**vars(item), "bad": item.bad} for item in found}
        render.emit({"schema": "provenance/torture/1", "seed": seed, "seconds": round(took, 1), "ordeals": document})
    else:
        _tell(found, place.parent, seed, took)
    return 1 if any(item.bad for item in found) else 0


def _place(folder: Path | None) -> Path:
    """Make a folder of our own on the disk that is tried."""
    spots = where("")
    parent = folder or (spots.database or spots.spool).parent
    try:
        parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        return Path(tempfile.mkdtemp(prefix="provenance-torture-", dir=parent)).absolute()
    except OSError as error:
        raise UsageError(f"no folder can be made in {parent}: {error.strerror}. Choose another with --dir.") from None


def _rounds(place: Path, chance: random.Random, numbers: Numbers, seconds: float) -> list[Count]:
    """Go through all ordeals, round after round until the time is over; once at least."""
    found: dict[str, Count] = {}
    limit = time.monotonic() + seconds
    number = 0
    while number == 0 or time.monotonic() < limit:
        number += 1
        inside = place / f"round-{number}"
        inside.mkdir(mode=0o700)
        for count in _round(inside, chance, numbers):
            found.setdefault(count.ordeal, Count(count.ordeal)).add(count)
            if sys.stderr.isatty():
                sys.stderr.write(f"\r{sum(item.done for item in found.values())} blows, {count.ordeal:<40}")
        shutil.rmtree(inside, ignore_errors=True)
    if sys.stderr.isatty():
        sys.stderr.write("\r" + " " * 70 + "\r")
    return list(found.values())


def _round(inside: Path, chance: random.Random, numbers: Numbers) -> Iterator[Count]:
    yield ordeals.kills(inside, numbers.kills, chance)
    yield ordeals.full(inside, numbers.cycles, chance)
    yield ordeals.flips(inside, numbers.flips, chance)
    yield ordeals.cuts(inside, numbers.cut_bytes)
    yield trials.writer_kills(inside, numbers.writer_kills, chance)
    small = trials.small_disk(inside, numbers.disks, chance)
    if small is not None:
        yield small


def _tell(found: list[Count], disk: Path, seed: int, took: float) -> None:
    heads = ("ordeal", "times", "records", "lost", "invented", "out of order", "twice", "unnamed")
    render.table(
        heads,
        [
            (item.ordeal, f"{item.done:,}", f"{item.records:,}", item.lost, item.invented, item.reordered, item.twice,
             item.unnamed)
            for item in found
        ],
    )  # fmt: skip
    for item in found:
        for note in item.notes:
            sys.stdout.write(f"{item.ordeal}: {note}.\n")
    bad = sum(item.bad for item in found)
    verdict = "nothing was lost" if not bad else f"{bad} FAULTS: please report them with this table"
    sys.stdout.write(f"{disk}, {took:.0f} s, --seed {seed}: {verdict}.\n")
