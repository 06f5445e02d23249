"""The exit codes of every command, and the order of precedence among them.

0 fine | 1 could not run | 2 tampered or corrupt | 3 incomplete | 4 unknown, expired or revoked key
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Any, Final, NamedTuple

from ledger.errors import (
    ArchiveInvalidError,
    BrokenRangeError,
    BundleInvalidError,
    ChainDamagedError,
    NotABundleError,
    ReceiptInvalidError,
    SignatureError,
    UnknownKeyError,
    V1ChainBrokenError,
    WalCorruptError,
)


class ExitCode(IntEnum):
    """The exit status of ``tally``."""

    FINE = 0
    COULD_NOT_RUN = 1
    TAMPERED = 2
    INCOMPLETE = 3
    UNKNOWN_KEY = 4
    JOB_REFUSED = 125
    """``tally run`` only: the ledger did not accept the job, so the command was not started."""
    CANNOT_EXECUTE = 126
    NOT_FOUND = 127


_GRAVEST_FIRST = (
    ExitCode.TAMPERED,
    ExitCode.UNKNOWN_KEY,
    ExitCode.INCOMPLETE,
    ExitCode.COULD_NOT_RUN,
    ExitCode.FINE,
)

_CODE_OF_RESULT: Final = {"broken": ExitCode.TAMPERED, "unknown_key": ExitCode.UNKNOWN_KEY}

_TAMPERED = (
    ArchiveInvalidError,
    BrokenRangeError,
    BundleInvalidError,
    ChainDamagedError,
    ReceiptInvalidError,
    SignatureError,
    V1ChainBrokenError,
    WalCorruptError,
)
"""Errors that mean TAMPERED."""


def gravest(codes: Iterable[ExitCode]) -> ExitCode:
    """The code to exit with if several apply; FINE if there is none."""
    return min(codes, key=_GRAVEST_FIRST.index, default=ExitCode.FINE)


OWN_SOURCES: Final = ("archive", "bundle")
"""Names in ``compared_with`` of checkpoints that came with the entries; each also names the aspect of its place."""


_NO_TABLES: Final = ("projection", "not_checked")


class Unchecked(NamedTuple):
    """The parts that a verification left unchecked; all empty if it checked everything."""

    aspects: tuple[str, ...]
    """Aspects with the verdict ``not_checked``."""
    unsigned_entries: int
    """Entries at the end that no snapshot signs yet."""
    entries_before: int
    """Entries before the first one that was verified, without those that left with a prune."""
    below_quorum: tuple[str, ...] = ()
    """What is missing to the quorum of a policy."""


def unchecked(verdict: Mapping[str, Any]) -> Unchecked:
    """The unchecked parts in a verdict object of ``/v1/chain/verify``, which make it INCOMPLETE.

    A lack of outside checkpoints shows in ``compared_with`` and is not incomplete. A checkpoint that was given and
    could not be compared is incomplete, and ``not_compared`` names it.
    """
    # A service of a release without retention answers no ``verified_from_seq``.
    entries_before = max(0, verdict["from_seq"] - verdict.get("verified_from_seq", 1))
    return Unchecked(_unchecked_aspects(verdict), verdict["unsigned_entries"], entries_before, below_quorum(verdict))


def below_quorum(verdict: Mapping[str, Any]) -> tuple[str, ...]:
    """What is missing to the quorum of a policy; empty if it is met, or none was given."""
    policy = verdict.get("policy")
    return () if policy is None or policy["met"] else (*policy["missing"],)


def _unchecked_aspects(verdict: Mapping[str, Any]) -> tuple[str, ...]:
    aspects = [aspect for aspect, result in verdict["verdicts"].items() if result == "not_checked"]
    outside = {*(verdict["compared_with"] or "").split(", "), *verdict.get("not_compared", ())} - {"", *OWN_SOURCES}
    if not outside and "checkpoint" in aspects:
        aspects.remove("checkpoint")
    return tuple(aspects)


def exit_code_of_verdict(verdict: Mapping[str, Any]) -> ExitCode:
    """The exit code for a verdict object of ``/v1/chain/verify``; see ``unchecked`` for INCOMPLETE. Unrepaired breaks
    beside the chain have the same effect as breaks in it."""
    found = _exit_code(verdict, is_incomplete=any(unchecked(verdict)))
    return gravest([ExitCode.TAMPERED, found]) if verdict.get("not_mended") else found


def exit_code_of_receipt(verdict: Mapping[str, Any]) -> ExitCode:
    """The exit code for a receipt's verdict object: it is about single entries, so no others can be missing."""
    return _exit_code(verdict, is_incomplete=bool(_unchecked_aspects(verdict) or below_quorum(verdict)))


def _exit_code(verdict: Mapping[str, Any], *, is_incomplete: bool) -> ExitCode:
    codes = [_CODE_OF_RESULT[result] for result in verdict["verdicts"].values() if result in _CODE_OF_RESULT]
    return gravest([*codes, ExitCode.INCOMPLETE] if is_incomplete else codes)


def exit_code_of_bundle(verdict: Mapping[str, Any]) -> ExitCode:
    """The exit code for a bundle's verdict object: as for a chain, except that a bundle has no tables to check."""
    return exit_code_of_verdict(without_jobs(verdict))


def without_jobs(verdict: Mapping[str, Any]) -> dict[str, Any]:
    """The verdict object as for a place without job states, so that none are unchecked."""
    verdicts = {name: said for name, said in verdict["verdicts"].items() if (name, said) != _NO_TABLES}
    return {**verdict, "verdicts": verdicts}


def exit_code_of_error(error: Exception) -> ExitCode:
    """The code for an error that ended a command."""
    if isinstance(error, UnknownKeyError):
        return ExitCode.UNKNOWN_KEY
    if isinstance(error, _TAMPERED) and not isinstance(error, NotABundleError):
        return ExitCode.TAMPERED
    return ExitCode.COULD_NOT_RUN
