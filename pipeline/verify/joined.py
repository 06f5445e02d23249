"""Verifies databases on Spark, each with its archive, as chains from seq 1 (:mod:`pipeline.archive.joined`)."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ledger.errors import ArchiveInvalidError
from ledger.verification.tree_check import TreeHead
from ledger.verification.verdict import rollback, with_break
from pipeline.archive.joined import NO_MANIFESTS, ArchivedPart
from pipeline.arrow import Row, rows_of
from pipeline.places import OpenPlace
from pipeline.places.protocol import ChainName
from pipeline.source import open_pieces
from pipeline.verify import Verified, verify
from signing.anchors import NOBODY, ExternalWitnesses
from signing.keys import Keyring
from signing.snapshot import ENVELOPE, TO_SEQ

if TYPE_CHECKING:
    from pyspark import Accumulator
    from pyspark.sql import SparkSession


def verify_joined(
    spark: SparkSession,
    place: OpenPlace,
    archives: OpenPlace,
    *,
    tenants: Collection[str],
    keyring: Keyring | None,
    checkpoints: Mapping[str, Sequence[TreeHead]],
    external: ExternalWitnesses = NOBODY,
    passed: Accumulator[int] | None = None,
) -> Verified:
    """Verify ``tenants`` of ``place``, and what ``archives`` have of them, as one; arguments as of ``verify``.

    A tenant that only its archive has was removed from the database, which is a break.
    """
    archived = sorted({*tenants} & {*archives.tenants()})
    parts = {chain: _part(archives, chain, None) for chain in tenants}
    there = {*place.tenants()}
    # 1. The archives.
    of_archives = verify(spark, archives, tenants=archived, keyring=keyring, passed=passed)
    verdicts = {_chain_of(each): each for each in of_archives.objects}
    # 2. The databases, which must begin with the trees of the archives.
    heads = {chain: [*checkpoints.get(chain, ()), *part.heads] for chain, part in parts.items()}
    chains = [chain for chain in tenants if chain in there]
    of_databases = verify(
        spark,
        place,
        tenants=chains,
        keyring=keyring,
        checkpoints=heads,
        external=external,
        passed=passed,
        archived={chain: part for chain, part in parts.items() if part.sealed},
    )
    found = {_chain_of(each): each for each in of_databases.objects}
    # 3. Both as one.
    objects = [
        _joined(place, archives, chain, found.get(chain), verdicts.get(chain)) for chain in sorted({*found, *verdicts})
    ]
    return Verified(spark, objects, [*of_databases.found, *of_archives.found])


def _joined(
    place: OpenPlace,
    archives: OpenPlace,
    chain: str,
    found: Mapping[str, Any] | None,
    archived: Mapping[str, Any] | None,
) -> dict[str, Any]:
    if found is None:
        assert archived is not None
        root = archived["archive"]["tree_root"] if archived.get("archive") else ""
        detail = "the archive has entries of this tenant, and the database has none"
        return with_break({**archived}, rollback(archived["to_seq"], detail, root, None))
    origin = place.log_origin(chain)
    log = None if origin is None else f"{origin}/{ChainName.parse(chain).tenant_id}"
    return _part(archives, chain, archived).joined(found, log)


def _part(archives: OpenPlace, chain: str, verdict: Mapping[str, Any] | None) -> ArchivedPart:
    """What the archives have of a chain; its verdict says so if its manifests cannot be read."""
    try:
        sealed = archives.manifests(chain) if chain in archives.tenants() else NO_MANIFESTS
    except ArchiveInvalidError:
        sealed = NO_MANIFESTS

    def rows(from_seq: int, to_seq: int) -> Iterator[Sequence[Row]]:
        for _, reader in open_pieces(archives.pieces([chain], from_seq=from_seq, to_seq=to_seq)):
            yield from ([*rows_of(batch)] for batch in reader.entries())

    def snapshot_at(to_seq: int) -> str | None:
        for _, reader in open_pieces(archives.pieces([chain], from_seq=to_seq, to_seq=to_seq)):
            found = (row for batch in reader.snapshots() for row in rows_of(batch))
            return next((row[ENVELOPE] for row in found if row[TO_SEQ] == to_seq), None)
        return None

    return ArchivedPart(ChainName.parse(chain).tenant_id, str(archives), sealed, verdict, rows, snapshot_at)


def _chain_of(verdict: Mapping[str, Any]) -> str:
    return str(ChainName(verdict.get("ledger"), verdict["tenant_id"]))
