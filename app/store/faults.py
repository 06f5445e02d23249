"""What a database that is down, slow, restarting or failing over looks like from here."""

from __future__ import annotations

import asyncpg

DATABASE_FAULTS = (
    asyncpg.PostgresError,
    asyncpg.InterfaceError,
    asyncpg.InternalClientError,
    OSError,
    TimeoutError,
)
"""All that a statement may raise when its connection breaks or Postgres refuses. The driver's internal error is one:
it comes when a connection breaks while the driver is between two states."""


def text_of(error: BaseException) -> str:
    """What logs and checks say of it."""
    return f"{type(error).__name__}: {str(error) or 'no answer in time'}"
