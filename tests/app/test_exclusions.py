"""A tenant excludes a log: its facts stay in the chain, and count in no answer, list or verification."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from app.dev.embedded import EmbeddedPostgres
from ledger import canonical
from ledger.facts.events import JOB_EVENTS
from ledger.machines.exclusions import SUBJECT
from tests.app.bundles import bundle_of
from tests.app.service_thread import serving
from tests.app.test_followers import HALT
from tests.conftest import connected_to
from tests.ledger.ledger_in_memory import SIGNER, Ledger, origin_of
from tests.tally import run_tally

DATABASE = "exclusions"
BEGIN_MS = 1_704_931_200_000


@pytest.fixture(scope="module")
def client(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a service that trusts the key of ``SIGNER``."""
    folder = tmp_path_factory.mktemp("exclusions")
    (folder / "trusted.pem").write_text(SIGNER.public_key_pem)
    trusted = {"trusted_keys": folder / "trusted.pem"}
    with (
        serving(postgres, folder / "data", DATABASE, bundle=trusted) as url,
        httpx.Client(base_url=url, timeout=60, trust_env=False) as client,
    ):
        yield client


def other_ledger(tenant: str, *events: tuple[str, str, dict[str, Any]]) -> Ledger:
    """A ledger of another region, with these events of jobs: (job, type, fields) each."""
    ledger = Ledger(tenant)
    for seq, (job_id, name, fields) in enumerate(events, 1):
        ledger.entries.append(
            {
                "seq": seq,
                "t_hlc": f"{BEGIN_MS}:{seq}:eu-node",
                "hlc_physical": BEGIN_MS,
                "hlc_logical": seq,
                "hlc_node": "eu-node",
                "job_id": job_id,
                "action": JOB_EVENTS[name].action if name in JOB_EVENTS else name,
                "link_version": 2,
                "payload": canonical.encode(
                    {"type": name, **({"fence_token": 1} if name in JOB_EVENTS else {}), **fields}
                ).decode(),
                "origin": None,
            }
        )
    ledger.relink()
    ledger.store_head()
    ledger.store_tree()
    return ledger


def imported(client: httpx.Client, ledger: Ledger, log_origin: str) -> None:
    bundle = bundle_of(ledger, log_origin=log_origin)
    answer = client.post("/v1/bundles/import", files=[("file", ("b.tar", bundle))])
    assert answer.status_code == 200, answer.text


def create(client: httpx.Client, tenant: str, job_id: str, **more: Any) -> None:
    body = {"tenant_id": tenant, "job_id": job_id, "spec": {"of": "us"}, "assigned_dcs": ["dc1"], **more}
    assert client.post("/v1/jobs", json=body).status_code == 201


def job(client: httpx.Client, tenant: str, job_id: str, **params: str) -> dict[str, Any]:
    answer = client.get(f"/v1/jobs/{job_id}", params={"tenant_id": tenant, **params})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def listed(client: httpx.Client, tenant: str, **params: Any) -> dict[str, str]:
    answer = client.get("/v1/jobs", params={"tenant_id": tenant, **params})
    assert answer.status_code == 200, answer.text
    assert answer.json()["damaged"] == []
    return {item["job_id"]: item["status"] for item in answer.json()["items"]}


def exclude(client: httpx.Client, tenant: str, log: str) -> dict[str, Any]:
    answer = client.post("/v1/exclusions", json={"tenant_id": tenant, "log": log, "reason": "it ends our jobs"})
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    return found


def include(client: httpx.Client, tenant: str, log: str) -> dict[str, Any]:
    body = {"tenant_id": tenant, "log": log, "reason": "it was mended", "excluded": False}
    answer = client.post("/v1/exclusions", json=body)
    assert answer.status_code == 201, answer.text
    found: dict[str, Any] = answer.json()
    return found


def conflicts_counted(client: httpx.Client) -> float:
    [line] = [each for each in client.get("/metrics").text.splitlines() if each.startswith("job_conflicts_total ")]
    return float(line.split(" ")[1])


def check_whole(client: httpx.Client, tenant: str) -> None:
    listed(client, tenant)  # The job table has followed.
    verdict = client.get("/v1/chain/verify", params={"tenant_id": tenant}).json()
    assert verdict["valid"], verdict
    assert verdict["verdicts"]["projection"] == "ok"


