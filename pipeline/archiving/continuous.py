"""The archive that fills itself: steps that archive what was signed since, by one process of a ledger at a time.

A step::

    1. takes the turn, an advisory lock in PostgreSQL that this process keeps until it ends or its connection does
    2. reads how far each tenant is signed, and archives those that the archive lacks (``pipeline.archiving.Run``)
    3. appends the new files to the Iceberg table
    4. reads what is left, which is the lag

The archive alone says what is archived. ``Archiver`` remembers the last manifest of each tenant, so that a step lists
only tenants with new entries; what it remembers may be outdated, since names are written once.
"""

from __future__ import annotations

import time
from contextlib import ExitStack
from typing import Final, NamedTuple

import pyarrow.parquet as pq

from ledger.errors import ArchiveInvalidError, LedgerError, UnknownKeyError
from ledger.verification.verdict import Break
from objects.store import ArchiveStore
from pipeline.archive import SealedManifest
from pipeline.archive.reader import ranges_of
from pipeline.archive.table import hinted_version
from pipeline.archive.table_writer import TableWriter
from pipeline.archiving import Run, archive_together
from pipeline.archiving.filing import Ledger, SignedEnd, file_each, found_in
from signing.keys import Keyring, Signer

TURN: Final = "SELECT pg_try_advisory_lock(hashtextextended('tallystick.archive', 0))"
TURN_LOST_S: Final = 25
"""A turn ends with its process at once. Where the machine or the network is gone, PostgreSQL ends the session, and with
it the turn, after this."""
END_WITH_MACHINE: Final = f"""
SELECT set_config('tcp_keepalives_idle', '10', false), set_config('tcp_keepalives_interval', '5', false),
       set_config('tcp_keepalives_count', '3', false), set_config('tcp_user_timeout', '{TURN_LOST_S * 1000}', false)
"""


class TenantLag(NamedTuple):
    """How far a tenant is archived."""

    tenant_id: str
    archived_seq: int
    signed_seq: int
    """Last entry that a signed snapshot covers."""
    waits_s: float
    """How long the oldest signed entry waits that is not archived, 0 without one."""
    found: Break | None
    """What keeps the tenant from being archived further, None if nothing does."""

    @property
    def error(self) -> str | None:
        """``found`` in words."""
        return None if self.found is None else f"{self.found.kind} at seq {self.found.seq}: {self.found.detail}"

    @property
    def lag_entries(self) -> int:
        """Signed entries that are not archived."""
        return max(0, self.signed_seq - self.archived_seq)


class Progress(NamedTuple):
    """The outcome of a step, or how far an archive is that another process fills."""

    has_turn: bool
    """Whether this process archives; another does, or none, if not."""
    tenants: tuple[TenantLag, ...] = ()
    table_version: int = 0
    error: str | None = None
    """Why nothing can be archived, None if nothing is wrong."""
    files: int = 0
    """Written by this step."""
    at_s: float = 0.0
    """``time.monotonic()`` at its end."""

    @property
    def lag_entries(self) -> int:
        """Signed entries of all tenants that are not archived."""
        return sum(each.lag_entries for each in self.tenants)

    def lag_s(self, now_s: float) -> float:
        """How long the oldest signed entry waits at ``now_s``, 0 without one."""
        longest_s = max((each.waits_s for each in self.tenants if each.lag_entries), default=None)
        return 0.0 if longest_s is None else longest_s + max(0.0, now_s - self.at_s)

    @property
    def failures(self) -> int:
        """Errors: of the step as a whole, or of tenants."""
        return (self.error is not None) + sum(each.error is not None for each in self.tenants)


