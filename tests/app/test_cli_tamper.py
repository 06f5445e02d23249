"""``tally demo tamper --console``: a falsified ledger to look at, that is gone when its reader has seen enough."""

from __future__ import annotations

import os
import signal
import subprocess
from pathlib import Path

import httpx

from tests.tally import Tally, run_tally


def test_a_falsified_ledger_stays_for_the_console_until_ctrl_c(tmp_path: Path) -> None:
    environment = {**os.environ, "TMPDIR": str(tmp_path)}
    with Tally("demo", "tamper", "--console", env=environment, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        url, separator, place = next(line for line in process.stdout if line.startswith("http")).partition("/console")
        assert (separator, place) == ("/console", "#/verify/demo?run=1\n")
        verdict = httpx.get(f"{url}/v1/chain/verify", params={"tenant_id": "demo"}, timeout=60).json()
        assert (verdict["first_break"]["kind"], verdict["first_break"]["seq"]) == ("payload-digest", 21)
        assert httpx.get(f"{url}/console").status_code == 200
        process.send_signal(signal.SIGINT)
        assert process.wait(60) == 0
    assert [*tmp_path.iterdir()] == []


def test_what_was_found_is_told_or_shown_not_both() -> None:
    done = run_tally("demo", "tamper", "--console", "--json")
    assert done.returncode == 1
    assert "give one of them" in done.stderr
