"""Delivery to a syslog server: RFC 5424 messages over TLS with octet counting (RFC 5425)::

    253 <110>1 2024-01-11T00:00:00.000Z node-a tallystick - ENQUEUE [tallystick@32473 tenant="acme" seq="17" …] {…}

    253                 bytes of the message behind the space
    <110>               facility 13 (log audit) * 8 + severity
    node-a              the node whose HLC the entry has
    ENQUEUE             the action

32473 is the number that RFC 5612 reserves for examples: this software has no number of its own.

Syslog has no answers. Each batch has a connection of its own, and counts as delivered once the receiver has ended it
after the end of the batch (close_notify: RFC 5425, 4.4): its TLS layer has read all. A receiver that dies, or ends the
connection, before that resets it, so the batch is sent again. What its program does with a message, nothing reports.
"""

from __future__ import annotations

import asyncio
import fcntl
import os
import re
import socket
import ssl
import termios
from collections.abc import Callable, Sequence
from functools import partial
from typing import Final, TypeVar

import httpx

from app.runtime.outgoing import NoAnswerError
from app.runtime.settings.types import IpNetwork
from app.share.webhooks import sending
from app.share.webhooks.formats import document, severity_of
from app.share.webhooks.sending import Answer, Names, Outcome, address_of
from app.store.chain_reads import ListedEntry
from ledger import rfc3339

Value = TypeVar("Value")

PORT: Final = 6514
FACILITY: Final = 13
ENTERPRISE: Final = 32473
APP_NAME: Final = "tallystick"
RECORD_BYTES: Final = 16 * 1024
"""Plain bytes of a TLS record."""
ACKNOWLEDGED_POLL_S: Final = 0.01


def framed(form: str, entries: Sequence[ListedEntry], source: str) -> bytes:
    """The messages of these entries, each behind its length."""
    messages = (_message(entry, document(form, entry, source)) for entry in entries)
    return b"".join(b"%d %b" % (len(message), message) for message in messages)


def _message(entry: ListedEntry, content: bytes) -> bytes:
    at = rfc3339.time_of(entry.t_hlc) or "-"
    facts = {
        "tenant": entry.tenant_id,
        "seq": entry.seq,
        "job": entry.job_id,
        "hlc": entry.t_hlc,
        "link": entry.chain_link,
    }
    data = " ".join(f'{name}="{_escaped(str(value))}"' for name, value in facts.items())
    priority = FACILITY * 8 + severity_of(entry.action).syslog
    head = f"<{priority}>1 {at} {entry.hlc_node} {APP_NAME} - {entry.action} [{APP_NAME}@{ENTERPRISE} {data}] "
    return head.encode() + content


def _escaped(value: str) -> str:
    return re.sub(r'(["\\\]])', r"\\\1", value)


async def attempt(
    context: ssl.SSLContext, url: str, messages: bytes, names: Names, networks: Sequence[IpNetwork]
) -> Answer:
    """Send the messages once."""
    target = httpx.URL(url)
    host = target.raw_host.decode()
    try:
        async with asyncio.timeout(sending.TIMEOUT_S):
            address = await address_of(host, names, networks)
            await _write(address, target.port or PORT, host, context, messages)
    except TimeoutError:
        return Answer(Outcome.AWAY, f"not read to the end within {sending.TIMEOUT_S:g} s")
    except OSError as error:
        return Answer(Outcome.AWAY, f"not read to the end: {error}")
    except NoAnswerError as error:
        return Answer(Outcome.AWAY, str(error))
    return Answer(Outcome.TAKEN, "the receiver has read all")


async def _write(address: str, port: int, host: str, context: ssl.SSLContext, data: bytes) -> None:
    """Send ``data`` over a new connection, and end it; returns once the receiver has ended it, too.

    Raises:
        OSError: it reset the connection, or is not who its name says.
    """
    loop = asyncio.get_running_loop()
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    tls = context.wrap_bio(incoming, outgoing, server_hostname=host)
    with socket.socket(socket.AF_INET6 if ":" in address else socket.AF_INET) as connection:
        connection.setblocking(False)

        async def done(work: Callable[[], Value]) -> Value:
            while True:
                try:
                    value = work()
                except ssl.SSLWantReadError:
                    is_done = False
                else:
                    is_done = True
                if outgoing.pending:
                    await loop.sock_sendall(connection, outgoing.read())
                if is_done:
                    return value
                if received := await loop.sock_recv(connection, RECORD_BYTES):
                    incoming.write(received)
                else:
                    incoming.write_eof()

        await loop.sock_connect(connection, (address, port))
        await done(tls.do_handshake)
        for at in range(0, len(data), RECORD_BYTES):
            await done(partial(tls.write, data[at : at + RECORD_BYTES]))
        await done(tls.unwrap)
        # A receiver that stops ends connections in order, too. Only if nothing of the batch is unread, its kernel has
        # acknowledged all and does not reset the connection.
        while await loop.sock_recv(connection, RECORD_BYTES):
            pass
        while any(fcntl.ioctl(connection, termios.TIOCOUTQ, bytes(4))):
            await asyncio.sleep(ACKNOWLEDGED_POLL_S)
            if error := connection.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR):
                raise OSError(error, os.strerror(error))
