"""A client of a node, which knows the tenant that a test is about."""

from __future__ import annotations

import httpx


class Client(httpx.AsyncClient):
    """One whose tenant is ``acme`` on a node of its own, and another for each test on a node that tests share."""

    tenant = "acme"
