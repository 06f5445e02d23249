"""Pages of the console that follow what happens: nothing is lost or shown that is not so, whatever comes in between."""

from __future__ import annotations

import json
import re
import threading
import time
from collections.abc import Iterator
from contextlib import ExitStack
from functools import partial
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path

import pytest
from playwright.sync_api import Route, expect

from app.dev.embedded import EmbeddedPostgres
from app.share.webhooks import delivery
from app.share.webhooks.formats import Format
from pipeline.archive import plan_path
from tests.app.console_page import Console, barriers, book, consoling, job
from tests.app.witness import Witness
from tests.app.witness_server import WitnessServer, serving_witness
from tests.browser import PHONE
from tests.waiting import until

TENANT = "acme"
CANCELLED = {"tenant_id": TENANT, "reason": "no need", "requestor": "ada", "durability": "GLOBAL"}
W1, W2 = Witness("witness.example/w1", 1), Witness("witness.example/w2", 2)
LIVE = "Live: changes show as they come"
NOT_LIVE = re.compile(r"Not live since \d\d:\d\d:\d\d: the stream is being opened again")


@pytest.fixture(scope="module")
def console(postgres: EmbeddedPostgres, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Console]:
    """The console of a service that asks for tokens and archives, root signed in; two jobs."""
    folder = tmp_path_factory.mktemp("live")
    away = WitnessServer(W2.name, 2, lambda _: [])
    settings = {
        "auth": {"mode": "tokens"},
        "signing": {"second": "ml-dsa-44"},
        "archive": {"url": str(folder / "archive"), "interval": "1s"},
        "webhooks": {"networks": ["127.0.0.0/8"]},
        "log": {"policy": str(folder / "policy")},
    }
    with serving_witness(away), ExitStack() as stack:
        lines = (f"witness w1 {W1.verifier_key}", f"witness w2 {W2.verifier_key} {away.url}", "quorum w1", "")
        (folder / "policy").write_text("\n".join(lines))
        console = stack.enter_context(consoling(postgres, folder, "console_live", **settings))
        for name in ("nightly-0", "nightly-1"):
            console.api.post("/v1/jobs", json=job(TENANT, name)).raise_for_status()
        yield console


@pytest.fixture(autouse=True)
def _untroubled(console: Console) -> Iterator[None]:
    """Whatever a test does, no page asks another server or trips over its policy."""
    yield
    console.tidy()


def test_jobs_show_as_they_come_and_as_they_end(console: Console) -> None:
    page = console.go(f"jobs/{TENANT}")
    expect(page.locator(".live")).to_have_text(LIVE)
    console.api.post("/v1/jobs", json=job(TENANT, "while-you-watch")).raise_for_status()
    row = page.get_by_role("row").filter(has_text="while-you-watch")
    expect(row).to_contain_text("submitted")
    ended = {"tenant_id": TENANT, "type": "JobCompleted", "final_status": "went well", "durability": "GLOBAL"}
    console.api.post("/v1/jobs/while-you-watch/events", json=ended).raise_for_status()
    expect(row).to_contain_text("completed")
    expect(row).to_contain_text("went well")
    page.get_by_role("link", name="while-you-watch").focus()
    page.get_by_role("button", name="Pause").dispatch_event("click")
    console.api.post("/v1/jobs", json=job(TENANT, "while-you-read")).raise_for_status()
    expect(page.get_by_role("row").filter(has_text="while-you-read")).to_have_count(0)
    page.get_by_role("button", name="Pause").dispatch_event("click")
    expect(page.get_by_role("row").filter(has_text="while-you-read")).to_be_visible()
    expect(page.get_by_role("link", name="while-you-watch")).to_be_focused()


def test_a_tenant_without_events_shows_its_jobs_once_the_first_comes(console: Console) -> None:
    page = console.go("jobs/unborn")
    expect(page.locator("main")).to_contain_text("unborn has no event yet.")
    expect(page.locator(".live")).to_have_text(NOT_LIVE)
    console.api.post("/v1/jobs", json=job("unborn", "first-of-all")).raise_for_status()
    expect(page.get_by_role("rowheader")).to_have_text(["first-of-all"])
    expect(page.locator(".live")).to_have_text(LIVE)


