"""How many lines of one event are written, and that no client can have more."""

from __future__ import annotations

import asyncio
import itertools
import json
import logging
import os
import re
import signal
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import TextIO

import pytest
import structlog

from app.runtime.logs import LINES_A_SECOND_MAX, WAITING_BYTES_MAX, LineBudget, configure_logs, drain_logs
from tests.app.chains import until
from tests.app.conftest import MakeSettings, RunServer
from tests.app.postgres_proxy import PostgresProxy


@contextmanager
def configured(stream: TextIO | None) -> Iterator[None]:
    """Logs are as in the service, and go to ``stream``."""
    root = logging.getLogger()
    before, level = root.handlers, root.level
    configure_logs(stream)
    try:
        yield
    finally:
        structlog.reset_defaults()
        root.handlers = before
        root.setLevel(level)


@pytest.fixture
def written(tmp_path: Path) -> Iterator[Path]:
    """The file of what is written while logs are as in the service."""
    with open(tmp_path / "written", "w") as stream, configured(stream):
        yield Path(stream.name)


def lines_in(file: Path) -> list[str]:
    drain_logs()
    return file.read_text().splitlines()


def events(file: Path) -> Counter[str]:
    return Counter(json.loads(line)["event"] for line in lines_in(file))


def left_out(file: Path) -> Counter[str]:
    counted: Counter[str] = Counter()
    for line in map(json.loads, lines_in(file)):
        if line["event"] == "log_lines_left_out":
            counted[line["of"]] += line["count"]
    return counted


def test_of_each_event_the_first_lines_of_a_second_are_written_and_the_others_counted() -> None:
    now_s, told = 100.0, []
    budget = LineBudget(lambda event, count: told.append((event, count)), lambda: now_s)
    assert sum(budget.admits("one") for _ in range(1000)) == LINES_A_SECOND_MAX
    assert budget.admits("another")
    budget.tell()
    assert told == [("one", 1000 - LINES_A_SECOND_MAX)]
    now_s += 0.999
    assert not budget.admits("one")
    now_s += 0.001
    assert sum(budget.admits("one") for _ in range(1000)) == LINES_A_SECOND_MAX
    budget.tell()
    assert told[1:] == [("one", 1001 - LINES_A_SECOND_MAX)]
    budget.tell()
    assert len(told) == 2


async def test_lines_of_both_kinds_of_loggers_are_bounded_and_critical_ones_all_written(written: Path) -> None:
    for _ in range(50):
        structlog.get_logger().warning("asked_again", by="a client")
        structlog.get_logger().critical("node_failed")
        logging.getLogger("uvicorn.error").error("Exception in ASGI application")
    told = await until(lambda: len(left_out(written)) == 2 and left_out(written), "it is told how many were left out")
    counted = events(written)
    assert counted["node_failed"] == 50
    assert counted["asked_again"] + told["asked_again"] == 50
    assert counted["asked_again"] < 50
    assert counted["Exception in ASGI application"] + sum(told.values()) - told["asked_again"] == 50


def test_a_log_that_cannot_be_written_stops_nobody_and_what_was_lost_is_told(tmp_path: Path) -> None:
    file = tmp_path / "log"
    with open("/dev/full", "w") as full, configured(full):
        for number in range(3):
            structlog.get_logger().error("lost", number=number)
            logging.getLogger("uvicorn.error").error("lost too")
        drain_logs()
        with open(file, "w") as room:
            os.dup2(room.fileno(), full.fileno())
        for event in ("written", "written too"):
            structlog.get_logger().error(event)
        drain_logs()
    *_, first, second = map(json.loads, file.read_text().splitlines())
    # Those of this test; what others left behind in this process may have a word too.
    assert (first["event"], first["log_lines_lost"] >= 6) == ("written", True)
    assert (second["event"], "log_lines_lost" in second) == ("written too", False)


