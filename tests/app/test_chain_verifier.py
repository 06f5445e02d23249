"""The service's own verification: on request, from where it was verified before, and by itself."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import cast

import asyncpg
import pytest
import structlog

from app.read.verification import POSITIONS_FILE_NAME, ChainVerifier, Position, VerifiedPositions
from app.runtime.metrics import Metrics
from app.runtime.state.found_breaks import FoundBreaks
from app.runtime.state.kept_files import LastVerified
from app.write.pending.keyed_entries import are_rows_whole
from ledger.errors import TenantNotFoundError
from ledger.verification import Anchor, TreeHead
from ledger.verification.range_check import SEQ_MAX
from ledger.verification.verdict import Break
from signing.keys import Keyring
from tests.app.chain_builder import insert
from tests.app.chains import until
from tests.conftest import Database
from tests.ledger.ledger_in_memory import SIGNER, build

LEDGER = build(60, snapshots_to=(20, 40))


class Setting:
    """A verifier, and what it was given."""

    def __init__(self, pool: asyncpg.Pool, database_url: str, folder: Path) -> None:
        self.held: dict[str, list[TreeHead]] = {}
        self.said: list[Anchor] = []
        self.ring = Keyring.of([SIGNER.public_key_pem])
        self.admitted: Keyring | None = None
        """The keys that count from when a verification has asked for them."""
        self.metrics = Metrics()
        self.breaks = FoundBreaks(folder)
        self.verifier = ChainVerifier(
            pool=pool,
            database_url=database_url,
            keyring=self.keyring,
            keyring_fault=lambda: None,
            checkpoints=lambda tenant_id, _keyring: self.held.get(tenant_id, []),
            anchors=self.anchors,
            positions=VerifiedPositions(folder),
            breaks=self.breaks,
            last_verified=LastVerified(folder),
            metrics=self.metrics,
            are_key_rows_whole=are_rows_whole,
            origin=lambda tenant_id: f"tallystick.example/{tenant_id}",
        )

    async def anchors(self, _tenant_id: str, _keyring: object) -> list[Anchor]:
        self.ring = self.admitted or self.ring
        return self.said

    async def keyring(self) -> Keyring:
        return self.ring

    def counted(self, name: str) -> float | None:
        return self.metrics.registry.get_sample_value(name)


@pytest.fixture
async def setting(pool: asyncpg.Pool, database: Database, tmp_path: Path, superuser: asyncpg.Connection) -> Setting:
    await superuser.execute("SET session_replication_role = replica")
    await insert(superuser, LEDGER)
    return Setting(pool, database.service_url, tmp_path)


async def append(superuser: asyncpg.Connection) -> None:
    """Put the ledger, grown to 80 entries and signed to 75, in place of the first."""
    for table in ("scheduler_log", "batch_snapshot", "chain_heads", "merkle_head", "merkle_tile", "jobs"):
        await superuser.execute(f"DELETE FROM scheduler.{table}")
    await insert(superuser, build(80, snapshots_to=(20, 40, 75)))


async def test_a_full_verification_checks_all_and_compares_with_what_the_node_holds(setting: Setting) -> None:
    setting.held["acme"] = [LEDGER.checkpoint()]
    answer = (await setting.verifier.full("acme")).to_json()
    assert answer["valid"]
    assert set(answer["verdicts"].values()) == {"ok"}
    assert answer["compared_with"] == "node"
    assert answer["duration_ms"] > 0


async def test_a_key_that_is_admitted_and_signs_while_a_verification_begins_raises_no_alarm(setting: Setting) -> None:
    setting.ring, setting.admitted = Keyring([]), setting.ring
    assert (await setting.verifier.full("acme")).verdict.verdicts["signatures"] == "ok"
    assert setting.counted("scheduler_chain_verification_failures_total") == 0


async def test_a_chain_that_no_check_foresaw_is_a_break_and_not_only_a_line_of_the_log(setting: Setting) -> None:
    setting.held["acme"] = cast("list[TreeHead]", ["no tree head"])
    assert await setting.verifier.incremental_all() == []
    assert [(each.tenant_id, each.kind, each.met_by) for each in setting.breaks.open()] == [
        ("acme", "damaged", "verification")
    ]


async def test_a_tenant_of_which_nothing_is_left_and_nothing_was_signed_has_no_break_left(setting: Setting) -> None:
    setting.breaks.report("forged", Break(1, "link", "differs", "a", "b"), "read_job")
    with pytest.raises(TenantNotFoundError):
        await setting.verifier.full("forged")
    assert "mended, not acknowledged" in str(setting.breaks.fault())


async def test_a_range_can_be_asked_for(setting: Setting) -> None:
    verdict = (await setting.verifier.full("acme", 11, 30)).verdict
    assert (verdict.from_seq, verdict.to_seq, verdict.entries_checked) == (11, 30, 20)


async def test_a_range_can_begin_at_the_highest_seq_that_a_table_can_hold(
    setting: Setting, superuser: asyncpg.Connection
) -> None:
    nothing, as_behind_the_end = [(await setting.verifier.full("acme", seq)).verdict for seq in (SEQ_MAX, 61)]
    assert (nothing.entries_checked, nothing.verdicts) == (0, as_behind_the_end.verdicts)
    await superuser.execute("UPDATE scheduler.scheduler_log SET seq = $1 WHERE seq = 60", SEQ_MAX)
    for from_seq, count in ((SEQ_MAX, 1), (60, 1), (None, 60)):
        verdict = (await setting.verifier.full("acme", from_seq)).verdict
        assert (verdict.entries_checked, verdict.to_seq, verdict.verdicts["links"]) == (count, SEQ_MAX, "broken")


async def test_a_tenant_that_never_wrote_is_not_found(setting: Setting) -> None:
    with pytest.raises(TenantNotFoundError):
        await setting.verifier.full("nobody")


async def test_a_tenant_of_which_only_a_checkpoint_is_left_is_found_missing(
    setting: Setting, superuser: asyncpg.Connection
) -> None:
    for table in ("scheduler_log", "batch_snapshot", "chain_heads", "merkle_head", "merkle_tile", "jobs"):
        await superuser.execute(f"DELETE FROM scheduler.{table}")
    setting.held["acme"] = [LEDGER.checkpoint()]
    verdict = (await setting.verifier.full("acme")).verdict
    assert verdict.verdicts["checkpoint"] == "broken"


async def test_it_goes_on_behind_the_last_snapshot_that_was_verified(
    setting: Setting, superuser: asyncpg.Connection
) -> None:
    first = (await setting.verifier.incremental("acme")).verdict
    again = (await setting.verifier.incremental("acme")).verdict
    await append(superuser)
    grown = (await setting.verifier.incremental("acme")).verdict
    assert [first.from_seq, again.from_seq, grown.from_seq] == [1, 41, 41]
    assert grown.is_valid
    assert (await setting.verifier.incremental("acme")).verdict.from_seq == 76


async def test_where_it_was_verified_survives_a_restart(
    setting: Setting, pool: asyncpg.Pool, database: Database, tmp_path: Path
) -> None:
    await setting.verifier.full("acme")
    assert VerifiedPositions(tmp_path).by_tenant.get("acme") == Position(40, LEDGER.entry(40)["chain_link"])
    assert (await Setting(pool, database.service_url, tmp_path).verifier.incremental("acme")).verdict.from_seq == 41


async def test_a_range_in_the_middle_moves_no_position(setting: Setting, tmp_path: Path) -> None:
    await setting.verifier.full("acme", 21)
    assert VerifiedPositions(tmp_path).by_tenant.get("acme") is None


async def test_a_broken_chain_moves_no_position_and_is_logged_and_counted(
    setting: Setting, superuser: asyncpg.Connection, tmp_path: Path
) -> None:
    await superuser.execute("UPDATE scheduler.scheduler_log SET payload = '{}' WHERE seq = 50")
    with structlog.testing.capture_logs() as logs:
        verdict = (await setting.verifier.full("acme")).verdict
    assert not verdict.is_valid
    assert VerifiedPositions(tmp_path).by_tenant.get("acme") is None
    found = [entry for entry in logs if entry["event"] == "chain_break_found"]
    assert [(entry["tenant_id"], entry["first_break"]["kind"], entry["first_break"]["seq"]) for entry in found] == [
        ("acme", "payload-digest", 50)
    ]
    assert setting.counted("scheduler_chain_verifications_total") == 1
    assert setting.counted("scheduler_chain_verification_failures_total") == 1


async def test_a_verified_entry_rewritten_since_is_found_incrementally(
    setting: Setting, superuser: asyncpg.Connection
) -> None:
    await setting.verifier.incremental("acme")
    await superuser.execute(f"UPDATE scheduler.scheduler_log SET chain_link = '{'0' * 64}' WHERE seq = 40")
    found = (await setting.verifier.incremental("acme")).verdict.first_break
    assert found is not None
    assert (found.kind, found.seq) == ("link", 40)


async def test_all_tenants_are_verified_those_that_vanished_as_well(
    setting: Setting, superuser: asyncpg.Connection
) -> None:
    await insert(superuser, build(20, tenant_id="other"))
    assert [done.verdict.is_valid for done in await setting.verifier.incremental_all()] == [True, True]
    for table in ("scheduler_log", "batch_snapshot", "chain_heads", "merkle_head", "merkle_tile", "jobs"):
        await superuser.execute(f"DELETE FROM scheduler.{table} WHERE tenant_id = 'acme'")
    verdicts = {done.verdict.tenant_id: done.verdict for done in await setting.verifier.incremental_all()}
    assert verdicts["acme"].first_break is not None
    assert verdicts["acme"].first_break.kind == "tail-truncated"
    assert verdicts["other"].is_valid


async def test_it_verifies_at_start_and_again_after_every_interval(setting: Setting) -> None:
    running = asyncio.create_task(setting.verifier.run(0.01, on_start=True))
    try:
        await until(lambda: (setting.counted("scheduler_chain_verifications_total") or 0) >= 3, "three verifications")
    finally:
        running.cancel()


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"{",
        b"[]",
        b'{"version":2,"tenants":{}}',
        b'{"version":1,"tenants":{"a":{}}}',
        b'{"version":1,"tenants":{"a":{"seq":"1","chain_link":""}}}',
    ],
)
async def test_a_damaged_file_of_positions_means_from_the_start_again(tmp_path: Path, content: bytes) -> None:
    (tmp_path / POSITIONS_FILE_NAME).write_bytes(content)
    positions = VerifiedPositions(tmp_path)
    assert positions.by_tenant == {}
    positions.advance("acme", Position(5, "ab" * 32))
    await positions.store()
    assert VerifiedPositions(tmp_path).by_tenant.get("acme") == Position(5, "ab" * 32)


def test_a_position_never_goes_back(tmp_path: Path) -> None:
    positions = VerifiedPositions(tmp_path)
    assert positions.advance("acme", Position(5, "ab" * 32))
    assert not positions.advance("acme", Position(4, "cd" * 32))
    assert positions.by_tenant.get("acme") == Position(5, "ab" * 32)
