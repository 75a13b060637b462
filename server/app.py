"""The FastAPI application. Each protocol is a router of its own; this file only puts them together."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from importlib.metadata import version

from fastapi import FastAPI
from fastapi.middleware.cors import CORSMiddleware

from traitbasis.simulator import UserSimulator
from traitbasis.users import ServedUser

from . import completions, errors, keys, metrics, openai, operation, page, steer
from .channels import IN_PATH, Directory
from .limits import BodyLimit, Limits
from .metrics import Observer
from .operation import Readiness, Requests
from .state import States, state_key

_TAGS = [
    {"name": "OpenAI", "description": "The simulated user is `assistant`, the agent under test is `user`."},
    {"name": "other harnesses", "description": "What τ-trait, Collinear's SDK and promptfoo send."},
    {"name": "operation", "description": "Probes and metrics."},
]


@dataclass(frozen=True)
class Settings:
    """How an application is operated, whatever it serves.

    api_keys: requests need one of them; none: any token will do. open_metrics: /metrics needs none. cors_origins: of
    pages that may ask from a browser; ``*`` is any. log_text: messages go into the log. state_key: signs the states of
    customers that react; by default one of this machine's own.
    """

    api_keys: tuple[str, ...] = field(default=(), repr=False)
    open_metrics: bool = False
    limits: Limits = field(default_factory=Limits)
    cors_origins: tuple[str, ...] = ()
    log_text: bool = False
    state_key: str = field(default="", repr=False)


def create_app(simulator: UserSimulator, settings: Settings | None = None, users: Sequence[ServedUser] = ()) -> FastAPI:
    """An application that serves `simulator`; the caller closes the simulator when the server has stopped.

    users: to be served beside the default one, ``steered-user``, or in its place. Raises UsersError when two have one
    name or their traits are not the basis's.

    ``app.state`` has what routes use: `limits`, `observer`, and `readiness`.
    """
    settings = settings or Settings()
    app = FastAPI(
        title="TraitBasis",
        version=version("traitbasis"),
        description="Simulated users with steered traits, behind the OpenAI protocol.",
        openapi_tags=_TAGS,
        responses=errors.RESPONSES,
    )
    app.state.limits = settings.limits
    app.state.observer = observer = Observer(simulator.engine, log_text=settings.log_text)
    app.state.readiness = readiness = Readiness(simulator.engine)

    # Each of these stands around those before it.
    errors.install(app)
    app.add_middleware(BodyLimit, most=settings.limits.body_bytes)
    if settings.api_keys:
        open_paths = keys.OPEN_PATHS | ({"/metrics"} if settings.open_metrics else set())
        app.add_middleware(keys.KeyCheck, keys=settings.api_keys, open_paths=open_paths)
    if settings.cors_origins:
        app.add_middleware(
            CORSMiddleware,
            allow_origins=settings.cors_origins,
            allow_methods=("GET", "POST"),
            allow_headers=("*",),
            expose_headers=("X-Request-ID", "Retry-After"),
        )
    app.add_middleware(Requests, observer=observer)

    guarded = keys.SECURITY if settings.api_keys else []
    directory = Directory(simulator, users)
    states = States(settings.state_key or state_key())
    for prefix, more in (("/v1", []), ("/u/{spec}/v1", IN_PATH)):
        for router in (openai.router(simulator, directory, states), completions.router(simulator, directory)):
            app.include_router(router, prefix=prefix, dependencies=[*guarded, *more])
    app.include_router(steer.router(simulator, directory, states), dependencies=guarded)
    app.include_router(metrics.router(observer), dependencies=[] if settings.open_metrics else guarded)
    app.include_router(operation.router(simulator, readiness))
    app.include_router(page.router())
    return app
