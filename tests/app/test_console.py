"""The web console in a real browser: every page, signing in, searching, live, a falsified row, bundles."""

from __future__ import annotations

import asyncio
import csv
import io
import re
import tarfile
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from pathlib import Path

import httpx
import pytest
from playwright.sync_api import Page, Route, expect

from app.dev.embedded import EmbeddedPostgres
from app.pages import read_folder
from app.pages.verify_page import verify_page
from app.runtime.state.found_breaks import DAMAGED
from app.store.idempotency import KEY_ROW
from ledger.facts.checks import CHECKS, Stops
from ledger.machines.retention import Why
from ledger.verification import ASPECTS, KINDS
from tests.app.bundles import bundle_of
from tests.app.console_page import WIDE, ZONE, Console, barriers, book, consoling, job, send
from tests.app.oidc_issuer import AUDIENCE, GRANTS, Issuer, issuing
from tests.browser import PHONE
from tests.conftest import execute
from tests.ledger.callers import ML_DSA_44
from tests.ledger.ledger_in_memory import SIGNER, build
from tests.tally import run_tally
from tests.waiting import until

DATABASE = "console"
TENANT = "acme"
MARKUP = "<img src=x onerror=alert(1)><script>alert(2)</script>"
TURNED = "\u202eDETELPMOC"
"""A text that a browser shows from right to left: as a status that the job does not have."""
FALSIFY = (
    "SET session_replication_role = replica; UPDATE scheduler.scheduler_log SET payload = "
    "replace(payload::text, 'disk full', 'no fault')::json WHERE tenant_id = 'broken' AND action = 'FAIL'"
)
MEND = FALSIFY.replace("'disk full', 'no fault'", "'no fault', 'disk full'")
SCRIPTS = {name: file.content.decode() for name, file in read_folder("console").items() if name.endswith(".js")}
ALERTS = Path(__file__).parents[2] / "deploy" / "prometheus" / "alerts.yml"
OF_VERIFY = {name: file.content.decode() for name, file in read_folder("verify").items() if name.endswith(".js")}


@pytest.fixture(scope="module")
def superuser_url(postgres: EmbeddedPostgres) -> str:
    return postgres.superuser_url(DATABASE)


@pytest.fixture(scope="module")
def issuer_of_tokens() -> Iterator[Issuer]:
    with issuing() as issuer:
        yield issuer


@pytest.fixture(scope="module")
def console(
    postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory, issuer_of_tokens: Issuer
) -> Iterator[Console]:
    """The console of a service that asks who calls, root signed in; hostile jobs of three tenants."""
    folder = tmp_path_factory.mktemp("console")
    (folder / "trusted.pem").write_text(SIGNER.public_key_pem)
    oidc = {"issuer": issuer_of_tokens.url, "audience": [AUDIENCE], "grants": GRANTS, "client_id": "console"}
    settings = {
        "auth": {"mode": "oidc", "oidc": oidc},
        "bundle": {"trusted_keys": folder / "trusted.pem"},
        "console": {"trace_url": "https://jaeger.example/trace/{trace_id}"},
    }
    with consoling(postgres, folder, DATABASE, **settings) as console:
        for tenant in (TENANT, "broken", "other"):
            for number in range(3):
                body = job(
                    tenant, f"nightly-{number}", spec={"image": f"backup:{number}", "note": MARKUP, "turned": TURNED}
                )
                console.api.post("/v1/jobs", json=body).raise_for_status()
            failed = {
                "tenant_id": tenant,
                "type": "JobFailed",
                "error": f"disk full {MARKUP} {TURNED} {'long' * 80}",
                "durability": "GLOBAL",
            }
            console.api.post("/v1/jobs/nightly-1/events", json=failed).raise_for_status()
            console.api.post("/v1/snapshots", json={"tenant_id": tenant}).raise_for_status()
        book(console, TENANT)
        yield console


@pytest.fixture(autouse=True)
def _untroubled(console: Console) -> Iterator[None]:
    """Whatever a test does, no page asks another server or trips over its policy."""
    yield
    console.tidy()


# --- signing in -----------------------------------------------------------------------------------


def test_who_is_nobody_is_asked_to_sign_in_and_told_why_a_token_does_not_count(console: Console) -> None:
    page = console.stranger()
    console.sign_in("tally_" + "x" * 43, page)
    expect(page.get_by_role("alert")).to_contain_text("not known here, or was revoked")
    expect(page.get_by_role("navigation").get_by_role("link")).to_have_count(0)
    assert barriers(page) == []
    assert page.evaluate("document.cookie") == ""


def test_each_event_of_a_trace_links_it_and_a_stranger_is_not_told_where_traces_are(console: Console) -> None:
    trace = "4bf92f3577b34da6a3ce929d0e0e4736"
    body = {**job("spans", "traced"), "traceparent": f"00-{trace}-00f067aa0ba902b7-01"}
    console.api.post("/v1/jobs", json=body).raise_for_status()
    done = {"tenant_id": "spans", "type": "JobFailed", "error": "none of a trace", "durability": "GLOBAL"}
    console.api.post("/v1/jobs/traced/events", json=done).raise_for_status()
    link = console.go("job/spans/traced").get_by_role("link", name="Trace", exact=True)
    expect(link).to_have_count(1)
    expect(link).to_have_attribute("href", f"https://jaeger.example/trace/{trace}")
    expect(link).to_have_attribute("rel", "noopener noreferrer")
    asked = httpx.get(f"{console.url}/v1/console/session", timeout=60, trust_env=False).json()
    assert asked["trace_url"] is None


def test_who_signs_in_gets_to_see_what_he_came_for_and_no_script_sees_his_session(console: Console) -> None:
    page = console.go("", console.stranger())
    console.go(f"job/{TENANT}/nightly-1", page)
    page.get_by_label("Token", exact=True).fill(console.root)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="nightly-1", level=1)).to_be_visible()
    expect(page.get_by_text("Signed in as root")).to_be_visible()
    assert page.evaluate("document.cookie") == ""
    assert console.root not in str(page.evaluate("[{...localStorage}, {...sessionStorage}]"))
    page.route("**/v1/console/session", lambda route: route.fulfill(status=503, json={"title": "Not now"}), times=1)
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("heading", name="Not now")).to_be_visible()
    expect(page.get_by_text("Signed in as root")).to_be_visible()
    page.get_by_role("button", name="Sign out").click()
    expect(page.get_by_role("heading", name="Sign in")).to_be_visible()
    assert page.context.cookies() == []


def test_whoever_signs_out_in_one_tab_is_signed_out_in_the_others(console: Console) -> None:
    one = console.sign_in(page=console.open().new_page())
    expect(one.get_by_text("Signed in as root")).to_be_visible()
    two = console.go("keys", one.context.new_page())
    one.get_by_role("button", name="Sign out").click()
    expect(one.get_by_role("heading", name="Sign in")).to_be_visible()
    two.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
    expect(two.get_by_role("heading", name="Sign in")).to_be_visible()
    expect(two.get_by_text("Signed in as root")).to_have_count(0)