def test_a_log_that_nobody_reads_holds_up_nobody_and_what_was_lost_is_told() -> None:
    reading, writing = os.pipe()
    with open(reading, "rb"), open(writing, "w") as pipe, configured(pipe):
        line, count = "x" * 10_000, 3 * WAITING_BYTES_MAX // 10_000
        for number in range(count):
            structlog.get_logger().critical("unread", number=number, line=line)
        os.set_blocking(reading, False)
        read = b""

        def is_written() -> bool:
            nonlocal read
            with suppress(BlockingIOError):
                while piece := os.read(reading, 1 << 20):
                    read += piece
            return b'"behind"' in read

        # There is room again once some was read; this one may still find none.
        while not is_written():
            structlog.get_logger().critical("behind")
            drain_logs(0.01)
    lines = [json.loads(each) for each in read.splitlines() if each.endswith(b"}")]
    written = [each["number"] for each in lines if each["event"] == "unread"]
    assert written == sorted({*written}), "in order; the pipe makes room once, for some that come later"
    lost = sum(each.get("log_lines_lost", 0) for each in lines)
    assert lost >= count - len(written) > 0, "those that were lost, and what was then lost behind them"


def test_the_thread_that_writes_the_log_takes_no_signal_from_the_one_that_holds_it_back() -> None:
    reading, writing = os.pipe()
    with open(reading), open(writing, "w") as pipe, configured(pipe):
        (thread,) = [each for each in threading.enumerate() if each.name == "log"][-1:]
        status = Path(f"/proc/self/task/{thread.native_id}/status").read_text()
        blocked = int(re.findall(r"SigBlk:\s*(\w+)", status)[0], 16)
        assert blocked >> (signal.SIGTERM - 1) & 1
        own = signal.pthread_sigmask(signal.SIG_BLOCK, ())
        assert signal.SIGTERM not in own, "children inherit the mask of this thread"


def test_a_process_with_stderr_closed_logs_to_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stderr", None)
    with configured(None):
        structlog.get_logger().error("nobody reads it")


async def test_bad_requests_leave_no_lines_and_those_that_do_a_few_a_second(
    run_server: RunServer, make_settings: MakeSettings, proxy: PostgresProxy, written: Path
) -> None:
    async with run_server(make_settings(write={"timeout": "60s"}), url=proxy.url) as client:
        job = {"tenant_id": "acme", "durability": "LOCAL"}
        assert (await client.post("/v1/jobs", json=job)).status_code == 201
        await until(lambda: {"full_verification_done", "key_entry_chained"} <= events(written).keys(), "it has started")
        before = events(written)
        for request in (
            b"no HTTP at all\r\n\r\n",
            b"GET / HTTP/1.1\r\n\r\n",
            b"GET / HTTP/1.1\r\nHost: evil.example\r\n\r\n",
            b"GET /livez HTTP/1.1\r\nHost: localhost\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
            b"POST /v1/jobs HTTP/1.1\r\nHost: localhost\r\nContent-Length: x\r\n\r\n",
            b"GET /" + b"a" * 100_000 + b" HTTP/1.1\r\nHost: localhost\r\n\r\n",
            b"POST /v1/jobs HTTP/1.1\r\nHost: [::1]\r\nContent-Type: application/json\r\nContent-Length: 1\r\n\r\n{",
        ):
            for _ in range(5):
                reader, writer = await asyncio.open_connection(client.base_url.host, client.base_url.port)
                writer.write(request)
                assert await reader.read(12)
                writer.close()
        assert events(written) - before == Counter(), "nothing that a client sends wrong is a line"
        await proxy.refuse()
        event, keys = "idempotency_checked_on_this_node_only", map(str, itertools.count())

        async def some_left_out() -> int | None:
            posts = [client.post("/v1/jobs", json=job, headers={"Idempotency-Key": next(keys)}) for _ in range(40)]
            assert {answer.status_code for answer in await asyncio.gather(*posts)} == {201}
            return left_out(written).get(event)

        await until(some_left_out, "some were left out")
        assert 0 < events(written)[event] < int(next(keys))
        assert '"asyncpg.pool"' not in written.read_text(), "the driver tells of the outage as well"
        await proxy.accept()
