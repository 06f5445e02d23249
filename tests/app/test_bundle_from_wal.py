"""Bundles out of the WAL of a node that cannot reach PostgreSQL: nothing asked, nothing changed, all of it proved."""

from __future__ import annotations

import asyncio
import json
from hashlib import sha256
from pathlib import Path

import httpx
import pytest

from app.dev.embedded import EmbeddedPostgres
from app.share.bundle.recovery import export_from_wal, survey
from ledger.chain import record
from ledger.chain.record import EventRecord, IdempotencyKey
from ledger.errors import InvalidInputError, NotFoundError, WalCorruptError
from ledger.hlc import Hlc
from signing.bundle.reader import BundleReader
from signing.judging import verify_file
from signing.keys import Keyring
from signing.private_keys import FileSigner, generate, load
from tests.app.bundles import exit_code
from tests.app.service_thread import serving
from tests.conftest import connected_to
from tests.ledger.ledger_in_memory import SIGNER
from wal import control as wal_control
from wal.control import Control
from wal.group_commit import GroupCommit
from wal.log import Log

NODE = "node-1"
KEYS = Keyring([SIGNER.public_key])


def write_log(folder: Path, events: list[EventRecord], *, chained_lsn: int = 0) -> Path:
    """A node's log with these events, as JobCreated each, chained up to ``chained_lsn``."""
    folder.mkdir(parents=True, exist_ok=True)
    wal_id = "0f" * 16
    writer = GroupCommit(
        Log(folder, node_id=NODE, wal_id=wal_id, epoch=1, next_lsn=1),
        batch_max_entries=100,
        on_failure=lambda error: None,
    )
    for n, event in enumerate(events):
        writer.append(Hlc(1_704_931_200_000 + n, 0, NODE), 1, record.encode(*event))
    writer.close(10)
    control = Control(wal_id, NODE, 1, Hlc(1_704_931_300_000, 0, NODE), len(events), chained_lsn, 0, len(events))
    wal_control.store(folder, control)
    return folder


def created(tenant: str, n: int, key: IdempotencyKey | None = None) -> EventRecord:
    return EventRecord(tenant, f"job-{n}", b'{"fence_token":1,"spec":{"n":%d},"type":"JobCreated"}' % n, key)


def export(folder: Path, tenant: str, target: Path, signer: FileSigner = SIGNER) -> Path:
    with target.open("wb") as file:
        export_from_wal(survey(folder), tenant, signer, signer, file.write)
    return target


def numbers(path: Path) -> list[int]:
    with BundleReader.open(path) as bundle:
        rows = [row for batch in bundle.entry_batches() for row in batch]
    return [json.loads(row[11])["spec"]["n"] for row in rows]


def everything_in(folder: Path) -> dict[str, tuple[str, int]]:
    """Content and time of every file."""
    files = [path for path in sorted(folder.rglob("*")) if path.is_file()]
    return {str(path): (sha256(path.read_bytes()).hexdigest(), path.stat().st_mtime_ns) for path in files}


def test_a_tenant_s_records_become_a_whole_signed_chain_of_their_own(tmp_path: Path) -> None:
    events = [created("acme" if n % 3 else "other", n) for n in range(3100)]
    folder = write_log(tmp_path / "wal" / NODE, events)
    before = everything_in(folder)
    path = export(tmp_path / "wal", "acme", tmp_path / "acme.tar")
    assert everything_in(folder) == before
    found = asyncio.run(verify_file(path, KEYS))
    assert exit_code(found) == 0
    assert found.manifest is not None
    assert found.manifest.origin == f"{NODE}.wal/{'0f' * 16}/acme"
    assert (found.manifest.entry_count, found.manifest.snapshot_count) == (2066, 3)
    assert numbers(path) == [n for n in range(3100) if n % 3]


def test_what_was_chained_stays_out(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "wal", [created("acme", n) for n in range(10)], chained_lsn=6)
    assert numbers(export(folder, "acme", tmp_path / "b.tar")) == [6, 7, 8, 9]


