"""Options of the Data Source ``tallystick``, as the user spells them."""

from __future__ import annotations

import re
from collections.abc import Mapping
from datetime import UTC, datetime, timedelta
from typing import TYPE_CHECKING, Final

from ledger.errors import ConfigurationError
from pipeline.arrow import INTEGERS
from pipeline.places.naming import NAMED_BY, place_of
from pipeline.places.protocol import Place, Times
from pipeline.source.frames import ROW_COLUMNS, ddl

if TYPE_CHECKING:
    from pyspark.sql.types import StructType

BOUNDS: Final = ("tenant", "from_seq", "to_seq", "from_time", "to_time")
SIZES: Final = ("rows_a_piece", "rows_a_batch")
_NUMBER: Final = re.compile(r"[0-9]+")
_EPOCH: Final = datetime(1970, 1, 1, tzinfo=UTC)


def places_of(options: Mapping[str, str]) -> list[Place]:
    """The places that the options name.

    Raises:
        ConfigurationError: none or several kinds are named, or what is named is none.
    """
    named = [name for name in NAMED_BY if options.get(name)]
    if len(named) != 1:
        raise ConfigurationError(f"say where the ledger is by one of the options {', '.join(NAMED_BY)}")
    text = options[named[0]]
    return [place_of(named[0], part.strip()) for part in (text.split(",") if named[0] == "bundle" else [text])]


def refuse_unknown(options: Mapping[str, str]) -> None:
    """Refuse options that the Data Source does not have: one that is misspelt would read what was not asked for.

    Raises:
        ConfigurationError: there is one.
    """
    known = (*NAMED_BY, *BOUNDS, *SIZES)
    for name in options:
        if name.lower() not in known:
            raise ConfigurationError(f"there is no option {name!r}; there are {', '.join(known)}")


def tenants_of(options: Mapping[str, str]) -> list[str] | None:
    """The tenants that the option names, None for all."""
    named = options.get("tenant")
    return None if named is None else [tenant.strip() for tenant in named.split(",")]


def number_of(options: Mapping[str, str], name: str) -> int | None:
    """The number, at least 1, that an option says; None when it is not said.

    Raises:
        ConfigurationError: it is none.
    """
    text = options.get(name)
    if text is not None and not (_NUMBER.fullmatch(text) and int(text) >= 1):
        raise ConfigurationError(f"option {name} must be a number, at least 1, and is {text!r}")
    return None if text is None else int(text)


def times_of(options: Mapping[str, str]) -> Times:
    """The HLC times that the options ask for.

    Raises:
        ConfigurationError: one is no time.
    """
    begin_ms, end_ms = _milliseconds(options, "from_time"), _milliseconds(options, "to_time")
    return Times(begin_ms, None if end_ms is None else end_ms - 1)


def _milliseconds(options: Mapping[str, str], name: str) -> int | None:
    text = options.get(name)
    if text is None:
        return None
    try:
        moment = datetime.fromisoformat(text)
    except ValueError:
        moment = None
    if moment is None or moment.tzinfo is None:
        raise ConfigurationError(f"option {name} must be a time such as 2026-01-31T00:00:00Z, and is {text!r}")
    return (moment - _EPOCH) // timedelta(milliseconds=1)


def columns_of(schema: StructType) -> tuple[str, ...]:
    """The columns that a schema names.

    Raises:
        ConfigurationError: one is no column of an entry, or is of another type.
    """
    for field in schema.fields:
        kind = "bigint" if field.name in INTEGERS else "string"
        if field.name not in ROW_COLUMNS or field.dataType.simpleString() != kind:
            raise ConfigurationError(f"an entry has no column {field.name} {field.dataType.simpleString()}: {ddl()}")
    return tuple(schema.fieldNames())
