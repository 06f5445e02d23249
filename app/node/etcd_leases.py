"""Leases in etcd, by its JSON gateway: a key for each node, which goes with the lease of who put it there."""

from __future__ import annotations

import base64
import json
import ssl
from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any

import httpx

from app.runtime.outgoing import NoAnswerError, client_of, read_answer
from app.store.node import HeldLease
from wal.replication.tls import PeerTls

PREFIX = "tallystick/wal/"
TIMEOUT_S = 5.0
ANSWER_BYTES_MAX = 256 * 1024


class EtcdLeases:
    """The leases in the etcd cluster at ``urls``, each tried in turn."""

    def __init__(self, urls: Sequence[str], tls: PeerTls | None) -> None:
        self._urls = list(urls)
        of_system = cache(partial(httpx.create_ssl_context, trust_env=False))
        self._context: Callable[[], ssl.SSLContext] = tls.context if tls is not None else of_system
        self._ids: dict[tuple[str, str], str] = {}
        """etcd's id of the lease by node and run."""

    async def take(
        self, node_id: str, holder: str, run: str, ttl_s: float, *, seize: bool = False, ran_out: bool = True
    ) -> HeldLease:
        # ran_out: etcd itself lets every lease last for its ttl once more when its cluster has a leader again
        key = _text(PREFIX + node_id)
        lease_id = (await self._post("/v3/lease/grant", {"TTL": max(1, round(ttl_s))}))["ID"]
        value = json.dumps({"holder": holder, "run": run})
        put = {"requestPut": {"key": key, "value": _text(value), "lease": lease_id}}
        expected: dict[str, object] = {"key": key, "target": "CREATE", "result": "EQUAL", "createRevision": "0"}
        while True:
            done = await self._post(
                "/v3/kv/txn",
                {"compare": [expected], "success": [put], "failure": [{"requestRange": {"key": key}}]},
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
                revision = found[0]["mod_revision"]
                expected = {"key": key, "target": "MOD", "result": "EQUAL", "modRevision": revision}
                continue
            await self._post("/v3/lease/revoke", {"ID": lease_id})
            left = await self._post("/v3/lease/timetolive", {"ID": found[0]["lease"]})
            return HeldLease(theirs["holder"], theirs["run"], float(left.get("TTL", 0)))

    async def renew(self, node_id: str, run: str, ttl_s: float) -> bool:
        lease_id = self._ids.get((node_id, run))
        if lease_id is None:
            return False
        kept = await self._post("/v3/lease/keepalive", {"ID": lease_id})
        if not int(kept.get("result", {}).get("TTL", 0)):
            return False
        found = await self._post("/v3/kv/range", {"key": _text(PREFIX + node_id)})
        return bool(found.get("kvs")) and found["kvs"][0].get("lease") == lease_id

    async def release(self, node_id: str, run: str) -> None:
        lease_id = self._ids.pop((node_id, run), None)
        if lease_id is not None:
            await self._post("/v3/lease/revoke", {"ID": lease_id})

    async def _post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """The answer of the first member that gives one.

        Raises:
            OSError: none does.
        """
        failed = "no URL"
        async with client_of(self._context(), timeout_s=TIMEOUT_S) as client:
            for url in list(self._urls):
                place = url.rstrip("/") + path
                try:
                    answer = await read_answer(
                        client, "POST", place, bytes_max=ANSWER_BYTES_MAX, within_s=TIMEOUT_S, json=body
                    )
                    found: dict[str, Any] = json.loads(answer)
                    return found
                except (NoAnswerError, ValueError) as error:
                    failed = f"{url}: {error}"
                self._urls.append(self._urls.pop(0))
        raise OSError(f"etcd cannot be asked: {failed}")


def _text(value: str) -> str:
    return base64.b64encode(value.encode()).decode()
