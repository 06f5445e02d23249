"""A break of stored rows raises the same alarm, whichever part of the node meets it."""

from __future__ import annotations

import asyncio
import base64
import gzip
import json
import tarfile
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest

from app.runtime.state.found_breaks import FoundBreaks
from ledger.errors import BundleInvalidError, ChainDamagedError, HeldBackError
from ledger.verification.verdict import Break
from signing.bundle.reader import BundleReader
from tests.app.chain_builder import edit
from tests.app.chains import until
from tests.app.conftest import MakeSettings, RunServer
from tests.tally import run_tally

FORGE = "UPDATE scheduler.scheduler_log SET payload = '{\"forged\":true}' WHERE tenant_id = 'acme' AND seq = 2"
PAYLOAD = "SELECT payload FROM scheduler.scheduler_log WHERE tenant_id = 'acme' AND seq = 2"
OF_ACME = {"tenant_id": "acme"}


async def write(client: httpx.AsyncClient, count: int) -> list[str]:
    """Create jobs of acme; returns their ids, in seq order."""
    answers = [await client.post("/v1/jobs", json={**OF_ACME, "spec": {"n": n}}) for n in range(count)]
    return [answer.raise_for_status().json()["job_id"] for answer in answers]


async def signed(superuser: asyncpg.Connection, size: int) -> None:
    query = "SELECT max(tree_size) >= $1 FROM scheduler.merkle_head WHERE tenant_id = 'acme'"
    await until(lambda: superuser.fetchval(query, size), "a checkpoint covers it")


async def check_of(client: httpx.AsyncClient, name: str) -> dict[str, Any]:
    found: dict[str, Any] = (await client.get("/readyz")).json()["checks"][name]
    return found


async def counted(client: httpx.AsyncClient) -> dict[str, float]:
    """Samples of the metrics about breaks."""
    lines = (await client.get("/metrics")).text.splitlines()
    return {
        name: float(value) for name, value in (line.rsplit(" ", 1) for line in lines if "chain_breaks" in line[:24])
    }


async def recorded(client: httpx.AsyncClient) -> bool:
    """Whether the ledger's own chain says that the break of acme was found."""
    items = (await client.get("/v1/chain/entries", params={"tenant_id": "_system"})).json()["items"]
    found = [(each["action"], each["job_id"]) for each in items]
    return ("BREAK_FOUND", "break:acme:payload-digest:2") in found


@pytest.mark.parametrize(
    ("met_by", "method", "path", "sent"),
    [
        ("export_bundle", "POST", "/v1/bundles/export", {"json": OF_ACME}),
        ("prove_entry", "GET", "/v1/chain/receipt", {"params": {**OF_ACME, "seq": 2}}),
    ],
)
async def test_a_request_that_meets_a_forged_row_raises_the_alarm_until_it_is_mended_and_acknowledged(
    run_server: RunServer, superuser: asyncpg.Connection, met_by: str, method: str, path: str, sent: dict[str, Any]
) -> None:
    async with run_server() as client:
        await write(client, 3)
        await signed(superuser, 3)
        whole = await superuser.fetchval(PAYLOAD)
        await edit(superuser, FORGE)
        answer = await client.request(method, path, **sent)
        assert (answer.status_code, answer.json()["type"].rpartition("/")[2]) == (409, "chain-damaged")

        assert "A restart is needed only where /readyz names the tenant under tenants" in answer.json()["detail"]

        said = await check_of(client, "breaks")
        assert not said["ok"]
        assert f"payload-digest at seq 2 of acme (met by {met_by})" in said["detail"]
        counts = await counted(client)
        assert counts["scheduler_chain_breaks"] == 1
        assert counts[f'scheduler_chain_breaks_met_total{{met_by="{met_by}"}}'] == 1

        await until(lambda: recorded(client), "an entry of _system tells webhooks of it")
        seen = {**OF_ACME, "reason": "seen", "kind": "payload-digest", "seq": 2}
        (await client.post("/v1/chain/acknowledge", json=seen)).raise_for_status()
        assert "acknowledged by caller, not mended" in (await check_of(client, "breaks"))["detail"]
        assert (await counted(client))["scheduler_chain_breaks"] == 1
        await edit(superuser, FORGE.replace("'{\"forged\":true}'", "$1"), whole)
        assert (await client.get("/v1/chain/verify", params=OF_ACME)).json()["valid"]
        assert (await check_of(client, "breaks"))["ok"]
        assert (await counted(client))["scheduler_chain_breaks"] == 0


