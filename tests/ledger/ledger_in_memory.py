"""A whole valid ledger of one tenant as plain rows, a reader over it, and the ways a forger would mend it.

Rows are dicts by column, so that a test edits one value and says which.
"""

from __future__ import annotations

import copy
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import partial
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any

import orjson
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from msgspec.structs import replace

from ledger import canonical, merkle
from ledger.chain import link, link_v1
from ledger.facts.events import JOB_EVENTS
from ledger.job_index import keys_of
from ledger.job_index.builder import IndexBuilder, PartIndex, in_order
from ledger.machines import jobs
from ledger.machines.exclusions import COUNT_ALL, Exclusions
from ledger.machines.retention import SUBJECT
from ledger.merkle.tiles import TileTree
from ledger.verification import (
    COMMITMENT_ACTIONS,
    COMMITMENT_COLUMNS,
    ENTRY_COLUMNS,
    FOLD_COLUMNS,
    JOB_COLUMNS,
    PROMISED_COLUMNS,
    SNAPSHOT_COLUMNS,
    Head,
    OpenSnapshot,
    StoredTree,
    TreeHead,
)
from ledger.verification.left_index import IndexAtFloor, at_floor
from ledger.verification.projection_check import stored_form
from ledger.verification.snapshot_check import SnapshotClaim
from signing.keys import Keyring
from signing.private_keys import FileSigner
from signing.snapshot import open_snapshot, payload_of, sign_snapshot
from tests.ledger.job_facts import fact_of, merge

Row = dict[str, Any]
NODE = "node-1"


def signer_of(seed: int) -> FileSigner:
    """A fixed Ed25519 key, so that failures repeat."""
    return FileSigner(Path("no-file"), Ed25519PrivateKey.from_private_bytes(seed.to_bytes(32, "big")))


SIGNER = signer_of(1)
STRANGER = signer_of(2)
OPEN: OpenSnapshot = partial(open_snapshot, keyring=Keyring.of([SIGNER.public_key_pem]))
"""Opens snapshots with the ring that holds the key of ``SIGNER`` alone."""


