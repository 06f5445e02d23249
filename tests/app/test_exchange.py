"""Two ledgers that write on their own and exchange: what each chains comes to the other by itself, proved and once."""

from __future__ import annotations

import asyncio
import gc
import json
import re
import shutil
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack, asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg
import httpx
import pytest
import structlog

from app.dev.embedded import EmbeddedPostgres
from app.runtime.outgoing import NoAnswerError
from app.share.bundle import importer, taking
from app.share.exchange.peer import LISTED_EVERY_S
from app.share.exchange.turns import Turns
from app.store import exchange
from tests.app.bundles import bundle_of
from tests.app.chains import until
from tests.app.conftest import MakeSettings
from tests.app.exchanging import (
    REGIONS,
    Ledger,
    both_of,
    has_lag,
    is_faultless,
    is_known,
    submit,
    submit_all,
    tells,
    told,
    until_known,
)
from tests.app.peer_proxy import Asked, PeerProxy, proxy_to_peer, unchanged
from tests.conftest import Database, connected_to, fresh_database
from tests.ledger.ledger_in_memory import SIGNER, build


@pytest.fixture
def ledgers(postgres: EmbeddedPostgres, tmp_path: Path, make_settings: MakeSettings) -> Iterator[tuple[Ledger, Ledger]]:
    yield from both_of(postgres, tmp_path / "trusted", make_settings)


@pytest.fixture
def anew(postgres: EmbeddedPostgres, make_settings: MakeSettings) -> Iterator[Ledger]:
    """What may answer in the place of the second ledger: another one, that has not started and has no key."""
    with fresh_database(postgres) as database:
        yield Ledger("eu2", database, make_settings)


class Proxied(NamedTuple):
    """A ledger that imports from another through a proxy, and its database."""

    us: httpx.AsyncClient
    eu: httpx.AsyncClient
    proxy: PeerProxy
    database: Database


@asynccontextmanager
async def proxied(ledgers: tuple[Ledger, Ledger], trusted: Path, **peer: Any) -> AsyncIterator[Proxied]:
    here, there = ledgers
    async with (
        proxy_to_peer(there.url) as proxy,
        here.running(**here.peers(there, trusted, {"url": proxy.url, **peer})) as us,
        there.running(bundle={"trusted_keys": trusted}) as eu,
    ):
        yield Proxied(us, eu, proxy, here.database)


def export_fails(asked: Asked) -> tuple[int, bytes] | None:
    return (500, b"") if asked.is_export else None


NEWS, LACKING = "/v1/exchange/news", "/v1/exchange/lacking"


def listed(*tenant_ids: str, has_more: bool = False, is_list: bool = True, seq: int = 0) -> bytes:
    """A page of the list of tenants, without checkpoints."""
    items = [{"tenant_id": each, "checkpoint": None, "held": seq} for each in tenant_ids]
    return json.dumps({"items": items, "cursor": "on", "is_list": is_list, "has_more": has_more}).encode()


def held(*tenant_ids: str, seq: int) -> bytes:
    return json.dumps({"items": [{"tenant_id": each, "seq": seq} for each in tenant_ids]}).encode()


def ranges(*found: tuple[int, int]) -> bytes:
    """Ranges that a peer says are lacking."""
    return json.dumps({"items": [{"from_seq": first, "to_seq": last} for first, last in found]}).encode()


def shows_no_note(*tenant_ids: str) -> Callable[[Asked, dict[str, Any]], None]:
    """An edit by which the newest checkpoints of these tenants are none."""

    def edit(_: Asked, answer: dict[str, Any]) -> None:
        for each in answer["items"]:
            if each["tenant_id"] in tenant_ids:
                each["checkpoint"] = "no note"

    return edit


NO_NOTE = "the note has no signatures"


def answered_instead(bundle: bytes, proof: bytes | None, asked: Asked) -> tuple[int, bytes] | None:
    if asked.is_export:
        return 200, bundle
    return (200, proof) if proof is not None and asked.path == "/v1/chain/proof/consistency" else None


async def until_looked_again(proxy: PeerProxy) -> None:
    """Wait until a peer has told news since, and the round that they began is over."""
    before = proxy.times_asked(NEWS)
    await until(lambda: proxy.times_asked(NEWS) > before + 2, "the round is over")


async def submit_what_is_not_imported(pair: Proxied, tenant_id: str, lag_entries: int = 1) -> dict[str, Any]:
    """A job of a tenant of the peer that is looked at, and not imported though nothing is wrong with it."""
    us, eu, proxy, _ = pair
    exported = proxy.times_asked("/v1/bundles/export")
    job = await submit(eu, tenant_id)
    await until(lambda: has_lag(us, lag_entries), "it knows of the entry")
    await until_looked_again(proxy)
    assert proxy.times_asked("/v1/bundles/export") == exported
    assert not await is_known(us, job)
    return job


def tells_not_of(tenant_id: str) -> Callable[[Asked, dict[str, Any]], None]:
    """An edit by which the peer tells of its other tenants alone."""

    def edit(_: Asked, answer: dict[str, Any]) -> None:
        answer["items"] = [each for each in answer["items"] if each["tenant_id"] != tenant_id]

    return edit


async def forget(peer: httpx.AsyncClient, tenant_id: str, database: Database, forgotten: str = "%") -> None:
    """Remove what a ledger has seen of a peer that shows this tenant, as an operator does; of some tenants."""
    origin = (await peer.get(f"/v1/log/{tenant_id}/checkpoint")).text.split("\n")[0].removesuffix(f"/{tenant_id}")
    async with connected_to(database.owner_url) as owner:
        await owner.execute(
            "DELETE FROM scheduler.exchange_positions WHERE log_origin = $1 || '/' || tenant_id AND tenant_id LIKE $2",
            origin,
            forgotten,
        )


