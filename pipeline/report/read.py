"""What a report was made from: how much of each tenant's chain was read, as the folded rows count it."""

from __future__ import annotations

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812


def by_tenant(folded: DataFrame) -> DataFrame:
    """One row a tenant: entries, range of seq and HLC, jobs, job events, and private values, which are not shown."""
    return (
        folded.groupBy("tenant_id")
        .agg(
            F.sum("entries").alias("entries"),
            F.min("first_seq").alias("first_seq"),
            F.max("last_seq").alias("last_seq"),
            _text(F.min("first_at")).alias("first_hlc"),
            _text(F.max("last_at")).alias("last_hlc"),
            F.count_if(F.col("events") > 0).alias("jobs"),
            F.sum("events").alias("job_events"),
            F.sum("events_in_trace").alias("trace_events"),
            F.sum("private").alias("private_values"),
        )
        .orderBy("tenant_id")
    )


def overall(folded: DataFrame) -> DataFrame:
    """One row for everything: counts, the first and last time on either clock."""
    return folded.agg(
        F.count_distinct("tenant_id").alias("tenants"),
        F.sum("entries").alias("entries"),
        F.sum("events").alias("job_events"),
        F.sum("events_in_trace").alias("trace_events"),
        F.sum("private").alias("private_values"),
        F.min("first_event_ms").alias("first_hlc_ms"),
        F.max("last_hlc.physical_ms").alias("last_hlc_ms"),
        F.min("first_trace_ms").alias("first_trace_ms"),
        F.max("last.trace_ms").alias("last_trace_ms"),
        _text(F.min("first_at")).alias("first_hlc"),
        _text(F.max("last_at")).alias("last_hlc"),
    )


def _text(hlc: Column) -> Column:
    return F.concat_ws(":", hlc["physical_ms"], hlc["logical"], hlc["node"])
