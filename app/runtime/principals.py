"""Who calls, and what he may do for which tenants.

A pattern of tenants is a tenant's name, the beginning of names and ``*``, or ``*``, which means ``_system`` too::

    acme      team-*      *

A right is none but itself: who may write may not therefore read. ``_system`` is read with ``audit``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from datetime import datetime
from typing import Final, NamedTuple

from app.runtime.rights import Right
from ledger import names
from ledger.errors import ForbiddenError, InvalidInputError
from ledger.facts.events import SYSTEM_TENANT

EVERY_TENANT: Final = "*"
_NAMES_KNOWN_MAX = 4096
"""Tenants of which a principal remembers what it may do."""
_NAME_CHARACTERS_MAX = 64
"""Longest name that is remembered: no tenant has a longer one, whatever callers ask for."""
_is_pattern = re.compile(names.TENANTS).fullmatch


def check_pattern(pattern: str) -> str:
    """``pattern``, which is one of tenants.

    Raises:
        InvalidInputError: it is none.
    """
    if _is_pattern(pattern) is not None:
        return pattern
    raise InvalidInputError(f"{pattern[:100]!r} is no pattern of tenants: a tenant, the beginning of some and *, or *")


def covers(pattern: str, other: str) -> bool:
    """Whether ``pattern`` stands for the tenant ``other``, or for all that the pattern ``other`` stands for."""
    if pattern.endswith("*"):
        return pattern == EVERY_TENANT or (other.startswith(pattern[:-1]) and other != SYSTEM_TENANT)
    return pattern == other


class Grant(NamedTuple):
    """Rights, and the patterns of tenants that they are for."""

    rights: frozenset[Right]
    tenants: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Principal:
    """A known caller. ``id`` goes into what it writes; None where nobody is asked who he is."""

    id: str | None
    source: str
    """What said so: ``none``, ``token``, ``oidc`` or ``certificate``."""
    grants: Sequence[Grant]
    expires_at: datetime | None = None
    token_id: str | None = None
    _known: dict[tuple[Right, str], bool] = field(default_factory=dict, repr=False)
    _rights: frozenset[Right] = field(init=False, repr=False)
    """All that the caller has for some tenant."""

    def __post_init__(self) -> None:
        object.__setattr__(self, "_rights", frozenset().union(*(grant.rights for grant in self.grants)))

    def patterns(self, right: Right) -> list[str]:
        """The tenants for which the caller has it."""
        return [pattern for grant in self.grants if right in grant.rights for pattern in grant.tenants]

    def may(self, right: Right, tenant_id: str) -> bool:
        """Whether the caller has the right for the tenant, or for all that a pattern of tenants stands for."""
        known = self._known.get((right, tenant_id))
        if known is None:
            if len(self._known) >= _NAMES_KNOWN_MAX:
                self._known.clear()
            needed = Right.AUDIT if right is Right.READ and tenant_id == SYSTEM_TENANT else right
            known = any(covers(pattern, tenant_id) for pattern in self.patterns(needed))
            if len(tenant_id) <= _NAME_CHARACTERS_MAX:
                self._known[right, tenant_id] = known
        return known

    def check(self, right: Right, tenant_id: str) -> None:
        """Return if ``may``.

        Raises:
            ForbiddenError: it may not.
        """
        if not self.may(right, tenant_id):
            raise ForbiddenError(f"{self.name} has not the right {right} for tenant {tenant_id}", tenant_id)

    def check_any(self, right: Right) -> None:
        """Return if the caller has the right for some tenant.

        Raises:
            ForbiddenError: for none.
        """
        if right not in self._rights:
            raise ForbiddenError(f"{self.name} has not the right {right}")

    @property
    def name(self) -> str:
        """As errors and log lines call the caller."""
        return self.id or "nobody"


EVERYBODY: Final = Principal(None, "none", (Grant(frozenset(Right), (EVERY_TENANT,)),))
"""Whoever calls while ``auth.mode`` is ``none``."""


def grant_of(rights: Collection[str], tenants: Collection[str]) -> Grant:
    """The grant that these texts mean.

    Raises:
        InvalidInputError: there is no such right, or no such pattern.
    """
    unknown = set(rights).difference(Right)
    if unknown:
        raise InvalidInputError(f"{min(unknown)[:100]!r} is no right; there are {', '.join(Right)}", ("rights",))
    try:
        return Grant(frozenset(map(Right, rights)), tuple(map(check_pattern, tenants)))
    except InvalidInputError as error:
        raise InvalidInputError(f"tenants: {error}", ("tenants",)) from None
