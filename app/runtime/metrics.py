"""What the node measures, for Prometheus. Never a tenant, a job or a key as a label: labels have few values.

Values that live elsewhere (the clock, the watermarks) are read when they are asked for, so keeping them costs
the write path nothing.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, disable_created_metrics
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.exposition import CONTENT_TYPE_LATEST, generate_latest
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from app.runtime.settings.config import QUOTAS
from app.runtime.state.node import Node
from ledger.facts.metrics import METRICS, Kind
from wal.replication.leading import Shipper

# A time of creation beside each counter and histogram, which nobody asked for.
disable_created_metrics()  # type: ignore[no-untyped-call]

CONTENT_TYPE = CONTENT_TYPE_LATEST
UNMATCHED_ROUTE = "unmatched"
METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})

STATS_DROPPED = ("sampled", "full", "busy", "disk")
"""Why stats reports are not kept: sampling, no room in the queue, no room or time to check them, a disk that fails."""


class Metrics:
    """All metrics of one process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.chain_entries = self._counter("scheduler_chain_entries")
        self.chain_verifications = self._counter("scheduler_chain_verifications")
        self.chain_verification_failures = self._counter("scheduler_chain_verification_failures")
        self._breaks_met = self._counter("scheduler_chain_breaks_met")
        self.batch_snapshots = self._counter("scheduler_batch_snapshots")
        self.imported_entries = self._counter("bundle_imported_entries")
        self.timestamps = self._counter("log_timestamps")
        self.timestamp_failures = self._counter("log_timestamp_failures")
        self.access_lines_dropped = self._counter("access_log_lines_dropped")
        self._quota_refusals = self._counter("quota_refusals")
        for name in QUOTAS:
            self._quota_refusals.labels(name)
        self.webhook_entries = self._counter("webhook_entries")
        self.webhook_failures = self._counter("webhook_failures")
        self.webhook_dead_letters = self._counter("webhook_dead_letters")
        self.watch_entries = self._counter("watch_entries_sent")
        self.watch_lagged = self._counter("watch_lagged")
        self.signing_failures = self._counter("scheduler_signing_failures")
        self.fencing_rejects = self._counter("wal_fencing_rejects")
        self.wal_append_seconds = self._histogram("wal_append_seconds")
        self.wal_sync_seconds = self._histogram("wal_sync_seconds")
        self.wal_batch_entries = self._histogram("wal_batch_entries")
        self.replication_ack_seconds = self._histogram("wal_replication_ack_latency_seconds")
        self.stats_reports = self._counter("stats_reports")
        self.stats_written_bytes = self._counter("stats_written_bytes")
        self.stats_write_failures = self._counter("stats_write_failures")
        self.stats_removed_files = self._counter("stats_removed_files")
        self.stats_removed_bytes = self._counter("stats_removed_bytes")
        self._stats_dropped = self._counter("stats_dropped")
        for reason in STATS_DROPPED:
            self._stats_dropped.labels(reason)
        self._requests = self._counter("http_requests")
        self._request_seconds = self._histogram("http_request_duration_seconds")
        self._request_children: dict[tuple[str, str, int], tuple[Counter, Histogram]] = {}

    def quota_refused(self, name: str) -> None:
        """Count something that was refused for the quota ``name``."""
        self._quota_refusals.labels(name).inc()

    def stats_dropped(self, reason: str, reports: int) -> None:
        """Count stats reports that were not kept; ``reason`` is one of ``STATS_DROPPED``."""
        assert reason in STATS_DROPPED
        if reports:
            self._stats_dropped.labels(reason).inc(reports)

    def stats_removed(self, file_bytes: int) -> None:
        """Count a stats file that was removed to make room."""
        self.stats_removed_files.inc()
        self.stats_removed_bytes.inc(file_bytes)

    def watch_peers(self, peers: Callable[[], Sequence[tuple[str, int, int, bool]]]) -> None:
        """Report the ledgers that are imported from: address, entries imported, entries lacking, whether it fails."""
        self.registry.register(_PeerCollector(peers))

    def watch_replicas(self, replicas: Callable[[], Sequence[tuple[str, bool]]]) -> None:
        """Report the hot standbys that reads may go to: name, whether it answers reads."""
        self.registry.register(_ReplicaCollector(replicas))

    def watch_members(self, shipper: Shipper, lag_threshold: int) -> None:
        """Report how the members of this node's quorum follow from now on; more than ``lag_threshold`` is too far."""
        self.registry.register(_MemberCollector(shipper, lag_threshold))

    def watch(self, node: Node, backlog_entries: Callable[[], int], backlog_entries_max: int) -> None:
        """Report the clock and positions of ``node`` from now on, and how many of so many events wait."""
        self._gauge("wal_backlog_entries_max").set(backlog_entries_max)
        self.registry.register(_NodeCollector(node, backlog_entries))

    def watch_scrub(self, interval_s: float, ended_s: Callable[[], float], damaged_segments: Callable[[], int]) -> None:
        """Report when the whole log was read again for the last time, and how much of it is damaged."""
        interval = self._gauge("wal_scrub_interval_seconds")
        interval.set(interval_s)
        ended = self._gauge("wal_scrub_round_end_seconds")
        ended.set_function(ended_s)
        damaged = self._gauge("wal_scrub_damaged_segments")
        damaged.set_function(damaged_segments)

    def watch_lease(self, is_reached: Callable[[], bool]) -> None:
        """Report whether the lease on this node's log can be made to last."""
        gauge = self._gauge("wal_lease_reached")
        gauge.set_function(is_reached)

    def watch_checks(self, checks: Mapping[str, Callable[[], str | None]]) -> None:
        """Report which checks of ``/readyz`` fail: each says what is wrong, None while nothing is."""
        failing = self._gauge("readyz_check_failing")
        for name, check in checks.items():
            failing.labels(name).set_function(partial(_is_failing, check))

    def watch_streams(self, open_streams: Callable[[], int]) -> None:
        """Report how many clients watch chains."""
        gauge = self._gauge("watch_streams")
        gauge.set_function(open_streams)

    def break_met(self, met_by: str) -> None:
        """A break was met by this part of the node, of which there are few."""
        self._breaks_met.labels(met_by).inc()

    def watch_breaks(self, open_breaks: Callable[[], int]) -> None:
        """Report how many breaks were found and are not both mended and acknowledged yet."""
        gauge = self._gauge("scheduler_chain_breaks")
        gauge.set_function(open_breaks)

    def watch_unsigned(self, interval_s: float, age_s: Callable[[], float]) -> None:
        """Report how long entries have waited for a snapshot, and after how long one is due."""
        interval = self._gauge("scheduler_batch_interval_seconds")
        interval.set(interval_s)
        age = self._gauge("scheduler_unsigned_age_seconds")
        age.set_function(age_s)

    def watch_webhooks(self, state: Callable[[], tuple[int, float]]) -> None:
        """Report how many webhooks this node delivers to, and for how long the one that fails longest has."""
        held = self._gauge("webhooks_held")
        held.set_function(lambda: state()[0])
        failing = self._gauge("webhook_failing_seconds")
        failing.set_function(lambda: state()[1])

    def observe_request(self, method: str, route: str, status: int, seconds: float) -> None:
        """Count one answered request. ``route`` is a template such as ``/v1/jobs/{job_id}``."""
        child = self._request_children.get((method, route, status))
        if child is None:
            known = method if method in METHODS else "other"
            child = (
                self._requests.labels(known, route, str(status)),
                self._request_seconds.labels(known, route),
            )
            if known == method:
                self._request_children[(method, route, status)] = child
        child[0].inc()
        child[1].observe(seconds)

    def render(self) -> bytes:
        """Everything in the text format of Prometheus."""
        return generate_latest(self.registry)

    def _counter(self, name: str) -> Counter:
        metric = METRICS[name]
        return Counter(name, metric.meaning, metric.labels, registry=self.registry)

    def _gauge(self, name: str) -> Gauge:
        metric = METRICS[name]
        return Gauge(name, metric.meaning, metric.labels, registry=self.registry)

    def _histogram(self, name: str) -> Histogram:
        metric = METRICS[name]
        return Histogram(name, metric.meaning, metric.labels, buckets=metric.buckets, registry=self.registry)


