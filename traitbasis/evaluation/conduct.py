"""How simulated customers conduct themselves, off the words of their dialogues alone: no model, no judge.

Do they tell what they were given to tell, and when; do they stop; do they speak as the agent; do they always open
alike; are they too polite and too even in length, as users made by prompts are said to be (the Sim2Real gap, arXiv
2603.11245, which compares them with people)? ``DEFINITIONS`` says what each figure is.

A figure is a mean over dialogues, each counting once, of those in which it can be said; its interval draws tasks again.
Figures in ``WHOLE`` are of all dialogues together. Those that count *different* openers have no interval, since a task
that is drawn twice repeats itself, and fall with the number of dialogues: compare methods only where these are as many.

Differences to the baseline (``transcripts.baseline_of``) are paired: same task, same trial.

A turn that is nothing but a stop token is said to the harness and is no turn here, except to the figures of stopping.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import isnan, nan
from statistics import fmean, stdev
from typing import Any, TypeVar

from traitbasis.dialogues import NEUTRAL, Dialogue, spec_of
from traitbasis.evaluation.judgments import player_of, side_of
from traitbasis.evaluation.transcripts import UNSTEERED, baseline_of, spoken
from traitbasis.evaluation.wording import (
    frustration_markers,
    is_question,
    mattr,
    opener,
    opens_with_an_order,
    polite_markers,
)
from traitbasis.guards import Conversation
from traitbasis.metrics.damage import is_broken
from traitbasis.metrics.estimate import Estimate, mean, mean_over_tasks, over_tasks
from traitbasis.metrics.identifiers import flat_text, unknown_identifiers
from traitbasis.metrics.realism import is_role_flip
from traitbasis.pairs import fold, words

T = TypeVar("T")
_SHORT = 3  # words; so short a turn ("Yes, please.") may be said twice

DEFINITIONS: Mapping[str, Mapping[str, str]] = {
    "facts": {
        "facts told": "share of the task's facts that the customer states in any turn (case and spaces aside; 16 May "
        "is not 6 May)",
        "told first": "of the facts told, the share told in the customer's first turn",
        "disclosure": "area under the disclosure curve: over the customer's turns, the mean share of the facts told in "
        "the end that was told by then; 1 when all are told at once",
        "turn of a fact": "number of the customer's turn, from 1, in which a fact is first told, on average",
        "invented": "identifiers that neither the instruction nor anybody before has said, a dialogue",
        "invents": "share of dialogues with an invented identifier",
    },
    "stopping": {
        "proper": "a stop token alone, after the agent's message that does what was asked for; share of the dialogues "
        "that have a token or at least two customer turns after that message, as for never; neither is said where the "
        "method's dialogues are cut before a second turn could come",
        "early": "the first stop token comes before that message; share of the dialogues that have a token, or a "
        "customer turn after it",
        "never": "no stop token in the two or more customer turns after that message",
        "mixed": "share of dialogues in which a token stands beside other words in one turn",
        "no token": "share of dialogues without any stop token, whether or not there was a reason to stop",
    },
    "faults": {
        "role flips": "share of turns that speak as the agent (metrics/realism.py)",
        "broken": "share of turns that are no language any more (metrics/damage.py)",
        "repeats": "share of turns of more than three words that repeat an earlier turn of either side, word for word",
        "guard failed": "share of turns that went out though a guard rejects them, because tries ran out",
        "tries": "generations that a turn took",
    },
    "openers": {
        "first turns differ": "different first three words of first turns, a dialogue",
        "distinct-1": "different first words, a turn",
        "distinct-2": "different first two words, a turn",
        "distinct-3": "different first three words, a turn",
        "commonest": "share of turns that open with the three words that are the commonest opener",
        "orders": "share of turns that open with an imperative",
    },
    "manner": {
        "polite": "markers of courtesy (please, thank, sorry, would you, …), a turn",
        "frustrated": "markers of irritation (ridiculous, still waiting, !!, …), a turn",
        "questions": "share of turns with a question mark",
    },
    "length": {
        "words": "words a turn",
        "varies within": "coefficient of variation of words a turn within a dialogue",
        "varies between": "coefficient of variation of dialogues' mean words a turn",
        "MATTR": "different words in a run of 50, as a share: moving-average type-token ratio",
        "turns": "the customer's turns in a dialogue",
    },
}
PARTS = {name: part for part, names in DEFINITIONS.items() for name in names}


@dataclass(frozen=True)
class Conduct:
    """One dialogue. figures: by name, nan where it cannot be said; without those in ``WHOLE``. told: of each fact the
    number of the customer's turn, from 1, in which it is first stated; None when it never is. openers: the first words,
    up to three, of each turn."""

    dialogue: Dialogue
    figures: Mapping[str, float]
    told: Mapping[str, int | None]
    openers: tuple[str, ...]


@dataclass(frozen=True)
class Group:
    """All dialogues of a method, or of a method in one condition.

    condition: ``neutral``, a trait spec, or None for all that intend a trait. figures: by name. differences: to the
    baseline's dialogues of the same tasks and trials, of which there are `pairs`; empty where there is no baseline, or
    this is it.
    """

    method: str
    condition: str | None
    dialogues: int
    tasks: int
    figures: Mapping[str, Estimate]
    differences: Mapping[str, Estimate]
    pairs: int

    @property
    def name(self) -> str:
        """The method, and the condition if it is of one."""
        return f"{self.method}, {self.condition}" if self.condition else self.method

    @property
    def record(self) -> dict[str, Any]:
        """For JSON."""
        return {
            "method": self.method,
            "condition": self.condition,
            "dialogues": self.dialogues,
            "tasks": self.tasks,
            "figures": {name: figure.record for name, figure in self.figures.items()},
            "pairs": self.pairs,
            "differences": {name: figure.record for name, figure in self.differences.items()},
        }


# ---- All dialogues


def conduct(dialogues: Sequence[Dialogue], *, by_condition: bool = False, seed: int = 0) -> list[Group]:
    """Figures of each method, its neutral dialogues apart; by_condition: of each of its conditions."""
    longest = _longest(dialogues)
    measured = {side_of(d): conduct_of(d, longest.get(player_of(side_of(d)))) for d in dialogues}
    groups: dict[tuple[str, str], list[Conduct]] = defaultdict(list)
    for side, item in measured.items():
        groups[player_of(side), _condition(item.dialogue, by_condition)].append(item)
    found = []
    for (player, condition), items in sorted(groups.items()):
        method = items[0].dialogue.method
        baseline = [] if method == UNSTEERED else baseline_of(method, dialogues)
        pairs = _pairs(items, [measured[side_of(dialogue)] for dialogue in baseline])
        found.append(
            Group(
                player,
                condition or None,
                len(items),
                len({item.dialogue.task for item in items}),
                {name: _figure(name, items, seed) for name in PARTS},
                {name: _difference(name, pairs, seed) for name in PARTS} if pairs else {},
                len(pairs),
            )
        )
    return found


def _longest(dialogues: Iterable[Dialogue]) -> dict[str, int]:
    """By method, the customer's turns in the longest dialogue that the cap or the script ended."""
    found: dict[str, int] = defaultdict(int)
    for dialogue in dialogues:
        if dialogue.ended == "turns":
            player = player_of(side_of(dialogue))
            found[player] = max(found[player], len(dialogue.said))
    return found


