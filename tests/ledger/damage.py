"""Ways to damage a ledger in memory, each by one call with numbers that choose where and how."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import Any

from ledger import merkle
from ledger.errors import LedgerError
from ledger.verification import Head, StoredTree
from tests.ledger.ledger_in_memory import SIGNER, STRANGER, Ledger, Row, payload_digest

ZEROS = "0" * 64

_ENTRY_VALUES: dict[str, Sequence[Any]] = {
    "t_hlc": (None, "1:2:zz", ""),
    "hlc_physical": (None, 7, -1),
    "hlc_logical": (None, 99, -5),
    "hlc_node": (None, "other"),
    "job_id": (None, "änderung", "job-0000-a"),
    "action": (None, "REFUSED", "COMPLETE", "ENQUEUE", "CONFLICT"),
    "link_version": (None, 1, 3),
    "prev_chain_link": (None, ZEROS, "short"),
    "chain_link": (None, "f" * 64, "F" * 64, "short", " " * 64),
    "payload_digest": (None, ZEROS, "short", "A" * 64),
    "payload": (
        None,
        '{"type":"JobFailed"}',
        "[1]",
        "no json",
        '{"spec":1e999}',
        '{"spec":' + "[" * 90 + "]" * 90 + "}",
    ),
    "origin": ("{}", "", '{"seq":1}'),
}
_SNAPSHOT_VALUES: dict[str, Sequence[Any]] = {
    "from_seq": (None, 1, 5, 10**6),
    "to_seq": (None, 1, 7, 10**6),
    "snapshot_hlc": (None, "1:0:n"),
    "from_chain_link": (None, ZEROS),
    "to_chain_link": (None, ZEROS),
    "entry_count": (None, 3),
    "merkle_root": (None, ZEROS),
    "dsse_envelope": (None, "{}", "no json"),
}
_JOB_VALUES: dict[str, Sequence[Any]] = {
    "job_id": (None, "never-was", "job-0000-a"),
    "status": (None, "FAILED"),
    "created_physical": (None, 5),
    "created_node": (None, "x"),
    "created_by": (None, "x"),
    "last_seq": (None, 1, 3, 10**6),
    "seqs": ("{}", "{1}", None),
}


def _edit(rows: list[Row], values: dict[str, Sequence[Any]], at: int, how: int) -> None:
    column = [*values][how % len(values)]
    choices = values[column]
    rows[at % len(rows)][column] = choices[how // len(values) % len(choices)]


def _edit_entry(ledger: Ledger, at: int, how: int) -> None:
    _edit(ledger.entries, _ENTRY_VALUES, at, how)


def _remove_entries(ledger: Ledger, at: int, how: int) -> None:
    at %= len(ledger.entries)
    del ledger.entries[at : at + 1 + how % 5]


def _spell_link(ledger: Ledger, at: int, how: int) -> None:
    """A link spelt as none is, and named so by the entry behind it."""
    at %= len(ledger.entries)
    row = ledger.entries[at]
    link = row["chain_link"]
    row["chain_link"] = (link.upper(), f"{link} ", link[:-1], f"\\x{link}")[how % 4]
    ledger.entries[at + 1]["prev_chain_link"] = row["chain_link"]


def _cut_tail(ledger: Ledger, at: int, how: int) -> None:
    del ledger.entries[at % len(ledger.entries) :]
    if how % 2:
        ledger.store_head()
    if how % 3 == 1:
        ledger.store_tree()
    if how % 5 == 1:
        ledger.store_jobs()


def _repeat_entry(ledger: Ledger, at: int, how: int) -> None:
    at %= len(ledger.entries)
    copy = dict(ledger.entries[at])
    if how % 4 == 1:
        copy["payload"] = '{"type":"JobCompleted"}'
    if how % 4 == 2:
        _edit([copy], _ENTRY_VALUES, 0, how)
    ledger.entries.insert(at + how // 4 % 2, copy)


def _swap_entries(ledger: Ledger, at: int, how: int) -> None:
    one, other = ledger.entries[at % len(ledger.entries)], ledger.entries[how % len(ledger.entries)]
    one["seq"], other["seq"] = other["seq"], one["seq"]


def _move_entry(ledger: Ledger, at: int, how: int) -> None:
    ledger.entries[at % len(ledger.entries)]["seq"] += (1, -1, 3, -200, 1000)[how % 5]


def _relink(ledger: Ledger, at: int, how: int) -> None:
    """As a forger does who can do sums: links, and perhaps what hangs on them, are made to fit."""
    row = ledger.entries[at % len(ledger.entries)]
    if how % 2:
        _edit([row], _ENTRY_VALUES, 0, how // 16)
    if how % 4 == 3:
        row["link_version"] = 1
    ledger.relink(row["seq"])
    ledger.store_head()
    if how & 4:
        ledger.store_tree()
    if how & 8:
        ledger.store_jobs()


def _old_version(ledger: Ledger, at: int, how: int) -> None:
    """Some entries with links of version 1, all of them fitting."""
    at %= len(ledger.entries)
    for row in ledger.entries[at : at + 1 + how % 30]:
        row["link_version"] = 1
    ledger.relink(at + 1)
    ledger.store_head()


def _edit_snapshot(ledger: Ledger, at: int, how: int) -> None:
    _edit(ledger.snapshots, _SNAPSHOT_VALUES, at, how)


def _remove_snapshot(ledger: Ledger, at: int, how: int) -> None:
    del ledger.snapshots[at % len(ledger.snapshots)]


def _repeat_snapshot(ledger: Ledger, at: int, how: int) -> None:
    ledger.snapshots.append(dict(ledger.snapshots[at % len(ledger.snapshots)]))


def _swap_envelopes(ledger: Ledger, at: int, how: int) -> None:
    one, other = ledger.snapshots[at % len(ledger.snapshots)], ledger.snapshots[how % len(ledger.snapshots)]
    one["dsse_envelope"], other["dsse_envelope"] = other["dsse_envelope"], one["dsse_envelope"]


def _add_snapshot(ledger: Ledger, at: int, how: int) -> None:
    """A snapshot of any range, signed by the key or by a stranger, true or not."""
    count = len(ledger.entries)
    from_seq = at % count + 1
    to_seq = min(count, from_seq + how % 40)
    previous = payload_digest(ledger.snapshots[-1]) if ledger.snapshots and from_seq > 1 else None
    previous = previous or (ZEROS if from_seq > 1 else None)
    changes: Sequence[dict[str, Any]] = ({}, {}, {"merkle_root": ZEROS}, {"tree_root": ZEROS}, {"tenant_id": "other"})
    signer = STRANGER if how % 7 == 3 else SIGNER
    row = ledger.signed(from_seq, to_seq, previous, signer, **changes[how // 40 % 5])
    if how // 200 % 3 == 1:
        # What is stored is not what was signed, so that no reader knows beforehand what is covered.
        row["from_seq"], row["to_seq"] = row["from_seq"] + how % 5, row["to_seq"] - how % 3
    ledger.snapshots.insert(how % (len(ledger.snapshots) + 1), row)


def _edit_tile(ledger: Ledger, at: int, how: int) -> None:
    key = [*ledger.tiles][at % len(ledger.tiles)]
    hashes = ledger.tiles[key]
    match how % 5:
        case 0:
            del ledger.tiles[key]
        case 1:
            ledger.tiles[key] = hashes + bytes(32)
        case 2:
            ledger.tiles[key] = hashes[:-32]
        case 3:
            offset = how // 5 * 32 % len(hashes)
            ledger.tiles[key] = hashes[:offset] + bytes(32) + hashes[offset + 32 :]
        case _:
            ledger.tiles[key] = None  # type: ignore[assignment]


def _edit_tree(ledger: Ledger, at: int, how: int) -> None:
    size, root = ledger.tree or (0, ZEROS)
    choices: Sequence[Any] = (
        None,
        StoredTree(size, ZEROS),
        StoredTree(size + 1, root),
        StoredTree(at, root),
        StoredTree(None, root),  # type: ignore[arg-type]
        StoredTree(0, merkle.EMPTY_ROOT.hex()),
        StoredTree(-3, root),
        StoredTree(10**12, root),
    )
    ledger.tree = choices[how % len(choices)]


def _store_tree(ledger: Ledger, at: int, how: int) -> None:
    ledger.store_tree(at % (len(ledger.entries) + 1))


def _edit_head(ledger: Ledger, at: int, how: int) -> None:
    seq, link, hlc = ledger.head or (0, None, None)
    choices: Sequence[Any] = (
        None,
        Head(at, link, hlc),
        Head(seq, ZEROS, hlc),
        Head(seq, link, "1:0:n"),
        Head(None, link, hlc),  # type: ignore[arg-type]
        Head(seq, None, None),
    )
    ledger.head = choices[how % len(choices)]


def _edit_job(ledger: Ledger, at: int, how: int) -> None:
    _edit(ledger.jobs, _JOB_VALUES, at, how)


def _remove_job(ledger: Ledger, at: int, how: int) -> None:
    del ledger.jobs[at % len(ledger.jobs)]


def _repeat_job(ledger: Ledger, at: int, how: int) -> None:
    ledger.jobs.append(dict(ledger.jobs[at % len(ledger.jobs)]))


DAMAGE: Sequence[Callable[[Ledger, int, int], None]] = (
    _edit_entry,
    _edit_entry,
    _remove_entries,
    _spell_link,
    _cut_tail,
    _repeat_entry,
    _swap_entries,
    _move_entry,
    _relink,
    _relink,
    _old_version,
    _edit_snapshot,
    _remove_snapshot,
    _repeat_snapshot,
    _swap_envelopes,
    _add_snapshot,
    _add_snapshot,
    _edit_tile,
    _edit_tree,
    _store_tree,
    _edit_head,
    _edit_job,
    _remove_job,
    _repeat_job,
)


def damage(ledger: Ledger, which: int, at: int, how: int) -> None:
    """Do damage number ``which``; nothing where there is nothing of the kind, or nothing fits any more."""
    # Nothing can be linked to a link that is no hex, counted in rows that are not there, or signed over them.
    with suppress(ZeroDivisionError, ValueError, TypeError, AttributeError, IndexError, LedgerError):
        DAMAGE[which % len(DAMAGE)](ledger, at, how)
