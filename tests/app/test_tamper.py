"""Somebody with every right edits the database; verification names the first break and its kind.

The triggers that refuse changes are switched off as only a superuser can. Each case makes one change and says
everything that is not ``ok`` afterwards.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any, NamedTuple

import asyncpg
import orjson
import pytest

from app.store.chain_reader import consistent_reader
from ledger import canonical
from ledger.verification import (
    ASPECTS,
    ENTRY_COLUMNS,
    JOB_COLUMNS,
    KINDS,
    SNAPSHOT_COLUMNS,
    TreeHead,
    Verdict,
    verify,
)
from signing.callers import KeyedJudge
from signing.keys import KnownCallers
from tests.app.chain_builder import insert, remove
from tests.conftest import Database, connected_to
from tests.ledger.callers import STRANGER as STRANGE_CALLER
from tests.ledger.ledger_in_memory import OPEN, STRANGER, Ledger, build, link_of, payload_digest

LEDGER = build(60, snapshots_to=(20, 40))
OTHER = build(60, tenant_id="other", begin_ms=1_800_000_000_000, snapshots_to=(20, 40))
HELD = LEDGER.checkpoint()
"""The checkpoint that the node keeps outside the database."""

ZEROS = "0" * 64
Connection = asyncpg.Connection
Edit = Callable[[Connection], Awaitable[object]]


class Case(NamedTuple):
    """A change, the break it must be found as, and every verdict that is not ``ok`` then."""

    name: str
    kind: str
    seq: int
    edit: Edit
    not_ok: dict[str, str]


def sql(*statements: str) -> Edit:
    """Execute ``statements``."""

    async def edit(connection: Connection) -> None:
        for statement in statements:
            await connection.execute(statement)

    return edit


def update(table: str, change: str, where: str = "true") -> Edit:
    """Change rows of the tenant."""
    return sql(f"UPDATE scheduler.{table} SET {change} WHERE tenant_id = 'acme' AND {where}")


def delete(table: str, where: str) -> str:
    """Statement that removes rows of the tenant."""
    return f"DELETE FROM scheduler.{table} WHERE tenant_id = 'acme' AND {where}"


def replace_with(ledger: Ledger) -> Edit:
    """Put ``ledger`` in place of the tenant's."""

    async def edit(connection: Connection) -> None:
        await remove(connection, "acme", "batch_snapshot", "jobs", "follower_positions")
        await insert(connection, ledger)

    return edit


async def repeat_a_row(connection: Connection) -> None:
    await drop_guards(connection, "scheduler_log")
    await copy_row(connection, 30, {})


async def copy_row(connection: Connection, seq: int, changes: dict[str, str]) -> None:
    """Insert a copy of entry ``seq`` with ``changes``, given as SQL."""
    values = [changes.get(column, column) for column in ENTRY_COLUMNS]
    await connection.execute(
        f"INSERT INTO scheduler.scheduler_log (tenant_id, {', '.join(ENTRY_COLUMNS)})"
        f" SELECT tenant_id, {', '.join(values)} FROM scheduler.scheduler_log WHERE tenant_id = 'acme' AND seq = {seq}"
    )


async def insert_an_entry(connection: Connection) -> None:
    await shift(connection, 30, 1)
    hlc = {"t_hlc": "'1:1:n'", "hlc_physical": "1", "hlc_logical": "1", "hlc_node": "'n'"}
    await copy_row(connection, 29, {"seq": "30", **hlc, "prev_chain_link": f"'{ZEROS}'"})


async def shift(connection: Connection, from_seq: int, by: int) -> None:
    """Move entries from ``from_seq`` on to other seqs, in two steps so that none meets another."""
    where = "WHERE tenant_id = 'acme' AND seq"
    table = "scheduler.scheduler_log"
    await connection.execute(f"UPDATE {table} SET seq = seq + 1000 {where} >= {from_seq}")
    await connection.execute(f"UPDATE {table} SET seq = seq - 1000 + {by} {where} > 1000")


async def swap_two_entries(connection: Connection) -> None:
    for old, new in ((30, 1030), (31, 30), (1030, 31)):
        await connection.execute(
            f"UPDATE scheduler.scheduler_log SET seq = {new} WHERE tenant_id = 'acme' AND seq = {old}"
        )


