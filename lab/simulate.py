"""``tally simulate``: run a log of proposals through the commitment machine, without a service.

The log is a bundle, or NDJSON: entries as ``/v1/chain/entries`` gives them, or proposals and capacities of one's own::

    {"commitment": {...}, "precondition": {...}}        {"node": "n1", "capacity": {...}}

An entry is judged again, whatever verdict it records; where that was another, it counts as different. Entries are
judged by the rules of their tenant, and proposals of one's own by the newest; ``--rules`` names others. A bundle that
begins at a floor begins with the commitments that its PRUNED entry carries, which are not judged.
"""

from __future__ import annotations

import asyncio
import hashlib
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from itertools import islice
from pathlib import Path
from typing import Annotated, Any, Final, NamedTuple

import msgspec
import orjson
import typer

from lab.simulated_state import NOTHING, StoredState, Taken, stored_state
from ledger.decoding import decode_packed
from ledger.errors import InvalidInputError, reported_as
from ledger.exit_code import ExitCode
from ledger.facts.events import VERDICTS, CommitmentAction
from ledger.machines.carried import read_commitments
from ledger.machines.commitment_state import claims_of
from ledger.machines.commitments import Commitments
from ledger.machines.promises import (
    NO_BET,
    RULES,
    RULES_NEWEST,
    Commitment,
    Resources,
    Revocation,
    read_capacity,
    read_proposal,
)
from ledger.machines.retention import retention_of
from ledger.verification.entry_check import ENTRY_COLUMNS
from signing.bundle.reader import BundleChainReader, BundleReader
from signing.files import open_regular
from terminal.outcome import CommandExit, counted, out, print_json
from terminal.program import Json

ENTRIES_A_COMMIT: Final = 10_000
_SEQ, _ACTION, _PAYLOAD, _ORIGIN = map(ENTRY_COLUMNS.index, ("seq", "action", "payload", "origin"))
_ACTIONS: Final = (*VERDICTS, CommitmentAction.CAPACITY_SET)


class LogEntry(NamedTuple):
    """One entry of the log; ``action`` is None where no verdict is recorded."""

    seq: int
    action: str | None
    payload: bytes | str
    is_own: bool = False
    """Whether it is none of a chain: a log that begins with it is judged by the newest rules."""
    is_carried: bool = False
    """Whether it left, and a PRUNED entry carries what it says."""


class Simulated(msgspec.Struct):
    """What running a log came to."""

    entries: int = 0
    accepted: int = 0
    rejected: int = 0
    reasons: dict[str, int] = msgspec.field(default_factory=dict)
    capacities: int = 0
    different: int = 0
    """Entries that record another verdict."""
    first_different: int | None = None
    live: int = 0
    """Commitments that are active now."""
    live_max: int = 0
    """Most commitments that were active at one time."""
    reserved: dict[str, int] = msgspec.field(default_factory=dict)
    """By dimension, what is reserved on all nodes."""
    reserved_max: dict[str, int] = msgspec.field(default_factory=dict)
    """The most that it was."""

    def count(self, commitment: Commitment, change: int) -> None:
        """One commitment more, or less, is active."""
        self.live += change
        self.live_max = max(self.live_max, self.live)
        for claimed in claims_of(commitment).values():
            for name, amount in claimed.items():
                self.reserved[name] = self.reserved.get(name, 0) + change * amount
                self.reserved_max[name] = max(self.reserved_max.get(name, 0), self.reserved[name])


