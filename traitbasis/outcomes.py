"""What runs of a harness wrote down: a header that says what made them, and an episode a line.

``harness.runs`` writes these files and ``drops`` counts in them; this is the format, how it is read, and what may be
compared with what. A drop is the trait's doing only where nothing else differs, so runs with another user, harness or
cap of steps are refused: published drops mix the user's model, its prompt and its trait.

A *cell* is one (domain, task, condition, trial). The condition ``unsteered`` has no traits: every drop's baseline.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Annotated, Any, Final, Literal, NamedTuple, TypeVar

from pydantic import BaseModel, ConfigDict, Field, FiniteFloat, ValidationError

from traitbasis.errors import HarnessError

FORMAT: Final = "traitbasis.run/1"
MOST_TRIALS = 10_000  # every planned cell is counted
UNSTEERED = "unsteered"
ORACLE = "oracle"

Count = Annotated[int, Field(ge=0)]
Amount = Annotated[FiniteFloat, Field(ge=0)]


class _Record(BaseModel):
    """Fields that are not known here are kept: a later version's files can be read."""

    model_config = ConfigDict(extra="allow", frozen=True)


_T = TypeVar("_T", bound=_Record)


class Call(_Record):
    """A tool call, or what stands in its place when the agent's arguments were no JSON object."""

    name: str
    arguments: Any = None


class Message(_Record):
    """One message of an episode. calls: tools the agent called with it."""

    speaker: Literal["system", "agent", "customer", "tool"]
    text: str = ""
    calls: tuple[Call, ...] = ()


class Tokens(_Record):
    prompt: Count = 0
    completion: Count = 0


class Header(_Record):
    """What made a run (contract 11).

    agent: ``kind`` (``llm``, ``oracle``), ``model``, ``url``, ``strategy``, ``temperature``, …; all of it but the url
    says which agent it is. user: what its endpoint says of itself. conditions: traits by name. tasks: planned ids by
    domain; without it every task that any condition has is taken for planned. trials: planned of each.
    """

    format: Literal["traitbasis.run/1"] = FORMAT
    harness: str
    harness_version: str
    domains: tuple[str, ...]
    agent: dict[str, Any]
    user: dict[str, Any]
    conditions: dict[str, dict[str, str | float]]
    trials: Annotated[int, Field(ge=1, le=MOST_TRIALS)]
    tasks: dict[str, tuple[str, ...]] | None = None
    seed: int | None = None
    max_steps: int | None = None
    versions: dict[str, Any] = {}
    command: str = ""


class Episode(_Record):
    """One trial of one task under one condition, as it ended.

    success: the task was solved. reward: the harness's own. infrastructure: it says nothing about the agent (an
    endpoint was down, the harness crashed), so no figure of success has it. turns: the customer's. cost: money by side,
    None where unknown. tokens: by side. made_by: the ``traitbasis`` field of the user's first reply. error_type: what
    kind of mistake the agent made, where something has judged it.
    """

    kind: Literal["episode"] = "episode"
    domain: str
    task: str
    condition: str
    traits: dict[str, str | float] = {}
    trial: Count
    reward: FiniteFloat
    success: bool
    error: str | None = None
    infrastructure: bool = False
    ended: str = ""
    steps: Count = 0
    turns: Count = 0
    messages: tuple[Message, ...] = ()
    cost: dict[Literal["agent", "user"], Amount | None] = {}
    tokens: dict[Literal["agent", "user"], Tokens | None] = {}
    seconds: Amount | None = None
    made_by: dict[str, Any] | None = None
    reward_info: Any = None
    error_type: str | None = None

    @property
    def cell(self) -> Cell:
        return Cell(self.domain, self.task, self.condition, self.trial)


class Cell(NamedTuple):
    """What an episode is one of."""

    domain: str
    task: str
    condition: str
    trial: int

    def __str__(self) -> str:
        return f"{self.domain} task {self.task} under {self.condition}, trial {self.trial}"


