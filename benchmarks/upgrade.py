"""``python -m benchmarks.upgrade CHECKOUT``: a ledger of an older release is filled by it, migrated and verified.

CHECKOUT is a checkout of that release with its own environment (``make`` in it, once). Its ``tally dev`` takes the
entries in, on an embedded PostgreSQL in a scratch folder. Then this version migrates, starts on the same folder and
verifies every chain. Each step is a line with its time and memory; ``docs/upgrade.md`` has those of one run.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import islice
from pathlib import Path

from app.dev.embedded import EmbeddedPostgres
from benchmarks.bench import wait_for
from benchmarks.events import EVENTS_A_JOB, TENANTS, ndjson, stream
from benchmarks.http_client import Client, Target
from benchmarks.processes import READY_TIMEOUT_S, served
from benchmarks.row import expect
from benchmarks.scale import LINES_A_REQUEST, ingest, memory_mib_of, settle

SAMPLED_EVERY_S = 0.02
_ANSWERS_AT = re.compile(r"answers at (http://[^\s,]+)")
_ANONYMOUS = re.compile(r"^RssAnon:\s+(\d+) kB$", re.MULTILINE)


def tell(**measured: object) -> None:
    """One line."""
    print(json.dumps(measured), flush=True)


@contextmanager
def released(checkout: Path, folder: Path) -> Iterator[str]:
    """The URL of the release's ``tally dev`` on ``folder``; stopped at the end."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("TALLY_", "PYTHON"))}
    process = subprocess.Popen(
        [checkout / ".venv" / "bin" / "tally", "dev"],
        cwd=checkout,
        env={**environment, "TALLY_DATA_DIR": str(folder), "TALLY_PORT": "0"},
        stderr=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        text=True,
    )
    assert process.stderr is not None
    overdue = threading.Timer(READY_TIMEOUT_S, process.kill)
    overdue.start()
    try:
        found = next((found for line in process.stderr if (found := _ANSWERS_AT.search(line))), None)
        overdue.cancel()
        expect(found is not None, f"the release in {checkout} did not start")
        assert found is not None
        threading.Thread(target=process.stderr.read, daemon=True).start()
        yield found[1]
    finally:
        overdue.cancel()
        process.send_signal(signal.SIGTERM)
        process.wait()


class PeakMemory:
    """The most memory that the processes of a PostgreSQL server held together, without shared buffers."""

    def __init__(self, postmaster: int) -> None:
        self._postmaster, self._ended, self.mib = postmaster, threading.Event(), 0
        self._thread = threading.Thread(target=self._sample)
        self._thread.start()

    def _sample(self) -> None:
        while not self._ended.wait(SAMPLED_EVERY_S):
            children = Path(f"/proc/{self._postmaster}/task/{self._postmaster}/children").read_text().split()
            self.mib = max(self.mib, sum(map(_anonymous_kib, children)) >> 10)

    def end(self) -> int:
        """The peak, in MiB."""
        self._ended.set()
        self._thread.join()
        return self.mib


def _anonymous_kib(pid: str) -> int:
    try:
        found = _ANONYMOUS.search(Path(f"/proc/{pid}/status").read_text())
    except OSError:  # It has ended.
        return 0
    return 0 if found is None else int(found[1])


def migrate(folder: Path) -> None:
    """Migrate the database in ``folder`` as an operator does."""
    postgres = EmbeddedPostgres(folder / "postgres")
    postgres.start()
    try:
        postmaster = postgres.postmaster_pid()
        assert postmaster is not None
        peak, began_s = PeakMemory(postmaster), time.perf_counter()
        environment = {**os.environ, "TALLY_MIGRATE_URL": postgres.owner_url(), "TALLY_DATA_DIR": str(folder)}
        command = subprocess.Popen([sys.executable, "-m", "cli", "migrate"], env=environment, stdout=sys.stderr)
        _, status, used = os.wait4(command.pid, 0)
        command.returncode = os.waitstatus_to_exitcode(status)
        expect(command.returncode == 0, "the migration failed")
        tell(
            step="migrate",
            seconds=round(time.perf_counter() - began_s, 2),
            command_mib=used.ru_maxrss >> 10,
            postgres_mib=peak.end(),
        )
    finally:
        postgres.stop()


async def verify(url: str, entries: int) -> None:
    """Verify the chain of every tenant through the service."""
    client = await Client.connect(Target.of(url))
    began_s, checked = time.perf_counter(), 0
    for tenant in TENANTS:
        verdict = await client.get(f"/v1/chain/verify?tenant_id={tenant}")
        expect(verdict["valid"], f"the chain of {tenant} does not hold: {verdict['first_break']}")
        checked += verdict["entries_checked"]
    client.close()
    expect(checked == entries, f"{checked} entries are there of {entries}")
    took_s = time.perf_counter() - began_s
    tell(step="verify", entries=checked, seconds=round(took_s, 2), service_mib=await memory_mib_of(url))


def main() -> None:
    """Fill, migrate, start, verify."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("checkout", type=Path)
    parser.add_argument("--entries", type=int, default=1_000_000, help="1,000,000 by default")
    asked = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="upgrade-", dir=os.environ.get("BENCH_DIR")))
    try:
        with released(asked.checkout.resolve(), folder) as url:
            events = islice(stream("scale", asked.entries // EVENTS_A_JOB + 1), asked.entries)
            rate = wait_for(ingest(url, ndjson(events, LINES_A_REQUEST), asked.entries))
            wait_for(settle(EmbeddedPostgres(folder / "postgres").superuser_url()))
        tell(step="fill", entries=asked.entries, per_second=round(rate))
        migrate(folder)
        began_s = time.perf_counter()
        with served("cli dev", {"TALLY_DATA_DIR": str(folder), "TALLY_PORT": "0"}) as url:
            tell(step="start", seconds=round(time.perf_counter() - began_s, 2))
            wait_for(verify(url, asked.entries))
    finally:
        if (folder / "postgres").exists():
            EmbeddedPostgres(folder / "postgres").remove()
        shutil.rmtree(folder)


if __name__ == "__main__":
    main()
