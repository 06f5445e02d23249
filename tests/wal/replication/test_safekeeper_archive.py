"""What a safekeeper archives, and what it removes: what is committed, settled, and in the archive if there is one."""

from __future__ import annotations

import shutil
import threading
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from ledger.errors import ArchiveUnavailableError, WalCorruptError, WalError
from ledger.positions import Epoch, Lsn
from objects.store import ArchiveStore
from tests.pipeline.bucket_server import BucketServer, bucket_server
from tests.wal.logs import NODE, WAL_ID
from tests.wal.replication.keepers import WAIT_S, Keeper, talking
from wal.inspect import verify
from wal.replication import messages
from wal.replication.archive import Archiver, restore_log
from wal.replication.frames import status
from wal.replication.messages import Fetch, Greeting, Position, Refusal, WalStatus
from wal.segment import list_segments


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "archive"


@pytest.fixture
def keeper(tmp_path: Path, place: Path) -> Iterator[Keeper]:
    with closing(Keeper(tmp_path / "keeper", archive=ArchiveStore(str(place)))) as keeper:
        yield keeper


def archive(keeper: Keeper, url: Path | str) -> None:
    Archiver(keeper.safekeeper.logs, ArchiveStore(str(url)), keeper._told).archive_all(threading.Event())


def three_epochs(keeper: Keeper, committed_lsn: int, settled_lsn: int = 0) -> None:
    """LSN 1 to 4, 5 to 8 and 9 to 12, each in an epoch and so in a segment of its own."""
    for epoch in (1, 2, 3):
        with talking(keeper.port, epoch) as peer:
            peer.elect(epoch)
            peer.append(4)
            peer.tell(min(committed_lsn, peer.tail.lsn), settled_lsn)


def wal(keeper: Keeper) -> WalStatus:
    (found,) = status("127.0.0.1", keeper.port, None, WAIT_S).wals
    return found


def objects_in(place: Path) -> dict[str, bytes]:
    found = (path for path in place.rglob("*.wal") if path.is_file())
    return {str(path.relative_to(place)): path.read_bytes() for path in found}


def held(keeper: Keeper) -> list[int]:
    return [segment.base_lsn for segment in list_segments(keeper.folder / NODE)]


def test_whole_segments_that_are_committed_are_archived_under_names_that_tell_them(keeper: Keeper, place: Path) -> None:
    three_epochs(keeper, committed_lsn=12)
    paths = [segment.path for segment in list_segments(keeper.folder / NODE)]
    archive(keeper, place)
    found = wal(keeper)
    name = f"{NODE}/{WAL_ID}/{{:020d}}-{{:020d}}-{{}}-{found.member_id}.wal"
    assert objects_in(place) == {
        name.format(1, 4, 1): paths[0].read_bytes(),
        name.format(5, 8, 2): paths[1].read_bytes(),
    }
    assert found.archived_lsn == 8
    # Nobody said yet that nobody needs them here.
    keeper.safekeeper.tend()
    assert held(keeper) == [1, 5, 9]


