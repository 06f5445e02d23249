"""What a careless start leaves to a node: closed descriptors, a umask of nothing, a log that nobody reads, a locale."""

from __future__ import annotations

import asyncio
import os
import signal
import stat
import subprocess
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import httpx
import pytest

from app.dev.cluster import free_port
from tests.app.chains import until
from tests.crash.serve_process import WAIT_S
from tests.server_copies import server_with_schema
from tests.tally import COLD, bare_environment

CARELESS = 'umask 000; exec "$@" <&-'


@contextmanager
def unread() -> Iterator[int]:
    """The end of a pipe that is full, and that nobody reads."""
    reading, writing = os.pipe()
    os.set_blocking(writing, False)
    try:
        while True:
            os.write(writing, b"\n" * 4096)
    except BlockingIOError:
        os.set_blocking(writing, True)
    try:
        yield writing
    finally:
        os.close(reading)
        os.close(writing)


def open_to_others(folder: Path) -> list[str]:
    """All below ``folder`` that group or others may write to."""
    paths = [path for path in folder.rglob("*") if not path.is_symlink()]
    return [str(path) for path in (folder, *paths) if path.stat().st_mode & (stat.S_IWGRP | stat.S_IWOTH)]


async def test_a_node_with_a_careless_start_serves_stops_and_lets_nobody_write_to_its_files(open_folder: Path) -> None:
    folder, port = open_folder / "data", free_port()
    folder.mkdir()
    server = await asyncio.to_thread(server_with_schema, folder / "postgres")
    environment = bare_environment() | {"TALLY_DATA_DIR": str(folder), "TALLY_PORT": str(port)}
    with unread() as stderr:
        process = subprocess.Popen(
            ["sh", "-c", CARELESS, "sh", *COLD, "dev"], cwd=open_folder, env=environment, stderr=stderr
        )
        try:
            async with httpx.AsyncClient(base_url=f"http://127.0.0.1:{port}", trust_env=False) as client:

                async def is_ready() -> bool:
                    assert process.poll() is None
                    try:
                        return (await client.get("/readyz")).status_code == 200
                    except httpx.HTTPError:
                        return False

                await until(is_ready, "it is ready, though nobody reads its log", WAIT_S)
                job = {"tenant_id": "acme", "job_id": "one", "durability": "GLOBAL"}
                (await client.post("/v1/jobs", json=job)).raise_for_status()
            descriptors = [os.readlink(f"/proc/{process.pid}/fd/{number}") for number in (0, 2)]
            process.send_signal(signal.SIGTERM)
            assert process.wait(WAIT_S) == 0
        finally:
            process.kill()
            process.wait()
    assert descriptors[0] == os.devnull
    assert server.postmaster_pid() is None
    assert list(folder.glob("keys/*.pem"))
    assert open_to_others(folder) == []


@pytest.mark.parametrize("where", ["environment", "file"])
def test_a_locale_that_has_no_names_for_a_folder_is_named_before_anything_is_made(tmp_path: Path, where: str) -> None:
    environment = bare_environment() | {"LC_ALL": "POSIX", "PYTHONUTF8": "0"}
    if where == "environment":
        environment["TALLY_DATA_DIR"] = "café"
    else:
        (tmp_path / "tally.toml").write_text('data_dir = "café"\n', encoding="utf-8")
    command = [*COLD, "token", "new", "root", "--first"]
    done = subprocess.run(command, env=environment, cwd=tmp_path, capture_output=True)
    assert done.returncode == 1
    assert b"LC_ALL=C.UTF-8" in done.stderr
    assert not (tmp_path / "café").exists()
