"""How much one request may ask for. Refusals are 400: clients take 413 for a failure that may pass."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from fastapi.responses import JSONResponse
from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from traitbasis.errors import RequestError

from .errors import error_body

# A client that still writes when the connection is closed loses the answer, so this much is read and thrown away first.
_DRAINED_BYTES = 16 * 2**20


@dataclass(frozen=True)
class Limits:
    """body_bytes: of a request. messages: of a conversation. output_tokens: of a reply."""

    body_bytes: int = 2 * 2**20
    messages: int = 2048
    output_tokens: int = 4096

    def check_messages(self, messages: Sequence[Any]) -> None:
        """Raises RequestError for a conversation of too many messages."""
        if len(messages) > self.messages:
            raise RequestError(
                f"messages has {len(messages)} entries; this server takes {self.messages} (--max-messages)",
                code="too_many_messages",
            )

    def max_tokens(self, asked: int | None, default: int) -> int:
        """What a reply gets of the tokens that were asked for. More is cut and not refused: a user turn hardly ever
        needs them, and a refusal would cost the episode. A reply that did need them ends with "length"."""
        return min(default if asked is None else asked, self.output_tokens)


class BodyLimit:
    """Middleware that reads the whole body first, and refuses one of more than `most` bytes, whatever was declared.

    It lets one body through at each turn of the event loop: parsing a crowd of them in one turn would keep whoever
    asks for ``/health`` waiting until the last is done.
    """

    def __init__(self, app: ASGIApp, most: int) -> None:
        self._app = app
        self._most = most
        self._gate = asyncio.Lock()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        headers = Headers(scope=scope)
        length = headers.get("content-length", "0")
        declared = int(length) if length.isdecimal() else 0
        asks_first = headers.get("expect", "").casefold() == "100-continue"  # and sends nothing until it is read
        most = self._most + (0 if asks_first else _DRAINED_BYTES)
        body, size, more = bytearray(), 0, True
        while more and max(size, declared) <= most:
            message = await receive()
            if message["type"] == "http.disconnect":
                return
            part = message.get("body", b"")
            size += len(part)
            if size <= self._most:
                body += part
            more = message.get("more_body", False)
        if (size := max(size, declared)) > self._most:
            text = f"the request body has {size} bytes; this server takes {self._most} (--max-body-kb)"
            refusal = error_body(text, "invalid_request_error", None, "request_too_large")
            await JSONResponse(refusal, 400, headers={"Connection": "close"} if more else None)(scope, receive, send)
            return
        whole: Message | None = {"type": "http.request", "body": bytes(body), "more_body": False}

        async def again() -> Message:
            nonlocal whole
            message, whole = whole, None
            return message or await receive()

        if body:
            await self._gate.acquire()
            asyncio.get_running_loop().call_soon(self._gate.release)
        await self._app(scope, again, send)
