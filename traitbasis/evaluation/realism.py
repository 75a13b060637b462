"""Which simulated customer seems more like a real person? The paper's "realism Elo", from pairwise preferences.

Two methods' dialogues about the same task, in the same intended condition (the neutral one among them) and trial are a
pair; a rater says which customer seems more like a person. People (``sheets.py``) and judges (``judges.py``) are
raters, and so is a model-free one:

(a) Faults first. A customer's turn is faulty when it speaks as the agent, is broken, invents an identifier, mixes a
    stop token with text, repeats itself or is empty (the package's guards). The dialogue with the smaller share of
    faulty turns wins.
(b) Where these are equal, a discriminator between hand-written turns and those of the methods (``discriminator.py``):
    the higher mean log-odds of "written by a person" wins by more than ``MARGIN``; below that it is a tie.

Weak where: hand-written turns are about other tasks, so a topic or a name can stand for "written by a person"; none of
them was written in a dialogue of ten turns; and turns are read one by one, so that a customer who contradicts itself or
never comes to an end looks as real as its sentences. Read it beside people or judges.
"""

from __future__ import annotations

import math
from collections import Counter, defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import Any

from traitbasis.chat import Turn
from traitbasis.dialogues import Dialogue
from traitbasis.errors import EvaluationError
from traitbasis.evaluation.bradley_terry import Ratings, Vote, rate
from traitbasis.evaluation.judgments import Choice, Preference, Side, player_of, shown, side_of, votes_of
from traitbasis.guards import GUARDS, Conversation, failed_guard
from traitbasis.metrics.estimate import Estimate, mean, over_tasks
from traitbasis.metrics.instruments import rank_correlation

MODEL_FREE = "model-free"
MARGIN = 0.5  # nats of mean log-odds; what differs by less is a tie
FAULTS = ("empty", "stop_token", "role_flip", "unknown_identifier", "broken", "repeat")

_GUARDS = tuple(guard for guard in GUARDS if guard.name in FAULTS)
Pair = tuple[Dialogue, Dialogue]


# ---- Pairs and votes


def pairs_of(dialogues: Iterable[Dialogue]) -> list[Pair]:
    """Dialogues of two methods in one task, condition and trial, in the order of names.

    Raises EvaluationError when there is none: one method only, or methods with nothing in common.
    """
    cells: dict[tuple[str, str, int], list[Dialogue]] = defaultdict(list)
    for dialogue in dialogues:
        cells[dialogue.key[:3]].append(dialogue)
    found = [pair for _, cell in sorted(cells.items()) for pair in combinations(sorted(cell, key=side_of), 2)]
    if not found:
        methods = sorted({dialogue.method for cell in cells.values() for dialogue in cell})
        raise EvaluationError(
            f"no two methods have a task, traits and trial in common (methods: {', '.join(methods) or 'none'}); "
            "collect the same tasks with traitbasis eval collect"
        )
    return found


def both_orders(pair: Pair, rater: str, score: float) -> list[Preference]:
    """A rater's vote that does not depend on the order. score: 1 when the pair's first wins, 0.5 for a tie."""
    a, b = map(side_of, pair)
    names: dict[float, tuple[Choice, Choice]] = {
        1.0: ("first", "second"),
        0.5: ("tie", "tie"),
        0.0: ("second", "first"),
    }
    forth, back = names[score]
    return [Preference(a, b, rater, forth), Preference(b, a, rater, back)]


def say_the_same(pair: Pair) -> bool:
    """Whether both dialogues look the same to a rater, as an unsteered customer and a steered one at zero do."""
    return shown(pair[0]) == shown(pair[1])


@dataclass(frozen=True)
class Realism:
    """What one rater says of all methods.

    pairs: of dialogues. twice: pairs that were shown in both orders, inconsistent: those among them in which another
    customer was preferred then; they count as ties. first: share of decided showings in which what was shown first was
    preferred; 0.5 without position bias.
    """

    rater: str
    ratings: Ratings
    pairs: int
    ties: int
    twice: int
    inconsistent: int
    first: Estimate

    @property
    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "methods": {
                rating.player: {
                    "elo": rating.elo.record,
                    "win_rate": rating.win_rate.record,
                    "comparisons": rating.comparisons,
                }
                for rating in self.ratings.players
            },
            "bounded": self.ratings.bounded,
            "pairs": self.pairs,
            "ties": self.ties,
            "shown_in_both_orders": self.twice,
            "inconsistent": self.inconsistent,
            "first_preferred": self.first.record,
            "position_biased": self.biased,
        }

    @property
    def biased(self) -> bool:
        """Whether the place on the page decides more than chance would explain."""
        return self.first.low > 0.5 or self.first.high < 0.5 or 0 < self.twice == self.inconsistent


