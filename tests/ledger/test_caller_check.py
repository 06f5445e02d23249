"""What a caller signed is what the chain has: whoever has all keys of the ledger, and none of the caller, is found."""

from __future__ import annotations

import asyncio
import pickle
from collections.abc import Callable
from dataclasses import replace
from hashlib import sha256
from typing import Any

import orjson
import pytest

from ledger import canonical
from ledger.chain.conflict import Event, conflict_hlc, conflict_payload
from ledger.chain.record import IdempotencyKey
from ledger.hlc import PHYSICAL_MS_MAX, Hlc
from ledger.keyed import key_digest, members
from ledger.merkle import leaf_hash, levels_of, root, root_of_path
from ledger.signed_events import MEMBER, WINDOW_MS_MAX, leaf_hashes, message, paths_of, signed_payload
from ledger.verification import Verdict, driver, verify
from ledger.verification.caller_check import KIND
from signing.callers import KeyedJudge, RequiredSignatures, known_callers
from signing.keys import Keyring, KnownCallers, Requirement
from tests.ledger.callers import ED25519, EVERYBODY, ML_DSA_44, P256, STRANGER, Signing, known
from tests.ledger.ledger_in_memory import OPEN, Ledger, MemoryReader, Row, build, origin_of

SIGNED_SEQ = 6
"""An event of the Ed25519 caller, in the middle of the chain."""


def sign(ledger: Ledger, seq: int, signing: Signing, identity: str | None = None) -> None:
    """Have a caller sign an entry."""
    row = ledger.entry(seq)
    payload = {name: value for name, value in orjson.loads(row["payload"]).items() if name != MEMBER}
    signed = signing.signed(ledger.tenant_id, row["job_id"], payload, row["hlc_physical"], identity or f"id-{seq}")
    row["payload"] = canonical.encode(signed).decode()


def mend(ledger: Ledger) -> Ledger:
    """Make everything fit, and sign it with the key of the node, as a forger would who has it."""
    ledger.snapshots = []
    ledger.relink()
    ledger.store_head()
    ledger.store_tree()
    ledger.store_jobs()
    ledger.sign(len(ledger.entries))
    return ledger


def signed_ledger() -> Ledger:
    """Twelve entries, of which each caller signed some: seqs 4 to 6 singly, 9 to 12 together."""
    ledger = build(12)
    for seq, signing in zip((4, 5, SIGNED_SEQ), (P256, ML_DSA_44, ED25519), strict=True):
        sign(ledger, seq, signing)
    rows = [ledger.entry(seq) for seq in range(9, 13)]
    events = [(row["job_id"], orjson.loads(row["payload"])) for row in rows]
    for row, payload in zip(
        rows, ED25519.signed_together("acme", events, rows[0]["hlc_physical"], "many"), strict=True
    ):
        row["payload"] = canonical.encode(payload).decode()
    return mend(ledger)


def verdict(ledger: Ledger, callers: KnownCallers | None = None, **more: Any) -> Verdict:
    judge = KeyedJudge(known() if callers is None else callers)
    return asyncio.run(
        verify(MemoryReader(ledger), tenant_id=ledger.tenant_id, open_snapshot=OPEN, callers=judge, **more)
    )


def edit(row: Row, **members: Any) -> None:
    """Change members of a payload; one that becomes None leaves."""
    payload = {**orjson.loads(row["payload"]), **members}
    kept = {name: value for name, value in payload.items() if value is not None}
    row["payload"] = canonical.encode(kept).decode()


def edit_signature(row: Row, **members: Any) -> None:
    edit(row, signature={**orjson.loads(row["payload"])[MEMBER], **members})


def found(ledger: Ledger) -> tuple[str, str, int] | None:
    """Verdict on signatures, and kind and seq of the first break, once everything was made to fit."""
    judged = verdict(mend(ledger))
    first = judged.first_break
    return None if first is None else (judged.verdicts["signatures"], first.kind, first.seq)


BROKEN = ("broken", KIND, SIGNED_SEQ)
MOVED_MS = 7 * 86_400_000


def test_what_callers_signed_holds_singly_and_together_by_each_algorithm() -> None:
    judged = verdict(signed_ledger())
    assert (judged.first_break, judged.verdicts["signatures"]) == (None, "ok")


