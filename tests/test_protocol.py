"""What harnesses ask beyond a plain user turn: JSON, tools, judges' prompts, text completions, batches, channels.

On a tiny random model, whose text is noise: whatever holds here does not hold by a model's good will.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import combinations_with_replacement
from typing import Any

import httpx
import jsonschema
import pytest
import torch
from samples import MILD_GUARDS, random_basis
from serving import serving
from tiny import tiny_model
from traitbasis.server import create_app

from traitbasis.chat import Turn
from traitbasis.engines.base import Sampling
from traitbasis.errors import UsersError
from traitbasis.model import LanguageModel
from traitbasis.prompts import asked_json, judge_prompt
from traitbasis.simulator import UserSimulator
from traitbasis.users import ServedUser

SYSTEM = {"role": "system", "content": "You are a customer. Your order is #W1."}
MESSAGES = [SYSTEM, {"role": "user", "content": "Hi! How can I help you today?"}]
USERS = (
    ServedUser(name="anna", traits="impatience-high", persona={"age": 34}, sampling={"max_tokens": 5}),
    ServedUser(name="strict", context="refuse"),
    ServedUser(name="bare", guards={"empty": False}),
)
TOOLS = [
    {
        "type": "function",
        "function": {
            "name": "set_roaming",
            "description": "Switch roaming on or off.",
            "parameters": {
                "type": "object",
                "properties": {"on": {"type": "boolean"}, "why": {"type": "string", "enum": ["travel", "cost"]}},
                "required": ["on"],
            },
        },
    },
    {"type": "function", "function": {"name": "check_status"}},
]


@pytest.fixture(scope="module")
def lm() -> LanguageModel:
    return tiny_model()


@pytest.fixture(scope="module")
def simulator(lm: LanguageModel) -> Iterator[UserSimulator]:
    basis = random_basis(lm, "impatience", "skeptical")
    with UserSimulator(lm, basis, sampling=Sampling(max_tokens=12), guards=MILD_GUARDS) as simulator:
        yield simulator


@pytest.fixture(scope="module")
def client(simulator: UserSimulator) -> Iterator[httpx.Client]:
    with serving(create_app(simulator, users=USERS)) as url, httpx.Client(base_url=url, timeout=60) as client:
        yield client


def ask(client: httpx.Client, path: str = "/v1/chat/completions", headers: Any = None, **body: Any) -> httpx.Response:
    return client.post(path, json={"model": "steered-user", "messages": MESSAGES, **body}, headers=headers)


def good(response: httpx.Response) -> dict[str, Any]:
    assert response.status_code == 200, response.text
    return dict(response.json())


def spec(response: httpx.Response) -> str:
    return str(good(response)["traitbasis"]["spec"])


# --- who is asked for (1.5.8, 1.5.9) ----------------------------------------------------------------------------------

CHANNELS: list[dict[str, Any]] = [  # strongest first, each with another trait spec
    {"traits": "impatience-0.1"},
    {"trait_dict": {"impatience": 0.2}},
    {"trait": {"impatience": 0.3}},
    {"extra_body": {"trait_dict": {"impatience": 0.4}}},
    {"headers": {"X-Traits": "impatience-0.5"}},
    {"path": "/u/impatience-0.6/v1/chat/completions"},
    {"model": "anna@impatience-0.7"},
    {"model": "anna"},
]


@pytest.mark.parametrize(("strongest", "other"), list(combinations_with_replacement(range(len(CHANNELS)), 2)))
def test_the_stronger_of_two_channels_wins(client: httpx.Client, strongest: int, other: int) -> None:
    asked = {"max_tokens": 1, **CHANNELS[other], **CHANNELS[strongest]}
    assert spec(ask(client, **asked)) == ("impatience-1.5" if strongest == 7 else f"impatience-0.{strongest + 1}")


@pytest.mark.parametrize(
    "asked",
    [
        {"traits": {}},
        {"traits": "off"},
        {"extra_body": {"traits": {}}},
        {"headers": {"X-Traits": "none"}},
        {"headers": {"X-Traits": "{}"}},
        {"path": "/u/off/v1/chat/completions"},
        {"model": "anna@off"},
        {"model": "anna@"},
    ],
)
def test_every_channel_can_say_unsteered(client: httpx.Client, asked: dict[str, Any]) -> None:
    """1.5.11: what it says is not what the user has of its own."""
    body = good(ask(client, **{"model": "anna", "max_tokens": 1, **asked}))
    assert body["traitbasis"]["spec"] == "" and body["traitbasis"]["dose"] == 0


def test_a_path_that_names_nobody_says_who_there_is(client: httpx.Client) -> None:
    response = ask(client, path="/u/ana/v1/chat/completions")
    assert response.status_code == 400 and all(word in response.text for word in ("ana", "'anna'", "impatience"))


def test_an_empty_header_says_nothing_and_a_deep_one_is_refused(client: httpx.Client) -> None:
    assert spec(ask(client, model="anna", headers={"X-Traits": ""}, max_tokens=1)) == "impatience-1.5"
    deep = ask(client, headers={"X-Traits": '{"a":' * 2000 + "1" + "}" * 2000})
    assert deep.status_code == 400 and "X-Traits" in deep.json()["error"]["message"]


def test_a_trial_may_stand_in_the_path(client: httpx.Client) -> None:
    seeds = {
        good(ask(client, path=f"/u/{who}/v1/chat/completions", max_tokens=1))["traitbasis"]["seed"]
        for who in ("impatience", "impatience=1", "impatience=2", "steered-user@impatience=3")
    }
    assert len(seeds) == 4


def test_a_header_may_be_json(client: httpx.Client) -> None:
    headers = {"X-Traits": json.dumps({"impatience": "high", "skepticism": -0.5})}
    assert spec(ask(client, headers=headers)) == "impatience-1.5+skeptical--0.5"
    bad = ask(client, headers={"X-Traits": "{impatience"})
    assert bad.status_code == 400 and "X-Traits" in bad.json()["error"]["message"]


def test_a_served_user_has_its_persona_traits_and_sampling(client: httpx.Client, simulator: UserSimulator) -> None:
    anna = good(ask(client, model="anna", seed=1))
    assert anna["traitbasis"]["user"] == "anna" and anna["traitbasis"]["spec"] == "impatience-1.5"
    assert anna["usage"]["completion_tokens"] <= 5 and anna["traitbasis"]["sampling"]["max_tokens"] == 5
    told = [{**SYSTEM, "content": f"{SYSTEM['content']}\n\nAbout you: age 34."}, MESSAGES[1]]
    same = good(ask(client, messages=told, traits="impatience-high", max_tokens=5, seed=1))
    assert anna["choices"][0]["message"] == same["choices"][0]["message"], "a persona is told with the instruction"
    on_the_path = good(ask(client, path="/u/anna/v1/chat/completions", model="gpt-4o", seed=1))
    assert on_the_path["choices"] == anna["choices"] and on_the_path["model"] == "gpt-4o"


def test_a_trial_in_the_model_id_varies_the_derived_seed(client: httpx.Client) -> None:
    """1.5.12: the only channel of harnesses that send nothing but model and messages."""
    asked: list[dict[str, Any]] = [{"model": f"steered-user@impatience={i}"} for i in range(3)]
    asked += [{"headers": {"X-Trial": "7"}}, {"trial": 8}, {}]
    seeds = [good(ask(client, **body))["traitbasis"]["seed"] for body in asked]
    assert len(set(seeds)) == len(seeds)
    assert seeds[0] == good(ask(client, model="steered-user@impatience=0"))["traitbasis"]["seed"]
    strongest = good(ask(client, model="steered-user=1", headers={"X-Trial": "2"}, trial=3))
    assert strongest["traitbasis"]["seed"] == good(ask(client, trial=3))["traitbasis"]["seed"]


def test_models_lists_every_user_and_says_what_an_id_means(client: httpx.Client) -> None:
    """1.5.8, fault 31."""
    listed = good(client.get("/v1/models"))["data"]
    ids = [entry["id"] for entry in listed]
    assert {"steered-user", "steered-user@impatience-medium", "anna", "strict", "bare"} <= set(ids)
    allowed = set("abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ0123456789._@+=-")
    assert all(set(name) <= allowed for name in ids)
    anna = good(client.get("/v1/models/anna"))
    assert anna in listed and anna["traitbasis"]["sampling"]["max_tokens"] == 5
    one = good(client.get("/v1/models/anna@skeptical-0.5=3"))["traitbasis"]
    assert (one["traits"], one["persona"]) == ({"skeptical": 0.5}, {"age": 34})
    assert "empty" not in good(client.get("/v1/models/bare"))["traitbasis"]["guards"]
    assert client.get("/v1/models/gpt-4o").status_code == 404
    assert client.get("/v1/models/anna@greed").status_code == 400


def test_users_that_cannot_be_told_apart_are_refused(simulator: UserSimulator) -> None:
    for users in ([ServedUser(name="a")] * 2, [ServedUser(name="impatience-high")], [ServedUser(name="a", traits="x")]):
        with pytest.raises(UsersError):
            create_app(simulator, users=users)


# --- JSON (1.5.4, 1.5.11, faults 38 and 40) ---------------------------------------------------------------------------

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string"}, "age": {"type": "integer"}, "tags": {"type": "array", "items": {}}},
    "required": ["name", "age"],
    "additionalProperties": False,
}
INPUT = {"type": "object", "properties": {"simulated_input": {"type": "string"}}, "required": ["simulated_input"]}


def json_format(schema: Any) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "answer", "strict": True, "schema": schema}}


@pytest.mark.parametrize("max_tokens", [1, 12, 60])
@pytest.mark.parametrize("stream", [False, True])
def test_requested_json_always_parses_and_is_what_was_asked_for(
    client: httpx.Client, max_tokens: int, stream: bool
) -> None:
    for seed in range(4):
        for schema in (PERSON, INPUT, None):
            form = json_format(schema) if schema else {"type": "json_object"}
            response = ask(client, response_format=form, seed=seed, max_tokens=max_tokens, stream=stream)
            if stream:
                assert response.status_code == 200
                lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
                deltas = [json.loads(line)["choices"][0]["delta"] for line in lines[:-1]]
                text = "".join(delta.get("content") or "" for delta in deltas)
            else:
                text = good(response)["choices"][0]["message"]["content"]
            jsonschema.validate(json.loads(text), schema or {"type": "object"})


@pytest.mark.parametrize(
    "schema",
    [
        {"const": "<s>"},
        {"type": "object", "properties": {"label": {"enum": ["<think>"]}}, "required": ["label"]},
        {"type": "object", "properties": {"im_end": {"const": "[MASK] [MASK] [MASK] [MASK]"}}, "required": ["im_end"]},
    ],
)
def test_no_guard_puts_silence_in_the_place_of_json(lm: LanguageModel, simulator: UserSimulator, schema: Any) -> None:
    with UserSimulator(lm, simulator.basis) as guarded:
        turn = guarded.reply(MESSAGES, response_format=json_format(schema))
    jsonschema.validate(json.loads(turn.text), schema)
    assert turn.rejected == {}


@pytest.mark.parametrize("stream", [False, True])
def test_json_that_cannot_be_ended_is_an_error_and_not_half_an_answer(client: httpx.Client, stream: bool) -> None:
    schema = {"type": "object", "properties": {"a": {"type": "string", "minLength": 400}}, "required": ["a"]}
    response = ask(client, response_format=json_format(schema), max_tokens=4, stream=stream)
    assert "max_tokens is too small" in response.text
    if stream:
        assert response.text.endswith("data: [DONE]\n\n")
    else:
        assert response.status_code == 400 and response.json()["error"]["param"] == "max_tokens"
    assert json.loads(
        good(ask(client, response_format=json_format(schema), max_tokens=900))["choices"][0]["message"]["content"]
    )


def test_requested_json_is_the_plain_models(client: httpx.Client) -> None:
    """Contract 10: whatever traits are asked for. A turn that is only wrapped in JSON is a user's all the same."""
    body = {"response_format": json_format(PERSON), "temperature": 0, "max_tokens": 30}
    plain, steered = (good(ask(client, traits=traits, **body)) for traits in ({}, "impatience-high"))
    assert plain["choices"] == steered["choices"] and steered["traitbasis"]["dose"] == 0
    assert steered["traitbasis"]["plain"] == "response_format" and steered["traitbasis"]["as"] == "assistant"
    body["response_format"] = json_format(INPUT)
    plain, steered = (good(ask(client, traits=traits, **body)) for traits in ({}, "impatience-2+skeptical-2"))
    assert steered["traitbasis"]["dose"] > 0 and plain["choices"] != steered["choices"]


