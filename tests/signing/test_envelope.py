"""DSSE envelopes against the specification, against securesystemslib, and against whoever alters them."""

import base64
import copy
import json
from datetime import UTC, datetime
from typing import Any

import pytest
from cryptography.hazmat.primitives.asymmetric import ec
from cryptography.hazmat.primitives.asymmetric.utils import encode_dss_signature
from hypothesis import given, settings
from hypothesis import strategies as st
from securesystemslib.dsse import Envelope as JudgeEnvelope
from securesystemslib.signer import CryptoSigner, SSlibKey

from ledger.errors import InvalidInputError, SignatureError, UnknownKeyError
from ledger.hlc import Hlc
from signing import envelope
from signing.keys import Keyring, PublicKey
from signing.private_keys import FileSigner
from tests.conftest import EXAMPLES

PAYLOAD = b'{"what": "\xc3\xa9\xf0\x9f\x94\x91"}'


def signed(*signers: FileSigner, payload: bytes = PAYLOAD) -> dict[str, object]:
    envelopes = [envelope.sign(payload, signer) for signer in signers]
    return {**envelopes[0], "signatures": [item["signatures"][0] for item in envelopes]}


def spoiled(made: dict[str, object], index: int = 0) -> dict[str, object]:
    made = copy.deepcopy(made)
    made["signatures"][index]["sig"] = base64.b64encode(bytes(64)).decode()
    return made


# The specification


def test_pae_is_that_of_the_specification() -> None:
    pae = envelope.pae("http://example.com/HelloWorld", b"hello world")
    assert pae == b"DSSEv1 29 http://example.com/HelloWorld 11 hello world"


def test_pae_counts_bytes_not_characters() -> None:
    assert envelope.pae("é", "日本".encode()) == b"DSSEv1 2 \xc3\xa9 6 \xe6\x97\xa5\xe6\x9c\xac"


def test_the_envelope_of_the_specification_verifies() -> None:
    x = 46950820868899156662930047687818585632848591499744589407958293238635476079160
    y = 5640078356564379163099075877009565129882514886557779369047442380624545832820
    key = PublicKey.of(ec.EllipticCurvePublicNumbers(x, y, ec.SECP256R1()).public_key())
    raw = base64.b64decode("A3JqsQGtVsJ2O2xqrI5IcnXip5GToJ3F+FnZ+O88SjtR6rDAajabZKciJTfUiHqJPcIAriEGAHTVeCUjW2JIZA==")
    der = encode_dss_signature(int.from_bytes(raw[:32]), int.from_bytes(raw[32:]))
    given_envelope = {
        "payload": "aGVsbG8gd29ybGQ=",
        "payloadType": "http://example.com/HelloWorld",
        "signatures": [{"sig": base64.b64encode(der).decode()}],
    }
    payload = envelope.verify(given_envelope, [key], payload_type="http://example.com/HelloWorld")
    assert payload == b"hello world"


# An outside judge


def judge_key(signer: FileSigner) -> SSlibKey:
    return SSlibKey.from_crypto(signer.public_key.material, keyid=signer.key_id)


def test_securesystemslib_verifies_our_envelopes(signer: FileSigner) -> None:
    judged = JudgeEnvelope.from_dict(signed(signer))
    assert list(judged.verify([judge_key(signer)], threshold=1)) == [signer.key_id]
    assert judged.payload == PAYLOAD


def test_securesystemslib_verifies_our_envelopes_with_two_signatures(
    ed25519_signer: FileSigner, p256_signer: FileSigner
) -> None:
    judged = JudgeEnvelope.from_dict(signed(ed25519_signer, p256_signer))
    keys = [judge_key(ed25519_signer), judge_key(p256_signer)]
    assert len(judged.verify(keys, threshold=2)) == 2


@pytest.mark.parametrize("made", [CryptoSigner.generate_ed25519, CryptoSigner.generate_ecdsa])
def test_envelopes_of_securesystemslib_verify_here(made) -> None:
    their_signer = made()
    theirs = JudgeEnvelope(PAYLOAD, envelope.PAYLOAD_TYPE, {})
    theirs.sign(their_signer)
    key = PublicKey.of(their_signer.public_key._crypto_key())
    made_envelope = theirs.to_dict()
    made_envelope["signatures"][0]["keyid"] = key.key_id
    assert envelope.verify(made_envelope, [key]) == PAYLOAD


