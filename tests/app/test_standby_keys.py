"""A standby, and whether what it signs would count: said while it waits, and mended as the runbook says."""

from __future__ import annotations

import asyncio
import shutil
from contextlib import AsyncExitStack
from pathlib import Path

import httpx
import pytest
from structlog.testing import capture_logs

from tests.app.admitting import is_admitted, start_recorded, waiting_keys
from tests.app.chains import until
from tests.app.conftest import RunServer
from tests.app.test_replication import Keepers, MakeReplicated, keepers, replicated, submit
from tests.tally import run_tally

__all__ = ["Keepers", "keepers", "replicated"]


@pytest.mark.parametrize("has_keys", [False, True])
async def test_a_standby_says_that_it_could_not_sign_and_signs_once_its_key_is_admitted(
    replicated: MakeReplicated, run_server: RunServer, tmp_path: Path, *, has_keys: bool
) -> None:
    root_key = tmp_path / "disk" / "keys" / "signing.pem"
    async with AsyncExitStack() as first:
        client = await first.enter_async_context(run_server(replicated()))
        await submit(client, "GLOBAL")
        await start_recorded(client)
        if has_keys:
            shutil.copytree(root_key.parent, tmp_path / "another" / "keys")
        with capture_logs() as logs:
            taken_over: asyncio.Future[httpx.AsyncClient] = asyncio.get_running_loop().create_future()
            is_done = asyncio.Event()

            async def stand_by() -> None:
                async with run_server(replicated("another")) as standby:
                    taken_over.set_result(standby)
                    await is_done.wait()

            standing_by = asyncio.create_task(stand_by())

            def told() -> list[str]:
                return [each["event"] for each in logs]

            await until(lambda: "wal_lease_waiting" in told(), "it waits")
            if not has_keys:
                await until(lambda: "standby_could_not_sign" in told(), "it says so at its start")
            await first.aclose()
        standby = await asyncio.wait_for(taken_over, 60)
        assert ("standby_could_not_sign" in told()) == (not has_keys)
        await submit(standby, "GLOBAL")
        if not has_keys:
            assert not await is_admitted(standby)
            (key_id,) = await until(lambda: waiting_keys(standby), "its key is in the chain")
            arguments = ("keys", "admit", key_id, "--root-key", root_key, "--url", str(standby.base_url))
            ended = await asyncio.to_thread(run_tally, *arguments)
            assert ended.returncode == 0, ended.stderr
        await until(lambda: is_admitted(standby), "what it signs counts")
        answer = await standby.post("/v1/snapshots", json={"tenant_id": "acme"})
        assert answer.status_code in (200, 201), answer.text
        is_done.set()
        await standing_by
