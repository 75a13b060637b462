"""Does a trait last? The paper's "long-range consistency" (24.8 % of TraitBasis chats; escalation in 52.4 %).

The paper publishes no definition. Ours, for each dialogue of at least ``LEAST_TURNS`` customer turns and each trait
that its customer is meant to show:

- *Expression* of a turn: the mean of the instruments (``traits.py``; 0 as neutral pairs, 1 as the trait's), read
  without what was said before, minus the mean of the neutral dialogues at the same turn of the same task. A scripted
  agent asks the same there, so what the task does to the wording goes out. Where no neutral dialogue of the task gets
  so far, those of all tasks stand in; without neutral dialogues expression stays raw.
- *Change*: mean of the last third of the turns minus mean of the first third. *Tolerance*: the standard deviation of
  that change among neutral dialogues; with fewer than ``LEAST_NEUTRAL`` of them, ``TOLERANCE``.
- *Present* in a third: its mean is above the *threshold*, which nine in ten neutral dialogues' last thirds stay below.
  Half way between the pairs' sides would take for granted that generated turns stand on the scale as hand-written ones
  do; it is the threshold where neutral dialogues are too few, and only there.
- *Verdict*: ``absent`` when present in neither third, else ``fade`` or ``escalate`` when the change is beyond the
  tolerance, else ``stable``.

**Long-range consistency** is the share that is present at the end and did not fade. Judges and people give verdicts of
the same names (``judgments.py``), and their shares come from the same code: to them, what is stable or escalates is
present at the end.

Neutral dialogues are judged in the same way, for each trait that others are meant to show, against neutral dialogues of
other trials of the task (where there is one trial, of other tasks): what a customer gets who was given no trait. A
share says something by its distance from that one. Most of them are absent, which hides what noise alone does to the
change; *rises* and *falls* are the shares with a change beyond the tolerance, whatever is present.

Weak where: dialogues that are too short are left out (``Consistency.short`` counts them), and customers who give up
soon are not like the others; broken text has an expression, too, so read ``broken`` beside it.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from math import isnan, nan
from statistics import stdev
from typing import TYPE_CHECKING, Any

import numpy as np

from traitbasis.dialogues import Dialogue
from traitbasis.errors import EvaluationError
from traitbasis.evaluation.judgments import Course, Side, Verdict, player_of, side_of
from traitbasis.evaluation.transcripts import baseline_of, is_neutral, spoken
from traitbasis.metrics.damage import is_broken
from traitbasis.metrics.estimate import Estimate, finite, mean, mean_over_tasks

if TYPE_CHECKING:
    from traitbasis.evaluation.traits import TurnScore

LEAST_TURNS = 10
LEAST_NEUTRAL = 8  # dialogues; a spread and a ninth decile of fewer are guesses
TOLERANCE = 0.25  # a quarter of what lies between the pairs' sides
THRESHOLD = 0.5  # half way
INSTRUMENTS, ALL = "instruments", "all traits"
SHARES = ("consistent", "escalate", "stable", "fade", "absent", "rises", "falls")

Expression = Sequence[
    Sequence[Mapping[str, float]]
]  # by dialogue and customer turn (all of them): by trait; may be nan


@dataclass(frozen=True)
class Yardstick:
    """By what a trait is judged. baseline: the method whose neutral dialogues were subtracted; None where expression is
    raw. neutral: how many of them are long enough; calibrated: whether that is enough to set the other two."""

    baseline: str | None
    trait: str
    threshold: float
    tolerance: float
    neutral: int
    calibrated: bool


@dataclass(frozen=True)
class Case:
    """One trait in one dialogue, to one rater. present: at the end. first, last: mean expression of the thirds, above
    the neutral ones; they and the tolerance are nan where the rater gave a verdict alone."""

    dialogue: Dialogue
    trait: str
    rater: str
    verdict: Course
    present: bool
    first: float = nan
    last: float = nan
    tolerance: float = nan

    @property
    def change(self) -> float:
        return self.last - self.first

    @property
    def consistent(self) -> bool:
        return self.present and self.verdict in ("stable", "escalate")

    def is_(self, share: str) -> float:
        """1 or 0, by a name in ``SHARES``; nan where it cannot be said."""
        if share in ("rises", "falls"):
            by = self.change if share == "rises" else -self.change
            return nan if isnan(by) else float(by > self.tolerance)
        return float(self.consistent if share == "consistent" else self.verdict == share)

    @property
    def record(self) -> dict[str, Any]:
        """For JSON; the dialogue by its method and key."""
        return {
            "method": self.dialogue.method,
            "key": self.dialogue.key,
            "rater": self.rater,
            "trait": self.trait,
            "verdict": self.verdict,
            "present": self.present,
            "first": finite(self.first),
            "last": finite(self.last),
        }


@dataclass(frozen=True)
class Row:
    """Shares of a method's cases, by name (``SHARES``). neutral: its dialogues without a trait, the null. trait: one,
    or ``ALL``. end: expression of the last third. cases: dialogues times traits."""

    rater: str
    method: str
    neutral: bool
    trait: str
    shares: Mapping[str, Estimate]
    end: Estimate
    cases: int
    tasks: int

    @property
    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "rater": self.rater,
            "method": self.method,
            "neutral": self.neutral,
            "trait": self.trait,
            "cases": self.cases,
            "tasks": self.tasks,
            "expression at the end": self.end.record,
            **{name: share.record for name, share in self.shares.items()},
        }


@dataclass(frozen=True)
class Point:
    """A figure at a turn, numbered from 1. dialogues: that get so far."""

    turn: int
    value: Estimate
    dialogues: int


@dataclass(frozen=True)
class Curve:
    """A figure by turn. trait: whose expression, raw; empty for the share of broken turns."""

    method: str
    neutral: bool
    trait: str
    points: tuple[Point, ...]

    @property
    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "method": self.method,
            "neutral": self.neutral,
            "figure": self.trait or "broken",
            "points": [{"turn": p.turn, "dialogues": p.dialogues, **p.value.record} for p in self.points],
        }


@dataclass(frozen=True)
class Comparison:
    """A clean past against a steered one (``positions="all"``), paired by condition, task and trial.

    figures: by name, with a clean past, with a steered one, and the difference. broken: the difference in broken turns
    by turn, over all pairs of dialogues; short ones, too. pairs: of cases that are long enough on both sides.
    """

    method: str
    trait: str
    figures: Mapping[str, tuple[Estimate, Estimate, Estimate]]
    broken: tuple[Point, ...]
    pairs: int

    @property
    def record(self) -> dict[str, Any]:
        """For JSON."""
        sides = ("generated", "all", "difference")
        return {
            "method": self.method,
            "trait": self.trait,
            "pairs": self.pairs,
            "figures": {
                name: {side: estimate.record for side, estimate in zip(sides, three, strict=True)}
                for name, three in self.figures.items()
            },
            "broken by turn": [
                {"turn": point.turn, "pairs": point.dialogues, "difference": point.value.record}
                for point in self.broken
            ],
        }


@dataclass(frozen=True)
class Consistency:
    """All that is said of the dialogues. short: how many with an intended trait were left out, by method."""

    least_turns: int
    yardsticks: tuple[Yardstick, ...]
    cases: tuple[Case, ...]
    rows: tuple[Row, ...]
    curves: tuple[Curve, ...]
    comparisons: tuple[Comparison, ...]
    short: Mapping[str, int]

    @property
    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "yardsticks": [asdict(yardstick) for yardstick in self.yardsticks],
            "left out": dict(self.short),
            "rows": [row.record for row in self.rows],
            "comparisons": [comparison.record for comparison in self.comparisons],
            "curves": [curve.record for curve in self.curves],
            "cases": [case.record for case in self.cases],
        }

    @property
    def verdicts(self) -> list[Verdict]:
        """Of all raters, as judgments."""
        return [Verdict(*side_of(case.dialogue), case.rater, case.trait, case.verdict) for case in self.cases]


def expression_of(scores: Iterable[Iterable[TurnScore]]) -> list[list[dict[str, float]]]:
    """What ``consistency`` reads, from ``score_dialogues``: the mean of the instruments."""
    return [
        [{trait: mean(list(shown.values())) for trait, shown in turn.expression.items()} for turn in turns]
        for turns in scores
    ]


def consistency(
    dialogues: Sequence[Dialogue],
    expression: Expression | None = None,
    verdicts: Iterable[Verdict] = (),
    *,
    least_turns: int = LEAST_TURNS,
    seed: int = 0,
) -> Consistency:
    """Judge every long dialogue by the instruments, and count what raters say.

    expression: of each dialogue's customer turns, in order, by trait (``expression_of``); None where only raters judge.
    Raises EvaluationError when no dialogue with an intended trait is long enough, naming the longest; when a trait was
    not measured; when no verdict is about these dialogues.
    """
    long = [dialogue for dialogue in dialogues if len(spoken(dialogue)) >= least_turns]
    intended = [dialogue for dialogue in dialogues if not is_neutral(dialogue)]
    _check(intended, least_turns)
    traits = sorted({trait for dialogue in intended for trait in dialogue.traits})
    yardsticks: list[Yardstick] = []
    cases: list[Case] = []
    curves: list[Curve] = []
    if expression is not None:
        series = _series(dialogues, expression, traits)
        for trait in traits:
            measured, found = _measure(dialogues, long, series, trait)
            cases += measured
            yardsticks += found
        curves += _expression_curves(long, series, traits, seed)
    cases += _rated(long, verdicts, traits)
    curves += _broken_curves(dialogues, seed)
    short = {d.method: 0 for d in intended}
    for dialogue in intended:
        short[dialogue.method] += len(spoken(dialogue)) < least_turns
    return Consistency(
        least_turns,
        tuple(yardsticks),
        tuple(cases),
        tuple(_rows(cases, seed)),
        tuple(curves),
        tuple(_comparisons(intended, cases, seed)),
        short,
    )


# ---- Cases


def _check(intended: Sequence[Dialogue], least_turns: int) -> None:
    if not intended:
        raise EvaluationError("no dialogue intends a trait; collect some with: traitbasis eval collect --traits …")
    longest: dict[str, int] = defaultdict(int)
    for dialogue in intended:
        longest[dialogue.method] = max(longest[dialogue.method], len(spoken(dialogue)))
    if max(longest.values()) < least_turns:
        turns = ", ".join(f"{method} {number}" for method, number in sorted(longest.items()))
        raise EvaluationError(
            f"no dialogue with a trait has {least_turns} customer turns; the longest: {turns}. Collect longer ones "
            f"(traitbasis eval collect --turns {least_turns + 2}), or give fewer with --least-turns"
        )


Series = Mapping[Side, Mapping[str, Sequence[float]]]  # by dialogue and trait, of the turns that say something


def _series(dialogues: Sequence[Dialogue], expression: Expression, traits: Sequence[str]) -> Series:
    found: dict[Side, dict[str, list[float]]] = {}
    for dialogue, turns in zip(dialogues, expression, strict=True):
        indices = [i for i, turn in enumerate(dialogue.turns) if turn.speaker == "customer"]
        at = dict(zip(indices, turns, strict=True))
        try:
            found[side_of(dialogue)] = {trait: [at[i][trait] for i, _ in spoken(dialogue)] for trait in traits}
        except KeyError as error:
            raise EvaluationError(f"no instrument measures {error.args[0]!r}; build them with its pairs, too") from None
    return found


def _measure(
    dialogues: Sequence[Dialogue], long: Sequence[Dialogue], series: Series, trait: str
) -> tuple[list[Case], list[Yardstick]]:
    """The instruments' cases of one trait, and what they were judged by."""
    sides = {side_of(dialogue) for dialogue in long}
    judged: dict[str | None, list[Dialogue]] = defaultdict(list)
    for dialogue in long:
        if trait in dialogue.traits or is_neutral(dialogue):
            baseline = baseline_of(dialogue.method, dialogues)
            judged[baseline[0].method if baseline else None].append(dialogue)
    cases: list[Case] = []
    yardsticks: list[Yardstick] = []
    for method, group in sorted(judged.items(), key=lambda item: item[0] or ""):
        neutral = _Neutral(baseline_of(method, dialogues) if method else (), series, trait)
        null = [neutral.thirds(dialogue) for dialogue in neutral.dialogues if side_of(dialogue) in sides]
        yardsticks.append(_yardstick(method, trait, null))
        found = [(dialogue, neutral.thirds(dialogue)) for dialogue in group]
        cases += [_judge(dialogue, *thirds, yardsticks[-1]) for dialogue, thirds in found if not np.isnan(thirds).any()]
    return cases, yardsticks


