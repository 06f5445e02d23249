"""An OpenID Connect issuer of its own: real keys behind a small HTTP server, that rotates, lies, hangs, goes away."""

from __future__ import annotations

import base64
import json
import ssl
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from functools import cache
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from ipaddress import ip_address
from pathlib import Path
from typing import Any
from urllib.parse import parse_qsl, urlencode

import pytest
from cryptography import x509
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.serialization import Encoding, NoEncryption, PrivateFormat
from cryptography.x509.oid import NameOID
from joserfc import jws
from joserfc.jwk import ECKey, OKPKey, RSAKey

from app.runtime.principals import Principal
from app.runtime.settings.sections import OidcSettings
from app.trust.oidc import IssuerKeys, OidcIssuer
from ledger.errors import UnauthenticatedError

AUDIENCE = "tallystick"
DISCOVERY = "/.well-known/openid-configuration"
JWKS = "/keys"
SIGN_IN = {"authorization": "authorize", "token": "token"}
DRIP_S = 0.02
GRANTS: list[dict[str, Any]] = [
    {"claim": "groups", "value": "writers", "rights": ["write", "read"], "tenants": ["team-*", "acme"]},
    {"claim": "realm_access.roles", "value": "auditor", "rights": ["audit"], "tenants": ["*"]},
    {"claim": "scope", "value": "ledger.operate", "rights": ["operate"], "tenants": ["acme"]},
    {"claim": "https://example.org/role", "value": "root", "rights": ["admin"], "tenants": ["*"]},
]
Key = RSAKey | ECKey | OKPKey


def make_key(algorithm: str, name: str | None) -> Key:
    """A new key for tokens of this algorithm, called ``name``."""
    parameters: Any = None if name is None else {"kid": name}
    if algorithm.startswith(("RS", "PS")):
        return RSAKey.generate_key(2048, parameters)
    if algorithm.startswith("ES"):
        return ECKey.generate_key({"ES256": "P-256", "ES384": "P-384", "ES512": "P-521"}[algorithm], parameters)
    return OKPKey.generate_key("Ed25519", parameters)


@cache
def _published() -> tuple[Key, ...]:
    """The keys that an issuer begins with, made once: those that nobody may guess are made by the tests."""
    return make_key("RS256", "rsa"), make_key("ES256", "ec"), make_key("EdDSA", "ed")


def segment(value: Any) -> str:
    """A part of a token: base64url of JSON, or of bytes as they are."""
    data = value if isinstance(value, bytes) else json.dumps(value).encode()
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


class Issuer:
    """What it publishes and how may be changed at any time; ``asked`` counts requests by their path."""

    def __init__(self) -> None:
        self.keys: list[Key] = [*_published()]
        self.port = 0
        self.asked: Counter[str] = Counter()
        self.answers: dict[str, tuple[int, dict[str, str], bytes]] = {}
        """By path: status, headers and body instead of what is right."""
        self.gives: dict[str, str] = {}
        """What it answers to a code."""
        self.posted: list[tuple[dict[str, str], dict[str, str]]] = []
        """Headers and form of each request for that."""
        self.hanging: dict[str, threading.Event] = {}
        """Paths that are not answered before the event is set."""
        self.dripping: dict[str, threading.Event] = {}
        """Paths of which the answer comes a byte at a time, until the event is set."""
        self.scheme = "http"
        self._server: ThreadingHTTPServer | None = None

    @property
    def url(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}/realm"

    @property
    def jwks_uri(self) -> str:
        return f"{self.scheme}://127.0.0.1:{self.port}{JWKS}"

    def key(self, name: str) -> Key:
        return next(key for key in self.keys if key.kid == name)

    def token(
        self, name: str = "rsa", algorithm: str = "RS256", *, key: Key | None = None, head: Any = None, **claims: Any
    ) -> str:
        """A token signed with the key of this name, or with ``key``. A claim or a header that is None is left out."""
        now = int(time.time())
        said = {"iss": self.url, "aud": AUDIENCE, "sub": "ada", "iat": now, "exp": now + 600, **claims}
        header = {"alg": algorithm, "kid": name, "typ": "JWT", **(head or {})}
        return jws.serialize_compact(
            {part: value for part, value in header.items() if value is not None},
            json.dumps({claim: value for claim, value in said.items() if value is not None}),
            key or self.key(name),
            registry=jws.JWSRegistry(algorithms=[algorithm], strict_check_header=False),
        )

    def document(self, path: str) -> Any:
        """What is right at this path, None for nothing."""
        if path == f"/realm{DISCOVERY}":
            places = {f"{name}_endpoint": f"{self.url}/{place}" for name, place in SIGN_IN.items()}
            return {"issuer": self.url, "jwks_uri": self.jwks_uri, **places}
        return {"keys": [key.as_dict(private=False) for key in self.keys]} if path == JWKS else None

    def stop(self) -> None:
        """Be away: nobody listens."""
        if self._server is not None:
            for held in (*self.hanging.values(), *self.dripping.values()):
                held.set()
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def start(self, certified: ssl.SSLContext | None = None) -> None:
        """Answer, at the same port as before; over TLS where there is a certificate."""
        self._server = _Server(("127.0.0.1", self.port), _handler(self))
        self.port = self._server.server_port
        if certified is not None:
            self.scheme = "https"
            self._server.socket = certified.wrap_socket(self._server.socket, server_side=True)
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()


