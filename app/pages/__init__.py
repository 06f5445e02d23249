"""Pages for people, as files: HTML, style and modules of script that a browser takes as they stand, without a build.

    console/    the web console; reads the API as any client does
    verify/     verifies bundles and receipts in the browser alone; ``verify_page`` joins it into one file

What is served is what was in the package when the service started, each file with a tag of its content.
"""

from __future__ import annotations

import hashlib
from importlib.resources import files
from typing import Final, NamedTuple

MEDIA_TYPES: Final = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}
"""Files with other endings are not served: licences of what others wrote, and sources of this package."""


class PageFile(NamedTuple):
    """One file of a page, ready to be sent."""

    content: bytes
    media_type: str
    etag: str
    """A strong entity tag, quotes included (RFC 9110, section 8.8.3)."""


def page_file(content: bytes, suffix: str) -> PageFile:
    """``content`` as a file whose name ends in ``suffix``, one of ``MEDIA_TYPES``."""
    return PageFile(content, MEDIA_TYPES[suffix], f'"{hashlib.sha256(content).hexdigest()[:32]}"')


def read_folder(name: str) -> dict[str, PageFile]:
    """The files of the folder ``name`` of this package that are served, by their names."""
    found = {}
    for each in files(__name__).joinpath(name).iterdir():
        suffix = f".{each.name.rpartition('.')[2]}"
        if each.is_file() and suffix in MEDIA_TYPES:
            found[each.name] = page_file(each.read_bytes(), suffix)
    return found
