"""Signs snapshots of the entries in a tenant's tree: one for every ``batch_size`` entries, a shorter one of the rest.

Invariant, per tenant::

    tree_size >= signed_seq
"""

from __future__ import annotations

import base64
import hashlib
import sys
import time
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from functools import partial
from operator import attrgetter

import orjson

from app.runtime.metrics import Metrics
from app.store import Connection
from app.store import notary as store
from app.trust.key_in_use import KeyInUse
from app.write.followers.signed_chain import leaf_hashes_of, not_signed, not_stored, proved_root
from app.write.followers.tree_follower import FollowedTenant
from ledger import merkle
from ledger.hlc import Hlc
from ledger.verification.snapshot_check import SNAPSHOT_COLUMNS, SnapshotClaim, SnapshotRow
from signing.snapshot import sign_snapshot

_claimed = attrgetter(*SNAPSHOT_COLUMNS[:-1])
"""The claim of a row: all its columns except the envelope, which is last."""


@dataclass(eq=False)
class Snapshotter:
    """Signs and stores snapshots for the notary."""

    node_id: str
    keys: KeyInUse
    batch_size: int
    metrics: Metrics

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
        """Sign the next batch of each tenant, all in one transaction; returns the rows. A tenant that another node
        signed first has none."""
        async with self.keys.signing() as signer:
            claims: dict[str, SnapshotClaim] = {}
            rows: dict[str, SnapshotRow] = {}
            digests: dict[str, str] = {}
            for name, tenant in tenants.items():
                claim = claims[name] = await self._claim(connection, name, tenant, signer.key_id)
                envelope, digests[name] = await self.keys.sign(partial(sign_snapshot, claim, signer))
                rows[name] = (*_claimed(claim), orjson.dumps(envelope).decode())
            async with connection.transaction():
                await self.keys.check_window(
                    connection, signer, [Hlc.parse(claim.snapshot_hlc) for claim in claims.values()]
                )
                inserted = await store.insert_snapshots(connection, rows)
        for name in inserted:
            tenant = tenants[name]
            tenant.signed_seq, tenant.signed_digest = claims[name].to_seq, digests[name]
            tenant.unsigned_since_s = None if tenant.signed_seq >= tenant.head_seq else time.monotonic()
        self.metrics.count("scheduler_batch_snapshots", len(inserted))
        return inserted

    async def _load_signed(self, connection: Connection, tenant_id: str, tenant: FollowedTenant) -> None:
        last = await store.last_snapshot(connection, tenant_id)
        tenant.signed_seq, tenant.signed_digest = 0, None
        if last is not None:
            digest = _payload_digest(last.dsse_envelope)
            if digest is None or not isinstance(last.to_seq, int) or not 0 < last.to_seq <= last.head_seq:
                raise not_signed(tenant_id, f"its newest snapshot, up to seq {last.to_seq}, is not one of its chain")
            tenant.signed_seq, tenant.signed_digest = last.to_seq, digest
        if tenant.signed_seq >= tenant.head_seq:
            tenant.unsigned_since_s = None

    async def _claim(
        self, connection: Connection, tenant_id: str, tenant: FollowedTenant, key_id: str
    ) -> SnapshotClaim:
        """The claim of the next batch's snapshot."""
        assert tenant.tree is not None
        from_seq = (tenant.signed_seq or 0) + 1
        entry_count = min(self.batch_size, tenant.tree.size - from_seq + 1)
        to_seq = from_seq + entry_count - 1
        links = tenant.links_from(from_seq, entry_count)
        tree_root = tenant.roots.get(to_seq) if tenant.rooted_from_seq <= from_seq else None
        if len(links) < entry_count:
            links, tree_root = await store.read_links(connection, tenant_id, from_seq, entry_count), None
        leaf_hashes = leaf_hashes_of(tenant_id, links, entry_count)
        if tree_root is None:
            tree_root = await proved_root(connection, tenant_id, tenant.tree, from_seq, leaf_hashes)
        last = links[-1]
        return SnapshotClaim(
            tenant_id=tenant_id,
            from_seq=from_seq,
            to_seq=last.seq,
            from_chain_link=links[0].chain_link,
            to_chain_link=last.chain_link,
            entry_count=len(links),
            merkle_root=merkle.root(leaf_hashes).hex(),
            tree_size=last.seq,
            tree_root=tree_root.hex(),
            snapshot_hlc=last.t_hlc,
            previous_snapshot=tenant.signed_digest,
            node_id=self.node_id,
            key_id=key_id,
        )


def _payload_digest(dsse_envelope: str) -> str | None:
    """SHA-256 of the envelope's payload, None if the stored value is not an envelope."""
    try:
        return hashlib.sha256(base64.b64decode(orjson.loads(dsse_envelope)["payload"])).hexdigest()
    except (ValueError, TypeError, KeyError):
        return None
