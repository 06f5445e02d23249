"""Manifests of ranges, those of bundles and of archives alike: signed statements of what a range holds.

The payload is canonical JSON of an in-toto Statement, in a DSSE envelope that is canonical JSON itself and has exactly
one signature, so each has one spelling and a reader compares bytes::

    _type          https://in-toto.io/Statement/v1
    subject        one: name "{tenant_id}/{from_seq}-{to_seq}", digest sha256 over the 32-byte digests, in order, of
                   the files that make up the range
    predicateType  which form it is
    predicate      format_version and the fields of that form
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from hashlib import sha256
from typing import Annotated, Final, Generic, NamedTuple, Protocol, TypeVar

import msgspec
from msgspec import Meta

from ledger import canonical
from ledger.canonical import INTEGER_MAX
from ledger.errors import InvalidInputError, LedgerError, SignatureError, UnknownKeyError
from ledger.hlc import Hlc
from ledger.merkle import verify_consistency
from ledger.names import NODE_ID, READABLE_TENANT_ID
from signing import envelope, note
from signing.checkpoint import JudgedCheckpoint, judge_checkpoint
from signing.checkpoint import parse as parse_checkpoint
from signing.envelope import PAYLOAD_BYTES_MAX, PAYLOAD_TYPE, Envelope, EnvelopeSignature
from signing.keys import Keyring
from signing.snapshot import STATEMENT_TYPE
from signing.strict import decode_base64

CONSISTENCY_HASHES_MAX: Final = 128
HLC_CHARACTERS_MAX: Final = 200
LOG_ORIGIN: Final = r"[!-*,-~]{1,300}"
"""What a log's origin may be, without ``/`` and the tenant, as a regular expression: no space, no plus."""

_HEAD: Final = b'{"payload":"'
_TAIL: Final = re.compile(
    rb'","payloadType":"%b","signatures":\[\{"keyid":"([0-9a-f]{16})","sig":"([A-Za-z0-9+/]{2,254}={0,2})"\}\]\}'
    % re.escape(PAYLOAD_TYPE).encode()
)
"""What stands behind the payload: there is no other spelling, so nothing has to be parsed to refuse one."""

Hash = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Count = Annotated[int, Meta(ge=0, le=INTEGER_MAX)]
Seq = Annotated[int, Meta(ge=1, le=INTEGER_MAX)]
HlcText = Annotated[str, Meta(max_length=HLC_CHARACTERS_MAX)]
_Name = Annotated[str, Meta(max_length=200)]


class RangePredicate(msgspec.Struct, forbid_unknown_fields=True):
    """What the predicates of all forms say."""

    node_id: Annotated[str, Meta(pattern=rf"^(?:{NODE_ID})\Z")]
    log_origin: Annotated[str, Meta(pattern=rf"^{LOG_ORIGIN}\Z")]
    tenant_id: Annotated[str, Meta(pattern=rf"^(?:{READABLE_TENANT_ID})\Z")]
    from_seq: Seq
    to_seq: Seq
    to_chain_link: Hash
    first_hlc: HlcText
    last_hlc: HlcText
    entry_count: Seq
    tree_size: Seq
    tree_root: Hash
    consistency: Annotated[list[Hash], Meta(max_length=CONSISTENCY_HASHES_MAX)]


P = TypeVar("P", bound=RangePredicate)


class _Digest(msgspec.Struct, forbid_unknown_fields=True):
    sha256: Hash


class _Subject(msgspec.Struct, forbid_unknown_fields=True):
    name: _Name
    digest: _Digest


class Statement(msgspec.Struct, Generic[P], forbid_unknown_fields=True):
    """The payload of an envelope, its predicate of one form."""

    type_: _Name = msgspec.field(name="_type")
    subject: tuple[_Subject]
    predicate_type: _Name = msgspec.field(name="predicateType")
    predicate: P


class Manifest(Protocol):
    """What a manifest of any form says of the tree at the end of its range; hashes in hex."""

    @property
    def origin(self) -> str:
        """Origin of the tenant's log."""

    @property
    def tree_size(self) -> int:
        """How many leaves the tree has."""

    @property
    def tree_root(self) -> str:
        """Its root."""

    @property
    def consistency(self) -> Sequence[str]:
        """Proof that the tree of the checkpoint extends it."""


