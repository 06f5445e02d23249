"""What callers signed (signed-events.md), and what whoever has all keys of the ledger does to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, Final

import orjson

from ledger.hlc import Hlc
from ledger.signed_events import WINDOW_MS_MAX, message, signed_payload
from signing.keys import Keyring, KnownCallers
from tests.app.receipts import dishonest_receipt, receipt_of
from tests.cases.bundles import bundle_of
from tests.cases.corpus import Case
from tests.ledger.callers import ED25519, ML_DSA_44, P256, STRANGER, known
from tests.ledger.ledger_in_memory import SIGNER, Ledger, build, origin_of
from tests.ledger.test_caller_check import (
    ATTACKS,
    SIGNED_SEQ,
    edit,
    edit_signature,
    mend,
    requirement,
    sign,
    signed_ledger,
)


def _ring(callers: KnownCallers | None) -> Keyring:
    return Keyring([SIGNER.public_key], callers=callers)


def _with_first(**changes: Any) -> KnownCallers:
    """The callers, of whom the one that signed seq 6 is changed."""
    key_changes = {"key": replace(ED25519.caller.key, **changes)} if "revoked_from_hlc" in changes else changes
    return KnownCallers({**known().by_key, ED25519.key_id: ED25519.caller._replace(**key_changes)}, ())


_HLC: Final = Hlc.parse(signed_ledger().entry(SIGNED_SEQ)["t_hlc"])
_LAST: Final = Hlc.parse(signed_ledger().entry(12)["t_hlc"])
KEYS: Final = {
    "callers": _ring(known()),
    "callers, required": _ring(known(required=[requirement(5, "JobAccepted"), requirement(9, "JobCompleted")])),
    "no callers": _ring(None),
    "revoked at seq 6": _ring(_with_first(revoked_from_hlc=_HLC)),
    "revoked behind the last": _ring(_with_first(revoked_from_hlc=Hlc(_LAST.physical_ms + 1, 0, "node-1"))),
    "of other tenants": _ring(_with_first(tenants=("other", "acm", "b*"))),
    "of tenants that begin so": _ring(_with_first(tenants=("ac*",))),
    "without the first": _ring(known(P256, ML_DSA_44)),
}
"""An attack needs none of the callers' keys; what is known of them decides."""

WHY: Final = {
    "forged": "A stranger signed in the name of the caller.",
    "changed": "completed was not in what the caller signed.",
    "a member added": "trace_time was not in what the caller signed, and is none of the members that a service adds.",
    "another type": "The caller signed another type of event.",
    "moved to another job": "The caller signed the event of another job.",
    "moved to another tenant": "The caller signed the event for tenant acme2.",
    "moved to another fence": "The caller signed another fence_token.",
    "moved to a later time": "The HLC lies a week behind the times that the caller signed.",
    "moved to an earlier time": "The HLC lies a week before the times that the caller signed.",
    "for a longer time": "not_after_ms was put off, which the signature covers.",
    "another id": "id is not the one that was signed.",
    "another caller's key": "key_id names another caller, who did not sign.",
    "a signature that is none": "sig is no base64.",
    "a malformed signature": "signature is a text, and no object.",
    "a path that is not whole": "index stands there without size and path.",
    "imported": "An entry with an origin was changed, and a known caller is named: it is judged as well.",
}
NOT_OF_ONE_JOB: Final = ("moved to another job", "another type")
"""Attacks of which a receipt of the job shows nothing."""


def cases() -> Iterator[Case]:
    """All of them."""
    whole = mend(signed_ledger())
    yield _case("sound", whole, 0, "Three callers signed, by three algorithms, single events and a request of four.")
    yield from _attacks()
    yield from _members()
    yield from _repeated()
    yield from _known(whole)
    yield from _required()


def _case(name: str, ledger: Ledger, code: int, why: str, keys: str = "callers") -> Case:
    return Case(name, bundle_of(ledger), code, why, keys=keys)


def _attacks() -> Iterator[Case]:
    assert WHY.keys() == ATTACKS.keys()
    for name, attack in ATTACKS.items():
        ledger = signed_ledger()
        job_id = ledger.entry(SIGNED_SEQ)["job_id"]
        attack(ledger)
        mend(ledger)
        yield _case(name, ledger, 2, WHY[name])
        if name not in NOT_OF_ONE_JOB:
            file = receipt_of(ledger, job_id)
            yield Case(f"receipt, {name}", file, 2, f"In a receipt of the job as well: {WHY[name]}", keys="callers")
    sound = mend(signed_ledger())
    file = receipt_of(sound, sound.entry(SIGNED_SEQ)["job_id"])
    yield Case("receipt, sound", file, 0, "The caller signed the event of the job.", keys="callers")
    yield Case(
        "receipt, callers unknown",
        file,
        3,
        "No callers are known, so what they signed is not judged.",
        keys="no callers",
    )


