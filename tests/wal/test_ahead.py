"""Space written ahead: used by a busy log, gone when the log rests, and never needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from tests.wal.logs import NODE, LogWriter
from wal.format import BATCH_RECORD_BYTES, RECORD_HEADER_BYTES
from wal.log import AHEAD_BATCH_BYTES_MAX, AHEAD_BYTES, AHEAD_FROM_BYTES
from wal.reader import end_of_data
from wal.recovery import recover
from wal.segment import list_segments, opened

pytestmark = pytest.mark.usefixtures("core")

ROOT = Path(__file__).parents[2]
PAYLOAD = bytes(range(1, 251))
BATCH_BYTES = BATCH_RECORD_BYTES + RECORD_HEADER_BYTES + len(PAYLOAD)


def data_end(path: Path) -> int:
    with opened(path) as descriptor:
        return end_of_data(descriptor, 0)


def write_until_ahead(log: LogWriter, folder: Path, ahead_bytes: int = BATCH_BYTES, payload: bytes = PAYLOAD) -> Path:
    """Append until so much is written ahead in the log's last segment, and more than a batch of it is unused."""
    for _ in range(100_000):
        log.wait_durable(log.append(payload))
        last = list_segments(folder)[-1].path
        if last.stat().st_size - data_end(last) >= ahead_bytes:
            # All of it is there once the next record is durable: until then a file may be seen growing page by page.
            log.wait_durable(log.append(payload))
            return last
    raise AssertionError("nothing was written ahead")


def test_a_busy_log_writes_ahead_as_much_as_stands_in_it_and_not_more(tmp_path: Path) -> None:
    with LogWriter(tmp_path) as log:
        ahead = write_until_ahead(log, tmp_path)
        assert 0 <= data_end(ahead) - AHEAD_FROM_BYTES < 3 * BATCH_BYTES
        assert data_end(ahead) <= ahead.stat().st_size <= 2 * data_end(ahead)
        size = ahead.stat().st_size
        while data_end(ahead) + 2 * BATCH_BYTES <= size:
            assert ahead.stat().st_size == size
            log.wait_durable(log.append(PAYLOAD))
        write_until_ahead(log, tmp_path, AHEAD_BYTES - 20 * BATCH_BYTES, 20 * PAYLOAD)
        # Whatever the record behind that took of it.
        assert ahead.stat().st_size - data_end(ahead) <= AHEAD_BYTES - len(20 * PAYLOAD)
        last = log.append()
    assert data_end(ahead) == ahead.stat().st_size
    assert recover(tmp_path, NODE, last).last_lsn == last


def test_nothing_is_written_ahead_past_the_end_of_a_segment_or_left_in_one_that_is_finished(tmp_path: Path) -> None:
    most = AHEAD_FROM_BYTES + 20 * BATCH_BYTES
    with LogWriter(tmp_path, segment_bytes=most) as log:
        for _ in range(3):
            ahead = write_until_ahead(log, tmp_path)
            assert ahead.stat().st_size == most
            while list_segments(tmp_path)[-1].path == ahead:
                last = log.append(PAYLOAD)
                log.wait_durable(last)
            assert most - BATCH_BYTES < ahead.stat().st_size == data_end(ahead) <= most
    assert recover(tmp_path, NODE, last).last_lsn == last


def test_a_log_that_stopped_in_space_written_ahead_is_recovered_and_shortened(tmp_path: Path) -> None:
    log = LogWriter(tmp_path)
    ahead = write_until_ahead(log, tmp_path)
    durable_lsn = log.writer.durable_lsn
    as_killed = ahead.read_bytes()
    log.close()
    finished = ahead.read_bytes()
    ahead.write_bytes(as_killed)
    (tmp_path / "00000000000000099999-9.wal.tmp").write_bytes(b"no name yet")

    found = recover(tmp_path, NODE, durable_lsn)

    assert (found.last_lsn, found.cut) == (durable_lsn, None)
    assert as_killed != finished == ahead.read_bytes()
    assert {path.suffix for path in tmp_path.iterdir()} == {".wal"}


def test_a_log_that_is_little_used_writes_nothing_ahead(tmp_path: Path) -> None:
    with LogWriter(tmp_path) as log:
        for _ in range(20):
            log.wait_durable(log.append())
        (segment,) = list_segments(tmp_path)
        assert segment.path.stat().st_size == data_end(segment.path)


def test_for_batches_that_take_long_anyway_nothing_is_written_ahead(tmp_path: Path) -> None:
    with LogWriter(tmp_path) as log:
        for _ in range(20):
            log.wait_durable(log.append(bytes(AHEAD_BATCH_BYTES_MAX) + b"\1"))
        (segment,) = list_segments(tmp_path)
        assert segment.path.stat().st_size == data_end(segment.path)
        log.wait_durable(log.append(PAYLOAD))
        assert segment.path.stat().st_size - data_end(segment.path) == AHEAD_BYTES


def program_of(core: str, text: str) -> str:
    without = "sys.modules['wal._native'] = None" if core == "python" else ""
    return f"import resource, sys\n{without}\nfrom pathlib import Path\nfrom tests.wal.logs import LogWriter\n{text}"


def test_where_there_is_no_room_ahead_the_log_goes_on_without_to_the_last_byte(tmp_path: Path, core: str) -> None:
    # No file may grow over so many bytes, as if the disk were full then.
    room = AHEAD_FROM_BYTES + 50 * BATCH_BYTES
    program = program_of(
        core,
        f"""
resource.setrlimit(resource.RLIMIT_FSIZE, ({room}, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
log = LogWriter(Path(sys.argv[1]))
payload = bytes(range(1, 251))
while not log.failures and log.becomes_durable(log.append(payload), 1):
    pass
print(log.writer.durable_lsn, log.wait_failure())
""",
    )
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, timeout=100, check=True,
    )  # fmt: skip
    durable_lsn, message = done.stdout.decode().split(maxsplit=1)
    assert "File too large" in message
    (segment,) = list_segments(tmp_path)
    assert segment.path.stat().st_size == room
    found = recover(tmp_path, NODE, int(durable_lsn))
    assert found.last_lsn == int(durable_lsn)
    assert room - segment.path.stat().st_size < BATCH_BYTES


@pytest.mark.parametrize(("fault", "ends"), [("EIO", "poisoned"), ("ENOSPC", "closed")])
def test_a_disk_that_fails_as_zeros_are_written_poisons_and_one_that_is_full_does_not(
    tmp_path: Path, strace: str, core: str, fault: str, ends: str
) -> None:
    program = program_of(
        core,
        """
from ledger.errors import WalPoisonedError
log = LogWriter(Path(sys.argv[1]))
payload = bytes(range(1, 251))
try:
    for _ in range(400):
        lsn = log.append(payload)
        while not log.failures and not log.becomes_durable(lsn, 1):
            pass
    log.close()
    print(lsn, "closed")
except WalPoisonedError:
    print(log.writer.durable_lsn, "poisoned")
""",
    )
    done = subprocess.run(
        [strace, "-f", "-qq", "-o", os.devnull, "-e", "trace=pwrite64",
         "-e", f"inject=pwrite64:error={fault}:when=1", sys.executable, "-c", program, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, timeout=100, check=True,
    )  # fmt: skip
    lsn, ended = done.stdout.decode().split()
    assert ended == ends
    assert recover(tmp_path, NODE, int(lsn)).last_lsn == int(lsn)
    assert (int(lsn) < 400) == (ends == "poisoned")
