"""Results files of harness runs, made by hand."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from traitbasis.outcomes import UNSTEERED, Episode, Header

AGENT = {"kind": "llm", "model": "gpt-test", "url": "http://agent/v1", "strategy": "tool-calling", "temperature": 0.0}
USER = {"url": "http://user/v1", "model": "steered-user", "model_fingerprint": "f" * 16, "basis": "b" * 16}
# Success of each trial, by condition and task.
Solved = Mapping[str, Mapping[str, Sequence[int]]]


def header(names: Sequence[str], trials: int, **more: Any) -> Header:
    """Of a run of retail; a condition is named after its trait and level."""
    return Header(
        **{
            "harness": "tau-trait",
            "harness_version": "0.1.1",
            "domains": ("retail",),
            "agent": AGENT,
            "user": USER,
            "conditions": {name: traits_of(name) for name in names},
            "trials": trials,
            "max_steps": 30,
            **more,
        }
    )


def traits_of(condition: str) -> dict[str, str]:
    return {} if condition == UNSTEERED else dict([condition.rsplit("-", 1)])


def episode(condition: str, task: str, trial: int = 0, success: int = 1, **more: Any) -> Episode:
    return Episode(
        **{
            "domain": "retail",
            "task": task,
            "condition": condition,
            "traits": traits_of(condition),
            "trial": trial,
            "reward": float(success),
            "success": bool(success),
            "ended": "user_stop",
            "steps": 10,
            "turns": 4,
            "messages": (
                {"speaker": "agent", "text": "How can I help?"},
                {"speaker": "customer", "text": f"{condition}: cancel order {task}."},
                {"speaker": "agent", "text": "", "calls": [{"name": "cancel", "arguments": {"order": task}}]},
                {"speaker": "tool", "text": '{"status": "cancelled"}'},
                {"speaker": "agent", "text": "It is done."},
                {"speaker": "customer", "text": "###STOP###"},
            ),
            "cost": {"agent": 0.01, "user": 0.0},
            "tokens": {"agent": {"prompt": 900, "completion": 100}, "user": {"prompt": 90, "completion": 10}},
            "seconds": 2.0,
            **more,
        }
    )


def episodes(solved: Solved, **more: Any) -> list[Episode]:
    return [
        episode(condition, task, trial, success, **more)
        for condition, by_task in solved.items()
        for task, trials in by_task.items()
        for trial, success in enumerate(trials)
    ]


def write(path: Path, head: Header, found: Sequence[Episode], tail: str = "") -> Path:
    """As a run does: a line each."""
    path.write_text("".join(f"{each.model_dump_json()}\n" for each in (head, *found)) + tail, "utf-8")
    return path


def write_solved(path: Path, solved: Solved, **more: Any) -> Path:
    """A whole run; `more` goes to its header."""
    trials = max(len(trials) for by_task in solved.values() for trials in by_task.values())
    return write(path, header(list(solved), trials, **more), episodes(solved))
