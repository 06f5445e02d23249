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


def is_of_a_value(error: BaseException) -> bool:
    """Whether Postgres refuses a value (class 22). A sequence at its end refuses whatever comes, until somebody lets it
    go on."""
    is_of_all = isinstance(error, asyncpg.SequenceGeneratorLimitExceededError)
    return not is_of_all and isinstance(error, asyncpg.PostgresError) and (error.sqlstate or "")[:2] == "22"


def text_of(error: BaseException) -> str:
    """What logs and checks say of it."""
    return f"{type(error).__name__}: {str(error) or 'no answer in time'}"
