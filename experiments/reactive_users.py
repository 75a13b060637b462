"""Do reactive customers react? Scripted agents of three kinds against customers that a real model plays.

Each dialogue is one of the shipped scenarios with one of the 594 emotion conditions. The helpful agent is warm and
tells something new in every turn; the asking one puts the same question in other words; the cold one dismisses.
Measured are the state the customer ends with, whether and when it gives up, and how long its condition implies that it
bears the same question. The cold agent is met by customers that may leave, and twice by customers with a trait that
stay: with emotion coupled to the trait's dose, and without.

    python experiments/reactive_users.py                # embedded model, one core: about 30 minutes
    python experiments/reactive_users.py --model ./Llama-3.1-8B-Instruct --dtype bfloat16
"""

from __future__ import annotations

import random
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any

import typer
from common import progress, run, table, versions, write_json

from traitbasis.dialogues import Dialogue, DialogueTurn
from traitbasis.embedded import DEFAULT_MODEL
from traitbasis.evaluation.traits import TraitInstruments, score_dialogues
from traitbasis.metrics.damage import is_broken
from traitbasis.metrics.estimate import Estimate, mean_over_tasks
from traitbasis.model import load_model
from traitbasis.pairs import PAPER_TRAITS, load_pairs
from traitbasis.reactive.affect import State, outcome
from traitbasis.reactive.conditions import Condition, all_conditions
from traitbasis.reactive.dissatisfaction import Patience, implied_turns
from traitbasis.reactive.reactor import CustomerState, Reactive
from traitbasis.reactive.scenarios import Scenario, read_scenarios
from traitbasis.simulator import UserSimulator
from traitbasis.tries import UserTurn

HERE = Path(__file__).resolve().parent
Agent = Callable[[Scenario, int], str]

_WARM = (
    "I am really sorry that this has happened to you.", "I understand how upsetting this is.",
    "Thank you for telling me so openly.", "That must have been hard.", "I hear you, and I am glad you told me.",
    "You are right to feel that way.", "I want to make this right with you.", "It matters to me how this goes for you.",
)  # fmt: skip
_DONE = (
    "I have just put that in writing for you.", "I have moved the rest of my day so that there is time for this.",
    "I have set a reminder for Friday at 10:00.", "I have sent you a note with what we agreed.",
    "I have asked Mr. Okoro to join us at 15:30.", "I have taken the first two points off your list.",
    "I have called ahead, and they expect you on Monday.", "I have kept a copy for you in folder 12.",
)  # fmt: skip
_ASKS = (
    "Could you tell me when this happened, please?", "When did this happen?", "Can you tell me again when that was?",
    "And when exactly did this happen?", "Please tell me when it happened.", "When was it that this happened?",
)  # fmt: skip
_COLD = (
    "That is not my problem.", "You are overreacting.", "It is your own fault, honestly.",
    "There is nothing to discuss.",
    "You should have thought of that before.", "Other people manage just fine.", "Calm down, it is not a big deal.",
    "I do not see why you make such a fuss.",
)  # fmt: skip


def helpful(scenario: Scenario, turn: int) -> str:
    """Warm, and with something new each time: a fact of its profile, or a step that it has done."""
    facts = scenario.model_profile.known_facts
    return f"{_WARM[turn % len(_WARM)]} {facts[turn] if turn < len(facts) else _DONE[turn % len(_DONE)]}"


def asking(scenario: Scenario, turn: int) -> str:
    return _ASKS[turn % len(_ASKS)]


def cold(scenario: Scenario, turn: int) -> str:
    return _COLD[turn % len(_COLD)]


@dataclass(frozen=True)
class Held:
    """One dialogue as it went. turns: agent's and customer's, the agent's first."""

    scenario: Scenario
    condition: Condition
    turns: tuple[tuple[str, UserTurn], ...]

    @property
    def state(self) -> CustomerState:
        reaction = self.turns[-1][1].reaction
        assert reaction
        return reaction.state

    @property
    def ended(self) -> int | None:
        """The agent turn at which the customer gave up."""
        return self.state.dissatisfaction.ended if self.state.dissatisfaction else None

    @property
    def record(self) -> dict[str, Any]:
        start, end = self.state.states[0], self.state.states[-1]
        return {
            "scenario": self.scenario.id,
            "condition": self.condition.name,
            "start": [start.a, start.t],
            "end": [end.a, end.t],
            "r_out": round(outcome(end, self.scenario.anchors), 4),
            "unsatisfied": self.ended,
            "implied": 1 + (implied_turns(Patience.of(self.condition), "repeated question") or 0),
            "turns": [
                {"agent": agent, "customer": turn.text, "dose": round(turn.dose, 4)} for agent, turn in self.turns
            ],
        }


