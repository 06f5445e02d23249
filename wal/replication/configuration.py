"""The members of one log: which of them vote, and which must hold a record before it is committed.

The list of members is the file ``members`` beside the log, JSON in ASCII and one line::

    {"copies": false, "epoch": 3, "generation": 2, "home": "use1", "members": [["<32 hex>", "use1"], ...]} <crc32 hex>

It is replaced as a whole. The control file holds the generation, too, and is stored later. So an older list was put
back from a copy, and is refused.
"""

from __future__ import annotations

import json
from enum import StrEnum
from pathlib import Path
from typing import NamedTuple
from zlib import crc32

from ledger.errors import ConfigurationError, WalCorruptError
from ledger.positions import NO_EPOCH, Epoch
from wal.format import LSN_LIMIT
from wal.segment import read_file, store_file

MEMBERS_NAME = "members"
MEMBERS_MAX = 32


class Member(NamedTuple):
    """A member: the random id of its copy of the log, 32 hex digits; and its region."""

    member_id: str
    region: str


class Configuration(NamedTuple):
    """The members of one log. Members of the home region vote; the others follow.

    With ``copies`` no member votes: the members hold copies, from which no node may take over. Of two
    lists the one of the later epoch is valid; within an epoch, that of the higher generation.
    """

    generation: int = 0
    epoch: Epoch = NO_EPOCH
    home: str = ""
    copies: bool = True
    members: tuple[Member, ...] = ()

    @property
    def order(self) -> tuple[Epoch, int]:
        """Of two lists the one with the higher order is valid."""
        return self.epoch, self.generation

    @property
    def is_sound(self) -> bool:
        """Whether a received list is valid: its numbers can be stored, and it has not too many members."""
        return len(self.members) <= MEMBERS_MAX and all(0 <= number <= LSN_LIMIT for number in self.order)

    @property
    def voters(self) -> frozenset[str]:
        """Ids of the members that vote: a majority of their promises elects, of their acknowledgements commits."""
        return frozenset() if self.copies else self.of_region(self.home)

    @property
    def is_quorum(self) -> bool:
        """Whether any member votes: then no record is committed without a majority."""
        return bool(self.voters)

    def has_majority(self, member_ids: frozenset[str]) -> bool:
        """Whether these are more than half of the voters; never if none votes."""
        voters = self.voters
        return len(voters & member_ids) > len(voters) // 2

    @property
    def regions(self) -> frozenset[str]:
        return frozenset(member.region for member in self.members)

    def of_region(self, region: str) -> frozenset[str]:
        """Ids of the members in one region."""
        return frozenset(member.member_id for member in self.members if member.region == region)


NO_MEMBERS = Configuration()


def store(folder: Path, configuration: Configuration) -> None:
    """Store ``configuration`` as the list of ``folder``; durable when this returns.

    Raises:
        OSError: the old list is still whole.
    """
    text = json.dumps(configuration._asdict(), sort_keys=True)
    store_file(folder / MEMBERS_NAME, f"{text} {crc32(text.encode()):08x}\n".encode())


def load(folder: Path, generation: int) -> Configuration:
    """The list of ``folder``; by the control file its generation is at least ``generation``.

    Raises:
        WalCorruptError: it is damaged, missing, or older.
    """
    path = folder / MEMBERS_NAME
    try:
        text, _, crc = read_file(path).decode("ascii").rstrip("\n").rpartition(" ")
    except FileNotFoundError:
        text, crc = "", ""
    except (OSError, UnicodeDecodeError) as error:
        raise _corrupt(str(error)) from error
    if not text and not generation:
        return NO_MEMBERS
    if f"{crc32(text.encode()):08x}" != crc:
        raise _corrupt("it is damaged or missing")
    fields = json.loads(text)
    found = Configuration(
        **{**fields, "members": tuple(Member(*each) for each in fields["members"]), "epoch": Epoch(fields["epoch"])}
    )
    if found.generation < generation:
        raise _corrupt(f"it is of generation {found.generation}, but generation {generation} was stored")
    return found


def _corrupt(reason: str) -> WalCorruptError:
    return WalCorruptError(MEMBERS_NAME, 0, f"the list of members cannot be trusted: {reason}")


class AckMode(StrEnum):
    """``wal.ack_mode``. With the local ones members keep copies; with the others they vote."""

    LOCAL_ASYNC = "LOCAL_ASYNC"
    LOCAL_GROUP_SYNC = "LOCAL_GROUP_SYNC"
    LOCAL_SYNC = "LOCAL_SYNC"
    REPLICATED_QUORUM = "REPLICATED_QUORUM"
    REPLICATED_ALL = "REPLICATED_ALL"

    @property
    def is_replicated(self) -> bool:
        """Whether a record is committed only if other machines hold it."""
        return self in (AckMode.REPLICATED_QUORUM, AckMode.REPLICATED_ALL)


def split_address(address: str) -> tuple[str, int]:
    """Host and port of ``host:port``; an IPv6 host is in brackets.

    Raises:
        ConfigurationError: it is not of this form.
    """
    host, _, port = address.rpartition(":")
    if not host or not port.isdecimal() or int(port) > 65535:
        raise ConfigurationError(f"{address!r} is no HOST:PORT")
    return host.strip("[]"), int(port)
