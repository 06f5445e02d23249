"""A statement about retention counts for its facts, in its log, by a key that is valid at the entry's HLC."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Any

import pytest

from signing import retention_statement
from signing.keys import Keyring, PublicKey
from tests.ledger.ledger_in_memory import SIGNER

LOG, HLC = "tallystick.example/acme", "1704931200000:0:node-a"
FACTS = {"period_s": 86_400, "after": {"seq": 0, "chain_link": ""}}
RING = Keyring([SIGNER.public_key])


def signed(**facts: Any) -> dict[str, object]:
    return retention_statement.sign("RETENTION_SET", {**FACTS, **facts}, LOG, SIGNER)


def judged(facts: dict[str, Any], *, action: str = "RETENTION_SET", log: str = LOG, ring: Keyring | None = RING) -> str:
    return retention_statement.judge(log, ring, action, facts, HLC)


def test_the_facts_that_a_key_signed_are_vouched_for_with_the_type_of_the_entry() -> None:
    assert judged({"type": "RETENTION_SET", **signed()}) == "ok"
    assert judged(signed(), ring=None) == "not_checked"


@pytest.mark.parametrize(
    ("action", "changed", "log"),
    [
        ("RETENTION_SET", {"period_s": 1}, LOG),
        ("RETENTION_SET", {"minimum_s": 1}, LOG),
        ("RETENTION_SET", {"after": {"seq": 9, "chain_link": "0" * 64}}, LOG),
        ("HOLD_RELEASED", {}, LOG),
        ("RETENTION_SET", {}, "tallystick.example/other"),
    ],
)
@pytest.mark.parametrize("ring", [RING, None])
def test_other_facts_another_action_or_another_log_are_not_vouched_for(
    action: str, changed: dict[str, Any], log: str, ring: Keyring | None
) -> None:
    assert judged({**signed(), **changed}, action=action, log=log, ring=ring) == "broken"


@pytest.mark.parametrize("statement", [None, "text", {}, {"payload": "", "payloadType": "other", "signatures": []}])
def test_what_is_no_statement_vouches_for_nothing(statement: object) -> None:
    assert judged({**FACTS, "statement": statement}) == "broken"


def test_a_key_counts_if_it_is_known_and_within_its_window() -> None:
    later = Keyring([PublicKey.of(SIGNER.public_key.material, not_before=datetime(2030, 1, 1, tzinfo=UTC))])
    assert judged(signed(), ring=later) == judged(signed(), ring=Keyring([])) == "unknown_key"
    named = signed()
    envelope: Any = named["statement"]
    envelope["signatures"][0]["sig"] = "AAAA"
    assert judged(named) == "broken"
