"""``tally replay --as commitments``: two schedulers race to place the pods of a trace, on the ledger that judges them.

Each proposal carries the key::

    promise-{first 40 hex of SHA-256 of "sha256(pods)\\nsha256(nodes)\\ntenant\\npod\\nattempt, or gone"}

so that a second run gets the first verdicts, and adds nothing, for the seven days that keys are kept.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import msgspec

from app.runtime.answers.jobs import CapacityAnswer, CommitmentList, NodeList, VerdictOfProposal
from cli.client import LedgerClient
from lab.openb_commitments import NODES_FILE, Step, capacities, steps
from lab.racing import WINDOW, Proposed, Race, RaceSummary, Verdict
from ledger.decoding import convert
from ledger.errors import InvalidInputError
from ledger.machines.promises import Resources
from tallystick_client import ProblemError


class Replayed(msgspec.Struct):
    """What a replay did."""

    nodes: int
    steps: int
    race: RaceSummary
    entries_added: int
    """By all who wrote meanwhile; none in a second run."""
    duration_s: float
    proposals_per_second: float | None
    as_of_seq: int


def read(file: Path, nodes: Path | None) -> tuple[Path, dict[str, Resources], list[Step]]:
    """The list of nodes, what they have, and what happens to the pods.

    Raises:
        InvalidInputError: a file is missing or none of the trace.
    """
    found = nodes or file.with_name(NODES_FILE)
    if not found.is_file():
        raise InvalidInputError(f"{found} is not there; name the list of nodes with --nodes")
    return found, capacities(found), steps(file)


def replay(
    client: LedgerClient,
    tenant_id: str,
    files: tuple[Path, Path],
    cluster: dict[str, Resources],
    happened: Sequence[Step],
    advance: Callable[[int], object],
) -> Replayed:
    """Record the capacities that are not recorded yet, and run the race."""
    identity = "\n".join(hashlib.sha256(path.read_bytes()).hexdigest() for path in files)
    began_s = time.monotonic()
    with ThreadPoolExecutor(WINDOW) as pool:
        before = _seq(client, tenant_id)
        known = _known(client, tenant_id) if before else {}
        missing = [(node, has) for node, has in cluster.items() if known.get(node) != has]
        for _ in pool.map(lambda each: _set_capacity(client, tenant_id, *each), missing):
            pass

        def propose(window: Sequence[Proposed]) -> list[Verdict]:
            return list(pool.map(lambda each: _propose(client, each, _key(identity, tenant_id, each)), window))

        race = Race(tenant_id, cluster, propose)
        race.run(happened, advance)
    took_s = time.monotonic() - began_s
    summary, after = race.summary, _seq(client, tenant_id)
    proposals = summary.placed + summary.revoked + summary.conflicts
    rate = round(proposals / took_s, 1) if took_s else None
    return Replayed(len(cluster), len(happened), summary, after - before, round(took_s, 3), rate, after)


def _key(identity: str, tenant_id: str, proposed: Proposed) -> str:
    step = proposed.step
    what = "gone" if step.asks is None else str(proposed.attempt)
    digest = hashlib.sha256(f"{identity}\n{tenant_id}\n{step.pod}\n{what}".encode()).hexdigest()
    return f"promise-{digest[:40]}"


def _propose(client: LedgerClient, proposed: Proposed, key: str) -> Verdict:
    try:
        answer = client.post("/v1/commitments", proposed.body, VerdictOfProposal, key=key)
    except ProblemError as error:
        if error.kind != "conflict":
            raise
        return Verdict(None, str(error.members.get("reason")), error.members.get("free"))
    return Verdict(answer["index"])


def _set_capacity(client: LedgerClient, tenant_id: str, node: str, has: Resources) -> None:
    body = {"tenant_id": tenant_id, "capacity": msgspec.to_builtins(has)}
    client.send("PUT", f"/v1/nodes/{node}/capacity", body, CapacityAnswer)


def _seq(client: LedgerClient, tenant_id: str) -> int:
    """Where the tenant's chain ends, 0 where it has not begun."""
    try:
        answer: dict[str, Any] = client.get("/v1/commitments", CommitmentList, tenant_id=tenant_id, limit=1)
    except ProblemError as error:
        if error.kind != "tenant-not-found":
            raise
        return 0
    seq: int = answer["as_of_seq"]
    return seq


def _known(client: LedgerClient, tenant_id: str) -> dict[str, Resources]:
    """By node, the capacity that is recorded."""
    found: dict[str, Resources] = {}
    for page in client.pages("/v1/nodes", NodeList, tenant_id=tenant_id):
        found |= {item["node"]: convert(item["capacity"], Resources) for item in page["items"]}
    return found