# Which keys count


def test_keys_may_be_a_ring_v1_keys_json_pem_text_or_a_list(signer: FileSigner, other_signer: FileSigner) -> None:
    ring = Keyring.of([signer.public_key, other_signer.public_key])
    pems = [other_signer.public_key_pem, signer.public_key_pem]
    for keys in (ring, ring.to_json(), json.loads(json.dumps(ring.to_json())), pems, "".join(pems)):
        assert envelope.verify(signed(signer), keys) == PAYLOAD


@pytest.mark.parametrize("keys", [None, 7, "no key", ["no key"], [b"bytes"], {}, {"keys": [{}]}, {"keys": 1}])
def test_keys_that_are_no_keys_are_refused_as_input(ed25519_signer: FileSigner, keys: object) -> None:
    with pytest.raises(InvalidInputError):
        envelope.verify(signed(ed25519_signer), keys)


def test_a_key_that_is_not_held_is_unknown(signer: FileSigner, other_signer: FileSigner) -> None:
    with pytest.raises(UnknownKeyError, match=signer.key_id):
        envelope.verify(signed(signer), [other_signer.public_key])
    with pytest.raises(UnknownKeyError):
        envelope.verify(signed(signer), [])


def test_a_wrong_signature_of_a_held_key_is_not_an_unknown_key(signer: FileSigner) -> None:
    with pytest.raises(SignatureError) as refused:
        envelope.verify(spoiled(signed(signer)), [signer.public_key])
    assert refused.type is SignatureError


def test_a_signature_of_another_key_under_a_held_id_does_not_hold(signer: FileSigner, other_signer: FileSigner) -> None:
    forged = signed(other_signer)
    forged["signatures"][0]["keyid"] = signer.key_id
    with pytest.raises(SignatureError) as refused:
        envelope.verify(forged, [signer.public_key, other_signer.public_key])
    assert refused.type is SignatureError


def test_one_held_key_is_enough_and_a_signature_that_names_a_held_key_must_hold(
    signer: FileSigner, other_signer: FileSigner
) -> None:
    both = signed(other_signer, signer)
    assert envelope.verify(both, [signer.public_key]) == PAYLOAD
    assert envelope.verify(spoiled(both, 0), [signer.public_key]) == PAYLOAD
    for spoiled_one in (0, 1):
        with pytest.raises(SignatureError, match="does not hold"):
            envelope.verify(spoiled(both, spoiled_one), [signer.public_key, other_signer.public_key])


@pytest.mark.parametrize("hint", ["absent", None, ""])
def test_the_key_id_is_only_a_hint(signer: FileSigner, other_signer: FileSigner, hint: str | None) -> None:
    made = signed(signer)
    if hint == "absent":
        del made["signatures"][0]["keyid"]
    else:
        made["signatures"][0]["keyid"] = hint
    assert envelope.verify(made, [other_signer.public_key, signer.public_key]) == PAYLOAD
    with pytest.raises(SignatureError):
        envelope.verify(made, [other_signer.public_key])


def test_a_revoked_key_does_not_count_where_no_time_is_known(signer: FileSigner, other_signer: FileSigner) -> None:
    revoked = PublicKey.of(signer.public_key_pem, revoked_from_hlc=Hlc(2**50, 0, "n"))
    with pytest.raises(UnknownKeyError, match="revoked"):
        envelope.verify(signed(signer), [revoked])
    assert envelope.verify(signed(signer, other_signer), [revoked, other_signer.public_key]) == PAYLOAD


def test_a_window_is_not_judged_where_no_time_is_known(signer: FileSigner) -> None:
    retired = PublicKey.of(signer.public_key_pem, not_after=datetime(2000, 1, 1, tzinfo=UTC))
    assert envelope.verify(signed(signer), [retired]) == PAYLOAD


