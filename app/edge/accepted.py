"""An accepted request, whose caller is known and authorized: its state at the edge, its charges to quotas, its records,
and the services that its route names.

The fast path (``app.edge.fast_path``) and the routes of the framework accept a request by the same steps::

    1. caller      authenticated by headers or certificate, before the body is read
    2. right       the caller has the right that the route needs, for the tenants that path and query name
    3. quotas      of the caller: one request, and the bytes of its body. A body without a length, or longer than the
                   quota ever holds, is read as fast as the quota fills instead.
                   of each tenant: one request, or as many as it has lines, and their bytes; now where path or query
                   name the tenant, else once the body is read. Stats and imports have bounds of their own.

A route names each service that it uses in its signature: ``jobs: Service[JobReader]``. ``app.node.wiring`` makes one
object of each kind; the application does not start if a route names a missing one.
"""

from __future__ import annotations

import asyncio
import re
import time
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import TYPE_CHECKING, Annotated, Any, Final, TypeAlias, TypeVar

from fastapi import Depends
from starlette.requests import Request
from starlette.types import Scope

from app.edge.library_internals import Dependant
from app.edge.problems import problem_type_of
from app.runtime.principals import Principal, Rule
from app.runtime.state.found_breaks import FoundBreaks
from app.runtime.tasks import MemoryBudget
from app.trust.callers import CallerSource, check, is_outdated, named_tenants
from app.trust.quotas import Quotas
from app.write.intake.access_records import AccessRecords, RecordedRequest
from app.write.pending.requests import EventLines
from ledger import names
from ledger.errors import ForbiddenError, NotReadyError, QuotaExceededError, UnauthenticatedError
from ledger.positions import Lsn

ACCEPTED: Final = "tally.accepted"
"""Key of a request's ``Accepted`` in its scope."""
FAULT: Final = "tally.fault"
"""Key of the error that the fast path met, in the scope: the route raises it."""
CUT_OFF: Final = "tally.cut_off"
"""Key of the function that ends the request's connection now, with unsent data, in its scope."""
_SPAN: Final = re.compile(names.SPAN)
_NO_SPAN: Final = re.compile("ff|..-0{32}|.{35}-0{16}")
REFUSALS: Final = (UnauthenticatedError, ForbiddenError, QuotaExceededError)
"""Errors that are recorded: they are about the rights of a caller."""


@dataclass(slots=True, eq=False)
class Accepted:
    """The state of a request at the edge."""

    access: AccessControl
    scope: Scope
    caller: Principal
    began_s: float
    """When the edge began to work on it, by ``time.perf_counter``."""
    checked_s: float
    """When the caller's credentials were last checked, by the same clock."""
    is_body_rate_limited: bool = False
    """Whether the bytes of the body are charged while they are read."""
    is_tenant_charged: bool = False
    held_bytes: int = 0
    """Bytes that the body holds of the memory budget, until the request is answered."""
    lsns: tuple[Lsn, Lsn] | None = None
    """The first and the last record that the answer is about; None before it is made, and if there are none."""

    @property
    def traceparent(self) -> str | None:
        """The caller's span (W3C Trace Context), None without one; a header that names none is passed over."""
        return span_of(self.scope)

    def answers(self, first: Lsn, last: Lsn) -> None:
        """The answer is about the records ``first`` to ``last``, too."""
        known = self.lsns
        self.lsns = (first, last) if known is None else (min(first, known[0]), max(last, known[1]))

    def header_values(self, name: bytes) -> list[str]:
        """The values of a header, whose ``name`` is in small letters."""
        return [value.decode("latin-1") for given, value in self.scope["headers"] if given == name]

    def check_tenant(self, tenant_id: str) -> None:
        """Return if the caller has the right that the route needs, for a tenant that the body names.

        Raises:
            ForbiddenError: the caller has not.
        """
        self.caller.check(self.scope["route"].rule.right, tenant_id)

    def charge_tenant(self, tenant_id: str, body_bytes: int) -> None:
        """Charge the request, whose body names the tenant, to the quota of the tenant, once.

        Raises:
            ForbiddenError: the caller lacks the right for the tenant.
            QuotaExceededError: the quota has too little left now.
            RequestTooLargeError: the quota never holds as much.
        """
        self.check_tenant(tenant_id)
        if self.access.quotas.bounds_tenants and not self.is_tenant_charged:
            self.access.quotas.admit_tenants({tenant_id: 1}, {tenant_id: body_bytes})
            self.is_tenant_charged = True

    def charge_body(self, tenant_id: str, body_bytes: int) -> None:
        """Charge the body of a request, whose path names the tenant, to the quota of the tenant.

        Raises:
            QuotaExceededError, RequestTooLargeError: as ``charge_tenant``.
        """
        if self.access.quotas.bounds_tenants:
            self.access.quotas.admit_tenants({}, {tenant_id: body_bytes})

    def check_again(self) -> None:
        """Check the caller's credentials again if the last check was a while ago, or before a token was revoked. A
        token that an issuer signed stays valid for a whole request.

        Raises:
            UnauthenticatedError: they are no longer valid.
        """
        now_s = time.perf_counter()
        if is_outdated(self.access.callers, self.checked_s, now_s):
            self.access.callers.known(self.scope)
            self.checked_s = now_s

    def hold(self, count: int) -> None:
        """Hold ``count`` more bytes of the memory budget until the request is answered.

        Raises:
            NotReadyError: other requests hold as many as may be in memory.
        """
        self.access.memory.take(count, self.caller.id)
        self.held_bytes += count

    async def allow(self, *tenant_ids: str) -> None:
        """Return if the caller has the right for all tenants, or patterns of tenants, that the body names. An act is
        recorded before the return.

        Raises:
            ForbiddenError: the caller may not.
            LedgerError: as ``AccessRecords.act``.
        """
        route = self.scope["route"]
        for tenant_id in tenant_ids:
            self.check_tenant(tenant_id)
        if route.is_act:
            named = tenant_ids[0] if len(tenant_ids) == 1 else self.scope["path_params"].get("tenant_id")
            await self.access.records.act(recorded_request(self.scope), route.rule.right, named)

    async def record_read(self, tenant_id: str, **what: Any) -> None:
        """Record that payloads of the tenant are about to be sent; members of ``what`` that are None are left out.

        Raises:
            LedgerError: as ``AccessRecords.read``.
        """
        await self.access.records.read(
            recorded_request(self.scope),
            tenant_id,
            {name: value for name, value in what.items() if value is not None},
        )

    def report_break(self, error: Exception) -> None:
        """As ``AccessControl.report_break``, for an error that the answer does not carry."""
        self.access.report_break(self.scope, error)