def test_who_may_read_one_tenant_alone_is_shown_nothing_else(console: Console) -> None:
    reader = console.issue("reader", "read", tenants=TENANT)
    page = console.stranger()
    console.sign_in(reader["token"], page)
    links = page.get_by_role("navigation").get_by_role("link")
    expect(links).to_have_text(["Overview", "Jobs", "Nodes", "Ledger", "Replicas", "Keys"])
    links.get_by_text("Jobs").click()
    expect(page.get_by_role("rowheader")).to_have_count(3)
    for place in ("jobs/other", "tenants", "verify/acme?run=1", "tokens", "tenant/other"):
        expect(console.go(place, page).get_by_role("alert")).to_contain_text("reader has not the right")
    assert "other" not in console.go(f"jobs/{TENANT}", page).content()
    tenant = page.get_by_label("Tenant", exact=True)
    assert tenant.input_value() == TENANT
    tenant.fill("other")
    page.keyboard.press("Enter")
    expect(page.get_by_role("alert")).to_contain_text("reader has not the right")
    assert page.url.endswith("#/jobs/other")


def test_a_session_whose_token_is_revoked_ends_with_words_and_goes_on_where_it_was(console: Console) -> None:
    ada = console.issue("ada", "read", "audit")
    page = console.stranger()
    console.sign_in(ada["token"], page)
    expect(page.get_by_text("Signed in as ada")).to_be_visible()
    console.go("keys", page)
    console.api.delete(f"/v1/tokens/{ada['token_id']}").raise_for_status()
    page.get_by_role("link", name="Tenants").click()
    expect(page.get_by_role("alert")).to_contain_text("Your session has ended")
    page.get_by_label("Token", exact=True).fill(console.root)
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Tenants", exact=True)).to_be_visible()


def test_who_has_an_account_at_the_issuer_signs_in_there_and_goes_on_where_he_was(
    console: Console, issuer_of_tokens: Issuer
) -> None:
    issuer_of_tokens.gives = {"access_token": issuer_of_tokens.token(groups="writers")}
    # By this name the issuer is another site, so the browser is strict with what comes back from there.
    context = console.browser.new_context()
    page = context.new_page()
    page.goto(console.url.replace("127.0.0.1", "localhost") + f"/console#/jobs/{TENANT}")
    page.get_by_role("link", name="Sign in at the issuer").click()
    expect(page.get_by_text("Signed in as oidc:ada")).to_be_visible()
    expect(page.get_by_role("rowheader").filter(has_text="nightly-1")).to_be_visible()
    assert {each["name"]: each["sameSite"] for each in context.cookies()} == {"tally_console": "Strict"}


# --- every page, for everybody --------------------------------------------------------------------

PLACES = {
    "": "Everything holds",
    f"?tenant={TENANT}&hours=0": f"Jobs of {TENANT}",
    "ledger": "Everything holds",
    "tenants": "Tenants",
    f"tenant/{TENANT}": f"Tenant {TENANT}",
    f"jobs/{TENANT}": "Jobs",
    f"job/{TENANT}/nightly-1": "nightly-1",
    f"nodes/{TENANT}": "Nodes",
    f"webhooks/{TENANT}": "Webhooks",
    f"verify/{TENANT}?run=1": "Verify",
    f"retention/{TENANT}": "Retention",
    "bundles": "Bundles",
    "keys": "Keys",
    "callers": "Callers",
    "replicas": "Replicas",
    f"access/{TENANT}": "Access",
    "tokens": "Tokens",
    "nowhere": "There is no such page",
}


def test_every_page_keeps_nobody_out_light_and_dark_wide_and_narrow_and_in_print(console: Console) -> None:
    for place, heading in PLACES.items():
        page = console.go(place)
        expect(page.get_by_role("heading", name=heading, exact=True)).to_be_visible()
        if "run" in place:
            expect(page.get_by_role("heading", name="The chain holds")).to_be_visible()
        assert heading in page.locator("main").inner_text()
        assert barriers(page) == [], place
        page.emulate_media(color_scheme="dark")
        page.set_viewport_size(PHONE)
        assert barriers(page) == [], place
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"], place
        page.emulate_media(color_scheme="dark", media="print")
        expect(page.get_by_role("navigation")).to_be_hidden()
        expect(page.locator("form:visible")).to_have_count(0)
        assert page.evaluate("getComputedStyle(document.body).backgroundColor") == "rgb(255, 255, 255)", place
        page.emulate_media(color_scheme="light", media="screen")
        page.set_viewport_size({"width": 1920, "height": 1080})
        assert page.evaluate("document.documentElement.scrollWidth") <= 1920, place
        page.set_viewport_size(WIDE)


def test_the_console_is_used_with_a_keyboard_alone(console: Console) -> None:
    page = console.load("")
    page.keyboard.press("Tab")
    assert page.evaluate("document.activeElement.textContent") == "Skip to content"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"
    page.get_by_role("link", name="Jobs", exact=True).focus()
    page.keyboard.press("Enter")
    expect(page.get_by_role("heading", name="Jobs", exact=True)).to_be_focused()
    expect(page.get_by_role("link", name="Jobs", exact=True)).to_have_attribute("aria-current", "page")


def test_all_pages_are_named_in_one_column_beside_the_page(console: Console) -> None:
    page = console.load("keys")
    nav = page.get_by_role("navigation")
    expect(nav.get_by_role("link")).to_have_count(13)
    for width in (1024, WIDE["width"], 1920):
        page.set_viewport_size({"width": width, "height": 600})
        beside, shown = nav.bounding_box(), page.locator("main").bounding_box()
        assert beside is not None
        assert shown is not None
        assert beside["x"] + beside["width"] <= shown["x"]
        assert beside["y"] + beside["height"] <= 600, "none is out of sight"


TRACE = "4bf92f3577b34da6a3ce929d0e0e4736"
FOCUSED = "(({ labels, textContent }) => labels?.[0]?.firstChild.textContent ?? textContent)(document.activeElement)"


def tab_to(page: Page, text: str, presses_max: int) -> None:
    """Press Tab until what has the focus is, or is labelled, ``text``; fails after ``presses_max``."""
    seen = []
    for _ in range(presses_max):
        page.keyboard.press("Tab")
        seen.append(page.evaluate(FOCUSED))
        if seen[-1] == text:
            return
    raise AssertionError(f"no {text!r} among {seen}")


