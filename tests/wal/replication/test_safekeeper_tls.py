"""Whose log may be written is what the certificate says; without one of the authority nobody is heard."""

from __future__ import annotations

import contextlib
import ssl
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from cryptography.x509 import DNSName

from ledger.errors import ConfigurationError
from ledger.positions import BEFORE_FIRST, Epoch
from tests.app.certificates import Authority, Pair
from tests.waiting import until
from tests.wal.logs import NODE, WAL_ID
from tests.wal.replication.damaging_proxy import DamagingProxy
from tests.wal.replication.keepers import WAIT_S, Keeper, raw, talking
from wal.replication.frames import ConnectionOverError, status
from wal.replication.messages import EMPTY, Append, Frame, Greet, Greeting
from wal.replication.tls import PeerTls, TlsFiles
from wal.replication.wires import Connected, Lost, Received, Wires


class Peers:
    """An authority, and the TLS of whoever has a certificate of it."""

    def __init__(self, folder: Path) -> None:
        self.authority = Authority(folder)

    def keeper(self) -> PeerTls:
        return self._tls(self.authority.issue("keeper"), server_side=True)

    def node(self, *names: str, common_name: str | None = None) -> PeerTls:
        given = [DNSName(name) for name in names]
        return self._tls(self.authority.issue("-".join(names) or "cn", given, common_name=common_name, is_client=True))

    def _tls(self, pair: Pair, *, server_side: bool = False) -> PeerTls:
        return PeerTls(TlsFiles(pair.cert, pair.key, self.authority.ca_file), server_side=server_side)


@pytest.fixture
def peers(tmp_path: Path) -> Peers:
    return Peers(tmp_path / "authority")


@pytest.fixture
def keeper(tmp_path: Path, peers: Peers) -> Iterator[Keeper]:
    with closing(Keeper(tmp_path / "keeper", tls=peers.keeper())) as keeper:
        yield keeper


def test_the_certificate_names_the_node_whose_log_it_may_write(keeper: Keeper, peers: Peers) -> None:
    for tls in (peers.node(NODE), peers.node("other", NODE), peers.node(common_name=NODE)):
        with talking(keeper.port, tls=tls) as peer:
            greeting = peer.greet()
            assert isinstance(greeting, Greeting)
            peer.elect(greeting.promised_epoch + 1)
            # Several records of TLS, and batches that do not end with them.
            lsn = max(peer.send(1, payload_bytes=30_000) for _ in range(20))
            peer.acknowledged(lsn)


@pytest.mark.parametrize("names", [["node-b"], ["*"], ["node-a.example.org"], []])
def test_another_name_writes_nothing(keeper: Keeper, peers: Peers, names: list[str]) -> None:
    with talking(keeper.port, tls=peers.node(*names, common_name="node-c")) as peer:
        refusal = peer.refused(Greet(NODE, WAL_ID, peer.run))
        assert refusal.reason == "forbidden"
    (told,) = keeper.told("safekeeper_peer_refused")
    assert (told["node_id"], "not node-a" in told["error"]) == (NODE, True)
    assert not (keeper.folder / NODE).exists()


def test_a_peer_of_another_authority_or_of_none_is_not_heard(keeper: Keeper, peers: Peers, tmp_path: Path) -> None:
    strange = Authority(tmp_path / "strange", "strange")
    pair = strange.issue("node", [DNSName(NODE)], is_client=True)
    tls = PeerTls(TlsFiles(pair.cert, pair.key, peers.authority.ca_file), server_side=False)
    with pytest.raises((OSError, ConnectionOverError)), talking(keeper.port, tls=tls) as peer:
        peer.greet()
    bare = ssl.create_default_context(cafile=peers.authority.ca_file)
    with pytest.raises(OSError), bare.wrap_socket(raw(keeper.port), server_hostname="localhost") as without:
        assert without.recv(1) == b"x"
    with raw(keeper.port) as plain:
        plain.sendall(b"\0\0\0\x20" * 10)
        plain.settimeout(WAIT_S)
        # What comes, if anything, is an alert of TLS, and no frame.
        with contextlib.suppress(ConnectionResetError):
            assert plain.recv(1) in (b"", b"\x15")
    with talking(keeper.port, tls=peers.node(NODE)) as peer:
        assert isinstance(peer.greet(), Greeting)