async def accepted_of(request: Request) -> Accepted:
    """The request, as its route has accepted it."""
    accepted: Accepted = request.scope[ACCEPTED]
    return accepted


AcceptedDep = Annotated[Accepted, Depends(accepted_of)]


@dataclass(kw_only=True, eq=False)
class AccessControl:
    """Accepts requests."""

    callers: CallerSource
    quotas: Quotas
    memory: MemoryBudget
    """For large bodies, from their first byte until they are answered."""
    records: AccessRecords
    breaks: FoundBreaks

    def accept_known(self, scope: Scope, rule: Rule) -> Accepted | None:
        """As ``accept``; None if the issuer must be asked to authenticate the caller."""
        began_s = time.perf_counter()
        caller = self.callers.known(scope)
        return None if caller is None else self._accept(scope, rule, caller, began_s)

    async def accept(self, scope: Scope, rule: Rule) -> Accepted:
        """The request of ``scope``, whose route needs ``rule``.

        Raises:
            UnauthenticatedError: the request has no valid credentials.
            ForbiddenError: the caller lacks the right.
            QuotaExceededError: the quota of the caller, or of a tenant that is named, is used up.
        """
        began_s = time.perf_counter()
        return self._accept(scope, rule, await self.callers.caller(scope), began_s)

    def _accept(self, scope: Scope, rule: Rule, caller: Principal, began_s: float) -> Accepted:
        accepted = scope[ACCEPTED] = Accepted(self, scope, caller, began_s, began_s)
        check(caller, rule, scope)
        if self.quotas.bounds_principals:
            self._charge_caller(accepted)
        # A route without a right has no tenant: a request that names one is refused, and charges no tenant.
        has_tenants = self.quotas.bounds_tenants and rule.right is not None
        if has_tenants and (named := dict.fromkeys(named_tenants(scope), 1)):
            self.quotas.admit_tenants(named, {})
        return accepted

    def _charge_caller(self, accepted: Accepted) -> None:
        sizes, body_bytes = self.quotas.principal_bytes, 0
        if sizes is not None:
            body_bytes = _declared_bytes(accepted.scope)
            if body_bytes < 0 or body_bytes > sizes.burst:
                body_bytes, accepted.is_body_rate_limited = 0, True
        self.quotas.admit(accepted.caller.id, body_bytes)

    async def caller_if_known(self, scope: Scope) -> Principal | None:
        """The caller of a route that needs no authentication; None without valid credentials, or if they cannot be
        checked now."""
        try:
            return await self.callers.caller(scope)
        except (UnauthenticatedError, NotReadyError):
            return None

    def record_refusal(self, scope: Scope, error: Exception) -> None:
        """Record that the request was refused with ``error``, if it is one of ``REFUSALS``."""
        if isinstance(error, REFUSALS):
            named = getattr(error, "tenant_id", None) or scope.get("path_params", {}).get("tenant_id")
            self.records.refused(recorded_request(scope), problem_type_of(error).name, named)

    def report_break(self, scope: Scope, error: Exception) -> None:
        """Report the break of stored rows that the request met, if ``error`` is about one. Called for every request
        answered with an error; a stream that ends with an error calls it itself."""
        self.breaks.report_error(error, getattr(scope.get("route"), "operation_id", None) or "request")

    def release_memory(self, scope: Scope) -> None:
        """Release the bytes that the body of the request holds of the memory budget."""
        accepted: Accepted | None = scope.get(ACCEPTED)
        if accepted is not None and accepted.held_bytes:
            self.memory.give_back(accepted.held_bytes, accepted.caller.id)
            accepted.held_bytes = 0


