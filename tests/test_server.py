"""The HTTP surface on a tiny model: shapes, errors, trait channels, streaming, disconnects.

Numbers such as "1.5.6" are the items of docs/harness-contract.md that a test shows.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch
from openai.types.chat import ChatCompletion
from prometheus_client.parser import text_string_to_metric_families
from reference import END, NEAR_TIE, Gate, greedy
from samples import MILD_GUARDS, random_basis
from serving import serving
from tiny import SPECIALS, tiny_model
from torch import Tensor
from traitbasis.server import create_app

from traitbasis.engines.base import EngineStats, Event, Failure, Listener, Request, Sampling
from traitbasis.engines.transformers import TransformersEngine
from traitbasis.errors import EngineBusyError, EngineError
from traitbasis.simulator import UserSimulator

MESSAGES = [
    {"role": "system", "content": "You are a customer. Your order is #W1."},
    {"role": "user", "content": "Hi! How can I help you today?"},
]


@pytest.fixture(scope="module")
def simulator() -> Iterator[UserSimulator]:
    lm = tiny_model()
    basis = random_basis(lm, "impatience", "skeptical")
    with UserSimulator(lm, basis, sampling=Sampling(max_tokens=12), guards=MILD_GUARDS) as simulator:
        yield simulator


@pytest.fixture(scope="module")
def client(simulator: UserSimulator) -> Iterator[httpx.Client]:
    with serving(create_app(simulator)) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def ask(client: httpx.Client, **body: Any) -> httpx.Response:
    return client.post("/v1/chat/completions", json={"model": "steered-user", "messages": MESSAGES, **body})


def streamed(client: httpx.Client, **body: Any) -> list[dict[str, Any]]:
    """The chunks of a stream that ended as it should."""
    response = ask(client, stream=True, **body)
    assert response.status_code == 200, response.text
    *chunks, last = [line.removeprefix("data: ") for line in response.text.split("\n") if line]
    assert last == "[DONE]"
    return [json.loads(chunk) for chunk in chunks]


def content(response: httpx.Response) -> str:
    assert response.status_code == 200, response.text
    return str(response.json()["choices"][0]["message"]["content"])


def test_a_reply_has_the_shape_of_a_chat_completion(client: httpx.Client) -> None:
    """1.5.6, and contract 11: the reply says what made it."""
    body = ask(client, model="steered-user@impatience-high").json()
    choice = body["choices"][0]
    assert body["object"] == "chat.completion" and body["model"] == "steered-user@impatience-high"
    assert choice["message"]["role"] == "assistant" and choice["message"]["content"].strip()
    assert choice["finish_reason"] in ("stop", "length")
    usage = body["usage"]
    assert usage["total_tokens"] == usage["prompt_tokens"] + usage["completion_tokens"] > 0
    assert body["system_fingerprint"].startswith("tb-")
    made_by = body["traitbasis"]
    assert made_by["traits"] == {"impatience": 1.5} and made_by["spec"] == "impatience-1.5"
    assert made_by["dose"] == pytest.approx(3.0, abs=1e-3)
    assert {"model", "model_fingerprint", "basis", "seed", "sampling", "engine", "versions", "tries"} <= made_by.keys()


def test_the_same_request_gets_the_same_reply_and_a_trial_varies_it(client: httpx.Client) -> None:
    """Contract 9, 1.5.12."""
    first, again = (content(ask(client, temperature=1.0)) for _ in range(2))
    others = {content(ask(client, temperature=1.0, trial=trial)) for trial in range(1, 5)}
    assert first == again
    assert others - {first}


def test_sixteen_requests_in_flight_get_the_replies_they_get_alone(client: httpx.Client) -> None:
    """Contracts 3 and 9, fault 34."""
    bodies = [
        {"traits": traits, "seed": seed, "temperature": 0.9}
        for seed in range(4)
        for traits in ({}, "impatience-high", "impatience--1+skeptical-2", {"skeptical": -1.5})
    ]
    alone = [content(ask(client, **body)) for body in bodies]
    with ThreadPoolExecutor(16) as pool:
        together = list(pool.map(lambda body: content(ask(client, **body)), bodies))
    assert together == alone
    assert len(set(alone)) > 8


def test_every_trait_channel_says_the_same(client: httpx.Client) -> None:
    greedy = {"temperature": 0, "seed": 1}
    plain = content(ask(client, **greedy))
    steered = content(ask(client, model="steered-user@impatience-1.5+skeptical-0.5", **greedy))
    assert steered != plain
    mapping = {"impatience": "high", "skepticism": "0.5"}
    text = "impatience-high+skeptical-low"
    for body in ({"traits": mapping}, {"trait_dict": mapping}, {"trait": mapping}, {"traits": text}):
        assert content(ask(client, **body, **greedy)) == steered


def test_traits_in_the_body_win_over_the_model_name(client: httpx.Client) -> None:
    """1.5.9; an explicit empty mapping means unsteered (1.5.11)."""
    greedy = {"temperature": 0, "seed": 1}
    plain = content(ask(client, **greedy))
    assert content(ask(client, model="steered-user@impatience-high", traits={}, **greedy)) == plain
    assert content(ask(client, model="steered-user@impatience-high", traits={"impatience": 0}, **greedy)) == plain


@pytest.mark.parametrize(
    ("body", "status", "param", "words"),
    [
        ({"traits": {"impatiance": 1}}, 400, "traits", ["impatiance", "impatience", "skeptical"]),
        ({"model": "steered-user@nonsense-high"}, 400, "traits", ["nonsense", "impatience"]),
        ({"model": "steered-user@impatience-"}, 400, "traits", ["impatience-"]),
        ({"traits": {"impatience": "very"}}, 400, "traits", ["very", "low", "high"]),
        ({"traits": [1]}, 400, "traits", ["[1]"]),
        ({"traits": {"impatience": 1e300}}, 400, "traits", ["impatience", "1000"]),
        ({"traits": {"impatience": -50}}, 400, "traits", ["impatience--50", "100 times"]),
        ({"model": "gpt-4o"}, 404, "model", ["gpt-4o", "steered-user"]),
        ({"messages": []}, 400, "messages", ["messages"]),
        ({"messages": "hello"}, 400, "messages", ["list"]),
        ({"messages": [{"role": "wizard", "content": "x"}]}, 400, "messages", ["wizard", "assistant"]),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, "messages", ["image_url"]),
        ({"temperature": -1}, 400, "temperature", ["temperature", "-1"]),
        ({"top_p": 0}, 400, "top_p", ["top_p"]),
        ({"max_tokens": 0}, 400, "max_tokens", ["max_tokens"]),
        ({"n": 17}, 400, "n", ["n is 17", "16"]),
        ({"n": 0}, 400, "n", ["n is 0", "16"]),
        ({"n": "many"}, 400, "n", ["n", "integer"]),
        ({"top_k": -1}, 400, "top_k", ["top_k", "-1"]),
        ({"min_p": 1.5}, 400, "min_p", ["min_p", "1.5"]),
        ({"repetition_penalty": 0}, 400, "repetition_penalty", ["repetition_penalty", "0"]),
        ({"presence_penalty": 101}, 400, "presence_penalty", ["presence_penalty", "101", "100"]),
        ({"frequency_penalty": -101}, 400, "frequency_penalty", ["frequency_penalty", "-101", "100"]),
        ({"logit_bias": {"5": 101}}, 400, "logit_bias", ["logit_bias", "token 5", "101", "100"]),
        ({"logit_bias": {"-1": 1}}, 400, "logit_bias", ["logit_bias", "-1"]),
        ({"logit_bias": {"270": 1, "99999": 1}}, 400, None, ["99999", "271"]),
        ({"logit_bias": {"hello": 1}}, 400, "logit_bias", ["hello", "integer"]),
        ({"logit_bias": {"5": None}}, 400, "logit_bias", ["5", "number"]),
        ({"logprobs": "some"}, 400, "logprobs", ["boolean"]),
        ({"logprobs": True, "top_logprobs": 101}, 400, "top_logprobs", ["top_logprobs", "101", "20"]),
        ({"logprobs": True, "top_logprobs": -1}, 400, "top_logprobs", ["top_logprobs", "-1"]),
        ({"stop": ""}, 400, "stop", ["stop"]),
        ({"response_format": {"type": "xml"}}, 400, "response_format", ["xml", "json_schema"]),
        ({"response_format": "json"}, 400, "response_format", ["'json'", "object"]),
        ({"response_format": {"type": "json_schema"}}, 400, "response_format", ["json_schema", "schema"]),
        ({"tools": [{"type": "function", "function": {"name": "x"}}], "response_format": {"type": "json_object"}}, 400,
         "tools", ["tools", "response_format"]),
    ],
)  # fmt: skip
def test_bad_requests_get_openai_errors_that_name_the_value(
    client: httpx.Client, body: dict[str, Any], status: int, param: str | None, words: list[str]
) -> None:
    """1.5.7."""
    response = ask(client, **body)
    assert response.status_code == status, response.text
    error = response.json()["error"]
    assert error.keys() == {"message", "type", "param", "code"}
    assert error["type"] == "invalid_request_error" and error["param"] == param
    assert all(word in error["message"] for word in words), error["message"]


@pytest.mark.parametrize(("body", "status"), [({}, 200), ({"logit_bias": {"half \ud83d": 1}}, 400), ({"n": 0}, 400)])
@pytest.mark.parametrize("stream", [False, True])
def test_names_that_are_no_utf8_come_back_escaped(
    client: httpx.Client, body: dict[str, Any], status: int, stream: bool
) -> None:
    asked = {"model": "half \ud83d", "messages": MESSAGES, "stream": stream, **body}
    content, headers = json.dumps(asked), {"content-type": "application/json"}
    response = client.post("/u/off/v1/chat/completions", content=content, headers=headers)
    assert response.status_code == status, response.text
    assert status != 200 or r'"half \ud83d"' in response.text


def test_malformed_bodies_and_unknown_paths_are_openai_errors(client: httpx.Client) -> None:
    headers = {"content-type": "application/json"}
    for response, status in (
        (client.post("/v1/chat/completions", content=b"{nope", headers=headers), 400),
        (client.post("/v1/chat/completions", content=b"\xff\xfe", headers=headers), 400),
        (client.post("/v1/chat/completions", json=[1]), 400),
        (client.post("/v1/chat/completions", json={"messages": MESSAGES}), 400),
        (client.get("/nothing/here"), 404),
        (client.get("/v1/chat/completions"), 405),
    ):
        assert response.status_code == status, response.text
        assert response.json()["error"]["message"]


def test_a_conversation_beyond_the_context_is_refused_with_the_numbers(client: httpx.Client) -> None:
    response = ask(client, messages=[{"role": "user", "content": "a" * 5000}])
    error = response.json()["error"]
    assert response.status_code == 400 and error["code"] == "context_length_exceeded" and "2048" in error["message"]


def test_what_harnesses_send_beside_the_protocol_is_ignored(client: httpx.Client) -> None:
    """1.5.1 to 1.5.5: unknown fields, null and missing content, any order, tools: [], any key."""
    messages = [
        {"role": "assistant", "content": None, "tool_calls": None, "function_call": None, "trace_id": "x"},
        {"role": "user", "content": [{"type": "text", "text": "Hi! "}, {"type": "text", "text": "Your order?"}]},
        {"role": "assistant", "content": "#W1", "reasoning_content": "SECRET"},
        {"role": "system", "content": "You are a customer."},
        {"role": "user", "content": "Thanks."},
        {"role": "user", "content": "Anything else?", "name": "agent"},
        {"role": "developer", "content": "Be brief."},
        {"role": "tool", "tool_call_id": "1", "content": "done"},
        {"role": "user"},
    ]
    extras = {"tools": [], "tool_choice": "none", "logprobs": True, "reasoning_effort": "low", "cache_key": 1}
    response = client.post(
        "/v1/chat/completions",
        json={"model": "steered-user", "messages": messages, **extras},
        headers={"Authorization": "Bearer fake-api-key"},
    )
    assert content(response).strip()


def test_a_stream_carries_the_same_text_then_usage_then_done(client: httpx.Client) -> None:
    whole = content(ask(client, seed=3, temperature=0.9))
    body = {"model": "steered-user", "messages": MESSAGES, "seed": 3, "temperature": 0.9, "stream": True}
    with client.stream(
        "POST", "/v1/chat/completions", json={**body, "stream_options": {"include_usage": True}}
    ) as response:
        assert response.headers["content-type"].startswith("text/event-stream")
        lines = [line.removeprefix("data: ") for line in response.iter_lines() if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    assert chunks[0]["choices"][0]["delta"]["role"] == "assistant"
    assert "".join(c["choices"][0]["delta"].get("content", "") for c in chunks if c["choices"]) == whole
    assert [c["choices"][0]["finish_reason"] for c in chunks if c["choices"]][-1] in ("stop", "length")
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"]["completion_tokens"] > 0
    assert len({c["id"] for c in chunks}) == 1


def test_model_ids_are_safe_in_file_names(client: httpx.Client) -> None:
    """1.5.8."""
    ids = [model["id"] for model in client.get("/v1/models").json()["data"]]
    assert "steered-user" in ids and "steered-user@impatience-medium" in ids
    assert all(re.fullmatch(r"[A-Za-z0-9._@+=-]+", i) for i in ids)
    assert all(content(ask(client, model=i)) for i in ids)


def test_health_names_the_model_and_its_traits(client: httpx.Client) -> None:
    assert client.get("/health").json() == {
        "status": "ok",
        "model": "tiny-llama",
        "traits": ["impatience", "skeptical"],
    }


@pytest.mark.parametrize("path", ["/steer_tau", "/steer_bare"])
def test_steering_endpoints_answer_as_the_harness_contract_says(client: httpx.Client, path: str) -> None:
    """Section 2.1: body as tau-trait sends it, one string back, -1 for no seed, API-Key header ignored."""
    body = {
        "trait_dict": {"impatience": "medium", "skeptical": "low"},
        "messages": MESSAGES,
        "temperature": 0.7,
        "max_tokens": 12,
        "system_prompt": 0,
        "seed": -1,
    }
    response = client.post(path, json=body, headers={"API-Key": "None"})
    assert response.status_code == 200 and response.json().keys() == {"response"}
    assert response.json()["response"].strip()
    same = ask(client, traits="impatience-medium+skeptical-low", temperature=0.7, max_tokens=12)
    assert response.json()["response"] == content(same)
    unknown = client.post(path, json={**body, "trait_dict": {"greed": "high"}})
    assert unknown.status_code == 400 and "impatience" in unknown.json()["error"]["message"]


def test_every_forward_of_a_reply_is_steered_but_the_prompts_at_every_entry_point(
    client: httpx.Client, simulator: UserSimulator
) -> None:
    """Fault 31, contract 4: how many hooks of ours the steered layer has when each forward of the model begins."""
    traits = {"impatience": "high"}
    entry_points = {
        "chat": lambda: ask(client, traits=traits),
        "stream": lambda: ask(client, traits=traits, stream=True).read(),
        "model name": lambda: ask(client, model="steered-user@impatience-high"),
        "steer_tau": lambda: client.post("/steer_tau", json={"messages": MESSAGES, "trait_dict": traits}),
        "steer_bare": lambda: client.post("/steer_bare", json={"messages": MESSAGES, "trait_dict": traits}),
        "reply": lambda: simulator.reply(MESSAGES, traits),
        "Python stream": lambda: list(simulator.stream(MESSAGES, traits)),
    }
    layer = simulator.lm.layers[simulator.basis.columns[0].layer]
    hooks: list[int] = []
    handle = simulator.lm.model.register_forward_pre_hook(lambda *_: hooks.append(len(layer._forward_hooks)))
    try:
        for name, call in entry_points.items():
            hooks.clear()
            call()
            assert hooks[0] == 0 and len(hooks) > 2 and set(hooks[1:]) == {1}, name
    finally:
        handle.remove()


# --- several choices ---


def test_several_choices_are_several_replies_and_the_first_is_the_only_one(client: httpx.Client) -> None:
    """Contract 9: a choice is the same whoever is drawn beside it. Usage counts the prompt once and every token."""
    how = {"seed": 5, "temperature": 0.9, "logprobs": True}
    one, two, three = (ask(client, n=n, **how).json() for n in (1, 2, 3))
    assert [choice["index"] for choice in three["choices"]] == [0, 1, 2]
    texts = [choice["message"]["content"] for choice in three["choices"]]
    assert len(set(texts)) == 3 and all(text.strip() for text in texts)
    assert [choice["message"]["content"] for choice in one["choices"]] == texts[:1]
    assert [choice["message"]["content"] for choice in two["choices"]] == texts[:2]
    tokens = [len(choice["logprobs"]["content"]) for choice in three["choices"]]
    prompt = one["usage"]["prompt_tokens"]
    assert three["usage"] == {
        "prompt_tokens": prompt,
        "completion_tokens": sum(tokens),
        "total_tokens": prompt + sum(tokens),
    }
    assert "choices" not in one["traitbasis"]
    assert [made["seed"] for made in three["traitbasis"]["choices"]] == [5, 5, 5]


def test_several_choices_without_a_seed_are_repeatable(client: httpx.Client) -> None:
    """Contract 9, 1.5.12; null is one choice."""
    first, again = (ask(client, n=3, traits="impatience-low").json()["choices"] for _ in range(2))
    assert first == again and len({choice["message"]["content"] for choice in first}) == 3
    assert ask(client, n=None, traits="impatience-low").json()["choices"] == first[:1]


def test_streamed_choices_carry_the_texts_of_unstreamed_ones(client: httpx.Client) -> None:
    """Log-probabilities, too; each choice begins with its role and ends once."""
    how = {"seed": 5, "temperature": 0.9, "n": 2, "logprobs": True, "top_logprobs": 2}
    whole = ask(client, **how).json()
    chunks = streamed(client, stream_options={"include_usage": True}, **how)
    for choice in whole["choices"]:
        parts = [part for chunk in chunks for part in chunk["choices"] if part["index"] == choice["index"]]
        assert parts[0]["delta"]["role"] == "assistant"
        assert "".join(part["delta"].get("content", "") for part in parts) == choice["message"]["content"]
        assert [part["finish_reason"] for part in parts if part["finish_reason"]] == [choice["finish_reason"]]
        tokens = [token for part in parts if part["logprobs"] for token in part["logprobs"]["content"]]
        assert tokens == choice["logprobs"]["content"]
    assert chunks[-1]["choices"] == [] and chunks[-1]["usage"] == whole["usage"]


@pytest.mark.parametrize("stream", [False, True])
def test_a_queue_that_fills_up_between_choices_refuses_them_all(stream: bool) -> None:
    """1.5.7, contract 6: 429, and what was queued already is cancelled before it costs a token."""
    lm = tiny_model()
    engine = TransformersEngine(lm, max_batch=1, max_queue=4)
    with UserSimulator(lm, random_basis(lm, "impatience"), engine=engine, guards=MILD_GUARDS) as simulator:
        with serving(create_app(simulator)) as url, httpx.Client(base_url=url, timeout=30) as client:
            with Gate(engine):
                others = [engine.submit(greedy((5, 6)), lambda event: None) for _ in range(2)]
                response = ask(client, n=4, stream=stream)
                assert response.status_code == 429 and int(response.headers["retry-after"]) >= 1
                assert response.json()["error"]["type"] == "rate_limit_error"
                assert engine.stats().waiting == 4
                for other in others:
                    other.cancel()
            assert content(ask(client, max_tokens=5)).strip(), "there is room again"
            never = ask(client, n=5)  # not even when nobody else is there
            assert never.status_code == 400 and "--max-queue" in never.json()["error"]["message"]
        stats = engine.stats()
        assert stats.waiting == stats.running == 0
        assert stats.generated_tokens == 1 + 5, "the gate's and the last request's"


# --- how tokens are drawn ---


@pytest.fixture(scope="module")
def unguarded() -> Iterator[tuple[httpx.Client, UserSimulator]]:
    """A server that sends whatever is drawn, so that a reference can say what that is."""
    lm = tiny_model()
    basis = random_basis(lm, "impatience")
    with (
        UserSimulator(lm, basis, sampling=Sampling(temperature=0, max_tokens=12), guards=()) as simulator,
        serving(create_app(simulator)) as url,
        httpx.Client(base_url=url, timeout=60) as client,
    ):
        yield client, simulator


def greedy_by_hand(
    simulator: UserSimulator, change: Callable[[Tensor, list[int]], Tensor] = lambda scores, drawn: scores, n: int = 12
) -> list[tuple[int, Tensor]]:
    """Greedy tokens of MESSAGES with the log-probabilities at their places, each by a full forward.

    change: of scores, given the ids so far.
    """
    prompt = simulator.prepare(MESSAGES).request.prompt_ids
    ids, found = list(prompt), []
    while len(found) < n and END not in ids[len(prompt) :]:
        with torch.inference_mode():
            logits = simulator.lm.model(input_ids=torch.tensor([ids]), use_cache=False).logits[0, -1]
        scores = change(logits.clone(), ids[len(prompt) :])
        best, second = scores.topk(2).values.tolist()
        assert best - second > NEAR_TIE, "a near tie: choose another message for this test"
        ids.append(int(scores.argmax()))
        found.append((ids[-1], logits.log_softmax(-1)))
    return found


def entries(response: httpx.Response) -> list[dict[str, Any]]:
    assert response.status_code == 200, response.text
    found: list[dict[str, Any]] = response.json()["choices"][0]["logprobs"]["content"]
    return found


def test_log_probabilities_come_in_openais_format(unguarded: tuple[httpx.Client, UserSimulator]) -> None:
    """And are the model's own, by a full forward; at temperature 0 the chosen token is the first of the likeliest."""
    client, simulator = unguarded
    response = ask(client, logprobs=True, top_logprobs=3)
    (choice,) = ChatCompletion.model_validate(response.json(), strict=True).choices
    assert choice.logprobs is not None and choice.logprobs.content is not None
    expected = greedy_by_hand(simulator)
    assert len(choice.logprobs.content) == len(expected) == response.json()["usage"]["completion_tokens"]
    decode = simulator.lm.tokenizer.decode
    for entry, (token, logs) in zip(choice.logprobs.content, expected, strict=True):
        best = logs.topk(3)
        assert (entry.token, entry.logprob) == (decode([token]), pytest.approx(float(logs[token]), abs=1e-4))
        assert [likely.token for likely in entry.top_logprobs] == [decode([i]) for i in best.indices.tolist()]
        assert [likely.logprob for likely in entry.top_logprobs] == pytest.approx(best.values.tolist(), abs=1e-4)
        assert (entry.top_logprobs[0].token, entry.top_logprobs[0].logprob) == (entry.token, entry.logprob)
    assert response.json()["choices"][0]["logprobs"].keys() == {"content", "refusal"}


