"""Second signatures (keys.md), of snapshots and checkpoints, by keys of ML-DSA-44; and witnesses with such keys."""

from __future__ import annotations

import base64
import json
from collections.abc import Callable, Iterator
from dataclasses import replace
from datetime import UTC, datetime
from functools import cache
from hashlib import sha256
from pathlib import Path
from typing import Any, Final

import msgspec
from cryptography.hazmat.primitives.asymmetric.mldsa import MLDSA44PrivateKey

from ledger.hlc import Hlc
from signing.anchors import BundledAnchor
from signing.checkpoint import Checkpoint, sign_checkpoint
from signing.keys import Keyring
from signing.note import VerifierKey, WitnessKey, parse
from signing.private_keys import FileSigner
from tests.app.bundles import LOG_ORIGIN, anchored, checkpoint_of
from tests.app.receipts import indexed, receipt_of
from tests.cases.bundles import LEDGER, bundle_of
from tests.cases.corpus import Case
from tests.cases.signatures import remembered
from tests.ledger.ledger_in_memory import SIGNER, Ledger, build


class Remembering(FileSigner):
    """Signs with ML-DSA-44, each message once for all."""

    def __init__(self, seed: bytes) -> None:
        super().__init__(Path("no-file"), MLDSA44PrivateKey.from_seed_bytes(seed))

    def sign(self, message: bytes) -> bytes:
        """The signature that was made first."""
        return remembered(self.key_id, message, super().sign)


SECOND, STRANGER, WITNESS = Remembering(bytes(range(32))), Remembering(b"\x05" * 32), Remembering(b"\x06" * 32)
_FIRST_KEY, _SECOND_KEY = SIGNER.public_key, SECOND.public_key
_REVOKED: Final = replace(_SECOND_KEY, revoked_from_hlc=Hlc.parse(LEDGER.entry(6)["t_hlc"]))
KEYS: Final = {
    "two": Keyring([_FIRST_KEY, _SECOND_KEY]),
    "signer": Keyring([_FIRST_KEY]),
    "second alone": Keyring([_SECOND_KEY]),
    "second revoked": Keyring([_FIRST_KEY, _REVOKED]),
    "second expired": Keyring([_FIRST_KEY, replace(_SECOND_KEY, not_after=datetime(2001, 1, 1, tzinfo=UTC))]),
}
HEAD: Final = Checkpoint(f"{LOG_ORIGIN}/acme", 12, LEDGER.checkpoint().root)
Change = Callable[[bytearray], object]
Signatures = list[dict[str, str]]


def _ledger(*ends: int, by: FileSigner = SECOND, change: Callable[[Signatures], object] = list) -> Ledger:
    """Snapshots to 4, 8 and 12, those to ``ends`` with a second signature; ``change`` is done to those of the last."""
    ledger = build(12)
    for end in (4, 8, 12):
        ledger.sign(end, SIGNER, *([by] if end in ends else []))
    made = json.loads(ledger.snapshots[-1]["dsse_envelope"])
    change(made["signatures"])
    ledger.snapshots[-1]["dsse_envelope"] = json.dumps(made, separators=(",", ":"))
    return ledger


def _note(*signers: FileSigner, change: Change = bytes) -> str:
    """A checkpoint by these; ``change`` is done to the last signature."""
    parsed = parse(sign_checkpoint(HEAD, *signers))
    *lines, last = parsed.signatures
    data = bytearray(last.signature)
    change(data)
    return parsed._replace(signatures=(*lines, last._replace(signature=bytes(data)))).encode()


def _flip(data: bytearray) -> None:
    data[-1] ^= 1


def _spoil(line: dict[str, str]) -> None:
    raw = bytearray(base64.b64decode(line["sig"]))
    _flip(raw)
    line["sig"] = base64.b64encode(raw).decode()


def _under_another_name() -> str:
    parsed = parse(sign_checkpoint(HEAD, SIGNER))
    line = VerifierKey.of("log.example/other", _SECOND_KEY).line(parsed.text, SECOND)
    return parsed._replace(signatures=(*parsed.signatures, line)).encode()


@cache
def cases() -> tuple[Case, ...]:
    """All of them, made once."""
    return (*_of_checkpoints(), *_of_snapshots(), *_of_receipts(), *_of_witnesses())


def _case(name: str, file: bytes, code: int, why: str, keys: str = "two", **given: Any) -> Case:
    both = {"signatures": "both"} if name.endswith("both demanded") else {}
    return Case(name, file, code, why, keys=keys, **both, **given)