def test_what_failed_in_the_night_why_and_who_cancelled_is_found_with_a_keyboard_alone(console: Console) -> None:
    ada = {"Authorization": f"Bearer {console.issue('ada', 'write', 'read')['token']}"}
    failed, cancelled = {"tenant_id": "night", "type": "JobFailed"}, {"tenant_id": "night", "reason": "wrong input"}
    for number in range(8):
        body = {**job("night", f"job-{number}"), "traceparent": f"00-{TRACE}-00f067aa0ba902b7-01"}
        console.api.post("/v1/jobs", json=body).raise_for_status()
    for number, error in ((3, "OOMKilled"), (2, "disk full"), (1, "OOMKilled")):
        console.api.post(f"/v1/jobs/job-{number}/events", json={**failed, "error": error}).raise_for_status()
    late = {"tenant_id": "night", "type": "JobTimedOut", "timeout_type": "stuck"}
    console.api.post("/v1/jobs/job-4/events", json=late).raise_for_status()
    console.api.post("/v1/jobs/job-5/cancel", json=cancelled, headers=ada).raise_for_status()
    acked = {"tenant_id": "night", "type": "JobCancellationAcked", "dc_id": "use1", "workflows_cancelled": 0}
    console.api.post("/v1/jobs/job-5/events", json={**acked, "durability": "GLOBAL"}).raise_for_status()

    # The last hour: a period is chosen key by key, and stays chosen.
    page = console.load("?tenant=night")
    tab_to(page, "Skip to content", 1)
    page.keyboard.press("Enter")
    tab_to(page, "Period", 3)
    for hours in (24, 1):
        with page.expect_response("**/v1/jobs/summary?*"):
            page.keyboard.press("ArrowUp")
        expect(page).to_have_url(re.compile(f"hours={hours}$"))
        expect(page.locator("[aria-busy=true]")).to_have_count(0)
        expect(page.get_by_label("Period")).to_be_focused()
    expect(page.locator(".tiles li")).to_have_text(["8jobs", "3submitted", "1cancelled", "3failed", "1timed out"])

    # All that failed, with their errors; then those with one error, and the first of them.
    failed_last = page.get_by_role("table", name="Failed, the last").get_by_role("rowheader")
    expect(failed_last).to_have_text(["job-4", "job-1", "job-2", "job-3"])
    tab_to(page, "All that failed, the last to end first", 20)
    page.keyboard.press("Enter")
    expect(page.get_by_role("rowheader")).to_have_text(["job-4", "job-1", "job-2", "job-3"])
    expect(page.get_by_role("row").filter(has_text="job-2")).to_contain_text("disk full")
    expect(page.get_by_label("Status")).to_have_value("FAILED TIMED_OUT")
    page.go_back()
    expect(page.get_by_role("table", name="By error")).to_be_visible()
    expect(page.get_by_role("heading", name="Jobs of night")).to_be_focused()
    tab_to(page, "OOMKilled", 20)
    page.keyboard.press("Enter")
    expect(page.get_by_role("rowheader")).to_have_text(["job-3", "job-1"])
    expect(page.get_by_role("heading", name="Jobs", exact=True)).to_be_focused()
    tab_to(page, "Skip to the jobs", 1)
    assert barriers(page) == []
    page.keyboard.press("Enter")
    tab_to(page, "job-3", 1)
    page.keyboard.press("Enter")

    # Its timeline, its receipt, its trace.
    expect(page.get_by_role("heading", name="job-3")).to_be_focused()
    expect(page.locator(".timeline > li")).to_have_count(2)
    expect(page.locator(".timeline > li").last).to_contain_text("OOMKilled")
    tab_to(page, "Download the receipt", 2)
    with page.expect_download() as downloading:
        page.keyboard.press("Enter")
    assert downloading.value.suggested_filename == "job-3.receipt.json"
    tab_to(page, "Its spans", 6)
    assert page.evaluate("document.activeElement.href") == f"https://jaeger.example/trace/{TRACE}"
    page.keyboard.press("Shift+Tab")
    page.keyboard.press("Enter")
    expect(page.get_by_role("rowheader")).to_have_count(8)

    # Who cancelled one, and why.
    tab_to(page, "Skip to the jobs", 1)
    page.keyboard.press("Enter")
    tab_to(page, "job-5", 3)
    page.keyboard.press("Enter")
    expect(page.locator("dl")).to_contain_text(re.compile(r"Cancelled\d\d:\d\d:\d\d by adawrong input"))
    assert barriers(page) == []


def test_a_phone_has_the_pages_behind_a_button_that_says_whether_it_is_open(console: Console) -> None:
    console.page.set_viewport_size(PHONE)
    page = console.load("")
    menu = page.get_by_role("button", name="Menu")
    expect(menu).to_have_attribute("aria-expanded", "false")
    expect(page.get_by_role("link", name="Keys")).to_be_hidden()
    menu.click()
    page.get_by_role("link", name="Keys").click()
    expect(page.get_by_role("heading", name="Keys", exact=True)).to_be_visible()
    expect(menu).to_have_attribute("aria-expanded", "false")


def test_without_scripts_the_page_says_what_it_needs(console: Console) -> None:
    page = console.open(java_script_enabled=False).new_page()
    page.goto(f"{console.url}/console")
    expect(page.get_by_role("heading", name="The console needs JavaScript")).to_be_visible()


def test_times_are_those_of_the_reader_with_utc_in_their_titles(console: Console) -> None:
    created = console.api.get("/v1/jobs/nightly-1", params={"tenant_id": TENANT}).json()["created_at"]
    page = console.go(f"job/{TENANT}/nightly-1")
    shown = page.locator(f"time[datetime='{created}']").first
    assert created[:19].replace("T", " ") in str(shown.get_attribute("title"))
    there = datetime.fromisoformat(created) + timedelta(hours=10)
    assert f"{there:%H:%M}" in shown.inner_text()
    expect(page.locator("footer")).to_contain_text(ZONE)


def test_what_stands_in_a_job_is_text_whatever_it_looks_like(console: Console) -> None:
    for place in (f"jobs/{TENANT}", f"job/{TENANT}/nightly-1", f"verify/{TENANT}?at=1"):
        page = console.go(place)
        page.locator("details").evaluate_all("all => all.forEach((each) => { each.open = true; })")
        expect(page.get_by_text("<img src=x onerror=alert(1)>").first).to_be_visible()
        assert page.locator("main img, main script").count() == 0
        expect(page.get_by_text(r"\u202eDETELPMOC").first).to_be_visible()
        assert "\u202e" not in (page.locator("main").text_content() or "")


# --- the first page -------------------------------------------------------------------------------


def test_the_first_page_says_what_runs_what_failed_how_long_when_and_how_the_ledger_is(console: Console) -> None:
    now_s = int(time.time())
    for number, (ran_s, end) in enumerate([(5, "JobCompleted"), (3725, "JobCompleted"), (60, "JobFailed"), (0, "")]):
        about = {"job_id": f"run-{number}", "trace_time": now_s - 7200}
        send(
            console,
            "figures",
            {"type": "JobCreated", "spec": {"name": f"report {number}"}, **about},
            {"type": "JobAccepted", "dc_id": "use1", **about},
        )
        error = {"error": "OOMKilled"} if end == "JobFailed" else {}
        if end:
            send(console, "figures", {"type": end, **about, **error, "trace_time": now_s - 7200 + ran_s})
    page = console.go("?tenant=figures")
    expect(page.get_by_role("heading", name="Jobs of figures")).to_be_visible()
    tiles = page.locator(".tiles li")
    expect(tiles).to_have_text(["4jobs", "1accepted", "2completed", "1failed"])
    failed = page.get_by_role("table", name="Failed, the last to end first")
    expect(failed.get_by_role("row").nth(1)).to_have_text(re.compile("run-2 report 2.*OOMKilled"))
    expect(page.get_by_role("table", name="By error, the most frequent first").get_by_role("row").nth(1)).to_have_text(
        "OOMKilled1"
    )
    expect(page.get_by_role("table", name="Running").get_by_role("row").nth(1)).to_contain_text("run-3")
    expect(page.locator("section").filter(has_text="Median1 min")).to_contain_text(
        re.compile(r"Longest1 h \d min.*Shortest.*Of3 jobs")
    )
    expect(page.get_by_role("row").filter(has=page.get_by_role("link", name="figures", exact=True))).to_contain_text(
        "4"
    )
    page.get_by_text("As a table").click()
    bars = page.get_by_role("table", name="Jobs created in each 4 h").get_by_role("row")
    expect(bars.nth(1)).to_contain_text(re.compile("4121$"))
    expect(page.locator(".bars rect")).to_have_count(3)
    expect(page.locator(".banner")).to_contain_text("Nothing waits to be chained")
    page.get_by_label("Period").select_option("the last 24 hours")
    expect(page).to_have_url(re.compile("tenant=figures&hours=24$"))
    page.get_by_role("link", name="1 failed").click()
    expect(page.get_by_role("rowheader")).to_have_text(["run-2 report 2"])


