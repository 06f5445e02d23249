"""Spark finds in PostgreSQL what the service's verification finds: the same verdict object on every tenant.

Every case is a tenant of one database, so one job of Spark verifies them all. Pieces have 20 entries.
"""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Callable
from functools import partial
from typing import Any, NamedTuple

import asyncpg
import pytest
from pyspark.sql import SparkSession

from app.store.chain_reader import consistent_reader
from ledger import canonical
from ledger.verification import StoredTree, Verdict, verify
from ledger.verification.entry_check import ENTRY_COLUMNS
from ledger.verification.tree_check import TreeHead
from pipeline.places import parse_place
from pipeline.verify import Verified
from pipeline.verify import verify as verify_on_spark
from signing import key_statement, retention_statement
from signing.key_history import added_facts, root_facts
from signing.key_statement import Anchor
from signing.keys import Keyring
from signing.private_keys import FileSigner
from tests.app.chain_builder import insert
from tests.app.test_tamper import Connection, drop_guards
from tests.conftest import Database
from tests.ledger.damage import DAMAGE, damage
from tests.ledger.ledger_in_memory import OPEN, SIGNER, STRANGER, Ledger, build, payload_digest
from tests.ledger.pruned import enter as enter_retention
from tests.ledger.pruned import finish, floor_facts, pruned_race, removed, with_index, without
from tests.ledger.test_carried import FLOOR as RACE_FLOOR
from tests.ledger.test_carried import RACE, changed

ROWS_A_PIECE = 20
COUNT = 60
ZEROS = "0" * 64
KEYRING = Keyring.of([SIGNER.public_key_pem])


class Case(NamedTuple):
    """A change to a ledger of 60 entries with snapshots to 18 and 45, and the break that is the first."""

    name: str
    kind: str | None
    seq: int
    edit: Callable[[Ledger], object]


def remove(first: int, last: int) -> Callable[[Ledger], object]:
    def edit(ledger: Ledger) -> None:
        ledger.entries = [row for row in ledger.entries if not first <= row["seq"] <= last]

    return edit


def change(seq: int, /, **values: Any) -> Callable[[Ledger], object]:
    return lambda ledger: ledger.entry(seq).update(values)


def rewritten(seq: int) -> Callable[[Ledger], object]:
    """History from ``seq`` on made anew, and everything made to fit that needs no key."""

    def edit(ledger: Ledger) -> None:
        ledger.entry(seq)["payload"] = ledger.entry(seq)["payload"][:-1] + ',"zz":"rewritten"}'
        refit(ledger, seq)

    return edit


def refit(ledger: Ledger, seq: int) -> None:
    ledger.relink(seq)
    ledger.store_head()
    ledger.store_tree()
    ledger.store_jobs()


def swap(one: int, other: int) -> Callable[[Ledger], object]:
    def edit(ledger: Ledger) -> None:
        first, second = ledger.entry(one), ledger.entry(other)
        first["seq"], second["seq"] = other, one

    return edit


def cut_to(seq: int, *, fits: bool) -> Callable[[Ledger], object]:
    def edit(ledger: Ledger) -> None:
        del ledger.entries[seq:]
        ledger.snapshots = [row for row in ledger.snapshots if row["to_seq"] <= seq]
        if fits:
            refit(ledger, seq)

    return edit


def repeat(seq: int) -> Callable[[Ledger], object]:
    return lambda ledger: ledger.entries.insert(seq, dict(ledger.entry(seq)))


def to_one_seq(one: int, other: int) -> Callable[[Ledger], object]:
    """The entry ``other`` stands at ``one`` too, and was stored before it."""

    def edit(ledger: Ledger) -> None:
        moved = ledger.entry(other)
        ledger.entries.remove(moved)
        ledger.entries.insert(0, moved)
        moved["seq"] = one

    return edit


