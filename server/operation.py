"""What an operator needs around the routes: request ids and the log, probes, and a stop that loses no turn."""

from __future__ import annotations

import asyncio
import gc
import re
import signal
import time
import uuid
from collections.abc import Callable
from socket import socket
from types import FrameType
from typing import Any

import uvicorn
from fastapi import APIRouter, FastAPI
from fastapi.responses import JSONResponse
from starlette.datastructures import Headers, MutableHeaders
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from traitbasis.engines.base import Engine
from traitbasis.simulator import UserSimulator

from .errors import error_body
from .logs import RequestRecord, current
from .metrics import Observer

# Asked for every few seconds by machines; only a failure says something.
_PROBES = frozenset({"/health", "/ready", "/metrics"})
# Longer than clients keep idle connections: one closed just as a client writes to it costs the request.
_KEEP_ALIVE_SECONDS = 75
_CUT_OFF_SECONDS = 5  # for clients that do not read the end of what they asked for


class Requests:
    """The outermost middleware: an id for every request and response, its line in the log, its place in the metrics."""

    def __init__(self, app: ASGIApp, observer: Observer) -> None:
        self._app = app
        self._observer = observer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        record = RequestRecord(_request_id(Headers(scope=scope)), scope["method"], scope["path"])
        began, ended = time.monotonic(), False

        async def hear() -> Message:
            message = await receive()
            if message["type"] == "http.disconnect" and not ended:
                record.disconnected = True
            return message

        async def tell(message: Message) -> None:
            nonlocal ended
            if message["type"] == "http.response.start":
                record.status = message["status"]
                MutableHeaders(scope=message)["X-Request-ID"] = record.request_id
            elif not message.get("more_body", False):
                ended = True
            await send(message)

        token = current.set(record)
        try:
            await self._app(scope, hear, tell)
        finally:
            record.seconds = time.monotonic() - began
            if scope["path"] not in _PROBES or record.status != 200:
                self._observer.answered(record, _route(scope))
            current.reset(token)


def _route(scope: Scope) -> str:
    """The path's template. Not from the route itself, which in FastAPI may lack the prefix it was included under."""
    if "route" not in scope:
        return "unmatched"
    path: str = scope["path"]
    for name, value in scope["path_params"].items():
        path = path.replace(f"/{value}", f"/{{{name}}}", 1)
    return path


def _request_id(headers: Headers) -> str:
    sent = headers.get("x-request-id", "")
    return sent if re.fullmatch(r"[A-Za-z0-9._:/+=@-]{1,128}", sent) else uuid.uuid4().hex


class Readiness:
    """Whether new work can be taken. stopping: set once the server was told to stop."""

    def __init__(self, engine: Engine) -> None:
        self._engine = engine
        self.stopping = False

    def problem(self) -> str | None:
        """Why not, if not."""
        if self.stopping:
            return "the server is shutting down"
        return "the engine has stopped" if self._engine.stats().closed else None


def router(simulator: UserSimulator, readiness: Readiness) -> APIRouter:
    """``/health``, for whoever restarts a dead process, and ``/ready``, for whoever sends it work."""
    routes = APIRouter(tags=["operation"])
    alive = {"status": "ok", "model": simulator.lm.name, "traits": list(simulator.basis.traits)}

    @routes.get("/health")
    @routes.head("/health", include_in_schema=False)
    async def health() -> dict[str, Any]:
        """Whether the process lives; says nothing about the engine."""
        return alive

    @routes.get("/ready")
    @routes.head("/ready", include_in_schema=False)
    async def ready() -> JSONResponse:
        """Whether new work can be taken; 503 says why not."""
        if problem := readiness.problem():
            body = error_body(f"not ready: {problem}", "server_error", None, "not_ready")
            return JSONResponse(body, 503, headers={"Retry-After": "1"})
        return JSONResponse({"status": "ready"})

    return routes


class Server(uvicorn.Server):
    """Serves until SIGINT or SIGTERM; then takes no more, lets running turns finish, and returns.

    shutdown_seconds: how long they may take. Then `close_engine` ends them, each with an error that its client gets.
    A second SIGINT does not wait.
    """

    def __init__(
        self, app: FastAPI, close_engine: Callable[[], None], *, host: str, port: int, shutdown_seconds: int
    ) -> None:
        super().__init__(
            uvicorn.Config(
                app,
                host=host,
                port=port,
                log_config=None,
                access_log=False,
                lifespan="off",
                timeout_keep_alive=_KEEP_ALIVE_SECONDS,
                timeout_graceful_shutdown=shutdown_seconds + _CUT_OFF_SECONDS,
            )
        )
        self._readiness: Readiness = app.state.readiness
        self._close_engine = close_engine
        self._seconds = shutdown_seconds

    def handle_exit(self, sig: int, frame: FrameType | None) -> None:
        """Not uvicorn's, which raises the signal again in the end: whoever waits for exit status 0 gets another."""
        self._readiness.stopping = True
        self.force_exit = self.should_exit and sig == signal.SIGINT
        self.should_exit = True

    async def startup(self, sockets: list[socket] | None = None) -> None:
        """Not before what was loaded is out of the garbage collector's sight: a full collection would look at a million
        objects that stay, and nothing answers meanwhile."""
        gc.collect()
        gc.freeze()
        await super().startup(sockets)

    async def shutdown(self, sockets: list[socket] | None = None) -> None:
        loop = asyncio.get_running_loop()
        timer = loop.call_later(self._seconds, loop.run_in_executor, None, self._close_engine)
        try:
            await super().shutdown(sockets)
        finally:
            timer.cancel()