def test_the_first_page_of_a_tenant_without_jobs_says_so(console: Console) -> None:
    page = console.go("?tenant=unborn")
    expect(page.locator("main")).to_contain_text("unborn has no event yet.")
    send(console, "old", {"type": "JobCreated", "job_id": "replayed", "trace_time": 0})
    page = console.go("?tenant=old")
    expect(page.locator("main")).to_contain_text("old has no job that was created in the last 7 days.")
    page.get_by_role("link", name="All time").click()
    expect(page.locator(".tiles li").first).to_have_text("1job")


def test_figures_follow_the_chain_and_are_not_asked_for_while_nothing_comes(console: Console) -> None:
    page = console.sign_in(page=console.open().new_page())
    expect(page.get_by_text("Signed in as root")).to_be_visible()
    page.clock.install()
    send(console, "followed", {"type": "JobCreated", "job_id": "one"})
    console.go("?tenant=followed", page)
    expect(page.locator(".live")).to_have_text("Live: changes show as they come")
    page.clock.fast_forward(3000)
    asked: list[str] = []
    page.on("request", lambda request: asked.append(request.url))
    for _ in range(3):
        with page.expect_response("**/readyz"):
            page.clock.fast_forward(10_000)
    assert not [url for url in asked if "/v1/jobs" in url]
    send(console, "followed", {"type": "JobCreated", "job_id": "two"})

    def is_counted() -> bool:
        page.clock.fast_forward(3000)
        return page.locator(".tiles li").first.inner_text() == "2\njobs"

    until(is_counted, "it follows")


def test_figures_that_cannot_be_read_again_are_said_to_be_old(console: Console) -> None:
    context = console.open()
    page = console.sign_in(page=context.new_page())
    expect(page.get_by_text("Signed in as root")).to_be_visible()
    page.clock.install()
    console.go(f"?tenant={TENANT}&hours=0", page)
    expect(page.locator(".tiles li").first).to_be_visible()
    context.set_offline(True)
    page.clock.fast_forward(6000)
    expect(page.locator(".banner")).to_contain_text(
        re.compile(r"No answer since \d\d:\d\d:\d\d: what is shown is of then")
    )
    expect(page.locator(".tiles li").first).to_be_visible()
    context.set_offline(False)
    page.clock.fast_forward(6000)
    expect(page.locator(".banner")).to_contain_text("Everything holds")


# --- jobs -----------------------------------------------------------------------------------------


def rows(page: Page) -> list[str]:
    return page.get_by_role("rowheader").all_inner_texts()


def test_jobs_are_searched_and_the_address_says_for_what(console: Console) -> None:
    page = console.go(f"jobs/{TENANT}")
    assert {"nightly-0", "nightly-1", "nightly-2"} <= set(rows(page))
    page.get_by_label("Status").select_option("FAILED")
    page.get_by_role("button", name="Search").click()
    expect(page.get_by_role("rowheader")).to_have_text(["nightly-1"])
    assert page.url.endswith("?status=FAILED")
    page.get_by_label("Created by").fill("nobody-of-this-name")
    page.keyboard.press("Enter")
    expect(page.get_by_text("There is no such job")).to_be_visible()
    page.go_back()
    expect(page.get_by_role("rowheader")).to_have_text(["nightly-1"])
    page.get_by_role("link", name="Clear").click()
    expect(page.get_by_role("rowheader").nth(2)).to_be_visible()
    page.get_by_label("Field").fill("spec.image:backup:2")
    page.get_by_role("button", name="Search").click()
    expect(page.get_by_role("rowheader")).to_have_text(["nightly-2"])
    with page.expect_download() as downloading:
        page.get_by_role("button", name="Save as CSV").click()
    table = [*csv.DictReader(Path(downloading.value.path()).read_text().splitlines())]
    assert [row["job_id"] for row in table] == ["nightly-2"]
    assert rows(console.go(f"jobs/{TENANT}?since=2099-01-01T00%3A00%3A00Z")) == []


def test_a_search_that_is_repeated_asks_for_all_that_its_address_said(console: Console) -> None:
    times = "since=2020-01-01T00%3A00%3A30.250Z&until=4102444800123%3A0%3An"
    said = f"{times}&where=spec.image%3Abackup%3A2&where=spec.image%3Anone"
    page = console.go(f"jobs/{TENANT}?{said}")
    expect(page.get_by_text("There is no such job")).to_be_visible()
    assert [each.input_value() for each in page.get_by_label("Field").all()] == [
        "spec.image:backup:2",
        "spec.image:none",
    ]
    expect(page.get_by_label("Created before")).to_have_value("2100-01-01T10:00")
    page.get_by_role("button", name="Search").click()
    assert page.url.endswith(f"?{said}")
    page.get_by_label("Field").nth(1).fill("")
    page.get_by_label("Created since").fill("2020-01-02T00:00")
    page.get_by_role("button", name="Search").click()
    expect(page.get_by_role("rowheader")).to_have_text(["nightly-2"])
    assert page.url.count("where=") == 1
    assert "since=2020-01-01T14%3A00%3A00.000Z" in page.url