@dataclass(frozen=True)
class Run:
    """A results file. notes: what a reader should know of it, such as a line that a kill cut off."""

    header: Header
    episodes: tuple[Episode, ...]
    path: Path = Path()
    notes: tuple[str, ...] = ()


@dataclass(frozen=True)
class Agent:
    """All that comparable runs say of one agent. name: tells it from the others it was read with."""

    name: str
    runs: tuple[Run, ...]
    episodes: tuple[Episode, ...]
    notes: tuple[str, ...] = ()

    @property
    def conditions(self) -> tuple[str, ...]:
        """Of all headers, ``unsteered`` first."""
        names = dict.fromkeys(name for run in self.runs for name in run.header.conditions)
        return (UNSTEERED, *(name for name in names if name != UNSTEERED))

    @property
    def planned(self) -> set[Cell]:
        """Every cell that the headers promise."""
        return {
            Cell(domain, task, condition, trial)
            for run in self.runs
            for domain, tasks in _tasks(run).items()
            for task in tasks
            for condition in run.header.conditions
            for trial in range(run.header.trials)
        }


def read_run(path: str | Path) -> Run:
    """A results file. A last line that a kill cut off is left out and noted.

    Of a cell that failed by infrastructure and was tried again, the later episode counts. Raises HarnessError, naming
    file and line, for what is missing, empty, damaged or no run, for an episode that the header does not know, and for
    a cell with two outcomes: whichever were taken would be a choice.
    """
    path = Path(path)
    if not path.is_file():
        raise HarnessError(f"no results at {path}; make some with: traitbasis bench tau-trait --out {path}")
    *lines, last = path.read_bytes().split(b"\n")
    notes = []
    if last:
        try:
            json.loads(last)
            lines.append(last)
        except ValueError:
            notes.append(f"the last line of {path} was cut off and is left out; resume the run to have it again")
    if not lines:
        raise HarnessError(f"{path} is empty; a run begins with a header: traitbasis bench tau-trait --out {path}")
    header = _parse(Header, lines[0], f"{path}, line 1 (the header)")
    found = [
        (place, _parse(Episode, line, place))
        for place, line in ((f"{path}, line {i}", line) for i, line in enumerate(lines[1:], 2))
        if line.strip()
    ]
    if header.conditions.get(UNSTEERED):
        raise HarnessError(
            f"{path}: the condition {UNSTEERED!r} is the baseline and has traits ({header.conditions[UNSTEERED]}); "
            "give it none, and steered users other names"
        )
    for place, episode in found:
        if header.conditions.get(episode.condition) != episode.traits:
            raise HarnessError(
                f"{place}: the condition {episode.condition!r} with traits {episode.traits} is not the header's "
                f"({header.conditions.get(episode.condition, 'it has none of that name')})"
            )
    return Run(header, tuple(_settle(found)), path, tuple(notes))


def by_agent(runs: Sequence[Run], floor: Sequence[Run] = ()) -> tuple[list[Agent], Agent | None]:
    """Runs of one agent put together, an agent each; and the oracle's, None when there are none.

    Raises HarnessError when they cannot be compared, naming the field: another harness, cap of steps or user, the same
    name for other traits, an oracle among the agents (but one of other settings than the floor's, which is a brittle
    agent), or an agent among the oracle's runs, two oracles, no episode that counts, or an agent that no unsteered
    user has spoken to.
    """
    if not runs:
        raise HarnessError("there is no run to report; make one with: traitbasis bench tau-trait")
    if wrong := [run for run in floor if run.header.agent.get("kind") != ORACLE]:
        kind = wrong[0].header.agent.get("kind")
        raise HarnessError(f"{wrong[0].path} is no noise floor: its agent.kind is {kind!r}, not {ORACLE!r}")
    _comparable([*runs, *floor])
    agents, oracles = _agents(runs), _agents(floor)
    if len(oracles) > 1:
        raise HarnessError(f"the noise floor is of several oracles: {', '.join(oracle.name for oracle in oracles)}")
    floors = [_identity(run) for run in floor]
    wrong = [run for run in runs if run.header.agent.get("kind") == ORACLE]
    if len(agents) > 1 and (wrong := [run for run in wrong if not floors or _identity(run) in floors]):
        raise HarnessError(f"{wrong[0].path} is an oracle's run, no agent's; give it with --floor")
    for agent in [*agents, *oracles]:
        _measurable(agent, agents)
    return agents, oracles[0] if oracles else None


