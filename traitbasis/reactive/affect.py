"""A customer's state on two axes, what moves it, and what an agent earns by it. Source: EIBench, sections 3.3 and 4.

    a  negative emotion, 0 to 100: anger in Defense and Repair, sadness in Support, defensiveness in Charm
    t  relation, 0 to 100: how far the customer engages with the agent and trusts it

A dialogue begins at its scenario's start anchor, each agent turn moves the state by (Δa, Δt), and what it ends at is
scored between the success and the failure anchor. The formulas are the paper's, and exact. What moves the state are
rules of our own (``RULES``): the paper asks a language model for (Δa, Δt), and ``State.moved`` takes that as well.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from statistics import fmean, pstdev, stdev
from typing import TYPE_CHECKING, Any, Literal, get_args

from traitbasis.errors import ReactionError

if TYPE_CHECKING:
    from traitbasis.reactive.appraisal import Appraisal

Scene = Literal["Support", "Defense", "Repair", "Charm"]
SCENES: tuple[Scene, ...] = get_args(Scene)
Ending = Literal["succeeded", "failed", "turns"]

T_MAX = 8  # agent turns (B.1)
WEIGHT = 0.5  # λ of eq. 2, the relation's share
ALPHA = 15.0  # turn-credit weight of eq. 5 and 7
SIGMA_MIN = 0.1  # floor of the group's standard deviation, eq. 4
MAX_STEP = 15.0  # ours: how far one agent turn moves an axis at most

# What a full-strength event does to (a, t). Scenes differ in what hurts: a prying question costs in Charm, a broken
# word in Repair, cold advice in Support, while in Defense a refusal is expected and only its refrain enrages.
RULES: Mapping[Scene, Mapping[str, tuple[float, float]]] = {
    "Support": {
        "warmth": (-8, 7), "progress": (-4, 4), "repeated question": (4, -5), "unnecessary question": (3, -4),
        "ignored cue": (9, -8), "no progress": (2, -3), "contradiction": (4, -6), "refusal": (5, -5),
        "rigid refrain": (6, -7), "coldness": (12, -12),
    },
    "Defense": {
        "warmth": (-6, 5), "progress": (-8, 7), "repeated question": (5, -4), "unnecessary question": (4, -3),
        "ignored cue": (6, -5), "no progress": (4, -3), "contradiction": (6, -7), "refusal": (2, -1),
        "rigid refrain": (8, -6), "coldness": (10, -9),
    },
    "Repair": {
        "warmth": (-7, 6), "progress": (-8, 8), "repeated question": (6, -5), "unnecessary question": (5, -4),
        "ignored cue": (7, -6), "no progress": (5, -4), "contradiction": (9, -10), "refusal": (7, -6),
        "rigid refrain": (8, -7), "coldness": (12, -11),
    },
    "Charm": {
        "warmth": (-5, 8), "progress": (-3, 7), "repeated question": (4, -5), "unnecessary question": (5, -4),
        "ignored cue": (5, -6), "no progress": (2, -3), "contradiction": (5, -6), "refusal": (3, -4),
        "rigid refrain": (6, -6), "coldness": (9, -10),
    },
}  # fmt: skip


@dataclass(frozen=True)
class State:
    """Negative emotion `a` and relation `t`, each in [0, 100]. Raises ReactionError for anything else."""

    a: float
    t: float

    def __post_init__(self) -> None:
        for axis in ("a", "t"):
            value = getattr(self, axis)
            if not _is_number(value) or not 0 <= value <= 100:
                raise ReactionError(f"a state's {axis} is {value!r:.80}; it must be a number from 0 to 100")

    def moved(self, da: float, dt: float) -> State:
        """The state after an update, clipped to [0, 100]. Raises ReactionError for nan and infinite updates."""
        if not (_is_number(da) and _is_number(dt)):
            raise ReactionError(f"a state cannot be moved by ({da!r:.40}, {dt!r:.40}); give two finite numbers")
        return State(_clip(self.a + da, 0, 100), _clip(self.t + dt, 0, 100))

    @property
    def record(self) -> dict[str, float]:
        return {"a": self.a, "t": self.t}

    @classmethod
    def from_record(cls, record: Any) -> State:
        """Raises ReactionError naming the field that is missing, unknown or out of range."""
        return cls(**_fields(record, "a state", ("a", "t")))


@dataclass(frozen=True)
class Anchors:
    """Where a dialogue starts, what would be a success, and what a failure.

    Success must lie strictly below the start and failure strictly above it in a; in t the other way round: otherwise
    "toward" means nothing in eq. 1, or it divides by 0. Raises ReactionError naming the axis.
    """

    start: State
    succeed: State
    fail: State

    def __post_init__(self) -> None:
        for axis, order in (("a", (self.succeed, self.start, self.fail)), ("t", (self.fail, self.start, self.succeed))):
            low, middle, high = (getattr(state, axis) for state in order)
            if not low < middle < high:
                wanted = "succeed < start < fail" if axis == "a" else "fail < start < succeed"
                raise ReactionError(f"anchors on {axis} must be {wanted}, not {low:g}, {middle:g}, {high:g}")

    @property
    def record(self) -> dict[str, dict[str, float]]:
        return {name: getattr(self, name).record for name in ("start", "succeed", "fail")}

    @classmethod
    def from_record(cls, record: Any) -> Anchors:
        """Raises ReactionError naming the anchor and the field."""
        found = {}
        for name, value in _fields(record, "anchors", ("start", "succeed", "fail")).items():
            try:
                found[name] = State.from_record(value)
            except ReactionError as error:
                raise ReactionError(f"anchor {name!r}: {error}") from error
        return cls(**found)


# ---- Scores and credit


def axis_score(x: float, start: float, succeed: float, fail: float) -> float:
    """Eq. 1: 0 at the start, +1 at success, −1 at failure, linear between, clipped beyond.

        f(x) = clip( (x − start) / (succeed − start)   if x lies on success's side of the start,
                    −(x − start) / (fail − start)      otherwise )

    Both branches give 0 at the start. Raises ReactionError where the start is not strictly between the other two:
    with both on one side nothing says toward which x moves, and a start on an anchor divides by 0.
    """
    numbers = all(map(_is_number, (x, start, succeed, fail)))
    if not numbers or not min(succeed, fail) < start < max(succeed, fail):
        raise ReactionError(
            f"cannot score {x!r:.40} with start {start!r:.40}, success {succeed!r:.40}, failure {fail!r:.40}: "
            "the start must lie strictly between success and failure"
        )
    toward_success = (x > start) == (succeed > start)
    value = (x - start) / (succeed - start) if toward_success else -(x - start) / (fail - start)
    return _clip(value, -1, 1) + 0.0  # never -0.0


def outcome(final: State, anchors: Anchors, weight: float = WEIGHT) -> float:
    """Eq. 2: ``r_out = λ f(t) + (1 − λ) f(a)`` in [−1, 1], λ = `weight`. Raises ReactionError unless 0 ≤ λ ≤ 1."""
    if not _is_number(weight) or not 0 <= weight <= 1:
        raise ReactionError(f"λ is {weight!r:.40}; the relation's share must be a number from 0 to 1")
    relation = axis_score(final.t, anchors.start.t, anchors.succeed.t, anchors.fail.t)
    emotion = axis_score(final.a, anchors.start.a, anchors.succeed.a, anchors.fail.a)
    return weight * relation + (1 - weight) * emotion


def process_rewards(states: Sequence[State]) -> list[float]:
    """Eq. 3, one for each turn: ``r_proc = ½ (−Δa / 100) + ½ (Δt / 100)``.

    states: the start and the state after each agent turn, clipped; so moves beyond the scale earn nothing.
    """
    return [0.5 * -(after.a - before.a) / 100 + 0.5 * (after.t - before.t) / 100 for before, after in pairwise(states)]


def trace_advantages(outcomes: Sequence[float], floor: float = SIGMA_MIN, ddof: Literal[0, 1] = 0) -> list[float]:
    """Eq. 4, one for each rollout of one prompt: ``(r_out − μ) / max(σ, σ_min)``.

    ddof: the paper writes "the standard deviation of" the group, which is 0; 1 is the sample's (divided by K − 1), as
    verl and TRL compute it. A group of one has advantage 0. Raises ReactionError for an empty group, a bad outcome,
    or a floor that is not above 0.
    """
    if not outcomes or not all(map(_is_number, outcomes)):
        raise ReactionError(f"a group's outcomes are {list(outcomes)!r:.80}; give at least one, all finite numbers")
    if not _is_number(floor) or floor <= 0:
        raise ReactionError(f"σ_min is {floor!r:.40}; it must be above 0, since outcomes may all be alike")
    mean = fmean(outcomes)
    deviation = stdev(outcomes) if ddof and len(outcomes) > 1 else pstdev(outcomes)
    return [(value - mean) / max(deviation, floor) for value in outcomes]


def direct_advantages(trace: float, process: Sequence[float], alpha: float = ALPHA) -> list[float]:
    """Eq. 5, the paper's baseline: ``A = A_trace + α r_proc``, a rollout's turns. It adds α · mean r_proc to each."""
    return [trace + alpha * value for value in process]


def turn_advantages(trace: float, process: Sequence[float], alpha: float = ALPHA) -> list[float]:
    """Eq. 7, centred turn credit: ``A = A_trace + α (r_proc − mean r_proc)``. Its mean over the turns is A_trace."""
    mean = fmean(process) if process else 0.0
    return [trace + alpha * (value - mean) for value in process]


# ---- What moves the state


def update(state: State, appraisal: Appraisal, scene: Scene, sensitivity: float = 1.0) -> tuple[State, str]:
    """The state after an agent turn, and a short private reason: what was done to the customer and what it changed.

    The scene's rules, each times the event's strength, are added up, times `sensitivity`, and kept within ±``MAX_STEP``
    an axis. Raises ReactionError for an unknown scene and a sensitivity below 0.
    """
    rules = _rules(scene)
    if not _is_number(sensitivity) or sensitivity < 0:
        raise ReactionError(f"the sensitivity is {sensitivity!r:.40}; it must be a number from 0 on, 1 is ordinary")
    da = dt = 0.0
    for event, strength in appraisal.events.items():
        da, dt = da + strength * rules[event][0], dt + strength * rules[event][1]
    after = state.moved(*(_clip(sensitivity * move, -MAX_STEP, MAX_STEP) for move in (da, dt)))
    events = sorted(appraisal.events, key=lambda event: -appraisal.events[event])
    why = "; ".join(f"{event} ({said})" if (said := appraisal.reasons.get(event)) else event for event in events)
    return after, f"{why or 'nothing that matters'}: a {after.a - state.a:+.0f}, t {after.t - state.t:+.0f}"


def follow(
    start: State, appraisals: Iterable[Appraisal], scene: Scene, sensitivity: float = 1.0
) -> tuple[list[State], list[str]]:
    """The fold over a conversation: states with the start in front, and the reason for each move."""
    states, reasons = [start], list[str]()
    for appraisal in appraisals:
        state, reason = update(states[-1], appraisal, scene, sensitivity)
        states.append(state)
        reasons.append(reason)
    return states, reasons


def decides_to_stop(state: State, anchors: Anchors, turns: int, limit: int = T_MAX) -> Ending | None:
    """Whether the customer ends the dialogue after `turns` agent turns, and as what.

    It does where nothing is left to win or to lose: both axes at or beyond the success anchor, or both at or beyond
    the failure anchor, which is where r_out is ±1. Then at the limit (the paper's T_max). The paper leaves the
    decision to its simulator; this is the rule that needs none.
    """
    if state.a <= anchors.succeed.a and state.t >= anchors.succeed.t:
        return "succeeded"
    if state.a >= anchors.fail.a and state.t <= anchors.fail.t:
        return "failed"
    return "turns" if turns >= limit else None


def dose_scale(state: State, anchors: Anchors, gain: float = 0.0, cap: float = 2.0) -> float:
    """The factor by which a state changes the intensities of its customer's traits: ``1 − gain · f(a)`` in [0, cap].

    1 at the start, ``1 + gain`` at the failure anchor, ``1 − gain`` at success (f is eq. 1). Without a gain it is
    exactly 1 whatever the state: the coupling is off. Raises ReactionError for a gain below 0 or a cap below 1.
    """
    if not _is_number(gain) or gain < 0:
        raise ReactionError(f"the coupling's gain is {gain!r:.40}; it must be a number from 0 (off) on")
    if not _is_number(cap) or cap < 1:
        raise ReactionError(f"the coupling's cap is {cap!r:.40}; it must be a number from 1 on")
    score = axis_score(state.a, anchors.start.a, anchors.succeed.a, anchors.fail.a)
    return _clip(1 - gain * score, 0, cap)


def _rules(scene: Any) -> Mapping[str, tuple[float, float]]:
    if scene not in RULES:
        raise ReactionError(f"unknown scene {scene!r:.40}; known: {', '.join(SCENES)}")
    return RULES[scene]


def _clip(value: float, low: float, high: float) -> float:
    return min(max(value, low), high)


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and abs(value) < 1e9


def _fields(record: Any, what: str, names: tuple[str, ...]) -> dict[str, Any]:
    """A record's fields, all of them and no other."""
    if not isinstance(record, Mapping):
        raise ReactionError(f"{what} must be an object with {', '.join(names)}, not {record!r:.80}")
    if missing := [name for name in names if name not in record]:
        raise ReactionError(f"{what} has no {missing[0]!r}; it needs {', '.join(names)}")
    if unknown := [name for name in record if name not in names]:
        raise ReactionError(f"{what} has {unknown[0]!r:.80}, which is none of {', '.join(names)}")
    return {name: record[name] for name in names}
