"""``Client`` and ``AsyncClient``: a ledger for blocking and for asynchronous programs."""

from __future__ import annotations

import io
import logging
import os
import ssl
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from http import HTTPStatus
from pathlib import Path
from typing import Any, Generic, Self, TypeVar
from urllib.parse import urlsplit
from urllib.request import getproxies

from tallystick_client.answers import (
    Accepted,
    BatchRecorded,
    Consistency,
    Entry,
    JobEvent,
    JobsSummary,
    JobState,
    ListedJob,
    Recorded,
)
from tallystick_client.core import JSON, NDJSON, Core, OnWait, bearer, json_of, new_key, no_ledger, value_of, watched
from tallystick_client.facts import EventName, Level, Status
from tallystick_client.jobs import AsyncJob, Job, JobId, Spec, job_path, new_job_id
from tallystick_client.outbox import Outbox, SpoolReport
from tallystick_client.signing import SPOOLED_WINDOW_MS, WINDOW_MS, EventSigner, Signer, signer_of
from tallystick_client.spool import Spool
from tallystick_client.transport import (
    AsyncTransport,
    Awaiting,
    Blocking,
    BlockingTransport,
    Reply,
    Transport,
    Values,
    listing,
    operation,
)

BATCH_LINES_MAX, BATCH_BYTES_MAX = 1000, 4 << 20
"""Bounds of one request; a longer batch is sent in several, each of which is recorded whole or not at all."""
DOWNLOAD_PAUSE_MAX_S = 600.0
"""Longest wait for the next piece of a download; a long chain may have to be signed before the first."""
TAR, HTML = "application/x-tar", "text/html"
JOBS, REPORTS = "/v1/jobs", "/v1/reports"
REPORT_PAUSE_S = 0.5

J = TypeVar("J", Job, AsyncJob)

log = logging.getLogger("tallystick_client")