def certify(folder: Path) -> tuple[Path, ssl.SSLContext]:
    """A certificate for this machine, signed by itself: its file, and what a server needs to show it."""
    key = ec.generate_private_key(ec.SECP256R1())
    name = x509.Name([x509.NameAttribute(NameOID.COMMON_NAME, "issuer")])
    now = datetime.now(UTC)
    certificate = (
        x509.CertificateBuilder()
        .subject_name(name)
        .issuer_name(name)
        .public_key(key.public_key())
        .serial_number(x509.random_serial_number())
        .not_valid_before(now - timedelta(days=1))
        .not_valid_after(now + timedelta(days=1))
        .add_extension(x509.SubjectAlternativeName([x509.IPAddress(ip_address("127.0.0.1"))]), critical=False)
        .add_extension(x509.BasicConstraints(ca=True, path_length=None), critical=True)
        .sign(key, hashes.SHA256())
    )
    public, private = folder / "issuer.pem", folder / "issuer.key"
    public.write_bytes(certificate.public_bytes(Encoding.PEM))
    private.write_bytes(key.private_bytes(Encoding.PEM, PrivateFormat.PKCS8, NoEncryption()))
    certified = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certified.load_cert_chain(public, private)
    return public, certified


class _Server(ThreadingHTTPServer):
    daemon_threads = True
    block_on_close = False


def _handler(issuer: Issuer) -> type[BaseHTTPRequestHandler]:
    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            issuer.asked[self.path] += 1
            place, _, query = self.path.partition("?")
            if place == f"/realm/{SIGN_IN['authorization']}":
                asked = dict(parse_qsl(query))
                self.send_response(302)
                self.send_header(
                    "Location", f"{asked['redirect_uri']}?{urlencode({'code': 'c', 'state': asked['state']})}"
                )
                self.send_header("Content-Length", "0")
                self.end_headers()
                return
            if self.path in issuer.hanging:
                issuer.hanging[self.path].wait()
            document = issuer.document(self.path)
            right = (404, {}, b"") if document is None else (200, {}, json.dumps(document).encode())
            status, headers, body = issuer.answers.get(self.path, right)
            self.send_response(status)
            for name, value in {"Content-Length": str(len(body)), **headers}.items():
                self.send_header(name, value)
            self.end_headers()
            try:
                while self.path in issuer.dripping and not issuer.dripping[self.path].wait(DRIP_S):
                    self.wfile.write(b" ")
                self.wfile.write(body)
            except ConnectionError:
                self.close_connection = True

        def do_POST(self) -> None:
            form = self.rfile.read(int(self.headers["Content-Length"])).decode()
            issuer.posted.append(({name.lower(): value for name, value in self.headers.items()}, dict(parse_qsl(form))))
            body = json.dumps(issuer.gives).encode()
            self.send_response(200 if "error" not in issuer.gives else 400)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *arguments: object) -> None:
            return

    return Handler


@contextmanager
def issuing() -> Iterator[Issuer]:
    """An issuer that answers on a port of its own."""
    issuer = Issuer()
    issuer.start()
    try:
        yield issuer
    finally:
        issuer.stop()


class Checked:
    """What a node asks of tokens, without the node: time and the issuer's are the test's."""

    def __init__(self, issuer: Issuer, **more: Any) -> None:
        settings = OidcSettings(issuer=issuer.url, audience=[AUDIENCE], grants=GRANTS, **more)
        self.now_s = time.time()
        self.clock_s = 0.0
        self.keys = IssuerKeys(issuer=issuer.url, jwks_uri=settings.jwks_uri, interval_s=60, clock=lambda: self.clock_s)
        self.issuer = OidcIssuer(settings, self.keys)

    async def caller(self, token: str) -> Principal:
        return await self.issuer.caller(token.encode(), self.now_s)

    def known(self, token: str) -> Principal | None:
        return self.issuer.known(token.encode(), self.now_s)

    async def refused(self, token: str, because: str | None = None) -> None:
        with pytest.raises(UnauthenticatedError, match=because) as refused:
            await self.caller(token)
        assert self.known(token) is None
        assert all(part not in str(refused.value) for part in token.split(".") if len(part) > 10)
