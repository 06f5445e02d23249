"""A bundle of the chain of a v1 scheduler, by which that chain becomes the beginning of a tenant.

In one pass over one state of the database::

    1. each row is verified as it is read, and becomes an entry of link version 1 with its own HLC and link
    2. the last row must be the one that ``chain_heads`` names
    3. the bundle is a chain of its own, ``v1/{first link}``, with snapshots and a checkpoint by the key of the caller

The same rows, tenant and Ed25519 key give the same bytes. Memory holds one part of the file and one batch of rows.
"""

from __future__ import annotations

from collections.abc import Callable
from contextlib import closing
from typing import Any, Final, NamedTuple

from app.store.v1_log import V1Log
from ledger.bundle.rows import CHAIN_LINK, Row
from ledger.bundle.v1 import V1Chain
from ledger.errors import InvalidInputError, LedgerError, V1ChainBrokenError
from signing.bundle.writer import OwnChainBundle
from signing.keys import Signer

NODE_ID: Final = "v1"
"""The exporter that the manifest names."""
_FAULTS: Final = (V1ChainBrokenError, InvalidInputError)


class V1Export(NamedTuple):
    """What was written; ``fault`` is why the rows behind were left out, None if there are none."""

    payload_form: str
    fault: LedgerError | None


async def export_from_v1(
    log: V1Log, tenant_id: str, signers: tuple[Signer, Signer], write: Callable[[bytes], Any], *, up_to_fault: bool
) -> V1Export:
    """Write the bundle of the rows in ``log``, for ``tenant_id`` here; ``signers`` sign snapshots and the checkpoint.

    With ``up_to_fault`` the bundle ends before the first row that does not fit, if any row fits.

    Raises:
        V1ChainBrokenError: the chain was changed.
        InvalidInputError: the chain is in order, and no ledger can hold a row of it.
        DATABASE_FAULTS: the database cannot be read.
    """
    export = _Export(log, tenant_id, signers, write)
    with closing(export):
        fault: LedgerError | None = None
        try:
            await export.run()
        except _FAULTS as error:
            if not up_to_fault or export.chain.seq == 0:
                raise
            fault = error
        export.finish()
    return V1Export(export.chain.payload_form, fault)


class _Export:
    def __init__(
        self, log: V1Log, tenant_id: str, signers: tuple[Signer, Signer], write: Callable[[bytes], Any]
    ) -> None:
        self._log = log
        self._tenant_id = tenant_id
        self._signer, self._log_signer = signers
        self._write = write
        self._bundle: OwnChainBundle | None = None
        self.chain = V1Chain()

    async def run(self) -> None:
        """Add the rows; those before a fault are added when it is raised."""
        repeated_id = await self._log.repeated_hlc_id()
        async for batch in self._log.batches():
            entries: list[Row] = []
            try:
                for row in batch:
                    if row.id == repeated_id:
                        raise InvalidInputError(
                            f"row id {row.id} has HLC {row.t_hlc}, as an earlier row has; a chain that is kept as it "
                            "is has each HLC once"
                        )
                    whole = row if row.payload is not None else row._replace(payload=await self._log.payload(row))
                    entries.append(self.chain.take(whole))
            finally:
                self._add(entries)
        self.chain.check_end(await self._log.head())

    def _add(self, entries: list[Row]) -> None:
        if not entries:
            return
        if self._bundle is None:
            self._bundle = OwnChainBundle(
                tenant_id=self._tenant_id,
                node_id=NODE_ID,
                log_origin=f"v1/{entries[0][CHAIN_LINK]}",
                signer=self._signer,
                log_signer=self._log_signer,
            )
        self._write(self._bundle.keep(entries))

    def finish(self) -> None:
        """Write the rest of the file."""
        assert self._bundle is not None
        for piece in self._bundle.finish():
            self._write(piece)

    def close(self) -> None:
        """Close temporary files."""
        if self._bundle is not None:
            self._bundle.close()
