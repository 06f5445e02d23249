"""What a caller needs to be allowed: the one place that says it for every route.

A route that is not listed needs ``ADMIN`` of all tenants. The right is asked for before the body of a request is read,
by every kind of route. While ``auth.mode`` is ``none`` everyone has all of them.
"""

from __future__ import annotations

import enum
from collections.abc import Mapping
from typing import Final, NamedTuple


class Right(enum.StrEnum):
    """What one may be allowed to do."""

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


class Needs(enum.Enum):
    """For which tenants a caller must have the right that a route needs."""

    NOTHING = "no caller"
    """Nobody needs to be allowed it: it says that the service is there, how to talk to it, with which keys to check
    what it signed, and lets people sign in."""
    SOMEBODY = "a known caller"
    """Whatever rights it has."""
    ANY = "any tenant"
    """What is asked is not about a tenant, or is only told of tenants for which the caller has the right."""
    EVERY = "all tenants"
    """What is asked is about the ledger as a whole."""
    NAMED = "the tenant that path or query names"
    IN_BODY = "each tenant that the body names"
    """Before the body is read the right for any tenant is needed; after it, before anything is done, for those."""


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
    ),
    Rule(None, Needs.SOMEBODY): (
        "GET /v1/whoami",
        "GET /v1/node",
    ),
    Rule(Right.READ, Needs.NAMED): (
        "GET /v1/jobs",
        "GET /v1/jobs/{job_id}/events",
        "GET /v1/jobs/{job_id}/receipt",
        "GET /v1/cancellations",
        "GET /v1/watch",
        "GET /v1/commitments",
        "GET /v1/nodes",
        "GET /v1/tenants/{tenant_id}/privacy",
        "GET /v1/tenants/{tenant_id}/search",
    ),
    Rule(Right.READ, Needs.ANY): ("GET /v1/jobs/{job_id}",),
    Rule(Right.WRITE, Needs.IN_BODY): (
        "POST /v1/jobs",
        "POST /v1/jobs/{job_id}/events",
        "POST /v1/jobs/{job_id}/cancel",
        "POST /v1/events",
        "POST /v1/commitments",
        "PUT /v1/nodes/{node}/capacity",
        "POST /api/v1/lineage",
    ),
    Rule(Right.AUDIT, Needs.NAMED): (
        "GET /v1/chain/verify",
        "GET /chain/verify",
        "GET /v1/chain/head",
        "GET /v1/chain/entries",
        "GET /v1/chain/receipt",
        "GET /v1/chain/proof/inclusion",
        "GET /v1/chain/proof/consistency",
        "GET /v1/snapshots",
        "GET /v1/access-log",
        "GET /v1/log/{tenant_id}/checkpoint",
        "GET /v1/log/{tenant_id}/tile/entries/{bundle:path}",
        "GET /v1/log/{tenant_id}/tile/{tile:path}",
        "GET /v1/log/{tenant_id}/cosignatures",
        "GET /v1/log/{tenant_id}/anchors",
    ),
    Rule(Right.AUDIT, Needs.ANY): (
        "GET /v1/tenants",
        "GET /v1/exchange",
        "GET /v1/exchange/held",
        "GET /v1/snapshots/{snapshot_id}",
    ),
    Rule(Right.AUDIT, Needs.IN_BODY): ("POST /v1/bundles/export",),
    Rule(Right.OPERATE, Needs.IN_BODY): (
        "POST /v1/stats",
        "POST /v1/snapshots",
        "POST /v1/chain/acknowledge",
        "POST /v1/bundles/import",
    ),
    Rule(Right.OPERATE, Needs.NAMED): (
        "POST /v1/log/{tenant_id}/cosignatures",
        "PUT /v1/tenants/{tenant_id}/search",
    ),
    Rule(Right.OPERATE, Needs.ANY): ("GET /metrics",),
    Rule(Right.ADMIN, Needs.EVERY): (
        "POST /v1/keys/rotate",
        "POST /v1/keys/{key_id}/admit",
        "POST /v1/keys/{key_id}/revoke",
    ),
    Rule(Right.ADMIN, Needs.NAMED): (
        "PUT /v1/tenants/{tenant_id}/privacy",
        "POST /v1/tenants/{tenant_id}/erasures",
        "GET /v1/webhooks",
    ),
    Rule(Right.ADMIN, Needs.IN_BODY): (
        "POST /v1/tokens",
        "POST /v1/webhooks",
    ),
    Rule(Right.ADMIN, Needs.ANY): (
        "GET /v1/tokens",
        "DELETE /v1/tokens/{token_id}",
        "DELETE /v1/webhooks/{webhook_id}",
        "POST /v1/webhooks/{webhook_id}/redeliver",
    ),
}

RULES: Final[Mapping[str, Rule]] = {route: rule for rule, routes in _ROUTES.items() for route in routes}
"""What each route needs, by its method and path."""
ACTS: Final = frozenset(
    route
    for route, rule in RULES.items()
    if rule.right in (Right.OPERATE, Right.ADMIN) and not route.startswith("GET ") and route != "POST /v1/stats"
)
"""Routes that do what goes on record before it is done: reports of numbers are none."""
UNLISTED: Final = Rule(Right.ADMIN, Needs.EVERY)
"""What a route needs of which nothing is said."""
