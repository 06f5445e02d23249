"""A peer that lies, goes back, forks, sends without end or slowly: it stops itself alone, is named and costs little."""

from __future__ import annotations

import asyncio
import gzip
import json
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.dev.embedded import EmbeddedPostgres
from app.share.exchange import following
from app.share.exchange import peer as exchange_peer
from app.store import exchange
from signing.checkpoint import Checkpoint, open_checkpoint, read, sign_checkpoint
from signing.keys import Keyring
from signing.private_keys import load
from tests.app.chains import until
from tests.app.conftest import MakeSettings
from tests.app.peer_proxy import Asked, proxy_to_peer, unchanged
from tests.app.test_exchange import (
    LACKING,
    NEWS,
    Ledger,
    Proxied,
    both_of,
    forget,
    has_lag,
    is_faultless,
    is_known,
    listed,
    proxied,
    ranges,
    submit,
    submit_all,
    submit_what_is_not_imported,
    tells,
    told,
    until_known,
)
from tests.conftest import connected_to

EXPORT = "/v1/bundles/export"
MIB = 1 << 20
HUGE = 2**62
BOMB = gzip.compress(bytes(16 * MIB))


@pytest.fixture(scope="module")
def trusted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("hostile") / "trusted"


@pytest.fixture(scope="module")
def shared_ledgers(
    postgres: EmbeddedPostgres, trusted: Path, make_shared_settings: MakeSettings
) -> Iterator[tuple[Ledger, Ledger]]:
    yield from both_of(postgres, trusted, make_shared_settings)


@pytest.fixture(scope="module")
async def of_file(shared_ledgers: tuple[Ledger, Ledger], trusted: Path) -> AsyncIterator[tuple[Proxied, Ledger]]:
    """Two ledgers that the tests of this file share, and the one that a hostile server stands before."""
    async with proxied(shared_ledgers, trusted) as pair:
        yield pair, shared_ledgers[1]


@pytest.fixture
async def pair(of_file: tuple[Proxied, Ledger]) -> AsyncIterator[Proxied]:
    """The ledgers, between which nothing is under way, before and after."""
    pair, _ = of_file
    yield pair
    pair.proxy.judge, pair.proxy.edit = lambda _: None, unchanged
    await until(lambda: is_faultless(pair.us), "nothing fails")
    await until(lambda: has_lag(pair.us, 0), "nothing is lacking")


def head(*lines: str, status: str = "200 OK") -> bytes:
    return "\r\n".join([f"HTTP/1.1 {status}", "Connection: close", *lines, "", ""]).encode()


def body(data: bytes, *lines: str, status: str = "200 OK") -> AsyncIterator[bytes]:
    """An answer of this body, whatever it is."""
    return sent(head(f"Content-Length: {len(data)}", *lines, status=status), data)


async def sent(*pieces: bytes) -> AsyncIterator[bytes]:
    for piece in pieces:
        yield piece


async def endless(piece: bytes, pause_s: float = 0.0) -> AsyncIterator[bytes]:
    yield head()
    while True:
        yield piece
        await asyncio.sleep(pause_s)


ANSWERS: dict[str, tuple[Callable[[], AsyncIterator[bytes]], str]] = {
    "endless": (lambda: endless(65536 * b" "), "more than 1048576 bytes|no bundle"),
    "drip": (lambda: endless(b" ", 0.05), "has not answered all|has not sent all"),
    "redirect": (lambda: body(b"", "Location: http://127.0.0.1:1/", status="302 Found"), "answers 302"),
    "bomb": (lambda: body(BOMB, "Content-Encoding: gzip"), "not understood|no bundle"),
    "deep": (lambda: body(b'{"items":' + 100_000 * b"["), "not understood|no bundle"),
    "numbers": (lambda: body(b'{"items": [' + 100_000 * b"9" + b'], "hashes": [1e999]}'), "not understood|no bundle"),
}
"""By name, an answer and what is said of it: to a request for JSON, or for a bundle."""


async def says(client: Any, place: str, words: str) -> bool:
    """Whether one of these words is said about this place."""
    fault = "; " + ((await told(client))["fault"] or "")
    return any(word in part for part in fault.split("; tenant ") for word in words.split("|") if place in part)


async def is_named(client: Any, url: str) -> bool:
    """Whether the peer is named in readiness and metrics."""
    check = (await client.get("/readyz")).json()["checks"]["exchange"]
    metrics = (await client.get("/metrics")).text
    return not check["ok"] and url in check["detail"] and f'exchange_failing{{peer="{url}"}} 1.0' in metrics


