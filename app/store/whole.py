"""Rows that a reader may show: every column that must have a value has one, whatever somebody made of the table."""

from __future__ import annotations

from collections.abc import Collection
from typing import NamedTuple, TypeVar

from ledger.errors import ChainDamagedError

Row = TypeVar("Row", bound=NamedTuple)


def whole(tenant_id: str, row: Row, nullable: Collection[str] = ()) -> Row:
    """``row``, once no column of it is NULL but those that may be.

    Raises:
        ChainDamagedError: names the column, and the seq where the row has one.
    """
    for name, value in row._asdict().items():
        if value is None and name not in nullable:
            where = f" of seq {seq}" if (seq := getattr(row, "seq", None)) is not None else ""
            raise ChainDamagedError(tenant_id, f"column {name}{where} is NULL, or no value it may have")
    return row
