"""``tally jobs``: lists, searches, and one job with what happened to it. ``tally nodes``: the nodes of a cluster."""

from __future__ import annotations

import csv
import io
import json
import re
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from app.dev.embedded import EmbeddedPostgres
from app.edge.forms import lists
from cli import cluster, jobs
from tests.app.service_thread import serving
from tests.tally import run_tally


@pytest.fixture(scope="module")
def url(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    with serving(postgres, tmp_path_factory.mktemp("cli_jobs"), "cli_jobs") as url:
        lines: list[dict[str, object]] = []
        for number in range(8):
            job = {"tenant_id": "acme", "job_id": f"job-{number}"}
            spec = {"name": f"report-{number}", "image": f"report:{number % 2}", "note": "\x1b[31mred [bold]"}
            lines.append({**job, "type": "JobCreated", "spec": spec, "assigned_dcs": ["use1"]})
            if number == 7:
                lines.append({**job, "type": "JobAccepted", "dc_id": "use1", "worker_count": 2})
                lines.append({**job, "type": "JobFailed", "error": "OOM\x1b[2J [red]killed"})
        body = "".join(json.dumps(line) + "\n" for line in lines)
        headers = {"Content-Type": "application/x-ndjson"}
        post = httpx.post(f"{url}/v1/events?durability=GLOBAL", content=body, headers=headers, timeout=60)
        post.raise_for_status()
        yield url


def tally(url: str, *arguments: str, code: int = 0, zone: str = "UTC") -> str:
    done = run_tally("jobs", "-t", "acme", *arguments, TALLY_URL=url, TZ=zone)
    assert done.returncode == code, done.stderr
    return done.stdout + (done.stderr if code else "")


def test_jobs_are_listed_for_people_newest_first_in_their_zone(url: str) -> None:
    head, first, *more = tally(url, "--limit", "3", zone="Asia/Kathmandu").splitlines()
    assert "CREATED (+0545, +05:45)" in head
    assert (first.split()[0], first.split()[5]) == ("FAILED", "job-7")
    assert (head.split()[6], first.split()[6]) == ("NAME", "report-7")
    assert r"OOM\x1b[2J [red]killed" in first
    assert [line.split()[5] for line in more] == ["job-6", "job-5"]
    hours = {zone: tally(url, "--limit", "1", zone=zone).splitlines()[1].split()[2] for zone in ("UTC", "Asia/Tokyo")}
    assert (int(hours["UTC"][:2]) + 9) % 24 == int(hours["Asia/Tokyo"][:2])


def test_a_job_is_shown_by_its_id_and_else_those_of_its_name_are_listed(url: str) -> None:
    assert "job-3 of acme is SUBMITTED" in tally(url, "job-3")
    head, line = tally(url, "report-3").splitlines()
    assert (head.split()[0], line.split()[5:7]) == ("STATUS", ["job-3", "report-3"])
    assert [job["job_id"] for job in json.loads(tally(url, "report-3", "--json"))["items"]] == ["job-3"]
    done = run_tally("jobs", "-t", "acme", "report-3", TALLY_URL=url)
    assert (done.returncode, done.stderr) == (0, "no job has the id report-3; of this name:\n")
    assert "job-not-found" in tally(url, "report", code=1)


def test_jobs_are_listed_by_end_and_from_the_oldest(url: str) -> None:
    found = json.loads(tally(url, "--order", "asc", "--limit", "2", "--json"))
    assert [job["job_id"] for job in found["items"]] == ["job-0", "job-1"]
    head, line = tally(url, "--sort", "run_ms").splitlines()
    assert (head.split()[-2:], line.split()[5]) == (["RAN", "ERROR"], "job-7")
    assert re.search(r" (0 s|\d+ ms)  ", line)


def test_a_report_is_made_by_the_service_and_written_whole(url: str, tmp_path: Path) -> None:
    page = tmp_path / "acme.html"
    asked = ("report", "-t", "acme", "-o", str(page))
    done = run_tally(*asked, "--since", "2026-01-01T00:00:00Z", TALLY_URL=url)
    assert (done.returncode, done.stdout, done.stderr) == (0, f"the page: {page}\n", "")
    assert "8 jobs were created in this period" in page.read_text()
    told = json.loads(run_tally(*asked, "--json", TALLY_URL=url).stdout)
    assert told == {"tenant_id": "acme", "file": str(page), "bytes": page.stat().st_size}
    page.write_text("what was there")
    refused = run_tally(*asked, "--by", "image", TALLY_URL=url)
    assert refused.returncode == 1
    assert "by" in refused.stderr
    assert page.read_text() == "what was there"


def test_a_search_goes_through_all_pages(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    odd = ["job-7", "job-5", "job-3", "job-1"]
    found = json.loads(tally(url, "--where", "spec.image=report:1", "--json"))
    assert [job["job_id"] for job in found["items"]] == odd
    found = json.loads(tally(url, "--where", "spec.image=report:1", "--json", "--status", "submitted", "--limit", "2"))
    assert [job["job_id"] for job in found["items"]] == odd[1:3]
    rows = list(csv.DictReader(io.StringIO(tally(url, "--csv", "--dc", "use1", "--where", "spec.image=report:1"))))
    assert [row["job_id"] for row in rows] == odd
    assert tuple(rows[0]) == lists.CSV_JOB_COLUMNS
    assert json.loads(tally(url, "--error", "oom", "--status", "failed", "--status", "running", "--json"))["items"]
    assert [row["job_id"] for row in csv.DictReader(io.StringIO(tally(url, "--csv", "--id-part", "PORT-6")))] == [
        "job-6"
    ]
    assert tally(url, "--since", "2999-01-01T00:00:00Z") == ""
    assert json.loads(tally(url, "--since", "2999-01-01T00:00:00Z", "--json")) == {"items": []}
    with jobs.LedgerClient(url) as client:
        monkeypatch.setattr(jobs, "PAGE", 3)
        assert len(list(jobs._found(client, {"tenant_id": "acme"}, None, []))) == 8


def test_jobs_are_counted(url: str) -> None:
    head, failed, submitted, every = tally(url, "--summary").splitlines()
    assert re.split(" {2,}", head) == ["STATUS", "JOBS", "RUN MIN", "RUN P50", "RUN P95", "RUN MAX", "STATUSES"]
    assert {failed.split()[0], submitted.split()[0]} == {"FAILED", "SUBMITTED"}
    assert every.split()[:2] == ["all", "8"]
    assert r"OOM\x1b[2J [red]killed" in tally(url, "--by", "error")
    assert json.loads(tally(url, "--by", "dc", "--json"))["groups"][0]["value"] == "use1"
    assert "alone" in tally(url, "--summary", "--status", "failed", code=1)
    assert "PUT /v1/tenants/acme/search declares fields" in tally(url, "--by", "spec.image", code=1)


def test_one_job_is_shown_with_what_happened_to_it(url: str) -> None:
    shown = tally(url, "job-7")
    assert shown.startswith(r"job-7 of acme is FAILED: OOM\x1b[2J [red]killed")
    assert "\x1b" not in shown
    timeline = [line.split() for line in shown.splitlines()[-3:]]
    assert [line[3] for line in timeline] == ["JobCreated", "JobAccepted", "JobFailed"]
    assert {line[4] for line in timeline} <= {"GLOBAL", "APPLIED", "COMPACTED"}
    told = json.loads(tally(url, "job-7", "--json"))
    assert (told["status"], [event["type"] for event in told["events"]][-1]) == ("FAILED", "JobFailed")
    assert told["events"][0]["at"].endswith("Z")


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--where", "spec.image"), "write FIELD=VALUE"),
        (("--where", "image=x"), "such as spec.image"),
        (("--status", "done"), "there is no status 'DONE'"),
        (("--since", "yesterday"), "neither an HLC"),
        (("job-7", "--status", "failed"), "the other options are of lists"),
        (("--csv", "--json"), "not both"),
        (("no-such-job",), "job-not-found"),
        (("--sort", "duration"), "created_at"),
        (("--summary", "--sort", "run_ms"), "--summary goes with"),
    ],
)
def test_what_cannot_be_asked_is_said(url: str, arguments: tuple[str, ...], said: str) -> None:
    assert said in tally(url, *arguments, code=1)