def capitals(seq: int) -> Callable[[Ledger], object]:
    """A link spelt in capitals, and named so by the entry behind it."""

    def edit(ledger: Ledger) -> None:
        link = ledger.entry(seq)["chain_link"].upper()
        ledger.entry(seq)["chain_link"] = ledger.entry(seq + 1)["prev_chain_link"] = link

    return edit


def old_version(ledger: Ledger) -> None:
    """A link of version 1 where a piece begins: only the piece before knows that it may not be."""
    ledger.entry(41)["link_version"] = 1
    ledger.snapshots.clear()
    refit(ledger, 41)


def claim_of_another_range(ledger: Ledger) -> None:
    """A snapshot that is stored as one of 46..47 and was signed over 46..60: only opening it tells."""
    row = ledger.signed(46, 60, payload_digest(ledger.snapshots[-1]))
    ledger.snapshots.append({**row, "to_seq": 47})


def untrue_claim(ledger: Ledger) -> None:
    row = ledger.signed(46, 60, payload_digest(ledger.snapshots[-1]), merkle_root=ZEROS)
    ledger.snapshots.append(row)


def edit_snapshot(ledger: Ledger) -> None:
    ledger.snapshots[1]["merkle_root"] = ZEROS


def strange_snapshot(ledger: Ledger) -> None:
    ledger.snapshots.append(ledger.signed(46, 60, payload_digest(ledger.snapshots[-1]), STRANGER))


def other_entries(ledger: Ledger) -> None:
    """What the row of a job names that has entries in two pieces."""
    job = next(job for job in ledger.jobs if job["job_id"] == ledger.entry(19)["job_id"])
    job["seqs"] = job["seqs"].replace("{", "{1,")


def from_another_tenant(seq: int) -> Callable[[Ledger], object]:
    def edit(ledger: Ledger) -> None:
        at = seq - 1
        ledger.entries[at] = dict(build(COUNT, tenant_id="whole", begin_ms=1_600_000_000_000).entries[at])

    return edit


CASES = (
    Case("whole", None, 0, lambda ledger: None),
    Case("the first entry removed", "gap", 1, remove(1, 1)),
    Case("the last entry of a piece removed", "gap", 20, remove(20, 20)),
    Case("the first entry of a piece removed", "gap", 21, remove(21, 21)),
    Case("a whole piece removed", "gap", 21, remove(21, 40)),
    Case("entries on both sides of a border removed", "gap", 19, remove(19, 22)),
    Case("the first payload of a piece edited", "payload-digest", 21, change(21, payload='{"type":"JobFailed"}')),
    Case("the last payload of a piece edited", "payload-digest", 20, change(20, payload='{"type":"JobFailed"}')),
    Case("the last payload of all edited", "payload-digest", 60, change(60, payload='{"type":"JobFailed"}')),
    Case("the last link of a piece edited", "link", 20, change(20, chain_link="f" * 64)),
    Case("the last link of a piece in capitals", "link", 20, capitals(20)),
    Case("the first entry of a piece names another before it", "prev-link", 21, change(21, prev_chain_link=ZEROS)),
    Case("the first HLC of a piece removed", "hlc-columns", 41, change(41, hlc_logical=None)),
    Case("the job of the last entry of a piece edited", "link", 40, change(40, job_id="another")),
    Case("history rewritten from a border on", "snapshot-root", 45, rewritten(21)),
    Case("history rewritten from the end of a piece on", "snapshot-root", 45, rewritten(20)),
    Case("entries swapped across a border", "prev-link", 20, swap(20, 21)),
    Case("an entry doubled at a border", "duplicate-seq", 21, repeat(21)),
    Case("an entry of another tenant at the end of a piece", "prev-link", 40, from_another_tenant(40)),
    Case("an entry of another tenant at the start of a piece", "prev-link", 41, from_another_tenant(41)),
    Case("an entry moved far out", "gap", 60, change(60, seq=2**40)),
    Case("the tail cut at a border", "tail-truncated", 41, cut_to(40, fits=False)),
    Case("the tail cut and everything made to fit", "rollback", 41, cut_to(40, fits=True)),
    Case("a snapshot across a border edited", "snapshot-root", 45, edit_snapshot),
    Case("a snapshot stored for another range than it was signed for", "snapshot-root", 60, claim_of_another_range),
    Case("a snapshot of a border that is signed and untrue", "snapshot-root", 60, untrue_claim),
    Case("a snapshot by a stranger", "snapshot-signature", 60, strange_snapshot),
    Case("an envelope removed", "snapshot-chain", 19, lambda one: one.snapshots[0].update(dsse_envelope=None)),
    Case("an unsigned snapshot at the end", None, 0, lambda one: one.cover(60)),
    Case("a snapshot removed", "snapshot-chain", 1, lambda one: one.snapshots.pop(0)),
    Case("a tile removed", "tree", 1, lambda one: one.tiles.clear()),
    Case("the root of the stored tree edited", "tree", 60, lambda one: setattr(one, "tree", StoredTree(60, ZEROS))),
    Case("a stored tree of a size below 0", "tree", 60, lambda one: setattr(one, "tree", StoredTree(-1, ZEROS))),
    Case(
        "a stored tree without entries that has a root",
        "tree",
        1,
        lambda one: setattr(one, "tree", StoredTree(0, ZEROS)),
    ),
    Case("an entry moved below all numbers", "duplicate-seq", -(2**63), change(7, seq=-(2**63))),
    Case("two entries at one seq", "duplicate-seq", 20, to_one_seq(20, 21)),
    Case("a link of version 1 at the start of a piece", "link", 41, old_version),
    Case("an entry added to those of a job of two pieces", "projection", 23, other_entries),
    Case("a job removed", "projection", 60, lambda one: one.jobs.pop()),
    Case("a head without entries", "tail-truncated", 1, lambda one: one.entries.clear()),
)


