"""``submit_local``, ``submit_*_etcd`` and ``submit_global``: single ``POST /v1/jobs`` on 64 connections."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from app.runtime.state.kept_files import FIRST_TOKEN, FirstToken
from app.trust import callers
from benchmarks.bench import Bench, expect_fsyncs, wait_for
from benchmarks.copied_rows import count_rows
from benchmarks.events import job_requests
from benchmarks.http_client import post
from benchmarks.in_turn import Compared, compare
from benchmarks.ledger_checks import check_service
from benchmarks.load import Load, Side, followed
from benchmarks.processes import SAFEKEEPERS, safekeepers, served, tally_serve
from benchmarks.row import RUNS, Outcome, Row, expect
from benchmarks.yardsticks import etcd

TENANT = "bench"
REQUESTS = 2000
FROZEN_ANSWER_BYTES_MORE = 80
"""By how much the answers of the empty handler are longer, 810 bytes: its session token, in header and body, is some
43 bytes longer than ours became since it was frozen, and its Location names the tenant. Ours name the home region."""
ANSWER_BYTES_TOLERANCE = 12
"""How far the sizes may differ otherwise: the fewer are answered, the shorter are our numbers in them."""
QUORUM = "REPLICATED_QUORUM"
ETCD_REQUESTS = 50_000
"""More than a run can send: each has a key of its own."""


def _jobs(durability: str, token: str | None = None) -> list[bytes]:
    return [post("/v1/jobs", body, token=token) for body in job_requests(TENANT, durability, REQUESTS)]


def _puts() -> list[bytes]:
    bodies = job_requests(TENANT, "LOCAL", REQUESTS)
    return [*etcd.transactions([bodies[number % REQUESTS] for number in range(ETCD_REQUESTS)])]


@contextmanager
def _service(bench: Bench, durability: str, *, with_tokens: bool = False) -> Iterator[Compared]:
    """The service; ``with_tokens`` each request shows one."""
    with bench.fresh_database() as database, bench.fresh_folder() as folder:
        token, settings = None, {}
        if with_tokens:
            made = callers.new_token()
            FIRST_TOKEN.store(folder, FirstToken("bench", made.digest.hex()))
            token, settings = made.text, {"TALLY_AUTH__MODE": "tokens"}
        with tally_serve(database.service_url, folder, settings) as url:

            def check(load: Load) -> str:
                return wait_for(check_service(url, {TENANT: load.answered}, token))

            side = Side(url, partial(_jobs, durability, token), settle=partial(followed, token=token))
            yield Compared(f"ours{', with tokens' if with_tokens else ''}", side, check)


@contextmanager
def _replicated(bench: Bench) -> Iterator[Compared]:
    """The service at REGIONAL, each answer behind a quorum of three safekeepers."""
    with bench.fresh_database() as database, bench.fresh_folder() as folder, safekeepers(folder) as addresses:
        settings = {"TALLY_WAL__ACK_MODE": QUORUM, "TALLY_REPLICATION__MEMBERS": ",".join(addresses)}
        with tally_serve(database.service_url, folder, settings) as url:

            def check(load: Load) -> str:
                return wait_for(check_service(url, {TENANT: load.answered}, ack_mode=QUORUM))

            yield Compared("ours, with safekeepers", Side(url, partial(_jobs, "REGIONAL"), settle=followed), check)


@contextmanager
def _empty_handler(_: Bench) -> Iterator[Compared]:
    with served("benchmarks.yardsticks.empty_service", {}) as url:
        yield Compared("empty handler", Side(url, partial(_jobs, "LOCAL")))


@contextmanager
def _naive(bench: Bench) -> Iterator[Compared]:
    with bench.yardstick_database("chained_log") as database_url:
        answered: list[int] = []
        before = bench.postgres_fsyncs()
        with served("benchmarks.yardsticks.naive_service", {"BENCH_DATABASE_URL": database_url}) as url:

            def check(load: Load) -> str:
                rows = wait_for(count_rows(database_url))
                expect(rows == {TENANT: load.answered}, f"the naive service answered {load.answered}, stored {rows}")
                answered.append(load.answered)
                return ""

            yield Compared("naive", Side(url, partial(_jobs, "GLOBAL")), check)
        # The head's lock is held until the commit is on disk, so no two requests share an fsync. What idle connections
        # synced PostgreSQL counts when they end; it counts some hundreds of ours, too, which had the same server.
        expect_fsyncs(bench, before, sum(answered), "naive service")


@contextmanager
def _etcd(bench: Bench, members: int = 1) -> Iterator[Compared]:
    with bench.fresh_folder() as folder, etcd.served(folder, members) as url:
        yield Compared("etcd", Side(url, _puts, status=200), partial(check_etcd, url))


def check_etcd(url: str, load: Load) -> str:
    """All that etcd answered is there."""
    stored = etcd.puts(url)
    expect(stored == load.answered, f"etcd answered {load.answered} and stored {stored}")
    return ""


def measure_local(bench: Bench) -> Outcome:
    """The service at LOCAL against an empty handler."""
    compared = compare(bench, partial(_service, bench, "LOCAL"), partial(_empty_handler, bench))
    for mine, empty in compared.loads:
        more = empty.answer_bytes - mine.answer_bytes
        is_as_frozen = abs(more - FROZEN_ANSWER_BYTES_MORE) <= ANSWER_BYTES_TOLERANCE
        expect(is_as_frozen, f"the answers of the empty handler are {more:.0f} bytes longer than ours")
    return compared.outcome()


def measure_local_tokens(bench: Bench) -> Outcome:
    """The service at LOCAL with tokens against the same without."""
    ours = partial(_service, bench, "LOCAL", with_tokens=True)
    return compare(bench, ours, partial(_service, bench, "LOCAL"), RUNS).outcome()


def measure_global(bench: Bench) -> Outcome:
    """The service at GLOBAL against one transaction a request."""
    return compare(bench, partial(_service, bench, "GLOBAL"), partial(_naive, bench)).outcome()


def measure_local_etcd(bench: Bench) -> Outcome:
    """The service at LOCAL against one put-if-absent of etcd."""
    return compare(bench, partial(_service, bench, "LOCAL"), partial(_etcd, bench)).outcome()


def measure_quorum_etcd(bench: Bench) -> Outcome:
    """The service with safekeepers against one put-if-absent of as many members of etcd."""
    return compare(bench, partial(_replicated, bench), partial(_etcd, bench, SAFEKEEPERS)).outcome()


LOCAL = Row(
    "submit_local",
    "requests/s",
    1.0,
    "single POST /v1/jobs at LOCAL, 64 connections, against FastAPI as one would set it up first: the same models, an "
    "empty handler, an answer some 100 bytes longer",
    measure_local,
)
LOCAL_TOKENS = Row(
    "submit_local_tokens",
    "requests/s",
    0.85,
    "single POST /v1/jobs at LOCAL, 64 connections, a token in each request and an actor in each event, against the "
    "same service with auth.mode none",
    measure_local_tokens,
)
LOCAL_ETCD = Row(
    "submit_local_etcd",
    "requests/s",
    1.3,
    "single POST /v1/jobs at LOCAL, 64 connections, against etcd, one member with fsync on: one put-if-absent "
    "transaction a request through its JSON gateway",
    measure_local_etcd,
)
QUORUM_ETCD = Row(
    "submit_quorum_etcd",
    "requests/s",
    1.7,
    "single POST /v1/jobs at REGIONAL, 64 connections, committed by a quorum of three safekeepers, against etcd, three "
    "members with fsync on: one put-if-absent transaction a request through the JSON gateway of their leader",
    measure_quorum_etcd,
)
GLOBAL = Row(
    "submit_global",
    "requests/s",
    5.5,
    "single POST /v1/jobs at GLOBAL, 64 connections, one tenant, against a naive service: one locked, chained INSERT "
    "transaction a request, pool of 16, same table and indexes, frozen",
    measure_global,
)