def test_a_payload_of_another_type_is_refused(signer: FileSigner) -> None:
    made = envelope.sign(PAYLOAD, signer, payload_type="application/other+json")
    with pytest.raises(SignatureError, match="payloadType"):
        envelope.verify(made, [signer.public_key])
    assert envelope.verify(made, [signer.public_key], payload_type="application/other+json") == PAYLOAD


def test_a_payload_does_not_verify_under_another_type(signer: FileSigner) -> None:
    made = {**signed(signer), "payloadType": "application/other+json"}
    with pytest.raises(SignatureError, match="does not hold"):
        envelope.verify(made, [signer.public_key], payload_type="application/other+json")


# Spelling


def test_url_safe_base64_is_accepted_as_dsse_demands(signer: FileSigner) -> None:
    payload = bytes(range(240, 256)) * 3
    made = signed(signer, payload=payload)
    assert "/" in made["payload"]
    safe = copy.deepcopy(made)
    safe["payload"] = made["payload"].replace("+", "-").replace("/", "_")
    sig = made["signatures"][0]["sig"]
    safe["signatures"][0]["sig"] = sig.replace("+", "-").replace("/", "_")
    assert envelope.verify(safe, [signer.public_key]) == payload


@pytest.mark.parametrize(
    "text",
    [
        "YQ",
        "YQ=",
        "YQ===",
        "YR==",
        "YQ==\n",
        " YQ==",
        "Y Q==",
        "YQ==YQ==",
        "+-__",
        "é===",
        "=",
        "YQ=é",
        "Y\x00==",
    ],
)
def test_base64_has_one_spelling(ed25519_signer: FileSigner, text: str) -> None:
    for made in (signed(ed25519_signer), signed(ed25519_signer)):
        with pytest.raises(SignatureError):
            envelope.verify({**made, "payload": text}, [ed25519_signer.public_key])
        made["signatures"][0]["sig"] = text
        with pytest.raises(SignatureError):
            envelope.verify(made, [ed25519_signer.public_key])


def test_fields_that_dsse_does_not_name_are_ignored(signer: FileSigner) -> None:
    made = signed(signer)
    made["signatures"][0]["cert"] = "x"
    assert envelope.verify({**made, "extra": [1]}, [signer.public_key]) == PAYLOAD


@pytest.mark.parametrize("count", [0, envelope.SIGNATURES_MAX + 1])
def test_the_number_of_signatures_is_bounded(ed25519_signer: FileSigner, count: int) -> None:
    with pytest.raises(SignatureError, match="1 to 16"):
        envelope.verify({**signed(ed25519_signer), "signatures": signed(ed25519_signer)["signatures"] * count}, [])


def test_sixteen_signatures_are_read(ed25519_signer: FileSigner) -> None:
    made = signed(ed25519_signer)
    many = {**made, "signatures": made["signatures"] * envelope.SIGNATURES_MAX}
    assert envelope.verify(many, [ed25519_signer.public_key]) == PAYLOAD


# Whatever comes

JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=20),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=8), inner, max_size=4),
    max_leaves=12,
)


@given(value=JSON)
def test_no_value_at_all_raises_anything_but_a_signature_error(ed25519_signer: FileSigner, value: object) -> None:
    with pytest.raises(SignatureError):
        envelope.verify(value, [ed25519_signer.public_key])


@settings(max_examples=4 * EXAMPLES)
@given(data=st.data())
def test_replacing_or_dropping_any_field_is_refused_or_changes_nothing(
    ed25519_signer: FileSigner, other_signer: FileSigner, data: st.DataObject
) -> None:
    made = signed(ed25519_signer, other_signer)
    held = [ed25519_signer.public_key, other_signer.public_key]
    paths = [["payload"], ["payloadType"], ["signatures"]]
    paths += [["signatures", index, *rest] for index in (0, 1) for rest in ([], ["keyid"], ["sig"])]
    path = data.draw(st.sampled_from(paths))
    parent: Any = made
    for step in path[:-1]:
        parent = parent[step]
    if data.draw(st.booleans()):
        del parent[path[-1]]
    else:
        parent[path[-1]] = data.draw(JSON)
    try:
        payload = envelope.verify(made, held)
    except SignatureError:
        return
    assert payload == PAYLOAD
    assert path[0] == "signatures"
