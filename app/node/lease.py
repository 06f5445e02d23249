"""The lease on a node's WAL: which of several processes tries to write it.

A standby waits while the writer lives and continues soon after the writer died. Safety does not depend on the lease: a
writer whose lease expired is fenced, at the safekeepers and in Postgres, by the epoch that another process won.

What no safekeeper and no transaction confirms is LOCAL: the record is on this disk. The node answers it while the lease
is certain to last (``Lease.is_held``): one TTL from before the last renewal was sent, by a clock that counts suspended
time. So a process that wakes after its lease expired answers nothing from what it remembers (decision 0096).
"""

from __future__ import annotations

import asyncio
import base64
import json
import math
import secrets
import ssl
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from functools import cache, partial
from pathlib import Path
from typing import Any, Protocol

import httpx

from app.runtime.logs import log
from app.runtime.outgoing import NoAnswerError, client_of, read_answer
from app.runtime.state.wall_clock import running_s
from app.store.node import HeldLease
from ledger.errors import FencedError, LedgerError, StartRefusedError
from signing.files import read_regular
from wal.replication.tls import PeerTls
from wal.segment import store_file

LOOKS_A_TTL = 5
"""How often in one TTL a standby checks whether the lease is free, and its holder renews it."""

RELEASE_TIMEOUT_S = 2.0
"""How long a stop waits for the release at most; a lease that is not released expires."""

RATE_MARGIN = 0.001
"""Part of a TTL that is not relied on, because the clocks of the node and of the store may run at different rates."""

HOLDER_NAME = "holder"


def holder_of(folder: Path) -> str:
    """The holder name that all runs on this WAL folder share, made once.

    Raises:
        StartRefusedError: the file with its name cannot be read.
    """
    path = folder / HOLDER_NAME
    if not path.exists():
        store_file(path, secrets.token_hex(8).encode())
    try:
        return read_regular(path).decode()
    except (OSError, UnicodeDecodeError) as error:
        raise StartRefusedError(
            f"the name of this node as a holder of leases cannot be read from {path}: {error}. Remove it: the next "
            "start makes another one, and waits until the lease has run out"
        ) from error


class Leases(Protocol):
    """A store of leases. A store that cannot be reached raises OSError, or an error of its driver."""

    async def take(
        self, node_id: str, holder: str, run: str, ttl_s: float, *, seize: bool = False, ran_out: bool = True
    ) -> HeldLease:
        """Take the lease if it is free or held by the same holder or run; with ``ran_out`` also if it expired, with
        ``seize`` in any case. Returns its holder after that."""

    async def renew(self, node_id: str, run: str, ttl_s: float) -> bool:
        """Renew the lease from now; False when another run holds it, or none does."""

    async def release(self, node_id: str, run: str) -> None:
        """Release the lease at once; does nothing when another run holds it."""


@dataclass(eq=False)
class Lease:
    """The lease of ``node_id`` for one run. ``holder`` is the same for every run on one WAL folder: a process that
    holds the lock of that folder need not wait for the lease of an earlier process that died there."""

    leases: Leases
    node_id: str
    holder: str
    run: str
    ttl_s: float
    faults: tuple[type[BaseException], ...]
    """Errors of a store that cannot be reached."""
    is_reached: bool = True
    """Whether the last attempt to renew it reached the store."""
    now_s: Callable[[], float] = running_s
    """A clock that no one sets and that counts suspended time."""
    _lasts_until_s: float = field(default=-math.inf, init=False)

    def is_held(self) -> bool:
        """Whether the lease is certain to last: no other run takes it unless an operator seizes it or the clock of the
        store is set ahead."""
        return self.now_s() < self._lasts_until_s

    def _renewed(self, asked_s: float) -> None:
        """The store renewed the lease, in answer to a request of ``asked_s``."""
        self._lasts_until_s = asked_s + self.ttl_s * (1 - RATE_MARGIN)

    async def take(self, *, seize: bool = False, on_waiting: Callable[[], Awaitable[None]] | None = None) -> None:
        """Return once this run holds the lease, however long another run does. A wait that has started survives an
        outage of the store. ``on_waiting()`` is awaited once, if another run holds the lease.

        During an outage of the store the holder cannot renew either. So a lease that expired meanwhile is not taken at
        once, but only after the holder could have renewed it for a TTL and did not.
        """
        loop = asyncio.get_running_loop()
        waits, asked_since_s = False, -math.inf
        while True:
            ran_out = loop.time() - asked_since_s >= self.ttl_s
            asked_s = self.now_s()
            try:
                held = await self.leases.take(
                    self.node_id, self.holder, self.run, self.ttl_s, seize=seize, ran_out=ran_out
                )
            except self.faults as error:
                if not waits:
                    raise
                if asked_since_s < math.inf:
                    log.warning("wal_lease_not_asked", node_id=self.node_id, error=str(error))
                asked_since_s = math.inf
            else:
                if held.run == self.run:
                    self._renewed(asked_s)
                    log.info("wal_lease_taken", node_id=self.node_id, waited=waits)
                    return
                if not waits or asked_since_s == math.inf:
                    log.info(
                        "wal_lease_waiting", node_id=self.node_id, holder=held.holder, left_s=round(held.left_s, 1)
                    )
                if not waits and on_waiting is not None:
                    await on_waiting()
                waits, asked_since_s = True, min(asked_since_s, loop.time())
            await asyncio.sleep(self.ttl_s / LOOKS_A_TTL)

    async def keep(self, on_lost: Callable[[LedgerError], None]) -> None:
        """Renew the lease for ever; when another run holds it, call ``on_lost`` and return. While no store answers the
        epoch decides."""
        while True:
            await asyncio.sleep(self.ttl_s / LOOKS_A_TTL)
            asked_s = self.now_s()
            try:
                if not await self.leases.renew(self.node_id, self.run, self.ttl_s):
                    on_lost(FencedError(f"the lease of {self.node_id} is another's; this process stops"))
                    return
                self.is_reached = True
                self._renewed(asked_s)
            except self.faults as error:
                if self.is_reached:
                    log.warning("wal_lease_not_renewed", node_id=self.node_id, error=str(error))
                self.is_reached = False

    async def release(self) -> None:
        """Release the lease, so that a standby continues at once."""
        try:
            async with asyncio.timeout(min(self.ttl_s / LOOKS_A_TTL, RELEASE_TIMEOUT_S)):
                await self.leases.release(self.node_id, self.run)
        except self.faults as error:
            log.warning("wal_lease_not_released", node_id=self.node_id, error=str(error))


