"""What reads a pruned chain: bundles and imports, receipts and proofs. What left is not exported, does not come back,
and is proved as before."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from hashlib import sha256
from pathlib import Path
from typing import Any, NamedTuple

import cbor2
import httpx
import pytest

from app.dev.embedded import EmbeddedPostgres
from ledger.chain.form import read_origin
from ledger.exit_code import exit_code_of_receipt
from objects.store import ArchiveStore
from pipeline.archive.ranges import archived_end, entries_between
from signing.judging import verify_file
from signing.keys import Keyring
from signing.receipt_judging import judged
from tests.app.bundles import bundle_of, exit_code, rows_of, store
from tests.app.service_thread import serving
from tests.app.signed_statements import statement
from tests.app.test_retention import (
    BATCH,
    Site,
    fill,
    policy,
    problem,
    prune,
    set_policy,
    sign,
    until_prunable,
    until_removed,
    verdict,
)
from tests.app.test_scitt import problem as problem_of_statement
from tests.ledger.callers import ED25519
from tests.ledger.ledger_in_memory import SIGNER, Ledger, build
from tests.tally import run_tally
from tests.waiting import until

DATABASE = "bundles_pruned"


@pytest.fixture(scope="module")
def site(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    """A service that trusts its own key and that of another ledger."""
    folder = tmp_path_factory.mktemp("bundles_pruned")
    trusted = folder / "trusted"
    trusted.mkdir()
    (trusted / "other.pem").write_text(SIGNER.public_key_pem)
    settings: dict[str, Any] = {
        "archive": {"url": str(folder / "archive"), "interval": "1s"},
        "chain": {"batch_size": BATCH},
        "bundle": {"trusted_keys": trusted},
    }
    with (
        serving(postgres, folder / "data", DATABASE, **settings) as url,
        httpx.Client(base_url=url, timeout=60, trust_env=False) as client,
    ):
        for number, key in enumerate(client.get("/v1/keys").json()["keys"]):
            (trusted / f"own-{number}.pem").write_text(key["public_key_pem"])
        yield Site(client, postgres.service_url(DATABASE), postgres.superuser_url(DATABASE), folder)


def export(site: Site, tenant: str, status: int = 200, **wanted: int) -> httpx.Response:
    answer = site.client.post("/v1/bundles/export", json={"tenant_id": tenant, **wanted})
    assert answer.status_code == status, answer.text
    return answer


def import_all(site: Site, *bundles: bytes, status: int = 200, dry_run: bool = False) -> dict[str, Any]:
    files = [("file", (f"{number}.tar", bundle)) for number, bundle in enumerate(bundles)]
    answer = site.client.post("/v1/bundles/import", params={"dry_run": dry_run}, files=files)
    assert answer.status_code == status, answer.text
    found: dict[str, Any] = answer.json()
    return found


def prune_up_to(site: Site, tenant: str, to_seq: int) -> None:
    set_policy(site, tenant, period="1s")
    until_prunable(site, tenant, to_seq)
    assert prune(site, tenant, to_seq=to_seq)["to_seq"] == to_seq
    until_removed(site, tenant, to_seq)


class Before(NamedTuple):
    """A tenant whose first 30 entries left, and what was read before."""

    tenant: str
    bundle: bytes
    receipts: tuple[bytes, bytes]
    """Of a job and of an entry."""
    size: int
    """Of the log's checkpoint."""
    inclusion: dict[str, Any]
    """Of entry 5, in the tree of that size."""


@pytest.fixture(scope="module")
def before(site: Site) -> Before:
    tenant = "acme"
    fill(site, tenant, range(10))
    bundle = export(site, tenant).content
    receipts = (
        receipt(site, tenant, "jobs/job-3/receipt").content,
        receipt(site, tenant, "chain/receipt", seq=5).content,
    )
    proved = inclusion(site, tenant, 5)
    prune_up_to(site, tenant, 30)
    return Before(tenant, bundle, receipts, proved["tree_size"], proved)


def receipt(site: Site, tenant: str, path: str, **wanted: int) -> httpx.Response:
    return site.client.get(f"/v1/{path}", params={"tenant_id": tenant, **wanted})


def inclusion(site: Site, tenant: str, seq: int, **wanted: int) -> dict[str, Any]:
    answer = site.client.get("/v1/chain/proof/inclusion", params={"tenant_id": tenant, "seq": seq, **wanted})
    assert answer.status_code == 200, answer.text
    found: dict[str, Any] = answer.json()
    return found


