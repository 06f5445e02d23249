"""Server-sent events of ``GET /v1/watch``, over as many connections as it takes: each entry once, none left out."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from typing import Any, NamedTuple

from tallystick_client.answers import Entry
from tallystick_client.core import Core
from tallystick_client.errors import LaggedError, NotTheLedgerError, TransientError, UnreachableError

SEQ_DIGITS_MAX = 19
EVENT_BYTES_MAX = 16 << 20
"""Longest event that is read; the longest of the service has a fifth of that."""


class Event(NamedTuple):
    """A server-sent event; ``data`` is None of one that only says how far the service has come."""

    id: int | None
    name: str
    data: bytes | None


class Events:
    """The events in the bytes of a stream (HTML Living Standard, server-sent events)."""

    def __init__(self) -> None:
        self._rest = b""

    def feed(self, piece: bytes) -> list[Event]:
        """The events that ``piece`` completes."""
        *whole, self._rest = (self._rest + piece.replace(b"\r\n", b"\n")).split(b"\n\n")
        if len(self._rest) > EVENT_BYTES_MAX:
            raise NotTheLedgerError(f"an event does not end after {EVENT_BYTES_MAX:,} bytes")
        return [_event(text) for text in whole]


async def watched(core: Core, params: Mapping[str, Any], raise_lagged: bool) -> AsyncGenerator[Entry, None]:
    """The entries, connection after connection: at first for as long as ``core`` has patience, then for ever."""
    position: int | None = None
    failures, until = 0, time.monotonic() + core.patience_s
    while True:
        failed: Exception = UnreachableError("the stream ended")
        try:
            events = Events()
            resumed = {} if position is None else {"Last-Event-ID": str(position)}
            async with core.open("GET", "/v1/watch", "text/event-stream", params=params, headers=resumed) as pieces:
                until = float("inf")
                async for piece in pieces:
                    for event in events.feed(piece):
                        if event.data is None:
                            position = event.id if event.id is not None else position
                            continue
                        told = _json(event.data, ("from_seq", "head_seq") if event.name == "lagged" else ("seq",))
                        if event.name == "lagged":
                            position = told["from_seq"] - 1
                            if raise_lagged:
                                raise LaggedError(told["from_seq"], told["head_seq"])
                        else:
                            position, failures = told["seq"], 0
                            yield told
        except (UnreachableError, TransientError) as error:
            failed = error
        failures += 1
        delay_s = core.turn(failures, failed)
        if time.monotonic() + delay_s > until:
            raise failed
        if delay_s:
            await core.wait(delay_s, failed)


def _event(text: bytes) -> Event:
    told: int | None = None
    name, data = "", list[bytes]()
    for line in text.split(b"\n"):
        field, _, value = line.partition(b":")
        value = value.removeprefix(b" ")
        if field == b"id":
            told = int(value) if value.isdigit() and len(value) <= SEQ_DIGITS_MAX else None
        elif field == b"event":
            name = value.decode("utf-8", "replace")
        elif field == b"data":
            data.append(value)
    return Event(told, name, b"\n".join(data) if data else None)


def _json(data: bytes, whole_numbers: Sequence[str]) -> Any:
    try:
        told = json.loads(data)
    except (ValueError, RecursionError):
        told = None
    if not isinstance(told, dict) or not all(isinstance(told.get(name), int) for name in whole_numbers):
        raise NotTheLedgerError(f"a watched service does not answer as a Tallystick does: {data[:60]!r}")
    return told
