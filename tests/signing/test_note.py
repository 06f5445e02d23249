"""Signed notes against the vectors of golang.org/x/mod/sumdb/note and the example of C2SP signed-note.md."""

import base64
from collections.abc import Iterable
from dataclasses import replace
from pathlib import Path

import pytest
from cryptography.hazmat.primitives.asymmetric.ed25519 import Ed25519PrivateKey
from hypothesis import given
from hypothesis import strategies as st

from ledger.errors import InvalidInputError, SignatureError, UnknownKeyError
from signing import note
from signing.note import Note, VerifierKey
from signing.private_keys import FileSigner
from tests.conftest import spread

TEXT = "If you think cryptography is the answer to your problem,\nthen you don't know what your problem is.\n"
PETER_SEED = base64.b64decode("AYEKFALVFGyNhPJEMzD1QIDr+Y7hfZx09iUvxdXHKDFz")[1:]
PETER_KEY = "PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW"
ENOCH_KEY = "EnochRoot+af0cfe78+ATtqJ7zOtqQtYqOo0CpvDXNlMhV3HeJDpjrASKGLWdop"
PETER_LINE = (
    "— PeterNeumann x08go/ZJkuBS9UG/SffcvIAQxVBtiFupLLr8pAcElZInNIuGUgYN1FFYC2pZSNXgKvqfqdngotpRZb6KE6RyyBwJnAM=\n"
)
ENOCH_LINE = (
    "— EnochRoot rwz+eBzmZa0SO3NbfRGzPCpDckykFXSdeX+MNtCOXm2/5n2tiOHp+vAF1aGrQ5ovTG01oOTGwnWLox33WWd1RvMc+QQ=\n"
)
PETERS_NOTE = TEXT + "\n" + PETER_LINE
BOTH_NOTE = PETERS_NOTE + ENOCH_LINE

C2SP_EXAMPLE = """\
Ognuno sta solo sul cuor della terra
trafitto da un raggio di sole:

ed è subito sera.

— quasimodo.example/salvatore NnugSzTjtVAewIS+Z/iJhUPeFDkO/5QQ2i5ddnGITLlC+EhfLW9oJKONrMouFSQU0xMcXxj99ihAQwaqP3ZekRwNtIc=
"""  # noqa: E501


@pytest.fixture
def peter() -> FileSigner:
    return FileSigner(Path("no-file"), Ed25519PrivateKey.from_private_bytes(PETER_SEED))


def opened(content: str | bytes, verifiers: Iterable[VerifierKey | str]) -> str:
    """The text of a note, once one of ``verifiers`` is found to have signed it."""
    parsed = note.parse(content)
    note.signers_of(parsed, verifiers)
    return parsed.text


# Vectors


def test_the_note_of_golang_is_signed_byte_for_byte(peter: FileSigner) -> None:
    assert note.sign(TEXT, "PeterNeumann", peter) == PETERS_NOTE


def test_the_verifier_key_of_golang_is_spelled_character_for_character(peter: FileSigner) -> None:
    assert note.VerifierKey.of("PeterNeumann", peter.public_key).text() == PETER_KEY
    assert VerifierKey.parse(PETER_KEY) == VerifierKey.of("PeterNeumann", peter.public_key)
    for text in (PETER_KEY, ENOCH_KEY):
        assert VerifierKey.parse(text).text() == text


def test_the_notes_of_golang_open(peter: FileSigner) -> None:
    for content in (PETERS_NOTE, BOTH_NOTE, PETERS_NOTE.encode()):
        assert opened(content, [PETER_KEY]) == TEXT
    assert opened(BOTH_NOTE, [ENOCH_KEY, PETER_KEY]) == TEXT
    assert opened(BOTH_NOTE, [VerifierKey.parse(ENOCH_KEY)]) == TEXT


