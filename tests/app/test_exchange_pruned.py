"""Ledgers that exchange, and let entries leave: nothing that left comes back, and what a peer lacks is named."""

from __future__ import annotations

import re
import shlex
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import orjson
import pytest

from app.dev.embedded import EmbeddedPostgres
from app.share.exchange.peer_client import way_on
from tests.app.chains import until
from tests.app.conftest import MakeSettings
from tests.app.exchanging import Ledger, both_of, has_lag, is_faultless, submit, tells, told, until_known
from tests.conftest import connected_to, fresh_database

TENANT = "acme"


@pytest.fixture
def ledgers(postgres: EmbeddedPostgres, tmp_path: Path, make_settings: MakeSettings) -> Iterator[tuple[Ledger, Ledger]]:
    yield from both_of(postgres, tmp_path / "trusted", make_settings)


@pytest.fixture
def forked(postgres: EmbeddedPostgres, make_settings: MakeSettings) -> Iterator[Ledger]:
    """A third ledger."""
    with fresh_database(postgres) as database:
        yield Ledger("eu2", database, make_settings)


def archiving(folder: Path) -> dict[str, Any]:
    return {"archive": {"url": str(folder), "interval": "1s"}}


async def run_jobs(client: httpx.AsyncClient, *numbers: int) -> None:
    """Jobs that have ended, three entries each."""
    events: list[dict[str, Any]] = []
    for number in numbers:
        job = {"tenant_id": TENANT, "job_id": f"job-{number}"}
        events += [
            {**job, "type": "JobCreated", "spec": {}, "assigned_dcs": ["x"]},
            {**job, "type": "JobAccepted", "dc_id": "x"},
            {**job, "type": "JobCompleted", "final_status": "ok"},
        ]
    await write(client, *events)


async def write(client: httpx.AsyncClient, *events: dict[str, Any]) -> None:
    answer = await client.post(
        "/v1/events",
        params={"durability": "GLOBAL"},
        content=b"\n".join(map(orjson.dumps, events)),
        headers={"Content-Type": "application/x-ndjson"},
    )
    assert answer.status_code == 200, answer.text


async def head_seq(client: httpx.AsyncClient) -> int:
    found: int = (await client.get(f"/v1/chain/head?tenant_id={TENANT}")).json()["seq"]
    return found


async def prune(client: httpx.AsyncClient, ledger: Ledger, to_seq: int) -> None:
    """Let the entries up to ``to_seq`` leave, where a snapshot is made to end."""
    assert await head_seq(client) == to_seq
    assert (await client.post("/v1/snapshots", json={"tenant_id": TENANT})).status_code == 201
    answer = await client.put("/v1/retention", params={"tenant_id": TENANT}, json={"period": "1s"})
    assert answer.status_code == 200, answer.text

    async def is_prunable() -> bool:
        found = (await client.get("/v1/retention", params={"tenant_id": TENANT})).json()
        return bool(found["prunable_to_seq"] >= to_seq)

    await until(is_prunable, "they are old and archived")
    done = await client.post("/v1/prunes", json={"tenant_id": TENANT, "to_seq": to_seq})
    assert (done.status_code, done.json()["to_seq"]) == (200, to_seq)

    async def is_removed() -> bool:
        async with connected_to(ledger.database.superuser_url) as connection:
            first = "SELECT min(seq) FROM scheduler.scheduler_log WHERE tenant_id = $1"
            return bool(await connection.fetchval(first, TENANT) == to_seq + 1)

    await until(is_removed, "they are removed")


async def is_valid(client: httpx.AsyncClient) -> bool:
    return bool((await client.get(f"/v1/chain/verify?tenant_id={TENANT}")).json()["valid"])


async def test_what_left_on_both_sides_comes_back_from_neither(ledgers: tuple[Ledger, Ledger], tmp_path: Path) -> None:
    here, there = ledgers
    trusted = tmp_path / "trusted"
    async with (
        here.running(**here.peers(there, trusted), **archiving(tmp_path / "archive-us")) as us,
        there.running(**there.peers(here, trusted), **archiving(tmp_path / "archive-eu")) as eu,
    ):
        await run_jobs(us, 1, 2)
        await until(lambda: _has_head(eu, 6), "it came over")
        await run_jobs(eu, 3)
        await until(lambda: _has_head(us, 9), "it came back")
        await prune(us, here, 9)
        # The entries about retention come over; eu still has all.
        last = await head_seq(us)
        await until(lambda: _has_head(eu, last), "the prune came over")
        later = await submit(eu)
        await until_known(us, [later])
        assert await is_faultless(us)
        assert await is_faultless(eu)
        await until(lambda: has_lag(us, 0), "nothing is lacking")
        await until(lambda: has_lag(eu, 0), "nothing is lacking")
        assert await head_seq(us) == last + 1
        assert await head_seq(eu) == last + 1
        assert await is_valid(us)
        assert await is_valid(eu)


