"""Files that appear under their name only once they are whole."""

from __future__ import annotations

import os
import stat
from pathlib import Path

import pytest

from signing.files import whole_file


def test_a_file_appears_whole_and_its_name_survives_a_power_loss(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, synced, real_fsync = tmp_path / "out", [], os.fsync

    def fsync(descriptor: int) -> None:
        target = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append("folder" if target == tmp_path else "file" if not path.exists() else "file under its name")
        real_fsync(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with whole_file(path, 0o600) as file:
        file.write(b"whole")
        assert not path.exists()
    assert synced == ["file", "folder"]
    assert path.read_bytes() == b"whole"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600


def test_a_file_that_is_not_finished_leaves_nothing_and_keeps_the_one_before(tmp_path: Path) -> None:
    path = tmp_path / "out"
    path.write_bytes(b"before")

    def fail() -> None:
        with whole_file(path) as file:
            file.write(b"half")
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert [(each.name, each.read_bytes()) for each in tmp_path.iterdir()] == [("out", b"before")]


def test_what_is_no_file_is_written_to_and_stays_what_it_is(tmp_path: Path) -> None:
    pipe, link, target = tmp_path / "pipe", tmp_path / "link", tmp_path / "target"
    os.mkfifo(pipe)
    target.write_bytes(b"before")
    link.symlink_to(target)
    reading = os.open(pipe, os.O_RDONLY | os.O_NONBLOCK)
    for path in (pipe, link):
        with whole_file(path) as file:
            file.write(b"whole")
    assert os.read(reading, 9) == b"whole"
    os.close(reading)
    assert pipe.is_fifo()
    assert link.is_symlink()
    assert target.read_bytes() == b"whole"
    assert {each.name for each in tmp_path.iterdir()} == {"pipe", "link", "target"}


@pytest.mark.parametrize(("name", "said"), [("", "it is a folder"), ("gone/out", "No such file or directory")])
def test_what_cannot_be_written_is_named_as_it_was_given(tmp_path: Path, name: str, said: str) -> None:
    with pytest.raises(OSError, match=said) as refused, whole_file(tmp_path / name):
        pass
    assert refused.value.filename == str(tmp_path / name)
