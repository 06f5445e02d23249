"""``dump`` and ``verify`` for operators: they say what is there and change nothing, even beside a writer."""

from __future__ import annotations

import dataclasses
import itertools
import json
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace

import pytest

from ledger.chain.record import EventRecord, encode
from ledger.errors import NotFoundError
from tests.wal.logs import NODE, WAIT_S, WAL_ID, LogWriter, hlc_of, naive_batch, naive_segment, snapshot
from wal import control, inspect
from wal.inspect import SETTLE_S, dump, verify, wal_folders
from wal.segment import FolderLock


def a_log(folder: Path) -> list[Path]:
    folder.mkdir(exist_ok=True, parents=True)
    return [naive_segment(folder, [[1], [2, 3]]), naive_segment(folder, [[4, 5], [6, 7]], base_lsn=4, epoch=2)]


def test_a_sound_log_is_reported_so(tmp_path: Path) -> None:
    a_log(tmp_path)
    before = snapshot(tmp_path)
    (report,) = verify(tmp_path)
    assert report.verdict == "ok"
    assert (report.segments, report.records, report.first_lsn, report.last_lsn, report.last_epoch) == (2, 7, 1, 7, 2)
    assert (report.node_id, report.wal_id) == (NODE, WAL_ID)
    assert json.loads(json.dumps(dataclasses.asdict(report)))["verdict"] == "ok"
    assert snapshot(tmp_path) == before


def test_a_wal_dir_is_taken_as_all_the_logs_in_it(tmp_path: Path) -> None:
    for node in ("a", "b"):
        a_log(tmp_path / node)
    (tmp_path / "other").mkdir()
    assert wal_folders(tmp_path) == [tmp_path / "a", tmp_path / "b"]
    assert [report.verdict for report in verify(tmp_path)] == ["ok", "ok"]
    assert len(list(dump(tmp_path))) == 2 * 11


def test_a_folder_without_a_log_is_said_to_be_one(tmp_path: Path) -> None:
    with pytest.raises(NotFoundError, match="holds no write-ahead log"):
        verify(tmp_path)
    with pytest.raises(NotFoundError, match="not a folder"):
        list(dump(tmp_path / "missing"))


def test_each_record_is_dumped_with_the_state_that_the_control_file_shows(tmp_path: Path) -> None:
    a_log(tmp_path)
    assert {item["state"] for item in dump(tmp_path)} == {"PENDING"}, "nothing is known without a control file"
    known = control.Control(WAL_ID, NODE, 2, hlc_of(7), durable_lsn=7, committed_lsn=6, chained_lsn=4, signed_lsn=2)
    control.store(tmp_path, known)
    said = [(item["lsn"], item["state"]) for item in dump(tmp_path) if item["action"] != "BATCH"]
    states = [*["COMPACTED"] * 2, *["GLOBAL"] * 2, *["REGIONAL"] * 2, "PENDING"]
    assert said == list(zip(range(1, 8), states, strict=True))
    # A batch is as far as its last record is.
    batches = [item["state"] for item in dump(tmp_path) if item["action"] == "BATCH"]
    assert batches == ["COMPACTED", "GLOBAL", "REGIONAL", "PENDING"]


def test_a_log_without_a_segment_yet_is_sound(tmp_path: Path) -> None:
    FolderLock(tmp_path / NODE).release()
    (report,) = verify(tmp_path)
    assert (report.verdict, report.node_id, report.records, report.last_lsn) == ("ok", NODE, 0, 0)


def test_a_torn_tail_is_reported_and_left_alone(tmp_path: Path) -> None:
    second = a_log(tmp_path)[1]
    second.write_bytes(second.read_bytes()[:-1])
    before = snapshot(tmp_path)
    (report,) = verify(tmp_path)
    assert (report.verdict, report.segment) == ("torn", second.name)
    assert "cut short" in (report.reason or "")
    assert snapshot(tmp_path) == before


def test_corruption_is_reported_with_its_place(tmp_path: Path) -> None:
    first = a_log(tmp_path)[0]
    data = bytearray(first.read_bytes())
    data[200] ^= 1
    first.write_bytes(data)
    (report,) = verify(tmp_path)
    assert (report.verdict, report.segment) == ("corrupt", first.name)
    assert report.offset is not None
    assert report.offset <= 200


