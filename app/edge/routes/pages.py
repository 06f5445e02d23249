"""``/``, ``/console``, ``/verify``: pages for people, out of ``app.pages``; ``/docs``: the API, to read and try.

They hold no data: the console reads from the API, and the verifier checks files that its user supplies. By their policy
a browser loads nothing for them from other origins, runs no inline script, and shows them in no frame. Swagger UI comes
from a package that holds only its files.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Annotated, Final

from fastapi import APIRouter, Path, Request, Response

from app.edge.routing import StrictRoute
from app.pages import PageFile, read_folder
from app.pages.verify_page import verify_page
from ledger.errors import NotFoundError

router = APIRouter(route_class=StrictRoute, include_in_schema=False)

HEADERS: Final[Mapping[str, str]] = {
    "Cache-Control": "no-cache",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Permissions-Policy": "camera=(), geolocation=(), microphone=(), payment=(), usb=()",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
"""Of every page. A browser keeps a page and asks each time whether it is still that one."""
CONSOLE_POLICY: Final = "; ".join(
    (
        "default-src 'none'",
        "script-src 'self'",
        "style-src 'self'",
        "connect-src 'self'",
        "img-src 'self' data:",
        "form-action 'self'",
        "frame-ancestors 'none'",
        "base-uri 'none'",
        "require-trusted-types-for 'script'",
        "trusted-types 'none'",
    )
)
"""No text becomes markup or script, whatever stands in a job: the last two take away what could make it so."""
CONSOLE: Final = read_folder("console")
INDEX: Final = "index.html"


@router.get("/")
async def read_root() -> Response:
    """The way to the console, by an address that is right behind any prefix."""
    return Response(status_code=307, headers={**HEADERS, "Location": "console"})


@router.get("/console")
async def read_console(request: Request) -> Response:
    """The web console."""
    return page_answer(request, CONSOLE[INDEX], CONSOLE_POLICY)


@router.get("/console/{file}")
async def read_console_file(request: Request, file: Annotated[str, Path()]) -> Response:
    """What the console loads."""
    found = CONSOLE.get(file)
    if found is None or file == INDEX:
        raise NotFoundError(f"there is no {file[:100]} here; the console is at /console")
    return page_answer(request, found, CONSOLE_POLICY)


@router.get("/verify")
async def read_verify_page(request: Request) -> Response:
    """The page that verifies bundles and receipts in a browser alone."""
    page = verify_page()
    return page_answer(request, page.file, page.policy)


def page_answer(request: Request, page: PageFile, policy: str) -> Response:
    """A file of a page under its Content-Security-Policy; 304 where the caller has it already."""
    headers = {**HEADERS, "Content-Security-Policy": policy, "ETag": page.etag}
    known = request.headers.get("If-None-Match", "")
    if known == "*" or page.etag in (tag.strip().removeprefix("W/") for tag in known.split(",")):
        return Response(status_code=304, headers=headers)
    return Response(page.content, headers={**headers, "Content-Type": page.media_type})


_DOCS_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_DOCS_ASSETS = {
    "favicon-32x32.png": "image/png",
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
}
_DOCS_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>Tallystick</title>
<link rel="icon" href="docs/favicon-32x32.png">
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="swagger-ui"></div>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</body>
</html>
"""
# Without a validator, which would be asked on the internet.
_DOCS_START = """SwaggerUIBundle({
  url: "openapi.json", dom_id: "#swagger-ui", deepLinking: true, displayRequestDuration: true, validatorUrl: null,
});
"""


@router.get("/docs")
async def read_docs() -> Response:
    """The page."""
    return Response(_DOCS_PAGE, headers=_DOCS_HEADERS, media_type="text/html")


@router.get("/docs/{name}")
async def read_docs_asset(name: Annotated[str, Path()]) -> Response:
    """What the page names."""
    headers = {**_DOCS_HEADERS, "Cache-Control": "max-age=3600"}
    if name == "start.js":
        return Response(_DOCS_START, headers=headers, media_type="text/javascript")
    if name not in _DOCS_ASSETS:
        raise NotFoundError(f"there is no {name[:100]} here")
    return Response(_docs_asset(name), headers=headers, media_type=_DOCS_ASSETS[name])


@cache
def _docs_asset(name: str) -> bytes:
    return files("fastapi_swagger.resources").joinpath(name).read_bytes()
