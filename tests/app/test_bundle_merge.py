"""Merging: ledgers that were written apart become one, the same whatever the order, and every conflict is kept."""

from __future__ import annotations

import asyncio
import json
from hashlib import sha256
from pathlib import Path
from typing import Any

import asyncpg
import httpx
import pytest

from app.dev.embedded import EmbeddedPostgres
from app.share.bundle.report import counts_of
from app.store.exchange import Import
from ledger import canonical
from ledger.chain.conflict import Event, conflict_hlc, held_event
from ledger.errors import ClockSkewError, InvalidInputError
from ledger.facts.events import VERDICTS
from ledger.machines.promises import proposed_payload
from signing.bundle.reader import BundleReader
from tests.app.bundles import bundle_of, store
from tests.app.chains import until
from tests.app.importing import fresh, import_all, import_files, importer_on, in_memory, links, signed, staged, states
from tests.app.service_thread import serving
from tests.conftest import Database, connected_to, fresh_database
from tests.ledger.committed import RACE, committed, mend
from tests.ledger.ledger_in_memory import SIGNER, Ledger, build


@pytest.fixture(scope="module")
def trusted(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The key of ``SIGNER``, which signs the bundles made in memory."""
    return store(tmp_path_factory.mktemp("keys"), SIGNER.public_key_pem.encode(), "trusted.pem")


def orders(bundles: list[Path]) -> list[tuple[Path, ...]]:
    """Of three: each is first once, second once and last once, and each is before each other in one of them."""
    return [(*bundles[first:], *bundles[:first]) for first in range(3)]


# --- three services that worked apart -----------------------------------------------------------------


@pytest.fixture(scope="module")
def apart(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[Path], Path]:
    """Bundles of three services that worked on the same jobs without knowing each other, and a folder of their keys."""
    folder = tmp_path_factory.mktemp("apart")
    keys = folder / "keys"
    keys.mkdir()
    bundles = []
    last_events: list[tuple[str, dict[str, Any]]] = [
        ("cancel", {"reason": "no longer needed", "requestor": "a"}),
        ("events", {"type": "JobCompleted", "final_status": "ok"}),
        ("events", {"type": "JobFailed", "error": "disk", "fence_token": 7}),
    ]
    for number, (route, fields) in enumerate(last_events):
        with (
            serving(postgres, folder / f"data-{number}", f"apart_{number}") as url,
            httpx.Client(base_url=url, timeout=60, trust_env=False) as client,
        ):
            for n in range(12):
                job = {"tenant_id": "acme", "job_id": f"job-{n}", "spec": {"made_by": number}}
                client.post("/v1/jobs", json=job).raise_for_status()
                report = {"type": "JobProgressReported", "dc_id": f"dc-{number}", "completed": n, "failed": 0}
                report["durability"] = "GLOBAL"  # The bundle is to hold it.
                path = f"/v1/jobs/job-{n}/"
                client.post(path + "events", json={"tenant_id": "acme", **report}).raise_for_status()
                if n % 3 != number:
                    client.post(path + route, json={"tenant_id": "acme", **fields}).raise_for_status()
            answer = client.post("/v1/bundles/export", json={"tenant_id": "acme"}).raise_for_status()
            bundles.append(store(folder, answer.content, f"site-{number}.tar"))
            (keys / f"{number}.json").write_text(client.get("/v1/keys").text)
    return bundles, keys


def test_the_same_bundles_named_in_any_order_make_the_same_chain(
    postgres: EmbeddedPostgres, apart: tuple[list[Path], Path]
) -> None:
    bundles, keys = apart
    chains, heads = [], []
    for order in orders(bundles):
        with fresh(postgres) as (url, sound):
            (planned,) = import_all(url, keys, order, dry_run=True)
            assert sound("acme") == []
            done, again = import_all(url, keys, order, order[:1])
            entries = sound("acme")
        assert (done.imported, done.duplicates, done.jobs_changed) == (len(entries), 0, 12)
        assert (planned.imported, planned.jobs_changed, planned.heads) == (done.imported, 12, done.heads)
        assert (again.imported, again.heads) == (0, done.heads)
        chains.append(links(entries))
        heads.append(done.heads["acme"])
        order_of_hlcs = [(entry["hlc_physical"], entry["hlc_logical"], entry["hlc_node"]) for entry in entries]
        assert order_of_hlcs == sorted(order_of_hlcs)
    assert all(chain == chains[0] for chain in chains)
    assert len(chains[0]) == 3 * (12 + 12 + 8)


def test_bundles_imported_one_at_a_time_in_any_order_give_the_same_job_states(
    postgres: EmbeddedPostgres, apart: tuple[list[Path], Path]
) -> None:
    bundles, keys = apart
    found = []
    for order in orders(bundles):
        with fresh(postgres) as (url, sound):
            import_all(url, keys, *([path] for path in order))
            found.append(states(sound("acme")))
    assert all(each == found[0] for each in found)
    assert {status for status, _ in found[0].values()} == {"CANCELLED", "FAILED"}


def test_sets_that_overlap_and_are_imported_at_once_give_every_event_once(
    postgres: EmbeddedPostgres, apart: tuple[list[Path], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    bundles, keys = apart
    monkeypatch.setattr("app.share.bundle.importer.ENTRIES_A_TRANSACTION", 5)

    async def import_at_once(url: str) -> list[Import]:
        async with asyncpg.create_pool(url, min_size=1, max_size=6) as pool:
            sets = [bundles[:2], bundles[1:], bundles[::2]]
            runs = [importer_on(pool, keys).run([staged(path) for path in paths], dry_run=False) for paths in sets]
            return await asyncio.gather(*runs)

    with fresh(postgres) as (url, sound):
        done = asyncio.run(import_at_once(url))
        entries = sound("acme")
    assert len(entries) == len({entry["t_hlc"] for entry in entries}) == 3 * (12 + 12 + 8)
    assert sum(each.imported for each in done) == len(entries)
    assert sum(each.duplicates for each in done) == len(entries)
    assert max(each.heads["acme"].seq for each in done) == len(entries)


_NEXT_IS_LOOKED_UP = """
SELECT EXISTS (SELECT FROM pg_stat_activity AS storing JOIN pg_stat_activity AS other USING (datname)
                WHERE datname = current_database() AND storing.wait_event = 'advisory'
                  AND other.pid NOT IN (storing.pid, pg_backend_pid()) AND other.query_start > storing.xact_start)
"""


def test_the_next_batch_is_looked_up_while_postgresql_stores_one(
    postgres: EmbeddedPostgres, trusted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.share.bundle.importer.ENTRIES_A_TRANSACTION", 4)
    path = store(tmp_path, bundle_of(build(12, snapshots_to=(12,))))

    async def import_held_at_the_first(database: Database) -> Import:
        superuser = await asyncpg.connect(database.superuser_url)
        await superuser.execute("SELECT pg_advisory_lock(1)")
        await superuser.execute(
            """
            CREATE FUNCTION public.hold() RETURNS trigger LANGUAGE plpgsql AS $$
            BEGIN PERFORM pg_advisory_xact_lock(1); RETURN NEW; END $$;
            CREATE TRIGGER hold BEFORE INSERT ON scheduler.scheduler_log
               FOR EACH ROW WHEN (NEW.seq = 1) EXECUTE FUNCTION public.hold();
            """
        )
        importing = asyncio.create_task(import_files(database.service_url, trusted, [[path]]))
        try:
            await until(lambda: superuser.fetchval(_NEXT_IS_LOOKED_UP), "the next batch is looked up")
        finally:
            await superuser.close()
        return (await importing)[0]

    with fresh_database(postgres) as database:
        assert asyncio.run(import_held_at_the_first(database)).imported == 12


# --- two events with one HLC --------------------------------------------------------------------------


def forked(seq: int, **changed: Any) -> Ledger:
    """A ledger as ``build`` makes it, but that one of its events says something else under the same HLC."""
    ledger = build(12)
    row = ledger.entry(seq)
    row["payload"] = json.dumps({**json.loads(row["payload"]), **changed}, sort_keys=True, separators=(",", ":"))
    ledger.relink()
    ledger.sign(12)
    return ledger


@pytest.mark.parametrize("a_transaction", [1, 1000])
def test_two_events_with_one_hlc_are_both_kept_in_any_order_and_only_once(
    postgres: EmbeddedPostgres, trusted: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, a_transaction: int
) -> None:
    monkeypatch.setattr("app.share.bundle.importer.ENTRIES_A_TRANSACTION", a_transaction)
    first = store(tmp_path, bundle_of(build(12, snapshots_to=(12,))), "a.tar")
    other = store(tmp_path, bundle_of(forked(9, fence_token=5)), "b.tar")
    third = store(tmp_path, bundle_of(forked(9, fence_token=6)), "c.tar")
    found, merged = [], []
    for order in orders([first, other, third]):
        with fresh(postgres) as (url, sound):
            outcomes = import_all(url, trusted, *([path] for path in order), order)
            entries = sound("acme")
        assert [outcome.imported for outcome in outcomes] == [12, 1, 1, 0]
        assert [len(outcome.conflicts) for outcome in outcomes] == [0, 1, 1, 2]
        held = [entry for entry in entries if entry["action"] == "CONFLICT"]
        assert len(held) == 2
        for entry in held:
            payload = json.loads(entry["payload"])
            event = Event(payload["hlc"], entry["job_id"], payload["action"], payload["digest"])
            assert entry["t_hlc"] == conflict_hlc(event).text()
            assert payload["digest"] == sha256(payload["payload"].encode()).hexdigest()
            assert payload["kept_digest"] == entries[8]["payload_digest"]
        found.append(states(entries))
        with fresh(postgres) as (url, sound):
            (outcome,) = import_all(url, trusted, order)
            merged.append(links(sound("acme")))
            assert (outcome.imported, outcome.duplicates, len(outcome.conflicts)) == (14, 22, 2)
    assert all(each == found[0] for each in found)
    assert all(each == merged[0] for each in merged)


def test_conflicts_that_two_merged_ledgers_hold_the_other_way_round_are_one_conflict(
    postgres: EmbeddedPostgres, trusted: Path, tmp_path: Path
) -> None:
    rows = []
    for name, seq in (("a", 9), ("b", 9)):
        ledger = build(12) if name == "a" else forked(seq, fence_token=5)
        rows.append(ledger)
    bundles = [
        store(tmp_path, bundle_of(signed(ledger)), f"{name}.tar") for name, ledger in zip("ab", rows, strict=True)
    ]
    exported = []
    for number, order in enumerate((bundles, bundles[::-1])):
        with fresh(postgres) as (url, sound):
            import_all(url, trusted, *([path] for path in order))
            merged = Ledger("acme", [in_memory(entry) for entry in sound("acme")])
            exported.append(store(tmp_path, bundle_of(signed(merged)), f"merged-{number}.tar"))
    with fresh(postgres) as (url, sound):
        outcomes = import_all(url, trusted, *([path] for path in exported), exported)
        entries = sound("acme")
    assert [(one.imported, one.duplicates) for one in outcomes] == [(13, 0), (0, 13), (0, 26)]
    assert [entry["action"] for entry in entries].count("CONFLICT") == 1


# --- a log that was never chained, and the chain that it became after all -----------------------------------


def unjudged(ledger: Ledger, **changed: Any) -> Ledger:
    """What a ledger chained, as the node's log has it: proposals without verdicts."""
    log = ledger.copy()
    for row in log.entries:
        if row["action"] in VERDICTS:
            row["action"] = "PROPOSED"
            row["payload"] = canonical.encode({**json.loads(proposed_payload(row["payload"])), **changed}).decode()
    mend(log)
    return log


def told(entries: list[Any]) -> set[Event]:
    """The events of a chain, of CONFLICT entries those that they hold, without proposals that were not judged."""
    found = set()
    for entry in entries:
        held = held_event(json.loads(entry["payload"]), entry["job_id"]) if entry["action"] == "CONFLICT" else None
        own = Event(entry["t_hlc"], entry["job_id"], entry["action"], entry["payload_digest"])
        found.add(own if held is None else held.event)
    return {event for event in found if event.action != "PROPOSED"}


@pytest.mark.parametrize("log", ["a.wal/0f", "node-1.wal/0f"])
def test_verdicts_and_their_proposals_in_any_order_are_no_conflict_and_every_verdict_is_known(
    postgres: EmbeddedPostgres, trusted: Path, tmp_path: Path, log: str
) -> None:
    ledger = committed(RACE)
    chain = store(tmp_path, bundle_of(ledger), "chain.tar")
    wal = store(tmp_path, bundle_of(unjudged(ledger), log_origin=log), "wal.tar")
    events = told(ledger.entries)
    for calls in ([[chain], [wal]], [[wal], [chain]], [[wal, chain]]):
        with fresh(postgres) as (url, sound):
            outcomes = import_all(url, trusted, *calls, [chain], [wal])
            entries = sound("acme")
        assert [outcome.conflicts for outcome in outcomes] == [[]] * len(outcomes)
        assert [outcome.imported for outcome in outcomes[-2:]] == [0, 0]
        assert (told(entries), states(entries)) == (events, states(ledger.entries))
        carried_on = store(tmp_path, bundle_of(signed(Ledger("acme", [*map(in_memory, entries)]))), "carried-on.tar")
        with BundleReader.open(carried_on) as reader:
            assert counts_of(reader).proposals == {"accepted": 5, "rejected": 2}
        with fresh(postgres) as (url, sound):
            outcomes = import_all(url, trusted, [chain], [carried_on])
            assert [(one.imported, one.conflicts) for one in outcomes] == [(len(ledger.entries), []), (0, [])]


def test_a_verdict_on_another_proposal_than_the_one_that_stands_is_a_conflict(
    postgres: EmbeddedPostgres, trusted: Path, tmp_path: Path
) -> None:
    ledger = committed(RACE)
    chain = store(tmp_path, bundle_of(ledger), "chain.tar")
    other = unjudged(ledger, precondition={"kind": "GangUnplaced", "gang": "other"})
    wal = store(tmp_path, bundle_of(other, log_origin="node-1.wal/0f"), "wal.tar")
    with fresh(postgres) as (url, sound):
        _, outcome = import_all(url, trusted, [wal], [chain])
        assert len(outcome.conflicts) == outcome.imported == 7
        assert told(sound("acme")) == told(ledger.entries)


# --- origin, beginnings, time ------------------------------------------------------------------------------


def test_the_first_origin_survives_however_often_an_entry_is_carried_on(
    postgres: EmbeddedPostgres, trusted: Path, tmp_path: Path
) -> None:
    ledger = build(12, snapshots_to=(12,))
    path = store(tmp_path, bundle_of(ledger), "a.tar")
    digest = sha256(path.read_bytes()).hexdigest()
    for number in range(3):
        with fresh(postgres) as (url, sound):
            import_all(url, trusted, [path])
            entries = sound("acme")
        path = store(tmp_path, bundle_of(signed(Ledger("acme", [in_memory(e) for e in entries]))), f"{number}.tar")
        for entry, born in zip(entries, ledger.entries, strict=True):
            assert json.loads(entry["origin"]) == {
                "bundle_digest": digest,
                "chain_link": born["chain_link"],
                "log": "log.example/acme",
                "node_id": "node-1",
                "seq": born["seq"],
            }


def test_a_chain_of_version_1_begins_an_empty_chain_as_it_is_and_no_other(
    postgres: EmbeddedPostgres, trusted: Path, tmp_path: Path
) -> None:
    old = build(12, version_1_until=5, snapshots_to=(12,))
    path = store(tmp_path, bundle_of(old), "old.tar")
    later = store(tmp_path, bundle_of(old, from_seq=3), "later.tar")
    new = store(tmp_path, bundle_of(build(9, snapshots_to=(9,), begin_ms=1_704_000_000_000)), "new.tar")
    with fresh(postgres) as (url, _sound):
        done, again = import_all(url, trusted, [path, new], [path])
        rows = asyncio.run(_rows(url))
        assert (done.imported, again.imported, again.duplicates) == (21, 0, 12)
    versions = [row["link_version"] for row in rows]
    assert versions == [1] * 5 + [2] * 16
    assert [row["chain_link"] for row in rows[:5]] == [row["chain_link"] for row in old.entries[:5]]
    assert [row["origin"] for row in rows[:5]] == [None] * 5
    with fresh(postgres) as (url, sound):
        import_all(url, trusted, [new])
        before = links(sound("acme"))
        for refused in ([path], [later], [path, later]):
            with pytest.raises(InvalidInputError, match="beginning"):
                import_all(url, trusted, refused)
        assert links(sound("acme")) == before


def test_a_chain_of_version_1_is_imported_range_by_range_and_in_no_other_order(
    postgres: EmbeddedPostgres, trusted: Path, tmp_path: Path
) -> None:
    old = build(12, version_1_until=9, snapshots_to=(12,))
    other = build(12, version_1_until=9, snapshots_to=(12,), begin_ms=1_704_000_000_000)
    bounds = [(1, 3), (4, 8), (9, 12)]
    ranges = [store(tmp_path, bundle_of(old, *each), f"{each[0]}.tar") for each in bounds]
    strange = store(tmp_path, bundle_of(other, 4, 8), "other.tar")
    with fresh(postgres) as (url, _sound):
        for given in (ranges[1], ranges[2]):
            with pytest.raises(InvalidInputError, match="before seq"):
                import_all(url, trusted, [given])
        import_all(url, trusted, [ranges[0]])
        for given in (ranges[2], strange):
            with pytest.raises(InvalidInputError, match="before seq"):
                import_all(url, trusted, [given])
        rest = import_all(url, trusted, [ranges[1]], [ranges[2]], [ranges[1]])
        assert [(each.imported, each.duplicates) for each in rest] == [(5, 0), (4, 0), (0, 5)]
        rows = asyncio.run(_rows(url))
    assert [row["link_version"] for row in rows] == [1] * 9 + [2] * 3
    assert [row["chain_link"] for row in rows[:9]] == [row["chain_link"] for row in old.entries[:9]]


def test_a_chain_of_version_1_with_two_events_of_one_hlc_is_refused_whole(
    postgres: EmbeddedPostgres, trusted: Path, tmp_path: Path
) -> None:
    for seq in (3, 5):
        old = build(12, version_1_until=5)
        hlc = {name: old.entry(2)[name] for name in ("t_hlc", "hlc_physical", "hlc_logical", "hlc_node")}
        old.entry(seq).update(hlc)
        old.relink()
        path = store(tmp_path, bundle_of(signed(old)), f"old-{seq}.tar")
        with fresh(postgres) as (url, _sound):
            with pytest.raises(InvalidInputError, match="takes no CONFLICT entry"):
                import_all(url, trusted, [path])
            assert asyncio.run(_rows(url)) == []


async def _rows(url: str) -> list[asyncpg.Record]:
    async with connected_to(url) as connection:
        return await connection.fetch("SELECT * FROM scheduler.scheduler_log WHERE tenant_id = 'acme' ORDER BY seq")


def test_entries_from_the_future_wait_until_time_has_caught_up(
    postgres: EmbeddedPostgres, trusted: Path, tmp_path: Path
) -> None:
    path = store(tmp_path, bundle_of(build(6, snapshots_to=(6,), begin_ms=4_000_000_000_000)))
    with fresh(postgres) as (url, _sound):
        with pytest.raises(ClockSkewError, match="import it again once time has caught up"):
            import_all(url, trusted, [path])
        assert asyncio.run(_rows(url)) == []
