"""Drawing tokens: every row with its own settings and its own random numbers, so that no batchmate changes a draw.

What is the same for all rows (softmax, the draw itself) runs once for the batch; penalties and filters run for the
rows that ask for them, through transformers' logits processors where it has them.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from torch import Tensor
from transformers import (
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from traitbasis.engines.base import Guide, Request, TokenLogprob
from traitbasis.errors import EngineError

# Logits divided by less overflow float32; what is drawn is the most likely token long before.
_COLDEST = 1e-5


class Sampler:
    """How one request's tokens are drawn. Holds its generator and the tokens drawn so far.

    error: what its guide raised; nothing is drawn then.
    """

    def __init__(self, request: Request, guide: Guide | None = None) -> None:
        sampling = request.sampling
        self.error: Exception | None = None
        self.logprobs = sampling.logprobs
        self.greedy = sampling.temperature < _COLDEST
        self.temperature = 1.0 if self.greedy else float(sampling.temperature)
        self._generator = torch.Generator().manual_seed(request.seed)
        self._prompt = request.prompt_ids
        self._drawn: list[int] = []
        self._counts: Counter[int] = Counter()
        self._changes: list[Callable[[Tensor], Tensor]] = []
        if sampling.repetition_penalty != 1:
            penalty = RepetitionPenaltyLogitsProcessor(float(sampling.repetition_penalty))
            self._changes.append(lambda scores: penalty(self._seen(scores), scores))
        if sampling.presence_penalty or sampling.frequency_penalty:
            self._changes.append(lambda scores: self._penalise(scores, request))
        if sampling.logit_bias:
            self._changes.append(lambda scores: _add(scores, sampling.logit_bias))
        if guide is not None:
            self._changes.append(lambda scores: _mask(scores, guide.allowed()))
        filters = [
            *([TopKLogitsWarper(sampling.top_k)] if sampling.top_k else []),
            *([TopPLogitsWarper(float(sampling.top_p))] if sampling.top_p < 1 else []),
            *([MinPLogitsWarper(float(sampling.min_p))] if sampling.min_p else []),
        ]
        if filters and not self.greedy:
            # Filters come after the temperature, so here it cannot wait for the whole batch's.
            for warper in (TemperatureLogitsWarper(self.temperature), *filters):
                self._changes.append(partial(warper, None))
            self.temperature = 1.0

    @property
    def changes_scores(self) -> bool:
        return bool(self._changes)

    def change(self, scores: Tensor) -> Tensor:
        """Scores ``(1, vocabulary)`` after penalties, bias, the guide and filters. Raises what the guide raises."""
        for change in self._changes:
            scores = change(scores)
        return scores

    def uniform(self) -> float:
        """The next random number in [0, 1)."""
        return float(torch.rand((), generator=self._generator))

    def drew(self, token: int) -> None:
        self._drawn.append(token)
        self._counts[token] += 1

    def _seen(self, scores: Tensor) -> Tensor:
        return torch.tensor([[*self._prompt, *self._drawn]], device=scores.device)

    def _penalise(self, scores: Tensor, request: Request) -> Tensor:
        presence, frequency = request.sampling.presence_penalty, request.sampling.frequency_penalty
        return _add(scores, {token: -presence - frequency * count for token, count in self._counts.items()})


def draw(samplers: Sequence[Sampler], logits: Tensor) -> list[tuple[int, TokenLogprob | None] | None]:
    """One token a row from float32 logits ``(rows, vocabulary)``, with its log-probability where asked for.

    None for a row whose logits are not finite or whose guide failed (``Sampler.error``); its batchmates are not
    concerned.
    """
    finite = logits.amax(-1).isfinite()
    scores = logits
    if changed := [i for i, sampler in enumerate(samplers) if sampler.changes_scores]:
        scores = logits.clone()
        for i in changed:
            try:
                scores[i] = samplers[i].change(scores[i : i + 1])[0]
            except Exception as error:  # only guides raise
                samplers[i].error = error
    chosen = scores.argmax(-1)
    if warm := [i for i, sampler in enumerate(samplers) if not sampler.greedy]:
        rows = torch.tensor(warm, device=logits.device)
        temperatures = torch.tensor([samplers[i].temperature for i in warm], device=logits.device)
        probabilities = (scores[rows] / temperatures[:, None]).softmax(-1)
        uniform = torch.tensor([samplers[i].uniform() for i in warm], device=logits.device)
        chosen[rows] = _inverse(probabilities, uniform, chosen[rows])
    logprobs = _logprobs(samplers, logits, chosen)
    drawn: list[tuple[int, TokenLogprob | None] | None] = []
    for i, (token, good) in enumerate(zip(chosen.tolist(), finite.tolist(), strict=True)):
        good = good and samplers[i].error is None
        if good:
            samplers[i].drew(token)
        drawn.append((token, logprobs.get(i)) if good else None)
    return drawn


def _inverse(probabilities: Tensor, uniform: Tensor, likeliest: Tensor) -> Tensor:
    """The token whose share of [0, 1) holds `uniform`, row by row."""
    sums = probabilities.cumsum(-1)
    found = torch.searchsorted(sums, uniform[:, None] * sums[:, -1:], right=True)
    found = found.clamp(max=probabilities.shape[-1] - 1)
    # Rounding can point past the last share; a token that was filtered out must not come of it.
    return torch.where(probabilities.gather(-1, found) > 0, found, likeliest[:, None])[:, 0]


def _logprobs(samplers: Sequence[Sampler], logits: Tensor, chosen: Tensor) -> dict[int, TokenLogprob]:
    wanted = {i: sampler.logprobs for i, sampler in enumerate(samplers) if sampler.logprobs is not None}
    return {i: token_logprobs(logits[i : i + 1], chosen[i : i + 1], count)[0] for i, count in wanted.items()}


def token_logprobs(logits: Tensor, tokens: Tensor, count: int) -> list[TokenLogprob]:
    """Log-probabilities of `tokens` ``(n,)`` by logits ``(n, vocabulary)``, each with the `count` likeliest ones."""
    logs = logits.log_softmax(-1)
    own = logs.gather(-1, tokens[:, None])[:, 0].tolist()
    best = logs.topk(min(count, logs.shape[-1]))
    tops = zip(best.indices.tolist(), best.values.tolist(), strict=True)
    return [TokenLogprob(value, tuple(zip(*top, strict=True))) for value, top in zip(own, tops, strict=True)]


def _mask(scores: Tensor, allowed: Tensor | None) -> Tensor:
    if allowed is None:
        return scores
    allowed = allowed[: scores.shape[-1]].to(scores.device)
    if not allowed.any():
        raise EngineError("the guide of this request allows no token, and it is not done")
    least = torch.finfo(scores.dtype).min  # above what is not allowed, however low penalties put it
    masked = torch.full_like(scores, -torch.inf)
    known = len(allowed)
    masked[:, :known] = scores[:, :known].clamp(min=least).masked_fill(~allowed, -torch.inf)
    return masked


def _add(scores: Tensor, changes: Mapping[int, float]) -> Tensor:
    if not changes:
        return scores
    scores = scores.clone()
    tokens = torch.tensor(list(changes), device=scores.device)
    scores[0, tokens] += torch.tensor(list(changes.values()), dtype=scores.dtype, device=scores.device)
    return scores