def simulate(
    log: Annotated[Path, typer.Argument(exists=True, dir_okay=False, readable=True, help="A bundle, or NDJSON.")],
    state: Annotated[
        Path | None,
        typer.Option("--state", dir_okay=False, help="Keep the state in this file, and go on from it."),
    ] = None,
    rules: Annotated[
        int | None,
        typer.Option(
            "--rules", min=1, max=RULES_NEWEST, help="Judge by this version of the rules from the first entry."
        ),
    ] = None,
    as_json: Json = False,
) -> None:
    """Run a log through the commitment machine: what is accepted, how full the nodes are, how large the state is.

    Needs no service. With --state a run that was killed, or a log that has
    grown, goes on where the state was stored last. Exit code 2: an entry
    records another verdict than judging gives.

    \b
    Examples:
      tally simulate openb.bundle.tar
      tally simulate acme.bundle.tar --rules 2
      tally simulate proposals.ndjson --state /tmp/what-if.sqlite --json
    """
    began_s = time.monotonic()
    with stored_state(state) if state is not None else nullcontext() as stored:
        machine = Commitments(stored.live if stored is not None else None)
        if rules is not None and machine.state.rules.setdefault(RULES, rules) != rules:
            raise InvalidInputError(f"--state has rules {machine.state.rules[RULES]}; --rules needs a new file")
        found, before = _run(log, machine, stored)
        took_s = time.monotonic() - began_s
        document = {
            "log": str(log),
            **msgspec.to_builtins(found),
            "rules": machine.state.rules.get(RULES),
            "nodes": len(machine.state.nodes),
            "packing": _packing(machine, found),
            "duration_s": round(took_s, 3),
            "entries_per_second": round((found.entries - before) / took_s, 1) if took_s else None,
        }
    if as_json:
        print_json(document)
    else:
        _print(document)
    raise CommandExit(ExitCode.TAMPERED if found.different else ExitCode.FINE)


def _run(log: Path, machine: Commitments, stored: StoredState | None) -> tuple[Simulated, int]:
    """What the log came to, and how many of its entries were taken before, as ``stored`` has them.

    Raises:
        InvalidInputError: ``stored`` is the state of another log.
    """
    taken = stored.taken() if stored is not None else NOTHING
    found = decode_packed(taken.summary, Simulated) if taken.entries else Simulated()
    entries, read = _entries(log), hashlib.sha256()
    for entry in islice(entries, taken.entries):
        read.update(_identity(entry))
    if taken.entries and read.digest() != taken.digest:
        raise InvalidInputError(f"--state is that of another log: its first {taken.entries:,} entries are not in {log}")
    while batch := list(islice(entries, ENTRIES_A_COMMIT)):
        for entry in batch:
            with reported_as(InvalidInputError, f"entry {entry.seq} of {log}", InvalidInputError):
                _take(machine, entry, found)
        if stored is not None:
            for entry in batch:
                read.update(_identity(entry))
            stored.commit(Taken(found.entries, read.digest(), msgspec.msgpack.encode(found)))
    return found, taken.entries


def _identity(entry: LogEntry) -> bytes:
    payload = entry.payload.encode() if isinstance(entry.payload, str) else entry.payload
    return b"%d %b %b\n" % (entry.seq, (entry.action or "").encode(), payload.strip())


def _take(machine: Commitments, entry: LogEntry, found: Simulated) -> None:
    found.entries += 1
    if entry.is_carried:
        machine.fold(entry.seq, str(entry.action), entry.payload)
        if entry.action == CommitmentAction.PROPOSE_ACCEPTED:
            found.count(read_proposal(entry.payload).commitment, 1)
        return
    if entry.is_own:
        machine.state.rules.setdefault(RULES, RULES_NEWEST)
    if entry.action == CommitmentAction.CAPACITY_SET:
        machine.set_capacity(read_capacity(entry.payload))
        found.capacities += 1
        return
    proposal = read_proposal(entry.payload)
    commitment = proposal.commitment
    revoked = machine.state.active.get(commitment.index) if isinstance(commitment, Revocation) else None
    rejection = machine.decide(entry.seq, proposal)
    verdict = CommitmentAction.PROPOSE_ACCEPTED if rejection is None else CommitmentAction.PROPOSE_REJECTED
    if rejection is None:
        found.accepted += 1
        found.count(commitment if revoked is None else revoked, 1 if revoked is None else -1)
    else:
        found.rejected += 1
        found.reasons[rejection.reason] = found.reasons.get(rejection.reason, 0) + 1
    if entry.action is not None and (entry.action != verdict or proposal.rejection != rejection):
        found.different += 1
        found.first_different = found.first_different or entry.seq