async def swap_with_another_tenant(connection: Connection) -> None:
    for old, new in (("acme", "aside"), ("other", "acme"), ("aside", "other")):
        await connection.execute(
            "UPDATE scheduler.scheduler_log SET tenant_id = $2 WHERE tenant_id = $1 AND seq = 30", old, new
        )


def rewritten_from(seq: int, *, with_tree: bool = True) -> Ledger:
    """The ledger with another payload at ``seq`` and every later digest and link, head and job made to fit."""
    forged = LEDGER.copy()
    row = forged.entry(seq)
    row["payload"] = canonical.encode({**json.loads(row["payload"]), "fence_token": 7}).decode()
    forged.relink(seq)
    forged.store_head()
    forged.store_jobs()
    if with_tree:
        forged.store_tree()
    return forged


def malformed_from(seq: int) -> Ledger:
    """The same, whose payload at ``seq`` says its fence token twice."""
    forged = rewritten_from(seq)
    row = forged.entry(seq)
    row["payload"] = row["payload"].replace('"fence_token":7', '"fence_token":1,"fence_token":7')
    forged.relink(seq)
    forged.store_head()
    forged.store_tree()
    return forged


def of_a_caller_from(seq: int) -> Ledger:
    """The same, with a signature at ``seq`` that no caller made."""
    forged = rewritten_from(seq)
    row = forged.entry(seq)
    signature = {**STRANGE_CALLER.said(row["hlc_physical"]), "sig": ""}
    row["payload"] = canonical.encode({**orjson.loads(row["payload"]), "signature": signature}).decode()
    forged.relink(seq)
    forged.store_head()
    forged.store_tree()
    return forged


def with_an_entry_more(seq: int) -> Ledger:
    """The ledger with an entry more at ``seq`` that is in order, which the one after it names."""
    forged = LEDGER.copy()
    for row in forged.entries[seq - 1 :]:
        row["seq"] += 1
    fields = {"seq": seq, "t_hlc": "1:1:n", "hlc_physical": 1, "hlc_logical": 1, "hlc_node": "n"}
    more = {**forged.entry(seq - 1), **fields, "prev_chain_link": forged.entry(seq - 1)["chain_link"]}
    more["chain_link"] = link_of("acme", more)
    forged.entry(seq + 1)["prev_chain_link"] = more["chain_link"]
    forged.entries.insert(seq - 1, more)
    return forged


def cut_to(seq: int) -> Ledger:
    """The ledger with nothing after ``seq`` and everything made to fit."""
    cut = LEDGER.copy()
    del cut.entries[seq:]
    cut.snapshots = [row for row in cut.snapshots if row["to_seq"] <= seq]
    cut.store_head()
    cut.store_tree()
    cut.store_jobs()
    return cut


def with_snapshot(at: int, row: dict[str, Any]) -> Ledger:
    """The ledger with another snapshot in place of number ``at``."""
    forged = LEDGER.copy()
    forged.snapshots[at] = row
    return forged


def unchecked(*aspects: str) -> dict[str, str]:
    """What cannot be judged any more."""
    return dict.fromkeys(aspects, "not_checked")


HIDDEN_BY_A_HOLE = unchecked("snapshots", "tree", "projection", "checkpoint")
LINKS_BROKEN = {"links": "broken"}
FIRST_DIGEST = payload_digest(LEDGER.snapshots[0])