# --- leases in etcd -------------------------------------------------------------------------------

PREFIX = "tallystick/wal/"
TIMEOUT_S = 5.0
ANSWER_BYTES_MAX = 256 * 1024


class EtcdLeases:
    """The leases in the etcd cluster at ``urls``, each tried in turn."""

    def __init__(self, urls: Sequence[str], tls: PeerTls | None) -> None:
        self._urls = list(urls)
        self._context: Callable[[], ssl.SSLContext] = (
            tls.context if tls is not None else cache(partial(httpx.create_ssl_context, trust_env=False))
        )
        self._ids: dict[tuple[str, str], str] = {}
        """etcd's id of the lease by node and run."""

    async def take(
        self, node_id: str, holder: str, run: str, ttl_s: float, *, seize: bool = False, ran_out: bool = True
    ) -> HeldLease:
        # ran_out: etcd itself lets every lease last for its ttl once more when its cluster has a leader again
        key = _text(PREFIX + node_id)
        lease_id = (await self._post("/v3/lease/grant", {"TTL": math.ceil(ttl_s)}))["ID"]
        put = {"key": key, "value": _text(json.dumps({"holder": holder, "run": run})), "lease": lease_id}
        expected: dict[str, object] = {"key": key, "target": "CREATE", "result": "EQUAL", "createRevision": "0"}
        while True:
            done = await self._post(
                "/v3/kv/txn",
                {"compare": [expected], "success": [{"requestPut": put}], "failure": [{"requestRange": {"key": key}}]},
            )
            if done.get("succeeded"):
                self._ids[node_id, run] = lease_id
                return HeldLease(holder, run, ttl_s)
            found = done["responses"][0].get("response_range", {}).get("kvs", [])
            if not found:
                expected = {"key": key, "target": "CREATE", "result": "EQUAL", "createRevision": "0"}
                continue
            theirs = json.loads(base64.b64decode(found[0]["value"]))
            if seize or theirs["holder"] == holder:
                expected = {"key": key, "target": "MOD", "result": "EQUAL", "modRevision": found[0]["mod_revision"]}
                continue
            await self._post("/v3/lease/revoke", {"ID": lease_id})
            left = await self._post("/v3/lease/timetolive", {"ID": found[0]["lease"]})
            return HeldLease(theirs["holder"], theirs["run"], float(left.get("TTL", 0)))

    async def renew(self, node_id: str, run: str, ttl_s: float) -> bool:
        lease_id = self._ids.get((node_id, run))
        kept = {} if lease_id is None else await self._post("/v3/lease/keepalive", {"ID": lease_id})
        if not int(kept.get("result", {}).get("TTL", 0)):
            return False
        found = await self._post("/v3/kv/range", {"key": _text(PREFIX + node_id)})
        return bool(found.get("kvs")) and found["kvs"][0].get("lease") == lease_id

    async def release(self, node_id: str, run: str) -> None:
        if (lease_id := self._ids.pop((node_id, run), None)) is not None:
            await self._post("/v3/lease/revoke", {"ID": lease_id})

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer of the first member that answers.

        Raises:
            OSError: none does.
        """
        failed = "no URL"
        async with client_of(self._context(), timeout_s=TIMEOUT_S) as client:
            for url in list(self._urls):
                place = url.rstrip("/") + path
                try:
                    found: dict[str, Any] = json.loads(
                        await read_answer(
                            client, "POST", place, bytes_max=ANSWER_BYTES_MAX, within_s=TIMEOUT_S, json=body
                        )
                    )
                    return found
                except (NoAnswerError, ValueError) as error:
                    failed = f"{url}: {error}"
                self._urls.append(self._urls.pop(0))
        raise OSError(f"etcd cannot be asked: {failed}")


def _text(value: str) -> str:
    return base64.b64encode(value.encode()).decode()
