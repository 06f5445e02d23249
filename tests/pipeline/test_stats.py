"""Stats streamed into windows: put right by weight, late ones told, each exactly once whatever happens to a run."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import subprocess
import time
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, NamedTuple

import pyarrow.dataset as ds
import pytest
from pyspark.sql import DataFrame, SparkSession

from ledger.errors import ConfigurationError, InvalidInputError, NotFoundError
from pipeline.cli.report import duration_s, summary_line
from pipeline.stats import Summary, committed_files, read, rejected, run
from pipeline.stats.destination import Tick, next_tick, refuse_behind
from pipeline.stats.reports import LINE_BYTES_MAX
from tests.forked import Forked
from tests.pipeline.spark_process import IMPORTED

START = datetime(2024, 1, 15, 13, 0, tzinfo=UTC)
WATERMARK_S = 600
END_S = 36_000
START_WITHIN_S = 240.0
FILES = 4
LINES = 30


def at(seconds: float) -> str:
    return (START + timedelta(seconds=seconds)).isoformat(timespec="milliseconds").replace("+00:00", "Z")


def report(seconds: float, **fields: Any) -> dict[str, Any]:
    base = {"tenant_id": "acme", "job_id": "job-1", "dc_id": "use1", "weight": 1, "received": at(seconds)}
    return {**base, "time": at(seconds), **fields}


class Source:
    """A folder as nodes leave it, of which each file was closed at a time of its own."""

    def __init__(self, path: Path) -> None:
        self.path = path / "stats"

    def put(self, closed_s: float, *lines: dict[str, Any] | str, node: str = "node-a", hidden: str = "") -> Path:
        """The next file of the node, closed then, of ``lines``."""
        folder = self.path / node
        folder.mkdir(parents=True, exist_ok=True)
        number = 1 + sum(1 for _ in folder.iterdir())
        file = folder / f"{hidden}20240115T130000Z-00000001-{number:06}.ndjson"
        texts = [line if isinstance(line, str) else json.dumps(line) for line in lines]
        file.write_text("".join(f"{text}\n" for text in texts), encoding="utf-8", errors="surrogateescape")
        closed = (START + timedelta(seconds=closed_s)).timestamp()
        os.utime(file, (closed, closed))
        return file

    def end(self, seconds: float = END_S) -> None:
        """A report so much later that all windows before it close."""
        self.put(seconds, report(seconds, tenant_id="end"))


class EnoughError(Exception):
    """What a test ends a stream with that has no end."""


def rows_of(windows: DataFrame) -> list[dict[str, Any]]:
    """Rows without the columns that are null in them, in order."""
    found = windows.orderBy("window_start", "tenant_id", "dc_id", "what", "name").drop("date").collect()
    return [{name: value for name, value in row.asDict().items() if value is not None} for row in found]


def minute(number: int) -> dict[str, Any]:
    start = datetime(2024, 1, 15, 13, number)
    return {"window_start": start, "window_end": start + timedelta(minutes=1)}


TORN = '{"tenant_id":"acme","job_id":"jo'
WRONG = [report(1, weight=0), report(1, time="x"), report(1, counts={"n": 2**70}), report(1, job_id=None)]
SOUND = json.dumps(report(1))
MALFORMED = [
    *(report(1, tenant_id=name) for name in (5, {"a": 1}, ["a"], "", "\x1b[2J", "acme\n")),
    *(report(1, dc_id=name) for name in (5, "", "x" * 257)),
    *(report(1, time=time) for time in (5, "2024-02-30T13:00:00.000Z", "2024-01-15T25:00:00.000Z")),
    *(
        report(1, values=values)
        for values in ({"V": 1.0}, {"v": "NaN"}, dict.fromkeys((f"v{n}" for n in range(33)), 1))
    ),
]
"""Each is a report to Spark, or nearly one."""
BAD = [
    *(TORN, "[]", "\0\0\0", "\udcff\udcfe", "", "{}", SOUND * 2, f"{SOUND} trailing", f"\ufeff{SOUND}"),
    *(SOUND.replace("use1", "\udcff"), SOUND.replace("use1", r"\ud800")),
    *map(json.dumps, [*WRONG, *MALFORMED]),
    *(SOUND[:-1] + f',"values":{{"v":{number}}}}}' for number in ("1e999", "-1e999", "NaN", "Infinity", "1" * 400)),
    *("[" * 50_000, '{"a":' * 5000, SOUND.replace("acme", "ac\0me"), SOUND + " " * LINE_BYTES_MAX),
]
AHEAD, LATE = report(3600 * 24 * 365 * 500), report(-0.001)
ODD = [
    json.dumps(report(0, tenant_id="odd", values={"v": 1.0}))[:-1] + ',"counts":{"n":1,"n":2},"other":[]}',
    *[report(3, tenant_id="odd", counts={"n": 2**53 - 1}, values={"v": 1e308}, weight=8)] * 3,
    report(4, tenant_id="odd", values={"v": 5e-324}, completed=2**53 - 1),
    report(5, tenant_id="odd", dc_id="euw1", values={"v": 1.797e308}),
]


class Written(NamedTuple):
    """What two runs made of a source; between them it grew."""

    source: str
    dest: str
    first: Summary
    second: Summary
    odd: Path


@pytest.fixture(scope="module")
def written(spark: SparkSession, tmp_path_factory: pytest.TempPathFactory) -> Written:
    folder = tmp_path_factory.mktemp("written")
    source, dest = Source(folder), str(folder / "windows")
    source.put(
        60,
        report(1, completed=10, failed=1, counts={"requests": 5}, values={"latency_ms": 40.0}),
        report(9, completed=14, failed=1, counts={"requests": 7}, values={"latency_ms": 80.04}, weight=3),
        report(5, completed=7, job_id="job-2", workflow_id="part", values={"latency_ms": 0.0}),
        report(59.999, completed=2, job_id="job-2"),
    )
    source.put(120, report(60, counts={"requests": 1}), report(61, dc_id="euw1"), node="node-b")
    source.put(120, report(62), node="node-b", hidden=".")
    odd = source.put(WATERMARK_S, *BAD, *ODD, AHEAD, LATE)
    source.end()
    first = Summary()

    def until_windows_close(batch: Summary) -> None:
        first.add(batch)
        if batch.rows:
            raise EnoughError

    with pytest.raises(EnoughError):
        run(spark, str(source.path), dest, once=False, every_s=1, on_batch=until_windows_close)
    assert spark.streams.active == []

    # One file comes much later than it was closed, when its windows are written.
    source.put(60, report(2), report(3, job_id="job-2"))
    source.put(END_S + 60, report(END_S + 1, tenant_id="end"), report(END_S + 2))
    source.end(2 * END_S)
    second = run(spark, str(source.path), dest)
    return Written(str(source.path), dest, first, second, odd)


def test_a_stream_puts_reports_together_by_window_right_by_weight(spark: SparkSession, written: Written) -> None:
    key = {"tenant_id": "acme", "dc_id": "use1", **minute(0)}
    latency = {"mean": pytest.approx(56.02, abs=0.01), "min": 0.0, "max": 80.04, "p50": 80.0, "p95": 80.0, "p99": 80.0}
    came = {"what": "reports", "name": "reports"}
    other = {"tenant_id": "acme", **minute(1), **came, "lines": 1, "reports": 1}
    once = {"series": 1, "sum": 1.0, "per_second": 1 / 60}
    windows = read(spark, written.dest).where(f"tenant_id = 'acme' AND window_start < '{at(END_S)}'")
    assert rows_of(windows) == [
        {**key, "what": "count", "name": "requests", "lines": 2, "reports": 4, "sum": 26.0, "per_second": 26 / 60},
        {**key, **came, "lines": 4, "reports": 6, "series": 3, "sum": 6.0, "per_second": 0.1},
        {**key, "what": "total", "name": "completed", "lines": 4, "reports": 6, "series": 3, "latest": 23.0},
        {**key, "what": "total", "name": "failed", "lines": 2, "reports": 4, "series": 1, "latest": 1.0},
        {**key, "what": "value", "name": "latency_ms", "lines": 3, "reports": 5, **latency},
        {**other, "dc_id": "euw1", **once},
        {**other, "dc_id": "use1", "what": "count", "name": "requests", "sum": 1.0, "per_second": 1 / 60},
        {**other, "dc_id": "use1", **once},
    ]


def test_a_second_run_adds_what_is_new_and_counts_what_came_after_its_window(
    spark: SparkSession, written: Written
) -> None:
    assert written.second == Summary(batches=2, lines=5, late_groups=2, rows=2)
    added = read(spark, written.dest).where(f"window_start >= '{at(END_S)}'")
    assert [(row["tenant_id"], row["sum"]) for row in rows_of(added)] == [("acme", 1.0), ("end", 2.0)]


def test_what_counts_nowhere_is_counted_and_kept_apart_with_the_reason(spark: SparkSession, written: Written) -> None:
    lines = 7 + len(BAD + ODD) + 2
    assert written.first == Summary(batches=2, lines=lines, bad=len(BAD), ahead=1, late=1, rows=14)
    found = rejected(spark, written.dest).collect()
    assert sorted(row["reason"] for row in found) == ["ahead"] + ["bad"] * len(BAD) + ["late"]
    kept = {row["reason"]: row["line"] for row in found}
    assert (json.loads(kept["late"]), json.loads(kept["ahead"])) == (LATE, AHEAD)
    assert TORN in {row["line"] for row in found}
    assert {row["closed"] for row in found} == {datetime(2024, 1, 15, 13, 10)}
    assert {row["file"] for row in found} == {str(written.odd)}


def test_lines_that_are_no_text_are_kept_so_that_any_reader_can_have_them(written: Written) -> None:
    files = [str(file) for file in committed_files(Path(written.dest)) if "kind=rejected" in str(file)]
    table = ds.dataset(files, format="parquet").to_table()
    table.validate(full=True)
    assert "\ufffd\ufffd" in table["line"].to_pylist()


def test_the_clock_goes_on_as_far_as_reports_bear_it_out_and_never_back() -> None:
    hour_ms = 3_600_000
    newest_ms = 500_000 * hour_ms
    begun = Tick(0, 0)
    assert next_tick(begun, 0, newest_ms, hour_ms) == begun
    noted = next_tick(begun, newest_ms, newest_ms + 99, 0)
    assert noted == Tick(newest_ms, 0), "it was not asked to close"
    later = next_tick(noted, 0, newest_ms + 60_000, hour_ms)
    assert later == Tick(newest_ms, newest_ms + 60_000), "nothing new was read"
    assert next_tick(later, 0, newest_ms, hour_ms) == later, "a clock that was set back a little"
    last = next_tick(later, 0, newest_ms + 10_000 * hour_ms, hour_ms)
    assert last == Tick(newest_ms, newest_ms + hour_ms)
    assert next_tick(last, newest_ms - hour_ms, newest_ms + 9 * hour_ms, hour_ms) == last
    refuse_behind(last, newest_ms + hour_ms - 300_000)
    with pytest.raises(ConfigurationError, match=r"clock says 2027-01-15T08:00:00Z, .* to 2027-01-15T09:00:00Z: set"):
        refuse_behind(last, newest_ms)


def test_files_are_read_by_their_names_and_once_and_the_clock_closes_windows_where_it_is_asked_to_and_each_once(
    spark: SparkSession, tmp_path: Path
) -> None:
    source, dest = Source(tmp_path / "[a]{b}*? +%20"), str(tmp_path / "windows")
    file = source.put(60, report(1), "torn")
    hidden = source.put(60, report(2), hidden=".")
    for name in ("notes.txt", f"{file.name}.gz", f"{hidden.name}.part"):
        (file.parent / name).write_text(SOUND)
    elsewhere = source.put(60, report(3), node="site/node-a")
    # A clock that is far ahead: its file counts nowhere, and no other is passed over for it.
    far_s = (datetime.now(UTC) + timedelta(days=1000) - START).total_seconds()
    source.put(far_s, report(far_s), report(1), node="ahead")
    assert run(spark, str(source.path), dest) == Summary(batches=1, lines=5, bad=1, ahead=2)
    assert [row["file"] for row in rejected(spark, dest).where("reason = 'bad'").collect()] == [str(file)]

    content = file.read_bytes()
    for gone in (file, elsewhere):
        gone.unlink()
    source.put(61, report(4), node="node-b")
    assert run(spark, str(source.path), dest, close=True) == Summary(batches=2, lines=1, rows=1)
    assert [row["lines"] for row in read(spark, dest).collect()] == [3]

    file.write_bytes(content)
    source.put(62, report(5), node="node-b")
    assert run(spark, str(source.path), dest, close=True) == Summary(batches=1, lines=1, late_groups=1)


def test_numbers_at_the_end_of_what_they_may_be_do_not_stop_the_stream(spark: SparkSession, written: Written) -> None:
    (large,) = rows_of(read(spark, written.dest).where("tenant_id = 'odd' AND dc_id = 'euw1' AND what = 'value'"))
    assert (large["max"], large["p50"], large["p99"]) == (1.797e308,) * 3
    odd = rows_of(read(spark, written.dest).where("tenant_id = 'odd' AND dc_id = 'use1'"))
    counted = {row["what"]: row["lines"] for row in odd}
    assert counted == {"reports": len(ODD) - 1, "count": 4, "value": len(ODD) - 1, "total": 1}
    assert next(row["sum"] for row in odd if row["what"] == "count") == 24.0 * (2**53 - 1)


def test_readers_see_committed_files_only(spark: SparkSession, written: Written) -> None:
    folder, before = Path(written.dest), rows_of(read(spark, written.dest))
    committed = committed_files(folder)
    assert {file.parent.parent.name for file in committed} == {"kind=window", "kind=rejected"}
    for file in committed:
        file.with_name("part-of-a-batch-that-was-cut-short.parquet").write_bytes(file.read_bytes())
    assert rows_of(read(spark, written.dest)) == before
    assert rejected(spark, written.dest).count() == len(BAD) + 2
    assert committed_files(folder) == committed
    windows = [str(file) for file in committed if "kind=window" in str(file)]
    assert ds.dataset(windows, format="parquet").count_rows() == len(before)


def test_a_place_is_gone_on_with_only_by_what_it_was_begun_with(spark: SparkSession, written: Written) -> None:
    source, dest = written.source, written.dest
    with pytest.raises(ConfigurationError, match="was begun with window_s 60, not 300"):
        run(spark, source, dest, window_s=300)
    with pytest.raises(ConfigurationError, match="was begun with source"):
        run(spark, f"{source}/node-a", dest)
    with pytest.raises(ConfigurationError, match="is no folder"):
        run(spark, f"{source}/none", dest)
    with pytest.raises(ConfigurationError, match="cannot write to s3"):
        run(spark, source, "s3://bucket/windows")


def test_two_runs_do_not_write_to_one_place(spark: SparkSession, written: Written) -> None:
    lock = Path(written.dest) / "_checkpoint" / ".lock"
    with subprocess.Popen(["flock", lock, "cat"], stdin=subprocess.PIPE, stdout=subprocess.PIPE) as other:
        assert other.stdin is not None
        assert other.stdout is not None
        other.stdin.write(b"held\n")
        other.stdin.flush()
        assert other.stdout.readline() == b"held\n"
        with pytest.raises(ConfigurationError, match="another run writes to"):
            run(spark, written.source, written.dest)


def test_where_nothing_was_written_nothing_is_read(spark: SparkSession, tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="holds no stats"):
        committed_files(tmp_path)
    with pytest.raises(NotFoundError, match="holds no stats"):
        read(spark, str(tmp_path))


def test_the_commit_log_is_read_on_from_where_spark_has_put_it_together(tmp_path: Path) -> None:
    log = tmp_path / "_spark_metadata"
    log.mkdir()

    def entry(*names: str) -> str:
        return "\n".join(["v1", *(json.dumps({"path": f"file:///w/kind%3Dw/{name}", "size": 1}) for name in names)])

    batches = {"8": ["a"], "9": ["b"], "9.compact": ["a", "b"], "10": ["c"], "11": [], ".10.crc": []}
    for name, files in batches.items():
        (log / name).write_text(entry(*files))
    assert committed_files(tmp_path) == [Path(f"/w/kind=w/{name}") for name in "abc"]
    (log / "12").write_text("v2\n")
    with pytest.raises(InvalidInputError, match="is of version v2; v1 is known here"):
        committed_files(tmp_path)


def test_a_run_that_is_killed_is_gone_on_with_and_each_report_counts_once(spark: SparkSession, tmp_path: Path) -> None:
    source, dest = Source(tmp_path), tmp_path / "windows"
    for number in range(FILES):
        job = [report(60 * number + n, job_id=f"job-{n % 7}", counts={"n": 1}, completed=n) for n in range(LINES)]
        source.put(60 * number + 60, *job, "torn")
    source.put(END_S, report(END_S))
    program = "import os, sys; os.setsid(); from tests.pipeline.stats_process import main; main(*sys.argv[1:])"
    with (tmp_path / "said.txt").open("wb") as said:
        child = Forked(IMPORTED, "-c", program, source.path, dest, stdout=said, stderr=said)
    try:
        wait_for_uncommitted_files(child, dest)
    finally:
        os.killpg(child.pid, signal.SIGKILL)
        child.wait()

    rest = run(spark, str(source.path), str(dest))
    assert 0 < rest.lines < FILES * (LINES + 1) + 1, "it was not killed in the middle"
    counts = read(spark, str(dest)).where("what = 'count'").orderBy("window_start").collect()
    assert [(row["window_start"].minute, row["sum"]) for row in counts] == [(n, float(LINES)) for n in range(FILES)]
    latest = read(spark, str(dest)).where("name = 'completed'").collect()
    assert [(row["series"], row["latest"]) for row in latest] == [(7, sum(range(LINES - 7, LINES)))] * FILES
    assert rejected(spark, str(dest)).count() == FILES
    assert run(spark, str(source.path), str(dest)) == Summary()


def wait_for_uncommitted_files(child: subprocess.Popen[bytes], dest: Path) -> None:
    """Until a batch is committed and another has written files."""
    deadline_s = time.monotonic() + START_WITHIN_S
    while time.monotonic() < deadline_s:
        with contextlib.suppress(subprocess.TimeoutExpired):
            pytest.fail(f"it ended with {child.wait(0.02)}")
        written = set(dest.glob("kind=*/*/*.parquet"))
        if (dest / "_spark_metadata" / "0").exists() and written - set(committed_files(dest)):
            return
    pytest.fail("it wrote nothing")


def test_durations_have_a_unit_and_a_bound_and_a_run_is_told_in_one_line() -> None:
    assert [duration_s("window", text) for text in ("90s", "10m", "2h", "7d")] == [90, 600, 7200, 604_800]
    for text in ("0s", "8d", "1", "m", "1.5m", "-1s", ""):
        with pytest.raises(ConfigurationError, match="--window"):
            duration_s("window", text)
    assert summary_line(Summary(lines=1200, rows=3)) == "1,200 lines read, 3 rows of closed windows written"
    assert summary_line(Summary(lines=1, rows=1)) == "1 line read, 1 row of closed windows written"
    assert summary_line(Summary(lines=1, bad=2, late=3, late_groups=4)).endswith(
        "2 bad, 3 late, 4 groups came after their window was closed and are not in it"
    )
