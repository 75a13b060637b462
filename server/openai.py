"""OpenAI's chat completions and model list.

A model id is ``steered-user`` or ``steered-user@<trait spec>``; traits in the body win over those in the id.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator
from dataclasses import asdict
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from traitbasis.errors import RequestError
from traitbasis.simulator import UserSimulator, UserTurn
from traitbasis.spec import format_traits

from . import turns
from .errors import UnknownModelError, describe
from .schemas import ChatCompletionRequest


def router(simulator: UserSimulator, model_id: str) -> APIRouter:
    """Routes under /v1 that serve `simulator` as the model `model_id`."""
    routes = APIRouter(prefix="/v1", tags=["OpenAI"])
    provenance = simulator.provenance
    fingerprint = f"tb-{provenance['basis']}"
    started = int(time.time())

    def metadata(turn: UserTurn) -> dict[str, Any]:
        return {
            "traits": turn.intensities,
            "spec": format_traits(turn.intensities),
            "dose": round(turn.dose, 4),
            "seed": turn.seed,
            "sampling": asdict(turn.sampling),
            "tries": turn.tries,
            "rejected": turn.rejected,
            "failed_guard": turn.failed_guard,
            "positions": turn.positions,
            **provenance,
        }

    @routes.get("/models")
    async def models() -> dict[str, Any]:
        ids = [model_id, *(f"{model_id}@{trait}-medium" for trait in simulator.basis.traits)]
        return {
            "object": "list",
            "data": [{"id": i, "object": "model", "created": started, "owned_by": "traitbasis"} for i in ids],
        }

    @routes.post("/chat/completions", response_model=None)
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        if not body.messages:
            raise RequestError("messages is empty")
        if body.n not in (None, 1):
            raise RequestError(f"n is {body.n}; one choice a request is supported")
        if body.response_format and body.response_format.type != "text":
            raise RequestError(f"response_format {body.response_format.type!r} is not supported; user turns are text")
        traits = _traits_of_id(body.model, model_id)
        running = await turns.start(
            simulator,
            body.messages,
            traits if body.body_traits is None else body.body_traits,
            seed=body.seed,
            trial=body.trial,
            **body.sampling,
        )
        head = {
            "id": f"chatcmpl-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": body.model,
            "system_fingerprint": fingerprint,
        }
        if body.stream:
            include_usage = bool(body.stream_options and body.stream_options.include_usage)
            return StreamingResponse(stream(head, running, include_usage), media_type="text/event-stream")
        turn = await running.turn(request)
        message = {"role": "assistant", "content": turn.text, "refusal": None}
        choice = {"index": 0, "message": message, "logprobs": None, "finish_reason": _finish(turn)}
        return JSONResponse(
            {
                **head,
                "object": "chat.completion",
                "choices": [choice],
                "usage": _usage(turn),
                "traitbasis": metadata(turn),
            }
        )

    async def stream(head: dict[str, Any], running: turns.RunningTurn, include_usage: bool) -> AsyncIterator[str]:
        def chunk(delta: dict[str, Any] | None, finish: str | None = None, **more: Any) -> str:
            choices = [] if delta is None else [{"index": 0, "delta": delta, "logprobs": None, "finish_reason": finish}]
            return _event({**head, "object": "chat.completion.chunk", "choices": choices, **more})

        yield chunk({"role": "assistant", "content": ""})
        try:
            async for item in running.items():
                if isinstance(item, str):
                    yield chunk({"content": item})
                else:
                    yield chunk({}, _finish(item), traitbasis=metadata(item))
                    if include_usage:
                        yield chunk(None, usage=_usage(item))
        except Exception as error:  # the status line is out, so the error goes into the stream
            yield _event(describe(error)[1])
        yield "data: [DONE]\n\n"

    return routes


def _traits_of_id(requested: str, model_id: str) -> str:
    name, _, spec = requested.partition("@")
    if name != model_id:
        raise UnknownModelError(
            f"model {requested!r} is not served here; use {model_id!r} or {model_id}@<traits>, "
            f"such as {model_id}@impatience-high+skeptical-0.5"
        )
    return spec


def _finish(turn: UserTurn) -> str:
    return "length" if turn.finish == "length" else "stop"


def _usage(turn: UserTurn) -> dict[str, int]:
    return {
        "prompt_tokens": turn.prompt_tokens,
        "completion_tokens": turn.completion_tokens,
        "total_tokens": turn.prompt_tokens + turn.completion_tokens,
    }


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"