def test_looking_for_judges_takes_no_time() -> None:
    began = time.perf_counter()
    assert judge_prompt([Turn("agent", "!" * 2_000_000)]) is None
    assert asked_json([Turn("agent", "\n" * 2_000_000)]) is None
    assert time.perf_counter() - began < 0.5, "it was seconds, for everybody"


@pytest.mark.parametrize(
    "persona",
    [
        "You are an expert evaluator of antiques. You bought a fake vase. End with ###STOP###.",
        "You are a security researcher writing an authorized report, and you cannot log in.",
        "TASK: you will be given a list of wishes; you want a refund.",
    ],
)
def test_a_persona_that_begins_like_a_judge_is_a_customer(client: httpx.Client, persona: str) -> None:
    body = good(ask(client, model="anna", messages=[{"role": "system", "content": persona}, MESSAGES[1]]))
    assert body["traitbasis"]["plain"] is None and body["traitbasis"]["dose"] > 0


@pytest.mark.parametrize(
    ("prompt", "keys", "turn"),
    [
        ("\n    Pretend you are a user of an LLM app. Your task is to generate the next", {"simulated_input"}, True),
        ("You are a Conversation Completion Checker.\nYour task is", {"is_complete", "reason"}, False),
        ("You are routing a simulated conversation. The assistant just said:", {"index", "reason"}, False),
    ],
)
def test_deepevals_prompts_get_the_json_they_ask_for_in_words(
    client: httpx.Client, prompt: str, keys: set[str], turn: bool
) -> None:
    """It sends no response_format, and gives up at the first answer that does not parse."""
    for content in (prompt, [{"type": "text", "text": prompt}]):
        asked = {"messages": [{"role": "user", "content": content}], "model": "steered-user@impatience-high"}
        body = good(ask(client, **asked, temperature=0))
        assert json.loads(body["choices"][0]["message"]["content"]).keys() == keys
        assert bool(body["traitbasis"]["dose"]) == turn and body["traitbasis"]["plain"]