CASES = [
    Case(
        "an entry removed",
        "gap",
        30,
        sql(delete("scheduler_log", "seq = 30")),
        {**LINKS_BROKEN, **HIDDEN_BY_A_HOLE},
    ),
    Case(
        "the first entry removed",
        "gap",
        1,
        sql(delete("scheduler_log", "seq = 1")),
        {**LINKS_BROKEN, **HIDDEN_BY_A_HOLE},
    ),
    Case("an entry doubled", "duplicate-seq", 30, repeat_a_row, LINKS_BROKEN),
    Case(
        "a payload edited",
        "payload-digest",
        30,
        update("scheduler_log", "payload = replace(payload::text, '2', '3')::json", "seq = 30"),
        {"payloads": "broken"},
    ),
    Case(
        "a payload edited that a job is made of",
        "payload-digest",
        33,
        update("scheduler_log", "payload = replace(payload::text, 'backup:4', 'miner:1')::json", "seq = 33"),
        {"payloads": "broken"},
    ),
    Case(
        "white space put into a payload",
        "payload-digest",
        30,
        update("scheduler_log", "payload = replace(payload::text, ':', ': ')::json", "seq = 30"),
        {"payloads": "broken"},
    ),
    Case(
        "an HLC column edited",
        "hlc-columns",
        30,
        update("scheduler_log", "hlc_physical = 1", "seq = 30"),
        {**LINKS_BROKEN, **unchecked("projection")},
    ),
    Case(
        "the HLC itself edited",
        "hlc-columns",
        30,
        update("scheduler_log", "t_hlc = '1:2:n'", "seq = 30"),
        LINKS_BROKEN,
    ),
    Case(
        "the HLC and its columns edited",
        "link",
        30,
        update("scheduler_log", "t_hlc = '1:2:n', hlc_physical = 1, hlc_logical = 2, hlc_node = 'n'", "seq = 30"),
        {**LINKS_BROKEN, **unchecked("projection")},
    ),
    Case(
        "a previous link edited",
        "prev-link",
        30,
        update("scheduler_log", f"prev_chain_link = '{ZEROS}'", "seq = 30"),
        LINKS_BROKEN,
    ),
    Case(
        "a link edited",
        "link",
        30,
        update("scheduler_log", f"chain_link = '{ZEROS}'", "seq = 30"),
        {**LINKS_BROKEN, **unchecked("snapshots", "tree", "checkpoint")},
    ),
    Case(
        "the last link edited",
        "link",
        60,
        update("scheduler_log", f"chain_link = '{ZEROS}'", "seq = 60"),
        {**LINKS_BROKEN, "head": "broken", **unchecked("tree", "checkpoint")},
    ),
    Case(
        "a payload and its digest edited",
        "link",
        30,
        update(
            "scheduler_log",
            "payload = '{}', payload_digest = encode(sha256('{}'::bytea), 'hex')",
            "seq = 30",
        ),
        {**LINKS_BROKEN, **unchecked("projection")},
    ),
    Case(
        "an entry moved to another job",
        "link",
        30,
        update("scheduler_log", "job_id = 'job-0000-a'", "seq = 30"),
        {**LINKS_BROKEN, **unchecked("projection", "snapshots")},
    ),
    Case(
        "an action edited",
        "link",
        32,
        update("scheduler_log", "action = 'FAIL'", "seq = 32"),
        {**LINKS_BROKEN, **unchecked("projection")},
    ),
    Case(
        "an origin invented",
        "link",
        30,
        update("scheduler_log", "origin = '{}'", "seq = 30"),
        LINKS_BROKEN,
    ),
    Case(
        "a link version lowered",
        "link",
        30,
        update("scheduler_log", "link_version = 1", "seq = 30"),
        LINKS_BROKEN,
    ),
    Case(
        "an entry inserted",
        "prev-link",
        30,
        insert_an_entry,
        {**LINKS_BROKEN, "head": "broken", **unchecked("snapshots", "tree", "projection", "checkpoint")},
    ),
    Case(
        "an entry inserted with its link, and named by the next one",
        "tree",
        30,
        replace_with(with_an_entry_more(30)),
        {
            **LINKS_BROKEN,
            "head": "broken",
            "tree": "broken",
            **unchecked("snapshots", "projection", "checkpoint"),
        },
    ),
    Case(
        "two entries reordered",
        "prev-link",
        30,
        swap_two_entries,
        {**LINKS_BROKEN, **unchecked("snapshots", "tree", "projection", "checkpoint")},
    ),
    Case(
        "entries swapped between tenants",
        "prev-link",
        30,
        swap_with_another_tenant,
        {**LINKS_BROKEN, **unchecked("snapshots", "tree", "checkpoint")},
    ),
    Case(
        "one entry rewritten with its link",
        "tree",
        30,
        update(
            "scheduler_log",
            f"payload = '{rewritten_from(30).entry(30)['payload']}',"
            f" payload_digest = '{rewritten_from(30).entry(30)['payload_digest']}',"
            f" chain_link = '{rewritten_from(30).entry(30)['chain_link']}'",
            "seq = 30",
        ),
        {**LINKS_BROKEN, "tree": "broken", **unchecked("snapshots", "projection", "checkpoint")},
    ),
    Case(
        "head moved back",
        "head",
        60,
        update("chain_heads", "head_seq = 59"),
        {"head": "broken"},
    ),
    Case(
        "head moved back with its link",
        "head",
        60,
        update(
            "chain_heads",
            f"head_seq = 50, head_chain_link = '{LEDGER.entry(50)['chain_link']}',"
            f" head_hlc = '{LEDGER.entry(50)['t_hlc']}'",
        ),
        {"head": "broken"},
    ),
    Case(
        "head given another link", "head", 60, update("chain_heads", f"head_chain_link = '{ZEROS}'"), {"head": "broken"}
    ),
    Case("head given another HLC", "head", 60, update("chain_heads", "head_hlc = '1:0:n'"), {"head": "broken"}),
    Case("head removed", "head", 60, sql(delete("chain_heads", "true")), {"head": "broken"}),
    Case(
        "tail cut",
        "tail-truncated",
        58,
        sql(delete("scheduler_log", "seq >= 58")),
        {"head": "broken", "checkpoint": "broken", **unchecked("tree", "projection")},
    ),
    Case(
        "tail cut and head made to fit",
        "tail-truncated",
        39,
        sql(
            delete("scheduler_log", "seq >= 39"),
            "UPDATE scheduler.chain_heads h SET head_seq = 38, head_chain_link = l.chain_link, head_hlc = l.t_hlc"
            " FROM scheduler.scheduler_log l WHERE h.tenant_id = 'acme' AND l.tenant_id = 'acme' AND l.seq = 38",
        ),
        {"head": "broken", "checkpoint": "broken", **unchecked("snapshots", "tree", "projection")},
    ),
    Case(
        "everything cut but the head",
        "tail-truncated",
        1,
        sql(delete("scheduler_log", "true")),
        {"head": "broken", "checkpoint": "broken", **unchecked("snapshots", "projection")},
    ),
    Case(
        "a snapshot's root edited",
        "snapshot-root",
        40,
        update("batch_snapshot", f"merkle_root = '{ZEROS}'", "from_seq = 21"),
        {"snapshots": "broken"},
    ),
    Case(
        "a snapshot's HLC edited",
        "snapshot-root",
        20,
        update("batch_snapshot", "snapshot_hlc = '1:0:n'", "from_seq = 1"),
        {"snapshots": "broken"},
    ),
    Case(
        "a snapshot's range edited",
        "snapshot-root",
        40,
        update("batch_snapshot", "to_seq = 41", "from_seq = 21"),
        {"snapshots": "broken"},
    ),
    Case(
        "every link rewritten from an entry on, tree, head and jobs made to fit",
        "snapshot-root",
        40,
        replace_with(rewritten_from(30)),
        {"snapshots": "broken", "checkpoint": "broken"},
    ),
    Case(
        "every link rewritten from an entry on, the tree forgotten",
        "tree",
        30,
        replace_with(rewritten_from(30, with_tree=False)),
        {"snapshots": "broken", "tree": "broken", "checkpoint": "broken"},
    ),
    Case(
        "every link rewritten past the last snapshot",
        "rollback",
        60,
        replace_with(rewritten_from(41)),
        {"checkpoint": "broken"},
    ),
    Case(
        "an entry that no ledger writes past the last snapshot, with every link made to fit",
        "malformed",
        41,
        replace_with(malformed_from(41)),
        {"payloads": "broken", "checkpoint": "broken"},
    ),
    Case(
        "an event of a caller that is not registered past the last snapshot, with every link made to fit",
        "caller-signature",
        41,
        replace_with(of_a_caller_from(41)),
        {"signatures": "unknown_key", "checkpoint": "broken"},
    ),
    Case(
        "a signature edited",
        "snapshot-signature",
        40,
        update(
            "batch_snapshot",
            'dsse_envelope = regexp_replace(dsse_envelope::text, \'"sig":"....\', \'"sig":"AAAA\')::json',
            "from_seq = 21",
        ),
        {"signatures": "broken"},
    ),
    Case(
        "a signed payload edited",
        "snapshot-signature",
        40,
        update(
            "batch_snapshot",
            "dsse_envelope = jsonb_set(dsse_envelope::jsonb, '{payload}', to_jsonb(replace(encode(convert_to(replace("
            "convert_from(decode(dsse_envelope->>'payload', 'base64'), 'UTF8'), 'node-1', 'node-2'), 'UTF8'),"
            " 'base64'), E'\\n', '')))::json",
            "from_seq = 21",
        ),
        {"signatures": "broken"},
    ),
    Case(
        "an envelope emptied",
        "snapshot-signature",
        20,
        update("batch_snapshot", "dsse_envelope = '{}'", "from_seq = 1"),
        {"signatures": "broken"},
    ),
    Case(
        "a snapshot signed again with another key",
        "snapshot-signature",
        40,
        replace_with(with_snapshot(1, LEDGER.signed(21, 40, FIRST_DIGEST, STRANGER))),
        {"signatures": "unknown_key"},
    ),
    Case(
        "a snapshot removed",
        "snapshot-chain",
        1,
        sql(delete("batch_snapshot", "from_seq = 1")),
        {"snapshots": "broken"},
    ),
    Case(
        "a snapshot replaced by another, truly signed one",
        "snapshot-chain",
        21,
        replace_with(with_snapshot(0, LEDGER.signed(1, 20, None, node_id="node-2"))),
        {"snapshots": "broken"},
    ),
    Case(
        "a snapshot replaced by a shorter one, truly signed",
        "snapshot-chain",
        20,
        replace_with(with_snapshot(0, LEDGER.signed(1, 19, None))),
        {"snapshots": "broken"},
    ),
    Case(
        "a tile edited",
        "tree",
        30,
        update("merkle_tile", "hashes = overlay(hashes placing decode(repeat('00', 32), 'hex') from 29 * 32 + 1)"),
        {"tree": "broken"},
    ),
    Case("a tile removed", "tree", 1, sql(delete("merkle_tile", "true")), {"tree": "broken"}),
    Case(
        "a tile cut short", "tree", 60, update("merkle_tile", "hashes = substr(hashes, 1, 59 * 32)"), {"tree": "broken"}
    ),
    Case("the tree's root edited", "tree", 60, update("merkle_head", f"root_hash = '{ZEROS}'"), {"tree": "broken"}),
    Case(
        "a job's status edited",
        "projection",
        40,
        update("jobs", "status = 'FAILED'", "job_id = 'job-0004-b'"),
        {"projection": "broken"},
    ),
    Case(
        "a job that names one entry less",
        "projection",
        39,
        update("jobs", "seqs = seqs[2:]", "job_id = 'job-0004-a'"),
        {"projection": "broken"},
    ),
    Case(
        "a job that names an entry of another",
        "projection",
        39,
        update("jobs", "seqs = 1 || seqs", "job_id = 'job-0004-a'"),
        {"projection": "broken"},
    ),
    Case(
        "the time of a job's creation edited",
        "projection",
        39,
        update("jobs", "created_physical = 1", "job_id = 'job-0004-a'"),
        {"projection": "broken"},
    ),
    Case(
        "another named as the creator of a job",
        "projection",
        39,
        update("jobs", "created_by = 'somebody'", "job_id = 'job-0004-a'"),
        {"projection": "broken"},
    ),
    Case("a job removed", "projection", 39, sql(delete("jobs", "job_id = 'job-0004-a'")), {"projection": "broken"}),
    Case(
        "a job invented",
        "projection",
        7,
        sql(
            "INSERT INTO scheduler.jobs (tenant_id, job_id, status, last_seq, seqs)"
            " VALUES ('acme', 'job-0000-aa', 'COMPLETED', 7, '{7}')"
        ),
        {"projection": "broken"},
    ),
    Case(
        "the tail cut and everything made to fit",
        "rollback",
        56,
        replace_with(cut_to(55)),
        {"checkpoint": "broken"},
    ),
]