def test_facts_of_an_excluded_log_count_nowhere_until_it_is_included_again(client: httpx.Client) -> None:
    tenant, log = "acme", "bad.example/acme"
    create(client, tenant, "job-1")
    create(client, tenant, "job-2")
    bad = [
        ("job-1", "JobCancellationRequested", {"reason": "mischief"}),
        ("job-x", "JobCreated", {"spec": {"of": "x"}}),
    ]
    imported(client, other_ledger(tenant, *bad), "bad.example")
    assert job(client, tenant, "job-1")["status"] == "CANCELLING"
    assert listed(client, tenant) == {"job-1": "CANCELLING", "job-2": "SUBMITTED", "job-x": "SUBMITTED"}

    stated = exclude(client, tenant, log)
    assert (stated["excluded"], stated["log"], stated["stated_by"]) == (True, log, None)
    found = job(client, tenant, "job-1")
    assert (found["status"], found["uncounted_seq"]) == ("SUBMITTED", 3)
    assert job(client, tenant, "job-2")["uncounted_seq"] is None
    assert listed(client, tenant) == {"job-1": "SUBMITTED", "job-2": "SUBMITTED"}
    assert listed(client, tenant, status="CANCELLING") == {}
    assert job(client, tenant, "job-x")["created_hlc"] is None
    check_whole(client, tenant)

    # What it adds later does not count either.
    bad.append(("job-2", "JobFailed", {"error": "not so"}))
    imported(client, other_ledger(tenant, *bad), "bad.example")
    assert job(client, tenant, "job-2")["status"] == "SUBMITTED"
    assert listed(client, tenant) == {"job-1": "SUBMITTED", "job-2": "SUBMITTED"}
    check_whole(client, tenant)

    # As of a time before the statement all counted.
    before = "{}:{}:{}".format(int(stated["hlc"].split(":")[0]) - 1, 99, "~")
    assert job(client, tenant, "job-1", as_of=before.replace("~", "z"))["status"] == "CANCELLING"
    assert job(client, tenant, "job-1", as_of=stated["hlc"])["status"] == "SUBMITTED"

    # An event of the job is taken, as for any job under way.
    event = {"tenant_id": tenant, "type": "JobAccepted", "dc_id": "dc1", "durability": "GLOBAL"}
    assert client.post("/v1/jobs/job-1/events", json=event).status_code == 201
    assert job(client, tenant, "job-1")["status"] == "ACCEPTED"

    assert include(client, tenant, log)["excluded"] is False
    assert job(client, tenant, "job-1")["status"] == "CANCELLING"
    assert listed(client, tenant) == {"job-1": "CANCELLING", "job-2": "FAILED", "job-x": "SUBMITTED"}
    check_whole(client, tenant)
    items = client.get("/v1/exclusions", params={"tenant_id": tenant}).json()["items"]
    assert [(item["log"], item["excluded"], item["reason"]) for item in items] == [(log, False, "it was mended")]


def test_reads_are_right_and_no_break_is_found_before_the_job_table_is_rewritten(
    client: httpx.Client, postgres: EmbeddedPostgres
) -> None:
    tenant, log = "halted", "bad.example/halted"
    create(client, tenant, "job-1")
    imported(client, other_ledger(tenant, ("job-1", "JobCancellationRequested", {"reason": "mischief"})), "bad.example")
    assert listed(client, tenant) == {"job-1": "CANCELLING"}

    async def while_no_follower_moves() -> None:
        async with connected_to(postgres.superuser_url(DATABASE)) as connection, connection.transaction():
            await connection.execute(HALT)
            exclude(client, tenant, log)
            assert job(client, tenant, "job-1")["status"] == "SUBMITTED"
            assert listed(client, tenant, status="CANCELLING", consistency="eventual") == {}
            verdict = client.get("/v1/chain/verify", params={"tenant_id": tenant}).json()
            assert verdict["valid"], verdict

    asyncio.run(while_no_follower_moves())
    assert listed(client, tenant) == {"job-1": "SUBMITTED"}
    check_whole(client, tenant)


