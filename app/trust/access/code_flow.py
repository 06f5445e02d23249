"""Signing in at the OpenID Connect issuer: the authorization code flow with PKCE (RFC 6749, 4.1; RFC 7636).

    console  -- GET /v1/console/oidc           -->  issuer, with state and the challenge of a verifier
    issuer   -- GET /v1/console/oidc/callback  -->  here, with state and code
    here     -- POST token_endpoint            -->  issuer, with code and verifier; answers the tokens

State and verifier are in a cookie of the browser meanwhile, which scripts do not see. The tokens are judged as any that
a caller shows (``app.trust.access.oidc``): the access token, and where that is not for this service the ID token.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import math
import re
import secrets
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Final, NamedTuple
from urllib.parse import quote, urlencode

import httpx
import orjson

from app.runtime.outgoing.asking import NoAnswerError, client_of, read_answer
from app.runtime.settings.sections import AuthSettings, OidcSettings
from app.runtime.settings.types import is_fetched_url
from app.trust.access.issuer_keys import DISCOVERY, DOCUMENT_BYTES_MAX, FETCH_TIMEOUT_S
from ledger.errors import ConfigurationError, UnauthenticatedError
from ledger.secret_text import secret_text
from signing import files

COOKIE: Final = "tally_sign_in"
COOKIE_LIFE_S: Final = 600
"""How long somebody may take to say who he is."""
PLACES_LIFE_S: Final = 300.0
"""How long the issuer is not asked again where one signs in: anybody may begin to."""
AWAY_PAUSE_S: Final = 1.0
"""The same, where it did not answer."""
ASKED_AT_ONCE: Final = 8
"""Requests to the issuer at once; further sign-ins wait."""
_SECRET_BYTES: Final = 32
_COOKIE_VALUE: Final = re.compile(r"([A-Za-z0-9_-]{43})\.([A-Za-z0-9_-]{43})")


class Departure(NamedTuple):
    """Where a browser is sent to say who uses it, and the value of the cookie that it comes back with."""

    url: str
    cookie: str


def code_flow_of(settings: AuthSettings) -> CodeFlow | None:
    """How people sign in at the issuer; None where the settings name none, or no client."""
    return CodeFlow(settings.oidc) if settings.mode == "oidc" and settings.oidc.client_id is not None else None


class CodeFlow:
    """Signs people in at the issuer of ``settings``, which name a client. Belongs to one event loop."""

    def __init__(self, settings: OidcSettings) -> None:
        assert settings.issuer is not None
        assert settings.client_id is not None
        self._settings = settings
        self._issuer = settings.issuer
        self._client_id = settings.client_id
        self._tls = httpx.create_ssl_context()
        self._asking = asyncio.Semaphore(ASKED_AT_ONCE)
        self._discovering = asyncio.Lock()
        self._places: dict[str, Any] = {}
        self._places_until_s = -math.inf
        self._fault: str | None = None
        """Why the issuer did not say it when it was asked last."""

    async def begin(self, redirect_uri: str) -> Departure:
        """A sign-in that comes back to ``redirect_uri``.

        Raises:
            NoAnswerError: the issuer does not say where one signs in.
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
        return Departure(f"{endpoint}{'&' if '?' in endpoint else '?'}{urlencode(asked)}", f"{state}.{verifier}")

    async def finish(self, cookie: str, state: str, code: str, redirect_uri: str) -> Sequence[bytes]:
        """The tokens that the issuer gives for ``code``, the one to be tried first in front.

        Raises:
            UnauthenticatedError: this browser began no such sign-in.
            NoAnswerError: the issuer gives none.
            ConfigurationError: the file of the client's secret cannot be read, or others can read it.
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
        headers = {"Accept": "application/json"}
        if secret is not None:
            headers["Authorization"] = _basic(self._client_id, await asyncio.to_thread(_client_secret_in, secret))
        answer = await self._ask("POST", await self._endpoint("token_endpoint"), data=form, headers=headers)
        found = [answer.get(name) for name in ("access_token", "id_token")]
        return [each.encode() for each in found if isinstance(each, str) and each.isascii() and each]

    async def _endpoint(self, name: str) -> str:
        """What the issuer says that it is."""
        place = self._issuer.removesuffix("/") + DISCOVERY
        async with self._discovering:
            if time.monotonic() >= self._places_until_s:
                try:
                    self._places, self._fault = await self._ask("GET", place), None
                except NoAnswerError as error:
                    self._places, self._fault = {}, str(error)
                life_s = PLACES_LIFE_S if self._fault is None else AWAY_PAUSE_S
                self._places_until_s = time.monotonic() + life_s
        if self._fault is not None:
            raise NoAnswerError(self._fault)
        found, secured = self._places.get(name), ("https:", self._issuer[:5])
        if self._places.get("issuer") != self._issuer:
            raise NoAnswerError(f"{place} is about another issuer")
        if not isinstance(found, str) or not is_fetched_url(found) or not found.startswith(secured):
            raise NoAnswerError(f"{place} names no {name} of https")
        return found

    async def _ask(self, method: str, url: str, **asked: Any) -> dict[str, Any]:
        try:
            async with (
                asyncio.timeout(FETCH_TIMEOUT_S),
                self._asking,
                client_of(self._tls, timeout_s=FETCH_TIMEOUT_S, has_proxies=True) as client,
            ):
                body = await read_answer(
                    client, method, url, bytes_max=DOCUMENT_BYTES_MAX, within_s=FETCH_TIMEOUT_S, **asked
                )
        except TimeoutError:
            raise NoAnswerError(f"{url} does not answer in {FETCH_TIMEOUT_S:g} s") from None
        try:
            document = orjson.loads(body)
        except orjson.JSONDecodeError:
            document = None
        if not isinstance(document, dict):
            raise NoAnswerError(f"{url} is no JSON object")
        return document


def _client_secret_in(file: Path) -> str:
    content = files.read(file)
    place = f"auth.oidc.client_secret_file {file}"
    try:
        return secret_text(content.decode().strip(), place)
    except UnicodeDecodeError:
        raise ConfigurationError(f"{place} is no UTF-8") from None


def _basic(client_id: str, secret: str) -> str:
    """The client says who it is (RFC 6749, 2.3.1)."""
    pair = f"{quote(client_id, safe='')}:{quote(secret, safe='')}"
    return f"Basic {base64.b64encode(pair.encode()).decode()}"
