"""One attempt: a request to an address that may be asked, and what the answer says.

A name is looked up for each attempt, and the connection goes to an address that was looked at: one that names another
address a moment later leads nowhere else. Nobody is followed to another place, and of an answer no more is read than
leaves the connection fit for the next request.
"""

from __future__ import annotations

import asyncio
import random
import time
from collections.abc import Sequence
from contextlib import suppress
from enum import Enum
from ipaddress import IPv6Address, ip_address, ip_network
from typing import NamedTuple

import httpx

from app.runtime.outgoing.asking import NO_ANSWER, NoAnswerError, pieces_of, reason_of, retry_after_s
from app.runtime.settings.types import IpNetwork, is_fetched_url
from app.share.webhooks.messages import Message
from app.share.webhooks.names import Names

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
            address = await address_of(host, names, networks)
            request = client.build_request(
                "POST",
                target.copy_with(host=address),
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
    wait_s = retry_after_s(answer.headers.get("Retry-After"), time.time())
    return Answer(Outcome.AWAY, said, min(wait_s, RETRY_AFTER_MAX_S))


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
