"""For mkdocs: the pages of the client and of the recipes, whose files are elsewhere in a checkout, and a search
that works from a disk.

Other links out of ``docs/`` lead to files of a checkout, so on the site their words stand alone.
"""

from __future__ import annotations

import os.path
import re
from pathlib import Path
from typing import Any

from mkdocs.structure.files import File

ROOT = Path(__file__).parents[2]
CLIENT = "clients/python/README.md"
RECIPES = "clients/recipes"
WORKER, WORKER_ELSEWHERE = "assets/iframe-worker.js", "https://unpkg.com/iframe-worker/shim"
_LINK = re.compile(r"\[([^\]]+)\]\(((?:\.\./)+[^)#\s]+)([^)\s]*)\)")
_LANGUAGES = {".py": "python", ".sh": "sh", ".yaml": "yaml", ".yml": "yaml", "": "text"}


def on_files(files: Any, *, config: Any, **_: Any) -> Any:
    """Add a page for the client, and one for each file of a recipe."""
    files.append(File.generated(config, _page(CLIENT), content=(ROOT / CLIENT).read_text()))
    for path in sorted((ROOT / RECIPES).rglob("*")):
        if path.is_file() and path.suffix in _LANGUAGES:
            source = path.relative_to(ROOT).as_posix()
            text = f"# {path.parent.name}/{path.name}\n\n````{_LANGUAGES[path.suffix]}\n{path.read_text()}````\n"
            files.append(File.generated(config, _page(source), content=text))
    files.append(File.generated(config, WORKER, content=Path(__file__).with_name("iframe-worker.js").read_text()))
    return files


def on_post_page(output: str, *, page: Any, **_: Any) -> str:
    """The HTML of ``page``, which loads the worker of its search from the site."""
    return output.replace(WORKER_ELSEWHERE, os.path.relpath(WORKER, os.path.dirname(page.file.dest_uri) or "."))


def on_post_template(output: str, **_: Any) -> str:
    """The page of addresses that are none, whose own addresses are absolute."""
    return output.replace(WORKER_ELSEWHERE, f"/{WORKER}")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The text of ``page``, with the words of each link to a file without a page in place of the link."""
    shown = page.file.src_uri
    of_client = shown == _page(CLIENT)
    source = CLIENT if of_client else f"docs/{shown}"

    def led(link: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(os.path.dirname(source), link[2]))
        if target.startswith("docs/"):
            to = target.removeprefix("docs/")
        elif target == CLIENT or target.startswith(f"{RECIPES}/"):
            to = _page(target)
        else:
            return link[1]
        return f"[{link[1]}]({os.path.relpath(to, os.path.dirname(shown) or '.')}{link[3]})"

    return _LINK.sub(led, markdown)


def _page(source: str) -> str:
    """The place in ``docs/`` of the page that shows a file of the checkout."""
    return "client.md" if source == CLIENT else f"recipes/{source.removeprefix(f'{RECIPES}/')}.md"
