"""Dialogues between a simulated user and an agent: what every evaluation of users reads.

A file holds the dialogues of one *method* (a way to make a user: steered, prompted, tuned, …), one JSON object a line
after a header that says what made them. Lines are only ever appended, so that a run that was killed goes on where it
was.

The agent under test is ``agent`` here and the simulated user ``customer``, as everywhere (see ``chat.py``).
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Literal, get_args

from traitbasis.chat import Turn
from traitbasis.errors import EvaluationError
from traitbasis.files import append_whole, write_whole

FORMAT = "traitbasis.dialogues/1"
NEUTRAL = "neutral"  # a customer without traits
Level = Literal["low", "medium", "high"]
Speaker = Literal["agent", "customer"]
Ended = Literal[
    "stop", "turns", "agent"
]  # the customer said a stop token; the script or the cap of turns ran out; the agent left


@dataclass(frozen=True)
class DialogueTurn:
    """One message. made_by: what the endpoint says of the reply and the file's header does not say already."""

    speaker: Speaker
    text: str
    made_by: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class Dialogue:
    """One conversation about one task.

    method: name of what made the customer, such as ``steered``, ``prompted``, ``unsteered``. traits: intended level by
    trait (``low``, ``medium``, ``high``); empty for a neutral customer. task: id; dialogues of one task are compared
    with each other. trial: dialogues that differ in nothing else. instruction: the customer's task, without
    any word about traits. facts: by name, what the instruction gives the customer to tell. turns: the agent's and the
    customer's, alternating, the agent's first. resolved: index in `turns` of the agent's message that does what was
    asked for, from which on the customer may stop; beyond the last where the dialogue ended before, None where unknown.
    ended: see ``Ended``; a stop token stands in the last customer turn as it was sent. stop_tokens: those that the
    customer was told of. model: the id that was asked for. positions: ``generated`` (a clean past) or ``all``.
    """

    method: str
    traits: Mapping[str, str]
    task: str
    trial: int
    instruction: str
    facts: Mapping[str, str]
    turns: tuple[DialogueTurn, ...]
    resolved: int | None = None
    ended: Ended = "turns"
    stop_tokens: tuple[str, ...] = ()
    model: str = ""
    positions: str = "generated"

    @property
    def key(self) -> tuple[str, str, int, str]:
        """Identifies a dialogue within its method: spec, task, trial, positions."""
        return spec_of(self.traits), self.task, self.trial, self.positions

    @property
    def said(self) -> tuple[str, ...]:
        """The customer's turns, in order."""
        return tuple(turn.text for turn in self.turns if turn.speaker == "customer")

    def contexts(self, history: bool = False) -> list[tuple[Turn, ...]]:
        """For each customer turn what it is read in: the instruction and the agent's message before it, with `history`
        everything that was said before.

        Without history a turn is judged by itself: a reader that has seen an impatient beginning finds impatience in
        a neutral end."""
        found = []
        for i, turn in enumerate(self.turns):
            if turn.speaker == "customer":
                before = self.turns[:i] if history else self.turns[max(0, i - 1) : i]
                found.append((Turn("system", self.instruction), *(Turn(t.speaker, t.text) for t in before)))
        return found


class DialogueFile:
    """The dialogues of one method on disk, with the header that says what made them.

    Opened for writing it takes what is there already, and refuses a file that was made with other settings. Where an
    endpoint stands is no setting: a server that was killed comes back on another port, and is known by what it serves.
    """

    def __init__(self, path: Path, header: Mapping[str, Any]) -> None:
        self.path, self.header = path, {"format": FORMAT, **header}
        self.dialogues: list[Dialogue] = []
        self.keys: set[tuple[str, str, int, str]] = set()
        self._whole: int | None = None  # where a line begins that a kill cut off, or that another run is writing
        self.read_again()

    def read_again(self) -> None:
        """Take what is on disk, as when it was opened."""
        path = self.path
        if path.is_file():
            found, self.dialogues, whole = _read(path)
            settings = (found.keys() | self.header.keys()) - {"url", "agent_url"}
            different = sorted(key for key in settings if found.get(key) != self.header.get(key))
            if different:
                raise EvaluationError(
                    f"{path} holds dialogues that were made with other settings ({', '.join(different)}); delete it, "
                    "or write elsewhere with --out"
                )
            self._whole = whole
        else:
            write_whole(path, json.dumps(self.header, ensure_ascii=False) + "\n")
        self.keys = {dialogue.key for dialogue in self.dialogues}

    def append(self, dialogue: Dialogue) -> None:
        """Add a dialogue and have it on disk. Not safe for several threads at once."""
        if self._whole is not None and self._whole < self.path.stat().st_size:
            os.truncate(self.path, self._whole)
        self._whole = None
        append_whole(self.path, json.dumps(asdict(dialogue), ensure_ascii=False) + "\n")
        self.dialogues.append(dialogue)
        self.keys.add(dialogue.key)