def test_events_tell_the_log_they_came_from_and_whether_they_count(client: httpx.Client) -> None:
    tenant = "told"
    create(client, tenant, "job-1")
    imported(client, other_ledger(tenant, ("job-1", "JobAccepted", {"dc_id": "dc1"})), "bad.example")
    exclude(client, tenant, "bad.example/told")
    items = client.get("/v1/jobs/job-1/events", params={"tenant_id": tenant}).json()["items"]
    assert [(item["origin"] and item["origin"]["log"], item["counts"]) for item in items] == [
        ("bad.example/told", False),
        (None, True),
    ]
    assert items[0]["origin"]["seq"] == 1


def test_an_imported_statement_counts_and_its_log_cannot_speak_for_itself(client: httpx.Client) -> None:
    tenant, bad = "spoken", "bad.example/spoken"
    create(client, tenant, "job-1")
    lie = ("job-1", "JobCancellationRequested", {"reason": "mischief"})
    pardon = (SUBJECT, "LOG_INCLUDED", {"log": bad, "reason": "trust me"})
    imported(client, other_ledger(tenant, lie, pardon), "bad.example")
    assert job(client, tenant, "job-1")["status"] == "CANCELLING"
    good = other_ledger(tenant, (SUBJECT, "LOG_EXCLUDED", {"log": bad, "reason": "it lies"}))
    good.entries[0] |= {"t_hlc": f"{BEGIN_MS}:1:good", "hlc_logical": 1, "hlc_node": "good"}
    good.relink()
    good.store_head()
    good.store_tree()
    imported(client, good, "good.example")
    # The statement is older than the other, and the other is about its own log.
    assert job(client, tenant, "job-1")["status"] == "SUBMITTED"
    [item] = client.get("/v1/exclusions", params={"tenant_id": tenant}).json()["items"]
    assert (item["excluded"], item["stated_by"]) == (True, "good.example/spoken")
    check_whole(client, tenant)


def test_operators_exclude_by_command(client: httpx.Client) -> None:
    tenant, log = "commanded", "bad.example/commanded"
    create(client, tenant, "job-1")
    imported(client, other_ledger(tenant, ("job-1", "JobCancellationRequested", {"reason": "mischief"})), "bad.example")
    url = ("--url", str(client.base_url))
    told = run_tally("peer", "exclude", log, "-t", tenant, "--reason", "it lies", *url)
    assert told.returncode == 0, told.stderr
    assert f"{log} is excluded since" in told.stdout
    assert job(client, tenant, "job-1")["status"] == "SUBMITTED"
    shown = run_tally("jobs", "-t", tenant, "job-1", *url).stdout
    assert f"from {log}, excluded" in shown
    unknown = run_tally("peer", "exclude", "eu9", "-t", tenant, "--reason", "it lies", *url)
    assert (unknown.returncode, "no log of a region eu9" in unknown.stderr) == (1, True)
    told = run_tally("peer", "include", log, "-t", tenant, "--reason", "it was mended", "--json", *url)
    assert json.loads(told.stdout)["excluded"] is False
    assert "it was mended" in run_tally("peer", "excluded", "-t", tenant, *url).stdout


def test_an_excluded_log_brings_no_entries_of_other_logs(client: httpx.Client) -> None:
    tenant = "relayed"
    create(client, tenant, "job-1")
    exclude(client, tenant, "bad.example/relayed")
    relay = other_ledger(tenant, ("job-1", "JobCancellationRequested", {"reason": "mischief"}))
    relay.entries[0]["origin"] = origin_of(7).replace("log.example/acme", "good.example/relayed")
    relay.relink()
    relay.store_head()
    relay.store_tree()
    head = client.get("/v1/chain/head", params={"tenant_id": tenant}).json()["seq"]
    bundle = bundle_of(relay, log_origin="bad.example")
    refused = client.post("/v1/bundles/import", files=[("file", ("b.tar", bundle))])
    assert (refused.status_code, refused.json()["type"].rpartition("/")[2]) == (422, "bundle-invalid")
    assert "said to be of good.example/relayed" in refused.json()["detail"]
    assert client.get("/v1/chain/head", params={"tenant_id": tenant}).json()["seq"] == head
    # From its own log it comes, and then the other may bring it along.
    own = relay.copy()
    own.entries[0]["origin"] = None
    own.relink()
    own.store_head()
    own.store_tree()
    imported(client, own, "good.example")
    assert job(client, tenant, "job-1")["status"] == "CANCELLING"
    imported(client, relay, "bad.example")


