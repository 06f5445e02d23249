"""``tally nodes``: the nodes of a tenant's cluster, what each has, what is reserved of it and what is free."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from itertools import chain
from typing import Annotated, Any

import typer

from app.runtime.answers.jobs import NodeList
from cli.client import Service
from cli.options import Tenant
from terminal.outcome import aligned, counted, tell
from terminal.program import Json

PAGE = 500
_AMOUNTS = ("capacity", "overcommit", "reserved", "free", "excess")


def nodes(
    tenant: Tenant,
    client: Service,
    overbooked: Annotated[
        bool, typer.Option("--overbooked", help="Only nodes of which more is reserved than their limit.")
    ] = False,
    as_of_seq: Annotated[
        int | None, typer.Option("--as-of-seq", min=1, help="As of this entry.", show_default="now")
    ] = None,
    as_json: Json = False,
) -> None:
    """List the nodes of known capacity, a line for each dimension, with what is reserved and what is free.

    A node is overbooked in a dimension if more is reserved than its capacity
    times its overcommit: the last column says by how much.

    \b
    Examples:
      tally nodes --tenant acme
      tally nodes -t acme --overbooked
      tally nodes -t acme --as-of-seq 4711 --json
    """
    asked = {"tenant_id": tenant, "overbooked": overbooked or None, "as_of_seq": as_of_seq}
    pages = list(client.pages("/v1/nodes", NodeList, **asked, limit=PAGE))
    items = [item for page in pages for item in page["items"]]
    answer = {"as_of_seq": pages[0]["as_of_seq"], "rules": pages[0]["rules"], "items": items}
    head = ("NODE", "DIMENSION", "CAPACITY", "OVERCOMMIT", "RESERVED", "FREE", "")
    tell(
        answer,
        f"{counted(len(items), 'node')} of {tenant} as of seq {answer['as_of_seq']}, rules {answer['rules']}; "
        f"{sum(item['overbooked'] for item in items):,} overbooked",
        *(aligned([head, *chain.from_iterable(map(_rows, items))]) if items else ()),
        as_json=as_json,
    )


def _rows(item: Mapping[str, Any]) -> Iterator[tuple[str, ...]]:
    """A row for each dimension of a node; one for a node of no capacity of which nothing is reserved."""
    by_name = {name: dict(_dimensions(item[name])) for name in _AMOUNTS}
    for dimension in dict.fromkeys(chain.from_iterable(by_name.values())) or ("",):
        capacity, overcommit, reserved, free, excess = (by_name[name].get(dimension) for name in _AMOUNTS)
        amounts = (str(capacity or 0), str(overcommit or ""), str(reserved or 0), str(free or 0))
        yield (item["node"], dimension, *amounts, "" if excess is None else f"overbooked by {excess}")


def _dimensions(amounts: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    for name, amount in amounts.items():
        if isinstance(amount, Mapping):
            yield from ((f"{name}.{kind}", each) for kind, each in amount.items())
        else:
            yield name, amount