def _members() -> Iterator[Case]:
    """Other members of a payload and of its signature."""

    def of(change: Callable[[Ledger], object]) -> Ledger:
        ledger = signed_ledger()
        change(ledger)
        return mend(ledger)

    def at(seq: int, **members: Any) -> Ledger:
        return of(lambda ledger: edit(ledger.entry(seq), **members))

    def signature(seq: int, **members: Any) -> Ledger:
        return of(lambda ledger: edit_signature(ledger.entry(seq), **members))

    added = at(SIGNED_SEQ, actor="ops", idempotency="0" * 64)
    yield _case("what the service adds", added, 0, "actor and idempotency are added by the service, and not signed.")
    for name, ledger, why in (
        (
            "an event of many, changed",
            at(10, completed=9),
            "The path of seq 10 leads from another event to another root.",
        ),
        (
            "an event of many, of another fence",
            at(10, fence_token=9),
            "The path of seq 10 leads from another event to another root.",
        ),
        ("changed, of ML-DSA-44", at(5, fence_token=9), "The caller of ML-DSA-44 signed another fence_token."),
        ("changed, of P-256", at(4, fence_token=9), "The caller of P-256 signed another fence_token."),
        ("a path of another place", signature(9, index=1), "seq 9 is the first of four, and index says the second."),
        ("a path of another size", signature(9, size=5), "The request had four events, and size says five."),
        ("a path of nothing", signature(9, path=""), "The path of one of four events has two hashes."),
        ("a path of 3 bytes", signature(9, path="AAAA"), "A path is whole hashes of 32 bytes."),
        (
            "a signature in another spelling",
            signature(SIGNED_SEQ, sig=respelt(_signature_of(SIGNED_SEQ)["sig"])),
            "The last character of the base64 has stray bits, which no byte has.",
        ),
        (
            "a path in another spelling",
            signature(9, path=respelt(_signature_of(9)["path"])),
            "The last character of the base64 has stray bits, which no byte has.",
        ),
        ("a path of an index beyond it", signature(9, index=4), "A request of four has the indexes 0 to 3."),
        ("a path without its padding", signature(9, path="A" * 43), "The base64 of the path lacks its padding."),
        ("a negative index", signature(9, index=-1), "Numbers of a signature are 0 or more."),
        ("an index that is a text", signature(9, index="0"), "index is a number."),
        ("a member more in a signature", signature(SIGNED_SEQ, note=""), "A signature has five members, or eight."),
        ("an empty id", signature(SIGNED_SEQ, id=""), "id has at least one character."),
        ("an id of 256 characters", signature(SIGNED_SEQ, id="i" * 256), "id has at most 255 characters."),
        ("an id with a space", signature(SIGNED_SEQ, id="a b"), "id is of printable ASCII without spaces."),
        (
            "a key id in capitals",
            signature(SIGNED_SEQ, key_id=ED25519.key_id.upper()),
            "key_id is in small hex digits.",
        ),
        ("times that cross", signature(SIGNED_SEQ, not_after_ms=0), "not_after_ms lies before not_before_ms."),
        ("a time that is a fraction", signature(SIGNED_SEQ, not_before_ms=0.5), "Times are integers."),
        ("a signature of nothing", at(SIGNED_SEQ, signature={}), "signature has no members."),
        ("a signature that is a number", at(SIGNED_SEQ, signature=1), "signature is a number, and no object."),
        ("a signature that is null", _with_null(), "signature is null, and no object."),
    ):
        yield _case(name, ledger, 2, why)
    entry = dishonest_receipt(of(_of_no_origin), SIGNED_SEQ)
    yield Case(
        "receipt, an origin that is no JSON", entry, 2, "The origin of the signed entry is no JSON.", keys="callers"
    )
    why = "An entry of link version 1 is older than signatures: what its payload calls so is no caller's."
    yield _case("a signature in version 1", _of_version_1(), 0, why)
    for excess_ms, code, why in (
        (0, 0, "not_before_ms and not_after_ms may lie six days apart."),
        (1, 2, "not_before_ms and not_after_ms lie six days and a millisecond apart."),
    ):
        yield _case(f"times {WINDOW_MS_MAX + excess_ms} ms apart", _apart(WINDOW_MS_MAX + excess_ms), code, why)


def _of_version_1() -> Ledger:
    ledger = build(12, version_1_until=8)
    edit(ledger.entry(SIGNED_SEQ), signature={"by": "somebody"})
    return mend(ledger)


def _with_null() -> Ledger:
    ledger = signed_ledger()
    row = ledger.entry(SIGNED_SEQ)
    payload = {**orjson.loads(row["payload"]), "signature": None}
    row["payload"] = orjson.dumps(payload, option=orjson.OPT_SORT_KEYS).decode()
    return mend(ledger)