def test_a_page_that_finds_no_service_says_since_when_and_shows_itself_once_it_is_back(console: Console) -> None:
    context = console.open()
    page = console.sign_in(page=context.new_page())
    expect(page.get_by_text("Signed in as root")).to_be_visible()
    page.clock.install()
    context.set_offline(True)
    console.go(f"jobs/{TENANT}", page)
    expect(page.get_by_role("alert")).to_contain_text(re.compile(r"No answer since \d\d:\d\d:\d\d"))
    page.clock.fast_forward(5000)
    expect(page.get_by_role("heading", name="The service does not answer")).to_be_visible()
    context.set_offline(False)
    page.clock.fast_forward(5000)
    expect(page.get_by_role("rowheader").filter(has_text="nightly-0")).to_be_visible()


class Refusing(BaseHTTPRequestHandler):
    """A receiver that refuses the first entry of a chain as long as `REFUSES` is set."""

    REFUSES = threading.Event()

    def do_POST(self) -> None:
        said = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        is_refused = self.REFUSES.is_set() and any(entry["seq"] == 1 for entry in said["entries"])
        self.send_response(422 if is_refused else 204)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def log_message(self, *_: object) -> None:
        """Nothing is printed."""


def test_a_webhook_is_added_shows_its_secret_once_delivers_again_and_is_deleted(
    console: Console, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(delivery, "PAUSE_FIRST_S", 0.01)
    monkeypatch.setattr(delivery, "PAUSE_MAX_S", 0.05)
    for number in range(2):
        console.api.post("/v1/jobs", json=job("hooked", f"job-{number}")).raise_for_status()
    Refusing.REFUSES.set()
    listed = partial(console.api.get, "/v1/webhooks", params={"tenant_id": "hooked"})
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/in"
        page = console.go("webhooks/hooked")
        expect(page.get_by_text("hooked has no webhook.")).to_be_visible()
        formats = page.get_by_label("Format").locator("option").all_inner_texts()
        assert formats == [each.value for each in Format]
        page.get_by_label("Address").fill("http://elsewhere.example/in")
        page.get_by_role("button", name="Add").click()
        expect(page.get_by_role("alert").filter(has_text="Not added: url: ")).to_be_visible()
        page.get_by_label("Address").fill(url)
        page.get_by_label("From entry").fill("1")
        page.keyboard.press("Enter")
        secret = page.get_by_text("whsec_")
        expect(secret).to_be_focused()
        assert barriers(page) == []
        until(lambda: listed().json()["items"][0]["dead_letter_count"] == 1, "the first entry is refused")
        console.load("webhooks/hooked")
        expect(secret).to_have_count(0)
        row = page.get_by_role("row").filter(has_text=url)
        expect(row).to_contain_text("✓ delivering")
        letters = page.get_by_role("table", name="Dead letters of")
        expect(letters.get_by_role("link", name="1")).to_have_attribute("href", "#/verify/hooked?at=1")
        assert barriers(page) == []
        Refusing.REFUSES.clear()
        page.get_by_role("button", name="Deliver again").click()
        page.get_by_role("button", name="Deliver", exact=True).click()
        until(lambda: listed().json()["items"][0]["dead_letter_count"] == 0, "it is delivered")
        expect(page.locator("main").get_by_role("status")).to_contain_text("gets its dead letters once more.")
        page.get_by_role("button", name="Delete").click()
        page.get_by_role("button", name="Keep it").click()
        assert len(listed().json()["items"]) == 1
        page.get_by_role("button", name="Delete").click()
        page.get_by_role("dialog").get_by_role("button", name="Delete").click()
        expect(page.get_by_text("hooked has no webhook.")).to_be_visible()
        server.shutdown()


def test_a_webhook_is_paused_resumed_and_replayed_by_keyboard_alone_on_a_phone(console: Console) -> None:
    for number in range(3):
        console.api.post("/v1/jobs", json=job("replayed", f"job-{number}")).raise_for_status()
    Refusing.REFUSES.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Refusing) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        url = f"http://127.0.0.1:{server.server_port}/in"
        wanted = {"tenant_id": "replayed", "url": url, "from_seq": 1}
        console.api.post("/v1/webhooks", json=wanted).raise_for_status()
        listed = partial(console.api.get, "/v1/webhooks", params={"tenant_id": "replayed"})
        until(lambda: listed().json()["items"][0]["delivered_seq"] == 3, "all is delivered")
        console.page.set_viewport_size(PHONE)
        page = console.load("webhooks/replayed")
        row = page.get_by_role("row").filter(has_text=url)
        said = page.locator("main").get_by_role("status")
        page.get_by_role("button", name="Pause").focus()
        page.keyboard.press("Enter")
        expect(row).to_contain_text("‖ paused")
        expect(page.get_by_role("button", name="Resume")).to_be_focused()
        page.keyboard.press("Tab")
        expect(page.get_by_role("button", name="Replay")).to_be_focused()
        page.keyboard.press("Enter")
        asked = page.get_by_role("dialog", name="Replay from an entry on?")
        expect(asked).to_contain_text("has confirmed all up to entry 3.")
        expect(asked).to_contain_text("It is paused: it gets nothing until it is resumed.")
        expect(asked.get_by_label("From entry")).to_be_focused()
        assert barriers(page) == []
        assert page.evaluate("document.documentElement.scrollWidth") <= PHONE["width"]
        page.keyboard.press("Control+A")
        page.keyboard.type("4")
        page.keyboard.press("Enter")
        assert asked.get_by_label("From entry").evaluate("field => field.validity.rangeOverflow")
        page.keyboard.press("Escape")
        expect(page.get_by_role("button", name="Replay")).to_be_focused()
        page.keyboard.press("Enter")
        page.keyboard.press("Control+A")
        page.keyboard.type("2")
        page.keyboard.press("Enter")
        expect(said).to_have_text(f"{url} gets all from entry 2 on once more, once it is resumed.")
        expect(row.get_by_role("cell", name="Confirmed to 1")).to_be_visible()
        expect(page.get_by_role("button", name="Replay")).to_be_focused()
        page.keyboard.press("Shift+Tab")
        page.keyboard.press("Enter")
        expect(said).to_have_text(f"{url} is resumed.")
        expect(row.get_by_role("cell", name="Confirmed to 3")).to_be_visible()
        assert barriers(page) == []
        console.api.delete(f"/v1/webhooks/{listed().json()['items'][0]['webhook_id']}").raise_for_status()
        page.get_by_role("button", name="Pause").click()
        expect(said).to_contain_text(f"{url} is not paused: there is no webhook")
        server.shutdown()


