"""Judging what outsiders said of checkpoints: a stored statement is compared with the chain only when it holds.

A statement is of this log when its checkpoint is one that the log signed under this origin; what stands beside it in
the row is not believed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Final, NamedTuple

from cryptography import x509

from ledger.errors import SignatureError, UnknownKeyError
from ledger.verification.tree_check import Anchor
from signing import note as notes
from signing.checkpoint import Checkpoint
from signing.cosignature import WitnessKey, cosignatures_of
from signing.files import open_regular
from signing.keys import Keyring
from signing.timestamp import IS_AVAILABLE, load_authorities, open_timestamp, require_available

WITNESS, RFC_3161 = "witness", "rfc3161"
KEY_FILE_BYTES_MAX: Final = 4096
"""A file with the verifier key of a witness is read so far."""

OpenNote = Callable[[str, datetime], Checkpoint]
"""The checkpoint in a note that this tenant's log had signed by that time; raises SignatureError for any other."""


class Outsiders(NamedTuple):
    """Whom the caller trusts to have seen the log."""

    witnesses: Sequence[WitnessKey]
    roots: Sequence[x509.Certificate]

    @classmethod
    def load(cls, witness_keys: Sequence[str], tsa_ca: Path | None) -> Outsiders:
        """Those of the command line; a witness's key is the text of one, or a file that holds it.

        Raises:
            InvalidInputError: a witness key is malformed.
            ConfigurationError: the CA file is, or time stamps cannot be judged here.
            OSError: the file of a witness key cannot be read.
        """
        if tsa_ca is not None:
            require_available()
        roots = load_authorities(tsa_ca) if tsa_ca is not None else ()
        return cls([WitnessKey.parse(_key_text(given)) for given in witness_keys], roots)

    @property
    def are_any(self) -> bool:
        """Whether there is anybody."""
        return bool(self.witnesses or self.roots)


NOBODY: Final = Outsiders((), ())


def _key_text(given: str) -> str:
    """A verifier key, which holds a plus; else what the file of that name holds."""
    if "+" in given:
        return given
    with open_regular(given) as file:
        return file.read(KEY_FILE_BYTES_MAX).decode("utf-8", "replace").strip()


def as_of(keyring: Keyring, time: datetime) -> Keyring:
    """``keyring`` as it was at ``time``: what an outsider saw before a key was revoked still counts."""
    time_ms = time.timestamp() * 1000
    keys = [
        replace(key, revoked_from_hlc=None)
        if key.revoked_from_hlc is not None and time_ms < key.revoked_from_hlc.physical_ms
        else key
        for key in keyring
    ]
    return Keyring(keys, keyring.log_verifier_keys)


class Said(NamedTuple):
    """What somebody outside said of the checkpoint in ``note``: as a witness, whose verifier key ``by`` is and whose
    line is in the note, or as an authority at that address, in its ``response``. ``size`` and ``time`` are what it is
    said to have said, for a report on one that does not hold."""

    kind: str
    by: str
    note: str
    size: int
    time: datetime
    response: bytes = b""


def judge(
    said: Said, witnesses: Iterable[WitnessKey], roots: Sequence[x509.Certificate], open_note: OpenNote
) -> Anchor:
    """What was said, if one of ``witnesses`` did, or an authority that leads to one of ``roots``."""
    name = said.by.partition("+")[0] if said.kind == WITNESS else said.by
    unjudged = Anchor(said.kind, name, rfc_3339(said.time), said.size, b"", "not_checked")
    try:
        if said.kind == WITNESS:
            (found,) = cosignatures_of(notes.parse(said.note), [each for each in witnesses if each.text() == said.by])
            time = found.time
        elif not roots:
            return unjudged._replace(detail="no CA file is given for this authority")
        elif not IS_AVAILABLE:
            return unjudged._replace(detail="the package rfc3161-client is not installed")
        else:
            time = open_timestamp(said.response, said.note.encode(), roots)
        checkpoint = open_note(said.note, time)
    except UnknownKeyError as error:
        return unjudged._replace(detail=str(error))
    except (SignatureError, ValueError) as error:
        what = "the cosignature does not hold: " if said.kind == WITNESS else ""
        return unjudged._replace(status="invalid", detail=f"{what}{error}")
    return Anchor(said.kind, name, rfc_3339(time), checkpoint.size, checkpoint.root)


def rfc_3339(time: datetime) -> str:
    """``time`` in UTC, ending in Z."""
    return time.astimezone(UTC).isoformat().replace("+00:00", "Z")
