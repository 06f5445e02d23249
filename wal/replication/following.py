"""Carrying out the plan of an election: one's own copy of the log becomes the one that counts.

What stood in it above the place where the two part is set aside; what it lacks is fetched from the member that has it.
After a crash at any point the next election finds a copy that is sound, and no longer than it may be.
"""

from __future__ import annotations

from collections.abc import Generator

from ledger.errors import InvalidInputError, WalError
from ledger.positions import after, before
from wal import history as histories
from wal.replication.checking import check_batches
from wal.replication.election import Plan
from wal.replication.messages import Batches, Fetch, Frame, Refusal
from wal.replication.replica_log import ReplicaLog

FETCH_BYTES = 4 << 20


def follow(plan: Plan, log: ReplicaLog) -> Generator[Fetch, Frame, None]:
    """Yields what to ask the donor, and is sent his answers.

    Raises:
        WalError: the donor does not have what he promised, or not any more.
        OSError: the own copy cannot be written.
    """
    if plan.donor is not None:
        if after(plan.keep_lsn) < max(plan.donor_first_lsn, log.first_lsn):
            log.begin_at(plan.donor_first_lsn, histories.up_to(plan.history, before(plan.donor_first_lsn)))
        elif plan.keep_lsn < log.tail.lsn:
            log.truncate(plan.keep_lsn)
        while log.tail.lsn < plan.tail.lsn:
            _take((yield Fetch(after(log.tail.lsn), FETCH_BYTES)), plan, log)
        log.sync()
        if log.tail != plan.tail:
            raise WalError(f"the log ends with {log.tail} where {plan.tail} was promised")
    if plan.configuration.order > log.configuration.order:
        log.configure(plan.configuration)
    log.store(log.control._replace(committed_lsn=min(plan.committed_lsn, log.tail.lsn)))


def _take(answer: Frame, plan: Plan, log: ReplicaLog) -> None:
    """Append what the donor answered: batches of the epoch that the history names, and no further than promised."""
    message, first_lsn = answer.message, after(log.tail.lsn)
    if isinstance(message, Refusal):
        raise WalError(f"the member that holds the log refuses to give it: {message.reason}: {message.detail}")
    if not isinstance(message, Batches) or not answer.body:
        raise WalError(f"the member that holds the log gave nothing behind LSN {log.tail.lsn}")
    try:
        last_lsn = check_batches(answer.body, first_lsn, log.control.node_id)
    except InvalidInputError as error:
        raise WalError(f"the member that holds the log gave what is damaged: {error}") from error
    epochs = {histories.epoch_of(plan.history, lsn) for lsn in (first_lsn, last_lsn)}
    if epochs != {message.written_in} or last_lsn > plan.tail.lsn:
        raise WalError(f"LSN {first_lsn} to {last_lsn} of epoch {message.written_in} are not what was promised")
    log.append(message.written_in, answer.body)
    log.sync()