def judge_own_checkpoint(manifest: Manifest, text: str, keyring: Keyring | None) -> JudgedCheckpoint:
    """The checkpoint that goes with a manifest: of its log, and of a tree that begins with the manifest's.

    Raises:
        SignatureError: malformed, of another log, or a held key is named that did not sign it.
        ProofError: the manifest's proof does not lead to it.
    """
    checkpoint = parse_checkpoint(note.parse(text).text)
    if checkpoint.origin != manifest.origin:
        raise SignatureError(f"it is of log {checkpoint.origin[:200]!r}, not of {manifest.origin!r}")
    judged = judge_checkpoint(text, keyring)
    root, hashes = bytes.fromhex(manifest.tree_root), [bytes.fromhex(each) for each in manifest.consistency]
    verify_consistency(manifest.tree_size, checkpoint.size, root, checkpoint.root, hashes)
    return judged


class Signed(NamedTuple):
    """Who signed a manifest. ``verdict`` is ``ok``, ``unknown_key``, or ``not_checked`` without keys."""

    verdict: str
    detail: str | None
    """Why it is not ok."""
    key_ids: tuple[str, ...]
    """Held keys whose signature holds."""


class ManifestForm(Generic[P]):
    """One form of manifest: how it is spelled, and which errors say what is wrong with one."""

    def __init__(
        self,
        statement: type[Statement[P]],
        predicate_type: str,
        *,
        version: int,
        invalid: Callable[[str], LedgerError],
        forged: Callable[[str], LedgerError],
    ) -> None:
        """``invalid`` is raised of what is malformed, ``forged`` where a signature does not hold."""
        self._decode = msgspec.json.Decoder(statement).decode
        self._predicate_type, self._version = predicate_type, version
        self._invalid, self._forged = invalid, forged

    def statement(self, predicate: Mapping[str, object], digests: Iterable[str]) -> bytes:
        """The bytes that are signed; ``digests``, hex, are those of the files that make up the range.

        Raises:
            CanonicalError: a field has no canonical form, such as an integer beyond 2^53 - 1.
        """
        digest = sha256(b"".join(map(bytes.fromhex, digests))).hexdigest()
        name = f"{predicate['tenant_id']}/{predicate['from_seq']}-{predicate['to_seq']}"
        said: dict[str, object] = {"format_version": self._version, **predicate}
        return canonical.encode(
            {
                "_type": STATEMENT_TYPE,
                "subject": [{"name": name, "digest": {"sha256": digest}}],
                "predicateType": self._predicate_type,
                "predicate": said,
            }
        )

    def open_envelope(self, data: bytes) -> Envelope:
        """The envelope in ``data``, bounded and in its one spelling; nothing of it is judged, nor its payload parsed.

        Raises:
            LedgerError: as ``invalid``: it is another text.
        """
        end = data.find(b'"', len(_HEAD))
        tail = _TAIL.fullmatch(data, end) if end >= 0 and data.startswith(_HEAD) else None
        if tail is None:
            raise self._invalid("the manifest is not an envelope in canonical form with exactly one signature")
        if end - len(_HEAD) > PAYLOAD_BYTES_MAX * 4 // 3 + 4:
            raise self._invalid(f"the manifest's payload is over {PAYLOAD_BYTES_MAX} bytes")
        try:
            payload = decode_base64(data[len(_HEAD) : end].decode("latin-1"), "payload")
            signature = decode_base64(tail[2].decode(), "sig")
        except SignatureError as error:
            raise self._invalid(f"the manifest is malformed: {error}") from error
        return Envelope(PAYLOAD_TYPE, payload, (EnvelopeSignature(tail[1].decode(), signature),))

    def judge(self, opened: Envelope, keyring: Keyring | None) -> Signed:
        """Who signed, by the keys of ``keyring``.

        Raises:
            LedgerError: as ``forged``: a held key is named that did not sign it.
        """
        if keyring is None:
            return Signed("not_checked", None, ())
        try:
            signers = envelope.signers_of(opened, keyring)
        except UnknownKeyError as error:
            return Signed("unknown_key", str(error), ())
        except SignatureError as error:
            raise self._forged(f"the manifest's signature does not hold: {error}") from error
        key_ids = tuple(key.key_id for key in signers)
        revoked = [key for key in signers if key.revoked_from_hlc is not None]
        if len(revoked) == len(signers):
            why = f"key {revoked[0].key_id} is revoked from HLC {revoked[0].revoked_from_hlc} on"
            return Signed("unknown_key", why, key_ids)
        return Signed("ok", None, key_ids)

    def predicate(self, payload: bytes) -> P:
        """What the payload of an envelope says; whoever makes a manifest of it compares its ``statement``.

        Raises:
            LedgerError: as ``invalid``: malformed, or of another version.
        """
        try:
            said = self._decode(payload).predicate
            for hlc in (said.first_hlc, said.last_hlc):
                Hlc.parse(hlc)
        except (msgspec.MsgspecError, UnicodeError, InvalidInputError) as error:
            raise self._invalid(f"the manifest is malformed, or not of version {self._version}: {error}") from error
        return said