async def _has_head(client: httpx.AsyncClient, seq: int) -> bool:
    answer = await client.get(f"/v1/chain/head?tenant_id={TENANT}")
    return bool(answer.status_code == 200 and answer.json()["seq"] >= seq)


async def test_a_ledger_that_lacks_what_left_at_its_peer_names_the_archive(
    ledgers: tuple[Ledger, Ledger], tmp_path: Path
) -> None:
    here, there = ledgers
    trusted, archive = tmp_path / "trusted", tmp_path / "archive-eu"
    async with there.running(**archiving(archive)) as eu:
        await run_jobs(eu, 1, 2)
        await prune(eu, there, 6)
        other = await submit(eu, "other")
        async with here.running(**here.peers(there, trusted)) as us:
            await until(lambda: tells(us, f"tenant {TENANT}", "entries up to seq 6", str(archive)), "the fault is told")
            # No tenant but this one is concerned, and of this one nothing is imported.
            await until_known(us, [other])
            assert (await us.get(f"/v1/chain/head?tenant_id={TENANT}")).status_code == 404
            # What is seen of it is proved all the same.
            async with connected_to(here.database.superuser_url) as connection:
                seen = "SELECT imported_seq FROM scheduler.exchange_positions WHERE tenant_id = $1"
                assert await connection.fetchval(seen, TENANT) == 0


def commands_in(fault: str) -> tuple[str, str]:
    """The commands that a fault tells: one for the operator of the peer, one for that of this ledger."""
    found = re.search(r"(tally bundle export .+?), .*?(tally bundle import \S+)", fault)
    assert found is not None, fault
    return found[1], found[2]


async def bring_what_left(us: httpx.AsyncClient, here: Ledger, there: Ledger, folder: Path, says: str) -> str:
    """Run what the fault of ``here`` says, wait until it goes on, and return what the import printed."""
    await until(lambda: tells(us, says), "the fault is told")
    export, bring = commands_in((await told(us))["fault"])
    await there.command(export, folder)
    printed = await here.command(bring, folder)
    await until(lambda: is_faultless(us), "it goes on")
    return printed


async def job_of(client: httpx.AsyncClient, job_id: str) -> dict[str, Any]:
    """A job without what is each ledger's own."""
    found: dict[str, Any] = (await client.get(f"/v1/jobs/{job_id}?tenant_id={TENANT}")).json()
    return {name: value for name, value in found.items() if name not in ("last_seq", "consistency")}


async def test_a_ledger_that_joins_after_a_prune_follows_once_the_commands_of_its_fault_were_run(
    ledgers: tuple[Ledger, Ledger], tmp_path: Path
) -> None:
    here, there = ledgers
    trusted, archive = tmp_path / "trusted", tmp_path / "archive-eu"
    async with there.running(**archiving(archive)) as eu:
        await run_jobs(eu, 1, 2)
        before = [await job_of(eu, f"job-{number}") for number in (1, 2)]
        await prune(eu, there, 6)
        async with here.running(**here.peers(there, trusted)) as us:
            await bring_what_left(us, here, there, tmp_path, "tally bundle import")
            later = await submit(eu)
            await until_known(us, [later])
            await until(lambda: has_lag(us, 0), "nothing is lacking")
            assert [await job_of(us, f"job-{number}") for number in (1, 2)] == before
            assert await job_of(us, later["job_id"]) == await job_of(eu, later["job_id"])
            assert await head_seq(us) == await head_seq(eu)
            assert await is_valid(us)
            # The position is that of the exchange: nothing is asked for twice.
            assert "0 imported" in await here.command(f"tally bundle import {TENANT}.bundle.tar", tmp_path)


