"""promptfoo's simulated user, whose service this server can stand for. The program itself comes from npm."""

from __future__ import annotations

import json
import shutil
import urllib.request
from pathlib import Path

import pytest
from conftest import NO_PROMPTFOO
from document import block, run_shell
from wire import Recorder, ScriptedAgent


def test_its_requests_are_answered(user: Recorder) -> None:
    """What 0.120.27 sends on a first and on a later turn."""
    history = [{"role": "assistant", "content": "Where is my lamp?"}, {"role": "user", "content": "Your order number?"}]
    for said in ([], history):
        body = {"task": "tau", "instructions": "You are Ann. Your lamp is late.", "history": said, "email": None}
        request = urllib.request.Request(
            f"{user.url}/u/impatience-high/promptfoo",
            json.dumps({**body, "version": "0.120.27"}).encode(),
            {"Content-Type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=100) as reply:
            answer = json.loads(reply.read())
        assert answer["result"].strip() and answer["tokenUsage"]["total"] > answer["tokenUsage"]["prompt"] > 0


@pytest.mark.skipif(not shutil.which("promptfoo"), reason=NO_PROMPTFOO)
def test_an_evaluation_runs(user: Recorder, agent: ScriptedAgent, tmp_path: Path) -> None:
    (tmp_path / "promptfooconfig.yaml").write_text(block("promptfoo", "yaml"))
    run_shell(
        block("promptfoo", "bash"),
        user.url,
        tmp_path,
        OPENAI_BASE_URL=f"{agent.url}/v1",
        PROMPTFOO_CONFIG_DIR=str(tmp_path / "home"),
        PROMPTFOO_DISABLE_TELEMETRY="1",
        PROMPTFOO_DISABLE_UPDATE="1",
    )
    (result,) = json.loads((tmp_path / "result.json").read_text())["results"]["results"]
    messages = result["response"]["metadata"]["messages"]
    assert [message["role"] for message in messages] == ["user", "assistant"] * 2
    assert [message["content"] for message in messages[::2]] == [exchange.got["result"] for exchange in user.exchanges]
    assert {exchange.path for exchange in user.exchanges} == {"/u/impatience-high/promptfoo"}
    assert len(agent.asked) == 2