def test_the_bytes_of_a_token_are_its_own_or_none(unguarded: tuple[httpx.Client, UserSimulator]) -> None:
    """They are there to be put together where a character is several tokens; here every token is one byte."""
    client, _ = unguarded
    found = [
        likely
        for seed in range(4)
        for entry in entries(ask(client, temperature=1, seed=seed, logprobs=True, top_logprobs=5))
        for likely in (entry, *entry["top_logprobs"])
        if likely["token"] not in SPECIALS
    ]
    assert any(likely["token"].isascii() for likely in found) and not all(likely["token"].isascii() for likely in found)
    assert all(likely["bytes"] is None or len(likely["bytes"]) == 1 for likely in found)


def test_asking_for_log_probabilities_changes_no_text(client: httpx.Client) -> None:
    """Not with a derived seed either: they draw nothing."""
    plain = ask(client, temperature=0.9)
    assert plain.json()["choices"][0]["logprobs"] is None
    for body in ({"logprobs": True}, {"logprobs": True, "top_logprobs": 5}, {"top_logprobs": 5}, {"logprobs": False}):
        response = ask(client, temperature=0.9, **body)
        assert content(response) == content(plain)
        if body.get("logprobs"):
            assert {len(entry["top_logprobs"]) for entry in entries(response)} == {body.get("top_logprobs", 0)}
        else:
            assert response.json()["choices"][0]["logprobs"] is None


