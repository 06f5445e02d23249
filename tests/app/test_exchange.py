"""Two ledgers that write on their own and exchange: what each chains comes to the other by itself, proved and once."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator, Iterator, Mapping
from contextlib import asynccontextmanager
from functools import partial
from itertools import pairwise
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg
import httpx
import pytest

from app.dev.cluster import free_port
from app.dev.embedded import EmbeddedPostgres
from app.store import exchange
from signing.key_file import generate
from tests.app.chains import until
from tests.app.conftest import MakeSettings, RunServer
from tests.app.peer_proxy import Asked, PeerProxy, proxy_to_peer
from tests.conftest import Database, connected_to, fresh_database

REGIONS = ("use1", "eu1")


class Ledger:
    """One of the two: a node, a database and a port of its own."""

    def __init__(self, region: str, database: Database, make_settings: MakeSettings, run_server: RunServer) -> None:
        self.region, self.database = region, database
        self._make_settings, self._run_server = make_settings, run_server
        self.port = free_port()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    @asynccontextmanager
    async def running(self, **given: Any) -> AsyncIterator[httpx.AsyncClient]:
        settings = self._make_settings(self.region, region=self.region, port=self.port, **given)
        async with self._run_server(settings, url=self.database.service_url) as client:
            yield client

    def make_key(self, folder: Path) -> None:
        """The key that it signs with, before it first starts, and the public half for the other to trust."""
        path = self._make_settings(self.region).signing_key_uri.removeprefix("file:")
        (folder / f"{self.region}.pem").write_text(generate(path).public_key_pem)

    def peers(self, other: Ledger, trusted: Path, peer: Mapping[str, Any] | None = None, **more: Any) -> dict[str, Any]:
        peer = {"url": other.url, "region": other.region, **(peer or {})}
        return {
            "bundle": {"trusted_keys": trusted},
            "exchange": {"peers": [peer], "interval": "200ms", "range_entries": 3, **more},
        }


@pytest.fixture
def databases(postgres: EmbeddedPostgres) -> Iterator[tuple[Database, Database]]:
    with fresh_database(postgres) as one, fresh_database(postgres) as other:
        yield one, other


@pytest.fixture
def ledgers(
    tmp_path: Path, databases: tuple[Database, Database], make_settings: MakeSettings, run_server: RunServer
) -> tuple[Ledger, Ledger]:
    (tmp_path / "trusted").mkdir()
    both = [
        Ledger(region, database, make_settings, run_server) for region, database in zip(REGIONS, databases, strict=True)
    ]
    for ledger in both:
        ledger.make_key(tmp_path / "trusted")
    return both[0], both[1]


async def submit(client: httpx.AsyncClient, tenant_id: str = "acme", level: str = "GLOBAL") -> dict[str, Any]:
    answer = await client.post(
        "/v1/jobs", json={"tenant_id": tenant_id, "spec": {}, "assigned_dcs": ["x"], "durability": level}
    )
    assert answer.status_code == 201, answer.text
    created: dict[str, Any] = answer.json()
    return created


async def is_known(client: httpx.AsyncClient, job: dict[str, Any]) -> bool:
    return (await client.get(f"/v1/jobs/{job['job_id']}?tenant_id={job['tenant_id']}")).status_code == 200


async def is_faultless(client: httpx.AsyncClient) -> bool:
    return [peer["fault"] for peer in (await client.get("/v1/exchange")).json()["peers"]] == [None]


async def told(client: httpx.AsyncClient) -> dict[str, Any]:
    """What a ledger says of its one peer."""
    peer: dict[str, Any]
    [peer] = (await client.get("/v1/exchange")).json()["peers"]
    return peer


async def has_lag(client: httpx.AsyncClient, entries: int) -> bool:
    return (await told(client))["lag_entries"] == entries


async def tells(client: httpx.AsyncClient, *parts: str) -> bool:
    """Whether the fault is told, with these words in it, wherever faults are."""
    fault = (await told(client))["fault"]
    if fault is None or not all(part in fault for part in parts):
        return False
    return not (await client.get("/readyz")).json()["checks"]["exchange"]["ok"]


class Proxied(NamedTuple):
    """A ledger that imports from another through a proxy."""

    us: httpx.AsyncClient
    eu: httpx.AsyncClient
    proxy: PeerProxy


@asynccontextmanager
async def proxied(ledgers: tuple[Ledger, Ledger], trusted: Path, **peer: Any) -> AsyncIterator[Proxied]:
    here, there = ledgers
    async with (
        proxy_to_peer(there.url) as proxy,
        here.running(**here.peers(there, trusted, {"url": proxy.url, **peer})) as us,
        there.running() as eu,
    ):
        yield Proxied(us, eu, proxy)


def export_fails(asked: Asked) -> tuple[int, bytes] | None:
    return (500, b"") if asked.is_export else None


async def put_seen_checkpoint_at(size: int, tenant_id: str, database: Database) -> None:
    """Have a ledger believe that it saw another tree of a tenant of its peer."""
    async with connected_to(database.superuser_url) as superuser:
        note = await superuser.fetchval("SELECT note FROM scheduler.exchange_positions WHERE tenant_id = $1", tenant_id)
        lines = note.split("\n")
        lines[1] = str(size)
        await superuser.execute(
            "UPDATE scheduler.exchange_positions SET note = $2 WHERE tenant_id = $1", tenant_id, "\n".join(lines)
        )


async def test_what_each_chains_comes_to_the_other_once(ledgers: tuple[Ledger, Ledger], tmp_path: Path) -> None:
    here, there = ledgers
    trusted = tmp_path / "trusted"
    async with here.running(**here.peers(there, trusted)) as us, there.running(**there.peers(here, trusted)) as eu:
        ours = [await submit(us) for _ in range(7)]
        theirs = [await submit(eu, tenant_id) for tenant_id in ("acme", "other")]
        for job in ours:
            await until(lambda job=job: is_known(eu, job), "it came over")
        for job in theirs:
            await until(lambda job=job: is_known(us, job), "it came over")
        for client in (us, eu):
            verdict = (await client.get("/v1/chain/verify?tenant_id=acme")).json()
            assert (verdict["valid"], verdict["entries_checked"]) == (True, 8)
            # What came over while another tenant's log was not signed yet came before its fault was over.
            await until(lambda client=client: is_faultless(client), "the first faults are over")
        elsewhere = await us.post(
            f"/v1/jobs/{theirs[0]['job_id']}/cancel", json={"tenant_id": "acme", "reason": "r", "requestor": "q"}
        )
        assert (elsewhere.status_code, elsewhere.headers["Location"]) == (421, there.url)
        assert elsewhere.json()["type"].endswith("other-region")
    async with connected_to(here.database.superuser_url) as superuser:
        rows = await superuser.fetch("SELECT t_hlc FROM scheduler.scheduler_log WHERE tenant_id = 'acme'")
        assert len({row["t_hlc"] for row in rows}) == len(rows) == 8


async def test_it_goes_on_after_the_other_was_away(ledgers: tuple[Ledger, Ledger], tmp_path: Path) -> None:
    here, there = ledgers
    trusted = tmp_path / "trusted"
    async with here.running(**here.peers(there, trusted)) as us:

        async def says_so() -> bool:
            checks = (await us.get("/readyz")).json()["checks"]
            return not checks["exchange"]["ok"]

        await until(says_so, "readiness says that the peer does not answer")
        async with there.running() as eu:
            job = await submit(eu)
            await until(lambda: is_known(us, job), "it came over")


async def test_a_peer_that_went_back_is_imported_from_no_more(ledgers: tuple[Ledger, Ledger], tmp_path: Path) -> None:
    here, there = ledgers
    trusted = tmp_path / "trusted"
    async with here.running(**here.peers(there, trusted)) as us:
        async with there.running() as eu:
            for job in [await submit(eu) for _ in range(3)]:
                await until(lambda job=job: is_known(us, job), "it came over")
        await put_seen_checkpoint_at(2, "acme", here.database)
        async with there.running():
            await until(lambda: tells(us, "tenant acme", "PeerWentBackError"), "it says that the peer went back")


async def test_a_peer_that_went_back_in_one_tenant_is_imported_from_in_none(
    ledgers: tuple[Ledger, Ledger], tmp_path: Path
) -> None:
    async with proxied(ledgers, tmp_path / "trusted") as (us, eu, proxy):
        for tenant_id in ("acme", "other"):
            for job in [await submit(eu, tenant_id) for _ in range(3)]:
                await until(lambda job=job: is_known(us, job), "it came over")
        await put_seen_checkpoint_at(4, "other", ledgers[0].database)
        await until(lambda: tells(us, "tenant other", "PeerWentBackError"), "it says that the peer went back")
        exported = proxy.times_asked("/v1/bundles/export")
        job = await submit(eu, "acme")
        looked = "/v1/log/acme/checkpoint"
        await until(lambda: has_lag(us, 1), "it knows of an entry of a tenant that did not go back")
        before = proxy.times_asked(looked)
        await until(lambda: proxy.times_asked(looked) > before, "the round is over")
        assert proxy.times_asked("/v1/bundles/export") == exported
        assert not await is_known(us, job)


async def test_entries_that_cannot_be_fetched_are_told_as_lag(ledgers: tuple[Ledger, Ledger], tmp_path: Path) -> None:
    async with proxied(ledgers, tmp_path / "trusted") as (us, eu, proxy):
        proxy.judge = export_fails
        for tenant_id in 4 * ["acme"] + 3 * ["other"]:
            await submit(eu, tenant_id)
        await until(lambda: has_lag(us, 7), "the lag is that of all tenants")
        metrics = (await us.get("/metrics")).text
        assert f'exchange_lag_entries{{peer="{proxy.url}"}} 7.0' in metrics
        proxy.judge = lambda asked: (500, b"") if asked.is_export and asked.values["from_seq"] > 3 else None
        await until(lambda: has_lag(us, 1), "the lag is lower by the ranges that were imported")
        proxy.judge = lambda _: None
        await until(lambda: has_lag(us, 0), "nothing is lacking")
        await until(lambda: is_faultless(us), "and nothing fails")


async def test_a_tenant_that_fails_keeps_no_other_from_being_imported(
    ledgers: tuple[Ledger, Ledger], tmp_path: Path
) -> None:
    def fails(asked: Asked) -> tuple[int, bytes] | None:
        return (500, b"") if asked.is_export and asked.values["tenant_id"] == "acme" else None

    def shows_no_checkpoint(asked: Asked) -> tuple[int, bytes] | None:
        return (500, b"") if asked.path == "/v1/log/acme/checkpoint" else None

    async with proxied(ledgers, tmp_path / "trusted") as (us, eu, proxy):
        for judge in (fails, shows_no_checkpoint):
            proxy.judge = judge
            late = await submit(eu, "acme")
            await until(lambda: tells(us, "tenant acme", "500"), "the fault names the tenant")
            for job in [await submit(eu, "other") for _ in range(4)]:
                await until(lambda job=job: is_known(us, job), "what is of the tenant behind it comes over")
            assert await tells(us, "tenant acme")
            assert not await is_known(us, late)
            proxy.judge = lambda _: None
            await until(lambda late=late: is_known(us, late), "the tenant comes over once it can")
            await until(lambda: is_faultless(us), "and nothing fails")


async def test_what_a_peer_holds_is_asked_between_ranges_too(ledgers: tuple[Ledger, Ledger], tmp_path: Path) -> None:
    asked_for: list[str] = []

    def noted(asked: Asked) -> tuple[int, bytes] | None:
        asked_for.extend("export" for _ in range(asked.is_export))
        asked_for.extend("held" for _ in range(asked.path == "/v1/exchange/held"))
        return None

    async with proxied(ledgers, tmp_path / "trusted") as (us, eu, proxy):
        proxy.judge = export_fails
        jobs = [await submit(eu) for _ in range(7)]
        await until(lambda: tells(us, "tenant acme", "500"), "nothing comes over")
        proxy.judge = noted
        await until(lambda: is_known(us, jobs[-1]), "all comes over")
    assert asked_for.count("export") > 2
    assert ("export", "export") not in pairwise(asked_for)


async def test_a_bundle_that_was_not_asked_for_is_not_imported(ledgers: tuple[Ledger, Ledger], tmp_path: Path) -> None:
    async with proxied(ledgers, tmp_path / "trusted", tenants=["acme"]) as (us, eu, proxy):
        proxy.judge = export_fails
        jobs = [await submit(eu, "acme") for _ in range(5)]
        secret = await submit(eu, "secret")
        for asked, answer, expected in (
            ({"tenant_id": "secret"}, None, ("1 to 3 of", "/acme were asked for", "/secret")),
            ({"tenant_id": "acme", "from_seq": 1, "to_seq": 2}, None, ("1 to 3 of", "the bundle is of 1 to 2")),
            ({"tenant_id": "acme", "from_seq": 1, "to_seq": 3}, b'{"hashes": []}', ("nothing proves", "1 to 3")),
        ):
            bundle = await eu.post("/v1/bundles/export", json=asked)
            assert bundle.status_code == 200, bundle.text
            proxy.judge = partial(answered_instead, bundle.content, answer)
            await until(lambda expected=expected: tells(us, *expected), f"{asked} is told")
            assert [job for job in [*jobs, secret] if await is_known(us, job)] == []
        proxy.judge = lambda _: None
        for job in jobs:
            await until(lambda job=job: is_known(us, job), "what was asked for comes over")
        assert not await is_known(us, secret)


def answered_instead(bundle: bytes, proof: bytes | None, asked: Asked) -> tuple[int, bytes] | None:
    if asked.is_export:
        return 200, bundle
    return (200, proof) if proof is not None and asked.path == "/v1/chain/proof/consistency" else None


async def test_tenants_that_fail_so_slowly_that_a_round_ends_with_them_come_last_in_the_next(
    ledgers: tuple[Ledger, Ledger], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.exchange.peer.FAILING_S_MAX", 0.0)
    async with proxied(ledgers, tmp_path / "trusted") as (us, eu, proxy):
        proxy.judge = lambda asked: (500, b"") if asked.path == "/v1/log/acme/checkpoint" else None
        await submit(eu, "acme")
        await until(lambda: tells(us, "tenant acme", "500"), "the first tenant fails")
        job = await submit(eu, "other")
        await until(lambda: is_known(us, job), "the tenant behind it comes over")


async def test_answers_that_are_not_understood_are_told_as_a_fault(
    ledgers: tuple[Ledger, Ledger], tmp_path: Path
) -> None:
    wrong = [
        ("/v1/tenants", b"[]"),
        ("/v1/tenants", b"\xff"),
        ("/v1/tenants", b'{"items": [{"tenant_id": "../acme"}], "next_cursor": null}'),
        ("/v1/tenants", b'{"tenants": []}'),
        ("/v1/log/acme/checkpoint", b"\xff\n\n"),
        ("/v1/chain/proof/consistency", b'{"hashes": [1]}'),
        ("/v1/chain/proof/consistency", b'{"hashes": ["0g"]}'),
        ("/v1/exchange/held", b"[]"),
        ("/v1/exchange/held", b'{"items": [{"tenant_id": "acme", "seq": "many"}]}'),
    ]
    async with proxied(ledgers, tmp_path / "trusted") as (us, eu, proxy):
        job = await submit(eu)
        await until(lambda job=job: is_known(us, job), "it came over")
        for path, body in wrong:
            await until(lambda: is_faultless(us), "nothing fails")
            proxy.judge = lambda asked, path=path, body=body: (200, body) if asked.path == path else None
            job = await submit(eu)
            expected = "the note is not UTF-8" if path.endswith("checkpoint") else f"{path} is not understood"
            await until(lambda expected=expected: tells(us, expected), f"{body!r} of {path} is told")
            proxy.judge = lambda _: None
            await until(lambda job=job: is_known(us, job), "it goes on")


async def test_an_answer_that_does_not_come_to_its_end_is_told_as_a_fault(
    ledgers: tuple[Ledger, Ledger], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n ")
        await reader.read()
        writer.close()

    here, there = ledgers
    monkeypatch.setattr("app.exchange.peer_client.ANSWER_S_MAX", 0.3)
    monkeypatch.setattr("app.exchange.peer_client.BUNDLE_S_MAX", -1.0)
    async with await asyncio.start_server(begin, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with here.running(**here.peers(there, tmp_path / "trusted", {"url": url})) as us:
            await until(lambda: tells(us, "/v1/tenants has not answered all within"), "it is told")
    monkeypatch.setattr("app.exchange.peer_client.ANSWER_S_MAX", 60.0)
    async with proxied(ledgers, tmp_path / "trusted") as (us, eu, _):
        await submit(eu)
        await until(lambda: tells(us, "has not sent all of a bundle within"), "it is told")


async def test_a_list_without_end_is_told_as_a_fault(
    ledgers: tuple[Ledger, Ledger], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.exchange.peer_client.PAGES_MAX", 3)
    monkeypatch.setattr("app.exchange.peer_client.PAGE", 1)
    endless = {
        "/v1/tenants": b'{"items": [], "next_cursor": "on"}',
        "/v1/exchange/held": b'{"items": [{"tenant_id": "acme", "seq": 1}]}',
    }
    async with proxied(ledgers, tmp_path / "trusted") as (us, _eu, proxy):
        for path, body in endless.items():
            proxy.judge = lambda asked, path=path, body=body: (200, body) if asked.path == path else None
            await until(lambda path=path: tells(us, f"{path} has more than 3 pages"), "it is told")
            proxy.judge = lambda _: None
            await until(lambda: is_faultless(us), "it goes on")


async def test_a_token_that_was_replaced_is_used_in_the_next_round(
    ledgers: tuple[Ledger, Ledger], tmp_path: Path
) -> None:
    file = tmp_path / "token"
    file.write_text("first\n")
    async with proxied(ledgers, tmp_path / "trusted", token_file=file) as (_us, _eu, proxy):
        for token in ("first", "second"):
            file.write_text(token)
            sent = f"Bearer {token}"
            await until(
                lambda sent=sent: proxy.asked and proxy.asked[-1].headers["authorization"] == sent, "it is sent"
            )


async def test_global_waits_for_a_majority_of_regions(ledgers: tuple[Ledger, Ledger], tmp_path: Path) -> None:
    here, there = ledgers
    trusted = tmp_path / "trusted"
    given = here.peers(there, trusted, is_global=True)
    async with here.running(**given, write={"timeout": "1s"}) as us:
        late = await us.post("/v1/jobs", json={"tenant_id": "acme", "spec": {}, "assigned_dcs": ["x"]})
        assert late.status_code == 503
    async with here.running(**given) as us, there.running(**there.peers(here, trusted)):

        async def is_global() -> bool:
            answer = await us.post("/v1/jobs", json={"tenant_id": "acme", "spec": {}, "assigned_dcs": ["x"]})
            return answer.status_code == 201 and "region" in answer.json()["durability"]["survives"]

        await until(is_global, "both regions hold it")
        line = json.dumps({"tenant_id": "acme", "type": "JobCreated", "spec": {}, "assigned_dcs": ["x"]})
        headers = {"Content-Type": "application/x-ndjson"}

        async def lines_are_global() -> bool:
            return (await us.post("/v1/events?durability=GLOBAL", content=line, headers=headers)).status_code == 200

        await until(lines_are_global, "lines, too")


async def test_who_asks_a_peer_is_one_and_leaves_it_to_another_when_it_is_stopped(
    pool: asyncpg.Pool, superuser: asyncpg.Connection
) -> None:
    async def ask(has_begun: asyncio.Event) -> None:
        async with pool.acquire() as connection, exchange.turn(connection, "https://peer") as is_ours:
            assert is_ours
            has_begun.set()
            await asyncio.Event().wait()

    async def is_free() -> bool:
        async with exchange.turn(superuser, "https://peer") as is_ours:
            return is_ours

    assert await is_free(), "whoever ends its turn"
    assert await is_free(), "leaves it to others"
    for passes in (None, *range(12)):  # of the event loop, before it is stopped
        has_begun = asyncio.Event()
        asking = asyncio.create_task(ask(has_begun))
        if passes is None:
            await has_begun.wait()
            assert not await is_free()
        for _ in range(passes or 0):
            await asyncio.sleep(0)
        asking.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asking
        await until(is_free, "the turn of who was stopped ends")