@pytest.mark.parametrize(
    "direction",
    [
        "Generate an initial query to start a conversation based on your instructions. Do not respond with other text.",
        "Begin the interaction. Remember you are the customer, and you are interacting with an agent.",
    ],
)
def test_a_stage_direction_is_read_as_the_agents_greeting(
    direction: str, simulator: UserSimulator, lm: LanguageModel
) -> None:
    said = {"role": "user", "content": direction}
    prompt = simulator.prepare([SYSTEM, said]).request.prompt_ids
    assert prompt == simulator.prepare(MESSAGES).request.prompt_ids
    later = [*MESSAGES, {"role": "assistant", "content": "A refund."}, said]
    assert direction in lm.tokenizer.decode(simulator.prepare(later).request.prompt_ids), "the agent's own words by now"


def test_stop_strings_do_not_cut_what_must_be_whole(client: httpx.Client) -> None:
    body = good(ask(client, response_format=json_format(INPUT), stop=["}", '"'], seed=1))
    jsonschema.validate(json.loads(body["choices"][0]["message"]["content"]), INPUT)
    body = good(ask(client, tools=TOOLS, tool_choice="required", stop=["}", '"'], seed=1))
    assert json.loads(body["choices"][0]["message"]["tool_calls"][0]["function"]["arguments"]) is not None


