"""The files of stats reports: readers only ever see whole ones, names are given once, and the folder stays bounded."""

from __future__ import annotations

import os
import re
import resource
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.write import stats as stats_module
from app.write.stats import StatsFiles

LINE = b'{"n":%d}\n'
PAGE = (Path(__file__).parents[2] / "docs" / "formats" / "stats.md").read_text()


class Folder:
    """A folder of stats files, and what a reader that passes over hidden names sees in it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.removed: list[int] = []

    def files(self, epoch: int = 1, **bounds: float) -> StatsFiles:
        given = {"file_bytes_max": 1 << 20, "file_age_max_s": 3600.0, "bytes_max": 1 << 30, **bounds}
        return StatsFiles(self.path, epoch=epoch, on_removed=self.removed.append, **given)

    def closed(self) -> list[Path]:
        return sorted(path for path in self.path.iterdir() if not path.name.startswith("."))

    def seen(self) -> bytes:
        return b"".join(path.read_bytes() for path in self.closed())

    def hidden(self) -> list[str]:
        return [path.name for path in self.path.iterdir() if path.name.startswith(".")]


@pytest.fixture
def folder(tmp_path: Path) -> Folder:
    return Folder(tmp_path / "stats" / "node-a")


def test_a_file_is_seen_only_when_it_is_closed(folder: Folder) -> None:
    files = folder.files()
    files.tidy()
    files.append(LINE % 1)
    assert folder.closed() == []
    files.close()
    assert folder.seen() == LINE % 1
    assert folder.hidden() == []


def test_nobody_else_reads_them_whatever_the_umask(folder: Folder) -> None:
    umask = os.umask(0)
    try:
        files = folder.files()
        files.tidy()
        files.append(LINE % 1)
        files.close()
    finally:
        os.umask(umask)
    assert [path.stat().st_mode & 0o777 for path in (folder.path, *folder.closed())] == [0o700, 0o600]


def test_a_file_is_closed_before_it_outgrows_its_bound(folder: Folder) -> None:
    files = folder.files(file_bytes_max=20)
    for number in range(10):
        files.append(LINE % number)
    files.close()
    assert [path.stat().st_size for path in folder.closed()] == [16] * 5
    assert folder.seen() == b"".join(LINE % number for number in range(10))


def test_an_old_file_is_closed_and_an_empty_one_is_never_made(folder: Folder) -> None:
    files = folder.files(file_age_max_s=0.0)
    files.tidy()
    files.close_old()
    assert (folder.closed(), files.due_in_s()) == ([], None)
    files.append(LINE % 1)
    assert files.due_in_s() == 0.0
    files.close_old()
    assert folder.seen() == LINE % 1


def test_the_names_are_those_of_the_page_and_none_is_given_twice(folder: Folder) -> None:
    for epoch in (1, 1, 2):
        files = folder.files(epoch)
        for number in range(3):
            files.append(LINE % number)
            files.close()
    names = [path.name for path in folder.closed()]
    assert len(names) == 9
    documented = re.search(r"`(\d{8}T\d{6}Z-\d{8}-\d{6}\.ndjson)`", PAGE)
    assert documented is not None
    shape = re.sub(r"\d", "0", documented[1])
    assert {re.sub(r"\d", "0", name) for name in names} == {shape}


@given(whole=st.lists(st.binary(max_size=40).map(lambda text: text.replace(b"\n", b"") + b"\n")), torn=st.binary())
def test_what_a_crash_left_open_is_closed_behind_its_last_whole_line(
    tmp_path_factory: pytest.TempPathFactory, whole: list[bytes], torn: bytes
) -> None:
    folder = Folder(tmp_path_factory.mktemp("crash"))
    left = b"".join(whole) + torn.replace(b"\n", b"")
    (folder.path / ".20261121T134000Z-00000001-000001.ndjson.part").write_bytes(left)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(stats_module, "SCAN_BYTES", 7)
        folder.files(epoch=2).tidy()
    assert folder.seen() == b"".join(whole)
    assert folder.hidden() == []


def test_what_was_left_open_is_as_new_as_the_moment_it_is_shown(folder: Folder) -> None:
    folder.path.mkdir(parents=True)
    left = folder.path / ".20261121T134000Z-00000001-000001.ndjson.part"
    left.write_bytes(LINE % 1)
    os.utime(left, (1, 1))
    folder.files(epoch=2).tidy()
    (closed,) = folder.closed()
    assert closed.stat().st_mtime > 1_000_000_000


def test_the_oldest_files_make_room_and_what_is_not_ours_is_left_alone(folder: Folder) -> None:
    folder.path.mkdir(parents=True)
    (folder.path / "notes.txt").write_bytes(b"x" * 1000)
    files = folder.files(file_bytes_max=8, bytes_max=40)
    for number in range(9):
        files.append(LINE % number)
    files.close()
    assert [path.name for path in folder.closed()][-1] == "notes.txt"
    ours = b"".join(path.read_bytes() for path in folder.closed()[:-1])
    assert ours == b"".join(LINE % number for number in range(5, 9))
    assert folder.removed == [8] * 5


def test_there_are_never_more_files_than_the_bound(folder: Folder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stats_module, "FILES_MAX", 3)
    files = folder.files()
    for number in range(5):
        files.append(LINE % number)
        files.close()
    assert folder.seen() == b"".join(LINE % number for number in range(2, 5))


def test_what_a_full_disk_cut_short_is_not_kept_and_the_file_goes_on(folder: Folder) -> None:
    files = folder.files()
    first, cut, last = (LINE % number * 5000 for number in range(3))
    files.append(first)
    # A limit on the size of files stands for the full disk: a write falls short, and the rest of it fails.
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (len(first) + len(cut) // 2, usual[1]))
    try:
        with pytest.raises(OSError, match="File too large"):
            files.append(cut)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    files.append(last[: len(LINE % 2)])
    files.close()
    assert folder.seen() == first + LINE % 2


def test_a_folder_that_vanishes_is_made_again(folder: Folder) -> None:
    files = folder.files()
    files.append(LINE % 1)
    for path in folder.path.iterdir():
        path.unlink()
    folder.path.rmdir()
    with pytest.raises(OSError, match="No such file"):
        files.close()
    files.append(LINE % 2)
    files.close()
    assert folder.seen() == LINE % 2
