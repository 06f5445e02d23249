"""What the PRUNED entry of a prefix carries (``ledger.machines.carried``), and what cannot be carried yet."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import orjson

from app.runtime.tasks import keep_newest
from app.store import Connection, commitments
from app.store import privacy_history as store
from app.store.entry_check import EntryCheck
from ledger import canonical
from ledger.errors import InvalidInputError
from ledger.facts.events import SystemAction
from ledger.machines.carried import (
    CARRIED_SHARE,
    CarriedDeclaration,
    CarriedFields,
    ErasedKeys,
    carry_commitments,
    read_private_fields,
)
from ledger.machines.retention import Floor, Stop, Why
from ledger.private_fields import facts_of
from ledger.verification import ENTRY_COLUMNS

FOLDED_AT_ONCE: Final = 5000
"""Entries of commitments that are in memory while the state is computed."""
TENANTS_REMEMBERED_MAX: Final = 100
"""Tenants whose facts are remembered from one plan to the next, which then reads what is new."""
REMEMBERED_TIMES_MAX: Final = 10
"""A state is remembered if it is at most so many times as long as one that an entry carries."""
_SEQ, _ACTION, _PAYLOAD, _AT_MS = map(ENTRY_COLUMNS.index, ("seq", "action", "payload", "hlc_physical"))


class Carried(NamedTuple):
    """What the PRUNED entry carries, and the entries that must stay as something of it cannot be."""

    commitments: dict[str, Any] | None = None
    private_fields: dict[str, Any] | None = None
    stops: tuple[Stop, ...] = ()

    def facts(self) -> dict[str, Any]:
        """Members of the PRUNED entry."""
        said = {"commitments": self.commitments, "private_fields": self.private_fields}
        return {name: value for name, value in said.items() if value is not None}


NOTHING_CARRIED: Final = Carried()


class _Folded(NamedTuple):
    """The commitments of a chain at ``to_seq``, from those that its floor carries; entries do not change, so a later
    state is folded from there."""

    floor_seq: int
    to_seq: int
    state: dict[str, Any] | None
    first_seq: int
    """The first entry about them above the floor, 0 without any."""


@dataclass(kw_only=True, eq=False)
class Carrying:
    """Computes what is carried, for one node."""

    check: EntryCheck
    record_bytes_max: int

    def __post_init__(self) -> None:
        self._folded: OrderedDict[str, _Folded] = OrderedDict()

    async def at(self, connection: Connection, tenant_id: str, floor: Floor | None, to_seq: int) -> Carried:
        """What the PRUNED entry about the entries behind ``floor`` up to ``to_seq`` carries. In a transaction that
        shows one state.

        Raises:
            ChainDamagedError: an entry is not as it was chained.
        """
        state, stop = await self._commitments(connection, tenant_id, floor, to_seq)
        fields, stops = await self._private_fields(connection, tenant_id, floor, to_seq)
        return Carried(state, fields, (*stops, *([] if stop is None else [stop])))

    async def _commitments(
        self, connection: Connection, tenant_id: str, floor: Floor | None, to_seq: int
    ) -> tuple[dict[str, Any] | None, Stop | None]:
        found = self._folded.get(tenant_id)
        floor_seq = 0 if floor is None else floor.to_seq
        is_later = found is None or found.floor_seq != floor_seq or found.to_seq <= to_seq
        if found is None or found.floor_seq != floor_seq or found.to_seq > to_seq:
            found = _Folded(floor_seq, floor_seq, None if floor is None else floor.commitments, 0)
        state, first_seq, chunk = found.state, found.first_seq, list[tuple[int, str, str]]()
        try:
            async for entry in commitments.entries(connection, self.check, tenant_id, found.to_seq, to_seq):
                first_seq = first_seq or entry.seq
                chunk.append((entry.seq, entry.action, entry.payload))
                if len(chunk) == FOLDED_AT_ONCE:
                    state, chunk = carry_commitments(state, chunk), []
            state = carry_commitments(state, chunk)
        except InvalidInputError as error:
            return None, Stop(first_seq, Why.COMMITMENT, f"the commitments cannot be made out: {error}")
        size, most = len(canonical.encode(state)), self.record_bytes_max // CARRIED_SHARE
        if is_later and size <= REMEMBERED_TIMES_MAX * most:
            keep_newest(self._folded, tenant_id, _Folded(floor_seq, to_seq, state, first_seq), TENANTS_REMEMBERED_MAX)
        if not first_seq or size <= most:
            return state, None
        return None, Stop(
            first_seq,
            Why.COMMITMENT,
            f"what is in force by then takes {size} bytes, and an entry carries {most}: end commitments, or raise "
            "wal.record_bytes_max",
        )

    async def _private_fields(
        self, connection: Connection, tenant_id: str, floor: Floor | None, to_seq: int
    ) -> tuple[dict[str, Any] | None, list[Stop]]:
        floor_seq = 0 if floor is None else floor.to_seq
        before = read_private_fields(None if floor is None else floor.private_fields)
        rows = await store.privacy_entries(connection, self.check, tenant_id, floor_seq, to_seq)
        declared, erased, stops = before.declared, set[str](), list[Stop]()
        for row in rows:
            action, seq = row[_ACTION], row[_SEQ]
            try:
                facts = facts_of(action, orjson.loads(row[_PAYLOAD]))
            except (InvalidInputError, ValueError) as error:
                stops.append(Stop(seq, Why.PRIVACY, f"it does not say what is private, or who was erased: {error}"))
                continue
            if action == SystemAction.PRIVACY_DECLARED:
                declared = CarriedDeclaration(seq, row[_AT_MS], **facts)
            else:
                erased.update(facts["key_ids"])
        # 1. Each change is known to be chained.
        if rows and await store.has_open_records(connection, tenant_id):
            stops.append(Stop(rows[0][_SEQ], Why.PRIVACY, "a change of private fields is not known to be chained yet"))
        # 2. What is in force is what was chained last.
        newest_seq = await store.newest_declared_seq(connection, tenant_id)
        if newest_seq is not None and floor_seq < newest_seq <= to_seq and declared and declared.seq != newest_seq:
            detail = "it is in force, though another declaration was chained after it: declare again"
            stops.append(Stop(newest_seq, Why.PRIVACY, detail))
        # 3. Records name the keys that were erased.
        known = await store.erased_up_to(connection, tenant_id, floor_seq)
        if ErasedKeys.of(known) != before.erased:
            stops.append(Stop(floor_seq + 1, Why.PRIVACY, "privacy_records names other keys than were erased"))
        elif await store.erased_up_to(connection, tenant_id, to_seq) != known | erased:
            first = next((row[_SEQ] for row in rows if row[_ACTION] == SystemAction.SUBJECT_ERASED), floor_seq + 1)
            stops.append(Stop(first, Why.PRIVACY, "privacy_records names other keys than it erased"))
        return CarriedFields(declared, ErasedKeys.of(known | erased)).to_json(), stops
