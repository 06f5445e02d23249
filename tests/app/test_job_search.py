"""``GET /v1/jobs``: what a search finds, on how many pages, in which forms, and what it never finds."""

from __future__ import annotations

import csv
import io
import itertools
import json
from collections.abc import Iterator
from typing import Any

import httpx
import pytest

from app.dev.embedded import EmbeddedPostgres
from app.edge.forms import lists
from app.edge.routes import jobs as job_routes
from app.read import jobs
from ledger.machines.job_search import ELEMENTS_MAX
from tests.app.service_thread import serving
from tests.conftest import spread

LARGE = "100000000000000000000"
KEY = "app.kubernetes.io/name"
SPECS: dict[str, Any] = {
    "plain": {"image": "a/b:1", "cpus": 4, "gpu": True, "queue": None},
    "texts": {"image": "a/b:2", "cpus": "4", "labels": {"team": "ml", KEY: "web"}, "tags": ["x", 'say "hi"', 7]},
    "deep": {"image": "A/B:1", "labels": {"team": "ML", "app": {"kubernetes": {"io/name": "web"}}}, "tags": []},
    "wide": {"image": "größe/b:1", "tags": [*range(ELEMENTS_MAX), "beyond"], "labels": "team"},
    "large": {"image": 1e20, "cpus": 4.5, "note": "one\ntwo"},
    "none": {},
}
ERRORS: dict[str, Any] = {
    "plain": "OOMKilled: no memory",
    "texts": 'exit "137"\noomkilled',
    "deep": '{"code":"OOM"}',
}
CONDITIONS = (
    "spec.image:a/b:1",
    "spec.image:größe/b:1",
    f"spec.image:{LARGE}",
    "spec.cpus:4",
    "spec.cpus:4.5",
    "spec.gpu:true",
    "spec.queue:null",
    "spec.labels.team:ml",
    f"spec.labels.{KEY}:web",
    "spec.tags:7",
    'spec.tags:say "hi"',
    "spec.tags:beyond",
    "spec.note:one\ntwo",
    "spec.labels:team",
    "spec.absent:",
)


