"""A service that the tests of a module share, and a way to it."""

from __future__ import annotations

import hashlib
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from app.dev.embedded import EmbeddedPostgres
from tests.app.service_thread import serving
from tests.clients.way import Way, way_to
from tests.crash.conftest import launch, mortal_database, mortal_postgres, seed

__all__ = ["launch", "mortal_database", "mortal_postgres", "seed"]


@pytest.fixture(scope="module")
def ledger(
    postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory, request: pytest.FixtureRequest
) -> Iterator[str]:
    """URL of a service."""
    name = request.module.__name__.rpartition(".")[2].replace("test_", "client_")
    with serving(postgres, tmp_path_factory.mktemp(name), name) as url:
        yield url


@pytest.fixture(scope="session")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """The folder of programs of a virtual environment with the client and the packages that it is called with."""
    folder = tmp_path_factory.mktemp("installed")
    shutil.copytree(Path(__file__).parents[2] / "clients" / "python", folder / "client")

    def install(*packages: str) -> Path:
        programs = folder / hashlib.sha256(repr(packages).encode()).hexdigest()[:16] / "bin"
        if programs.exists():
            return programs
        subprocess.run([sys.executable, "-m", "venv", programs.parent], check=True)
        subprocess.run([programs / "pip", "install", "--quiet", *packages, folder / "client"], check=True)
        return programs

    return install


@pytest.fixture
def way(ledger: str) -> Iterator[Way]:
    """A way to it."""
    with way_to(ledger) as way:
        yield way


@pytest.fixture(autouse=True)
def bare(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing of the environment is meant for the client."""
    for name in ("TALLY_URL", "TALLY_TOKEN", "TALLY_SPOOL", "TALLY_CA"):
        monkeypatch.delenv(name, raising=False)
