"""What one ``tally verify`` is asked to verify, and against what: what the caller trusts and kept, what outsiders said.

External witnesses are judged here by what the caller brought: ``--tsa-ca`` and ``--witness-key``. Their statements come
from the service, or stand under a kept checkpoint. One that holds is then held against the log.
"""

from __future__ import annotations

import base64
from collections.abc import Sequence
from dataclasses import dataclass
from datetime import datetime
from typing import Any

from app.runtime.answers.chain import CosignatureList, TimestampList
from cli.client import LedgerClient
from ledger.verification.verdict import Anchor
from signing import checkpoint as checkpoints
from signing import note as notes
from signing.anchors import RFC_3161, WITNESS, ExternalWitnesses, OpenNote, StoredAnchor, judge, rfc_3339
from signing.keys import Keyring
from signing.memory import Memory
from signing.note import WitnessKey, cosignatures_of

LISTED_MAX = 1000
"""Newest statements of each kind that are looked at."""


@dataclass(frozen=True, slots=True)
class Request:
    """A tenant's chain, all of it or a range, and what the caller trusts."""

    tenant: str
    from_seq: int | None
    to_seq: int | None
    keyring: Keyring | None
    """None when no keys were given: then nobody vouches for what is found."""
    kept: str | None
    """Text of a checkpoint kept elsewhere."""
    outsiders: ExternalWitnesses
    memory: Memory | None = None
    """What was verified before, None when nothing is to be remembered."""


def served_anchors(
    client: LedgerClient, tenant: str, outsiders: ExternalWitnesses, open_note: OpenNote
) -> list[Anchor]:
    """The newest statement of each outsider that the service has."""
    said = []
    if outsiders.witnesses:
        known = {witness.text() for witness in outsiders.witnesses}
        items = client.get(f"/v1/log/{tenant}/cosignatures", CosignatureList, limit=LISTED_MAX)["items"]
        for item in _newest([item for item in items if item["witness"] in known], "witness"):
            time = datetime.fromisoformat(item["time"])
            said.append(StoredAnchor(WITNESS, item["witness"], item["note"], item["tree_size"], time))
    if outsiders.roots:
        items = client.get(f"/v1/log/{tenant}/anchors", TimestampList, limit=LISTED_MAX)["items"]
        for item in _newest(items, "authority"):
            time, response = datetime.fromisoformat(item["time"]), base64.b64decode(item["response"])
            said.append(
                StoredAnchor(RFC_3161, item["authority"], item["checkpoint"], item["tree_size"], time, response)
            )
    return [judge(each, outsiders.witnesses, outsiders.roots, open_note) for each in said]


def kept_anchors(kept: str, witnesses: Sequence[WitnessKey]) -> list[Anchor]:
    """The cosignatures under a kept checkpoint, whose log's signature the caller checks.

    Raises:
        SignatureError: one of a known witness does not hold.
    """
    note = notes.parse(kept)
    found = cosignatures_of(note, witnesses)
    checkpoint = checkpoints.parse(note.text)
    return [Anchor(WITNESS, each.witness.name, rfc_3339(each.time), checkpoint.size, checkpoint.root) for each in found]


def _newest(items: list[dict[str, Any]], whose: str) -> list[dict[str, Any]]:
    by_age = sorted(items, key=lambda item: (item["tree_size"], item["time"]))
    newest = {item[whose]: item for item in by_age}
    return [newest[name] for name in sorted(newest)]
