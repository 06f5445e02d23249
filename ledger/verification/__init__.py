"""Verification of one tenant's ledger: one pure algorithm over a reader, wherever the rows come from.

A chain is checked in ranges (:mod:`ledger.verification.range_check`), whose summaries are folded into the verdict
(:mod:`ledger.verification.range_fold`). The ranges come one behind the other from one reader (``in_order``), or are
checked elsewhere, several at once (``elsewhere``); on Spark each is a task.

The reader MUST show one consistent state of the ledger throughout. Rows stream by in batches; what is kept
does not grow with their number. Between batches the event loop gets its turn.

What is checked depends on the range that is asked for. Entries, and the snapshots that lie wholly inside it, always;
the head when the range reaches the end; the stored tree, roots of the whole tree and checkpoints when it begins at
seq 1; the projection when it is the whole chain. The rest is ``not_checked``.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence

from ledger.verification.elsewhere import Elsewhere, compare_jobs_elsewhere, fold_ranges
from ledger.verification.entry_check import ENTRY_COLUMNS
from ledger.verification.in_order import Snapshots, checked_ranges, entry_checker
from ledger.verification.projection_check import FOLD_COLUMNS, JOB_COLUMNS, check_projection
from ledger.verification.range_fold import Ends, Fold
from ledger.verification.reader import ChainReader
from ledger.verification.snapshot_check import SNAPSHOT_COLUMNS, OpenedSnapshot, OpenSnapshot
from ledger.verification.tree_check import Anchor, StoredTree, TreeHead
from ledger.verification.verdict import ASPECTS, KINDS, Break, Findings, Head, Verdict

__all__ = [
    "ASPECTS",
    "ENTRY_COLUMNS",
    "FOLD_COLUMNS",
    "JOB_COLUMNS",
    "KINDS",
    "SNAPSHOT_COLUMNS",
    "Anchor",
    "Break",
    "ChainReader",
    "Elsewhere",
    "Head",
    "OpenSnapshot",
    "OpenedSnapshot",
    "StoredTree",
    "TreeHead",
    "Verdict",
    "verify",
]


async def verify(
    reader: ChainReader,
    *,
    tenant_id: str,
    from_seq: int | None = None,
    to_seq: int | None = None,
    expected_prev: str | None = None,
    expected_snapshot: str | None = None,
    open_snapshot: OpenSnapshot | None = None,
    checkpoints: Sequence[TreeHead] = (),
    anchors: Sequence[Anchor] = (),
    projection: bool = True,
    on_break: Callable[[Break], object] | None = None,
    elsewhere: Elsewhere | None = None,
) -> Verdict:
    """Verify entries ``from_seq..to_seq`` of a tenant and all that hangs on them.

    Args:
        reader: the ledger, in one consistent state.
        tenant_id: whose; it is bound by every link.
        from_seq: first entry, from 1, by default the first there is.
        to_seq: last entry, by default the last there is; a higher one is taken for that.
        expected_prev: chain link that entry ``from_seq - 1`` had when it was last verified.
        expected_snapshot: payload digest that the snapshot which ends there had then.
        open_snapshot: opens envelopes and judges signatures; without it neither is looked at.
        checkpoints: tree heads kept outside this ledger, which its chain must extend.
        anchors: what outsiders said of tree heads, kept inside; the chain must extend those too.
        projection: whether to fold all entries once more and compare job states.
        on_break: is called with every break as it is found.
        elsewhere: checks ranges and jobs of a whole chain, where there is anything that can beside this process.
    """
    findings = Findings(on_break)
    # 1. What there is.
    last = await reader.last_entry() or Head(0, None, None)
    first = max(from_seq or 1, 1)
    is_to_end = to_seq is None or to_seq >= last.seq
    ends = Ends(
        tenant_id,
        await reader.head(),
        await reader.tree(),
        checkpoints,
        anchors,
        first,
        are_signatures_judged=open_snapshot is not None,
        last=last,
        is_to_end=is_to_end,
        expected_prev=expected_prev,
        expected_snapshot=expected_snapshot,
    )
    # 2. Entries, and with them snapshots, tree and checkpoints; the head.
    chain = Fold(ends, findings)
    is_whole = first == 1 and is_to_end
    to_read = None if is_to_end else to_seq
    snapshots = Snapshots(reader.snapshots(first, to_read), open_snapshot, findings)
    if elsewhere is not None and is_whole:
        await fold_ranges(ends, chain, reader, snapshots, elsewhere)
    else:
        entries = await entry_checker(reader, findings, tenant_id, first, last.seq, expected_prev)
        async for summary in checked_ranges(ends, entries, reader, snapshots, to_read, findings):
            chain.add(summary)
            await asyncio.sleep(0)
    async for opened in snapshots.rest():
        chain.add_unreached(opened)
    chain.close()
    # 3. The projection.
    if projection and is_whole and elsewhere is not None:
        await compare_jobs_elsewhere(elsewhere, findings)
    elif projection and is_whole:
        await check_projection(reader.entries_by_job(), reader.jobs(), findings)
    return chain.verdict()
