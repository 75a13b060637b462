"""Tool calls as text: how a chat template writes a call, and so how its model does.

A call is a text before the tool's name, one between name and arguments, and one after the arguments. They are taken
from what the template renders, white space included, so that earlier calls, calls to come and the grammar that holds
them agree with what the model was trained on.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

Family = Literal["hermes", "llama", "mistral", "mistral args"]

# Deeper values end in Python's recursion limit somewhere down the line.
MAX_DEPTH = 64


@dataclass(frozen=True)
class ToolCall:
    """A call of a tool by the customer. id: as the harness knows it, "" before it has one."""

    id: str
    name: str
    arguments: Mapping[str, Any]


@dataclass(frozen=True)
class CallSyntax:
    """How a call is written: `before` + name + `between` + arguments as JSON + `after`."""

    family: Family
    before: str
    between: str
    after: str

    @property
    def opener(self) -> str:
        """What a reply begins with when it is a call."""
        tag = re.match(r"<[^>]+>|\[TOOL_CALLS\]", self.before)
        return tag[0] if tag else self.before[0]

    def write(self, name: str, arguments: Mapping[str, Any]) -> str:
        """The text of a call."""
        quoted = json.dumps(name, ensure_ascii=False)[1:-1]
        return f"{self.before}{quoted}{self.between}{json.dumps(arguments, ensure_ascii=False)}{self.after}"


# What models are taught whose template knows no tools; the commonest convention there is.
HERMES = CallSyntax("hermes", '<tool_call>\n{"name": "', '", "arguments": ', "}\n</tool_call>")

# Before the name, between, after. Ids are for finished calls; models do not write them.
_SHAPES: dict[Family, tuple[str, str, str]] = {
    "hermes": (r'(<tool_call>\s*\{"name":\s*")', r'(",\s*"arguments":\s*)', r"(\}\s*</tool_call>)"),
    "mistral": (r'(\[TOOL_CALLS\]\s*\[\{"name":\s*")', r'(",\s*"arguments":\s*)', r'(?:,\s*"id":\s*"[^"]*")?(\}\])'),
    "mistral args": (r"(\[TOOL_CALLS\])", r"(?:\[CALL_ID\][^\[]*)?(\[ARGS\])", "()"),
    "llama": (r'((?:<\|python_tag\|>)?\{"name":\s*")', r'(",\s*"(?:parameters|arguments)":\s*)', r"(\})"),
}


def find_syntax(text: str, call: ToolCall, reply_at: str) -> CallSyntax | None:
    """How `call` is written in a rendered conversation, or None when in none of the known ways.

    reply_at: the rendered conversation up to where the call's turn begins. A call without a tag of its own, as
    Llama's, is one only when nothing else stands before it there.
    """
    tokens = re.findall(r'"[^"]*"|[{}:,]', json.dumps(call.arguments))
    arguments = r"\s*".join(map(re.escape, tokens))
    for family, (before, between, after) in _SHAPES.items():
        found = re.search(before + re.escape(call.name) + between + arguments + after, text)
        if not found:
            continue
        header = reply_at.rstrip()
        if family == "llama" and not (text.startswith(header) and not text[len(header) : found.start()].strip()):
            continue
        return CallSyntax(family, *found.groups())
    return None


def deeper_than(levels: int, value: Any) -> bool:
    """Whether a JSON value holds lists and objects more than `levels` deep."""
    if not isinstance(value, Mapping | list):
        return False
    inner = value.values() if isinstance(value, Mapping) else value
    return levels == 0 or any(deeper_than(levels - 1, item) for item in inner)