def _figure(name: str, items: Sequence[Conduct], seed: int) -> Estimate:
    if name not in WHOLE:
        return mean_over_tasks(((item.dialogue.task, item.figures[name]) for item in items), seed)
    statistic, interval = WHOLE[name]
    return over_tasks(statistic, _by_task(items, interval, lambda item: item.dialogue.task), seed=seed)


def _difference(name: str, pairs: Sequence[tuple[Conduct, Conduct]], seed: int) -> Estimate:
    if name not in WHOLE:
        return mean_over_tasks(((a.dialogue.task, a.figures[name] - b.figures[name]) for a, b in pairs), seed)
    statistic, interval = WHOLE[name]
    if not interval and len({id(other) for _, other in pairs}) < len(pairs):
        return Estimate(nan)  # a baseline dialogue that is there twice repeats itself; by condition it is not

    def difference(some: Sequence[tuple[Conduct, Conduct]]) -> float:
        return statistic([a for a, _ in some]) - statistic([b for _, b in some])

    return over_tasks(difference, _by_task(pairs, interval, lambda pair: pair[0].dialogue.task), seed=seed)


def _by_task(items: Sequence[T], interval: bool, task: Callable[[T], str]) -> dict[str, list[T]]:
    """All in one group, of which there is no interval, unless one is wanted."""
    found: dict[str, list[T]] = defaultdict(list)
    for item in items:
        found[task(item) if interval else ""].append(item)
    return found


