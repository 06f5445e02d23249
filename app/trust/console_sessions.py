"""Sessions of the web console: a cookie that holds the user's token, sealed, with an expiry.

    tally_console=v1.<base64url>        over TLS __Host-tally_console=…
    12 bytes nonce, then AES-256-GCM of: u64 expires_s, 16 bytes id, the token compressed by zlib

The key is derived from the ledger's secret, which its nodes share, so any node accepts the cookie. Each request
authenticates the token inside again: a session grants nothing of its own, and ends with its token. An attacker who has
only the secret can seal only a token that he already has. A stolen cookie does not reveal the token, and is valid for
``auth.session_life`` at most.

A browser sends a cookie with requests of any page. So the cookie is accepted only in requests of this service's own
pages, shown by headers that a page cannot set: ``Sec-Fetch-Site: same-origin``, else an ``Origin`` that is this
service.

Signing in at an OpenID Connect issuer is the authorization code flow with PKCE (RFC 6749, 4.1; RFC 7636)::

    console  -- GET /v1/console/oidc           -->  issuer, with state and the challenge of a verifier
    issuer   -- GET /v1/console/oidc/callback  -->  here, with state and code
    here     -- POST token_endpoint            -->  issuer, with code and verifier; answers the tokens

State and verifier are in a cookie of the browser meanwhile, which scripts cannot read. The tokens are verified like any
token of a caller (``app.trust.oidc``): the access token or, if that is not for this service, the ID token.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import math
import re
import secrets
import struct
import time
import zlib
from base64 import urlsafe_b64decode, urlsafe_b64encode
from collections.abc import Iterable, Sequence
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote, urlencode

import httpx
from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.hashes import SHA256
from cryptography.hazmat.primitives.kdf.hkdf import HKDF

from app.runtime.outgoing import NoAnswerError
from app.runtime.settings.sections import AuthSettings, OidcSettings
from app.trust.oidc import ask_json, discovery_of, place_in
from ledger.errors import ConfigurationError, InvalidInputError, UnauthenticatedError
from ledger.text import secret_text
from signing import files

COOKIE: Final = "tally_console"
COOKIE_BYTES_MAX: Final = 4000
"""Browsers keep cookies of 4,096 bytes, name and attributes included."""
TOKEN_BYTES_MAX: Final = 16 * 1024
ENDED_MAX: Final = 10_000
"""Ended sessions that are remembered until they would have expired."""
_VERSION: Final = "v1."
_NONCE_BYTES: Final = 12
_ID_BYTES: Final = 16
_HEAD: Final = struct.Struct(f">Q{_ID_BYTES}s")


class ConsoleSession(NamedTuple):
    """An open session: its token, and when it expires."""

    token: bytes
    expires_s: int
    session_id: bytes

    @property
    def expires_at(self) -> datetime:
        """When it expires."""
        return datetime.fromtimestamp(self.expires_s, UTC)


class ConsoleSessions:
    """Seals and opens the sessions of one ledger, whose ``secret`` binds them. Belongs to one event loop."""

    def __init__(self, secret: bytes, life: timedelta) -> None:
        self._sealed = AESGCM(HKDF(SHA256(), 32, salt=None, info=b"tallystick console session").derive(secret))
        self._life_s = int(life.total_seconds())
        self._ended: dict[bytes, int] = {}

    def begin(self, token: bytes, token_expires_at: datetime | None, now_s: float) -> tuple[ConsoleSession, str]:
        """A session for ``token``, which does not outlive it, and the value of its cookie.

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
            UnauthenticatedError: it was not sealed by this ledger, has expired, or was ended.
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
        """End the session on this node, also for copies of its cookie."""
        if len(self._ended) >= ENDED_MAX:
            self._ended = {each: expires_s for each, expires_s in self._ended.items() if expires_s > now_s}
        if len(self._ended) >= ENDED_MAX:
            del self._ended[next(iter(self._ended))]
        self._ended[session.session_id] = session.expires_s


def cookie_name(scheme: str, name: str = COOKIE) -> str:
    """Over TLS a name that no other host may set, nor this one in the clear (RFC 6265bis, 4.1.3.2)."""
    return f"__Host-{name}" if scheme == "https" else name


def set_cookie(scheme: str, value: str, seconds: int, name: str = COOKIE, same_site: str = "Strict") -> str:
    """``Set-Cookie`` that a browser keeps for ``seconds``, 0 to remove it, and hides from scripts and other sites."""
    secure = "; Secure" if scheme == "https" else ""
    return f"{cookie_name(scheme, name)}={value}; Path=/; Max-Age={seconds}; HttpOnly; SameSite={same_site}{secure}"


def shown_cookie(headers: Iterable[tuple[bytes, bytes]], scheme: str) -> str | None:
    """The value of the session's cookie in a request; None without one.

    Raises:
        UnauthenticatedError: it occurs twice, or the request may be from a page of another origin.
    """
    wanted = cookie_name(scheme).encode()
    said: dict[bytes, list[bytes]] = {}
    for name, value in headers:
        said.setdefault(name, []).append(value)
    pairs = [each.strip().partition(b"=") for value in said.get(b"cookie", ()) for each in value.split(b";")]
    if not (found := [value for key, separator, value in pairs if separator and key == wanted]):
        return None
    if len(found) > 1 or not found[0].isascii():
        raise UnauthenticatedError("the session of the console comes twice, or damaged; sign in again")
    if not _is_own_page(said, scheme):
        raise UnauthenticatedError("the session of the console counts only in requests of the service's own pages")
    return found[0].decode()


