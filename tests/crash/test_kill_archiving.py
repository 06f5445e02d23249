"""The node that fills the archive is killed or stopped: another one, or its own restart, goes on where it ended."""

from __future__ import annotations

import asyncio
from functools import partial
from pathlib import Path
from typing import Protocol

import pytest

from app.share.archive import TURN_INTERVAL_S
from objects.store import ArchiveStore
from pipeline.archive.reader import TenantArchive, tenants_of, verify_tenant
from pipeline.archive.table_reader import verify_table
from pipeline.archiving.continuous import Archiver
from signing.keys import Keyring
from signing.private_keys import load
from tests.app.chains import until
from tests.conftest import Database
from tests.crash.conftest import Launch
from tests.crash.serve_process import ServeProcess
from tests.crash.test_nodes import asked

ROUNDS = 3
JOBS_A_ROUND = 20
BUSY_S = 20.0
"""What a busy machine may add to a wait."""

KEY = "signing.pem"


class Start(Protocol):
    """Starts a node of the ledger by its id; the process and its URL."""

    async def __call__(self, node_id: str, interval: str = "1h") -> tuple[ServeProcess, str]: ...


@pytest.fixture
def start(launch: Launch, database: Database, tmp_path: Path) -> Start:
    async def start(node_id: str, interval: str = "1h") -> tuple[ServeProcess, str]:
        child = await launch(
            tmp_path / node_id,
            database.service_url,
            node_id=node_id,
            signing__key_uri=f"file:{tmp_path / KEY}",
            archive__url=tmp_path / "archive",
            archive__interval=interval,
            chain__batch_interval="100ms",
        )
        return child, await child.ready()

    return start


async def has_turn(url: str) -> bool:
    return bool((await asked(url, "/v1/archive"))["has_turn"])


async def archived_seq(url: str) -> int:
    answer = await asked(url, "/v1/archive")
    return next((each["archived_to_seq"] for each in answer["tenants"] if each["tenant_id"] == "acme"), 0)


async def write(url: str, jobs: int = 1) -> None:
    for _ in range(jobs):
        await asked(url, "/v1/jobs", json={"tenant_id": "acme", "durability": "GLOBAL"})


async def verified(folder: Path, key: Path) -> dict[str, TenantArchive]:
    """What is archived by tenant, once it and its table are verified; nothing else lies there."""
    place, ring = ArchiveStore(str(folder)), Keyring([load(str(key)).public_key])
    for tenant_id in tenants_of(place):
        told = await verify_tenant(place, tenant_id, ring)
        assert told["valid"], told["first_break"]
    archives = {each: TenantArchive.read(place, each, ring) for each in tenants_of(place)}
    table = verify_table(place, {name: each.sealed for name, each in archives.items()}, ring)
    assert table["verdict"] == "ok", table
    named = [file.name for each in archives.values() for sealed in each.sealed for file in sealed.manifest.files]
    assert sorted(named) == sorted(each.relative_to(folder).as_posix() for each in folder.rglob("*.parquet"))
    return archives


@pytest.mark.parametrize("end", ["kill", "terminate"])
async def test_the_turn_is_free_at_once_when_the_node_that_has_it_ends(start: Start, end: str) -> None:
    """The interval is an hour: what is waited for is the turn alone."""
    first, url = await start("node-a")
    await until(lambda: has_turn(url), "the first node archives")
    second, other_url = await start("node-b")
    assert not await has_turn(other_url)

    await getattr(first, end)()

    await until(lambda: has_turn(other_url), "the second takes over", TURN_INTERVAL_S + BUSY_S)
    await getattr(second, end)()
    _, url = await start("node-b")
    await until(lambda: has_turn(url), "its restart takes the turn again", TURN_INTERVAL_S + BUSY_S)


@pytest.mark.torture
async def test_nodes_that_are_killed_while_they_archive_leave_one_chain_of_manifests(
    start: Start, database: Database, tmp_path: Path
) -> None:
    nodes = {each: await start(each, "1s") for each in ("node-a", "node-b")}
    for written in range(JOBS_A_ROUND, (ROUNDS + 1) * JOBS_A_ROUND, JOBS_A_ROUND):
        holder: str = await until(partial(holder_of, nodes), "one of them has the turn")
        (other,) = nodes.keys() - {holder}
        seq = await archived_seq(nodes[holder][1])
        writing = asyncio.create_task(write(nodes[other][1], JOBS_A_ROUND))
        await until(partial(is_beyond, nodes[holder][1], seq), "the holder archives what is written")
        await nodes[holder][0].kill()
        await writing
        all_of_it = partial(is_beyond, nodes[other][1], written - 1)
        await until(all_of_it, "the other archives all of it", TURN_INTERVAL_S + BUSY_S)
        nodes[holder] = await start(holder, "1s")
    for child, _ in nodes.values():
        assert await child.terminate() == 0
    archiver, signer = (
        Archiver(database.service_url, ArchiveStore(str(tmp_path / "archive"))),
        load(str(tmp_path / KEY)),
    )
    last = archiver.step(signer, Keyring([signer.public_key]))
    archiver.close()

    assert (last.has_turn, last.failures) == (True, 0)
    assert (await verified(tmp_path / "archive", tmp_path / KEY))["acme"].newest.to_seq == ROUNDS * JOBS_A_ROUND


async def holder_of(nodes: dict[str, tuple[ServeProcess, str]]) -> str | None:
    for node_id, (_, url) in nodes.items():
        if await has_turn(url):
            return node_id
    return None


async def is_beyond(url: str, seq: int) -> bool:
    return await has_turn(url) and await archived_seq(url) > seq