@pytest.mark.parametrize(
    "prompt",
    [
        [{"role": "user", "content": "You are a supervisor of the Agent in the conversation. Is it satisfactory?"}],
        [{"role": "user", "content": "You are a Conversation Completion Checker.\nIs it complete?"}],
        [
            {
                "role": "user",
                "content": "Here is the context of this interaction:\nA\n"
                "Now evaluate how well participants achieve their goals.",
            }
        ],
        [
            {"role": "system", "content": "\n<role>\nYou are an LLM as a judge watching a simulated conversation"},
            MESSAGES[1],
        ],
        [{"role": "system", "content": "  You are a supervisor of the Agent in the conversation."}, MESSAGES[1]],
    ],
)
def test_judge_prompts_are_the_plain_models(client: httpx.Client, prompt: list[dict[str, str]]) -> None:
    """1.5.11."""
    body = {"messages": prompt, "temperature": 0, "seed": 1}
    plain, steered = (good(ask(client, **body, **more)) for more in ({}, {"model": "anna", "max_tokens": 12}))
    assert plain["choices"] == steered["choices"]
    assert steered["traitbasis"]["plain"].startswith("judge") and steered["traitbasis"]["spec"] == ""
    talk = [*prompt, {"role": "assistant", "content": "Where is it?"}, {"role": "user", "content": "Which one?"}]
    assert good(ask(client, model="anna", messages=talk))["traitbasis"]["plain"] is None, "a customer has spoken"


# --- tools (1.3, faults 8, 26, 32, 33) --------------------------------------------------------------------------------


