"""Errors in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``.

What a client cannot mend by asking again is a 4xx, since 5xx makes harnesses repeat the request three to seven times.
"""

from __future__ import annotations

import logging
import re
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from pydantic import BaseModel
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from traitbasis.errors import (
    ChatTemplateError,
    EngineBusyError,
    EngineClosedError,
    OverLimitError,
    RequestError,
    TraitBasisError,
    TraitSpecError,
)

from .ascii_json import AsciiJSONResponse
from .schemas import ChatCompletionRequest, CompletionRequest

logger = logging.getLogger("traitbasis.server")


class UnknownModelError(TraitBasisError):
    """The request names a model that is not served here."""


class UnknownTraitError(TraitBasisError):
    """What ``TraitSpecError`` is, for a client that knows it by status 422 and by no other."""


class ErrorDetail(BaseModel):
    message: str
    type: str
    param: str | None
    code: str | None


class ErrorBody(BaseModel):
    """Every error of every route."""

    error: ErrorDetail


_RETRY_AFTER = {"Retry-After": {"description": "seconds to wait", "schema": {"type": "integer", "minimum": 1}}}

# For the OpenAPI document: FastAPI(responses=RESPONSES) says it of every route.
RESPONSES: dict[int | str, dict[str, Any]] = {
    400: {"model": ErrorBody, "description": "Cannot be served as asked; the message says what to change"},
    401: {"model": ErrorBody, "description": "The server has API keys, and none of them was sent"},
    429: {"model": ErrorBody, "description": "The queue is full", "headers": _RETRY_AFTER},
    "4XX": {"model": ErrorBody, "description": "Asking again does not help"},
    "5XX": {"model": ErrorBody, "description": "The server failed, or is about to stop"},
}

PARAMS = frozenset({*ChatCompletionRequest.model_fields, *CompletionRequest.model_fields})
_PARAM = re.compile(r"\w+")


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's clients parse it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def describe(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body for an exception."""
    kind, text = "invalid_request_error", str(error)
    match error:
        case UnknownModelError():
            return 404, error_body(text, kind, "model", "model_not_found")
        case UnknownTraitError():
            return 422, error_body(text, kind, "trait_dict", "invalid_traits")
        case OverLimitError():
            return 400, error_body(text, kind, "traits", "over_limit")
        case TraitSpecError():
            return 400, error_body(text, kind, "traits", "invalid_traits")
        case RequestError():
            named = _PARAM.match(text)  # messages begin with what they are about
            param = named[0] if named and named[0] in PARAMS else None
            return 400, error_body(text, kind, param, error.code)
        case ChatTemplateError():
            return 400, error_body(text, kind, "messages")
        case EngineBusyError():
            return 429, error_body(text, "rate_limit_error", None, "engine_busy")
        case EngineClosedError():
            return 503, error_body("the server is shutting down", "server_error", None, "shutting_down")
    logger.error("request failed", exc_info=error)
    return 500, error_body("the server failed on this request; its log has the reason", "server_error")


def install(app: FastAPI) -> None:
    """Answer every failure of `app` in this shape. ``app.state.observer`` knows how long a full queue takes."""
    app.add_middleware(UnexpectedErrors)

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> AsciiJSONResponse:
        first = error.errors()[0]
        where = [str(part) for part in first["loc"] if part != "body"]
        param = where[0] if where and first["type"] != "json_invalid" else None
        message = f"{'.'.join(where) or 'body'}: {first['msg']}"
        return AsciiJSONResponse(error_body(message, "invalid_request_error", param), status_code=400)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> AsciiJSONResponse:
        message = f"{error.detail}: {request.method} {request.url.path}"
        code = HTTPStatus(error.status_code).name.casefold()
        body = error_body(message, "invalid_request_error", None, code)
        return AsciiJSONResponse(body, status_code=error.status_code, headers=error.headers)

    @app.exception_handler(TraitBasisError)
    async def ours(request: Request, error: TraitBasisError) -> AsciiJSONResponse:
        status, body = describe(error)
        wait = {429: request.app.state.observer.retry_after, 503: lambda: 1}.get(status)
        return AsciiJSONResponse(body, status_code=status, headers={"Retry-After": f"{wait()}"} if wait else None)


class UnexpectedErrors:
    """The innermost middleware. Starlette would answer outside of all the others, without their headers and log."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        started = False

        async def note(message: Message) -> None:
            nonlocal started
            started = True
            await send(message)

        try:
            await self._app(scope, receive, note)
        except ClientDisconnect:
            pass  # nobody is left to be answered
        except Exception as error:
            if started or scope["type"] != "http":
                raise
            status, body = describe(error)
            await AsciiJSONResponse(body, status_code=status)(scope, receive, send)
