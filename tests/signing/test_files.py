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
