"""``/v1/exchange``: the ledgers that this one exchanges with, how far each is imported, the news for them, and which
regions are retired or admitted; ``/v1/exclusions``: logs of other ledgers whose facts are recorded in a tenant's chain
and do not count."""

from __future__ import annotations

from base64 import b64encode
from collections.abc import Sequence
from time import monotonic
from typing import Annotated, Any

from fastapi import APIRouter, Path, Query, Response

from app.edge.accepted import Accepted, AcceptedDep, Service
from app.edge.answers import json_answer
from app.edge.forms.body import json_body
from app.edge.forms.fields import SeqNumber, TenantQuery
from app.edge.forms.requests import AdmitRegionRequest, ExclusionRequest, RetireRequest, RevokeRegionKeyRequest
from app.edge.routing import PROBLEM_RESPONSE, StrictRoute, answered
from app.read import proofs
from app.runtime.answers import shape
from app.runtime.answers.exchange import (
    AdmittedRegionAnswer,
    ExchangeAnswer,
    ExclusionAnswer,
    ExclusionList,
    RetiredAnswer,
    RevokedRegionKeyAnswer,
)
from app.runtime.principals import Right
from app.share.exchange import Regions
from app.share.exchange.news import HAVE_MAX, OFFERS_MAX, TOLD_MAX, Lacking, News, Offer, Offers, read_positions
from app.share.exchange.peer_client import NEWS_WAIT_S_MAX, Asker
from app.share.exchange.region_changes import RegionChanges
from app.store import exchange
from app.store.reading import reading, run_in
from app.store.sessions import NodePool
from app.trust.retention import RetentionReader
from app.write.followers.notary import Notary
from app.write.intake.tenant_changes import ExclusionChanges
from ledger import names, rfc3339
from ledger.errors import InvalidInputError, LedgerError
from ledger.hlc import Hlc
from ledger.machines.exclusions import Statement
from signing.manifest import LOG_ORIGIN
from signing.region_statement import RetiredRegion

HeldTenant = shape(
    "HeldTenant",
    "Up to which seq a tenant's chain of another ledger was imported here.",
    tenant_id=str,
    seq=int,
)

HeldList = shape(
    "HeldList",
    "Tenants of another ledger, by name.",
    items=[HeldTenant],
)

OfferAnswer = shape(
    "OfferAnswer",
    "What a ledger that imported up to `imported_seq` and saw a tree of `size` lacks up to the checkpoint: the proof "
    "that the tree extends that one, and a bundle from `from_seq` on in base64, empty if no entry is lacking.",
    imported_seq=int,
    size=int,
    consistency=[str],
    from_seq=int,
    bundle=str,
)

TenantNews = shape(
    "TenantNews",
    "The newest checkpoint of a tenant, and up to which seq its chain in the asking ledger was imported here.",
    tenant_id=str,
    checkpoint=str | None,
    held=int,
    offer=OfferAnswer | None,
)

NewsAnswer = shape(
    "NewsAnswer",
    "Tenants with news, and the cursor to ask with next. A list has all tenants by name, a page at a time.",
    items=[TenantNews],
    cursor=str,
    is_list=bool,
    has_more=bool,
    untrusted=list[str],
)

LackingRange = shape(
    "LackingRange",
    "Entries of a chain, one of which at least is lacking.",
    from_seq=int,
    to_seq=int,
)

LackingAnswer = shape(
    "LackingAnswer",
    "The ranges of a chain that another ledger lacks, and the proof between two sizes of its tree if they were named.",
    items=[LackingRange],
    consistency=[str],
)

OriginQuery = Annotated[
    str, Query(pattern=names.anchored(LOG_ORIGIN), description="Log origin of the ledger that asks.")
]

router = APIRouter(route_class=StrictRoute, tags=["exchange"], responses=PROBLEM_RESPONSE)
exclusions = APIRouter(route_class=StrictRoute, tags=["exchange"], responses=PROBLEM_RESPONSE)

Region = Annotated[str, Path(pattern=names.anchored(names.GATE), description="Region of a peer.")]

