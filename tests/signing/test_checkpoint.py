"""Checkpoints: the example of C2SP tlog-checkpoint.md, and whose signature makes one."""

import base64

import pytest
from hypothesis import given
from hypothesis import strategies as st

from ledger.errors import InvalidInputError, SignatureError, UnknownKeyError
from ledger.hlc import Hlc
from signing import note
from signing.checkpoint import SIZE_MAX, Checkpoint, body, open_checkpoint, parse, sign_checkpoint
from signing.keys import Keyring, PublicKey
from signing.note import Note
from signing.private_keys import FileSigner
from tests.conftest import spread

ORIGIN = "log.example/acme"
ROOT = bytes(range(32))
ROOT_LINE = base64.b64encode(ROOT).decode()
CHECKPOINT = Checkpoint(ORIGIN, 1003, ROOT)

C2SP_EXAMPLE = """\
example.com/behind-the-sofa
20852163
CsUYapGGPo4dkMgIAUqom/Xajj7h2fB2MPA3j2jxq2I=

— example.com/behind-the-sofa Az3grlgtzPICa5OS8npVmf1Myq/5IZniMp+ZJurmRDeOoRDe4URYN7u5/Zhcyv2q1gGzGku9nTo+zyWE+xeMcTOAYQ8=
— witness.example.com/w1 jWbPPwAAAABkGFDLEZMHwSRaJNiIDoe9DYn/zXcrtPHeolMI5OWXEhZCB9dlrDJsX3b2oyin1nPZqhf5nNo0xUe+mbIUBkBIfZ+qnA==
"""  # noqa: E501


def key_of(signer: FileSigner, name: str = ORIGIN) -> str:
    return note.VerifierKey.of(name, signer.public_key).text()


def cosigned(*notes: str) -> str:
    parsed = [note.parse(text) for text in notes]
    return Note(parsed[0].text, tuple(signature for item in parsed for signature in item.signatures)).encode()


def test_the_example_of_c2sp_is_read_and_written_back() -> None:
    parsed = note.parse(C2SP_EXAMPLE)
    checkpoint = parse(parsed.text)
    assert (checkpoint.origin, checkpoint.size) == ("example.com/behind-the-sofa", 20852163)
    assert checkpoint.root.hex().startswith("0ac5186a91863e8e")
    assert body(checkpoint) == parsed.text
    assert [signature.name for signature in parsed.signatures] == [
        checkpoint.origin,
        "witness.example.com/w1",
    ]


def test_the_body_is_three_lines(ed25519_signer: FileSigner) -> None:
    assert body(CHECKPOINT) == f"{ORIGIN}\n1003\n{ROOT_LINE}\n"
    assert sign_checkpoint(CHECKPOINT, ed25519_signer).startswith(f"{body(CHECKPOINT)}\n— {ORIGIN} ")


def test_a_checkpoint_opens_with_its_verifier_key(ed25519_signer: FileSigner) -> None:
    signed = sign_checkpoint(CHECKPOINT, ed25519_signer)
    assert open_checkpoint(signed, [key_of(ed25519_signer)]) == CHECKPOINT
    assert open_checkpoint(signed.encode(), [key_of(ed25519_signer)], origin=ORIGIN) == CHECKPOINT


def test_a_checkpoint_opens_with_a_ring_of_keys(
    ed25519_signer: FileSigner, p256_signer: FileSigner, other_signer: FileSigner
) -> None:
    signed = sign_checkpoint(CHECKPOINT, ed25519_signer)
    assert open_checkpoint(signed, Keyring.of([p256_signer.public_key, ed25519_signer.public_key])) == CHECKPOINT
    with pytest.raises(UnknownKeyError):
        open_checkpoint(signed, Keyring.of([p256_signer.public_key, other_signer.public_key]))


def test_a_checkpoint_opens_with_the_verifier_keys_saved_with_a_ring(
    ed25519_signer: FileSigner, p256_signer: FileSigner
) -> None:
    signed = sign_checkpoint(CHECKPOINT, ed25519_signer)
    held = [p256_signer.public_key]
    assert open_checkpoint(signed, Keyring(held, [key_of(ed25519_signer)])) == CHECKPOINT
    with pytest.raises(UnknownKeyError):
        open_checkpoint(signed, Keyring(held, [key_of(ed25519_signer, "log.example/other")]))


def test_a_revoked_key_makes_no_checkpoint(ed25519_signer: FileSigner) -> None:
    revoked = PublicKey.of(ed25519_signer.public_key_pem, revoked_from_hlc=Hlc(2**60, 0, "n"))
    with pytest.raises(UnknownKeyError):
        open_checkpoint(sign_checkpoint(CHECKPOINT, ed25519_signer), Keyring([revoked], [key_of(ed25519_signer)]))


def test_a_checkpoint_of_another_log_is_refused(ed25519_signer: FileSigner) -> None:
    signed = sign_checkpoint(CHECKPOINT, ed25519_signer)
    with pytest.raises(SignatureError, match="not of 'log"):
        open_checkpoint(signed, [key_of(ed25519_signer)], origin="log.example/other")


