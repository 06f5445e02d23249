"""Names of receivers whose servers never answer hold up no other name."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import threading
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest

from app.share.webhooks.sending import Names

SILENT = [f"h{number}.stalls.example" for number in range(32)]


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> Iterator[Counter[str]]:
    """How often the system is asked for each name; those of ``stalls.example`` wait until the test is over."""
    over, asked, look_up = threading.Event(), Counter[str](), socket.getaddrinfo

    def stalling(host: str, *more: Any, **options: Any) -> Any:
        asked[host] += 1
        if host.endswith("stalls.example"):
            over.wait(100)
            raise socket.gaierror(socket.EAI_AGAIN, "no server answers")
        return look_up(host, *more, **options)

    monkeypatch.setattr(socket, "getaddrinfo", stalling)
    yield asked
    over.set()


async def test_a_name_that_is_never_found_holds_up_no_other_and_is_asked_for_once(asked: Counter[str]) -> None:
    names = Names()
    for _ in range(3):
        for name in SILENT:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(0.001):
                    await names.addresses(name)
    assert "127.0.0.1" in await asyncio.wait_for(names.addresses("localhost"), 20)
    assert asked == Counter({**dict.fromkeys(SILENT, 1), "localhost": 1})


async def test_what_is_not_found_is_looked_up_anew() -> None:
    names = Names()
    for _ in range(2):
        with pytest.raises((OSError, UnicodeError)):
            await names.addresses("a" * 70 + ".example")