def repeated(scores: Tensor, ids: list[int], penalty: float) -> Tensor:
    for token in set(ids):
        scores[token] = scores[token] / penalty if scores[token] > 0 else scores[token] * penalty
    return scores


def test_penalties_reach_the_engine(unguarded: tuple[httpx.Client, UserSimulator]) -> None:
    """As OpenAI defines presence and frequency, and transformers the one for repetition, which counts the prompt."""
    client, simulator = unguarded
    prompt = list(simulator.prepare(MESSAGES).request.prompt_ids)
    # A loop of two tokens, which penalties break up.
    loop = [token for token, _ in greedy_by_hand(simulator, n=2)]
    bias = {str(token): 4.0 for token in loop}

    def biased(scores: Tensor) -> Tensor:
        for token in loop:
            scores[token] += 4.0
        return scores

    def present(scores: Tensor, drawn: list[int]) -> Tensor:
        for token in set(drawn):
            scores[token] -= 2.5
        return biased(scores)

    def frequent(scores: Tensor, drawn: list[int]) -> Tensor:
        for token in drawn:
            scores[token] -= 1.5
        return biased(scores)

    cases: dict[str, tuple[dict[str, Any], Callable[[Tensor, list[int]], Tensor]]] = {
        "none": ({}, lambda scores, drawn: biased(scores)),
        "presence": ({"presence_penalty": 2.5}, present),
        "frequency": ({"frequency_penalty": 1.5}, frequent),
        "repetition": ({"repetition_penalty": 1.8}, lambda s, drawn: biased(repeated(s, prompt + drawn, 1.8))),
    }
    sequences = set()
    for body, change in cases.values():
        expected = greedy_by_hand(simulator, change)
        found = entries(ask(client, logprobs=True, logit_bias=bias, **body))
        assert [entry["logprob"] for entry in found] == pytest.approx(
            [float(logs[token]) for token, logs in expected], abs=1e-4
        )
        sequences.add(tuple(token for token, _ in expected))
    assert len(sequences) == len(cases), "each of them changes what is drawn"