def test_what_the_service_adds_is_not_signed() -> None:
    ledger = signed_ledger()
    edit(ledger.entry(SIGNED_SEQ), actor="ops", idempotency="0" * 64)
    assert found(ledger) is None


def forged(ledger: Ledger) -> None:
    signing = Signing(STRANGER._private)
    signing.key_id = ED25519.key_id
    sign(ledger, SIGNED_SEQ, signing)


def moved(ledger: Ledger, by_ms: int) -> None:
    row = ledger.entry(SIGNED_SEQ)
    row["hlc_physical"] += by_ms
    row["t_hlc"] = f"{row['hlc_physical']}:{row['hlc_logical']}:{row['hlc_node']}"


def elsewhere(ledger: Ledger) -> None:
    """As if the event was one of tenant acme2."""
    row = ledger.entry(SIGNED_SEQ)
    payload = {name: value for name, value in orjson.loads(row["payload"]).items() if name != MEMBER}
    signed = ED25519.signed("acme2", row["job_id"], payload, row["hlc_physical"], "elsewhere")
    row["payload"] = canonical.encode(signed).decode()


def imported(ledger: Ledger) -> None:
    edit(ledger.entry(SIGNED_SEQ), dc_id="moon")
    ledger.entry(SIGNED_SEQ).update(origin=origin_of(3))


ATTACKS: dict[str, Callable[[Ledger], Any]] = {
    "forged": forged,
    "changed": lambda ledger: edit(ledger.entry(SIGNED_SEQ), completed=100),
    "a member added": lambda ledger: edit(ledger.entry(SIGNED_SEQ), trace_time=1),
    "another type": lambda ledger: ledger.entry(SIGNED_SEQ).update(
        action="FAIL",
        payload=ledger.entry(SIGNED_SEQ)["payload"].replace("JobAccepted", "JobFailed"),
    ),
    "moved to another job": lambda ledger: ledger.entry(SIGNED_SEQ).update(job_id="job-9999-a"),
    "moved to another tenant": elsewhere,
    "moved to another fence": lambda ledger: edit(ledger.entry(SIGNED_SEQ), fence_token=2),
    "moved to a later time": lambda ledger: moved(ledger, MOVED_MS),
    "moved to an earlier time": lambda ledger: moved(ledger, -MOVED_MS),
    "for a longer time": lambda ledger: edit_signature(ledger.entry(SIGNED_SEQ), not_after_ms=2**50),
    "another id": lambda ledger: edit_signature(ledger.entry(SIGNED_SEQ), id="another"),
    "another caller's key": lambda ledger: edit_signature(ledger.entry(SIGNED_SEQ), key_id=P256.key_id),
    "a signature that is none": lambda ledger: edit_signature(ledger.entry(SIGNED_SEQ), sig="?"),
    "a malformed signature": lambda ledger: edit(ledger.entry(SIGNED_SEQ), signature="not_after_ms"),
    "a path that is not whole": lambda ledger: edit_signature(ledger.entry(SIGNED_SEQ), index=0),
    "imported": imported,
}


@pytest.mark.parametrize("attack", ATTACKS)
def test_whoever_has_the_keys_of_the_ledger_puts_nothing_into_the_mouth_of_a_caller(attack: str) -> None:
    ledger = signed_ledger()
    ATTACKS[attack](ledger)
    assert found(ledger) == BROKEN


@pytest.mark.parametrize(
    ("seq", "change"),
    [
        (10, {"completed": 7}),
        (10, {"fence_token": 9}),
    ],
)
def test_an_event_of_a_request_of_many_is_covered_by_its_path(seq: int, change: dict[str, Any]) -> None:
    ledger = signed_ledger()
    edit(ledger.entry(seq), **change)
    assert found(ledger) == ("broken", KIND, seq)


@pytest.mark.parametrize("members", [{"index": 1}, {"size": 5}, {"path": ""}, {"path": "AAAA"}])
def test_a_path_leads_from_its_place_to_the_root_that_was_signed(members: dict[str, Any]) -> None:
    ledger = signed_ledger()
    edit_signature(ledger.entry(9), **members)
    assert found(ledger) == ("broken", KIND, 9)


