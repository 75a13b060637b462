"""langwatch scenario: a scripted scenario with its own user simulator."""

from __future__ import annotations

import pytest
from document import block, run_python
from wire import Recorder, high

pytestmark = pytest.mark.harness("langwatch-scenario")


def test_a_scenario_succeeds_with_two_turns_of_the_user(user: Recorder) -> None:
    result = run_python(block("langwatch scenario"), user.url)["result"]
    assert result.success and result.reasoning == "done"
    turns = user.turns
    assert [message["role"] for message in result.messages] == ["user", "assistant"] * 2
    assert [message["content"] for message in result.messages[::2]] == [turn.message["content"] for turn in turns]
    assert all(turn.made_by["traits"] == {"impatience": high("impatience")} for turn in turns)
    # What the page says of its requests.
    assert turns[1].sent["tools"] == [] and turns[1].sent["temperature"] == 0.0
    assert "trace_id" in turns[1].sent["messages"][-1]


def test_its_extra_arguments_are_a_trait_channel_and_its_judge_is_not_steered(user: Recorder) -> None:
    import asyncio

    import scenario

    class Agent(scenario.AgentAdapter):
        async def call(self, input: scenario.AgentInput) -> scenario.AgentReturnTypes:
            return "May I have your order number?"

    where = {"api_base": f"{user.url}/v1", "api_key": "none"}
    result = asyncio.run(
        scenario.run(
            name="late lamp",
            description="The user's order is late.",
            agents=[
                Agent(),
                scenario.UserSimulatorAgent(
                    model="openai/steered-user", extra_body={"traits": {"skeptical": 0.5}}, **where
                ),
                scenario.JudgeAgent(
                    model="openai/steered-user@impatience-high", criteria=["The agent is polite"], **where
                ),
            ],
            max_turns=2,
        )
    )
    assert result.reasoning
    asked = [turn for turn in user.turns if turn.sent["tools"] == []]
    judged = [turn for turn in user.turns if turn.sent["tools"]]
    assert asked and all(turn.made_by["traits"] == {"skeptical": 0.5} for turn in asked)
    assert judged and all(turn.made_by["traits"] == {} for turn in judged)
    assert all(turn.message["tool_calls"] for turn in judged)
