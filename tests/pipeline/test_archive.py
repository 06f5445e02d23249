"""Archiving: what comes to be written, once and for all, whatever happens on the way."""

from __future__ import annotations

import asyncio
import fcntl
import io
import os
import random
import threading
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import IO, Any

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger import merkle
from ledger.errors import ArchiveUnavailableError, ConfigurationError
from ledger.verification.entry_check import ENTRY_COLUMNS
from ledger.verification.snapshot_check import SNAPSHOT_COLUMNS
from objects.store import ArchiveStore
from pipeline.archive import FileName, Manifest, month_after, month_of, open_manifest, parquet
from pipeline.archive.parquet import ENTRY_FILE_SCHEMA, FileWriter
from pipeline.archive.reader import TenantArchive, tenants_of
from pipeline.archive.table_reader import verify_table
from pipeline.archiving import plan
from pipeline.archiving.filing import FileTask, Outcome, UnjudgedBreak, file_each
from pipeline.archiving.filing import Ledger as PostgresLedger
from pipeline.archiving.plan import Stretch, cut
from signing.checkpoint import Checkpoint, sign_checkpoint
from signing.keys import Keyring
from tests.conftest import Database
from tests.ledger.ledger_in_memory import SIGNER, STRANGER, Ledger, link_of, payload_digest
from tests.pipeline.archived_ledgers import (
    DAY_MS,
    JANUARY_MS,
    LOG_ORIGIN,
    RING,
    archive_at,
    archive_by,
    archive_here,
    content_of,
    days,
    file_here,
    ledger_of,
    query,
    store,
    without_table,
)
from tests.pipeline.archiving_process import archive_and_die

ROUNDS = int(os.environ.get("TORTURE_ROUNDS") or 3)


def manifests_of(folder: Path, tenant_id: str = "acme") -> list[Manifest]:
    files = sorted((folder / "manifests" / tenant_id).iterdir())
    return [open_manifest(file.read_bytes(), RING).manifest for file in files]


def rows_of(folder: Path, kind: str, tenant_id: str = "acme") -> list[tuple[object, ...]]:
    """All rows of the archive, in the order of their files' names, which need not be that of the folders."""
    files = sorted((folder / kind / f"tenant_id={tenant_id}").rglob("*.parquet"), key=lambda file: file.name)
    return [tuple(row.values()) for file in files for row in pq.ParquetFile(file).read().to_pylist()]


# --- what is written ------------------------------------------------------------------------------------


async def test_an_archive_holds_every_signed_row_once_and_its_manifest_says_so(
    database: Database, tmp_path: Path
) -> None:
    ledger = ledger_of("acme", days(57))
    await store(database, ledger, ledger_of("other", days(10)))
    done = archive_here(database, tmp_path)
    assert [(each.tenant_id, each.from_seq, each.to_seq, each.files) for each in done] == [
        ("acme", 1, 50, 3),
        ("other", 1, 10, 2),
    ]
    signed = [tuple(row[column] for column in ENTRY_COLUMNS) for row in ledger.entries[:50]]
    assert rows_of(tmp_path, "entries") == signed
    assert rows_of(tmp_path, "snapshots") == [
        tuple(row[column] for column in SNAPSHOT_COLUMNS) for row in ledger.snapshots
    ]
    (manifest,) = manifests_of(tmp_path)
    assert (manifest.from_chain_link, manifest.to_chain_link) == (signed[0][9], signed[49][9])
    assert manifest.tree_root == merkle.root(ledger.leaf_hashes(1, 50)).hex()
    content = content_of(tmp_path)
    for file in manifest.files:
        assert (file.sha256, file.bytes) == (sha256(content[file.name]).hexdigest(), len(content[file.name]))
    assert [file.name.split("/")[2] for file in manifest.entry_files] == ["month=2024-01", "month=2024-02"]


async def test_a_second_run_adds_what_is_new_and_leaves_the_rest(database: Database, tmp_path: Path) -> None:
    ledger = ledger_of("acme", days(33))
    await store(database, ledger)
    archive_here(database, tmp_path)
    first = content_of(tmp_path)
    (nothing,) = archive_here(database, tmp_path)
    assert (nothing.from_seq, nothing.to_seq, content_of(tmp_path)) == (31, 30, first)
    await store(database, ledger_of("acme", days(30, 33), start=ledger))
    (more,) = archive_here(database, tmp_path)
    assert (more.from_seq, more.to_seq) == (31, 60)
    assert first.items() <= content_of(tmp_path).items()
    before, after = manifests_of(tmp_path)
    assert after.previous_manifest is not None
    assert after.tree_root == merkle.root(ledger.leaf_hashes(1, 60)).hex()
    assert [row[0] for row in rows_of(tmp_path, "entries")] == list(range(1, 61))
    assert (before.to_seq, after.from_seq) == (30, 31)