HELD_MAX = 1000
LOOKED_AT_MAX = 1_000_000
LOOKED_AT_ONCE = 10_000


@router.get("/v1/exchange", responses=answered(ExchangeAnswer))
async def read_exchange(regions: Service[Regions]) -> Response:
    """The peers, and how this node finds them."""
    return json_answer(
        {
            "region": regions.own.region,
            "regions_counted": 1 + len(regions.counted()),
            "majority": regions.majority,
            "retired": [_retired_answer(each) for each in regions.known.retired.values()],
            "peers": [
                {
                    "url": peer.settings.url,
                    "region": peer.settings.region,
                    "log_origin": peer.following.log_origin or None,
                    "fault": peer.fault,
                    "waits_for": peer.keys.waits_for,
                    "untrusted_keys": [key.key_id for key in peer.keys.untrusted],
                    "untrusted_there": list(peer.keys.untrusted_there),
                    "retired": None if peer.retired is None else _retired_answer(peer.retired),
                    "lag_entries": peer.following.lag_entries,
                    "imported_entries": peer.following.imported_entries,
                }
                for peer in regions.peers
            ],
        }
    )


@router.post("/v1/exchange/regions/{region}/retire", responses=answered(RetiredAnswer))
async def retire_region(
    changes: Service[RegionChanges],
    accepted: AcceptedDep,
    region: Region,
    wanted: Annotated[dict[str, Any], json_body(RetireRequest)],
) -> Response:
    """Give up a region whose ledger is lost: no majority counts it, and nothing is imported from it any more."""
    retired = await changes.retire(region, wanted["reason"], accepted.caller, is_forced=wanted.get("force", False))
    return json_answer(_retired_answer(retired))


@router.post("/v1/exchange/regions/{region}/admit", responses=answered(AdmittedRegionAnswer))
async def admit_region(
    changes: Service[RegionChanges],
    accepted: AcceptedDep,
    region: Region,
    wanted: Annotated[dict[str, Any], json_body(AdmitRegionRequest)],
) -> Response:
    """Trust a key that the ledger of a region signs with. If the region was retired, it counts again."""
    admitted = await changes.admit(region, wanted["key_id"], accepted.caller)
    key = admitted.key
    return json_answer(
        {
            "region": region,
            "key_id": key.key_id,
            "algorithm": key.algorithm,
            "admitted_by": admitted.admitted_by,
        }
    )


@router.post("/v1/exchange/regions/{region}/revoke", responses=answered(RevokedRegionKeyAnswer))
async def revoke_region_key(
    changes: Service[RegionChanges],
    accepted: AcceptedDep,
    region: Region,
    wanted: Annotated[dict[str, Any], json_body(RevokeRegionKeyRequest)],
) -> Response:
    """Trust a key of a region's ledger no longer, in whatever place it is trusted. What it brought before stays."""
    revoked = await changes.revoke(region, wanted["key_id"], wanted["reason"], accepted.caller)
    return json_answer(
        {"region": region, "key_id": revoked.key_id, "reason": revoked.reason, "revoked_by": revoked.revoked_by}
    )


def _retired_answer(retired: RetiredRegion) -> dict[str, Any]:
    return {
        "region": retired.region,
        "reason": retired.reason,
        "retired_at": rfc3339.text_of(retired.hlc.physical_ms) if retired.hlc.physical_ms else None,
        "retired_by": retired.retired_by,
        "log_origin": retired.log_origin or None,
        "lag_entries": retired.lag_entries,
    }


@router.get("/v1/exchange/held", responses=answered(HeldList))
async def list_held(
    pool: Service[NodePool],
    accepted: AcceptedDep,
    origin: OriginQuery,
    after: Annotated[
        str, Query(pattern=names.anchored(f"({names.READABLE_TENANT_ID})?"), description="Tenants above this one.")
    ] = "",
    limit: Annotated[int, Query(ge=1, le=HELD_MAX, description="At most so many tenants.")] = HELD_MAX,
    tenant_id: Annotated[
        str | None, Query(pattern=names.anchored(names.READABLE_TENANT_ID), description="This tenant alone.")
    ] = None,
) -> Response:
    """By tenant that the caller may audit, up to which seq of that ledger this one has imported.

    A page with fewer than `limit` tenants is the last."""
    held = await run_in(
        reading(pool), exchange.held_of, origin, after, limit, accepted.caller.patterns(Right.AUDIT), tenant_id
    )
    return json_answer({"items": [{"tenant_id": name, "seq": seq} for name, seq in held]})


