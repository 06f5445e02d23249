"""Connections to members: one that is there and says nothing, one that is looked up for too long."""

from __future__ import annotations

import os
import socket
import threading
import time
from contextlib import closing, suppress
from pathlib import Path
from typing import Any

import pytest

from ledger.errors import InvalidInputError
from tests.wal.logs import WAIT_S
from wal.replication.frames import Budget, ConnectionOverError, FrameSocket, status
from wal.replication.messages import FRAME_BYTES_MAX, Frame, StatusReport, WalStatus
from wal.replication.wires import Connected, Event, Lost, Wires

WAL = WalStatus("node-1", "open")


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


@pytest.mark.parametrize("wals", [(), (WAL,)])
def test_a_member_that_reports_without_end_is_refused(wals: tuple[WalStatus, ...]) -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:

        def report() -> None:
            with suppress(OSError, ConnectionOverError):
                connection, _ = listener.accept()
                with closing(FrameSocket(connection, Budget(FRAME_BYTES_MAX))) as frames:
                    while True:
                        frames.next(WAIT_S)
                        frames.send(Frame(StatusReport("use1", wals, more=True)))

        reporting = threading.Thread(target=report)
        reporting.start()
        with pytest.raises(InvalidInputError, match="none twice"):
            status("127.0.0.1", listener.getsockname()[1], None, WAIT_S)
        reporting.join(WAIT_S)


def test_a_lookup_that_ends_late_writes_to_nobody_elses_descriptor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    asked, answered = threading.Event(), threading.Event()

    def look_up_slowly(*_: Any, **__: Any) -> Any:
        asked.set()
        answered.wait(WAIT_S)
        raise OSError("no such host")

    monkeypatch.setattr(socket, "getaddrinfo", look_up_slowly)
    wires = Wires({"far-away:5000": "use1"}, None, WAIT_S)
    wires.open_due()
    assert asked.wait(WAIT_S)
    (connector,) = [each for each in threading.enumerate() if each.name == "wal-connector"]
    fd = wires.wake_fd
    wires.close()
    with (tmp_path / "segment").open("wb") as others:
        os.dup2(others.fileno(), fd)
        answered.set()
        connector.join(WAIT_S)
        os.close(fd)
    assert (tmp_path / "segment").read_bytes() == b""
