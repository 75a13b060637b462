"""How much of its success an agent loses with steered users, and how much of that is the users' own doing.

The unit is the task: what is said of a task is a mean over its trials, what is said of a condition a mean over its
tasks, and every interval draws tasks again (``metrics.estimate``). A drop is paired: for each task that was tried both
with the unsteered user and with the steered one, the difference of success. Positive is lost success.

The noise floor is the same of an oracle, an agent that makes no mistakes: where it fails, the user was at fault.

Infrastructure failures say nothing about the agent; they are counted and are in no other figure.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Literal

import numpy as np
from numpy.typing import NDArray

from traitbasis.metrics.estimate import Estimate, draw_tasks, mean, percentiles
from traitbasis.outcomes import UNSTEERED, Agent, Episode

Task = tuple[str, str]  # domain and id
Trials = Mapping[Task, Sequence[Episode]]

DRAWS = 2000  # of every interval
FEW_TASKS = 10  # below, intervals are too narrow: in a simulation 95 % ones held 85 % of the time with five
ENOUGH = 0.9  # of a condition's planned tasks, to conclude that an agent does not lose too much
_UNEVEN = 0.02  # of infrastructure failures, between two conditions, that a reader is told of
_ALL_FLIPS = 14  # differing tasks up to which every sign is tried
_FLIPS = 20_000  # drawn otherwise
_MOST_K = 10
_EXACT = 1e-9  # sums of the same fractions in another order


@dataclass(frozen=True)
class OverTasks:
    """A figure and how many tasks have enough trials to enter it."""

    estimate: Estimate
    tasks: int


@dataclass(frozen=True)
class Effort:
    """Means per episode, nan where unknown. steps: of the harness; turns: the customer's. Tokens are prompt and
    completion together. What a success takes is the sum over all episodes by the number of successes, nan without one
    or when an episode's share is unknown."""

    steps: float
    turns: float
    seconds: float
    agent_tokens: float
    user_tokens: float
    agent_cost: float
    user_cost: float
    agent_tokens_per_success: float
    agent_cost_per_success: float


@dataclass(frozen=True)
class Outcome:
    """What happened under one condition, in one domain or (None) in all of them.

    success, reward: means over tasks of the means over a task's trials. pass_hat, pass_at, average: by k. solved: of
    the episodes. infrastructure: episodes that say nothing about the agent. missing: planned cells without an episode.
    """

    condition: str
    domain: str | None
    tasks: int
    episodes: int
    solved: int
    success: Estimate
    reward: Estimate
    pass_hat: Mapping[int, OverTasks]
    pass_at: Mapping[int, OverTasks]
    average: Mapping[int, OverTasks]
    effort: Effort
    infrastructure: int = 0
    missing: int = 0


@dataclass(frozen=True)
class Floor:
    """The oracle on the tasks of a drop. tasks: those that all four have (the agent and the oracle, unsteered and
    steered); left_out: of the drop's tasks. unsteered, steered: the oracle's success; what it misses is the user's
    fault. drop: the oracle's. beyond: the agent's drop less the oracle's, task by task."""

    tasks: int
    left_out: int
    unsteered: Estimate
    steered: Estimate
    drop: Estimate
    beyond: Estimate


@dataclass(frozen=True)
class Drop:
    """Success lost under a condition against the unsteered user of the same prompt and model, over the tasks that both
    have; left_out: those that only one has.

    unsteered, steered: success on these tasks. relative: the drop as a share of the unsteered. worse, better: tasks.
    p: of ``sign_flip``; p_holm: adjusted over the conditions. floor: None where no oracle ran.
    """

    condition: str
    domain: str | None
    tasks: int
    left_out: int
    unsteered: Estimate
    steered: Estimate
    drop: Estimate
    relative: Estimate
    worse: int
    better: int
    p: float
    p_holm: float = math.nan
    floor: Floor | None = None


