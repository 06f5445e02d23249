"""The archive that fills itself: a step archives what was signed since, one process at a time, whatever dies."""

from __future__ import annotations

import shutil
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from objects.store import ArchiveStore
from pipeline.archive.reader import TenantArchive, ranges_of, verify_tenant
from pipeline.archive.table_reader import verify_table
from pipeline.archiving.continuous import TURN_LOST_S, Archiver, Progress
from signing.keys import Keyring
from tests.conftest import Database
from tests.ledger.ledger_in_memory import SIGNER, STRANGER
from tests.pipeline.archived_ledgers import RING, days, ledger_of, query, store


@contextmanager
def archiver(database: Database, folder: Path) -> Iterator[Archiver]:
    made = Archiver(database.service_url, ArchiveStore(str(folder)))
    try:
        yield made
    finally:
        made.close()


def archived(progress: Progress) -> dict[str, tuple[int, int]]:
    return {each.tenant_id: (each.archived_seq, each.signed_seq) for each in progress.tenants}


async def test_steps_archive_what_was_signed_since_and_the_table_has_all_of_it(
    database: Database, tmp_path: Path
) -> None:
    place, acme = ArchiveStore(str(tmp_path)), ledger_of("acme", days(25))
    await store(database, acme, ledger_of("beta", days(10)))
    with archiver(database, tmp_path) as ours:
        first = ours.step(SIGNER, RING)
        await store(database, ledger_of("acme", days(20, 25), start=acme))
        second, third = ours.step(SIGNER, RING), ours.step(SIGNER, RING)

    assert archived(first) == {"acme": (20, 20), "beta": (10, 10)}
    assert archived(second) == archived(third) == {"acme": (40, 40), "beta": (10, 10)}
    assert [each.files > 0 for each in (first, second, third)] == [True, True, False]
    assert (third.has_turn, third.error, third.failures, third.table_version) == (True, None, 0, 2)
    assert third.lag_s(time.monotonic() + 9) == 0.0
    assert ranges_of(place, "acme") == [(1, 20), (21, 40)]
    assert (await verify_tenant(place, "acme", RING))["valid"]
    sealed = {each: TenantArchive.read(place, each, RING).sealed for each in ("acme", "beta")}
    assert verify_table(place, sealed, RING)["verdict"] == "ok"


class Counting(ArchiveStore):
    """A place that counts what is read of it."""

    def __init__(self, url: str) -> None:
        super().__init__(url)
        self.read_names: Counter[str] = Counter()

    def read(self, name: str, bytes_max: int) -> bytes | None:
        self.read_names[name] += 1
        return super().read(name, bytes_max)

    def chunks(self, name: str) -> Iterator[bytes]:
        self.read_names[name] += 1
        return super().chunks(name)


async def test_a_step_reads_back_what_it_wrote_once_and_of_the_steps_before_the_last_manifest(
    database: Database, tmp_path: Path
) -> None:
    place, acme = Counting(str(tmp_path)), ledger_of("acme", days(25))
    await store(database, acme)
    ours = Archiver(database.service_url, place)
    try:
        ours.step(SIGNER, RING)
        before = {each.relative_to(tmp_path).as_posix() for each in tmp_path.rglob("*") if each.is_file()}
        place.read_names.clear()
        await store(database, ledger_of("acme", days(20, 25), start=acme))
        progress = ours.step(SIGNER, RING)
    finally:
        ours.close()

    assert archived(progress) == {"acme": (40, 40)}
    lists = {each for each in before if each.startswith("metadata/snap-")}
    (newest,) = (each for each in before if each.startswith("manifests/"))
    assert (place.read_names.keys() & before) - lists == {newest}
    assert place.read_names[newest] == 1
    assert {count for name, count in place.read_names.items() if name.endswith(".parquet")} == {1}