def tenant_of(case: Case) -> str:
    return case.name.lower().replace(" ", "-")


async def by_the_service(connection: Connection, tenant: str, heads: list[TreeHead]) -> Verdict:
    async with consistent_reader(connection, tenant) as reader:
        return await verify(
            reader,
            tenant_id=tenant,
            open_snapshot=OPEN,
            checkpoints=heads,
            judge_statement=partial(retention_statement.judge, f"{ORIGIN}/{tenant}", KEYRING),
        )


STORED_TENANTS = """
    SELECT tenant_id FROM scheduler.chain_heads UNION SELECT tenant_id FROM scheduler.merkle_head
    UNION SELECT tenant_id FROM scheduler.batch_snapshot UNION SELECT tenant_id FROM scheduler.scheduler_log
    UNION SELECT tenant_id FROM scheduler.jobs UNION SELECT tenant_id FROM scheduler.merkle_tile
"""


async def is_unknown_to_the_service(connection: Connection, tenant: str) -> bool:
    async with consistent_reader(connection, tenant) as reader:
        return await reader.head() is None and await reader.last_entry() is None


async def without_guards(superuser: Connection) -> Connection:
    await superuser.execute("SET session_replication_role = replica")
    for table in ("scheduler_log", "batch_snapshot", "jobs", "merkle_head"):
        await drop_guards(superuser, table)
    return superuser


def on_spark(spark: SparkSession, database: Database, heads: dict[str, list[TreeHead]]) -> tuple[Verified, Any]:
    """The verification, and the number of breaks that are listed by tenant and kind."""
    with parse_place(database.service_url).open() as place:
        verified = verify_on_spark(spark, place, keyring=KEYRING, checkpoints=heads, rows_a_piece=ROWS_A_PIECE)
        listed: dict[str, Counter[str]] = {each["tenant_id"]: Counter() for each in verified.objects}
        for row in verified.breaks().collect():
            listed[row.tenant_id][row.kind] += 1
        verified.close()
    return verified, listed


def without_time(verdict: dict[str, Any]) -> dict[str, Any]:
    return {**verdict, "duration_ms": 0}


