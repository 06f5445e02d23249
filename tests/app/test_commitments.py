"""``/v1/commitments``: compare-and-swap on what is promised, judged where it is chained."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest

from app.read.commitments import OverbookedNodes
from app.runtime.settings.config import Settings
from app.share.bundle.recovery import export_from_wal, survey
from app.store import Connection
from app.store.jobs import table as job_table
from app.write.followers.followers import TableFollower
from app.write.followers.job_table import JobTable, Turn
from ledger.positions import BEFORE_FIRST
from signing import private_keys
from tests.app.chain_builder import edit
from tests.app.chains import followed, until
from tests.app.client import Client
from tests.app.conftest import MakeSettings, RunServer
from tests.app.postgres_proxy import PostgresProxy
from tests.app.shared import Shared, sharing
from tests.conftest import Database

_KEYS = count(1)
CPU = {"cpu_millis": 4000}


def placement(capsule: str, node: str, reservation: dict[str, Any] = CPU) -> dict[str, Any]:
    return {
        "kind": "Placement", "capsule": capsule, "node": node, "reservation": reservation, "limit": reservation
    }  # fmt: skip


def free(node: str, at_least: dict[str, Any] = CPU) -> dict[str, Any]:
    return {"kind": "NodeFreeOf", "node": node, "at_least": at_least}


async def propose(
    client: Client,
    commitment: dict[str, Any],
    precondition: dict[str, Any] | None = None,
    key: str | None = None,
    tenant: str | None = None,
) -> httpx.Response:
    body = {"tenant_id": tenant or client.tenant, "commitment": commitment}
    if precondition is not None:
        body["precondition"] = precondition
    headers = {"Idempotency-Key": key or f"key-{next(_KEYS)}"}
    return await client.post("/v1/commitments", json=body, headers=headers)


async def promised(client: Client, **params: Any) -> dict[int, dict[str, Any]]:
    answer = await client.get("/v1/commitments", params={"tenant_id": client.tenant, **params})
    answer.raise_for_status()
    return {item["index"]: item["commitment"] for item in answer.json()["items"]}


@pytest.fixture
def client(shared_client: Client) -> Client:
    """A client of the node that tests share; a node that is restarted, or harmed, is one of ``run_server``."""
    return shared_client


async def test_one_wins_the_other_learns_who_stands_in_the_way_and_both_are_recorded(client: Client) -> None:
    first, second = await asyncio.gather(
        propose(client, placement("a", "n1"), free("n1")), propose(client, placement("b", "n1"), free("n1"))
    )
    won, lost = sorted((first, second), key=lambda answer: answer.status_code)
    assert (won.status_code, lost.status_code) == (201, 409)
    accepted, conflict = won.json(), lost.json()
    assert accepted.keys() == {"index", "hlc", "verdict"}
    assert accepted["verdict"] == "accepted"
    assert conflict["type"].endswith("/conflict")
    assert (conflict["reason"], conflict["blocking_index"]) == ("node-not-free", accepted["index"])
    entries = (await client.get("/v1/chain/entries", params={"tenant_id": client.tenant})).json()["items"]
    actions = {entry["seq"]: entry["action"] for entry in entries}
    assert actions[accepted["index"]] == "PROPOSE_ACCEPTED"
    assert actions[conflict["index"]] == "PROPOSE_REJECTED"
    assert list(await promised(client)) == [accepted["index"]]


async def test_a_repeated_proposal_gets_its_first_answer_again(client: Client) -> None:
    won = await propose(client, placement("a", "n1"), free("n1"), "one")
    lost = await propose(client, placement("b", "n1"), free("n1"), "two")
    for first, commitment, key in ((won, placement("a", "n1"), "one"), (lost, placement("b", "n1"), "two")):
        again = await propose(client, commitment, free("n1"), key)
        assert (again.status_code, again.content) == (first.status_code, first.content)
        assert again.headers["Idempotent-Replay"] == "true"
        assert "Idempotent-Replay" not in first.headers
    other = await propose(client, placement("c", "n1"), free("n1"), "one")
    assert (other.status_code, other.json()["type"].rpartition("/")[2]) == (422, "idempotency-key-reused")
    assert len((await client.get("/v1/chain/entries", params={"tenant_id": client.tenant})).json()["items"]) == 2


async def test_known_capacity_is_shared_and_revoking_gives_it_back(client: Client) -> None:
    body = {"tenant_id": client.tenant, "capacity": {"cpu_millis": 10_000}}
    capacity = await client.put("/v1/nodes/n1/capacity", json=body)
    assert (capacity.status_code, capacity.json()["node"]) == (200, "n1")
    indexes = [(await propose(client, placement(name, "n1"), free("n1"))).json()["index"] for name in "ab"]
    full = await propose(client, placement("c", "n1"), free("n1"))
    assert (full.status_code, full.json()["free"]) == (409, {"cpu_millis": 2000})
    assert (await propose(client, {"kind": "Revocation", "index": indexes[0]})).status_code == 201
    assert (await propose(client, placement("c", "n1"), free("n1"))).status_code == 201
    gone = await propose(client, {"kind": "Revocation", "index": indexes[0]})
    assert (gone.status_code, gone.json()["reason"]) == (409, "not-active")
    nodes = (await client.get("/v1/nodes", params={"tenant_id": client.tenant})).json()
    assert [(node["node"], node["capacity"]) for node in nodes["items"]] == [("n1", {"cpu_millis": 10_000})]


async def set_capacity(client: Client, node: str, **said: Any) -> httpx.Response:
    return await client.put(f"/v1/nodes/{node}/capacity", json={"tenant_id": client.tenant, **said})


async def test_nothing_goes_beyond_a_known_capacity_whatever_the_precondition(client: Client) -> None:
    said = {"capacity": {"cpu_millis": 6000}, "overcommit": {"cpu_millis": "1.5"}}
    assert (await set_capacity(client, "n1", **said)).status_code == 200
    first = (await propose(client, placement("a", "n1"))).json()["index"]
    assert (await propose(client, placement("b", "n1"), free("n1"))).status_code == 201
    over = await propose(client, placement("c", "n1"))
    told = over.json()
    assert (over.status_code, told["reason"], told["free"]) == (409, "over-capacity", {"cpu_millis": 1000})
    assert told["blocking_index"] == first + 1
    assert (await set_capacity(client, "n1", capacity={"cpu_millis": 4000})).status_code == 200
    assert (await propose(client, {"kind": "Revocation", "index": first})).status_code == 201
    assert (await propose(client, placement("c", "n1", {"cpu_millis": 1}))).json()["reason"] == "over-capacity"
    verdict = (await client.get("/v1/chain/verify", params={"tenant_id": client.tenant})).json()
    assert (verdict["valid"], verdict["verdicts"]["projection"]) == (True, "ok")


@pytest.mark.parametrize("factor", ["0.5", "1.0001", "1000", "1e3", "", 1.5, None])
async def test_an_overcommit_that_is_none_is_refused_and_leaves_nothing(client: Client, factor: object) -> None:
    answer = await set_capacity(client, "n1", capacity={"cpu_millis": 1}, overcommit={"cpu_millis": factor})
    assert (answer.status_code, answer.json()["path"]) == (422, "overcommit.cpu_millis")
    if factor == "0.5":
        assert "from 1 to 999.999 as text" in answer.json()["detail"]
    assert (await client.get("/v1/chain/head", params={"tenant_id": client.tenant})).status_code == 404


async def test_a_tenant_from_before_rules_had_versions_goes_on_by_its_rules_until_they_are_raised(
    client: Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    with monkeypatch.context() as before:
        before.setattr("app.write.intake.proposals.RULES_NEWEST", 1)
        await set_capacity(client, "n1", capacity={"cpu_millis": 4000})
        first = await propose(client, placement("a", "n1"), key="first")
    again = await propose(client, placement("a", "n1"), key="first")
    assert (again.status_code, again.content) == (201, first.content), "the newer node adds another version to it"
    assert (await propose(client, placement("b", "n1"))).status_code == 201
    raised = await client.put(f"/v1/tenants/{client.tenant}/rules", json={"version": 2})
    assert (raised.status_code, raised.json()["version"]) == (200, 2)
    over = await propose(client, placement("c", "n1"))
    assert (over.status_code, over.json()["reason"]) == (409, "over-capacity")
    repeated = await client.put(f"/v1/tenants/{client.tenant}/rules", json={"version": 2})
    assert (repeated.json()["index"], repeated.headers["Idempotent-Replay"]) == (raised.json()["index"], "true")
    older = await client.put(f"/v1/tenants/{client.tenant}/rules", json={"version": 1})
    assert (older.status_code, older.json()["reason"]) == (409, "rules-in-force")
    kept = await propose(client, {"kind": "Revocation", "index": raised.json()["index"]})
    assert (kept.status_code, kept.json()["reason"]) == (409, "not-revocable")
    verdict = (await client.get("/v1/chain/verify", params={"tenant_id": client.tenant})).json()
    assert (verdict["valid"], verdict["verdicts"]["projection"]) == (True, "ok")


async def test_rules_that_are_unknown_or_of_nobody_are_refused(client: Client) -> None:
    for version in (0, 3, "2"):
        answer = await client.put(f"/v1/tenants/{client.tenant}/rules", json={"version": version})
        assert (answer.status_code, answer.json()["path"]) == (422, "version")
    answer = await client.put(f"/v1/tenants/{client.tenant}/rules", json={"version": 2})
    assert (answer.status_code, answer.json()["type"].rpartition("/")[2]) == (404, "tenant-not-found")


async def test_the_rules_of_a_tenant_can_be_set_before_its_first_proposal(client: Client) -> None:
    await client.post("/v1/jobs", json={"tenant_id": client.tenant, "durability": "GLOBAL"})
    answer = await client.put(f"/v1/tenants/{client.tenant}/rules", json={"version": 2})
    assert (answer.status_code, answer.json()["index"]) == (200, 2)
    await set_capacity(client, "n1", capacity={})
    assert (await propose(client, placement("a", "n1"))).json()["reason"] == "over-capacity"


async def nodes_of(client: Client, **params: Any) -> dict[str, Any]:
    answer = await client.get("/v1/nodes", params={"tenant_id": client.tenant, **params})
    answer.raise_for_status()
    found: dict[str, Any] = answer.json()
    return found


async def test_a_list_of_nodes_says_what_each_has_what_is_reserved_and_what_is_free(client: Client) -> None:
    has = {"cpu_millis": 4000, "memory_bytes": 10, "accelerators": {"A100": 2, "T4": 1}}
    overcommit = {"cpu_millis": "1.5", "accelerators": {"T4": "3"}}
    index = (await set_capacity(client, "n1", capacity=has, overcommit=overcommit)).json()["index"]
    claimed = {"cpu_millis": 5000, "accelerators": {"A100": 2, "T4": 1}}
    placed = (await propose(client, placement("a", "n1", claimed))).json()["index"]
    await propose(client, placement("b", "unknown"))
    found = await nodes_of(client)
    assert (found["as_of_seq"], found["rules"], found["next_cursor"]) == (placed + 1, 2, None)
    assert found["items"] == [
        {
            "index": index,
            "node": "n1",
            "capacity": has,
            "overcommit": overcommit,
            "reserved": claimed,
            "free": {"cpu_millis": 1000, "memory_bytes": 10, "accelerators": {"A100": 0, "T4": 2}},
            "overbooked": False,
            "excess": {},
        }
    ]
    lowered = (await set_capacity(client, "n1", capacity={"cpu_millis": 3000})).json()["index"]
    (node,) = (await nodes_of(client))["items"]
    assert (node["index"], node["overcommit"], node["free"], node["overbooked"]) == (lowered, {}, {}, True)
    assert node["excess"] == {"cpu_millis": 2000, "accelerators": {"A100": 2, "T4": 1}}
    await propose(client, {"kind": "Revocation", "index": placed})
    (node,) = (await nodes_of(client))["items"]
    assert (node["reserved"], node["free"], node["overbooked"]) == ({}, {"cpu_millis": 3000}, False)
    # What was so once is found again, in whatever order it is asked for.
    assert (await nodes_of(client, as_of_seq=placed))["items"] == [{**found["items"][0]}]
    assert (await nodes_of(client, as_of_seq=lowered))["items"][0]["overbooked"]


@pytest.mark.parametrize("nodes_max", [500_000, 1])
async def test_pages_of_nodes_show_one_state_also_if_that_is_no_longer_in_memory(
    client: Client, monkeypatch: pytest.MonkeyPatch, nodes_max: int
) -> None:
    monkeypatch.setattr("app.read.commitments.NODES_MAX", nodes_max)
    monkeypatch.setattr("app.read.commitments.ENTRIES_AT_ONCE", 2)
    for node in ("n1", "n2", "n3"):
        await set_capacity(client, node, capacity={"cpu_millis": 1})
    gang = [{"capsule": node, "node": node, "reservation": {"cpu_millis": 1}} for node in ("n1", "n3")]
    placed = (await propose(client, {"kind": "GangPlacement", "gang": "g", "members": gang})).json()["index"]
    for node in ("n1", "n3"):
        await set_capacity(client, node, capacity={})
    first = await nodes_of(client, limit=1, overbooked=True)
    assert [node["node"] for node in first["items"]] == ["n1"]
    await propose(client, {"kind": "Revocation", "index": placed})
    assert (await nodes_of(client, overbooked=True))["items"] == []
    rest = await nodes_of(client, limit=5, overbooked=True, cursor=first["next_cursor"])
    assert (rest["as_of_seq"], [node["node"] for node in rest["items"]]) == (first["as_of_seq"], ["n3"])
    other = await client.get("/v1/nodes", params={"tenant_id": client.tenant, "cursor": first["next_cursor"]})
    assert (other.status_code, other.json()["path"]) == (422, "cursor")


async def test_the_metric_counts_overbooked_nodes_of_all_tenants_as_they_come_and_go(
    client: Client, shared: Shared
) -> None:
    overbooked = shared.services[OverbookedNodes]
    await overbooked.count()
    before = overbooked.values()["commitment_nodes_overbooked"]
    await set_capacity(client, "n1", capacity={"cpu_millis": 1})
    placed = (await propose(client, placement("a", "n1", {"cpu_millis": 1}))).json()["index"]
    await set_capacity(client, "n1", capacity={})
    await until(lambda: followed(shared.superuser), "the table follows")
    await overbooked.count()
    assert overbooked.values()["commitment_nodes_overbooked"] == before + 1
    assert f"commitment_nodes_overbooked {before + 1:.1f}" in (await client.get("/metrics")).text
    await propose(client, {"kind": "Revocation", "index": placed})
    await overbooked.count()
    assert overbooked.values()["commitment_nodes_overbooked"] == before


@pytest.mark.parametrize("is_followed", [True, False])
async def test_what_was_promised_at_any_seq_whether_followed_or_not(
    client: Client, shared: Shared, is_followed: bool
) -> None:
    if not is_followed:
        await shared.superuser.execute("BEGIN; LOCK TABLE scheduler.follower_positions IN EXCLUSIVE MODE")
    first = (await propose(client, placement("a", "n1"))).json()["index"]
    second = (await propose(client, placement("b", "n2"))).json()["index"]
    revoked = (await propose(client, {"kind": "Revocation", "index": first})).json()["index"]
    third = (await propose(client, placement("a", "n3"))).json()["index"]
    if is_followed:
        await until(lambda: followed(shared.superuser), "the table follows")
    assert list(await promised(client)) == [second, third]
    assert list(await promised(client, as_of_seq=revoked)) == [second]
    assert list(await promised(client, as_of_seq=second)) == [first, second]
    page = (await client.get("/v1/commitments", params={"tenant_id": client.tenant, "limit": 1})).json()
    assert page["as_of_seq"] == third
    await propose(client, {"kind": "Revocation", "index": third})
    rest = {"tenant_id": client.tenant, "limit": 5, "cursor": page["next_cursor"]}
    later = (await client.get("/v1/commitments", params=rest)).json()
    assert (later["as_of_seq"], [item["index"] for item in later["items"]]) == (third, [third])
    if not is_followed:
        await shared.superuser.execute("ROLLBACK")


async def test_a_restarted_node_judges_from_what_was_promised_before(run_server: RunServer) -> None:
    async with run_server() as client:
        index = (await propose(client, placement("a", "n1"), free("n1"))).json()["index"]
    async with run_server() as client:
        lost = await propose(client, placement("b", "n1"), free("n1"))
        assert (lost.status_code, lost.json()["blocking_index"]) == (409, index)
        placed = await propose(client, placement("a", "n9"))
        assert (placed.status_code, placed.json()["reason"]) == (409, "capsule-placed")


@pytest.mark.parametrize("is_damaged", [False, True])
async def test_a_long_history_is_read_while_other_tenants_are_chained(
    database: Database, make_settings: MakeSettings, monkeypatch: pytest.MonkeyPatch, *, is_damaged: bool
) -> None:
    monkeypatch.setattr("app.write.chain.commitments.AT_ONCE_MAX", 2)
    monkeypatch.setattr("app.store.commitments.ENTRIES_AT_ONCE", 1)
    async with sharing(make_settings(), database) as shared, Client(base_url=shared.url, timeout=30) as client:
        placed = [(await propose(client, placement(f"c{n}", f"n{n}"), tenant="acme")).json()["index"] for n in range(5)]
        if is_damaged:
            changed = "UPDATE scheduler.scheduler_log SET job_id = 'x' WHERE tenant_id = 'acme' AND seq = 4"
            await edit(shared.superuser, changed)
    async with sharing(make_settings(), database) as shared, Client(base_url=shared.url, timeout=30) as client:
        service = shared.service
        async with service.appender.commitments._reading_one:
            proposed = asyncio.ensure_future(propose(client, placement("other", "n4"), free("n4"), tenant="acme"))
            await until(lambda: "acme" in service.node.waiting, "the tenant waits")
            assert (await propose(client, placement("c0", "n0"), tenant="other")).status_code == 201
            assert "commitments are being read" in (await client.get("/readyz")).json()["checks"]["locks"]["detail"]
            assert not proposed.done()
        answer = await proposed
        assert answer.status_code == 409, answer.text
        if is_damaged:
            assert answer.json()["type"].endswith("/chain-damaged")
        else:
            assert answer.json()["blocking_index"] == placed[4]
        assert not service.node.waiting


NO_PROPOSALS: list[tuple[dict[str, Any], str]] = [
    ({"commitment": {"kind": "Placed"}}, "commitment.kind"),
    ({"commitment": {"kind": "Lease", "resource": "r"}}, "commitment.holder"),
    ({"commitment": {"kind": "Revocation", "index": 0}}, "commitment.index"),
    ({"commitment": placement(".a", "n1")}, "commitment.capsule"),
    ({"commitment": placement("a", "n1", {"cpu_millis": -1})}, "commitment.reservation.cpu_millis"),
    (
        {"commitment": placement("a", "n1"), "precondition": {"kind": "NodeFreeOf", "node": "n1"}},
        "precondition.at_least",
    ),
    ({"commitment": {"kind": "GangPlacement", "gang": "g", "members": []}}, "commitment.members"),
]


async def test_what_is_no_proposal_is_refused_and_leaves_nothing(client: Client) -> None:
    for body, path in NO_PROPOSALS:
        answer = await client.post(
            "/v1/commitments", json={"tenant_id": client.tenant, **body}, headers={"Idempotency-Key": "k"}
        )
        assert (answer.status_code, answer.json().get("path")) == (422, path), body
        assert (await client.get("/v1/chain/head", params={"tenant_id": client.tenant})).status_code == 404


async def test_a_proposal_needs_a_key(client: Client) -> None:
    body = {"tenant_id": client.tenant, "commitment": placement("a", "n1")}
    answer = await client.post("/v1/commitments", json=body)
    assert (answer.status_code, answer.json()["path"]) == (422, "Idempotency-Key")


async def test_a_node_that_lost_its_fence_answers_neither_proposal_nor_snapshot(
    run_server: RunServer, superuser: asyncpg.Connection
) -> None:
    async with run_server() as client:
        await propose(client, placement("a", "n1"))
        await superuser.execute("UPDATE scheduler.wal_positions SET epoch = epoch + 1")
        snapshot = await client.get("/v1/commitments", params={"tenant_id": "acme"})
        assert (snapshot.status_code, snapshot.json()["type"].rpartition("/")[2]) == (503, "fenced")
        proposal = await propose(client, placement("b", "n2"))
        assert (proposal.status_code, proposal.json()["type"].rpartition("/")[2]) == (503, "fenced")
    assert await superuser.fetchval("SELECT count(*) FROM scheduler.scheduler_log WHERE tenant_id = 'acme'") == 1


async def imported(client: Client, bundle: Path) -> tuple[int, int]:
    """Entries that were imported, and that were there already; there are no conflicts."""
    answer = await client.post("/v1/bundles/import", files={"file": (bundle.name, bundle.read_bytes())})
    answer.raise_for_status()
    told = answer.json()
    assert told["conflicts"] == []
    return told["imported"], told["duplicates"]


@pytest.fixture
async def trusting(run_server: RunServer, make_settings: MakeSettings, tmp_path: Path) -> MakeSettings:
    """Settings of nodes that import what ``node`` signed."""
    keys = tmp_path / "keys.json"
    async with run_server() as client:
        keys.write_bytes((await client.get("/v1/keys")).content)
    return partial(make_settings, bundle={"trusted_keys": str(keys)})


def unjudged(settings: Settings) -> Path:
    """A bundle of what the WAL has, chained or not."""
    path = settings.data_dir.parent / "unjudged.tar"
    signer = private_keys.load(str(settings.data_dir / "keys" / "signing.pem"))
    with path.open("wb") as file:
        export_from_wal(survey(settings.data_dir / "wal"), "acme", signer, signer, file.write)
    return path


async def test_what_is_judged_already_adds_nothing_by_an_import(
    run_server: RunServer, trusting: MakeSettings, tmp_path: Path
) -> None:
    async with run_server(settings := trusting()) as client:
        placed = (await propose(client, placement("a", "n1"), free("n1"))).json()["index"]
        assert (await propose(client, placement("b", "n1"), free("n1"))).status_code == 409
        judged = tmp_path / "judged.tar"
        judged.write_bytes((await client.post("/v1/bundles/export", json={"tenant_id": "acme"})).content)
        for bundle in (judged, unjudged(settings)):
            assert await imported(client, bundle) == (0, 2)
        assert list(await promised(client)) == [placed]
        assert (await propose(client, placement("b", "n1"), free("n1"))).json()["blocking_index"] == placed


async def test_a_proposal_that_was_imported_before_its_node_chained_it_is_history(
    run_server: RunServer, trusting: MakeSettings, proxy: PostgresProxy
) -> None:
    settings = trusting()
    async with run_server(settings, url=proxy.url) as client, run_server(trusting("other")) as other:
        await propose(client, {"kind": "Lease", "resource": "r", "holder": "h"}, key="first")
        before = survey(wal := settings.data_dir / "wal").records
        await proxy.refuse()
        waiting = asyncio.create_task(propose(client, placement("a", "n1"), free("n1"), "one"))
        await until(lambda: survey(wal).records > before, "the WAL has it")
        assert await imported(other, unjudged(settings)) == (1, 1)
        await proxy.accept()
        lost = await waiting
        assert (lost.status_code, lost.json()["reason"]) == (409, "imported")
        assert list(await promised(client)) == [1]
        assert (await propose(client, placement("a", "n1"), free("n1"), "one")).status_code == 201
        verdict = (await other.get("/v1/chain/verify", params={"tenant_id": "acme"})).json()
        assert (verdict["valid"], verdict["verdicts"]["projection"]) == (True, "ok")


class _JobsAlone(JobTable):
    """The job table as nodes followed it that know no commitments."""

    async def empty(self, connection: Connection, tenant_ids: Sequence[str]) -> None:
        await job_table.empty(connection, tenant_ids)

    async def take(self, connection: Connection, turn: Turn) -> None:
        jobs_alone = {tenant_id: [each for each in entries if each.action == "ENQUEUE"]
                      for tenant_id, entries in turn.entries.items()}  # fmt: skip
        await super().take(connection, replace(turn, entries=jobs_alone))


async def test_a_node_of_a_version_without_commitments_leaves_none_out(
    run_server: RunServer, superuser: asyncpg.Connection, database: Database
) -> None:
    async with run_server() as client:
        first = (await propose(client, placement("a", "n1"), free("n1"))).json()["index"]
    await superuser.execute("TRUNCATE scheduler.commitments")
    before = TableFollower(
        _JobsAlone(lambda *_: None), partial(asyncpg.connect, database.service_url), lambda _: BEFORE_FIRST
    )

    async def has_tried() -> bool:
        return before.last_error is not None or await followed(superuser)

    running = asyncio.create_task(before.run())
    await until(has_tried, "it has tried to follow")
    running.cancel()
    await asyncio.wait((running,))
    async with run_server() as client:
        lost = await propose(client, placement("b", "n1"), free("n1"))
        assert (lost.status_code, lost.json().get("blocking_index")) == (409, first)
        await until(lambda: followed(superuser), "a node of this version follows")
    assert await superuser.fetchval("SELECT array_agg(seq) FROM scheduler.commitments") == [first]
