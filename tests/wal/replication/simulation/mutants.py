"""The protocol with one rule taken out: each of these must be found by some seed, or the simulation proves nothing.

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
    """``module`` is of ``wal.replication``; the seeds are some that find it."""

    module: str
    replacements: tuple[Replacement, ...]
    seeds: tuple[int, ...]


_FENCE = """        if not self._is_promised_to(run, message.epoch):
            return self._fenced()
        if self._elected != message.epoch:
            return self._refuse(messages.NOT_ELECTED, f"the history of epoch {message.epoch} was not applied here")
        tail"""
_BY_HISTORY = """            if histories.epoch_of(self._history, first_lsn) != message.written_in:
"""
_BY_HISTORY_END = """            if histories.epoch_of(self._history, last_lsn) != message.written_in:
"""
_NEVER = """            if False:
"""

MUTANTS = {
    "an equal epoch is promised to another run": Mutant(
        "acceptor",
        (
            ("message.epoch == control.promised_epoch and run != control.promised_run", "False"),
            ("if message.epoch > control.promised_epoch:", "if message.epoch >= control.promised_epoch:"),
        ),
        (),
    ),
    "a promise is given before what was appended is synced": Mutant(
        "acceptor",
        (
            (
                "        self._sync()\n        if message.configuration.order >",
                "        if message.configuration.order >",
            ),
        ),
        (),
    ),
    "the promise is not stored": Mutant(
        "acceptor", (("control._replace(promised_epoch=message.epoch, promised_run=run,", "control._replace("),), ()
    ),
    "the longest log is elected, whatever its epoch": Mutant(
        "election", (("if promise.tail > tail:", "if promise.tail.lsn > tail.lsn:"),), ()
    ),
    "batches are appended in an epoch whose history was not applied": Mutant(
        "acceptor",
        (
            (_FENCE, _FENCE.replace("self._elected != message.epoch", "False")),
            (_BY_HISTORY, _NEVER),
            (_BY_HISTORY_END, _NEVER),
        ),
        (),
    ),
    "batches are appended whatever epoch was promised": Mutant(
        "acceptor",
        (
            (_FENCE, "        tail"),
            (_BY_HISTORY, _NEVER),
            (_BY_HISTORY_END, _NEVER),
        ),
        (),
    ),
    "an end that diverges is not cut": Mutant("acceptor", (("log.truncate(common)", "pass"),), ()),
    "a record of an earlier epoch is committed by counting": Mutant(
        "proposer", (("if reached >= self._epoch_start_lsn:", "if True:"),), ()
    ),
    "one member is enough to commit": Mutant(
        "proposer", (("reverse=True)[len(member_ids) // 2]", "reverse=True)[0]"),), ()
    ),
    "members of all regions count": Mutant(
        "proposer",
        (
            (
                "        voters = self.configuration.voters\n        if not self._ack_mode",
                "        voters = frozenset(each.member_id for each in self.configuration.members)\n"
                "        if not self._ack_mode",
            ),
        ),
        (),
    ),
    "what was appended is acknowledged before it is synced": Mutant(
        "acceptor", (("            return None\n        self._sync()\n", "            return None\n"),), ()
    ),
    "a batch that does not fit is appended": Mutant(
        "acceptor",
        (
            ("if message.previous != tail:", "if False:"),
            ("check_batches(body, first_lsn,", "check_batches(body, after(message.previous.lsn),"),
        ),
        (),
    ),
    "members are replaced all at once": Mutant(
        "proposer",
        (
            (
                "            return self._following(tuple(each for each in now.members if each != member))\n",
                "            return self._following(tuple(sorted(ready.values())))\n",
            ),
            ("        assert not now.is_quorum or copies or differ_by_one(now, following)\n", ""),
            ("following is not None and self._stays_committed(following)", "following is not None"),
        ),
        (),
    ),
    "members are changed before a record of the epoch is committed": Mutant(
        "proposer", (("if now.is_quorum and self.committed_lsn < self._epoch_start_lsn:", "if False:"),), ()
    ),
    "a member goes before the others hold what is committed": Mutant(
        "proposer", (("following is not None and self._stays_committed(following)", "following is not None"),), ()
    ),
    "the list of members is not raised to the new epoch": Mutant(
        "proposer", (("        if configuration.members:\n", "        if False:\n"),), ()
    ),
    "a quorum begins without the copy that was the log": Mutant(
        "proposer", (("if following.is_quorum and not self.configuration.is_quorum:", "if False:"),), ()
    ),
    "a list that lets nobody vote is believed": Mutant(
        "election", (("if self._newest.copies and self._own_configuration.is_quorum:", "if False:"),), ()
    ),
    "a copy that begins late knows nothing of what came before": Mutant(
        "acceptor", (("histories.up_to(message.history, before(message.first_lsn))", "()"),), ()
    ),
    "an answer to an earlier attempt ends the later": Mutant(
        "election",
        (("case Refusal() if message.reason == FENCED:", "case Refusal() if message.promised_epoch >= self._epoch:"),),
        (),
    ),
    "who has an equal epoch is dropped for good": Mutant(
        "proposer", (("message.promised_epoch >= self._epoch:", "message.promised_epoch > self._epoch:"),), ()
    ),
}


def _wipe_and_keep_the_id(kept: disk.Disk) -> None:
    member_id = kept.control.member_id if hasattr(kept, "control") else None
    _wipe(kept)
    if member_id is not None:
        kept.control = kept.control._replace(member_id=member_id)


_wipe = disk.Disk.wipe


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
