"""Fixtures of the WAL tests."""

from __future__ import annotations

import shutil

import pytest


@pytest.fixture(scope="session")
def strace() -> str:
    """Path of strace, which makes single system calls of a child process fail."""
    path = shutil.which("strace")
    if path is None:
        pytest.fail("install strace; on Debian: sudo apt-get install strace", pytrace=False)
    return path
