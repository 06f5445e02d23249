"""Tokens signed by an OpenID Connect issuer: their verification, principals and grants.

A token is a JWT (RFC 7519) in the compact form of JWS (RFC 7515). The checks, in order, up to the first that fails::

    1. form        three parts; ``typ``, if any, is that of an access token or an ID token; nothing critical
    2. algorithm   one of ``auth.oidc.algorithms``, none of which has a secret
    3. key         one that the issuer publishes, of the kind that the algorithm needs
    4. signature
    5. claims      issuer, audience, and the times, ``auth.oidc.leeway`` either way; it must expire
    6. principal   ``oidc:`` and ``auth.oidc.principal_claim``

A verified token is cached by its SHA-256, until it expires or the issuer publishes other keys.

The keys of the issuer are fetched at intervals, and when a token needs others::

    what counts       the keys that were published last, for at most AWAY_MAX_S after they were fetched
    what is fetched   once every interval, after a failure ASK_PAUSE_S later; besides, for a token that names
                      another key, but with that pause in between, whatever names tokens make up
    how               https, or http on this machine; FETCH_TIMEOUT_S, DOCUMENT_BYTES_MAX, no redirect

An issuer that cannot be reached, or sends an invalid answer, changes nothing. An issuer that publishes no keys
withdraws all.
"""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import math
import ssl
import time
import warnings
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any, Final, NamedTuple

import httpx
import orjson
from cryptography.exceptions import UnsupportedAlgorithm
from joserfc import jws
from joserfc.errors import JoseError, SecurityWarning
from joserfc.jwk import ECKey, JWKRegistry, OKPKey, RSAKey
from joserfc.jwt import JWTClaimsRegistry

from app.runtime.logs import log
from app.runtime.outgoing import NoAnswerError, client_of, read_answer
from app.runtime.principals import Principal
from app.runtime.settings.sections import OidcSettings
from app.runtime.settings.types import is_fetched_url
from app.runtime.tasks import keep_newest
from ledger.errors import NotReadyError, UnauthenticatedError

AWAY_MAX_S: Final = 3600.0
"""How long keys stay trusted while the issuer cannot be reached."""
ASK_PAUSE_S: Final = 5.0
"""Pause between two fetches that tokens ask for, and after one that failed."""
FETCH_TIMEOUT_S: Final = 5.0
DOCUMENT_BYTES_MAX: Final = 256 * 1024
RSA_BITS_MIN: Final = 2048
"""RFC 7518, 3.3."""

PublicKey = RSAKey | ECKey | OKPKey


class KeySet:
    """The keys that an issuer publishes at one moment, without those that sign no tokens or are not supported."""

    def __init__(self, published: list[Any]) -> None:
        self._keys = list(_understood(published))

    def find(self, name: str | None, kind: str) -> PublicKey | None:
        """The key of this name (``kid``) and kind (``kty``). Without a name, the only key of its kind."""
        found = [key for key in self._keys if key.key_type == kind and name in (None, key.kid)]
        return found[0] if len(found) == 1 else None


@dataclass(kw_only=True, eq=False)
class IssuerKeys:
    """Follows the keys of ``issuer``, at ``jwks_uri`` or the address that the issuer names. Belongs to one event
    loop."""

    issuer: str
    jwks_uri: str | None
    interval_s: float
    clock: Callable[[], float] = time.monotonic
    fault: str | None = field(default=None, init=False)
    """Why the last fetch of the keys failed."""

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
            await asyncio.sleep(self.interval_s if self.fault is None else min(self.interval_s, ASK_PAUSE_S))

    def counting(self) -> KeySet | None:
        """The keys that are trusted now, the same object while the issuer publishes the same keys; None once the last
        successful fetch is too old."""
        return self._keys if self.clock() - self._fetched_s <= AWAY_MAX_S else None

    async def with_key(self, name: str | None, kind: str) -> KeySet:
        """The trusted keys, fetched again if none has this name and kind and the pause is over.

        Raises:
            NotReadyError: there are none, and none can be had now.
        """
        if (keys := self.counting()) is None or keys.find(name, kind) is None:
            await self._fetch_again()
            keys = self.counting()
        if keys is None:
            raise NotReadyError("the keys of the issuer of tokens cannot be had now; try again")
        return keys

    async def _fetch_again(self) -> None:
        """Fetch, unless another token just caused a fetch."""
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
            NoAnswerError: it does not answer, or sends an invalid answer. TimeoutError: it takes too long.
        """
        uri = self.jwks_uri or place_in(
            await ask_json(self._tls, "GET", discovery_of(self.issuer)), self.issuer, "jwks_uri"
        )
        published = (await ask_json(self._tls, "GET", uri)).get("keys")
        if not isinstance(published, list):
            raise NoAnswerError(f"{uri} is no JWKS")
        return published


def discovery_of(issuer: str) -> str:
    """The URL of the issuer's discovery document (OpenID Connect Discovery 1.0, 4)."""
    return issuer.removesuffix("/") + "/.well-known/openid-configuration"


