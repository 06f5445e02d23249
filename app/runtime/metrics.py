"""The node's metrics, for Prometheus. Never a tenant, a job or a key as a label: labels have few values.

``ledger.facts.metrics`` declares each metric. Events are counted and observed as they happen. Values that live
elsewhere (the clock, the watermarks) are read at each scrape, so they cost the write path nothing.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from typing import TYPE_CHECKING

from prometheus_client import CollectorRegistry, Counter, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import choose_encoder
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from app.runtime.settings.config import QUOTAS
from app.runtime.state.node import Node
from ledger.facts.metrics import METRICS, Kind
from ledger.positions import Lsn
from wal.replication.leading import Shipper

if TYPE_CHECKING:
    from app.runtime.tracing import Tracing

# Else each counter and histogram also exports its time of creation.
disable_created_metrics()  # type: ignore[no-untyped-call]

UNMATCHED_ROUTE = "unmatched"
METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})

STATS_DROPPED = ("sampled", "full", "busy", "disk")
"""Why stats reports are not kept: sampling, no room in the queue, no room or time to check them, a disk that fails."""
COUNTERS_READ = frozenset(
    {
        "hlc_ticks",
        "hlc_clock_skew_rejections",
        "exchange_imported_entries",
        "wal_replication_sent_records",
        "wal_replication_sent_bytes",
        "wal_replication_damaged_frames",
    }
)
"""Counters that are kept elsewhere and read at each scrape."""

Values = Mapping[str, float | Mapping[str, float]]
"""By metric its value, or its values by label."""


class Metrics:
    """All metrics of one process, in a registry of their own. A metric is named as ``METRICS`` declares it."""

    def __init__(self, tracing: Tracing | None = None) -> None:
        """``tracing`` gets the requests and signings to make spans of; None if there are no spans."""
        self._tracing = tracing
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._counters = {
            name: Counter(name, metric.meaning, metric.labels, registry=self.registry)
            for name, metric in METRICS.items()
            if metric.kind is Kind.COUNTER and name not in COUNTERS_READ
        }
        self._histograms = {
            name: Histogram(name, metric.meaning, metric.labels, buckets=metric.buckets, registry=self.registry)
            for name, metric in METRICS.items()
            if metric.kind is Kind.HISTOGRAM
        }
        # A counter with labels is served from its first value on.
        for quota in QUOTAS:
            self.count("quota_refusals", 0, quota)
        for reason in STATS_DROPPED:
            self.count("stats_dropped", 0, reason)
        self._of_requests = cache(
            lambda method, route, status: (
                self._counters["http_requests"].labels(method, route, str(status)),
                self._histograms["http_request_duration_seconds"].labels(method, route),
            )
        )

    def count(self, name: str, amount: float = 1, *labels: str) -> None:
        """Add ``amount`` to the counter ``name``, to its value of these labels where it has labels."""
        counter = self._counters[name]
        (counter.labels(*labels) if labels else counter).inc(amount)

    def observe(self, name: str, value: float) -> None:
        """Add ``value`` to the histogram ``name``, which has no labels."""
        self._histograms[name].observe(value)

    def read(self, values: Callable[[], Values]) -> None:
        """Call ``values`` at each scrape, and serve its result."""
        self.registry.register(_ReadValues(values))

    def observe_request(
        self,
        method: str,
        route: str,
        status: int,
        seconds: float,
        span: str | None = None,
        lsns: tuple[Lsn, Lsn] | None = None,
    ) -> None:
        """Count one request, answered now. ``route`` is a template such as ``/v1/jobs/{job_id}``; its ``span`` (W3C
        Trace Context) becomes the exemplar of its bucket, and has a span of ours; ``lsns`` as of ``Accepted``."""
        counter, histogram = self._of_requests(method if method in METHODS else "other", route, status)
        counter.inc()
        if span is None:
            histogram.observe(seconds)
        else:
            _, trace_id, span_id, _ = span.split("-")
            histogram.observe(seconds, {"trace_id": trace_id, "span_id": span_id})
            if self._tracing is not None:
                self._tracing.request(span, method, route, status, seconds, lsns)

    @contextmanager
    def signing(self, what: str, tenants: int) -> Iterator[None]:
        """Signs ``what`` of so many tenants: one span."""
        began_s = time.perf_counter()
        yield
        if self._tracing is not None:
            self._tracing.signed(what, tenants, time.perf_counter() - began_s)

    def render(self, accept: str = "") -> tuple[bytes, str]:
        """All metrics as text of Prometheus, or of OpenMetrics where ``accept`` names it, and the content type."""
        encode, content_type = choose_encoder(accept)
        return encode(self.registry), content_type


@dataclass(eq=False)
class _ReadValues(Collector):
    values: Callable[[], Values]

    def collect(self) -> Iterator[Metric]:
        for name, value in self.values().items():
            metric = METRICS[name]
            family = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
            found = family(name, metric.meaning, labels=metric.labels)
            for label, each in value.items() if isinstance(value, Mapping) else [(None, value)]:
                found.add_metric([] if label is None else [label], each)
            yield found


def node_values(node: Node, backlog_entries: int, backlog_entries_max: int) -> Values:
    """The clock and positions of ``node``, and how many events wait to be chained, of how many that may."""
    return {
        "hlc_ticks": node.clock.ticks,
        "hlc_clock_skew_rejections": node.clock.skew_rejections,
        "hlc_physical_offset_seconds": node.clock.offset_ms(node.wall.now_ms()) / 1000,
        "hlc_max_clock_skew_seconds": node.clock.max_clock_skew_ms / 1000,
        "hlc_wall_clock_ahead_seconds": node.wall.ahead_ms / 1000,
        "wal_durable_lsn": node.durable.lsn,
        "wal_chained_lsn": node.chained.lsn,
        "wal_backlog_entries": backlog_entries,
        "wal_backlog_entries_max": backlog_entries_max,
        "scheduler_damaged_tenants": {"chain": len(node.damaged), "signing": len(node.unsigned)},
        "wal_epoch": node.epoch,
    }


def member_values(shipper: Shipper, lag_threshold: int) -> Values:
    """How the members of this node's quorum follow; more than ``lag_threshold`` records is too far behind."""
    reports = shipper.reports()
    return {
        "wal_replication_sent_records": {each.address: each.sent_records for each in reports},
        "wal_replication_sent_bytes": {each.address: each.sent_bytes for each in reports},
        "wal_replication_damaged_frames": {each.address: each.damaged_frames for each in reports},
        "wal_replication_lag_lsn": {each.address: each.lag_lsn for each in reports},
        "wal_replication_lag_threshold_lsn": lag_threshold,
        "wal_quorum_following": shipper.proposer.in_sync(),
        "wal_quorum_needed": shipper.proposer.needed(),
        "wal_replicas_in_sync": sum(each.is_streaming for each in reports),
    }
