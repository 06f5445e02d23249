"""The in-toto Statement that snapshots and manifests are (github.com/in-toto/attestation, spec/v1/statement.md).

Canonical JSON about one range of a tenant's chain::

    _type          https://in-toto.io/Statement/v1
    subject        one: name "{tenant_id}/{from_seq}-{to_seq}", digest sha256 of what the range holds
    predicateType  which form it is
    predicate      the fields of that form
"""

from __future__ import annotations

from typing import Annotated, Final

from msgspec import Meta

from ledger import canonical
from ledger.canonical import INTEGER_MAX
from ledger.names import NODE_ID, READABLE_TENANT_ID

STATEMENT_TYPE: Final = "https://in-toto.io/Statement/v1"
HLC_CHARACTERS_MAX: Final = 200

Hash = Annotated[str, Meta(pattern=r"^[0-9a-f]{64}\Z")]
Count = Annotated[int, Meta(ge=0, le=INTEGER_MAX)]
Seq = Annotated[int, Meta(ge=1, le=INTEGER_MAX)]
HlcText = Annotated[str, Meta(max_length=HLC_CHARACTERS_MAX)]
TenantId = Annotated[str, Meta(pattern=rf"^(?:{READABLE_TENANT_ID})\Z")]
NodeId = Annotated[str, Meta(pattern=rf"^(?:{NODE_ID})\Z")]


def subject_of(tenant_id: str, from_seq: int, to_seq: int, sha256: str) -> list[dict[str, object]]:
    """What a statement about this range is about."""
    return [{"name": f"{tenant_id}/{from_seq}-{to_seq}", "digest": {"sha256": sha256}}]


def encode(subject: list[dict[str, object]], predicate_type: str, predicate: object) -> bytes:
    """The bytes that are signed.

    Raises:
        CanonicalError: a field has no canonical form, such as an integer beyond 2^53 - 1.
    """
    return canonical.encode(
        {"_type": STATEMENT_TYPE, "subject": subject, "predicateType": predicate_type, "predicate": predicate}
    )