async def test_what_each_chains_comes_to_the_other_once_it_is_there_and_global_waits_for_both(
    ledgers: tuple[Ledger, Ledger], tmp_path: Path
) -> None:
    here, there = ledgers
    trusted = tmp_path / "trusted"

    async def says_so() -> bool:
        return not (await us.get("/readyz")).json()["checks"]["exchange"]["ok"]

    async def is_global() -> bool:
        answer = await us.post("/v1/jobs", json={"tenant_id": "slow", "spec": {}, "assigned_dcs": ["x"]})
        return answer.status_code == 201 and "region" in answer.json()["durability"]["survives"]

    async def lines_are_global() -> bool:
        line = json.dumps({"tenant_id": "slow", "type": "JobCreated", "spec": {}, "assigned_dcs": ["x"]})
        headers = {"Content-Type": "application/x-ndjson"}
        return (await us.post("/v1/events?durability=GLOBAL", content=line, headers=headers)).status_code == 200

    async def repeated() -> list[tuple[int, str | None]]:
        """Status and, where the level is not shown, what is achieved, of keyed requests that were sent before."""
        job = {"tenant_id": "slow", "spec": {}, "assigned_dcs": ["x"], "durability": "GLOBAL"}
        lease = {"tenant_id": "slow", "commitment": {"kind": "Lease", "resource": "r", "holder": "h"}}
        lines = json.dumps(job | {"type": "JobCreated"})
        headers = {"Idempotency-Key": "one", "Content-Type": "application/json"}
        answers = [
            await us.post("/v1/jobs", content=json.dumps(job), headers=headers),
            await us.post("/v1/commitments", content=json.dumps(lease), headers=headers),
            await us.post(
                "/v1/events?durability=GLOBAL",
                content=lines.replace(', "durability": "GLOBAL"', ""),
                headers=headers | {"Content-Type": "application/x-ndjson"},
            ),
        ]
        return [(answer.status_code, answer.json().get("achieved")) for answer in answers]

    async def are_global() -> bool:
        return [status for status, _ in await repeated()] == [201, 201, 200]

    async with here.running(**here.peers(there, trusted, is_global=True), write={"timeout": "1s"}) as us:
        await until(says_so, "readiness says that the peer does not answer")
        late = await us.post("/v1/jobs", json={"tenant_id": "slow", "spec": {}, "assigned_dcs": ["x"]})
        assert late.status_code == 503
        for _ in range(2):
            assert await repeated() == [(503, "REGIONAL")] * 3
        ours = [await submit(us, level="REGIONAL") for _ in range(7)]
        # One of them signs no snapshots: what leaves it is signed by the manifests of its bundles.
        async with there.running(**there.peers(here, trusted), chain={"sign_snapshots": False}) as eu:
            theirs = await submit_all(eu, "acme", "other")
            await until_known(eu, ours)
            await until_known(us, theirs)
            await until(is_global, "both regions hold it")
            await until(lines_are_global, "lines, too")
            await until(are_global, "and what was repeated")
            for client in (us, eu):
                verdict = (await client.get("/v1/chain/verify?tenant_id=acme")).json()
                assert (verdict["valid"], verdict["entries_checked"]) == (True, 8)
                # What came over while another tenant's log was not signed yet came before its fault was over.
                await until(lambda client=client: is_faultless(client), "the first faults are over")
            elsewhere = await us.post(
                f"/v1/jobs/{theirs[0]['job_id']}/cancel", json={"tenant_id": "acme", "reason": "r", "requestor": "q"}
            )
            assert (elsewhere.status_code, elsewhere.json()["home_region"]) == (201, there.region)
            assert "region" in elsewhere.json()["durability"]["survives"], "GLOBAL waits for the home region, too"
            at_home = (await eu.get(f"/v1/jobs/{theirs[0]['job_id']}?tenant_id=acme")).json()
            assert at_home["status"] == "CANCELLING"
        assert await repeated() == [(503, "REGIONAL")] * 3, "nobody says now what the peer holds"
    async with connected_to(here.database.superuser_url) as superuser:
        rows = await superuser.fetch("SELECT t_hlc FROM scheduler.scheduler_log WHERE tenant_id = 'acme'")
        assert len({row["t_hlc"] for row in rows}) == len(rows) == 9


async def test_a_peer_that_no_longer_lists_a_tenant_is_imported_from_in_none_by_a_node_that_was_restarted_either(
    ledgers: tuple[Ledger, Ledger], tmp_path: Path
) -> None:
    here, there = ledgers
    async with proxy_to_peer(there.url) as proxy, there.running() as eu:
        settings = here.peers(there, tmp_path / "trusted", {"url": proxy.url})
        async with here.running(**settings) as us:
            pair = Proxied(us, eu, proxy, here.database)
            await until_known(us, await submit_all(eu, "hidden", "shown"))
            await until(lambda: is_faultless(us), "nothing fails")
            proxy.edit = tells_not_of("hidden")
            await until(lambda: tells(us, "tenant hidden: PeerWentBackError", "right audit"), "it is told")
            job = await submit_what_is_not_imported(pair, "shown")
        exported = proxy.times_asked("/v1/bundles/export")
        async with here.running(**settings) as us:
            await until(lambda: tells(us, "tenant hidden: PeerWentBackError"), "it is told again")
            await submit_what_is_not_imported(pair._replace(us=us), "shown", lag_entries=2)
            assert proxy.times_asked("/v1/bundles/export") == exported
            await forget(eu, "hidden", here.database, "hidden")
            await until_known(us, [job])
            await until(lambda: is_faultless(us), "nothing fails")


