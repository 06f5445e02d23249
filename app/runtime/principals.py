"""Callers, their rights for tenants, and the right that each route needs.

A pattern of tenants is a tenant's name, the beginning of names and ``*``, or ``*``, which means ``_system`` too::

    acme      team-*      *

A right includes no other: a caller who may write may not therefore read. ``_system`` is read with ``audit``. A route
that is not listed needs ``ADMIN`` of all tenants. The right is checked before the body of a request is read, by every
kind of route. While ``auth.mode`` is ``none`` every caller has all rights.
"""

from __future__ import annotations

import enum
import re
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any, Final, NamedTuple

from ledger import names
from ledger.errors import ForbiddenError, InvalidInputError
from ledger.facts.events import SYSTEM_TENANT

EVERY_TENANT: Final = "*"


class Right(enum.StrEnum):
    """The rights of callers."""

    READ = "read"
    """Jobs and their events."""
    WRITE = "write"
    """Events."""
    AUDIT = "audit"
    """Verify, prove, export, and read ``_system``."""
    OPERATE = "operate"
    """Sign now, import, report and read how the service does."""
    ADMIN = "admin"
    """Change keys, tokens, private fields; erase."""


def covers(pattern: str, other: str) -> bool:
    """Whether ``pattern`` matches the tenant ``other``, or all tenants that the pattern ``other`` matches."""
    if pattern.endswith("*"):
        return pattern == EVERY_TENANT or (other.startswith(pattern[:-1]) and other != SYSTEM_TENANT)
    return pattern == other


def shown_callers(known: Mapping[str, Any], patterns: Sequence[str]) -> dict[str, Any]:
    """Of callers as ``KnownCallers.to_json`` has them, those of tenants that these patterns match, no others."""

    def shown(other: str) -> bool:
        return any(covers(pattern, other) or covers(other, pattern) for pattern in patterns)

    callers = [{**each, "tenants": [*filter(shown, each["tenants"])]} for each in known["callers"]]
    required = [each for each in known["signatures_required"] if shown(each["tenant_id"])]
    return {"callers": [each for each in callers if each["tenants"]], "signatures_required": required}


class Grant(NamedTuple):
    """Rights, and the patterns of tenants that they apply to."""

    rights: frozenset[Right]
    tenants: tuple[str, ...]


@dataclass(frozen=True, slots=True, eq=False)
class Principal:
    """A known caller. ``id`` is stored with its writes; None while callers are not authenticated."""

    id: str | None
    source: str
    """How the caller was authenticated: ``none``, ``token``, ``oidc`` or ``certificate``."""
    grants: Sequence[Grant]
    expires_at: datetime | None = None
    token_id: str | None = None

    def patterns(self, right: Right) -> list[str]:
        """The patterns of tenants for which the caller has the right."""
        return [pattern for grant in self.grants if right in grant.rights for pattern in grant.tenants]

    @property
    def own_tenant(self) -> str | None:
        """The only tenant that the caller may write to; None if there are several, or none."""
        match self.patterns(Right.WRITE):
            # The ledger's own chain has no jobs, whatever a token says.
            case [tenant_id] if tenant_id != SYSTEM_TENANT and not tenant_id.endswith("*"):
                return tenant_id
        return None

    def may(self, right: Right, tenant_id: str) -> bool:
        """Whether the caller has the right for the tenant, or for all tenants that a pattern matches."""
        needed = Right.AUDIT if right is Right.READ and tenant_id == SYSTEM_TENANT else right
        return any(covers(pattern, tenant_id) for pattern in self.patterns(needed))

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
        if not any(right in grant.rights for grant in self.grants):
            raise ForbiddenError(f"{self.name} has not the right {right}")

    @property
    def name(self) -> str:
        """The caller's name in errors and log lines."""
        return self.id or "nobody"


EVERYBODY: Final = Principal(None, "none", (Grant(frozenset(Right), (EVERY_TENANT,)),))
"""Every caller while ``auth.mode`` is ``none``."""


