"""Cosignatures of witnesses on checkpoints (c2sp.org/tlog-cosignature), the Ed25519 kind, ``cosignature/v1``.

One more signature line under a checkpoint::

    signature    = time, u64 big-endian, POSIX seconds || Ed25519 signature, 64 bytes
    signed       = "cosignature/v1\\n" "time " time in decimal "\\n" text of the note
    key hash     = SHA-256(name || 0x0A || 0x04 || 32-byte public key)[:4]
    verifier key = name "+" key hash in hex "+" base64(0x04 || public key)

It says that at that time the largest tree of this origin that the witness had seen, and found to extend all it had
seen before, was this one. 0 <= time < 2^63.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from datetime import UTC, datetime
from typing import NamedTuple

from ledger.errors import SignatureError
from signing.note import COSIGNATURE_TYPE, Note, NoteSignature, VerifierKey

SIGNATURE_BYTES = 64
TIME_MAX_S = 253_402_300_799
"""Last second of the year 9999; no true cosignature lies beyond."""

_TIME_BYTES = 8


class WitnessKey(VerifierKey):
    """The public key of a witness under its name."""

    __slots__ = ()
    KIND = COSIGNATURE_TYPE


class Cosignature(NamedTuple):
    """A cosignature that holds: whose, of when, and its line in the note."""

    witness: WitnessKey
    time: datetime
    line: NoteSignature


def cosignatures_of(note: Note, witnesses: Iterable[WitnessKey]) -> list[Cosignature]:
    """The cosignatures of ``witnesses`` under ``note``, in the note's order; lines of others are ignored.

    Raises:
        SignatureError: one of them is named, and its cosignature does not hold.
    """
    known = {(witness.name, witness.key_hash): witness for witness in witnesses}
    found = []
    for line in note.signatures:
        witness = known.get((line.name, line.key_hash))
        if witness is not None:
            found.append(Cosignature(witness, _verified_time(note.text, line, witness), line))
    return found


def _verified_time(text: str, line: NoteSignature, witness: WitnessKey) -> datetime:
    if len(line.signature) != _TIME_BYTES + SIGNATURE_BYTES:
        raise SignatureError(f"the cosignature by {witness.name} is not {_TIME_BYTES + SIGNATURE_BYTES} bytes")
    (time_s,) = struct.unpack_from(">Q", line.signature)
    if time_s > TIME_MAX_S:
        raise SignatureError(f"the cosignature by {witness.name} names no time")
    signed = f"cosignature/v1\ntime {time_s}\n{text}"
    if not witness.public_key.made(line.signature[_TIME_BYTES:], signed.encode()):
        raise SignatureError(f"the cosignature by {witness.name}+{witness.key_hash.hex()} does not hold")
    return datetime.fromtimestamp(time_s, UTC)
