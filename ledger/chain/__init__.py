"""Chain links: the SHA-256 that ties an entry to the one before it in its tenant's chain.

Version 2 hashes the header ``tallystick.chain-link.v2\\n`` and then eight fields, each as its length (u32
big-endian) and its bytes::

    tenant_id | seq, u64 big-endian | t_hlc | job_id | action
    prev_chain_link, 32 raw bytes, empty for the first entry
    payload_digest, 32 raw bytes
    origin, canonical JSON, empty for an entry first chained in this log

Every field follows its length, so no two entries hash the same bytes. The fields are all columns of the log but
``id`` and ``created_at``. Text is UTF-8. A worked example is in docs/formats/chain-link.md.

Version 1 joins the texts without lengths, so one hash fits several entries, and binds neither tenant nor seq.
It is verified if an imported chain begins with it; it is never written.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from hashlib import sha256
from typing import Any

from ledger.errors import InvalidInputError
from ledger.hlc import Hlc

LINK_VERSION = 2
"""Version of every link this project writes."""

SEQ_MAX = 2**64 - 1

_HEADER_V2 = b"tallystick.chain-link.v2\n"
_FIRST_PREV_V1 = "genesis"

_length = struct.Struct(">I").pack
_lengths_around_seq = struct.Struct(">IQI").pack
_SEQ_BYTES = 8


def link(
    *,
    tenant_id: str,
    seq: int,
    t_hlc: str,
    job_id: str,
    action: str,
    prev_chain_link: bytes,
    payload_digest: bytes,
    origin: bytes = b"",
) -> bytes:
    """The 32 raw bytes of the version 2 link of one entry.

    ``prev_chain_link`` is empty for the first entry of a chain. Lengths of links and digests are not checked:
    a wrong length gives another link, which a verifier then reports.

    Raises:
        InvalidInputError: ``seq`` is not in 0..2^64 - 1.
    """
    return Linker(tenant_id).link(seq, t_hlc, job_id, action, prev_chain_link, payload_digest, origin)


Unlinked = tuple[Hlc, str, str, bytes, str | None]
"""An entry whose position is fixed and which has no link yet: HLC, job id, action, payload, origin."""


class Linker:
    """Links entries of one tenant; the bytes that all links share are built once."""

    __slots__ = ("prefix", "tenant_id")

    def __init__(self, tenant_id: str) -> None:
        tenant = tenant_id.encode()
        self.tenant_id = tenant_id
        self.prefix = _HEADER_V2 + _length(len(tenant)) + tenant
        """The bytes that every link hashes first."""

    def link(
        self,
        seq: int,
        t_hlc: str,
        job_id: str,
        action: str,
        prev_chain_link: bytes,
        payload_digest: bytes,
        origin: bytes = b"",
    ) -> bytes:
        """As :func:`link`, for this tenant.

        Raises:
            InvalidInputError: ``seq`` is not in 0..2^64 - 1.
        """
        hlc = t_hlc.encode()
        job = job_id.encode()
        act = action.encode()
        try:
            seq_field = _lengths_around_seq(_SEQ_BYTES, seq, len(hlc))
        except struct.error as error:
            raise InvalidInputError(f"seq {seq} is not in 0..{SEQ_MAX}", ("seq",)) from error
        return sha256(
            b"".join(
                (
                    self.prefix,
                    seq_field,
                    hlc,
                    _length(len(job)),
                    job,
                    _length(len(act)),
                    act,
                    _length(len(prev_chain_link)),
                    prev_chain_link,
                    _length(len(payload_digest)),
                    payload_digest,
                    _length(len(origin)),
                    origin,
                )
            )
        ).digest()

    def links(
        self,
        first_seq: int,
        prev_chain_link: bytes,
        t_hlcs: Sequence[str],
        job_ids: Sequence[str],
        actions: Sequence[str],
        payload_digests: Sequence[bytes],
        origins: Sequence[bytes],
    ) -> list[bytes]:
        """The links of entries that follow one another from ``first_seq`` on, each as :meth:`link` gives it.

        ``prev_chain_link`` is the link before the first.

        Raises:
            InvalidInputError: a seq is not in 0..2^64 - 1.
        """
        columns = zip(t_hlcs, job_ids, actions, payload_digests, origins, strict=True)
        prev = prev_chain_link
        return [
            prev := self.link(seq, t_hlc, job_id, action, prev, digest, origin)
            for seq, (t_hlc, job_id, action, digest, origin) in enumerate(columns, first_seq)
        ]

    def rows(self, first_seq: int, prev_chain_link: str | None, entries: Sequence[Unlinked]) -> list[tuple[Any, ...]]:
        """The rows of ``entries`` that follow one another from ``first_seq`` on, linked, in the order of
        ``ledger.verification.entry_check.ENTRY_COLUMNS``; links are hex.

        Raises:
            InvalidInputError: a seq is not in 0..2^64 - 1.
        """
        hlcs, job_ids, actions, payloads, origins = zip(*entries, strict=True)
        t_hlcs = [hlc.text() for hlc in hlcs]
        digests = [sha256(payload).digest() for payload in payloads]
        sources = [b"" if origin is None else origin.encode() for origin in origins]
        prev_link = bytes.fromhex(prev_chain_link or "")
        links = [link.hex() for link in self.links(first_seq, prev_link, t_hlcs, job_ids, actions, digests, sources)]
        columns = zip(t_hlcs, entries, [prev_chain_link, *links[:-1]], links, digests, strict=True)
        return [
            (seq, t_hlc, *hlc, job_id, action, LINK_VERSION, prev, link, digest.hex(), payload.decode(), origin)
            for seq, (t_hlc, (hlc, job_id, action, payload, origin), prev, link, digest) in enumerate(
                columns, first_seq
            )
        ]


def link_v1(t_hlc: str, job_id: str, action: str, prev_chain_link_hex: str | None, payload_digest_hex: str) -> bytes:
    """The 32 raw bytes of a version 1 link: SHA-256 over the joined texts.

    Link and digest are hashed as lowercase hex text; the first entry has ``None``, hashed as ``genesis``.
    """
    prev = _FIRST_PREV_V1 if prev_chain_link_hex is None else prev_chain_link_hex
    return sha256(f"{t_hlc}{job_id}{action}{prev}{payload_digest_hex}".encode()).digest()
