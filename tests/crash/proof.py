"""The proof after the faults: what was promised is in the chain exactly once, and the chain is whole.

1. every promised event is there once, with the payload, HLC, seq and link that its answer named
2. whatever else was sent is there once at the most; a keyed request that was answered is there whole
3. seqs have no gap, each link names the one before it, and heads are the ends
4. LSNs have no gap, HLCs rise with them, and an (epoch, LSN) that an answer named is that very event's
5. the WAL and the chain hold the same events
6. each tenant's beginning and each key are recorded once
7. the service finds nothing wrong, projection and signatures included
"""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import Iterable
from itertools import groupby, pairwise
from pathlib import Path
from typing import Any, NamedTuple

import aiohttp

from ledger.chain import record
from ledger.facts.events import EVENTS_BY_ACTION, SYSTEM_TENANT
from tests.conftest import connected_to
from tests.crash.load import Book, Fact, Sent, http_session, number_of
from tests.crash.serve_process import WAIT_S
from wal import reader
from wal.reader import Record

LAST_TENANT = "last"


class Row(NamedTuple):
    """One entry of a chain."""

    tenant_id: str
    seq: int
    t_hlc: str
    job_id: str
    action: str
    prev_chain_link: str | None
    chain_link: str
    payload: str


class Ledger:
    """All that Postgres holds, and the entries of job events by the number they carry."""

    def __init__(self, rows: list[Row], heads: dict[str, tuple[int, str]], key_ids: list[str]) -> None:
        self.rows = rows
        self.heads = heads
        self.key_ids = key_ids
        self.by_number: dict[int, list[Row]] = {}
        for row in rows:
            if row.action in EVENTS_BY_ACTION and row.tenant_id != LAST_TENANT:
                self.by_number.setdefault(number_of(json.loads(row.payload)), []).append(row)

    @classmethod
    async def read(cls, url: str) -> Ledger:
        """What stands in the database at ``url``."""
        async with connected_to(url) as connection:
            rows = await connection.fetch(
                f"SELECT {', '.join(Row._fields)} FROM scheduler.scheduler_log ORDER BY tenant_id, seq"
            )
            heads = await connection.fetch("SELECT tenant_id, head_seq, head_chain_link FROM scheduler.chain_heads")
            keys = await connection.fetch("SELECT key_id FROM scheduler.signing_keys")
        return cls(
            [Row(*row) for row in rows], {head[0]: (head[1], head[2]) for head in heads}, [key[0] for key in keys]
        )

    def the(self, fact: Fact) -> Row:
        """The one entry of ``fact``, which holds what was sent."""
        rows = self.by_number.get(fact.number, [])
        assert len(rows) == 1, f"{fact} was promised and is in the chain {len(rows)} times: {rows}"
        (row,) = rows
        payload = json.loads(row.payload)
        del payload["fence_token"]
        payload.pop("idempotency", None)
        assert payload == {"type": fact.type, **fact.fields}
        assert row.tenant_id == fact.tenant_id
        assert fact.job_id in (None, row.job_id)
        return row


async def verified_by_service(url: str, tenants: Iterable[str] = ()) -> None:
    """Wait until everything so far is chained, then let the service judge every chain: all verdicts are ``ok``."""
    async with http_session() as session:
        # An answer at GLOBAL says that all before it in the WAL is chained as well.
        new_job = {"tenant_id": LAST_TENANT, "durability": "GLOBAL"}
        async with session.post(f"{url}/v1/jobs", json=new_job) as answer:
            assert answer.status == 201, await answer.text()
        await key_recorded(session, url)
        for tenant_id in {LAST_TENANT, *tenants}:
            async with session.post(f"{url}/v1/snapshots", json={"tenant_id": tenant_id}) as answer:
                assert answer.status < 300, await answer.text()
        for tenant_id in {LAST_TENANT, SYSTEM_TENANT, *tenants}:
            verdict = await _verdict(session, url, tenant_id)
            assert verdict["valid"], verdict
            # No request signs a snapshot of _system; it comes by itself, and later.
            unsigned = tenant_id == SYSTEM_TENANT and verdict["signed_to_seq"] == 0
            wrong = {name for name, judged in verdict["verdicts"].items() if judged != "ok"}
            assert wrong <= ({"snapshots", "signatures"} if unsigned else set()), verdict


async def key_recorded(session: aiohttp.ClientSession, url: str) -> None:
    """Return once ``_system`` names a key of this node, the last thing that a start does."""
    async with session.get(f"{url}/v1/node") as answer:
        node_id = (await answer.json())["node_id"]
    async with asyncio.timeout(WAIT_S):
        while True:
            params = {"tenant_id": SYSTEM_TENANT, "limit": 1000}
            async with session.get(f"{url}/v1/chain/entries", params=params) as answer:
                items = (await answer.json())["items"] if answer.status == 200 else []
            facts = [json.loads(item["payload"]) for item in items if item["action"] == "KEY_ADDED"]
            if any(fact["node_id"] == node_id for fact in facts):
                return


async def _verdict(session: aiohttp.ClientSession, url: str, tenant_id: str) -> dict[str, Any]:
    """What the service says of a chain, once tree and checkpoint, which follow at their own pace, have begun."""
    async with asyncio.timeout(WAIT_S):
        while True:
            async with session.get(f"{url}/v1/chain/verify", params={"tenant_id": tenant_id}) as answer:
                assert answer.status == 200, await answer.text()
                verdict: dict[str, Any] = await answer.json()
            if "not_checked" not in (verdict["verdicts"]["tree"], verdict["verdicts"]["checkpoint"]):
                return verdict


