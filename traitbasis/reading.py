"""Read many replies to few contexts: what the model's hidden states and next-token probabilities are on each of them.

A context's keys and values are computed once, clean, and serve every reply to it, steered or not: reading forty tokens
costs forty tokens, not the conversation before them. Replies of one batch are padded on the right, where nothing a
causal model reads can see it.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor
from transformers import DynamicCache

from traitbasis.chat import As, TokenizedReply, Turn, tokenize_reply
from traitbasis.hooks import record, steer
from traitbasis.model import LanguageModel


@dataclass(frozen=True, eq=False)
class Reading:
    """One reply as the model read it.

    reply: how it was tokenised. logprobs: ``(tokens,)`` float32, natural log-probability of each counted token given
    all before it. states: ``(layers, d_model)`` float32, mean hidden state over the counted tokens, and norms
    ``(layers,)``, the mean of their norms; None if not asked.
    distributions: ``(tokens, vocabulary)`` log-probabilities at the counted tokens' places; None if not asked.
    """

    reply: TokenizedReply
    logprobs: Tensor
    states: Tensor | None = None
    norms: Tensor | None = None
    distributions: Tensor | None = None

    @property
    def surprise(self) -> float:
        """Mean negative log-probability, nats per token; its exponential is the perplexity."""
        return -float(self.logprobs.mean())


class Reader:
    """Reads replies under one header, keeping each context's keys and values."""

    def __init__(self, lm: LanguageModel, as_: As = "user", *, batch_size: int = 12) -> None:
        self.lm = lm
        self.as_ = as_
        self._batch_size = batch_size
        self._prefixes: dict[tuple[int, ...], DynamicCache] = {}

    def read(
        self,
        turns: Sequence[tuple[Sequence[Turn], str]],
        additions: Mapping[int, Tensor] | Sequence[Mapping[int, Tensor]] | None = None,
        *,
        states: bool = False,
        distributions: bool = False,
    ) -> list[Reading]:
        """Readings of (context, reply), in order.

        additions: steer the positions that produce the reply's tokens, from the last prompt position on (contract 4);
        ``(d_model,)`` float32 by layer, for all turns or one mapping a turn. Raises ChatTemplateError for a reply that
        cannot be found in its rendering.
        """
        if additions is None or isinstance(additions, Mapping):
            additions = [additions or {}] * len(turns)
        replies = [tokenize_reply(self.lm.tokenizer, context, text, self.as_) for context, text in turns]
        # One batch begins at one place, which steering begins at. The last prompt position is read with the reply: it
        # produces the first token.
        groups: dict[tuple[int, ...], list[int]] = {}
        for i, reply in enumerate(replies):
            groups.setdefault(reply.ids[: reply.positions[0] - 1], []).append(i)
        found: dict[int, Reading] = {}
        for prefix, rows in groups.items():
            rows.sort(key=lambda i: len(replies[i].ids))
            for start in range(0, len(rows), self._batch_size):
                batch = rows[start : start + self._batch_size]
                added = _by_layer([additions[i] for i in batch])
                readings = self._read(prefix, [replies[i] for i in batch], added, states, distributions)
                found.update(zip(batch, readings, strict=True))
        return [found[i] for i in range(len(turns))]

    def forget(self) -> None:
        """Free the contexts' keys and values."""
        self._prefixes.clear()

    def _read(
        self,
        prefix: tuple[int, ...],
        replies: Sequence[TokenizedReply],
        additions: Mapping[int, Tensor],
        states: bool,
        distributions: bool,
    ) -> list[Reading]:
        lm = self.lm
        start = len(prefix)
        cache = self._kept(prefix)
        longest = max(len(reply.ids) for reply in replies)
        ids = torch.zeros((len(replies), longest - start), dtype=torch.long)
        counted = torch.zeros(ids.shape)
        for row, reply in enumerate(replies):
            ids[row, : len(reply.ids) - start] = torch.tensor(reply.ids[start:])
            counted[row, torch.tensor(reply.positions) - start] = 1 / len(reply.positions)
        ids = ids.to(lm.device)
        if prefix:
            cache.batch_repeat_interleave(len(replies))
        mask = torch.ones((len(replies), longest), dtype=torch.long, device=lm.device)

        def mean(hidden: Tensor) -> tuple[Tensor, Tensor]:
            hidden, weights = hidden.float(), counted.to(hidden.device)
            return torch.einsum("btd,bt->bd", hidden, weights).cpu(), (hidden.norm(dim=-1) * weights).sum(-1).cpu()

        with steer(lm.layers, additions), record(lm.layers, None if states else (), keep=mean) as means:
            logits = lm.forward(ids, mask, cache, last_only=False)
        read = []
        for row, reply in enumerate(replies):
            places = torch.tensor(reply.positions) - start
            table = logits[row, places - 1].float().log_softmax(-1)
            logprobs = table.gather(1, ids[row, places][:, None])[:, 0].cpu()
            by_layer = [means[z] for z in range(len(lm.layers))] if states else []
            read.append(
                Reading(
                    reply,
                    logprobs,
                    torch.stack([mean[row] for mean, _ in by_layer]) if states else None,
                    torch.stack([norm[row] for _, norm in by_layer]) if states else None,
                    table.cpu() if distributions else None,
                )
            )
        return read

    def _kept(self, prefix: tuple[int, ...]) -> Any:
        """A copy of the cache of a prefix."""
        if prefix not in self._prefixes:
            cache = DynamicCache(config=self.lm.model.config)
            if prefix:
                row = torch.tensor([prefix], device=self.lm.device)
                self.lm.forward(row, torch.ones_like(row), cache)
            self._prefixes[prefix] = cache
        return copy.deepcopy(self._prefixes[prefix])


def _by_layer(rows: Sequence[Mapping[int, Tensor]]) -> dict[int, Tensor]:
    """Additions of several rows, ``(rows, d_model)`` by layer; rows that have none at a layer get zeros there."""
    layers = sorted({layer for row in rows for layer in row})
    some = {layer: next(row[layer] for row in rows if layer in row) for layer in layers}
    return {layer: torch.stack([row.get(layer, torch.zeros_like(some[layer])) for row in rows]) for layer in layers}
