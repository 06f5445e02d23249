"""System calls that fail, fall short, are late or are the last one: each ends as the writer's contract says.

The faults are real: strace injects them into a process that writes a log, one system call at a time.
"""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

import pytest

from ledger.facts.events import BATCH_RECORD_TYPE
from tests.conftest import spread
from tests.forked import run_forked
from tests.wal.logs import NODE, LogWriter, lsns_in, naive_segment, traced
from wal.inspect import dump
from wal.recovery import recover
from wal.segment import list_segments

RECORDS = 120
SEGMENT_BYTES = 1200
SEED = 7
WRITER = Path(__file__).with_name("writer_process.py")
IMPORTED = {
    "c": "import tests.wal.logs, tests.wal.writer_process",
    "python": "import sys; sys.modules['wal._native'] = None; import tests.wal.logs, tests.wal.writer_process",
}
WRITE = "pwritev,pwritev2"
RING = r'"\1\0\0\0\0\0\0\0"'
"""What is written to the descriptor, as strace shows it."""
CALLS = (WRITE, "fdatasync", "fsync", "rename")


def run_writer(folder: Path, tracer: list[str], *, core: str, records: int = RECORDS) -> list[str]:
    """What the writing process said, under strace."""
    numbers = map(str, (1, 1, records, SEGMENT_BYTES, SEED))
    return run_forked(IMPORTED[core], WRITER, folder, *numbers, tracer=tracer).stdout.splitlines()


def durable_of(said: list[str]) -> int:
    return max((int(line.split()[1]) for line in said if line.startswith("durable ")), default=0)


def trace_of(trace: Path) -> list[tuple[str, str]]:
    """The lines of an strace log: thread and call."""
    return [(thread, call) for thread, call in (line.split(maxsplit=1) for line in trace.read_text().splitlines())]


def by_thread(trace: Path) -> dict[str, list[str]]:
    """The lines of an strace log, thread by thread."""
    lines: dict[str, list[str]] = {}
    for thread, call in trace_of(trace):
        lines.setdefault(thread, []).append(call)
    return lines


def check_recovery(folder: Path, durable_lsn: int) -> None:
    """All that was reported durable is there, the rest is whole or gone, and the log goes on."""
    found = recover(folder, NODE, durable_lsn)
    assert found.last_lsn >= durable_lsn
    assert lsns_in(folder) == list(range(1, found.last_lsn + 1))
    with LogWriter(folder, epoch=found.last_epoch + 1, next_lsn=found.last_lsn + 1) as log:
        log.batches([1, 2])
    assert recover(folder, NODE, found.last_lsn + 3).last_lsn == found.last_lsn + 3


def count_calls(strace: str, folder: Path, core: str) -> dict[str, int]:
    """How often the busiest thread of an undisturbed run makes each call."""
    folder.mkdir()
    trace = folder.with_suffix(".trace")
    said = run_writer(folder, traced(strace, trace, f"trace={','.join(CALLS)}"), core=core)
    assert said[-1] == "closed"
    counts: dict[tuple[str, str], int] = {}
    for thread, call in re.findall(r"^(\d+) +(\w+)\(", trace.read_text(), re.MULTILINE):
        counts[thread, call] = counts.get((thread, call), 0) + 1
    return {call: max(number for (_, made), number in counts.items() if made in call.split(",")) for call in CALLS}


@pytest.fixture(scope="module", params=list(IMPORTED))
def core(request: pytest.FixtureRequest) -> str:
    """By what batches are written: in one call of C, or system call by system call by Python."""
    return str(request.param)


@pytest.fixture(scope="module")
def calls(strace: str, tmp_path_factory: pytest.TempPathFactory, core: str) -> dict[str, int]:
    counts = count_calls(strace, tmp_path_factory.mktemp("calls") / "log", core)
    assert counts["fdatasync"] > 10
    assert counts["rename"] >= 4
    return counts


