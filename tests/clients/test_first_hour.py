"""The scheduler of docs/first-hour.md runs jobs, and stops the one whose cancellation another caller asked for."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

from tallystick_client import Client
from tests.tally import bare_environment

PAGE = Path(__file__).parents[2] / "docs" / "first-hour.md"


def test_the_scheduler_of_the_first_hour_ends_each_job_and_stops_the_cancelled_one(ledger: str, tmp_path: Path) -> None:
    (program,) = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    for name, script in (("a-report", "true"), ("b-broken", "exit 3"), ("c-long", "exec sleep 600")):
        (tmp_path / f"{name}.sh").write_text(script)
    command = [sys.executable, "-c", program, str(tmp_path)]
    environment = bare_environment() | {"TALLY_URL": ledger}

    with (
        subprocess.Popen(command, stdout=subprocess.PIPE, env=environment, text=True) as scheduler,
        Client(ledger) as client,
    ):
        assert scheduler.stdout is not None
        lines = [scheduler.stdout.readline() for _ in range(3)]
        report, broken, long = (line.split()[-1] for line in lines)
        client.cancel_job("demo", long, reason="not tonight", requestor="ops")
        rest = scheduler.stdout.read().splitlines()

        assert sorted(rest) == sorted([f"{report} ended with 0", f"{broken} ended with 3", f"{long} cancelled"])
        statuses = [client.get_job("demo", job)["status"] for job in (report, broken, long)]
    assert (scheduler.returncode, statuses) == (0, ["COMPLETED", "FAILED", "CANCELLED"])
