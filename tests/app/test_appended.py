"""Chains that grow many entries at a time are those that grow one at a time."""

from __future__ import annotations

import hashlib
import json
import struct
from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from app.edge.forms.requests import EVENT_LINE
from app.store.appended import AppendedEntries, ChainAppender, ChainPosition, _new_rows, new_rows
from app.store.chaining import _HEADER, _TRAILER, LOG_COLUMNS, ChainHead, Piece
from app.store.notary import LinkRow
from app.write.pending.requests import draft_of
from ledger import canonical, chain, native
from ledger.chain import Linker
from ledger.hlc import Hlc

TENANTS = ("acme", "globex")
HEADS = {"acme": ChainHead(0, None, None), "globex": ChainHead(7, "ab" * 32, "1:0:n1")}

numbers = st.one_of(
    st.integers(-(2**53) + 1, 2**53 - 1),
    st.sampled_from([1.0, -0.0, 1e17, 1e300, 1e-7, 0.1, 2.5]),
)
values = st.recursive(
    numbers | st.none() | st.booleans() | st.sampled_from(["", "ä", "\U0001f600", 'a"\\']),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.sampled_from("abz"), inner, max_size=3),
    max_leaves=4,
)
objects = st.dictionaries(st.sampled_from("xyz"), values, max_size=3)
counts = st.integers(0, 3)
lines = st.one_of(
    st.fixed_dictionaries({"type": st.just("JobCreated"), "spec": objects, "assigned_dcs": st.just(["use1"])}),
    st.fixed_dictionaries({"type": st.just("JobAccepted"), "dc_id": st.sampled_from(["use1", "euw1"])}),
    st.fixed_dictionaries(
        {"type": st.just("JobProgressReported"), "dc_id": st.just("use1"), "completed": counts, "failed": counts}
    ),
    st.fixed_dictionaries({"type": st.just("WorkflowDispatched"), "workflow_id": st.just("w"), "dc_id": st.just("x")}),
    st.fixed_dictionaries(
        {"type": st.just("JobCompleted"), "final_status": st.just("ok"), "aggregate_metrics": objects}
    ),
    st.fixed_dictionaries({"type": st.just("JobFailed"), "error": st.just("e"), "fence_token": counts}),
)
entries = st.tuples(st.sampled_from(TENANTS), st.sampled_from(["j1", "j2"]), lines)
Taken = tuple[str, Hlc, str, str, bytes]


def taken(given: list[tuple[str, str, dict[str, Any]]]) -> list[Taken]:
    """The entries as the edge and submitting make them of lines."""
    made = []
    for number, (tenant_id, job_id, line) in enumerate(given):
        body = json.dumps({"tenant_id": tenant_id, "job_id": job_id, **line}).encode()
        draft = draft_of(EVENT_LINE.validate_json(body), None, None, None)
        fence_token = 1 if draft.fence_token is None else draft.fence_token
        facts = {"type": draft.event.name, "fence_token": fence_token, **draft.fields}
        made.append((tenant_id, Hlc(5, number, "n1"), job_id, draft.event.action, canonical.encode(facts)))
    return made


def grown(made: list[Taken]) -> tuple[AppendedEntries, list[ChainPosition]]:
    appended = AppendedEntries()
    appender = ChainAppender(appended, HEADS, {})
    seqs = [
        (tenant, appender.append(tenant, hlc, job_id, action, payload)) for tenant, hlc, job_id, action, payload in made
    ]
    appender.finish()
    return appended, [appender.place(tenant, seq) for tenant, seq in seqs]


def naive(made: list[Taken]) -> tuple[list[tuple[object, ...]], list[ChainPosition]]:
    """Rows and places, one entry after the other."""
    rows, places, heads = [], [], dict(HEADS)
    for tenant_id, hlc, job_id, action, payload in made:
        head, digest = heads[tenant_id], hashlib.sha256(payload)
        place = {"tenant_id": tenant_id, "seq": head.seq + 1, "t_hlc": hlc.text(), "job_id": job_id, "action": action}
        prev = bytes.fromhex(head.chain_link or "")
        link = chain.link(**place, prev_chain_link=prev, payload_digest=digest.digest()).hex()
        place |= {"hlc_physical": hlc.physical_ms, "hlc_logical": hlc.logical, "hlc_node": hlc.node_id}
        place |= {"link_version": 2, "prev_chain_link": head.chain_link, "chain_link": link, "origin": None}
        place |= {"payload_digest": digest.hexdigest(), "payload": payload.decode()}
        rows.append(tuple(place[column] for column in LOG_COLUMNS))
        places.append(ChainPosition(head.seq + 1, link, head.chain_link))
        heads[tenant_id] = ChainHead(head.seq + 1, link, hlc.text())
    return rows, places