def test_a_log_is_brought_back_from_what_several_members_archived(tmp_path: Path, place: Path, keeper: Keeper) -> None:
    three_epochs(keeper, committed_lsn=12)
    with talking(keeper.port, 4) as peer:
        peer.elect(4)
        peer.tell(peer.append(1))
    archive(keeper, place)
    # Another member cut its segments elsewhere, and does not go as far.
    first, second, third = sorted(objects_in(place))
    shutil.copy(place / second, place / second.replace(wal(keeper).member_id, "ab" * 16))
    (place / third.replace(f"{9:020d}", f"{10:020d}")).write_bytes(b"never looked at: nothing goes on to it")
    found = restore_log(ArchiveStore(str(place)), NODE, None, tmp_path / "back" / NODE)
    assert found == (WAL_ID, Lsn(1), Position(Epoch(3), Lsn(12)))
    (report,) = verify(tmp_path / "back" / NODE)
    assert (report.verdict, report.last_lsn) == ("ok", 12)
    with closing(Keeper(tmp_path / "back")) as back, talking(back.port, 5) as peer:
        greeting = peer.greet()
        assert isinstance(greeting, Greeting)
        assert greeting.tail == found[2]
        assert greeting.committed_lsn == 12
        assert greeting.promised_epoch > 1000, "no epoch of the lost end is used again"
        assert peer.elect(greeting.promised_epoch + 1).lsn == 12
        assert peer.append() == 13
    with pytest.raises(WalError, match="not empty"):
        restore_log(ArchiveStore(str(place)), NODE, None, tmp_path / "back" / NODE)
    with pytest.raises(WalError, match=f"no log of node node-x. It holds logs of: {NODE}$"):
        restore_log(ArchiveStore(str(place)), "node-x", None, tmp_path / "none")
    assert not (tmp_path / "none").exists()
    data = bytearray((place / first).read_bytes())
    data[200] ^= 1
    (place / first).write_bytes(data)
    with pytest.raises(WalCorruptError, match=f"{1:020d}"):
        restore_log(ArchiveStore(str(place)), NODE, WAL_ID, tmp_path / "spoilt")


def test_what_is_not_committed_is_not_archived(keeper: Keeper, place: Path) -> None:
    three_epochs(keeper, committed_lsn=7)
    archive(keeper, place)
    assert [name.split("/")[2][:20] for name in objects_in(place)] == [f"{1:020d}"]
    assert wal(keeper).archived_lsn == 4


def test_what_is_settled_is_removed_once_it_is_archived(keeper: Keeper, place: Path) -> None:
    three_epochs(keeper, committed_lsn=12, settled_lsn=12)
    keeper.safekeeper.tend()
    assert held(keeper) == [1, 5, 9]
    archive(keeper, place)
    keeper.safekeeper.tend()
    assert held(keeper) == [9]
    assert wal(keeper).first_lsn == 9
    with talking(keeper.port, 3) as peer:
        peer.greet()
        refusal = peer.refused(Fetch(messages.Lsn(8), 1))
        assert refusal.reason == "not-here"
        assert peer.elect(4).lsn == 12
        peer.append(2)


def test_without_an_archive_what_is_settled_is_removed(tmp_path: Path) -> None:
    with closing(Keeper(tmp_path)) as keeper:
        three_epochs(keeper, committed_lsn=12, settled_lsn=7)
        keeper.safekeeper.tend()
        assert held(keeper) == [5, 9]
    assert [report.verdict for report in verify(tmp_path / NODE)] == ["ok"]


def test_what_is_said_to_be_settled_but_is_not_committed_stays(tmp_path: Path) -> None:
    with closing(Keeper(tmp_path)) as keeper:
        three_epochs(keeper, committed_lsn=3, settled_lsn=12)
        keeper.safekeeper.tend()
        assert held(keeper) == [1, 5, 9]


def test_a_restart_takes_what_is_in_the_archive_for_archived(tmp_path: Path, place: Path) -> None:
    for _ in range(2):
        with closing(Keeper(tmp_path / "keeper", archive=ArchiveStore(str(place)))) as keeper:
            if not objects_in(place):
                three_epochs(keeper, committed_lsn=12)
            else:
                with talking(keeper.port, 3) as peer:
                    peer.greet()
                keeper.safekeeper.tend()
            archive(keeper, place)
            assert wal(keeper).archived_lsn == 8
            assert len(objects_in(place)) == 2


def test_what_something_else_stands_for_in_the_archive_is_neither_overwritten_nor_removed_here(
    keeper: Keeper, place: Path
) -> None:
    three_epochs(keeper, committed_lsn=12, settled_lsn=12)
    name = f"{NODE}/{WAL_ID}/{1:020d}-{4:020d}-1-{wal(keeper).member_id}.wal"
    (place / name).parent.mkdir(parents=True)
    (place / name).write_bytes(b"somebody's")
    archive(keeper, place)
    keeper.safekeeper.tend()
    assert (place / name).read_bytes() == b"somebody's"
    assert held(keeper) == [1, 5, 9]
    assert "stands in the archive already" in keeper.told("wal_archive_failed")[0]["error"]