@pytest.fixture(scope="module")
def client(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[httpx.Client]:
    """A client of a service whose tenant acme has jobs of all kinds."""
    folder = tmp_path_factory.mktemp("job_search")
    with (
        serving(postgres, folder / "data", "job_search") as url,
        httpx.Client(base_url=url, timeout=60, trust_env=False) as client,
    ):
        lines: list[dict[str, Any]] = []
        for (name, spec), dc in itertools.product(SPECS.items(), ("a", "b")):
            job = f"{name}-{dc}"
            lines.append({"type": "JobCreated", "job_id": job, "spec": spec, "assigned_dcs": [dc]})
            if dc == "b":
                lines.append({"type": "JobAccepted", "job_id": job, "dc_id": "c" if name == "texts" else "b"})
            elif name in ERRORS:
                lines.append({"type": "JobFailed", "job_id": job, "error": ERRORS[name]})
        send(client, "acme", *lines)
        yield client


def send(client: httpx.Client, tenant: str, *lines: dict[str, Any]) -> None:
    body = b"".join(json.dumps({"tenant_id": tenant, **line}).encode() + b"\n" for line in lines)
    headers = {"Content-Type": "application/x-ndjson"}
    answer = client.post("/v1/events?durability=GLOBAL", content=body, headers=headers)
    assert answer.status_code == 200, answer.text


def ask(client: httpx.Client, accept: str = "*/*", tenant: str = "acme", **params: Any) -> httpx.Response:
    answer = client.get("/v1/jobs", params={"tenant_id": tenant, **params}, headers={"Accept": accept})
    assert answer.status_code == 200, answer.text
    return answer


def found(client: httpx.Client, **params: Any) -> list[str]:
    """Ids of the jobs on all pages of a search."""
    ids, cursor = [], None
    while True:
        page = ask(client, **params, **({} if cursor is None else {"cursor": cursor})).json()
        ids += [job["job_id"] for job in page["items"]]
        if (cursor := page["next_cursor"]) is None:
            return ids


def texts(value: Any, path: list[str]) -> set[str]:
    """What a field has, as the page about searches says it: the naive way, all spellings of the path tried."""
    if not path:
        values = value[:ELEMENTS_MAX] if isinstance(value, list) else [value]
        plain = [each for each in values if not isinstance(each, dict | list)]
        return {
            each if isinstance(each, str) else str(int(each)) if each == 1e20 else json.dumps(each) for each in plain
        }
    return set().union(
        *(
            texts(value[".".join(path[:n])], path[n:])
            for n in range(1, len(path) + 1)
            if isinstance(value, dict) and ".".join(path[:n]) in value
        )
    )


def is_found(job: dict[str, Any], where: str | None, dc: str | None, error: str | None, status: str | None) -> bool:
    accepted = {"texts-b": "c"}.get(job["job_id"], "b" if job["job_id"].endswith("b") else None)
    field, _, text = (where or "").partition(":")
    return (
        (where is None or text in texts(job, field.split(".")))
        and (dc is None or dc in (*job["assigned_dcs"], accepted))
        and (error is None or error.lower() in (job["error"] or "").lower())
        and (status is None or status == job["status"])
    )


@pytest.mark.exhaustive
def test_a_search_finds_what_looking_at_every_job_finds(client: httpx.Client) -> None:
    every = ask(client).json()["items"]
    assert len(every) == 2 * len(SPECS)
    searches = itertools.product((None, *CONDITIONS), (None, "a", "b", "c", "d"), (None,), (None, "FAILED"))
    texts_of_errors = ("oomkilled", '"137"', '"code":"oom"', "\n")
    of_errors = itertools.product((None, CONDITIONS[0]), (None, "a"), texts_of_errors, (None,))
    for where, dc, error, status in (*spread(searches, 50), *of_errors):
        asked = {"where": where, "dc": dc, "error": error, "status": status}
        expected = [job["job_id"] for job in every if is_found(job, **asked)]
        assert found(client, **{name: value for name, value in asked.items() if value is not None}) == expected, asked
    assert found(client, where=CONDITIONS[0]) == ["plain-b", "plain-a"]
    assert found(client, dc="c") == ["texts-b"]


def test_all_conditions_must_hold_and_any_of_several_statuses(client: httpx.Client) -> None:
    assert found(client, where=["spec.cpus:4", "spec.labels.team:ml"]) == ["texts-b", "texts-a"]
    assert found(client, where=["spec.cpus:4", "spec.image:none"]) == []
    assert found(client, status=["failed", "ACCEPTED"], where="spec.cpus:4") == [
        "texts-b", "texts-a", "plain-b", "plain-a"
    ]  # fmt: skip
    assert found(client, status="SUBMITTED") == ["none-a", "large-a", "wide-a"]
    assert found(client, where="spec.cpus:4", since="2999-01-01T00:00:00Z") == []
    assert found(client, where="spec.cpus:4", actor="nobody") == []


NAMED: dict[str, Any] = {
    "use1-0001": {"name": "Nightly report", "command": ["ls"]},
    "use1-0002": {"task": "etl.load", "name": 7},
    "use1-0003": {"command": ["python", 'nightly "job".py', 3, True, {"a": "nested"}]},
    "nightly-4": {"image": "report"},
    "use1-0005": {"name": "x" * 200 + "beyond"},
    "use1-0006": {},
}


@pytest.mark.parametrize(
    ("part", "ids"),
    [
        ("NIGHTLY", ["nightly-4", "use1-0003", "use1-0001"]),
        ("ly rep", ["use1-0001"]),
        ('python nightly "job".py 3', ["use1-0003"]),
        (" ", ["use1-0003", "use1-0001"]),
        ("load", ["use1-0002"]),
        ("1-000", ["use1-0006", "use1-0005", "use1-0003", "use1-0002", "use1-0001"]),
        ("ls", []),
        ("nested", []),
        ("beyond", []),
        ("report", ["use1-0001"]),
        ("%", []),
    ],
)
def test_a_job_is_found_by_any_part_of_its_id_or_name(client: httpx.Client, part: str, ids: list[str]) -> None:
    if client.get("/v1/jobs", params={"tenant_id": "named"}).status_code == 404:
        send(client, "named", *({"type": "JobCreated", "job_id": each, "spec": spec} for each, spec in NAMED.items()))
    assert found(client, tenant="named", id_part=part) == ids
    assert found(client, tenant="named", id_part=part, where="spec.task:etl.load") == [
        each for each in ids if each == "use1-0002"
    ]


def test_pages_of_a_search_have_each_job_once_however_many_are_looked_at(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    send(client, "paged", *({"type": "JobCreated", "spec": {"n": str(n % 7), "even": n % 2 == 0}} for n in range(30)))
    whole = found(client, tenant="paged", where="spec.n:3", limit=1000)
    assert len(whole) == 4
    for at_once, at_most in ((2000, 20_000), (3, 6), (1, 1), (7, 20)):
        monkeypatch.setattr(jobs, "LOOKED_AT_ONCE", at_once)
        monkeypatch.setattr(jobs, "LOOKED_AT_MAX", at_most)
        for limit in (1, 2, 4, 5):
            assert found(client, tenant="paged", where="spec.n:3", limit=limit) == whole
    first = ask(client, tenant="paged", where="spec.n:3", limit=2).json()["next_cursor"]
    params = {"tenant_id": "paged", "where": "spec.n:4", "limit": 2, "cursor": first}
    assert client.get("/v1/jobs", params=params).json()["path"] == "cursor"


def test_what_was_answered_is_found_at_once(client: httpx.Client) -> None:
    for number in range(8):
        send(client, "soon", {"type": "JobCreated", "job_id": f"j-{number}", "spec": {"n": number}})
        assert found(client, tenant="soon", where=f"spec.n:{number}") == [f"j-{number}"]


def test_private_values_are_found_by_nothing_and_shown_to_who_reads(client: httpx.Client) -> None:
    job = {"type": "JobCreated", "spec": {"user": "alice", "image": "x", "name": "alice-job"}}
    send(client, "private", job | {"job_id": "before"})
    body = {"fields": ["spec.user", "spec.name", "error"], "subject": "spec.user"}
    client.put("/v1/tenants/private/privacy", json=body).raise_for_status()
    send(client, "private", job | {"job_id": "since"})
    failed = {"type": "JobFailed", "job_id": "since", "error": "alice was here", "subject": "alice"}
    send(client, "private", failed)
    assert found(client, tenant="private", where="spec.image:x") == ["since", "before"]
    assert found(client, tenant="private", where="spec.user:alice") == ["before"]
    assert found(client, tenant="private", error="alice") == []
    assert found(client, tenant="private", id_part="alice") == ["before"]
    sealed = stored_user(client)
    for member in ("key", "ciphertext", "alg"):
        assert found(client, tenant="private", where=f"spec.user.$private.{member}:{sealed[member]}") == []
    assert found(client, tenant="private", error=sealed["key"]) == []
    rows = list(csv.DictReader(io.StringIO(ask(client, "text/csv", "private").text)))
    assert [json.loads(row["spec"])["user"] for row in rows] == ["alice", "alice"]
    assert (rows[0]["error"], rows[0]["name"]) == ("alice was here", "")


def stored_user(client: httpx.Client) -> dict[str, str]:
    listed = client.get("/v1/chain/entries", params={"tenant_id": "private"}).json()["items"]
    (entry,) = [entry for entry in listed if entry["job_id"] == "since" and entry["action"] == "ENQUEUE"]
    sealed: dict[str, str] = json.loads(entry["payload"])["spec"]["user"]["$private"]
    return sealed


def test_every_job_comes_as_ndjson_and_csv_however_many_pages_that_is(
    client: httpx.Client, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(job_routes, "STREAMED_AT_ONCE", 5)
    every = ask(client).json()["items"]
    lines = ask(client, "application/x-ndjson")
    assert lines.headers["content-type"] == "application/x-ndjson"
    assert [json.loads(line) for line in lines.text.splitlines()] == every
    rows = ask(client, "text/csv, */*;q=0.1")
    assert rows.headers["content-type"].startswith("text/csv")
    head, *body = csv.reader(io.StringIO(rows.text, newline=""))
    assert tuple(head) == lists.CSV_JOB_COLUMNS
    assert [row[1] for row in body] == [job["job_id"] for job in every]
    assert [json.loads(row[head.index("spec")]) for row in body] == [job["spec"] for job in every]
    named = list(csv.reader(io.StringIO(ask(client, "text/csv", where="spec.cpus:4").text, newline="")))
    assert len(named) == 1 + 4
    assert client.head("/v1/jobs", params={"tenant_id": "acme"}, headers={"Accept": "text/csv"}).status_code == 200
    missing = client.get("/v1/jobs", params={"tenant_id": "nobody"}, headers={"Accept": "text/csv"})
    assert (missing.status_code, missing.json()["type"].rpartition("/")[2]) == (404, "tenant-not-found")


def test_a_page_as_csv_names_the_next_one_in_a_header(client: httpx.Client) -> None:
    ids, cursor = [], None
    while not ids or cursor is not None:
        page = ask(client, "application/x-ndjson", limit=5, **({} if cursor is None else {"cursor": cursor}))
        ids += [json.loads(line)["job_id"] for line in page.text.splitlines()]
        cursor = page.headers.get(job_routes.NEXT_CURSOR)
    assert ids == found(client)


FORMULAS = ("=1+1", "+1", "-1", "@SUM(A1)", "\t=1", "\r=1", "\n=1", "\uff1d1")


def test_no_cell_begins_as_a_formula_does(client: httpx.Client) -> None:
    for number, text in enumerate(FORMULAS):
        send(client, "formulas", {"type": "JobCreated", "job_id": f"f-{number}", "assigned_dcs": [text]})
        send(client, "formulas", {"type": "JobFailed", "job_id": f"f-{number}", "error": f'{text},"quoted"'})
    rows = list(csv.DictReader(io.StringIO(ask(client, "text/csv", "formulas").text, newline="")))
    assert [row["error"] for row in reversed(rows)] == [f'\'{text},"quoted"' for text in FORMULAS]
    assert not [
        cell for row in rows for cell in row.values() if cell.startswith(("=", "+", "-", "@", "\t", "\r", "\n"))
    ]


@pytest.mark.parametrize(
    ("accept", "media_type"),
    [
        ("", lists.JSON_MEDIA_TYPE),
        ("*/*", lists.JSON_MEDIA_TYPE),
        ("text/html,application/xhtml+xml;q=0.9,*/*;q=0.8", lists.JSON_MEDIA_TYPE),
        ("text/html", lists.JSON_MEDIA_TYPE),
        ("text/csv", lists.CSV_MEDIA_TYPE),
        ("TEXT/CSV; charset=utf-8", lists.CSV_MEDIA_TYPE),
        ("application/json;q=0.5, application/x-ndjson", lists.NDJSON_MEDIA_TYPE),
        ("application/x-ndjson;q=0, text/csv;q=0.1", lists.CSV_MEDIA_TYPE),
        ("text/csv;q=0.4, application/*;q=0.9", lists.JSON_MEDIA_TYPE),
        ("text/csv;q=x", lists.JSON_MEDIA_TYPE),
    ],
)
def test_the_form_is_the_one_that_accept_likes_best(accept: str, media_type: str) -> None:
    assert lists.media_type_of([accept]) == media_type


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("where", "spec.image"),
        ("where", "image:x"),
        ("where", "spec:x"),
        ("where", "spec..a:x"),
        ("where", "error:x"),
        ("where", "spec.a:" + "x" * 1025),
        ("where", "spec" + ".a" * 16 + ":x"),
        ("where", ["spec.a:x"] * 9),
        ("status", "DONE"),
        ("status", ["FAILED", "DONE"]),
        ("error", ""),
        ("id_part", ""),
        ("id_part", "x" * 1025),
        ("dc", ""),
        ("dc", ["a", "b"]),
        ("since", "yesterday"),
    ],
)
def test_what_is_no_condition_is_refused_by_name(client: httpx.Client, name: str, value: Any) -> None:
    answer = client.get("/v1/jobs", params={"tenant_id": "acme", name: value})
    assert (answer.status_code, answer.json()["path"]) == (422, name), answer.text
