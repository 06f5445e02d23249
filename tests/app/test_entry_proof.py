"""The proof of one entry in the forms of other programs: a tlog-proof, and a COSE receipt."""

from __future__ import annotations

import base64
from pathlib import Path
from typing import Any

import cbor2
import orjson
import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PublicKey

from ledger.errors import InvalidInputError, ProofError, SignatureError, UnknownKeyError
from ledger.merkle import leaf_hash, node_hash
from ledger.verification import ENTRY_COLUMNS
from signing.checkpoint import open_checkpoint
from signing.entry_proof import cose_receipt, tlog_proof, verify_cose
from signing.keys import Keyring
from signing.receipt import Receipt, read
from tests.app.bundles import LOG_ORIGIN
from tests.app.cose_judge import CoseJudge
from tests.app.receipts import receipt_of
from tests.ledger.ledger_in_memory import SIGNER, STRANGER, Ledger, build

COUNT = 60
KEYRING = Keyring.of([SIGNER.public_key_pem])


def entry_receipt(ledger: Ledger, seq: int, **more: Any) -> Receipt:
    row = ledger.entry(seq)
    rows = [tuple(row[name] for name in ENTRY_COLUMNS)]
    return read(receipt_of(ledger, row["job_id"], covers="entry", rows=rows, **more))[0]


@pytest.fixture(scope="module")
def ledger() -> Ledger:
    return build(COUNT, snapshots_to=(18, 45))


def naive_root(index: int, size: int, leaf: bytes, path: list[bytes]) -> bytes:
    """RFC 9162 2.1.3.2, step by step."""
    fn, sn, root = index, size - 1, leaf
    for hash_ in path:
        assert sn != 0
        if fn & 1 or fn == sn:
            root = node_hash(hash_, root)
            while not fn & 1 and fn:
                fn, sn = fn >> 1, sn >> 1
        else:
            root = node_hash(root, hash_)
        fn, sn = fn >> 1, sn >> 1
    assert sn == 0
    return root


@pytest.mark.parametrize("seq", [1, 2, 17, 59, 60])
def test_a_tlog_proof_leads_from_the_entry_to_the_checkpoint(ledger: Ledger, seq: int) -> None:
    receipt = entry_receipt(ledger, seq)
    hashes = [bytes.fromhex(each) for each in receipt.entries[0].inclusion]
    entry = receipt.entries[0].row
    text = tlog_proof(entry, hashes, receipt.checkpoint, receipt.origin, KEYRING)
    head, extra, index, *rest = text.split("\n")
    assert head == "c2sp.org/tlog-proof@v1"
    assert extra.startswith("extra ")
    row = orjson.loads(base64.b64decode(extra[6:]))
    assert index == f"index {seq - 1}"
    end = rest.index("")
    checkpoint = open_checkpoint("\n".join(rest[end + 1 :]), KEYRING, origin=f"{LOG_ORIGIN}/{ledger.tenant_id}")
    assert row["chain_link"] == ledger.entry(seq)["chain_link"]
    leaf = leaf_hash(bytes.fromhex(row["chain_link"]))
    path = [base64.b64decode(each, validate=True) for each in rest[:end]]
    assert naive_root(seq - 1, checkpoint.size, leaf, path) == checkpoint.root


def test_no_tlog_proof_is_made_that_does_not_hold(ledger: Ledger) -> None:
    receipt, other = entry_receipt(ledger, 17), entry_receipt(ledger, 18)
    entry, hashes = receipt.entries[0].row, [bytes.fromhex(each) for each in receipt.entries[0].inclusion]
    with pytest.raises(ProofError):
        tlog_proof(other.entries[0].row, hashes, receipt.checkpoint, receipt.origin, KEYRING)
    with pytest.raises(SignatureError):
        tlog_proof(entry, hashes, receipt.checkpoint, "log.example/other", KEYRING)
    with pytest.raises(UnknownKeyError):
        tlog_proof(entry, hashes, receipt.checkpoint, receipt.origin, Keyring.of([STRANGER.public_key_pem]))


@pytest.mark.parametrize("seq", [1, 2, 17, 59, 60])
def test_a_cose_receipt_is_what_rfc_9942_says(ledger: Ledger, seq: int) -> None:
    receipt = entry_receipt(ledger, seq)
    data = cose_receipt(receipt, SIGNER)
    tag = cbor2.loads(data)
    protected, unprotected, payload, signature = tag.value
    assert (tag.tag, payload) == (18, None)
    origin = f"{LOG_ORIGIN}/{ledger.tenant_id}"
    assert cbor2.loads(protected) == {1: -8, 4: SIGNER.key_id.encode(), 15: {1: origin}, 395: 1}
    assert list(unprotected) == [396]
    ((proof,),) = (unprotected[396][-1],)
    size, index, path = cbor2.loads(proof)
    root = naive_root(index, size, leaf_hash(bytes.fromhex(ledger.entry(seq)["chain_link"])), path)
    assert (size, index, root) == (COUNT, seq - 1, receipt.tree_head.root)
    material = SIGNER.public_key.material
    assert isinstance(material, Ed25519PublicKey)
    material.verify(signature, cbor2.dumps(["Signature1", protected, b"", root]))
    assert verify_cose(data, bytes.fromhex(ledger.entry(seq)["chain_link"]), KEYRING) == (
        (origin, COUNT, seq - 1, root, SIGNER.key_id)
    )


def test_a_cose_receipt_proves_no_other_entry_and_by_no_other_key(ledger: Ledger) -> None:
    data, link = cose_receipt(entry_receipt(ledger, 17), SIGNER), bytes.fromhex(ledger.entry(17)["chain_link"])
    with pytest.raises(SignatureError, match="did not sign"):
        verify_cose(data, bytes.fromhex(ledger.entry(18)["chain_link"]), KEYRING)
    with pytest.raises(UnknownKeyError):
        verify_cose(data, link, Keyring.of([STRANGER.public_key_pem]))
    forged = data.replace(SIGNER.key_id.encode(), STRANGER.key_id.encode())
    with pytest.raises(SignatureError):
        verify_cose(forged, link, Keyring.of([STRANGER.public_key_pem]))
    proved, passed = verify_cose(data, link, KEYRING), 0
    for at in range(len(data)):
        try:
            changed = verify_cose(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :], link, KEYRING)
        except (SignatureError, UnknownKeyError):
            pass
        else:  # The size of the tree is signed by nobody, and another one can have a path of the same form.
            passed += 1
            assert changed._replace(tree_size=proved.tree_size) == proved
        with pytest.raises(SignatureError):
            verify_cose(data[:at], link, KEYRING)
    assert passed <= 1


def test_the_receipt_of_a_job_has_no_cose_form(ledger: Ledger) -> None:
    job = read(receipt_of(ledger, ledger.entry(1)["job_id"]))[0]
    with pytest.raises(InvalidInputError, match="--seq"):
        cose_receipt(job, SIGNER)


@pytest.mark.torture
@pytest.mark.foreign
def test_the_library_of_the_authors_of_cose_receipts_accepts_ours(ledger: Ledger, tmp_path: Path) -> None:
    judge = CoseJudge.installed(tmp_path)
    receipt = entry_receipt(ledger, 17)
    key, file = judge.file("key.pem", SIGNER.public_key_pem), judge.file("entry.cose", cose_receipt(receipt, SIGNER))
    assert (
        judge.says("receipt", file, ledger.entry(17)["chain_link"], key).stdout.strip() == receipt.tree_head.root.hex()
    )
    assert "signature" in judge.says("receipt", file, ledger.entry(18)["chain_link"], key).stderr
