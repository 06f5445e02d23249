"""A safekeeper reads what it keeps again: a log that is damaged at rest gives no vote until it is repaired."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest

from ledger.errors import WalCorruptError
from ledger.positions import Epoch
from tests.wal.logs import NODE
from tests.wal.replication.keepers import WAIT_S, Keeper, talking
from wal.replication.configuration import Configuration, Member
from wal.replication.frames import status
from wal.replication.messages import Configure, Configured, Greeting, Refusal, WalStatus
from wal.scrub import check_segment
from wal.segment import list_segments

ROUND_S = 7 * 86400.0


@pytest.fixture
def keeper(tmp_path: Path) -> Iterator[Keeper]:
    with closing(Keeper(tmp_path / "keeper")) as keeper:
        keeper.scrub_by_hand()
        yield keeper


def two_epochs(keeper: Keeper) -> None:
    """LSN 1 to 4 and 5 to 8, each in a segment of its own."""
    for epoch in (1, 2):
        with talking(keeper.port, epoch) as peer:
            peer.elect(epoch)
            peer.append(4)


def scrub_all(keeper: Keeper) -> None:
    """One round, whose time goes by at once."""
    scrubber = keeper.safekeeper.scrubber
    began_s = time.time()
    for part in range(9):
        scrubber.step(began_s + part * ROUND_S / 4)


def flip_a_bit(keeper: Keeper, at: int) -> str:
    segment = list_segments(keeper.folder / NODE)[at]
    data = bytearray(segment.path.read_bytes())
    data[len(data.rstrip(b"\0")) - 3] ^= 1
    segment.path.write_bytes(data)
    return segment.name


def wal(keeper: Keeper) -> WalStatus:
    (found,) = status("127.0.0.1", keeper.port, None, WAIT_S).wals
    return found


def test_a_sound_log_is_read_and_stays_open(keeper: Keeper) -> None:
    two_epochs(keeper)
    scrub_all(keeper)
    assert wal(keeper).state == "open"
    assert keeper.told("wal_scrub_round_done")[0] == {"node_id": NODE, "segments": 2, "damaged": 0}
    assert wal(keeper).scrubbed_s > time.time()


@pytest.mark.parametrize("at", [0, 1], ids=["an old segment", "the one that is written"])
def test_a_bit_that_flipped_at_rest_is_found_and_the_log_gives_no_vote(keeper: Keeper, at: int) -> None:
    two_epochs(keeper)
    name = flip_a_bit(keeper, at)
    assert wal(keeper).state == "open", "nobody has read it yet"
    scrub_all(keeper)
    (told,) = keeper.told("wal_scrub_damage")
    assert (told["node_id"], name in told["error"]) == (NODE, True)
    found = wal(keeper)
    assert (found.state, name in found.detail) == ("failed", True)
    for run in (3, 4, 5):
        with talking(keeper.port, run) as peer:
            refusal = peer.greet()
            assert isinstance(refusal, Refusal)
            assert name in refusal.detail
    assert len(keeper.told("wal_recovery_failed")) <= 1, "whoever asks again does not have it told, or read, again"
    for path in (keeper.folder / NODE).iterdir():
        path.unlink()
    with talking(keeper.port, 6) as peer:
        assert isinstance(peer.greet(), Greeting), "an empty folder is a new member"


@pytest.mark.parametrize(("others", "place"), [(("0" * 31 + "1", "f" * 32), 2), (("f" * 31 + "0", "f" * 32), 1)])
def test_members_of_one_log_read_it_at_different_times(keeper: Keeper, others: tuple[str, str], place: int) -> None:
    two_epochs(keeper)
    members = tuple(sorted(Member(member_id, "use1") for member_id in (wal(keeper).member_id, *others)))
    with talking(keeper.port, 3) as peer:
        peer.elect(3)
        assert isinstance(peer.ask(Configure(Epoch(3), Configuration(1, Epoch(3), "use1", False, members))), Configured)
    (copy,) = keeper.safekeeper._copies()
    assert (copy.place, copy.places) == (place, 4), "three members, and the node"


def test_a_segment_that_is_cut_while_it_is_read_is_not_called_damaged(keeper: Keeper) -> None:
    two_epochs(keeper)
    (kept,) = keeper.safekeeper.logs.all()
    segment = list_segments(kept.folder)[1]
    (copy,) = keeper.safekeeper._copies()
    with talking(keeper.port, 3) as peer:
        assert peer.elect(3, from_lsn=5).lsn == 4, "the end that diverges is cut"
        (cut,) = keeper.told("wal_divergent_tail_cut")
        assert (cut["node_id"], cut["epoch"], cut["first_lsn"], cut["last_lsn"]) == (NODE, 2, 5, 8)
        error = check_segment(copy, segment, None) or WalCorruptError(segment.name, 0, "cut")
        keeper.safekeeper._scrubbed(copy, segment, error)
        assert wal(keeper).state == "open"
        peer.append(1)
