"""What is installed elsewhere than in a checkout: the wheel, and the image that is made of it."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest

from tests.tally import bare_environment

ROOT = Path(__file__).parents[2]
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES: list[str] = PROJECT["tool"]["hatch"]["build"]["targets"]["wheel"]["packages"]
DOCKERFILE = (ROOT / "deploy/Dockerfile").read_text()
MADE = {".pyc", ".so"}
"""Endings of files that are made when something is run or built."""


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> zipfile.ZipFile:
    # Of a copy: building puts compiled modules beside their sources, which other tests have loaded.
    source, made = tmp_path_factory.mktemp("source"), tmp_path_factory.mktemp("made")
    files = [ROOT / name for name in ("pyproject.toml", "hatch_build.py", "README.md", "LICENSE", *PACKAGES)]
    for path in files:
        there = source / path.relative_to(ROOT)
        there.parent.mkdir(parents=True, exist_ok=True)
        subprocess.run(["cp", "-r", path, there], check=True)
    # As every installer asks for it.
    build = [sys.executable, "-c", f"import hatchling.build; hatchling.build.build_wheel({str(made)!r})"]
    # How fast what is compiled would be is not asked here, and making it fast takes the compiler three times as long.
    subprocess.run(build, cwd=source, env=os.environ | {"CFLAGS": "-O0"}, stdout=subprocess.DEVNULL, check=True)
    (path,) = made.iterdir()
    return zipfile.ZipFile(path)


def test_the_wheel_holds_every_file_of_every_package(wheel: zipfile.ZipFile) -> None:
    here = {
        str(path.relative_to((ROOT / package).parent))
        for package in PACKAGES
        for path in (ROOT / package).rglob("*")
        if path.is_file() and path.suffix not in MADE
    }
    assert here - {*wheel.namelist()} == set()
    assert {"app/py.typed", "pipeline/__main__.py", "migrations/schema.txt", "tallystick_client/py.typed"} <= here
    assert not [name for name in wheel.namelist() if name.startswith(("lab/", "tests/", "benchmarks/"))]


def test_the_wheel_has_what_is_in_c_built(wheel: zipfile.ZipFile) -> None:
    built = {name.partition(".")[0] for name in wheel.namelist() if name.endswith(".so")}
    assert built == {"app/runtime/state/_native", "ledger/_native", "wal/_native"}


def test_commands_run_from_the_wheel_alone(wheel: zipfile.ZipFile, tmp_path: Path) -> None:
    wheel.extractall(tmp_path)
    there = bare_environment() | {"PYTHONPATH": str(tmp_path)}
    calls = (
        "import sys, app.node.wiring, cli, ledger.native as native, pipeline, tallystick_client;"
        "print(app.__file__, pipeline.__file__, tallystick_client.__file__, native.NAME);"
        "sys.argv[1:] = ['run']; cli.main()"
    )
    ran = subprocess.run([sys.executable, "-c", calls], cwd=tmp_path, env=there, capture_output=True, text=True)
    packages = [f"{tmp_path}/{name}/__init__.py" for name in ("app", "pipeline", "tallystick_client")]
    assert (ran.stdout.split(), ran.returncode) == ([*packages, "c"], 125), ran.stderr


def test_the_image_is_made_of_all_packages_and_what_it_copies_is_sent_to_its_build() -> None:
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", DOCKERFILE, re.MULTILINE)
    sources = {name for line in copied for name in line.split()}
    assert {*PACKAGES} <= sources
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert ignored[0] == "*"
    sent = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    assert sources == sent
    assert all((ROOT / name).exists() for name in sources)


def pins(kind: str) -> set[str]:
    """The packages of a lock with their versions."""
    lock = (ROOT / f"requirements{kind}.lock").read_text()
    return {line.split()[0] for line in lock.splitlines() if line[:1].isalnum()}


def test_each_larger_lock_holds_the_smaller_one_whole_and_that_of_archives_holds_its_extra() -> None:
    extra = {re.split(r"[>=<\[]", each)[0] for each in PROJECT["project"]["optional-dependencies"]["archive"]}

    assert pins("") < pins("-archive") < pins("-pipeline") < pins("-dev")
    assert extra <= {each.partition("==")[0] for each in pins("-archive")}


def test_the_image_of_the_service_has_what_a_node_needs_that_fills_an_archive() -> None:
    service, _, _ = DOCKERFILE.partition("FROM build AS build-pipeline")
    assert re.findall(r"-r (\S+\.lock)", service) == ["requirements-archive.lock"]
    assert DOCKERFILE.rstrip().endswith("COPY --from=build /opt/tallystick /opt/tallystick")