def elo_correlations(raters: Sequence[Realism]) -> dict[tuple[str, str], float]:
    """Spearman's correlation of the Elo of every two raters, over the methods that both rated; nan below two."""
    found = {}
    for one, other in combinations(raters, 2):
        mine, theirs = ({p.player: p.elo.value for p in rater.ratings.players} for rater in (one, other))
        both = sorted(mine.keys() & theirs.keys())
        found[one.rater, other.rater] = rank_correlation([mine[p] for p in both], [theirs[p] for p in both])
    return found


def realism(preferences: Iterable[Preference], *, seed: int = 0) -> list[Realism]:
    """Ratings by each rater. Raises EvaluationError without preferences, and where methods were never compared."""
    shows: dict[str, list[Preference]] = defaultdict(list)
    for preference in preferences:
        shows[preference.rater].append(preference)
    if not shows:
        raise EvaluationError("there is no preference to rate methods by")
    return [_realism(rater, shows[rater], seed) for rater in sorted(shows)]


def _realism(rater: str, shows: Sequence[Preference], seed: int) -> Realism:
    (votes,) = votes_of(shows).values()
    by_task: dict[str, list[Vote]] = defaultdict(list)
    for (a, b), score in votes.items():
        by_task[a[1][1]].append(Vote(player_of(a), player_of(b), score))
    times = Counter(frozenset((show.first, show.second)) for show in shows)
    decided: dict[str, list[float]] = defaultdict(list)
    chosen: dict[frozenset[Side], set[Side | None]] = defaultdict(set)
    for show in shows:
        side = {"first": show.first, "second": show.second, "tie": None}[show.choice]
        chosen[frozenset((show.first, show.second))].add(side)
        if side is not None:
            decided[show.task].append(float(show.choice == "first"))
    return Realism(
        rater,
        rate(by_task, seed=seed),
        pairs=len(votes),
        ties=sum(score == 0.5 for score in votes.values()),
        twice=sum(count > 1 for count in times.values()),
        inconsistent=sum(len(sides) > 1 for sides in chosen.values()),
        first=over_tasks(mean, decided, seed=seed) if decided else Estimate(math.nan),
    )


# ---- The model-free rater


@dataclass(frozen=True)
class Score:
    """One dialogue to the model-free rater. faulty: share of its customer's turns. human: mean log-odds of "written by
    a person" over the turns that could be read; nan when none could."""

    faulty: float
    human: float


def find_faults(dialogue: Dialogue) -> list[str | None]:
    """For each of the customer's turns the first of ``FAULTS`` that it has, None when it has none."""
    told = Turn("system", "\n".join([dialogue.instruction, *dialogue.facts.values()]))
    found: list[str | None] = []
    for context, text in zip(dialogue.contexts(history=True), dialogue.said, strict=True):
        failed = failed_guard(text, _GUARDS, Conversation((told, *context[1:]), dialogue.stop_tokens))
        found.append(failed.name if failed else None)
    return found


def score(dialogues: Sequence[Dialogue], log_odds: Sequence[float]) -> list[Score]:
    """Scores in the order of dialogues. log_odds: of all their customers' turns, in order; nan where there is none."""
    found, at = [], 0
    for dialogue in dialogues:
        faults = find_faults(dialogue)
        faulty = sum(map(bool, faults)) / len(faults) if faults else 1.0
        found.append(Score(faulty, mean(log_odds[at : (at := at + len(faults))])))
    return found


def prefer(a: Score, b: Score) -> float:
    """1 when `a` seems more like a person, 0 when `b` does, 0.5 for a tie."""
    if a.faulty != b.faulty:
        return float(a.faulty < b.faulty)
    difference = a.human - b.human
    return float(difference > 0) if abs(difference) > MARGIN else 0.5  # nan is no difference


def model_free_preferences(dialogues: Sequence[Dialogue], scores: Sequence[Score]) -> list[Preference]:
    """The model-free rater's preferences in all pairs, under the name ``MODEL_FREE``. scores: of the dialogues."""
    by_side = {side_of(dialogue): scored for dialogue, scored in zip(dialogues, scores, strict=True)}
    return [
        preference
        for a, b in pairs_of(dialogues)
        for preference in both_orders((a, b), MODEL_FREE, prefer(by_side[side_of(a)], by_side[side_of(b)]))
    ]
