"""Makes snapshots of the entries in a tenant's tree: one for every ``batch_size`` entries, a shorter one of the rest.

They are signed, unless ``chain.sign_snapshots`` is off: then they have no envelope, and need no key.

Invariant, per tenant::

    tree_size >= signed_seq
"""

from __future__ import annotations

import base64
import hashlib
import sys
import time
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, NamedTuple

import orjson

from app.runtime.metrics import Metrics
from app.store import Connection
from app.store import notary as store
from app.store.jobs.index import store_runs
from app.store.notary import LinkRow
from app.trust.key_in_use import KeyInUse
from app.write.followers.job_indexer import GrownIndex, JobIndexer
from app.write.followers.signed_chain import leaf_hashes_of, not_signed, not_stored, proved_root
from app.write.followers.tree_follower import FollowedTenant
from ledger import merkle
from ledger.errors import InvalidInputError
from ledger.hlc import Hlc
from ledger.verification.snapshot_check import SNAPSHOT_COLUMNS, SnapshotClaim, SnapshotRow, unsigned_digest
from signing.keys import Signer
from signing.snapshot import ENVELOPE, SNAPSHOT_HLC, TO_SEQ, sign_snapshot


class _Batch(NamedTuple):
    """The entries of the next snapshot."""

    claimed: dict[str, Any]
    """What the snapshot says of them, by member of a ``SnapshotClaim``."""
    links: list[LinkRow]
    leaf_hashes: list[bytes]
    are_ours: bool
    """Whether this node chained them, and has them in memory."""


class _Claimed(NamedTuple):
    """A snapshot to sign, and the index of jobs that it names."""

    claim: SnapshotClaim
    grown: GrownIndex | None


class _Made(NamedTuple):
    """A snapshot to store."""

    row: SnapshotRow
    digest: str
    grown: GrownIndex | None = None


_CLAIMED = SNAPSHOT_COLUMNS[:-1]
"""All columns of a row except the envelope, which is last."""


