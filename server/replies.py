"""What OpenAI's endpoints say of a turn, whichever of them is asked."""

from __future__ import annotations

import json
import time
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from traitbasis.engines.base import TokenLogprob
from traitbasis.errors import RequestError
from traitbasis.simulator import UserSimulator
from traitbasis.spec import format_traits
from traitbasis.tries import UserTurn
from traitbasis.users import ServedUser

from .limits import Limits

MAX_CHOICES = 16
MAX_TOP_LOGPROBS = 20
_LONGEST_CHARACTER = 4  # bytes, and so tokens
# For the OpenAPI document, of a route that streams where it is asked to.
STREAMS: dict[int | str, dict[str, Any]] = {
    200: {"content": {"text/event-stream": {"example": 'data: {"choices": []}\n\ndata: [DONE]\n\n'}}}
}


class Replies:
    """Parts of replies that need to know the simulator."""

    def __init__(self, simulator: UserSimulator) -> None:
        self._simulator = simulator
        self._provenance = simulator.provenance
        self._ends = simulator.lm.stop_ids("user") | simulator.lm.stop_ids("assistant")

    def head(self, kind: str, model: str) -> dict[str, Any]:
        """Fields that every object of one reply begins with."""
        return {
            "id": f"{kind}-{uuid.uuid4().hex}",
            "created": int(time.time()),
            "model": model,
            "system_fingerprint": f"tb-{self._provenance['basis']}",
        }

    def metadata(self, turns: Sequence[UserTurn]) -> dict[str, Any]:
        """The ``traitbasis`` field: of the first choice; the others' stands beside it."""
        first, *others = (self._metadata(turn) for turn in turns)
        return first | ({"choices": [first, *others]} if others else {})

    def _metadata(self, turn: UserTurn) -> dict[str, Any]:
        return {
            "user": turn.user,
            "traits": turn.intensities,
            "spec": format_traits(turn.intensities),
            "dose": round(turn.dose, 4),
            "share_of_limit": share_of_limit(turn.share),
            "forced": turn.forced,
            "seed": turn.seed,
            "sampling": asdict(turn.sampling),
            "tries": turn.tries,
            "rejected": turn.rejected,
            "failed_guard": turn.failed_guard,
            "plain": turn.plain,
            "dropped": turn.dropped,
            "positions": turn.positions,
            **self._provenance,
            "as": turn.as_,
            **({"reaction": turn.reaction.record} if turn.reaction else {}),
        }

    def tokens(self, turn: UserTurn) -> list[tuple[int, TokenLogprob]]:
        """Tokens of a turn with their log-probabilities, without the one that only ended it."""
        found = list(zip(turn.token_ids, turn.logprobs, strict=True)) if turn.logprobs else []
        return found[:-1] if found and found[-1][0] in self._ends else found

    def text(self, token: int) -> str:
        """A token as text; half a character is U+FFFD."""
        return str(self._simulator.lm.tokenizer.decode([token]))

    def offsets(self, tokens: Sequence[int]) -> list[int]:
        """Where each token begins in their text, in characters; one that goes on with a character, where that does."""
        found, at, open_ = [], 0, list[int]()
        for token in tokens:
            found.append(at)
            open_.append(token)
            text = str(self._simulator.lm.tokenizer.decode(open_))
            if not text.endswith("\ufffd") or len(open_) >= _LONGEST_CHARACTER:
                at, open_ = at + len(text), []
        return found

    def check_choices(self, n: int | None, prompts: int = 1) -> int:
        """How many choices are asked for. Raises RequestError when that is more than can ever be had."""
        n = 1 if n is None else n
        if not 1 <= n <= MAX_CHOICES:
            raise RequestError(f"n is {n}; it must be between 1 and {MAX_CHOICES}")
        if n * prompts > (room := self._simulator.engine.stats().max_queue):  # would be refused as busy for ever
            of = f" of {prompts} prompts" if prompts > 1 else ""
            raise RequestError(f"n is {n}{of}; this server's queue (--max-queue) holds {room}")
        return n

    def options(self, limits: Limits, sampling: Mapping[str, Any], user: ServedUser) -> dict[str, Any]:
        """Sampling that was asked for, its length within the server's limits."""
        usual = user.sampling.get("max_tokens", self._simulator.sampling.max_tokens)
        return {**sampling, "max_tokens": limits.max_tokens(sampling.get("max_tokens"), usual)}


def finish_reason(turn: UserTurn) -> str:
    return "tool_calls" if turn.calls else "length" if turn.finish == "length" else "stop"


def share_of_limit(share: float | None) -> float | None:
    """As it is told: null for what is not calibrated."""
    return None if share is None else round(share, 4)


def usage(turns: Sequence[UserTurn], choices: int = 1) -> dict[str, int]:
    """Tokens of turns that stand prompt by prompt, `choices` each."""
    prompt = sum(turn.prompt_tokens for turn in turns[::choices])
    completion = sum(turn.completion_tokens for turn in turns)
    return {"prompt_tokens": prompt, "completion_tokens": completion, "total_tokens": prompt + completion}


def event(data: dict[str, Any]) -> str:
    """One server-sent event."""
    return f"data: {json.dumps(data)}\n\n"
