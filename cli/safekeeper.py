"""``tally safekeeper``: keep copies of the WALs of nodes, and show their state."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import re
import socket
import threading
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from http import HTTPStatus
from http.server import HTTPServer
from operator import attrgetter
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Final

import structlog
import typer
from prometheus_client import CollectorRegistry, Counter, MetricsHandler, disable_created_metrics
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.process_collector import ProcessCollector
from prometheus_client.registry import Collector

from app.runtime.logs import DRAIN_S, configure_logs
from app.runtime.settings.types import Bounds, duration_s, parse_duration
from ledger import rfc3339
from ledger.errors import ArchiveUnavailableError, ConfigurationError, StartRefusedError
from ledger.exit_code import ExitCode
from ledger.names import GATE
from ledger.text import secret_text
from terminal import stop_signals
from terminal.outcome import CommandExit, err, tell
from terminal.program import Json
from wal.replication import server
from wal.replication.archive import restore_log
from wal.replication.configuration import split_address
from wal.replication.frames import status_or_fault, unchained_in
from wal.replication.messages import StatusReport, WalStatus
from wal.replication.safekeeper import Safekeeper
from wal.replication.server import Server
from wal.replication.tls import PeerTls, TlsFiles

if TYPE_CHECKING:
    from app.store.chaining import WalPosition
    from objects.store import ArchiveStore

STATUS_TIMEOUT_S: Final = 5.0
SCRUB_INTERVALS: Final = Bounds("1s", "365d", parse_duration)
"""As ``wal.scrub_interval`` of a node."""

safekeeper = typer.Typer(no_args_is_help=True, help="Copies of the WALs of nodes, kept on other machines.")

TlsCert = Annotated[
    Path | None, typer.Option("--tls-cert", exists=True, dir_okay=False, help="Own certificate, in PEM.")
]
TlsKey = Annotated[Path | None, typer.Option("--tls-key", exists=True, dir_okay=False, help="Its key, in PEM.")]
TlsCa = Annotated[
    Path | None,
    typer.Option("--tls-ca", exists=True, dir_okay=False, help="The authority whose certificates peers show, in PEM."),
]
log = structlog.get_logger()

_IS_ALARMING = re.compile(r"reject|fail|refused|torn|damage").search


@safekeeper.command("serve")
def serve(
    folder: Annotated[Path, typer.Option("--dir", file_okay=False, help="Where the logs are kept.")],
    listen: Annotated[str, typer.Option("--listen", metavar="HOST:PORT", help="Where to listen.")],
    region: Annotated[str, typer.Option("--region", help="The region in which this safekeeper stands.")] = "local",
    archive: Annotated[
        str | None, typer.Option("--archive", metavar="URL", help="Where committed segments go: a folder, s3://, ...")
    ] = None,
    scrub_interval: Annotated[
        str, typer.Option("--scrub-interval", metavar="DURATION", help="Read all that is kept again in so long.")
    ] = "7d",
    metrics_listen: Annotated[
        str | None, typer.Option("--metrics-listen", metavar="HOST:PORT", help="Serve GET /metrics there, without TLS.")
    ] = None,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
) -> None:
    """Keep the WALs of nodes, until a signal that stops a process (docs/runbook.md, Stopping).

    A node may write the log that its certificate names (common name, or a DNS
    name among the alternative ones). Without certificates every node on this
    machine is believed, and only loopback is listened on.

    \b
    Examples:
      tally safekeeper serve --dir var/keeper-1 --listen 127.0.0.1:7101
      tally safekeeper serve --dir /srv/keeper --listen 0.0.0.0:7100 --region use1 \\
        --archive s3://wal-archive/use1 --metrics-listen 10.0.0.11:7011 \\
        --tls-cert keeper.pem --tls-key keeper.key --tls-ca ca.pem
    """
    if not re.fullmatch(GATE, region):
        raise ConfigurationError(f"--region {region!r} is not of lower case letters and digits")
    scrub_interval_s = duration_s("--scrub-interval", scrub_interval, SCRUB_INTERVALS)
    configure_logs()
    err.wait_max_s = DRAIN_S
    metrics = KeeperMetrics()
    tls = _tls(tls_cert, tls_key, tls_ca, server_side=True)
    listener = server.listen(*split_address(listen), is_secured=tls is not None)
    scrapes = None if metrics_listen is None else metrics.listen(*split_address(metrics_listen))
    keeper = Safekeeper(folder, region, metrics.tell, _store(archive), scrub_interval_s)
    with contextlib.closing(keeper):
        served = server.Server(keeper, listener, tls)
        stop_signals.take(lambda *_: served.stop())
        metrics.watch(keeper, served, scrub_interval_s)
        # Loaded modules are never freed: a collection need not walk over them while a log waits.
        gc.collect()
        gc.freeze()
        ready = {"address": _address_of(listener), "region": region, "dir": str(folder)}
        if scrapes is not None:
            threading.Thread(target=scrapes.serve_forever, name="metrics", daemon=True).start()
            ready["metrics"] = _address_of(scrapes.socket)
        metrics.tell("safekeeper_ready", ready)
        served.run()
    metrics.tell("safekeeper_stopped", {})


@safekeeper.command("restore")
def restore(
    archive: Annotated[str, typer.Option("--archive", metavar="URL", help="The archive of safekeepers.")],
    node: Annotated[str, typer.Option("--node", help="The node whose log is brought back.")],
    folder: Annotated[
        Path, typer.Option("--dir", file_okay=False, help="Where its WAL folder is made: a safekeeper's, or wal.dir.")
    ],
    wal_id: Annotated[str | None, typer.Option("--wal-id", help="Which of its logs, where there are several.")] = None,
    as_json: Json = False,
) -> None:
    """Restore a log from its archive when no safekeeper and no disk of the node has it any more.

    It ends with the last segment that was archived: the newest one never was.

    \b
    Examples:
      tally safekeeper restore --archive s3://wal-archive/use1 --node node-7f3a --dir /var/lib/tallystick/wal
    """
    from objects.store import ArchiveStore

    configure_logs()
    wal_id, first_lsn, tail = restore_log(ArchiveStore(archive), node, wal_id, folder / node)
    tell(
        {"node_id": node, "wal_id": wal_id, "first_lsn": first_lsn, "last_lsn": tail.lsn},
        f"the log {wal_id} of {node} is in {folder / node}: LSN {first_lsn} to {tail.lsn}",
        as_json=as_json,
    )


@safekeeper.command("status")
def show_status(
    addresses: Annotated[list[str], typer.Argument(metavar="HOST:PORT...", help="Safekeepers to ask.")],
    dsn: Annotated[
        str | None,
        typer.Option(
            "--dsn",
            envvar="TALLY_DATABASE_URL",
            show_envvar=True,
            metavar="URL",
            help="PostgreSQL of the ledger, to say what of each log is not chained.",
        ),
    ] = None,
    as_json: Json = False,
    tls_cert: TlsCert = None,
    tls_key: TlsKey = None,
    tls_ca: TlsCa = None,
) -> None:
    """Show how the logs kept by safekeepers stand. Exit code 1: one does not answer, or cannot open a log.

    With --dsn it also says which logs hold records above what PostgreSQL has
    chained: those of a node that is lost come to the chain by tally failover.

    \b
    Examples:
      tally safekeeper status 127.0.0.1:7101 127.0.0.1:7102 127.0.0.1:7103
      tally safekeeper status --json keeper-1:7100 --tls-cert node.pem --tls-key node.key --tls-ca ca.pem
    """
    tls = _tls(tls_cert, tls_key, tls_ca, server_side=False)
    dsn = None if dsn is None else secret_text(dsn, "--dsn")
    found: list[dict[str, Any]] = []
    positions, database_error = _positions(dsn) if dsn is not None else ({}, None)
    lines = [] if database_error is None else [f"PostgreSQL does not say what is chained: {database_error}"]
    for address in addresses:
        if isinstance(keeper := status_or_fault(address, tls, STATUS_TIMEOUT_S), str):
            found.append({"address": address, "region": None, "error": keeper, "wals": []})
            lines.append(f"{address}: {keeper}")
        else:
            found.append({"address": address, "error": None, **_json_of(keeper, positions)})
            lines.append(f"{address}: region {keeper.region}, {len(keeper.wals)} logs")
            lines += [_line_of(wal, _unchained(wal, positions)) for wal in keeper.wals]
    is_whole = all(each["error"] is None and "failed" not in (wal["state"] for wal in each["wals"]) for each in found)
    tell({"safekeepers": found, "database_error": database_error}, *lines, as_json=as_json)
    raise CommandExit(ExitCode.FINE if is_whole else ExitCode.COULD_NOT_RUN)


def _positions(dsn: str) -> tuple[dict[str, WalPosition], str | None]:
    """By node, the chained position of its log in PostgreSQL; or the error of reading it."""
    from app.runtime.postgres import DATABASE_FAULTS, text_of
    from app.store import node as node_store
    from app.store import sessions

    async def ask() -> dict[str, WalPosition]:
        connection = await sessions.connect_alone(dsn, timeout_s=STATUS_TIMEOUT_S)
        try:
            async with asyncio.timeout(STATUS_TIMEOUT_S):
                return await node_store.positions(connection)
        finally:
            connection.terminate()

    try:
        return asyncio.run(ask()), None
    except (ConfigurationError, StartRefusedError) as error:
        return {}, str(error)
    except DATABASE_FAULTS as error:
        return {}, text_of(error)


def _unchained(wal: WalStatus, positions: Mapping[str, WalPosition]) -> int | None:
    """How many of its records are not chained, None if unknown or the log cannot be read."""
    position = positions.get(wal.node_id)
    return (
        None if position is None or wal.state == "failed" else unchained_in(wal, position.wal_id, position.chained_lsn)
    )


def _json_of(keeper: StatusReport, positions: Mapping[str, WalPosition]) -> dict[str, Any]:
    return {
        "region": keeper.region,
        "wals": [
            {
                "node_id": wal.node_id,
                "wal_id": wal.wal_id,
                "member_id": wal.member_id,
                "state": wal.state,
                "detail": wal.detail,
                "promised_epoch": wal.promised_epoch,
                "first_lsn": wal.first_lsn,
                "last_epoch": wal.tail.epoch,
                "last_replicated_lsn": wal.tail.lsn,
                "last_durable_lsn": wal.durable_lsn,
                "committed_lsn": wal.committed_lsn,
                "unchained": _unchained(wal, positions),
                "settled_lsn": wal.settled_lsn,
                "archived_lsn": wal.archived_lsn,
                "archive_fault": wal.archive_fault or None,
                "scrubbed_at": rfc3339.text_of(wal.scrubbed_s * 1000) if wal.scrubbed_s else None,
                "disk_bytes": wal.disk_bytes,
                "configuration": {
                    "epoch": wal.configuration.epoch,
                    "generation": wal.configuration.generation,
                    "home": wal.configuration.home,
                    "copies": wal.configuration.copies,
                    "members": [member._asdict() for member in wal.configuration.members],
                },
            }
            for wal in keeper.wals
        ],
    }


def _line_of(wal: WalStatus, unchained: int | None) -> str:
    if wal.state == "failed":
        return f"  {wal.node_id}: failed: {wal.detail}"
    return (
        f"  {wal.node_id}: {wal.state}, member {wal.member_id[:8]}, follows epoch {wal.promised_epoch}, "
        f"LSN {wal.first_lsn} to {wal.tail.lsn}, durable {wal.durable_lsn}, committed {wal.committed_lsn}, "
        f"archived {wal.archived_lsn}, {len(wal.configuration.members)} members "
        f"(generation {wal.configuration.generation}), {wal.disk_bytes:,} bytes"
        + (
            f"; {unchained} records are not chained: if {wal.node_id} does not run, tally failover --node {wal.node_id}"
            if unchained
            else ""
        )
        + (f"; archiving fails: {wal.archive_fault}" if wal.archive_fault else "")
    )


def _address_of(listener: socket.socket) -> str:
    return ":".join(map(str, listener.getsockname()[:2]))


def _store(url: str | None) -> ArchiveStore | None:
    """The archive at ``url``, which may be away.

    Raises:
        ConfigurationError: no archive is possible at this URL.
    """
    if url is None:
        return None
    from objects.store import ArchiveStore

    store = ArchiveStore(url)
    # A member without its archive still votes: the archiver reports the fault, and retries.
    with contextlib.suppress(ArchiveUnavailableError):
        store.prepare()
    return store


def _tls(cert: Path | None, key: Path | None, ca: Path | None, *, server_side: bool) -> PeerTls | None:
    if cert is None and key is None and ca is None:
        return None
    if cert is None or key is None or ca is None:
        raise ConfigurationError("--tls-cert, --tls-key and --tls-ca go together: give all three, or none")
    return PeerTls(TlsFiles(cert, key, ca), server_side=server_side)


# --- metrics, on a listener of their own without TLS, one request at a time -------------------------

disable_created_metrics()  # type: ignore[no-untyped-call]

REQUEST_TIMEOUT_S = 2.0
"""A scraper that takes longer is disconnected, because other scrapers wait for it."""


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
"""Events used by alerts: an increase is visible only for a counter that existed before."""


class KeeperMetrics:
    """All metrics of one safekeeper, in a registry of their own."""

    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        ProcessCollector(registry=self.registry)
        self._events = Counter("safekeeper_events", "Events that were logged", ("event",), registry=self.registry)
        for event in COUNTED_FROM_0:
            self._events.labels(event)

    def tell(self, event: str, facts: Mapping[str, object]) -> None:
        """Log an event, and count it; the set of names is fixed by the code."""
        self._events.labels(event).inc()
        (log.warning if _IS_ALARMING(event) else log.info)(event, **facts)

    def watch(self, keeper: Safekeeper, server: Server, scrub_interval_s: float) -> None:
        """Report the state of its logs from now on."""
        self.registry.register(_KeeperCollector(keeper, server, scrub_interval_s))

    def listen(self, host: str, port: int) -> _ScrapeServer:
        """A server of scrapes that listens at the address, and answers once it is run.

        Raises:
            OSError: the address is not available.
        """
        handler = type("Scrape", (_Scrape,), {"registry": self.registry, "timeout": REQUEST_TIMEOUT_S})
        server = _ScrapeServer((host, port), handler, bind_and_activate=False)
        server.socket.close()
        server.socket = socket.create_server((host, port), family=socket.AF_INET6 if ":" in host else socket.AF_INET)
        return server


@dataclass(frozen=True)
class _KeeperCollector(Collector):
    keeper: Safekeeper
    server: Server
    scrub_interval_s: float

    def collect(self) -> Iterator[Metric]:
        keeper = self.keeper
        wals = list(keeper.statuses([kept for kept in keeper.logs.all() if kept.folder.is_dir()]))
        yield GaugeMetricFamily("safekeeper_logs", "Logs that are kept", len(wals))
        yield GaugeMetricFamily("safekeeper_connections", "Connections now", len(self.server.connections))
        failed = "Whether a log cannot be opened, or is damaged"
        yield _by_node("safekeeper_log_failed", failed, wals, lambda wal: wal.state == "failed")
        opened = [wal for wal in wals if wal.state == "open"]
        for name, what in (
            ("durable_lsn", "Last durable position of a log"),
            ("committed_lsn", "Last position of a log that is known to be committed"),
            ("archived_lsn", "Last position of a log that is in the archive, 0 without one"),
            ("promised_epoch", "Epoch of a log that is followed"),
            ("disk_bytes", "Bytes of a log on disk"),
        ):
            yield _by_node(f"safekeeper_log_{name}", what, opened, attrgetter(name))
        if keeper.archiver is not None:
            yield GaugeMetricFamily(
                "safekeeper_archive_failing",
                "Whether segments cannot be archived",
                bool(keeper.archiver.fault) or any(wal.archive_fault for wal in wals),
            )
        yield GaugeMetricFamily(
            "safekeeper_scrub_interval_seconds", "In so long all logs are read again", self.scrub_interval_s
        )
        yield _by_node(
            "safekeeper_scrub_round_end_seconds",
            "When all of a log had been read again, in seconds since 1970",
            [wal for wal in opened if wal.scrubbed_s],
            attrgetter("scrubbed_s"),
        )


def _by_node(name: str, what: str, wals: list[WalStatus], value_of: Callable[[WalStatus], float]) -> GaugeMetricFamily:
    family = GaugeMetricFamily(name, what, labels=["node"])
    for wal in wals:
        family.add_metric([wal.node_id], value_of(wal))
    return family


class _Scrape(MetricsHandler):
    def do_GET(self) -> None:  # noqa: N802
        if self.path.partition("?")[0] == "/metrics":
            super().do_GET()
        else:
            self.send_error(HTTPStatus.NOT_FOUND, explain="GET /metrics")


class _ScrapeServer(HTTPServer):
    def handle_error(self, *_: object) -> None:
        """Ignore a client that hung up, or took too long."""