async def checked(
    connection: Connection, checkpoints: tuple[TreeHead, ...] = (HELD,), tenant_id: str = "acme"
) -> Verdict:
    async with consistent_reader(connection, tenant_id) as reader:
        nobody = KeyedJudge(KnownCallers())
        return await verify(reader, tenant_id=tenant_id, open_snapshot=OPEN, checkpoints=checkpoints, callers=nobody)


def not_ok(verdict: Verdict) -> dict[str, str]:
    return {aspect: outcome for aspect, outcome in verdict.verdicts.items() if outcome != "ok"}


@pytest.fixture(scope="module")
async def whole(shared_database: Database) -> AsyncIterator[Connection]:
    """A superuser's connection to a database that holds ``LEDGER`` and ``OTHER``, triggers switched off."""
    async with connected_to(shared_database.superuser_url) as superuser:
        await superuser.execute("SET session_replication_role = replica")
        await insert(superuser, LEDGER)
        await insert(superuser, OTHER)
        yield superuser


@pytest.fixture
async def connection(whole: Connection) -> AsyncIterator[Connection]:
    """That connection in a transaction, in which a test reads what it changed, and which is undone afterwards."""
    async with undone(whole):
        yield whole


@asynccontextmanager
async def undone(connection: Connection) -> AsyncIterator[None]:
    """A transaction of the isolation that verification reads in, none of which stays."""
    changes = connection.transaction(isolation="repeatable_read")
    await changes.start()
    try:
        yield
    finally:
        await changes.rollback()


