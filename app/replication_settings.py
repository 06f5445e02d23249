"""``replication.*``: who keeps this node's write-ahead log besides it, and how they are spoken to."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, model_validator
from pydantic_settings import NoDecode

from app.setting_types import Duration, JobIdPart, ListenAddress, between
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
    """Addresses separated by commas, or a list of addresses and tables."""
    if isinstance(value, str):
        value = [part.strip() for part in value.split(",") if part.strip()]
    if isinstance(value, list):
        return [{"address": each} if isinstance(each, str) else each for each in value]
    return value


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