def test_the_example_of_c2sp_is_read_and_written_back() -> None:
    parsed = note.parse(C2SP_EXAMPLE)
    assert parsed.text.endswith("sole:\n\ned è subito sera.\n")
    (signature,) = parsed.signatures
    assert signature.name == "quasimodo.example/salvatore"
    assert signature.key_hash.hex() == "367ba04b"
    assert len(signature.signature) == 64
    assert parsed.encode() == C2SP_EXAMPLE


def test_a_note_of_an_unknown_key_is_not_opened() -> None:
    with pytest.raises(UnknownKeyError, match="quasimodo"):
        opened(C2SP_EXAMPLE, [PETER_KEY])
    with pytest.raises(UnknownKeyError):
        opened(PETERS_NOTE, [])


# Verifier keys


def test_no_part_and_no_change_of_a_verifier_key_is_one() -> None:
    cuts = {PETER_KEY[i:j] for i in range(len(PETER_KEY)) for j in range(i, len(PETER_KEY) + 1)} - {PETER_KEY}
    changes = {PETER_KEY[:i] + chr(ord(c) + 1) + PETER_KEY[i + 1 :] for i, c in enumerate(PETER_KEY)}
    for text in cuts | changes:
        with pytest.raises(InvalidInputError):
            VerifierKey.parse(text)


@pytest.mark.parametrize(
    "text",
    [
        "PeterNeumann+cc469956+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TWBADKEY==",
        "PeterNeumann+173116ae+ZRpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW",
        PETER_KEY.replace("c74f20a3", "C74F20A3"),
        PETER_KEY + "\n",
        "é\ud800" + PETER_KEY,
    ],
)
def test_verifier_keys_of_other_types_or_spellings_are_refused(text: str) -> None:
    with pytest.raises(InvalidInputError):
        VerifierKey.parse(text)


@pytest.mark.parametrize("name", ["", "a b", "a+b", "a\n", "a\u00a0b", "a\u2003b", "a\x00b", "a\ud800"])
def test_names_with_spaces_pluses_or_control_characters_are_refused(peter: FileSigner, name: str) -> None:
    with pytest.raises(InvalidInputError):
        note.VerifierKey.of(name, peter.public_key).text()
    with pytest.raises(InvalidInputError):
        note.sign(TEXT, name, peter)


def test_a_p256_key_signs_no_notes(p256_signer: FileSigner) -> None:
    with pytest.raises(InvalidInputError, match="ed25519"):
        note.sign(TEXT, "log", p256_signer)


@pytest.mark.parametrize("text", ["", "no end", "a\tb\n", "a\r\n", "\x00\n", "\ud800\n"])
def test_texts_that_no_note_can_hold_are_refused(peter: FileSigner, text: str) -> None:
    with pytest.raises(InvalidInputError):
        note.sign(text, "log", peter)


# Signatures


def test_a_wrong_signature_of_a_known_key_spoils_the_note() -> None:
    spoiled = PETER_LINE[:60] + "ABCD" + PETER_LINE[60:]
    for content in (TEXT + "\n" + spoiled, BOTH_NOTE + spoiled, TEXT + "\n" + ENOCH_LINE + spoiled):
        with pytest.raises(SignatureError) as refused:
            opened(content, [PETER_KEY, ENOCH_KEY])
        assert refused.type is SignatureError


def test_signatures_of_unknown_keys_are_ignored_even_under_a_known_name_or_hash() -> None:
    strange = [
        PETER_LINE.replace("PeterNeumann", "CarmenSandiego"),
        PETER_LINE.replace("x08g", "xxxx"),
        ENOCH_LINE[:60] + "ABCD" + ENOCH_LINE[60:],
    ]
    for line in strange:
        assert opened(PETERS_NOTE + line, [PETER_KEY]) == TEXT
        with pytest.raises(UnknownKeyError):
            opened(TEXT + "\n" + line, [PETER_KEY])


