"""The home region of a job, and which events about jobs of other regions this ledger takes (decision 0090).

The home of a job is the region whose node made its id, ``{region}-{ms}-{gate}-{number}``. An id that a caller chose, or
that names neither this region nor a peer's, has no known home.

A ledger with peers takes every event about a job that it knows, wherever its home is, and a cancellation also of a job
that it does not know yet. With ``exchange.foreign_jobs`` ``redirect`` it takes no event about a job of a peer's region,
unless that region was retired.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Final

from app.runtime.sharing import in_turns
from ledger.errors import JobNotFoundError, OtherRegionError
from ledger.names import GATE

_MADE_BY_A_NODE: Final = re.compile(rf"{GATE}-[0-9]+-{GATE}-[0-9]+")


class HomeRegions:
    """The home regions that this ledger can tell: its own and those of its peers."""

    def __init__(
        self,
        own: str,
        ledgers: Mapping[str, str] | None = None,
        *,
        redirects: bool = False,
        is_retired: Callable[[str], bool] = lambda _: False,
    ) -> None:
        """``ledgers`` has the URL of each peer's ledger by its region; ``is_retired`` tells whether that ledger is gone
        for good."""
        self._own = own
        self._ledgers = {region: url.rstrip("/") for region, url in (ledgers or {}).items()}
        self._redirects = redirects
        self._is_retired = is_retired

    def of(self, job_id: str) -> str | None:
        """The home region of the job, None if it is not known."""
        region = job_id.partition("-")[0]
        is_known = region == self._own or region in self._ledgers
        return region if is_known and _MADE_BY_A_NODE.fullmatch(job_id) is not None else None

    async def others(self, job_ids: Iterable[str | None]) -> list[str]:
        """The home regions of these jobs besides this one, sorted. None stands for a job whose id this node makes."""
        if not self._ledgers:
            return []
        homes = {self.of(job_id) async for job_id in in_turns(job_ids) if job_id is not None}
        return sorted(home for home in homes if home is not None and home != self._own)

    def redirected(self, job_id: str) -> OtherRegionError | None:
        """The error for an event about the job if another ledger takes it; None if this one does."""
        home = self.of(job_id) if self._redirects else None
        if home is None or home == self._own or self._is_retired(home):
            return None
        return OtherRegionError(job_id, home, self._ledgers[home])

    def may_be_on_its_way(self, job_id: str) -> bool:
        """Whether another region may have made the job, so that a cancellation is taken before the job arrives."""
        home = self.of(job_id)
        is_taken = not self._redirects or (home is not None and self._is_retired(home))
        return bool(self._ledgers) and is_taken and home != self._own

    def not_found(self, tenant_id: str, job_id: str) -> JobNotFoundError:
        """The error for an event about a job that neither this node nor the chain knows."""
        home = self.of(job_id)
        if home is None or home == self._own or self._is_retired(home):
            or_later = ", or repeat this once it was imported" if home is None and self._ledgers else ""
            return JobNotFoundError(f"tenant {tenant_id} has no job {job_id}; create it first{or_later}")
        return JobNotFoundError(
            f"job {job_id} of tenant {tenant_id} was made in region {home} and has not arrived here: until it is "
            f"imported only its cancellation is taken. Repeat this later, or send it to {self._ledgers[home]}"
        )
