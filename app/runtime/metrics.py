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
from wal.replication.leading import Shipper

# A time of creation beside each counter and histogram, which nobody asked for.
disable_created_metrics()  # type: ignore[no-untyped-call]

CONTENT_TYPE = CONTENT_TYPE_LATEST
UNMATCHED_ROUTE = "unmatched"
METHODS = frozenset({"GET", "POST", "PUT", "PATCH", "DELETE", "HEAD", "OPTIONS"})

STATS_DROPPED = ("sampled", "full", "busy", "disk")
"""Why stats reports are not kept: sampling, no room in the queue, no room or time to check them, a disk that fails."""

_FAST_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_REQUEST_SECONDS = (*_FAST_SECONDS, 2.5, 5.0, 10.0)
_BATCH_ENTRIES = (1, 2, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000)


class Metrics:
    """All metrics of one process, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self.chain_entries = self._counter("scheduler_chain_entries", "Entries chained by this node")
        self.chain_verifications = self._counter("scheduler_chain_verifications", "Chain verifications run")
        self.chain_verification_failures = self._counter(
            "scheduler_chain_verification_failures", "Chain verifications that found something broken"
        )
        self._breaks_met = Counter(
            "scheduler_chain_breaks_met",
            "How often a break of stored rows was met, by the part of the node that met it",
            ("met_by",),
            registry=self.registry,
        )
        self.batch_snapshots = self._counter("scheduler_batch_snapshots", "Batch snapshots signed")
        self.imported_entries = self._counter("bundle_imported_entries", "Entries chained from imported bundles")
        self.timestamps = self._counter("log_timestamps", "Checkpoints that an outside authority stamped")
        self.timestamp_failures = self._counter(
            "log_timestamp_failures", "Time stamps that were asked for and not had; they are asked for again"
        )
        self.access_lines_dropped = self._counter(
            "access_log_lines_dropped", "Lines of the access log that the disk did not take, or not as fast"
        )
        self._quota_refusals = Counter(
            "quota_refusals", "What was refused for a quota, by its setting", ("quota",), registry=self.registry
        )
        for name in QUOTAS:
            self._quota_refusals.labels(name)
        self.webhook_entries = self._counter("webhook_entries", "Entries that receivers of webhooks confirmed")
        self.webhook_failures = self._counter("webhook_failures", "Attempts to deliver to a webhook that failed")
        self.webhook_dead_letters = self._counter(
            "webhook_dead_letters", "Entries that a receiver refused while it took others"
        )
        self.watch_entries = self._counter("watch_entries_sent", "Entries that were sent to those who watch chains")
        self.watch_lagged = self._counter("watch_lagged", "Watches that ended because their client fell behind")
        self.signing_failures = self._counter(
            "scheduler_signing_failures", "Times that the signer of snapshots failed, was refused or did not answer"
        )
        self.fencing_rejects = self._counter(
            "wal_fencing_rejects", "Times that another process took over the log of this node, over restarts"
        )
        self.wal_append_seconds = self._histogram(
            "wal_append_seconds",
            "From queueing a record until it is durable, of one record in flight at a time",
            _FAST_SECONDS,
        )
        self.wal_sync_seconds = self._histogram("wal_sync_seconds", "One fsync of the WAL", _FAST_SECONDS)
        self.wal_batch_entries = self._histogram("wal_batch_entries", "Records a batch", _BATCH_ENTRIES)
        self.replication_ack_seconds = self._histogram(
            "wal_replication_ack_latency_seconds",
            "From a batch's end in this node's log until a member has it durably, of one batch in flight a member",
            _REQUEST_SECONDS,
        )
        self.stats_reports = self._counter(
            "stats_reports", "Stats reports that were taken in: well formed, or left out unread"
        )
        self.stats_written_bytes = self._counter("stats_written_bytes", "Bytes of stats reports written")
        self.stats_write_failures = self._counter(
            "stats_write_failures", "Times that the folder of the stats could not be written"
        )
        self.stats_removed_files = self._counter("stats_removed_files", "Stats files removed to make room for newer")
        self.stats_removed_bytes = self._counter("stats_removed_bytes", "Bytes of the stats files that were removed")
        self._stats_dropped = Counter(
            "stats_dropped", "Stats reports that were not kept, by the reason", ("reason",), registry=self.registry
        )
        for reason in STATS_DROPPED:
            self._stats_dropped.labels(reason)
        self._requests = Counter(
            "http_requests",
            "Requests answered, by route template",
            ("method", "route", "status"),
            registry=self.registry,
        )
        self._request_seconds = Histogram(
            "http_request_duration_seconds",
            "From the whole head of the request until the answer was ready or handed to the socket",
            ("method", "route"),
            buckets=_REQUEST_SECONDS,
            registry=self.registry,
        )
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
        Gauge("wal_backlog_entries_max", "Events that may wait to be chained", registry=self.registry).set(
            backlog_entries_max
        )
        self.registry.register(_NodeCollector(node, backlog_entries))

    def watch_scrub(self, interval_s: float, ended_s: Callable[[], float], damaged_segments: Callable[[], int]) -> None:
        """Report when the whole log was read again for the last time, and how much of it is damaged."""
        interval = Gauge(
            "wal_scrub_interval_seconds", "In so long all of the log is read again", registry=self.registry
        )
        interval.set(interval_s)
        ended = Gauge(
            "wal_scrub_round_end_seconds",
            "When all of this node's log had been read again, in seconds since 1970",
            registry=self.registry,
        )
        ended.set_function(ended_s)
        damaged = Gauge(
            "wal_scrub_damaged_segments", "Segments of this node's log that are damaged at rest", registry=self.registry
        )
        damaged.set_function(damaged_segments)

    def watch_lease(self, is_reached: Callable[[], bool]) -> None:
        """Report whether the lease on this node's log can be made to last."""
        gauge = Gauge("wal_lease_reached", "Whether the lease on the log was renewed last time", registry=self.registry)
        gauge.set_function(is_reached)

    def watch_checks(self, checks: Mapping[str, Callable[[], str | None]]) -> None:
        """Report which checks of ``/readyz`` fail: each says what is wrong, None while nothing is."""
        failing = Gauge("readyz_check_failing", "Whether a check of /readyz fails", ("check",), registry=self.registry)
        for name, check in checks.items():
            failing.labels(name).set_function(partial(_is_failing, check))

    def watch_streams(self, open_streams: Callable[[], int]) -> None:
        """Report how many clients watch chains."""
        gauge = Gauge("watch_streams", "Clients that watch chains now", registry=self.registry)
        gauge.set_function(open_streams)

    def break_met(self, met_by: str) -> None:
        """A break was met by this part of the node, of which there are few."""
        self._breaks_met.labels(met_by).inc()

    def watch_breaks(self, open_breaks: Callable[[], int]) -> None:
        """Report how many breaks were found and are not both mended and acknowledged yet."""
        gauge = Gauge(
            "scheduler_chain_breaks", "Breaks found that are not mended, or not acknowledged", registry=self.registry
        )
        gauge.set_function(open_breaks)

    def watch_unsigned(self, interval_s: float, age_s: Callable[[], float]) -> None:
        """Report how long entries have waited for a snapshot, and after how long one is due."""
        interval = Gauge("scheduler_batch_interval_seconds", "A snapshot is due after so long", registry=self.registry)
        interval.set(interval_s)
        age = Gauge(
            "scheduler_unsigned_age_seconds",
            "How long the oldest entry without a snapshot has waited, 0 where snapshots are off",
            registry=self.registry,
        )
        age.set_function(age_s)

    def watch_webhooks(self, state: Callable[[], tuple[int, float]]) -> None:
        """Report how many webhooks this node delivers to, and for how long the one that fails longest has."""
        held = Gauge("webhooks_held", "Webhooks that this node delivers to", registry=self.registry)
        held.set_function(lambda: state()[0])
        failing = Gauge(
            "webhook_failing_seconds",
            "How long a webhook of this node has taken nothing, the one that fails longest",
            registry=self.registry,
        )
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

    def _counter(self, name: str, what: str) -> Counter:
        return Counter(name, what, registry=self.registry)

    def _histogram(self, name: str, what: str, buckets: tuple[float, ...]) -> Histogram:
        return Histogram(name, what, buckets=buckets, registry=self.registry)


