"""Where the entries of a report come from: places, held open together, and the logs whose chains they hold."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from functools import reduce
from typing import TYPE_CHECKING, Final

from ledger.facts.events import SYSTEM_TENANT
from pipeline.places import OpenPlace
from pipeline.places.protocol import Times
from pipeline.report.said import COLUMNS
from pipeline.source import entries as entries_of

if TYPE_CHECKING:
    from pyspark.sql import DataFrame, SparkSession

TENANTS_ASKED_MAX: Final = 20
"""Tenants whose log is looked up; those of one ledger have one log origin nearly always."""
_EVENT: Final = [name for name in COLUMNS if name not in ("seq", "payload")]
"""What makes two entries of different bundles the same event."""


def entries(
    spark: SparkSession, places: Sequence[OpenPlace], tenants: Collection[str] | None, before_ms: int | None
) -> DataFrame:
    """The entries of all ``places`` with an HLC before ``before_ms``; an event that several hold comes once."""
    return _together(spark, [(place, of(place, tenants)) for place in places], before_ms)


def system_entries(spark: SparkSession, places: Sequence[OpenPlace], before_ms: int | None) -> DataFrame | None:
    """The entries of ``_system``, likewise; None where no place has its chain."""
    those = [(place, [SYSTEM_TENANT]) for place in places if SYSTEM_TENANT in place.tenants()]
    return _together(spark, those, before_ms) if those else None


def _together(spark: SparkSession, wanted: Sequence[tuple[OpenPlace, list[str]]], before_ms: int | None) -> DataFrame:
    times = Times(to_ms=None if before_ms is None else before_ms - 1)
    each = [entries_of(spark, place, tenants=names, columns=COLUMNS, times=times) for place, names in wanted]
    together = reduce(lambda all_before, one: all_before.unionByName(one), each)
    return together if len(each) == 1 else together.dropDuplicates(_EVENT)


def of(place: OpenPlace, tenants: Collection[str] | None) -> list[str]:
    """The tenants of ``place`` that a report is on: those asked for, else all, without the ledger's own log of keys."""
    return sorted(tenants or (name for name in place.tenants() if name != SYSTEM_TENANT))


def log_origins(places: Sequence[OpenPlace], tenants: Collection[str] | None) -> list[str]:
    """The origins of the logs in ``places``, without the tenant, as far as the first tenants tell."""
    found = set()
    for place in places:
        for tenant_id in of(place, tenants)[:TENANTS_ASKED_MAX]:
            found.add(place.log_origin(tenant_id))
    return sorted(origin for origin in found if origin is not None)
