"""The classifier of hidden states: on planted directions, and against independent counts and another optimiser."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest
import torch
from samples import lettered_set
from tiny import LAYERS, WIDTH, tiny_model
from torch import Tensor

from traitbasis.chat import Turn
from traitbasis.errors import PairError
from traitbasis.metrics.classifier import TraitClassifier, train_classifier
from traitbasis.metrics.fidelity import Sides, TraitProbe, read_sides
from traitbasis.metrics.turns import expression
from traitbasis.reading import Reader

DEPTH, D = 3, 24
USES = {"default": 8, "extra": 12, "heldout": 16}


def unit(seed: int, width: int = D) -> Tensor:
    return torch.nn.functional.normalize(torch.randn(width, generator=torch.Generator().manual_seed(seed)), dim=0)


def planted(
    direction: Tensor, strength: Sequence[float] = (0, 6, 0), seed: int = 0, uses: dict[str, int] | None = None
) -> Sides:
    """Noise at every layer; positives are moved along `direction` by a strength a layer."""
    generator = torch.Generator().manual_seed(seed)
    shift = torch.tensor(strength)[:, None] * direction

    def noise(n: int) -> Tensor:
        return torch.randn(n, DEPTH, D, generator=generator)

    counts = {**USES, **(uses or {})}
    negative = {use: noise(n) for use, n in counts.items()}
    return Sides({use: noise(n) + shift for use, n in counts.items()}, negative)


def counted_auc(positive: Tensor, negative: Tensor) -> float:
    """Pairs in order, counted one by one."""
    wins = [1.0 if p > n else 0.5 if p == n else 0.0 for p in positive.tolist() for n in negative.tolist()]
    return sum(wins) / len(wins)


def scores_of(classifier: TraitClassifier, states: Tensor) -> Tensor:
    """By hand, in numpy."""
    return torch.tensor(states[:, classifier.layer].numpy() @ classifier.weights.numpy() - classifier.offset)


# --- what it finds ----------------------------------------------------------------------------------------------------


def test_a_planted_direction_is_found_at_its_layer() -> None:
    sides = planted(unit(1))
    found = train_classifier("a", {"a": sides}, [0, 1, 2])
    assert found.layer == 1 and found.trait == "a" and found.weights.shape == (D,)
    assert float(torch.nn.functional.cosine_similarity(found.weights, unit(1), dim=0)) > 0.8
    assert found.auc > 0.99


def test_only_the_layers_asked_for_are_looked_at() -> None:
    sides = planted(unit(1), strength=(0, 6, 3))
    assert train_classifier("a", {"a": sides}, [0, 2]).layer == 2
    assert train_classifier("a", {"a": sides}, [0]).auc < 0.9


def test_of_equal_layers_the_deepest_is_read() -> None:
    assert train_classifier("a", {"a": planted(unit(1), strength=(20, 20, 20))}, [0, 2, 1]).layer == 2


def test_the_layer_is_chosen_on_default_pairs_and_neither_on_training_nor_on_held_out_ones() -> None:
    """Layer 0 tells extra and held-out pairs apart, layer 1 the default ones."""
    zero, one = planted(unit(1), strength=(9, 0, 0)), planted(unit(1), strength=(0, 9, 0), seed=1)
    mixed = planted(unit(1), strength=(9, 9, 0), seed=2)
    sides = Sides(
        {"default": one.positive["default"], "extra": mixed.positive["extra"], "heldout": zero.positive["heldout"]},
        {"default": one.negative["default"], "extra": mixed.negative["extra"], "heldout": zero.negative["heldout"]},
    )
    found = train_classifier("a", {"a": sides}, [0, 1])
    assert found.layer == 1 and found.auc < 0.9


def test_training_negatives_average_0_and_positives_1() -> None:
    sides = planted(unit(1), strength=(0, 2, 0))
    for others in ({}, {"b": planted(unit(2), seed=3)}):
        found = train_classifier("a", {"a": sides, **others}, [1])
        assert float(found.score(sides.negative["extra"]).mean()) == pytest.approx(0, abs=1e-4)
        assert float(found.score(sides.positive["extra"]).mean()) == pytest.approx(1, abs=1e-4)


def test_a_score_is_the_projection_written_out() -> None:
    sides = planted(unit(1))
    found = train_classifier("a", {"a": sides}, [0, 1, 2])
    states = sides.positive["heldout"]
    torch.testing.assert_close(found.score(states), scores_of(found, states), rtol=1e-4, atol=1e-5)
    probe = TraitProbe.from_sides("a", sides)
    shown = expression(states, {"a": (probe, found), "b": (probe, None)})
    assert set(shown) == {"probe:a", "classifier:a", "probe:b"}
    torch.testing.assert_close(shown["classifier:a"], scores_of(found, states), rtol=1e-4, atol=1e-5)


# --- how well it does -------------------------------------------------------------------------------------------------


def test_the_auc_is_counted_on_held_out_pairs() -> None:
    """Held-out sides with the direction the other way round: measured on its training pairs it would be perfect."""
    sides = planted(unit(1), strength=(0, 1.5, 0))
    found = train_classifier("a", {"a": sides}, [1])
    positive, negative = (scores_of(found, side["heldout"]) for side in (sides.positive, sides.negative))
    assert found.auc == pytest.approx(counted_auc(positive, negative), abs=1e-6)
    assert 0.6 < found.auc < 1
    turned = Sides(
        {**sides.positive, "heldout": sides.negative["heldout"]},
        {**sides.negative, "heldout": sides.positive["heldout"]},
    )
    assert train_classifier("a", {"a": turned}, [1]).auc == pytest.approx(1 - found.auc, abs=1e-6)


def test_other_traits_are_told_from_ones_own() -> None:
    """b is louder than a along what they share. Alone, the classifier of a takes b for more a; beside b it does not."""
    shared, own = unit(1), unit(2)
    a = planted(shared + own, strength=(0, 3, 0))
    b = planted(3 * shared - own, strength=(0, 3, 0), seed=5)
    alone, beside = train_classifier("a", {"a": a}, [1]), train_classifier("a", {"a": a, "b": b}, [1])
    assert np.isnan(alone.auc_others), "there is no other trait"

    def over_b(found: TraitClassifier) -> float:
        return counted_auc(scores_of(found, a.positive["heldout"]), scores_of(found, b.positive["heldout"]))

    assert beside.auc_others == pytest.approx(over_b(beside), abs=1e-6)
    assert beside.auc_others > 0.9 > 0.7 > over_b(alone)
    assert beside.auc > 0.95


def test_the_order_and_the_names_of_other_traits_do_not_matter() -> None:
    a, b, c = (planted(unit(i), seed=i, strength=(0, 2, 0)) for i in (1, 2, 3))
    one = train_classifier("a", {"a": a, "b": b, "c": c}, [0, 1])
    for sides in ({"c": c, "a": a, "b": b}, {"x": b, "y": c, "a": a}):
        other = train_classifier("a", sides, [1, 0])
        assert (one.layer, one.auc) == (other.layer, pytest.approx(other.auc, abs=0.01))
        torch.testing.assert_close(one.weights, other.weights, rtol=2e-2, atol=2e-3)


def test_with_shuffled_labels_the_auc_is_near_chance() -> None:
    """Averaged over shuffles, each of which swaps the sides of half of the pairs of every use."""
    aucs, others = [], []
    for seed in range(24):
        sides = planted(unit(1), strength=(0, 6, 0), seed=seed)
        generator = torch.Generator().manual_seed(seed)
        swapped = {use: torch.randperm(n, generator=generator)[: n // 2] for use, n in USES.items()}
        positive, negative = ({use: side[use].clone() for use in USES} for side in (sides.positive, sides.negative))
        for use, rows in swapped.items():
            positive[use][rows], negative[use][rows] = sides.negative[use][rows], sides.positive[use][rows]
        shuffled = Sides(positive, negative)
        found = train_classifier("a", {"a": shuffled, "b": planted(unit(2), seed=seed + 100)}, [0, 1, 2])
        aucs.append(found.auc)
        others.append(train_classifier("b", {"a": shuffled, "b": planted(unit(2), seed=seed + 100)}, [1]).auc)
    assert np.mean(aucs) == pytest.approx(0.5, abs=0.06)
    assert min(others) > 0.95, "the same with its labels left alone is no chance"


def test_few_responses_of_many_features_generalise() -> None:
    """Four pairs of 24 features separate in any direction; the weight decay has to prefer what they share."""
    aucs = [
        train_classifier("a", {"a": planted(unit(1), (0, 4, 0), seed, {"extra": 4})}, [1]).auc for seed in range(10)
    ]
    assert np.mean(aucs) > 0.9


def test_a_constant_feature_does_no_harm() -> None:
    sides = planted(unit(1))
    for side in (sides.positive, sides.negative):
        for states in side.values():
            states[:, :, 3] = 7.0
    found = train_classifier("a", {"a": sides}, [1])
    assert bool(torch.isfinite(found.weights).all()) and found.auc > 0.95


def test_training_again_gives_the_same_weights() -> None:
    one, again = (train_classifier("a", {"a": planted(unit(1)), "b": planted(unit(2))}, [0, 1]) for _ in range(2))
    assert torch.equal(one.weights, again.weights) and one.offset == again.offset


def test_without_extra_pairs_there_is_nothing_to_learn_from() -> None:
    with pytest.raises(PairError, match="rude: no pair is marked 'use: extra'"):
        train_classifier("rude", {"rude": planted(unit(1), uses={"extra": 0})}, [1])


def test_another_trait_without_pairs_of_some_use_is_left_out() -> None:
    a = planted(unit(1))
    found = train_classifier("a", {"a": a, "b": planted(unit(2), seed=3, uses={"extra": 0, "heldout": 0})}, [1])
    alone = train_classifier("a", {"a": a}, [1])
    assert torch.equal(found.weights, alone.weights) and np.isnan(found.auc_others)


def test_the_direction_is_that_of_plain_gradient_descent() -> None:
    """Logistic regression in numpy: half of the weight on the positives, a quarter on own negatives, the rest on
    others. Only the direction is compared; the scale is set afterwards."""
    a, b = planted(unit(1), strength=(0, 1.5, 0)), planted(unit(2), seed=3, strength=(0, 1.5, 0))
    found = train_classifier("a", {"a": a, "b": b}, [1])
    sides = [a.positive["extra"], a.negative["extra"], b.positive["extra"], b.negative["extra"]]
    x = np.concatenate([side[:, 1].double().numpy() for side in sides])
    deviation = x.std(0, ddof=1)
    x = (x - x.mean(0)) / deviation
    n = len(sides[0])
    label = np.repeat([1.0, 0.0, 0.0, 0.0], n)
    importance = np.repeat([0.5, 0.25, 0.125, 0.125], n) / n
    weights, bias = np.zeros(D), 0.0
    for _ in range(4000):
        error = importance * (1 / (1 + np.exp(-(x @ weights + bias))) - label)
        weights -= 0.5 * (x.T @ error + 2 / len(label) * weights)
        bias -= 0.5 * error.sum()
    by_hand = weights / deviation
    cosine = by_hand @ found.weights.numpy() / np.linalg.norm(by_hand) / np.linalg.norm(found.weights.numpy())
    assert cosine > 0.999


# --- on a model -------------------------------------------------------------------------------------------------------


def test_it_reads_the_states_of_a_model_whatever_was_asked_about() -> None:
    reader = Reader(tiny_model())
    sides = {
        "x_ing": read_sides(reader, lettered_set("x_ing", "x")),
        "y_ing": read_sides(reader, lettered_set("y_ing", "y")),
    }
    found = train_classifier("x_ing", sides, range(LAYERS))
    assert found.auc == 1.0 and found.auc_others > 0.9 and found.weights.shape == (WIDTH,)
    context = (Turn("system", "You are somebody else."), Turn("agent", "Anything else?"))
    read = reader.read([(context, text) for text in ("No, xxxxxxxx.", "No, oooooooo.", "No, yyyyyyyy.")], states=True)
    x, o, y = found.score(torch.stack([each.states for each in read if each.states is not None])).tolist()
    assert x > max(o, y)
