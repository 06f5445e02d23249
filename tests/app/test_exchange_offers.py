"""News that carry what a ledger lacks: one request a round, verified like what is fetched, and asked for where it is
not offered or does not hold."""

from __future__ import annotations

import base64
from collections.abc import AsyncIterator, Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from app.dev.embedded import EmbeddedPostgres
from app.share.exchange import news
from ledger.errors import InvalidInputError
from tests.app.chains import until
from tests.app.conftest import MakeSettings
from tests.app.exchanging import Ledger, both_of, has_lag, is_faultless, submit, tells, until_known
from tests.app.peer_proxy import Asked, unchanged
from tests.app.test_exchange import LACKING, NEWS, Proxied, proxied
from tests.conftest import connected_to

EXPORT = "/v1/bundles/export"
HIDDEN = "hidden"


@pytest.fixture(scope="module")
def trusted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("offers") / "trusted"


@pytest.fixture(scope="module")
def shared_ledgers(
    postgres: EmbeddedPostgres, trusted: Path, make_shared_settings: MakeSettings
) -> Iterator[tuple[Ledger, Ledger]]:
    yield from both_of(postgres, trusted, make_shared_settings)


@pytest.fixture(scope="module")
async def of_file(shared_ledgers: tuple[Ledger, Ledger], trusted: Path) -> AsyncIterator[Proxied]:
    async with proxied(shared_ledgers, trusted) as pair:
        pair.proxy.has_offers = True
        yield pair


@pytest.fixture
async def pair(of_file: Proxied) -> AsyncIterator[Proxied]:
    """Two ledgers that the tests of this file share, and nothing is under way before and after a test."""
    yield of_file
    of_file.proxy.judge, of_file.proxy.edit = lambda _: None, unchanged
    await until(lambda: is_faultless(of_file.us), "nothing fails")
    await until(lambda: has_lag(of_file.us, 0), "nothing is lacking")


def requests(pair: Proxied) -> tuple[int, int]:
    """How often the peer was asked what is lacking, and for a bundle."""
    return pair.proxy.times_asked(LACKING), pair.proxy.times_asked(EXPORT)


async def until_waiting(pair: Proxied, tenant_id: str) -> None:
    """Wait until the ledger has asked for news and said how far it is in the tenant's chain."""
    begun = len(pair.proxy.asked)

    def is_said() -> bool:
        return any(
            each.path == NEWS and each.values.get("at", "").endswith(f" {tenant_id}")
            for each in pair.proxy.asked[begun:]
        )

    await until(is_said, "it waits for news of the tenant")


async def begin(pair: Proxied, tenant_id: str) -> None:
    """Import an entry of a tenant, after which the peer offers the next."""
    await until_known(pair.us, [await submit(pair.eu, tenant_id)])
    await until_waiting(pair, tenant_id)


async def change_offers(
    pair: Proxied, tenant_id: str, change: Callable[[dict[str, Any]], dict[str, Any]]
) -> list[dict[str, Any]]:
    """Have the peer offer something else of the tenant, from now on; returns what it offers."""
    offered: list[dict[str, Any]] = []

    def edit(_: Asked, answer: dict[str, Any]) -> None:
        for each in answer["items"]:
            if each["tenant_id"] == tenant_id and each["offer"]:
                offered.append(each["offer"])
                each["offer"] |= change(each["offer"])

    pair.proxy.edit = edit
    begun = len(pair.proxy.asked)
    lists = "all are listed again"
    await until(
        lambda: any(each.path == NEWS and "wait_s" not in each.values for each in pair.proxy.asked[begun:]), lists
    )
    await until_waiting(pair, tenant_id)
    return offered


def is_asked_in_vain(asked: Asked) -> tuple[int, bytes] | None:
    return (500, b"") if asked.path in (LACKING, EXPORT) else None


async def test_what_is_lacking_comes_with_the_news_and_nothing_is_asked_for(pair: Proxied) -> None:
    await begin(pair, "offered")
    before = requests(pair)
    for _ in range(3):
        await until_known(pair.us, [await submit(pair.eu, "offered")])
        await until(lambda: has_lag(pair.us, 0), "nothing is lacking")
    assert requests(pair) == before
    for client in (pair.us, pair.eu):
        verdict = (await client.get("/v1/chain/verify?tenant_id=offered")).json()
        assert (verdict["valid"], verdict["entries_checked"]) == (True, 4)


