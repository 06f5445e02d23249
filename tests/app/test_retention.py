"""A tenant's oldest entries leave on the record: once they are old, archived, of jobs that ended and not held; and what
is left verifies, answers, and says where the rest is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg
import httpx
import orjson
import pytest

from app.dev.embedded import EmbeddedPostgres
from app.store.retention import begun_at
from ledger import canonical
from ledger.machines.retention import SUBJECT
from tests.app.chains import until as waiting
from tests.app.conftest import MakeSettings, RunServer
from tests.app.service_thread import serving
from tests.conftest import connected_to
from tests.ledger.ledger_in_memory import link_of
from tests.tally import run_tally
from tests.waiting import until

DATABASE = "retention"
BATCH = 10


class Site(NamedTuple):
    """A service, its client, its database and its archive."""

    client: httpx.Client
    service_url: str
    superuser_url: str
    folder: Path

    def query(self, statement: str, *values: object) -> list[Any]:
        async def run() -> list[Any]:
            async with connected_to(self.superuser_url) as connection:
                return await connection.fetch(statement, *values)

        return asyncio.run(run())


@pytest.fixture(scope="module")
def site(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("retention")
    settings: dict[str, Any] = {
        "archive": {"url": str(folder / "archive"), "interval": "1s"},
        "chain": {"batch_size": BATCH},
    }
    with (
        serving(postgres, folder / "data", DATABASE, **settings) as url,
        httpx.Client(base_url=url, timeout=60, trust_env=False) as client,
    ):
        yield Site(client, postgres.service_url(DATABASE), postgres.superuser_url(DATABASE), folder)


def events_of(tenant: str, number: int, *, ends: bool = True) -> list[dict[str, Any]]:
    job = {"tenant_id": tenant, "job_id": f"job-{number}"}
    created = {**job, "type": "JobCreated", "spec": {"team": "ml" if number % 2 else "web"}, "assigned_dcs": ["dc1"]}
    accepted = {**job, "type": "JobAccepted", "dc_id": "dc1"}
    return [created, accepted, *([{**job, "type": "JobCompleted", "final_status": "ok"}] if ends else [])]


def write(site: Site, events: list[dict[str, Any]]) -> None:
    lines = b"\n".join(map(orjson.dumps, events))
    answer = site.client.post(
        "/v1/events", params={"durability": "GLOBAL"}, content=lines, headers={"Content-Type": "application/x-ndjson"}
    )
    assert answer.status_code == 200, answer.text


def fill(site: Site, tenant: str, jobs: range) -> None:
    """Jobs that have ended, and are signed; the node archives them within a second."""
    write(site, [event for number in jobs for event in events_of(tenant, number)])
    sign(site, tenant)


def sign(site: Site, tenant: str) -> None:
    site.client.post("/v1/snapshots", json={"tenant_id": tenant})
    site.client.get("/v1/jobs", params={"tenant_id": tenant, "limit": 1}).raise_for_status()


def set_policy(site: Site, tenant: str, **policy: str | None) -> dict[str, Any]:
    answer = site.client.put("/v1/retention", params={"tenant_id": tenant}, json=policy)
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def policy(site: Site, tenant: str) -> dict[str, Any]:
    answer = site.client.get("/v1/retention", params={"tenant_id": tenant})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def until_prunable(site: Site, tenant: str, to_seq: int) -> None:
    """Wait until the entries are older than the period."""
    until(lambda: policy(site, tenant)["prunable_to_seq"] >= to_seq, "the entries may leave")


def prune(site: Site, tenant: str, status: int = 200, **wanted: Any) -> dict[str, Any]:
    answer = site.client.post("/v1/prunes", json={"tenant_id": tenant, **wanted})
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()
    return found


def until_removed(site: Site, tenant: str, to_seq: int) -> None:
    first = "SELECT min(seq) FROM scheduler.scheduler_log WHERE tenant_id = $1"
    until(lambda: site.query(first, tenant)[0][0] == to_seq + 1, "the rows have left")


def verdict(site: Site, tenant: str, **wanted: Any) -> dict[str, Any]:
    found: dict[str, Any] = site.client.get("/v1/chain/verify", params={"tenant_id": tenant, **wanted}).json()
    return found


def problem(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["type"].rpartition("/")[2]


def pruned_tenant(site: Site, tenant: str) -> int:
    """A tenant whose first jobs have left; returns its floor."""
    fill(site, tenant, range(10))
    set_policy(site, tenant, period="1s")
    until_prunable(site, tenant, 30)
    to_seq = int(prune(site, tenant)["to_seq"])
    until_removed(site, tenant, to_seq)
    return to_seq


def test_a_prefix_leaves_and_the_rest_verifies_and_says_where_it_is(site: Site) -> None:
    tenant = "leaves"
    fill(site, tenant, range(10))
    before = verdict(site, tenant)
    assert (before["verified_from_seq"], before["pruned"]) == (1, None)
    set_policy(site, tenant, period="1s")
    until_prunable(site, tenant, 30)
    would = prune(site, tenant, dry_run=True)
    assert (would["to_seq"], would["seq"]) == (30, None)
    assert policy(site, tenant)["pruned_to_seq"] == 0

    done = prune(site, tenant)
    assert (done["to_seq"], done["never_ended"], done["archive"]) == (30, 0, str(site.folder / "archive"))
    until_removed(site, tenant, 30)
    found = verdict(site, tenant)
    assert found["valid"], found
    assert (found["from_seq"], found["verified_from_seq"], found["entries_checked"]) == (
        31,
        31,
        found["head"]["seq"] - 30,
    )
    assert found["pruned"]["to_seq"] == 30
    assert {aspect for aspect, said in found["verdicts"].items() if said != "ok"} <= {"checkpoint"}
    shown = policy(site, tenant)
    assert (shown["verified_from_seq"], shown["pruned_to_seq"]) == (31, 30)

    for path in ("/v1/jobs/job-3", "/v1/jobs/job-3/events"):
        answer = site.client.get(path, params={"tenant_id": tenant})
        assert problem(answer) == (410, "archived")
        assert answer.json()["archive"] == str(site.folder / "archive")
        assert answer.json()["manifest"] == found["pruned"]["manifest"]
    late = {"tenant_id": tenant, "type": "JobAccepted", "dc_id": "dc2"}
    assert problem(site.client.post("/v1/jobs/job-3/events", json=late))[1] in ("archived", "job-ended")
    assert site.client.get("/v1/jobs", params={"tenant_id": tenant}).json()["items"] == []

    # The next ones leave behind them, and the proof of what left is still there.
    fill(site, tenant, range(100, 110))
    assert len(site.client.get("/v1/jobs", params={"tenant_id": tenant}).json()["items"]) == 10
    until_prunable(site, tenant, 60)
    done = prune(site, tenant)
    assert done["from_seq"] == 31
    until_removed(site, tenant, done["to_seq"])
    assert verdict(site, tenant)["valid"]
    proof = site.client.get("/v1/chain/proof/inclusion", params={"tenant_id": tenant, "seq": 5})
    assert proof.status_code == 200


async def test_a_tenant_that_begins_right_before_its_node_ends_gets_the_default_policy(
    run_server: RunServer, make_settings: MakeSettings, superuser: asyncpg.Connection
) -> None:
    settings = make_settings(retention={"period": "400d"})
    async with run_server(settings) as client:
        body = {"tenant_id": "acme", "durability": "GLOBAL"}
        (await client.post("/v1/jobs", json=body)).raise_for_status()
    (first,) = await superuser.fetch("SELECT * FROM scheduler.scheduler_log WHERE tenant_id = 'acme'")

    async with run_server(settings) as client:

        async def has_policy() -> bool:
            answer = await client.get("/v1/retention", params={"tenant_id": "acme"})
            return answer.json()["period"] == "400d"

        await waiting(has_policy, "the tenant has the default policy")
    node, at_ms = first["hlc_node"], first["hlc_physical"]
    assert await begun_at(superuser, node, at_ms) >= {"acme"}
    assert "acme" not in await begun_at(superuser, node, at_ms + 1)
    assert await begun_at(superuser, "another", at_ms) == set()
    policies = await superuser.fetch("SELECT tenant_id FROM scheduler.scheduler_log WHERE action = 'RETENTION_SET'")
    assert [tenant_id for (tenant_id,) in policies] == ["acme"]


def test_a_minimum_is_never_shortened(site: Site) -> None:
    tenant = "minimum"
    fill(site, tenant, range(4))
    assert set_policy(site, tenant, period="400d", minimum="180d")["minimum"] == "180d"
    answer = site.client.put("/v1/retention", params={"tenant_id": tenant}, json={"period": "1s", "minimum": "179d"})
    assert problem(answer) == (409, "retention-conflict")
    found = set_policy(site, tenant, period="1s")
    assert (found["period"], found["minimum"]) == ("1s", "180d")
    assert found["stopped_by"]["why"] == "young"
    assert prune(site, tenant)["seq"] is None
    assert set_policy(site, tenant, minimum="200d")["minimum"] == "200d"
    assert policy(site, tenant)["stopped_by"]["why"] == "no-period"


def test_a_hold_stops_the_prefix_until_it_is_released(site: Site) -> None:
    tenant = "held"
    fill(site, tenant, range(10))
    body = {"tenant_id": tenant, "reason": "case 4711", "where": "spec.team:web"}
    hold = site.client.post("/v1/holds", json=body).json()
    assert sorted(hold["job_ids"]) == ["job-0", "job-2", "job-4", "job-6", "job-8"]
    set_policy(site, tenant, period="1s")
    sign(site, tenant)
    until(lambda: policy(site, tenant)["stopped_by"]["why"] == "hold", "the hold stops it")
    assert prune(site, tenant)["seq"] is None
    listed = site.client.get("/v1/holds", params={"tenant_id": tenant}).json()["items"]
    assert [each["hold_id"] for each in listed] == [hold["hold_id"]]
    narrower = site.client.post("/v1/holds", json={"tenant_id": tenant, "reason": "r", "job_id": "job-5"}).json()
    for each in (hold, narrower):
        gone = site.client.delete(f"/v1/holds/{each['hold_id']}", params={"tenant_id": tenant, "reason": "closed"})
        assert gone.status_code == 200, gone.text
    again = site.client.delete(f"/v1/holds/{hold['hold_id']}", params={"tenant_id": tenant, "reason": "closed"})
    assert problem(again) == (404, "not-found")
    until_prunable(site, tenant, 30)
    done = prune(site, tenant)
    assert done["to_seq"] >= 30
    assert done["stopped_by"] is None or done["stopped_by"]["why"] != "to-seq"
    until_removed(site, tenant, done["to_seq"])
    late = site.client.post("/v1/holds", json={"tenant_id": tenant, "reason": "too late", "job_id": "job-5"})
    assert problem(late) == (410, "archived")


def test_no_hold_of_the_chain_of_the_ledger_is_listed(site: Site) -> None:
    answer = site.client.get("/v1/holds", params={"tenant_id": "_system"})
    assert (answer.status_code, answer.json()["items"]) == (200, [])


def test_a_job_that_never_ends_stops_for_twice_the_period_and_is_counted(site: Site) -> None:
    tenant = "endless"
    write(site, events_of(tenant, 0, ends=False))
    fill(site, tenant, range(1, 10))
    set_policy(site, tenant, period="3s")
    sign(site, tenant)
    until(lambda: policy(site, tenant)["stopped_by"]["why"] == "open-job", "the open job stops it")
    assert policy(site, tenant)["stopped_by"]["seq"] == 1
    until_prunable(site, tenant, 29)
    done = prune(site, tenant)
    assert done["never_ended"] == 1
    until_removed(site, tenant, done["to_seq"])
    assert verdict(site, tenant)["valid"]
    assert problem(site.client.get("/v1/jobs/job-0", params={"tenant_id": tenant})) == (410, "archived")


def test_an_archive_that_lost_a_file_keeps_the_prefix(site: Site) -> None:
    tenant = "lost"
    fill(site, tenant, range(10))
    set_policy(site, tenant, period="1s")
    until_prunable(site, tenant, 30)
    files = [each for each in (site.folder / "archive").rglob("*.parquet") if tenant in str(each)]
    assert files
    kept = files[0].read_bytes()
    files[0].unlink()
    assert problem(site.client.post("/v1/prunes", json={"tenant_id": tenant})) == (409, "archive-disagrees")
    assert policy(site, tenant)["pruned_to_seq"] == 0
    files[0].write_bytes(kept)
    assert prune(site, tenant)["to_seq"] == 30


def test_the_commands_say_what_the_service_does(site: Site) -> None:
    tenant, url = "commands", str(site.client.base_url)
    fill(site, tenant, range(10))

    def tally(*words: str, code: int = 0) -> Any:
        done = run_tally(*words, "--url", url, "--json")
        assert done.returncode == code, done.stdout + done.stderr
        return json.loads(done.stdout)

    assert tally("retention", "set", "-t", tenant, "--period", "1s")["period"] == "1s"
    hold = tally("hold", "new", "-t", tenant, "--where", "spec.team=ml", "--reason", "audit")
    assert len(hold["job_ids"]) == 5
    assert tally("hold", "list", "-t", tenant)["items"] == [hold]
    assert tally("hold", "release", hold["hold_id"], "-t", tenant, "--reason", "done") == hold
    until_prunable(site, tenant, 30)
    assert tally("prune", "-t", tenant, "--to-seq", "25", "--dry-run")["stopped_by"]["why"] == "to-seq"
    assert tally("prune", "-t", tenant)["to_seq"] == 30
    assert tally("retention", "show", "-t", tenant)["pruned_to_seq"] == 30


def test_readers_of_what_left_are_told_where_it_is(site: Site) -> None:
    tenant = "readers"
    fill(site, tenant, range(10))
    set_policy(site, tenant, period="1s")
    until_prunable(site, tenant, 30)
    to_seq = prune(site, tenant)["to_seq"]
    until_removed(site, tenant, to_seq)
    for path, params in (
        ("/v1/chain/entries", {"from_seq": 1}),
        ("/v1/watch", {"from_seq": 1, "to_seq": 2}),
        ("/v1/chain/verify", {"from_seq": 1, "to_seq": to_seq}),
        ("/v1/exchange/lacking", {"from_seq": 1, "to_seq": 5}),
        ("/v1/exchange/lacking", {"from_seq": to_seq, "to_seq": to_seq + 1}),
        ("/v1/commitments", {"as_of_seq": to_seq - 1}),
        ("/v1/nodes", {"as_of_seq": to_seq - 1}),
    ):
        answer = site.client.get(path, params={"tenant_id": tenant, **params})
        assert problem(answer) == (410, "archived"), path
        assert answer.json()["verified_from_seq"] == to_seq + 1
    listed = site.client.get("/v1/chain/entries", params={"tenant_id": tenant}).json()["items"]
    assert listed[0]["seq"] == to_seq + 1
    for path, params in (
        ("/v1/exchange/lacking", {"from_seq": to_seq + 1, "to_seq": to_seq + 1}),
        ("/v1/nodes", {"as_of_seq": to_seq}),
    ):
        assert site.client.get(path, params={"tenant_id": tenant, **params}).status_code == 200, path
    (site.folder / "keys.json").write_text(site.client.get("/v1/keys").text)
    keys = str(site.folder / "keys.json")
    found = run_tally("verify", "-t", tenant, "--dsn", site.service_url, "--keys", keys, "--no-state", "--json")
    assert json.loads(found.stdout)["verified_from_seq"] == to_seq + 1
    assert found.returncode in (0, 3), found.stdout
    without_keys = run_tally("verify", "-t", tenant, "--dsn", site.service_url, "--no-state", "--json")
    assert (without_keys.returncode, json.loads(without_keys.stdout)["from_seq"]) == (3, to_seq + 1)


def as_superuser(site: Site, statement: str, *values: object) -> None:
    """Run a statement as somebody who can turn off every guard."""

    async def run() -> None:
        async with connected_to(site.superuser_url) as connection:
            await connection.execute("SET session_replication_role = replica")
            await connection.execute(statement, *values)

    asyncio.run(run())


def test_a_prefix_that_an_administrator_deletes_is_found(site: Site) -> None:
    tenant = "cut"
    fill(site, tenant, range(10))
    as_superuser(site, "DELETE FROM scheduler.scheduler_log WHERE tenant_id = $1 AND seq <= 20", tenant)
    found = verdict(site, tenant)
    assert (found["valid"], found["first_break"]["kind"], found["first_break"]["seq"]) == (False, "gap", 1)


def forge(site: Site, tenant: str, action: str, facts: dict[str, Any]) -> int:
    """Chain an entry about retention as somebody who can write to the database, with links and head made to fit."""
    last = dict(site.query("SELECT * FROM scheduler.scheduler_log WHERE tenant_id = $1 ORDER BY seq", tenant)[-1])
    row = {**last, "seq": last["seq"] + 1, "prev_chain_link": last["chain_link"], "job_id": SUBJECT, "action": action}
    row |= {"hlc_logical": last["hlc_logical"] + 1, "payload": canonical.encode({"type": action, **facts}).decode()}
    row["t_hlc"] = f"{row['hlc_physical']}:{row['hlc_logical']}:{row['hlc_node']}"
    row["payload_digest"] = sha256(row["payload"].encode()).hexdigest()
    row["chain_link"] = link_of(tenant, row)
    names = [name for name in row if name not in ("id", "created_at")]
    as_superuser(
        site,
        f"INSERT INTO scheduler.scheduler_log ({', '.join(names)}) VALUES"
        f" ({', '.join(f'${at}' for at, _ in enumerate(names, 1))})",
        *(row[name] for name in names),
    )
    as_superuser(
        site,
        "UPDATE scheduler.chain_heads SET head_seq = $2, head_chain_link = $3, head_hlc = $4 WHERE tenant_id = $1",
        *(tenant, row["seq"], row["chain_link"], row["t_hlc"]),
    )
    return int(row["seq"])


def facts_of_a_prune(site: Site, tenant: str) -> dict[str, Any]:
    query = "SELECT payload::text FROM scheduler.scheduler_log WHERE tenant_id = $1 AND action = 'PRUNED' ORDER BY seq"
    found: dict[str, Any] = orjson.loads(site.query(query, tenant)[-1][0])
    return found


def test_a_prune_that_an_administrator_writes_is_found_and_removes_nothing(site: Site) -> None:
    tenant = "forged"
    fill(site, tenant, range(10))
    pruned_tenant(site, "copied")
    copied = facts_of_a_prune(site, "copied") | {"from_seq": 1, "to_seq": 20, "entry_count": 20}
    last_seq = forge(site, tenant, "PRUNED", copied | {"after": {"seq": 0, "chain_link": ""}})
    found = verdict(site, tenant)
    assert not found["valid"]
    assert found["breaks"]["malformed"] == 1
    assert (found["verified_from_seq"], found["pruned"], policy(site, tenant)["pruned_to_seq"]) == (1, None, 0)
    # The node removes nothing by it; who removes rows by hand is found.
    assert site.query("SELECT count(*) FROM scheduler.scheduler_log WHERE tenant_id = $1", tenant)[0][0] == last_seq
    removed = site.query("SELECT sum(removed_entries) FROM scheduler.remove_covered($1, 1, 100, 100)", tenant)
    assert removed[0][0] == 20
    assert verdict(site, tenant)["first_break"]["kind"] == "gap"


def test_a_policy_or_a_release_that_an_administrator_writes_loosens_nothing_and_is_found(site: Site) -> None:
    tenant = "shortened"
    fill(site, tenant, range(4))
    set_policy(site, tenant, period="400d", minimum="180d")
    hold = site.client.post("/v1/holds", json={"tenant_id": tenant, "reason": "case 4711"}).json()
    before = policy(site, tenant)
    forge(site, tenant, "RETENTION_SET", {"period_s": 1, "minimum_s": 1})
    forge(site, tenant, "HOLD_RELEASED", {"hold_id": hold["hold_id"], "reason": "forged"})
    after = policy(site, tenant)
    assert {name: after[name] for name in ("period", "minimum", "open_holds")} == {
        name: before[name] for name in ("period", "minimum", "open_holds")
    }
    assert verdict(site, tenant)["breaks"]["malformed"] == 2


def test_an_edited_floor_is_found_and_not_believed(site: Site) -> None:
    tenant = "edited"
    to_seq = pruned_tenant(site, tenant)
    facts = canonical.encode(facts_of_a_prune(site, tenant) | {"to_seq": to_seq - 10, "entry_count": to_seq - 10})
    as_superuser(
        site,
        "UPDATE scheduler.scheduler_log SET payload = $2 WHERE tenant_id = $1 AND action = 'PRUNED'",
        *(tenant, facts.decode()),
    )
    assert not verdict(site, tenant)["valid"]
    answer = site.client.get("/v1/retention", params={"tenant_id": tenant})
    assert problem(answer) == (409, "chain-damaged")