class LedgerMethods(Generic[J]):
    """The operations of a ledger. Each write has an Idempotency-Key, given or generated, and is retried."""

    _job_type: type[J]
    _transport_type: Callable[[ssl.SSLContext], Transport]

    def __init__(
        self,
        nodes: str | Sequence[str] | None = None,
        *,
        token: str | None = None,
        spool: str | os.PathLike[str] | None = None,
        patience_s: float = 30.0,
        timeout_s: float = 15.0,
        ca: str | None = None,
        on_wait: OnWait | None = None,
        sign_with: Signer | str | os.PathLike[str] | None = None,
        keep_forbidden: bool = False,
    ) -> None:
        """A ledger at ``nodes``, which are followed.

        Defaults come from ``TALLY_URL`` (several with commas), ``TALLY_TOKEN``, ``TALLY_SPOOL`` and ``TALLY_CA``.
        ``patience_s`` is how long a request is retried, ``timeout_s`` the longest wait for one answer; keep it above
        the service's ``write.timeout``. With ``spool``, a folder, jobs are filed there first; with
        ``keep_forbidden`` those that the token may not record wait there too, instead of raising ``NotAllowedError``.
        ``on_wait`` is called with the reason and the seconds before each retry. Events are signed ``sign_with`` a key,
        by default that in the file ``TALLY_SIGN_KEY``: see docs/signing-events.md.

        Raises:
            ValueError: an address, a token or a key is none. OSError: a file cannot be read.
        """
        nodes = nodes or os.environ.get("TALLY_URL") or "http://127.0.0.1:8080"
        spool = spool or os.environ.get("TALLY_SPOOL") or None
        named = nodes.split(",") if isinstance(nodes, str) else nodes
        sign_with = sign_with or os.environ.get("TALLY_SIGN_KEY") or None
        window_ms = WINDOW_MS if spool is None else SPOOLED_WINDOW_MS
        place, given = ("token", token) if token else ("TALLY_TOKEN", os.environ.get("TALLY_TOKEN"))
        self._core = Core(
            named,
            bearer(given, place),
            patience_s,
            timeout_s,
            self._transport_type(_trusted(named, ca or os.environ.get("TALLY_CA") or None)),
            on_wait,
            None if sign_with is None else EventSigner(signer_of(sign_with), window_ms),
        )
        self._outbox = Outbox(self._core, None if spool is None else Spool(Path(spool)), keep_forbidden)

    @property
    def patience_s(self) -> float:
        """How long a request is retried; a change applies to new requests."""
        return self._core.patience_s

    @patience_s.setter
    def patience_s(self, seconds: float) -> None:
        self._core.patience_s = seconds

    @operation
    async def close(self) -> None:
        """Close the connections. Files in the spool stay there."""
        await self._core.transport.close()

    # --- writing ----------------------------------------------------------------------------------

    @operation
    async def create_job(
        self,
        tenant_id: str,
        spec: Mapping[str, Any],
        *,
        job_id: str | None = None,
        assigned_dcs: Sequence[str] = (),
        durability: Level | None = None,
        key: str | None = None,
    ) -> Recorded:
        """Record a new job. Not by way of the spool, as every method of the client but ``job``."""
        recorded: Recorded = await self._write(
            "/v1/jobs",
            {
                "tenant_id": tenant_id,
                "spec": spec,
                "assigned_dcs": list(assigned_dcs),
                "job_id": job_id,
                "durability": durability,
            },
            key,
        )
        return recorded

    @operation
    async def send_event(
        self,
        /,
        tenant_id: str,
        job_id: str,
        type: EventName,
        *,
        durability: Level | None = None,
        key: str | None = None,
        **fields: Any,
    ) -> Recorded:
        """Record an event of a job: JobAccepted, JobCompleted and the others of docs/events.md, with its fields."""
        recorded: Recorded = await self._write(
            job_path(job_id, "/events"), {"tenant_id": tenant_id, "type": type, "durability": durability, **fields}, key
        )
        return recorded

    @operation
    async def cancel_job(
        self, tenant_id: str, job_id: str, *, reason: str, requestor: str | None = None, key: str | None = None
    ) -> Recorded:
        """Ask for the cancellation of a job."""
        recorded: Recorded = await self._write(
            job_path(job_id, "/cancel"), {"tenant_id": tenant_id, "reason": reason, "requestor": requestor}, key
        )
        return recorded

    @operation
    async def send_batch(
        self, events: Iterable[Mapping[str, Any]], *, durability: Level | None = None, key: str | None = None
    ) -> BatchRecorded:
        """Record many events: each has ``tenant_id``, ``type``, but for new jobs ``job_id``, and its fields.

        ``BATCH_LINES_MAX`` of them are one request, taken whole or not at all. The same ``key`` and events sent again,
        after a failure in between as well, add only what is missing.
        """
        key = key or new_key()
        signing = self._core.signing
        fenced = events if signing is None else ({"fence_token": 1, **event} for event in events)
        accepted, job_ids = 0, list[str]()
        for number, content in enumerate(_requests(fenced)):
            sent: dict[str, Any] = {"content": content, "content_type": NDJSON, "key": f"{key}-{number}"}
            if signing is not None:
                sent["signature"] = signing.header(sent["content"], sent["key"])
            answer = value_of(await self._core.ask("POST", "/v1/events", params={"durability": durability}, **sent))
            accepted += answer["accepted"]
            job_ids += answer["job_ids"]
        return BatchRecorded(accepted, job_ids)

    @operation
    async def propose(
        self,
        tenant_id: str,
        commitment: Mapping[str, Any],
        precondition: Mapping[str, Any] | None = None,
        *,
        key: str | None = None,
    ) -> Accepted:
        """Propose a commitment (docs/commitments.md).

        Raises:
            ConflictError: it was rejected, and that is on record.
        """
        accepted: Accepted = await self._write(
            "/v1/commitments", {"tenant_id": tenant_id, "commitment": commitment, "precondition": precondition}, key
        )
        return accepted

    def job(
        self,
        tenant_id: str,
        spec: Spec = None,
        *,
        job_id: JobId = None,
        dc_id: str | None = None,
        durability: Level | None = None,
        subject: str | None = None,
    ) -> J:
        """A job, for ``with`` or as a decorator: created and accepted, then completed, or failed with the exception.

        A ``job_id`` of one's own makes beginning it again harmless: see ``JobMethods``. ``dc_id`` is where it runs, by
        default this host, ``subject`` whose its private fields are. A decorator may have functions of the call's
        arguments as ``spec`` and ``job_id``.
        """
        common = {"tenant_id": tenant_id, "durability": durability, "subject": subject}
        return self._job_type(
            (self._core, self._outbox),
            {name: value for name, value in common.items() if value is not None},
            spec,
            job_id,
            dc_id,
        )

    @operation
    async def flush(self) -> int:
        """Send what waits in the spool, until nothing was taken for as long as the client has patience; how many files
        are left."""
        return (await self._outbox.flush()).waiting

    @operation
    async def flush_spool(self) -> SpoolReport:
        """``flush``, and what it did. What others sent meanwhile is not in it."""
        return await self._outbox.flush()

    # --- reading ----------------------------------------------------------------------------------

    @operation
    async def get_job(
        self,
        tenant_id: str,
        job_id: str,
        *,
        consistency: Consistency | None = None,
        max_staleness_ms: int | None = None,
        as_of: str | None = None,
    ) -> JobState:
        """A job, now or as of an HLC or an RFC 3339 time; by default this client's own writes are seen."""
        params = {
            "tenant_id": tenant_id,
            "consistency": consistency,
            "max_staleness_ms": max_staleness_ms,
            "as_of": as_of,
        }
        state: JobState = value_of(await self._core.ask("GET", job_path(job_id), params=params))
        return state

    @listing
    def list_jobs(self, /, tenant_id: str, *, status: Status | None = None, **filters: Any) -> Values[ListedJob]:
        """Jobs, newest first; ``filters`` are the other parameters of ``GET /v1/jobs``."""
        return self._listed("/v1/jobs", {"tenant_id": tenant_id, "status": status, **filters})

    @operation
    async def jobs_summary(self, /, tenant_id: str, *, by: str = "status", **filters: Any) -> JobsSummary:
        """How many jobs there are, by status, hour, day, dc, error or declared field; ``filters`` are the other
        parameters of ``GET /v1/jobs/summary``."""
        params = {"tenant_id": tenant_id, "by": by, **filters}
        summary: JobsSummary = value_of(await self._core.ask("GET", "/v1/jobs/summary", params=params))
        return summary

    @operation
    async def make_report(
        self,
        tenant_id: str,
        *,
        since: str | None = None,
        until: str | None = None,
        by: Sequence[str] = (),
        advance: Callable[[str], object] | None = None,
    ) -> bytes:
        """A page of HTML on the jobs of a period, once a node has made it; ``by`` are declared fields of the spec.

        ``advance`` is called again and again with words on how far it is: beyond 1,000,000 entries it takes minutes.
        """
        wanted = {"tenant_id": tenant_id, "since": since, "until": until, "by": list(by) or None}
        content = json_of({name: value for name, value in wanted.items() if value is not None})
        reply = await self._core.ask("POST", REPORTS, content=content, repeatable=True)
        path = f"{REPORTS}/{value_of(reply)['report_id']}"
        while reply.status == HTTPStatus.ACCEPTED:
            if advance is not None:
                advance(value_of(reply)["progress"] or "the node makes it")
            await self._core.transport.pause(REPORT_PAUSE_S)
            reply = await self._core.ask("GET", path)
        if not reply.headers.get("Content-Type", "").startswith(HTML):
            raise no_ledger(reply)
        return reply.content

    @listing
    def list_events(self, tenant_id: str, job_id: str) -> Values[JobEvent]:
        """The events of a job, in HLC order."""
        return self._listed(job_path(job_id, "/events"), {"tenant_id": tenant_id})

    @listing
    def list_cancellations(self, tenant_id: str, dc_id: str) -> Values[ListedJob]:
        """The jobs whose cancellation a data centre has not acknowledged."""
        return self._listed("/v1/cancellations", {"tenant_id": tenant_id, "dc": dc_id})

    @listing
    def watch(
        self,
        tenant_id: str,
        *,
        actions: Sequence[str] = (),
        job: str | None = None,
        dc: str | None = None,
        from_seq: int | None = None,
        raise_lagged: bool = False,
    ) -> Values[Entry]:
        """The tenant's chain as it grows, entry by entry, for as long as somebody asks for the next.

        A connection that ends is made again, at any node, where it was: no entry is told twice, none is left out. One
        that fell behind goes on from the first entry that it was not told, or raises ``LaggedError`` if
        ``raise_lagged``.
        """
        return watched(
            self._core,
            {
                "tenant_id": tenant_id,
                "job": job,
                "dc": dc,
                "from_seq": from_seq,
                "actions": ",".join(actions) or None,
            },
            raise_lagged,
        )

    @operation
    async def request(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        body: object = None,
        key: str | None = None,
    ) -> dict[str, Any]:
        """Anything else that the API has. A POST is repeated only with a ``key``."""
        content = None if body is None else json_of(body)
        answer: dict[str, Any] = value_of(await self._core.ask(method, path, params=params, content=content, key=key))
        return answer

    @operation
    async def ask(
        self,
        method: str,
        path: str,
        *,
        params: Mapping[str, Any] | None = None,
        content: bytes | None = None,
        content_type: str = JSON,
        key: str | None = None,
        repeatable: bool | None = None,
    ) -> Reply:
        """As ``request``, of anything, with the whole answer: its status, headers and bytes. A POST is repeated with a
        ``key``, or if it is ``repeatable``."""
        sent: dict[str, Any] = {"content": content, "content_type": content_type, "key": key}
        return await self._core.ask(method, path, params=params, repeatable=repeatable, **sent)

    # --- bundles ----------------------------------------------------------------------------------

    @operation
    async def export_bundle(
        self,
        tenant_id: str,
        write: Callable[[bytes], object],
        *,
        from_seq: int | None = None,
        to_seq: int | None = None,
        evidence: bool = False,
    ) -> None:
        """Hand a tenant's ledger, or some of it, as a signed file to ``write``, piece by piece. It is whole once this
        returns. With ``evidence`` a chain that is broken is handed over as it is stored."""
        asked = {"tenant_id": tenant_id, "from_seq": from_seq, "to_seq": to_seq, "evidence": evidence or None}
        sent = json_of({name: value for name, value in asked.items() if value is not None}).encode()
        async with self._core.open(
            "POST", "/v1/bundles/export", TAR, content=sent, silence_max_s=DOWNLOAD_PAUSE_MAX_S
        ) as pieces:
            async for piece in pieces:
                await self._core.transport.work(write, piece)

    @operation
    async def import_bundles(
        self, files: Iterable[Path], *, dry_run: bool = False, advance: Callable[[int], object] | None = None
    ) -> dict[str, Any]:
        """Have the ledger verify and merge bundles. ``advance`` is called with the size of each piece that is sent."""
        with ExitStack() as opened:
            answer = await self._core.ask(
                "POST",
                "/v1/bundles/import",
                params={"dry_run": "true" if dry_run else None},
                files=[("file", (file.name, opened.enter_context(_CountedFile(file, advance)), TAR)) for file in files],
            )
            merged: dict[str, Any] = value_of(answer)
            return merged

    async def _write(self, path: str, body: Mapping[str, Any], key: str | None) -> Any:
        key, given = key or new_key(), {name: value for name, value in body.items() if value is not None}
        if self._core.signing is not None and path.startswith(JOBS):
            given.setdefault("job_id", new_job_id()) if path == JOBS else None
            given = self._core.signing.body(path, given, key)
        return value_of(await self._core.ask("POST", path, content=json_of(given), key=key))

    async def _listed(self, path: str, params: Mapping[str, Any]) -> Values[Any]:
        async for page in self._core.pages(path, params):
            for item in page["items"]:
                yield item
            for job in page.get("damaged", ()):
                log.error("job %s is not among those listed, it is damaged: %s", job["job_id"], job["detail"])


