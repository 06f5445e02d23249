"""Judging what external witnesses said of checkpoints: a statement is compared with the chain only when it holds.

A statement is of this log when its checkpoint is one that the log signed under this origin; what stands beside it in
the row is not believed.

A bundle has them in its member ``anchors.json``, a receipt in its field ``anchors``:
canonical JSON, described in docs/formats/bundle.md::

    {"anchors":[{"by":..., "checkpoint":NOTE, "consistency":[64 hex digits, ...], "kind":"witness" or "rfc3161",
                 "response":"" or base64 of a TimeStampResp, "time":...}, ...]}

``consistency`` proves that the tree of the bundle's own checkpoint extends that of NOTE. Who exported the bundle could
leave a statement out, so one that agrees proves nothing for it; one that holds and disagrees is a rollback.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple

import msgspec
from cryptography import x509
from msgspec import Meta

from ledger import canonical
from ledger.chain.form import Hash
from ledger.errors import BundleInvalidError, CanonicalError, ProofError, SignatureError, UnknownKeyError
from ledger.merkle import verify_consistency
from ledger.verification.verdict import Anchor, rollback, with_break
from signing import note as notes
from signing.checkpoint import Checkpoint, open_checkpoint
from signing.checkpoint import read as read_checkpoint
from signing.files import open_regular
from signing.keys import Keyring
from signing.manifest import CONSISTENCY_HASHES_MAX
from signing.note import WitnessKey, cosignatures_of
from signing.strict import decode_base64
from signing.timestamp import IS_AVAILABLE, load_authorities, open_timestamp, require_available

WITNESS, RFC_3161 = "witness", "rfc3161"
KEY_FILE_BYTES_MAX: Final = 4096
"""A file with the verifier key of a witness is read so far."""

OpenNote = Callable[[str, datetime], Checkpoint]
"""The checkpoint in a note that this tenant's log had signed by that time; raises SignatureError for any other."""


class ExternalWitnesses(NamedTuple):
    """The witnesses and time-stamping authorities that the caller trusts to have seen the log."""

    witnesses: Sequence[WitnessKey]
    roots: Sequence[x509.Certificate]

    @classmethod
    def load(cls, witness_keys: Sequence[str], tsa_ca: Path | None) -> ExternalWitnesses:
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


NOBODY: Final = ExternalWitnesses((), ())


def _key_text(given: str) -> str:
    """A verifier key, which holds a plus; else what the file of that name holds."""
    if "+" in given:
        return given
    with open_regular(given) as file:
        return file.read(KEY_FILE_BYTES_MAX).decode("utf-8", "replace").strip()


def as_of(keyring: Keyring, time: datetime) -> Keyring:
    """``keyring`` as it was at ``time``: what an external witness saw before a key was revoked still counts."""
    time_ms = time.timestamp() * 1000
    keys = [
        replace(key, revoked_from_hlc=None)
        if key.revoked_from_hlc is not None and time_ms < key.revoked_from_hlc.physical_ms
        else key
        for key in keyring
    ]
    return Keyring(keys, keyring.log_verifier_keys)


class StoredAnchor(NamedTuple):
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
    said: StoredAnchor, witnesses: Iterable[WitnessKey], roots: Sequence[x509.Certificate], open_note: OpenNote
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


ANCHORS_MAX: Final = 128


