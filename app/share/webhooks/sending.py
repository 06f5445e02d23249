"""The message to a receiver over HTTP, in the form of Standard Webhooks 1.0, and one attempt to send it::

    webhook-id: 5f0c9a1e2b3d4c5f_17-42          the webhook, and the seqs of the first and the last entry
    webhook-timestamp: 1704931200               of this attempt, seconds since 1970
    webhook-signature: v1,<base64>              HMAC-SHA256 of "id.timestamp.body"

The body (``formats``) is determined by the webhook, the seqs and whether it is a redelivery, whose id ends with
``-again``. So one id always means the same bytes.

The name of a receiver is resolved for each attempt, and the connection goes to the checked address, so DNS rebinding
has no effect. Redirects are not followed. Only so much of an answer is read that the connection can be reused.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import random
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from ipaddress import IPv6Address, ip_address, ip_network
from typing import NamedTuple

import httpx

from app.runtime.outgoing import NO_ANSWER, NoAnswerError, pieces_of, reason_of, retry_after_s
from app.runtime.settings.types import IpNetwork
from app.runtime.tasks import in_own_thread
from app.share.webhooks.formats import Format, http_body
from app.store.chain_reads import ListedEntry
from app.store.webhooks import Webhook
from ledger import canonical
from ledger.errors import reported_as

SECRET_PREFIX = "whsec_"  # noqa: S105 (says what follows)


class Message(NamedTuple):
    """A message, sent repeatedly until it is confirmed."""

    message_id: str
    media_type: str
    body: bytes

    def headers(self, secret: bytes, at_s: int) -> dict[str, str]:
        """Headers of an attempt at ``at_s``, in seconds since 1970."""
        signed = f"{self.message_id}.{at_s}.".encode() + self.body
        return {
            "Content-Type": self.media_type,
            "webhook-id": self.message_id,
            "webhook-timestamp": str(at_s),
            "webhook-signature": f"v1,{base64.b64encode(hmac.digest(secret, signed, hashlib.sha256)).decode()}",
        }


def message_of(webhook: Webhook, entries: Sequence[ListedEntry], source: str, *, redelivered: bool = False) -> Message:
    """The message with these entries, at least one, of the log ``source``."""
    again = "-again" if redelivered else ""
    return Message(
        f"{webhook.webhook_id}_{entries[0].seq}-{entries[-1].seq}{again}",
        *http_body(webhook.format, webhook.webhook_id, entries, source, redelivered=redelivered),
    )


def context_of_secret(webhook: Webhook) -> bytes:
    """The input of a webhook's secret besides the ledger's own: all fields of its registration. If an attacker changes
    the row, messages are signed with another secret than the receiver's. Webhooks had no format at first."""
    *before, form = webhook
    return canonical.encode(["tallystick.webhook-secret.v1", *before, *([] if form == Format.STANDARD else [form])])


def secret_text(secret: bytes) -> str:
    """The secret in the form given to its receiver."""
    return SECRET_PREFIX + base64.b64encode(secret).decode()


class Names:
    """Resolves names, each in its own thread and at most once at a time. Belongs to one event loop.

    A lookup cannot be cancelled. Lookups by the event loop share a thread pool, so a few names whose servers never
    answer would block every other lookup of the process.
    """

    def __init__(self) -> None:
        self._under_way: dict[str, asyncio.Future[list[str]]] = {}

    async def addresses(self, host: str) -> list[str]:
        """The addresses of ``host``, in no order.

        Raises:
            OSError, UnicodeError: ``host`` has none, or is no valid name.
        """
        if (found := self._under_way.get(host)) is None:
            found = self._under_way[host] = in_own_thread(partial(_look_up, host), "look up")
            found.add_done_callback(lambda _: self._under_way.pop(host))
        return await asyncio.shield(found)


def _look_up(host: str) -> list[str]:
    return [str(each[4][0]) for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]


