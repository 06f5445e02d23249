"""Requests that are held open while the token that let them in is revoked: nothing is taken, or told, any more."""

from __future__ import annotations

import asyncio
import base64
import itertools
import json
import os
import socket

import asyncpg

from app.trust.callers import ASK_AGAIN_S, OpenToAll, is_outdated
from tests.app.served import Serve, Served


async def connected(served: Served, **given: int) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection whose client takes little at once."""
    host, _, port = served.url.rpartition("/")[2].rpartition(":")
    client = socket.socket()
    client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    client.setblocking(False)
    await asyncio.get_running_loop().sock_connect(client, (host, int(port)))
    return await asyncio.open_connection(sock=client, **given)


def head(path: str, token: str, media_type: str, body: bytes, more: str = "") -> bytes:
    return (
        f"POST {path} HTTP/1.1\r\nHost: localhost\r\nAuthorization: Bearer {token}\r\n{more}"
        f"Content-Type: {media_type}\r\nContent-Length: {len(body)}\r\n\r\n"
    ).encode()


BODIES = {
    "plain": ("/v1/jobs", "application/json", ""),
    "by-the-framework": ("/v1/jobs", "application/json", "X-Not-Plain: 1\r\n"),
    "lines": ("/v1/events", "application/x-ndjson", ""),
}
"""By the tenant that is written to."""


async def test_a_body_that_ends_after_its_token_was_revoked_is_not_taken(
    serve: Serve, superuser: asyncpg.Connection
) -> None:
    async with serve() as served, served.client(served.root) as root:
        for tenant_id, is_revoked in itertools.product(BODIES, (False, True)):
            path, media_type, more = BODIES[tenant_id]
            sent = {"tenant_id": tenant_id} | ({"type": "JobCreated"} if path == "/v1/events" else {})
            body = json.dumps(sent).encode()
            made = await served.issue("write", name="leaver")
            reader, writer = await connected(served)
            writer.write(head(path, made["token"], media_type, body, more) + body[:5])
            await writer.drain()
            assert (await root.get("/v1/whoami")).status_code == 200
            if is_revoked:
                assert (await root.delete(f"/v1/tokens/{made['token_id']}")).status_code == 200
            writer.write(body[5:])
            assert (await reader.readline()).split()[1].startswith(b"401" if is_revoked else b"20")
            writer.close()
        jobs = await superuser.fetch(
            "SELECT tenant_id, count(*) FROM scheduler.scheduler_log WHERE action = 'ENQUEUE' GROUP BY tenant_id"
        )
        assert all(count <= 1 for _, count in jobs)


def test_who_calls_is_asked_again_after_a_while_as_a_token_may_have_expired() -> None:
    assert not is_outdated(OpenToAll(), 10.0, 10.0 + ASK_AGAIN_S)
    assert is_outdated(OpenToAll(), 10.0, 10.01 + ASK_AGAIN_S)


async def test_an_export_ends_where_its_token_is_revoked(serve: Serve) -> None:
    async with serve() as served, served.client(served.root) as root:
        for _ in range(14):
            spec = {"noise": base64.b64encode(os.urandom(600_000)).decode()}
            assert (await root.post("/v1/jobs", json={"tenant_id": "acme", "spec": spec})).status_code == 201
        wanted = json.dumps({"tenant_id": "acme"}).encode()
        sizes = []
        for is_revoked in (False, True):
            made = await served.issue("audit", name="leaver")
            reader, writer = await connected(served, limit=4096)
            path, more = "/v1/bundles/export", "Connection: close\r\n"
            writer.write(head(path, made["token"], "application/json", wanted, more) + wanted)
            assert (await reader.readline()).split()[1] == b"200"
            if is_revoked:
                assert (await root.delete(f"/v1/tokens/{made['token_id']}")).status_code == 200
            size, last = 0, b""
            while piece := await reader.read(1 << 20):
                size, last = size + len(piece), (last + piece)[-5:]
            writer.close()
            assert (last == b"0\r\n\r\n") is not is_revoked
            sizes.append(size)
        assert sizes[1] < sizes[0]
