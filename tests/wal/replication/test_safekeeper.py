"""A safekeeper on a socket: what it says is durable is, whoever else connects, and whatever they send."""

from __future__ import annotations

import errno
import os
import select
import shutil
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack, closing
from pathlib import Path

import pytest

from ledger.errors import ConfigurationError, WalLockedError
from ledger.positions import Epoch, Lsn
from tests.waiting import until
from tests.wal.logs import NODE, WAL_ID
from tests.wal.replication.keepers import WAIT_S, Keeper, raw, talking
from tests.wal.replication.quorums import batch
from wal import control as control_file
from wal.inspect import verify
from wal.replication import configuration, frames, kept_logs, messages, safekeeper, server
from wal.replication.configuration import NO_MEMBERS, Configuration, Member
from wal.replication.frames import ConnectionOverError, status
from wal.replication.messages import (
    Append,
    Batches,
    Elected,
    Fetch,
    Frame,
    Greet,
    Greeting,
    Position,
    Prepare,
    Promise,
    Ready,
    Refusal,
    Status,
)
from wal.replication.safekeeper import Safekeeper
from wal.segment import list_segments


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Keeper]:
    with closing(Keeper(tmp_path / "keeper")) as keeper:
        yield keeper


def test_what_is_acknowledged_is_in_files_of_its_own_folder(keeper: Keeper) -> None:
    with talking(keeper.port) as peer:
        peer.elect(1)
        peer.append(3)
        # Read while the safekeeper is at work: it is in the file by now.
        (report,) = verify(keeper.folder / NODE)
        assert (report.verdict, report.last_lsn, report.last_epoch) == ("ok", 3, 1)


def test_appends_that_come_together_share_one_answer_and_one_sync(keeper: Keeper) -> None:
    with talking(keeper.port) as peer:
        peer.elect(1)
        kept = keeper.safekeeper.logs.all()[0]
        with kept.locked():
            for _ in range(40):
                last_lsn = peer.send(2)
        assert peer.acknowledged(last_lsn) <= 2
        assert peer.tell(last_lsn) == messages.Ack(Epoch(1), Lsn(80))
    segments = list_segments(keeper.folder / NODE)
    assert len(segments) == 1


def test_a_node_that_knows_no_log_is_told_so_and_nothing_is_made(keeper: Keeper) -> None:
    with talking(keeper.port) as peer:
        greeting = peer.greet(wal_id="")
        assert isinstance(greeting, Greeting)
        assert (greeting.member_id, greeting.wal_id, greeting.region) == ("", "", "use1")
        assert list(keeper.folder.iterdir()) == [keeper.folder / "LOCK"]
        # The same conversation goes on once the node knows.
        known = peer.greet()
        assert isinstance(known, Greeting)
        assert len(known.member_id) == 32
    with talking(keeper.port, 2) as other:
        told = other.greet(wal_id="")
        assert isinstance(told, Greeting)
        assert (told.member_id, told.wal_id) == (known.member_id, WAL_ID)
        assert other.refused(Greet(NODE, "f" * 32, other.run)).reason == "other-wal"


def test_nothing_is_said_of_a_log_before_a_greeting(keeper: Keeper) -> None:
    with talking(keeper.port) as peer:
        assert peer.refused(Prepare(Epoch(1), WAL_ID, NO_MEMBERS)).reason == "unreadable"
        with pytest.raises(ConnectionOverError):
            peer.heard()
    with talking(keeper.port) as peer:
        peer.greet(wal_id="")
        assert peer.refused(Prepare(Epoch(1), WAL_ID, NO_MEMBERS)).reason == "unreadable"


def test_a_member_whose_disk_was_wiped_has_another_id(tmp_path: Path) -> None:
    ids = []
    for _ in range(2):
        with closing(Keeper(tmp_path / "keeper")) as keeper, talking(keeper.port) as peer:
            greeting = peer.greet()
            assert isinstance(greeting, Greeting)
            ids.append(greeting.member_id)
        shutil.rmtree(tmp_path / "keeper")
    assert ids[0] != ids[1]