# ---- Reading


def _parse(kind: type[_T], line: bytes, place: str) -> _T:
    try:
        if b"\\ud" in line.lower():  # half of a surrogate pair is no text, and a model may have been cut there
            line = json.dumps(json.loads(line), ensure_ascii=False).encode("utf-8", "replace")
        return kind.model_validate_json(line)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(map(str, first["loc"])) or "the line"
        raise HarnessError(f"{place} is damaged or not of format {FORMAT}: {field}: {first['msg']}") from None
    except ValueError as error:
        raise HarnessError(f"{place} is damaged: {error}") from None


def _settle(found: Iterable[tuple[str, Episode]]) -> Iterator[Episode]:
    """One episode for each cell, in the order of cells' first mention."""
    kept: dict[Cell, tuple[str, Episode]] = {}
    for place, episode in found:
        before = kept.get(episode.cell)
        if before and not (before[1].infrastructure or episode.infrastructure):
            raise HarnessError(
                f"{episode.cell} has two outcomes ({before[0]} and {place}); one run wrote it twice, or two runs hold "
                "it: keep the first of them"
            )
        if not before or before[1].infrastructure:
            kept[episode.cell] = place, episode
    return (episode for _, episode in kept.values())


def _tasks(run: Run) -> dict[str, tuple[str, ...]]:
    """Planned tasks by domain; where the header does not say, those that any episode has."""
    if run.header.tasks is not None:
        return dict(run.header.tasks)
    seen = dict.fromkeys((episode.domain, episode.task) for episode in run.episodes)
    return {domain: tuple(task for other, task in seen if other == domain) for domain, _ in seen}


# ---- What may be compared

# Everything that changes what a user says but for its traits. Of a field that neither run has nothing is known, and
# nothing differs.
_MODEL = ("user", "asked_for", "model", "model_fingerprint", "basis", "as", "dtype", "positions")
_USER = (*_MODEL, "persona", "sampling", "guards", "prompt", "method", "temperature")


def _comparable(runs: Sequence[Run]) -> None:
    """Raises HarnessError for the first difference between runs that is neither the agent nor the traits."""
    first = runs[0]
    traits: dict[str, tuple[dict[str, Any], Path]] = {}
    for run in runs:
        for field, mine, other in _settings(first, run):
            if mine != other:
                raise HarnessError(
                    f"{first.path} and {run.path} cannot be compared: {field} is {mine!r} in one and {other!r} in the "
                    "other, and a drop would be that difference, too; report them one by one"
                )
        for name, said in run.header.conditions.items():
            known, path = traits.setdefault(name, (said, run.path))
            if known != said:
                raise HarnessError(
                    f"{path} and {run.path} cannot be compared: the condition {name!r} has traits {known} in one and "
                    f"{said} in the other"
                )
    for field in ("model_fingerprint", "basis", "as"):  # as the replies say: a server may be another after a resume
        said_by: dict[Any, Cell] = {}
        for episode in (episode for run in runs for episode in run.episodes):
            if field in (episode.made_by or {}):
                said_by.setdefault(str((episode.made_by or {})[field]), episode.cell)
        if len(said_by) > 1:
            (one, first_cell), (two, second_cell), *_ = said_by.items()
            raise HarnessError(
                f"the user changed: its replies' {field} is {one!r} in {first_cell} and {two!r} in {second_cell}, and "
                "a drop would be that difference, too; keep the episodes of one user"
            )


