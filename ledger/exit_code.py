"""The exit codes of every command, and which of several holds.

0 fine | 1 could not run | 2 tampered or corrupt | 3 incomplete | 4 unknown, expired or revoked key
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from enum import IntEnum
from typing import Any

from ledger.errors import (
    ArchiveInvalidError,
    BrokenRangeError,
    BundleInvalidError,
    ChainDamagedError,
    LedgerError,
    SignatureError,
    UnknownKeyError,
    WalCorruptError,
)


class ExitCode(IntEnum):
    """What the caller of ``tally`` learns from ``$?``."""

    FINE = 0
    COULD_NOT_RUN = 1
    TAMPERED = 2
    INCOMPLETE = 3
    UNKNOWN_KEY = 4
    JOB_REFUSED = 125
    """``tally run`` only: the ledger did not take the job, so the command was not started."""
    CANNOT_EXECUTE = 126
    NOT_FOUND = 127


_GRAVEST_FIRST = (
    ExitCode.TAMPERED,
    ExitCode.UNKNOWN_KEY,
    ExitCode.INCOMPLETE,
    ExitCode.COULD_NOT_RUN,
    ExitCode.FINE,
)

_TAMPERED = (
    ArchiveInvalidError,
    BrokenRangeError,
    BundleInvalidError,
    ChainDamagedError,
    SignatureError,
    WalCorruptError,
)
"""Errors that say so."""


def gravest(codes: Iterable[ExitCode]) -> ExitCode:
    """The one code to exit with when several hold; FINE when there is none."""
    return min(codes, key=_GRAVEST_FIRST.index, default=ExitCode.FINE)


def exit_code_of_verdict(verdict: Mapping[str, Any]) -> ExitCode:
    """What a verdict object of ``/v1/chain/verify`` means for the exit code.

    Incomplete is whatever leaves something unchecked: a verdict ``not_checked``, a start after the first
    entry, or entries that no snapshot signs yet. That there was no checkpoint to compare with is said by
    ``compared_with`` and is not incomplete.
    """
    verdicts = dict(verdict["verdicts"])
    if verdict["compared_with"] is None and verdicts["checkpoint"] == "not_checked":
        del verdicts["checkpoint"]
    results = set(verdicts.values())
    codes = []
    if "broken" in results:
        codes.append(ExitCode.TAMPERED)
    if "unknown_key" in results:
        codes.append(ExitCode.UNKNOWN_KEY)
    if "not_checked" in results or verdict["unsigned_entries"] > 0 or verdict["from_seq"] > 1:
        codes.append(ExitCode.INCOMPLETE)
    return gravest(codes)


def exit_code_of_bundle(verdict: Mapping[str, Any]) -> ExitCode:
    """What a bundle's verdict object means: as a chain's, but that no bundle holds job states to be checked."""
    verdicts = {aspect: result for aspect, result in verdict["verdicts"].items() if aspect != "projection"}
    return exit_code_of_verdict({**verdict, "verdicts": verdicts})


def exit_code_of_error(error: LedgerError) -> ExitCode:
    """The code for an error that ended a command."""
    if isinstance(error, UnknownKeyError):
        return ExitCode.UNKNOWN_KEY
    if isinstance(error, _TAMPERED):
        return ExitCode.TAMPERED
    return ExitCode.COULD_NOT_RUN