@pytest.mark.parametrize(
    ("body", "status", "problem", "words"),
    [
        ({"log": "bad.example/refused"}, 422, "invalid-request", "reason"),
        ({"log": "bad.example", "reason": "r"}, 422, "invalid-request", "log"),
        ({"log": "bad.example/other", "reason": "r"}, 422, "invalid-request", "ends in /refused"),
        ({"log": "OWN", "reason": "r"}, 422, "invalid-request", "exclude it at another ledger"),
        ({"tenant_id": "nobody", "log": "bad.example/nobody", "reason": "r"}, 404, "tenant-not-found", "nobody"),
        ({"log": "bad.example/refused", "reason": ""}, 422, "invalid-request", "reason"),
    ],
)
def test_a_wrong_statement_is_refused_and_nothing_is_stored(
    client: httpx.Client, body: dict[str, Any], status: int, problem: str, words: str
) -> None:
    create(client, "refused", f"job-{abs(hash(json.dumps(body)))}")
    head = client.get("/v1/chain/head", params={"tenant_id": "refused"}).json()["seq"]
    if body["log"] == "OWN":
        client.post("/v1/snapshots", json={"tenant_id": "refused"}).raise_for_status()
        note = client.get("/v1/log/refused/checkpoint").text
        body = {**body, "log": note.splitlines()[0]}
    answer = client.post("/v1/exclusions", json={"tenant_id": "refused", **body})
    assert (answer.status_code, answer.json()["type"].rpartition("/")[2]) == (status, problem)
    assert words in answer.json()["detail"] + answer.json().get("path", "")
    assert client.get("/v1/chain/head", params={"tenant_id": "refused"}).json()["seq"] == head


def test_a_log_that_is_not_excluded_cannot_be_included(client: httpx.Client) -> None:
    create(client, "included", "job-1")
    body = {"tenant_id": "included", "log": "bad.example/included", "reason": "r", "excluded": False}
    answer = client.post("/v1/exclusions", json=body)
    assert answer.status_code == 422
    assert "is not excluded; excluded are: none" in answer.json()["detail"]


def test_a_second_creation_is_shown_as_a_conflict_in_the_job_and_in_lists(client: httpx.Client) -> None:
    tenant = "twice"
    counted = conflicts_counted(client)
    create(client, tenant, "job-1")
    create(client, tenant, "job-2")
    other = {"spec": {"of": "them"}, "assigned_dcs": ["dc1"]}
    same = {"spec": {"of": "us"}, "assigned_dcs": ["dc1"]}
    imported(client, other_ledger(tenant, ("job-1", "JobCreated", other), ("job-2", "JobCreated", same)), "eu.example")
    found = job(client, tenant, "job-1")
    [conflict] = found["conflicts"]
    assert (conflict["kind"], conflict["rule"]) == ("creation", "lowest-hlc")
    first, second = conflict["entries"]
    # The other region's clock was behind, so its creation counts.
    assert (first["counts"], first["log"], first["node_id"]) == (True, "eu.example/twice", "eu-node")
    assert (second["counts"], second["seq"]) == (False, 1)
    assert found["spec"] == {"of": "them"}
    assert [each["spec"] for each in found["other_creations"]] == [{"of": "us"}]
    # The same creation again is no conflict.
    assert job(client, tenant, "job-2")["conflicts"] == []
    items = client.get("/v1/jobs", params={"tenant_id": tenant}).json()["items"]
    assert {item["job_id"]: len(item["conflicts"]) for item in items} == {"job-1": 1, "job-2": 0}
    assert listed(client, tenant, in_conflict="true") == {"job-1": "SUBMITTED"}
    assert conflicts_counted(client) == counted + 1
    # If the other region is excluded, there is one creation left.
    exclude(client, tenant, "eu.example/twice")
    found = job(client, tenant, "job-1")
    assert (found["spec"], found["conflicts"]) == ({"of": "us"}, [])
    assert listed(client, tenant, in_conflict="true") == {}
    # The table is rewritten with both again, and no conflict is new.
    include(client, tenant, "eu.example/twice")
    assert listed(client, tenant, in_conflict="true") == {"job-1": "SUBMITTED"}
    assert conflicts_counted(client) == counted + 1
