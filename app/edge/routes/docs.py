"""``/docs``: the description of the API to read and try, with nothing from anywhere else.

Swagger UI comes out of a package that holds nothing but its files. The page names only what is served here, beside
it, and its Content-Security-Policy lets a browser load nothing else and run no script that stands in a page.
"""

from __future__ import annotations

from functools import cache
from importlib.resources import files
from typing import Annotated

from fastapi import APIRouter, Path, Response

from app.edge.routing import StrictRoute
from ledger.errors import NotFoundError

router = APIRouter(route_class=StrictRoute, include_in_schema=False)

_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "Referrer-Policy": "no-referrer",
    "X-Content-Type-Options": "nosniff",
}
_ASSETS = {
    "favicon-32x32.png": "image/png",
    "swagger-ui-bundle.js": "text/javascript",
    "swagger-ui.css": "text/css",
}
_PAGE = """<!doctype html>
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
_START = """SwaggerUIBundle({
  url: "openapi.json", dom_id: "#swagger-ui", deepLinking: true, displayRequestDuration: true, validatorUrl: null,
});
"""


@router.get("/docs")
async def read_docs() -> Response:
    """The page."""
    return Response(_PAGE, headers=_HEADERS, media_type="text/html")


@router.get("/docs/{name}")
async def read_docs_asset(name: Annotated[str, Path()]) -> Response:
    """What the page names."""
    headers = {**_HEADERS, "Cache-Control": "max-age=3600"}
    if name == "start.js":
        return Response(_START, headers=headers, media_type="text/javascript")
    if name not in _ASSETS:
        raise NotFoundError(f"there is no {name[:100]} here")
    return Response(_asset(name), headers=headers, media_type=_ASSETS[name])


@cache
def _asset(name: str) -> bytes:
    return files("fastapi_swagger.resources").joinpath(name).read_bytes()
