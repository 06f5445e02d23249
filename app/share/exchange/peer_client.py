"""Requests to a peer over HTTP, and the required forms of its answers.

An answer of another form is reported like no answer: the peer's operator must find out what answers at its address.
The token and the certificate authorities are read from their files again, as they may appear or be replaced.

    tenants of a list <= TENANTS_MAX        each once, in the order of their names
"""

from __future__ import annotations

import asyncio
import shlex
import ssl
from collections.abc import AsyncGenerator, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar
from urllib.parse import urlencode

import httpx
from pydantic import Base64Bytes, BaseModel, Field, ValidationError

from app.runtime.outgoing import NoAnswerError, client_of, read_answer, stream_answer
from app.runtime.settings.sections import PeerSettings
from app.runtime.settings.words import words_of
from app.share.exchange.news import HAVE_MAX, Position
from ledger import names
from ledger.errors import InvalidInputError, LedgerError, reported_as
from ledger.facts.events import SYSTEM_TENANT
from ledger.text import printable, token_in
from signing import files
from signing.checkpoint import SIZE_MAX
from signing.keys import KEYS_MAX, PublicKey
from signing.manifest import CONSISTENCY_HASHES_MAX

TIMEOUT_S = 30.0
"""Longest time for one step of a request."""
ANSWER_BYTES_MAX = 1 << 20
"""A page of news has at most 200 tenants and 128 KiB of bundles (``exchange.news``). Others
have less. It is parsed in one turn of the event loop."""
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
PEM_CHARACTERS_MAX = 2000
NEWS_WAIT_S_MAX = 20.0
"""Longest time that a peer lets a request for news wait."""
ARCHIVE_CHARACTERS_MAX = 300
"""Characters of an archive's address that are repeated."""
TENANTS_MAX = PAGES_MAX * PAGE
"""A peer with more tenants, or with an endless list, is not imported from."""

TenantId = Annotated[str, Field(pattern=names.anchored(names.READABLE_TENANT_ID))]
KeyId = Annotated[str, Field(pattern=names.anchored("[0-9a-f]{16}"))]


_Seq = Annotated[int, Field(ge=0, le=SIZE_MAX)]
_Hash = Annotated[str, Field(pattern=names.anchored("[0-9a-f]{64}"))]


class Offered(BaseModel):
    """What is lacking up to the checkpoint for a ledger that has imported up to ``imported_seq`` and has seen a tree of
    ``size``: nothing here is verified."""

    imported_seq: _Seq
    size: _Seq
    consistency: Annotated[list[_Hash], Field(max_length=CONSISTENCY_HASHES_MAX)]
    from_seq: _Seq
    bundle: Base64Bytes


class TenantNews(BaseModel):
    """The newest checkpoint of a tenant, and how much of the asking ledger's chain of that tenant is imported."""

    tenant_id: TenantId
    checkpoint: Annotated[str, Field(max_length=NOTE_CHARACTERS_MAX)] | None
    held: _Seq
    offer: Offered | None = None


class _News(BaseModel):
    items: Annotated[list[TenantNews], Field(max_length=PAGE)]
    cursor: Annotated[str, Field(max_length=CURSOR_CHARACTERS_MAX)]
    is_list: bool
    has_more: bool
    untrusted: Annotated[list[KeyId], Field(max_length=KEYS_MAX)] = []


class _Key(BaseModel):
    key_id: KeyId
    algorithm: str
    public_key_pem: Annotated[str, Field(max_length=PEM_CHARACTERS_MAX)]
    signs_snapshots: bool
    signs_checkpoints: bool
    revoked_from_hlc: str | None = None

    def key(self) -> PublicKey:
        return PublicKey.from_json(self.model_dump(include={"key_id", "algorithm", "public_key_pem"}))


class _Keys(BaseModel):
    keys: Annotated[list[_Key], Field(max_length=KEYS_MAX)]


class _Range(BaseModel):
    from_seq: Annotated[int, Field(ge=1, le=SIZE_MAX)]
    to_seq: Annotated[int, Field(ge=1, le=SIZE_MAX)]