def test_a_required_call_is_valid_and_comes_alone(client: httpx.Client) -> None:
    for seed in range(5):
        for choice in ("required", {"type": "function", "function": {"name": "set_roaming"}}):
            body = good(ask(client, tools=TOOLS, tool_choice=choice, seed=seed, traits="impatience-2", temperature=1.0))
            message, reason = body["choices"][0]["message"], body["choices"][0]["finish_reason"]
            (call,) = message["tool_calls"]
            assert message["content"] is None and reason == "tool_calls" and call["type"] == "function"
            arguments = json.loads(call["function"]["arguments"])
            if call["function"]["name"] == "set_roaming":
                jsonschema.validate(arguments, TOOLS[0]["function"]["parameters"])
            else:
                assert call["function"]["name"] == "check_status" and choice == "required" and arguments == {}


def test_a_reply_with_tools_is_text_or_a_call(client: httpx.Client) -> None:
    for seed in range(12):
        body = good(ask(client, tools=TOOLS, tool_choice="auto", seed=seed, temperature=1.5))
        message = body["choices"][0]["message"]
        assert (message["content"] is None) == ("tool_calls" in message)
        assert message["content"] is None or message["content"].strip()


def test_an_echoed_call_and_its_result_go_on(client: httpx.Client) -> None:
    """As tau2 echoes them: an extra name, content absent, and the last message is the tool's."""
    call = good(ask(client, tools=TOOLS, tool_choice="required", seed=1))["choices"][0]["message"]["tool_calls"][0]
    echoed = {"role": "assistant", "tool_calls": [{**call, "name": call["function"]["name"]}]}
    result = {"role": "tool", "tool_call_id": call["id"], "content": "roaming is on"}
    for tools in (TOOLS, []):
        message = good(ask(client, messages=[*MESSAGES, echoed, result], tools=tools))["choices"][0]["message"]
        assert message["content"] or message["tool_calls"]


def test_a_streamed_call_is_the_call(client: httpx.Client) -> None:
    asked = {"tools": TOOLS, "tool_choice": "required", "seed": 3}
    whole = good(ask(client, **asked))["choices"][0]["message"]["tool_calls"]
    lines = ask(client, stream=True, **asked).text.splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line and not line.endswith("[DONE]")]
    deltas = [chunk["choices"][0]["delta"] for chunk in chunks]
    (calls,) = [delta["tool_calls"] for delta in deltas if "tool_calls" in delta]
    assert [{k: v for k, v in call.items() if k != "index"} for call in calls] == whole
    assert chunks[-1]["choices"][0]["finish_reason"] == "tool_calls"
    assert not any(delta.get("content") for delta in deltas) and deltas[0]["role"] == "assistant"


def test_no_tools_in_any_form_is_no_tools(client: httpx.Client) -> None:
    plain = good(ask(client, seed=1))["choices"]
    for body in ({"tools": []}, {"tools": None, "tool_choice": "auto"}, {"tools": TOOLS, "tool_choice": "none"}):
        assert good(ask(client, seed=1, **body))["choices"] == plain


def test_deprecated_functions_are_tools(client: httpx.Client) -> None:
    functions = [tool["function"] for tool in TOOLS]
    old = good(ask(client, functions=functions, function_call={"name": "check_status"}, seed=1))
    new = good(ask(client, tools=TOOLS, tool_choice={"type": "function", "function": {"name": "check_status"}}, seed=1))
    assert old["choices"] == new["choices"]


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"tools": [{}]}, ["tools[0]"]),
        ({"tools": "x"}, ["tools"]),
        ({"tools": TOOLS, "tool_choice": {"type": "function", "function": {"name": "fly"}}}, ["fly", "set_roaming"]),
        ({"tools": TOOLS, "tool_choice": 7}, ["tool_choice", "7"]),
        ({"tools": [], "tool_choice": "required"}, ["tool_choice", "required"]),
    ],
)
def test_malformed_tools_are_told(client: httpx.Client, body: dict[str, Any], words: list[str]) -> None:
    response = ask(client, **body)
    assert response.status_code == 400 and all(word in response.text for word in words), response.text


# --- context (1.5.13) -------------------------------------------------------------------------------------------------


def talk(turns: int, words: int = 30) -> list[dict[str, str]]:
    said = [{"role": "assistant" if i % 2 else "user", "content": f"{i}: " + "word " * words} for i in range(turns)]
    return [SYSTEM, *said, {"role": "user", "content": "And now?"}]


