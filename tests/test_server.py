"""The HTTP surface on a tiny model: shapes, errors, trait channels, streaming, disconnects.

Numbers such as "1.5.6" are the items of docs/harness-contract.md that a test shows.
"""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch
from serving import serving
from tiny import LAYERS, WIDTH, tiny_model
from traitbasis.server import create_app

from traitbasis.basis import Basis, build_basis
from traitbasis.engines.base import Event, Failure, Listener, Request, Sampling
from traitbasis.errors import EngineBusyError, EngineError
from traitbasis.model import LanguageModel
from traitbasis.simulator import UserSimulator
from traitbasis.trait_vector import Provenance, TraitVector

MESSAGES = [
    {"role": "system", "content": "You are a customer. Your order is #W1."},
    {"role": "user", "content": "Hi! How can I help you today?"},
]


def random_basis(lm: LanguageModel, *traits: str, dose: float = 2.0) -> Basis:
    """Random directions that pass for vectors of `lm`, large enough to change its text."""
    provenance = Provenance(
        model=lm.name,
        model_fingerprint=lm.fingerprint,
        template_hash=lm.template_hash,
        as_="user",
        span="response",
        pair_set_hash="0",
        pair_ids=("a",),
        dtype="float32",
        traitbasis_version="0",
        transformers_version="0",
        torch_version="0",
    )
    vectors = [
        TraitVector(
            trait=trait,
            vector=torch.randn(LAYERS, WIDTH, generator=torch.Generator().manual_seed(i)),
            layer_norms=torch.ones(LAYERS) * 5,
            agreement=torch.ones(LAYERS),
            provenance=provenance,
            aliases=("skepticism",) if trait == "skeptical" else (),
        )
        for i, trait in enumerate(traits)
    ]
    return build_basis(vectors, dose=dose)


@pytest.fixture(scope="module")
def simulator() -> Iterator[UserSimulator]:
    lm = tiny_model()
    basis = random_basis(lm, "impatience", "skeptical")
    with UserSimulator(lm, basis, sampling=Sampling(max_tokens=12)) as simulator:
        yield simulator


@pytest.fixture(scope="module")
def client(simulator: UserSimulator) -> Iterator[httpx.Client]:
    with serving(create_app(simulator)) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def ask(client: httpx.Client, **body: Any) -> httpx.Response:
    return client.post("/v1/chat/completions", json={"model": "steered-user", "messages": MESSAGES, **body})


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
        ({"messages": []}, 400, None, ["messages"]),
        ({"messages": "hello"}, 400, "messages", ["list"]),
        ({"messages": [{"role": "wizard", "content": "x"}]}, 400, None, ["wizard", "assistant"]),
        ({"messages": [{"role": "user", "content": [{"type": "image_url"}]}]}, 400, None, ["image_url"]),
        ({"temperature": -1}, 400, None, ["temperature", "-1"]),
        ({"top_p": 0}, 400, None, ["top_p"]),
        ({"max_tokens": 0}, 400, None, ["max_tokens"]),
        ({"n": 17}, 400, None, ["n is 17", "16"]),
        ({"stop": ""}, 400, None, ["stop"]),
        ({"response_format": {"type": "json_object"}}, 400, None, ["json_object"]),
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


class StubbornEngine:
    """Refuses, fails, or never ends, and remembers what was cancelled."""

    def __init__(self, behaviour: str) -> None:
        self.behaviour = behaviour
        self.cancelled = 0

    def submit(self, request: Request, listener: Listener) -> StubbornEngine:
        if self.behaviour == "busy":
            raise EngineBusyError("256 requests are waiting already; try again later")
        if self.behaviour == "failing":
            listener(Failure(EngineError("out of memory at 0x1234")))
        else:
            listener(Event(5, "still"))
        return self

    def cancel(self) -> None:
        self.cancelled += 1

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
