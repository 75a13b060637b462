"""OpenAI's chat completions and model list.

A model id is ``steered-user`` or ``steered-user@<trait spec>``; traits in the body win over those in the id.
"""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import AsyncIterator, Sequence
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

MAX_CHOICES = 16
MAX_TOP_LOGPROBS = 20


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

    def token(token_id: int, logprob: float) -> dict[str, Any]:
        text = simulator.lm.tokenizer.decode([token_id])
        whole = text and "\ufffd" not in text  # else the token is a part of a character, or none at all
        return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}

    def logprobs(turn: UserTurn) -> dict[str, Any] | None:
        if turn.sampling.logprobs is None:
            return None
        content = [
            {**token(token_id, found.logprob), "top_logprobs": [token(*likely) for likely in found.top]}
            for token_id, found in zip(turn.token_ids, turn.logprobs, strict=True)
        ]
        return {"content": content, "refusal": None}

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
        n = 1 if body.n is None else body.n
        if not 1 <= n <= MAX_CHOICES:
            raise RequestError(f"n is {n}; it must be between 1 and {MAX_CHOICES}")
        if n > (room := simulator.engine.stats().max_queue):  # would be refused as busy for ever
            raise RequestError(f"n is {n}; this server's queue (--max-queue) holds {room}")
        if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_TOP_LOGPROBS:
            raise RequestError(f"top_logprobs is {body.top_logprobs}; it must be between 0 and {MAX_TOP_LOGPROBS}")
        if body.response_format and body.response_format.type != "text":
            raise RequestError(f"response_format {body.response_format.type!r} is not supported; user turns are text")
        traits = _traits_of_id(body.model, model_id)
        running = await turns.start(
            simulator,
            body.messages,
            traits if body.body_traits is None else body.body_traits,
            n=n,
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
        found = await running.turns(request)
        return JSONResponse(
            {
                **head,
                "object": "chat.completion",
                "choices": [
                    {
                        "index": index,
                        "message": {"role": "assistant", "content": turn.text, "refusal": None},
                        "logprobs": logprobs(turn),
                        "finish_reason": _finish(turn),
                    }
                    for index, turn in enumerate(found)
                ],
                "usage": _usage(found),
                # Of the first choice; the others differ in what was drawn, so theirs stand beside it.
                "traitbasis": metadata(found[0]) | ({"choices": [metadata(t) for t in found]} if n > 1 else {}),
            }
        )

    async def stream(head: dict[str, Any], running: turns.RunningTurns, include_usage: bool) -> AsyncIterator[str]:
        def chunk(index: int, delta: dict[str, Any], turn: UserTurn | None = None) -> str:
            choice = {
                "index": index,
                "delta": delta,
                "logprobs": turn and logprobs(turn),
                "finish_reason": turn and _finish(turn),
            }
            more = {"traitbasis": metadata(turn)} if turn else {}
            return _event({**head, "object": "chat.completion.chunk", "choices": [choice], **more})

        done: list[UserTurn] = []
        try:
            for index in range(running.count):
                yield chunk(index, {"role": "assistant", "content": ""})
            async for index, item in running.items():
                if isinstance(item, str):
                    yield chunk(index, {"content": item})
                else:
                    yield chunk(index, {}, item)
                    done.append(item)
            if include_usage:
                yield _event({**head, "object": "chat.completion.chunk", "choices": [], "usage": _usage(done)})
        except Exception as error:  # the status line is out, so the error goes into the stream
            yield _event(describe(error)[1])
        finally:
            running.cancel()
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


def _usage(choices: Sequence[UserTurn]) -> dict[str, int]:
    prompt, completion = choices[0].prompt_tokens, sum(turn.completion_tokens for turn in choices)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def _event(data: dict[str, Any]) -> str:
    return f"data: {json.dumps(data)}\n\n"
