"""Evaluation contexts: tasks on which steered turns are generated and measured. They are in no contrastive pair.

A file holds ``scenarios``, each with an id, a context as in a pair file, and the facts that a good customer states in
the very next turn. ``contrastive_pairs/contexts/selection.yaml`` ships: it chooses layers and doses.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Sequence
from importlib import resources
from pathlib import Path
from typing import Any

import yaml
from pydantic import ValidationError, field_validator, model_validator

from traitbasis.chat import Turn
from traitbasis.errors import PairError
from traitbasis.pairs import ContextTurn, PairLoader, Strict, Text, fold

_WIRE = {"system": "system", "agent": "user", "customer": "assistant"}


class EvaluationContext(Strict):
    """A conversation up to the agent's latest turn.

    facts: strings of the instruction that belong into the customer's next turn.
    """

    id: Text
    domain: Text
    context: tuple[ContextTurn, ...]
    facts: tuple[Text, ...]

    @field_validator("context")
    @classmethod
    def _is_an_instruction_and_a_talk(cls, context: tuple[Turn, ...]) -> tuple[Turn, ...]:
        speakers = [turn.speaker for turn in context]
        if len(context) < 2 or (speakers[0], speakers[-1]) != ("system", "agent"):
            raise ValueError("a context must begin with system and end with agent")
        if "system" in speakers[1:]:
            raise ValueError("a system turn can only come first")
        if any(not turn.text for turn in context):
            raise ValueError("a turn has no text")
        return context

    @model_validator(mode="after")
    def _facts_are_known(self) -> EvaluationContext:
        told = fold(" ".join(turn.text for turn in self.context))
        for fact in self.facts:
            if fold(fact) not in told:
                raise ValueError(f"the fact {fact!r} is nowhere in it; nobody can state what nobody was told")
        return self

    @property
    def turns(self) -> tuple[Turn, ...]:
        return self.context

    @property
    def messages(self) -> list[dict[str, str]]:
        """As a harness would send it: the agent is ``user``, the customer ``assistant``."""
        return [{"role": _WIRE[turn.speaker], "content": turn.text} for turn in self.context]


class _File(Strict):
    scenarios: tuple[EvaluationContext, ...]


def read_contexts(path: str | Path | None = None) -> list[EvaluationContext]:
    """Contexts of a file, by default those that ship. Raises PairError naming the file and what is wrong in it."""
    return list(read_entries(path or shipped("selection.yaml"), _File, "scenarios", "context"))


def contexts_hash(contexts: Sequence[EvaluationContext]) -> str:
    """Identifies contexts and facts (16 hex digits)."""
    content = [[c.id, [[turn.speaker, turn.text] for turn in c.context], list(c.facts)] for c in contexts]
    return hashlib.sha256(json.dumps(content, ensure_ascii=True).encode()).hexdigest()[:16]


def shipped(name: str) -> Path:
    """A file of contexts or tasks that comes with the package."""
    return Path(str(resources.files("traitbasis.contrastive_pairs") / "contexts" / name))


def read_entries(path: str | Path, form: type[Strict], field: str, noun: str) -> Sequence[Any]:
    """The entries in a YAML file: two or more, with different ids, in one list under `field`.

    form: of the file, with that field. noun: what errors call an entry. Raises PairError naming the file, the entry and
    its field.
    """
    file = Path(path)
    try:
        document = yaml.load(file.read_text(encoding="utf-8"), PairLoader)
    except OSError as error:
        raise PairError(f"cannot read {noun}s from {file}: {error.strerror or error}") from error
    except (yaml.YAMLError, ValueError, TypeError, LookupError, AttributeError, RecursionError) as error:
        raise PairError(f"{file} is not valid YAML: {error}") from error
    try:
        found: Sequence[Any] = getattr(form.model_validate(document), field)
    except ValidationError as error:
        said = (_explain(file, document, detail, field, noun) for detail in error.errors())
        raise PairError("\n".join(said)) from error
    ids = [entry.id for entry in found]
    if len(ids) < 2 or len(set(ids)) != len(ids):
        raise PairError(f"{file}: at least two {noun}s are needed, each with an id of its own")
    return found


def _explain(file: Path, document: Any, detail: Any, field: str, noun: str) -> str:
    message = detail["msg"].removeprefix("Value error, ")
    first, *location = detail["loc"] or ("",)
    if not location or first != field or not isinstance(location[0], int):
        return f"{file} holds no {noun}s: {message}"
    entry = list(document[field])[location[0]]  # a YAML set has no index
    name = entry.get("id") if isinstance(entry, dict) else None
    where = f"{noun} {name!r}" if isinstance(name, str) and name.strip() else f"{noun} number {location[0] + 1}"
    if location[1:]:
        where += f": field {'.'.join(map(str, location[1:]))!r}"
    return f"{file}: {where}: {message}"
