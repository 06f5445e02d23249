"""Reports beyond what a node counts by itself, made by Spark beside it: rights, progress, failure, what they leave."""

from __future__ import annotations

import asyncio
import os
import sys
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple
from urllib.parse import urlsplit

import asyncpg
import httpx
import psutil
import pytest

from app.read.job_reports import JobReports
from app.read.spark_reports import SparkFailedError, SparkReports
from tests.app.chains import until
from tests.app.served import Serve

LARGE = "UPDATE scheduler.jobs SET seqs = array_fill(1, ARRAY[1000001]) WHERE tenant_id = 'acme' AND job_id = 'job-0'"


async def fill(client: httpx.AsyncClient, superuser: asyncpg.Connection) -> None:
    """Two jobs of ``acme``, which the job table counts as if they followed from more than a million entries."""
    for number in range(2):
        body = {"tenant_id": "acme", "job_id": f"job-{number}", "durability": "GLOBAL"}
        assert (await client.post("/v1/jobs", json=body)).status_code == 201

    async def is_listed() -> bool:
        return await superuser.execute(LARGE) == "UPDATE 1"

    await until(is_listed, "the job table has the job")


async def start(client: httpx.AsyncClient) -> str:
    answer = await client.post("/v1/reports", json={"tenant_id": "acme"})
    assert answer.status_code == 202, answer.text
    place: str = answer.headers["Location"]
    return place


async def waits(client: httpx.AsyncClient, place: str) -> list[str]:
    """The progress that was told until the report is made."""
    told: list[str] = []

    async def is_done() -> bool:
        answer = await client.get(place)
        if answer.status_code == 202:
            told.append(str(answer.json()["progress"]))
        return answer.status_code != 202

    await until(is_done, "the report is made", timeout_s=240)
    return told


CHATTY = """
import os, sys
print("x" * 1_000_000, file=sys.stderr)
print("error: " + sys.argv[1], file=sys.stderr)
os.mkdir("report")
open("report/report.html", "w").write("<h1>jobs</h1>")
open("report/report.json", "w").write(sys.argv[2])
sys.exit(int(sys.argv[3]))
"""


@pytest.mark.parametrize(
    ("numbers", "code", "said"),
    [("", 3, "no disk"), ("{}", 0, "no report: KeyError"), ("[", 0, "no report"), ("[]", 0, "no report: TypeError")],
)
async def test_what_is_no_report_and_a_line_without_end_are_why_there_is_none(
    tmp_path: Path, numbers: str, code: int, said: str
) -> None:
    command = (sys.executable, "-c", CHATTY)
    reports = SparkReports(folder=tmp_path / "made", logs=tmp_path, database_url="postgresql://db", command=command)
    with pytest.raises(SparkFailedError, match=said):
        await reports.make(("no disk", numbers, str(code)), [].append)
    assert not reports.folder.exists()
    assert (await reports.make(("", '{"at_end": {"jobs": 7}}', "0"), [].append)).jobs == 7


DEAF = """
import subprocess, sys, time
child = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"])
print("progress:", child.pid, file=sys.stderr, flush=True)
time.sleep(60)
"""


async def test_a_stop_kills_all_of_a_report_that_does_not_end_by_itself(tmp_path: Path) -> None:
    command, told = (sys.executable, "-c", DEAF), list[str]()
    reports = SparkReports(folder=tmp_path / "made", logs=tmp_path, database_url="postgresql://db", command=command)
    making = asyncio.create_task(reports.make((), told.append))
    await until(lambda: told, "the process has a child")
    making.cancel()
    await asyncio.wait({making}, timeout=30)
    assert making.cancelled()
    assert not reports.folder.exists()

    def is_gone() -> bool:
        with suppress(psutil.NoSuchProcess):
            return psutil.Process(int(told[0])).status() == psutil.STATUS_ZOMBIE
        return True

    await until(is_gone, "the child is killed", timeout_s=30)


class Running(NamedTuple):
    """A process."""

    arguments: list[str]
    nice: int


def processes_in(folder: Path) -> list[Running]:
    """Those of Spark, whose files are in ``folder``, with those that they started."""
    found = []
    for each in psutil.process_iter():
        with suppress(psutil.Error, ProcessLookupError):
            if each.environ().get("TMPDIR") == str(folder.absolute()):
                found.append(Running(each.cmdline(), each.nice()))
    return found


