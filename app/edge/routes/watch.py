"""``/v1/watch``, ``/v1/webhooks``: a tenant's chain as it grows, as server-sent events; receivers to which the ledger
delivers its entries by itself.

The framework has such answers too (``fastapi.sse``). They encode each event once per client; here each entry is encoded
once for all watchers, and nothing is written to a client that does not read.
"""

from __future__ import annotations

import asyncio
from collections.abc import Iterable
from contextlib import suppress
from functools import partial
from typing import Annotated, Any, Final, Literal

from fastapi import APIRouter, Header, Path, Query, Response
from pydantic import Field
from starlette.types import Message, Receive, Scope, Send

from app.edge.accepted import CUT_OFF, Accepted, AcceptedDep, Service
from app.edge.answers import IS_HEAD, Streamed, gone, json_answer
from app.edge.forms.body import json_body
from app.edge.forms.fields import (
    NAME_CHARACTERS_MAX,
    TREE_SIZE_MAX,
    SeqNumber,
    TenantQuery,
    WholeNumber,
)
from app.edge.forms.lists import page
from app.edge.forms.requests import ReplayRequest, WebhookRequest
from app.edge.routing import PROBLEM_RESPONSE, StrictRoute, answered
from app.runtime.answers import Time, list_shape, shape
from app.runtime.logs import log
from app.runtime.principals import Right
from app.runtime.state.node import Node
from app.share.watch import Watcher, Watchers
from app.share.watch.blocks import Wanted
from app.share.webhooks import WebhookRegistry, new_webhook
from app.share.webhooks.formats import Format
from app.share.webhooks.sending import secret_text
from app.store.reading import reading, run_in
from app.store.sessions import NodePool
from app.store.webhooks import ShownWebhook
from app.trust.retention import RetentionReader
from ledger.errors import ChainDamagedError, InvalidInputError
from ledger.facts.events import (
    TYPE_OF_ACTION,
)

router = APIRouter(route_class=StrictRoute, tags=["chain"], responses=PROBLEM_RESPONSE)

MEDIA_TYPE: Final = "text/event-stream"
RETRY_MS: Final = 1000
"""How long a client should wait before it comes back."""

Subject = Annotated[str, Field(min_length=1, max_length=NAME_CHARACTERS_MAX, pattern=r"^[^\x00-\x1f\x7f]+$")]


DeadLetterAnswer = shape(
    "DeadLetterAnswer",
    "An entry that a webhook refused while it took others.",
    seq=int,
    reason=str,
    at=Time,
    redelivering=bool,
)

WebhookAnswer = shape(
    "WebhookAnswer",
    "A receiver of entries. All up to ``delivered_seq`` was confirmed, not asked for, or is a dead letter; the first\n"
    "100 of these are listed. ``backlog_entries`` come behind it in the chain, also those that it does not ask for.",
    webhook_id=str,
    tenant_id=str,
    url=str,
    actions=list[str] | None,
    job=str | None,
    format=str,
    state=Literal["delivering", "failing", "stopped", "paused"],
    delivered_seq=int,
    backlog_entries=int,
    delivered_at=Time | None,
    failing_since=Time | None,
    last_error=str | None,
    created_by=str | None,
    created_at=Time,
    dead_letter_count=int,
    dead_letters=[DeadLetterAnswer],
)

CreatedWebhookAnswer = shape(
    "CreatedWebhookAnswer",
    "A new receiver, with the secret that its messages are signed with.",
    **WebhookAnswer.__annotations__,
    secret=str,
)

WebhookList = list_shape(
    "WebhookList", "The receivers of a tenant's entries, the first one first; all of them.", WebhookAnswer
)


