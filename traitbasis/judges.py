"""Prompts that a harness sends to its user's model and that are not a user's turn: verdicts, checks, choices.

Steering or guarding them would corrupt the harness's own decisions (contract 10). They are recognised by how they
begin; a request can say the same with ``traits: {}``. The phrases are those that the harnesses' own sources send.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from typing import Any

from traitbasis.chat import Turn

_JUDGES = {
    "tau-bench verifier": r"You are a supervisor of the Agent in the conversation",
    "deepeval": r"You are a Conversation Completion Checker",
}
_PATTERN = {name: re.compile(rf"\W*{head}", re.IGNORECASE) for name, head in _JUDGES.items()}


def judge_prompt(turns: Sequence[Turn]) -> str | None:
    """Whose judge prompt a conversation is, or None when it asks for a user's turn.

    A judge prompt is the first thing said, by the system or by the agent, and no customer has spoken.
    """
    if not turns or any(turn.speaker == "customer" for turn in turns):
        return None
    return next((name for name, pattern in _PATTERN.items() if any(pattern.match(turn.text) for turn in turns)), None)


# Properties of answers that are a user's turn all the same, wrapped in JSON.
_TURNS = ({"simulated_input"}, {"action_type", "argument"})  # deepeval, sotopia


def is_turn_schema(schema: Mapping[str, Any] | None) -> bool:
    """Whether an answer of this JSON schema is a user's turn, so that traits belong in it."""
    properties = (schema or {}).get("properties")
    return isinstance(properties, Mapping) and any(names <= properties.keys() for names in _TURNS)
