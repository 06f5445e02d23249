"""Ranges of a chain as signed bundles, for the side that lacks them: an import there leaves what it was missing.

The driver writes them, so that the signing key stays with it, range by range and in memory of one part: rows pass the
checks of verification on their way, the last of them must be the leaf that the tree of a checkpoint has there, and a
file takes its name once it is whole. Inside are the chain's own snapshots, the checkpoint and the proof that leads to
it; of a bundle that is compared it is the file as it is.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any, Final, NamedTuple

from ledger import merkle
from ledger.bundle.rows import CHAIN_LINK, SEQ
from ledger.errors import ChainDamagedError, LedgerError
from ledger.verification import ENTRY_COLUMNS
from ledger.verification.entry_check import EntryChecker
from ledger.verification.verdict import Findings
from pipeline.arrow import Row, rows_of
from pipeline.diff.chains import Chain
from pipeline.diff.cover import SeqRange, cover
from pipeline.diff.endings import Ending, Endings
from pipeline.signers import Signers
from pipeline.source import open_pieces
from signing.bundle.reader import digest_of
from signing.bundle.snapshot_rows import FROM_SEQ, TO_SEQ
from signing.bundle.writer import BundleEnd, BundleWriter
from signing.keys import Keyring
from signing.whole_file import whole_file

NODE_ID: Final = "diff"
"""What these bundles name as the node that exported them: none did."""


class WrittenBundle(NamedTuple):
    """One bundle that was written."""

    file: Path
    tenant_id: str
    lacking: str
    """The side that lacks what is in it, ``a`` or ``b``."""
    from_seq: int
    to_seq: int
    size_bytes: int
    digest: str
    """SHA-256 of the file, hex."""

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {
            "file": str(self.file),
            "tenant_id": self.tenant_id,
            "lacking": self.lacking,
            "from_seq": self.from_seq,
            "to_seq": self.to_seq,
            "bytes": self.size_bytes,
            "sha256": self.digest,
        }


def write_bundles(
    chain: Chain, ranges: Sequence[SeqRange], lacking: str, folder: Path, signers: Signers
) -> tuple[list[WrittenBundle], int]:
    """Bundles of ``ranges``, which ``lacking`` lacks, in ``folder``; and how many entries stay behind, because no
    checkpoint covers them yet.

    Raises:
        ChainDamagedError: rows do not hold together, or are not those of the signed tree; nothing of that range is
            there.
        SigningUnavailableError: the signer cannot be reached.
        OSError: a file cannot be written.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file = chain.side.place.file
    if file is not None:
        return [_copied(chain, file, lacking, folder)] if ranges else [], 0
    endings = Endings(chain)
    reached = [SeqRange(each.from_seq, endings.reach(each.to_seq)) for each in ranges]
    left = sum(
        each.to_seq - max(end.to_seq, each.from_seq - 1)
        for each, end in zip(ranges, reached, strict=True)
        if end.to_seq < each.to_seq
    )
    covered = cover((each for each in reached if each.from_seq <= each.to_seq), gap_max=0)
    return [_made(chain, within, endings.ending(within.to_seq), lacking, folder, signers) for within in covered], left


def _made(
    chain: Chain, within: SeqRange, ending: Ending, lacking: str, folder: Path, signers: Signers
) -> WrittenBundle:
    tenant_id, path = chain.tenant_id, folder / _name(chain.tenant_id, within)
    end = BundleEnd(ending.root.hex(), ending.checkpoint, ending.consistency, Keyring([signers.signer.public_key]))
    writer = BundleWriter(tenant_id=tenant_id, node_id=NODE_ID, log_origin=ending.log_origin)
    with closing(writer), whole_file(path) as file:
        for rows in _checked(chain, within, ending.leaf):
            file.write(writer.add_entries(rows))
        for row in _snapshots(chain, within):
            _add_snapshot(writer, tenant_id, row)
        for piece in writer.finish(end, signers.signer):
            file.write(piece)
    digest, size_bytes = digest_of(path)
    return WrittenBundle(path, tenant_id, lacking, *within, size_bytes, digest)


def _copied(chain: Chain, file: Path, lacking: str, folder: Path) -> WrittenBundle:
    head = chain.side.place.facts(chain.tenant_id).head
    assert head is not None, "a bundle names its end"
    within = SeqRange(chain.first_seq, head.seq)
    for _ in _checked(chain, within, None):
        continue
    path = folder / _name(chain.tenant_id, within)
    with whole_file(path) as target, file.open("rb") as source:
        shutil.copyfileobj(source, target)
    digest, size_bytes = digest_of(path)
    return WrittenBundle(path, chain.tenant_id, lacking, *within, size_bytes, digest)


def _name(tenant_id: str, within: SeqRange) -> str:
    return f"{tenant_id}-{within.from_seq}-{within.to_seq}.bundle.tar"


def _checked(chain: Chain, within: SeqRange, leaf: bytes | None) -> Iterator[list[Row]]:
    """The rows of a range, judged as verification judges them; the last is to be ``leaf`` of the tree, when given.

    Raises:
        ChainDamagedError: they do not hold.
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
    pieces = chain.side.place.pieces([chain.tenant_id], from_seq=within.from_seq, to_seq=within.to_seq)
    for _, reader in open_pieces(pieces):
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
    found = findings.first_break()
    if found is not None:
        raise ChainDamagedError(
            chain.tenant_id, f"nothing of it is carried elsewhere, {found.kind} at seq {found.seq}, {found.detail}"
        )


def _snapshots(chain: Chain, within: SeqRange) -> Iterator[Row]:
    """The snapshots that lie wholly in the range, by ``from_seq``, each once."""
    pieces = chain.side.place.pieces([chain.tenant_id], from_seq=within.from_seq, to_seq=within.to_seq)
    after_seq = within.from_seq - 1
    for _, reader in open_pieces(replace(piece, is_first=False) for piece in pieces):
        for batch in reader.snapshots():
            for row in rows_of(batch):
                if after_seq < row[FROM_SEQ] and row[TO_SEQ] <= within.to_seq:
                    after_seq = row[FROM_SEQ]
                    yield row


def _add_snapshot(writer: BundleWriter, tenant_id: str, row: Row) -> None:
    try:
        writer.add_snapshots((row,))
    except (LedgerError, TypeError, ValueError) as error:
        reason = f"its snapshot from seq {row[FROM_SEQ]} to {row[TO_SEQ]} cannot be read: {error}"
        raise ChainDamagedError(tenant_id, reason) from error
