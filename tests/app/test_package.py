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
PACKAGES: list[str] = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"][
    "wheel"
]["packages"]
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
    build = [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--no-build-isolation", "-w", made, source]
    # How fast what is compiled would be is not asked here, and making it fast takes the compiler three times as long.
    subprocess.run(build, env=os.environ | {"CFLAGS": "-O0"}, check=True)
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
    looks = (
        "import app.node.wiring, pipeline, ledger.native as native; print(app.__file__, pipeline.__file__, native.NAME)"
    )
    asked = subprocess.run(
        [sys.executable, "-c", looks], cwd=tmp_path, env=there, capture_output=True, text=True, check=True
    )
    assert asked.stdout.split() == [f"{tmp_path}/app/__init__.py", f"{tmp_path}/pipeline/__init__.py", "c"]
    calls = "import sys, cli, tallystick_client; print(tallystick_client.__file__); sys.argv[1:] = ['run']; cli.main()"
    ran = subprocess.run([sys.executable, "-c", calls], cwd=tmp_path, env=there, capture_output=True, text=True)
    assert (ran.stdout, ran.returncode) == (f"{tmp_path}/tallystick_client/__init__.py\n", 125), ran.stderr


def test_the_image_is_made_of_all_packages_and_what_it_copies_is_sent_to_its_build() -> None:
    copied = re.findall(r"^COPY (?!--from)(.*) \S+$", (ROOT / "deploy/Dockerfile").read_text(), re.MULTILINE)
    sources = {name for line in copied for name in line.split()}
    assert {*PACKAGES} <= sources
    ignored = (ROOT / ".dockerignore").read_text().split()
    assert ignored[0] == "*"
    sent = {line.removeprefix("!") for line in ignored if line.startswith("!")}
    assert sources == sent
    assert all((ROOT / name).exists() for name in sources)
