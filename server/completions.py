"""OpenAI's text completions, which evaluation harnesses ask for log-probabilities with.

A prompt is gone on with as it stands: no chat template, no guards, and no traits unless a channel names some.
"""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from dataclasses import replace
from typing import Any

from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse

from traitbasis.engines.base import TokenLogprob
from traitbasis.errors import RequestError
from traitbasis.simulator import UserSimulator
from traitbasis.tries import PreparedTurn, UserTurn

from . import turns
from .ascii_json import AsciiJSONResponse
from .channels import Directory
from .errors import describe
from .replies import MAX_TOP_LOGPROBS, STREAMS, Replies, event, finish_reason, usage
from .schemas import CompletionRequest

MAX_PROMPTS = 64


def router(simulator: UserSimulator, directory: Directory) -> APIRouter:
    """Route ``/completions``, to be put under ``/v1``."""
    routes = APIRouter(tags=["OpenAI"])
    replies = Replies(simulator)

    def logprobs(body: CompletionRequest, turn: UserTurn, prompt_ids: Sequence[int]) -> dict[str, Any] | None:
        if body.logprobs is None:
            return None
        found: list[tuple[int, TokenLogprob | None]] = list(replies.tokens(turn))
        if body.echo:
            found = [*zip(prompt_ids, turn.prompt_logprobs, strict=True), *found]
        texts = [replies.text(token) for token, _ in found]
        return {
            "tokens": texts,
            "token_logprobs": [logprob and logprob.logprob for _, logprob in found],
            "top_logprobs": [
                # Two tokens may have one text (halves of characters); the likelier one is kept.
                logprob and {replies.text(token): value for token, value in reversed(logprob.top)}
                for _, logprob in found
            ],
            "text_offset": replies.offsets([token for token, _ in found]),
        }

    @routes.post("/completions", response_model=None, responses=STREAMS)
    async def completions(body: CompletionRequest, request: Request) -> Response:
        """The text that follows each prompt."""
        state = request.app.state
        state.observer.asked(body.model)
        prompts = body.prompts
        if not prompts or not all(prompts):
            raise RequestError("prompt is empty")
        if len(prompts) > MAX_PROMPTS:
            raise RequestError(f"prompt has {len(prompts)} texts; at most {MAX_PROMPTS} are taken")
        n = replies.check_choices(body.n, len(prompts))
        if body.best_of not in (None, n):
            raise RequestError(f"best_of is {body.best_of}; only as many as n ({n}) are generated")
        if body.suffix:
            raise RequestError("suffix is not supported; text can only be gone on with")
        if body.logprobs is not None and not 0 <= body.logprobs <= MAX_TOP_LOGPROBS:
            raise RequestError(f"logprobs is {body.logprobs}; it must be between 0 and {MAX_TOP_LOGPROBS}")
        if body.stream and body.echo and body.logprobs is not None:
            raise RequestError("echo with logprobs cannot be streamed; leave out stream")
        asked = directory.asked(body, request, body.model)
        options = replies.options(state.limits, {**body.sampling, "logprobs": body.logprobs}, asked.user)
        nothing_new = body.max_tokens == 0 and bool(body.echo)  # only the prompt's log-probabilities are wanted
        if nothing_new:
            options["max_tokens"] = 1
        echoed = body.logprobs if body.echo else None

        prepared: list[PreparedTurn] = []

        def prepare() -> list[PreparedTurn]:
            prepared.extend(
                simulator.prepare_text(
                    prompt,
                    asked.traits,
                    user=asked.user,
                    seed=body.seed,
                    trial=asked.trial,
                    choice=choice,
                    positions=body.positions,
                    force=asked.force,
                    prompt_logprobs=echoed,
                    **options,
                )
                for prompt in prompts
                for choice in range(n)
            )
            return prepared

        running = await turns.start(simulator, state.observer, prepare)
        said = [simulator.lm.tokenizer.decode(turn.request.prompt_ids) if body.echo else "" for turn in prepared]
        head = {**replies.head("cmpl", body.model), "object": "text_completion"}
        if body.stream:
            return StreamingResponse(stream(body, head, running, said, n), media_type="text/event-stream")
        found = [_without_reply(turn) if nothing_new else turn for turn in await running.turns(request)]
        choices = [
            {
                "index": i,
                "text": said[i] + turn.text,
                "logprobs": logprobs(body, turn, prepared[i].request.prompt_ids),
                "finish_reason": finish_reason(turn),
            }
            for i, turn in enumerate(found)
        ]
        return AsciiJSONResponse(
            {**head, "choices": choices, "usage": usage(found, n), "traitbasis": replies.metadata(found)}
        )

    async def stream(
        body: CompletionRequest, head: dict[str, Any], running: turns.RunningTurns, said: Sequence[str], n: int
    ) -> AsyncIterator[str]:
        def chunk(index: int, text: str, turn: UserTurn | None = None) -> str:
            choice = {
                "index": index,
                "text": text,
                "logprobs": turn and logprobs(body, turn, ()),
                "finish_reason": turn and finish_reason(turn),
            }
            more = {"traitbasis": replies.metadata([turn])} if turn else {}
            return event({**head, "choices": [choice], **more})

        done: dict[int, UserTurn] = {}
        try:
            for index, text in enumerate(said):
                if text:
                    yield chunk(index, text)
            async for index, item in running.items():
                if isinstance(item, UserTurn):
                    done[index] = _without_reply(item) if body.max_tokens == 0 else item
                    yield chunk(index, "", done[index])
                elif body.max_tokens != 0:
                    yield chunk(index, item)
            if body.include_usage:
                yield event({**head, "choices": [], "usage": usage([done[i] for i in sorted(done)], n)})
        except Exception as error:  # the status line is out, so the error goes into the stream
            yield event(describe(error)[1])
        finally:
            running.cancel()
        yield "data: [DONE]\n\n"

    return routes


def _without_reply(turn: UserTurn) -> UserTurn:
    """A turn of which only the prompt was wanted: an engine generates one token at least."""
    return replace(turn, text="", finish="length", completion_tokens=0, token_ids=(), logprobs=())
