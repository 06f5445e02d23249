"""``python -m benchmarks.space``: what a ledger takes on disk whose oldest entries leave as others come, a line a step.

cycles   is filled with ``--entries`` entries and pruned of all of them, ``--cycles`` times. At the end tables and
         indexes without tiles take at most ``CYCLES_TIMES_MAX`` of the most that they took in the first cycle
refill   has ``--refill`` entries, of which nine tenths leave, and as many come: tables and indexes grow by at most a
         tenth. Then ``tally verify`` verifies what is left, archive and rest as one, and a receipt from before

PostgreSQL has its defaults, autovacuum too, which comes by once a minute; each step begins when it has nothing left to
do, since between two prunes of a real ledger there are hours. Tiles of hashes stay, 32 bytes an entry that ever was,
and are shown apart. While rows are removed, single writes are timed, and no session may wait for a lock for longer than
``LOCK_MS_MAX``. The exit code is 1 when a bound is missed.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import re
import subprocess
import sys
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path

import asyncpg
from rich.console import Console

from benchmarks.bench import Bench, wait_for
from benchmarks.http_client import get
from benchmarks.machine import describe
from benchmarks.pruned_ledger import (
    TENANT,
    Served,
    asked,
    fill,
    probing,
    prune,
    served_ledger,
    set_period,
    until_prunable,
    until_removed,
)
from benchmarks.row import expect

HERE = Path(__file__).resolve().parent
CYCLES_TIMES_MAX = 1.3
REFILL_TIMES_MAX = 1.1
LOCK_MS_MAX = 100.0
QUIET_S = 5.0
"""How long single writes are timed before anything is removed."""
STATISTICS_S = 1.5
"""Until sessions have reported what they removed."""
VACUUMED_TIMEOUT_S = 600.0
POLL_S = 1.0
_RELATIONS = """
SELECT kept.relname || part.name, part.bytes
  FROM pg_class kept
 CROSS JOIN LATERAL (SELECT '' AS name, pg_relation_size(kept.oid) AS bytes
                      UNION ALL SELECT ' toast', pg_total_relation_size(kept.reltoastrelid)
                      UNION ALL SELECT ' ' || i.indexrelid::regclass, pg_relation_size(i.indexrelid)
                                  FROM pg_index i WHERE i.indrelid = kept.oid) AS part
 WHERE kept.relnamespace = 'scheduler'::regnamespace AND kept.relkind IN ('r', 'm') AND part.bytes IS NOT NULL
"""
_OWED = """
SELECT s.relname, s.n_dead_tup
  FROM pg_stat_all_tables s JOIN pg_class c ON c.oid = s.relid
 WHERE s.schemaname IN ('scheduler', 'pg_toast')
   AND s.n_dead_tup > current_setting('autovacuum_vacuum_threshold')::float
                      + current_setting('autovacuum_vacuum_scale_factor')::float * greatest(c.reltuples, 0)
