"""Asking a safekeeper how the logs that it keeps stand."""

from __future__ import annotations

import socket
import time
from typing import NamedTuple

from ledger.errors import InvalidInputError
from ledger.positions import Lsn
from wal.replication.frames import OWN_BYTES, Budget, FrameSocket
from wal.replication.messages import FRAME_BYTES_MAX, Frame, Message, Status, StatusReport, WalStatus
from wal.replication.tls import PeerTls


class Keeper(NamedTuple):
    """A safekeeper: where it stands, and its logs in the order of their nodes."""

    region: str
    wals: tuple[WalStatus, ...]


def connect(host: str, port: int, tls: PeerTls | None, timeout_s: float, stop: int | None = None) -> FrameSocket:
    """A connection to the safekeeper there; with ``tls`` its certificate MUST name ``host``.

    Raises:
        ConnectionOverError, OSError: it cannot be made in this time.
    """
    deadline_s = time.monotonic() + timeout_s
    connected = socket.create_connection((host, port), timeout_s)
    try:
        connected.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        if tls is None:
            return FrameSocket(connected, Budget(FRAME_BYTES_MAX), stop)
        connected.setblocking(False)
        secured = tls.context().wrap_socket(connected, do_handshake_on_connect=False, server_hostname=host)
    except BaseException:
        connected.close()
        raise
    spoken = FrameSocket(secured, Budget(FRAME_BYTES_MAX), stop)
    try:
        spoken.handshake(deadline_s - time.monotonic())
    except BaseException:
        spoken.close()
        raise
    return spoken


def status(host: str, port: int, tls: PeerTls | None, timeout_s: float) -> Keeper:
    """How a safekeeper stands; each of its answers is waited for so long.

    Raises:
        InvalidInputError: what answers there is none.
        ConnectionOverError, OSError: nobody answers there, or not in time.
    """
    spoken = connect(host, port, tls, timeout_s)
    try:
        region, wals, more = "", list[WalStatus](), True
        while more:
            spoken.send(Frame(Status(wals[-1].node_id if wals else "")))
            report = _report(spoken.next(timeout_s, OWN_BYTES).message)
            region, more = report.region, report.more
            wals += report.wals
        return Keeper(region, tuple(wals))
    finally:
        spoken.close()


def unchained_in(wal: WalStatus, wal_id: str, chained_lsn: Lsn) -> int:
    """How many records of this log are above ``chained_lsn``, what is chained of the log ``wal_id``; none where it is
    another one."""
    return max(0, max(wal.tail.lsn, wal.durable_lsn) - chained_lsn) if wal.wal_id == wal_id else 0


def _report(message: Message) -> StatusReport:
    if not isinstance(message, StatusReport):
        raise InvalidInputError(f"a safekeeper reports how it stands, and does not answer {message}")
    return message
