"""A place that stats are written to: gone on with only while it is whole, for Spark loses what it thinks is written."""

from __future__ import annotations

from pathlib import Path

import pytest
from pyspark.sql import SparkSession

from ledger.errors import ConfigurationError
from pipeline.stats.destination import Destination, Tick, check_logs

NAMES = ["0", "9.compact", "10", ".10.crc", ".11.8f3.tmp", "_x"]
"""Of a log whose newest batch is 10."""
WANTED = {"source": "/srv/stats", "window_s": 60}


def test_the_logs_of_a_place_are_those_that_a_run_leaves_wherever_it_is_killed() -> None:
    check_logs("d", is_described=False, commits=[], written=[], offsets=[])
    check_logs("d", is_described=True, commits=[], written=[], offsets=["0"])
    for commits, written in ((["9"], ["9"]), (["9"], NAMES), (NAMES, NAMES)):
        check_logs("d", is_described=True, commits=commits, written=written, offsets=NAMES)


@pytest.mark.parametrize(
    ("is_described", "commits", "written", "offsets", "why"),
    [
        (False, [], ["0"], [], "was written to before"),
        (False, [], ["9.compact"], [], "was written to before"),
        (False, [], [], ["0"], "was written to before"),
        (False, NAMES, NAMES, NAMES, "was written to before"),
        (True, [], ["0"], [], "holds batch 0, and its _checkpoint knows of none after -1"),
        (True, ["9"], NAMES, ["9"], "holds batch 10, and its _checkpoint knows of none after 9"),
        (True, NAMES, ["9.compact"], NAMES, "has come to batch 10, and _spark_metadata to 9"),
        (True, NAMES, [], NAMES, "has come to batch 10, and _spark_metadata to -1"),
    ],
)
def test_a_place_that_has_lost_a_part_is_refused(
    is_described: bool, commits: list[str], written: list[str], offsets: list[str], why: str
) -> None:
    with pytest.raises(ConfigurationError, match=f"{why}.*rite elsewhere"):
        check_logs("d", is_described=is_described, commits=commits, written=written, offsets=offsets)


def test_the_newest_tick_is_kept_and_only_a_later_one_is_shown_to_the_stream(
    spark: SparkSession, tmp_path: Path
) -> None:
    destination = Destination(spark, str(tmp_path))
    destination.describe(WANTED)
    shown = []
    for tick, is_later in ((Tick(70, 0), False), (Tick(70, 90), True), (Tick(80, 90), False)):
        destination.note_tick(tick, is_later=is_later)
        assert destination.last_tick() == tick
        shown.append([path.read_text() for path in (tmp_path / "_checkpoint" / "clock").glob("[!_.]*")])
    assert shown == [[], ["90\n"], []]


def test_what_stands_in_a_folder_is_looked_at_before_it_is_written_to(spark: SparkSession, tmp_path: Path) -> None:
    destination = Destination(spark, str(tmp_path))
    checkpoint = tmp_path / "_checkpoint"
    destination.check_whole()
    destination.describe(WANTED)
    destination.check_whole()
    destination.describe(WANTED)
    (checkpoint / "offsets").mkdir()
    (checkpoint / "offsets" / "0").write_text("v1")
    destination.check_whole()

    (tmp_path / "_spark_metadata").mkdir()
    (tmp_path / "_spark_metadata" / "1").write_text("v1")
    with pytest.raises(ConfigurationError, match="holds batch 1, and its _checkpoint knows of none after 0"):
        destination.check_whole()
    (checkpoint / ".stream.json.crc").unlink()
    for text in ("", "{", "[]", "7", "[" * 100_000):
        (checkpoint / "stream.json").write_text(text)
        with pytest.raises(ConfigurationError, match=r"stream\.json.* is damaged.* write elsewhere"):
            destination.describe(WANTED)
    (checkpoint / "stream.json").unlink()
    with pytest.raises(ConfigurationError, match=r"was written to before, and _checkpoint/stream\.json is not there"):
        destination.check_whole()
