"""Small files that a node keeps beside its WAL: there while they hold something, refused with what to do."""

from __future__ import annotations

from pathlib import Path

import pytest

from app.runtime.state.kept_files import KeptFile
from ledger.errors import StartRefusedError

NUMBERS: KeptFile[list[int]] = KeptFile("numbers.json", list[int], b"[]", "count again")


def test_what_is_kept_is_found_by_the_next_start(tmp_path: Path) -> None:
    NUMBERS.store(tmp_path, [17, 18])
    assert NUMBERS.load(tmp_path) == [17, 18]


def test_a_file_that_holds_nothing_is_gone(tmp_path: Path) -> None:
    NUMBERS.store(tmp_path, [17])
    NUMBERS.store(tmp_path, [])
    assert list(tmp_path.iterdir()) == []
    assert NUMBERS.load(tmp_path) == []


def test_what_one_start_adds_to_nothing_is_not_there_for_another(tmp_path: Path) -> None:
    NUMBERS.load(tmp_path).append(17)
    assert NUMBERS.load(tmp_path) == []


@pytest.mark.parametrize("content", [b"", b"[", b'["17"]', b'"\xff"', b"{}"])
def test_what_was_altered_is_refused_by_name_with_what_to_do(tmp_path: Path, content: bytes) -> None:
    (tmp_path / NUMBERS.name).write_bytes(content)
    with pytest.raises(StartRefusedError, match=r"numbers\.json cannot be read: .*; count again"):
        NUMBERS.load(tmp_path)


def test_a_file_is_not_taken_for_none_because_it_says_so(tmp_path: Path) -> None:
    name: KeptFile[str | None] = KeptFile("name.json", str | None, b"null", "name it")
    assert name.load(tmp_path) is None
    (tmp_path / name.name).write_bytes(b" null\n")
    with pytest.raises(StartRefusedError, match="name it"):
        name.load(tmp_path)


def test_what_cannot_be_read_is_refused_too(tmp_path: Path) -> None:
    (tmp_path / NUMBERS.name).mkdir()
    with pytest.raises(StartRefusedError, match="count again"):
        NUMBERS.load(tmp_path)
