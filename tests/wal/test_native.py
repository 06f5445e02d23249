"""The queue in C does what the one in Python does: the same answers, the same batches, the same bytes."""

from __future__ import annotations

import gc
import os
import random
import resource
import shutil
import subprocess
import sys
import sysconfig
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger.errors import WalError
from ledger.facts.events import BATCH_RECORD_TYPE
from ledger.hlc import Hlc
from ledger.positions import Lsn
from tests.wal.logs import NODE, WAL_ID, hlc_of, payload_of, snapshot
from wal import native, reader
from wal.format import BATCH_RECORD_BYTES, RECORD_HEADER_BYTES, SEGMENT_HEADER_BYTES
from wal.log import AHEAD_BYTES, AHEAD_FROM_BYTES, Log
from wal.queue import NO_FD, Bounds, Queue, fault_of
from wal.recovery import recover
from wal.segment import list_segments

ROOT = Path(__file__).parents[2]
IS_BUILT = native._module is not None
BOUNDS = Bounds(
    node_id=NODE,
    payload_bytes_max=3000,
    entries_max=30,
    bytes_max=9000,
    batch_entries_max=4,
    batch_bytes_max=700,
    batch_timeout_s=0.0,
)


def test_it_is_built_where_there_is_a_compiler() -> None:
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    assert (shutil.which("cc") is not None and header.is_file()) == IS_BUILT


class Side:
    """One of the queues over a log of its own, written by whoever calls ``write``."""

    def __init__(
        self,
        folder: Path,
        core: str,
        bounds: Bounds = BOUNDS,
        segment_bytes: int = 3000,
        fds: tuple[int, int] = (NO_FD, NO_FD),
    ) -> None:
        folder.mkdir()
        self.folder = folder
        self.log = Log(folder, node_id=NODE, wal_id=WAL_ID, epoch=1, next_lsn=1, segment_bytes=segment_bytes)  # type: ignore[arg-type]
        with pytest.MonkeyPatch.context() as patch:
            if core == "python":
                patch.setattr(native, "_module", None)
            self.queue: Queue = native.make_queue(bounds, self.log, *fds)

    def write(self) -> list[tuple[int, int]]:
        """Everything that is queued; the batches: last LSN and records."""
        while self.queue.durable_lsn < self.queue.next_lsn - 1:
            self._step()
        assert self.queue.written_lsn == self.log.written_lsn == self.log.durable_lsn == self.queue.durable_lsn
        return [(lsn, entries) for lsn, _, entries in self.queue.take_durable()]

    def write_one(self) -> None:
        """A batch, if one is queued."""
        durable_lsn = self.queue.durable_lsn
        while self.queue.durable_lsn == durable_lsn < self.queue.next_lsn - 1:
            self._step()

    def _step(self) -> None:
        assert self.queue.write(self.log, 0.0)


RECORDS = st.tuples(
    st.tuples(
        st.one_of(st.integers(-1, 6), st.sampled_from((2**63 - 1, 2**63, 2**80))),
        st.one_of(st.integers(-1, 6), st.sampled_from((2**32 - 1, 2**32, 2**80))),
        st.sampled_from((NODE,) * 9 + ("other",)),
    ).map(Hlc._make),
    st.sampled_from((1, 2, 255, 1, 2, 255, 0, BATCH_RECORD_TYPE, 256, -1, 2**80)),
    st.one_of(st.binary(max_size=300), st.sampled_from((bytes(500), bytes(3000), bytes(3001)))),
)
RISING = st.lists(
    st.tuples(
        st.tuples(st.integers(7, 2**40), st.integers(0, 2**32 - 1), st.just(NODE)).map(Hlc._make),
        st.sampled_from((1, 2, 255)),
        st.one_of(st.binary(max_size=300), st.just(bytes(250))),
    ),
    max_size=40,
    unique_by=lambda record: record[0],
).map(sorted)
STEPS = st.lists(
    st.one_of(
        RECORDS.map(lambda record: [record]),
        st.lists(RECORDS, max_size=4),
        RISING,
        st.sampled_from(("write", "write one", "close")),
    ),
    max_size=20,
)


