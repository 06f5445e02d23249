"""More silent connections than the process may open files: the ledger goes on, its log gets the files that it needs."""

from __future__ import annotations

import resource
import socket
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path

import httpx
import pytest

from tests.conftest import Database
from tests.crash import limited
from tests.crash.conftest import Launch
from tests.crash.proof import wal_folder
from wal.segment import list_segments

SILENT = 400
SMALL_SEGMENTS = {"wal__segment_bytes": 65536, "wal__batch_max_bytes": 65536, "wal__record_bytes_max": 65536}


def with_files(descriptors: int) -> tuple[str | Path, ...]:
    """The program that may open so many files."""
    return limited.PROGRAM, "NOFILE", str(descriptors)


@pytest.mark.parametrize("descriptors", [160, 256])
async def test_silent_connections_leave_the_log_its_files(
    tmp_path: Path, database: Database, launch: Launch, descriptors: int
) -> None:
    assert resource.getrlimit(resource.RLIMIT_NOFILE)[0] > SILENT + 100, "this test itself needs more files"
    child = await launch(tmp_path / "node", database.service_url, program=with_files(descriptors), **SMALL_SEGMENTS)
    url = await child.ready()
    host, port = url.removeprefix("http://").split(":")
    body = {"tenant_id": "acme", "durability": "GLOBAL", "spec": {"padding": "x" * 20_000}}
    with ExitStack() as stack:
        for _ in range(SILENT):
            stack.enter_context(socket.create_connection((host, int(port)), timeout=60))
        async with httpx.AsyncClient(base_url=url, timeout=60) as client:
            for _ in range(20):
                assert (await client.post("/v1/jobs", json=body)).status_code == 201
            assert (await client.get("/v1/chain/verify?tenant_id=acme")).json()["valid"] is True
            assert (await client.get("/readyz")).status_code == 200
        limited = await child.says("connections_limited")
        assert limited["connections_max"] == descriptors - limited["reserved"]
    assert len(list_segments(wal_folder(tmp_path / "node"))) > 4
    assert await child.terminate() == 0
    assert "Too many open files" not in child.last_words()


async def test_streams_leave_every_fourth_connection_of_a_process_that_may_open_few_files(
    tmp_path: Path, database: Database, launch: Launch
) -> None:
    child = await launch(tmp_path / "node", database.service_url, program=with_files(160))
    url = await child.ready()
    allowed = (await child.says("connections_limited"))["connections_max"]
    async with httpx.AsyncClient(base_url=url, timeout=60) as client, AsyncExitStack() as streams:
        assert (await client.post("/v1/jobs", json={"tenant_id": "acme", "durability": "GLOBAL"})).status_code == 201
        watch = "/v1/watch?tenant_id=acme"
        for _ in range(allowed * 3 // 4):
            assert (await streams.enter_async_context(client.stream("GET", watch))).status_code == 200
        refused = await streams.enter_async_context(client.stream("GET", watch))
        assert refused.status_code == 503
        assert f"{allowed * 3 // 4} clients watch here" in (await refused.aread()).decode()
        assert (await client.get("/readyz")).status_code == 200
    assert await child.terminate() == 0


async def test_a_process_that_may_open_hardly_any_files_is_told_so(
    tmp_path: Path, database: Database, launch: Launch
) -> None:
    child = await launch(tmp_path / "node", database.service_url, program=with_files(100))
    assert await child.ended() == 1
    assert "raise the limit (ulimit -n) to 1128" in child.last_words()
    assert "Traceback" not in child.last_words()