async def test_a_checkpoint_over_nothing_new_is_proved_without_a_request(pair: Proxied) -> None:
    await begin(pair, "echoed")
    # As if the peer's new entry were one that it had from here.
    await submit(pair.us, "echoed", "REGIONAL")
    offered = await change_offers(pair, "echoed", lambda offer: {"from_seq": offer["from_seq"] + 1, "bundle": ""})
    before = requests(pair)
    await submit(pair.eu, "echoed")
    await until(lambda: offered, "it was offered")
    await until(lambda: has_lag(pair.us, 0), "nothing is lacking, by the peer's word")
    assert requests(pair) == before


@pytest.mark.parametrize(
    ("name", "change", "words"),
    [
        ("no bundle", lambda offer: {"bundle": _text(b"\0" * 2048)}, "no bundle"),
        ("half a bundle", lambda offer: {"bundle": _text(_bytes(offer)[:3000])}, "cut short"),
        ("a changed bundle", lambda offer: {"bundle": _text(_changed(_bytes(offer)))}, "bundle"),
        ("no proof", lambda offer: {"consistency": []}, "nothing proves that its tree of"),
        ("another proof", lambda offer: {"consistency": ["0" * 64]}, "nothing proves that its tree of"),
        ("nothing lacking", lambda offer: {"from_seq": offer["from_seq"] + 1, "bundle": ""}, "is lacking, and"),
    ],
)
async def test_an_offer_that_does_not_hold_is_named_and_the_entries_are_then_asked_for(
    pair: Proxied, name: str, change: Callable[[dict[str, Any]], dict[str, Any]], words: str
) -> None:
    tenant_id = name.replace(" ", "-")
    await begin(pair, tenant_id)
    await change_offers(pair, tenant_id, change)
    exported = pair.proxy.times_asked(EXPORT)
    pair.proxy.judge = is_asked_in_vain
    job = await submit(pair.eu, tenant_id)
    await until(lambda: tells(pair.us, f"tenant {tenant_id}", words), f"{words} is told")
    assert (await pair.us.get(f"/v1/jobs/{job['job_id']}?tenant_id={tenant_id}")).status_code == 404
    pair.proxy.judge = lambda _: None
    await until_known(pair.us, [job])
    assert pair.proxy.times_asked(EXPORT) > exported


async def test_the_bundle_of_another_tenant_or_range_is_not_imported_in_place_of_the_one_that_is_next(
    pair: Proxied,
) -> None:
    await begin(pair, "public")
    await begin(pair, HIDDEN)
    files = {}
    for asked in ({"tenant_id": HIDDEN}, {"tenant_id": "public", "from_seq": 1, "to_seq": 1}):
        answer = await pair.eu.post(EXPORT, json=asked)
        assert answer.status_code == 200, answer.text
        files[asked["tenant_id"]] = answer.content
    for tenant_id, content in files.items():
        await begin(pair, "public")
        await change_offers(pair, "public", lambda _, content=content: {"bundle": _text(content)})  # type: ignore[misc]
        pair.proxy.judge = is_asked_in_vain
        job = await submit(pair.eu, "public")
        await until(lambda: tells(pair.us, "tenant public", "were asked for, and the bundle is of"), f"{tenant_id}")
        pair.proxy.edit, pair.proxy.judge = unchanged, lambda _: None
        await until_known(pair.us, [job])
        await until(lambda: is_faultless(pair.us), "nothing fails")


@pytest.mark.parametrize(
    "change",
    [
        {"imported_seq": 0},
        {"imported_seq": 3},
        {"size": 1},
        {"from_seq": 1},
        {"from_seq": 9},
        {"bundle": ""},
    ],
    ids=str,
)
async def test_what_is_offered_to_a_ledger_that_is_elsewhere_is_not_used(pair: Proxied, change: dict[str, Any]) -> None:
    tenant_id = "elsewhere"
    for _ in range(2):
        await begin(pair, tenant_id)
    offered = await change_offers(pair, tenant_id, lambda _: change)
    before = requests(pair)
    await until_known(pair.us, [await submit(pair.eu, tenant_id)])
    assert offered
    assert requests(pair) == (before[0] + 1, before[1] + 1)
    assert await is_faultless(pair.us)