def _apart(distance_ms: int) -> Ledger:
    ledger = signed_ledger()
    row = ledger.entry(SIGNED_SEQ)
    payload, begin_ms = signed_payload(orjson.loads(row["payload"])), row["hlc_physical"]
    said = {**ED25519.said(begin_ms, "apart"), "not_before_ms": begin_ms, "not_after_ms": begin_ms + distance_ms}
    edit(row, signature={**said, "sig": ED25519.sign(message("acme", row["job_id"], said, payload))})
    return mend(ledger)


def _signature_of(seq: int) -> dict[str, Any]:
    found: dict[str, Any] = orjson.loads(signed_ledger().entry(seq)["payload"])["signature"]
    return found


def respelt(text: str) -> str:
    """The same bytes in base64, with a bit in the last character that they do not have."""
    characters = text.rstrip("=")
    assert characters != text
    return characters[:-1] + chr(ord(characters[-1]) + 1) + text[len(characters) :]


def _of_no_origin(ledger: Ledger) -> None:
    ledger.entry(SIGNED_SEQ)["origin"] = "no JSON"


def _repeated() -> Iterator[Case]:
    for name, seq, origin, keys, code, why in (
        (
            "repeated",
            SIGNED_SEQ,
            None,
            "callers",
            2,
            "seq 13 is the event of seq 6 again, which its caller signed once.",
        ),
        (
            "repeated, of many",
            10,
            None,
            "callers",
            2,
            "seq 13 is the event of seq 10 again, which its caller signed once.",
        ),
        (
            "repeated, callers unknown",
            SIGNED_SEQ,
            None,
            "no callers",
            2,
            "That an event is repeated is seen without any key.",
        ),
        (
            "of two logs",
            SIGNED_SEQ,
            origin_of(3),
            "callers",
            0,
            "The second one was imported from another log: it repeats nothing.",
        ),
    ):
        ledger = signed_ledger()
        again = {**ledger.entry(seq), "seq": 13, "hlc_logical": 7, "origin": origin}
        again["t_hlc"] = f"{again['hlc_physical']}:7:{again['hlc_node']}"
        ledger.entries.append(again)
        yield _case(name, mend(ledger), code, why, keys)


def _known(whole: Ledger) -> Iterator[Case]:
    for keys, code, why in (
        ("no callers", 3, "No callers are known, so what they signed is not judged."),
        ("revoked at seq 6", 4, "The caller's key was revoked at the very HLC of seq 6."),
        ("revoked behind the last", 0, "The caller's key was revoked after all that it signed here."),
        ("of other tenants", 4, "The caller may sign for other, acm and what begins with b, and not for acme."),
        ("of tenants that begin so", 0, "The caller may sign for every tenant that begins with ac."),
        ("without the first", 4, "Nobody knows the key that signed seq 6."),
    ):
        yield _case(f"sound, {keys}", whole, code, why, keys)
    stranger = build(12)
    sign(stranger, SIGNED_SEQ, STRANGER)
    yield _case("signed by a stranger", mend(stranger), 4, "Nobody knows the key that signed seq 6.")
    stranger.entry(SIGNED_SEQ)["origin"] = origin_of(3)
    why = "The entry was imported: what the callers of other ledgers signed is history."
    yield _case("signed by a stranger, imported", mend(stranger), 0, why)


def _required() -> Iterator[Case]:
    def without(seq: int, **columns: Any) -> Ledger:
        ledger = signed_ledger()
        edit(ledger.entry(seq), signature=None)
        ledger.entry(seq).update(columns)
        return mend(ledger)

    for name, ledger, code, why in (
        (
            "of version 1, and unsigned",
            build(12, version_1_until=12),
            0,
            "Entries of link version 1 are older than signatures.",
        ),
        ("sound, and must be", signed_ledger(), 0, "JobAccepted must be signed from seq 5 on, and seq 6 is."),
        (
            "unsigned, and must not be",
            without(SIGNED_SEQ),
            2,
            "JobAccepted must be signed from seq 5 on, and seq 6 is not.",
        ),
        (
            "unsigned, imported",
            without(SIGNED_SEQ, origin=origin_of(3)),
            0,
            "An imported event is judged where it is from.",
        ),
        (
            "unsigned, and need not be any more",
            without(10),
            0,
            "From seq 9 on JobCompleted must be signed, and nothing else.",
        ),
        ("unsigned, of another type", without(5), 0, "seq 5 is no JobAccepted, which alone must be signed then."),
    ):
        yield _case(name, mend(ledger), code, why, "callers, required")
    yield _case("unsigned, where nobody must", without(SIGNED_SEQ), 0, "No event need be signed.")
