"""``webhooks.*``: where this ledger may deliver entries to."""

from __future__ import annotations

from typing import Annotated

from pydantic import BaseModel, ConfigDict, Field

from app.runtime.settings.types import CommaSeparated, Network

NETWORKS_MAX = 32


class WebhookSettings(BaseModel):
    """``webhooks.*``."""

    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True)

    networks: Annotated[CommaSeparated[Network], Field(max_length=NETWORKS_MAX)] = []
