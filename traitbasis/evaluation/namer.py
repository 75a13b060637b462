"""Which trait does a turn show, of several, or none? A multinomial logistic regression on the unsteered model's states.

    P(trait | turn) = softmax(W h + b),   h the turn's mean hidden state at one layer

Trained on ``extra`` pairs: positive responses are their trait; negative ones are "none", and so are turns that are
merely stuffed with a trait's words (``stuffing.py``). Every label weighs the same, so that "none", which has the most
examples, is not the answer to everything; half of its weight is the stuffed turns'. The layer, and what is added to
none's score, are chosen on ``default`` pairs. Of four traits on the embedded model, a namer trained without stuffed
turns names 65 of 100 of them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from traitbasis.errors import PairError
from traitbasis.metrics.estimate import mean
from traitbasis.metrics.fidelity import Sides

NONE = "none"
_BIASES = [i / 10 for i in range(-20, 21)]  # added to none's score
_WEIGHT_DECAY = 0.1  # of standardised features; accuracy on other pairs hardly depends on it from 0.01 to 0.1


@dataclass(frozen=True, eq=False)
class Namer:
    """weights: ``(d_model, labels)`` on states at `layer`; bias ``(labels,)``; labels: the traits, then "none"."""

    labels: tuple[str, ...]
    layer: int
    weights: Tensor
    bias: Tensor

    def probabilities(self, states: Tensor) -> Tensor:
        """``(n, labels)`` of mean states ``(n, layers, d_model)``."""
        return (states[:, self.layer] @ self.weights + self.bias).softmax(-1)


@dataclass(frozen=True, eq=False)
class Examples:
    """Labelled turns: states ``(n, layers, d_model)``, labels ``(n,)``, and how much each weighs ``(n,)``."""

    states: Tensor
    labels: Tensor
    weights: Tensor

    def shuffled(self, seed: int) -> Examples:
        """The same turns with each other's labels."""
        order = torch.randperm(len(self.labels), generator=torch.Generator().manual_seed(seed))
        return Examples(self.states, self.labels[order], self.weights[order])


def training_examples(sides: Mapping[str, Sides], stuffed: Mapping[str, Tensor]) -> Examples:
    """``extra`` pairs and stuffed turns (states by trait). Every label weighs the same. Raises PairError when a trait
    has no extra pairs."""
    for trait, side in sides.items():
        if not len(side.positive["extra"]):
            raise PairError(f"{trait}: no pair is marked 'use: extra'; nothing can be trained to name it")
    return _examples(sides, stuffed, "extra", of_traits=len(sides))


def checking_examples(sides: Mapping[str, Sides], stuffed: Mapping[str, Tensor], use: str) -> Examples:
    """Pairs that a namer is not trained on, and stuffed turns if any. Traits together weigh as much as none."""
    return _examples(sides, stuffed, use, of_traits=1.0)


def train_namer(traits: Sequence[str], examples: Examples, checked: Examples, layers: Sequence[int]) -> Namer:
    """Trained on `examples`. The layer, of `layers`, is the one where `checked` is likeliest; then how readily it says
    "none" is what names most of `checked` right, of equals the middle."""
    best = max((_fit(traits, examples, layer) for layer in layers), key=lambda namer: _likelihood(namer, checked))
    none = torch.eye(len(traits) + 1)[-1]
    biased = [replace(best, bias=best.bias + bias * none) for bias in _BIASES]
    right = [round(float(_right(namer, checked) @ checked.weights), 6) for namer in biased]
    equals = [namer for namer, share in zip(biased, right, strict=True) if share == max(right)]
    return equals[len(equals) // 2]


def balanced_accuracy(namer: Namer, examples: Examples) -> float:
    """Mean over the labels of the share named right; chance is 1 / labels."""
    right = _right(namer, examples)
    return mean([float(right[examples.labels == label].mean()) for label in range(len(namer.labels))])


def _examples(sides: Mapping[str, Sides], stuffed: Mapping[str, Tensor], use: str, of_traits: float) -> Examples:
    n, parts = len(sides), list[tuple[Tensor, int, float]]()
    for i, (trait, side) in enumerate(sides.items()):
        parts += [(side.positive[use], i, of_traits / n), (side.negative[use], n, 0.5 / n)]
        if trait in stuffed:
            parts.append((stuffed[trait], n, 0.5 / n))
    return Examples(
        torch.cat([states for states, _, _ in parts]),
        torch.cat([torch.full((len(states),), label) for states, label, _ in parts]),
        torch.cat([torch.full((len(states),), weight / len(states)) for states, _, weight in parts]),
    )


def _right(namer: Namer, examples: Examples) -> Tensor:
    return (namer.probabilities(examples.states).argmax(-1) == examples.labels).float()


def _likelihood(namer: Namer, examples: Examples) -> float:
    own = namer.probabilities(examples.states).gather(1, examples.labels[:, None])[:, 0]
    return float(own.clamp(min=1e-30).log() @ examples.weights)


def _fit(traits: Sequence[str], examples: Examples, layer: int) -> Namer:
    states = examples.states[:, layer]
    mean, scale = states.mean(0), states.std(0).clamp(min=1e-6)
    features = (states - mean) / scale
    weights = torch.zeros(features.shape[1], len(traits) + 1, requires_grad=True)
    bias = torch.zeros(len(traits) + 1, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights, bias], max_iter=100, line_search_fn="strong_wolfe")
    importance = examples.weights / examples.weights.sum()

    def closure() -> Tensor:
        optimizer.zero_grad()
        losses = torch.nn.functional.cross_entropy(features @ weights + bias, examples.labels, reduction="none")
        loss = (losses * importance).sum() + _WEIGHT_DECAY * weights.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    found = weights.detach() / scale[:, None]
    return Namer((*traits, NONE), layer, found, bias.detach() - mean @ found)
