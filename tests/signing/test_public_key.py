"""Public keys: names, windows, and signatures that must not hold (after Wycheproof)."""

import hashlib
from datetime import UTC, datetime, timedelta, timezone

import pytest
from cryptography.hazmat.primitives.asymmetric import ec, rsa
from cryptography.hazmat.primitives.asymmetric.utils import decode_dss_signature, encode_dss_signature
from cryptography.hazmat.primitives.serialization import Encoding, PublicFormat

from ledger.errors import InvalidInputError
from ledger.hlc import Hlc
from signing.keys import ECDSA_P256, ED25519, PublicKey
from signing.private_keys import FileSigner

ED25519_ORDER = 2**252 + 27742317777372353535851937790883648493
P256_ORDER = 0xFFFFFFFF00000000FFFFFFFFFFFFFFFFBCE6FAADA7179E84F3B9CAC2FC632551

NOON = datetime(2026, 6, 1, 12, tzinfo=UTC)
NOON_MS = 1780315200000


# Names


def test_a_key_id_is_the_start_of_the_sha256_of_its_spki(signer: FileSigner) -> None:
    der = signer.public_key.material.public_bytes(Encoding.DER, PublicFormat.SubjectPublicKeyInfo)
    assert signer.key_id == hashlib.sha256(der).hexdigest()[:16]
    assert PublicKey.of(signer.public_key_pem).key_id == signer.key_id


def test_a_key_id_does_not_depend_on_how_the_pem_is_spaced(signer: FileSigner) -> None:
    assert PublicKey.of("\n" + signer.public_key_pem.replace("\n", "\r\n")).key_id == signer.key_id


def test_a_key_under_another_id_is_refused(ed25519_signer: FileSigner, other_signer: FileSigner) -> None:
    with pytest.raises(InvalidInputError, match=ed25519_signer.key_id):
        PublicKey(other_signer.key_id, ED25519, ed25519_signer.public_key_pem)


def test_a_key_under_another_algorithm_is_refused(ed25519_signer: FileSigner) -> None:
    with pytest.raises(InvalidInputError, match="ecdsa"):
        PublicKey(ed25519_signer.key_id, ECDSA_P256, ed25519_signer.public_key_pem)


@pytest.mark.parametrize(
    "made", [lambda: rsa.generate_private_key(65537, 2048), lambda: ec.generate_private_key(ec.SECP384R1())]
)
def test_keys_of_other_algorithms_are_refused(made) -> None:
    pem = made().public_key().public_bytes(Encoding.PEM, PublicFormat.SubjectPublicKeyInfo).decode()
    with pytest.raises(InvalidInputError, match="Ed25519, ECDSA P-256 or ML-DSA-44"):
        PublicKey.of(pem)


def test_json_gives_back_the_same_key(signer: FileSigner) -> None:
    key = PublicKey.of(
        signer.public_key_pem,
        not_before=NOON,
        not_after=NOON + timedelta(days=1, microseconds=5),
        revoked_from_hlc=Hlc(NOON_MS, 3, "node-7f3a"),
    )
    value = key.to_json()
    assert value["not_before"] == "2026-06-01T12:00:00Z"
    assert value["revoked_from_hlc"] == f"{NOON_MS}:3:node-7f3a"
    assert PublicKey.from_json(value) == key


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("not_before", "2026-06-01T12:00:00"),
        ("not_before", "soon"),
        ("not_before", 1780315200),
        ("not_after", "0001-01-01T00:00:00+14:00"),
        ("not_after", "2026-05-31T00:00:00Z"),
        ("revoked_from_hlc", "yesterday"),
        ("key_id", None),
        ("algorithm", "rsa"),
        ("public_key_pem", ["-----BEGIN PUBLIC KEY-----"]),
        ("public_key_pem", "é"),
        ("public_key_pem", "\ud800"),
    ],
)
def test_a_key_with_a_wrong_field_is_refused(ed25519_signer: FileSigner, field: str, value: object) -> None:
    item = PublicKey.of(ed25519_signer.public_key_pem, not_before=NOON).to_json()
    with pytest.raises(InvalidInputError):
        PublicKey.from_json({**item, field: value})


# Windows


def test_a_window_includes_both_its_ends_and_nothing_beyond(signer: FileSigner) -> None:
    key = PublicKey.of(signer.public_key_pem, not_before=NOON, not_after=NOON + timedelta(seconds=1))
    assert "valid from" in (key.refusal(Hlc(NOON_MS - 1, 2**31, "z")) or "")
    assert key.refusal(Hlc(NOON_MS, 0, "a")) is None
    assert key.refusal(Hlc(NOON_MS + 1000, 2**31, "z")) is None
    assert "expired" in (key.refusal(Hlc(NOON_MS + 1001, 0, "a")) or "")


def test_a_window_is_the_same_in_every_zone(signer: FileSigner) -> None:
    key = PublicKey.of(signer.public_key_pem, not_before=NOON.astimezone(timezone(timedelta(hours=9))))
    assert key.refusal(Hlc(NOON_MS - 1, 0, "a")) is not None
    assert key.refusal(Hlc(NOON_MS, 0, "a")) is None


def test_a_revocation_begins_at_its_hlc_in_hlc_order(signer: FileSigner) -> None:
    key = PublicKey.of(signer.public_key_pem, revoked_from_hlc=Hlc(NOON_MS, 10, "b"))
    assert key.refusal(Hlc(NOON_MS, 9, "z")) is None
    assert key.refusal(Hlc(NOON_MS, 10, "a")) is None
    assert "revoked" in (key.refusal(Hlc(NOON_MS, 10, "b")) or "")
    assert "revoked" in (key.refusal(Hlc(NOON_MS, 11, "a")) or "")


