"""What of a request goes on record: that somebody may do what it asks for, that it was refused, what it read."""

from __future__ import annotations

from typing import Any

from starlette.requests import Request
from starlette.types import Scope

from app.edge.parts import Parts, parts_of
from app.edge.problems import problem_type_of
from app.runtime.principals import Principal
from app.trust.access.callers import CALLER, check_tenant
from app.write.intake.access_records import RecordedRequest
from ledger.errors import ForbiddenError, QuotaExceededError, UnauthenticatedError

REFUSALS = (UnauthenticatedError, ForbiddenError, QuotaExceededError)
"""Errors that say who may do what."""


def recorded_request(scope: Scope) -> RecordedRequest:
    """The request, as records tell of it."""
    caller: Principal | None = scope.get(CALLER)
    route, client = scope.get("route"), scope.get("client")
    return RecordedRequest(
        None if caller is None else caller.id,
        f"{scope['method']} {route.path}" if route is not None else scope["method"],
        scope["path"],
        client[0] if client else None,
    )


async def allow(request: Request, *tenants: str) -> None:
    """Return if the caller may do what the request asks for, to all tenants, or patterns of them, that its body names;
    an act is on record then.

    Raises:
        ForbiddenError: he may not.
        LedgerError: as ``AccessRecords.act``.
    """
    route = request.scope["route"]
    for tenant_id in tenants:
        check_tenant(request.scope, tenant_id)
    if route.is_act:
        named = tenants[0] if len(tenants) == 1 else request.path_params.get("tenant_id")
        await parts_of(request).access_records.act(recorded_request(request.scope), route.rule.right, named)


async def record_read(request: Request, tenant_id: str, **what: Any) -> None:
    """Record that payloads of the tenant are about to be told; of ``what``, those that are None are left out.

    Raises:
        LedgerError: as ``AccessRecords.read``.
    """
    told = {name: value for name, value in what.items() if value is not None}
    await parts_of(request).access_records.read(recorded_request(request.scope), tenant_id, told)


def report_break(parts: Parts, scope: Scope, error: Exception) -> None:
    """Report the break of stored rows that the request met, if ``error`` is about one. Every request whose error is
    answered comes here; a stream that ends with an error calls this itself."""
    route = scope.get("route")
    parts.breaks.report_error(error, getattr(route, "operation_id", None) or "request")


def record_refusal(parts: Parts, scope: Scope, error: Exception) -> None:
    """Record that the request was refused with ``error``, if that is about who may do what."""
    if isinstance(error, REFUSALS):
        named = getattr(error, "tenant_id", None) or scope.get("path_params", {}).get("tenant_id")
        parts.access_records.refused(recorded_request(scope), problem_type_of(error).name, named)
