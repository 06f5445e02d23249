"""``tally safekeeper`` as a process: killed, stopped, out of room; what it acknowledged is there."""

from __future__ import annotations

import json
import resource
import signal
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, closing
from itertools import count
from pathlib import Path

import httpx
import pytest
from cryptography.x509 import DNSName

from ledger.errors import LedgerError
from ledger.positions import Epoch, Lsn
from tests.app.certificates import Authority, Pair
from tests.tally import run_tally
from tests.waiting import until
from tests.wal.logs import NODE, WAL_ID
from tests.wal.replication.keepers import WAIT_S, KeeperProcess, talking
from wal.control import EpochStart
from wal.inspect import verify
from wal.replication.kept_logs import NOTE_NAME, CommitNote
from wal.replication.messages import Ack, Elected, Greeting, Refusal
from wal.replication.tls import PeerTls, TlsFiles

Start = Callable[..., KeeperProcess]


@pytest.fixture
def start() -> Iterator[Start]:
    with ExitStack() as held:
        yield lambda *given, **more: held.enter_context(closing(KeeperProcess(*given, **more)))


def scraped(keeper: KeeperProcess) -> dict[str, float]:
    """The metrics of a safekeeper, by name and labels."""
    address = keeper.events_of("safekeeper_ready")[0]["metrics"]
    answer = httpx.get(f"http://{address}/metrics", timeout=WAIT_S)
    assert (answer.status_code, answer.headers["content-type"][:10]) == (200, "text/plain")
    lines = (line.rpartition(" ") for line in answer.text.splitlines() if not line.startswith("#"))
    return {name: float(value) for name, _, value in lines}


def test_without_its_archive_a_safekeeper_votes_and_says_so(tmp_path: Path, start: Start) -> None:
    archive = tmp_path / "archive"
    archive.write_text("no folder")
    given = ("--archive", archive, "--metrics-listen", "127.0.0.1:0", "--scrub-interval", "1s")
    keeper = start(tmp_path / "keeper", *given)
    with talking(keeper.port) as peer:
        peer.elect(1)
        peer.append(3)
        assert isinstance(peer.tell(3), Ack)
    until(lambda: keeper.events_of("wal_archive_failed"), "the log says so")
    assert keeper.events_of("wal_archive_failed")[0]["level"] == "warning"
    address = keeper.events_of("safekeeper_ready")[0]["metrics"]
    assert httpx.get(f"http://{address}/other", timeout=WAIT_S).status_code == 404
    found = scraped(keeper)
    assert found["safekeeper_archive_failing"] == 1
    assert found[f'safekeeper_log_durable_lsn{{node="{NODE}"}}'] == 3
    assert found[f'safekeeper_log_failed{{node="{NODE}"}}'] == 0
    assert found["safekeeper_scrub_interval_seconds"] == 1
    assert found['safekeeper_events_total{event="wal_archive_failed"}'] >= 1
    shown = run_tally("safekeeper", "status", "--json", f"127.0.0.1:{keeper.port}")
    assert str(archive) in json.loads(shown.stdout)["safekeepers"][0]["wals"][0]["archive_fault"]
    until(lambda: any("scrub_round_end" in name for name in scraped(keeper)), "all was read again")
    archive.unlink()
    until(lambda: scraped(keeper)["safekeeper_archive_failing"] == 0, "it is back")
    assert keeper.stop() == 0


def test_what_was_acknowledged_is_there_after_a_kill_at_any_time(tmp_path: Path, start: Start) -> None:
    acknowledged = 0
    for life in range(1, 7):
        keeper = start(tmp_path)
        with talking(keeper.port, life) as peer:
            assert peer.elect(life).lsn >= acknowledged
            acknowledged = peer.append()
            killing = threading.Timer(0.02 * life, keeper.kill)
            killing.start()
            try:
                while True:
                    for _ in range(5):
                        peer.send(7, payload_bytes=300)
                    answer = peer.heard().message
                    assert isinstance(answer, Ack)
                    acknowledged = answer.durable_lsn
            except (LedgerError, OSError):
                killing.join()
    (report,) = verify(tmp_path / NODE)
    assert report.verdict in ("ok", "torn")
    assert report.last_lsn >= acknowledged > 0


