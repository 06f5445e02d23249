"""Making a receipt out of rows and tiles as they are stored, neither of which is believed.

Every row must be what its link says, every link the leaf that the signed checkpoint covers: what does not hold is
refused, never signed.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import msgspec

from ledger.bundle.rows import CHAIN_LINK, SEQ, EntryObject, Row
from ledger.errors import BrokenRangeError
from ledger.merkle import leaf_hash, tiles, verify_inclusion
from ledger.positions import Seq, leaf_index_of
from ledger.verification.entry_check import check_apart
from ledger.verification.verdict import Findings
from signing import checkpoint as checkpoints
from signing.bundle.anchors import Unproven
from signing.keys import Keyring, Signer
from signing.receipt.form import FORMAT_VERSION, Extended, ProvedEntry, PublishedKey, PublishedKeys, Receipt, seal


@dataclass(frozen=True, kw_only=True)
class Material:
    """What a receipt is made of, all of one state of the ledger."""

    tenant_id: str
    log_origin: str
    node_id: str
    covers: Literal["job", "entry"]
    job_id: str
    rows: Sequence[Row]
    """The entries, by seq, at least one; all covered by the checkpoint."""
    checkpoint: str
    """The signed note."""
    said: Sequence[Unproven]
    keys: Keyring
    """The published keys of the log."""
    extends: int | None = None
    """Size of an earlier tree, which the checkpoint is to be shown to extend; none but that of a size up to its own."""

    @property
    def tiles(self) -> set[tuple[int, int]]:
        """The tiles that ``make`` asks for."""
        size = checkpoints.read(self.checkpoint).size
        wanted: set[tuple[int, int]] = set()
        for row in self.rows:
            wanted |= tiles.inclusion_tiles(leaf_index_of(Seq(row[SEQ])), size)
        for first in self._first_sizes:
            wanted |= tiles.consistency_tiles(first, size)
        return wanted

    @property
    def _first_sizes(self) -> list[int]:
        return [each.size for each in self.said] + ([] if self.extends is None else [self.extends])


def make(material: Material, get_tile: tiles.GetTile, signer: Signer) -> bytes:
    """The file of a receipt, signed.

    Raises:
        BrokenRangeError: rows do not hold.
        ProofError: rows or tiles are not those that the checkpoint covers.
        ReceiptInvalidError: they are not those of the job, each once; or as ``seal``.
        ReceiptTooLargeError: there is too much for one receipt.
        SigningUnavailableError: the signer cannot be reached.
    """
    signed = checkpoints.read(material.checkpoint)
    findings = Findings()
    check_apart(material.tenant_id, material.rows, findings)
    found = findings.first_break()
    if found is not None:
        raise BrokenRangeError(found)

    def consistency(first: int) -> list[bytes]:
        return tiles.consistency_proof(first, signed.size, get_tile)

    entries = []
    for row in material.rows:
        index = leaf_index_of(Seq(row[SEQ]))
        hashes = tiles.inclusion_proof(index, signed.size, get_tile)
        verify_inclusion(index, signed.size, leaf_hash(bytes.fromhex(row[CHAIN_LINK])), hashes, signed.root)
        entries.append(ProvedEntry(_in_hex(hashes), EntryObject.of(material.tenant_id, row)))
    extends = None if material.extends is None else Extended(_in_hex(consistency(material.extends)), material.extends)
    receipt = Receipt(
        anchors=[each.made(consistency(each.size)) for each in material.said],
        checkpoint=material.checkpoint,
        covers=material.covers,
        entries=entries,
        extends=extends,
        format_version=FORMAT_VERSION,
        job_id=material.job_id,
        keys=_published(material.keys),
        log_origin=material.log_origin,
        node_id=material.node_id,
        tenant_id=material.tenant_id,
    )
    return seal(receipt, signer)


def _published(keys: Keyring) -> PublishedKeys:
    items = msgspec.convert([key.to_json() for key in keys], list[PublishedKey])
    return PublishedKeys(items, list(keys.log_verifier_keys), keys.root_key_id)


def _in_hex(hashes: Sequence[bytes]) -> list[str]:
    return [each.hex() for each in hashes]
