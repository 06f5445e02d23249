"""``/v1/console``: signing in to the web console: a cookie that carries the user's token."""

from __future__ import annotations

import time
from typing import Final, Literal
from urllib.parse import parse_qs

from fastapi import APIRouter, Request, Response

from app.edge.accepted import AccessControl, Service
from app.edge.answers import JSON_MEDIA_TYPE, json_answer, path_outside
from app.edge.forms.body import body_of, read_body
from app.edge.forms.requests import SIGN_IN
from app.edge.forms.validation import parse
from app.edge.routing import PROBLEM_RESPONSE, OpenRoute, StrictRoute, answered
from app.runtime.answers import Time, shape
from app.runtime.logs import log
from app.runtime.outgoing import NoAnswerError
from app.runtime.principals import EVERYBODY, Principal
from app.runtime.settings.config import Settings
from app.trust.console_sessions import (
    SIGN_IN_COOKIE,
    SIGN_IN_LIFE_S,
    TOKEN_BYTES_MAX,
    CodeFlow,
    ConsoleSession,
    ConsoleSessions,
    cookie_name,
    set_cookie,
    shown_cookie,
)
from ledger.errors import InvalidInputError, LedgerError, NotFoundError, UnauthenticatedError

router = APIRouter(route_class=StrictRoute, tags=["console"], responses=PROBLEM_RESPONSE)
callbacks = APIRouter(route_class=OpenRoute, include_in_schema=False)

CALLBACK: Final = "/v1/console/oidc/callback"
_NOT_KEPT: Final = {"Cache-Control": "no-store"}
_COOKIE: Final = {"Set-Cookie": {"schema": {"type": "string"}, "description": "The session, or its end."}}


ConsoleSessionAnswer = shape(
    "ConsoleSessionAnswer",
    "How people sign in to the console, and who has: by a cookie until ``expires_at``, null where there is none. No\n"
    "``principal`` where nobody is asked, or nobody has signed in. ``trace_url``: where a caller finds a trace, as\n"
    "``console.trace_url`` has it.",
    auth_mode=Literal["none", "tokens", "oidc"],
    oidc_sign_in=bool,
    principal=str | None,
    expires_at=Time | None,
    trace_url=str | None,
)


@router.get("/v1/console/session", responses=answered(ConsoleSessionAnswer))
async def read_console_session(
    request: Request,
    access: Service[AccessControl],
    console_sessions: Service[ConsoleSessions],
    code_flow: Service[CodeFlow | None],
    settings: Service[Settings],
) -> Response:
    """How one signs in here, and until when the caller is, by a cookie of the console."""
    caller = await access.caller_if_known(request.scope)
    session = None if caller in (None, EVERYBODY) else _session_of(request, console_sessions)
    return json_answer(_answer(settings, code_flow, caller, session), headers=_NOT_KEPT)


@router.post(
    "/v1/console/session",
    status_code=201,
    responses=answered(ConsoleSessionAnswer, 201, headers=_COOKIE),
    openapi_extra={"requestBody": body_of(SIGN_IN)},
)
async def sign_in(
    request: Request,
    access: Service[AccessControl],
    console_sessions: Service[ConsoleSessions],
    code_flow: Service[CodeFlow | None],
    settings: Service[Settings],
) -> Response:
    """Sign in with a token: the answer sets a cookie that counts as the token does, for the pages of this service."""
    token = parse(SIGN_IN, await read_body(request, JSON_MEDIA_TYPE, TOKEN_BYTES_MAX + 1024))["token"].encode()
    if settings.auth.mode == "none":
        return json_answer(_answer(settings, code_flow, EVERYBODY, None), 201, _NOT_KEPT)
    caller, session, cookie = await _begin(request, access, console_sessions, token)
    return json_answer(_answer(settings, code_flow, caller, session), 201, {**_NOT_KEPT, "Set-Cookie": cookie})


@router.delete("/v1/console/session", responses=answered(ConsoleSessionAnswer, headers=_COOKIE))
async def sign_out(
    request: Request,
    console_sessions: Service[ConsoleSessions],
    code_flow: Service[CodeFlow | None],
    settings: Service[Settings],
) -> Response:
    """Sign out: the browser forgets the cookie, and this node takes no copy of it any more. The token goes on
    counting."""
    if (session := _session_of(request, console_sessions)) is not None:
        console_sessions.end(session, time.time())
    return json_answer(
        _answer(settings, code_flow, None, None),
        headers={**_NOT_KEPT, "Set-Cookie": set_cookie(request.scope["scheme"], "", 0)},
    )