class _Neutral:
    """What neutral customers show of a trait, turn by turn; without dialogues, nothing is taken off."""

    def __init__(self, dialogues: Sequence[Dialogue], series: Series, trait: str) -> None:
        different = {(dialogue.task, dialogue.trial, dialogue.said): dialogue for dialogue in dialogues}
        self.dialogues, self._series, self._trait = [*different.values()], series, trait
        self._at: dict[int, list[tuple[Dialogue, float]]] = defaultdict(list)
        for dialogue in self.dialogues:
            for turn, value in enumerate(series[side_of(dialogue)][trait]):
                self._at[turn].append((dialogue, value))

    def thirds(self, dialogue: Dialogue) -> tuple[float, float]:
        """Mean expression of the first and of the last third, above the neutral dialogues'."""
        values = self._series[side_of(dialogue)][self._trait]
        if self.dialogues:
            values = [value - self._level(dialogue, turn) for turn, value in enumerate(values)]
        return mean(values[: _third(values)]), _end(values)

    def _level(self, dialogue: Dialogue, turn: int) -> float:
        """Of the same turn and task; else of the turn; else of all turns. A neutral dialogue is not held against
        itself, nor against what another method said with its seed."""
        own = (dialogue.task, dialogue.trial) if is_neutral(dialogue) else None
        for turns in ([turn], [*self._at]):
            others = [(d.task, value) for t in turns for d, value in self._at.get(t, ()) if (d.task, d.trial) != own]
            for values in ([value for task, value in others if task == dialogue.task], [value for _, value in others]):
                if not isnan(found := mean(values)):
                    return found
        return nan


