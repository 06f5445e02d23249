"""Keys of witnesses have one spelling, and a cosignature holds for one text and one time."""

from __future__ import annotations

import base64

import pytest

from ledger.errors import InvalidInputError, SignatureError
from signing import note
from signing.checkpoint import Checkpoint, sign_checkpoint
from signing.note import WitnessKey, cosignatures_of
from signing.private_keys import FileSigner
from tests.app.witness import Witness

WITNESS = Witness()
KEY = WitnessKey.parse(WITNESS.verifier_key)
TIME_S = 1_700_000_000


@pytest.fixture
def checkpoint(ed25519_signer: FileSigner) -> str:
    return sign_checkpoint(Checkpoint("log.example/acme", 3, bytes(32)), ed25519_signer)


def test_a_key_is_spelled_as_it_was_read() -> None:
    assert KEY.text() == WITNESS.verifier_key
    assert WitnessKey.of(KEY.name, KEY.public_key) == KEY


@pytest.mark.parametrize(
    "text",
    [
        *("", "name", "name+00000000+", "name+00000000+AAAA", WITNESS.verifier_key[:-4], WITNESS.verifier_key + "A"),
        WITNESS.verifier_key.replace("w1+", "w2+"),
        WITNESS.verifier_key.replace("witness.example/w1", "a name"),
        "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW",
        "x" * 5000 + WITNESS.verifier_key,
    ],
)
def test_what_is_no_key_of_a_witness_is_refused(text: str) -> None:
    with pytest.raises(InvalidInputError):
        WitnessKey.parse(text)


def test_a_cosignature_holds_for_its_text_and_its_time(checkpoint: str) -> None:
    (found,) = cosignatures_of(note.parse(WITNESS.cosign(checkpoint, TIME_S)), [KEY])
    assert (found.witness, found.time.timestamp()) == (KEY, TIME_S)
    other = checkpoint.replace("\n3\n", "\n4\n", 1)
    line = WITNESS.line(checkpoint.rpartition("\n\n")[0] + "\n", TIME_S)
    with pytest.raises(SignatureError, match="does not hold"):
        cosignatures_of(note.parse(other + line), [KEY])
    raw = bytearray(base64.b64decode(line.split(" ")[2]))
    raw[11] ^= 1
    with pytest.raises(SignatureError, match="does not hold"):
        cosignatures_of(note.parse(f"{checkpoint}\u2014 {KEY.name} {base64.b64encode(raw).decode()}\n"), [KEY])


def test_lines_of_others_are_ignored(checkpoint: str) -> None:
    stranger = Witness(WITNESS.name, 7)
    assert cosignatures_of(note.parse(stranger.cosign(checkpoint, TIME_S)), [KEY]) == []
    assert cosignatures_of(note.parse(checkpoint), [KEY]) == []
