"""How much is low, medium, high? Doses read off the measured curve of one trait on one model at its chosen layer.

At rising doses turns are drawn and measured as in ``select.py``. Expression and damage are made monotone (isotonic
regression: more of a direction is more of both, and ten turns a dose are noisy), and the levels are read off:

- *limit*: the largest dose at which damage is within ``Limits.damage`` and the fact cost within ``Limits.fact_cost``;
  the server refuses more.
- *high*: the same with the stricter ``Limits.high_damage`` and ``Limits.high_fact_cost``.
- *medium*: the largest dose that keeps the facts, by ``Limits.medium_fact_cost``, and at most four fifths of high.
- *low*: where half of medium's expression is reached, within a quarter and three quarters of medium.

Damage is the share of turns that are no language any more: broken by the rules of ``metrics/damage.py``, far more
surprising than the trait's own positive responses, or without any relation to their instruction; unsteered turns' own
share is taken off. Fact cost: ``metrics/likelihood.py``.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

import torch
from torch import Tensor

from traitbasis.basis import Basis, Column, CurvePoint
from traitbasis.errors import SweepError
from traitbasis.pairs import PairSet, file_hash
from traitbasis.select import Screening, Selector, along, bootstrap, gains, mean_gain
from traitbasis.sweep import UNSTEERED, Cell, Spec, Store
from traitbasis.trait_vector import TraitVector

DOSES = (0.05, 0.1, 0.15, 0.2, 0.25, 0.3, 0.4, 0.5, 0.7)


@dataclass(frozen=True)
class Limits:
    """What is bearable. damage, high_damage: share of damaged turns above the unsteered user's. fact_cost,
    high_fact_cost, medium_fact_cost: nats per fact token; 0.25 makes each token of a fact a fifth less likely."""

    damage: float = 0.5
    high_damage: float = 0.2
    fact_cost: float = 1.5
    high_fact_cost: float = 0.6
    medium_fact_cost: float = 0.25


LIMITS = Limits()


@dataclass(frozen=True)
class Levels:
    """Doses of the levels and the limit, and the measured curve. capped: nothing on the curve passed the limit. rises:
    expression is above unsteered at low, and rises to medium and to high."""

    low: float
    medium: float
    high: float
    limit: float
    curve: tuple[CurvePoint, ...]
    fact_cost: tuple[float, ...]
    capped: bool
    rises: bool = True


def calibrate(
    selector: Selector,
    pair_set: PairSet,
    layer: int,
    screening: Screening,
    *,
    doses: Sequence[float] = DOSES,
    limits: Limits = LIMITS,
    progress: Callable[[int], None] = lambda done: None,
) -> Levels:
    """Measure a trait at its layer by rising dose, and read the levels off.

    The likelihood of facts is measured first; doses at which they are lost beyond the limit are not generated, but for
    the first. Goes on where an earlier call ended. progress: told how many of the doses are done.
    """
    generator, trait, vector = selector.generator, pair_set.trait, selector.vector(pair_set)
    doses = sorted(set(doses))
    if not doses or not all(0 < dose <= 10 for dose in doses):
        raise SweepError(f"doses {list(doses)} must be above 0 and at most 10")
    header = {**generator.settings, "trait": trait, "pairs": file_hash(pair_set), "layer": layer}
    store = Store(selector.folder / f"{trait}-layer-{layer}.jsonl", header)
    costs = _fact_costs(store, selector, pair_set, vector, layer, doses)
    bearable = sum(cost <= limits.fact_cost for cost in isotonic(costs))
    progress(len(doses[bearable + 1 :]))
    doses, costs = doses[: bearable + 1], costs[: bearable + 1]
    instruments = selector.instruments(pair_set)
    cells = generator.cells(
        [Spec("steered", trait, layer, dose) for dose in doses],
        store,
        along(vector),
        instruments,
        done=progress,
    )
    (plain,) = selector.baselines([UNSTEERED], instruments)
    gained = [mean_gain(gains(cell, trait, plain)) for cell in cells]
    usual = damaged(plain, screening)
    damage = [max(damaged(cell, screening) - usual, 0.0) for cell in cells]
    return read_levels(doses, gained, damage, costs, [float(cell.scores("facts").mean()) for cell in cells], limits)


def damaged(cell: Cell, screening: Screening) -> float:
    """Share of a cell's turns that are broken, more surprising than the trait's own positive responses (two standard
    deviations above their mean), or no likelier under their own instruction than under another."""
    mean, deviation = screening.surprise
    bad = (
        (cell.scores("broken") > 0) | (cell.scores("surprise") > mean + 2 * deviation) | (cell.scores("relevance") <= 0)
    )
    return float(bad.float().mean())


def column(levels: Levels, vector: TraitVector, layer: int, steerable: bool) -> Column:
    """A basis's column of these levels: medium is intensity 1."""
    return Column(
        trait=vector.trait,
        layer=layer,
        scale=levels.medium / vector.dose(layer),
        layer_norm=float(vector.layer_norms[layer]),
        aliases=vector.aliases,
        provenance=vector.provenance,
        low=round(levels.low / levels.medium, 4),
        high=round(levels.high / levels.medium, 4),
        limit=levels.limit,
        steerable=steerable,
        curve=levels.curve,
    )


