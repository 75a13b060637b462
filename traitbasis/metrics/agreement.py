"""Do annotators agree? Krippendorff's alpha, and an interval for any figure that is made from their votes.

Alpha is 1 when all agree and 0 when votes are as if drawn from one hat; below 0 they disagree more than that. Weak
where: alpha is about *varied* votes. When nearly all are the same it is low or undefined, however well people agree.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Literal, get_args

import numpy as np
from numpy.typing import ArrayLike, NDArray

Level = Literal["nominal", "ordinal", "interval", "ratio"]
Floats = NDArray[np.float64]


def krippendorff_alpha(ratings: ArrayLike, level: Level) -> float:
    """Krippendorff's alpha of `ratings` ``(annotators, items)``, with nan where a vote is missing.

        alpha = 1 - D_o / D_e = 1 - (n - 1) Σ_ck o_ck δ²_ck / Σ_ck n_c n_k δ²_ck

    over the values c, k in use. ``o_ck = Σ_u n_uc (n_uk - [c = k]) / (m_u - 1)`` are coincidences: the pairs of votes
    within item u, which has ``m_u`` votes, ``n_uc`` of them c. Items with fewer than two votes pair with nothing and do
    not count. ``n_c = Σ_u n_uc`` and ``n = Σ_c n_c`` are of the items that count.

    δ² is 1 for different values (nominal), ``(c - k)²`` (interval), ``((c - k) / (c + k))²`` (ratio), and for ordinal
    values the square of ``Σ_{g=c..k} n_g - (n_c + n_k) / 2``.

    nan where alpha is undefined: no item has two votes, or all votes that count are the same (D_e is 0).
    Raises ValueError for another shape, an infinite vote, an unknown level, or a negative vote at level ratio.

    Source: Krippendorff (2011), Computing Krippendorff's Alpha-Reliability.
    """
    votes = np.asarray(ratings, dtype=np.float64)
    if votes.ndim != 2:
        raise ValueError(f"ratings have shape {votes.shape}; expected (annotators, items)")
    if level not in get_args(Level):
        raise ValueError(f"level is {level!r}; known: {', '.join(get_args(Level))}")
    if np.isinf(votes).any():
        raise ValueError("a rating is infinite; a missing one is nan")
    if level == "ratio" and (votes < 0).any():
        raise ValueError("a rating is negative; values of level 'ratio' start at zero")

    values = np.unique(votes[~np.isnan(votes)])
    counts = (votes[:, :, None] == values).sum(axis=0).astype(np.float64)  # n_uc
    counts = counts[counts.sum(axis=1) >= 2]
    weighted = counts / (counts.sum(axis=1, keepdims=True) - 1)
    coincidences = counts.T @ weighted - np.diag(weighted.sum(axis=0))
    of_value = counts.sum(axis=0)
    distance = _squared_distance(values, of_value, level)
    expected = of_value @ distance @ of_value
    if not expected > 0:
        return float("nan")
    return float(1 - (of_value.sum() - 1) * (coincidences * distance).sum() / expected)


def bootstrap(
    statistic: Callable[[Floats], float], votes: ArrayLike, *, times: int = 1000, seed: int = 0, coverage: float = 0.95
) -> tuple[float, float]:
    """Percentile interval of `statistic`, by drawing items (the last axis of `votes`) again, with replacement.

    Draws for which the statistic is undefined (nan) are left out. (nan, nan) when there are fewer than two items, or
    no draw is defined. Source: Efron and Tibshirani (1993), An Introduction to the Bootstrap, chapter 13.
    """
    array = np.asarray(votes, dtype=np.float64)
    items = array.shape[-1]
    if items < 2:
        return float("nan"), float("nan")
    rng = np.random.default_rng(seed)
    draws = np.array([statistic(array[..., rng.integers(items, size=items)]) for _ in range(times)])
    draws = draws[~np.isnan(draws)]
    if not draws.size:
        return float("nan"), float("nan")
    low, high = np.quantile(draws, [(1 - coverage) / 2, (1 + coverage) / 2])
    return float(low), float(high)


def _squared_distance(values: Floats, of_value: Floats, level: Level) -> Floats:
    """δ² ``(values, values)``."""
    if level == "ordinal":
        values = of_value.cumsum() - of_value / 2  # the ordinal distance is the interval distance of mid-ranks
    difference: Floats = values[:, None] - values
    if level == "nominal":
        return np.not_equal(difference, 0).astype(np.float64)
    if level == "ratio":
        total = values[:, None] + values
        total[total == 0] = 1  # between two zeros there is no distance
        difference = difference / total
    return np.square(difference)