async def test_a_peer_that_shows_another_log_is_imported_from_once_what_was_seen_is_removed(
    ledgers: tuple[Ledger, Ledger], anew: Ledger, tmp_path: Path
) -> None:
    trusted = tmp_path / "trusted"
    anew.make_key(trusted)
    async with proxied(ledgers, trusted) as (us, eu, proxy, own_database), anew.running() as other_eu:
        jobs = await submit_all(other_eu, "acme", "new")
        await until_known(us, [await submit(eu)])
        exported = proxy.times_asked("/v1/bundles/export")
        proxy.target = anew.url
        refused = ("tenant acme: PeerWentBackError", "tenant new: PeerWentBackError")
        await until(lambda: tells(us, *refused), "it is told")
        await until_looked_again(proxy)
        assert proxy.times_asked("/v1/bundles/export") == exported
        await forget(eu, "acme", own_database)
        await until_known(us, jobs)
        await until(lambda: is_faultless(us), "nothing fails")


async def test_a_node_that_was_restarted_knows_a_peer_by_its_key_whatever_its_log_is_called(
    ledgers: tuple[Ledger, Ledger], anew: Ledger, tmp_path: Path
) -> None:
    here, there = ledgers
    anew.key_file.parent.mkdir(parents=True)
    shutil.copy(there.key_file, anew.key_file)
    async with proxy_to_peer(there.url) as proxy, there.running() as eu, anew.running() as other_eu:
        jobs = await submit_all(other_eu, "a-new-one", "acme")
        settings = here.peers(there, tmp_path / "trusted", {"url": proxy.url})
        async with here.running(**settings) as us:
            await until_known(us, [await submit(eu)])
        exported = proxy.times_asked("/v1/bundles/export")
        proxy.target = anew.url
        async with here.running(**settings) as us:
            refused = ("tenant acme: PeerWentBackError", "tenant a-new-one: PeerWentBackError")
            await until(lambda: tells(us, *refused), "it is told")
            await until_looked_again(proxy)
            assert proxy.times_asked("/v1/bundles/export") == exported
            await forget(eu, "acme", here.database)
            await until_known(us, jobs)
            await until(lambda: is_faultless(us), "nothing fails")


# --- what is not fetched, and how soon what is comes over ------------------------------------------------


async def origins(database: Database, tenant_id: str = "acme") -> list[bool]:
    """Of each entry of a chain, whether it came from another ledger."""
    async with connected_to(database.superuser_url) as superuser:
        rows = await superuser.fetch(
            "SELECT origin FROM scheduler.scheduler_log WHERE tenant_id = $1 ORDER BY seq", tenant_id
        )
    return [row["origin"] is not None for row in rows]


def exported(proxy: PeerProxy) -> list[tuple[int, int]]:
    return [(each.values["from_seq"], each.values["to_seq"]) for each in proxy.asked if each.is_export]


async def test_entries_that_came_from_a_ledger_are_not_fetched_back_by_it(
    ledgers: tuple[Ledger, Ledger], tmp_path: Path
) -> None:
    here, there = ledgers
    trusted = tmp_path / "trusted"
    async with (
        proxy_to_peer(there.url) as proxy,
        here.running(**here.peers(there, trusted, {"url": proxy.url})) as us,
        there.running(**there.peers(here, trusted)) as eu,
    ):
        ours = await submit_all(us, *4 * ["acme"])
        await until_known(eu, ours)
        theirs = await submit(eu)
        await until_known(us, [theirs])
        later = await submit(us)
        await until_known(eu, [later])
        await until(lambda: is_looked_at(proxy, 6), "it has looked at all that the peer has")
        await until(lambda: has_lag(us, 0), "nothing is lacking")
        assert exported(proxy) == [(5, 5)]
        assert (await told(us))["imported_entries"] == 1
        assert (await told(eu))["imported_entries"] == 5
        assert await origins(here.database) == [False] * 4 + [True, False]
        assert await origins(there.database) == [True] * 4 + [False, True]


def is_looked_at(proxy: PeerProxy, seq: int, tenant_id: str = "acme") -> bool:
    """Whether the peer was asked what of its chain up to ``seq`` is lacking."""
    return any(
        (each.path, each.values.get("tenant_id"), each.values.get("to_seq")) == (LACKING, tenant_id, str(seq))
        for each in proxy.asked
    )


async def test_an_entry_reaches_a_third_ledger_once_and_through_the_second_if_the_first_is_away(
    ledgers: tuple[Ledger, Ledger], anew: Ledger, tmp_path: Path
) -> None:
    one, two = ledgers
    trusted = tmp_path / "trusted"
    anew.make_key(trusted)
    async with proxy_to_peer(one.url) as from_one, proxy_to_peer(two.url) as from_two:
        peers = [
            {"url": each.url, "region": region} for each, region in zip((from_one, from_two), REGIONS, strict=True)
        ]
        both = anew.peers(two, trusted)
        both["exchange"]["peers"] = peers
        async with (
            one.running() as first,
            two.running(**two.peers(one, trusted)) as second,
            anew.running(**both) as third,
        ):
            # What the second tells of it is heard only once it came from the first.
            from_two.judge = lambda asked: (500, b"") if asked.path == NEWS else None
            job = await submit(first)
            for client in (second, third):
                await until_known(client, [job])
            from_two.judge = lambda _: None
            await until(lambda: is_looked_at(from_two, 1), "the second is looked at")
            assert exported(from_two) == []
            assert await origins(anew.database) == [True]
            from_one.judge = lambda _: (503, b"")
            later = await submit(first)
            await until_known(third, [later])
            assert exported(from_two) == [(2, 2)]
            from_one.judge = lambda _: None
            await until(lambda: is_looked_at(from_one, 2), "the first is looked at again")
            await until(lambda: exported(from_one) == [(1, 1), (2, 2)], "what came through the second is fetched again")
            assert await origins(anew.database) == [True, True]