def test_who_administers_no_webhook_sees_none(console: Console) -> None:
    page = console.sign_in(console.issue("reader", "read", "audit")["token"], console.stranger())
    expect(page.get_by_text("Signed in as reader")).to_be_visible()
    expect(page.get_by_role("link", name="Webhooks")).to_have_count(0)
    console.go("webhooks/replayed", page)
    expect(page.get_by_role("alert")).to_contain_text("admin")
    expect(page.get_by_role("button", name=re.compile("Pause|Replay|Delete"))).to_have_count(0)


def test_a_tenant_says_which_witnesses_cosigned_and_whether_they_are_enough(console: Console) -> None:
    log = "/v1/log/witnessed/"
    console.api.post("/v1/jobs", json=job("witnessed", "seen")).raise_for_status()
    note = until(
        lambda: (got := console.api.get(f"{log}checkpoint")).status_code == 200 and got.text, "a checkpoint is signed"
    )
    page = console.go("tenant/witnessed")
    panel = page.locator("section").filter(has_text="Witnesses")
    expect(panel).to_contain_text("below quorum Quorum w1 covers 0 of 1 entry. w1: has cosigned nothing of this log")
    headers = {"Content-Type": "text/plain"}
    cosigned = W1.cosign(note, int(time.time()))
    console.api.post(f"{log}cosignatures", content=cosigned, headers=headers).raise_for_status()
    page.reload()
    expect(panel).to_contain_text("✓ quorum Quorum w1 covers 1 of 1 entry.")
    expect(panel.get_by_role("row").filter(has_text="w1")).to_contain_text("✓ holds")
    expect(panel.get_by_role("row").filter(has_text="w2")).to_contain_text("✕ at fault it answers 404")
    assert barriers(page) == []
    expect(console.go("ledger").get_by_text("to be cosigned")).to_contain_text("✓ in order")