def place_in(discovered: dict[str, Any], issuer: str, name: str) -> str:
    """The URL of this name in the issuer's discovery document.

    Raises:
        NoAnswerError: it is about another issuer, or names no URL that may be fetched.
    """
    if discovered.get("issuer") != issuer:
        raise NoAnswerError(f"{discovery_of(issuer)} is about another issuer")
    found = discovered.get(name)
    if not isinstance(found, str) or not is_fetched_url(found) or not found.startswith(("https:", issuer[:5])):
        raise NoAnswerError(f"{discovery_of(issuer)} names no {name} of https")
    return found


async def ask_json(
    tls: ssl.SSLContext,
    method: str,
    url: str,
    *,
    headers: Mapping[str, str] | None = None,
    slots: asyncio.Semaphore | None = None,
    **asked: Any,
) -> dict[str, Any]:
    """The JSON object that the issuer answers; waits for one of the ``slots``.

    Raises:
        NoAnswerError: it does not answer in ``FETCH_TIMEOUT_S``, or sends an invalid answer.
    """
    headers = {"Accept": "application/json", **(headers or {})}
    try:
        async with (
            asyncio.timeout(FETCH_TIMEOUT_S),
            slots or contextlib.nullcontext(),
            client_of(tls, timeout_s=FETCH_TIMEOUT_S, has_proxies=True) as client,
        ):
            asked |= {"bytes_max": DOCUMENT_BYTES_MAX, "within_s": FETCH_TIMEOUT_S}
            document = orjson.loads(await read_answer(client, method, url, headers=headers, **asked))
    except TimeoutError:
        raise NoAnswerError(f"{url} does not answer in {FETCH_TIMEOUT_S:g} s") from None
    except orjson.JSONDecodeError:
        document = None
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


PREFIX: Final = "oidc:"
"""Prefix of the id of each principal that an issuer names; no name of a token has a colon."""
NAME_CHARACTERS_MAX: Final = 250
TOKENS_KNOWN_MAX: Final = 4096
"""Tokens that are cached; the oldest is evicted first."""
TYPES: Final = frozenset({"jwt", "at+jwt", "application/jwt", "application/at+jwt"})
"""Accepted values of ``typ``, if a token has it: not those of objects signed for other purposes (RFC 8725, 3.11)."""
SCOPES: Final = frozenset({"scope", "scp"})
"""Claims whose text is a list, separated by spaces (RFC 8693, 4.2)."""
_SETTING_OF: Final = {"iss": " (auth.oidc.issuer)", "aud": " (auth.oidc.audience)"}
"""The setting that a claim must match."""

# RFC 9864 renames EdDSA, but issuers still use the old name.
warnings.filterwarnings("ignore", category=SecurityWarning)


class _Verified(NamedTuple):
    principal: Principal
    expires_s: float
    keys: KeySet


def issuer_of(settings: OidcSettings) -> OidcIssuer:
    """The issuer that the settings name; nothing was fetched from it yet."""
    assert settings.issuer is not None
    return OidcIssuer(
        settings,
        IssuerKeys(
            issuer=settings.issuer, jwks_uri=settings.jwks_uri, interval_s=settings.refresh_interval.total_seconds()
        ),
    )


