"""Tasks that whole dialogues are held about: what a customer is told, and what the agent says whatever the answer is.

A file holds ``tasks``; ``contrastive_pairs/contexts/dialogues.yaml`` ships and is the model to copy. They are in no
contrastive pair, and no layer or dose was chosen on them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated

from pydantic import Field, model_validator

from traitbasis.contexts import read_entries, shipped
from traitbasis.pairs import Strict, Text, fold


class DialogueTask(Strict):
    """One task.

    company: whom the customer writes to. instruction: who the customer is, what they want and know, addressed to them.
    facts: by name, what of it the agent needs; each stands in the instruction word for word. agent: the script, from
    the greeting on. resolved: which message of the script, counted from 0, does what was asked for; no message before
    it gives a fact away.
    """

    id: Text
    domain: Text
    company: Text
    instruction: Text
    facts: Annotated[dict[Text, Text], Field(min_length=1)]
    agent: Annotated[tuple[Text, ...], Field(min_length=2)]
    resolved: Annotated[int, Field(ge=1)]

    @model_validator(mode="after")
    def _facts_are_the_customers_to_tell(self) -> DialogueTask:
        if self.resolved >= len(self.agent):
            raise ValueError(f"field 'resolved' is {self.resolved}; the agent's last message is {len(self.agent) - 1}")
        for name, fact in self.facts.items():
            if fact not in self.instruction:
                raise ValueError(f"field 'facts': {name} {fact!r} is not in the instruction, word for word")
            for number, message in enumerate(self.agent[: self.resolved]):
                if fold(fact) in fold(message):
                    raise ValueError(
                        f"field 'agent': message {number} gives away {name} {fact!r}; the customer has to tell it"
                    )
        return self


class _File(Strict):
    tasks: tuple[DialogueTask, ...]


def read_tasks(path: str | Path | None = None) -> list[DialogueTask]:
    """Tasks of a file, by default those that ship. Raises PairError naming the file, the task and the field."""
    return list(read_entries(path or shipped("dialogues.yaml"), _File, "tasks", "task"))


def tasks_hash(tasks: Sequence[DialogueTask]) -> str:
    """Identifies tasks with all that is said in them (16 hex digits)."""
    content = [task.model_dump(mode="json") for task in tasks]
    return hashlib.sha256(json.dumps(content, ensure_ascii=True).encode()).hexdigest()[:16]
