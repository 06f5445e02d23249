"""Chains in which schedulers race: entries as an appender makes them, and as somebody else would have them."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from contextlib import suppress
from typing import Any, NamedTuple

import orjson

from ledger import canonical
from ledger.errors import InvalidInputError
from ledger.machines.commitments import Commitments
from ledger.machines.promises import read_capacity, read_proposal, rejected_payload
from tests.ledger.ledger_in_memory import NODE, Ledger, Row, build, origin_of


class Said(NamedTuple):
    """One entry: its action and its payload."""

    seq: int
    action: str
    payload: dict[str, Any]
    is_imported: bool = False


FREE = {"kind": "None"}
FORGED = {"reason": "not-active", "detail": "because I say so"}


def proposal(commitment: dict[str, Any], precondition: dict[str, Any] | None = None, rules: int = 2) -> dict[str, Any]:
    """The payload of a proposal."""
    bet = precondition or FREE
    return {"commitment": commitment, "precondition": bet, "rules": rules, "type": "CommitmentProposed"}


def placement(capsule: str, node: str = "n1", cpu: int = 1, bet: bool = True) -> dict[str, Any]:
    """The payload of a placement, by default with the bet that there is room for it."""
    amount = {"cpu_millis": cpu}
    wanted = {"kind": "Placement", "capsule": capsule, "node": node, "reservation": amount}
    return proposal(wanted, {"kind": "NodeFreeOf", "node": node, "at_least": amount} if bet else None)


def revocation(index: int) -> dict[str, Any]:
    """The payload of a revocation."""
    return proposal({"kind": "Revocation", "index": index})


def capacity(node: str, *, overcommit: dict[str, Any] | None = None, rules: int = 2, **amounts: Any) -> dict[str, Any]:
    """The payload of a capacity."""
    more = {} if overcommit is None else {"overcommit": overcommit}
    return {"capacity": amounts, "node": node, "rules": rules, "type": "CapacitySet", **more}


RACE = [
    capacity("n1", cpu_millis=2),  # seq 5
    placement("a"),
    placement("b"),
    placement("c"),  # seq 8, rejected: the node is full
    revocation(6),
    placement("c"),  # seq 10, accepted
    revocation(6),  # rejected
    capacity("n1", cpu_millis=9),
    placement("d"),
]
"""Payloads; the seqs are those behind four other entries."""


def adjustment(epoch: int) -> dict[str, Any]:
    """The payload of an adjustment of one module."""
    return proposal({"kind": "ModuleAdjustment", "mission": "m", "module": "web", "replicas": 1, "epoch": epoch})


RULES_RAISED = [
    capacity("n1", rules=1, cpu_millis=2000, accelerators={"A": 3}, overcommit={"cpu_millis": "1.5"}),  # seq 5
    placement("a", cpu=2001),  # rejected: rules 1 ignore the overcommit
    placement("a", cpu=2001, bet=False),  # seq 7, accepted by rules 1
    adjustment(5),
    adjustment(4),
    proposal({"kind": "RulesVersion", "version": 1}),  # seq 10, rejected
    proposal({"kind": "RulesVersion", "version": 2}),
    placement("b", cpu=999),
    placement("c", bet=False),  # seq 13, rejected: over capacity
    adjustment(3),  # rejected: an older epoch
    revocation(11),  # rejected
    capacity(
        "n1", cpu_millis=2000, accelerators={"A": 3}, overcommit={"cpu_millis": "1.501", "accelerators": {"A": "1.4"}}
    ),
    placement("c", cpu=2),
    placement("d", bet=False),  # seq 18, rejected: one more than the limit
    proposal({"kind": "GangPlacement", "gang": "g", "members": [
        {"capsule": f"g{n}", "node": "n1", "reservation": {"accelerators": {"A": 2}}} for n in range(2)]}),
    proposal({"kind": "GangPlacement", "gang": "h", "members": [
        {"capsule": f"h{n}", "node": "n1", "reservation": {"accelerators": {"A": 3}}} for n in range(2)]}),
    proposal({"kind": "GangPlacement", "gang": "i", "members": [  # names that no order of arrival sorts
        {"capsule": f"i{n}", "node": "n1", "reservation": {"accelerators": each}}
        for n, each in enumerate([{"B": 1}, {"9": 1, "A": 5}, {"10": 1, "__proto__": 1}])]}),
]  # fmt: skip
"""Payloads of a tenant from before rules had versions, whose rules are raised."""


class Racing:
    """Chains what is said as an appender does."""

    def __init__(self) -> None:
        self.said: list[Said] = []
        self.rows: list[Row] = []
        self._machine = Commitments()

    def add(self, seq: int, payload: dict[str, Any], *, forged: bool = False, origin: str | None = None) -> Said:
        """Chain a payload at ``seq``; what is ``forged`` gets the other verdict, which is believed ever after."""
        data = canonical.encode(payload)
        if "capacity" in payload:
            action, subject = "CAPACITY_SET", f"node:{payload['node']}"
            if origin is None:
                self._machine.set_capacity(read_capacity(data))
        else:
            proposed, subject = read_proposal(data), subject_of(payload["commitment"])
            rejection = None if origin is not None else self._machine.judge(proposed)
            is_accepted = (rejection is None) != forged
            action = "PROPOSE_ACCEPTED" if is_accepted else "PROPOSE_REJECTED"
            if is_accepted and origin is None:
                with suppress(InvalidInputError):  # What is forged revokes what is not active.
                    self._machine.fold(seq, action, data)
            elif rejection is not None:
                data = rejected_payload(data, rejection)
            elif not is_accepted:
                data = canonical.encode({**payload, "rejection": FORGED})
        said = Said(seq, action, orjson.loads(data), origin is not None)
        self.said.append(said)
        self.rows.append({"seq": seq, "job_id": subject, "action": action, "payload": data.decode(), "origin": origin})
        return said


def committed(
    payloads: Iterable[dict[str, Any]], *, forged: Sequence[int] = (), before: int = 4, tenant_id: str = "acme"
) -> Ledger:
    """A ledger of ``before`` entries of jobs and one each of these; those of the seqs that are ``forged`` otherwise."""
    ledger, racing = build(before, tenant_id=tenant_id), Racing()
    for seq, payload in enumerate(payloads, before + 1):
        racing.add(seq, payload, forged=seq in forged)
    physical = ledger.entries[-1]["hlc_physical"] if ledger.entries else 1_704_931_200_000
    for row in racing.rows:
        hlc = {"hlc_physical": physical + row["seq"], "hlc_logical": 0, "hlc_node": NODE, "link_version": 2}
        ledger.entries.append({**row, **hlc, "t_hlc": f"{hlc['hlc_physical']}:0:{NODE}"})
    mend(ledger)
    ledger.promised = promised(racing.said)
    return ledger


def with_history() -> Ledger:
    """A placed capsule; that it is placed, unlimited and revoked elsewhere as well came by an import."""
    racing = Racing()
    racing.add(5, placement("a", bet=False))
    racing.add(6, placement("a", bet=False), origin=origin_of(1))
    racing.add(7, capacity("n1", cpu_millis=9), origin=origin_of(1))
    racing.add(8, revocation(5), origin=origin_of(1))
    racing.add(9, placement("b"))
    ledger = committed([placement(name, bet=False) for name in "abcde"])
    for row, raced in zip(ledger.entries[4:], racing.rows, strict=True):
        row.update(raced)
    mend(ledger)
    ledger.promised = promised(racing.said)
    return ledger


def mend(ledger: Ledger) -> None:
    """Give the ledger the links, head, tree and signed snapshot that its entries call for."""
    ledger.relink()
    ledger.store_head()
    ledger.store_tree()
    ledger.snapshots.clear()
    ledger.sign(len(ledger.entries))


def flipped(ledger: Ledger, seq: int) -> Ledger:
    """The ledger with the other verdict at ``seq``, with all that is signed and linked made to fit."""
    other = ledger.copy()
    row = other.entry(seq)
    payload = orjson.loads(row["payload"])
    if row["action"] == "PROPOSE_ACCEPTED":
        row["action"], payload["rejection"] = "PROPOSE_REJECTED", FORGED
    else:
        row["action"] = "PROPOSE_ACCEPTED"
        del payload["rejection"]
    row["payload"] = canonical.encode(payload).decode()
    mend(other)
    return other


# --- the table, the naive way -----------------------------------------------------------------------


def promised(log: Sequence[Said]) -> list[dict[str, Any]]:
    """The rows of the table that names what was promised once the last entry was there."""
    rows: list[dict[str, Any]] = []
    for said in log:
        if said.is_imported or said.action == "PROPOSE_REJECTED":
            continue
        wanted = said.payload.get("commitment", {})
        ended = wanted.get("index")
        subject = _subject(said)
        for row in rows:
            is_replaced = said.action == "CAPACITY_SET" and row["subject"] == subject
            if row["ended_seq"] is None and (is_replaced or row["seq"] == ended):
                row["ended_seq"] = said.seq
        if wanted.get("kind") != "Revocation":
            rows.append({"seq": said.seq, "ended_seq": None, "subject": subject})
    return rows


def _subject(said: Said) -> str:
    if said.action == "CAPACITY_SET":
        return f"node:{said.payload['node']}"
    return subject_of(said.payload["commitment"])


def subject_of(wanted: dict[str, Any]) -> str:
    """What entries of a commitment have as their job_id."""
    match wanted["kind"]:
        case "Placement" | "IdentityBind":
            return f"capsule:{wanted['capsule']}"
        case "GangPlacement":
            return f"gang:{wanted['gang']}"
        case "ModuleAdjustment":
            return f"module:{wanted['mission']}/{wanted['module']}"
        case "QuotaGrant":
            return f"quota:{wanted['subject']}"
        case "Lease":
            return f"lease:{wanted['resource']}"
        case "RulesVersion":
            return "rules:commitments"
    return f"index:{wanted['index']}"