class OidcIssuer:
    """The issuer of ``settings``, whose tokens authenticate callers. Belongs to one event loop."""

    def __init__(self, settings: OidcSettings, keys: IssuerKeys) -> None:
        self.keys = keys
        self._settings = settings
        self._leeway_s = int(settings.leeway.total_seconds())
        # Unknown header parameters are to be ignored (RFC 7515, 4).
        self._registry = jws.JWSRegistry(algorithms=settings.algorithms, strict_check_header=False)
        self._known: OrderedDict[bytes, _Verified] = OrderedDict()

    def known(self, credentials: bytes, now_s: float) -> Principal | None:
        """The principal of a token that was verified before; None if it must be verified."""
        found = self._known.get(hashlib.sha256(credentials).digest())
        if found is None or now_s >= found.expires_s or found.keys is not self.keys.counting():
            return None
        return found.principal

    async def caller(self, credentials: bytes, now_s: float) -> Principal:
        """The principal that the token names.

        Raises:
            UnauthenticatedError: the token is rejected; the text says why. NotReadyError: the keys of the issuer cannot
            be had now.
        """
        signed = self._opened(credentials)
        header = signed.protected
        kind = self._registry.algorithms[header["alg"]].key_type
        keys = await self.keys.with_key(header.get("kid"), kind)
        if (key := keys.find(header.get("kid"), kind)) is None:
            raise UnauthenticatedError("the token is signed with a key that its issuer does not publish")
        try:
            holds = jws.validate_compact(signed, key, registry=self._registry)
        except JoseError as error:
            raise UnauthenticatedError(f"the token is not for the key that it names: {error.description}") from None
        if not holds:
            raise UnauthenticatedError("the signature of the token does not hold")
        principal, expires_s = self._named(_claims(signed), now_s)
        keep_newest(
            self._known, hashlib.sha256(credentials).digest(), _Verified(principal, expires_s, keys), TOKENS_KNOWN_MAX
        )
        return principal

    def _opened(self, credentials: bytes) -> jws.CompactSignature:
        """Steps 1 and 2.

        Raises:
            UnauthenticatedError: it cannot be a valid token.
        """
        try:
            signed = jws.extract_compact(credentials, registry=self._registry)
            header = signed.protected
            if not isinstance(header, dict):
                raise UnauthenticatedError("the token has no head")
            # The library assumes that ``crit`` is a list; no critical parameter is supported here.
            if "crit" in header or "b64" in header:
                raise UnauthenticatedError("the token has a critical header, which is not understood")
            self._registry.check_header(header)
        except (JoseError, TypeError, RecursionError) as error:
            reason = error.description if isinstance(error, JoseError) else "its head is no JSON object"
            raise UnauthenticatedError(f"what Authorization says is no token that could count: {reason}") from None
        if header["alg"] not in self._settings.algorithms:
            raise UnauthenticatedError("the algorithm of the token is not allowed here (auth.oidc.algorithms)")
        if header.get("typ", "JWT").lower() not in TYPES:
            raise UnauthenticatedError("the token is neither an access token nor an ID token")
        return signed

    def _named(self, claims: dict[str, Any], now_s: float) -> tuple[Principal, float]:
        """The principal that verified claims name, and when they expire: steps 5 and 6.

        Raises:
            UnauthenticatedError: the claims are rejected.
        """
        settings = self._settings
        assert settings.issuer is not None
        expected = JWTClaimsRegistry(
            now=int(now_s),
            leeway=self._leeway_s,
            iss={"essential": True, "value": settings.issuer},
            aud={"essential": True, "values": settings.audience},
            exp={"essential": True},
        )
        try:
            expected.validate(claims)
            expires_at = datetime.fromtimestamp(claims["exp"], UTC)
        except JoseError as error:
            setting = _SETTING_OF.get(getattr(error, "claim", ""), "")
            raise UnauthenticatedError(f"the token does not count here: {error.description}{setting}") from None
        except (OverflowError, ValueError, OSError):
            raise UnauthenticatedError("the token expires at no time that there is") from None
        name = _said(claims, settings.principal_claim)
        if not isinstance(name, str) or not 0 < len(name) <= NAME_CHARACTERS_MAX or not name.isprintable():
            raise UnauthenticatedError(
                f"the token does not say who calls: its claim {settings.principal_claim} (auth.oidc.principal_claim) "
                f"is missing, or no text of 1 to {NAME_CHARACTERS_MAX} characters that can be printed"
            )
        grants = tuple(each.grant for each in settings.grants if _holds(claims, each.claim, each.value))
        return Principal(PREFIX + name, "oidc", grants, expires_at), claims["exp"] + self._leeway_s


def _claims(signed: jws.CompactSignature) -> dict[str, Any]:
    try:
        claims = orjson.loads(signed.payload)
    except orjson.JSONDecodeError:
        claims = None
    if not isinstance(claims, dict):
        raise UnauthenticatedError("the token holds no claims")
    return claims


def _said(claims: dict[str, Any], path: str) -> Any:
    """The value of a claim: the one of that name, or the one that a dotted path leads to."""
    said: Any = claims
    if path in claims:
        return claims[path]
    for name in path.split("."):
        said = said.get(name) if isinstance(said, dict) else None
    return said


def _holds(claims: dict[str, Any], path: str, value: str) -> bool:
    """Whether a claim is this text, or is a list or a scope that has it."""
    said = _said(claims, path)
    if isinstance(said, str):
        return said == value or (path in SCOPES and value in said.split(" "))
    return isinstance(said, list) and value in said
