"""What the writer tells Prometheus, and whoever asks whether it is well: two pages on a port of this host's own."""

import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import orjson

from provenance.cli.backlog import Watch
from provenance.errors import MissingExtra, UsageError
from provenance.writer import Progress

HERE = "127.0.0.1"
# Gauges by the name of what the watch sees: name and help.
SEEN = {
    "bytes": ("provenance_queue_bytes", "Bytes of the journal that are not in the database yet."),
    "segments": ("provenance_queue_segments", "Segments with records that are not in the database yet."),
    "lag": ("provenance_lag_seconds", "Age of the oldest record that is not in the database yet."),
    "kept": ("provenance_kept_segments", "Drained segments that redrain could bring back."),
    "kept_bytes": ("provenance_kept_bytes", "Bytes of drained segments that redrain could bring back."),
    "damaged": ("provenance_damaged_segments", "Segments set aside because bytes in them were damaged."),
    "free_bytes": ("provenance_spool_free_bytes", "Bytes free on the disk of the spool."),
    "dropped": ("provenance_dropped_records", "Records that recorders could not keep, over the life of the database."),
}
# Counters by the name in the writer's progress.
DONE = {
    "drained": ("provenance_drained_records", "Records moved into the database by this process."),
    "errors": ("provenance_errors", "Failures of the database that this process met; each was tried again."),
}
# Counters over the life of the database, by the name of what the watch sees; the rate of divergence is made of them.
PAIRED = {
    "pairs": ("provenance_pairs", "Pairs of runs with equal input, settings and tensors."),
    "differed": ("provenance_differing_pairs", "Of those, the ones whose outputs differ."),
    "surface": ("provenance_surface_pairs", "Of those that differ, the ones that are equal once evened out."),
    "untold": ("provenance_untold_pairs", "Of those that differ, the ones whose texts were not kept."),
}


class Teller:
    """A collector of prometheus_client."""

    def __init__(self, progress: Progress, watch: Watch) -> None:
        self.progress, self.watch = progress, watch

    def collect(self) -> Iterator[Any]:
        """Yield every metric."""
        from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily

        seen = self.watch.seen
        for key, (name, text) in SEEN.items():
            yield GaugeMetricFamily(name, text, value=getattr(seen, key))
        for key, (name, text) in PAIRED.items():
            yield CounterMetricFamily(name, text, value=getattr(seen, key))
        for key, (name, text) in DONE.items():
            yield CounterMetricFamily(name, text, value=getattr(self.progress, key))
        yield GaugeMetricFamily("provenance_database_up", "Whether the database answers.", value=not seen.trouble)
        yield GaugeMetricFamily(
            "provenance_writer_elected", "Whether this process is the writer of its spool.", value=self.progress.elected
        )
        yield GaugeMetricFamily(
            "provenance_last_commit_timestamp_seconds", "When this process last committed; 0: never.",
            value=self.progress.committed_at,
        )  # fmt: skip


class _Pages(BaseHTTPRequestHandler):
    """The two pages."""

    timeout = 5
    registry: Any = None
    watch: Watch
    most_lag = 0.0

    def do_GET(self) -> None:
        """Answer."""
        path = self.path.partition("?")[0]
        if path == "/metrics":
            from prometheus_client.exposition import choose_encoder

            encoder, kind = choose_encoder(self.headers.get("Accept", ""))
            self._answer(200, kind, encoder(self.registry))
        elif path == "/healthz":
            seen = self.watch.seen
            reason = seen.unwell(self.most_lag)
            form = {"status": "unwell" if reason else "ok", "reason": reason, "lag_seconds": round(seen.lag, 3)}
            self._answer(503 if reason else 200, "application/json", orjson.dumps(form) + b"\n")
        else:
            self._answer(404, "text/plain", b"there are /metrics and /healthz\n")

    def _answer(self, code: int, kind: str, body: bytes) -> None:
        self.send_response(code)
        self.send_header("Content-Type", kind)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Keep quiet: a page is asked for every few seconds."""


def address(text: str) -> tuple[str, int]:
    """Read [HOST:]PORT; without a host it is this machine's own.

    >>> address("9464"), address("0.0.0.0:9464"), address("[::1]:0")
    (('127.0.0.1', 9464), ('0.0.0.0', 9464), ('::1', 0))
    """
    host, _, port = text.rpartition(":")
    if not (port.isascii() and port.isdigit()) or int(port) > 65535:
        raise UsageError(f"--metrics is {text!r}; write a port, or HOST:PORT, as in 9464 or 0.0.0.0:9464.")
    return host.strip("[]") or HERE, int(port)


def serve(text: str, progress: Progress, watch: Watch, most_lag: float) -> ThreadingHTTPServer:
    """Serve the pages from a thread of their own, and return the server.

    Raises MissingExtra without the client, UsageError where the address cannot be had.
    """
    try:
        from prometheus_client import CollectorRegistry
    except ModuleNotFoundError:
        raise MissingExtra("prometheus-client", "--metrics", "metrics") from None
    registry = CollectorRegistry(auto_describe=False)
    registry.register(Teller(progress, watch))
    pages = type("Pages", (_Pages,), {"registry": registry, "watch": watch, "most_lag": most_lag})
    host, port = address(text)
    try:
        server = type("Server", (ThreadingHTTPServer,), _family(host))((host, port), pages)
    except (OSError, OverflowError) as error:
        raise UsageError(f"--metrics cannot listen on {host}:{port}: {getattr(error, 'strerror', error)}.") from None
    threading.Thread(target=server.serve_forever, name="provenance-metrics", daemon=True).start()
    return server  # type: ignore[no-any-return]


def _family(host: str) -> dict[str, Any]:
    import socket

    return {"address_family": socket.AF_INET6 if ":" in host else socket.AF_INET, "daemon_threads": True}