class _Lacking(BaseModel):
    items: Annotated[list[_Range], Field(max_length=PAGE)]
    consistency: list[_Hash] = []


class _Held(BaseModel):
    tenant_id: TenantId
    seq: _Seq


class _HeldPage(BaseModel):
    items: Annotated[list[_Held], Field(max_length=PAGE)]


class _Proof(BaseModel):
    hashes: list[_Hash]


_Answer = TypeVar("_Answer", bound=BaseModel)


@dataclass
class PeerAddress:
    """Where a peer answers, and what it is asked with."""

    settings: PeerSettings
    _context: ssl.SSLContext | None = field(default=None, init=False)

    async def open(self) -> httpx.AsyncClient:
        """A client with the token that is there now.

        Raises:
            ConfigurationError, OSError: a file cannot be read, or holds no token or certificates.
        """
        if self._context is None:
            # It reads the certificate authorities, which takes longer than a turn of the event loop may.
            self._context = await asyncio.to_thread(_context_of, self.settings.ca)
        http = client_of(self._context, timeout_s=TIMEOUT_S, base_url=self.settings.url)
        await self.authorize(http)
        return http

    async def authorize(self, http: httpx.AsyncClient) -> None:
        """Send the token that is in its file now."""
        if (file := self.settings.token_file) is None:
            return
        if token := await asyncio.to_thread(_token_in, file):
            http.headers["Authorization"] = f"Bearer {token}"
        else:
            http.headers.pop("Authorization", None)

    def read_again(self) -> None:
        """Read the certificate authorities again for the next client."""
        self._context = None


class Asker(NamedTuple):
    """The ledger that asks a peer: its log origin and its region."""

    origin: str
    region: str


class Lacking(NamedTuple):
    """Which entries between two seqs of a chain are lacking."""

    from_seq: int
    to_seq: int
    ranges: Sequence[tuple[int, int]]
    consistency: Sequence[bytes]
    """The proof between two sizes of the chain's tree, if it was asked for."""
    bundle: bytes = b""
    """The bundle of the one range; empty if it is to be fetched."""


class Progress(NamedTuple):
    """How far this ledger is in chains of a peer."""

    positions: Mapping[str, Position] = {}
    """By tenant."""
    have: Mapping[str, int] = {}
    """By the origin of a log, up to which seq its entries are here."""


class PeerPrunedError(LedgerError):
    """Entries that this ledger lacks have left a peer with a prune."""