def hold(
    user: UserSimulator, scenario: Scenario, condition: Condition, agent: Agent, most: int, traits: str, coupling: float
) -> Held:
    """A dialogue until the customer gives up or `most` agent turns are heard; with traits it stays to the end."""
    how = Reactive(condition=condition.name, unsatisfied=not traits, scenario=scenario, coupling=coupling)
    opens = scenario.scene == "Charm"
    line = agent(scenario, 0) if opens else "Hello."
    messages: list[dict[str, str]] = []
    turns: list[tuple[str, UserTurn]] = []
    state = None
    for number in range(opens, most + 1):
        messages.append({"role": "user", "content": line})
        turn = user.reply(messages, traits, reactive=how, state=state, seed=number)
        assert turn.reaction
        state = turn.reaction.state
        turns.append((line, turn))
        if state.dissatisfaction and state.dissatisfaction.ended:
            break
        messages.append({"role": "assistant", "content": turn.text})
        line = agent(scenario, number)
    return Held(scenario, condition, tuple(turns))


def main(
    model: Annotated[str, typer.Option(help="The customer's model.")] = DEFAULT_MODEL,
    dtype: Annotated[str, typer.Option(help="Of the model.")] = "bfloat16",
    dialogues: Annotated[int, typer.Option(min=2, help="With each agent.")] = 54,
    turns: Annotated[int, typer.Option(min=2, help="Agent turns at most.")] = 8,
    max_tokens: Annotated[int, typer.Option(min=8, help="Longest customer turn.")] = 40,
    traits: Annotated[str, typer.Option(help="Of the customer that the cold agent meets.")] = "impatience-low",
    coupling: Annotated[float, typer.Option(min=0, help="Its gain where it is on.")] = 1.0,
    seed: Annotated[int, typer.Option(help="Of the conditions.")] = 0,
    concurrency: Annotated[int, typer.Option(min=1, help="Dialogues at the same time.")] = 18,
    out: Annotated[Path, typer.Option()] = HERE / "results" / "reactive_users.json",
) -> None:
    draw = random.Random(seed)
    shipped, conditions = read_scenarios(), draw.sample(all_conditions(), dialogues)
    cast = [(shipped[number % len(shipped)], condition) for number, condition in enumerate(conditions)]
    settings = {
        "model": model, "dtype": dtype, "dialogues": dialogues, "turns": turns, "max_tokens": max_tokens,
        "traits": traits, "coupling": coupling, "seed": seed,
    }  # fmt: skip
    lm = load_model(model, dtype=dtype)
    kinds: dict[str, tuple[Agent, str, float]] = {
        "helpful": (helpful, "", 0.0),
        "asking": (asking, "", 0.0),
        "cold": (cold, "", 0.0),
        "cold, stays": (cold, traits, 0.0),
        "cold, stays, coupled": (cold, traits, coupling),
    }
    found: dict[str, list[Held]] = {}
    with UserSimulator(lm) as user, ThreadPoolExecutor(concurrency) as pool:
        user.sampling = user.sampling.__class__(max_tokens=max_tokens)
        for name, (agent, spec, gain) in kinds.items():
            with progress(name, dialogues) as step:
                held = {
                    pool.submit(hold, user, scenario, condition, agent, turns, spec, gain): place
                    for place, (scenario, condition) in enumerate(cast)
                }
                by_place = {}
                for done in as_completed(held):
                    by_place[held[done]] = done.result()
                    step(1)
            found[name] = [by_place[place] for place in sorted(by_place)]
        provenance = user.provenance
    rows = [row(name, held) for name, held in found.items()]
    trait = traits.partition("-")[0]
    instruments = TraitInstruments.build(lm, [load_pairs(one) for one in dict.fromkeys([*PAPER_TRAITS, trait])])
    expressed = {
        name: expression(instruments, lm, held, trait) for name, held in found.items() if name.startswith("cold, ")
    }
    asked = [one.record for one in found["asking"]]
    within = [one["unsatisfied"] is not None and one["unsatisfied"] <= one["implied"] for one in asked]
    write_json(
        out,
        {
            "made_by": {"command": "python experiments/reactive_users.py", "settings": settings, **provenance,
                        "versions": versions()},
            "rows": [{**line, **{key: value.record for key, value in expressed.get(line["agent"], {}).items()}}
                     for line in rows],
            "asking_within_implied": sum(within) / len(within),
            "asking_implied_beyond_the_cap": sum(one["implied"] > turns for one in asked),
            "dialogues": {name: [one.record for one in held] for name, held in found.items()},
        },
    )  # fmt: skip
    header = ["agent", "Δa", "Δt", "r_out", "gave up", "at turn", "dose", "broken"]
    print(table(header, [[line["agent"], *(_shown(line[key]) for key in
          ("da", "dt", "r_out", "gave_up", "at", "dose", "broken"))] for line in rows]))  # fmt: skip
    for name, figures in expressed.items():
        print(f"{name}: " + ", ".join(f"{key} {value}" for key, value in figures.items()))
    print(f"asked the same: gave up within the turns that the condition implies {sum(within)} of {len(within)}")


