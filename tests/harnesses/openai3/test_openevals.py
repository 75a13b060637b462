"""openevals: run_multiturn_simulation with its own LLM-simulated user."""

from __future__ import annotations

import pytest
from document import block, run_python
from wire import Recorder, high

pytestmark = pytest.mark.harness("openevals")


def test_a_simulation_runs_to_its_last_turn(user: Recorder) -> None:
    names = run_python(block("openevals"), user.url)
    trajectory = names["result"]["trajectory"]
    assert [message["role"] for message in trajectory] == ["user", "assistant"] * 3
    turns = user.turns
    assert [message["content"] for message in trajectory[::2]] == [turn.message["content"] for turn in turns]
    assert all(turn.made_by["traits"] == {"impatience": high("impatience")} for turn in turns)
    # What the page says of its histories.
    assert set(turns[0].sent) == {"model", "messages", "stream"}
    assert turns[0].sent["messages"][1]["content"].startswith("Generate an initial query")
    assert [m["role"] for m in turns[1].sent["messages"]] == ["system", "assistant", "user"]
