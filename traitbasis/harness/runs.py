"""A run of a harness on disk: cells that are to be played, and their episodes as they end.

The format is ``traitbasis.outcomes``'. Lines are only ever appended, each forced to disk before the next cell begins,
so that a run that was killed goes on where it was: no cell is lost, and none is played twice.
"""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Literal

from traitbasis.dialogues import endpoint_seed
from traitbasis.errors import HarnessError
from traitbasis.files import alone, append_whole, write_whole
from traitbasis.outcomes import FORMAT, Cell, Episode, Header, Tokens, read_run

# How a run was asked for, where the two sides were reached, and what it costs: no other episodes come of it.
_NO_SETTINGS = {"command", "price"}


class RunFile:
    """The results file of one run, for this process alone while it is open.

    Takes the episodes that are there, and refuses a file that was made with other settings. Raises HarnessError for
    that, for a damaged file, and when another process writes it.
    """

    def __init__(self, path: Path, header: Header) -> None:
        self.path, self.header = path, header
        self._stack = ExitStack()
        self._stack.enter_context(alone(path, HarnessError))
        try:
            self.episodes = self._there()
        except BaseException:
            self.close()
            raise

    def _there(self) -> dict[Cell, Episode]:
        path = self.path
        if not path.is_file() or not path.stat().st_size:
            said = {"format": FORMAT, **self.header.model_dump(mode="json", exclude_unset=True)}
            write_whole(path, json.dumps(said, ensure_ascii=False) + "\n")
            return {}
        run = read_run(path)  # before anything is changed: it may be somebody else's file
        whole = path.read_bytes().rfind(b"\n") + 1
        if whole and whole < path.stat().st_size:  # a line that a kill cut off
            os.truncate(path, whole)
            run = read_run(path)
        found, asked = (_settings(header) for header in (run.header, self.header))
        if different := sorted(name for name in found.keys() | asked.keys() if found.get(name) != asked.get(name)):
            was = "; ".join(f"{n} was {found.get(n)!r:.200} and is {asked.get(n)!r:.200}" for n in different)
            raise HarnessError(
                f"{path} is a run with other settings ({was}); go on with those, or write elsewhere with --out"
            )
        return {episode.cell: episode for episode in run.episodes}

    def to_do(self, retry_errors: bool = True) -> list[Cell]:
        """The planned cells without an outcome, in the order they are played: a trial after the other, and of one task
        all conditions together, so that whatever is there when a run is stopped is paired.

        retry_errors: also those that an endpoint or the harness failed at.
        """
        played = {cell for cell, e in self.episodes.items() if not (e.infrastructure and retry_errors)}
        return [cell for cell in cells_of(self.header) if cell not in played]

    def append(self, cell: Cell, found: Mapping[str, Any]) -> Episode:
        """Write an episode down. found: its fields but for those of the cell. Not for several threads at once.

        What the format has no room for (a reward that is no number, a message that is no text) says nothing about the
        agent: it is a failure of the harness, and the run goes on.
        """
        about = {**cell._asdict(), "kind": "episode", "traits": self.header.conditions[cell.condition]}
        try:
            # Half of a surrogate pair is no text, and a model may have been cut there.
            found = json.loads(json.dumps(found, ensure_ascii=False).encode("utf-8", "replace"))
            episode = Episode(**about, **found)
            line = episode.model_dump_json()
        except (ValueError, TypeError, RecursionError) as error:
            text = f"what the harness gave back is no episode: {' '.join(str(error).split()):.300}"
            episode = Episode(**about, reward=0.0, success=False, ended="error", error=text, infrastructure=True)
            line = episode.model_dump_json()
        append_whole(self.path, line + "\n")
        self.episodes[cell] = episode
        return episode

    def close(self) -> None:
        self._stack.close()

    def __enter__(self) -> RunFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self.close()


