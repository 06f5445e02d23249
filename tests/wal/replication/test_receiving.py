"""What comes over a socket and goes to the disk does so in C as it does in Python: the same, and in this order."""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import threading
import zlib
from contextlib import closing
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ledger.errors import InvalidInputError, WalError
from ledger.positions import Epoch, Lsn
from tests.wal.logs import NODE, WAL_ID
from tests.wal.replication.quorums import batch, lsns_of
from wal import native
from wal.inspect import verify
from wal.replication.file_log import FileLog
from wal.replication.frames import Budget, ConnectionOverError, FrameSocket
from wal.replication.messages import EMPTY, PREFIX_BYTES, Ack, Append, Frame, decode, encode
from wal.segment import list_segments

ROOT = Path(__file__).parents[3]
PROGRAM = """
import os, sys
from pathlib import Path
if sys.argv[2] == "python":
    sys.modules["wal._native"] = None
from tests.wal.logs import NODE, WAL_ID
from tests.wal.replication.quorums import batch
from wal.replication.file_log import FileLog
log = FileLog(Path(sys.argv[1]), NODE, WAL_ID)
for lsn in range(1, 21):
    log.append(1, batch(lsn, lsn))
    log.sync()
    os.write(1, b"synced\\n")
"""


@given(st.binary(max_size=300), st.integers(0, 2**32 - 1), st.integers(0, 70_000))
def test_a_sum_is_that_of_zlib(data: bytes, crc: int, more: int) -> None:
    whole = data + bytes(more)
    assert native.crc32(whole, crc) == zlib.crc32(whole, crc)
    assert native.crc32(memoryview(whole)[1:]) == zlib.crc32(whole[1:])


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
def test_the_same_frames_come_and_the_same_ends(pieces: list[bytes]) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(native, "receive", None)
        expected = read_all(pieces)
    found = read_all(pieces)
    # Where frames end with a fault, those before it in the same read are not given out: how many came is the network's.
    assert found[-1] == expected[-1]
    shorter = min(len(found), len(expected)) - 1
    assert found[:shorter] == expected[:shorter]
    if expected[-1] == (ConnectionOverError, "the peer closed the connection"):
        assert found == expected


@pytest.mark.parametrize("body", [b"", batch(1, 3)])
def test_a_frame_with_any_bit_changed_behind_its_length_is_no_frame(body: bytes) -> None:
    whole = b"".join(encode(Frame(Append(Epoch(1), EMPTY, Epoch(1), Lsn(0)), body)))
    assert decode(whole).body == body
    for bit in range(8 * 4, 8 * len(whole)):
        damaged = bytearray(whole)
        damaged[bit // 8] ^= 1 << bit % 8
        with pytest.raises(InvalidInputError, match="CRC of the frame"):
            decode(bytes(damaged))


def test_who_waits_is_told_to_stop_and_that_time_is_up(core: str, monkeypatch: pytest.MonkeyPatch) -> None:
    if core == "python":
        monkeypatch.setattr(native, "receive", None)
    stop = os.eventfd(0, os.EFD_CLOEXEC)
    sender, receiver = socket.socketpair()
    with sender, closing(FrameSocket(receiver, Budget(1 << 20), stop)) as frames:
        with pytest.raises(ConnectionOverError, match="silent"):
            frames.next(0.01)
        sender.sendall(b"".join(encode(Frame(Ack(Epoch(1), Lsn(1))))))
        assert frames.next(60.0).message == Ack(Epoch(1), Lsn(1))
        sender.sendall(bytes(PREFIX_BYTES - 1))
        os.eventfd_write(stop, 1)
        with pytest.raises(ConnectionOverError, match="stops"):
            frames.next(60.0)
    os.close(stop)


def test_a_segment_that_lost_its_name_is_noticed_and_nothing_in_it_counts(tmp_path: Path, core: str) -> None:
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


def test_both_write_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = []
    for name, module in (("c", native._module), ("python", None)):
        monkeypatch.setattr(native, "_module", module)
        with closing(FileLog(tmp_path / name, NODE, WAL_ID, segment_bytes=4000)) as log:
            for lsn in range(1, 200, 3):
                log.append(Epoch(1), batch(lsn, lsn + 2))
                if lsn % 5:
                    log.sync()
            assert [lsn for _, lsn in lsns_of(log)] == list(range(1, 202))
        assert verify(tmp_path / name)[0].verdict == "ok"
        found.append([(each.name, each.path.read_bytes()) for each in list_segments(tmp_path / name)])
    assert len(found[0]) > 2
    assert [name for name, _ in found[0]] == [name for name, _ in found[1]]
    assert [data for _, data in found[0]] == [data for _, data in found[1]]


@pytest.mark.parametrize("name", ["c", "python"])
def test_nothing_is_called_synced_before_it_is(tmp_path: Path, strace: str, name: str) -> None:
    trace = tmp_path / "trace"
    done = subprocess.run(
        [strace, "-f", "-qq", "--seccomp-bpf", "-e", "trace=pwritev,pwritev2,fdatasync,write", "-o", str(trace),
         "-e", "inject=fdatasync:error=EIO:when=15", sys.executable, "-c", PROGRAM, str(tmp_path / "log"), name],
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
