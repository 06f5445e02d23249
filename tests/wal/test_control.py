"""The control file: whole or refused, and replaced as a whole."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from zlib import crc32

import pytest

from ledger.errors import WalCorruptError
from ledger.hlc import Hlc
from ledger.positions import Epoch, Lsn
from tests.wal.logs import NODE, WAL_ID
from wal.control import Control, EpochStart, load, store

CONTROL = Control(
    WAL_ID,
    NODE,
    Epoch(7),
    Hlc(1_700_000_000_000, 3, NODE),
    durable_lsn=Lsn(30),
    chained_lsn=Lsn(20),
    signed_lsn=Lsn(10),
    committed_lsn=Lsn(25),
    promised_epoch=Epoch(9),
    promised_run="ab" * 16,
    member_id="cd" * 16,
    generation=4,
    history=(EpochStart(Epoch(2), Lsn(1)), EpochStart(Epoch(7), Lsn(12))),
)
VERSION_1 = bytes.fromhex(
    "54414c4c5943544c 0001 0006 6e6f64652d61" + "00" * 58 + WAL_ID + "0000000000000007 0000018bcfe56800 00000003"
    "000000000000001e 0000000000000014 000000000000000a 0bb88eac"
)
"""A control file as the version before wrote it."""


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


def test_one_of_version_1_is_read_and_replaced_by_version_2(tmp_path: Path) -> None:
    (tmp_path / "control").write_bytes(VERSION_1)
    old = Control(WAL_ID, NODE, Epoch(7), CONTROL.highest_hlc, Lsn(30), Lsn(20), Lsn(10), committed_lsn=Lsn(20))
    assert load(tmp_path) == old
    assert old.history == ()
    store(tmp_path, old)
    assert (tmp_path / "control").read_bytes()[8:10] == b"\0\2"
    assert load(tmp_path) == old


def test_one_of_a_version_to_come_is_refused(tmp_path: Path) -> None:
    store(tmp_path, CONTROL)
    whole = (tmp_path / "control").read_bytes()
    later = whole[:9] + b"\3" + whole[10:-4]
    (tmp_path / "control").write_bytes(later + crc32(later).to_bytes(4, "big"))
    with pytest.raises(WalCorruptError, match="not a control file of version 1 or 2"):
        load(tmp_path)


def test_one_with_a_node_id_that_is_no_utf_8_is_refused_although_its_crc_fits(tmp_path: Path) -> None:
    store(tmp_path, CONTROL)
    whole = (tmp_path / "control").read_bytes()
    other = whole[:-4].replace(NODE.encode(), b"\xfe" + NODE.encode()[1:], 1)
    (tmp_path / "control").write_bytes(other + crc32(other).to_bytes(4, "big"))
    with pytest.raises(WalCorruptError, match="no UTF-8"):
        load(tmp_path)


@pytest.mark.parametrize(
    "changes",
    [
        {"chained_lsn": 26},
        {"committed_lsn": 31},
        {"signed_lsn": 21},
        {"history": CONTROL.history[::-1]},
        {"history": (EpochStart(Epoch(2), Lsn(1)), EpochStart(Epoch(7), Lsn(1)))},
    ],
)
def test_what_contradicts_itself_is_not_stored(tmp_path: Path, changes: dict[str, Any]) -> None:
    with pytest.raises(AssertionError):
        store(tmp_path, CONTROL._replace(**changes))
