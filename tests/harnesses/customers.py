"""Scripted customers of tau-trait, for a ``ScriptedAgent`` to say: they tell everything, nothing, or stop too early.

Standard library only, for the harnesses' environments.
"""

from __future__ import annotations

import re
from typing import Any

STOP = "###STOP###"


def instruction(body: dict[str, Any]) -> str:
    """What the customer was told; empty where an environment is only made."""
    found = re.search(r"Instruction: (.*)\n\s*Rules:", body["messages"][0]["content"], re.DOTALL)
    return found[1].strip() if found else ""


def tells_all(body: dict[str, Any]) -> str:
    """The perfect customer: all facts as soon as the agent asks for something, and an end when it is done."""
    asked = body["messages"][-1]["content"]
    if "That is all done" in asked:
        return STOP
    return "Hello, I need some help." if len(body["messages"]) < 3 else instruction(body) or "Hello."


def tells_nothing(body: dict[str, Any]) -> str:
    return "I would rather not say."


def stops_early(body: dict[str, Any]) -> str:
    """Tells everything, and is gone when the agent wants to confirm."""
    return STOP if "Shall I go ahead?" in body["messages"][-1]["content"] else tells_all(body)
