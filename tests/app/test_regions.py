"""Regions that come and go: new ledgers that wait for each other's keys, a region that is retired and returns, and one
whose facts do not count."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest

from app.dev.embedded import EmbeddedPostgres
from app.runtime.settings.sections import ExchangeSettings, PeerSettings
from app.share.exchange import Regions
from app.share.exchange.peer_client import Asker
from ledger.errors import DurabilityTimeoutError
from signing.keys import Keyring
from signing.private_keys import FileSigner, load
from tests.app.admitting import start_recorded
from tests.app.chains import until
from tests.app.conftest import MakeSettings
from tests.app.exchanging import Ledger, is_faultless, is_known, submit, tells, told, until_known
from tests.conftest import fresh_database
from tests.tally import run_tally


@pytest.fixture
def three(postgres: EmbeddedPostgres, make_settings: MakeSettings) -> Iterator[list[Ledger]]:
    """Ledgers of three regions that have not started and have no keys."""
    with (
        fresh_database(postgres) as one,
        fresh_database(postgres) as two,
        fresh_database(postgres) as three,
    ):
        yield [
            Ledger(region, database, make_settings)
            for region, database in (("use1", one), ("eu1", two), ("ap1", three))
        ]


def settings_of(one: Ledger, others: list[Ledger], trusted: Path, timeout: str = "5s") -> dict[str, Any]:
    """Final settings of a ledger that exchanges with others; ``timeout`` is how long a write waits for them."""
    given = one.peers(others[0], trusted, is_global=True)
    given["exchange"]["peers"] = [{"url": each.url, "region": each.region} for each in others]
    return {**given, "write": {"timeout": timeout}}


async def answered(client: httpx.AsyncClient, tenant_id: str = "acme") -> httpx.Response:
    body = {"tenant_id": tenant_id, "spec": {}, "assigned_dcs": ["x"], "durability": "GLOBAL"}
    return await client.post("/v1/jobs", json=body)


async def answered_with(client: httpx.AsyncClient, words: str) -> dict[str, Any] | None:
    """The problem of a GLOBAL write that is not reached, if it says this."""
    answer = await answered(client)
    assert problem(answer) == (503, "durability-timeout")
    told: dict[str, Any] = answer.json()
    return told if words in told["detail"] else None


async def is_global(client: httpx.AsyncClient) -> bool:
    return (await answered(client)).status_code == 201


async def peers_of(client: httpx.AsyncClient) -> dict[str, dict[str, Any]]:
    return {each["region"]: each for each in (await client.get("/v1/exchange")).json()["peers"]}


async def fails(client: httpx.AsyncClient, region: str) -> bool:
    return (await peers_of(client))[region]["fault"] is not None


async def retire(client: httpx.AsyncClient, region: str, **body: object) -> httpx.Response:
    return await client.post(f"/v1/exchange/regions/{region}/retire", json=body)


async def admit(client: httpx.AsyncClient, region: str, key_id: str) -> httpx.Response:
    return await client.post(f"/v1/exchange/regions/{region}/admit", json={"key_id": key_id})


async def revoke(client: httpx.AsyncClient, region: str, key_id: str) -> httpx.Response:
    return await client.post(f"/v1/exchange/regions/{region}/revoke", json={"key_id": key_id, "reason": "stolen"})


async def take_nothing(*_: object) -> int:
    raise AssertionError("no peer is asked")


async def takes_bundle_of(client: httpx.AsyncClient, bundle: bytes) -> httpx.Response:
    return await client.post("/v1/bundles/import", files={"file": ("other.bundle.tar", bundle)})


def key_of(ledger: Ledger) -> FileSigner:
    key = load(f"file:{ledger.key_file}")
    assert isinstance(key, FileSigner)
    return key


def problem(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["type"].rpartition("/")[2]


async def test_two_new_ledgers_start_as_they_will_run_and_exchange_once_each_key_is_trusted_without_a_restart(
    three: list[Ledger], tmp_path: Path
) -> None:
    here, there, _ = three
    # Neither folder of keys is there yet.
    keys = tmp_path / "keys"
    given = {
        each.region: settings_of(each, [other], keys / each.region) for each, other in ((here, there), (there, here))
    }
    async with here.running(**given["use1"]) as us:
        await until(lambda: tells(us, "does not answer"), "the other has not started")
        async with there.running(**given["eu1"]) as eu:
            ours, theirs = key_of(here).key_id, key_of(there).key_id
            there_too = f"does not trust key {ours} of this one: run tally peer admit use1 {ours} there"
            await until(
                lambda: tells(us, f"does not trust key {theirs}", f"tally peer admit eu1 {theirs} here", there_too),
                "each is told which keys are waited for",
            )
            assert (await us.get("/readyz")).status_code == 200
            assert f'exchange_keys_waited_for{{peer="{there.url}"}} 2.0' in (await us.get("/metrics")).text
            shown = await asyncio.to_thread(run_tally, "peer", "list", "--url", here.url)
            assert f"eu1, {there.url}: waits for a key" in shown.stdout
            assert f"tally peer admit eu1 {theirs} here" in shown.stdout
            # Waiting cannot help before an operator acts, so the answer does not wait for ``write.timeout``.
            await start_recorded(us)
            no_majority = "no majority of the regions imports from this ledger"
            late = await until(lambda: answered_with(us, no_majority), "it is answered at once")
            assert there_too in late["detail"]
            assert (late["achieved"], late["job_id"].startswith("use1-")) == ("REGIONAL", True)
            assert late.keys() >= {"hlc", "epoch", "lsn"}
            # One is admitted by an entry, the other by a file.
            for client in (us, eu):
                await start_recorded(client)
            wrong = await admit(eu, "use1", theirs)
            assert problem(wrong) == (404, "not-found")
            assert f"signs with {ours}" in wrong.json()["detail"]
            admitted = await asyncio.to_thread(run_tally, "peer", "admit", "use1", ours, "--url", there.url)
            assert (admitted.returncode, f"key {ours} (ed25519)" in admitted.stdout) == (0, True)
            (keys / "use1").mkdir(parents=True)
            (keys / "use1" / "eu1.pem").write_text(key_of(there).public_key_pem)
            for client in (us, eu):
                await until(lambda client=client: is_global(client), "GLOBAL is answered")  # type: ignore[misc]
            await until_known(us, [await submit(eu)])
            for client in (us, eu):
                await until(lambda client=client: is_faultless(client), "nothing is waited for")  # type: ignore[misc]
                assert (await told(client))["waits_for"] == []
        async with there.running(**given["eu1"]) as eu:
            await until_known(eu, [await submit(us, level="REGIONAL")])
            # A stolen key is trusted no longer, though a file has it.
            revoked = await asyncio.to_thread(
                run_tally, "peer", "revoke", "eu1", theirs, "--reason", "stolen", "--url", here.url
            )
            assert f"key {theirs} of region eu1 is trusted no longer" in revoked.stdout
            late_job = await submit(eu, level="REGIONAL")
            await until(
                lambda: tells(us, f"key {theirs}", "revoked here, because: stolen", "none of the keys"), "it is"
            )
            bundle = await eu.post("/v1/bundles/export", json={"tenant_id": "acme"})
            refused = await us.post("/v1/bundles/import", files={"file": ("eu1.bundle.tar", bundle.content)})
            assert problem(refused) == (422, "untrusted-key")
            assert not await is_known(us, late_job)
            again = await us.post("/v1/exchange/regions/eu1/revoke", json={"key_id": theirs, "reason": "again"})
            assert problem(again) == (404, "not-found")
            assert (await admit(us, "eu1", theirs)).status_code == 200
            await until_known(us, [late_job])


async def test_a_key_is_revoked_for_the_region_that_it_is_of_also_after_its_peer_left_the_settings(
    three: list[Ledger], tmp_path: Path
) -> None:
    use1, eu1, ap1 = three
    filed = tmp_path / "filed"
    filed.mkdir()
    use1.make_key(filed)
    eu1.make_key(tmp_path)
    ours, theirs = key_of(use1).key_id, key_of(eu1).key_id
    given = settings_of(use1, [eu1, ap1], tmp_path / "none")
    async with eu1.running(**settings_of(eu1, [use1, ap1], filed)) as eu:
        async with use1.running(**given) as us:
            for client in (us, eu):
                await start_recorded(client)
            assert (await admit(us, "eu1", theirs)).status_code == 200
            await until_known(us, [await submit(eu, level="REGIONAL")])
            # Here an entry says whose key it is, there a file names the key and the peer publishes it.
            for client, key_id, owner in ((us, theirs, "eu1"), (eu, ours, "use1")):
                refused = await revoke(client, "ap1", key_id)
                assert problem(refused) == (404, "not-found")
                assert f"not of region ap1 but of {owner}: run tally peer revoke {owner} {key_id}" in refused.text
            own = await revoke(us, "use1", ours)
            assert (problem(own), f"tally keys revoke {ours}" in own.text) == ((409, "key-conflict"), True)
        bundle = (await eu.post("/v1/bundles/export", json={"tenant_id": "acme"})).content
    async with use1.running() as us:
        await start_recorded(us)
        assert (await takes_bundle_of(us, bundle)).status_code == 200
        assert (await revoke(us, "eu1", theirs)).status_code == 200
        refused = await takes_bundle_of(us, bundle)
        assert problem(refused) == (422, "untrusted-key")
        again = await revoke(us, "eu1", theirs)
        assert (problem(again), "revoked already, because: stolen" in again.text) == ((404, "not-found"), True)
    # A file of trusted keys does not bring it back, though the ledger has no peer.
    async with use1.running(bundle={"trusted_keys": tmp_path / "eu1.pem"}) as us:
        assert problem(await takes_bundle_of(us, bundle)) == (422, "untrusted-key")
    # Nothing but a file says whose key it is.
    async with eu1.running(bundle={"trusted_keys": filed}) as eu:
        assert (await revoke(eu, "use1", ours)).status_code == 200


async def test_a_retired_region_counts_no_more_and_is_told_so_and_counts_again_once_its_key_is_admitted(
    three: list[Ledger], tmp_path: Path
) -> None:
    use1, eu1, ap1 = three
    trusted = tmp_path / "trusted"
    trusted.mkdir()
    for each in three:
        each.make_key(trusted)
    ours, theirs = settings_of(use1, [eu1, ap1], trusted, "60s"), settings_of(ap1, [use1, eu1], trusted, "60s")
    async with eu1.running(**settings_of(eu1, [use1, ap1], trusted, "60s")):
        async with use1.running(**ours) as us:
            await start_recorded(us)
            async with ap1.running(**theirs) as ap:
                await until_known(us, [await submit(ap, level="REGIONAL")])
                refused = await retire(us, "ap1", reason="we move out")
                assert problem(refused) == (409, "region-conflict")
                assert "answers, so it is not lost" in refused.json()["detail"]
            assert problem(await retire(us, "eu2", reason="none")) == (404, "not-found")
            assert problem(await retire(us, "ap1")) == (422, "invalid-request")
            assert problem(await retire(us, "ap1", reason="")) == (422, "invalid-request")
            await until(lambda: fails(us, "ap1"), "it does not answer")
            await until(lambda: is_global(us), "two of three regions are a majority")
            done = await asyncio.to_thread(
                run_tally, "peer", "retire", "ap1", "--reason", "disks lost", "--url", use1.url
            )
            assert "region ap1: retired since" in done.stdout
            assert problem(await retire(us, "ap1", reason="again")) == (409, "region-conflict")
            entries = (await us.get("/v1/chain/entries?tenant_id=_system&limit=1000")).json()["items"]
            (entry,) = [each for each in entries if each["action"] == "REGION_RETIRED"]
            assert (entry["job_id"], '"reason":"disks lost"' in entry["payload"]) == ("region:ap1", True)
            await until(lambda: is_faultless_of(us), "readiness looks at the others alone")
            await until(lambda: is_global(us), "both that are left hold it")
        # A node that starts knows it at once.
        async with use1.running(**ours) as us:
            assert (await peers_of(us))["ap1"]["retired"]["reason"] == "disks lost"
            answer = (await us.get("/v1/exchange")).json()
            assert (answer["regions_counted"], answer["majority"]) == (2, 2)
            async with ap1.running(**theirs) as ap:
                job = await submit(ap, level="REGIONAL")
                refusal = "this ledger retired region ap1"
                await until(lambda: tells_of(ap, use1.region, refusal, "disks lost"), "the retired ledger is told")
                assert problem(await us.get("/v1/exchange/news?origin=log.example&region=ap1")) == (
                    403,
                    "region-retired",
                )
                # What only it has comes by a bundle.
                bundle = await ap.post("/v1/bundles/export", json={"tenant_id": "acme"})
                taken = await us.post("/v1/bundles/import", files={"file": ("ap1.bundle.tar", bundle.content)})
                assert taken.status_code == 200, taken.text
                assert await is_known(us, job)
                # It counts again, and is followed.
                admitted = await admit(us, "ap1", key_of(ap1).key_id)
                assert admitted.status_code == 200, admitted.text
                await until_known(us, [await submit(ap, level="REGIONAL")])
                assert (await us.get("/v1/exchange")).json()["regions_counted"] == 3


async def is_faultless_of(client: httpx.AsyncClient) -> bool:
    return bool((await client.get("/readyz")).json()["checks"]["exchange"]["ok"])


async def tells_of(client: httpx.AsyncClient, region: str, *services: str) -> bool:
    """Whether a ledger tells all of this as the fault of a peer."""
    fault = (await peers_of(client))[region]["fault"]
    return fault is not None and all(each in fault for each in services)


async def test_where_every_other_region_is_retired_global_is_answered_and_claims_no_region(
    three: list[Ledger], tmp_path: Path
) -> None:
    use1, eu1, ap1 = three
    async with use1.running(**settings_of(use1, [eu1, ap1], tmp_path / "none")) as us:
        await start_recorded(us)
        for region, counted in (("ap1", 2), ("eu1", 1)):
            late = await answered(us)
            assert problem(late) == (503, "durability-timeout")
            assert "does not say what it holds" in late.json()["detail"]
            assert late.json()["detail"].count("was not reached") == 1
            assert (await retire(us, region, reason="lost")).status_code == 200
            assert (await us.get("/v1/exchange")).json()["regions_counted"] == counted
        alone = await answered(us)
        assert (alone.status_code, alone.json()["durability"]["survives"]) == (201, ["process"])


async def folded(client: httpx.AsyncClient, job_ids: list[str]) -> dict[str, Any]:
    """What a ledger folds of these jobs and states about logs, without what depends on the order of its chain."""
    found: dict[str, Any] = {}
    for job_id in job_ids:
        answer = await client.get(f"/v1/jobs/{job_id}?tenant_id=acme")
        if answer.status_code == 404:
            found[job_id] = None
            continue
        job = answer.json()
        events = (await client.get(f"/v1/jobs/{job_id}/events?tenant_id=acme")).json()["items"]
        found[job_id] = {
            **{name: job[name] for name in ("status", "spec", "created_hlc", "last_hlc", "fence_token", "result")},
            "events": [(each["hlc"], each["type"], each["counts"]) for each in events],
        }
    stated = (await client.get("/v1/exclusions?tenant_id=acme")).json()["items"]
    found["logs"] = [(each["log"], each["excluded"], each["hlc"], each["reason"]) for each in stated]
    return found


async def statuses_listed(client: httpx.AsyncClient) -> dict[str, str]:
    items = (await client.get("/v1/jobs?tenant_id=acme&consistency=strong")).json()["items"]
    return {each["job_id"]: each["status"] for each in items}


async def all_show(clients: list[httpx.AsyncClient], expected: dict[str, str | None], excluded: list[bool]) -> bool:
    """Whether every ledger shows these statuses and statements, and all fold the same of each job."""
    states: list[dict[str, Any]] = []
    for client in clients:
        state = await folded(client, list(expected))
        shown = {job_id: job and job["status"] for job_id, job in state.items() if job_id != "logs"}
        is_stated = [is_excluded for _, is_excluded, *_ in state["logs"]] == excluded
        if not is_stated or shown != expected or (states and state != states[0]):
            return False
        states.append(state)
    return True


async def test_three_ledgers_fold_the_same_jobs_while_one_of_them_does_not_count_and_once_it_counts_again(
    three: list[Ledger], tmp_path: Path
) -> None:
    use1, eu1, ap1 = three
    trusted = tmp_path / "trusted"
    trusted.mkdir()
    for each in three:
        each.make_key(trusted)
    given = {each.region: settings_of(each, [other for other in three if other is not each], trusted) for each in three}
    async with (
        use1.running(**given["use1"]) as us,
        eu1.running(**given["eu1"]) as eu,
        ap1.running(**given["ap1"]) as ap,
    ):
        clients = [us, eu, ap]
        of_us, of_eu, of_ap = [(await submit(client, level="REGIONAL"))["job_id"] for client in clients]
        made: dict[str, str | None] = dict.fromkeys((of_us, of_eu, of_ap), "SUBMITTED")
        await until(lambda: all_show(clients, made, []), "every ledger knows the jobs")
        cancel = {"tenant_id": "acme", "reason": "mischief", "requestor": "ap"}
        for job_id in (of_us, of_eu):
            assert (await ap.post(f"/v1/jobs/{job_id}/cancel", json=cancel)).status_code == 201
        cancelled = {**made, of_us: "CANCELLING", of_eu: "CANCELLING"}
        await until(lambda: all_show(clients, cancelled, []), "its cancellations count")
        # One ledger states it, and all three follow, the excluded one too.
        told = ("--tenant", "acme", "--reason", "it cancels our jobs", "--url", eu1.url)
        done = await asyncio.to_thread(run_tally, "peer", "exclude", "ap1", *told)
        assert done.returncode == 0, done.stderr
        await until(lambda: all_show(clients, made, [True]), "they count nowhere")
        for client in clients:
            assert (await client.get(f"/v1/jobs/{of_ap}?tenant_id=acme")).json()["created_hlc"] is None
        # Neither what it adds later counts, nor what it says of itself; the facts of others about its jobs do.
        failed = {"tenant_id": "acme", "type": "JobFailed", "error": "not so", "failed_dc": "x"}
        late = await ap.post(f"/v1/jobs/{of_us}/events", json=failed)
        assert late.status_code == 201, late.text
        accepted = {"tenant_id": "acme", "type": "JobAccepted", "dc_id": "x", "worker_count": 1}
        assert (await us.post(f"/v1/jobs/{of_ap}/events", json=accepted)).status_code == 201
        not_counted = {**made, of_ap: "ACCEPTED"}

        async def have_it() -> bool:
            have = [(await folded(client, [of_us]))[of_us]["events"] for client in clients]
            return all((late.json()["hlc"], "JobFailed", False) in events for events in have)

        await until(have_it, "the late fact came over")
        await until(lambda: all_show(clients, not_counted, [True]), "it does not count")
        for client in clients:
            listed = await statuses_listed(client)
            assert listed == {of_us: "SUBMITTED", of_eu: "SUBMITTED"}
            verdict = (await client.get("/v1/chain/verify?tenant_id=acme")).json()
            assert (verdict["valid"], verdict["verdicts"]["projection"]) == (True, "ok")
        # Another ledger takes it back.
        [stated] = (await us.get("/v1/exclusions?tenant_id=acme")).json()["items"]
        include = {"tenant_id": "acme", "log": stated["log"], "reason": "it was repaired", "excluded": False}
        assert (await us.post("/v1/exclusions", json=include)).status_code == 201
        again = {**cancelled, of_us: "CANCELLED", of_ap: "ACCEPTED"}
        await until(lambda: all_show(clients, again, [False]), "all of it counts")
        for client in clients:
            assert await statuses_listed(client) == again
            verdict = (await client.get("/v1/chain/verify?tenant_id=acme")).json()
            assert (verdict["valid"], verdict["verdicts"]["projection"]) == (True, "ok")


@pytest.fixture
def of_two(pool: asyncpg.Pool) -> Regions:
    """The regions of a ledger with one peer, which is not asked, whose writes wait for both."""
    peer = PeerSettings(url="http://127.0.0.1:9", region="eu1")
    settings = ExchangeSettings(peers=[peer], is_global=True)
    own, ring = Asker("use1.example", "use1"), Keyring(())
    return Regions.of(
        settings,
        own,
        pool,
        keys=lambda: ring,
        take_fetched=take_nothing,
        take_offered=take_nothing,
        head_seq=lambda _: 3,
        sign_soon=lambda _: None,
    )


async def test_a_write_that_a_majority_holds_as_its_time_ends_is_answered(of_two: Regions) -> None:
    [other] = of_two.peers
    heard = asyncio.create_task(other.holdings.hear({"acme": 3}))
    await of_two.spread({"acme": 3}, 0.0)
    await heard
    with pytest.raises(DurabilityTimeoutError, match="a majority of the regions is not known"):
        await of_two.spread({"acme": 4}, 0.0)


async def test_a_peer_that_asks_waits_for_the_checkpoint_of_earlier_writes_and_of_no_later_ones(
    of_two: Regions, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.share.exchange.SIGNING_S", 3600.0)
    async with asyncio.timeout(10):
        await of_two.asked_by(Asker("eu1.example", "eu1"))
        writes = [asyncio.create_task(of_two.spread({"acme": 1}, 3600.0))]
        await asyncio.sleep(0)
        asked = asyncio.create_task(of_two.asked_by(Asker("eu1.example", "eu1")))
        await asyncio.sleep(0)
        writes.append(asyncio.create_task(of_two.spread({"acme": 2}, 3600.0)))
        await asyncio.sleep(0)
        assert not asked.done()
        of_two.news.signed({"acme": 1})
        await asked
    for each in writes:
        each.cancel()


async def test_a_peer_whose_claims_go_up_and_down_is_found_to_hold_more_only_once(of_two: Regions) -> None:
    [other] = of_two.peers
    claims = [(1, True), (0, False), (1, False), (2, True), (1, False), (2, False), (9, False), (2, False), (3, True)]
    assert [(seq, await other.holdings.hear({"acme": seq})) for seq, _ in claims] == claims
