"""The documentation: a site that needs nothing but itself, and commands that there are."""

from __future__ import annotations

import re
import shlex
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import pytest

from cli import Commands
from tests.browser import browsing

ROOT = Path(__file__).parents[2]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").rglob("*.md"))]
FENCED = re.compile(r"^```(?:sh|console)\n(.*?)^```", re.MULTILINE | re.DOTALL)
ENDS_A_COMMAND = {"|", ">", ">>", "<", "&&", "||", ";", "&", "2>"}


class Loaded(HTMLParser):
    """What a page loads by itself."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        given = dict(attrs)
        if tag in ("script", "img", "iframe") or (tag == "link" and given.get("rel") in ("stylesheet", "preconnect")):
            self.addresses += [address for name in ("src", "href") if (address := given.get(name))]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("site")
    build = [sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", folder]
    built = subprocess.run(build, cwd=ROOT, capture_output=True, text=True)
    assert built.returncode == 0, built.stderr
    return folder


def test_the_site_is_built_without_a_broken_link_and_loads_nothing_from_elsewhere(site: Path) -> None:
    pages = [path.read_text() for path in site.rglob("*.html")]
    assert len(pages) > 80
    loaded = {address for page in pages for address in Loaded(page).addresses}
    assert len(loaded) > 3
    assert not {address for address in loaded if re.match(r"(https?:)?//", address)}


def test_the_site_is_searched_from_a_disk_and_shows_the_client_and_the_recipes(site: Path) -> None:
    with browsing() as browser:
        page = browser.new_page()
        page.goto((site / "index.html").as_uri())
        page.get_by_role("textbox", name="Search").fill("job_id_of")
        page.locator(".md-search-result__link", has_text="tally_celery.py").first.wait_for(timeout=60_000)
        page.goto((site / "recipes.html").as_uri())
        page.get_by_role("link", name="tally_celery.py").click()
        assert "before_task_publish" in page.content()
        page.goto((site / "client.html").as_uri())
        page.get_by_role("link", name="recipes").first.click()
        assert page.url.endswith("recipes.html")


def commands_of(page: Path) -> list[str]:
    """Every command line of ``page`` that has ``tally`` do something."""
    lines: list[str] = []
    for block in FENCED.findall(page.read_text()):
        joined = re.sub(r"\\\n\s*", " ", block)
        lines += re.findall(r"(?:^|\s)((?:\.venv/bin/|/opt/tallystick/bin/)?tally [a-z-].*)$", joined, re.MULTILINE)
    return lines


def arguments_of(line: str) -> list[str]:
    """What ``tally`` is given by the first command of ``line`` that is one of it."""
    lexer = shlex.shlex(line, posix=True, punctuation_chars=True)
    lexer.whitespace_split, lexer.commenters = True, "#"
    words = list(lexer)
    ends = [at for at, word in enumerate(words) if word in ENDS_A_COMMAND or word == "--"]
    return words[1 : min(ends, default=len(words))]


def unknown_of(arguments: list[str]) -> list[str]:
    """What of ``arguments`` is neither a command nor an option of it."""
    command: Any = Commands(name="tally")
    position = 0
    while position < len(arguments) and hasattr(command, "list_commands"):
        found = command.get_command(None, arguments[position])
        if found is None:
            return [arguments[position]]
        command, position = found, position + 1
        if command.name == "pipeline":
            return []
    options = {name for each in command.params for name in each.opts + each.secondary_opts} | {"--help"}
    given = [each.partition("=")[0] for each in arguments[position:] if re.match(r"--?[a-z]", each)]
    return [each for each in given if each not in options]


@pytest.mark.parametrize("page", [page for page in PAGES if commands_of(page)], ids=lambda page: page.stem)
def test_the_commands_that_a_page_shows_are_ones_that_there_are(page: Path) -> None:
    lines = commands_of(page)
    assert {line: unknown for line in lines if (unknown := unknown_of(arguments_of(line)))} == {}