def test_second_keys_and_those_of_their_logs_are_listed_with_the_first(console: Console) -> None:
    page = console.go("keys")
    expect(page.get_by_role("row").filter(has_text="ml-dsa-44")).to_contain_text("snapshots, checkpoints")
    second = console.api.get("/v1/keys").json()["second_log_verifier_keys"]
    expect(page.locator("pre")).to_contain_text(second[0])
    assert barriers(page) == []


def test_a_receipt_that_too_few_witnesses_cover_is_said_to_be_below_the_quorum(console: Console) -> None:
    log = "/v1/log/covered/"
    console.api.post("/v1/jobs", json=job("covered", "proved")).raise_for_status()
    note = until(
        lambda: (got := console.api.get(f"{log}checkpoint")).status_code == 200 and got.text, "a checkpoint is signed"
    )
    page = console.go("job/covered/proved")
    button, told = page.get_by_role("button", name="Download the receipt"), page.locator(".actions [role=alert]")
    with page.expect_download():
        button.click()
    expect(told).to_contain_text("below quorum Quorum w1 covers entries up to 0, and this job goes to 1")
    expect(told).to_contain_text("incomplete (exit code 3). w1: has cosigned nothing of this log")
    cosigned = W1.cosign(note, int(time.time()))
    console.api.post(f"{log}cosignatures", content=cosigned, headers={"Content-Type": "text/plain"}).raise_for_status()
    with page.expect_download():
        button.click()
    expect(told).to_be_empty()


def test_the_nodes_of_a_tenant_say_what_is_reserved_and_which_are_overbooked(console: Console) -> None:
    page = console.go("nodes/placed")
    expect(page.get_by_role("alert")).to_contain_text("placed")
    book(console, "placed")
    page = console.load("nodes/placed")
    nodes = page.get_by_role("table", name="node")
    full = nodes.get_by_role("row").filter(has_text="full")
    for said in ("overbooked", "CPU: 5 of 6 (capacity × 1.5)", "Memory: 0 GiB of 8 GiB", "A100: 2 of 1", "1 too much"):
        expect(full).to_contain_text(said)
    idle = nodes.get_by_role("row").filter(has_text="idle")
    expect(idle).to_contain_text("fits")
    expect(idle).to_contain_text("CPU: 0 of 0.5")
    commitments = page.get_by_role("table", name="Active commitments, as of entry 4")
    expect(commitments.get_by_role("row").nth(1)).to_contain_text("2Placement")
    expect(commitments).to_contain_text("capsule-1")
    page.get_by_role("link", name="Overbooked only").click()
    expect(page.get_by_text("1 overbooked node, as of entry 4")).to_be_visible()
    expect(nodes.get_by_role("rowheader")).to_have_text(["full"])
    console.api.post(
        "/v1/commitments",
        json={"tenant_id": "placed", "commitment": {"kind": "Revocation", "index": 2}},
        headers={"Idempotency-Key": "revoke"},
    ).raise_for_status()
    page.reload()
    expect(page.get_by_text("No node is overbooked.")).to_be_visible()
    expect(page.get_by_text("No commitment is active.")).to_be_visible()
    page.get_by_role("link", name="All nodes").click()
    expect(nodes.get_by_role("rowheader")).to_have_text(["full", "idle"])


