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

import yaml
from pydantic import ValidationError

from traitbasis.chat import Turn
from traitbasis.errors import PairError
from traitbasis.pairs import ContextTurn, Text, _Strict

_WIRE = {"system": "system", "agent": "user", "customer": "assistant"}


class EvaluationContext(_Strict):
    """A conversation up to the agent's latest turn.

    facts: strings of the instruction that belong into the customer's next turn.
    """

    id: Text
    domain: Text
    context: tuple[ContextTurn, ...]
    facts: tuple[Text, ...]

    @property
    def turns(self) -> tuple[Turn, ...]:
        return self.context

    @property
    def messages(self) -> list[dict[str, str]]:
        """As a harness would send it: the agent is ``user``, the customer ``assistant``."""
        return [{"role": _WIRE[turn.speaker], "content": turn.text} for turn in self.context]


class _File(_Strict):
    scenarios: tuple[EvaluationContext, ...]


def read_contexts(path: str | Path | None = None) -> list[EvaluationContext]:
    """Contexts of a file, by default those that ship. Raises PairError naming the file and what is wrong in it."""
    file = Path(path or str(resources.files("traitbasis.contrastive_pairs") / "contexts" / "selection.yaml"))
    try:
        found = _File.model_validate(yaml.safe_load(file.read_text(encoding="utf-8"))).scenarios
    except OSError as error:
        raise PairError(f"cannot read contexts from {file}: {error.strerror or error}") from error
    except (yaml.YAMLError, ValidationError, ValueError) as error:
        raise PairError(f"{file} holds no contexts: {error}") from error
    ids = [context.id for context in found]
    if len(ids) < 2 or len(set(ids)) != len(ids):
        raise PairError(f"{file}: at least two contexts are needed, each with an id of its own")
    for context in found:
        if len(context.context) < 2 or (context.context[0].speaker, context.context[-1].speaker) != ("system", "agent"):
            raise PairError(f"{file}: context {context.id!r} must begin with system and end with agent")
    return list(found)


def contexts_hash(contexts: Sequence[EvaluationContext]) -> str:
    """Identifies contexts and facts (16 hex digits)."""
    content = [[c.id, [[turn.speaker, turn.text] for turn in c.context], list(c.facts)] for c in contexts]
    return hashlib.sha256(json.dumps(content, ensure_ascii=True).encode()).hexdigest()[:16]
