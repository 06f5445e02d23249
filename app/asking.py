"""Answers of other servers over HTTP, read within a bound."""

from __future__ import annotations

from typing import Any, Final

import httpx

from ledger.errors import LedgerError

LOOPBACK: Final = ("all://localhost", "all://127.0.0.1", "all://[::1]")
"""This machine, as ``httpx`` names what a proxy is not for."""


NO_ANSWER: Final = (httpx.HTTPError, httpx.InvalidURL, UnicodeError)
"""What ``httpx`` raises where there is no answer; also where one leads to what is no address, for it reads that though
nobody goes there."""


class NoAnswerError(LedgerError):
    """Another server does not answer, or with something else than it was asked for."""


async def read_answer(client: httpx.AsyncClient, method: str, url: str, *, bytes_max: int, **asked: Any) -> bytes:
    """The body of the answer to what ``asked`` says as ``httpx`` does. Nobody is followed to another address, and
    nothing is decompressed.

    Raises:
        NoAnswerError: there is none, or not with 200, or one of more than ``bytes_max`` bytes.
        TimeoutError: as the caller has it.
    """
    headers = {"Accept-Encoding": "identity", **asked.pop("headers", {})}
    body = b""
    try:
        async with client.stream(method, url, headers=headers, follow_redirects=False, **asked) as answer:
            if answer.status_code != httpx.codes.OK:
                raise NoAnswerError(f"{url} answers {answer.status_code}")
            async for piece in answer.aiter_raw():
                body += piece
                if len(body) > bytes_max:
                    raise NoAnswerError(f"{url} answers more than {bytes_max} bytes")
    except NO_ANSWER as error:
        raise NoAnswerError(f"{url} does not answer: {str(error) or type(error).__name__}") from error
    return body
