"""The oracle over all of tau-trait's retail and airline test tasks: it fails where its customer does, and nowhere else.

Two processes play at once; a minute and a half on two quiet cores.
"""

from __future__ import annotations

import importlib
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
from customers import stops_early, tells_all, tells_nothing
from driven import driven
from wire import Recorder, ScriptedAgent, call, listening

pytestmark = pytest.mark.harness("tau-trait")

DOMAINS = ("retail", "airline")
TASKS = {"retail": 120, "airline": 60}


def _played(
    say: Callable[[dict[str, Any]], str], folder: Path, tasks: Callable[[str], Iterable[int]]
) -> dict[tuple[str, int], dict[str, Any]]:
    """Episodes of the oracle with a scripted customer."""
    customer = ScriptedAgent(say=say)
    oracle = {"kind": "oracle", "patience": 3, "url": ""}

    def domain(name: str) -> dict[tuple[str, int], dict[str, Any]]:
        with driven("tau_trait", folder, customer.url, oracle, domains=[name], split="test", max_steps=30) as driver:
            assert len(driver.ready["tasks"][name]) == TASKS[name]
            return {(name, task): driver.play(name, str(task))["episode"] for task in tasks(name)}

    with listening(customer), ThreadPoolExecutor(len(DOMAINS)) as pool:
        retail, airline = pool.map(domain, DOMAINS)
    return retail | airline


def _changes(domain: str, tasks: Iterable[int]) -> set[int]:
    """Tasks whose outcome is not that of doing nothing: their gold actions change the data, or something is to be said.

    Worked out with the package's tools alone.
    """
    module = importlib.import_module(f"tau_trait.envs.{domain}.tasks_test")
    listed = getattr(module, "TASKS_TEST", None) or module.TASKS
    tools = importlib.import_module(f"tau_trait.envs.{domain}.tools").ALL_TOOLS
    load_data = importlib.import_module(f"tau_trait.envs.{domain}.data").load_data
    by_name = {tool.get_info()["function"]["name"]: tool for tool in tools}
    untouched, data, found = load_data(), load_data(), set()
    for task in tasks:
        for action in listed[task].actions:
            if action.name in by_name:
                with suppress(Exception):  # as the environment does
                    by_name[action.name].invoke(data=data, **action.kwargs)
        if listed[task].outputs or data != untouched:
            found.add(task)
        if data != untouched:
            data = load_data()
    return found


def test_every_task_is_solved_with_a_customer_who_tells_everything(tmp_path: Path) -> None:
    episodes = _played(tells_all, tmp_path, lambda domain: range(TASKS[domain]))
    assert len(episodes) == 180
    assert not {key: e["ended"] for key, e in episodes.items() if e["reward"] != 1.0}
    assert all(e["ended"] in ("user_stop", "agent") and e["error"] is None for e in episodes.values())
    # Nothing is used before it was said: what the oracle calls comes after the customer's story.
    for key, episode in episodes.items():
        calls = [i for i, message in enumerate(episode["messages"]) if message.get("calls")]
        asked = [i for i, m in enumerate(episode["messages"]) if m["speaker"] == "customer" and i]
        assert not calls or asked[0] < calls[0], key


def test_a_customer_who_tells_nothing_fails_exactly_the_tasks_that_need_it(tmp_path: Path) -> None:
    """Of every third task. Where doing nothing is right, handing over is."""
    third = {domain: range(0, TASKS[domain], 3) for domain in DOMAINS}
    episodes = _played(tells_nothing, tmp_path, lambda domain: third[domain])
    for domain in DOMAINS:
        failed = {task for (name, task), episode in episodes.items() if name == domain and episode["reward"] != 1.0}
        needed = _changes(domain, third[domain])
        assert failed == needed and 0 < len(needed) < len(third[domain])
    # What needs no fact is done, and such a customer does not say that it is content: the steps run out.
    assert {episode["ended"] for episode in episodes.values()} <= {"agent", "max_steps"}


def test_a_customer_who_leaves_before_it_is_done_fails_the_task(tmp_path: Path) -> None:
    episodes = _played(stops_early, tmp_path, lambda domain: range(2))
    changing = {(domain, task) for domain in DOMAINS for task in _changes(domain, range(2))}
    assert {key for key, episode in episodes.items() if episode["reward"] != 1.0} == changing


def test_the_served_user_is_asked_for_by_name_and_seed(user: Recorder, agent: ScriptedAgent, tmp_path: Path) -> None:
    """An agent by URL, the user of `traitbasis serve`: what is kept of both sides, and of what made them."""
    agent.say = lambda body: (
        "May I have your order number?"
        if sum(message["role"] == "user" for message in body["messages"]) < 2
        else call("transfer_to_human_agents", summary="The user wants something else.")
    )
    model = {
        "kind": "llm",
        "url": f"{agent.url}/v1",
        "model": "gpt-4.1",
        "strategy": "tool-calling",
        "temperature": 0.0,
    }
    with driven("tau_trait", tmp_path, user.url, model, domains=["retail"], split="test", max_steps=5) as driver:
        one, two = (driver.play("retail", "0", "steered-user@impatience-high")["episode"] for _ in range(2))
        other = driver.play("retail", "0", "steered-user@", seed=7)["episode"]
    first, *turns = user.turns  # the environment's constructor
    assert "Instruction:" not in first.sent["messages"][0]["content"] and len(turns) == 6
    assert all(turn.sent["seed"] == 7 for turn in turns)
    assert {turn.sent["messages"][0]["content"] for turn in turns} == {turns[0].sent["messages"][0]["content"]}
    assert one["made_by"]["traits"] and not other["made_by"]["traits"]
    said = [message["text"] for message in one["messages"] if message["speaker"] == "customer"]
    assert said == [turn.message["content"] for turn in turns[:2]] and one["messages"] == two["messages"]
    assert one["tokens"]["user"]["completion"] == sum(turn.got["usage"]["completion_tokens"] for turn in turns[:2])
    assert one["cost"]["user"] == 0.0 and one["cost"]["agent"] > 0 and one["ended"] == "agent"
    assert all(body["model"] == "gpt-4.1" for body in agent.asked)