def test_the_largest_hlc_can_be_judged(signer: FileSigner) -> None:
    key = PublicKey.of(signer.public_key_pem, not_before=NOON, not_after=datetime.max.replace(tzinfo=UTC))
    assert key.refusal(Hlc(2**63 - 1, 0, "a")) is not None


# Signatures that must not hold


def test_ed25519_signatures_of_rfc_8032_hold(ed25519_signer: FileSigner) -> None:
    signature = bytes.fromhex(
        "e5564300c360ac729086e2cc806e828a84877f1eb8e5d974d873e06522490155"
        "5fb8821590a33bacc61e39701cf9b46bd25bf5f0595bbe24655141438e7a100b"
    )
    assert ed25519_signer.sign(b"") == signature
    assert ed25519_signer.public_key.made(signature, b"")


def ed25519_forgeries(signature: bytes) -> dict[str, bytes]:
    r, s = signature[:32], int.from_bytes(signature[32:], "little")
    return {
        "empty": b"",
        "one byte short": signature[:-1],
        "one byte long": signature + b"\x00",
        "r alone": r,
        "all zero": bytes(64),
        "s plus the order": r + (s + ED25519_ORDER).to_bytes(32, "little"),
        "s negated": r + (ED25519_ORDER - s).to_bytes(32, "little"),
        "s zero": r + bytes(32),
        "s the order": r + ED25519_ORDER.to_bytes(32, "little"),
        "r the identity": b"\x01" + bytes(31) + signature[32:],
        "r not canonical": b"\xee" + b"\xff" * 30 + b"\x7f" + signature[32:],
        "halves swapped": signature[32:] + r,
    }


def test_malleable_and_malformed_ed25519_signatures_do_not_hold(ed25519_signer: FileSigner) -> None:
    for name, forgery in ed25519_forgeries(ed25519_signer.sign(b"message")).items():
        assert not ed25519_signer.public_key.made(forgery, b"message"), name


def p256_forgeries(signature: bytes) -> dict[str, bytes]:
    r, s = decode_dss_signature(signature)
    length = signature[1]
    return {
        "empty": b"",
        "one byte short": signature[:-1],
        "garbage after": signature + b"\x00",
        "long form of the length": b"\x30\x81" + signature[1:],
        "length too small": bytes((0x30, length - 1)) + signature[2:],
        "length too large": bytes((0x30, length + 1)) + signature[2:],
        "indefinite length": b"\x30\x80" + signature[2:] + b"\x00\x00",
        "not a sequence": b"\x31" + signature[1:],
        "zero and zero": encode_dss_signature(0, 0),
        "one and zero": encode_dss_signature(1, 0),
        "r zero": encode_dss_signature(0, s),
        "s zero": encode_dss_signature(r, 0),
        "r plus the order": encode_dss_signature(r + P256_ORDER, s),
        "s plus the order": encode_dss_signature(r, s + P256_ORDER),
        "order and order": encode_dss_signature(P256_ORDER, P256_ORDER),
        "r negative": b"\x30\x06\x02\x01\xff\x02\x01\x01",
        "r and s swapped": encode_dss_signature(s, r),
        "raw r and s": r.to_bytes(32) + s.to_bytes(32),
    }


def test_malformed_p256_signatures_do_not_hold(p256_signer: FileSigner) -> None:
    for name, forgery in p256_forgeries(p256_signer.sign(b"message")).items():
        assert not p256_signer.public_key.made(forgery, b"message"), name


def test_a_missing_zero_in_a_p256_signature_is_not_forgiven(p256_signer: FileSigner) -> None:
    signature = p256_signer.sign(b"message")
    while signature[3] != 33:
        signature = p256_signer.sign(b"message")
    r_without_zero = b"\x02\x20" + signature[5:37]
    rest = signature[37:]
    forgery = bytes((0x30, len(r_without_zero + rest))) + r_without_zero + rest
    assert p256_signer.public_key.made(signature, b"message")
    assert not p256_signer.public_key.made(forgery, b"message")


def test_wycheproof_p256_signatures_hold_as_it_says() -> None:
    key = PublicKey.of(
        "-----BEGIN PUBLIC KEY-----\n"
        "MFkwEwYHKoZIzj0CAQYIKoZIzj0DAQcDQgAEKSexBRK64+3c/kZ4KBKLrSkDJpkZ\n"
        "9whgacjE32xzKDjHeHlk6qwA5ZIfsUmKYPRgZ2az2WhQAVWNGpdOc0FRPg==\n"
        "-----END PUBLIC KEY-----\n"
    )
    r = "02202ba3a8be6b94d5ec80a6d9d1190a436effe50d85a1eee859b8cc6af9bd5c2e18"
    valid = bytes.fromhex(f"3045{r}022100b329f479a2bbd0a5c384ee1493b1f5186a87139cac5df4087c134b49156847db")
    missing_zero = bytes.fromhex(f"3044{r}0220b329f479a2bbd0a5c384ee1493b1f5186a87139cac5df4087c134b49156847db")
    assert key.made(valid, b"123400")
    assert not key.made(missing_zero, b"123400")


def test_a_signature_holds_for_its_message_and_key_only(
    signer: FileSigner, other_signer: FileSigner, p256_signer: FileSigner
) -> None:
    signature = signer.sign(b"message")
    assert signer.public_key.made(signature, b"message")
    assert not signer.public_key.made(signature, b"messagf")
    assert not other_signer.public_key.made(signature, b"message")
    assert p256_signer.public_key.made(signature, b"message") == (signer is p256_signer)
