"""Long chains, made in memory and copied into PostgreSQL as the service would have left them, in flat memory."""

from __future__ import annotations

import hashlib
import random
from collections.abc import Iterator
from itertools import islice
from typing import Any, NamedTuple

import asyncpg
import orjson

from benchmarks.events import EVENTS_A_JOB, job_events
from ledger import canonical, merkle
from ledger.chain import LINK_VERSION, Linker
from ledger.facts.events import JOB_EVENTS
from ledger.hlc import Hlc
from ledger.machines.job_fold import JobFold
from ledger.merkle.tiles import TileTree
from ledger.verification import ENTRY_COLUMNS, SNAPSHOT_COLUMNS
from ledger.verification.projection_check import JOB_COLUMNS, job_row
from ledger.verification.snapshot_check import SnapshotClaim
from signing.private_keys import FileSigner
from signing.snapshot import sign_snapshot

NODE_ID = "bench"
BEGIN_MS = 1_704_931_200_000
ENTRIES_A_SNAPSHOT = 1000
SNAPSHOTS_A_TURN = 20
JOBS_AT_ONCE = 50
_SEED = 20_240_117


class _Turn(NamedTuple):
    """Rows of one turn, each without its tenant."""

    entries: list[tuple[Any, ...]]
    snapshots: list[tuple[Any, ...]]
    jobs: list[tuple[Any, ...]]
    tiles: dict[tuple[int, int], bytes]


async def build_chain(url: str, tenant_id: str, entries: int, signer: FileSigner, begin_ms: int = BEGIN_MS) -> None:
    """A chain of ``entries`` whole lives of jobs, all of it signed, followed by its tree and folded.

    The first is of ``begin_ms``. ``entries`` MUST be a multiple of the entries in a snapshot.
    """
    assert entries % ENTRIES_A_SNAPSHOT == 0
    builder = _Builder(tenant_id, signer, begin_ms)
    connection = await asyncpg.connect(url)
    try:
        while (left := entries - builder.seq) > 0:
            turn = builder.extend(min(left, SNAPSHOTS_A_TURN * ENTRIES_A_SNAPSHOT))
            await _store(connection, tenant_id, turn)
        await _store(connection, tenant_id, _Turn([], [], builder.open_jobs(), {}))
        await connection.execute(
            "INSERT INTO scheduler.chain_heads (tenant_id, head_seq, head_chain_link, head_hlc)"
            " VALUES ($1, $2, $3, $4)",
            tenant_id,
            builder.seq,
            builder.link.hex(),
            builder.t_hlc,
        )
        await connection.execute(
            "INSERT INTO scheduler.follower_positions (follower, tenant_id, seq) VALUES ('jobs', $1, $2)",
            tenant_id,
            builder.seq,
        )
        await connection.execute(
            "INSERT INTO scheduler.merkle_head (tenant_id, tree_size, root_hash) VALUES ($1, $2, $3)",
            tenant_id,
            builder.tree.size,
            builder.tree.root().hex(),
        )
        await connection.execute("VACUUM (ANALYZE)")
        await connection.execute("CHECKPOINT")
    finally:
        await connection.close()


async def _store(connection: asyncpg.Connection[asyncpg.Record], tenant_id: str, turn: _Turn) -> None:
    async with connection.transaction():
        for table, columns, rows in (
            ("scheduler_log", ENTRY_COLUMNS, turn.entries),
            ("batch_snapshot", SNAPSHOT_COLUMNS, turn.snapshots),
            ("jobs", JOB_COLUMNS, turn.jobs),
        ):
            await connection.copy_records_to_table(
                table,
                schema_name="scheduler",
                columns=("tenant_id", *columns),
                records=((tenant_id, *row) for row in rows),
            )
        await connection.executemany(
            "INSERT INTO scheduler.merkle_tile (tenant_id, level, tile_index, hashes) VALUES ($1, $2, $3, $4)"
            " ON CONFLICT (tenant_id, level, tile_index) DO UPDATE SET hashes = excluded.hashes",
            [(tenant_id, level, index, hashes) for (level, index), hashes in turn.tiles.items()],
        )


