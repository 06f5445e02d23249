"""``auth.*``: who may call, and what the certificates and the claims that callers show allow them."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

from app.runtime.principals import Grant
from app.runtime.rights import Right
from app.runtime.settings.types import PATTERNS_MAX, CommaSeparated, Duration, FetchedUrl, TenantsPattern, between

CERTIFICATES_MAX = 1000
AUDIENCES_MAX = 16
GRANTS_MAX = 256

Algorithm = Literal["RS256", "RS384", "RS512", "PS256", "PS384", "PS512", "ES256", "ES384", "ES512", "EdDSA", "Ed25519"]
"""Signatures whose keys may be published; none of those made with a shared secret, and never ``none``."""
ClaimPath = Annotated[str, Field(min_length=1, max_length=200)]
"""A claim by its name, or by the names that lead to it, such as ``realm_access.roles``."""


class _Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)


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
    audience: Annotated[
        CommaSeparated[Annotated[str, Field(min_length=1, max_length=1000)]], Field(max_length=AUDIENCES_MAX)
    ] = []
    jwks_uri: FetchedUrl | None = None
    algorithms: Annotated[CommaSeparated[Algorithm], Field(min_length=1)] = ["RS256", "ES256", "EdDSA"]
    leeway: Annotated[Duration, between("0s", "5m")] = timedelta(seconds=30)
    refresh_interval: Annotated[Duration, between("1s", "10m")] = timedelta(minutes=1)
    principal_claim: ClaimPath = "sub"
    client_id: Annotated[str | None, Field(min_length=1, max_length=1000)] = None
    client_secret_file: Path | None = None
    scope: Annotated[str, Field(pattern=r"^[!-~]+( [!-~]+)*$", max_length=1000)] = "openid"
    grants: Annotated[list[ClaimGrant], Field(max_length=GRANTS_MAX)] = []

    @property
    def missing(self) -> list[str]:
        """What must be set before tokens can count."""
        return [name for name in ("issuer", "audience") if not getattr(self, name)]


class AuthSettings(_Section):
    """``auth.*``: who may call. Without authentication only loopback is served, but for ``allow_open``.

    ``client_ca`` is a PEM file: certificates that it vouches for say who calls, as ``certificates`` say: tables of
    ``name``, ``rights`` and ``tenants``; in the environment JSON.
    """

    mode: Literal["none", "tokens", "oidc"] = "none"
    allow_open: bool = False
    client_ca: Path | None = None
    certificates: Annotated[list[CertificateGrant], Field(max_length=CERTIFICATES_MAX)] = []
    oidc: OidcSettings = OidcSettings()
    session_life: Annotated[Duration, between("1m", "7d")] = timedelta(hours=12)

    @model_validator(mode="after")
    def _certificates_count(self) -> AuthSettings:
        if self.mode == "none" and (self.client_ca is not None or self.certificates):
            raise ValueError("client_ca and certificates need another mode than none, which asks nobody who he is")
        if self.mode != "oidc" and self.oidc.issuer is not None:
            raise ValueError(f"oidc.issuer is set and mode is {self.mode}, which asks no issuer: set auth.mode to oidc")
        if self.certificates and self.client_ca is None:
            raise ValueError("certificates need client_ca, which vouches for them")
        return self

    @model_validator(mode="after")
    def _has_an_issuer(self) -> AuthSettings:
        if self.mode == "oidc" and self.oidc.missing:
            missing = " and ".join(f"auth.oidc.{name}" for name in self.oidc.missing)
            raise ValueError(f"auth.mode is oidc, which needs {missing}")
        return self
