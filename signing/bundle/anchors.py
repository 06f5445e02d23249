"""What outsiders said of the log of a bundle: the member ``anchors.json``, and its judging.

Canonical JSON, described in docs/formats/bundle.md::

    {"anchors":[{"by":..., "checkpoint":NOTE, "consistency":[64 hex digits, ...], "kind":"witness" or "rfc3161",
                 "response":"" or base64 of a TimeStampResp, "time":...}, ...]}

``consistency`` proves that the tree of the bundle's own checkpoint extends that of NOTE. Who exported the bundle could
leave a statement out, so one that agrees proves nothing for it; one that holds and disagrees is a rollback.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Iterable, Sequence
from datetime import UTC, datetime
from typing import Annotated, Final, Literal, NamedTuple

import msgspec
from msgspec import Meta

from ledger import canonical
from ledger.errors import BundleInvalidError, CanonicalError, ProofError, SignatureError
from ledger.merkle import verify_consistency
from ledger.verification.tree_check import Anchor
from ledger.verification.verdict import Anchored
from signing.anchors import WITNESS, Outsiders, Said, as_of, judge
from signing.checkpoint import Checkpoint, open_checkpoint
from signing.checkpoint import read as read_checkpoint
from signing.keys import Keyring
from signing.range_manifest import CONSISTENCY_HASHES_MAX
from signing.statement import Hash
from signing.strict import decode_base64

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
    """What an outsider said of the first ``size`` entries; ``made`` takes the proof that the log still has them."""

    size: int
    made: Callable[[Sequence[bytes]], BundledAnchor]


class JudgedAnchor(NamedTuple):
    """What came of one; ``checkpoint`` is None where it says nothing."""

    found: Anchored
    checkpoint: Checkpoint | None


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


def judge_anchors(
    anchors: Sequence[BundledAnchor], own: Checkpoint, keyring: Keyring | None, outsiders: Outsiders
) -> list[JudgedAnchor]:
    """What came of each, held against the bundle's own checkpoint ``own``, whose log the keys of ``keyring`` sign."""
    return [_judged(each, own, keyring, outsiders) for each in anchors]


def _judged(bundled: BundledAnchor, own: Checkpoint, keyring: Keyring | None, outsiders: Outsiders) -> JudgedAnchor:
    anchor = _stated(bundled, own, keyring, outsiders)
    if anchor.status != "ok":
        return JudgedAnchor(anchor.found(anchor.status, anchor.detail), None)
    checkpoint = Checkpoint(own.origin, anchor.size, anchor.root)
    try:
        hashes = [bytes.fromhex(each) for each in bundled.consistency]
        verify_consistency(anchor.size, own.size, anchor.root, own.root, hashes)
    except ProofError as error:
        detail = f"the log does not begin with what the {anchor.kind} anchor by {anchor.by} is of: {error}"
        return JudgedAnchor(anchor.found("broken", detail), checkpoint)
    return JudgedAnchor(anchor.found("ok"), checkpoint)


def _stated(bundled: BundledAnchor, own: Checkpoint, keyring: Keyring | None, outsiders: Outsiders) -> Anchor:
    """What the outsider said, whether or not the log is so."""
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
    said = Said(bundled.kind, bundled.by, bundled.checkpoint, size, stated, response)
    return judge(said, outsiders.witnesses, outsiders.roots, open_note)


def cosignature(by: str, note: str, time: str, consistency: Sequence[bytes]) -> BundledAnchor:
    """A witness's, as it goes into a bundle."""
    return BundledAnchor(by, note, [each.hex() for each in consistency], "witness", "", time)


def timestamp(by: str, note: str, response: bytes, time: str, consistency: Sequence[bytes]) -> BundledAnchor:
    """An authority's, as it goes into a bundle; ``response`` stays as it was received."""
    encoded = base64.b64encode(response).decode()
    return BundledAnchor(by, note, [each.hex() for each in consistency], "rfc3161", encoded, time)
