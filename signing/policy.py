"""Policies over witnesses (c2sp.org/tlog-policy): which witnesses must have cosigned a log before it is relied on.

Format, UTF-8, one item a line, its parts separated by spaces or tabs; a line that begins with ``#`` is a comment::

    log     KEY [URL]                    a log that the policy is about; if there is none, it is about every log
    witness NAME KEY [URL]               a witness, and the address to which add-checkpoint is appended
    group   NAME any|all|NUMBER NAME...  holds when so many of its members do
    quorum  NAME|none                    exactly once: the witness or group that must hold

A name is defined once, before its use, and is a member of at most one group, so that no witness counts twice; for the
same reason no two witnesses have one key. ``none`` is not a name. docs/formats/policy.md has an example.

A cosignature on a tree counts for every smaller tree of the same log, since the witness has seen that one extend those.
So each name has a size: of a witness that of the largest tree that it cosigned, of a group with threshold ``k`` the
``k``-th largest of its members. The quorum covers the entries up to its size.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Final, NamedTuple

from ledger.errors import InvalidInputError, refuse, reported_as
from signing.files import read_bounded
from signing.note import VerifierKey, WitnessKey

POLICY_BYTES_MAX: Final = 256 * 1024
LOGS_MAX: Final = 1000
WITNESSES_MAX: Final = 32
"""Witnesses of one ledger; a note has room for a signature of each."""
GROUPS_MAX: Final = 100
NONE: Final = "none"

_WORDS = re.compile(r"[^ \t]+")
_URL = re.compile(r"https?://[!-?A-~]{1,2000}", re.ASCII)
_NUMBER = re.compile(r"[1-9][0-9]{0,2}", re.ASCII)


class PolicyWitness(NamedTuple):
    """A witness under the name that the policy gives it; ``url`` is None where the policy names no address."""

    name: str
    key: WitnessKey
    url: str | None


class Group(NamedTuple):
    """So many of these witnesses and groups."""

    name: str
    threshold: int
    members: tuple[str, ...]


class Quorum(NamedTuple):
    """How far the witnesses of a policy vouch for a log."""

    name: str
    size: int
    """The quorum covers the first ``size`` entries."""
    to_seq: int
    """The last entry that is to be covered."""
    missing: tuple[str, ...]
    """One text a witness that does not cover it; empty if the quorum does."""

    @property
    def is_met(self) -> bool:
        """Whether the quorum covers all of it."""
        return self.size >= self.to_seq

    def to_json(self) -> dict[str, Any]:
        """As plain values, in a verdict object."""
        fields = {"quorum": self.name, "quorum_to_seq": min(self.size, self.to_seq), "missing": [*self.missing]}
        return {"met": self.is_met, **fields}


@dataclass
class Policy:
    """A parsed policy. The caller MUST NOT change it."""

    logs: list[VerifierKey] = field(default_factory=list)
    witnesses: dict[str, PolicyWitness] = field(default_factory=dict)
    groups: dict[str, Group] = field(default_factory=dict)
    """In the order of the file: a group comes after its members."""
    quorum: str = ""

    @classmethod
    def parse(cls, text: str) -> Policy:
        """The policy in ``text``.

        Raises:
            InvalidInputError: malformed; the message names the line.
        """
        policy = cls()
        for number, line in enumerate(text.split("\n"), 1):
            words = _WORDS.findall(line)
            if not words or words[0].startswith("#"):
                continue
            with reported_as(InvalidInputError, f"line {number} of the policy", InvalidInputError):
                item = _ITEMS.get(words[0])
                if item is None:
                    raise InvalidInputError(f"{words[0][:40]!r} is not log, witness, group or quorum")
                item(policy, words[1:])
        if not policy.quorum:
            raise InvalidInputError("the policy has no line quorum")
        return policy

    @classmethod
    def load(cls, path: Path) -> Policy:
        """The policy in a file.

        Raises:
            InvalidInputError: malformed, too long or not UTF-8.
            OSError: it cannot be read.
        """
        content = read_bounded(path, POLICY_BYTES_MAX, "a policy", InvalidInputError)
        with reported_as(InvalidInputError, f"{path} is not UTF-8", UnicodeDecodeError):
            text = content.decode()
        with reported_as(InvalidInputError, f"{path}", InvalidInputError):
            return cls.parse(text)

    @property
    def keys(self) -> list[WitnessKey]:
        """The keys of its witnesses."""
        return [each.key for each in self.witnesses.values()]

    def covers(self, origin: str) -> bool:
        """Whether the policy is about the log ``origin``."""
        return not self.logs or origin in {key.name for key in self.logs}

    def judge(self, sizes: Mapping[str, int], to_seq: int) -> Quorum:
        """How far the quorum covers a log, and whether that is up to entry ``to_seq``. ``sizes`` has, by verifier key,
        the largest tree of this log that a witness cosigned and that was found to be of this log."""
        if self.quorum == NONE:
            return Quorum(NONE, to_seq, to_seq, ())
        reached = {each.name: sizes.get(each.key.text(), 0) for each in self.witnesses.values()}
        for group in self.groups.values():
            reached[group.name] = sorted((reached[name] for name in group.members), reverse=True)[group.threshold - 1]
        size = reached[self.quorum]
        behind = [] if size >= to_seq else [name for name in self._under_quorum() if reached[name] < to_seq]
        return Quorum(self.quorum, size, to_seq, tuple(f"{name}: {_said(reached[name], to_seq)}" for name in behind))

    def _under_quorum(self) -> list[str]:
        """The witnesses that the quorum is made of, in the order of the file."""
        wanted = {self.quorum}
        for group in reversed(self.groups.values()):
            if group.name in wanted:
                wanted.update(group.members)
        return [name for name in self.witnesses if name in wanted]

    # --- lines ------------------------------------------------------------------------------------

    def _add_log(self, words: list[str]) -> None:
        _require_words(words, 1, 2, "a verifier key, and perhaps a URL")
        refuse(InvalidInputError, (len(self.logs) == LOGS_MAX, f"there are more than {LOGS_MAX} logs"))
        self.logs.append(VerifierKey.parse(words[0]))

    def _add_witness(self, words: list[str]) -> None:
        _require_words(words, 2, 3, "a name, a verifier key, and perhaps a URL")
        name, key, url = words[0], WitnessKey.parse(words[1]), words[2] if len(words) == 3 else None
        refuse(
            InvalidInputError,
            (len(self.witnesses) == WITNESSES_MAX, f"there are more than {WITNESSES_MAX} witnesses"),
            (url is not None and not _URL.fullmatch(url), "the URL is not one of http:// or https:// without a user"),
            (
                key.public_key.key_id in {each.public_key.key_id for each in self.keys},
                f"the key of {name} is that of another witness, which would count twice",
            ),
        )
        self._define(name)
        self.witnesses[name] = PolicyWitness(name, key, url)

    def _add_group(self, words: list[str]) -> None:
        _require_words(words, 3, None, "a name, any, all or a number, and members")
        name, threshold, *members = words
        used = {member for group in self.groups.values() for member in group.members}
        unknown = [each for each in members if each not in self.witnesses and each not in self.groups]
        twice = sorted({each for each in members if each in used or members.count(each) > 1})
        number = {"any": 1, "all": len(members)}.get(threshold)
        if number is None and _NUMBER.fullmatch(threshold):
            number = int(threshold)
        refuse(
            InvalidInputError,
            (len(self.groups) == GROUPS_MAX, f"there are more than {GROUPS_MAX} groups"),
            (bool(unknown), f"{', '.join(unknown)[:200]} is not defined above"),
            (bool(twice), f"{', '.join(twice)[:200]} is a member of a group already, and would count twice"),
            (
                number is None or number > len(members),
                f"the threshold is not any, all or a number from 1 to {len(members)}",
            ),
        )
        assert number is not None
        self._define(name)
        self.groups[name] = Group(name, number, tuple(members))

    def _set_quorum(self, words: list[str]) -> None:
        _require_words(words, 1, 1, "a name, or none")
        name = words[0]
        refuse(
            InvalidInputError,
            (bool(self.quorum), "there is a line quorum already"),
            (
                name != NONE and name not in self.witnesses and name not in self.groups,
                f"{name[:200]} is not defined above",
            ),
        )
        self.quorum = name

    def _define(self, name: str) -> None:
        refuse(
            InvalidInputError,
            (name == NONE, "none is not a name"),
            (name in self.witnesses or name in self.groups, f"{name[:200]} is defined already"),
        )


_ITEMS: Final[Mapping[str, Callable[[Policy, list[str]], None]]] = {
    "log": Policy._add_log,
    "witness": Policy._add_witness,
    "group": Policy._add_group,
    "quorum": Policy._set_quorum,
}


def _require_words(words: list[str], least: int, most: int | None, what: str) -> None:
    if len(words) < least or (most is not None and len(words) > most):
        raise InvalidInputError(f"what follows must be {what}")


def _said(size: int, to_seq: int) -> str:
    return f"has cosigned {size} of {to_seq} entries" if size else "has cosigned nothing of this log"