@given(STEPS)
def test_both_queues_answer_and_write_the_same(steps: Sequence[Any]) -> None:
    with tempfile.TemporaryDirectory() as folder:
        sides = [Side(Path(folder, core), core) for core in ("c", "python")]
        c, python = sides
        for step in [*steps, "write"]:
            answers = []
            for side in sides:
                before, queue = side.queue.state(), side.queue
                answer: object = None
                if step == "write":
                    answer = side.write()
                elif step == "write one":
                    side.write_one()
                elif step == "close":
                    queue.close()
                else:
                    answer = queue.append(*step[0]) if len(step) == 1 else queue.append_all(step)
                    if answer is None:
                        assert queue.state() == before, "half queued"
                    else:
                        assert fault_of(step, BOUNDS, before) is None
                answers.append((answer, tuple(queue.state())))
            assert answers[0] == answers[1]
        for side in sides:
            side.log.close()
        assert snapshot(c.folder) == snapshot(python.folder)


def several(count: int, payload_bytes: int = 100) -> list[tuple[Hlc, int, bytes]]:
    return [(hlc_of(lsn), 1, bytes(payload_bytes)) for lsn in range(1, count + 1)]


@pytest.mark.parametrize("core", ["c", "python"])
@pytest.mark.parametrize("payload_bytes", [0, 100, 100_000, 140_000, 262_110, 262_111, 1_000_000])
def test_records_of_any_size_lie_in_a_batch_one_behind_the_other(tmp_path: Path, core: str, payload_bytes: int) -> None:
    # In C across chunks of memory, whose last bytes a record may just fill, and those that are used again.
    bounds = BOUNDS._replace(
        payload_bytes_max=1 << 20,
        bytes_max=1 << 30,
        entries_max=10**6,
        batch_entries_max=1000,
        batch_bytes_max=64 << 20,
    )
    side = Side(tmp_path / "log", core, bounds, segment_bytes=64 << 20)
    count = 4 if payload_bytes > 10_000 else 1500
    for lsn in range(1, 7 * count, count):
        records = [(hlc_of(n), 1, payload_of(n) + bytes(payload_bytes)) for n in range(lsn, lsn + count)]
        assert side.queue.append_all(records) == lsn
        if lsn > 1:
            side.write_one()
    side.write()
    side.log.close()
    assert recover(side.folder, NODE).records == 7 * count  # type: ignore[arg-type]
    assert recover(side.folder, NODE).cut is None


@pytest.mark.parametrize("core", ["c", "python"])
def test_records_of_each_length_are_summed_as_who_reads_them_does(tmp_path: Path, core: str) -> None:
    # In C by blocks of 16 bytes, four at once, where the processor can; recovery sums with zlib.
    bounds = BOUNDS._replace(entries_max=10_000, bytes_max=1 << 30, batch_entries_max=7, batch_bytes_max=1 << 20)
    side = Side(tmp_path / "log", core, bounds, segment_bytes=64 << 20)
    drawn = random.Random(1)
    payloads = [drawn.randbytes(count) for count in range(700)]
    side.queue.append_all([(hlc_of(lsn), 1, payload) for lsn, payload in enumerate(payloads, 1)])
    side.write()
    side.log.close()
    assert recover(side.folder, NODE).cut is None
    assert [record.payload for record in reader.read(side.folder, Lsn(1), NODE)] == payloads


def test_behind_a_small_batch_there_is_space_for_two_like_it_before_the_next_comes(tmp_path: Path) -> None:
    most = 1 << 20
    bounds = BOUNDS._replace(payload_bytes_max=8000, bytes_max=1 << 20)
    sides = [Side(tmp_path / core, core, bounds, segment_bytes=most) for core in ("c", "python")]
    drawn = random.Random(7)
    data_bytes = SEGMENT_HEADER_BYTES
    for lsn in range(1, 300):
        payload = drawn.randbytes(drawn.choice((0, 100, 7000)))
        size = BATCH_RECORD_BYTES + RECORD_HEADER_BYTES + len(payload)
        data_bytes += size
        for side in sides:
            assert side.queue.append(hlc_of(lsn), 1, payload) == lsn
            side.write()
        end, other_end = (next(side.folder.iterdir()).stat().st_size for side in sides)
        assert end == other_end
        if data_bytes < AHEAD_FROM_BYTES:
            assert end == data_bytes
        else:
            assert min(data_bytes + 2 * size, most) <= end <= min(data_bytes + AHEAD_BYTES, most)