def test_a_bias_forbids_and_forces_a_token(unguarded: tuple[httpx.Client, UserSimulator]) -> None:
    """Keys are strings in JSON."""
    client, simulator = unguarded
    (token, logs), *_ = greedy_by_hand(simulator)
    decode = simulator.lm.tokenizer.decode
    first, second = logs.topk(2).indices.tolist()
    assert first == token
    assert entries(ask(client, logprobs=True))[0]["token"] == decode([first])
    forbidden = entries(ask(client, logprobs=True, logit_bias={str(first): -100}))
    assert forbidden[0]["logprob"] == pytest.approx(float(logs[second]), abs=1e-4)
    x = simulator.lm.tokenizer("x").input_ids[0]
    assert content(ask(client, logit_bias={str(x): 100}, temperature=1)) == "x" * 12


@pytest.mark.parametrize("body", [{"min_p": 1}, {"top_k": 1}, {"top_p": 1e-6}, {"temperature": 1e-3}], ids=str)
def test_filters_reach_the_engine(unguarded: tuple[httpx.Client, UserSimulator], body: dict[str, Any]) -> None:
    """Each of these leaves the likeliest token alone."""
    client, _ = unguarded
    greedy = content(ask(client))
    assert content(ask(client, **{"temperature": 1, "seed": 1} | body)) == greedy
    assert content(ask(client, temperature=1, seed=1)) != greedy


