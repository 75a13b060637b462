"""What clients send. Fields that are not listed are accepted and ignored: harnesses add their own (1.5 item 1 of the
harness contract), and refusing them would cost an episode."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

from traitbasis.engines.base import Positions

# Checked by the library, whose messages say more than a schema's.
Traits = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}]})]
_Object = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "object"}, {"type": "null"}]})]
_Flag = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "boolean"}, {"type": "null"}]})]
_Choice = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}]})]
_List = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "array", "items": {"type": "object"}}, {"type": "null"}]})]


class _Lenient(BaseModel):
    model_config = ConfigDict(extra="ignore")


class Steerable(_Lenient):
    """Fields by which every body can say who speaks and how."""

    traits: Traits = Field(default=None, examples=[{"impatience": "high"}])
    trait_dict: Traits = None
    trait: Traits = None
    force: _Flag = Field(default=None, description="serve traits beyond their limit, and those that are not steerable")
    extra_body: _Object = Field(default=None, description="what some clients leave of theirs; its traits are read")
    trial: int | str | None = Field(default=None, description="varies the seed that is derived when none is given")
    traitbasis: _Object = Field(
        default=None,
        description="how the customer feels and reacts, and its state of the last reply",
        examples=[{"condition": "frustration.cold.high.skeptical", "unsatisfied": True}],
    )

    def traits_of_body(self) -> Iterator[Any]:
        """Traits that were sent, the first of which counts; an empty mapping means unsteered."""
        yield from (self.traits, self.trait_dict, self.trait)
        if isinstance(self.extra_body, dict):
            yield from (self.extra_body.get(name) for name in ("traits", "trait_dict", "trait"))

    def felt_of_body(self) -> Any:
        """What was sent as traitbasis."""
        if self.traitbasis is None and isinstance(self.extra_body, dict):
            return self.extra_body.get("traitbasis")
        return self.traitbasis

    def force_of_body(self) -> Iterator[Any]:
        """What was sent as force, the first of which counts."""
        yield self.force
        if isinstance(self.extra_body, dict):
            yield self.extra_body.get("force")


class StreamOptions(_Lenient):
    include_usage: bool | None = None


class _Sampled(Steerable):
    """What the two OpenAI endpoints have in common."""

    model: str = Field(examples=["steered-user@impatience-high+skeptical-0.5"])
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    max_tokens: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    positions: Positions = Field(default="generated", description="`all` steers the prompt, too")

    @property
    def sampling(self) -> dict[str, Any]:
        """Sampling fields that were sent, in the simulator's names."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        names = ("temperature", "top_p", "top_k", "min_p", "repetition_penalty", "presence_penalty")
        sent = {name: getattr(self, name) for name in (*names, "frequency_penalty", "logit_bias", "max_tokens")}
        return {name: value for name, value in {**sent, "stop": stop or None}.items() if value is not None}

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)


class ChatCompletionRequest(_Sampled):
    """Body of ``POST /v1/chat/completions``. The simulated user is ``assistant``, the agent under test is ``user``."""

    messages: list[dict[str, Any]]
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_completion_tokens: int | None = None
    tools: _List = None
    tool_choice: _Choice = None
    functions: _List = None
    function_call: _Choice = None
    response_format: _Object = None

    @property
    def sampling(self) -> dict[str, Any]:
        sent = super().sampling
        if self.logprobs:
            sent["logprobs"] = self.top_logprobs or 0
        if self.max_completion_tokens is not None:
            sent["max_tokens"] = self.max_completion_tokens
        return sent


class CompletionRequest(_Sampled):
    """Body of ``POST /v1/completions``: texts to go on with, as they stand."""

    prompt: str | list[str] | list[int] | list[list[int]]
    echo: bool | None = None
    logprobs: int | None = Field(default=None, description="how many likely tokens to report at each place")
    best_of: int | None = None
    suffix: str | None = None

    @property
    def prompts(self) -> list[str | list[int]]:
        """Each of the prompts."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if all(isinstance(part, int) for part in self.prompt):
            return [self.prompt] if self.prompt else []  # type: ignore[list-item]
        return list(self.prompt)  # type: ignore[arg-type]


class SteerRequest(Steerable):
    """Body of ``POST /steer_tau`` and ``/steer_bare``, as the τ-trait package sends it, and an entry of
    ``/steer_batch``, as Collinear's SDK does."""

    messages: list[dict[str, Any]]
    trait_dict: Traits = Field(default=None, examples=[{"impatience": "medium", "confusion": "low"}])
    user_characteristics: _Object = None
    temperature: float | None = None
    max_tokens: int | None = None
    seed: int | None = None

    @property
    def sampling(self) -> dict[str, Any]:
        """Sampling fields that were sent, in the simulator's names."""
        sent = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        return {name: value for name, value in sent.items() if value is not None}


class SteerResponse(BaseModel):
    """Answer of ``/steer_tau`` and ``/steer_bare``."""

    response: str


class SteerBatchResponse(BaseModel):
    """Answer of ``/steer_batch``: as many turns as there were entries, in their order."""

    responses: list[str]


class Level(BaseModel):
    """What a level's name means for one trait. dose: of the addition, relative to a hidden state."""

    intensity: float
    dose: float


class TraitDetail(BaseModel):
    """One trait of the basis.

    levels: by name. limit: the dose beyond which it is served only when forced, null where none was measured.
    steerable: false for what is served only when forced at any dose. definition: of the contrastive pairs that ship,
    null when the trait was made from others.
    """

    layer: int
    levels: dict[str, Level]
    limit: float | None
    steerable: bool
    definition: str | None


class TraitList(BaseModel):
    """Answer of ``/traits``."""

    traits: list[str]
    details: dict[str, TraitDetail]


class PromptfooRequest(Steerable):
    """Body of ``POST /promptfoo``: the instruction, and the conversation without it."""

    instructions: str | None = None
    history: list[dict[str, Any]] | None = None


class PromptfooResponse(BaseModel):
    """Answer of ``/promptfoo``."""

    result: str
    tokenUsage: dict[str, int]  # noqa: N815 - its name on the wire