@dataclass
class Ledger:
    """Everything stored of one tenant."""

    tenant_id: str
    entries: list[Row] = field(default_factory=list)
    snapshots: list[Row] = field(default_factory=list)
    jobs: list[Row] = field(default_factory=list)
    head: Head | None = None
    tree: StoredTree | None = None
    tiles: dict[tuple[int, int], bytes] = field(default_factory=dict)
    promised: list[Row] = field(default_factory=list)
    kept_index: dict[int, IndexAtFloor] = field(default_factory=dict)

    def copy(self) -> Ledger:
        """A ledger to tamper with."""
        return copy.deepcopy(self)

    def entry(self, seq: int) -> Row:
        """The entry that has this seq."""
        return next(row for row in self.entries if row["seq"] == seq)

    def last(self) -> Head:
        """The end of the chain, as its head must name it."""
        if not self.entries:
            return Head(0, None, None)
        row = self.entries[-1]
        return Head(row["seq"], row["chain_link"], row["t_hlc"])

    def job_index(self, size: int) -> list[str]:
        """Roots of the index of jobs of the first ``size`` entries, in hex."""
        rows = self.entries[:size]
        part = PartIndex(0, [size])
        part.append(keys_of([row["job_id"] for row in rows]), b"".join(self.leaf_hashes(1, size)))
        return [root.hex() for root in in_order(IndexBuilder().add(part.finish())[size], size) if root is not None]

    def keep_index(self, to_seq: int) -> None:
        """Keep what the index of jobs needs of the entries up to ``to_seq``, where a snapshot ends."""
        part, index = PartIndex(0, []), IndexBuilder()
        part.append(keys_of([row["job_id"] for row in self.entries[:to_seq]]), b"".join(self.leaf_hashes(1, to_seq)))
        index.add(part.finish())
        left = index.left()
        assert left is not None
        envelope = next(row["dsse_envelope"] for row in self.snapshots if row["to_seq"] == to_seq)
        self.kept_index[to_seq] = at_floor(payload_of(envelope), left)

    # --- made from the entries --------------------------------------------------------------------

    def relink(self, from_seq: int = 1) -> None:
        """Give every entry from ``from_seq`` on the digest and links that its other columns call for."""
        for at, row in enumerate(self.entries):
            if row["seq"] >= from_seq:
                row["payload_digest"] = sha256(row["payload"].encode()).hexdigest()
                row["prev_chain_link"] = self.entries[at - 1]["chain_link"] if at else None
                row["chain_link"] = link_of(self.tenant_id, row)

    def leaf_hashes(self, first: int = 1, last: int | None = None) -> list[bytes]:
        """Merkle leaves of entries ``first..last``."""
        rows = self.entries[first - 1 : last]
        return [merkle.leaf_hash(bytes.fromhex(row["chain_link"])) for row in rows]

    def checkpoint(self, size: int | None = None, source: str = "node") -> TreeHead:
        """The tree head that an honest node would keep at ``size``, by default now."""
        size = len(self.entries) if size is None else size
        return TreeHead(size, merkle.root(self.leaf_hashes(1, size)), source)

    def store_head(self) -> None:
        """Make the head fit the entries."""
        self.head = self.last()

    def store_tree(self, size: int | None = None) -> None:
        """Make the stored tree that of the first ``size`` entries, by default all."""
        tree = TileTree(0, {})
        tree.append_leaf_hashes(self.leaf_hashes(1, size))
        self.tree, self.tiles = StoredTree(tree.size, tree.root().hex()), tree.changed

    def store_jobs(self) -> None:
        """Make the job states those of the entries."""
        states: dict[str, jobs.JobState] = {}
        for row in self.entries:
            hlc = (row["hlc_physical"], row["hlc_logical"], row["hlc_node"])
            payload = orjson.loads(row["payload"])
            digest = row["payload_digest"]
            fact = fact_of(row["action"], payload, hlc, digest, row["job_id"], row["seq"])
            if fact is not None:
                known = states.get(fact.job_id)
                states[fact.job_id] = fact if known is None else merge(known, fact)
        self.jobs = [stored_form(states[job_id])._asdict() for job_id in sorted(states)]

    def sign(self, to_seq: int, signer: FileSigner = SIGNER, *more: FileSigner, **changes: Any) -> None:
        """Append the snapshot that follows the last one and reaches to ``to_seq``."""
        before = self.snapshots[-1] if self.snapshots else None
        from_seq = before["to_seq"] + 1 if before else 1
        digest = payload_digest(before) if before else None
        self.snapshots.append(self.signed(from_seq, to_seq, digest, signer, *more, **changes))

    def cover(self, to_seq: int) -> None:
        """Append the unsigned snapshot that follows the last one and reaches to ``to_seq``."""
        self.sign(to_seq)
        self.snapshots[-1]["dsse_envelope"] = None

    def signed(
        self,
        from_seq: int,
        to_seq: int,
        previous: str | None,
        signer: FileSigner = SIGNER,
        *more: FileSigner,
        **changes: Any,
    ) -> Row:
        """The row of a snapshot over ``from_seq..to_seq``; ``changes`` to the claim are signed as well."""
        unchanged = SnapshotClaim(
            tenant_id=self.tenant_id,
            from_seq=from_seq,
            to_seq=to_seq,
            from_chain_link=self.entries[from_seq - 1]["chain_link"],
            to_chain_link=self.entries[to_seq - 1]["chain_link"],
            entry_count=to_seq - from_seq + 1,
            merkle_root=merkle.root(self.leaf_hashes(from_seq, to_seq)).hex(),
            tree_size=to_seq,
            tree_root=merkle.root(self.leaf_hashes(1, to_seq)).hex(),
            snapshot_hlc=self.entries[to_seq - 1]["t_hlc"],
            previous_snapshot=previous,
            node_id=NODE,
            key_id=signer.key_id,
            job_index=self.job_index(to_seq),
        )
        claim = replace(unchanged, **changes)
        envelope, _ = sign_snapshot(claim, signer, *more)
        row = {column: getattr(claim, column) for column in SNAPSHOT_COLUMNS[:-1]}
        return {**row, "dsse_envelope": orjson.dumps(envelope).decode()}


