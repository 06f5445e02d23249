"""The judge of a history: what clients were told against what the chain holds at the end.

1. what was answered REGIONAL or GLOBAL is in the chain, once; LOCAL as well, unless its disk was wiped afterwards
2. nothing at all is there twice, and nothing that nobody sent
3. an answer names the entry that is there: its HLC and job; so a key has one answer. What was answered LOCAL may have
   lost against another of its key: keys are looked up on that node alone while PostgreSQL is away, and what one disk
   holds another does not know
4. a SESSION read sees the write whose token it shows, and calls it lost only where it had LOCAL alone
5. a STRONG read sees each GLOBAL write that was answered before it began; a BOUNDED one those older than its bound
6. what a read finds is what was written
7. a process that said it was fenced answers no write that began after that
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from tests.crash.quorum.history import Fenced, Line, Read, Wiped, Wrote

COMMITTED = ("REGIONAL", "GLOBAL")


class Entry(NamedTuple):
    """One entry of the chain that carries a number."""

    hlc: str
    job_id: str


class Violation(NamedTuple):
    """A promise that was broken: which, how, and about which number."""

    rule: str
    detail: str
    number: int


def judge(lines: Sequence[Line], chain: Mapping[int, Sequence[Entry]]) -> list[Violation]:
    """All broken promises of a history, given the entries of the chain by the number that they carry."""
    writes = [line for line in lines if isinstance(line, Wrote)]
    reads = [line for line in lines if isinstance(line, Read)]
    wiped = [line for line in lines if isinstance(line, Wiped)]
    fences = {line.process: line.at_s for line in lines if isinstance(line, Fenced)}
    return [
        *_kept(writes, wiped, chain),
        *_once(writes, chain),
        *_named(writes, chain),
        *_seen(writes, reads),
        *_after_fence(writes, fences),
    ]


def _kept(writes: Iterable[Wrote], wiped: Sequence[Wiped], chain: Mapping[int, Sequence[Entry]]) -> Iterable[Violation]:
    for write in writes:
        if write.number in chain:
            continue
        if write.holds in COMMITTED:
            yield Violation("committed", f"{write} is not in the chain", write.number)
        is_gone = any(wipe.disk == write.disk and wipe.at_s > write.began_s for wipe in wiped)
        if write.holds == "LOCAL" and not is_gone:
            yield Violation("local", f"{write} is not in the chain, and its disk is there", write.number)


def _once(writes: Iterable[Wrote], chain: Mapping[int, Sequence[Entry]]) -> Iterable[Violation]:
    sent = {write.number for write in writes}
    for number, entries in chain.items():
        if len(entries) > 1:
            yield Violation("once", f"{number} is in the chain {len(entries)} times: {entries}", number)
        if number not in sent:
            yield Violation("sent", f"{number} is in the chain, and nobody sent it", number)


def _named(writes: Iterable[Wrote], chain: Mapping[int, Sequence[Entry]]) -> Iterable[Violation]:
    answers: dict[str, Wrote] = {}
    for write in writes:
        if write.holds is None or write.hlc is None or not write.is_final:
            continue
        there = chain.get(write.number, ())
        if there and (write.hlc, write.job_id) not in there:
            yield Violation("named", f"{write} names another entry than {there}", write.number)
        if write.key is not None:
            first = answers.setdefault(write.key, write)
            if (first.hlc, first.job_id) != (write.hlc, write.job_id):
                yield Violation("key", f"{write} is another answer than {first}", write.number)


def _seen(writes: Iterable[Wrote], reads: Iterable[Read]) -> Iterable[Violation]:
    committed, in_chain = _answered_first(writes, COMMITTED), _answered_first(writes, ("GLOBAL",))
    for read in reads:
        is_refused = read.found is None and read.may_have_lost
        if read.status == 200 and read.found != read.number and not is_refused:
            yield Violation("read", f"{read} found another job", read.number)
        if read.problem == "write-lost" and committed.get(read.number, read.began_s) < read.began_s:
            yield Violation("session", f"{read} calls lost what is committed", read.number)
        if read.status != 404:
            continue
        age_s = read.began_s - in_chain.get(read.number, read.began_s)
        if read.consistency == "session" and read.has_session:
            yield Violation("session", f"{read} does not see its own write", read.number)
        if read.consistency == "strong" and age_s > 0:
            yield Violation("strong", f"{read} does not see a GLOBAL write", read.number)
        if read.consistency == "bounded_staleness" and age_s > read.max_staleness_s:
            yield Violation("bounded", f"{read} does not see a GLOBAL write of {age_s:.1f} s ago", read.number)


def _answered_first(writes: Iterable[Wrote], levels: Sequence[str]) -> dict[int, float]:
    """By number, when it was first told that the write is at one of these levels."""
    first: dict[int, float] = {}
    for write in writes:
        if write.holds in levels:
            first[write.number] = min(first.get(write.number, write.ended_s), write.ended_s)
    return first


def _after_fence(writes: Iterable[Wrote], fences: Mapping[str, float]) -> Iterable[Violation]:
    for write in writes:
        at_s = fences.get(write.process)
        if at_s is not None and write.began_s > at_s and write.status in (200, 201):
            yield Violation(
                "fence", f"{write} was answered by a process that knew it was fenced at {at_s}", write.number
            )