def _entries(log: Path) -> Iterator[LogEntry]:
    """The proposals and capacities of a log, in its order."""
    with open_regular(log) as file:
        is_ndjson = file.read(1) == b"{"
        file.seek(0)
        if is_ndjson:
            for number, line in enumerate(file, 1):
                if line.strip() and (entry := _entry_of(number, line)) is not None:
                    yield entry
            return
    with BundleReader.open(log) as bundle:
        yield from _carried(bundle)
        for rows in bundle.entry_batches():
            for row in rows:
                if row[_ACTION] in _ACTIONS and row[_ORIGIN] is None:
                    yield LogEntry(row[_SEQ], row[_ACTION], row[_PAYLOAD])


def _carried(bundle: BundleReader) -> Iterator[LogEntry]:
    """The commitments at the floor that the bundle begins at; whether a key signed them is not judged."""
    rows = asyncio.run(BundleChainReader(bundle).retention_entries())
    floor = retention_of(rows, lambda *_: "not_checked", is_strict=False).floor
    carried = None if floor is None else read_commitments(floor.commitments, floor.to_seq)
    if carried is not None:
        for seq, (action, payload) in carried.payloads().items():
            yield LogEntry(seq, action, payload, is_carried=True)


def _entry_of(number: int, line: bytes) -> LogEntry | None:
    with reported_as(InvalidInputError, f"line {number} is not JSON", ValueError):
        said = orjson.loads(line)
    match said:
        case {"action": str(action)} if action not in _ACTIONS:
            return None
        case {"action": action, "seq": int(seq), "payload": str(payload)}:
            return LogEntry(seq, action, payload) if said.get("origin") is None else None
        case {"capacity": _}:
            return LogEntry(number, CommitmentAction.CAPACITY_SET, line, is_own=True)
        case {"commitment": commitment}:
            proposal = {"commitment": commitment, "precondition": said.get("precondition", NO_BET)}
            return LogEntry(number, None, orjson.dumps(proposal), is_own=True)
    names = f"has {', '.join(said) or 'nothing'}" if isinstance(said, dict) else "is no object"
    raise InvalidInputError(
        f"line {number} {names}: it is neither an entry (seq, action, payload) nor a proposal (commitment) nor a "
        "capacity (node, capacity)"
    )


def _packing(machine: Commitments, found: Simulated) -> dict[str, dict[str, float]]:
    """By dimension: what nodes of known capacity have, what is reserved now and was at most, and that as a share."""
    has: Counter[str] = Counter()
    for node in machine.state.nodes:
        capacity: Resources | None = machine.state.nodes[node].capacity
        if capacity is not None:
            has.update(dict(capacity.amounts()))
    return {
        name: {
            "capacity": amount,
            "reserved": found.reserved.get(name, 0),
            "reserved_max": found.reserved_max.get(name, 0),
            "share_max": round(found.reserved_max.get(name, 0) / amount, 4),
        }
        for name, amount in sorted(has.items())
    }


def _print(document: dict[str, Any]) -> None:
    proposals = document["accepted"] + document["rejected"]
    out.print(
        f"{counted(proposals, 'proposal')}: {document['accepted']:,} accepted, {document['rejected']:,} rejected; "
        f"{document['live']:,} active now, at most {document['live_max']:,}; {counted(document['nodes'], 'node')}; "
        f"{document['entries_per_second'] or 0:,.0f} entries/s",
        markup=False,
    )
    for reason, count in sorted(document["reasons"].items()):
        out.print(f"  {reason}: {count:,}", markup=False)
    for name, dimension in document["packing"].items():
        out.print(f"  {name}: at most {dimension['share_max']:.1%} of {dimension['capacity']:,} reserved", markup=False)
    if document["different"]:
        first = document["first_different"]
        out.print(f"{document['different']:,} entries record another verdict, the first at {first:,}", markup=False)
