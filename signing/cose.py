"""COSE (RFC 9052) as this ledger reads and writes it: CBOR, public keys, and the signed statements of SCITT (RFC 9943).

A signed statement is a COSE_Sign1 whose protected header names its issuer::

    18([protected, unprotected, payload, signature])

    protected   <<{1: algorithm, 4: id of the key, 15: {1: issuer, 2: subject}, ...}>>

Its *registered form* is the same with an empty unprotected header, in deterministic encoding (RFC 8949 4.2.1). The
header is not signed, and receipts are added to it later, so all copies of one statement have one registered form. The
statement's id is the SHA-256 of that form. The payload of the entry, STATEMENT_REGISTERED of subject
``statement:`` and the id, has::

    iss, sub     as in the protected header
    key_id       the caller's key that signed the statement
    statement    the registered form in base64

The COSE receipt of such an entry holds the entry without ``statement`` (``signing.entry_proof``), so that a client
that holds the statement can compute the leaf.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Mapping
from contextlib import suppress
from hashlib import sha256
from typing import Any, Final, NamedTuple

import cbor2
import orjson
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature

from ledger.bundle.rows import EntryObject
from ledger.errors import InvalidInputError, refuse, reported_as
from ledger.facts.events import SystemAction
from signing.keys import ECDSA_P256, ED25519, ML_DSA_44, PublicKey

STATEMENT_BYTES_MAX: Final = 64 << 10
"""Longest signed statement; an issuer of a larger payload signs its hash (COSE hash envelope)."""
CLAIM_CHARACTERS_MAX: Final = 1024
"""Longest issuer, and longest subject."""
SUBJECT_PREFIX: Final = "statement:"
"""Prefix of ``job_id`` in the entry of a statement, whose id follows."""

SIGN1_TAG: Final = 18
ALG, CRIT, KID, CWT_CLAIMS = 1, 2, 4, 15
ISSUER, SUBJECT = 1, 2
EDDSA: Final = -8
ALGORITHMS: Final = {
    EDDSA: ED25519,
    -19: ED25519,
    -7: ECDSA_P256,
    -9: ECDSA_P256,
    -48: ML_DSA_44,
}
"""The algorithm of a key, by that of COSE (RFC 9053, RFC 9864, RFC 9964)."""
DEPTH_MAX: Final = 16
"""Deepest nesting of values in CBOR."""
ITEMS_MAX: Final = 256
"""Most data items of one CBOR value, members of maps and arrays among them: a map of thousands of keys with one hash
would take the square of their number to read."""

_MALFORMED: Final = (cbor2.CBORError, ValueError, TypeError, LookupError, AttributeError)
_P256_SCALAR_BYTES: Final = 32
_REGULAR_EXPRESSION: Final = 35
"""Tag whose text the decoder would compile; it is read as the text."""
_STRINGS: Final = (2, 3)
"""Major types of byte strings and texts."""
_LONGER_ARGUMENTS: Final = {24: 1, 25: 2, 26: 4, 27: 8}
"""Bytes of an argument behind its head, by the low five bits of the head."""
_STATEMENT: Final = '"statement":"%s"'


class SignedStatement(NamedTuple):
    """A signed statement whose signature is not checked yet."""

    issuer: str
    subject: str
    key_id: str
    algorithm: str
    """Of the key."""
    registered: bytes
    """The registered form."""
    message: bytes
    """The signed bytes (RFC 9052 4.4)."""
    signature: bytes
    """As ``PublicKey.made`` takes it."""

    @property
    def id(self) -> str:
        """The id of the statement, 64 hex digits."""
        return sha256(self.registered).hexdigest()


def read_statement(data: bytes) -> SignedStatement:
    """The signed statement in ``data``.

    Raises:
        InvalidInputError: it is none, or not one that can be registered; says why.
    """
    with reported_as(InvalidInputError, "the signed statement is malformed", *_MALFORMED):
        tag = decoded(data)
        if not isinstance(tag, cbor2.CBORTag) or tag.tag != SIGN1_TAG:
            raise ValueError("it is no COSE_Sign1 with tag 18")
        protected, unprotected, payload, signature = tag.value
        headers = labelled(decoded(protected), "its protected header")
        claims = labelled(headers.get(CWT_CLAIMS), "its CWT claims (15)")
        if type(kid := headers.get(KID)) is not bytes or not kid.isascii():
            raise ValueError("its kid (4) is no id of a key in ASCII")
        if not isinstance(unprotected, Mapping) or type(signature) is not bytes:
            raise ValueError("its unprotected header is no map, or its signature no bytes")
    if payload is None:
        raise InvalidInputError("the payload is missing: attach it, since a detached one cannot be verified here")
    alg = headers.get(ALG)
    algorithm = ALGORITHMS.get(alg) if type(alg) is int else None
    if algorithm is None:
        raise InvalidInputError(f"signing algorithm {str(alg)[:40]} is not supported; there are {[*ALGORITHMS]}")
    refuse(
        InvalidInputError,
        (type(payload) is not bytes, "the payload is no byte string"),
        (CRIT in headers, "crit: no header is known that must be understood"),
        *((not _is_claim(claims.get(label)), f"{name} is not {_CLAIM}") for label, name in _CLAIMS.items()),
    )
    return SignedStatement(
        claims[ISSUER],
        claims[SUBJECT],
        kid.decode(),
        algorithm,
        encoded(cbor2.CBORTag(SIGN1_TAG, [protected, {}, payload, signature])),
        to_be_signed(protected, payload),
        _as_der(signature) if algorithm == ECDSA_P256 else signature,
    )


def facts_of(statement: SignedStatement) -> dict[str, str]:
    """The members of the payload of its entry that say what was registered."""
    return {
        "iss": statement.issuer,
        "sub": statement.subject,
        "key_id": statement.key_id,
        "statement": base64.b64encode(statement.registered).decode(),
    }


def registers(payload: str, statement_id: str) -> bool:
    """Whether this payload of an entry is of the statement of that id; its signature is not checked."""
    with suppress(InvalidInputError, *_MALFORMED):
        facts = orjson.loads(payload)
        statement = read_statement(base64.b64decode(facts["statement"], validate=True))
        return statement.id == statement_id and facts_of(statement).items() <= facts.items()
    return False


class Registration(NamedTuple):
    """An entry of a statement, without the statement."""

    subject: str
    """Of the statement."""
    payload: str
    """That of the entry, with an empty ``statement``."""


def registration_in(entry: EntryObject) -> Registration | None:
    """The registration that an entry is, None if it is none."""
    if entry.action != SystemAction.STATEMENT_REGISTERED:
        return None
    facts = orjson.loads(entry.payload)
    subject, statement = facts.get("sub"), facts.get("statement")
    if not isinstance(subject, str) or not isinstance(statement, str):
        return None
    return Registration(subject, entry.payload.replace(_STATEMENT % statement, _STATEMENT % "", 1))


def cose_key(key: PublicKey) -> dict[int, object]:
    """The COSE_Key (RFC 9052 7) of a key that signs receipts, which MUST be Ed25519."""
    assert key.algorithm == ED25519
    return {1: 1, 2: key.key_id.encode(), 3: EDDSA, -1: 6, -2: key.raw()}


def to_be_signed(protected: bytes, payload: bytes) -> bytes:
    """The bytes that a COSE_Sign1 signs, without external data."""
    return encoded(["Signature1", protected, b"", payload])


def encoded(value: object) -> bytes:
    """The deterministic encoding of a value."""
    return cbor2.dumps(value, canonical=True)


def decoded(data: bytes) -> Any:
    """The value in ``data``, of definite lengths and without a name twice in one map.

    Raises:
        cbor2.CBORError, ValueError, TypeError: it holds none, more than one, or one of more than ``ITEMS_MAX`` items.
    """
    _refuse_many_items(data)
    source = io.BytesIO(data)
    decoder = cbor2.CBORDecoder(
        source,
        allow_indefinite=False,
        allow_duplicate_keys=False,
        max_depth=DEPTH_MAX,
        semantic_decoders={_REGULAR_EXPRESSION: lambda text, _: text},
    )
    value = decoder.decode()
    if source.tell() != len(data):
        raise ValueError(f"{len(data) - source.tell()} bytes follow it")
    return value


def labelled(value: Any, what: str) -> Mapping[Any, Any]:
    """A map of header parameters or claims: 1.0 and true are no labels, though Python takes them for 1.

    Raises:
        ValueError: it is none.
    """
    if not isinstance(value, Mapping) or not all(type(label) in (int, str) for label in value):
        raise ValueError(f"{what} is no map of labels")
    return value


def _refuse_many_items(data: bytes) -> None:
    """Refuse more than ``ITEMS_MAX`` heads of data items (RFC 8949 3). The decoder refuses heads of indefinite length
    and reserved ones, where this misreads what follows."""
    at = items = 0
    while at < len(data):
        if items == ITEMS_MAX:
            raise ValueError(f"it has more than {ITEMS_MAX} data items")
        items += 1
        major, argument = data[at] >> 5, data[at] & 0x1F
        at += 1
        if argument in _LONGER_ARGUMENTS:
            width = _LONGER_ARGUMENTS[argument]
            argument = int.from_bytes(data[at : at + width])
            at += width
        if major in _STRINGS:
            at += argument


_CLAIM: Final = f"a text of 1 to {CLAIM_CHARACTERS_MAX} characters without control characters"
_CLAIMS: Final = {ISSUER: "the issuer (iss)", SUBJECT: "the subject (sub)"}


def _is_claim(value: object) -> bool:
    is_short = isinstance(value, str) and 0 < len(value) <= CLAIM_CHARACTERS_MAX
    return is_short and all(" " <= character != "\x7f" for character in str(value))


def _as_der(signature: bytes) -> bytes:
    """An ECDSA signature of COSE, r and s side by side, as DER; other bytes as they are, which no key made."""
    if len(signature) != 2 * _P256_SCALAR_BYTES:
        return b""
    halves = signature[:_P256_SCALAR_BYTES], signature[_P256_SCALAR_BYTES:]
    return encode_dss_signature(*(int.from_bytes(half) for half in halves))
