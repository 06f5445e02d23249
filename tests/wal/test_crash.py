"""``kill -9`` at random moments, many rounds on one log: all that was reported durable is there."""

from __future__ import annotations

import os
import random
import subprocess
import sys
from pathlib import Path

import pytest

from tests.wal.logs import NODE, lsns_in
from wal.inspect import verify
from wal.recovery import recover
from wal.segment import FolderLock

ROOT = Path(__file__).parents[2]
ROUNDS = int(os.environ.get("TORTURE_ROUNDS") or 3)
SEED = int(os.environ.get("SEED") or random.SystemRandom().randrange(2**32))


@pytest.mark.torture
@pytest.mark.timeout(0)
def test_every_lsn_reported_durable_outlives_kill(tmp_path: Path) -> None:
    print(f"SEED={SEED}")
    draw = random.Random(SEED)
    FolderLock(tmp_path).release()
    next_lsn = epoch = 1
    for _ in range(ROUNDS):
        reports = draw.choice((0, 1, 2, 10, 100, 1000))
        segment_bytes = draw.choice((2_000, 50_000, 2_000_000))
        durable_lsn = _write_and_kill(tmp_path, epoch, next_lsn, reports, segment_bytes, draw.randrange(2**32))
        found = recover(tmp_path, NODE, durable_lsn)
        assert found.last_lsn >= max(durable_lsn, next_lsn - 1)
        assert lsns_in(tmp_path) == list(range(1, found.last_lsn + 1))
        assert verify(tmp_path)[0].verdict == "ok"
        assert found.last_epoch <= epoch
        next_lsn = found.last_lsn + 1
        epoch += 1


def _write_and_kill(folder: Path, epoch: int, next_lsn: int, reports: int, segment_bytes: int, seed: int) -> int:
    """Run a writer until it has reported so often, kill it; the highest LSN that it got out."""
    program = str(Path(__file__).with_name("writer_process.py"))
    with subprocess.Popen(
        [sys.executable, program, str(folder), *map(str, (epoch, next_lsn, 0, segment_bytes, seed))],
        env=os.environ | {"PYTHONPATH": str(ROOT)},
        stdout=subprocess.PIPE,
    ) as child:
        assert child.stdout is not None
        for _ in range(reports):
            assert child.stdout.readline().startswith(b"durable ")
        child.kill()
        said = child.stdout.read().decode().split("\n")[:-1]
    durable = [int(line.split()[1]) for line in said if line.startswith("durable ")]
    return durable[-1] if durable else 0