@pytest.mark.parametrize("place", [f"job/{TENANT}/between", f"jobs/{TENANT}?status=CANCELLING"])
def test_what_happens_while_a_page_begins_to_listen_is_shown(console: Console, place: str) -> None:
    name = place.split("?")[0].replace("/", "-")
    place = place.replace("between", name)
    console.api.post("/v1/jobs", json=job(TENANT, name)).raise_for_status()

    def cancel_first(route: Route) -> None:
        console.api.post(f"/v1/jobs/{name}/cancel", json=CANCELLED).raise_for_status()
        route.continue_()

    page = console.go("keys")
    page.route("**/v1/watch?*", cancel_first, times=1)
    console.go(place)
    expect(page.locator("main")).to_contain_text("Cancellation requested" if place.startswith("job/") else name)


@pytest.mark.parametrize("pressed", ["Download the receipt", "All fields"])
def test_what_is_pressed_as_the_page_is_drawn_again_is_clicked_when_it_is_released(
    console: Console, pressed: str
) -> None:
    name = f"pressed-{len(pressed)}"
    console.api.post("/v1/jobs", json=job(TENANT, name)).raise_for_status()
    with console.page.expect_request("**/v1/watch?*"):
        page = console.go(f"job/{TENANT}/{name}")
    shown = page.get_by_text(pressed)
    shown.hover()
    page.mouse.down()
    console.api.post(f"/v1/jobs/{name}/cancel", json=CANCELLED).raise_for_status()
    expect(page.locator(".actions .tag")).to_have_text("cancelling")
    if pressed.startswith("Download"):
        with page.expect_download():
            page.mouse.up()
    else:
        page.mouse.up()
    expect(page.locator(".timeline > li")).to_have_count(2)
    expect(page.locator("details[open]")).to_have_count(0 if pressed.startswith("Download") else 1)


def test_an_answer_that_comes_late_is_not_drawn_over_a_newer_one(console: Console) -> None:
    console.api.post("/v1/jobs", json=job(TENANT, "late")).raise_for_status()
    old = console.api.get("/v1/jobs/late", params={"tenant_id": TENANT}).json()
    address = re.compile(r"/v1/jobs/late\?")
    asked: list[Route] = []

    def hold_the_second(route: Route) -> None:
        asked.append(route)
        if len(asked) != 2:
            route.continue_()

    page = console.go("keys")
    page.route(address, hold_the_second)
    console.go(f"job/{TENANT}/late")
    while len(asked) < 2:  # until the page listens
        page.evaluate("document.title")
    cancelled, ended = {"reason": "no need", "requestor": "ada"}, {"type": "JobCompleted", "final_status": "done"}
    for path, event, action in (("cancel", cancelled, "CANCEL"), ("events", ended, "COMPLETE")):
        said = {"tenant_id": TENANT, "durability": "GLOBAL", **event}
        console.api.post(f"/v1/jobs/late/{path}", json=said).raise_for_status()
        expect(page.locator("#say")).to_have_text(f"late: {action}")
    assert len(asked) == 2
    with page.expect_response(re.compile("/v1/jobs/late/events")):
        asked[1].fulfill(json=old)
    expect(page.locator(".timeline > li")).to_have_count(3)
    expect(page.locator(".actions .tag")).to_have_text("cancelled")
    page.unroute(address)


def test_a_stream_that_fell_silent_is_not_called_live(console: Console) -> None:
    page = console.sign_in(page=console.open().new_page())
    expect(page.get_by_text("Signed in as root")).to_be_visible()
    page.clock.install()
    console.load(f"jobs/{TENANT}", page)
    live = page.locator(".live")
    expect(live).to_have_text(LIVE)
    held: list[Route] = []

    def hold(route: Route) -> None:
        held.append(route)

    page.route("**/v1/watch?*", hold)  # as a proxy that takes the next one and never answers
    page.clock.fast_forward(20_000)
    expect(live).to_have_text(LIVE)
    page.clock.fast_forward(41_000)
    expect(live).to_have_text(NOT_LIVE)
    while not held:  # it is asked for again
        page.evaluate("document.title")
    page.unroute("**/v1/watch?*")  # which lets those go that were held
    expect(live).to_have_text(LIVE)


