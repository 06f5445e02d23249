"""One Idempotency-Key on two nodes at LOCAL: what was acknowledged and lost is in the chain, and its reader is told."""

from __future__ import annotations

import asyncio
from typing import Any

import asyncpg
import httpx
import pytest

from app.node.service import Service
from app.store.idempotency import ChainedLine
from app.write.pending.backlog import Pending
from app.write.pending.keyed_entries import is_bound
from app.write.pending.requests import EventLines
from ledger import canonical
from ledger.chain.record import IdempotencyKey
from ledger.errors import DatabaseUnavailableError, DurabilityTimeoutError
from ledger.facts.events import ACTIONS
from ledger.hlc import Hlc
from ledger.keyed import MEMBER, key_digest
from tests.app.chains import Chains, until
from tests.app.conftest import MakeSettings, RunNode, RunServer
from tests.app.drafts import LOCAL, created, key
from tests.app.hurry import hurried
from tests.app.postgres_proxy import PostgresProxy


async def post(client: httpx.AsyncClient, path: str, name: str | None, **fields: Any) -> httpx.Response:
    headers = {} if name is None else {"Idempotency-Key": name}
    return await client.post(path, json={"tenant_id": "acme", **fields}, headers=headers)


async def job(client: httpx.AsyncClient, job_id: str) -> dict[str, Any]:
    answer = await client.get(f"/v1/jobs/{job_id}", params={"tenant_id": "acme"})
    return answer.json() if answer.status_code == 200 else {"status": answer.status_code}