def _yardstick(method: str | None, trait: str, null: Sequence[tuple[float, float]]) -> Yardstick:
    known = [thirds for thirds in null if not np.isnan(thirds).any()]
    if len(known) < LEAST_NEUTRAL:
        return Yardstick(method, trait, THRESHOLD, TOLERANCE, len(known), False)
    threshold = float(np.quantile([last for _, last in known], 0.9))
    return Yardstick(method, trait, threshold, stdev(last - first for first, last in known), len(known), True)


def _judge(dialogue: Dialogue, first: float, last: float, by: Yardstick) -> Case:
    verdict: Course = "stable"
    if max(first, last) <= by.threshold:
        verdict = "absent"
    elif abs(last - first) > by.tolerance:
        verdict = "fade" if last < first else "escalate"
    return Case(dialogue, by.trait, INSTRUMENTS, verdict, last > by.threshold, first, last, by.tolerance)


def _rated(long: Sequence[Dialogue], verdicts: Iterable[Verdict], traits: Sequence[str]) -> list[Case]:
    """What raters said of the dialogues that are long enough: of intended traits, and of neutral customers."""
    verdicts, known = list(verdicts), {side_of(dialogue): dialogue for dialogue in long}
    found = []
    for verdict in verdicts:
        dialogue = known.get((verdict.method, verdict.key))
        if dialogue and verdict.trait in (traits if is_neutral(dialogue) else dialogue.traits):
            present = verdict.verdict in ("stable", "escalate")
            found.append(Case(dialogue, verdict.trait, verdict.rater, verdict.verdict, present))
    if verdicts and not found:
        raise EvaluationError(
            f"none of the {len(verdicts)} verdicts is about a trait of these dialogues, those that are long enough; "
            "give the dialogues that were judged"
        )
    return found