def test_a_job_is_found_by_part_of_its_name_counted_and_sorted_and_exported_without_formulas(
    console: Console,
) -> None:
    for name, ran_s in (("one", 3), ("two", 3725), ("three", 60)):
        about = {"job_id": f"id-{name}", "trace_time": 0}
        ended = {"type": "JobCompleted", "job_id": f"id-{name}", "trace_time": ran_s}
        send(
            console,
            "sorted",
            {"type": "JobCreated", "spec": {"name": f"=Nightly {name}"}, **about},
            {"type": "JobAccepted", "dc_id": "use1", **about},
            ended,
        )
    send(console, "sorted", {"type": "JobCreated", "job_id": "id-four", "spec": {"command": ["nightly", "four"]}})
    page = console.go("jobs/sorted?id_part=nightly")
    expect(page.get_by_role("rowheader")).to_contain_text(["id-four", "id-three", "id-two", "id-one"])
    named = page.get_by_role("link", name="id-two =Nightly two")
    expect(named).to_have_attribute("href", "#/job/sorted/id-two")
    expect(page.get_by_text("found: 4 jobs")).to_be_visible()
    for first, ids in (
        ("the longest", ["id-two", "id-three", "id-one"]),
        ("the first to end", ["id-one", "id-two", "id-three"]),
        ("the last to end", ["id-three", "id-two", "id-one"]),
    ):
        page.get_by_label("Order").select_option(f"{first} first")
        page.get_by_role("button", name="Search").click()
        expect(page.get_by_role("rowheader")).to_contain_text(ids)
    assert page.url.endswith("?id_part=nightly&sort=ended_at&order=desc")
    expect(console.go("job/sorted/id-two").locator(".timeline > li").nth(2)).to_contain_text(
        "1 h 2 min later, by trace_time"
    )
    page.go_back()
    expect(page.get_by_role("row").filter(has_text="id-two")).to_contain_text("1 h 2 min")
    with page.expect_download() as downloading:
        page.get_by_role("button", name="Save as CSV").click()
    table = [*csv.DictReader(Path(downloading.value.path()).read_text().splitlines())]
    assert [(row["name"], row["run_ms"]) for row in table][1:] == [
        ("'=Nightly two", "3725000"), ("'=Nightly one", "3000")
    ]  # fmt: skip
    page = console.go("jobs/sorted?id_part=id-o")
    expect(page.get_by_text("found: 1 job")).to_be_visible()


def test_a_report_is_made_and_downloaded_and_its_tables_are_never_wider_than_the_page(
    console: Console, tmp_path: Path
) -> None:
    dcs = [f"{name}-{'long' * 20}" for name in ("use1", "euw1")]
    hour = {"trace_time": 0}
    send(
        console,
        "reported",
        {"type": "JobCreated", "job_id": "one", "assigned_dcs": dcs, **hour},
        {"type": "JobAccepted", "job_id": "one", "dc_id": dcs[0], **hour},
        {"type": "JobFailed", "job_id": "one", "error": f"{MARKUP} {TURNED} {'long' * 20}", "trace_time": 90},
        {"type": "JobCreated", "job_id": "two", "trace_time": 3600},
    )
    page = console.go("jobs/reported?until=1970-01-01T01%3A00%3A00Z")
    with page.expect_download() as downloading:
        page.get_by_role("button", name="Report").click()
    expect(page.get_by_role("status").filter(has_text="reported.report.html is downloaded.")).to_be_visible()
    assert barriers(page) == []
    assert downloading.value.suggested_filename == "reported.report.html"
    file = tmp_path / "report.html"
    downloading.value.save_as(file)
    page = console.go("?tenant=reported&hours=0")
    with page.expect_download() as downloading:
        page.get_by_role("button", name="Report").click()
    assert "<h1>All jobs</h1>" in Path(downloading.value.path()).read_text()
    asked: list[str] = []
    context = console.browser.new_context(viewport=WIDE)
    shown = context.new_page()
    shown.on("request", lambda request: asked.append(request.url))
    shown.goto(file.as_uri())
    assert asked == [shown.url]
    expect(shown.locator("h1")).to_have_text("Up to 1970-01-01 01:00")
    errors = shown.get_by_role("region", name="By error").locator("tbody tr")
    expect(errors).to_have_count(1)
    expect(errors).to_contain_text(MARKUP)
    expect(errors.get_by_role("cell").last).to_have_text("1 min 30 s")
    for scheme in ("light", "dark"):
        for size in (WIDE, PHONE):
            shown.set_viewport_size(size)
            shown.emulate_media(color_scheme=scheme)
            assert shown.evaluate("document.documentElement.scrollWidth") <= size["width"]
            assert barriers(shown) == []
    shown.emulate_media(media="print")
    shown.set_viewport_size({"width": 700, "height": 900})
    assert shown.evaluate("document.documentElement.scrollWidth") <= 700
    context.close()


def test_a_report_that_fails_says_why_on_the_page_and_can_be_asked_for_again(console: Console) -> None:
    page = console.go(f"jobs/{TENANT}")
    told = "run tally pipeline report --dest reports/acme -t acme"
    problem = {"type": "/report-too-large", "title": "The report is one for Spark", "detail": told}
    page.route("**/v1/reports", lambda route: route.fulfill(status=422, json=problem))
    page.get_by_role("button", name="Report").click()
    expect(page.get_by_role("status").filter(has_text=f"No report: {told}")).to_be_visible()
    page.unroute("**/v1/reports")
    with page.expect_download():
        page.get_by_role("button", name="Report").click()
    expect(page.get_by_role("status").filter(has_text="No report")).to_have_count(0)


def test_a_report_of_spark_says_how_far_it_is_to_who_comes_back_to_the_page_too(console: Console) -> None:
    report = {"report_id": "node-1-a", "progress": "stage 3, 5/16 tasks"}
    page = console.go(f"jobs/{TENANT}")
    page.route("**/v1/reports", lambda route: route.fulfill(status=202, json=report))
    page.route("**/v1/reports/node-1-a", lambda route: route.fulfill(status=202, json=report))
    page.get_by_role("button", name="Report").click()
    for place in (f"?tenant={TENANT}", "keys"):
        told = page.get_by_role("status").filter(has_text="Spark makes the report")
        expect(told).to_contain_text("you may leave this page and come back")
        expect(page.get_by_text("stage 3, 5/16 tasks")).to_be_visible()
        expect(page.get_by_role("button", name="Report")).to_be_disabled()
        assert barriers(page) == []
        page = console.go(place)
    page.route("**/v1/reports/node-1-a", lambda route: route.fulfill(body="<p>it</p>", content_type="text/html"))
    with page.expect_download() as downloading:
        page = console.go(f"jobs/{TENANT}")
    assert Path(downloading.value.path()).read_text() == "<p>it</p>"
    page.unroute("**/v1/reports")
    page.unroute("**/v1/reports/node-1-a")


def test_a_report_behind_a_balancer_is_asked_for_until_its_node_answers(console: Console) -> None:
    page = console.go(f"jobs/{TENANT}")
    problem = {"type": "/report-elsewhere", "detail": "node b keeps the report, and node a was asked"}
    answers = iter(range(3))

    def answer(route: Route) -> None:
        if next(answers, None) is None:
            route.continue_()
        else:
            route.fulfill(status=421, json=problem)

    page.route("**/v1/reports/*", answer)
    with page.expect_download():
        page.get_by_role("button", name="Report").click()
    assert next(answers, None) is None
    page.route("**/v1/reports/*", lambda route: route.fulfill(status=421, json=problem))
    page.get_by_role("button", name="Report").click()
    expect(page.get_by_role("status").filter(has_text="No report: node b keeps the report")).to_be_visible()
    page.unroute("**/v1/reports/*")


