"""tau-bench: the client and `run()` that tau-trait's package contains, and by hand what other versions of it send.

tau-bench and tau-emotion-bench are not on PyPI. tau-trait 0.1.1 is a fork of tau-bench whose user, with any provider
but its own, calls litellm exactly as tau-bench does.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
from pathlib import Path
from typing import Any

import pytest
from document import USER, block
from wire import Recorder, ScriptedAgent, call, high

pytestmark = pytest.mark.harness("tau-trait")

RULES = """Rules:
- Just generate one line at a time to simulate the user's message.
- Do not give away all the instruction at once. Only provide the information that is necessary for the current step.
- If the instruction goal is satisified, generate '###STOP###' as a standalone message without anything else to end
the conversation.
"""
INSTRUCTION = "You are a user interacting with an agent.\n\nInstruction: You are Ann. Your order #W4417 is late.\n"
SYSTEM = {"role": "system", "content": INSTRUCTION + RULES}
GREETING = {"role": "user", "content": "Hi! How can I help you today?"}
QUESTION = {"role": "user", "content": "May I have your order number?"}


def _flags(code: str, user: Recorder) -> tuple[dict[str, str], dict[str, Any]]:
    """Exported variables and command-line flags of a block that cannot be run here."""
    code = code.replace(USER, user.url).replace("\\\n", " ")
    exported = dict(re.findall(r"(\w+)=(http\S+|none)", code))
    (command,) = (line for line in code.splitlines() if line.startswith("python run.py"))
    parser = argparse.ArgumentParser()
    words = shlex.split(command)[2:]
    for word in words:
        if word.startswith("--"):
            parser.add_argument(word, nargs="+" if word == "--task-ids" else None)
    flags = vars(parser.parse_args(words))
    flags["task_ids"] = [int(number) for number in flags["task_ids"]]
    return exported, flags


def test_a_retail_task_is_run_with_the_flags_of_the_page(
    user: Recorder, agent: ScriptedAgent, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tau_trait.run import run
    from tau_trait.types import RunConfig

    # The agent asks twice and then hands over to a human, which ends an episode as ###STOP### does.
    agent.say = lambda body: (
        "May I have your order number?"
        if sum(message["role"] == "user" for message in body["messages"]) < 3
        else call("transfer_to_human_agents", summary="The user wants something else.")
    )
    exported, flags = _flags(block("tau-bench", "bash"), user)
    for name, value in {**exported, "OPENAI_API_BASE": f"{agent.url}/v1"}.items():
        monkeypatch.setenv(name, value)
    (result,) = run(RunConfig(log_dir=str(tmp_path / "results"), **flags))
    assert "error" not in result.info, result.info
    said = [message["content"] for message in result.traj if message["role"] == "user"]
    turns = user.turns
    # Two constructors ask for a turn without an instruction; the episode's turns are those the agent was shown.
    assert [turn.message["content"] for turn in turns][2:] == said and len(said) == 3
    assert ["Instruction:" in turn.sent["messages"][0]["content"] for turn in turns] == [False, False, True, True, True]
    assert all(set(turn.sent) == {"model", "messages"} for turn in turns)
    assert all(turn.made_by["traits"] == {"impatience": high("impatience"), "skeptical": 0.5} for turn in turns)
    assert "###STOP###" not in said[0]
    # The model id is a part of the file's name.
    (written,) = (tmp_path / "results").iterdir()
    assert flags["user_model"] in written.name and json.loads(written.read_text())


def test_a_verifier_gets_its_verdict_from_the_plain_model(user: Recorder, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOSTED_VLLM_API_BASE", f"{user.url}/v1")
    from tau_trait.envs.user import VerifyUserSimulationEnv

    simulated = VerifyUserSimulationEnv(model="steered-user@impatience-high", provider="hosted_vllm", max_attempts=1)
    said = simulated.reset("You are Ann. Your order #W4417 is late and you want a refund.")
    assert said.strip() and simulated.step("May I have your order number?").strip()
    judged = [turn for turn in user.turns if "supervisor" in turn.sent["messages"][0]["content"]]
    asked = [turn for turn in user.turns if turn not in judged]
    assert len(judged) == len(asked) == 3
    assert all(turn.made_by["traits"] == {} and turn.made_by["plain"] for turn in judged)
    assert all(
        turn.made_by["traits"] == {"impatience": high("impatience")} and turn.made_by["plain"] is None for turn in asked
    )


ECHOES = {
    "litellm 1.53": {"content": "My lamp is late.", "role": "assistant", "tool_calls": None, "function_call": None},
    "litellm 1.110": {"content": "My lamp is late.", "role": "assistant", "reasoning_content": "Okay, the user wants"},
    "no content": {"role": "assistant", "content": None},
    "nothing at all": {"role": "assistant"},
}


@pytest.mark.parametrize("echo", ECHOES)
def test_every_form_of_an_echoed_turn_is_read(user: Recorder, echo: str) -> None:
    (turn,) = _sent(user, [SYSTEM, GREETING, ECHOES[echo], QUESTION])
    assert "reasoning_content" not in turn.message and "Okay, the user" not in turn.message["content"]


def test_thoughts_of_an_echoed_turn_change_nothing(user: Recorder) -> None:
    for echo in ("litellm 1.53", "litellm 1.110"):
        _sent(user, [SYSTEM, GREETING, ECHOES[echo], QUESTION])
    first, second = user.turns
    assert first.message["content"] == second.message["content"]


def test_an_emotional_user_of_tau_emotion_bench_is_served(user: Recorder) -> None:
    exported, flags = _flags(block("tau-emotion-bench", "bash"), user)
    assert not exported and flags["user_api_base"] == f"{user.url}/v1" and "/" not in flags["user_model"]
    told = (
        f"{INSTRUCTION}Emotion Instruction: Speak with growing exasperation and distrust.\n{RULES}"
        "- If the agent ignores your emotional needs, you may send '###UNSATISFIED###' as a standalone message.\n"
    )
    messages = [{"role": "system", "content": told}, GREETING]
    (turn,) = _sent(user, messages, flags["user_model"], flags["user_api_base"])
    assert turn.made_by["traits"] == {"impatience": high("impatience")}
    assert "###" not in turn.message["content"]  # no stop token opens a conversation


def _sent(
    user: Recorder, messages: list[Any], model: str = "steered-user@impatience-high", api_base: str = ""
) -> list[Any]:
    """Sends messages as the client does, by litellm; the exchanges so far."""
    import litellm

    litellm.completion(
        model=model,
        custom_llm_provider="hosted_vllm",
        messages=messages,
        api_base=api_base or f"{user.url}/v1",
        api_key="none",
    )
    return user.turns
