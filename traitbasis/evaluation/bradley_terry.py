"""Who is preferred, and by how much? The Bradley–Terry model of pairwise votes, on the Elo scale.

    P(i beats j) = 1 / (1 + exp(θ_j - θ_i)),    Elo_i = 1500 + (400 / ln 10) (θ_i - mean θ)

θ maximises the likelihood of the votes, a tie counted as half a win for each. So two players who are 200 Elo apart win
76 of 100 votes against each other. Elo is relative: it says nothing beyond the players who were compared, and
ratings of two tables do not compare.

Where the votes allow no finite θ, because some players never win against the others, every pair that met is taken to
have tied once more (Jeffreys' half a win for each side), and ``Ratings.bounded`` says so; draws of the bootstrap are
treated alike. Source: Hunter (2004), MM algorithms for generalized Bradley–Terry models, Annals of Statistics 32.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from traitbasis.errors import EvaluationError
from traitbasis.metrics.estimate import Estimate, draw_tasks, percentiles

MEAN = 1500.0
SCALE = 400 / math.log(10)
Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Vote:
    """One comparison. score: 1 when `a` won, 0 when `b` did, 0.5 for a tie."""

    a: str
    b: str
    score: float


@dataclass(frozen=True)
class Rating:
    """One player: Elo and the share of comparisons won (a tie is half of one), and how many those are."""

    player: str
    elo: Estimate
    win_rate: Estimate
    comparisons: int


@dataclass(frozen=True)
class Ratings:
    """All players, the best first. bounded: somebody never won, or never lost, and the strengths were kept finite."""

    players: tuple[Rating, ...]
    bounded: bool

    def __getitem__(self, player: str) -> Rating:
        return next(rating for rating in self.players if rating.player == player)


def rate(by_task: Mapping[str, Sequence[Vote]], *, times: int = 2000, seed: int = 0) -> Ratings:
    """Fit the votes on all tasks; intervals draw tasks again, the same draws for all players.

    A draw counts for a player's win rate when it has a vote on the player. Raises EvaluationError without votes, and
    when the players fall into groups that were never compared.
    """
    votes = [vote for _, task in sorted(by_task.items()) for vote in task]
    if not votes:
        raise EvaluationError("there is no vote to rate players by; are there two methods with dialogues of one task?")
    players = sorted({player for vote in votes for player in (vote.a, vote.b)})
    wins = np.stack([_wins(task, players) for _, task in sorted(by_task.items()) if task])
    total = wins.sum(0)
    met: NDArray[np.bool_] = np.greater(total + total.T, 0)
    if not (reached := _reachable(met[None])[0]).all():
        groups = sorted({tuple(name for name, there in zip(players, row, strict=True) if there) for row in reached})
        raise EvaluationError(
            f"players that were never compared: {' | '.join(', '.join(group) for group in groups)}; "
            "give dialogues of one task and condition for all of them, or rate each group alone"
        )
    drawn = np.zeros((0, len(wins)))
    if len(wins) > 1:
        draws = draw_tasks(len(wins), times, seed)
        drawn = (draws[:, :, None] == np.arange(len(wins))).sum(1).astype(np.float64)
    tables = np.concatenate([total[None], np.tensordot(drawn, wins, 1)])  # (1 + times, players, players)
    bounded: NDArray[np.bool_] = np.logical_not(_reachable(np.greater(tables, 0)).all((1, 2)))
    elo = MEAN + SCALE * fit(tables + bounded[:, None, None] * met / 2)
    games = (tables + tables.transpose(0, 2, 1)).sum(2)
    with np.errstate(invalid="ignore"):
        rates = tables.sum(2) / games
    found = [
        Rating(
            player,
            Estimate(float(elo[0, i]), *percentiles(elo[1:, i])),
            Estimate(float(rates[0, i]), *percentiles(rates[1:, i])),
            int(games[0, i]),
        )
        for i, player in enumerate(players)
    ]
    return Ratings(tuple(sorted(found, key=lambda r: (-r.elo.value, r.player))), bool(bounded[0]))


def fit(wins: Floats, *, tolerance: float = 1e-10, steps: int = 200) -> Floats:
    """Strengths ``(draws, players)`` of mean zero that maximise the likelihood of `wins` ``(draws, players, players)``,
    [d, i, j] how often i beat j in draw d.

    Newton's method with halved steps, on all draws at once. In every draw each player must reach each other by wins;
    else there is no maximum, and EvaluationError is raised.
    """
    games = wins + wins.transpose(0, 2, 1)
    won = wins.sum(2)
    n = wins.shape[1]
    theta = np.zeros(wins.shape[:2])

    def loss(theta: Floats) -> Floats:
        chance = np.logaddexp(0, theta[:, None, :] - theta[:, :, None])  # -log P(i beats j)
        found: Floats = (wins * chance).sum((1, 2))
        return found

    for _ in range(steps):
        chance = 1 / (1 + np.exp(theta[:, None, :] - theta[:, :, None]))
        gradient = won - (games * chance).sum(2)
        if np.abs(gradient).max(initial=0) < tolerance * max(1.0, float(games.max(initial=0))):
            return theta
        curvature = games * chance * (1 - chance)
        hessian = -curvature
        hessian[:, range(n), range(n)] += curvature.sum(2)
        # Strengths are known up to a constant: with it held at zero the matrix has an inverse.
        step = np.linalg.solve(hessian + 1 / n, gradient[:, :, None])[:, :, 0]
        before, size = loss(theta), np.ones(len(theta))
        while (worse := (size > 1e-8) & (loss(theta + size[:, None] * step) > before + 1e-12)).any():
            size[worse] /= 2
        theta = theta + size[:, None] * step
        theta -= theta.mean(1, keepdims=True)
    raise EvaluationError("the votes allow no finite strengths: some players never win against the others")


def _wins(votes: Sequence[Vote], players: Sequence[str]) -> Floats:
    """How often player i beat player j, ``(players, players)``."""
    number = {player: i for i, player in enumerate(players)}
    wins = np.zeros((len(players), len(players)))
    for vote in votes:
        if vote.a == vote.b or not 0 <= vote.score <= 1:
            raise EvaluationError(f"{vote} is no comparison of two players with a score from 0 to 1")
        wins[number[vote.a], number[vote.b]] += vote.score
        wins[number[vote.b], number[vote.a]] += 1 - vote.score
    return wins


def _reachable(edges: NDArray[np.bool_]) -> NDArray[np.bool_]:
    """Which player leads to which by some path of `edges`, ``(draws, players, players)``; each to itself."""
    n = edges.shape[-1]
    paths = edges | np.eye(n, dtype=bool)
    for _ in range(max(1, n.bit_length())):
        paths = np.matmul(paths, paths)
    return paths
