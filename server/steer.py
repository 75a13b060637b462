"""Protocols of harnesses that do not speak OpenAI's to their user: τ-trait, Collinear's SDK, promptfoo.

In their messages, too, the simulated user is ``assistant``. Unknown fields are ignored.
"""

from __future__ import annotations

from functools import cache
from typing import Annotated, Any

from fastapi import APIRouter, Body, Request

from traitbasis.basis import Basis, Column
from traitbasis.errors import OverLimitError, RequestError, TraitSpecError
from traitbasis.pairs import has_pairs, load_pairs, pair_set_hash
from traitbasis.prompts import GREETING
from traitbasis.simulator import DEFAULT_INSTRUCTION, UserSimulator
from traitbasis.tries import PreparedTurn, UserTurn
from traitbasis.users import describe_persona

from . import errors, turns
from .channels import IN_PATH, Directory
from .errors import UnknownTraitError
from .replies import Replies
from .schemas import (
    Level,
    PromptfooRequest,
    PromptfooResponse,
    Steerable,
    SteerBatchResponse,
    SteerRequest,
    SteerResponse,
    TraitDetail,
    TraitList,
)
from .state import States

MAX_BATCH = 64
_WHO = set(Steerable.model_fields)
# What opens a conversation in which nobody has spoken.
_GREETING = {"role": "user", "content": GREETING}


def router(simulator: UserSimulator, directory: Directory, states: States) -> APIRouter:
    """Routes ``/steer_tau`` (τ-trait 0.1.1), ``/steer_bare`` (its repository), ``/steer_batch`` and ``/traits`` (the
    SDK), ``/promptfoo``."""
    routes = APIRouter(tags=["other harnesses"])
    replies = Replies(simulator)

    async def steered(entries: list[SteerRequest], request: Request) -> list[UserTurn]:
        state = request.app.state
        state.observer.asked(request.url.path, entries[-1].messages)
        for entry in entries:
            state.limits.check_messages(entry.messages)
        asked = [directory.asked(entry, request) for entry in entries]
        # Their replies have no room for a state, which is folded anew from every conversation.
        felt = [states.asked(entry.felt_of_body(), who.user) for entry, who in zip(entries, asked, strict=True)]

        def prepare() -> list[PreparedTurn]:
            return [
                simulator.prepare(
                    _with_characteristics(entry),
                    who.traits,
                    user=who.user,
                    seed=None if entry.seed is None or entry.seed < 0 else entry.seed,  # clients send -1 for "none"
                    trial=who.trial,
                    force=who.force,
                    **replies.options(state.limits, entry.sampling, who.user),
                    **feels.options,
                )
                for entry, who, feels in zip(entries, asked, felt, strict=True)
            ]

        running = await turns.start(simulator, state.observer, prepare)
        return await running.turns(request)

    @routes.post("/steer_tau")
    @routes.post("/steer_bare")
    async def steer(body: SteerRequest, request: Request) -> SteerResponse:
        """One user turn."""
        if not body.messages:
            raise RequestError("messages is empty")
        (turn,) = await steered([body], request)
        return SteerResponse(response=turn.text)

    @routes.post("/steer_batch", responses={422: errors.RESPONSES[400]})
    async def steer_batch(
        body: Annotated[list[SteerRequest], Body(description="one entry a conversation")], request: Request
    ) -> SteerBatchResponse:
        """A user turn for each of several conversations; without messages, the user's first."""
        most = min(MAX_BATCH, simulator.engine.stats().max_queue)
        if len(body) > most:
            raise RequestError(f"the batch has {len(body)} entries; at most {most} are taken")
        try:
            return SteerBatchResponse(responses=[turn.text for turn in await steered(body, request)] if body else [])
        except OverLimitError:
            raise  # the SDK would take a 422 for an unknown trait, and leave out what /traits lists
        except TraitSpecError as error:
            raise UnknownTraitError(str(error)) from error

    @routes.post("/promptfoo")
    @routes.post("/u/{spec}/promptfoo", dependencies=IN_PATH)
    async def promptfoo(body: PromptfooRequest, request: Request) -> PromptfooResponse:
        """A user turn for promptfoo's ``simulated-user``, under PROMPTFOO_REMOTE_GENERATION_URL."""
        instruction = [{"role": "system", "content": body.instructions}] if body.instructions else []
        entry = SteerRequest(messages=[*instruction, *(body.history or [_GREETING])], **body.model_dump(include=_WHO))
        (turn,) = await steered([entry], request)
        prompt, completion = turn.prompt_tokens, turn.completion_tokens
        used = {"total": prompt + completion, "prompt": prompt, "completion": completion}
        return PromptfooResponse(result=turn.text, tokenUsage=used)

    @cache
    def traits() -> TraitList:
        return TraitList(traits=list(simulator.basis.traits), details=_details(simulator.basis))

    @routes.get("/traits")
    def trait_list() -> TraitList:  # no coroutine: the first to ask waits for files to be read
        """The traits that can be asked for, and what is known of each."""
        return traits()

    return routes


def _details(basis: Basis) -> dict[str, TraitDetail]:
    return {
        column.trait: TraitDetail(
            layer=column.layer,
            levels={
                name: Level(intensity=intensity, dose=round(basis.dose({column.trait: intensity}), 4))
                for name, intensity in column.levels.items()
            },
            limit=column.limit,
            steerable=column.steerable,
            definition=_definition(column),
        )
        for column in basis.columns
    }


def _definition(column: Column) -> str | None:
    """Of the pair file that ships, if the column was made from its pairs."""
    if not has_pairs(column.trait):
        return None
    pair_set = load_pairs(column.trait)
    pairs = {pair.id: pair for pair in pair_set.pairs}
    made_from = [pairs[name] for name in column.provenance.pair_ids if name in pairs]
    return pair_set.definition if pair_set_hash(made_from) == column.provenance.pair_set_hash else None


def _with_characteristics(entry: SteerRequest) -> list[dict[str, Any]]:
    """The conversation under an instruction made of ``user_characteristics``, when it brings none."""
    messages = entry.messages or [_GREETING]
    told = entry.user_characteristics
    if not isinstance(told, dict) or any(message.get("role") in ("system", "developer") for message in messages):
        return messages
    about = {name: value for name, value in told.items() if name not in ("intent", "task") and value is not None}
    wanted = [f"Your {name}: {told[name]}" for name in ("task", "intent") if told.get(name)]
    instruction = "\n".join(filter(None, [DEFAULT_INSTRUCTION, describe_persona(about), *wanted]))
    return [{"role": "system", "content": instruction}, *messages]
