"""``docs/formats/wal.md`` shows a whole segment: its bytes are what the writer writes."""

from __future__ import annotations

import re
from pathlib import Path

from ledger.hlc import Hlc
from wal.group_commit import GroupCommit
from wal.log import Log

PAGE = Path(__file__).parents[2] / "docs" / "formats" / "wal.md"


def documented_segment() -> bytes:
    example = PAGE.read_text().split("```text\n")[1].split("```")[0]
    data = b""
    for line in example.splitlines():
        field = re.match(r"  [a-z_0-9]+(?:, type| length)?\s+((?:[0-9a-f]{2}\s?)+)", line)
        if field is None:
            continue
        data += bytes.fromhex(field[1])
        if "63 zero bytes" in line:
            data += bytes(63)
    return data


def test_the_documented_segment_is_what_the_writer_writes(tmp_path: Path) -> None:
    writer = GroupCommit(
        Log(tmp_path, node_id="a", wal_id="00112233445566778899aabbccddeeff", epoch=1, next_lsn=1),
        on_failure=lambda error: None,
    )
    writer.append(Hlc(5, 0, "a"), 1, b"{}")
    writer.close(30)
    assert (tmp_path / "00000000000000000001-1.wal").read_bytes() == documented_segment()