# ---- Shares


def _rows(cases: Sequence[Case], seed: int) -> list[Row]:
    groups: dict[tuple[str, bool, str, str], list[Case]] = defaultdict(list)
    for case in cases:
        player = player_of(side_of(case.dialogue))
        for trait in (ALL, case.trait):
            groups[case.rater, is_neutral(case.dialogue), player, trait].append(case)
    alone = len({case.trait for case in cases}) < 2
    found = []
    for (rater, neutral, player, trait), group in sorted(groups.items(), key=lambda item: _all_first(item[0])):
        if not (alone and trait == ALL):
            found.append(
                Row(
                    rater,
                    player,
                    neutral,
                    trait,
                    {name: _over(group, [case.is_(name) for case in group], seed) for name in SHARES},
                    _over(group, [case.last for case in group], seed),
                    len(group),
                    len({case.dialogue.task for case in group}),
                )
            )
    return found


def _all_first(key: tuple[str, bool, str, str]) -> tuple[str, bool, str, bool, str]:
    """Raters, then all traits together, then trait by trait; in each the neutral rows come last."""
    rater, neutral, player, trait = key
    return rater, trait != ALL, trait, neutral, player


def _over(cases: Iterable[Case], values: Iterable[float], seed: int) -> Estimate:
    return mean_over_tasks(zip((case.dialogue.task for case in cases), values, strict=True), seed)


# ---- By turn


