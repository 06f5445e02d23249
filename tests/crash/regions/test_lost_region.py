"""A region is lost with its disks: the steps of docs/runbook.md, run as they are printed there, on three ledgers."""

from __future__ import annotations

import asyncio
import json
import re
import shutil
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from app.dev.embedded import EmbeddedPostgres
from tests.app.chains import until
from tests.app.client import Client
from tests.conftest import Database
from tests.crash.conftest import Launch
from tests.crash.regions.ledgers import REGIONS, Ledgers, databases_of
from tests.tally import bare_environment

RUNBOOK = Path(__file__).parents[3] / "docs" / "runbook.md"


class Page:
    """The blocks of commands below a heading of the runbook, in order."""

    def __init__(self, heading: str, given: dict[str, str], folder: Path) -> None:
        text = re.split(rf"^#+ {heading}\n", RUNBOOK.read_text(), flags=re.MULTILINE)[1]
        self._blocks = re.findall(r"```sh\n(.*?)```", re.split(r"^#+ ", text, flags=re.MULTILINE)[0], re.DOTALL)
        self._given, self._folder = given, folder

    async def run(self) -> str:
        """Run the next block; what it exports as an example has the value of this test. Returns what it printed."""
        block = self._blocks.pop(0)
        examples = re.findall(r"(?<=\s)([A-Z]+)=", block) if block.startswith("export") else []
        assert {*examples} <= {*self._given}, "the page exports what the test does not know"
        lines = [line for line in block.splitlines() if not line.startswith("export")]
        tally = f'tally() {{ "{sys.executable}" -m cli "$@"; }}'
        root = {"PYTHONPATH": str(RUNBOOK.parents[1])}
        done = await asyncio.to_thread(
            subprocess.run,
            ["bash", "-e", "-o", "pipefail", "-c", "\n".join([tally, *lines])],
            env=bare_environment() | root | self._given,
            cwd=self._folder,
            capture_output=True,
            text=True,
        )
        assert done.returncode == 0, (block, done.stdout, done.stderr)
        return done.stdout

    def has_ended(self) -> bool:
        return not self._blocks


@pytest.fixture
def databases(postgres: EmbeddedPostgres) -> Iterator[dict[str, Database]]:
    with databases_of(postgres, *REGIONS, "ap1 anew") as databases:
        yield databases


class Regions(Ledgers):
    """The three ledgers, with what the page asks of them."""

    async def submit(self, region: str, level: str = "GLOBAL") -> httpx.Response:
        body = {"tenant_id": "acme", "spec": {}, "assigned_dcs": ["x"], "durability": level}
        async with Client(base_url=self.url(region), timeout=30, trust_env=False) as client:
            return await client.post("/v1/jobs", json=body)

    async def is_global(self, region: str) -> bool:
        return (await self.submit(region)).status_code == 201

    async def get(self, region: str, path: str) -> httpx.Response:
        async with Client(base_url=self.url(region), timeout=30, trust_env=False) as client:
            return await client.get(path)

    async def is_known(self, region: str, job_id: str) -> bool:
        return (await self.get(region, f"/v1/jobs/{job_id}?tenant_id=acme")).status_code == 200


async def test_the_page_of_a_lost_region_is_followed_from_its_loss_to_its_return(
    launch: Launch, databases: dict[str, Database], tmp_path: Path
) -> None:
    regions = Regions(launch, databases, tmp_path)
    await regions.start_all()
    lost_job = (await regions.submit("ap1", "REGIONAL")).json()["job_id"]
    for region in ("use1", "eu1"):
        await until(lambda region=region: regions.is_known(region, lost_job), "it came over")  # type: ignore[misc]

    # 1. The region is lost with its disks.
    await regions.processes["ap1"].kill()
    shutil.rmtree(tmp_path / "ap1")
    (regions.trusted / "ap1.pem").unlink()
    await until(lambda: regions.is_global("use1"), "two of three regions are a majority")
    given = {
        "HERE": regions.url("use1"),
        "THERE": regions.url("eu1"),
        "RETURNED": regions.url("ap1"),
        "LOST": "ap1",
        "TENANT": "acme",
        "REASON": "fire in ap1",
        "KEY": "",
        "JOB": lost_job,
        "auth": "Accept: */*",
    }
    page = Page("A region is lost", given, tmp_path)
    await page.run()
    seen = await page.run()
    assert seen.count(f"region ap1, {regions.url('ap1')}: fails") == 2

    # 2. It is retired. Then both that are left are needed.
    assert (await page.run()).count("region ap1: retired since") == 2
    for region in ("use1", "eu1"):
        checks = (await regions.get(region, "/readyz")).json()["checks"]
        assert checks["exchange"]["ok"], checks["exchange"]
    await until(lambda: regions.is_global("use1"), "both that are left hold it")
    regions.processes["eu1"].signal(signal.SIGSTOP)
    late = await regions.submit("use1")
    assert (late.status_code, regions.url("eu1") in late.json()["detail"]) == (503, True)
    regions.processes["eu1"].signal(signal.SIGCONT)
    await until(lambda: regions.is_global("use1"), "both that are left hold it again")

    # 3. Its jobs are listed and cancelled at a living region.
    assert lost_job in await page.run()
    assert json.loads(await page.run())["durability"]["achieved"] == "GLOBAL"
    job = (await regions.get("eu1", f"/v1/jobs/{lost_job}?tenant_id=acme")).json()
    assert (job["status"], job["job_id"]) == ("CANCELLING", lost_job)
    assert page.has_ended()

    # 4. It returns with an empty disk, as a new ledger.
    await regions.start("ap1", on="ap1 anew")
    listed = (await regions.get("ap1", "/v1/keys")).json()["keys"]
    given["KEY"] = next(each["key_id"] for each in listed if each["signs_checkpoints"])
    back = Page("The region returns", given, tmp_path)
    assert "region ap1, " in await back.run()
    await until(lambda: regions.is_known("ap1", lost_job), "it has what the others had of it")
    regions.processes["eu1"].signal(signal.SIGSTOP)
    await until(lambda: regions.is_global("use1"), "it counts again")
    # What a ledger that wakes whole has is brought by a bundle in the same way.
    new_job = (await regions.submit("ap1", "REGIONAL")).json()["job_id"]
    await back.run()
    assert back.has_ended()
    assert await regions.is_known("use1", new_job)
