"""The journal of checkpoints beside the WAL: what was kept survives a crash, and damage is never taken for less."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from app.write.followers import checkpoints
from app.write.followers.checkpoints import NAME, CheckpointJournal
from ledger.errors import InvalidInputError, SignatureError, StartRefusedError

OLD = {f"tenant-{number}": f"log/tenant-{number}\n1\nroot=\n\n— someone\n" for number in range(3)}
NEW = {name: note.replace("\n1\n", "\n2\n") for name, note in OLD.items()}


@pytest.fixture
def journal(tmp_path: Path) -> CheckpointJournal:
    """One that holds ``OLD``."""
    kept = CheckpointJournal(tmp_path)
    kept.store(OLD)
    return kept


def read(folder: Path) -> dict[str, str]:
    return CheckpointJournal(folder).load_all()


def test_what_was_stored_is_read_again_and_the_last_counts(tmp_path: Path, journal: CheckpointJournal) -> None:
    journal.store({"tenant-1": NEW["tenant-1"]})
    assert journal.load_all() == read(tmp_path) == OLD | {"tenant-1": NEW["tenant-1"]}
    assert (journal.size("tenant-1"), journal.size("tenant-2"), journal.size("other")) == (2, 1, 0)
    assert journal.load("other") is None
    CheckpointJournal(tmp_path).store({"other": "x"})
    assert read(tmp_path).keys() == OLD.keys() | {"other"}
    with pytest.raises(SignatureError, match="tenant other"):
        CheckpointJournal(tmp_path).size("other")


def test_many_tenants_are_one_fsync(
    tmp_path: Path, journal: CheckpointJournal, monkeypatch: pytest.MonkeyPatch
) -> None:
    synced: list[str] = []
    for name in ("fsync", "fdatasync"):
        monkeypatch.setattr(os, name, lambda _descriptor, name=name: synced.append(name))
    journal.store({f"tenant-{number}": "note" for number in range(300)})
    assert synced == ["fdatasync"]


def test_a_torn_last_line_counts_as_never_written_and_is_gone_with_the_next(
    tmp_path: Path, journal: CheckpointJournal
) -> None:
    path = tmp_path / NAME
    before = path.stat().st_size
    journal.store(NEW)
    whole = path.read_bytes()
    for length in range(before, len(whole) - 1):
        path.write_bytes(whole[:length])
        assert read(tmp_path) == OLD, length
        again = CheckpointJournal(tmp_path)
        again.store({"other": "note"})
        assert again.load_all() == read(tmp_path) == OLD | {"other": "note"}
    # Only the end of the line is missing: the note itself is whole.
    path.write_bytes(whole[:-1])
    assert read(tmp_path) == NEW


def test_damage_before_the_last_line_refuses_the_start(tmp_path: Path, journal: CheckpointJournal) -> None:
    path = tmp_path / NAME
    journal.store(NEW)
    journal.store({"tenant-0": OLD["tenant-0"]})
    whole = path.read_bytes()
    last = whole.rindex(b"\n", 0, -1) + 1
    # Without what ends it, the line before the last is one with it.
    for at in range(last - 1):
        path.write_bytes(whole[:at] + bytes([whole[at] ^ 1]) + whole[at + 1 :])
        with pytest.raises(StartRefusedError, match=r"checkpoints.journal (is damaged at line|is no journal)"):
            read(tmp_path)


def test_none_of_the_lines_that_a_journal_begins_with_may_be_missing(
    tmp_path: Path, journal: CheckpointJournal
) -> None:
    path = tmp_path / NAME
    lines = path.read_bytes().splitlines(keepends=True)
    for wrong in ([], lines[:-1], lines[1:], [*lines[:-1], lines[-1][:-9]]):
        path.write_bytes(b"".join(wrong))
        with pytest.raises(StartRefusedError):
            read(tmp_path)


def test_a_journal_stays_short(tmp_path: Path, journal: CheckpointJournal, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoints, "SLACK_BYTES", 0)
    short = (tmp_path / NAME).stat().st_size
    for _ in range(20):
        journal.store(NEW)
        assert (tmp_path / NAME).stat().st_size < 4 * short
    assert read(tmp_path) == NEW


@pytest.mark.parametrize("how", ["moved", "replaced", "cut", "lengthened"])
def test_a_journal_that_somebody_touched_is_written_anew(tmp_path: Path, journal: CheckpointJournal, how: str) -> None:
    path = tmp_path / NAME
    whole = path.read_bytes()
    if how in ("moved", "replaced"):
        path.rename(tmp_path / "elsewhere")
    if how != "moved":
        path.write_bytes({"replaced": b"", "cut": whole[:-5], "lengthened": whole + b"x"}[how])
    journal.store({"tenant-0": NEW["tenant-0"]})
    assert read(tmp_path) == OLD | {"tenant-0": NEW["tenant-0"]}


@pytest.mark.parametrize("failing", ["fdatasync", "pwritev"])
def test_what_the_disk_does_not_take_is_not_kept_and_harms_nothing(
    tmp_path: Path, journal: CheckpointJournal, monkeypatch: pytest.MonkeyPatch, failing: str
) -> None:
    def full(descriptor: int, *rest: object) -> int:
        os.write(descriptor, b"half a li")
        raise OSError(errno.ENOSPC, "no space left")

    with monkeypatch.context() as broken:
        broken.setattr(os, failing, full)
        with pytest.raises(OSError, match="no space left"):
            journal.store(NEW)
    assert journal.load_all() == OLD
    journal.store({"tenant-0": NEW["tenant-0"]})
    assert journal.load_all() == read(tmp_path) == OLD | {"tenant-0": NEW["tenant-0"]}


def test_a_name_that_leads_elsewhere_is_not_kept(tmp_path: Path, journal: CheckpointJournal) -> None:
    with pytest.raises(InvalidInputError, match="no tenant can be named"):
        journal.store({"../acme": "note"})
    assert read(tmp_path) == OLD


def test_what_is_set_aside_is_kept_under_another_name(tmp_path: Path, journal: CheckpointJournal) -> None:
    journal.set_aside()
    assert read(tmp_path) == journal.load_all() == {}
    journal.store({"other": "note"})
    CheckpointJournal(tmp_path).set_aside()
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoints-1.journal", "checkpoints-2.journal"}
    assert all(note in (tmp_path / "checkpoints-1.journal").read_text() for note in OLD)