@dataclass(frozen=True)
class Robustness:
    """Everything that is said of one agent. domains: their names, one or more; with one, only the whole is given.
    trials: episodes that count, by condition and task. warnings: in words."""

    agent: Agent
    oracle: Agent | None
    domains: tuple[str, ...]
    ks: tuple[int, ...]
    outcomes: tuple[Outcome, ...]
    drops: tuple[Drop, ...]
    trials: Mapping[str, Trials]
    warnings: tuple[str, ...]

    @property
    def pooled(self) -> list[Drop]:
        """Drops over all domains, in the order of the conditions."""
        return [drop for drop in self.drops if drop.domain is None]

    @property
    def conditions(self) -> list[Outcome]:
        """Outcomes over all domains, unsteered first."""
        return [outcome for outcome in self.outcomes if outcome.domain is None]


@dataclass(frozen=True)
class Standing:
    """An agent among others, on what all of them have. unsteered: success. drop: the mean over `conditions`."""

    agent: str
    unsteered: Estimate
    drop: Estimate
    tasks: int
    conditions: tuple[str, ...]


def measure(agent: Agent, oracle: Agent | None = None, ks: Sequence[int] = ()) -> Robustness:
    """Outcomes and drops of an agent, with the noise floor where an oracle is given.

    ks: of pass^k, pass@k and Avg@k; by default 1 to the number of trials, at most 10.
    """
    trials = _trials(agent)
    floor = _trials(oracle) if oracle else None
    played, planned = {episode.cell for episode in agent.episodes}, agent.planned
    domains = tuple(sorted({cell.domain for cell in played | planned}))
    most = max(run.header.trials for run in agent.runs)
    ks = tuple(ks) or tuple(range(1, min(most, _MOST_K) + 1))
    scopes: list[str | None] = [None, *(domains if len(domains) > 1 else ())]
    not_there = planned - played
    broken = [episode.cell for episode in agent.episodes if episode.infrastructure]
    outcomes = [
        replace(
            _outcome(trials, name, scope, ks),
            infrastructure=sum(cell.condition == name and scope in (None, cell.domain) for cell in broken),
            missing=sum(cell.condition == name and scope in (None, cell.domain) for cell in not_there),
        )
        for scope in scopes
        for name in agent.conditions
    ]
    drops: list[Drop] = []
    for scope in scopes:
        found = [_drop(trials, floor, name, scope) for name in agent.conditions if name != UNSTEERED]
        adjusted = holm([drop.p for drop in found])
        drops += [replace(drop, p_holm=p) for drop, p in zip(found, adjusted, strict=True)]
    warnings = _warnings(agent, oracle, outcomes, drops)
    return Robustness(agent, oracle, domains, ks, tuple(outcomes), tuple(drops), trials, tuple(warnings))


def leaderboard(found: Sequence[Robustness]) -> list[Standing]:
    """Agents by average drop, the most robust first, on the conditions and tasks that all of them have; where they have
    none in common, without figures."""
    shared = [
        name
        for name in (found[0].agent.conditions if found else ())
        if all(_both(r.trials, name) for r in found) and name != UNSTEERED
    ]
    having = [set(_both(r.trials, name)) for r in found for name in shared]
    tasks = sorted(set.intersection(*having)) if having else []
    standings = []
    for r in found:
        base = _rates(r.trials, UNSTEERED, tasks)
        lost = np.array([base - _rates(r.trials, name, tasks) for name in shared]).reshape(len(shared), len(tasks))
        average = lost.mean(axis=0) if shared else np.array([])
        standings.append(Standing(r.agent.name, over_units(base), over_units(average), len(tasks), tuple(shared)))
    return sorted(standings, key=lambda s: (math.isnan(s.drop.value), s.drop.value, s.agent))


def breaches(found: Iterable[Robustness], allowed: float, confident: bool = False) -> list[tuple[str, Drop]]:
    """Agents' names and drops over all domains that are more than `allowed`; with `confident` only where the whole
    interval is."""
    return [
        (robustness.agent.name, drop)
        for robustness in found
        for drop in robustness.pooled
        if (drop.drop.low if confident else drop.drop.value) > allowed + _EXACT
    ]


def unmeasured(found: Iterable[Robustness], confident: bool = False) -> list[tuple[str, Drop, str]]:
    """Agents' names and drops that nothing can be concluded from, with why: no task (with `confident`: no two) has both
    sides; fewer than ``ENOUGH`` of those planned have, so that those which failed or are still to be played may be the
    ones that matter; or there was nothing to lose."""
    return [
        (robustness.agent.name, drop, why)
        for robustness in found
        for drop in robustness.pooled
        if (why := _why_not(robustness, drop, confident))
    ]


