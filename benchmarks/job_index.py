"""``index_follow``: what the index of jobs costs behind the commit, and what it keeps.

The entries of jobs of three events each pass by as the notary has them, with a snapshot every thousand: runs are made,
merged and stored as the notary does, on PostgreSQL, one transaction a snapshot. Counted is the time of this process on
the processor, which the notary shares with writes; bytes are those of the tables when the entries are in. Then a job
of ten entries is proved from what is stored.
"""

from __future__ import annotations

import os
import time
from hashlib import sha256

import asyncpg

from app.store.jobs import index as store
from app.write.followers.job_indexer import with_entries
from app.write.followers.tree_follower import IndexedTenant
from benchmarks.bench import Bench, wait_for
from benchmarks.row import Outcome, Row, expect
from ledger.job_index import covering
from ledger.job_index.proof import prove
from ledger.merkle import HASH_BYTES

ENTRIES = 1_000_000
ENTRIES_A_SNAPSHOT = 1000
ENTRIES_A_JOB = 3
TENANT = "bench"
US_MAX = 3.0
BYTES_MAX = 100
PROOF_S_MAX = 0.02


def measure(bench: Bench) -> Outcome:
    """Microseconds an entry, against ``US_MAX``."""
    with bench.fresh_database() as database:
        followed = wait_for(_follow(database.superuser_url))
    us, kept, proof_s, took_s = followed
    expect(kept <= BYTES_MAX, f"{kept:.0f} bytes are kept an entry, at most {BYTES_MAX} may be")
    expect(proof_s <= PROOF_S_MAX, f"a proof takes {1000 * proof_s:.1f} ms, at most {1000 * PROOF_S_MAX:.0f} may it")
    note = f"{ENTRIES:,} entries in {took_s:.1f} s; {kept:.0f} bytes an entry; a proof in {1000 * proof_s:.1f} ms"
    return Outcome(us, US_MAX, US_MAX / us, 1, note)


async def _follow(url: str) -> tuple[float, float, float, float]:
    """Microseconds and bytes an entry, seconds of a proof, and seconds in all."""
    connection = await asyncpg.connect(url)
    state, used_s, began_s = IndexedTenant(), 0.0, time.perf_counter()
    jobs_before = 0
    for _ in range(0, ENTRIES, ENTRIES_A_SNAPSHOT):
        numbers = (jobs_before + at // ENTRIES_A_JOB for at in range(ENTRIES_A_SNAPSHOT))
        keys = b"".join([sha256(b"job-%d" % number).digest() for number in numbers])
        jobs_before += ENTRIES_A_SNAPSHOT // ENTRIES_A_JOB - 20
        hashes = os.urandom(HASH_BYTES * ENTRIES_A_SNAPSHOT)
        begin_s = time.process_time()
        grown = await with_entries(connection, TENANT, state, keys, hashes)
        roots = grown.roots()
        used_s += time.process_time() - begin_s
        async with connection.transaction():
            begin_s = time.process_time()
            await store.store_runs(connection, TENANT, grown.stored, grown.merged)
            used_s += time.process_time() - begin_s
        state = grown.state
    took_s = time.perf_counter() - began_s
    expect(len(roots) == sum(1 for _ in covering(ENTRIES)), "the index has other runs than it must")
    await connection.execute("VACUUM FULL scheduler.job_index_piece")
    size = await connection.fetchval("SELECT pg_total_relation_size('scheduler.job_index_piece')")
    proof_s = min([await _proved(connection, b"job-%d" % (jobs_before // 2 + each)) for each in range(20)])
    await connection.close()
    return 1e6 * used_s / ENTRIES, size / ENTRIES, proof_s, took_s


async def _proved(connection: asyncpg.Connection[asyncpg.Record], job_id: bytes) -> float:
    """Seconds that the proof of a job takes, from the stored runs."""
    key, began_s = sha256(job_id).digest(), time.perf_counter()
    runs = await store.directories(connection, TENANT)
    wanted = [(run, piece) for run, directory in runs.items() for piece in directory.wanted(key)]
    pieces = await store.read_pieces(connection, TENANT, wanted)
    for run, directory in runs.items():
        prove(key, directory, pieces[run])
    return time.perf_counter() - began_s


ROW = Row(
    "index_follow",
    "us an entry",
    1.0,
    f"the index of jobs made, merged and stored behind the commit, a snapshot every {ENTRIES_A_SNAPSHOT} entries; "
    f"against {US_MAX:.0f} us on the processor; at most {BYTES_MAX} bytes an entry and 20 ms a proof",
    measure,
)