def test_settings_go_with_the_reply(client: httpx.Client) -> None:
    """Contract 11."""
    body = {"min_p": 0.1, "top_k": 7, "presence_penalty": 0.5, "frequency_penalty": 0.25, "repetition_penalty": 1.1}
    sampling = ask(client, logit_bias={"5": -1}, **body).json()["traitbasis"]["sampling"]
    assert {name: sampling[name] for name in body} == body and sampling["logit_bias"] == {"5": -1}


# --- metrics ---


def metrics(client: httpx.Client) -> dict[str, float]:
    response = client.get("/metrics")
    assert response.status_code == 200 and response.headers["content-type"].startswith("text/plain")
    return {
        sample.name.removeprefix("traitbasis_"): sample.value
        for family in text_string_to_metric_families(response.text)
        for sample in family.samples
    }


def settled(client: httpx.Client) -> dict[str, float]:
    """The metrics once nothing runs: a row leaves right after its last event."""
    deadline = time.monotonic() + 10
    while (found := metrics(client))["requests_running"] and time.monotonic() < deadline:
        time.sleep(0.01)
    return found


def test_metrics_count_what_was_done(unguarded: tuple[httpx.Client, UserSimulator]) -> None:
    """Prometheus' text format: prompts, tokens, steps; counters only grow, and nothing runs afterwards."""
    client, simulator = unguarded
    messages = [*MESSAGES, {"role": "assistant", "content": "Refund!"}, {"role": "user", "content": "Which order?"}]
    before = settled(client)
    plain = ask(client, messages=messages).json()["usage"]
    middle = settled(client)
    steered = ask(client, messages=messages, traits="impatience-low", temperature=1).json()["usage"]
    after = settled(client)

    def grown(name: str) -> tuple[float, float]:
        return middle[f"{name}_total"] - before[f"{name}_total"], after[f"{name}_total"] - middle[f"{name}_total"]

    assert grown("prompt_tokens") == (plain["prompt_tokens"], steered["prompt_tokens"])
    assert grown("generated_tokens") == (plain["completion_tokens"], steered["completion_tokens"])
    assert grown("decode_steps") == (plain["completion_tokens"], steered["completion_tokens"])
    assert grown("steered_tokens") == (0, steered["completion_tokens"])
    first, again = grown("prompt_tokens_cached")
    assert first < again and again >= steered["prompt_tokens"] - 33, "the same prompt again, and whole blocks"
    assert grown("prefix_cache_evictions") == (0, 0)
    assert after["requests_running"] == after["requests_waiting"] == 0
    stats = simulator.engine.stats()
    assert after["requests_running_limit"] == stats.max_batch == 32
    assert after["requests_waiting_limit"] == stats.max_queue == 256
    assert 0 < before["prefix_cache_bytes"] < after["prefix_cache_bytes"] <= after["prefix_cache_bytes_limit"] == 2**30