def test_a_segment_that_is_damaged_is_not_archived_and_the_log_is_not_used_further(keeper: Keeper, place: Path) -> None:
    three_epochs(keeper, committed_lsn=12, settled_lsn=12)
    path = list_segments(keeper.folder / NODE)[1].path
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)
    archive(keeper, place)
    assert len(objects_in(place)) == 1
    found = wal(keeper)
    assert found.state == "failed"
    for advice in (found.detail, keeper.told("wal_archive_failed")[0]["error"]):
        assert path.name in advice
        assert f"remove the folder {keeper.folder / NODE}" in advice
        assert "--accept-lost-wal" not in advice
    with talking(keeper.port, 4) as peer:
        refusal = peer.greet()
        assert isinstance(refusal, Refusal)
        assert refusal.reason == "unavailable"


def test_a_failing_archive_is_reported_once_in_the_status_and_when_it_is_back(tmp_path: Path, place: Path) -> None:
    place.write_text("no folder")
    with closing(Keeper(tmp_path / "keeper", archive=ArchiveStore(str(place)))) as keeper:
        three_epochs(keeper, committed_lsn=12, settled_lsn=12)
        archiver = keeper.safekeeper.archiver
        assert archiver is not None
        for _ in range(3):
            archiver.archive_all(threading.Event())
        assert str(place) in wal(keeper).archive_fault
        assert len(keeper.told("wal_archive_failed")) == 1
        place.unlink()
        archiver.archive_all(threading.Event())
        found = wal(keeper)
        assert (found.archive_fault, found.archived_lsn) == ("", 8)
        assert keeper.told("wal_archive_resumed") == [{}]


def test_an_archive_that_is_away_holds_nobody_up_and_loses_nothing(keeper: Keeper, place: Path) -> None:
    three_epochs(keeper, committed_lsn=12, settled_lsn=12)
    shutil.rmtree(place, ignore_errors=True)
    place.write_text("no folder")
    with pytest.raises(ArchiveUnavailableError):
        ArchiveStore(str(place)).prepare()
    archive(keeper, place)
    keeper.safekeeper.tend()
    assert held(keeper) == [1, 5, 9]
    assert keeper.told("wal_archive_failed")
    with talking(keeper.port, 3) as peer:
        peer.elect(3, from_lsn=9)
        assert peer.append() == 13


def test_three_members_archive_the_same_records_beside_each_other(tmp_path: Path, place: Path) -> None:
    for name in "abc":
        with closing(Keeper(tmp_path / name, archive=ArchiveStore(str(place)))) as keeper:
            three_epochs(keeper, committed_lsn=12)
            archive(keeper, place)
    assert len(objects_in(place)) == 6
    assert len(set(objects_in(place).values())) == 2


@pytest.fixture
def bucket(monkeypatch: pytest.MonkeyPatch) -> Iterator[BucketServer]:
    with bucket_server() as server:
        monkeypatch.setenv("AWS_ENDPOINT_URL", server.url)
        monkeypatch.setenv("AWS_ALLOW_HTTP", "true")
        monkeypatch.setenv("AWS_ACCESS_KEY_ID", "id")
        monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "secret")
        monkeypatch.setenv("AWS_REGION", "us-east-1")
        yield server


def test_a_bucket_holds_each_segment_once_though_answers_are_lost(tmp_path: Path, bucket: BucketServer) -> None:
    bucket.cut_answers = {1}
    url = "s3://bucket/logs"
    with closing(Keeper(tmp_path / "keeper", archive=ArchiveStore(url))) as keeper:
        three_epochs(keeper, committed_lsn=12, settled_lsn=12)
        archive(keeper, url)
        archive(keeper, url)
        keeper.safekeeper.tend()
        assert held(keeper) == [9]
    assert [key.split("/")[1:3] for key in sorted(bucket.objects)] == [[NODE, WAL_ID]] * 2
