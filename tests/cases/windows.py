"""When a key counts (keys.md): one bundle and one receipt, by keys with other windows and revocations, and by none."""

from __future__ import annotations

from collections.abc import Iterator
from datetime import UTC, datetime, timedelta, timezone
from typing import Final

from ledger.hlc import Hlc
from signing.keys import Keyring, PublicKey
from tests.app.bundles import checkpoint_of
from tests.app.receipts import receipt_of
from tests.cases import bundles, receipts
from tests.cases.bundles import LEDGER, bundle_of
from tests.cases.corpus import Case
from tests.ledger.ledger_in_memory import SIGNER, STRANGER, build

A_MILLISECOND: Final = timedelta(milliseconds=1)
BEGIN: Final = datetime.fromtimestamp(1_704_931_200, UTC)
LAST: Final = Hlc.parse(LEDGER.entry(12)["t_hlc"])
END: Final = BEGIN + timedelta(milliseconds=LAST.physical_ms - 1_704_931_200_000)
FIRST_END: Final = Hlc.parse(LEDGER.entry(4)["t_hlc"])


def _ring(**window: object) -> Keyring:
    return Keyring([PublicKey.of(SIGNER.public_key_pem, **window)])  # type: ignore[arg-type]


def _zone(hours: int) -> timezone:
    return timezone(timedelta(hours=hours))


_ROWS: Final = {
    "signer": (Keyring([SIGNER.public_key]), 0, 0, "The key that signed is held, without an end."),
    "stranger": (Keyring([STRANGER.public_key]), 4, 4, "Another key is held."),
    "both": (
        Keyring([STRANGER.public_key, SIGNER.public_key]),
        0,
        0,
        "The key that signed is one of two that are held.",
    ),
    "from before": (_ring(not_before=BEGIN - A_MILLISECOND), 0, 0, "The key counts from before the first entry on."),
    "from a day later": (
        *(_ring(not_before=BEGIN + timedelta(days=1)), 4, 0),
        "The key counts from a day after the snapshots on; what carries no time is not judged by the window.",
    ),
    "in other time zones": (
        *(_ring(not_before=BEGIN.astimezone(_zone(3)), not_after=END.astimezone(_zone(-5))), 0, 0),
        "Times are written with other offsets from UTC, and are the same times.",
    ),
    "from a microsecond before": (
        *(_ring(not_before=BEGIN - timedelta(microseconds=1)), 0, 0),
        "Times may have microseconds; HLCs have milliseconds.",
    ),
    "up to the last": (
        _ring(not_after=END),
        0,
        0,
        "not_after is the millisecond of the last snapshot, which still counts.",
    ),
    "up to before the last": (
        *(_ring(not_after=END - A_MILLISECOND), 4, 0),
        "not_after lies a millisecond before the last snapshot; what carries no time is not judged by the window.",
    ),
    "revoked at the first snapshot": (
        _ring(revoked_from_hlc=FIRST_END),
        4,
        4,
        "The key was revoked at the HLC of the first snapshot.",
    ),
    "revoked at the last": (_ring(revoked_from_hlc=LAST), 4, 4, "The key was revoked at the HLC of the last snapshot."),
    "revoked behind the last": (
        *(_ring(revoked_from_hlc=Hlc(LAST.physical_ms, LAST.logical + 1, LAST.node_id)), 4, 4),
        "The snapshots count; manifest, statement and checkpoint carry no time, and a revoked key signs none.",
    ),
    "revoked in the year 2286": (
        *(_ring(revoked_from_hlc=Hlc(9_999_999_999_999, 0, "node-1")), 4, 4),
        "From whatever time on a key is revoked, it signs nothing that carries no time.",
    ),
}
KEYS: Final = {name: row[0] for name, row in _ROWS.items()}


def cases() -> Iterator[Case]:
    """All of them."""
    for keys, (_, of_bundle, of_receipt, why) in _ROWS.items():
        yield Case(f"a bundle, {keys}", bundles.GOOD, of_bundle, why, keys=keys)
        yield Case(f"a receipt, {keys}", receipts.GOOD, of_receipt, why, keys=keys)
    why = "No keys are given, so nobody is known to vouch for it."
    yield Case("a bundle, no keys", bundles.GOOD, 3, why, keys=None)
    yield Case("a receipt, no keys", receipts.GOOD, 3, why, keys=None)
    broken = next(case for case in bundles.cases() if case.name == "rows with a payload edited")
    yield broken._replace(name="a broken bundle, no keys", why="Digests need no keys to be wrong.", keys=None)
    kept = checkpoint_of(build(12, begin_ms=1), 12)
    yield Case("a bundle of another tree, no keys", bundles.GOOD, 2, "Roots need no keys to differ.", kept, None)
    for signer, note, keys, code, why in (
        (SIGNER, STRANGER, "signer", 4, "The checkpoint is by a key that is not held."),
        (STRANGER, SIGNER, "signer", 4, "The statement is by a key that is not held."),
        (SIGNER, STRANGER, "both", 0, "Statement and checkpoint are by two keys, both held."),
        (SIGNER, STRANGER, "stranger", 4, "The statement is by a key that is not held, the checkpoint by one that is."),
    ):
        by = "the stranger" if signer is STRANGER else "the signer"
        file = receipt_of(receipts.LEDGER, signer=signer, checkpoint=checkpoint_of(receipts.LEDGER, signer=note))
        yield Case(f"a receipt by {by}, its checkpoint by the other, {keys} held", file, code, why, keys=keys)
    mixed = build(12)
    mixed.sign(4)
    mixed.sign(8, STRANGER)
    mixed.sign(12)
    file = bundle_of(mixed)
    why = "A chain may be signed by several keys, one after the other."
    yield Case("two keys in turn, both held", file, 0, why, keys="both")
    yield Case("two keys in turn, one held", file, 4, "The second of three snapshots is by a key that is not held.")