def occasions(number: int) -> list[int]:
    """Which of ``number`` calls to break. One run may make half as many as another, so none but of the first."""
    return spread(sorted({1, 2, 3, number // 3} - {0}), 3)


@pytest.mark.exhaustive
@pytest.mark.parametrize("fault", ["error=EIO", "error=ENOSPC", "signal=KILL"])
@pytest.mark.parametrize("call", CALLS)
def test_any_system_call_may_fail_or_be_the_last(
    tmp_path: Path, strace: str, calls: dict[str, int], core: str, call: str, fault: str
) -> None:
    for number in occasions(calls[call]):
        folder = tmp_path / str(number)
        folder.mkdir()
        tracer = traced(strace, os.devnull, f"trace={call}", f"inject={call}:{fault}:when={number}")
        said = run_writer(folder, tracer, core=core)
        if fault == "signal=KILL":
            assert not {"closed", "poisoned"} & set(said)
        else:
            assert said[-1] in ("poisoned", "refused")
        check_recovery(folder, durable_of(said))


def test_a_failed_fsync_is_never_followed_by_another_batch(tmp_path: Path, strace: str, core: str) -> None:
    folder = tmp_path / "log"
    folder.mkdir()
    trace = tmp_path / "trace"
    tracer = traced(strace, trace, f"trace={WRITE},fdatasync", "inject=fdatasync:error=EIO:when=5")
    said = run_writer(folder, tracer, core=core)
    assert said[-1] == "poisoned"
    calls = by_thread(trace)
    (writer,) = [thread for thread, lines in calls.items() if any("EIO" in line for line in lines)]
    assert "EIO" in calls[writer][-1]


def test_nothing_is_reported_durable_before_its_fsync_has_returned(tmp_path: Path, strace: str, core: str) -> None:
    # All calls in their order, with every fsync made slow.
    folder = tmp_path / "log"
    folder.mkdir()
    trace = tmp_path / "trace"
    tracer = traced(strace, trace, f"trace={WRITE},fdatasync,write", "inject=fdatasync:delay_enter=3000")
    said = run_writer(folder, tracer, core=core, records=300)
    assert said[-1] == "closed"
    calls = by_thread(trace)
    (writer,) = [thread for thread, lines in calls.items() if any("iov_len=58" in line for line in lines)]
    unsynced = synced = rings = 0
    for line in calls[writer]:
        if "pwritev" in line and "resumed" not in line:
            assert unsynced == 0, "two unsynced batches"
            unsynced = 1 if "iov_len=58" in line else 0
        elif re.search(r"fdatasync.*= 0( |$)", line):
            synced += unsynced
            unsynced = 0
        elif RING in line:
            rings += 1
            assert unsynced == 0, "woken before the fsync returned"
            assert rings == synced
    assert rings > 10

    # Nor does a caller see a batch before that asks without a wake-up.
    ends = [int(str(item["last_lsn"])) for item in dump(folder) if item["type"] == BATCH_RECORD_TYPE]
    assert len(ends) == rings
    synced = reports = 0
    for thread, call in trace_of(trace):
        synced += thread == writer and bool(re.search(r"fdatasync.*= 0( |$)", call))
        if report := re.search(r'"durable (\d+)', call):
            reports += 1
            assert int(report[1]) <= ends[synced - 1]
    assert 10 < reports <= rings, "who comes late hears of several at once"


def test_what_is_written_is_not_durable_while_it_is_synced(tmp_path: Path, strace: str, core: str) -> None:
    # The second fsync of the writer's thread begins a second late.
    program = """
import os, sys
from pathlib import Path
from tests.forked import run_forked
from tests.wal.logs import LogWriter
log = LogWriter(Path(sys.argv[1]))
log.wait_durable(log.append())
lsn = log.append()
while log.writer.written_lsn < lsn:
    os.sched_yield()
print(log.writer.durable_lsn, log.told)
log.wait_durable(lsn)
print(log.writer.durable_lsn, log.told)
log.close()
"""
    tracer = traced(strace, os.devnull, "trace=fdatasync", "inject=fdatasync:delay_enter=1000000:when=2")
    done = run_forked(IMPORTED[core], "-c", program, tmp_path, tracer=tracer)
    assert done.stdout == "1 [1]\n2 [1, 2]\n"


def test_all_writers_are_waited_for_where_half_came_back_sooner_than_a_sync(
    tmp_path: Path, strace: str, core: str
) -> None:
    # The second fsync of the writer's thread, that of 32 records, takes two seconds.
    program = """
import sys
from pathlib import Path
from tests.wal.logs import LogWriter
with LogWriter(Path(sys.argv[1]), batch_timeout_us=3_600_000_000) as log:
    log.batches([1, 32])
    for _ in range(16):
        last = log.append()
    assert not log.becomes_durable(last, within_s=0.05)
    for _ in range(16):
        last = log.append()
    log.wait_durable(last)
"""
    tracer = traced(strace, os.devnull, "trace=fdatasync", "inject=fdatasync:delay_enter=2000000:when=2")
    run_forked(IMPORTED[core], "-c", program, tmp_path, tracer=tracer)
    ends = [item["last_lsn"] for item in dump(tmp_path) if item["type"] == BATCH_RECORD_TYPE]
    assert ends == [1, 33, 65]


def test_a_write_that_falls_short_is_finished(tmp_path: Path, strace: str) -> None:
    # A file size limit makes the first write fall short. It is lifted while the second waits to begin.
    program = """
import os, resource, sys
from pathlib import Path
from tests.forked import run_forked
from tests.wal.logs import LogWriter
folder = Path(sys.argv[1])
log = LogWriter(folder)
(segment,) = folder.glob("*.wal")
log.wait_durable(log.append())
limit = segment.stat().st_size + 100
hard = resource.getrlimit(resource.RLIMIT_FSIZE)[1]
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, hard))
lsn = log.append(bytes(5000))
while segment.stat().st_size < limit:
    os.sched_yield()
resource.setrlimit(resource.RLIMIT_FSIZE, (hard, hard))
log.wait_durable(lsn)
log.close()
print("closed")
"""
    tracer = traced(strace, os.devnull, "trace=pwrite64", "inject=pwrite64:delay_enter=3000000:when=1")
    assert run_forked(IMPORTED["c"], "-c", program, tmp_path, tracer=tracer).stdout == "closed\n"
    found = recover(tmp_path, NODE, 2)
    assert (found.last_lsn, found.cut) == (2, None)


@pytest.mark.parametrize("room", [1, 57, 58, 59, 100, 3000])
def test_a_disk_that_fills_up_in_the_middle_of_a_batch_poisons(tmp_path: Path, room: int) -> None:
    # A file size limit stands for the full disk: the write falls short, and the rest of it fails.
    program = """
import resource, sys
from pathlib import Path
from ledger.errors import WalPoisonedError
from tests.forked import run_forked
from tests.wal.logs import LogWriter
folder, room = Path(sys.argv[1]), int(sys.argv[2])
log = LogWriter(folder)
log.batches([1, 3])
(segment,) = folder.glob("*.wal")
limit = segment.stat().st_size + room
resource.setrlimit(resource.RLIMIT_FSIZE, (limit, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))
log.append(bytes(5000))
print(log.wait_failure())
try:
    log.append()
except WalPoisonedError:
    print("refused")
print(log.told)
"""
    assert resource.getrlimit(resource.RLIMIT_FSIZE)[0] == resource.RLIM_INFINITY
    done = run_forked(IMPORTED["c"], "-c", program, tmp_path, str(room), check=True)
    message, refused, told = done.stdout.splitlines()
    assert "File too large" in message
    assert "must restart" in message
    assert (refused, told) == ("refused", "[1, 4]")
    (segment,) = list_segments(tmp_path)
    assert segment.path.stat().st_size > 0
    found = recover(tmp_path, NODE, 4)
    assert found.last_lsn == 4
    assert found.cut is not None
    assert (found.cut["cut_bytes"] > 0) == (room > 0)
    assert lsns_in(tmp_path) == [1, 2, 3, 4]


@pytest.mark.parametrize("fault", ["error=EIO", "signal=KILL"])
@pytest.mark.parametrize("call", [WRITE, "ftruncate", "fsync", "rename"])
def test_a_repair_may_stop_at_any_system_call_and_is_then_made_again(
    tmp_path: Path, strace: str, call: str, fault: str
) -> None:
    program = """
import sys
from pathlib import Path
from wal.inspect import dump
from wal.recovery import recover
recover(Path(sys.argv[1]), "node-a", 5)
"""
    stopped = 0
    for number in range(1, 6):
        folder = tmp_path / str(number)
        folder.mkdir()
        segment = naive_segment(folder, [[1], [2, 3, 4, 5], [6, 7, 8, 9]])
        torn = segment.read_bytes()[:-3]
        segment.write_bytes(torn)
        tracer = traced(strace, os.devnull, f"trace={call}", f"inject={call}:{fault}:when={number}")
        done = run_forked(IMPORTED["c"], "-c", program, folder, tracer=tracer)
        stopped += done.returncode != 0
        found = recover(folder, NODE, 5)
        assert (found.last_lsn, found.records) == (8, 8)
        assert lsns_in(folder) == list(range(1, 9))
        # However often it was begun, a whole copy of the torn batch was kept.
        assert any(torn.endswith(copy.read_bytes()) for copy in folder.glob("torn-*") if copy.stat().st_size > 58)
    assert stopped > 0


def test_what_recovery_keeps_of_the_last_batch_is_written_again_and_then_synced(tmp_path: Path, strace: str) -> None:
    # After a failed fsync the pages may count as clean: without the write, the fsync would do nothing.
    folder = tmp_path / "log"
    folder.mkdir()
    trace = tmp_path / "trace"
    segment = naive_segment(folder, [[1], [2, 3]])
    opening = next(item for item in dump(folder) if item["action"] == "BATCH" and item["lsn"] == 2)
    start = int(str(opening["offset"]))
    program = (
        'import sys; from pathlib import Path; from wal.recovery import recover; recover(Path(sys.argv[1]), "node-a")'
    )
    tracer = traced(strace, trace, f"trace={WRITE},fsync", "decode-fds=path")
    run_forked(IMPORTED["c"], "-c", program, folder, tracer=tracer, check=True)
    written, synced = trace.read_text().splitlines()[:2]
    size = segment.stat().st_size - start
    assert re.search(rf"pwritev2?\(\d+<{segment}>.*iov_len={size}\}}\], 1, {start}", written)
    assert re.search(rf"fsync\(\d+<{segment}>\) += 0", synced)
