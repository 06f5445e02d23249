"""``tally watch``: each entry on a line, once, whatever becomes of the connection, until Ctrl-C."""

from __future__ import annotations

import asyncio
import json
import signal
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager

from app.dev.cluster import free_port
from app.share.watch import Watchers
from tests.app.test_cli_hostile import answering, sized
from tests.app.test_watch import GLOBAL, RunWatched, jobs, run_watched, write
from tests.tally import Tally, bare_environment, run_tally

__all__ = ["run_watched"]


@contextmanager
def tally_watch(url: str, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    """``tally watch`` of tenant acme, killed at the end if it still runs."""
    pipe = subprocess.PIPE
    environment = bare_environment() | {"TALLY_URL": url}
    with Tally("watch", "-t", "acme", *arguments, env=environment, stdout=pipe, stderr=pipe, text=True) as process:
        try:
            yield process
        finally:
            process.kill()


async def lines(process: subprocess.Popen[str], count: int) -> list[str]:
    """The next lines that it prints."""
    assert process.stdout is not None
    return [(await asyncio.to_thread(process.stdout.readline)).rstrip("\n") for _ in range(count)]


async def test_entries_are_printed_as_they_come_and_ctrl_c_ends_it_well(run_watched: RunWatched) -> None:
    async with run_watched() as node:
        await write(node.client, *jobs(range(2)))
        with tally_watch(node.url, "--from-seq", "1", "--json") as as_json, tally_watch(node.url) as for_people:
            await node.open_streams(2)
            await write(node.client, *jobs([2]))
            printed = [json.loads(line) for line in await lines(as_json, 3)]
            assert [entry["seq"] for entry in printed] == [1, 2, 3]
            listed = await node.client.get("/v1/chain/entries", params={"tenant_id": "acme"})
            assert printed == listed.json()["items"]
            (line,) = await lines(for_people, 1)
            assert line.split()[0::2][:2] == ["3", "ENQUEUE"]
            assert "job-2" in line
            for process in (as_json, for_people):
                process.send_signal(signal.SIGINT)
                _, said = await asyncio.to_thread(process.communicate)
                assert (process.returncode, said) == (0, "")
        await node.open_streams(0)


async def test_filters_and_a_stream_that_ends_and_goes_on(run_watched: RunWatched) -> None:
    async with run_watched() as node:
        await write(node.client, *jobs(range(3), assigned_dcs=["a"]), *jobs(range(3, 6), assigned_dcs=["b"]))
        options = ("--from-seq", "1", "--json", "--dc", "b", "--actions", "enqueue,cancel")
        with tally_watch(node.url, *options) as process:
            assert [json.loads(line)["seq"] for line in await lines(process, 3)] == [4, 5, 6]
            for watcher in [*node.services[Watchers]._open]:
                watcher.end()
            body = {"tenant_id": "acme", "reason": "no need", **GLOBAL}
            for job in ("job-1", "job-4"):
                (await node.client.post(f"/v1/jobs/{job}/cancel", json=body)).raise_for_status()
            assert [json.loads(line)["seq"] for line in await lines(process, 1)] == [8]
        with tally_watch(node.url, "--from-seq", "1", "--json", "--job", "job-4") as process:
            assert [json.loads(line)["seq"] for line in await lines(process, 2)] == [5, 8]


async def test_a_restart_of_the_service_is_waited_for_and_loses_nothing(run_watched: RunWatched) -> None:
    port = free_port()
    async with run_watched(port=port) as node:
        await write(node.client, *jobs([0]))
        process = await asyncio.to_thread(lambda: tally_watch(node.url, "--json"))
        watching = process.__enter__()
        await node.open_streams(1)
    try:
        async with run_watched(port=port) as node:
            await write(node.client, *jobs([1, 2]))
            assert [json.loads(line)["seq"] for line in await lines(watching, 2)] == [2, 3]
    finally:
        process.__exit__(None, None, None)


def test_what_cannot_be_watched_is_told_at_once() -> None:
    with answering(sized(b"text/html", b"<html>")) as url:
        done = run_tally("watch", "-t", "acme", TALLY_URL=url)
    assert (done.returncode, "does not answer as a Tallystick" in done.stderr) == (1, True)
    stream = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\n\r\nid: " + b"1" * 5000 + b"\n\n"
    for data in (b'{"seq": "one"}', b"{nonsense"):
        with answering(stream + b"id: 1\nevent: X\ndata: " + data + b"\n\n") as url:
            done = run_tally("watch", "-t", "acme", TALLY_URL=url)
        assert (done.returncode, "does not answer as a Tallystick" in done.stderr) == (1, True)
        assert done.stderr.count("\n") == 1


async def test_a_tenant_that_is_not_there_ends_it(run_watched: RunWatched) -> None:
    async with run_watched() as node:
        done = await asyncio.to_thread(run_tally, "watch", "-t", "nobody", TALLY_URL=node.url)
    assert (done.returncode, "tenant-not-found" in done.stderr) == (1, True)
