"""What a receiver is sent, in the form of Standard Webhooks 1.0, and one attempt to send it::

    webhook-id: 5f0c9a1e2b3d4c5f_17-42          the webhook, and the seqs of the first and the last entry
    webhook-timestamp: 1704931200               of this attempt, seconds since 1970
    webhook-signature: v1,<base64>              HMAC-SHA256 of "id.timestamp.body"

    {"type": "chain.entries", "webhook_id", "tenant_id", "redelivered", "entries": [as GET /v1/chain/entries has them]}

The body follows from the webhook, the seqs and whether it is a redelivery, whose id ends with ``-again``: one id
always stands for the same bytes.

The name of a receiver is looked up for each attempt, and the connection goes to an address that was checked: a name
that leads elsewhere a moment later changes nothing. Redirects are not followed, and no more of an answer is read than
leaves the connection fit for the next request.
"""

from __future__ import annotations

import asyncio
import base64
import hashlib
import hmac
import random
import socket
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from enum import Enum
from functools import partial
from ipaddress import IPv6Address, ip_address, ip_network
from threading import Thread
from typing import NamedTuple

import httpx

from app.runtime.answers import json_bytes
from app.runtime.outgoing import NO_ANSWER, NoAnswerError, pieces_of, reason_of, retry_after_s
from app.runtime.settings.types import IpNetwork, is_fetched_url
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


class Names:
    """Looks up addresses, each name in a thread of its own and once at a time. Belongs to one event loop.

    A lookup cannot be told to stop: those that event loops make wait for each other, so that a few names whose servers
    never answer hold up whatever else the process looks up.
    """

    def __init__(self) -> None:
        self._under_way: dict[str, asyncio.Future[list[str]]] = {}

    async def addresses(self, host: str) -> list[str]:
        """Of ``host``, in no order.

        Raises:
            OSError, UnicodeError: it has none, or is no name.
        """
        found = self._under_way.get(host)
        if found is None:
            loop = asyncio.get_running_loop()
            found = self._under_way[host] = loop.create_future()
            found.add_done_callback(partial(self._is_over, host))
            # It ends with the process, whatever it waits for.
            Thread(target=_look_up, args=(loop, found, host), name="look up", daemon=True).start()
        return await asyncio.shield(found)

    def _is_over(self, host: str, found: asyncio.Future[list[str]]) -> None:
        del self._under_way[host]
        found.exception()  # also where nobody waited for so long


def _look_up(loop: asyncio.AbstractEventLoop, found: asyncio.Future[list[str]], host: str) -> None:
    tell: Callable[[], None]
    try:
        tell = partial(
            found.set_result, [str(each[4][0]) for each in socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)]
        )
    except (OSError, UnicodeError) as error:
        tell = partial(found.set_exception, error)
    with suppress(RuntimeError):  # the loop is closed
        loop.call_soon_threadsafe(tell)


TIMEOUT_S = 15.0
"""Longest that one attempt may take, from the look for an address to the head of the answer."""
LEAVE_S = 1.0
"""Longest that the rest of an answer is waited for, to ask again on its connection."""
ANSWER_BYTES_MAX = 16 * 1024
RETRY_AFTER_MAX_S = 300.0
TRANSIENT = frozenset({408, 425, 429})
"""Answers of 400 to 499 that ask for another attempt."""
FAILED = 500
"""What a receiver answers that fails at what it was sent; gateways before it answer otherwise."""
UNICAST = ip_network("2000::/3")
"""All of IPv6 that leads to the internet: what translates to IPv4, whichever address, and what is a site's own, is
elsewhere."""
SPECIAL = (ip_network("2002::/16"), ip_network("192.0.0.0/24"))
"""What Python takes for public: addresses that lead to one of IPv4, and those of protocols, where a cloud may tell a
machine its secrets."""


class Outcome(Enum):
    """What became of an attempt."""

    TAKEN = "taken"
    REFUSED = "refused"
    """The receiver is there, and does not take this."""
    GONE = "gone"
    """The receiver wants nothing more."""
    AWAY = "away"
    """Nobody took it, or said why not."""


class Answer(NamedTuple):
    """How an attempt ended; ``said`` is for people."""

    outcome: Outcome
    said: str
    retry_after_s: float = 0.0


async def attempt(
    client: httpx.AsyncClient, url: str, message: Message, secret: bytes, names: Names, networks: Sequence[IpNetwork]
) -> Answer:
    """Send the message once. ``client`` is for this URL alone, as its connections are known by their addresses."""
    if not is_fetched_url(url):
        return Answer(Outcome.AWAY, f"{url} is no address for a webhook: remove the webhook and add it again")
    target = httpx.URL(url)
    # As DNS has it: what IDNA decodes may be encoded to another name.
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
    """An address of ``host`` that may be asked: a public one, or one of ``networks``.

    Raises:
        NoAnswerError: it has none.
    """
    try:
        found = await names.addresses(host)
    except (OSError, UnicodeError) as error:
        raise NoAnswerError(f"{host} is not found: {error}") from error
    allowed = [address for address in found if may_be_asked(address, networks)]
    if not allowed:
        raise NoAnswerError(f"{host} has no address that is public or in webhooks.networks")
    return random.choice(allowed)  # noqa: S311 (another one with the next attempt, no secret)


def may_be_asked(text: str, networks: Sequence[IpNetwork]) -> bool:
    """Whether the address is a public one, or in one of ``networks``."""
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
    """Read what a short answer has, so that its connection serves again; of a long one the connection ends. Its status
    counts in any case."""
    try:
        with suppress(NoAnswerError, TimeoutError):
            async with asyncio.timeout(LEAVE_S):
                async for _ in pieces_of(answer, bytes_max=ANSWER_BYTES_MAX):
                    pass
    finally:
        await answer.aclose()
