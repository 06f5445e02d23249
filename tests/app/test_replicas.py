"""Reads from hot standbys: real ones that stream from the primary, made stale, cut off, frozen and killed."""

from __future__ import annotations

import asyncio
import re
import time
from collections.abc import AsyncIterator, Callable, Iterator
from contextlib import AsyncExitStack
from datetime import timedelta
from typing import Any

import asyncpg
import httpx
import pytest
from structlog.testing import capture_logs

from app.dev.embedded import EmbeddedPostgres
from app.node.wiring import running
from app.read.consistency import Promise, ReadLevel
from app.read.copies import BEAT_TIMEOUT_S, Heartbeat, Replicas, Source, replicas_at
from app.runtime.state.session import SessionTokens, Token
from app.store import reads
from app.store.reading import READ_TIMEOUT_S, reading
from ledger.errors import StartRefusedError
from tests.app.chains import until
from tests.app.conftest import MakeSettings, RunServer
from tests.app.postgres_proxy import PostgresProxy, proxy_to
from tests.app.service_thread import serving
from tests.app.standby import Standby, standby_of
from tests.app.starting import assert_no_start
from tests.conftest import Database

NOBODY = "postgresql://nobody@127.0.0.1:1/nothing"
PATIENCE_S = 60
AT_ONCE_S = READ_TIMEOUT_S * 0.9
"""A read that waits for a silent replica takes longer, and one that does not is ten times as fast."""


TOLD_TOO_OLD_MS = round(BEAT_TIMEOUT_S * 1000)
"""By so much an age may be too high, and the next one lower: a beat may have been under way for so long."""


@pytest.fixture(scope="module")
def running_standby(postgres: EmbeddedPostgres) -> Iterator[Standby]:
    with standby_of(postgres) as standby:
        yield standby


@pytest.fixture
async def standby(running_standby: Standby) -> AsyncIterator[Standby]:
    """A standby that runs and replays, before and after the test."""
    yield running_standby
    if not running_standby.is_running:
        await asyncio.to_thread(running_standby.start)
    await running_standby.resume()