async def test_every_tampering_is_found_as_the_service_finds_it(
    spark: SparkSession, superuser: Connection, database: Database
) -> None:
    connection = await without_guards(superuser)
    heads: dict[str, list[TreeHead]] = {}
    for case in CASES:
        ledger = build(COUNT, tenant_id=tenant_of(case), snapshots_to=(18, 45))
        heads[ledger.tenant_id] = [ledger.checkpoint()]
        case.edit(ledger)
        await insert(connection, ledger)
    verified, listed = on_spark(spark, database, heads)
    found = {verdict["tenant_id"]: verdict for verdict in verified.objects}
    assert len(found) == len(CASES)
    for case in CASES:
        tenant = tenant_of(case)
        service = await by_the_service(connection, tenant, heads[tenant])
        first = service.first_break
        assert ((first.kind, first.seq) if first else (None, 0)) == (case.kind, case.seq), case.name
        assert without_time(found[tenant]) == service.to_json(0), case.name
        assert listed[tenant] == Counter(service.breaks), case.name


@pytest.mark.parametrize("seed", [1])
async def test_ledgers_damaged_at_random_get_the_verdict_of_the_service(
    spark: SparkSession, superuser: Connection, database: Database, seed: int
) -> None:
    connection = await without_guards(superuser)
    draw = random.Random(seed)
    heads: dict[str, list[TreeHead]] = {}
    for number in range(60):
        count = draw.choice([0, 1, 19, 20, 21, 41, 50])
        to_seqs = sorted({seq for seq in (draw.randint(1, 50) for _ in range(4)) if seq <= count})
        old = draw.choice([0, 0, 20])
        ledger = build(count, tenant_id=f"tenant-{number}", snapshots_to=to_seqs, version_1_until=old)
        held = [ledger.checkpoint()] if count else []
        for _ in range(draw.choice([0, 1, 2, 3])):
            damage(ledger, draw.randrange(len(DAMAGE)), draw.randrange(200), draw.randrange(2000))
        try:
            async with connection.transaction():
                await insert(connection, ledger)
        except (asyncpg.PostgresError, asyncpg.DataError):
            continue  # A column of PostgreSQL cannot hold what this one was given.
        heads[ledger.tenant_id] = held
    assert len(heads) > 40
    verified, listed = on_spark(spark, database, heads)
    found = {verdict["tenant_id"]: without_time(verdict) for verdict in verified.objects}
    # A tenant is left out only where there is nothing of it, and nobody holds that there was.
    absent = heads.keys() - found.keys()
    assert absent == heads.keys() - {row[0] for row in await connection.fetch(STORED_TENANTS)}
    assert not any(heads[tenant] for tenant in absent)
    broken = 0
    for tenant in heads.keys() - absent:
        if await is_unknown_to_the_service(connection, tenant):
            assert found[tenant]["breaks"]["tail-truncated"] == 1
            continue
        service = await by_the_service(connection, tenant, heads[tenant])
        broken += not service.is_valid
        assert found[tenant] == service.to_json(0), tenant
        assert listed[tenant] == Counter(service.breaks), tenant
    assert broken > 20


async def test_a_tenant_of_which_anything_but_its_chain_is_left_is_told_as_cut(
    spark: SparkSession, superuser: Connection, database: Database
) -> None:
    connection = await without_guards(superuser)
    parts = ("snapshots", "jobs", "tiles", "tree")
    for kept in parts:
        ledger = build(COUNT, tenant_id=kept, snapshots_to=(18, 45))
        ledger.entries, ledger.head = [], None
        for part in {*parts} - {kept}:
            setattr(ledger, part, {"tiles": {}, "tree": None}.get(part, []))
        await insert(connection, ledger)
    verified, listed = on_spark(spark, database, {})
    assert {each["tenant_id"] for each in verified.objects} == {*parts}
    for verdict in verified.objects:
        assert not verdict["valid"]
        assert verdict["breaks"]["tail-truncated"] == listed[verdict["tenant_id"]]["tail-truncated"] == 1


