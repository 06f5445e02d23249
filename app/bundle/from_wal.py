"""Exporting what a node wrote and never got to chain: its WAL folder becomes a bundle, offline, nothing changed there.

Unchained records have neither seq nor link. They are exported as a chain of their own, in LSN order from seq 1 on,
signed by the node's key; its log is ``{node_id}.wal/{wal_id}``, so nobody takes it for the tenant's. Of a keyed line
that stands there twice the first counts, as it would have in the chain.

What the control file calls chained is left out. That file may lag behind, so records that were chained just before the
node stopped may be here as well; whoever imports them finds them by their HLC and digest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from hashlib import sha256
from itertools import islice
from pathlib import Path
from typing import Any, Final

import orjson

from ledger import merkle, record
from ledger.bundle.rows import CHAIN_LINK, T_HLC
from ledger.chain import LINK_VERSION, Linker
from ledger.errors import InvalidInputError, NotFoundError, WalCorruptError
from ledger.events import ACTIONS
from ledger.record import IdempotencyKey
from ledger.snapshot import SnapshotClaim
from ledger.verification import SNAPSHOT_COLUMNS
from signing.bundle.writer import BundleWriter, End
from signing.checkpoint import Checkpoint, sign_checkpoint
from signing.keys import Keyring, Signer
from signing.note import verifier_key
from signing.snapshot import sign_snapshot
from wal import control as wal_control
from wal import inspect as wal_inspect
from wal import reader as wal_reader
from wal.inspect import WalReport
from wal.reader import Record

ENTRIES_A_SNAPSHOT: Final = 1000

Row = tuple[Any, ...]


def survey(path: Path) -> WalReport:
    """The one log in ``path``, which is its folder or a ``wal.dir`` that holds no other. A torn tail is left out.

    Raises:
        NotFoundError: there is none.
        InvalidInputError: there are several.
        WalCorruptError: it is damaged.
    """
    folders = wal_inspect.wal_folders(path)
    if len(folders) > 1:
        names = ", ".join(folder.name for folder in folders)
        raise InvalidInputError(f"{path} holds the logs of several nodes ({names}); name the folder of one")
    (report,) = wal_inspect.verify(folders[0])
    if report.verdict == "corrupt":
        raise WalCorruptError(report.segment or folders[0].name, report.offset or 0, report.reason or "damaged")
    return report


def export_from_wal(
    report: WalReport, tenant_id: str, signer: Signer, log_signer: Signer, write: Callable[[bytes], object]
) -> None:
    """Write the bundle of a tenant's unchained records in the log that ``report`` is about.

    Raises:
        NotFoundError: there are none.
        WalCorruptError: the log changed since and is damaged.
        SigningUnavailableError: a signer cannot be reached.
    """
    origin = f"{report.node_id}.wal/{report.wal_id}"
    chain = _Chain(tenant_id, report.node_id, signer)
    writer = BundleWriter(tenant_id=tenant_id, node_id=report.node_id, log_origin=origin)
    with closing(writer):
        records = _of_tenant(_unchained(report), tenant_id)
        while batch := list(islice(records, ENTRIES_A_SNAPSHOT)):
            rows, snapshot = chain.extend(batch)
            write(writer.add_entries(rows))
            writer.add_snapshots([snapshot])
        size, root = chain.tree.size, chain.tree.root()
        if size == 0:
            raise NotFoundError(f"{report.folder} holds no unchained record of tenant {tenant_id}")
        note = sign_checkpoint(Checkpoint(f"{origin}/{tenant_id}", size, root), log_signer)
        log_key = verifier_key(f"{origin}/{tenant_id}", log_signer.public_key)
        keys = Keyring([signer.public_key, log_signer.public_key], [log_key])
        for piece in writer.finish(End(root.hex(), note, (), keys), signer):
            write(piece)


def _unchained(report: WalReport) -> Iterator[Record]:
    """Records beyond what is known to be chained, up to the last sound one."""
    folder = Path(report.folder)
    control = wal_control.load(folder)
    from_lsn = max(report.first_lsn, 1 + (control.chained_lsn if control is not None else 0))
    if from_lsn <= report.last_lsn:
        yield from wal_reader.read(folder, from_lsn, report.node_id, report.last_lsn)


def _of_tenant(records: Iterator[Record], tenant_id: str) -> Iterator[tuple[Record, str, bytes]]:
    """Each record of the tenant with its job id and payload, without lines that a keyed request repeats."""
    seen: dict[tuple[int, str], tuple[bytes, set[int]]] = {}
    for item in records:
        event = record.decode(item.payload)
        if event.tenant_id == tenant_id and not _is_repeated(event.idempotency, seen):
            yield item, event.job_id, event.payload


def _is_repeated(key: IdempotencyKey | None, seen: dict[tuple[int, str], tuple[bytes, set[int]]]) -> bool:
    """Whether the line, or its key with another body, was there before; it is noted."""
    if key is None:
        return False
    digest, lines = seen.setdefault((key.route, key.key), (key.body_digest, set()))
    if digest != key.body_digest or key.line in lines:
        return True
    lines.add(key.line)
    return False


class _Chain:
    """A chain that grows from records, and the snapshots over it."""

    def __init__(self, tenant_id: str, node_id: str, signer: Signer) -> None:
        self.tree = merkle.Frontier()
        self._tenant_id = tenant_id
        self._node_id = node_id
        self._signer = signer
        self._linker = Linker(tenant_id)
        self._link = b""
        self._snapshot_digest: str | None = None

    def extend(self, batch: list[tuple[Record, str, bytes]]) -> tuple[list[Row], Row]:
        """Rows of ``ENTRY_COLUMNS`` for the batch, and the one of ``SNAPSHOT_COLUMNS`` over them."""
        first_seq = self.tree.size + 1
        rows = [self._entry(seq, *item) for seq, item in enumerate(batch, first_seq)]
        leaf_hashes = [merkle.leaf_hash(bytes.fromhex(row[CHAIN_LINK])) for row in rows]
        self.tree.extend(leaf_hashes)
        claim = SnapshotClaim(
            tenant_id=self._tenant_id,
            from_seq=first_seq,
            to_seq=self.tree.size,
            from_chain_link=rows[0][CHAIN_LINK],
            to_chain_link=rows[-1][CHAIN_LINK],
            entry_count=len(rows),
            merkle_root=merkle.root(leaf_hashes).hex(),
            tree_size=self.tree.size,
            tree_root=self.tree.root().hex(),
            snapshot_hlc=rows[-1][T_HLC],
            previous_snapshot=self._snapshot_digest,
            node_id=self._node_id,
            key_id=self._signer.key_id,
        )
        envelope, self._snapshot_digest = sign_snapshot(claim, self._signer)
        columns = (getattr(claim, column) for column in SNAPSHOT_COLUMNS[:-1])
        return rows, (*columns, orjson.dumps(envelope).decode())

    def _entry(self, seq: int, item: Record, job_id: str, payload: bytes) -> Row:
        action = ACTIONS.get(item.type)
        if action is None:
            raise InvalidInputError(f"LSN {item.lsn} has type {item.type}, which this version does not know")
        t_hlc, digest, before = item.hlc.text(), sha256(payload), self._link
        self._link = self._linker.link(seq, t_hlc, job_id, action, before, digest.digest())
        links = (before.hex() or None, self._link.hex(), digest.hexdigest())
        return (seq, t_hlc, *item.hlc, job_id, action, LINK_VERSION, *links, payload.decode(), None)