def cells_of(header: Header) -> list[Cell]:
    """Every cell of a run, in the order they are played."""
    return [
        Cell(domain, task, condition, trial)
        for trial in range(header.trials)
        for domain, tasks in (header.tasks or {}).items()
        for task in tasks
        for condition in header.conditions
    ]


def seed_of(seed: int, cell: Cell) -> int:
    """The user's seed, below 2**31: another for each task and trial; conditions are paired, by having the same."""
    return endpoint_seed([seed, cell.domain, cell.task, cell.trial])


def pick_tasks(there: Mapping[str, Sequence[str]], wanted: str) -> dict[str, tuple[str, ...]]:
    """Of each domain's task ids those that are wanted: ``0-19``, ``3,7,40-45``, ids by name; everything when empty.

    A number is a place in the domain's list, beginning with 0, unless it is an id. Domains that are shorter than a
    range give what they have. Raises HarnessError for what is no task of any domain.
    """
    parts = [part.strip() for part in wanted.split(",") if part.strip()]
    found: dict[str, tuple[str, ...]] = {}
    missing = set(parts)
    for domain, ids in there.items():
        picked = dict[str, None]()
        for part in parts:
            ends = re.fullmatch(r"(\d+)(?:-(\d+))?", part)
            here = [part] if part in ids else list(ids[int(ends[1]) : int(ends[2] or ends[1]) + 1]) if ends else []
            picked.update(dict.fromkeys(here))
            missing -= {part} if here else set()
        found[domain] = tuple(picked) if parts else tuple(ids)
    if missing or not any(found.values()):
        known = "; ".join(f"{domain} has {len(ids)}, such as {ids[0]!r}" for domain, ids in there.items() if ids)
        raise HarnessError(f"no task {', '.join(map(repr, sorted(missing))) or 'is left'}: {known or 'there is none'}")
    return {domain: ids for domain, ids in found.items() if ids}


@dataclass
class Tally:
    """Episodes counted. solved: of those that are no errors. agent, user: tokens. cost: the agent's, in dollars; None
    when it is unknown of any. known: what is known of it. silent: episodes of which not all tokens are known."""

    planned: int = 0
    done: int = 0
    solved: int = 0
    errors: int = 0
    agent: Tokens = field(default_factory=Tokens)
    user: Tokens = field(default_factory=Tokens)
    cost: float | None = 0.0
    known: float = 0.0
    silent: int = 0

    def add(self, episode: Episode) -> None:
        self.done += 1
        self.solved += episode.success and not episode.infrastructure
        self.errors += episode.infrastructure
        self.agent, self.user = (_sum(mine, episode.tokens.get(side)) for side, mine in self._sides())
        self.silent += any(episode.tokens.get(side) is None for side, _ in self._sides())
        cost = episode.cost.get("agent")
        self.known += cost or 0.0
        self.cost = None if cost is None or self.cost is None else self.cost + cost

    def _sides(self) -> tuple[tuple[Literal["agent", "user"], Tokens], ...]:
        return ("agent", self.agent), ("user", self.user)


def tally(header: Header, episodes: Iterable[Episode]) -> dict[tuple[str, str], Tally]:
    """By (condition, domain), in the header's order; the totals under ``("", "")``."""
    counted = {(c, d): Tally() for c in header.conditions for d in header.tasks or {}} | {("", ""): Tally()}
    for cell in cells_of(header):
        for key in ((cell.condition, cell.domain), ("", "")):
            counted[key].planned += 1
    for episode in episodes:
        for key in ((episode.condition, episode.domain), ("", "")):
            counted[key].add(episode)
    return counted


def _settings(header: Header) -> dict[str, Any]:
    said = header.model_dump(mode="json", exclude=_NO_SETTINGS)
    return said | {side: {k: v for k, v in said[side].items() if k != "url"} for side in ("agent", "user")}


def _sum(one: Tokens, two: Tokens | None) -> Tokens:
    if two is None:
        return one
    return Tokens(prompt=one.prompt + two.prompt, completion=one.completion + two.completion)
