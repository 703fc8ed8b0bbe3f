"""writer: the one who moves the journal into the database, as a service or a side-car, and how far it is."""

import logging
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Annotated

import typer

from provenance import writer as mover
from provenance.cli import backlog, render
from provenance.cli.opened import Db, where
from provenance.journal import room
from provenance.settings import Places, hide

MOST_LAG = 300.0


def writer(
    idle: Annotated[float, typer.Option("--idle", help="End after this many seconds without work; 0: never.")] = 0.0,
    folder: Annotated[
        str, typer.Option("--spool", help="Folder of the journal. Default: PROVENANCE_SPOOL, else the database's own.")
    ] = "",
    metrics: Annotated[
        str, typer.Option("--metrics", metavar="[HOST:]PORT", help="Serve /metrics for Prometheus and /healthz.")
    ] = "",
    max_lag: Annotated[
        float, typer.Option("--max-lag", help="Seconds that a record may wait before this is called unwell.")
    ] = MOST_LAG,
    status: Annotated[
        bool, typer.Option("--status", help="Say how far the journal is in the database, and end.")
    ] = False,
    json: Annotated[bool, typer.Option("--json", help="Print the status in JSON.")] = False,
    db: Db = "",
) -> int:
    """Move the journal into the database, in the foreground: for services and side-cars.

    Ends with 0 on SIGTERM or SIGINT, after the batch that it is in; a database that does not answer is tried again for
    ever. --status ends with 1 where the database does not answer or a record has waited longer than --max-lag.
    """
    spots = where(db)
    if folder:
        spots = replace(spots, spool=Path(folder).expanduser().absolute())
    if status:
        return _status(spots, max_lag, json)
    logging.basicConfig(level=logging.INFO, stream=sys.stderr, format="%(asctime)s %(message)s")
    room.prepare(spots.spool)
    stop = threading.Event()
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, lambda *_: stop.set())
    progress = mover.Progress()
    sys.stderr.write(f"provenance: draining {spots.spool} into {hide(spots.url)}\n")
    with _pages(spots, metrics, progress, max_lag):
        mover.run(spots, idle or float("inf"), stop.is_set, wait=True, progress=progress)
    return 0


@contextmanager
def _pages(spots: Places, address: str, progress: mover.Progress, most_lag: float) -> Iterator[None]:
    """Serve the pages meanwhile, if an address is given."""
    if not address:
        yield
        return
    from provenance.cli.metrics import serve

    watch = backlog.Watch(spots)
    try:
        server = serve(address, progress, watch, most_lag)
        host, port = server.server_address[:2]
        sys.stderr.write(f"provenance: http://{host!s}:{port}/metrics and /healthz\n")
        yield
        server.shutdown()
        server.server_close()
    finally:
        watch.close()


def _status(spots: Places, most_lag: float, json: bool) -> int:
    """Say how far the journal is in the database."""
    seen = backlog.look(spots)
    reason = seen.unwell(most_lag)
    if json:
        render.emit(
            {"database": hide(spots.url), "spool": str(spots.spool), "well": not reason, "reason": reason} | seen.form()
        )
        return int(bool(reason))
    render.table(
        ("what", "now"),
        [("database", hide(spots.url)), ("spool", str(spots.spool)),
         ("writer", "running" if seen.writing else "none; the next call or reading command starts one"),
         ("waiting", f"{seen.bytes} bytes in {seen.segments} segments, the oldest record for {seen.lag:.1f} s"),
         ("kept for redrain", f"{seen.kept_bytes} bytes in {seen.kept} segments"),
         ("damaged segments", str(seen.damaged)), ("dropped records", str(seen.dropped)),
         ("free on its disk", f"{seen.free_bytes} bytes"), ("state", reason or "well")],
    )  # fmt: skip
    return int(bool(reason))