async def test_only_one_process_archives_and_the_next_takes_over_when_it_ends(
    database: Database, tmp_path: Path
) -> None:
    acme = ledger_of("acme", days(10))
    await store(database, acme)
    with archiver(database, tmp_path) as first, archiver(database, tmp_path) as second:
        assert first.step(SIGNER, RING).has_turn
        waiting = second.step(SIGNER, RING)
        assert (waiting.has_turn, waiting.error, waiting.tenants) == (False, None, ())
        assert archived(second.look()) == {"acme": (10, 10)}
        first.close()
        await store(database, ledger_of("acme", days(10, 10), start=acme))

        assert archived(second.step(SIGNER, RING)) == {"acme": (20, 20)}


async def test_the_session_of_the_turn_ends_soon_after_the_machine_that_has_it(
    database: Database, tmp_path: Path
) -> None:
    """PostgreSQL would notice after two hours."""
    with archiver(database, tmp_path) as ours:
        ours.step(SIGNER, RING)
        names = ("tcp_keepalives_idle", "tcp_keepalives_interval", "tcp_keepalives_count", "tcp_user_timeout")
        idle_s, interval_s, count, user_timeout_ms = (
            int(value)
            for ((value,),) in (
                ours._open().connection.rows(f"SELECT setting FROM pg_settings WHERE name = '{each}'") for each in names
            )
        )

    assert idle_s + interval_s * count <= TURN_LOST_S
    assert user_timeout_ms <= TURN_LOST_S * 1000


async def test_two_that_archive_at_once_all_the_same_make_one_chain_of_manifests(
    database: Database, tmp_path: Path
) -> None:
    """The turn is a convenience: names that are written once decide."""
    acme = ledger_of("acme", days(10))
    await store(database, acme)
    with archiver(database, tmp_path) as first, archiver(database, tmp_path) as second:
        first.step(SIGNER, RING)
        second._has_turn = True
        second.step(SIGNER, RING)
        await store(database, ledger_of("acme", days(20, 10), start=acme))
        second.step(SIGNER, RING)
        outdated = first.step(SIGNER, RING)

    assert archived(outdated) == {"acme": (30, 30)}
    assert outdated.failures == 0
    assert (await verify_tenant(ArchiveStore(str(tmp_path)), "acme", RING))["valid"]


async def test_a_place_that_is_away_is_an_error_and_the_lag_grows_until_it_is_back(
    database: Database, tmp_path: Path
) -> None:
    acme = ledger_of("acme", days(10))
    await store(database, acme)
    folder = tmp_path / "archive"
    folder.write_text("no folder")
    with archiver(database, folder) as ours:
        away = ours.step(SIGNER, RING)
        folder.unlink()
        back = ours.step(SIGNER, RING)

    assert away.error is not None
    assert "cannot be written to" in away.error
    assert (away.failures, back.failures) == (1, 0)
    assert archived(back) == {"acme": (10, 10)}


async def test_a_place_that_was_away_while_another_was_written_in_its_stead_gets_no_gap(
    database: Database, tmp_path: Path
) -> None:
    folder, away = tmp_path / "archive", tmp_path / "away"
    await store(database, ledger_of("acme", days(10)))
    with archiver(database, folder) as ours:
        ours.step(SIGNER, RING)
        folder.rename(away)  # as a disk that is mounted there no longer
        folder.mkdir()
        await store(database, ledger_of("acme", days(20)))
        (found,) = ours.step(SIGNER, RING).tenants
        assert found.error is not None
        assert "is missing from the archive" in found.error
        assert ranges_of(ArchiveStore(str(folder)), "acme") == []
        shutil.rmtree(folder)
        away.rename(folder)
        back = ours.step(SIGNER, RING)

    assert (back.failures, archived(back)) == (0, {"acme": (20, 20)})
    place = ArchiveStore(str(folder))
    assert (await verify_tenant(place, "acme", RING))["valid"]
    sealed = {"acme": TenantArchive.read(place, "acme", RING).sealed}
    assert verify_table(place, sealed, RING)["verdict"] == "ok"