def kind(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["type"].rpartition("/")[2]


def token_of(answer: dict[str, Any]) -> dict[str, str]:
    return {"Tally-Session": answer["session"]}


PROGRESS: dict[str, Any] = {"type": "JobProgressReported", "dc_id": "dc1", "completed": 1, "failed": 0}


async def test_what_two_nodes_acknowledged_under_one_key_is_chained_once_and_the_other_is_refused_by_name(
    run_server: RunServer, make_settings: MakeSettings, proxy: PostgresProxy, chains: Chains
) -> None:
    two_settings = make_settings("two", shutdown_grace="2s")
    async with run_server(make_settings("one")) as one:
        async with run_server(two_settings, url=proxy.url) as two:
            own = (await post(two, "/v1/jobs", None)).json()["job_id"]
            first = {
                n: (await post(one, "/v1/jobs", f"k-{n}", spec={"n": n}, durability="LOCAL")).json() for n in (1, 2)
            }
            told = (await post(one, f"/v1/jobs/{own}/events", "p", **PROGRESS)).json()
            report_of_one = await one.get(f"/v1/jobs/{own}", params={"tenant_id": "acme"}, headers=token_of(told))
            assert report_of_one.json()["completed"] == 1
            # 1. Node two cannot ask, and acknowledges at LOCAL: the same request, another one, a report, and more.
            await proxy.refuse()
            lost = {}
            for n, spec in ((1, {"n": 1}), (2, {"n": "other"})):
                answer = await post(two, "/v1/jobs", f"k-{n}", spec=spec, durability="LOCAL")
                assert answer.status_code == 201
                lost[n] = answer.json()
            early = await post(two, f"/v1/jobs/{lost[1]['job_id']}/events", None, **PROGRESS)
            report = await post(two, f"/v1/jobs/{own}/events", "p", **PROGRESS)
            assert (early.status_code, report.status_code) == (201, 201)
            await proxy.accept()

            async def is_chained() -> bool:
                positions = (await two.get("/v1/node")).json()["positions"]
                return bool(positions["chained_lsn"] >= positions["durable_lsn"])

            await until(is_chained, "node two knows what became of them")
            # 2. Whoever reads them is told, on either node, and they take nothing more.
            for client in (two, one):
                for n, reason in ((1, "idempotent-replay"), (2, "idempotency-key-reused")):
                    job_id = lost[n]["job_id"]

                    async def is_refused(client: httpx.AsyncClient = client, job_id: str = job_id) -> bool:
                        return (await job(client, job_id))["status"] == "REFUSED"

                    await until(is_refused, "the refusal is chained")
                    assert (await job(client, job_id))["refused"] == {
                        "type": "JobCreated",
                        "hlc": lost[n]["hlc"],
                        "reason": reason,
                        "seq": None,
                        "lost_to": {"job_id": first[n]["job_id"], "hlc": first[n]["hlc"]},
                    }
                    for path in ("events", "cancel"):
                        fields = PROGRESS if path == "events" else {"reason": "r", "requestor": "q"}
                        refusal = await post(client, f"/v1/jobs/{job_id}/{path}", None, **fields, durability="LOCAL")
                        assert kind(refusal) == (409, "job-ended")
                        assert first[n]["job_id"] in refusal.json()["detail"]

            async def report_is_refused() -> Any:
                seen = await job(one, own)
                return seen if seen["refused"] else None

            seen = await until(report_is_refused, "the refusal of the report is chained")
            assert (seen["status"], seen["completed"]) == ("RUNNING", 1)
            assert seen["refused"]["type"] == "JobProgressReported"
            assert seen["refused"]["hlc"] == report.json()["hlc"]
            assert seen["refused"]["lost_to"] == {"job_id": own, "hlc": told["hlc"]}
        before = await chains.sound("acme")
        assert [entry["action"] for entry in before].count("REFUSED") == 3
        by_hlc = {entry["t_hlc"] for entry in before}
        assert by_hlc >= {each["hlc"] for each in (*lost.values(), early.json(), report.json())}
        verdict = (await one.get("/v1/chain/verify", params={"tenant_id": "acme"})).json()
        assert verdict["valid"], verdict
    async with run_server(two_settings) as two:
        assert kind(await post(two, f"/v1/jobs/{lost[1]['job_id']}/events", None, **PROGRESS)) == (409, "job-ended")
        again = await post(two, "/v1/jobs", "k-1", spec={"n": 1}, durability="LOCAL")
        assert (again.headers.get("Idempotent-Replay"), again.json()["job_id"]) == ("true", first[1]["job_id"])
    assert await chains.sound("acme") == before


async def test_a_global_request_that_another_node_answered_leaves_nothing_after_a_crash(
    run_node: RunNode, make_settings: MakeSettings, proxy: PostgresProxy, chains: Chains, superuser: asyncpg.Connection
) -> None:
    settings = make_settings("two", shutdown_grace="1s")
    async with run_node(make_settings("one")) as one:
        async with run_node(settings, url=proxy.url) as two:
            await two.submitter.submit(created("acme", 0), key=None)
            async with superuser.transaction():
                await superuser.execute(
                    "SELECT FROM scheduler.wal_positions WHERE node_id = $1 FOR UPDATE", two.node.node_id
                )
                with hurried(two), pytest.raises(DurabilityTimeoutError):
                    await two.submitter.submit(created("acme", 1), key=key("k"))
                await proxy.refuse()
        await one.submitter.submit(created("acme", 1), key=key("k"))
        before = await chains.sound("acme")
        async with run_node(settings) as two:
            await until(lambda: two.node.chained.lsn >= two._started.wal.last_lsn, "the backlog drains")
        assert await chains.sound("acme") == before


async def test_a_key_whose_rows_cannot_be_read_is_no_damage(
    run_node: RunNode, proxy: PostgresProxy, chains: Chains
) -> None:
    async with run_node(url=proxy.url) as service:
        first = await service.submitter.submit(created("acme", 1), key=key("k"))
        await until(lambda: bool(service.keyed._entries._known), "the node follows what it chained")
        await proxy.refuse()
        with pytest.raises(DatabaseUnavailableError):
            await service.submitter.submit(created("acme", 1, durability=LOCAL), key=key("k"))
        assert not service.breaks.open()
        await proxy.accept()

        async def answered() -> Any:
            try:
                return await service.submitter.submit(created("acme", 1, durability=LOCAL), key=key("k"))
            except DatabaseUnavailableError:
                return None

        again = await until(answered, "the database answers again")
        assert again.replayed
        assert (again.job_id, again.hlc) == (first.job_id, first.hlc)
    assert len(await chains.sound("acme")) == 1


async def test_a_key_that_another_node_chains_between_two_looks_is_no_damage(
    run_node: RunNode, make_settings: MakeSettings, chains: Chains
) -> None:
    def send(service: Service, tenant_id: str, lines: int) -> asyncio.Task[Any]:
        if lines == 1:
            return asyncio.ensure_future(service.submitter.submit(created(tenant_id, 1), key=key("k")))
        drafts = EventLines.of([created(tenant_id, n) for n in range(lines)])
        return asyncio.ensure_future(service.submitter.submit_lines(drafts, key=key("k"), durability=None))

    async with run_node(make_settings("one")) as one, run_node(make_settings("two")) as two:
        looking = two.keyed._entries._loading
        for tenant_id, lines in (("acme", 1), ("beta", 3)):
            async with looking:
                # Node two has found no row, and waits to look into the chain.
                later = send(two, tenant_id, lines)
                await until(lambda: bool(looking._waiters), "node two looks into the chain")
                first = await send(one, tenant_id, lines)
            again = await later
            assert again.replayed
            assert again._replace(replayed=False) == first
            assert not two.breaks.open()
            assert len(await chains.sound(tenant_id)) == lines


# --- rows of the table of keys that somebody copied -----------------------------------------------

COPY = """
INSERT INTO scheduler.idempotency (tenant_id, route, key, line, body_digest, seq, epoch, lsn)
SELECT tenant_id, route, $1, line, body_digest, seq, epoch, lsn FROM scheduler.idempotency
 WHERE tenant_id = $2 AND key = 'k'
"""


async def test_a_row_copied_under_another_key_answers_for_no_write(
    run_server: RunServer, chains: Chains, superuser: asyncpg.Connection
) -> None:
    async with run_server() as client:
        body = {"spec": {"n": 1}}
        first = await post(client, "/v1/jobs", "k", **body)
        unkeyed = (await post(client, "/v1/jobs", None, **body)).json()
        await superuser.execute(COPY, "copied", "acme")
        assert kind(await post(client, "/v1/jobs", "copied", **body)) == (409, "chain-damaged")
        await superuser.execute("UPDATE scheduler.idempotency SET seq = $1", unkeyed["chain"]["seq"])
        unproven = await post(client, "/v1/jobs", "k", **body)
        assert kind(unproven) == (409, "idempotency-key-unproven")
        assert f"seq 2, job {unkeyed['job_id']}" in unproven.json()["detail"]
        other = (await post(client, "/v1/jobs", None, spec={"n": 2})).json()
        await superuser.execute("UPDATE scheduler.idempotency SET seq = $1", other["chain"]["seq"])
        assert kind(await post(client, "/v1/jobs", "k", **body)) == (409, "chain-damaged")
        await superuser.execute("UPDATE scheduler.idempotency SET seq = $1", first.json()["chain"]["seq"])
        await superuser.execute("UPDATE scheduler.idempotency SET line = 1 WHERE key = 'k'")
        assert kind(await post(client, "/v1/jobs", "k", **body)) == (409, "chain-damaged")
        await superuser.execute("UPDATE scheduler.idempotency SET line = 0 WHERE key = 'k'")
        again = await post(client, "/v1/jobs", "k", **body)
        assert (again.status_code, again.content) == (201, first.content)
        assert len(await chains.sound("acme")) == 3


async def test_a_copied_row_decides_nothing_in_the_chain(
    run_node: RunNode, make_settings: MakeSettings, proxy: PostgresProxy, chains: Chains, superuser: asyncpg.Connection
) -> None:
    settings = make_settings(shutdown_grace="2s")
    # By tenant, the body of the request under the key of the copied row; some are made to name an entry without a key.
    bodies = {"copied": "body", "unkeyed-same": "body", "unkeyed-another": "another"}
    named, taken = {}, {}
    async with run_node(settings, url=proxy.url) as service:
        submit = service.submitter.submit
        for tenant_id in bodies:
            await submit(created(tenant_id, 1), key=key("k"))
            unkeyed = await submit(created(tenant_id, 7), key=None)
            assert unkeyed.chain is not None
            named[tenant_id] = unkeyed.chain.seq
        await proxy.refuse()
        rename = "UPDATE scheduler.idempotency SET seq = $1 WHERE key = 'copied' AND tenant_id = $2"
        for tenant_id, body in bodies.items():
            await superuser.execute(COPY, "copied", tenant_id)
            if tenant_id != "copied":
                await superuser.execute(rename, named[tenant_id], tenant_id)
            taken[tenant_id] = await submit(created(tenant_id, 1, durability=LOCAL), key=key("copied", body))
        await proxy.accept()

        def are_met() -> bool:
            chained = service.node.chained.lsn >= max(each.lsn for each in taken.values())
            return bodies.keys() <= service.node.damaged.keys() or chained

        await until(are_met, "the rows are met")
        assert "Idempotency-Key 'copied'" in service.node.damaged["copied"]
        for tenant_id in ("unkeyed-same", "unkeyed-another"):
            said = f"Idempotency-Key 'copied' in scheduler.idempotency names seq {named[tenant_id]}"
            assert said in service.node.damaged[tenant_id]
    await superuser.execute("DELETE FROM scheduler.idempotency WHERE key = 'copied'")
    async with run_node(settings) as service:
        await until(lambda: service.quarantine.keeps_from() is None, "what was held back is chained")
    for tenant_id in bodies:
        entries = await chains.sound(tenant_id)
        assert [(entry["action"], entry["t_hlc"]) for entry in entries][2:] == [("ENQUEUE", taken[tenant_id].hlc)]


def entry_of(pending: Pending, payload: bytes | None = None) -> ChainedLine:
    """The row of a keyed record, and the entry that it names, as the table would give them."""
    assert pending.idempotency is not None
    _, _, line, digest = pending.idempotency
    text = (pending.payload if payload is None else payload).decode()
    action = ACTIONS[pending.record_type]
    return ChainedLine("acme", line, digest, 1, 1, 1, pending.hlc.text(), pending.job_id, action, text, "", None)


def record_of(at_ms: int, n: int, *, says_key: bool = True, line: int = 0) -> Pending:
    """A record of JobCreated whose id the node made, as one of this version makes it or, saying no key, of an
    earlier one."""
    name = IdempotencyKey(1, "k", line, b"d" * 32)
    facts = {"type": "JobCreated", "fence_token": 1, "spec": {"n": n}}
    if says_key:
        facts[MEMBER] = key_digest("acme", name)
    hlc = Hlc(at_ms, 0, "node-1")
    return Pending(1, 1, hlc, 1, "acme", f"local-{at_ms}-gate-00000", canonical.encode(facts), name, None)


def test_an_entry_from_before_entries_said_their_key_counts_only_as_the_fact_that_its_line_is() -> None:
    name, now = ("acme", 1, "k"), record_of(2000, 1)
    assert is_bound(entry_of(record_of(1000, 1)), name, {0: now})
    assert is_bound(entry_of(record_of(1000, 1, says_key=False)), name, {0: now})
    assert not is_bound(entry_of(record_of(1000, 2, says_key=False)), name, {0: now})
    assert not is_bound(entry_of(record_of(1000, 1, says_key=False))._replace(job_id="x"), name, {0: now})
    assert not is_bound(entry_of(record_of(1000, 1, says_key=False))._replace(action="CANCEL"), name, {0: now})
    # Of another line: where the record is from before as well, which the WAL says.
    first = entry_of(record_of(1000, 1, says_key=False))
    assert not is_bound(first, name, {1: record_of(2000, 1, line=1)})
    assert is_bound(first, name, {1: record_of(2000, 1, says_key=False, line=1)})
    # At the HLC of the record stands the record.
    assert is_bound(entry_of(now), name, {0: now})
    assert not is_bound(entry_of(now, payload=record_of(2000, 2).payload), name, {0: now})
