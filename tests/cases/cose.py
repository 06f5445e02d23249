"""COSE receipts of one entry (receipt.md, "In the forms of other programs")."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any, Final

import cbor2

from ledger import merkle
from ledger.errors import SignatureError, UnknownKeyError
from ledger.verification import ENTRY_COLUMNS
from signing.cose import to_be_signed
from signing.entry_proof import cose_receipt, verify_cose
from signing.keys import Keyring
from signing.private_keys import FileSigner
from signing.receipt import read
from tests.app.receipts import receipt_of
from tests.cases.corpus import Part
from tests.ledger.ledger_in_memory import SIGNER, STRANGER, Ledger, build

LEDGER: Final = build(13)
SEQ: Final = 6


def judge(given: Mapping[str, Any]) -> str:
    """What the product finds."""
    keys = Keyring.of([given["public_key_pem"]])
    try:
        verify_cose(bytes.fromhex(given["cose"]), bytes.fromhex(given["chain_link"]), keys)
    except UnknownKeyError:
        return "unknown key"
    except SignatureError:
        return "refused"
    return "holds"


def _made(ledger: Ledger = LEDGER, seq: int = SEQ) -> bytes:
    row = ledger.entry(seq)
    rows = [tuple(row[name] for name in ENTRY_COLUMNS)]
    return cose_receipt(read(receipt_of(ledger, row["job_id"], covers="entry", rows=rows))[0], SIGNER)


def _given(cose: bytes, seq: int = SEQ, ledger: Ledger = LEDGER, signer: FileSigner = SIGNER) -> dict[str, Any]:
    return {
        "cose": cose.hex(),
        "chain_link": ledger.entry(seq)["chain_link"],
        "public_key_pem": signer.public_key.public_key_pem,
    }


def _changed(change: Callable[[list[Any]], object], tag: int = 18, seq: int = SEQ) -> bytes:
    """The receipt after a change to its four parts."""
    parts = list(cbor2.loads(_made(seq=seq)).value)
    change(parts)
    return cbor2.dumps(cbor2.CBORTag(tag, parts), canonical=True)


def _twice(parts: list[Any]) -> None:
    (proof,) = parts[1][396][-1]
    parts[1] = {396: {-1: [proof, proof]}}


def _with_header(**changes: Any) -> bytes:
    """The receipt with other protected headers, signed before."""

    def change(parts: list[Any]) -> None:
        headers = cbor2.loads(parts[0])
        headers |= {int(name[1:].replace("_", "-")): value for name, value in changes.items()}
        parts[0] = cbor2.dumps(headers, canonical=True)

    return _changed(change)


def _signed(old: bytes, new: bytes) -> bytes:
    """The receipt with other bytes in its protected header, signed by its key."""

    def change(parts: list[Any]) -> None:
        assert parts[0].count(old) == 1
        parts[0] = parts[0].replace(old, new)
        parts[3] = SIGNER.sign(to_be_signed(parts[0], merkle.root(LEDGER.leaf_hashes())))

    return _changed(change)


def _with_proof(change: Callable[[list[Any]], object], seq: int = SEQ) -> bytes:
    """The receipt after a change to size, index and hashes of its proof."""

    def inside(parts: list[Any]) -> None:
        (proof,) = parts[1][396][-1]
        size, index, hashes = cbor2.loads(proof)
        said = [size, index, [*hashes]]
        change(said)
        parts[1] = {396: {-1: [cbor2.dumps(said, canonical=True)]}}

    return _changed(inside, seq=seq)


def parts() -> Iterator[Part]:
    """All of them."""
    made = _made()
    yield Part("an entry", _given(made), "holds", "The held key signed the root to which the link leads.")
    one = build(1)
    yield Part("a tree of one", _given(_made(one, 1), 1, one), "holds", "In a tree of one leaf the path has no hash.")
    yield Part("the last entry", _given(_made(seq=13), 13), "holds", "The last leaf of thirteen has a shorter path.")
    why = "The size is signed by nobody: it is that of every tree in which the path has this form."
    yield Part("a size of the same form", _given(_with_proof(lambda it: it.__setitem__(0, 14))), "holds", why)
    why = "Only a longer form of the tag: what is signed is as it was."
    yield Part("a longer form", _given(b"\xd8\x12" + made[1:]), "holds", why)
    why = "An index is an integer, and true is none, though some languages take it for 1."
    yield Part("an index that is true", _given(_with_proof(lambda it: it.__setitem__(1, True), 2), 2), "refused", why)
    for name, old, new, why in (
        ("a label that is true", b"\xa4\x01", b"\xa4\xf5", "A label is an integer or a text."),
        ("a claim of a label that is true", b"\xa1\x01", b"\xa1\xf5", "A label of a claim is one too."),
        ("a structure that is true", b"\x19\x01\x8b\x01", b"\x19\x01\x8b\xf5", "The structure is an integer."),
        (
            "an algorithm of a fraction",
            b"\xa4\x01\x27",
            b"\xa4\x01\xf9\xc8\x00",
            "An algorithm is an integer, and this -8.0.",
        ),
    ):
        yield Part(name, _given(_signed(old, new)), "refused", why)
    yield Part("another entry", _given(made, 7), "refused", "The link is that of seq 7, and the receipt of seq 6.")
    yield Part("a key that is not held", _given(made, signer=STRANGER), "unknown key", "Another key is held.")
    for name, cose, why in (
        (
            "in the name of a key",
            _with_header(_4=STRANGER.key_id.encode()),
            "The header names the stranger, who is held and did not sign.",
        ),
    ):
        yield Part(name, _given(cose, signer=STRANGER), "refused", why)
    other = bytes(32)
    for name, cose, why in (
        ("a bare array", cbor2.dumps(cbor2.loads(made).value, canonical=True), "A COSE_Sign1 has tag 18."),
        ("another tag", _changed(list, tag=17), "Tag 17 is that of a COSE_Mac0."),
        ("another algorithm", _with_header(_1=-7), "The header says ES256, and an Ed25519 key signed."),
        ("another structure", _with_header(_395=2), "The structure of the proof is not RFC9162_SHA256."),
        ("another issuer", _with_header(_15={1: "log.example/other"}), "The issuer is signed, and is another log."),
        ("a header more", _with_header(_99=1), "The protected headers are signed, and have one more."),
        (
            "a root in the payload",
            _changed(lambda it: it.__setitem__(2, other)),
            "The payload is detached, so it is null.",
        ),
        ("no proof", _changed(lambda it: it.__setitem__(1, {})), "The unprotected headers have no proof."),
        ("two proofs", _changed(_twice), "There is one inclusion proof."),
        ("another signature", _changed(lambda it: it.__setitem__(3, bytes(64))), "The signature is 64 zeros."),
        ("a signature cut short", _changed(lambda it: it.__setitem__(3, it[3][:-1])), "The signature has 63 bytes."),
        ("another index", _with_proof(lambda it: it.__setitem__(1, 4)), "The path is that of leaf 5."),
        ("an index beyond the tree", _with_proof(lambda it: it.__setitem__(1, 13)), "Places end at size - 1."),
        ("a negative index", _with_proof(lambda it: it.__setitem__(1, -1)), "Places begin at 0."),
        (
            "a size of another form",
            _with_proof(lambda it: it.__setitem__(0, 8)),
            "In a tree of eight the path has three hashes.",
        ),
        ("a size of 0", _with_proof(lambda it: it.__setitem__(0, 0)), "An empty tree has no leaf."),
        ("a size that is a text", _with_proof(lambda it: it.__setitem__(0, "13")), "A size is an integer."),
        ("another hash", _with_proof(lambda it: it[2].__setitem__(0, other)), "The first hash is another."),
        ("a hash too few", _with_proof(lambda it: it[2].pop()), "The last hash is missing."),
        ("a hash too many", _with_proof(lambda it: it[2].append(other)), "A hash follows the last."),
        (
            "a hash that is short",
            _with_proof(lambda it: it[2].__setitem__(0, other[:-1])),
            "A hash has 32 bytes, and this 31.",
        ),
        ("an indefinite length", b"\xd2\x9f" + made[2:] + b"\xff", "Lengths are definite."),
        ("cut short", made[:-1], "The last byte is missing."),
        ("a byte behind it", made + b"\0", "A byte follows the value."),
        ("nothing", b"", "There is no byte."),
        ("text", b"receipt", "A text is no CBOR of this form."),
    ):
        yield Part(name, _given(cose), "refused", why)