async def test_no_answer_about_a_tenant_keeps_another_tenant_back_and_each_is_named(
    pair: Proxied, monkeypatch: pytest.MonkeyPatch
) -> None:
    us, eu, proxy, _ = pair
    monkeypatch.setattr("app.share.exchange.peer_client.ANSWER_S_MAX", 0.5)
    monkeypatch.setattr("app.share.exchange.peer_client.BUNDLE_S_MAX", 0.5)
    monkeypatch.setattr(following, "FAULTS_NAMED_MAX", 100)
    monkeypatch.setattr(following, "PAUSE_MAX_S", 0.5)
    await until_known(us, await submit_all(eu, *ANSWERS))

    def judge(asked: Asked, path: str) -> AsyncIterator[bytes] | None:
        tenant_id = asked.values.get("tenant_id", "")
        return ANSWERS[tenant_id][0]() if asked.path == path and tenant_id in ANSWERS else None

    for path in (LACKING, EXPORT):
        proxy.judge = lambda asked, path=path: judge(asked, path)
        late = await submit_all(eu, *ANSWERS)
        await until_known(us, [await submit(eu, "honest")])
        for name, (_, words) in ANSWERS.items():
            await until(lambda name=name, words=words: says(us, f"{name}: ", words), f"{name} at {path} is told")
        assert await is_named(us, proxy.url)
        assert not [job for job in late if await is_known(us, job)]
        proxy.judge = lambda _: None
        await until_known(us, late)


async def test_no_answer_instead_of_news_keeps_the_peer_from_being_heard_again(
    pair: Proxied, monkeypatch: pytest.MonkeyPatch
) -> None:
    us, eu, proxy, _ = pair
    monkeypatch.setattr("app.share.exchange.peer_client.ANSWER_S_MAX", 0.5)
    for name, (answer, words) in ANSWERS.items():
        proxy.judge = lambda asked, answer=answer: answer() if asked.path == NEWS else None
        await until(lambda words=words: says(us, NEWS, words), f"{name} is told")
        assert await is_named(us, proxy.url)
        proxy.judge = lambda _: None
        await until(lambda: is_faultless(us), "it is heard again")
    await until_known(us, [await submit(eu, "honest")])


def shows(tenant_id: str, change: Callable[[Checkpoint], Checkpoint], ledger: Ledger, above: int = 0) -> Any:
    """An edit by which the peer shows another checkpoint of a tenant, signed with its key, in place of each that is
    larger than ``above``."""
    signer = load(f"file:{ledger.key_file}")

    def edit(_: Asked, answer: dict[str, Any]) -> None:
        for each in answer["items"]:
            if each["tenant_id"] != tenant_id or not each["checkpoint"]:
                continue
            if (shown := read(each["checkpoint"])).size > above:
                each["checkpoint"] = sign_checkpoint(change(shown), signer)

    return edit


async def test_a_signed_checkpoint_that_is_not_the_next_of_its_log_is_named(
    pair: Proxied, of_file: tuple[Proxied, Ledger]
) -> None:
    (us, eu, proxy, _), (_, there) = pair, of_file
    await until_known(us, await submit_all(eu, *3 * ["signed"]))
    other = bytes(32)
    for imported, (change, words) in enumerate(
        (
            (lambda shown: shown._replace(root=other), "nothing proves that its tree of"),
            (lambda shown: shown._replace(size=2), "entries under another root, and now has 2"),
            (lambda shown: shown._replace(size=HUGE), "lacking answers 422"),
            (lambda shown: shown._replace(origin=shown.origin.replace("signed", "other")), "shows a checkpoint of"),
            (lambda shown: shown._replace(origin="elsewhere/signed"), "is in the log elsewhere/signed"),
        ),
        start=3,
    ):
        # Another root of a size that was seen would be a fork.
        proxy.edit = shows("signed", change, there, above=imported)
        job = await submit(eu, "signed")
        await until(lambda words=words: tells(us, "tenant signed", words), f"{words} is told")
        proxy.edit = unchanged
        await until_known(us, [job])
        await until(lambda: is_faultless(us), "it goes on")


async def test_a_fork_stays_named_whatever_the_peer_shows_then_until_an_operator_removes_what_was_seen(
    pair: Proxied, of_file: tuple[Proxied, Ledger]
) -> None:
    (us, eu, proxy, database), (_, there) = pair, of_file
    await until_known(us, await submit_all(eu, *3 * ["forked"]))
    fork = ("tenant forked: PeerForkedError", "two signed trees of 3 entries")
    proxy.edit = shows("forked", lambda shown: shown._replace(root=bytes(32), size=3), there)
    job = await submit(eu, "forked")
    await until(lambda: tells(us, *fork), "it is told")
    proxy.edit = unchanged
    await submit_what_is_not_imported(pair, "honest")
    assert await tells(us, *fork)
    await forget(eu, "forked", database, "forked")
    await until_known(us, [job])


