"""Does a turn show the trait? The turn is re-read by the unsteered model and projected on an independent direction.

The probe's direction comes from held-out pairs, which no trait vector is made from, so a vector is not measured with
itself. Re-reading happens without steering: what is measured is the text, not what was added to the model.

Weak where: a projection is no judge. Text that is merely damaged moves along some directions too, so always read it
beside ``damage.py`` and beside a random direction of the same dose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from transformers import DynamicCache

from traitbasis.chat import As, TokenizedReply, Turn, tokenize_reply
from traitbasis.errors import PairError
from traitbasis.extract import read_states
from traitbasis.hooks import steer
from traitbasis.model import LanguageModel
from traitbasis.pairs import Pair, PairSet


@dataclass(frozen=True, eq=False)
class TraitProbe:
    """A direction that tells positive from negative held-out responses.

    direction: ``(d_model,)`` float32. Projections are scaled so that the held-out negatives average 0 and the
    held-out positives 1. auc: how well it ranks the pairs it was *not* made from (0.5 is chance).
    """

    trait: str
    layer: int
    as_: As
    direction: Tensor
    offset: float
    auc: float

    @classmethod
    def from_held_out(
        cls, lm: LanguageModel, pair_set: PairSet, layer: int | None = None, as_: As = "user"
    ) -> TraitProbe:
        """Make a probe from the ``heldout`` pairs and check it on all the others.

        layer: where hidden states are read; by default where the probe ranks the other pairs best, of equals the one
        nearest the middle. That is a choice of the instrument, made on pairs alone: no steered text has a part in it.
        Raises PairError when no pair is held out.
        """
        made_from = pair_set.select("heldout")
        if not made_from:
            raise PairError(f"{pair_set.trait}: no pair is marked 'use: heldout'; nothing independent can measure it")
        positive, negative = _sides(lm, made_from, as_)
        checked = _sides(lm, pair_set.select("default", "extra"), as_)
        middle = len(lm.layers) // 2
        probes = []
        for z in range(len(lm.layers)) if layer is None else [layer]:
            difference = positive[:, z].mean(0) - negative[:, z].mean(0)
            direction = difference / difference.square().sum()
            offset = float(negative[:, z].mean(0) @ direction)
            rank = auc(*(side[:, z] @ direction for side in checked))
            probes.append(cls(pair_set.trait, z, as_, direction, offset, rank))
        return max(probes, key=lambda probe: (probe.auc, -abs(probe.layer - middle)))

    def score(self, lm: LanguageModel, turns: Sequence[tuple[Sequence[Turn], str]]) -> Tensor:
        """Expression ``(n,)`` of each (context, reply): 0 as the held-out negatives, 1 as the held-out positives."""
        return score([self], lm, turns)[self.trait]


def score(
    probes: Sequence[TraitProbe], lm: LanguageModel, turns: Sequence[tuple[Sequence[Turn], str]]
) -> Mapping[str, Tensor]:
    """Expression ``(n,)`` by trait, for several probes with one reading of the turns."""
    if len({probe.as_ for probe in probes}) != 1:
        raise ValueError("score needs probes, all made under the same header")
    replies = [tokenize_reply(lm.tokenizer, context, text, probes[0].as_) for context, text in turns]
    means = read_states(lm, replies).means
    return {probe.trait: means[:, probe.layer] @ probe.direction - probe.offset for probe in probes}


def preference(lm: LanguageModel, pairs: Sequence[Pair], additions: Mapping[int, Tensor], as_: As) -> Tensor:
    """How much likelier the trait's wording is to the model than its absence, ``(n,)`` nats per token.

    For each pair: mean log-probability of the positive response's tokens minus that of the negative's, under steering
    with `additions`, ``(d_model,)`` float32 by layer. Compare it with the unsteered one, ``additions={}``. Nothing is
    sampled, so there is no noise; `pairs` should be held out. The prompt is clean and the response's positions are
    steered, from the last prompt position on (contract 4).
    """

    def mean_logprob(pair: Pair, text: str) -> float:
        return _mean_logprob(lm, tokenize_reply(lm.tokenizer, pair.context, text, as_), additions)

    return torch.tensor([mean_logprob(pair, pair.positive) - mean_logprob(pair, pair.negative) for pair in pairs])


def auc(positive: Tensor, negative: Tensor) -> float:
    """Probability that a positive outranks a negative, ties counted half: 1 is perfect, 0.5 is chance."""
    difference = positive[:, None] - negative[None, :]
    return float(((difference > 0).float() + 0.5 * (difference == 0).float()).mean())


def _sides(lm: LanguageModel, pairs: Sequence[Pair], as_: As) -> tuple[Tensor, Tensor]:
    """Means ``(n, layers, d_model)`` of the positive and of the negative responses."""
    replies = [tokenize_reply(lm.tokenizer, p.context, text, as_) for p in pairs for text in (p.positive, p.negative)]
    means = read_states(lm, replies).means
    return means[0::2], means[1::2]


def _mean_logprob(lm: LanguageModel, reply: TokenizedReply, additions: Mapping[int, Tensor]) -> float:
    ids = torch.tensor([reply.ids], device=lm.device)
    mask = torch.ones_like(ids)
    start = reply.positions[0] - 1  # the last prompt position produces the first response token
    cache = DynamicCache(config=lm.model.config)
    if start:
        lm.forward(ids[:, :start], mask[:, :start], cache)
    with steer(lm.layers, additions):
        logits = lm.forward(ids[:, start:], mask, cache, last_only=False)[0, :-1].float()
    return float(logits.log_softmax(-1).gather(1, ids[0, start + 1 :, None]).mean())
