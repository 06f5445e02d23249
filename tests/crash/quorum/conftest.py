"""The PostgreSQL of a cluster."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from app.dev.embedded import EmbeddedPostgres
from tests.app.standby import Standby
from tests.crash.quorum.cluster import postgres_pair


@pytest.fixture
def pair(open_folder: Path) -> Iterator[tuple[EmbeddedPostgres, Standby]]:
    """A PostgreSQL and its synchronous standby."""
    with postgres_pair(open_folder / "postgres") as pair:
        yield pair