@pytest.fixture
def ledgers(postgres: EmbeddedPostgres, tmp_path: Path, make_settings: MakeSettings) -> Iterator[tuple[Ledger, Ledger]]:
    yield from both_of(postgres, tmp_path / "trusted", make_settings)


async def test_a_fork_is_named_again_by_a_node_that_was_restarted_though_the_peer_shows_the_first_tree(
    ledgers: tuple[Ledger, Ledger], tmp_path: Path
) -> None:
    here, there = ledgers
    fork = ("tenant forked: PeerForkedError", "two signed trees of 3 entries", bytes(32).hex())
    async with proxy_to_peer(there.url) as proxy, there.running() as eu:
        settings = here.peers(there, tmp_path / "trusted", {"url": proxy.url})
        async with here.running(**settings) as us:
            await until_known(us, await submit_all(eu, *3 * ["forked"]))
            proxy.edit = shows("forked", lambda shown: shown._replace(root=bytes(32), size=3), there)
            job = await submit(eu, "forked")
            await until(lambda: tells(us, *fork), "it is told")
            proxy.edit = unchanged
        async with here.running(**settings) as us:
            await until(lambda: tells(us, *fork), "it is told again")
            assert not await is_known(us, job)
            await forget(eu, "forked", here.database, "forked")
            await until_known(us, [job])
            await until(lambda: is_faultless(us), "nothing fails")


async def test_a_recorded_fork_stays_beside_the_checkpoint_seen_first_until_its_row_is_removed(
    of_file: tuple[Proxied, Ledger],
) -> None:
    (_, _, _, database), _ = of_file
    origin, tenant = "forked.example/recorded", "recorded"
    async with connected_to(database.service_url) as connection:
        await exchange.saw(connection, tenant, origin, "seen\n", 3)
        await exchange.imported(connection, tenant, origin, 2)
        for note in ("forged\n", "forged later\n"):
            await exchange.saw_fork(connection, tenant, origin, note)
        # Another node, which had not heard of the fork, proved a later checkpoint.
        await exchange.saw(connection, tenant, origin, "later\n", 4)
        assert await exchange.positions(connection, tenant) == {origin: exchange.Seen("seen\n", 2, "forged\n")}
    async with connected_to(database.owner_url) as owner:
        await owner.execute("DELETE FROM scheduler.exchange_positions WHERE log_origin = $1", origin)
        await exchange.saw(owner, tenant, origin, "later\n", 4)
        assert await exchange.positions(owner, tenant) == {origin: exchange.Seen("later\n", 0, None)}
        await owner.execute("DELETE FROM scheduler.exchange_positions WHERE log_origin = $1", origin)


async def test_a_tree_of_any_size_of_which_nothing_is_said_to_be_lacking_is_asked_about_once(
    pair: Proxied, of_file: tuple[Proxied, Ledger]
) -> None:
    (us, eu, proxy, database), (_, there) = pair, of_file
    await until_known(us, [await submit(eu, "honest")])
    signer = load(f"file:{there.key_file}")
    origin = (await eu.get("/v1/log/honest/checkpoint")).text.split("\n")[0].removesuffix("/honest")
    note = sign_checkpoint(Checkpoint(f"{origin}/nowhere", HUGE, bytes(32)), signer)

    def edit(_: Asked, answer: dict[str, Any]) -> None:
        answer["items"] = sorted(
            [*answer["items"], {"tenant_id": "nowhere", "checkpoint": note, "held": 0}],
            key=lambda item: item["tenant_id"],
        )

    proxy.judge = lambda asked: (
        (200, ranges()) if asked.path == LACKING and asked.values["tenant_id"] == "nowhere" else None
    )
    proxy.edit = edit
    await until(lambda: tells(us, "tenant nowhere", "says that no entry up to 3 of", "has 0 entries"), "it is told")
    await until_known(us, [await submit(eu, "honest")])
    asked = [each for each in proxy.asked if each.path == LACKING and each.values.get("tenant_id") == "nowhere"]
    assert {each.values["to_seq"] for each in asked} == {"3"}
    proxy.judge, proxy.edit = lambda _: None, unchanged
    await until(lambda: tells(us, "tenant nowhere: PeerWentBackError", "no longer lists"), "it was shown once")
    await forget(eu, "honest", database, "nowhere")