@pytest.mark.parametrize("core", ["c", "python"])
def test_a_batch_of_the_most_bytes_of_the_least_handy_records_is_written_whole(tmp_path: Path, core: str) -> None:
    # Each record but few of a chunk's half: as many pieces of memory as a batch may have.
    bounds = BOUNDS._replace(
        payload_bytes_max=1 << 20,
        bytes_max=1 << 30,
        entries_max=10_000,
        batch_entries_max=10_000,
        batch_bytes_max=64 << 20,
    )
    side = Side(tmp_path / "log", core, bounds, segment_bytes=128 << 20)
    records = several(480, (128 << 10) + 1 - RECORD_HEADER_BYTES)
    side.queue.append_all(records)
    assert side.write() == [(480, 480)]
    side.log.close()
    assert recover(side.folder, NODE).records == 480


@pytest.fixture
def fds() -> Iterator[tuple[int, int]]:
    made = tuple(os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK) for _ in range(2))
    yield made[0], made[1]
    for fd in made:
        os.close(fd)


@pytest.mark.parametrize("core", ["c", "python"])
def test_one_descriptor_is_written_behind_each_sync_and_that_of_the_shipper_before_it_too(
    tmp_path: Path, core: str, fds: tuple[int, int]
) -> None:
    side = Side(tmp_path / "log", core, fds=fds)
    side.queue.append_all(several(10))
    batches = len(side.write())
    side.log.close()
    assert batches > 2
    assert [os.eventfd_read(fd) for fd in fds] == [batches, 2 * batches]


@pytest.mark.parametrize("core", ["c", "python"])
def test_what_was_written_is_told_to_whoever_ships_where_its_sync_fails(
    tmp_path: Path, core: str, fds: tuple[int, int]
) -> None:
    side = Side(tmp_path / "log", core, fds=fds)
    side.queue.append_all(several(3))
    os.close(side.log._descriptor)
    side.log._descriptor = os.open("/dev/null", os.O_WRONLY | os.O_CLOEXEC)  # takes every byte, and syncs nothing
    with pytest.raises(OSError, match="Invalid argument"):
        side.write_one()
    assert (side.queue.written_lsn, side.queue.durable_lsn) == (3, 0)
    assert os.eventfd_read(fds[1]) == 1
    with pytest.raises(BlockingIOError):
        os.eventfd_read(fds[0])
    side.log.abandon()


@pytest.mark.parametrize("core", ["c", "python"])
@pytest.mark.parametrize("is_replaced", [False, True])
def test_what_is_synced_into_a_file_that_lost_its_name_is_not_durable(
    tmp_path: Path, core: str, is_replaced: bool
) -> None:
    side = Side(tmp_path / "log", core)
    side.queue.append_all(several(3))
    (segment,) = list_segments(side.folder)
    segment.path.rename(tmp_path / "elsewhere")
    if is_replaced:
        shutil.copy2(tmp_path / "elsewhere", segment.path)
    with pytest.raises(WalError, match="removed, renamed or replaced"):
        side.write()
    assert (side.queue.durable_lsn, side.queue.take_durable()) == (0, [])
    side.log.abandon()


@pytest.mark.parametrize(
    "record",
    [
        None,
        (),
        ((1, 2), 1, b""),
        ((1, 2, 3), 1, b""),
        (("1", 2, NODE), 1, b""),
        ((1, 2.0, NODE), 1, b""),
        ((1, 2, NODE), "1", b""),
        ((1, 2, NODE), 1, "text"),
        ((1, 2, NODE), 1, bytearray(3)),
    ],
)
def test_what_is_no_record_is_an_error_and_nothing_is_queued(tmp_path: Path, record: Any) -> None:
    if not IS_BUILT:
        return  # mypy sees to it
    side = Side(tmp_path / "log", "c")
    before = side.queue.state()
    with pytest.raises(TypeError):
        side.queue.append_all([(hlc_of(1), 1, b"sound"), record])
    if record:
        with pytest.raises(TypeError):
            side.queue.append(*record)
    assert side.queue.state() == before
    side.log.close()


