"""Writes ranges of a chain as signed bundles; importing them supplies the events that the other side lacks.

Ranges are few and not much longer than the missing entries: each becomes a bundle, and an import skips entries that
exist. A range ends at an entry that a checkpoint provably covers. In a database that is any entry up to the newest
checkpoint, proved by the tree. In an archive it is the last entry of a manifest, which has a checkpoint and the
proof. In both cases the root at the end is that of the tree whose leaves are the rows.

The driver writes the bundles, so that the signing key stays with it, range by range in the memory of one part. Rows
pass the checks of verification, the last row must be the leaf that the checkpoint's tree has there, and a file is
renamed into place once it is whole. A bundle holds the chain's own snapshots, the checkpoint and the proof that
leads to it. If the compared side is a bundle, its file is used unchanged.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from ledger import merkle
from ledger.bundle.rows import CHAIN_LINK, SEQ
from ledger.errors import ChainDamagedError, LedgerError, ProofError, SignatureError
from ledger.merkle import HASH_BYTES, tiles
from ledger.verification import ENTRY_COLUMNS
from ledger.verification.entry_check import EntryChecker
from ledger.verification.verdict import Findings
from pipeline.arrow import Row, rows_of
from pipeline.diff.events import Chain
from pipeline.places.protocol import ChainName, Sealed
from pipeline.source import open_pieces
from signing import checkpoint as checkpoints
from signing.bundle.reader import digest_of
from signing.bundle.writer import BundleEnd, BundleWriter
from signing.checkpoint import Checkpoint
from signing.files import open_regular, whole_file
from signing.keys import Keyring, Signer
from signing.snapshot import FROM_SEQ, TO_SEQ

NODE_ID: Final = "diff"
"""The exporting node named in these bundles; no real node exports them."""
GAP_MAX: Final = 1000
"""Most existing entries included in a bundle to join two ranges."""
RANGES_MAX: Final = 100
"""Most bundles of one tenant in one direction."""


class SeqRange(NamedTuple):
    """Entries ``from_seq..to_seq``, both included."""

    from_seq: int
    to_seq: int


def cover(wanted: Iterable[SeqRange], *, gap_max: int = GAP_MAX, ranges_max: int = RANGES_MAX) -> list[SeqRange]:
    """Ascending, disjoint ranges that contain all of ``wanted``, which may overlap and come in any order.

    Ranges at most ``gap_max`` entries apart are joined. If more than ``ranges_max`` remain, the nearest are joined,
    whatever the gap.
    """
    joined: list[SeqRange] = []
    for each in sorted(wanted):
        if joined and each.from_seq - joined[-1].to_seq - 1 <= gap_max:
            joined[-1] = SeqRange(joined[-1].from_seq, max(joined[-1].to_seq, each.to_seq))
        else:
            joined.append(each)
    if len(joined) <= ranges_max:
        return joined
    gaps = sorted(range(1, len(joined)), key=lambda at: joined[at].from_seq - joined[at - 1].to_seq)
    kept = sorted(gaps[len(joined) - ranges_max :])
    starts, ends = [0, *kept], [*kept, len(joined)]
    return [SeqRange(joined[start].from_seq, joined[end - 1].to_seq) for start, end in zip(starts, ends, strict=True)]


class Endings:
    """The permitted ends of ranges of one chain."""

    def __init__(self, chain: Chain, signer: Signer) -> None:
        self._chain, self._signer = chain, signer
        self._sealed = {each.to_seq: each for each in chain.place.sealed(chain.tenant_id)}
        self._tree = merkle.Frontier()
        """Covers the entries that ``_of_rows`` has read."""

    def reach(self, to_seq: int) -> int:
        """The end for a range that should contain ``to_seq``: at or after it if possible, else the last possible
        end."""
        if not (ends := [end for end in self._sealed if end is not None]):
            return min(to_seq, self._head(self._sealed[None]).size) if self._sealed else 0
        return min((end for end in ends if end >= to_seq), default=max(ends))

    def ending(self, to_seq: int) -> tuple[str, bytes, BundleEnd]:
        """The end at a seq from ``reach``: the log's origin without the tenant, the leaf required of the last entry,
        and the end of the bundle. Calls MUST be in ascending order.

        Raises:
            ChainDamagedError: the tree does not lead to the checkpoint.
        """
        sealed = self._sealed.get(to_seq) or self._sealed[None]
        head, proof = self._head(sealed), sealed.consistency
        try:
            if sealed.to_seq is None:
                proof = tiles.consistency_proof(to_seq, head.size, self._chain.tile)
                root, leaf = self._of_tiles(to_seq)
            else:
                root, leaf = self._of_rows(to_seq)
            merkle.verify_consistency(to_seq, head.size, root, head.root, list(proof))
        except ProofError as error:
            raise ChainDamagedError(
                self._chain.tenant_id, f"its tree does not lead to its checkpoint, {error}"
            ) from error
        log_origin = head.origin.removesuffix(f"/{self._chain.tenant_id}")
        return log_origin, leaf, BundleEnd(root.hex(), sealed.checkpoint, proof, Keyring([self._signer.public_key]))

    def _of_tiles(self, to_seq: int) -> tuple[bytes, bytes]:
        """Root and last leaf of the stored tree up to ``to_seq``."""
        tile_at, leaf_at = divmod(to_seq - 1, tiles.TILE_WIDTH)
        leaf = self._chain.tile(0, tile_at)[leaf_at * HASH_BYTES :][:HASH_BYTES]
        return tiles.root_at(to_seq, self._chain.tile), leaf

    def _of_rows(self, to_seq: int) -> tuple[bytes, bytes]:
        """Root and last leaf of the tree built from the links up to ``to_seq``."""
        leaf = b""
        for leaves in self._chain.leaves(self._tree.size + 1, to_seq):
            self._tree.extend(leaves)
            leaf = leaves[-1]
        return self._tree.root(), leaf

    def _head(self, sealed: Sealed) -> Checkpoint:
        try:
            return checkpoints.read(sealed.checkpoint)
        except SignatureError as error:
            raise ChainDamagedError(self._chain.tenant_id, f"its checkpoint cannot be read, {error}") from error


class WrittenBundle(NamedTuple):
    """One bundle that was written."""

    file: Path
    tenant_id: str
    lacking: str
    """The side that lacks its entries, ``a`` or ``b``."""
    from_seq: int
    to_seq: int
    bytes: int
    sha256: str
    """Digest of the file, hex."""
    ledger: str | None = None
    """The name of the ledger of its entries; None if one pair of ledgers was compared."""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        fields = self._asdict()
        return ChainName(fields.pop("ledger"), self.tenant_id).named(fields)


def write_bundles(
    chain: Chain, ranges: Sequence[SeqRange], lacking: str, folder: Path, signer: Signer
) -> tuple[list[WrittenBundle], int]:
    """Write bundles of ``ranges``, at least one, which side ``lacking`` lacks, to ``folder``. Returns them, and the
    number of entries left out because no checkpoint covers them yet.

    Raises:
        ChainDamagedError: rows are inconsistent, or differ from the signed tree; no bundle of that range is written.
        SigningUnavailableError: the signer cannot be reached.
        OSError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    if chain.place.file is not None:
        return [_copied(chain, chain.place.file, lacking, folder)], 0
    endings = Endings(chain, signer)
    reached = [SeqRange(each.from_seq, endings.reach(each.to_seq)) for each in ranges]
    left = sum(
        max(0, each.to_seq - max(end.to_seq, each.from_seq - 1)) for each, end in zip(ranges, reached, strict=True)
    )
    covered = cover((each for each in reached if each.from_seq <= each.to_seq), gap_max=0)
    return [_made(chain, within, endings, lacking, folder, signer) for within in covered], left


