"""C2SP signed notes (c2sp.org/signed-note): a text and Ed25519 signatures under it.

Format, UTF-8, no control characters but newline::

    text, one or more lines, the last one ending in a newline
    an empty line
    one line a signature: EM DASH, space, key name, space, base64(key hash, 4 bytes || signature)

    key hash     = SHA-256(key name || 0x0A || 0x01 || 32-byte Ed25519 public key)[:4]
    verifier key = name "+" key hash in hex "+" base64(0x01 || public key)

The text is signed with its last newline, without the empty line. It may hold empty lines; the last empty
line of the note ends it. Worked example, from golang.org/x/mod/sumdb/note::

    PeterNeumann+c74f20a3+ARpc2QcUPDhMQegwxbzhKqiBfsVkmqq/LDE4izWy10TW

A cosignature is the line of a witness under a checkpoint (c2sp.org/tlog-cosignature, ``cosignature/v1``)::

    signature    = time, u64 big-endian, POSIX seconds || Ed25519 signature, 64 bytes
    signed       = "cosignature/v1\n" "time " time in decimal "\n" text of the note
    key hash     = SHA-256(name || 0x0A || 0x04 || 32-byte public key)[:4]
    verifier key = name "+" key hash in hex "+" base64(0x04 || public key)

It states that at that time this was the largest tree of this origin that the witness had seen, and that it extends
every tree that the witness had seen before. 0 <= time < 2^63.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar, NamedTuple, Self

from ledger.errors import InvalidInputError, SignatureError, UnknownKeyError, refuse, reported_as
from signing.keys import PublicKey, Signer
from signing.strict import decode_base64

NOTE_CHARACTERS_MAX = 2**20
SIGNATURES_MAX = 100
"""As in golang.org/x/mod; the specification requires 16 or more."""

KEY_HASH_BYTES = 4
VERIFIER_CHARACTERS_MAX = 1024
ED25519_TYPE, COSIGNATURE_TYPE = 1, 4
_KINDS = {ED25519_TYPE: "Ed25519", COSIGNATURE_TYPE: "timestamped Ed25519 cosignatures"}

_SIGNATURE_MARK = "— "
_unclean = re.compile(r"[\x00-\t\x0b-\x1f\ud800-\udfff]").search


class NoteSignature(NamedTuple):
    """One signature line: key name, key hash (4 bytes), and the bytes of the signature."""

    name: str
    key_hash: bytes
    signature: bytes

    def line(self) -> str:
        """The line in a note, newline included."""
        return f"{_SIGNATURE_MARK}{self.name} {base64.b64encode(self.key_hash + self.signature).decode()}\n"


class Note(NamedTuple):
    """A well-formed note; nothing in it is verified. Witnesses append to ``signatures``."""

    text: str
    signatures: tuple[NoteSignature, ...]

    def encode(self) -> str:
        """The note as text."""
        return self.text + "\n" + "".join(signature.line() for signature in self.signatures)


@dataclass(frozen=True, slots=True)
class VerifierKey:
    """A public key under a name, for one kind of signature; name and hash together identify it."""

    KIND: ClassVar[int] = ED25519_TYPE
    """The first byte of the encoded and hashed key."""

    name: str
    key_hash: bytes
    public_key: PublicKey

    @classmethod
    def of(cls, name: str, public_key: PublicKey) -> Self:
        """The key of ``name``.

        Raises:
            InvalidInputError: the name is not allowed, or the key is not Ed25519.
        """
        if not is_name(name):
            raise InvalidInputError(f"key name {name[:100]!r} is empty or holds a space, plus or control character")
        return cls(name, cls.hash_of(name, public_key), public_key)

    @classmethod
    def hash_of(cls, name: str, public_key: PublicKey) -> bytes:
        """The hash by which a signature line identifies the key, beside its name."""
        return hashlib.sha256(name.encode() + b"\n" + cls._typed(public_key)).digest()[:KEY_HASH_BYTES]

    @classmethod
    def parse(cls, text: str) -> Self:
        """The key encoded as ``name+hash+base64``.

        Raises:
            InvalidInputError: malformed, of another kind, or the hash is not that of name and key.
        """
        name, _, rest = text[:VERIFIER_CHARACTERS_MAX].partition("+")
        hash_hex, _, encoded = rest.partition("+")
        with reported_as(InvalidInputError, f"verifier key {text[:200]!r} is malformed", SignatureError):
            typed = decode_base64(encoded, "the key")
        if len(typed) != 33 or typed[0] != cls.KIND:
            raise InvalidInputError(f"verifier key {text[:200]!r} is not of type {cls.KIND}, {_KINDS[cls.KIND]}")
        key = cls.of(name, PublicKey.of_ed25519(typed[1:]))
        if key.key_hash.hex() != hash_hex:
            raise InvalidInputError(f"verifier key {text[:200]!r} should have the hash {key.key_hash.hex()}")
        return key

    def text(self) -> str:
        """``name+hash+base64``, as golang.org/x/mod/sumdb/note and C2SP tools read it."""
        return f"{self.name}+{self.key_hash.hex()}+{base64.b64encode(self._typed(self.public_key)).decode()}"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).parse, (self.text(),)

    @classmethod
    def _typed(cls, public_key: PublicKey) -> bytes:
        return bytes((cls.KIND,)) + public_key.ed25519_bytes()


def sign(text: str, name: str, signer: Signer) -> str:
    """The note of ``text`` with one signature by ``signer`` under ``name``.

    Raises:
        InvalidInputError: text or name are not allowed in a note, or the key is not Ed25519.
        SigningUnavailableError: the signer cannot be reached.
    """
    key = VerifierKey.of(name, signer.public_key)
    if not text.endswith("\n") or not _is_clean(text):
        raise InvalidInputError("a note's text must end in a newline and hold no other control character")
    return Note(text, (NoteSignature(name, key.key_hash, signer.sign(text.encode())),)).encode()


def parse(note: str | bytes) -> Note:
    """The parts of a note, unverified.

    Raises:
        SignatureError: malformed or over a bound.
    """
    if len(note) > NOTE_CHARACTERS_MAX:
        raise SignatureError(f"the note is longer than {NOTE_CHARACTERS_MAX} characters")
    try:
        content = note.decode() if isinstance(note, bytes) else note
    except UnicodeDecodeError as error:
        raise SignatureError("the note is not UTF-8") from error
    end = content.rfind("\n\n")
    *lines, rest = content[end + 2 :].split("\n")
    has_signatures = end >= 0 and bool(lines) and not rest
    refuse(
        SignatureError,
        (not _is_clean(content), "the note holds a control character or a lone surrogate"),
        (not has_signatures, "the note has no signatures after an empty line, or its last line has no end"),
        (len(lines) > SIGNATURES_MAX, f"the note has more than {SIGNATURES_MAX} signatures"),
    )
    return Note(content[: end + 1], tuple(_signature(line) for line in lines))


def _signature(line: str) -> NoteSignature:
    name, _, encoded = line.removeprefix(_SIGNATURE_MARK).partition(" ")
    if not line.startswith(_SIGNATURE_MARK) or not is_name(name):
        raise SignatureError(f"signature line {line[:100]!r} of the note is malformed")
    data = decode_base64(encoded, "a signature of the note")
    if len(data) <= KEY_HASH_BYTES:
        raise SignatureError(f"signature line {line[:100]!r} of the note holds no signature")
    return NoteSignature(name, data[:KEY_HASH_BYTES], data[KEY_HASH_BYTES:])


def signers_of(note: Note, verifiers: Iterable[VerifierKey | str]) -> tuple[VerifierKey, ...]:
    """The verifiers that signed ``note``, at least one. Signatures of others are ignored.

    Raises:
        UnknownKeyError: none of them signed it.
        SignatureError: one of them is named, and its signature is invalid.
        InvalidInputError: a verifier key is malformed, or two share name and hash.
    """
    known: dict[tuple[str, bytes], VerifierKey] = {}
    for item in verifiers:
        key = VerifierKey.parse(item) if isinstance(item, str) else item
        if known.setdefault((key.name, key.key_hash), key).public_key.key_id != key.public_key.key_id:
            raise InvalidInputError(f"two verifier keys share {key.name}+{key.key_hash.hex()}; give only one")
    lines = [line for line in note.signatures if (line.name, line.key_hash) in known]
    signers = [known[line.name, line.key_hash] for line in lines]
    for line, signer in zip(lines, signers, strict=True):
        if not signer.public_key.made(line.signature, note.text.encode()):
            raise SignatureError(f"the note's signature by {line.name}+{line.key_hash.hex()} does not hold")
    if not signers:
        names = ", ".join(f"{name!r}+{key_hash.hex()}" for name, key_hash, _ in note.signatures[:8])
        raise UnknownKeyError(f"none of the keys that signed the note is known: {names}")
    return tuple(dict.fromkeys(signers))


def is_signed_by(note: str | bytes, name: str, public_key: PublicKey) -> bool:
    """Whether ``note`` names ``public_key`` under ``name`` as a signer; the signature is not verified.

    Raises:
        SignatureError: malformed.
    """
    return (name, VerifierKey.hash_of(name, public_key)) in {
        (each.name, each.key_hash) for each in parse(note).signatures
    }


def is_name(name: str) -> bool:
    """Whether ``name`` may be the name of a key: not empty, no space, plus or control character."""
    return bool(name) and "+" not in name and _is_clean(name) and not any(map(str.isspace, name))


def _is_clean(text: str) -> bool:
    return _unclean(text) is None


SIGNATURE_BYTES = 64
TIME_MAX_S = 253_402_300_799
"""Last second of the year 9999; a later cosignature is invalid."""

_TIME_BYTES = 8


class WitnessKey(VerifierKey):
    """The public key of a witness under its name."""

    __slots__ = ()
    KIND = COSIGNATURE_TYPE


class Cosignature(NamedTuple):
    """A verified cosignature: its witness, its time, and its line in the note."""

    witness: WitnessKey
    time: datetime
    line: NoteSignature


def cosignatures_of(note: Note, witnesses: Iterable[WitnessKey]) -> list[Cosignature]:
    """The cosignatures of ``witnesses`` under ``note``, in the note's order; lines of others are ignored.

    Raises:
        SignatureError: one of them is named, and its cosignature is invalid.
    """
    known = {(witness.name, witness.key_hash): witness for witness in witnesses}
    return [
        Cosignature(witness, _verified_time(note.text, line, witness), line)
        for line in note.signatures
        if (witness := known.get((line.name, line.key_hash))) is not None
    ]


def _verified_time(text: str, line: NoteSignature, witness: WitnessKey) -> datetime:
    size, time_s = _TIME_BYTES + SIGNATURE_BYTES, int.from_bytes(line.signature[:_TIME_BYTES])
    is_made = witness.public_key.made(line.signature[_TIME_BYTES:], f"cosignature/v1\ntime {time_s}\n{text}".encode())
    refuse(
        SignatureError,
        (len(line.signature) != size, f"the cosignature by {witness.name} is not {size} bytes"),
        (time_s > TIME_MAX_S, f"the cosignature by {witness.name} names no time"),
        (not is_made, f"the cosignature by {witness.name}+{witness.key_hash.hex()} does not hold"),
    )
    return datetime.fromtimestamp(time_s, UTC)