def grant_of(rights: Collection[str], tenants: Collection[str]) -> Grant:
    """The grant that these texts mean.

    Raises:
        InvalidInputError: there is no such right, or no such pattern.
    """
    if unknown := set(rights).difference(Right):
        raise InvalidInputError(f"{min(unknown)[:100]!r} is no right; there are {', '.join(Right)}", ("rights",))
    for pattern in tenants:
        if re.fullmatch(names.TENANTS, pattern) is None:
            raise InvalidInputError(
                f"tenants: {pattern[:100]!r} is no pattern of tenants: a tenant, the beginning of some and *, or *",
                ("tenants",),
            )
    return Grant(frozenset(map(Right, rights)), tuple(tenants))


class Needs(enum.Enum):
    """For which tenants a caller must have the right that a route needs."""

    NOTHING = "no caller"
    """No right is needed: these routes report that the service is up, describe its interface, publish its public keys,
    and let people sign in."""
    SOMEBODY = "a known caller"
    """Whatever rights it has."""
    ANY = "any tenant"
    """The request is not about a tenant, or its answer covers only tenants for which the caller has the right."""
    EVERY = "all tenants"
    """The request is about the ledger as a whole."""
    NAMED = "the tenant that path or query names"
    IN_BODY = "each tenant that the body names"
    """Before the body is read, the right for some tenant; after that, before any effect, the right for each tenant in
    it."""


class Rule(NamedTuple):
    """The right that a route needs, and for which tenants. Without a right ``needs`` says all."""

    right: Right | None
    needs: Needs