async def test_a_global_write_waits_for_news_and_not_for_the_interval(
    ledgers: tuple[Ledger, Ledger], tmp_path: Path
) -> None:
    here, there = ledgers
    trusted = tmp_path / "trusted"
    slowly = {"interval": "10s", "is_global": True}
    chain = {"chain": {"checkpoint_interval": "40s"}}
    async with (
        there.running(**there.peers(here, trusted, interval="10s")) as eu,
        here.running(**here.peers(there, trusted, **slowly), **chain) as us,
    ):
        loop = asyncio.get_running_loop()
        await submit(us, level="LOCAL")
        await until(lambda: is_faultless(us), "nothing fails")
        await until(lambda: is_faultless(eu), "nothing fails")
        for _ in range(3):
            began_s = loop.time()
            job = await submit(us)
            assert loop.time() - began_s < 5
            assert await is_known(eu, job)


async def test_a_peer_that_was_away_and_asks_for_news_is_asked_at_once(
    ledgers: tuple[Ledger, Ledger], tmp_path: Path
) -> None:
    here, there = ledgers
    trusted = tmp_path / "trusted"
    async with here.running(**here.peers(there, trusted, interval="1h")) as us:
        await until(lambda: tells(us, "does not answer"), "the peer is away")
        async with there.running(**there.peers(here, trusted)) as eu:
            job = await submit(eu)
            await until(lambda: is_known(us, job), "it came over", 30)


