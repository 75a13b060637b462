"""The FastAPI application. Each protocol is a router of its own; this file only puts them together."""

from __future__ import annotations

from importlib.metadata import version
from typing import Any

from fastapi import FastAPI

from traitbasis.simulator import UserSimulator

from . import errors, metrics, openai, steer

MODEL_ID = "steered-user"


def create_app(simulator: UserSimulator, model_id: str = MODEL_ID) -> FastAPI:
    """An application that serves `simulator`; the caller closes the simulator when the server has stopped."""
    app = FastAPI(
        title="TraitBasis",
        version=version("traitbasis"),
        description="Simulated users with steered traits, behind the OpenAI protocol.",
    )
    errors.install(app)
    app.include_router(openai.router(simulator, model_id))
    app.include_router(steer.router(simulator))
    app.include_router(metrics.router(simulator.engine))

    @app.get("/health", tags=["operation"])
    async def health() -> dict[str, Any]:
        return {"status": "ok", "model": simulator.lm.name, "traits": list(simulator.basis.traits)}

    return app
