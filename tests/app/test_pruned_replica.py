"""Reads of a pruned chain from a hot standby: one that has not replayed the prune shows the whole state of before, one
that has says where the jobs are. No copy shows a part of both."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any, NamedTuple

import httpx
import pytest

from app.dev.embedded import EmbeddedPostgres
from tests.app.service_thread import serving
from tests.app.standby import Standby, standby_of
from tests.app.test_retention import (
    BATCH,
    Site,
    fill,
    problem,
    prune,
    set_policy,
    until_prunable,
    until_removed,
)
from tests.tally import run_tally
from tests.waiting import until

DATABASE = "pruned_replica"
TENANT = "acme"
FLOOR = 30
HOW: list[dict[str, Any]] = [
    {"consistency": "eventual"},
    {"consistency": "session"},
    {"consistency": "bounded_staleness", "max_staleness_ms": 600_000},
]
"""Reads that a replica may answer."""


class Copied(NamedTuple):
    """A service with one replica."""

    site: Site
    standby: Standby

    def get(self, path: str, session: str | None = None, **params: Any) -> httpx.Response:
        headers = {} if session is None else {"Tally-Session": session}
        return self.site.client.get(path, params={"tenant_id": TENANT, **params}, headers=headers)

    def from_replica(self, path: str, **params: Any) -> dict[str, Any]:
        """The answer, once the replica gives it: one that a busy machine holds up is out for a moment."""

        def found() -> dict[str, Any] | None:
            answer = self.get(path, **params)
            is_there = answer.status_code == 200 and answer.json()["consistency"]["source"] == "replica-1"
            return answer.json() if is_there else None

        answer: dict[str, Any] = until(found, f"the replica answers {path}")
        return answer

    def verdict(self) -> dict[str, Any]:
        """Of ``tally verify`` on the replica."""
        keys = self.site.folder / "keys.json"
        keys.write_text(self.site.client.get("/v1/keys").text)
        dsn = self.standby.url(self.site.service_url)
        done = run_tally("verify", "-t", TENANT, "--dsn", dsn, "--keys", str(keys), "--no-state", "--json")
        assert done.returncode in (0, 3), done.stdout + done.stderr
        found: dict[str, Any] = json.loads(done.stdout)
        return found


@pytest.fixture(scope="module")
def copied(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Copied]:
    folder = tmp_path_factory.mktemp("pruned_replica")
    with standby_of(postgres) as standby:
        settings: dict[str, Any] = {
            "archive": {"url": str(folder / "archive"), "interval": "1s"},
            "chain": {"batch_size": BATCH},
            "database_replica_urls": [standby.url(postgres.service_url(DATABASE))],
        }
        with (
            serving(postgres, folder / "data", DATABASE, **settings) as url,
            httpx.Client(base_url=url, timeout=60, trust_env=False) as client,
        ):
            site = Site(client, postgres.service_url(DATABASE), postgres.superuser_url(DATABASE), folder)
            yield Copied(site, standby)


def create(copied: Copied, job_id: str) -> str:
    """A new job; returns the session."""
    answer = copied.site.client.post("/v1/jobs", json={"tenant_id": TENANT, "job_id": job_id, "durability": "GLOBAL"})
    assert answer.status_code == 201, answer.text
    return str(answer.headers["tally-session"])


def ids(listed: dict[str, Any]) -> set[str]:
    assert not listed.get("damaged"), listed
    return {each["job_id"] for each in listed["items"]}


def test_a_replica_shows_all_of_before_a_prune_or_all_of_after_it(copied: Copied) -> None:
    site = copied.site
    fill(site, TENANT, range(10))
    set_policy(site, TENANT, period="1s")
    until_prunable(site, TENANT, FLOOR)
    before = copied.from_replica("/v1/jobs/job-3", consistency="eventual")
    of_before = {f"job-{number}" for number in range(10)}
    until(lambda: ids(copied.from_replica("/v1/jobs", consistency="eventual")) == of_before, "the table has followed")

    # The replica stops here, and the prune and its rows go on at the primary.
    asyncio.run(copied.standby.pause())
    try:
        session = create(copied, "later")
        assert prune(site, TENANT, to_seq=FLOOR)["to_seq"] == FLOOR
        until_removed(site, TENANT, FLOOR)
        for how in (*HOW, {"as_of": before["last_hlc"]}):
            shown = copied.from_replica("/v1/jobs/job-3", **how)
            assert {**shown, "consistency": None} == {**before, "consistency": None}
        assert ids(copied.from_replica("/v1/jobs", consistency="eventual")) == of_before
        assert len(copied.from_replica("/v1/jobs/job-3/events", consistency="eventual")["items"]) == 3
        found = copied.verdict()
        assert (found["valid"], found["verified_from_seq"], found["pruned"]) == (True, 1, None)
        # What saw a later write, or nothing older than now, is answered by the primary.
        for asked in ({"session": session}, {"consistency": "bounded_staleness", "max_staleness_ms": 0}):
            assert problem(copied.get("/v1/jobs/job-3", **asked)) == (410, "archived")
        assert problem(copied.get("/v1/jobs/job-3", session=session, as_of=before["last_hlc"])) == (410, "archived")
        assert problem(copied.get("/v1/jobs/job-3/events", session=session)) == (410, "archived")
        assert ids(copied.get("/v1/jobs", session=session).json()) == {"later"}
    finally:
        asyncio.run(copied.standby.resume())

    # It replays the prune and the removal.
    until(lambda: ids(copied.from_replica("/v1/jobs", consistency="eventual")) == {"later"}, "the replica has replayed")
    for how in (*HOW, {"as_of": before["last_hlc"]}):
        answer = copied.get("/v1/jobs/job-3", **how)
        assert problem(answer) == (410, "archived")
        assert (answer.json()["archive"], answer.json()["verified_from_seq"]) == (str(site.folder / "archive"), 31)
    assert problem(copied.get("/v1/jobs/job-3/events", consistency="eventual")) == (410, "archived")
    assert copied.from_replica("/v1/jobs/later", session=session)["status"] == "SUBMITTED"
    found = copied.verdict()
    assert (found["valid"], found["verified_from_seq"], found["pruned"]["to_seq"]) == (True, FLOOR + 1, FLOOR)
    assert site.client.get("/readyz").json()["checks"]["breaks"]["ok"]
