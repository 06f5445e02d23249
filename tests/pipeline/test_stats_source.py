"""The files that a stats stream takes: each once in whatever order they come, remembered in little, told when not."""

from __future__ import annotations

import json
import os
import random
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger.errors import ConfigurationError
from pipeline.stats.folder import LINE_BYTES_MAX, Listing, lines_in, listed
from pipeline.stats.offset import BEGINNING, Offset, check_entry
from pipeline.stats.source import AHEAD_MAX_S, StatsReader, next_offset, passed_over, taken_between
from pipeline.stats.taken import FileName, Taken, parsed

OPENED = "20241121T134000Z"
OPENED_AT = f"{OPENED}/{OPENED}"
EMPTY = BEGINNING
NOW_MS = 1_732_196_400_000
"""13:40, when the files are opened."""


class Folder:
    """A source that nodes, and others, put files into."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def put(self, node: str, epoch: int, number: int, *, closed_s: float = 0, opened: str = OPENED) -> Path:
        file = self.path / node / f"{opened}-{epoch:08}-{number:06}.ndjson"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_bytes(b"{}\n")
        os.utime(file, (closed_s, closed_s))
        return file

    def next(
        self, start: Offset, *, files_max: int | None = None, now_ms: int = NOW_MS, close_after_ms: int = 0
    ) -> Any:
        return next_offset(str(self.path), start, listed(str(self.path)), files_max, now_ms, close_after_ms)

    def between(self, start: Offset, end: Offset) -> list[str]:
        return [file.path for file in taken_between(str(self.path), start, end, listed(str(self.path)))]

    def passed_over(self, offset: Offset, *, now_ms: int = NOW_MS) -> dict[str, str]:
        return passed_over(str(self.path), offset, listed(str(self.path)), now_ms)


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path)


Numbers = st.lists(st.tuples(st.integers(1, 3), st.integers(1, 40)), unique=True)


@given(earlier=Numbers, later=Numbers)
def test_what_was_taken_is_known_as_a_set_of_all_files_would_know_it(
    earlier: list[tuple[int, int]], later: list[tuple[int, int]]
) -> None:
    taken, naive = Taken(), set(earlier)
    for epoch, number in earlier:
        taken.add(FileName(epoch, number, OPENED))
    before = Taken(taken.value())
    for epoch, number in set(later) - naive:
        taken.add(FileName(epoch, number, OPENED))
    said = taken.value()
    assert Taken(json.loads(json.dumps(said))).value() == said
    everything = [(epoch, number) for epoch in range(1, 4) for number in range(1, 42)]
    known = [key for key in everything if not taken.is_new(FileName(*key, OPENED))]
    assert known == sorted(naive | set(later))
    assert sorted(taken.since(before)) == sorted(set(later) - naive)


def test_an_offset_is_as_small_as_the_folder_and_not_as_all_that_it_ever_held() -> None:
    taken = Taken()
    numbers = list(range(1, 20_001))
    random.Random(1).shuffle(numbers)
    for epoch in range(1, 6):
        for number in numbers:
            taken.add(FileName(epoch, number, OPENED))
        taken.forget([epoch])
    assert taken.value() == {"before": 5, "5": f"1-20000@{OPENED_AT}"}
    assert [taken.is_new(FileName(epoch, 20_001, OPENED)) for epoch in (4, 5, 6)] == [False, True, True]


@pytest.mark.parametrize(
    "value",
    [
        *({"5": "1"}, {"5": 5}, {"x": f"1-2@{OPENED_AT}"}, {"5": "1-2@now/now"}, {"5": f"1-2@{OPENED}"}),
        *({"before": "5"}, {"before": True}, {"before": -1}, {"before": 10**19}, {"logOffset": 3}),
        *({"5": f"2-1@{OPENED_AT}"}, {"5": f"1-3@{OPENED_AT},2-4@{OPENED_AT}"}, {"5" * 19: f"1-2@{OPENED_AT}"}),
        *({"5": f"1-2@{OPENED}/20231121T134000Z"}, {"5": "1-2@99999999T999999Z/99999999T999999Z"}),
    ],
)
def test_a_checkpoint_of_another_form_is_refused(value: dict[str, Any]) -> None:
    with pytest.raises(ConfigurationError, match="write elsewhere"):
        Taken(value)
    nothing = Listing({}, {})
    with pytest.raises(ConfigurationError, match="write elsewhere"):
        next_offset("", value, nothing, None, NOW_MS, 0)
    with pytest.raises(ConfigurationError, match="write elsewhere"):
        taken_between("", EMPTY, value, nothing)
    with pytest.raises(ConfigurationError, match="write elsewhere"):
        taken_between("", EMPTY, EMPTY | {"folders": {"a": value}}, nothing)


@pytest.mark.parametrize(
    "offset",
    [
        *([], None, 7, {}, EMPTY | {"folders": []}, EMPTY | {"folders": {"a": []}}, EMPTY | {"taken_ms": True}),
        *(EMPTY | {"clock_ms": -1}, EMPTY | {"clock_ms": 10**18}, EMPTY | {"taken_ms": "1"}),
        EMPTY | {"folders": {"a": {"before": 0, "1": f"1-{10**17}@{OPENED_AT}"}}},
    ],
)
def test_an_offset_that_is_damaged_is_refused_whatever_is_in_it(offset: Any) -> None:
    with pytest.raises(ConfigurationError, match="write elsewhere"):
        taken_between("", EMPTY, offset, Listing({}, {}))


def test_an_entry_of_the_log_of_offsets_is_read_as_a_whole() -> None:
    check_entry(f'v1\n{{"batchWatermarkMs":0}}\n{json.dumps(EMPTY)}\n-')
    whole = f"v1\n{{}}\n{json.dumps(EMPTY)}"
    for text in ("", "v1", "v1\n{}", whole[:-3], f"v2{whole[2:]}", 'v1\n{}\n{"logOffset":0}', "v1\n{}\n" + "[" * 9**5):
        with pytest.raises(ConfigurationError, match="write elsewhere"):
            check_entry(text)


def test_files_are_taken_in_the_order_they_were_closed_in_over_all_nodes_and_each_once(folder: Folder) -> None:
    files = [folder.put(node, 1, number, closed_s=number * 10 + (node == "b")) for number in (1, 2, 3) for node in "ab"]
    offsets, taken = [EMPTY], []
    while (end := folder.next(offsets[-1], files_max=2)) != offsets[-1]:
        taken += folder.between(offsets[-1], end)
        offsets.append(end)
    assert len(offsets) == 4
    assert taken == [str(file) for file in files]
    # A batch that is done again has the same files, whatever has come or gone meanwhile.
    folder.put("a", 1, 4)
    for file in files[:2]:
        file.unlink()
    assert folder.between(offsets[1], offsets[2]) == [str(file) for file in files[2:4]]
    assert all(json.loads(json.dumps(offset)) == offset for offset in offsets)


def test_files_that_come_out_of_order_or_again_under_an_older_time_are_still_taken(folder: Folder) -> None:
    folder.put("a", 2, 5)
    first = folder.next(EMPTY)
    late = [folder.put("a", 2, 3, closed_s=5), folder.put("a", 1, 9, closed_s=6), folder.put("", 1, 1, closed_s=7)]
    second = folder.next(first)
    assert sorted(folder.between(first, second)) == sorted(str(file) for file in late)
    assert [why.partition(":")[0] for why in folder.passed_over(second).values()] == [
        "2 files, up to number 2, are not here, and later ones are",
        "it is not here, and later ones are",
    ]
    assert folder.next(second) == second


def test_an_epoch_is_forgotten_when_its_files_are_gone_and_what_then_turns_up_is_told(folder: Folder) -> None:
    old = folder.put("a", 1, 1)
    first = folder.next(EMPTY)
    old.unlink()
    folder.put("a", 2, 1)
    second = folder.next(first)
    assert second["folders"]["a"] == {"before": 2, "2": f"1-1@{OPENED_AT}"}
    back = folder.put("a", 1, 1)
    assert folder.next(second) == second
    assert list(folder.passed_over(second)) == [str(back.relative_to(folder.path))]


def test_a_node_that_begins_anew_under_its_old_name_is_told(folder: Folder) -> None:
    for number in (1, 2, 3):
        folder.put("a", 1, number)
    taken = folder.next(EMPTY)
    anew = folder.put("a", 1, 2, opened="20241122T000000Z")
    folder.put("a", 1, 2).unlink()
    assert folder.next(taken) == taken
    assert list(folder.passed_over(taken)) == [str(anew.relative_to(folder.path))]


@pytest.mark.parametrize("anew", ["20241121T120000Z", "20241121T135500Z"])
def test_what_a_node_that_began_anew_wrote_over_is_told_as_long_as_it_is_there(folder: Folder, anew: str) -> None:
    now_ms = NOW_MS + 3_600_000
    first = [folder.put("a", 1, number, opened=f"20241121T134{number}00Z") for number in (1, 2, 3)]
    taken = folder.next(EMPTY, now_ms=now_ms)
    for file in first:
        file.unlink()
    told = [folder.put("a", 1, number, opened=anew) for number in (1, 2, 3)]
    read = [folder.put("a", 1, number, opened="20241121T135900Z") for number in (4, 5)]
    second = folder.next(taken, now_ms=now_ms)
    assert folder.between(taken, second) == [str(file) for file in read]
    for number in (6, 7):
        folder.put("a", 1, number, opened="20241121T135930Z")
        second = folder.next(second, now_ms=now_ms)
        assert folder.next(second, now_ms=now_ms) == second
        assert list(folder.passed_over(second, now_ms=now_ms)) == [str(file.relative_to(folder.path)) for file in told]
    assert len(second["folders"]["a"]["1"].split(",")) == (1 if anew < OPENED else 2)


def test_a_file_of_a_time_to_come_keeps_no_other_from_being_known(folder: Folder) -> None:
    folder.put("a", 1, 1)
    never, far = (folder.put("a", 1, 50, opened=opened) for opened in ("99999999T999999Z", "99991231T235959Z"))
    taken = folder.next(EMPTY)
    anew = folder.put("a", 1, 1, opened="20241121T134001Z")
    folder.put("a", 1, 1).unlink()
    told = {Path(path).name: why.partition(",")[0] for path, why in folder.passed_over(taken).items()}
    assert told == {
        never.name: "no name that a node gives to a file that is closed",
        far.name: "its time lies ahead of this machine's clock",
        anew.name: "later files of this node were read: it began anew",
    }


def test_files_that_were_removed_between_two_runs_are_told_by_their_numbers(folder: Folder) -> None:
    for number in (3, 4, 7, 9):
        file = folder.put("a", 5, number)
    taken = folder.next(EMPTY)
    file.unlink()
    folder.put("a", 5, 11, closed_s=NOW_MS / 1000 + 9 * AHEAD_MAX_S)
    folder.put("a", 6, 2)
    taken = folder.next(taken)
    assert folder.passed_over(taken | {"folders": {}}).keys() == {f"a/{OPENED}-00000005-000011.ndjson"}
    told = {path: why.partition(",")[0] for path, why in folder.passed_over(taken).items()}
    assert told == {
        f"a/{OPENED}-00000005-000011.ndjson": "its time lies ahead of this machine's clock",
        "a/*-00000005-000005.ndjson": "2 files",
        "a/*-00000005-000008.ndjson": "it is not here",
        "a/*-00000006-000001.ndjson": "it is not here",
    }


def test_a_file_that_was_closed_ahead_of_this_clock_waits_and_is_told(folder: Folder) -> None:
    behind_ms = NOW_MS - 2 * AHEAD_MAX_S * 1000
    late = folder.put("a", 1, 1, closed_s=NOW_MS / 1000, opened="20241121T133000Z")
    early = folder.put("a", 1, 2, closed_s=behind_ms / 1000 + AHEAD_MAX_S, opened="20241121T133000Z")
    first = folder.next(EMPTY, now_ms=behind_ms)
    assert folder.between(EMPTY, first) == [str(early)]
    assert folder.next(first, now_ms=behind_ms) == first
    assert list(folder.passed_over(first, now_ms=behind_ms)) == [str(late.relative_to(folder.path))]
    second = folder.next(first)
    assert folder.between(first, second) == [str(late)]
    assert folder.passed_over(second) == {}


def test_a_folder_that_is_empty_for_a_while_is_not_read_again(folder: Folder) -> None:
    files = [folder.put("a", 1, number) for number in (1, 2)]
    taken = folder.next(EMPTY)
    content = [file.read_bytes() for file in files]
    for file in files:
        file.unlink()
    assert folder.next(taken) == taken
    for file, data in zip(files, content, strict=True):
        file.write_bytes(data)
    assert folder.next(taken) == taken
    assert folder.passed_over(taken) == {}


def test_what_is_no_file_of_a_node_is_not_read_but_told(
    folder: Folder, tmp_path_factory: pytest.TempPathFactory
) -> None:
    elsewhere = tmp_path_factory.mktemp("elsewhere")
    secret = Folder(elsewhere).put("a", 1, 1)
    sound = folder.put("a", 1, 1)
    twice = folder.put("a", 1, 1, opened="20241121T134001Z")
    name = sound.name.replace("000001.", "{:06}.")
    (folder.path / "a" / name.format(2)).symlink_to(secret)
    (folder.path / "b").symlink_to(elsewhere)
    os.mkfifo(folder.path / "a" / name.format(3))
    (folder.path / "a" / f"{name.format(4)}.gz").write_bytes(b"\x1f\x8b")
    (folder.path / "a" / "1.ndjson").write_bytes(b"{}\n")
    (folder.path / "a" / f".{name.format(5)}.part").write_bytes(b"{}\n")
    (folder.path / "a" / "notes.txt").write_bytes(b"")
    (folder.path / "a" / name.format(6)).mkdir()
    inside = folder.put(f"a/{name.format(6)}", 1, 1)
    unreadable = os.fsdecode(b"node-\xff")
    folder.put(unreadable, 1, 1)
    taken = folder.next(EMPTY)
    assert sorted(folder.between(EMPTY, taken)) == sorted([str(sound), str(inside)])
    told = folder.passed_over(taken)
    assert {path: why.partition(",")[0] for path, why in told.items()} == {
        f"a/{twice.name}": f"{sound.name} is the same file of the node",
        f"a/{name.format(2)}": "a link",
        "b": "a link",
        f"a/{name.format(3)}": "no plain file",
        f"a/{name.format(4)}.gz": "no name that a node gives to a file that is closed",
        "a/1.ndjson": "no name that a node gives to a file that is closed",
        f"{unreadable}/{sound.name}": "lies in a folder whose name is no UTF-8",
    }


def test_no_line_takes_more_memory_than_a_node_may_write(tmp_path: Path) -> None:
    file = tmp_path / "a"
    longest = b"x" * LINE_BYTES_MAX
    file.write_bytes(b"\n".join([b"first\r", longest, longest + b"y", b"z" * (5 << 20), b"\0\xff", b"torn"]))
    found = list(lines_in(str(tmp_path), file.name))
    assert [(len(line.text), line.is_whole) for line in found[1:4]] == [
        (LINE_BYTES_MAX, True),
        (LINE_BYTES_MAX + 1, False),
        (LINE_BYTES_MAX + 1, False),
    ]
    assert [line.text for line in (found[0], *found[4:])] == [b"first", b"\0\xff", b"torn"]


def test_a_file_that_became_something_else_since_it_was_seen_is_not_followed(tmp_path: Path) -> None:
    (tmp_path / "real").write_bytes(b"{}\n")
    (tmp_path / "link").symlink_to(tmp_path / "real")
    os.mkfifo(tmp_path / "pipe")
    (tmp_path / "folder").mkdir()
    (tmp_path / "folder" / "real").write_bytes(b"{}\n")
    assert len(list(lines_in(str(tmp_path), "folder/real"))) == 1
    (tmp_path / "other").symlink_to("folder")
    for name, why in (("link", "cannot be read"), ("pipe", "no plain file"), ("folder", "cannot be read")):
        with pytest.raises(ConfigurationError, match=why):
            list(lines_in(str(tmp_path), name))
    for name in ("none", "real/real", "other/real"):
        with pytest.raises(FileNotFoundError):
            list(lines_in(str(tmp_path), name))


def test_files_that_are_gone_before_they_could_be_read_are_told_one_by_one(folder: Folder) -> None:
    files = [folder.put("a", 1, number) for number in (1, 2)]
    taken = folder.next(EMPTY)
    reader = StatsReader({"folder": str(folder.path), "files_a_batch": "9", "close_after_ms": "0"})
    planned = reader.partitions(EMPTY, taken)
    for file in files:
        file.unlink()
    again = reader.partitions(EMPTY, taken)
    for shares, names in ((planned, [file.name for file in files]), (again, ["*-00000001-000001.ndjson"] * 1)):
        rows = [row for share in shares for batch in reader.read(share) for row in batch.to_pylist()]
        assert [row["what"] for row in rows] == ["gone"] * 2
        assert [Path(row["file"]).name for row in rows][: len(names)] == names
    (folder.path / "a").rmdir()
    (folder.path / "a").write_bytes(b"{}\n")
    again = reader.partitions(EMPTY, taken)
    assert [row["what"] for share in again for batch in reader.read(share) for row in batch.to_pylist()] == ["gone"] * 2


HOUR_MS = 3_600_000


def test_the_clock_goes_on_only_where_nothing_is_left_to_read_and_until_all_is_closed(folder: Folder) -> None:
    assert folder.next(EMPTY, close_after_ms=HOUR_MS) == EMPTY
    folder.put("a", 1, 1, closed_s=NOW_MS / 1000)
    taken = folder.next(EMPTY, close_after_ms=HOUR_MS)
    assert (taken["taken_ms"], taken["clock_ms"]) == (NOW_MS, 0)
    later = folder.next(taken, now_ms=NOW_MS + 60_000, close_after_ms=HOUR_MS)
    assert later == taken | {"clock_ms": NOW_MS + 60_000}
    assert folder.next(later, now_ms=NOW_MS, close_after_ms=HOUR_MS) == later, "a clock that was set back a little"
    last = folder.next(later, now_ms=NOW_MS + 9 * HOUR_MS, close_after_ms=HOUR_MS)
    assert last["clock_ms"] == NOW_MS + HOUR_MS
    assert folder.next(last, now_ms=NOW_MS + 99 * HOUR_MS, close_after_ms=HOUR_MS) == last
    assert folder.next(taken, now_ms=NOW_MS + HOUR_MS) == taken, "it was not asked to close"
    folder.put("a", 1, 2)
    assert folder.next(taken, now_ms=NOW_MS + HOUR_MS, close_after_ms=HOUR_MS)["clock_ms"] == 0


def test_a_clock_far_ahead_closes_no_more_than_files_say_and_one_far_behind_is_refused(folder: Folder) -> None:
    folder.put("a", 1, 1, closed_s=NOW_MS / 1000)
    wrong_ms = NOW_MS + 10_000 * HOUR_MS
    taken = folder.next(EMPTY, now_ms=wrong_ms, close_after_ms=HOUR_MS)
    closed = folder.next(taken, now_ms=wrong_ms, close_after_ms=HOUR_MS)
    assert (taken["taken_ms"], closed["clock_ms"]) == (NOW_MS, NOW_MS + HOUR_MS)
    with pytest.raises(ConfigurationError, match=r"clock says 20241121T134000Z, .* to 20241121T144000Z: set the clock"):
        folder.next(closed, now_ms=NOW_MS, close_after_ms=HOUR_MS)
    folder.put("a", 1, 2, closed_s=NOW_MS / 1000)
    assert folder.next(closed, now_ms=NOW_MS)["taken_ms"] == NOW_MS, "without --close the clock does not matter"
    folder.put("a", 1, 3, closed_s=NOW_MS / 1000 + AHEAD_MAX_S)
    assert folder.next(closed, now_ms=NOW_MS)["taken_ms"] == NOW_MS, "a file's time counts up to the clock"


def test_names_are_those_that_nodes_give() -> None:
    assert parsed(f"{OPENED}-00000007-000003.ndjson") == FileName(7, 3, OPENED)
    assert parsed(f"{OPENED}-100000007-1000003.ndjson") == FileName(100_000_007, 1_000_003, OPENED)
    for opened in ("99999999T999999Z", "20241321T134000Z", "20241121T244000Z", "20241100T134000Z"):
        assert parsed(f"{opened}-00000007-000003.ndjson") is None
    for name in ("7-3.ndjson", f"{OPENED}-00000007-000003.ndjson.gz", f"{OPENED}-00000007-00000\u0663.ndjson"):
        assert parsed(name) is None