def test_of_a_keyed_line_the_first_counts(tmp_path: Path) -> None:
    def key(line: int, body: bytes = b"a", name: str = "k") -> IdempotencyKey:
        return IdempotencyKey(1, name, line, sha256(body).digest())

    keys = [key(0), key(1), key(0), None, key(1, b"b"), key(2), key(0, name="other"), None]
    folder = write_log(tmp_path / "wal", [created("acme", n, one) for n, one in enumerate(keys)])
    assert numbers(export(folder, "acme", tmp_path / "b.tar")) == [0, 1, 3, 5, 6, 7]


def test_a_torn_tail_is_left_out_and_damage_refused(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "wal", [created("acme", n) for n in range(10)])
    (segment,) = folder.glob("*.wal")
    whole = segment.read_bytes().rstrip(b"\0")
    wal_control.store(folder, Control("0f" * 16, NODE, 1, Hlc(1_704_931_300_000, 0, NODE)))
    segment.write_bytes(whole + b"half a batch")
    assert survey(folder).verdict == "torn"
    assert numbers(export(folder, "acme", tmp_path / "b.tar")) == list(range(10))
    segment.write_bytes(whole.replace(b'"n":3', b'"n":4'))
    wal_control.store(folder, Control("0f" * 16, NODE, 1, Hlc(1_704_931_300_000, 0, NODE), 10))
    with pytest.raises(WalCorruptError):
        export(folder, "acme", tmp_path / "b.tar")


def test_there_must_be_one_log_with_records_of_the_tenant(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "wal" / NODE, [created("acme", 1)])
    with pytest.raises(NotFoundError):
        export(folder, "other", tmp_path / "b.tar")
    with pytest.raises(NotFoundError):
        export(tmp_path / "nowhere", "acme", tmp_path / "b.tar")
    write_log(tmp_path / "wal" / "node-2", [created("acme", 1)])
    with pytest.raises(InvalidInputError, match="several nodes"):
        export(tmp_path / "wal", "acme", tmp_path / "b.tar")


def test_the_same_log_gives_the_same_bytes_while_its_node_writes_or_not(tmp_path: Path) -> None:
    folder = write_log(tmp_path / "wal", [created("acme", n) for n in range(50)])
    first = export(folder, "acme", tmp_path / "a.tar").read_bytes()
    assert export(folder, "acme", tmp_path / "b.tar").read_bytes() == first


def test_a_node_that_lost_its_database_hands_over_what_it_acknowledged(
    postgres: EmbeddedPostgres, tmp_path: Path
) -> None:
    name = "stranded"
    maintenance_url = postgres.superuser_url("postgres")

    async def lock_out() -> None:
        async with connected_to(maintenance_url) as connection:
            await connection.execute(f"ALTER DATABASE {name} WITH ALLOW_CONNECTIONS false")
            await connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = $1", name)

    with serving(postgres, tmp_path / "data", name, shutdown_grace="1s") as url:
        asyncio.run(lock_out())
        acknowledged = []
        for n in range(20):
            body = {"tenant_id": "acme", "spec": {"n": n}, "durability": "LOCAL"}
            answer = httpx.post(f"{url}/v1/jobs", json=body, timeout=30)
            assert answer.status_code == 201, answer.text
            acknowledged.append((answer.json()["job_id"], answer.json()["hlc"]))
    signer = load(str(tmp_path / "data" / "keys" / "signing.pem"))
    path = export(tmp_path / "data" / "wal", "acme", tmp_path / "acme.tar", signer)
    assert exit_code(asyncio.run(verify_file(path, Keyring([signer.public_key])))) == 0
    with BundleReader.open(path) as bundle:
        rows = [row for batch in bundle.entry_batches() for row in batch]
    assert [(row[5], row[1]) for row in rows] == acknowledged


def test_a_new_key_signs_what_an_older_one_never_saw(tmp_path: Path) -> None:
    signer = generate(tmp_path / "keys" / "signing.pem")
    folder = write_log(tmp_path / "wal", [created("acme", 1)])
    path = export(folder, "acme", tmp_path / "b.tar", signer)
    assert exit_code(asyncio.run(verify_file(path, KEYS))) == 4
    assert exit_code(asyncio.run(verify_file(path, Keyring([signer.public_key])))) == 0