def test_nodes_are_listed_by_dimension_and_overbooked_ones_are_marked(
    url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def set_capacity(node: str, **said: object) -> None:
        answer = httpx.put(f"{url}/v1/nodes/{node}/capacity", json={"tenant_id": "cluster", **said})
        answer.raise_for_status()

    def listed(*arguments: str) -> str:
        done = run_tally("nodes", "-t", "cluster", *arguments, TALLY_URL=url)
        assert done.returncode == 0, done.stderr
        return done.stdout

    set_capacity("n1", capacity={"cpu_millis": 4000, "accelerators": {"A100": 2}}, overcommit={"cpu_millis": "1.5"})
    set_capacity("n2", capacity={})
    claimed = {"cpu_millis": 5000, "accelerators": {"A100": 2}}
    commitment = {"kind": "Placement", "capsule": "c", "node": "n1", "reservation": claimed, "limit": claimed}
    placed = httpx.post(
        f"{url}/v1/commitments",
        json={"tenant_id": "cluster", "commitment": commitment},
        headers={"Idempotency-Key": "place"},
    ).json()["index"]
    set_capacity("n1", capacity={"cpu_millis": 4000, "accelerators": {"A100": 2}})
    head, columns, *lines = listed().splitlines()
    assert head == f"2 nodes of cluster as of seq {placed + 1}, rules 2; 1 overbooked"
    assert columns.split() == ["NODE", "DIMENSION", "CAPACITY", "OVERCOMMIT", "RESERVED", "FREE"]
    # In the order of the entries that set the capacities.
    assert [line.split() for line in lines] == [
        ["n2", "0", "0", "0"],
        ["n1", "cpu_millis", "4000", "5000", "0", "overbooked", "by", "1000"],
        ["n1", "accelerators.A100", "2", "2", "0"],
    ]
    assert [item["node"] for item in json.loads(listed("--json", "--overbooked"))["items"]] == ["n1"]
    before = json.loads(listed("--json", "--as-of-seq", str(placed)))
    assert [(item["node"], item["overbooked"]) for item in before["items"]] == [("n1", False), ("n2", False)]
    assert "1.5" in listed("--as-of-seq", str(placed))
    unknown = run_tally("nodes", "-t", "nobody", TALLY_URL=url)
    assert (unknown.returncode, "tenant-not-found" in unknown.stderr) == (1, True)
    with jobs.LedgerClient(url) as client:
        monkeypatch.setattr(cluster, "PAGE", 1)
        monkeypatch.setattr(cluster, "tell", lambda answer, *_lines, as_json: pages.append(answer))
        pages: list[dict[str, object]] = []
        cluster.nodes("cluster", client)
        assert pages == [json.loads(listed("--json"))]
