"""What each entry says of its job, as columns: ``said_of_job`` and the part of the fold that is about one entry
(``ledger.machines``).

As there, a fact counts whatever its payload holds, a field of the wrong type counts as not given, and a CONFLICT entry
says what the event says that it holds.
"""

from __future__ import annotations

from typing import Final

from pyspark.sql import Column, DataFrame
from pyspark.sql import functions as F  # noqa: N812 (the name everyone uses)

from ledger.canonical import INTEGER_MAX
from ledger.hlc import LOGICAL_MAX, PHYSICAL_MS_MAX
from ledger.hlc import TEXT as HLC_TEXT
from ledger.machines.events import EVENTS_BY_ACTION, SystemAction
from ledger.private_fields import PRIVATE_MARK

TEXT_CHARACTERS_MAX: Final = 500
"""Longest text, such as an error, that a table holds; the ledger holds the rest."""
TRACE_SECONDS_MAX: Final = 10**11
"""Times of a trace beyond this, some 3,000 years, count as not given."""

_STRICT: Final = {"allowSingleQuotes": "false"}
_HELD_NAMES: Final = ("action", "digest", "hlc", "kept_digest", "payload", "type")
_HELD: Final = ", ".join(f"{name} VARIANT" for name in _HELD_NAMES)
_FIELDS: Final = (
    "fence_token BIGINT, dc_id VARIANT, failed_dc VARIANT, assigned_dcs ARRAY<VARIANT>, reason VARIANT, "
    "requestor VARIANT, error VARIANT, timeout_type VARIANT, trace_time DOUBLE"
)
_PRIVATE_BEGIN: Final = f'{{"{PRIVATE_MARK}":{{'
"""How a private value begins in canonical JSON. Inside a string the quotes would be escaped."""


def said(entries: DataFrame) -> DataFrame:
    """One row an entry: ``tenant_id, seq, job_id``, its own HLC as ``at``, and what it says of the job.

    ``entries`` has ``tenant_id`` and the columns of an entry. ``action`` is None when the entry is no job event, and
    with it all that follows: ``rank`` (fence, HLC, digest), ``trace_ms``, ``dc`` and the texts. A text is a struct of
    ``text`` and ``is_private``; that of a private value is None.
    """
    own = entries.select(
        "tenant_id",
        "seq",
        "job_id",
        F.struct(
            F.col("hlc_physical").alias("physical_ms"),
            F.col("hlc_logical").alias("logical"),
            F.col("hlc_node").alias("node"),
        ).alias("at"),
        "action",
        "payload",
        "payload_digest",
        _held().alias("held"),
    )
    event = own.select("tenant_id", "seq", "job_id", "at", _event().alias("event"))
    parsed = event.select("*", F.from_json("event.payload", _FIELDS, _STRICT).alias("given"))
    return parsed.select(
        "tenant_id",
        "seq",
        "job_id",
        "at",
        F.col("event.action").alias("action"),
        F.struct(
            _fence().alias("fence"), "event.physical_ms", "event.logical", "event.node", F.col("event.digest")
        ).alias("rank"),
        _trace_ms().alias("trace_ms"),
        _string("given.dc_id").alias("dc"),
        _assigned_dcs().alias("assigned_dcs"),
        _text("given.requestor").alias("requestor"),
        _text("given.reason").alias("reason"),
        _error().alias("error"),
        F.substring(_string("given.failed_dc"), 1, TEXT_CHARACTERS_MAX).alias("failed_dc"),
        _private_count().alias("private"),
    )


def _held() -> Column:
    """The event in a CONFLICT entry, as ``ledger.chain.conflict.held_event`` makes it out; None for anything else."""
    is_conflict = F.col("action") == str(SystemAction.CONFLICT)
    fields = F.from_json(F.when(is_conflict, F.col("payload")), _HELD, _STRICT)
    values = {name: _string_of(fields[name]) for name in _HELD_NAMES}
    names = F.json_object_keys(F.when(is_conflict, F.col("payload")))
    parts = [F.regexp_extract(values["hlc"], f"^{HLC_TEXT}$", group) for group in (1, 2, 3)]
    physical, logical = (part.try_cast("long") for part in parts[:2])
    is_whole = (F.size(names) == len(_HELD_NAMES)) & (F.sha2(values["payload"], 256) == values["digest"])
    for value in values.values():
        is_whole &= value.isNotNull()
    is_whole &= (physical <= PHYSICAL_MS_MAX) & (logical <= LOGICAL_MAX)
    return F.when(
        is_conflict & is_whole,
        F.struct(
            values["action"].alias("action"),
            physical.alias("physical_ms"),
            logical.alias("logical"),
            parts[2].alias("node"),
            values["digest"].alias("digest"),
            values["payload"].alias("payload"),
        ),
    )


def _event() -> Column:
    """The job event of an entry: its own, or the held one."""
    actions = list(EVENTS_BY_ACTION)
    own = F.struct(
        F.col("action").alias("action"),
        F.col("at.physical_ms").alias("physical_ms"),
        F.col("at.logical").alias("logical"),
        F.col("at.node").alias("node"),
        F.col("payload_digest").alias("digest"),
        F.col("payload").alias("payload"),
    )
    return F.when(F.col("action").isin(actions), own).when(F.col("held.action").isin(actions), F.col("held"))


def _fence() -> Column:
    fence = F.col("given.fence_token")
    return F.when(fence.between(0, INTEGER_MAX), fence).otherwise(F.lit(0)).cast("long")


def _trace_ms() -> Column:
    seconds = F.col("given.trace_time")
    return F.when(seconds.between(-TRACE_SECONDS_MAX, TRACE_SECONDS_MAX), F.round(seconds * 1000).cast("long"))


def _assigned_dcs() -> Column:
    given = F.col("given.assigned_dcs")
    names = F.transform(given, _string_of)
    are_strings = ~F.exists(names, lambda name: name.isNull())
    return F.coalesce(F.when(are_strings, names), F.array().cast("array<string>"))


def _string(name: str) -> Column:
    return _string_of(F.col(name))


def _string_of(value: Column) -> Column:
    """The text that a variant holds; None when it holds anything else."""
    return F.when(F.schema_of_variant(value) == "STRING", F.try_variant_get(value, "$", "string"))


def _text(name: str) -> Column:
    """What a table shows of a value: a string as it is, another value as JSON, nothing of a private one."""
    value = F.col(name)
    kind = F.schema_of_variant(value)
    is_private = kind.startswith("OBJECT") & F.to_json(value).contains(_PRIVATE_BEGIN)
    shown = F.coalesce(_string_of(value), F.to_json(value))
    return F.when(
        value.isNotNull() & (kind != "VOID"),
        F.struct(
            F.when(~is_private, F.substring(shown, 1, TEXT_CHARACTERS_MAX)).alias("text"),
            is_private.alias("is_private"),
        ),
    )


def _error() -> Column:
    action = F.col("event.action")
    return F.when(action == "FAIL", _text("given.error")).when(action == "TIMEOUT", _text("given.timeout_type"))


def _private_count() -> Column:
    """How many private values the payload holds."""
    payload = F.col("event.payload")
    count = F.regexp_count(payload, F.lit("\\Q" + _PRIVATE_BEGIN + "\\E"))
    return F.coalesce(F.when(payload.contains(_PRIVATE_BEGIN), count), F.lit(0))
