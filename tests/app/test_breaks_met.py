"""A break of stored rows raises the same alarm, whichever part of the node meets it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest

from app.node.found_breaks import FoundBreaks
from ledger.errors import ChainDamagedError, HeldBackError
from ledger.verification.verdict import Break
from tests.app.chain_builder import edit
from tests.app.chains import until
from tests.app.conftest import RunServer

FORGE = "UPDATE scheduler.scheduler_log SET payload = '{\"forged\":true}' WHERE tenant_id = 'acme' AND seq = 2"
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


@pytest.mark.parametrize(
    ("met_by", "method", "path", "sent"),
    [
        ("export_bundle", "POST", "/v1/bundles/export", {"json": OF_ACME}),
        ("prove_entry", "GET", "/v1/chain/receipt", {"params": {**OF_ACME, "seq": 2}}),
    ],
)
async def test_a_request_that_meets_a_forged_row_raises_the_alarm_until_somebody_acknowledges_it(
    run_server: RunServer, superuser: asyncpg.Connection, met_by: str, method: str, path: str, sent: dict[str, Any]
) -> None:
    async with run_server() as client:
        await write(client, 3)
        await signed(superuser, 3)
        await edit(superuser, FORGE)
        answer = await client.request(method, path, **sent)
        assert (answer.status_code, answer.json()["type"].rpartition("/")[2]) == (409, "chain-damaged")

        said = await check_of(client, "breaks")
        assert not said["ok"]
        assert f"payload-digest at seq 2 of acme (met by {met_by})" in said["detail"]
        counts = await counted(client)
        assert counts["scheduler_chain_breaks"] == 1
        assert counts[f'scheduler_chain_breaks_met_total{{met_by="{met_by}"}}'] == 1

        seen = {**OF_ACME, "reason": "seen", "kind": "payload-digest", "seq": 2}
        (await client.post("/v1/chain/acknowledge", json=seen)).raise_for_status()
        assert (await check_of(client, "breaks"))["ok"]


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
