"""What comes over a socket is read in whole frames, and what goes to the disk is durable before it is reported."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
from contextlib import closing, suppress
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ledger.errors import InvalidInputError, WalError
from ledger.positions import Epoch, Lsn
from tests.wal.logs import NODE, WAL_ID
from tests.wal.replication.quorums import batch
from wal.replication.file_log import FileLog
from wal.replication.frames import Budget, ConnectionOverError, FrameSocket
from wal.replication.messages import EMPTY, PREFIX_BYTES, Ack, Append, Frame, decode, encode, length_of
from wal.segment import list_segments

ROOT = Path(__file__).parents[3]
PROGRAM = """
import os, sys
from pathlib import Path
from tests.wal.logs import NODE, WAL_ID
from tests.wal.replication.quorums import batch
from wal.replication.file_log import FileLog
log = FileLog(Path(sys.argv[1]), NODE, WAL_ID)
for lsn in range(1, 21):
    log.append(1, batch(lsn, lsn))
    log.sync()
    os.write(1, b"synced\\n")
"""


@st.composite
def streams(draw: st.DrawFn) -> list[bytes]:
    """Frames as they come: in pieces, some of them damaged, the last perhaps torn."""
    frames = st.one_of(
        st.builds(lambda lsn: Frame(Ack(Epoch(1), Lsn(lsn))), st.integers(0, 2**40)),
        st.builds(lambda body: Frame(Append(Epoch(1), EMPTY, Epoch(1), Lsn(0)), body), st.binary(max_size=3000)),
    )
    data = bytearray(b"".join(b"".join(encode(frame)) for frame in draw(st.lists(frames, max_size=5))))
    damage = draw(st.sampled_from(("none", "a bit", "a length", "torn")))
    if data and damage == "a bit":
        data[draw(st.integers(0, len(data) - 1))] ^= 1 << draw(st.integers(0, 7))
    elif data and damage == "a length":
        data[0:4] = draw(st.integers(0, 2**32 - 1)).to_bytes(4, "big")
    elif damage == "torn":
        del data[draw(st.integers(0, len(data))) :]
    cuts = sorted(draw(st.lists(st.integers(0, len(data)), max_size=4)))
    return [bytes(data[begin:end]) for begin, end in zip([0, *cuts], [*cuts, len(data)], strict=True)]


def read_all(pieces: list[bytes]) -> list[object]:
    """Messages and bodies as they are read from a socket, and with what it ends."""
    sender, receiver = socket.socketpair()

    def send() -> None:
        with sender:
            for piece in pieces:
                sender.sendall(piece)

    thread = threading.Thread(target=send)
    found: list[object] = []
    with closing(FrameSocket(receiver, Budget(1 << 20))) as frames:
        thread.start()
        try:
            while True:
                for frame in (frames.next(60.0), *frames.more()):
                    found.append((frame.message, bytes(frame.body)))
        except (InvalidInputError, ConnectionOverError) as error:
            found.append((type(error), str(error)))
        thread.join()
    return found


@settings(deadline=None)
@given(streams())
def test_frames_come_whole_and_in_order_however_they_are_cut(pieces: list[bytes]) -> None:
    expected, data = [], b"".join(pieces)
    with suppress(InvalidInputError):
        while len(data) >= PREFIX_BYTES and (length := length_of(data[:PREFIX_BYTES])) <= len(data):
            frame = decode(data[:length])
            expected.append((frame.message, bytes(frame.body)))
            data = data[length:]
    *found, end = read_all(pieces)
    # Where frames end with a fault, those before it in the same read are not given out: how many came is the network's.
    assert found == expected[: len(found)]
    if end == (ConnectionOverError, "the peer closed the connection"):
        assert len(found) == len(expected)


@pytest.mark.parametrize("body", [b"", batch(1, 3)])
def test_a_frame_with_any_bit_changed_behind_its_length_is_no_frame(body: bytes) -> None:
    whole = b"".join(encode(Frame(Append(Epoch(1), EMPTY, Epoch(1), Lsn(0)), body)))
    assert decode(whole).body == body
    for bit in range(8 * 4, 8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(InvalidInputError, match="CRC of the frame"):
            decode(bytes(damaged))


def test_a_wait_ends_with_its_time_and_when_another_thread_shuts_the_connection_down() -> None:
    sender, receiver = socket.socketpair()
    with sender, receiver.dup() as handle, closing(FrameSocket(receiver, Budget(1 << 20))) as frames:
        with pytest.raises(ConnectionOverError, match="silent"):
            frames.next(0.01)
        sender.sendall(b"".join(encode(Frame(Ack(Epoch(1), Lsn(1))))))
        assert frames.next(60.0).message == Ack(Epoch(1), Lsn(1))
        sender.sendall(bytes(PREFIX_BYTES - 1))
        timer = threading.Timer(0.05, handle.shutdown, (socket.SHUT_RD,))
        timer.start()
        with pytest.raises(ConnectionOverError, match="closed"):
            frames.next(60.0)
        timer.join()


def test_a_segment_that_lost_its_name_is_noticed_and_nothing_in_it_counts(tmp_path: Path) -> None:
    log = FileLog(tmp_path, NODE, WAL_ID)
    log.append(Epoch(1), batch(1, 2))
    log.sync()
    (segment,) = list_segments(tmp_path)
    segment.path.rename(tmp_path / "elsewhere")
    segment.path.write_bytes((tmp_path / "elsewhere").read_bytes())
    log.append(Epoch(1), batch(3, 3))
    with pytest.raises(WalError, match=segment.name):
        log.sync()
    assert log.durable_lsn == 2
    log.abandon()


def test_nothing_is_called_synced_before_it_is(tmp_path: Path, strace: str) -> None:
    trace = tmp_path / "trace"
    done = subprocess.run(
        [strace, "-f", "-qq", "--seccomp-bpf", "-e", "trace=pwritev,pwritev2,fdatasync,write", "-o", str(trace),
         "-e", "inject=fdatasync:error=EIO:when=15", sys.executable, "-c", PROGRAM, str(tmp_path / "log")],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, timeout=100,
    )  # fmt: skip
    is_synced, said = False, 0
    for line in trace.read_text().splitlines():
        if "pwritev" in line:
            is_synced = False
        elif re.search(r"fdatasync.*= 0( |$)", line):
            is_synced = True
        elif 'write(1, "synced' in line:
            said += 1
            assert is_synced
    assert said == 14
    assert done.returncode != 0
    assert b"OSError: [Errno 5]" in done.stderr