class PeerClient(NamedTuple):
    """One peer, asked by ``http``. Each method raises NoAnswerError for no answer, or one of another form."""

    url: str
    http: httpx.AsyncClient

    async def signing_keys(self) -> list[PublicKey]:
        """The keys that its nodes sign with now."""
        path = "/v1/keys"
        # Of any tenant, the keys are those of the ledger.
        published = await self._get(_Keys, path, tenant_id=SYSTEM_TENANT)
        with reported_as(NoAnswerError, f"the answer of {self.url}{path} has a malformed key", InvalidInputError):
            return [
                each.key()
                for each in published.keys
                if (each.signs_snapshots or each.signs_checkpoints) and each.revoked_from_hlc is None
            ]

    async def listed(self, asker: Asker, cursor: str, after: str) -> _News:
        """The page of the list of all tenants that goes on after the tenant ``after``."""
        path = "/v1/exchange/news"
        page = await self._get(_News, path, **asker._asdict(), cursor=cursor)
        tenant_ids = [after, *(item.tenant_id for item in page.items)]
        # The list might be endless.
        if (
            not page.is_list
            or (page.has_more and not page.items)
            or any(one >= next_one for one, next_one in pairwise(tenant_ids))
        ):
            raise NoAnswerError(f"the answer of {self.url}{path} does not go on in the order of tenants")
        return page

    async def news(self, asker: Asker, cursor: str, wait_s: float, progress: Progress) -> _News:
        """What is new after ``cursor``: at once if there is something, else within ``wait_s``. For the tenants of
        ``progress`` perhaps with what is lacking."""
        at = [f"{each.imported_seq} {each.size} {tenant_id}" for tenant_id, each in progress.positions.items()]
        asked = {**asker._asdict(), "cursor": cursor, "wait_s": wait_s, "at": at, "have": _had(progress.have)}
        return await self._get(_News, "/v1/exchange/news", **asked)

    async def lacking(
        self, tenant_id: str, from_seq: int, to_seq: int, have: Mapping[str, int], sizes: tuple[int, int] | None
    ) -> Lacking:
        """The ranges of a tenant's chain between these seqs that have an entry which a ledger lacks. It has the entries
        that come from the logs in ``have``, by their origins, up to a seq there. With ``sizes`` also the consistency
        proof from the tree of the first to that of the second, not verified.

        Raises:
            PeerPrunedError: an entry between these seqs has left there.
        """
        path = "/v1/exchange/lacking"
        asked: dict[str, Any] = {"tenant_id": tenant_id, "from_seq": from_seq, "to_seq": to_seq, "have": _had(have)}
        if sizes is not None:
            asked |= {"first": sizes[0], "second": sizes[1]}
        try:
            answer = await self._get(_Lacking, path, **asked)
        except NoAnswerError as error:
            if error.status != httpx.codes.GONE:
                raise
            raise PeerPrunedError(
                f"entries from seq {from_seq} on of tenant {tenant_id} left {self.url} before they were imported, so "
                f"nothing of the tenant is imported from it until they are brought: "
                f"{way_on(tenant_id, from_seq, error.refusal.get('archive'))}. {error}"
            ) from error
        ranges = [(each.from_seq, each.to_seq) for each in answer.items]
        before = from_seq - 1
        for first, last in ranges:
            if not before < first <= last <= to_seq:
                raise NoAnswerError(f"the answer of {self.url}{path} has ranges that were not asked for")
            before = last
        return Lacking(from_seq, to_seq, ranges, [bytes.fromhex(each) for each in answer.consistency])

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
            json={"tenant_id": tenant_id, "from_seq": from_seq, "to_seq": to_seq, "without_signing": True},
        )

    async def _get(self, form: type[_Answer], path: str, **asked: Any) -> _Answer:
        body = await self._ask(path, asked)
        try:
            return form.model_validate_json(body)
        except ValidationError as error:
            where = ".".join(map(str, error.errors()[0]["loc"])) or "the whole"
            raise NoAnswerError(
                f"the answer of {self.url}{path} is not understood: {where}: {words_of(error.errors()[0])}"
            ) from error

    async def _ask(self, path: str, asked: Mapping[str, Any]) -> bytes:
        # A whole address is parsed once, by httpx; one that it puts together three times.
        url = f"{self.url.rstrip('/')}{path}?{urlencode(asked, doseq=True)}"
        return await read_answer(self.http, "GET", url, bytes_max=ANSWER_BYTES_MAX, within_s=ANSWER_S_MAX)


def way_on(tenant_id: str, from_seq: int, archive: object) -> str:
    """The commands that bring the entries from ``from_seq`` on, which left a peer for the archive that it names."""
    named = archive if isinstance(archive, str) and 0 < len(archive) <= ARCHIVE_CHARACTERS_MAX else "URL"
    file = f"{tenant_id}.bundle.tar"
    since = f" --from-seq {from_seq}" if from_seq > 1 else ""
    # Whatever a peer says is an argument of the command, and never more.
    source = shlex.quote(printable(named))
    return (
        f"tally bundle export --tenant {tenant_id} --from-archive {source}{since} --out {file}, with the settings of "
        f"that ledger, then tally bundle import {file} here"
    )


def _had(have: Mapping[str, int]) -> list[str]:
    return [f"{seq} {log}" for log, seq in have.items()][:HAVE_MAX]


def _context_of(ca: Path | None) -> ssl.SSLContext:
    """The TLS context of connections to the peer.

    Raises:
        OSError: the file of certificate authorities cannot be read, or is no regular file.
    """
    if ca is not None:
        files.open_regular(ca).close()
    return ssl.create_default_context(cafile=ca)


def _token_in(file: Path) -> str:
    """The token to send to the peer; an empty one is not sent.

    Raises:
        ConfigurationError: the file holds no valid token.
        OSError: it cannot be read, or is no regular file.
    """
    return token_in(files.read_regular(file), str(file))