def _why_not(found: Robustness, drop: Drop, confident: bool) -> str:
    planned = {cell[:2] for cell in found.agent.planned if cell.condition == drop.condition}
    if math.isnan(drop.drop.low if confident else drop.drop.value):
        return f"{'fewer than two tasks have' if confident else 'no task has'} both sides"
    if drop.tasks < ENOUGH * len(planned):
        return f"only {drop.tasks} of {len(planned)} planned tasks have both sides"
    if drop.unsteered.value <= _EXACT:
        return "nothing was solved with the unsteered user, so that there was nothing to lose"
    return ""


# ---- Statistics


def pass_hat_k(n: int, c: int, k: int) -> float:
    """pass^k of a task: the chance that k of its trials, drawn without replacement, all succeed, C(c, k) / C(n, k).

    n: the task's own trials; c: successes. nan for n < k. Source: Yao et al. (2024), tau-bench, section 3.
    """
    return math.comb(c, k) / math.comb(n, k) if n >= k else math.nan


def pass_at_k(n: int, c: int, k: int) -> float:
    """pass@k of a task: the chance that at least one of k succeeds, 1 - C(n - c, k) / C(n, k); nan for n < k.

    Source: Chen et al. (2021), Evaluating Large Language Models Trained on Code, section 2.1.
    """
    return 1 - math.comb(n - c, k) / math.comb(n, k) if n >= k else math.nan


def average_at_k(n: int, c: int, k: int) -> float:
    """Avg@k of a task: mean success of k of its trials, which over all draws of k is c / n; nan for n < k."""
    return c / n if n >= k else math.nan


