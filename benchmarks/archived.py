"""A large archive of many tenants, made without a database: what ``tally pipeline archive`` would have written.

One tenant has half of all entries. Links, digests, roots, snapshots and manifests are true and signed; payloads come
from a pool of lives of jobs, since what they say costs no verification anything.
"""

from __future__ import annotations

import io
import multiprocessing
import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from hashlib import sha256
from pathlib import Path
from typing import Final, NamedTuple

import pyarrow as pa

from benchmarks.events import job_events
from ledger import canonical, merkle
from ledger.chain import LINK_VERSION, Linker
from ledger.facts.events import JOB_EVENTS
from ledger.merkle import Frontier
from ledger.verification.snapshot_check import SnapshotClaim
from objects.store import ArchiveStore
from pipeline.archive import FILE_ROWS_MAX, ArchivedFile, FileName, Manifest, manifest_path, month_of
from pipeline.archive.parquet import ENTRY_FILE_SCHEMA, SNAPSHOT_FILE_SCHEMA, FileWriter
from pipeline.arrow import batch_of_columns
from signing import private_keys
from signing.checkpoint import Checkpoint, sign_checkpoint
from signing.private_keys import FileSigner
from signing.snapshot import sign_snapshot

ENTRIES_A_SNAPSHOT: Final = 1000
BEGIN_MS: Final = 1_704_931_200_000
ENTRIES_A_MS: Final = 4
NODE_ID: Final = "bench"
LOG_ORIGIN: Final = "log.bench"
_LIVES: Final = 500
_SEED: Final = 20_240_117


class _Event(NamedTuple):
    """One of the pool."""

    action: str
    payload: str
    digest: bytes


def build_archive(folder: Path, key: Path, tenants: int, entries: int) -> None:
    """An archive of ``entries`` entries under ``folder``, signed with the key that is made at ``key``.

    ``entries`` MUST be a multiple of the entries in a snapshot.
    """
    private_keys.generate(key)
    ArchiveStore(str(folder)).prepare()
    with ProcessPoolExecutor(mp_context=multiprocessing.get_context("spawn")) as pool:
        made = [
            pool.submit(_archive_tenant, str(folder), str(key), tenant, count)
            for tenant, count in shares(tenants, entries)
        ]
        for each in made:
            each.result()


def shares(tenants: int, entries: int) -> list[tuple[str, int]]:
    """Every tenant with its entries, in whole snapshots: the first has half of all, the others the rest alike."""
    others = tenants - 1
    share = entries // 2 // others // ENTRIES_A_SNAPSHOT * ENTRIES_A_SNAPSHOT
    smaller = [(f"tenant-{number:02d}", share) for number in range(1, tenants)]
    return [("tenant-00", entries - share * others), *smaller]


def _archive_tenant(folder: str, key: str, tenant_id: str, entries: int) -> None:
    signer, store = private_keys.load(key), ArchiveStore(folder)
    chain = _Chain(tenant_id, signer)
    files, snapshots = [], []
    month = month_of(BEGIN_MS)
    for first in range(1, entries + 1, FILE_ROWS_MAX):
        last = min(first + FILE_ROWS_MAX - 1, entries)
        local = io.BytesIO()
        writer = FileWriter(local, ENTRY_FILE_SCHEMA)
        for batch, signed in chain.extend(last):
            writer.add(batch)
            snapshots += signed
        files.append(_stored(store, FileName(tenant_id, first, last, month), writer, local))
    local = io.BytesIO()
    writer = FileWriter(local, SNAPSHOT_FILE_SCHEMA)
    writer.add(pa.RecordBatch.from_pylist(snapshots, SNAPSHOT_FILE_SCHEMA))
    files.append(_stored(store, FileName(tenant_id, 1, entries, None), writer, local))
    root = chain.tree.root()
    note = sign_checkpoint(Checkpoint(f"{LOG_ORIGIN}/{tenant_id}", entries, root), signer)
    manifest = Manifest(
        node_id=NODE_ID,
        log_origin=LOG_ORIGIN,
        tenant_id=tenant_id,
        from_seq=1,
        to_seq=entries,
        from_chain_link=str(snapshots[0]["from_chain_link"]),
        to_chain_link=chain.link.hex(),
        first_hlc=_hlc(1),
        last_hlc=_hlc(entries),
        highest_physical_ms=BEGIN_MS + entries // ENTRIES_A_MS,
        entry_count=entries,
        snapshot_count=len(snapshots),
        tree_size=entries,
        tree_root=root.hex(),
        frontier=tuple(each.hex() for each in chain.tree.hashes),
        checkpoint=note,
        consistency=(),
        previous_manifest=None,
        files=tuple(files),
    )
    store.create(manifest_path(tenant_id, 1, entries), io.BytesIO(manifest.seal(signer)))