@router.get(
    "/v1/watch",
    response_class=Response,
    responses={
        200: {
            "description": "Server-sent events: id is the seq, event the action, data the entry as the list of entries "
            "has it. An event lagged, with from_seq to start over from, ends the stream of a client that fell behind.",
            "content": {MEDIA_TYPE: {"schema": {}}},
        }
    },
)
async def watch_chain(
    accepted: AcceptedDep,
    watchers: Service[Watchers],
    pool: Service[NodePool],
    retention: Service[RetentionReader],
    tenant_id: TenantQuery,
    from_seq: Annotated[
        SeqNumber | None, Query(description="First entry; left out, what comes from now on. It need not be there yet.")
    ] = None,
    to_seq: Annotated[SeqNumber | None, Query(description="Last entry, after which the stream ends.")] = None,
    actions: Annotated[
        str | None,
        Query(max_length=1024, description="Only entries of these actions, separated by commas."),
    ] = None,
    job: Annotated[Subject | None, Query(description="Only entries of this job, or other subject.")] = None,
    dc: Annotated[Subject | None, Query(description="Only entries that concern this data centre.")] = None,
    last_event_id: Annotated[
        WholeNumber | None,
        Header(
            alias="Last-Event-ID",
            ge=0,
            le=TREE_SIZE_MAX,
            description="Goes on behind this entry; wins over from_seq. Browsers send it by themselves.",
        ),
    ] = None,
) -> Response:
    """Entries of a tenant's chain in seq order, from one on or from now on, for as long as the client listens."""
    if from_seq is not None and to_seq is not None and from_seq > to_seq:
        raise InvalidInputError("from_seq: lies behind to_seq", ("from_seq",))
    after_seq = last_event_id if last_event_id is not None else None if from_seq is None else from_seq - 1
    named = None if actions is None else _known_actions(name.strip().upper() for name in actions.split(","))
    wanted = Wanted(named, job, dc)
    if after_seq is not None:
        await run_in(reading(pool), retention.refuse_left, tenant_id, after_seq + 1)
    return Streamed(
        partial(_send_watch, watchers, accepted, tenant_id, wanted, (after_seq, to_seq)),
        MEDIA_TYPE,
        {"Cache-Control": "no-store", "X-Accel-Buffering": "no"},
    )


def _known_actions(names: Iterable[str]) -> frozenset[str]:
    """The actions that a filter names.

    Raises:
        InvalidInputError: there is no such action.
    """
    named = frozenset(names)
    if unknown := named - TYPE_OF_ACTION.keys():
        raise InvalidInputError(
            f"actions: there is no action {min(unknown)[:100]!r}; there are {', '.join(sorted(TYPE_OF_ACTION))}",
            ("actions",),
        )
    return named


async def _send_watch(
    watchers: Watchers,
    accepted: Accepted,
    tenant_id: str,
    wanted: Wanted,
    seqs: tuple[int | None, int | None],
    head: Message,
    scope: Scope,
    receive: Receive,
    send: Send,
) -> None:
    """Send the entries above the first of ``seqs``, up to the second, until the client goes away or its watch ends. The
    stream starts once the tenant is known and the read is recorded.

    Raises:
        LedgerError: the stream could not start; nothing was sent.
    """
    with accepted.access.quotas.watches.one(accepted.caller.id):
        async with watchers.open(tenant_id, wanted, *seqs, partial(_may_watch, accepted, tenant_id)) as watcher:
            await accepted.record_read(
                tenant_id,
                watched_from=watcher.seq + 1,
                actions=wanted.actions and sorted(wanted.actions),
                job_id=wanted.job_id,
                dc=wanted.dc,
            )
            watcher.cut_off = scope[CUT_OFF]
            await send(head)
            if scope.get(IS_HEAD) is None:
                # The start position, if the client named none.
                place = b"id: %d\n" % watcher.seq if seqs[0] is None else b""
                await send(_piece(b"retry: %d\n%b\n" % (RETRY_MS, place)))
                try:
                    await _tell(watcher, receive, send)
                except ChainDamagedError as error:
                    log.error("watch_ended", tenant_id=error.tenant_id, error=str(error))
                    accepted.report_break(error)
            await send({"type": "http.response.body", "body": b""})


async def _tell(watcher: Watcher, receive: Receive, send: Send) -> None:
    """Send the watcher's events while the client is connected."""
    leaving = asyncio.get_running_loop().create_task(gone(receive))
    leaving.add_done_callback(lambda _: watcher.end())
    try:
        while piece := await watcher.next():
            await send(_piece(piece))
            watcher.sent()
            # Nothing; but it waits until the client has taken what was written.
            await send(_piece(b""))
    finally:
        leaving.cancel()
        with suppress(asyncio.CancelledError):
            await leaving


def _piece(body: bytes) -> dict[str, object]:
    return {"type": "http.response.body", "body": body, "more_body": True}


async def _may_watch(accepted: Accepted, tenant_id: str) -> bool:
    """Whether the request's credentials are still valid; false if they cannot be checked, as for a new request."""
    caller = await accepted.access.caller_if_known(accepted.scope)
    return caller is not None and caller.may(Right.READ, tenant_id)


webhooks_router = APIRouter(route_class=StrictRoute, tags=["webhooks"], responses=PROBLEM_RESPONSE)

WebhookId = Annotated[str, Path(min_length=1, max_length=64, description="As lists have it.")]


