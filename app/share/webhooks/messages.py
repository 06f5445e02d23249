"""What a receiver is sent, in the form of Standard Webhooks 1.0::

    webhook-id: 5f0c9a1e2b3d4c5f_17-42          the webhook, and the seqs of the first and the last entry
    webhook-timestamp: 1704931200               of this attempt, seconds since 1970
    webhook-signature: v1,<base64>              HMAC-SHA256 of "id.timestamp.body"

    {"type": "chain.entries", "webhook_id", "tenant_id", "redelivered", "entries": [as GET /v1/chain/entries has them]}

The body follows from the webhook, the seqs and whether it is a redelivery, whose id ends with ``-again``: one id always
stands for the same bytes.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
from collections.abc import Sequence
from typing import NamedTuple

from app.runtime.answers import json_bytes
from app.store.chain_reads import ListedEntry
from app.store.webhooks import Webhook
from ledger import canonical

SECRET_PREFIX = "whsec_"  # noqa: S105 (says what follows)
TYPE = "chain.entries"


class Message(NamedTuple):
    """What is sent, again and again until it is confirmed."""

    message_id: str
    body: bytes

    def headers(self, secret: bytes, at_s: int) -> dict[str, str]:
        """Of an attempt at ``at_s``, in seconds since 1970."""
        signed = f"{self.message_id}.{at_s}.".encode() + self.body
        return {
            "Content-Type": "application/json",
            "webhook-id": self.message_id,
            "webhook-timestamp": str(at_s),
            "webhook-signature": f"v1,{base64.b64encode(hmac.digest(secret, signed, hashlib.sha256)).decode()}",
        }


def message_of(webhook: Webhook, entries: Sequence[ListedEntry], *, redelivered: bool = False) -> Message:
    """The message that brings these entries, at least one."""
    said = {
        "type": TYPE,
        "webhook_id": webhook.webhook_id,
        "tenant_id": webhook.tenant_id,
        "redelivered": redelivered,
        "entries": [entry.as_listed() for entry in entries],
    }
    again = "-again" if redelivered else ""
    return Message(f"{webhook.webhook_id}_{entries[0].seq}-{entries[-1].seq}{again}", json_bytes(said))


def context_of_secret(webhook: Webhook) -> bytes:
    """What the secret of a webhook is made of, beside the ledger's own: all that it was registered with. Where somebody
    changed its row, what it is sent is signed with another secret than its receiver has."""
    return canonical.encode(["tallystick.webhook-secret.v1", *webhook])


def secret_text(secret: bytes) -> str:
    """The secret as its receiver is given it."""
    return SECRET_PREFIX + base64.b64encode(secret).decode()