def test_pages_of_jobs_say_how_many_were_found_so_far(console: Console) -> None:
    send(console, "many", *({"type": "JobCreated", "job_id": f"j-{number:03}"} for number in range(60)))
    page = console.go("jobs/many?status=SUBMITTED")
    expect(page.get_by_text("found: 60 jobs")).to_be_visible()
    page = console.go("jobs/many?id_part=j-")
    expect(page.get_by_text("found: more than 50 jobs")).to_be_visible()
    page.get_by_role("link", name="More jobs").click()
    expect(page.get_by_text("found: 60 jobs")).to_be_visible()
    page = console.go("jobs/many?sort=created_at&order=asc")
    expect(page.get_by_role("rowheader").first).to_have_text("j-000")
    page.get_by_role("link", name="More jobs").click()
    expect(page.get_by_role("rowheader").first).to_have_text("j-050")
    page.get_by_role("link", name="To the oldest").click()
    expect(page.get_by_role("rowheader").first).to_have_text("j-000")


def test_who_goes_back_is_where_he_was(console: Console) -> None:
    page = console.go(f"job/{TENANT}/nightly-1")
    page.set_viewport_size(PHONE)
    page.mouse.wheel(0, 300)
    until(lambda: page.evaluate("history.state?.top") == 300, "the place is kept")
    page.get_by_role("link", name=f"Jobs of {TENANT}").dispatch_event("click")
    expect(page.get_by_role("heading", name="Jobs", exact=True)).to_be_visible()
    assert page.evaluate("window.scrollY") == 0
    page.go_back()
    expect(page.get_by_role("heading", name="nightly-1", level=1)).to_be_visible()
    until(lambda: page.evaluate("window.scrollY") == 300, "the place is the same")


def test_an_address_that_is_none_is_named(console: Console) -> None:
    expect(console.go("nowhere/at-all").locator("main")).to_contain_text("The console has no page at #/nowhere/at-all.")


def test_what_is_printed_says_of_which_ledger_it_is_and_of_when(console: Console) -> None:
    page = console.go(f"job/{TENANT}/nightly-1")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    foot = page.locator("footer")
    root = console.api.get("/v1/keys").json()["root_key_id"]
    expect(foot).to_contain_text(f"Ledger {root}")
    expect(foot).to_contain_text(
        re.compile(r"Printed \d{4}-\d\d-\d\d \d\d:\d\d:\d\d\.\d+ UTC from " + re.escape(page.url))
    )
    expect(page.locator(".printed")).to_be_visible()


def test_a_percent_sign_that_somebody_typed_in_an_address_is_one(console: Console) -> None:
    page = console.load(f"job/{TENANT}/100%")
    expect(page.get_by_role("alert")).to_contain_text("job_id: ")


def test_a_tenant_that_came_since_is_among_those_to_choose_on_the_next_page(console: Console) -> None:
    page = console.go(f"jobs/{TENANT}")
    console.api.post("/v1/jobs", json=job("newcomer", "first")).raise_for_status()
    page.get_by_role("link", name="Verify", exact=True).click()
    page.get_by_label("Tenant").select_option("newcomer")
    expect(page).to_have_url(re.compile("#/verify/newcomer$"))
    console.go(f"jobs/{TENANT}")  # the tenant with which other tests begin


def test_a_jobs_timeline_says_what_happened_by_whom_and_how_far_it_has_come(console: Console) -> None:
    console.api.post("/v1/jobs", json=job(TENANT, "told", spec={"image": "a/b:1"})).raise_for_status()
    page = console.go(f"job/{TENANT}/told")
    expect(page.locator(".timeline > li")).to_have_count(1)
    cancelled = {"tenant_id": TENANT, "reason": "no need", "requestor": "ada", "durability": "GLOBAL"}
    console.api.post("/v1/jobs/told/cancel", json=cancelled).raise_for_status()
    last = page.locator(".timeline > li").nth(1)
    expect(last).to_contain_text("Cancellation requested")
    expect(last).to_contain_text(re.compile(r"\d+ (ms|s) later"))
    expect(last).to_contain_text("by root")
    expect(last).to_contain_text("no need, asked by ada")
    expect(last).to_contain_text("chained")
    console.api.post("/v1/snapshots", json={"tenant_id": TENANT}).raise_for_status()
    expect(console.go(f"job/{TENANT}/told").locator(".timeline > li").first).to_contain_text("signed")


def test_a_receipt_is_downloaded_that_proves_the_job(console: Console, tmp_path: Path) -> None:
    page = console.go("job/other/nightly-1")
    asked: list[Route] = []
    page.route("**/receipt?*", lambda route: asked.append(route))
    button = page.get_by_role("button", name="Download the receipt")
    button.click()
    button.click()  # which asks for no second one
    with page.expect_download() as downloading:
        asked[0].continue_()
    assert len(asked) == 1
    page.unroute("**/receipt?*")
    assert downloading.value.suggested_filename == "nightly-1.receipt.json"
    keys = tmp_path / "keys.json"
    keys.write_text(console.api.get("/v1/keys").text)
    done = run_tally("verify-proof", str(downloading.value.path()), "--keys", str(keys), "--no-state", "--json")
    assert done.returncode == 0, done.stdout + done.stderr


# --- verifying ------------------------------------------------------------------------------------


def test_a_falsified_row_is_named_with_what_it_should_be_and_what_to_do(console: Console, superuser_url: str) -> None:
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, execute(superuser_url, FALSIFY)).result()
    page = console.go("verify/broken")
    page.get_by_role("button", name="Verify", exact=True).click()
    expect(page.get_by_role("heading", name="The chain is broken at entry 4")).to_be_visible()
    expect(page.get_by_role("row").filter(has_text="payloads")).to_contain_text("broken")
    broken = page.locator("tr.broken")
    expect(broken).to_contain_text("nightly-1")
    expect(broken).to_contain_text("no fault")
    expect(broken).to_contain_text("not this content's")
    expect(page.locator("#break tbody tr", has_text="recomputed here")).to_have_count(2)
    assert barriers(page) == []
    shown = console.go("job/broken/nightly-1")
    expect(shown.get_by_role("heading", name="Stored rows of the tenant are damaged")).to_be_visible()
    expect(shown.get_by_role("alert")).to_contain_text("payload-digest at seq 4")
    expect(console.go("job/broken/nightly-0").get_by_text("its entries up to")).to_be_visible()
    overview = console.go("ledger")
    expect(overview.get_by_role("heading", name="What is on record was changed; requests are taken")).to_be_visible()
    expect(overview.locator("[data-check=breaks]")).to_contain_text("What to do: ")
    assert overview.title().startswith("✕")
    assert barriers(overview) == []
    overview.get_by_role("link", name="Show it in broken").click()
    page.locator("#break").get_by_text("Acknowledge that it was seen").click()
    page.get_by_label("Reason").fill("falsified on purpose")
    page.get_by_role("button", name="Acknowledge").click()
    expect(page.get_by_text("Acknowledged, and recorded in _system")).to_be_visible()
    expect(console.go("ledger").locator("[data-check=breaks]")).to_contain_text("not mended")
    with ThreadPoolExecutor(1) as thread:
        thread.submit(asyncio.run, execute(superuser_url, MEND)).result()
    page = console.go("verify/broken")
    page.get_by_role("button", name="Verify", exact=True).click()
    expect(page.get_by_role("heading", name="The chain holds")).to_be_visible()
    expect(console.go("").get_by_role("heading", name="Everything holds")).to_be_visible()


