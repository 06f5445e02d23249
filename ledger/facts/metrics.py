"""The metrics of a node, by their names for Prometheus.

To add one, declare it here, set it where its value is (``metrics.count``, ``observe``) or read it in a function of
values (``node_values`` in ``app/runtime/metrics.py``), and generate the files that follow (``make facts``). Labels have
few values: never a tenant, a job or a key.
"""

from collections.abc import Mapping
from enum import Enum
from typing import Final, NamedTuple

_FAST_SECONDS = (0.0001, 0.00025, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0)
_REQUEST_SECONDS = (*_FAST_SECONDS, 2.5, 5.0, 10.0)
_BATCH_ENTRIES = (1, 2, 5, 10, 25, 50, 100, 250, 500, 1000, 2500, 5000, 10_000)


class Kind(Enum):
    """Kinds of metric."""

    COUNTER = "counter"
    GAUGE = "gauge"
    HISTOGRAM = "histogram"


class Metric(NamedTuple):
    """One metric."""

    name: str
    """Without the suffix ``_total`` that a counter is served with."""
    kind: Kind
    meaning: str
    labels: tuple[str, ...] = ()
    buckets: tuple[float, ...] = ()
    """Upper bounds of the buckets of a histogram."""


METRICS: Final[Mapping[str, Metric]] = {
    metric.name: metric
    for metric in (
        Metric("scheduler_chain_entries", Kind.COUNTER, "Entries chained by this node"),
        Metric("scheduler_chain_verifications", Kind.COUNTER, "Chain verifications run"),
        Metric(
            "scheduler_chain_verification_failures", Kind.COUNTER, "Chain verifications that found something broken"
        ),
        Metric(
            "scheduler_chain_breaks_met",
            Kind.COUNTER,
            "How often a break of stored rows was met, by the part of the node that met it",
            labels=("met_by",),
        ),
        Metric("scheduler_batch_snapshots", Kind.COUNTER, "Batch snapshots made"),
        Metric("bundle_imported_entries", Kind.COUNTER, "Entries chained from imported bundles"),
        Metric("log_timestamps", Kind.COUNTER, "Checkpoints that an outside authority stamped"),
        Metric(
            "log_timestamp_failures",
            Kind.COUNTER,
            "Time stamps that were asked for and not had; they are asked for again",
        ),
        Metric(
            "log_cosignatures", Kind.COUNTER, "Checkpoints that a witness cosigned when pushed", labels=("witness",)
        ),
        Metric(
            "log_cosignature_failures",
            Kind.COUNTER,
            "Pushes of a checkpoint that a witness refused, or did not answer as it must; they are repeated",
            labels=("witness",),
        ),
        Metric(
            "log_witness_waiting",
            Kind.GAUGE,
            "Tenants whose newest checkpoint waits to be pushed to a witness",
            labels=("witness",),
        ),
        Metric(
            "access_log_lines_dropped",
            Kind.COUNTER,
            "Lines of the access log that the disk did not take, or not as fast",
        ),
        Metric("quota_refusals", Kind.COUNTER, "What was refused for a quota, by its setting", labels=("quota",)),
        Metric("webhook_entries", Kind.COUNTER, "Entries that receivers of webhooks confirmed"),
        Metric("webhook_failures", Kind.COUNTER, "Attempts to deliver to a webhook that failed"),
        Metric("webhook_dead_letters", Kind.COUNTER, "Entries that a receiver refused while it took others"),
        Metric("watch_entries_sent", Kind.COUNTER, "Entries that were sent to those who watch chains"),
        Metric("watch_lagged", Kind.COUNTER, "Watches that ended because their client fell behind"),
        Metric(
            "scheduler_signing_failures",
            Kind.COUNTER,
            "Times that the signer of snapshots failed, was refused or did not answer",
        ),
        Metric(
            "wal_fencing_rejects",
            Kind.COUNTER,
            "Times that another process took over the log of this node, over restarts",
        ),
        Metric(
            "wal_append_seconds",
            Kind.HISTOGRAM,
            "From queueing a record until it is durable, of one record in flight at a time",
            buckets=_FAST_SECONDS,
        ),
        Metric("wal_sync_seconds", Kind.HISTOGRAM, "One fsync of the WAL", buckets=_FAST_SECONDS),
        Metric("wal_batch_entries", Kind.HISTOGRAM, "Records per batch", buckets=_BATCH_ENTRIES),
        Metric(
            "wal_replication_ack_latency_seconds",
            Kind.HISTOGRAM,
            "From a batch's end in this node's log until a member has it durably, of one batch in flight per member",
            buckets=_REQUEST_SECONDS,
        ),
        Metric("stats_reports", Kind.COUNTER, "Stats reports that were taken in: well formed, or left out unread"),
        Metric("stats_written_bytes", Kind.COUNTER, "Bytes of stats reports written"),
        Metric("stats_write_failures", Kind.COUNTER, "Times that the folder of the stats could not be written"),
        Metric("stats_removed_files", Kind.COUNTER, "Stats files removed to make room for newer"),
        Metric("stats_removed_bytes", Kind.COUNTER, "Bytes of the stats files that were removed"),
        Metric("stats_dropped", Kind.COUNTER, "Stats reports that were not kept, by the reason", labels=("reason",)),
        Metric(
            "http_requests", Kind.COUNTER, "Requests answered, by route template", labels=("method", "route", "status")
        ),
        Metric(
            "http_request_duration_seconds",
            Kind.HISTOGRAM,
            "From the whole head of the request until the answer was ready or handed to the socket",
            labels=("method", "route"),
            buckets=_REQUEST_SECONDS,
        ),
        Metric("wal_backlog_entries_max", Kind.GAUGE, "Events that may wait to be chained"),
        Metric("wal_scrub_interval_seconds", Kind.GAUGE, "Time within which all of the log is read again"),
        Metric(
            "wal_scrub_round_end_seconds",
            Kind.GAUGE,
            "When all of this node's log had been read again, in seconds since 1970",
        ),
        Metric("wal_scrub_damaged_segments", Kind.GAUGE, "Segments of this node's log that are damaged at rest"),
        Metric("wal_lease_reached", Kind.GAUGE, "Whether the lease on the log was renewed last time"),
        Metric("wal_lease_held", Kind.GAUGE, "Whether the lease is certain to last; LOCAL waits for a quorum if not"),
        Metric("readyz_check_failing", Kind.GAUGE, "Whether a check of /readyz fails", labels=("check",)),
        Metric("watch_streams", Kind.GAUGE, "Clients that watch chains now"),
        Metric("scheduler_chain_breaks", Kind.GAUGE, "Breaks found that are not mended, or not acknowledged"),
        Metric("scheduler_batch_interval_seconds", Kind.GAUGE, "Longest time that an entry waits for a snapshot"),
        Metric(
            "scheduler_unsigned_age_seconds",
            Kind.GAUGE,
            "How long the oldest entry without a snapshot has waited",
        ),
        Metric("commitment_nodes_overbooked", Kind.GAUGE, "Nodes of which more is reserved than their limit"),
        Metric("webhooks_held", Kind.GAUGE, "Webhooks that this node delivers to"),
        Metric(
            "webhook_failing_seconds",
            Kind.GAUGE,
            "How long a webhook of this node has taken nothing, the one that fails longest",
        ),
        Metric("job_conflicts", Kind.COUNTER, "Jobs that entries brought into conflict, such as a second creation"),
        Metric("archive_has_turn", Kind.GAUGE, "Whether this node is the one that fills the archive"),
        Metric("archive_lag_entries", Kind.GAUGE, "Signed entries that are not archived, at the node that archives"),
        Metric(
            "archive_lag_seconds",
            Kind.GAUGE,
            "How long the oldest signed entry waits that is not archived, at the node that archives; or how long a "
            "step is overdue, if that is longer",
        ),
        Metric("archive_failures", Kind.COUNTER, "Errors of steps of the archive: of the place, or of a tenant"),
        Metric("exchange_imported_entries", Kind.COUNTER, "Entries of a peer imported", labels=("peer",)),
        Metric("exchange_lag_entries", Kind.GAUGE, "Entries of a peer that are not imported", labels=("peer",)),
        Metric("exchange_failing", Kind.GAUGE, "Whether a peer cannot be imported from", labels=("peer",)),
        Metric(
            "exchange_keys_waited_for",
            Kind.GAUGE,
            "Keys that a peer or this ledger signs with and that the other does not trust yet",
            labels=("peer",),
        ),
        Metric("replica_fit", Kind.GAUGE, "Whether a hot standby answers reads", labels=("replica",)),
        Metric("wal_replication_sent_records", Kind.COUNTER, "Records sent to a member", labels=("member",)),
        Metric("wal_replication_sent_bytes", Kind.COUNTER, "Bytes of them", labels=("member",)),
        Metric(
            "wal_replication_damaged_frames",
            Kind.COUNTER,
            "Frames to or from a member that arrived damaged",
            labels=("member",),
        ),
        Metric("wal_replication_lag_lsn", Kind.GAUGE, "Records that a member is behind", labels=("member",)),
        Metric("wal_replication_lag_threshold_lsn", Kind.GAUGE, "Records that a member may be behind"),
        Metric("wal_quorum_following", Kind.GAUGE, "Members that vote, and follow"),
        Metric("wal_quorum_needed", Kind.GAUGE, "Members that vote of which so many must follow, 0 where none votes"),
        Metric("wal_replicas_in_sync", Kind.GAUGE, "Members that can be spoken to, and follow"),
        Metric("hlc_ticks", Kind.COUNTER, "HLC ticks issued"),
        Metric("hlc_clock_skew_rejections", Kind.COUNTER, "Remote times refused as too far ahead"),
        Metric("hlc_physical_offset_seconds", Kind.GAUGE, "How far the HLC is ahead of the wall clock"),
        Metric("hlc_max_clock_skew_seconds", Kind.GAUGE, "How far ahead a time may be: hlc.max_clock_skew"),
        Metric("hlc_wall_clock_ahead_seconds", Kind.GAUGE, "How far the wall clock leapt ahead and is not adopted"),
        Metric("wal_durable_lsn", Kind.GAUGE, "Last durable position"),
        Metric("wal_chained_lsn", Kind.GAUGE, "Last chained position"),
        Metric("wal_backlog_entries", Kind.GAUGE, "Events that wait to be chained"),
        Metric(
            "scheduler_damaged_tenants",
            Kind.GAUGE,
            "Tenants whose chain is not extended, or not signed further",
            labels=("what",),
        ),
        Metric("wal_epoch", Kind.GAUGE, "Epoch of this writer"),
    )
}
"""Every metric by name."""
