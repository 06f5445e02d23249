"""The embedded PostgreSQL on disk: the folder it lives in, its passwords, and how its cluster is made.

``app.dev.embedded`` says what the folder holds. A cluster is made under another name and renamed once it is complete,
with its roles and its database, so there is never a partial one.
"""

from __future__ import annotations

import os
import secrets
import shutil
import socket
from pathlib import Path
from typing import NamedTuple

import msgspec

from app.dev.account import Account, account_for, reachable_binaries, reachable_folder
from ledger.decoding import decode
from ledger.errors import StartRefusedError
from objects import sync_folder
from wal.segment import store_file

DATABASE = "tallystick"
SUPERUSER = "postgres"
OWNER = "tallystick_owner"
SERVICE = "tallystick"
SERVICE_GROUP = "tallystick_service"

_PORTS = range(20_000, 32_000)
"""Below the range that Linux gives to outgoing connections, so that a restart finds its port free."""
_PORT_TRIES_MAX = 100
_SETTINGS = {
    "log_line_prefix": "%m [%p] %d ",
    "log_timezone": "UTC",
    "max_wal_size": "2GB",
    "shared_buffers": "256MB",
    "timezone": "UTC",
}


_BUILTIN_LOCALE = ("--locale-provider=builtin", "--builtin-locale=C.UTF-8")
_BUILTIN_LOCALE_SINCE = 17


class Credentials(msgspec.Struct, frozen=True):
    """Content of ``credentials.json``: passwords by login, and the port."""

    superuser: str
    owner: str
    service: str
    port: int

    def url(self, login: str, database: str) -> str:
        """URL by which ``login`` connects to ``database``: on loopback, without TLS."""
        password = {SUPERUSER: self.superuser, OWNER: self.owner, SERVICE: self.service}[login]
        return f"postgresql://{login}:{password}@127.0.0.1:{self.port}/{database}?sslmode=disable"


class Cluster(NamedTuple):
    """A complete cluster and what is needed to run it."""

    data: Path
    binaries: Path
    account: Account
    credentials: Credentials


def find_data(data_dir: Path) -> Path | None:
    """Folder of the cluster of ``data_dir``, PostgreSQL's PGDATA; None before the first start."""
    home = _find_home(data_dir)
    return None if home is None else home / "data"


def open_cluster(data_dir: Path, programs: Path | None = None) -> Cluster:
    """The cluster of ``data_dir``, made if there is none, by our own PostgreSQL or the one in the folder ``programs``.
    The caller holds the start lock.

    Raises:
        StartRefusedError: it cannot be made, is not ours, or was made by another version.
    """
    # 1. Where it is or is to be, which account runs it, and with which programs.
    home = _find_home(data_dir)
    if home is None:
        home = reachable_folder(data_dir / "cluster")
        if home != data_dir / "cluster":
            store_file(data_dir / "location", os.fsencode(home) + b"\n")
    elif not home.is_dir():
        raise StartRefusedError(
            f"the cluster of {data_dir} was in {home}, which is gone. Put it back, or move {data_dir} away "
            "to begin with an empty ledger."
        )
    account = account_for(home)
    binaries = programs or reachable_binaries(account)
    data = home / "data"
    if data.exists():
        # 2. It is there: fit to run, and with the passwords to log in.
        _check_version(binaries, data, account)
        credentials = read_credentials(data_dir)
        if credentials is None:
            raise StartRefusedError(
                f"{data_dir / 'credentials.json'} is gone, so nobody can log in to the cluster beside it. "
                f"Put the file back, or move {data_dir} away to begin with an empty ledger."
            )
        return Cluster(data, binaries, account, credentials)
    # 3. It is not: passwords are on disk before anything needs them, and the cluster appears whole.
    passwords = (secrets.token_urlsafe(24) for _ in range(3))
    credentials = Credentials(next(passwords), next(passwords), next(passwords), free_port())
    write_credentials(data_dir, credentials)
    unfinished = home / "data.unfinished"
    shutil.rmtree(unfinished, ignore_errors=True)
    _initdb(binaries, unfinished, account, credentials.superuser)
    _make_roles(binaries, unfinished, account, credentials)
    unfinished.rename(data)
    sync_folder(home)
    return Cluster(data, binaries, account, credentials)