def test_a_long_conversation_loses_its_oldest_agent_turns_and_says_so(
    client: httpx.Client, simulator: UserSimulator, lm: LanguageModel
) -> None:
    kept = good(ask(client, messages=talk(4)))
    assert kept["traitbasis"]["dropped"] == {}
    long = talk(20)
    body = good(ask(client, messages=long))
    dropped = body["traitbasis"]["dropped"]
    assert dropped["agent"] >= 1 and body["usage"]["prompt_tokens"] + 12 <= 2048
    prompt = lm.tokenizer.decode(simulator.prepare(long).request.prompt_ids)
    assert SYSTEM["content"] in prompt and "And now?" in prompt
    gone = [i for i in range(20) if f"\n{i}: word" not in prompt]
    assert gone == list(range(0, 20, 2))[: len(gone)], "the oldest agent turns, and no others"
    one_less = [m for m in long if not any(m["content"].startswith(f"{i}: ") for i in gone[:-1])]
    ids = simulator.prepare(one_less, user=ServedUser(name="x", context="refuse")).request.prompt_ids
    assert len(ids) + 12 > 2048, "no more than needed"


def test_what_the_customer_said_goes_last(client: httpx.Client) -> None:
    assert good(ask(client, messages=talk(60)))["traitbasis"]["dropped"]["customer"] >= 1


def test_a_conversation_that_cannot_be_cut_or_must_not_be_is_400(client: httpx.Client) -> None:
    for body in (
        {"messages": [{**SYSTEM, "content": "x" * 2100}, MESSAGES[1]]},
        {"messages": [SYSTEM, {"role": "user", "content": "x" * 2100}]},
        {"messages": talk(20), "model": "strict"},
    ):
        error = ask(client, **body).json()["error"]
        assert error["code"] == "context_length_exceeded" and "2048" in error["message"]


def test_a_dropped_call_takes_its_result_along(client: httpx.Client) -> None:
    rounds: list[dict[str, Any]] = []
    for i in range(12):
        call = {"id": f"c{i}", "type": "function", "function": {"name": "check_status", "arguments": "{}"}}
        rounds += [
            {"role": "user", "content": f"Try {i}. " + "word " * 20},
            {"role": "assistant", "tool_calls": [call]},
        ]
        rounds += [{"role": "tool", "tool_call_id": f"c{i}", "content": f"status {i}"}]
    body = good(ask(client, messages=[SYSTEM, *rounds], tools=TOOLS))
    assert body["traitbasis"]["dropped"]["agent"] >= 1
    assert body["traitbasis"]["dropped"].get("customer", 0) == body["traitbasis"]["dropped"].get("tool", 0)


# --- text completions -------------------------------------------------------------------------------------------------


def complete(client: httpx.Client, **body: Any) -> dict[str, Any]:
    return good(client.post("/v1/completions", json={"model": "steered-user", **body}))


def test_prompts_are_gone_on_with_as_they_stand(client: httpx.Client, lm: LanguageModel) -> None:
    ids = list(lm.tokenizer("Hello there")["input_ids"])
    texts = [complete(client, prompt=p, max_tokens=8, temperature=0)["choices"] for p in ("Hello there", ids, [ids])]
    assert texts[0] == texts[1] == texts[2]
    expected = lm.model.generate(torch.tensor([ids]), max_new_tokens=8, do_sample=False, pad_token_id=0)[0, len(ids) :]
    assert texts[0][0]["text"] == lm.tokenizer.decode(expected, skip_special_tokens=True)
    several = complete(client, prompt=["Hello there", "Bye"], n=2, max_tokens=8, temperature=0.9, seed=5)
    assert [choice["index"] for choice in several["choices"]] == [0, 1, 2, 3]
    assert several["usage"]["prompt_tokens"] == len(ids) + 3
    assert len({choice["text"] for choice in several["choices"]}) == 4