def with_columns(basis: Basis | None, made: Mapping[str, tuple[Column, Tensor]]) -> Basis:
    """A basis with these columns, by trait, in the place of its own of the same name, or behind the others.

    Raises ArtifactError when they are of another model or header than the basis's other columns.
    """
    kept = (
        {} if basis is None else dict(zip(basis.traits, zip(basis.columns, basis.matrix.T, strict=True), strict=True))
    )
    columns, directions = zip(*(kept | dict(made)).values(), strict=True)
    return Basis(tuple(columns), torch.stack(directions, dim=1))


def _fact_costs(
    store: Store, selector: Selector, pair_set: PairSet, vector: TraitVector, layer: int, doses: Sequence[float]
) -> list[float]:
    found = {line["dose"]: line["fact_cost"] for line in store.lines if line.get("kind") == "fact_cost"}
    if missing := [dose for dose in doses if dose not in found]:
        pushes = [{layer: vector.at_dose(layer, dose)} for dose in missing]
        measured = selector.likelihood(pair_set).measure_all(pushes)
        for dose, likelihood in zip(missing, measured, strict=True):
            found[dose] = round(float(likelihood.fact_cost.mean()), 4)
            store.append({"kind": "fact_cost", "dose": dose, "fact_cost": found[dose]})
    return [found[dose] for dose in doses]


def read_levels(
    doses: Sequence[float],
    gains: Sequence[Tensor],
    damage: Sequence[float],
    fact_cost: Sequence[float],
    facts: Sequence[float],
    limits: Limits = LIMITS,
) -> Levels:
    """Levels from a measured curve; everything by rising dose. gains: expression above unsteered, ``(turns,)`` a dose.

    Below the smallest dose the curves are taken to fall straight to nothing. Raises SweepError when no room is left, or
    something measured is no number.
    """
    means = [float(gain.mean()) for gain in gains]
    if not all(map(math.isfinite, [*means, *damage, *fact_cost])):
        raise SweepError("something on the curve was not measured (nan); calibrate on other contexts or pairs")
    expression = isotonic(means)
    broken, cost = isotonic(damage), isotonic(fact_cost)
    curve = []
    for i, dose in enumerate(doses):
        low, high = bootstrap(gains[i])
        shift = expression[i] - means[i]
        curve.append(
            CurvePoint(*(round(v, 4) for v in (dose, expression[i], low + shift, high + shift, facts[i], broken[i])))
        )

    def largest(most_damage: float, most_cost: float) -> float:
        return min(crossing(doses, broken, most_damage), crossing(doses, cost, most_cost))

    limit = largest(limits.damage, limits.fact_cost)
    high = min(largest(limits.high_damage, limits.high_fact_cost), limit)
    medium = min(crossing(doses, cost, limits.medium_fact_cost), 0.8 * high)
    half = crossing(doses, expression, 0.5 * at(doses, expression, medium))
    low = min(max(half, 0.25 * medium), 0.75 * medium)
    low, medium, high, limit = (round(value, 6) for value in (low, medium, high, limit))
    if not 0 < low < medium < high:
        raise SweepError(f"a dose of {doses[0]:g} is far beyond the limit; begin with a smaller one")
    shown = [0.0, *(at(doses, expression, dose) for dose in (low, medium, high))]
    return Levels(
        low,
        medium,
        high,
        limit,
        tuple(curve),
        tuple(fact_cost),
        capped=limit >= round(doses[-1], 6),
        rises=all(a < b for a, b in pairwise(shown)),
    )


def isotonic(values: Sequence[float]) -> list[float]:
    """The rising sequence nearest to `values` in squares, by pooling adjacent violators (Barlow et al. 1972)."""
    blocks: list[tuple[float, int]] = []  # mean, count
    for value in values:
        mean, count = value, 1
        while blocks and blocks[-1][0] > mean:
            before, more = blocks.pop()
            mean, count = (before * more + mean * count) / (more + count), more + count
        blocks.append((mean, count))
    return [mean for mean, count in blocks for _ in range(count)]


def crossing(doses: Sequence[float], rising: Sequence[float], level: float) -> float:
    """The largest dose at which a rising curve, 0 at dose 0 and straight between its points, is at most `level`."""
    left, below = 0.0, 0.0
    for dose, value in zip(doses, rising, strict=True):
        if value > level:
            return left + (dose - left) * max(level - below, 0) / (value - below)
        left, below = dose, value
    return left


def at(doses: Sequence[float], rising: Sequence[float], dose: float) -> float:
    """Value of the same curve at a dose; flat beyond the last."""
    left, below = 0.0, 0.0
    for right, value in zip(doses, rising, strict=True):
        if dose <= right:
            return below + (value - below) * (dose - left) / (right - left)
        left, below = right, value
    return below