@router.get("/v1/exchange/news", responses=answered(NewsAnswer))
async def read_news(
    pool: Service[NodePool],
    regions: Service[Regions],
    offers: Service[Offers],
    accepted: AcceptedDep,
    origin: OriginQuery,
    cursor: Annotated[
        str,
        Query(
            pattern=names.anchored(f"({names.NEWS_CURSOR})?"),
            description="Cursor of the last answer; without one, a list.",
        ),
    ] = "",
    wait_s: Annotated[float, Query(ge=0, le=NEWS_WAIT_S_MAX, description="How long to wait for news.")] = 0.0,
    region: Annotated[
        str, Query(pattern=names.anchored(f"({names.GATE})?"), description="Region of that ledger.")
    ] = "",
    at: Annotated[
        list[str],
        Query(max_length=OFFERS_MAX, description="`seq size tenant`: has imported up to seq, and seen a tree of size."),
    ] = [],  # noqa: B006
    have: Annotated[
        list[str],
        Query(max_length=HAVE_MAX, description="`seq log`: has the entries of this log up to seq."),
    ] = [],  # noqa: B006
) -> Response:
    """The newest checkpoint of each tenant that the caller may audit, as soon as there is one, and how much of that
    ledger is imported here. For tenants in ``at`` also the entries that it lacks, if they are few."""
    positions, _ = read_positions(at), Lacking(have)
    await regions.asked_by(Asker(origin, region))
    items, said = await _told(pool, regions.news, accepted.caller.patterns(Right.AUDIT), origin, cursor, wait_s)
    offered = await offers.of_news(items, positions, have) if positions else {}
    told_items = [
        item._asdict() | {"offer": await _recorded(accepted, item.tenant_id, offered.get(item.tenant_id))}
        for item in items
    ]
    return json_answer({"items": told_items, **said, "untrusted": regions.untrusted(region)})


async def _told(
    pool: NodePool, news: News, patterns: Sequence[str], origin: str, cursor: str, wait_s: float
) -> tuple[list[exchange.TenantNews], dict[str, Any]]:
    """The tenants of an answer, and its other members."""
    told = news.read(cursor)
    if told.after is None:
        ends_s, number = monotonic() + wait_s, told.number
        items: list[exchange.TenantNews] = []
        while True:
            is_signed, number = await news.after(number, ends_s - monotonic(), origin)
            if is_signed:
                found = await run_in(reading(pool), exchange.news_of, origin, patterns, [*is_signed])
                items = [each if is_signed[each.tenant_id] else each._replace(checkpoint=None) for each in found]
            # What the caller may not audit is no news.
            if items or not is_signed or monotonic() >= ends_s:
                break
        said = {"cursor": news.cursor(number), "is_list": False, "has_more": False}
    else:
        items = await run_in(reading(pool), exchange.list_news, origin, patterns, told.after, TOLD_MAX)
        has_more = len(items) == TOLD_MAX
        said = {
            "cursor": news.cursor(told.number, items[-1].tenant_id if has_more else None),
            "is_list": True,
            "has_more": has_more,
        }
    return items, said


async def _recorded(accepted: Accepted, tenant_id: str, offer: Offer | None) -> dict[str, Any] | None:
    """The answer's form of an offer, once the read of its entries is recorded; None if it cannot be."""
    if offer is None:
        return None
    if offer.holds_payloads:
        try:
            await accepted.record_read(tenant_id, from_seq=offer.from_seq, to_seq=offer.to_seq)
        except LedgerError:
            return None
    return {
        **offer.position._asdict(),
        "consistency": [*offer.consistency],
        "from_seq": offer.from_seq,
        "bundle": b64encode(offer.bundle).decode(),
    }


