"""Ledgers in memory with a PRUNED entry, signed as a ledger signs it."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from typing import Any

from ledger import canonical
from ledger.job_index import begin_behind, keys_of
from ledger.job_index.builder import IndexBuilder, PartIndex, in_order
from ledger.machines.carried import carry_commitments
from ledger.machines.retention import SUBJECT
from ledger.merkle import Frontier
from signing import retention_statement
from signing.private_keys import FileSigner
from tests.ledger.committed import capacity, committed
from tests.ledger.ledger_in_memory import SIGNER, Ledger, build, payload_digest

LOG = "log.example/acme"
ENDS = (10, 20, 30)
PRUNED_SEQ = 25
LONG_FLOOR, LONG_ENTRIES = 1500, 8300


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
        ledger.keep_index(end)
    ledger.store_head()
    ledger.store_tree()
    return ledger


def pruned(to_seq: int = 10, signer: FileSigner | None = SIGNER, *, log: str = LOG, **facts: Any) -> Ledger:
    """30 entries, of which the one at ``PRUNED_SEQ`` says that those up to ``to_seq`` leave; all are still here."""
    ledger = build(30, snapshots_to=ENDS)
    enter(ledger, PRUNED_SEQ, "PRUNED", floor_facts(ledger, to_seq) | facts, signer, log=log)
    return finish(ledger)


def pruned_race(
    payloads: Sequence[dict[str, Any]], to_seq: int, *, log: str = LOG, tenant_id: str = "acme", **facts: Any
) -> Ledger:
    """A ledger of these payloads of commitments from seq 5 on, and behind them an entry which says that those up to
    ``to_seq`` leave and carries their state; all are still here."""
    ledger = committed([*payloads, capacity("of the entry that becomes PRUNED")], tenant_id=tenant_id)
    seq = len(ledger.entries)
    ledger.promised = [row for row in ledger.promised if row["seq"] != seq]
    ledger.snapshots.clear()
    ledger.sign(to_seq)
    state = carry_commitments(None, judged_entries(ledger, to_seq))
    enter(ledger, seq, "PRUNED", floor_facts(ledger, to_seq) | {"commitments": state} | facts, log=log)
    return finish(ledger, (to_seq, seq))


def judged_entries(ledger: Ledger, to_seq: int) -> list[tuple[int, str, str]]:
    """Accepted proposals and capacities up to ``to_seq``: seq, action and payload."""
    accepted = ("PROPOSE_ACCEPTED", "CAPACITY_SET")
    rows = [row for row in ledger.entries if row["seq"] <= to_seq and row["action"] in accepted]
    return [(row["seq"], row["action"], row["payload"]) for row in rows]


@cache
def pruned_long() -> Ledger:
    """A ledger whose index of jobs has merged runs over what left and what stays, of ``LONG_ENTRIES`` entries."""
    ledger = build(LONG_ENTRIES, snapshots_to=(LONG_FLOOR,))
    enter(ledger, LONG_FLOOR + 100, "PRUNED", floor_facts(ledger, LONG_FLOOR))
    finish(ledger, ())
    ledger.sign(LONG_FLOOR)
    ledger.keep_index(LONG_FLOOR)
    ledger.sign(LONG_ENTRIES)
    return ledger


def with_index(ledger: Ledger, **claimed: Any) -> Ledger:
    """The ledger with another index of jobs in its last snapshot."""
    other = ledger.copy()
    end = other.snapshots.pop()["to_seq"]
    other.sign(end, **claimed)
    return other


def index_without(ledger: Ledger, seq: int) -> list[str]:
    """The index of jobs of all entries, in which one is of another job."""
    return without(ledger, seq).job_index(len(ledger.entries))


def without(ledger: Ledger, seq: int) -> Ledger:
    """The ledger in which one entry is of another job."""
    other = ledger.copy()
    other.entry(seq)["job_id"] = "of nobody"
    return other


def index_from(ledger: Ledger, to_seq: int) -> dict[str, Any]:
    """The claim of an index that begins behind the floor ``to_seq``."""
    begin, size = begin_behind(to_seq), len(ledger.entries)
    index, part = IndexBuilder(begin), PartIndex(begin, [size])
    part.append(keys_of([row["job_id"] for row in ledger.entries[begin:]]), b"".join(ledger.leaf_hashes(begin + 1)))
    roots = in_order(index.add(part.finish())[size], size, begin)
    return {"job_index": [root.hex() for root in roots if root is not None], "job_index_from": begin + 1}


def removed(ledger: Ledger, to_seq: int) -> Ledger:
    """The ledger without its entries up to ``to_seq``."""
    other = ledger.copy()
    other.entries = [row for row in other.entries if row["seq"] > to_seq]
    other.store_jobs()
    return other