class _Builder:
    """Extends one chain; holds the jobs that are under way and the edge of the tree."""

    def __init__(self, tenant_id: str, signer: FileSigner, begin_ms: int) -> None:
        self.seq = 0
        self.link = b""
        self.t_hlc = ""
        self.tree = TileTree(0, {})
        self._tenant_id = tenant_id
        self._signer = signer
        self._begin_ms = begin_ms
        self._linker = Linker(tenant_id)
        self._events = _lives()
        self._folds: dict[str, tuple[JobFold, int]] = {}
        self._previous_snapshot: str | None = None

    def extend(self, entries: int) -> _Turn:
        """The next ``entries`` rows and all that hangs on them."""
        turn = _Turn([], [], [], {})
        for _ in range(entries // ENTRIES_A_SNAPSHOT):
            batch = [self._entry(event, turn) for event in islice(self._events, ENTRIES_A_SNAPSHOT)]
            leaves = [merkle.leaf_hash(bytes.fromhex(row[9])) for row in batch]
            self.tree.append_leaf_hashes(leaves)
            turn.entries.extend(batch)
            turn.snapshots.append(self._snapshot(batch, leaves))
        turn.tiles.update(self.tree.changed)
        self.tree.forget_changed()
        return turn

    def open_jobs(self) -> list[tuple[Any, ...]]:
        """Rows of the jobs whose life is not over."""
        return [_job_row(fold) for fold, _ in self._folds.values()]

    def _entry(self, event: dict[str, Any], turn: _Turn) -> tuple[Any, ...]:
        """One row in the order of ``ENTRY_COLUMNS``."""
        self.seq += 1
        hlc = Hlc(self._begin_ms + self.seq // 4, self.seq % 4, NODE_ID)
        job_id = event.pop("job_id")
        action = JOB_EVENTS[event["type"]].action
        payload = canonical.encode({"fence_token": 1, **event})
        digest = hashlib.sha256(payload)
        prev, self.t_hlc = self.link, hlc.text()
        self.link = self._linker.link(self.seq, self.t_hlc, job_id, action, prev, digest.digest())
        fold, count = self._folds.pop(job_id, (JobFold(job_id), 0))
        fold.add(action, orjson.loads(payload), hlc, digest.hexdigest(), self.seq)
        if count + 1 == EVENTS_A_JOB:
            turn.jobs.append(_job_row(fold))
        else:
            self._folds[job_id] = fold, count + 1
        return (
            self.seq,
            self.t_hlc,
            *hlc,
            job_id,
            action,
            LINK_VERSION,
            prev.hex() or None,
            self.link.hex(),
            digest.hexdigest(),
            payload.decode(),
            None,
        )

    def _snapshot(self, batch: list[tuple[Any, ...]], leaves: list[bytes]) -> tuple[Any, ...]:
        """One row in the order of ``SNAPSHOT_COLUMNS`` over ``batch``, whose last entry is the newest."""
        claim = SnapshotClaim(
            tenant_id=self._tenant_id,
            from_seq=batch[0][0],
            to_seq=self.seq,
            from_chain_link=batch[0][9],
            to_chain_link=self.link.hex(),
            entry_count=len(batch),
            merkle_root=merkle.root(leaves).hex(),
            tree_size=self.seq,
            tree_root=self.tree.root().hex(),
            snapshot_hlc=self.t_hlc,
            previous_snapshot=self._previous_snapshot,
            node_id=NODE_ID,
            key_id=self._signer.key_id,
        )
        envelope, self._previous_snapshot = sign_snapshot(claim, self._signer)
        columns = (getattr(claim, column) for column in SNAPSHOT_COLUMNS[:-1])
        return (*columns, orjson.dumps(envelope).decode())


def _lives() -> Iterator[dict[str, Any]]:
    """Events without end, many jobs under way at once."""
    numbers = random.Random(_SEED)
    job = 0
    while True:
        lives = [job_events(numbers, f"job-{job + one:08d}") for one in range(JOBS_AT_ONCE)]
        job += JOBS_AT_ONCE
        for step in range(EVENTS_A_JOB):
            for life in lives:
                yield life[step]


def _job_row(fold: JobFold) -> tuple[object, ...]:
    state = fold.state()
    return job_row(state)