@router.get("/v1/exchange/lacking", responses=answered(LackingAnswer))
async def list_lacking(
    pool: Service[NodePool],
    notary: Service[Notary],
    retention: Service[RetentionReader],
    tenant_id: TenantQuery,
    from_seq: Annotated[SeqNumber, Query(description="First entry of the chain to look at.")],
    to_seq: Annotated[SeqNumber, Query(description="The last.")],
    have: Annotated[
        list[str],
        Query(max_length=HAVE_MAX, description="`seq log`: has the entries of this log up to seq."),
    ] = [],  # noqa: B006
    first: Annotated[SeqNumber | None, Query(description="Leaves of a tree that the other ledger has seen.")] = None,
    second: Annotated[
        SeqNumber | None, Query(description="Leaves of the tree that it sees now; the newest checkpoint's.")
    ] = None,
) -> Response:
    """The ranges of a tenant's chain that another ledger lacks, which has entries of these logs. With
    ``first`` also the proof that the tree of ``second`` leaves begins with that of ``first``. Of entries that have left
    for the archive nobody can say from which log they came: 410 `archived`."""
    if from_seq > to_seq:
        raise InvalidInputError("from_seq: lies behind to_seq", ("from_seq",))
    if to_seq - from_seq >= LOOKED_AT_MAX:
        raise InvalidInputError(f"to_seq: at most {LOOKED_AT_MAX} entries are looked at", ("to_seq",))
    found = Lacking(have)
    async with reading(pool, snapshot=True) as connection:
        await retention.refuse_left(connection, tenant_id, from_seq)
        for begin in range(from_seq, to_seq + 1, LOOKED_AT_ONCE):
            found.add(await exchange.origins(connection, tenant_id, begin, min(to_seq, begin + LOOKED_AT_ONCE - 1)))
    ranges = [{"from_seq": each[0], "to_seq": each[1]} for each in found.ranges()]
    proof: dict[str, Any] = {"hashes": []}
    if first is not None:
        with notary.rebuilds_if_damaged(tenant_id):
            proof = await proofs.consistency(pool, tenant_id, first, second)
    return json_answer({"items": ranges, "consistency": proof["hashes"]})


@exclusions.post("/v1/exclusions", status_code=201, responses=answered(ExclusionAnswer, 201))
async def exclude_log(
    changes: Service[ExclusionChanges],
    accepted: AcceptedDep,
    wanted: Annotated[dict[str, Any], json_body(ExclusionRequest)],
) -> Response:
    """Record that the facts of a log do not count in a tenant, neither those chained before nor later ones, or, with
    `excluded` false, that they count again. They stay in the chain. Every ledger that imports the entry, and every
    verifier, folds the tenant's jobs accordingly."""
    change = changes.exclude if wanted.get("excluded", True) else changes.include
    statement = await change(wanted["tenant_id"], wanted["log"], wanted["reason"], accepted.caller.id)
    return json_answer(_stated(wanted["tenant_id"], statement), status=201)


@exclusions.get("/v1/exclusions", responses=answered(ExclusionList))
async def list_exclusions(changes: Service[ExclusionChanges], tenant_id: TenantQuery) -> Response:
    """The newest statement about each log that was ever excluded in a tenant, by log."""
    found = await changes.statements(tenant_id)
    return json_answer({"items": [_stated(tenant_id, each) for each in found], "next_cursor": None})


def _stated(tenant_id: str, statement: Statement) -> dict[str, Any]:
    physical_ms, logical, node, _ = statement.rank
    return {
        "tenant_id": tenant_id,
        "log": statement.log,
        "excluded": statement.is_excluded,
        "reason": statement.reason,
        "actor": statement.actor if isinstance(statement.actor, str) else None,
        "stated_by": statement.by_log,
        "seq": statement.seq,
        "hlc": Hlc(physical_ms, logical, node).text(),
        "at": rfc3339.text_of(physical_ms),
    }
