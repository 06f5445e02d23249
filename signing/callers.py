"""Callers of a ledger: the entries of ``_system`` that register their keys, and the judge of what they signed.

The facts, as payloads of entries (docs/formats/signed-events.md)::

    CALLER_REGISTERED    change_id, name, tenants, key_id, algorithm, public_key_pem; registered_by or none; statement
    CALLER_REVOKED       change_id, key_id, revoked_from_hlc, reason; revoked_by or none; statement
    SIGNATURES_REQUIRED  change_id, tenant_id, types, from_hlc; required_by or none; statement

All count only with a statement by a key that may change keys (:mod:`signing.key_statement`), and no statement names
them. Of several entries with one ``change_id`` the first counts, so nobody can repeat a change. A key is registered
once: a revoked one never counts again. From ``from_hlc`` on, and not before the HLC of its own entry nor before earlier
ones of the tenant apply, callers sign the events of ``types``, and no other need be signed.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Annotated, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

from ledger import names
from ledger.decoding import convert
from ledger.errors import InvalidInputError, reported_as
from ledger.facts.events import JOB_EVENTS, SystemAction
from ledger.hlc import PHYSICAL_MS_MAX, Hlc
from ledger.signed_events import CallerSignature
from ledger.verification.caller_check import CallerJudge, Judged
from signing.key_statement import given
from signing.keys import Caller, CallerJson, Keyring, KnownCallers, PublicKey, Requirement, RequirementJson

CALLER_PREFIX = "caller:"
"""Prefix of ``job_id`` in an entry about a caller's key, whose id follows, or about the events of a tenant."""
AFTER_CALLERS = "caller;"
"""The first text, in byte order, after all of these."""
CALLER_ACTIONS = frozenset(
    {SystemAction.CALLER_REGISTERED, SystemAction.CALLER_REVOKED, SystemAction.SIGNATURES_REQUIRED}
)
ROOTS_KEPT: Final = 1024
"""Signatures over several events whose verdicts are kept."""

_ChangeId = Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
_Text = Annotated[str, Meta(min_length=1)]
_Pattern = Annotated[str, Meta(pattern=names.anchored(names.TENANTS))]


class RegisteredCaller(NamedTuple):
    """A caller's key, from now on."""

    change_id: str
    caller: Caller
    registered_by: str | None = None

    def facts(self) -> dict[str, object]:
        """As the entry has them, without the statement."""
        key = self.caller.key
        return given(
            change_id=self.change_id,
            name=self.caller.name,
            tenants=list(self.caller.tenants),
            key_id=key.key_id,
            algorithm=key.algorithm,
            public_key_pem=key.public_key_pem,
            registered_by=self.registered_by,
        )


class RevokedCaller(msgspec.Struct, frozen=True):
    """Events that this key signed from an HLC on do not count."""

    change_id: _ChangeId
    key_id: str
    revoked_from_hlc: str
    reason: _Text
    revoked_by: str | None = None

    def facts(self) -> dict[str, object]:
        """As the entry has them, without the statement."""
        return given(**msgspec.to_builtins(self))


class RequiredSignatures(msgspec.Struct, frozen=True):
    """Which events of a tenant their callers sign from now on."""

    change_id: _ChangeId
    tenant_id: Annotated[str, Meta(pattern=names.anchored(names.TENANT_ID))]
    types: list[Literal[tuple(JOB_EVENTS)]]  # type: ignore[valid-type]
    from_hlc: str
    required_by: str | None = None

    def facts(self) -> dict[str, object]:
        """As the entry has them, without the statement."""
        return given(**msgspec.to_builtins(self))


class _Registered(msgspec.Struct):
    change_id: _ChangeId
    name: Annotated[str, Meta(pattern=names.anchored(names.PRINCIPAL))]
    tenants: Annotated[tuple[_Pattern, ...], Meta(min_length=1)]
    key_id: str
    algorithm: str
    public_key_pem: str
    registered_by: str | None = None


CallerChange = RegisteredCaller | RevokedCaller | RequiredSignatures


def read_change(action: str, facts: Mapping[str, object]) -> CallerChange:
    """The change in an entry with these facts.

    Raises:
        InvalidInputError: the facts describe none.
    """
    with reported_as(InvalidInputError, "the facts of a caller are malformed", msgspec.ValidationError, OverflowError):
        if action == SystemAction.CALLER_REVOKED:
            revoked = convert(facts, RevokedCaller)
            Hlc.parse(revoked.revoked_from_hlc)
            return revoked
        if action == SystemAction.SIGNATURES_REQUIRED:
            required = convert(facts, RequiredSignatures)
            Hlc.parse(required.from_hlc)
            return required
        said = convert(facts, _Registered)
    key = PublicKey(said.key_id, said.algorithm, said.public_key_pem)
    return RegisteredCaller(said.change_id, Caller(key, said.name, said.tenants), said.registered_by)


