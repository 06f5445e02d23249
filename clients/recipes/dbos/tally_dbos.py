"""Workflows of DBOS on record: ``python tally_dbos.py``, one process beside the application.

It reads the system database of ``DBOS_SYSTEM_DATABASE_URL`` every few seconds; the workflows do not depend on it. A
workflow is a job under its own id: created when it is enqueued, accepted when it runs, then completed, or failed with
its error, also when it is cancelled or recovered too often. One that DBOS recovers stays one job; a fork is another.
"""

import logging
import os
import time
from contextlib import suppress
from datetime import UTC, datetime, timedelta
from typing import Any

from dbos import DBOSClient  # type: ignore[import-not-found]

from tallystick_client import Client, JobEndedError, TallystickError
from tallystick_client.jobs import job_id_of

OVERLAP = timedelta(minutes=1)  # longest from the time of an end to its commit
WITHOUT_END = ["ENQUEUED", "DELAYED", "PENDING", "MAX_RECOVERY_ATTEMPTS_EXCEEDED"]


class Watcher:
    def __init__(self, workflows: DBOSClient, ledger: Client, tenant_id: str) -> None:
        self.workflows, self.ledger, self.tenant_id = workflows, ledger, tenant_id
        self.recorded: set[tuple[str, str]] = set()
        self.since = datetime.now(UTC) - timedelta(days=7)  # as long as the ledger knows what is repeated

    def read(self) -> None:
        """Record what changed since the last pass. The next repeats one that raises."""
        now = datetime.now(UTC)
        found = self.workflows.list_workflows(status=WITHOUT_END, load_input=False)
        found += self.workflows.list_workflows(completed_after=self.since.isoformat(), load_input=False)
        for each in found:
            if (each.workflow_id, each.status) not in self.recorded:
                with suppress(JobEndedError):
                    self._record(each)
        self.recorded, self.since = {(each.workflow_id, each.status) for each in found}, now - OVERLAP

    def _record(self, workflow: Any) -> None:
        spec, job_id = {"workflow": workflow.name, "id": workflow.workflow_id}, job_id_of(workflow.workflow_id)
        job = self.ledger.job(self.tenant_id, spec, job_id=job_id, dc_id="dbos")
        # Whether a cancelled workflow had started is not in the database.
        job.create() if workflow.status in ("ENQUEUED", "DELAYED", "CANCELLED") else job.begin()
        if workflow.status == "SUCCESS":
            job.complete(metrics={"created_at_ms": workflow.created_at, "completed_at_ms": workflow.completed_at})
        elif workflow.status not in WITHOUT_END[:3]:
            job.fail(workflow.error or f"it is {workflow.status}")


if __name__ == "__main__":
    database = DBOSClient(system_database_url=os.environ["DBOS_SYSTEM_DATABASE_URL"])
    watcher = Watcher(database, Client(), os.environ["TALLY_TENANT"])
    while True:
        try:
            watcher.read()
        except TallystickError as error:
            logging.warning("workflows are not on record yet: %s", error)
        time.sleep(5)
