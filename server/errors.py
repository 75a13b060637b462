"""Errors in OpenAI's shape: ``{"error": {"message", "type", "param", "code"}}``.

What a client cannot mend by asking again is a 4xx, since 5xx makes harnesses repeat the request three to seven times.
"""

from __future__ import annotations

import logging
from http import HTTPStatus
from typing import Any

from fastapi import FastAPI, Request
from fastapi.exceptions import RequestValidationError
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from traitbasis.errors import (
    ChatTemplateError,
    EngineBusyError,
    RequestError,
    TraitBasisError,
    TraitSpecError,
)

logger = logging.getLogger("traitbasis.server")


class UnknownModelError(TraitBasisError):
    """The request names a model that is not served here."""


def error_body(message: str, kind: str, param: str | None = None, code: str | None = None) -> dict[str, Any]:
    """An error as OpenAI's clients parse it."""
    return {"error": {"message": message, "type": kind, "param": param, "code": code}}


def describe(error: Exception) -> tuple[int, dict[str, Any]]:
    """Status and body for an exception."""
    kind, text = "invalid_request_error", str(error)
    match error:
        case UnknownModelError():
            return 404, error_body(text, kind, "model", "model_not_found")
        case TraitSpecError():
            return 400, error_body(text, kind, "traits", "invalid_traits")
        case RequestError():
            return 400, error_body(text, kind, None, error.code)
        case ChatTemplateError():
            return 400, error_body(text, kind, "messages")
        case EngineBusyError():
            return 429, error_body(text, "rate_limit_error", None, "engine_busy")
    logger.error("request failed", exc_info=error)
    return 500, error_body("the server failed on this request; its log has the reason", "server_error")


def install(app: FastAPI) -> None:
    """Answer every failure of `app` in this shape."""

    @app.exception_handler(RequestValidationError)
    async def invalid(request: Request, error: RequestValidationError) -> JSONResponse:
        first = error.errors()[0]
        where = [str(part) for part in first["loc"] if part != "body"]
        param = where[0] if where and first["type"] != "json_invalid" else None
        message = f"{'.'.join(where) or 'body'}: {first['msg']}"
        return JSONResponse(error_body(message, "invalid_request_error", param), status_code=400)

    @app.exception_handler(HTTPException)
    async def http(request: Request, error: HTTPException) -> JSONResponse:
        message = f"{error.detail}: {request.method} {request.url.path}"
        code = HTTPStatus(error.status_code).name.casefold()
        body = error_body(message, "invalid_request_error", None, code)
        return JSONResponse(body, status_code=error.status_code, headers=error.headers)

    @app.exception_handler(TraitBasisError)
    async def ours(request: Request, error: TraitBasisError) -> JSONResponse:
        status, body = describe(error)
        return JSONResponse(body, status_code=status, headers={"Retry-After": "1"} if status == 429 else None)

    @app.exception_handler(Exception)
    async def unexpected(request: Request, error: Exception) -> JSONResponse:
        status, body = describe(error)
        return JSONResponse(body, status_code=status)