def known_callers(changes: Iterable[tuple[CallerChange, Hlc]]) -> KnownCallers:
    """What these changes, each with the HLC of its entry, in the order of the chain, add up to."""
    callers: dict[str, Caller] = {}
    required: list[Requirement] = []
    for change, hlc in changes:
        if isinstance(change, RegisteredCaller):
            callers.setdefault(change.caller.key.key_id, change.caller)
        elif isinstance(change, RequiredSignatures):
            earlier = [_behind(each.from_hlc) for each in required if each.tenant_id == change.tenant_id]
            from_hlc = max(Hlc.parse(change.from_hlc), hlc, *earlier)
            required.append(Requirement(from_hlc, change.tenant_id, tuple(change.types)))
        elif (caller := callers.get(change.key_id)) is not None:
            from_hlc = Hlc.parse(change.revoked_from_hlc)
            ends = min(from_hlc, caller.key.revoked_from_hlc or from_hlc)
            callers[change.key_id] = caller._replace(key=replace(caller.key, revoked_from_hlc=ends))
    return KnownCallers(callers, tuple(sorted(required)))


def _behind(hlc: Hlc) -> Hlc:
    """An HLC of a later time, if there is one."""
    return hlc._replace(physical_ms=min(hlc.physical_ms + 1, PHYSICAL_MS_MAX))


class SavedCallers(msgspec.Struct):
    """What a judge knows, as plain values."""

    callers: list[CallerJson]
    signatures_required: list[RequirementJson]
    fault: str | None = None


class KeyedJudge(CallerJudge):
    """Judges what callers signed by their registered keys."""

    def __init__(self, known: KnownCallers | None, fault: str | None = None, *, passes_unknown: bool = False) -> None:
        """Without ``known`` nothing is judged. ``fault`` is why not all changes of callers are known, so that nobody
        counts for sure. ``passes_unknown``: events of other callers are not checked, nor those that a caller
        may not sign here."""
        self.known = known
        self._fault = fault
        self._passes_unknown = passes_unknown
        self._by_tenant: dict[str, list[Requirement]] = {}
        for each in () if known is None else known.required:
            self._by_tenant.setdefault(each.tenant_id, []).append(each)
        self._roots: dict[tuple[str, bytes, bytes], bool] = {}

    @classmethod
    def of_saved(cls, saved: SavedCallers | None) -> KeyedJudge:
        """The judge that has said ``saved``."""
        if saved is None:
            return cls(None)
        return cls(KnownCallers.of_json(saved.callers, saved.signatures_required), saved.fault)

    def saved(self) -> SavedCallers | None:
        """All that this judge knows, for another process."""
        if self.known is None:
            return None
        return convert({**self.known.to_json(), "fault": self._fault}, SavedCallers)

    def judge(self, tenant_id: str, signature: CallerSignature, message: bytes, hlc: Hlc) -> Judged:
        """As ``CallerJudge``."""
        if self.known is None:
            return Judged("not_checked")
        unknown = "not_checked" if self._passes_unknown else "unknown_key"
        if (caller := self.known.by_key.get(signature.key_id)) is None:
            return Judged(unknown, f"key {signature.key_id} is of no caller that is known")
        if (refusal := refusal_of(caller, tenant_id, hlc)) is not None:
            return Judged(unknown, refusal)
        raw = signature.raw()
        if not (self._made_many(caller, raw, message) if signature.is_of_many else caller.key.made(raw, message)):
            return Judged("broken", f"caller {caller.name} did not sign this with key {signature.key_id}")
        if self._fault is not None:
            return Judged("unknown_key", f"whether key {signature.key_id} still counts: {self._fault}")
        return Judged("ok")

    def _made_many(self, caller: Caller, raw: bytes, message: bytes) -> bool:
        at = caller.key.key_id, message, raw
        if (made := self._roots.get(at)) is None:
            if len(self._roots) == ROOTS_KEPT:
                self._roots.clear()
            made = self._roots[at] = caller.key.made(raw, message)
        return made

    def requires_any(self, tenant_id: str) -> bool:
        """As ``CallerJudge``."""
        return tenant_id in self._by_tenant

    def is_required(self, tenant_id: str, type_name: str, hlc: Hlc) -> bool:
        """As ``CallerJudge``."""
        applying = [each for each in self._by_tenant.get(tenant_id, ()) if each.from_hlc <= hlc]
        return bool(applying) and type_name in applying[-1].types


def judge_of(keyring: Keyring | None) -> KeyedJudge:
    """The judge by the callers of a ring."""
    return KeyedJudge(None if keyring is None else keyring.callers)


def refusal_of(caller: Caller, tenant_id: str, hlc: Hlc) -> str | None:
    """Why a caller's signature of an event of this tenant at this HLC does not count; None if it does."""
    if not any(each == tenant_id or (each[-1] == "*" and tenant_id.startswith(each[:-1])) for each in caller.tenants):
        return f"caller {caller.name} may not sign events of tenant {tenant_id}"
    return caller.key.refusal(hlc)
