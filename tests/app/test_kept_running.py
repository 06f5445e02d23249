"""What fails while looking after derived state does not end the node; what fails on the way of an event does."""

from __future__ import annotations

import asyncio
import itertools

import asyncpg
import pytest
import structlog

from app.node.service import Service
from app.runtime.tasks import is_set_within, kept_running, repeat
from ledger.errors import DatabaseUnavailableError, NotReadyError
from tests.app.chains import until
from tests.app.drafts import created


class Failing:
    """Work that fails the first two times."""

    def __init__(self) -> None:
        self.times = 0

    async def run(self) -> None:
        self.times += 1
        if self.times <= 2:
            raise KeyError("what nobody thought of")


async def test_a_task_that_fails_is_begun_anew_and_the_node_goes_on(service: Service) -> None:
    work, following = Failing(), Failing()
    service.lifecycle.spawn(kept_running(work.run, pause_first_s=0.01))
    await until(lambda: work.times == 3, "it ends well the third time")
    assert service.node.failure is None
    service.lifecycle.spawn(following.run())
    await until(lambda: service.node.failure is not None, "a task that nothing keeps running ends the node")


async def test_what_is_repeated_goes_on_after_failures_and_logs_the_first_in_a_row() -> None:
    answers = iter(
        [None, NotReadyError("one"), NotReadyError("two"), None, NotReadyError("three"), KeyError("unforeseen")]
    )

    async def work() -> None:
        if (answer := next(answers)) is not None:
            raise answer

    with structlog.testing.capture_logs() as logged, pytest.raises(KeyError):
        await repeat(work, 0, "not_done")
    assert [(each["event"], each["error"]) for each in logged] == [("not_done", "one"), ("not_done", "three")]


async def test_an_event_is_waited_for_no_longer_than_asked() -> None:
    event = asyncio.Event()
    assert not await is_set_within(event, 0)
    asyncio.get_running_loop().call_soon(event.set)
    assert await is_set_within(event, None)


async def test_a_task_that_is_cancelled_though_nobody_stops_the_node_ends_it(service: Service) -> None:
    service.lifecycle.spawn(service.appender.run()).cancel()
    await until(lambda: service.node.failure is not None, "what it was for is not done any more")
    assert "Appender.run was cancelled" in str(service.node.failure)


@pytest.mark.parametrize("form", ["kept_running", "repeat"])
async def test_a_task_whose_cancellation_the_driver_turned_into_an_error_ends(form: str) -> None:
    began = asyncio.Event()

    async def work() -> None:
        began.set()
        try:
            await asyncio.Event().wait()
        except asyncio.CancelledError:
            raise asyncpg.InterfaceError("the connection is closed") from None

    kept = kept_running(work, pause_first_s=3600) if form == "kept_running" else repeat(work, 3600, "not_done")
    running = asyncio.create_task(kept)
    await began.wait()
    running.cancel()
    await asyncio.wait((running,), timeout=60)
    assert running.cancelled()


async def test_an_outage_is_told_in_a_line_and_what_was_not_foreseen_with_its_trace() -> None:
    for error, event in (
        (ConnectionRefusedError(111, "Connect call failed"), "task_delayed"),
        (asyncpg.AdminShutdownError("terminating connection"), "task_delayed"),
        (DatabaseUnavailableError("the database does not answer"), "task_delayed"),
        (KeyError("what nobody thought of"), "task_failed"),
    ):
        errors: list[Exception] = [error]

        async def work(errors: list[Exception] = errors) -> None:
            if errors:
                raise errors.pop()

        with structlog.testing.capture_logs() as logs:
            await kept_running(work, pause_first_s=0.01)
        (told,) = logs
        assert told["event"] == event
        assert ("exc_info" in told) == (event == "task_failed")
        assert len(str(told.get("error", ""))) < 200


async def test_a_tenant_that_breaks_the_notary_is_signed_no_further_and_others_are_signed(service: Service) -> None:
    receipt = await service.submitter.submit(created("acme", 1), key=None)
    assert receipt.chain is not None
    await until(lambda: service._started.checkpoints.size("acme") == 1, "it is signed")
    tenant = service.notary._tenants["acme"]
    numbers = itertools.count(2)

    async def is_named() -> bool:
        # A turn that is shared with another tenant is taken again for each alone, from what is stored: broken anew.
        async with tenant.lock:
            tenant.tree = "no tree"  # type: ignore[assignment]
        await service.submitter.submit(created("acme", next(numbers)), key=None)
        return "acme" in service.node.unsigned

    await until(is_named, "the fault is named")
    assert "AttributeError" in service.node.unsigned["acme"]
    await service.submitter.submit(created("beta", 1), key=None)
    await until(lambda: service._started.checkpoints.size("beta") == 1, "the other tenant is signed")
    assert service.node.failure is None
