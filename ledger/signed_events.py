"""Events that their callers sign: the bytes that are signed, and how many events share one signature.

A caller signs the event, not the entry (docs/formats/signed-events.md)::

    message  = "tallystick.signed-event.v1" LF header LF payload
    header   = canonical JSON of id, job_id, key_id, not_after_ms, not_before_ms, tenant_id
    payload  = canonical payload of the entry without actor, idempotency and signature

One signature over many events is over the root of the tree (RFC 9162) whose leaves are their messages::

    message  = "tallystick.signed-events.v1" LF canonical JSON of id, key_id, not_after_ms, not_before_ms, root, size

The member ``signature`` of a payload has the members of ``CallerSignature``. Invariants::

    0 <= not_after_ms - not_before_ms <= WINDOW_MS_MAX
    not_before_ms <= physical part of the entry's HLC <= not_after_ms
    of the entries of one log in one chain, no two have the same key_id, id and index

The window is shorter than the ledger remembers Idempotency-Keys, and ``id`` is one, so a node refuses a repeated event;
a verifier finds one that a forger chained again.
"""

from __future__ import annotations

import base64
from binascii import b2a_base64
from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Annotated, Any, Final

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ledger import canonical, keyed, merkle
from ledger.chain.form import Count
from ledger.decoding import convert
from ledger.errors import InvalidInputError, ProofError, reported_as
from ledger.facts.events import ACTOR
from ledger.merkle import HASH_BYTES

MEMBER: Final = "signature"
"""Member of a payload that its caller signed."""
MARK: Final = MEMBER
"""Is in every payload that has the member, in whatever form JSON is nested."""
UNSIGNED: Final = (ACTOR, keyed.MEMBER, MEMBER)
"""Members of a payload that the service adds."""
WINDOW_MS_MAX: Final = 6 * 86_400_000
"""Longest time in which a signed event can be recorded."""
ID_PATTERN: Final = "[!-~]{1,255}"
"""That of an Idempotency-Key."""

_NAMES: Final = ("id", "key_id", "not_after_ms", "not_before_ms")
"""Members that are signed, in the order of canonical JSON."""
_EVENT: Final = b"tallystick.signed-event.v1\n"
_EVENTS: Final = b"tallystick.signed-events.v1\n"
_PATH_CHARACTERS_MAX: Final = 2048
SIGNATURE_CHARACTERS_MAX: Final = 4096
"""Longest signature in base64; one by ML-DSA-44 has 3,228 characters."""