def test_a_restart_keeps_log_promise_and_id(tmp_path: Path) -> None:
    with closing(Keeper(tmp_path)) as keeper, talking(keeper.port) as peer:
        peer.elect(4)
        peer.append(5)
        before = peer.greet()
    with closing(Keeper(tmp_path)) as keeper:
        with talking(keeper.port, 2) as peer:
            assert peer.greet() == before
            refusal = peer.prepare(4)
            assert isinstance(refusal, Refusal)
            assert (refusal.reason, refusal.promised_epoch) == ("fenced", 4)
        with talking(keeper.port) as peer:
            assert isinstance(peer.greet(), Greeting)
            assert isinstance(peer.prepare(4), Promise)
            # The history is to be told again before anything is appended.
            said = Append(Epoch(4), Position(Epoch(4), Lsn(5)), Epoch(4), Lsn(0))
            assert peer.refused(said, batch(6, 6)).reason == "not-elected"


def test_a_higher_epoch_gets_in_beside_a_connection_that_hangs_in_a_frame(keeper: Keeper) -> None:
    with talking(keeper.port) as old, talking(keeper.port, 2) as new:
        old.elect(1)
        old.append()
        head, body = messages.encode(
            Frame(Append(Epoch(1), old.tail, Epoch(1), Lsn(0)), batch(2, 2)),
        )
        whole = head + bytes(body)
        old.spoken._send(whole[:-5])
        assert new.elect(2) == Position(Epoch(1), Lsn(1))
        new.append(2)
        old.spoken._send(whole[-5:])
        refusal = old.heard().message
        assert isinstance(refusal, Refusal)
        assert (refusal.reason, refusal.promised_epoch) == ("fenced", 2)
        new.append()
    assert [facts["epoch"] for facts in keeper.told("wal_epoch_bump")] == [1, 2]
    assert keeper.told("wal_fencing_reject")[0]["promised_epoch"] == 2


def test_a_divergent_end_is_cut_where_it_stands(keeper: Keeper) -> None:
    with talking(keeper.port) as old:
        old.elect(1)
        old.append(6)
    with talking(keeper.port, 2) as new:
        assert new.elect(2, from_lsn=4) == Position(Epoch(1), Lsn(3))
        assert new.append(2) == 5
        held = new.ask(Fetch(Lsn(1), 1 << 20))
        assert held == Batches(Position(Epoch(0), Lsn(0)), Epoch(1))
    assert list((keeper.folder / NODE).glob("cut-*"))


def test_a_damaged_batch_leaves_nothing_and_the_node_goes_on_from_what_is_held(keeper: Keeper) -> None:
    data = bytearray(batch(3, 4))
    data[-1] ^= 1
    with talking(keeper.port) as peer:
        peer.elect(1)
        peer.append(2)
        refusal = peer.refused(Append(Epoch(1), peer.tail, Epoch(1), Lsn(0)), bytes(data))
        assert refusal.reason == "damaged"
    with talking(keeper.port) as peer:
        assert peer.elect(1, from_lsn=1) == Position(Epoch(1), Lsn(2))
        assert peer.append(2) == 4
    assert keeper.told("wal_replication_append_reject")[0]["reason"] == "damaged"


GARBAGE = {
    "a request of another protocol": b"GET / HTTP/1.1\r\n\r\n",
    "a giant length": struct.pack(">II", 0xFFFFFFFF, 0) + bytes(100),
    "a frame longer than a greeting may be": struct.pack(">II", 1 << 20, 0) + bytes(100),
    "a length of nothing": bytes(64),
    "a frame with another CRC": struct.pack(">IIBI", 9, 1, 1, 0),
    "an unknown kind": b"",
    "a head longer than its frame": b"",
}


def framed(inner: bytes) -> bytes:
    crc = frames.messages.crc32(inner)
    return struct.pack(">II", 4 + len(inner), crc) + inner