@given(st.lists(entries, max_size=12))
def test_many_entries_at_once_grow_the_chains_that_one_at_a_time_grows(
    given_lines: list[tuple[str, str, dict[str, Any]]],
) -> None:
    made = taken(given_lines)
    appended, places = grown(made)
    rows, naive_places = naive(made)
    assert sorted(appended.log_rows, key=lambda row: row[:2]) == sorted(rows, key=lambda row: row[:2])
    assert places == naive_places
    assert {head[0]: head[1:] for head in appended.heads()} == {
        tenant: last_of(rows, tenant) for tenant in {row[0] for row in rows}
    }


def last_of(rows: list[tuple[object, ...]], tenant_id: object) -> tuple[object, ...]:
    """Seq, link and HLC of the tenant's last row."""
    last = [dict(zip(LOG_COLUMNS, row, strict=True)) for row in rows if row[0] == tenant_id][-1]
    return last["seq"], last["chain_link"], last["t_hlc"]


# --- in C as in Python ----------------------------------------------------------------------------

TEXTS = st.text(max_size=20) | st.sampled_from(["", "ä" * 300, "\ud800", "\U0001f600", "a\0b"])
HLCS = st.builds(Hlc, st.integers(-1, 2**64), st.integers(0, 2**33), TEXTS)
ODD_ENTRIES = st.tuples(HLCS, TEXTS, TEXTS, st.binary(max_size=60), st.none() | TEXTS)


def outcome(call: Any, *given_: Any) -> Any:
    """What a call returns, or the type of what it raises."""
    try:
        return call(*given_)
    except (ValueError, TypeError) as error:
        return type(error)


@given(st.lists(ODD_ENTRIES, min_size=1, max_size=5), st.sampled_from(sorted(HEADS)))
def test_rows_made_in_c_are_those_made_in_python(odd: list[Any], tenant_id: str) -> None:
    linker, head = Linker(tenant_id), HEADS[tenant_id]

    def rows_and_places(made_by: Any) -> object:
        rows, places = made_by(linker, head, odd)
        return [*Piece(tenant_id, head.seq + 1, len(odd), rows).rows()], places

    assert outcome(rows_and_places, new_rows) == outcome(rows_and_places, _new_rows)


def test_rows_of_plain_entries_are_made_in_c() -> None:
    plain = [(Hlc(5, 1, "n1"), "j", "ENQUEUE", b'{"a":"\xc3\xa4"}', origin) for origin in (None, '{"id":1}')]
    found = native.new_rows("acme", Linker("acme").prefix, 1, None, b"", plain, LinkRow)
    assert (found is None) == (native.NAME != "c")
    rows, places = _new_rows(Linker("acme"), HEADS["acme"], plain)
    assert found is None or found[1] == places
    assert found is None or decoded(_HEADER + found[0] + _TRAILER) == rows


def decoded(encoded: bytes) -> list[tuple[Any, ...]]:
    """The rows in the binary form of COPY, as the manual of PostgreSQL has it."""
    assert encoded[:19] == b"PGCOPY\n\xff\r\n\0" + bytes(8)
    rows, at = [], 19
    while (columns := struct.unpack_from(">h", encoded, at)[0]) != -1:
        row: list[Any] = []
        at += 2
        for name in LOG_COLUMNS[:columns]:
            (length,) = struct.unpack_from(">i", encoded, at)
            value = None if length < 0 else encoded[at + 4 : at + 4 + length]
            at += 4 + max(length, 0)
            is_number = name in ("seq", "hlc_physical", "hlc_logical", "link_version")
            assert value is None or not is_number or length == (2 if name == "link_version" else 8)
            row.append(None if value is None else int.from_bytes(value, signed=True) if is_number else value.decode())
        rows.append(tuple(row))
    assert at + 2 == len(encoded)
    return rows


@given(st.lists(entries, max_size=6))
def test_rows_go_to_copy_as_they_are(given_lines: list[tuple[str, str, dict[str, Any]]]) -> None:
    log_rows = grown(taken(given_lines))[0].log_rows
    tuples = [*log_rows]
    of_tenants = [row for tenant_id in dict.fromkeys(row[0] for row in tuples) for row in tuples if row[0] == tenant_id]
    whole = log_rows.for_copy()
    assert (whole is None) == (native.NAME != "c" and bool(tuples))
    assert whole is None or decoded(whole) == of_tenants
