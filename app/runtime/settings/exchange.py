"""``exchange.*``: other ledgers that this one imports from by itself."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path
from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field, model_validator

from app.runtime.settings.types import PATTERNS_MAX, Duration, FetchedUrl, JobIdPart, TenantsPattern, between

PEERS_MAX = 16


class PeerSettings(BaseModel):
    """One of ``exchange.peers``: where it answers, its region, and what it is asked with."""

    model_config = ConfigDict(extra="forbid", frozen=True)

    url: FetchedUrl
    region: JobIdPart
    token_file: Path | None = None
    ca: Path | None = None
    tenants: Annotated[list[TenantsPattern], Field(min_length=1, max_length=PATTERNS_MAX)] = ["*"]


class ExchangeSettings(BaseModel):
    """``exchange.*``."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    peers: Annotated[list[PeerSettings], Field(max_length=PEERS_MAX)] = []
    interval: Annotated[Duration, between("100ms", "1d")] = timedelta(seconds=1)
    range_entries: Annotated[int, Field(ge=1, le=1_000_000)] = 20_000
    is_global: bool = False

    @model_validator(mode="after")
    def _tells_regions_apart(self) -> ExchangeSettings:
        if len({peer.region for peer in self.peers}) < len(self.peers):
            raise ValueError("peers has a region twice: each peer is the ledger of its region")
        return self
