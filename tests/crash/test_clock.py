"""A wall clock that goes back, leaps and stands still, over restarts and while a node runs: HLCs only rise."""

from __future__ import annotations

import time
from itertools import pairwise
from pathlib import Path

from ledger.hlc import Hlc
from tests.app.chains import until
from tests.conftest import Database
from tests.crash.conftest import Launch
from tests.crash.load import Book, http_session
from tests.crash.proof import prove, verified_by_service, wal_folder
from tests.crash.skewed_clock import set_clock
from tests.crash.writer import writer

HOUR_S = 3600.0
YEAR_S = 365 * 86_400.0
PROGRAM = Path(__file__).with_name("skewed_clock.py")


async def test_hlcs_and_job_ids_never_repeat_whatever_the_wall_clock_does(
    tmp_path: Path, database: Database, launch: Launch
) -> None:
    book, data_dir, clock = Book(), tmp_path / "node", tmp_path / "clock"
    now_s = time.time()
    starts = (
        [{"ahead_s": 0.0}, {"ahead_s": -HOUR_S}, {"frozen_s": now_s}],
        [{"ahead_s": -HOUR_S}, {"ahead_s": HOUR_S}, {"ahead_s": -2 * HOUR_S}],
        [{"frozen_s": now_s - 24 * HOUR_S}, {"ahead_s": 0.0}],
    )
    for number, settings in enumerate(starts):
        set_clock(clock, **settings[0])
        child = await launch(data_dir, database.service_url, program=(PROGRAM, clock))
        url = await child.ready()
        async with writer(url, book) as one:
            for setting in settings:
                set_clock(clock, **setting)
                for level in ("LOCAL", "GLOBAL", "LOCAL"):
                    await one.created(level, named=False)
        if number == 0:
            await child.kill()
        else:
            await verified_by_service(url, book.tenants())
            assert await child.terminate() == 0

    told = [sent.answered.told for sent in book.sent]
    hlcs = [Hlc.parse(one["hlc"]) for one in told]
    assert all(before < after for before, after in pairwise(hlcs))
    assert hlcs[-1].physical_ms < (now_s + HOUR_S / 2) * 1000, "the leap of an hour was not adopted"
    assert len({one["job_id"] for one in told}) == len(told)
    await prove(book, database.superuser_url, [wal_folder(data_dir)])


async def test_a_clock_a_year_ahead_is_refused_at_the_start_and_not_adopted_by_a_node_at_work(
    tmp_path: Path, database: Database, launch: Launch
) -> None:
    book, data_dir, clock = Book(), tmp_path / "node", tmp_path / "clock"
    set_clock(clock, ahead_s=YEAR_S)
    child = await launch(data_dir, database.service_url, program=(PROGRAM, clock))
    assert await child.ended() == 1
    assert "ahead of that of Postgres" in child.last_words()
    set_clock(clock)
    child = await launch(data_dir, database.service_url, program=(PROGRAM, clock))
    url = await child.ready()
    async with writer(url, book) as one, http_session() as session:

        async def is_told(expected: bool) -> bool:
            async with session.get(f"{url}/readyz") as answer:
                assert answer.status == 200
                return bool((await answer.json())["checks"]["clock"]["ok"]) is not expected

        await one.created("GLOBAL", named=False)
        set_clock(clock, ahead_s=YEAR_S)
        await one.created("GLOBAL", named=False)
        await until(lambda: is_told(True), "/readyz tells of the clock")
        set_clock(clock)
        await until(lambda: is_told(False), "it is right again")
        await one.created("GLOBAL", named=False)
    hlcs = [Hlc.parse(sent.answered.told["hlc"]) for sent in book.sent]
    assert all(abs(hlc.physical_ms / 1000 - time.time()) < HOUR_S for hlc in hlcs)
    assert await child.terminate() == 0