def test_damage_below_the_control_file_is_corruption(tmp_path: Path) -> None:
    second = a_log(tmp_path)[1]
    control.store(tmp_path, control.Control(WAL_ID, NODE, 2, hlc_of(7), durable_lsn=7))
    whole = second.read_bytes()
    second.write_bytes(whole[:-1])
    assert verify(tmp_path)[0].verdict == "corrupt"
    second.write_bytes(whole[: -len(whole) // 2])
    assert verify(tmp_path)[0].verdict == "corrupt"
    second.write_bytes(whole)
    assert verify(tmp_path)[0].verdict == "ok"
    second.unlink()
    assert "ends below LSN 7" in (verify(tmp_path)[0].reason or "")


def test_a_damaged_control_file_is_corruption(tmp_path: Path) -> None:
    a_log(tmp_path)
    (tmp_path / "control").write_bytes(b"nonsense")
    (report,) = verify(tmp_path)
    assert (report.verdict, report.segment) == ("corrupt", "control")


def test_dump_shows_every_record_with_its_place(tmp_path: Path) -> None:
    with LogWriter(tmp_path) as log:
        event = encode(*EventRecord("acme", "job-1", b'{"type":"JobCreated"}'))
        log.wait_durable(log.append(event))
        log.wait_durable(log.append(b"\xff\xfe"))
    items = list(dump(tmp_path))
    assert [item["action"] for item in items] == ["BATCH", "ENQUEUE", "BATCH", "ENQUEUE"]
    assert items[1] == {
        "segment": "00000000000000000001-1.wal",
        "offset": 178,
        "lsn": 1,
        "epoch": 1,
        "hlc": str(hlc_of(1)),
        "type": 1,
        "action": "ENQUEUE",
        "length": 34 + len(event),
        "tenant_id": "acme",
        "job_id": "job-1",
        "payload": '{"type":"JobCreated"}',
        "state": "PENDING",
    }
    assert items[3]["payload_hex"] == "fffe"
    json.dumps(items)


def test_dump_goes_on_behind_damage(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(inspect, "SETTLE_S", 0.0)  # Nobody writes.
    segment = naive_segment(tmp_path, [[1], [2, 3, 4], [5, 6]])
    whole = segment.read_bytes()
    places = [item["offset"] for item in dump(tmp_path)]
    for at in range(120, len(whole), 9):
        segment.write_bytes(whole[:at] + bytes((whole[at] ^ 2,)) + whole[at + 1 :])
        items = list(dump(tmp_path))
        errors = [item for item in items if "error" in item]
        assert len(errors) == 1
        assert errors[0]["offset"] in places
        assert errors[0]["offset"] <= at  # type: ignore[operator]
        if at < places[-3]:  # type: ignore[operator]
            assert items[-1]["lsn"] == 6


def test_beside_a_running_writer_the_log_is_always_sound(tmp_path: Path) -> None:
    stop, batches = threading.Event(), threading.Semaphore(5)
    with LogWriter(tmp_path, segment_bytes=300_000, queue_max_entries=10**6) as log:

        def write() -> None:
            while batches.acquire() and not stop.is_set():
                for _ in range(200):
                    last = log.append(bytes(700))
                log.wait_durable(last)

        writing = threading.Thread(target=write)
        writing.start()
        try:
            log.wait_durable(1)
            for _ in range(10):
                # Some at each look: whoever wrote on and on would be faster than whoever reads.
                batches.release(4)
                assert verify(tmp_path)[0].verdict == "ok"
                batches.release(4)
                assert not [item for item in dump(tmp_path) if "error" in item]
        finally:
            stop.set()
            batches.release()
            writing.join()


@pytest.mark.parametrize(
    "is_sound",
    [
        lambda folder: verify(folder)[0].verdict == "ok",
        lambda folder: not [one for one in dump(folder) if "error" in one],
    ],
    ids=["verify", "dump"],
)
def test_a_writer_that_stands_still_for_a_moment_in_the_middle_of_a_batch_has_damaged_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, is_sound: Callable[[Path], bool]
) -> None:
    segment = naive_segment(tmp_path, [[1], [2, 3]])
    whole, looks = segment.read_bytes(), itertools.count(1)

    def goes_on_after_the_third_look(_interval_s: float) -> None:
        if next(looks) == 3:
            segment.write_bytes(whole)

    segment.write_bytes(whole[:-5])
    clock = SimpleNamespace(sleep=goes_on_after_the_third_look, monotonic=lambda: 0.0)
    monkeypatch.setattr(inspect, "time", clock)
    assert is_sound(tmp_path)


def test_damage_that_batches_stand_behind_is_told_at_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    segment = naive_segment(tmp_path, [[1], [2, 3], [4]])
    whole = segment.read_bytes()
    places = [item["offset"] for item in dump(tmp_path)]
    segment.write_bytes(whole[:-200] + bytes((whole[-200] ^ 2,)) + whole[-199:])
    monkeypatch.setattr(inspect, "time", None)  # No look at a clock, no pause.
    (error,) = [item for item in dump(tmp_path) if "error" in item]
    assert error["offset"] in places[2:-2]


class HalfWriter(threading.Thread):
    """Appends batches to a segment, each in two writes, until it is stopped; halves stand as long as wholes do."""

    STANDS_S = 0.005

    def __init__(self, segment: Path) -> None:
        super().__init__()
        self._segment = segment
        self._stopped = threading.Event()
        self.half_stands = threading.Event()
        self._half_since_s: float | None = None
        self._longest_s = 0.0

    def run(self) -> None:
        with open(self._segment, "ab", buffering=0) as file:
            lsn = 2
            while not self._stopped.wait(self.STANDS_S):
                batch = naive_batch(range(lsn, lsn + 20))
                began_s = self._half_since_s = time.monotonic()
                file.write(batch[:300])
                self.half_stands.set()
                self._stopped.wait(self.STANDS_S)
                self.half_stands.clear()
                file.write(batch[300:])
                self._half_since_s = None
                self._longest_s = max(self._longest_s, time.monotonic() - began_s)
                lsn += 20

    def longest_half_s(self) -> float:
        """How long a batch stood half written at most, since this was asked last."""
        since_s = self._half_since_s
        longest_s, self._longest_s = self._longest_s, 0.0
        return longest_s if since_s is None else max(longest_s, time.monotonic() - since_s)

    def stop(self) -> None:
        self._stopped.set()
        self.join()


def test_a_batch_that_is_half_written_when_looked_at_is_not_damage(tmp_path: Path) -> None:
    writer = HalfWriter(naive_segment(tmp_path, [[1]]))
    writer.start()
    looks = 0
    try:
        while looks < 10:
            assert writer.half_stands.wait(WAIT_S)
            writer.longest_half_s()
            verdict = verify(tmp_path)[0].verdict
            if writer.longest_half_s() > SETTLE_S / 2:
                continue  # the writer was held up for so long that the half was rightly taken for damage
            assert verdict == "ok"
            looks += 1
    finally:
        writer.stop()
