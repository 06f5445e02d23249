"""Sections of the settings with rules of their own: ``auth``, ``replication``, ``exchange``, ``webhooks``."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_settings import NoDecode

from app.runtime.principals import Grant, Right
from app.runtime.settings.types import (
    PATTERNS_MAX,
    CommaSeparated,
    Duration,
    FetchedUrl,
    JobIdPart,
    ListenAddress,
    Network,
    TenantsPattern,
    between,
    comma_separated,
)
from ledger.errors import refuse
from wal.replication.configuration import MEMBERS_MAX


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


class MemberSettings(_Section):
    """One of ``replication.members``: where a safekeeper listens, and its region where that is not the node's."""

    address: ListenAddress
    region: JobIdPart | None = None

    @property
    def is_on_loopback(self) -> bool:
        """Whether it runs on this machine."""
        return self.address.startswith(("127.0.0.1:", "localhost:", "[::1]:"))


def _members(value: object) -> object:
    """Addresses separated by commas, or a list of addresses and tables; in the environment one with tables is JSON."""
    is_json = isinstance(value, str) and value.lstrip().startswith("[{")
    value = json.loads(str(value)) if is_json else comma_separated(value)
    return (
        [{"address": each} if isinstance(each, str) else each for each in value] if isinstance(value, list) else value
    )


class LeaseSettings(_Section):
    """``lease.*``: where it is kept who may write this node's log, while safekeepers keep it."""

    kind: Literal["postgres", "etcd"] = "postgres"
    ttl: Annotated[Duration, between("1s", "10m")] = timedelta(seconds=10)
    etcd_urls: Annotated[CommaSeparated[FetchedUrl], Field(max_length=MEMBERS_MAX)] = []
    etcd_ca: Path | None = None
    etcd_cert: Path | None = None
    etcd_key: Path | None = None

    @model_validator(mode="after")
    def _knows_where(self) -> LeaseSettings:
        if self.kind == "etcd" and not self.etcd_urls:
            raise ValueError("kind is etcd: set etcd_urls to its members, such as https://etcd-1:2379")
        if (self.etcd_cert is None) != (self.etcd_key is None):
            raise ValueError("etcd_cert and etcd_key belong together: set both")
        return self


class ReplicationSettings(_Section):
    """``replication.*``."""

    members: Annotated[list[MemberSettings], NoDecode, BeforeValidator(_members), Field(max_length=MEMBERS_MAX)] = []
    tls_cert: Path | None = None
    tls_key: Path | None = None
    tls_ca: Path | None = None
    timeout: Annotated[Duration, between("100ms", "5m")] = timedelta(seconds=5)
    lag_threshold: Annotated[int, Field(ge=1)] = 100_000
    corruption_policy: Literal["refuse", "truncate"] = "refuse"

    @model_validator(mode="after")
    def _speaks_tls_to_others(self) -> ReplicationSettings:
        files = [self.tls_cert, self.tls_key, self.tls_ca]
        other = next((each.address for each in self.members if not each.is_on_loopback), None)
        refuse(
            ValueError,
            (any(files) and not all(files), "tls_cert, tls_key and tls_ca belong together: set all three"),
            (
                other is not None and not all(files),
                f"members has {other}, which is not on this machine: set tls_cert, tls_key and tls_ca, so that "
                "nobody else can write this node's log there",
            ),
            (len({each.address for each in self.members}) < len(self.members), "members has an address twice"),
        )
        return self


Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "Ed25519"]
"""Signatures whose keys may be published; none of those made with a shared secret, and never ``none``."""
ClaimPath = Annotated[str, Field(min_length=1, max_length=200)]
"""A claim by its name, or by the names that lead to it, such as ``realm_access.roles``."""


class _Granting(_Section):
    rights: Annotated[list[Right], Field(min_length=1)]
    tenants: Annotated[list[TenantsPattern], Field(min_length=1, max_length=PATTERNS_MAX)]

    @property
    def grant(self) -> Grant:
        """The rights, and the tenants that they are for."""
        return Grant(frozenset(self.rights), tuple(self.tenants))


class ClaimGrant(_Granting):
    """One of ``auth.oidc.grants``: what it allows to have ``value`` in the claim."""

    claim: ClaimPath
    value: Annotated[str, Field(min_length=1, max_length=1000)]


