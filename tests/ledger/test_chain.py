"""Chain links: the bytes that version 2 hashes, what it binds, and why version 1 is not enough."""

from __future__ import annotations

from hashlib import sha256
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger.chain import Linker, link, link_v1
from ledger.errors import InvalidInputError

FIRST: dict[str, Any] = {
    "tenant_id": "acme",
    "seq": 1,
    "t_hlc": "1704585600000:0:scheduler-prod-01",
    "job_id": "use1-1704585600000-gate42-00000",
    "action": "ENQUEUE",
    "prev_chain_link": b"",
    "payload_digest": sha256(b'{"type":"JobCreated"}').digest(),
    "origin": b"",
}
SECOND: dict[str, Any] = FIRST | {
    "seq": 2,
    "t_hlc": "1704585600000:1:scheduler-prod-01",
    "action": "DEQUEUE",
    "prev_chain_link": b"\x11" * 32,
    "origin": b'{"seq":7}',
}


def naive_link(**entry: Any) -> bytes:
    """The format of docs/formats/chain-link.md, one field after the other."""
    fields = [
        entry["tenant_id"].encode(),
        entry["seq"].to_bytes(8, "big"),
        entry["t_hlc"].encode(),
        entry["job_id"].encode(),
        entry["action"].encode(),
        entry["prev_chain_link"],
        entry["payload_digest"],
        entry["origin"],
    ]
    hashed = b"tallystick.chain-link.v2\n"
    for field in fields:
        hashed += len(field).to_bytes(4, "big") + field
    return sha256(hashed).digest()


def test_the_first_link_of_a_chain_hashes_exactly_these_bytes() -> None:
    hashed = (
        b"tallystick.chain-link.v2\n"
        b"\x00\x00\x00\x04acme"
        b"\x00\x00\x00\x08\x00\x00\x00\x00\x00\x00\x00\x01"
        b"\x00\x00\x00\x211704585600000:0:scheduler-prod-01"
        b"\x00\x00\x00\x1fuse1-1704585600000-gate42-00000"
        b"\x00\x00\x00\x07ENQUEUE"
        b"\x00\x00\x00\x00"
        b"\x00\x00\x00\x20"
        + bytes.fromhex("2ac75e1b825d760461217af9aa9321c081124313f43293854cd258440dc9c55f")
        + b"\x00\x00\x00\x00"
    )
    assert link(**FIRST) == sha256(hashed).digest()
    assert link(**FIRST).hex() == "914a8a23463d7ccd12acd2fdb6cab17738278d6e6e1dbe8e676ceeb1035d08d0"


def test_a_later_link_carries_its_predecessor_and_its_origin() -> None:
    hashed = (
        b"tallystick.chain-link.v2\n"
        b"\x00\x00\x00\x04acme"
        b"\x00\x00\x00\x08\x00\x00\x00\x00\x00\x00\x00\x02"
        b"\x00\x00\x00\x211704585600000:1:scheduler-prod-01"
        b"\x00\x00\x00\x1fuse1-1704585600000-gate42-00000"
        b"\x00\x00\x00\x07DEQUEUE"
        b"\x00\x00\x00\x20"
        + b"\x11" * 32
        + b"\x00\x00\x00\x20"
        + FIRST["payload_digest"]
        + b'\x00\x00\x00\x09{"seq":7}'
    )
    assert link(**SECOND) == sha256(hashed).digest()


@pytest.mark.parametrize("field", list(SECOND))
def test_changing_any_field_gives_another_link(field: str) -> None:
    value = SECOND[field]
    others = [value + 1, 0] if field == "seq" else [value + value[:1], value[1:], value[:-1], value[:0]]
    for other in others:
        assert link(**SECOND | {field: other}) != link(**SECOND)


@pytest.mark.parametrize(
    ("left", "right"),
    [
        ("tenant_id", "t_hlc"),
        ("t_hlc", "job_id"),
        ("job_id", "action"),
        ("prev_chain_link", "payload_digest"),
    ],
)
def test_moving_a_byte_from_one_field_to_the_next_gives_another_link(left: str, right: str) -> None:
    moved = SECOND | {left: SECOND[left][:-1], right: SECOND[left][-1:] + SECOND[right]}
    assert link(**moved) != link(**SECOND)


ENTRIES = st.fixed_dictionaries(
    {
        "tenant_id": st.text(st.characters(codec="utf-8"), max_size=20),
        "seq": st.integers(0, 2**64 - 1),
        "t_hlc": st.text(st.characters(codec="utf-8"), max_size=40),
        "job_id": st.text(st.characters(codec="utf-8"), max_size=40),
        "action": st.text(st.characters(codec="utf-8"), max_size=20),
        "prev_chain_link": st.just(b"") | st.binary(min_size=32, max_size=32),
        "payload_digest": st.binary(min_size=32, max_size=32),
        "origin": st.binary(max_size=300),
    }
)


@given(ENTRIES)
def test_link_is_the_documented_format(entry: dict[str, Any]) -> None:
    assert link(**entry) == naive_link(**entry)


@given(st.lists(ENTRIES, min_size=1, max_size=5))
def test_a_linker_gives_the_same_links_for_its_tenant(entries: list[dict[str, Any]]) -> None:
    linker = Linker(entries[0]["tenant_id"])
    for entry in entries:
        rest = {name: value for name, value in entry.items() if name != "tenant_id"}
        assert linker.link(**rest) == naive_link(**entry | {"tenant_id": linker.tenant_id})


@pytest.mark.parametrize("seq", [-1, 2**64])
def test_a_seq_without_an_eight_byte_form_is_refused(seq: int) -> None:
    with pytest.raises(InvalidInputError):
        link(**FIRST | {"seq": seq})


# --- version 1 ------------------------------------------------------------------------------------


def test_version_1_joins_the_texts_and_begins_with_genesis() -> None:
    digest = FIRST["payload_digest"].hex()
    joined = f"1704585600000:0:n1jobENQUEUEgenesis{digest}"
    first = link_v1("1704585600000:0:n1", "job", "ENQUEUE", None, digest)
    assert first == sha256(joined.encode()).digest()
    joined = f"1704585600000:1:n1jobDEQUEUE{first.hex()}{digest}"
    assert link_v1("1704585600000:1:n1", "job", "DEQUEUE", first.hex(), digest) == sha256(joined.encode()).digest()


def test_version_1_gives_different_entries_the_same_link_and_version_2_does_not() -> None:
    digest = FIRST["payload_digest"]
    entry = ("1704585600000:0:n1", "7job", "ENQUEUE")
    forged = ("1704585600000:0:n17", "jobEN", "QUEUE")
    assert link_v1(*entry, None, digest.hex()) == link_v1(*forged, None, digest.hex())
    linker = Linker("acme")
    assert linker.link(1, *entry, b"", digest) != linker.link(1, *forged, b"", digest)
