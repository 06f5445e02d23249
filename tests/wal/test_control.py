"""The control file: whole or refused, and replaced as a whole."""

from __future__ import annotations

from pathlib import Path

import pytest

from ledger.errors import WalCorruptError
from ledger.hlc import Hlc
from tests.wal.logs import NODE, WAL_ID
from wal.control import Control, load, new_wal_id, store

CONTROL = Control(WAL_ID, NODE, 7, Hlc(1_700_000_000_000, 3, NODE), durable_lsn=30, chained_lsn=20, signed_lsn=10)


def test_what_is_stored_is_loaded(tmp_path: Path) -> None:
    store(tmp_path, CONTROL)
    assert load(tmp_path) == CONTROL
    later = CONTROL._replace(epoch=8, durable_lsn=31)
    store(tmp_path, later)
    assert load(tmp_path) == later
    assert [path.name for path in tmp_path.iterdir()] == ["control"]


def test_no_control_file_is_none(tmp_path: Path) -> None:
    assert load(tmp_path) is None


def test_no_changed_byte_passes(tmp_path: Path) -> None:
    store(tmp_path, CONTROL)
    whole = (tmp_path / "control").read_bytes()
    for at in range(len(whole)):
        (tmp_path / "control").write_bytes(whole[:at] + bytes((whole[at] ^ 4,)) + whole[at + 1 :])
        with pytest.raises(WalCorruptError, match="cannot be trusted"):
            load(tmp_path)


def test_no_other_length_passes(tmp_path: Path) -> None:
    store(tmp_path, CONTROL)
    whole = (tmp_path / "control").read_bytes()
    for data in (b"", whole[:-1], whole + b"\0"):
        (tmp_path / "control").write_bytes(data)
        with pytest.raises(WalCorruptError, match="bytes long"):
            load(tmp_path)


def test_a_crash_before_the_rename_leaves_the_old_one(tmp_path: Path) -> None:
    store(tmp_path, CONTROL)
    (tmp_path / "control.tmp").write_bytes(b"half of a new o")
    assert load(tmp_path) == CONTROL
    store(tmp_path, CONTROL._replace(epoch=8))
    assert load(tmp_path) == CONTROL._replace(epoch=8)


def test_positions_that_contradict_each_other_are_not_stored(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        store(tmp_path, CONTROL._replace(chained_lsn=31))


def test_wal_ids_are_random() -> None:
    assert len({new_wal_id() for _ in range(100)}) == 100
    assert all(len(bytes.fromhex(new_wal_id())) == 16 for _ in range(3))
