"""What a read is asked to promise: the parameters that every read of jobs takes."""

from __future__ import annotations

from typing import Annotated

from fastapi import Depends, Header, Query, Request
from pydantic import BeforeValidator

from app.http.fields import WholeNumber, in_lower_case
from app.http.routing import SESSION_PARAMETER
from app.http.writing import session_tokens
from app.parts import PartsDep
from app.read.consistency import Promise, ReadLevel
from ledger.errors import InvalidInputError

STALENESS_MS_MAX = 86_400_000


def promise_of(
    request: Request,
    parts: PartsDep,
    consistency: Annotated[
        ReadLevel, BeforeValidator(in_lower_case), Query(description="How fresh the answer must be.")
    ] = ReadLevel.SESSION,
    max_staleness_ms: Annotated[
        WholeNumber | None, Query(ge=0, le=STALENESS_MS_MAX, description="Needed with bounded_staleness.")
    ] = None,
    tally_session: Annotated[
        str | None,
        Header(description=SESSION_PARAMETER["description"], json_schema_extra=SESSION_PARAMETER["schema"]),
    ] = None,
) -> Promise:
    """The promise that ``request`` asks for; the clock learns of the times of its session.

    Raises:
        InvalidInputError: a token is malformed, or a bound is missing.
        ClockSkewError: the time of a token lies too far ahead.
    """
    if consistency is ReadLevel.BOUNDED_STALENESS and max_staleness_ms is None:
        raise InvalidInputError("max_staleness_ms: needed with bounded_staleness", ("max_staleness_ms",))
    tokens = session_tokens(request)
    parts.consistency.receive(tokens)
    return Promise(consistency, tokens, max_staleness_ms or 0)


PromiseDep = Annotated[Promise, Depends(promise_of)]