FLOOR = 18
"""Where a snapshot ends, within the first piece."""
ORIGIN = "log.example"


def pruned(tenant_id: str, removed_to: int = FLOOR, signer: FileSigner | None = SIGNER, **facts: Any) -> Ledger:
    """A ledger whose entries up to ``FLOOR`` leave by its entry 50; those up to ``removed_to`` are not there."""
    ledger = build(COUNT, tenant_id=tenant_id, snapshots_to=(FLOOR, 45))
    said = floor_facts(ledger, FLOOR) | facts
    enter_retention(ledger, 50, "PRUNED", said, signer, log=f"{ORIGIN}/{tenant_id}")
    finish(ledger, (FLOOR, 45))
    remove(1, removed_to)(ledger)
    ledger.store_jobs()
    return ledger


def lacking(tenant_id: str) -> Ledger:
    """The index of jobs in its last snapshot has a run over what left that lacks the first entry which stays."""
    whole = pruned(tenant_id, 0)
    ledger = with_index(whole, job_index=without(whole, FLOOR + 1).job_index(45))
    remove(1, FLOOR)(ledger)
    ledger.store_jobs()
    return ledger


def whole_without_prefix(tenant_id: str) -> Ledger:
    ledger = build(COUNT, tenant_id=tenant_id, snapshots_to=(FLOOR, 45))
    remove(1, FLOOR)(ledger)
    ledger.store_jobs()
    return ledger


def without_job(ledger: Ledger) -> Ledger:
    ledger.jobs.pop()
    return ledger


def edited(ledger: Ledger, seq: int) -> Ledger:
    change(seq, payload='{"type":"JobFailed"}')(ledger)
    return ledger


def without_tiles(ledger: Ledger) -> Ledger:
    ledger.tiles.clear()
    return ledger


def race(tenant_id: str, removed_to: int = RACE_FLOOR, **facts: Any) -> Ledger:
    """A ledger of commitments whose entries up to ``RACE_FLOOR`` leave."""
    ledger = pruned_race(RACE, RACE_FLOOR, log=f"{ORIGIN}/{tenant_id}", tenant_id=tenant_id, **facts)
    return removed(ledger, removed_to)


PRUNED: dict[str, tuple[Callable[[str], Ledger], tuple[str, int] | None]] = {
    "pruned": (pruned, None),
    "being-removed": (lambda name: pruned(name, 7), None),
    "not-removed-yet": (lambda name: pruned(name, 0), None),
    "more-removed": (lambda name: pruned(name, FLOOR + 1), ("gap", FLOOR + 1)),
    "no-entry-says-so": (whole_without_prefix, ("gap", 1)),
    "unsigned": (lambda name: pruned(name, signer=None), ("gap", 1)),
    "unsigned-and-not-removed": (lambda name: pruned(name, 0, None), ("malformed", 50)),
    "signed-by-a-stranger": (lambda name: pruned(name, signer=STRANGER), ("snapshot-signature", 50)),
    "another-link": (lambda name: pruned(name, chain_link=ZEROS), ("prev-link", FLOOR + 1)),
    "another-snapshot": (lambda name: pruned(name, snapshot=ZEROS), ("snapshot-chain", FLOOR + 1)),
    "edited-above": (lambda name: edited(pruned(name), FLOOR + 1), ("payload-digest", FLOOR + 1)),
    "a-job-lost": (lambda name: without_job(pruned(name, 7)), ("projection", 60)),
    "an-entry-left-out-of-the-index": (lacking, ("snapshot-root", 45)),
    "tiles-lost": (lambda name: without_tiles(pruned(name)), ("tree", 1)),
    "commitments": (race, None),
    "commitments-being-removed": (lambda name: race(name, 7), None),
    "commitments-not-carried": (lambda name: race(name, commitments=None), ("projection", 7)),
    "a-commitment-too-few": (lambda name: race(name, commitments=changed(active=[])), ("projection", 7)),
    "commitments-that-are-none": (lambda name: race(name, commitments={}), ("projection", 7)),
}
"""Ledgers of which a prefix left, or seems to have left, and the first break."""


