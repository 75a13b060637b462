"""Dialogues to measure, whatever wrote them, and which of them are the neutral ones that others are held against."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from traitbasis import outcomes
from traitbasis.dialogues import Dialogue, DialogueTurn, Ended, read_dialogues
from traitbasis.errors import EvaluationError
from traitbasis.guards import Conversation

UNSTEERED = "unsteered"  # the method that is everybody's baseline, where there is one
HARNESS_STOPS = ("###STOP###", "###TRANSFER###", "###OUT-OF-SCOPE###", "###UNSATISFIED###")


def read_transcripts(paths: Iterable[str | Path]) -> tuple[list[dict[str, Any]], list[Dialogue]]:
    """Headers and dialogues of files of dialogues (``traitbasis eval collect``) and of harness runs alike.

    Raises EvaluationError or HarnessError naming the file that is missing, damaged, empty or neither of both.
    """
    files = list(map(Path, paths))
    runs = [outcomes.read_run(path) for path in files if _is_run(path)]
    headers, dialogues = read_dialogues(others) if (others := [p for p in files if not _is_run(p)]) else ([], [])
    trials = 0
    for run in runs:
        headers.append(run.header.model_dump(mode="json"))
        dialogues += dialogues_of(run, trials)
        trials += run.header.trials
    if not dialogues:
        raise EvaluationError(f"there is no dialogue in {', '.join(map(str, files)) or 'no file'}")
    return headers, dialogues


def dialogues_of(run: outcomes.Run, trials: int = 0) -> list[Dialogue]:
    """The episodes of a run in which the customer said something, infrastructure errors aside.

    Facts and the message that solves the task are unknown, and so is the instruction where the run did not keep it;
    tools and the system's policy are left out. The method is what the run's user says of itself, ``unsteered`` for the
    condition without traits. trials: of runs before this one, so that trials of several runs are told apart.
    """
    user = run.header.user
    method = str(user.get("method") or user.get("model") or "user")
    found = []
    for episode in run.episodes:
        turns = tuple(
            DialogueTurn("agent" if message.speaker == "agent" else "customer", message.text)
            for message in episode.messages
            if message.speaker in ("agent", "customer") and message.text.strip()
        )
        if episode.infrastructure or not any(turn.speaker == "customer" for turn in turns):
            continue
        ended: Ended = "turns"
        if episode.ended in ("user_stop", "agent"):
            ended = "stop" if episode.ended == "user_stop" else "agent"
        found.append(
            Dialogue(
                method=method if episode.traits else UNSTEERED,
                traits={trait: str(level) for trait, level in episode.traits.items()},
                task=f"{episode.domain}/{episode.task}",
                trial=trials + episode.trial,
                instruction=str((episode.model_extra or {}).get("instruction") or ""),
                facts={},
                turns=turns,
                ended=ended,
                stop_tokens=HARNESS_STOPS,
                model=str(user.get("model") or ""),
                positions=str(user.get("positions") or "generated"),
            )
        )
    return found


def spoken(dialogue: Dialogue) -> list[tuple[int, str]]:
    """The customer's turns that say something, with their index among all turns: stop tokens, which are said to the
    harness, are taken out, and so are turns that consist of them."""
    tokens = Conversation((), dialogue.stop_tokens).token_pattern
    return [
        (i, text)
        for i, turn in enumerate(dialogue.turns)
        if turn.speaker == "customer" and (text := (tokens.sub(" ", turn.text) if tokens else turn.text).strip())
    ]


def is_neutral(dialogue: Dialogue) -> bool:
    """Whether nobody meant the customer to show a trait."""
    return not dialogue.traits or dialogue.method == UNSTEERED


def baseline_of(method: str, dialogues: Sequence[Dialogue]) -> list[Dialogue]:
    """The neutral dialogues that a method is held against: those of the method ``unsteered``, where there is none the
    method's own; none where it has none. Those with a clean past, where there are such."""
    found = [dialogue for dialogue in dialogues if dialogue.method == UNSTEERED]
    found = found or [dialogue for dialogue in dialogues if dialogue.method == method and not dialogue.traits]
    return [dialogue for dialogue in found if dialogue.positions == "generated"] or found


def provenance(headers: Sequence[dict[str, Any]], dialogues: Sequence[Dialogue], **settings: Any) -> dict[str, Any]:
    """What made a figure (contract 11): settings, the dialogues' headers and number, versions."""
    from traitbasis.sweep import versions

    return {"settings": settings, "dialogues": len(dialogues), "headers": list(headers), "versions": versions()}


def _is_run(path: Path) -> bool:
    """Whether the first line says so; what is missing or damaged is left to those who read dialogues."""
    try:
        with path.open("rb") as file:
            return f'"{outcomes.FORMAT}"'.encode() in file.readline()
    except OSError:
        return False
