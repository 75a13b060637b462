"""What a harness's prompt asks for, where that is not "the customer's next message" said in the protocol's own way.

Harnesses send more to their user's model than user turns: verdicts, checks, requests for JSON that no field announces,
and stage directions in the agent's place. Each is recognised by how it begins; the phrases are what the harnesses' own
sources send. A prompt is only ever what opens a conversation: once a customer has spoken, all is said by the agent.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

from traitbasis.chat import Turn

GREETING = "Hi! How can I help you today?"

_TEXT, _MAYBE_TEXT = {"type": "string"}, {"type": ["string", "null"]}


def _object(**properties: Mapping[str, Any]) -> dict[str, Any]:
    required = list(properties)
    return {"type": "object", "properties": properties, "required": required, "additionalProperties": False}


# Answering them as a steered customer would corrupt the harness's own decisions (contract 10). They come in the agent's
# place; those of the second list as the system's text, which otherwise may say of a customer whatever it likes.
_JUDGES = {
    "tau-bench": (
        "You are a supervisor of the Agent in the conversation",
        "Please check if the latest user turn",
        "Please modify the latest user turn",
    ),
    "tau2": ('You are a verifier agent checking for "stuck-in-a-loop"',),
    "deepeval": (
        "You are a Conversation Completion Checker",
        "You are routing a simulated conversation",
        "You are deciding whether a simulated phone/voice caller",
    ),
    "scenario": ("You are evaluating an AI agent's response during",),
    "openevals": (
        "You are an expert data labeler",
        "You are an expert conversation evaluator",
        "You are an expert evaluator",
    ),
    "inspect_ai": (
        "You are assessing a submitted answer on a given task",
        "You are comparing a submitted answer to an expert answer",
    ),
    "sotopia": (
        "Given the string that can not be parsed by json parser",
        "Please generate your goal based on the background",
        "Please generate scenarios and goals",
        "Please convert the following text into a first-person narrative",
        "Please expand a fictional background for",
        r"Here is the context of this interaction:(?s:.*)evaluate how well participants achieve their goals",
    ),
}
_SYSTEM_JUDGES = {
    "tau-bench": ("You are a supervisor of the Agent in the conversation",),
    "tau2": (r"TASK\W{1,9}You will be given a list of expected outcomes and a conversation",),
    "scenario": (
        "You are an LLM as a judge",
        "You are evaluating an AI agent's response during an authorized red-team",
        "You are a security researcher writing an authorized AI red-team attack plan",
    ),
}
# deepeval asks for JSON in words alone, and gives up at the first answer that does not parse.
_JSON = {
    "Pretend you are a user of an LLM app": _object(simulated_input=_TEXT),
    "You are a Conversation Completion Checker": _object(is_complete={"type": "boolean"}, reason=_TEXT),
    "You are routing a simulated conversation": _object(index={"type": ["integer", "null"]}, reason=_TEXT),
    "You are deciding whether a simulated phone/voice caller": _object(
        should_interrupt={"type": "boolean"}, reason=_TEXT, utterance=_MAYBE_TEXT
    ),
}
# To the one who plays the customer, before anybody has spoken.
_DIRECTIONS = (
    "Generate an initial query to start a conversation based on your instructions",  # openevals
    "Begin the interaction. Remember you are the customer",  # inspect_evals
)
# Properties of answers that are a user's turn all the same, wrapped in JSON.
_TURNS = ({"simulated_input"}, {"action_type", "argument"})  # deepeval, sotopia


def _beginnings(*phrases: str) -> re.Pattern[str]:
    return re.compile(rf"\W{{0,40}}(?:role\W{{1,40}})?(?:{'|'.join(phrases)})")


_IS_JUDGE = [
    (speaker, harness, _beginnings(*phrases))
    for speaker, judges in (("agent", _JUDGES), ("system", _SYSTEM_JUDGES))
    for harness, phrases in judges.items()
]
_IS_JSON = [(_beginnings(re.escape(phrase)), schema) for phrase, schema in _JSON.items()]
_IS_DIRECTION = _beginnings(*map(re.escape, _DIRECTIONS))


def judge_prompt(turns: Sequence[Turn]) -> str | None:
    """Whose judge prompt a conversation is, or None when it asks for a user's turn."""
    for turn in _opening(turns):
        for speaker, harness, begins in _IS_JUDGE:
            if turn.speaker == speaker and begins.match(turn.text):
                return harness
    return None


def asked_json(turns: Sequence[Turn]) -> Mapping[str, Any] | None:
    """JSON schema of an answer that a prompt asks for in words, or None when it asks for text."""
    texts = [turn.text for turn in _opening(turns) if turn.speaker == "agent"]
    return next((schema for begins, schema in _IS_JSON if any(map(begins.match, texts))), None)


def is_turn_schema(schema: Mapping[str, Any] | None) -> bool:
    """Whether an answer of this JSON schema is a user's turn, so that traits belong in it."""
    properties = (schema or {}).get("properties")
    return isinstance(properties, Mapping) and any(names <= properties.keys() for names in _TURNS)


def without_directions(turns: Sequence[Turn]) -> list[Turn]:
    """The conversation with the agent's greeting in the place of a stage direction to the customer."""
    directed = bool(_opening(turns))
    return [
        replace(turn, text=GREETING)
        if directed and turn.speaker == "agent" and _IS_DIRECTION.match(turn.text)
        else turn
        for turn in turns
    ]


def _opening(turns: Sequence[Turn]) -> Sequence[Turn]:
    """What was said before any customer spoke; nothing when one has."""
    return () if any(turn.speaker == "customer" for turn in turns) else turns
