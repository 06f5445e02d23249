"""``submit_local``, ``submit_*_etcd`` and ``submit_global``: single ``POST /v1/jobs`` on 64 connections."""

from __future__ import annotations

from app.access import tokens
from app.node.kept_tokens import FIRST_TOKEN, FirstToken
from benchmarks.apart import apart
from benchmarks.bench import Bench, expect_fsyncs, wait_for
from benchmarks.copied_rows import count_rows
from benchmarks.events import job_requests
from benchmarks.http_client import Target, post
from benchmarks.ledger_checks import check_service
from benchmarks.load import Load, drive
from benchmarks.processes import SAFEKEEPERS, safekeepers, served, tally_serve
from benchmarks.row import Outcome, Row, expect, interleave
from benchmarks.yardsticks import etcd

TENANT = "bench"
CONNECTIONS = 64
WARM_UP_S = 1.0
WINDOW_S = 3.0
REQUESTS = 2000
FROZEN_ANSWER_BYTES_MORE = 102
"""By how much the answers of the empty handler are longer, 810 bytes: its session token, in header and body, is some
43 bytes longer than ours became since it was frozen, and its Location names the tenant."""
ANSWER_BYTES_TOLERANCE = 12
"""How far the sizes may differ otherwise: the fewer are answered, the shorter are our numbers in them."""
QUORUM = "REPLICATED_QUORUM"
ETCD_REQUESTS = 75_000
"""More than a run can send: each has a key of its own."""


def _load(url: str, durability: str, token: str | None = None) -> Load:
    return drive(
        Target.of(url),
        [post("/v1/jobs", body, token=token) for body in job_requests(TENANT, durability, REQUESTS)],
        CONNECTIONS,
        WARM_UP_S,
        WINDOW_S,
    )


def _measure_service(bench: Bench, durability: str, *, with_tokens: bool = False) -> Load:
    """The load that the service took, checked; ``with_tokens`` each request showed one."""
    with bench.fresh_database() as database, bench.fresh_folder() as folder:
        token, settings = None, {}
        if with_tokens:
            made = tokens.make()
            FIRST_TOKEN.store(folder, FirstToken("bench", made.digest.hex()))
            token, settings = made.text, {"TALLY_AUTH__MODE": "tokens"}
        with tally_serve(database.service_url, folder, settings) as url:
            load = apart(_load, url, durability, token)
            syncs = wait_for(check_service(url, {TENANT: load.answered}, token))
        bench.say(f"ours{', with tokens' if with_tokens else ''}: {_described(load)}; {syncs}")
    return load


def _measure_replicated(bench: Bench) -> Load:
    """The load that the service took at REGIONAL, each answer behind a quorum of three safekeepers, checked."""
    with bench.fresh_database() as database, bench.fresh_folder() as folder, safekeepers(folder) as addresses:
        settings = {"TALLY_WAL__ACK_MODE": QUORUM, "TALLY_REPLICATION__MEMBERS": ",".join(addresses)}
        with tally_serve(database.service_url, folder, settings) as url:
            load = apart(_load, url, "REGIONAL")
            syncs = wait_for(check_service(url, {TENANT: load.answered}, ack_mode=QUORUM))
        bench.say(f"ours, with safekeepers: {_described(load)}; {syncs}")
    return load


def _described(load: Load) -> str:
    return (
        f"{load.rate:,.0f}/s, p50 {load.p50_ms:.1f} ms, p99 {load.p99_ms:.1f} ms, {load.answered} answers of "
        f"{load.answer_bytes:.0f} bytes, client at {load.client_cpu:.0%} of a core"
    )


def measure_local(bench: Bench) -> Outcome:
    """The service at LOCAL against an empty handler."""
    answers: dict[str, Load] = {}

    def ours() -> float:
        answers["ours"] = _measure_service(bench, "LOCAL")
        return answers["ours"].rate

    def against() -> float:
        with served("benchmarks.yardsticks.empty_service", {}) as url:
            load = answers["against"] = apart(_load, url, "LOCAL")
        bench.say(f"empty handler: {_described(load)}")
        more = load.answer_bytes - answers["ours"].answer_bytes
        is_as_frozen = abs(more - FROZEN_ANSWER_BYTES_MORE) <= ANSWER_BYTES_TOLERANCE
        expect(is_as_frozen, f"the answers of the empty handler are {more:.0f} bytes longer than ours")
        return load.rate

    rates = interleave(bench, ours, against)
    mine, empty = answers["ours"], answers["against"]
    return rates.outcome(
        f"last run: p99 {mine.p99_ms:.1f} ms against {empty.p99_ms:.1f} ms, client at {mine.client_cpu:.0%} and "
        f"{empty.client_cpu:.0%} of a core"
    )