def _is_failing(check: Callable[[], str | None]) -> bool:
    return check() is not None


class _PeerCollector(Collector):
    def __init__(self, peers: Callable[[], Sequence[tuple[str, int, int, bool]]]) -> None:
        self._peers = peers

    def collect(self) -> Iterator[Metric]:
        imported = CounterMetricFamily("exchange_imported_entries", "Entries of a peer imported", labels=["peer"])
        lag = GaugeMetricFamily("exchange_lag_entries", "Entries of a peer that are not imported", labels=["peer"])
        failing = GaugeMetricFamily("exchange_failing", "Whether a peer cannot be imported from", labels=["peer"])
        for url, entries, lacking, is_failing in self._peers():
            imported.add_metric([url], entries)
            lag.add_metric([url], lacking)
            failing.add_metric([url], is_failing)
        yield from (imported, lag, failing)


class _ReplicaCollector(Collector):
    def __init__(self, replicas: Callable[[], Sequence[tuple[str, bool]]]) -> None:
        self._replicas = replicas

    def collect(self) -> Iterator[Metric]:
        fit = GaugeMetricFamily("replica_fit", "Whether a hot standby answers reads", labels=["replica"])
        for name, is_fit in self._replicas():
            fit.add_metric([name], is_fit)
        yield fit


