"""A bundle of a chain that is made for it: entries that stand in no chain, or in many, linked one behind the other.

Nobody's ledger holds that chain. Its log has an origin of its own, so nobody takes it for a tenant's; who made it signs
it, a snapshot for every ``ENTRIES_A_SNAPSHOT`` entries and a checkpoint at the end. Memory holds one part of the file.

Invariants::

    snapshots cover 1..seq without gap once ``finish`` was called    entries behind the last < ENTRIES_A_SNAPSHOT
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Final, NamedTuple

import orjson

from ledger import merkle
from ledger.bundle.rows import CHAIN_LINK, PREV_CHAIN_LINK, SEQ, T_HLC, Row
from ledger.chain import LINK_VERSION, Linker
from ledger.hlc import Hlc
from ledger.verification.snapshot_check import SNAPSHOT_COLUMNS, SnapshotClaim
from signing.bundle.writer import BundleEnd, BundleWriter
from signing.checkpoint import Checkpoint, sign_checkpoint
from signing.keys import Keyring, Signer
from signing.note import VerifierKey
from signing.snapshot import sign_snapshot

ENTRIES_A_SNAPSHOT: Final = 1000


class OwnEntry(NamedTuple):
    """One entry before it is linked; ``origin`` is the text of where it was chained first, None when nowhere."""

    hlc: Hlc
    job_id: str
    action: str
    payload: bytes
    origin: str | None = None


@dataclass(kw_only=True, eq=False)
class OwnChainBundle:
    """Makes one bundle of a chain of its own. Calls in order: ``keep``, ``append``, ``finish``; then ``close``."""

    tenant_id: str
    node_id: str
    log_origin: str
    signer: Signer
    """Signs snapshots and the manifest."""
    log_signer: Signer
    """Signs the checkpoint; of Ed25519."""

    def __post_init__(self) -> None:
        self._origin = f"{self.log_origin}/{self.tenant_id}"
        self._writer = BundleWriter(tenant_id=self.tenant_id, node_id=self.node_id, log_origin=self.log_origin)
        self._linker = Linker(self.tenant_id)
        self._tree = merkle.Frontier()
        self._link = b""
        self._unsigned: list[bytes] = []
        self._snapshot_digest: str | None = None

    @property
    def entry_count(self) -> int:
        """Entries so far; the seq of the last."""
        return self._writer.entry_count

    @property
    def end(self) -> tuple[int, str | None]:
        """Seq and link of the last entry; 0 and None when there is none."""
        return self._writer.entry_count, self._link.hex() or None

    def close(self) -> None:
        """Close what is on disk; nothing more may be called."""
        self._writer.close()

    def append(self, entries: Sequence[OwnEntry]) -> bytes:
        """Link the next entries; returns the pieces of the file that are ready.

        Raises:
            InvalidInputError: an entry is longer than a bundle takes, or there are too many.
            SigningUnavailableError: the signer cannot be reached.
        """
        if not entries:
            return b""
        hlcs, job_ids, actions, payloads, origins = zip(*entries, strict=True)
        t_hlcs = [hlc.text() for hlc in hlcs]
        digests = [sha256(payload).digest() for payload in payloads]
        sources = [b"" if origin is None else origin.encode() for origin in origins]
        first_seq = self.entry_count + 1
        links = self._linker.links(first_seq, self._link, t_hlcs, job_ids, actions, digests, sources)
        prevs = [self._link, *links[:-1]]
        rows = [
            (
                *(seq, t_hlc, *entry.hlc, entry.job_id, entry.action, LINK_VERSION),
                *(prev.hex() or None, link.hex(), digest.hex(), entry.payload.decode(), entry.origin),
            )
            for seq, t_hlc, entry, prev, link, digest in zip(
                range(first_seq, first_seq + len(entries)), t_hlcs, entries, prevs, links, digests, strict=True
            )
        ]
        return self._add(rows)

    def keep(self, rows: Sequence[Row]) -> bytes:
        """Take over rows of ``ENTRY_COLUMNS`` as they are, links and all, which MUST have been verified and MUST follow
        on what is there; returns the pieces of the file that are ready.

        Raises:
            InvalidInputError: a row is longer than a bundle takes, or there are too many.
            SigningUnavailableError: the signer cannot be reached.
        """
        seq, link = self.end
        for row in rows:
            assert (row[SEQ], row[PREV_CHAIN_LINK]) == (seq + 1, link)
            seq, link = row[SEQ], row[CHAIN_LINK]
        return self._add(rows)

    def finish(self) -> Iterator[bytes]:
        """The rest of the file. At least one entry MUST be there.

        Raises:
            SigningUnavailableError: a signer cannot be reached.
        """
        if self._unsigned:
            self._sign(self._last_hlc)
        root = self._tree.root()
        note = sign_checkpoint(Checkpoint(self._origin, self._tree.size, root), self.log_signer)
        log_key = VerifierKey.of(self._origin, self.log_signer.public_key).text()
        keys = Keyring([self.signer.public_key, self.log_signer.public_key], [log_key])
        yield from self._writer.finish(BundleEnd(root.hex(), note, (), keys), self.signer)

    def _add(self, rows: Sequence[Row]) -> bytes:
        pieces = self._writer.add_entries(rows)
        for row in rows:
            self._link, self._last_hlc = bytes.fromhex(row[CHAIN_LINK]), row[T_HLC]
            self._unsigned.append(self._link)
            if len(self._unsigned) == ENTRIES_A_SNAPSHOT:
                self._sign(self._last_hlc)
        return pieces

    def _sign(self, last_hlc: str) -> None:
        """A snapshot over the entries behind the last one."""
        links, self._unsigned = self._unsigned, []
        from_seq = self._tree.size + 1
        leaf_hashes = merkle.leaf_hashes(links)
        self._tree.extend(leaf_hashes)
        claim = SnapshotClaim(
            tenant_id=self.tenant_id,
            from_seq=from_seq,
            to_seq=self._tree.size,
            from_chain_link=links[0].hex(),
            to_chain_link=links[-1].hex(),
            entry_count=len(links),
            merkle_root=merkle.root(leaf_hashes).hex(),
            tree_size=self._tree.size,
            tree_root=self._tree.root().hex(),
            snapshot_hlc=last_hlc,
            previous_snapshot=self._snapshot_digest,
            node_id=self.node_id,
            key_id=self.signer.key_id,
        )
        envelope, self._snapshot_digest = sign_snapshot(claim, self.signer)
        columns = (getattr(claim, column) for column in SNAPSHOT_COLUMNS[:-1])
        self._writer.add_snapshots([(*columns, orjson.dumps(envelope).decode())])
