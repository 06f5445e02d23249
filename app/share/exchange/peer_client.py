"""Requests to a peer over HTTP, and the required forms of its answers.

An answer of another form is reported like no answer: the peer's operator must find out what answers at its address.

    tenants of a list <= TENANTS_MAX        each once, in the order of their names
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Mapping
from itertools import pairwise
from typing import Annotated, Any, NamedTuple, TypeVar

import httpx
from pydantic import BaseModel, Field, ValidationError

from app.runtime.outgoing import NoAnswerError, read_answer, stream_answer
from app.runtime.settings.words import words_of
from ledger import names
from signing.checkpoint import SIZE_MAX

ANSWER_BYTES_MAX = 4 << 20
ANSWER_S_MAX = 60.0
"""An answer that takes longer is an error: a peer that sends single bytes slowly must not prolong a round."""
BUNDLE_S_MAX = 900.0
"""The same for a range, which also has a minimum rate (``app.runtime.outgoing``)."""
BUNDLE_BYTES_MAX = 1 << 40
"""The same in bytes; ``bundle.import_bytes_max`` and the disk bound the file that it is written to."""
PAGE = 1000
PAGES_MAX = 100
NOTE_CHARACTERS_MAX = 4000
CURSOR_CHARACTERS_MAX = 400
NEWS_WAIT_S_MAX = 20.0
"""Longest time that a peer lets a request for news wait."""
HAVE_MAX = 32
"""Most logs of which a peer is told that their entries are here; the entries of more come again, for nothing."""
TENANTS_MAX = PAGES_MAX * PAGE
"""A peer with more tenants, or with an endless list, is not imported from."""

TenantId = Annotated[str, Field(pattern=names.anchored(names.READABLE_TENANT_ID))]


class TenantNews(BaseModel):
    """The newest checkpoint of a tenant, and how much of the asking ledger's chain of that tenant is imported."""

    tenant_id: TenantId
    checkpoint: Annotated[str, Field(max_length=NOTE_CHARACTERS_MAX)] | None
    held: Annotated[int, Field(ge=0, le=SIZE_MAX)]


class _News(BaseModel):
    items: Annotated[list[TenantNews], Field(max_length=PAGE)]
    cursor: Annotated[str, Field(max_length=CURSOR_CHARACTERS_MAX)]
    is_list: bool
    has_more: bool


class _Range(BaseModel):
    from_seq: Annotated[int, Field(ge=1, le=SIZE_MAX)]
    to_seq: Annotated[int, Field(ge=1, le=SIZE_MAX)]


class _Ranges(BaseModel):
    items: Annotated[list[_Range], Field(max_length=PAGE)]


class _Held(BaseModel):
    tenant_id: TenantId
    seq: Annotated[int, Field(ge=0, le=SIZE_MAX)]


class _HeldPage(BaseModel):
    items: Annotated[list[_Held], Field(max_length=PAGE)]


class _Proof(BaseModel):
    hashes: list[Annotated[str, Field(pattern=names.anchored("[0-9a-f]{64}"))]]


_Answer = TypeVar("_Answer", bound=BaseModel)


class PeerClient(NamedTuple):
    """One peer, asked by ``http``. Each method raises NoAnswerError for no answer, or one of another form."""

    url: str
    http: httpx.AsyncClient

    async def listed(self, origin: str, cursor: str, after: str) -> _News:
        """The page of the list of all tenants that goes on after the tenant ``after``, for the ledger ``origin``."""
        path = "/v1/exchange/news"
        page = await self._get(_News, path, origin=origin, cursor=cursor)
        tenant_ids = [after, *(item.tenant_id for item in page.items)]
        # The list might be endless.
        if (
            not page.is_list
            or (page.has_more and not page.items)
            or any(one >= next_one for one, next_one in pairwise(tenant_ids))
        ):
            raise NoAnswerError(f"the answer of {self.url}{path} does not go on in the order of tenants")
        return page

    async def news(self, origin: str, cursor: str, wait_s: float) -> _News:
        """What is new after ``cursor`` for the ledger ``origin``: at once if there is something, else within
        ``wait_s``."""
        return await self._get(_News, "/v1/exchange/news", origin=origin, cursor=cursor, wait_s=wait_s)

    async def lacking(
        self, tenant_id: str, from_seq: int, to_seq: int, have: Mapping[str, int]
    ) -> list[tuple[int, int]]:
        """The ranges of a tenant's chain between these seqs that have an entry which a ledger lacks. It has the entries
        that come from the logs in ``have``, by their origins, up to a seq there."""
        path = "/v1/exchange/lacking"
        known = [f"{seq} {log}" for log, seq in have.items()][:HAVE_MAX]
        asked = {"tenant_id": tenant_id, "from_seq": from_seq, "to_seq": to_seq, "have": known}
        ranges = [(each.from_seq, each.to_seq) for each in (await self._get(_Ranges, path, **asked)).items]
        before = from_seq - 1
        for first, last in ranges:
            if not before < first <= last <= to_seq:
                raise NoAnswerError(f"the answer of {self.url}{path} has ranges that were not asked for")
            before = last
        return ranges

    async def consistency(self, tenant_id: str, first: int, second: int) -> list[bytes]:
        """The consistency proof from the tree of ``first`` leaves to that of ``second``, not verified."""
        asked = {"tenant_id": tenant_id, "first": first, "second": second}
        return [
            bytes.fromhex(each) for each in (await self._get(_Proof, "/v1/chain/proof/consistency", **asked)).hashes
        ]

    async def held(self, origin: str, tenant_id: str) -> int:
        """Up to which seq it has imported the tenant's chain of the ledger ``origin``."""
        page = await self._get(_HeldPage, "/v1/exchange/held", origin=origin, tenant_id=tenant_id)
        return next((item.seq for item in page.items if item.tenant_id == tenant_id), 0)

    def bundle(self, tenant_id: str, from_seq: int, to_seq: int) -> AsyncGenerator[bytes, None]:
        """A range as a bundle, in pieces."""
        return stream_answer(
            self.http,
            "POST",
            "/v1/bundles/export",
            bytes_max=BUNDLE_BYTES_MAX,
            within_s=ANSWER_S_MAX,
            all_within_s=BUNDLE_S_MAX,
            json={"tenant_id": tenant_id, "from_seq": from_seq, "to_seq": to_seq},
        )

    async def _get(self, form: type[_Answer], path: str, **asked: Any) -> _Answer:
        body = await self._ask(path, params=asked)
        try:
            return form.model_validate_json(body)
        except ValidationError as error:
            where = ".".join(map(str, error.errors()[0]["loc"])) or "the whole"
            raise NoAnswerError(
                f"the answer of {self.url}{path} is not understood: {where}: {words_of(error.errors()[0])}"
            ) from error

    async def _ask(self, path: str, **asked: Any) -> bytes:
        return await read_answer(self.http, "GET", path, bytes_max=ANSWER_BYTES_MAX, within_s=ANSWER_S_MAX, **asked)
