"""collinear's TraitMix client: batches of conversations, and traits it asks the server for."""

from __future__ import annotations

import os

import pytest
from document import block, run_python
from wire import Recorder, ScriptedAgent

pytestmark = pytest.mark.harness("collinear")


@pytest.fixture(autouse=True)
def _address(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLLINEAR_TRAITMIX_BASE_URL", "")  # put back what the block sets


def test_two_conversations_run_to_their_last_exchange(user: Recorder, agent: ScriptedAgent) -> None:
    results = run_python(block("collinear"), user.url, agent.url)["results"]
    assert sorted(tuple(result.traitmix.traits) for result in results) == [("impatience",), ("skeptical",)]
    for result in results:
        assert [message["role"] for message in result.conv_prefix] == ["user", "assistant", "user"]
        assert all(message["content"].strip() for message in result.conv_prefix) and result.response
    entries = [entry for exchange in user.exchanges if exchange.path == "/steer_batch" for entry in exchange.sent]
    assert sorted(len(entry["messages"]) for entry in entries) == [0, 0, 2, 2]
    assert {tuple(entry["trait_dict"].items()) for entry in entries} == {
        (("impatience", "high"),),
        (("skeptical", "medium"),),
    }
    said = {text for exchange in user.exchanges for text in exchange.got["responses"]}
    assert said == {message["content"] for result in results for message in result.conv_prefix[::2]}


def test_an_unknown_trait_is_skipped_and_the_known_ones_are_listed(user: Recorder, agent: ScriptedAgent) -> None:
    os.environ["COLLINEAR_TRAITMIX_BASE_URL"] = user.url
    from collinear.client import Client

    client = Client(f"{agent.url}/v1", "none", "gpt-4.1", collinear_api_key="none")
    config = {"ages": ["25-34"], "intents": ["refund"], "traits": {"greed": ["high"]}, "tasks": ["online shopping"]}
    assert client.simulate(config, num_exchanges=1, progress=False) == []
    assert [(one.path, one.status) for one in user.exchanges] == [("/steer_batch", 422), ("/traits", 200)]
    assert {"impatience", "confusion", "skeptical", "incoherence"} <= set(user.exchanges[-1].got["traits"])
