"""A batch that C writes has the bytes that Python writes, or is left to Python."""

from __future__ import annotations

import os
import shutil
import sysconfig
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger.hlc import Hlc, node_hash
from ledger.machines.events import JOB_EVENTS
from ledger.positions import Lsn
from wal import native
from wal.format import RECORD_HEADER_BYTES, batch_of, encode_batch, encode_record, encode_records

IS_BUILT = native._module is not None


def test_it_is_built_where_there_is_a_compiler() -> None:
    header = Path(sysconfig.get_paths()["include"]) / "Python.h"
    assert (shutil.which("cc") is not None and header.is_file()) == IS_BUILT


@given(
    st.integers(1, 2**63 - 100),
    st.lists(
        st.tuples(
            st.integers(0, 2**63 - 1),
            st.integers(0, 2**32 - 1),
            st.sampled_from([event.record_type for event in JOB_EVENTS.values()] + [255]),
            st.binary(max_size=300),
        ),
        max_size=5,
    ),
)
def test_a_body_is_its_records_one_by_one(first_lsn: int, parts: list[tuple[int, int, int, bytes]]) -> None:
    records = [(Hlc(physical, logical, "node"), kind, payload) for physical, logical, kind, payload in parts]
    expected = b"".join(
        encode_record(Lsn(lsn), hlc.pack(), kind, payload)
        for lsn, (hlc, kind, payload) in enumerate(records, first_lsn)
    )
    assert encode_records(Lsn(first_lsn), node_hash("node"), records) == expected
    if IS_BUILT and records:
        batch = batch_of(Lsn(first_lsn), Lsn(first_lsn + len(records) - 1), records[-1][0].pack(), expected)
        assert committed(first_lsn, records, len(expected)) == (b"before" + encode_batch(batch) + expected, True)


def committed(
    first_lsn: int, records: Sequence[Any], body_bytes: int, named_as: str = "segment"
) -> tuple[bytes, bool | None]:
    """What stands in a file behind ``before`` after a commit, and whether it was found under this name; None when
    Python must be asked."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "segment")
        path.write_bytes(b"before")
        with path.open("r+b") as file:
            place = file.fileno(), 6, str(path.with_name(named_as)).encode(), os.stat(file.fileno()).st_ino
            done = native.commit_records(*place, first_lsn, node_hash("node"), records, body_bytes)
        assert done is None or done[0] > 0
        return path.read_bytes(), None if done is None else done[1]


def test_a_commit_says_when_the_file_has_lost_its_name() -> None:
    _, is_named = committed(1, [(Hlc(1, 0, "node"), 1, b"x")], RECORD_HEADER_BYTES + 1, named_as="other")
    assert is_named is (False if IS_BUILT else None)


@pytest.mark.parametrize(
    ("record", "more_bytes"),
    [
        (None, 0),
        ((), 0),
        (((1, 2), 1, b""), 0),
        (((1, 2, "n"), 256, b""), 0),
        (((1, -1, "n"), 1, b""), 0),
        (((1, 2, "n"), 1, "text"), 0),
        (((1, 2, "n"), 1, b""), 1),
        (((1, 2, "n"), 1, b""), -1),
    ],
)
def test_of_what_is_no_batch_nothing_is_written_and_python_is_asked(record: Any, more_bytes: int) -> None:
    sound = (Hlc(1, 1, "node"), 1, b"sound")
    body_bytes = 2 * RECORD_HEADER_BYTES + len(b"sound") + more_bytes
    assert committed(1, [sound, record], body_bytes) == (b"before", None)
    assert committed(1, [], 0) == (b"before", None)
