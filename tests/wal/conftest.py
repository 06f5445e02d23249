"""Both queues, that in C and that in Python, under the same tests."""

from __future__ import annotations

import pytest

from wal import native


@pytest.fixture(params=["c", "python"])
def core(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> str:
    """By what batches are written. Without a compiler it is Python both times."""
    if request.param == "python":
        monkeypatch.setattr(native, "_module", None)
    return str(request.param)
