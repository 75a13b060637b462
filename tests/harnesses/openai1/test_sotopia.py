"""sotopia: an episode of two agents, one of them the steered user, whose turns are JSON of a strict schema."""

from __future__ import annotations

import json
from typing import Any

import pytest
from document import block, run_python
from wire import Recorder, ScriptedAgent, high

pytestmark = pytest.mark.harness("sotopia")


def _agent_or_judge(body: dict[str, Any]) -> str:
    """The other party of the episode, and the judge that rates it afterwards."""
    if "evaluate how well participants" not in body["messages"][0]["content"]:
        return json.dumps({"action_type": "speak", "argument": "May I have your order number?"})
    from sotopia.database import SotopiaDimensions

    rated = {dimension: ["As expected.", 0] for dimension in SotopiaDimensions.model_fields}
    return json.dumps({"evaluations": {"agent_1": rated, "agent_2": rated}})


def test_an_episode_ends_by_its_own_rule_with_turns_of_the_steered_user(
    user: Recorder, agent: ScriptedAgent, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    agent.say = _agent_or_judge
    monkeypatch.setenv("OPENAI_API_BASE", f"{agent.url}/v1")
    run_python(block("sotopia"), user.url)
    shown = capsys.readouterr().out
    turns = user.turns
    assert turns and all(turn.path.startswith("/u/impatience-high/v1/") for turn in turns)
    assert all(turn.made_by["traits"] == {"impatience": high("impatience")} for turn in turns)
    for turn in turns:
        action = json.loads(turn.message["content"])
        assert set(action) == {"action_type", "argument"}
        if action["action_type"] == "speak":
            assert action["argument"] in shown
    assert "Failed to generate action" not in shown  # what goes wrong becomes a silent "none"
