"""Entries of ``_system`` about the regions that a ledger exchanges with: which it retired, and whose keys it trusts.

The facts, as payloads of entries (docs/formats/regions.md)::

    REGION_RETIRED   change_id, region, reason, lag_entries; log_origin or none, retired_by or none; statement
    REGION_ADMITTED  change_id, region, key_id, algorithm, public_key_pem; admitted_by or none; statement
    REGION_KEY_REVOKED  change_id, region, key_id, reason; revoked_by or none; statement

A retired region does not count in a majority of regions, is not imported from, and the ledger of ``log_origin`` gets no
news. ``lag_entries`` were seen there and never imported. An admission trusts a key that the ledger of the region signs
with, and ends a retirement of the region. A revoked key is trusted for no import, even if a file names it, until it is
admitted again; entries that it brought before stay.

Like tokens, all these count only with a statement by a key that may change keys
(:mod:`signing.key_statement`), and no statement names them. Of several entries with one ``change_id`` the first counts,
so that nobody can repeat a retirement after the region was admitted again.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Annotated, NamedTuple

import msgspec
from msgspec import UNSET, Meta, UnsetType

from ledger import names
from ledger.decoding import convert
from ledger.errors import InvalidInputError, reported_as
from ledger.facts.events import SystemAction
from ledger.hlc import Hlc
from signing.key_statement import given
from signing.keys import PublicKey

REGION_PREFIX = "region:"
"""Prefix of ``job_id`` in an entry about a region; its name follows."""
AFTER_REGIONS = "region;"
"""The first text, in byte order, after every region's subject."""
REGION_ACTIONS = frozenset({SystemAction.REGION_RETIRED, SystemAction.REGION_ADMITTED, SystemAction.REGION_KEY_REVOKED})
ADMITTED_KEYS_MAX = 200
"""Admitted keys of peers that count, the newest."""

_Region = Annotated[str, Meta(pattern=names.anchored(names.GATE))]
_Name = Annotated[str, Meta(min_length=1)]


class RetiredRegion(NamedTuple):
    """A region that its peer, this ledger, has given up."""

    change_id: str
    """Random: 16 hex digits."""
    region: str
    reason: str
    hlc: Hlc
    log_origin: str = ""
    """Log origin of its ledger; empty if none of its checkpoints was seen."""
    lag_entries: int = 0
    retired_by: str | None = None

    def facts(self) -> dict[str, object]:
        """As the entry has them, without the statement."""
        return given(
            change_id=self.change_id,
            region=self.region,
            reason=self.reason,
            lag_entries=self.lag_entries,
            log_origin=self.log_origin or None,
            retired_by=self.retired_by,
        )


class AdmittedKey(NamedTuple):
    """A key that the ledger of a region signs with, and that this ledger trusts."""

    change_id: str
    region: str
    key: PublicKey
    admitted_by: str | None = None

    def facts(self) -> dict[str, object]:
        """As the entry has them, without the statement."""
        key = self.key
        return given(
            change_id=self.change_id,
            region=self.region,
            key_id=key.key_id,
            algorithm=key.algorithm,
            public_key_pem=key.public_key_pem,
            admitted_by=self.admitted_by,
        )


class RevokedKey(NamedTuple):
    """A key of a region's ledger that this ledger trusts no longer."""

    change_id: str
    region: str
    key_id: str
    reason: str
    revoked_by: str | None = None

    def facts(self) -> dict[str, object]:
        """As the entry has them, without the statement."""
        return given(**self._asdict())


RegionChange = RetiredRegion | AdmittedKey | RevokedKey


class KnownRegions(NamedTuple):
    """What the entries about regions add up to."""

    retired: Mapping[str, RetiredRegion] = {}
    """By region, those that no later entry admits."""
    logs: Mapping[str, RetiredRegion] = {}
    """By log origin, every log of a region that was ever retired."""
    keys: tuple[AdmittedKey, ...] = ()
    """The admitted keys, each once."""
    revoked: Mapping[str, RevokedKey] = {}
    """The revoked keys, by id."""


class _Facts(msgspec.Struct):
    change_id: Annotated[str, Meta(pattern="^[0-9a-f]{16}$")]
    region: _Region
    reason: _Name | UnsetType = UNSET
    lag_entries: Annotated[int, Meta(ge=0)] = 0
    log_origin: str = ""
    retired_by: str | None = None
    key_id: str = ""
    algorithm: str = ""
    public_key_pem: str = ""
    admitted_by: str | None = None
    revoked_by: str | None = None


def read_region(action: str, facts: Mapping[str, object], hlc: Hlc) -> RegionChange:
    """The change in an entry with these facts, at this HLC.

    Raises:
        InvalidInputError: the facts describe none.
    """
    with reported_as(InvalidInputError, "the facts of a region are malformed", msgspec.ValidationError, OverflowError):
        said = convert(facts, _Facts)
    if action == SystemAction.REGION_ADMITTED:
        key = {"key_id": said.key_id, "algorithm": said.algorithm, "public_key_pem": said.public_key_pem}
        return AdmittedKey(said.change_id, said.region, PublicKey.from_json(key), said.admitted_by)
    if said.reason is UNSET:
        raise InvalidInputError(f"{action} has no reason")
    if action == SystemAction.REGION_KEY_REVOKED:
        return RevokedKey(said.change_id, said.region, said.key_id, said.reason, said.revoked_by)
    return RetiredRegion(
        said.change_id, said.region, said.reason, hlc, said.log_origin, said.lag_entries, said.retired_by
    )


def known_regions(changes: Iterable[RegionChange]) -> KnownRegions:
    """What these changes, in the order of the chain, add up to."""
    retired: dict[str, RetiredRegion] = {}
    logs: dict[str, RetiredRegion] = {}
    keys: dict[str, AdmittedKey] = {}
    revoked: dict[str, RevokedKey] = {}
    for change in changes:
        if isinstance(change, AdmittedKey):
            retired.pop(change.region, None)
            keys.pop(change.key.key_id, None)
            keys[change.key.key_id] = change
            revoked.pop(change.key.key_id, None)
            continue
        if isinstance(change, RevokedKey):
            keys.pop(change.key_id, None)
            revoked[change.key_id] = change
            continue
        retired[change.region] = change
        if change.log_origin:
            logs[change.log_origin] = change
    return KnownRegions(retired, logs, tuple(keys.values())[-ADMITTED_KEYS_MAX:], revoked)