async def prove(book: Book, database_url: str, wal_folders: Iterable[Path]) -> None:
    """Points 1 to 6, of a service that has stopped, from its database and its WAL folders.

    A folder that another one took over from is left out by the caller.
    """
    ledger = await Ledger.read(database_url)
    prove_promises(book, ledger)
    prove_chains(ledger)
    prove_system(ledger)
    for folder in wal_folders:
        prove_wal(book, ledger, folder)


def prove_promises(book: Book, ledger: Ledger) -> None:
    """1 and 2."""
    for sent in book.sent:
        if sent.is_promised:
            rows = [ledger.the(fact) for fact in sent.facts]
            _agree(sent, rows)
        if sent.problem == "backlog-full":
            assert not any(fact.number in ledger.by_number for fact in sent.facts), (
                f"refused, yet chained: {sent.facts}"
            )
    repeated = {number: rows for number, rows in ledger.by_number.items() if len(rows) > 1}
    assert not repeated
    sent_numbers = {fact.number for sent in book.sent for fact in sent.facts}
    assert ledger.by_number.keys() <= sent_numbers


def _agree(sent: Sent, rows: list[Row]) -> None:
    told = sent.answered.told
    if not sent.is_acknowledged:
        assert told.get("hlc") in (None, rows[-1].t_hlc)
        assert told.get("job_id") in (None, rows[-1].job_id)
    elif sent.is_batch:
        assert told["accepted"] == len(rows)
        assert (told["first_hlc"], told["last_hlc"]) == (rows[0].t_hlc, rows[-1].t_hlc)
        assert told["job_ids"] == [row.job_id for row in rows if row.action == "ENQUEUE"]
    else:
        (row,) = rows
        assert (told["hlc"], told["job_id"]) == (row.t_hlc, row.job_id)
        if told["chain"] is not None:
            chain = {"seq": row.seq, "chain_link": row.chain_link, "prev_chain_link": row.prev_chain_link}
            assert told["chain"] == chain


def prove_chains(ledger: Ledger) -> None:
    """3."""
    for tenant_id, entries in groupby(ledger.rows, key=lambda row: row.tenant_id):
        rows = list(entries)
        assert [row.seq for row in rows] == list(range(1, len(rows) + 1)), f"the seqs of {tenant_id} have gaps"
        assert rows[0].prev_chain_link is None
        assert all(row.prev_chain_link == before.chain_link for before, row in pairwise(rows))
        assert ledger.heads[tenant_id] == (rows[-1].seq, rows[-1].chain_link)


def prove_system(ledger: Ledger) -> None:
    """6."""
    said = Counter((row.action, row.job_id) for row in ledger.rows if row.tenant_id == SYSTEM_TENANT)
    begun = {("TENANT_CREATED", f"tenant:{tenant_id}") for tenant_id in ledger.heads if tenant_id != SYSTEM_TENANT}
    known = {("KEY_ADDED", f"key:{key_id}") for key_id in ledger.key_ids}
    wrong = {about: said[about] for about in begun | known if said[about] != 1}
    assert not wrong, f"_system says so often, not once: {wrong}"


def prove_wal(book: Book, ledger: Ledger, folder: Path) -> None:
    """4 and 5."""
    node_id = folder.name
    records = list(reader.read(folder, 1, node_id))
    assert [one.lsn for one in records] == list(range(1, len(records) + 1))
    assert all(before.hlc < one.hlc for before, one in pairwise(records)), "HLCs do not rise with LSNs"
    assert all(before.epoch <= one.epoch for before, one in pairwise(records))
    at = {(one.epoch, one.lsn): one for one in records}
    for sent in book.sent:
        if sent.is_promised and not sent.is_batch and node_of(sent.answered.told) in (None, node_id):
            told = sent.answered.told
            assert told["hlc"] in (None, at[told["epoch"], told["lsn"]].hlc.text())
    _same_events(ledger, records, node_id)


def _same_events(ledger: Ledger, records: list[Record], node_id: str) -> None:
    chained = {row.t_hlc: row for row in ledger.rows if row.t_hlc.endswith(f":{node_id}")}
    in_wal = {one.hlc.text(): record.decode(one.payload) for one in records}
    assert chained.keys() <= in_wal.keys(), "the chain holds what the WAL does not"
    for hlc, row in chained.items():
        event = in_wal[hlc]
        assert (event.tenant_id, event.job_id, event.payload) == (row.tenant_id, row.job_id, row.payload.encode())
    for hlc in in_wal.keys() - chained.keys():
        event = in_wal[hlc]
        assert event.idempotency is not None or event.job_id.startswith("tenant:"), f"never chained: {event}"


def node_of(told: dict[str, Any]) -> str | None:
    """Node that a written event's answer names."""
    return told["hlc"].rpartition(":")[2] if told.get("hlc") else None


def wal_folder(data_dir: Path) -> Path:
    """The folder of the one node below a data folder."""
    node_id = json.loads((data_dir / "wal" / "node.json").read_text())["node_id"]
    return data_dir / "wal" / node_id
