"""Which trait does a turn show, of several, or none? A multinomial logistic regression on the unsteered model's states.

    P(trait | turn) = softmax(W h + b),   h the turn's mean hidden state at one layer

Trained on ``extra`` pairs: positive responses are their trait; negative ones are "none", and so are turns that are
merely stuffed with a trait's words (``stuffing.py``). Every label weighs the same, so that "none", which has the most
examples, is not the answer to everything; half of its weight is the stuffed turns'. The layer is chosen on ``default``
pairs. Without stuffed turns in its training a namer on the embedded model named 65 of 100 of them, with them 1 to 3.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from traitbasis.errors import PairError
from traitbasis.metrics.fidelity import Sides

NONE = "none"
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
    """What a namer is trained on. stuffed: states of stuffed turns by trait. Raises PairError without extra pairs."""
    none, parts = len(sides), list[tuple[Tensor, int, float]]()
    for i, (trait, side) in enumerate(sides.items()):
        if not len(side.positive["extra"]):
            raise PairError(f"{trait}: no pair is marked 'use: extra'; nothing can be trained to name it")
        parts.append((side.positive["extra"], i, 1.0))
        parts += [(states, none, 0.5 / none) for states in (side.negative["extra"], stuffed[trait])]
    return Examples(
        torch.cat([states for states, _, _ in parts]),
        torch.cat([torch.full((len(states),), label) for states, label, _ in parts]),
        torch.cat([torch.full((len(states),), weight / len(states)) for states, _, weight in parts]),
    )


def train_namer(traits: Sequence[str], examples: Examples, checked: Examples, layers: Sequence[int]) -> Namer:
    """The namer at the one of `layers` whose balanced accuracy on `checked` is best, of equals the deepest."""
    found = [_fit(traits, examples, layer) for layer in layers]
    return max(found, key=lambda namer: (balanced_accuracy(namer, checked), namer.layer))


def checking_examples(sides: Mapping[str, Sides], use: str) -> Examples:
    """Responses of other pairs, all of one weight: positives are their trait's, negatives none's."""
    parts = [
        (states, label)
        for i, side in enumerate(sides.values())
        for states, label in ((side.positive[use], i), (side.negative[use], len(sides)))
    ]
    labels = torch.cat([torch.full((len(states),), label) for states, label in parts])
    return Examples(torch.cat([states for states, _ in parts]), labels, torch.ones(len(labels)))


def balanced_accuracy(namer: Namer, examples: Examples) -> float:
    """Mean over the labels of the share named right; chance is 1 / labels."""
    named = namer.probabilities(examples.states).argmax(-1)
    right = (named == examples.labels).float()
    labels = sorted(set(examples.labels.tolist()))
    return float(torch.stack([right[examples.labels == label].mean() for label in labels]).mean())


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