def _family(name: str, value: float | None = None) -> CounterMetricFamily | GaugeMetricFamily:
    """The declared metric with its value, or without one where each label gets its own."""
    metric = METRICS[name]
    family = CounterMetricFamily if metric.kind is Kind.COUNTER else GaugeMetricFamily
    return family(name, metric.meaning, value, metric.labels or None)


def _is_failing(check: Callable[[], str | None]) -> bool:
    return check() is not None


class _PeerCollector(Collector):
    def __init__(self, peers: Callable[[], Sequence[tuple[str, int, int, bool]]]) -> None:
        self._peers = peers

    def collect(self) -> Iterator[Metric]:
        imported = _family("exchange_imported_entries")
        lag = _family("exchange_lag_entries")
        failing = _family("exchange_failing")
        for url, entries, lacking, is_failing in self._peers():
            imported.add_metric([url], entries)
            lag.add_metric([url], lacking)
            failing.add_metric([url], is_failing)
        yield from (imported, lag, failing)


class _ReplicaCollector(Collector):
    def __init__(self, replicas: Callable[[], Sequence[tuple[str, bool]]]) -> None:
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        fit = _family("replica_fit")
        for name, is_fit in self._replicas():
            fit.add_metric([name], is_fit)
        yield fit


class _MemberCollector(Collector):
    def __init__(self, shipper: Shipper, lag_threshold: int) -> None:
        self._shipper = shipper
        self._lag_threshold = lag_threshold

    def collect(self) -> Iterator[Metric]:
        reports = self._shipper.reports()
        records = _family("wal_replication_sent_records")
        sent_bytes = _family("wal_replication_sent_bytes")
        damaged = _family("wal_replication_damaged_frames")
        lag = _family("wal_replication_lag_lsn")
        for report in reports:
            records.add_metric([report.address], report.sent_records)
            sent_bytes.add_metric([report.address], report.sent_bytes)
            damaged.add_metric([report.address], report.damaged_frames)
            lag.add_metric([report.address], report.lag_lsn)
        yield from (records, sent_bytes, damaged, lag)
        yield _family("wal_replication_lag_threshold_lsn", self._lag_threshold)
        proposer = self._shipper.proposer
        yield _family("wal_quorum_following", proposer.in_sync())
        yield _family("wal_quorum_needed", proposer.needed())
        in_sync = sum(report.is_streaming for report in reports)
        yield _family("wal_replicas_in_sync", in_sync)


class _NodeCollector(Collector):
    def __init__(self, node: Node, backlog_entries: Callable[[], int]) -> None:
        self._node = node
        self._backlog_entries = backlog_entries

    def collect(self) -> Iterator[Metric]:
        node = self._node
        offset_s = node.clock.offset_ms(node.wall.now_ms()) / 1000
        yield _family("hlc_ticks", node.clock.ticks)
        yield _family("hlc_clock_skew_rejections", node.clock.skew_rejections)
        yield _family("hlc_physical_offset_seconds", offset_s)
        yield _family("hlc_wall_clock_ahead_seconds", node.wall.ahead_ms / 1000)
        yield _family("wal_durable_lsn", node.durable.lsn)
        yield _family("wal_chained_lsn", node.chained.lsn)
        yield _family("wal_backlog_entries", self._backlog_entries())
        damaged = _family("scheduler_damaged_tenants")
        damaged.add_metric(["chain"], len(node.damaged))
        damaged.add_metric(["signing"], len(node.unsigned))
        yield damaged
        yield _family("wal_epoch", node.epoch)
