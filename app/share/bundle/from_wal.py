"""Exporting what a node wrote and never got to chain: its WAL folder becomes a bundle, offline, nothing changed there.

Unchained records have neither seq nor link. They are exported as a chain of their own, in LSN order from seq 1 on,
signed by the node's key; its log is ``{node_id}.wal/{wal_id}``, so nobody takes it for the tenant's. Of a keyed line
that stands there twice the first counts, as it would have in the chain.

What the control file calls chained is left out. That file may lag behind, so records that were chained just before the
node stopped may be here as well; an import finds them by their HLC and digest.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import closing
from itertools import islice
from pathlib import Path
from typing import Final

from ledger.chain import record
from ledger.chain.record import IdempotencyKey
from ledger.errors import InvalidInputError, NotFoundError, WalCorruptError
from ledger.facts.events import ACTIONS
from ledger.positions import Lsn
from signing.bundle.writer import OwnChainBundle, OwnEntry
from signing.keys import Signer
from wal import control as wal_control
from wal import inspect as wal_inspect
from wal import reader as wal_reader
from wal.inspect import WalReport
from wal.reader import Record

ENTRIES_AT_ONCE: Final = 1000


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
    bundle = OwnChainBundle(
        tenant_id=tenant_id, node_id=report.node_id, log_origin=origin, signer=signer, log_signer=log_signer
    )
    with closing(bundle):
        records = _of_tenant(_unchained(report), tenant_id)
        while batch := list(islice(records, ENTRIES_AT_ONCE)):
            write(bundle.append([_entry(*item) for item in batch]))
        if bundle.entry_count == 0:
            raise NotFoundError(f"{report.folder} holds no unchained record of tenant {tenant_id}")
        for piece in bundle.finish():
            write(piece)


def _unchained(report: WalReport) -> Iterator[Record]:
    """Records beyond what is known to be chained, up to the last sound one."""
    folder = Path(report.folder)
    control = wal_control.load(folder)
    from_lsn = max(report.first_lsn, Lsn(1 + (control.chained_lsn if control is not None else 0)))
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


def _entry(item: Record, job_id: str, payload: bytes) -> OwnEntry:
    action = ACTIONS.get(item.type)
    if action is None:
        raise InvalidInputError(f"LSN {item.lsn} has type {item.type}, which this version does not know")
    return OwnEntry(item.hlc, job_id, action, payload)
