"""Private fields in answers: shown as submitted while their key exists, as erased once it is destroyed.

A value that was sealed elsewhere (an imported bundle), or that this node cannot open now, is shown as it is stored. So
are all values of a tenant whose entries about erasures are damaged.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import orjson

from app.runtime.logs import log
from app.store.chain_reads import ListedEntry
from app.store.reading import json_in
from app.trust.privacy_knowledge import PrivacyKnowledge
from ledger import private_fields
from ledger.errors import DatabaseUnavailableError, PrivateValueError
from ledger.facts.events import ACTOR
from ledger.machines.jobs import JobState
from ledger.private_fields import Path, SealedValue
from signing.private_keys import DataKey

Keys = Mapping[str, DataKey | None]


class Revealing:
    """Opens the private values that this node may open."""

    def __init__(self, knowledge: PrivacyKnowledge) -> None:
        self._knowledge = knowledge

    async def states(self, tenant_id: str, states: Sequence[JobState]) -> Sequence[JobState]:
        """The states as the tenant may see them."""
        if tenant_id not in self._knowledge.declarations:
            return states
        keys = await self._keys(tenant_id, [part for state in states for part in _free_parts(state)])
        return [_state(state, tenant_id, keys) for state in states]

    async def payloads(self, tenant_id: str, events: Sequence[ListedEntry]) -> list[Any]:
        """The payloads of the events as the tenant may see them; made for orjson."""
        if tenant_id not in self._knowledge.declarations:
            return [orjson.Fragment(event.payload) for event in events]
        payloads = [json_in(event.payload) for event in events]
        keys = await self._keys(tenant_id, payloads)
        return [
            _shown(payload, (), tenant_id, event.t_hlc, keys) for event, payload in zip(events, payloads, strict=True)
        ]

    async def _keys(self, tenant_id: str, values: Sequence[Any]) -> Keys:
        wanted = {sealed.key_id for value in values for sealed in private_fields.sealed_values(value)}
        if not wanted or not self._knowledge.may_show(tenant_id):
            return {}
        try:
            return await self._knowledge.keys.by_id(tenant_id, wanted)
        except DatabaseUnavailableError as error:
            log.warning("private_fields_not_opened", tenant_id=tenant_id, error=str(error))
            return {}


def _free_parts(state: JobState) -> list[Any]:
    """The parts of a state whose content callers choose freely."""
    created = [] if state.created is None else [state.created.spec, state.created.actor]
    return created if state.end is None else [*created, *state.end.outcome.values()]


def _state(state: JobState, tenant_id: str, keys: Keys) -> JobState:
    created, end = state.created, state.end
    if created is not None:
        hlc = "{}:{}:{}".format(*created.order[:3])
        created = created._replace(
            spec=_shown(created.spec, ("spec",), tenant_id, hlc, keys),
            actor=_shown(created.actor, (ACTOR,), tenant_id, hlc, keys),
        )
    if end is not None:
        hlc = "{}:{}:{}".format(*end.rank[1:4])
        end = end._replace(
            outcome={name: _shown(value, (name,), tenant_id, hlc, keys) for name, value in end.outcome.items()}
        )
    return state._replace(created=created, end=end)


def _shown(value: Any, path: Path, tenant_id: str, hlc: str, keys: Keys) -> Any:
    def show(sealed: SealedValue, path: Path) -> Any:
        if sealed.key_id not in keys:
            return private_fields.to_json(sealed)
        if (key := keys[sealed.key_id]) is None:
            return private_fields.erased()
        try:
            return orjson.Fragment(key.open(sealed, private_fields.associated_data(tenant_id, hlc, key.key_id, path)))
        except PrivateValueError as error:
            log.error("private_value_unreadable", tenant_id=tenant_id, hlc=hlc, error=str(error))
            return private_fields.to_json(sealed)

    return private_fields.shown(value, path, show)
