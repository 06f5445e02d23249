"""The rules of commitments the naive way: what is active is worked out of the whole log each time it is asked for.

Written from the seed's words, over the plain JSON of the entries; it shares nothing with the machine.
"""

from __future__ import annotations

from fractions import Fraction
from math import floor
from typing import Any

Log = list[tuple[str, dict[str, Any]]]
"""By index from 1: (action, what was proposed or set)."""

_AMOUNTS = ("cpu_millis", "memory_bytes", "disk_bytes", "disk_bw_bps")


def active(log: Log) -> dict[int, dict[str, Any]]:
    """Accepted commitments that no accepted revocation names."""
    accepted = {
        index: said["commitment"] for index, (action, said) in enumerate(log, 1) if action == "PROPOSE_ACCEPTED"
    }
    revoked = {each["index"] for each in accepted.values() if each["kind"] == "Revocation"}
    return {index: each for index, each in accepted.items() if each["kind"] != "Revocation" and index not in revoked}


def verdict(log: Log, proposed: dict[str, Any]) -> str | None:
    """Why the next proposal is to be rejected, None when it is accepted."""
    by = rules(log, proposed)
    return _bet(log, proposed["precondition"], by) or _rule(log, proposed["commitment"], by)


def rules(log: Log, proposed: dict[str, Any]) -> int:
    """The version of the rules by which the next entry is judged."""
    kept = [said for action, said in log if action in ("PROPOSE_ACCEPTED", "CAPACITY_SET")]
    versions = [
        said["commitment"]["version"] for said in kept if said.get("commitment", {}).get("kind") == "RulesVersion"
    ]
    first: int = [*kept, proposed][0].get("rules", 1)
    return versions[-1] if versions else first


def limits(log: Log, node: str, by: int) -> dict[str, int] | None:
    """By dimension, what may be reserved of a node; None where its capacity is not known."""
    known, factors = None, {}
    for action, said in log:
        if action == "CAPACITY_SET" and said["node"] == node:
            known, factors = flat(said["capacity"]), said.get("overcommit", {})
    if known is None or by < 2:
        return known
    named = {f"accelerators.{name}": factor for name, factor in factors.get("accelerators", {}).items()}
    return {name: floor(amount * Fraction({**factors, **named}.get(name, "1"))) for name, amount in known.items()}


def reserved(log: Log, node: str) -> dict[str, int]:
    """What active placements claim of a node, by dimension."""
    claimed: dict[str, int] = {}
    for _, member in _members(log):
        if member["node"] == node:
            for name, amount in flat(member["reservation"]).items():
                claimed[name] = claimed.get(name, 0) + amount
    return claimed


def flat(resources: dict[str, Any]) -> dict[str, int]:
    """By dimension, accelerators each by itself."""
    amounts = {name: resources.get(name, 0) for name in _AMOUNTS}
    amounts |= {f"accelerators.{name}": amount for name, amount in resources.get("accelerators", {}).items()}
    return {name: amount for name, amount in amounts.items() if amount}


def _members(log: Log) -> list[tuple[int, dict[str, Any]]]:
    found = []
    for index, each in active(log).items():
        if each["kind"] == "Placement":
            found.append((index, each))
        elif each["kind"] == "GangPlacement":
            found += [(index, member) for member in each["members"]]
    return found


def _bet(log: Log, bet: dict[str, Any], by: int) -> str | None:
    if bet["kind"] == "NodeFreeOf":
        capacity, claimed, asked = limits(log, bet["node"], by), reserved(log, bet["node"]), flat(bet["at_least"])
        if capacity is not None:
            fits = all(capacity.get(name, 0) - claimed.get(name, 0) >= amount for name, amount in asked.items())
            return None if fits else "node-not-free"
        one = {name.partition(".")[0] for name in asked} & {name.partition(".")[0] for name in claimed}
        return "node-not-free" if one else None
    if bet["kind"] == "GangUnplaced":
        return _gang(log, bet["gang"])
    if bet["kind"] == "ModuleAdjustmentVersion":
        return None if _epoch(log, bet) == bet["epoch"] else "adjustment-version"
    return None


def _epoch(log: Log, named: dict[str, Any]) -> int:
    epochs: list[int] = [
        each["epoch"]
        for each in active(log).values()
        if each["kind"] == "ModuleAdjustment"
        and (each["mission"], each["module"]) == (named["mission"], named["module"])
    ]
    return (epochs or [0])[-1]


def _gang(log: Log, gang: str) -> str | None:
    placed = any(each["kind"] == "GangPlacement" and each["gang"] == gang for each in active(log).values())
    return "gang-placed" if placed else None


def _rule(log: Log, commitment: dict[str, Any], by: int) -> str | None:
    kind = commitment["kind"]
    if kind == "Placement":
        return _placing(log, [commitment]) or _fitting(log, [commitment], by)
    if kind == "GangPlacement":
        members = commitment["members"]
        return _gang(log, commitment["gang"]) or _placing(log, members) or _fitting(log, members, by)
    if kind == "IdentityBind":
        bound = {each["capsule"] for each in active(log).values() if each["kind"] == "IdentityBind"}
        return "identity-bound" if commitment["capsule"] in bound else None
    if kind == "ModuleAdjustment":
        if commitment["replicas"] == 0:
            return "scale-to-zero"
        return "older-epoch" if by >= 2 and commitment["epoch"] < _epoch(log, commitment) else None
    if kind == "Revocation":
        of = active(log).get(commitment["index"])
        return "not-active" if of is None else "not-revocable" if of["kind"] == "RulesVersion" else None
    if kind == "RulesVersion":
        return None if commitment["version"] > by else "rules-in-force"
    return None


def _fitting(log: Log, members: list[dict[str, Any]], by: int) -> str | None:
    for node in {member["node"] for member in members}:
        limit, claimed = limits(log, node, by), reserved(log, node)
        if by < 2 or limit is None:
            continue
        mine = [flat(member["reservation"]) for member in members if member["node"] == node]
        for name in {name for each in mine for name in each}:
            if claimed.get(name, 0) + sum(each.get(name, 0) for each in mine) > limit.get(name, 0):
                return "over-capacity"
    return None


def _placing(log: Log, members: list[dict[str, Any]]) -> str | None:
    placed = {member["capsule"] for _, member in _members(log)}
    for member in members:
        most = flat(member["limit"]) if "limit" in member else None
        if most is not None and any(amount > most.get(name, 0) for name, amount in flat(member["reservation"]).items()):
            return "reservation-over-limit"
        if member["capsule"] in placed:
            return "capsule-placed"
        placed.add(member["capsule"])
    return None
