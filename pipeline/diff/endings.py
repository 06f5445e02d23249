"""Where a range of a chain may end that is to leave as a bundle: at an entry that a checkpoint is proved to cover.

In a database that is any entry up to the newest checkpoint, proved by the tree; in an archive the last entry of a
manifest, which has a checkpoint and the proof. Either way the root at the end is that of the tree whose leaves the rows
are, so the rows of the range are those that the log signed.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from ledger import merkle
from ledger.errors import ChainDamagedError, ConfigurationError, ProofError, SignatureError
from ledger.merkle import HASH_BYTES, tiles
from pipeline.diff.chains import Chain
from pipeline.source.archives import OpenArchive
from pipeline.source.postgres import OpenPostgres
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


class Endings(Protocol):
    """The ends that ranges of one chain may have."""

    def reach(self, to_seq: int) -> int:
        """The seq to end at for a range that is to hold ``to_seq``: there or behind it if possible, else the last."""

    def ending(self, to_seq: int) -> Ending:
        """The end at a seq that ``reach`` gave.

        Raises:
            ChainDamagedError: the tree does not lead to the checkpoint.
        """


def endings_of(chain: Chain) -> Endings:
    """The ends that ranges of ``chain`` may have.

    Raises:
        ConfigurationError: its place is none of which bundles can be made.
    """
    place = chain.side.place
    if isinstance(place, OpenPostgres):
        return _Signed(chain, place.checkpoint(chain.tenant_id))
    if isinstance(place, OpenArchive):
        return _Archived(chain, place)
    raise ConfigurationError("bundles can be made of a database, an archive or a bundle file alone")


class _Signed:
    """Every entry up to the newest checkpoint."""

    def __init__(self, chain: Chain, text: str | None) -> None:
        self._chain, self._text = chain, text or ""
        self._head = _parsed(chain, text) if text else Checkpoint("", 0, b"")

    def reach(self, to_seq: int) -> int:
        return min(to_seq, self._head.size)

    def ending(self, to_seq: int) -> Ending:
        try:
            proof = tiles.consistency_proof(to_seq, self._head.size, self._chain.tile)
        except ProofError as error:
            raise _unproved(self._chain, error) from error
        return _proved(self._chain, to_seq, self._text, self._head, proof)


class _Archived:
    """The last entry of every manifest."""

    def __init__(self, chain: Chain, place: OpenArchive) -> None:
        self._chain = chain
        self._manifests = {each.manifest.to_seq: each.manifest for each in place.archive(chain.tenant_id).sealed}

    def reach(self, to_seq: int) -> int:
        return min((end for end in self._manifests if end >= to_seq), default=max(self._manifests))

    def ending(self, to_seq: int) -> Ending:
        manifest = self._manifests[to_seq]
        proof = [bytes.fromhex(each) for each in manifest.consistency]
        return _proved(self._chain, to_seq, manifest.checkpoint, _parsed(self._chain, manifest.checkpoint), proof)


def _parsed(chain: Chain, text: str) -> Checkpoint:
    try:
        return checkpoints.parse(note.parse(text).text)
    except SignatureError as error:
        raise ChainDamagedError(chain.tenant_id, f"its checkpoint cannot be read, {error}") from error


def _proved(chain: Chain, to_seq: int, text: str, head: Checkpoint, proof: Sequence[bytes]) -> Ending:
    tile_at, leaf_at = divmod(to_seq - 1, tiles.TILE_WIDTH)
    try:
        root = tiles.root_at(to_seq, chain.tile)
        merkle.verify_consistency(to_seq, head.size, root, head.root, list(proof))
        leaf = chain.tile(0, tile_at)[leaf_at * HASH_BYTES :][:HASH_BYTES]
    except ProofError as error:
        raise _unproved(chain, error) from error
    return Ending(to_seq, head.origin.removesuffix(f"/{chain.tenant_id}"), root, leaf, text, proof)


def _unproved(chain: Chain, error: ProofError) -> ChainDamagedError:
    return ChainDamagedError(chain.tenant_id, f"its tree does not lead to its checkpoint, {error}")