def test_a_row_beside_the_chain_that_is_false_is_told_though_the_chain_holds(
    console: Console, superuser_url: str
) -> None:
    def change(by: int) -> None:
        statement = f"UPDATE scheduler.idempotency SET seq = seq + {by} WHERE key = 'beside'"
        with ThreadPoolExecutor(1) as thread:
            thread.submit(asyncio.run, execute(superuser_url, statement)).result()

    def send() -> int:
        body = {**job("other", "beside"), "durability": "GLOBAL"}
        return int(console.api.post("/v1/jobs", json=body, headers={"Idempotency-Key": "beside"}).status_code)

    assert send() == 201
    change(-1)
    assert send() == 409
    for heading in ("The chain holds, and a table beside it does not", "The chain holds"):
        page = console.go("verify/other")
        page.get_by_role("button", name="Verify", exact=True).click()
        expect(page.get_by_role("heading", name=heading, exact=True)).to_be_visible()
        if heading != "The chain holds":
            expect(page.get_by_text("The table of Idempotency-Keys, which is no part")).to_be_visible()
            change(1)
    seen = console.api.post("/v1/chain/acknowledge", json={"tenant_id": "other", "reason": "changed on purpose"})
    assert seen.status_code == 200
    expect(console.go("").get_by_role("heading", name="Everything holds")).to_be_visible()


def test_a_range_is_verified_and_says_what_that_leaves_open(console: Console) -> None:
    page = console.go("verify/other")
    page.get_by_label("From entry").fill("2")
    page.get_by_label("To entry").fill("3")
    page.get_by_role("button", name="Verify", exact=True).click()
    expect(page.get_by_role("heading", name="What was verified holds")).to_be_visible()
    expect(page.get_by_role("row").filter(has_text="tree")).to_contain_text("not checked")
    expect(page.get_by_text("2 entries of other, 2 to 3")).to_be_visible()
    expect(page.locator("#say")).to_have_text("What was verified holds")
    assert page.title().startswith("✓ other 2–3")


def test_a_range_behind_the_end_of_a_chain_is_no_fault_of_the_console(console: Console) -> None:
    page = console.go("verify/other")
    page.get_by_label("From entry").fill("900")
    page.get_by_role("button", name="Verify", exact=True).click()
    expect(page.get_by_role("alert")).to_contain_text("There is no entry to verify there: the chain has entries 1 to")
    expect(page.get_by_role("heading", name="The console failed")).to_have_count(0)


def test_the_page_that_verifies_by_itself_is_that_of_the_package_and_may_load_nothing(console: Console) -> None:
    answer = console.api.get("/verify")
    assert answer.content == verify_page().file.content
    policy = answer.headers["content-security-policy"]
    assert policy == verify_page().policy
    assert "connect-src" not in policy
    assert policy.startswith("default-src 'none'; script-src 'sha256-")
    page, loaded = console.open().new_page(), list[str]()
    page.on("request", lambda request: loaded.append(request.url))
    page.goto(f"{console.url}/verify")
    bundle = bundle_of(build(7, snapshots_to=(7,)))
    for field, name, content in (("keys", "k.pem", SIGNER.public_key_pem.encode()), ("subject", "b.tar", bundle)):
        page.set_input_files(f"#{field}", [{"name": name, "mimeType": "application/octet-stream", "buffer": content}])
    expect(page.locator("#outcome")).to_have_text("WHOLE AND SIGNED")
    assert {each for each in loaded if not each.startswith("blob:")} == {f"{console.url}/verify"}


# --- bundles --------------------------------------------------------------------------------------


def test_a_bundle_is_looked_at_then_imported_then_there(console: Console) -> None:
    page = console.go("bundles")
    content = bundle_of(build(7, tenant_id="brought"))
    page.get_by_label("Files of bundles").set_input_files(
        files=[{"name": "brought.tar", "mimeType": "application/x-tar", "buffer": content}]
    )
    files, imports = page.get_by_label("Files of bundles"), page.get_by_role("button", name="Import", exact=True)
    expect(imports).to_be_disabled()
    held: list[Route] = []
    page.route("**/v1/bundles/import?dry_run=true", lambda route: held.append(route), times=1)
    looks = page.get_by_role("button", name="See what would come of it")
    with page.expect_request("**/v1/bundles/import?dry_run=true"):
        looks.click()
    expect(files).to_be_disabled()  # so no other file is imported than the one that is looked at
    expect(imports).to_be_disabled()
    held[0].continue_()
    expect(page.get_by_text("dry run: nothing was stored")).to_be_visible()
    page.route("**/v1/bundles/import?dry_run=false", lambda route: route.abort(), times=1)
    imports.click()
    expect(page.get_by_role("alert")).to_contain_text("It is not known whether it was stored")
    looks.click()
    expect(page.get_by_text("dry run: nothing was stored")).to_be_visible()
    imports.click()
    expect(page.get_by_text("✓ imported")).to_be_visible()
    assert barriers(page) == []
    page.get_by_role("link", name="brought").click()
    expect(page.get_by_role("heading", name="Tenant brought")).to_be_visible()
    expect(page.get_by_text("7 entries").first).to_be_visible()


