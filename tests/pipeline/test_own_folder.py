"""The folder of one run goes with it, or with the next one; folders of others stay."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from pipeline import spark as module
from pipeline.spark import MARKER, own_folder

PREFIX = "tally-run-"
KILLED = """
import os, signal, sys
from pathlib import Path
from pipeline.spark import own_folder

with own_folder(Path(sys.argv[1]), sys.argv[2]) as folder:
    (folder / "large").mkdir()
    (folder / "large" / "rows").write_bytes(b"half")
    os.kill(os.getpid(), signal.SIGKILL)
"""


def killed_run(parent: Path) -> Path:
    """The folder that a run left which was killed."""
    before = set(parent.iterdir())
    subprocess.run([sys.executable, "-c", KILLED, str(parent), PREFIX], check=False, timeout=60)
    (left,) = set(parent.iterdir()) - before
    return left


@pytest.mark.parametrize(
    ("name", "files"),
    [
        ("results", ("thesis.txt",)),
        ("results", ("thesis.txt", MARKER)),
        ("2026_ten", ("thesis.txt",)),
        ("abcdefgh", ()),
        ("abcdefghi", (MARKER,)),
    ],
)
def test_a_folder_that_no_run_made_stays(name: str, files: tuple[str, ...], tmp_path: Path) -> None:
    theirs = tmp_path / f"{PREFIX}{name}"
    theirs.mkdir()
    for file in files:
        (theirs / file).write_text("x")
    with own_folder(tmp_path, PREFIX):
        pass
    assert sorted(path.name for path in theirs.iterdir()) == sorted(files)


def test_a_run_removes_what_a_killed_one_left_and_nothing_of_one_that_lives(tmp_path: Path) -> None:
    with own_folder(tmp_path, PREFIX) as living:
        (living / "rows").write_bytes(b"half")
        left = killed_run(tmp_path)
        assert (left / "large" / "rows").read_bytes() == b"half"
        with own_folder(tmp_path, PREFIX):
            assert not left.exists()
        assert sorted(path.name for path in living.iterdir()) == [MARKER, "rows"]
    assert list(tmp_path.iterdir()) == []


def test_a_removal_that_is_cut_short_leaves_the_marker_for_the_next(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    left = killed_run(tmp_path)

    class CutShortError(BaseException):
        pass

    def cut_short(path: Path, *, ignore_errors: bool) -> None:
        raise CutShortError

    with monkeypatch.context() as patched:
        patched.setattr(module.shutil, "rmtree", cut_short)
        with pytest.raises(CutShortError), own_folder(tmp_path, PREFIX):
            pass
    assert (left / MARKER).is_file()
    with own_folder(tmp_path, PREFIX):
        assert not left.exists()


def test_a_link_with_such_a_name_is_not_followed(tmp_path: Path) -> None:
    theirs = tmp_path / "theirs"
    shutil.copytree(killed_run(tmp_path), theirs)
    (tmp_path / f"{PREFIX}abcdefgh").symlink_to(theirs)
    with own_folder(tmp_path, PREFIX):
        pass
    assert sorted(path.name for path in theirs.iterdir()) == [MARKER, "large"]