def test_nothing_that_was_appended_is_kept_once_it_is_written(tmp_path: Path) -> None:
    bounds = BOUNDS._replace(entries_max=10_000, bytes_max=1 << 30, batch_entries_max=1000, batch_bytes_max=1 << 20)
    side = Side(tmp_path / "log", "c", bounds, segment_bytes=64 << 20)
    hlc, payload = Hlc(5_000_000, 0, NODE), bytes(1000)

    def go(first: int, count: int) -> None:
        for n in range(first, first + count, 500):
            side.queue.append_all([(Hlc(n, 0, hlc.node_id), 1, payload) for _ in range(1)])
            for at in range(1, 500):
                side.queue.append(Hlc(n, at, hlc.node_id), 1, payload)
            assert side.queue.append(hlc_of(1), 1, payload) is None
            side.write()
            side.queue.state()

    go(1_000_000, 5_000)
    counted = payload, hlc.node_id, None, True

    def references() -> list[int]:
        gc.collect()
        return [sys.getrefcount(value) for value in counted]

    before = references()
    blocks, peak_kib = sys.getallocatedblocks(), resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    go(2_000_000, 30_000)
    now = references()
    assert now[:2] == pytest.approx(before[:2], abs=20)
    # None and True are shared by all code: garbage of another test may have been collected meanwhile.
    assert all(here - then <= 20 for here, then in zip(now[2:], before[2:], strict=True))
    assert sys.getallocatedblocks() - blocks < 1000
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - peak_kib < 8 << 10
    side.log.close()


@pytest.mark.parametrize("core", ["c", "python"])
def test_a_queue_takes_as_many_bytes_and_records_as_its_bounds_say_and_not_one_more(tmp_path: Path, core: str) -> None:
    most = 5 * (RECORD_HEADER_BYTES + 100)
    for name, bounds in (
        ("bytes", BOUNDS._replace(bytes_max=most)),
        ("entries", BOUNDS._replace(entries_max=5, bytes_max=1 << 20)),
    ):
        side = Side(tmp_path / name, core, bounds)
        for _ in range(2):
            first = side.queue.next_lsn
            records = [(hlc_of(lsn), 1, bytes(100)) for lsn in range(first, first + 5)]
            assert (
                side.queue.append_all([*records[:4], (hlc_of(first + 4), 1, bytes(101)), (hlc_of(99), 1, b"")]) is None
            )
            assert side.queue.append_all(records[:4]) == first
            if name == "bytes":
                assert side.queue.append(hlc_of(first + 4), 1, bytes(101)) is None
            assert side.queue.append(*records[4]) == first + 4
            assert side.queue.append(hlc_of(first + 5), 1, b"") is None
            side.write()
        side.log.close()


def test_without_memory_for_all_records_none_is_queued(tmp_path: Path) -> None:
    program = """
import resource, sys
from pathlib import Path
from ledger.positions import Lsn
from tests.wal.logs import hlc_of
from tests.wal.test_native import BOUNDS, Side
side = Side(Path(sys.argv[1]), "c", BOUNDS._replace(payload_bytes_max=1 << 20, bytes_max=1 << 30, entries_max=100))
payload = bytes(1 << 20)
assert side.queue.append(hlc_of(1), 1, b"x") == 1
before = side.queue.state()
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (30 << 20), resource.RLIM_INFINITY))
try:
    side.queue.append_all([(hlc_of(2), 1, b"y"), *((hlc_of(lsn), 1, payload) for lsn in range(3, 60))])
except MemoryError:
    assert side.queue.state() == before
    print("refused")
assert side.queue.append_all([(hlc_of(lsn), 1, payload) for lsn in range(2, 10)]) == 2
print([entries for _, entries in side.write()])
side.log.close()
"""
    if not IS_BUILT:
        return  # the queue in Python takes no memory but for a list
    done = subprocess.run(
        [sys.executable, "-c", program, str(tmp_path / "log")],
        env=os.environ | {"PYTHONPATH": str(ROOT)}, stdout=subprocess.PIPE, timeout=100, check=True,
    )  # fmt: skip
    assert done.stdout == b"refused\n[1, 1, 1, 1, 1, 1, 1, 1, 1]\n"
    assert recover(tmp_path / "log", NODE).records == 9
