"""``tally serve --nodes``: several nodes of one ledger behind one port, as processes that are killed and stopped."""

from __future__ import annotations

import os
import signal
import socket
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from tests.app.chains import until
from tests.conftest import Database
from tests.crash.conftest import Launch
from tests.crash.serve_process import ServeProcess
from tests.processes import runs

JOB = {"tenant_id": "acme", "spec": {}, "assigned_dcs": ["use1"]}
TWO = ("--nodes", "2")


async def asked(url: str, path: str, *, json: Any = None, **headers: str) -> dict[str, Any]:
    """The answer to one request, over a connection of its own."""
    async with httpx.AsyncClient(base_url=url, trust_env=False, timeout=60) as client:
        answer = await client.request("GET" if json is None else "POST", path, json=json, headers=headers)
    assert answer.status_code in (200, 201), answer.text
    found: dict[str, Any] = answer.json()
    return found


async def own_urls(child: ServeProcess, count: int = 2) -> dict[str, str]:
    """By node id, where each of ``count`` nodes answers alone; the newest address of one that began again."""

    def known() -> dict[str, str] | None:
        found = {each["node_id"]: each["url"] for each in child.events("own_address")}
        return found if len(found) >= count else None

    urls: dict[str, str] = await until(known, f"{count} nodes say their addresses")
    return urls


def pids(child: ServeProcess) -> Sequence[int]:
    """The processes of the nodes, by node."""
    return [each["pid"] for each in sorted(child.events("node_started"), key=lambda each: each["node"])]


async def test_two_nodes_share_a_port_and_sessions_and_one_that_was_killed_comes_back(
    launch: Launch, database: Database, tmp_path: Path
) -> None:
    child = await launch(tmp_path / "data", database.service_url, arguments=TWO, node_id="node-m")
    url = await child.ready()
    own = await own_urls(child)
    assert sorted(own) == ["node-m-1", "node-m-2"]
    for node_id, its in own.items():
        assert (await asked(its, "/v1/node"))["node_id"] == node_id
    assert sorted(each.name for each in (tmp_path / "data" / "nodes").iterdir()) == ["1", "2"]

    async def spread() -> bool:
        seen.add((await asked(url, "/v1/node"))["node_id"])
        return seen == set(own)

    seen: set[str] = set()
    await until(spread, "connections come to both")

    written = await asked(own["node-m-1"], "/v1/jobs", json=JOB | {"durability": "LOCAL"})
    path = f"/v1/jobs/{written['job_id']}?tenant_id=acme&consistency=SESSION"
    there = await asked(own["node-m-2"], path, **{"Tally-Session": written["session"]})
    assert there["consistency"]["level"] == "SESSION"
    assert there["job_id"] == written["job_id"]
    # One key begins the chain of keys, that of the first node; the other waits to be admitted.
    known = await asked(own["node-m-1"], "/v1/keys")
    assert len(known["keys"]) == 1
    killed = pids(child)[1]
    os.kill(killed, signal.SIGKILL)
    ended = await child.says("node_ended")
    assert (ended["node"], ended["exit_code"]) == (2, 1)
    # Nobody listens in its place: each new connection goes to the node that lives.
    for _ in range(8):
        await asked(url, f"/v1/jobs/{written['job_id']}?tenant_id=acme")
    await until(lambda: len(child.events("own_address")) == 3, "the killed node answers again")
    assert set(await own_urls(child)) == set(own)
    assert len(set(pids(child))) == 3
    assert await child.terminate() == 0
    assert not any(map(runs, pids(child)))


async def test_nodes_end_when_the_parent_is_killed(launch: Launch, database: Database, tmp_path: Path) -> None:
    child = await launch(tmp_path / "data", database.service_url, arguments=TWO)
    await own_urls(child)
    children = pids(child)
    await child.kill()
    await until(lambda: not any(map(runs, children)), "both nodes end")


async def test_a_refused_start_of_one_node_ends_all(launch: Launch, database: Database, tmp_path: Path) -> None:
    data = tmp_path / "data"
    (data / "nodes" / "2").mkdir(parents=True)
    (data / "nodes" / "2" / "wal").write_text("a file where a folder belongs")
    child = await launch(data, database.service_url, arguments=TWO)
    assert await child.ended() == 1
    assert (await child.says("node_start_refused"))["node"] == 2
    assert not any(map(psutil.pid_exists, pids(child)))


async def test_what_is_of_one_node_and_a_port_in_use_are_refused(
    launch: Launch, database: Database, tmp_path: Path
) -> None:
    child = await launch(tmp_path / "one", database.service_url, arguments=TWO, gate="gate1")
    assert await child.ended() == 1
    assert "gate is that of one node" in child.last_words()
    child = await launch(tmp_path / "two", database.service_url, arguments=(*TWO, "--accept-lost-wal"))
    assert await child.ended() == 1
    assert "--accept-lost-wal is for one node" in child.last_words()
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        child = await launch(tmp_path / "three", database.service_url, arguments=TWO, port=port)
        assert await child.ended() == 1
    assert f"cannot listen on 127.0.0.1:{port}" in child.last_words()