WHOLE = ("pruned", "being-removed", "not-removed-yet")


async def test_a_pruned_chain_gets_the_verdict_of_the_service_from_its_floor_on(
    spark: SparkSession, superuser: Connection, database: Database
) -> None:
    connection = await without_guards(superuser)
    await connection.execute("INSERT INTO scheduler.ledger_identity VALUES (true, $1)", ORIGIN)
    heads: dict[str, list[TreeHead]] = {}
    for name, (make, _) in PRUNED.items():
        ledger = make(name)
        whole = pruned(name, 0)
        heads[name] = [whole.checkpoint(7), whole.checkpoint(30)] if name == "pruned" else []
        await insert(connection, ledger)
    verified, listed = on_spark(spark, database, heads)
    found = {verdict["tenant_id"]: verdict for verdict in verified.objects}
    for name, (_, first) in PRUNED.items():
        service = await by_the_service(connection, name, heads[name])
        told = service.first_break
        assert (None if told is None else (told.kind, told.seq)) == first, name
        assert without_time(found[name]) == service.to_json(0), name
        assert listed[name] == Counter(service.breaks), name
    assert {found[name]["verdicts"]["snapshots"] for name in WHOLE} == {"ok"}
    for name in WHOLE:
        assert (found[name]["verified_from_seq"], found[name]["pruned"]["to_seq"]) == (FLOOR + 1, FLOOR)
        assert set(found[name]["verdicts"].values()) <= {"ok", "not_checked"}


def enter(system: Ledger, action: str, job_id: str, facts: dict[str, Any]) -> None:
    """One more entry of ``_system``."""
    payload, seq = canonical.encode({"type": action, **facts}), len(system.entries) + 1
    row = dict.fromkeys(ENTRY_COLUMNS)
    row |= {"seq": seq, "t_hlc": f"{seq}:0:n", "hlc_physical": seq, "hlc_logical": 0, "hlc_node": "n"}
    row |= {"job_id": job_id, "action": action, "link_version": 2, "payload": payload.decode()}
    system.entries.append(row)
    system.relink()


async def test_without_keys_those_that_the_ledger_admits_tell_a_stranger_and_make_no_signature_good(
    spark: SparkSession, superuser: Connection, database: Database
) -> None:
    connection = await without_guards(superuser)
    system = Ledger("_system")
    root, stranger = root_facts(SIGNER.public_key, "node-1"), added_facts(STRANGER.public_key, "node-2")
    enter(system, "KEY_ADDED", f"key:{SIGNER.key_id}", root)
    enter(system, "KEY_ADDED", f"key:{STRANGER.key_id}", stranger)
    # What was said of the stranger in the ledger that this one was forked from says nothing here.
    said_there = Anchor(1, system.entries[0]["chain_link"])
    enter(system, "LOG_FORKED", "fork:0123456789abcdef", {"to_origin": "fork.example/log"})
    admitted = key_statement.sign("KEY_ADMITTED", stranger, SIGNER.key_id, said_there, SIGNER)
    enter(system, "KEY_ADMITTED", f"key:{STRANGER.key_id}", admitted)
    system.store_head()
    await insert(connection, system)
    for tenant, key in (("honest", SIGNER), ("forged", STRANGER)):
        ledger = build(COUNT, tenant_id=tenant)
        ledger.sign(COUNT, key)
        await insert(connection, ledger)
    with parse_place(database.service_url).open() as place:
        verified = verify_on_spark(spark, place, tenants=["honest", "forged"], rows_a_piece=ROWS_A_PIECE)
        verified.close()
    found = {each["tenant_id"]: (each["verdicts"]["signatures"], each["valid"]) for each in verified.objects}
    assert found == {"honest": ("not_checked", True), "forged": ("unknown_key", False)}
