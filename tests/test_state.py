"""Customers that react over HTTP: the ``traitbasis`` field, its signed state, sessions."""

from __future__ import annotations

import re
import threading
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import httpx
import pytest
from itsdangerous import URLSafeSerializer
from openai import OpenAI
from samples import MILD_GUARDS, random_basis
from serving import serving
from tiny import tiny_model
from traitbasis.server import Settings, create_app
from traitbasis.server.state import KEY_VARIABLE, States, state_key

from traitbasis.engines.base import Sampling
from traitbasis.errors import RequestError
from traitbasis.reactive.reactor import Reactive, react
from traitbasis.reactive.scenarios import read_scenarios
from traitbasis.simulator import UserSimulator
from traitbasis.users import DEFAULT_USER, ServedUser

SCENARIO = next(one for one in read_scenarios() if one.scene == "Repair")
ASKS = "Could you tell me your order number, please?"
FED_UP = {"condition": "exasperation.cold.high.skeptical", "unsatisfied": True}


@pytest.fixture(scope="module")
def client() -> Iterator[httpx.Client]:
    lm = tiny_model()
    sampling, users = Sampling(max_tokens=8), [ServedUser(name="fed-up", reactive=Reactive.read(FED_UP))]
    with UserSimulator(lm, random_basis(lm, "impatience"), sampling=sampling, guards=MILD_GUARDS) as simulator:
        app = create_app(simulator, Settings(state_key="a key"), users)
        with serving(app) as url, httpx.Client(base_url=url, timeout=60) as client:
            yield client


def ask(client: httpx.Client, messages: list[dict[str, str]], field: Any = None, **body: Any) -> httpx.Response:
    sent = {"model": "steered-user", "messages": messages, "traitbasis": field, **body}
    return client.post("/v1/chat/completions", json=sent)


def talk(n: int, text: str = ASKS) -> list[dict[str, str]]:
    """A conversation in which the agent asks the same n times."""
    greeting = {"role": "user", "content": "Hi!"}
    said = {"role": "assistant", "content": "My order #W100 is late and I am upset."}
    return [greeting, *[turn for _ in range(n) for turn in (said, {"role": "user", "content": text})]]


def test_a_client_that_says_nothing_gets_no_state_and_the_same_reply(client: httpx.Client) -> None:
    plain, empty = (ask(client, talk(1), field).json() for field in (None, {}))
    assert "state" not in plain["traitbasis"] and "reaction" not in plain["traitbasis"]
    assert plain["choices"] == empty["choices"]


def test_an_echoed_state_goes_on_and_a_client_that_echoes_nothing_gets_the_same_reactions(client: httpx.Client) -> None:
    field: Mapping[str, Any] = {"scenario": SCENARIO.id}
    for n in range(1, 5):
        echoed = ask(client, talk(n), field).json()
        anew = ask(client, talk(n), {"scenario": SCENARIO.id}).json()
        assert echoed["traitbasis"]["reaction"] == anew["traitbasis"]["reaction"]
        assert echoed["choices"] == anew["choices"]
        assert len(echoed["traitbasis"]["reaction"]["states"]) == n + 1
        field = {"state": echoed["traitbasis"]["state"]}  # which knows the scenario, too
    whole = ask(client, talk(5), echoed["traitbasis"]).json()
    assert len(whole["traitbasis"]["reaction"]["states"]) == 6, "the whole field of a reply may be echoed"


def test_a_session_is_named_instead_and_is_its_own_client_s(client: httpx.Client) -> None:
    first = ask(client, talk(1), {"scenario": SCENARIO.id, "session": "s1", "tool_results": [{"status": "late"}]})
    assert first.json()["traitbasis"]["reaction"]["scenario"] == SCENARIO.id
    later = ask(client, talk(2), {"session": "s1"}).json()["traitbasis"]
    assert later["reaction"]["scenario"] == SCENARIO.id and len(later["reaction"]["states"]) == 3
    headers = {"authorization": "Bearer somebody-else"}
    body = {"model": "steered-user", "messages": talk(2), "traitbasis": {"session": "s1"}}
    other = client.post("/v1/chat/completions", json=body, headers=headers).json()
    assert "reaction" not in other["traitbasis"]