def read_dialogues(paths: Iterable[str | Path]) -> tuple[list[dict[str, Any]], list[Dialogue]]:
    """Headers and dialogues of several files. Raises EvaluationError naming the file that is missing, empty or damaged,
    or when two files hold the same dialogue of the same method, or one holds it twice."""
    headers, found, seen = [], list[Dialogue](), dict[tuple[Any, ...], Path]()
    for path in map(Path, paths):
        if not path.is_file():
            raise EvaluationError(f"no dialogues at {path}; make some with: traitbasis eval collect --out {path}")
        header, dialogues, _ = _read(path)
        headers.append(header)
        for dialogue in dialogues:
            if (other := seen.setdefault((dialogue.method, *dialogue.key), path)) is not path:
                raise EvaluationError(
                    f"{path} and {other} both hold {dialogue.method} {' '.join(map(str, dialogue.key))}"
                )
        found += dialogues
    if not found:
        raise EvaluationError(f"there is no dialogue in {', '.join(map(str, paths)) or 'no file'}")
    return headers, found


def spec_of(traits: Mapping[str, str]) -> str:
    """``impatience-high+skeptical-medium``, in the order of names; empty for a neutral customer."""
    return "+".join(f"{trait}-{level}" for trait, level in sorted(traits.items()))


def model_id_of(template: str, traits: Mapping[str, str]) -> str:
    """What a user with these traits is asked for as, of a `template` of model ids: ``{spec}`` becomes ``spec_of`` them,
    ``{name}`` the same with ``.`` for ``+`` and ``neutral`` without traits.

    Raises EvaluationError for a template that cannot say which traits.
    """
    spec = spec_of(traits)
    found = template.replace("{spec}", spec).replace("{name}", spec.replace("+", ".") or NEUTRAL)
    if not found or "{" in found or (traits and found == template):
        raise EvaluationError(
            f"the model id {template!r} does not say which traits are asked for; write {{spec}} or {{name}} "
            "where they belong, such as 'steered-user@{spec}' or 'prompted-{name}'"
        )
    return found


def endpoint_seed(what: Sequence[Any]) -> int:
    """A seed from any JSON values, below 2**31, which every endpoint takes."""
    digest = hashlib.sha256(json.dumps(what).encode()).digest()
    return int.from_bytes(digest[:4], "big") >> 1


def _read(path: Path) -> tuple[dict[str, Any], list[Dialogue], int]:
    """Header, dialogues, and how many bytes the whole lines take."""
    data = path.read_bytes()
    whole = data.rfind(b"\n") + 1
    if not whole:
        raise EvaluationError(f"{path} holds no dialogues: it has no whole line; delete it, or make another")
    number, found, keys = 1, list[Dialogue](), set[tuple[Any, ...]]()
    try:
        first, *lines = data[:whole].decode("utf-8").split("\n")[:-1]
        header = json.loads(first)
        if header["format"] != FORMAT:
            raise EvaluationError(f"{path} holds no dialogues of this version (its format is {header['format']!r})")
        for number, line in enumerate(lines, 2):  # noqa: B007  (told by the error)
            found.append(_dialogue(json.loads(_whole_characters(line))))
    except (ValueError, LookupError, TypeError, AttributeError, RecursionError) as error:
        raise EvaluationError(f"{path} holds no dialogues, or is damaged: line {number}: {error}") from error
    for number, dialogue in enumerate(found, 2):
        if (key := (dialogue.method, *dialogue.key)) in keys:
            raise EvaluationError(
                f"{path}, line {number}: {' '.join(map(str, key))} is there a second time; two runs wrote the file at "
                "once: delete one of the lines"
            )
        keys.add(key)
    return header, found, whole


def _dialogue(line: Mapping[str, Any]) -> Dialogue:
    """Raises what a line of another shape makes it raise: readers rely on text where text should be."""
    turns = tuple(DialogueTurn(**turn) for turn in line["turns"])
    found = Dialogue(**{**line, "turns": turns, "stop_tokens": tuple(line.get("stop_tokens", ()))})
    texts = [found.method, found.task, found.instruction, found.model, found.positions, *found.stop_tokens]
    texts += [*found.traits, *found.traits.values(), *found.facts, *found.facts.values(), *(t.text for t in turns)]
    if wrong := [text for text in texts if not isinstance(text, str)]:
        raise TypeError(f"{wrong[0]!r:.80} stands where a text should")
    if wrong := [turn.speaker for turn in turns if turn.speaker not in get_args(Speaker)]:
        raise ValueError(f"{wrong[0]!r:.80} is no speaker; they are {', '.join(get_args(Speaker))}")
    if type(found.trial) is not int or not isinstance(found.resolved, int | None) or found.ended not in get_args(Ended):
        raise ValueError(f"trial {found.trial!r:.80}, resolved {found.resolved!r:.80} or ended {found.ended!r:.80}")
    return found


def _whole_characters(line: str) -> str:
    """JSON without halves of surrogate pairs: nobody can hash, send or print them."""
    if "\\ud" not in line.lower():
        return line
    return json.dumps(json.loads(line), ensure_ascii=False).encode("utf-8", "replace").decode()