def _condition(dialogue: Dialogue, by_condition: bool) -> str:
    if by_condition:
        return spec_of(dialogue.traits) or NEUTRAL
    return "" if dialogue.traits or dialogue.method == UNSTEERED else NEUTRAL


def _pairs(items: Sequence[Conduct], baseline: Sequence[Conduct]) -> list[tuple[Conduct, Conduct]]:
    """Each dialogue with the baseline's of its task and trial: of the same condition if there is one, else neutral."""
    known = {item.dialogue.key: item for item in baseline}
    found = []
    for item in items:
        spec, task, trial, _ = item.dialogue.key
        sought = [(spec, task, trial, "generated"), ("", task, trial, "generated"), ("", task, trial, "all")]
        other = next((known[key] for key in sought if key in known), None)
        if other and other is not item:
            found.append((item, other))
    return found


def _openers(items: Iterable[Conduct], length: int) -> list[str]:
    return [opener(text, length) for item in items for text in item.openers]


def _different(texts: Sequence[str]) -> float:
    return len(set(texts)) / len(texts) if texts else nan


def _commonest(texts: Sequence[str]) -> float:
    return Counter(texts).most_common(1)[0][1] / len(texts) if texts else nan


def _variation(values: Iterable[float]) -> float:
    """Standard deviation over mean; nan for fewer than two values, or a mean of zero."""
    known = [value for value in values if not isnan(value)]
    return stdev(known) / average if len(known) > 1 and (average := fmean(known)) else nan


# Of all dialogues together: the statistic, and whether it has an interval.
WHOLE: Mapping[str, tuple[Callable[[Sequence[Conduct]], float], bool]] = {
    "first turns differ": (lambda items: _different([item.openers[0] for item in items if item.openers]), False),
    "distinct-1": (lambda items: _different(_openers(items, 1)), False),
    "distinct-2": (lambda items: _different(_openers(items, 2)), False),
    "distinct-3": (lambda items: _different(_openers(items, 3)), False),
    "commonest": (lambda items: _commonest(_openers(items, 3)), False),
    "varies between": (lambda items: _variation(item.figures["words"] for item in items), True),
}


# ---- One dialogue


def conduct_of(dialogue: Dialogue, longest: int | None = None) -> Conduct:
    """All that can be said of one dialogue. longest: how many turns the customer could have had; None where unknown."""
    turns = spoken(dialogue)
    texts = [text for _, text in turns]
    told = _told(dialogue, texts)
    lengths = [float(len(words(text))) for text in texts]
    figures = {
        **_disclosure([turn for turn in told.values() if turn], len(told), len(texts)),
        **_inventions(dialogue, turns),
        **_stopping(dialogue, longest),
        "role flips": _share(is_role_flip, texts),
        "broken": _share(is_broken, texts),
        "repeats": _repeats(dialogue, dict(turns)),
        **_made(dialogue),
        "orders": _share(opens_with_an_order, texts),
        "polite": mean([float(polite_markers(text)) for text in texts]),
        "frustrated": mean([float(frustration_markers(text)) for text in texts]),
        "questions": _share(is_question, texts),
        "words": mean(lengths),
        "varies within": _variation(lengths),
        "MATTR": mattr([word for text in texts for word in words(text.casefold())]),
        "turns": float(len(texts)),
    }
    return Conduct(dialogue, figures, told, tuple(map(opener, texts)))


