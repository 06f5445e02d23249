"""The modules of the page in Chromium judge the parts of a verifier as the corpus in docs/formats/cases says."""

from __future__ import annotations

import re
from pathlib import Path

from playwright.sync_api import Route

import app.pages
from app.pages.verify_page import ENGINE
from tests.browser import browsing
from tests.cases.kinds import PART_KINDS

SOURCES = Path(app.pages.__file__).with_name("verify")
ORIGIN = "http://verify.invalid/"
JUDGE = """async ([origin, names, judges]) => {
  const modules = {};
  for (const name of names) modules[name] = await import(`${origin}${name}.js`);
  window.holds = (kind, check) => {
    try { check(); return true; } catch (error) { if (error instanceof kind) return false; throw error; }
  };
  return judges.map(([script, all]) => all.map((given) => eval(script)(modules, given)));
}"""


def test_the_page_judges_every_part_as_the_corpus_says() -> None:
    def serve(route: Route) -> None:
        name = route.request.url.removeprefix(ORIGIN)
        body = (SOURCES / name).read_text() if name else "<!doctype html>"
        route.fulfill(body=body, content_type="text/javascript" if name else "text/html")

    names = [name.removesuffix(".js") for name in ENGINE if name != "worker.js"]
    kinds = [kind for kind in PART_KINDS if kind.in_page is not None]
    found = [kind.found() for kind in kinds]
    judges = [[kind.in_page, [dict(each.given) for each in all_of]] for kind, all_of in zip(kinds, found, strict=True)]
    with browsing() as browser:
        page = browser.new_page()
        page.route(re.compile(re.escape(ORIGIN)), serve)
        page.goto(ORIGIN)
        judged = page.evaluate(JUDGE, [ORIGIN, names, judges])
    for all_of, outcomes in zip(found, judged, strict=True):
        for case, outcome in zip(all_of, outcomes, strict=True):
            assert outcome == case.expected, f"{case.name}: {case.why}"
