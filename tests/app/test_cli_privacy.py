"""``tally privacy`` and ``tally erase`` against a running service."""

from __future__ import annotations

import json
import subprocess
from collections.abc import Callable
from pathlib import Path

import httpx
import pytest

from app.dev.embedded import EmbeddedPostgres
from tests.app.service_thread import serving
from tests.tally import run_tally

NAME = "cli_privacy"
Tally = Callable[..., subprocess.CompletedProcess[str]]


@pytest.fixture
def tally(postgres: EmbeddedPostgres, tmp_path: Path) -> Tally:
    def run(*arguments: str, url: str, said: str = "") -> subprocess.CompletedProcess[str]:
        where = {"TALLY_DATA_DIR": str(tmp_path / "node"), "TALLY_DATABASE_URL": postgres.service_url(NAME)}
        return run_tally(*arguments, said=said, TALLY_URL=url, **where)

    return run


def test_fields_are_declared_shown_and_a_person_is_erased(
    postgres: EmbeddedPostgres, tally: Tally, tmp_path: Path
) -> None:
    with serving(postgres, tmp_path / "node", NAME) as url:
        done = tally(
            "privacy", "set", "-t", "acme", "-f", "spec.user", "-f", "error", "--subject-field", "spec.user", url=url
        )
        assert done.returncode == 0, done.stderr
        assert "spec.user, error" in done.stdout
        shown = json.loads(tally("privacy", "show", "-t", "acme", "--json", url=url).stdout)
        assert (shown["fields"], shown["subject"], shown["seq"]) == (["spec.user", "error"], "spec.user", 1)
        done = tally("run", "-t", "acme", "--subject", "bob", "--json", "--", "false", url=url)
        assert done.returncode == 1, done.stderr
        ran = json.loads(done.stdout)
        assert ran["recorded"] is True
        assert (
            "$private"
            in httpx.get(f"{url}/v1/chain/entries?tenant_id=acme&from_seq={ran['chain']['seq']}", timeout=60).text
        )

        done = tally("privacy", "set", "-t", "acme", "-f", "type", url=url)
        assert done.returncode == 1
        assert "requestor" in done.stderr

        httpx.post(
            f"{url}/v1/jobs", json={"tenant_id": "acme", "job_id": "a", "spec": {"user": "alice"}}, timeout=60
        ).raise_for_status()
        new = tmp_path / "new.key"
        done = tally("privacy", "rotate-master", "--new", str(new), "--json", url=url)
        assert done.returncode == 0, done.stderr
        rotated = json.loads(done.stdout)
        assert (rotated["keys"], rotated["old_master_key_id"] != rotated["master_key_id"]) == (2, True)
        assert new.stat().st_mode & 0o777 == 0o600
        assert tally("privacy", "rotate-master", "--new", str(tmp_path / "third.key"), url=url).returncode == 1
        new.replace(tmp_path / "node" / "keys" / "privacy-master.key")

        done = tally("erase", "-t", "acme", "--subject", "-", "--reason", "asked for", url=url, said="alice\n")
        assert done.returncode == 0, done.stderr
        assert "on record at seq 6" in done.stdout
        job = httpx.get(f"{url}/v1/jobs/a?tenant_id=acme", timeout=60).json()
        assert job["spec"] == {"user": {"$erased": True}}
        done = tally("erase", "-t", "acme", "--subject", "nobody", url=url)
        assert (done.returncode, "subject-not-found" in done.stderr) == (1, True)