def test_the_overview_says_when_all_was_last_verified_and_by_whom(console: Console) -> None:
    for tenant in (TENANT, "_system"):
        console.api.get("/v1/chain/verify", params={"tenant_id": tenant}).raise_for_status()
    said = console.api.get("/readyz").json()["verified"]
    assert said["by"]
    page = console.go("ledger")
    expect(page.locator(".verified")).to_contain_text("All chains were last verified from end to end")
    expect(page.locator(".verified")).to_contain_text(f"by {said['by']}")


def test_the_overview_says_why_the_archive_is_not_filled(console: Console) -> None:
    place = Path(console.api.get("/v1/archive").raise_for_status().json()["url"])
    away = place.rename(place.with_name("away"))
    place.write_text("no folder")
    console.api.post("/v1/jobs", json=job("waiting", "job-to-archive")).raise_for_status()
    console.api.post("/v1/snapshots", json={"tenant_id": "waiting"}).raise_for_status()
    try:
        until(lambda: not console.api.get("/readyz").json()["checks"]["archive"]["ok"], "the place fails")
        page = console.go("ledger")
        expect(page.get_by_text("cannot be written to: Not a directory")).to_have_count(2)
        expect(page.get_by_text("Mend the place or its credentials")).to_be_visible()
    finally:
        place.unlink()
        away.rename(place)
    until(lambda: console.api.get("/readyz").json()["checks"]["archive"]["ok"], "the place is back")


def test_what_was_true_is_not_shown_as_if_it_still_were_when_the_service_is_out_of_reach(console: Console) -> None:
    context = console.open()
    page = console.sign_in(page=context.new_page())
    expect(page.get_by_text("Signed in as root")).to_be_visible()
    page.clock.install()
    console.load("ledger", page)
    expect(page.get_by_text("✓ in order").first).to_be_visible()
    page.get_by_text("All 2").click()
    page.get_by_role("link", name="with no other ledger").focus()
    with page.expect_response("**/v1/exchange"):
        page.clock.fast_forward(6000)
    expect(page.get_by_role("list").get_by_text("✓ Backlog")).to_be_visible()
    expect(page.get_by_role("link", name="with no other ledger")).to_be_focused()
    context.set_offline(True)
    page.clock.fast_forward(6000)
    expect(page.get_by_role("heading", name="The service does not answer")).to_be_visible()
    expect(page.get_by_text("in order")).to_have_count(0)
    context.set_offline(False)
    page.clock.fast_forward(6000)
    expect(page.get_by_role("heading", name="Everything holds")).to_be_visible()
    expect(page.get_by_text("✓ in order").first).to_be_visible()


@pytest.mark.parametrize("place", [f"jobs/{TENANT}", f"job/{TENANT}/nightly-0"])
def test_a_page_follows_again_after_it_was_refused_or_in_the_background(console: Console, place: str) -> None:
    page = console.open().new_page()
    console.sign_in(page=page)
    expect(page.get_by_text("Signed in as root")).to_be_visible()
    page.clock.install()
    page.route("**/v1/watch?*", lambda route: route.fulfill(status=503), times=1)
    console.go(place, page)
    live = page.locator(".live")
    expect(live).to_have_text(NOT_LIVE)
    with page.expect_request("**/v1/watch?*"):
        page.clock.fast_forward(5000)
    expect(live).to_have_text(LIVE)
    hide = "is => { Object.defineProperty(document, 'hidden', {value: is, configurable: true}); }"
    for hidden, said in ((True, NOT_LIVE), (False, LIVE)):
        page.evaluate(hide, hidden)
        page.evaluate("document.dispatchEvent(new Event('visibilitychange'))")
        expect(live).to_have_text(said)


def test_a_list_that_cannot_be_drawn_anew_stays_says_so_and_is_drawn_later(console: Console) -> None:
    page = console.open().new_page()
    console.sign_in(page=page)
    expect(page.get_by_text("Signed in as root")).to_be_visible()
    page.clock.install()
    console.go(f"jobs/{TENANT}", page)
    live, problem = page.locator(".live"), {"title": "Too many", "detail": "wait a moment"}
    expect(live).to_have_text(LIVE)
    page.route("**/v1/jobs?*", lambda route: route.fulfill(status=429, json=problem))
    page.clock.fast_forward(1000)
    expect(live).to_have_text("Not as it is now: wait a moment")
    expect(page.get_by_role("rowheader").filter(has_text="nightly-0")).to_be_visible()
    page.unroute("**/v1/jobs?*")
    page.clock.fast_forward(5000)
    expect(live).to_have_text(LIVE)