_ROUTES: Final[Mapping[Rule, tuple[str, ...]]] = {
    Rule(None, Needs.NOTHING): (
        "GET /livez",
        "GET /readyz",
        "GET /docs",
        "GET /docs/{name}",
        "GET /",
        "GET /console",
        "GET /console/{file}",
        "GET /verify",
        "GET /v1/console/session",
        "POST /v1/console/session",
        "DELETE /v1/console/session",
        "GET /v1/console/oidc",
        "GET /v1/console/oidc/callback",
        "GET /v1/keys",
        "GET /.well-known/scitt-keys",
        "GET /.well-known/scitt-keys/{kid}",
    ),
    Rule(None, Needs.SOMEBODY): (
        "GET /v1/whoami",
        "GET /v1/node",
    ),
    Rule(Right.READ, Needs.NAMED): (
        "GET /v1/jobs",
        "GET /v1/jobs/summary",
        "GET /v1/jobs/{job_id}/events",
        "GET /v1/jobs/{job_id}/receipt",
        "GET /v1/cancellations",
        "GET /v1/watch",
        "GET /v1/commitments",
        "GET /v1/nodes",
        "GET /v1/tenants/{tenant_id}/privacy",
        "GET /v1/tenants/{tenant_id}/search",
        "GET /v1/exclusions",
        "GET /v1/tenants/{tenant_id}/scitt/entries/{statement_id}",
    ),
    Rule(Right.READ, Needs.ANY): (
        "GET /v1/jobs/{job_id}",
        "GET /v1/reports/{report_id}",
    ),
    Rule(Right.READ, Needs.IN_BODY): ("POST /v1/reports",),
    Rule(Right.WRITE, Needs.NAMED): ("POST /v1/tenants/{tenant_id}/scitt/entries",),
    Rule(Right.WRITE, Needs.IN_BODY): (
        "POST /v1/jobs",
        "POST /v1/jobs/{job_id}/events",
        "POST /v1/jobs/{job_id}/cancel",
        "POST /v1/events",
        "POST /v1/commitments",
        "PUT /v1/nodes/{node}/capacity",
        "POST /api/v1/lineage",
        "POST /v1/logs",
    ),
    Rule(Right.AUDIT, Needs.NAMED): (
        "GET /v1/chain/verify",
        "GET /chain/verify",
        "GET /v1/chain/head",
        "GET /v1/chain/entries",
        "GET /v1/chain/receipt",
        "GET /v1/chain/proof/inclusion",
        "GET /v1/chain/proof/consistency",
        "GET /v1/chain/proof/job",
        "GET /v1/exchange/lacking",
        "GET /v1/snapshots",
        "GET /v1/retention",
        "GET /v1/holds",
        "GET /v1/access-log",
        "GET /v1/log/{tenant_id}/checkpoint",
        "GET /v1/log/{tenant_id}/tile/entries/{bundle:path}",
        "GET /v1/log/{tenant_id}/tile/{tile:path}",
        "GET /v1/log/{tenant_id}/cosignatures",
        "GET /v1/log/{tenant_id}/witnesses",
        "GET /v1/log/{tenant_id}/anchors",
    ),
    Rule(Right.AUDIT, Needs.ANY): (
        "GET /v1/tenants",
        "GET /v1/archive",
        "GET /v1/callers",
        "GET /v1/exchange",
        "GET /v1/exchange/held",
        "GET /v1/exchange/news",
        "GET /v1/snapshots/{snapshot_id}",
    ),
    Rule(Right.AUDIT, Needs.IN_BODY): ("POST /v1/bundles/export",),
    Rule(Right.OPERATE, Needs.IN_BODY): (
        "POST /v1/stats",
        "POST /v1/snapshots",
        "POST /v1/chain/acknowledge",
        "POST /v1/exclusions",
        "POST /v1/bundles/import",
    ),
    Rule(Right.OPERATE, Needs.NAMED): (
        "POST /v1/log/{tenant_id}/cosignatures",
        "PUT /v1/tenants/{tenant_id}/search",
        "PUT /v1/tenants/{tenant_id}/rules",
    ),
    Rule(Right.OPERATE, Needs.ANY): ("GET /metrics",),
    Rule(Right.OPERATE, Needs.EVERY): ("POST /v1/exchange/regions/{region}/retire",),
    Rule(Right.ADMIN, Needs.EVERY): (
        "POST /v1/exchange/regions/{region}/admit",
        "POST /v1/exchange/regions/{region}/revoke",
        "POST /v1/keys/rotate",
        "POST /v1/keys/{key_id}/admit",
        "POST /v1/keys/{key_id}/revoke",
        "DELETE /v1/callers/{key_id}",
    ),
    Rule(Right.ADMIN, Needs.NAMED): (
        "PUT /v1/tenants/{tenant_id}/privacy",
        "PUT /v1/tenants/{tenant_id}/signatures",
        "POST /v1/tenants/{tenant_id}/erasures",
        "PUT /v1/retention",
        "DELETE /v1/holds/{hold_id}",
        "GET /v1/webhooks",
    ),
    Rule(Right.ADMIN, Needs.IN_BODY): (
        "POST /v1/callers",
        "POST /v1/tokens",
        "POST /v1/holds",
        "POST /v1/prunes",
        "POST /v1/webhooks",
    ),
    Rule(Right.ADMIN, Needs.ANY): (
        "GET /v1/tokens",
        "DELETE /v1/tokens/{token_id}",
        "DELETE /v1/webhooks/{webhook_id}",
        "POST /v1/webhooks/{webhook_id}/redeliver",
        "POST /v1/webhooks/{webhook_id}/pause",
        "POST /v1/webhooks/{webhook_id}/resume",
        "POST /v1/webhooks/{webhook_id}/replay",
    ),
}

RULES: Final[Mapping[str, Rule]] = {route: rule for rule, routes in _ROUTES.items() for route in routes}
"""What each route needs, by its method and path."""
ACTS: Final = frozenset(
    route
    for route, rule in RULES.items()
    if rule.right in (Right.OPERATE, Right.ADMIN) and not route.startswith("GET ") and route != "POST /v1/stats"
)
"""Routes whose acts are recorded before they are done; reports of numbers are not."""
UNLISTED: Final = Rule(Right.ADMIN, Needs.EVERY)
"""The rule of a route that is not listed."""