def measure_local_tokens(bench: Bench) -> Outcome:
    """The service at LOCAL with tokens against the same without."""
    return interleave(
        bench,
        lambda: _measure_service(bench, "LOCAL", with_tokens=True).rate,
        lambda: _measure_service(bench, "LOCAL").rate,
    ).outcome()


def measure_global(bench: Bench) -> Outcome:
    """The service at GLOBAL against one transaction a request."""
    latencies: dict[str, Load] = {}

    def ours() -> float:
        latencies["ours"] = _measure_service(bench, "GLOBAL")
        return latencies["ours"].rate

    def against() -> float:
        load = latencies["against"] = _measure_naive(bench)
        return load.rate

    rates = interleave(bench, ours, against)
    mine, naive = latencies["ours"], latencies["against"]
    return rates.outcome(f"last run: p99 {mine.p99_ms:.1f} ms against {naive.p99_ms:.1f} ms")


def _measure_naive(bench: Bench) -> Load:
    with bench.yardstick_database("chained_log") as database_url:
        before = bench.postgres_fsyncs()
        with served("benchmarks.yardsticks.naive_service", {"BENCH_DATABASE_URL": database_url}) as url:
            load = apart(_load, url, "GLOBAL")
        bench.say(f"naive: {_described(load)}")
        rows = wait_for(count_rows(database_url))
        expect(rows == {TENANT: load.answered}, f"the naive service answered {load.answered} and stored {rows}")
        # The head's lock is held until the commit is on disk, so no two requests share an fsync.
        expect_fsyncs(bench, before, load.answered, "naive service")
    return load


def measure_local_etcd(bench: Bench) -> Outcome:
    """The service at LOCAL against one put-if-absent of etcd."""
    return interleave(bench, lambda: _measure_service(bench, "LOCAL").rate, lambda: _measure_etcd(bench).rate).outcome()


def measure_quorum_etcd(bench: Bench) -> Outcome:
    """The service with safekeepers against one put-if-absent of as many members of etcd."""
    loads: dict[str, Load] = {}

    def ours() -> float:
        load = loads["ours"] = _measure_replicated(bench)
        return load.rate

    def against() -> float:
        load = loads["etcd"] = _measure_etcd(bench, SAFEKEEPERS)
        return load.rate

    rates = interleave(bench, ours, against)
    mine, other = loads["ours"], loads["etcd"]
    return rates.outcome(f"last run: p50 {mine.p50_ms:.1f} ms against {other.p50_ms:.1f} ms")


def _measure_etcd(bench: Bench, members: int = 1) -> Load:
    with bench.fresh_folder() as folder, etcd.served(folder, members) as url:
        load = apart(_load_etcd, url)
        stored = etcd.puts(url)
        expect(stored == load.answered, f"etcd answered {load.answered} and stored {stored}")
    bench.say(f"etcd: {_described(load)}")
    return load


def _load_etcd(url: str) -> Load:
    bodies = job_requests(TENANT, "LOCAL", REQUESTS)
    requests = list(etcd.transactions([bodies[number % REQUESTS] for number in range(ETCD_REQUESTS)]))
    return drive(Target.of(url), requests, CONNECTIONS, WARM_UP_S, WINDOW_S, status=200)


LOCAL = Row(
    "submit_local",
    "requests/s",
    0.8,
    "single POST /v1/jobs at LOCAL, 64 connections, against FastAPI as one would set it up first: the same models, an "
    "empty handler, an answer some 100 bytes longer",
    measure_local,
)
LOCAL_TOKENS = Row(
    "submit_local_tokens",
    "requests/s",
    0.95,
    "single POST /v1/jobs at LOCAL, 64 connections, a token in each request and an actor in each event, against the "
    "same service with auth.mode none",
    measure_local_tokens,
)
LOCAL_ETCD = Row(
    "submit_local_etcd",
    "requests/s",
    0.7,
    "single POST /v1/jobs at LOCAL, 64 connections, against etcd, one member with fsync on: one put-if-absent "
    "transaction a request through its JSON gateway",
    measure_local_etcd,
)
QUORUM_ETCD = Row(
    "submit_quorum_etcd",
    "requests/s",
    1.0,
    "single POST /v1/jobs at REGIONAL, 64 connections, committed by a quorum of three safekeepers, against etcd, three "
    "members with fsync on: one put-if-absent transaction a request through the JSON gateway of their leader",
    measure_quorum_etcd,
)
GLOBAL = Row(
    "submit_global",
    "requests/s",
    4.0,
    "single POST /v1/jobs at GLOBAL, 64 connections, one tenant, against a naive service: one locked, chained INSERT "
    "transaction a request, pool of 16, same table and indexes, frozen",
    measure_global,
)