async def test_more_than_a_few_entries_are_not_offered_and_asked_for(
    pair: Proxied, monkeypatch: pytest.MonkeyPatch
) -> None:
    await begin(pair, "long")
    for name, bound in (("OFFERED_ENTRIES_MAX", 0), ("OFFERED_BYTES_MAX", 1), ("AT_ONCE_MAX", 0), ("OFFERS_S_MAX", 0)):
        with monkeypatch.context() as patched:
            patched.setattr(news, name, bound)
            before = requests(pair)
            await until_known(pair.us, [await submit(pair.eu, "long")])
            assert requests(pair) == (before[0] + 1, before[1] + 1), name
        await begin(pair, "long")


async def test_an_offer_names_what_follows_a_position_and_nothing_where_none_follows(pair: Proxied) -> None:
    await begin(pair, "asked")
    await begin(pair, "asked")

    async def offer(at: str, *have: str) -> Any:
        values = {"origin": "asks.example", "at": at, "have": list(have)}
        [item] = [
            each for each in (await pair.eu.get(NEWS, params=values)).json()["items"] if each["tenant_id"] == "asked"
        ]
        return item["offer"]

    first = await offer("1 1 asked")
    assert (first["imported_seq"], first["size"], first["from_seq"]) == (1, 1, 2)
    assert (len(first["consistency"]), bool(first["bundle"])) == (1, True)
    nothing_seen = await offer("0 0 asked")
    assert (nothing_seen["consistency"], nothing_seen["from_seq"]) == ([], 1)
    log = (await pair.eu.get("/v1/log/asked/checkpoint")).text.split("\n")[0]
    assert (await offer("1 1 asked", f"2 {log}"))["from_seq"] == 2, "what is not imported there has no origin"
    for at in ("2 2 asked", "1 9 asked", "9 9 asked"):
        assert await offer(at) is None, at


@pytest.fixture
def ledgers(postgres: EmbeddedPostgres, tmp_path: Path, make_settings: MakeSettings) -> Iterator[tuple[Ledger, Ledger]]:
    yield from both_of(postgres, tmp_path / "trusted", make_settings)


async def test_an_offer_is_recorded_as_a_read_of_its_entries_and_that_record_is_read_unrecorded(
    ledgers: tuple[Ledger, Ledger],
) -> None:
    there, _ = ledgers
    async with there.running(privacy={"log_reads": ["acme"]}) as eu:
        await submit(eu)

        async def is_offered(at: str = "0 0 acme") -> bool:
            items = (await eu.get(NEWS, params={"origin": "asks.example", "at": at})).json()["items"]
            return any(each["tenant_id"] == "acme" and each["offer"] and each["offer"]["bundle"] for each in items)

        await until(is_offered, "its checkpoint is signed")
        await until(lambda: is_offered("1 1 acme"), "the checkpoint over the record is signed")
        assert await is_offered("1 1 acme")
        async with connected_to(there.database.superuser_url) as superuser:
            (payload,) = await superuser.fetchrow(
                "SELECT string_agg(payload::text, '') FROM scheduler.scheduler_log"
                " WHERE tenant_id = 'acme' AND action = 'PAYLOADS_READ'"
            )
            assert await superuser.fetchval("SELECT head_seq FROM scheduler.chain_heads WHERE tenant_id = 'acme'") == 2
    assert f'"route":"GET {NEWS}"' in payload
    assert '"from_seq":1,"' in payload


@pytest.mark.parametrize("text", ["", "1 acme", "1 1 ../acme", "-1 1 acme", "1 1 acme ", "9" * 19 + " 1 acme"])
def test_a_position_is_a_seq_a_size_and_a_tenant(text: str) -> None:
    with pytest.raises(InvalidInputError) as caught:
        news.read_positions([text])
    assert caught.value.path == ("at",)
    assert news.read_positions(["1 2 acme"]) == {"acme": news.Position(1, 2)}


def _bytes(offer: dict[str, Any]) -> bytes:
    return base64.b64decode(offer["bundle"])


def _text(data: bytes) -> str:
    return base64.b64encode(data).decode()


def _changed(data: bytes) -> bytes:
    """One byte of the entries is another."""
    return data[:600] + bytes([data[600] ^ 1]) + data[601:]
