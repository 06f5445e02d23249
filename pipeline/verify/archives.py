"""Verification of archives on Spark: the driver judges the manifests, tasks compare and check the files they name."""

from __future__ import annotations

import time
from collections.abc import Collection, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from ledger.errors import ArchiveInvalidError, ArchiveSignatureError, InvalidInputError
from ledger.verification.range_fold import Ends
from ledger.verification.tree_check import StoredTree, TreeHead
from pipeline.archive.judging import ArchiveJudge, broken
from pipeline.source import OpenPlace
from pipeline.source.archives import OpenArchive
from pipeline.verify.job import Verified, check_chains
from signing.keys import Keyring

if TYPE_CHECKING:
    from pyspark import Accumulator
    from pyspark.sql import SparkSession


def verify_archive(
    spark: SparkSession,
    place: OpenPlace,
    *,
    tenants: Collection[str] | None = None,
    keyring: Keyring | None = None,
    checkpoints: Mapping[str, Sequence[TreeHead]] | None = None,
    passed: Accumulator[int] | None = None,
) -> Verified:
    """As ``verify``, of an archive: the objects have the aspect ``archive``, and job states are in none.

    Raises:
        InvalidInputError: ``place`` is no archive.
        TenantNotFoundError: there is nothing of a tenant that was named.
    """
    if not isinstance(place, OpenArchive):
        raise InvalidInputError("verify_archive is for archives: see verify for a database, verify_bundles for bundles")
    began_s = time.perf_counter()
    wanted = place.tenants() if tenants is None else sorted(set(tenants))
    objects: dict[str, dict[str, Any]] = {}
    judges: dict[str, ArchiveJudge] = {}
    ends: dict[str, Ends] = {}
    for tenant in wanted:
        try:
            archive = place.archive(tenant, keyring)
            judge = ArchiveJudge(archive, keyring)
            heads = [*judge.judge(), *(checkpoints or {}).get(tenant, ())]
        except ArchiveInvalidError as error:
            objects[tenant] = broken(tenant, error, time.perf_counter() - began_s)
            continue
        tree = StoredTree(archive.newest.tree_size, archive.newest.tree_root)
        judges[tenant], ends[tenant] = judge, Ends(tenant, archive.newest.last, tree, heads)
    checked = check_chains(spark, place.pieces([*ends]), ends, keyring=keyring, with_jobs=False, passed=passed)
    seconds = time.perf_counter() - began_s
    for tenant, verdict in checked.verdicts.items():
        objects[tenant] = judges[tenant].verdict(verdict.to_json(seconds * 1000))
    for tenant, refusal in checked.refused.items():
        kind = ArchiveSignatureError if refusal.is_signature else ArchiveInvalidError
        objects[tenant] = broken(tenant, kind(refusal.message, refusal.seq), seconds)
    return Verified(spark, [objects[tenant] for tenant in wanted], checked.found)