def _stored(store: ArchiveStore, name: FileName, writer: FileWriter, local: io.BytesIO) -> ArchivedFile:
    file = writer.finish(name.path())
    local.seek(0)
    store.create(file.name, local)
    return file


def _hlc(seq: int) -> str:
    return f"{BEGIN_MS + seq // ENTRIES_A_MS}:{seq % ENTRIES_A_MS}:{NODE_ID}"


class _Chain:
    """Extends one chain, a snapshot at a time."""

    def __init__(self, tenant_id: str, signer: FileSigner) -> None:
        self.seq = 0
        self.link = b""
        self.tree = Frontier()
        self._tenant_id = tenant_id
        self._signer = signer
        self._linker = Linker(tenant_id)
        self._pool = _pool()
        self._previous: str | None = None
        self._leaves: list[bytes] = []
        """Leaves since the last snapshot."""
        self._from_link = ""

    def extend(self, to_seq: int) -> Iterator[tuple[pa.RecordBatch, list[dict[str, object]]]]:
        """Entries up to ``to_seq`` in batches, and the snapshots that end in each."""
        while self.seq < to_seq:
            room = ENTRIES_A_SNAPSHOT - self.seq % ENTRIES_A_SNAPSHOT
            yield self._batch(min(room, to_seq - self.seq))

    def _batch(self, count: int) -> tuple[pa.RecordBatch, list[dict[str, object]]]:
        seqs = range(self.seq + 1, self.seq + count + 1)
        events = [self._pool[seq % len(self._pool)] for seq in seqs]
        jobs = [f"use1-{BEGIN_MS}-gate1-{seq // 8:08d}" for seq in seqs]
        hlcs = [_hlc(seq) for seq in seqs]
        actions, digests = [each.action for each in events], [each.digest for each in events]
        links = self._linker.links(seqs[0], self.link, hlcs, jobs, actions, digests, [b""] * count)
        hexes = [link.hex() for link in links]
        columns = [
            [*seqs],
            hlcs,
            [BEGIN_MS + seq // ENTRIES_A_MS for seq in seqs],
            [seq % ENTRIES_A_MS for seq in seqs],
            [NODE_ID] * count,
            jobs,
            actions,
            [LINK_VERSION] * count,
            [self.link.hex() or None, *hexes[:-1]],
            hexes,
            [digest.hex() for digest in digests],
            [each.payload for each in events],
            [None] * count,
        ]
        leaves = [merkle.leaf_hash(link) for link in links]
        self.seq, self.link = seqs[-1], links[-1]
        self.tree.extend(leaves)
        self._leaves += leaves
        if seqs[0] % ENTRIES_A_SNAPSHOT == 1:
            self._from_link = hexes[0]
        signed = [self._snapshot()] if self.seq % ENTRIES_A_SNAPSHOT == 0 else []
        return batch_of_columns(columns, ENTRY_FILE_SCHEMA), signed

    def _snapshot(self) -> dict[str, object]:
        first = self.seq - ENTRIES_A_SNAPSHOT + 1
        claim = SnapshotClaim(
            tenant_id=self._tenant_id,
            from_seq=first,
            to_seq=self.seq,
            from_chain_link=self._from_link,
            to_chain_link=self.link.hex(),
            entry_count=ENTRIES_A_SNAPSHOT,
            merkle_root=merkle.root(self._leaves).hex(),
            tree_size=self.seq,
            tree_root=self.tree.root().hex(),
            snapshot_hlc=_hlc(self.seq),
            previous_snapshot=self._previous,
            node_id=NODE_ID,
            key_id=self._signer.key_id,
        )
        self._leaves = []
        envelope, self._previous = sign_snapshot(claim, self._signer)
        row: dict[str, object] = {name: getattr(claim, name) for name in SNAPSHOT_FILE_SCHEMA.names[:-1]}
        return {**row, "dsse_envelope": canonical.encode(envelope).decode()}


def _pool() -> list[_Event]:
    numbers = random.Random(_SEED)
    pool = []
    for _ in range(_LIVES):
        for event in job_events(numbers, ""):
            del event["job_id"]
            payload = canonical.encode({"fence_token": 1, **event})
            pool.append(_Event(JOB_EVENTS[event["type"]].action, payload.decode(), sha256(payload).digest()))
    return pool
