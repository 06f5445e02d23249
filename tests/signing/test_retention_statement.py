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


def test_the_facts_that_a_key_signed_are_vouched_for_with_the_type_of_the_entry() -> None:
    facts = {"type": "RETENTION_SET", **signed()}
    assert retention_statement.fault("RETENTION_SET", facts, LOG, HLC, RING) is None


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
def test_other_facts_another_action_or_another_log_are_not_vouched_for(
    action: str, changed: dict[str, Any], log: str
) -> None:
    fault = retention_statement.fault(action, {**signed(), **changed}, log, HLC, RING)
    assert fault == "its statement is about other facts"


@pytest.mark.parametrize("statement", [None, "text", {}, {"payload": "", "payloadType": "other", "signatures": []}])
def test_what_is_no_statement_vouches_for_nothing(statement: object) -> None:
    fault = retention_statement.fault("RETENTION_SET", {**FACTS, "statement": statement}, LOG, HLC, RING)
    assert fault is not None
    assert fault.startswith("no admitted key signed it")


def test_a_key_counts_within_its_window_and_until_it_is_revoked() -> None:
    key = SIGNER.public_key
    later = Keyring([PublicKey.of(key.material, not_before=datetime(2030, 1, 1, tzinfo=UTC))])
    assert "is valid from" in str(retention_statement.fault("RETENTION_SET", signed(), LOG, HLC, later))
    assert retention_statement.fault("RETENTION_SET", signed(), LOG, HLC, Keyring([])) is not None
    assert retention_statement.fault("RETENTION_SET", signed(), LOG, "no hlc", RING) is not None