class CertificateGrant(_Granting):
    """One of ``auth.certificates``: what a certificate of this name allows."""

    name: Annotated[str, Field(pattern=r"^[!-~]([ -~]{0,248}[!-~])?$")]


class OidcSettings(_Section):
    """``auth.oidc.*``. ``issuer`` and ``audience`` have no defaults, and are needed where ``auth.mode`` is ``oidc``."""

    issuer: FetchedUrl | None = None
    audience: Annotated[CommaSeparated[Annotated[str, Field(min_length=1, max_length=1000)]], Field(max_length=16)] = []
    jwks_uri: FetchedUrl | None = None
    algorithms: Annotated[CommaSeparated[Algorithm], Field(min_length=1)] = ["RS256", "ES256", "EdDSA"]
    leeway: Annotated[Duration, between("0s", "5m")] = timedelta(seconds=30)
    refresh_interval: Annotated[Duration, between("1s", "10m")] = timedelta(minutes=1)
    principal_claim: ClaimPath = "sub"
    client_id: Annotated[str | None, Field(min_length=1, max_length=1000)] = None
    client_secret_file: Path | None = None
    scope: Annotated[str, Field(pattern=r"^[!-~]+( [!-~]+)*$", max_length=1000)] = "openid"
    grants: Annotated[list[ClaimGrant], Field(max_length=256)] = []


class AuthSettings(_Section):
    """``auth.*``: who may call. Without authentication only loopback is served, but for ``allow_open``.

    ``client_ca`` is a PEM file: certificates that it vouches for say who calls, as ``certificates`` say: tables of
    ``name``, ``rights`` and ``tenants``; in the environment JSON.
    """

    mode: Literal["none", "tokens", "oidc"] = "none"
    allow_open: bool = False
    client_ca: Path | None = None
    certificates: Annotated[list[CertificateGrant], Field(max_length=1000)] = []
    oidc: OidcSettings = OidcSettings()
    session_life: Annotated[Duration, between("1m", "7d")] = timedelta(hours=12)

    @model_validator(mode="after")
    def _certificates_count(self) -> AuthSettings:
        missing = [f"auth.oidc.{name}" for name in ("issuer", "audience") if not getattr(self.oidc, name)]
        refuse(
            ValueError,
            (
                self.mode == "none" and (self.client_ca is not None or bool(self.certificates)),
                "client_ca and certificates need another mode than none, which asks nobody who he is",
            ),
            (
                self.mode != "oidc" and self.oidc.issuer is not None,
                f"oidc.issuer is set and mode is {self.mode}, which asks no issuer: set auth.mode to oidc",
            ),
            (
                bool(self.certificates) and self.client_ca is None,
                "certificates need client_ca, which vouches for them",
            ),
            (self.mode == "oidc" and bool(missing), f"auth.mode is oidc, which needs {' and '.join(missing)}"),
        )
        return self


class PeerSettings(_Section):
    """One of ``exchange.peers``: where it answers, its region, and what it is asked with.

    A peer is trusted by tenant: a holder of one of its signing keys can cancel and end the jobs of ``tenants``, as any
    writer of these tenants here can.
    """

    url: FetchedUrl
    region: JobIdPart
    token_file: Path | None = None
    ca: Path | None = None
    tenants: Annotated[list[TenantsPattern], Field(min_length=1, max_length=PATTERNS_MAX)] = ["*"]


class ExchangeSettings(_Section):
    """``exchange.*``."""

    peers: Annotated[list[PeerSettings], Field(max_length=16)] = []
    interval: Annotated[Duration, between("100ms", "1d")] = timedelta(seconds=1)
    range_entries: Annotated[int, Field(ge=1, le=1_000_000)] = 20_000
    is_global: bool = False
    foreign_jobs: Literal["accept", "redirect"] = "accept"

    @model_validator(mode="after")
    def _tells_regions_apart(self) -> ExchangeSettings:
        if len({peer.region for peer in self.peers}) < len(self.peers):
            raise ValueError("peers has a region twice: each peer is the ledger of its region")
        return self


class WebhookSettings(_Section):
    """``webhooks.*``."""

    networks: Annotated[CommaSeparated[Network], Field(max_length=32)] = []
    ca: Path | None = None