async def test_what_is_stored_of_a_broken_chain_leaves_as_evidence_that_a_verifier_refuses(
    run_server: RunServer, superuser: asyncpg.Connection, tmp_path: Path
) -> None:
    async with run_server() as client:
        await write(client, 4)
        await signed(superuser, 4)
        wanted = {**OF_ACME, "evidence": True}
        unknown = await client.post("/v1/bundles/export", json=wanted)
        assert (unknown.status_code, "knows of no break" in unknown.text) == (404, True)
        await edit(superuser, FORGE)
        await edit(superuser, "DELETE FROM scheduler.scheduler_log WHERE tenant_id = 'acme' AND seq = 3")
        await client.get("/v1/chain/verify", params=OF_ACME)
        export = ("bundle", "export", "-t", "acme", "--url", str(client.base_url))
        refused = await asyncio.to_thread(run_tally, *export, "-o", str(tmp_path / "bundle.tar"))
        assert (refused.returncode, "payload-digest at seq 2" in refused.stderr) == (2, True)
        assert not (tmp_path / "bundle.tar").exists()
        done = await asyncio.to_thread(run_tally, *export, "--evidence", "-o", str(tmp_path / "evidence.tar"))
        assert done.returncode == 0, done.stderr

    with pytest.raises(BundleInvalidError, match="evidence of a broken chain, and no bundle: payload-digest at seq 2"):
        BundleReader.open(tmp_path / "evidence.tar")
    with tarfile.open(tmp_path / "evidence.tar") as tar:
        entries, snapshots, checkpoint, keys, last = [tar.extractfile(each) for each in tar.getmembers()]
        assert all((entries, snapshots, checkpoint, keys, last))
        assert entries
        assert last
        rows = [json.loads(line) for line in gzip.decompress(entries.read()).splitlines()]
        assert [(row["seq"], row["payload"]) for row in rows if row["seq"] == 2] == [(2, '{"forged":true}')]
        assert [row["seq"] for row in rows] == [1, 2, 4]
        said = json.loads(base64.b64decode(json.loads(last.read())["payload"]))["predicate"]
    assert {"payload-digest", "gap"} <= {each["kind"] for each in said["breaks"]}
    assert (said["from_seq"], said["to_seq"], said["entry_count"]) == (1, 4, 3)