def test_a_safekeeper_of_another_name_is_not_spoken_to(tmp_path: Path, peers: Peers) -> None:
    pair = peers.authority.issue("elsewhere", [DNSName("elsewhere")])
    tls = PeerTls(TlsFiles(pair.cert, pair.key, peers.authority.ca_file), server_side=True)
    with (
        closing(Keeper(tmp_path / "keeper", tls=tls)) as keeper,
        pytest.raises(ssl.SSLCertVerificationError),
        talking(keeper.port, tls=peers.node(NODE)),
    ):
        pass


def test_nothing_older_than_tls_1_3_is_spoken(keeper: Keeper, peers: Peers) -> None:
    context = peers.node(NODE).context()
    context.minimum_version = ssl.TLSVersion.TLSv1_2
    context.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError):
        context.wrap_socket(raw(keeper.port), server_hostname="localhost")


def test_who_stops_in_the_handshake_keeps_nobody_out(keeper: Keeper, peers: Peers) -> None:
    with raw(keeper.port) as halfway, talking(keeper.port, tls=peers.node(NODE)) as peer:
        halfway.sendall(b"\x16\x03\x01\x02\x00")
        assert isinstance(peer.greet(), Greeting)


def test_certificates_are_read_again_when_they_change(tmp_path: Path, peers: Peers) -> None:
    pair = peers.authority.issue("keeper", [DNSName("elsewhere")])
    tls = PeerTls(TlsFiles(pair.cert, pair.key, peers.authority.ca_file), server_side=True)
    node = peers.node(NODE)
    with closing(Keeper(tmp_path / "keeper", tls=tls)) as keeper:
        with pytest.raises(ssl.SSLCertVerificationError), talking(keeper.port, tls=node):
            pass
        pair.cert.write_text("half of a")
        with pytest.raises(ssl.SSLCertVerificationError), talking(keeper.port, tls=node):
            pass
        pair.take(peers.authority.issue("next"))
        with talking(keeper.port, tls=node) as peer:
            assert isinstance(peer.greet(), Greeting)


def test_files_that_are_no_certificates_refuse_the_start(tmp_path: Path, peers: Peers) -> None:
    pair = peers.authority.issue("keeper")
    pair.key.write_text("no key")
    with pytest.raises(ConfigurationError, match=r"keeper\.key"):
        PeerTls(TlsFiles(pair.cert, pair.key, peers.authority.ca_file), server_side=True)


def test_a_node_shows_the_certificate_that_its_files_hold_now(keeper: Keeper, peers: Peers, tmp_path: Path) -> None:
    pair = Authority(tmp_path / "strange", "strange").issue("node", [DNSName(NODE)], is_client=True)
    tls = PeerTls(TlsFiles(pair.cert, pair.key, peers.authority.ca_file), server_side=False)
    address = f"localhost:{keeper.port}"
    wires = Wires({address: "use1"}, tls, WAIT_S)

    def comes(kind: type[Connected | Lost | Received]) -> bool:
        wires.open_due()
        events = wires.wait(0.05)
        for event in events:
            if isinstance(event, Connected):
                wires.send(address, Frame(Greet(NODE, WAL_ID, "1".rjust(32, "0"))))
        return any(isinstance(event, kind) for event in events)

    try:
        until(lambda: comes(Lost), "the certificate of another authority is refused")
        pair.take(peers.authority.issue("next", [DNSName(NODE)], is_client=True))
        until(lambda: comes(Received), "the new one is taken")
    finally:
        wires.close()