def test_an_export_begins_at_the_floor_and_verifies_as_a_whole_chain(
    site: Site, before: Before, tmp_path: Path
) -> None:
    tenant = before.tenant
    path = store(tmp_path, export(site, tenant).content)
    found = asyncio.run(verify_file(path, Keyring.from_json(site.client.get("/v1/keys").json())))
    assert exit_code(found) == 0, found.to_json()
    assert (found.verdict["from_seq"], found.verdict["verified_from_seq"]) == (31, 31)
    assert found.verdict["pruned"] == verdict(site, tenant)["pruned"]
    later = store(tmp_path, export(site, tenant, from_seq=32).content)
    assert exit_code(asyncio.run(verify_file(later, None))) == 3


@pytest.mark.parametrize("wanted", [{"from_seq": 1}, {"from_seq": 30}, {"to_seq": 30}, {"from_seq": 2, "to_seq": 31}])
def test_an_export_of_what_left_says_where_it_is(site: Site, before: Before, wanted: dict[str, int]) -> None:
    tenant = before.tenant
    answer = export(site, tenant, 410, **wanted)
    assert problem(answer) == (410, "archived")
    said = answer.json()
    assert (said["archive"], said["verified_from_seq"]) == (str(site.folder / "archive"), 31)
    assert said["manifest"] == verdict(site, tenant)["pruned"]["manifest"]


def test_what_this_ledger_made_does_not_come_back(site: Site, before: Before) -> None:
    tenant = before.tenant
    head = policy(site, tenant)["prunes"], verdict(site, tenant)["head"]
    done = import_all(site, before.bundle)
    assert (done["imported"], done["duplicates"]) == (0, done["entries"])
    assert import_all(site, export(site, tenant).content)["imported"] == 0
    assert (policy(site, tenant)["prunes"], verdict(site, tenant)["head"]) == head


def test_an_entry_that_says_it_was_chained_here_must_be_the_one_that_left(site: Site, before: Before) -> None:
    tenant = before.tenant
    rows = rows_of(before.bundle)
    foreign = build(4, tenant_id=tenant, begin_ms=1_800_000)
    log = read_origin_log(site, tenant)
    for row in foreign.entries:
        link = rows[row["seq"] - 1]["chain_link"] if row["seq"] != 3 else "0" * 64
        row["origin"] = origin(log, row["seq"], link)
    foreign.relink()
    foreign.sign(4)
    said = import_all(site, bundle_of(foreign), status=422)
    assert "seq 3 of" in said["detail"]
    assert "another entry stands there" in said["detail"]


def read_origin_log(site: Site, tenant: str) -> str:
    note: str = site.client.get(f"/v1/log/{tenant}/checkpoint").text
    return note.partition("\n")[0]


def origin(log: str, seq: int, link: str) -> str:
    zeros = "0" * 64
    text = f'{{"bundle_digest":"{zeros}","chain_link":"{link}","log":"{log}","node_id":"node-2","seq":{seq}}}'
    read_origin(text)
    return text


def of_another(tenant: str, count: int) -> Ledger:
    """A chain of another ledger."""
    ledger = build(count, tenant_id=tenant)
    for end in range(4, count + 1, 4):
        ledger.sign(end)
    return ledger


def test_what_was_imported_and_left_does_not_come_back(site: Site) -> None:
    tenant = "carried"
    there = of_another(tenant, 24)
    first, later = bundle_of(there, 1, 16), bundle_of(there, 17, 24)
    assert import_all(site, first)["imported"] == 16
    sign(site, tenant)
    prune_up_to(site, tenant, 16)
    head = verdict(site, tenant)["head"]
    # 1. The same again is known.
    assert import_all(site, first, dry_run=True)["imported"] == 0
    again = import_all(site, first)
    assert (again["imported"], again["duplicates"]) == (0, 16)
    # 2. Of a part of it that cannot be told, and nothing is stored.
    refused = import_all(site, bundle_of(there, 1, 12), status=410)
    assert refused["archive"] == str(site.folder / "archive")
    assert "may have left as well" in refused["detail"]
    assert verdict(site, tenant)["head"] == head
    # 3. What comes behind is new.
    assert import_all(site, later)["imported"] == 8
    found = verdict(site, tenant)
    assert (found["valid"], found["head"]["seq"]) == (True, head["seq"] + 8)


def test_a_ledger_without_what_left_there_takes_what_is_in_the_bundle(site: Site) -> None:
    there = build(30, tenant_id="fresh", snapshots_to=(10, 20, 30))
    bundle = bundle_of(there, 11)
    done = import_all(site, bundle)
    assert (done["imported"], done["new_head"]["seq"]) == (20, 20)
    assert import_all(site, bundle)["imported"] == 0
    found = verdict(site, "fresh")
    assert (found["valid"], found["verified_from_seq"]) == (True, 1)


