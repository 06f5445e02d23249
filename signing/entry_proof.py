"""The proof of one entry in two forms that other programs read, made of a receipt for that entry.

A C2SP tlog-proof (c2sp.org/tlog-proof) is text: the leaf index, the hashes of the inclusion proof from the leaf up, and
the checkpoint with the cosignatures on it. ``extra`` is the entry as canonical JSON, from which the leaf is computed::

    c2sp.org/tlog-proof@v1
    extra <base64 of the entry>
    index <seq - 1>
    <base64 of a hash>, one line each
    <empty line>
    <checkpoint>

A COSE receipt (RFC 9942, RFC9162_SHA256) is CBOR in deterministic encoding (RFC 8949 4.2.1)::

    18([protected, {396: {-1: [<<[tree size, leaf index, [hash, ...]]>>]}}, null, signature])

    protected   <<{1: -8, 4: key id, 15: {1: origin of the log}, 395: 1}>>      -8 is EdDSA, here Ed25519
    payload     the root of the tree, 32 bytes, detached; signed as RFC 9052 4.4 says, without external data

That of a signed statement (:mod:`signing.cose`) names its subject too, ``15: {1: ..., 2: subject}``, and has the entry
without the statement in its unprotected header, as canonical JSON: ``{396: ..., -65537: entry}``.

In both the leaf data is the entry's chain link, 32 raw bytes.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from typing import Final, NamedTuple

import cbor2
import msgspec

from ledger import canonical
from ledger.bundle.rows import EntryObject
from ledger.errors import InvalidInputError, ProofError, SignatureError, UnknownKeyError, reported_as
from ledger.merkle import leaf_hash, root_of_path, verify_inclusion
from ledger.positions import Seq, leaf_index_of
from signing.checkpoint import open_checkpoint
from signing.cose import (
    ALG,
    CWT_CLAIMS,
    EDDSA,
    ISSUER,
    KID,
    SIGN1_TAG,
    SUBJECT,
    decoded,
    encoded,
    labelled,
    registration_in,
    to_be_signed,
)
from signing.keys import ED25519, Keyring, Signer
from signing.receipt import ENTRY, ProvedEntry, Receipt

TLOG_PROOF_HEAD: Final = "c2sp.org/tlog-proof@v1"
COSE_MEDIA_TYPE: Final = 'application/cose; cose-type="cose-sign1"'

ENTRY_LABEL: Final = -65537
"""Header parameter, of those for private use, with the entry of a signed statement."""
_VDS, _VDP, _RFC9162_SHA256, _INCLUSION = 395, 396, 1, -1


def tlog_proof(entry: EntryObject, hashes: Sequence[bytes], checkpoint: str, origin: str, keyring: Keyring) -> str:
    """The tlog-proof that ``entry`` is in the tree of ``checkpoint``, a note with whatever cosignatures are on it.

    Raises:
        SignatureError: it is not a checkpoint of the log ``origin`` that a key of the ring signed.
        ProofError: the hashes do not lead to its root.
    """
    head = open_checkpoint(checkpoint, keyring, origin=origin)
    index = leaf_index_of(Seq(entry.seq))
    verify_inclusion(index, head.size, leaf_hash(bytes.fromhex(entry.chain_link)), hashes, head.root)
    row = base64.b64encode(canonical.encode(msgspec.to_builtins(entry))).decode()
    lines = [base64.b64encode(each).decode() for each in hashes]
    return "\n".join([TLOG_PROOF_HEAD, f"extra {row}", f"index {index}", *lines, "", checkpoint])


def cose_receipt(receipt: Receipt, signer: Signer) -> bytes:
    """The COSE receipt of the entry that ``receipt`` is for, signed.

    Raises:
        InvalidInputError: it is the receipt of a job, or the key is not Ed25519.
        SigningUnavailableError: the signer cannot be reached.
    """
    entry, head = _only_entry(receipt), receipt.tree_head
    if signer.public_key.algorithm != ED25519:
        raise InvalidInputError(f"a COSE receipt is signed with Ed25519; key {signer.key_id} is none")
    proof = encoded([head.size, entry.row.seq - 1, [bytes.fromhex(each) for each in entry.inclusion]])
    claims, unprotected = {ISSUER: receipt.origin}, dict[int, object]({_VDP: {_INCLUSION: [proof]}})
    if (registration := registration_in(entry.row)) is not None:
        claims[SUBJECT] = registration.subject
        without = msgspec.to_builtins(entry.row) | {"payload": registration.payload}
        unprotected[ENTRY_LABEL] = canonical.encode(without)
    protected = encoded({ALG: EDDSA, KID: signer.key_id.encode(), CWT_CLAIMS: claims, _VDS: _RFC9162_SHA256})
    signature = signer.sign(to_be_signed(protected, head.root))
    return encoded(cbor2.CBORTag(SIGN1_TAG, [protected, unprotected, None, signature]))


class CoseProof(NamedTuple):
    """The content of a COSE receipt that holds."""

    origin: str
    tree_size: int
    """As the receipt says; the signature covers the root, and a tree of another size can have a path of this form."""
    leaf_index: int
    root: bytes
    key_id: str


def verify_cose(data: bytes, link: bytes, keyring: Keyring) -> CoseProof:
    """Verify that a COSE receipt proves ``link``, signed by a key of the ring.

    Raises:
        SignatureError: it is malformed, or its key did not sign this leaf.
        UnknownKeyError: the ring does not hold its key.
    """
    malformed = (cbor2.CBORError, ProofError, ValueError, TypeError, LookupError, AttributeError)
    with reported_as(SignatureError, "the COSE receipt is malformed", *malformed):
        tag = decoded(data)
        protected, unprotected, payload, signature = tag.value
        headers = labelled(decoded(protected), "its protected header")
        claims = labelled(headers[CWT_CLAIMS], "its CWT claims (15)")
        (proof,) = unprotected[_VDP][_INCLUSION]
        size, index, hashes = decoded(proof)
        origin, key_id = claims[ISSUER], headers[KID].decode("ascii")
        if (tag.tag, payload, headers[ALG], headers[_VDS]) != (SIGN1_TAG, None, EDDSA, _RFC9162_SHA256):
            raise ValueError("it is no COSE_Sign1 with EdDSA over a detached root of RFC9162_SHA256")
        if {*map(type, (size, index, headers[ALG], headers[_VDS]))} != {int}:
            raise TypeError("size, index, algorithm and structure are not integers")
        root = root_of_path(index, size, leaf_hash(link), hashes)
    if (key := keyring.get(key_id)) is None:
        raise UnknownKeyError(f"the COSE receipt is signed by key {key_id[:32]}, which is not held")
    if not key.made(signature, to_be_signed(protected, root)):
        raise SignatureError(f"key {key_id} did not sign a tree of {size} entries with this one at index {index}")
    return CoseProof(origin, size, index, root, key_id)


def _only_entry(receipt: Receipt) -> ProvedEntry:
    if receipt.covers != ENTRY:
        raise InvalidInputError("only the receipt of one entry has this form: name the entry with --seq")
    return receipt.entries[0]
