"""``tally jobs --archive``: the jobs in an archive, in the form in which the service shows jobs."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from app.edge.forms.fields import moment
from app.share.archive import require_packages
from ledger import rfc3339
from ledger.errors import InvalidInputError, JobNotFoundError
from ledger.facts.statuses import STATUSES
from ledger.machines.job_search import JobFilter, field_is
from signing.keys import Keyring

if TYPE_CHECKING:
    from pipeline.archive.jobs import ArchivedJobs


@dataclass(frozen=True)
class ArchivedList:
    """The jobs of one tenant of an archive."""

    jobs: ArchivedJobs

    @classmethod
    def open(cls, url: str, tenant: str, keyring: Keyring) -> ArchivedList:
        """The jobs of a tenant in the archive at ``url``, by manifests that a key of ``keyring`` signed.

        Raises:
            ConfigurationError: the packages of archives are not installed, or the URL names no archive.
            LedgerError: as ``ArchivedJobs.open``.
        """
        require_packages("tally jobs --archive")
        from pipeline.archive.jobs import archived_jobs

        return cls(archived_jobs(url, tenant, keyring))

    def one(self, job_id: str) -> tuple[dict[str, Any], list[dict[str, Any]]]:
        """A job and its events.

        Raises:
            JobNotFoundError: the archive has nothing of it.
        """
        if (found := self.jobs.job(job_id)) is None:
            end = self.jobs.end
            raise JobNotFoundError(f"the archive has no job {job_id} of tenant {end.tenant_id} up to seq {end.to_seq}")
        return found

    def find(self, asked: Mapping[str, Any], limit: int | None) -> list[dict[str, Any]]:
        """The jobs that match what the options ask, newest first.

        Raises:
            InvalidInputError: an option is malformed, or too many jobs match.
        """
        statuses = tuple(dict.fromkeys(status.upper() for status in asked["status"]))
        if asked["sort"] is not None:
            raise InvalidInputError("--sort, --order: a list of an archive begins with the newest job")
        if odd := [status for status in statuses if status not in STATUSES]:
            raise InvalidInputError(f"--status {odd[0]}: there are {', '.join(STATUSES)}")
        wanted = JobFilter(
            statuses,
            asked["actor"],
            asked["dc"],
            tuple(map(field_is, asked["where"])),
            asked["error"],
            asked["id_part"],
            bool(asked["in_conflict"]),
            asked["name"],
        )
        since = moment("since", asked["since"], rfc3339.at_or_after)
        until = moment("until", asked["until"], rfc3339.at_or_after)
        return self.jobs.find(wanted, since, until, limit)
