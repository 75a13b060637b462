"""API keys: ``Authorization: Bearer KEY`` or ``API-Key: KEY``. Without any configured, every token is fine.

Keys are kept and compared as hashes, each with all of them, so that time tells nothing; they are never logged.
"""

from __future__ import annotations

import hmac
import re
from collections.abc import Collection, Mapping, Sequence
from hashlib import sha256
from pathlib import Path

from fastapi import Security
from fastapi.responses import JSONResponse
from fastapi.security import APIKeyHeader, HTTPBearer
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Receive, Scope, Send

from traitbasis.errors import TraitBasisError

from .errors import error_body

VARIABLE = "TRAITBASIS_API_KEYS"
# Nobody's data: probes, the page for a person (what it asks for needs a key), and the description of this interface.
OPEN_PATHS = frozenset({"/", "/health", "/ready", "/docs", "/docs/oauth2-redirect", "/redoc", "/openapi.json"})
# For the OpenAPI document; refusing is the middleware's, which no new route can forget.
SECURITY = [
    Security(HTTPBearer(scheme_name="Bearer", description="One of the server's API keys", auto_error=False)),
    Security(APIKeyHeader(name="API-Key", scheme_name="API-Key", description="The same", auto_error=False)),
]


def read_keys(file: Path | None, environment: Mapping[str, str]) -> tuple[str, ...]:
    """Keys of a file (one a line; blank lines and ``#`` comments are skipped) and of TRAITBASIS_API_KEYS (with commas).

    Neither given: none. Raises TraitBasisError for a file that cannot be read, for a source without a key (an operator
    who meant to set one would serve everybody), and for what no header can carry.
    """
    found: list[str] = []
    if file is not None:
        try:
            lines = file.read_text(encoding="utf-8").splitlines()
        except (OSError, UnicodeDecodeError) as error:
            reason = error.strerror if isinstance(error, OSError) else "it is no UTF-8 text"
            raise TraitBasisError(
                f"cannot read --api-keys {file}: {reason}; it takes a file with a key a line"
            ) from error
        numbered = [(f"line {number}", line.strip()) for number, line in enumerate(lines, 1)]
        found += _checked([(where, key) for where, key in numbered if not key.startswith("#")], f"--api-keys {file}")
    if VARIABLE in environment:
        parts = environment[VARIABLE].split(",")
        found += _checked([(f"key {number}", part.strip()) for number, part in enumerate(parts, 1)], VARIABLE)
    return tuple(found)


def _checked(candidates: Sequence[tuple[str, str]], source: str) -> list[str]:
    keys = [(where, key) for where, key in candidates if key]
    if not keys:
        raise TraitBasisError(f"{source} holds no key; add one, or leave it out to serve without keys")
    for where, key in keys:
        if not re.fullmatch(r"[!-~]+", key):
            raise TraitBasisError(f"{where} of {source} is no key: visible ASCII characters, no spaces")
    return [key for _, key in keys]


class KeyCheck:
    """Middleware that answers 401 unless a request brings one of `keys` or asks for one of `open_paths`."""

    def __init__(self, app: ASGIApp, keys: Collection[str], open_paths: Collection[str] = OPEN_PATHS) -> None:
        self._app = app
        self._digests = [sha256(key.encode()).digest() for key in keys]
        self._open = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["path"].removeprefix(scope.get("root_path", "")) in self._open:
            await self._app(scope, receive, send)
            return
        sent = _keys_of(Headers(scope=scope))
        if any(self._knows(key) for key in sent):
            await self._app(scope, receive, send)
            return
        problem = "the API key that was sent is not one of this server's" if sent else "this server needs an API key"
        how = "send it as 'Authorization: Bearer KEY' or 'API-Key: KEY'"
        body = error_body(f"{problem}; {how}", "invalid_request_error", None, "invalid_api_key")
        await JSONResponse(body, 401, headers={"WWW-Authenticate": "Bearer"})(scope, receive, send)

    def _knows(self, key: str) -> bool:
        digest = sha256(key.encode()).digest()
        return sum(hmac.compare_digest(digest, known) for known in self._digests) > 0  # not `any`, which stops early


def _keys_of(headers: Headers) -> list[str]:
    """Harnesses send a made-up bearer token beside the header that counts, so each is tried."""
    pairs = [value.partition(" ") for value in headers.getlist("authorization")]
    bearers = [key.strip() for scheme, _, key in pairs if scheme.casefold() == "bearer"]
    return [key for key in (*bearers, *headers.getlist("api-key")) if key]
