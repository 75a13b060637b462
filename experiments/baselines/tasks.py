"""Training tasks: conversations up to the customer's next turn, made of the templates in ``tasks.yaml``.

They are there to draw training replies on. No task shares an id, a date or an amount with an evaluation.
"""

from __future__ import annotations

import random
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from string import Formatter
from typing import Any, Literal

import yaml

from traitbasis.chat import Turn

from .values import draw_amount, draw_date, draw_shape, fresh

# What the customer has to answer: a greeting, a question for the number, a wait, a choice, or that it is done.
Moment = Literal["first", "number", "wait", "choice", "done"]
MOMENTS: tuple[Moment, ...] = ("first", "number", "wait", "choice", "done")


@dataclass(frozen=True)
class TrainingTask:
    """A conversation up to the agent's latest turn.

    facts: by name, what the instruction gives the customer to tell. asked: names of those that belong into the very
    next turn.
    """

    id: str
    domain: str
    context: tuple[Turn, ...]
    facts: Mapping[str, str]
    asked: tuple[str, ...]


def training_task(number: int, seed: int = 0) -> TrainingTask:
    """The task of a number; tasks of one seed differ in their values, situations and moments."""
    templates = _templates()
    rng = random.Random(f"{seed} {number}")
    template = templates["tasks"][number % len(templates["tasks"])]
    situation = rng.choice(template["situations"])
    moment = rng.choice(MOMENTS)
    known = {
        "name": f"{rng.choice(templates['names']['first'])} {rng.choice(templates['names']['last'])}",
        "company": template["company"].format(word=rng.choice(templates["names"]["company"])),
        "item": rng.choice(template["items"]),
        "number": fresh(lambda: draw_shape(template["number"], rng)),
        "date": fresh(lambda: draw_date(rng)),
        "amount": fresh(lambda: draw_amount(rng)),
        "number_name": template["number_name"],
    }
    told = [slot for slot in _slots(situation["told"]) if slot in ("item", "number", "date", "amount")]

    def say(text: str) -> str:
        return text.format(**known)

    instruction = say(f"You are {{name}}, a customer of {{company}}. {situation['told']}")
    context = [Turn("system", instruction), Turn("agent", say(rng.choice(templates["greetings"])))]
    if moment != "first":
        context += [Turn("customer", say(situation["opener"])), Turn("agent", say(rng.choice(templates["asks"])))]
    if moment not in ("first", "number"):
        latest = rng.choice(templates["waits"]) if moment == "wait" else situation[moment]
        context += [Turn("customer", known["number"]), Turn("agent", say(latest))]
    return TrainingTask(
        id=f"task-{seed}-{number}",
        domain=template["domain"],
        context=tuple(context),
        facts={slot: known[slot] for slot in told},
        asked=tuple(told) if moment == "first" else ("number",) if moment == "number" else (),
    )


def names() -> dict[str, list[str]]:
    """``first`` and ``last`` names, and ``company`` names."""
    found: dict[str, list[str]] = _templates()["names"]
    return found


@cache
def _templates() -> Any:
    return yaml.safe_load((Path(__file__).parent / "tasks.yaml").read_text(encoding="utf-8"))


def _slots(text: str) -> list[str]:
    return list(dict.fromkeys(slot for _, slot, _, _ in Formatter().parse(text) if slot))