def test_what_cannot_be_asked_is_not_shown_as_it_was_and_hides_nothing_else(console: Console) -> None:
    page = console.open().new_page()
    console.sign_in(page=page)
    expect(page.get_by_text("Signed in as root")).to_be_visible()
    page.clock.install()
    console.load("ledger", page)
    red = {"checks": {"database": {"ok": False, "detail": "it does not answer"}}}
    page.route("**/v1/node", lambda route: route.fulfill(status=503, json={}))
    page.route("**/readyz", lambda route: route.fulfill(status=503, json=red))
    page.clock.fast_forward(6000)
    expect(page.locator("[data-check=database]")).to_contain_text("it does not answer")
    expect(page.get_by_text("in order")).to_have_count(0)
    page.route("**/readyz", lambda route: route.fulfill(status=502, body="bad gateway"))
    page.clock.fast_forward(6000)
    expect(page.get_by_role("heading", name="The service did not answer as it should")).to_be_visible()
    expect(page.locator("[data-check]")).to_have_count(0)
    assert page.title().startswith("✕")


def test_whoever_reads_with_the_keyboard_stays_where_he_is_as_a_page_is_drawn_again(console: Console) -> None:
    console.api.post("/v1/jobs", json=job(TENANT, "read")).raise_for_status()
    console.api.post("/v1/jobs/read/cancel", json=CANCELLED).raise_for_status()
    page = console.go(f"job/{TENANT}/read")
    expect(page.locator(".live")).to_have_text(LIVE)
    second = page.locator("summary").nth(1)
    second.focus()
    page.keyboard.press("Enter")
    ended = {"tenant_id": TENANT, "type": "JobCompleted", "final_status": "done", "durability": "GLOBAL"}
    console.api.post("/v1/jobs/read/events", json=ended).raise_for_status()
    expect(page.locator(".timeline > li")).to_have_count(3)
    expect(second).to_be_focused()
    assert page.locator("details").evaluate_all("all => all.map(each => each.open)") == [False, True, False]


def archived_to(console: Console, tenant: str) -> int:
    """Up to where a tenant is archived, 0 if it is not."""
    found = console.api.get("/v1/archive").raise_for_status().json()["tenants"]
    return {each["tenant_id"]: int(each["archived_to_seq"]) for each in found}.get(tenant, 0)


def keep(console: Console, tenant: str) -> str:
    """Two jobs that ended, each signed and archived, the second one held; returns the hold. What is older than a second
    may leave."""
    ask = console.api
    for number in range(2):
        ask.post("/v1/jobs", json=job(tenant, f"job-{number}")).raise_for_status()
        ended = {"tenant_id": tenant, "type": "JobCompleted", "durability": "GLOBAL"}
        ask.post(f"/v1/jobs/job-{number}/events", json=ended).raise_for_status()
        ask.post("/v1/snapshots", json={"tenant_id": tenant}).raise_for_status()
    held = {"tenant_id": tenant, "reason": "case 4711", "job_id": "job-1"}
    hold = ask.post("/v1/holds", json=held).raise_for_status().json()
    policy = {"period": "1s", "minimum": "1s"}
    ask.put("/v1/retention", params={"tenant_id": tenant}, json=policy).raise_for_status()

    def is_held_alone() -> bool:
        # An entry that is held and too young is said to be too young.
        said = ask.get("/v1/retention", params={"tenant_id": tenant}).json()
        return said["prunable_to_seq"] == 2 and said["stopped_by"]["why"] == "hold"

    until(is_held_alone, "the first job may leave, and the hold alone stops the second")
    until(lambda: archived_to(console, tenant) == 4, "all is archived")
    return str(hold["hold_id"])