def java_in(folder: Path) -> list[Running]:
    """That which runs Spark."""
    return [each for each in processes_in(folder) if "-Xmx1g" in each.arguments]


async def test_spark_makes_the_report_that_is_too_large_for_the_node(
    serve: Serve, superuser: asyncpg.Connection
) -> None:
    async with serve() as served, served.client(served.root) as root:
        await fill(root, superuser)
        spark = served.services[SparkReports]
        place = await start(root)

        await until(partial(java_in, spark.folder), "Java runs")
        processes = processes_in(spark.folder)
        assert {each.nice for each in processes} == {10}
        arguments = " ".join(word for each in processes for word in each.arguments)
        assert "acme" in arguments
        assert spark.database_url not in arguments
        small = await root.post("/v1/reports", json={"tenant_id": "acme", "until": "1971-01-01T00:00:00Z"})
        assert small.status_code == 202, small.text
        await waits(root, small.headers["Location"])
        assert (await root.get(small.headers["Location"])).status_code == 200
        other = await start(root)
        await waits(root, other)
        refused = (await root.get(other)).json()
        assert refused["type"].endswith("report-too-large")
        assert "entries. Spark makes another report on this node, and is done in minutes. Shorten" in refused["detail"]

        told = await waits(root, place)
        assert told[0] == "Spark starts"
        assert any(each.startswith("stage ") for each in told), told
        page = await root.get(place)
        assert page.headers["Content-Disposition"] == 'attachment; filename="acme.report.html"'
        assert "<h2>Throughput</h2>" in page.text
        assert str(spark.folder) not in page.text
        assert str(urlsplit(spark.database_url).password) not in page.text
        reader = await served.issue("read", tenants="acme", name="reader")
        async with served.client(reader["token"]) as client:
            assert (await client.get(place)).status_code == 403
            again = await start(client)
            await waits(client, again)
            detail = (await client.get(again)).json()["detail"]
        assert "also says who read and did what, which needs the right audit. Shorten" in detail
        lines = (await root.get("/v1/access-log?tenant_id=acme")).json()["items"]
        assert ("root", {"jobs": 2}) in [(each["actor"], each["what"]) for each in lines if each["kind"] == "read"]
        assert not spark.folder.exists()
        assert await _gone(spark.folder)


async def _gone(folder: Path) -> bool:
    async def is_gone() -> bool:
        return not processes_in(folder)

    await until(is_gone, "no process of Spark is left")
    return True


async def test_a_failure_of_spark_is_told_and_leaves_nothing(
    serve: Serve, superuser: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    async with serve() as served, served.client(served.root) as root:
        await fill(root, superuser)
        monkeypatch.setattr(served.services[SparkReports], "database_url", "mysql://u:secret@db/ledger")
        place = await start(root)
        await waits(root, place)
        detail = (await root.get(place)).json()["detail"]
        assert "entries. Spark did not make the report: " in detail
        assert "secret" not in detail
        assert detail.endswith("Shorten the period, or run tally pipeline report --dest reports/acme -t acme")
        assert not served.services[SparkReports].folder.exists()


async def test_a_stop_of_the_node_ends_spark_and_removes_its_files(serve: Serve, superuser: asyncpg.Connection) -> None:
    async with serve() as served, served.client(served.root) as root:
        await fill(root, superuser)
        spark, reports = served.services[SparkReports], served.services[JobReports]
        report_id = (await start(root)).rpartition("/")[2]
        await until(partial(java_in, spark.folder), "Java runs")
        making = reports.find(report_id).making
    assert making.cancelled()
    assert not spark.folder.exists()
    assert await _gone(spark.folder)


async def test_files_of_a_node_that_was_killed_are_removed_by_the_next_start(serve: Serve) -> None:
    async with serve() as served:
        folder = served.services[SparkReports].folder
    (folder / "report").mkdir(parents=True)
    (folder / "report" / "report.html").write_text("payloads")
    async with serve():

        async def is_gone() -> bool:
            return not os.path.lexists(folder)

        await until(is_gone, "the files are removed")
