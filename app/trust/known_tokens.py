"""Tokens: opaque texts that say who calls. The ledger stores the SHA-256 of each, and never the text; in memory
it has those of its last callers.

    tally_ + 43 characters of base64url (32 random bytes)

A token is looked up by its digest, so how long a wrong one takes says nothing about a right one.
"""

from __future__ import annotations

import hashlib
import re
import secrets
import time
from collections.abc import Iterable, Set
from datetime import UTC, datetime
from functools import lru_cache
from typing import NamedTuple

import structlog

from app.runtime.principals import Principal, grant_of
from ledger.errors import InvalidInputError, UnauthenticatedError
from signing.issued_tokens import IssuedToken

PREFIX = "tally_"
SECRET_BYTES = 32
DIGESTS_REMEMBERED = 256
_TOKEN = re.compile(rb"tally_[A-Za-z0-9_-]{43}")

log = structlog.get_logger()


class NewToken(NamedTuple):
    """A token that nobody has yet, and its digest."""

    text: str
    digest: bytes


def make() -> NewToken:
    """A new token, of the system's randomness."""
    text = PREFIX + secrets.token_urlsafe(SECRET_BYTES)
    return NewToken(text, hashlib.sha256(text.encode()).digest())


@lru_cache(DIGESTS_REMEMBERED)
def _digest(credentials: bytes) -> bytes:
    return hashlib.sha256(credentials).digest()


class _Known(NamedTuple):
    principal: Principal
    expires_s: float


class KnownTokens:
    """The tokens that count on this node, by digest. Belongs to one event loop."""

    def __init__(self) -> None:
        self._known: dict[bytes, _Known] = {}
        self.narrowed_s = float("-inf")
        """When one ceased to count, by ``time.perf_counter``."""
        self._strange: set[str] = set()
        """Ids of tokens that are not understood, of which that was said."""

    def __len__(self) -> int:
        return len(self._known)

    def learn(self, issued: Iterable[IssuedToken], revoked: Set[str]) -> None:
        """From now on these count, and no others: but for those that are revoked, or whose id is in ``revoked``."""
        known = {}
        for token in issued:
            if token.is_revoked or token.token_id in revoked:
                continue
            before = self._known.get(token.digest)
            if before is not None and before.principal.token_id == token.token_id:
                known[token.digest] = before
                continue
            try:
                grants = (grant_of(token.rights, token.tenants),)
            except InvalidInputError as error:
                # A later version may know more rights; here the token means nothing.
                if token.token_id not in self._strange:
                    self._strange.add(token.token_id)
                    log.warning("token_not_understood", token_id=token.token_id, error=str(error))
                continue
            principal = Principal(token.name, "token", grants, token.expires_at, token.token_id)
            expires_s = float("inf") if token.expires_at is None else token.expires_at.timestamp()
            known[token.digest] = _Known(principal, expires_s)
        if not self._known.keys() <= known.keys():
            self.narrowed_s = time.perf_counter()
        self._known = known

    def caller(self, credentials: bytes, now_s: float) -> Principal:
        """Who the token ``credentials`` says is calling.

        Raises:
            UnauthenticatedError: nobody; it is no token, was revoked, or has expired.
        """
        found = self._known.get(_digest(credentials))
        if found is None:
            if _TOKEN.fullmatch(credentials) is None:
                raise UnauthenticatedError("what Authorization says is no token of this ledger")
            raise UnauthenticatedError("the token is not known here, or was revoked")
        if now_s >= found.expires_s:
            raise UnauthenticatedError(f"the token expired at {_text(found.expires_s)}")
        return found.principal


def _text(time_s: float) -> str:
    return datetime.fromtimestamp(time_s, UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
