"""Every alert of ``deploy/prometheus/alerts.yml`` fires on its fault, on what is measured then, and on no healthy node.

Where the fault is one of the replication of a log, the parts are real and the fault is made. Elsewhere the instruments
are real, and are used as the service uses them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from contextlib import ExitStack, closing, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import yaml  # type: ignore[import-untyped]
from prometheus_client.exposition import generate_latest

from app.node.service import Service
from app.runtime.metrics import COUNTERS_READ, Metrics, Values, member_values, node_values
from app.runtime.state.node import Node
from cli.safekeeper import KeeperMetrics
from ledger.errors import ClockSkewError, FencedError
from ledger.facts.metrics import METRICS, Kind
from ledger.hlc import Clock, Hlc
from ledger.positions import Epoch
from objects.store import ArchiveStore
from tests.app.conftest import MakeSettings, RunNode
from tests.app.promql import Scrape, Vector, evaluate, scrape, seconds_of
from tests.waiting import until
from tests.wal.logs import NODE
from tests.wal.replication.keepers import Keeper, talking
from tests.wal.replication.test_shipping import Node as ReplicatedNode
from wal.segment import list_segments

ROOT = Path(__file__).parents[2]
GROUPS = {
    name: [
        rule
        for group in yaml.safe_load((ROOT / f"deploy/prometheus/{name}.yml").read_text())["groups"]
        for rule in group["rules"]
    ]
    for name in ("alerts", "rules")
}
ALERTS: dict[str, str] = {rule["alert"]: rule["expr"] for rule in GROUPS["alerts"]}
HELD_S: dict[str, int] = {rule["alert"]: seconds_of(rule.get("for", "0s")) for rule in GROUPS["alerts"]}
RECORDED: dict[str, str] = {rule["record"]: rule["expr"] for rule in GROUPS["rules"]}
BEGAN_S = 1_800_000_000.0
EVERY_S = 60.0
DAY_S = 86400.0


def firing(scrapes: list[Scrape]) -> set[str]:
    """The alerts whose expression holds now, and held at every scrape of as long before as it has to."""
    return {name for name in ALERTS if is_firing(name, scrapes)}


def is_firing(alert: str, scrapes: list[Scrape]) -> bool:
    held_since_s = scrapes[-1].time_s - HELD_S[alert]
    for count in range(len(scrapes), 0, -1):
        if scrapes[count - 1].time_s < held_since_s:
            break
        value = evaluate(ALERTS[alert], scrapes[:count], RECORDED)
        assert isinstance(value, dict)
        if not value:
            return False
    return True


def times(
    text: Callable[[], str],
    count: int,
    since: list[Scrape],
    act: Callable[[], object] = lambda: None,
    every_s: float = EVERY_S,
) -> list[Scrape]:
    """So many scrapes behind those ``since``, before each of which ``act`` is done."""
    scrapes = [*since]
    for _ in range(count):
        act()
        scrapes.append(scrape(scrapes[-1].time_s + every_s if scrapes else BEGAN_S, text()))
    return scrapes


# --- what the instruments of a node show ----------------------------------------------------------


@dataclass
class Measured:
    """The instruments of a node, wired as the service wires them, and what they read."""

    metrics: Metrics = field(default_factory=Metrics)
    node: Node = field(
        default_factory=lambda: Node("node-a", "local", "gate", "0" * 32, Epoch(1), Clock("node-a", 5000))
    )
    waiting: int = 0
    breaks: int = 0
    batch_interval_s: float = 10.0
    unsigned_age_s: float = 0.0
    lease_reached: bool = True
    scrub_ended_s: float = BEGAN_S
    webhook_failing_s: float = 0.0
    overbooked: int = 0
    archive_lag_s: float = 0.0
    lacking: int = 0
    is_peer_failing: bool = False
    faults: dict[str, str | None] = field(
        default_factory=lambda: dict.fromkeys(
            ("database", "chaining", "backlog", "quorum", "checkpoints", "clock", "breaks", "scrub", "signing")
        )
    )

    def __post_init__(self) -> None:
        metrics = self.metrics
        metrics.read(lambda: node_values(self.node, self.waiting, 1000))
        metrics.read(self.values)

    def values(self) -> Values:
        """What the parts of the node report."""
        peer = "http://peer"
        return {
            "scheduler_chain_breaks": self.breaks,
            "scheduler_batch_interval_seconds": self.batch_interval_s,
            "scheduler_unsigned_age_seconds": self.unsigned_age_s,
            "wal_lease_reached": self.lease_reached,
            "wal_scrub_interval_seconds": 7 * DAY_S,
            "wal_scrub_round_end_seconds": self.scrub_ended_s,
            "wal_scrub_damaged_segments": 0,
            "webhooks_held": 1,
            "commitment_nodes_overbooked": self.overbooked,
            "webhook_failing_seconds": self.webhook_failing_s,
            "archive_lag_seconds": self.archive_lag_s,
            "exchange_imported_entries": {peer: 5},
            "exchange_lag_entries": {peer: self.lacking},
            "exchange_failing": {peer: self.is_peer_failing},
            "readyz_check_failing": {name: fault is not None for name, fault in self.faults.items()},
        }

    def text(self) -> str:
        return self.metrics.render()[0].decode()

    def work(self) -> None:
        """What a healthy node does in a minute."""
        self.metrics.count("scheduler_chain_entries", 100)
        self.metrics.count("scheduler_batch_snapshots")
        self.metrics.count("log_timestamps")
        self.metrics.observe("wal_sync_seconds", 0.001)
        self.metrics.observe_request("POST", "/v1/jobs", 201, 0.01)
        self.node.chained.advance(self.node.chained.lsn + 100)


def _refuse_a_time(measured: Measured) -> None:
    with suppress(ClockSkewError):
        measured.node.clock.receive(Hlc(10**13, 0, "node-b"), 0)


def _sync_slowly(measured: Measured) -> None:
    for _ in range(10):
        measured.metrics.observe("wal_sync_seconds", 0.3)


def _changed(**values: Any) -> Callable[[Measured], None]:
    def change(measured: Measured) -> None:
        for name, value in values.items():
            setattr(measured, name, value)

    return change


def _fails(check: str) -> Callable[[Measured], None]:
    return lambda measured: measured.faults.update({check: "it is so"})


FAULTS: Mapping[str, Callable[[Measured], object]] = {
    "ChainBroken": lambda measured: measured.metrics.count("scheduler_chain_verification_failures"),
    "ChainBreakOpen": _changed(breaks=1),
    "NotReady": _fails("database"),
    "CheckFailing": _fails("scrub"),
    "ClockAhead": _fails("clock"),
    "ChainingStalled": _changed(waiting=1),
    "BacklogFilling": _changed(waiting=501),
    "ScrubOverdue": _changed(scrub_ended_s=BEGAN_S - 15 * DAY_S),
    "LeaseNotRenewed": _changed(lease_reached=False),
    "EpochChanges": lambda measured: setattr(measured.node, "epoch", measured.node.epoch + 1),
    "JobsInConflict": lambda measured: measured.metrics.count("job_conflicts"),
    "ArchiveLags": _changed(archive_lag_s=601.0),
    "ArchiveNotFilled": lambda measured: measured.metrics.count("archive_failures"),
    "RegionNotImported": _changed(is_peer_failing=True),
    "RegionLags": _changed(lacking=50_001),
    "WebhookNotDelivered": _changed(webhook_failing_s=901.0),
    "WebhookDeadLetters": lambda measured: measured.metrics.count("webhook_dead_letters"),
    "NodesOverbooked": _changed(overbooked=1),
    "RequestsFail": lambda measured: measured.metrics.observe_request("POST", "/v1/jobs", 503, 0.01),
    "SlowFsync": _sync_slowly,
    "SnapshotsMissing": _changed(unsigned_age_s=911.0),
    "TimestampsFailing": lambda measured: measured.metrics.count("log_timestamp_failures"),
    "StatsNotWritten": lambda measured: measured.metrics.count("stats_write_failures"),
    "SignerFails": lambda measured: measured.metrics.count("scheduler_signing_failures", 2),
    "HlcClockSkewExceeded": _refuse_a_time,
    "UnsignedGrowth": _fails("signing"),
}
IDLE = {"ChainingStalled", "TimestampsFailing"}
"""Alerts on what is not done: nothing else is done beside their fault."""
OF_JOBS = {"NodeDown": "tallystick", "SafekeeperDown": "tallystick-safekeeper"}
OF_FENCING = "NodeFenced"
OF_A_QUORUM = {"FramesDamaged", "QuorumAtRisk", "ReplicaLags", "QuorumLost"}
"""Alerts that fire in the test of a quorum."""
OF_A_SAFEKEEPER = {"SafekeeperRefusesPeers", "SafekeeperScrubOverdue", "ArchiveFailing", "SafekeeperLogFailed"}
"""Alerts that fire in the test of a safekeeper."""


def test_no_alert_fires_at_a_healthy_node() -> None:
    measured = Measured()
    assert firing(times(measured.text, 16, [], measured.work)) == set()


@pytest.mark.parametrize("alert", FAULTS)
def test_an_alert_fires_on_its_fault_and_not_before(alert: str) -> None:
    measured = Measured()
    scrapes = times(measured.text, 16, [], measured.work)
    assert not is_firing(alert, scrapes)

    def fail() -> None:
        if alert not in IDLE:
            measured.work()
        FAULTS[alert](measured)

    # So long that what was done before is in no window any more, and the fault has lasted as long as it has to.
    every_s = 1500.0 if alert == "TimestampsFailing" or HELD_S[alert] > 15 * EVERY_S else EVERY_S
    scrapes = times(measured.text, 16, scrapes, fail, every_s)
    assert is_firing(alert, scrapes)


def test_snapshots_that_are_due_after_an_hour_are_not_missed_before() -> None:
    measured = Measured(batch_interval_s=3600.0, unsigned_age_s=3600.0)
    scrapes = times(measured.text, 1, [])
    assert firing(scrapes) == set()
    measured.unsigned_age_s = 4501.0
    assert firing(times(measured.text, 1, scrapes)) == {"SnapshotsMissing"}


@pytest.mark.parametrize(("ahead_ms", "is_exceeded"), [(4000, False), (7000, True)])
def test_a_ledger_ahead_of_the_wall_clock_exceeds_the_clock_skew_beyond_the_tolerance(
    ahead_ms: int, is_exceeded: bool
) -> None:
    measured = Measured()
    measured.node.clock.observe(Hlc(measured.node.wall.now_ms() + ahead_ms, 0, "node-a"))
    assert is_firing("HlcClockSkewExceeded", times(measured.text, 1, [])) is is_exceeded


@pytest.mark.parametrize("alert", OF_JOBS)
def test_a_node_that_does_not_answer_is_missed(alert: str) -> None:
    measured = Measured()
    scrapes = times(measured.text, 2, [], measured.work)
    gone = [scrape(BEGAN_S + number * EVERY_S, "", job=OF_JOBS[alert], up=0) for number in (2, 3)]
    assert not is_firing(alert, [*scrapes, *gone[:1]])
    assert is_firing(alert, [*scrapes, *gone])


def test_the_jobs_that_alerts_name_are_scraped() -> None:
    named = {job for expression in ALERTS.values() for job in re.findall(r'job="([^"]+)"', expression)}
    scraped = yaml.safe_load((ROOT / "deploy/prometheus/replicated.yml").read_text())["scrape_configs"]
    assert {each["job_name"] for each in scraped} == named


async def test_a_node_that_was_fenced_says_so_once_it_is_started_again(
    make_settings: MakeSettings, run_node: RunNode
) -> None:
    def text_of(service: Service) -> str:
        return service.metrics.render()[0].decode()

    async with run_node(make_settings()) as service:
        scrapes = times(lambda: text_of(service), 8, [])
        assert not is_firing(OF_FENCING, scrapes)
        service.lifecycle.fail(FencedError("another process writes this log"))
        # The process ends now: nobody scrapes it any more.
    async with run_node(make_settings()) as service:
        assert is_firing(OF_FENCING, times(lambda: text_of(service), 1, scrapes))
        # As a standby that waits for its lease it is not scraped for long.
        scrapes = times(lambda: text_of(service), 1, scrapes, every_s=15 * EVERY_S)
        assert is_firing(OF_FENCING, scrapes)
        assert not is_firing(OF_FENCING, times(lambda: text_of(service), 6, scrapes))


def test_each_counter_and_histogram_that_is_declared_is_kept_or_read_and_no_other() -> None:
    source = "".join(path.read_text() for path in (ROOT / "app").rglob("*.py"))
    kept = set(re.findall(r'(?:\.count\(|\.count, |\.observe\(|\.observe, )\s*"(\w+)"', source))
    of_requests = {"http_requests", "http_request_duration_seconds"}
    declared = {name for name, metric in METRICS.items() if metric.kind is not Kind.GAUGE}
    assert kept | of_requests | COUNTERS_READ == declared


# --- what replication shows -----------------------------------------------------------------------


@pytest.fixture
def replicated(tmp_path: Path) -> Any:
    with ExitStack() as stack:
        yield ReplicatedNode(tmp_path, stack, is_proxied=True)


def test_alerts_on_the_quorum_of_a_log_fire_when_members_go(replicated: ReplicatedNode) -> None:
    node, metrics = replicated, Metrics()
    metrics.read(lambda: member_values(node.shipper, 10))
    writer = node.start()
    node.commit(writer)
    until(lambda: node.is_held_by_all(1), "all follow")

    def now(number: int) -> Scrape:
        return scrape(BEGAN_S + EVERY_S * number, metrics.render()[0].decode())

    scrapes = [now(0)]
    assert firing(scrapes) == set()
    node.proxies[0].flips_left = 1
    node.commit(writer, 1, payload_bytes=1000)
    until(lambda: node.is_held_by_all(2), "it is sent again")
    scrapes.append(now(1))
    assert firing(scrapes) == {"FramesDamaged"}

    node.keepers[0].close()
    until(lambda: node.shipper.proposer.in_sync() == 2, "a member is gone")
    node.commit(writer, 30)
    assert firing([now(80)]) == {"QuorumAtRisk", "ReplicaLags"}
    node.keepers[1].close()
    until(lambda: node.shipper.proposer.in_sync() == 1, "two members are gone")
    assert firing([now(81)]) == OF_A_QUORUM - {"FramesDamaged"}
    for keeper in node.keepers[:2]:
        keeper.close = lambda: None  # type: ignore[method-assign]  # it is closed
    node.end(writer)


def test_alerts_on_a_safekeeper_fire_when_its_log_its_archive_or_a_peer_fail(tmp_path: Path) -> None:
    archive = tmp_path / "archive"
    metrics = KeeperMetrics()
    with closing(Keeper(tmp_path / "keeper", archive=ArchiveStore(str(archive)))) as keeper:
        keeper.scrub_by_hand()
        metrics.watch(keeper.safekeeper, keeper._server, 7 * DAY_S)
        with talking(keeper.port) as peer:
            peer.elect(1)
            peer.append(4)
        kept = keeper.safekeeper
        kept.scrubber.step(BEGAN_S)

        def now(number: float) -> Scrape:
            text = generate_latest(metrics.registry).decode()
            return scrape(BEGAN_S + EVERY_S * number, text, "keeper", "tallystick-safekeeper")

        scrapes = [now(0)]
        assert firing(scrapes) == set()
        metrics.tell("safekeeper_peer_refused", {})
        assert firing([*scrapes, now(1)]) == {"SafekeeperRefusesPeers"}
        assert firing([now(15 * DAY_S / EVERY_S)]) == {"SafekeeperScrubOverdue"}
        assert kept.archiver is not None
        kept.archiver.fault = "no such bucket"
        assert firing([now(30)]) == {"ArchiveFailing"}
        kept.archiver.fault = ""
        (segment,) = list_segments(keeper.folder / NODE)
        data = bytearray(segment.path.read_bytes())
        data[len(data.rstrip(b"\0")) - 3] ^= 1
        segment.path.write_bytes(data)
        for part in range(1, 9):
            kept.scrubber.step(BEGAN_S + part * 7 * DAY_S / 4)
        assert firing([now(31)]) == {"SafekeeperLogFailed"}


def test_no_alert_is_left_out() -> None:
    assert ALERTS.keys() == FAULTS.keys() | OF_JOBS.keys() | {OF_FENCING} | OF_A_QUORUM | OF_A_SAFEKEEPER


def test_a_wrong_name_or_label_or_bound_is_seen() -> None:
    scrapes = times(Measured().text, 2, [])
    for expression in (
        "wal_backlog_entries_of_all >= 0",
        'readyz_check_failing{check="data_base"} >= 0',
        "wal_backlog_entries >= on (instance) group_left () wal_replication_lag_threshold_lsn",
    ):
        assert evaluate(expression, scrapes) == {}
    found = evaluate('readyz_check_failing{check=~"data.*"} >= 0', scrapes)
    assert isinstance(found, dict)
    assert len(_without_target(found)) == 1


def _without_target(found: Vector) -> set[tuple[str, str]]:
    return {pair for labels in found for pair in labels if pair[0] not in ("instance", "job")}