def test_a_served_user_reacts_for_clients_that_know_nothing_of_it(client: httpx.Client) -> None:
    texts = []
    for n in range(8):
        reply = ask(client, talk(n), model="fed-up").json()
        texts.append(reply["choices"][0]["message"]["content"])
        assert reply["traitbasis"]["reaction"]["condition"] == FED_UP["condition"]
    assert texts[0] != "###UNSATISFIED###" and texts[-1] == "###UNSATISFIED###"
    assert client.get("/v1/models/fed-up").json()["traitbasis"]["reactive"] == FED_UP
    steered = client.post("/steer_bare", json={"messages": talk(7), "traitbasis": FED_UP}).json()
    assert steered["response"] == "###UNSATISFIED###"


def test_openai_s_client_and_streams_carry_the_state(client: httpx.Client) -> None:
    openai = OpenAI(base_url=f"{client.base_url}/v1", api_key="x")
    messages: Any = talk(1)
    reply = openai.chat.completions.create(
        model="steered-user", messages=messages, extra_body={"traitbasis": {"scenario": SCENARIO.id}}
    )
    told: Any = reply.model_extra and reply.model_extra["traitbasis"]
    assert told["state"] and told["reaction"]["reason"]
    chunks = openai.chat.completions.create(
        model="steered-user", messages=messages, stream=True, extra_body={"traitbasis": {"state": told["state"]}}
    )
    *_, last = chunks
    assert last.model_extra and last.model_extra["traitbasis"]["reaction"] == told["reaction"]
    opening = openai.chat.completions.create(
        model="steered-user",
        messages=talk(0),
        stream=True,
        extra_body={"traitbasis": {"scenario": SCENARIO.id}},  # type: ignore[arg-type]
    )
    assert "".join(chunk.choices[0].delta.content or "" for chunk in opening) == SCENARIO.opening_line


@pytest.mark.parametrize(
    ("field", "named"),
    [
        ("frustration", "traitbasis is"),
        ({"condition": "fury"}, "traitbasis.condition: .*fury"),
        ({"conditon": "dread"}, "traitbasis.conditon"),
        ({"scenario": 7}, "traitbasis.scenario"),
        ({"state": 7}, "no state token"),
        ({"state": "x" * 300_000}, "no state token"),
        ({"state": "eyJhIjoxfQ.forged"}, "was changed"),
        (
            {"state": URLSafeSerializer("a key", salt="traitbasis.state/1").dumps({"state": {"turns": 1}})},
            "no customer's",
        ),
        ({"session": ""}, "traitbasis.session"),
        ({"tool_results": "rain"}, "tool_results"),
        ({"condition": "dread", "carry": "traits"}, "dread"),
    ],
)
def test_what_cannot_be_read_is_a_400_that_names_it(client: httpx.Client, field: Any, named: str) -> None:
    response = ask(client, talk(1), field)
    assert response.status_code == 400
    assert re.search(named, response.json()["error"]["message"]), response.text


def test_a_token_of_another_key_is_refused_and_says_the_way_out() -> None:
    token = States("one").told(react((), Reactive.read({"condition": "dread"})), States("one").asked({}, DEFAULT_USER))
    with pytest.raises(RequestError, match=KEY_VARIABLE):
        States("another").asked({"state": token["state"]}, DEFAULT_USER)


def test_sessions_are_bounded_and_the_least_recent_is_forgotten() -> None:
    states = States("key", sessions=2)
    for name in ("a", "b", "a", "c"):
        asked = states.asked({"condition": "dread", "session": name}, DEFAULT_USER)
        states.told(react((), asked.options["reactive"]), asked)
    known = [states.asked({"session": name}, DEFAULT_USER).options["reactive"] is not None for name in ("a", "b", "c")]
    assert known == [True, False, True]


def test_servers_that_start_together_have_one_key_and_a_restart_keeps_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TRAITBASIS_CACHE", str(tmp_path))
    found: list[str] = []
    threads = [threading.Thread(target=lambda: found.append(state_key({}))) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len({*found, state_key({})}) == 1 and len(found[0]) >= 32
    assert (tmp_path / "state.key").stat().st_mode & 0o077 == 0
    assert [path.name for path in tmp_path.iterdir()] == ["state.key"]
    assert state_key({KEY_VARIABLE: "mine"}) == "mine"
