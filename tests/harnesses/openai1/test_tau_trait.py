"""tau-trait 0.1.1: its own steering protocol, through a whole run."""

from __future__ import annotations

from pathlib import Path

import pytest
from document import block, run_python
from wire import Recorder, ScriptedAgent, call

pytestmark = pytest.mark.harness("tau-trait")


def test_a_run_with_its_own_steering_endpoint(
    user: Recorder, agent: ScriptedAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import requests

    monkeypatch.setattr(requests, "post", requests.post)  # put back what the block replaces
    monkeypatch.setenv("OPENAI_API_BASE", f"{agent.url}/v1")
    monkeypatch.setenv("STEER_API_KEY", "tautrait-001")
    monkeypatch.chdir(tmp_path)
    agent.say = lambda body: (
        "May I have your order number?"
        if sum(message["role"] == "user" for message in body["messages"]) < 2
        else call("transfer_to_human_agents", summary="The user wants something else.")
    )
    (result,) = run_python(block("tau-trait"), user.url)["results"]
    assert "error" not in result.info, result.info
    said = [message["content"] for message in result.traj if message["role"] == "user"]
    asked = [exchange for exchange in user.exchanges if exchange.path == "/steer_tau"]
    assert [exchange.got["response"] for exchange in asked][2:] == said and len(said) == 2
    assert all(exchange.sent["trait_dict"] == {"impatience": 1, "skeptical": 1} for exchange in asked)
    assert all(exchange.headers["api-key"] == "tautrait-001" for exchange in asked)