def row(name: str, held: Sequence[Held]) -> dict[str, Any]:
    """Figures of one agent, with intervals over scenarios."""

    def over(value: Callable[[Held], float]) -> dict[str, float | None]:
        return mean_over_tasks([(one.scenario.id, value(one)) for one in held]).record

    def moved(axis: str) -> Callable[[Held], float]:
        return lambda one: getattr(one.state.states[-1], axis) - getattr(one.state.states[0], axis)

    def outcome_of(one: Held) -> float:
        return outcome(State(**one.state.states[-1].record), one.scenario.anchors)

    gave_up = [one for one in held if one.ended]
    return {
        "agent": name,
        "dialogues": len(held),
        "da": over(moved("a")),
        "dt": over(moved("t")),
        "lower_a": sum(moved("a")(one) < 0 for one in held),
        "higher_t": sum(moved("t")(one) > 0 for one in held),
        "r_out": over(outcome_of),
        "gave_up": over(lambda one: float(one.ended is not None)),
        "at": mean_over_tasks([(one.scenario.id, float(one.ended or 0)) for one in gave_up]).record
        if gave_up
        else None,
        "dose": over(lambda one: sum(turn.dose for _, turn in one.turns) / len(one.turns)),
        "broken": over(lambda one: sum(is_broken(turn.text) for _, turn in one.turns) / len(one.turns)),
    }


def expression(instruments: TraitInstruments, lm: Any, held: Sequence[Held], trait: str) -> dict[str, Estimate]:
    """How much of a trait the generated turns show: the first two of a dialogue, and the last two."""
    dialogues = [
        Dialogue("steered", {}, one.scenario.id, number, one.scenario.simulated_user_profile.text, {}, tuple(
            said for agent, turn in one.turns if turn.tries
            for said in (DialogueTurn("agent", agent), DialogueTurn("customer", turn.text))
        ))
        for number, one in enumerate(held)
    ]  # fmt: skip
    dialogues = [dialogue for dialogue in dialogues if len(dialogue.said) >= 2]
    scores = score_dialogues(instruments, lm, dialogues)

    def of(part: slice) -> Estimate:
        return mean_over_tasks([
            (dialogue.task, sum(sum(score.expression[trait].values()) / len(score.expression[trait])
                                for score in some[part]) / len(some[part]))
            for dialogue, some in zip(dialogues, scores, strict=True)
        ])  # fmt: skip

    return {f"{trait}, first two turns": of(slice(0, 2)), f"{trait}, last two turns": of(slice(-2, None))}


def _shown(record: dict[str, float | None] | None) -> str:
    if not record or record["value"] is None:
        return "-"
    return f"{record['value']:+.2f} [{record['low']:.2f}, {record['high']:.2f}]"


if __name__ == "__main__":
    run(lambda: typer.run(main))