def _made(
    chain: Chain, within: SeqRange, endings: Endings, lacking: str, folder: Path, signer: Signer
) -> WrittenBundle:
    path = _path(folder, chain, within)
    log_origin, leaf, end = endings.ending(within.to_seq)
    writer = BundleWriter(tenant_id=chain.tenant_id, node_id=NODE_ID, log_origin=log_origin)
    with closing(writer), whole_file(path) as file:
        for rows in _checked(chain, within, leaf):
            file.write(writer.add_entries(rows))
        for row in _snapshots(chain, within):
            try:
                writer.add_snapshots((row,))
            except (LedgerError, TypeError, ValueError) as error:
                raise ChainDamagedError(
                    chain.tenant_id, f"its snapshot from seq {row[FROM_SEQ]} to {row[TO_SEQ]} cannot be read: {error}"
                ) from error
        for piece in writer.finish(end, signer):
            file.write(piece)
    return _written(path, chain, lacking, within)


def _copied(chain: Chain, file: Path, lacking: str, folder: Path) -> WrittenBundle:
    head = chain.place.facts(chain.tenant_id).head
    assert head is not None, "a bundle names its end"
    within = SeqRange(chain.first_seq, head.seq)
    for _ in _checked(chain, within, None):
        continue
    path = _path(folder, chain, within)
    with whole_file(path) as target, open_regular(file) as source:
        shutil.copyfileobj(source, target)
    return _written(path, chain, lacking, within)


