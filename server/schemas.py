"""What clients send. Fields that are not listed are accepted and ignored: harnesses add their own (1.5 item 1 of the
harness contract), and refusing them would cost an episode."""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BaseModel, ConfigDict, Field, WithJsonSchema

# Checked by traitbasis.spec, whose messages say more than a schema's.
Traits = Annotated[Any, WithJsonSchema({"anyOf": [{"type": "string"}, {"type": "object"}, {"type": "null"}]})]


class _Lenient(BaseModel):
    model_config = ConfigDict(extra="ignore")


class StreamOptions(_Lenient):
    include_usage: bool | None = None


class ResponseFormat(_Lenient):
    type: str = "text"


class ChatCompletionRequest(_Lenient):
    """Body of ``POST /v1/chat/completions``. The simulated user is ``assistant``, the agent under test is ``user``."""

    model: str = Field(examples=["steered-user@impatience-high+skeptical-0.5"])
    messages: list[dict[str, Any]]
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[int, float] | None = None
    logprobs: bool | None = None
    top_logprobs: int | None = None
    max_tokens: int | None = None
    max_completion_tokens: int | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    n: int | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    response_format: ResponseFormat | None = None
    traits: Traits = Field(default=None, examples=[{"impatience": "high"}])
    trait_dict: Traits = None
    trait: Traits = None
    trial: int | str = Field(default=0, description="varies the seed that is derived when none is given")

    @property
    def body_traits(self) -> Traits:
        """Traits of the body, the first of the three fields that was sent; an empty mapping means unsteered."""
        return next((t for t in (self.traits, self.trait_dict, self.trait) if t is not None), None)

    @property
    def sampling(self) -> dict[str, Any]:
        """Sampling fields that were sent, in the simulator's names."""
        stop = (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())
        sent = {
            "temperature": self.temperature,
            "top_p": self.top_p,
            "top_k": self.top_k,
            "min_p": self.min_p,
            "repetition_penalty": self.repetition_penalty,
            "presence_penalty": self.presence_penalty,
            "frequency_penalty": self.frequency_penalty,
            "logit_bias": self.logit_bias,
            "logprobs": (self.top_logprobs or 0) if self.logprobs else None,
            "max_tokens": self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens,
            "stop": stop or None,
        }
        return {name: value for name, value in sent.items() if value is not None}


class SteerRequest(_Lenient):
    """Body of ``POST /steer_tau`` and ``/steer_bare``, as the τ-trait package sends it."""

    messages: list[dict[str, Any]]
    trait_dict: Traits = Field(default=None, examples=[{"impatience": "medium", "confusion": "low"}])
    temperature: float | None = None
    max_tokens: int | None = None
    seed: int | None = None

    @property
    def sampling(self) -> dict[str, Any]:
        """Sampling fields that were sent, in the simulator's names."""
        sent = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        return {name: value for name, value in sent.items() if value is not None}


class SteerResponse(BaseModel):
    """Answer of the steering endpoints."""

    response: str