async def test_entries_from_earlier_times_stay_in_the_month_of_those_before_them(
    database: Database, tmp_path: Path
) -> None:
    imported = [JANUARY_MS - 900 * DAY_MS + n for n in range(10)]
    await store(database, ledger_of("acme", [*days(10), *imported, *days(20, 10)]))
    archive_here(database, tmp_path)
    (manifest,) = manifests_of(tmp_path)
    names = [file.parsed for file in manifest.entry_files]
    assert [(name.month, name.from_seq, name.to_seq) for name in names] == [("2024-01", 1, 31), ("2024-02", 32, 40)]


def test_files_end_at_multiples_of_their_rows_at_months_and_before_they_grow_too_long(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(plan, "FILE_ROWS_MAX", 100)
    monkeypatch.setattr(plan, "FILE_STORED_BYTES", 1000)
    physical = dict.fromkeys(range(41, 351), JANUARY_MS) | {seq: month_after(JANUARY_MS) for seq in range(333, 351)}
    stretches = [
        Stretch(first, last, weight, max(physical[seq] for seq in range(first, last + 1)))
        for first, last, weight in [
            (41, 50, 10),
            *((first, first + 49, 600 if first < 200 else 100) for first in range(51, 351, 50)),
        ]
    ]

    def first_at_or_after(from_seq: int, to_seq: int, ms: int) -> tuple[int, int]:
        return next((seq, physical[seq]) for seq in range(from_seq, to_seq + 1) if physical[seq] >= ms)

    files = list(cut("acme", stretches, None, first_at_or_after))
    spans = [(name.from_seq, name.to_seq) for name in files]
    assert spans == [(41, 100), (101, 150), (151, 200), (201, 300), (301, 332), (333, 350)]
    assert [name.month for name in files] == ["2024-01"] * 5 + ["2024-02"]


def test_months_are_those_of_the_calendar_for_any_time_an_entry_can_have() -> None:
    assert (month_of(0), month_of(JANUARY_MS), month_of(2**53 - 1)) == ("1970-01", "2024-01", "287396-10")
    assert month_of(month_after(JANUARY_MS) - 1) == "2024-01"
    assert month_of(month_after(JANUARY_MS)) == "2024-02"
    far = FileName("acme", 1, 2, month_of(2**53 - 1))
    assert FileName.parse(far.path()) == far


@given(physical_ms=st.integers(0, 2**53 - 1))
def test_a_month_is_the_one_that_numpy_knows(physical_ms: int) -> None:
    month = np.datetime64(physical_ms, "ms").astype("datetime64[M]")

    assert month_of(physical_ms) == str(month)
    assert month_after(physical_ms) == (month + 1).astype("datetime64[ms]").astype(int)


@pytest.mark.parametrize("group_bytes", [1 << 20, 200])
def test_the_same_rows_give_the_same_bytes_however_they_arrive(
    monkeypatch: pytest.MonkeyPatch, group_bytes: int
) -> None:
    monkeypatch.setattr(parquet, "GROUP_BYTES_MAX", group_bytes)
    monkeypatch.setattr(parquet, "GROUP_ROWS", 64)
    rows = ledger_of("acme", days(200)).entries[10:]
    table = pa.Table.from_pylist([{name: row[name] for name in ENTRY_COLUMNS} for row in rows])
    made = set()
    for batch_rows in (1, 7, 64, 1000):
        local = io.BytesIO()
        writer = FileWriter(local, ENTRY_FILE_SCHEMA)
        for batch in table.to_batches(max_chunksize=batch_rows):
            writer.add(batch)
        written = writer.finish("a")
        assert (written.sha256, written.rows) == (sha256(local.getvalue()).hexdigest(), 190)
        made.add(local.getvalue())
    assert len(made) == 1
    metadata = pq.ParquetFile(local).metadata
    counts = [metadata.row_group(number).num_rows for number in range(metadata.num_row_groups)]
    assert counts == [54, 64, 64, 8] if group_bytes > 1000 else max(counts) < 10


async def test_of_the_tenants_asked_for_those_are_signed_that_have_a_snapshot(database: Database) -> None:
    ledgers = [ledger_of("acme", days(25)), ledger_of("other", days(12)), ledger_of("unsigned", days(3))]
    await store(database, *ledgers)
    with PostgresLedger.connected(database.service_url) as ledger:
        found = {each.tenant_id: each.signed_seq for each in ledger.signed()}
        assert found == {"acme": 20, "other": 10}
        assert [each.tenant_id for each in ledger.signed(["other", "unsigned", "nobody"])] == ["other"]
        assert ledger.signed([]) == []


async def test_a_ledger_whose_columns_were_altered_is_not_archived(database: Database, tmp_path: Path) -> None:
    await store(database, ledger_of("acme", days(20)))
    await query(database, "DROP VIEW scheduler.log_entries")
    await query(database, "ALTER TABLE scheduler.scheduler_log ALTER hlc_physical TYPE text")
    with pytest.raises(ConfigurationError, match=r"column hlc_physical of scheduler.scheduler_log was made type text"):
        archive_here(database, tmp_path)
    assert content_of(tmp_path) == {}


async def test_rows_come_from_the_database_a_few_at_a_time(database: Database, monkeypatch: pytest.MonkeyPatch) -> None:
    await store(database, ledger_of("acme", days(100)))
    monkeypatch.setattr("pipeline.places.postgres.BATCH_BYTES_HINT", 4000)
    with PostgresLedger.connected(database.service_url) as ledger:
        counts = [batch.num_rows for batch in ledger.entries("acme", 5, 90)]
        assert (sum(counts), max(counts) < 20) == (86, True)


# --- killed, and at once --------------------------------------------------------------------------------


def verified_table(folder: Path) -> dict[str, Any]:
    place = ArchiveStore(str(folder))
    return verify_table(place, {each: TenantArchive.read(place, each, RING).sealed for each in tenants_of(place)}, RING)


@pytest.mark.torture
async def test_killed_at_any_point_and_run_again_the_archive_is_the_same(database: Database, tmp_path: Path) -> None:
    await store(database, ledger_of("acme", days(43)), ledger_of("other", days(12)))
    calls = archive_and_die(database.service_url, tmp_path / "whole")
    whole = without_table(tmp_path / "whole")
    seed = int(os.environ.get("SEED") or random.SystemRandom().randrange(2**32))
    print(f"SEED={seed}")
    chance = random.Random(seed)
    for number in range(ROUNDS):
        folder = tmp_path / str(number)
        kills = [chance.randrange(1, calls) for _ in range(chance.choice((1, 1, 3)))]
        for at_call in kills:
            archive_and_die(database.service_url, folder, at_call)
            folder.mkdir(exist_ok=True)
            assert without_table(folder).items() <= whole.items(), f"killed at {kills} of {calls}"
            assert verified_table(folder)["verdict"] in ("absent", "behind", "ok"), f"killed at {kills} of {calls}"
        archive_and_die(database.service_url, folder)
        assert without_table(folder) == whole, f"killed at {kills} of {calls}"
        assert verified_table(folder)["verdict"] == "ok", f"killed at {kills} of {calls}"
        assert not list((folder / ".writing").iterdir())


class MeetingStore(ArchiveStore):
    """A store that writes the first objects of each run only once every run is about to write its own."""

    def __init__(self, url: str, meeting: threading.Barrier, times: int) -> None:
        super().__init__(url)
        self._meeting, self._left = meeting, times

    def create(self, name: str, source: IO[bytes]) -> bool:
        if self._left:
            self._left -= 1
            self._meeting.wait(60)
        return super().create(name, source)


async def test_runs_at_once_make_one_archive(database: Database, tmp_path: Path) -> None:
    await store(database, *(ledger_of(f"tenant-{number}", days(25)) for number in range(6)))
    archive_here(database, tmp_path / "alone")
    meeting = threading.Barrier(3)

    def run() -> None:
        both = MeetingStore(str(tmp_path / "both"), meeting, 3)
        with PostgresLedger.connected(database.service_url) as ledger:
            archive_by(ledger, both, SIGNER, RING, lambda names: list(file_each(names, ledger, both)))

    with ThreadPoolExecutor(meeting.parties) as threads:
        for ended in [threads.submit(run) for _ in range(meeting.parties)]:
            ended.result()
    assert content_of(tmp_path / "both") == content_of(tmp_path / "alone")


def test_a_run_that_begins_takes_no_file_from_one_at_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    at_work, locked, lock = ArchiveStore(str(tmp_path)), list[int](), fcntl.flock

    def lock_late(file: IO[bytes], how: int) -> None:
        locked.append(how)
        if len(locked) == 1:
            ArchiveStore(str(tmp_path)).prepare()
        lock(file, how)

    monkeypatch.setattr(fcntl, "flock", lock_late)
    assert at_work.create("plans/one.json", io.BytesIO(b"{}"))
    assert locked[1:] == [fcntl.LOCK_EX | fcntl.LOCK_NB, fcntl.LOCK_EX], "it was taken, and made again"
    assert content_of(tmp_path) == {"plans/one.json": b"{}"}
    assert list((tmp_path / ".writing").iterdir()) == []


class FailingStore(ArchiveStore):
    """A store that does not take the object with this number, whole or cut short by who reads it."""

    def __init__(self, url: str, at: int) -> None:
        super().__init__(url)
        self._left = at

    def create(self, name: str, source: IO[bytes]) -> bool:
        self._left -= 1
        return super().create(name, _Failing() if self._left == 0 else source)


class _Failing(io.BytesIO):
    def read(self, *_: object) -> bytes:
        raise OSError("the disk went away")


async def test_a_store_that_fails_in_the_middle_ends_the_run_and_the_next_one_finishes_it(
    database: Database, tmp_path: Path
) -> None:
    await store(database, ledger_of("acme", days(40)))
    archive_here(database, tmp_path / "whole")
    whole = content_of(tmp_path / "whole")
    for at in range(1, len(whole) + 1):
        folder = tmp_path / str(at)
        failing = FailingStore(str(folder), at)
        with PostgresLedger.connected(database.service_url) as ledger:

            def file_all(
                names: Sequence[FileTask], ledger: PostgresLedger = ledger, failing: FailingStore = failing
            ) -> list[Outcome]:
                return list(file_each(names, ledger, failing))

            with pytest.raises(ArchiveUnavailableError, match="the disk went away"):
                archive_by(ledger, failing, SIGNER, RING, file_all)
        assert len(content_of(folder)) == at - 1
        archive_here(database, folder)
        assert content_of(folder) == whole


async def test_a_range_that_was_begun_is_finished_as_it_was_planned_though_the_ledger_has_grown(
    database: Database, tmp_path: Path
) -> None:
    ledger = ledger_of("acme", days(20))
    await store(database, ledger)
    failing = FailingStore(str(tmp_path), at=2)
    with PostgresLedger.connected(database.service_url) as connected, pytest.raises(ArchiveUnavailableError):
        archive_by(connected, failing, SIGNER, RING, lambda names: list(file_each(names, connected, failing)))
    await store(database, ledger_of("acme", days(20, 20), start=ledger))
    archive_here(database, tmp_path)
    assert [(each.from_seq, each.to_seq) for each in manifests_of(tmp_path)] == [(1, 20), (21, 40)]


def test_a_file_in_a_folder_is_synced_before_it_has_its_name_and_its_folders_after(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    done: list[str] = []
    fsync, link = os.fsync, os.link

    def recorded_fsync(descriptor: int) -> None:
        done.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        fsync(descriptor)

    def recorded_link(source: str, target: Path) -> None:
        assert done == [Path(source).name]
        done.append("link")
        link(source, target)

    monkeypatch.setattr(os, "fsync", recorded_fsync)
    monkeypatch.setattr(os, "link", recorded_link)
    folder = tmp_path / "archive"
    archive = ArchiveStore(str(folder))
    archive.prepare()
    assert archive.create("a/b/c", io.BytesIO(b"whole"))
    assert done[1:] == ["link", "b", "a", "archive", tmp_path.name]
    assert not archive.create("a/b/c", io.BytesIO(b"other"))
    assert (folder / "a" / "b" / "c").read_bytes() == b"whole"
    assert not list((folder / ".writing").iterdir())


# --- what is refused ------------------------------------------------------------------------------------


async def test_a_file_that_is_another_is_never_overwritten(database: Database, tmp_path: Path) -> None:
    await store(database, ledger_of("acme", days(20)))
    archive_here(database, tmp_path / "whole")
    name = next(name for name in content_of(tmp_path / "whole") if name.startswith("entries/"))
    standing = tmp_path / "a" / name
    standing.parent.mkdir(parents=True)
    standing.write_bytes(b"somebody's")
    (acme,) = archive_here(database, tmp_path / "a")
    assert acme.first_break is not None
    assert "nothing was overwritten" in acme.first_break.detail
    assert standing.read_bytes() == b"somebody's"
    assert not (tmp_path / "a" / "manifests").exists()


async def test_a_file_with_the_same_rows_by_another_writer_is_taken(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    await store(database, ledger_of("acme", days(20)))
    archive_here(database, tmp_path / "whole")
    whole = content_of(tmp_path / "whole")
    name = next(name for name in whole if name.startswith("entries/"))
    monkeypatch.setattr(parquet, "ZSTD_LEVEL", 3)
    archive_here(database, tmp_path / "other")
    other = content_of(tmp_path / "other")[name]
    monkeypatch.undo()
    assert other != whole[name]
    standing = tmp_path / "a" / name
    standing.parent.mkdir(parents=True)
    standing.write_bytes(other)
    archive_here(database, tmp_path / "a")
    (manifest,) = manifests_of(tmp_path / "a")
    assert manifest.files[0].sha256 == sha256(other).hexdigest()


NOBODYS_SIGNATURE = (
    "jsonb_set(dsse_envelope::jsonb, '{signatures,0,sig}',"
    " to_jsonb(replace(encode(decode(repeat('00', 64), 'hex'), 'base64'), E'\\n', '')))::json"
)
BREAKS = {
    "payload": ("UPDATE scheduler.scheduler_log SET payload = '{}' WHERE seq = 7", "payload-digest", 7),
    "link": ("UPDATE scheduler.scheduler_log SET job_id = 'x' WHERE seq = 20", "link", 20),
    "removed": ("DELETE FROM scheduler.scheduler_log WHERE seq = 21", "gap", 21),
    "first removed": ("DELETE FROM scheduler.scheduler_log WHERE seq = 1", "gap", 1),
    "all removed": ("DELETE FROM scheduler.scheduler_log", "gap", 1),
    "end removed": ("DELETE FROM scheduler.scheduler_log WHERE seq >= 18", "gap", 18),
    "snapshot removed": ("DELETE FROM scheduler.batch_snapshot WHERE from_seq = 11", "snapshot-chain", 11),
    "time beyond all calendars": (
        "UPDATE scheduler.scheduler_log SET hlc_physical = 9223372036854775807 WHERE seq = 20",
        "hlc-columns",
        1,
    ),
    "times gone": (
        "ALTER TABLE scheduler.scheduler_log ALTER hlc_physical DROP NOT NULL;"
        "UPDATE scheduler.scheduler_log SET hlc_physical = NULL",
        "hlc-columns",
        1,
    ),
    "payloads gone": (
        "ALTER TABLE scheduler.scheduler_log ALTER payload DROP NOT NULL;"
        "UPDATE scheduler.scheduler_log SET payload = NULL",
        "payload-digest",
        1,
    ),
    "first snapshot's signature": (
        f"UPDATE scheduler.batch_snapshot SET dsse_envelope = {NOBODYS_SIGNATURE} WHERE from_seq = 1",
        "snapshot-signature",
        10,
    ),
    "root of a snapshot": (
        "UPDATE scheduler.batch_snapshot SET merkle_root = repeat('0', 64) WHERE from_seq = 11",
        "snapshot-root",
        20,
    ),
    "root gone": (
        "ALTER TABLE scheduler.batch_snapshot ALTER merkle_root DROP NOT NULL;"
        "UPDATE scheduler.batch_snapshot SET merkle_root = NULL WHERE from_seq = 11",
        "snapshot-root",
        20,
    ),
    "envelope of another tenant": (
        "UPDATE scheduler.batch_snapshot SET dsse_envelope ="
        " (SELECT dsse_envelope FROM scheduler.batch_snapshot WHERE tenant_id = 'other') WHERE from_seq = 1",
        "snapshot-root",
        10,
    ),
    "empty envelope": (
        "UPDATE scheduler.batch_snapshot SET dsse_envelope = '{}' WHERE from_seq = 1",
        "snapshot-signature",
        10,
    ),
    "envelope gone": (
        "UPDATE scheduler.batch_snapshot SET dsse_envelope = NULL WHERE from_seq = 11",
        "snapshot-chain",
        21,
    ),
    "snapshot without end": (
        "ALTER TABLE scheduler.batch_snapshot DROP CONSTRAINT IF EXISTS batch_snapshot_check;"
        "UPDATE scheduler.batch_snapshot SET to_seq = 9223372036854775807 WHERE from_seq = 21",
        "gap",
        36,
    ),
    "checkpoint's signature": (
        "UPDATE scheduler.merkle_head SET checkpoint ="
        " regexp_replace(checkpoint, '(— \\S+ \\S{20})\\S{20}', '\\1AAAAAAAAAAAAAAAAAAAA') WHERE true",
        "tree",
        1,
    ),
    "tree gone": ("DELETE FROM scheduler.merkle_head", "tree", 30),
    "tiles": ("UPDATE scheduler.merkle_tile SET hashes = substr(hashes, 33) || substr(hashes, 1, 32)", "tree", 30),
}


@pytest.mark.parametrize("name", BREAKS)
async def test_rows_that_do_not_hold_get_no_manifest_and_other_tenants_theirs(
    database: Database, tmp_path: Path, name: str
) -> None:
    statement, kind, seq = BREAKS[name]
    await store(database, ledger_of("acme", days(35)), ledger_of("other", days(10)))
    before, _, last = statement.rpartition(";")
    await query(database, f"{before}; {last}{' AND' if 'WHERE' in last else ' WHERE'} tenant_id = 'acme'")
    acme, other = archive_here(database, tmp_path)
    assert acme.first_break is not None
    assert (acme.first_break.kind, acme.first_break.seq, acme.to_seq) == (kind, seq, 0)
    assert (other.first_break, other.to_seq) == (None, 10)
    assert [file.parent.name for file in (tmp_path / "manifests").rglob("*.json")] == ["other"]


async def test_entries_that_were_relinked_are_not_those_of_the_signed_snapshot(
    database: Database, tmp_path: Path
) -> None:
    ledger = ledger_of("acme", days(20))
    ledger.entry(4)["payload"] = ledger.entry(4)["payload"][:-1] + ',"zz":"forged"}'
    ledger.relink()
    ledger.store_tree()
    await store(database, ledger)
    (acme,) = archive_here(database, tmp_path)
    assert acme.first_break is not None
    assert (acme.first_break.kind, acme.first_break.seq) == ("snapshot-root", 10)


async def test_a_ledger_that_went_back_or_is_another_is_refused(database: Database, tmp_path: Path) -> None:
    ledger = ledger_of("acme", days(40))
    await store(database, ledger)
    archive_here(database, tmp_path)
    await store(database, ledger_of("acme", days(20)))
    (shorter,) = archive_here(database, tmp_path)
    await store(database, ledger_of("acme", days(50, 1)))
    (other,) = archive_here(database, tmp_path)
    for each in (shorter, other):
        assert each.first_break is not None
        assert (each.first_break.kind, each.first_break.seq, each.to_seq) == ("rollback", 40, 40)
    await query(database, "UPDATE scheduler.ledger_identity SET log_origin = 'fork.example'")
    (another,) = archive_here(database, tmp_path)
    assert another.first_break is not None
    assert "archive to another place" in another.first_break.detail


async def test_what_a_stranger_archived_is_not_carried_on(database: Database, tmp_path: Path) -> None:
    await store(database, ledger_of("acme", days(20)))
    url = str(tmp_path)
    with PostgresLedger.connected(database.service_url) as ledger:
        archive_by(ledger, ArchiveStore(url), STRANGER, RING, file_here(database.service_url, url))
    (acme,) = archive_here(database, tmp_path)
    assert acme.first_break is not None
    assert (acme.first_break.kind, isinstance(acme.first_break, UnjudgedBreak)) == ("archive-signature", True)
    assert "--keys" in acme.first_break.detail
    held = Keyring([SIGNER.public_key, STRANGER.public_key])
    (nothing,) = archive_here(database, tmp_path, held)
    assert nothing.to_seq == 20


async def test_a_chain_that_a_stranger_signed_is_not_archived(database: Database, tmp_path: Path) -> None:
    ledger, honest = ledger_of("acme", days(20)), ledger_of("other", days(10))
    ledger.snapshots.clear()
    ledger.sign(10)
    ledger.sign(20, STRANGER)
    await store(database, ledger, honest)
    acme, other = archive_here(database, tmp_path)
    assert acme.first_break is not None
    assert (acme.first_break.kind, acme.first_break.seq) == ("snapshot-signature", 20)
    assert isinstance(acme.first_break, UnjudgedBreak)
    assert (acme.to_seq, other.to_seq, other.first_break) == (0, 10, None)


async def test_a_checkpoint_that_a_stranger_signed_is_not_archived(database: Database, tmp_path: Path) -> None:
    ledger = ledger_of("acme", days(20))
    await store(database, ledger)
    root = ledger.checkpoint().root
    note = sign_checkpoint(Checkpoint(f"{LOG_ORIGIN}/acme", 20, root), STRANGER)
    await query(database, f"UPDATE scheduler.merkle_head SET checkpoint = $note${note}$note$")
    (acme,) = archive_here(database, tmp_path)
    assert acme.first_break is not None
    assert (acme.first_break.kind, isinstance(acme.first_break, UnjudgedBreak), acme.to_seq) == ("tree", True, 0)


async def test_the_snapshots_of_a_later_range_follow_on_those_that_are_archived(
    database: Database, tmp_path: Path
) -> None:
    ledger = ledger_of("acme", days(20))
    await store(database, ledger)
    archive_here(database, tmp_path)
    grown = ledger_of("acme", days(20, 20), start=ledger)
    sound = list(grown.snapshots)
    grown.snapshots[2] = grown.signed(21, 30, "ab" * 32)
    await store(database, grown)
    (acme,) = archive_here(database, tmp_path)
    assert acme.first_break is not None
    assert (acme.first_break.kind, acme.first_break.seq, acme.to_seq) == ("snapshot-chain", 21, 20)
    grown.snapshots[:] = [*sound[:3], grown.signed(31, 40, payload_digest(sound[2]), tree_root="cd" * 32)]
    await store(database, grown)
    (acme,) = archive_here(database, tmp_path)
    assert acme.first_break is not None
    assert (acme.first_break.kind, acme.first_break.seq, acme.to_seq) == ("snapshot-root", 40, 20)
    grown.snapshots[:] = sound
    await store(database, grown)
    (acme,) = archive_here(database, tmp_path)
    assert (acme.first_break, acme.to_seq) == (None, 40)


async def test_a_later_range_begins_with_the_link_that_is_archived(database: Database, tmp_path: Path) -> None:
    ledger = ledger_of("acme", days(20))
    await store(database, ledger)
    archive_here(database, tmp_path)
    ledger_of("acme", days(20, 20), start=ledger)
    previous = "00" * 32
    for row in ledger.entries[20:]:
        row["prev_chain_link"] = previous
        previous = row["chain_link"] = link_of("acme", row)
    await store(database, ledger)
    (acme,) = archive_here(database, tmp_path)
    assert acme.first_break is not None
    assert (acme.first_break.kind, acme.first_break.seq, acme.to_seq) == ("prev-link", 21, 20)


@pytest.mark.parametrize(
    ("statement", "kind", "seq"),
    [
        ("DELETE FROM scheduler.scheduler_log WHERE seq >= 18", "gap", 18),
        ("DELETE FROM scheduler.batch_snapshot WHERE to_seq = 20", "snapshot-chain", 11),
    ],
)
async def test_what_is_removed_once_it_was_planned_is_missed(
    database: Database, tmp_path: Path, statement: str, kind: str, seq: int
) -> None:
    await store(database, ledger_of("acme", days(20)))
    loop = asyncio.get_running_loop()
    with PostgresLedger.connected(database.service_url) as connected:
        make = file_here(database.service_url, str(tmp_path))

        def removing(names: Sequence[FileTask]) -> Sequence[Outcome]:
            asyncio.run_coroutine_threadsafe(query(database, statement), loop).result(60)
            return make(names)

        (acme,) = await asyncio.to_thread(archive_by, connected, ArchiveStore(str(tmp_path)), SIGNER, RING, removing)
    assert acme.first_break is not None
    assert (acme.first_break.kind, acme.first_break.seq, acme.to_seq) == (kind, seq, 0)
    assert not (tmp_path / "manifests").exists()


@pytest.mark.parametrize("table", ["scheduler_log", "batch_snapshot"])
async def test_a_tenant_that_vanished_from_the_ledger_is_named(database: Database, tmp_path: Path, table: str) -> None:
    await store(database, ledger_of("acme", days(20)), ledger_of("other", days(10)))
    archive_here(database, tmp_path)
    (tmp_path / "manifests" / "nobody").mkdir()
    await query(database, f"DELETE FROM scheduler.{table} WHERE tenant_id = 'acme'")
    acme, other = archive_here(database, tmp_path)
    assert acme.first_break is not None
    assert (acme.first_break.kind, acme.first_break.seq, other.first_break) == ("rollback", 20, None)


async def test_an_archive_ahead_of_what_is_signed_is_named(database: Database, tmp_path: Path) -> None:
    await store(database, ledger_of("acme", days(20)))
    archive_here(database, tmp_path)
    await query(database, "DELETE FROM scheduler.batch_snapshot WHERE to_seq = 20")
    (acme,) = archive_here(database, tmp_path)
    assert acme.first_break is not None
    assert (acme.first_break.kind, acme.first_break.seq) == ("rollback", 20)


def empty_plan(folder: Path) -> None:
    (folder / "manifests" / "acme").rename(folder / "gone")
    for plan_file in (folder / "plans" / "acme").iterdir():
        plan_file.write_bytes(b"")


def stray_file(folder: Path) -> None:
    (folder / "manifests" / "acme" / ".DS_Store").write_bytes(b"x")


def flipped_manifest(folder: Path) -> None:
    (file,) = (folder / "manifests" / "acme").iterdir()
    file.write_bytes(bytes([file.read_bytes()[0] ^ 1]) + file.read_bytes()[1:])


def manifest_of_another(folder: Path) -> None:
    (file,) = (folder / "manifests" / "acme").iterdir()
    (other,) = (folder / "manifests" / "other").iterdir()
    file.write_bytes(other.read_bytes())


def folder_for_a_manifest(folder: Path) -> None:
    (file,) = (folder / "manifests" / "acme").iterdir()
    file.unlink()
    file.mkdir()


def damaged_snapshots(folder: Path) -> None:
    (file,) = (folder / "snapshots" / "tenant_id=acme").iterdir()
    file.write_bytes(b"x" + file.read_bytes()[1:])


@pytest.mark.parametrize(
    "damage",
    [empty_plan, stray_file, flipped_manifest, manifest_of_another, folder_for_a_manifest, damaged_snapshots],
)
async def test_what_is_wrong_with_one_tenant_of_the_archive_stops_no_other(
    database: Database, tmp_path: Path, damage: Callable[[Path], None]
) -> None:
    acme, other = ledger_of("acme", days(10)), ledger_of("other", days(10))
    await store(database, acme, other)
    archive_here(database, tmp_path)
    await store(database, ledger_of("acme", days(10, 10), start=acme), ledger_of("other", days(10, 10), start=other))
    damage(tmp_path)
    first, second = archive_here(database, tmp_path)
    assert first.first_break is not None
    assert first.first_break.kind == "archive"
    assert (second.to_seq, second.first_break) == (20, None)


async def test_keys_that_a_database_publishes_count_while_they_hold_and_garbage_among_them_does_not(
    database: Database,
) -> None:
    await store(database)
    rows = [(SIGNER.key_id, SIGNER.public_key_pem, "NULL"), (STRANGER.key_id, STRANGER.public_key_pem, "'5:0:node-1'")]
    for key_id, pem, revoked in [*rows, ("0" * 16, "garbage", "NULL")]:
        await query(
            database,
            "INSERT INTO scheduler.signing_keys (key_id, algorithm, public_key_pem, not_before, node_id,"
            f" revoked_from_hlc) VALUES ('{key_id}', 'ed25519', '{pem}', now(), 'node-1', {revoked})",
        )
    with PostgresLedger.connected(database.service_url) as ledger:
        published = {key.key_id: key.revoked_from_hlc for key in ledger.published_keys()}
    assert published.keys() == {SIGNER.key_id, STRANGER.key_id}
    assert (published[SIGNER.key_id], str(published[STRANGER.key_id])) == (None, "5:0:node-1")
    await query(database, "DELETE FROM scheduler.ledger_identity")
    with PostgresLedger.connected(database.service_url) as ledger, pytest.raises(ConfigurationError, match="no log"):
        ledger.log_origin()


@pytest.mark.parametrize(("bound", "value"), [("plan.RANGE_ROWS_MAX", 25), ("filing.RANGE_SNAPSHOTS", 2)])
async def test_long_histories_are_archived_range_by_range(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, bound: str, value: int
) -> None:
    monkeypatch.setattr(f"pipeline.archiving.{bound}", value)
    await store(database, ledger_of("acme", days(64)), ledger_of("other", days(31)))
    acme, _ = archive_here(database, tmp_path)
    assert acme.to_seq == 60
    assert [(each.from_seq, each.to_seq) for each in manifests_of(tmp_path)] == [(1, 20), (21, 40), (41, 60)]


async def test_a_run_that_began_before_another_one_found_more_goes_on_behind_it(
    database: Database, tmp_path: Path
) -> None:
    ledger = ledger_of("acme", days(20))
    await store(database, ledger)
    url = str(tmp_path / "a")
    with PostgresLedger.connected(database.service_url) as connected:
        make = file_here(database.service_url, url)
        is_overtaken = False

        def overtaken(names: Sequence[FileTask]) -> Sequence[Outcome]:
            nonlocal is_overtaken
            if not is_overtaken:
                is_overtaken = True
                asyncio.run_coroutine_threadsafe(
                    store(database, ledger_of("acme", days(15, 20), start=ledger)), loop
                ).result(60)
                archive_at(database, url)
            return make(names)

        loop = asyncio.get_running_loop()
        (done,) = await asyncio.to_thread(archive_by, connected, ArchiveStore(url), SIGNER, RING, overtaken)
    assert (done.to_seq, done.first_break) == (30, None)
    assert [(each.from_seq, each.to_seq) for each in manifests_of(tmp_path / "a")] == [(1, 20), (21, 30)]


async def test_a_snapshot_longer_than_a_range_is_archived_whole(
    database: Database, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.archiving.plan.RANGE_ROWS_MAX", 5)
    monkeypatch.setattr("pipeline.archiving.plan.RANGE_FILES", 1)
    ledger: Ledger = ledger_of("acme", days(60), snapshot_rows=30)
    await store(database, ledger)
    archive_here(database, tmp_path)
    assert [(each.from_seq, each.to_seq) for each in manifests_of(tmp_path)] == [(1, 30), (31, 60)]