TIMEOUT_S = 15.0
"""Longest time of one attempt, from the DNS lookup to the head of the answer."""
LEAVE_S = 1.0
"""Longest wait for the rest of an answer, so that its connection can be reused."""
ANSWER_BYTES_MAX = 16 * 1024
RETRY_AFTER_MAX_S = 300.0
TRANSIENT = frozenset({408, 425, 429})
"""Answers of 400 to 499 that ask for another attempt."""
FAILED = 500
"""Answer of a receiver that fails on the message; a gateway before it answers with another status."""
UNICAST = ip_network("2000::/3")
"""All public IPv6 addresses. Addresses that translate to IPv4, and those local to a site, are outside it."""
SPECIAL = (ip_network("2002::/16"), ip_network("192.0.0.0/24"))
"""Addresses that Python wrongly considers public: 6to4, which leads to IPv4, and protocol assignments, where a cloud
may serve a machine's secrets."""


class Outcome(Enum):
    """The outcome of an attempt."""

    TAKEN = "taken"
    REFUSED = "refused"
    """The receiver answers and rejects the message."""
    GONE = "gone"
    """The receiver wants no more messages."""
    AWAY = "away"
    """The receiver neither accepted nor rejected it."""


class Answer(NamedTuple):
    """The result of an attempt; ``said`` is for people."""

    outcome: Outcome
    said: str
    retry_after_s: float = 0.0


async def attempt(
    client: httpx.AsyncClient, url: str, message: Message, secret: bytes, names: Names, networks: Sequence[IpNetwork]
) -> Answer:
    """Send the message once. ``client`` is for this URL alone, because its connections are keyed by address."""
    target = httpx.URL(url)
    # The raw name as DNS uses it: decoding and encoding it by IDNA may give another name.
    host = target.raw_host.decode()
    headers = {
        **message.headers(secret, int(time.time())),
        "Host": target.netloc.decode(),
        "Accept-Encoding": "identity",
    }
    try:
        async with asyncio.timeout(TIMEOUT_S):
            request = client.build_request(
                "POST",
                target.copy_with(host=await address_of(host, names, networks)),
                headers=headers,
                content=message.body,
                extensions={"sni_hostname": host},
            )
            answer = await client.send(request, stream=True, follow_redirects=False)
    except TimeoutError:
        return Answer(Outcome.AWAY, f"no answer within {TIMEOUT_S:g} s")
    except NO_ANSWER as error:
        return Answer(Outcome.AWAY, f"no answer: {reason_of(error)}")
    except NoAnswerError as error:
        return Answer(Outcome.AWAY, str(error))
    await _leave(answer)
    return _judged(answer)


async def address_of(host: str, names: Names, networks: Sequence[IpNetwork]) -> str:
    """An allowed address of ``host``: a public one, or one of ``networks``.

    Raises:
        NoAnswerError: ``host`` has none.
    """
    with reported_as(NoAnswerError, f"{host} is not found", OSError, UnicodeError):
        found = await names.addresses(host)
    if not (allowed := [address for address in found if may_be_asked(address, networks)]):
        raise NoAnswerError(f"{host} has no address that is public or in webhooks.networks")
    return random.choice(allowed)  # noqa: S311 (another one with the next attempt, no secret)


def may_be_asked(text: str, networks: Sequence[IpNetwork]) -> bool:
    """Whether the address is public, or in one of ``networks``."""
    address = ip_address(text.partition("%")[0])
    if isinstance(address, IPv6Address) and address.ipv4_mapped is not None:
        address = address.ipv4_mapped
    if any(address in network for network in networks):
        return True
    if isinstance(address, IPv6Address) and address not in UNICAST:
        return False
    return address.is_global and not address.is_multicast and not any(address in network for network in SPECIAL)


def _judged(answer: httpx.Response) -> Answer:
    status = answer.status_code
    said = f"the receiver answers {status}"
    if answer.is_success:
        return Answer(Outcome.TAKEN, said)
    if status == httpx.codes.GONE:
        return Answer(Outcome.GONE, said)
    if status == FAILED or (answer.is_client_error and status not in TRANSIENT):
        return Answer(Outcome.REFUSED, said)
    return Answer(
        Outcome.AWAY, said, min(retry_after_s(answer.headers.get("Retry-After"), time.time()), RETRY_AFTER_MAX_S)
    )


async def _leave(answer: httpx.Response) -> None:
    """Read the rest of a short answer, so that its connection is reused; a long one closes the connection. Errors are
    ignored, because the status is known."""
    try:
        with suppress(NoAnswerError, TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                async for _ in pieces_of(answer, bytes_max=ANSWER_BYTES_MAX):
                    pass
    finally:
        await answer.aclose()
