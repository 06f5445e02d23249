"""What a request takes out of the quotas of its caller, and of the tenants that it is about.

of the caller     one request and the bytes of its body, before that is read. A body that does not say how long it is,
                  or is longer than the quota ever holds, is read as fast as the quota fills instead.
of each tenant    one request, or as many as it has lines, and their bytes: once the tenant is known, before anything
                  is taken. Reports of numbers and imports have bounds of their own.
"""

from __future__ import annotations

import asyncio
from collections import Counter
from collections.abc import AsyncIterator
from typing import Final

from starlette.requests import Request

from app.edge.parts import parts_of
from app.runtime.principals import Principal
from app.trust.access.callers import CALLER, Scope, check_again, check_tenant, named_tenants
from app.trust.access.quotas import Quotas
from app.write.pending.event_lines import EventLines

PACED: Final = "tally.paced"
"""Where the scope of a request says that the body is yet to be charged for."""


def charge_caller(quotas: Quotas, caller: Principal, scope: Scope) -> None:
    """Take the request of ``scope`` out of what its caller may send.

    Raises:
        QuotaExceededError: he may not now.
    """
    sizes, body_bytes = quotas.principal_bytes, 0
    if sizes is not None:
        body_bytes = _declared(scope)
        if body_bytes < 0 or body_bytes > sizes.burst:
            body_bytes, scope[PACED] = 0, True
    quotas.admit(caller.id, body_bytes)


def charge_named(quotas: Quotas, scope: Scope) -> None:
    """Take one request out of what there is for each tenant that path or query names.

    Raises:
        QuotaExceededError: there is none now.
    """
    named = dict.fromkeys(named_tenants(scope), 1)
    if named:
        quotas.admit_tenants(named, {})


def charge_tenant(request: Request, tenant_id: str, body: bytes) -> None:
    """Take a request whose ``body`` names the tenant out of what there is for that, if the caller has the right.

    Raises:
        ForbiddenError: he has not.
        QuotaExceededError: there is not as much now.
        RequestTooLargeError: there never is.
    """
    check_tenant(request.scope, tenant_id)
    quotas = parts_of(request).quotas
    if quotas.bounds_tenants:
        quotas.admit_tenants({tenant_id: 1}, {tenant_id: len(body)})


async def body_chunks(request: Request) -> AsyncIterator[bytes]:
    """The body, as it comes; one that is paced as fast as the caller's quota allows.

    Raises:
        UnauthenticatedError: once it is whole, what the caller showed counts no more.
    """
    parts = parts_of(request)
    sizes = parts.quotas.principal_bytes if PACED in request.scope else None
    async for chunk in request.stream():
        if sizes is not None:
            await asyncio.sleep(sizes.owe(request.scope[CALLER].id, len(chunk)))
        yield chunk
    if CALLER in request.scope:
        check_again(parts.callers, request.scope)


class LinesCharged:
    """What the lines of one request take from their tenants."""

    def __init__(self, quotas: Quotas) -> None:
        self._quotas = quotas
        self._lines = 0
        self._bytes = 0
        self._of: tuple[Counter[str], Counter[str]] = Counter(), Counter()

    def read(self, lines: EventLines) -> None:
        """Some more of the ``lines`` were read.

        Raises:
            QuotaExceededError, RequestTooLargeError: as ``Quotas.check_tenants``, as far as can be said by now.
        """
        requests, bytes_of = self._of
        sources = lines.sources
        for (tenant_id, _), source in zip(lines.jobs[self._lines :], sources[self._lines : len(lines)], strict=True):
            requests[tenant_id] += 1
            bytes_of[tenant_id] += len(source)
            self._bytes += len(source)
        self._lines = len(lines)
        self._quotas.check_tenants(*self._of, len(sources) - len(lines), sum(map(len, sources)) - self._bytes)

    def charge(self) -> None:
        """Take all of it, or nothing.

        Raises:
            QuotaExceededError, RequestTooLargeError: as ``Quotas.check_tenants``.
        """
        self._quotas.admit_tenants(*self._of)


def _declared(scope: Scope) -> int:
    """Bytes of the body, 0 when there is none, -1 when its length is not said."""
    for name, value in scope["headers"]:
        if name == b"content-length":
            return int(value)
        if name == b"transfer-encoding":
            return -1
    return 0