class Archiver:
    """Archives one ledger to one place. Belongs to one thread at a time; ``close`` gives the turn back."""

    def __init__(self, dsn: str, store: ArchiveStore) -> None:
        self._dsn, self._store = dsn, store
        self._session = ExitStack()
        self._ledger: Ledger | None = None
        self._has_turn = False
        self._known: dict[str, SealedManifest] = {}
        self._breaks: dict[str, Break] = {}
        self._table: TableWriter | None = None
        self._version = 0
        self._not_in_table: dict[str, SealedManifest] = {}
        """The last manifests of tenants whose files the table may lack."""
        self._footers: dict[str, pq.FileMetaData] = {}
        """Of files that the table may lack, those that this process wrote in its last step."""
        self._is_first = True
        """Whether the whole archive is still to be compared with the ledger and its table."""

    def step(self, signer: Signer, keyring: Keyring) -> Progress:
        """Archive what is signed and not archived. An error of the place, the ledger or the signer is in the outcome,
        and the next step tries everything again."""
        try:
            if keyring.get(signer.public_key.key_id) is None:
                raise UnknownKeyError(f"the key {signer.public_key.key_id} that would sign is not admitted yet")
            ledger = self._open()
            if not self._takes_turn(ledger):
                return Progress(has_turn=False, at_s=time.monotonic())
            files = self._archive(ledger, ledger.signed(), signer, keyring)
            error = self._extend_table(signer, keyring)
            return self._progress(ledger)._replace(files=files, error=error)
        except LedgerError as error:
            has_turn = self._has_turn
            self.close()
            return Progress(has_turn=has_turn, error=str(error), at_s=time.monotonic())

    def look(self) -> Progress:
        """How far the archive is, by the names of its manifests, whichever process archives. Nothing is written.

        Raises:
            ArchiveUnavailableError, DatabaseUnavailableError, ConfigurationError: a service does not answer.
        """
        self._version = hinted_version(self._store)
        return self._progress(self._open())

    def close(self) -> None:
        """Give the turn back, and forget what an error may have made doubtful."""
        self._session.close()
        self._ledger, self._has_turn, self._is_first, self._table = None, False, True, None
        self._known.clear()
        self._not_in_table.clear()

    def _open(self) -> Ledger:
        if self._ledger is None:
            self._ledger = self._session.enter_context(Ledger.connected(self._dsn))
            self._ledger.connection.run(END_WITH_MACHINE)
        return self._ledger

    def _takes_turn(self, ledger: Ledger) -> bool:
        if not self._has_turn:
            ((self._has_turn,),) = ledger.connection.rows(TURN)
        return self._has_turn

    def _archive(self, ledger: Ledger, signed: list[SignedEnd], signer: Signer, keyring: Keyring) -> int:
        """Archive what these tenants lack; returns the number of files."""
        tenants = None if self._is_first else [each.tenant_id for each in signed if self._lacks(each)]
        if tenants == []:
            return 0
        run = Run(ledger, self._store, signer, keyring, self._known)
        (done,) = archive_together([run], lambda tasks: list(file_each(tasks, ledger, self._store)), tenants)
        self._is_first = False
        self._known |= run.last
        self._not_in_table |= run.last
        self._footers = run.footers
        for tenant_id, found in ((each.tenant_id, each.first_break) for each in done):
            self._breaks.pop(tenant_id, None)
            if found is not None:
                self._known.pop(tenant_id, None)
                self._breaks[tenant_id] = found
        return sum(each.files for each in done)

    def _extend_table(self, signer: Signer, keyring: Keyring) -> str | None:
        """Append the new files to the table; returns why that cannot be done. Archiving goes on without the table."""
        if not self._not_in_table:
            return None
        self._table = self._table or TableWriter(self._store, self._open().log_origin())
        try:
            self._version = self._table.extend(self._not_in_table, signer, keyring, self._footers).number
        except LedgerError as error:
            self._table = None
            return f"the Iceberg table: {error}"
        self._not_in_table.clear()
        self._footers = {}
        return None

    def _lacks(self, signed: SignedEnd) -> bool:
        last = self._known.get(signed.tenant_id)
        return last is None or last.manifest.to_seq < signed.signed_seq

    def _progress(self, ledger: Ledger) -> Progress:
        signed = ledger.signed()
        ends = {each.tenant_id: self._archived_seq(each.tenant_id) for each in signed}
        waits = ledger.unarchived_s({each.tenant_id: ends[each.tenant_id] for each in signed if self._lacks(each)})
        tenants = tuple(
            TenantLag(
                each.tenant_id,
                ends[each.tenant_id],
                each.signed_seq,
                waits.get(each.tenant_id, 0.0),
                self._breaks.get(each.tenant_id),
            )
            for each in signed
        )
        return Progress(self._has_turn, tenants, self._version, at_s=time.monotonic())

    def _archived_seq(self, tenant_id: str) -> int:
        if (last := self._known.get(tenant_id)) is not None:
            return last.manifest.to_seq
        try:
            ranges = ranges_of(self._store, tenant_id)
        except ArchiveInvalidError as error:
            self._breaks.setdefault(tenant_id, found_in(error, 1))
            return 0
        return ranges[-1][1] if ranges else 0
