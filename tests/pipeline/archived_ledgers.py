"""Ledgers for tests of the archive: made in memory, signed as a service signs, stored in PostgreSQL; and archives."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from hashlib import sha256
from pathlib import Path
from typing import Any

from objects.store import ArchiveStore
from pipeline.archiving import Archived, FileAll, Run, archive_together
from pipeline.archiving.filing import FileTask, Outcome, file_each
from pipeline.archiving.filing import Ledger as PostgresLedger
from signing.checkpoint import Checkpoint, sign_checkpoint
from signing.keys import Keyring
from signing.private_keys import FileSigner
from tests.app.chain_builder import insert, remove
from tests.app.witness import Witness
from tests.conftest import Database, connected_to, execute
from tests.ledger.ledger_in_memory import SIGNER, Ledger, link_of

LOG_ORIGIN = "log.example"
RING = Keyring([SIGNER.public_key])
JANUARY_MS = 1_704_931_200_000
DAY_MS = 86_400_000


def days(count: int, first: int = 0) -> list[int]:
    """So many hlc_physical, a day apart from one another."""
    return [JANUARY_MS + day * DAY_MS for day in range(first, first + count)]


def ledger_of(tenant_id: str, physical: Sequence[int], snapshot_rows: int = 10, start: Ledger | None = None) -> Ledger:
    """A ledger with an entry of each of these hlc_physical, in this order, and a snapshot every so many entries.

    ``start`` is grown when it is given; what is left over at the end is not signed.
    """
    ledger = Ledger(tenant_id) if start is None else start
    for ms in physical:
        seq = len(ledger.entries) + 1
        payload = f'{{"fence_token":1,"n":{seq},"type":"JobProgressReported"}}'
        row: dict[str, Any] = {
            "seq": seq,
            "t_hlc": f"{ms}:{seq}:node-1",
            "hlc_physical": ms,
            "hlc_logical": seq,
            "hlc_node": "node-1",
            "job_id": f"job-{seq // 7}",
            "action": "EXECUTE",
            "link_version": 2,
            "prev_chain_link": ledger.entries[-1]["chain_link"] if ledger.entries else None,
            "payload": payload,
            "payload_digest": sha256(payload.encode()).hexdigest(),
            "origin": None,
        }
        row["chain_link"] = link_of(tenant_id, row)
        ledger.entries.append(row)
    while (signed := ledger.snapshots[-1]["to_seq"] if ledger.snapshots else 0) + snapshot_rows <= len(ledger.entries):
        ledger.sign(signed + snapshot_rows)
    ledger.store_head()
    ledger.store_tree()
    return ledger


def checkpoint_of(
    ledger: Ledger, log_origin: str = LOG_ORIGIN, size: int | None = None, more: Sequence[FileSigner] = ()
) -> str:
    """The note that the ledger's log signed at ``size``, by default now."""
    head = ledger.checkpoint(size)
    return sign_checkpoint(Checkpoint(f"{log_origin}/{ledger.tenant_id}", head.size, head.root), SIGNER, *more)


async def store(
    database: Database, *ledgers: Ledger, log_origin: str = LOG_ORIGIN, more: Sequence[FileSigner] = ()
) -> None:
    """Put these ledgers into the database, in the place of what it holds of their tenants."""
    async with connected_to(database.superuser_url) as connection:
        await connection.execute("SET session_replication_role = replica")
        await connection.execute(
            "INSERT INTO scheduler.ledger_identity VALUES (true, $1) ON CONFLICT DO NOTHING", log_origin
        )
        for ledger in ledgers:
            await remove(connection, ledger.tenant_id, "batch_snapshot")
            await insert(connection, ledger)
            await connection.execute(
                "UPDATE scheduler.merkle_head SET checkpoint = $1 WHERE tenant_id = $2",
                checkpoint_of(ledger, log_origin, more=more),
                ledger.tenant_id,
            )


async def cosign(database: Database, ledger: Ledger, *witnesses: Witness, size: int | None = None) -> None:
    """Store cosignatures of these witnesses on the ledger's first ``size`` entries, by default all."""
    size = len(ledger.entries) if size is None else size
    async with connected_to(database.superuser_url) as connection:
        for each in witnesses:
            await connection.execute(
                "INSERT INTO scheduler.checkpoint_cosignature (tenant_id, witness, tree_size, cosigned_at, note)"
                " VALUES ($1, $2, $3, now(), $4)",
                *(ledger.tenant_id, each.verifier_key, size),
                each.cosign(checkpoint_of(ledger, size=size), 1_704_931_300),
            )


async def query(database: Database, statement: str) -> None:
    """Run a statement as somebody who can turn off every guard."""
    await execute(database.superuser_url, f"SET session_replication_role = replica; {statement}")


def file_here(dsn: str, url: str) -> FileAll:
    """Makes the files in this process, in the order given."""

    def file_all(names: Sequence[FileTask]) -> Sequence[Outcome]:
        with PostgresLedger.connected(dsn) as ledger:
            return list(file_each(names, ledger, ArchiveStore(url)))

    return file_all


def archive_by(
    ledger: PostgresLedger, store: ArchiveStore, signer: FileSigner, keyring: Keyring, file_all: FileAll
) -> list[Archived]:
    """Archive all that is signed in one ledger, its files made by ``file_all``."""
    (done,) = archive_together([Run(ledger, store, signer, keyring)], file_all)
    return done


def archive_here(database: Database, folder: Path, keyring: Keyring = RING) -> list[Archived]:
    """Archive all that is signed, in this process."""
    return archive_at(database, str(folder), keyring)


def archive_at(database: Database, url: str, keyring: Keyring = RING, signer: FileSigner = SIGNER) -> list[Archived]:
    """The same, to a URL."""
    with PostgresLedger.connected(database.service_url) as ledger:
        return archive_by(ledger, ArchiveStore(url), signer, keyring, file_here(database.service_url, url))


def content_of(folder: Path) -> dict[str, bytes]:
    """Every object of an archive in a folder, by name."""
    return {
        file.relative_to(folder).as_posix(): file.read_bytes()
        for file in _files(folder)
        if ".writing" not in file.parts
    }


def without_table(folder: Path) -> dict[str, bytes]:
    """Every object of an archive but those of its table, whose names are drawn."""
    return {name: data for name, data in content_of(folder).items() if not name.startswith(("metadata/", "table/"))}


def _files(folder: Path) -> Iterator[Path]:
    return (file for file in sorted(folder.rglob("*")) if file.is_file())