def _expression_curves(long: Sequence[Dialogue], series: Series, traits: Sequence[str], seed: int) -> list[Curve]:
    """Raw expression, of dialogues that are long enough: what is left in the end is then of the same dialogues."""
    return [
        Curve(player, neutral, trait, _points([(d, series[side_of(d)][trait]) for d in group], seed))
        for trait in traits
        for (neutral, player), everyone in sorted(_groups(long).items())
        if (group := [dialogue for dialogue in everyone if neutral or trait in dialogue.traits])
    ]


def _broken_curves(dialogues: Sequence[Dialogue], seed: int) -> list[Curve]:
    return [
        Curve(player, neutral, "", _points([(d, _broken(d)) for d in group], seed))
        for (neutral, player), group in sorted(_groups(dialogues).items())
    ]


def _groups(dialogues: Sequence[Dialogue]) -> dict[tuple[bool, str], list[Dialogue]]:
    found: dict[tuple[bool, str], list[Dialogue]] = defaultdict(list)
    for dialogue in dialogues:
        found[is_neutral(dialogue), player_of(side_of(dialogue))].append(dialogue)
    return found


def _broken(dialogue: Dialogue) -> list[float]:
    return [float(is_broken(text)) for _, text in spoken(dialogue)]


def _end(values: Sequence[float]) -> float:
    return mean(values[-_third(values) :])


def _third(values: Sequence[float]) -> int:
    return max(1, len(values) // 3)


def _points(items: Sequence[tuple[Dialogue, Sequence[float]]], seed: int) -> tuple[Point, ...]:
    """Means by turn over (dialogue, values by turn), as far as any dialogue gets."""
    found = []
    for turn in range(max((len(values) for _, values in items), default=0)):
        known = [(d.task, values[turn]) for d, values in items if turn < len(values) and not isnan(values[turn])]
        found.append(Point(turn + 1, mean_over_tasks(known, seed), len(known)))
    return tuple(found)


# ---- Clean past, steered past


def _comparisons(intended: Sequence[Dialogue], cases: Sequence[Case], seed: int) -> list[Comparison]:
    known = {side_of(dialogue): dialogue for dialogue in intended}
    own = {(side_of(case.dialogue), case.trait): case for case in cases if case.rater == INSTRUMENTS}
    pairs = [
        (dialogue, known[other])
        for (method, key), dialogue in sorted(known.items())
        if key[3] == "generated" and (other := (method, (*key[:3], "all"))) in known
    ]
    found = []
    for method, trait in sorted({(a.method, trait) for a, _ in pairs for trait in a.traits}):
        both = [(a, b) for a, b in pairs if a.method == method and trait in a.traits]
        cells = [(own.get((side_of(a), trait)), own.get((side_of(b), trait))) for a, b in both]
        measured = [(a, b) for a, b in cells if a and b]
        broken = [(_broken(a), _broken(b)) for a, b in both]
        tasks = [a.task for a, _ in both]
        found.append(
            Comparison(
                method,
                trait,
                {
                    **{name: _compare(measured, value, seed) for name, value in _COMPARED.items()},
                    "broken": _differ(tasks, [(mean(a), mean(b)) for a, b in broken], seed),
                    "broken, last third": _differ(tasks, [(_end(a), _end(b)) for a, b in broken], seed),
                },
                _points(
                    [
                        (a, [y - x for x, y in zip(*values, strict=False)])
                        for (a, _), values in zip(both, broken, strict=True)
                    ],
                    seed,
                ),
                len(measured),
            )
        )
    return found


_COMPARED: Mapping[str, Callable[[Case], float]] = {
    "consistent": lambda case: float(case.consistent),
    "escalate": lambda case: case.is_("escalate"),
    "fade": lambda case: case.is_("fade"),
    "expression, first third": lambda case: case.first,
    "expression, last third": lambda case: case.last,
    "change": lambda case: case.change,
}


def _compare(
    cases: Sequence[tuple[Case, Case]], value: Callable[[Case], float], seed: int
) -> tuple[Estimate, Estimate, Estimate]:
    return _differ([a.dialogue.task for a, _ in cases], [(value(a), value(b)) for a, b in cases], seed)


def _differ(
    tasks: Sequence[str], values: Sequence[tuple[float, float]], seed: int
) -> tuple[Estimate, Estimate, Estimate]:
    """Both means, and the mean of second minus first, with intervals over tasks."""

    def over(found: Iterable[float]) -> Estimate:
        return mean_over_tasks(zip(tasks, found, strict=True), seed)

    return over(a for a, _ in values), over(b for _, b in values), over(b - a for a, b in values)
