"""The plain clients that harnesses are built on: openai, litellm, LangChain."""

from __future__ import annotations

from typing import Any

import pytest
from document import block, run_python
from wire import Recorder, high


@pytest.mark.harness("openai")
def test_the_openai_client_gets_turns_of_a_conversation(user: Recorder) -> None:
    names = run_python(block("OpenAI"), user.url)
    first, second = user.turns
    assert first.made_by["traits"] == second.made_by["traits"] == {"skeptical": 0.5}  # the body wins over the model id
    assert [message["role"] for message in second.sent["messages"]] == ["system", "user", "assistant", "user"]
    assert second.sent["messages"][2]["content"] == first.message["content"]
    assert names["reply"].usage.total_tokens == second.got["usage"]["total_tokens"] > 0


@pytest.mark.harness("openai")
def test_the_openai_client_streams_lists_models_and_gets_errors_it_knows(user: Recorder) -> None:
    import openai

    client = openai.OpenAI(base_url=f"{user.url}/v1", api_key="none", max_retries=0)
    ids = [model.id for model in client.models.list()]
    assert {"steered-user", "hurried-anna"} <= set(ids) and not any("/" in name for name in ids)
    assert client.models.retrieve("hurried-anna").id == "hurried-anna"
    request: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello, how can I help?"}], "seed": 3}
    whole = client.chat.completions.create(model="hurried-anna", **request)
    assert whole.model_extra and whole.model_extra["traitbasis"]["traits"] == {
        "impatience": high("impatience"),
        "skeptical": 0.5,
    }
    chunks = list(
        client.chat.completions.create(
            model="hurried-anna", stream=True, stream_options={"include_usage": True}, **request
        )
    )
    text = "".join(choice.delta.content or "" for chunk in chunks for choice in chunk.choices)
    assert text == whole.choices[0].message.content
    assert chunks[-1].usage and whole.usage and chunks[-1].usage.total_tokens == whole.usage.total_tokens
    with pytest.raises(openai.BadRequestError, match="greed"):
        client.chat.completions.create(model="steered-user@greed-high", **request)
    with pytest.raises(openai.NotFoundError, match="steered-user"):
        client.chat.completions.create(model="gpt-4o", **request)


@pytest.mark.harness("openai")
def test_every_channel_reaches_the_user(user: Recorder) -> None:
    import openai

    request: dict[str, Any] = {"messages": [{"role": "user", "content": "Hello, how can I help?"}], "max_tokens": 8}
    plain = openai.OpenAI(base_url=f"{user.url}/v1", api_key="none").chat.completions
    path = openai.OpenAI(base_url=f"{user.url}/u/impatience-high/v1", api_key="none").chat.completions
    turns = [
        plain.create(model="steered-user@impatience-high", **request),
        plain.create(model="steered-user", extra_body={"traits": {"impatience": "high"}}, **request),
        plain.create(model="steered-user", extra_headers={"X-Traits": "impatience-high"}, **request),
        path.create(model="whatever-the-harness-says", **request),
    ]
    assert {turn.choices[0].message.content for turn in turns} == {turns[0].choices[0].message.content}
    assert all(exchange.made_by["traits"] == {"impatience": high("impatience")} for exchange in user.turns)


@pytest.mark.harness("litellm")
def test_litellm_gets_a_turn_and_its_cost_can_be_zero(user: Recorder) -> None:
    names = run_python(block("litellm"), user.url)
    (turn,) = user.turns
    assert set(turn.sent) == {"model", "messages"} and turn.sent["model"] == "steered-user@impatience-high"
    assert turn.made_by["traits"] == {"impatience": high("impatience")}
    assert names["reply"].usage.total_tokens > 0
    assert run_python(block("litellm", number=1), user.url)["reply"]._hidden_params["response_cost"] == 0.0


@pytest.mark.harness("langchain-openai")
def test_langchain_gets_a_turn(user: Recorder) -> None:
    names = run_python(block("LangChain"), user.url)
    (turn,) = user.turns
    assert turn.headers["x-traits"] == "skeptical-0.5" and turn.made_by["traits"] == {"skeptical": 0.5}
    assert names["turn"].content == turn.message["content"]
    assert names["turn"].usage_metadata["total_tokens"] == turn.got["usage"]["total_tokens"]


@pytest.mark.harness("langchain-openai")
def test_langchain_gets_the_json_it_asks_for(user: Recorder) -> None:
    from langchain_openai import ChatOpenAI
    from pydantic import BaseModel

    class Verdict(BaseModel):
        polite: bool
        words: int

    model = ChatOpenAI(model="steered-user@impatience-high", base_url=f"{user.url}/v1", api_key="none")
    verdict = model.with_structured_output(Verdict).invoke("Is 'Thank you' polite, and how many words is it?")
    assert isinstance(verdict, Verdict)
    (turn,) = user.turns
    assert turn.made_by["traits"] == {} and turn.made_by["plain"] == "response_format"