@pytest.mark.parametrize(
    ("node_of", "keeper_of", "names", "reason", "at_keeper"),
    [
        (
            "strange",
            "good",
            ["localhost"],
            "refuses this side's certificate, or its TLS: tlsv1 alert unknown ca",
            "unable",
        ),
        ("good", "strange", ["localhost"], "certificate is refused: unable to get local issuer", "alert unknown ca"),
        ("good", "good", ["elsewhere"], "certificate is refused: Hostname mismatch", "alert bad certificate"),
    ],
    ids=["the node's is of another authority", "the member's is", "the member's names another host"],
)
def test_a_certificate_that_is_refused_is_named_with_its_reason_on_both_sides(
    tmp_path: Path, node_of: str, keeper_of: str, names: list[str], reason: str, at_keeper: str
) -> None:
    authorities = {name: Authority(tmp_path / name, name) for name in ("good", "strange")}
    ca = authorities["good"].ca_file
    shown = authorities[node_of].issue("node", [DNSName(NODE)], is_client=True)
    served = authorities[keeper_of].issue("keeper", [DNSName(name) for name in names])
    tls = PeerTls(TlsFiles(served.cert, served.key, ca), server_side=True)
    with closing(Keeper(tmp_path / "keeper", tls=tls)) as keeper:
        address = f"localhost:{keeper.port}"
        with closing(
            Wires({address: "use1"}, PeerTls(TlsFiles(shown.cert, shown.key, ca), server_side=False), 5)
        ) as wires:
            losses: list[Lost] = []

            def is_lost_often() -> bool:
                wires.open_due()
                for event in wires.wait(0.05):
                    if isinstance(event, Connected):
                        wires.send(address, Frame(Greet(NODE, WAL_ID, "1".rjust(32, "0"))))
                    elif isinstance(event, Lost):
                        losses.append(event)
                return len(losses) >= 4

            until(is_lost_often, "it is tried again and again")
        assert all(lost.address == address and reason in lost.reason for lost in losses), losses
        told = until(lambda: keeper.told("safekeeper_peer_refused"), "the member reports it, too")
        assert at_keeper in told[0]["error"]
        assert told[0]["peer"].startswith("127.0.0.1:")


def test_a_record_of_tls_that_arrives_damaged_counts_as_a_damaged_frame(keeper: Keeper, peers: Peers) -> None:
    with closing(DamagingProxy(keeper.port)) as proxy:
        address = f"localhost:{proxy.port}"
        with closing(Wires({address: "use1"}, peers.node(NODE), WAIT_S)) as wires:
            events: list[Connected | Lost | Received] = []

            def comes(kind: type[Connected | Lost | Received]) -> bool:
                wires.open_due()
                events.extend(wires.wait(0.05))
                return any(isinstance(event, kind) for event in events)

            until(lambda: comes(Connected), "it is connected")
            wires.send(address, Frame(Greet(NODE, WAL_ID, "1" * 32)))
            until(lambda: comes(Received), "it is greeted")
            proxy.flips_left = 1
            append = Append(Epoch(1), EMPTY, Epoch(1), BEFORE_FIRST)
            wires.send(address, Frame(append, b"x" * 1000))
            until(lambda: comes(Lost), "the connection ends")
    (lost,) = [event for event in events if isinstance(event, Lost)]
    assert (lost.is_damaged, "arrived damaged" in lost.reason) == (True, True), lost


def test_a_key_that_others_can_read_is_refused(peers: Peers) -> None:
    pair = peers.authority.issue("keeper")
    pair.key.chmod(0o640)
    with pytest.raises(ConfigurationError, match="others can use this key"):
        PeerTls(TlsFiles(pair.cert, pair.key, peers.authority.ca_file), server_side=True)


def test_status_is_told_to_whoever_has_a_certificate(keeper: Keeper, peers: Peers) -> None:
    with talking(keeper.port, tls=peers.node(NODE)) as peer:
        peer.elect(1)
        peer.append()
    (wal,) = status("localhost", keeper.port, peers.node("watcher"), WAIT_S).wals
    assert wal.durable_lsn == 1