async def test_a_tenant_with_a_changed_row_is_named_and_stops_no_other(database: Database, tmp_path: Path) -> None:
    await store(database, ledger_of("acme", days(10)), ledger_of("beta", days(10)))
    await query(database, "UPDATE scheduler.scheduler_log SET payload = '{}' WHERE tenant_id = 'acme' AND seq = 4")
    with archiver(database, tmp_path) as ours:
        progress = ours.step(SIGNER, RING)

    acme, beta = progress.tenants
    assert (acme.archived_seq, acme.lag_entries, beta.archived_seq) == (0, 10, 10)
    assert acme.error is not None
    assert acme.error.startswith("payload-digest at seq 4")
    assert (progress.failures, progress.lag_entries) == (1, 10)
    assert progress.lag_s(progress.at_s + 5) >= 5


async def test_a_tenant_whose_manifests_have_a_gap_is_named_and_stops_no_other(
    database: Database, tmp_path: Path
) -> None:
    for end in (10, 20):
        await store(database, ledger_of("acme", days(end)), ledger_of("beta", days(10)))
        with archiver(database, tmp_path) as ours:
            ours.step(SIGNER, RING)
    min((tmp_path / "manifests" / "acme").iterdir()).unlink()
    await store(database, ledger_of("beta", days(20)))
    with archiver(database, tmp_path) as ours, archiver(database, tmp_path) as other:
        for progress in (ours.step(SIGNER, RING), ours.step(SIGNER, RING), other.look()):
            acme, beta = progress.tenants
            assert acme.error is not None
            assert "where one from 1 must follow" in acme.error
            assert (acme.lag_entries, beta.error, archived(progress)["beta"]) == (20, None, (20, 20))


async def test_a_key_that_is_not_admitted_signs_nothing(database: Database, tmp_path: Path) -> None:
    await store(database, ledger_of("acme", days(10)))
    with archiver(database, tmp_path) as ours:
        progress = ours.step(SIGNER, Keyring([STRANGER.public_key]))

    assert progress.error is not None
    assert "not admitted" in progress.error
    assert not progress.has_turn
    assert not list(tmp_path.iterdir())


async def test_what_was_archived_may_leave_the_ledger_and_archiving_goes_on(database: Database, tmp_path: Path) -> None:
    place, acme = ArchiveStore(str(tmp_path)), ledger_of("acme", days(20))
    await store(database, acme)
    with archiver(database, tmp_path) as ours:
        ours.step(SIGNER, RING)
        await store(database, ledger_of("acme", days(20, 20), start=acme))
        await query(database, "DELETE FROM scheduler.scheduler_log WHERE tenant_id = 'acme' AND seq <= 20")

        progress = ours.step(SIGNER, RING)

    assert (progress.failures, archived(progress)) == (0, {"acme": (40, 40)})
    assert (await verify_tenant(place, "acme", RING))["valid"]


class Losing(ArchiveStore):
    """A place that loses what it acknowledged of some names."""

    def __init__(self, url: str, lost: str) -> None:
        super().__init__(url)
        self._lost = lost

    def read(self, name: str, bytes_max: int) -> bytes | None:
        return None if self._lost in name else super().read(name, bytes_max)

    def digest(self, name: str) -> tuple[str, int]:
        return ("0" * 64, 1) if self._lost in name else super().digest(name)


@pytest.mark.parametrize("lost", [".parquet", "manifests/", "table/"])
async def test_what_a_place_acknowledged_and_lost_does_not_count_as_archived(
    database: Database, tmp_path: Path, lost: str
) -> None:
    await store(database, ledger_of("acme", days(10)))
    ours = Archiver(database.service_url, Losing(str(tmp_path), lost))
    try:
        progress = ours.step(SIGNER, RING)
    finally:
        ours.close()

    assert progress.error is not None
    assert "was written, and what is read back is another object or none" in progress.error
    if lost == ".parquet":
        assert ranges_of(ArchiveStore(str(tmp_path)), "acme") == []
