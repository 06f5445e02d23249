"""Checkpoints (c2sp.org/tlog-checkpoint): the signed head of one tenant's Merkle log.

The text of a signed note, three lines, then lines that may follow and are ignored::

    origin     names the log; also the key name of the log's signatures
    tree size  decimal, no leading zeros
    root hash  base64 of 32 bytes, RFC 9162 root at that size

Invariants::

    0 <= size <= SIZE_MAX        len(root) == 32        origin holds no space, plus or control character
    a log never signs two checkpoints of which neither's tree extends the other's (kept by the caller)

An origin holds no space, and the bytes that DSSE signs begin with ``DSSEv1`` and a space: so one key can sign both.

A log with a second key signs with both: a line of type 0x01 and one of type 0x06 (signing.note).
"""

from __future__ import annotations

import base64
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from ledger.errors import InvalidInputError, SignatureError, UnknownKeyError, refuse
from ledger.verification.tree_check import TreeHead
from signing import note
from signing.files import read_bounded
from signing.keys import Keyring, PublicKey, Signer
from signing.note import Note, VerifierKey
from signing.strict import decode_base64

ROOT_BYTES = 32
SIZE_MAX = 2**63 - 1
KEPT_BYTES_MAX = 1 << 20
"""Longest text that may be a kept checkpoint."""
FILE = "file"
"""Name of a kept checkpoint in ``compared_with``."""

_SIZE = re.compile(r"0|[1-9][0-9]{0,18}", re.ASCII)


class Checkpoint(NamedTuple):
    """The head of the log ``origin``: ``size`` leaves under ``root`` (32 bytes)."""

    origin: str
    size: int
    root: bytes

    def to_json(self) -> dict[str, Any]:
        """As plain values."""
        return {"origin": self.origin, "size": self.size, "root": self.root.hex()}


def body(checkpoint: Checkpoint) -> str:
    """The text that is signed."""
    assert 0 <= checkpoint.size <= SIZE_MAX
    assert len(checkpoint.root) == ROOT_BYTES
    return f"{checkpoint.origin}\n{checkpoint.size}\n{base64.b64encode(checkpoint.root).decode()}\n"


def parse(text: str) -> Checkpoint:
    """The checkpoint in the text of a note; lines after the third are ignored.

    Raises:
        SignatureError: malformed.
    """
    lines = text.split("\n")
    if len(lines) < 4 or lines.pop() != "" or "" in lines:
        raise SignatureError("a checkpoint is three or more lines, none of them empty")
    origin, size, root_base64 = lines[:3]
    root = decode_base64(root_base64, "root hash of the checkpoint")
    is_size = bool(_SIZE.fullmatch(size)) and int(size) <= SIZE_MAX
    refuse(
        SignatureError,
        (not is_size, f"tree size {size[:40]!r} of the checkpoint is no number up to {SIZE_MAX}"),
        (len(root) != ROOT_BYTES, f"root hash of the checkpoint has {len(root)} bytes, not {ROOT_BYTES}"),
    )
    return Checkpoint(origin, int(size), root)


def read(text: str | bytes) -> Checkpoint:
    """The checkpoint in a note; no signature is verified.

    Raises:
        SignatureError: malformed.
    """
    return parse(note.parse(text).text)


def read_kept(path: Path) -> str:
    """The text of a checkpoint that was kept in a file; bytes that are not UTF-8 are replaced, so they do not parse.

    Raises:
        InvalidInputError: it is too long for a checkpoint.
        OSError: the file cannot be read.
    """
    return read_bounded(path, KEPT_BYTES_MAX, "a checkpoint", InvalidInputError).decode("utf-8", "replace")


def sign_checkpoint(checkpoint: Checkpoint, *signers: Signer) -> str:
    """The note of ``checkpoint``, signed by each of ``signers``; the name of their keys is the origin.

    The caller MUST make sure that the tree extends every tree it signed before under this origin.

    Raises:
        InvalidInputError: the origin is not allowed, or a key is not Ed25519 or ML-DSA-44.
        SigningUnavailableError: a signer cannot be reached.
    """
    return note.sign(body(checkpoint), checkpoint.origin, *signers)


