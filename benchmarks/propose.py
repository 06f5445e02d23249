"""``propose_etcd``: compare-and-swap on what is promised, on 64 connections, against a transaction of etcd each."""

from __future__ import annotations

import json

from benchmarks.apart import apart
from benchmarks.bench import Bench, wait_for
from benchmarks.http_client import Target, post
from benchmarks.ledger_checks import check_service
from benchmarks.load import Load, drive
from benchmarks.processes import tally_serve
from benchmarks.row import Outcome, Row, expect, interleave
from benchmarks.submit import CONNECTIONS, TENANT, WARM_UP_S, WINDOW_S
from benchmarks.yardsticks import etcd

PROPOSALS = 75_000
"""More than a run can send: each claims a node of its own."""


def _bodies() -> list[bytes]:
    """Placements, each on a node that must be free."""
    reservation = {"cpu_millis": 4000, "memory_bytes": 17_179_869_184}
    return [
        json.dumps(
            {
                "tenant_id": TENANT,
                "commitment": {
                    "kind": "Placement",
                    "capsule": f"capsule-{number:08d}",
                    "node": f"node-{number:08d}",
                    "reservation": reservation,
                    "limit": reservation,
                },
                "precondition": {"kind": "NodeFreeOf", "node": f"node-{number:08d}", "at_least": reservation},
            },
            separators=(",", ":"),
        ).encode()
        for number in range(PROPOSALS)
    ]


def _propose(url: str) -> Load:
    requests = [post("/v1/commitments", body, key=f"key-{number}") for number, body in enumerate(_bodies())]
    return drive(Target.of(url), requests, CONNECTIONS, WARM_UP_S, WINDOW_S)


def _transact(url: str) -> Load:
    return drive(Target.of(url), list(etcd.transactions(_bodies())), CONNECTIONS, WARM_UP_S, WINDOW_S, status=200)


def measure(bench: Bench) -> Outcome:
    """Proposals, each judged, chained and committed, against one compare-and-put of etcd each."""
    loads: dict[str, Load] = {}

    def ours() -> float:
        with bench.fresh_database() as database, bench.fresh_folder() as folder:
            with tally_serve(database.service_url, folder) as url:
                load = loads["ours"] = apart(_propose, url)
                syncs = wait_for(check_service(url, {TENANT: load.answered}))
            bench.say(f"ours: {_described(load)}; {syncs}")
        return load.rate

    def against() -> float:
        with bench.fresh_folder() as folder, etcd.served(folder) as url:
            load = loads["etcd"] = apart(_transact, url)
            stored = etcd.puts(url)
            expect(stored == load.answered, f"etcd answered {load.answered} and stored {stored}")
        bench.say(f"etcd: {_described(load)}")
        return load.rate

    rates = interleave(bench, ours, against)
    mine, other = loads["ours"], loads["etcd"]
    return rates.outcome(
        f"last run: p50 {mine.p50_ms:.1f} ms against {other.p50_ms:.1f} ms, p99 {mine.p99_ms:.1f} against "
        f"{other.p99_ms:.1f} ms"
    )


def _described(load: Load) -> str:
    return f"{load.rate:,.0f}/s, p50 {load.p50_ms:.1f} ms, p99 {load.p99_ms:.1f} ms, {load.answered} answers"


ETCD = Row(
    "propose_etcd",
    "proposals/s",
    1.0,
    "single POST /v1/commitments, 64 connections, a placement that bets on a free node each, judged and chained in "
    "PostgreSQL, against etcd, one member with fsync on: one transaction that compares and puts the same bytes",
    measure,
)
