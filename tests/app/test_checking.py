"""Long chains are verified in processes beside the service, with the verdict that one process gives."""

from __future__ import annotations

import asyncio
import os
import signal
import struct
import sys
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import asyncpg
import pytest
import structlog

from app.read import checking, checking_process
from app.store.chain_reader import ALL_JOBS, JobRange, PostgresChainReader, consistent_reader
from ledger.verification import Break, driver, verify
from ledger.verification.projection_check import compare_jobs
from tests.app import test_tamper as tamper
from tests.app.chain_builder import insert
from tests.app.chains import until
from tests.app.test_chain_verifier import LEDGER, Setting
from tests.conftest import Database
from tests.ledger.ledger_in_memory import OPEN

FAR = tamper.Case(
    "the last entry moved so far that ranges cannot be counted",
    "gap",
    60,
    tamper.update("scheduler_log", "seq = 9000000000000000000", "seq = 60"),
    {},
)
CLAIMED = tamper.Case(
    "a snapshot stored shorter than it was signed",
    "snapshot-root",
    40,
    tamper.update("batch_snapshot", "to_seq = 22", "to_seq = 40"),
    {},
)


async def spell_times_as_floats(connection: asyncpg.Connection) -> None:
    """Each has the bits of the integer that it was, so that the bytes on the wire are those of a whole chain."""
    constraints = await connection.fetch(
        "SELECT conname FROM pg_constraint WHERE conrelid = 'scheduler.scheduler_log'::regclass AND contype = 'c'"
    )
    for row in constraints:
        await connection.execute(f"ALTER TABLE scheduler.scheduler_log DROP CONSTRAINT {row['conname']}")
    await connection.execute("DROP VIEW scheduler.log_entries")
    await connection.execute("ALTER TABLE scheduler.scheduler_log ALTER hlc_physical TYPE float8 USING seq::float8")
    await connection.executemany(
        "UPDATE scheduler.scheduler_log SET hlc_physical = $2 WHERE tenant_id = 'acme' AND seq = $1",
        [(row["seq"], *struct.unpack("d", struct.pack("q", row["hlc_physical"]))) for row in tamper.LEDGER.entries],
    )


RETYPED = tamper.Case("times that are floats of the same bits", "hlc-columns", 1, spell_times_as_floats, {})
NAMES = (
    "an entry removed",
    "a payload edited",
    "a link version lowered",
    "every link rewritten past the last snapshot",
    "a signature edited",
    "a tile edited",
    "a job invented",
    "a job that names one entry less",
)
CASES = [*(case for case in tamper.CASES if case.name in NAMES), FAR, CLAIMED, RETYPED]


