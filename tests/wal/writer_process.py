"""A process that does nothing but write a log, to be killed and to have its system calls broken.

    python writer_process.py FOLDER EPOCH NEXT_LSN RECORDS SEGMENT_BYTES SEED

Prints for each batch that it hears of ``durable N``, how far the log then is; at the end ``closed``, or
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
    failed = threading.Event()
    fd = os.eventfd(0)

    def on_failure(error: WalPoisonedError) -> None:
        failed.set()
        os.eventfd_write(fd, 1)

    def listen() -> None:
        """Until the writer has ended, and all that it rang for is said."""
        is_last = False
        while not is_last:
            os.eventfd_read(fd)
            is_last = has_ended.is_set()
            for _ in writer.take_durable():
                say(f"durable {writer.durable_lsn}")
            with changed:
                changed.notify_all()

    def say_last(text: str) -> None:
        """Say it behind everything else."""
        has_ended.set()
        os.eventfd_write(fd, 1)
        listener.join()
        say(text)

    changed, has_ended = threading.Condition(), threading.Event()
    listener = threading.Thread(target=listen, daemon=True)
    try:
        writer = GroupCommit(
            Log(folder, node_id=NODE, wal_id=WAL_ID, epoch=epoch, next_lsn=next_lsn, segment_bytes=segment_bytes),
            durable_fd=fd,
            on_failure=on_failure,
            batch_timeout_us=0,
        )
    except (OSError, WalError):
        say("refused")
        return
    listener.start()
    draw = random.Random(seed)
    end = next_lsn + records if records else 2**62
    try:
        while writer.next_lsn < end:
            for _ in range(min(draw.choice((1, 1, 2, 3, 30)), end - writer.next_lsn)):
                lsn = writer.next_lsn
                writer.append(hlc_of(lsn), 1, payload_of(lsn))
            # Sometimes the log runs idle, sometimes batches follow each other.
            if draw.random() < 0.7:
                with changed:
                    while writer.durable_lsn < lsn and not failed.is_set():
                        changed.wait()
        writer.close(30)
        say_last("closed")
    except WalPoisonedError:
        try:
            writer.append(hlc_of(writer.next_lsn), 1, b"")
        except WalPoisonedError:
            say_last("poisoned")


if __name__ == "__main__":
    main(Path(sys.argv[1]), *(int(argument) for argument in sys.argv[2:]))
