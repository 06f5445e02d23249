"""Authenticates the caller of a request and authorizes it for its route. Every route does both before it reads a body.

``Authorization: Bearer`` with a token of the ledger, or one of the issuer of ``auth.oidc``; else the cookie of a
session of the console, which holds such a token; else the certificate that the connection was made with. A credential
is accepted or rejected, never skipped: a valid certificate does not make up for a wrong token.

*Tokens* are opaque texts, ``tally_`` and 43 characters of base64url (32 random bytes). The ledger stores the SHA-256 of
each, and never the text. A token is looked up by its digest, so the time that a wrong token takes reveals nothing about
a right one.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Callable, Iterable, Iterator, MutableMapping, Sequence, Set
from dataclasses import dataclass
from typing import Any, Final, NamedTuple
from urllib.parse import parse_qsl

from app.runtime.logs import log
from app.runtime.principals import EVERY_TENANT, EVERYBODY, Needs, Principal, Rule, grant_of
from app.trust.console_sessions import ConsoleSessions, shown_cookie
from app.trust.oidc import OidcIssuer
from ledger import rfc3339
from ledger.errors import InvalidInputError, UnauthenticatedError
from signing.key_statement import IssuedToken

Scope = MutableMapping[str, Any]

CERTIFICATE: Final = "tally.certificate"
"""Scope key of the names in the connection's certificate, if it has one."""
ASK_AGAIN_S: Final = 1.0
"""The caller of a request that takes longer is authenticated again, as the token may have expired. After a revocation
that happens at once, so that no caller keeps access by holding a request open."""
AUTHORIZATION: Final = "tally.authorization"
"""Scope key of the one ``Authorization`` of a request with a known head; None if it has none."""
TENANT_PARAMETERS: Final = frozenset({"tenant_id", "tenantId"})
"""Names of query parameters that name a tenant."""
CREDENTIALS_BYTES_MAX: Final = 16 * 1024
_SEND_BEARER = "Authorization: send it once, as Bearer and a token"
_BEARER = re.compile(rb"bearer +([A-Za-z0-9._~+/=-]+)", re.IGNORECASE)


class OpenToAll:
    """Authenticates no caller: ``auth.mode`` is ``none``."""

    narrowed_s = float("-inf")

    def known(self, _scope: Scope) -> Principal:
        """The one principal of all callers."""
        return EVERYBODY

    async def caller(self, _scope: Scope) -> Principal:
        """The one principal of all callers."""
        return EVERYBODY


@dataclass(kw_only=True, eq=False)
class Callers:
    """Authenticates callers by tokens, by an issuer's tokens, and by certificates."""

    tokens: KnownTokens
    issuer: OidcIssuer | None = None
    by_certificate: Callable[[Sequence[str]], Principal | None] = lambda _names: None
    """The principal of a certificate with these names, None if there is none."""
    sessions: ConsoleSessions | None = None
    now_s: Callable[[], float] = time.time

    @property
    def narrowed_s(self) -> float:
        """When a token last became invalid, by ``time.perf_counter``: callers authenticated before are authenticated
        again."""
        return self.tokens.narrowed_s

    def known(self, scope: Scope) -> Principal | None:
        """The caller; None when the issuer must be asked.

        Raises:
            UnauthenticatedError: nothing that the request shows says it.
        """
        if (credentials := self._credentials(scope)) is None:
            if (names := scope.get(CERTIFICATE)) is None:
                raise UnauthenticatedError("say who calls: Authorization: Bearer and a token")
            if (principal := self.by_certificate(names)) is None:
                raise UnauthenticatedError("the certificate of the connection has no name in auth.certificates")
            return principal
        if self.issuer is not None and credentials.count(b".") == 2:
            return self.issuer.known(credentials, self.now_s())
        return self.tokens.caller(credentials, self.now_s())

    async def caller(self, scope: Scope) -> Principal:
        """Who calls.

        Raises:
            UnauthenticatedError: nothing that the request shows says it.
            NotReadyError: the issuer does not answer.
        """
        if (principal := self.known(scope)) is None:
            assert self.issuer is not None
            principal = await self.issuer.caller(self._credentials(scope) or b"", self.now_s())
        return principal

    def _credentials(self, scope: Scope) -> bytes | None:
        """The token of a request, from its header or from a session of the console; None without either."""
        if (credentials := _credentials(scope)) is None and self.sessions is not None:
            cookie = shown_cookie(scope["headers"], scope.get("scheme", "http"))
            if cookie is not None:
                return self.sessions.open(cookie, self.now_s()).token
        return credentials


CallerSource = OpenToAll | Callers