def test_receipts_from_before_verify_and_are_not_made_of_what_left(site: Site, before: Before, tmp_path: Path) -> None:
    keys = Keyring.from_json(site.client.get("/v1/keys").json())
    for made in before.receipts:
        found = judged(made, keys)
        assert exit_code_of_receipt(found.verdict) == 0, found.verdict
    answers = [
        receipt(site, before.tenant, "jobs/job-3/receipt"),
        receipt(site, before.tenant, "chain/receipt", seq=5),
        receipt(site, before.tenant, "chain/receipt", seq=30),
    ]
    assert [problem(answer) for answer in answers] == [(410, "archived")] * 3
    assert answers[0].json()["archive"] == str(site.folder / "archive")
    assert receipt(site, before.tenant, "jobs/job-33/receipt").status_code == 404
    proving = ("prove", "-t", before.tenant, "--job", "job-3", "-o", str(tmp_path / "receipt.json"))
    done = run_tally(*proving, "--url", str(site.client.base_url))
    assert (done.returncode, (tmp_path / "receipt.json").exists()) == (1, False)
    assert "entries up to seq 30 are in the archive" in " ".join(done.stderr.split())
    assert receipt(site, before.tenant, "chain/receipt", seq=31).status_code == 200


def test_a_signed_statement_that_left_says_where_it_is(site: Site) -> None:
    tenant, data, headers = "stated", statement(ED25519), {"Content-Type": "application/cose"}
    body = {"name": "ci", "tenants": [tenant], "public_key_pem": ED25519.caller.key.public_key_pem}
    site.client.post("/v1/callers", json=body).raise_for_status()
    entries = f"/v1/tenants/{tenant}/scitt/entries"
    assert site.client.post(entries, content=data, headers=headers).is_success
    # What came with a key stays as long as the key is remembered.
    site.query("DELETE FROM scheduler.idempotency WHERE tenant_id = $1", tenant)
    fill(site, tenant, range(4))
    set_policy(site, tenant, period="1s")
    until_prunable(site, tenant, 10)
    until_removed(site, tenant, int(prune(site, tenant)["to_seq"]))
    resolved = site.client.get(f"{entries}/{sha256(data).hexdigest()}")
    for answer in (resolved, site.client.post(entries, content=data, headers=headers)):
        assert problem_of_statement(answer) == (410, "archived")
        (members,) = (each for key, each in cbor2.loads(answer.content).items() if isinstance(key, str))
        assert members["archive"] == str(site.folder / "archive")


def test_proofs_and_tiles_of_what_left_are_served_and_bundles_of_entries_are_not(site: Site, before: Before) -> None:
    tenant = before.tenant
    assert inclusion(site, tenant, 5, tree_size=before.size) == before.inclusion
    assert inclusion(site, tenant, 5)["leaf_hash"] == before.inclusion["leaf_hash"]
    grown = site.client.get("/v1/chain/proof/consistency", params={"tenant_id": tenant, "first": before.size}).json()
    assert grown["first_root"] == before.inclusion["root_hash"]
    assert grown["second"] > before.size
    log = f"/v1/log/{tenant}/tile"
    assert len(site.client.get(f"{log}/0/000.p/31").content) == 31 * 32
    assert problem(site.client.get(f"{log}/entries/000.p/31")) == (410, "archived")


def test_private_fields_that_were_archived_are_unreadable_once_they_are_erased(site: Site) -> None:
    tenant, secret = "private", "alice@example.org"
    fill(site, tenant, range(4))
    declared = {"fields": ["spec.user"], "subject": "spec.user"}
    assert site.client.put(f"/v1/tenants/{tenant}/privacy", json=declared).status_code == 200
    job = {"tenant_id": tenant, "job_id": "hers", "spec": {"user": secret}, "assigned_dcs": ["x"]}
    seq = site.client.post("/v1/jobs", json={**job, "durability": "GLOBAL"}).json()["chain"]["seq"]
    sign(site, tenant)
    prune_up_to(site, tenant, 12)

    store, keys = ArchiveStore(str(site.folder / "archive")), Keyring.from_json(site.client.get("/v1/keys").json())
    until(lambda: (end := archived_end(store, tenant, keys)) is not None and end.to_seq >= seq, "it is archived")
    erased = {"subject": secret, "reason": "request 4711"}
    assert site.client.post(f"/v1/tenants/{tenant}/erasures", json=erased).status_code in (200, 201)
    answer = site.client.get("/v1/jobs/hers", params={"tenant_id": tenant}).json()
    assert answer["spec"] == {"user": {"$erased": True}}
    rows = [row for rows in entries_between(store, tenant, keys, 1, seq) for row in rows]
    assert len(rows) == seq
    assert all(secret not in str(row) for row in rows)
    assert verdict(site, tenant)["valid"]
