"""Does a turn show the trait? The turn is re-read by the unsteered model and projected on an independent direction.

The probe's direction comes from held-out pairs, which no trait vector is made from, so a vector is not measured with
itself. Re-reading happens without steering: what is measured is the text, not what was added to the model.

Weak where: a projection is no judge. Text that is merely damaged moves along some directions too, so always read it
beside ``damage.py`` and beside a random direction of the same dose.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import get_args

import torch
from torch import Tensor
from transformers import DynamicCache

from traitbasis.chat import As, TokenizedReply, Turn, tokenize_reply
from traitbasis.errors import PairError
from traitbasis.extract import read_states
from traitbasis.hooks import steer
from traitbasis.model import LanguageModel
from traitbasis.pairs import Pair, PairSet, Use
from traitbasis.reading import Reader


@dataclass(frozen=True, eq=False)
class Sides:
    """Mean states of one trait's pair responses, ``(pairs, layers, d_model)`` float32, by use of the pair.

    surprise: of the positive responses, ``(pairs,)`` nats per token; empty where it was not read.
    """

    positive: Mapping[str, Tensor]
    negative: Mapping[str, Tensor]
    surprise: Tensor = field(default_factory=lambda: torch.zeros(0))

    def of(self, *uses: str) -> tuple[Tensor, Tensor]:
        """Positives and negatives of the pairs with these uses."""
        return torch.cat([self.positive[use] for use in uses]), torch.cat([self.negative[use] for use in uses])


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
        reader = Reader(lm, as_)
        return cls.from_sides(pair_set.trait, read_sides(reader, pair_set), as_, layer)

    @classmethod
    def from_sides(cls, trait: str, sides: Sides, as_: As = "user", layer: int | None = None) -> TraitProbe:
        """The same from pairs that were read already."""
        positive, negative = sides.of("heldout")
        if not len(positive):
            raise PairError(f"{trait}: no pair is marked 'use: heldout'; nothing independent can measure it")
        checked = sides.of("default", "extra")
        layers = positive.shape[1]
        probes = []
        for z in range(layers) if layer is None else [layer]:
            difference = positive[:, z].mean(0) - negative[:, z].mean(0)
            direction = difference / difference.square().sum()
            offset = float(negative[:, z].mean(0) @ direction)
            rank = auc(*(side[:, z] @ direction for side in checked))
            probes.append(cls(trait, z, as_, direction, offset, rank))
        return max(probes, key=lambda probe: (probe.auc, -abs(probe.layer - layers // 2)))

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


def read_sides(reader: Reader, pair_set: PairSet) -> Sides:
    """Read all of a trait's responses with the unsteered model. Raises ChatTemplateError as ``tokenize_reply`` does."""
    turns = [(pair.context, text) for pair in pair_set.pairs for text in (pair.positive, pair.negative)]
    read = reader.read(turns, states=True)
    states = torch.stack([reading.states for reading in read if reading.states is not None])
    rows = {use: [i for i, pair in enumerate(pair_set.pairs) if pair.use == use] for use in get_args(Use)}
    return Sides(
        {use: states[0::2][chosen] for use, chosen in rows.items()},
        {use: states[1::2][chosen] for use, chosen in rows.items()},
        torch.tensor([reading.surprise for reading in read[0::2]]),
    )


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
