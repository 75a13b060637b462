"""A second instrument for trait expression: a small classifier on the model's own hidden states.

Logistic regression, trained on responses that ship with the pairs (use ``extra``, which neither a trait vector nor a
``TraitProbe`` is made from), on mean hidden states of the unsteered model at one layer. Unlike the probe it is trained
to tell the trait from *other traits' responses* too, so what merely sounds unlike a calm customer counts less.

Weak where: it has seen what people wrote, and damaged text is unlike anything it has seen; read it beside
``damage.py``.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from traitbasis.errors import PairError
from traitbasis.metrics.fidelity import Sides, auc

_WEIGHT_DECAY = 1.0  # of standardised features: there are far more of them than responses


@dataclass(frozen=True, eq=False)
class TraitClassifier:
    """One trait against its absence and against the other traits.

    weights: ``(d_model,)``, on states at `layer`. Scores are the logit, scaled so that the training negatives average 0
    and the positives 1. auc: own held-out positives over own held-out negatives; auc_others: over other traits'
    held-out positives (0.5 is chance), nan when there is no other trait.
    """

    trait: str
    layer: int
    weights: Tensor
    offset: float
    auc: float
    auc_others: float

    def score(self, states: Tensor) -> Tensor:
        """Expression ``(n,)`` of mean states ``(n, layers, d_model)``."""
        return states[:, self.layer] @ self.weights - self.offset


def train_classifier(trait: str, sides: Mapping[str, Sides], layers: Sequence[int]) -> TraitClassifier:
    """Train on the ``extra`` pairs of all traits in `sides`; of `layers` the one is read where the ``default`` pairs,
    which it is not trained on, are told apart best, of equals the deepest. Raises PairError without extra pairs."""
    own = sides[trait]
    if not len(own.positive["extra"]):
        raise PairError(f"{trait}: no pair is marked 'use: extra'; the classifier has nothing to learn from")
    others = [side for name, side in sides.items() if name != trait]
    rest = [t for side in others for t in (side.positive["extra"], side.negative["extra"])]
    positive, negative = own.positive["extra"], torch.cat([own.negative["extra"], *rest])
    found = []
    for layer in layers:
        weights = _fit(positive[:, layer], own.negative["extra"][:, layer], negative[:, layer])
        low, high = (float((t[:, layer] @ weights).mean()) for t in (own.negative["extra"], positive))
        weights = weights / (high - low)
        offset = low / (high - low)

        def rank(a: Tensor, b: Tensor, layer: int = layer, weights: Tensor = weights) -> float:
            return auc(a[:, layer] @ weights, b[:, layer] @ weights) if len(a) and len(b) else float("nan")

        of_others = torch.cat([side.positive["heldout"] for side in others]) if others else torch.zeros(0)
        found.append(
            (
                rank(own.positive["default"], own.negative["default"]),
                TraitClassifier(
                    trait,
                    layer,
                    weights,
                    offset,
                    rank(own.positive["heldout"], own.negative["heldout"]),
                    rank(own.positive["heldout"], of_others),
                ),
            )
        )
    return max(found, key=lambda item: (item[0], item[1].layer))[1]


def fit_logistic(features: Tensor, labels: Tensor, importance: Tensor) -> tuple[Tensor, float]:
    """Logistic regression with a ridge: weights ``(d,)`` and bias, in the units of `features` ``(n, d)``.

    labels: ``(n,)``, 0 or 1. importance: ``(n,)``, what each row's loss counts for; sums to 1.
    """
    centre, scale = features.mean(0), features.std(0).clamp(min=1e-6)
    features = (features - centre) / scale
    weights = torch.zeros(features.shape[1], requires_grad=True)
    bias = torch.zeros(1, requires_grad=True)
    optimizer = torch.optim.LBFGS([weights, bias], max_iter=100, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        optimizer.zero_grad()
        logits = features @ weights + bias
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, labels, importance, reduction="sum")
        loss = loss + _WEIGHT_DECAY / len(labels) * weights.square().sum()
        loss.backward()  # type: ignore[no-untyped-call]
        return loss

    optimizer.step(closure)  # type: ignore[no-untyped-call]
    found = weights.detach() / scale
    return found, float(bias.detach() - centre @ found)


def _fit(positive: Tensor, own_negative: Tensor, negative: Tensor) -> Tensor:
    """Logistic regression weights in the units of the states. Own negatives, other responses: half the weight each."""
    labels = torch.cat([torch.ones(len(positive)), torch.zeros(len(negative))])
    parts = [len(positive), len(own_negative), len(negative) - len(own_negative)]
    shares = [0.5, 0.25, 0.25] if parts[2] else [0.5, 0.5, 0.0]
    importance = torch.cat([torch.full((n,), share / max(n, 1)) for n, share in zip(parts, shares, strict=True)])
    return fit_logistic(torch.cat([positive, negative]), labels, importance)[0]