"""
_VACUUMING = "SELECT count(*) FROM pg_stat_progress_vacuum"
TILES = "merkle_tile"
SHOWN = ("valid", "verified_from_seq", "entries_checked", "pruned")
"""Members of a verdict that are shown."""


@dataclass(slots=True)
class Sizes:
    """Bytes of each table and index."""

    by_name: Mapping[str, int]

    @property
    def total(self) -> int:
        """All of them."""
        return sum(self.by_name.values())

    @property
    def tiles(self) -> int:
        """Those of the tree."""
        return sum(size for name, size in self.by_name.items() if name.startswith(TILES))

    def shown(self) -> dict[str, float]:
        """In MB, partitions added up, the largest first, those under 1 MB left out."""
        added: dict[str, int] = {}
        for name, size in self.by_name.items():
            added[_of_all_partitions(name)] = added.get(_of_all_partitions(name), 0) + size
        return {name: _mb(size) for name, size in sorted(added.items(), key=lambda each: -each[1]) if size > 1e6}


@dataclass(slots=True)
class Space:
    """Runs on one PostgreSQL, and what they missed."""

    bench: Bench
    console: Console = field(default_factory=Console)
    missed: list[str] = field(default_factory=list)

    def tell(self, **measured: object) -> None:
        """One line."""
        self.console.print(json.dumps(measured), highlight=False, markup=False, soft_wrap=True)

    def hold(self, what: str, found: float, most: float) -> None:
        """Note whether a bound holds."""
        self.tell(bound=what, found=round(found, 3), at_most=most, holds=found <= most)
        if found > most:
            self.missed.append(what)

    def cycles(self, cycles: int, entries: int) -> None:
        """Fill and prune, again and again."""
        with served_ledger(self.bench) as ledger:
            one, most, end = wait_for(self._cycles(ledger, cycles, entries))
        shown = {"most of one cycle": one, "most of the last": most, "end": end}
        self.tell(
            of_one_cycle={name: round(each.total / one.total, 3) for name, each in shown.items()},
            without_tiles={
                name: round((each.total - each.tiles) / (one.total - one.tiles), 3) for name, each in shown.items()
            },
        )
        times = (end.total - end.tiles) / (one.total - one.tiles)
        self.hold(f"the end of {cycles} cycles, of the most of one, without tiles", times, CYCLES_TIMES_MAX)

    async def _cycles(self, ledger: Served, cycles: int, entries: int) -> tuple[Sizes, Sizes, Sizes]:
        """The most that tables and indexes took in the first cycle, in the last one, and what they take at the end."""
        most: list[Sizes] = []
        left = Sizes({})
        for cycle in range(1, cycles + 1):
            rate = await fill(ledger.url, f"cycle{cycle}", entries)
            if cycle == 1:
                await set_period(ledger.url)
                await self._time_quiet(ledger)
            waited_s = await until_prunable(ledger.url)
            filled = await sizes(ledger.database.superuser_url)
            left = await self._prune(ledger, None)
            most.append(max(filled, left, key=lambda each: each.total))
            self.tell(
                cycle=cycle,
                written_per_second=round(rate),
                signed_and_archived_s=round(waited_s, 1),
                filled_mb=_mb(filled.total),
                pruned_mb=_mb(left.total),
                tiles_mb=_mb(left.tiles),
                archive_mb=_mb(_folder_bytes(ledger.archive)),
                filled=filled.shown(),
                pruned=left.shown(),
            )
        return most[0], most[-1], left

    def refill(self, entries: int) -> None:
        """Nine tenths leave, and as many come."""
        with served_ledger(self.bench) as ledger:
            folder = ledger.archive.parent
            wait_for(self._refill(ledger, folder / "receipt", entries, entries // 10 * 9))
            at = ("--tenant", TENANT, "--url", ledger.url, "--no-state")
            self._verify("verify", *at)
            keys = folder / "keys.json"
            keys.write_bytes(wait_for(asked(ledger.url, get("/v1/keys"))).body)
            self._verify("verify", *at, "--with-archive", "--keys", str(keys))
            self._verify("verify-proof", str(folder / "receipt"), "--keys", str(keys), "--no-state")

    async def _refill(self, ledger: Served, receipt: Path, entries: int, leaving: int) -> None:
        await fill(ledger.url, "first", entries)
        await set_period(ledger.url)
        await until_prunable(ledger.url)
        receipt.write_bytes((await asked(ledger.url, get(f"/v1/chain/receipt?tenant_id={TENANT}&seq=1"))).body)
        await self._time_quiet(ledger)
        full = await sizes(ledger.database.superuser_url)
        pruned = await self._prune(ledger, leaving)
        await fill(ledger.url, "second", leaving)
        await until_prunable(ledger.url)
        await self._vacuumed(ledger)
        refilled = await sizes(ledger.database.superuser_url)
        shown = {"full": full, "pruned": pruned, "refilled": refilled}
        self.tell(
            entries=entries,
            archive_mb=_mb(_folder_bytes(ledger.archive)),
            **{f"{name}_mb": _mb(each.total) for name, each in shown.items()},
            **{name: each.shown() for name, each in shown.items()},
        )
        self.hold("full again, of full before", refilled.total / full.total, REFILL_TIMES_MAX)

    async def _prune(self, ledger: Served, to_seq: int | None) -> Sizes:
        """Prune, time writes meanwhile, wait for autovacuum; the sizes then."""
        began_s = time.perf_counter()
        database_url = ledger.database.superuser_url
        done = await prune(ledger.url, to_seq)
        answered_s = time.perf_counter() - began_s
        began_s = time.perf_counter()
        async with probing(ledger.url, database_url, f"during-{done['to_seq']}") as found:
            await until_removed(database_url, done["to_seq"])
        removed_s = time.perf_counter() - began_s
        (during,) = found
        vacuumed_s = await self._vacuumed(ledger)
        self.tell(
            pruned_entries=done["entries"],
            verified_and_read_back_s=round(answered_s, 1),
            removed_per_second=round(done["entries"] / removed_s),
            writes_meanwhile=during._asdict(),
            vacuumed_s=round(vacuumed_s, 1),
        )
        self.hold("longest wait for a lock in ms while rows go", during.longest_lock_ms, LOCK_MS_MAX)
        return await sizes(database_url)

    async def _time_quiet(self, ledger: Served) -> None:
        async with probing(ledger.url, ledger.database.superuser_url, "quiet") as found:
            await asyncio.sleep(QUIET_S)
        self.tell(writes_without_a_prune=found[0]._asdict())

    async def _vacuumed(self, ledger: Served) -> float:
        """Wait until autovacuum has nothing left to do."""
        began_s = time.perf_counter()
        await asyncio.sleep(STATISTICS_S)
        connection = await asyncpg.connect(ledger.database.superuser_url)
        try:
            while (owed := await connection.fetch(_OWED)) or await connection.fetchval(_VACUUMING):
                waited_s = time.perf_counter() - began_s
                expect(waited_s < VACUUMED_TIMEOUT_S, f"autovacuum does not come by: {list(map(tuple, owed))}")
                await asyncio.sleep(POLL_S)
        finally:
            await connection.close()
        return time.perf_counter() - began_s

    def _verify(self, *words: str) -> None:
        """What a command of ``tally`` verifies."""
        began_s = time.perf_counter()
        command = [sys.executable, "-m", "cli", *words, "--json"]
        done = subprocess.run(command, cwd=HERE.parent, capture_output=True, text=True, check=False)
        expect(done.returncode == 0, f"tally {words[0]} ended with {done.returncode}: {done.stdout}{done.stderr}")
        found = json.loads(done.stdout)
        shown = {name: found[name] for name in SHOWN if name in found}
        self.tell(verified=words[0], **shown, took_s=round(time.perf_counter() - began_s, 1))


async def sizes(url: str) -> Sizes:
    """What tables and indexes take now."""
    connection = await asyncpg.connect(url)
    try:
        return Sizes(dict(map(tuple, await connection.fetch(_RELATIONS))))
    finally:
        await connection.close()


def _of_all_partitions(name: str) -> str:
    return re.sub(r"(scheduler\.)?scheduler_log_p\d+", "scheduler_log", name)


def _folder_bytes(folder: Path) -> int:
    return sum(path.stat().st_size for path in folder.rglob("*") if path.is_file())


def _mb(size: float) -> float:
    return round(size / 1e6, 1)


def main() -> int:
    """Measure what was asked for; the exit code."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--cycles", type=int, default=10, help="how many, 10 by default; 0 for none")
    parser.add_argument("--entries", type=int, default=200_000, help="of a cycle, 200000 by default")
    parser.add_argument("--refill", type=int, default=1_000_000, help="entries, 1000000 by default; 0 for none")
    asked = parser.parse_args()
    bench = Bench(Path(os.environ.get("BENCH_DIR") or HERE.parent / "var"), Console(stderr=True))
    space = Space(bench)
    try:
        space.tell(**describe(bench.folder, None))
        if asked.cycles:
            space.cycles(asked.cycles, asked.entries)
        if asked.refill:
            space.refill(asked.refill)
    finally:
        bench.close()
    return 1 if space.missed else 0


if __name__ == "__main__":
    sys.exit(main())
