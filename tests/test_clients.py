"""Real clients against a running server on the embedded model: openai, litellm, and tau-trait's own environment."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from serving import serving
from traitbasis.server import Limits, Settings, create_app

from traitbasis.basis import Basis
from traitbasis.simulator import UserSimulator

MODEL = "steered-user@impatience-high+skeptical-0.5"
MESSAGES: list[Any] = [
    {"role": "system", "content": "You are a customer. Your order #W4417, a desk lamp, is late. You want a refund."},
    {"role": "user", "content": "Hi! How can I help you today?"},
]


@pytest.fixture(scope="module")
def url(real_user: UserSimulator) -> Iterator[str]:
    """A server of short turns: of four traits at once many draws are rejected, and tau-trait asks for 256 tokens."""
    with serving(create_app(real_user, Settings(limits=Limits(output_tokens=32)))) as url:
        yield url


def test_the_openai_client_gets_a_steered_turn_whole_and_streamed(url: str, real_basis: Basis) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{url}/v1", api_key="none")
    assert "steered-user" in [model.id for model in client.models.list()]
    whole = client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=3, max_tokens=24)
    assert whole.choices[0].message.content and whole.usage and whole.usage.total_tokens > 0
    assert whole.model_extra and whole.model_extra["traitbasis"]["traits"] == real_basis.parse(
        "impatience-high+skeptical-0.5"
    )
    in_body = client.chat.completions.create(
        model="steered-user",
        messages=MESSAGES,
        seed=3,
        max_tokens=24,
        extra_body={"traits": {"impatience": "high", "skeptical": 0.5}},
    )
    assert in_body.choices[0].message.content == whole.choices[0].message.content
    stream = client.chat.completions.create(model=MODEL, messages=MESSAGES, seed=3, max_tokens=24, stream=True)
    pieces = [chunk.choices[0].delta.content or "" for chunk in stream if chunk.choices]
    assert "".join(pieces) == whole.choices[0].message.content and len(pieces) > 2
    with pytest.raises(openai.BadRequestError, match="impatience"):
        client.chat.completions.create(model="steered-user@greed-high", messages=MESSAGES)
    with pytest.raises(openai.NotFoundError, match="steered-user"):
        client.chat.completions.create(model="gpt-4o", messages=MESSAGES)


def test_litellm_gets_a_steered_turn_as_tau_bench_calls_it(url: str) -> None:
    """Section 1.1 of the harness contract: only model and messages are sent."""
    import litellm

    for provider in ("openai", "hosted_vllm"):
        response = litellm.completion(
            model=MODEL, custom_llm_provider=provider, messages=MESSAGES, api_base=f"{url}/v1", api_key="x"
        )
        message = response.choices[0].message
        assert message.role == "assistant" and message.content.strip()
    echoed = [*MESSAGES, message.model_dump(), {"role": "user", "content": "Your order number?"}]
    again = litellm.completion(model=f"openai/{MODEL}", messages=echoed, api_base=f"{url}/v1", api_key="x")
    assert again.choices[0].message.content.strip() and again.usage.total_tokens > 0


def test_tau_trait_plays_a_full_retail_episode(url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """tau-trait 0.1.1 unmodified but for its literal URL: a scripted agent solves a task with our user in the loop.

    The agent talks to the user between its tool calls, and the reward comes from the environment's own
    comparison of databases.
    """
    monkeypatch.setenv("OPENAI_API_KEY", "unused")  # its checker builds a client at import and never calls it
    import requests
    from tau_trait.envs import get_env
    from tau_trait.envs import user as tau_user
    from tau_trait.types import RESPOND_ACTION_NAME, Action

    calls: list[dict[str, Any]] = []
    real_post = requests.post

    def post(address: str, **arguments: Any) -> Any:
        calls.append(arguments["json"])
        return real_post(address.replace("https://steer-stag.collinear.ai", url), **arguments)

    monkeypatch.setattr(tau_user.requests, "post", post)
    monkeypatch.setenv("no_proxy", "127.0.0.1")
    traits = {"impatience": "medium", "confusion": "low", "skeptical": "low", "incoherence": "low"}
    env = get_env(
        "retail", "llm", user_model="unused", user_provider="steer", task_split="test", task_index=0, trait_dict=traits
    )
    first = env.reset(task_index=0).observation
    assert first.strip()
    observations = [first]
    for number, action in enumerate(env.task.actions):
        if number < 4:
            said = env.step(Action(name=RESPOND_ACTION_NAME, kwargs={"content": f"Thank you. That is step {number}."}))
            observations.append(said.observation)
        env.step(action)
    assert all(text.strip() for text in observations)
    assert len(calls) == len(observations) + 1  # and the constructor's own reset, which has no instruction
    assert all(call["trait_dict"] == traits for call in calls)
    assert len(set(observations)) > 1
    # Small models do not say ###STOP### reliably; handing over to a human ends an episode, too.
    end = env.step(Action(name="transfer_to_human_agents", kwargs={"summary": "Exchange done."}))
    assert end.done and end.reward == 1.0
