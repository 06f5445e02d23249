"""The notary: trees follow their chains, checkpoints and snapshots are signed in time, and only what was chained."""

from __future__ import annotations

import asyncio
import base64
import errno
import hashlib
import json
import os
from collections.abc import AsyncIterator, Iterator, Sequence
from contextlib import asynccontextmanager
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

import asyncpg
import pytest

from app.dev.embedded import EmbeddedPostgres
from app.node.service import Service
from app.node.wiring import running
from app.runtime.settings.config import Settings
from app.store.chain_reader import consistent_reader
from app.write.followers import notary as notary_module
from app.write.followers.checkpoints import NAME, CheckpointJournal
from app.write.followers.notary import TURNS_AT_ONCE_MAX, Notary
from app.write.pending.requests import EventLines
from ledger import canonical
from ledger.errors import SigningUnavailableError
from ledger.verification import SNAPSHOT_COLUMNS, Verdict, verify
from signing.checkpoint import Checkpoint, open_checkpoint, parse
from signing.keys import Keyring, PublicKey
from signing.note import VerifierKey
from signing.note import parse as parse_note
from signing.snapshot import open_snapshot
from tests.app import chain_builder
from tests.app.admitting import run_two
from tests.app.chains import Chains, until
from tests.app.conftest import MakeSettings, RunNode, RunServer
from tests.app.drafts import GLOBAL, created
from tests.app.shared import Shared, sharing
from tests.app.starting import checkpoints_blocked, wal_folder
from tests.conftest import Database, connected_to, fresh_database
from tests.ledger import naive_merkle
from tests.running_copy import copy_running

Snapshot = dict[str, Any]


async def write(service: Service, tenant_id: str, count: int) -> None:
    """Chain ``count`` entries in one request."""
    await service.submitter.submit_lines(
        EventLines.of([created(tenant_id, n) for n in range(count)]), durability=GLOBAL, key=None
    )


async def public_keys(superuser: asyncpg.Connection) -> list[PublicKey]:
    """The keys that the ledger has published."""
    rows = await superuser.fetch("SELECT public_key_pem FROM scheduler.signing_keys")
    return [PublicKey.of(row["public_key_pem"]) for row in rows]


async def checkpoint_of(superuser: asyncpg.Connection, tenant_id: str) -> Checkpoint | None:
    """The stored checkpoint, its signature checked; None before the first."""
    note = await superuser.fetchval("SELECT checkpoint FROM scheduler.merkle_head WHERE tenant_id = $1", tenant_id)
    if note is None:
        return None
    origin = await superuser.fetchval("SELECT log_origin FROM scheduler.ledger_identity") + f"/{tenant_id}"
    return open_checkpoint(note, [VerifierKey.of(origin, key) for key in await public_keys(superuser)], origin=origin)


async def covered(superuser: asyncpg.Connection, tenant_id: str, size: int) -> Checkpoint | None:
    """The stored checkpoint once it covers ``size`` entries."""
    checkpoint = await checkpoint_of(superuser, tenant_id)
    return checkpoint if checkpoint is not None and checkpoint.size >= size else None


async def snapshots_of(superuser: asyncpg.Connection, tenant_id: str) -> list[Snapshot]:
    """The tenant's snapshots in order, what they claim beside each row."""
    rows = await superuser.fetch(
        "SELECT * FROM scheduler.batch_snapshot WHERE tenant_id = $1 ORDER BY from_seq", tenant_id
    )
    keyring = Keyring(await public_keys(superuser))
    snapshots = []
    for row in rows:
        opened = open_snapshot(row["dsse_envelope"], keyring)
        assert opened.verdict == "ok"
        snapshots.append({**dict(row), "claim": opened.claim})
    return snapshots


def naive_root(links: list[bytes]) -> bytes:
    """Root over raw links by recursion."""
    return naive_merkle.root([hashlib.sha256(b"\0" + link).digest() for link in links])


async def links_of(chains: Chains, tenant_id: str) -> list[bytes]:
    """Raw links of a chain that is sound, in seq order."""
    return [bytes.fromhex(entry["chain_link"]) for entry in await chains.sound(tenant_id)]


def assert_snapshots_cover(snapshots: list[Snapshot], links: list[bytes]) -> None:
    """Gapless from the first entry on; every root is what naive recursion makes of the links; each names the last."""
    digest = None
    next_seq = 1
    for row in snapshots:
        claim = row["claim"]
        assert claim.from_seq == row["from_seq"] == next_seq
        assert claim.entry_count == row["entry_count"] == claim.to_seq - claim.from_seq + 1
        assert claim.merkle_root == row["merkle_root"] == naive_root(links[claim.from_seq - 1 : claim.to_seq]).hex()
        assert claim.tree_size == claim.to_seq == row["to_seq"]
        assert claim.tree_root == naive_root(links[: claim.to_seq]).hex()
        assert claim.from_chain_link == row["from_chain_link"] == links[claim.from_seq - 1].hex()
        assert claim.to_chain_link == row["to_chain_link"] == links[claim.to_seq - 1].hex()
        assert claim.previous_snapshot == digest
        digest = hashlib.sha256(base64.b64decode(json.loads(row["dsse_envelope"])["payload"])).hexdigest()
        next_seq = claim.to_seq + 1


async def edit(superuser: asyncpg.Connection, assignment: str, seq: int, tenant_id: str = "acme") -> None:
    """Change one row of a tenant behind the triggers."""
    change = f"UPDATE scheduler.scheduler_log SET {assignment} WHERE tenant_id = $1 AND seq = $2"
    await chain_builder.edit(superuser, change, tenant_id, seq)