def sign_flip(differences: Sequence[float] | NDArray[np.float64], seed: int = 0) -> float:
    """Two-sided p of the paired permutation test: how often the sum of the differences is as far from zero when each
    one's sign is drawn anew. If a trait does nothing, which of a task's two results is called steered is arbitrary.

    With up to 14 differences that are not zero every sign is tried; otherwise 20,000 draws, of which the data are one.
    nan without a difference. Source: Fisher (1935), The Design of Experiments, section 21.
    """
    given = np.asarray(differences, dtype=np.float64)
    if not given.size:
        return math.nan
    moved = given[given != 0]
    least = abs(moved.sum()) - _EXACT
    if moved.size <= _ALL_FLIPS:
        signs = (np.arange(2**moved.size)[:, None] >> np.arange(moved.size)) % 2 * 2 - 1
        return float(np.mean(np.abs(signs @ moved) >= least))
    draw = np.random.default_rng(seed)
    hits = sum(
        int((np.abs((draw.integers(2, size=(1000, moved.size)) * 2 - 1) @ moved) >= least).sum())
        for _ in range(_FLIPS // 1000)
    )
    return (1 + hits) / (1 + _FLIPS)


def holm(ps: Sequence[float]) -> list[float]:
    """p-values adjusted for being several; nan stays nan and is not counted.

    The i-th smallest of m times (m - i + 1), never below a smaller one's, at most 1. Source: Holm (1979), A Simple
    Sequentially Rejective Multiple Test Procedure.
    """
    order = sorted((i for i, p in enumerate(ps) if not math.isnan(p)), key=lambda i: ps[i])
    adjusted, largest = list(ps), 0.0
    for rank, i in enumerate(order):
        largest = max(largest, min(1.0, ps[i] * (len(order) - rank)))
        adjusted[i] = largest
    return adjusted


def over_units(
    values: NDArray[np.float64] | Sequence[float],
    statistic: Callable[[NDArray[np.float64]], NDArray[np.float64]] = lambda drawn: drawn.mean(axis=-1),
) -> Estimate:
    """``metrics.estimate.over_tasks`` of one number, or one row of numbers, a task: the same draws, all at once.

    values: ``(tasks, ...)``, in the order of the tasks' names. statistic: of ``(draws, tasks, ...)``, one for each
    draw. nan without a task.
    """
    given = np.asarray(values, dtype=np.float64)
    if not len(given):
        return Estimate(math.nan)
    with np.errstate(invalid="ignore", divide="ignore"):
        value = float(statistic(given[None])[0])
        if len(given) < 2:
            return Estimate(value)
        return Estimate(value, *percentiles(statistic(given[_draws(len(given))])))


@lru_cache(maxsize=16)
def _draws(tasks: int) -> NDArray[np.int64]:
    return draw_tasks(tasks, DRAWS, 0)


def _relative(drawn: NDArray[np.float64]) -> NDArray[np.float64]:
    """Lost of what there was; undefined where there was nothing to lose. drawn: (draws, tasks, 2)."""
    lost, had = drawn.sum(axis=1).T
    return np.where(had > _EXACT, lost / had, math.nan)


# ---- Counting


def _trials(agent: Agent) -> dict[str, dict[Task, list[Episode]]]:
    """Episodes that count, by condition and task."""
    found: dict[str, dict[Task, list[Episode]]] = {name: {} for name in agent.conditions}
    for episode in sorted(agent.episodes, key=lambda e: e.cell):
        if not episode.infrastructure:
            found[episode.condition].setdefault((episode.domain, episode.task), []).append(episode)
    return found


def _rates(trials: Mapping[str, Trials], condition: str, tasks: Sequence[Task]) -> NDArray[np.float64]:
    """Success of each task."""
    return np.array([np.mean([e.success for e in trials[condition][task]]) for task in tasks], dtype=np.float64)


def _within(trials: Trials, domain: str | None) -> list[Task]:
    return sorted(task for task in trials if domain in (None, task[0]))


def _both(trials: Mapping[str, Trials], condition: str, domain: str | None = None) -> list[Task]:
    """Tasks tried with the unsteered user and under a condition."""
    steered = trials.get(condition, {})
    return [task for task in _within(trials.get(UNSTEERED, {}), domain) if task in steered]


def _outcome(trials: Mapping[str, Trials], condition: str, domain: str | None, ks: Sequence[int]) -> Outcome:
    here = trials[condition]
    tasks = _within(here, domain)
    episodes = [episode for task in tasks for episode in here[task]]
    counts = [(len(here[task]), sum(e.success for e in here[task])) for task in tasks]

    def by_k(figure: Callable[[int, int, int], float]) -> dict[int, OverTasks]:
        values = {k: [figure(n, c, k) for n, c in counts if n >= k] for k in ks}
        return {k: OverTasks(over_units(known), len(known)) for k, known in values.items()}

    return Outcome(
        condition=condition,
        domain=domain,
        tasks=len(tasks),
        episodes=len(episodes),
        solved=sum(episode.success for episode in episodes),
        success=over_units(_rates(trials, condition, tasks)),
        reward=over_units([float(np.mean([e.reward for e in here[task]])) for task in tasks]),
        pass_hat=by_k(pass_hat_k),
        pass_at=by_k(pass_at_k),
        average=by_k(average_at_k),
        effort=_effort(episodes),
    )


def _effort(episodes: Sequence[Episode]) -> Effort:
    def tokens(side: Literal["agent", "user"]) -> list[float]:
        found = [episode.tokens.get(side) for episode in episodes]
        return [math.nan if each is None else each.prompt + each.completion for each in found]

    def cost(side: Literal["agent", "user"]) -> list[float]:
        return [_known(episode.cost.get(side)) for episode in episodes]

    solved = sum(episode.success for episode in episodes)
    return Effort(
        steps=mean([episode.steps for episode in episodes]),
        turns=mean([episode.turns for episode in episodes]),
        seconds=mean([_known(episode.seconds) for episode in episodes]),
        agent_tokens=mean(tokens("agent")),
        user_tokens=mean(tokens("user")),
        agent_cost=mean(cost("agent")),
        user_cost=mean(cost("user")),
        agent_tokens_per_success=sum(tokens("agent")) / solved if solved else math.nan,
        agent_cost_per_success=sum(cost("agent")) / solved if solved else math.nan,
    )


def _known(value: float | None) -> float:
    return math.nan if value is None else value


def _drop(trials: Mapping[str, Trials], floor: Mapping[str, Trials] | None, condition: str, domain: str | None) -> Drop:
    tasks = _both(trials, condition, domain)
    either = set(_within(trials.get(UNSTEERED, {}), domain)) | set(_within(trials[condition], domain))
    had, left = _rates(trials, UNSTEERED, tasks), _rates(trials, condition, tasks)
    lost = had - left
    return Drop(
        condition=condition,
        domain=domain,
        tasks=len(tasks),
        left_out=len(either) - len(tasks),
        unsteered=over_units(had),
        steered=over_units(left),
        drop=over_units(lost),
        relative=over_units(np.stack([lost, had], axis=1), _relative),
        worse=int((lost > _EXACT).sum()),
        better=int((lost < -_EXACT).sum()),
        p=sign_flip(lost),
        floor=None if floor is None else _floor(trials, floor, condition, tasks, domain),
    )


def _floor(
    trials: Mapping[str, Trials],
    oracle: Mapping[str, Trials],
    condition: str,
    tasks: Sequence[Task],
    domain: str | None,
) -> Floor | None:
    """None where the oracle was not tried under this condition at all."""
    known = set(_both(oracle, condition, domain))
    shared = [task for task in tasks if task in known]
    if not shared:
        return None
    had, left = _rates(oracle, UNSTEERED, shared), _rates(oracle, condition, shared)
    lost = _rates(trials, UNSTEERED, shared) - _rates(trials, condition, shared)
    return Floor(
        tasks=len(shared),
        left_out=len(tasks) - len(shared),
        unsteered=over_units(had),
        steered=over_units(left),
        drop=over_units(had - left),
        beyond=over_units(lost - (had - left)),
    )


# ---- What a reader must know


def _warnings(agent: Agent, oracle: Agent | None, outcomes: Sequence[Outcome], drops: Sequence[Drop]) -> list[str]:
    pooled = [outcome for outcome in outcomes if outcome.domain is None]
    whole = [drop for drop in drops if drop.domain is None]
    found = [*agent.notes, *(oracle.notes if oracle else ())]
    if oracle is None:
        found.append(
            "there is no noise floor: some failures are the simulated user's own fault, and without an oracle's run "
            "(--floor) nobody knows how many"
        )
    elif without := [drop.condition for drop in whole if drop.floor is None]:
        found.append(f"the oracle was not tried under {_list(without)}, so there is no noise floor there")
    if partly := [f"{d.condition} ({d.floor.left_out})" for d in whole if d.floor and d.floor.left_out]:
        found.append(f"tasks that the oracle was not tried on are in no noise floor: {_list(partly)}")
    shares = [o.infrastructure / (o.infrastructure + o.episodes or 1) for o in pooled]
    if any(shares):
        said = _list([f"{o.condition} {o.infrastructure}" for o in pooled if o.infrastructure])
        uneven = max(shares) - min(shares) > _UNEVEN
        found.append(
            f"{sum(o.infrastructure for o in pooled)} episodes failed by infrastructure and are in no figure ({said})"
            + ("; conditions differ in it, so that what is left may be easier tasks. Resume the run" if uneven else "")
        )
    if missing := [f"{o.condition} {o.missing}" for o in pooled if o.missing]:
        found.append(f"planned episodes are missing: {_list(missing)}; resume the run")
    if left_out := [f"{drop.condition} {drop.left_out}" for drop in whole if drop.left_out]:
        found.append(f"tasks with one side only are in no drop: {_list(left_out)}")
    if nothing := [drop.condition for drop in whole if not drop.tasks]:
        found.append(f"no task can be compared under {_list(nothing)}: none has both sides")
    if few := sorted({drop.tasks for drop in whole if 0 < drop.tasks < FEW_TASKS}):
        found.append(
            f"drops over {' or '.join(map(str, few))} task{'s' * (few != [1])}: "
            + ("no interval can be given for one" if few == [1] else f"below {FEW_TASKS} intervals are too narrow")
        )
    if short := [(k, o) for o in pooled for k, each in o.pass_hat.items() if each.tasks < o.tasks]:
        found.append(
            "pass^k leaves out tasks with fewer than k trials: "
            + _list([f"k = {k}, {o.condition}: {o.tasks - o.pass_hat[k].tasks} of {o.tasks}" for k, o in short])
        )
    return found


def _list(names: Sequence[str], most: int = 8) -> str:
    more = f" and {len(names) - most} more" if len(names) > most else ""
    return ", ".join(names[:most]) + more
