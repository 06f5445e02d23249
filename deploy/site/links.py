"""For mkdocs: links out of ``docs/`` lead to files of a checkout, so on the site their words stand alone."""

from __future__ import annotations

import os.path
import re
from typing import Any

_LINK = re.compile(r"\[([^\]]+)\]\((\.\./[^)#\s]+)[^)\s]*\)")


def on_page_markdown(markdown: str, *, page: Any, **_: Any) -> str:
    """The text of ``page``, with the words of each link that leaves the folder in place of the link."""
    folder = os.path.dirname(page.file.src_uri)

    def words(link: re.Match[str]) -> str:
        target = os.path.normpath(os.path.join(folder, link[2]))
        return link[1] if target.startswith("..") else link[0]

    return _LINK.sub(words, markdown)