def test_a_witness_adds_its_signature(peter: FileSigner, other_signer: FileSigner) -> None:
    log = note.parse(note.sign(TEXT, "log", peter))
    witness = note.parse(note.sign(TEXT, "witness", other_signer))
    both = Note(TEXT, log.signatures + witness.signatures).encode()
    for name, signer in (("log", peter), ("witness", other_signer)):
        assert opened(both, [note.VerifierKey.of(name, signer.public_key).text()]) == TEXT
        assert [key.name for key in note.signers_of(note.parse(both), [VerifierKey.of(name, signer.public_key)])] == [
            name
        ]


def test_two_keys_that_share_name_and_hash_are_refused(peter: FileSigner, other_signer: FileSigner) -> None:
    real = VerifierKey.of("log", peter.public_key)
    clash = replace(real, public_key=other_signer.public_key)
    with pytest.raises(InvalidInputError, match="share"):
        opened(note.sign(TEXT, "log", peter), [real, clash])
    assert opened(note.sign(TEXT, "log", peter), [real, real]) == TEXT


def test_a_hundred_signatures_are_read_and_no_more() -> None:
    assert opened(TEXT + "\n" + PETER_LINE * 100, [PETER_KEY]) == TEXT
    with pytest.raises(SignatureError, match="100"):
        opened(TEXT + "\n" + PETER_LINE * 101, [PETER_KEY])


# Form


@pytest.mark.parametrize(
    "content",
    [
        "",
        "\n",
        "\n\n",
        TEXT,
        TEXT + "\n",
        TEXT + PETER_LINE,
        TEXT + "\n" + PETER_LINE[:-1],
        TEXT + "\n" + PETER_LINE.replace("\n", "\r\n"),
        "\x01" + PETERS_NOTE,
        "\t" + PETERS_NOTE,
        "\ud800" + PETERS_NOTE,
        b"\xff" + PETERS_NOTE.encode(),
        TEXT + "\n" + PETER_LINE.replace("PeterNeumann", "Bad Name"),
        TEXT + "\n" + PETER_LINE.replace("PeterNeumann", ""),
        TEXT + "\n" + PETER_LINE.replace("PeterNeumann", "a+b"),
        TEXT + "\n" + PETER_LINE.replace("— ", "- "),
        TEXT + "\n" + PETER_LINE.replace("— ", "—"),
        TEXT + "\n" + PETER_LINE.replace("=", ""),
        TEXT + "\n" + PETER_LINE.replace("/", "_"),
        TEXT + "\n" + PETER_LINE.replace("AM=", "AN="),
        TEXT + "\n" + "— PeterNeumann x08gow==\n",
        TEXT + "\n" + "— PeterNeumann\n",
        PETERS_NOTE + "Unexpected line.\n",
        PETERS_NOTE + "\n",
        "a" * (note.NOTE_CHARACTERS_MAX + 1),
    ],
)
def test_malformed_notes_are_refused(content: str | bytes) -> None:
    with pytest.raises(SignatureError):
        opened(content, [PETER_KEY])


@pytest.mark.exhaustive
def test_no_flip_of_any_bit_of_a_note_is_accepted() -> None:
    whole = PETERS_NOTE.encode()
    for bit in spread(range(len(whole) * 8), len(whole) * 8 // 3):
        flipped = bytearray(whole)
        flipped[bit // 8] ^= 1 << (bit % 8)
        with pytest.raises(SignatureError):
            opened(bytes(flipped), [PETER_KEY])


@given(content=st.text() | st.binary())
def test_anything_else_is_malformed_and_nothing_worse(content: str | bytes) -> None:
    with pytest.raises(SignatureError):
        opened(content, [PETER_KEY])


@given(text=st.text(st.characters(codec="utf-8", exclude_categories=["Cc"]) | st.just("\n")))
def test_whatever_text_is_signed_comes_out_again(ed25519_signer: FileSigner, text: str) -> None:
    signed = note.sign(text + "\n", "log", ed25519_signer)
    assert opened(signed, [note.VerifierKey.of("log", ed25519_signer.public_key).text()]) == text + "\n"
    assert opened(signed.encode(), [note.VerifierKey.of("log", ed25519_signer.public_key).text()]) == text + "\n"
