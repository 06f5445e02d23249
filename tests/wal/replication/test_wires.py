"""Connections to members: one that is there and says nothing."""

from __future__ import annotations

import socket
import time
from contextlib import closing

from tests.wal.logs import WAIT_S
from wal.replication.wires import Connected, Event, Lost, Wires


def test_a_member_that_says_nothing_is_lost_once_it_was_silent_for_as_long_as_it_may() -> None:
    with socket.create_server(("127.0.0.1", 0)) as silent:
        address = f"127.0.0.1:{silent.getsockname()[1]}"
        with closing(Wires({address: "use1"}, None, timeout_s=0.3)) as wires:
            events: list[Event] = []
            ends_s = time.monotonic() + WAIT_S
            while len(events) < 2 and time.monotonic() < ends_s:
                wires.open_due()
                events += wires.wait(0.05)
    assert events == [Connected(address), Lost(address, "nothing was heard for 0.3 s")]
