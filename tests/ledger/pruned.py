"""Ledgers in memory with a PRUNED entry, signed as a ledger signs it."""

from __future__ import annotations

from typing import Any

from ledger import canonical
from ledger.machines.retention import SUBJECT
from ledger.merkle import Frontier
from signing import retention_statement
from signing.private_keys import FileSigner
from tests.ledger.ledger_in_memory import SIGNER, Ledger, build, payload_digest

LOG = "log.example/acme"
ENDS = (10, 20, 30)
PRUNED_SEQ = 25


def floor_facts(ledger: Ledger, to_seq: int, from_seq: int = 1) -> dict[str, Any]:
    """What a PRUNED entry says of entries ``from_seq`` to ``to_seq``, where a snapshot ends."""
    frontier = Frontier()
    frontier.extend(ledger.leaf_hashes(1, to_seq))
    return {
        "type": "PRUNED",
        "after": {"seq": 0, "chain_link": ""},
        "period_s": 1,
        "from_seq": from_seq,
        "to_seq": to_seq,
        "entry_count": to_seq - from_seq + 1,
        "chain_link": ledger.entry(to_seq)["chain_link"],
        "tree_root": frontier.root().hex(),
        "compact_range": [each.hex() for each in frontier.hashes],
        "snapshot": payload_digest(next(each for each in ledger.snapshots if each["to_seq"] == to_seq)),
        "highest_hlc": ledger.entry(to_seq)["t_hlc"],
        "archive": "file:///archive",
        "manifests": ["a" * 64],
        "holds": [],
        "decided_ms": 1,
        "never_ended": 0,
    }


def enter(
    ledger: Ledger,
    seq: int,
    action: str,
    facts: dict[str, Any],
    signer: FileSigner | None = SIGNER,
    *,
    log: str = LOG,
    **unsigned: Any,
) -> None:
    """Put an entry about retention in the place of entry ``seq``, and link what follows; ``unsigned`` are facts that
    change once it is signed."""
    said = {"type": action, **facts}
    if signer is not None:
        said = retention_statement.sign(action, said, log, signer)
    row = ledger.entry(seq)
    row |= {"job_id": SUBJECT, "action": action, "payload": canonical.encode({**said, **unsigned}).decode()}
    ledger.relink(seq)


def finish(ledger: Ledger, ends: tuple[int, ...] = ENDS) -> Ledger:
    """Sign what was linked again."""
    ledger.snapshots = []
    for end in ends:
        ledger.sign(end)
    ledger.store_head()
    ledger.store_tree()
    return ledger


def pruned(to_seq: int = 10, signer: FileSigner | None = SIGNER, *, log: str = LOG, **facts: Any) -> Ledger:
    """30 entries, of which the one at ``PRUNED_SEQ`` says that those up to ``to_seq`` leave; all are still here."""
    ledger = build(30, snapshots_to=ENDS)
    enter(ledger, PRUNED_SEQ, "PRUNED", floor_facts(ledger, to_seq) | facts, signer, log=log)
    return finish(ledger)