class _MemberCollector(Collector):
    def __init__(self, shipper: Shipper, lag_threshold: int) -> None:
        self._shipper = shipper
        self._lag_threshold = lag_threshold

    def collect(self) -> Iterator[Metric]:
        reports = self._shipper.reports()
        records = CounterMetricFamily("wal_replication_sent_records", "Records sent to a member", labels=["member"])
        sent_bytes = CounterMetricFamily("wal_replication_sent_bytes", "Bytes of them", labels=["member"])
        damaged = CounterMetricFamily(
            "wal_replication_damaged_frames", "Frames to or from a member that arrived damaged", labels=["member"]
        )
        lag = GaugeMetricFamily("wal_replication_lag_lsn", "Records that a member is behind", labels=["member"])
        for report in reports:
            records.add_metric([report.address], report.sent_records)
            sent_bytes.add_metric([report.address], report.sent_bytes)
            damaged.add_metric([report.address], report.damaged_frames)
            lag.add_metric([report.address], report.lag_lsn)
        yield from (records, sent_bytes, damaged, lag)
        yield GaugeMetricFamily(
            "wal_replication_lag_threshold_lsn", "Records that a member may be behind", self._lag_threshold
        )
        proposer = self._shipper.proposer
        yield GaugeMetricFamily("wal_quorum_following", "Members that vote, and follow", proposer.in_sync())
        yield GaugeMetricFamily(
            "wal_quorum_needed", "Members that vote of which so many must follow, 0 where none votes", proposer.needed()
        )
        in_sync = sum(report.is_streaming for report in reports)
        yield GaugeMetricFamily("wal_replicas_in_sync", "Members that can be spoken to, and follow", in_sync)


class _NodeCollector(Collector):
    def __init__(self, node: Node, backlog_entries: Callable[[], int]) -> None:
        self._node = node
        self._backlog_entries = backlog_entries

    def collect(self) -> Iterator[Metric]:
        node = self._node
        offset_s = node.clock.offset_ms(node.wall.now_ms()) / 1000
        yield CounterMetricFamily("hlc_ticks", "HLC ticks issued", node.clock.ticks)
        yield CounterMetricFamily(
            "hlc_clock_skew_rejections",
            "Remote times refused as too far ahead",
            node.clock.skew_rejections,
        )
        yield GaugeMetricFamily("hlc_physical_offset_seconds", "How far the HLC is ahead of the wall clock", offset_s)
        yield GaugeMetricFamily(
            "hlc_wall_clock_ahead_seconds",
            "How far the wall clock leapt ahead and is not adopted",
            node.wall.ahead_ms / 1000,
        )
        yield GaugeMetricFamily("wal_durable_lsn", "Last durable position", node.durable.lsn)
        yield GaugeMetricFamily("wal_chained_lsn", "Last chained position", node.chained.lsn)
        yield GaugeMetricFamily("wal_backlog_entries", "Events that wait to be chained", self._backlog_entries())
        damaged = GaugeMetricFamily(
            "scheduler_damaged_tenants", "Tenants whose chain is not extended, or not signed further", labels=["what"]
        )
        damaged.add_metric(["chain"], len(node.damaged))
        damaged.add_metric(["signing"], len(node.unsigned))
        yield damaged
        yield GaugeMetricFamily("wal_epoch", "Epoch of this writer", node.epoch)
