"""Requests to a peer over HTTP, and the required forms of its answers.

An answer of another form is reported like no answer: the peer's operator must find out what answers at its address.

    tenants of a list <= TENANTS_MAX        each once, in the order of their names
"""

from __future__ import annotations

from collections.abc import AsyncGenerator, Sequence
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
TENANTS_MAX = PAGES_MAX * PAGE
"""A peer with more tenants, or with an endless list, is not imported from."""

TenantId = Annotated[str, Field(pattern=names.anchored(names.READABLE_TENANT_ID))]


class _Tenant(BaseModel):
    tenant_id: TenantId


class _Tenants(BaseModel):
    items: Annotated[list[_Tenant], Field(max_length=PAGE)]
    next_cursor: str | None


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

    async def tenants(self) -> list[str]:
        """All tenants that it shows to the caller."""
        found: list[str] = []
        cursor = None
        for _ in range(PAGES_MAX):
            page = await self._get(_Tenants, "/v1/tenants", limit=PAGE, **({"cursor": cursor} if cursor else {}))
            named = [item.tenant_id for item in page.items]
            self._check_order("/v1/tenants", found[-1:] + named)
            found += named
            if (cursor := page.next_cursor) is None:
                return found
        raise self._endless("/v1/tenants")

    async def checkpoint(self, tenant_id: str) -> bytes:
        """The note of the newest checkpoint of a tenant, not verified."""
        return await self._ask(f"/v1/log/{tenant_id}/checkpoint")

    async def consistency(self, tenant_id: str, first: int, second: int) -> list[bytes]:
        """The consistency proof from the tree of ``first`` leaves to that of ``second``, not verified."""
        asked = {"tenant_id": tenant_id, "first": first, "second": second}
        return [
            bytes.fromhex(each) for each in (await self._get(_Proof, "/v1/chain/proof/consistency", **asked)).hashes
        ]

    async def held(self, origin: str) -> dict[str, int]:
        """By tenant, the seq up to which it has imported the ledger ``origin``."""
        found: dict[str, int] = {}
        after = ""
        for _ in range(PAGES_MAX):
            page = await self._get(_HeldPage, "/v1/exchange/held", origin=origin, after=after, limit=PAGE)
            self._check_order("/v1/exchange/held", [after, *(item.tenant_id for item in page.items)])
            found.update((item.tenant_id, item.seq) for item in page.items)
            if len(page.items) < PAGE:
                return found
            after = page.items[-1].tenant_id
        raise self._endless("/v1/exchange/held")

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

    def _check_order(self, path: str, tenant_ids: Sequence[str]) -> None:
        """Reject a page that does not continue after the previous one: the list might be endless."""
        if any(one >= next_one for one, next_one in pairwise(tenant_ids)):
            raise NoAnswerError(f"the answer of {self.url}{path} does not go on in the order of tenants")

    def _endless(self, path: str) -> NoAnswerError:
        return NoAnswerError(f"the answer of {self.url}{path} has more than {PAGES_MAX} pages of {PAGE}")

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
