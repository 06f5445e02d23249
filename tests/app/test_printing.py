"""What the commands print: text is shown as it is, and a terminal obeys nothing of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from rich.table import Table

from cli import wal
from ledger.exit_code import ExitCode
from terminal import outcome

HLC = "1704931200000:100:node-x"
HOSTILE = "a\x1b[2J\x1b]0;owned\x07b\x9b31m\r\u202e\udcff.tar"
SHOWN = r"a\x1b[2J\x1b]0;owned\x07b\x9b31m\x0d\u202e\udcff.tar"


def test_text_json_and_tables_hold_no_emoji(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("hlc")
    table.add_row(HLC)
    outcome.out.print(f"at {HLC}", markup=False)
    outcome.out.print(table)
    outcome.err.print(f"at {HLC}")
    outcome.print_json({"hlc": HLC})
    said = capsys.readouterr()
    assert said.out.count(HLC) == 3
    assert said.err.count(HLC) == 1


def test_what_a_terminal_would_obey_is_written_out(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table("file")
    table.add_row(HOSTILE)
    outcome.out.print(HOSTILE, markup=False)
    outcome.out.print(table)
    assert outcome.fail(HOSTILE).code == ExitCode.COULD_NOT_RUN
    said = capsys.readouterr()
    assert said.out.count(SHOWN) == 2
    assert said.err == f"error: {SHOWN}\n"


def test_what_a_log_holds_is_written_out_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    torn = {"segment": "1.wal\x1b[2J", "offset": 7, "error": "cut"}
    monkeypatch.setattr(wal.inspect, "dump", lambda folder: [torn])
    with pytest.raises(SystemExit):
        wal.dump(tmp_path)
    assert capsys.readouterr().out == "1.wal\\x1b[2J at byte 7: cut\n"


def test_json_is_not_wrapped_or_styled(capsys: pytest.CaptureFixture[str]) -> None:
    value = {"text": "[bold]" + "x y " * 100 + "\x1b"}
    outcome.print_json(value)
    assert json.loads(capsys.readouterr().out) == value
