"""τ-trait's steering endpoints, so that its harness runs against this server with another URL.

In their messages, too, the simulated user is ``assistant``. ``system_prompt`` and unknown fields are ignored.
"""

from __future__ import annotations

from fastapi import APIRouter, Request

from traitbasis.errors import RequestError
from traitbasis.simulator import UserSimulator

from . import turns
from .schemas import SteerRequest, SteerResponse


def router(simulator: UserSimulator) -> APIRouter:
    """Routes ``/steer_tau`` (package 0.1.1) and ``/steer_bare`` (its repository)."""
    routes = APIRouter(tags=["τ-trait"])

    @routes.post("/steer_tau")
    @routes.post("/steer_bare")
    async def steer(body: SteerRequest, request: Request) -> SteerResponse:
        if not body.messages:
            raise RequestError("messages is empty")
        seed = None if body.seed is None or body.seed < 0 else body.seed  # clients send -1 for "none"
        running = await turns.start(simulator, body.messages, body.trait_dict, seed=seed, **body.sampling)
        (turn,) = await running.turns(request)
        return SteerResponse(response=turn.text)

    return routes
