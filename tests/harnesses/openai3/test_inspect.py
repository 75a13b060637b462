"""inspect_ai: inspect_evals' tau2 by the command line, and a task of one's own."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from document import block, run_python, run_shell
from wire import Recorder, ScriptedAgent, high

pytestmark = pytest.mark.harness("inspect-ai")


@pytest.mark.harness("inspect-evals")
def test_tau2_airline_is_played_to_its_message_limit_and_scored(
    user: Recorder, agent: ScriptedAgent, tmp_path: Path
) -> None:
    code = block("inspect_ai", "bash")
    output = run_shell(
        code, user.url, tmp_path, OPENAI_BASE_URL=f"{agent.url}/v1", INSPECT_LOG_FORMAT="json", INSPECT_DISPLAY="plain"
    )
    assert "Error in user_simulator_agent loop" not in output, output  # it swallows exceptions and goes on
    (written,) = (tmp_path / "logs").glob("*.json")
    log = json.loads(written.read_text())
    assert log["status"] == "success"
    (sample,) = log["samples"]
    assert sample["scores"] and "error" not in sample
    turns = user.turns
    assert 1 <= len(turns) <= 3 and len(agent.asked) >= len(turns) - 1
    assert all(turn.made_by["traits"] == {"impatience": high("impatience")} for turn in turns)
    assert log["stats"]["role_usage"]["user"]["total_tokens"] == sum(t.got["usage"]["total_tokens"] for t in turns)


@pytest.mark.harness("inspect-evals")
def test_a_telecom_user_with_tools_is_asked_and_understood(
    user: Recorder, agent: ScriptedAgent, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """A forced call, since the embedded model seldom makes one; the harness runs it and shows the user its result."""
    from inspect_ai import eval
    from inspect_ai.model import GenerateConfig, get_model
    from inspect_evals.tau2 import tau2_telecom

    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("OPENAI_BASE_URL", f"{agent.url}/v1")
    served = get_model(
        "openai-api/traitbasis/steered-user@impatience-high",
        base_url=f"{user.url}/v1",
        api_key="none",
        config=GenerateConfig(extra_body={"tool_choice": "required"}, max_tokens=24),
    )
    # Every turn is a call, so it never is the agent's turn: the sample's message limit ends it.
    (log,) = eval(
        tau2_telecom(shuffle=False, message_limit=1),
        model="openai/gpt-4.1",
        model_roles={"user": served},
        limit=1,
        message_limit=6,
        display="none",
    )
    assert log.status == "success" and log.samples
    called = [turn.message["tool_calls"][0] for turn in user.turns]
    assert called and all(isinstance(json.loads(one["function"]["arguments"]), dict) for one in called)
    assert user.turns[1].sent["messages"][-1]["role"] == "tool"
    assert user.turns[1].sent["messages"][-1]["tool_call_id"] == called[0]["id"]


def test_a_task_of_ones_own_gets_turns_and_usage(
    user: Recorder, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.chdir(tmp_path)
    log = run_python(block("inspect_ai"), user.url)["log"]
    assert log.status == "success"
    first, second = user.turns
    assert first.made_by["traits"] == second.made_by["traits"] == {"impatience": high("impatience")}
    assert second.sent["messages"][2]["content"] == first.message["content"]
    assert log.stats.role_usage["user"].total_tokens == sum(turn.got["usage"]["total_tokens"] for turn in user.turns)
