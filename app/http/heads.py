"""What the head of a request must be before anything looks at it: the parser takes more than HTTP/1.1 allows.

Two readers of one connection must agree where a request ends (RFC 9112, section 6), so a head that a proxy might
read in another way is refused::

    version              HTTP/1.1, or HTTP/1.0 without Transfer-Encoding
    Host                 exactly one; HTTP/1.0 may have none, as health checks of load balancers do
    Transfer-Encoding    chunked, once
"""

from __future__ import annotations

from collections.abc import Iterable

from app.http.problems import MALFORMED_HTTP, TRANSFER_CODING_UNSUPPORTED, ProblemError


def check_head(version: str, headers: Iterable[tuple[bytes, bytes]]) -> None:
    """Return if a head of this HTTP version, with these headers in small letters, may be served.

    Raises:
        ProblemError: it may not.
    """
    hosts = 0
    coding = None
    for name, value in headers:
        if name == b"host":
            hosts += 1
        elif name == b"transfer-encoding":
            coding = value
    if version not in ("1.1", "1.0"):
        raise ProblemError(MALFORMED_HTTP, f"HTTP/{version} is not spoken here; send HTTP/1.1")
    if hosts > 1 or (hosts == 0 and version == "1.1"):
        raise ProblemError(MALFORMED_HTTP, f"the request has {hosts or 'no'} Host headers; send one")
    if coding is None:
        return
    if version == "1.0":
        raise ProblemError(MALFORMED_HTTP, "HTTP/1.0 has no Transfer-Encoding; send Content-Length, or HTTP/1.1")
    if coding.strip().lower() != b"chunked":
        raise ProblemError(
            TRANSFER_CODING_UNSUPPORTED,
            f"Transfer-Encoding {coding[:100].decode('latin-1')!r} is not taken; send chunked",
        )
