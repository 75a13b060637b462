"""deepeval: its conversation simulator, whose every reply must be JSON of keys that only the prompt names."""

from __future__ import annotations

import json
from typing import Any

import pytest
from document import block, run_python
from wire import Recorder, high

pytestmark = pytest.mark.harness("deepeval")


def test_a_simulation_runs_and_every_reply_parses(user: Recorder) -> None:
    case = run_python(block("deepeval"), user.url)["case"]
    assert [turn.role for turn in case.turns] in (["user", "assistant"], ["user", "assistant"] * 2)  # judged complete
    said, judged = _apart(user)
    assert [json.loads(turn.message["content"]) for turn in said] == [
        {"simulated_input": turn.content} for turn in case.turns[::2]
    ]
    assert all(turn.content.strip() for turn in case.turns)
    assert all(turn.made_by["traits"] == {"impatience": high("impatience")} for turn in said)
    assert judged and all(turn.made_by["traits"] == {} for turn in judged)
    for turn in judged:
        verdict = json.loads(turn.message["content"])
        assert isinstance(verdict["is_complete"], bool) and isinstance(verdict["reason"], str)


def test_the_openai_model_sends_content_parts_and_counts_nothing_as_cost(user: Recorder) -> None:
    from deepeval.dataset import ConversationalGolden
    from deepeval.models import OpenAIModel
    from deepeval.simulator import ConversationSimulator
    from deepeval.test_case import Turn

    async def agent(input: str) -> Turn:
        return Turn(role="assistant", content="May I have your order number?")

    model = OpenAIModel(
        model="hurried-anna",
        base_url=f"{user.url}/v1",
        api_key="none",
        cost_per_input_token=0,
        cost_per_output_token=0,
        generation_kwargs={"extra_body": {"traits": {"skeptical": 0.5}}},
    )
    simulator = ConversationSimulator(model_callback=agent, simulator_model=model)
    (case,) = simulator.simulate([ConversationalGolden(scenario="Ann's lamp is late.")], max_user_simulations=2)
    assert [turn.role for turn in case.turns] == ["user", "assistant"] * 2 and simulator.simulation_cost == 0
    said, judged = _apart(user)
    assert len(said) == 2 and not judged
    assert all(isinstance(turn.sent["messages"][0]["content"], list) for turn in said)
    assert all(turn.made_by["traits"] == {"skeptical": 0.5} for turn in said)


def _apart(user: Recorder) -> tuple[list[Any], list[Any]]:
    """Turns of the user, and what else was asked."""
    said = [turn for turn in user.turns if "Pretend you are a user" in str(turn.sent["messages"][0]["content"])]
    return said, [turn for turn in user.turns if turn not in said]
