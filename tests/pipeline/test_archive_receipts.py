"""Receipts that an archive alone makes: those that the ledger would make of the same rows and checkpoint."""

from __future__ import annotations

import io
import shutil
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet as pq
import pytest

from ledger.errors import (
    ArchiveInvalidError,
    InvalidInputError,
    JobNotFoundError,
    LedgerError,
    NotFoundError,
    SeqOutOfRangeError,
    SigningUnavailableError,
    TenantNotFoundError,
    UnknownKeyError,
)
from ledger.job_index import BLOCK_ENTRIES, covering, key_of
from ledger.job_index.proof import Directory, pieces_of, prove
from ledger.merkle import tiles
from ledger.verification.entry_check import ENTRY_COLUMNS
from objects.store import ArchiveStore
from pipeline.archive import receipts
from pipeline.archive.parquet import ENTRY_FILE_SCHEMA, UNSIGNED_FILE_SCHEMA, FileWriter
from pipeline.archive.receipts import Wanted, archived_receipt
from signing.keys import Keyring
from signing.receipt import IndexProof, Material, draft_of, make
from signing.receipt_judging import judged
from tests.app.bundles import checkpoint_of
from tests.conftest import Database
from tests.ledger import naive_job_index as naive
from tests.ledger.ledger_in_memory import SIGNER, STRANGER, Ledger
from tests.pipeline.archived_ledgers import LOG_ORIGIN, RING, archive_here, days, ledger_of, store
from tests.pipeline.test_archive_reading import manifest_files, replace, rewrite

COVERED = 605
"""Entries under the checkpoint in the first of two manifests; 600 of them are in its range, 700 are archived."""
_made: list[tuple[Ledger, Path]] = []


@pytest.fixture
def database_at_first(request: pytest.FixtureRequest) -> Database | None:
    """A database for the first test that asks, which makes what all use."""
    return None if _made else request.getfixturevalue("database")


@pytest.fixture
async def ledger(
    database_at_first: Database | None, tmp_path: Path, tmp_path_factory: pytest.TempPathFactory
) -> Ledger:
    """A ledger of 702 entries whose archive is in ``tmp_path``."""
    if database_at_first is not None:
        ledger, folder = ledger_of("acme", days(COVERED)), tmp_path_factory.mktemp("archive")
        await store(database_at_first, ledger)
        archive_here(database_at_first, folder)
        ledger_of("acme", days(702 - COVERED, COVERED), start=ledger)
        await store(database_at_first, ledger)
        archive_here(database_at_first, folder)
        _made.append((ledger, folder))
    ledger, folder = _made[0]
    shutil.copytree(folder, tmp_path, dirs_exist_ok=True)
    return ledger.copy()


def made(folder: Path, wanted: Wanted, extends: int | None = None, keyring: Keyring = RING) -> bytes:
    return archived_receipt(ArchiveStore(str(folder)), "acme", wanted, extends, keyring, SIGNER)


def by_ledger(ledger: Ledger, wanted: Wanted, extends: int | None) -> bytes:
    """The receipt of the same, from the rows and tiles of the ledger."""
    rows: list[tuple[Any, ...]] = [
        tuple(row[name] for name in ENTRY_COLUMNS)
        for row in ledger.entries[:COVERED]
        if wanted.seq == row["seq"] or wanted.job_id == row["job_id"]
    ]
    draft = draft_of(
        tenant_id="acme",
        log_origin=LOG_ORIGIN,
        node_id="node-1",
        covers=wanted.covers,
        job_id=wanted.job_id or rows[0][5],
        checkpoint=checkpoint_of(ledger, COVERED, log_origin=LOG_ORIGIN),
        keys=RING,
    )
    indexed = None if wanted.job_id is None else index_proof(ledger, wanted.job_id)
    return make(Material(draft, rows, (), extends, indexed), tiles.getter(ledger.tiles), SIGNER)


def index_proof(ledger: Ledger, job_id: str) -> IndexProof:
    """By the newest snapshot under the checkpoint, of runs that the naive twin makes."""
    snapshot = [each for each in ledger.snapshots if each["to_seq"] <= COVERED][-1]
    size = snapshot["to_seq"]
    log = list(zip([row["job_id"] for row in ledger.entries], ledger.leaf_hashes(), strict=True))
    runs = [b"".join(naive.leaves(log, *place, BLOCK_ENTRIES)) for place in covering(size)]
    proofs = [prove(key_of(job_id), Directory.of(run), pieces_of(run)) for run in runs]
    return IndexProof(size, snapshot["dsse_envelope"], proofs)