def read_credentials(data_dir: Path) -> Credentials | None:
    """Passwords and port, or None when there is no cluster yet.

    Raises:
        StartRefusedError: they are another user's.
    """
    path = data_dir / "credentials.json"
    try:
        return decode(path.read_bytes(), Credentials)
    except FileNotFoundError:
        return None
    except PermissionError as error:
        raise StartRefusedError(
            f"{path} belongs to another user, who made the embedded PostgreSQL there. Run as that user, or "
            "choose another folder with TALLY_DATA_DIR."
        ) from error


def write_credentials(data_dir: Path, credentials: Credentials) -> None:
    """Replace ``credentials.json``; no other user can read it."""
    store_file(data_dir / "credentials.json", msgspec.json.encode(credentials))


def free_port() -> int:
    """A free port of 127.0.0.1."""
    for _ in range(_PORT_TRIES_MAX):
        if is_free(port := secrets.choice(_PORTS)):
            return port
    raise StartRefusedError(f"found no free port from {_PORTS.start} to {_PORTS.stop - 1} on 127.0.0.1")


def is_free(port: int) -> bool:
    """Whether a server could listen on 127.0.0.1 at ``port``."""
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _find_home(data_dir: Path) -> Path | None:
    if (location := data_dir / "location").exists():
        return Path(os.fsdecode(location.read_bytes()).strip())
    inside = data_dir / "cluster"
    return inside if inside.exists() else None


def _initdb(binaries: Path, data: Path, account: Account, password: str) -> None:
    password_file = data.with_name("password")
    store_file(password_file, f"{password}\n".encode())
    account.own(password_file)
    try:
        account.run(
            [
                str(binaries / "initdb"),
                *("-D", str(data), "-U", SUPERUSER, "--pwfile", str(password_file)),
                *("--auth=scram-sha-256", "--encoding=UTF8", "--locale=C"),
                *(_BUILTIN_LOCALE if _version(binaries, account) >= _BUILTIN_LOCALE_SINCE else ()),
            ]
        )
    finally:
        password_file.unlink()
    # Not by initdb's --set, which PostgreSQL 15 lacks.
    with (data / "postgresql.conf").open("a") as configuration:
        configuration.writelines(f"{name} = '{value}'\n" for name, value in _SETTINGS.items())


def _make_roles(binaries: Path, data: Path, account: Account, credentials: Credentials) -> None:
    """Make roles and database in single-user mode, which excludes other connections."""
    statements = (
        f"CREATE ROLE {SERVICE_GROUP} NOLOGIN;",
        f"CREATE ROLE {OWNER} LOGIN PASSWORD '{credentials.owner}';",
        f"CREATE ROLE {SERVICE} LOGIN PASSWORD '{credentials.service}' IN ROLE {SERVICE_GROUP};",
        f"CREATE DATABASE {DATABASE} OWNER {OWNER};",
    )
    account.run(
        [str(binaries / "postgres"), "--single", "-j", "-D", str(data), "-c", "exit_on_error=on", SUPERUSER],
        said="".join(f"{statement}\n\n" for statement in statements),
    )


def _check_version(binaries: Path, data: Path, account: Account) -> None:
    made_by = (data / "PG_VERSION").read_text().strip()
    if made_by != str(ours := _version(binaries, account)):
        raise StartRefusedError(
            f"the cluster {data} was made by PostgreSQL {made_by}, and this is {ours}. Move its content with "
            "pg_dump and psql, or run the version of Tallystick that made it."
        )


def _version(binaries: Path, account: Account) -> int:
    """Major version of the server in ``binaries``."""
    return int(account.run([str(binaries / "postgres"), "--version"]).partition(") ")[2].partition(".")[0])
