"""A tail that was cut with everything made to fit is found by what an auditor kept, once the node that saw it is gone.

A node that runs would see the cut itself, and end.
"""

import asyncio
from pathlib import Path
from typing import NamedTuple

import pytest

from app.edge.listener import listening
from app.node.wiring import running
from lab import tampering
from tests.app.conftest import MakeSettings
from tests.app.test_cli_service import Service, saved_checkpoint, submit
from tests.conftest import Database


class Left(NamedTuple):
    """A ledger whose node has stopped, and what an auditor kept of it while it ran."""

    service: Service
    keys: Path
    checkpoint: Path

    def direct(self, tenant: str) -> tuple[str, ...]:
        return ("verify", "-t", tenant, "--dsn", self.service.superuser_url, "--keys", str(self.keys))


@pytest.fixture(scope="module")
async def left(make_shared_settings: MakeSettings, shared_database: Database) -> Left:
    settings = make_shared_settings()
    async with running(settings, shared_database.service_url) as (_, services), listening(services) as (url, _):
        return await asyncio.to_thread(kept_of, Service(url, settings.data_dir, shared_database.superuser_url))


def kept_of(service: Service) -> Left:
    for tenant in ("cut", "seen"):
        submit(service, tenant, jobs=4)
    service.report("snapshot", "-t", "seen")
    checkpoint = saved_checkpoint(service, "cut", 12, service.folder / "checkpoint")
    return Left(service, service.keys, checkpoint)


async def cut(superuser_url: str, tenant: str, last_seq: int) -> None:
    async with tampering.superuser(superuser_url) as connection:
        await tampering.cut_tail(connection, tenant, last_seq)


async def test_a_tail_that_was_cut_without_trace_is_found_by_the_kept_checkpoint(left: Left) -> None:
    await cut(left.service.superuser_url, "cut", last_seq=6)

    without = left.service.report(*left.direct("cut"), code=3)
    with_checkpoint = left.service.report(*left.direct("cut"), "--checkpoint", str(left.checkpoint), code=2)

    assert without["valid"] is True
    assert with_checkpoint["first_break"]["kind"] == "rollback"
    assert with_checkpoint["verdicts"]["checkpoint"] == "broken"


async def test_a_tail_that_was_cut_without_trace_is_a_rollback_to_whoever_looked_before(left: Left) -> None:
    direct, service = left.direct("seen"), left.service
    first, again = service.report(*direct), service.report(*direct)
    assert (first["verdicts"]["checkpoint"], first["compared_with"]) == ("not_checked", None)
    assert (first["memory"]["first_look"], first["memory"]["remembered"]["size"]) == (True, 12)
    assert "this is the first look at this log" in first["memory"]["says"]
    assert (again["verdicts"]["checkpoint"], again["compared_with"]) == ("ok", "memory")

    await cut(service.superuser_url, "seen", last_seq=6)

    found = service.report(*direct, code=2)
    assert (found["first_break"]["kind"], found["verdicts"]["checkpoint"]) == ("rollback", "broken")
    assert "held by memory covers 12 entries, there are 6" in found["first_break"]["detail"]
    assert service.report(*direct, code=2)["first_break"] == found["first_break"], "what broke is not remembered"
    unseen = service.report(*direct, "--no-state", code=3)
    assert (unseen["compared_with"], "memory" in unseen) == (None, False)
