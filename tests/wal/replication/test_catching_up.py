"""A node that brings its own copy up from the member that has the log, over a real socket."""

from __future__ import annotations

import socket
import threading
from collections.abc import Iterator
from contextlib import closing, contextmanager
from pathlib import Path

from ledger.positions import Epoch, Lsn
from tests.wal.logs import NODE, WAL_ID
from tests.wal.replication.keepers import WAIT_S
from tests.wal.replication.quorums import HOME, batch, lsns_of
from wal.control import EpochStart
from wal.replication.configuration import NO_MEMBERS
from wal.replication.election import Plan
from wal.replication.file_log import FileLog
from wal.replication.leading import Members, carry_out
from wal.replication.messages import EMPTY, Batches, Frame, Greeting, Position, encode

RUN = "1".rjust(32, "0")
TIMEOUT_S = 60.0


@contextmanager
def donor(*frames: Frame) -> Iterator[str]:
    """The address of a member that says all of this as soon as it hears anything, and nothing more."""
    with socket.create_server(("127.0.0.1", 0)) as listening:

        def say() -> None:
            spoken, _ = listening.accept()
            with spoken:
                spoken.recv(1 << 16)
                spoken.sendall(b"".join(part for frame in frames for part in encode(frame)))
                while spoken.recv(1 << 16):
                    pass

        saying = threading.Thread(target=say, daemon=True)
        saying.start()
        yield f"127.0.0.1:{listening.getsockname()[1]}"
        saying.join(WAIT_S)
        assert not saying.is_alive()


def plan_of(address: str, last_lsn: int) -> Plan:
    tail = Position(Epoch(1), Lsn(last_lsn))
    history = (EpochStart(Epoch(1), Lsn(1)), EpochStart(Epoch(2), Lsn(last_lsn + 1)))
    return Plan(Epoch(2), WAL_ID, NO_MEMBERS, Lsn(0), tail, address, Lsn(1), history, Lsn(0))


def test_all_that_the_member_says_at_once_is_taken_in_order(tmp_path: Path) -> None:
    greeting = Greeting("2".rjust(32, "0"), HOME, WAL_ID, Epoch(1), EMPTY, Lsn(0), NO_MEMBERS)
    given = [Frame(Batches(EMPTY, Epoch(1)), batch(lsn, lsn)) for lsn in (1, 2, 3)]
    with donor(Frame(greeting), *given) as address, closing(FileLog(tmp_path, NODE, WAL_ID)) as log:
        carry_out(Members({address: HOME}, RUN, TIMEOUT_S), plan_of(address, 3), log)
        assert lsns_of(log) == [(1, 1), (1, 2), (1, 3)]