GARBAGE["an unknown kind"] = framed(struct.pack(">BI", 99, 0))
GARBAGE["a head longer than its frame"] = framed(struct.pack(">BI", 1, 1000) + b"abc")
GARBAGE["a head of another message"] = framed(struct.pack(">BI", 1, 3) + b"\x93\x01\x02")


@pytest.mark.parametrize("what", GARBAGE)
def test_garbage_is_refused_and_harms_nobody(keeper: Keeper, what: str) -> None:
    with talking(keeper.port) as peer, raw(keeper.port) as stranger:
        peer.elect(1)
        stranger.sendall(GARBAGE[what])
        answer = stranger.recv(1 << 16)
        assert not answer or messages.decode(answer).message.reason == "damaged"
        assert peer.append() == 1


@pytest.mark.parametrize("node_id", ["../up", "", "Upper", "a/b", "a\0b", "x" * 64, "..", "LOCK"])
def test_no_name_leads_out_of_the_folder(keeper: Keeper, node_id: str) -> None:
    with talking(keeper.port) as peer:
        assert peer.refused(Greet(node_id, WAL_ID, "1" * 32)).reason == "unreadable"
    assert sorted(path.name for path in keeper.folder.parent.rglob("*")) == ["LOCK", "keeper"]


def test_a_giant_frame_of_a_known_peer_gets_no_room_for_what_it_only_announces(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    with talking(keeper.port) as liar, talking(keeper.port) as peer:
        liar.elect(1)
        liar.spoken._send(struct.pack(">II", messages.FRAME_BYTES_MAX - 4, 0) + bytes(1 << 20))
        assert peer.elect(1, from_lsn=1) == Position(Epoch(0), Lsn(0))
        assert peer.append() == 1
        assert keeper._server._budget.take(server.LARGE_FRAMES_BYTES_MAX)


def test_large_frames_share_a_budget(keeper: Keeper) -> None:
    with talking(keeper.port) as peer:
        peer.elect(1)
        assert peer.append(1, payload_bytes=6 << 20) == 1
        until(lambda: keeper._server._budget.take(server.LARGE_FRAMES_BYTES_MAX - (1 << 20)), "all else is given back")
        with pytest.raises((ConnectionOverError, OSError)):
            peer.append(1, payload_bytes=6 << 20)
    with talking(keeper.port) as peer:
        assert peer.elect(1, from_lsn=1).lsn == 1
        assert peer.append(1, payload_bytes=1 << 20) == 2


def test_who_takes_no_answer_keeps_nobody_waiting(keeper: Keeper) -> None:
    with talking(keeper.port) as deaf, talking(keeper.port) as peer:
        deaf.elect(1)
        deaf.append(1, payload_bytes=3 << 20)
        asked = b"".join(map(bytes, messages.encode(Frame(Fetch(Lsn(1), 4 << 20)))))
        # More than the buffers of both sides hold: the safekeeper waits for this peer to take them.
        deaf.spoken._send(asked * 10)
        peer.elect(1, from_lsn=1)
        assert peer.append() == 2


def test_who_only_connects_keeps_nobody_out(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "CONNECTIONS_MAX", server.NAMELESS_MAX + 4)
    monkeypatch.setattr(server, "GREETING_TIMEOUT_S", WAIT_S)
    with ExitStack() as held:
        silent = [held.enter_context(raw(keeper.port)) for _ in range(server.NAMELESS_MAX + 20)]
        told = select.poll()
        for connection in silent:
            told.register(connection, select.POLLIN)
        until(lambda: len(told.poll(0)) == 20, "the oldest are closed")
        with talking(keeper.port) as peer:
            peer.elect(1)
            assert peer.append() == 1


def test_the_oldest_connections_of_a_node_make_room_for_new_ones(keeper: Keeper) -> None:
    with ExitStack() as held:
        peers = [held.enter_context(talking(keeper.port)) for _ in range(server.CONNECTIONS_OF_NODE_MAX + 1)]
        for peer in peers:
            peer.greet()
        with pytest.raises(ConnectionOverError):
            peers[0].heard()
        assert isinstance(peers[1].greet(), Greeting)
        assert isinstance(peers[-1].greet(), Greeting)


def test_who_says_nothing_is_closed(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(server, "IDLE_TIMEOUT_S", 0.05)
    with monkeypatch.context() as patch:
        patch.setattr(server, "GREETING_TIMEOUT_S", 0.05)
        with raw(keeper.port) as silent:
            assert silent.recv(1) == b""
    with talking(keeper.port) as peer:
        peer.greet()
        with pytest.raises(ConnectionOverError):
            peer.heard()


def test_a_frame_that_does_not_end_is_given_up(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(frames, "FRAME_TIMEOUT_S", 0.05)
    with raw(keeper.port) as slow:
        slow.sendall(b"\0\0")
        assert slow.recv(1) == b""


def test_many_nodes_write_at_the_same_time(keeper: Keeper) -> None:
    def write(number: int) -> None:
        with talking(keeper.port, number, node_id=f"node-{number}", wal_id=f"{number:032x}") as peer:
            peer.elect(1)
            for _ in range(10):
                peer.append(3)

    threads = [threading.Thread(target=write, args=(number,)) for number in range(1, 25)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(WAIT_S)
    found = status("127.0.0.1", keeper.port, None, WAIT_S)
    assert {wal.node_id: wal.durable_lsn for wal in found.wals} == {f"node-{number}": 30 for number in range(1, 25)}
    assert all(wal.state == "open" and wal.disk_bytes > 30 * 34 for wal in found.wals)


def test_logs_that_nobody_uses_are_closed_when_too_many_are_open(
    keeper: Keeper, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(kept_logs, "LOGS_OPEN_MAX", 2)
    nodes = ["node-1", "node-2", "node-3", "node-1"]
    for epoch, node_id in enumerate(nodes, 1):
        with talking(keeper.port, epoch, node_id=node_id) as peer:
            peer.elect(epoch)
            peer.append()
        until(lambda: not any(kept.users for kept in keeper.safekeeper.logs.all()), "the connection is closed")
    found = {wal.node_id: wal for wal in status("127.0.0.1", keeper.port, None, WAIT_S).wals}
    assert {node_id: wal.state for node_id, wal in found.items()} == {
        "node-1": "open",
        "node-2": "closed",
        "node-3": "open",
    }
    assert (found["node-1"].tail, found["node-1"].promised_epoch) == (Position(Epoch(4), Lsn(2)), 4)
    assert (found["node-2"].durable_lsn, found["node-2"].promised_epoch) == (1, 2)


def test_a_log_whose_segment_was_taken_away_is_not_used_further(keeper: Keeper) -> None:
    with talking(keeper.port) as peer, talking(keeper.port) as other:
        peer.elect(1)
        peer.append(2)
        other.greet()
        keeper.safekeeper.tend()
        segment = list_segments(keeper.folder / NODE)[0].path
        aside = segment.rename(segment.with_suffix(".away"))
        peer.send(1)
        refusal = peer.heard().message
        assert isinstance(refusal, Refusal)
        assert (refusal.reason, refusal.promised_epoch) == ("unavailable", 0)
        assert other.refused(Fetch(Lsn(1), 1)).reason == "unavailable"
        # It is opened anew, and that fails as long as what was acknowledged is not there.
        with talking(keeper.port) as again:
            assert again.refused(Greet(NODE, WAL_ID, again.run)).reason == "unavailable"
        (wal,) = status("127.0.0.1", keeper.port, None, WAIT_S).wals
        assert wal.state == "failed"
        aside.rename(segment)
    with talking(keeper.port) as again:
        assert again.elect(1, from_lsn=1).lsn >= 2
        again.append()
    assert keeper.told("wal_sync_failure")
    assert keeper.told("wal_recovery_failed")


def test_a_promise_that_cannot_be_stored_is_not_given(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    rename = os.rename

    def full(source: str, target: Path) -> None:
        if Path(target).name == "control":
            raise OSError(errno.ENOSPC, "No space left on device")
        rename(source, target)

    with talking(keeper.port) as peer, talking(keeper.port, 2) as other:
        peer.elect(2)
        peer.append(3)
        other.greet()
        monkeypatch.setattr(os, "rename", full)
        refusal = other.prepare(5)
        assert isinstance(refusal, Refusal)
        assert (refusal.reason, "No space left" in refusal.detail) == ("unavailable", True)
        # The log was closed for that, so whoever spoke of it before begins anew, and his promise stands.
        peer.send(1)
        assert isinstance(peer.heard().message, Refusal)
        monkeypatch.undo()
    with talking(keeper.port) as peer:
        assert peer.elect(2, from_lsn=1).lsn == 3
        peer.append()


def flip(path: Path, offset: int) -> None:
    data = bytearray(path.read_bytes())
    data[offset] ^= 1
    path.write_bytes(data)


@pytest.mark.parametrize("damaged", ["segment", "control", "members", "no control"])
def test_a_damaged_log_is_refused_with_its_place_and_the_remedy_of_a_member(tmp_path: Path, damaged: str) -> None:
    members = Configuration(3, Epoch(1), "use1", False, (Member("a" * 32, "use1"),))
    with closing(Keeper(tmp_path)) as keeper, talking(keeper.port) as peer:
        peer.elect(1)
        for _ in range(3):
            peer.append(2)
        peer.ask(messages.Configure(Epoch(1), members))
    folder = tmp_path / NODE
    segment = list_segments(folder)[0].path
    name = {"segment": segment.name, "members": configuration.MEMBERS_NAME}.get(damaged, control_file.CONTROL_NAME)
    if damaged == "no control":
        (folder / name).unlink()
    else:
        flip(folder / name, 200 if damaged == "segment" else 20)
    content = segment.read_bytes()
    with closing(Keeper(tmp_path)) as keeper:
        until(lambda: keeper.told("wal_recovery_failed"), "the log is looked at")
        (wal,) = status("127.0.0.1", keeper.port, None, WAIT_S).wals
        assert wal.state == "failed"
        with talking(keeper.port) as peer:
            refused = peer.refused(Greet(NODE, WAL_ID, peer.run)).detail
        for advice in (wal.detail, refused, keeper.told("wal_recovery_failed")[0]["error"]):
            assert name in advice
            assert f"stop this safekeeper, remove the folder {folder}, start it again" in advice
            assert "--accept-lost-wal" not in advice
            assert "from a copy" not in advice
            assert "put it back" not in advice
    assert segment.read_bytes() == content


def test_status_tells_what_was_received_what_is_durable_and_who_the_members_are(keeper: Keeper) -> None:
    members = Configuration(3, Epoch(2), "use1", False, (Member("a" * 32, "use1"),))
    with talking(keeper.port) as peer:
        peer.elect(2)
        peer.append(4)
        peer.ask(messages.Configure(Epoch(2), members))
        peer.tell(3, settled_lsn=2)
        (wal,) = status("127.0.0.1", keeper.port, None, WAIT_S).wals
    assert wal.wal_id == WAL_ID
    assert (wal.tail, wal.durable_lsn, wal.committed_lsn, wal.settled_lsn) == (Position(Epoch(2), Lsn(4)), 4, 3, 2)
    assert (wal.configuration, wal.promised_epoch) == (members, 2)


def test_status_does_not_wait_for_a_log_that_is_held_up(keeper: Keeper) -> None:
    for node_id in ("node-1", "node-2"):
        with talking(keeper.port, node_id=node_id) as peer:
            peer.greet()
    with keeper.safekeeper.logs.all()[0].locked():
        found = status("127.0.0.1", keeper.port, None, WAIT_S).wals
    assert [(wal.node_id, wal.state) for wal in found] == [("node-1", "busy"), ("node-2", "open")]


def test_who_waits_for_a_log_that_is_held_up_is_told_so(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(safekeeper, "HELD_UP_S", 0.05)
    with talking(keeper.port) as peer, talking(keeper.port) as again, talking(keeper.port, node_id="other") as other:
        peer.greet()
        with keeper.safekeeper.logs.all()[0].locked():
            assert again.refused(Greet(NODE, WAL_ID, again.run)).reason == "unavailable"
            other.elect(1)
            assert other.append() == 1
    with talking(keeper.port) as peer:
        assert isinstance(peer.greet(), Greeting)


def test_a_frame_that_is_damaged_on_the_way_is_told_and_the_node_goes_on_with_a_new_connection(keeper: Keeper) -> None:
    with talking(keeper.port) as peer:
        peer.elect(1)
        peer.append(2)
        head, body = messages.encode(Frame(Append(Epoch(1), peer.tail, Epoch(1), Lsn(0)), batch(3, 4)))
        peer.spoken._send(head + bytes(body)[:-1] + b"?")
        refusal = peer.heard().message
        assert isinstance(refusal, Refusal)
        assert refusal.reason == "damaged"
        with pytest.raises(ConnectionOverError):
            peer.heard()
    with talking(keeper.port) as peer:
        assert peer.elect(1, from_lsn=1).lsn == 2
        assert peer.append(2) == 4
    assert keeper.told("wal_replication_append_reject")[0]["node_id"] == NODE


def test_settled_is_never_more_than_committed_and_held(keeper: Keeper) -> None:
    with talking(keeper.port) as peer:
        peer.elect(1)
        peer.append(4)
        peer.tell(3, settled_lsn=99)
        (wal,) = status("127.0.0.1", keeper.port, None, WAIT_S).wals
    assert (wal.committed_lsn, wal.settled_lsn) == (3, 3)


def test_a_report_of_many_logs_comes_in_parts(keeper: Keeper, monkeypatch: pytest.MonkeyPatch) -> None:
    for number in range(40):
        with talking(keeper.port, node_id=f"node-{number}") as peer:
            peer.greet()
    assert len(status("127.0.0.1", keeper.port, None, WAIT_S).wals) == 40
    with talking(keeper.port) as peer:
        assert len(peer.ask(Status()).wals) == 16


def test_two_safekeepers_never_share_a_folder(tmp_path: Path) -> None:
    with closing(Keeper(tmp_path)), pytest.raises(WalLockedError):
        Safekeeper(tmp_path, "use1", lambda *_: None)


@pytest.mark.parametrize("host", ["0.0.0.0", "::"])
def test_without_certificates_only_loopback_is_listened_on(host: str) -> None:
    with pytest.raises(ConfigurationError, match="not loopback"):
        server.listen(host, 0, is_secured=False)
    server.listen(host, 0, is_secured=True).close()


@pytest.mark.parametrize(
    "message",
    [
        Elected(Epoch(1), Lsn(0), ((1, 1),)),
        Elected(Epoch(1), Lsn(1), ()),
        Elected(Epoch(1), Lsn(1), ((1, -5),)),
        Elected(Epoch(1), Lsn(1), ((0, 1), (1, 2))),
        Elected(Epoch(1), Lsn(1), ((1, 2**63),)),
        Prepare(Epoch(2), WAL_ID, Configuration(-1)),
        Prepare(Epoch(2), WAL_ID, Configuration(members=(Member("a", "b"),) * 33)),
        Ready(Epoch(1), Position(Epoch(1), Lsn(1))),
    ],
)
def test_a_lie_is_refused_and_the_log_goes_on(keeper: Keeper, message: messages.Message) -> None:
    with talking(keeper.port) as liar:
        liar.elect(1)
        assert liar.refused(message).reason == "unreadable"
        assert liar.append() == 1
    assert not keeper.told("safekeeper_connection_failed")


def test_a_fetch_gives_no_more_than_a_bound_whatever_is_asked(keeper: Keeper) -> None:
    with talking(keeper.port) as peer:
        peer.elect(1)
        for _ in range(8):
            peer.append(1, payload_bytes=1 << 20)
        peer.say(Fetch(Lsn(1), 2**62))
        assert 4 << 20 <= len(peer.heard().body) <= 6 << 20
        peer.say(Fetch(Lsn(1), -1))
        assert peer.heard().body
        assert peer.refused(Fetch(Lsn(0), 1)).reason == "not-here"
