"""When each tenant's chain was last verified from its first entry to its end, and by whom; kept beside the WAL.

``<wal folder>/last_verified.json``, replaced by temp file, fsync, rename and directory fsync::

    {"version": 1, "tenants": {"acme": {"at_s": 1700000000.0, "by": "walk"}}}

``at_s`` is when the verification began: it says nothing of what was changed later. ``by`` is ``walk`` for the walk of
the node over all chains, ``node`` for another verification of its own, else the id of the caller who asked. Verified is
not whole: what was found broken is in ``breaks.json``. Without the file nothing counts as verified, which is safe.
"""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from threading import Lock
from typing import Final, Literal, NamedTuple

import msgspec
import structlog

from app.runtime.state.kept_file import KeptFile
from ledger.errors import StartRefusedError

WALK: Final = "walk"
NODE: Final = "node"

log = structlog.get_logger()


class Verified(msgspec.Struct, frozen=True):
    """One verification of a whole chain."""

    at_s: float
    by: str


class VerifiedAll(NamedTuple):
    """The tenant that was verified longest ago, and how many never were."""

    oldest: Verified | None
    never: int


class _Verified(msgspec.Struct):
    version: Literal[1]
    tenants: dict[str, Verified]


_FILE: Final = KeptFile[_Verified](
    "last_verified.json", _Verified, b'{"version":1,"tenants":{}}', "it is written again with the next verification"
)


class LastVerified:
    """The verifications of one node, in memory and in its WAL folder. Any thread may call it."""

    def __init__(self, wal_folder: Path) -> None:
        self._folder = wal_folder
        self._storing = Lock()
        self._by_tenant: dict[str, Verified] = {}
        try:
            self._by_tenant = _FILE.load(wal_folder).tenants
        except StartRefusedError as error:
            log.warning("last_verified_unreadable", error=str(error))

    def note(self, tenant_id: str, verified: Verified) -> None:
        """The tenant's whole chain was verified; a verification that began earlier changes nothing."""
        known = self._by_tenant.get(tenant_id)
        if known is None or known.at_s < verified.at_s:
            self._by_tenant[tenant_id] = verified

    def of_all(self, tenants: Iterable[str]) -> VerifiedAll:
        """When all of ``tenants``, but those that never were, had been verified."""
        found = [self._by_tenant.get(tenant_id) for tenant_id in tenants]
        oldest = min((each for each in found if each is not None), key=lambda each: each.at_s, default=None)
        return VerifiedAll(oldest, found.count(None))

    def store(self) -> None:
        """Write the file; on return it survives a crash. Blocks on the disk.

        Raises:
            OSError: the disk refuses; in memory all is kept.
        """
        with self._storing:
            _FILE.store(self._folder, _Verified(1, dict(self._by_tenant)))