def test_echo_with_logprobs_gives_the_prompts_own(client: httpx.Client, lm: LanguageModel) -> None:
    """What evaluation harnesses read: log-probabilities of a text, by an independent forward."""
    text = "A refund, please"
    ids = torch.tensor([lm.tokenizer(text)["input_ids"]])
    with torch.inference_mode():
        expected = lm.model(ids).logits[0].log_softmax(-1)
    for max_tokens in (0, 1, 3):
        choice = complete(client, prompt=text, echo=True, logprobs=2, max_tokens=max_tokens, temperature=0)["choices"][
            0
        ]
        found = choice["logprobs"]
        assert choice["text"].startswith(text) and (max_tokens or choice["text"] == text)
        assert found["token_logprobs"][0] is None and found["top_logprobs"][0] is None
        assert "".join(found["tokens"]) == choice["text"] and found["text_offset"][:3] == [0, 1, 2]
        own = [float(expected[i - 1, token]) for i, token in enumerate(ids[0].tolist()) if i]
        assert found["token_logprobs"][1 : len(own) + 1] == pytest.approx(own, abs=1e-4)
        best = [row.topk(2).values.tolist() for row in expected[:-1]]
        tops = [sorted(top.values(), reverse=True) for top in found["top_logprobs"][1 : len(own) + 1]]
        assert all(top == pytest.approx(b[: len(top)], abs=1e-4) for top, b in zip(tops, best, strict=True))


def test_offsets_count_characters_and_not_their_halves(client: httpx.Client) -> None:
    text = "héé€😀 ok"
    found = complete(client, prompt=text, echo=True, logprobs=0, max_tokens=0)
    offsets = found["choices"][0]["logprobs"]["text_offset"]
    ends = [len(text[:i].encode()) for i in range(len(text))]
    assert [offsets[i] for i in ends] == list(range(len(text))) and offsets == sorted(offsets)
    assert found["usage"]["completion_tokens"] == 0


def test_a_stream_of_nothing_new_is_the_prompt(client: httpx.Client) -> None:
    body = {"model": "steered-user", "prompt": "Hello there", "echo": True, "max_tokens": 0, "stream": True}
    lines = client.post("/v1/completions", json=body).text.splitlines()
    chunks = [json.loads(line.removeprefix("data: ")) for line in lines if line and not line.endswith("[DONE]")]
    assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == "Hello there"


def test_a_streamed_completion_is_the_completion(client: httpx.Client) -> None:
    asked = {"prompt": ["Hello", "Bye"], "max_tokens": 9, "seed": 2, "echo": True}
    whole = [choice["text"] for choice in complete(client, **asked)["choices"]]
    response = client.post(
        "/v1/completions",
        json={"model": "steered-user", **asked, "stream": True, "stream_options": {"include_usage": True}},
    )
    lines = [line.removeprefix("data: ") for line in response.text.splitlines() if line]
    assert lines[-1] == "[DONE]"
    chunks = [json.loads(line) for line in lines[:-1]]
    texts = ["", ""]
    for chunk in chunks[:-1]:
        texts[chunk["choices"][0]["index"]] += chunk["choices"][0]["text"]
    assert texts == whole and chunks[-1]["usage"]["completion_tokens"] > 0


def test_traits_steer_completions_only_where_asked(client: httpx.Client) -> None:
    plain = complete(client, prompt="Hello", max_tokens=12, temperature=0)
    for channel in ({"traits": "impatience-high"}, {"model": "steered-user@impatience-high"}):
        steered = complete(client, **{"prompt": "Hello", "max_tokens": 12, "temperature": 0, **channel})
        assert steered["choices"] != plain["choices"] and steered["traitbasis"]["dose"] > 0
    assert plain["traitbasis"]["dose"] == 0


@pytest.mark.parametrize(
    ("body", "words"),
    [
        ({"prompt": ""}, ["prompt"]),
        ({"prompt": []}, ["prompt"]),
        ({"prompt": ["a", ""]}, ["prompt"]),
        ({"prompt": [10**9]}, ["1000000000"]),
        ({"prompt": ["a"] * 65}, ["65", "64"]),
        ({"prompt": "a", "best_of": 3}, ["best_of"]),
        ({"prompt": "a", "suffix": "b"}, ["suffix"]),
        ({"prompt": "a", "logprobs": 21}, ["logprobs", "20"]),
        ({"prompt": "a", "max_tokens": 0}, ["max_tokens"]),
        ({"prompt": "a" * 5000}, ["2048"]),
        ({"prompt": ["Hi", "half \ud83d"]}, ["prompt", "surrogate"]),
        ({"prompt": {"a": 1}}, ["prompt"]),
    ],
)
def test_bad_completions_are_told(client: httpx.Client, body: dict[str, Any], words: list[str]) -> None:
    content = json.dumps({"model": "steered-user", **body})  # ASCII: httpx would not send half a surrogate pair
    response = client.post("/v1/completions", content=content, headers={"Content-Type": "application/json"})
    assert response.status_code == 400 and all(word in response.text for word in words), response.text