@pytest.fixture(scope="module")
def shared_url(
    postgres: EmbeddedPostgres, running_standby: Standby, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[str]:
    """A node with one replica, which the tests share that do not touch its database."""
    replica = running_standby.url(postgres.service_url("replicas"))
    settings = {"database_replica_urls": [replica], "read": {"wait": "6s"}, "verify": {"on_start": False}}
    with serving(postgres, tmp_path_factory.mktemp("replicas"), "replicas", **settings) as url:
        yield url


@pytest.fixture
def with_replicas(make_settings: MakeSettings, database: Database, standby: Standby) -> Callable[..., Any]:
    """Settings of a node that knows the replicas given, or the standby alone."""

    def make(*urls: str, **given: Any) -> Any:
        return make_settings(database_replica_urls=list(urls or [standby.url(database.service_url)]), **given)

    return make


class Asked:
    """The replicas of the shared node as a node of their own sees them, through a proxy, and how often it looked."""

    def __init__(self, replicas: Replicas, proxy: PostgresProxy) -> None:
        self.proxy = proxy
        self.looks = 0
        self._replicas = replicas

    async def read(self, *, max_staleness_ms: int = 86_400_000, wait_s: float = 0.0) -> Source | None:
        promise = Promise(ReadLevel.BOUNDED_STALENESS, (), max_staleness_ms)
        answer = await self._replicas.read(self._look, promise, wait_s)
        return None if answer is None else answer[1]

    async def grow_stale(self, enough_ms: int) -> None:
        """Return once the replica answers, and is behind far enough."""

        async def is_behind() -> bool:
            source = await self.read()
            return source is not None and source.staleness_ms >= enough_ms

        await until(is_behind, f"the replica is {enough_ms} ms behind", PATIENCE_S)

    async def _look(self, pool: asyncpg.Pool[asyncpg.Record], judge: Callable[[reads.Seen], None]) -> None:
        self.looks += 1
        async with reading(pool, snapshot=True) as connection:
            judge(await reads.seen(connection, [], "stranger"))


@pytest.fixture
async def replicas(shared_url: str, postgres: EmbeddedPostgres, standby: Standby) -> AsyncIterator[Asked]:
    primary = postgres.service_url("replicas")
    connection = await asyncpg.connect(primary)
    origin = await connection.fetchval("SELECT log_origin FROM scheduler.ledger_identity")
    await connection.close()
    async with proxy_to(standby.url(primary)) as proxy, replicas_at([proxy.url], primary, origin) as replicas:
        assert replicas is not None
        running = asyncio.create_task(replicas.run())
        try:
            yield Asked(replicas, proxy)
        finally:
            running.cancel()


async def create(client: httpx.AsyncClient, job_id: str) -> str:
    """Chain the creation of a job; returns the session."""
    answer = await client.post("/v1/jobs", json={"tenant_id": "acme", "job_id": job_id, "durability": "GLOBAL"})
    assert answer.status_code == 201, answer.text
    return answer.headers["tally-session"]


async def read(client: httpx.AsyncClient, job_id: str, session: str | None = None, **params: Any) -> httpx.Response:
    headers = {} if session is None else {"Tally-Session": session}
    return await client.get(f"/v1/jobs/{job_id}", params={"tenant_id": "acme", **params}, headers=headers)


async def source(client: httpx.AsyncClient, job_id: str, session: str | None = None, **params: Any) -> str:
    answer = await read(client, job_id, session, **params)
    assert answer.status_code == 200, answer.text
    return answer.json()["consistency"]["source"]


async def read_from(client: httpx.AsyncClient, wanted: str, job_id: str, **how: Any) -> dict[str, Any]:
    """The job, once it comes from ``wanted``: a replica that a busy machine held up is out for a moment."""

    async def found() -> Any:
        answer = await read(client, job_id, **how)
        is_wanted = answer.status_code == 200 and answer.json()["consistency"]["source"] == wanted
        return answer.json() if is_wanted else None

    return await until(found, f"{wanted} answers", PATIENCE_S)


async def grow_stale(client: httpx.AsyncClient, enough_ms: int) -> None:
    """Return once the replica, which is paused, is behind far enough."""

    async def is_behind() -> bool:
        job = await read_from(client, "replica-1", "old", consistency="eventual")
        return bool(job["consistency"]["staleness_ms"] >= enough_ms)

    await until(is_behind, f"the replica is {enough_ms} ms behind", PATIENCE_S)


def problem(answer: httpx.Response) -> tuple[int, str]:
    return answer.status_code, answer.json()["type"].rsplit("/", 1)[-1]


@pytest.fixture
async def client(shared_url: str, standby: Standby) -> AsyncIterator[httpx.AsyncClient]:
    """A client of the shared node; its replica has the job ``old`` and answers."""
    async with httpx.AsyncClient(base_url=shared_url, timeout=30, trust_env=False) as client:
        await create(client, "old")
        await read_from(client, "replica-1", "old", consistency="eventual")
        yield client


@pytest.fixture
async def own_client(run_server: RunServer, with_replicas: Callable[..., Any]) -> AsyncIterator[httpx.AsyncClient]:
    """A client of a node of its own with one replica, which has the job ``old`` and answers."""
    async with run_server(with_replicas()) as client:
        await create(client, "old")
        await read_from(client, "replica-1", "old", consistency="eventual")
        yield client


async def test_a_replica_answers_all_but_strong_reads(client: httpx.AsyncClient) -> None:
    session = await create(client, "fresh")
    await read_from(client, "replica-1", "fresh", session=session)
    old = await read_from(client, "replica-1", "old", session=session)
    assert 0 <= old["consistency"]["staleness_ms"] < 60_000
    for how in (
        {"consistency": "eventual"},
        {"consistency": "session"},
        {"consistency": "bounded_staleness", "max_staleness_ms": 60_000},
        {"as_of": old["last_hlc"]},
    ):
        answer = await read_from(client, "replica-1", "old", **how)
        assert answer.pop("consistency")["level"] == str(how.get("consistency", "session")).upper()
        assert answer == {name: old[name] for name in answer}
    assert await source(client, "old", consistency="strong") == "primary"


async def test_an_eventual_read_of_a_stale_replica_does_not_wait_and_says_how_stale(
    client: httpx.AsyncClient, standby: Standby
) -> None:
    await standby.pause()
    await create(client, "unseen")

    async def missed() -> httpx.Response | None:
        answer = await read(client, "unseen", consistency="eventual")
        return None if answer.status_code == 200 else answer

    missing = await until(missed, "the replica answers", PATIENCE_S)
    assert problem(missing) == (404, "job-not-found")
    assert "replica-1" in missing.json()["detail"]
    await grow_stale(client, 100 + TOLD_TOO_OLD_MS)
    assert await source(client, "old", consistency="bounded_staleness", max_staleness_ms=100) == "primary"


async def test_a_session_is_answered_by_whoever_has_its_writes(client: httpx.AsyncClient, standby: Standby) -> None:
    await standby.pause()
    session = await create(client, "new")
    assert await source(client, "new", session) == "primary"
    assert await source(client, "old", session) == "primary"
    await read_from(client, "replica-1", "old")
    created = (await read(client, "new", session)).json()["created_hlc"]
    assert await source(client, "new", session, as_of=created) == "primary"
    await standby.resume()
    await read_from(client, "replica-1", "new", session=session)
    await read_from(client, "replica-1", "new", session=session, as_of=created)


async def test_lists_and_events_keep_a_session_on_whichever_copy_answers(
    client: httpx.AsyncClient, standby: Standby
) -> None:
    async def listed(path: str, session: str | None = None, **how: Any) -> tuple[str, str]:
        headers = {} if session is None else {"Tally-Session": session}
        answer = await client.get(path, params={"tenant_id": "acme", **how}, headers=headers)
        answer.raise_for_status()
        return answer.json()["consistency"]["source"], answer.text

    async def listed_there(path: str, session: str | None = None) -> None:
        async def is_there() -> bool:
            return (await listed(path, session))[0] == "replica-1"

        await until(
            is_there, "the replica answers, which a busy machine may hold up, with a job table that has followed"
        )

    # The standby must not stop between what was chained and the job table that follows it.
    await listed_there("/v1/jobs", await create(client, "seen-there"))
    await standby.pause()
    session = await create(client, "unseen-there")
    await listed_there("/v1/jobs")
    await listed_there("/v1/jobs/old/events")
    for path in ("/v1/jobs", "/v1/jobs/unseen-there/events"):
        source, text = await listed(path, session)
        assert source == "primary"
        assert '"JobCreated"' in text or "unseen-there" in text
        assert (await listed(path, consistency="strong"))[0] == "primary"
    await standby.resume()
    await read_from(client, "replica-1", "unseen-there", session=session)
    await listed_there("/v1/jobs", session)


async def test_a_session_waits_a_little_for_a_replica_that_is_nearly_there(
    run_server: RunServer, with_replicas: Callable[..., Any], standby: Standby
) -> None:
    async with run_server(with_replicas(read={"wait": "60s"})) as client:
        await create(client, "old")
        await read_from(client, "replica-1", "old", consistency="eventual")
        loop, number = asyncio.get_running_loop(), 0
        until_s = loop.time() + PATIENCE_S
        while loop.time() < until_s:
            number += 1
            await standby.pause()
            session = await create(client, f"new-{number}")
            waiting = asyncio.create_task(source(client, f"new-{number}", session))
            for _ in range(3):
                await source(client, "old", consistency="eventual")
            waited = not waiting.done()
            await standby.resume()
            if await waiting == "replica-1" and waited:
                return
    pytest.fail("no read waited for the replica")


async def test_a_session_does_not_wait_for_a_replica_that_is_far_behind(
    client: httpx.AsyncClient, replicas: Asked, standby: Standby
) -> None:
    await standby.pause()
    session = await create(client, "far")
    await grow_stale(client, 1000)
    assert await source(client, "far", session) == "primary"
    await replicas.grow_stale(500 + TOLD_TOO_OLD_MS)
    looks = replicas.looks
    assert await replicas.read(max_staleness_ms=0, wait_s=0.2) is None
    assert replicas.looks == looks + 1, "it looked again, so it waited"


async def test_a_read_is_never_staler_than_its_bound(client: httpx.AsyncClient, standby: Standby) -> None:
    await standby.pause()
    await grow_stale(client, 100 + TOLD_TOO_OLD_MS)
    bounded = {"consistency": "bounded_staleness"}
    await read_from(client, "replica-1", "old", **bounded, max_staleness_ms=60_000)
    for max_staleness_ms in (0, 100):
        assert await source(client, "old", **bounded, max_staleness_ms=max_staleness_ms) == "primary"
    await standby.resume()
    await read_from(client, "replica-1", "old", **bounded, max_staleness_ms=5000)


async def test_while_the_primary_is_away_replicas_answer_what_they_can(
    run_server: RunServer, with_replicas: Callable[..., Any], database: Database, standby: Standby
) -> None:
    settings = with_replicas(read={"wait": "50ms"})
    async with proxy_to(database.service_url) as primary, run_server(settings, url=primary.url) as client:
        session = await create(client, "old")
        await read_from(client, "replica-1", "old", session=session)
        await standby.pause()
        unseen = await create(client, "unseen")
        await primary.refuse()
        await read_from(client, "replica-1", "old", consistency="eventual")
        await read_from(client, "replica-1", "old", session=session)
        bounded = {"consistency": "bounded_staleness"}
        await read_from(client, "replica-1", "old", **bounded, max_staleness_ms=60_000)
        too_stale = await read(client, "old", **bounded, max_staleness_ms=0)
        assert problem(too_stale) == (503, "too-stale")
        assert "retry-after" in too_stale.headers
        assert (await read(client, "unseen", unseen)).status_code == 503
        assert (await read(client, "old", consistency="strong")).status_code == 503
        await primary.accept()
        await read_from(client, "primary", "unseen", session=unseen)


async def test_a_write_is_lost_only_by_the_word_of_one_who_saw_the_later_epoch(
    run_server: RunServer,
    with_replicas: Callable[..., Any],
    database: Database,
    superuser: asyncpg.Connection,
    standby: Standby,
) -> None:
    position = (
        "INSERT INTO scheduler.wal_positions (node_id, wal_id, epoch, chained_lsn, seen_durable_lsn)"
        " VALUES ('there', 'w', $1, $2, $2) ON CONFLICT (node_id) DO UPDATE"
        " SET epoch = excluded.epoch, chained_lsn = excluded.chained_lsn"
    )
    settings = with_replicas(read={"wait": "50ms"})
    async with proxy_to(database.service_url) as primary, run_server(settings, url=primary.url) as client:
        await create(client, "old")
        await superuser.execute(position, 2, 10)
        sessions = SessionTokens(await superuser.fetchval("SELECT secret FROM scheduler.session_secret"))
        seen = Token("there", 2, 10, "1:0:there")
        lost = sessions.encode(seen._replace(lsn=11))
        await read_from(client, "replica-1", "old", session=sessions.encode(seen))
        for unknown in (seen._replace(lsn=11), seen._replace(epoch=3), seen._replace(node_id="stranger")):
            assert problem(await read(client, "old", sessions.encode(unknown))) == (503, "session-not-caught-up")
        await standby.pause()
        async with superuser.transaction():
            await superuser.execute(
                "INSERT INTO scheduler.wal_epochs (node_id, epoch, end_lsn) VALUES ('there', 2, 10)"
            )
            await superuser.execute(position, 3, 40)
        assert problem(await read(client, "old", lost)) == (409, "write-lost")
        await primary.refuse()
        assert (await read(client, "old", lost)).status_code == 503
        await standby.resume()

        async def answered() -> httpx.Response | None:
            answer = await read(client, "old", lost)
            return None if answer.status_code == 503 else answer

        answer = await until(answered, "the replica is asked again", PATIENCE_S)
        assert problem(answer) == (409, "write-lost")


async def test_a_killed_replica_makes_no_read_fail_or_wait_and_is_used_again_when_it_is_back(
    client: httpx.AsyncClient, standby: Standby
) -> None:
    session = await create(client, "kept")
    await asyncio.to_thread(standby.kill)
    for how in ({"consistency": "eventual"}, {"session": session}, {"consistency": "strong"}):
        began_s = time.monotonic()
        assert await source(client, "kept", **how) == "primary"
        assert time.monotonic() - began_s < AT_ONCE_S
    await asyncio.to_thread(standby.start)
    await read_from(client, "replica-1", "kept", session=session)


async def test_a_frozen_replica_holds_reads_up_for_a_moment_at_most(
    run_server: RunServer, with_replicas: Callable[..., Any], database: Database, standby: Standby
) -> None:
    async with AsyncExitStack() as stack:
        replica = await stack.enter_async_context(proxy_to(standby.url(database.service_url)))
        client = await stack.enter_async_context(run_server(with_replicas(replica.url)))
        session = await create(client, "old")
        await read_from(client, "replica-1", "old", session=session)
        replica.stall()
        began_s = time.monotonic()
        reads = [source(client, "old", session), source(client, "old", consistency="eventual")]
        assert await asyncio.gather(*reads) == ["primary", "primary"]
        assert time.monotonic() - began_s < AT_ONCE_S
        replica.resume()
        await read_from(client, "replica-1", "old", session=session)


async def test_a_replica_that_is_known_to_be_silent_is_not_asked(replicas: Asked) -> None:
    await replicas.grow_stale(0)
    replicas.proxy.stall()
    looks = replicas.looks

    async def is_silent() -> bool:
        return await replicas.read() is None

    await until(is_silent, "the replica is known to be silent", PATIENCE_S)
    assert replicas.looks > looks
    looks = replicas.looks
    for _ in range(5):
        assert await replicas.read() is None
    assert replicas.looks == looks
    replicas.proxy.resume()
    await replicas.grow_stale(0)


async def test_replicas_take_turns_and_the_one_that_is_down_is_left_out(
    run_server: RunServer, with_replicas: Callable[..., Any], database: Database, standby: Standby
) -> None:
    one = standby.url(database.service_url)
    async with run_server(with_replicas(one, NOBODY, one)) as client:
        await create(client, "old")
        for name in ("replica-1", "replica-3", "replica-1"):
            await read_from(client, name, "old", consistency="eventual")
        sources = [await source(client, "old", consistency="eventual") for _ in range(12)]
        assert "replica-2" not in sources


async def test_an_age_is_told_by_the_clock_of_the_primary_alone(pool: asyncpg.Pool) -> None:
    here, elsewhere = Heartbeat(pool), Heartbeat(pool)
    beats = "SELECT beat_at FROM scheduler.heartbeat"
    await elsewhere.beat()
    theirs = await pool.fetchval(beats)
    assert here.age_ms(theirs) is None, "nothing is known before the first beat"
    await here.beat()
    own = await pool.fetchval(beats)
    assert here.age_ms(None) is None
    assert 10_000 <= here.age_ms(own - timedelta(seconds=10)) < 10_000 + 1000 * PATIENCE_S
    assert here.age_ms(own) <= here.age_ms(theirs)
    await elsewhere.beat()
    assert here.age_ms(await pool.fetchval(beats)) < 1000 * PATIENCE_S
    assert here.age_ms(own + timedelta(hours=1)) is None, "the clock was set back: no age can be trusted"


async def test_a_replica_of_another_ledger_or_of_unknown_age_is_not_believed(
    own_client: httpx.AsyncClient, superuser: asyncpg.Connection
) -> None:
    eventual = {"consistency": "eventual"}
    origin = await superuser.fetchval("SELECT log_origin FROM scheduler.ledger_identity")
    await superuser.execute("UPDATE scheduler.ledger_identity SET log_origin = 'another'")
    await read_from(own_client, "primary", "old", **eventual)
    for _ in range(5):
        assert await source(own_client, "old", **eventual) == "primary"
    await superuser.execute("UPDATE scheduler.ledger_identity SET log_origin = $1", origin)
    await read_from(own_client, "replica-1", "old", **eventual)
    await superuser.execute("REVOKE ALL ON scheduler.heartbeat FROM tallystick_service")
    assert (await own_client.get("/readyz")).status_code == 200, "a beat that is missed is no failure of the node"
    await superuser.execute("GRANT SELECT ON scheduler.heartbeat TO tallystick_service")
    await read_from(own_client, "replica-1", "old", **eventual)
    await superuser.execute("UPDATE scheduler.heartbeat SET beat_at = beat_at + interval '1 hour'")
    await read_from(own_client, "primary", "old", **eventual)
    bounded = {"consistency": "bounded_staleness", "max_staleness_ms": 86_400_000}
    assert await source(own_client, "old", **bounded) == "primary"


async def test_a_node_starts_and_reads_while_no_replica_answers_and_beats_only_for_replicas(
    run_server: RunServer, with_replicas: Callable[..., Any], make_settings: MakeSettings, superuser: asyncpg.Connection
) -> None:
    beats = "SELECT beat_at FROM scheduler.heartbeat"
    async with run_server(make_settings("plain")) as client:
        await create(client, "old")
        assert await source(client, "old", consistency="eventual") == "primary"
        assert await superuser.fetchval(beats) is None
    async with run_server(with_replicas(NOBODY, NOBODY)) as client, asyncio.timeout(PATIENCE_S):
        session = await create(client, "new")
        assert await source(client, "new", session) == "primary"
        assert await source(client, "old", consistency="eventual") == "primary"
        assert (await client.get("/readyz")).status_code == 200
        while (first := await superuser.fetchval(beats)) is None:
            pass
        while (second := await superuser.fetchval(beats)) == first:
            pass
    assert timedelta(milliseconds=200) < second - first < timedelta(seconds=PATIENCE_S)


async def test_a_replica_that_never_worked_is_in_the_log_the_checks_and_the_metrics(
    with_replicas: Callable[..., Any], run_server: RunServer, standby: Standby, database: Database
) -> None:
    fit = standby.url(database.service_url)
    wrong = re.sub(":[^:@/]+@", ":other@", fit)
    with capture_logs() as lines:
        async with run_server(with_replicas(NOBODY, fit, wrong)) as client:

            async def told() -> str:
                detail: str | None = (await client.get("/readyz")).json()["checks"]["replicas"].get("detail")
                return detail or ""

            async def all_are() -> bool:
                measured = (await client.get("/metrics")).text
                fitness = [f'replica_fit{{replica="replica-{n}"}} {value}.0' for n, value in ((1, 0), (2, 1), (3, 0))]
                return "replica-1" in await told() and "replica-3" in await told() and all(map(measured.count, fitness))

            await until(all_are, "both are reported, and the other is asked", PATIENCE_S)
            detail = await told()
            assert re.fullmatch(
                r"replica-1 at 127.0.0.1:1/nothing answers no reads: ConnectionRefusedError: .*; "
                r"replica-3 at 127.0.0.1:\d+/\w+ answers no reads: InvalidPasswordError: .*",
                detail,
            )
            assert "nobody" not in detail, "no login is told"
            assert (await client.get("/readyz")).status_code == 200
    unfit = {line["replica"] for line in lines if line["event"] == "replica_unfit"}
    assert unfit >= {"replica-1", "replica-3"}


async def test_a_start_while_no_host_is_the_primary_says_what_it_waited_for(
    make_settings: MakeSettings, standby: Standby, postgres: EmbeddedPostgres, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("app.node.start.connecting.CONNECT_WAIT_S", 0.2)
    url = f"{standby.url(postgres.service_url('postgres'))}&target_session_attrs=read-write"
    start = running(make_settings(), url)
    await assert_no_start(start, StartRefusedError, match="no host of database_url .*target_session_attrs.*switchover")
