"""Where a range of a chain may end that is to leave as a bundle: at an entry that a checkpoint is proved to cover.

In a database that is any entry up to the newest checkpoint, proved by the tree; in an archive the last entry of a
manifest, which has a checkpoint and the proof. Either way the root at the end is that of the tree whose leaves the rows
are, so the rows of the range are those that the log signed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from ledger import merkle
from ledger.errors import ChainDamagedError, ProofError, SignatureError
from ledger.merkle import HASH_BYTES, tiles
from pipeline.diff.chains import Chain
from pipeline.places.protocol import Sealed
from signing import checkpoint as checkpoints
from signing import note
from signing.checkpoint import Checkpoint


class Ending(NamedTuple):
    """The end of a range."""

    to_seq: int
    log_origin: str
    """The checkpoint's origin but for ``/`` and the tenant."""
    root: bytes
    """Root of the tree over the entries up to ``to_seq``."""
    leaf: bytes
    """The leaf of that tree that the last entry must be."""
    checkpoint: str
    consistency: Sequence[bytes]


class Endings:
    """The ends that ranges of one chain may have."""

    def __init__(self, chain: Chain) -> None:
        self._chain = chain
        self._sealed = {each.to_seq: each for each in chain.side.place.sealed(chain.tenant_id)}

    def reach(self, to_seq: int) -> int:
        """The seq to end at for a range that is to hold ``to_seq``: there or behind it if possible, else the last."""
        ends = [end for end in self._sealed if end is not None]
        if not ends:
            return min(to_seq, self._head(self._sealed[None]).size) if self._sealed else 0
        return min((end for end in ends if end >= to_seq), default=max(ends))

    def ending(self, to_seq: int) -> Ending:
        """The end at a seq that ``reach`` gave.

        Raises:
            ChainDamagedError: the tree does not lead to the checkpoint.
        """
        sealed = self._sealed.get(to_seq) or self._sealed[None]
        head, proof = self._head(sealed), sealed.consistency
        tile_at, leaf_at = divmod(to_seq - 1, tiles.TILE_WIDTH)
        try:
            if sealed.to_seq is None:
                proof = tiles.consistency_proof(to_seq, head.size, self._chain.tile)
            root = tiles.root_at(to_seq, self._chain.tile)
            merkle.verify_consistency(to_seq, head.size, root, head.root, list(proof))
            leaf = self._chain.tile(0, tile_at)[leaf_at * HASH_BYTES :][:HASH_BYTES]
        except ProofError as error:
            raise ChainDamagedError(
                self._chain.tenant_id, f"its tree does not lead to its checkpoint, {error}"
            ) from error
        log_origin = head.origin.removesuffix(f"/{self._chain.tenant_id}")
        return Ending(to_seq, log_origin, root, leaf, sealed.checkpoint, proof)

    def _head(self, sealed: Sealed) -> Checkpoint:
        try:
            return checkpoints.parse(note.parse(sealed.checkpoint).text)
        except SignatureError as error:
            raise ChainDamagedError(self._chain.tenant_id, f"its checkpoint cannot be read, {error}") from error
