"""Shapes of answers, for OpenAPI; routers build the same shapes as plain values, which is faster.

What is answered as it was read has no shape of its own: ``answer_like`` makes it of the row. That answers agree with
their shapes is proved by running every operation against its description.
"""

from __future__ import annotations

from typing import Any, Literal, get_type_hints

import orjson
from pydantic import BaseModel, ConfigDict, create_model
from starlette.responses import Response

from app.http.fields import HexHash, HlcText, JobId
from ledger.machines.jobs import STATUSES

_JSON_OPTIONS = orjson.OPT_UTC_Z

JobStatus = Literal[
    "SUBMITTED", "ACCEPTED", "RUNNING", "CANCELLING", "CANCELLED", "COMPLETED", "FAILED", "TIMED_OUT", "REFUSED"
]
assert set(JobStatus.__args__) == set(STATUSES)  # type: ignore[attr-defined]
Level = Literal["NONE", "LOCAL", "REGIONAL", "GLOBAL"]


def json_bytes(value: object) -> bytes:
    """``value`` as the JSON of an answer: a hash as hex, a row as an object."""
    return orjson.dumps(value, _plain, _JSON_OPTIONS)


def _plain(value: Any) -> object:
    if isinstance(value, bytes):
        return value.hex()
    if isinstance(value, tuple) and hasattr(value, "_asdict"):
        return value._asdict()
    raise TypeError


def json_answer(value: object, status: int = 200, headers: dict[str, str] | None = None) -> Response:
    """``value`` as a JSON answer."""
    return Response(json_bytes(value), status, headers, media_type="application/json")


class Answer(BaseModel):
    """An answer has its members and no others."""

    model_config = ConfigDict(extra="forbid")


def answer_like(name: str, says: str, row: type, **members: Any) -> type[Answer]:
    """The shape of an answer that has the fields of ``row``, a named tuple, and of those that ``members`` has these."""
    shown: dict[Any, Any] = {bytes: HexHash, list[bytes]: list[HexHash]}
    kinds = {field: shown.get(kind, kind) for field, kind in get_type_hints(row).items()} | members
    fields: dict[str, Any] = {field: (kind, ...) for field, kind in kinds.items()}
    return create_model(name, __base__=Answer, __doc__=says, **fields)


def list_of(name: str, says: str, item: Any) -> type[Answer]:
    """The shape of a page of a list."""
    return create_model(name, __base__=Answer, __doc__=says, items=(list[item], ...), next_cursor=(str | None, ...))


class Problem(BaseModel):
    """RFC 9457. ``type`` ends in the problem's name; some problems have further members."""

    model_config = ConfigDict(extra="allow")
    type: str
    title: str
    status: int
    detail: str
    path: str = ""


class DurabilityAnswer(Answer):
    """What was asked for, what has been reached, and what that outlives."""

    requested: Level
    achieved: Level
    survives: list[Literal["process", "node", "region"]]


class ChainPlace(Answer):
    """Where an event stands in its tenant's chain."""

    seq: int
    chain_link: HexHash
    prev_chain_link: HexHash | None


TimeOfHlc = str | None
"""The time that the HLC beside it says (RFC 3339, UTC); null where that has no such form."""


class EventAnswer(Answer):
    """An event that was taken. ``chain`` is null when the answer came before chaining."""

    job_id: JobId
    tenant_id: str
    type: str
    action: str
    hlc: HlcText
    at: TimeOfHlc
    epoch: int
    lsn: int
    fence_token: int
    durability: DurabilityAnswer
    chain: ChainPlace | None
    session: str


class BatchAnswer(Answer):
    """All events of one request were taken."""

    accepted: int
    durability: DurabilityAnswer
    first_hlc: HlcText
    first_at: TimeOfHlc
    last_hlc: HlcText
    last_at: TimeOfHlc
    job_ids: list[JobId]
    session: str


class ConsistencyAnswer(Answer):
    """Which promise the read kept, from where, and how far behind."""

    level: Literal["EVENTUAL", "SESSION", "BOUNDED_STALENESS", "STRONG"]
    source: str
    staleness_ms: int


class ListConsistencyAnswer(ConsistencyAnswer):
    """As ``ConsistencyAnswer``, and up to which entry of the tenant's chain the list knows, which ends at
    ``head_seq``."""

    as_of_seq: int
    head_seq: int


class LostTo(Answer):
    """The event that was chained first under the same Idempotency-Key."""

    job_id: JobId
    hlc: HlcText


class RefusedEvent(Answer):
    """An event of the job that is in the chain as REFUSED: it was acknowledged at LOCAL and lost against another of its
    Idempotency-Key (``lost_to``), or PostgreSQL would not hold it (``reason`` is ``sqlstate-`` and the code, ``seq`` is
    that of the entry that keeps its bytes)."""

    type: str
    hlc: HlcText
    reason: str
    seq: int | None
    lost_to: LostTo | None


class ListedJobAnswer(Answer):
    """One job: what all events about it say together."""

    tenant_id: str
    job_id: str
    status: JobStatus
    spec: Any
    assigned_dcs: list[str]
    fence_token: int
    completed: int
    failed: int
    created_hlc: HlcText | None
    created_at: TimeOfHlc
    last_hlc: HlcText
    last_at: TimeOfHlc
    last_seq: int
    result: dict[str, Any] | None
    error: Any
    refused: RefusedEvent | None


class OtherCreation(Answer):
    """A later JobCreated of the same job, at ``seq``, that says something else than the first, which counts."""

    seq: int
    hlc: HlcText
    at: TimeOfHlc
    spec: Any
    assigned_dcs: Any


class JobAnswer(ListedJobAnswer):
    """One job and how fresh this view of it is. ``other_creations`` are at most 16, those of lowest HLC."""

    other_creations: list[OtherCreation]
    consistency: ConsistencyAnswer


class JobList(Answer):
    """Jobs, newest first."""

    items: list[ListedJobAnswer]
    next_cursor: str | None
    consistency: ListConsistencyAnswer


class JobEventAnswer(Answer):
    """One event of a job, as chained."""

    seq: int
    hlc: HlcText
    at: TimeOfHlc
    type: str | None
    action: str
    payload: Any
    payload_digest: HexHash
    chain_link: HexHash


class JobEventList(Answer):
    """Events of one job in HLC order."""

    items: list[JobEventAnswer]
    next_cursor: str | None
    consistency: ConsistencyAnswer