def test_metrics_tell_what_is_running(unguarded: tuple[httpx.Client, UserSimulator]) -> None:
    """And answer meanwhile; a client that goes away takes its request with it (contract 6)."""
    client, _ = unguarded
    body = {"model": "steered-user", "messages": MESSAGES, "max_tokens": 1900, "temperature": 1, "stream": True}
    bias = {"logit_bias": {str(END): -100}}
    assert settled(client)["requests_running"] == 0
    with client.stream("POST", "/v1/chat/completions", json=body | bias) as response:
        lines = response.iter_lines()
        while '"content": "' not in (line := next(lines)) or '"content": ""' in line:
            pass
        assert metrics(client)["requests_running"] == 1
    assert settled(client)["requests_running"] == 0


def test_two_applications_in_one_process_have_metrics_of_their_own(
    client: httpx.Client, unguarded: tuple[httpx.Client, UserSimulator]
) -> None:
    before = settled(client)
    content(ask(unguarded[0]))
    assert settled(client) == before


def test_an_engine_that_is_closed_leaves_nobody_waiting() -> None:
    """Whoever runs and whoever waits for a place is told, and a server error it is."""
    lm = tiny_model()
    engine = TransformersEngine(lm, max_batch=1)
    simulator = UserSimulator(lm, random_basis(lm, "impatience"), engine=engine, guards=())
    body = {"max_tokens": 1900, "logit_bias": {str(END): -100}, "temperature": 1}
    with (
        serving(create_app(simulator)) as url,
        httpx.Client(base_url=url, timeout=5) as client,
        ThreadPoolExecutor(3) as pool,
    ):
        asked = [pool.submit(ask, client, seed=seed, **body) for seed in range(3)]
        deadline = time.monotonic() + 5
        while engine.stats().running + engine.stats().waiting < 3 and time.monotonic() < deadline:
            time.sleep(0.01)
        engine.close()
        assert [future.result().status_code for future in asked] == [503] * 3


