"""The audit log of Airflow on record: what people did (triggered, cleared, marked, paused), each row once.

Run it every minute, by cron or as a service, where Airflow's settings are::

    TALLY_URL=... TALLY_TENANT=... python tally_airflow_log.py /var/lib/airflow/tally-log.position

A row is a job, ``airflow-log.{id}``, with the row as its spec, done when it is recorded. The file keeps the id of the
last one; rows sent again after it was lost add nothing for as long as the ledger remembers keys. Of a row that the
ledger refuses, such as one of 1 MiB, the record has who did what, and why it was refused.
"""

from __future__ import annotations

import os
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import sqlalchemy as sa

from tallystick_client import Client, InvalidError, JobEndedError

ROWS = sa.text(
    "SELECT id, dttm, event, owner, dag_id, task_id, run_id, map_index, try_number, extra FROM log WHERE id > :id "
    "ORDER BY id LIMIT 500"
)


def send(ledger: Client, connection: Any, tenant_id: str, position: Path) -> int:
    """Record the rows behind ``position``, a file, and move it; how many there were. An error leaves it where it is."""
    last, sent = int(position.read_text()) if position.exists() else 0, 0
    while rows := connection.execute(ROWS, {"id": last}).mappings().all():
        for row in rows:
            spec = {name: str(value) if name == "dttm" else value for name, value in row.items() if value is not None}
            spec["name"] = f"{row['event']} by {row['owner']}"
            try:
                _record(ledger, tenant_id, row["id"], spec)
            except InvalidError as error:  # else no row behind a large one would come; another tenant's name raises
                _record(ledger, tenant_id, row["id"], {"id": row["id"], "name": spec["name"], "refused": str(error)})
            last, sent = row["id"], sent + 1
        new = position.with_suffix(".new")
        new.write_text(str(last))
        new.replace(position)
    return sent


def _record(ledger: Client, tenant_id: str, number: int, spec: dict[str, Any]) -> None:
    with suppress(JobEndedError), ledger.job(tenant_id, spec, job_id=f"airflow-log.{number}", dc_id="airflow"):
        pass  # it has happened


if __name__ == "__main__":
    from airflow.configuration import conf  # type: ignore[import-not-found]

    with Client() as client, sa.create_engine(conf.get("database", "sql_alchemy_conn")).connect() as opened:
        print(send(client, opened, os.environ["TALLY_TENANT"], Path(sys.argv[1])), "rows")