RARELY = {"batch_size": 10, "batch_interval": "1h"}
"""A snapshot is signed every ten entries, or after an hour."""


@pytest.fixture
def rarely(make_settings: MakeSettings) -> Settings:
    return make_settings(chain=RARELY)


@pytest.fixture(scope="module")
async def shared(make_shared_settings: MakeSettings, shared_database: Database) -> AsyncIterator[Shared]:
    """A node that signs a snapshot every ten entries, or after an hour."""
    async with sharing(make_shared_settings(chain=RARELY), shared_database) as shared:
        yield shared


# --- checkpoints ----------------------------------------------------------------------------------


async def test_every_entry_is_soon_covered_by_a_signed_checkpoint_of_its_own_tree(
    shared: Shared, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    await write(shared.service, tenant, 1)
    # Because entries were chained, that is, and not when tenants are looked at the next time.
    monkeypatch.setattr(notary_module, "HOUSEKEEPING_INTERVAL_S", 3600.0)
    size = 1
    for more in (1, 1, 5, 250, 2):
        await write(shared.service, tenant, more)
        size += more
        checkpoint = await until(
            lambda size=size: covered(shared.superuser, tenant, size),  # type: ignore[misc]
            f"a checkpoint covers {size}",
        )
        assert (checkpoint.size, checkpoint.root) == (size, naive_root(await links_of(shared.chains, tenant)))


async def test_the_newest_checkpoint_is_kept_beside_the_wal_and_where_it_cannot_be_as_soon_as_it_can(
    shared: Shared, tenant: str
) -> None:
    notary, folder, later = shared.service.notary, shared.service._started.wal.folder, f"{tenant}-later"
    await write(shared.service, tenant, 3)
    await until(lambda: covered(shared.superuser, tenant, 3), "a checkpoint covers all")
    await until(lambda: CheckpointJournal(folder).size(tenant) == 3, "it is kept")
    assert CheckpointJournal(folder).load(tenant) == await shared.superuser.fetchval(
        "SELECT checkpoint FROM scheduler.merkle_head WHERE tenant_id = $1", tenant
    )
    with checkpoints_blocked(folder):
        await write(shared.service, later, 3)
        await until(lambda: notary.last_error, "the notary says that it cannot keep it")
        await until(lambda: covered(shared.superuser, later, 3), "the checkpoint is in the database")
    await until(lambda: CheckpointJournal(folder).size(later) == 3, "it is kept")
    await until(lambda: notary.last_error is None, "the notary is well again")
    assert shared.service.node.failure is None


# --- snapshots ------------------------------------------------------------------------------------


async def test_a_snapshot_is_signed_for_every_batch_size_entries_exactly(shared: Shared, tenant: str) -> None:
    service, superuser = shared.service, shared.superuser
    await write(service, tenant, 35)
    await until(lambda: covered(superuser, tenant, 35), "a checkpoint covers all")

    async def ranges() -> list[tuple[int, int]]:
        return [(row["from_seq"], row["to_seq"]) for row in await snapshots_of(superuser, tenant)]

    async def three() -> bool:
        return len(await ranges()) >= 3

    await until(three, "three snapshots")
    assert await ranges() == [(1, 10), (11, 20), (21, 30)]
    await write(service, tenant, 4)
    await until(lambda: covered(superuser, tenant, 39), "a checkpoint covers all")
    assert len(await ranges()) == 3
    await write(service, tenant, 1)
    await until(lambda: covered(superuser, tenant, 40), "a checkpoint covers all")

    async def four() -> bool:
        return len(await ranges()) == 4

    await until(four, "the fourth batch is full")
    assert_snapshots_cover(await snapshots_of(superuser, tenant), await links_of(shared.chains, tenant))


async def write_ten(service: Service, tenants: Sequence[str]) -> None:
    """Chain ten entries of each tenant in one transaction."""
    drafts = [created(tenant_id, n) for tenant_id in tenants for n in range(10)]
    await service.submitter.submit_lines(EventLines.of(drafts), durability=GLOBAL, key=None)


@pytest.fixture
async def ten_each(shared: Shared, tenant: str) -> list[str]:
    """Tenants of which ten entries each are signed."""
    tenants, notary = [f"{tenant}-{name}" for name in "abc"], shared.service.notary
    await write_ten(shared.service, tenants)
    await until(lambda: all(notary._tenants[each].signed_seq == 10 for each in tenants), "all are signed")
    return tenants


async def test_full_batches_of_several_tenants_are_stored_in_one_transaction(
    shared: Shared, ten_each: list[str]
) -> None:
    await write_ten(shared.service, ten_each)
    for tenant_id in ten_each:
        await until(lambda name=tenant_id: signed_to(shared.superuser, name, 20), "the next batch is signed")  # type: ignore[misc]
        assert [each["to_seq"] for each in await snapshots_of(shared.superuser, tenant_id)] == [10, 20]
    stored = (
        "SELECT count(DISTINCT xmin::text) FROM scheduler.batch_snapshot WHERE from_seq = 11 AND tenant_id = ANY($1)"
    )
    assert await shared.superuser.fetchval(stored, ten_each) == 1
    assert all(shared.service.notary._tenants[each].unsigned_since_s is None for each in ten_each)


async def test_a_tenant_whose_snapshot_cannot_be_stored_keeps_none_of_those_in_its_transaction_from_theirs(
    shared: Shared, ten_each: list[str]
) -> None:
    superuser, (a, b, c) = shared.superuser, ten_each
    await superuser.execute(
        f"ALTER TABLE scheduler.batch_snapshot ADD CONSTRAINT no_b CHECK (tenant_id <> '{b}') NOT VALID"
    )
    await write_ten(shared.service, ten_each)
    for tenant_id in (a, c):
        await until(lambda name=tenant_id: signed_to(superuser, name, 20), "the others are signed")  # type: ignore[misc]
    assert not await signed_to(superuser, b, 20)
    await superuser.execute("ALTER TABLE scheduler.batch_snapshot DROP CONSTRAINT no_b")
    await until(lambda: signed_to(superuser, b, 20), "it is signed once it can be")
    assert len(await snapshots_of(superuser, b)) == 2


async def signed_to(superuser: asyncpg.Connection, tenant_id: str, seq: int) -> bool:
    """Whether a snapshot of the tenant ends there."""
    query = "SELECT EXISTS (SELECT FROM scheduler.batch_snapshot WHERE tenant_id = $1 AND to_seq = $2)"
    return bool(await superuser.fetchval(query, tenant_id, seq))


async def test_a_batch_that_does_not_fill_is_signed_after_the_interval(
    run_node: RunNode, make_settings: MakeSettings, chains: Chains, superuser: asyncpg.Connection
) -> None:
    async with run_node(make_settings(chain={"batch_interval": "300ms"})) as service:
        await write(service, "acme", 3)
        await until(lambda: snapshots_of(superuser, "acme"), "a snapshot is signed")
        snapshots = await snapshots_of(superuser, "acme")
        assert [(row["from_seq"], row["to_seq"]) for row in snapshots] == [(1, 3)]
        assert_snapshots_cover(snapshots, await links_of(chains, "acme"))


async def test_between_two_looks_at_the_trees_only_a_few_tenants_get_snapshots(
    run_node: RunNode, make_settings: MakeSettings, superuser: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    # So that checkpoints do not wait while snapshots of thousands of tenants are due at once.
    tenants, steps = [f"tenant-{number}" for number in range(7)], [""]
    sign, take_due = Notary._sign, Notary._take_due

    async def signed(notary: Notary, connection: asyncpg.Connection, names: Sequence[str]) -> None:
        steps[-1] += "s" * len(names)
        await sign(notary, connection, names)

    def due(notary: Notary) -> set[str]:
        steps.append("")
        return take_due(notary)

    monkeypatch.setattr(Notary, "_sign", signed)
    monkeypatch.setattr(Notary, "_take_due", due)
    monkeypatch.setattr(notary_module, "TENANTS_SIGNED_A_TURN", 2)
    async with run_node(make_settings(chain={"batch_interval": "100ms"})) as service:
        await asyncio.gather(*(write(service, tenant_id, 1) for tenant_id in tenants))

        async def all_signed() -> bool:
            signed = await superuser.fetchval("SELECT count(DISTINCT tenant_id) FROM scheduler.batch_snapshot")
            return bool(signed == len(tenants) + 1)

        await until(all_signed, "all have a snapshot, _system included")
    assert max(map(len, steps)) == 2


async def test_an_entry_chained_while_the_others_are_being_signed_is_signed_after_the_interval_too(
    shared: Shared, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    # What is not remembered is proved by tiles, and waits for them here.
    monkeypatch.setattr("app.write.followers.tree_follower.RECENT_LINKS_MAX", 0)
    superuser, notary = shared.superuser, shared.service.notary
    await write(shared.service, tenant, 1)
    await until(lambda: covered(superuser, tenant, 1), "a checkpoint covers it")
    async with superuser.transaction():
        await superuser.execute("LOCK TABLE scheduler.merkle_tile IN ACCESS EXCLUSIVE MODE")
        signing = asyncio.create_task(notary.sign_now(tenant))
        await until(lambda: waits_for_a_lock(superuser), "signing has begun")
        await write(shared.service, tenant, 1)
        half_a_second = {"batch_interval": timedelta(seconds=0.5)}
        monkeypatch.setattr(notary, "settings", notary.settings.model_copy(update=half_a_second))
    await signing

    async def signed_seq() -> int:
        return max((row["to_seq"] for row in await snapshots_of(superuser, tenant)), default=0)

    async def all_signed() -> bool:
        return await signed_seq() == 2

    await until(all_signed, "the second entry is signed")


async def waits_for_a_lock(superuser: asyncpg.Connection) -> bool:
    """Whether a statement of another session waits for a lock on tiles."""
    return bool(
        await superuser.fetchval(
            "SELECT count(*) FROM pg_locks WHERE NOT granted AND relation = 'scheduler.merkle_tile'::regclass"
        )
    )


async def test_signing_on_request_signs_the_rest_at_once_and_then_has_nothing_to_sign(
    shared: Shared, tenant: str
) -> None:
    service = shared.service
    await write(service, tenant, 13)
    made = await service.notary.sign_now(tenant)
    assert (made[-1]["to_seq"], made[-1]["tenant_id"]) == (13, tenant)
    assert await service.notary.sign_now(tenant) == []
    await write(service, tenant, 2)
    (row,) = await service.notary.sign_now(tenant)
    assert (row["from_seq"], row["to_seq"], row["entry_count"]) == (14, 15, 2)
    assert_snapshots_cover(await snapshots_of(shared.superuser, tenant), await links_of(shared.chains, tenant))


async def verdict_on(superuser: asyncpg.Connection, tenant_id: str, from_seq: int | None = None) -> Verdict:
    opener = partial(open_snapshot, keyring=Keyring(await public_keys(superuser)))
    async with consistent_reader(superuser, tenant_id) as reader:
        return await verify(reader, tenant_id=tenant_id, from_seq=from_seq, open_snapshot=opener)


async def stored_snapshots(superuser: asyncpg.Connection) -> list[asyncpg.Record]:
    return await superuser.fetch("SELECT * FROM scheduler.batch_snapshot WHERE tenant_id = 'acme' ORDER BY from_seq")


async def test_a_node_that_signs_no_snapshots_makes_them_unsigned_and_one_that_signs_again_signs_from_there_on(
    run_node: RunNode, make_settings: MakeSettings, superuser: asyncpg.Connection
) -> None:
    unsigned = {"sign_snapshots": False, "batch_size": 4}
    async with run_node(make_settings(chain=unsigned)) as service:
        await write(service, "acme", 9)
        await until(lambda: covered(superuser, "acme", 9), "a checkpoint covers all")
        await service.notary.sign_now("acme")
        rows = await stored_snapshots(superuser)
        assert [(row["to_seq"], row["dsse_envelope"]) for row in rows] == [(4, None), (8, None), (9, None)]
        await service.notary.sign_now("_system")
        assert service.notary.unsigned_age_s() == 0, "all are covered"
        await until(lambda: service.notary.signed_lsn == service.node.chained.lsn, "the WAL is covered")
        verdict = await verdict_on(superuser, "acme")
        assert verdict.verdicts["signatures"] == "not_checked"
        assert (verdict.signed_to.seq, verdict.is_valid) == (0, True)
        await write(service, "acme", 1)
        # Wherever a range begins: within a snapshot, with one, and behind the last.
        for from_seq in (2, 5, 9, 10):
            verdict = await verdict_on(superuser, "acme", from_seq)
            assert (verdict.verdicts["signatures"], verdict.is_valid) == ("not_checked", True)
    async with run_node(make_settings()) as service:
        await write(service, "acme", 1)
        (made,) = await service.notary.sign_now("acme")
        assert (made["from_seq"], made["to_seq"]) == (10, 11)
        columns = {name: rows[-1][name] for name in SNAPSHOT_COLUMNS[:-1]}
        claim = open_snapshot(made["dsse_envelope"], None).claim
        assert claim.previous_snapshot == hashlib.sha256(canonical.encode(columns)).hexdigest()
        verdict = await verdict_on(superuser, "acme")
        assert verdict.verdicts["signatures"] == "ok"
        assert verdict.signed_to.seq == 11
    async with run_node(make_settings(chain=unsigned)) as service:
        await write(service, "acme", 1)
        (made,) = await service.notary.sign_now("acme")
        assert (made["from_seq"], made["dsse_envelope"]) == (12, None)


async def test_a_signer_that_is_away_keeps_no_unsigned_snapshot_waiting(
    run_node: RunNode, make_settings: MakeSettings, superuser: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with run_node(make_settings(chain={"sign_snapshots": False, "batch_interval": "100ms"})) as service:
        monkeypatch.setattr(service.keys, "may_try", lambda: False)
        await write(service, "acme", 3)

        async def is_covered() -> bool:
            return [row["to_seq"] for row in await stored_snapshots(superuser)][-1:] == [3]

        await until(is_covered, "the rest is covered after the interval")


# --- many tenants ---------------------------------------------------------------------------------


async def all_covered(superuser: asyncpg.Connection, tenants: int) -> bool:
    """Whether every tenant but the system's has a checkpoint that covers all its entries."""
    covered = await superuser.fetchval(
        """
        SELECT count(*) FROM scheduler.merkle_head JOIN scheduler.chain_heads USING (tenant_id)
         WHERE tenant_id <> '_system' AND checkpoint IS NOT NULL AND tree_size = head_seq
        """
    )
    return bool(covered == tenants)


async def assert_kept_are_prefixes(superuser: asyncpg.Connection, kept: CheckpointJournal, at_least: int) -> None:
    """Every checkpoint beside the WAL covers so many entries, and is that of the beginning of its chain."""
    for tenant_id, note in kept.load_all().items():
        rows = await superuser.fetch(
            "SELECT chain_link FROM scheduler.scheduler_log WHERE tenant_id = $1 ORDER BY seq", tenant_id
        )
        signed = parse(parse_note(note).text)
        assert at_least <= signed.size <= len(rows)
        assert signed.root == naive_root([bytes.fromhex(row["chain_link"]) for row in rows[: signed.size]])


async def test_hundreds_of_tenants_that_grow_at_once_all_get_their_checkpoints(
    service: Service, superuser: asyncpg.Connection
) -> None:
    tenants = [f"tenant-{n:03d}" for n in range(200)]
    kept = service._started.checkpoints
    for size in (1, 2):
        drafts = [created(tenant, size) for tenant in tenants]
        await service.submitter.submit_lines(EventLines.of(drafts), durability=GLOBAL, key=None)
        await until(lambda: all_covered(superuser, 200), "all are covered")
        await until(lambda size=size: all(kept.size(tenant) == size for tenant in tenants), "all are kept")  # type: ignore[misc]
        await assert_kept_are_prefixes(superuser, kept, 1)
    assert service.notary.last_error is None


def trees_in_memory(service: Service) -> int:
    return sum(tenant.tree is not None for tenant in service.notary._tenants.values())


async def test_tenants_beyond_those_whose_trees_are_in_memory_are_followed_and_signed_all_the_same(
    run_node: RunNode, make_settings: MakeSettings, superuser: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.write.followers.tree_follower.TREES_CACHED_MAX", 5)
    monkeypatch.setattr("app.write.followers.notary.TENANTS_PER_TRANSACTION_MAX", 4)
    tenants = [f"tenant-{n:02d}" for n in range(30)]
    async with run_node(make_settings(chain={"batch_size": 2})) as service:
        for round_ in range(4):
            drafts = [created(tenant, round_) for tenant in tenants]
            await service.submitter.submit_lines(EventLines.of(drafts), durability=GLOBAL, key=None)
            await until(lambda: all_covered(superuser, 30), "all are covered")
            await until(lambda: trees_in_memory(service) <= 5 + 4 * TURNS_AT_ONCE_MAX, "the others are let go")
        for tenant in tenants:

            async def two(tenant: str = tenant) -> bool:
                return len(await snapshots_of(superuser, tenant)) == 2

            await until(two, f"{tenant} is signed")
        await assert_kept_are_prefixes(superuser, service._started.checkpoints, 1)
        assert service.notary.last_error is None


async def test_what_keeps_checkpoints_from_being_stored_is_told_as_long_as_it_lasts(
    run_server: RunServer, superuser: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.node.wiring.STATEMENT_TIMEOUT_S", 0.5)
    async with run_server() as client:

        async def said() -> str:
            detail: str | None = (await client.get("/readyz")).json()["checks"]["signing"]["detail"]
            return detail or ""

        async with superuser.transaction():
            await superuser.execute("LOCK TABLE scheduler.merkle_head IN ACCESS EXCLUSIVE MODE")
            assert (await client.post("/v1/jobs", json={"tenant_id": "acme"})).status_code == 201
            await until(said, "it is told under signing")
            assert await said() == "TimeoutError: no answer in time"

        async def is_well() -> bool:
            return not await said()

        await until(is_well, "nothing is wrong any more")


async def test_a_tenant_with_a_long_backlog_keeps_no_other_waiting(
    shared: Shared, tenant: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.write.followers.tree_follower.LINKS_PER_TURN", 5)
    superuser, beta = shared.superuser, f"{tenant}-beta"
    async with superuser.transaction():
        await superuser.execute("LOCK TABLE scheduler.merkle_head IN ACCESS EXCLUSIVE MODE")
        await write(shared.service, tenant, 150)
        await write(shared.service, beta, 3)
    await until(lambda: covered(superuser, beta, 3), "the short one is covered")
    behind = await checkpoint_of(superuser, tenant)
    assert behind is None or behind.size < 150
    await until(lambda: covered(superuser, tenant, 150), "the long one is covered")


@pytest.mark.parametrize("torn_bytes", [0, 100])
async def test_a_crash_between_checkpoints_in_postgres_and_those_beside_the_wal_leaves_prefixes_of_the_chains(
    run_node: RunNode,
    make_settings: MakeSettings,
    superuser: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
    torn_bytes: int,
) -> None:
    tenants = [f"tenant-{n}" for n in range(10)]
    alive, crashed = make_settings("alive"), make_settings("crashed")
    sync, rename = os.fdatasync, os.rename

    def no_sync(descriptor: int) -> None:
        if os.readlink(f"/proc/self/fd/{descriptor}").endswith(NAME):
            raise OSError(errno.EIO, "the disk is gone")
        sync(descriptor)

    def no_rename(source: Path, target: Path) -> None:
        if target.name == NAME:
            raise OSError(errno.EIO, "the disk is gone")
        rename(source, target)

    async with run_node(alive) as service:
        await service.submitter.submit_lines(
            EventLines.of([created(t, 1) for t in tenants]), durability=GLOBAL, key=None
        )
        kept = service._started.checkpoints
        await until(lambda: all(kept.size(tenant) == 1 for tenant in tenants), "all are kept")
        # What it wrote to its WAL after the copy, the copy would be found to lack.
        await service.key_changes.recorded.wait()
        with monkeypatch.context() as broken:
            broken.setattr("os.fdatasync", no_sync)
            broken.setattr("os.rename", no_rename)
            await service.submitter.submit_lines(
                EventLines.of([created(t, 2) for t in tenants]), durability=GLOBAL, key=None
            )
            await until(lambda: all_covered(superuser, 10), "the checkpoints are in Postgres")
            await until(lambda: service.notary.last_error, "the journal could not be written")
            assert {kept.size(tenant) for tenant in tenants} == {1}
            copy_running(alive.data_dir, crashed.data_dir)
    journal = wal_folder(crashed) / NAME
    journal.write_bytes(journal.read_bytes()[: -torn_bytes or None])
    async with run_node(crashed) as service:
        kept = service._started.checkpoints
        await assert_kept_are_prefixes(superuser, kept, 1)
        await until(lambda: all(kept.size(tenant) == 2 for tenant in tenants), "all are kept again")
        await assert_kept_are_prefixes(superuser, kept, 1)


# --- what is signed is what was chained -----------------------------------------------------------


async def test_a_row_edited_before_the_tree_follows_is_not_what_is_signed(shared: Shared, tenant: str) -> None:
    service, superuser, chains = shared.service, shared.superuser, shared.chains
    await write(service, tenant, 1)
    await until(lambda: covered(superuser, tenant, 1), "the tree is there")
    async with superuser.transaction():
        await superuser.execute("LOCK TABLE scheduler.merkle_head IN ACCESS EXCLUSIVE MODE")
        await write(service, tenant, 9)
        links = await links_of(chains, tenant)
        await edit(superuser, "chain_link = repeat('ab', 32)", 4, tenant)
    checkpoint = await until(lambda: covered(superuser, tenant, 10), "a checkpoint covers all")
    assert checkpoint.root == naive_root(links)
    await until(lambda: snapshots_of(superuser, tenant), "the batch is signed")
    assert_snapshots_cover(await snapshots_of(superuser, tenant), links)


EDITS = {
    "link": "chain_link = repeat('ab', 32)",
    "previous": "prev_chain_link = repeat('ab', 32)",
    "job": "job_id = 'another'",
    "payload": "payload = '{}'",
    "hlc": "t_hlc = '1:0:x', hlc_physical = 1, hlc_logical = 0, hlc_node = 'x'",
    "seq": "seq = 1000",
}
"""By the tenant whose row is edited."""


async def test_what_was_chained_while_nobody_could_sign_is_signed_after_a_restart_unless_it_was_edited(
    run_node: RunNode, make_settings: MakeSettings, chains: Chains, superuser: asyncpg.Connection
) -> None:
    settings = make_settings(shutdown_grace="1s", chain={"batch_interval": "100ms"})
    whole = {"acme": 700, "beta": 3, **{f"tenant-{n}": 4 for n in range(9)}}
    async with superuser.transaction():
        await superuser.execute("LOCK TABLE scheduler.merkle_head IN ACCESS EXCLUSIVE MODE")
        async with run_node(settings) as service:
            for tenant_id, size in {**whole, **dict.fromkeys(EDITS, 12)}.items():
                await write(service, tenant_id, size)
    for tenant_id, assignment in EDITS.items():
        await edit(superuser, assignment, 4, tenant_id)
    async with run_node(settings) as service:
        await until(lambda: service.node.unsigned.keys() >= EDITS.keys(), "the notary finds the rows")
        receipt = await service.submitter.submit(created("late", 1), key=None)
        assert receipt.chain is not None
        await until(lambda: covered(superuser, "late", 1), "the other tenant is signed")
        for tenant_id in EDITS:
            with pytest.raises(SigningUnavailableError):
                await service.notary.sign_now(tenant_id)
            assert await checkpoint_of(superuser, tenant_id) is None
            assert await snapshots_of(superuser, tenant_id) == []
        # Those that are damaged kept none of those in their transactions from being signed.
        for tenant_id, size in whole.items():
            await until(lambda name=tenant_id, size=size: covered(superuser, name, size), f"{tenant_id} is covered")  # type: ignore[misc]
        for tenant_id in ("acme", "beta"):
            links = await links_of(chains, tenant_id)
            checkpoint = await checkpoint_of(superuser, tenant_id)
            assert checkpoint is not None
            assert checkpoint.root == naive_root(links)
            await until(lambda name=tenant_id: snapshots_of(superuser, name), f"{tenant_id} has a snapshot")  # type: ignore[misc]
            assert_snapshots_cover(await snapshots_of(superuser, tenant_id), links)
        assert service.node.failure is None


async def test_a_restart_goes_on_from_what_is_whole_and_signs_nothing_of_a_tenant_whose_rows_were_edited(
    run_node: RunNode, make_settings: MakeSettings, rarely: Settings, chains: Chains, superuser: asyncpg.Connection
) -> None:
    async with run_node(rarely) as service:
        await write(service, "edited", 9)
        await until(lambda: covered(superuser, "edited", 9), "the tree follows")
        for tenant_id in ("whole", "forged"):
            await write(service, tenant_id, 7)
            await service.notary.sign_now(tenant_id)
        kept = service._started.checkpoints.load("whole")
    await edit(superuser, "chain_link = repeat('ab', 32)", 4, "edited")
    await superuser.execute(
        """
        INSERT INTO scheduler.batch_snapshot (tenant_id, from_seq, to_seq, snapshot_hlc, from_chain_link,
          to_chain_link, entry_count, merkle_root, dsse_envelope) VALUES ('forged', 8, 900, 'x', 'x', 'x', 1, 'x', '7');
        -- Its name leads to the file of another tenant.
        INSERT INTO scheduler.chain_heads SELECT './whole', head_seq, head_chain_link, head_hlc
          FROM scheduler.chain_heads WHERE tenant_id = 'whole'
        """
    )
    async with run_node(make_settings(chain={"batch_interval": "100ms"})) as service:
        with pytest.raises(SigningUnavailableError):
            await service.notary.sign_now("edited")
        assert await snapshots_of(superuser, "edited") == []
        await write(service, "forged", 1)
        with pytest.raises(SigningUnavailableError):
            await service.notary.sign_now("forged")
        await until(lambda: "forged" in service.node.unsigned, "the snapshot is met")
        assert "up to seq 900" in service.node.unsigned["forged"]
        await write(service, "beta", 1)
        await service.notary.sign_now("beta")
        assert await snapshots_of(superuser, "beta")
        assert service._started.checkpoints.load("whole") == kept
        for count in (1, 25):
            await write(service, "whole", count)
            await service.notary.sign_now("whole")
        assert service.node.failure is None
    snapshots = await snapshots_of(superuser, "whole")
    assert snapshots[-1]["to_seq"] == 33
    assert_snapshots_cover(snapshots, await links_of(chains, "whole"))


FLIP = "UPDATE scheduler.merkle_tile SET hashes = set_byte(hashes, 40, get_byte(hashes, 40) # 1)"


class Both(NamedTuple):
    """Two nodes, and the superuser of their database."""

    one: Service
    two: Service
    superuser: asyncpg.Connection


@pytest.fixture(scope="module")
def database_of_both(postgres: EmbeddedPostgres) -> Iterator[Database]:
    with fresh_database(postgres) as database:
        yield database


@pytest.fixture(scope="module")
async def both(make_shared_settings: MakeSettings, database_of_both: Database) -> AsyncIterator[Both]:
    """Two nodes that sign, of a ledger of their own."""

    @asynccontextmanager
    async def run(settings: Settings) -> AsyncIterator[Service]:
        async with running(settings, database_of_both.service_url) as (service, _services):
            yield service

    chain = {"batch_size": 7, "batch_interval": "100ms"}
    one, two = (make_shared_settings(name, chain=chain) for name in ("one", "two"))
    async with (
        run_two(run, one, two) as (first, second),
        connected_to(database_of_both.superuser_url) as superuser,
    ):
        yield Both(first, second, superuser)


async def test_two_nodes_that_sign_the_same_tenant_make_one_gapless_row_of_snapshots(both: Both, tenant: str) -> None:
    one, two, superuser = both
    chains = Chains(superuser)

    async def write_many(service: Service) -> None:
        for _ in range(10):
            await write(service, tenant, 3)

    await asyncio.gather(write_many(one), write_many(two), write_many(one))
    await until(lambda: covered(superuser, tenant, 90), "a checkpoint covers all")

    async def both_signed() -> bool:
        await asyncio.gather(write(one, tenant, 3), write(two, tenant, 3))
        return len({row["claim"].node_id for row in await snapshots_of(superuser, tenant)}) == 2

    await until(both_signed, "either has signed some of it")
    length = len(await chains.entries(tenant))

    async def all_signed() -> bool:
        return (await snapshots_of(superuser, tenant))[-1]["to_seq"] == length

    await until(lambda: covered(superuser, tenant, length), "a checkpoint covers all")
    await until(all_signed, "all is signed")
    assert one.node.failure is two.node.failure is None
    snapshots = await snapshots_of(superuser, tenant)
    links = await links_of(chains, tenant)
    assert_snapshots_cover(snapshots, links)
    assert len({row["claim"].node_id for row in snapshots}) == 2
    checkpoint = await checkpoint_of(superuser, tenant)
    assert checkpoint is not None
    assert checkpoint.root == naive_root(links)


async def test_a_node_keeps_a_checkpoint_of_what_it_chained_even_when_another_node_signs_first(
    both: Both, tenant: str
) -> None:
    node, quick, superuser = both
    kept = node._started.checkpoints
    await write(node, tenant, 1)
    await until(lambda: kept.size(tenant) == 1, "the checkpoint is kept")
    async with node.notary._tenants[tenant].lock:
        await write(node, tenant, 1)
        await write(quick, tenant, 1)
        await until(lambda: covered(superuser, tenant, 3), "the other node signs")
        assert kept.size(tenant) == 1
    await until(lambda: kept.size(tenant) == 3, "the checkpoint is kept")


async def test_what_is_kept_of_a_chain_does_not_go_back_to_an_older_checkpoint_of_another_node(
    both: Both, tenant: str
) -> None:
    one, two, superuser = both
    kept = one._started.checkpoints
    await write(two, tenant, 3)
    await until(lambda: covered(superuser, tenant, 3), "the other node signs")
    older = await superuser.fetchval("SELECT checkpoint FROM scheduler.merkle_head WHERE tenant_id = $1", tenant)
    anchors = {tenant: kept.newest(tenant)}
    await write(one, tenant, 3)
    await until(lambda: kept.size(tenant) == 6, "the checkpoint is kept")
    assert await one.notary.keep_followed({tenant: older}, anchors) == []
    assert kept.size(tenant) == 6
    # Else it would take its own entries above the older one for forged by now.
    for node, size in ((two, 9), (one, 12)):
        await write(node, tenant, 3)
        await until(lambda size=size: covered(superuser, tenant, size), "both sign on")  # type: ignore[misc]
    assert one.node.unsigned == {}


LOOSEN = "ALTER TABLE scheduler.merkle_head ALTER tree_size DROP NOT NULL, ALTER root_hash DROP NOT NULL"


DAMAGE = {
    "shorter": "UPDATE scheduler.merkle_head SET tree_size = tree_size - 2",
    "longer": "UPDATE scheduler.merkle_head SET tree_size = tree_size + 2",
    "empty": "UPDATE scheduler.merkle_head SET tree_size = NULL, root_hash = NULL, checkpoint = NULL",
    "headless": "DELETE FROM scheduler.merkle_head",
    "without-tiles": "DELETE FROM scheduler.merkle_tile",
    "flipped": FLIP,
}
"""By the tenant whose tree is damaged."""


async def test_a_stored_tree_that_was_damaged_is_made_again_from_the_chain(shared: Shared, tenant: str) -> None:
    service, superuser = shared.service, shared.superuser
    await superuser.execute(LOOSEN)
    for damage, change in DAMAGE.items():
        name = f"{tenant}-{damage}"
        await write(service, name, 9)
        await until(lambda name=name: covered(superuser, name, 9), "the tree follows")  # type: ignore[misc]
        await until(lambda name=name: service._started.checkpoints.size(name) == 9, "the checkpoint is kept")  # type: ignore[misc]
        trees = service.notary._tenants[name]
        async with trees.lock:
            trees.tree = None
            await superuser.execute(f"{change} WHERE tenant_id = '{name}'")
        await write(service, name, 1)
        await until(lambda name=name: covered(superuser, name, 10), "the tree follows again")  # type: ignore[misc]
        checkpoint = await checkpoint_of(superuser, name)
        assert checkpoint is not None
        assert (checkpoint.size, checkpoint.root) == (10, naive_root(await links_of(shared.chains, name)))
        assert service.node.failure is None
        assert not any(each.startswith(tenant) for each in service.node.unsigned)


async def test_a_tree_that_is_found_damaged_while_another_is_made_again_is_made_again_behind_it(
    shared: Shared, tenant: str, shared_database: Database
) -> None:
    notary, beta = shared.service.notary, f"{tenant}-beta"
    for tenant_id in (tenant, beta):
        await write(shared.service, tenant_id, 9)
        await notary.sign_now(tenant_id)
    async with connected_to(shared_database.superuser_url) as other, other.transaction():
        await other.execute("SELECT FROM scheduler.merkle_tile WHERE tenant_id = $1 FOR UPDATE", tenant)
        notary.rebuild(tenant)
        waiting = "SELECT count(*) > 0 FROM pg_locks WHERE NOT granted"
        await until(lambda: shared.superuser.fetchval(waiting), "the tree of one waits for the lock")
        notary.rebuild(beta)
        await until(lambda: beta not in notary._due, "it was looked at what the other needs")
    await until(lambda: not notary._tenants[beta].is_tree_damaged, "the other tree is made again", 10)


async def test_a_tree_whose_chain_is_not_the_one_that_was_signed_is_not_made_again(shared: Shared, tenant: str) -> None:
    one, superuser, beta = shared.service, shared.superuser, f"{tenant}-beta"
    await write(one, tenant, 9)
    await one.notary.sign_now(tenant)
    before = await checkpoint_of(superuser, tenant)
    await edit(superuser, "payload = '{}', payload_digest = encode(sha256('{}'::bytea), 'hex')", 4, tenant)
    await superuser.execute(FLIP + " WHERE tenant_id = $1", tenant)
    one.notary.rebuild(tenant)
    await until(lambda: tenant in one.node.unsigned, "the broken row is met")
    assert "link at seq 4" in one.node.unsigned[tenant]
    await write(one, tenant, 1)
    await write(one, beta, 1)
    await until(lambda: covered(superuser, beta, 1), "the other tenant is signed")
    assert await checkpoint_of(superuser, tenant) == before
    assert one.node.failure is None


# --- how far the WAL is signed --------------------------------------------------------------------


async def turns(service: Service, superuser: asyncpg.Connection) -> None:
    """Let the notary have three full turns: one entry after the other, each covered by a checkpoint."""
    for _ in range(3):
        await write(service, "clock", 1)
        size = await superuser.fetchval("SELECT head_seq FROM scheduler.chain_heads WHERE tenant_id = 'clock'")
        await until(lambda size=size: covered(superuser, "clock", size), "a turn passes")
    await service.notary.sign_now("clock")


async def test_signed_lsn_rises_only_when_every_tenant_is_signed(
    run_node: RunNode, rarely: Settings, chains: Chains, superuser: asyncpg.Connection
) -> None:
    async with run_node(rarely) as service:
        receipt = await service.submitter.submit(created("acme", 1), key=None)
        await write(service, "beta", 3)
        await until(chains.key_recorded, "the node has recorded its key")
        lsn = service.node.chained.lsn
        for tenant in ("_system", "beta"):
            await turns(service, superuser)
            assert service.notary.signed_lsn < receipt.lsn
            await service.notary.sign_now(tenant)
        await turns(service, superuser)
        await service.notary.sign_now("_system")
        await turns(service, superuser)
        assert service.notary.signed_lsn < receipt.lsn

        await service.notary.sign_now("acme")
        await until(lambda: service.notary.signed_lsn >= lsn, "all that was chained then is signed")


async def test_what_an_earlier_process_left_unsigned_holds_signed_lsn_back(
    run_node: RunNode, rarely: Settings, superuser: asyncpg.Connection
) -> None:
    async with run_node(rarely) as service:
        await write(service, "acme", 3)
        await service.notary.sign_now("_system")
        last_lsn = service.node.chained.lsn
    async with run_node(rarely) as service:
        await turns(service, superuser)
        await service.notary.sign_now("_system")
        await turns(service, superuser)
        assert service.notary.signed_lsn < last_lsn
        await service.notary.sign_now("acme")
        await until(lambda: service.notary.signed_lsn >= last_lsn, "what was left is signed")


async def test_who_follows_and_who_keeps_checkpoints_of_others_do_not_wait_for_each_other(
    shared: Shared, tenant: str
) -> None:
    tenants = [f"{tenant}-{name}" for name in "abc"]
    for tenant_id in tenants:
        await write(shared.service, tenant_id, 1)
    notary, kept = shared.service.notary, shared.service.notary.checkpoints
    locks = [notary._memory.tenants[each].lock for each in tenants]
    await until(lambda: all(map(kept.load, tenants)) and not any(each.locked() for each in locks), "all are signed")
    lock, notes = locks[1], {name: kept.load(name) or "" for name in (tenants[2], tenants[1])}
    await lock.acquire()
    behind = asyncio.ensure_future(lock.acquire())
    await asyncio.sleep(0)
    following = asyncio.ensure_future(notary._in_turn(tenants, notary._follow))
    keeping = asyncio.ensure_future(notary.keep_followed(notes, {name: kept.newest(name) for name in notes}))
    # Both find it free, though it is handed to the one that waited.
    lock.release()
    await behind
    lock.release()
    async with asyncio.timeout(60):
        await following
        assert sorted(await keeping) == tenants[1:]
