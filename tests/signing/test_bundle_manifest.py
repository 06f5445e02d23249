"""The manifest of a bundle as bytes: one spelling, and what it says agrees with itself."""

from __future__ import annotations

import json

import msgspec
import pytest

from ledger.bundle.format import CHECKPOINT, KEYS, SNAPSHOTS, Part, entries_name
from ledger.errors import BundleInvalidError
from signing.bundle.manifest import Manifest
from signing.private_keys import FileSigner

HASH = "ab" * 32
MANIFEST = Manifest(
    node_id="node-7f3a",
    log_origin="log.example",
    tenant_id="acme",
    from_seq=1,
    to_seq=2,
    to_chain_link=HASH,
    first_hlc="1:0:n",
    last_hlc="2:0:n",
    entry_count=2,
    tree_size=2,
    tree_root=HASH,
    consistency=(),
    format_version=1,
    snapshot_count=0,
    parts=(
        Part(entries_name(1), HASH, 10, 20, 2),
        Part(SNAPSHOTS, HASH, 0, 0, 0),
        Part(CHECKPOINT, HASH, 5, 5, 0),
        Part(KEYS, HASH, 5, 5, 0),
    ),
)


def test_what_was_sealed_is_read_again(ed25519_signer: FileSigner) -> None:
    opened = Manifest.open_envelope(MANIFEST.seal(ed25519_signer))
    assert Manifest.read(opened.payload) == MANIFEST


@pytest.mark.parametrize(
    "change",
    [
        {"format_version": 2},
        {"tree_size": 3},
        {"entry_count": 1},
        {"snapshot_count": 1},
        {"tenant_id": "a/b"},
        {"first_hlc": "1:0"},
    ],
)
def test_a_manifest_at_odds_with_itself_is_neither_sealed_nor_read(
    ed25519_signer: FileSigner, change: dict[str, object]
) -> None:
    wrong = msgspec.structs.replace(MANIFEST, **change)
    with pytest.raises(BundleInvalidError):
        Manifest.read(wrong.statement())
    with pytest.raises(BundleInvalidError):
        wrong.seal(ed25519_signer)


def test_a_statement_in_another_spelling_or_with_another_subject_is_refused() -> None:
    payload = MANIFEST.statement()
    said = json.loads(payload)
    said["subject"][0]["digest"]["sha256"] = "cd" * 32
    canonical = json.dumps(said, separators=(",", ":"), sort_keys=True).encode()
    for other in (json.dumps(json.loads(payload)).encode(), canonical):
        with pytest.raises(BundleInvalidError, match="not in canonical form, or its subject is another"):
            Manifest.read(other)