async def test_what_nobody_edited_is_ok_in_every_aspect(connection: Connection) -> None:
    verdict = await checked(connection)
    assert verdict.verdicts == dict.fromkeys(ASPECTS, "ok")
    assert verdict.compared_with == "node"
    assert (await checked(connection, (OTHER.checkpoint(),), "other")).is_valid


@pytest.mark.parametrize("case", CASES, ids=lambda case: case.name.replace(" ", "-"))
async def test_an_edit_is_found_as_its_kind_at_its_seq(connection: Connection, case: Case) -> None:
    await case.edit(connection)
    verdict = await checked(connection)
    assert verdict.first_break is not None
    assert (verdict.first_break.kind, verdict.first_break.seq) == (case.kind, case.seq)
    assert not_ok(verdict) == case.not_ok
    assert not verdict.is_valid


def test_every_kind_of_break_has_a_case() -> None:
    assert {case.kind for case in CASES} == set(KINDS)


async def test_a_tail_cut_with_everything_made_to_fit_is_found_by_a_held_checkpoint_alone(
    connection: Connection,
) -> None:
    await replace_with(cut_to(55))(connection)
    assert (await checked(connection, ())).is_valid
    assert (await checked(connection, (LEDGER.checkpoint(55, "file"),))).is_valid
    verdict = await checked(connection, (LEDGER.checkpoint(55, "file"), HELD))
    assert verdict.verdicts["checkpoint"] == "broken"
    assert verdict.compared_with == "file, node"