def open_checkpoint(
    text: str | bytes, keys: Keyring | Iterable[VerifierKey | str], *, origin: str | None = None
) -> Checkpoint:
    """The checkpoint in a signed note, once a signature by its log is verified.

    ``keys`` are verifier keys, or a ring: its Ed25519 and ML-DSA-44 keys then verify under the name of any log, and its
    ``log_verifier_keys`` under their own. A checkpoint carries no time, so a revoked key of a ring is never valid.
    With ``origin``, a checkpoint of any other log is rejected.

    Raises:
        UnknownKeyError: none of the keys signed it in the log's name, or not both that the ring demands.
        SignatureError: malformed, of another log, or a known key's signature is invalid.
        InvalidInputError: a verifier key is malformed.
    """
    # 1. A note that holds a checkpoint of the log in question.
    parsed = note.parse(text)
    checkpoint = parse(parsed.text)
    named = repr(checkpoint.origin[:200])
    refuse(
        SignatureError,
        (origin not in (None, checkpoint.origin), f"the checkpoint is of log {named}, not of {origin!r}"),
        (not note.is_name(checkpoint.origin), f"origin {named} of the checkpoint cannot name a key"),
    )
    # 2. Signed by known keys, one of them in the log's name: a witness alone does not make a checkpoint.
    signers = note.signers_of(parsed, _verifiers(keys, checkpoint.origin) if isinstance(keys, Keyring) else keys)
    logs_own = [key.public_key for key in signers if key.name == checkpoint.origin]
    lacking = keys.lacks(logs_own) if isinstance(keys, Keyring) else None
    refuse(
        UnknownKeyError,
        (not logs_own, f"none of the keys that signed the checkpoint is one of log {named}"),
        (lacking is not None, f"the checkpoint carries {lacking}"),
    )
    return checkpoint


def signer_of(text: str | bytes, keyring: Keyring) -> PublicKey:
    """The first key of ``keyring`` that signed a checkpoint in its log's name.

    Raises:
        UnknownKeyError: none of them did.
        SignatureError: malformed, or a known key's signature is invalid.
    """
    return _signers(note.parse(text), keyring)[0].public_key


def signed_by(text: str | bytes, keyring: Keyring) -> str:
    """The note of a checkpoint with only the signatures that keys of ``keyring`` made in its log's name. Anyone can add
    lines that no known key verifies.

    Raises:
        UnknownKeyError: none of them signed it.
        SignatureError: malformed, or a known key's signature is invalid.
    """
    parsed = note.parse(text)
    known = {(key.name, key.key_hash) for key in _signers(parsed, keyring)}
    lines = dict.fromkeys(each for each in parsed.signatures if (each.name, each.key_hash) in known)
    return parsed._replace(signatures=tuple(lines)).encode()


class JudgedCheckpoint(NamedTuple):
    """A checkpoint, and why no held key vouches for it; None if one does, and if no keys are held."""

    checkpoint: Checkpoint
    unknown: str | None

    @property
    def heads(self) -> list[TreeHead]:
        """The tree head to compare a log with; none if no key vouches for it."""
        return [] if self.unknown is not None else [TreeHead(self.checkpoint.size, self.checkpoint.root, FILE)]


def judge_checkpoint(text: str, keyring: Keyring | None) -> JudgedCheckpoint:
    """The checkpoint in a signed note, verified by the keys of ``keyring``; without it no key vouches for it.

    Raises:
        SignatureError: malformed, or it names a held key that did not sign it.
    """
    parsed = read(text)
    if keyring is None:
        return JudgedCheckpoint(parsed, None)
    try:
        return JudgedCheckpoint(open_checkpoint(text, keyring), None)
    except UnknownKeyError as error:
        return JudgedCheckpoint(parsed, str(error))


def judge_kept(text: str, keyring: Keyring | None) -> JudgedCheckpoint:
    """``judge_checkpoint``, of one that the verifier kept. It counts against a log, and never for it: one signature is
    enough, also where two are demanded.

    Raises:
        SignatureError: as ``judge_checkpoint``.
    """
    return judge_checkpoint(text, None if keyring is None else keyring.demanding_one())


def judge_unvouched(verdict: dict[str, Any], unknown: str | None, keyring: Keyring | None) -> None:
    """Put into the verdict object that no key vouches for the checkpoint, if the entries agree with it; ``unknown`` is
    why no key of ``keyring`` does."""
    aspects = verdict["verdicts"]
    if aspects["checkpoint"] != "broken" and unknown is not None:
        aspects["checkpoint"], verdict["valid"] = "unknown_key", False
    elif aspects["checkpoint"] == "ok" and keyring is None:
        aspects["checkpoint"] = "not_checked"


def log_keys(origin: str, keys: Iterable[PublicKey]) -> list[VerifierKey]:
    """Those of ``keys`` that can sign checkpoints, under the name of the log ``origin``; of an origin that is too long
    for ML-DSA-44 only the Ed25519 keys."""
    is_short = len(origin.encode()) <= note.COSIGNED_NAME_BYTES_MAX
    return [
        VerifierKey.of(origin, key)
        for key in keys
        if key.algorithm in VerifierKey.TYPES and (is_short or not key.is_second)
    ]


def _signers(parsed: Note, keyring: Keyring) -> tuple[VerifierKey, ...]:
    """The keys of the ring that signed a checkpoint in its log's name, at least one."""
    origin = parse(parsed.text).origin
    return note.signers_of(parsed, [key for key in _verifiers(keyring, origin) if key.name == origin])


def _verifiers(keyring: Keyring, origin: str) -> tuple[VerifierKey, ...]:
    revoked = {key.key_id for key in keyring if key.revoked_from_hlc is not None}
    verifiers = (*log_keys(origin, keyring), *map(VerifierKey.parse, keyring.log_verifier_keys))
    return tuple(key for key in verifiers if key.public_key.key_id not in revoked)