def _path(folder: Path, chain: Chain, within: SeqRange) -> Path:
    return folder / f"{chain.tenant_id}-{within.from_seq}-{within.to_seq}.bundle.tar"


def _written(path: Path, chain: Chain, lacking: str, within: SeqRange) -> WrittenBundle:
    digest, size = digest_of(path)
    return WrittenBundle(path, chain.tenant_id, lacking, *within, size, digest)


def _checked(chain: Chain, within: SeqRange, leaf: bytes | None) -> Iterator[list[Row]]:
    """The rows of a range, checked as in verification; the last row must be ``leaf`` of the tree, if given.

    Raises:
        ChainDamagedError: a row is invalid.
    """
    findings = Findings()
    before = chain.link_at(within.from_seq - 1) if within.from_seq > chain.first_seq else None
    checker = EntryChecker(
        chain.tenant_id,
        findings,
        first_seq=within.from_seq,
        prev_link=before,
        is_prev_known=before is not None or within.from_seq == 1,
    )
    last: Row | None = None
    for _, reader in open_pieces(chain.place.pieces([chain.tenant_id], from_seq=within.from_seq, to_seq=within.to_seq)):
        for batch in reader.entries(ENTRY_COLUMNS):
            rows = list(rows_of(batch))
            checker.check(rows)
            _refuse_broken(chain, findings)
            last = rows[-1]
            yield rows
    if checker.last_seq != within.to_seq:
        findings.add("gap", checker.last_seq + 1, f"entries from seq {checker.last_seq + 1} on are missing")
    elif last is not None and leaf is not None and merkle.leaf_hash(bytes.fromhex(last[CHAIN_LINK])) != leaf:
        findings.add("tree", last[SEQ], f"the signed tree has another entry at seq {last[SEQ]}")
    _refuse_broken(chain, findings)


def _refuse_broken(chain: Chain, findings: Findings) -> None:
    if (found := findings.first_break()) is not None:
        raise ChainDamagedError(
            chain.tenant_id, f"nothing of it is carried elsewhere, {found.kind} at seq {found.seq}, {found.detail}"
        )


def _snapshots(chain: Chain, within: SeqRange) -> Iterator[Row]:
    """The snapshots that lie wholly in the range, by ``from_seq``, each once."""
    pieces = chain.place.pieces([chain.tenant_id], from_seq=within.from_seq, to_seq=within.to_seq)
    after_seq = within.from_seq - 1
    for _, reader in open_pieces(replace(piece, is_first=False) for piece in pieces):
        for batch in reader.snapshots():
            for row in rows_of(batch):
                if after_seq < row[FROM_SEQ] and row[TO_SEQ] <= within.to_seq:
                    after_seq = row[FROM_SEQ]
                    yield row