def _told(dialogue: Dialogue, texts: Sequence[str]) -> dict[str, int | None]:
    folded = [fold(text) for text in texts]
    facts = {name: re.compile(rf"(?<!\w){re.escape(fold(fact))}(?!\w)") for name, fact in dialogue.facts.items()}
    return {
        name: next((number for number, text in enumerate(folded, 1) if fact.search(text)), None)
        for name, fact in facts.items()
    }


def _disclosure(told: Sequence[int], facts: int, turns: int) -> dict[str, float]:
    """told: number of the turn of each fact that is told."""
    if not told:
        return {"facts told": 0.0 if facts else nan, "told first": nan, "disclosure": nan, "turn of a fact": nan}
    return {
        "facts told": len(told) / facts,
        "told first": told.count(1) / len(told),
        "disclosure": fmean((turns - turn + 1) / turns for turn in told),  # a fact counts from its turn to the end
        "turn of a fact": fmean(told),
    }


def _inventions(dialogue: Dialogue, said: Iterable[tuple[int, str]]) -> dict[str, float]:
    if not dialogue.instruction:
        return {"invented": nan, "invents": nan}
    given = [dialogue.instruction, *dialogue.facts.values()]
    found = 0
    for i, text in said:
        known = flat_text([*given, *(turn.text for turn in dialogue.turns[:i])])
        found += len({flat_text([name]) for name in unknown_identifiers(text, known)})
    return {"invented": float(found), "invents": float(found > 0)}


def _stopping(dialogue: Dialogue, longest: int | None) -> dict[str, float]:
    tokens = Conversation((), dialogue.stop_tokens).token_pattern
    found = dict.fromkeys(DEFINITIONS["stopping"], nan)
    if not tokens:
        return found
    turns = [(i, turn.text) for i, turn in enumerate(dialogue.turns) if turn.speaker == "customer"]
    stops = [(i, not tokens.sub("", text).strip()) for i, text in turns if tokens.search(text)]
    found |= {"mixed": float(not all(alone for _, alone in stops)), "no token": float(not stops)}
    after = sum(i > dialogue.resolved for i, _ in turns) if dialogue.resolved is not None else 0
    if dialogue.resolved is None or not (stops or after):
        return found
    early = bool(stops) and stops[0][0] < dialogue.resolved
    found["early"] = float(early)
    # Where nobody gets a second turn after that message, only those who stop could be counted, and never would be 0.
    room = longest is None or longest - dialogue.resolved // 2 >= 2
    if room and (stops or after >= 2):
        found["never"] = float(not stops)
        found["proper"] = float(bool(stops) and not early and all(alone for _, alone in stops))
    return found


def _repeats(dialogue: Dialogue, own: Mapping[int, str]) -> float:
    """own: the customer's turns by their index."""
    said, found = set[str](), list[float]()
    for i, turn in enumerate(dialogue.turns):
        line = " ".join(words(own.get(i, turn.text).casefold()))
        if i in own:
            found.append(float(line in said and line.count(" ") >= _SHORT))
        said.add(line)
    return mean(found)


def _made(dialogue: Dialogue) -> dict[str, float]:
    made = [turn.made_by for turn in dialogue.turns if turn.speaker == "customer" and "tries" in turn.made_by]
    failed = [float(bool(turn.get("failed_guard"))) for turn in made]
    return {"guard failed": mean(failed), "tries": mean([float(turn["tries"]) for turn in made])}


def _share(is_so: Callable[[str], bool], texts: Sequence[str]) -> float:
    return mean([float(is_so(text)) for text in texts])