def _of_checkpoints() -> Iterator[Case]:
    whole, signed = _ledger(4, 8, 12), _note(SIGNER, SECOND)
    good = bundle_of(whole, checkpoint=signed)
    yield _case("signed twice", good, 0, "Both keys are held, and both signed.")
    yield _case("signed twice, both demanded", good, 0, "Both keys are held, and both signed.")
    yield _case(
        "signed twice, the first held", good, 0, "A reader that knows the first key passes over the rest.", "signer"
    )
    why = "The manifest has one signature, by the first key, which is not held."
    yield _case("signed twice, the second held", good, 4, why, "second alone")
    revoked = "A checkpoint carries no time, so a revoked key does not count; the first one does."
    yield _case("signed twice, the second revoked", good, 0, revoked, "second revoked")
    why = "A checkpoint carries no time, so a revoked key does not count, and both are demanded."
    yield _case("signed twice, the second revoked, both demanded", good, 4, why, "second revoked")
    why = "The window of the second key ended before the snapshots, so they count as unsigned."
    yield _case("signed twice, the second expired, both demanded", good, 3, why, "second expired")
    notes = {
        "without the second line": (_note(SIGNER), 0, 4, "The checkpoint has the line of the first key alone."),
        "without the first line": (_note(SECOND), 0, 4, "The checkpoint has the line of the second key alone."),
        "with a stranger's second line": (
            _note(SIGNER, STRANGER),
            0,
            4,
            "The second line is by a key that is not held.",
        ),
        "with a second line of another name": (
            _under_another_name(),
            0,
            4,
            "The second line is not in the log's name.",
        ),
    }
    for name, (note, code, demanded, why) in notes.items():
        file = bundle_of(whole, checkpoint=note)
        yield _case(f"a checkpoint {name}", file, code, why)
        yield _case(f"a checkpoint {name}, both demanded", file, demanded, why)
    wrong: dict[str, tuple[Change, str]] = {
        "that does not hold": (_flip, "The second line names a held key, and does not hold."),
        "cut short": (bytearray.pop, "The signature of ML-DSA-44 has 2,420 bytes behind the time, and this one less."),
        "of another time": (lambda data: data.__setitem__(7, 1), "What is signed has the time 0, and the line says 1."),
        "of a time beyond all years": (lambda data: data.__setitem__(0, 0x7F), "The time lies behind the year 9999."),
    }
    for name, (change, why) in wrong.items():
        file = bundle_of(whole, checkpoint=_note(SIGNER, SECOND, change=change))
        yield _case(f"a checkpoint with a second line {name}", file, 2, why)
        if name == "that does not hold":
            yield _case(f"a checkpoint with a second line {name}, the first held", file, 0, why, "signer")
    why = "A checkpoint that was kept counts against a log and never for it, so one signature is enough."
    yield _case("kept: by the first key, both demanded", good, 0, why, kept=_note(SIGNER))
    why = "The checkpoint that was kept has a second line that does not hold."
    yield _case("kept: with a second line that does not hold", good, 2, why, kept=_note(SIGNER, SECOND, change=_flip))


def _of_snapshots() -> Iterator[Case]:
    signed = _note(SIGNER, SECOND)
    ledgers = {
        "the last of three signed twice": (_ledger(12), 0, 0, "The tree that the last one signs covers the others."),
        "all but the last signed twice": (
            *(_ledger(4, 8), 0, 3),
            "The last snapshot has one signature, and counts as unsigned where both are demanded.",
        ),
        "none signed twice": (_ledger(), 0, 3, "No snapshot has both signatures."),
        "the last signed by a stranger too": (
            *(_ledger(12, by=STRANGER), 0, 3),
            "The second signature is by a key that is not held.",
        ),
        "the last signed by the second key alone": (
            *(_ledger(4, 8, 12, change=lambda lines: lines.pop(0)), 2, 2),
            "key_id names the first key, which is held and did not sign.",
        ),
        "a second signature that does not hold": (
            *(_ledger(4, 8, 12, change=lambda lines: _spoil(lines[1])), 2, 2),
            "It names a held key, and does not hold, whatever stands beside it.",
        ),
    }
    for name, (ledger, code, demanded, why) in ledgers.items():
        file = bundle_of(ledger, checkpoint=signed)
        yield _case(f"snapshots: {name}", file, code, why)
        yield _case(f"snapshots: {name}, both demanded", file, demanded, why)
    why = "Who does not hold the second key passes over its signature."
    file = bundle_of(ledgers["a second signature that does not hold"][0], checkpoint=signed)
    yield _case("snapshots: a second signature that does not hold, the first held", file, 0, why, "signer")


