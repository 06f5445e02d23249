"""A process that archives and is killed, by SIGKILL, at a given one of all the function calls it makes."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

from objects.store import ArchiveStore
from pipeline.archiving.continuous import Archiver
from signing.keys import Keyring
from tests.ledger.ledger_in_memory import SIGNER

_processes = multiprocessing.get_context("forkserver")
_processes.set_forkserver_preload([__name__])

NEVER = -1


def archive_and_die(dsn: str, folder: Path, at_call: int = NEVER) -> int:
    """Archive in a process that is killed at call number ``at_call``; how many it made, 0 when it was killed."""
    ours, theirs = _processes.Pipe(duplex=False)
    process = _processes.Process(target=_archive, args=(dsn, str(folder), at_call, theirs))
    process.start()
    theirs.close()
    process.join()
    if process.exitcode == -signal.SIGKILL:
        return 0
    assert process.exitcode == 0
    calls: int = ours.recv()
    return calls


def _archive(dsn: str, url: str, at_call: int, told: Connection) -> None:
    calls = 0

    def count(_frame: object, event: str, _what: Any) -> None:
        nonlocal calls
        if event in ("call", "c_call"):
            calls += 1
            if calls == at_call:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.setprofile(count)
    archiver = Archiver(dsn, ArchiveStore(url))
    while not (progress := archiver.step(SIGNER, Keyring([SIGNER.public_key]))).has_turn:
        pass  # The session of a killed process ends with what it last asked PostgreSQL for.
    sys.setprofile(None)
    archiver.close()
    assert not progress.failures, progress
    told.send(calls)
