"""``replication.*`` and ``lease.*``: who keeps this node's write-ahead log besides it, and who may write it."""

from __future__ import annotations

import json
from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_settings import NoDecode

from app.runtime.settings.types import CommaSeparated, Duration, FetchedUrl, JobIdPart, ListenAddress, between
from wal.replication.configuration import MEMBERS_MAX

_LOOPBACK = ("127.0.0.1:", "localhost:", "[::1]:")


class MemberSettings(BaseModel):
    """One of ``replication.members``: where a safekeeper listens, and its region where that is not the node's."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    address: ListenAddress
    region: JobIdPart | None = None

    @property
    def is_on_loopback(self) -> bool:
        """Whether it runs on this machine."""
        return self.address.startswith(_LOOPBACK)


def _members(value: object) -> object:
    """Addresses separated by commas, or a list of addresses and tables; in the environment one with tables is JSON."""
    if isinstance(value, str) and value.lstrip().startswith("[{"):
        value = json.loads(value)
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, list):
        return [{"address": each} if isinstance(each, str) else each for each in value]
    return value


class LeaseSettings(BaseModel):
    """``lease.*``: where it is kept who may write this node's log, while safekeepers keep it."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

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


class ReplicationSettings(BaseModel):
    """``replication.*``."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

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
        if any(files) and not all(files):
            raise ValueError("tls_cert, tls_key and tls_ca belong together: set all three")
        others = [each.address for each in self.members if not each.is_on_loopback]
        if others and not all(files):
            raise ValueError(
                f"members has {others[0]}, which is not on this machine: set tls_cert, tls_key and tls_ca, so that "
                "nobody else can write this node's log there"
            )
        if len({each.address for each in self.members}) < len(self.members):
            raise ValueError("members has an address twice")
        return self