# --- τ-trait and Collinear's SDK (2.1) --------------------------------------------------------------------------------


def test_a_batch_answers_every_entry_in_order(client: httpx.Client) -> None:
    entries = [
        {"trait_dict": {"impatience": level}, "messages": MESSAGES, "temperature": 0.7, "max_tokens": 10, "seed": seed}
        for seed, level in enumerate(["low", 2, -1.5, 0])
    ]
    together = good(client.post("/steer_batch", json=entries))["responses"]
    alone = [good(client.post("/steer_batch", json=[entry]))["responses"][0] for entry in entries]
    assert together == alone and len(set(together)) == 4 and all(text.strip() for text in together)
    assert good(client.post("/steer_batch", json=[])) == {"responses": []}


def test_a_batch_begins_conversations_from_characteristics(client: httpx.Client, simulator: UserSimulator) -> None:
    about = {"age": 44, "occupation": "nurse", "language": None, "intent": "cancel the order", "task": "retail"}
    entry = {"trait_dict": {"impatience": "high"}, "user_characteristics": about, "messages": [], "seed": -1}
    assert good(client.post("/steer_batch", json=[entry]))["responses"][0].strip()
    from traitbasis.server.schemas import SteerRequest
    from traitbasis.server.steer import _with_characteristics

    system, greeting = _with_characteristics(SteerRequest(**entry))
    for told in ("age 44", "occupation nurse", "cancel the order", "retail"):
        assert told in system["content"]
    assert "None" not in system["content"] and greeting["role"] == "user"


def test_traits_can_be_asked_for(client: httpx.Client, simulator: UserSimulator) -> None:
    assert good(client.get("/traits"))["traits"] == list(simulator.basis.traits)


@pytest.mark.parametrize("level", ["low", "medium", "high", 0, 1, 2, -2, 0.3, "0.7", None])
def test_every_form_of_a_level_is_understood(client: httpx.Client, level: Any) -> None:
    for trait in ("impatience", "skepticism"):
        entry = {"trait_dict": {trait: level}, "messages": MESSAGES, "max_tokens": 2, "system_prompt": 0}
        assert good(client.post("/steer_bare", json=entry, headers={"API-Key": "x"}))["response"]


def test_an_unknown_trait_in_a_batch_is_a_4xx_that_names_it(client: httpx.Client) -> None:
    """422 by contract: the SDK then asks for /traits and goes on without; at any other status it gives up."""
    entry = {"trait_dict": {"greed": 1}, "messages": MESSAGES}
    for path, body, status in (("/steer_batch", [entry], 422), ("/steer_bare", entry, 400)):
        response = client.post(path, json=body)
        assert response.status_code == status and "greed" in response.json()["error"]["message"]


def test_promptfoo_gets_turns_of_its_instructions(client: httpx.Client, simulator: UserSimulator) -> None:
    body = {"task": "tau", "instructions": SYSTEM["content"], "history": [], "email": None, "version": "0.120.27"}
    for path in ("/promptfoo", "/u/impatience-high/promptfoo"):
        found = good(client.post(path, json=body))
        assert found["result"].strip() and found["tokenUsage"]["total"] > 0
    steered = good(client.post("/u/impatience-high/promptfoo", json={**body, "history": MESSAGES[1:]}))
    same = good(ask(client, traits="impatience-high"))
    assert steered["result"] == same["choices"][0]["message"]["content"], "an empty history is the greeting"


# --- together (contract 9) --------------------------------------------------------------------------------------------


def test_mixed_requests_in_random_order_get_what_they_get_alone(client: httpx.Client) -> None:
    """1.5.12: user turns, JSON, calls and text completions in one crowd of sixteen."""

    def act(i: int) -> Any:
        kind, seed = i % 4, i // 4
        if kind == 0:
            return good(ask(client, traits={"impatience": seed - 1}, seed=seed))["choices"]
        if kind == 1:
            return good(ask(client, response_format=json_format(PERSON), seed=seed))["choices"]
        if kind == 2:
            return good(ask(client, tools=TOOLS, tool_choice="required", traits="impatience", seed=seed))["choices"]
        return complete(client, prompt="Hello", seed=seed, max_tokens=10)["choices"]

    alone = [act(i) for i in range(16)]
    order = sorted(range(16), key=lambda i: hash((i, "order")) % 97)
    with ThreadPoolExecutor(16) as pool:
        together = dict(zip(order, pool.map(act, order), strict=True))
    assert [together[i] for i in range(16)] == alone