async def test_a_ledger_that_was_away_for_too_long_is_brought_what_it_lacks_and_no_more(
    ledgers: tuple[Ledger, Ledger], tmp_path: Path
) -> None:
    here, there = ledgers
    trusted, archive = tmp_path / "trusted", tmp_path / "archive-eu"
    async with there.running(**archiving(archive)) as eu:
        async with here.running(**here.peers(there, trusted)) as us:
            await run_jobs(eu, 1)
            await until(lambda: _has_head(us, 3), "it came over")
        await run_jobs(eu, 2, 3)
        await prune(eu, there, 9)
        async with here.running(**here.peers(there, trusted)) as us:
            assert "0 there already" in await bring_what_left(us, here, there, tmp_path, "--from-seq 4")
            await until(lambda: has_lag(us, 0), "nothing is lacking")
            assert await head_seq(us) == await head_seq(eu)
            assert await is_valid(us)


async def test_a_ledger_that_pruned_while_it_was_away_takes_late_entries_about_what_left_it(
    ledgers: tuple[Ledger, Ledger], tmp_path: Path
) -> None:
    here, there = ledgers
    trusted, job = tmp_path / "trusted", {"tenant_id": TENANT, "job_id": "job-9"}
    async with there.running(**archiving(tmp_path / "archive-eu")) as eu:
        async with here.running(**here.peers(there, trusted)) as us:
            await write(eu, {**job, "type": "JobCreated", "spec": {}, "assigned_dcs": ["x"]})
            await until(lambda: _has_head(us, 1), "it came over")
        await write(eu, {**job, "type": "JobAccepted", "dc_id": "x"})
        await write(eu, {**job, "type": "JobCompleted", "final_status": "ok"})
        async with here.running(**archiving(tmp_path / "archive-us")) as us:
            # The job has not ended here, and leaves after twice the period; what is newer leaves with it.
            await run_jobs(us, 8)
            await prune(us, here, 4)
        await prune(eu, there, 3)
        async with here.running(**here.peers(there, trusted)) as us:
            await bring_what_left(us, here, there, tmp_path, "--from-seq 2")
            assert await is_valid(us)


async def test_a_bundle_of_another_history_of_its_log_does_not_count_as_what_a_peer_lacks(
    ledgers: tuple[Ledger, Ledger], forked: Ledger, tmp_path: Path
) -> None:
    here, there = ledgers
    trusted, named = tmp_path / "trusted", {"log": {"origin": "log.eu"}}
    forked.make_key(trusted)
    async with forked.running(**named) as other:
        await run_jobs(other, 1)
        await forked.command(f"tally bundle export --tenant {TENANT} --out forked.tar", tmp_path)
    async with there.running(**archiving(tmp_path / "archive-eu"), **named) as eu:
        await run_jobs(eu, 1, 2)
        await prune(eu, there, 6)
        async with here.running(**here.peers(there, trusted)) as us:
            await until(lambda: tells(us, "tally bundle import"), "the fault is told")
            await here.command("tally bundle import forked.tar", tmp_path)
            await until(lambda: tells(us, "nothing proves that the entries 1 to 3"), "it is told")
            assert (await told(us))["imported_entries"] == 0


def test_what_a_peer_says_of_its_archive_is_one_argument_of_the_command() -> None:
    said = way_on(TENANT, 4, "/mnt/a; rm -rf $(pwd) 'x'\x1b[0m")
    export, _ = commands_in(said)
    words = shlex.split(export)
    assert words[5:7] == ["--from-archive", r"/mnt/a; rm -rf $(pwd) 'x'\x1b[0m"]
    assert "--from-archive URL" in way_on(TENANT, 1, {"not": "a text"})


async def test_a_peer_whose_positions_were_removed_brings_nothing_back(
    ledgers: tuple[Ledger, Ledger], tmp_path: Path
) -> None:
    here, there = ledgers
    trusted = tmp_path / "trusted"
    async with there.running(bundle={"trusted_keys": trusted}) as eu:
        async with here.running(**here.peers(there, trusted), **archiving(tmp_path / "archive-us")) as us:
            await run_jobs(eu, 1, 2)
            await until(lambda: _has_head(us, 6), "it came over")
            await prune(us, here, 6)
            head = await head_seq(us)
        async with connected_to(here.database.owner_url) as owner:
            await owner.execute("DELETE FROM scheduler.exchange_positions")
        # The same bundles would be known as imported; these are others of the same entries.
        peers = here.peers(there, trusted, range_entries=4)
        async with here.running(**peers, **archiving(tmp_path / "archive-us")) as us:
            await until(lambda: tells(us, f"tenant {TENANT}", "may have left as well", "archive-us"), "it is told")
            assert await head_seq(us) == head
            assert await is_valid(us)
