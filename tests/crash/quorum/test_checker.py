"""The judge of histories, shown each broken promise that it is there to find, and each that is none."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.crash.quorum.checker import Entry, judge
from tests.crash.quorum.history import Fenced, History, Line, Read, Wiped, Wrote, load

CHAIN = {1: [Entry("h1", "j1")], 2: [Entry("h2", "j2")]}


def wrote(number: int = 1, level: str = "GLOBAL", at_s: float = 1.0, **given: Any) -> Wrote:
    told: dict[str, Any] = {"status": 201, "achieved": level, "hlc": f"h{number}", "job_id": f"j{number}"}
    where = {"process": "a-1", "disk": "a"}
    return Wrote(number=number, level=level, began_s=at_s, ended_s=at_s + 0.5, **{**where, **told, **given})


def read(consistency: str, at_s: float = 5.0, **given: Any) -> Read:
    told: dict[str, Any] = {"number": 1, "status": 404}
    return Read(consistency=consistency, began_s=at_s, ended_s=at_s + 0.1, process="a-1", **{**told, **given})


SENT = [wrote(1, "LOCAL"), wrote(2, "LOCAL")]
SOUND: list[list[Line]] = [
    [wrote(), wrote(2, "LOCAL")],
    [wrote(3, "LOCAL"), Wiped(at_s=9.0, disk="a")],
    [wrote(3, status=None, achieved=None), wrote(3, status=503, achieved=None)],
    [wrote(key="k"), wrote(key="k", at_s=2.0), wrote(level="LOCAL", key="k", hlc="h9")],
    [wrote(key="k", status=503, achieved="REGIONAL", hlc="h9")],
    [wrote(), read("eventual"), read("session"), read("strong", at_s=1.2)],
    [wrote(), read("strong", status=503), read("strong", status=200, found=1)],
    [wrote(), read("session", status=200, may_have_lost=True)],
    [wrote(), read("bounded_staleness", max_staleness_s=4.0)],
    [wrote(level="LOCAL"), read("session", has_session=True, status=409, problem="write-lost")],
    [
        wrote(),
        Fenced(at_s=2.0, process="a-1"),
        wrote(at_s=3.0, status=503, achieved=None),
        wrote(at_s=3.0, process="b"),
    ],
]
BROKEN: list[tuple[str, list[Line], dict[int, list[Entry]]]] = [
    ("committed", [wrote(3, "REGIONAL")], {}),
    ("committed", [wrote(3)], {}),
    ("committed", [wrote(3, status=503, achieved="REGIONAL"), Wiped(at_s=9.0, disk="a")], {}),
    ("local", [wrote(3, "LOCAL")], {}),
    ("local", [wrote(3, status=503, achieved="LOCAL"), Wiped(at_s=9.0, disk="b")], {}),
    ("local", [wrote(3, "LOCAL", at_s=9.5), Wiped(at_s=9.0, disk="a")], {}),
    ("once", [wrote()], {1: [Entry("h1", "j1"), Entry("h9", "j9")]}),
    ("sent", [wrote()], {7: [Entry("h7", "j7")]}),
    ("named", [wrote(hlc="h9")], {}),
    ("named", [wrote(status=503, achieved="LOCAL", job_id="j9")], {}),
    ("named", [wrote(level="LOCAL", hlc="h9")], {}),
    ("named", [wrote(level="REGIONAL", key="k", hlc="h9")], {}),
    ("key", [wrote(key="k"), wrote(2, key="k")], {}),
    ("read", [wrote(), read("eventual", status=200, found=2, may_have_lost=True)], {}),
    ("read", [wrote(), read("eventual", status=200)], {}),
    ("session", [wrote(level="LOCAL"), read("session", has_session=True)], {}),
    ("session", [wrote(level="REGIONAL"), read("session", status=409, problem="write-lost")], {}),
    ("strong", [wrote(), read("strong")], {}),
    ("bounded", [wrote(), read("bounded_staleness", max_staleness_s=3.0)], {}),
    ("fence", [wrote(), Fenced(at_s=2.0, process="a-1"), wrote(level="LOCAL", at_s=3.0)], {}),
]


@pytest.mark.parametrize("lines", SOUND)
def test_a_sound_history_is_found_sound(lines: list[Line]) -> None:
    assert judge([*SENT, *lines], CHAIN) == []


@pytest.mark.parametrize(("rule", "lines", "entries"), BROKEN)
def test_each_broken_promise_is_found(rule: str, lines: list[Line], entries: dict[int, list[Entry]]) -> None:
    assert {violation.rule for violation in judge([*SENT, *lines], CHAIN | entries)} == {rule}


def test_a_history_is_read_as_it_was_written(tmp_path: Path) -> None:
    history = History(tmp_path / "history.jsonl")
    for lines in SOUND:
        for line in lines:
            history.note(line)
    history.close()
    assert load(history.path) == history.lines