async def test_the_other_side_of_a_swap_between_tenants_is_found_as_well(connection: Connection) -> None:
    await swap_with_another_tenant(connection)
    verdict = await checked(connection, (OTHER.checkpoint(),), "other")
    assert verdict.first_break is not None
    assert (verdict.first_break.kind, verdict.first_break.seq) == ("prev-link", 30)


async def test_an_entry_hidden_below_the_first_seq_is_found(connection: Connection) -> None:
    await connection.execute("ALTER TABLE scheduler.scheduler_log DROP CONSTRAINT scheduler_log_seq")
    fields = {"t_hlc": "'1:1:n'", "hlc_physical": "1", "prev_chain_link": f"'{ZEROS}'"}
    await copy_row(connection, 30, {"seq": "0", **fields})
    verdict = await checked(connection)
    assert verdict.first_break is not None
    assert (verdict.first_break.kind, verdict.first_break.seq) == ("duplicate-seq", 0)


LOOSE = (
    ("scheduler_log", ENTRY_COLUMNS, "seq = 30"),
    ("scheduler_log", ENTRY_COLUMNS, "seq = 60"),
    ("batch_snapshot", SNAPSHOT_COLUMNS, "from_seq = 21"),
    ("chain_heads", ("head_seq", "head_chain_link", "head_hlc"), "true"),
    ("merkle_head", ("tree_size", "root_hash"), "true"),
    ("merkle_tile", ("hashes",), "true"),
    ("jobs", JOB_COLUMNS, "created_physical IS NOT NULL"),
)
NULLED = [
    # The newest snapshot may be one that was made without a signature. No job of this ledger has ended.
    (table, column, "from_seq = 1" if column == "dsse_envelope" else where)
    for table, columns, where in LOOSE
    for column in columns
    if column not in ("origin", "ended_ms", "run_ms")
]