def is_outdated(source: CallerSource, asked_s: float, now_s: float) -> bool:
    """Whether a caller authenticated at ``asked_s`` must be authenticated again."""
    return asked_s <= source.narrowed_s or now_s - asked_s > ASK_AGAIN_S


def check(principal: Principal, rule: Rule, scope: Scope) -> None:
    """Return if the caller may use the route of ``scope``, which needs ``rule``, judged by the head of the request.

    Raises:
        ForbiddenError: it is not.
    """
    if rule.right is None or principal is EVERYBODY:
        return
    if rule.needs is Needs.EVERY:
        principal.check(rule.right, EVERY_TENANT)
        return
    named = [*named_tenants(scope)]
    for tenant_id in named:
        principal.check(rule.right, tenant_id)
    if not named:
        principal.check_any(rule.right)


def named_tenants(scope: Scope) -> Iterator[str]:
    """Every tenant that path or query names, whether or not the route uses it."""
    if (named := scope.get("path_params", {}).get("tenant_id")) is not None:
        yield named
    if scope["query_string"]:
        for name, value in parse_qsl(scope["query_string"].decode("latin-1"), keep_blank_values=True):
            if name in TENANT_PARAMETERS:
                yield value


def _credentials(scope: Scope) -> bytes | None:
    """The token in ``Authorization``, None without that header.

    Raises:
        UnauthenticatedError: it occurs twice, is too long, or is not Bearer.
    """
    if AUTHORIZATION in scope:
        shown: bytes | None = scope[AUTHORIZATION]
        return None if shown is None else _bearer(shown)
    found = [value for name, value in scope["headers"] if name == b"authorization"]
    if len(found) > 1:
        raise UnauthenticatedError(_SEND_BEARER)
    return _bearer(found[0]) if found else None


def _bearer(authorization: bytes) -> bytes:
    """The token in such a header.

    Raises:
        UnauthenticatedError: it is too long, or is not Bearer.
    """
    match = None if len(authorization) > CREDENTIALS_BYTES_MAX else _BEARER.fullmatch(authorization)
    if match is None:
        raise UnauthenticatedError(_SEND_BEARER)
    return match[1]


TOKEN_PREFIX = "tally_"  # noqa: S105 (says what follows)
SECRET_BYTES = 32
_TOKEN = re.compile(rb"tally_[A-Za-z0-9_-]{43}")


class NewToken(NamedTuple):
    """A token that was not handed out yet, and its digest."""

    text: str
    digest: bytes


def new_token() -> NewToken:
    """A new token from the system's random source."""
    text = TOKEN_PREFIX + secrets.token_urlsafe(SECRET_BYTES)
    return NewToken(text, hashlib.sha256(text.encode()).digest())


class KnownTokens:
    """The tokens that are valid on this node, by digest. Belongs to one event loop."""

    def __init__(self) -> None:
        self._known: dict[bytes, Principal] = {}
        self.narrowed_s = float("-inf")
        """When a token last became invalid, by ``time.perf_counter``."""
        self._strange: set[str] = set()
        """Ids of tokens that this version does not understand and has logged."""

    def __len__(self) -> int:
        return len(self._known)

    def learn(self, issued: Iterable[IssuedToken], revoked: Set[str]) -> None:
        """From now on the tokens ``issued`` are valid and no others, except the revoked ones and those whose id is in
        ``revoked``."""
        known = {}
        for token in issued:
            if token.is_revoked or token.token_id in revoked:
                continue
            if (before := self._known.get(token.digest)) is not None and before.token_id == token.token_id:
                known[token.digest] = before
                continue
            try:
                grants = (grant_of(token.rights, token.tenants),)
            except InvalidInputError as error:
                # A later version may know more rights; this one rejects the token.
                if token.token_id not in self._strange:
                    self._strange.add(token.token_id)
                    log.warning("token_not_understood", token_id=token.token_id, error=str(error))
                continue
            known[token.digest] = Principal(token.name, "token", grants, token.expires_at, token.token_id)
        if not self._known.keys() <= known.keys():
            self.narrowed_s = time.perf_counter()
        self._known = known

    def caller(self, credentials: bytes, now_s: float) -> Principal:
        """The caller that the token ``credentials`` names.

        Raises:
            UnauthenticatedError: it is no token, was revoked, or has expired.
        """
        if (found := self._known.get(hashlib.sha256(credentials).digest())) is None:
            if _TOKEN.fullmatch(credentials) is None:
                raise UnauthenticatedError("what Authorization says is no token of this ledger")
            raise UnauthenticatedError("the token is not known here, or was revoked")
        if found.expires_at is not None and now_s >= found.expires_at.timestamp():
            raise UnauthenticatedError(f"the token expired at {rfc3339.written(found.expires_at, 'seconds')}")
        return found
