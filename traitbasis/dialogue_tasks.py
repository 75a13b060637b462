"""Tasks that whole dialogues are held about: what a customer is told, and what the agent says whatever the answer is.

A file holds ``tasks``; ``contrastive_pairs/contexts/dialogues.yaml`` ships and is the model to copy. They are in no
contrastive pair, and no layer or dose was chosen on them.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Annotated, Any

import yaml
from pydantic import Field, ValidationError, model_validator

from traitbasis.errors import PairError
from traitbasis.pairs import PairLoader, Strict, Text, fold


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
    file = Path(path or str(resources.files("traitbasis.contrastive_pairs") / "contexts" / "dialogues.yaml"))
    try:
        document = yaml.load(file.read_text(encoding="utf-8"), PairLoader)
    except OSError as error:
        raise PairError(f"cannot read tasks from {file}: {error.strerror or error}") from error
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise PairError(f"{file} is not valid YAML: {error}") from error
    try:
        found = _File.model_validate(document).tasks
    except ValidationError as error:
        raise PairError("\n".join(_explain(file, document, detail) for detail in error.errors())) from error
    ids = [task.id for task in found]
    if len(ids) < 2 or len(set(ids)) != len(ids):
        raise PairError(f"{file}: at least two tasks are needed, each with an id of its own")
    return list(found)


def tasks_hash(tasks: Sequence[DialogueTask]) -> str:
    """Identifies tasks with all that is said in them (16 hex digits)."""
    content = [task.model_dump(mode="json") for task in tasks]
    return hashlib.sha256(json.dumps(content, ensure_ascii=True).encode()).hexdigest()[:16]


def _explain(file: Path, document: Any, detail: Any) -> str:
    message = detail["msg"].removeprefix("Value error, ")
    field, *location = detail["loc"] or ("",)
    if not location or field != "tasks" or not isinstance(location[0], int):
        return f"{file} holds no tasks: {message}"
    entry = list(document["tasks"])[location[0]]  # a YAML set has no index
    name = entry.get("id") if isinstance(entry, dict) else None
    where = f"task {name!r}" if isinstance(name, str) and name.strip() else f"task number {location[0] + 1}"
    if location[1:]:
        where += f": field {'.'.join(map(str, location[1:]))!r}"
    return f"{file}: {where}: {message}"