class CallerSignature(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """What a caller says of itself, and its signature. ``index``, ``size`` and ``path`` are there if the signature is
    over the root of several events: the hashes lead from this event to the root."""

    id: Annotated[str, Meta(pattern=rf"^{ID_PATTERN}\Z")]
    """Chosen by the caller, once for each event or request of events."""
    key_id: Annotated[str, Meta(pattern=r"^[0-9a-f]{16}\Z")]
    not_after_ms: Count
    not_before_ms: Count
    sig: Annotated[str, Meta(max_length=SIGNATURE_CHARACTERS_MAX)]
    """Base64, as the algorithm of the key has it."""
    index: Count | UnsetType = UNSET
    path: Annotated[str, Meta(max_length=_PATH_CHARACTERS_MAX)] | UnsetType = UNSET
    """Base64 of the hashes, the sibling of the event first."""
    size: Count | UnsetType = UNSET

    @property
    def is_of_many(self) -> bool:
        """Whether it covers a tree of events."""
        return self.size is not UNSET

    def said(self) -> dict[str, Any]:
        """What is signed of it."""
        return {name: getattr(self, name) for name in _NAMES}

    def refuse_time(self, physical_ms: int, margin_ms: int = 0) -> None:
        """Return if an event at this time, and for ``margin_ms`` longer, is one that the caller signed.

        Raises:
            InvalidInputError: it is not.
        """
        length_ms = self.not_after_ms - self.not_before_ms
        if not 0 <= length_ms <= WINDOW_MS_MAX:
            raise InvalidInputError(f"{MEMBER}: is for {length_ms} ms, and 0 to {WINDOW_MS_MAX} are allowed")
        if not self.not_before_ms <= physical_ms <= self.not_after_ms - margin_ms:
            raise InvalidInputError(
                f"{MEMBER}: is for the times {self.not_before_ms} to {self.not_after_ms}, not {physical_ms}"
            )

    def raw(self) -> bytes:
        """The signature's bytes.

        Raises:
            InvalidInputError: it is not base64.
        """
        return _decoded(self.sig, "sig")


def read(value: object) -> CallerSignature:
    """The member of a payload, parsed.

    Raises:
        InvalidInputError: it has another form.
    """
    with reported_as(InvalidInputError, f"{MEMBER} is malformed", msgspec.ValidationError, OverflowError):
        found = convert(value, CallerSignature)
    if len({found.index is UNSET, found.path is UNSET, found.size is UNSET}) != 1:
        raise InvalidInputError(f"{MEMBER} has some of index, path and size, and not all")
    return found


def header(tenant_id: str, job_id: str, said: Mapping[str, Any]) -> bytes:
    """The second line of a message, with its end."""
    return canonical.encode({**said, "job_id": job_id, "tenant_id": tenant_id}) + b"\n"


def message(tenant_id: str, job_id: str, said: Mapping[str, Any], payload: bytes) -> bytes:
    """The bytes of one event: what is signed, or hashed as a leaf. ``payload`` has none of ``UNSIGNED``."""
    return b"".join((_EVENT, header(tenant_id, job_id, said), payload))


def leaf_hashes(said: Mapping[str, Any], jobs: Sequence[tuple[str, str]], payloads: Sequence[bytes]) -> list[bytes]:
    """The leaf of each event of a request: of its tenant and job, and its payload as for ``message``."""
    before, last = canonical.encode({"id": said["id"]})[:-1], {name: said[name] for name in _NAMES[1:]}
    begin, middle = b'\0%b%b,"job_id":' % (_EVENT, before), b',%b,"tenant_id":' % canonical.encode(last)[1:-1]
    headers = {
        (tenant_id, job_id): b"%b%b%b%b}\n" % (begin, canonical.encode(job_id), middle, canonical.encode(tenant_id))
        for tenant_id, job_id in set(jobs)
    }
    return [sha256(headers[job] + payload).digest() for job, payload in zip(jobs, payloads, strict=True)]


def root_message(said: Mapping[str, Any], size: int, root: bytes) -> bytes:
    """The bytes that are signed for ``size`` events together."""
    return _EVENTS + canonical.encode({**said, "root": root.hex(), "size": size})


def signed_payload(payload: Mapping[str, Any]) -> bytes:
    """What the caller signed of a payload.

    Raises:
        CanonicalError: it has no canonical form.
    """
    return canonical.encode({name: value for name, value in payload.items() if name not in UNSIGNED})


def signed_message(tenant_id: str, job_id: str, payload: Mapping[str, Any], signature: CallerSignature) -> bytes:
    """The bytes that must be signed, for the payload of an entry with this signature.

    Raises:
        InvalidInputError: the path of an event among many is none, or the payload has no canonical form.
    """
    said = signature.said()
    one = message(tenant_id, job_id, said, signed_payload(payload))
    if signature.size is UNSET or signature.index is UNSET or signature.path is UNSET:
        return one
    raw = _decoded(signature.path, "path")
    hashes = [raw[at : at + HASH_BYTES] for at in range(0, len(raw), HASH_BYTES)]
    with reported_as(InvalidInputError, f"the path of {MEMBER} leads nowhere", ProofError):
        root = merkle.root_of_path(signature.index, signature.size, merkle.leaf_hash(one), hashes)
    return root_message(said, signature.size, root)


def members_of_many(said: Mapping[str, Any], sig: str, tree: merkle.Levels) -> list[bytes]:
    """The members ``signature`` of the events of this tree, in order, as canonical JSON has them in a payload."""
    paths = paths_of(tree)
    rest = canonical.encode({name: said[name] for name in _NAMES[1:]})[1:-1]
    begin = b'"%b":{"id":%b,"index":' % (MEMBER.encode(), canonical.encode(said["id"]))
    middle, end = b',%b,"path":"' % rest, b'","sig":%b,"size":%d}' % (canonical.encode(sig), len(paths))
    return [
        b"%b%d%b%b%b" % (begin, index, middle, b2a_base64(path, newline=False), end) for index, path in enumerate(paths)
    ]


def paths_of(tree: merkle.Levels) -> list[bytes]:
    """The path of each leaf of this tree, its hashes joined: each is its sibling and the path of the node above."""
    paths = [b""]
    for level in reversed(tree[:-1]):
        siblings, pairs = [b""] * len(level), len(level) // 2
        siblings[: 2 * pairs : 2], siblings[1::2] = level[1::2], level[: 2 * pairs : 2]
        paths = [sibling + paths[at >> 1] for at, sibling in enumerate(siblings)]
    return paths


def replay_id(signature: CallerSignature, log: str | None) -> bytes:
    """16 bytes that two entries of one log have in common only if one repeats the other."""
    index = None if signature.index is UNSET else signature.index
    return sha256(canonical.encode([signature.key_id, signature.id, index, log])).digest()[:16]


def _decoded(text: str, name: str) -> bytes:
    """The bytes of which ``text`` is the one spelling: nobody signs it, and other verifiers refuse another."""
    with reported_as(InvalidInputError, f"{name} of {MEMBER} is not base64", ValueError):
        data = base64.b64decode(text, validate=True)
    if b2a_base64(data, newline=False) != text.encode():
        raise InvalidInputError(f"{name} of {MEMBER} is not base64: stray bits")
    return data