class Client(LedgerMethods[Job], Blocking):
    """A ledger. ``with Client() as ledger:`` closes its connections; threads may share it, forked processes may not."""

    _job_type = Job
    _transport_type = BlockingTransport

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


class AsyncClient(LedgerMethods[AsyncJob], Awaiting):
    """As ``Client``, for one event loop: ``async with AsyncClient() as ledger:``."""

    _job_type = AsyncJob
    _transport_type = AsyncTransport

    async def __aenter__(self) -> Self:
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.close()


class _CountedFile(io.FileIO):
    """A file that reports how much of it is read."""

    def __init__(self, path: Path, advance: Callable[[int], object] | None) -> None:
        super().__init__(path, "rb")
        self._advance = advance

    def read(self, size: int | None = -1, /) -> bytes:
        data = super().read(size) or b""
        if self._advance is not None:
            self._advance(len(data))
        return data


def _trusted(nodes: Iterable[str], ca: str | None) -> ssl.SSLContext:
    """The TLS context for nodes. It trusts no CA if no node uses TLS, because loading the system's CAs takes 14 ms."""
    if ca is None and not any(urlsplit(node).scheme == "https" for node in nodes) and not getproxies():
        return ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    return ssl.create_default_context(cafile=ca)


def _requests(events: Iterable[Mapping[str, Any]]) -> Iterable[bytes]:
    """The events as NDJSON, one piece for each request."""
    lines, size = list[bytes](), 0
    for event in events:
        line = json_of(event).encode()
        if lines and (len(lines) == BATCH_LINES_MAX or size + len(line) > BATCH_BYTES_MAX):
            yield b"\n".join(lines)
            lines, size = [], 0
        lines.append(line)
        size += len(line) + 1
    if lines:
        yield b"\n".join(lines)