def _is_own_page(said: dict[bytes, list[bytes]], scheme: str) -> bool:
    site, origin = said.get(b"sec-fetch-site"), said.get(b"origin")
    if origin is not None and origin != [b"%b://%b" % (scheme.encode(), host) for host in said.get(b"host", ())]:
        return False
    return origin is not None if site is None else site == [b"same-origin"]


SIGN_IN_COOKIE: Final = "tally_sign_in"
SIGN_IN_LIFE_S: Final = 600
"""Longest that a user may take to sign in at the issuer."""
PLACES_LIFE_S: Final = 300.0
"""How long the issuer's endpoints are cached, because anyone may start a sign-in."""
AWAY_PAUSE_S: Final = 1.0
"""The same, if it did not answer."""
ASKED_AT_ONCE: Final = 8
"""Requests to the issuer at once; further sign-ins wait."""
_SECRET_BYTES: Final = 32
_COOKIE_VALUE: Final = re.compile(r"([A-Za-z0-9_-]{43})\.([A-Za-z0-9_-]{43})")


def code_flow_of(settings: AuthSettings) -> CodeFlow | None:
    """The sign-in at the issuer; None if the settings name no issuer or no client."""
    return CodeFlow(settings.oidc) if settings.mode == "oidc" and settings.oidc.client_id is not None else None


class CodeFlow:
    """Signs users in at the issuer of ``settings``, which name a client. Belongs to one event loop."""

    def __init__(self, settings: OidcSettings) -> None:
        assert settings.issuer is not None
        assert settings.client_id is not None
        self._settings = settings
        self._issuer = settings.issuer
        self._client_id = settings.client_id
        self._tls = httpx.create_ssl_context()
        self._asking = asyncio.Semaphore(ASKED_AT_ONCE)
        self._discovering = asyncio.Lock()
        self._places: dict[str, Any] | NoAnswerError = {}
        """The issuer's last discovery document, or the error of that request."""
        self._places_until_s = -math.inf

    async def begin(self, redirect_uri: str) -> tuple[str, str]:
        """Start a sign-in that returns to ``redirect_uri``: the URL to which the browser is sent, and the value of the
        cookie that it returns with.

        Raises:
            NoAnswerError: the issuer does not name its endpoints.
        """
        state, verifier = (secrets.token_urlsafe(_SECRET_BYTES) for _ in range(2))
        challenge = base64.urlsafe_b64encode(hashlib.sha256(verifier.encode()).digest()).rstrip(b"=").decode()
        asked = {
            "response_type": "code",
            "client_id": self._client_id,
            "redirect_uri": redirect_uri,
            "scope": self._settings.scope,
            "state": state,
            "code_challenge": challenge,
            "code_challenge_method": "S256",
        }
        endpoint = await self._endpoint("authorization_endpoint")
        return f"{endpoint}{'&' if '?' in endpoint else '?'}{urlencode(asked)}", f"{state}.{verifier}"

    async def finish(self, cookie: str, state: str, code: str, redirect_uri: str) -> Sequence[bytes]:
        """The tokens that the issuer gives for ``code``, in the order in which to try them.

        Raises:
            UnauthenticatedError: this browser started no such sign-in. NoAnswerError: the issuer gives none.
            ConfigurationError: the file of the client's secret cannot be read, or other users can read it.
        """
        match = _COOKIE_VALUE.fullmatch(cookie)
        if match is None or not hmac.compare_digest(match[1].encode(), state.encode()):
            raise UnauthenticatedError("this browser began no such sign-in, or took too long")
        form = {
            "grant_type": "authorization_code",
            "code": code,
            "redirect_uri": redirect_uri,
            "client_id": self._client_id,
            "code_verifier": match[2],
        }
        secret = self._settings.client_secret_file
        headers = {}
        if secret is not None:
            # The client authenticates itself (RFC 6749, 2.3.1).
            names = (self._client_id, await asyncio.to_thread(_client_secret_in, secret))
            pair = ":".join(quote(name, safe="") for name in names)
            headers["Authorization"] = f"Basic {base64.b64encode(pair.encode()).decode()}"
        answer = await ask_json(
            self._tls, "POST", await self._endpoint("token_endpoint"), headers=headers, slots=self._asking, data=form
        )
        return [
            each.encode()
            for each in (answer.get("access_token"), answer.get("id_token"))
            if isinstance(each, str) and each.isascii() and each
        ]

    async def _endpoint(self, name: str) -> str:
        """The endpoint of this name in the issuer's discovery document."""
        async with self._discovering:
            if time.monotonic() >= self._places_until_s:
                try:
                    self._places = await ask_json(self._tls, "GET", discovery_of(self._issuer), slots=self._asking)
                    life_s = PLACES_LIFE_S
                except NoAnswerError as error:
                    self._places, life_s = error, AWAY_PAUSE_S
                self._places_until_s = time.monotonic() + life_s
        if isinstance(self._places, NoAnswerError):
            raise NoAnswerError(str(self._places))
        return place_in(self._places, self._issuer, name)


def _client_secret_in(file: Path) -> str:
    content = files.read(file)
    place = f"auth.oidc.client_secret_file {file}"
    try:
        return secret_text(content.decode().strip(), place)
    except UnicodeDecodeError:
        raise ConfigurationError(f"{place} is no UTF-8") from None
