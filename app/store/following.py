"""SQL of followers: the position of each in the chain of each tenant, and the next entries."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import NamedTuple

from app.store import Connection, sessions
from app.store.reading import columns, fetch_as, fetch_column, fetch_dict, turned
from app.store.sessions import NodeConnection

LOCK_TIMEOUT_S = 2.0
"""Longest that a follower waits for a row that another session keeps locked."""
EMPTY_TIMEOUT_S = 3600.0
"""Longest that one statement takes which removes all rows of some tenants: 200,000 jobs take a second."""


class FollowedEntry(NamedTuple):
    """One entry as followers read it. The columns of an edited row may hold any value."""

    job_id: str
    seq: int
    hlc_physical: int
    hlc_logical: int
    hlc_node: str
    action: str
    payload_digest: str
    payload: str
    origin: str | None


_LOCK = """
SELECT p.tenant_id, p.seq, h.head_seq, p.seq = 0
  FROM scheduler.follower_positions p JOIN scheduler.chain_heads h USING (tenant_id)
 WHERE p.follower = $1 AND p.tenant_id = ANY($2::text[]) AND h.head_seq >= 0
 ORDER BY p.tenant_id FOR UPDATE OF p SKIP LOCKED
"""


class Place(NamedTuple):
    """The position of a follower in one chain, whose head is ``head_seq``. ``is_begun`` marks a position that starts at
    0."""

    seq: int
    head_seq: int
    is_begun: bool


async def connect(url: str, statement_timeout_s: float) -> NodeConnection:
    """A connection for following. Its commits do not wait for the disk: work that a crash undoes, with its position, is
    followed again."""
    return await sessions.connect(
        url,
        {
            "synchronous_commit": "off",
            "lock_timeout": f"{LOCK_TIMEOUT_S:g}s",
            # To the triggers that keep earlier versions behind entries that they would not follow.
            "tallystick.follows_commitments": "yes",
            "tallystick.follows_terms": "yes",
            "tallystick.follows_run_times": "yes",
        },
        command_timeout_s=statement_timeout_s,
    )


async def behind(connection: Connection, follower: str) -> dict[str, int | None]:
    """Tenants whose head is not at the follower's position, with that position."""
    return await fetch_dict(
        connection,
        """
        SELECT h.tenant_id, p.seq FROM scheduler.chain_heads h
          LEFT JOIN scheduler.follower_positions p ON p.follower = $1 AND p.tenant_id = h.tenant_id
         WHERE h.tenant_id IS NOT NULL AND h.head_seq > 0 AND p.seq IS DISTINCT FROM h.head_seq
        """,
        follower,
    )


async def followed(connection: Connection, follower: str) -> list[str]:
    """Tenants in whose chains the follower has a position."""
    return await fetch_column(
        connection, "SELECT tenant_id FROM scheduler.follower_positions WHERE follower = $1 AND seq > 0", follower
    )


async def lock_places(connection: Connection, follower: str, tenant_ids: Sequence[str]) -> dict[str, Place]:
    """The follower's positions in these chains, locked until the transaction ends.

    Without a position, or with one beyond the head, it starts at 0. A position that another session has locked is left
    out, because that session follows the chain.
    """
    places = {each[0]: Place(*each[1:]) for each in await connection.fetch(_LOCK, follower, tenant_ids)}
    if missing := [tenant_id for tenant_id in tenant_ids if tenant_id not in places]:
        await connection.execute(
            """
            INSERT INTO scheduler.follower_positions (follower, tenant_id, seq)
            SELECT $1, tenant_id, 0 FROM scheduler.chain_heads WHERE tenant_id = ANY($2::text[]) ORDER BY tenant_id
                ON CONFLICT DO NOTHING
            """,
            follower,
            missing,
        )
        places |= {each[0]: Place(*each[1:]) for each in await connection.fetch(_LOCK, follower, missing)}
    if beyond := {name: place.seq for name, place in places.items() if place.seq > place.head_seq}:
        await move(connection, follower, beyond, dict.fromkeys(beyond, 0))
        places |= {name: Place(0, places[name].head_seq, True) for name in beyond}
    return places


async def move(
    connection: Connection, follower: str, old_seqs: Mapping[str, int], new_seqs: Mapping[str, int]
) -> set[str]:
    """Move each tenant's position from its old seq to its new one; returns the tenants whose position was not moved."""
    moving = [(name, old_seqs[name], seq) for name, seq in new_seqs.items() if seq != old_seqs[name]]
    moved = await fetch_column(
        connection,
        """
        UPDATE scheduler.follower_positions AS p SET seq = n.new_seq
          FROM unnest($2::text[], $3::bigint[], $4::bigint[]) AS n(tenant_id, old_seq, new_seq)
         WHERE p.follower = $1 AND p.tenant_id = n.tenant_id AND p.seq = n.old_seq RETURNING p.tenant_id
        """,
        follower,
        *turned(moving, 3),
    )
    return {name for name, *_ in moving}.difference(moved)


async def entries_behind(
    connection: Connection, tenant_id: str, after_seq: int, upto_seq: int, limit: int
) -> list[FollowedEntry]:
    """Up to ``limit`` entries after ``after_seq`` up to ``upto_seq``, in seq order."""
    return await fetch_as(
        connection,
        FollowedEntry,
        f"""
        SELECT {columns(FollowedEntry)} FROM scheduler.scheduler_log
         WHERE tenant_id = $1 AND seq > $2 AND seq <= $3 ORDER BY seq LIMIT $4
        """,
        tenant_id,
        after_seq,
        upto_seq,
        limit,
    )
