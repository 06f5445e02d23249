"""What the service says about what it recorded, checked the way a client that trusts nothing would."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Any

import httpx
import pytest

from app.dev.embedded import EmbeddedPostgres
from app.store import reads
from app.store.jobs.order import Order
from ledger import chain, merkle
from ledger.facts.statuses import STATUSES
from ledger.hlc import Hlc
from signing import checkpoint, envelope
from tests.app.service_thread import serving
from tests.conftest import Database, connected_to
from tests.waiting import until

JOBS = 300
NDJSON = {"content-type": "application/x-ndjson"}


@pytest.fixture(scope="module")
def client(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    settings = {"chain": {"checkpoint_interval": "20ms", "batch_size": 100}}
    folder = tmp_path_factory.mktemp("reading")
    with serving(postgres, folder, "reading", **settings) as url, httpx.Client(base_url=url, timeout=30) as client:
        lines = [f'{{"tenant_id":"acme","type":"JobCreated","job_id":"job-{n}","trace_time":{n}}}' for n in range(JOBS)]
        lines += [
            f'{{"tenant_id":"acme","type":"JobFailed","job_id":"job-{n}","error":"e"}}' for n in range(0, JOBS, 3)
        ]
        answer = client.post("/v1/events", content="\n".join(lines), headers=NDJSON)
        assert answer.json()["accepted"] == len(lines)
        _wait_for_checkpoint(client, "acme", len(lines))
        _wait_for_snapshots(client, "acme", len(lines))
        yield client


def _wait_for_checkpoint(client: httpx.Client, tenant_id: str, size: int) -> None:
    def is_signed() -> bool:
        tree = client.get("/v1/chain/head", params={"tenant_id": tenant_id}).json()["tree"]
        return tree is not None and tree["checkpoint_size"] == size

    until(is_signed, f"a checkpoint of {size} leaves is signed")


def _wait_for_snapshots(client: httpx.Client, tenant_id: str, to_seq: int) -> None:
    def is_signed() -> bool:
        newest = client.get("/v1/snapshots", params={"tenant_id": tenant_id, "limit": 1}).json()["items"]
        return bool(newest) and newest[0]["to_seq"] == to_seq

    until(is_signed, f"a snapshot up to {to_seq} is signed")


def pages(client: httpx.Client, path: str, **params: Any) -> Iterator[list[dict[str, Any]]]:
    """Items of each page of a list, to its end."""
    cursor: dict[str, str] = {}
    while True:
        answer = client.get(path, params={**params, **cursor})
        assert answer.status_code == 200, answer.text
        page = answer.json()
        yield page["items"]
        if page["next_cursor"] is None:
            return
        cursor = {"cursor": page["next_cursor"]}


def everything(client: httpx.Client, path: str, **params: Any) -> list[dict[str, Any]]:
    return [item for page in pages(client, path, **params) for item in page]


def test_jobs_are_listed_newest_first_once_each(client: httpx.Client) -> None:
    listed = list(pages(client, "/v1/jobs", tenant_id="acme", limit=70))
    assert [len(page) for page in listed] == [70, 70, 70, 70, 20]
    jobs = [job for page in listed for job in page]
    assert {job["job_id"] for job in jobs} == {f"job-{n}" for n in range(JOBS)}
    created = [Hlc.parse(job["created_hlc"]) for job in jobs]
    assert created == sorted(created, reverse=True)


LISTS = [
    pytest.param(reads.jobs_query(Order(), is_of_actor=False), "", "jobs_newest_by_status", id="all"),
    pytest.param(reads.jobs_query(Order(), is_of_actor=True), ", 'somebody'", "jobs_newest_by_actor", id="of an actor"),
]


@pytest.mark.parametrize("plans", ["force_custom_plan", "force_generic_plan"])
@pytest.mark.parametrize(("query", "more", "index"), LISTS)
async def test_a_list_of_jobs_reads_a_page_of_each_status_at_most_from_the_newer_end_of_its_index(
    database: Database, plans: str, query: str, more: str, index: str
) -> None:
    async with connected_to(database.service_url) as connection:
        await connection.execute(f"SET plan_cache_mode = {plans}")
        await connection.execute(f"PREPARE asked AS {query}")
        asked = f"'acme', 50, '{{{','.join(STATUSES)}}}', 9, 9, 'n', 0, 0, ''{more}"
        plan = [row[0].strip() for row in await connection.fetch(f"EXPLAIN EXECUTE asked({asked})")]
    (scan,) = (at for at, line in enumerate(plan) if " on jobs " in line)
    assert plan[scan].startswith(f"->  Index Scan Backward using {index}"), plan
    assert all(part in plan[scan + 1] for part in ("Index Cond", "status = ", "created_physical")), plan
    assert ("created_by = " in plan[scan + 1]) == ("actor" in index), plan
    assert "Presorted Key: jobs.created_physical, jobs.created_logical" in plan
    assert sum(line.startswith("->  Limit") for line in plan[:scan]) == 2, plan


def test_a_full_last_page_has_no_cursor(client: httpx.Client) -> None:
    assert [len(page) for page in pages(client, "/v1/jobs", tenant_id="acme", limit=JOBS // 3)] == [JOBS // 3] * 3


def test_jobs_can_be_listed_by_status(client: httpx.Client) -> None:
    failed = everything(client, "/v1/jobs", tenant_id="acme", status="FAILED", limit=30)
    assert len(failed) == JOBS // 3
    assert {job["status"] for job in failed} == {"FAILED"}
    assert len(everything(client, "/v1/jobs", tenant_id="acme", status="SUBMITTED")) == JOBS - JOBS // 3
    assert everything(client, "/v1/jobs", tenant_id="acme", status="RUNNING") == []


def test_filters_are_taken_in_either_case(client: httpx.Client) -> None:
    params: dict[str, Any] = {"tenant_id": "acme", "limit": 5}
    expected = client.get("/v1/jobs", params={**params, "status": "FAILED"}).json()
    for status in ("failed", "Failed"):
        assert client.get("/v1/jobs", params={**params, "status": status}).json() == expected
    assert client.get("/v1/jobs/job-0", params={"tenant_id": "acme", "consistency": "STRONG"}).status_code == 200
    assert client.get("/v1/jobs", params={**params, "status": "gone"}).status_code == 422


def test_the_location_of_a_new_job_is_followed_as_it_is(client: httpx.Client) -> None:
    for given in ({}, {"job_id": "job.followed:1"}):
        answer = client.post("/v1/jobs", json={"tenant_id": "followed", **given})
        location = answer.headers["location"]
        assert location == f"/v1/jobs/{answer.json()['job_id']}"
        followed = client.get(location)
        assert (followed.status_code, followed.json()["tenant_id"]) == (200, "followed")


def test_every_hlc_has_its_time_beside_it(client: httpx.Client) -> None:
    def at(hlc: str) -> str:
        time_s = int(hlc.split(":")[0]) / 1000
        return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")

    job = client.get("/v1/jobs/job-0", params={"tenant_id": "acme"}).json()
    assert (job["created_at"], job["last_at"]) == (at(job["created_hlc"]), at(job["last_hlc"]))
    listed = client.get("/v1/jobs", params={"tenant_id": "acme", "limit": 1}).json()["items"][0]
    assert listed["created_at"] == at(listed["created_hlc"])
    event = everything(client, "/v1/jobs/job-0/events", tenant_id="acme")[0]
    assert event["at"] == at(event["hlc"])
    head = client.get("/v1/chain/head", params={"tenant_id": "acme"}).json()
    assert head["at"] == at(head["hlc"])
    entry = client.get("/v1/chain/entries", params={"tenant_id": "acme", "limit": 1}).json()["items"][0]
    assert entry["at"] == at(entry["t_hlc"])
    snapshot = client.get("/v1/snapshots", params={"tenant_id": "acme", "limit": 1}).json()["items"][0]
    assert snapshot["snapshot_at"] == at(snapshot["snapshot_hlc"])
    clock = client.get("/v1/node").json()["clock"]
    assert clock["last_at"] == at(clock["last_hlc"])
    written = client.post("/v1/jobs", json={"tenant_id": "timed"}).json()
    assert written["at"] == at(written["hlc"])
    line = '{"tenant_id":"timed","type":"JobCreated"}'
    lines = client.post("/v1/events", content=line, headers=NDJSON).json()
    assert (lines["first_at"], lines["last_at"]) == (at(lines["first_hlc"]), at(lines["last_hlc"]))


def test_the_past_is_asked_for_by_a_time_as_by_an_hlc(client: httpx.Client) -> None:
    def status_at(as_of: str) -> str | int:
        answer = client.get("/v1/jobs/past", params={"tenant_id": "past", "as_of": as_of})
        return answer.json()["status"] if answer.status_code == 200 else answer.status_code

    created = client.post("/v1/jobs", json={"tenant_id": "past", "job_id": "past"}).json()
    failed = client.post("/v1/jobs/past/events", json={"tenant_id": "past", "type": "JobFailed"}).json()
    while failed["at"] == created["at"]:
        failed = client.post("/v1/jobs/past/events", json={"tenant_id": "past", "type": "JobFailed"}).json()
    moment = datetime.fromisoformat(created["at"])
    east = moment.astimezone(timezone(timedelta(hours=5, minutes=30))).isoformat(timespec="microseconds")
    assert [status_at(at) for at in (created["at"], created["hlc"], east, failed["at"])] == [
        "SUBMITTED",
        "SUBMITTED",
        "SUBMITTED",
        "FAILED",
    ]
    before = (moment - timedelta(milliseconds=1)).isoformat()
    assert status_at(before) == 404
    unescaped = client.get(f"/v1/jobs/past?tenant_id=past&as_of={east}")
    assert unescaped.status_code == 422
    assert "%2B" in unescaped.json()["detail"]
    for wrong in ("2026-02-30T00:00:00Z", "2026-11-22", "yesterday", "1:2"):
        refused = client.get("/v1/jobs/past", params={"tenant_id": "past", "as_of": wrong})
        assert (refused.status_code, refused.json()["path"]) == (422, "as_of")


def test_jobs_are_listed_of_a_time(client: httpx.Client) -> None:
    jobs = everything(client, "/v1/jobs", tenant_id="acme")
    middle = jobs[100]["created_hlc"]
    later = everything(client, "/v1/jobs", tenant_id="acme", since=middle, limit=40)
    earlier = everything(client, "/v1/jobs", tenant_id="acme", until=middle, limit=40)
    assert [job["job_id"] for job in (*later, *earlier)] == [job["job_id"] for job in jobs]
    assert len(later) == 101
    first, last = jobs[-1]["created_at"], jobs[0]["created_at"]
    assert everything(client, "/v1/jobs", tenant_id="acme", until=first) == []
    assert len(everything(client, "/v1/jobs", tenant_id="acme", since=first, until="2999-01-01T00:00:00Z")) == JOBS
    after = datetime.fromisoformat(last) + timedelta(microseconds=100)
    assert everything(client, "/v1/jobs", tenant_id="acme", since=after.isoformat()) == []
    cursor = client.get("/v1/jobs", params={"tenant_id": "acme", "since": first, "limit": 1}).json()["next_cursor"]
    assert client.get("/v1/jobs", params={"tenant_id": "acme", "cursor": cursor}).status_code == 422


def test_a_session_that_cannot_be_read_is_refused_by_every_read(client: httpx.Client) -> None:
    for path in ("/v1/jobs", "/v1/jobs/job-0", "/v1/jobs/job-0/events"):
        refused = client.get(
            path, params={"tenant_id": "acme"}, headers=[("Tally-Session", ""), ("Tally-Session", "x")]
        )
        assert (refused.status_code, refused.json()["path"]) == (422, "Tally-Session"), path
        missing = client.get(path, params={"tenant_id": "acme", "consistency": "bounded_staleness"})
        assert (missing.status_code, missing.json()["path"]) == (422, "max_staleness_ms"), path


def test_a_cursor_of_one_status_is_refused_for_another(client: httpx.Client) -> None:
    first = client.get("/v1/jobs", params={"tenant_id": "acme", "status": "FAILED", "limit": 1}).json()
    params = {"tenant_id": "acme", "status": "SUBMITTED", "cursor": first["next_cursor"]}
    assert client.get("/v1/jobs", params=params).status_code == 422


def test_a_job_says_what_all_its_events_say_together(client: httpx.Client) -> None:
    job = client.get("/v1/jobs/job-3", params={"tenant_id": "acme"}).json()
    assert (job["status"], job["error"], job["fence_token"]) == ("FAILED", "e", 1)
    assert job["consistency"] == {"level": "SESSION", "source": "primary", "staleness_ms": 0}


def test_events_of_a_job_come_in_hlc_order_page_by_page(client: httpx.Client) -> None:
    events = everything(client, "/v1/jobs/job-0/events", tenant_id="acme", limit=1)
    assert [event["type"] for event in events] == ["JobCreated", "JobFailed"]
    assert events[0]["payload"] == {"fence_token": 1, "trace_time": 0, "type": "JobCreated"}
    hlcs = [Hlc.parse(event["hlc"]) for event in events]
    assert hlcs == sorted(hlcs)


def test_what_was_left_out_stays_left_out_of_the_payload(client: httpx.Client) -> None:
    client.post("/v1/jobs", json={"tenant_id": "bare", "job_id": "bare"})
    entry = everything(client, "/v1/chain/entries", tenant_id="bare")[0]
    assert entry["payload"] == '{"fence_token":1,"type":"JobCreated"}'


def test_a_client_can_compute_every_digest_and_link_again(client: httpx.Client) -> None:
    entries = everything(client, "/v1/chain/entries", tenant_id="acme", limit=150)
    assert [entry["seq"] for entry in entries] == list(range(1, len(entries) + 1))
    previous = b""
    for entry in entries:
        digest = hashlib.sha256(entry["payload"].encode()).digest()
        assert entry["payload_digest"] == digest.hex()
        link = chain.link(
            tenant_id="acme",
            seq=entry["seq"],
            t_hlc=entry["t_hlc"],
            job_id=entry["job_id"],
            action=entry["action"],
            prev_chain_link=previous,
            payload_digest=digest,
        )
        assert (entry["prev_chain_link"], entry["chain_link"]) == (previous.hex() or None, link.hex())
        previous = link
    head = client.get("/v1/chain/head", params={"tenant_id": "acme"}).json()
    assert (head["seq"], head["chain_link"], head["hlc"]) == (len(entries), previous.hex(), entries[-1]["t_hlc"])


def test_entries_may_begin_anywhere_and_end_empty(client: httpx.Client) -> None:
    some = client.get("/v1/chain/entries", params={"tenant_id": "acme", "from_seq": 7, "limit": 2}).json()
    assert [entry["seq"] for entry in some["items"]] == [7, 8]
    none = client.get("/v1/chain/entries", params={"tenant_id": "acme", "from_seq": 10_000}).json()
    assert none == {"items": [], "next_cursor": None}


@pytest.mark.parametrize("seq", [1, 2, 100, 256, 257, 400])
def test_an_entry_can_be_proved_to_stand_under_the_signed_checkpoint(client: httpx.Client, seq: int) -> None:
    proof = client.get("/v1/chain/proof/inclusion", params={"tenant_id": "acme", "seq": seq}).json()
    page = client.get("/v1/chain/entries", params={"tenant_id": "acme", "from_seq": seq, "limit": 1}).json()
    leaf = merkle.leaf_hash(bytes.fromhex(page["items"][0]["chain_link"]))
    size, root = signed_head(client, "acme")
    assert (proof["leaf_index"], proof["tree_size"]) == (seq - 1, size)
    assert (proof["leaf_hash"], proof["root_hash"]) == (leaf.hex(), root.hex())
    merkle.verify_inclusion(seq - 1, size, leaf, [bytes.fromhex(one) for one in proof["hashes"]], root)


@pytest.mark.parametrize(("first", "second"), [(1, 2), (1, 400), (255, 256), (256, 257), (399, 400), (400, 400)])
def test_a_tree_can_be_proved_to_have_only_grown(client: httpx.Client, first: int, second: int) -> None:
    params: dict[str, str | int] = {"tenant_id": "acme", "first": first, "second": second}
    proof = client.get("/v1/chain/proof/consistency", params=params).json()
    roots = bytes.fromhex(proof["first_root"]), bytes.fromhex(proof["second_root"])
    merkle.verify_consistency(first, second, *roots, [bytes.fromhex(one) for one in proof["hashes"]])
    if second == 400:
        assert roots[1] == signed_head(client, "acme")[1]


def signed_head(client: httpx.Client, tenant_id: str) -> tuple[int, bytes]:
    """Size and root of the newest checkpoint, its signature checked with the published key."""
    note = client.get(f"/v1/log/{tenant_id}/checkpoint")
    assert note.headers["content-type"] == "text/plain; charset=utf-8"
    keys = client.get("/v1/keys", params={"tenant_id": tenant_id}).json()["log_verifier_keys"]
    opened = checkpoint.open_checkpoint(note.text, keys)
    return opened.size, opened.root


def test_the_tiles_hold_the_leaves_that_the_checkpoint_signs(client: httpx.Client) -> None:
    full = client.get("/v1/log/acme/tile/0/000")
    partial = client.get("/v1/log/acme/tile/0/001.p/144")
    assert full.headers["content-type"] == "application/octet-stream"
    assert "immutable" in full.headers["cache-control"]
    hashes = full.content + partial.content
    leaves = [hashes[at : at + 32] for at in range(0, len(hashes), 32)]
    assert (len(leaves), merkle.root(leaves)) == signed_head(client, "acme")
    assert client.get("/v1/log/acme/tile/0/000.p/5").content == full.content[:160]
    assert client.get("/v1/log/acme/tile/1/000.p/1").content == merkle.root(leaves[:256])


@pytest.mark.parametrize("path", ["0/001", "0/001.p/145", "0/000.p/256", "0/0", "0/x000/000", "00/000", "64/000"])
def test_only_tiles_that_are_there_have_a_path(client: httpx.Client, path: str) -> None:
    assert client.get(f"/v1/log/acme/tile/{path}").status_code == 404


def test_a_snapshot_is_signed_on_demand_and_can_be_verified(client: httpx.Client) -> None:
    client.post("/v1/jobs", json={"tenant_id": "signed", "job_id": "one"})
    signed = client.post("/v1/snapshots", json={"tenant_id": "signed"})
    again = client.post("/v1/snapshots", json={"tenant_id": "signed"})
    assert (signed.status_code, again.status_code) == (201, 200)
    assert signed.json() == again.json()
    snapshot = client.get(f"/v1/snapshots/{signed.json()['id']}").json()
    assert snapshot == signed.json()
    payload = envelope.verify(snapshot["dsse_envelope"], client.get("/v1/keys").json())
    assert payload == base64.b64decode(snapshot["dsse_envelope"]["payload"])
    assert b'"signed' in payload


def test_snapshots_are_listed_newest_first(client: httpx.Client) -> None:
    listed = everything(client, "/v1/snapshots", tenant_id="acme", limit=1)
    assert [(one["from_seq"], one["to_seq"]) for one in listed] == [(301, 400), (201, 300), (101, 200), (1, 100)]


def test_verification_is_answered_under_every_spelling(client: httpx.Client) -> None:
    for path in ("/chain/verify?tenantId=acme", "/chain/verify?tenant_id=acme", "/v1/chain/verify?tenantId=acme"):
        verdict = client.get(path).json()
        assert (verdict["valid"], verdict["entries_checked"]) == (True, 400)
    part = client.get("/v1/chain/verify?tenant_id=acme&from_seq=10&to_seq=20").json()
    assert (part["valid"], part["from_seq"], part["to_seq"], part["entries_checked"]) == (True, 10, 20, 11)


def test_the_ledgers_own_chain_can_be_read(client: httpx.Client) -> None:
    entries = everything(client, "/v1/chain/entries", tenant_id="_system")
    assert {"KEY_ADDED", "TENANT_CREATED"} <= {entry["action"] for entry in entries}
    assert client.get("/v1/chain/verify", params={"tenant_id": "_system"}).json()["valid"] is True


def test_the_node_says_who_it_is_and_how_far_it_has_come(client: httpx.Client) -> None:
    node = client.get("/v1/node").json()
    positions = [node["positions"][name] for name in ("written_lsn", "durable_lsn", "commit_lsn", "chained_lsn")]
    assert positions == sorted(positions, reverse=True)
    assert positions[-1] >= 400
    assert node["epoch"] == 1


def test_readiness_lists_every_check_by_name(client: httpx.Client) -> None:
    ready = client.get("/readyz")
    assert ready.status_code == 200
    assert {"accepting", "writer", "database"} <= ready.json()["checks"].keys()
    assert all(check["ok"] for check in ready.json()["checks"].values())
    assert client.get("/livez").json() == {"status": "live"}


def test_metrics_have_their_names_and_never_a_tenant(client: httpx.Client) -> None:
    assert client.get("/v1/jobs/job-0", params={"tenant_id": "acme"}).status_code == 200
    text = client.get("/metrics").text
    assert "_created" not in text
    names = {line.split("{")[0].split(" ")[0] for line in text.splitlines() if not line.startswith("#")}
    assert names >= {
        "hlc_ticks_total",
        "hlc_clock_skew_rejections_total",
        "hlc_physical_offset_seconds",
        "scheduler_chain_entries_total",
        "scheduler_chain_verifications_total",
        "scheduler_chain_verification_failures_total",
        "scheduler_batch_snapshots_total",
        "wal_append_seconds_count",
        "wal_sync_seconds_count",
        "wal_batch_entries_count",
        "wal_durable_lsn",
        "wal_chained_lsn",
        "wal_backlog_entries",
        "wal_fencing_rejects_total",
        "wal_epoch",
        "watch_streams",
        "watch_entries_sent_total",
        "watch_lagged_total",
        "wal_replication_ack_latency_seconds_count",
        "http_requests_total",
        "http_request_duration_seconds_count",
    }
    assert "acme" not in text
    assert 'route="/v1/jobs/{job_id}"' in text


def test_a_list_of_large_jobs_is_cut_short_and_goes_on(client: httpx.Client) -> None:
    for number in range(8):
        spec = {"blob": "x" * 900_000}
        created = client.post("/v1/jobs", json={"tenant_id": "large", "job_id": f"large-{number}", "spec": spec})
        assert created.status_code == 201
    for path in ("/v1/jobs", "/v1/chain/entries"):
        sizes = [len(page) for page in pages(client, path, tenant_id="large")]
        assert sizes == [5, 3]