@pytest.mark.parametrize(
    "wanted",
    [
        *(Wanted(None, seq) for seq in (1, 256, 257, 512, 600, COVERED)),
        *(Wanted(f"job-{n}", None) for n in (0, 37, 86)),
        *(Wanted(job, None, is_absent=True) for job in ("nobody", "job-99")),
    ],
    ids=lambda wanted: f"{wanted.job_id}-{wanted.seq}",
)
async def test_a_receipt_of_an_archive_is_the_one_that_the_ledger_would_make(
    ledger: Ledger, tmp_path: Path, wanted: Wanted
) -> None:
    for extends in (None, 1, 255, 256, 257, 512, 600, COVERED):
        receipt = made(tmp_path, wanted, extends)
        assert receipt == by_ledger(ledger, wanted, extends)
    verdict = judged(receipt, RING).verdict
    assert (verdict["valid"], verdict["first_break"]) == (True, None)
    of_job = () if wanted.job_id is None else ("completeness",)
    assert {verdict["verdicts"][each] for each in ("receipt", "tree", "links", "signatures", *of_job)} == {"ok"}


async def test_an_entry_that_the_archive_hides_in_another_job_is_found_by_the_index(
    ledger: Ledger, tmp_path: Path
) -> None:
    """Its link is of another job then, but nobody asks for that one."""
    rewrite(tmp_path, 0, lambda rows: rows[6].update(job_id="of nobody"), ENTRY_FILE_SCHEMA)
    with pytest.raises(ArchiveInvalidError, match="index of jobs of entries 1 to 600 is not that"):
        made(tmp_path, Wanted(ledger.entry(7)["job_id"], None))


async def test_a_tree_that_is_newer_than_the_checkpoint_is_left_out(ledger: Ledger, tmp_path: Path) -> None:
    assert made(tmp_path, Wanted(None, 7), COVERED + 1) == made(tmp_path, Wanted(None, 7), None)


@pytest.mark.parametrize(
    ("wanted", "error", "says"),
    [
        (Wanted("nobody", None), JobNotFoundError, "no job nobody"),
        (Wanted("job-99", None), JobNotFoundError, f"up to seq {COVERED}"),
        (Wanted("job-0", None, is_absent=True), InvalidInputError, "job job-0 has entries, the last is seq "),
        (Wanted(None, COVERED + 1), NotFoundError, f"up to seq {COVERED}"),
        (Wanted(None, 701), SeqOutOfRangeError, "ends at seq 700"),
    ],
)
async def test_what_the_archive_does_not_prove_is_told(
    ledger: Ledger, tmp_path: Path, wanted: Wanted, error: type[LedgerError], says: str
) -> None:
    with pytest.raises(error, match=says):
        made(tmp_path, wanted)


async def test_no_job_is_said_to_be_whole_under_a_checkpoint_beyond_the_archive(ledger: Ledger, tmp_path: Path) -> None:
    manifest_files(tmp_path)[1].unlink()
    with pytest.raises(SigningUnavailableError, match="tally snapshot --tenant acme, then tally archive run --once"):
        made(tmp_path, Wanted("job-0", None))


async def test_no_job_is_said_to_be_absent_without_a_snapshot_with_an_index(ledger: Ledger, tmp_path: Path) -> None:
    for file in sorted((tmp_path / "snapshots").rglob("*.parquet")):
        rows = [row | {"dsse_envelope": None} for row in pq.ParquetFile(file).read().to_pylist()]
        written = FileWriter(local := io.BytesIO(), UNSIGNED_FILE_SCHEMA)
        for batch in pa.Table.from_pylist(rows, UNSIGNED_FILE_SCHEMA).to_batches():
            written.add(batch)
        written.finish("a")
        replace(tmp_path, file, local.getvalue())
    with pytest.raises(SigningUnavailableError, match=f"up to seq {COVERED} has an index of jobs"):
        made(tmp_path, Wanted("nobody", None, is_absent=True))


async def test_no_receipt_is_made_of_what_no_held_key_signed(ledger: Ledger, tmp_path: Path) -> None:
    with pytest.raises(UnknownKeyError, match="--keys"):
        made(tmp_path, Wanted("job-0", None), keyring=Keyring([STRANGER.public_key]))
    with pytest.raises(TenantNotFoundError):
        archived_receipt(ArchiveStore(str(tmp_path)), "other", Wanted("job-0", None), None, RING, SIGNER)


@pytest.mark.parametrize(
    "change",
    [{"payload": "{}"}, {"chain_link": "0" * 64}, {"chain_link": "none"}, {"job_id": "job-0"}],
    ids=["payload", "link", "no-link", "job"],
)
async def test_no_receipt_is_made_of_rows_that_were_changed_and_signed_again(
    ledger: Ledger, tmp_path: Path, change: dict[str, str]
) -> None:
    rewrite(tmp_path, 0, lambda rows: rows[8].update(change), ENTRY_FILE_SCHEMA)
    with pytest.raises(ArchiveInvalidError, match="is not what was signed"):
        made(tmp_path, Wanted(rows_job(change), None))


def rows_job(change: dict[str, str]) -> str:
    """The job whose receipt would have entry 9 as it was changed."""
    return change.get("job_id", "job-1")


async def test_a_job_that_is_more_than_a_receipt_holds_is_refused(
    ledger: Ledger, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(receipts, "ENTRIES_MAX", 6)
    with pytest.raises(LedgerError, match="more entries than one receipt holds"):
        made(tmp_path, Wanted("job-1", None))