async def test_a_bundle_that_was_not_asked_for_is_not_imported_nor_verified(
    ledgers: tuple[Ledger, Ledger], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    verified: list[object] = []

    def take_verified(*given: Any) -> taking.TakenBundle:
        verified.append(given)
        return taking.take_verified(*given)

    monkeypatch.setattr(importer, "take_verified", take_verified)
    async with proxied(ledgers, tmp_path / "trusted", tenants=["acme"]) as (us, eu, proxy, _):
        proxy.judge = export_fails
        jobs = await submit_all(eu, *5 * ["acme"])
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
        assert verified == []
        proxy.judge = lambda _: None
        await until_known(us, jobs)
        assert not await is_known(us, secret)


async def test_what_a_peer_says_no_more_that_it_holds_does_not_count(
    ledgers: tuple[Ledger, Ledger], tmp_path: Path
) -> None:
    here, there = ledgers
    tenant_id = "acme"

    async def answers(asked: Asked) -> tuple[int, bytes]:
        """A list begins each time, as if its nodes answered in turn."""
        head = await us.get("/v1/chain/head?tenant_id=acme")
        seq = head.json()["seq"] if head.status_code == 200 else 0
        return 200, listed(tenant_id, seq=seq) if asked.path == NEWS else held(tenant_id, seq=seq)

    async with proxy_to_peer(there.url) as proxy:
        settings = here.peers(there, tmp_path / "trusted", {"url": proxy.url}, is_global=True)
        async with here.running(**settings, write={"timeout": "1s"}) as us:

            async def is_answered(status: int) -> bool:
                body = {"tenant_id": "acme", "spec": {}, "assigned_dcs": ["x"], "durability": "GLOBAL"}
                return (await us.post("/v1/jobs", json=body)).status_code == status

            proxy.judge = answers
            await until(lambda: is_answered(201), "the peer holds it")
            tenant_id = "other"
            await until(lambda: is_answered(503), "the peer does not hold it any more")


async def test_peers_that_send_slowly_hold_up_no_other_import_and_are_named(
    ledgers: tuple[Ledger, Ledger], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.runtime.outgoing.RATE_WINDOW_S", 1.0)
    here, there = ledgers
    stalled: list[bytes] = []

    async def stall(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Pass on what is asked, but of a bundle its first kibibyte alone."""
        try:
            head = await reader.readuntil(b"\r\n\r\n")
        except asyncio.IncompleteReadError:
            return
        length = re.search(rb"content-length: ([0-9]+)", head, re.IGNORECASE)
        body = await reader.readexactly(int(length[1])) if length else b""
        other_reader, other = await asyncio.open_connection("127.0.0.1", there.port)
        other.write(head.replace(b"\r\n", b"\r\nConnection: close\r\n", 1) + body)
        if b"/v1/bundles/export" in head:
            stalled.append(head)
            writer.write(await other_reader.read(1024))
            await reader.read()
        else:
            writer.write(await other_reader.read())
        other.close()
        writer.close()

    async with there.running() as eu, AsyncExitStack() as stack:
        servers = [await stack.enter_async_context(await asyncio.start_server(stall, "127.0.0.1", 0)) for _ in range(3)]
        urls = [f"http://127.0.0.1:{each.sockets[0].getsockname()[1]}" for each in servers]
        given = here.peers(there, tmp_path / "trusted")
        slow = [{"url": url, "region": f"slow{number}"} for number, url in enumerate(urls)]
        given["exchange"]["peers"] = slow + given["exchange"]["peers"]
        # So long each is named, though it lacks nothing any more once the other was imported from.
        given["exchange"]["interval"] = "5s"
        job = await submit(eu)
        async with here.running(**given) as us:

            async def are_named() -> bool:
                peers = (await us.get("/v1/exchange")).json()["peers"]
                return all(
                    f"{url}/v1/bundles/export sends too slowly" in str(peer["fault"])
                    for url, peer in zip(urls, peers, strict=False)
                )

            await until(lambda: len(stalled) >= len(urls), "all send slowly")
            await until(lambda: is_known(us, job), "the other is imported from")
            await until(are_named, "each is named")

            async def is_honest() -> bool:
                return (await us.get("/v1/exchange")).json()["peers"][-1]["fault"] is None

            await until(is_honest, "the other has no fault")


async def test_who_asks_a_peer_is_one_and_leaves_it_to_another_when_it_is_stopped(
    pool: asyncpg.Pool, superuser: asyncpg.Connection
) -> None:
    turns = Turns(pool)

    async def ask(has_begun: asyncio.Event) -> None:
        async with turns.turn("https://peer") as is_ours:
            assert is_ours
            has_begun.set()
            await asyncio.Event().wait()

    async def is_free() -> bool:
        is_ours = await exchange.take_turn(superuser, "https://peer")
        if is_ours:
            await exchange.end_turn(superuser, "https://peer")
        return is_ours

    assert await is_free(), "the turn has ended"
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


async def test_the_turns_of_all_peers_hold_one_connection_and_end_though_their_rounds_fail(
    pool: asyncpg.Pool, superuser: asyncpg.Connection
) -> None:
    turns = Turns(pool)
    free = pool.get_max_size()
    async with AsyncExitStack() as stack:
        for number in range(2 * free):
            assert await stack.enter_async_context(turns.turn(f"https://peer{number}"))
        with pytest.raises(NoAnswerError):
            async with turns.turn("https://failing"):
                raise NoAnswerError("it sends a byte now and then")
        others = [await stack.enter_async_context(pool.acquire(timeout=5)) for _ in range(free - 1)]
        assert [await each.fetchval("SELECT 1") for each in others] == [1] * (free - 1)
        assert await exchange.take_turn(superuser, "https://failing")
        assert not await exchange.take_turn(superuser, "https://peer0")
    assert await exchange.take_turn(superuser, "https://peer0")


# --- two ledgers that the tests share, which begin here ------------------------------------------------


@pytest.fixture(scope="module")
def shared_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("exchange")


@pytest.fixture(scope="module")
def shared_ledgers(
    postgres: EmbeddedPostgres, shared_folder: Path, make_shared_settings: MakeSettings
) -> Iterator[tuple[Ledger, Ledger]]:
    yield from both_of(postgres, shared_folder / "trusted", make_shared_settings)


@pytest.fixture(scope="module")
async def of_file(shared_folder: Path, shared_ledgers: tuple[Ledger, Ledger]) -> AsyncIterator[tuple[Proxied, Path]]:
    """Two ledgers that the tests of this file share, and the file of the token of the one that imports."""
    token = shared_folder / "token"
    token.write_text("first\n")
    (shared_folder / "trusted" / "bundles.pem").write_text(SIGNER.public_key_pem)
    async with proxied(shared_ledgers, shared_folder / "trusted", token_file=token) as pair:
        yield pair, token


@pytest.fixture
async def pair(of_file: tuple[Proxied, Path]) -> AsyncIterator[Proxied]:
    """The ledgers that the tests of this file share, between which nothing is under way."""
    pair, _ = of_file
    yield pair
    pair.proxy.judge, pair.proxy.edit = lambda _: None, unchanged
    await until(lambda: has_lag(pair.us, 0), "nothing is lacking")
    await until(lambda: is_faultless(pair.us), "nothing fails")


@asynccontextmanager
async def seen_checkpoint_at(size: int, tenant_id: str, database: Database) -> AsyncIterator[None]:
    """Have a ledger believe that it saw another tree of a tenant of its peer."""
    put = "UPDATE scheduler.exchange_positions SET note = $2 WHERE tenant_id = $1"
    async with connected_to(database.superuser_url) as superuser:
        note = await superuser.fetchval("SELECT note FROM scheduler.exchange_positions WHERE tenant_id = $1", tenant_id)
        lines = note.split("\n")
        lines[1] = str(size)
        await superuser.execute(put, tenant_id, "\n".join(lines))
        yield
        await superuser.execute(put, tenant_id, note)


async def test_a_node_imports_what_another_did_not_come_to(pair: Proxied, monkeypatch: pytest.MonkeyPatch) -> None:
    us, eu, _, database = pair
    turns_asked: list[str] = []
    take_turn = exchange.take_turn

    async def counted(connection: asyncpg.Connection, peer: str) -> bool:
        turns_asked.append(peer)
        return await take_turn(connection, peer)

    monkeypatch.setattr(exchange, "take_turn", counted)
    peer = (await told(us))["url"]
    async with connected_to(database.superuser_url) as other_node:
        await until(lambda: exchange.take_turn(other_node, peer), "the other node imports")
        heard: set[str] = set()
        pair.proxy.edit = lambda _, news: heard.update(each["tenant_id"] for each in news["items"])
        [job] = await submit_all(eu, "left-over")
        await until(lambda: "left-over" in heard, "it heard of the job")
        turns_asked.clear()
        await until(lambda: len(turns_asked) > 1, "it asked whether it may import")
        assert not await is_known(us, job)
    await until(lambda: is_known(us, job), "it came without another list", timeout_s=LISTED_EVERY_S / 2)


async def test_a_chain_of_version_1_comes_over_range_by_range(pair: Proxied) -> None:
    async def heads(*clients: httpx.AsyncClient) -> list[str | None]:
        answers = [await client.get("/v1/chain/head?tenant_id=old") for client in clients]
        return [answer.json().get("chain_link") for answer in answers]

    old = build(8, tenant_id="old", version_1_until=7, snapshots_to=(8,))  # three ranges
    files = [("file", ("old.tar", bundle_of(old)))]
    answer = await pair.eu.post("/v1/bundles/import", files=files)
    assert answer.status_code == 200, answer.text

    async def has_come_over() -> bool:
        ours, theirs = await heads(pair.us, pair.eu)
        return ours == theirs is not None

    await until(has_come_over, "the whole chain came over")
    items = (await pair.us.get("/v1/chain/entries?tenant_id=old")).json()["items"]
    assert [(each["link_version"], each["chain_link"]) for each in items[:7]] == [
        (1, row["chain_link"]) for row in old.entries[:7]
    ]


async def test_of_a_region_that_is_retired_during_an_import_no_further_range_is_fetched(pair: Proxied) -> None:
    us, eu, proxy, _ = pair
    exports: list[Asked] = []
    is_retired = asyncio.Event()

    async def held_up(asked: Asked) -> None:
        if asked.is_export:
            exports.append(asked)
            await is_retired.wait()

    proxy.judge = held_up
    jobs = await submit_all(eu, *9 * ["left"])  # three ranges
    await until(lambda: exports, "the first range is asked for")
    wanted = {"reason": "it is given up", "force": True}
    (await us.post("/v1/exchange/regions/eu1/retire", json=wanted)).raise_for_status()
    is_retired.set()
    fetched = exports[0].values["to_seq"]
    await until_known(us, jobs[:fetched])
    assert len(exports) == 1
    [key] = (await eu.get("/v1/keys")).json()["keys"]
    (await us.post("/v1/exchange/regions/eu1/admit", json={"key_id": key["key_id"]})).raise_for_status()
    await until_known(us, jobs)


async def test_a_peer_that_went_back_in_one_tenant_is_imported_from_in_none(pair: Proxied) -> None:
    us, eu, _, database = pair
    await until_known(us, await submit_all(eu, *3 * ["back"], *3 * ["not-back"]))
    for size in (2, 9):  # less than it saw, and more than there is
        async with seen_checkpoint_at(size, "back", database):
            await submit(eu, "back")
            await until(lambda: tells(us, "tenant back", "PeerWentBackError"), "it says that the peer went back")
            job = await submit_what_is_not_imported(pair, "not-back")
        await until_known(us, [job])
        await until(lambda: has_lag(us, 0), "nothing is lacking")


async def test_a_peer_that_went_back_is_not_believed_again_as_it_shows_that_tenant_no_more(pair: Proxied) -> None:
    us, eu, proxy, database = pair
    await until_known(us, await submit_all(eu, *3 * ["gone-back"], *3 * ["still-there"]))
    async with seen_checkpoint_at(9, "gone-back", database):
        await submit(eu, "gone-back")
        await until(lambda: tells(us, "tenant gone-back: PeerWentBackError"), "it says that the peer went back")
        proxy.edit = shows_no_note("gone-back")
        job = await submit_what_is_not_imported(pair, "still-there")
        assert await tells(us, "tenant gone-back: PeerWentBackError")
        proxy.edit = tells_not_of("gone-back")
        await until(lambda: tells(us, "tenant gone-back: PeerWentBackError", "no longer lists"), "it is told")
        await submit_what_is_not_imported(pair, "still-there", lag_entries=2)
        proxy.edit = unchanged
    await until_known(us, [job])


async def test_a_tenant_that_is_mended_is_told_no_more_though_another_keeps_the_peer_from_being_imported(
    pair: Proxied,
) -> None:
    us, eu, proxy, database = pair
    await until_known(us, await submit_all(eu, *3 * ["mended"], *3 * ["not-mended"]))
    proxy.edit = shows_no_note("not-mended")
    await submit(eu, "not-mended")
    await until(lambda: tells(us, "tenant not-mended", NO_NOTE), "another fault of it is told")
    async with seen_checkpoint_at(9, "not-mended", database):
        with structlog.testing.capture_logs() as logs:
            async with seen_checkpoint_at(9, "mended", database):
                proxy.edit = unchanged
                await submit(eu, "mended")
                both = ("tenant mended: PeerWentBackError", "tenant not-mended: PeerWentBackError")
                await until(lambda: tells(us, *both), "both are told")

            async def is_mended() -> bool:
                return "tenant mended" not in (await told(us))["fault"]

            await until(is_mended, "the one is told no more")
        assert await tells(us, both[1])
        logged = [line["tenant_id"] for line in logs if line["event"] == "exchange_tenant_interrupted"]
        assert sorted(logged) == ["mended", "not-mended"]
    await until(lambda: is_faultless(us), "nothing fails")


async def test_entries_that_cannot_be_fetched_are_told_as_lag_and_what_a_peer_holds_is_asked_beside_the_import(
    pair: Proxied,
) -> None:
    us, eu, proxy, _ = pair

    def fails_behind_the_first_range(asked: Asked) -> tuple[int, bytes] | None:
        return (500, b"") if asked.is_export and asked.values["from_seq"] > 3 else None

    async def waits_for_news(asked: Asked) -> None:
        if asked.is_export:
            begun.append(asked.values["from_seq"])
            await until_looked_again(proxy)

    begun: list[int] = []
    proxy.judge = export_fails
    jobs = await submit_all(eu, *7 * ["long"], *3 * ["short"])
    await until(lambda: has_lag(us, 10), "the lag is that of all tenants")
    await until(lambda: tells(us, "tenant long", "500"), "nothing comes over")
    metrics = (await us.get("/metrics")).text
    assert f'exchange_lag_entries{{peer="{proxy.url}"}} 10.0' in metrics
    proxy.judge = fails_behind_the_first_range
    await until(lambda: has_lag(us, 4), "the lag is lower by the ranges that were imported")
    proxy.judge = waits_for_news
    await until(lambda: has_lag(us, 0), "nothing is lacking")
    await until_known(us, jobs)
    await until(lambda: is_faultless(us), "and nothing fails")
    assert begun == [4, 7]


async def test_a_tenant_that_fails_keeps_no_other_from_being_imported(pair: Proxied) -> None:
    us, eu, proxy, _ = pair

    def fails(asked: Asked) -> tuple[int, bytes] | None:
        return (500, b"") if asked.is_export and asked.values["tenant_id"] == "failing" else None

    for judge, edit, expected in ((fails, unchanged, "500"), (lambda _: None, shows_no_note("failing"), NO_NOTE)):
        proxy.judge, proxy.edit = judge, edit
        late = await submit(eu, "failing")
        await until(lambda expected=expected: tells(us, "tenant failing", expected), "the fault names the tenant")
        await until_known(us, await submit_all(eu, *4 * ["other"]))
        assert await tells(us, "tenant failing")
        assert not await is_known(us, late)
        proxy.judge, proxy.edit = lambda _: None, unchanged
        await until_known(us, [late])
        await until(lambda: is_faultless(us), "and nothing fails")


async def test_tenants_that_fail_so_slowly_that_a_round_ends_with_them_come_last_in_the_next(
    pair: Proxied, monkeypatch: pytest.MonkeyPatch
) -> None:
    us, eu, proxy, _ = pair
    with monkeypatch.context() as patched:
        patched.setattr("app.share.exchange.following.FAILING_S_MAX", 0.0)
        proxy.edit = shows_no_note("a-slow-one")
        await submit(eu, "a-slow-one")
        await until(lambda: tells(us, "tenant a-slow-one", NO_NOTE), "the first tenant fails")
        await until_known(us, [await submit(eu, "behind")])


async def test_a_tenant_that_failed_is_tried_again_though_another_takes_all_the_time_that_failing_may_take(
    pair: Proxied, monkeypatch: pytest.MonkeyPatch
) -> None:
    us, eu, proxy, _ = pair
    proxy.edit = shows_no_note("a-slow-one", "failed-once")
    await submit_all(eu, "a-slow-one", "failed-once")
    await until(lambda: tells(us, "tenant a-slow-one", "tenant failed-once"), "both fail")
    with monkeypatch.context() as patched:
        patched.setattr("app.share.exchange.following.FAILING_S_MAX", 0.0)
        proxy.edit = shows_no_note("a-slow-one")
        await until_known(us, [await submit(eu, "failed-once")])


async def test_answers_that_are_not_understood_and_lists_without_end_are_told_as_a_fault(
    pair: Proxied, monkeypatch: pytest.MonkeyPatch
) -> None:
    us, eu, proxy, _ = pair
    wrong = [
        (NEWS, b"\xff", "is not understood"),
        (NEWS, listed("../acme"), "is not understood"),
        (NEWS, listed("acme", seq=1000).replace(b"1000", b'"many"'), "is not understood"),
        (NEWS, listed("acme", seq=1000).replace(b"1000", b"9223372036854775808"), "is not understood"),
        (NEWS, listed("acme").replace(b"null", b'"\\ud800"'), "is not understood"),
        (NEWS, listed("acme").replace(b"null", b'"' + 4001 * b"x" + b'"'), "is not understood"),
        (LACKING, b'{"items": [], "consistency": ["0g"]}', "is not understood"),
        (LACKING, b'{"items": [{"from_seq": "first", "to_seq": 1}]}', "is not understood"),
        (LACKING, ranges((1, 2**63)), "is not understood"),
        (LACKING, ranges(*1001 * [(1, 1)]), "is not understood: items"),
        (LACKING, ranges((1, 1)), "not asked for"),  # it came over before
        (LACKING, ranges((1000, 1000)), "not asked for"),
    ]
    await until_known(us, [await submit(eu)])
    for path, body, expected in wrong:
        proxy.judge = lambda asked, path=path, body=body: (200, body) if asked.path == path else None
        job = await submit(eu)
        await until(lambda path=path, expected=expected: tells(us, path, expected), f"{body!r} of {path} is told")
        proxy.judge = lambda _: None
        await until_known(us, [job])
        await until(lambda: is_faultless(us), "it goes on")
    proxy.edit = shows_no_note("acme")
    job = await submit(eu)
    await until(lambda: tells(us, "tenant acme", NO_NOTE), "it is told")
    proxy.edit = unchanged
    await until_known(us, [job])
    with monkeypatch.context() as patched:
        patched.setattr("app.share.exchange.peer.TENANTS_MAX", 3)
        proxy.judge = partial(answered_without_end, proxy)
        await until(lambda: tells(us, "tells of more than 3 tenants"), "it is told")


def answered_without_end(proxy: PeerProxy, asked: Asked) -> tuple[int, bytes] | None:
    """Behind each page of the list there is a next one."""
    if asked.path != NEWS:
        return None
    return 200, listed(f"t{proxy.times_asked(NEWS):09}", has_more=True)


async def test_ranges_that_were_not_asked_for_are_told_as_a_fault(pair: Proxied) -> None:
    us, eu, proxy, _ = pair
    wrong = [((1, 4),), ((3, 2),), ((1, 2), (2, 3)), ((1, 1), (1, 1)), ((3, 3), (1, 1))]
    jobs = []
    for number, found in enumerate(wrong):
        tenant_id, body = f"ranges{number}", ranges(*found)
        proxy.judge = export_fails
        jobs += await submit_all(eu, *3 * [tenant_id])
        await until(lambda tenant_id=tenant_id: tells(us, f"tenant {tenant_id}", "500"), "all are lacking")
        exported = proxy.times_asked("/v1/bundles/export")
        proxy.judge = lambda asked, body=body: (200, body) if asked.path == LACKING else export_fails(asked)
        expected = (
            f"tenant {tenant_id}: NoAnswerError: the answer of {proxy.url}{LACKING} has ranges that were not asked"
        )
        await until(lambda expected=expected: tells(us, expected), f"{found} is told")
        assert proxy.times_asked("/v1/bundles/export") == exported
        proxy.judge = lambda _: None
        await until_known(us, jobs)


def lists_instead(page: bytes, asked: Asked) -> tuple[int, bytes] | None:
    """Each page of the list is this one, and instead of news there is a list."""
    return None if asked.path != NEWS else (200, listed() if "wait_s" in asked.values else page)


async def test_a_page_of_more_than_was_asked_for_or_that_does_not_go_on_is_told_as_a_fault(pair: Proxied) -> None:
    us, _eu, proxy, _ = pair
    many = [f"t{number:04}" for number in range(1001)]
    for body, expected in (
        (listed(*many, has_more=True), f"{NEWS} is not understood: items"),
        (listed("b", "a", has_more=True), f"{NEWS} does not go on in the order of tenants"),
        (listed("a", "a"), f"{NEWS} does not go on in the order of tenants"),
        (listed(*many[:1000], has_more=True), f"{NEWS} does not go on in the order of tenants"),
        (listed(has_more=True), f"{NEWS} does not go on in the order of tenants"),
        (listed("a", has_more=True, is_list=False), f"{NEWS} does not go on in the order of tenants"),
    ):
        proxy.judge = partial(lists_instead, body)
        await until(lambda expected=expected: tells(us, expected), f"{expected} is told")
        proxy.judge = lambda _: None
        await until(lambda: is_faultless(us), "it goes on")


async def test_of_the_fault_of_a_tenant_only_the_words_are_kept_and_not_many(
    pair: Proxied, monkeypatch: pytest.MonkeyPatch
) -> None:
    us, eu, proxy, _ = pair

    def errors_kept() -> int:
        gc.collect()
        return sum(type(each) is NoAnswerError for each in gc.get_objects())

    async def is_told(fault: str) -> bool:
        return bool((await told(us))["fault"] == fault)

    await until_known(us, [await submit(eu, "failing-for-long")])
    proxy.judge = lambda asked: (500, b"") if asked.path == LACKING else None
    await submit(eu, "failing-for-long")
    await until(lambda: tells(us, "tenant failing-for-long: NoAnswerError"), "it is told")
    await until(lambda: not errors_kept(), "the error is gone")
    with monkeypatch.context() as patched:
        patched.setattr("app.share.exchange.following.FAULT_CHARACTERS_MAX", 10)
        proxy.judge = lambda asked: (501, b"") if asked.path == LACKING else None
        await until(lambda: is_told("tenant failing-for-long: NoAnswerEr"), "no more than the first characters are")


async def test_an_answer_that_does_not_come_to_its_end_is_told_as_a_fault(
    ledgers: tuple[Ledger, Ledger], tmp_path: Path, pair: Proxied, monkeypatch: pytest.MonkeyPatch
) -> None:
    async def begin(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await reader.readuntil(b"\r\n\r\n")
        writer.write(b"HTTP/1.1 200 OK\r\nContent-Length: 1000\r\n\r\n ")
        await reader.read()
        writer.close()

    here, there = ledgers
    with monkeypatch.context() as patched:
        patched.setattr("app.share.exchange.peer_client.BUNDLE_S_MAX", -1.0)
        await submit(pair.eu)
        await until(lambda: tells(pair.us, f"{pair.proxy.url}/v1/bundles/export has not sent all within"), "it is told")
    monkeypatch.setattr("app.share.exchange.peer_client.ANSWER_S_MAX", 0.3)
    async with await asyncio.start_server(begin, "127.0.0.1", 0) as server:
        url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        async with here.running(**here.peers(there, tmp_path / "trusted", {"url": url})) as us:
            await until(lambda: tells(us, f"{NEWS} has not answered all within"), "it is told")


async def test_a_token_that_was_replaced_is_used_in_the_next_round(of_file: tuple[Proxied, Path]) -> None:
    (us, _eu, proxy, _), file = of_file
    await until(lambda: is_faultless(us), "it is heard")
    for token in ("first", "", "second"):
        file.write_text(token)
        sent = f"Bearer {token}" if token else None
        await until(lambda sent=sent: proxy.asked and proxy.asked[-1].headers.get("authorization") == sent, "it is")


async def test_what_is_no_token_is_told_and_a_right_one_used_once_it_is_there(
    of_file: tuple[Proxied, Path],
) -> None:
    (us, _eu, proxy, _), file = of_file
    for number, content in enumerate((b"\xff\xfe\xe9abc", b"two\nlines")):
        file.write_bytes(content)
        await until(lambda: tells(us, "ConfigurationError", f"{file} holds no token"), "it is told")
        assert "lines" not in (await told(us))["fault"]
        file.write_text(f"right{number}")
        sent = f"Bearer right{number}"
        await until(
            lambda sent=sent: proxy.asked and proxy.asked[-1].headers.get("authorization") == sent, "it is sent"
        )
        await until(lambda: is_faultless(us), "nothing fails")