@pytest.mark.parametrize("size", [1, 2, 3, 7, 8, 13])
def test_the_members_of_many_events_are_those_of_each(size: int) -> None:
    said = ED25519.said(5, 'a"b')
    jobs = [(f"t-{number % 3}", f"job-{number // 2}/\u00e4") for number in range(size)]
    payloads = [canonical.encode({"n": number}) for number in range(size)]
    leaves = [leaf_hash(message(*job, said, each)) for job, each in zip(jobs, payloads, strict=True)]
    assert leaf_hashes(said, jobs, payloads) == leaves
    tree = levels_of(leaves)
    assert tree[-1] == [root(leaves)]
    for index, (leaf, path) in enumerate(zip(leaves, paths_of(tree), strict=True)):
        hashes = [path[at : at + 32] for at in range(0, len(path), 32)]
        assert root_of_path(index, size, leaf, hashes) == tree[-1][0]
    key = IdempotencyKey(7, 'a"b', 4, bytes(32))
    digests = [key_digest(tenant_id, key._replace(line=4 + at)) for at, (tenant_id, _) in enumerate(jobs)]
    assert members([tenant_id for tenant_id, _ in jobs], key) == [b'"idempotency":"%b",' % d.encode() for d in digests]


@pytest.mark.parametrize("seq", [SIGNED_SEQ, 10])
@pytest.mark.parametrize("ranges", [1000, 4])
def test_an_event_that_is_chained_again_repeats_the_first(
    seq: int, ranges: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(driver, "RANGE_ENTRIES", ranges)
    ledger = signed_ledger()
    again = {**ledger.entry(seq), "seq": 13, "hlc_logical": 7}
    again["t_hlc"] = f"{again['hlc_physical']}:7:{again['hlc_node']}"
    ledger.entries.append(again)
    assert found(ledger) == ("broken", KIND, 13)


def test_the_same_event_of_two_logs_repeats_nothing() -> None:
    ledger = signed_ledger()
    again = {**ledger.entry(SIGNED_SEQ), "seq": 13, "hlc_logical": 7, "origin": origin_of(3)}
    again["t_hlc"] = f"{again['hlc_physical']}:7:{again['hlc_node']}"
    ledger.entries.append(again)
    assert found(ledger) is None


def test_a_key_that_is_revoked_or_of_no_caller_counts_for_nothing_from_then_on() -> None:
    hlc = Hlc.parse(signed_ledger().entry(SIGNED_SEQ)["t_hlc"])
    caller = ED25519.caller
    revoked = caller._replace(key=replace(caller.key, revoked_from_hlc=hlc))
    callers = KnownCallers({**known().by_key, ED25519.key_id: revoked})
    judged = verdict(signed_ledger(), callers)
    assert judged.verdicts["signatures"] == "unknown_key"
    assert (judged.first_break.kind, judged.first_break.seq) == (KIND, SIGNED_SEQ)  # type: ignore[union-attr]
    judged = verdict(signed_ledger(), known(P256, ML_DSA_44))
    assert judged.verdicts["signatures"] == "unknown_key"
    of_others = caller._replace(tenants=("other", "acm", "b*"))
    judged = verdict(signed_ledger(), KnownCallers({**known().by_key, ED25519.key_id: of_others}))
    assert judged.verdicts["signatures"] == "unknown_key"
    of_some = caller._replace(tenants=("ac*",))
    assert verdict(signed_ledger(), KnownCallers({**known().by_key, ED25519.key_id: of_some})).is_valid


def test_without_callers_signatures_are_not_checked_and_repetitions_are() -> None:
    judged = asyncio.run(verify(MemoryReader(signed_ledger()), tenant_id="acme", open_snapshot=OPEN))
    assert (judged.is_valid, judged.verdicts["signatures"]) == (True, "not_checked")
    nobody = KeyedJudge(None)
    ledger = signed_ledger()
    again = {**ledger.entry(SIGNED_SEQ), "seq": 13, "hlc_logical": 7}
    again["t_hlc"] = f"{again['hlc_physical']}:7:{again['hlc_node']}"
    ledger.entries.append(again)
    mended = MemoryReader(mend(ledger))
    judged = asyncio.run(verify(mended, tenant_id="acme", open_snapshot=OPEN, callers=nobody))
    assert judged.first_break is not None
    assert (judged.first_break.kind, judged.first_break.seq) == (KIND, 13)


def test_an_imported_event_of_a_caller_of_another_ledger_is_history() -> None:
    ledger = build(12)
    sign(ledger, SIGNED_SEQ, STRANGER)
    assert found(ledger) == ("unknown_key", KIND, SIGNED_SEQ)
    ledger.entry(SIGNED_SEQ)["origin"] = origin_of(3)
    assert found(ledger) is None


def requirement(from_seq: int, *types: str) -> Requirement:
    return Requirement(Hlc.parse(signed_ledger().entry(from_seq)["t_hlc"]), "acme", types)


def test_an_event_that_must_be_signed_and_is_not_is_found_from_then_on() -> None:
    ledger = signed_ledger()
    required = known(*EVERYBODY, required=[requirement(5, "JobAccepted"), requirement(9, "JobCompleted")])
    assert verdict(ledger, required).is_valid
    edit(ledger.entry(SIGNED_SEQ), signature=None)
    judged = verdict(mend(ledger), required)
    assert (judged.verdicts["signatures"], judged.first_break.seq) == ("broken", SIGNED_SEQ)  # type: ignore[union-attr]
    ledger.entry(SIGNED_SEQ)["origin"] = origin_of(3)
    assert verdict(mend(ledger), required).is_valid, "an imported event is judged where it is from"
    edit(ledger.entry(10), signature=None)
    assert verdict(mend(ledger), required).is_valid, "JobAccepted need not be signed any more"


def test_an_event_in_a_conflict_entry_is_judged_as_well() -> None:
    ledger = signed_ledger()
    row = ledger.entry(SIGNED_SEQ)
    edit(row, dc_id="moon")
    digest = sha256(row["payload"].encode()).hexdigest()
    event = Event(row["t_hlc"], row["job_id"], row["action"], digest)
    hlc = conflict_hlc(event)
    row["payload"] = conflict_payload(event, row["payload"], "0" * 64).decode()
    row |= {"action": "CONFLICT", "t_hlc": hlc.text(), "hlc_node": hlc.node_id}
    assert found(ledger) == BROKEN


def test_a_keyring_keeps_its_callers_when_it_travels() -> None:
    ring = Keyring([], callers=known(*EVERYBODY, required=[requirement(5, "JobAccepted")]))
    travelled = pickle.loads(pickle.dumps(ring))
    assert travelled.callers == ring.callers
    assert Keyring.merged([ring, Keyring([])]).callers == ring.callers
    assert Keyring.merged([Keyring([]), Keyring([])]).callers is None
    judge = KeyedJudge.of_saved(KeyedJudge(ring.callers, "the chain of keys is damaged").saved())
    assert (judge.known, judge.requires_any("acme"), judge.requires_any("beta")) == (ring.callers, True, False)
    assert KeyedJudge.of_saved(KeyedJudge(None).saved()).known is None


@pytest.mark.parametrize(("excess_ms", "expected"), [(0, None), (1, BROKEN)])
def test_the_times_of_a_signature_have_a_longest_distance(excess_ms: int, expected: object) -> None:
    ledger = signed_ledger()
    row = ledger.entry(SIGNED_SEQ)
    payload = signed_payload(orjson.loads(row["payload"]))
    begin_ms = row["hlc_physical"]
    said = {**ED25519.said(begin_ms), "not_before_ms": begin_ms, "not_after_ms": begin_ms + WINDOW_MS_MAX + excess_ms}
    edit(row, signature={**said, "sig": ED25519.sign(message("acme", row["job_id"], said, payload))})
    assert found(ledger) == expected


def test_of_requirements_for_one_time_the_last_of_the_chain_is_that_which_stays() -> None:
    at = Hlc(1_000, 0, "node-1")
    changes = [
        RequiredSignatures(f"{number:016x}", "acme", types, at.text())
        for number, types in enumerate((["JobCreated"], []))
    ]
    judge = KeyedJudge(known_callers((change, at) for change in changes))
    assert judge.is_required("acme", "JobCreated", at)
    assert not judge.is_required("acme", "JobCreated", at._replace(physical_ms=1_001))
    last = known_callers((change, at._replace(physical_ms=PHYSICAL_MS_MAX)) for change in changes).to_json()
    assert Keyring.from_json({"keys": [], **last}).callers is not None
