"""kill -9 of the node that delivers to a webhook, while it does: another goes on, and the receiver gets every entry."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import httpx

from tests.app.certificates import Authority
from tests.app.chains import until
from tests.app.receiver import STALLED, Receiver, is_signed, receiving
from tests.app.syslog_receiver import Does, receiving_syslog
from tests.conftest import Database
from tests.crash.conftest import Launch
from tests.crash.serve_process import ServeProcess

LINE = '{"tenant_id": "acme", "type": "JobCreated", "spec": {}, "assigned_dcs": ["x"]}\n'
NDJSON = {"Content-Type": "application/x-ndjson"}
NODES = ("node-a", "node-b")
KILLS = 2
"""One of each node, or both of one."""


async def write(client: httpx.AsyncClient, count: int) -> None:
    answer = await client.post("/v1/events?durability=GLOBAL", content=LINE * count, headers=NDJSON)
    assert answer.status_code == 200, answer.text


async def holds(client: httpx.AsyncClient) -> bool:
    return "webhooks_held 1.0" in (await client.get("/metrics")).text


async def head(client: httpx.AsyncClient) -> int:
    answer: dict[str, Any] = (await client.get("/v1/chain/head?tenant_id=acme")).json()
    return int(answer["seq"])


def check(receiver: Receiver, upto: int) -> None:
    """Every entry was taken; one that came again came no later than the batch behind it."""
    assert {*receiver.taken} == {*range(1, upto + 1)}
    batches = [each.seqs for each in receiver.requests if each.status == 200]
    for before, after in itertools.pairwise(batches):
        assert after[0] in (before[-1] + 1, before[0])


async def test_when_the_delivering_node_is_killed_another_goes_on_and_nothing_is_lost(
    launch: Launch, database: Database, tmp_path: Path
) -> None:
    shared = {
        "privacy__master_key_uri": f"file:{tmp_path / 'master.key'}",
        "webhooks__networks": "127.0.0.0/8",
    }

    async def begin(name: str) -> tuple[ServeProcess, httpx.AsyncClient]:
        child = await launch(tmp_path / name, database.service_url, node_id=name, gate=name[-1], **shared)
        return child, httpx.AsyncClient(base_url=await child.ready(), trust_env=False, timeout=60)

    async with receiving() as receiver:
        nodes = {name: await begin(name) for name in NODES}
        (_, first), _ = nodes.values()
        added = await first.post("/v1/webhooks", json={"tenant_id": "acme", "url": receiver.url, "from_seq": 1})
        assert added.status_code == 201, added.text
        await write(first, 600)
        for _ in range(KILLS):
            for name in {*NODES} - {*nodes}:
                nodes[name] = await begin(name)
            stalls = itertools.chain([200] * 2, itertools.repeat(STALLED))
            receiver.judge = lambda _, stalls=stalls: next(stalls)
            stalled = receiver.stalled
            for _, client in nodes.values():
                await write(client, 800)
            await until(lambda stalled=stalled: receiver.stalled > stalled, "a batch is under way")
            (name,) = [name for name, (_, client) in nodes.items() if await holds(client)]
            child, client = nodes.pop(name)
            receiver.judge = lambda _: 200
            await child.kill()
            await client.aclose()
            ((_, other),) = nodes.values()
            await write(other, 10)
            upto = await head(other)
            await until(lambda upto=upto: receiver.taken[-1] == upto, "the other node goes on")
            assert await holds(other)
            check(receiver, upto)
        assert all(is_signed(each, added.json()["secret"]) for each in receiver.requests)
        for child, client in nodes.values():
            await client.aclose()
            assert await child.terminate() == 0


async def test_a_syslog_server_has_every_entry_after_a_kill_and_twice_only_what_was_not_confirmed(
    launch: Launch, database: Database, tmp_path: Path
) -> None:
    authority = Authority(tmp_path / "certificates")
    settings = {"webhooks__networks": "127.0.0.0/8", "webhooks__ca": str(authority.ca_file)}

    async def begin() -> tuple[ServeProcess, httpx.AsyncClient]:
        child = await launch(tmp_path / "node", database.service_url, **settings)
        return child, httpx.AsyncClient(base_url=await child.ready(), trust_env=False, timeout=60)

    async with receiving_syslog(authority) as syslog:
        child, client = await begin()
        added = await client.post("/v1/webhooks", json={"tenant_id": "acme", "url": syslog.url, "from_seq": 1})
        assert added.status_code == 201, added.text
        await write(client, 600)
        await until(lambda: syslog.taken[-1:] == [600], "the first are delivered")
        for kill in range(KILLS):
            stalled, before = syslog.stalled, len(syslog.taken)
            syslog.judge = lambda: Does.STALL
            await write(client, 300)
            await until(lambda stalled=stalled: syslog.stalled > stalled, "a batch is under way")
            await child.kill()
            await client.aclose()
            syslog.judge = lambda: Does.READ
            child, client = await begin()
            upto = 900 + 300 * kill
            await until(lambda upto=upto: syslog.taken[-1:] == [upto], "it goes on")
            # The server had read none of the batch that was under way, and confirmed all before it.
            assert syslog.taken[before:] == [*range(upto - 299, upto + 1)]
        assert syslog.taken == [*range(1, upto + 1)]
        await client.aclose()
        assert await child.terminate() == 0
