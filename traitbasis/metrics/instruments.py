"""Do two instruments say the same of the same turns? Rank agreement, since their units need not be alike.

Takes scores as instruments give them: equally long, one a turn, ``None`` or NaN where one could not say. Turns that one
of the two could not say are left out. NaN means that nothing can be said: fewer than two turns are left, or one of the
instruments gives all of them the same score.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

Scores = Sequence[float | None]
_Array = NDArray[np.float64]


def rank_correlation(a: Scores, b: Scores) -> float:
    """Spearman's rho, -1 ... 1: Pearson's correlation of the ranks, equal scores sharing their mean rank."""
    x, y = (_ranks(scores) for scores in _both(a, b))
    x, y = x - (len(x) + 1) / 2, y - (len(y) + 1) / 2
    scale = math.sqrt(float(x @ x) * float(y @ y))
    return float(x @ y) / scale if scale else math.nan


def kendall_tau_b(a: Scores, b: Scores) -> float:
    """Kendall's tau-b, -1 ... 1: ``(concordant - discordant) / sqrt(untied in a * untied in b)``, of pairs of turns."""
    agreeing, untied_a, untied_b = _pairs(a, b)
    scale = math.sqrt(untied_a * untied_b)
    return agreeing / scale if scale else math.nan


def concordance(a: Scores, b: Scores) -> float:
    """Of two turns that `a` puts in an order, how often `b` puts them in the same, 0 ... 1; 0.5 is chance.

    Where `b` ties it counts half. With two values in `a` this is the AUC of `b` as a detector of what `a` says
    (Harrell's C otherwise), so it is not symmetric.
    """
    agreeing, untied_a, _ = _pairs(a, b)
    return (agreeing / untied_a + 1) / 2 if untied_a else math.nan


def _pairs(a: Scores, b: Scores) -> tuple[int, int, int]:
    """Over all pairs of turns: concordant minus discordant, untied in `a`, untied in `b`."""
    x, y = _both(a, b)
    agreeing = untied_a = untied_b = 0
    for i in range(len(x) - 1):  # a row at a time: all at once would hold n * n numbers
        of_a, of_b = np.sign(x[i + 1 :] - x[i]), np.sign(y[i + 1 :] - y[i])
        agreeing += int(of_a @ of_b)
        untied_a += int(np.count_nonzero(of_a))
        untied_b += int(np.count_nonzero(of_b))
    return agreeing, untied_a, untied_b


def _ranks(scores: _Array) -> _Array:
    """Ranks from 1 on; equal scores get the mean of the ranks they take up."""
    _, which, counts = np.unique(scores, return_inverse=True, return_counts=True)
    return np.asarray((np.cumsum(counts) - (counts - 1) / 2)[which], dtype=np.float64)


def _both(a: Scores, b: Scores) -> tuple[_Array, _Array]:
    """The turns that both instruments scored. Raises ValueError when they were not given the same number."""
    if len(a) != len(b):
        raise ValueError(f"two instruments' scores must be of the same turns, but there are {len(a)} and {len(b)}")
    x, y = (np.array([math.nan if score is None else score for score in scores], np.float64) for scores in (a, b))
    said = ~(np.isnan(x) | np.isnan(y))
    return x[said], y[said]