def recorded_request(scope: Scope) -> RecordedRequest:
    """The request, as records have it."""
    accepted: Accepted | None = scope.get(ACCEPTED)
    route, client = scope.get("route"), scope.get("client")
    return RecordedRequest(
        None if accepted is None else accepted.caller.id,
        f"{scope['method']} {route.path}" if route is not None else scope["method"],
        scope["path"],
        client[0] if client else None,
    )


async def body_chunks(request: Request) -> AsyncIterator[bytes]:
    """The body, as it arrives; a rate-limited body as fast as the caller's quota allows.

    Raises:
        UnauthenticatedError: the caller's credentials are no longer valid once the body is whole.
    """
    accepted: Accepted | None = request.scope.get(ACCEPTED)
    sizes = accepted.access.quotas.principal_bytes if accepted is not None and accepted.is_body_rate_limited else None
    async for chunk in request.stream():
        if sizes is not None and accepted is not None:
            await asyncio.sleep(sizes.owe(accepted.caller.id, len(chunk)))
        yield chunk
    if accepted is not None:
        accepted.check_again()


@dataclass(eq=False)
class LineCharges:
    """The charges of the lines of one request to their tenants."""

    _quotas: Quotas
    _lines: int = 0
    _bytes: int = 0
    _requests: Counter[str] = field(default_factory=Counter)
    _bytes_of: Counter[str] = field(default_factory=Counter)

    def read(self, lines: EventLines) -> None:
        """Add the lines read so far.

        Raises:
            QuotaExceededError, RequestTooLargeError: as ``Quotas.check_tenants``, for the lines so far.
        """
        sources = lines.sources
        for (tenant_id, _), source in zip(lines.jobs[self._lines :], sources[self._lines : len(lines)], strict=True):
            self._requests[tenant_id] += 1
            self._bytes_of[tenant_id] += len(source)
            self._bytes += len(source)
        self._lines = len(lines)
        left_bytes = sum(map(len, sources)) - self._bytes
        self._quotas.check_tenants(self._requests, self._bytes_of, len(sources) - len(lines), left_bytes)

    def charge(self) -> None:
        """Charge all of the lines, or none.

        Raises:
            QuotaExceededError, RequestTooLargeError: as ``Quotas.check_tenants``.
        """
        self._quotas.admit_tenants(self._requests, self._bytes_of)


def _declared_bytes(scope: Scope) -> int:
    """Bytes of the body; 0 when there is none, -1 when its length is not stated."""
    fields = dict(scope["headers"])
    return -1 if b"transfer-encoding" in fields else int(fields.get(b"content-length", 0))


Kind = TypeVar("Kind")
Services: TypeAlias = Mapping[Any, Any]
"""By its kind, a class or a union of classes, each service that a route can name."""
_KIND: Final = "service_kind"


@cache
def service(kind: Any) -> Callable[[Request], Awaitable[Any]]:
    """The dependency that is the service of this kind."""

    async def named(request: Request) -> Any:
        return request.scope["app"].state.services[kind]

    setattr(named, _KIND, kind)
    return named


if TYPE_CHECKING:
    Service = Annotated[Kind, "a service"]
else:

    class Service:
        """``Service[Kind]`` annotates a parameter of a route, or of a dependency, with the service of that kind."""

        def __class_getitem__(cls, kind: Any) -> Any:
            return Annotated[kind, Depends(service(kind))]


def kinds_named_by(dependant: Dependant) -> Iterator[Any]:
    """The kinds of service that an endpoint names, by itself or through its dependencies."""
    for part in dependant.dependencies:
        if hasattr(part.call, _KIND):
            yield getattr(part.call, _KIND)
        yield from kinds_named_by(part)


def span_of(scope: Scope) -> str | None:
    """The span that the header ``traceparent`` of a request names; None for a header that names none."""
    for name, value in scope["headers"]:
        if name == b"traceparent":
            span: str = value.decode("latin-1")
            return span if _SPAN.fullmatch(span) and not _NO_SPAN.match(span) else None
    return None
