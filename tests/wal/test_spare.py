"""Space written ahead: used by a busy log, gone when the log rests, and never needed."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from tests.wal.logs import NODE, WAIT_S, LogWriter, lsns_in
from wal.format import SEGMENT_HEADER_BYTES
from wal.recovery import recover
from wal.segment import SPARE_NAME, list_segments
from wal.spare import Spare

ROOT = Path(__file__).parents[2]
SEGMENT_BYTES = 100_000


def fill_until_ahead(log: LogWriter, folder: Path) -> Path:
    """Append until the log stands in a segment that was written ahead; that segment."""
    for _ in range(100_000):
        log.wait_durable(log.append(bytes(500)))
        last = list_segments(folder)[-1].path
        if last.stat().st_size == SEGMENT_BYTES:
            return last
    raise AssertionError("no segment was written ahead")


def test_a_busy_log_moves_into_space_written_ahead(tmp_path: Path) -> None:
    with LogWriter(tmp_path, segment_bytes=SEGMENT_BYTES) as log:
        ahead = fill_until_ahead(log, tmp_path)
        assert ahead.read_bytes()[-1000:] == bytes(1000)
        last = log.append()
    assert recover(tmp_path, NODE, last).last_lsn == last


def test_the_next_space_is_written_only_once_half_of_the_last_is_used(tmp_path: Path) -> None:
    with LogWriter(tmp_path, segment_bytes=SEGMENT_BYTES) as log:
        ahead = fill_until_ahead(log, tmp_path)
        offset = log.writer._log._offset
        while log.writer._log._offset < SEGMENT_BYTES // 2:
            assert log.writer._log._spare._thread is None
            log.wait_durable(log.append(bytes(500)))
        log.wait_durable(log.append(bytes(500)))
        assert log.writer._log._spare._thread is not None
        assert offset < SEGMENT_BYTES // 2
        assert list_segments(tmp_path)[-1].path == ahead


def test_a_finished_log_is_as_long_as_its_records(tmp_path: Path) -> None:
    with LogWriter(tmp_path, segment_bytes=SEGMENT_BYTES) as log:
        fill_until_ahead(log, tmp_path)
        last = log.append()
    before = {segment.name: segment.path.stat().st_size for segment in list_segments(tmp_path)}
    assert not (tmp_path / SPARE_NAME).exists()
    recover(tmp_path, NODE, last)
    assert {segment.name: segment.path.stat().st_size for segment in list_segments(tmp_path)} == before


def test_a_log_that_stopped_in_space_written_ahead_is_recovered_and_shortened(tmp_path: Path) -> None:
    log = LogWriter(tmp_path, segment_bytes=SEGMENT_BYTES)
    ahead = fill_until_ahead(log, tmp_path)
    durable_lsn = log.writer.durable_lsn
    as_killed = ahead.read_bytes()
    log.close()
    ahead.write_bytes(as_killed)
    (tmp_path / SPARE_NAME).write_bytes(bytes(777))
    (tmp_path / "00000000000000099999-9.wal.tmp").write_bytes(b"no name yet")

    found = recover(tmp_path, NODE, durable_lsn)

    assert (found.last_lsn, found.cut) == (durable_lsn, None)
    assert SEGMENT_HEADER_BYTES < ahead.stat().st_size < SEGMENT_BYTES
    assert {path.suffix for path in tmp_path.iterdir()} == {".wal"}


def test_an_idle_log_writes_nothing_ahead(tmp_path: Path) -> None:
    with LogWriter(tmp_path) as log:
        for _ in range(20):
            log.wait_durable(log.append())
        assert [path.suffix for path in tmp_path.iterdir()] == [".wal"]


def test_a_spare_that_cannot_be_made_is_done_without(tmp_path: Path) -> None:
    # No file may grow over 60,000 bytes, as if the disk had no room for a whole segment.
    program = """
import resource, sys
from pathlib import Path
from tests.wal.logs import LogWriter
resource.setrlimit(resource.RLIMIT_FSIZE, (60_000, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
with LogWriter(Path(sys.argv[1]), segment_bytes=100_000) as log:
    for _ in range(90):
        log.wait_durable(log.append(bytes(500)))
    log.writer._log._spare._thread.join()
    assert not (Path(sys.argv[1]) / "spare").exists()
"""
    subprocess.run(
        [sys.executable, "-c", program, str(tmp_path)],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        timeout=100,
        check=True,
    )
    assert [path.suffix for path in tmp_path.iterdir()] == [".wal"]
    assert recover(tmp_path, NODE, 90).last_lsn == 90


def test_a_spare_is_taken_only_when_it_is_whole(tmp_path: Path) -> None:
    spare = Spare(tmp_path, 3 << 20)
    assert not spare.take()
    spare.prepare()
    thread = spare._thread
    assert thread is not None
    thread.join(WAIT_S)
    assert spare.ready
    assert spare.take()
    assert not spare.take()
    assert (tmp_path / SPARE_NAME).stat().st_size == 3 << 20
    spare.discard()
    assert (tmp_path / SPARE_NAME).exists()


def test_records_are_the_same_with_and_without_space_written_ahead(tmp_path: Path) -> None:
    with LogWriter(tmp_path, segment_bytes=2000, batch_timeout_us=0) as log:
        for _ in range(400):
            last = log.append()
        log.wait_durable(last)
    assert lsns_in(tmp_path) == list(range(1, 401))
