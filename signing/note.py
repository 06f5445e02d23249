"""C2SP signed notes (c2sp.org/signed-note): a text and signatures under it.

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

With an ML-DSA-44 key the type is 0x06, whether a witness cosigns or the log itself signs, and ``signed`` is a
``cosigned_message`` of the same document, which also names the signer::

    signature    = time, u64 || ML-DSA-44 signature, 2,420 bytes
    signed       = "subtree/v1\n" 0x00 || length of name, u8 || name || time, u64
                   || length of origin, u8 || origin || 0, u64 || tree size, u64 || root hash, 32 bytes

A log signs with the time 0, as it states none.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any, ClassVar, Final, NamedTuple, Self

from ledger.errors import InvalidInputError, SignatureError, UnknownKeyError, refuse, reported_as
from signing.keys import ED25519, ML_DSA_44, PublicKey, Signer
from signing.strict import decode_base64

NOTE_CHARACTERS_MAX = 2**20
SIGNATURES_MAX = 100
"""As in golang.org/x/mod; the specification requires 16 or more."""

KEY_HASH_BYTES = 4
VERIFIER_CHARACTERS_MAX = 4096
COSIGNED_NAME_BYTES_MAX = 255
"""Longest name of a signer, and of a log, in what an ML-DSA-44 key signs."""
ED25519_TYPE, COSIGNATURE_TYPE, ML_DSA_TYPE = 1, 4, 6
TIME_BYTES = 8
TIME_MAX_S = 253_402_300_799
"""Last second of the year 9999; a later cosignature is invalid."""
_SIGNATURE_BYTES: Final = {ED25519_TYPE: 64, COSIGNATURE_TYPE: TIME_BYTES + 64, ML_DSA_TYPE: TIME_BYTES + 2420}
_RAW_KEY_BYTES: Final = {ED25519: 32, ML_DSA_44: 1312}
_TREE_HEAD = re.compile(r"([^\n]+)\n(0|[1-9][0-9]{0,18})\n([A-Za-z0-9+/]{43}=)\n", re.ASCII)

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

    TYPES: ClassVar[dict[str, int]] = {ED25519: ED25519_TYPE, ML_DSA_44: ML_DSA_TYPE}
    """By algorithm the first byte of the encoded and hashed key."""

    name: str
    key_hash: bytes
    public_key: PublicKey

    @classmethod
    def of(cls, name: str, public_key: PublicKey) -> Self:
        """The key of ``name``.

        Raises:
            InvalidInputError: the name is not allowed, or the key is not Ed25519 or ML-DSA-44.
        """
        if not is_name(name):
            raise InvalidInputError(f"key name {name[:100]!r} is empty or holds a space, plus or control character")
        if public_key.is_second and len(name.encode()) > COSIGNED_NAME_BYTES_MAX:
            raise InvalidInputError(f"key name {name[:100]!r} is longer than {COSIGNED_NAME_BYTES_MAX} bytes")
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
        by_type = {number: algorithm for algorithm, number in cls.TYPES.items()}
        algorithm = by_type.get(typed[0]) if typed else None
        if algorithm is None or len(typed) != 1 + _RAW_KEY_BYTES[algorithm]:
            types = " or ".join(f"{number}, {algorithm}" for number, algorithm in by_type.items())
            raise InvalidInputError(f"verifier key {text[:200]!r} is not of type {types}")
        key = cls.of(name, PublicKey.of_raw(typed[1:], algorithm))
        if key.key_hash.hex() != hash_hex:
            raise InvalidInputError(f"verifier key {text[:200]!r} should have the hash {key.key_hash.hex()}")
        return key

    def text(self) -> str:
        """``name+hash+base64``, as golang.org/x/mod/sumdb/note and C2SP tools read it."""
        return f"{self.name}+{self.key_hash.hex()}+{base64.b64encode(self._typed(self.public_key)).decode()}"

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self).parse, (self.text(),)

    @property
    def kind(self) -> int:
        """The first byte of the encoded and hashed key."""
        return self.TYPES[self.public_key.algorithm]

    def signed(self, text: str, time_s: int) -> bytes:
        """The bytes that the key signs for a note of ``text``; those of type ``ED25519_TYPE`` name no time.

        Raises:
            SignatureError: the key is of ML-DSA-44, and the text is no checkpoint, or its origin is too long.
        """
        if self.kind == ED25519_TYPE:
            return text.encode()
        if self.kind == COSIGNATURE_TYPE:
            return f"cosignature/v1\ntime {time_s}\n{text}".encode()
        match = _TREE_HEAD.match(text)
        origin, name = b"" if match is None else match[1].encode(), self.name.encode()
        if match is None or len(origin) > COSIGNED_NAME_BYTES_MAX:
            raise SignatureError(
                f"{ML_DSA_44} signs checkpoints, of an origin of {COSIGNED_NAME_BYTES_MAX} bytes at most"
            )
        signer = bytes((len(name),)) + name + time_s.to_bytes(TIME_BYTES)
        log = bytes((len(origin),)) + origin + bytes(8) + int(match[2]).to_bytes(8)
        return b"subtree/v1\n\0" + signer + log + base64.b64decode(match[3])

    def time_of(self, text: str, line: NoteSignature) -> int:
        """The time in seconds that ``line`` under a note of ``text`` states, verified; 0 of one that states none.

        Raises:
            SignatureError: this key did not make it.
        """
        size, start = _SIGNATURE_BYTES[self.kind], 0 if self.kind == ED25519_TYPE else TIME_BYTES
        time_s = int.from_bytes(line.signature[:start])
        is_made = len(line.signature) == size and self.public_key.made(
            line.signature[start:], self.signed(text, time_s)
        )
        refuse(
            SignatureError,
            (len(line.signature) != size, f"the signature by {self.name} is not {size} bytes"),
            (time_s > TIME_MAX_S, f"the signature by {self.name} names no time"),
            (not is_made, f"the note's signature by {self.name}+{self.key_hash.hex()} does not hold"),
        )
        return time_s

    def line(self, text: str, signer: Signer, time_s: int = 0) -> NoteSignature:
        """The signature line of this key, which is that of ``signer``, under a note of ``text``.

        Raises:
            SignatureError: as ``signed``.
            SigningUnavailableError: the signer cannot be reached.
        """
        time = b"" if self.kind == ED25519_TYPE else time_s.to_bytes(TIME_BYTES)
        return NoteSignature(self.name, self.key_hash, time + signer.sign(self.signed(text, time_s)))

    @classmethod
    def _typed(cls, public_key: PublicKey) -> bytes:
        return bytes((cls.TYPES.get(public_key.algorithm, 0),)) + public_key.raw()


def sign(text: str, name: str, *signers: Signer) -> str:
    """The note of ``text`` with a signature by each of ``signers`` under ``name``.

    Raises:
        InvalidInputError: text or name are not allowed in a note, or a key is not Ed25519 or ML-DSA-44.
        SignatureError: one is of ML-DSA-44, and the text is no checkpoint that such a key can sign.
        SigningUnavailableError: a signer cannot be reached.
    """
    keys = [VerifierKey.of(name, signer.public_key) for signer in signers]
    if not text.endswith("\n") or not _is_clean(text):
        raise InvalidInputError("a note's text must end in a newline and hold no other control character")
    return Note(text, tuple(key.line(text, signer) for key, signer in zip(keys, signers, strict=True))).encode()


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
        signer.time_of(note.text, line)
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


class WitnessKey(VerifierKey):
    """The public key of a witness under its name."""

    __slots__ = ()
    TYPES: ClassVar[dict[str, int]] = {ED25519: COSIGNATURE_TYPE, ML_DSA_44: ML_DSA_TYPE}


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
        Cosignature(witness, datetime.fromtimestamp(witness.time_of(note.text, line), UTC), line)
        for line in note.signatures
        if (witness := known.get((line.name, line.key_hash))) is not None
    ]
