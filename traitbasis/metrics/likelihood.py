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
        self._turns = [(pair.context, text) for pair in pairs for text in (pair.positive, pair.negative)]
        self._plain = self._read({})
        self._facts = [
            fact_tokens(reading, text, self._pairs[i // 2].facts)
            for i, (reading, (_, text)) in enumerate(zip(self._plain, self._turns, strict=True))
        ]

    def measure(self, additions: Mapping[int, Tensor]) -> Likelihood:
        """Steered with `additions`, ``(d_model,)`` float32 by layer; preference is the difference to unsteered."""
        steered = self._read(additions)
        change = [now.logprobs - before.logprobs for now, before in zip(steered, self._plain, strict=True)]
        preference = torch.stack([a.mean() - b.mean() for a, b in zip(change[0::2], change[1::2], strict=True)])
        lost = [-by_token[facts].mean() for by_token, facts in zip(change, self._facts, strict=True)]
        kl = [
            _kl(now, before) for now, before in zip(steered[: 2 * _KL_PAIRS], self._plain[: 2 * _KL_PAIRS], strict=True)
        ]
        return Likelihood(
            preference,
            (torch.stack(lost[0::2]) + torch.stack(lost[1::2])) / 2,
            (torch.stack(kl[0::2]) + torch.stack(kl[1::2])) / 2,
        )

    def _read(self, additions: Mapping[int, Tensor]) -> list[Reading]:
        few, many = self._turns[: 2 * _KL_PAIRS], self._turns[2 * _KL_PAIRS :]
        return [*self._reader.read(few, additions, distributions=True), *self._reader.read(many, additions)]


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


def _kl(steered: Reading, plain: Reading) -> Tensor:
    assert steered.distributions is not None and plain.distributions is not None
    p, q = steered.distributions, plain.distributions
    return (p.exp() * (p - q)).sum(-1).mean()