@router.get("/v1/console/oidc", include_in_schema=False)
async def begin_oidc(request: Request, settings: Service[Settings], code_flow: Service[CodeFlow | None]) -> Response:
    """The way to the issuer, who asks who it is."""
    if code_flow is None:
        raise NotFoundError("people sign in with tokens here: auth.oidc.client_id is not set")
    try:
        url, cookie = await code_flow.begin(_redirect_uri(request, settings))
    except NoAnswerError as error:
        log.warning("console_sign_in_failed", error=str(error))
        return _to_console(request, settings, "unanswered")
    return _to(url, _sign_in_cookie(request, cookie, SIGN_IN_LIFE_S))


@callbacks.get(CALLBACK)
async def finish_oidc(
    request: Request,
    settings: Service[Settings],
    access: Service[AccessControl],
    console_sessions: Service[ConsoleSessions],
    code_flow: Service[CodeFlow | None],
) -> Response:
    """The way back from the issuer: with a session, or with why there is none."""
    asked = parse_qs(request.scope["query_string"].decode("latin-1"))
    if code_flow is None:
        raise NotFoundError("people sign in with tokens here: auth.oidc.client_id is not set")
    state, code, refused = (asked.get(name, [""])[0] for name in ("state", "code", "error"))
    forgotten = _sign_in_cookie(request, "", 0)
    if refused or not code:
        log.warning("console_sign_in_refused", error=refused[:100])
        return _to_console(request, settings, "denied", forgotten)
    try:
        cookie = request.cookies.get(cookie_name(request.scope["scheme"], SIGN_IN_COOKIE), "")
        tokens = await code_flow.finish(cookie, state, code, _redirect_uri(request, settings))
        for number, token in enumerate(tokens, 1):
            try:
                *_, cookie = await _begin(request, access, console_sessions, token)
                return _to_console(request, settings, "", forgotten, cookie)
            except UnauthenticatedError:
                if number == len(tokens):
                    raise
        raise NoAnswerError("the issuer gives no token")
    except (NoAnswerError, LedgerError) as error:
        log.warning("console_sign_in_failed", error=str(error))
        access.record_refusal(request.scope, error)
        why = "refused" if isinstance(error, UnauthenticatedError) else "unanswered"
        return _to_console(request, settings, why, forgotten)


def _session_of(request: Request, console_sessions: ConsoleSessions) -> ConsoleSession | None:
    """The valid session in the request; None if there is none."""
    try:
        cookie = shown_cookie(request.scope["headers"], request.scope["scheme"])
        return None if cookie is None else console_sessions.open(cookie, time.time())
    except UnauthenticatedError:
        return None


async def _begin(
    request: Request, access: AccessControl, console_sessions: ConsoleSessions, token: bytes
) -> tuple[Principal, ConsoleSession, str]:
    """The user whom ``token`` names, a new session, and its cookie.

    Raises:
        UnauthenticatedError: the token is not valid.
        NotReadyError: the issuer's keys cannot be fetched now.
        InvalidInputError: the token is too long for a cookie.
    """
    caller = await access.callers.caller({"headers": [(b"authorization", b"Bearer " + token)]})
    now_s = time.time()
    session, value = console_sessions.begin(token, caller.expires_at, now_s)
    cookie = set_cookie(request.scope["scheme"], value, max(0, session.expires_s - int(now_s)))
    return caller, session, cookie


def _answer(
    settings: Settings, code_flow: CodeFlow | None, caller: Principal | None, session: ConsoleSession | None
) -> dict[str, object]:
    return {
        "auth_mode": settings.auth.mode,
        "oidc_sign_in": code_flow is not None,
        "principal": None if caller is None else caller.id,
        "expires_at": None if session is None else session.expires_at,
        "trace_url": None if caller is None else settings.console.trace_url,
    }


def _redirect_uri(request: Request, settings: Settings) -> str:
    """The URL to which the issuer redirects the browser.

    Raises:
        InvalidInputError: the request has no Host, as HTTP/1.0 allows.
    """
    host = request.headers.get("host")
    if host is None:
        raise InvalidInputError("send a Host header: the issuer must be told where to send the browser back to")
    return f"{request.scope['scheme']}://{host}{path_outside(request.scope, settings.http.root_path, CALLBACK)}"


def _sign_in_cookie(request: Request, value: str, seconds: int) -> str:
    """SameSite=Lax, as the browser returns from another site with it."""
    return set_cookie(request.scope["scheme"], value, seconds, SIGN_IN_COOKIE, "Lax")


def _to_console(request: Request, settings: Settings, why: str, *cookies: str) -> Response:
    page = f"/console#/{f'sign-in/{why}' if why else 'signed-in'}"
    return _to(path_outside(request.scope, settings.http.root_path, page), *cookies)


def _to(url: str, *cookies: str) -> Response:
    response = Response(status_code=303, headers={**_NOT_KEPT, "Location": url, "Referrer-Policy": "no-referrer"})
    for cookie in cookies:
        response.headers.append("Set-Cookie", cookie)
    return response