def test_another_log_cannot_sign_in_a_logs_name(ed25519_signer: FileSigner, other_signer: FileSigner) -> None:
    known = [key_of(ed25519_signer), key_of(other_signer, "log.example/other")]
    borrowed = note.sign(body(CHECKPOINT), "log.example/other", other_signer)
    with pytest.raises(UnknownKeyError):
        open_checkpoint(borrowed, known)
    assert open_checkpoint(cosigned(sign_checkpoint(CHECKPOINT, ed25519_signer), borrowed), known) == CHECKPOINT


def test_a_wrong_cosignature_of_a_known_witness_spoils_the_checkpoint(
    ed25519_signer: FileSigner, other_signer: FileSigner
) -> None:
    signed = sign_checkpoint(CHECKPOINT, ed25519_signer)
    of_another_tree = note.sign(body(CHECKPOINT._replace(size=1004)), "witness", other_signer)
    both = cosigned(signed, of_another_tree)
    with pytest.raises(SignatureError, match="witness"):
        open_checkpoint(both, [key_of(ed25519_signer), key_of(other_signer, "witness")])
    assert open_checkpoint(both, [key_of(ed25519_signer)]) == CHECKPOINT


def test_a_p256_key_signs_no_checkpoints(p256_signer: FileSigner) -> None:
    with pytest.raises(InvalidInputError, match="ed25519"):
        sign_checkpoint(CHECKPOINT, p256_signer)


@pytest.mark.parametrize("origin", ["", "a b", "a+b", "a\nb", "\x07"])
def test_origins_that_cannot_name_a_key_are_not_signed(ed25519_signer: FileSigner, origin: str) -> None:
    with pytest.raises(InvalidInputError):
        sign_checkpoint(CHECKPOINT._replace(origin=origin), ed25519_signer)


def test_an_origin_that_cannot_name_a_key_is_refused_when_read(ed25519_signer: FileSigner) -> None:
    signed = note.sign(f"two words\n1003\n{ROOT_LINE}\n", ORIGIN, ed25519_signer)
    for keys in (Keyring.of([ed25519_signer.public_key]), [key_of(ed25519_signer)]):
        with pytest.raises(SignatureError, match="two words"):
            open_checkpoint(signed, keys)


def test_extension_lines_are_ignored(ed25519_signer: FileSigner) -> None:
    signed = note.sign(body(CHECKPOINT) + "more\n", ORIGIN, ed25519_signer)
    assert open_checkpoint(signed, [key_of(ed25519_signer)]) == CHECKPOINT


def test_an_empty_log_has_size_0() -> None:
    assert parse(f"o\n0\n{ROOT_LINE}\n").size == 0
    assert parse(f"o\n{SIZE_MAX}\n{ROOT_LINE}\n").size == SIZE_MAX


@pytest.mark.parametrize(
    "text",
    [
        "",
        "\n",
        f"o\n1\n{ROOT_LINE}",
        f"\n1\n{ROOT_LINE}\n",
        "o\n1\n",
        f"o\n1\n{ROOT_LINE}\n\n",
        f"o\n1\n{ROOT_LINE}\n\nmore\n",
        f"o\n01\n{ROOT_LINE}\n",
        f"o\n00\n{ROOT_LINE}\n",
        f"o\n+1\n{ROOT_LINE}\n",
        f"o\n-1\n{ROOT_LINE}\n",
        f"o\n1 \n{ROOT_LINE}\n",
        f"o\n0x1\n{ROOT_LINE}\n",
        f"o\n1_0\n{ROOT_LINE}\n",
        f"o\n١\n{ROOT_LINE}\n",
        f"o\n{SIZE_MAX + 1}\n{ROOT_LINE}\n",
        f"o\n{'9' * 5000}\n{ROOT_LINE}\n",
        "o\n1\nYmFuYW5hcw==\n",
        f"o\n1\n{ROOT_LINE[:-1]}\n",
        f"o\n1\n{ROOT_LINE.replace('/', '_')}=\n",
        f"o\n1\n{base64.b64encode(ROOT + b'x').decode()}\n",
    ],
)
def test_malformed_checkpoints_are_refused_even_when_signed(ed25519_signer: FileSigner, text: str) -> None:
    with pytest.raises(SignatureError):
        parse(text)
    if text.endswith("\n"):
        with pytest.raises(SignatureError):
            open_checkpoint(note.sign(text, "o", ed25519_signer), [key_of(ed25519_signer, "o")])


@pytest.mark.exhaustive
def test_no_flip_of_any_bit_of_a_checkpoint_is_accepted(ed25519_signer: FileSigner) -> None:
    whole = sign_checkpoint(CHECKPOINT, ed25519_signer).encode()
    ring = Keyring.of([ed25519_signer.public_key])
    for bit in spread(range(len(whole) * 8), len(whole) * 8 // 3):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(SignatureError):
            open_checkpoint(bytes(flipped), ring)


@given(size=st.integers(0, SIZE_MAX), root=st.binary(min_size=32, max_size=32))
def test_every_checkpoint_comes_out_as_it_went_in(ed25519_signer: FileSigner, size: int, root: bytes) -> None:
    checkpoint = Checkpoint(ORIGIN, size, root)
    assert open_checkpoint(sign_checkpoint(checkpoint, ed25519_signer), [key_of(ed25519_signer)]) == checkpoint


@given(text=st.text() | st.binary())
def test_anything_else_is_malformed_and_nothing_worse(ed25519_signer: FileSigner, text: str | bytes) -> None:
    with pytest.raises(SignatureError):
        open_checkpoint(text, [key_of(ed25519_signer)])
