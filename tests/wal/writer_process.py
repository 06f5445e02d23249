"""A process that does nothing but write a log, to be killed and to have its system calls broken.

    python writer_process.py FOLDER EPOCH NEXT_LSN RECORDS SEGMENT_BYTES SEED

Prints ``durable N`` whenever the writer reports, straight from the writer thread; at the end ``closed``, or
``poisoned`` once the writer failed and then refused another record, or ``refused`` when it could not begin.
RECORDS = 0 writes until killed. Batches vary with SEED.
"""

from __future__ import annotations

import os
import random
import sys
import threading
from pathlib import Path

from ledger.errors import WalError, WalPoisonedError
from tests.wal.logs import NODE, WAL_ID, hlc_of, payload_of
from wal.group_commit import GroupCommit
from wal.log import Log


def say(text: str) -> None:
    os.write(1, f"{text}\n".encode())


def main(folder: Path, epoch: int, next_lsn: int, records: int, segment_bytes: int, seed: int) -> None:
    durable = threading.Semaphore(0)
    failed = threading.Event()

    def on_durable(lsn: int) -> None:
        say(f"durable {lsn}")
        durable.release()

    def on_failure(error: WalPoisonedError) -> None:
        failed.set()
        durable.release()

    try:
        writer = GroupCommit(
            Log(folder, node_id=NODE, wal_id=WAL_ID, epoch=epoch, next_lsn=next_lsn, segment_bytes=segment_bytes),
            on_durable=on_durable,
            on_failure=on_failure,
            batch_timeout_us=0,
        )
    except (OSError, WalError):
        say("refused")
        return
    draw = random.Random(seed)
    end = next_lsn + records if records else 2**62
    try:
        while writer.next_lsn < end:
            for _ in range(min(draw.choice((1, 1, 2, 3, 30)), end - writer.next_lsn)):
                lsn = writer.next_lsn
                writer.append(hlc_of(lsn), 1, payload_of(lsn))
            # Sometimes the log runs idle, sometimes batches follow each other.
            if draw.random() < 0.7:
                while writer.durable_lsn < lsn and not failed.is_set():
                    durable.acquire()
        writer.close(30)
        say("closed")
    except WalPoisonedError:
        try:
            writer.append(hlc_of(writer.next_lsn), 1, b"")
        except WalPoisonedError:
            say("poisoned")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(int(argument) for argument in sys.argv[2:]))
