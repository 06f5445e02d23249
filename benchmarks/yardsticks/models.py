"""Request and answer of ``POST /v1/jobs`` as Pydantic models, the way FastAPI's tutorial writes them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

Level = Literal["NONE", "LOCAL", "REGIONAL", "GLOBAL"]
Name = Annotated[str, Field(min_length=1, max_length=256)]


class JobRequest(BaseModel):
    """A job to be created."""

    model_config = ConfigDict(extra="forbid", strict=True)
    tenant_id: Annotated[str, Field(pattern=r"^[a-z0-9]([a-z0-9_-]{0,61}[a-z0-9])?$")]
    job_id: Annotated[str, Field(pattern=r"^[A-Za-z0-9._:-]{1,128}$")] | None = None
    spec: dict[str, Any] | None = None
    assigned_dcs: Annotated[list[Name], Field(max_length=1024)] | None = None
    fence_token: Annotated[int, Field(ge=0, le=2**53 - 1)] | None = None
    durability: Level = "GLOBAL"


class Durability(BaseModel):
    """What was asked for, and what was reached."""

    requested: Level
    achieved: Level
    survives: list[Literal["process", "node", "region"]]


class ChainPlace(BaseModel):
    """Where the event stands in its chain."""

    seq: int
    chain_link: str
    prev_chain_link: str | None


class JobAnswer(BaseModel):
    """The event that was taken."""

    job_id: str
    tenant_id: str
    type: str
    action: str
    hlc: str
    at: str
    epoch: int
    lsn: int
    fence_token: int
    durability: Durability
    chain: ChainPlace | None
    session: str
