"""Damaged input is refused as each parser documents; the modules in C touch no memory that is not theirs."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator

import pytest

from tests.fuzz import sanitize
from tests.fuzz.__main__ import fuzz
from tests.fuzz.targets import TARGETS, close

INPUTS = {"stream": 5, "arrow_columns": 20, "frames": 100}
"""Of parsers that take long for one."""
INPUTS_MAX = 300
IN_C = [name for name, target in TARGETS.items() if target.in_c]


@pytest.fixture(autouse=True, scope="module")
def _closed() -> Iterator[None]:
    yield
    close()


@pytest.mark.parametrize("name", TARGETS)
def test_damaged_input_is_refused_and_never_read_in_two_ways(name: str) -> None:
    fuzz(name, 1, float("inf"), INPUTS.get(name, INPUTS_MAX))


def under_sanitizers(*arguments: str) -> subprocess.CompletedProcess[str]:
    """A report does not say from where memory was asked for: to note that is a quarter of what imports cost."""
    environment = sanitize.environment()
    environment["ASAN_OPTIONS"] += ":malloc_context_size=1"
    return subprocess.run(
        [sys.executable, *arguments], cwd=sanitize.ROOT, env=environment, capture_output=True, text=True
    )


@pytest.mark.debian_tools
def test_under_sanitizers_damaged_input_leads_the_modules_in_c_nowhere() -> None:
    sanitize.build()
    ended = under_sanitizers("-m", "tests.fuzz", "--inputs", "100", "--seconds", "2", "--seed", "2", *IN_C)
    assert ended.returncode == 0, ended.stderr[-4000:]
    assert ended.stdout.count(" inputs") == len(IN_C)


@pytest.mark.debian_tools
def test_a_read_beyond_the_end_of_an_object_ends_a_process_under_sanitizers() -> None:
    sanitize.build()
    code = "import ctypes; at = ctypes.create_string_buffer(16); ctypes.string_at(ctypes.addressof(at), {})"
    assert under_sanitizers("-c", code.format(16)).returncode == 0
    beyond = under_sanitizers("-c", code.format(64))
    assert beyond.returncode != 0
    assert "heap-buffer-overflow" in beyond.stderr
