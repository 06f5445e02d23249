"""The keys with which an OpenID Connect issuer signs: fetched at intervals, and when a token needs others.

    what counts       the keys that were published last, for at most AWAY_MAX_S after they were fetched
    what is fetched   once every interval; besides, for a token that names another key, but with a pause of
                      ASK_PAUSE_S in between, whatever names tokens make up
    how               https, or http on this machine; FETCH_TIMEOUT_S, DOCUMENT_BYTES_MAX, no redirect

An issuer that cannot be reached, or answers something else, changes nothing; one that publishes no keys withdraws all.
"""

from __future__ import annotations

import asyncio
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from typing import Any, Final

import httpx
import orjson
import structlog
from cryptography.exceptions import UnsupportedAlgorithm
from joserfc.errors import JoseError
from joserfc.jwk import ECKey, JWKRegistry, OKPKey, RSAKey

from app.runtime.outgoing.asking import NoAnswerError, client_of, read_answer
from app.runtime.settings.types import is_fetched_url
from ledger.errors import NotReadyError

AWAY_MAX_S: Final = 3600.0
"""How long keys go on counting while the issuer cannot be asked whether they still do."""
ASK_PAUSE_S: Final = 5.0
"""Pause between two fetches that tokens ask for."""
FETCH_TIMEOUT_S: Final = 5.0
DOCUMENT_BYTES_MAX: Final = 256 * 1024
RSA_BITS_MIN: Final = 2048
"""RFC 7518, 3.3."""
DISCOVERY: Final = "/.well-known/openid-configuration"

PublicKey = RSAKey | ECKey | OKPKey

log = structlog.get_logger()


class KeySet:
    """What an issuer publishes at one moment, without the keys that sign no tokens or are not understood."""

    def __init__(self, published: list[Any]) -> None:
        self._keys = list(_understood(published))

    def find(self, name: str | None, kind: str) -> PublicKey | None:
        """The key of this name (``kid``) and kind (``kty``). A token that names none means the only one of its kind."""
        found = [key for key in self._keys if key.key_type == kind and name in (None, key.kid)]
        return found[0] if len(found) == 1 else None


@dataclass(kw_only=True, eq=False)
class IssuerKeys:
    """Follows the keys of ``issuer``: those at ``jwks_uri``, or where the issuer says. Belongs to one event loop."""

    issuer: str
    jwks_uri: str | None
    interval_s: float
    clock: Callable[[], float] = time.monotonic
    fault: str | None = field(default=None, init=False)
    """Why the keys could not be fetched when that was last tried."""

    def __post_init__(self) -> None:
        self._tls = httpx.create_ssl_context()
        self._fetching = asyncio.Lock()
        self._published: list[Any] | None = None
        self._keys: KeySet | None = None
        self._fetched_s = self._asked_s = -math.inf

    async def run(self) -> None:
        """Follow the keys until cancelled."""
        while True:
            async with self._fetching:
                await self._fetch()
            await asyncio.sleep(self.interval_s)

    def counting(self) -> KeySet | None:
        """The keys that count now, the same object for as long as the issuer publishes the same; None when the issuer
        has not been heard of for too long."""
        return self._keys if self.clock() - self._fetched_s <= AWAY_MAX_S else None

    async def with_key(self, name: str | None, kind: str) -> KeySet:
        """The keys that count, fetched again when there is none of this name and kind, and the pause is over.

        Raises:
            NotReadyError: there are none, and none can be had now.
        """
        keys = self.counting()
        if keys is None or keys.find(name, kind) is None:
            await self._fetch_again()
            keys = self.counting()
        if keys is None:
            raise NotReadyError("the keys of the issuer of tokens cannot be had now; try again")
        return keys

    async def _fetch_again(self) -> None:
        """Fetch, unless that was just done for another token."""
        async with self._fetching:
            if self.clock() - self._asked_s < ASK_PAUSE_S:
                return
            try:
                await self._fetch()
            finally:
                self._asked_s = self.clock()

    async def _fetch(self) -> None:
        began_s = self.clock()
        try:
            async with asyncio.timeout(FETCH_TIMEOUT_S):
                published = await self._ask()
        except (TimeoutError, NoAnswerError) as error:
            self.fault = f"{self.issuer} does not say what its keys are: {str(error) or type(error).__name__}"
            log.warning("issuer_keys_not_fetched", error=self.fault)
            return
        self.fault = None
        self._fetched_s = began_s
        if published != self._published:
            self._published, self._keys = published, KeySet(published)

    async def _ask(self) -> list[Any]:
        """The keys as the issuer publishes them (RFC 7517, 5).

        Raises:
            NoAnswerError: it does not answer, or something else.
            TimeoutError: it takes too long.
        """
        async with client_of(self._tls, timeout_s=FETCH_TIMEOUT_S, has_proxies=True) as client:
            uri = self.jwks_uri or await self._discover(client)
            published = (await _get(client, uri)).get("keys")
        if not isinstance(published, list):
            raise NoAnswerError(f"{uri} is no JWKS")
        return published

    async def _discover(self, client: httpx.AsyncClient) -> str:
        """Where the issuer says that its keys are (OpenID Connect Discovery 1.0, 4)."""
        place = self.issuer.removesuffix("/") + DISCOVERY
        said = await _get(client, place)
        if said.get("issuer") != self.issuer:
            raise NoAnswerError(f"{place} is about another issuer")
        uri = said.get("jwks_uri")
        if not isinstance(uri, str) or not is_fetched_url(uri) or not uri.startswith(("https:", self.issuer[:5])):
            raise NoAnswerError(f"{place} names no jwks_uri of https")
        return uri


async def _get(client: httpx.AsyncClient, url: str) -> dict[str, Any]:
    headers = {"Accept": "application/json"}
    body = await read_answer(
        client, "GET", url, bytes_max=DOCUMENT_BYTES_MAX, within_s=FETCH_TIMEOUT_S, headers=headers
    )
    try:
        document = orjson.loads(body)
    except orjson.JSONDecodeError:
        raise NoAnswerError(f"{url} is no JSON") from None
    if not isinstance(document, dict):
        raise NoAnswerError(f"{url} is no JSON object")
    return document


def _understood(published: list[Any]) -> Iterator[PublicKey]:
    for number, data in enumerate(published):
        if not isinstance(data, dict) or data.get("use", "sig") != "sig" or data.get("kty") not in ("RSA", "EC", "OKP"):
            continue
        try:
            key = JWKRegistry.import_key(data)
            key.check_key_op("verify")
        except (JoseError, UnsupportedAlgorithm, LookupError, TypeError, ValueError) as error:
            log.warning("issuer_key_left_out", number=number, error=type(error).__name__)
            continue
        assert isinstance(key, PublicKey)
        if key.is_private:
            log.error("issuer_key_left_out", number=number, error="its private half is published")
        elif isinstance(key, RSAKey) and key.public_key.key_size < RSA_BITS_MIN:
            log.warning("issuer_key_left_out", number=number, error=f"RSA of less than {RSA_BITS_MIN} bits")
        else:
            yield key
