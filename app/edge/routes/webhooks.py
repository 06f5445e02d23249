"""``/v1/webhooks``: receivers to which the ledger delivers a tenant's entries by itself."""

from __future__ import annotations

from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Response

from app.edge.accepted import AcceptedDep
from app.edge.answers import json_answer
from app.edge.forms.body import json_body
from app.edge.forms.fields import ReadableTenantId
from app.edge.forms.requests import WebhookRequest
from app.edge.routing import PROBLEM_RESPONSE, StrictRoute, answered
from app.edge.services import Service
from app.runtime.answers.node import NewWebhookAnswer, WebhookAnswer, WebhookList
from app.runtime.state.node import Node
from app.share.webhooks.registry import ShownWebhook, WebhookRegistry, new_webhook
from app.share.webhooks.sending import secret_text

router = APIRouter(route_class=StrictRoute, tags=["webhooks"], responses=PROBLEM_RESPONSE)

WebhookId = Annotated[str, Path(min_length=1, max_length=64, description="As lists have it.")]


@router.post("/v1/webhooks", status_code=201, responses=answered(NewWebhookAnswer, 201))
async def add_webhook(
    webhooks: Service[WebhookRegistry],
    accepted: AcceptedDep,
    wanted: Annotated[WebhookRequest, json_body(WebhookRequest)],
) -> Response:
    """Deliver a tenant's entries to a receiver from now on, or from a seq on. The answer has its secret, and nothing
    else ever."""
    webhook = new_webhook(wanted["tenant_id"], wanted["url"], wanted.get("actions"), wanted.get("job"))
    shown, secret = await webhooks.add(webhook, wanted.get("from_seq"), accepted.caller)
    return json_answer({**_answer(shown), "secret": secret_text(secret)}, 201, {"Cache-Control": "no-store"})


@router.get("/v1/webhooks", responses=answered(WebhookList))
async def list_webhooks(
    webhooks: Service[WebhookRegistry], tenant_id: Annotated[ReadableTenantId, Query()]
) -> Response:
    """The tenant's webhooks, how far each has confirmed, and what it refused."""
    return json_answer({"items": [_answer(each) for each in await webhooks.listed(tenant_id)], "next_cursor": None})


@router.delete("/v1/webhooks/{webhook_id}", responses=answered(WebhookAnswer))
async def remove_webhook(
    node: Service[Node], webhooks: Service[WebhookRegistry], accepted: AcceptedDep, webhook_id: WebhookId
) -> Response:
    """Deliver nothing more to a webhook, and forget what it refused; the entries stay in the chain."""
    node.check_writable()
    await accepted.allow()
    return json_answer(_answer(await webhooks.remove(webhook_id, accepted.caller)))


@router.post("/v1/webhooks/{webhook_id}/redeliver", responses=answered(WebhookAnswer))
async def redeliver_webhook(
    node: Service[Node], webhooks: Service[WebhookRegistry], accepted: AcceptedDep, webhook_id: WebhookId
) -> Response:
    """Deliver a webhook's dead letters once more, before all else; one that was stopped goes on where it stood."""
    node.check_writable()
    await accepted.allow()
    return json_answer(_answer(await webhooks.send_again(webhook_id, accepted.caller)))


def _answer(shown: ShownWebhook) -> dict[str, Any]:
    webhook = shown.webhook
    state = "stopped" if webhook.is_stopped else "failing" if webhook.failing_since else "delivering"
    return {
        "webhook_id": webhook.webhook_id,
        "tenant_id": webhook.tenant_id,
        "url": webhook.url,
        "actions": webhook.actions,
        "job": webhook.job,
        "state": state,
        "delivered_seq": webhook.delivered_seq,
        "backlog_entries": max(0, webhook.head_seq - webhook.delivered_seq),
        "delivered_at": webhook.delivered_at,
        "failing_since": webhook.failing_since,
        "last_error": webhook.last_error,
        "created_by": webhook.created_by,
        "created_at": webhook.created_at,
        "dead_letter_count": webhook.dead_letters,
        "dead_letters": [
            {"seq": each.seq, "reason": each.reason, "at": each.created_at, "redelivering": each.is_again}
            for each in shown.refused
        ],
    }