def payload_digest(snapshot: Row) -> str:
    """SHA-256 of the signed payload in a snapshot's envelope; of an unsigned one that of its columns."""
    if snapshot["dsse_envelope"] is None:
        columns = {column: snapshot[column] for column in SNAPSHOT_COLUMNS[:-1]}
        return sha256(canonical.encode(columns)).hexdigest()
    return open_snapshot(snapshot["dsse_envelope"], None).payload_sha256


def link_of(tenant_id: str, row: Row) -> str:
    """The link that the other columns of ``row`` call for."""
    if row["link_version"] == 1:
        texts = (row["t_hlc"], row["job_id"], row["action"], row["prev_chain_link"], row["payload_digest"])
        return link_v1(*texts).hex()
    return link(
        tenant_id=tenant_id,
        seq=row["seq"],
        t_hlc=row["t_hlc"],
        job_id=row["job_id"],
        action=row["action"],
        prev_chain_link=bytes.fromhex(row["prev_chain_link"] or ""),
        payload_digest=bytes.fromhex(row["payload_digest"]),
        origin=(row["origin"] or "").encode(),
    ).hex()


def origin_of(seq: int) -> str:
    """The origin of an entry that was first chained at ``seq`` of another log."""
    zeros = "0" * 64
    return (
        f'{{"bundle_digest":"{zeros}","chain_link":"{zeros}","log":"log.example/acme","node_id":"node-2","seq":{seq}}}'
    )


def build(
    count: int,
    *,
    tenant_id: str = "acme",
    snapshots_to: Iterable[int] = (),
    version_1_until: int = 0,
    begin_ms: int = 1_704_931_200_000,
) -> Ledger:
    """A valid ledger of ``count`` entries: jobs created, accepted, run and completed in turn."""
    ledger = Ledger(tenant_id)
    for seq in range(1, count + 1):
        ledger.entries.append(_entry(seq, begin_ms, 1 if seq <= version_1_until else 2))
    ledger.relink()
    ledger.store_head()
    ledger.store_tree()
    ledger.store_jobs()
    for to_seq in snapshots_to:
        ledger.sign(to_seq)
    return ledger


_STEPS: Sequence[tuple[str, Mapping[str, Any]]] = (
    ("JobCreated", {"actor": "ci", "spec": {"image": "backup:4", "cpu": 1.5}, "assigned_dcs": ["use1"]}),
    ("JobAccepted", {"dc_id": "use1", "worker_count": 2}),
    ("JobProgressReported", {"dc_id": "use1", "completed": 3, "failed": 1}),
    ("JobCompleted", {"final_status": "ok", "aggregate_metrics": {"cpu_s": 2}}),
)


def _entry(seq: int, begin_ms: int, version: int) -> Row:
    name, fields = _STEPS[(seq - 1) % len(_STEPS)]
    physical, logical = begin_ms + seq // 3, seq % 3
    return {
        "seq": seq,
        "t_hlc": f"{physical}:{logical}:{NODE}",
        "hlc_physical": physical,
        "hlc_logical": logical,
        "hlc_node": NODE,
        # Two jobs are always under way at once, so that job order is not chain order.
        "job_id": f"job-{(seq - 1) // (2 * len(_STEPS)):04}-{'ba'[seq % 2]}",
        "action": JOB_EVENTS[name].action,
        "link_version": version,
        "payload": canonical.encode({"type": name, "fence_token": 1, **fields}).decode(),
        "origin": None,
    }


