"""What verifying a receipt says, by the product and by docs/formats/verify.py, which must agree on every one."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any

import pytest

from ledger import canonical, rfc3339
from ledger.errors import SignatureError
from ledger.exit_code import ExitCode, exit_code_of_receipt
from ledger.hlc import Hlc
from signing.anchors import NOBODY, ExternalWitnesses
from signing.checkpoint import judge_checkpoint
from signing.keys import Keyring, PublicKey
from signing.memory import Memory, Seen
from signing.receipt_judging import ReceiptVerdict, judged
from tests.app.bundles import checkpoint_of
from tests.app.receipts import DOCUMENTED_WITNESS, opened, sealed
from tests.app.second_verifier import twin_in
from tests.app.witness import Witness
from tests.cases.receipts import GOOD, LEDGER, cases, changed
from tests.ledger.ledger_in_memory import SIGNER

RING = Keyring([SIGNER.public_key])
CASES = cases()
WITNESSED = ExternalWitnesses.load([DOCUMENTED_WITNESS.verifier_key], None)


def product(receipt: bytes, keyring: Keyring | None, kept: str | None = None) -> int:
    """Exit code of the product."""
    try:
        checkpoint = judge_checkpoint(kept, keyring) if kept is not None else None
    except SignatureError:
        return ExitCode.TAMPERED
    return exit_code_of_receipt(judged(receipt, keyring, checkpoint).verdict)


@pytest.fixture
def both(tmp_path: Path) -> Callable[..., tuple[int, int]]:
    """Exit codes of the product and of the second implementation."""
    twin = twin_in(tmp_path)

    def run(receipt: bytes, keyring: Keyring | None, kept: str | None = None) -> tuple[int, int]:
        path = tmp_path / "receipt.json"
        path.write_bytes(receipt)
        return product(receipt, keyring, kept), twin(path, keyring, kept)

    return run


Both = Callable[..., tuple[int, int]]


# --- every value --------------------------------------------------------------------------------------


def places(value: Any, path: tuple[str | int, ...] = ()) -> Iterator[tuple[str | int, ...]]:
    """The paths to all values in a JSON value that are no object and no list, or empty."""
    if isinstance(value, dict | list) and value:
        for name, inner in value.items() if isinstance(value, dict) else enumerate(value):
            yield from places(inner, (*path, name))
    else:
        yield path


def with_change(value: Any, path: tuple[str | int, ...]) -> Any:
    """``value`` with another one, of the same type where it has one, at ``path``."""
    if path:
        inner = with_change(value[path[0]], path[1:])
        if isinstance(value, dict):
            return {**value, path[0]: inner}
        return [*value[: path[0]], inner, *value[int(path[0]) + 1 :]]
    if value is None or isinstance(value, list):
        return "0" if value is None else ["0"]
    if isinstance(value, int):
        return value + 1
    return ("f" if value[:1] in "01" else "0") + value[1:]


def test_whoever_holds_a_receipt_can_change_no_value_in_it(both: Both) -> None:
    value = json.loads(GOOD)
    found = list(places(value))
    assert len(found) == 79
    for path in found:
        codes = both(canonical.encode(with_change(value, path)), RING)
        assert codes in ((2, 2), (4, 4)), path


def test_whoever_holds_a_receipt_can_change_no_byte_of_it() -> None:
    for at in range(len(GOOD)):
        receipt = bytearray(GOOD)
        receipt[at] ^= 1
        assert product(bytes(receipt), RING) in (2, 4), at


WITHOUT_MEANING = {("node_id",), ("anchors", 0, "by"), ("anchors", 0, "time")}
"""What a node can say as it likes: nothing is concluded from it. Of an anchor the signature in it counts."""
SAYS_OTHERWISE = {("anchors", 0, "checkpoint"), ("anchors", 0, "consistency", 0), ("anchors", 0, "response")}
"""What then holds no more, so that the anchor says nothing, or is not what the log says."""


def test_a_node_that_signs_what_is_not_so_can_change_only_what_has_no_meaning(both: Both) -> None:
    receipt = opened(GOOD)
    for path in places(receipt):
        codes = both(sealed(with_change(receipt, path)), RING)
        if path[0] in ("keys", "extends") or path in WITHOUT_MEANING or path in SAYS_OTHERWISE:
            assert codes == (0, 0), path
        else:
            assert codes in ((2, 2), (4, 4)), path


# --- keys over time -----------------------------------------------------------------------------------


def ring(**window: object) -> Keyring:
    """A ring with the held key alone, which holds in ``window``."""
    return Keyring([PublicKey.of(SIGNER.public_key_pem, **window)])  # type: ignore[arg-type]


# --- what the verdict says ----------------------------------------------------------------------------


def verdict_of(receipt: bytes, keyring: Keyring | None = RING, **of: Any) -> dict[str, Any]:
    return judged(receipt, keyring, **of).to_json()


def test_a_verdict_says_what_was_checked_and_what_a_receipt_cannot_show() -> None:
    found = verdict_of(GOOD)
    assert set(found["verdicts"]) == {"receipt", "links", "payloads", "tree", "signatures", "checkpoint"}
    assert set(found["verdicts"].values()) == {"ok", "not_checked"}
    assert (found["valid"], found["first_break"], found["compared_with"]) == (True, None, None)
    assert [each["seq"] for each in found["receipt"]["entries"]] == [1, 2, 4]
    assert found["receipt"]["checkpoint"]["size"] == 5
    assert any("after the checkpoint" in text for text in found["limits"])
    assert any("longer once" in text for text in found["not_checked"])


def test_where_the_receipt_itself_is_broken_nothing_else_is_claimed() -> None:
    found = verdict_of(GOOD[:-1])
    assert found["verdicts"].pop("receipt") == "broken"
    assert (set(found["verdicts"].values()), found["anchors"]) == ({"not_checked"}, [])


# --- external witnesses ----------------------------------------------------------------------------------------


def anchors_of(receipt: bytes, keyring: Keyring | None = RING, external: ExternalWitnesses = WITNESSED) -> list[str]:
    return [each["status"] for each in verdict_of(receipt, keyring, external=external)["anchors"]]


def test_a_cosignature_counts_by_the_key_that_the_verifier_brings() -> None:
    assert anchors_of(GOOD) == ["ok"]
    assert anchors_of(GOOD, external=NOBODY) == ["not_checked"]
    assert anchors_of(GOOD, external=ExternalWitnesses.load([Witness(seed=3).verifier_key], None)) == ["not_checked"]
    assert anchors_of(GOOD, None) == ["not_checked"]


def test_a_cosignature_says_its_own_time_whatever_stands_beside_it() -> None:
    receipt = changed(lambda said: said["anchors"][0].update(time="2020-01-01T00:00:00Z"))
    (found,) = verdict_of(receipt, external=WITNESSED)["anchors"]
    assert (found["status"], found["time"]) == ("ok", "2024-01-11T00:00:10Z")


def test_a_cosigned_checkpoint_that_the_log_does_not_extend_is_a_rollback() -> None:
    receipt = changed(lambda said: said["anchors"][0].update(consistency=["ab" * 32]))
    found = verdict_of(receipt, external=WITNESSED)
    assert ([each["status"] for each in found["anchors"]], found["first_break"]["kind"]) == (["broken"], "rollback")


def test_what_a_witness_saw_before_a_key_was_revoked_still_counts() -> None:
    cosigned_ms = 1_704_931_210_000
    for revoked_ms, status in ((cosigned_ms - 1, "not_checked"), (cosigned_ms + 1000, "ok")):
        assert anchors_of(GOOD, ring(revoked_from_hlc=Hlc(revoked_ms, 0, "node-7f3a"))) == [status]


# --- what a verifier remembers ------------------------------------------------------------------------


def remembered(folder: Path, *notes: str) -> Memory:
    memory = Memory.open(folder)
    yesterday = rfc3339.written(datetime.now(UTC) - timedelta(days=1), "seconds")
    memory.remember(Seen(note, SIGNER.key_id, yesterday) for note in notes)
    return Memory.open(folder)


@pytest.mark.parametrize(("size", "compared"), [(5, True), (4, True), (2, True), (3, False)])
def test_what_is_remembered_is_compared_as_far_as_the_receipt_says(size: int, compared: bool, tmp_path: Path) -> None:
    memory = remembered(tmp_path, checkpoint_of(LEDGER, size))
    found = judged(GOOD, RING, memory=memory)
    assert found.verdict["compared_with"] == ("memory" if compared else None)
    assert found.verdict["verdicts"]["checkpoint"] == ("ok" if compared else "not_checked")
    assert exit_code_of_receipt(found.verdict) == 0
    assert found.memory is not None
    assert (f"{size} entries" in found.memory["says"], found.memory["is_new"]) == (True, False)


def test_a_receipt_of_another_history_than_was_remembered_is_a_rollback(tmp_path: Path) -> None:
    (case,) = [case for case in CASES if case.name == "kept: of a history that forked, at 2"]
    assert case.kept is not None
    found = judged(GOOD, RING, memory=remembered(tmp_path, case.kept)).verdict
    assert (found["first_break"]["kind"], exit_code_of_receipt(found)) == ("rollback", 2)


def test_the_first_look_at_a_log_by_a_receipt_leaves_nothing_remembered(tmp_path: Path) -> None:
    found: ReceiptVerdict = judged(GOOD, RING, memory=Memory.open(tmp_path))
    assert found.memory is not None
    assert (found.memory["first_look"], found.memory["is_new"], found.memory["remembered"]) == (True, False, None)
    assert Memory.open(tmp_path).logs == {}