def test_a_kill_between_truncations_leaves_a_sound_log_with_all_that_is_committed(tmp_path: Path, start: Start) -> None:
    epoch = committed_lsn = told_lsn = 0
    for life in range(1, 7):
        keeper = start(tmp_path)
        killing = threading.Timer(0.03 * life, keeper.kill)
        try:
            for round_ in count():
                epoch += 1
                with talking(keeper.port, epoch) as peer:
                    held = peer.elect(epoch, from_lsn=told_lsn + 3 if told_lsn else None)
                    assert held.lsn >= committed_lsn
                    for _ in range(3):
                        lsn = peer.append(4)
                    told_lsn = lsn - 6
                    peer.tell(told_lsn)
                    committed_lsn = told_lsn
                    if round_ == 1:
                        killing.start()
        except (LedgerError, OSError):
            killing.join()
    (report,) = verify(tmp_path / NODE)
    assert report.verdict in ("ok", "torn")
    assert report.last_lsn >= committed_lsn > 50
    assert len(list((tmp_path / NODE).glob("cut-*"))) > 6


def test_what_was_told_to_be_committed_is_known_after_a_kill_and_never_cut(tmp_path: Path, start: Start) -> None:
    keeper = start(tmp_path)
    with talking(keeper.port) as peer:
        peer.elect(1)
        peer.append(8)
        assert isinstance(peer.tell(8), Ack)
    keeper.kill()
    keeper = start(tmp_path)
    with talking(keeper.port, 2) as peer:
        greeting = peer.greet()
        assert isinstance(greeting, Greeting)
        assert greeting.committed_lsn == 8
        peer.prepare(2)
        history = (EpochStart(Epoch(1), Lsn(1)), EpochStart(Epoch(2), Lsn(7)))
        refusal = peer.refused(Elected(Epoch(2), Lsn(1), history))
        assert (refusal.reason, "LSN 8 is committed here" in refusal.detail) == ("committed", True)


@pytest.mark.parametrize("spoilt", [b"", b"\0" * 28, b"x" * 100])
def test_a_note_that_is_damaged_says_nothing(tmp_path: Path, spoilt: bytes) -> None:
    with closing(CommitNote(tmp_path, WAL_ID)) as note:
        note.write(Lsn(7))
    with closing(CommitNote(tmp_path, WAL_ID)) as note:
        assert note.lsn == 7
    with closing(CommitNote(tmp_path, "ab" * 16)) as other:
        assert other.lsn == 0
    (tmp_path / NOTE_NAME).write_bytes(spoilt)
    with closing(CommitNote(tmp_path, WAL_ID)) as note:
        assert note.lsn == 0


STOPPED_BY = pytest.mark.parametrize(
    "number", [signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT], ids=lambda each: each.name
)


@STOPPED_BY
def test_a_signal_stops_it_in_order_while_a_node_writes(tmp_path: Path, start: Start, number: signal.Signals) -> None:
    keeper = start(tmp_path)
    with talking(keeper.port) as peer, talking(keeper.port, 2) as silent:
        silent.greet()
        peer.elect(1)
        acknowledged = peer.append()
        stopping = threading.Timer(0.2, keeper.process.send_signal, (number,))
        stopping.start()
        try:
            while True:
                acknowledged = peer.append(3)
        except (LedgerError, OSError):
            pass
        assert keeper.process.wait(WAIT_S) == 0
    assert keeper.stop() == 0
    assert keeper.events_of("safekeeper_stopped")
    (report,) = verify(tmp_path / NODE)
    assert report.verdict == "ok"
    assert report.last_lsn >= acknowledged > 0