class MemoryReader:
    """Reads a ``Ledger`` in batches of ``batch_rows``."""

    def __init__(self, ledger: Ledger, batch_rows: int = 7) -> None:
        self._ledger = ledger
        self._batch_rows = batch_rows
        self._entries = sorted(ledger.entries, key=lambda row: row["seq"])
        self._entries_by_job = sorted(ledger.entries, key=lambda row: _nulls_last(row["job_id"], row["seq"]))
        self._snapshots = in_stored_order(ledger.snapshots)
        self._jobs = sorted(ledger.jobs, key=lambda row: _nulls_last(row["job_id"]))

    async def head(self) -> Head | None:
        return self._ledger.head

    async def last_entry(self) -> Head | None:
        if not self._entries:
            return None
        highest = self._entries[-1]
        return Head(highest["seq"], highest["chain_link"], highest["t_hlc"])

    async def tree(self) -> StoredTree | None:
        return self._ledger.tree

    async def tiles(self, level: int, first: int, last: int) -> Mapping[int, bytes]:
        return {
            index: hashes
            for (its_level, index), hashes in self._ledger.tiles.items()
            if its_level == level and first <= index <= last
        }

    def entries(self, from_seq: int | None, to_seq: int | None) -> AsyncIterator[Sequence[tuple[Any, ...]]]:
        wanted = (row for row in self._entries if _within(row["seq"], row["seq"], from_seq, to_seq))
        return self._batches(wanted, ENTRY_COLUMNS)

    def snapshots(self, from_seq: int, to_seq: int | None) -> AsyncIterator[Sequence[tuple[Any, ...]]]:
        wanted = (row for row in self._snapshots if _within(row["from_seq"], row["to_seq"], from_seq, to_seq))
        return self._batches(wanted, SNAPSHOT_COLUMNS)

    def jobs(self) -> AsyncIterator[Sequence[tuple[Any, ...]]]:
        return self._batches(self._jobs, JOB_COLUMNS)

    def entries_by_job(self) -> AsyncIterator[Sequence[tuple[Any, ...]]]:
        return self._batches(self._entries_by_job, FOLD_COLUMNS)

    def commitments(self) -> AsyncIterator[Sequence[tuple[Any, ...]]]:
        wanted = (row for row in self._entries if row["action"] in COMMITMENT_ACTIONS and row["origin"] is None)
        return self._batches(wanted, COMMITMENT_COLUMNS)

    def promised(self) -> AsyncIterator[Sequence[tuple[Any, ...]]]:
        return self._batches(self._ledger.promised, PROMISED_COLUMNS)

    async def index_at(self, to_seq: int) -> IndexAtFloor | None:
        return self._ledger.kept_index.get(to_seq)

    async def retention_entries(self) -> list[tuple[Any, ...]]:
        rows = (row for row in self._entries if row["job_id"] == SUBJECT)
        return [tuple(row[name] for name in ENTRY_COLUMNS) for row in rows]

    async def followed_seq(self) -> int:
        return self._entries[-1]["seq"] if self._entries else 0

    async def exclusions(self) -> Exclusions:
        return COUNT_ALL

    async def _batches(self, rows: Iterable[Row], columns: Sequence[str]) -> AsyncIterator[Sequence[tuple[Any, ...]]]:
        remaining = iter(rows)
        while batch := list(islice(remaining, self._batch_rows)):
            yield [tuple(row[name] for name in columns) for row in batch]


def in_stored_order(snapshots: Iterable[Row]) -> list[Row]:
    """Snapshots in the order that readers give them."""
    return sorted(snapshots, key=lambda row: _nulls_last(row["from_seq"], row["to_seq"]))


def _nulls_last(*values: Any) -> list[Any]:
    """The order that PostgreSQL sorts by."""
    return [(value is None, value) if value is not None else (True,) for value in values]


def _within(first: int | None, last: int | None, from_seq: int | None, to_seq: int | None) -> bool:
    if first is None or last is None:
        return True
    return (from_seq is None or first >= from_seq) and (to_seq is None or last <= to_seq)
