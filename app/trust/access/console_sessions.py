"""Sessions of the web console: a cookie that holds the token of who signed in, sealed, until a time.

    tally_console=v1.<base64url>        over TLS __Host-tally_console=…
    12 bytes nonce, then AES-256-GCM of: u64 expires_s, 16 bytes id, the token compressed by zlib

The key follows from the secret of the ledger, which its nodes share, so any of them takes the cookie. What counts is
the token inside, asked again with each request: a session grants nothing of its own, and ends with its token. Whoever
knows the secret alone can seal only a token that he knows already; whoever steals a cookie has no token, and that for
``auth.session_life`` at most.

A browser sends a cookie whoever made the page that asks. So it counts only in requests of this service's own pages,
by what browsers say and pages cannot: ``Sec-Fetch-Site: same-origin``, else an ``Origin`` that is this service.
"""

from __future__ import annotations

import secrets
import struct
import zlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable
from datetime import UTC, datetime, timedelta
from typing import Final, NamedTuple

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from ledger.errors import InvalidInputError, UnauthenticatedError

COOKIE: Final = "tally_console"
COOKIE_BYTES_MAX: Final = 4000
"""Browsers keep cookies of 4,096 bytes, name and attributes included."""
TOKEN_BYTES_MAX: Final = 16 * 1024
ENDED_MAX: Final = 10_000
"""Sessions that somebody ended here, and that are remembered until they would have ended by themselves."""
_VERSION: Final = "v1."
_NONCE_BYTES: Final = 12
_ID_BYTES: Final = 16
_HEAD: Final = struct.Struct(f">Q{_ID_BYTES}s")


class ConsoleSession(NamedTuple):
    """An open session: the token inside, and until when it counts."""

    token: bytes
    expires_s: int
    session_id: bytes

    @property
    def expires_at(self) -> datetime:
        """When it ends by itself."""
        return datetime.fromtimestamp(self.expires_s, UTC)


class ConsoleSessions:
    """Seals and opens the sessions of one ledger, whose ``secret`` binds them. Belongs to one event loop."""

    def __init__(self, secret: bytes, life: timedelta) -> None:
        derived = HKDF(SHA256(), 32, salt=None, info=b"tallystick console session").derive(secret)
        self._sealed = AESGCM(derived)
        self._life_s = int(life.total_seconds())
        self._ended: dict[bytes, int] = {}

    def begin(self, token: bytes, token_expires_at: datetime | None, now_s: float) -> tuple[ConsoleSession, str]:
        """A session over ``token``, no longer than that counts, and the value of its cookie.

        Raises:
            InvalidInputError: the token is too long for a cookie.
        """
        expires_s = int(now_s) + self._life_s
        if token_expires_at is not None:
            expires_s = min(expires_s, int(token_expires_at.timestamp()))
        session = ConsoleSession(token, expires_s, secrets.token_bytes(_ID_BYTES))
        nonce = secrets.token_bytes(_NONCE_BYTES)
        plain = _HEAD.pack(expires_s, session.session_id) + zlib.compress(token, 9)
        value = _VERSION + urlsafe_b64encode(nonce + self._sealed.encrypt(nonce, plain, None)).rstrip(b"=").decode()
        if len(value) > COOKIE_BYTES_MAX:
            raise InvalidInputError(
                f"token: {len(token)} bytes are too long for a session of the console: browsers keep cookies of 4,096 "
                "bytes; have the issuer put less into it",
                ("token",),
            )
        return session, value

    def open(self, value: str, now_s: float) -> ConsoleSession:
        """The session that a cookie of this value holds.

        Raises:
            UnauthenticatedError: it was not made here, has expired, or was ended.
        """
        try:
            sealed = urlsafe_b64decode(value.removeprefix(_VERSION) + "=" * (-len(value.removeprefix(_VERSION)) % 4))
            plain = self._sealed.decrypt(sealed[:_NONCE_BYTES], sealed[_NONCE_BYTES:], None)
        except (ValueError, InvalidTag):
            raise UnauthenticatedError("the session of the console is none of this ledger; sign in again") from None
        expires_s, session_id = _HEAD.unpack_from(plain)
        if now_s >= expires_s or session_id in self._ended:
            raise UnauthenticatedError("the session of the console has ended; sign in again")
        return ConsoleSession(zlib.decompress(plain[_HEAD.size :]), expires_s, session_id)

    def end(self, session: ConsoleSession, now_s: float) -> None:
        """Let the session count no more on this node, whoever kept its cookie."""
        if len(self._ended) >= ENDED_MAX:
            self._ended = {each: expires_s for each, expires_s in self._ended.items() if expires_s > now_s}
        if len(self._ended) >= ENDED_MAX:
            del self._ended[next(iter(self._ended))]
        self._ended[session.session_id] = session.expires_s


def cookie_name(scheme: str) -> str:
    """Over TLS one that no other host may set, nor this one in the clear (RFC 6265bis, 4.1.3.2)."""
    return f"__Host-{COOKIE}" if scheme == "https" else COOKIE


def set_cookie(scheme: str, value: str, seconds: int) -> str:
    """``Set-Cookie`` that a browser keeps for so long, 0 to remove it, and shows to no script and no other site."""
    secure = "; Secure" if scheme == "https" else ""
    return f"{cookie_name(scheme)}={value}; Path=/; Max-Age={seconds}; HttpOnly; SameSite=Strict{secure}"


def shown_cookie(headers: Iterable[tuple[bytes, bytes]], scheme: str) -> str | None:
    """The value of the session's cookie in a request; None where there is none.

    Raises:
        UnauthenticatedError: it comes twice, or a page of another origin may have asked.
    """
    wanted = cookie_name(scheme).encode()
    found: list[bytes] = []
    said: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        if name == b"cookie":
            for pair in value.split(b";"):
                key, separator, content = pair.strip().partition(b"=")
                if separator and key == wanted:
                    found.append(content)
        elif name in (b"sec-fetch-site", b"origin", b"host"):
            said.setdefault(name, []).append(value)
    if not found:
        return None
    if len(found) > 1 or not found[0].isascii():
        raise UnauthenticatedError("the session of the console comes twice, or damaged; sign in again")
    if not _is_own_page(said, scheme):
        raise UnauthenticatedError("the session of the console counts only in requests of the service's own pages")
    return found[0].decode()


def _is_own_page(said: dict[bytes, list[bytes]], scheme: str) -> bool:
    site, origin = said.get(b"sec-fetch-site"), said.get(b"origin")
    own = [b"%b://%b" % (scheme.encode(), host) for host in said.get(b"host", ())]
    if origin is not None and origin != own:
        return False
    return origin is not None if site is None else site == [b"same-origin"]