def test_retention_says_what_stays_what_stops_the_rest_what_would_leave_and_what_has_left(console: Console) -> None:
    console.api.post("/v1/jobs", json=job("kept", "job-of-old")).raise_for_status()
    page = console.go("retention/kept")
    expect(page.locator("main")).to_contain_text("for ever: no period is set")
    expect(page.locator("main")).to_contain_text("tally retention set --period sets one.")

    hold = keep(console, "held")
    page = console.go("retention/held")
    panels = {name: page.locator(".panel").filter(has_text=name) for name in ("What stays", "What stops", "What would")}
    expect(panels["What stays"]).to_contain_text("1 to 6 are here")
    stop = panels["What stops"]
    expect(stop.get_by_role("link", name="3")).to_have_attribute("href", "#/verify/held?at=3")
    expect(stop).to_contain_text(f"hold {hold}: case 4711")
    expect(stop).to_contain_text("An admin releases the hold")
    expect(panels["What would"]).to_contain_text("Entries 1 to 2: 2 entries.They leave by tally prune --tenant held")
    row = page.get_by_role("row").filter(has_text=hold)
    for said in ("case 4711", "1 job: job-1", "root"):
        expect(row).to_contain_text(said)
    expect(page.locator("main")).to_contain_text("Has" + "entries up to 4 of 4 signed" + "Lag" + "✓ none")
    expect(page.locator("main")).to_contain_text("What has leftNothing.")

    console.api.post("/v1/snapshots", json={"tenant_id": "held"}).raise_for_status()
    done = console.api.post("/v1/prunes", json={"tenant_id": "held"}).raise_for_status().json()
    page = console.load("retention/held")
    expect(panels["What stays"]).to_contain_text("3 to 7 are here" + "Left" + "1 to 2")
    expect(panels["What would"]).to_contain_text("Nothing now.")
    row = page.get_by_role("table", name="What has left").get_by_role("row").nth(1)
    for said in ("1 to 2", "root", str(done["archive"]), str(done["seq"])):
        expect(row).to_contain_text(said)
    assert barriers(page) == []

    # The next prune takes the entry before the first one's: that is listed for as long as it is here.
    ask = console.api
    ask.delete(f"/v1/holds/{hold}", params={"tenant_id": "held", "reason": "closed"}).raise_for_status()
    retention, second = partial(ask.get, "/v1/retention"), partial(ask.get, "/v1/jobs/job-1")
    of_held = {"tenant_id": "held"}
    until(lambda: retention(params=of_held).json()["prunable_to_seq"] >= 6, "the second job may leave")
    ask.post("/v1/prunes", json={**of_held, "to_seq": 6}).raise_for_status()
    until(lambda: second(params=of_held).status_code == 410, "the rows have left")
    page = console.load("retention/held")
    rows = page.get_by_role("table", name="What has left").get_by_role("row")
    for number, said in ((1, "3 to 6"), (2, "1 to 2")):
        expect(rows.nth(number)).to_contain_text(said)


def test_retention_says_how_far_the_archive_is_behind_and_why(console: Console) -> None:
    place = Path(console.api.get("/v1/archive").raise_for_status().json()["url"])
    plan = place / plan_path("lagging", 1)
    plan.parent.mkdir(parents=True)
    plan.write_text("no plan")
    try:
        console.api.post("/v1/jobs", json=job("lagging", "job-to-archive")).raise_for_status()
        console.api.post("/v1/snapshots", json={"tenant_id": "lagging"}).raise_for_status()
        archive = partial(console.api.get, "/v1/archive")
        until(lambda: "a plan is malformed" in archive().text, "the archive has met it")
        main = console.go("retention/lagging").locator("main")
        expect(main).to_contain_text(
            "Place" + str(place) + "Has" + "entries up to 0 of 1 signed" + "Lag" + "1 entry, for"
        )
        expect(main).to_contain_text("a plan is malformed")
    finally:
        plan.unlink()
    until(lambda: archived_to(console, "lagging") == 1, "it is archived")
    main = console.load("retention/lagging").locator("main")
    expect(main).to_contain_text("Has" + "entries up to 1 of 1 signed" + "Lag" + "✓ none")
