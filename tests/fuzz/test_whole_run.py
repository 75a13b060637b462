"""What is left of a run; pytest comes to this file last."""

from __future__ import annotations

import time
from collections.abc import Mapping

import pytest
from oracle import check_chat, refused
from served import WORLDS, Asked, Tally, Wire


@pytest.mark.parametrize("world", WORLDS)
def test_nothing_is_left_in_the_engine_and_it_answers(wires: Mapping[str, Wire], world: str) -> None:
    wire = wires[world]
    deadline = time.monotonic() + 10
    while (stats := wire.simulator.engine.stats()).running or stats.waiting:
        assert time.monotonic() < deadline, stats
        time.sleep(0.05)
    assert not stats.closed
    body = {"model": "steered-user", "messages": [{"role": "user", "content": "Hi! How can I help you today?"}]}
    (reply,) = wire.burst("afterwards", [Asked("/v1/chat/completions", body, {})])
    assert not refused(reply)
    check_chat(reply, body)


def test_the_run_was_long_enough(tally: Tally, pytestconfig: pytest.Config) -> None:
    assert tally.requests >= pytestconfig.getoption("--least")