def test_no_room_is_said_nothing_is_acknowledged_and_it_goes_on_once_there_is(tmp_path: Path, start: Start) -> None:
    keeper = start(tmp_path)
    resource.prlimit(keeper.process.pid, resource.RLIMIT_FSIZE, (1 << 20, resource.RLIM_INFINITY))
    with talking(keeper.port) as peer, talking(keeper.port, node_id="other") as other:
        peer.elect(1)
        acknowledged = 0
        while True:
            peer.send(1, payload_bytes=100_000)
            answer = peer.heard().message
            if isinstance(answer, Refusal):
                break
            assert isinstance(answer, Ack)
            acknowledged = answer.durable_lsn
        assert answer.reason == "unavailable"
        # Other logs have room in files of their own.
        other.elect(1)
        assert other.append() == 1
    resource.prlimit(keeper.process.pid, resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    with talking(keeper.port) as peer:
        assert peer.elect(1, from_lsn=1).lsn >= acknowledged > 5
        peer.append()
    assert keeper.events_of("wal_sync_failure")
    assert keeper.stop() == 0
    assert verify(tmp_path / NODE)[0].verdict == "ok"


def test_status_of_several_in_text_and_json(tmp_path: Path, start: Start) -> None:
    keeper = start(tmp_path / "a", "--region", "use1")
    with talking(keeper.port) as peer:
        peer.elect(3)
        peer.append(2)
        shown = run_tally("safekeeper", "status", f"127.0.0.1:{keeper.port}")
        assert shown.returncode == 0
        assert "region use1, 1 logs" in shown.stdout
        assert "follows epoch 3, LSN 1 to 2, durable 2" in shown.stdout
        assert keeper.events_of("wal_epoch_bump")[0]["epoch"] == 3
        asked = run_tally("safekeeper", "status", "--json", f"127.0.0.1:{keeper.port}", "127.0.0.1:1")
    assert asked.returncode == 1
    there, away = json.loads(asked.stdout)["safekeepers"]
    (wal,) = there["wals"]
    assert (wal["node_id"], wal["last_replicated_lsn"], wal["last_durable_lsn"], wal["promised_epoch"]) == (
        NODE,
        2,
        2,
        3,
    )
    assert away["wals"] == []
    assert "refused" in away["error"]


def test_committed_segments_go_to_the_archive_of_the_command(tmp_path: Path, start: Start) -> None:
    keeper = start(tmp_path / "keeper", "--archive", tmp_path / "archive")
    for epoch in (1, 2):
        with talking(keeper.port, epoch) as peer:
            peer.elect(epoch)
            peer.tell(peer.append(3))
    told = until(lambda: keeper.events_of("wal_segment_archived"), "a segment is archived")
    assert (tmp_path / "archive" / told[0]["object"]).read_bytes()


def test_the_command_speaks_tls_with_a_key_that_is_its_own(tmp_path: Path, start: Start) -> None:
    authority = Authority(tmp_path)
    keeper_pair = authority.issue("keeper")
    node_pair = authority.issue("node", [DNSName(NODE)], is_client=True)

    def options(pair: Pair) -> list[str]:
        return ["--tls-cert", str(pair.cert), "--tls-key", str(pair.key), "--tls-ca", str(authority.ca_file)]

    keeper = start(tmp_path / "kept", *options(keeper_pair))
    tls = PeerTls(TlsFiles(node_pair.cert, node_pair.key, authority.ca_file), server_side=False)
    with talking(keeper.port, tls=tls) as peer:
        peer.elect(1)
        peer.append(2)
    address = f"localhost:{keeper.port}"
    shown = run_tally("safekeeper", "status", address, *options(node_pair))
    assert (shown.returncode, "durable 2" in shown.stdout) == (0, True)
    assert run_tally("safekeeper", "status", address).returncode == 1
    keeper_pair.key.chmod(0o644)
    listen = ["--dir", str(tmp_path / "other"), "--listen", "127.0.0.1:0"]
    refused = run_tally("safekeeper", "serve", *listen, *options(keeper_pair))
    assert (refused.returncode, "others can use this key" in refused.stderr) == (1, True)


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["--listen", "0.0.0.0:0"], "not loopback"),
        (["--listen", "nowhere"], "no HOST:PORT"),
        (["--listen", "127.0.0.1:0", "--region", "Use 1"], "--region"),
        (["--listen", "127.0.0.1:0", "--tls-ca", __file__], "go together"),
    ],
)
def test_what_cannot_be_served_refuses_the_start(tmp_path: Path, options: list[str], said: str) -> None:
    done = run_tally("safekeeper", "serve", "--dir", str(tmp_path / "keeper"), *options)
    assert done.returncode == 1
    assert said in done.stderr
    assert not (tmp_path / "keeper").exists()