class BundledAnchor(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """One statement, as the ledger had it. ``by`` is a witness's verifier key, or an authority's address."""

    by: Annotated[str, Meta(max_length=2048)]
    checkpoint: str
    consistency: Annotated[list[Hash], Meta(max_length=CONSISTENCY_HASHES_MAX)]
    kind: Literal["rfc3161", "witness"]
    response: str
    time: Annotated[str, Meta(max_length=64)]


class _Member(msgspec.Struct, forbid_unknown_fields=True):
    anchors: Annotated[list[BundledAnchor], Meta(min_length=1, max_length=ANCHORS_MAX)]


class Unproven(NamedTuple):
    """A statement about the first ``size`` entries; ``made`` takes the proof that the log still has them."""

    size: int
    made: Callable[[Sequence[bytes]], BundledAnchor]


def encode_anchors(anchors: Iterable[BundledAnchor]) -> bytes:
    """The bytes of the member."""
    return canonical.encode(msgspec.to_builtins(_Member([*anchors])))


def decode_anchors(data: bytes) -> list[BundledAnchor]:
    """What the member holds; nothing of it is judged.

    Raises:
        BundleInvalidError: it is malformed, or not in its one spelling.
    """
    try:
        anchors = msgspec.json.decode(data, type=_Member).anchors
    except (msgspec.MsgspecError, UnicodeError) as error:
        raise BundleInvalidError(f"anchors.json is malformed: {error}") from error
    try:
        is_canonical = encode_anchors(anchors) == data
    except CanonicalError as error:
        raise BundleInvalidError(f"anchors.json is malformed: {error}") from error
    if not is_canonical:
        raise BundleInvalidError("anchors.json is not in canonical form")
    return anchors


def with_anchors(
    verdict: dict[str, Any],
    anchors: Sequence[BundledAnchor],
    own: Checkpoint,
    keyring: Keyring | None,
    outsiders: ExternalWitnesses,
) -> dict[str, Any]:
    """``verdict`` on a file with what external witnesses said of its log, whose checkpoint here is ``own`` and which
    the keys of ``keyring`` sign; what holds and disagrees is a break."""
    results = []
    for each in anchors:
        anchor = _stated(each, own, keyring, outsiders)
        try:
            if anchor.status == "ok":
                hashes = [bytes.fromhex(text) for text in each.consistency]
                verify_consistency(anchor.size, own.size, anchor.root, own.root, hashes)
        except ProofError as error:
            detail = f"the log does not begin with what the {anchor.kind} anchor by {anchor.by} is of: {error}"
            root = own.root.hex() if own.size == anchor.size else None
            verdict = with_break(verdict, rollback(anchor.size, detail, anchor.root.hex(), root))
            anchor = anchor._replace(status="broken", detail=detail)
        results.append(anchor.to_json())
    return {**verdict, "anchors": results}


def _stated(bundled: BundledAnchor, own: Checkpoint, keyring: Keyring | None, outsiders: ExternalWitnesses) -> Anchor:
    """What the external witness said, whether or not the log is so."""
    name = bundled.by.partition("+")[0] if bundled.kind == WITNESS else bundled.by
    unjudged = Anchor(bundled.kind, name, bundled.time, 0, b"", "not_checked")
    try:
        size = read_checkpoint(bundled.checkpoint).size
        stated = datetime.fromisoformat(bundled.time).astimezone(UTC)
        response = decode_base64(bundled.response, "the time stamp")
    except (SignatureError, ValueError, OverflowError) as error:
        return unjudged._replace(status="invalid", detail=f"it is malformed: {error}")
    unjudged = unjudged._replace(size=size)
    if not 1 <= size <= own.size:
        return unjudged._replace(detail=f"it covers {size} entries, the checkpoint here {own.size}")
    if keyring is None:
        return unjudged._replace(detail="no key was given, so nobody vouches for its checkpoint")
    ring = keyring

    def open_note(text: str, time: datetime) -> Checkpoint:
        return open_checkpoint(text, as_of(ring, time), origin=own.origin)

    if bundled.kind == WITNESS and bundled.by not in {witness.text() for witness in outsiders.witnesses}:
        return unjudged._replace(detail="its key is not among those given with --witness-key")
    said = StoredAnchor(bundled.kind, bundled.by, bundled.checkpoint, size, stated, response)
    return judge(said, outsiders.witnesses, outsiders.roots, open_note)


def cosignature(by: str, note: str, time: str, consistency: Sequence[bytes]) -> BundledAnchor:
    """A witness's, as it goes into a bundle."""
    return BundledAnchor(by, note, [each.hex() for each in consistency], "witness", "", time)


def timestamp(by: str, note: str, response: bytes, time: str, consistency: Sequence[bytes]) -> BundledAnchor:
    """An authority's, as it goes into a bundle; ``response`` stays as it was received."""
    encoded = base64.b64encode(response).decode()
    return BundledAnchor(by, note, [each.hex() for each in consistency], "rfc3161", encoded, time)