async def test_an_export_that_meets_a_break_far_in_ends_as_evidence_of_it(
    run_server: RunServer, superuser: asyncpg.Connection, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("signing.bundle.writer.ROWS_A_PART_MAX", 2)
    monkeypatch.setattr("app.store.chain_reader.FIRST_ROWS", 1)
    monkeypatch.setattr("app.store.chain_reader.ENTRIES_A_BATCH", 1)
    async with run_server() as client:
        await write(client, 8)
        await signed(superuser, 8)
        (await client.post("/v1/snapshots", json=OF_ACME)).raise_for_status()
        await edit(superuser, FORGE.replace("seq = 2", "seq = 7"))

        async def exported() -> httpx.Response | None:
            answer = await client.post("/v1/bundles/export", json=OF_ACME)
            return answer if answer.status_code == 200 else None

        answer = await until(exported, "the node is ready to export")
        (tmp_path / "evidence.tar").write_bytes(answer.content)
        assert "payload-digest at seq 7 of acme (met by export_bundle)" in (await check_of(client, "breaks"))["detail"]
    with pytest.raises(BundleInvalidError, match="and no bundle: payload-digest at seq 7 of tenant acme"):
        BundleReader.open(tmp_path / "evidence.tar")


def test_a_reported_break_is_kept_over_a_restart_and_counted_each_time_it_is_met(tmp_path: Path) -> None:
    met: list[str] = []
    breaks = FoundBreaks(tmp_path, met.append)
    for met_by in ("read_job", "list_jobs"):
        breaks.report("acme", Break(7, "link", "differs", "a", "b"), met_by)
    breaks.close()
    assert [(each.seq, each.met_by) for each in FoundBreaks(tmp_path).open("acme")] == [(7, "read_job")]
    assert met == ["read_job", "list_jobs"]


def test_damage_without_a_place_is_one_break_and_a_quarantine_repeats_none(tmp_path: Path) -> None:
    breaks = FoundBreaks(tmp_path)
    held_back = HeldBackError("acme", "its head is gone", job_id="j", hlc="1:0:n", epoch=1, lsn=4)
    breaks.report_error(held_back, "create_job")
    breaks.report_error(ValueError("another error"), "create_job")
    assert breaks.fault() is None
    for met_by in ("appender", "read_job"):
        breaks.report_error(ChainDamagedError("acme", "its head is gone"), met_by)
    breaks.close()
    assert [(each.kind, each.seq) for each in breaks.open()] == [("damaged", 0)]
    assert "damaged rows of acme (met by appender)" in str(breaks.fault())


@pytest.mark.parametrize("kind", ["link", "damaged", "tree", "projection"])
@pytest.mark.parametrize("is_mended_first", [False, True])
def test_the_alarm_of_a_break_ends_once_it_is_mended_and_acknowledged_in_either_order(
    tmp_path: Path, kind: str, *, is_mended_first: bool
) -> None:
    breaks = FoundBreaks(tmp_path)
    found = Break(7, kind, "differs", "a", "b")
    breaks.report("acme", found, "read_job")
    neither = str(breaks.fault())
    assert "neither mended nor acknowledged" in neither
    assert "tally verify --tenant T --acknowledge REASON" in neither
    assert "restore the rows" in neither
    (each,) = breaks.unacknowledged("acme", kind, 7)
    if is_mended_first:
        breaks.mended("acme")
        half = str(breaks.fault())
        assert ("mended, not acknowledged" in half, "restore the rows" in half) == (True, False)
        assert breaks.fault("acme", is_unmended=True) is None
        breaks.acknowledge(each, "ops")
    else:
        breaks.acknowledge(each, "ops")
        half = str(breaks.fault())
        assert ("acknowledged by ops, not mended" in half, "--acknowledge" in half) == (True, False)
        assert breaks.fault("acme", is_unmended=True) == half, "no receipt is signed over it"
        breaks.report("acme", found, "read_job")
        assert breaks.fault() == half, "it is known"
        breaks.mended("acme")
    assert (breaks.fault(), breaks.open()) == (None, [])
    breaks.close()
    again = FoundBreaks(tmp_path)
    assert again.fault() is None
    again.report("acme", found, "read_job")
    assert "neither mended nor acknowledged" in str(again.fault()), "it is back"
    again.close()


LINK = "SELECT chain_link FROM scheduler.scheduler_log WHERE tenant_id = 'acme' AND seq = 2"
RELINK = "UPDATE scheduler.scheduler_log SET chain_link = $1 WHERE tenant_id = 'acme' AND seq = 2"


async def test_rows_goes_green_only_once_they_are_mended_verified_and_acknowledged_and_without_a_restart(
    run_server: RunServer, make_settings: MakeSettings, superuser: asyncpg.Connection
) -> None:
    settings = make_settings(chain={"checkpoint_interval": "1h"}, verify={"on_start": False, "full_interval": "10d"})
    async with run_server(settings) as client:
        await write(client, 3)
    async with run_server(settings) as client:
        stored = await superuser.fetchval(LINK)
        await edit(superuser, RELINK, "0" * 64)
        met = await client.post("/v1/bundles/export", json=OF_ACME)
        assert met.status_code == 503, "the notary meets it first, and signs no further"
        assert "acme" in (await check_of(client, "rows"))["detail"]
        assert "of acme (met by notary)" in (await check_of(client, "breaks"))["detail"]

        await edit(superuser, RELINK, stored)
        (await client.post("/v1/bundles/export", json=OF_ACME)).raise_for_status()
        assert not (await check_of(client, "rows"))["ok"], "an export that went well verified nothing"
        assert (await client.get("/v1/chain/verify", params=OF_ACME)).json()["valid"]
        assert not (await check_of(client, "rows"))["ok"], "nobody has acknowledged it"
        (await client.post("/v1/chain/acknowledge", json={**OF_ACME, "reason": "mended"})).raise_for_status()
        assert (await check_of(client, "rows"))["ok"]


async def test_readyz_says_when_all_was_last_verified_and_by_whom(run_server: RunServer) -> None:
    async with run_server() as client:
        await write(client, 1)
        before = (await client.get("/readyz")).json()["verified"]
        assert before["never_verified"] > 0
        for tenant in ("acme", "_system"):
            (await client.get("/v1/chain/verify", params={"tenant_id": tenant})).raise_for_status()
        said = (await client.get("/readyz")).json()["verified"]
        assert (said["by"], said["tenants"], said["never_verified"]) == ("caller", 2, 0)
        part = {**OF_ACME, "to_seq": 1}
        (await client.get("/v1/chain/verify", params=part)).raise_for_status()
        assert (await client.get("/readyz")).json()["verified"] == said, "a range is not all"


async def test_a_node_whose_own_record_is_quarantined_is_not_ready(
    run_server: RunServer, make_settings: MakeSettings, superuser: asyncpg.Connection
) -> None:
    settings = make_settings()
    async with run_server(settings) as client:
        await write(client, 1)
    await edit(superuser, "UPDATE scheduler.chain_heads SET head_seq = head_seq + 5 WHERE tenant_id = '_system'")
    async with run_server(settings) as client:
        answer = await client.get("/readyz")
        assert answer.status_code == 503
        assert "system: the chain of tenant _system is damaged" in answer.json()["detail"]
        assert "of _system (met by start)" in answer.json()["checks"]["breaks"]["detail"]
