"""What steering does to the model's next-token probabilities on pairs. Nothing is sampled, so there is no noise.

Both responses of a pair are given to the model token by token, steered, after the clean context:

- *preference*: mean log-probability of the positive response's tokens minus that of the negative's, nats per token;
  steering towards the trait raises it.
- *fact cost*: how much less likely the tokens of the pair's facts become, nats per fact token, over both responses; a
  cost of 0.7 halves each token's probability.
- *KL*: divergence of the steered next-token distribution from the unsteered one, nats, over all counted tokens.

They judge the model, not the text it writes: a direction may raise the preference and still not write the trait.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from traitbasis.chat import Turn
from traitbasis.pairs import Pair, fold
from traitbasis.reading import Reader, Reading

_KL_PAIRS = 4  # whose unsteered distributions are kept: half a megabyte a token for a large vocabulary


@dataclass(frozen=True, eq=False)
class Likelihood:
    """By pair: preference and fact_cost ``(pairs,)``, kl ``(min(pairs, 4),)``; nats per token."""

    preference: Tensor
    fact_cost: Tensor
    kl: Tensor


class PairLikelihood:
    """Pairs read unsteered once, to compare steered readings with."""

    def __init__(self, reader: Reader, pairs: Sequence[Pair]) -> None:
        self._reader = reader
        self._pairs = tuple(pairs)
        self._plain = [reader.read(_sides(pair), distributions=i < _KL_PAIRS) for i, pair in enumerate(self._pairs)]
        self._facts = [
            [fact_tokens(reading, text, pair.facts) for reading, (_, text) in zip(read, _sides(pair), strict=True)]
            for pair, read in zip(self._pairs, self._plain, strict=True)
        ]

    def measure(self, additions: Mapping[int, Tensor]) -> Likelihood:
        """Steered with `additions`, ``(d_model,)`` float32 by layer; preference is the difference to unsteered."""
        return self.measure_all([additions])[0]

    def measure_all(self, additions: Sequence[Mapping[int, Tensor]]) -> list[Likelihood]:
        """The same for several, read together: a pair's replies under all of them are one batch."""
        rows: list[list[tuple[Tensor, Tensor, Tensor | None]]] = [[] for _ in additions]
        for pair, plain, facts in zip(self._pairs, self._plain, self._facts, strict=True):
            told = plain[0].distributions is not None
            turns = [side for _ in additions for side in _sides(pair)]
            read = self._reader.read(turns, [added for added in additions for _ in range(2)], distributions=told)
            for n, found in enumerate(rows):
                found.append(_compare(read[2 * n : 2 * n + 2], plain, facts))
        return [
            Likelihood(
                torch.stack([preference for preference, _, _ in found]),
                torch.stack([cost for _, cost, _ in found]),
                torch.stack([kl for _, _, kl in found if kl is not None]),
            )
            for found in rows
        ]


def fact_tokens(reading: Reading, text: str, facts: Sequence[str]) -> list[int]:
    """Which of a reading's counted tokens hold a character of one of `facts`; case and white space do not matter."""
    folded, origin = "", list[int]()  # as ``fold`` does it, and which character each of `folded` comes from
    for i, character in enumerate(text.strip()):
        for part in " " if character.isspace() else character.casefold():
            if part != " " or not folded.endswith(" "):
                folded += part
                origin.append(i)
    spans = [
        (origin[match.start()], origin[match.end() - 1] + 1)
        for fact in facts
        for match in re.finditer(re.escape(fold(fact)), folded)
    ]
    characters = reading.reply.characters
    return [i for i, (left, right) in enumerate(characters) if any(left < b and a < right for a, b in spans)]


def _sides(pair: Pair) -> list[tuple[Sequence[Turn], str]]:
    return [(pair.context, pair.positive), (pair.context, pair.negative)]


def _compare(
    steered: Sequence[Reading], plain: Sequence[Reading], facts: Sequence[list[int]]
) -> tuple[Tensor, Tensor, Tensor | None]:
    """Preference, fact cost and KL of one pair, whose positive side comes first."""
    change = [now.logprobs - before.logprobs for now, before in zip(steered, plain, strict=True)]
    cost = torch.stack([-by_token[tokens].mean() for by_token, tokens in zip(change, facts, strict=True)]).mean()
    kl = [
        (now.distributions.exp() * (now.distributions - before.distributions)).sum(-1).mean()
        for now, before in zip(steered, plain, strict=True)
        if now.distributions is not None and before.distributions is not None
    ]
    return change[0].mean() - change[1].mean(), cost, torch.stack(kl).mean() if kl else None
