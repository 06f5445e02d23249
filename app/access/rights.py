"""What a caller needs to be allowed: the one place that says it for every route.

A route that is not listed needs ``ADMIN``. The right is asked for before the body of a request is read, by every kind
of route. While ``auth.mode`` is ``none`` everyone has all of them.
"""

from __future__ import annotations

import enum
from collections.abc import Callable, Mapping, MutableMapping
from typing import Any, Final


class Right(enum.Enum):
    """What one may be allowed to do."""

    OPEN = "open"
    """Nobody needs to be allowed it: it says that the service is there, how to talk to it, and with which keys to check
    what it signed."""
    READ = "read"
    WRITE = "write"
    AUDIT = "audit"
    """Verify, prove, export."""
    OPERATE = "operate"
    """Sign now, import, report and read how the service does."""
    ADMIN = "admin"
    """Change keys, private fields, erase."""


Authorize = Callable[[MutableMapping[str, Any], Right], None]
"""Takes the scope of a request and the right that its route needs; refuses by raising an error that has a problem."""


def everyone_may(_scope: MutableMapping[str, Any], _right: Right) -> None:
    """Refuse nobody: ``auth.mode`` is ``none``."""


_ROUTES: Final[Mapping[Right, tuple[str, ...]]] = {
    Right.OPEN: (
        "GET /livez",
        "GET /readyz",
        "GET /docs",
        "GET /docs/{name}",
        "GET /v1/keys",
    ),
    Right.READ: (
        "GET /v1/jobs",
        "GET /v1/jobs/{job_id}",
        "GET /v1/jobs/{job_id}/events",
        "GET /v1/tenants/{tenant_id}/privacy",
        "GET /v1/node",
    ),
    Right.WRITE: (
        "POST /v1/jobs",
        "POST /v1/jobs/{job_id}/events",
        "POST /v1/jobs/{job_id}/cancel",
        "POST /v1/events",
    ),
    Right.AUDIT: (
        "GET /v1/chain/verify",
        "GET /chain/verify",
        "GET /v1/chain/head",
        "GET /v1/chain/entries",
        "GET /v1/chain/proof/inclusion",
        "GET /v1/chain/proof/consistency",
        "GET /v1/snapshots",
        "GET /v1/snapshots/{snapshot_id}",
        "POST /v1/bundles/export",
        "GET /v1/tenants",
        "GET /v1/log/{tenant_id}/checkpoint",
        "GET /v1/log/{tenant_id}/tile/entries/{bundle:path}",
        "GET /v1/log/{tenant_id}/tile/{tile:path}",
        "GET /v1/log/{tenant_id}/cosignatures",
        "GET /v1/log/{tenant_id}/anchors",
    ),
    Right.OPERATE: (
        "POST /v1/snapshots",
        "POST /v1/chain/acknowledge",
        "POST /v1/bundles/import",
        "POST /v1/log/{tenant_id}/cosignatures",
        "POST /v1/stats",
        "GET /metrics",
    ),
    Right.ADMIN: (
        "POST /v1/keys/rotate",
        "POST /v1/keys/{key_id}/admit",
        "POST /v1/keys/{key_id}/revoke",
        "PUT /v1/tenants/{tenant_id}/privacy",
        "POST /v1/tenants/{tenant_id}/erasures",
    ),
}

RIGHTS: Final[Mapping[str, Right]] = {route: right for right, routes in _ROUTES.items() for route in routes}
"""The right that each route needs, by its method and path."""