@webhooks_router.post("/v1/webhooks", status_code=201, responses=answered(CreatedWebhookAnswer, 201))
async def add_webhook(
    webhooks: Service[WebhookRegistry],
    accepted: AcceptedDep,
    wanted: Annotated[dict[str, Any], json_body(WebhookRequest)],
) -> Response:
    """Deliver a tenant's entries to a receiver from now on, or from a seq on. The answer has its secret, and nothing
    else ever."""
    _known_actions(wanted.get("actions", ()))
    webhook = new_webhook(
        wanted["tenant_id"],
        wanted["url"],
        wanted.get("actions"),
        wanted.get("job"),
        wanted.get("format", Format.STANDARD),
    )
    shown, secret = await webhooks.add(webhook, wanted.get("from_seq"), accepted.caller)
    return json_answer({**_webhook_answer(shown), "secret": secret_text(secret)}, 201, {"Cache-Control": "no-store"})


@webhooks_router.get("/v1/webhooks", responses=answered(WebhookList))
async def list_webhooks(webhooks: Service[WebhookRegistry], tenant_id: TenantQuery) -> Response:
    """The tenant's webhooks, how far each has confirmed, and what it refused."""
    return page([_webhook_answer(each) for each in await webhooks.listed(tenant_id)], None)


@webhooks_router.delete("/v1/webhooks/{webhook_id}", responses=answered(WebhookAnswer))
async def remove_webhook(
    node: Service[Node], webhooks: Service[WebhookRegistry], accepted: AcceptedDep, webhook_id: WebhookId
) -> Response:
    """Deliver nothing more to a webhook, and forget what it refused; the entries stay in the chain."""
    node.check_writable()
    await accepted.allow()
    return json_answer(_webhook_answer(await webhooks.remove(webhook_id, accepted.caller)))


@webhooks_router.post("/v1/webhooks/{webhook_id}/redeliver", responses=answered(WebhookAnswer))
async def redeliver_webhook(
    node: Service[Node], webhooks: Service[WebhookRegistry], accepted: AcceptedDep, webhook_id: WebhookId
) -> Response:
    """Deliver a webhook's dead letters once more, before all else; one that was stopped goes on where it stood."""
    node.check_writable()
    await accepted.allow()
    return json_answer(_webhook_answer(await webhooks.resume(webhook_id, accepted.caller, with_dead_letters=True)))


@webhooks_router.post("/v1/webhooks/{webhook_id}/pause", responses=answered(WebhookAnswer))
async def pause_webhook(
    node: Service[Node], webhooks: Service[WebhookRegistry], accepted: AcceptedDep, webhook_id: WebhookId
) -> Response:
    """Deliver nothing to a webhook until it is resumed; its position stays, and a prune does not wait for it."""
    node.check_writable()
    await accepted.allow()
    return json_answer(_webhook_answer(await webhooks.pause(webhook_id, accepted.caller)))


@webhooks_router.post("/v1/webhooks/{webhook_id}/resume", responses=answered(WebhookAnswer))
async def resume_webhook(
    node: Service[Node], webhooks: Service[WebhookRegistry], accepted: AcceptedDep, webhook_id: WebhookId
) -> Response:
    """Let a webhook that was paused or stopped go on where it stood; its dead letters stay."""
    node.check_writable()
    await accepted.allow()
    return json_answer(_webhook_answer(await webhooks.resume(webhook_id, accepted.caller, with_dead_letters=False)))


@webhooks_router.post("/v1/webhooks/{webhook_id}/replay", responses=answered(WebhookAnswer))
async def replay_webhook(
    webhooks: Service[WebhookRegistry],
    accepted: AcceptedDep,
    webhook_id: WebhookId,
    wanted: Annotated[dict[str, Any], json_body(ReplayRequest)],
) -> Response:
    """Deliver all entries from a seq on again, its dead letters among them, once the message under way is answered."""
    return json_answer(_webhook_answer(await webhooks.replay(webhook_id, wanted["from_seq"], accepted.caller)))


def _state(shown: ShownWebhook) -> str:
    if shown.is_stopped:
        return "stopped" if shown.last_error is not None else "paused"
    return "delivering" if shown.failing_since is None else "failing"


def _webhook_answer(shown: ShownWebhook) -> dict[str, Any]:
    return {
        **shown.webhook._asdict(),
        "state": _state(shown),
        "delivered_seq": shown.delivered_seq,
        "backlog_entries": max(0, shown.head_seq - shown.delivered_seq),
        "delivered_at": shown.delivered_at,
        "failing_since": shown.failing_since,
        "last_error": shown.last_error,
        "created_by": shown.created_by,
        "created_at": shown.created_at,
        "dead_letter_count": shown.dead_letters,
        "dead_letters": [
            {"seq": each.seq, "reason": each.reason, "at": each.created_at, "redelivering": each.is_again}
            for each in shown.refused
        ],
    }