def test_a_bundle_that_does_not_hold_is_refused_in_words(console: Console) -> None:
    page = console.go("bundles")
    damaged = bytearray(bundle_of(build(7, tenant_id="damaged")))
    damaged[len(damaged) // 2] ^= 1
    page.get_by_label("Files of bundles").set_input_files(
        files=[{"name": "damaged.tar", "mimeType": "application/x-tar", "buffer": bytes(damaged)}]
    )
    page.get_by_role("button", name="See what would come of it").click()
    expect(page.get_by_role("alert")).to_contain_text("The bundle does not hold")
    expect(page.get_by_role("button", name="Import", exact=True)).to_be_disabled()


def test_a_range_is_exported_as_a_bundle(console: Console) -> None:
    page = console.go(f"bundles/{TENANT}")
    page.get_by_label("To entry").fill("2")
    with page.expect_download() as downloading:
        page.get_by_role("button", name="Export").click()
    assert downloading.value.suggested_filename == f"{TENANT}.bundle.tar"
    with tarfile.open(fileobj=io.BytesIO(Path(downloading.value.path()).read_bytes())) as bundle:
        assert "manifest.dsse.json" in bundle.getnames()


# --- callers --------------------------------------------------------------------------------------


def test_a_caller_is_registered_must_sign_and_is_revoked_each_once_that_is_confirmed(console: Console) -> None:
    page = console.go("callers")
    expect(page.get_by_text("No caller signs events")).to_be_visible()
    page.get_by_label("Name").fill("backup")
    page.get_by_label("Tenants", exact=True).fill("signing, team-*")
    page.get_by_label("Public key").fill("-----BEGIN PRIVATE KEY-----\nAAAA\n-----END PRIVATE KEY-----")
    page.get_by_role("button", name="Register").click()
    expect(page.get_by_role("alert")).to_contain_text("This is a private key: keep it to yourself")
    page.get_by_label("Public key").fill("AAAA")
    page.get_by_role("button", name="Register").click()
    dialog = page.get_by_role("dialog", name="Register a key of backup?")
    dialog.get_by_role("button", name="Register").click()
    expect(dialog.get_by_role("alert")).to_contain_text("public_key_pem: not a PEM public key")
    dialog.get_by_role("button", name="Cancel").click()
    page.get_by_label("Public key").fill(ML_DSA_44.caller.key.public_key_pem)
    page.get_by_role("button", name="Register").click()
    expect(dialog).to_contain_text("It signs events of signing, team-*.")
    assert console.api.get("/v1/callers").json()["callers"] == []
    dialog.get_by_role("button", name="Register").click()
    row = page.get_by_role("row").filter(has_text=ML_DSA_44.key_id)
    for said in ("backup", "ml-dsa-44", "signing, team-*", "by root", "counts"):
        expect(row).to_contain_text(said)
    assert barriers(page) == []

    page.get_by_label("Tenant", exact=True).fill("signing")
    page.get_by_label("JobFailed").check()
    page.get_by_label("JobCompleted").check()
    page.get_by_role("button", name="Require").click()
    page.get_by_role("dialog").get_by_role("button", name="Require").click()
    wanted = page.get_by_role("row").filter(has=page.get_by_role("link", name="signing"))
    expect(wanted).to_contain_text("JobCompleted, JobFailed")
    page.get_by_label("Tenant", exact=True).fill("signing")
    page.get_by_label("JobFailed").focus()
    expect(page.get_by_label("JobFailed")).to_be_checked()

    row.get_by_role("button").click()
    page.get_by_label("Reason").fill("the machine was sold")
    page.keyboard.press("Enter")
    expect(row).to_contain_text("revoked")
    expect(row.get_by_role("button")).to_have_count(0)
    revoked, required = console.api.get("/v1/callers").json().values()
    assert revoked[0]["revoked_from_hlc"] is not None
    assert required[-1]["types"] == ["JobCompleted", "JobFailed"]


def test_a_node_whose_key_is_not_admitted_says_that_no_caller_can_be_changed_at_it(console: Console) -> None:
    page, said = console.stranger(), "its keys are not admitted: tally keys admit 0123456789abcdef"
    console.sign_in(page=page)
    expect(page.get_by_text("Signed in as root")).to_be_visible()
    checks = {"checks": {"admission": {"ok": False, "detail": said}}}
    page.route("**/readyz", lambda route: route.fulfill(json=checks))
    refused = {
        "type": "https://tallystick.dev/problems/key-conflict",
        "title": "The key is in another state",
        "detail": said,
    }
    page.route("**/v1/tenants/*/signatures", lambda route: route.fulfill(status=409, json=refused))
    console.go("callers", page)
    expect(page.get_by_role("alert").first).to_contain_text("Nothing can be changed here at this node")
    expect(page.get_by_role("alert").first).to_contain_text(said)
    page.get_by_label("Tenant", exact=True).fill("signing")
    page.get_by_role("button", name="Require").click()
    dialog = page.get_by_role("dialog")
    dialog.get_by_role("button", name="Require").click()
    expect(dialog.get_by_role("alert")).to_contain_text("or this node's own key is not admitted")
    assert barriers(page) == []


# --- tokens ---------------------------------------------------------------------------------------


def test_an_admin_revokes_a_token_once_he_has_said_so_twice(console: Console) -> None:
    lost = console.issue("lost", "read")
    page = console.go("tokens")
    row = page.get_by_role("row").filter(has_text=lost["token_id"])
    row.get_by_role("button").click()
    page.get_by_role("button", name="Keep it").click()
    expect(row).to_contain_text("counts")
    page.get_by_role("button", name="Revoke root").click()
    page.keyboard.press("Escape")
    row.get_by_role("button").click()
    expect(page.get_by_role("dialog", name="Revoke the token lost?")).to_be_visible()
    page.go_back()
    expect(page.get_by_role("dialog")).to_have_count(0)
    page.go_forward()
    row.get_by_role("button").click()
    page.get_by_role("dialog").get_by_role("button", name="Revoke").click()
    expect(row).to_contain_text("revoked")
    listed = {each["token_id"]: each["revoked"] for each in console.api.get("/v1/tokens").json()["items"]}
    assert listed[lost["token_id"]]


# --- words ----------------------------------------------------------------------------------------


def names_in(script: str, constant: str, scripts: Mapping[str, str] = SCRIPTS) -> set[str]:
    """The names that a table in a script has."""
    table = re.search(rf"const {constant} = \{{(.*?)\n\}};", scripts[script], re.DOTALL)
    assert table is not None
    return set(re.findall(r'^  "?([\w-]+)"?:', table[1], re.MULTILINE))


def test_there_is_something_to_do_about_every_check_and_words_for_every_break(console: Console) -> None:
    declared = {check.name for check in CHECKS}
    assert console.api.get("/readyz").json()["checks"].keys() <= declared
    assert names_in("advice.js", "BREAKS") == {*KINDS, DAMAGED, KEY_ROW}
    alert = re.search(r'readyz_check_failing\{check=~"([a-z|]+)"\} > 0\n +for: 1m', ALERTS.read_text())
    assert alert is not None
    stopping = {check.name for check in CHECKS if check.stops is not Stops.NOTHING}
    assert stopping == {"accepting", "writer", *alert[1].split("|")}
    assert names_in("advice.js", "VERDICTS") == set(ASPECTS)
    assert names_in("advice.js", "WHYS") == set(Why)
    runbook = (Path(__file__).parents[2] / "docs" / "runbook.md").read_text()
    assert set(re.findall("^### ([a-z_]+)$", runbook, re.MULTILINE)) == declared


def test_the_page_that_verifies_has_words_for_every_break_and_verdict() -> None:
    assert names_in("words.js", "BREAKS", OF_VERIFY) >= set(KINDS)
    assert names_in("words.js", "MEANINGS", OF_VERIFY) >= set(ASPECTS)


@pytest.mark.parametrize(
    ("failing", "said"),
    [
        ("database", "The node is not ready: it takes events at LOCAL alone"),
        ("quorum", "The node is not ready: it takes events at LOCAL alone"),
        ("checkpoints", "The node is not ready; events are taken"),
        ("backlog", "The node takes no writes"),
    ],
)
def test_the_banner_says_what_a_node_that_is_not_ready_takes(console: Console, failing: str, said: str) -> None:
    headline = (
        "async name => (await import('/console/overview.js')).headline({ready: false}, [[name, {}]], [[name, {}]])"
    )
    assert console.go("").evaluate(headline, failing) == said


def test_no_script_makes_markup_of_text_or_keeps_a_token() -> None:
    for name, script in SCRIPTS.items():
        assert not re.search(r"innerHTML|outerHTML|insertAdjacent|document\.write|eval\(|Function\(", script), name
        assert not re.search(
            r"localStorage|document\.cookie|https?://(?!www\.w3\.org/2000/svg|[a-z]+\.example\.org)", script
        ), name
