"""What a safekeeper measures, for Prometheus: on a listener of its own, without TLS, one request at a time.

A log is labelled with its node, of which one safekeeper keeps at most ``LOGS_MAX``. Values are read at each scrape.
"""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, HTTPServer
from typing import Any

from prometheus_client import CollectorRegistry, Counter, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from wal.replication.messages import WalStatus
from wal.replication.safekeeper import Safekeeper
from wal.replication.server import Server

disable_created_metrics()  # type: ignore[no-untyped-call]

REQUEST_TIMEOUT_S = 2.0
"""A scraper that takes longer is disconnected: others wait for it meanwhile."""


COUNTED_FROM_0 = (
    "safekeeper_connection_failed",
    "safekeeper_connection_refused",
    "safekeeper_peer_refused",
    "wal_archive_failed",
    "wal_divergent_tail_cut",
    "wal_fencing_reject",
    "wal_recovery_failed",
    "wal_replication_append_reject",
    "wal_scrub_damage",
    "wal_sync_failure",
)
"""Events that alerts may ask for: an increase is seen only of a counter that was there before."""


class KeeperMetrics:
    """All metrics of one safekeeper, in a registry of their own."""

    def __init__(self) -> None:
        self._registry = CollectorRegistry()
        ProcessCollector(registry=self._registry)
        self._events = Counter("safekeeper_events", "Events that were logged", ("event",), registry=self._registry)
        for event in COUNTED_FROM_0:
            self._events.labels(event)

    def count(self, event: str) -> None:
        """Count an event that was logged; there are as many names as the code has."""
        self._events.labels(event).inc()

    def watch(self, keeper: Safekeeper, server: Server, scrub_interval_s: float) -> None:
        """Report how its logs stand from now on."""
        self._registry.register(_KeeperCollector(keeper, server, scrub_interval_s))

    def render(self) -> bytes:
        """Everything in the text format of Prometheus."""
        return generate_latest(self._registry)


class _KeeperCollector(Collector):
    def __init__(self, keeper: Safekeeper, server: Server, scrub_interval_s: float) -> None:
        self._keeper = keeper
        self._server = server
        self._scrub_interval_s = scrub_interval_s

    def collect(self) -> Iterator[Metric]:
        keeper = self._keeper
        wals = list(keeper.statuses([kept for kept in keeper.logs.all() if kept.folder.is_dir()]))
        yield GaugeMetricFamily("safekeeper_logs", "Logs that are kept", len(wals))
        yield GaugeMetricFamily("safekeeper_connections", "Connections now", self._server.connections())
        yield _by_node("safekeeper_log_failed", "Whether a log cannot be opened, or is damaged", wals, _is_failed)
        opened = [wal for wal in wals if wal.state == "open"]
        for name, what in (
            ("durable_lsn", "Last durable position of a log"),
            ("committed_lsn", "Last position of a log that is known to be committed"),
            ("archived_lsn", "Last position of a log that is in the archive, 0 without one"),
            ("promised_epoch", "Epoch of a log that is followed"),
            ("disk_bytes", "Bytes of a log on disk"),
        ):
            yield _by_node(f"safekeeper_log_{name}", what, opened, lambda wal, name=name: getattr(wal, name))
        if keeper.archiver is not None:
            failing = bool(keeper.archiver.fault) or any(wal.archive_fault for wal in wals)
            yield GaugeMetricFamily("safekeeper_archive_failing", "Whether segments cannot be archived", failing)
        yield GaugeMetricFamily(
            "safekeeper_scrub_interval_seconds", "In so long all logs are read again", self._scrub_interval_s
        )
        yield _by_node(
            "safekeeper_scrub_round_end_seconds",
            "When all of a log had been read again, in seconds since 1970",
            [wal for wal in opened if wal.scrubbed_s],
            lambda wal: wal.scrubbed_s,
        )


def _is_failed(wal: WalStatus) -> bool:
    return wal.state == "failed"


def _by_node(name: str, what: str, wals: list[WalStatus], value_of: Any) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, what, labels=["node"])
    for wal in wals:
        family.add_metric([wal.node_id], value_of(wal))
    return family


class _ScrapeServer(HTTPServer):
    def handle_error(self, *_: object) -> None:
        """A client that hung up, or took too long, is no event."""


def listen_for_scrapes(host: str, port: int) -> socket.socket:
    """A socket that listens there.

    Raises:
        OSError: the address cannot be had.
    """
    return socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)


def serve_metrics(metrics: KeeperMetrics, listener: socket.socket) -> str:
    """Answer ``GET /metrics`` on ``listener``, which is taken over, on a thread that ends with the process; where."""

    class Handler(BaseHTTPRequestHandler):
        timeout = REQUEST_TIMEOUT_S

        def do_GET(self) -> None:
            is_known = self.path.partition("?")[0] == "/metrics"
            content = metrics.render() if is_known else b"GET /metrics\n"
            self.send_response(200 if is_known else 404)
            self.send_header("Content-Type", CONTENT_TYPE_LATEST if is_known else "text/plain")
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """A scrape is no event."""

    host, port, *_ = listener.getsockname()
    server = _ScrapeServer((host, port), Handler, bind_and_activate=False)
    server.socket.close()
    server.socket = listener
    threading.Thread(target=server.serve_forever, name="metrics", daemon=True).start()
    return f"{host}:{port}"
