"""The protocol with one rule taken out: each of these must be found by some seed, or the simulation proves nothing.
Rules that only a rare order of events breaks are held by ``test_known_failures``.

A mutant is the source of a module with some text replaced, so that it stays the real code but for that.
"""

from __future__ import annotations

import importlib
import inspect
from types import ModuleType
from typing import NamedTuple

import pytest

from tests.wal.replication.simulation import disk, member, site

Replacement = tuple[str, str]


class Mutant(NamedTuple):
    """``module`` is of ``wal.replication``; the seeds are some that find it, in a world with so many damaged frames."""

    module: str
    replacements: tuple[Replacement, ...]
    seeds: tuple[int, ...]
    damage: float = 0.0


_FENCE = """        if not self._is_promised_to(run, message.epoch):
            return self._fenced()
        if self._elected != message.epoch:
            return self._refuse("not-elected", f"the history of epoch {message.epoch} was not applied here")
        tail"""
_BY_HISTORY = """            if epoch_of(self._history, first_lsn) != message.written_in:
"""
_BY_HISTORY_END = """            if epoch_of(self._history, last_lsn) != message.written_in:
"""
_NEVER = """            if False:
"""

DAMAGE = 0.01
"""Chance that a frame arrives damaged, in worlds where any does."""

MUTANTS = {
    "an equal epoch is promised to another run": Mutant(
        "acceptor",
        (
            ("message.epoch == control.promised_epoch and run != control.promised_run", "False"),
            ("if message.epoch > control.promised_epoch:", "if message.epoch >= control.promised_epoch:"),
        ),
        (35,),
    ),
    "the promise is not stored": Mutant(
        "acceptor", (("control._replace(promised_epoch=message.epoch, promised_run=run,", "control._replace("),), (0,)
    ),
    "the longest log is elected, whatever its epoch": Mutant(
        "election", (("held[address].tail)", "held[address].tail.lsn)"),), (118,)
    ),
    "batches are appended in an epoch whose history was not applied": Mutant(
        "acceptor",
        (
            (_FENCE, _FENCE.replace("self._elected != message.epoch", "False")),
            (_BY_HISTORY, _NEVER),
            (_BY_HISTORY_END, _NEVER),
        ),
        (18,),
    ),
    "batches are appended whatever epoch was promised": Mutant(
        "acceptor",
        (
            (_FENCE, "        tail"),
            (_BY_HISTORY, _NEVER),
            (_BY_HISTORY_END, _NEVER),
        ),
        (0,),
    ),
    "an end that diverges is not cut": Mutant("acceptor", (("log.truncate(common)", "pass"),), (0,)),
    "one member is enough to commit": Mutant(
        "proposer", (("reverse=True)[len(member_ids) // 2]", "reverse=True)[0]"),), (28,)
    ),
    "members of all regions count": Mutant(
        "proposer",
        (
            (
                "        voters = self.configuration.voters\n        if not self._ack_mode.is_replicated and",
                "        voters = frozenset(each.member_id for each in self.configuration.members)\n"
                "        if not self._ack_mode.is_replicated and",
            ),
        ),
        (8,),
    ),
    "what was appended is acknowledged before it is synced": Mutant(
        "acceptor", (("            return None\n        self._sync()\n", "            return None\n"),), (0,)
    ),
    "a batch that does not fit is appended": Mutant(
        "acceptor",
        (
            ("if message.previous != tail:", "if False:"),
            ("check_batches(body, first_lsn,", "check_batches(body, after(message.previous.lsn),"),
        ),
        (2,),
    ),
    "the list of members is not raised to the new epoch": Mutant(
        "proposer", (("        if configuration.members:\n", "        if False:\n"),), (222,)
    ),
    "an answer to an earlier attempt ends the later": Mutant(
        "election",
        (('if message.reason == "fenced":', "if message.promised_epoch >= self._epoch:"),),
        (156,),
    ),
    "who has an equal epoch is dropped for good": Mutant(
        "proposer", (("message.promised_epoch >= self.epoch:", "message.promised_epoch > self.epoch:"),), (62,)
    ),
    "a member that received a damaged frame is not connected to again": Mutant(
        "proposer", (('"damaged-on-the-way" if', '"damaged-at-rest" if'),), (0,), DAMAGE
    ),
}


def _wipe_and_keep_the_id(kept: disk.Disk) -> None:
    member_id = kept.control.member_id if hasattr(kept, "control") else None
    _wipe(kept)
    if member_id is not None:
        kept.control = kept.control._replace(member_id=member_id)


_wipe = disk.Disk.wipe

WIPED_VOTES_SEEDS = (8, 23)


def take_out(monkeypatch: pytest.MonkeyPatch, mutant: Mutant) -> None:
    """From now on the simulation runs this mutant."""
    module = importlib.import_module(f"wal.replication.{mutant.module}")
    source = inspect.getsource(module)
    for old, new in mutant.replacements:
        assert source.count(old) == 1, f"{mutant.module} has {source.count(old)} times: {old}"
        source = source.replace(old, new)
    mutated = ModuleType(module.__name__)
    mutated.__dict__["__file__"] = module.__file__
    exec(compile(source, module.__file__ or "", "exec"), mutated.__dict__)
    for place in (member, site):
        for name in ("Acceptor", "Election", "Proposer", "follow"):
            if name in vars(place) and name in vars(mutated) and vars(mutated)[name].__module__ == module.__name__:
                monkeypatch.setattr(place, name, vars(mutated)[name])


def let_the_wiped_vote(monkeypatch: pytest.MonkeyPatch) -> None:
    """A member whose disk was lost comes back as who it was."""
    monkeypatch.setattr(disk.Disk, "wipe", _wipe_and_keep_the_id)