# --- engines that misbehave ---


class StubbornEngine:
    """Refuses, fails, or never ends until it is cancelled, and counts how often it was."""

    def __init__(self, behaviour: str) -> None:
        self.behaviour = behaviour
        self.cancelled = 0
        self.listeners: list[Listener] = []

    def submit(self, request: Request, listener: Listener, *, again: bool = False) -> StubbornEngine:
        if self.behaviour == "busy":
            raise EngineBusyError("256 requests are waiting already; try again later")
        if self.behaviour == "failing":
            listener(Failure(EngineError("out of memory at 0x1234")))
        else:
            listener(Event(5, "still"))
            self.listeners.append(listener)
        return self

    def cancel(self) -> None:
        self.cancelled += 1
        while self.listeners:
            self.listeners.pop()(Event(None, "", "cancelled"))

    def stats(self) -> EngineStats:
        return EngineStats(max_batch=1, max_queue=256, max_context=None)

    def close(self) -> None:
        pass


def with_engine(engine: StubbornEngine) -> UserSimulator:
    lm = tiny_model()
    return UserSimulator(lm, random_basis(lm, "impatience"), engine=engine)


def test_a_full_queue_is_429_with_retry_after() -> None:
    """1.5.7: never prose in a 200 (fault 38 of the harness contract)."""
    with serving(create_app(with_engine(StubbornEngine("busy")))) as url, httpx.Client(base_url=url) as client:
        for body in ({}, {"stream": True}):
            response = ask(client, **body)
            assert response.status_code == 429 and int(response.headers["retry-after"]) >= 1
            assert response.json()["error"]["type"] == "rate_limit_error"


def test_a_failing_engine_is_500_without_its_details() -> None:
    with serving(create_app(with_engine(StubbornEngine("failing")))) as url, httpx.Client(base_url=url) as client:
        response = ask(client)
        assert response.status_code == 500 and "0x1234" not in response.text
        assert response.json()["error"]["type"] == "server_error"
        streamed = ask(client, stream=True).text.strip().split("\n\n")
        assert "error" in json.loads(streamed[-2].removeprefix("data: ")) and streamed[-1] == "data: [DONE]"


@pytest.mark.parametrize("stream", [False, True])
def test_a_client_that_goes_away_cancels_its_generation(stream: bool) -> None:
    """Contract 6."""
    engine = StubbornEngine("endless")
    with serving(create_app(with_engine(engine))) as url:
        with httpx.Client(base_url=url, timeout=0.5) as client, pytest.raises(httpx.ReadTimeout):
            ask(client, stream=stream)
        deadline = time.monotonic() + 5
        while not engine.cancelled and time.monotonic() < deadline:
            time.sleep(0.05)
    assert engine.cancelled