async def drop_guards(connection: Connection, table: str) -> None:
    """Drop every constraint and unique index of the table, so that a column may hold anything of its type."""
    keys = await connection.fetch(
        "SELECT conname FROM pg_constraint WHERE conrelid = to_regclass($1) AND contype IN ('p', 'u', 'c')",
        f"scheduler.{table}",
    )
    for (key,) in keys:
        await connection.execute(f"ALTER TABLE scheduler.{table} DROP CONSTRAINT {key}")
    indexes = await connection.fetch(
        "SELECT indexrelid::regclass::text FROM pg_index WHERE indrelid = to_regclass($1) AND indisunique",
        f"scheduler.{table}",
    )
    for (index,) in indexes:
        await connection.execute(f"DROP INDEX {index}")
    columns = await connection.fetch(
        "SELECT attname FROM pg_attribute WHERE attrelid = to_regclass($1) AND attnum > 0 AND attnotnull"
        " AND attidentity = ''",
        f"scheduler.{table}",
    )
    for (column,) in columns:
        await connection.execute(f"ALTER TABLE scheduler.{table} ALTER {column} DROP NOT NULL")


@pytest.mark.parametrize(("table", "column", "where"), NULLED, ids=lambda part: str(part)[:20])
async def test_a_null_in_any_column_is_a_break_with_a_name(
    connection: Connection, table: str, column: str, where: str
) -> None:
    await drop_guards(connection, table)
    await update(table, f"{column} = NULL", where)(connection)
    verdict = await checked(connection)
    assert verdict.first_break is not None, (table, column)
    assert verdict.first_break.kind in KINDS
    assert not verdict.is_valid
    assert (await checked(connection, (OTHER.checkpoint(),), "other")).is_valid


async def test_a_null_as_the_newest_envelope_leaves_signatures_unchecked(connection: Connection) -> None:
    await update("batch_snapshot", "dsse_envelope = NULL", "from_seq = 21")(connection)
    verdict = await checked(connection)
    assert (verdict.first_break, verdict.verdicts["signatures"]) == (None, "not_checked")


@pytest.mark.parametrize("value", ["", "zz", "1:1", "x" * 64, "é" * 64])
async def test_text_of_no_form_in_any_column_is_a_break_with_a_name(connection: Connection, value: str) -> None:
    texts = ("t_hlc", "hlc_node", "job_id", "action", "prev_chain_link", "chain_link", "payload_digest")
    for at, column in enumerate(texts):
        async with connection.transaction():
            await update("scheduler_log", f"{column} = '{value}'", f"seq = {25 + at}")(connection)
        verdict = await checked(connection)
        assert verdict.first_break is not None
        assert not verdict.is_valid
    for table, column in (("chain_heads", "head_chain_link"), ("merkle_head", "root_hash"), ("jobs", "status")):
        await update(table, f"{column} = '{value}'")(connection)
    for document in ("7", "null", "[]", '{"payload": 7}', '"x"'):
        await update("batch_snapshot", f"dsse_envelope = '{document}'")(connection)
        await update("scheduler_log", f"payload = '{document}', origin = '{document}'", "seq = 40")(connection)
        assert not (await checked(connection)).is_valid
