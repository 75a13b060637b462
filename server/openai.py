"""OpenAI's chat completions and model list. Who speaks, and with which traits: ``channels.py``."""

from __future__ import annotations

import time
from collections.abc import AsyncIterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from traitbasis.errors import RequestError
from traitbasis.simulator import UserSimulator
from traitbasis.spec import format_traits
from traitbasis.tools import tools_from_functions, wire_call
from traitbasis.tries import PreparedTurn, UserTurn

from . import turns
from .ascii_json import AsciiJSONResponse
from .channels import Directory
from .errors import describe
from .replies import MAX_TOP_LOGPROBS, STREAMS, Replies, event, finish_reason, share_of_limit, usage
from .schemas import ChatCompletionRequest
from .state import Felt, States


def router(simulator: UserSimulator, directory: Directory, states: States) -> APIRouter:
    """Routes ``/chat/completions`` and ``/models``, to be put under ``/v1``."""
    routes = APIRouter(tags=["OpenAI"])
    replies = Replies(simulator)
    started = int(time.time())

    def model(name: str) -> dict[str, Any]:
        user, spec, _ = directory.find(name)
        intensities = simulator.basis.parse(user.traits if spec is None else spec)
        sampling = asdict(replace(simulator.sampling, **user.sampling))
        return {
            "id": name,
            "object": "model",
            "created": started,
            "owned_by": "traitbasis",
            "traitbasis": {
                "user": user.name,
                "traits": intensities,
                "spec": format_traits(intensities),
                "dose": round(simulator.basis.dose(intensities), 4),
                "share_of_limit": share_of_limit(simulator.basis.known_share(intensities)),
                "force": user.force,
                "persona": user.persona,
                "sampling": sampling,
                "guards": [guard.name for guard in simulator.guards_of(user)],
                "stop_tokens": user.stop_tokens,
                "context": user.context,
                "reactive": user.reactive.record if user.reactive else None,
                "max_context": simulator.engine.stats().max_context,
            },
        }

    @routes.get("/models")
    async def models() -> dict[str, Any]:
        """The users that are served, and examples of traits in a model id."""
        return {"object": "list", "data": [model(name) for name in directory.ids]}

    @routes.get("/models/{model_id}")
    async def one_model(model_id: str) -> dict[str, Any]:
        """What a model id means: user, traits, dose, and the sampling a request gets that says nothing of it."""
        return model(model_id)

    def logprobs(turn: UserTurn) -> dict[str, Any] | None:
        if turn.sampling.logprobs is None:
            return None

        def token(token_id: int, logprob: float) -> dict[str, Any]:
            text = replies.text(token_id)
            whole = text and "\ufffd" not in text  # else the token is a part of a character, or none at all
            return {"token": text, "logprob": logprob, "bytes": list(text.encode()) if whole else None}

        content = [
            {**token(token_id, found.logprob), "top_logprobs": [token(*likely) for likely in found.top]}
            for token_id, found in replies.tokens(turn)
        ]
        return {"content": content, "refusal": None}

    def message(turn: UserTurn) -> dict[str, Any]:
        said = {"role": "assistant", "content": turn.text, "refusal": None}
        return said | {"content": None, "tool_calls": [wire_call(call) for call in turn.calls]} if turn.calls else said

    def metadata(found: Sequence[UserTurn], felt: Felt) -> dict[str, Any]:
        return replies.metadata(found) | states.told(found[0].reaction, felt)

    @routes.post("/chat/completions", response_model=None, responses=STREAMS)
    async def chat_completions(body: ChatCompletionRequest, request: Request) -> Response:
        """The simulated user's next message, or its tool call."""
        state = request.app.state
        state.observer.asked(body.model, body.messages)
        if not body.messages:
            raise RequestError("messages is empty")
        state.limits.check_messages(body.messages)
        n = replies.check_choices(body.n)
        if body.top_logprobs is not None and not 0 <= body.top_logprobs <= MAX_TOP_LOGPROBS:
            raise RequestError(f"top_logprobs is {body.top_logprobs}; it must be between 0 and {MAX_TOP_LOGPROBS}")
        asked = directory.asked(body, request, body.model)
        tools, tool_choice = body.tools, body.tool_choice
        if tools is None and body.functions is not None:
            tools, tool_choice = tools_from_functions(body.functions, body.function_call)
        felt = states.asked(body.felt_of_body(), asked.user, request.headers.get("authorization", ""))
        options = {**replies.options(state.limits, body.sampling, asked.user), **felt.options}

        def prepare() -> list[PreparedTurn]:
            return [
                simulator.prepare(
                    body.messages,
                    asked.traits,
                    user=asked.user,
                    seed=body.seed,
                    trial=asked.trial,
                    choice=choice,
                    positions=body.positions,
                    force=asked.force,
                    tools=tools,
                    tool_choice=tool_choice,
                    response_format=body.response_format,
                    **options,
                )
                for choice in range(n)
            ]

        running = await turns.start(simulator, state.observer, prepare)
        head = replies.head("chatcmpl", body.model)
        if body.stream:
            return StreamingResponse(stream(head, running, felt, body.include_usage), media_type="text/event-stream")
        found = await running.turns(request)
        choices = [
            {"index": i, "message": message(turn), "logprobs": logprobs(turn), "finish_reason": finish_reason(turn)}
            for i, turn in enumerate(found)
        ]
        more = {"choices": choices, "usage": usage(found, n), "traitbasis": metadata(found, felt)}
        return AsciiJSONResponse({**head, "object": "chat.completion", **more})

    async def stream(
        head: dict[str, Any], running: turns.RunningTurns, felt: Felt, include_usage: bool
    ) -> AsyncIterator[str]:
        begun: set[int] = set()
        head = {**head, "object": "chat.completion.chunk"}

        def chunk(index: int, delta: dict[str, Any], turn: UserTurn | None = None) -> str:
            first = {} if index in begun else {"role": "assistant"}
            begun.add(index)
            choice = {
                "index": index,
                "delta": {**first, **delta},
                "logprobs": turn and logprobs(turn),
                "finish_reason": turn and finish_reason(turn),
            }
            more = {"traitbasis": metadata([turn], felt)} if turn else {}
            return event({**head, "choices": [choice], **more})

        done: list[UserTurn] = []
        try:
            async for index, item in running.items():
                if isinstance(item, str):
                    yield chunk(index, {"content": item})
                    continue
                if item.calls:
                    calls = [{"index": i, **wire_call(call)} for i, call in enumerate(item.calls)]
                    yield chunk(index, {"content": None, "tool_calls": calls})
                yield chunk(index, {}, item)
                done.append(item)
            if include_usage:
                yield event({**head, "choices": [], "usage": usage(done, running.count)})
        except Exception as error:  # the status line is out, so the error goes into the stream
            yield event(describe(error)[1])
        finally:
            running.cancel()
        yield "data: [DONE]\n\n"

    return routes