def _of_receipts() -> Iterator[Case]:
    whole, signed = _ledger(4, 8, 12), _note(SIGNER, SECOND)
    job_id = whole.entry(9)["job_id"]
    by_both = indexed(whole, job_id)._replace(envelope=_indexed_twice(whole))
    for name, checkpoint, proof, demanded, why in (
        ("signed twice", signed, by_both, 0, "Checkpoint and snapshot have both signatures."),
        ("with a checkpoint by one", _note(SIGNER), by_both, 4, "The checkpoint has the line of the first key alone."),
        ("with a snapshot by one", signed, indexed(whole, job_id), 3, "The snapshot with the index of jobs has one."),
    ):
        file = receipt_of(whole, job_id, checkpoint=checkpoint, indexed=proof)
        yield _case(f"a receipt {name}", file, 0, why)
        yield _case(f"a receipt {name}, both demanded", file, demanded, why)


def _indexed_twice(ledger: Ledger) -> str:
    envelope: str = ledger.signed(1, 12, None, SIGNER, SECOND)["dsse_envelope"]
    return envelope


WITNESS_KEY: Final = WitnessKey.of("witness.example/pq", WITNESS.public_key)
ASKED: Final = f"witness pq {WITNESS_KEY.text()}\nquorum pq\n"


def _stated(note: str, change: Change = bytes) -> BundledAnchor:
    """What the witness said of a checkpoint; ``change`` is done to its signature."""
    parsed = parse(note)
    line = WITNESS_KEY.line(parsed.text, WITNESS, 1_704_931_300)
    data = bytearray(line.signature)
    change(data)
    made = parsed._replace(signatures=(*parsed.signatures, line._replace(signature=bytes(data)))).encode()
    return msgspec.structs.replace(anchored(12, LEDGER), by=WITNESS_KEY.text(), checkpoint=made)


def _of_witnesses() -> Iterator[Case]:
    plain, twice = checkpoint_of(LEDGER), _note(SIGNER, SECOND)
    by_first, by_second = (VerifierKey.of(HEAD.origin, each.public_key).text() for each in (SIGNER, SECOND))
    other_time = _stated(plain, lambda data: data.__setitem__(7, data[7] ^ 1))
    short = ASKED.replace(WITNESS_KEY.text(), _short(WITNESS_KEY))
    for name, said, code, policy, why in (
        ("that cosigned", _stated(plain), 0, ASKED, "The witness has a key of ML-DSA-44, and cosigned all entries."),
        ("whose line does not hold", _stated(plain, _flip), 3, ASKED, "The line is by nobody, and says nothing."),
        ("whose line is of another time", other_time, 3, ASKED, "The time in the line is not the one that was signed."),
        (
            *("of a log by its second key", _stated(twice), 0, f"log {by_second}\n{ASKED}"),
            "The log line names a key of ML-DSA-44, which signed the cosigned checkpoint.",
        ),
        (
            *("of a log by its second key, which did not sign", _stated(plain), 3, f"log {by_second}\n{ASKED}"),
            "The cosigned checkpoint has the line of the first key alone.",
        ),
        (
            *("of a log by its first key", _stated(twice), 0, f"log {by_first}\n{ASKED}"),
            "Lines of other types than that of the log line do not matter.",
        ),
        ("whose key lacks a byte", _stated(plain), 1, short, "A key of ML-DSA-44 has 1,312 bytes."),
    ):
        yield _case(f"a witness {name}", bundle_of(LEDGER, anchors=[said]), code, why, policy=policy)
    why = "Of a checkpoint under a statement of a witness one signature is enough."
    file = bundle_of(_ledger(12), checkpoint=twice, anchors=[_stated(plain)])
    yield _case("a witness of what the first key signed, both demanded", file, 0, why, policy=ASKED)


def _short(witness: WitnessKey) -> str:
    """A verifier key that is right but for its length."""
    name, _, encoded = witness.text().split("+", 2)
    typed = base64.b64decode(encoded)[:-1]
    key_hash = sha256(name.encode() + b"\n" + typed).hexdigest()[:8]
    return f"{name}+{key_hash}+{base64.b64encode(typed).decode()}"