@dataclass(eq=False)
class Snapshotter:
    """Makes and stores snapshots for the notary."""

    node_id: str
    keys: KeyInUse
    batch_size: int
    is_signing: bool
    metrics: Metrics
    indexer: JobIndexer

    async def sign(
        self,
        connection: Connection,
        tenants: Mapping[str, FollowedTenant],
        rest: Collection[str],
        snapshots_max: int = sys.maxsize,
    ) -> list[dict[str, object]]:
        """Sign full batches, of the tenants ``rest`` the remaining entries too: the next batch of every tenant in one
        transaction, ``snapshots_max`` times at most. Returns the new snapshots.

        The caller holds the tenants' locks and has their trees in memory.

        Raises:
            ChainBrokenError: the stored chain is not the one that was followed.
            SignerAwayError: the signer does not answer.
        """
        for name, tenant in tenants.items():
            if tenant.signed_seq is None:
                await self._load_signed(connection, name, tenant)
        made: list[dict[str, object]] = []
        for _ in range(snapshots_max):
            due = {
                name: tenant
                for name, tenant in tenants.items()
                if tenant.unsigned_count() >= (1 if name in rest else self.batch_size)
            }
            if not due:
                break
            rows = await self._sign_next(connection, due)
            made += rows.values()
            for name in due.keys() - rows.keys():
                signed_seq = due[name].signed_seq or 0
                await self._load_signed(connection, name, due[name])
                if due[name].signed_seq == signed_seq:
                    raise not_stored(name, f"the snapshot from seq {signed_seq + 1} on")
        return made

    async def _sign_next(
        self, connection: Connection, tenants: Mapping[str, FollowedTenant]
    ) -> dict[str, dict[str, object]]:
        """Make the next snapshot of each tenant, all in one transaction; returns the rows. A tenant that another node
        covered first has none."""
        made: dict[str, _Made] = {}
        if self.is_signing:
            async with self.keys.signing() as signers:
                claimed = {
                    name: await self._claimed(connection, name, tenant, signers[0].key_id)
                    for name, tenant in tenants.items()
                }
                with self.metrics.signing("snapshots", len(claimed)):
                    made = await self.keys.sign(partial(_signed, claimed, signers))
                async with connection.transaction():
                    ends = [Hlc.parse(each.row[SNAPSHOT_HLC]) for each in made.values()]
                    await self.keys.check_window(connection, signers, ends)
                    for name, each in made.items():
                        if each.grown is not None:
                            await store_runs(connection, name, each.grown.stored, each.grown.merged)
                    inserted = await store.insert_snapshots(connection, {name: each.row for name, each in made.items()})
        else:
            for name, tenant in tenants.items():
                covered = (await self._next_batch(connection, name, tenant)).claimed
                unsigned: SnapshotRow = (*(covered[column] for column in _CLAIMED), None)
                made[name] = _Made(unsigned, unsigned_digest(unsigned))
            async with connection.transaction():
                inserted = await store.insert_snapshots(connection, {name: each.row for name, each in made.items()})
        for name in inserted:
            tenant, (row, digest, grown) = tenants[name], made[name]
            tenant.signed_seq, tenant.signed_digest = row[TO_SEQ], digest
            tenant.job_index = tenant.job_index if grown is None else grown.state
            tenant.unsigned_since_s = None if row[TO_SEQ] >= tenant.head_seq else time.monotonic()
        self.metrics.count("scheduler_batch_snapshots", len(inserted))
        return inserted

    async def _claimed(self, connection: Connection, tenant_id: str, tenant: FollowedTenant, key_id: str) -> _Claimed:
        """The snapshot of the next batch, which this key is to sign."""
        covered, links, leaf_hashes, are_ours = await self._next_batch(connection, tenant_id, tenant)
        grown = await self.indexer.grown(connection, tenant_id, tenant, links, leaf_hashes, are_ours=are_ours)
        claim = SnapshotClaim(
            **covered,
            previous_snapshot=tenant.signed_digest,
            node_id=self.node_id,
            key_id=key_id,
            **({} if grown is None else grown.claimed()),
        )
        return _Claimed(claim, grown)

    async def _load_signed(self, connection: Connection, tenant_id: str, tenant: FollowedTenant) -> None:
        last = await store.last_snapshot(connection, tenant_id)
        tenant.signed_seq, tenant.signed_digest = 0, None
        if last is not None:
            digest, to_seq = _digest_of(last.row), last.row[TO_SEQ]
            if digest is None or not isinstance(to_seq, int) or not 0 < to_seq <= last.head_seq:
                raise not_signed(tenant_id, f"its newest snapshot, up to seq {to_seq}, is not one of its chain")
            tenant.signed_seq, tenant.signed_digest = to_seq, digest
        if tenant.signed_seq >= tenant.head_seq:
            tenant.unsigned_since_s = None

    async def _next_batch(self, connection: Connection, tenant_id: str, tenant: FollowedTenant) -> _Batch:
        assert tenant.tree is not None
        from_seq = (tenant.signed_seq or 0) + 1
        entry_count = min(self.batch_size, tenant.tree.size - from_seq + 1)
        to_seq = from_seq + entry_count - 1
        links = tenant.links_from(from_seq, entry_count)
        tree_root = tenant.roots.get(to_seq) if tenant.rooted_from_seq <= from_seq else None
        if not (are_ours := len(links) == entry_count):
            links, tree_root = await store.read_links(connection, tenant_id, from_seq, entry_count), None
        leaf_hashes = leaf_hashes_of(tenant_id, links, entry_count)
        if tree_root is None:
            tree_root = await proved_root(connection, tenant_id, tenant.tree, from_seq, leaf_hashes)
        last = links[-1]
        claimed = {
            "tenant_id": tenant_id,
            "from_seq": from_seq,
            "to_seq": last.seq,
            "from_chain_link": links[0].chain_link,
            "to_chain_link": last.chain_link,
            "entry_count": len(links),
            "merkle_root": merkle.root(leaf_hashes).hex(),
            "tree_size": last.seq,
            "tree_root": tree_root.hex(),
            "snapshot_hlc": last.t_hlc,
        }
        return _Batch(claimed, links, leaf_hashes, are_ours)


def _signed(claimed: Mapping[str, _Claimed], signers: Sequence[Signer]) -> dict[str, _Made]:
    """The snapshots, signed; by tenant."""
    made: dict[str, _Made] = {}
    for name, (claim, grown) in claimed.items():
        envelope, digest = sign_snapshot(claim, *signers)
        row = (*(getattr(claim, column) for column in _CLAIMED), orjson.dumps(envelope).decode())
        made[name] = _Made(row, digest, grown)
    return made


def _digest_of(row: SnapshotRow) -> str | None:
    """Digest of a stored snapshot, None if the row or its envelope is of no form."""
    try:
        if row[ENVELOPE] is None:
            return unsigned_digest(row)
        return hashlib.sha256(base64.b64decode(orjson.loads(row[ENVELOPE])["payload"])).hexdigest()
    except (ValueError, TypeError, KeyError, InvalidInputError):
        return None
