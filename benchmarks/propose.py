"""``propose_etcd``: compare-and-swap on what is promised, on 64 connections, against a transaction of etcd each."""

from __future__ import annotations

import json
from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial

from benchmarks.bench import Bench, wait_for
from benchmarks.http_client import post
from benchmarks.in_turn import Compared, compare
from benchmarks.ledger_checks import check_service
from benchmarks.load import Load, Side, followed
from benchmarks.processes import tally_serve
from benchmarks.row import Outcome, Row
from benchmarks.submit import TENANT, check_etcd
from benchmarks.yardsticks import etcd

PROPOSALS = 50_000
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


def _proposals() -> list[bytes]:
    return [post("/v1/commitments", body, key=f"key-{number}") for number, body in enumerate(_bodies())]


def _transactions() -> list[bytes]:
    return [*etcd.transactions(_bodies())]


@contextmanager
def _service(bench: Bench) -> Iterator[Compared]:
    with (
        bench.fresh_database() as database,
        bench.fresh_folder() as folder,
        tally_serve(database.service_url, folder) as url,
    ):

        def check(load: Load) -> str:
            return wait_for(check_service(url, {TENANT: load.answered}))

        yield Compared("ours", Side(url, _proposals, settle=followed), check)


@contextmanager
def _etcd(bench: Bench) -> Iterator[Compared]:
    with bench.fresh_folder() as folder, etcd.served(folder) as url:
        yield Compared("etcd", Side(url, _transactions, status=200), partial(check_etcd, url))


def measure(bench: Bench) -> Outcome:
    """Proposals, each judged, chained and committed, against one compare-and-put of etcd each."""
    return compare(bench, partial(_service, bench), partial(_etcd, bench)).outcome()


ETCD = Row(
    "propose_etcd",
    "proposals/s",
    1.1,
    "single POST /v1/commitments, 64 connections, a placement that bets on a free node each, judged and chained in "
    "PostgreSQL, against etcd, one member with fsync on: one transaction that compares and puts the same bytes",
    measure,
)