async def test_more_than_this_ledger_has_does_not_count_as_held_and_is_named(
    pair: Proxied,
) -> None:
    us, eu, proxy, _ = pair
    await until_known(us, [await submit(eu, "honest")])

    def edit(_: Asked, answer: dict[str, Any]) -> None:
        for each in answer["items"]:
            each["held"] = 1000 if each["tenant_id"] == "honest" else each["held"]

    proxy.edit = edit
    await until(lambda: tells(us, "tenant honest: it says that it has 1000 entries of this ledger, which has"), "so")


async def test_news_without_end_are_asked_for_the_more_slowly_the_more_there_is(pair: Proxied) -> None:
    us, _eu, proxy, _ = pair
    loop = asyncio.get_running_loop()
    many = [f"t{number:03}" for number in range(200)]
    page = listed(*many, is_list=False)
    proxy.judge = lambda asked: (200, page) if asked.path == NEWS and "wait_s" in asked.values else None
    await until(lambda: proxy.asked[-1].path == NEWS and "wait_s" in proxy.asked[-1].values, "it asks")
    times, began_s = proxy.times_asked(NEWS), loop.time()
    await until(lambda: proxy.times_asked(NEWS) >= times + 10, "it asks again and again")
    assert loop.time() - began_s >= 9 * 200 * exchange_peer.NEWS_TENANT_S
    assert await is_faultless(us)


async def test_news_that_bring_nothing_are_asked_for_no_sooner_though_the_peer_answers_at_once(pair: Proxied) -> None:
    us, eu, proxy, _ = pair
    await until_known(us, [await submit(eu, "honest")])
    loop = asyncio.get_running_loop()
    answers = 0

    def judge(asked: Asked) -> tuple[int, bytes] | None:
        nonlocal answers
        if asked.path != NEWS or "wait_s" not in asked.values:
            return None
        answers += 1
        return 200, listed("honest", is_list=False, seq=answers % 2)

    proxy.judge = judge
    await until(lambda: answers > 2, "it asks")
    first, began_s = answers, loop.time()
    await until(lambda: answers >= first + 10, "it asks again and again")
    assert loop.time() - began_s >= 9 * exchange_peer.NEWS_EVERY_S


async def test_a_tenant_that_fails_is_looked_at_no_more_often_because_there_is_news_of_it(
    pair: Proxied, monkeypatch: pytest.MonkeyPatch
) -> None:
    us, eu, proxy, _ = pair
    looked: list[float] = []
    loop = asyncio.get_running_loop()

    def opened(note: bytes, keyring: Keyring) -> Checkpoint:
        if note.startswith(b"no note"):
            looked.append(loop.time())
        return open_checkpoint(note, keyring)

    monkeypatch.setattr(following, "open_checkpoint", opened)
    number = 0

    async def judge(asked: Asked) -> tuple[int, bytes] | None:
        nonlocal number
        if asked.path != NEWS or "wait_s" not in asked.values:
            return None
        number += 1
        item = {"tenant_id": "noisy", "checkpoint": f"no note {number}", "held": 0}
        return 200, json.dumps({"items": [item], "cursor": "on", "is_list": False, "has_more": False}).encode()

    proxy.judge = judge
    await until(lambda: len(looked) > 5, "it is looked at")
    assert number > 20, "there was news in between"
    assert looked[5] - looked[0] > 5 * 0.19
    proxy.judge = lambda _: None
    await until(lambda: is_faultless(us), "it is forgotten with the next list")
    await until_known(us, [await submit(eu, "honest")])


async def test_the_checkpoints_of_a_peer_are_kept_up_to_a_bound(pair: Proxied, monkeypatch: pytest.MonkeyPatch) -> None:
    us, eu, proxy, _ = pair

    def judge(asked: Asked) -> tuple[int, bytes] | None:
        if asked.path != NEWS or "wait_s" in asked.values:
            return None
        first = int(asked.values.get("cursor") or "0")
        items = [{"tenant_id": f"z{first + n:08}", "checkpoint": "é" + 3000 * "x", "held": 0} for n in range(100)]
        page = {"items": items, "cursor": f"{first + 100}", "is_list": True, "has_more": True}
        return 200, json.dumps(page).encode()

    monkeypatch.setattr(following, "NOTES_BYTES_MAX", MIB)
    proxy.judge = judge
    await until(lambda: tells(us, "tells of checkpoints of more than 1 MiB"), "it is told")
    proxy.judge = lambda _: None
    await until_known(us, [await submit(eu, "honest")])