@pytest.fixture(autouse=True)
def _several_ranges(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(driver, "RANGE_ENTRIES", 16)
    monkeypatch.setattr(checking, "JOBS_A_REQUEST", 3)
    monkeypatch.setattr(checking, "LONG_ENTRIES", 1)


@pytest.fixture
async def setting(
    pool: asyncpg.Pool,
    database: Database,
    tmp_path: Path,
    superuser: asyncpg.Connection,
    monkeypatch: pytest.MonkeyPatch,
) -> AsyncIterator[Setting]:
    """A verifier with one process: a start takes half a second, and verdicts of several are looked at above. Of two,
    one may still be beginning when the other has checked all, and is not kept."""
    monkeypatch.setattr(checking, "PROCESSES_MAX", 1)
    await superuser.execute("SET session_replication_role = replica")
    await insert(superuser, LEDGER)
    setting = Setting(pool, database.service_url, tmp_path)
    yield setting
    await setting.verifier.close()


def children() -> set[str]:
    """Processes that this one has started."""
    return {*Path(f"/proc/{os.getpid()}/task/{os.getpid()}/children").read_text().split()}


@pytest.fixture(scope="module")
async def kept() -> AsyncIterator[checking.KeptProcesses]:
    """Processes for one case after the other."""
    kept = checking.KeptProcesses()
    yield kept
    await kept.close()


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
async def test_processes_give_the_verdict_of_one(
    case: tamper.Case, superuser: asyncpg.Connection, database: Database, kept: checking.KeptProcesses
) -> None:
    assert len(CASES) == len(NAMES) + 3
    await superuser.execute("SET session_replication_role = replica")
    await insert(superuser, tamper.LEDGER)
    await insert(superuser, tamper.OTHER)
    await case.edit(superuser)
    told: dict[str, list[Break]] = {"one": [], "several": []}
    async with consistent_reader(superuser, "acme") as reader:
        options = {"tenant_id": "acme", "open_snapshot": OPEN, "checkpoints": [tamper.HELD]}
        one = await verify(reader, **options, on_break=told["one"].append)
        async with checking.checking(database.service_url, reader, kept) as elsewhere:
            several = await verify(reader, **options, on_break=told["several"].append, elsewhere=elsewhere)
    assert several == one
    assert one.first_break is not None
    assert one.first_break.kind == case.kind
    assert sorted(told["several"], key=repr) == sorted(told["one"], key=repr)


async def test_they_see_what_the_verification_sees_and_end_with_it(
    setting: Setting, superuser: asyncpg.Connection, database: Database
) -> None:
    before = children()
    async with consistent_reader(superuser, "acme") as reader:
        assert await reader.last_entry() == LEDGER.head
        late = await asyncpg.connect(database.superuser_url)
        await late.execute("SET session_replication_role = replica")
        await late.execute("UPDATE scheduler.scheduler_log SET payload = '{}'")
        await late.close()
        async with checking.checking(database.service_url, reader) as elsewhere:
            await elsewhere.begun
            verdict = await verify(reader, tenant_id="acme", open_snapshot=OPEN, elsewhere=elsewhere)
            assert children() - before
    assert verdict.is_valid
    assert not children() - before


async def test_where_processes_cannot_work_the_chain_is_verified_without_them(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    for command in ((sys.executable, "-c", "raise SystemExit(1)"), ("/no/such/program",)):
        monkeypatch.setattr(checking, "COMMAND", command)
        with structlog.testing.capture_logs() as logged:
            verdict = (await setting.verifier.full("acme")).verdict
        assert verdict.is_valid
        assert [entry["event"] for entry in logged].count("checking_processes_failed") == 1


async def test_processes_end_when_nobody_waits_for_them_any_more(
    setting: Setting, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = children()
    monkeypatch.setattr(checking, "COMMAND", (sys.executable, "-c", "import sys; sys.stdin.read()"))
    asking = asyncio.ensure_future(setting.verifier.full("acme"))
    await until(lambda: children() - before, "they are started")
    asking.cancel()
    await asyncio.gather(asking, return_exceptions=True)
    # One that was just being started is killed as well, and is gone a moment later.
    await until(lambda: not children() - before, "they have ended")
    await until(lambda: setting.counted("scheduler_chain_verifications_total") == 0, "nothing was counted")


@pytest.mark.parametrize("bound", [None, "STORED_AT_ONCE", "STORED_CHARACTERS_MAX"])
async def test_jobs_are_compared_alike_however_many_are_stored_and_however_much_they_say(
    setting: Setting, superuser: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch, bound: str | None
) -> None:
    parts: list[JobRange] = []
    copied = PostgresChainReader.copied_by_job

    async def told(reader: PostgresChainReader, part: JobRange, take: Any) -> bool:
        parts.append(part)
        return await copied(reader, part, take)

    monkeypatch.setattr(PostgresChainReader, "copied_by_job", told)
    if bound is not None:
        monkeypatch.setattr(checking_process, bound, 7)
    await superuser.execute("UPDATE scheduler.jobs SET last_seq = last_seq + 1")
    async with consistent_reader(superuser, "acme") as reader:
        found, breaks = await checking_process._compared(reader, checking_process.CompareJobs(ALL_JOBS))
        one = await compare_jobs(reader.entries_by_job(), reader.jobs())
    assert found == one
    assert len(breaks) == len(LEDGER.jobs)
    assert bool(parts) == (bound is None)


async def test_of_very_many_breaks_the_first_are_told_and_all_are_counted(
    setting: Setting, superuser: asyncpg.Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(checking_process, "BREAKS_TOLD_MAX", 3)
    await superuser.execute("UPDATE scheduler.jobs SET last_seq = last_seq + 1")
    told: list[Break] = []
    async with consistent_reader(superuser, "acme") as reader:
        found, breaks = await checking_process._compared(reader, checking_process.CompareJobs(ALL_JOBS))
        await compare_jobs(reader.entries_by_job(), reader.jobs(), told.append)
    assert breaks == sorted(told, key=lambda each: each.seq)[:3]
    assert found.counts == {"projection": len(LEDGER.jobs)}


async def test_whoever_waits_for_a_process_that_fails_is_told_so(
    setting: Setting, superuser: asyncpg.Connection, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    begun = checking_process.framed(True)
    frame = "int.from_bytes(sys.stdin.buffer.read(4), 'big')"
    answers = f"sys.stdin.buffer.read({frame}); sys.stdout.buffer.write({begun!r}); sys.stdout.flush(); {frame}"
    monkeypatch.setattr(checking, "COMMAND", (sys.executable, "-c", f"import sys; {answers}"))
    monkeypatch.setattr(checking, "JOBS_A_REQUEST", 1)
    async with consistent_reader(superuser, "acme") as reader:
        with pytest.raises(checking.CheckingFailedError):
            async with checking.checking(database.service_url, reader, checking.KeptProcesses()) as elsewhere:
                await elsewhere.compare_jobs(None)
    await until(lambda: not [task for task in asyncio.all_tasks() if "._ask" in repr(task)], "nobody waits any more")


# --- the next verification ------------------------------------------------------------------------


async def test_a_whole_chain_is_valid_and_its_processes_see_what_the_next_verification_sees(
    setting: Setting, superuser: asyncpg.Connection
) -> None:
    before = children()
    with structlog.testing.capture_logs() as logged:
        verdict = (await setting.verifier.full("acme")).verdict
    assert verdict.is_valid
    assert verdict.verdicts["projection"] == "ok"
    assert not [entry for entry in logged if entry["event"] == "checking_processes_failed"]
    kept = children() - before
    assert kept
    sessions = "SELECT count(*) FROM pg_stat_activity WHERE datname = current_database() AND state LIKE 'idle in%'"

    async def hold_nothing_open() -> bool:
        return await superuser.fetchval(sessions) == 0

    await until(hold_nothing_open, "they see the ledger no longer")
    for change in ("UPDATE scheduler.jobs SET last_seq = last_seq + 1", "DELETE FROM scheduler.jobs"):
        await superuser.execute(change)
        verdict = (await setting.verifier.full("acme")).verdict
        assert verdict.breaks == {"projection": len(LEDGER.jobs)}
        assert children() - before == kept
        await until(hold_nothing_open, "they see the ledger no longer")
    await setting.verifier.close()
    assert not children() - before


async def test_processes_that_nobody_asks_again_are_ended(setting: Setting, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checking, "KEPT_S", 0.0)
    before = children()
    assert (await setting.verifier.full("acme")).verdict.is_valid
    await until(lambda: not children() - before, "they are ended")


async def test_one_that_was_killed_while_it_waited_is_started_anew(setting: Setting) -> None:
    before = children()
    await setting.verifier.full("acme")
    for pid in children() - before:
        os.kill(int(pid), signal.SIGKILL)
    await until(lambda: not children() - before, "they are gone")
    with structlog.testing.capture_logs() as logged:
        assert (await setting.verifier.full("acme")).verdict.is_valid
    assert not [entry for entry in logged if entry["event"] == "checking_processes_failed"]


async def test_no_more_are_kept_than_work_at_once() -> None:
    kept = checking.KeptProcesses()
    waiting = (sys.executable, "-c", "import sys; sys.stdin.read()")
    processes = [await asyncio.create_subprocess_exec(*waiting, stdin=asyncio.subprocess.PIPE) for _ in range(3)]
    assert [kept.keep(process) for process in processes] == [True, True, False]
    await kept.close()
    processes[2].kill()
    assert [await process.wait() for process in processes] == [-signal.SIGKILL] * 3


async def test_a_verifier_that_is_closed_keeps_none(setting: Setting) -> None:
    before = children()
    await setting.verifier.close()
    assert (await setting.verifier.full("acme")).verdict.is_valid
    assert not children() - before