def _settings(one: Run, two: Run) -> Iterator[tuple[str, Any, Any]]:
    for field in ("harness", "harness_version", "split", "max_steps"):
        yield field, getattr(one.header, field, None), getattr(two.header, field, None)
    for field in _USER:
        yield f"user.{field}", one.header.user.get(field), two.header.user.get(field)


def _agents(runs: Sequence[Run]) -> list[Agent]:
    """Runs by what their headers say of the agent; where it was reached is not part of it."""
    groups: dict[str, list[Run]] = {}
    for run in runs:
        groups.setdefault(json.dumps(_identity(run), sort_keys=True, default=str), []).append(run)
    names = _names([_identity(group[0]) for group in groups.values()])
    return [_joined(name, group) for name, group in zip(names, groups.values(), strict=True)]


def _identity(run: Run) -> dict[str, Any]:
    return {name: value for name, value in run.header.agent.items() if name != "url"}


def _names(identities: Sequence[dict[str, Any]]) -> list[str]:
    """Each agent's model, with the settings that tell it from others of that model."""
    names = []
    for identity in identities:
        name = str(identity.get("model") or identity.get("kind") or "agent")
        same = [other for other in identities if other.get("model") == identity.get("model")]
        fields = dict.fromkeys(field for other in same for field in other)
        different = [field for field in fields if len({repr(other.get(field)) for other in same}) > 1]
        said = ", ".join(f"{field} {identity.get(field)}" for field in different)
        names.append(f"{name} ({said})" if said else name)
    return names


def _joined(name: str, runs: Sequence[Run]) -> Agent:
    notes = [note for run in runs for note in run.notes]
    if len(urls := {str(run.header.agent.get("url")) for run in runs}) > 1:
        notes.append(f"{name} was reached at several addresses ({', '.join(sorted(urls))}) and is taken for one agent")
    episodes = tuple(_settle((str(run.path), episode) for run in runs for episode in run.episodes))
    if plain := [e for e in episodes if any(e.traits.values()) and _steered(e) is False]:
        notes.append(
            f"{len(plain)} episodes of {name} with traits had a user that was not steered, as its replies say (the "
            f"first: {plain[0].cell}); that is right for prompted or tuned users only"
        )
    return Agent(name, tuple(runs), episodes, tuple(notes))


def _steered(episode: Episode) -> bool | None:
    """Whether the user's reply says that it was steered; None where it says nothing."""
    said = (episode.made_by or {}).get("traits")
    return any(said.values()) if isinstance(said, dict) else None


def _measurable(agent: Agent, others: Sequence[Agent]) -> None:
    """Raises HarnessError when nothing can be said of an agent."""
    files = ", ".join(str(run.path) for run in agent.runs)
    if wrong := next((e for e in agent.episodes if e.condition == UNSTEERED and _steered(e)), None):
        raise HarnessError(
            f"{files}: the baseline was steered: the user's reply in {wrong.cell}, says traits "
            f"{(wrong.made_by or {})['traits']}; run it with a user that has none"
        )
    counted = [episode for episode in agent.episodes if not episode.infrastructure]
    if not counted:
        failed = f" {len(agent.episodes)} failed by infrastructure" if agent.episodes else ""
        raise HarnessError(f"{files}: no episode of {agent.name} says anything about it;{failed or ' there is none'}")
    if all(episode.condition != UNSTEERED for episode in counted):
        elsewhere = [o.name for o in others if any(e.condition == UNSTEERED for e in o.episodes) and o is not agent]
        hint = f" (those of {elsewhere[0]} are another agent's)" if elsewhere else ""
        raise HarnessError(
            f"{files}: {agent.name} has no episode with the {UNSTEERED} user{hint}, so there is nothing that it could "
            f"drop from; run the same tasks with the condition {UNSTEERED!r}"
        )
